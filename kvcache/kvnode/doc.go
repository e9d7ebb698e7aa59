// Package kvnode lets the processes of a host share one arena: the node owns it, and
// workers are clients over a Unix socket of mode 0600. What they read does not go
// through the socket: the node says where a block lies, and they read it in place, as
// package arena has it. What they write does, so that nobody but the node can write to
// the arena; only a Writer, behind which engines write that have nothing else, maps it
// with the right to. Unix only.
//
// A node that is killed takes nothing with it: its successor has the same content, and
// what clients were reading they go on reading. Until it is there every call fails at
// once, which callers take for a miss.
//
// # Protocol
//
// A client sends a request and waits for its answer; it opens several connections to do
// several things at once. All integers are little-endian. A request is
//
//	 0  4  magic "KVN1"
//	 4  1  operation
//	 5  3  0
//	 8  4  length of the body, at most 32 MiB
//	12  4  length of the data behind it
//	16  …  body, and data
//
// and an answer
//
//	 0  4  magic "KVN1"
//	 4  1  status
//	 5  3  0
//	 8  4  length of the body
//	12  4  0
//	16  …  body
//
// The statuses are 0 done, 1 not found, 2 stale, 3 full, 4 gap, 5 closed, 6 refused (the
// body is a reason, 1 byte, and text), 7 failed (the body is text). In the bodies below a
// space is fingerprint:32 root:32, and a ref is a space, parent:32 and key:32.
//
//	 1 hello     →  JSON: where the arena is, and its identity
//	 2 longest   space from:32 first:8 ids:4…  →  common:4, and for each block, the partial
//	             one last if common is not 0: parent:32 key:32 first:8 tokens:4 size:8
//	 3 get       ref reader:8 slot:4 ticket:8  →  identity:16 offset:8 size:8
//	 4 put       ref size:8  →  1 if the frame is wanted, else 0. After 1 the client sends
//	             the frame and nothing else, and gets a second answer.
//	 5 refused   ref: the client has found it to be wrong
//	 6 drop      fingerprint:32
//	 7 label     fingerprint:32, and JSON
//	 8 open      space parent:32 choice:4 attempt:8 first:8, and the stream's id  →  tail:8
//	 9 append    tail:8 first:8 codec:1 ids:4…, and the state as data  →  nothing, or 1
//	             where the node does not know what the tail is, and is to be told by name
//	10 rotate    tail:8 next:8 parent:32 first:8  →  tail:8
//	11 read      space choice:4, and the stream's id  →  for each tail attempt:8 parent:32
//	             first:8 ranges:4, and for each range ids:4 bytes:4 id:4… and the bytes
//	12 forget    space, and the stream's id
//	13 stats     →  JSON
//	14 models    →  JSON
//	15 room      limit:8. Old tails go, and blocks until seven eighths of it are used
//	16 fetch     within:8 space from:32 first:8 ids:4…  →  as longest, for which the node has
//	             so many nanoseconds
//	17 reserve   ref size:8 reader:8 slot:4 ticket:8  →  identity:16 offset:8, which is 0
//	             where the block is there already. The client writes the frame there itself
//	18 publish   ref size:8 reader:8 slot:4 identity:16 ticket:8: the frame is written into
//	             the room that was lent for the ticket, which older clients do not name
//	19 tails     within:8 space choice:4, and the stream's id  →  as read, with what other
//	             hosts have, for which the node has so many nanoseconds
//	20 name      tail:8, and as open: what the tail was opened as, or is since a rotation
//	21 erase     the tenant's name  →  JSON: how far the erasure is, which the first begins;
//	             it is asked for again until it is done
//	22 peers     →  JSON: the nodes of other hosts; failed where there are none
//	23 epochs    →  JSON: which weights are those of each model
//	24 set epoch JSON: a model and its weights  →  JSON: its record
//	25 resume    within:8 space from:32 first:8 ids:4…  →  as fetch, or as longest where the
//	             time is 0, for a stream that goes on, which old versions of a model answer too
//	26 survey    verify:1  →  JSON: how far a look at all blocks of all tiers is, which the
//	             first begins; it is asked for again until it is done
//	27 lend      reader:8, and for each block ref slot:4 ticket:8  →  identity:16, and offset:8
//	             size:8 for each up to the first that cannot be lent
//	28 known     →  JSON: all models that the node knows of, also those that are only in its
//	            tiers, or in none any more
//
// Fetch is for a node that has far tiers, as hello says: what they have of the blocks that
// are asked for is in the arena when the answer comes. Tails and name are for one that
// copies tails to other hosts, as hello says too.
//
// # Epochs
//
// A label names the weights by which blocks were computed. Where a model's are new the node
// begins an epoch: from then on longest and fetch find nothing of its other weights, and the
// room of their blocks is given back in the background, but for what open streams need: those
// go on to put, to append and to resume. Which weights are whose is in the file epochs, JSON,
// written anew and renamed before a label is acknowledged, and again on the node's disk.
//
// The file is
//
//	{"version": 1, "epochs": [{
//	  "model": "m", "epoch": 2, "weights": "sha256:…",        as kvcache.Epoch
//	  "past": ["sha256:…"], "fingerprints": ["…"],
//	  "old": [{"fingerprint": "…", "weights": "sha256:…", "reclaimed": false}]
//	 }],
//	 "names": [{"fingerprint": "…", "model": "m"}],           under which models were served
//	 "owed": [{"tier": "redis", "fingerprint": "…"}]}         what tiers still have to drop
//
// One of another version is not read, and nor is one that is not whole: then the records
// begin anew, and old versions are found again until a worker with new weights comes. Where
// file and copy differ, as after the loss of the memory, the higher number of each model
// counts, and what only the other one knows is announced to it.
//
// A drop is in owed before the first tier is asked, and until each has done it. Meanwhile no
// look-up asks a tier that owes for that model, and the node asks it every few seconds to do
// it; blocks that are computed again are found in memory. Other hosts are no such tier: see
// package peers. The copy counts for owed only where the file was lost.
//
// # Survey
//
// A survey goes through all tiers, one after another, in the node's own process, because
// nobody else reaches them all. It ends when nobody has asked about it for half a minute, so
// that a command that is stopped leaves no reader of a whole bucket behind.
//
// Every operation may be repeated. An append says where its sender knows the tail to end:
// what the node has behind that place was never acknowledged, and is replaced.
package kvnode
