package fleet

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// The fleet in Redis. A worker that writes these keys, ours or not, is a member:
//
//	llm:active_workers          set of worker ids
//	llm:worker:<id>:health      RedisHealth as JSON, written every Heartbeat, expires after TTL
//	llm:worker:<id>:status      RedisDraining while the worker takes no requests, expires after RedisStatusTTL
const (
	RedisActive    = "llm:active_workers"
	RedisStatusTTL = 10 * time.Minute
	RedisDraining  = "draining" // the one value of a status key
)

// RedisHealthKey is the key of a worker's RedisHealth.
func RedisHealthKey(id string) string { return "llm:worker:" + id + ":health" }

// RedisStatusKey is the key of a worker's status.
func RedisStatusKey(id string) string { return "llm:worker:" + id + ":status" }

// Words of RedisHealth.Status.
const (
	RedisHealthy   = "healthy"
	RedisUnhealthy = "unhealthy"
	RedisLoading   = "loading" // ours; others say unhealthy
)

// RedisHealth is what a worker tells in Redis. The first group is written by every
// worker, the second by ours: whoever leaves it out is reached by AddressTemplate.
type RedisHealth struct {
	WorkerID         string  `json:"worker_id"`
	Model            string  `json:"model"`
	Zone             string  `json:"zone"`
	Status           string  `json:"status"`    // RedisHealthy, RedisUnhealthy, RedisDraining, RedisLoading
	Timestamp        float64 `json:"timestamp"` // Unix seconds; readers do not rely on the writer's clock
	GPUMemoryUsedMB  float64 `json:"gpu_memory_used_mb"`
	GPUMemoryTotalMB float64 `json:"gpu_memory_total_mb"`
	Running          int     `json:"num_running_requests"`
	Waiting          int     `json:"num_waiting_requests"`
	AvgLatencyMS     float64 `json:"avg_inference_latency_ms"`

	Host        string   `json:"host,omitempty"` // name or IP address at which the mesh reaches it
	Port        int      `json:"port,omitempty"`
	Incarnation uint64   `json:"incarnation,omitempty"` // as in Registration
	Pool        string   `json:"pool,omitempty"`
	Engine      string   `json:"engine,omitempty"`
	Aliases     []string `json:"aliases,omitempty"`
	Fingerprint string   `json:"fingerprint,omitempty"`
	RelayMark   string   `json:"relay_mark,omitempty"`
	Reason      string   `json:"reason,omitempty"`
	KVUsage     float64  `json:"kv_cache_usage,omitempty"` // 0..1
	PID         int64    `json:"pid,omitempty"`
	Hostname    string   `json:"hostname,omitempty"` // of the machine, for people
	Process     string   `json:"process,omitempty"`  // as in Registration
}

// RedisHealthOf says in Redis what r says; load and memory are left to the caller.
func RedisHealthOf(r Registration, now time.Time) RedisHealth {
	h := RedisHealth{
		WorkerID: r.ID, Model: r.Model, Zone: r.Zone, Timestamp: float64(now.UnixMilli()) / 1000,
		Incarnation: r.Incarnation, Pool: r.Pool, Engine: r.Engine, Aliases: r.Aliases,
		Fingerprint: r.Fingerprint, RelayMark: r.RelayMark, Reason: r.Reason, PID: r.PID, Hostname: r.Host, Process: r.Process,
	}
	if a, err := netip.ParseAddrPort(r.Address); err == nil {
		h.Host, h.Port = a.Addr().String(), int(a.Port())
	}
	switch r.State {
	case StateDraining:
		h.Status = RedisDraining
	case StateLoading:
		h.Status = RedisLoading
	case StateFailed:
		h.Status = RedisUnhealthy
	default:
		h.Status = RedisHealthy
	}
	return h
}

// ParseRedisHealth reads a health value of the worker with that id. Workers are
// written in many languages, so a number may come as a string or not at all; what
// cannot be a number counts as 0.
func ParseRedisHealth(id string, raw []byte) (RedisHealth, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil || fields == nil {
		return RedisHealth{}, fmt.Errorf("health of worker %q: want a JSON object", id)
	}
	num := func(name string) float64 { return looseNumber(fields[name]) }
	count := func(name string) int { return int(min(max(num(name), 0), 1<<20)) }
	h := RedisHealth{
		WorkerID: looseText(fields["worker_id"]), Model: looseText(fields["model"]), Zone: looseText(fields["zone"]),
		Status: strings.ToLower(looseText(fields["status"])), Timestamp: num("timestamp"),
		GPUMemoryUsedMB: num("gpu_memory_used_mb"), GPUMemoryTotalMB: num("gpu_memory_total_mb"),
		Running: count("num_running_requests"), Waiting: count("num_waiting_requests"), AvgLatencyMS: num("avg_inference_latency_ms"),
		Host: looseText(fields["host"]), Port: count("port"), Pool: looseText(fields["pool"]), Engine: looseText(fields["engine"]),
		Fingerprint: looseText(fields["fingerprint"]), RelayMark: looseText(fields["relay_mark"]), Reason: looseText(fields["reason"]),
		KVUsage: min(max(num("kv_cache_usage"), 0), 1), PID: int64(num("pid")), Hostname: looseText(fields["hostname"]), Process: looseText(fields["process"]),
	}
	h.Incarnation, _ = strconv.ParseUint(strings.Trim(string(fields["incarnation"]), `"`), 10, 64)
	// Aliases of another shape are none.
	_ = json.Unmarshal(fields["aliases"], &h.Aliases)
	if h.WorkerID != "" && h.WorkerID != id {
		return RedisHealth{}, fmt.Errorf("health of worker %q names worker %q", id, h.WorkerID)
	}
	h.WorkerID = id
	return h, nil
}

// looseNumber reads a number, or a string that holds one.
func looseNumber(raw json.RawMessage) float64 {
	x, err := strconv.ParseFloat(strings.Trim(string(raw), `"`), 64)
	if err != nil || math.IsNaN(x) || math.IsInf(x, 0) {
		return 0
	}
	return x
}

// looseText reads a string, or a number as text.
func looseText(raw json.RawMessage) string {
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return s
	}
	if x := looseNumber(raw); x != 0 {
		return string(raw)
	}
	return ""
}

// State is the word of a Registration for it, with the reason where it has one.
func (h RedisHealth) State() (state, reason string) {
	switch h.Status {
	case RedisHealthy:
		return StateReady, ""
	case RedisDraining:
		return StateDraining, h.Reason
	case RedisLoading:
		return StateLoading, ""
	case RedisUnhealthy:
		return StateFailed, cmp.Or(h.Reason, "reports that it is unhealthy")
	}
	return StateFailed, fmt.Sprintf("reports the unknown status %.40q", h.Status)
}

// DefaultAddressTemplate is where a worker is reached that tells no host.
const DefaultAddressTemplate = "worker-{worker_id}:8000"

// Address is where the worker is reached: its own host and port, and what it leaves
// out from the template.
func (h RedisHealth) Address(template string) (host, port string, err error) {
	template = strings.ReplaceAll(cmp.Or(template, DefaultAddressTemplate), "{worker_id}", h.WorkerID)
	host, port, err = net.SplitHostPort(template)
	if h.Host != "" {
		host = h.Host
	}
	if h.Port != 0 {
		port = strconv.Itoa(h.Port)
	}
	if n, perr := strconv.ParseUint(port, 10, 16); err != nil && (h.Host == "" || h.Port == 0) || perr != nil || n == 0 || host == "" {
		return "", "", fmt.Errorf("address of worker %q: %q is no host:port", h.WorkerID, template)
	}
	return host, port, nil
}
