// Package kvevents publishes and follows the KV events of vLLM: what blocks of KV a process
// has, told over ZeroMQ as they come and go, so that a router knows whose cache holds the
// beginning of a prompt. A Publisher tells, a Subscriber follows one publisher, and an Index
// knows from that what each of several workers holds.
//
// # Wire
//
// A PUB socket, tcp port 5557 in vLLM, sends messages of three frames
//
//	topic    UTF-8, often empty; subscribers choose by its beginning
//	seq      8 bytes, big-endian: 0, 1, 2 and so on since the start of the process
//	payload  MessagePack: [time, [event, …], rank]
//
// Time is a float64 in seconds. An event is a map with the key "type" (vLLM 0.20 and later) or an array
// with the type as its first element, and the fields in a fixed order:
//
//	BlockStored       block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx …
//	BlockRemoved      block_hashes medium group_idx …
//	AllBlocksCleared
//
// Fields at the end may be missing. A hash is 32 bytes, or a number (the last 8 of them) where
// VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is set. Fields that are not in the list above are passed
// over when read, and so are lora_id and events of other types.
//
// A ROUTER socket, often on the next port, tells again what came before: asked by (empty, seq:8) it
// answers (empty, topic, seq, payload) for each batch from seq on that it still has, and then
// (empty, empty, seq -1, empty). Versions before have no topic there, which is understood.
//
// # What is lost
//
// Nothing of a publisher waits: not the store that tells it of its blocks, nor one subscriber for
// another. Where it falls behind its store, it tells AllBlocksCleared in place of what did not fit,
// so that its subscribers know too little and never too much. Where a subscriber falls behind, its
// messages are left out, and an empty batch follows when there is nothing else to tell; it sees
// that by the sequence numbers, asks the ROUTER, and where that
// does not have them any more it begins anew with nothing. So it does after each connection that
// ended, since the process at the other end may be another one, and after what it cannot read,
// which ends the connection. While a publisher is away nothing of it counts.
//
// # Following several
//
// Followers follow all publishers of a mesh into one Index, each under its address. Several
// workers may find what one publisher tells of, such as those on one KV node, and one worker may
// find what several tell of, such as the ranks of one engine; Held answers by workers.
//
// A publisher is another's program, and may be wrong or hostile. It has a connection, a share of
// the index and a goroutine of its own, and none of the others' time: a message has at most 8 MiB
// and 128 Ki hashes, what cannot be read ends the connection, after which it is tried again in a
// while, and blocks are taken into the index 256 at a time, so that those who ask, which
// happens for each request, wait for a moment at most. What it can do is to tell of blocks that
// are not there. Then requests go to its workers that would have gone elsewhere, and are
// computed there.
//
// # Who may listen
//
// ZeroMQ has no authentication here. Hashes tell what prompts have in common, and token ids are
// the prompts; a Publisher leaves them out unless it is told otherwise.
package kvevents
