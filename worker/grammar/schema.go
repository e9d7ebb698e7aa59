package grammar

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// Limits of a schema. They keep a small request from making a grammar that takes
// long to build.
const (
	deepest   = 32   // schemas within each other
	mostRules = 8192 // of one grammar, each repetition counted as what llama.cpp makes of it
	mostFree  = 500  // properties of one object that may be left out: llama.cpp tries all that may come next
	longest   = 2000 // repetitions of one thing, llama.cpp's own limit
)

// FromSchema converts a JSON schema. Errors are of the client and name the place
// in the request, which begins with param.
func FromSchema(schema []byte, param string, strict bool) (string, *openai.Error) {
	b := New()
	body, err := b.Schema(schema, param, strict)
	if err != nil {
		return "", err
	}
	return b.Finish(body), nil
}

// Schema adds the rules of a JSON schema and returns the expression of its values.
// With strict the schema must hold to OpenAI's rules for strict mode: an object at
// the root, every property required, and no additional ones.
func (b *Builder) Schema(schema []byte, param string, strict bool) (string, *openai.Error) {
	c := &converter{Builder: b, root: schema, rootParam: param, strict: strict, refs: make(map[string]string)}
	if strict {
		if n, err := c.node(schema, param); err != nil {
			return "", err
		} else if kinds := n.kinds(); len(kinds) != 1 || kinds[0] != "object" {
			return "", openai.Invalid(param, "Invalid schema for '%s': a strict schema must have the type \"object\" at its root.", param)
		}
	}
	return c.schema(schema, param)
}

// converter walks one schema.
type converter struct {
	*Builder
	root      []byte
	rootParam string
	strict    bool
	refs      map[string]string // JSON pointer → name of its rule
	chain     []string          // refs followed without anything in between
	depth     int
}

// member is one member of a JSON object.
type member struct {
	name string
	raw  []byte
}

// node is one schema object: its keywords.
type node struct {
	keywords map[string][]byte
	param    string
}

// invalid is the error for a keyword of the node, or for the node when it is "".
func (n node) invalid(keyword, format string, args ...any) *openai.Error {
	param := n.param
	if keyword != "" {
		param += "." + keyword
	}
	param = brief(param)
	return openai.Invalid(param, "Invalid schema for '%s': %s.", param, fmt.Sprintf(format, args...))
}

// longestPath bounds a place in messages, in bytes.
const longestPath = 100

// brief leaves out the middle of a long place: the names in it are the client's.
func brief(param string) string {
	if len(param) <= longestPath {
		return param
	}
	const half = longestPath/2 - 2
	return strings.ToValidUTF8(param[:half], "") + "…" + strings.ToValidUTF8(param[len(param)-half:], "")
}

// annotations are keywords that say nothing about the value.
func annotation(keyword string) bool {
	switch keyword {
	case "title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly", "writeOnly", "$defs", "definitions":
		return true
	}
	return false
}

// known reports whether the converter does something about a keyword.
func known(keyword string) bool {
	switch keyword {
	case "type", "enum", "const", "anyOf", "$ref", "properties", "required", "additionalProperties", "items", "minItems", "maxItems",
		"pattern", "format", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum":
		return true
	}
	return annotation(keyword)
}

// node reads a schema object.
func (c *converter) node(raw []byte, param string) (node, *openai.Error) {
	n := node{param: param, keywords: make(map[string][]byte)}
	list, err := members(raw)
	if err != nil {
		return n, n.invalid("", "expected an object with keywords")
	}
	for _, m := range list {
		if !known(m.name) {
			return n, n.invalid(m.name, "the keyword is not supported")
		}
		if !annotation(m.name) {
			n.keywords[m.name] = m.raw
		}
	}
	return n, nil
}

// members reads an object's members in order.
func members(raw []byte) ([]member, error) {
	d := jsontext.NewDecoder(bytes.NewBuffer(raw))
	if d.PeekKind() != '{' {
		return nil, fmt.Errorf("no object")
	}
	_, _ = d.ReadToken() // the brace that PeekKind saw
	var out []member
	for d.PeekKind() != '}' {
		name, err := d.ReadToken()
		if err != nil {
			return nil, err
		}
		m := member{name: name.String()}
		v, err := d.ReadValue()
		if err != nil {
			return nil, err
		}
		m.raw = bytes.Clone(v)
		out = append(out, m)
	}
	return out, nil
}

// schema returns the expression of a schema's values, while the grammar is not too large.
func (c *converter) schema(raw []byte, param string) (string, *openai.Error) {
	text, err := c.anySize(raw, param)
	if err == nil && c.size > mostRules {
		return "", node{param: param}.invalid("", "with it the schema is too large: it has more than %d rules, a repetition (minLength, maxLength, minItems, maxItems, {m,n}) counted as often as it repeats", mostRules)
	}
	return text, err
}

// anySize returns the expression of a schema's values.
func (c *converter) anySize(raw []byte, param string) (string, *openai.Error) {
	here := node{param: param}
	if string(raw) == "true" {
		return c.use("value"), nil
	}
	if string(raw) == "false" {
		return "", here.invalid("", "false allows nothing")
	}
	c.depth++
	defer func() { c.depth-- }()
	if c.depth > deepest {
		return "", here.invalid("", "more than %d schemas within each other", deepest)
	}
	n, err := c.node(raw, param)
	if err != nil {
		return "", err
	}
	if ref, ok := n.keywords["$ref"]; ok {
		return c.ref(n, ref)
	}
	c.chain = c.chain[:0]
	if list, ok := n.keywords["anyOf"]; ok {
		return c.anyOf(n, list)
	}
	if _, ok := n.keywords["enum"]; ok || n.keywords["const"] != nil {
		return c.literals(n)
	}
	var options []string
	for _, kind := range n.kinds() {
		option, err := c.kind(n, kind)
		if err != nil {
			return "", err
		}
		options = append(options, option)
	}
	if len(options) == 0 {
		return "", n.invalid("type", "expected the name of a type or a list of them")
	}
	return either(options), nil
}

// kinds are the types that a schema allows; what it says about one type only counts
// as saying that it is that type.
func (n node) kinds() []string {
	raw, ok := n.keywords["type"]
	if ok {
		var one string
		if json.Unmarshal(raw, &one) == nil {
			return []string{one}
		}
		var several []string
		if json.Unmarshal(raw, &several) == nil {
			return several
		}
		return nil
	}
	// In this order, also where a schema says something about several types: what it
	// means must not change from one worker to the next.
	for _, hint := range [...]struct {
		kind     string
		keywords []string
	}{
		{"object", []string{"properties", "required", "additionalProperties"}},
		{"array", []string{"items"}},
		{"string", []string{"pattern", "format", "minLength", "maxLength"}},
	} {
		if slices.ContainsFunc(hint.keywords, func(k string) bool { return n.keywords[k] != nil }) {
			return []string{hint.kind}
		}
	}
	if len(n.keywords) > 0 { // limits of a number or of a list
		if n.keywords["minItems"] != nil || n.keywords["maxItems"] != nil {
			return []string{"array"}
		}
		return []string{"number"}
	}
	return []string{"any"}
}

// kind returns the expression of a schema's values of one type.
func (c *converter) kind(n node, kind string) (string, *openai.Error) {
	switch kind {
	case "any":
		return c.use("value"), nil
	case "null", "boolean":
		return c.use(kind), nil
	case "integer", "number":
		return c.number(n, kind)
	case "string":
		return c.text(n)
	case "array":
		return c.array(n)
	case "object":
		return c.object(n)
	}
	return "", n.invalid("type", "%.40q is no type", kind)
}

// ref returns the rule of a schema that stands elsewhere in the document.
func (c *converter) ref(n node, raw []byte) (string, *openai.Error) {
	var pointer string
	if json.Unmarshal(raw, &pointer) != nil || !strings.HasPrefix(pointer, "#") {
		return "", n.invalid("$ref", "only references within the schema, such as #/$defs/name, are supported")
	}
	if len(n.keywords) > 1 {
		return "", n.invalid("$ref", "other keywords beside a reference are not supported")
	}
	if slices.Contains(c.chain, pointer) {
		return "", n.invalid("$ref", "%.80q refers to itself", pointer)
	}
	if name, ok := c.refs[pointer]; ok {
		return name, nil
	}
	target, ok := resolve(c.root, pointer)
	if !ok {
		return "", n.invalid("$ref", "%.80q is not there", pointer)
	}
	name := c.reserve()
	c.refs[pointer] = name
	c.chain = append(c.chain, pointer)
	param := c.rootParam + strings.ReplaceAll(strings.TrimPrefix(pointer, "#"), "/", ".")
	body, err := c.schema(target, param)
	if err != nil {
		return "", err
	}
	if body == name {
		return "", n.invalid("$ref", "%.80q refers to itself", pointer)
	}
	c.define(name, body)
	return name, nil
}

// resolve follows a JSON pointer.
func resolve(raw []byte, pointer string) ([]byte, bool) {
	path := strings.TrimPrefix(pointer, "#")
	if path == "" {
		return raw, true
	}
	if path[0] != '/' {
		return nil, false
	}
	for step := range strings.SplitSeq(path[1:], "/") {
		step = strings.NewReplacer("~1", "/", "~0", "~").Replace(step)
		list, err := members(raw)
		i := slices.IndexFunc(list, func(m member) bool { return m.name == step })
		if err != nil || i < 0 {
			return nil, false
		}
		raw = list[i].raw
	}
	return raw, true
}

// anyOf returns the expression of one of several schemas.
func (c *converter) anyOf(n node, raw []byte) (string, *openai.Error) {
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil || len(list) == 0 {
		return "", n.invalid("anyOf", "expected a list of schemas")
	}
	if len(n.keywords) > 1 {
		return "", n.invalid("anyOf", "other keywords beside anyOf are not supported")
	}
	var options []string
	for i, one := range list {
		option, err := c.schema(one, fmt.Sprintf("%s.anyOf[%d]", n.param, i))
		if err != nil {
			return "", err
		}
		options = append(options, option)
	}
	return either(options), nil
}

// literals returns the expression of enum and const.
func (c *converter) literals(n node) (string, *openai.Error) {
	var list []json.RawMessage
	if raw, ok := n.keywords["enum"]; ok {
		if json.Unmarshal(raw, &list) != nil || len(list) == 0 || len(list) > longest {
			return "", n.invalid("enum", "expected a list of 1 to %d values", longest)
		}
	}
	if raw, ok := n.keywords["const"]; ok {
		if list != nil {
			return "", n.invalid("const", "const beside enum is not supported")
		}
		list = []json.RawMessage{raw}
	}
	for k := range n.keywords {
		if k != "enum" && k != "const" && k != "type" {
			return "", n.invalid(k, "the keyword is not supported beside enum or const")
		}
	}
	var options []string
	for _, v := range list {
		if _, typed := n.keywords["type"]; typed && !slices.ContainsFunc(n.kinds(), func(kind string) bool { return isKind(v, kind) }) {
			continue // no value of the type
		}
		var text bytes.Buffer
		if json.Compact(&text, v) != nil {
			return "", n.invalid("enum", "a value is malformed")
		}
		options = append(options, Literal(text.String()))
	}
	if len(options) == 0 {
		return "", n.invalid("enum", "no value is of the type")
	}
	return c.Rule(either(options)), nil
}

// isKind reports whether a JSON value is of a type.
func isKind(raw []byte, kind string) bool {
	switch jsontext.Value(raw).Kind() {
	case 'n':
		return kind == "null"
	case 't', 'f':
		return kind == "boolean"
	case '"':
		return kind == "string"
	case '[':
		return kind == "array"
	case '{':
		return kind == "object"
	case '0':
		return kind == "number" || kind == "integer" && !bytes.ContainsAny(raw, ".eE")
	}
	return false
}
