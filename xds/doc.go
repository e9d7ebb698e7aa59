// Package xds is the control plane. It learns which workers exist and how they
// fare, decides what that means, and tells Envoys and gateways over delta ADS.
//
//	registry ──▶ collector ──▶ assignment ──▶ server
//	(who)        (reports)     (verdicts)     (EDS, fleet; CDS, LDS, RDS)
//
// The registry takes registrations over the HTTP API and keeps them over a crash;
// servers that a policy lists are probed. The collector holds one stream of ORCA
// load reports per worker. Assignment turns facts into status and weight with
// internal/health, pool by pool. The server hands out the result.
//
// A control plane that starts lets its workers report before it answers the first
// Envoy: an empty answer would take endpoints away that serve well.
package xds
