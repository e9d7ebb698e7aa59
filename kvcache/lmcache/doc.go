// Package lmcache lets unmodified vLLM keep its KV in a KV node: it serves LMCache's
// multi-process protocol over gRPC, in which the engine copies its state itself, into
// and out of shared memory, and the server only says where (LMCache 0.5, engine-driven
// mode). A chunk is an ordinary block of the node: a frame in its arena, found by key,
// checked by whoever reads it. Unix only.
//
// The server is a process of its own beside the node, which is a client of it like the
// workers. An engine dies of a call that fails, so no call does: whatever is missing,
// late, unknown or wrong is answered with nothing to store or nothing found, and while the
// node is away, too. What engines have been told to write or read stays where it is,
// through the death of the node, until they say that they have done or end.
//
// # Calls
//
// An engine has two connections, of its scheduler and of each of its workers (ranks).
//
//	scheduler  Lookup               begins a look-up: every chunk of the sequence, of all ranks
//	           QueryPrefetchStatus  how many chunks were found, once; absent while it looks
//	           FreeLookupLocks      those of a range will not be read
//	           EndSession           the request is over
//	           Clear                all that is stored is of no use
//	worker     Register…            what it is, and what an object looks like → name of the pool
//	           Ping                 a heart-beat
//	           PrepareStore         → slots for the chunks that are not there yet
//	           CommitStore          they are written
//	           PrepareRetrieve      → slots of all chunks of a range
//	           CommitRetrieve       they are read
//	           Unregister…          it ends
//
// What has begun is ended by these calls, and not by time: a chunk that was found is held
// until it is read, freed or the request is over, and a slot that was told until it is
// committed. An engine that is stopped for an hour goes on where it was. Only when its
// connection has ended, and Config.Grace has passed, it is taken for dead; a look-up that
// nobody uses ends after ten minutes. Half of the pool may be in one engine's writing.
//
// A look-up does not say which engine it is of. If engines of several kinds live that call
// their model the same, such as an old and a new version in the same folder, it finds what
// all of them have: each of them can then read it.
//
// # Restarts
//
// The node: its successor has the same arena, and takes over from the words that both map
// what is being written and read (package arena). Chunks that were written while there was
// none are published when it is back. If it has another arena, engines have to register
// again: a ping fails once, upon which LMCache does so.
//
// The server: who is registered is in a file, so that engines need not notice. What they
// held stays for a minute, however the server has ended. A call that was running fails, and the engine with it; that is
// LMCache's way, and the reason why the server is not the node.
//
// # Keys
//
// The engine sends token ids; the keys are those of package kvcache. One rank's chunk of
// tokens is a block whose fingerprint is of this text,
//
//	kvmesh lmcache v1
//	model MODEL
//	weights WEIGHTS
//	rank R of W
//	chunk N tokens, P planes of L layers, S slots of H DTYPE
//
// with a further line "variant V" for what the operator says, and "cleared E" for what the
// engine has said by Clear, if they do. The weights are those of the files that the engine
// has loaded, bound when it registers first: an engine that registers again is the same
// process, whatever its files have become. The salt is
//
//	"" or "kvmesh lmcache tenant v1\0" n:u32 salt[n] configs
//
// little-endian, where configs is the request's configuration; both being empty gives "". A
// value of it is a letter and what follows: n, true, false; i, u and d with 8 bytes (a
// negative and another whole number, a double); s and b with n:u32 and n bytes (text,
// bytes); l with n:u32 and n values; m with n:u32 and n times k n:u32 key[n] value, by key.
//
// # Frame
//
// An object is [planes, layers, slots, hidden]. Each layer of each plane is a part, in that
// order: keys, then values; or PlaneAll if there is one plane.
//
// # Contexts
//
// PrepareStore and PrepareRetrieve answer with a map in msgpack,
//
//	slots          a list of maps: offset and length in bytes, shape as a list of numbers,
//	               and dtype by torch's name
//	chunk_indices  of stores only: for each slot the place of its chunk in the request
//
// where no slots mean that there is nothing to write. Without a list of slots an engine goes
// over to sending its state by the call itself, in pickle; a store that does so is refused, and
// what engines read is never sent so.
//
// # State
//
// The file of registrations is JSON:
//
//	version    1; another one is not read
//	instances  a list: id, model and world as they were registered; layout as planes,
//	           layers, slots, hidden and dtype; weights, "" if they are not known,
//	           with which it is not read;
//	           epoch, of the last Clear; pool, the arena's identity in hexadecimal
//
// It is written anew, under another name first, when one of them changes. It has nothing of
// what engines store or ask for.
//
// # Pool
//
// Engines open the pool by name in /dev/shm, and write to it: the server gives the node's
// arena a second name there, kvmesh-lmcache-ID, of mode 0600. They could spoil what others
// have stored. The sums notice: they are made at commit, and verified by the look-up and
// once more before a chunk is handed out.
package lmcache
