package bench

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// usage is what a process has used so far.
type usage struct {
	cpu           time.Duration
	reads, writes int // system calls
	waits         int // times that a thread of it had nothing to do and gave its processor up
}

// usageOf reads the usage of a running process.
func usageOf(b *testing.B, pid int) usage {
	b.Helper()
	dir := fmt.Sprintf("/proc/%d", pid)
	stat, err := os.ReadFile(dir + "/stat")
	if err != nil {
		b.Skipf("no processor times here: %v", err)
	}
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	user, _ := strconv.Atoi(f[11]) // the kernel writes numbers
	system, _ := strconv.Atoi(f[12])
	u := usage{
		cpu:   time.Duration(user+system) * 10 * time.Millisecond,
		reads: field(dir+"/io", "syscr"), writes: field(dir+"/io", "syscw"),
	}
	threads, _ := filepath.Glob(dir + "/task/*/status") // the pattern is good
	for _, t := range threads {
		u.waits += field(t, "voluntary_ctxt_switches")
	}
	return u
}

// field is a number in one of the kernel's files of "name: value" lines, 0 where it is
// not there.
func field(file, name string) int {
	data, _ := os.ReadFile(file)
	for line := range strings.Lines(string(data)) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			n, _ := strconv.Atoi(strings.TrimSpace(value))
			return n
		}
	}
	return 0
}

// less is u without what had been used before.
func (u usage) less(before usage) usage {
	return usage{u.cpu - before.cpu, u.reads - before.reads, u.writes - before.writes, u.waits - before.waits}
}

// report gives the usage per token; who begins the names of the figures.
func (u usage) report(b *testing.B, who string, tokens int) {
	n := float64(tokens)
	b.ReportMetric(float64(u.cpu.Microseconds())/n, who+"cpu-µs/token")
	b.ReportMetric(float64(u.reads)/n, who+"reads/token")
	b.ReportMetric(float64(u.writes)/n, who+"writes/token")
	b.ReportMetric(float64(u.waits)/n, who+"waits/token")
}

// BenchmarkMeshStreams measures the processor time per token of gateway, Envoy and
// workers, at 100 streams of 50 tokens per second.
func BenchmarkMeshStreams(b *testing.B) {
	const streams, tokens = 100, 200
	m := startMesh(b)
	parts := m.Parts()
	before := map[string]usage{}
	for name, pid := range parts {
		before[name] = usageOf(b, pid)
	}
	total := 0
	client := &splicer{b: b, urls: []string{m.OpenAI}, tokens: tokens, ready: func() {}}
	for b.Loop() {
		var wg sync.WaitGroup
		for i := range streams {
			wg.Go(func() { client.gap(i) })
		}
		wg.Wait()
		total += streams * tokens
	}
	used := map[string]usage{}
	for name, pid := range parts {
		kind, _, _ := strings.Cut(name, "-")
		u := usageOf(b, pid).less(before[name])
		sum := used[kind]
		used[kind] = usage{sum.cpu + u.cpu, sum.reads + u.reads, sum.writes + u.writes, sum.waits + u.waits}
	}
	for _, kind := range []string{"gateway", "envoy", "worker"} {
		used[kind].report(b, kind+"-", total)
	}
	b.ReportMetric(float64(client.events.Load())/float64(total), "events/token")
	b.ReportMetric(0, "ns/op")
}
