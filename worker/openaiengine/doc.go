// Package openaiengine is the engine "openai": a worker that stands in front of a
// server which already speaks OpenAI's API, such as vLLM, SGLang, TGI, TensorRT-LLM
// (trtllm-serve, or Triton with its OpenAI frontend) or llama-server.
//
// # Why a proxy
//
// An Engine turns token ids into token ids, and the worker's server does the rest.
// The servers behind this package could be driven that way only in part: most take
// no token ids and give none back, and each knows things that the server above does
// not: tool parsers of its own, images, reasoning, adapters, further endpoints. So
// requests are passed on as they are (worker.Proxy), except for the model's name,
// the field that is the mesh's own, and headers that are the mesh's own. What comes
// back is not touched. Paths that the worker does not know are passed on too.
//
// # Health and load
//
// Every Config.Every the server's metrics are read, by the names of its own kind
// (metrics.go), and become the worker's Load: for ORCA, for the registry, and for
// /metrics under vLLM's names. Check fails when the server has not answered for
// Config.Patience. The worker's self-check asks for one token through the server's
// completions endpoint, or chat where it has none.
//
// A server that exposes no metrics has the load that passes through this worker.
//
// # What it does not do
//
// It cannot continue a stream from delivered tokens: a request to is refused, and
// the relay goes elsewhere.
package openaiengine
