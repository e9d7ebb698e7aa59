package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/internal/rollout"
)

// drainCommand makes `kvmesh drain`. An interrupted one leaves the drain set: it is what
// the operator asked for.
func drainCommand(e *env) *cobra.Command {
	var f meshFlags
	var output string
	o := rollout.DrainDefaults()
	c := &cobra.Command{
		Use:   "drain WORKER",
		Short: "Move a worker's streams to others and wait until it is empty",
		Long: `Drain a worker: it gets no new requests, its streams go on at other workers of the
same weights, and the command returns when nothing runs there any more. The drain is
stored and holds until 'kvmesh undrain', also over restarts of the worker and of the
control plane. With --wait-streams the running streams end where they are.`,
		Example: `  kvmesh drain worker-2
  kvmesh drain worker-2 --wait-streams --timeout 10m
  kvmesh undrain worker-2`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: workerNames(e, &f),
		RunE: func(c *cobra.Command, args []string) error {
			js, err := asJSON(output)
			if err != nil {
				return err
			}
			if err := checkSpans(c.Flags(), span{"timeout", shortest, anyTime}); err != nil {
				return err
			}
			m, err := openMesh(c.Context(), e, f)
			if err != nil {
				return err
			}
			o.Progress = func(l rollout.Left) {
				fmt.Fprintf(e.stderr, "%s: %d streams, %d requests left\n", l.Worker, l.Streams, l.Requests)
			}
			d, err := rollout.Drain(c.Context(), m, args[0], o)
			if err != nil {
				return drainHint(err, args[0])
			}
			if js {
				return writeJSON(e.stdout, d)
			}
			_, err = fmt.Fprintf(e.stdout, "%s is empty after %.1f s; %d streams were there. `%s undrain %s` takes it back.\n", d.Worker, d.Seconds, d.Streams, e.self(), d.Worker)
			return err
		},
	}
	opsFlags(c, &f)
	outputFlag(c, &output)
	c.Flags().DurationVar(&o.Timeout, "timeout", o.Timeout, "how long it may take")
	c.Flags().BoolVar(&o.KeepStreams, "wait-streams", false, "let running streams end where they are instead of moving them")
	return c
}

// drainHint says what to do about a drain that did not end well.
func drainHint(err error, worker string) error {
	if _, ok := errors.AsType[*rollout.NotEmptyError](err); ok {
		return withHint(err, "it stays drained; wait longer with --timeout, or take it back with `kvmesh undrain "+worker+"`")
	}
	if errors.Is(err, rollout.ErrUnknown) {
		return withHint(err, "`kvmesh workers` lists them")
	}
	return err
}

// undrainCommand makes `kvmesh undrain`. It also takes a worker that is away, which then
// takes requests when it is back.
func undrainCommand(e *env) *cobra.Command {
	var f meshFlags
	c := &cobra.Command{
		Use:               "undrain WORKER",
		Short:             "Let a drained worker take requests again",
		Example:           "  kvmesh undrain worker-2",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: workerNames(e, &f),
		RunE: func(c *cobra.Command, args []string) error {
			m, err := openMesh(c.Context(), e, f)
			if err != nil {
				return err
			}
			if err := m.SetDrain(c.Context(), args[0], false, false); err != nil {
				return withHint(err, "`kvmesh workers` lists them")
			}
			_, err = fmt.Fprintf(e.stdout, "%s takes requests again as soon as it is ready.\n", args[0])
			return err
		},
	}
	opsFlags(c, &f)
	return c
}
