package envoy_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/kvmesh/kvmesh/envoy"
	"github.com/kvmesh/kvmesh/envoy/envoytest"
	"github.com/kvmesh/kvmesh/internal/health"
)

// Envoy must accept every resource that Build makes. It reads the file of
// authorities, so that must exist; an empty policy of trust is enough.
func TestEnvoyAcceptsEverything(t *testing.T) {
	c := goldenConfig(t)
	c.TrustedCA = filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(c.TrustedCA, newAuthority(t).pem, 0o600); err != nil {
		t.Fatal(err)
	}
	c.AccessLog = filepath.Join(t.TempDir(), "access.log")
	r, err := envoy.Build(c)
	if err != nil {
		t.Fatal(err)
	}
	eds := envoy.Endpoints("pool/foreign", []envoy.Endpoint{
		{Worker: "f1", Address: "127.0.0.1:1", Status: health.Healthy, Weight: 1, Hostname: "example.test", TLS: true},
	})
	envoytest.Validate(t, envoytest.Static(t, r, eds))

	b, err := envoy.Bootstrap(goldenBootstrap())
	if err != nil {
		t.Fatal(err)
	}
	envoytest.Validate(t, b)
}
