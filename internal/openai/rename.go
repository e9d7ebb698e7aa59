package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"slices"

	"github.com/go-json-experiment/json/jsontext"
)

// errNoObject is the error for what is no JSON object.
var errNoObject = errors.New("it is no JSON object")

// Renamed returns a JSON object with the member "model" set to model; one that has it
// already, or has no such member, is returned as it is. Only the outermost object counts.
// The error says that data is not exactly one object.
func Renamed(data []byte, model string) ([]byte, error) {
	d := jsontext.NewDecoder(bytes.NewBuffer(data), jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))
	tok, err := d.ReadToken()
	if err != nil {
		return nil, err
	}
	if tok.Kind() != '{' {
		return nil, errNoObject
	}
	start, end := 0, 0
	for d.PeekKind() != '}' {
		name, err := d.ReadToken()
		if err != nil {
			return nil, err
		}
		is := name.String() == "model"
		v, err := d.ReadValue()
		if err != nil {
			return nil, err
		}
		if is {
			end = int(d.InputOffset())
			start = end - len(v)
		}
	}
	if _, err := d.ReadToken(); err != nil {
		return nil, err
	}
	if _, err := d.ReadToken(); !errors.Is(err, io.EOF) {
		return nil, errNoObject
	}
	want, err := json.Marshal(model)
	if err != nil || end == 0 || bytes.Equal(data[start:end], want) {
		return data, err
	}
	return slices.Concat(data[:start], want, data[end:]), nil
}
