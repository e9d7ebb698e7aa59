package policy

import (
	"reflect"
	"strings"
	"time"
)

// longest is the most that any Duration may be, a year: far from where sums of
// times, or Envoy, overflow.
const longest = 8760 * time.Hour

// span is the range of a Duration.
type span struct {
	low, high time.Duration
	off       bool // whether it may be Off
}

// spanOf is the range of the Duration at a path. Envoy counts in milliseconds, and
// takes what is shorter for 0, which it reads as "off".
func spanOf(path string) span {
	s := span{low: time.Millisecond, high: longest, off: true}
	switch path {
	case "extProc.messageTimeout": // Envoy's own bound; 0 would have every request pass the gateway by
		s.high, s.off = time.Hour, false
	case "connect", "health.checkInterval": // Envoy refuses 0
		s.off = false
	case "health.silenceTimeout", "health.weightExpirationPeriod", "stream.stallMin": // nothing would ever count
		s.off = false
	case "sim.ttft", "sim.itl":
		s.low = 1
	}
	return s
}

// String says what is wanted.
func (s span) String() string {
	text := "want " + short(s.low) + " to " + short(s.high)
	if s.off {
		text += ", or off"
	}
	return text
}

// short writes a duration without the units that are 0.
func short(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// durations checks every Duration of a spec that was given, at any depth. who begins
// the messages.
func (p *parser) durations(at Place, who string, spec any) {
	var walk func(v reflect.Value, path string)
	walk = func(v reflect.Value, path string) {
		if d, ok := v.Interface().(Duration); ok {
			s := spanOf(path)
			switch given := d.D(); {
			case d == 0: // not given
			case d == Off && !s.off:
				p.wrong(at, path, "%s%s off: %v", who, path, s)
			case d != Off && (given < s.low || given > s.high):
				p.wrong(at, path, "%s%s %s: %v", who, path, short(given), s)
			}
			return
		}
		if v.Kind() != reflect.Struct {
			return
		}
		for f, field := range v.Fields() {
			if name, _, _ := strings.Cut(f.Tag.Get("yaml"), ","); name != "" && name != "-" {
				walk(field, strings.TrimPrefix(path+"."+name, "."))
			}
		}
	}
	walk(reflect.ValueOf(spec), "")
}

// whole checks a number of a pool that has a default: not below 1 where it is given,
// nor over most.
func (p *parser) whole(w WorkerPool, path string, v, least, most int) {
	switch {
	case v < 0 || v == 0 && p.given(w.At, path):
		p.wrong(w.At, path, "WorkerPool %s: %s %d: want a positive number; without it the default holds", w.Name, path, v)
	case v != 0 && v < least:
		p.wrong(w.At, path, "WorkerPool %s: %s %d: want at least %d", w.Name, path, v, least)
	case v > most:
		p.wrong(w.At, path, "WorkerPool %s: %s %d: want at most %d", w.Name, path, v, most)
	}
}

// floats checks the shares and factors of a pool's health. NaN is in no range.
func (p *parser) floats(w WorkerPool) {
	for _, f := range []struct {
		name string
		v    *float64
		high float64
	}{
		{"hysteresis", w.Health.Hysteresis, 1},
		{"minShare", w.Health.MinShare, 1},
		{"errorUtilizationPenalty", w.Health.ErrorUtilizationPenalty, 100},
		{"throttleUtilizationPenalty", w.Health.ThrottleUtilizationPenalty, 100},
	} {
		if f.v != nil && !(*f.v >= 0 && *f.v <= f.high) {
			p.wrong(w.At, "health."+f.name, "WorkerPool %s: health.%s %g: want 0 to %g", w.Name, f.name, *f.v, f.high)
		}
	}
}
