// Package dirstore is a kvcache.Store in a directory, meant for shared memory:
// all workers of a host open the same one, without a daemon. Unix only.
//
// # Layout
//
// The directory has mode 0700 and files have 0600; every access goes through an
// os.Root. Names are hexadecimal.
//
//	control                             words that all processes map, see control.go
//	models/FINGERPRINT/label            whose KV it is: a kvcache.Label as JSON
//	models/FINGERPRINT/blocks/PARENT/KEY          one frame
//	models/FINGERPRINT/tails/STREAM/fence         the highest attempt, mapped
//	models/FINGERPRINT/tails/STREAM/cC-aA-sS      the S-th tail of attempt A at choice C
//	writers/ID.lock                     held by flock while process ID lives
//	writers/ID.N                        what it is writing, or removing
//
// # Atomic, first wins
//
// A file is written under writers/ and then linked to its place, which fails
// where there is one already. So no reader ever sees a half of a block, whenever
// the writer dies, and what a dead process left under writers/ is swept by any
// other as soon as it gets the lock. Nothing is synced: after a crash of the
// machine shared memory is empty, and on a disk the checksums tell.
//
// A block's file never changes. Readers copy it: a mapped file that is cut from outside,
// or whose disk fails, is a fault of the memory for whoever reads it, and an engine in C
// does not survive that. The few words that are mapped are read with such faults turned
// into errors; a control file that was cut is made whole by the next process that uses it.
//
// What is no regular file is refused before it is read, by reason: to open a FIFO would
// wait for its other end. A call that waits for a file system all the same, such as one
// whose server is away, waits as long as that: a caller that cannot must not wait for it.
//
// # Removed from outside
//
// Each process looks every second whether the directory has its name and the process
// its mark there. If not, it opens the directory anew, making what is missing: what was
// stored is lost, and open tails begin again. One that cannot be made is said once, and
// tried every second.
//
// # Index
//
// The folders are the index: the children of a block are the files in the folder
// that has its key, and their tokens are in their headers. Each process keeps
// the folders it has read until the generation word of the folder changes, which
// everybody raises who adds or removes a file, so a look-up costs no system call.
//
// # Tail files
//
// A tail file is a header and records, little-endian:
//
//	  0    4  magic "KVMT"
//	  4    2  version, 1
//	  6    2  flags, 0
//	  8    4  CRC32C of bytes [0,8) and [12,192)
//	 12    4  choice
//	 16    8  attempt
//	 24    8  position of the first token
//	 32   32  fingerprint
//	 64   32  root
//	 96   32  key of the block before
//	128   32  SHA-256 of the stream's id
//	160   32  0
//
// and records as package tailrec has them, each where the last one ends; a
// record's mark is its offset in the file.
//
// A record's data is written before its header: a header that is there proves
// that its data is too. The file of one attempt is never written by another, so
// a writer that has been overtaken can do no harm even in the moment before it
// notices.
//
// # Room
//
// Blocks, tails and what is being written count towards Config.Limit, over all
// processes. A Put that finds no room removes blocks: the longest unused first,
// where using a block uses those before it too, so that tails of chains go before
// their heads. Blocks before a live tail are not removed. Use is known to the
// second.
package dirstore
