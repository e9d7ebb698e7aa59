// Package checkpoint keeps the KV of generations in a kvcache.Store while they run,
// and brings it back where they go on. It is the bridge between an engine, which
// copies ranges of KV between two decodes, and the store.
//
// # What is written when
//
//	tokens  0        64       128  …  held
//	        [ block  ][ block  ][ tail … ]
//
// A full block is published as soon as its last token is in the KV. The tokens behind
// the last full block are the tail: they are appended, a few at a time, to a slot of
// the stream's attempt and choice; the slot begins anew behind each block. So the KV
// of a token is copied out of the engine at most twice. The newest token of a stream
// is never in it: an engine holds a token's KV only after decoding it.
//
// # Who waits for whom
//
// Step runs on the engine's own goroutine, between two decodes. It copies into
// memory and queues; a goroutine of this package seals, hashes and stores. When the
// queue is full, which means that the store is slow, the checkpoint is skipped and
// counted, and made good by a later one that is larger. No token waits for a store.
//
// Look-ups are made on goroutines of their own, which are left alone at the deadline where
// the store hangs (watch.go).
//
// # What is restored
//
// Restore looks for the longest chain of blocks, then for what continues it: the tail
// of an attempt at the same stream, or a block that shares its first tokens with
// what is wanted. It gives up when the restore is estimated, from what was measured,
// to cost more than the prefill. Whatever fails its checks is refused and counted,
// and the engine prefills from there.
//
// # Zombies
//
// A worker that was stopped and wakes up after its stream has moved writes with a
// lower attempt: the store refuses it, the refusal is counted, and the session keeps
// nothing from then on. Full blocks need no such care, because their content decides
// their key.
package checkpoint
