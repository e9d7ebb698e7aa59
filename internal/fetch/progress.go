package fetch

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// meter shows how far a download is: redrawn in place on a terminal, else as a
// line every few seconds.
type meter struct {
	w        io.Writer
	terminal bool
	label    string
	total    int64
	began    time.Time
}

// newMeter begins to measure. Neither pip nor npm says how far it is in a form
// that can be read, so the meter looks at the disk instead.
func newMeter(cfg Config, label string, total int64) *meter {
	return &meter{w: cfg.Progress, terminal: cfg.Terminal, label: label, total: total, began: time.Now()}
}

// watch draws what bytes returns until the returned function is called.
func (m *meter) watch(bytes func() int64) (stop func()) {
	// A log file is read later; a line every 5 s says that it is alive.
	every := 5 * time.Second
	if m.terminal {
		every = 200 * time.Millisecond
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				m.draw(bytes())
			}
		}
	})
	return func() { close(done); wg.Wait() }
}

// draw shows one state.
func (m *meter) draw(n int64) {
	line := progressLine(m.label, n, m.total, time.Since(m.began))
	if m.terminal {
		// Return to the line's start and clear what an older, longer line left.
		fmt.Fprintf(m.w, "\r%s\x1b[K", line)
		return
	}
	fmt.Fprintln(m.w, line)
}

// finish draws the end.
func (m *meter) finish() {
	m.draw(m.total)
	m.abort()
}

// abort leaves the line that was drawn, so that what follows starts a new one.
func (m *meter) abort() {
	if m.terminal {
		fmt.Fprintln(m.w)
	}
}

// progressLine is what a meter shows for n bytes of total after a time.
func progressLine(label string, n, total int64, after time.Duration) string {
	// A package of no bytes is finished.
	percent := int64(100)
	if total > 0 {
		percent = n * 100 / total
	}
	s := fmt.Sprintf("%-16s %9s of %s  %3d %%", label, size(n), size(total), percent)
	// The mean since the start: what counts is when it ends, and a mean does not
	// jump about. Of the first bytes it says nothing: the registry is still being asked.
	if percent == 0 || after < time.Second {
		return s
	}
	rate := float64(n) / after.Seconds()
	s += fmt.Sprintf("  %s/s", size(int64(rate)))
	if n < total {
		left := time.Duration(float64(total-n)/rate*float64(time.Second)) + time.Second/2
		s += fmt.Sprintf("  %s left", left.Truncate(time.Second))
	}
	return s
}

// size writes bytes for people, in decimal units as download sizes are given.
func size(n int64) string {
	switch {
	case n >= 1e9:
		return fmt.Sprintf("%.2f GB", float64(n)/1e9)
	case n >= 1e6:
		return fmt.Sprintf("%.1f MB", float64(n)/1e6)
	default:
		return fmt.Sprintf("%.0f kB", float64(n)/1e3)
	}
}
