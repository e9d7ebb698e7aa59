package worker

import (
	"bytes"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// Proxy is the ability of an engine that is a server of its own to answer requests
// in the worker's place: all but those about the worker itself.
type Proxy interface {
	// Forward answers r. On the generation endpoints req is the parsed request, which
	// the worker has admitted; on all other paths it is nil and r's body is unread.
	// The error has been answered already; it is for the log and the counters.
	Forward(w http.ResponseWriter, r *http.Request, req *openai.Request) error
}

// proxied answers a request through the engine, if that is a Proxy and the path is
// not the worker's own.
func (s *Server) proxied(w http.ResponseWriter, r *http.Request) bool {
	p, ok := s.life.current().(Proxy)
	if !ok || s.own(r.URL.Path) {
		return false
	}
	_, refused := s.life.begin()
	if refused != nil {
		refused.Write(w)
		return true
	}
	defer s.life.end()
	defer s.metrics.finished.Add(1)
	req, err := s.admit(w, r)
	if err != nil {
		err.Write(w)
		return true
	}
	if err := p.Forward(w, r, req); err != nil {
		s.report(err)
	}
	return true
}

// own reports whether a path is about the worker itself, or for operators only.
func (s *Server) own(path string) bool {
	switch path {
	case string(openai.Chat), string(openai.Completions), openai.EmbeddingsPath, openai.TokenizePath, openai.DetokenizePath:
		return false
	}
	_, known := s.routes[path]
	return known || isPrivate(path) || path == modelsPath || strings.HasPrefix(path, modelsPath+"/")
}

// admit checks what the worker answers for, whatever stands behind it: the size of
// the body, the model's name, and that only the relay speaks of streams.
func (s *Server) admit(w http.ResponseWriter, r *http.Request) (*openai.Request, *openai.Error) {
	ep, ok := openai.EndpointOf(r.URL.Path)
	if !ok || r.Method != http.MethodPost {
		r.Body = http.MaxBytesReader(unwrap(w), r.Body, s.cfg.MaxBody)
		return nil, nil
	}
	body, bad := s.readBody(w, r)
	if bad != nil {
		return nil, bad
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	req, bad := openai.Parse(ep, body)
	if bad != nil {
		return nil, bad
	}
	if !slices.Contains(s.served(), req.Model) {
		return nil, openai.NotFoundModel(req.Model)
	}
	raw := req.Raw(openai.ReservedField)
	switch {
	case raw == nil:
	case !s.caller(r).relay:
		return nil, openai.Errorf(http.StatusForbidden, "The field '%s' is the mesh's own; a request with it must come from its relay.", openai.ReservedField)
	case bytes.Contains(raw, []byte(`"resume"`)):
		return nil, openai.Invalid("kvmesh.resume", "This engine cannot continue a stream.")
	}
	r.Header.Del(names.Relay)
	return req, nil
}
