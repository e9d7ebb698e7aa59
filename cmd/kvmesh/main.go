// Command kvmesh runs an OpenAI-compatible inference mesh behind a stock Envoy:
// the control plane, the gateway and the workers are subcommands of this one
// binary. This package is the only reader of the environment and of signals.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	_ "github.com/kvmesh/kvmesh/cmd/kvmesh/libffi" // complains before another initializer panics
)

// Exit codes of the command.
const (
	exitFailure     = 1
	exitUsage       = 2
	exitInterrupted = 130 // as shells name the end by SIGINT
)

func main() {
	ctx, cancel := context.WithCancel(context.Background())
	go heed(cancel)
	e := &env{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, getenv: os.Getenv, name: os.Args[0]}
	os.Exit(run(ctx, e, os.Args[1:]))
}

// heed cancels at the first signal that asks to end. The second ends a command that
// hangs, or that somebody is tired of waiting for; children end with it.
func heed(cancel func()) {
	// Not by restoring the default action: that may be to ignore the signal, as
	// for a command that a script started with &.
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, endings()...)
	<-signals
	cancel()
	<-signals
	os.Exit(exitInterrupted)
}

// endings are the signals that ask a command to end. A terminal that is closed
// sends SIGHUP; under nohup it is ignored, and stays so.
func endings() []os.Signal {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		signals = append(signals, syscall.SIGHUP)
	}
	return signals
}

// run executes one command line and returns the process's exit code.
func run(ctx context.Context, e *env, args []string) int {
	root := newRoot(e)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = errors.New("interrupted")
	}
	printError(e.stderr, err)
	// What cobra refuses before a command's own code runs is a wrong call.
	if _, ok := errors.AsType[usageError](err); ok || !e.started {
		return exitUsage
	}
	return exitFailure
}

// printError writes an error as one line, and its hint as another.
func printError(w io.Writer, err error) {
	fmt.Fprintf(w, "kvmesh: %v\n", err)
	if h, ok := errors.AsType[hinter](err); ok && h.Hint() != "" {
		fmt.Fprintf(w, "hint: %s\n", h.Hint())
	}
}

// hinter is an error that knows what the user can do about it.
type hinter interface {
	error
	Hint() string
}

// hintError adds a hint to an error.
type hintError struct {
	error
	hint string
}

// withHint returns err with a line for the user that says what to do about it.
func withHint(err error, hint string) error { return hintError{err, hint} }

// Hint implements hinter.
func (h hintError) Hint() string { return h.hint }

// Unwrap lets errors.Is see through the hint.
func (h hintError) Unwrap() error { return h.error }

// usageError is a wrong call that a command found itself; it exits with 2.
type usageError struct{ error }

// Unwrap lets errors.Is see through the mark.
func (u usageError) Unwrap() error { return u.error }

// usagef returns an error that makes the command exit with 2.
func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }
