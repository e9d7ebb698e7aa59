package openai

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
)

// Prompt is one prompt of a completions request: text, or token ids when IDs is
// not nil.
type Prompt struct {
	Text string
	IDs  []int32
}

// Message is one chat message with its content flattened to text.
type Message struct {
	Role    string
	Content string
	Name    string

	ToolCalls  []ToolCall // of an assistant's message
	ToolCallID string     // of a tool's message: which call it answers
}

const mostPrompts = 128

// DecodePrompts decodes the prompt field of a completions request in its four
// forms: string, strings, ids, lists of ids. The work is done at the first call;
// the result is shared, so callers leave it as it is.
func (r *Request) DecodePrompts() ([]Prompt, *Error) { return r.prompts() }

// decodePrompts does the work of DecodePrompts.
func (r *Request) decodePrompts() ([]Prompt, *Error) {
	return decodeInputs(r.Raw("prompt"), "prompt", mostPrompts)
}

// decodeInputs decodes a field that holds one text or list of ids, or at most
// most of them.
func decodeInputs(raw []byte, param string, most int) ([]Prompt, *Error) {
	if len(raw) > 0 && raw[0] == '"' {
		return []Prompt{{Text: unquote(raw)}}, nil
	}
	var items []json.RawMessage
	if json.Unmarshal(raw, &items) != nil || len(items) == 0 {
		return nil, Invalid(param, "Invalid '%s': expected a string, an array of strings, or token ids.", param)
	}
	if jsontext.Value(items[0]).Kind() == '0' {
		ids, err := decodeIDs(raw, param)
		if err != nil {
			return nil, err
		}
		return []Prompt{{IDs: ids}}, nil
	}
	if len(items) > most {
		return nil, Invalid(param, "Invalid '%s': %d elements, at most %d are allowed.", param, len(items), most)
	}
	out := make([]Prompt, len(items))
	for i, it := range items {
		name := fmt.Sprintf("%s[%d]", param, i)
		switch jsontext.Value(it).Kind() {
		case '"':
			out[i].Text = unquote(it)
		case '[':
			ids, err := decodeIDs(it, name)
			if err != nil {
				return nil, err
			}
			out[i].IDs = ids
		default:
			return nil, Invalid(name, "Invalid type for '%s': expected a string or token ids.", name)
		}
	}
	return out, nil
}

// decodeIDs decodes one list of token ids. Whether they exist is the engine's to say.
func decodeIDs(raw []byte, param string) ([]int32, *Error) {
	if bad := RefuseNulls(raw, param); bad != nil {
		return nil, bad
	}
	var ids []int32
	if json.Unmarshal(raw, &ids) != nil {
		return nil, Invalid(param, "Invalid '%s': token ids must be integers from 0 to %d.", param, math.MaxInt32)
	}
	if len(ids) == 0 {
		return nil, Invalid(param, "Invalid '%s': empty array.", param)
	}
	for _, id := range ids {
		if id < 0 {
			return nil, Invalid(param, "Invalid '%s': token id %d is negative.", param, id)
		}
	}
	return ids, nil
}

// DecodeMessages decodes the messages of a chat request. Content may be a string or
// an array of text parts, and missing or null only beside tool calls; other kinds of
// parts are refused.
func (r *Request) DecodeMessages() ([]Message, *Error) {
	var items []json.RawMessage
	if json.Unmarshal(r.Raw("messages"), &items) != nil {
		return nil, Invalid("messages", "Invalid 'messages': expected an array of objects.")
	}
	if len(items) == 0 {
		return nil, Invalid("messages", "Invalid 'messages': empty array. Expected at least one message.")
	}
	out := make([]Message, len(items))
	for i, it := range items {
		m, err := decodeMessage(it, fmt.Sprintf("messages[%d]", i))
		if err != nil {
			return nil, err
		}
		out[i] = m
	}
	return out, nil
}

// decodeMessage decodes one message; param is its place, such as messages[2].
func decodeMessage(raw []byte, param string) (Message, *Error) {
	var m struct {
		Role    string          `json:"role"`
		Name    string          `json:"name"`
		Content json.RawMessage `json:"content"`

		ToolCalls  []ToolCall `json:"tool_calls"`
		ToolCallID string     `json:"tool_call_id"`
	}
	if jsontext.Value(raw).Kind() != '{' {
		return Message{}, Invalid(param, "Invalid '%s': expected an object with 'role' and 'content'.", param)
	}
	if err := json.Unmarshal(raw, &m); err != nil {
		return Message{}, undecoded(param, err)
	}
	switch m.Role {
	case "system", "developer", "user", "assistant", "tool", "function":
	case "":
		return Message{}, Invalid(param+".role", "Missing required parameter: '%s.role'.", param)
	default:
		return Message{}, Invalid(param+".role", "Invalid value: '%s'. Supported values are: 'system', 'developer', 'user', 'assistant', 'tool' and 'function'.", clip(m.Role))
	}
	if kind := jsontext.Value(m.Content).Kind(); len(m.ToolCalls) == 0 && (len(m.Content) == 0 || kind == 'n') {
		at := param + ".content"
		if kind == 'n' {
			return Message{}, Invalid(at, "Invalid value for '%s': expected a string or an array of content parts, got null.", at)
		}
		return Message{}, Invalid(at, "Missing required parameter: '%s'.", at)
	}
	if m.Role == "tool" && m.ToolCallID == "" {
		at := param + ".tool_call_id"
		return Message{}, Invalid(at, "Missing required parameter: '%s'.", at)
	}
	text, err := decodeContent(m.Content, param+".content")
	for i, c := range m.ToolCalls {
		if c.Function.Name == "" {
			at := fmt.Sprintf("%s.tool_calls[%d].function.name", param, i)
			return Message{}, Invalid(at, "Missing required parameter: '%s'.", at)
		}
	}
	return Message{Role: m.Role, Content: text, Name: m.Name, ToolCalls: m.ToolCalls, ToolCallID: m.ToolCallID}, err
}

// decodeContent flattens a message's content to text.
func decodeContent(raw []byte, param string) (string, *Error) {
	if len(raw) == 0 {
		return "", nil
	}
	switch jsontext.Value(raw).Kind() {
	case 'n':
		return "", nil
	case '"':
		return unquote(raw), nil
	case '[':
	default:
		return "", Invalid(param, "Invalid type for '%s': expected a string or an array of content parts.", param)
	}
	var parts []struct {
		Type string          `json:"type"`
		Text json.RawMessage `json:"text"`
	}
	if json.Unmarshal(raw, &parts) != nil {
		return "", Invalid(param, "Invalid '%s': expected an array of content parts.", param)
	}
	var b strings.Builder
	for i, part := range parts {
		if part.Type != "text" {
			e := Errorf(http.StatusBadRequest, "Content parts of type %q are not supported by this model.", clip(part.Type))
			e.Param = fmt.Sprintf("%s[%d].type", param, i)
			return "", e
		}
		at := fmt.Sprintf("%s[%d].text", param, i)
		if len(part.Text) == 0 {
			return "", Invalid(at, "Missing required parameter: '%s'.", at)
		}
		if kind := jsontext.Value(part.Text).Kind(); kind != '"' {
			return "", Invalid(at, "Invalid type for '%s': expected a string, but got %s instead.", at, kindName(kind))
		}
		b.WriteString(unquote(part.Text))
	}
	return b.String(), nil
}
