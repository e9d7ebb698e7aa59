package grammar

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// object returns the expression of objects.
func (c *converter) object(n node) (string, *openai.Error) {
	props, required, err := c.properties(n)
	if err != nil {
		return "", err
	}
	if len(props) == 0 {
		return c.dictionary(n)
	}
	pairs, free := make([]string, len(props)), 0
	for i, p := range props {
		value, err := c.schema(p.raw, n.param+".properties."+p.name)
		if err != nil {
			return "", err
		}
		key, _ := jsontext.AppendQuote(nil, p.name) // it was a JSON string
		pairs[i] = c.Rule(Literal(string(key)+":") + " " + c.use("ws") + " " + value)
		if !slices.Contains(required, p.name) {
			free++
		}
	}
	if free > mostFree {
		return "", n.invalid("properties", "the schema is too large: %d properties are not required, at most %d may be", free, mostFree)
	}
	// From the end: what may follow once a pair was written, and what may come
	// while none was.
	next, first := `""`, `""`
	for i := len(pairs) - 1; i >= 0; i-- {
		follow := `"," ` + c.use("ws") + " " + pairs[i] + " " + next
		start := pairs[i] + " " + next
		if !slices.Contains(required, props[i].name) {
			follow = either([]string{follow, next})
			start = either([]string{start, first})
		}
		next, first = c.Rule(follow), c.Rule(start)
	}
	return c.Rule(fmt.Sprintf(`"{" %s %s %[1]s "}"`, c.use("ws"), first)), nil
}

// properties reads the properties of an object, those that are only required too.
func (c *converter) properties(n node) (props []member, required []string, bad *openai.Error) {
	if raw, ok := n.keywords["properties"]; ok {
		var err error
		if props, err = members(raw); err != nil {
			return nil, nil, n.invalid("properties", "expected an object of schemas")
		}
	}
	if raw, ok := n.keywords["required"]; ok && json.Unmarshal(raw, &required) != nil {
		return nil, nil, n.invalid("required", "expected a list of names")
	}
	for _, name := range required {
		if slices.ContainsFunc(props, func(p member) bool { return p.name == name }) {
			continue
		}
		if c.strict || string(n.keywords["additionalProperties"]) == "false" {
			return nil, nil, n.invalid("required", "%.80q is not among the properties", name)
		}
		other := []byte("true")
		if raw, ok := n.keywords["additionalProperties"]; ok {
			other = raw
		}
		props = append(props, member{name, other})
	}
	if !c.strict {
		return props, required, nil
	}
	if string(n.keywords["additionalProperties"]) != "false" {
		return nil, nil, n.invalid("additionalProperties", "'additionalProperties' is required to be supplied and to be false")
	}
	for _, p := range props {
		if !slices.Contains(required, p.name) {
			return nil, nil, n.invalid("required", "'required' must include every key in properties. Missing '%.80s'", p.name)
		}
	}
	return props, required, nil
}

// dictionary returns the expression of objects without known properties.
func (c *converter) dictionary(n node) (string, *openai.Error) {
	raw, ok := n.keywords["additionalProperties"]
	if !ok {
		return c.use("object"), nil
	}
	if string(raw) == "false" {
		return c.Rule(`"{" ` + c.use("ws") + ` "}"`), nil
	}
	value, err := c.schema(raw, n.param+".additionalProperties")
	if err != nil {
		return "", err
	}
	ws := c.use("ws")
	pair := c.Rule(fmt.Sprintf(`%s ":" %s %s`, c.use("string"), ws, value))
	return c.Rule(fmt.Sprintf(`"{" %s (%s ("," %[1]s %[2]s)* %[1]s)? "}"`, ws, pair)), nil
}

// array returns the expression of lists.
func (c *converter) array(n node) (string, *openai.Error) {
	low, high, err := n.span("minItems", "maxItems")
	if err != nil {
		return "", err
	}
	item := "value"
	if raw, ok := n.keywords["items"]; ok {
		if item, err = c.schema(raw, n.param+".items"); err != nil {
			return "", err
		}
	} else {
		c.use("value")
	}
	ws := c.use("ws")
	if high == 0 {
		return c.Rule(`"[" ` + ws + ` "]"`), nil
	}
	item = c.Rule(item)
	more := repeat(fmt.Sprintf(`("," %s %s)`, ws, item), max(low-1, 0), max(high-1, -1))
	some := fmt.Sprintf("%s %s %s", item, more, ws)
	if low == 0 {
		some = "(" + some + ")?"
	}
	return c.Rule(fmt.Sprintf(`"[" %s %s "]"`, ws, some)), nil
}

// span reads a pair of limits of a count; high is -1 when there is none.
func (n node) span(lowKey, highKey string) (low, high int, err *openai.Error) {
	high = -1
	for _, l := range []struct {
		key string
		to  *int
	}{{lowKey, &low}, {highKey, &high}} {
		raw, ok := n.keywords[l.key]
		if !ok {
			continue
		}
		if json.Unmarshal(raw, l.to) != nil || *l.to < 0 || *l.to > longest {
			return 0, 0, n.invalid(l.key, "expected a whole number from 0 to %d", longest)
		}
	}
	if high >= 0 && high < low {
		return 0, 0, n.invalid(highKey, "it is smaller than %s", lowKey)
	}
	return low, high, nil
}

// text returns the expression of strings.
func (c *converter) text(n node) (string, *openai.Error) {
	low, high, err := n.span("minLength", "maxLength")
	if err != nil {
		return "", err
	}
	var pattern, keyword string
	if raw, ok := n.keywords["pattern"]; ok {
		keyword = "pattern"
		if json.Unmarshal(raw, &pattern) != nil {
			return "", n.invalid(keyword, "expected a regular expression")
		}
	}
	if raw, ok := n.keywords["format"]; ok {
		if keyword != "" {
			return "", n.invalid("format", "format beside pattern is not supported")
		}
		var name string
		known := json.Unmarshal(raw, &name) == nil
		if known {
			pattern, known = formats(name)
		}
		if !known {
			return "", n.invalid("format", "the format %.40q is not supported", name)
		}
		keyword = "format"
	}
	if keyword != "" {
		if low != 0 || high != -1 {
			return "", n.invalid(keyword, "%s beside minLength or maxLength is not supported", keyword)
		}
		content, err := matching(pattern)
		if err != nil {
			return "", n.invalid(keyword, "%.200s", err)
		}
		return c.Rule(`"\"" ` + content + ` "\""`), nil
	}
	if low == 0 && high == -1 {
		return c.use("string"), nil
	}
	return c.Rule(`"\"" ` + repeat(c.use("char"), low, high) + ` "\""`), nil
}

// number returns the expression of numbers of one kind.
func (c *converter) number(n node, kind string) (string, *openai.Error) {
	low, high := float64(-most), float64(most)
	limited := false
	for _, l := range []struct {
		key       string
		lower     bool
		exclusive bool
	}{{"minimum", true, false}, {"exclusiveMinimum", true, true}, {"maximum", false, false}, {"exclusiveMaximum", false, true}} {
		raw, ok := n.keywords[l.key]
		if !ok {
			continue
		}
		limited = true
		var v float64
		if json.Unmarshal(raw, &v) != nil {
			return "", n.invalid(l.key, "expected a number")
		}
		whole := v == math.Trunc(v)
		if kind == "number" && (l.exclusive || !whole) {
			return "", n.invalid(l.key, "numbers that need not be whole may only have whole limits, included")
		}
		switch {
		case l.lower && l.exclusive && whole:
			v++
		case l.exclusive && whole:
			v--
		}
		if l.lower {
			low = max(low, math.Ceil(v))
		} else {
			high = min(high, math.Floor(v))
		}
	}
	if low > high {
		return "", n.invalid("", "no number is within the limits")
	}
	switch {
	case !limited:
		return c.use(kind), nil
	case kind == "integer":
		return c.Rule(integers(int64(low), int64(high))), nil
	}
	return c.Rule(decimals(int64(low), int64(high))), nil
}

// Quoted is the expression of a JSON string of exactly this text.
func Quoted(text string) string {
	raw, _ := jsontext.AppendQuote(nil, bytes.ToValidUTF8([]byte(text), []byte("\uFFFD"))) // valid text always quotes
	return Literal(string(raw))
}
