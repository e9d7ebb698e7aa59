package xds_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

func TestLeaseAPI(t *testing.T) {
	p := newPlane(t, onePool)
	if err := p.client.LeasePool(t.Context(), "main", "a"); err != nil {
		t.Fatal(err)
	}
	if err := p.client.LeasePool(t.Context(), "main", "b"); !errors.Is(err, fleet.ErrLeased) || !strings.Contains(err.Error(), "a replaces workers") {
		t.Errorf("held by another: %v", err)
	}
	if err := p.client.ReleasePool(t.Context(), "main", "a"); err != nil {
		t.Error(err)
	}
	if err := p.client.LeasePool(t.Context(), "main", "b"); err != nil {
		t.Errorf("given back: %v", err)
	}
	for path, want := range map[string]int{
		"/v1/pools/nope/rollout?owner=a": http.StatusNotFound,
		"/v1/pools/main/rollout":         http.StatusBadRequest,
		"/v1/pools/main/rollout?owner=" + strings.Repeat("x", fleet.MostOwner+1): http.StatusBadRequest,
	} {
		if status, _ := p.call(http.MethodPut, path, nil); status != want {
			t.Errorf("%.60s: %d, want %d", path, status, want)
		}
	}
}
