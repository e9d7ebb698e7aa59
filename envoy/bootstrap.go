package envoy

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvmesh/kvmesh/internal/names"
)

// BootstrapConfig is what an Envoy must know before it asks the control plane.
type BootstrapConfig struct {
	Node string // id of this Envoy, unique in the mesh
	Zone string // its locality, may be empty
	// Admin is the ip:port of the admin interface. Whoever reaches it can stop
	// Envoy: keep it on loopback.
	Admin string
	// XDS is where the control plane listens: a Unix socket's path or ip:port.
	XDS string
	// Snapshot is where the last known configuration is served when no control
	// plane is, "" for nowhere.
	Snapshot string
	// MaxConnections bounds the clients' connections, default 50,000.
	MaxConnections uint32
	// MaxHeap is what Envoy's memory is kept under, in bytes, default 3 GiB. Near it
	// the HTTP/2 requests that hold most are ended, and at last new ones refused.
	MaxHeap uint64
}

// Validate reports everything that makes the bootstrap unusable.
func (c BootstrapConfig) Validate() error {
	var errs []error
	if c.Node == "" {
		errs = append(errs, errors.New("node: missing"))
	}
	if _, err := netip.ParseAddrPort(c.Admin); err != nil {
		errs = append(errs, fmt.Errorf("admin %q: want ip:port", c.Admin))
	}
	for _, s := range []struct{ name, addr string }{{"xds", c.XDS}, {"snapshot", c.Snapshot}} {
		switch _, err := netip.ParseAddrPort(s.addr); {
		case s.name == "snapshot" && s.addr == "":
		case strings.HasPrefix(s.addr, "/"):
			errs = append(errs, wrap(s.name, checkSocketPath(s.addr)))
		case err != nil:
			errs = append(errs, fmt.Errorf("%s %q: want ip:port or an absolute socket path", s.name, s.addr))
		}
	}
	return errors.Join(errs...)
}

// Bootstrap makes the static configuration: admin interface, the way to the
// control plane, and everything else over delta ADS.
func Bootstrap(c BootstrapConfig) (*bootstrapv3.Bootstrap, error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("bootstrap: %w", err)
	}
	if c.MaxConnections == 0 {
		c.MaxConnections = 50000
	}
	if c.MaxHeap == 0 {
		c.MaxHeap = 3 << 30
	}
	services := []*corev3.GrpcService{envoyGRPC(names.ClusterXDS)}
	clusters := []*clusterv3.Cluster{xdsCluster(names.ClusterXDS, c.XDS)}
	runtime := map[string]*structpb.Value{}
	// Envoy 1.40 knows a second source of configuration, but not by default.
	if c.Snapshot != "" {
		services = append(services, envoyGRPC(clusterSnapshot))
		clusters = append(clusters, xdsCluster(clusterSnapshot, c.Snapshot))
		runtime["envoy.restart_features.xds_failover_support"] = structpb.NewBoolValue(true)
	}
	b := &bootstrapv3.Bootstrap{
		Node: &corev3.Node{Id: c.Node, Cluster: "kvmesh", Locality: &corev3.Locality{Zone: c.Zone}},
		Admin: &bootstrapv3.Admin{
			Address: address(c.Admin), IgnoreGlobalConnLimit: true,
		},
		DynamicResources: &bootstrapv3.Bootstrap_DynamicResources{
			AdsConfig: &corev3.ApiConfigSource{
				// Delta: one changed endpoint is one resource on the wire.
				ApiType:                   corev3.ApiConfigSource_DELTA_GRPC,
				TransportApiVersion:       corev3.ApiVersion_V3,
				SetNodeOnFirstMessageOnly: true,
				GrpcServices:              services,
			},
			CdsConfig: fromADS(),
			LdsConfig: fromADS(),
		},
		StaticResources: &bootstrapv3.Bootstrap_StaticResources{Clusters: clusters},
		LayeredRuntime: &bootstrapv3.LayeredRuntime{Layers: []*bootstrapv3.RuntimeLayer{
			{Name: "kvmesh", LayerSpecifier: &bootstrapv3.RuntimeLayer_StaticLayer{StaticLayer: &structpb.Struct{Fields: runtime}}},
			// Lets operators change runtime values by the admin interface.
			{Name: "admin", LayerSpecifier: &bootstrapv3.RuntimeLayer_AdminLayer_{AdminLayer: &bootstrapv3.RuntimeLayer_AdminLayer{}}},
		}},
		OverloadManager: limits(c),
	}
	return b, wrap("bootstrap", b.ValidateAll())
}

// clusterSnapshot is the cluster of the snapshot server.
const clusterSnapshot = "xds_snapshot"

// envoyGRPC is a gRPC service behind a cluster of this bootstrap. Of two services
// Envoy takes the first, and the second after two failures in a row; it stays with
// the one that answered until that closes the connection.
func envoyGRPC(cluster string) *corev3.GrpcService {
	return &corev3.GrpcService{TargetSpecifier: &corev3.GrpcService_EnvoyGrpc_{
		EnvoyGrpc: &corev3.GrpcService_EnvoyGrpc{ClusterName: cluster},
	}}
}

// xdsCluster reaches a control plane. Pings notice one that hangs, and an Envoy that
// starts just then waits for two of them before it turns to the snapshot. A health
// check would be sooner, but with streams that fail as they begin Envoy loses its
// way between its two sources ("already exists") and is left with neither.
func xdsCluster(name, addr string) *clusterv3.Cluster {
	return &clusterv3.Cluster{
		Name:                          name,
		ClusterDiscoveryType:          &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC},
		ConnectTimeout:                seconds(time.Second),
		LoadAssignment:                single(name, addr),
		TypedExtensionProtocolOptions: packedOptions(pinged(time.Second, 1500*time.Millisecond)),
	}
}

// packedOptions is a cluster's HTTP settings in the form the cluster takes them.
func packedOptions(m proto.Message) map[string]*anypb.Any {
	return map[string]*anypb.Any{httpOptions: packed(m)}
}
