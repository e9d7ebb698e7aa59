package openai

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
)

// parsed is an Event with its own copies, and the error that ended the stream.
type parsed struct {
	Events []string
	Err    string
}

func parseAll(r io.Reader, max int) parsed {
	er := NewEventReader(r, max)
	var out parsed
	for {
		ev, err := er.Next()
		if errors.Is(err, ErrNotYet) {
			continue
		}
		if err != nil {
			out.Err = err.Error()
			return out
		}
		data := "-"
		if ev.Data != nil {
			data = fmt.Sprintf("%q", ev.Data)
		}
		out.Events = append(out.Events, fmt.Sprintf("%q data=%s event=%q id=%q comment=%v", ev.Raw, data, ev.Name, ev.ID, ev.Comment))
	}
}

func TestEventReader(t *testing.T) {
	for _, tc := range []struct {
		name, in string
		want     []string
		err      error
	}{
		{"empty", "", nil, io.EOF},
		{"one", "data: x\n\n", []string{`"data: x\n\n" data="x" event="" id="" comment=false`}, io.EOF},
		{"crlf", "data: x\r\n\r\ndata: y\r\n\r\n", []string{
			`"data: x\r\n\r\n" data="x" event="" id="" comment=false`,
			`"data: y\r\n\r\n" data="y" event="" id="" comment=false`,
		}, io.EOF},
		{"cr", "data: x\r\rdata: y\r\r", []string{
			`"data: x\r\r" data="x" event="" id="" comment=false`,
			`"data: y\r\r" data="y" event="" id="" comment=false`,
		}, io.EOF},
		{"mixed ends", "data: x\n\r\ndata: y\r\n\n", []string{
			`"data: x\n\r" data="x" event="" id="" comment=false`,
			`"data: y\r\n\n" data="y" event="" id="" comment=false`,
		}, io.EOF},
		{"several data lines", "data: a\ndata:b\ndata\ndata:  c\n\n", []string{
			`"data: a\ndata:b\ndata\ndata:  c\n\n" data="a\nb\n\n c" event="" id="" comment=false`,
		}, io.EOF},
		{"all fields", "event: e\nid: 7\nid: a\x00b\nretry: 1\ndata: d\n\n", []string{
			`"event: e\nid: 7\nid: a\x00b\nretry: 1\ndata: d\n\n" data="d" event="e" id="7" comment=false`,
		}, io.EOF},
		{"comment", ": hi\n\ndata:\n\n", []string{
			`": hi\n\n" data=- event="" id="" comment=true`,
			`"data:\n\n" data="" event="" id="" comment=false`,
		}, io.EOF},
		{"blank lines between", "\n\r\n\rdata: x\n\n\n\n", []string{`"data: x\n\n" data="x" event="" id="" comment=false`}, io.EOF},
		{"byte order mark", "\xef\xbb\xbfdata: x\n\n", []string{`"data: x\n\n" data="x" event="" id="" comment=false`}, io.EOF},
		{"cut inside", "data: x\n\ndata: y\n", []string{`"data: x\n\n" data="x" event="" id="" comment=false`}, io.ErrUnexpectedEOF},
		{"cut inside a line", "data: x\n\ndat", []string{`"data: x\n\n" data="x" event="" id="" comment=false`}, io.ErrUnexpectedEOF},
		{"end without its blank line", "data: x\n\ndata: [DONE]", []string{`"data: x\n\n" data="x" event="" id="" comment=false`, `"data: [DONE]" data="[DONE]" event="" id="" comment=false`}, io.EOF},
		{"end with one line end", "data:[DONE]\r\n", []string{`"data:[DONE]\r\n" data="[DONE]" event="" id="" comment=false`}, io.EOF},
		{"cut inside the end", "data: [DONE", nil, io.ErrUnexpectedEOF},
		{"more than the end", "id: 1\ndata: [DONE]", nil, io.ErrUnexpectedEOF},
		{"cut after cr", "data: x\r\n\r", []string{`"data: x\r\n\r" data="x" event="" id="" comment=false`}, io.EOF},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := parseAll(strings.NewReader(tc.in), 1<<20)
			if diff := cmp.Diff(parsed{tc.want, tc.err.Error()}, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestEventReaderLimit(t *testing.T) {
	fits := "data: " + strings.Repeat("x", 100) + "\n\n"
	for _, tc := range []struct {
		name string
		in   string
		max  int
		want error
	}{
		{"just fits", fits, len(fits), io.EOF},
		{"one too long", fits, len(fits) - 1, ErrEventTooLarge},
		{"endless line", "data: " + strings.Repeat("x", 10_000), 500, ErrEventTooLarge},
		{"large and cut", strings.Repeat("x", 200), 500, io.ErrUnexpectedEOF},
	} {
		t.Run(tc.name, func(t *testing.T) {
			er := NewEventReader(strings.NewReader(tc.in), tc.max)
			var err error
			for err == nil {
				_, err = er.Next()
			}
			if !errors.Is(err, tc.want) {
				t.Errorf("error %v, want %v", err, tc.want)
			}
			if _, again := er.Next(); !errors.Is(again, tc.want) {
				t.Errorf("second error %v, want %v", again, tc.want)
			}
		})
	}
}

// TestEventReaderErrors checks that a failing reader's own error comes out after
// the events before it.
func TestEventReaderErrors(t *testing.T) {
	broken := errors.New("connection reset")
	er := NewEventReader(io.MultiReader(strings.NewReader("data: x\n\ndata: y"), iotest.ErrReader(broken)), 1<<10)
	if ev, err := er.Next(); err != nil || string(ev.Data) != "x" {
		t.Fatalf("first event %q, %v", ev.Data, err)
	}
	if _, err := er.Next(); !errors.Is(err, broken) {
		t.Errorf("error %v, want %v", err, broken)
	}
	if _, err := NewEventReader(idle{}, 1<<10).Next(); !errors.Is(err, io.ErrNoProgress) {
		t.Errorf("reader that never reads: %v, want %v", err, io.ErrNoProgress)
	}
}

// idle is a reader that returns nothing and no error.
type idle struct{}

func (idle) Read([]byte) (int, error) { return 0, nil }

// TestEventReaderPromptness: an event comes out without a byte beyond its end,
// except where a CRLF stream owes the LF of its blank line.
func TestEventReaderPromptness(t *testing.T) {
	for _, in := range []string{"data: x\n\n", "data: x\r\r", "data: x\r\n\r\n", "data: x\n\r", "\r\ndata: x\n\n"} {
		more := errors.New("read beyond the event")
		er := NewEventReader(io.MultiReader(iotest.OneByteReader(strings.NewReader(in)), iotest.ErrReader(more)), 1<<10)
		ev, err := er.Next()
		if err != nil || string(ev.Data) != "x" {
			t.Errorf("%q: event %q, error %v", in, ev.Data, err)
		}
	}
}

func TestEventReaderDoesNotAllocate(t *testing.T) {
	stream := []byte(strings.Repeat("id: 1\nevent: e\ndata: {\"a\":1}\ndata: 2\n\n", 4))
	src := bytes.NewReader(stream)
	er := NewEventReader(looped{src, stream}, 1<<10)
	next := func() {
		if _, err := er.Next(); err != nil {
			t.Fatal(err)
		}
	}
	for range 500 {
		next()
	}
	if n := testing.AllocsPerRun(1000, next); n != 0 {
		t.Errorf("%v allocations per event, want 0", n)
	}
}

// looped repeats data for ever.
type looped struct {
	r    *bytes.Reader
	data []byte
}

func (l looped) Read(p []byte) (int, error) {
	n, err := l.r.Read(p)
	if errors.Is(err, io.EOF) {
		l.r.Reset(l.data)
		return l.r.Read(p)
	}
	return n, err
}

// splitReader yields its parts one read at a time.
type splitReader struct{ parts [][]byte }

func (s *splitReader) Read(p []byte) (int, error) {
	for len(s.parts) > 0 && len(s.parts[0]) == 0 {
		s.parts = s.parts[1:]
	}
	if len(s.parts) == 0 {
		return 0, io.EOF
	}
	n := copy(p, s.parts[0])
	s.parts[0] = s.parts[0][n:]
	return n, nil
}

// FuzzEventReader checks that no split of the input changes what is parsed, and
// that the parts of an event agree with each other.
// hesitant has nothing yet every other time.
type hesitant struct {
	r   io.Reader
	has bool
}

func (h *hesitant) Read(p []byte) (int, error) {
	if h.has = !h.has; h.has {
		return 0, ErrNotYet
	}
	return h.r.Read(p)
}

func FuzzEventReader(f *testing.F) {
	f.Add([]byte("data: x\n\ndata: [DONE]\n\n"), 100)
	f.Add([]byte("\xef\xbb\xbf: c\r\n\r\nid: 1\r\ndata: a\r\ndata: b\r\n\r\n"), 64)
	f.Add([]byte("data: x\r\r\n\r\ndata: y\n\r\n\n"), 20)
	f.Add([]byte("event: e\ndata\n\ntail"), 4)
	f.Add([]byte("data: x\r\n\r\ndata: [DONE]\r"), 40)
	f.Fuzz(func(t *testing.T, in []byte, max int) {
		if len(in) > 512 || max < 0 || max > 1<<20 {
			t.Skip()
		}
		want := parseAll(bytes.NewReader(in), max)
		if got := parseAll(&hesitant{r: iotest.OneByteReader(bytes.NewReader(in))}, max); !cmp.Equal(want, got) {
			t.Errorf("with pauses %+v, want %+v", got, want)
		}
		if got := parseAll(iotest.OneByteReader(bytes.NewReader(in)), max); !cmp.Equal(want, got) {
			t.Fatalf("byte by byte: %s", cmp.Diff(want, got))
		}
		if got := parseAll(iotest.DataErrReader(bytes.NewReader(in)), max); !cmp.Equal(want, got) {
			t.Fatalf("error with the last byte: %s", cmp.Diff(want, got))
		}
		for i := range in {
			got := parseAll(&splitReader{[][]byte{in[:i], in[i:]}}, max)
			if !cmp.Equal(want, got) {
				t.Fatalf("split at %d: %s", i, cmp.Diff(want, got))
			}
		}
		checkEvents(t, in, max)
	})
}

func checkEvents(t *testing.T, in []byte, max int) {
	er := NewEventReader(bytes.NewReader(in), max)
	rest := in
	for {
		ev, err := er.Next()
		if err != nil {
			return
		}
		at := bytes.Index(rest, ev.Raw)
		if at < 0 || len(ev.Raw) > max || len(ev.Raw) < 2 {
			t.Fatalf("event %q is no part of %q, or longer than %d", ev.Raw, rest, max)
		}
		rest = rest[at+len(ev.Raw):]
		if again, err := NewEventReader(bytes.NewReader(ev.Raw), max).Next(); err != nil || !bytes.Equal(again.Data, ev.Data) {
			t.Fatalf("event %q parsed alone: data %q, error %v; want %q", ev.Raw, again.Data, err, ev.Data)
		}
	}
}

func BenchmarkEventReader(b *testing.B) {
	chunk := []byte(`data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" the","logprobs":null,"finish_reason":null}]}` + "\n\n")
	stream := bytes.Repeat(chunk, 64)
	er := NewEventReader(looped{bytes.NewReader(stream), stream}, 1<<20)
	b.SetBytes(int64(len(chunk)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := er.Next(); err != nil {
			b.Fatal(err)
		}
	}
}
