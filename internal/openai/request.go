package openai

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/go-json-experiment/json/jsontext"
)

// Endpoint is one of the API's generation endpoints, those whose body the mesh
// parses.
type Endpoint string

// The endpoints the mesh parses, by path.
const (
	Chat        Endpoint = "/v1/chat/completions"
	Completions Endpoint = "/v1/completions"
)

// EndpointOf returns the endpoint of a path (query already removed), or false
// for a path that passes through unparsed.
func EndpointOf(path string) (Endpoint, bool) {
	switch e := Endpoint(path); e {
	case Chat, Completions:
		return e, true
	}
	return "", false
}

// Request is a parsed generation request. The byte slices alias the body given
// to Parse. It is read-only after Parse and safe for concurrent readers.
type Request struct {
	Endpoint     Endpoint
	Model        string
	Stream       bool
	IncludeUsage bool // stream_options.include_usage
	MaxTokens    int  // max_tokens or max_completion_tokens, 0 = not given
	N            int  // choices, at least 1
	Temperature  float64
	TopP         float64
	TopK         int
	MinP         float64
	Presence     float64
	Frequency    float64
	Repetition   float64 // repetition_penalty over prompt and answer, 1 = off
	LogitBias    map[int32]float64
	Seed         *int64
	Stop         []string
	TopLogprobs  int // -1 = no logprobs
	Echo         bool
	IgnoreEOS    bool // vLLM's ignore_eos
	User         string
	Sim          []byte // body field "sim", for the simulator

	NoGenerationPrompt bool // the chat template ends with the last message (vLLM's add_generation_prompt false)
	NoSpecial          bool // the prompt gets no BOS; only ParseTokenize sets it

	body    []byte
	fields  []field
	prompts func() ([]Prompt, *Error) // decodes once, see DecodePrompts
}

// field is one top-level member of the body.
type field struct {
	name       string
	start, end int // of the value, in body
}

// Raw returns the raw JSON of a top-level field, nil when absent or null.
func (r *Request) Raw(name string) []byte {
	for _, f := range r.fields {
		if f.name == name {
			v := r.body[f.start:f.end]
			if string(v) == "null" {
				return nil
			}
			return v
		}
	}
	return nil
}

// Has reports whether the body has a top-level field, be it null.
func (r *Request) Has(name string) bool {
	return slices.ContainsFunc(r.fields, func(f field) bool { return f.name == name })
}

// Parse reads a request body. It refuses what no worker could serve: malformed
// JSON, non-UTF-8, duplicate names, a missing model, wrong types and values out
// of range; fields it does not know pass. Large fields are checked for their
// JSON kind only (see DecodeMessages, DecodePrompts).
func Parse(ep Endpoint, body []byte) (*Request, *Error) {
	r := &Request{Endpoint: ep, N: 1, Temperature: 1, TopP: 1, Repetition: 1, TopLogprobs: -1, body: body}
	r.prompts = sync.OnceValues(r.decodePrompts)
	if err := r.scan(); err != nil {
		return nil, err
	}
	if err := r.decode(); err != nil {
		return nil, err
	}
	return r, nil
}

// scan finds the top-level fields.
func (r *Request) scan() *Error {
	d := jsontext.NewDecoder(bytes.NewBuffer(r.body))
	tok, err := d.ReadToken()
	if err != nil {
		return malformed(err)
	}
	if tok.Kind() != '{' {
		return Errorf(http.StatusBadRequest, "The request body must be a JSON object, not %s.", kindName(tok.Kind()))
	}
	r.fields = make([]field, 0, 16)
	for d.PeekKind() != '}' {
		name, err := d.ReadToken()
		if err != nil {
			return malformed(err)
		}
		f := field{name: name.String()}
		v, err := d.ReadValue()
		if err != nil {
			return malformed(err)
		}
		f.end = int(d.InputOffset())
		f.start = f.end - len(v)
		r.fields = append(r.fields, f)
	}
	if _, err := d.ReadToken(); err != nil {
		return malformed(err)
	}
	if _, err := d.ReadToken(); !errors.Is(err, io.EOF) {
		return Errorf(http.StatusBadRequest, "The request body has data after the JSON object.")
	}
	return nil
}

// malformed words a syntax error. No field is named, since none was read whole.
func malformed(err error) *Error {
	if s, ok := errors.AsType[*jsontext.SyntacticError](err); ok && errors.Is(err, jsontext.ErrDuplicateName) {
		return Errorf(http.StatusBadRequest, "The request body has the field %q twice.", clip(s.JSONPointer.LastToken()))
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return Errorf(http.StatusBadRequest, "We could not parse the JSON body of your request: it ends too early.")
	}
	s, ok := errors.AsType[*jsontext.SyntacticError](err)
	if !ok || s.Err == nil {
		return Errorf(http.StatusBadRequest, "We could not parse the JSON body of your request.")
	}
	why := strings.TrimPrefix(s.Err.Error(), "jsontext: ") // our library's name helps nobody
	return Errorf(http.StatusBadRequest, "We could not parse the JSON body of your request: %s after byte %d.", why, s.ByteOffset)
}

// decode fills the typed fields.
func (r *Request) decode() *Error {
	p := fieldParser{r: r}
	r.Model = p.str("model")
	if p.err == nil && r.Model == "" {
		p.fail("model", "You must provide a model parameter.")
	}
	r.Stream = p.boolean("stream")
	r.Echo = p.boolean("echo")
	r.IgnoreEOS = p.boolean("ignore_eos")
	r.User = p.str("user")
	p.str("suffix") // the engine's to use or not
	r.MaxTokens = p.integer("max_tokens", 0, 1, 1<<30)
	r.MaxTokens = p.integer("max_completion_tokens", r.MaxTokens, 1, 1<<30)
	r.N = p.integer("n", 1, 1, 128)
	if best := p.integer("best_of", r.N, 1, 128); best != r.N {
		p.fail("best_of", "best_of other than n is not supported.")
	}
	r.Temperature = p.number("temperature", 1, 0, 2)
	r.TopP = p.number("top_p", 1, 0, 1)
	r.TopK = max(p.integer("top_k", 0, -1, 1<<30), 0)
	r.MinP = p.number("min_p", 0, 0, 1)
	r.Presence = p.number("presence_penalty", 0, -2, 2)
	r.Frequency = p.number("frequency_penalty", 0, -2, 2)
	r.Repetition = p.number("repetition_penalty", 1, 0.01, 100)
	if raw := r.Raw("seed"); raw != nil {
		n := int64(p.integer("seed", 0, -1<<63, 1<<63-1))
		r.Seed = &n
	}
	p.logprobs()
	p.stop()
	p.logitBias()
	p.streamOptions()
	r.chatTemplate(&p)
	p.input()
	r.Sim = r.Raw("sim")
	return p.err
}

// ReservedField is the top-level field by which the relay speaks to workers. A
// client's own is removed by Rewritten.
const ReservedField = "kvmesh"

// Rewritten returns the body with another model and, when maxTokens > 0, another
// limit of tokens, and without ReservedField, leaving every other byte as it is.
// The original body is returned when nothing changes.
func (r *Request) Rewritten(model string, maxTokens int) []byte {
	type edit struct {
		start, end int
		text       []byte
	}
	var edits []edit
	limited := false
	for i, f := range r.fields {
		switch f.name {
		case ReservedField:
			start, end := r.member(i)
			edits = append(edits, edit{start, end, nil})
		case "model":
			if model != r.Model {
				text, _ := json.Marshal(model) // a string always marshals
				edits = append(edits, edit{f.start, f.end, text})
			}
		case "max_tokens", "max_completion_tokens":
			limited = true
			if maxTokens > 0 && r.MaxTokens != maxTokens {
				edits = append(edits, edit{f.start, f.end, strconv.AppendInt(nil, int64(maxTokens), 10)})
			}
		}
	}
	if maxTokens > 0 && !limited {
		at := bytes.IndexByte(r.body, '{') + 1
		edits = append(edits, edit{at, at, fmt.Appendf(nil, `"max_tokens":%d,`, maxTokens)})
	}
	if len(edits) == 0 {
		return r.body
	}
	slices.SortFunc(edits, func(a, b edit) int { return cmp.Or(a.start-b.start, a.end-b.end) })
	out := make([]byte, 0, len(r.body)+64)
	at := 0
	for _, e := range edits {
		out = append(append(out, r.body[at:e.start]...), e.text...)
		at = e.end
	}
	return append(out, r.body[at:]...)
}

// member returns the byte range of the i-th field with its name and the comma
// that sets it apart from the others.
func (r *Request) member(i int) (start, end int) {
	end = r.fields[i].end
	if i > 0 {
		return r.fields[i-1].end, end
	}
	if len(r.fields) > 1 {
		end += bytes.IndexByte(r.body[end:], ',') + 1 // only white space stands before it
	}
	return bytes.IndexByte(r.body, '{') + 1, end
}

// Without returns the body without the top-level fields of those names.
func (r *Request) Without(names ...string) []byte {
	out := append(make([]byte, 0, len(r.body)), '{')
	for _, f := range r.fields {
		if slices.Contains(names, f.name) {
			continue
		}
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(AppendString(out, []byte(f.name)), ':')
		out = append(out, r.body[f.start:f.end]...)
	}
	return append(out, '}')
}

// completionsDefault is the limit of tokens of Completions when the client gives none.
// Chat has no such default: there the rest of the context is allowed.
const completionsDefault = 16

// Clamp returns the limit of tokens to put into the body where at most that many are
// allowed, 0 for no limit; 0 leaves the body's own alone.
func (r *Request) Clamp(most int) int {
	asked := r.MaxTokens
	if asked == 0 && r.Endpoint == Completions {
		asked = completionsDefault
	}
	if most == 0 || asked != 0 && asked <= most {
		return 0
	}
	return most
}
