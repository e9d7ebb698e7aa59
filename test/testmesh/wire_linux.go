package testmesh

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Wire joins two hosts by Ethernet: a veth pair each, and this process between them, which
// carries every frame from one to the other. So it can hold frames up and lose some, as
// netem does, which not every kernel has, and knows how many; the TCP of both hosts does the
// rest. Safe for concurrent use.
type Wire struct {
	// Addrs are the addresses of the first and the second host on it.
	Addrs [2]string

	down  atomic.Bool
	delay atomic.Int64  // nanoseconds
	oneIn atomic.Uint64 // each frame that makes so many is lost; 0 = none
	met   atomic.Uint64 // frames since it loses some
	over  chan struct{}

	carried, late, lost, cut, full atomic.Int64
}

// Frames are those that a wire met, by what became of them.
type Frames struct {
	Carried int64 // all that went on to the other host
	Late    int64 // those of them that were held up
	Lost    int64 // what it was to lose of those that it was to carry
	Cut     int64 // all that came while it was down, and was lost
	Full    int64 // what found too many others on the way, and was lost
}

// NewWire joins two hosts; one that is nil is this machine. A process has one at a time. It
// ends with the test, which has to have made the hosts before. The error is ErrNoHosts where
// nobody may carry frames.
func NewWire(t testing.TB, a, b *Host) (*Wire, error) {
	t.Helper()
	net := fmt.Sprintf("198.19.%d.", os.Getpid()%256)
	w := &Wire{Addrs: [2]string{net + "1", net + "2"}, over: make(chan struct{})}
	var socks [2]int
	for i, h := range []*Host{a, b} {
		sock, err := w.end(t, h, w.Addrs[i])
		if err != nil {
			return nil, err
		}
		socks[i] = sock
	}
	ended := make(chan struct{}, 2)
	for i := range 2 {
		go func() {
			w.carry(socks[i], socks[1-i])
			ended <- struct{}{}
		}()
	}
	t.Cleanup(func() {
		close(w.over)
		<-ended
		<-ended
	})
	return w, nil
}

// end makes a host's end of the wire, and returns the socket for the frames from and to it.
func (w *Wire) end(t testing.TB, h *Host, addr string) (sock int, err error) {
	dev, name := fmt.Sprintf("kvm%dw", os.Getpid()), fmt.Sprintf("kvm%d", os.Getpid())
	var peer, in []string
	if h != nil {
		dev, name = h.Dev+"w", "wire0"
		peer, in = []string{"netns", h.NS}, []string{"-n", h.NS}
	}
	if err := IP(append([]string{"link", "add", dev, "type", "veth", "peer", "name", name}, peer...)...); err != nil {
		return 0, err
	}
	t.Cleanup(func() {
		if err := IP("link", "del", dev); err != nil {
			t.Error(err)
		}
	})
	for _, args := range [][]string{
		append(in[:len(in):len(in)], "addr", "add", addr+"/30", "dev", name),
		// A frame is a segment and not 64 KiB of them, so that one that is lost is one.
		append(in[:len(in):len(in)], "link", "set", name, "gso_max_segs", "1"),
		append(in[:len(in):len(in)], "link", "set", name, "up"),
		// This machine is not to answer itself where the other host is asked for.
		{"link", "set", dev, "arp", "off", "up"},
	} {
		if err := IP(args...); err != nil {
			return 0, err
		}
	}
	if sock, err = ethernet(dev); err != nil {
		return 0, errors.Join(ErrNoHosts, fmt.Errorf("frames of %s: %w", dev, err))
	}
	t.Cleanup(func() { _ = unix.Close(sock) })
	return sock, nil
}

// Slow has every frame arrive so much later, and one of each oneIn not at all, the first
// that comes being the first of those; 0 = none is lost.
func (w *Wire) Slow(delay time.Duration, oneIn int) {
	w.delay.Store(int64(delay))
	w.met.Store(0)
	w.oneIn.Store(uint64(oneIn))
}

// Up has the wire carry frames again, and Up(false) none: what is sent is lost, and nobody is
// told, as where a cable is pulled beyond the next switch.
func (w *Wire) Up(up bool) { w.down.Store(!up) }

// Frames is what became of all frames so far.
func (w *Wire) Frames() Frames {
	return Frames{Carried: w.carried.Load(), Late: w.late.Load(), Lost: w.lost.Load(), Cut: w.cut.Load(), Full: w.full.Load()}
}

// mostFrame is the length of a frame with what the kernel says of it, at most.
const mostFrame = 64<<10 + 64

// pollTime is how long a carrier waits for a frame until it looks whether it is over.
const pollTime = 100 * time.Millisecond

// ethernet opens a socket for the frames of a device. They come with their checksums as the
// kernel left them, to be finished by who needs them, and with a note of that.
func ethernet(dev string) (int, error) {
	i, err := net.InterfaceByName(dev)
	if err != nil {
		return 0, err
	}
	var every [2]byte
	binary.BigEndian.PutUint16(every[:], unix.ETH_P_ALL)
	proto := binary.NativeEndian.Uint16(every[:])
	// Until it is bound it is for no protocol, or frames of all devices would come.
	sock, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	wait := unix.NsecToTimeval(int64(pollTime))
	for _, err := range []error{
		unix.SetsockoptInt(sock, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1),
		unix.SetsockoptInt(sock, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1),
		unix.SetsockoptInt(sock, unix.SOL_SOCKET, unix.SO_RCVBUF, 8<<20),
		unix.SetsockoptTimeval(sock, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait),
		unix.Bind(sock, &unix.SockaddrLinklayer{Protocol: proto, Ifindex: i.Index}),
	} {
		if err != nil {
			_ = unix.Close(sock)
			return 0, err
		}
	}
	return sock, nil
}

// carry carries one direction, in order, until the end.
func (w *Wire) carry(from, to int) {
	way, done := make(chan piece, 4096), make(chan struct{})
	go func() {
		defer close(done)
		for p := range way {
			time.Sleep(time.Until(p.at))
			_ = unix.Sendto(to, p.data, 0, nil) // to a host that is down the frame is lost
		}
	}()
	defer func() {
		close(way)
		<-done
	}()
	b := make([]byte, mostFrame)
	for {
		select {
		case <-w.over:
			return
		default:
		}
		n, _, err := unix.Recvfrom(from, b, 0)
		if err != nil {
			if err != unix.EAGAIN && err != unix.EINTR {
				time.Sleep(pollTime) // it is down
			}
			continue
		}
		w.pass(b[:n], way)
	}
}

// pass has a frame go its way, or be lost.
func (w *Wire) pass(frame []byte, way chan<- piece) {
	if w.down.Load() {
		w.cut.Add(1)
		return
	}
	if oneIn := w.oneIn.Load(); oneIn > 0 && (w.met.Add(1)-1)%oneIn == 0 {
		w.lost.Add(1)
		return
	}
	delay := time.Duration(w.delay.Load())
	select {
	case way <- piece{append([]byte(nil), frame...), time.Now().Add(delay)}:
		w.carried.Add(1)
		if delay > 0 {
			w.late.Add(1)
		}
	default:
		w.full.Add(1)
	}
}
