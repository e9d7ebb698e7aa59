package worker

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/worker/gpu"
)

// gpuCollector turns the last reading of the GPUs into metrics at each scrape. Names,
// units and labels are those of NVIDIA's DCGM exporter.
type gpuCollector struct{ devices func() []gpu.Device }

// gpuMetric is one of them.
type gpuMetric struct {
	name, help string
	value      func(gpu.Device) float64
}

// gpuMetrics lists them.
func gpuMetrics() []gpuMetric {
	return []gpuMetric{
		{"DCGM_FI_DEV_FB_USED", "GPU memory in use, MiB.", func(d gpu.Device) float64 { return float64(d.MemoryUsedMB) }},
		{"DCGM_FI_DEV_FB_FREE", "GPU memory free, MiB.", func(d gpu.Device) float64 {
			return float64(d.MemoryTotalMB) - float64(d.MemoryUsedMB)
		}},
		{"DCGM_FI_DEV_GPU_UTIL", "Share of time with work, percent.", func(d gpu.Device) float64 { return 100 * d.Utilization }},
		{"DCGM_FI_DEV_GPU_TEMP", "Temperature, degrees Celsius.", func(d gpu.Device) float64 { return d.TemperatureC }},
		{"DCGM_FI_DEV_POWER_USAGE", "Power, watts.", func(d gpu.Device) float64 { return d.PowerW }},
		{"DCGM_FI_DEV_XID_ERRORS", "Last XID error since the worker started, 0 for none.", func(d gpu.Device) float64 { return float64(d.XID) }},
		{"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "Uncorrectable memory errors since the driver was loaded.", func(d gpu.Device) float64 { return float64(d.ECCTotal) }},
		{"DCGM_FI_DEV_ROW_REMAP_PENDING", "1 when broken memory will be replaced at the next reset.", func(d gpu.Device) float64 { return number(d.RemapPending) }},
		{"DCGM_FI_DEV_ROW_REMAP_FAILURE", "1 when broken memory could not be replaced.", func(d gpu.Device) float64 { return number(d.RemapFailed) }},
		{"DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "What keeps the clocks down, as NVML's bit field.", func(d gpu.Device) float64 { return float64(d.Reasons) }},
		{"kvmesh_gpu_throttled", "Share of the last seconds slowed by heat or lack of power.", func(d gpu.Device) float64 { return d.Throttled }},
		{"kvmesh_gpu_lost", "1 when the GPU is gone or needs a reset.", func(d gpu.Device) float64 { return number(d.Lost) }},
	}
}

// desc is built anew each time, for there are no package variables.
func (m gpuMetric) desc() *prometheus.Desc {
	return prometheus.NewDesc(m.name, m.help, []string{"gpu", "UUID", "modelName"}, nil)
}

// Describe implements prometheus.Collector.
func (c gpuCollector) Describe(out chan<- *prometheus.Desc) {
	for _, m := range gpuMetrics() {
		out <- m.desc()
	}
}

// Collect implements prometheus.Collector.
func (c gpuCollector) Collect(out chan<- prometheus.Metric) {
	devices := c.devices()
	for _, m := range gpuMetrics() {
		for _, d := range devices {
			out <- prometheus.MustNewConstMetric(m.desc(), prometheus.GaugeValue, m.value(d), strconv.Itoa(d.Index), d.UUID, d.Name)
		}
	}
}
