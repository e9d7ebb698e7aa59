// Package sim is a deterministic stand-in for a language model: an Engine with a
// reversible tokenizer, readable answers, settable speeds and, on request, faults.
// It needs neither a model nor a GPU and serves tests, load tests and
// demonstrations.
//
// The next token is a pure function of the model's name, all tokens before it, the
// choice and, when the temperature is above 0, the seed. Prompt and delivered
// tokens together therefore continue an answer as it would have gone on. Answers
// hold characters of several bytes, each byte a token of its own, so that whatever
// reads the stream has to put them together.
//
// An answer ends by itself after Config.AnswerLen tokens; max_tokens cuts it
// earlier, ignore_eos makes it go on until max_tokens.
//
// # Per request
//
// The body field "sim" asks one request to be slow or to fail (see Instructions):
//
//	{"model":"sim","prompt":"x","stream":true,"sim":{"ttft_ms":180000,"itl_ms":20,"cut_at":5}}
//
// With `kvmesh worker --sim-faults` the header x-kvmesh-sim says the same, for clients
// that cannot change the body; it goes through Envoy and the relay. The faults:
//
//	cut_at, cut_inside   the connection ends before a token, behind a whole event or half of one
//	truncate_at          the response ends before a token, without finish_reason and [DONE]
//	no_done              the response lacks [DONE] alone
//	malformed_at         an event is no JSON
//	error_at             an error event
//	stall_at, stall_ms   a pause; without stall_ms for ever
//	ttft_ms, itl_ms      slowness
//	step_ms              tokens at multiples of that, as if all streams were one batch
//	wrong_at             a token is not the model's
//	corrupt_kv           what is published as KV is not that of the tokens
//	status               an HTTP error; 429 and 503 with Retry-After
//	attempt              only for that attempt of the relay
//
// A fault that struck at a token does not strike the continuation at that token again.
//
// # While it runs
//
// POST /sim on the worker's port changes what the engine reports and how fast it
// is; null returns to the real value:
//
//	{"running":40,"waiting":3,"kv_usage":0.5,"ttft_ms":100,"itl_ms":20}
package sim
