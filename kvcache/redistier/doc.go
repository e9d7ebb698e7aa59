// Package redistier is a kvcache.Store in a Redis or Valkey Cluster, or in one server:
// a tier that many hosts share, on an engine that is there already. It keeps whole
// blocks; the open ends of streams stay on their hosts.
//
// # Keys
//
// P is Config.Prefix, KEY a block's key in hexadecimal. What is in braces decides on
// which node of a cluster a key is, so one block lies whole on one node, and the blocks
// of a chain on all of them:
//
//	P:b:{KEY}          the manifest of a block, see below
//	P:b:{KEY}:NONCE:I  part I of what one writer wrote of it
//	P:c:{KEY}          the names of a block's children, see package remote: a sorted set
//	P:{lru}:at         when each block was last used, in ms of the server's clock: a sorted set
//	P:{lru}:size       the bytes of each: a hash
//	P:{lru}:used       and of all together
//
// # Manifest last
//
// A frame is cut into parts of Config.PartSize bytes, which are written under a number
// that is this writer's alone, with a short life. Then one script on their node sees that
// all are there, writes the manifest unless there is one, and gives all of them their
// life; or it removes them, when another writer was faster. So a block is visible whole
// or not at all, whenever the writer or the server dies, and two writers never mix.
//
// Version 1 of a manifest, little-endian:
//
//	offset size
//	     0    4  magic "KVRM"
//	     4    2  version, 1
//	     6    2  flags, 0
//	     8    4  CRC32C (Castagnoli) of bytes [0,8) and [12,length)
//	    12    4  n, the number of parts, 1 to 65536
//	    16    8  bytes of each part but the last, which may have fewer
//	    24    8  total length of the frame
//	    32   16  the writer's number, in the names of the parts in hexadecimal
//	    48    …  the header of the frame, as package kvcache says, to the end
//
// A reader checks the header against what it wants before it asks for any part, and the
// parts against the header's sums when it has them. What is wrong is refused, counted
// and removed.
//
// # Room and life
//
// Before a block is written its bytes are admitted: over Config.Limit the longest unused
// blocks go first, a block never before its children, because the use of a block is one
// of those before it too. All processes of a prefix count together, on the one node that
// has {lru}. Everything has a life of Config.TTL since its last use, so that what the
// count has lost, in a failover, goes too. A server that evicts by itself is welcome to.
package redistier
