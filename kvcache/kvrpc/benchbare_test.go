//go:build unix

package kvrpc

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvwire"
)

// bareContender moves messages of the same form with the same options of the sockets, and
// does nothing else with them. With
// sendfile the other side's bytes go from shared memory to the socket by that call.
func bareContender(b *testing.B, sendfile bool) contender {
	p := startPeer(b, childSpec{Kind: "bare", Dir: shmDir(b), Sendfile: sendfile})
	nc, err := net.Dial("tcp", p.addr)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { nc.Close() })
	l := newLink(nc)
	room := make([]byte, 65<<20)
	request := func(what op, f *kvcache.Frame, data []byte) (head, error) {
		l.begin()
		l.out = kvwire.AppendU64(kvwire.AppendU64(kvwire.AppendRef(l.out, f.Ref), uint64(f.IDs[0])), uint64(f.Total))
		return l.ask(what, data)
	}
	return contender{
		pid: p.cmd.Process.Pid,
		put: func(_ context.Context, f *kvcache.Frame) error {
			n := min(ahead, len(f.Bytes()))
			if _, err := request(opOffer, f, f.Bytes()[:n]); err != nil || n == len(f.Bytes()) {
				return err
			}
			if _, err := l.c.Write(f.Bytes()[n:]); err != nil {
				return err
			}
			_, err := l.answer()
			return err
		},
		get: func(_ context.Context, f *kvcache.Frame) error {
			h, err := request(opGet, f, nil)
			if err == nil {
				_, err = l.fill(room[:h.data], 0)
			}
			return err
		},
	}
}

// serveBare is the other side of bareContender: its blocks lie in shared memory, too, one
// after the other by their token.
func serveBare(c net.Conn, dir string, sendfile bool) error {
	const size = 1 << 30
	f, err := os.Create(filepath.Join(dir, "bare"))
	if err == nil {
		err = f.Truncate(size)
	}
	if err != nil {
		return err
	}
	mem, err := syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return err
	}
	l := newLink(c)
	for {
		h, err := l.receive(mostBody)
		if err != nil {
			return err
		}
		cur := cursorOf(l.body)
		_ = cur.Ref()
		i, n := cur.Size(), cur.Size()
		at := i * (n &^ 0xfffff)
		if at+n > size {
			return errors.New("more than there is room for")
		}
		block := mem[at : at+n]
		l.begin()
		if op(h.what) == opGet {
			l.out = kvwire.AppendU64(l.out, uint64(n))
			if sendfile {
				err = sendFile(l, f, int64(at), int64(n))
			} else {
				err = l.send(0, block)
			}
		} else {
			l.out = append(l.out, 1)
			if h.data < uint64(n) {
				err = l.send(0, nil)
				l.begin()
			}
			if err == nil {
				_, err = l.fill(block, 0)
			}
			if err == nil {
				err = l.send(0, nil)
			}
		}
		if err != nil {
			return err
		}
	}
}

// sendFile sends what was begun, and a part of a file without mapping it.
func sendFile(l *link, f *os.File, at, n int64) error {
	putHead(l.out, 0, uint64(n))
	if err := l.push(nil); err != nil {
		return err
	}
	if _, err := f.Seek(at, io.SeekStart); err != nil {
		return err
	}
	_, err := io.CopyN(l.c, f, n) // net.TCPConn knows that it is a file
	return err
}
