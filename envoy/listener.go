package envoy

import (
	"time"

	mutationrulesv3 "github.com/envoyproxy/go-control-plane/envoy/config/common/mutation_rules/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	routerv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	earlymutationv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/http/early_header_mutation/header_mutation/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/kvmesh/kvmesh/internal/names"
)

// Limits of the edge listener.
const (
	// edgeBuffer is what one connection may hold outside a request body that is
	// being buffered; bodies have their own limit on the route.
	edgeBuffer = 1 << 20
	// maxHeadersKiB and maxHeaders bound a request's headers; more is answered 431 over
	// HTTP/1.1, and resets the stream over HTTP/2, whose codec has no other way.
	maxHeadersKiB = 60
	maxHeaders    = 100
	// requestHeaders is how long a client may take to send its headers.
	requestHeaders = 10 * time.Second
	// delayedClose is how long a connection lives on that Envoy closes, so that the end
	// of an answer is not overtaken by a reset. It also is how long the client of a
	// broken answer waits to hear of it, so it is short; refused bodies are read first.
	delayedClose = time.Second
	// maxStreams is how many streams one HTTP/2 connection of the mesh's own parts may
	// carry, and maxFrames how much may wait on it to be sent: the end of all streams at
	// once is no flood there, and to close the connection for it would end all others.
	maxStreams = 10000
	maxFrames  = 10 * maxStreams
)

// Names of the HTTP filters.
const (
	filterExtProc = "envoy.filters.http.ext_proc"
	filterRouter  = "envoy.filters.http.router"
)

// Listeners returns the edge and the egress listener.
func Listeners(c Config) []*listenerv3.Listener {
	return []*listenerv3.Listener{edgeListener(c), egressListener(c)}
}

// edgeListener is where clients connect.
func edgeListener(c Config) *listenerv3.Listener {
	return &listenerv3.Listener{
		Name:                          names.ListenerEdge,
		Address:                       address(c.Edge),
		PerConnectionBufferLimitBytes: u32(edgeBuffer),
		// With its port shared, a second mesh on the same port would take half of
		// the clients, and both would look well.
		EnableReusePort: wrapperspb.Bool(false),
		FilterChains:    []*listenerv3.FilterChain{{Filters: []*listenerv3.Filter{hcm(edgeManager(c))}}},
	}
}

// edgeManager holds the edge's HTTP settings: limits against abuse, what clients
// may not set, and the filters.
func edgeManager(c Config) *hcmv3.HttpConnectionManager {
	return &hcmv3.HttpConnectionManager{
		StatPrefix:     names.ListenerEdge,
		CodecType:      hcmv3.HttpConnectionManager_AUTO,
		RouteSpecifier: rds(names.RouteConfigEdge),
		ServerName:     "kvmesh",
		// Idle time-outs are the routes': a stream may be silent for as long as its
		// ModelRoute says.
		StreamIdleTimeout:     seconds(0),
		RequestHeadersTimeout: seconds(requestHeaders),
		// A body that trickles in holds memory for as long as it does.
		RequestTimeout:      seconds(c.Policy.Mesh.BodyTimeout.D()),
		DelayedCloseTimeout: seconds(delayedClose),
		MaxRequestHeadersKb: u32(maxHeadersKiB),
		CommonHttpProtocolOptions: &corev3.HttpProtocolOptions{
			MaxHeadersCount: u32(maxHeaders),
		},
		// Old tools still speak HTTP/1.0, some of them without a host.
		HttpProtocolOptions: &corev3.Http1ProtocolOptions{
			EnableTrailers: true, AcceptHttp_10: true, DefaultHostForHttp_10: "kvmesh",
		},
		Http2ProtocolOptions: &corev3.Http2ProtocolOptions{
			MaxConcurrentStreams: u32(1000),
			// One bad request ends its stream, not all others of the connection.
			OverrideStreamErrorOnInvalidHttpMessage: wrapperspb.Bool(true),
		},
		// The connection's address is the client's, not what a header claims.
		UseRemoteAddress: wrapperspb.Bool(true),
		NormalizePath:    wrapperspb.Bool(true),
		MergeSlashes:     true, // //drain is /drain
		// OpenAI's clients show the id of the answer, and may send one.
		PreserveExternalRequestId:    true,
		AlwaysSetRequestIdInResponse: true,
		EarlyHeaderMutationExtensions: []*corev3.TypedExtensionConfig{
			extension("envoy.http.early_header_mutation.header_mutation", stripped()),
		},
		LocalReplyConfig: localReplies(),
		AccessLog:        accessLog(c.AccessLog),
		HttpFilters:      []*hcmv3.HttpFilter{extProcFilter(c), modelFilter(), shapeFilter(), routerFilter()},
	}
}

// stripped removes the mesh's own request headers before any filter or route
// sees them, so a client cannot choose a worker or change a route's retries.
func stripped() *earlymutationv3.HeaderMutation {
	m := &earlymutationv3.HeaderMutation{}
	for _, h := range names.Stripped() {
		m.Mutations = append(m.Mutations, &mutationrulesv3.HeaderMutation{
			Action: &mutationrulesv3.HeaderMutation_Remove{Remove: h},
		})
	}
	return m
}

// extProcFilter asks the gateway about every request's headers. The gateway turns
// on body buffering itself, per request, for the paths it parses. The response
// phase is off, so the death of the gateway cannot hurt an answer that flows.
func extProcFilter(c Config) *hcmv3.HttpFilter {
	return httpFilter(filterExtProc, &extprocv3.ExternalProcessor{
		GrpcService: &corev3.GrpcService{TargetSpecifier: &corev3.GrpcService_EnvoyGrpc_{
			EnvoyGrpc: &corev3.GrpcService_EnvoyGrpc{ClusterName: names.ClusterExtProc},
		}},
		FailureModeAllow: true,
		ProcessingMode: &extprocv3.ProcessingMode{
			RequestHeaderMode:   extprocv3.ProcessingMode_SEND,
			RequestBodyMode:     extprocv3.ProcessingMode_NONE,
			RequestTrailerMode:  extprocv3.ProcessingMode_SKIP,
			ResponseHeaderMode:  extprocv3.ProcessingMode_SKIP,
			ResponseBodyMode:    extprocv3.ProcessingMode_NONE,
			ResponseTrailerMode: extprocv3.ProcessingMode_SKIP,
		},
		AllowModeOverride: true,
		MessageTimeout:    seconds(c.Policy.Mesh.ExtProc.MessageTimeout.D()),
		// A new route is chosen from the headers the gateway set, whether or not
		// its reply asks for it.
		RouteCacheAction: extprocv3.ExternalProcessor_CLEAR,
		ForwardRules: &extprocv3.HeaderForwardingRules{AllowedHeaders: &matcherv3.ListStringMatcher{
			Patterns: []*matcherv3.StringMatcher{
				exact(":path"), exact(":method"), exact("content-type"), exact("content-length"), exact("content-encoding"), exact(names.LastEventID), prefix("x-"),
			},
		}},
		MetadataOptions: &extprocv3.MetadataOptions{
			ReceivingNamespaces: &extprocv3.MetadataOptions_MetadataNamespaces{
				Untyped: []string{names.MetadataLB, names.MetadataMesh},
			},
		},
	})
}

// egressListener is the relay's way to the workers. It speaks HTTP/2 only, so a
// broken stream is seen at once, and holds back nothing.
func egressListener(c Config) *listenerv3.Listener {
	addr := address(c.Egress)
	if p := addr.GetPipe(); p != nil {
		p.Mode = 0o600 // it obeys a destination header: nobody but the gateway's user may connect
	}
	m := &hcmv3.HttpConnectionManager{
		StatPrefix:            names.ListenerEgress,
		CodecType:             hcmv3.HttpConnectionManager_HTTP2,
		RouteSpecifier:        rds(names.RouteConfigEgrs),
		StreamIdleTimeout:     seconds(0),
		RequestTimeout:        seconds(0),
		RequestHeadersTimeout: seconds(0),
		// The relay reads all the time; it should see a closed connection at once.
		DelayedCloseTimeout:  seconds(100 * time.Millisecond),
		Http2ProtocolOptions: ownH2(&corev3.Http2ProtocolOptions{}),
		GenerateRequestId:    wrapperspb.Bool(false), // the edge made one already
		LocalReplyConfig:     ownFaults(),
		HttpFilters:          []*hcmv3.HttpFilter{routerFilter()},
	}
	return &listenerv3.Listener{
		Name:    names.ListenerEgress,
		Address: addr,
		// A flood of clients at the edge must not cut the relay off.
		IgnoreGlobalConnLimit: true,
		FilterChains:          []*listenerv3.FilterChain{{Filters: []*listenerv3.Filter{hcm(m)}}},
	}
}

// hcm makes an HTTP connection manager a listener's filter.
func hcm(m *hcmv3.HttpConnectionManager) *listenerv3.Filter {
	return &listenerv3.Filter{
		Name:       "envoy.filters.network.http_connection_manager",
		ConfigType: &listenerv3.Filter_TypedConfig{TypedConfig: packed(m)},
	}
}

// rds takes the routes of that name from the control plane.
func rds(name string) *hcmv3.HttpConnectionManager_Rds {
	return &hcmv3.HttpConnectionManager_Rds{Rds: &hcmv3.Rds{RouteConfigName: name, ConfigSource: fromADS()}}
}

// fromADS takes a resource from the one stream to the control plane, where CDS
// comes before EDS and LDS before RDS.
func fromADS() *corev3.ConfigSource {
	return &corev3.ConfigSource{
		ResourceApiVersion:    corev3.ApiVersion_V3,
		ConfigSourceSpecifier: &corev3.ConfigSource_Ads{Ads: &corev3.AggregatedConfigSource{}},
	}
}

// routerFilter keeps Envoy's own x-envoy-* headers away from clients and workers.
func routerFilter() *hcmv3.HttpFilter {
	return httpFilter(filterRouter, &routerv3.Router{SuppressEnvoyHeaders: true})
}
