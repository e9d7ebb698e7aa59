package grammar

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// gbnf is a grammar read back, as a generator of random texts: an implementation of
// the notation that shares nothing with the writer.
type gbnf struct {
	rules map[string]expr
	r     *rand.Rand
	size  int // characters left before it chooses what is short
}

// expr writes one text.
type expr func(g *gbnf, out *strings.Builder)

func readGrammar(t testing.TB, text string) *gbnf {
	t.Helper()
	g := &gbnf{rules: make(map[string]expr)}
	for line := range strings.Lines(text) {
		name, body, ok := strings.Cut(strings.TrimSpace(line), " ::= ")
		if !ok {
			t.Fatalf("not a rule: %q", line)
		}
		p := &reader{t: t, s: body}
		if _, twice := g.rules[name]; twice {
			t.Fatalf("rule %s is there twice", name)
		}
		g.rules[name] = p.alternatives()
		if p.s != "" {
			t.Fatalf("rule %s: left over %q", name, p.s)
		}
	}
	return g
}

// generate writes a random text of about size characters at most.
func (g *gbnf) generate(seed uint64, size int) string {
	g.r, g.size = rand.New(rand.NewPCG(seed, 1)), size
	var out strings.Builder
	g.rules["root"](g, &out)
	return out.String()
}

type reader struct {
	t testing.TB
	s string
}

func (p *reader) skip() { p.s = strings.TrimLeft(p.s, " ") }

func (p *reader) take(prefix string) bool {
	rest, ok := strings.CutPrefix(p.s, prefix)
	p.s = rest
	return ok
}

func (p *reader) alternatives() expr {
	options := []expr{p.sequence()}
	for p.skip(); p.take("|"); p.skip() {
		options = append(options, p.sequence())
	}
	return func(g *gbnf, out *strings.Builder) {
		if out.Len() > g.size { // the writer puts what ends last, or what has no content first
			g.shortest(options, out)
			return
		}
		options[g.r.IntN(len(options))](g, out)
	}
}

// shortest tries the options until one ends within a bound.
func (g *gbnf) shortest(options []expr, out *strings.Builder) {
	if out.Len() > g.size+4000 {
		panic("endless")
	}
	options[len(options)-1-g.r.IntN(min(2, len(options)))](g, out)
}

func (p *reader) sequence() expr {
	var items []expr
	for p.skip(); p.s != "" && p.s[0] != '|' && p.s[0] != ')'; p.skip() {
		items = append(items, p.repeated(p.item()))
	}
	return func(g *gbnf, out *strings.Builder) {
		for _, it := range items {
			it(g, out)
		}
	}
}

func (p *reader) item() expr {
	switch {
	case p.take("("):
		e := p.alternatives()
		if !p.take(")") {
			p.t.Fatalf("no ) before %q", p.s)
		}
		return e
	case p.take(`"`):
		var text strings.Builder
		for !p.take(`"`) {
			text.WriteRune(p.char())
		}
		return func(_ *gbnf, out *strings.Builder) { out.WriteString(text.String()) }
	case p.take("["):
		return p.class()
	}
	n := 0
	for n < len(p.s) && (p.s[n] >= 'a' && p.s[n] <= 'z' || p.s[n] >= '0' && p.s[n] <= '9' || p.s[n] == '-') {
		n++
	}
	if n == 0 {
		p.t.Fatalf("no item at %q", p.s)
	}
	name := p.s[:n]
	p.s = p.s[n:]
	return func(g *gbnf, out *strings.Builder) {
		if g.rules[name] == nil {
			panic("no rule " + name)
		}
		g.rules[name](g, out)
	}
}

// char reads one character, escaped or not.
func (p *reader) char() rune {
	for prefix, digits := range map[string]int{`\x`: 2, `\u`: 4, `\U`: 8} {
		if p.take(prefix) {
			n, err := strconv.ParseUint(p.s[:digits], 16, 32)
			if err != nil {
				p.t.Fatal(err)
			}
			p.s = p.s[digits:]
			return rune(n)
		}
	}
	escaped := p.take(`\`)
	r, size := utf8.DecodeRuneInString(p.s)
	if size == 0 {
		p.t.Fatal("the rule ends in a character")
	}
	p.s = p.s[size:]
	switch {
	case escaped && r == 'n':
		return '\n'
	case escaped && r == 't':
		return '\t'
	}
	return r
}

func (p *reader) class() expr {
	not := p.take("^")
	var ranges [][2]rune
	for !p.take("]") {
		low := p.char()
		high := low
		if p.s[0] == '-' && p.s[1] != ']' {
			p.s = p.s[1:]
			high = p.char()
		}
		ranges = append(ranges, [2]rune{low, high})
	}
	return func(g *gbnf, out *strings.Builder) {
		if !not {
			r := ranges[g.r.IntN(len(ranges))]
			out.WriteRune(r[0] + rune(g.r.IntN(int(r[1]-r[0]+1))))
			return
		}
		for {
			c := []rune{rune(g.r.IntN(128)), 'é', '世', '🙂', 0x85}[g.r.IntN(5)]
			in := false
			for _, r := range ranges {
				in = in || c >= r[0] && c <= r[1]
			}
			if !in {
				out.WriteRune(c)
				return
			}
		}
	}
}

func (p *reader) repeated(e expr) expr {
	low, high := 1, 1
	switch {
	case p.take("*"):
		low, high = 0, -1
	case p.take("?"):
		low, high = 0, 1
	case p.take("{"):
		inside, rest, _ := strings.Cut(p.s, "}")
		p.s = rest
		a, b, two := strings.Cut(inside, ",")
		low = p.number(a)
		high = low
		if two && b == "" {
			high = -1
		} else if two {
			high = p.number(b)
		}
	}
	return func(g *gbnf, out *strings.Builder) {
		n := low
		switch {
		case out.Len() > g.size:
		case high < 0:
			n += g.r.IntN(4)
		default:
			n += g.r.IntN(high - low + 1)
		}
		for range n {
			e(g, out)
		}
	}
}

func (p *reader) number(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		p.t.Fatal(fmt.Errorf("repetition: %w", err))
	}
	return n
}
