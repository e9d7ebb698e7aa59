package openai

import (
	"bytes"
	"encoding/json"
	"testing"
)

func TestRenamed(t *testing.T) {
	for in, want := range map[string]string{
		`{"id":"x","model":"up","choices":[{"model":"up"}]}`: `{"id":"x","model":"mine","choices":[{"model":"up"}]}`,
		` {"model" : null , "a":1}` + "\n":                   ` {"model" : "mine" , "a":1}` + "\n",
		`{"model":"mine"}`:                                   `{"model":"mine"}`,
		`{"a":{"model":"up"}}`:                               `{"a":{"model":"up"}}`,
		`{}`:                                                 `{}`,
		`[]`:                                                 "", `{"model":`: "", `{"a":1}{`: "", `hello`: "", ``: "",
	} {
		got, err := Renamed([]byte(in), "mine")
		if string(got) != want || (err != nil) != (want == "") {
			t.Errorf("%s becomes %s, %v", in, got, err)
		}
	}
}

// FuzzRenamed: what comes out is an object with the name where the input was one, and
// nothing else has changed.
func FuzzRenamed(f *testing.F) {
	f.Add([]byte(`{"id":"x","model":"up","choices":[]}`))
	f.Add([]byte(`{"model":{},"x":"\u0000"}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		got, err := Renamed(in, "mine")
		if err != nil {
			return
		}
		var before, after map[string]json.RawMessage
		if json.Unmarshal(in, &before) != nil {
			return // duplicate names and the like, which the two readers see differently
		}
		if err := json.Unmarshal(got, &after); err != nil {
			t.Fatalf("%q becomes %q: %v", in, got, err)
		}
		for name, v := range after {
			if name == "model" && string(v) != `"mine"` || name != "model" && !bytes.Equal(v, before[name]) {
				t.Fatalf("%q becomes %q", in, got)
			}
		}
	})
}
