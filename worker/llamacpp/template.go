package llamacpp

import (
	"fmt"

	"github.com/ardanlabs/jinja"

	"github.com/kvmesh/kvmesh/internal/openai"
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
	return &template{t: t, bos: bos, eos: eos}, nil
}

// conversation is what a template renders.
type conversation struct {
	messages []openai.Message
	closed   bool // end with the last message instead of where the assistant speaks
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
		list[i] = one
	}
	return t.t.Render(map[string]any{
		"messages":              list,
		"add_generation_prompt": !c.closed,
		"bos_token":             t.bos,
		"eos_token":             t.eos,
	})
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
