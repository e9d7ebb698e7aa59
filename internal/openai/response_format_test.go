package openai

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestDecodeResponseFormat(t *testing.T) {
	decode := func(field string) (ResponseFormat, *Error) {
		return mustParse(t, Chat, `{"model":"m",`+hi+field+`}`).DecodeResponseFormat()
	}
	for field, want := range map[string]ResponseFormat{
		``:                                   {Type: "text"},
		`,"response_format":null`:            {Type: "text"},
		`,"response_format":{"type":"text"}`: {Type: "text"},
		`,"response_format":{"type":"json_object"}`: {Type: "json_object"},
		`,"response_format":{"type":"json_schema","json_schema":{"name":"a-B_1","description":"d","schema":{"type":"object"},"strict":true}}`: {
			Type: "json_schema", Name: "a-B_1", Schema: []byte(`{"type":"object"}`), Strict: true,
		},
		`,"response_format":{"type":"json_schema","json_schema":{"name":"x","strict":null}}`: {Type: "json_schema", Name: "x"},
	} {
		if got, err := decode(field); err != nil || !cmp.Equal(got, want) {
			t.Errorf("%s: %+v, %v; want %+v", field, got, err, want)
		}
	}
	for field, param := range map[string]string{
		`"json"`:                 "response_format",
		`{}`:                     "response_format.type",
		`{"type":1}`:             "response_format.type",
		`{"type":"xml"}`:         "response_format.type",
		`{"type":"json_schema"}`: "response_format.json_schema",
		`{"type":"json_schema","json_schema":[]}`:                         "response_format.json_schema",
		`{"type":"json_schema","json_schema":{"schema":{}}}`:              "response_format.json_schema.name",
		`{"type":"json_schema","json_schema":{"name":"a b","schema":{}}}`: "response_format.json_schema.name",
		`{"type":"json_schema","json_schema":{"name":"a","strict":true}}`: "response_format.json_schema.schema",
	} {
		if _, err := decode(`,"response_format":` + field); err == nil || err.Status != 400 || err.Param != param {
			t.Errorf("%s: %v, want param %q", field, err, param)
		}
	}
}
