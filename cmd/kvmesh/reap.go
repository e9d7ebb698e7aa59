package main

import (
	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/internal/supervise"
)

// reapCommand is the process that cleans up after a `kvmesh up` that was killed.
func reapCommand(e *env) *cobra.Command {
	return &cobra.Command{
		Use:    "reap",
		Short:  "Clean up after a parent that was killed (internal)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE:   func(*cobra.Command, []string) error { return supervise.Reap(e.stdin) },
	}
}
