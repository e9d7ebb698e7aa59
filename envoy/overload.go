package envoy

import (
	"time"

	overloadv3 "github.com/envoyproxy/go-control-plane/envoy/config/overload/v3"
	downstreamv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/resource_monitors/downstream_connections/v3"
	fixedheapv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/resource_monitors/fixed_heap/v3"
)

// heap is the name of the monitor of Envoy's memory.
const heap = "envoy.resource_monitors.fixed_heap"

// Shares of BootstrapConfig.MaxHeap at which Envoy acts.
const (
	heapShrink = 0.80 // freed memory goes back to the system
	heapReset  = 0.85 // from here to heapRefuse ever more of the largest streams end
	heapRefuse = 0.95 // new requests are answered 503
)

// accountFrom is the size of a stream's buffers, as a power of two, from which the
// stream is one that may be ended: 1 MiB.
const accountFrom = 20

// limits keep a flood from taking what the mesh needs: clients' connections, which
// are file descriptors, and memory. Bodies on their way are in no budget of ours,
// and only Envoy knows how much of each came: so it ends those that hold most.
func limits(c BootstrapConfig) *overloadv3.OverloadManager {
	return &overloadv3.OverloadManager{
		RefreshInterval: seconds(100 * time.Millisecond),
		ResourceMonitors: []*overloadv3.ResourceMonitor{
			{
				Name: "envoy.resource_monitors.global_downstream_max_connections",
				ConfigType: &overloadv3.ResourceMonitor_TypedConfig{TypedConfig: packed(
					&downstreamv3.DownstreamConnectionsConfig{MaxActiveDownstreamConnections: int64(c.MaxConnections)},
				)},
			},
			{
				Name: heap,
				ConfigType: &overloadv3.ResourceMonitor_TypedConfig{TypedConfig: packed(
					&fixedheapv3.FixedHeapConfig{MaxHeapSizeBytes: c.MaxHeap},
				)},
			},
		},
		Actions: []*overloadv3.OverloadAction{
			{Name: "envoy.overload_actions.shrink_heap", Triggers: []*overloadv3.Trigger{above(heapShrink)}},
			{Name: "envoy.overload_actions.reset_high_memory_stream", Triggers: []*overloadv3.Trigger{{
				Name: heap,
				TriggerOneof: &overloadv3.Trigger_Scaled{Scaled: &overloadv3.ScaledTrigger{
					ScalingThreshold: heapReset, SaturationThreshold: heapRefuse,
				}},
			}}},
			{Name: "envoy.overload_actions.stop_accepting_requests", Triggers: []*overloadv3.Trigger{above(heapRefuse)}},
		},
		BufferFactoryConfig: &overloadv3.BufferFactoryConfig{MinimumAccountToTrackPowerOfTwo: accountFrom},
	}
}

// above acts once that share of the heap is in use.
func above(share float64) *overloadv3.Trigger {
	return &overloadv3.Trigger{Name: heap, TriggerOneof: &overloadv3.Trigger_Threshold{
		Threshold: &overloadv3.ThresholdTrigger{Value: share},
	}}
}
