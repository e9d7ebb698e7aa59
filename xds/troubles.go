package xds

import (
	"errors"
	"io/fs"
	"log/slog"
	"time"
)

// toldAgain is how often trouble that goes on is logged.
const toldAgain = time.Minute

// trouble logs what fails again and again: when it begins, when its cause changes, every
// toldAgain, and its end. It is one goroutine's.
type trouble struct {
	log  *slog.Logger
	what string // "snapshot not written"

	cause string // "" while all is well
	last  time.Time
}

// note takes the outcome of one try.
func (t *trouble) note(now time.Time, err error) {
	cause := ""
	if err != nil {
		cause = rootCause(err)
	}
	switch {
	case err != nil && (cause != t.cause || now.Sub(t.last) >= toldAgain):
		t.log.Error(t.what+", it is tried again until it can be", "err", err)
		t.last = now
	case err == nil && t.cause != "":
		t.log.Info("well again: "+t.what, "was", t.cause)
	}
	t.cause = cause
}

// rootCause is the error without the names of files, which differ from try to try.
func rootCause(err error) string {
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		return p.Err.Error()
	}
	return err.Error()
}
