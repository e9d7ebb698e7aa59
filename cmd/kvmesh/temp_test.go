package main

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"syscall"
	"testing"
)

// A full file system is named first, with what helps; anything else keeps its own hint.
func TestFullError(t *testing.T) {
	write := func(cause error) error {
		return fmt.Errorf("sign: %w", &fs.PathError{Op: "write", Path: "/x/y", Err: cause})
	}
	for _, cause := range []error{syscall.ENOSPC, syscall.EDQUOT} {
		err := fullError(write(cause), "/x", "set TMPDIR")
		h, ok := errors.AsType[hinter](err)
		if !strings.HasPrefix(err.Error(), "the file system of /x is full: sign: ") || !ok ||
			h.Hint() != "free room there (`df -h /x` shows it), or set TMPDIR" || !errors.Is(err, cause) {
			t.Errorf("%v, hint %v", err, h)
		}
	}
	err := fullError(write(syscall.EACCES), "/x", "set TMPDIR")
	if h, ok := errors.AsType[hinter](err); !ok || h.Hint() != "set TMPDIR" || strings.Contains(err.Error(), "full") {
		t.Errorf("%v", err)
	}
}
