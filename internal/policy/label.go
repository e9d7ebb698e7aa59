package policy

import (
	"fmt"
	"regexp"
)

// The lengths of names: a zone's is that of a label of Kubernetes and a worker's that of a
// DNS name.
const (
	mostZone = 63
	mostID   = 253
)

// label is the form of names that appear in headers, URLs and metrics.
func label(s string) bool {
	return regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$`).MatchString(s)
}

// Zone says why s cannot name an availability zone; "", which is none, can.
func Zone(s string) error {
	if s != "" && (len(s) > mostZone || !label(s)) {
		return fmt.Errorf("want at most %d letters, digits, '-', '_' and '.', a letter or digit at both ends", mostZone)
	}
	return nil
}

// WorkerID says why s cannot be the id of a worker of ours.
func WorkerID(s string) error {
	if len(s) > mostID || !label(s) {
		return fmt.Errorf("want 1 to %d letters, digits, '-', '_' and '.', a letter or digit at both ends", mostID)
	}
	return nil
}

// zones checks the zones of a pool.
func (p *parser) zones(w WorkerPool) {
	check := func(path, zone string) {
		if err := Zone(zone); err != nil {
			p.wrong(w.At, path, "WorkerPool %s: %s %.80q: %v", w.Name, path, zone, err)
		}
	}
	for i, l := range w.Local {
		check(fmt.Sprintf("local[%d].zone", i), l.Zone)
	}
	for i, s := range w.Static {
		check(fmt.Sprintf("static[%d].zone", i), s.Zone)
	}
}
