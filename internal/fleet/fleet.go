// Package fleet holds what the parts of the mesh tell each other about workers:
// the registration a worker sends, the control plane's HTTP API that takes it,
// and the xDS resource type by which gateways learn the whole fleet.
package fleet

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/kvmesh/kvmesh/internal/policy"
)

// TypeURL is the xDS type of fleetpb.Worker resources.
const TypeURL = "type.googleapis.com/kvmesh.fleet.v1.Worker"

// Heartbeat is how often a worker renews its registration; TTL is how long the
// control plane believes in a worker that fell silent.
const (
	Heartbeat = 5 * time.Second
	TTL       = 15 * time.Second
)

// Named metrics in a worker's ORCA load report beside the standard fields.
// Each is a plain number; the unit stands in the comment.
const (
	MetricRunning    = "kvmesh.running"       // requests being generated
	MetricWaiting    = "kvmesh.waiting"       // requests queued
	MetricMaxRunning = "kvmesh.max_running"   // most requests at once
	MetricKVUsage    = "kvmesh.kv_usage"      // 0..1
	MetricTokensPerS = "kvmesh.tokens_per_s"  // generated tokens per second
	MetricIncarn     = "kvmesh.incarnation_s" // Unix seconds of the worker's start

	MetricInterTokenS = "kvmesh.inter_token_s"     // time between two tokens of one answer, moving average
	MetricErrorRate   = "kvmesh.error_rate"        // 0..1, share of the last requests that failed
	MetricSelfCheck   = "kvmesh.self_check_failed" // 1 when the last self-check failed, else 0

	// Of the worst of the worker's GPUs; absent where nothing reads them.
	MetricGPULost        = "kvmesh.gpu_lost"              // 1 when a GPU is gone or needs a reset
	MetricGPUXID         = "kvmesh.gpu_xid"               // the last fatal XID since the start, 0 for none
	MetricGPUECC         = "kvmesh.gpu_ecc_uncorrectable" // uncorrectable memory errors since the start
	MetricGPURemapFailed = "kvmesh.gpu_row_remap_failed"  // 1 when broken memory could not be replaced
	MetricGPUThrottled   = "kvmesh.gpu_throttled"         // 0..1, share of the last seconds slowed by heat or lack of power
	MetricGPUMemory      = "kvmesh.gpu_memory"            // 0..1 in use
	MetricGPUUtilization = "kvmesh.gpu_utilization"       // 0..1
)

// Registration is what a worker says of itself. It is the JSON body of
// PUT /v1/workers/{id} at the control plane, sent at start and every Heartbeat.
type Registration struct {
	ID          string   `json:"id"`
	Address     string   `json:"address"` // ip:port that Envoy can reach
	Pool        string   `json:"pool"`
	Zone        string   `json:"zone,omitempty"`
	Model       string   `json:"model"`
	Aliases     []string `json:"aliases,omitempty"`
	Engine      string   `json:"engine"`
	Incarnation uint64   `json:"incarnation"` // Unix nanoseconds of the start
	PID         int64    `json:"pid,omitempty"`
	Host        string   `json:"host,omitempty"` // host name of the worker
	// Process is the ProcessMark of PID as the worker sees it, "" when it cannot tell.
	Process     string `json:"process,omitempty"`
	Fingerprint string `json:"fingerprint,omitempty"`
	// RelayMark is the RelayMark of the secret by which the worker knows the relay; ""
	// when it has none, and so takes no part in streams.
	RelayMark string `json:"relay_mark,omitempty"`
	// State is "" or StateReady, StateLoading, StateDraining, StateFailed.
	State string `json:"state,omitempty"`
	// Reason says why, for people; it goes with StateFailed.
	Reason string `json:"reason,omitempty"`
	// Via is where the control plane learned of the worker if not from itself: ""
	// or ViaRedis. What a worker sends here is ignored.
	Via string `json:"via,omitempty"`
}

// RelayMark tells secrets of the relay apart without telling them: a gateway speaks
// of streams only to workers that have the mark of its own. It is "" for no secret.
func RelayMark(secret string) string {
	if secret == "" {
		return ""
	}
	sum := sha256.Sum256([]byte("kvmesh relay\x00" + secret))
	return hex.EncodeToString(sum[:4])
}

// ViaRedis marks a Registration that was read from Redis.
const ViaRedis = "redis"

// ForeignIncarnation is that of a worker which tells none: it is not ours, so it
// reports no load over ORCA either.
const ForeignIncarnation = 1

// States of a Registration.
const (
	StateReady    = "ready"
	StateLoading  = "loading"
	StateDraining = "draining"
	StateFailed   = "failed" // it runs and knows that it cannot serve
)

// Validate reports the first field that is missing or malformed.
func (r Registration) Validate() error {
	switch {
	case r.ID == "" || len(r.ID) > 253:
		return fmt.Errorf("id: want 1 to 253 characters, got %d", len(r.ID))
	case r.Pool == "":
		return fmt.Errorf("pool: missing")
	case r.Incarnation == 0:
		return fmt.Errorf("incarnation: missing")
	}
	for _, c := range r.ID {
		if c <= ' ' || c == '/' || c == 0x7f || c > 0x7f {
			return fmt.Errorf("id: character %q is not allowed", c)
		}
	}
	// Envoy refuses a whole pool for one address it cannot connect to.
	if a, err := netip.ParseAddrPort(r.Address); err != nil || a.Port() == 0 || policy.ConnectAddress(a.Addr()) != nil {
		return fmt.Errorf("address %q: want the ip:port of one host", r.Address)
	}
	switch r.State {
	case "", StateReady, StateLoading, StateDraining, StateFailed:
		return nil
	}
	return fmt.Errorf("state %q: want %s, %s, %s or %s", r.State, StateReady, StateLoading, StateDraining, StateFailed)
}

// Lease is the control plane's answer to a Registration, and to a rollout that takes a
// pool.
type Lease struct {
	TTLSeconds float64 `json:"ttl_seconds"`
}

// WorkerView is one row of GET /v1/workers and of `kvmesh workers -o json`.
type WorkerView struct {
	ID      string   `json:"id"`
	Address string   `json:"address"`
	PID     int64    `json:"pid,omitempty"`
	Pool    string   `json:"pool"`
	Zone    string   `json:"zone"`
	Model   string   `json:"model"`
	Aliases []string `json:"aliases,omitempty"`
	Engine  string   `json:"engine"`
	Status  string   `json:"status"` // Envoy's words: HEALTHY, DRAINING, UNHEALTHY, TIMEOUT, DEGRADED, UNKNOWN
	Weight  uint32   `json:"weight"`
	Running uint32   `json:"running"`
	Waiting uint32   `json:"waiting"`
	KVUsage float64  `json:"kv_usage"`
	Reason  string   `json:"reason,omitempty"`
	// ErrorRate is the share of the requests finished lately that failed, 0..1.
	ErrorRate float64 `json:"error_rate"`
	// Drained says that an operator drained it; one that stops drains by itself.
	Drained bool `json:"drained,omitempty"`
	// Incarnation grows with each start of the worker.
	Incarnation uint64 `json:"incarnation,omitempty"`
	// Fingerprint is that of weights and KV layout, "" when unknown. Streams move
	// between equal ones only.
	Fingerprint string `json:"fingerprint,omitempty"`
	// State is what the worker says of itself, StateReady and so on, whether it is
	// drained or not; "" for a server that says nothing.
	State string `json:"state,omitempty"`
	// Host and Process are those of its Registration.
	Host    string `json:"host,omitempty"`
	Process string `json:"process,omitempty"`
}

// ParamOwner is the query parameter of PUT and DELETE /v1/pools/{pool}/rollout that says
// whose the lease is.
const ParamOwner = "owner"

// MostOwner bounds that value, in bytes.
const MostOwner = 256

// ErrLeased says that another rollout has the lease of the pool.
var ErrLeased = errors.New("another rollout of this pool is under way")

// ParamStreams is the query parameter of POST /v1/workers/{id}/drain that says what
// becomes of the worker's running streams: absent, they move; StreamsKeep, they end
// where they are.
const (
	ParamStreams = "streams"
	StreamsKeep  = "keep"
)

// WorkerList is the body of GET /v1/workers.
type WorkerList struct {
	Workers []WorkerView `json:"workers"`
}

// EndpointView is one endpoint as the control plane wants Envoy to see it.
type EndpointView struct {
	ID      string `json:"id"`
	Address string `json:"address"`
	Zone    string `json:"zone"`
	Status  string `json:"status"`
	Weight  uint32 `json:"weight"`
}

// ClusterView is one pool cluster with its wanted endpoints.
type ClusterView struct {
	Name string `json:"name"`
	// Minimum is how many of the endpoints keep taking requests whatever happens.
	Minimum   int            `json:"minimum"`
	Endpoints []EndpointView `json:"endpoints"`
}

// ClusterList is the body of GET /v1/clusters.
type ClusterList struct {
	Clusters []ClusterView `json:"clusters"`
}

// MeshView is the body of GET /v1/mesh: where the other parts of the mesh are, as
// the control plane was told, and its own process.
type MeshView struct {
	Admin   string `json:"admin,omitempty"`   // URL of Envoy's admin port
	Gateway string `json:"gateway,omitempty"` // URL of the gateway's /health, /metrics and /v1/streams
	PID     int    `json:"pid"`               // of the control plane
}

// StreamView is one request that a gateway's relay carries now: one row of GET
// /v1/streams at the gateway and of `kvmesh streams -o json`.
type StreamView struct {
	ID      string  `json:"id"`
	Request string  `json:"request_id"` // x-request-id, as Envoy's access log has it
	Model   string  `json:"model"`      // as the worker is asked for it
	Pool    string  `json:"pool"`
	Worker  string  `json:"worker"`         // that serves it now, "" before the first attempt
	Next    string  `json:"next,omitempty"` // that is asked to go on with it, "" while nobody is
	Gateway string  `json:"gateway"`        // that carries it, one of StreamList.Gateways
	Attempt int64   `json:"attempt"`        // number of the last attempt, from 1
	Stream  bool    `json:"stream"`         // false: one whole answer
	Events  int64   `json:"events"`         // passed on to the client, about one per token
	Seconds float64 `json:"seconds"`        // since it began
	// Moves of a stream that went on at another worker, in order.
	Moves []MoveView `json:"moves,omitempty"`
}

// MoveView is one move of a stream.
type MoveView struct {
	From  string `json:"from"`  // worker
	To    string `json:"to"`    // worker
	Cause string `json:"cause"` // what made it move
	// KV says how it went on: exact, restored, quantized, replayed, text, or anew where
	// nothing had been delivered.
	KV         string  `json:"kv"`
	Restored   int     `json:"restored"`    // tokens whose KV was restored
	Computed   int     `json:"computed"`    // tokens computed before the next one
	GapSeconds float64 `json:"gap_seconds"` // from what made it move to the next token
}

// StreamList is the body of GET /v1/streams: what a gateway carries, and those before it on
// its host that it has replaced.
type StreamList struct {
	// Gateways are the processes that the list speaks of, each by a random name of its own:
	// first the one that was asked, then those that it has replaced. One of these that has
	// ended is listed for a minute more, with what it has counted.
	Gateways []string     `json:"gateways"`
	Streams  []StreamView `json:"streams"`
	// Attempts is what came of those that ended, by gateway and worker.
	Attempts []AttemptView `json:"attempts,omitempty"`
}

// AttemptView counts what one gateway had from one worker since the gateway started.
type AttemptView struct {
	Gateway string `json:"gateway"`
	Worker  string `json:"worker"`
	OK      int64  `json:"ok"` // whole answers
	// Broken are those that the worker failed: not reached, an error, cut, malformed, too
	// late. What a client broke off or the gateway moved is in neither.
	Broken int64 `json:"broken"`
}

// AttemptsAt are those of one gateway at one worker.
func (l StreamList) AttemptsAt(gateway, worker string) AttemptView {
	for _, a := range l.Attempts {
		if a.Gateway == gateway && a.Worker == worker {
			return a
		}
	}
	return AttemptView{Gateway: gateway, Worker: worker}
}
