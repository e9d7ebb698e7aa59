package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// streamsCommand makes `kvmesh streams`, which shows what the gateway carries now, once or
// again and again.
func streamsCommand(e *env) *cobra.Command {
	var f meshFlags
	var output string
	c := &cobra.Command{
		Use:   "streams",
		Short: "List the answers that flow now, with the worker that gives each",
		Example: `  kvmesh streams
  watch -n1 kvmesh streams
  kvmesh streams -o json | jq '[.streams[].worker] | group_by(.) | map({(.[0]): length}) | add'`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			js, err := asJSON(output)
			if err != nil {
				return err
			}
			gateway, err := f.findGateway(c.Context(), e)
			if err != nil {
				return err
			}
			at := lookedAt{"the gateway", gateway, "is the gateway up, and is this its --metrics port? `kvmesh up` starts it again when it dies"}
			list, err := look(c.Context(), at, func(ctx context.Context) (list fleet.StreamList, err error) {
				return list, get(ctx, gateway+"/v1/streams", &list)
			})
			if err != nil {
				return err
			}
			if js {
				return writeJSON(e.stdout, list)
			}
			return printStreams(e.stdout, list.Streams)
		},
	}
	f.addAPI(c)
	f.addGateway(c)
	outputFlag(c, &output)
	return c
}

// printStreams prints one line per stream, the oldest first.
func printStreams(w io.Writer, list []fleet.StreamView) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "ID\tMODEL\tPOOL\tWORKER\tMOVES\tKIND\tEVENTS\tAGE")
	for _, v := range list {
		kind := "whole"
		if v.Stream {
			kind = "stream"
		}
		worker := dash(v.Worker)
		if v.Next != "" {
			worker += " → " + v.Next
		}
		age := time.Duration(v.Seconds * float64(time.Second)).Round(100 * time.Millisecond)
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%s\t%d\t%v\n", dash(v.ID), v.Model, v.Pool, worker, len(v.Moves), kind, v.Events, age)
	}
	return t.Flush()
}
