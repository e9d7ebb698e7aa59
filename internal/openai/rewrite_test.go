package openai

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestRewritten(t *testing.T) {
	for _, tc := range []struct {
		name, in, model string
		max             int
		want            string
	}{
		{"nothing", `{"model":"a","prompt":"p"}`, "a", 0, `{"model":"a","prompt":"p"}`},
		{"model", `{ "prompt" : "p", "model" : "a" }`, `b"`, 0, `{ "prompt" : "p", "model" : "b\"" }`},
		{"limit added", `{"model":"a","prompt":"p"}`, "a", 7, `{"max_tokens":7,"model":"a","prompt":"p"}`},
		{"limit changed", `{"max_tokens": 9,"model":"a","prompt":"p"}`, "b", 7, `{"max_tokens": 7,"model":"b","prompt":"p"}`},
		{"null limit", `{"max_tokens":null,"model":"a","prompt":"p"}`, "a", 7, `{"max_tokens":7,"model":"a","prompt":"p"}`},
		{"reserved first", `{ "kvmesh" : {"a":[1,2]} , "model":"a","prompt":"p"}`, "a", 0, `{ "model":"a","prompt":"p"}`},
		{"reserved inside", `{"model":"a", "kvmesh":null , "prompt":"p"}`, "a", 0, `{"model":"a" , "prompt":"p"}`},
		{"reserved last", `{"model":"a","prompt":"p", "\u006bvmesh":1 }`, "a", 0, `{"model":"a","prompt":"p" }`},
		{"all at once", `{"kvmesh":1,"model":"a","prompt":"p"}`, "b", 7, `{"max_tokens":7,"model":"b","prompt":"p"}`},
		{"case counts", `{"model":"a","prompt":"p","KVMESH":1}`, "a", 0, `{"model":"a","prompt":"p","KVMESH":1}`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r, err := Parse(Completions, []byte(tc.in))
			if err != nil {
				t.Fatal(err)
			}
			if got := string(r.Rewritten(tc.model, tc.max)); got != tc.want {
				t.Errorf("rewritten to\n%s, want\n%s", got, tc.want)
			}
		})
	}
}

// FuzzRewritten checks that a rewritten body parses to the model and limit it was
// given, without the reserved field, and keeps all others.
func FuzzRewritten(f *testing.F) {
	f.Add(`{"model":"a","prompt":"p","kvmesh":{"x":1}}`, "b", 3)
	f.Add(`{"kvmesh":1 ,"prompt":["p"],"model":"a","max_completion_tokens":5}`, "b", 0)
	f.Fuzz(func(t *testing.T, body, model string, limit int) {
		limit = max(limit%1000, 0)
		if model == "" || len(body) > 1<<12 || strings.ToValidUTF8(model, "") != model {
			t.Skip()
		}
		r, err := Parse(Completions, []byte(body))
		if err != nil {
			t.Skip()
		}
		out := r.Rewritten(model, limit)
		got, err := Parse(Completions, out)
		if err != nil {
			t.Fatalf("%q became %q: %v", body, out, err)
		}
		if got.Model != model || limit > 0 && got.MaxTokens != limit || limit == 0 && got.MaxTokens != r.MaxTokens {
			t.Errorf("%q became %q: model %q, limit %d", body, out, got.Model, got.MaxTokens)
		}
		var before, after map[string]json.RawMessage
		if json.Unmarshal([]byte(body), &before) != nil || json.Unmarshal(out, &after) != nil {
			t.Fatalf("%q or %q is no object", body, out)
		}
		if _, ok := after[ReservedField]; ok {
			t.Errorf("%q kept %s", out, ReservedField)
		}
		for name, v := range before {
			switch name {
			case ReservedField, "model", "max_tokens", "max_completion_tokens":
			default:
				if string(after[name]) != string(v) {
					t.Errorf("%s: %s became %s", name, v, after[name])
				}
			}
		}
	})
}
