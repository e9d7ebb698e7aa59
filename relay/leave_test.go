package relay

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/names"
)

// TestLeavingIsNoEnd: the answer of a client that is taken for gone is cut off. Were the
// handler to return, one that has only closed its sending side would read a whole answer.
func TestLeavingIsNoEnd(t *testing.T) {
	serve := func(n int, w http.ResponseWriter, r *http.Request) {
		if n%2 == 0 {
			send(w, token("a", ""))
		}
		<-r.Context().Done()
	}
	inMesh(t, nil, serve, func(t *testing.T, m *mesh) {
		for name, body := range map[string]string{"whole": askWhole, "stream": askStream, "resumable": askStream} {
			for range 2 { // before the first token and after it
				ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
				req := httptest.NewRequestWithContext(ctx, http.MethodPost, "/v1/completions", strings.NewReader(body))
				for h, v := range map[string]string{names.Pool: "p", names.ModelRoute: "short", names.Destination: "10.0.0.1:80"} {
					req.Header.Set(h, v)
				}
				if name == "resumable" {
					req.Header.Set(names.Resumable, "1")
				}
				func() {
					defer func() {
						if got := recover(); got != http.ErrAbortHandler {
							t.Errorf("%s: the handler ends with %v", name, got)
						}
					}()
					m.relay.ServeHTTP(httptest.NewRecorder(), req)
				}()
				cancel()
			}
		}
	})
}
