package extproc

import (
	"testing"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvmesh/kvmesh/internal/names"
)

// A client that comes back to a stream goes to the relay by its head alone, and no worker
// is chosen or counted.
func TestResume(t *testing.T) {
	for _, method := range []string{"POST", "GET"} {
		s := newServer(t, policyYAML, fleet())
		e := s.NewExchange()
		resp := must(t, e, headersMsg(method == "GET", method, "/v1/completions", names.LastEventID, "stream-1:3", "content-length", "10"))
		common := resp.GetRequestHeaders().GetResponse()
		set := common.GetHeaderMutation().GetSetHeaders()
		if len(set) != 1 || set[0].GetHeader().GetKey() != names.Route || string(set[0].GetHeader().GetRawValue()) != names.RouteRelay || !common.GetClearRouteCache() || resp.GetModeOverride() != nil {
			t.Errorf("%s: %v", method, resp)
		}
		e.Finish()
		if n := testutil.ToFloat64(s.metrics.requests.WithLabelValues(outcomeResume)); n != 1 {
			t.Errorf("%s: counted %v times", method, n)
		}
	}
	s := newServer(t, policyYAML, fleet())
	for name, m := range map[string]*extprocv3.ProcessingRequest{
		"no value":   headersMsg(true, "GET", "/v1/completions", names.LastEventID, ""),
		"DELETE":     headersMsg(true, "DELETE", "/v1/completions", names.LastEventID, "stream-1:3"),
		"large body": headersMsg(true, "POST", "/v1/completions", names.LastEventID, "stream-1:3", "content-length", "1001"),
	} {
		if resp := must(t, s.NewExchange(), m); resp.GetImmediateResponse() == nil {
			t.Errorf("%s: %v", name, resp)
		}
	}
}
