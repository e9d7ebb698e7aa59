package openai

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestInsertedFields(t *testing.T) {
	for _, ep := range []Endpoint{Chat, Completions} {
		c := NewChunks(Answer{Endpoint: ep, ID: "x\"[{", Model: "m"}, true)
		buf := []byte("data: before\n\n")
		at := len(buf)
		buf = c.AppendText(buf, 3, []byte("hi"), nil)
		buf = c.InsertTokens(buf, at, []int32{7, 0, 262143})
		buf = c.InsertKV(buf, at, "exact", 64, 2)
		buf = c.AppendFinish(buf, 3, "stop")
		event := strings.TrimPrefix(strings.Split(string(buf), "\n\n")[1], "data: ")
		var got struct {
			Choices []struct {
				Index    int     `json:"index"`
				TokenIDs []int32 `json:"token_ids"`
				Mesh     struct {
					KV                 string
					Restored, Computed int
				} `json:"kvmesh"`
			}
		}
		if err := json.Unmarshal([]byte(event), &got); err != nil {
			t.Fatalf("%v in %s", err, event)
		}
		ch := got.Choices[0]
		if ch.Index != 3 || len(ch.TokenIDs) != 3 || ch.TokenIDs[2] != 262143 || ch.Mesh.KV != "exact" || ch.Mesh.Restored != 64 || ch.Mesh.Computed != 2 {
			t.Errorf("%+v from %s", ch, event)
		}
	}
}
