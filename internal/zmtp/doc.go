// Package zmtp speaks the wire of ZeroMQ, ZMTP 3.0 with the mechanism NULL, over one
// connection: the greeting, READY, and messages of several frames, each as
// https://rfc.zeromq.org/spec/23/ has them. It knows nothing of sockets, patterns, queues or
// reconnecting; those who use it know better what may wait and what may be lost.
//
//	greeting  ff 00*8 7f  3 0  "NULL" 00*16  as-server:1  00*31
//	frame     flags:1 length:1 or 8 (big-endian)  body
//	flags     1 = another frame of this message follows, 2 = the length has 8 bytes, 4 = a command
//	command   length:1 name data; READY's data is properties: length:1 name length:4 value
//
// PING is answered. The commands SUBSCRIBE and CANCEL, which ZMTP 3.1 has, are returned as the
// messages that ZMTP 3.0 has in their place. There is no authentication and no encryption:
// what listens must be reached only by those who may.
package zmtp
