// Package xds is the control plane. It learns which workers exist and how they
// fare, decides what that means, and tells Envoys and gateways over delta ADS.
//
//	registry ──▶ collector ──▶ assignment ──▶ server
//	(who)        (reports)     (verdicts)     (EDS, fleet; CDS, LDS, RDS)
//
// The registry takes registrations over the HTTP API and keeps them over a crash;
// servers that a policy lists are probed, and workers that wrote themselves into Redis
// are read from there. The collector holds one stream of ORCA
// load reports per worker. Assignment turns facts into status and weight with
// internal/health, pool by pool. The server hands out the result.
//
// # How soon
//
//	a worker's process dies      its report stream breaks; the reconnect is refused
//	                             and it is UNHEALTHY, within milliseconds
//	a worker hangs               TIMEOUT after the pool's silenceTimeout
//	load moves a weight          at once, then at most every 10 ms plus 40 µs per
//	                             member of the pool
//	load moves no weight         gateways hear of it every 100 ms, Envoy never
//	a registration runs out      after 15 s, if no report vouches for the worker
//	an entry in Redis changes    within a second; one that nobody renews is TIMEOUT
//	                             after 15 s and gone after 30 s
//
// # Start and death
//
// A control plane that starts lets its workers report before it answers the first
// Envoy: an empty answer would take endpoints away that serve well. Its socket
// appears under its name only when it is ready. Everything it needs to come back as
// it was is in StateDir:
//
//	registry.json   workers and drains; a drain is synced to disk before it is
//	                acknowledged, a registration at latest 200 ms later
//	snapshot.pb     what Envoys were last told, written when that changes
//
// While no control plane runs, Envoys and gateways keep what they have. An Envoy
// that starts meanwhile takes the snapshot from ServeSnapshot, which its supervisor
// runs, and leaves it when a control plane answers again.
//
// # Locks
//
// pool.order is taken first, then state.mu or server.mu, never both of these.
// ControlPlane.mu guards the set of goroutines and is taken before all others.
package xds
