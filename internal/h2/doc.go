// Package h2 is HTTP/2 for the two hops between Envoy and the relay, on the same host:
// a server for http.Handlers and a transport for requests, both without TLS. It exists
// for what a token costs. net/http hands each DATA frame from goroutine to goroutine, six
// or more times on its way through a proxy; here a frame can go through in the goroutine
// that reads it:
//
//	socket ──▶ read loop ──▶ Body.Inline's func ──▶ Writer.WriteNow ──▶ socket
//	                     └──▶ Body.Read, in a goroutine of its own, where that is slow
//
// Frames and header blocks are read and written by golang.org/x/net/http2's Framer and
// hpack, which check what a frame may look like. What is here is who runs when: one
// goroutine that reads per connection, windows, the life of streams and connections, and
// writes that go out together (conn.go).
//
// # Who runs when
//
// A connection has one goroutine that reads (conn.serve). Each request of a server has one
// for its handler, as with net/http; a transport's requests run in those of their callers.
// Nobody has a goroutine only to write: who has something to send adds frames to conn.out
// under the connection's lock, and then
//
//   - the read loop notes the connection in its Batch, and sends for all of them right
//     before it reads again, which is when it has handled every frame that was there;
//   - others start conn.send, which lets those that can run add theirs (Gosched) and then
//     sends all of it. While one sends, the rest only add.
//
// The read loop's system calls do not wait, and so they are not announced to Go's scheduler
// (now.go): announced, each would wake a second thread after every rest of the process.
//
// So a frame that was added is always either in the hands of a sender or in a batch whose
// flush is to come. A lock is held for as long as it takes to copy, never for a system
// call. Two connections are never locked at a time: what goes from one to the other is
// taken from the first (Body.ReadNow), and then given to the second (Writer.WriteNow). A
// Server's or a Transport's lock comes before a connection's.
//
// # Windows
//
// What a peer may send is bounded twice, by a window per stream and one for all of them
// (RFC 9113, 5.2). Both are given back when data is read and not when it comes: so the
// reader's pace is the sender's. The one for all is given back in quarters, a stream's in
// halves. Data of a stream that is over goes back at once, or the rest of the connection
// would starve. A Share of less than all Windows together lets readers that wait hold up
// those that do not.
//
// What we may send is bounded by the peer's windows. A stream with data that its own
// window lets pass is in conn.ready once; moveLocked makes a frame of each in turn as long
// as the connection's window and mostPending allow. It is called whenever one of the four
// changes: data, either window, or room in conn.out.
//
// # The life of a stream
//
// A stream is in conn.streams until both sides have said all (doneLocked), or one of them,
// or the connection's end, has cut it short (endLocked). After that what had come can
// still be read, unless the reader has closed it; nothing is sent. A handler that returns
// before it has read all ends the request's side with NO_ERROR, one that panics with
// INTERNAL_ERROR, so that a client never takes half an answer for a whole one.
//
// A transport's connection takes no more streams after a GOAWAY, or when it has reset
// Transport.MaxResets of them: servers count resets, to be safe from floods, and end a
// connection on which there are too many with all that it carries. With MaxStreams the
// number of resets on one has a bound, however many requests are given up and how fast. A
// connection that takes no more is over with its last stream.
//
// A client's stream of which the server has certainly seen nothing (REFUSED_STREAM, or an
// id above a GOAWAY's) fails with errUnprocessed, and is tried again by RoundTrip; all
// other failures are the caller's to judge.
//
// # What it is not
//
// It is no general client or server: no TLS, no CONNECT, no server push, no priorities,
// no proxies, cookies, redirects or compression. Trailers are taken, and a client's
// shown, but a handler's are not sent. HTTP/1.1 on the server's listener is net/http's.
//
// # Limits
//
// A peer may be broken, so all that it can make us hold is bounded: unread data by the
// windows, unsent data by mostPending and one write per stream, answers to PING and
// SETTINGS of a peer that does not read by mostControl, header blocks by mostHeader, and
// handlers by Server.MaxStreams, those of streams that it has reset included. A request
// whose header block is a little too long is answered 431; one that sends much more than
// mostHeader, or CONTINUATION frames behind it, ends its connection, because to unpack it
// for the sake of an answer is what floods of them are made for (CVE-2023-45288). Envoy lets
// no such request through: its own bound is 60 KiB.
package h2
