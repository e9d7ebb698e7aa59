// Package worker is the process that generates: an OpenAI-compatible HTTP server
// over an Engine, its load reports over ORCA, and its registration with the
// control plane. Engines live in the sub-packages.
//
// # One port
//
// HTTP/1.1, HTTP/2 without TLS and gRPC share the worker's port:
//
//	POST /v1/chat/completions   generation, streamed or whole
//	POST /v1/completions        likewise; several prompts, echo, token ids
//	POST /v1/embeddings         vectors of texts or token ids, as floats or base64
//	POST /tokenize, /detokenize text or chat messages to token ids and back, as vLLM
//	GET  /v1/models[/{id}]      the model and its aliases
//	GET  /health                200 while the engine has not failed, else 503
//	GET  /ready                 200 ready; 503 loading (with percent), shutting_down, not_ready
//	POST, GET, DELETE /drain    take no new requests, how far it is, take them again
//	GET  /metrics               Prometheus, with vLLM's names
//	     /sim                   the simulator's settings, where the engine is one
//	gRPC xds.service.orca.v3.OpenRcaService/StreamCoreMetrics
//	gRPC grpc.health.v1.Health
//
// Every response carries x-kvmesh-worker with the worker's id. A request that
// carries x-kvmesh-expect-worker with another id is refused with 421, so that an
// attempt never runs on a stranger that took over an address.
//
// # The life of a request
//
// A generation request passes four stages, each in a file of its own:
//
//	generate.go  admission: 503 with Retry-After while loading or draining
//	plan.go      body, parse, model name, tokens: everything that can be the
//	             client's fault, so that it is answered with a real HTTP status
//	choice.go    one goroutine per choice pulls tokens from the engine and pushes
//	             their bytes through an emitter (emit.go)
//	sse.go       or whole (generate.go): the sink that the text goes to
//
// A streamed response begins with the first token, or with an SSE comment when
// none came for KeepAlive; the comment is repeated in every silence of that
// length. A failure before the beginning is an HTTP error, one after it an event
// {"error":…} that ends the stream without [DONE]. A stream is whole only if every
// choice has a finish_reason and [DONE] is there.
//
// # Structured answers and tools
//
// response_format and tools become a grammar (package grammar) in Params, which an
// engine that is a Constrainer follows; the others refuse the request. An answer
// that ends with "stop" parses and validates, unless the client's own stop string
// cut it; one that ends with "length" is a beginning. Tools need a model whose
// template shows them (Model.Tools). Their calls are read out of the text between
// emitter and sink (tools.go). With tool_choice required or a name the grammar holds
// from the first token, with auto from the mark that begins a call; where there is no
// such mark, or no Constrainer, arguments are sent when they are whole and valid.
//
// # In front of another server
//
// An engine that is a Proxy answers in the worker's place: generation requests after
// their size and model were checked, and all paths that are not the worker's own.
//
// # Going on with a stream
//
// The relay may send a request again with what its client has of the answer so far
// (resume.go): the choices go on behind those tokens, from that byte of text. All
// state but the KV is a function of the request and the tokens, so it is rebuilt; the
// KV comes from a KVKeeper where one is configured (package checkpoint), else from a
// prefill. docs/worker-kv.md says what is promised.
//
// # Who frees a sequence
//
// The engine frees a sequence when the loop over Generate is left. It is left at
// the end of the answer, at a stop string, when the client is gone (its context
// ends, or a write fails), when a client has read nothing for four times
// KeepAlive, and when the drain time is over.
//
// # Counting
//
// usage.prompt_tokens counts each prompt once, whatever n is. completion_tokens
// counts every step of the engine, also the model's end token and the tokens of a
// stop string, as vLLM does. cached_tokens is what the engine did not prefill
// again; among the choices of one prompt the least counts, because the others
// reuse the prefill of the first.
//
// # Start and end
//
// The port is open before the model is loaded, so that /ready can tell how far
// loading is. The worker is ready when its engine has generated a token
// (selfcheck.go); from then on an idle engine is asked for one now and then. When the context of Run ends, the worker registers as draining,
// refuses new requests with 503, lets running ones finish for DrainTimeout, ends
// the others with an error event, takes its registration back and closes.
package worker
