package worker

import "unicode/utf8"

// emitter turns the raw bytes of tokens into text that may be sent: whole UTF-8
// characters only, and nothing that may yet turn out to be a stop string. What it
// sends in total depends on the bytes alone, never on how tokens split them. Not
// safe for concurrent use.
//
// A stop string ends the text as soon as its last byte arrives; of several that
// end there the longest counts. Bytes that are no UTF-8 become U+FFFD one by one.
type emitter struct {
	stops []stopState
	buf   []byte // raw bytes received and not yet released
	out   []byte // text of the last call, reused

	received int // raw bytes, in all
	released int // raw bytes turned into text, in all
	free     int // of the raw bytes, from the first: a stop string that ends there is text
	stopped  bool
	stop     string // that ended the text
}

// Text is the text of one answer on its way to a client: whole characters, without a stop
// string or the beginning of one. It is for engines that pass on another server's answer,
// of which a part came from elsewhere. Make it with NewText; it is not safe for concurrent
// use.
type Text struct{ e emitter }

// NewText makes the text of an answer that ends at any of stops, none of which is empty.
func NewText(stops []string) *Text { return &Text{newEmitter(stops)} }

// Ignore makes the stop strings that end in the first n bytes of the answer text like any
// other. One that begins there and ends behind them counts. It is called before Push.
func (t *Text) Ignore(n int) { t.e.free = n }

// Push takes more of the answer and returns what can be sent now, valid until the next
// call. After it reported a stop, nothing more comes.
func (t *Text) Push(b []byte) (text []byte, stopped bool) { return t.e.push(b) }

// Flush returns what is held back, at the end of the answer, valid until the next call.
func (t *Text) Flush() []byte { return t.e.flush() }

// Stop is the stop string that ended the text, "" before.
func (t *Text) Stop() string { return t.e.stop }

// stopState is a Knuth-Morris-Pratt matcher of one stop string.
type stopState struct {
	text    string
	fail    []int // fail[i]: longest proper border of text[:i+1]
	matched int   // bytes of text that the input ends with
}

// newEmitter makes an emitter for one choice; stops are valid UTF-8 and not empty.
func newEmitter(stops []string) emitter {
	e := emitter{stops: make([]stopState, len(stops))}
	for i, s := range stops {
		e.stops[i] = stopState{text: s, fail: borders(s)}
	}
	return e
}

// borders returns, for each prefix of s, the length of the longest proper prefix
// that it ends with: where the matcher goes on after a mismatch.
func borders(s string) []int {
	fail := make([]int, len(s))
	for i, k := 1, 0; i < len(s); i++ {
		for k > 0 && s[i] != s[k] {
			k = fail[k-1]
		}
		if s[i] == s[k] {
			k++
		}
		fail[i] = k
	}
	return fail
}

// step takes one byte and reports whether the stop string is complete.
func (m *stopState) step(c byte) bool {
	for m.matched > 0 && (m.matched == len(m.text) || m.text[m.matched] != c) {
		m.matched = m.fail[m.matched-1]
	}
	if m.text[m.matched] == c {
		m.matched++
	}
	return m.matched == len(m.text)
}

// begun is how many bytes, that the input ends with, another stop string may begin with.
func (m *stopState) begun() int {
	if m.matched == len(m.text) { // ignored; it may overlap the next
		return m.fail[m.matched-1]
	}
	return m.matched
}

// push takes the bytes of one token and returns the text that can be sent now,
// valid until the next call. After it reported a stop, nothing more comes.
func (e *emitter) push(b []byte) (text []byte, stopped bool) {
	e.out = e.out[:0]
	if e.stopped {
		return e.out, true
	}
	for i, c := range b {
		if n := e.complete(c); n > 0 && e.received+i >= e.free {
			e.buf = append(e.buf, b[:i+1]...)
			e.stop = string(e.buf[len(e.buf)-n:])
			e.buf = e.buf[:len(e.buf)-n]
			e.received += i + 1
			e.stopped = true
			e.release(len(e.buf), true)
			return e.out, true
		}
	}
	e.buf = append(e.buf, b...)
	e.received += len(b)
	held := 0
	for i := range e.stops {
		held = max(held, e.stops[i].begun())
	}
	e.release(len(e.buf)-held, false)
	return e.out, false
}

// complete feeds one byte to all matchers and returns the length of the longest
// stop string that it completes, 0 for none.
func (e *emitter) complete(c byte) int {
	longest := 0
	for i := range e.stops {
		if e.stops[i].step(c) {
			longest = max(longest, len(e.stops[i].text))
		}
	}
	return longest
}

// flush returns what is still held back, at the end of the answer. No stop string begins
// in it any more.
func (e *emitter) flush() []byte {
	e.out = e.out[:0]
	for i := range e.stops {
		e.stops[i].matched = 0
	}
	e.release(len(e.buf), true)
	return e.out
}

// release moves up to n raw bytes to the text; an incomplete character at their
// end waits for its other bytes unless last is set.
func (e *emitter) release(n int, last bool) {
	p := e.buf[:n]
	for len(p) > 0 {
		if p[0] < utf8.RuneSelf {
			e.out = append(e.out, p[0])
			p = p[1:]
			continue
		}
		if !last && !utf8.FullRune(p) {
			break
		}
		r, size := utf8.DecodeRune(p)
		e.out = utf8.AppendRune(e.out, r) // RuneError is U+FFFD
		p = p[size:]
	}
	used := n - len(p)
	e.released += used
	e.buf = append(e.buf[:0], e.buf[used:]...)
}
