//go:build linux

package bench

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/kvmesh/kvmesh/internal/rivaltest"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvnode"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

var (
	hostRounds    = flag.Int("host-rounds", 5, "turns of each contender of BenchmarkSameHost")
	hostSizes     = flag.String("host-sizes", "1,8,64", "lengths of the blocks of BenchmarkSameHost in MiB")
	hostDir       = flag.String("host-dir", "/dev/shm", "BenchmarkSameHost has the node's memory below it")
	hostValkey    = flag.String("host-valkey", "", "valkey-server for BenchmarkSameHost (default: of PATH, or the one that kvmesh fetch redis has fetched)")
	hostMemcached = flag.String("host-memcached", "memcached", "memcached for BenchmarkSameHost")
)

const (
	// hostBytes is the working set, so that nobody is served from the processor's cache.
	hostBytes = 512 << 20
	// hostParts is as many as keys and values of 32 layers have.
	hostParts = 64
	// hostChain is how many bytes are read at once where a chain of blocks is, and what the
	// checksum alone and the verifying read take turns with: about a thousand tokens of a model
	// of 8 billion parameters.
	hostChain = 64 << 20

	leastOfSum  = 0.8 // of the speed of the checksum alone, for a first read
	leastOfPeer = 2.0 // times the speed of the best other server, for a later one
)

// hostNode is a KV node in a process of its own, with memory for what BenchmarkSameHost
// keeps there.
type hostNode struct{ dir string }

// startNode starts the product's own node and waits until it answers.
func startNode(b *testing.B, limit int64) hostNode {
	b.Helper()
	bin, err := testmesh.Build(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	dir, err := os.MkdirTemp(*hostDir, "kvmesh-bench-")
	if err != nil {
		b.Fatal(err)
	}
	log := &testmesh.Log{}
	cmd := exec.Command(bin, "kvnode", "--dir", filepath.Join(dir, "kv"), "--limit", strconv.FormatInt(limit, 10))
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
		os.RemoveAll(dir)
		if b.Failed() {
			b.Logf("the node:\n%s", log)
		}
	})
	n := hostNode{filepath.Join(dir, "kv")}
	testmesh.Eventually(b, "the node answers", time.Minute, func() bool {
		if _, err := os.Stat(filepath.Join(n.dir, kvnode.SocketName)); err != nil {
			return false
		}
		c := n.client(b)
		defer c.Close()
		_, err := c.NodeStats(b.Context())
		return err == nil
	})
	return n
}

// client is a new one, which has seen nothing of the memory.
func (n hostNode) client(b *testing.B) *kvnode.Client {
	b.Helper()
	c, err := kvnode.Open(n.dir)
	if err != nil {
		b.Fatal(err)
	}
	return c
}

// hostFrames makes blocks of a size, whose total is hostBytes.
func hostFrames(b *testing.B, size int) (frames []*kvcache.Frame) {
	space := kvcache.NewSpace("bench", []byte(strconv.Itoa(size)))
	payload := bytes.Repeat([]byte("sixteen bytes of"), size/16)
	for i := range hostBytes / size {
		copy(payload, strconv.Itoa(i))
		parts := make([]kvcache.Part, hostParts)
		for p := range parts {
			parts[p] = kvcache.Part{Layer: uint16(p / 2), Layers: 1, Size: int64(size / hostParts)}
		}
		f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: space.Root, IDs: []int32{int32(i)}}, parts, payload)
		if err != nil {
			b.Fatal(err)
		}
		frames = append(frames, f)
	}
	return frames
}

// hostStore is one way to keep blocks in another process of this host.
type hostStore struct {
	name string
	// run is how many blocks are asked for at once.
	run int
	// read hands out the bytes of blocks, which are there until use returns.
	read func(ctx context.Context, run []*kvcache.Frame, use func([]byte)) error
}

// hostRival is another server.
type hostRival struct {
	name string
	put  func(ctx context.Context, f *kvcache.Frame) error
	// read reads blocks into room, and may put each where the one before was.
	read  func(ctx context.Context, run []*kvcache.Frame, room []byte, use func([]byte)) error
	clear func(ctx context.Context) error
}

// touched keeps the compiler from leaving touch out.
var touched uint64

// touch reads every byte, eight at a time.
func touch(b []byte) {
	var x0, x1, x2, x3 uint64
	le := binary.LittleEndian
	for ; len(b) >= 32; b = b[32:] {
		x0 += le.Uint64(b)
		x1 += le.Uint64(b[8:])
		x2 += le.Uint64(b[16:])
		x3 += le.Uint64(b[24:])
	}
	for _, c := range b {
		x0 += uint64(c)
	}
	touched += x0 + x1 + x2 + x3
}

// hostRivals are the other servers that are installed, on Unix sockets, each with the client
// that takes least: values are read into memory that is used again.
func hostRivals(b *testing.B) (list []hostRival) {
	for name, path := range map[string]string{"go-redis, Redis": rivaltest.Redis(), "go-redis, Valkey": rivaltest.Valkey(*hostValkey)} {
		s := rivaltest.StartRedis(b, path, "unix")
		if s == nil {
			b.Logf("%s: not installed", name)
			continue
		}
		c := redis.NewClient(&redis.Options{Network: s.Network, Addr: s.Addr, ReadTimeout: time.Minute, WriteTimeout: time.Minute})
		b.Cleanup(func() { c.Close() })
		list = append(list, hostRival{
			name: name,
			put: func(ctx context.Context, f *kvcache.Frame) error {
				return c.Set(ctx, f.Key.String(), f.Bytes(), 0).Err()
			},
			read:  redisRead(c),
			clear: func(ctx context.Context) error { return c.FlushAll(ctx).Err() },
		})
	}
	if s := rivaltest.StartMemcached(b, *hostMemcached, "unix"); s == nil {
		b.Logf("memcached: not installed")
	} else {
		m := rivaltest.DialMemcached(b, s)
		list = append(list, hostRival{
			name: "memcached",
			put:  func(_ context.Context, f *kvcache.Frame) error { return m.Set(f.Key.String(), f.Bytes()) },
			read: func(_ context.Context, run []*kvcache.Frame, room []byte, use func([]byte)) error {
				var keys []string
				for _, f := range run {
					keys = append(keys, f.Key.String())
				}
				one := room[:run[0].Total]
				return m.Get(keys, one, func() { use(one) })
			},
			clear: func(context.Context) error { return m.Clear() },
		})
	}
	slices.SortFunc(list, func(a, b hostRival) int { return cmp.Compare(a.name, b.name) })
	return list
}

// redisRead reads with go-redis, several values in a pipeline.
func redisRead(c *redis.Client) func(context.Context, []*kvcache.Frame, []byte, func([]byte)) error {
	return func(ctx context.Context, run []*kvcache.Frame, room []byte, use func([]byte)) error {
		var got []*redis.ZeroCopyStringCmd
		var to [][]byte
		into := func(c redis.Cmdable) {
			for _, f := range run {
				to = append(to, room[:f.Total])
				got = append(got, c.GetToBuffer(ctx, f.Key.String(), room[:f.Total+2])) // with room for the end of a line
				room = room[f.Total+2:]
			}
		}
		if len(run) == 1 {
			into(c)
		} else if _, err := c.Pipelined(ctx, func(p redis.Pipeliner) error { into(p); return nil }); err != nil {
			return err
		}
		for i, f := range run {
			if n, err := got[i].Result(); err != nil || int64(n) != f.Total {
				return fmt.Errorf("%d bytes of %d: %w", n, f.Total, err)
			}
			use(to[i])
		}
		return nil
	}
}

// nodeRead is a read in place. Where it verifies, it does so part by part, so that what was
// verified is still near the processor when it is used.
func nodeRead(c *kvnode.Client, verify bool) func(context.Context, []*kvcache.Frame, func([]byte)) error {
	return func(ctx context.Context, run []*kvcache.Frame, use func([]byte)) error {
		refs := make([]kvcache.Ref, len(run))
		for i, f := range run {
			refs[i] = f.Ref
		}
		for l, err := range c.GetEach(ctx, refs) {
			if err != nil {
				return err
			}
			if !verify {
				use(l.Bytes())
			}
			for i := 0; verify && i < len(l.Parts); i++ {
				part, err := l.Part(i)
				if err != nil {
					return err
				}
				use(part)
			}
			l.Release()
		}
		return nil
	}
}

// faults is how many pages this process has had to be given so far.
func faults() int64 {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // cannot fail
	return u.Minflt
}

// timeRuns reads blocks, so many at once, and returns how long that took.
func timeRuns(b *testing.B, frames []*kvcache.Frame, run int, read func(run []*kvcache.Frame) error) time.Duration {
	b.Helper()
	begin := time.Now()
	for some := range slices.Chunk(frames, run) {
		if err := read(some); err != nil {
			b.Fatal(err)
		}
	}
	return time.Since(begin)
}

// first is what first reads have come to, in GB/s, and as a share of the checksum alone.
type first struct {
	name     string
	run      int  // blocks that are asked for at once
	prepared bool // the client's mapping is filled
	// same is the checksum alone over the same bytes, through another mapping of them that was
	// touched before, and own over equal ones in this process's own memory.
	same, own, read, share []float64
	faults                 int64
}

// turn reads every block for the first time through a new client, and checks it, beside the
// checksum alone. They take turns every hostChain bytes, so that what else the machine does
// hits all; the checksum alone has what is farthest from what was read just now, so that
// it is not in the processor's cache.
func (s *first) turn(b *testing.B, n hostNode, frames []*kvcache.Frame, held []*kvcache.Lent) {
	b.Helper()
	c := n.client(b)
	defer c.Close()
	if s.prepared {
		if err := c.Fill(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	read := nodeRead(c, true)
	runtime.GC() // else this large heap would grow with each header, and not use memory again
	var same, own, took time.Duration
	s.faults = 0
	step := hostChain / (int(frames[0].Total) &^ 0xfffff)
	for at := 0; at < len(frames); at += step {
		before := faults()
		took += timeRuns(b, frames[at:at+step], s.run, func(run []*kvcache.Frame) error { return read(b.Context(), run, func([]byte) {}) })
		s.faults += faults() - before
		far := (at + len(frames)/2) % len(frames)
		begin := time.Now()
		for _, l := range held[far : far+step] {
			touched += kvcache.Sum(l.Bytes())
		}
		same += time.Since(begin)
		begin = time.Now()
		for _, f := range frames[far : far+step] {
			touched += kvcache.Sum(f.Bytes())
		}
		own += time.Since(begin)
	}
	bytes := len(frames) * int(frames[0].Total)
	s.same, s.own, s.read = append(s.same, gbs(bytes, same)), append(s.own, gbs(bytes, own)), append(s.read, gbs(bytes, took))
	s.share = append(s.share, float64(same)/float64(took))
}

// gbs is a speed in GB/s.
func gbs(bytes int, took time.Duration) float64 { return float64(bytes) / 1e9 / took.Seconds() }

// BenchmarkSameHost compares, in turns, how processes of one host read blocks of 1, 8 and
// 64 MiB from another process: in place from a KV node, and from Redis, Valkey and memcached
// over their Unix sockets. A first read, by a client that has seen none of the blocks,
// includes their verification, and is held to leastOfSum of the speed of the checksum alone
// over the same bytes. A later one is timed until every byte has been touched, and held to
// leastOfPeer times the speed of the best other server. State puts the real engine behind.
func BenchmarkSameHost(b *testing.B) {
	b.Run("bytes", func(b *testing.B) {
		n := startNode(b, 3<<29)
		rivals := hostRivals(b)
		for b.Loop() {
			for text := range strings.SplitSeq(*hostSizes, ",") {
				size, err := strconv.Atoi(text)
				if err != nil {
					b.Fatal(err)
				}
				hostBlocks(b, n, rivals, size)
			}
		}
	})
	b.Run("state", hostState)
}

// hostBlocks compares reads of blocks of some MiB.
func hostBlocks(b *testing.B, n hostNode, rivals []hostRival, mib int) {
	frames := hostFrames(b, mib<<20)
	c := n.client(b)
	defer c.Close()
	for _, f := range frames {
		if err := c.Put(b.Context(), f); err != nil {
			b.Fatal(err)
		}
		for _, r := range rivals {
			if err := r.put(b.Context(), f); err != nil {
				b.Fatalf("%s: %v", r.name, err)
			}
		}
	}
	hostFirst(b, n, c, frames)
	hostLater(b, c, rivals, frames)
	for _, r := range rivals {
		if err := r.clear(b.Context()); err != nil {
			b.Fatalf("%s: %v", r.name, err)
		}
	}
	if err := c.Drop(b.Context(), frames[0].Fingerprint); err != nil {
		b.Fatal(err)
	}
}

// hostFirst compares first, verifying reads with the checksum alone.
func hostFirst(b *testing.B, n hostNode, c *kvnode.Client, frames []*kvcache.Frame) {
	var held []*kvcache.Lent
	for _, f := range frames {
		l, err := c.Get(b.Context(), f.Ref)
		if err == nil {
			err = l.Verify()
		}
		if err != nil {
			b.Fatal(err)
		}
		held = append(held, l)
		defer l.Release()
	}
	mib := int(frames[0].Total >> 20)
	run := hostChain >> 20 / mib
	ways := []*first{
		{name: "chains", run: run, prepared: true},
		{name: "one by one", run: 1, prepared: true},
		{name: "chains, client opened just now", run: run},
	}
	for range *hostRounds {
		for _, s := range ways {
			s.turn(b, n, frames, held)
		}
	}
	t := newTable()
	for _, s := range ways {
		t.row("%d MiB\t%s\t%.2f GB/s verified\t%.2f GB/s checksum alone\t%.0f %%\t%.2f GB/s in own memory\t%d page faults\t", mib, s.name,
			middle(s.read), middle(s.same), 100*middle(s.share), middle(s.own), s.faults)
	}
	t.print()
	b.ReportMetric(100*middle(ways[0].share), fmt.Sprintf("first-%dMiB-%%", mib))
	holdRatio(b, fmt.Sprintf("%d MiB: a first, verifying read has of the checksum alone", mib), middle(ways[0].share), leastOfSum)
}

// hostLater compares reads of blocks that a client has read before, until every byte of them
// was touched.
func hostLater(b *testing.B, c *kvnode.Client, rivals []hostRival, frames []*kvcache.Frame) {
	mib := int(frames[0].Total >> 20)
	run := hostChain >> 20 / mib
	stores := []hostStore{
		{"node, chains, verified again", run, nodeRead(c, true)},
		{"node, chains", run, nodeRead(c, false)},
		{"node, one by one, verified again", 1, nodeRead(c, true)},
		{"node, one by one", 1, nodeRead(c, false)},
	}
	own := len(stores)
	room := make([]byte, hostChain+hostChain/8)
	for _, r := range rivals {
		read := func(ctx context.Context, run []*kvcache.Frame, use func([]byte)) error {
			return r.read(ctx, run, room, use)
		}
		stores = append(stores, hostStore{r.name + ", one by one", 1, read}, hostStore{r.name + ", several at once", run, read})
	}
	speeds := make([][]float64, len(stores))
	bytes := len(frames) * int(frames[0].Total)
	for round := range *hostRounds + 1 {
		for i, s := range stores {
			took := timeRuns(b, frames, s.run, func(run []*kvcache.Frame) error { return s.read(b.Context(), run, touch) })
			if round > 0 {
				speeds[i] = append(speeds[i], gbs(bytes, took))
			}
		}
	}
	best := 0.0
	t := newTable()
	for i, s := range stores {
		v := middle(speeds[i])
		if i >= own {
			best = max(best, v)
		}
		t.row("%d MiB\t%s\t%.2f GB/s until touched\t", mib, s.name, v)
	}
	t.print()
	if best == 0 {
		b.Log("no other server is installed: nothing is compared")
		return
	}
	b.ReportMetric(middle(speeds[0])/best, fmt.Sprintf("later-%dMiB-×", mib))
	holdRatio(b, fmt.Sprintf("%d MiB: a later read, verified again, has of the best other server's speed", mib), middle(speeds[0])/best, leastOfPeer)
}

// table is printed as it is: b.Log would cut it.
type table struct{ *tabwriter.Writer }

func newTable() table {
	return table{tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)}
}

// row adds one, whose cells end in tabs.
func (t table) row(format string, args ...any) { fmt.Fprintf(t, format+"\n", args...) }

func (t table) print() { t.Flush() }

// holdRatio holds what was measured to a bound, and on a machine that was busier than its
// cores while it was measured to half of it.
func holdRatio(b *testing.B, what string, got, least float64) {
	b.Helper()
	load, known := hostLoad()
	want, why := least, ""
	if !known || load > float64(runtime.NumCPU()) {
		want, why = least/2, fmt.Sprintf(" (half of %.2f: the load is %.1f on %d cores)", least, load, runtime.NumCPU())
	}
	if got < want {
		b.Errorf("%s %.2f, want at least %.2f%s", what, got, want, why)
	} else {
		b.Logf("%s %.2f, at least %.2f is wanted%s", what, got, want, why)
	}
}
