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
package envoy
