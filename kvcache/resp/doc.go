// Package resp lets any Redis client keep values in the memory of a KV node: SET, GET,
// EXISTS, DEL, AUTH, PING and INFO, as RESP version 2 has them, for clients such as
// LMCache's Redis connectors. Unix only.
//
// # Values
//
// A value is a block with one part, in a space of its own:
//
//	fingerprint of "kvmesh resp v1\n", salt ""
//	parent      the root
//	token ids   the SHA-256 of the key as 8 little-endian words, without their highest bits
//
// It is checked like any block when it is read, leaves like any block when there is no room,
// and outlives the node like any block; there is no time to live. SET over a value that is
// there removes that first: meanwhile there is none. A value that is being sent stays as it
// is, whatever happens to its key.
//
// # Commands
//
//	SET key value             OK; OOM if there is no room. Options, such as EX, are refused:
//	                          nobody should think that they are kept
//	GET key                   the value, or nil
//	EXISTS key…               how many of them there are
//	DEL key…                  how many of them there were
//	AUTH [user] password      any user; needed before all else if the server has a password
//	PING [text]               PONG, or the text
//	INFO [section…]           version, memory, hits and misses
//	QUIT                      OK, and the end
//
// Everything else is an unknown command, which the connection survives: so HELLO has
// clients fall back to version 2, and CLIENT SETINFO is passed over by those that send it.
// Commands may be sent without waiting for answers. A key has up to 64 KiB, a value up to
// 512 MiB, as in Redis, and what the memory has room for. What is no command at all is
// answered by an error and the end of the connection.
//
// # What a miss is
//
// GET of what is not there answers nil. LMCache's native client waits for ever for the rest
// of that answer, because it knows how long a value is and reads so much. It asks EXISTS
// before, so EXISTS grants a lease: for Config.Lease the value stays, unless
// leases hold a quarter of the memory already. If it has gone after
// that, and somebody who was told that it is there asks for it, the connection is closed
// instead: any client takes that for an error, and none waits. It is closed as well where the
// connection has never had another command than SET, GET, EXISTS, DEL and AUTH, as that
// client's; the others say HELLO, CLIENT or PING, if only at the beginning.
package resp
