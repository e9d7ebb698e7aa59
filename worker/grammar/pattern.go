package grammar

import (
	"fmt"
	"regexp/syntax"
	"strings"
)

// formats are the patterns of the string formats that are known; they allow less
// than the standards do.
func formats(name string) (string, bool) {
	const (
		date   = `[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])`
		clock  = `([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])`
		octet  = `(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])`
		label  = `[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?`
		number = `[1-9][0-9]{0,5}`
	)
	switch name {
	case "date":
		return date, true
	case "time":
		return clock, true
	case "date-time":
		return date + "T" + clock, true
	case "duration":
		return `P(` + number + `D(T` + number + `H)?|T` + number + `[HMS])`, true
	case "uuid":
		return `[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`, true
	case "ipv4":
		return octet + `(\.` + octet + `){3}`, true
	case "ipv6":
		return `[0-9a-f]{1,4}(:[0-9a-f]{1,4}){7}`, true
	case "hostname":
		return label + `(\.` + label + `){0,3}`, true
	case "email":
		return `[a-z0-9]([a-z0-9_+-]{0,20}[a-z0-9])?(\.[a-z0-9]{1,16}){0,2}@` + label + `(\.` + label + `){1,3}`, true
	}
	return "", false
}

// matching is the expression of the content of a JSON string that a regular
// expression matches whole.
func matching(pattern string) (string, error) {
	re, err := syntax.Parse(pattern, syntax.Perl)
	if err != nil {
		return "", err
	}
	return expression(unanchored(re))
}

// unanchored drops the anchors at both ends of each alternative, where they say
// nothing about a whole match.
func unanchored(re *syntax.Regexp) *syntax.Regexp {
	switch re.Op {
	case syntax.OpBeginText, syntax.OpEndText:
		return &syntax.Regexp{Op: syntax.OpEmptyMatch}
	case syntax.OpAlternate:
		for i, sub := range re.Sub {
			re.Sub[i] = unanchored(sub)
		}
	case syntax.OpCapture:
		re.Sub[0] = unanchored(re.Sub[0])
	case syntax.OpConcat:
		if re.Sub[0].Op == syntax.OpBeginText {
			re.Sub = re.Sub[1:]
		}
		if n := len(re.Sub); n > 0 && re.Sub[n-1].Op == syntax.OpEndText {
			re.Sub = re.Sub[:n-1]
		}
	}
	return re
}

// expression turns a parsed pattern into GBNF.
func expression(re *syntax.Regexp) (string, error) {
	switch re.Op {
	case syntax.OpEmptyMatch:
		return `""`, nil
	case syntax.OpLiteral:
		if re.Flags&syntax.FoldCase != 0 {
			return "", fmt.Errorf("letters without case (?i) are not supported")
		}
		var out []string
		for _, r := range re.Rune {
			out = append(out, class([]rune{r, r}))
		}
		return "(" + strings.Join(out, " ") + ")", nil
	case syntax.OpCharClass:
		return class(re.Rune), nil
	case syntax.OpAnyChar:
		return class([]rune{0, 0x10FFFF}), nil
	case syntax.OpAnyCharNotNL:
		return class([]rune{0, '\n' - 1, '\n' + 1, 0x10FFFF}), nil
	case syntax.OpCapture:
		return expression(re.Sub[0])
	case syntax.OpStar, syntax.OpPlus, syntax.OpQuest, syntax.OpRepeat:
		return repeated(re)
	case syntax.OpConcat, syntax.OpAlternate:
		var parts []string
		for _, sub := range re.Sub {
			part, err := expression(sub)
			if err != nil {
				return "", err
			}
			parts = append(parts, part)
		}
		if len(parts) == 0 {
			return `""`, nil
		}
		if re.Op == syntax.OpAlternate {
			return either(parts), nil
		}
		return "(" + strings.Join(parts, " ") + ")", nil
	}
	return "", fmt.Errorf("%q is not supported", re)
}

// repeated is the expression of *, +, ? and {a,b}.
func repeated(re *syntax.Regexp) (string, error) {
	low, high := re.Min, re.Max
	switch re.Op {
	case syntax.OpStar:
		low, high = 0, -1
	case syntax.OpPlus:
		low, high = 1, -1
	case syntax.OpQuest:
		low, high = 0, 1
	}
	x, err := expression(re.Sub[0])
	if err != nil {
		return "", err
	}
	if high == 0 {
		return `""`, nil
	}
	return repeat("("+x+")", low, high), nil
}

// class is the expression of one character of the ranges, as a JSON string spells
// it: quotes and backslashes escaped, control characters by \u.
func class(ranges []rune) string {
	var set strings.Builder
	var options []string
	for i := 0; i < len(ranges); i += 2 {
		low, high := ranges[i], ranges[i+1]
		for r := low; r <= high && r <= 0x7f; r++ {
			switch {
			case r == '"' || r == '\\':
				options = append(options, Literal(`\`+string(r)))
			case r < ' ' || r == 0x7f:
				options = append(options, Literal(fmt.Sprintf(`\u%04x`, r)))
			default:
				fmt.Fprintf(&set, `\x%02X`, r)
			}
		}
		// Surrogates are no characters.
		for _, part := range [][2]rune{{max(low, 0x80), min(high, 0xD7FF)}, {max(low, 0xE000), high}} {
			if part[0] <= part[1] {
				fmt.Fprintf(&set, `\U%08X-\U%08X`, part[0], part[1])
			}
		}
	}
	if set.Len() > 0 {
		options = append([]string{"[" + set.String() + "]"}, options...)
	}
	if len(options) == 0 {
		return `[^\x00-\U0010FFFF]` // nothing matches
	}
	return either(options)
}
