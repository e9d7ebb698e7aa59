package xds_test

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/redislink/redistest"
)

// withRedis is a policy whose workers register in Redis.
func withRedis(s *redistest.Server, template string) string {
	return fmt.Sprintf("%s---\napiVersion: kvmesh.io/v1alpha1\nkind: Mesh\nspec:\n  registry: {redis: %q, addressTemplate: %q}\n",
		strings.Replace(onePool, "  local: [{id: w0}]\n", "", 1), s.URL(), template)
}

// announce writes a worker's keys as any program would.
func announce(t *testing.T, s *redistest.Server, id, health string) {
	t.Helper()
	pipe := s.Client.TxPipeline()
	pipe.SAdd(t.Context(), "llm:active_workers", id)
	pipe.Set(t.Context(), "llm:worker:"+id+":health", health, fleet.TTL)
	if _, err := pipe.Exec(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// A worker of another project that writes only the documented keys is a member like
// any other, also while Redis is dead.
func TestForeignMember(t *testing.T) {
	s := redistest.Start(t)
	// A plain HTTP/1.1 server: it knows no ORCA and no gRPC.
	srv := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(srv.Close)
	_, port, err := net.SplitHostPort(srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	// Its id is its host, so that the template finds it.
	p := newPlane(t, withRedis(s, "{worker_id}:"+port))
	entry := func(status string, running, waiting int) string {
		return fmt.Sprintf(`{"worker_id":"127.0.0.1","model":"sim","zone":"eu-1b","status":%q,"timestamp":1,"gpu_memory_used_mb":1,"gpu_memory_total_mb":2,`+
			`"num_running_requests":%d,"num_waiting_requests":%d,"avg_inference_latency_ms":5}`, status, running, waiting)
	}
	announce(t, s, "127.0.0.1", entry("healthy", 4, 2))
	p.wants("127.0.0.1", "a member with weight and load", func(v fleet.WorkerView) bool {
		return v.Status == "HEALTHY" && v.Weight == 200 && v.Running == 4 && v.Waiting == 2 && v.Zone == "eu-1b" &&
			v.Pool == "main" && v.Address == "127.0.0.1:"+port
	})
	announce(t, s, "127.0.0.1", entry("healthy", 4, 8))
	p.wants("127.0.0.1", "fuller", func(v fleet.WorkerView) bool { return v.Weight == 50 })
	announce(t, s, "127.0.0.1", entry("unhealthy", 0, 0))
	p.wants("127.0.0.1", "unhealthy", func(v fleet.WorkerView) bool { return v.Status == "UNHEALTHY" })
	announce(t, s, "127.0.0.1", entry("healthy", 0, 0))
	if err := s.Client.Set(t.Context(), "llm:worker:127.0.0.1:status", "draining", 0).Err(); err != nil {
		t.Fatal(err)
	}
	p.wants("127.0.0.1", "draining", func(v fleet.WorkerView) bool { return v.Status == "DRAINING" })
	if err := s.Client.Del(t.Context(), "llm:worker:127.0.0.1:status").Err(); err != nil {
		t.Fatal(err)
	}
	p.wants("127.0.0.1", "back", func(v fleet.WorkerView) bool { return v.Status == "HEALTHY" })

	s.Kill()
	p.stop()
	p.start() // from what it stored, without Redis
	p.wants("127.0.0.1", "there without Redis", func(v fleet.WorkerView) bool { return v.Status == "HEALTHY" })
	s.Start()
	announce(t, s, "127.0.0.1", entry("draining", 0, 0))
	p.wants("127.0.0.1", "draining after Redis is back", func(v fleet.WorkerView) bool { return v.Status == "DRAINING" })

	announce(t, s, "other", strings.ReplaceAll(entry("healthy", 0, 0), `"worker_id":"127.0.0.1"`, `"host":"127.0.0.1"`))
	p.wants("other", "a member", func(v fleet.WorkerView) bool { return v.Status == "HEALTHY" })
	if err := s.Client.SRem(t.Context(), "llm:active_workers", "127.0.0.1").Err(); err != nil {
		t.Fatal(err)
	}
	if err := s.Client.Del(t.Context(), "llm:worker:127.0.0.1:health").Err(); err != nil {
		t.Fatal(err)
	}
	p.wants("127.0.0.1", "gone", func(v fleet.WorkerView) bool { return v.ID == "" })
}

// One of ours that is known from Redis alone reports its load over ORCA; what it
// registers itself wins over Redis.
func TestOwnMemberInRedis(t *testing.T) {
	s := redistest.Start(t)
	p := newPlane(t, withRedis(s, ""))
	w := startWorker(t, "w0")
	write := func(state string) {
		r := w.reg
		r.State = state
		h := fleet.RedisHealthOf(r, time.Now())
		raw, err := json.Marshal(h)
		if err != nil {
			t.Fatal(err)
		}
		announce(t, s, "w0", string(raw))
	}
	write(fleet.StateReady)
	p.wants("w0", "reporting over ORCA", func(v fleet.WorkerView) bool { return v.Status == "HEALTHY" && v.Weight == 200 && v.KVUsage == 0.25 })
	w.load(1)
	p.wants("w0", "full", func(v fleet.WorkerView) bool { return v.Weight == 100 })
	write(fleet.StateDraining)
	p.wants("w0", "draining", func(v fleet.WorkerView) bool { return v.Status == "DRAINING" })
	p.register(w)
	p.wants("w0", "ready by its own word", func(v fleet.WorkerView) bool { return v.Status == "HEALTHY" })
	write(fleet.StateDraining)
	// A reading comes every second; the next worker in it shows that it is over.
	announce(t, s, "next", `{"model":"sim","status":"healthy","host":"127.0.0.1","port":1}`)
	p.wants("next", "read", func(v fleet.WorkerView) bool { return v.ID != "" })
	if v := p.worker("w0"); v.Status != "HEALTHY" {
		t.Errorf("Redis won over the worker's own word: %+v", v)
	}
}
