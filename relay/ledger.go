package relay

import (
	"slices"
	"strconv"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// ledger is what the client has of one answer: for each choice the tokens, and how much
// of their text. It belongs to whoever holds the job's pen.
type ledger struct {
	stream string // id, the first part of every event's id
	events int64  // delivered; the second part
	tokens int64  // delivered, of all choices, those without ids counted by events

	// What all events of the answer have in common, as JSON, from its first event.
	id, created, model, fingerprint []byte

	choices []choiceLedger // by index
	usage   bool           // was delivered
	// loose says why the answer cannot go on elsewhere, "" while it can.
	loose string
	// plain says that the answer is nothing but text, so that it could go on by that
	// where no ids are told.
	plain bool
	// echo says that it begins with the prompt, which has no ids.
	echo bool
}

// choiceLedger is what the client has of one choice.
type choiceLedger struct {
	ids      []int32
	text     int    // bytes, of text or content
	said     []byte // the text itself, as long as no ids came
	seen     bool   // anything of it, be it the role
	finished bool
}

// choice returns the choice of an index, adding those before it.
func (l *ledger) choice(i int) *choiceLedger {
	for i >= len(l.choices) {
		l.choices = append(l.choices, choiceLedger{})
	}
	return &l.choices[i]
}

// begun reports whether the client has anything that a fresh answer would repeat.
func (l *ledger) begun() bool {
	return slices.ContainsFunc(l.choices, func(c choiceLedger) bool { return len(c.ids) > 0 || c.text > 0 || c.finished })
}

// complete reports whether every choice that was seen is finished, and as many as
// expected were, at least one.
func (l *ledger) complete(expected int) bool {
	n := 0
	for _, c := range l.choices {
		if c.seen && !c.finished {
			return false
		}
		if c.finished {
			n++
		}
	}
	return n > 0 && n >= expected
}

// note takes what an event adds to a choice.
func (l *ledger) note(v *choiceView, data []byte) {
	c := l.choice(v.index)
	c.seen = true
	c.ids = append(c.ids, v.ids...)
	c.text += v.text
	switch {
	case c.ids != nil:
		c.said = nil
	case l.plain && v.text > 0 && len(c.said)+v.text == c.text && c.text <= mostSaid:
		c.said, _ = jsontext.AppendUnquote(c.said, v.said.of(data)) // it was read as JSON
	}
	c.finished = c.finished || v.finish
	n := len(v.ids)
	if c.ids == nil && (v.text > 0 || v.calls) {
		n = 1 // about
	}
	l.tokens += int64(n)
	if v.strange && l.loose == "" {
		l.loose = "it carries more than text and calls of tools"
	}
}

// mostSaid bounds the text that is kept of a choice.
const mostSaid = 1 << 20

// resumable reports whether another worker can go on from here: by token ids, or by all
// of the text where none were told.
func (l *ledger) resumable() bool {
	return l.loose == "" && !slices.ContainsFunc(l.choices, func(c choiceLedger) bool {
		return c.text > 0 && c.ids == nil && len(c.said) != c.text && !l.echo
	})
}

// byText reports whether a choice goes on by its text.
func (l *ledger) byText() bool {
	return slices.ContainsFunc(l.choices, func(c choiceLedger) bool { return c.text > 0 && c.ids == nil && c.said != nil })
}

// appendResume appends the body field kvmesh.resume.
func (l *ledger) appendResume(b []byte, attempt int) []byte {
	b = append(b, `{"stream":`...)
	b = strconv.AppendQuote(b, l.stream)
	b = strconv.AppendInt(append(b, `,"attempt":`...), int64(attempt), 10)
	b = append(b, `,"choices":[`...)
	first := true
	for i, c := range l.choices {
		if len(c.ids) == 0 && c.text == 0 {
			continue
		}
		if !first {
			b = append(b, ',')
		}
		first = false
		b = strconv.AppendInt(append(b, `{"index":`...), int64(i), 10)
		if c.ids == nil && c.said != nil {
			b = openai.AppendString(append(b, `,"text":`...), c.said)
			b = strconv.AppendInt(append(b, `,"text_bytes":`...), int64(c.text), 10)
			b = append(b, '}')
			continue
		}
		b = append(b, `,"token_ids":[`...)
		for k, id := range c.ids {
			if k > 0 {
				b = append(b, ',')
			}
			b = strconv.AppendInt(b, int64(id), 10)
		}
		b = strconv.AppendInt(append(b, `],"text_bytes":`...), int64(c.text), 10)
		b = append(b, '}')
	}
	return append(b, "]}"...)
}
