package xds

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A disk that is full is said once, not with every try; so is that it is not any more.
func TestTroubleIsToldOnce(t *testing.T) {
	var log bytes.Buffer
	tr := trouble{log: slog.New(slog.NewTextHandler(&log, nil)), what: "snapshot not written"}
	full := func(i int) error {
		return fmt.Errorf("write: %w", &fs.PathError{Op: "write", Path: fmt.Sprintf("/x/%d.tmp", i), Err: syscall.ENOSPC})
	}
	lines := func() int { return strings.Count(log.String(), "\n") }
	for i := range 100 {
		tr.note(t0.Add(time.Duration(i)*50*time.Millisecond), full(i))
	}
	if lines() != 1 {
		t.Errorf("told %d times:\n%s", lines(), log.String())
	}
	tr.note(t0.Add(toldAgain), full(100)) // it goes on
	tr.note(t0.Add(toldAgain), errors.New("something else"))
	if lines() != 3 {
		t.Errorf("told %d times, want 3:\n%s", lines(), log.String())
	}
	tr.note(t0.Add(toldAgain), nil)
	tr.note(t0.Add(toldAgain), nil)
	if lines() != 4 || !strings.Contains(log.String(), "well again: snapshot not written") {
		t.Errorf("the end: %s", log.String())
	}
}
