package llamacpp

import (
	"fmt"
	"strings"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
)

// Tokenize implements worker.Engine. Special tokens that stand in the text of a
// prompt or message count as special tokens, as in vLLM and llama-server.
func (e *Engine) Tokenize(req *openai.Request, prompt int) ([]int32, error) {
	if req.Endpoint == openai.Chat {
		return e.tokenizeChat(req)
	}
	prompts, perr := req.DecodePrompts()
	if perr != nil {
		return nil, perr
	}
	if prompt < 0 || prompt >= len(prompts) {
		return nil, fmt.Errorf("tokenize: prompt %d of %d", prompt, len(prompts))
	}
	ids := prompts[prompt].IDs
	if ids == nil { // text
		return e.tokenize("prompt", prompts[prompt].Text, e.voc.addBOS && !req.NoSpecial)
	}
	if err := e.check(ids); err != nil {
		return nil, err
	}
	return ids, nil
}

// tokenizeChat renders the messages and tokenizes the text. What a template refuses
// is the client's to mend: models differ in the roles they know and their order.
func (e *Engine) tokenizeChat(req *openai.Request) ([]int32, error) {
	messages, merr := req.DecodeMessages()
	if merr != nil {
		return nil, merr
	}
	tools, err := e.tools(req)
	if err != nil {
		return nil, err
	}
	text, err := e.chat.render(conversation{messages: messages, tools: tools, closed: req.NoGenerationPrompt})
	if err != nil {
		return nil, openai.Invalid("messages", "The model's chat template refuses these messages: %v.", err)
	}
	bos := e.voc.addBOS
	if e.voc.bos != "" && strings.HasPrefix(text, e.voc.bos) {
		bos = false // the template has written it
	}
	return e.tokenize("messages", text, bos)
}

// tokenize turns text into ids that fit the context; param names the field.
func (e *Engine) tokenize(param, text string, bos bool) ([]int32, error) {
	// No token is longer than the longest: a text far too long is refused without
	// the seconds that tokenizing it would take.
	if least := len(text) / max(e.voc.longest, 1); least > e.cfg.ContextLen {
		return nil, openai.ContextTooLong(param, least, e.cfg.ContextLen)
	}
	e.life.RLock()
	defer e.life.RUnlock()
	if e.closed {
		return nil, ErrClosed
	}
	ids, err := e.text.Tokenize(strings.ToValidUTF8(text, "\uFFFD"), bos)
	if err != nil {
		return nil, fmt.Errorf("tokenize: %w", err)
	}
	if len(ids) >= e.cfg.ContextLen {
		return nil, openai.ContextTooLong(param, len(ids), e.cfg.ContextLen)
	}
	return ids, nil
}

// tools are those that the model is shown: none when it must not call them, or when
// its template has no place for them.
func (e *Engine) tools(req *openai.Request) ([]openai.Tool, error) {
	if e.chat.format == worker.NoTools {
		return nil, nil // the worker refuses the request
	}
	tools, bad := req.DecodeTools()
	if bad != nil {
		return nil, bad
	}
	choice, bad := req.DecodeToolChoice(tools)
	if bad != nil {
		return nil, bad
	}
	if choice.Mode == openai.ToolsNone {
		return nil, nil
	}
	return tools, nil
}

// toolMark is the control token that begins calls, -1 when they begin with text.
func (v *vocabulary) toolMark(format worker.ToolFormat, tokenize func(string) ([]int32, error)) int32 {
	if format.Begin() == "" {
		return -1
	}
	ids, err := tokenize(format.Begin())
	if err != nil || len(ids) != 1 || len(v.bytes(ids[0])) > 0 {
		return -1
	}
	return ids[0]
}
