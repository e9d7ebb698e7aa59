package supervise

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// fallbackTemp is where the sockets go when TMPDIR does not do.
const fallbackTemp = "/tmp"

// MaxSocketPath is the longest path of a Unix socket in bytes, without its NUL: the
// kernel's sockaddr_un has a fixed size.
func MaxSocketPath(goos string) int {
	if goos == "darwin" {
		return 103
	}
	return 107
}

// TempDir returns an absolute folder for temporary files below which a socket of
// the relative path inside can be made: want (the value of TMPDIR) if that does,
// else /tmp. complaint says why it is not want, nil when it is. The error names
// TMPDIR and has a Hint.
func TempDir(want, inside string) (dir string, complaint, err error) {
	if dir, complaint = usable(cmp.Or(want, fallbackTemp), inside); complaint == nil {
		return dir, nil, nil
	}
	complaint = fmt.Errorf("TMPDIR=%s: %w", want, complaint)
	if dir, err = usable(fallbackTemp, inside); err != nil {
		return "", complaint, &tempError{fmt.Errorf("no folder for temporary files: %w; %s: %w", complaint, fallbackTemp, err)}
	}
	return dir, complaint, nil
}

// usable makes dir absolute and reports why no socket can be made below it.
func usable(dir, inside string) (string, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	info, err := os.Stat(abs)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return "", errors.New("no such folder")
	case err != nil:
		return "", err
	case !info.IsDir():
		return "", errors.New("not a folder")
	case unix.Access(abs, unix.W_OK|unix.X_OK) != nil:
		return "", errors.New("not writable")
	}
	if n, most := len(filepath.Join(abs, inside)), MaxSocketPath(runtime.GOOS); n > most {
		return "", fmt.Errorf("too long: a socket below it has %d bytes, at most %d work", n, most)
	}
	return abs, nil
}

// tempError is an error of TempDir with its hint.
type tempError struct{ error }

// Hint says what to do about the error.
func (*tempError) Hint() string { return "set TMPDIR to a short folder that exists and is writable" }

// Unwrap lets errors.Is see the cause.
func (e *tempError) Unwrap() error { return e.error }
