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
// the field that is the mesh's own, and headers that are the mesh's own. Paths that the
// worker does not know are passed on too.
//
// What comes back on the paths that are known is changed in few places (answer.go,
// events.go): the model has the worker's name, an error OpenAI's shape, an event one line
// of data, and a stream that the server broke off ends with an error event. So does one whose
// finish_reason is that the server gave it up (openai.Dropped); words of its own
// for OpenAI's become those, and others pass. A 200 that holds no answer is a 502.
//
// # Health and load
//
// Every Config.Every the server's metrics are read, by the names of its own kind
// (metrics.go), and become the worker's Load: for ORCA, for the registry, and for
// /metrics under vLLM's names. Check fails when the server has not answered for
// Config.Patience, which makes the worker not ready and leaves it healthy. The worker's self-check asks for one token through the server's
// completions endpoint, or chat where it has none.
//
// A server that exposes no metrics has the load that passes through this worker.
//
// # Continuing a stream
//
// Towards the relay every event of a stream carries token_ids; vLLM sends them when
// asked (return_token_ids), in the same field, and takes ids as a prompt. So a
// stream of text goes on from delivered tokens by token replay: the ids of the
// prompt, from the server's /tokenize, and those delivered become the prompt of a
// completion, whose events are written in the form of the stream's own endpoint. The
// server's prefix cache decides how much of that it computes again. Delivered tokens
// that are only a part of a character are left to the server to say again; where it
// says others, the stream is refused.
//
// Other servers give no ids, so the relay sends the delivered text (text.go). It is put
// behind a text prompt, which llama-server also makes of a chat (/apply-template), or
// becomes the beginning of the assistant's message where the server can go on with one:
// vLLM and SGLang.
// How many tokens it has the server says in the usage of two requests of one token
// each, which it prefills once.
//
// A stream that carries more than its tokens is refused, and the relay goes elsewhere:
// several choices, messages with an image, tokens that end in what is no text or of whose
// text the client was told only a part, and every field of the request of which it is not
// known that the answer goes on with it (fields.go): grammars, tools, log-probabilities,
// penalties over the answer alone. A server looks for
// stop strings in what it says itself, and would not see one that begins before the cut: in
// text that was held back, or, with vLLM's include_stop_str_in_output, in text that was
// delivered. So they are looked for here, in all of the answer, and it ends with the first;
// by text the server looks for them too. One that ends in the tokens of vLLM's min_tokens
// does not count; while those are not reached, the stream is refused. By text it is not
// known which they are, so beside min_tokens none counts that ends in the delivered text.
package openaiengine
