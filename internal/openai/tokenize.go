package openai

import "github.com/go-json-experiment/json/jsontext"

// TokenizeRequest is a parsed request to TokenizePath: a prompt, or chat messages.
type TokenizeRequest struct {
	*Request      // as an engine's Tokenize takes it; Model may be ""
	Strings  bool // return_token_strs
}

// ParseTokenize reads the body of a request to TokenizePath, in vLLM's two forms.
func ParseTokenize(body []byte) (*TokenizeRequest, *Error) {
	p, err := scanBody(body)
	if err != nil {
		return nil, err
	}
	r := &TokenizeRequest{Request: p.r, Strings: p.boolean("return_token_strs")}
	r.Model, r.Endpoint = p.str("model"), Chat
	if p.r.Raw("messages") == nil {
		r.Endpoint = Completions
		raw := p.r.Raw("prompt")
		if p.err == nil && raw == nil {
			p.fail("prompt", "Missing required parameter: 'prompt' or 'messages'.")
		} else if p.err == nil && jsontext.Value(raw).Kind() != '"' {
			p.wrongType("prompt", "a string", raw)
		}
		r.NoSpecial = p.off("add_special_tokens")
	}
	r.chatTemplate(p)
	p.input()
	r.prompts = r.decodePrompts
	if p.err != nil {
		return nil, p.err
	}
	return r, nil
}

// chatTemplate reads what steers the chat template.
func (r *Request) chatTemplate(p *fieldParser) {
	if r.Endpoint == Chat {
		r.NoGenerationPrompt = p.off("add_generation_prompt")
	}
}

// off reads a boolean that is true when absent.
func (p *fieldParser) off(name string) bool { return string(p.raw(name, 't', "a boolean")) == "false" }

// DetokenizeRequest is a parsed request to DetokenizePath.
type DetokenizeRequest struct {
	Model  string // "" = whatever the worker serves
	Tokens []int32
}

// ParseDetokenize reads the body of a request to DetokenizePath. An empty list is
// the empty text.
func ParseDetokenize(body []byte) (*DetokenizeRequest, *Error) {
	p, err := scanBody(body)
	if err != nil {
		return nil, err
	}
	r := &DetokenizeRequest{Model: p.str("model")}
	raw := p.raw("tokens", '[', "an array of token ids")
	if p.err == nil && raw == nil {
		p.fail("tokens", "Missing required parameter: 'tokens'.")
	}
	if p.err != nil {
		return nil, p.err
	}
	if isEmptyArray(raw) {
		return r, nil
	}
	r.Tokens, err = decodeIDs(raw, "tokens")
	return r, err
}

// Tokenized is the answer of TokenizePath.
type Tokenized struct {
	Count       int      `json:"count"`
	MaxModelLen int      `json:"max_model_len"`
	Tokens      []int32  `json:"tokens"`
	Strings     []string `json:"token_strs"` // null unless asked for
}

// Detokenized is the answer of DetokenizePath.
type Detokenized struct {
	Prompt string `json:"prompt"`
}
