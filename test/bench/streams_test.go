package bench

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
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

// plus is the usage of both.
func (u usage) plus(v usage) usage {
	return usage{u.cpu + v.cpu, u.reads + v.reads, u.writes + v.writes, u.waits + v.waits}
}

// BenchmarkMeshStreams measures the processor time of gateway, Envoy and workers, at 100
// streams of 50 tokens per second that come one by one, or as those of an engine that
// computes them in one batch. Streams of two lengths tell what a token costs from what
// its request does.
func BenchmarkMeshStreams(b *testing.B) {
	b.Run("single", func(b *testing.B) { benchMeshStreams(b, 0) })
	b.Run("batched", func(b *testing.B) { benchMeshStreams(b, 20) })
}

func benchMeshStreams(b *testing.B, step int) {
	const streams, short, long = 100, 200, 1000
	m := startMesh(b)
	client := &splicer{b: b, urls: []string{m.OpenAI}, step: step, ready: func() {}}
	busy, known := hostLoad()
	client.tokens = short
	client.all(streams)                                  // the first ones are dear
	all := map[int]map[string]usage{short: {}, long: {}} // by length and kind of process
	rounds := 0
	for b.Loop() {
		for _, client.tokens = range []int{short, long} {
			before := usageOfParts(b, m.Parts())
			client.all(streams)
			for kind, u := range usageOfParts(b, m.Parts()) {
				all[client.tokens][kind] = all[client.tokens][kind].plus(u.less(before[kind]))
			}
		}
		rounds++
	}
	for _, kind := range []string{"gateway", "envoy", "worker"} {
		perToken := all[long][kind].less(all[short][kind])
		perToken.report(b, kind+"-", rounds*streams*(long-short))
		ofTokens := perToken.cpu * short / (long - short)
		b.ReportMetric(float64((all[short][kind].cpu-ofTokens).Microseconds())/float64(rounds*streams), kind+"-cpu-µs/request")
	}
	token := all[long]["gateway"].less(all[short]["gateway"]).cpu / time.Duration(rounds*streams*(long-short))
	if idle := known && busy < float64(runtime.NumCPU()); idle && step > 0 && token > relayBound {
		b.Errorf("the gateway took %v per token, want at most %v", token, relayBound)
	}
	b.ReportMetric(busy, "load-avg")
	b.ReportMetric(float64(client.events.Load())/float64(streams*(short+rounds*(short+long))), "events/token")
	b.ReportMetric(0, "ns/op")
}

// all reads so many streams at once.
func (s *splicer) all(streams int) {
	var wg sync.WaitGroup
	for i := range streams {
		wg.Go(func() { s.gap(i) })
	}
	wg.Wait()
}

// usageOfParts sums the parts of a mesh up by kind: all workers are one.
func usageOfParts(b *testing.B, parts map[string]int) map[string]usage {
	sums := map[string]usage{}
	for name, pid := range parts {
		kind, _, _ := strings.Cut(name, "-")
		sums[kind] = sums[kind].plus(usageOf(b, pid))
	}
	return sums
}
