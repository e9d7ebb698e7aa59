package openai

import (
	"encoding/json"

	"github.com/go-json-experiment/json/jsontext"
)

// mostStops is OpenAI's limit of stop strings.
const mostStops = 4

// CheckRest checks the fields of OpenAI's and vLLM's that Parse leaves alone, since
// nothing between client and server needs them: each must have its type, also where it
// is ignored. It is for servers of ours; others have opinions of their own. Fields that
// nobody knows pass.
func (r *Request) CheckRest() *Error {
	p := fieldParser{r: r}
	p.boolean("store")
	p.boolean("parallel_tool_calls")
	for _, name := range []string{"reasoning_effort", "service_tier", "verbosity", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"} {
		p.str(name)
	}
	for _, name := range []string{"audio", "prediction", "web_search_options"} {
		p.raw(name, '{', "an object")
	}
	p.integer("min_tokens", 0, 0, 1<<30)
	p.integer("priority", 0, -1<<31, 1<<31-1)
	p.metadata()
	p.modalities()
	if len(r.Stop) > mostStops {
		p.fail("stop", "Invalid 'stop': %d strings, at most %d are allowed.", len(r.Stop), mostStops)
	}
	if r.Endpoint == Completions {
		p.chatOnly()
	}
	return p.err
}

// chatOnly checks what means something in a chat only, by the same rules as there.
func (p *fieldParser) chatOnly() {
	p.integer("top_logprobs", 0, 0, 20)
	if p.err != nil {
		return
	}
	tools, err := p.r.DecodeTools()
	if err == nil {
		_, err = p.r.DecodeToolChoice(tools)
	}
	p.err = err
}

// metadata checks OpenAI's labels of a stored answer.
func (p *fieldParser) metadata() {
	const param, most = "metadata", 16
	raw := p.raw(param, '{', "an object with strings")
	if raw == nil {
		return
	}
	var m map[string]json.RawMessage
	if json.Unmarshal(raw, &m) != nil || len(m) > most {
		p.fail(param, "Invalid '%s': expected at most %d strings by name.", param, most)
	}
	for name, v := range m {
		if jsontext.Value(v).Kind() != '"' {
			p.fail(param, "Invalid type for '%s.%s': expected a string, but got %s instead.", param, clip(name), kindName(jsontext.Value(v).Kind()))
		}
	}
}

// modalities checks the kinds of output: text is all that there is here.
func (p *fieldParser) modalities() {
	const param = "modalities"
	raw := p.raw(param, '[', "an array of strings")
	if raw == nil {
		return
	}
	var kinds []json.RawMessage
	if json.Unmarshal(raw, &kinds) != nil {
		p.fail(param, "Invalid '%s': expected an array of strings.", param)
	}
	for _, k := range kinds {
		if jsontext.Value(k).Kind() != '"' {
			p.wrongType(param, "an array of strings", k)
		} else if kind := unquote(k); kind != "text" {
			p.fail(param, "Invalid value for '%s': '%s'. The supported value is: 'text'.", param, clip(kind))
		}
	}
}
