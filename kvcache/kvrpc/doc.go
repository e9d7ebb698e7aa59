// Package kvrpc lets KV nodes of different hosts read and write each other's memory. A
// Server serves a kvcache.Store of its host, and a Client is a kvcache.Store with Tails:
// the memory of one peer. The package knows one peer at a time, and not which of several
// ought to have a block. Unix only.
//
// # Two channels on one port
//
// What is small goes by gRPC (kvrpcpb/kvrpc.proto): look-ups, which grant a lease for what
// they name, the tails' beginnings and ends, drops, erasures, labels and counters. The bytes of
// blocks and tails go through a framed channel of their own, from the memory of the one
// host to the socket, and from the socket into the place where they stay. RATIONALE.md
// says why, and BenchmarkChannels shows it. The first 4 bytes of a connection tell which
// it is: "PRI " begins HTTP/2, and "KVP" the data channel, behind the TLS handshake where
// there is one.
//
// With TLS both sides show a certificate, and each believes only those of the authority
// that it was given for the KV nodes. Without TLS a server listens, and a client connects,
// on loopback only, unless it is told otherwise.
//
// # Data channel
//
// A client sends a request and waits for its answer; it opens several connections to do
// several things at once. All integers are little-endian. A request is
//
//	 0  4  magic "KVP1"
//	 4  1  operation
//	 5  3  0
//	 8  4  CRC32C (Castagnoli) of bytes [0,8), [12,24) and the body
//	12  4  length of the body, at most 128 KiB
//	16  8  length of the data behind it
//	24  …  body, and data
//
// and an answer
//
//	 0  4  magic "KVP1"
//	 4  1  status
//	 5  3  0
//	 8  4  CRC32C of bytes [0,8), [12,24) and the body
//	12  4  length of the body, at most 16 MiB
//	16  8  length of the data behind it
//	24  …  body, and data
//
// In the bodies a space is fingerprint:32 root:32, and a ref is a space, parent:32 and
// key:32. A sum is the XXH3-64, seed 0, of some data; frames have their own.
//
//	1 get     ref from:8 most:8  →  total:8, and as data the bytes of the frame from
//	          from on, at most most, or all if most is 0
//	2 put     ref size:8  →  wanted:1. After 1 the client sends the frame, size bytes and
//	          nothing else, and gets a second answer, without a body. 0 says that the
//	          block is there already.
//	3 append  tail:8 first:8 sum:8 codec:1 id:4…, and the state as data  →  nothing. The
//	          tail is the number that OpenTail or RotateTail gave.
//	4 tails   space choice:4, and the stream's id  →  for each tail attempt:8 parent:32
//	          first:8 ranges:4, and for each range codec:1 ids:4 bytes:8 sum:8 id:4…, and
//	          as data the states, one behind the other
//	5 offer   ref size:8, and as data the first bytes of the frame, at most 4 MiB, or all of
//	          it, or none  →  as put; the client sends what is missing after 1. Where all of
//	          it was sent there is one answer, when the frame is stored, and 1 says that.
//	          What is not wanted the server reads and forgets.
//
// A client that offers has no need to wait for the answer before it sends: it sends up to
// 2 MiB ahead, the price of a block that is there already. Its first offer on a connection
// is without data, because a peer may be older than offers are and says that the operation
// failed: then it puts.
//
// The statuses are 0 done, 1 not found, 2 stale, 3 full, 4 gap, 5 unknown (there is no
// tail of this number), 6 refused (the body is a reason, 1 byte, and text), 7 failed (the
// body is text), 8 version (the request is of another version of this protocol; the
// connection ends).
//
// Version rule: whoever changes the meaning or the place of any byte, or the service in
// kvrpc.proto otherwise than protobuf allows, raises the digit in the magic, and with it
// the package's name in kvrpc.proto. Peers of different versions do not understand each
// other; that is a miss, so hosts can be upgraded one by one. A new operation raises
// nothing if its users do without it where it fails: an operation that is not known fails,
// and the connection goes on, where no data is behind it. testdata has the bytes of each
// message.
//
// # What is believed
//
// Nothing. A frame is verified, header and each part, as it comes in, before anybody can
// see it: a server that is sent a wrong one refuses and counts it, and a client that
// reads one does the same, and tells the peer, which looks at its own. A peer that sends
// nonsense loses the connection. Every length is checked against a limit before memory is
// taken for it, and what is on its way takes Config.Memory, or ServerConfig.Memory, at
// most, all connections together.
//
// # Patience
//
// Every call ends at its context, or at the time in Config. Calls may be repeated: a
// connection that was left behind by a peer that has gone is replaced. A peer that
// failed several calls in a row is left alone for a while (remote.ErrAway).
package kvrpc
