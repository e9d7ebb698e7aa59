package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"reflect"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
)

// DecodeObject decodes the JSON object of the request's field param, "" for the whole
// body. Fields that into does not have pass. Errors name the field at fault and JSON's
// types, not ours.
func DecodeObject(raw []byte, param string, into any) *Error {
	return decodeObject(raw, param, into, false)
}

// DecodeStrict is DecodeObject that refuses fields which into does not have.
func DecodeStrict(raw []byte, param string, into any) *Error {
	return decodeObject(raw, param, into, true)
}

func decodeObject(raw []byte, param string, into any, strict bool) *Error {
	if kind := jsontext.Value(raw).Kind(); kind != '{' {
		return misfit(param, "an object", kindName(kind))
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	if strict {
		d.DisallowUnknownFields()
	}
	if err := d.Decode(into); err != nil {
		return undecoded(param, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return inField(param, "there is data after the JSON object")
	}
	return nil
}

// RefuseNulls is the error for a null among the elements of an array in raw, which
// encoding/json takes for a zero, and names its place in the request, in which raw is
// param. It is nil where there is none, and where raw is no JSON.
func RefuseNulls(raw []byte, param string) *Error {
	if !bytes.Contains(raw, []byte("null")) {
		return nil
	}
	d := jsontext.NewDecoder(bytes.NewReader(raw), jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))
	for {
		tok, err := d.ReadToken()
		if err != nil {
			return nil
		}
		if kind, _ := d.StackIndex(d.StackDepth()); tok.Kind() == 'n' && kind == '[' {
			at := placeOf(d, param)
			return Invalid(at, "Invalid type for '%s': expected a value, but got null instead.", at)
		}
	}
}

// placeOf is where d is in the field param, such as a[0].b.
func placeOf(d *jsontext.Decoder, param string) string {
	level := 0
	for step := range d.StackPointer().Tokens() {
		level++
		if kind, _ := d.StackIndex(level); kind == '[' {
			param += "[" + step + "]"
		} else {
			param = within(param, clip(step))
		}
	}
	return param
}

// undecoded words an error of encoding/json, which speaks of Go's types.
func undecoded(param string, err error) *Error {
	if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		kind, _, _ := strings.Cut(e.Value, " ") // behind it is the number
		return misfit(within(param, e.Field), goKind(e.Type), article(strings.Replace(kind, "bool", "boolean", 1)))
	}
	if _, name, ok := strings.Cut(err.Error(), "unknown field "); ok {
		at := within(param, strings.Trim(name, `"`))
		return Invalid(at, "Unknown field '%s'.", clip(at))
	}
	return inField(param, "it is no JSON")
}

// within is the place of a field of param.
func within(param, field string) string {
	return strings.Trim(param+"."+field, ".")
}

// inField is a 400 about the field param, or about the body.
func inField(param, why string) *Error {
	if param == "" {
		return Errorf(http.StatusBadRequest, "Invalid request body: %s.", why)
	}
	return Invalid(param, "Invalid '%s': %s.", clip(param), why)
}

// misfit is a 400 about the JSON kind of the field param, or of the body.
func misfit(param, want, got string) *Error {
	if param == "" {
		return Errorf(http.StatusBadRequest, "The request body must be %s, but it is %s.", want, got)
	}
	return Invalid(param, "Invalid type for '%s': expected %s, but got %s instead.", clip(param), want, got)
}

// goKind is in JSON's words what a Go type takes.
func goKind(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Pointer:
		return goKind(t.Elem())
	case reflect.Bool:
		return "a boolean"
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return "an integer in range"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Slice, reflect.Array:
		return "an array"
	case reflect.Struct, reflect.Map:
		return "an object"
	}
	return "a string"
}

// article puts "a" or "an" before a kind.
func article(kind string) string {
	if kind == "array" || kind == "object" {
		return "an " + kind
	}
	return "a " + kind
}
