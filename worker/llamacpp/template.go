package llamacpp

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/ardanlabs/jinja"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
)

// chatML is the template of models that bring none, base models mostly; llama-server
// does the same. Such a model may not know how to end a turn: clients should give
// a stop string, <|im_end|> for example.
const chatML = `{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}`

// template renders chat messages to the model's prompt text. The Jinja template
// travels with the model; llama.cpp's own function only recognizes some of them and
// renders those by built-in code. It is safe for concurrent use.
type template struct {
	t        *jinja.Template
	bos, eos string
	format   worker.ToolFormat // of the calls that it tells the model to write
}

// newTemplate compiles a model's Jinja template, ChatML when source is empty.
func newTemplate(source, bos, eos string) (*template, error) {
	if source == "" {
		source = chatML
	}
	t, err := jinja.Compile(source)
	if err != nil {
		return nil, fmt.Errorf("compile the model's chat template: %w", err)
	}
	out := &template{t: t, bos: bos, eos: eos}
	out.format = out.toolFormat(source)
	return out, nil
}

// toolFormat finds out whether the template shows tools to the model, by asking it
// to show one, and in which form it wants calls, by the marks in its text.
func (t *template) toolFormat(source string) worker.ToolFormat {
	const probe = "kvmesh_probe"
	text, err := t.render(conversation{
		messages: []openai.Message{{Role: "user", Content: "x"}},
		tools:    []openai.Tool{{Name: probe, Raw: []byte(`{"type":"function","function":{"name":"` + probe + `","description":"d","parameters":{"type":"object","properties":{}}}}`)}},
	})
	switch {
	case err != nil || !strings.Contains(text, probe):
	case strings.Contains(source, "<tool_call>") && strings.Contains(text, `"arguments"`):
		return worker.Hermes
	case strings.Contains(source, "[TOOL_CALLS]") && !strings.Contains(source, "[ARGS]"):
		return worker.Mistral
	case strings.Contains(text, `"parameters": `) && strings.Contains(source, "<|start_header_id|>"):
		return worker.Llama3
	}
	return worker.NoTools
}

// conversation is what a template renders.
type conversation struct {
	messages []openai.Message
	tools    []openai.Tool // only for a template with a format
	closed   bool          // end with the last message instead of where the assistant speaks
}

// render returns the prompt text. An error is the template's own: it may refuse an
// order of roles, for example.
func (t *template) render(c conversation) (string, error) {
	list := make([]any, len(c.messages))
	for i, m := range c.messages {
		one := map[string]any{"role": roleForTemplate(m.Role), "content": m.Content}
		if m.Name != "" {
			one["name"] = m.Name
		}
		if m.ToolCallID != "" {
			one["tool_call_id"] = m.ToolCallID
		}
		if len(m.ToolCalls) > 0 {
			one["tool_calls"] = callsForTemplate(m.ToolCalls)
		}
		list[i] = one
	}
	data := map[string]any{
		"messages":              list,
		"add_generation_prompt": !c.closed,
		"bos_token":             t.bos,
		"eos_token":             t.eos,
	}
	if len(c.tools) > 0 {
		tools := make([]any, len(c.tools))
		for i, tool := range c.tools {
			if err := json.Unmarshal(tool.Raw, &tools[i]); err != nil {
				return "", fmt.Errorf("tool %s: %w", tool.Name, err)
			}
		}
		data["tools"] = tools
	}
	return t.t.Render(data)
}

// callsForTemplate words calls as templates expect them: the arguments are an object
// where the text is one.
func callsForTemplate(calls []openai.ToolCall) []any {
	out := make([]any, len(calls))
	for i, c := range calls {
		var args any
		if json.Unmarshal([]byte(c.Function.Arguments), &args) != nil {
			args = c.Function.Arguments
		}
		out[i] = map[string]any{
			"id": c.ID, "type": "function",
			"function": map[string]any{"name": c.Function.Name, "arguments": args},
		}
	}
	return out
}

// roleForTemplate maps OpenAI's newer and older role names to those that
// templates know.
func roleForTemplate(role string) string {
	switch role {
	case "developer":
		return "system"
	case "function":
		return "tool"
	}
	return role
}
