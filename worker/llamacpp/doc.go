// Package llamacpp runs llama.cpp inside the worker's process, without cgo, as a
// worker.Engine.
//
// # One owner
//
// A llama.cpp context is not safe for concurrent use. One goroutine, locked to
// its thread, owns it: the loop. Everybody else hands it functions, which it runs
// between two decodes. Each turn of the loop builds one batch: one token of every
// sequence that is generating, then prompt tokens of new ones, in the order below,
// up to Config.BatchTokens; while others generate, prompt tokens are
// bounded by Config.PrefillTokens so that their gaps stay short.
//
// # Room
//
// All sequences share Config.Cells cells, one per token. Requests are admitted in
// order of priority, then of arrival, when a sequence is free and the prompt fits
// beside what the others hold; nobody overtakes. A request takes the places of running
// ones of a lower priority. No room is reserved for tokens not yet generated: when the
// cells run out, the last sequence in that order gives its own back and waits again. One
// sequence alone always fits, so the first one always advances.
//
// A sequence that gives way keeps its KV in a copy, within Config.PauseBytes, which is
// loaded when it comes back: it goes on bit for bit where it stood. Past that bound its
// session is asked for what it has stored, and what nobody has is computed again. Its
// consumer sees a pause, nothing else.
//
// A consumer that stops reading holds up nobody: its sequence rests once its buffer of
// tokens is full, and gives its place to a waiting one in the same way, until half of the
// buffer is read.
//
// # KV in and out
//
// Between two decodes the loop lets the session of a sequence (worker.KVSession)
// copy ranges of its KV out, and it loads stored ranges before it prefills what they
// do not hold. llama.cpp reads and writes whole sequences only, so a range is tagged
// as a sequence of its own on its way, beside the slots; tagging copies nothing. Much
// KV is loaded in several turns while others generate. A sequence that begins as a
// running one does takes the common prefix from it, again by tagging.
//
// A continued answer is decoded as the lost worker did, one token at a time, where
// its prompt was restored and little is missing (worker.CatchUpExact): sums depend on
// the shape of a batch.
//
// # Failure
//
// A decode that fails ends the sequences of that batch with an error and frees
// them; the engine goes on. Leaving Generate frees the sequence before Generate
// returns; it waits for the decode that is running, or aborts it when nobody else
// takes part.
//
// # What it needs
//
// The shared libraries of llama.cpp v0.5.0 or v0.4.0 (pairs of yzma v1.28) in one folder
// with the links libllama.so and libggml.so, and libffi.so.8 and libstdc++.so.6
// from the system. Open checks the version that libllama itself reports, and that
// its default parameters read back as known values, because a wrong pair reads C
// structs at wrong offsets. libffi is loaded before main runs, by an imported
// package; without it the program cannot start. Build with the tag nollamacpp to
// leave the engine, and that need, out.
package llamacpp
