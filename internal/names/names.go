// Package names holds the names that cross process borders: headers, metadata
// keys, cluster and listener names, and the fields of the mesh in Envoy. They
// are part of the design; the field's own names are used where they exist.
package names

// Headers that only the mesh may set on a request. Envoy removes them from every
// client request before any filter sees it (see Stripped).
const (
	// Destination is the ordered, comma separated list of "ip:port" candidates
	// of the Gateway API endpoint-picker protocol.
	Destination = "x-gateway-destination-endpoint"
	// Route is set to RouteRelay by ext_proc to select the relay.
	Route = "x-kvmesh-route"
	// Pool names the WorkerPool a request goes to.
	Pool = "x-kvmesh-pool"
	// ModelRoute names the ModelRoute that matched, so that the relay applies
	// its timeouts.
	ModelRoute = "x-kvmesh-model-route"
	// Model is the body's model, copied by the wasm filter at the edge.
	Model = "x-kvmesh-model"
	// Sim holds what the body field "sim" holds, for a simulator that takes it from
	// there; it is the client's and passes the edge.
	Sim = "x-kvmesh-sim"
	// ExpectWorker is the id of the worker an attempt was meant for. A worker
	// with another id answers 421, so an attempt is never served by a stranger.
	ExpectWorker = "x-kvmesh-expect-worker"
	// Stream is the stream id of a generation request, set by ext_proc.
	Stream = "x-kvmesh-stream"
	// Attempt numbers the attempts of one stream from 1.
	Attempt = "x-kvmesh-attempt"
	// Edge marks requests that Envoy took from a client. Workers refuse their
	// operators' paths on them.
	Edge = "x-kvmesh-edge"
	// Relay carries the secret by which a worker knows that a request comes from the
	// relay, so that the body field "kvmesh" and the stream's id are believed.
	Relay = "x-kvmesh-relay"
	// Tenant names who a request is counted for.
	Tenant = "x-kvmesh-tenant"
	// Priority is a request's priority, a decimal integer with the meaning of an
	// InferenceObjective's: higher goes first, 0 when absent, negative = may be shed.
	Priority = "x-kvmesh-priority"
)

// RouteRelay is the value of Route that selects the relay.
const RouteRelay = "relay"

// Headers that the mesh adds to responses.
const (
	// Worker is the id of the worker that was at work when the first byte went out.
	Worker = "x-kvmesh-worker"
	// Upstream is the ip:port Envoy really used, on answers of the egress
	// listener, so that the relay can check that it got the worker it named.
	Upstream = "x-kvmesh-upstream"
	// Fault says on an answer of the egress listener that Envoy itself made it up, and
	// why: its response flags, as UF for a connection that failed. What a server sends
	// under that name does not pass.
	Fault = "x-kvmesh-fault"
	// On a stream that is kept for its client, Stream is its id.
)

// Headers clients may send.
const (
	// SessionToken and SessionID carry a session key; the token wins.
	SessionToken = "x-session-token"
	SessionID    = "x-session-id"
	// Resumable, with the value 1, has the gateway keep a stream whose client left.
	// LastEventID is the id of the last event that a client has which comes back to one,
	// a field of server-sent events' own.
	Resumable   = "x-kvmesh-resumable"
	LastEventID = "last-event-id"
	// RequestID is Envoy's request id.
	RequestID = "x-request-id"
)

// Names inside Envoy's configuration.
const (
	ListenerEdge     = "edge"
	ListenerEgress   = "egress"
	RouteConfigEdge  = "edge"
	RouteConfigEgrs  = "egress"
	ClusterRelay     = "relay"
	ClusterExtProc   = "ext_proc"
	ClusterXDS       = "xds"
	PoolPrefix       = "pool/"
	MetadataLB       = "envoy.lb"
	MetadataMesh     = "kvmesh"
	MetadataWorkerID = "worker"
)

// PoolCluster returns the name of the Envoy cluster of a WorkerPool.
func PoolCluster(pool string) string { return PoolPrefix + pool }

// PrivatePaths are paths of workers that are their operators' and the mesh's own;
// clients of the edge get 404 for them. Each stands for what is below it, too.
func PrivatePaths() []string {
	return []string{"/drain", "/sim", "/metrics", "/ready", "/xds.service.orca.v3.OpenRcaService", "/grpc.health.v1.Health"}
}

// Foreign lists the request headers of the mesh that servers which are not
// workers of ours must not see.
func Foreign() []string {
	return []string{Destination, Route, Pool, ModelRoute, Model, ExpectWorker, Stream, Attempt, Edge, Resumable}
}

// Stripped lists the request headers that Envoy removes from every client
// request: those of the mesh, the endpoint-picker protocol's results, and
// Envoy's own per-request router overrides (a client could otherwise set
// retries and time-outs on the mesh's routes). The slice is fresh at each call.
func Stripped() []string {
	return []string{
		Destination, Route, Pool, ModelRoute, Model, ExpectWorker, Stream, Attempt, Edge, Worker, Upstream,
		Relay, "x-kvmesh-kv", Tenant, Priority,
		"x-gateway-destination-endpoint-served", "x-gateway-destination-endpoint-subset",
		"x-gateway-destination-endpoint-scores", "x-gateway-model-name-rewrite", "x-llm-d-model-name-rewrite",
		"x-prefiller-host-port", "x-encoder-hosts-ports", "x-data-parallel-host-port", "x-kv-cache-source-host-port",
		"endpoint-load-metrics",
		"x-envoy-retry-on", "x-envoy-retry-grpc-on", "x-envoy-max-retries", "x-envoy-retriable-status-codes",
		"x-envoy-retriable-header-names", "x-envoy-hedge-on-per-try-timeout", "x-envoy-upstream-rq-timeout-ms",
		"x-envoy-upstream-rq-per-try-timeout-ms", "x-envoy-upstream-rq-timeout-alt-response",
		"x-envoy-upstream-alt-stat-name", "x-envoy-upstream-stream-duration-ms", "x-envoy-expected-rq-timeout-ms",
		"x-envoy-decorator-operation", "x-envoy-ip-tags", "x-envoy-original-path", "x-envoy-force-trace",
	}
}
