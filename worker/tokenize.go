package worker

import (
	"context"
	"slices"
	"strings"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// tokenize answers /tokenize in vLLM's form.
func (s *Server) tokenize(_ context.Context, e Engine, body []byte) (any, error) {
	req, bad := openai.ParseTokenize(body)
	if bad != nil {
		return nil, bad
	}
	if err := s.wanted(req.Model); err != nil {
		return nil, err
	}
	ids, err := e.Tokenize(req.Request, 0)
	if err != nil {
		return nil, err
	}
	if ids == nil {
		ids = []int32{} // an empty text is an empty list
	}
	out := openai.Tokenized{Count: len(ids), MaxModelLen: e.Model().ContextLen, Tokens: ids}
	if !req.Strings {
		return out, nil
	}
	d, ok := e.(Decoder)
	if !ok {
		return nil, openai.Invalid("return_token_strs", "'return_token_strs' is not supported by this engine.")
	}
	out.Strings = make([]string, 0, len(ids))
	for i := range ids {
		out.Strings = append(out.Strings, tokenName(d.Decode(ids[i:i+1])))
	}
	return out, nil
}

// detokenize answers /detokenize in vLLM's form. Bytes that are no text, such as a
// part of a character, become U+FFFD.
func (s *Server) detokenize(_ context.Context, e Engine, body []byte) (any, error) {
	req, bad := openai.ParseDetokenize(body)
	if bad != nil {
		return nil, bad
	}
	if err := s.wanted(req.Model); err != nil {
		return nil, err
	}
	d, ok := e.(Decoder)
	if !ok {
		return nil, openai.Invalid("tokens", "Turning token ids into text is not supported by this engine.")
	}
	vocab := e.Model().Vocab
	if i := slices.IndexFunc(req.Tokens, func(id int32) bool { return int(id) >= vocab }); i >= 0 {
		return nil, openai.Invalid("tokens", "Invalid 'tokens': token id %d is outside the vocabulary of %d.", req.Tokens[i], vocab)
	}
	return openai.Detokenized{Prompt: strings.ToValidUTF8(string(d.Decode(req.Tokens)), "\uFFFD")}, nil
}

// wanted refuses a model that is not served; these endpoints may leave it out.
func (s *Server) wanted(model string) error {
	if model != "" && !slices.Contains(s.served(), model) {
		return openai.NotFoundModel(model)
	}
	return nil
}
