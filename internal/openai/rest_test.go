package openai

import (
	"strings"
	"testing"
)

// What we know has its type on both paths, also where it is ignored; the gateway, whose
// Parse also reads what goes to foreign servers, leaves it to them.
func TestCheckRest(t *testing.T) {
	for field, wrong := range map[string][]string{
		"store":               {`"x"`, `1`, `[]`},
		"parallel_tool_calls": {`"x"`, `1`},
		"reasoning_effort":    {`1`, `[]`, `true`},
		"service_tier":        {`1`, `{}`},
		"verbosity":           {`1`},
		"prompt_cache_key":    {`1`},
		"safety_identifier":   {`{}`},
		"audio":               {`"x"`},
		"prediction":          {`[]`},
		"web_search_options":  {`true`},
		"min_tokens":          {`"x"`, `-1`, `1.5`, `[]`},
		"priority":            {`"x"`, `[]`, `1.5`, `2147483648`},
		"metadata":            {`1`, `"x"`, `[]`, `{"a":1}`, `{"a":null}`, `{` + manyPairs(17) + `}`},
		"modalities":          {`1`, `"x"`, `[1]`, `[null]`, `["audio"]`, `["text","audio"]`},
		"stop":                {`["a","b","c","d","e"]`},
	} {
		for _, ep := range []Endpoint{Chat, Completions} {
			for _, v := range wrong {
				checkRest(t, ep, `"`+field+`":`+v, field)
			}
			checkRest(t, ep, `"`+field+`":null`, "")
		}
	}
	for field, wrong := range map[string][]string{
		"top_logprobs":        {`"x"`, `-1`, `99`, `[]`},
		"tools":               {`"x"`, `1`, `{}`},
		"tools[0]":            {`[1]`},
		"tools[0].function":   {`[{"type":"function"}]`},
		"tool_choice":         {`1`, `[]`, `"nope"`},
		"parallel_tool_calls": {`"x"`},
		"functions":           {`"x"`, `[]`},
		"function_call":       {`"auto"`},
	} {
		name, _, _ := strings.Cut(field, "[")
		for _, v := range wrong {
			checkRest(t, Completions, `"`+name+`":`+v, field)
		}
	}
	for _, good := range []string{
		`"store":true,"metadata":{"a":"b"},"modalities":["text"],"reasoning_effort":"low","service_tier":"auto"`,
		`"min_tokens":0,"priority":-5,"stop":["a","b","c","d"],"tools":[],"parallel_tool_calls":false`,
		`"no_such_field":[1],"guided_choice":5`,
	} {
		checkRest(t, Chat, good, "")
		checkRest(t, Completions, good, "")
	}
}

// manyPairs is the inside of an object with n strings.
func manyPairs(n int) string {
	out := make([]string, n)
	for i := range out {
		out[i] = `"` + strings.Repeat("k", i+1) + `":"v"`
	}
	return strings.Join(out, ",")
}

// checkRest wants an error of one param, or none.
func checkRest(t *testing.T, ep Endpoint, fields, param string) {
	t.Helper()
	r, err := Parse(ep, []byte(`{"model":"m","prompt":"x",`+hi+`,`+fields+`}`))
	if err != nil {
		t.Errorf("%s %s: refused for foreign servers, too: %v", ep, fields, err)
		return
	}
	switch err := r.CheckRest(); {
	case param == "" && err != nil:
		t.Errorf("%s %s: %v", ep, fields, err)
	case param != "" && (err == nil || err.Status != 400 || err.Param != param || err.Type != "invalid_request_error"):
		t.Errorf("%s %s: %v, want param %s", ep, fields, err, param)
	}
}
