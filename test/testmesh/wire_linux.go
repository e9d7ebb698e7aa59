package testmesh

import (
	"encoding/binary"
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
// netem does, which not every kernel has; the TCP of both hosts does the rest. Safe for
// concurrent use.
type Wire struct {
	// Addrs are the addresses of the first and the second host on it.
	Addrs [2]string

	devs    [2]string // this side's
	socks   [2]int
	delay   atomic.Int64  // nanoseconds
	oneIn   atomic.Uint64 // each frame that makes so many is lost; 0 = none
	met     atomic.Uint64 // frames since it loses some
	carried atomic.Int64
	lost    atomic.Int64
	over    chan struct{}
}

// NewWire joins two hosts. It ends with the test, which has to have made the hosts before.
func NewWire(t testing.TB, a, b *Host) (*Wire, error) {
	t.Helper()
	net := fmt.Sprintf("198.19.%d.", os.Getpid()%256)
	w := &Wire{Addrs: [2]string{net + "1", net + "2"}, over: make(chan struct{})}
	for i, h := range []*Host{a, b} {
		w.devs[i] = h.Dev + "w"
		for _, args := range [][]string{
			{"link", "add", w.devs[i], "type", "veth", "peer", "name", "wire0", "netns", h.NS},
			{"-n", h.NS, "addr", "add", w.Addrs[i] + "/30", "dev", "wire0"},
			// A frame is a segment and not 64 KiB of them, so that one that is lost is one.
			{"-n", h.NS, "link", "set", "wire0", "gso_max_segs", "1"},
			{"-n", h.NS, "link", "set", "wire0", "up"},
			{"link", "set", w.devs[i], "up"},
		} {
			if err := IP(args...); err != nil {
				return nil, err
			}
		}
		sock, err := ethernet(w.devs[i])
		if err != nil {
			return nil, fmt.Errorf("frames of %s: %w", w.devs[i], err)
		}
		w.socks[i] = sock
	}
	ended := make(chan struct{}, 2)
	for i := range 2 {
		go func() {
			w.carry(w.socks[i], w.socks[1-i])
			ended <- struct{}{}
		}()
	}
	t.Cleanup(func() {
		close(w.over)
		<-ended
		<-ended
		for _, dev := range w.devs {
			if err := IP("link", "del", dev); err != nil {
				t.Error(err)
			}
		}
		for _, s := range w.socks {
			_ = unix.Close(s)
		}
	})
	return w, nil
}

// Slow has every frame arrive so much later, and each one that makes oneIn since the last
// that was lost not at all; 0 = none is lost.
func (w *Wire) Slow(delay time.Duration, oneIn int) {
	w.delay.Store(int64(delay))
	w.oneIn.Store(uint64(oneIn))
}

// Up has the wire carry frames again, and Up(false) none, as where a cable is pulled.
func (w *Wire) Up(up bool) error {
	state := "down"
	if up {
		state = "up"
	}
	return IP("link", "set", w.devs[0], state)
}

// Frames is how many were carried, and how many of those that were to be lost were.
func (w *Wire) Frames() (carried, lost int64) { return w.carried.Load(), w.lost.Load() }

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
	sock, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(proto))
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
			_ = unix.Sendto(to, p.data, 0, nil) // where it is down the frame is lost
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
		if oneIn := w.oneIn.Load(); oneIn > 0 && w.met.Add(1)%oneIn == 0 {
			w.lost.Add(1)
			continue
		}
		select {
		case way <- piece{append([]byte(nil), b[:n]...), time.Now().Add(time.Duration(w.delay.Load()))}:
			w.carried.Add(1)
		default: // a queue that is full loses, too
			w.lost.Add(1)
		}
	}
}
