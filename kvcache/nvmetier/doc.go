// Package nvmetier is a kvcache.Store in a directory of a disk: the tier below the memory
// of a host, for more blocks than that has room for, which outlives the host's memory. One
// process owns the directory. It keeps whole blocks; the open ends of streams stay in
// memory. Unix only.
//
// # Files
//
// The directory has mode 0700 and files have 0600:
//
//	lock                       held by flock while the owner lives
//	tmp/N                      a block that is being written
//	gone/N                     a model that was dropped and is being removed
//	v1/FINGERPRINT/label       JSON: whose model it is, and the how-manieth
//	v1/FINGERPRINT/ROOT/NAME   a block: its frame as package kvcache says, and nothing else
//
// with the fingerprint and the root of the block's space in hexadecimal, and in NAME all
// that the index knows of a block, so that a directory is opened by reading its names only:
//
//	PUT.FIRST.TOKENS.SIZE.BEGIN.PARENT.KEY
//
// PUT is when it was written, in seconds since 1970; FIRST and TOKENS are the position of
// its first token and how many it has; SIZE is the length of its frame; BEGIN is its first
// tokens, 16 at most, 4 bytes for each with the most significant first; PARENT is the key
// of the block before it. Numbers are decimal and bytes base64url without padding. v1 is
// the version of this layout: whoever changes it takes another name, and removes the old.
//
// # Crashes
//
// A block is written under tmp, synced, and only then renamed to its name, so that a name
// never stands for less than the whole block, whether the process is killed or the machine
// loses its power. What was not renamed by then is removed when the directory is opened
// again. Folders are not synced: after a loss of power the last blocks may be missing, and
// some that had left may be back. A disk that lies about syncing, flips bits, or is written
// to by others is noticed by whoever reads: header and parts have checksums, and what is
// not right is refused, counted and removed.
//
// # Reading
//
// Blocks are read with O_DIRECT where the file system has it, into aligned memory that is
// used again, so that neither they nor what is written stay in the page cache, which is the
// same memory that the tier above is made of. Elsewhere they are read through the cache.
//
// # Room
//
// Config.Limit bounds the bytes of all files, in whole pages; package evict says who goes
// first: blocks of versions of a model that have a successor and were not used for a
// minute, then by S3-FIFO, a block never before its children. Where the disk is full before that, by what
// others have written, as much is evicted as a new block needs; a block for which that is
// not enough either is refused with kvcache.ErrFull and counted.
package nvmetier
