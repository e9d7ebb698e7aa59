package policy

import (
	"path"
	"slices"
)

// Ranges of a worker's numbers. Its flags have the same.
const (
	LeastContext = 8       // of WorkerPool.Worker.ContextLength, in tokens: the prompt of a worker's self-check and its answer
	MostNumber   = 1 << 30 // of tokens and of waiting requests
	MostSeqs     = 1 << 20 // of Worker.MaxNumSeqs; llamacpp has a limit of its own
	MostThreads  = 512     // of Worker.Threads
)

// leastHeap is what Envoy's memory needs beside the bodies that it holds, in bytes.
const leastHeap = 64 << 20

// limits checks the sizes and numbers of a Mesh, whose defaults are filled in.
func (p *parser) limits(m *Mesh) {
	if m.MaxBody > LargestBody {
		p.wrong(m.At, "maxBody", "maxBody %v: want at most %v", m.MaxBody, Bytes(LargestBody))
	}
	if dir := m.Listen.Sockets; dir != "" && (!path.IsAbs(dir) || path.Clean(dir) != dir || dir == "/" || len(dir) > longestSockets) {
		p.wrong(m.At, "listen.sockets", "listen.sockets %.120q: want the absolute path of a folder, at most %d bytes, as sockets have short paths", dir, longestSockets)
	}
	if m.HeldBodies < m.MaxBody {
		p.wrong(m.At, "heldBodies", "heldBodies %v: want at least maxBody, which is %v", m.HeldBodies, m.MaxBody)
	}
	if least := leastHeap + BufferTimes*m.MaxBody; m.Envoy.MaxHeap < least && m.MaxBody <= LargestBody {
		p.wrong(m.At, "envoy.maxHeap", "envoy.maxHeap %v: want at least %v, for Envoy and one body of maxBody", m.Envoy.MaxHeap, least)
	}
	const most = 1024 // threads, more than any machine's
	if c := m.Envoy.Concurrency; c < 1 || c > most {
		p.wrong(m.At, "envoy.concurrency", "envoy.concurrency %d: want 1 to %d", c, most)
	}
	levels := []string{"trace", "debug", "info", "warning", "warn", "error", "critical", "off"}
	if l := m.Envoy.LogLevel; !slices.Contains(levels, l) {
		p.wrong(m.At, "envoy.logLevel", "envoy.logLevel %q%s", l, suggest(l, levels))
	}
}
