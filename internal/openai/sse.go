package openai

import (
	"bytes"
	"errors"
	"fmt"
	"io"
)

// ErrEventTooLarge is returned by EventReader.Next for an event that is longer
// than the reader's limit. Nothing can be read after it.
var ErrEventTooLarge = errors.New("server-sent event is too large")

// ErrNotYet is what a source of events that does not wait returns when nothing is there.
// EventReader.Next returns it, too, and goes on with the next call.
var ErrNotYet = errors.New("no event yet")

// DoneData is the data of the event that ends a complete OpenAI stream.
const DoneData = "[DONE]"

// Event is one server-sent event. Its slices alias the reader's buffers and are
// valid until the next call of Next.
type Event struct {
	// Raw is the whole event, with its fields, comments and the blank line that
	// ends it, as it was received.
	Raw []byte
	// Data holds the values of the data fields joined by newlines, nil when the
	// event has none.
	Data []byte
	// Name is the value of the last event field, nil when there is none.
	Name []byte
	// ID is the value of the last id field, nil when there is none.
	ID []byte
	// Comment says that the event consists of comments only (a keep-alive).
	Comment bool
}

// Done reports whether the event ends a complete OpenAI stream.
func (e Event) Done() bool {
	return len(e.Data) > 0 && e.Data[0] == '[' && string(bytes.TrimRight(e.Data, " \t")) == DoneData
}

// EventReader splits a byte stream into whole server-sent events. Lines end in
// LF, CRLF or CR. What it yields depends on the bytes alone, never on how they
// were split into reads, and an event is yielded as soon as its last byte is
// there. It is not safe for concurrent use.
type EventReader struct {
	r   io.Reader
	max int
	err error // of r, sticky

	// buf[start:end] is unread. Its first bytes up to scan hold no end of an
	// event; line is where the line that contains scan begins.
	buf                    []byte
	start, scan, line, end int

	begun  bool // the byte order mark was looked for
	crlf   bool // the last line of the current event ended in CRLF
	skipLF bool // an LF at start belongs to the CR that ended the last event

	joined []byte // data of an event with several data lines
}

// firstBuffer is enough for the chunks of usual models.
const firstBuffer = 4 << 10

// NewEventReader reads events of at most max bytes from r.
func NewEventReader(r io.Reader, max int) *EventReader {
	return &EventReader{r: r, max: max}
}

// Next returns the next event. At the end of the input it returns io.EOF, or
// io.ErrUnexpectedEOF when the input ends inside an event, which is dropped; but
// the event that ends a stream needs no blank line, as nothing comes after it.
// Blank lines between events are skipped.
func (r *EventReader) Next() (Event, error) {
	for {
		if n := r.find(); n > 0 {
			if n > r.max {
				return Event{}, r.tooLarge()
			}
			return r.take(n), nil
		}
		if r.end-r.start > r.max {
			return Event{}, r.tooLarge()
		}
		if r.err != nil {
			if r.unclosedDone() {
				return r.take(r.end - r.start), nil
			}
			return Event{}, r.last()
		}
		if !r.fill() {
			return Event{}, ErrNotYet
		}
	}
}

func (r *EventReader) tooLarge() error {
	if r.err == nil || errors.Is(r.err, io.EOF) {
		r.err = fmt.Errorf("%w: more than %d bytes", ErrEventTooLarge, r.max)
	}
	r.start, r.scan, r.line = r.end, r.end, r.end
	return r.err
}

// unclosedDone reports whether the input ended in a [DONE] without its blank line.
func (r *EventReader) unclosedDone() bool {
	if !errors.Is(r.err, io.EOF) {
		return false
	}
	data, ok := bytes.CutPrefix(bytes.TrimRight(r.buf[r.start:r.end], "\r\n"), []byte("data:"))
	return ok && string(bytes.TrimPrefix(data, []byte{' '})) == DoneData
}

// last is the error after the last whole event.
func (r *EventReader) last() error {
	if r.end > r.start && errors.Is(r.err, io.EOF) {
		r.start = r.end
		r.scan, r.line, r.err = r.end, r.end, io.ErrUnexpectedEOF
	}
	return r.err
}

// find returns the length of the event at start, or 0 when its end is not
// there yet. It looks at each byte once, across calls.
func (r *EventReader) find() int {
	if !r.prefix() {
		return 0
	}
	for {
		eol := indexEOL(r.buf[r.scan:r.end])
		if eol < 0 {
			r.scan = r.end
			return 0
		}
		eol += r.scan
		next, ok := r.lineEnd(eol)
		if !ok {
			r.scan = eol
			return 0
		}
		blank := eol == r.line
		r.crlf = next == eol+2
		r.scan, r.line = next, next
		if !blank {
			continue
		}
		if first := r.buf[r.start]; first != '\n' && first != '\r' {
			return next - r.start
		}
		r.drop(next) // a blank line before the event
		if !r.prefix() {
			return 0
		}
	}
}

// lineEnd returns where the line that ends at eol is over, with its line end.
// After a CR it may have to see the next byte first: always inside an event, and
// for the CR of a blank line where the lines before end in CRLF. Elsewhere a
// blank line is over at its CR, so that the event need not wait.
func (r *EventReader) lineEnd(eol int) (next int, ok bool) {
	if r.buf[eol] == '\n' {
		return eol + 1, true
	}
	if eol == r.line && !r.crlf {
		r.skipLF = true
		return eol + 1, true
	}
	if eol+1 == r.end {
		return eol + 1, r.err != nil
	}
	if r.buf[eol+1] == '\n' {
		return eol + 2, true
	}
	return eol + 1, true
}

// prefix drops what may stand before an event: the byte order mark at the very
// start, and the LF of a CR that ended the event before. It returns false while
// it has to see more.
func (r *EventReader) prefix() bool {
	if r.skipLF && r.scan == r.start && r.start < r.end {
		r.skipLF = false
		if r.buf[r.start] == '\n' {
			r.drop(r.start + 1)
		}
	}
	if r.begun {
		return true
	}
	const mark = "\xef\xbb\xbf"
	got := r.buf[r.start:r.end]
	if len(got) < len(mark) && r.err == nil && bytes.HasPrefix([]byte(mark), got) {
		return false
	}
	r.begun = true
	if bytes.HasPrefix(got, []byte(mark)) {
		r.drop(r.start + len(mark))
	}
	return true
}

func (r *EventReader) drop(to int) {
	r.start, r.scan, r.line, r.crlf = to, to, to, false
}

// fill reads once, making room first. It returns false when there is nothing yet.
func (r *EventReader) fill() bool {
	switch {
	case r.start == r.end:
		r.start, r.scan, r.line, r.end = 0, 0, 0, 0
	case r.end == len(r.buf) && r.start > 0:
		copy(r.buf, r.buf[r.start:r.end])
		r.scan -= r.start
		r.line -= r.start
		r.end -= r.start
		r.start = 0
	}
	if r.end == len(r.buf) {
		grown := make([]byte, max(firstBuffer, 2*len(r.buf)))
		copy(grown, r.buf[:r.end])
		r.buf = grown
	}
	for range 100 {
		n, err := r.r.Read(r.buf[r.end:])
		r.end += n
		if errors.Is(err, ErrNotYet) {
			return n > 0
		}
		r.err = err
		if n > 0 || err != nil {
			return true
		}
	}
	r.err = io.ErrNoProgress
	return true
}

// take cuts the event of n bytes off and parses its fields.
func (r *EventReader) take(n int) Event {
	raw := r.buf[r.start : r.start+n]
	r.drop(r.start + n)
	ev := Event{Raw: raw, Comment: true}
	lines := 0
	for rest := raw; len(rest) > 0; {
		line := rest
		if eol := indexEOL(rest); eol >= 0 {
			line, rest = rest[:eol], rest[eol+1:]
		} else {
			rest = nil
		}
		if len(line) == 0 || line[0] == ':' { // blank, between CR and LF, or a comment
			continue
		}
		ev.Comment = false
		lines = r.field(&ev, line, lines)
	}
	return ev
}

// field adds one "name: value" line to the event and returns the number of data
// lines so far.
func (r *EventReader) field(ev *Event, line []byte, lines int) int {
	name, value, _ := bytes.Cut(line, []byte{':'})
	if len(value) > 0 && value[0] == ' ' {
		value = value[1:]
	}
	switch string(name) {
	case "data":
		switch lines {
		case 0:
			ev.Data = value
			if value == nil {
				ev.Data = line[len(line):]
			}
		case 1:
			r.joined = append(append(append(r.joined[:0], ev.Data...), '\n'), value...)
			ev.Data = r.joined
		default:
			r.joined = append(append(r.joined, '\n'), value...)
			ev.Data = r.joined
		}
		return lines + 1
	case "event":
		ev.Name = value
	case "id":
		if bytes.IndexByte(value, 0) < 0 {
			ev.ID = value
		}
	}
	return lines
}

// indexEOL returns the index of the first LF or CR, -1 without one.
func indexEOL(b []byte) int {
	lf := bytes.IndexByte(b, '\n')
	if lf >= 0 {
		b = b[:lf]
	}
	if cr := bytes.IndexByte(b, '\r'); cr >= 0 {
		return cr
	}
	return lf
}
