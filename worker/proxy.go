package worker

import (
	"bytes"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// Forwarded is a generation request on its way to a Proxy, which the worker has
// admitted. It is read-only.
type Forwarded struct {
	*openai.Request
	TokenIDs  bool        // the relay wants token_ids in every event of the stream
	Delivered []Delivered // what the client has of the choices of a stream to be continued; nil = a new one
}

// Delivered is what the client has of one choice: its tokens, and of their text the
// first TextBytes bytes. Where the worker before gave no token ids, the choice goes on
// by Text, which is all that was delivered.
type Delivered struct {
	Index     int
	TokenIDs  []int32
	TextBytes int
	Text      string
}

// Proxy is the ability of an engine that is a server of its own to answer requests
// in the worker's place: all but those about the worker itself.
type Proxy interface {
	// Forward answers r. On all paths but the generation endpoints f is nil and r's
	// body is unread. The error has been answered already; it is for the log and the
	// counters.
	Forward(w http.ResponseWriter, r *http.Request, f *Forwarded) error
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
		s.turnDown(w, r, refused)
		return true
	}
	defer s.life.end()
	defer s.metrics.finished.Add(1)
	f, err := s.admit(w, r)
	if err != nil {
		s.turnDown(w, r, err)
		return true
	}
	if err := p.Forward(w, r, f); err != nil {
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
func (s *Server) admit(w http.ResponseWriter, r *http.Request) (*Forwarded, *openai.Error) {
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
	f := &Forwarded{Request: req}
	if raw := req.Raw(openai.ReservedField); raw != nil {
		if !s.caller(r).relay {
			return nil, openai.Reserved()
		}
		field, bad := readMesh(raw)
		if bad != nil {
			return nil, bad
		}
		f.TokenIDs = field.TokenIDs
		if r := field.Resume; r != nil {
			f.Delivered = []Delivered{}
			for _, c := range r.Choices {
				f.Delivered = append(f.Delivered, Delivered(c))
			}
		}
	}
	return f, nil
}
