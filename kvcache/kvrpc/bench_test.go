//go:build unix

package kvrpc

import (
	"bytes"
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/kvmesh/kvmesh/internal/rivaltest"
	"github.com/kvmesh/kvmesh/kvcache"
)

var (
	benchRounds = flag.Int("peer-rounds", 3, "BenchmarkChannels takes turns so often")
	benchTurn   = flag.Duration("peer-turn", 300*time.Millisecond, "time of one turn of BenchmarkChannels")
	benchSizes  = flag.String("peer-sizes", "1,8,64", "lengths of the blocks of BenchmarkChannels in MiB")
	benchOnly   = flag.String("peer-only", "", "BenchmarkChannels leaves out whose name has none of these, divided by commas")
)

// The parts of the frames: keys and values of 32 layers, as models of 8 billion parameters
// have them.
const benchParts = 64

// benchBytes is the working set, so that no contender is served from the processor's cache.
const benchBytes = 512 << 20

// benchFrames makes blocks of a size, whose total is benchBytes.
func benchFrames(b *testing.B, size int) (frames []*kvcache.Frame) {
	space := kvcache.NewSpace("bench", []byte(strconv.Itoa(size)))
	payload := bytes.Repeat([]byte("sixteen bytes of"), size/16)
	for i := range benchBytes / size {
		copy(payload, strconv.Itoa(i))
		ids := []int32{int32(i)}
		parts := make([]kvcache.Part, benchParts)
		for p := range parts {
			parts[p] = kvcache.Part{Layer: uint16(p / 2), Layers: 1, Size: int64(size / benchParts)}
		}
		f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: ids}, parts, payload)
		if err != nil {
			b.Fatal(err)
		}
		frames = append(frames, f)
	}
	return frames
}

// contender is one way of moving blocks between two processes.
type contender struct {
	name string
	pid  int // of the other process
	// put and get move one block; get ends when all of its bytes are in memory of this
	// process, and verified where the way does that.
	put, get func(ctx context.Context, f *kvcache.Frame) error
	// clear makes room for puts of the same blocks; nil = a put replaces.
	clear func(ctx context.Context, f *kvcache.Frame) error
}

// sample is what one contender did with blocks of one size.
type sample struct {
	speeds []float64 // GB/s, of each turn
	bytes  float64
	cpu    time.Duration // of both processes
}

// middle is the median speed.
func (s *sample) middle() float64 {
	slices.Sort(s.speeds)
	return s.speeds[len(s.speeds)/2]
}

// perGB is the time of processors in seconds per GB.
func (s *sample) perGB() float64 { return s.cpu.Seconds() / (s.bytes / 1e9) }

// cpuOf is the time that a process has been on a processor, all of its threads.
func cpuOf(pid int) (sum time.Duration) {
	names, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			continue // it has ended
		}
		ns, _, _ := strings.Cut(string(text), " ")
		n, _ := strconv.ParseInt(ns, 10, 64)
		sum += time.Duration(n)
	}
	return sum
}

// ownCPU is that of this process.
func ownCPU() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // cannot fail
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// turn moves blocks one after the other for a while.
func (s *sample) turn(b *testing.B, c *contender, frames []*kvcache.Frame, move func(context.Context, *kvcache.Frame) error) {
	ctx := b.Context()
	n, end := 0, time.Now().Add(*benchTurn)
	cpu, begin := ownCPU()+cpuOf(c.pid), time.Now()
	for i := 0; ; i++ {
		f := frames[i%len(frames)]
		if err := move(ctx, f); err != nil {
			b.Fatalf("%s: %v", c.name, err)
		}
		n += len(f.Bytes())
		if time.Now().After(end) || i == len(frames)-1 && c.clear != nil {
			break
		}
	}
	took := time.Since(begin)
	s.cpu += ownCPU() + cpuOf(c.pid) - cpu
	s.bytes += float64(n)
	s.speeds = append(s.speeds, float64(n)/1e9/took.Seconds())
}

// BenchmarkChannels compares, in turns, the ways in which blocks of 1, 8 and 64 MiB get
// from one process to another over loopback TCP: this package's data channel, without and
// with TLS; gRPC with a codec that does not copy; a bare socket with the same messages and
// neither index nor checksums, by write and by sendfile; and go-redis on Redis and on Valkey, and memcached, where
// they are installed. One caller each.
func BenchmarkChannels(b *testing.B) {
	contenders := benchContenders(b)
	for b.Loop() {
		for text := range strings.SplitSeq(*benchSizes, ",") {
			size, err := strconv.Atoi(text)
			if err != nil {
				b.Fatal(err)
			}
			size <<= 20
			frames := benchFrames(b, size)
			puts, gets := make([]sample, len(contenders)), make([]sample, len(contenders))
			for round := range *benchRounds + 1 {
				for i := range contenders {
					if round == 0 { // for warmth; it does not count
						benchTurns(b, &contenders[i], frames, &sample{}, &sample{})
						continue
					}
					benchTurns(b, &contenders[i], frames, &puts[i], &gets[i])
				}
			}
			benchTable(b, size, contenders, puts, gets)
		}
	}
}

// benchTurns gives a contender its turn: puts, and gets of what was put.
func benchTurns(b *testing.B, c *contender, frames []*kvcache.Frame, puts, gets *sample) {
	if c.clear != nil {
		if err := c.clear(b.Context(), frames[0]); err != nil {
			b.Fatalf("%s: %v", c.name, err)
		}
	}
	puts.turn(b, c, frames, c.put)
	for _, f := range frames { // what the turn did not come to
		if err := c.put(b.Context(), f); err != nil {
			b.Fatalf("%s: %v", c.name, err)
		}
	}
	reader := *c
	reader.clear = nil
	gets.turn(b, &reader, frames, c.get)
	if c.clear != nil {
		if err := c.clear(b.Context(), frames[0]); err != nil {
			b.Fatalf("%s: %v", c.name, err)
		}
	}
}

// benchTable prints what came out, beside the bare socket, which is the first.
func benchTable(b *testing.B, size int, contenders []contender, puts, gets []sample) {
	var out strings.Builder
	w := tabwriter.NewWriter(&out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "%d MiB\tput GB/s\tof bare\tCPU s/GB\tget GB/s\tof bare\tCPU s/GB\t\n", size>>20)
	for i, c := range contenders {
		fmt.Fprintf(w, "%s\t%.2f\t%.0f %%\t%.3f\t%.2f\t%.0f %%\t%.3f\t\n", c.name,
			puts[i].middle(), 100*puts[i].middle()/puts[0].middle(), puts[i].perGB(),
			gets[i].middle(), 100*gets[i].middle()/gets[0].middle(), gets[i].perGB())
	}
	w.Flush()
	fmt.Println(out.String()) // b.Log would cut it
	benchHold(b, contenders, puts, gets)
}

// leastOfBare is the share of the bare socket's speed that the data channel is held to, on a
// machine that is not busier than its cores; else half of it.
const leastOfBare = 0.8

// benchHold compares the data channel with the others, and holds it to leastOfBare.
func benchHold(b *testing.B, contenders []contender, puts, gets []sample) {
	at := map[string]int{}
	for i, c := range contenders {
		at[c.name] = i
	}
	own, ok := at["kvrpc"]
	if !ok {
		return
	}
	for _, name := range []string{"go-redis, Redis", "go-redis, Valkey", "memcached"} {
		if i, ok := at[name]; ok {
			fmt.Printf("kvrpc beside %s: put %.2f, get %.2f times as fast, with %.2f and %.2f times the processor time\n", name,
				puts[own].middle()/puts[i].middle(), gets[own].middle()/gets[i].middle(), puts[own].perGB()/puts[i].perGB(), gets[own].perGB()/gets[i].perGB())
		}
	}
	least := leastOfBare
	var load float64
	if raw, err := os.ReadFile("/proc/loadavg"); err != nil {
		least /= 2
	} else if _, err = fmt.Sscan(string(raw), &load); err != nil || load > float64(runtime.NumCPU()) {
		least /= 2
	}
	fmt.Printf("load %.1f on %d cores\n\n", load, runtime.NumCPU())
	for what, of := range map[string][]sample{"puts": puts, "gets": gets} {
		if share := of[own].middle() / of[0].middle(); share < least {
			b.Errorf("%s have %.0f %% of the bare socket's speed, want %.0f", what, 100*share, 100*least)
		}
	}
}

// benchContenders starts the other processes.
func benchContenders(b *testing.B) (list []contender) {
	wanted := func(name string) bool {
		return *benchOnly == "" || slices.ContainsFunc(strings.Split(*benchOnly, ","), func(s string) bool { return strings.Contains(name, s) })
	}
	_, id := testIdentity(b)
	for name, start := range map[string]func() contender{
		"1 bare socket":           func() contender { return bareContender(b, false) },
		"8 bare socket, sendfile": func() contender { return bareContender(b, true) },
		"2 kvrpc":                 func() contender { return peerContender(b, nil) },
		"3 kvrpc, TLS":            func() contender { return peerContender(b, &id) },
		"4 gRPC, CodecV2":         func() contender { return grpcContender(b) },
		"5 go-redis, Redis":       func() contender { return redisContender(b, rivaltest.Redis()) },
		"6 go-redis, Valkey":      func() contender { return redisContender(b, rivaltest.Valkey(*valkeyFlag)) },
		"7 memcached":             func() contender { return memcachedContender(b) },
	} {
		if !wanted(name) && name[0] != '1' {
			continue
		}
		if c := start(); c.pid != 0 {
			c.name = name
			list = append(list, c)
		} else {
			b.Logf("%s: not installed", name)
		}
	}
	slices.SortFunc(list, func(a, b contender) int { return cmp.Compare(a.name, b.name) })
	for i := range list {
		list[i].name = list[i].name[2:]
	}
	return list
}

// peerContender is this package, with an arena on the other side.
func peerContender(b *testing.B, id *Identity) contender {
	p := startPeer(b, childSpec{Limit: 2 << 30, Dir: shmDir(b), ID: id, Prefault: true})
	cfg := Config{Addr: p.addr, Timeout: time.Minute, PutTimeout: time.Minute}
	if id != nil {
		cfg.TLS = clientTLS(b, *id)
	}
	c := newClient(b, cfg)
	return contender{
		pid: p.cmd.Process.Pid, put: c.Put,
		get: func(ctx context.Context, f *kvcache.Frame) error {
			l, err := c.Get(ctx, f.Ref)
			if err != nil {
				return err
			}
			defer l.Release()
			return l.Verify()
		},
		clear: func(ctx context.Context, f *kvcache.Frame) error { return c.Drop(ctx, f.Fingerprint) },
	}
}
