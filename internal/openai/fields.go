package openai

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
)

// fieldParser reads typed values out of a scanned request and keeps the first
// error; after it every call returns the default.
type fieldParser struct {
	r   *Request
	err *Error
}

// fail keeps the first error: the one that a client should mend first.
func (p *fieldParser) fail(param, format string, args ...any) {
	if p.err == nil {
		p.err = Invalid(param, format, args...)
	}
}

// wrongType reports a value of the wrong JSON kind.
func (p *fieldParser) wrongType(param, want string, raw []byte) {
	p.fail(param, "Invalid type for '%s': expected %s, but got %s instead.", param, want, kindName(jsontext.Value(raw).Kind()))
}

// raw returns a field of the wanted JSON kind, nil when it is absent, null or wrong.
func (p *fieldParser) raw(name string, kind jsontext.Kind, want string) []byte {
	if p.err != nil {
		return nil
	}
	raw := p.r.Raw(name)
	if raw == nil {
		return nil
	}
	got := jsontext.Value(raw).Kind()
	if got == 'f' {
		got = 't'
	}
	if got != kind {
		p.wrongType(name, want, raw)
		return nil
	}
	return raw
}

// str reads a string, "" when absent.
func (p *fieldParser) str(name string) string {
	return unquote(p.raw(name, '"', "a string"))
}

// boolean reads a boolean, false when absent.
func (p *fieldParser) boolean(name string) bool {
	return string(p.raw(name, 't', "a boolean")) == "true"
}

// integer reads a whole number within bounds. 1.0 and 1e3 are refused: a
// client that sends them has a bug that it should hear about.
func (p *fieldParser) integer(name string, def, low, high int) int {
	raw := p.raw(name, '0', "an integer")
	if raw == nil {
		return def
	}
	n, err := strconv.ParseInt(string(raw), 10, 64)
	if err != nil {
		p.fail(name, "Invalid value for '%s': expected an integer, but got %s.", name, clip(string(raw)))
		return def
	}
	if int(n) < low || int(n) > high {
		p.fail(name, "Invalid value for '%s': %d is outside the allowed range%s.", name, n, span(int(n), low, high))
		return def
	}
	return int(n)
}

// span words a range that n is outside of. Of one whose upper bound is only there for
// overflow it says the bound that n passed.
func span(n, low, high int) string {
	switch {
	case high < 1<<30:
		return fmt.Sprintf(" %d to %d", low, high)
	case n > high:
		return fmt.Sprintf(": must be at most %d", high)
	}
	return fmt.Sprintf(": must be at least %d", low)
}

// number reads a number within bounds; one that no float holds is out of them.
func (p *fieldParser) number(name string, def, low, high float64) float64 {
	raw := p.raw(name, '0', "a number")
	if raw == nil {
		return def
	}
	n, err := strconv.ParseFloat(string(raw), 64)
	if err != nil || math.IsInf(n, 0) || n < low || n > high {
		p.fail(name, "Invalid value for '%s': %s is outside the allowed range %g to %g.", name, clip(string(raw)), low, high)
		return def
	}
	return n
}

// logprobs reads the two spellings: an integer (completions), or a boolean with
// top_logprobs (chat).
func (p *fieldParser) logprobs() {
	if p.r.Endpoint == Completions {
		p.r.TopLogprobs = p.integer("logprobs", -1, 0, 20)
		return
	}
	on := p.boolean("logprobs")
	top := p.integer("top_logprobs", 0, 0, 20)
	switch {
	case on:
		p.r.TopLogprobs = top
	case top > 0:
		p.fail("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
	}
}

// longestStop bounds a stop string, in bytes: the worker may have to hold back
// that much text of each choice.
const longestStop = 4096

// stop reads a string or a list of up to 16 strings.
func (p *fieldParser) stop() {
	raw := p.r.Raw("stop")
	if raw == nil || p.err != nil {
		return
	}
	switch jsontext.Value(raw).Kind() {
	case '"':
		p.r.Stop = []string{unquote(raw)}
	case '[':
		if json.Unmarshal(raw, &p.r.Stop) != nil || len(p.r.Stop) > 16 {
			p.fail("stop", "Invalid value for 'stop': expected a string or up to 16 strings.")
		}
	default:
		p.wrongType("stop", "a string or an array of strings", raw)
	}
	for _, s := range p.r.Stop {
		if s == "" {
			p.fail("stop", "Invalid value for 'stop': an empty string never ends anything.")
		}
		if len(s) > longestStop {
			p.fail("stop", "Invalid value for 'stop': a string of %d bytes, at most %d are allowed.", len(s), longestStop)
		}
	}
}

// logitBias reads the map of token ids, which JSON spells as strings.
func (p *fieldParser) logitBias() {
	raw := p.raw("logit_bias", '{', "an object")
	if raw == nil {
		return
	}
	var m map[string]float64
	if json.Unmarshal(raw, &m) != nil {
		p.fail("logit_bias", "Invalid value for 'logit_bias': expected token ids with numbers from -100 to 100.")
		return
	}
	p.r.LogitBias = make(map[int32]float64, len(m))
	// In order: two spellings of one id, and two that are wrong, have one outcome.
	for _, k := range slices.Sorted(maps.Keys(m)) {
		v := m[k]
		id, err := strconv.ParseInt(k, 10, 32)
		if err != nil || id < 0 || v < -100 || v > 100 {
			p.fail("logit_bias", "Invalid value for 'logit_bias': %q: %g; want a token id and -100 to 100.", clip(k), v)
			return
		}
		p.r.LogitBias[int32(id)] = v
	}
}

// streamOptions is refused without stream, as OpenAI does.
func (p *fieldParser) streamOptions() {
	raw := p.raw("stream_options", '{', "an object")
	if raw == nil {
		return
	}
	if !p.r.Stream {
		p.fail("stream_options", "The 'stream_options' parameter is only allowed when 'stream' is enabled.")
		return
	}
	var o struct {
		IncludeUsage *bool `json:"include_usage"`
	}
	if json.Unmarshal(raw, &o) != nil {
		p.fail("stream_options.include_usage", "Invalid type for 'stream_options.include_usage': expected a boolean.")
		return
	}
	p.r.IncludeUsage = o.IncludeUsage != nil && *o.IncludeUsage
}

// input checks that the endpoint's main field is there and of a possible kind.
func (p *fieldParser) input() {
	if p.err != nil {
		return
	}
	if p.r.Endpoint == Chat {
		raw := p.raw("messages", '[', "an array of objects")
		if p.err == nil && raw == nil {
			p.fail("messages", "Missing required parameter: 'messages'.")
		} else if p.err == nil && isEmptyArray(raw) {
			p.fail("messages", "Invalid 'messages': empty array. Expected at least one message.")
		}
		return
	}
	raw := p.r.Raw("prompt")
	switch {
	case raw == nil:
		p.fail("prompt", "Missing required parameter: 'prompt'.")
	case jsontext.Value(raw).Kind() != '"' && jsontext.Value(raw).Kind() != '[':
		p.wrongType("prompt", "a string, an array of strings, or token ids", raw)
	case isEmptyArray(raw):
		p.fail("prompt", "Invalid 'prompt': empty array.")
	}
}

// isEmptyArray looks at the first bytes only. An empty array behind more spaces
// than that is found when the field is decoded.
func isEmptyArray(raw []byte) bool {
	return len(raw) > 1 && raw[0] == '[' && strings.TrimSpace(string(raw[1:min(len(raw), 64)])) == "]"
}

// unquote decodes a JSON string that jsontext has already checked.
func unquote(raw []byte) string {
	if len(raw) < 2 {
		return ""
	}
	b, err := jsontext.AppendUnquote(nil, raw)
	if err != nil || !utf8.Valid(b) {
		return ""
	}
	return string(b)
}

// kindName is a JSON kind in words.
func kindName(k jsontext.Kind) string {
	switch k {
	case 'n':
		return "null"
	case 't', 'f':
		return "a boolean"
	case '"':
		return "a string"
	case '0':
		return "a number"
	case '[':
		return "an array"
	case '{':
		return "an object"
	}
	return "something else"
}
