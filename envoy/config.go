package envoy

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"

	"github.com/kvmesh/kvmesh/internal/policy"
)

// Config is all that Envoy's dynamic configuration depends on. Two equal Configs
// give equal resources, so replicas of the control plane agree.
type Config struct {
	// Policy is a set as policy.Parse returns it, defaults filled in.
	Policy *policy.Set
	// Edge is the ip:port where clients connect.
	Edge string
	// Egress is the path of the Unix socket where the relay connects.
	Egress string
	// Relay and ExtProc are the paths of the gateway's Unix sockets.
	Relay, ExtProc string
	// AccessLog is the file of the JSON access log, "" for none.
	AccessLog string
	// TrustedCA is the file of the certificate authorities (PEM) that https
	// servers are checked against. Needed only when the policy names one.
	TrustedCA string
}

// maxSocketPath is the longest path of a Unix socket on Linux and macOS alike.
const maxSocketPath = 103

// Validate reports everything that makes the Config unusable.
func (c Config) Validate() error {
	if c.Policy == nil || len(c.Policy.Pools) == 0 {
		return errors.New("envoy config: policy without a WorkerPool")
	}
	var errs []error
	if a, err := netip.ParseAddrPort(c.Edge); err != nil {
		errs = append(errs, fmt.Errorf("edge %q: want ip:port", c.Edge))
	} else if a.Port() == 0 {
		errs = append(errs, fmt.Errorf("edge %q: the port must be chosen before Envoy starts", c.Edge))
	}
	for _, s := range []struct{ name, path string }{{"egress", c.Egress}, {"relay", c.Relay}, {"ext_proc", c.ExtProc}} {
		if err := checkSocketPath(s.path); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", s.name, err))
		}
	}
	for _, p := range c.Policy.Pools {
		for _, s := range p.Static {
			if isHTTPS(s.URL) && c.TrustedCA == "" {
				errs = append(errs, fmt.Errorf("WorkerPool %s: %s: https needs a file of certificate authorities, and none was found", p.Name, s.URL))
			}
		}
	}
	return errors.Join(errs...)
}

// checkSocketPath wants an absolute path that the system accepts for a socket;
// Envoy would refuse a longer one only when it binds.
func checkSocketPath(path string) error {
	if !strings.HasPrefix(path, "/") {
		return fmt.Errorf("socket path %q: want an absolute path", path)
	}
	if len(path) > maxSocketPath {
		return fmt.Errorf("socket path %q: %d bytes, more than the system's limit of %d", path, len(path), maxSocketPath)
	}
	return nil
}

// isHTTPS reports whether a server of the policy is reached over TLS.
func isHTTPS(url string) bool { return strings.HasPrefix(strings.ToLower(url), "https://") }

// Resources is the dynamic configuration but for the endpoints.
type Resources struct {
	Listeners []*listenerv3.Listener
	Routes    []*routev3.RouteConfiguration
	Clusters  []*clusterv3.Cluster
}

// Build validates the Config, makes all resources and holds each against Envoy's
// own validation rules.
func Build(c Config) (Resources, error) {
	if err := c.Validate(); err != nil {
		return Resources{}, err
	}
	r := Resources{Listeners: Listeners(c), Routes: Routes(c), Clusters: Clusters(c)}
	var errs []error
	for _, m := range r.Listeners {
		errs = append(errs, wrap("listener "+m.GetName(), m.ValidateAll()))
	}
	for _, m := range r.Routes {
		errs = append(errs, wrap("routes "+m.GetName(), m.ValidateAll()))
	}
	for _, m := range r.Clusters {
		errs = append(errs, wrap("cluster "+m.GetName(), m.ValidateAll()))
	}
	return r, errors.Join(errs...)
}

// wrap says of which part an error is, and keeps nil nil.
func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}
