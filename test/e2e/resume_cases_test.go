package e2e

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// toolTemplate gives the model of the tests, which has no chat template, one with
// tools in Hermes' form.
const toolTemplate = `{%- if tools %}Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
A call is written <tool_call>
{"name": <function>, "arguments": <object>}
</tool_call>
{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}`

// told about at length, so that a block of KV is complete before the answer.
const story = preface + "The lighthouse keeper climbed the stairs every evening with a lamp in one hand and a letter in the other. " +
	"Nobody in the village knew who wrote to him, or why he answered on the backs of old tide tables. On the last night of the year the storm took the telephone line, and the keeper"

const orderSchema = `{"type":"object","properties":{"name":{"type":"string","maxLength":12},"count":{"type":"integer","minimum":1,"maximum":99},
	"tags":{"type":"array","items":{"enum":["small","large","🜁 rare"]},"minItems":2,"maxItems":3}},"required":["name","count","tags"],"additionalProperties":false}`

// signs are characters that the model's vocabulary does not have: each is four tokens.
const signs = "𓀀𓁐𓂀𓃠𓄿𓅓𓆣𓇳"

// chat is a conversation about the story.
func chat(text string) []any {
	return []any{map[string]any{"role": "system", "content": story}, map[string]any{"role": "user", "content": text}}
}

// kinds lists what is tried.
func kinds() []kind {
	return []kind{
		{name: "chat", fresh: true, body: map[string]any{"messages": chat("What did the keeper do?"), "max_tokens": 30, "temperature": 0, "ignore_eos": true}},
		{name: "seeded chat", full: true, body: map[string]any{
			"messages": chat("What did the keeper do?"), "max_tokens": 30, "temperature": 0.9, "seed": 7, "top_p": 0.95, "frequency_penalty": 0.2, "ignore_eos": true,
		}},
		{name: "two choices", loose: true, where: bothBegun, body: map[string]any{
			"prompt": story, "n": 2, "max_tokens": 24, "temperature": 0.8, "seed": 11, "ignore_eos": true,
		}},
		{name: "logprobs", fresh: true, body: map[string]any{"prompt": story, "max_tokens": 24, "temperature": 0, "logprobs": 3, "ignore_eos": true}},
		{name: "chat logprobs", full: true, body: map[string]any{
			"messages": chat("Who wrote the letters?"), "max_tokens": 24, "temperature": 0.7, "seed": 3, "logprobs": true, "top_logprobs": 2, "ignore_eos": true,
		}},
		{name: "stop string", fresh: true, adjust: straddle, where: held, body: map[string]any{"prompt": story, "max_tokens": 30, "temperature": 0, "ignore_eos": true}},
		{name: "halves of characters", fresh: true, where: held, body: map[string]any{
			"prompt": preface + "Copy this line of hieroglyphs, and again.\n" + strings.Repeat(signs+"\n", 6), "max_tokens": 30, "temperature": 0, "ignore_eos": true,
		}},
		{name: "json_object", full: true, check: isJSON(`{"type":"object"}`), body: map[string]any{
			"messages": chat(`Say it as JSON, like {"keeper": "old", "storm": true}.`), "max_tokens": 120, "temperature": 0,
			"response_format": map[string]any{"type": "json_object"},
		}},
		{name: "json_schema", check: isJSON(orderSchema), body: map[string]any{
			"prompt": story + " ordered, as JSON:\n", "max_tokens": 150, "temperature": 0.8, "seed": 5,
			"response_format": map[string]any{"type": "json_schema", "json_schema": map[string]any{"name": "order", "strict": true, "schema": json.RawMessage(orderSchema)}},
		}},
		{name: "tool", check: isCall, where: inArguments, body: map[string]any{
			"messages": chat("Order something for the keeper."), "max_tokens": 150, "temperature": 0.8, "seed": 9, "parallel_tool_calls": false, "tool_choice": "required",
			"tools": []any{map[string]any{"type": "function", "function": map[string]any{"name": "order", "strict": true, "parameters": json.RawMessage(orderSchema)}}},
		}},
	}
}

// bothBegun are the places where both choices have delivered tokens.
func bothBegun(evs []event) (places []int) {
	var a ledger
	for i, ev := range evs {
		if a.add(ev); len(a.Choices) == 2 && len(a.Choices[0].IDs) > 0 && len(a.Choices[1].IDs) > 0 && i < len(evs)-4 {
			places = append(places, i+1)
		}
	}
	return places
}

// held are the places behind tokens whose text, or a part of it, is still held back:
// the next event brings more text than its own tokens have. Behind the finish nothing is.
func held(evs []event) (places []int) {
	for i, ev := range evs {
		if len(ev.Choices) > 0 && len(ev.Choices[0].TokenIDs) > 0 && ev.Choices[0].Text == "" && ev.Choices[0].FinishReason == "" {
			places = append(places, i+1)
		}
	}
	return places
}

// inArguments are the places inside of the arguments of a call.
func inArguments(evs []event) (places []int) {
	var a ledger
	for i, ev := range evs {
		a.add(ev)
		if calls := a.Choices[0].Calls; len(calls) == 1 && len(calls[0].Arguments) > 1 && !json.Valid([]byte(calls[0].Arguments)) {
			places = append(places, i+1)
		}
	}
	return places
}

// straddle makes a stop string that begins in one token and ends in the next but one,
// and is nowhere before in the answer.
func straddle(t *testing.T, evs []event, body map[string]any) {
	t.Helper()
	var pieces []string
	for _, ev := range evs {
		if len(ev.Choices) > 0 && ev.Choices[0].Text != "" {
			pieces = append(pieces, ev.Choices[0].Text)
		}
	}
	for i := 12; i+2 < len(pieces); i++ {
		first, last := pieces[i], pieces[i+2]
		if len(first) < 2 || len(last) < 2 || !utf8.ValidString(first[1:]+last[:1]) {
			continue
		}
		stop := first[1:] + pieces[i+1] + last[:1]
		if at := strings.Index(strings.Join(pieces, ""), stop); at == len(strings.Join(pieces[:i], ""))+1 {
			body["stop"] = []string{stop}
			return
		}
	}
	t.Fatalf("no stop string in %q", pieces)
}

// isJSON checks an answer against a schema.
func isJSON(schema string) func(*testing.T, told) {
	return func(t *testing.T, c told) {
		t.Helper()
		conforms(t, schema, c.Text)
		if c.Finish != "stop" {
			t.Errorf("%q ends with %q", c.Text, c.Finish)
		}
	}
}

// isCall checks that an answer is one call with right arguments.
func isCall(t *testing.T, c told) {
	t.Helper()
	if len(c.Calls) != 1 || c.Calls[0].Names != "order" || strings.Count(c.Calls[0].IDs, "call_") != 1 || c.Finish != "tool_calls" || c.Text != "" {
		t.Errorf("%q with calls %+v ends with %q", c.Text, c.Calls, c.Finish)
		return
	}
	conforms(t, orderSchema, c.Calls[0].Arguments)
}

// conforms checks text against a schema with a validator that is not ours.
func conforms(t *testing.T, schema, text string) {
	t.Helper()
	rules, err := jsonschema.UnmarshalJSON(strings.NewReader(schema))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("schema.json", rules); err != nil {
		t.Fatal(err)
	}
	compiled, err := c.Compile("schema.json")
	if err != nil {
		t.Fatal(err)
	}
	v, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
	if err != nil {
		t.Errorf("%q is no JSON: %v", text, err)
		return
	}
	if err := compiled.Validate(v); err != nil {
		t.Errorf("%q: %v", text, err)
	}
}

// TestPlaces: the places where streams are cut are what they are said to be.
func TestPlaces(t *testing.T) {
	var evs []event
	for _, raw := range []string{
		`{"choices":[{"text":"a","token_ids":[1]}]}`, `{"choices":[{"text":"","token_ids":[2]}]}`, `{"choices":[{"text":"é","token_ids":[3]}]}`,
		`{"choices":[{"text":"","token_ids":[9],"finish_reason":"stop"}]}`,
		`{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"call_1","function":{"name":"f"}}]},"token_ids":[4]}]}`,
		`{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"a\""}}]},"token_ids":[5]}]}`,
		`{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":":1}"}}]},"token_ids":[6]}]}`,
	} {
		var ev event
		if err := json.Unmarshal([]byte(raw), &ev); err != nil {
			t.Fatal(err)
		}
		evs = append(evs, ev)
	}
	if got := held(evs[:4]); !slices.Equal(got, []int{2}) {
		t.Errorf("held at %v", got)
	}
	if got := inArguments(evs); !slices.Equal(got, []int{6}) {
		t.Errorf("in arguments at %v", got)
	}
}
