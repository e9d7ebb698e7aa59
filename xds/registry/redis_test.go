package registry_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/redislink"
	"github.com/kvmesh/kvmesh/internal/redislink/redistest"
	"github.com/kvmesh/kvmesh/xds/registry"
)

// sink writes down what a Redis told, one line each.
type sink struct {
	lines []string
	last  map[string]fleet.Registration
}

func (s *sink) Register(r fleet.Registration, l registry.Load) {
	s.lines = append(s.lines, fmt.Sprintf("register %s %s %s %d/%d", r.ID, r.Address, r.State, l.Running, l.Waiting))
	if s.last == nil {
		s.last = map[string]fleet.Registration{}
	}
	s.last[r.ID] = r
}

func (s *sink) Keep(id string, _ uint64) { s.lines = append(s.lines, "keep "+id) }

func (s *sink) Remove(id string, _ uint64) { s.lines = append(s.lines, "remove "+id) }

// took returns and forgets the lines.
func (s *sink) took() string {
	out := strings.Join(s.lines, "; ")
	s.lines = nil
	return out
}

// redisUnderTest reads a real server.
type redisUnderTest struct {
	*registry.Redis
	t      *testing.T
	server *redistest.Server
	sink   sink
	log    strings.Builder
}

func newRedis(t *testing.T, known ...fleet.Registration) *redisUnderTest {
	t.Helper()
	r := &redisUnderTest{t: t, server: redistest.Start(t)}
	r.Redis = registry.NewRedis(registry.RedisConfig{
		Client: r.server.Client, AddressTemplate: "{worker_id}.invalid:8000", Known: known,
		Pool: func(model string) (string, bool) { return "main", model == "m" },
		Log:  slog.New(slog.NewTextHandler(&r.log, nil)),
	}, time.Now())
	return r
}

// wants reads once and compares what was told.
func (r *redisUnderTest) wants(want string) {
	r.t.Helper()
	r.Poll(r.t.Context(), &r.sink)
	if got := r.sink.took(); got != want {
		r.t.Errorf("told %q, want %q", got, want)
	}
}

// foreignEntry is what another project's worker writes.
func foreignEntry(id, status string, more ...string) string {
	return fmt.Sprintf(`{"worker_id":%q,"model":"m","zone":"z","status":%q,"timestamp":1,"num_running_requests":3,"num_waiting_requests":1%s}`,
		id, status, strings.Join(more, ""))
}

// write stores an entry as its worker would.
func (r *redisUnderTest) write(id, health string, ttl time.Duration) {
	r.t.Helper()
	pipe := r.server.Client.TxPipeline()
	pipe.SAdd(r.t.Context(), fleet.RedisActive, id)
	pipe.Set(r.t.Context(), fleet.RedisHealthKey(id), health, ttl)
	if _, err := pipe.Exec(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
}

// run gives one command of Redis.
func (r *redisUnderTest) run(args ...any) {
	r.t.Helper()
	if err := r.server.Client.Do(r.t.Context(), args...).Err(); err != nil {
		r.t.Fatal(err)
	}
}

const here = `,"host":"127.0.0.1","port":8001`

func TestForeignWorker(t *testing.T) {
	r := newRedis(t)
	r.wants("")
	r.write("w1", foreignEntry("w1", "healthy", here), fleet.TTL)
	r.wants("register w1 127.0.0.1:8001 ready 3/1")
	reg := r.sink.last["w1"]
	if err := reg.Validate(); err != nil || reg.Pool != "main" || reg.Zone != "z" || reg.Incarnation != fleet.ForeignIncarnation || reg.Via != fleet.ViaRedis {
		t.Errorf("%v: %+v", err, reg)
	}
	r.wants("") // nothing new
	r.run("PEXPIRE", "llm:worker:w1:health", 9000)
	r.wants("")
	r.write("w1", foreignEntry("w1", "healthy", here), fleet.TTL) // the same again is a sign of life
	r.wants("register w1 127.0.0.1:8001 ready 3/1")
	r.write("w1", foreignEntry("w1", "unhealthy", here), fleet.TTL)
	r.wants("register w1 127.0.0.1:8001 failed 3/1")
	r.write("w1", foreignEntry("w1", "draining", here), fleet.TTL)
	r.wants("register w1 127.0.0.1:8001 draining 3/1")
	r.write("w1", foreignEntry("w1", "healthy", here), fleet.TTL)
	r.wants("register w1 127.0.0.1:8001 ready 3/1")
	r.run("SET", "llm:worker:w1:status", "draining", "EX", 600)
	r.wants("register w1 127.0.0.1:8001 draining 3/1")
	r.run("DEL", "llm:worker:w1:status")
	r.wants("register w1 127.0.0.1:8001 ready 3/1")
}

// A worker that leaves is removed at once when others are there; where it was the
// last one, and where the set is gone, nobody can tell leaving from lost data.
func TestLeaving(t *testing.T) {
	r := newRedis(t)
	for _, id := range []string{"w1", "w2", "w3"} {
		r.write(id, foreignEntry(id, "healthy", here), fleet.TTL)
	}
	r.Poll(t.Context(), &r.sink)
	r.sink.took()
	leave := func(id string) {
		r.run("SREM", fleet.RedisActive, id)
		r.run("DEL", "llm:worker:"+id+":health")
	}
	leave("w1")
	r.wants("remove w1")
	r.wants("")
	r.run("DEL", "llm:worker:w2:health") // expired, but still in the set: it may come back
	r.wants("")
	r.run("SREM", fleet.RedisActive, "w3") // its entry is there: it counts
	r.wants("")
	leave("w2")
	leave("w3")
	r.wants("")
	for _, id := range []string{"w2", "w3"} {
		if !r.Vouches(id, time.Now()) || r.Vouches(id, time.Now().Add(31*time.Second)) {
			t.Errorf("%s is vouched for too short or too long", id)
		}
	}
	if r.Vouches("w1", time.Now()) {
		t.Error("a worker that left is vouched for")
	}
}

// The server is killed and comes back empty: those who were there stay, and those
// who do not write again fall silent, nobody is removed at once.
func TestRedisLosesItsData(t *testing.T) {
	r := newRedis(t)
	for _, id := range []string{"w1", "w2"} {
		r.write(id, foreignEntry(id, "healthy", here), fleet.TTL)
	}
	r.Poll(t.Context(), &r.sink)
	r.sink.took()
	r.server.Kill()
	r.wants("keep w1; keep w2")
	r.wants("keep w1; keep w2")
	if !r.Vouches("w1", time.Now().Add(time.Hour)) {
		t.Error("nobody vouches while Redis is away")
	}
	r.server.Start()
	r.wants("")
	r.write("w1", foreignEntry("w1", "healthy", here), fleet.TTL)
	r.wants("register w1 127.0.0.1:8001 ready 3/1")
	if !r.Vouches("w2", time.Now()) || r.Vouches("w2", time.Now().Add(31*time.Second)) {
		t.Error("w2 is vouched for too short or too long")
	}
	if n := strings.Count(r.log.String(), "Redis is away"); n != 1 {
		t.Errorf("said %d times that Redis is away", n)
	}
}

// A control plane that starts while Redis is away keeps the workers it knew.
func TestRestartWithoutRedis(t *testing.T) {
	r := newRedis(t, fleet.Registration{ID: "w1", Address: "127.0.0.1:8001", Pool: "main", Incarnation: 1, Via: fleet.ViaRedis})
	r.server.Kill()
	r.wants("keep w1")
	r.server.Start()
	r.wants("") // it has its time to write
	if !r.Vouches("w1", time.Now()) {
		t.Error("not vouched for")
	}
}

// What makes no sense hurts nobody but its writer, and is said once.
func TestUselessEntries(t *testing.T) {
	r := newRedis(t)
	r.write("good", foreignEntry("good", "healthy", here), fleet.TTL)
	for id, health := range map[string]string{
		"json":      "{",
		"other":     foreignEntry("another", "healthy", here),
		"model":     strings.ReplaceAll(foreignEntry("model", "healthy", here), `"m"`, `"unserved"`),
		"lookup":    foreignEntry("lookup", "healthy"),
		"any":       foreignEntry("any", "healthy", `,"host":"0.0.0.0","port":1`),
		"port":      foreignEntry("port", "healthy", `,"host":"127.0.0.1","port":99999`),
		"bad id/..": foreignEntry("bad id/..", "healthy", here),
		"large":     foreignEntry("large", "healthy", here, `,"x":"`+strings.Repeat("x", 70<<10)+`"`),
	} {
		r.write(id, health, fleet.TTL)
	}
	r.run("LPUSH", "llm:worker:list:health", "x")
	r.run("SADD", fleet.RedisActive, "list", "empty")
	r.wants("register good 127.0.0.1:8001 ready 3/1")
	r.wants("")
	r.wants("")
	if n := strings.Count(r.log.String(), "of no use"); n != 8 {
		t.Errorf("%d complaints:\n%s", n, r.log.String())
	}
	r.write("json", foreignEntry("json", "healthy", here), fleet.TTL)
	r.wants("register json 127.0.0.1:8001 ready 3/1")
}

// Five thousand workers are read in a few round trips.
func TestManyInRedis(t *testing.T) {
	r := newRedis(t)
	patient, err := redislink.Open(redislink.Config{URL: r.server.URL(), Timeout: time.Minute}) // it is a lot for a busy machine
	if err != nil {
		t.Fatal(err)
	}
	defer patient.Close()
	r.Redis = registry.NewRedis(registry.RedisConfig{
		Client: patient, AddressTemplate: "{worker_id}.invalid:8000", Log: slog.New(slog.DiscardHandler),
		Pool: func(model string) (string, bool) { return "main", model == "m" },
	}, time.Now())
	pipe := patient.Pipeline()
	const n = 5000
	for i := range n {
		h := fleet.RedisHealth{WorkerID: fmt.Sprintf("w%d", i), Model: "m", Status: "healthy", Host: "127.0.0.1", Port: 1 + i}
		raw, err := json.Marshal(h)
		if err != nil {
			t.Fatal(err)
		}
		pipe.SAdd(t.Context(), fleet.RedisActive, h.WorkerID)
		pipe.Set(t.Context(), fleet.RedisHealthKey(h.WorkerID), raw, fleet.TTL)
	}
	if _, err := pipe.Exec(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.Poll(t.Context(), &r.sink)
	if len(r.sink.lines) != n {
		t.Errorf("%d of %d registered", len(r.sink.lines), n)
	}
}

func TestRunEnds(t *testing.T) {
	r := newRedis(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r.Run(ctx, &r.sink)
	if got := r.sink.took(); got != "" {
		t.Errorf("told %q", got)
	}
}
