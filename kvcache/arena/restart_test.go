//go:build unix

package arena

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// fillEnv makes the test binary fill the arena in the folder that it names, of as many
// bytes as follow behind a colon, and wait to be killed.
const fillEnv = "ARENA_FILL"

// fillBlock is the payload of the blocks that fill: 64 tokens of a small model.
const fillBlock = 64 * 18_432

// filler is the i-th block that fills an arena, in buf.
func filler(buf []byte, i int) (*kvcache.Frame, error) {
	payload := buf[kvcache.HeaderLen(1, 1):]
	for at := 0; at < len(payload); at += 4096 {
		binary.LittleEndian.PutUint64(payload[at:], uint64(i)<<32|uint64(at))
	}
	space := kvcache.NewSpace("m", nil)
	return kvcache.Seal(buf, kvcache.Meta{Space: space, Parent: space.Root, IDs: []int32{int32(i)}},
		[]kvcache.Part{{Size: int64(len(payload))}})
}

// fillBuffer is the memory for one of them.
func fillBuffer() []byte { return make([]byte, kvcache.HeaderLen(1, 1)+fillBlock) }

// fill is what the child does.
func fill(spec string) int {
	var dir string
	var limit int64
	if _, err := fmt.Sscan(spec, &limit, &dir); err != nil {
		fmt.Println("error", err)
		return 1
	}
	s, err := Open(Config{Dir: dir, Limit: limit, Prefault: true})
	buf := fillBuffer()
	for i := 0; err == nil && s.Stats().Used+2*fillBlock < limit; i++ {
		var f *kvcache.Frame
		if f, err = filler(buf, i); err == nil {
			err = s.Put(context.Background(), f)
		}
	}
	if err != nil {
		fmt.Println("error", err)
		return 1
	}
	fmt.Println("full", s.Stats().Puts)
	select {}
}

// shmDir makes a folder in shared memory, or anywhere where there is none.
func shmDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "kvmesh-arena-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "store")
}

// TestRestart kills an owner whose arena is full, and opens the arena: every block is
// there. With -arena-large it has 5 GiB, and must be ready within 2 seconds.
func TestRestart(t *testing.T) {
	limit := int64(64 << 20)
	if *large {
		limit = 5<<30 + 64<<20
	}
	dir := shmDir(t)
	c := exec.Command(os.Args[0], "-test.run=^$")
	c.Env = append(c.Environ(), fmt.Sprintf("%s=%d %s", fillEnv, limit, dir))
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	line, _ := bufio.NewReader(out).ReadString('\n')
	_ = c.Process.Kill() // as the kernel would
	_ = c.Wait()
	var blocks int
	if _, err := fmt.Sscanf(line, "full %d", &blocks); err != nil {
		t.Fatalf("the child says %q", line)
	}
	begin := time.Now()
	s, err := Open(Config{Dir: dir, Limit: limit, Prefault: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	opened := time.Since(begin)
	buf := fillBuffer()
	order := rand.New(rand.NewPCG(1, 1)).Perm(blocks)
	first := time.Duration(0)
	for _, i := range order {
		f, err := filler(buf, i)
		if err != nil {
			t.Fatal(err)
		}
		if !has(t, s, f) {
			t.Fatalf("block %d of %d is missing", i, blocks)
		}
		if first == 0 {
			first = time.Since(begin)
		}
	}
	t.Logf("%d blocks, %d bytes in use: opened after %v, first block verified after %v, all after %v",
		blocks, s.Stats().Used, opened, first, time.Since(begin))
	if *large && first > 2*time.Second {
		t.Errorf("ready after %v", first)
	}
}
