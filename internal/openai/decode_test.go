package openai

import (
	"strings"
	"testing"
)

// TestDecodeObject: errors name fields and JSON's types; Go's are nowhere.
func TestDecodeObject(t *testing.T) {
	type inner struct {
		IDs []int32 `json:"ids"`
	}
	type outer struct {
		On    bool           `json:"on"`
		N     *int           `json:"n"`
		U     uint16         `json:"u"`
		F     float64        `json:"f"`
		S     string         `json:"s"`
		Inner inner          `json:"inner"`
		List  []inner        `json:"list"`
		Map   map[string]int `json:"map"`
	}
	for raw, want := range map[string]string{
		`{"on":1}`:                  "x.on|Invalid type for 'x.on': expected a boolean, but got a number instead.",
		`{"n":"a"}`:                 "x.n|Invalid type for 'x.n': expected an integer in range, but got a string instead.",
		`{"n":1.5}`:                 "x.n|Invalid type for 'x.n': expected an integer in range, but got a number instead.",
		`{"u":65536}`:               "x.u|Invalid type for 'x.u': expected an integer in range, but got a number instead.",
		`{"f":true}`:                "x.f|Invalid type for 'x.f': expected a number, but got a boolean instead.",
		`{"s":[]}`:                  "x.s|Invalid type for 'x.s': expected a string, but got an array instead.",
		`{"inner":[]}`:              "x.inner|Invalid type for 'x.inner': expected an object, but got an array instead.",
		`{"inner":{"ids":{}}}`:      "x.inner.ids|Invalid type for 'x.inner.ids': expected an array, but got an object instead.",
		`{"list":[{"ids":["a"]}]}`:  "x.list.ids|Invalid type for 'x.list.ids': expected an integer in range, but got a string instead.",
		`{"map":7}`:                 "x.map|Invalid type for 'x.map': expected an object, but got a number instead.",
		`[]`:                        "x|Invalid type for 'x': expected an object, but got an array instead.",
		`null`:                      "x|Invalid type for 'x': expected an object, but got null instead.",
		`{"on":`:                    "x|Invalid 'x': it is no JSON.",
		`{"on":tru}`:                "x|Invalid 'x': it is no JSON.",
		`{} {}`:                     "x|Invalid 'x': there is data after the JSON object.",
		``:                          "x|Invalid type for 'x': expected an object, but got something else instead.",
		`{"n":3,"list":null}`:       "",
		`{"On":true,"more":"ok"}`:   "",
		`{"n":1e400}`:               "x.n|Invalid type for 'x.n': expected an integer in range, but got a number instead.",
		`{"list":[{"ids":[3e9]}]}`:  "x.list.ids|Invalid type for 'x.list.ids': expected an integer in range, but got a number instead.",
		`{"list":[{"ids":[null]}]}`: "",
	} {
		var into outer
		got := ""
		if err := DecodeObject([]byte(raw), "x", &into); err != nil {
			got = err.Param + "|" + err.Message
		}
		if got != want {
			t.Errorf("%s:\n%s, want\n%s", raw, got, want)
		}
		if err := DecodeObject([]byte(raw), "", &into); err != nil && (strings.Contains(err.Message, "''") || strings.Contains(err.Message, "Go ")) {
			t.Errorf("%s as a body: %s", raw, err.Message)
		}
	}
	for raw, want := range map[string]string{
		`{"list":[{"ids":[5]},{"ids":[5,null]}]}`: "x.list[1].ids[1]", `[null]`: "x[0]", `{"a":1,"a":[[null]]}`: "x.a[0][0]",
		`{"a":null,"b":"[null]"}`: "", `[5,"null"]`: "", `[5,nul`: "", `[1,`: "",
	} {
		got := ""
		if err := RefuseNulls([]byte(raw), "x"); err != nil {
			got = err.Param
		}
		if got != want {
			t.Errorf("%s: a null at %q, want %q", raw, got, want)
		}
	}
	if err := DecodeStrict([]byte(`{"nn":1}`), "", new(outer)); err == nil || err.Param != "nn" || err.Message != "Unknown field 'nn'." {
		t.Errorf("an unknown field: %+v", err)
	}
}
