package llamacpp

import (
	"fmt"
	"strings"

	"github.com/kvmesh/kvmesh/internal/openai"
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
	text, err := e.chat.render(conversation{messages: messages, closed: req.NoGenerationPrompt})
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
	if len(ids) == 0 {
		return nil, openai.Invalid(param, "The prompt has no tokens.")
	}
	if len(ids) >= e.cfg.ContextLen {
		return nil, openai.ContextTooLong(param, len(ids), e.cfg.ContextLen)
	}
	return ids, nil
}
