package envoy

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"unicode/utf8"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// Endpoint is one worker as Envoy should see it.
type Endpoint struct {
	Worker  string        // the worker's id, sent back in x-kvmesh-worker
	Address string        // ip:port
	Zone    string        // locality, may be empty
	Status  health.Status // as the control plane judged it
	Weight  uint32        // at least 1
	// Hostname is the server's own name: the host header and, with TLS, the
	// name its certificate must carry. Empty for our workers, whose id stands in
	// for it, so that Envoy's admin port shows it.
	Hostname string
	TLS      bool // an https server
}

// Validate says why Envoy would refuse the endpoint, and with it all others of the
// service.
func (e Endpoint) Validate() error {
	ap, err := netip.ParseAddrPort(e.Address)
	if err != nil || ap.Port() == 0 {
		return fmt.Errorf("address %q: want ip:port", e.Address)
	}
	if err := policy.ConnectAddress(ap.Addr()); err != nil {
		return err
	}
	m := lbEndpoint(e)
	if err := m.ValidateAll(); err != nil {
		return err
	}
	// Text that is no UTF-8 cannot be sent.
	if _, err := proto.Marshal(m); err != nil || !utf8.ValidString(e.Zone) {
		return errors.New("name or zone is not UTF-8")
	}
	return nil
}

// Endpoints makes the EDS resource of a service: the service name of a pool's
// cluster. Endpoints are grouped by zone and sorted, so equal sets give equal bytes
// whatever their order.
func Endpoints(service string, eps []Endpoint) *endpointv3.ClusterLoadAssignment {
	eps = slices.Clone(eps)
	slices.SortFunc(eps, func(a, b Endpoint) int {
		return cmp.Or(cmp.Compare(a.Zone, b.Zone), cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Address, b.Address))
	})
	out := &endpointv3.ClusterLoadAssignment{ClusterName: service}
	var group *endpointv3.LocalityLbEndpoints
	for i, e := range eps {
		if i == 0 || e.Zone != eps[i-1].Zone {
			group = &endpointv3.LocalityLbEndpoints{Locality: &corev3.Locality{Zone: e.Zone}}
			out.Endpoints = append(out.Endpoints, group)
		}
		group.LbEndpoints = append(group.LbEndpoints, lbEndpoint(e))
	}
	return out
}

// lbEndpoint is one endpoint with the metadata that the answers' worker header and
// the choice of the transport socket are made from.
func lbEndpoint(e Endpoint) *endpointv3.LbEndpoint {
	ep := &endpointv3.Endpoint{Address: address(e.Address), Hostname: cmp.Or(e.Hostname, e.Worker)}
	if e.Hostname != "" {
		// Checks need the host name as much as requests do.
		ep.HealthCheckConfig = &endpointv3.Endpoint_HealthCheckConfig{Hostname: e.Hostname}
	}
	meta := map[string]*structpb.Struct{names.MetadataMesh: one(names.MetadataWorkerID, structpb.NewStringValue(e.Worker))}
	if e.TLS {
		meta["envoy.transport_socket_match"] = one(tlsMatch, structpb.NewBoolValue(true))
	}
	return &endpointv3.LbEndpoint{
		HostIdentifier:      &endpointv3.LbEndpoint_Endpoint{Endpoint: ep},
		HealthStatus:        corev3.HealthStatus(e.Status),
		LoadBalancingWeight: u32(max(e.Weight, health.MinWeight)),
		Metadata:            &corev3.Metadata{FilterMetadata: meta},
	}
}

// one is a Struct of a single field.
func one(key string, v *structpb.Value) *structpb.Struct {
	return &structpb.Struct{Fields: map[string]*structpb.Value{key: v}}
}
