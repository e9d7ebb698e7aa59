package worker

import (
	"strings"
	"testing"
	"unicode/utf8"
)

// wholeText is the emitter's rule said plainly: the text up to the first stop
// string to be complete, with each byte that is no UTF-8 replaced.
func wholeText(raw string, stops []string) (string, bool) {
	for end := 1; end <= len(raw); end++ {
		longest := 0
		for _, s := range stops {
			if strings.HasSuffix(raw[:end], s) {
				longest = max(longest, len(s))
			}
		}
		if longest > 0 {
			return string([]rune(raw[:end-longest])), true
		}
	}
	return string([]rune(raw)), false
}

// emitAll feeds the pieces and checks what must hold after each of them.
func emitAll(t *testing.T, pieces []string, stops []string) (string, bool) {
	t.Helper()
	e := newEmitter(stops)
	var got strings.Builder
	for _, p := range pieces {
		text, stopped := e.push([]byte(p))
		if !utf8.Valid(text) {
			t.Fatalf("pieces %q: sent %q, which splits a character", pieces, text)
		}
		got.Write(text)
		if stopped {
			if more, _ := e.push([]byte("more")); len(more) != 0 {
				t.Fatalf("sent %q after the stop", more)
			}
			return got.String(), true
		}
	}
	got.Write(e.flush())
	if e.released != e.received {
		t.Fatalf("released %d of %d bytes", e.released, e.received)
	}
	return got.String(), false
}

var emitCases = []struct {
	name  string
	raw   string
	stops []string
	want  string
	stop  bool
}{
	{"plain", "hello world", nil, "hello world", false},
	{"multi-byte", "é—🙂", nil, "é—🙂", false},
	{"cut character at the end", "ab\xf0\x9f\x99", nil, "ab\uFFFD\uFFFD\uFFFD", false},
	{"stray bytes", "a\xffb\x80c", nil, "a\uFFFDb\uFFFDc", false},
	{"broken character, then text", "\xe2\x82A", nil, "\uFFFD\uFFFDA", false},
	{"stop", "one END two", []string{"END"}, "one ", true},
	{"stop is everything", "END", []string{"END"}, "", true},
	{"near miss", "one EN D", []string{"END"}, "one EN D", false},
	{"prefix at the end", "one EN", []string{"END"}, "one EN", false},
	{"overlapping prefix", "aaab", []string{"aab"}, "a", true},
	{"shorter ends first", "xabcd", []string{"abcd", "bc"}, "xa", true},
	{"longest of those that end together", "xabc", []string{"c", "abc"}, "x", true},
	{"multi-byte stop", "un—deux—trois", []string{"—trois"}, "un—deux", true},
	{"half a character before the stop", "\xe2\x82stop", []string{"stop"}, "\uFFFD\uFFFD", true},
	{"two line breaks", "a\nb\n\nc", []string{"\n\n"}, "a\nb", true},
}

func TestEmitter(t *testing.T) {
	for _, c := range emitCases {
		t.Run(c.name, func(t *testing.T) {
			if got, stop := wholeText(c.raw, c.stops); got != c.want || stop != c.stop {
				t.Fatalf("the plain rule gives %q, %v; want %q, %v", got, stop, c.want, c.stop)
			}
			for i := 0; i <= len(c.raw); i++ {
				for j := i; j <= len(c.raw); j++ {
					pieces := []string{c.raw[:i], c.raw[i:j], c.raw[j:]}
					if got, stop := emitAll(t, pieces, c.stops); got != c.want || stop != c.stop {
						t.Fatalf("split at %d and %d: %q, %v; want %q, %v", i, j, got, stop, c.want, c.stop)
					}
				}
			}
		})
	}
}

func TestEmitterHoldsOnlyWhatMayBeAStop(t *testing.T) {
	e := newEmitter([]string{"END"})
	for _, step := range []struct{ in, want string }{
		{"aE", "a"}, {"N", ""}, {"x", "ENx"}, {"EE", "E"}, {"ND", ""},
	} {
		text, _ := e.push([]byte(step.in))
		if string(text) != step.want {
			t.Fatalf("after %q: sent %q, want %q", step.in, text, step.want)
		}
	}
	if !e.stopped {
		t.Fatal("the stop string was missed")
	}
}

func FuzzEmitter(f *testing.F) {
	for _, c := range emitCases {
		f.Add(c.raw, strings.Join(c.stops, "|"), uint64(0x5555))
	}
	f.Fuzz(func(t *testing.T, raw, joined string, cuts uint64) {
		if len(raw) > 200 {
			return
		}
		var stops []string
		for s := range strings.SplitSeq(joined, "|") {
			if s != "" && utf8.ValidString(s) {
				stops = append(stops, s)
			}
		}
		var pieces []string
		for start, i := 0, 1; i <= len(raw); i++ {
			if i == len(raw) || cuts>>(i%64)&1 == 1 {
				pieces = append(pieces, raw[start:i])
				start = i
			}
		}
		want, stop := wholeText(raw, stops)
		if got, ended := emitAll(t, pieces, stops); got != want || ended != stop {
			t.Fatalf("raw %q stops %q pieces %q: %q, %v; want %q, %v", raw, stops, pieces, got, ended, want, stop)
		}
	})
}

// TestTextIgnores: a stop string that ends in the first bytes is text, one that begins there
// and ends behind them counts, and what comes behind a flush is text.
func TestTextIgnores(t *testing.T) {
	for _, c := range []struct {
		text   string
		ignore int
		want   string
		stop   string
	}{
		{"xabab", 3, "xab", "ab"},
		{"xabab", 2, "x", "ab"},
		{"xababa", 5, "xababa", ""},
		{"aaaa", 3, "aa", "aa"}, // overlaps the ignored one
		{"xcabcab", 5, "xcabc", "ab"},
		{"xab", 100, "xab", ""},
	} {
		for at := range len(c.text) + 1 {
			text := NewText([]string{"ab", "aa", "cabcd"})
			text.Ignore(c.ignore)
			first, _ := text.Push([]byte(c.text[:at]))
			got := string(first)
			rest, _ := text.Push([]byte(c.text[at:]))
			got += string(rest)
			got += string(text.Flush())
			if got != c.want || text.Stop() != c.stop {
				t.Errorf("%q in two at %d, %d ignored: %q, stop %q; want %q, %q", c.text, at, c.ignore, got, text.Stop(), c.want, c.stop)
			}
		}
	}
	text := NewText([]string{"ab"})
	text.Push([]byte("xa"))
	text.Flush()
	if got, stopped := text.Push([]byte("b")); string(got) != "b" || stopped {
		t.Errorf("behind a flush: %q, %v", got, stopped)
	}
}
