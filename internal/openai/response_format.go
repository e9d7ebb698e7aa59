package openai

import (
	"encoding/json"

	"github.com/go-json-experiment/json/jsontext"
)

// The kinds of ResponseFormat.
const (
	FormatText   = "text"
	FormatObject = "json_object"
	FormatSchema = "json_schema"
)

// SchemaParam is the place of a schema in a request.
const SchemaParam = "response_format.json_schema.schema"

// ResponseFormat is the decoded field response_format.
type ResponseFormat struct {
	Type   string // FormatText when the field is absent
	Name   string // of the schema
	Schema []byte // JSON, nil = any object
	Strict bool
}

// DecodeResponseFormat decodes response_format. The schema itself is not checked.
func (r *Request) DecodeResponseFormat() (ResponseFormat, *Error) {
	const param = "response_format"
	f := ResponseFormat{Type: FormatText}
	raw := r.Raw(param)
	if raw == nil {
		return f, nil
	}
	if jsontext.Value(raw).Kind() != '{' {
		return f, Invalid(param, "Invalid type for '%s': expected an object, but got %s instead.", param, kindName(jsontext.Value(raw).Kind()))
	}
	var body struct {
		Type   *string         `json:"type"`
		Schema json.RawMessage `json:"json_schema"`
	}
	if json.Unmarshal(raw, &body) != nil {
		return f, Invalid(param+".type", "Invalid type for '%s.type': expected a string.", param)
	}
	if body.Type == nil {
		return f, Invalid(param+".type", "Missing required parameter: '%s.type'.", param)
	}
	switch f.Type = *body.Type; f.Type {
	case FormatText, FormatObject:
		return f, nil
	case FormatSchema:
		return f, f.decodeSchema(body.Schema)
	}
	return f, Invalid(param+".type", "Invalid value: '%s'. Supported values are: 'text', 'json_object' and 'json_schema'.", clip(f.Type))
}

// decodeSchema reads the member json_schema.
func (f *ResponseFormat) decodeSchema(raw []byte) *Error {
	const param = "response_format.json_schema"
	if raw == nil || string(raw) == "null" {
		return Invalid(param, "Missing required parameter: '%s'.", param)
	}
	var s struct {
		Name   string          `json:"name"`
		Schema json.RawMessage `json:"schema"`
		Strict *bool           `json:"strict"`
	}
	if jsontext.Value(raw).Kind() != '{' || json.Unmarshal(raw, &s) != nil {
		return Invalid(param, "Invalid '%s': expected an object with 'name', 'schema' and 'strict'.", param)
	}
	if !isName(s.Name) {
		return Invalid(param+".name", "Invalid '%s.name': expected 1 to 64 letters, digits, underscores and dashes.", param)
	}
	f.Name, f.Strict = s.Name, s.Strict != nil && *s.Strict
	if s.Schema != nil && string(s.Schema) != "null" {
		f.Schema = s.Schema
	}
	if f.Strict && f.Schema == nil {
		return Invalid(SchemaParam, "Missing required parameter: '%s'.", SchemaParam)
	}
	return nil
}

// isName reports whether s may name a schema or a function.
func isName(s string) bool {
	if s == "" || len(s) > 64 {
		return false
	}
	for _, c := range []byte(s) {
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '-' {
			continue
		}
		return false
	}
	return true
}
