//go:build unix

package kvrpc

import (
	"context"
	"errors"
	"io"
	"math"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvwire"
)

// This is the channel that was measured and not chosen: the bytes of blocks through gRPC,
// with a codec that takes them from where they lie.

// chunk is a message that is bytes and nothing else.
type chunk struct{ b mem.BufferSlice }

// chunkCodec is a codec that copies nothing.
type chunkCodec struct{}

// Marshal implements encoding.CodecV2.
func (chunkCodec) Marshal(v any) (mem.BufferSlice, error) { return v.(*chunk).b, nil }

// Unmarshal implements encoding.CodecV2.
func (chunkCodec) Unmarshal(b mem.BufferSlice, v any) error {
	b.Ref()
	v.(*chunk).b = b
	return nil
}

// Name implements encoding.CodecV2.
func (chunkCodec) Name() string { return "chunk" }

// wrap makes a message of bytes that stay where they are.
func wrap(b []byte) *chunk { return &chunk{mem.BufferSlice{mem.SliceBuffer(b)}} }

// grpcUnit is the length of a message.
const grpcUnit = 1 << 20

// grpcWindow keeps the flow control of HTTP/2 out of the way.
const grpcWindow = 16 << 20

// bytesServer serves a store so.
type bytesServer struct{ s *Server }

func bytesDesc() *grpc.ServiceDesc {
	return &grpc.ServiceDesc{ServiceName: "bytes", HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{
		{StreamName: "Get", ServerStreams: true, ClientStreams: true, Handler: func(srv any, st grpc.ServerStream) error { return srv.(*bytesServer).get(st) }},
		{StreamName: "Put", ServerStreams: true, ClientStreams: true, Handler: func(srv any, st grpc.ServerStream) error { return srv.(*bytesServer).put(st) }},
	}, Methods: []grpc.MethodDesc{{MethodName: "Drop", Handler: func(srv any, ctx context.Context, in func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
		var c chunk
		if err := in(&c); err != nil {
			return nil, err
		}
		return wrap(nil), srv.(*bytesServer).s.store.Drop(ctx, kvcache.Fingerprint(c.b.Materialize()))
	}}}}
}

// newBytesServer makes the gRPC server.
func newBytesServer(s *Server) *grpc.Server {
	g := grpc.NewServer(grpc.ForceServerCodecV2(chunkCodec{}), grpc.MaxRecvMsgSize(2*grpcUnit), grpc.InitialWindowSize(grpcWindow),
		grpc.InitialConnWindowSize(grpcWindow), grpc.WriteBufferSize(256<<10), grpc.ReadBufferSize(256<<10))
	g.RegisterService(bytesDesc(), &bytesServer{s})
	return g
}

// get sends a block as messages.
func (b *bytesServer) get(st grpc.ServerStream) error {
	var in chunk
	if err := st.RecvMsg(&in); err != nil {
		return err
	}
	c := cursorOf(in.b.Materialize())
	in.b.Free()
	l, err := b.s.store.Get(st.Context(), c.Ref())
	if err != nil {
		return err
	}
	defer l.Release()
	data := l.Bytes()
	if err := st.SendMsg(wrap(kvwire.AppendU64(nil, uint64(len(data))))); err != nil {
		return err
	}
	for len(data) > 0 {
		n := min(grpcUnit, len(data))
		if err := st.SendMsg(wrap(data[:n])); err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}

// put takes a block in.
func (b *bytesServer) put(st grpc.ServerStream) error {
	var in chunk
	if err := st.RecvMsg(&in); err != nil {
		return err
	}
	c := cursorOf(in.b.Materialize())
	in.b.Free()
	ref := c.Ref()
	room, err := b.s.reserve(ref, int64(c.Size()))
	if err != nil {
		return err
	}
	if room == nil {
		return st.SendMsg(wrap([]byte{0}))
	}
	defer room.Cancel()
	h, err := gather(st.RecvMsg, room.Bytes(), ref)
	if err != nil {
		return err
	}
	if _, err := room.CommitProven(h); err != nil {
		return err
	}
	return st.SendMsg(wrap([]byte{1}))
}

// gather copies messages into place and verifies them as receive does.
func gather(recv func(any) error, b []byte, ref kvcache.Ref) (kvcache.Header, error) {
	a := arrival{b: b, want: ref}
	for at := 0; at < len(b); {
		var in chunk
		if err := recv(&in); err != nil {
			return a.h, err
		}
		if in.b.Len() > len(b)-at {
			return a.h, errNonsense
		}
		at += in.b.CopyTo(b[at:])
		in.b.Free()
		a.came(int64(at))
	}
	return a.h, a.wrong
}

// grpcContender is the client of it.
func grpcContender(b *testing.B) contender {
	p := startPeer(b, childSpec{Kind: "grpc", Limit: 2 << 30, Dir: shmDir(b), Prefault: true})
	conn, err := grpc.NewClient("passthrough:///"+p.addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithInitialWindowSize(grpcWindow), grpc.WithInitialConnWindowSize(grpcWindow), grpc.WithWriteBufferSize(256<<10), grpc.WithReadBufferSize(256<<10),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(chunkCodec{}), grpc.MaxCallRecvMsgSize(math.MaxInt32)))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { conn.Close() })
	desc := bytesDesc()
	room := make([]byte, 65<<20)
	return contender{
		pid: p.cmd.Process.Pid,
		put: func(ctx context.Context, f *kvcache.Frame) error {
			st, err := conn.NewStream(ctx, &desc.Streams[1], "/bytes/Put")
			if err == nil {
				err = st.SendMsg(wrap(kvwire.AppendU64(kvwire.AppendRef(nil, f.Ref), uint64(f.Total))))
			}
			for data := f.Bytes(); err == nil && len(data) > 0; {
				n := min(grpcUnit, len(data))
				err = st.SendMsg(wrap(data[:n]))
				data = data[n:]
			}
			if err != nil && !errors.Is(err, io.EOF) { // which says that the answer came first
				return err
			}
			var in chunk
			if err := st.RecvMsg(&in); err != nil {
				return err
			}
			in.b.Free()
			return drain(st)
		},
		get: func(ctx context.Context, f *kvcache.Frame) error {
			st, err := conn.NewStream(ctx, &desc.Streams[0], "/bytes/Get")
			if err == nil {
				err = st.SendMsg(wrap(kvwire.AppendRef(nil, f.Ref)))
			}
			var in chunk
			if err == nil {
				err = st.RecvMsg(&in)
			}
			if err != nil {
				return err
			}
			in.b.Free()
			if _, err := gather(st.RecvMsg, room[:f.Total], f.Ref); err != nil {
				return err
			}
			return drain(st)
		},
		clear: func(ctx context.Context, f *kvcache.Frame) error {
			var in chunk
			return conn.Invoke(ctx, "/bytes/Drop", wrap(f.Fingerprint[:]), &in)
		},
	}
}

// drain ends a stream whose last message has come.
func drain(st grpc.ClientStream) error {
	if err := st.CloseSend(); err != nil {
		return err
	}
	var in chunk
	if err := st.RecvMsg(&in); !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}
