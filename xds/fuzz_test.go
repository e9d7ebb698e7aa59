package xds

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/envoy"
	"github.com/kvmesh/kvmesh/xds/registry"
)

// Whatever is sent as a registration, the answer is a status that blames the
// sender, and only what Envoy can take becomes an endpoint.
func FuzzRegistration(f *testing.F) {
	f.Add("w", `{"id":"w","address":"127.0.0.1:1","pool":"a","incarnation":1}`)
	f.Add("w", `{"id":"w","address":"[::1%eth0]:1","pool":"a","incarnation":18446744073709551615,"state":"draining","aliases":[""]}`)
	f.Add("w:1", `{"id":"w:1","address":"127.0.0.1:0","pool":"a","zone":"\u0000","incarnation":1}`)
	f.Add("w", `[]`)
	f.Add("", `{}`)
	f.Fuzz(func(t *testing.T, id, body string) {
		cp := paced(t, context.Background())
		cp.run = nil // nobody to watch
		var err error
		cp.policy = policies(t, "a")
		if cp.registry, err = registry.Open(registry.Config{Dir: t.TempDir(), Log: cp.log}, t0); err != nil {
			t.Fatal(err)
		}
		r := httptest.NewRequest(http.MethodPut, "/v1/workers/x", strings.NewReader(body))
		r.Host = "localhost"
		r.URL.Path = "/v1/workers/" + id
		w := httptest.NewRecorder()
		cp.api().ServeHTTP(w, r)
		if w.Code >= 500 {
			t.Errorf("status %d for %q", w.Code, body)
		}
		for _, p := range cp.state.all() {
			d := cp.state.decide(p, t0, true)
			if w.Code == http.StatusOK && len(d.endpoints) != 1 {
				t.Errorf("accepted %q, endpoints %v", body, d.endpoints)
			}
			if err := envoy.Endpoints("pool/a", d.endpoints).ValidateAll(); err != nil {
				t.Errorf("%q became what Envoy refuses: %v", body, err)
			}
		}
	})
}
