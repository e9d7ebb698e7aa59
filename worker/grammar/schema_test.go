package grammar

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// schemas are what clients send: each is converted, and its random texts must
// validate.
var schemas = map[string]string{
	"empty":         `{}`,
	"true":          `true`,
	"plain":         `{"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer"},"ok":{"type":"boolean"},"x":{"type":"number"},"n":{"type":"null"}},"required":["name","age","ok","x","n"],"additionalProperties":false}`,
	"optional":      `{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string"},"c":{"type":"null"}},"required":["b"]}`,
	"all optional":  `{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string"}}}`,
	"only required": `{"type":"object","required":["a","é\"\\"]}`,
	"other props":   `{"type":"object","properties":{"a":{"const":1}},"required":["a","b"],"additionalProperties":{"type":"boolean"}}`,
	"closed":        `{"type":"object","additionalProperties":false}`,
	"dictionary":    `{"type":"object","additionalProperties":{"type":"array","items":{"enum":["x","y"]}}}`,
	"odd names":     `{"type":"object","properties":{"a\"b":{"type":"null"},"c\\d\n":{"type":"null"},"世界 🙂":{"type":"null"}},"required":["a\"b","c\\d\n","世界 🙂"]}`,
	"arrays":        `{"type":"array","items":{"type":"array","minItems":2,"maxItems":3,"items":{"type":"null"}},"minItems":1}`,
	"array limits":  `{"type":"object","properties":{"a":{"type":"array","maxItems":0},"b":{"type":"array","minItems":3,"items":{"type":"integer"}},"c":{"type":"array","maxItems":1,"items":{"type":"boolean"}}},"required":["a","b","c"]}`,
	"union":         `{"type":["string","null","integer"],"minLength":2,"maximum":5}`,
	"anyOf":         `{"anyOf":[{"type":"string","maxLength":3},{"type":"object","properties":{"k":{"const":"v"}},"required":["k"]},{"enum":[1,2.5,null,"a\"b",{"deep":[1]}]}]}`,
	"enum by type":  `{"type":"integer","enum":[1,"two",3]}`,
	"lengths":       `{"type":"string","minLength":3,"maxLength":5}`,
	"recursive":     `{"type":"object","properties":{"value":{"type":"integer"},"next":{"anyOf":[{"$ref":"#"},{"type":"null"}]}},"required":["value","next"],"additionalProperties":false}`,
	"tree":          `{"$ref":"#/$defs/node","$defs":{"node":{"type":"object","properties":{"name":{"type":"string"},"children":{"type":"array","items":{"$ref":"#/$defs/node"}}},"required":["name","children"]}}}`,
	"pointer":       `{"type":"object","properties":{"a":{"$ref":"#/definitions/x~1y"},"b":{"$ref":"#/definitions/x~1y"}},"required":["a","b"],"definitions":{"x/y":{"enum":["q"]}}}`,
	"date-time":     `{"type":"string","format":"date-time"}`,
	"date":          `{"type":"string","format":"date"}`,
	"time":          `{"type":"string","format":"time"}`,
	"duration":      `{"type":"string","format":"duration"}`,
	"uuid":          `{"type":"string","format":"uuid"}`,
	"ipv4":          `{"type":"string","format":"ipv4"}`,
	"ipv6":          `{"type":"string","format":"ipv6"}`,
	"hostname":      `{"type":"string","format":"hostname"}`,
	"email":         `{"type":"string","format":"email"}`,
	"annotations":   `{"$schema":"https://json-schema.org/draft/2020-12/schema","title":"t","description":"d","type":"object","properties":{"a":{"type":"string","description":"x","default":"y","examples":["z"]}},"required":["a"]}`,
	"by content":    `{"properties":{"a":{"minLength":1},"b":{"minimum":3},"c":{"maxItems":2},"d":{"items":{"type":"null"}}},"required":["a","b","c","d"]}`,
	"percent":       `{"type":"number","minimum":0,"maximum":100}`,
	"below zero":    `{"type":"number","minimum":-12,"maximum":-3}`,
	"around zero":   `{"type":"number","minimum":-1,"maximum":1}`,
	"at least":      `{"type":"number","minimum":7}`,
}

// validator compiles a schema with the checks of formats on.
func validator(t testing.TB, schema string) *jsonschema.Schema {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(schema))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource("schema.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("schema.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestEveryTextValidates(t *testing.T) {
	for name, schema := range schemas {
		t.Run(name, func(t *testing.T) {
			text, bad := FromSchema([]byte(schema), "p", false)
			if bad != nil {
				t.Fatal(bad)
			}
			g, valid := readGrammar(t, text), validator(t, schema)
			different := make(map[string]bool)
			for seed := range uint64(300) {
				out := g.generate(seed, 200)
				different[out] = true
				v, err := jsonschema.UnmarshalJSON(strings.NewReader(out))
				if err != nil {
					t.Fatalf("%q is no JSON: %v", out, err)
				}
				if err := valid.Validate(v); err != nil {
					t.Fatalf("%q: %v", out, err)
				}
			}
			if len(different) < 2 && name != "pointer" {
				t.Errorf("300 texts were all the same: %v", different)
			}
		})
	}
}

// TestOneGrammar: a schema has one grammar, or a stream could not go on elsewhere; also
// where it leaves its type to what it says about several.
func TestOneGrammar(t *testing.T) {
	all := map[string]string{
		"object or array":  `{"properties":{"a":{"type":"integer"}},"items":{"type":"integer"}}`,
		"object or string": `{"required":["a"],"minLength":3}`,
		"array or string":  `{"items":{"type":"null"},"pattern":"x"}`,
	}
	maps.Copy(all, schemas)
	for name, schema := range all {
		first, bad := FromSchema([]byte(schema), "p", false)
		if bad != nil {
			t.Fatalf("%s: %v", name, bad)
		}
		for range 20 {
			if again, _ := FromSchema([]byte(schema), "p", false); again != first {
				t.Fatalf("%s: two grammars:\n%s\n%s", name, first, again)
			}
		}
	}
}

// TestTooLarge: what llama.cpp makes of repetitions counts, and the field that is too much
// is named; equal strings and lists are one rule.
func TestTooLarge(t *testing.T) {
	properties := func(n int, of func(i int) string) string {
		var list []string
		for i := range n {
			list = append(list, fmt.Sprintf(`"p%d":%s`, i, of(i)))
		}
		return `{"type":"object","properties":{` + strings.Join(list, ",") + `}}`
	}
	for name, c := range map[string]struct{ schema, param string }{
		"lengths":     {properties(1900, func(i int) string { return fmt.Sprintf(`{"type":"string","minLength":%d,"maxLength":2000}`, i%2000) }), "p.properties.p4"},
		"patterns":    {properties(20, func(i int) string { return fmt.Sprintf(`{"type":"string","pattern":"^x{1,%d}$"}`, 1000-i) }), "p.properties.p8"},
		"lists":       {properties(9, func(i int) string { return fmt.Sprintf(`{"type":"array","minItems":%d}`, 1999-i) }), "p.properties.p4"},
		"in lists":    {`{"type":"array","items":` + properties(9, func(i int) string { return fmt.Sprintf(`{"type":"string","minLength":%d}`, 1999-i) }) + `}`, "p.items.properties.p4"},
		"many":        {properties(3000, func(int) string { return `{"type":"null"}` }), "p.properties"},
		"equal":       {properties(500, func(int) string { return `{"type":"string","minLength":1,"maxLength":2000}` }), ""},
		"free":        {properties(501, func(int) string { return `{"type":"null"}` }), "p.properties"},
		"equal lists": {properties(50, func(int) string { return `{"type":"array","maxItems":2000,"items":{"type":"string","maxLength":2000}}` }), ""},
		"four":        {properties(4, func(i int) string { return fmt.Sprintf(`{"type":"string","maxLength":%d}`, 2000-i) }), ""},
		"braces":      {properties(2, func(int) string { return `{"enum":["{9000}","a\"{9000}","[{9000}"]}` }), ""},
		"braces too":  {`{"type":"string","pattern":"^[{9000}]\\{9000\\}$"}`, ""},
	} {
		_, bad := FromSchema([]byte(c.schema), "p", false)
		switch {
		case bad == nil && c.param != "":
			t.Errorf("%s passed", name)
		case bad != nil && (bad.Param != c.param || bad.Status != 400 || !strings.Contains(bad.Message, "too large")):
			t.Errorf("%s: %+v, want param %q", name, bad, c.param)
		}
	}
}

func TestObjectIsAnyObject(t *testing.T) {
	g := readGrammar(t, Object())
	for seed := range uint64(300) {
		out := g.generate(seed, 300)
		var v map[string]any
		if err := json.Unmarshal([]byte(out), &v); err != nil {
			t.Fatalf("%q: %v", out, err)
		}
	}
}

func TestPatterns(t *testing.T) {
	for _, pattern := range []string{
		`^[A-Z]{2,4}-\d+$`, `^(a|bc|"q")*$`, `^\w+\s?$`, `x`, `^a$|^b$`, `^[^"\\]{1,5}$`, `^.{3}$`, `^[à-ü🙂-🙄]+$`, `^\\"\t$`, `^(?:ab){0}c?$`, `^$`, `^([01][0-9]|2[0-3])$`,
	} {
		schema := fmt.Sprintf(`{"type":"string","pattern":%s}`, quote(pattern))
		text, bad := FromSchema([]byte(schema), "p", false)
		if bad != nil {
			t.Errorf("%s: %v", pattern, bad)
			continue
		}
		g, re := readGrammar(t, text), regexp.MustCompile(pattern)
		for seed := range uint64(200) {
			out := g.generate(seed, 60)
			var s string
			if err := json.Unmarshal([]byte(out), &s); err != nil || !re.MatchString(s) {
				t.Fatalf("%s: %q is %q, %v", pattern, out, s, err)
			}
		}
	}
}

func quote(s string) string {
	b, _ := json.Marshal(s)
	return string(b)
}

// TestIntegers compares small spans with all numbers around them, by a regular
// expression made of the grammar's text.
func TestIntegers(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 400 {
		low := r.Int64N(2400) - 1200
		high := low + r.Int64N(1300)
		re := asRegexp(integers(low, high))
		for v := low - 120; v <= high+120; v++ {
			if got, want := re.MatchString(strconv.FormatInt(v, 10)), v >= low && v <= high; got != want {
				t.Fatalf("%d to %d: %d matches: %v (%s)", low, high, v, got, re)
			}
		}
	}
	re := asRegexp(integers(-most, most))
	for _, s := range []string{"0", "7", "-1", "999999999999999", "-999999999999999", "1000000000000000", "01", "-0", ""} {
		if got, want := re.MatchString(s), len(s) < 17 && s != "01" && s != "-0" && s != "" && s != "1000000000000000"; got != want {
			t.Errorf("%q matches: %v", s, got)
		}
	}
}

func TestDecimals(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 2))
	for range 300 {
		low := r.Int64N(300) - 150
		high := low + r.Int64N(200)
		re := asRegexp(decimals(low, high))
		for tenth := low*10 - 30; tenth <= high*10+30; tenth++ {
			text := strconv.FormatFloat(float64(tenth)/10, 'f', -1, 64)
			if got, want := re.MatchString(text), tenth >= low*10 && tenth <= high*10; got != want {
				t.Fatalf("%d to %d: %s matches: %v", low, high, text, got)
			}
		}
	}
}

// asRegexp reads an expression without rules as a regular expression: literals lose
// their quotes.
func asRegexp(e string) *regexp.Regexp {
	e = regexp.MustCompile(`"([^"]*)"`).ReplaceAllStringFunc(e, func(s string) string { return regexp.QuoteMeta(s[1 : len(s)-1]) })
	return regexp.MustCompile(`^(?:` + strings.ReplaceAll(e, " ", "") + `)$`)
}

func TestRefusedWithPlace(t *testing.T) {
	deep := strings.Repeat(`{"type":"array","items":`, 40) + `{}` + strings.Repeat(`}`, 40)
	for schema, param := range map[string]string{
		`7`:                "p",
		`false`:            "p",
		`{"type":"thing"}`: "p.type",
		`{"type":7}`:       "p.type",
		`{"type":[]}`:      "p.type",
		`{"oneOf":[{}]}`:   "p.oneOf",
		`{"allOf":[{}]}`:   "p.allOf",
		`{"type":"object","patternProperties":{}}`:                        "p.patternProperties",
		`{"type":"object","properties":{"a":{"not":{}}}}`:                 "p.properties.a.not",
		`{"type":"object","properties":[]}`:                               "p.properties",
		`{"type":"object","required":"a"}`:                                "p.required",
		`{"type":"object","required":["a"],"additionalProperties":false}`: "p.required",
		`{"type":"array","items":{"type":"array","uniqueItems":true}}`:    "p.items.uniqueItems",
		`{"type":"array","minItems":3,"maxItems":2}`:                      "p.maxItems",
		`{"type":"array","minItems":-1}`:                                  "p.minItems",
		`{"type":"string","maxLength":100000}`:                            "p.maxLength",
		`{"type":"string","pattern":"("}`:                                 "p.pattern",
		`{"type":"string","pattern":"a(?=b)"}`:                            "p.pattern",
		`{"type":"string","pattern":"\\bx"}`:                              "p.pattern",
		`{"type":"string","pattern":"(?i)x"}`:                             "p.pattern",
		`{"type":"string","pattern":"x","format":"date"}`:                 "p.format",
		`{"type":"string","format":"color"}`:                              "p.format",
		`{"type":"string","format":"date","minLength":3}`:                 "p.format",
		`{"type":"integer","multipleOf":2}`:                               "p.multipleOf",
		`{"type":"integer","minimum":5,"maximum":4}`:                      "p",
		`{"type":"number","exclusiveMinimum":0}`:                          "p.exclusiveMinimum",
		`{"type":"number","minimum":0.5}`:                                 "p.minimum",
		`{"anyOf":[]}`:                                                    "p.anyOf",
		`{"anyOf":[{}],"type":"string"}`:                                  "p.anyOf",
		`{"anyOf":[{},{"type":"x"}]}`:                                     "p.anyOf[1].type",
		`{"enum":[]}`:                                                     "p.enum",
		`{"enum":["a"],"type":"null"}`:                                    "p.enum",
		`{"const":"a","minLength":3}`:                                     "p.minLength",
		`{"$ref":"other.json"}`:                                           "p.$ref",
		`{"$ref":"#/nowhere"}`:                                            "p.$ref",
		`{"$ref":"#"}`:                                                    "p.$ref",
		`{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}`: "p.$defs.b.$ref",
		`{"$defs":{"a":{}},"$ref":"#/$defs/a","type":"string"}`:                            "p.$ref",
		deep: brief("p" + strings.Repeat(".items", 32)),
	} {
		if text, err := FromSchema([]byte(schema), "p", false); err == nil || err.Status != 400 || err.Param != param {
			t.Errorf("%.80s: %v (param %v), want param %q; grammar %.60q", schema, err, paramOf(err), param, text)
		}
	}
}

// TestPlacesAreShort: what the client has named is echoed up to a length, in the message
// and in the param; `true` is any value.
func TestPlacesAreShort(t *testing.T) {
	name := strings.Repeat("é", 3000)
	for _, schema := range []string{
		`{"properties":{"` + name + `":{"oneOf":[]}}}`,
		`{"properties":{"` + name + `":{"type":"` + name + `"}}}`,
		`{"` + name + `":1}`,
		`{"required":["` + name + `"],"additionalProperties":false}`,
		`{"$defs":{"` + name + `":{"$ref":"#/$defs/` + name + `"}},"$ref":"#/$defs/` + name + `"}`,
		`{"$ref":"#/` + name + `"}`,
		`{"type":"string","format":"` + name + `"}`,
		`{"type":"string","pattern":"(?=` + name + `)"}`,
		`{"type":"string","pattern":"(` + name + `"}`,
	} {
		_, err := FromSchema([]byte(schema), "response_format.json_schema.schema", false)
		if err == nil || len(err.Param) > 104 || len(err.Message) > 500 || !utf8.ValidString(err.Message+err.Param) {
			t.Errorf("%.60s: param of %d bytes, message of %d: %v", schema, len(paramOf(err)), len(err.Message), err)
		}
	}
	if text, err := FromSchema([]byte(`true`), "p", false); err != nil || !strings.Contains(text, "root ::= value") {
		t.Errorf("true: %v, %s", err, text)
	}
}

func paramOf(err any) string {
	raw, _ := json.Marshal(err)
	var e struct{ Param string }
	_ = json.Unmarshal(raw, &e)
	return e.Param
}

func TestStrict(t *testing.T) {
	for schema, param := range map[string]string{
		schemas["plain"]:     "-",
		schemas["recursive"]: "-",
		schemas["optional"]:  "p.additionalProperties",
		`{"type":"string"}`:  "p",
		`{"type":"object","properties":{"a":{}},"required":[],"additionalProperties":false}`:                                                      "p.required",
		`{"type":"object","properties":{"a":{"type":"object","properties":{}}},"required":["a"],"additionalProperties":false}`:                    "p.properties.a.additionalProperties",
		`{"type":"object","properties":{"a":{"type":"null"}},"required":["a","b"],"additionalProperties":false}`:                                  "p.required",
		`{"type":"object","properties":{"a":{"$ref":"#/$defs/x"}},"required":["a"],"additionalProperties":false,"$defs":{"x":{"type":"object"}}}`: "p.$defs.x.additionalProperties",
	} {
		_, err := FromSchema([]byte(schema), "p", true)
		if param == "-" {
			if err != nil {
				t.Errorf("%s: %v", schema, err)
			}
		} else if err == nil || err.Param != param {
			t.Errorf("%s: %v, want param %q", schema, err, param)
		}
	}
}

// FuzzFromSchema: no schema panics, and what is converted can be read back.
func FuzzFromSchema(f *testing.F) {
	for _, s := range schemas {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, schema []byte) {
		if !json.Valid(schema) {
			return
		}
		text, err := FromSchema(bytes.TrimSpace(schema), "p", false)
		if err == nil {
			readGrammar(t, text)
		}
	})
}
