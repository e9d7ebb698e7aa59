package openai

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/go-json-experiment/json/jsontext"
)

// mostTools is OpenAI's limit of functions in one request.
const mostTools = 128

// Tool is a function that the model may call.
type Tool struct {
	Name       string
	Parameters []byte // JSON schema of the arguments, nil = no arguments
	Strict     bool   // the arguments must follow Parameters, which must be a strict schema
	Raw        []byte // the whole tool as the client wrote it
}

// DecodeTools decodes the field tools. An empty list is no tools.
func (r *Request) DecodeTools() ([]Tool, *Error) {
	for _, old := range []string{"functions", "function_call"} {
		if r.Raw(old) != nil {
			return nil, Invalid(old, "'%s' is not supported: use 'tools' and 'tool_choice'.", old)
		}
	}
	raw := r.Raw("tools")
	if raw == nil {
		return nil, nil
	}
	var items []json.RawMessage
	if json.Unmarshal(raw, &items) != nil || len(items) > mostTools {
		return nil, Invalid("tools", "Invalid 'tools': expected an array of at most %d tools.", mostTools)
	}
	out := make([]Tool, 0, len(items))
	for i, it := range items {
		t, err := decodeTool(it, fmt.Sprintf("tools[%d]", i))
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(out, func(o Tool) bool { return o.Name == t.Name }) {
			return nil, Invalid(fmt.Sprintf("tools[%d].function.name", i), "The function name '%s' is there twice.", t.Name)
		}
		out = append(out, t)
	}
	return out, nil
}

// decodeTool decodes one tool; param is its place.
func decodeTool(raw []byte, param string) (Tool, *Error) {
	var t struct {
		Type     string `json:"type"`
		Function *struct {
			Name        string          `json:"name"`
			Description *string         `json:"description"`
			Parameters  json.RawMessage `json:"parameters"`
			Strict      *bool           `json:"strict"`
		} `json:"function"`
	}
	if jsontext.Value(raw).Kind() != '{' || json.Unmarshal(raw, &t) != nil {
		return Tool{}, Invalid(param, "Invalid '%s': expected an object with 'type' and 'function'.", param)
	}
	if t.Type != "function" {
		return Tool{}, Invalid(param+".type", "Invalid value: '%s'. The supported value is: 'function'.", clip(t.Type))
	}
	if t.Function == nil {
		return Tool{}, Invalid(param+".function", "Missing required parameter: '%s.function'.", param)
	}
	f := t.Function
	if !isName(f.Name) {
		return Tool{}, Invalid(param+".function.name", "Invalid '%s.function.name': expected 1 to 64 letters, digits, underscores and dashes.", param)
	}
	out := Tool{Name: f.Name, Strict: f.Strict != nil && *f.Strict, Raw: raw}
	if f.Parameters != nil && string(f.Parameters) != "null" {
		if jsontext.Value(f.Parameters).Kind() != '{' {
			return Tool{}, Invalid(param+".function.parameters", "Invalid type for '%s.function.parameters': expected an object.", param)
		}
		out.Parameters = f.Parameters
	}
	return out, nil
}

// The modes of ToolChoice.
const (
	ToolsNone     = "none"     // the model must not call
	ToolsAuto     = "auto"     // it may
	ToolsRequired = "required" // it must, whichever
	ToolsNamed    = "function" // it must call Name
)

// ToolChoice is the decoded field tool_choice with parallel_tool_calls.
type ToolChoice struct {
	Mode   string
	Name   string // of ToolsNamed
	Single bool   // at most one call
}

// DecodeToolChoice decodes tool_choice, given the request's tools.
func (r *Request) DecodeToolChoice(tools []Tool) (ToolChoice, *Error) {
	p := fieldParser{r: r}
	c := ToolChoice{Mode: ToolsAuto, Single: p.off("parallel_tool_calls")}
	if p.err != nil {
		return c, p.err
	}
	raw := r.Raw("tool_choice")
	if len(tools) == 0 {
		if raw != nil && string(raw) != `"none"` {
			return c, Invalid("tool_choice", "'tool_choice' is only allowed when 'tools' are specified.")
		}
		c.Mode = ToolsNone
		return c, nil
	}
	switch {
	case raw == nil:
	case jsontext.Value(raw).Kind() == '"':
		c.Mode = unquote(raw)
		if !slices.Contains([]string{ToolsNone, ToolsAuto, ToolsRequired}, c.Mode) {
			return c, Invalid("tool_choice", "Invalid value: '%s'. Supported values are: 'none', 'auto' and 'required'.", clip(c.Mode))
		}
	default:
		var named struct {
			Type     string `json:"type"`
			Function struct {
				Name string `json:"name"`
			} `json:"function"`
		}
		if json.Unmarshal(raw, &named) != nil || named.Type != "function" {
			return c, Invalid("tool_choice", "Invalid 'tool_choice': expected a word, or an object of the type 'function'.")
		}
		c.Mode, c.Name, c.Single = ToolsNamed, named.Function.Name, true
		if !slices.ContainsFunc(tools, func(t Tool) bool { return t.Name == c.Name }) {
			return c, Invalid("tool_choice.function.name", "Tool choice '%s' not found in 'tools'.", clip(c.Name))
		}
	}
	return c, nil
}

// ToolCall is a call of a function in a message.
type ToolCall struct {
	ID       string       `json:"id"`
	Type     string       `json:"type"` // "function"
	Function FunctionCall `json:"function"`
}

// FunctionCall names a function and its arguments, a JSON object as text.
type FunctionCall struct {
	Name      string `json:"name,omitempty"`
	Arguments string `json:"arguments"`
}

// ToolCallDelta is what a chunk adds to the call of an index: the first one has ID,
// Type and name, all have a piece of the arguments.
type ToolCallDelta struct {
	Index    int          `json:"index"`
	ID       string       `json:"id,omitempty"`
	Type     string       `json:"type,omitempty"`
	Function FunctionCall `json:"function"`
}

// AppendCalls appends a chunk of a chat choice with tool calls, and with text where
// there is some.
func (c *Chunks) AppendCalls(dst []byte, index int, text []byte, calls []ToolCallDelta, logprobs []byte) []byte {
	raw, err := json.Marshal(calls)
	if err != nil { // plain strings always marshal
		return dst
	}
	dst = append(c.open(dst, index), `,"delta":{`...)
	if len(text) > 0 {
		dst = append(AppendString(append(dst, `"content":`...), text), ',')
	}
	dst = append(append(dst, `"tool_calls":`...), raw...)
	dst = append(dst, `},"logprobs":`...)
	if logprobs == nil {
		dst = append(dst, "null"...)
	}
	dst = append(append(dst, logprobs...), `,"finish_reason":null}`...)
	return append(dst, c.tail...)
}

// MarshalJSON writes the message; its content is null when there are only calls.
func (m ChatMessage) MarshalJSON() ([]byte, error) {
	type plain ChatMessage
	out := struct {
		plain
		Content *string `json:"content"`
	}{plain: plain(m)}
	if m.Content != "" || len(m.ToolCalls) == 0 {
		out.Content = &m.Content
	}
	return json.Marshal(out)
}
