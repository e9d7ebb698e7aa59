package worker

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// Limits on a request's headers; past them the answer is 431.
const (
	mostHeaderBytes = 64 << 10
	mostHeaders     = 256
)

// route is what one path accepts.
type route struct {
	method string // GET also takes HEAD; "" takes every method
	serve  http.HandlerFunc
}

const modelsPath = "/v1/models"

// table lists every path but the models' own, which dispatch recognizes.
func (s *Server) table() map[string]route {
	metrics := promhttp.HandlerFor(s.cfg.Registry, promhttp.HandlerOpts{})
	return map[string]route{
		string(openai.Chat):        {http.MethodPost, s.generate(openai.Chat)},
		string(openai.Completions): {http.MethodPost, s.generate(openai.Completions)},
		openai.EmbeddingsPath:      {http.MethodPost, s.answer(s.embed)},
		openai.TokenizePath:        {http.MethodPost, s.answer(s.tokenize)},
		openai.DetokenizePath:      {http.MethodPost, s.answer(s.detokenize)},
		modelsPath:                 {http.MethodGet, s.listModels},
		"/health":                  {http.MethodGet, s.answerHealth},
		"/ready":                   {http.MethodGet, s.answerReady},
		"/drain":                   {"", s.answerDrain},
		"/metrics":                 {http.MethodGet, metrics.ServeHTTP},
		"/sim":                     {"", s.control},
	}
}

// handler is the whole service of the port: gRPC and HTTP.
func (s *Server) handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(names.Worker, s.cfg.ID)
		if r.ProtoMajor == 2 && strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") && isPrivate(r.URL.Path) && r.Header.Get(names.Edge) == "" {
			s.grpc.ServeHTTP(w, r)
			return
		}
		t := &tracker{ResponseWriter: w}
		defer s.recoverPanic(t, r)
		if err := s.refuse(r); err != nil {
			s.turnDown(t, r, err)
			return
		}
		s.dispatch(t, r)
	})
}

// refuse checks what holds for every path.
func (s *Server) refuse(r *http.Request) *openai.Error {
	size, count := len(r.RequestURI), 0
	for name, values := range r.Header {
		for _, v := range values {
			size += len(name) + len(v) + 4
			count++
		}
	}
	if size > mostHeaderBytes || count > mostHeaders {
		return openai.Errorf(http.StatusRequestHeaderFieldsTooLarge,
			"The request has %d headers of %d bytes; at most %d of %d bytes are allowed.", count, size, mostHeaders, mostHeaderBytes)
	}
	if want := r.Header.Get(names.ExpectWorker); want != "" && want != s.cfg.ID {
		e := openai.Errorf(http.StatusMisdirectedRequest, "This request was meant for another worker than %s.", s.cfg.ID)
		e.Code = "wrong_worker"
		return e
	}
	return nil
}

// dispatch finds the route by the exact path. A ServeMux would redirect unclean
// paths and answer 404 and 405 in plain text.
func (s *Server) dispatch(w http.ResponseWriter, r *http.Request) {
	if s.proxied(w, r) {
		return
	}
	rt, ok := s.routes[r.URL.Path]
	if id, sub := strings.CutPrefix(r.URL.Path, modelsPath+"/"); sub && id != "" {
		rt, ok = route{http.MethodGet, func(w http.ResponseWriter, r *http.Request) { s.getModel(w, id) }}, true
	}
	if r.Header.Get(names.Edge) != "" && isPrivate(r.URL.Path) {
		ok = false // Envoy refuses these; this is for a spelling it did not know
	}
	switch {
	case !ok:
		s.turnDown(w, r, openai.Errorf(http.StatusNotFound, "Unknown request URL: %s %.120s. This worker serves %s.",
			r.Method, r.URL.Path, strings.Join(s.public(), ", ")))
	case rt.method == "" || r.Method == rt.method || (rt.method == http.MethodGet && r.Method == http.MethodHead):
		rt.serve(w, r)
	default:
		w.Header().Set("Allow", allowed(rt.method))
		s.turnDown(w, r, openai.MethodNotAllowed(r.Method, r.URL.Path, rt.method))
	}
}

// public lists the paths of the OpenAI API that are served, in order.
func (s *Server) public() []string {
	var out []string
	for path := range s.routes {
		if !isPrivate(path) {
			out = append(out, path)
		}
	}
	slices.Sort(out)
	return out
}

// isPrivate reports whether a path is the operators'.
func isPrivate(path string) bool {
	return slices.ContainsFunc(names.PrivatePaths(), func(p string) bool {
		return path == p || strings.HasPrefix(path, p+"/")
	})
}

// allowed is the Allow header of a route's method.
func allowed(method string) string {
	if method == http.MethodGet {
		return "GET, HEAD"
	}
	return method
}

// tracker notes whether the response has begun.
type tracker struct {
	http.ResponseWriter
	begun bool
}

// WriteHeader implements http.ResponseWriter.
func (t *tracker) WriteHeader(status int) {
	t.begun = true
	t.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (t *tracker) Write(b []byte) (int, error) {
	t.begun = true
	return t.ResponseWriter.Write(b)
}

// Unwrap lets http.ResponseController reach the connection.
func (t *tracker) Unwrap() http.ResponseWriter { return t.ResponseWriter }

// recoverPanic turns a panic into a 500, or into a cut connection when the
// response has begun. It must be deferred.
func (s *Server) recoverPanic(t *tracker, r *http.Request) {
	p := recover()
	if p == nil {
		return
	}
	if err, ok := p.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		panic(http.ErrAbortHandler)
	}
	s.cfg.Log.Error("panic in a request", "path", r.URL.Path, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
	if t.begun {
		panic(http.ErrAbortHandler)
	}
	openai.Errorf(http.StatusInternalServerError, "The worker hit an internal error.").Write(t)
}

// control passes to the engine's own control endpoint, where it has one.
func (s *Server) control(w http.ResponseWriter, r *http.Request) {
	if c, ok := s.life.current().(Controller); ok {
		c.Handler().ServeHTTP(w, r)
		return
	}
	s.turnDown(w, r, openai.Errorf(http.StatusNotFound, "This worker's engine is no simulator."))
}

// served are the model names that requests may use, the model's own first.
func (s *Server) served() []string {
	out := []string{s.modelName()}
	for _, a := range s.cfg.Aliases {
		if !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
}

// card describes the model under one of its names.
func (s *Server) card(e Engine, id string) openai.ModelCard {
	m := e.Model()
	c := openai.ModelCard{ID: id, Object: "model", Created: m.Created, OwnedBy: "kvmesh", MaxModelLen: m.ContextLen}
	if id != s.modelName() {
		c.Root = s.modelName()
	}
	return c
}

// listModels answers 503 while loading: an empty list would say that the model
// does not exist.
func (s *Server) listModels(w http.ResponseWriter, _ *http.Request) {
	e := s.life.current()
	if e == nil {
		_, err := s.life.begin()
		err.Write(w)
		return
	}
	list := openai.ModelList{Object: "list", Data: []openai.ModelCard{}}
	for _, id := range s.served() {
		list.Data = append(list.Data, s.card(e, id))
	}
	writeJSON(w, http.StatusOK, list)
}

// getModel serves one name, which may hold slashes.
func (s *Server) getModel(w http.ResponseWriter, id string) {
	e := s.life.current()
	for _, name := range s.served() {
		if e != nil && name == id {
			writeJSON(w, http.StatusOK, s.card(e, id))
			return
		}
	}
	openai.NotFoundModel(id).Write(w)
}

// writeJSON sends one of the plain answers.
func writeJSON(w http.ResponseWriter, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil { // only our own plain types come here
		openai.Errorf(http.StatusInternalServerError, "The worker could not encode its answer.").Write(w)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n')) // the client may be gone
}
