// Package relay carries generation requests between Envoy's edge and a worker,
// and answers for everything that happens on the way: retries before the first
// byte, time-outs, keep-alives, and an honest end of a stream that breaks.
//
//	Envoy edge ── HTTP over a Unix socket ──▶ Relay ── HTTP/2 ──▶ Envoy egress ──▶ worker
//
// HTTP/2 is that of internal/h2, on both sides.
//
// A request is a job. It makes attempts, each naming exactly one worker, until its
// answer is whole. What reaches the client is always one of:
//
//   - the worker's whole answer, unchanged but for headers of the mesh,
//   - a stream of whole events that ends with [DONE],
//   - a stream that ends with one error event and no [DONE],
//   - OpenAI's error object under a status of 400 or more.
//
// # Who does what
//
// The handler's goroutine runs the job: it begins attempts, looks at the clock, hears
// what the fleet and operators want, and says the last word. Each attempt has a
// goroutine that reads its worker's events and writes them to the client; plain events
// of an answer that flows are handled before it hears of them, by the goroutine that reads
// the connection to Envoy (pump.go). Only one of them at a time may: it holds the job's pen. The first attempt with a token to say
// becomes the owner of the answer, and so does a later one, provided that the client
// has not been told anything since that attempt was made.
//
// The ledger counts what the client has, by choice: token ids, and bytes of text. A
// later attempt asks its worker to go on from there, and its events become those of the
// same answer: same id, time, model and fingerprint; no role, finish or usage twice
// (splice.go). A worker that does not say how it went on, or has other weights, is not
// believed. Engines that tell no token ids go on by the text.
//
// An answer without streaming comes from our workers as a stream, too, and is put
// together here, so it can go on like any other.
//
// # When
//
// What an attempt's end means, before the first token and after it:
//
//	the worker …                        before            after
//	cannot be reached (Envoy's 503)     next, breaker     move
//	is another one (421, other address) next              move
//	answers 5xx                         next              move
//	answers 429 or 503 itself (busy)    next, no blame    move, later
//	answers 4xx                         passed on         move
//	says that the prompt is too long    next tier         –
//	ends early, cuts, sends nonsense    next              move
//	reports an error in the stream      next              move
//	says all but [DONE]                 –                 the relay says it
//	is silent for longer than it ever is  another beside  another beside
//	drains, is UNHEALTHY or TIMEOUT     another beside    move
//
// "Next" is another worker of the pool after a short pause, for as long as the route's
// retries last, then the route's next tier. The gateway's retry budget bounds how many
// go there at once, until their worker has taken them: after a worker's death the others wait
// for their turn, while those that were refused for load are not repeated. When nobody delivers, the client gets the last worker's own error where it has OpenAI's shape,
// else one of the relay's.
//
// "Move" is a worker with the same weights that knows the relay, one with a free sequence
// before all others, the best one by load and free KV, so many at once per target. A worker
// that is left although it still talks is left only for a free sequence, and is not read
// until the other one has its first token; if that fails, or waits, it goes on. An attempt
// that waits at a full worker goes to the first one that has room, without blame (wait.go), and
// so does a request that has no token yet.
// Nor is a silent worker to blame while others are as silent.
// "Another beside" is a hedge: whichever says something first goes on, and the other is
// cancelled. Where most of a pool is sick at once, answers that flow stay. A stream that
// may not move, or that nobody takes in time, ends in an error event with the reason.
//
// The route's time-outs are all counted here, none in Envoy. firstByte runs from
// the arrival of the request, over all attempts, to the first token, or to the end of
// the answer of a foreign server without streaming; streamIdle from token to token,
// comments of the worker not counted; request over everything. Time in which the client
// does not read is not the worker's: it has a limit of its own (ClientStall).
//
// Memory per stream is bounded by the window of the HTTP/2 stream, one event, the
// request's body for as long as another worker may be asked, and four bytes per token.
//
// # Clients that come back
//
// A stream that its client asked to be kept (names.Resumable) is written to memory
// instead, and each of its client's connections reads from there:
//
//	job ──▶ keptStream ──▶ listener ──▶ connection      Last-Event-ID finds it again
//
// While a listener is connected the job may be 64 KiB ahead of it. Without one the job
// goes on until the route's retain is over, the stream's size is exceeded, or the budget
// of all is needed. One lock guards all of that; see retained.
//
// Another gateway can go on with it, too. What it needs is a record: the request, the
// events, and after each what the ledger gained. It comes from a store that gateways share
// (sharer), or, when one replaces the other, from that one itself (handover.go). adopt
// makes a job of it, whose ledger stands where the other one's did, and which first of all
// moves.
package relay
