// Package envoy builds the configuration of the mesh's Envoy as typed messages.
//
// Everything here is a pure function of Config (or BootstrapConfig): no file is
// read, no clock asked. The control plane serves the results over delta ADS, a
// supervisor writes the bootstrap to a file. The shape is:
//
//	client ─▶ listener "edge":   ext_proc ─▶ router ─┬─▶ cluster "relay"
//	                                                └─▶ cluster "pool/<name>"
//	relay  ─▶ listener "egress": router ───────────────▶ cluster "pool/<name>"
//
// The edge listener works without the gateway: ext_proc fails open, and the
// default route is a pool. The egress listener obeys the relay to the letter: no
// retries, no time-outs, no buffering.
//
// # Time-outs
//
//	connection to a worker          WorkerPool.connect      default 1 s
//	request headers from a client   fixed                   10 s, then 408
//	the whole request               Mesh.bodyTimeout        default 120 s, then 408
//	ext_proc, per message           Mesh.extProc            default 1 s, then without it
//	silence on the direct path      ModelRoute.streamIdle   default 300 s, then 504
//	whole answer, direct path       ModelRoute.request      default off
//	relay and egress routes         none: the relay's own are the only ones
//	retries before the first byte   ModelRoute.retries      default 2, never after it
//
// There is no per-try time-out: the first token of a long prompt may take minutes,
// and cutting it off to start anew elsewhere would only make it later.
//
// # What Envoy does that one would not expect
//
// Each of these shaped a setting here, and has a test on the real Envoy:
//
//   - The override_host policy takes a named endpoint whatever its health, so the
//     gateway names only healthy ones, and at least two.
//   - With the default panic threshold a pool that is mostly dead gets traffic on
//     its dead half. It is 0 here; the minimum share is decided by the control plane.
//   - Changes by health checks and ejection are held back for a second unless
//     update_merge_window is 0.
//   - A host name with a slash, such as a cluster's name, is refused by Go servers;
//     health checks send another one.
//   - It stops reading when it answers before the request is there. What the client
//     still sends fills buffers, and after delayed_close_timeout the connection is
//     reset, answer or not. So the gateway has the body of what it refuses streamed
//     to itself before it says so, within a bound.
//   - It answers "Expect: 100-continue" with 100 before anything of ours is asked. A
//     client that announced too much sends it, and gets its 413 then.
//   - BUFFERED_PARTIAL, switched to by a mode override, answers 413 at its limit all
//     the same, and trips over itself.
//   - Only buffers of HTTP/2 are accounted to a stream, so only HTTP/2 uploads can be
//     ended when memory runs out; for the rest new requests are refused.
//   - The header of an ext_proc-less request can be made from its JSON body by the
//     transform filter, which takes a field of the body, and looks for the route anew.
//   - local_reply_config also rewrites what ext_proc answers. The response code
//     details tell the two apart.
//   - A 503 counts as a fault for ejection like any 5xx, though it is how a worker
//     says that it is full.
//   - A cluster that changes waits for endpoints it does not ask for again, see
//     serviceName.
//   - HTTP/2 has no 431: a flood of headers resets the stream, and one field beyond the
//     64 KiB that its decoder takes ends the connection.
package envoy
