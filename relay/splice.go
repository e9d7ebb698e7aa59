package relay

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
)

// splicer turns the events of one attempt into the client's. The first attempt's pass
// as they are, without what only the relay asked for. Those of a later one continue the
// same answer: it has the same id, time, model and fingerprint, and nothing that the
// client has comes again. It belongs to one attempt; the ledger it changes is the job's.
type splicer struct {
	scanner
	later   bool   // the answer was begun by another attempt
	resumed bool   // the attempt was told what the client has
	byText  bool   // and that without token ids
	started []bool // by choice: it said how it goes on, or began anew
	out     []byte
}

// spliced is what became of an event.
type spliced struct {
	data  []byte // for the client, nil for nothing; valid until the next event
	token bool   // it adds to a choice
	ends  bool   // it ends one, or has the usage
	// kv says how a choice that the attempt continues goes on, "" in all but its first
	// event.
	kv                 string
	restored, computed int
}

// errSplice is the end of an attempt that does not continue the answer.
var errSplice = errors.New("the worker does not continue the answer")

// How a stream went on at another worker.
const (
	kvExact    = "exact"     // KV restored, same batch shapes
	kvRestored = "restored"  // KV restored
	kvReplayed = "replayed"  // prefilled
	kvLossy    = "quantized" // KV restored that was quantized when it was stored
	kvText     = "text"      // its text prefilled, whose tokens nobody knew
)

// kvName makes a worker's word one of ours.
func kvName(s string) string {
	switch s {
	case kvExact, kvRestored, kvText, kvLossy:
		return s
	}
	return kvReplayed
}

// splice takes one scanned event into the ledger and returns what the client gets of
// it. An error leaves the ledger as it was.
func (s *splicer) splice(l *ledger, data []byte) (spliced, error) {
	v := &s.view
	if s.resumed {
		if err := s.check(l, v); err != nil {
			return spliced{}, err
		}
	}
	edits, rest := s.edits, len(v.choices)
	switch {
	case s.later:
		edits = s.unify(l, data, edits)
	case l.events == 0:
		l.id, l.created = bytes.Clone(v.id.of(data)), bytes.Clone(v.created.of(data))
		l.model, l.fingerprint = bytes.Clone(v.model.of(data)), bytes.Clone(v.fingerprint.of(data))
	}
	if s.later || l.repeated(v) {
		edits, rest = s.unrepeat(l, data, edits)
	}
	out := spliced{data: data}
	for i := range v.choices {
		c := &v.choices[i]
		if l.ended(c.index) {
			continue
		}
		out.token = out.token || !c.bare()
		out.ends = out.ends || c.finish
		if c.kv != "" && out.kv == "" {
			out.kv, out.restored, out.computed = c.kv, c.restored, c.computed
		}
		l.note(c, data)
	}
	last := v.usage.to > 0 && len(v.choices) == 0
	out.ends = out.ends || last
	again := last && l.usage
	l.usage = l.usage || last
	switch {
	case again, len(v.choices) > 0 && rest == 0 && v.usage.to == 0:
		out.data = nil
	case len(edits) > 0:
		s.out = apply(s.out[:0], data, edits)
		out.data = s.out
	}
	return out, nil
}

// check makes sure that the attempt goes on where the client stands: the first ids of
// a choice that was begun come with the word that says how.
func (s *splicer) check(l *ledger, v *chunkView) error {
	if f := v.fingerprint; f.to > 0 && len(l.fingerprint) > 0 && !bytes.Equal(f.of(s.data), l.fingerprint) {
		return fmt.Errorf("%w: it has other weights", errSplice)
	}
	for i := range v.choices {
		c := &v.choices[i]
		for c.index >= len(s.started) {
			s.started = append(s.started, false)
		}
		switch {
		case s.started[c.index]:
		case c.kv != "", !l.has(c.index, s.byText):
			s.started[c.index] = c.kv != "" || !c.bare()
		case len(c.ids) > 0, s.byText && c.text > 0:
			return fmt.Errorf("%w: choice %d begins without a word of how", errSplice, c.index)
		}
	}
	return nil
}

// has reports whether a choice is to go on, because the client has a part of it and not the end:
// tokens, or text if that counts. Text alone may be no more than the prompt.
func (l *ledger) has(index int, byText bool) bool {
	if index >= len(l.choices) {
		return false
	}
	c := &l.choices[index]
	return !c.finished && (len(c.ids) > 0 || byText && c.text > 0)
}

// unify gives an event what all events of the answer have in common.
func (s *splicer) unify(l *ledger, data []byte, edits []edit) []edit {
	v := &s.view
	var missing []byte
	for _, m := range []struct {
		name string
		at   span
		want []byte
	}{
		{"id", v.id, l.id}, {"created", v.created, l.created}, {"model", v.model, l.model}, {"system_fingerprint", v.fingerprint, l.fingerprint},
	} {
		switch {
		case len(m.want) == 0 || m.at.to > 0 && bytes.Equal(m.at.of(data), m.want):
		case m.at.to > 0:
			edits = append(edits, edit{m.at, m.want})
		default:
			missing = append(append(append(append(missing, '"'), m.name...), `":`...), m.want...)
			missing = append(missing, ',')
		}
	}
	if len(missing) > 0 {
		at := bytes.IndexByte(data, '{') + 1
		if bytes.HasPrefix(bytes.TrimLeft(data[at:], " \t\r\n"), []byte{'}'}) {
			missing = missing[:len(missing)-1]
		}
		edits = append(edits, edit{span{at, at}, missing})
	}
	return edits
}

// ended reports whether the client has the choice to its end. Some servers tell that twice.
func (l *ledger) ended(index int) bool {
	return index < len(l.choices) && l.choices[index].finished
}

// repeats reports whether the i-th choice of a first attempt's event says its end once more.
// What else servers say behind an end is theirs, and passes.
func (l *ledger) repeats(v *chunkView, i int) bool {
	c := &v.choices[i]
	return c.finish && (l.ended(c.index) || slices.ContainsFunc(v.choices[:i], func(b choiceView) bool { return b.finish && b.index == c.index }))
}

// repeated is repeats for any choice.
func (l *ledger) repeated(v *chunkView) bool {
	for i := range v.choices {
		if l.repeats(v, i) {
			return true
		}
	}
	return false
}

// endsOnly says that the event tells nothing of the choice but its end.
func (c *choiceView) endsOnly() bool {
	return c.finish && c.text == 0 && len(c.ids) == 0 && !c.calls && !c.probs && !c.strange
}

// unrepeat removes what the client has: ends of choices, with the choice where nothing else
// is said of it, and, of a later attempt, choices that were finished and roles that were told.
// rest is the number of choices that are left.
func (s *splicer) unrepeat(l *ledger, data []byte, edits []edit) (out []edit, rest int) {
	choices := s.view.choices
	open, last, kept := -1, s.view.choicesAt.from+1, false
	for i := range choices {
		c := &choices[i]
		if open >= 0 {
			edits = append(edits, edit{span: span{open, c.at.from}})
			open = -1
		}
		told := s.later && c.role.to > 0 && c.index < len(l.choices) && l.choices[c.index].seen
		again := l.repeats(&s.view, i)
		switch {
		case again && c.endsOnly() && s.view.usage.to == 0 || s.later && l.ended(c.index) || told && c.bare():
			edits = slices.DeleteFunc(edits, func(e edit) bool { return e.from >= c.at.from && e.to <= c.at.to })
			if kept {
				edits = append(edits, edit{span: span{last, c.at.to}})
			} else {
				open = c.at.from
			}
		default:
			kept = true
			rest++
			if told {
				edits = append(edits, edit{span: withComma(data, c.role)})
			}
			if again {
				edits = append(edits, edit{c.reason, []byte("null")})
			}
		}
		last = c.at.to
	}
	if open >= 0 {
		edits = append(edits, edit{span: span{open, last}})
	}
	return edits, rest
}

// withComma widens the place of an object's member by the comma that sets it apart.
func withComma(data []byte, m span) span {
	to := m.to
	for data[to] <= ' ' {
		to++
	}
	if data[to] == ',' {
		return span{m.from, to + 1}
	}
	for data[m.from-1] <= ' ' || data[m.from-1] == ',' {
		m.from--
	}
	return m
}

// apply appends data with its edits to dst.
func apply(dst, data []byte, edits []edit) []byte {
	if !slices.IsSortedFunc(edits, byPlace) {
		slices.SortFunc(edits, byPlace)
	}
	at := 0
	for _, e := range edits {
		dst = append(append(dst, data[at:e.from]...), e.with...)
		at = e.to
	}
	return append(dst, data[at:]...)
}

func byPlace(a, b edit) int { return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.to, b.to)) }
