package extproc

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvmesh/kvmesh/extproc/picker"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// body decides a generation request, whose whole body is there.
func (e *Exchange) body(now time.Time, body []byte) *extprocv3.ProcessingResponse {
	limit := int64(e.s.cfg.Policy.Mesh.MaxBody)
	switch {
	case len(body) == 0:
		return e.refuse(openai.Errorf(http.StatusBadRequest, "The request body is empty; send a JSON object."))
	case int64(len(body)) > limit:
		return e.refuse(tooLarge(limit))
	case !e.hold(int64(len(body))):
		return e.refuse(openai.Unavailable(time.Second, "The server holds as many request bodies as it can. Please try again."))
	}
	req, err := openai.Parse(e.endpoint, body)
	if err != nil {
		return e.refuse(err)
	}
	d := e.s.choose(now, req, e.head.key())
	switch {
	case !d.Known: // just started: Envoy knows the workers, this gateway does not yet
		e.s.metrics.requests.WithLabelValues(outcomeUndecided).Inc()
		return continueBody(&extprocv3.CommonResponse{})
	case d.Route == nil:
		return e.refuse(openai.NotFoundModel(req.Model))
	case d.Unserved:
		return e.refuse(openai.NotFoundModel(req.Model))
	case len(d.Candidates) == 0:
		return e.refuse(openai.Unavailable(time.Second, "No worker takes requests for this model at the moment. Please try again."))
	}
	return e.send(req, body, d)
}

// choose routes a request and chooses its worker.
func (s *Server) choose(now time.Time, req *openai.Request, session string) picker.Decision {
	r := picker.Request{Model: req.Model, Session: session}
	if s.cfg.Known == nil {
		return s.cfg.Picker.Choose(now, r)
	}
	var learn func(picker.Decision)
	r.Prompt, learn = s.cfg.Known(now, req)
	d := s.cfg.Picker.Choose(now, r)
	if learn != nil {
		learn(d)
	}
	if len(d.Candidates) > 0 && d.Candidates[0].Held > 0 {
		s.metrics.held.Inc()
		s.metrics.heldTokens.Add(float64(d.Candidates[0].Held))
	}
	return d
}

// send carries a decision out. The body goes back only when it changed: at 32 KB
// sending it costs more than deciding about it.
func (e *Exchange) send(req *openai.Request, body []byte, d picker.Decision) *extprocv3.ProcessingResponse {
	list := destinations(d)
	set := []headerOption{
		header(names.Destination, list),
		header(names.Pool, d.Pool),
		header(names.ModelRoute, d.Route.Name),
		header(names.Stream, e.s.cfg.NewStream()),
	}
	outcome := outcomeDirect
	if d.Route.Relay == nil || *d.Route.Relay {
		outcome = outcomeRelay
		set = append(set, header(names.Route, names.RouteRelay))
	}
	e.s.metrics.requests.WithLabelValues(outcome).Inc()

	common := &extprocv3.CommonResponse{ClearRouteCache: true}
	if out := req.Rewritten(d.Model, req.Clamp(d.MaxTokens)); &out[0] != &body[0] || len(out) != len(body) {
		common.BodyMutation = replaceBody(out)
		// Envoy checks a changed body against the header. A chunked request has
		// none, and needs none.
		if e.head.length >= 0 {
			set = append(set, header("content-length", strconv.Itoa(len(out))))
		}
	}
	common.HeaderMutation = &extprocv3.HeaderMutation{SetHeaders: set}
	resp := continueBody(common)
	resp.DynamicMetadata = metadata(list, map[string]*structpb.Value{
		"model": structpb.NewStringValue(logged(req.Model)),
		"pool":  structpb.NewStringValue(d.Pool),
		"route": structpb.NewStringValue(d.Route.Name),
	})
	return resp
}

// destinations is the candidate list as Envoy and the relay read it.
func destinations(d picker.Decision) string {
	var b strings.Builder
	for i, c := range d.Candidates {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(c.Address)
	}
	return b.String()
}

// logged bounds client text that goes into logs.
func logged(s string) string {
	const most = 128
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}
