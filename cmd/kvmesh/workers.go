package main

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// workersCommand makes `kvmesh workers`: what the control plane makes of each worker, in
// the words that Envoy has for it.
func workersCommand(e *env) *cobra.Command {
	var f meshFlags
	var output string
	c := &cobra.Command{
		Use:   "workers",
		Short: "List the workers with their status, weight and load",
		Example: `  kvmesh workers
  kvmesh workers -o json | jq '.workers[] | select(.status != "HEALTHY")'`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			js, err := asJSON(output)
			if err != nil {
				return err
			}
			m, err := f.find(e)
			if err != nil {
				return err
			}
			list, err := look(c.Context(), controlPlaneAt(m.API), fleet.NewClient(m.API).Workers)
			if err != nil {
				return err
			}
			if js {
				return writeJSON(e.stdout, fleet.WorkerList{Workers: list})
			}
			return printWorkers(e.stdout, list)
		},
	}
	f.addAPI(c)
	outputFlag(c, &output)
	return c
}

// printWorkers prints one line per worker, sorted by id as the control plane lists them.
func printWorkers(w io.Writer, list []fleet.WorkerView) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "ID\tADDRESS\tPID\tZONE\tMODEL\tSTATUS\tWEIGHT\tRUNNING\tWAITING\tKV USE\tREASON")
	for _, v := range list {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%.0f %%\t%s\n", v.ID, v.Address, pidText(v.PID), dash(v.Zone), dash(v.Model),
			v.Status, v.Weight, v.Running, v.Waiting, v.KVUsage*100, v.Reason)
	}
	return t.Flush()
}

// pidText is a process id, or a dash for a worker whose process is not known.
func pidText(pid int64) string {
	if pid == 0 {
		return "-"
	}
	return fmt.Sprint(pid)
}

// dash stands for a text that is empty, so that columns stay columns.
func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
