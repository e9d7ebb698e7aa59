// Package relay carries generation requests between Envoy's edge and a worker,
// and answers for everything that happens on the way: retries before the first
// byte, time-outs, keep-alives, and an honest end of a stream that breaks.
//
//	Envoy edge ── HTTP over a Unix socket ──▶ Relay ── HTTP/2 ──▶ Envoy egress ──▶ worker
//
// A request is a job. It makes one attempt after the other, each naming exactly
// one worker, until an attempt delivers a first byte to the client; from then on
// the answer is that worker's alone. What reaches the client is always one of:
//
//   - the worker's whole answer, unchanged but for headers of the mesh,
//   - a stream of whole events that ends with [DONE],
//   - a stream that ends with one error event and no [DONE],
//   - OpenAI's error object under a status of 400 or more.
//
// Memory per stream is bounded by the window of the HTTP/2 stream and one event:
// the next event is read when the last one was taken by the client.
package relay
