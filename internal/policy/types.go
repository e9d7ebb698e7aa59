package policy

import (
	"fmt"
	"strconv"
	"time"

	"go.yaml.in/yaml/v3"
)

// APIVersion is the only one understood.
const APIVersion = "kvmesh.io/v1alpha1"

// Kinds of documents.
const (
	KindMesh       = "Mesh"
	KindWorkerPool = "WorkerPool"
	KindModelRoute = "ModelRoute"
)

// Engines of a WorkerPool.
const (
	EngineLlamaCpp = "llamacpp" // llama.cpp in the worker's process
	EngineSim      = "sim"      // deterministic simulator
	EngineOpenAI   = "openai"   // existing OpenAI-compatible servers
)

// Place is where a document begins.
type Place struct {
	File string // as File.Name
	Line int    // from 1; 0 for a document that was not written but made by default
}

// String writes a place as compilers do.
func (p Place) String() string { return fmt.Sprintf("%s:%d", p.File, p.Line) }

// Duration is a time.Duration written like "1s" or "250ms" in YAML. The zero
// value means "not given"; a timeout that may be switched off takes "off".
type Duration time.Duration

// Off is a Duration that switches a timeout off.
const Off Duration = -1

// D returns the duration, 0 when it is Off.
func (d Duration) D() time.Duration { return time.Duration(max(d, 0)) }

// UnmarshalYAML reads "1s", "250ms" or "off".
func (d *Duration) UnmarshalYAML(n *yaml.Node) error {
	if n.Kind == yaml.ScalarNode && n.Value == "off" {
		*d = Off
		return nil
	}
	v, err := time.ParseDuration(n.Value)
	if n.Kind != yaml.ScalarNode || err != nil || v <= 0 {
		return fmt.Errorf("line %d: %q is no duration: want for example 500ms, 30s, 5m, or off", n.Line, n.Value)
	}
	*d = Duration(v)
	return nil
}

// MarshalYAML writes what UnmarshalYAML reads.
func (d Duration) MarshalYAML() (any, error) {
	if d == Off {
		return "off", nil
	}
	return time.Duration(d).String(), nil
}

// BufferTimes is how many times Mesh.MaxBody Envoy takes in of a body whose length
// it was not told. Past the limit Envoy stops reading, and a client that only sends
// sees a reset connection; up to there it gets its answer.
const BufferTimes = 2

// LargestBody is the most that Mesh.MaxBody may be, in bytes: the messages between
// Envoy and the gateway, which hold up to BufferTimes as much, end at 2 GiB.
const LargestBody = 512 << 20

// Arriving is how many times Mesh.HeldBodies the large bodies on their way may
// announce. They hold what came of them only, and that in Envoy.
const Arriving = 4

// Mesh says how one deployment runs: where it listens, its limits. It is the one
// document that is no policy (see RATIONALE.md); at most one per set.
type Mesh struct {
	At Place `yaml:"-"`

	Listen      Listen `yaml:"listen"`
	Zone        string `yaml:"zone"`        // zone of the gateway; its workers come first
	DefaultPool string `yaml:"defaultPool"` // pool of requests that nothing routes; default the first
	MaxBody     Bytes  `yaml:"maxBody"`     // largest request body, default 32Mi, at most LargestBody
	HeldBodies  Bytes  `yaml:"heldBodies"`  // most bytes of bodies held by the gateway at once, default 512Mi
	HeldStreams Bytes  `yaml:"heldStreams"` // most bytes of streams kept for clients that may come back, default 256Mi
	// ShareStreams writes those streams into registry.redis as well, encrypted by the
	// relay's secret, so that another gateway with the same store and secret can give
	// clients the rest. ShareWait is how long an event waits for the store before it goes
	// to its client, while the store keeps up; default 25ms, off waits for nothing.
	ShareStreams bool     `yaml:"shareStreams"`
	ShareWait    Duration `yaml:"shareWait"`
	BodyTimeout  Duration `yaml:"bodyTimeout"` // time a request has to arrive whole, default 120s
	ExtProc      ExtProc  `yaml:"extProc"`
	Envoy        Envoy    `yaml:"envoy"`
	Registry     Registry `yaml:"registry"`
	KV           KV       `yaml:"kv"`
}

// Registry says where workers are found beside those that register at the control
// plane.
type Registry struct {
	// Redis is the URL of a Redis or Valkey server in which workers write
	// llm:active_workers and their health: redis://, or rediss:// for TLS. REDIS_URL in
	// the control plane's environment takes its place, so that no password stands here.
	Redis string `yaml:"redis"`
	// AddressTemplate is the host:port of a worker that tells none, with {worker_id} in
	// it; default worker-{worker_id}:8000.
	AddressTemplate string `yaml:"addressTemplate"`
}

// Listen holds addresses as host:port; port 0 takes a free one. All default to
// loopback.
type Listen struct {
	OpenAI  string `yaml:"openai"`  // Envoy's edge listener
	Admin   string `yaml:"admin"`   // Envoy's admin port
	API     string `yaml:"api"`     // the control plane's HTTP API
	Metrics string `yaml:"metrics"` // the gateway's /health and /metrics
	// Sockets is the folder of the Unix sockets between the parts that `kvmesh up` starts,
	// an absolute path. It is made with mode 0700 where it is not there, must be empty
	// else, and is removed at the end. Default a new one among the temporary files.
	Sockets string `yaml:"sockets"`
}

// longestSockets is the longest Listen.Sockets, in bytes: the system's limit for the path of
// a socket, without the longest name in there.
const longestSockets = 103 - len("/xds-snapshot.sock")

// ExtProc holds the limits of the external processor.
type ExtProc struct {
	MessageTimeout Duration `yaml:"messageTimeout"` // Envoy goes on without us after this, default 1s
}

// Envoy holds settings of the Envoy that `kvmesh up` starts.
type Envoy struct {
	Concurrency int    `yaml:"concurrency"` // worker threads, default 2
	LogLevel    string `yaml:"logLevel"`    // default warning
	// MaxHeap is the memory near which Envoy ends the requests that hold most of it
	// and takes no new ones, default 1Gi beside the bodies on their way: 3Gi.
	MaxHeap Bytes `yaml:"maxHeap"`
}

// WorkerPool says which workers serve together and how their health counts.
type WorkerPool struct {
	Name string `yaml:"-"`
	At   Place  `yaml:"-"`

	Engine  string   `yaml:"engine"`
	Model   string   `yaml:"model"`   // the workers' own name of the model
	Local   []Local  `yaml:"local"`   // workers that `kvmesh up` starts on this machine
	Static  []Static `yaml:"static"`  // existing servers (engine openai)
	Worker  Worker   `yaml:"worker"`  // settings of local workers
	Sim     Sim      `yaml:"sim"`     // settings of engine sim
	Health  Health   `yaml:"health"`  // status and weight
	Connect Duration `yaml:"connect"` // time to connect to a worker, default 1s
	Drain   Duration `yaml:"drain"`   // time a stopping worker gives its streams, default 30s
}

// Local is one worker process of this machine.
type Local struct {
	ID   string `yaml:"id"`
	Zone string `yaml:"zone"`
	Port int    `yaml:"port"` // 0 takes a free one
}

// Static is one existing OpenAI-compatible server.
type Static struct {
	ID   string `yaml:"id"` // default made from the URL's host and port
	URL  string `yaml:"url"`
	Zone string `yaml:"zone"`
}

// Worker holds the settings of local workers.
type Worker struct {
	Weights       string `yaml:"weights"`       // path of the GGUF; default the fetched model
	ContextLength int    `yaml:"contextLength"` // most tokens of prompt and answer, default 8192
	MaxNumSeqs    int    `yaml:"maxNumSeqs"`    // most sequences at once, default 4 (llamacpp), 64 (sim)
	MaxQueue      int    `yaml:"maxQueue"`      // most waiting requests, default 256
	Threads       int    `yaml:"threads"`       // CPU threads of llamacpp, default 1
}

// Sim holds the speeds of engine sim.
type Sim struct {
	TTFT Duration `yaml:"ttft"` // time to first token, default 20ms
	ITL  Duration `yaml:"itl"`  // time between tokens, default 20ms
}

// Health takes the names and meanings of gRFC A58 where it has them.
type Health struct {
	BlackoutPeriod          Duration `yaml:"blackoutPeriod"`          // a new worker's own weight counts after this, default 2s
	WeightExpirationPeriod  Duration `yaml:"weightExpirationPeriod"`  // a weight without reports is forgotten after this, default 10s
	ErrorUtilizationPenalty *float64 `yaml:"errorUtilizationPenalty"` // default 1
	// ThrottleUtilizationPenalty is how much more load weighs on a GPU slowed by heat
	// or lack of power, default 1: twice.
	ThrottleUtilizationPenalty *float64 `yaml:"throttleUtilizationPenalty"`
	SilenceTimeout             Duration `yaml:"silenceTimeout"` // no report for this long is TIMEOUT, default 3s
	Hysteresis                 *float64 `yaml:"hysteresis"`     // smallest relative change of a weight, default 0.1
	MinShare                   *float64 `yaml:"minShare"`       // share of a pool that keeps taking traffic, default 0.3
	Check                      string   `yaml:"check"`          // path Envoy probes, default /ready (openai: /health); "off"
	CheckInterval              Duration `yaml:"checkInterval"`  // default 5s
}

// ModelRoute maps the names clients use to tiers tried in order.
type ModelRoute struct {
	Name string `yaml:"-"`
	At   Place  `yaml:"-"`

	Models   []string `yaml:"models"` // names clients use; "*" matches every other name
	Tiers    []Tier   `yaml:"tiers"`
	Timeouts Timeouts `yaml:"timeouts"`
	Retries  *int     `yaml:"retries"` // further attempts before the first byte, default 2
	Relay    *bool    `yaml:"relay"`   // false keeps the route on the direct path, default true
	Stream   Stream   `yaml:"stream"`
	// Priority of its requests at the workers and among answers that move: a higher one
	// goes first, default 0. The meaning is an InferenceObjective's.
	Priority int32 `yaml:"priority"`
}

// Stream says how far the mesh goes to keep an answer flowing once it has begun.
type Stream struct {
	Moves *int     `yaml:"moves"` // most times that an answer may go on at another worker, default 8
	Wait  Duration `yaml:"wait"`  // how long an answer without a worker waits for one, default 10s
	// A worker that is silent in an answer is taken for hung after a time learned from
	// its own answers, within these bounds: default 1s, or StallMax if that is less, and 30s. StallMax off
	// never does.
	StallMin Duration `yaml:"stallMin"`
	StallMax Duration `yaml:"stallMax"`
	// A stream whose client asked for it is kept for so long when that is away, off keeps
	// none; and so many bytes of its events at most. Default 60s and 4Mi.
	Retain     Duration `yaml:"retain"`
	RetainSize Bytes    `yaml:"retainSize"`
}

// Tier is one pool with the model it serves there.
type Tier struct {
	Pool      string `yaml:"pool"`
	Model     string `yaml:"model"`     // default the pool's model; empty for "*" keeps the client's
	MaxTokens int    `yaml:"maxTokens"` // clamp; 0, which cannot be written, is none
}

// Timeouts of one route; see the table in README.md. Zero means the default,
// Off none.
type Timeouts struct {
	FirstByte  Duration `yaml:"firstByte"`  // until the worker's first token, default 600s
	StreamIdle Duration `yaml:"streamIdle"` // between two tokens, default 300s
	Request    Duration `yaml:"request"`    // the whole answer, default off
	KVLookup   Duration `yaml:"kvLookup"`   // restoring KV, see README.md
}

// Bytes is a size written like 4096, 64Ki, 32Mi or 1Gi.
type Bytes int64

// largest is the most Bytes that make sense for anything here.
const largest = 1 << 40

// String writes a size as short as it goes exactly.
func (b Bytes) String() string {
	for _, u := range []struct {
		shift int
		unit  string
	}{{30, "Gi"}, {20, "Mi"}, {10, "Ki"}} {
		if b != 0 && b%(1<<u.shift) == 0 {
			return fmt.Sprintf("%d%s", int64(b)>>u.shift, u.unit)
		}
	}
	return strconv.FormatInt(int64(b), 10)
}

// UnmarshalYAML reads a number with an optional Ki, Mi or Gi.
func (b *Bytes) UnmarshalYAML(n *yaml.Node) (err error) {
	if *b, err = ParseBytes(n.Value); err != nil {
		return fmt.Errorf("line %d: %w", n.Line, err)
	}
	return nil
}

// ParseBytes reads a number with an optional Ki, Mi or Gi.
func ParseBytes(text string) (Bytes, error) {
	num, unit := text, ""
	if l := len(num); l > 2 {
		switch u := num[l-2:]; u {
		case "Ki", "Mi", "Gi":
			num, unit = num[:l-2], u
		}
	}
	shift := map[string]int{"Ki": 10, "Mi": 20, "Gi": 30}[unit]
	var v int64
	if _, err := fmt.Sscanf(num+"\n", "%d\n", &v); err != nil || v <= 0 {
		return 0, fmt.Errorf("%q is no size: want for example 65536, 64Ki, 32Mi", text)
	}
	if v > largest>>shift {
		return 0, fmt.Errorf("%q is too large a size: at most 1024Gi", text)
	}
	return Bytes(v << shift), nil
}
