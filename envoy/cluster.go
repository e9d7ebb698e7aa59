package envoy

import (
	"fmt"
	"hash/fnv"
	"math"
	"time"

	mutationrulesv3 "github.com/envoyproxy/go-control-plane/envoy/config/common/mutation_rules/v3"
	headermutationv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/header_mutation/v3"
	upstreamcodecv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/upstream_codec/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	matcherconfigv3 "github.com/envoyproxy/go-control-plane/envoy/config/common/matcher/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	leastrequestv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/least_request/v3"
	overridehostv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/override_host/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	httpv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	metadatav3 "github.com/envoyproxy/go-control-plane/envoy/type/metadata/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// Limits of the clusters' circuit breakers: high enough never to be what fails
// first, low enough to stop a runaway loop.
const (
	maxConnections = 20000
	maxRequests    = 40000
)

// httpOptions is the key of a cluster's HTTP settings.
const httpOptions = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"

// tlsMatch names the transport socket of https servers, both in the cluster and
// in their endpoints' metadata.
const tlsMatch = "tls"

// Clusters returns the cluster of every pool and the two of the gateway.
func Clusters(c Config) []*clusterv3.Cluster {
	out := []*clusterv3.Cluster{extProcCluster(c), relayCluster(c)}
	for i := range c.Policy.Pools {
		out = append(out, poolCluster(c, &c.Policy.Pools[i]))
	}
	return out
}

// poolCluster is the cluster of a WorkerPool. Its endpoints come over EDS, with
// the status and weight the control plane gave them.
func poolCluster(c Config, p *policy.WorkerPool) *clusterv3.Cluster {
	cl := &clusterv3.Cluster{
		Name:                 names.PoolCluster(p.Name),
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_EDS},
		EdsClusterConfig:     &clusterv3.Cluster_EdsClusterConfig{EdsConfig: fromADS()},
		ConnectTimeout:       seconds(p.Connect.D()),
		// The control plane knows better than a health check who is gone.
		IgnoreHealthOnHostRemoval: true,
		CommonLbConfig: &clusterv3.Cluster_CommonLbConfig{
			// The minimum share is the control plane's; Envoy never sends traffic
			// to a dead worker to spare a sick one.
			HealthyPanicThreshold: &typev3.Percent{Value: 0},
			// Ejections count at once, not up to a second later.
			UpdateMergeWindow: seconds(0),
		},
		CircuitBreakers:     breakers(),
		OutlierDetection:    outliers(),
		HealthChecks:        poolCheck(p),
		LoadBalancingPolicy: destinationFirst(),
	}
	if p.Engine == policy.EngineOpenAI {
		cl.TypedExtensionProtocolOptions = packedOptions(foreignHTTP(len(p.Static) > 0))
	} else {
		cl.TypedExtensionProtocolOptions = packedOptions(ownHTTP())
	}
	// Endpoints choose TLS by their metadata, so a pool may have servers of both kinds.
	for _, s := range p.Static {
		if isHTTPS(s.URL) {
			cl.TransportSocketMatches = []*clusterv3.Cluster_TransportSocketMatch{tlsSocket(c.TrustedCA)}
		}
	}
	cl.EdsClusterConfig.ServiceName = serviceName(cl)
	return cl
}

// serviceName is the name of the cluster's EDS resource: its own name and a hash
// of its settings. Envoy makes a changed cluster anew, and waits for endpoints that
// it would not ask for again, had it asked under the same name before.
func serviceName(cl *clusterv3.Cluster) string {
	h := fnv.New32a()
	_, _ = h.Write(packed(cl).GetValue()) // a hash never fails
	return fmt.Sprintf("%s@%08x", cl.GetName(), h.Sum32())
}

// ownHTTP speaks HTTP/2 in clear to our workers. A worker that hangs with its
// sockets open is noticed by pings.
func ownHTTP() *httpv3.HttpProtocolOptions {
	return explicitH2(&corev3.Http2ProtocolOptions{
		ConnectionKeepalive: &corev3.KeepaliveSettings{Interval: seconds(5 * time.Second), Timeout: seconds(10 * time.Second)},
	})
}

// foreignHTTP speaks HTTP/1.1, which every OpenAI-compatible server does. Python
// servers close idle connections after 5 s; leaving them first avoids the race
// between their close and our next request.
func foreignHTTP(static bool) *httpv3.HttpProtocolOptions {
	o := &httpv3.HttpProtocolOptions{
		CommonHttpProtocolOptions: &corev3.HttpProtocolOptions{IdleTimeout: seconds(4 * time.Second)},
		UpstreamProtocolOptions: &httpv3.HttpProtocolOptions_ExplicitHttpConfig_{
			ExplicitHttpConfig: &httpv3.HttpProtocolOptions_ExplicitHttpConfig{
				ProtocolConfig: &httpv3.HttpProtocolOptions_ExplicitHttpConfig_HttpProtocolOptions{
					HttpProtocolOptions: &corev3.Http1ProtocolOptions{EnableTrailers: true},
				},
			},
		},
	}
	o.OutlierDetection = faultsOnly()
	o.HttpFilters = []*hcmv3.HttpFilter{
		httpFilter("envoy.filters.http.header_mutation", withoutMesh(static)),
		httpFilter("envoy.filters.http.upstream_codec", &upstreamcodecv3.UpstreamCodec{}),
	}
	return o
}

// withoutMesh removes the mesh's headers once the host is chosen, which some of
// them decide: they are nobody else's business. The relay sends its secret to workers
// of ours only, but where static servers are Envoy may fall back to one of them.
func withoutMesh(static bool) *headermutationv3.HeaderMutation {
	m := &headermutationv3.Mutations{}
	foreign := names.Foreign()
	if static {
		foreign = append(foreign, names.Relay)
	}
	for _, h := range foreign {
		m.RequestMutations = append(m.RequestMutations, &mutationrulesv3.HeaderMutation{
			Action: &mutationrulesv3.HeaderMutation_Remove{Remove: h},
		})
	}
	return &headermutationv3.HeaderMutation{Mutations: m}
}

// explicitH2 speaks HTTP/2 without asking, as servers in clear text need it.
func explicitH2(h2 *corev3.Http2ProtocolOptions) *httpv3.HttpProtocolOptions {
	separate(ownH2(h2))
	return &httpv3.HttpProtocolOptions{
		OutlierDetection: faultsOnly(),
		UpstreamProtocolOptions: &httpv3.HttpProtocolOptions_ExplicitHttpConfig_{
			ExplicitHttpConfig: &httpv3.HttpProtocolOptions_ExplicitHttpConfig{
				ProtocolConfig: &httpv3.HttpProtocolOptions_ExplicitHttpConfig_Http2ProtocolOptions{Http2ProtocolOptions: h2},
			},
		},
	}
}

// ownH2 are the limits of a connection between Envoy and other parts of the mesh. Envoy's
// own are for strangers: a worker with more than 1,000 streams that dies, or as many clients
// that leave at once, would look like a flood.
func ownH2(h2 *corev3.Http2ProtocolOptions) *corev3.Http2ProtocolOptions {
	h2.MaxConcurrentStreams = u32(maxStreams)
	h2.MaxOutboundFrames = u32(maxFrames)
	h2.MaxOutboundControlFrames = u32(maxFrames)
	return h2
}

// separate keeps the streams of one connection out of each other's way. What a slow
// client leaves unread counts against its stream's window and the connection's: were
// the latter small, a few clients that do not read would stop all others.
func separate(h2 *corev3.Http2ProtocolOptions) {
	h2.InitialStreamWindowSize = u32(256 << 10)
	h2.InitialConnectionWindowSize = u32(math.MaxInt32)
}

// faultsOnly makes outlier detection count answers that show a broken worker:
// 5xx but 503. A worker that is full or drains says 503, is retried elsewhere and
// must keep its place; 4xx are the client's fault.
func faultsOnly() *httpv3.HttpProtocolOptions_OutlierDetection {
	status := func(m *routev3.HeaderMatcher) *matcherconfigv3.MatchPredicate {
		m.Name = ":status"
		return &matcherconfigv3.MatchPredicate{Rule: &matcherconfigv3.MatchPredicate_HttpResponseHeadersMatch{
			HttpResponseHeadersMatch: &matcherconfigv3.HttpHeadersMatch{Headers: []*routev3.HeaderMatcher{m}},
		}}
	}
	return &httpv3.HttpProtocolOptions_OutlierDetection{
		ErrorMatcher: &matcherconfigv3.MatchPredicate{Rule: &matcherconfigv3.MatchPredicate_AndMatch{
			AndMatch: &matcherconfigv3.MatchPredicate_MatchSet{Rules: []*matcherconfigv3.MatchPredicate{
				status(&routev3.HeaderMatcher{HeaderMatchSpecifier: &routev3.HeaderMatcher_RangeMatch{
					RangeMatch: &typev3.Int64Range{Start: 500, End: 600},
				}}),
				status(&routev3.HeaderMatcher{
					HeaderMatchSpecifier: &routev3.HeaderMatcher_StringMatch{StringMatch: exact("503")}, InvertMatch: true,
				}),
			}},
		}},
	}
}

// outliers ejects a worker after three faults in a row, and separately after
// three failed connections. Statistics over the pool are the control plane's.
func outliers() *clusterv3.OutlierDetection {
	return &clusterv3.OutlierDetection{
		Consecutive_5Xx:                        u32(3),
		EnforcingConsecutive_5Xx:               u32(100),
		ConsecutiveGatewayFailure:              u32(3),
		EnforcingConsecutiveGatewayFailure:     u32(0), // 503 is one
		SplitExternalLocalOriginErrors:         true,
		ConsecutiveLocalOriginFailure:          u32(3),
		EnforcingConsecutiveLocalOriginFailure: u32(100),
		EnforcingSuccessRate:                   u32(0),
		EnforcingLocalOriginSuccessRate:        u32(0),
		EnforcingFailurePercentage:             u32(0),
		EnforcingFailurePercentageLocalOrigin:  u32(0),
		Interval:                               seconds(time.Second),
		BaseEjectionTime:                       seconds(5 * time.Second),
		MaxEjectionTime:                        seconds(60 * time.Second),
		MaxEjectionPercent:                     u32(50),
	}
}

// poolCheck is Envoy's own look at a worker, the last line of defence when the
// control plane is away.
func poolCheck(p *policy.WorkerPool) []*corev3.HealthCheck {
	if p.Health.Check == "off" {
		return nil
	}
	every := p.Health.CheckInterval.D()
	codec, fine := typev3.CodecClientType_HTTP2, []*typev3.Int64Range{{Start: 200, End: 201}}
	if p.Engine == policy.EngineOpenAI {
		codec = typev3.CodecClientType_HTTP1
		// A server without a health path answers 404 or 405, and answers.
		fine = append(fine, &typev3.Int64Range{Start: 404, End: 406})
	}
	// A worker on the edge between up and down is looked at more often.
	edge := seconds(min(every, time.Second))
	return []*corev3.HealthCheck{{
		Timeout:               seconds(2 * time.Second),
		Interval:              seconds(every),
		NoTrafficInterval:     seconds(every),
		UnhealthyInterval:     edge,
		UnhealthyEdgeInterval: edge,
		UnhealthyThreshold:    u32(3),
		HealthyThreshold:      u32(1),
		HealthChecker: &corev3.HealthCheck_HttpHealthCheck_{HttpHealthCheck: &corev3.HealthCheck_HttpHealthCheck{
			// The default host is the cluster's name, whose slash is no valid host.
			Host: "kvmesh", Path: p.Health.Check, CodecClientType: codec, ExpectedStatuses: fine,
		}},
	}}
}

// destinationFirst obeys the gateway's ordered list of endpoints, first from the
// metadata, then from the header (the relay's way), and else picks the least
// loaded by weight.
func destinationFirst() *clusterv3.LoadBalancingPolicy {
	// Every level of a policy is a list of which Envoy takes the first it knows.
	policyOf := func(e *corev3.TypedExtensionConfig) *clusterv3.LoadBalancingPolicy {
		return &clusterv3.LoadBalancingPolicy{Policies: []*clusterv3.LoadBalancingPolicy_Policy{{TypedExtensionConfig: e}}}
	}
	return policyOf(extension("envoy.load_balancing_policies.override_host", &overridehostv3.OverrideHost{
		OverrideHostSources: []*overridehostv3.OverrideHost_OverrideHostSource{
			{Metadata: &metadatav3.MetadataKey{Key: names.MetadataLB, Path: []*metadatav3.MetadataKey_PathSegment{{
				Segment: &metadatav3.MetadataKey_PathSegment_Key{Key: names.Destination},
			}}}},
			{Header: names.Destination},
		},
		FallbackPolicy: policyOf(extension("envoy.load_balancing_policies.least_request", &leastrequestv3.LeastRequest{})),
	}))
}

// breakers lifts Envoy's default limits of 1,024 and bounds retries to a share of
// the requests in flight, so that a sick pool is not hit twice as hard.
func breakers() *clusterv3.CircuitBreakers {
	return &clusterv3.CircuitBreakers{Thresholds: []*clusterv3.CircuitBreakers_Thresholds{{
		MaxConnections:     u32(maxConnections),
		MaxPendingRequests: u32(maxRequests),
		MaxRequests:        u32(maxRequests),
		RetryBudget: &clusterv3.CircuitBreakers_Thresholds_RetryBudget{
			BudgetPercent: &typev3.Percent{Value: 50}, MinRetryConcurrency: u32(32),
		},
	}}}
}

// tlsSocket checks an https server's certificate against its own host name.
func tlsSocket(ca string) *clusterv3.Cluster_TransportSocketMatch {
	return &clusterv3.Cluster_TransportSocketMatch{
		Name: tlsMatch,
		Match: &structpb.Struct{Fields: map[string]*structpb.Value{
			tlsMatch: structpb.NewBoolValue(true),
		}},
		TransportSocket: &corev3.TransportSocket{
			Name: "envoy.transport_sockets.tls",
			ConfigType: &corev3.TransportSocket_TypedConfig{TypedConfig: packed(&tlsv3.UpstreamTlsContext{
				AutoHostSni:          true,
				AutoSniSanValidation: true,
				CommonTlsContext: &tlsv3.CommonTlsContext{
					ValidationContextType: &tlsv3.CommonTlsContext_ValidationContext{
						ValidationContext: &tlsv3.CertificateValidationContext{
							TrustedCa: &corev3.DataSource{Specifier: &corev3.DataSource_Filename{Filename: ca}},
						},
					},
				},
			})},
		},
	}
}

// extProcCluster is the gateway's external processor. Its health check makes a
// hung gateway fail open at once instead of costing every request the message
// time-out.
func extProcCluster(c Config) *clusterv3.Cluster {
	cl := gatewayCluster(names.ClusterExtProc, c.ExtProc)
	cl.HealthChecks = []*corev3.HealthCheck{{
		Timeout:               seconds(time.Second),
		Interval:              seconds(500 * time.Millisecond),
		NoTrafficInterval:     seconds(500 * time.Millisecond),
		UnhealthyInterval:     seconds(500 * time.Millisecond),
		UnhealthyEdgeInterval: seconds(500 * time.Millisecond),
		UnhealthyThreshold:    u32(2),
		HealthyThreshold:      u32(1),
		HealthChecker: &corev3.HealthCheck_GrpcHealthCheck_{GrpcHealthCheck: &corev3.HealthCheck_GrpcHealthCheck{
			Authority: "kvmesh",
		}},
	}}
	return cl
}

// relayCluster is the gateway's relay. It has no health check of its own: only
// ext_proc's answer selects the relay, and both live in one process.
func relayCluster(c Config) *clusterv3.Cluster { return gatewayCluster(names.ClusterRelay, c.Relay) }

// gatewayCluster is one socket of the gateway, over HTTP/2. Pings end the streams
// of a gateway that hangs with an error.
func gatewayCluster(name, path string) *clusterv3.Cluster {
	return &clusterv3.Cluster{
		Name:                 name,
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC},
		ConnectTimeout:       seconds(time.Second),
		CommonLbConfig: &clusterv3.Cluster_CommonLbConfig{
			HealthyPanicThreshold: &typev3.Percent{Value: 0}, UpdateMergeWindow: seconds(0),
		},
		LoadAssignment:                single(name, path),
		CircuitBreakers:               breakers(),
		TypedExtensionProtocolOptions: packedOptions(pinged(2*time.Second, 3*time.Second)),
	}
}

// pinged speaks HTTP/2 and gives a connection up that leaves a ping unanswered.
func pinged(interval, timeout time.Duration) *httpv3.HttpProtocolOptions {
	o := explicitH2(&corev3.Http2ProtocolOptions{
		ConnectionKeepalive: &corev3.KeepaliveSettings{Interval: durationpb.New(interval), Timeout: durationpb.New(timeout)},
	})
	o.OutlierDetection = nil
	return o
}

// single is the assignment of a cluster with one fixed address.
func single(name, addr string) *endpointv3.ClusterLoadAssignment {
	return &endpointv3.ClusterLoadAssignment{ClusterName: name, Endpoints: []*endpointv3.LocalityLbEndpoints{{
		LbEndpoints: []*endpointv3.LbEndpoint{{HostIdentifier: &endpointv3.LbEndpoint_Endpoint{
			Endpoint: &endpointv3.Endpoint{Address: address(addr)},
		}}},
	}}}
}
