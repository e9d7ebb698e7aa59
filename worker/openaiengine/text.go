package openaiengine

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
)

// delivers reports whether the client has anything of a stream yet.
func delivers(choices []worker.Delivered) bool {
	for _, c := range choices {
		if len(c.TokenIDs) > 0 || c.Text != "" || c.TextBytes > 0 {
			return true
		}
	}
	return false
}

// byText prepares a continuation from the delivered text: it stands behind a text
// prompt, or is the beginning of the assistant's last message. The server makes tokens
// of it again, and says by two requests of one token each how many: its cache keeps
// what they prefill.
func (e *Engine) byText(ctx context.Context, kind Kind, f *worker.Forwarded, fields map[string]json.RawMessage) (*continuation, error) {
	c := &continuation{req: f.Request, delivered: f.Delivered[0], path: string(f.Endpoint), mode: "text", text: []byte(f.Delivered[0].Text)}
	if c.delivered.TextBytes != len(c.delivered.Text) {
		return nil, refuse("'text_bytes' is not the length of 'text'")
	}
	delete(fields, "return_token_ids")
	lengthen := func() error { return lengthenPrompt(kind, f.Request, fields, c.delivered.Text) }
	switch {
	case f.Endpoint == openai.Chat && kind == LlamaCP:
		text, err := e.applyTemplate(ctx, fields)
		if err != nil {
			return nil, err
		}
		c.path = string(openai.Completions)
		lengthen = func() error { return setPrompt(fields, text+c.delivered.Text) }
	case f.Endpoint == openai.Chat:
		lengthen = func() error { return beginMessage(kind, fields, c.delivered.Text) }
	}
	var err error
	if c.prompt, err = e.countPrompt(ctx, c.path, fields); err != nil {
		return nil, err
	}
	if err := lengthen(); err != nil {
		return nil, err
	}
	all, err := e.countPrompt(ctx, c.path, fields)
	if err != nil {
		return nil, err
	}
	c.given = max(all-c.prompt, 1)
	least, err := c.least(fields)
	if err != nil {
		return nil, err
	}
	early := 0
	if least > 0 {
		early = len(c.text) // which of it are the first tokens is not known
	}
	c.spare(early)
	if c.stopped() {
		return c, nil // without a body
	}
	return c, c.finish(e, fields)
}

// applyTemplate turns a chat into the prompt of a completion, as llama-server makes it.
// That can go on with a message in its chat endpoint too, but some builds then say the
// beginning again and some do not.
func (e *Engine) applyTemplate(ctx context.Context, fields map[string]json.RawMessage) (string, error) {
	ask := map[string]json.RawMessage{"messages": fields["messages"]}
	if raw, ok := fields["chat_template_kwargs"]; ok {
		ask["chat_template_kwargs"] = raw
	}
	var answer struct{ Prompt string }
	if err := e.ask(ctx, "/apply-template", ask, &answer); err != nil {
		return "", err
	}
	deleteChat(fields)
	return answer.Prompt, setPrompt(fields, answer.Prompt)
}

// setPrompt sets the prompt of a completion.
func setPrompt(fields map[string]json.RawMessage, prompt any) error {
	raw, err := json.Marshal(prompt)
	fields["prompt"] = raw
	return err
}

// beginMessage makes the text the beginning of the assistant's message.
func beginMessage(kind Kind, fields map[string]json.RawMessage, text string) error {
	var messages []json.RawMessage
	if err := json.Unmarshal(fields["messages"], &messages); err != nil {
		return refuse("its messages are no list")
	}
	var last struct{ Role string }
	if len(messages) > 0 && json.Unmarshal(messages[len(messages)-1], &last) == nil && last.Role == "assistant" {
		return refuse("its last message is the assistant's already")
	}
	if kind != VLLM && kind != SGLang {
		return refuse("the server cannot continue a message")
	}
	fields["continue_final_message"], fields["add_generation_prompt"] = []byte("true"), []byte("false")
	raw, err := json.Marshal(map[string]string{"role": "assistant", "content": text})
	if err != nil {
		return err
	}
	fields["messages"], err = json.Marshal(append(messages, raw))
	return err
}

// lengthenPrompt puts the text behind the prompt.
func lengthenPrompt(kind Kind, req *openai.Request, fields map[string]json.RawMessage, text string) error {
	prompts, bad := req.DecodePrompts()
	if bad != nil {
		return bad
	}
	if len(prompts) != 1 {
		return refuse("only streams of one prompt can be continued")
	}
	var prompt any = prompts[0].Text + text
	if ids := prompts[0].IDs; ids != nil {
		if kind != LlamaCP {
			return refuse("the server takes no prompt of both ids and text")
		}
		mixed := make([]any, 0, len(ids)+1)
		for _, id := range ids {
			mixed = append(mixed, id)
		}
		prompt = append(mixed, text)
	}
	return setPrompt(fields, prompt)
}

// countPrompt asks for one token after a request's prompt, to know how many that has.
func (e *Engine) countPrompt(ctx context.Context, path string, fields map[string]json.RawMessage) (int, error) {
	ask := make(map[string]json.RawMessage, len(fields))
	maps.Copy(ask, fields)
	for _, name := range []string{"stream_options", "max_completion_tokens", "min_tokens", "stop"} {
		delete(ask, name)
	}
	ask["stream"], ask["max_tokens"] = []byte("false"), []byte("1")
	raw, err := json.Marshal(ask)
	if err != nil {
		return 0, err
	}
	resp, err := e.post(ctx, path, raw)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	var answer struct{ Usage *openai.Usage }
	if err := json.NewDecoder(io.LimitReader(resp.Body, most)).Decode(&answer); err != nil {
		return 0, fmt.Errorf("read %s: %w", path, err)
	}
	if answer.Usage == nil || answer.Usage.PromptTokens < 1 {
		return 0, refuse("the server does not say how many tokens a prompt has")
	}
	return answer.Usage.PromptTokens, nil
}
