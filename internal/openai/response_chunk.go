package openai

import (
	"bytes"
	"encoding/json"
	"strconv"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
)

// Done is the event that ends a complete stream.
const Done = "data: [DONE]\n\n"

// Comment is an event that clients ignore; it keeps a silent stream open.
const Comment = ": keep-alive\n\n"

// Answer is what all parts of one answer have in common.
type Answer struct {
	Endpoint    Endpoint
	ID          string
	Model       string // as the client named it
	Fingerprint string // system_fingerprint, left out when ""
	Created     int64  // Unix seconds
}

// Chunks appends the events of one streamed answer to a buffer. It builds the
// unchanging part of an event once, so that an event costs no allocation. It
// does not change after NewChunks and is safe for concurrent use.
type Chunks struct {
	chat bool
	head []byte // up to and with "choices":[
	tail []byte // after the choices
}

// NewChunks prepares the events of a. With usage every chunk carries
// "usage":null, as OpenAI does when stream_options.include_usage is set.
func NewChunks(a Answer, usage bool) *Chunks {
	c := &Chunks{chat: a.Endpoint == Chat}
	object := "text_completion"
	if c.chat {
		object = "chat.completion.chunk"
	}
	b := AppendString([]byte(`data: {"id":`), []byte(a.ID))
	b = AppendString(append(b, `,"object":`...), []byte(object))
	b = strconv.AppendInt(append(b, `,"created":`...), a.Created, 10)
	b = AppendString(append(b, `,"model":`...), []byte(a.Model))
	if a.Fingerprint != "" {
		b = AppendString(append(b, `,"system_fingerprint":`...), []byte(a.Fingerprint))
	}
	c.head = append(b, `,"choices":[`...)
	c.tail = []byte("]}\n\n")
	if usage {
		c.tail = []byte("],\"usage\":null}\n\n")
	}
	return c
}

// AppendRole appends the first chunk of a chat choice; nothing for Completions.
func (c *Chunks) AppendRole(dst []byte, index int) []byte {
	if !c.chat {
		return dst
	}
	dst = c.open(dst, index)
	dst = append(dst, `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}`...)
	return append(dst, c.tail...)
}

// AppendText appends a chunk of text, with raw JSON as its logprobs (nil = null).
func (c *Chunks) AppendText(dst []byte, index int, text, logprobs []byte) []byte {
	dst = c.open(dst, index)
	if c.chat {
		dst = append(AppendString(append(dst, `,"delta":{"content":`...), text), '}')
	} else {
		dst = AppendString(append(dst, `,"text":`...), text)
	}
	dst = append(dst, `,"logprobs":`...)
	if logprobs == nil {
		dst = append(dst, "null"...)
	}
	dst = append(append(dst, logprobs...), `,"finish_reason":null}`...)
	return append(dst, c.tail...)
}

// AppendFinish appends the chunk that ends a choice.
func (c *Chunks) AppendFinish(dst []byte, index int, reason string) []byte {
	dst = c.open(dst, index)
	if c.chat {
		dst = append(dst, `,"delta":{}`...)
	} else {
		dst = append(dst, `,"text":""`...)
	}
	dst = append(dst, `,"logprobs":null,"finish_reason":`...)
	dst = append(AppendString(dst, []byte(reason)), '}')
	return append(dst, c.tail...)
}

// AppendUsage appends the chunk without choices that carries the usage.
func (c *Chunks) AppendUsage(dst []byte, u Usage) []byte {
	raw, err := json.Marshal(u)
	if err != nil { // plain integers always marshal
		return dst
	}
	dst = append(append(dst, c.head...), `],"usage":`...)
	return append(append(dst, raw...), "}\n\n"...)
}

// open appends an event up to the choice's index.
func (c *Chunks) open(dst []byte, index int) []byte {
	dst = append(append(dst, c.head...), `{"index":`...)
	return strconv.AppendInt(dst, int64(index), 10)
}

// AppendString appends text as a JSON string. Invalid UTF-8 is replaced. The
// characters U+0085, U+2028 and U+2029 are escaped, because many clients split an
// event stream into lines at them.
func AppendString(dst, text []byte) []byte {
	if !utf8.Valid(text) {
		text = bytes.ToValidUTF8(text, []byte("\uFFFD"))
	}
	at := len(dst)
	dst, err := jsontext.AppendQuote(dst, text)
	if err != nil || !hasLineBreak(dst[at:]) {
		return dst // AppendQuote only reports the invalid UTF-8 that it replaced
	}
	quoted := bytes.Clone(dst[at:])
	for _, r := range [...]struct{ char, escape string }{
		{"\u0085", `\u0085`}, {"\u2028", `\u2028`}, {"\u2029", `\u2029`},
	} {
		quoted = bytes.ReplaceAll(quoted, []byte(r.char), []byte(r.escape))
	}
	return append(dst[:at], quoted...)
}

// hasLineBreak finds the UTF-8 of the three characters that AppendString escapes.
func hasLineBreak(b []byte) bool {
	for i := 0; i+1 < len(b); i++ {
		if b[i] == 0xc2 && b[i+1] == 0x85 {
			return true
		}
		if b[i] == 0xe2 && b[i+1] == 0x80 && i+2 < len(b) && b[i+2]&0xfe == 0xa8 {
			return true
		}
	}
	return false
}
