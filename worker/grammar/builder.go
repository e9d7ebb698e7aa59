package grammar

import (
	"fmt"
	"strconv"
	"strings"
)

// Builder collects the rules of one grammar. Use New. It is not safe for concurrent
// use.
type Builder struct {
	rules []string
	size  int // rules that llama.cpp makes of them
	count int
	basic map[string]bool   // names of basics already written
	names map[string]string // of rules by their body, so that equal ones are one
}

// New returns an empty grammar.
func New() *Builder { return &Builder{basic: make(map[string]bool), names: make(map[string]string)} }

// basics are the rules that every grammar of JSON may use, with those they use.
func basics(name string) (body string, uses []string) {
	switch name {
	case "ws":
		return `| " " | "\n" [ \t]{0,20}`, nil
	case "char":
		// No surrogates: half a pair is no text.
		return `[^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" ([0-9a-cA-CefEF] [0-9a-fA-F]{3} | [dD] [0-7] [0-9a-fA-F]{2}))`, nil
	case "string":
		return `"\"" char* "\""`, []string{"char"}
	case "integer":
		return `"-"? ("0" | [1-9] [0-9]{0,14})`, nil
	case "number":
		return `integer ("." [0-9]{1,15})? ([eE] [-+]? [0-9]{1,2})?`, []string{"integer"}
	case "boolean":
		return `"true" | "false"`, nil
	case "null":
		return `"null"`, nil
	case "object":
		return `"{" ws (string ":" ws value ("," ws string ":" ws value)* ws)? "}"`, []string{"ws", "string", "value"}
	case "array":
		return `"[" ws (value ("," ws value)* ws)? "]"`, []string{"ws", "value"}
	case "value":
		return `object | array | string | number | boolean | null`, []string{"object", "array", "string", "number", "boolean", "null"}
	}
	panic("grammar: no basic rule " + name) // names come from this package only
}

// use makes sure that a basic rule is there and returns its name.
func (b *Builder) use(name string) string {
	if b.basic[name] {
		return name
	}
	b.basic[name] = true
	body, uses := basics(name)
	b.rules = append(b.rules, name+" ::= "+body)
	for _, u := range uses {
		b.use(u)
	}
	return name
}

// Rule adds a rule, unless there is one like it, and returns its name.
func (b *Builder) Rule(body string) string {
	if name, ok := b.names[body]; ok {
		return name
	}
	name := b.reserve()
	b.define(name, body)
	b.names[body] = name
	return name
}

// reserve returns a name for a rule that is defined later.
func (b *Builder) reserve() string {
	b.count++
	return fmt.Sprintf("r%d", b.count)
}

func (b *Builder) define(name, body string) {
	b.rules = append(b.rules, name+" ::= "+body)
	b.size += 1 + repetitions(body)
}

// repetitions is how often the things in an expression are repeated, {m,n}, all together:
// llama.cpp writes each of the n out. Without an upper end m counts.
func repetitions(body string) int {
	sum := 0
	for i := 0; i < len(body); i++ {
		switch body[i] {
		case '\\':
			i++
		case '"', '[':
			end := map[byte]byte{'"': '"', '[': ']'}[body[i]]
			for i++; i < len(body) && body[i] != end; i++ {
				if body[i] == '\\' {
					i++
				}
			}
		case '{':
			n := strings.IndexByte(body[i:], '}')
			low, high, _ := strings.Cut(body[i+1:i+n], ",")
			times, err := strconv.Atoi(high)
			if err != nil { // {m} or {m,}
				times, _ = strconv.Atoi(low) // this package writes numbers
			}
			sum += times
			i += n
		}
	}
	return sum
}

// Finish returns the grammar of the texts that body describes.
func (b *Builder) Finish(body string) string {
	return "root ::= " + body + "\n" + strings.Join(b.rules, "\n") + "\n"
}

// Object is the grammar of any JSON object.
func Object() string {
	b := New()
	return b.Finish(b.use("object"))
}

// Literal is the expression of exactly this text.
func Literal(text string) string {
	var out strings.Builder
	out.WriteByte('"')
	for _, r := range text {
		switch {
		case r == '"' || r == '\\':
			out.WriteByte('\\')
			out.WriteRune(r)
		case r == '\n':
			out.WriteString(`\n`)
		case r < ' ' || r == 0x7f:
			fmt.Fprintf(&out, `\x%02X`, r)
		default:
			out.WriteRune(r)
		}
	}
	out.WriteByte('"')
	return out.String()
}

// either is the expression of one of several.
func either(options []string) string {
	if len(options) == 1 {
		return options[0]
	}
	return "(" + strings.Join(options, " | ") + ")"
}

// repeat is the expression of x from low to high times; high < 0 has no bound.
func repeat(x string, low, high int) string {
	switch {
	case high == low && low == 1:
		return x
	case high < 0 && low == 0:
		return x + "*"
	case high < 0:
		return fmt.Sprintf("%s{%d,}", x, low)
	case high == low:
		return fmt.Sprintf("%s{%d}", x, low)
	}
	return fmt.Sprintf("%s{%d,%d}", x, low, high)
}
