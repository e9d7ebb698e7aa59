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
// What an attempt's end means, before the first byte and after it:
//
//	the worker …                        before            after
//	cannot be reached (Envoy's 503)     next, breaker     –
//	is another one (421, other address) next              –
//	answers 5xx                         next              –
//	answers 503 in JSON (busy)          next, no blame    –
//	answers 4xx                         passed on         –
//	ends early, cuts, sends nonsense    next              error event
//	is silent beyond the route's limit  504               error event
//	reports an error in the stream      next              passed on, end
//
// "Next" is another worker after a short pause, for as long as the route's retries
// and the gateway's retry budget last. When nobody delivers, the client gets the
// last worker's own error where it has OpenAI's shape, else one of the relay's.
// After the first byte nothing is repeated: what was delivered cannot be taken
// back, and another worker would not go on from there.
//
// The route's time-outs are all counted here, none in Envoy. firstByte runs from
// the arrival of the request, over all attempts, to the first token, or to the
// headers of an answer without streaming; streamIdle from token to token, comments
// of the worker not counted; request over everything. Time in which the client
// does not read is not the worker's: it has a limit of its own (ClientStall).
//
// Memory per stream is bounded by the window of the HTTP/2 stream and one event:
// the next event is read when the last one was taken by the client.
package relay
