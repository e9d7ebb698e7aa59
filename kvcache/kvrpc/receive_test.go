//go:build unix

package kvrpc

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// linkedPair is a link of the data channel and the connection at its other end; id = TLS.
func linkedPair(t *testing.T, id *Identity) (*link, net.Conn) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	near, err := net.Dial("tcp", lis.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	far, err := lis.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { near.Close(); far.Close() })
	if err := errors.Join(near.SetDeadline(time.Now().Add(time.Minute)), far.SetDeadline(time.Now().Add(time.Minute))); err != nil {
		t.Fatal(err)
	}
	if id == nil {
		return newLink(near), far
	}
	server, err := id.Server()
	if err != nil {
		t.Fatal(err)
	}
	return newLink(tls.Client(newWide(near), withProtos(clientTLS(t, *id), "127.0.0.1", protoData))),
		tls.Server(far, withProtos(server, "", protoData))
}

// layouts are frames whose parts lie differently to the units in which they are read.
func layouts(t *testing.T) (frames []*kvcache.Frame) {
	space := kvcache.NewSpace("m", nil)
	for i, sizes := range [][]int{
		{10}, {5 << 20}, {1 << 20, 1 << 20, 1<<20 + 8}, {1536 << 10, 1536 << 10, 1536 << 10}, {3 << 20, 8, 3 << 20}, make([]int, 300),
	} {
		var parts []kvcache.Part
		total := 0
		for p, n := range sizes {
			if n == 0 {
				n = 8 * (1 + p*7%2000)
			}
			parts = append(parts, kvcache.Part{Layer: uint16(p), Layers: 1, Size: int64(n)})
			total += n
		}
		payload := make([]byte, total)
		_, _ = rand.NewChaCha8(space.Root).Read(payload) // never fails
		f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: []int32{int32(i)}}, parts, payload)
		if err != nil {
			t.Fatal(err)
		}
		frames = append(frames, f)
	}
	return frames
}

// TestReceive reads frames of all layouts, right ones and wrong ones, one behind the other,
// from a sender that writes as it likes: each is judged rightly, and the connection stands
// where the next one begins, however many bytes the kernel was told to wait for.
func TestReceive(t *testing.T) {
	_, id := testIdentity(t)
	for _, id := range []*Identity{nil, &id} {
		t.Run(fmt.Sprintf("TLS=%v", id != nil), func(t *testing.T) {
			l, far := linkedPair(t, id)
			var messages [][]byte
			frames := layouts(t)
			for _, f := range frames {
				first, header := bytes.Clone(f.Bytes()), bytes.Clone(f.Bytes())
				first[f.Parts[0].Offset]++
				header[f.Parts[0].Offset/2]++
				messages = append(messages, f.Bytes(), first, header)
			}
			go send(far, messages)
			for i, b := range messages {
				got := make([]byte, len(b))
				h, err := receive(l, got, frames[i/3].Ref, func() error { return nil })
				_, refused := errors.AsType[*kvcache.Refusal](err)
				if refused != (i%3 != 0) || !bytes.Equal(got, b) {
					t.Fatalf("message %d: %v, bytes as sent: %v", i, err, bytes.Equal(got, b))
				}
				if i%3 == 0 && len(h.Parts) != len(frames[i/3].Parts) {
					t.Errorf("message %d has %d parts", i, len(h.Parts))
				}
			}
		})
	}
}

// send writes messages in pieces of all lengths.
func send(c net.Conn, messages [][]byte) {
	r := rand.New(rand.NewPCG(1, 2))
	for b := bytes.Join(messages, nil); len(b) > 0; {
		n := min(len(b), 1+r.IntN(1<<r.IntN(22)))
		if _, err := c.Write(b[:n]); err != nil {
			return // the test tells why
		}
		b = b[n:]
	}
}

// TestReceiveNothing: an answer without a byte is no block.
func TestReceiveNothing(t *testing.T) {
	l, _ := linkedPair(t, nil)
	_, err := receive(l, nil, layouts(t)[0].Ref, func() error { return nil })
	if r, ok := errors.AsType[*kvcache.Refusal](err); !ok || r.Reason != kvcache.ReasonTorn {
		t.Error(err)
	}
}

// TestReceiveEnds reads a frame whose sender goes in the middle: that is an error at once,
// although fewer bytes came than the kernel was told to wait for.
func TestReceiveEnds(t *testing.T) {
	f := layouts(t)[1]
	for _, n := range []int64{0, 1, 100, unitFirst + 1, unit + unitFirst + 5, f.Total - 1} {
		l, far := linkedPair(t, nil)
		go func() {
			send(far, [][]byte{f.Bytes()[:n]})
			far.Close()
		}()
		_, err := receive(l, make([]byte, f.Total), f.Ref, func() error { return nil })
		if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%d of %d bytes: %v", n, f.Total, err)
		}
	}
}
