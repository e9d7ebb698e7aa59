package envoy

import (
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	previoushostsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/retry/host/previous_hosts/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/internal/policy"
)

// Headers of the egress answers by which the relay checks who served it.
const (
	workerOfEndpoint = "%UPSTREAM_METADATA(" + names.MetadataMesh + ":" + names.MetadataWorkerID + ")%"
	realUpstream     = "%UPSTREAM_REMOTE_ADDRESS%"
)

// defaultIdle is the idle time-out of requests that no ModelRoute claimed.
const defaultIdle = 300 * time.Second

// Routes returns the routes of the edge and of the egress listener.
func Routes(c Config) []*routev3.RouteConfiguration {
	return []*routev3.RouteConfiguration{
		{
			Name: names.RouteConfigEdge,
			VirtualHosts: []*routev3.VirtualHost{{
				Name: names.RouteConfigEdge, Domains: []string{"*"}, Routes: edgeRoutes(c),
			}},
			// A cluster that is still on its way must not keep the routes away.
			ValidateClusters: wrapperspb.Bool(false),
		},
		{
			Name: names.RouteConfigEgrs,
			VirtualHosts: []*routev3.VirtualHost{{
				Name: names.RouteConfigEgrs, Domains: []string{"*"}, Routes: egressRoutes(c),
			}},
			ValidateClusters: wrapperspb.Bool(false),
		},
	}
}

// edgeRoutes lists the routes in order of match: the health check, what is nobody's, the relay when
// the gateway chose it, a pool the gateway chose, a pool by the model's name (set
// by the filter at the edge, for the time without gateway), and the default pool.
func edgeRoutes(c Config) []*routev3.Route {
	routes := []*routev3.Route{healthz("/healthz"), healthz("/health")}
	for _, p := range names.PrivatePaths() {
		routes = append(routes, private(p))
	}
	routes = append(routes, brokenEscape(), relayRoute(c))
	// A pool that the gateway chose for a ModelRoute keeps that route's time-outs.
	for _, r := range c.Policy.Routes {
		for i, t := range r.Tiers {
			if firstTier(r, t.Pool) == i {
				routes = append(routes, poolRoute(c, "route/"+r.Name+"/"+t.Pool, t.Pool, &r,
					is(names.ModelRoute, r.Name), is(names.Pool, t.Pool)))
			}
		}
	}
	// Other requests the gateway sent to a pool: paths that it does not parse.
	for _, p := range c.Policy.Pools {
		routes = append(routes, poolRoute(c, "pool/"+p.Name, p.Name, nil, is(names.Pool, p.Name)))
	}
	// Without the gateway nobody can go on with a stream, and a fresh answer after a part
	// of another would be a wrong one.
	for _, p := range []openai.Endpoint{openai.Chat, openai.Completions} {
		routes = append(routes, noResume(string(p)))
	}
	// There is no tier to fall back to, either: the first one serves.
	for _, r := range c.Policy.Routes {
		for _, m := range r.Models {
			if m != "*" && len(r.Tiers) > 0 {
				routes = append(routes, poolRoute(c, "model/"+m, r.Tiers[0].Pool, &r, is(names.Model, m)))
			}
		}
	}
	def := c.Policy.Mesh.DefaultPool
	for _, p := range []openai.Endpoint{openai.Chat, openai.Completions} {
		routes = append(routes, byModel(poolRoute(c, "default "+string(p), def, nil), string(p)))
	}
	return append(routes, poolRoute(c, "default", def, nil))
}

// firstTier returns the index of the route's first tier in that pool.
func firstTier(r policy.ModelRoute, pool string) int {
	for i, t := range r.Tiers {
		if t.Pool == pool {
			return i
		}
	}
	return -1
}

// healthz answers for Envoy alone: load balancers in front of the mesh must not
// depend on the gateway, so ext_proc is not asked.
func healthz(path string) *routev3.Route {
	r := direct("healthz "+path, 200, "ok\n")
	r.Match = &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_Path{Path: path}}
	return r
}

// private keeps clients away from a path that is the workers' operators'.
func private(path string) *routev3.Route {
	r := direct("private "+path, 404, "")
	r.Match = &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_PathSeparatedPrefix{PathSeparatedPrefix: path}}
	return r
}

// brokenEscape refuses a path with a % that no two hexadecimal digits follow: servers
// in Go would reset the stream. The gateway says so first, after reading the body.
func brokenEscape() *routev3.Route {
	r := direct("broken escape", 400, "")
	r.TypedPerFilterConfig = nil
	r.Match = &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_SafeRegex{SafeRegex: &matcherv3.RegexMatcher{
		Regex: `.*%([^0-9A-Fa-f].*|[0-9A-Fa-f][^0-9A-Fa-f].*|[0-9A-Fa-f]?)`,
	}}}
	return r
}

// noResume answers clients that come back to a stream while the gateway is away.
func noResume(path string) *routev3.Route {
	r := direct("resume "+path, 503, "")
	r.TypedPerFilterConfig = nil // ext_proc is asked, and would have sent it to the relay
	r.Match = &routev3.RouteMatch{
		PathSpecifier: &routev3.RouteMatch_Path{Path: path},
		Headers: []*routev3.HeaderMatcher{{
			Name: names.LastEventID, HeaderMatchSpecifier: &routev3.HeaderMatcher_PresentMatch{PresentMatch: true},
		}},
	}
	return r
}

// direct answers without worker and gateway.
func direct(name string, status uint32, body string) *routev3.Route {
	return &routev3.Route{
		Name: name,
		Action: &routev3.Route_DirectResponse{DirectResponse: &routev3.DirectResponseAction{
			Status: status, Body: inline(body),
		}},
		TypedPerFilterConfig: map[string]*anypb.Any{
			filterExtProc: packed(&extprocv3.ExtProcPerRoute{Override: &extprocv3.ExtProcPerRoute_Disabled{Disabled: true}}),
		},
	}
}

// relayRoute leaves every time-out to the relay, which knows what a silent stream
// waits for.
func relayRoute(c Config) *routev3.Route {
	var filters map[string]*anypb.Any
	for _, p := range c.Policy.Pools {
		if p.Engine == policy.EngineOpenAI {
			filters = shaped()
		}
	}
	return &routev3.Route{
		Name:                   "relay",
		TypedPerFilterConfig:   filters,
		Match:                  match(is(names.Route, names.RouteRelay)),
		RequestBodyBufferLimit: bufferLimit(c),
		Action: &routev3.Route_Route{Route: &routev3.RouteAction{
			ClusterSpecifier: &routev3.RouteAction_Cluster{Cluster: names.ClusterRelay},
			Timeout:          seconds(0),
			IdleTimeout:      seconds(0),
		}},
	}
}

// poolRoute sends requests straight to a pool. r is the ModelRoute whose
// time-outs and retries hold, nil for the defaults.
func poolRoute(c Config, name, pool string, r *policy.ModelRoute, when ...*routev3.HeaderMatcher) *routev3.Route {
	idle, whole, retries := defaultIdle, time.Duration(0), 2
	if r != nil {
		// D is 0 when the time-out is off, and Envoy takes 0 for off too.
		idle, whole = r.Timeouts.StreamIdle.D(), r.Timeouts.Request.D()
		if r.Retries != nil {
			retries = *r.Retries
		}
	}
	action := &routev3.RouteAction{
		ClusterSpecifier: &routev3.RouteAction_Cluster{Cluster: names.PoolCluster(pool)},
		Timeout:          seconds(whole),
		IdleTimeout:      seconds(idle),
		RetryPolicy:      retryPolicy(retries),
	}
	var filters map[string]*anypb.Any
	if p := c.Policy.Pool(pool); p != nil && p.Engine == policy.EngineOpenAI {
		// Foreign servers may be virtual hosts; ours have no name.
		action.HostRewriteSpecifier = &routev3.RouteAction_AutoHostRewrite{AutoHostRewrite: wrapperspb.Bool(true)}
		filters = shaped()
	}
	return &routev3.Route{
		Name:                    name,
		TypedPerFilterConfig:    filters,
		Match:                   match(when...),
		RequestBodyBufferLimit:  bufferLimit(c),
		ResponseHeadersToAdd:    []*corev3.HeaderValueOption{header(names.Worker, workerOfEndpoint)},
		ResponseHeadersToRemove: []string{"endpoint-load-metrics"}, // the mesh's own business
		RequestHeadersToAdd:     []*corev3.HeaderValueOption{header(names.Edge, "1")},
		RequestHeadersToRemove:  []string{names.Model}, // client text, which has chosen the route by now
		Action:                  &routev3.Route_Route{Route: action},
	}
}

// retryPolicy repeats a request only where no worker can have begun it: the
// connection failed, the stream was refused, or the worker said 503.
func retryPolicy(n int) *routev3.RetryPolicy {
	if n == 0 {
		return nil
	}
	return &routev3.RetryPolicy{
		// Not "reset" and not "5xx": the worker may have generated half an answer,
		// and a second one would do the work again.
		RetryOn:              "connect-failure,refused-stream,reset-before-request,retriable-status-codes",
		RetriableStatusCodes: []uint32{503},
		NumRetries:           u32(uint32(n)),
		// Elsewhere, not at the host that just failed.
		RetryHostPredicate: []*routev3.RetryPolicy_RetryHostPredicate{{
			Name: "envoy.retry_host_predicates.previous_hosts",
			ConfigType: &routev3.RetryPolicy_RetryHostPredicate_TypedConfig{
				TypedConfig: packed(&previoushostsv3.PreviousHostsPredicate{}),
			},
		}},
		HostSelectionRetryMaxAttempts: 3,
		// The default of 25 ms and more is for one server that needs a rest.
		RetryBackOff: &routev3.RetryPolicy_RetryBackOff{
			BaseInterval: seconds(2 * time.Millisecond), MaxInterval: seconds(20 * time.Millisecond),
		},
	}
}

// egressRoutes sends a request to the pool the relay named, and nowhere else.
func egressRoutes(c Config) []*routev3.Route {
	var routes []*routev3.Route
	for _, p := range c.Policy.Pools {
		action := &routev3.RouteAction{
			ClusterSpecifier: &routev3.RouteAction_Cluster{Cluster: names.PoolCluster(p.Name)},
			Timeout:          seconds(0),
			IdleTimeout:      seconds(0),
		}
		add := []*corev3.HeaderValueOption{header(names.Upstream, realUpstream)} // whom Envoy really asked
		if p.Engine == policy.EngineOpenAI {
			action.HostRewriteSpecifier = &routev3.RouteAction_AutoHostRewrite{AutoHostRewrite: wrapperspb.Bool(true)}
			// Foreign servers do not say who they are. Our workers do, and the relay
			// takes nobody else's word: another program may listen where one has died.
			add = append(add, header(names.Worker, workerOfEndpoint))
		}
		routes = append(routes, &routev3.Route{
			Name:                 "pool/" + p.Name,
			Match:                match(is(names.Pool, p.Name)),
			ResponseHeadersToAdd: add,
			// Envoy's own word, which no server may say.
			ResponseHeadersToRemove: []string{names.Fault},
			Action:                  &routev3.Route_Route{Route: action},
		})
	}
	return append(routes, &routev3.Route{
		Name:   "none",
		Match:  match(),
		Action: &routev3.Route_DirectResponse{DirectResponse: &routev3.DirectResponseAction{Status: 404, Body: inline("no such pool\n")}},
	})
}

// match takes every path on which all header conditions hold.
func match(when ...*routev3.HeaderMatcher) *routev3.RouteMatch {
	return &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_Prefix{Prefix: "/"}, Headers: when}
}

// is matches a header that has exactly that value.
func is(name, value string) *routev3.HeaderMatcher {
	return &routev3.HeaderMatcher{
		Name:                 name,
		HeaderMatchSpecifier: &routev3.HeaderMatcher_StringMatch{StringMatch: exact(value)},
	}
}

// bufferLimit is what Envoy holds of a body at most. The gateway and the workers
// refuse what is over max_body.
func bufferLimit(c Config) *wrapperspb.UInt64Value {
	return wrapperspb.UInt64(policy.BufferTimes * uint64(c.Policy.Mesh.MaxBody))
}
