// Package openai holds what the parts of the mesh share of OpenAI's HTTP API:
// the parsed request, the error object, the response types and an incremental
// reader of server-sent events. It does no I/O of its own.
//
// A request is parsed once, in one pass that keeps byte ranges of the body; the
// large parts (messages, prompts) stay raw until the worker decodes them.
package openai
