package fleet_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// What one of ours writes is what it registers, through JSON and back.
func TestRedisHealthRoundTrip(t *testing.T) {
	for state, word := range map[string]string{
		"": "healthy", fleet.StateReady: "healthy", fleet.StateDraining: "draining", fleet.StateLoading: "loading", fleet.StateFailed: "unhealthy",
	} {
		r := valid()
		r.State, r.Zone, r.Model, r.Aliases, r.Engine, r.PID, r.Host = state, "z", "m", []string{"a", "b"}, "sim", 7, "node"
		r.Incarnation, r.Fingerprint = 1764441600123456789, "f"
		h := fleet.RedisHealthOf(r, time.Unix(1764441600, 5e8))
		h.Running, h.Waiting, h.GPUMemoryUsedMB, h.KVUsage, h.AvgLatencyMS = 3, 1, 1024, 0.5, 12.5
		raw, err := json.Marshal(h)
		if err != nil {
			t.Fatal(err)
		}
		got, err := fleet.ParseRedisHealth(r.ID, raw)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(h, got); diff != "" || got.Status != word || got.Timestamp != 1764441600.5 {
			t.Errorf("%s: %s", state, diff)
		}
		back, _ := got.State()
		if back != state && !(state == "" && back == fleet.StateReady) {
			t.Errorf("state %q came back as %q", state, back)
		}
		if host, port, err := got.Address(""); err != nil || host != "::1" || port != "8000" {
			t.Errorf("%q %q %v", host, port, err)
		}
	}
}

// The documented keys are names that other programs use; they cannot change.
func TestRedisLayout(t *testing.T) {
	h := fleet.RedisHealth{
		WorkerID: "w", Model: "m", Zone: "z", Status: "healthy", Timestamp: 1764441600.25,
		GPUMemoryUsedMB: 1, GPUMemoryTotalMB: 2, Running: 3, Waiting: 4, AvgLatencyMS: 5.5,
	}
	raw, err := json.Marshal(h)
	want := `{"worker_id":"w","model":"m","zone":"z","status":"healthy","timestamp":1764441600.25,` +
		`"gpu_memory_used_mb":1,"gpu_memory_total_mb":2,"num_running_requests":3,"num_waiting_requests":4,"avg_inference_latency_ms":5.5}`
	if err != nil || string(raw) != want {
		t.Errorf("%s", raw)
	}
	if fleet.RedisActive != "llm:active_workers" || fleet.RedisHealthKey("w-1") != "llm:worker:w-1:health" || fleet.RedisStatusKey("w-1") != "llm:worker:w-1:status" {
		t.Error("a key changed its name")
	}
	if fleet.TTL != 15*time.Second || fleet.Heartbeat != 5*time.Second || fleet.RedisStatusTTL != 600*time.Second {
		t.Error("a time changed")
	}
}

func TestForeignRedisHealth(t *testing.T) {
	for _, c := range []struct {
		raw    string
		state  string
		reason string // contained
		want   fleet.RedisHealth
	}{
		{
			`{"worker_id":"7","model":"llama","status":"healthy","timestamp":"2026-01-02T03:04:05Z","num_running_requests":"3","num_waiting_requests":2.0}`,
			fleet.StateReady, "",
			fleet.RedisHealth{WorkerID: "7", Model: "llama", Status: "healthy", Running: 3, Waiting: 2},
		},
		{`{"worker_id":7,"status":"UNHEALTHY","num_running_requests":-4,"port":null}`, fleet.StateFailed, "unhealthy", fleet.RedisHealth{WorkerID: "7", Status: "unhealthy"}},
		{`{"status":"draining"}`, fleet.StateDraining, "", fleet.RedisHealth{WorkerID: "7", Status: "draining"}},
		{`{"status":"sleepy"}`, fleet.StateFailed, "sleepy", fleet.RedisHealth{WorkerID: "7", Status: "sleepy"}},
		{`{}`, fleet.StateFailed, `""`, fleet.RedisHealth{WorkerID: "7"}},
		{`{"status":"healthy","aliases":"x","num_running_requests":1e300}`, fleet.StateReady, "", fleet.RedisHealth{WorkerID: "7", Status: "healthy", Running: 1 << 20}},
	} {
		got, err := fleet.ParseRedisHealth("7", []byte(c.raw))
		if err != nil {
			t.Errorf("%s: %v", c.raw, err)
			continue
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s: %s", c.raw, diff)
		}
		if state, reason := got.State(); state != c.state || !strings.Contains(reason, c.reason) {
			t.Errorf("%s: %s, %q", c.raw, state, reason)
		}
	}
	for _, raw := range []string{``, `null`, `[]`, `7`, `{"a":`, `{"worker_id":"8"}`} {
		if _, err := fleet.ParseRedisHealth("7", []byte(raw)); err == nil {
			t.Errorf("%q was taken", raw)
		}
	}
}

func TestRedisAddress(t *testing.T) {
	for _, c := range []struct {
		host     string
		port     int
		template string
		want     string // "" for an error
	}{
		{"", 0, "", "worker-w1:8000"},
		{"", 0, "{worker_id}.workers.svc:80", "w1.workers.svc:80"},
		{"10.0.0.7", 0, "", "10.0.0.7:8000"},
		{"", 9000, "", "worker-w1:9000"},
		{"::1", 9000, "no port", "::1:9000"},
		{"", 9000, "no port", ""},
		{"", 0, "host:0", ""},
		{"", 0, ":80", ""},
		{"h", 70000, "", ""},
	} {
		host, port, err := fleet.RedisHealth{WorkerID: "w1", Host: c.host, Port: c.port}.Address(c.template)
		if got := host + ":" + port; (err == nil) != (c.want != "") || err == nil && got != c.want {
			t.Errorf("%+v: %q, %v", c, got, err)
		}
	}
}

// Whatever is in Redis, reading it ends in an error or in something that can be
// shown.
func FuzzParseRedisHealth(f *testing.F) {
	f.Add([]byte(`{"worker_id":"w","status":"healthy","num_running_requests":"3","port":70000,"incarnation":"18446744073709551616"}`))
	f.Add([]byte(`{"worker_id":null,"timestamp":NaN}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		h, err := fleet.ParseRedisHealth("w", raw)
		if err != nil {
			return
		}
		if _, err := json.Marshal(h); err != nil || h.WorkerID != "w" || h.Running < 0 || h.Port < 0 || h.KVUsage < 0 || h.KVUsage > 1 {
			t.Errorf("%+v: %v", h, err)
		}
		if state, _ := h.State(); state == "" {
			t.Errorf("%+v has no state", h)
		}
		_, _, _ = h.Address("")
	})
}
