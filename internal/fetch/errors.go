package fetch

import (
	"errors"
	"fmt"
)

// ErrMissing marks an asset that is not in the cache.
var ErrMissing = errors.New("not fetched")

// ErrUnsupported marks an asset that no package offers for this platform.
var ErrUnsupported = errors.New("no package for this platform")

// HashError is a file that is not the pinned one. It is never retried: the
// source serves something else, or the file was changed on disk.
type HashError struct {
	// File names the package or the file.
	File string
	// Want and Got are SHA-256 in hex, or sizes when those differ already.
	Want, Got string
}

// Error implements error.
func (e *HashError) Error() string {
	return fmt.Sprintf("%s is not the pinned file: want %s, got %s", e.File, e.Want, e.Got)
}

// hintError is an error with a line that tells the user what to do.
type hintError struct {
	error
	hint string
}

// withHint adds the line below an error that the command prints after "hint:".
func withHint(err error, hint string) error { return &hintError{err, hint} }

// Hint returns what the user can do about the error.
func (e *hintError) Hint() string { return e.hint }

// Unwrap returns the error without its hint.
func (e *hintError) Unwrap() error { return e.error }
