package envoytest

import (
	"testing"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/kvmesh/kvmesh/envoy"
)

// Static makes a bootstrap that needs no control plane: the same listeners with
// their routes inline, the same clusters with their endpoints inline.
func Static(t testing.TB, r envoy.Resources, eds ...*endpointv3.ClusterLoadAssignment) *bootstrapv3.Bootstrap {
	t.Helper()
	b, err := envoy.Bootstrap(envoy.BootstrapConfig{Node: "test", Admin: "127.0.0.1:0", XDS: "/nowhere"})
	if err != nil {
		t.Fatal(err)
	}
	b.DynamicResources = nil
	routes := map[string]*routev3.RouteConfiguration{}
	for _, rc := range r.Routes {
		routes[rc.GetName()] = rc
	}
	for _, l := range r.Listeners {
		b.StaticResources.Listeners = append(b.StaticResources.Listeners, inlineRoutes(t, l, routes))
	}
	for _, c := range r.Clusters {
		c := proto.CloneOf(c)
		if c.GetType() == clusterv3.Cluster_EDS {
			c.EdsClusterConfig = nil
			c.ClusterDiscoveryType = &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC}
			c.LoadAssignment = &endpointv3.ClusterLoadAssignment{ClusterName: c.GetName()}
			for _, e := range eds {
				if e.GetClusterName() == c.GetName() {
					c.LoadAssignment = e
				}
			}
		}
		b.StaticResources.Clusters = append(b.StaticResources.Clusters, c)
	}
	return b
}

// inlineRoutes puts the routes into the listener that would have asked for them.
func inlineRoutes(t testing.TB, l *listenerv3.Listener, routes map[string]*routev3.RouteConfiguration) *listenerv3.Listener {
	t.Helper()
	l = proto.CloneOf(l)
	for _, f := range l.GetFilterChains()[0].GetFilters() {
		m := &hcmv3.HttpConnectionManager{}
		if err := f.GetTypedConfig().UnmarshalTo(m); err != nil {
			t.Fatal(err)
		}
		rc := routes[m.GetRds().GetRouteConfigName()]
		m.RouteSpecifier = &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: rc}
		typed, err := anypb.New(m)
		if err != nil {
			t.Fatal(err)
		}
		f.ConfigType = &listenerv3.Filter_TypedConfig{TypedConfig: typed}
	}
	return l
}
