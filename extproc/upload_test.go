package extproc

import (
	"strconv"
	"strings"
	"testing"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
)

// roomy is the policy with limits of a real size: 1 MiB a body, 8 MiB announced.
var roomy = strings.Replace(policyYAML, "maxBody: 1000, heldBodies: 2000", "maxBody: 1Mi, heldBodies: 2Mi", 1)

// piece is a part of a body that goes on.
func piece(n int) *extprocv3.ProcessingRequest {
	return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{
		RequestBody: &extprocv3.HttpBody{Body: make([]byte, n)},
	}}
}

// Uploads that never end take room from large ones only, and give it back.
func TestArrivingBodies(t *testing.T) {
	s := newServer(t, roomy, fleet())
	var uploads []*Exchange
	for i := range 6 {
		e := s.NewExchange()
		h := []string{"content-length", "1048576"}
		if i < 2 { // chunked: twice as much
			h = nil
		}
		if resp := must(t, e, headersMsg(false, "POST", "/v1/completions", h...)); resp.GetRequestHeaders() == nil {
			t.Fatalf("upload %d: %v", i, resp)
		}
		uploads = append(uploads, e)
	}
	large := s.NewExchange()
	resp := must(t, large, headersMsg(false, "POST", "/v1/completions", "content-length", "70000"))
	if resp.GetModeOverride().GetRequestBodyMode() != filterv3.ProcessingMode_FULL_DUPLEX_STREAMED {
		t.Fatalf("a seventh: %v, want it read and refused", resp)
	}
	if resp := must(t, large, piece(60000)); resp != nil {
		t.Errorf("answered before the end: %v", resp)
	}
	if im := must(t, large, bodyMsg("end")).GetImmediateResponse(); im.GetStatus().GetCode() != 503 || setHeaders(im.GetHeaders())["retry-after"] == "" {
		t.Errorf("a seventh: %v, want 503 with Retry-After", im)
	}
	if resp := generate(t, s, "/v1/completions", `{"model":"chat","prompt":"p"}`); resp.GetImmediateResponse() != nil {
		t.Errorf("a usual request: %v", resp)
	}
	uploads[5].Finish()
	uploads[5].Finish()
	if resp := must(t, s.NewExchange(), headersMsg(false, "POST", "/v1/completions", "content-length", "1048576")); resp.GetRequestHeaders() == nil {
		t.Errorf("after one left: %v", resp)
	}
}

// A refusal waits for the end of the body, however that comes, and not for ever.
func TestRefusalWaits(t *testing.T) {
	s := newServer(t, roomy, fleet())
	refused := func(h ...string) *Exchange {
		e := s.NewExchange()
		resp := must(t, e, headersMsg(false, "POST", "/v1/completions", h...))
		m := resp.GetModeOverride()
		if resp.GetResponse() != nil || m.GetRequestBodyMode() != filterv3.ProcessingMode_FULL_DUPLEX_STREAMED || m.GetRequestTrailerMode() != filterv3.ProcessingMode_SEND {
			t.Fatalf("%v: %v", h, resp)
		}
		return e
	}
	code := func(resp *extprocv3.ProcessingResponse) int {
		return int(resp.GetImmediateResponse().GetStatus().GetCode())
	}

	e := refused("content-length", "2000000")
	must(t, e, piece(1500000))
	if got := code(must(t, e, bodyMsg(strings.Repeat("x", 500000)))); got != 413 || !e.Done() {
		t.Errorf("at the end: %d, want 413", got)
	}
	e = refused("content-encoding", "gzip")
	must(t, e, piece(10))
	trailers := &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestTrailers{RequestTrailers: &extprocv3.HttpTrailers{}}}
	if got := code(must(t, e, trailers)); got != 415 {
		t.Errorf("at the trailers: %d, want 415", got)
	}
	e = refused("content-encoding", "gzip")
	last := must(t, e, piece(4<<20))
	if last == nil {
		last = must(t, e, piece(1))
	}
	if code(last) != 415 {
		t.Errorf("a body without end: %v, want 415", last)
	}
	if got := code(must(t, s.NewExchange(), headersMsg(false, "POST", "/v1/completions", "content-length", strconv.Itoa(5<<20)))); got != 413 {
		t.Errorf("too large to read: %d, want 413 at once", got)
	}
}
