package envoy_test

import (
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/envoy"
	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/internal/policy"
)

func TestConfigValidate(t *testing.T) {
	for _, c := range []struct {
		want string // in the error, "" for none
		edit func(*envoy.Config)
	}{
		{"", func(*envoy.Config) {}},
		{"", func(c *envoy.Config) { c.AccessLog = "" }},
		{"without a WorkerPool", func(c *envoy.Config) { c.Policy = nil }},
		{"without a WorkerPool", func(c *envoy.Config) { c.Policy = &policy.Set{} }},
		{"edge", func(c *envoy.Config) { c.Edge = "localhost:80" }},
		{"port must be chosen", func(c *envoy.Config) { c.Edge = "127.0.0.1:0" }},
		{"egress", func(c *envoy.Config) { c.Egress = "" }},
		{"relay", func(c *envoy.Config) { c.Relay = "relative.sock" }},
		{"ext_proc", func(c *envoy.Config) { c.ExtProc = "/" + strings.Repeat("x", 103) }},
		{"certificate authorities", func(c *envoy.Config) { c.TrustedCA = "" }},
	} {
		cfg := goldenConfig(t)
		c.edit(&cfg)
		_, err := envoy.Build(cfg)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("want %q, got %v", c.want, err)
		}
	}
	// All problems at once, not the first.
	cfg := goldenConfig(t)
	cfg.Edge, cfg.Relay = "", ""
	if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), "edge") || !strings.Contains(err.Error(), "relay") {
		t.Errorf("got %v", err)
	}
}

func TestBootstrapValidate(t *testing.T) {
	for _, c := range []struct {
		want string
		edit func(*envoy.BootstrapConfig)
	}{
		{"", func(*envoy.BootstrapConfig) {}},
		{"", func(c *envoy.BootstrapConfig) { c.Snapshot = "" }},
		{"", func(c *envoy.BootstrapConfig) { c.XDS = "10.0.0.1:9000" }},
		{"node", func(c *envoy.BootstrapConfig) { c.Node = "" }},
		{"admin", func(c *envoy.BootstrapConfig) { c.Admin = "" }},
		{"xds", func(c *envoy.BootstrapConfig) { c.XDS = "" }},
		{"xds", func(c *envoy.BootstrapConfig) { c.XDS = "control-plane:9000" }},
		{"snapshot", func(c *envoy.BootstrapConfig) { c.Snapshot = "relative.sock" }},
	} {
		cfg := goldenBootstrap()
		c.edit(&cfg)
		b, err := envoy.Bootstrap(cfg)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("want %q, got %v", c.want, err)
		}
		if services := len(b.GetDynamicResources().GetAdsConfig().GetGrpcServices()); err == nil && (services == 2) != (cfg.Snapshot != "") {
			t.Errorf("%d ADS services with snapshot %q", services, cfg.Snapshot)
		}
	}
}

// Equal facts give equal bytes, whatever order they came in.
func TestEndpointsAreSorted(t *testing.T) {
	eps := []envoy.Endpoint{
		{Worker: "b", Address: "127.0.0.1:2", Zone: "z1"},
		{Worker: "a", Address: "127.0.0.1:1", Zone: "z2"},
		{Worker: "c", Address: "127.0.0.1:3", Zone: "z1"},
		{Worker: "d", Address: "127.0.0.1:4"},
	}
	write := func(order ...int) string {
		var in []envoy.Endpoint
		for _, i := range order {
			in = append(in, eps[i])
		}
		raw, err := envoy.JSON(envoy.Endpoints("s", in))
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	if one, two := write(0, 1, 2, 3), write(3, 2, 0, 1); one != two {
		t.Errorf("%s\n%s", one, two)
	}
	if got := envoy.Endpoints("s", nil); len(got.GetEndpoints()) != 0 || got.ValidateAll() != nil {
		t.Errorf("no endpoints: %v", got)
	}
}

// An endpoint that Envoy would refuse is found before it takes the others along.
func TestEndpointValidate(t *testing.T) {
	good := envoy.Endpoint{Worker: "w", Address: "127.0.0.1:8000", Zone: "z", Status: health.Healthy, Weight: 1}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for name, edit := range map[string]func(*envoy.Endpoint){
		"port":           func(e *envoy.Endpoint) { e.Address = "127.0.0.1:99999" },
		"port 0":         func(e *envoy.Endpoint) { e.Address = "127.0.0.1:0" },
		"no address":     func(e *envoy.Endpoint) { e.Address = "" },
		"a name":         func(e *envoy.Endpoint) { e.Address = "localhost:80" },
		"all addresses":  func(e *envoy.Endpoint) { e.Address = "0.0.0.0:80" },
		"mapped":         func(e *envoy.Endpoint) { e.Address = "[::ffff:0.0.0.0]:80" },
		"an interface":   func(e *envoy.Endpoint) { e.Address = "[fe80::1%eth0]:80" },
		"many hosts":     func(e *envoy.Endpoint) { e.Address = "[ff02::1]:80" },
		"zone not UTF-8": func(e *envoy.Endpoint) { e.Zone = "\xff" },
		"id not UTF-8":   func(e *envoy.Endpoint) { e.Worker = "\xff" },
	} {
		e := good
		edit(&e)
		if err := e.Validate(); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
}
