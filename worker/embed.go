package worker

import (
	"context"
	"errors"
	"net/http"
	"slices"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// answer serves an endpoint whose answer is one JSON object that is small enough
// to be made before any of it is sent.
func (s *Server) answer(make func(ctx context.Context, e Engine, body []byte) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		engine, refused := s.life.begin()
		if refused != nil {
			s.turnDown(w, r, refused)
			return
		}
		defer s.life.end()
		body, bad := s.readBody(w, r)
		if bad != nil {
			s.turnDown(w, r, bad)
			return
		}
		v, err := make(r.Context(), engine, body)
		switch {
		case err == nil:
			writeJSON(w, http.StatusOK, v)
		case clientLeft(r):
			s.abandon()
		default:
			s.report(err)
			asError(err).Write(w)
		}
	}
}

// embed answers /v1/embeddings.
func (s *Server) embed(ctx context.Context, e Engine, body []byte) (any, error) {
	req, bad := openai.ParseEmbedding(body)
	if bad != nil {
		return nil, bad
	}
	if !slices.Contains(s.served(), req.Model) {
		return nil, openai.NotFoundModel(req.Model)
	}
	em, ok := e.(Embedder)
	if !ok {
		return nil, openai.Invalid("model", "The model %q makes no embeddings.", req.Model)
	}
	if n := em.EmbeddingSize(); req.Dimensions != 0 && req.Dimensions != n {
		return nil, openai.Invalid("dimensions",
			"The model %q makes embeddings of %d dimensions, which cannot be shortened to %d.", req.Model, n, req.Dimensions)
	}
	// All inputs are checked before the first is worked on.
	inputs, out := make([][]int32, len(req.Inputs)), openai.EmbeddingList{Object: "list", Model: s.modelName()}
	tokens := req.Generation()
	for i := range inputs {
		var err error
		if inputs[i], err = e.Tokenize(tokens, i); err != nil {
			return nil, renamed(err, "prompt", "input")
		}
		if len(inputs[i]) == 0 {
			return nil, openai.Invalid("input", "Invalid 'input': text %d holds no token.", i)
		}
		out.Usage.PromptTokens += len(inputs[i])
	}
	out.Usage.TotalTokens = out.Usage.PromptTokens
	for i, ids := range inputs {
		v, err := em.Embed(ctx, ids)
		if err != nil {
			return nil, err
		}
		out.Data = append(out.Data, openai.Embedding{
			Object: "embedding", Index: i, Embedding: openai.Vector{Values: v, Base64: req.Base64},
		})
	}
	return out, nil
}

// renamed gives the field at fault its name in another endpoint.
func renamed(err error, from, to string) error {
	e, ok := errors.AsType[*openai.Error](err)
	if !ok || e.Param != from {
		return err
	}
	c := *e
	c.Param = to
	return &c
}
