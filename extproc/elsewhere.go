package extproc

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvmesh/kvmesh/extproc/picker"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// elsewhere handles the paths whose bodies are not parsed: the list of models,
// and everything that streams straight to the default pool.
func (e *Exchange) elsewhere(now time.Time) *extprocv3.ProcessingResponse {
	if resp := e.models(); resp != nil {
		return resp
	}
	e.s.metrics.requests.WithLabelValues(outcomePassthrough).Inc()
	e.s.metrics.passthrough.WithLabelValues(pathClass(e.head.path)).Inc()
	d := e.s.cfg.Picker.Choose(now, picker.Request{Pool: e.s.cfg.Policy.Mesh.DefaultPool, Session: e.head.key()})
	if len(d.Candidates) == 0 {
		return continueHeaders(&extprocv3.CommonResponse{}) // Envoy's own policy decides
	}
	return toCandidates(destinations(d), d.Pool)
}

// models answers GET /v1/models and /v1/models/{name} where all names are known,
// from the policy or from the workers, nil where they are not.
func (e *Exchange) models() *extprocv3.ProcessingResponse {
	if e.head.method != http.MethodGet || e.head.path != modelsPath && !strings.HasPrefix(e.head.path, modelsPath+"/") {
		return nil
	}
	known := e.s.models
	if known == nil {
		if known = e.s.servedModels(); known == nil {
			return nil
		}
	}
	name, one := strings.CutPrefix(e.head.path, modelsPath+"/")
	switch {
	case e.head.path == modelsPath:
		e.phase = answered
		e.s.metrics.requests.WithLabelValues(outcomeModels).Inc()
		return immediate(http.StatusOK, known.list, "kvmesh_models")
	case one && name != "":
		card, ok := known.cards[name]
		if !ok {
			return e.refuse(openai.NotFoundModel(name))
		}
		e.phase = answered
		e.s.metrics.requests.WithLabelValues(outcomeModels).Inc()
		return immediate(http.StatusOK, card, "kvmesh_models")
	}
	return nil
}

const modelsPath = "/v1/models"

// modelsCreated stands in for the time a model was made, which a name in a policy
// does not have. It is fixed so that every gateway gives the same answer.
const modelsCreated = 1_735_689_600 // 2025-01-01

// modelNames are the ready answers for the model names of a policy.
type modelNames struct {
	list  []byte
	cards map[string][]byte
}

// policyModels returns nil when a route takes every name, because then only the
// servers know what there is.
func policyModels(set *policy.Set) *modelNames {
	var all []string
	for _, r := range set.Routes {
		if slices.Contains(r.Models, "*") {
			return nil
		}
		all = append(all, r.Models...)
	}
	return newModelNames(all)
}

// servedModels adds to the policy's names those of the workers that a route for
// every name leads to; nil when one of them does not tell.
func (s *Server) servedModels() *modelNames {
	var all []string
	for _, r := range s.cfg.Policy.Routes {
		for _, name := range r.Models {
			if name != "*" {
				all = append(all, name)
				continue
			}
			served, ok := s.cfg.Picker.Served(r.Tiers[0].Pool)
			if !ok {
				return nil
			}
			all = append(all, served...)
		}
	}
	return newModelNames(all)
}

func newModelNames(all []string) *modelNames {
	m := &modelNames{cards: map[string][]byte{}}
	list := openai.ModelList{Object: "list", Data: []openai.ModelCard{}}
	for _, name := range all {
		if m.cards[name] != nil {
			continue
		}
		card := openai.ModelCard{ID: name, Object: "model", Created: modelsCreated, OwnedBy: "kvmesh"}
		list.Data = append(list.Data, card)
		m.cards[name], _ = json.Marshal(card) // strings and numbers always marshal
	}
	m.list, _ = json.Marshal(list)
	return m
}

// passthroughPaths are the path prefixes that are counted by name.
func passthroughPaths() []string {
	return []string{
		"/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/audio", "/v1/images", "/v1/rerank",
		"/v1/score", "/v1/moderations", "/v1/files", "/v1/batches", "/v1/models", "/tokenize", "/detokenize",
	}
}

// pathClass maps a path to one of a fixed number of labels, because clients choose
// their paths.
func pathClass(path string) string {
	for _, p := range passthroughPaths() {
		if rest, ok := strings.CutPrefix(path, p); ok && (rest == "" || rest[0] == '/') {
			return p
		}
	}
	return "other"
}
