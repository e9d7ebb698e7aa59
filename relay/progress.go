package relay

import (
	"bytes"
	"encoding/json"
)

// progress follows how far a stream has come. A stream of one choice is decoded
// only where an event has something to say beyond its text, which is once or twice
// per stream; decoding each event would double the relay's cost per token.
type progress struct {
	multi bool // several choices: decode every event

	events   int // with choices
	tokens   int // by usage, 0 when not reported
	seen     map[int]bool
	finished map[int]bool
	failed   json.RawMessage // the error of an error event
}

// chunk is what matters of an event.
type chunk struct {
	Choices []struct {
		Index        int     `json:"index"`
		FinishReason *string `json:"finish_reason"`
	} `json:"choices"`
	Usage *struct {
		CompletionTokens int `json:"completion_tokens"`
	} `json:"usage"`
	Error json.RawMessage `json:"error"`
}

// observe takes the data of one event.
func (p *progress) observe(data []byte) {
	if !p.multi && !has(data, `"finish_reason"`) && !has(data, `"usage"`) && !has(data, `"error"`) {
		p.events++
		return
	}
	var c chunk
	if json.Unmarshal(data, &c) != nil {
		return // not ours to judge; it passes
	}
	if len(c.Error) > 0 && string(c.Error) != "null" {
		p.failed = c.Error
	}
	if c.Usage != nil {
		p.tokens = c.Usage.CompletionTokens
	}
	if len(c.Choices) > 0 {
		p.events++
	}
	if p.seen == nil {
		p.seen, p.finished = map[int]bool{}, map[int]bool{}
	}
	for _, ch := range c.Choices {
		p.seen[ch.Index] = true
		if ch.FinishReason != nil {
			p.finished[ch.Index] = true
		}
	}
}

// complete reports whether every choice that was seen has its finish_reason. How
// many there should be is not asked: some servers ignore n.
func (p *progress) complete() bool {
	for i := range p.seen {
		if !p.finished[i] {
			return false
		}
	}
	return len(p.finished) > 0
}

// count is the number of tokens: as reported, else one per event, which is close
// enough for a histogram and for nothing else.
func (p *progress) count() int {
	if p.tokens > 0 {
		return p.tokens
	}
	return p.events
}

// has reports whether data holds a member of that quoted name whose value is not
// null.
// Inside a JSON string quotes are escaped, so a match is a real member, at
// whatever depth; one too many costs only time.
func has(data []byte, name string) bool {
	for {
		_, rest, ok := bytes.Cut(data, []byte(name))
		if !ok {
			return false
		}
		rest = bytes.TrimLeft(rest, " \t\r\n")
		if value, ok := bytes.CutPrefix(rest, []byte(":")); ok && !bytes.HasPrefix(bytes.TrimLeft(value, " \t\r\n"), []byte("null")) {
			return true
		}
		data = rest
	}
}
