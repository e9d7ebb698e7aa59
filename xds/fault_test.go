package xds_test

import (
	"strings"
	"testing"

	orcav3 "github.com/cncf/xds/go/xds/data/orca/v3"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// tell reports named metrics beside a utilization of one half.
func (w *fakeWorker) tell(named map[string]float64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.report = &orcav3.OrcaLoadReport{ApplicationUtilization: 0.5, RpsFractional: 1, NamedMetrics: named}
	close(w.moved)
	w.moved = make(chan struct{})
}

// What a worker reports of its GPUs and of its self-check decides at once.
func TestReportedFaults(t *testing.T) {
	p := newPlane(t, onePool)
	w := startWorker(t, "w0")
	p.register(w)
	status := func(word string, weight uint32, reason string) func(fleet.WorkerView) bool {
		return func(v fleet.WorkerView) bool {
			return v.Status == word && (weight == 0 || v.Weight == weight) && strings.Contains(v.Reason, reason)
		}
	}
	p.wants("w0", "at half load", status("HEALTHY", 200, ""))
	w.tell(map[string]float64{fleet.MetricGPUThrottled: 1})
	p.wants("w0", "slowed by heat", status("HEALTHY", 100, ""))
	for name, reason := range map[string]string{
		fleet.MetricGPULost: "GPU: lost", fleet.MetricGPUECC: "uncorrectable", fleet.MetricGPURemapFailed: "replaced", fleet.MetricSelfCheck: "self-check",
	} {
		w.tell(map[string]float64{name: 1})
		p.wants("w0", name, status("UNHEALTHY", 1, reason))
		w.tell(nil)
		p.wants("w0", "well again", status("HEALTHY", 200, ""))
	}
	w.tell(map[string]float64{fleet.MetricGPUXID: 79})
	p.wants("w0", "XID 79", status("UNHEALTHY", 1, "XID 79, the GPU has fallen off the bus"))
}

// A worker that registers as failed is UNHEALTHY with its reason, whatever load it
// reports, until it says otherwise.
func TestRegisteredFailure(t *testing.T) {
	p := newPlane(t, onePool)
	w := startWorker(t, "w0")
	w.reg.State, w.reg.Reason = fleet.StateFailed, "self-check failed: CUDA error 700"
	p.register(w)
	p.wants("w0", "failed", func(v fleet.WorkerView) bool {
		return v.Status == "UNHEALTHY" && v.Reason == "self-check failed: CUDA error 700"
	})
	w.reg.State, w.reg.Reason = fleet.StateReady, ""
	p.register(w)
	p.wants("w0", "recovered", func(v fleet.WorkerView) bool { return v.Status == "HEALTHY" && v.Reason == "" })
}
