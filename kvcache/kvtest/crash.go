package kvtest

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// ChildEnv is the environment variable that makes a test binary a child of this
// suite; its value is for Child.
const ChildEnv = "KVTEST_CHILD"

// job is what a child is to do, as JSON in ChildEnv.
type job struct {
	Mode   string // a key of jobs
	Dir    string
	Seed   uint64
	Writer byte
	Limit  int64 // of the store; 0 = plenty
}

// jobs returns what children can do. Each prints a line for every thing that the
// store has acknowledged, and goes on until it is killed or its input ends.
func jobs() map[string]func(kvcache.Store, job) error {
	return map[string]func(kvcache.Store, job) error{
		"blocks": writeBlocks, "tails": writeTails, "same": writeSame, "zombie": writeLate,
		"owner": writeOwner,
	}
}

// The shapes that children and their parents agree on.
const (
	childChains = 4  // per seed
	childBlocks = 8  // per chain
	childTokens = 16 // per block
	// childSize is the length of a block's payload: it takes long enough to write
	// that a kill, or a reader, often comes in between.
	childSize  = 400_000
	sameBlocks = 20
)

// space is the space of all children.
func space() kvcache.Space { return kvcache.NewSpace("model", []byte("crash")) }

// Child does what a parent in the same suite asked for and exits.
func Child(spec string, open Opener) {
	var j job
	err := json.Unmarshal([]byte(spec), &j)
	if err == nil {
		var s kvcache.Store
		if s, err = open(j.Dir, cmp.Or(j.Limit, plenty)); err == nil {
			err = jobs()[j.Mode](s, j)
			s.Close()
		}
	}
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// childChain is the c-th chain of a seed.
func childChain(seed uint64, c int) []*kvcache.Frame {
	return chain(space(), tokens(seed<<8+uint64(c), childBlocks*childTokens), childTokens, childSize)
}

// writeBlocks puts chains.
func writeBlocks(s kvcache.Store, j job) error {
	for c := range childChains {
		for i, f := range childChain(j.Seed, c) {
			if err := s.Put(context.Background(), f); err != nil {
				return err
			}
			fmt.Println(c, i)
		}
	}
	return waitForEnd()
}

// writeTails appends to three streams in turn, and rotates.
func writeTails(s kvcache.Store, j job) error {
	ts := s.(kvcache.Tails)
	var writers []kvcache.TailWriter
	var specs []kvcache.TailSpec
	for c := range 3 {
		sp := spec(space(), "stream "+strconv.FormatUint(j.Seed, 10), c, 1)
		w, err := ts.OpenTail(context.Background(), sp)
		if err != nil {
			return err
		}
		writers, specs = append(writers, w), append(specs, sp)
	}
	for at := 64; at < 400; at++ {
		for c, w := range writers {
			if at%100 == 0 {
				if err := w.Rotate(space().Root, at); err != nil {
					return err
				}
			}
			if err := w.Append(rangeAt(specs[c].Stream, 1, at, 1)); err != nil {
				return err
			}
			fmt.Println(c, at)
		}
	}
	return waitForEnd()
}

// writeSame puts the blocks that another child puts at the same time, each with a
// payload of its own, one for each line of input.
func writeSame(s kvcache.Store, j job) error {
	in := bufio.NewScanner(os.Stdin)
	for i := range sameBlocks {
		f := blockBy(space(), space().Root, 0, tokens(uint64(i), childTokens), func(key kvcache.Key) []byte {
			return content(key, j.Writer, childSize)
		})
		if !in.Scan() {
			break
		}
		if err := s.Put(context.Background(), f); err != nil {
			return err
		}
		fmt.Println(i)
	}
	return nil
}

// writeLate appends to one tail whenever its parent asks for it.
func writeLate(s kvcache.Store, _ job) error {
	sp := spec(space(), "stream", 0, 1)
	w, err := s.(kvcache.Tails).OpenTail(context.Background(), sp)
	if err != nil {
		return err
	}
	in := bufio.NewScanner(os.Stdin)
	for at := sp.First; in.Scan(); at++ {
		switch err := w.Append(rangeAt(sp.Stream, 1, at, 1)); {
		case errors.Is(err, kvcache.ErrStale):
			st, _ := stats(s)
			fmt.Println("stale", st.Stale)
		case err != nil:
			return err
		default:
			fmt.Println("appended")
		}
	}
	return nil
}

// waitForEnd keeps a child alive that has done its work.
func waitForEnd() error {
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// child is a running child.
type child struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Scanner
}

// start starts a child. It is killed when the test ends at the latest.
func start(t testing.TB, j job) *child {
	t.Helper()
	spec, err := json.Marshal(j)
	if err != nil {
		t.Fatal(err)
	}
	c := &child{cmd: exec.Command(os.Args[0], "-test.run=^$")}
	c.cmd.Env = append(c.cmd.Environ(), ChildEnv+"="+string(spec))
	c.cmd.Stderr = os.Stderr
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c.lines = bufio.NewScanner(out)
	t.Cleanup(c.kill)
	return c
}

// line returns the next line of a child, and false when it has ended.
func (c *child) line(t testing.TB) (string, bool) {
	t.Helper()
	if !c.lines.Scan() {
		return "", false
	}
	if strings.HasPrefix(c.lines.Text(), "error") {
		t.Fatalf("child: %s", c.lines.Text())
	}
	return c.lines.Text(), true
}

// kill ends a child by SIGKILL.
func (c *child) kill() {
	_ = c.cmd.Process.Kill() // it may have ended
	_ = c.cmd.Wait()
}

// killAt reads some lines, lets a random moment pass, kills the child and reads
// what it had acknowledged until then.
func (c *child) killAt(t testing.TB, r *rand.Rand, lines int, note func(string)) {
	t.Helper()
	for range lines {
		line, ok := c.line(t)
		if !ok {
			t.Fatal("the child has ended by itself")
		}
		note(line)
	}
	<-time.After(time.Duration(r.IntN(1000)) * time.Microsecond)
	// Signalled, not waited for: that would close the pipe with lines in it.
	_ = c.cmd.Process.Kill()
	for line, ok := c.line(t); ok; line, ok = c.line(t) {
		note(line)
	}
	c.kill()
}

// rounds is how often a crash test crashes.
func rounds() int {
	if testing.Short() {
		return 5
	}
	return 20
}

// shared skips tests that need several processes.
func (h Harness) shared(t testing.TB) {
	t.Helper()
	if !h.Shared {
		t.Skip("the store is one process's")
	}
}

// testReopen: another store on the same content, in this process.
func testReopen(t *testing.T, h Harness) {
	h.shared(t)
	dir := newDir(t)
	a, b := h.open(t, dir, plenty), h.open(t, dir, plenty)
	sp := kvcache.NewSpace("model", nil)
	ids := tokens(1, 64*4)
	frames := chain(sp, ids, 64, 1000)
	put(t, a, frames[:2]...)
	if m := longest(t, b, sp, ids); len(m.Blocks) != 2 {
		t.Errorf("the other store finds %d blocks, want 2", len(m.Blocks))
	}
	put(t, a, frames[2])
	put(t, b, frames[3], frames[2])
	for _, s := range []kvcache.Store{a, b} {
		m := longest(t, s, sp, ids)
		if len(m.Blocks) != 4 {
			t.Errorf("%d blocks, want 4", len(m.Blocks))
		}
		checkMatch(t, s, kvcache.Query{Space: sp, IDs: ids}, m)
	}
	sta, ok := stats(a)
	if stb, _ := stats(b); ok && (!h.Lags && sta.Used != stb.Used || stb.Duplicates != 1) {
		t.Errorf("counted %+v and %+v", sta, stb)
	}
	if err := b.Drop(context.Background(), sp.Fingerprint); err != nil {
		t.Fatal(err)
	}
	if m := longest(t, a, sp, ids); len(m.Blocks) != 0 {
		t.Errorf("%d blocks after another store dropped the model", len(m.Blocks))
	}
	put(t, a, frames...)
	a.Close()
	b.Close()
	c := h.open(t, dir, plenty)
	if m := longest(t, c, sp, ids); len(m.Blocks) != 4 {
		t.Errorf("%d blocks after all had closed, want 4", len(m.Blocks))
	}
	if stc, ok := stats(c); ok && stc.Used < 4*1000 {
		t.Errorf("%d bytes in use after reopening", stc.Used)
	}
}

// testCrashBlocks kills writers at random moments. What they had acknowledged is
// there, and nothing that is there is not whole.
func testCrashBlocks(t *testing.T, h Harness) {
	h.shared(t)
	dir := newDir(t)
	watcher := h.open(t, dir, plenty) // sees all of it happen
	for round := range h.kills() {
		r := rand.New(rand.NewPCG(uint64(round), 3))
		seed := uint64(round)
		c := start(t, job{Mode: "blocks", Dir: dir, Seed: seed})
		stop := chase(t, watcher, seed)
		var acked [childChains]int
		c.killAt(t, r, r.IntN(childChains*childBlocks-1), func(line string) {
			var chain, i int
			if _, err := fmt.Sscan(line, &chain, &i); err != nil || i != acked[chain] {
				t.Fatalf("line %q: %v", line, err)
			}
			acked[chain]++
		})
		stop()
		again := h.open(t, dir, plenty)
		for _, s := range []kvcache.Store{watcher, again} {
			for chain, n := range acked {
				ids := tokens(seed<<8+uint64(chain), childBlocks*childTokens)
				m := longest(t, s, space(), ids)
				if len(m.Blocks) < n {
					t.Fatalf("round %d: %d blocks of chain %d, %d were acknowledged", round, len(m.Blocks), chain, n)
				}
				checkMatch(t, s, kvcache.Query{Space: space(), IDs: ids}, m)
			}
		}
		// What was cut off can be written now.
		put(t, again, childChain(seed, childChains-1)...)
		if err := again.Drop(context.Background(), space().Fingerprint); err != nil {
			t.Fatal(err)
		}
		again.Close()
	}
	if n := refusals(watcher); n != 0 {
		t.Errorf("%d blocks were refused: a half of one was visible", n)
	}
}

// chase reads every block of a seed, over and over until it is there, while a
// child writes: it must be whole the first time that it can be seen.
func chase(t testing.TB, s kvcache.Store, seed uint64) (stop func()) {
	ctx, end := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		for c := range childChains {
			parent := space().Root
			ids := tokens(seed<<8+uint64(c), childBlocks*childTokens)
			for ; len(ids) > 0; ids = ids[childTokens:] {
				ref := space().Child(parent, ids[:childTokens])
				err := readBlock(s, ref)
				for errors.Is(err, kvcache.ErrNotFound) && ctx.Err() == nil {
					runtime.Gosched()
					err = readBlock(s, ref)
				}
				if err != nil {
					done <- err
					return
				}
				parent = ref.Key
			}
		}
		done <- nil
	}()
	return func() {
		end()
		if err := <-done; err != nil && !errors.Is(err, kvcache.ErrNotFound) {
			t.Errorf("a reader beside a writer: %v", err)
		}
	}
}

// testCrashTails does the same to tails.
func testCrashTails(t *testing.T, h Harness) {
	h.shared(t)
	dir := newDir(t)
	ts := tails(t, h.open(t, dir, plenty))
	for round := range h.kills() {
		r := rand.New(rand.NewPCG(uint64(round), 4))
		c := start(t, job{Mode: "tails", Dir: dir, Seed: uint64(round)})
		acked := [3]int{63, 63, 63}
		c.killAt(t, r, 1+r.IntN(900), func(line string) {
			var choice, at int
			if _, err := fmt.Sscan(line, &choice, &at); err != nil {
				t.Fatal(err)
			}
			acked[choice] = at
		})
		for choice, last := range acked {
			sp := spec(space(), "stream "+strconv.Itoa(round), choice, 1)
			got := readTail(t, ts, sp)
			if last < sp.First && len(got) == 0 {
				continue // killed before it was opened
			}
			// Two, if it died in the midst of a rotation: the older one is whole too.
			if len(got) == 0 || len(got) > 2 {
				t.Fatalf("round %d: %d tails", round, len(got))
			}
			for _, tail := range got {
				checkTail(t, tail, 1)
			}
			have := got[0].First + len(got[0].IDs()) - 1
			if have < last || have > last+1 {
				t.Fatalf("round %d: choice %d ends at %d, %d was acknowledged", round, choice, have, last)
			}
			// The successor goes on.
			sp.Attempt = 2
			w := openTail(t, ts, sp)
			appendRanges(t, w, sp, run{64, 70, 2})
			w.Close()
			checkTail(t, readTail(t, ts, sp)[0], 2)
		}
	}
}

// testSameBlock: two processes write the same blocks at the same time. Each ends
// up as one of the two, and stays it.
func testSameBlock(t *testing.T, h Harness) {
	h.shared(t)
	for round := range max(1, h.kills()/5) {
		dir := newDir(t)
		s := h.open(t, dir, plenty)
		children := []*child{
			start(t, job{Mode: "same", Dir: dir, Writer: 1}),
			start(t, job{Mode: "same", Dir: dir, Writer: 2}),
		}
		owner := [sameBlocks]byte{}
		look := func(i int) {
			ref := space().Child(space().Root, tokens(uint64(i), childTokens))
			l, err := s.Get(context.Background(), ref)
			if err != nil {
				t.Fatalf("round %d, block %d: %v", round, i, err)
			}
			defer l.Release()
			b, err := l.Payload()
			if err != nil {
				t.Fatal(err)
			}
			for writer := byte(1); writer <= 2; writer++ {
				if bytes.Equal(b, content(ref.Key, writer, childSize)) {
					if owner[i] != 0 && owner[i] != writer {
						t.Fatalf("block %d has changed", i)
					}
					owner[i] = writer
					return
				}
			}
			t.Fatalf("block %d is of neither", i)
		}
		for i := range sameBlocks {
			for _, c := range children {
				fmt.Fprintln(c.in)
			}
			for _, c := range children {
				if _, ok := c.line(t); !ok {
					t.Fatal("the child has ended by itself")
				}
				look(i)
			}
		}
		for i := range sameBlocks {
			look(i)
		}
	}
}
