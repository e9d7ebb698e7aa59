package extproc

import (
	"net/http"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// phase is how far an Exchange has come.
type phase int

const (
	atHeaders phase = iota // nothing seen
	atBody                 // the body of a generation request was asked for
	draining               // refused; the answer waits for the body's end
	settled                // decided; what still comes passes
	answered               // by an immediate answer; nothing may be sent any more
)

// Exchange is the state of one request. Make one with Server.NewExchange, call
// Step for each of Envoy's messages, and Finish at the end, once or more. It is
// not safe for concurrent use.
type Exchange struct {
	s     *Server
	phase phase

	endpoint openai.Endpoint
	head     head
	arriving int64                         // bytes taken from the budget of bodies on their way
	held     int64                         // bytes taken from the budget of bodies here
	refusal  *extprocv3.ProcessingResponse // set when draining
	rest     int64                         // bytes of the body still read then
}

// NewExchange starts the state of one request.
func (s *Server) NewExchange() *Exchange { return &Exchange{s: s} }

// Step takes one message and returns the answer, of the same phase or an
// immediate one, or nil when nothing may be said. An error means that the message
// is none at all. It does not wait, and keeps nothing of req.
func (e *Exchange) Step(now time.Time, req *extprocv3.ProcessingRequest) (*extprocv3.ProcessingResponse, error) {
	if e.phase == answered || req.GetObservabilityMode() {
		return nil, nil
	}
	switch m := req.GetRequest().(type) {
	case *extprocv3.ProcessingRequest_RequestHeaders:
		if e.phase == atHeaders {
			e.phase = settled
			return e.headers(now, m.RequestHeaders), nil
		}
	case *extprocv3.ProcessingRequest_RequestBody:
		if e.phase == atBody {
			e.phase = settled
			return e.body(now, m.RequestBody.GetBody()), nil
		}
		if e.phase == draining {
			return e.drain(m.RequestBody), nil
		}
	case *extprocv3.ProcessingRequest_RequestTrailers:
		if e.phase == draining {
			return e.drained(), nil
		}
	case nil:
		return nil, status.Error(codes.InvalidArgument, "message without content")
	}
	return pass(req)
}

// Finish gives back what the exchange holds.
func (e *Exchange) Finish() {
	e.arrived()
	if e.held > 0 {
		e.s.cfg.Held.Release(e.held)
		e.held = 0
	}
}

// Done reports whether the request was answered, so that nothing follows.
func (e *Exchange) Done() bool { return e.phase == answered }

// headers decides by the request's head alone, or asks for the body.
func (e *Exchange) headers(now time.Time, m *extprocv3.HttpHeaders) *extprocv3.ProcessingResponse {
	e.head = readHead(m.GetHeaders().GetHeaders())
	if e.head.broken { // Go's servers reset such a stream, which reads as a fault of theirs
		no := e.refuse(openai.Errorf(http.StatusBadRequest, "The path has an invalid escape: want %% and two hexadecimal digits."))
		if m.GetEndOfStream() {
			return no
		}
		return e.later(no)
	}
	ep, ok := openai.EndpointOf(e.head.path)
	if !ok {
		return e.elsewhere(now)
	}
	e.endpoint = ep
	// What can be refused by the head is refused here, before Envoy holds a byte of
	// the body.
	limit := int64(e.s.cfg.Policy.Mesh.MaxBody)
	var no *extprocv3.ProcessingResponse
	switch {
	case e.head.last != "" && (e.head.method == http.MethodPost || e.head.method == http.MethodGet) && e.head.length <= limit:
		return e.resume()
	case e.head.method != http.MethodPost:
		no = e.refuse(openai.MethodNotAllowed(e.head.method, e.head.path, http.MethodPost), header("allow", http.MethodPost))
	case e.head.encoded:
		no = e.refuse(openai.Errorf(http.StatusUnsupportedMediaType, "Compressed request bodies are not supported; send the JSON as it is."))
	case m.GetEndOfStream() || e.head.length == 0:
		return e.refuse(openai.Errorf(http.StatusBadRequest, "The request body is missing; send a JSON object."))
	case e.head.length > limit:
		no = e.refuse(tooLarge(limit))
	case !e.expect(limit):
		no = e.refuse(openai.Unavailable(time.Second, "The server takes as many large requests as it can. Please try again."))
	default:
		e.phase = atBody
		return askForBody()
	}
	if m.GetEndOfStream() {
		return no
	}
	return e.later(no)
}

// resume sends a client that comes back to the relay, which has its stream or says that
// there is none. Its body is not looked at, and no worker is chosen.
func (e *Exchange) resume() *extprocv3.ProcessingResponse {
	e.s.metrics.requests.WithLabelValues(outcomeResume).Inc()
	return continueHeaders(&extprocv3.CommonResponse{
		HeaderMutation:  &extprocv3.HeaderMutation{SetHeaders: []headerOption{header(names.Route, names.RouteRelay)}},
		ClearRouteCache: true,
	})
}

// refuse ends the exchange with an error answer.
func (e *Exchange) refuse(err *openai.Error, extra ...headerOption) *extprocv3.ProcessingResponse {
	e.phase = answered
	outcome := outcomeRefused
	if err.Status == http.StatusServiceUnavailable {
		outcome = outcomeUnavailable
	}
	e.s.metrics.requests.WithLabelValues(outcome).Inc()
	if s := err.RetryAfterSeconds(); s != "" {
		extra = append(extra, header("retry-after", s))
	}
	return immediate(err.Status, err.Body(), "kvmesh_"+outcome, extra...)
}

// tooLarge is the answer to a body over the mesh's max_body. A chunked one of many
// times that is refused by Envoy, which holds no more.
func tooLarge(limit int64) *openai.Error {
	return openai.Errorf(http.StatusRequestEntityTooLarge, "The request body is too large: at most %d bytes are accepted.", limit)
}
