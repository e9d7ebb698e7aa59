package worker

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"regexp"
	"strings"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// ToolFormat is how a model writes calls of tools.
type ToolFormat string

// The formats that are read. A model whose template has tools in another form
// counts as one without tools.
const (
	NoTools ToolFormat = ""
	// Hermes (also Qwen): <tool_call>{"name":…,"arguments":{…}}</tool_call>, repeated.
	Hermes ToolFormat = "hermes"
	// Llama3: the whole answer is {"name":…,"parameters":{…}}, several after ";".
	Llama3 ToolFormat = "llama3"
	// Mistral: [TOOL_CALLS][{"name":…,"arguments":{…}}, …].
	Mistral ToolFormat = "mistral"
)

// Begin is the text that begins calls, "" when they are told by their form only.
func (f ToolFormat) Begin() string {
	switch f {
	case Hermes:
		return "<tool_call>"
	case Mistral:
		return "[TOOL_CALLS]"
	}
	return ""
}

// toolReader turns the text of an answer into content and tool calls, as it comes.
// What it says in total depends on the text alone, never on how it is cut, so that
// a continuation tells it again what was delivered. Not safe for concurrent use.
type toolReader struct {
	format  ToolFormat
	known   func(name string) bool
	guarded bool          // a grammar makes calls well formed: arguments may be sent as they come
	mark    int32         // control token that stands for Begin and has no text, -1 = none
	named   bool          // the client named the function
	key     func() []byte // of the ids of calls

	state   readState
	held    []byte // text that is not decided yet
	call    callReader
	calls   int  // begun so far
	content bool // some was sent
}

// readState is where a toolReader is.
type readState int

const (
	inContent readState = iota // looking for a call
	inCall
	afterCall // looking for another
)

// newToolReader makes the reader of one choice.
func newToolReader(format ToolFormat, tools []openai.Tool, key func() []byte) *toolReader {
	names := make(map[string]bool, len(tools))
	for _, t := range tools {
		names[t.Name] = true
	}
	return &toolReader{format: format, known: func(n string) bool { return names[n] }, mark: -1, key: key}
}

// callID names call n of a choice: unguessable enough to be unique, and the same
// wherever the choice is continued.
func callID(key []byte, n int) string {
	sum := sha256.Sum256(binary.BigEndian.AppendUint32(bytes.Clone(key), uint32(n)))
	return "call_" + hex.EncodeToString(sum[:12])
}

// push takes text and returns what it adds. The results are valid until the next
// call. last says that no more comes.
func (r *toolReader) push(text []byte, last bool) (content []byte, calls []openai.ToolCallDelta) {
	r.held = append(r.held, text...)
	for {
		before, at := len(r.held), r.state
		if r.state == inCall {
			var again []byte
			calls, again = r.read(calls, last)
			content = append(content, again...)
		} else {
			content = append(content, r.seek(last)...)
		}
		if r.state == at && len(r.held) == before {
			return content, calls
		}
	}
}

// seek returns the text before the next call, or all that cannot belong to one.
// Behind a call, white space and the marks of its end are no content.
func (r *toolReader) seek(last bool) []byte {
	if r.state == afterCall && r.separated(last) {
		return nil
	}
	if r.format == Llama3 {
		return r.seekBrace(last)
	}
	begin := r.format.Begin()
	if i := bytes.Index(r.held, []byte(begin)); i >= 0 {
		out := bytes.Clone(r.held[:i])
		r.held = r.held[i+len(begin):]
		r.enter()
		return out
	}
	keep := 0
	if !last {
		keep = overlap(r.held, begin)
	}
	out := bytes.Clone(r.held[:len(r.held)-keep])
	r.held = r.held[len(r.held)-keep:]
	return out
}

// separated deals with what stands between two calls, and behind the last. It
// returns false when the text is none of it.
func (r *toolReader) separated(last bool) bool {
	space, end, next := " \t\r\n", "", "{"
	switch r.format {
	case Hermes:
		end, next = "</tool_call>", r.format.Begin()
	case Mistral:
		space, end = space+",", "]"
	case Llama3:
		space += ";"
	}
	r.held = bytes.TrimLeft(r.held, space)
	switch {
	case end != "" && bytes.HasPrefix(r.held, []byte(end)):
		r.held = r.held[len(end):]
		if r.format == Mistral {
			r.state = inContent
		}
	case bytes.HasPrefix(r.held, []byte(next)):
		if r.format == Hermes {
			r.held = r.held[len(next):]
		}
		r.enter()
	case strings.HasPrefix(end, string(r.held)) || strings.HasPrefix(next, string(r.held)):
		if last {
			r.held = r.held[:0]
		}
	default:
		r.state, r.content = inContent, true
		return false
	}
	return true
}

// seekBrace finds a call of Llama3: a brace at the very beginning.
func (r *toolReader) seekBrace(last bool) []byte {
	rest := bytes.TrimLeft(r.held, " \t\r\n")
	switch {
	case !r.content && len(rest) > 0 && rest[0] == '{':
		r.held = rest
		r.enter()
		return nil
	case !r.content && len(rest) == 0 && !last:
		return nil
	}
	out := bytes.Clone(r.held)
	r.held = r.held[:0]
	r.content = r.content || len(out) > 0
	return out
}

// enter begins a call.
func (r *toolReader) enter() {
	r.state, r.call = inCall, callReader{list: r.format == Mistral && r.calls == 0}
}

// marked takes the control token that begins calls.
func (r *toolReader) marked(id int32) {
	if r.mark >= 0 && id == r.mark && r.state != inCall {
		r.held = append(r.held, r.format.Begin()...)
	}
}

// read goes on with a call. again is text that turned out to be none.
func (r *toolReader) read(calls []openai.ToolCallDelta, last bool) (_ []openai.ToolCallDelta, again []byte) {
	c := &r.call
	r.held = r.held[c.push(r.held):]
	if !c.begun && !c.failed {
		c.findName(r.known)
	}
	if c.done && !c.announced && !json.Valid(c.raw) {
		c.failed = true
	}
	if c.failed || last && !c.begun {
		if !r.guarded { // else it is a call that was cut short
			again = append([]byte(r.format.Begin()), c.text...)
		}
		r.state, r.content = inContent, true
		return calls, again
	}
	if c.begun && (r.guarded || c.done || last) {
		if !c.announced {
			c.announced = true
			calls = append(calls, openai.ToolCallDelta{
				Index: r.calls, ID: callID(r.key(), r.calls), Type: "function", Function: openai.FunctionCall{Name: c.name},
			})
			r.calls++
		}
		if args := c.take(); args != "" {
			calls = append(calls, openai.ToolCallDelta{Index: r.calls - 1, Function: openai.FunctionCall{Arguments: args}})
		}
	}
	if c.done {
		r.state = afterCall
	}
	return calls, nil
}

// reason is the finish reason of an answer that may have calls. For a function that
// the client named, OpenAI says stop.
func (r *toolReader) reason(reason string) string {
	if r != nil && reason == "stop" && r.calls > 0 && !r.named {
		return "tool_calls"
	}
	return reason
}

// overlap is the length of the longest end of text that begins mark.
func overlap(text []byte, mark string) int {
	for n := min(len(mark)-1, len(text)); n > 0; n-- {
		if strings.HasPrefix(mark, string(text[len(text)-n:])) {
			return n
		}
	}
	return 0
}

// callReader reads one JSON object that names a function and its arguments.
type callReader struct {
	list bool   // a bracket may come first
	text []byte // all that was taken

	raw   []byte // of the object
	depth int
	quote bool // inside a string
	slash bool // after a backslash
	open  bool // the object has begun
	done  bool // and ended

	begun     bool   // the name is known and arguments have begun
	announced bool   // the first delta was sent
	failed    bool   // it is no call
	name      string // of the function
	args      int    // where the arguments begin in raw
	sent      int    // how much of raw was sent
	whole     []byte // arguments of an object that was read whole; nil = they are in raw
}

// push takes text up to the end of the object and returns how much it took.
func (c *callReader) push(text []byte) int {
	for i, b := range text {
		if c.done || c.failed {
			return i
		}
		if !c.open {
			if c.failed = !c.before(b); c.failed {
				return i
			}
			c.text = append(c.text, b)
			continue
		}
		c.text = append(c.text, b)
		c.raw = append(c.raw, b)
		switch {
		case c.slash:
			c.slash = false
		case c.quote:
			c.slash, c.quote = b == '\\', b != '"'
		case b == '"':
			c.quote = true
		case b == '{' || b == '[':
			c.depth++
		case b == '}' || b == ']':
			c.depth--
			c.done = c.depth == 0
		}
	}
	return len(text)
}

// before takes what stands before the object.
func (c *callReader) before(b byte) bool {
	switch {
	case b == '{':
		c.open, c.depth = true, 1
		c.raw = append(c.raw, b)
		return true
	case b == '[' && c.list:
		c.list = false
		return true
	}
	return strings.IndexByte(" \t\r\n", b) >= 0
}

// callHead is the usual beginning of a call, up to its arguments.
var callHead = regexp.MustCompile(`^\{\s*"name"\s*:\s*"([^"\\]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{`)

// findName looks for the name and the arguments: as they come where they stand in
// the usual order, else when the object is whole.
func (c *callReader) findName(known func(string) bool) {
	if m := callHead.FindSubmatchIndex(c.raw); m != nil {
		c.name, c.args = string(c.raw[m[2]:m[3]]), m[1]-1
		c.sent = c.args
		c.begun = known(c.name)
		c.failed = !c.begun
		return
	}
	if !c.done {
		return
	}
	var o struct {
		Name       string          `json:"name"`
		Arguments  json.RawMessage `json:"arguments"`
		Parameters json.RawMessage `json:"parameters"`
	}
	if json.Unmarshal(c.raw, &o) != nil || !known(o.Name) {
		c.failed = true
		return
	}
	args := o.Arguments
	if args == nil {
		args = o.Parameters
	}
	var text string
	if json.Unmarshal(args, &text) == nil { // some models quote the object
		args = []byte(text)
	}
	if !json.Valid(args) || bytes.TrimSpace(args)[0] != '{' {
		args = []byte("{}") // a function without arguments
	}
	c.name, c.begun, c.whole = o.Name, true, args
}

// take returns the arguments that were not taken yet.
func (c *callReader) take() string {
	if c.whole != nil {
		out := string(c.whole)
		c.whole = c.whole[:0]
		return out
	}
	end := c.args + jsonLength(c.raw[c.args:])
	if end <= c.sent {
		return ""
	}
	out := string(c.raw[c.sent:end])
	c.sent = end
	return out
}

// jsonLength is the length of the object at the beginning of text, all of text when
// it has not ended.
func jsonLength(text []byte) int {
	depth, quote, slash := 0, false, false
	for i, b := range text {
		switch {
		case slash:
			slash = false
		case quote:
			slash, quote = b == '\\', b != '"'
		case b == '"':
			quote = true
		case b == '{' || b == '[':
			depth++
		case b == '}' || b == ']':
			if depth--; depth == 0 {
				return i + 1
			}
		}
	}
	return len(text)
}
