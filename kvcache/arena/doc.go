// Package arena is a kvcache.Store in one piece of memory that outlives its process:
// a file in shared memory, a file on any file system that can be mapped, or a device
// (DAX, CXL). One process owns it and alone writes to it; the others of the host read
// blocks in place through a Reader. Unix only; elsewhere than on Linux memory is
// not set aside before it is used.
//
// # Files
//
// The directory has mode 0700 and files have 0600:
//
//	lock         held by flock while the owner lives
//	arena        the memory, unless Config.Data names another place
//	journal      the index, as a list of changes
//	readers/ID   the slots of one reader, held by flock while it lives
//
// # Arena
//
// All integers are little-endian. The arena is grains of 4096 bytes. The first one has
// the header:
//
//	 0    4  magic "KVMA"
//	 4    2  version, 1
//	 6    2  0
//	 8    8  size of the arena in bytes
//	16   16  identity, random
//	32   28  0
//	60    4  CRC32C of bytes [0,60)
//
// Every other grain is free or belongs to one extent: a frame as package kvcache has it,
// from the extent's beginning on, or a piece of a tail. A piece of a tail is records as
// package tailrec has them, each where the last one ends, with the tail's number as
// their mark; 8 zero bytes follow the last one, if there is room.
//
// # Journal
//
//	 0    4  magic "KVMJ"
//	 4    2  version, 1
//	 6   10  0
//	16   16  identity of the arena
//	32   28  0
//	60    4  CRC32C of bytes [0,60)
//	64    …  records
//
// and one record:
//
//	0  4  CRC32C of the arena's identity and bytes [4,length)
//	4  2  length
//	6  1  kind
//	7  1  0
//	8  …  what the kind says, in this order:
//
//	 1 space   number:4 fingerprint:32 root:32
//	 2 put     space:4 tokens:4 offset:8 size:8 first:8 parent:32 key:32
//	 3 remove  offset:8
//	 4 drop    fingerprint:32
//	 5 label   fingerprint:32, and JSON
//	 6 fence   space:4 attempt:8 stream:32
//	 7 tail    space:4 choice:4 number:8 attempt:8 first:8 parent:32 stream:32
//	 8 room    tail:8 offset:8 size:8
//	 9 end     tail:8
//	10 stream  space:4 stream:32
//
// A stream is the SHA-256 of its id. Replaying a record twice, or one of what is not
// there, changes nothing, so the journal is written anew beside the old one while
// changes go into both, and then takes its name.
//
// # Crashes
//
// A block's bytes are in the arena before its record is in the journal, and the record
// that takes a block out is there before its extent is used again. A process that is
// killed therefore leaves a journal whose every block is whole, but for a last record
// that is not: reading ends there, and it is cut off. Records in a tail need no journal:
// the header of each, written last, proves its data.
//
// Nothing is synced. After a crash of the machine shared memory is empty, and on other
// media journal and arena may not fit together; so may they after somebody has damaged,
// swapped or mixed them. The identity keeps journals and arenas of different origin
// apart, and an arena whose journal is lost gets another one, so that nobody elsewhere
// counts on what it had; extents that contradict later ones are dropped, and every header
// and part is verified by whoever reads it: what is not right is refused, counted and removed.
//
// # Readers
//
// A reader has a file of 16384 words of 8 bytes in the machine's own byte order. To read
// a block it writes an odd ticket into a free slot and asks the owner, who puts the extent
// there in place of that very ticket, as (first grain << 32 | grains << 1). From then on
// the extent is not used again before the reader has put 0 there or its process has
// ended, which the lock tells, also if the owner is killed meanwhile: the next one takes
// the words over. A reader that is stopped for an hour reads the same bytes when it
// wakes up. Nobody waits for it; what it holds counts as used.
//
// A reader whose file's name begins with ff maps the arena with the right to write. It gets
// room in the same way, fills it, or has others fill it, and has the owner publish it; also
// an owner that came later. What it held stays for a minute after its end.
//
// # What leaves
//
// Package evict decides. Blocks before a live tail are pinned, and for Config.Linger after its
// end. Blocks that have just come or were just named by a look-up are spared while there
// are others. Blocks of a model go first when another fingerprint of the same name came
// later and they have not been used for Config.DeadAfter.
//
// Reclaim takes what is left of an old version of a model, whether room is short or not, but
// for the chains before tails: the streams of workers that still run it can be continued
// until their tails are gone.
package arena
