package policy

import "slices"

// limits checks the sizes and numbers of a Mesh, whose defaults are filled in.
func (p *parser) limits(m *Mesh) {
	if m.MaxBody > LargestBody {
		p.wrong(m.At, "maxBody", "maxBody %v: want at most %v", m.MaxBody, Bytes(LargestBody))
	}
	if m.HeldBodies < m.MaxBody {
		p.wrong(m.At, "heldBodies", "heldBodies %v: want at least maxBody, which is %v", m.HeldBodies, m.MaxBody)
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
