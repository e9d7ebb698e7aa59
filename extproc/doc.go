// Package extproc is the external processor that Envoy asks about every request:
// it decides tier, worker and route, and refuses what no worker could serve.
//
// An Exchange is the state of one request. Its Step takes one message of Envoy's
// and returns the one answer, without I/O and without waiting:
//
//	request headers ─┬─ generation path (POST) ── ask for the body (BUFFERED)
//	                 │      request body ── parse, route, pick ─┬─ to the relay
//	                 │                                          ├─ to the pool
//	                 │                                          └─ refusal
//	                 ├─ GET /v1/models ── answer from policy
//	                 ├─ any other path ── candidates of the default pool
//	                 └─ refusal (405, 413, 415, 503)
//
// What a decision sets, all in the answer to the body, while Envoy still holds the
// headers:
//
//	header x-gateway-destination-endpoint  ordered list of candidates, "ip:port,ip:port"
//	header x-kvmesh-route                  "relay", unless the route has none
//	header x-kvmesh-pool                   the chosen pool
//	header x-kvmesh-model-route            the ModelRoute, for its time-outs
//	header x-kvmesh-stream                 the stream's unguessable id
//	header content-length                  when the body changes
//	metadata envoy.lb                      the list again, for override_host
//	metadata kvmesh                        model, pool and route, for the access log
//
// Only the request phase takes part. The Server around it receives, steps and
// sends; whatever goes wrong inside lets the request pass as it came, because
// Envoy alone can still serve it.
package extproc
