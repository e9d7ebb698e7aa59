package worker_test

import (
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/redislink"
	"github.com/kvmesh/kvmesh/internal/redislink/redistest"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/gpu"
	"github.com/kvmesh/kvmesh/worker/sim"
)

// A worker's whole life in Redis: ready, drained, its server killed and back, and
// nothing left at the end.
func TestRegistrationInRedis(t *testing.T) {
	s := redistest.Start(t)
	client, err := redislink.Open(redislink.Config{URL: s.URL()})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	probe := &fakeGPUs{}
	probe.devices.Store(&[]gpu.Device{{MemoryUsedMB: 10, MemoryTotalMB: 100}, {Index: 1, MemoryUsedMB: 20, MemoryTotalMB: 100}})
	r := start(t, sim.Config{}, worker.Config{
		ID: "w-7", Pool: "p", Zone: "z", Model: "m", Aliases: []string{"a"}, Redis: client, GPU: probe, DrainTimeout: time.Hour,
	})
	var h fleet.RedisHealth
	says := func(status string) func() bool {
		return func() bool {
			raw, err := s.Client.Get(t.Context(), fleet.RedisHealthKey("w-7")).Bytes()
			if err != nil {
				return false
			}
			if h, err = fleet.ParseRedisHealth("w-7", raw); err != nil {
				t.Fatal(err)
			}
			return h.Status == status
		}
	}
	decode[any](t, r.post(t, textPath, `{"model":"m","prompt":"x","sim":{"ttft_ms":20}}`), 200)
	decode[any](t, r.do(t, http.MethodPost, "/drain", ""), 200)
	until(t, says("draining"))
	host, port, err := h.Address("")
	if err != nil || net.JoinHostPort(host, port) != r.Addr() {
		t.Errorf("address %s:%s, %v", host, port, err)
	}
	if h.Model != "m" || h.Zone != "z" || h.Pool != "p" || h.Aliases[0] != "a" || h.Incarnation == 0 || h.Engine != "sim" ||
		h.GPUMemoryUsedMB != 30 || h.GPUMemoryTotalMB != 200 || h.AvgLatencyMS < 20 || time.Since(time.UnixMilli(int64(1000*h.Timestamp))) > time.Minute {
		t.Errorf("%+v", h)
	}
	decode[any](t, r.do(t, http.MethodDelete, "/drain", ""), 200)
	until(t, says("healthy"))

	s.Kill()
	decode[any](t, r.post(t, textPath, `{"model":"m","prompt":"x"}`), 200)
	decode[any](t, r.do(t, http.MethodPost, "/drain", ""), 200) // a change that Redis does not hear
	decode[any](t, r.do(t, http.MethodDelete, "/drain", ""), 200)
	s.Start()
	until(t, says("healthy"))

	r.stop()
	if err := <-r.ended; err != nil {
		t.Error(err)
	}
	left, err := s.Client.Keys(t.Context(), "*").Result()
	if err != nil || len(left) != 0 {
		t.Errorf("left in Redis: %v, %v", left, err)
	}
}
