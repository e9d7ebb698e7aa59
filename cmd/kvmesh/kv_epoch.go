package main

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/kvcache/kvnode"
)

// kvEpochCommand shows and sets the epochs of a node. To set one is for rollbacks, of which a
// node sees nothing but a worker with weights that it knows: an old worker that starts again
// in the middle of a rollout looks the same.
func kvEpochCommand(o *kvStore) *cobra.Command {
	var model, weights string
	c := &cobra.Command{
		Use:   "epoch [--model NAME --weights KIND:HASH]",
		Short: "Show which weights are those of each model, or say so",
		Long: `A KV node keeps a record of each model: its weights, and the number of the epoch that
began with them. When a worker comes with weights that the model never had here, a new
epoch begins: new streams find no blocks of other weights any more, from that moment
on, and their room is given back in the background. Streams that have begun go on.

Weights that the model had before do not begin an epoch by themselves unless those of
today have not been used for ten minutes: after a rollback, say so with --weights.`,
		Example: "  kvmesh kv epoch\n  kvmesh kv epoch --model gemma-3-270m --weights sha256:6f74ab7a…   # after a rollback",
		RunE: func(c *cobra.Command, _ []string) error {
			if (model == "") != (weights == "") {
				return usagef("--model and --weights: give both or none")
			}
			n, js, err := o.openNode()
			if err != nil {
				return err
			}
			defer n.Close()
			if model != "" {
				if _, err := n.SetEpoch(c.Context(), model, weights); err != nil {
					return withHint(err, "`kvmesh kv epoch` shows the weights that models have had")
				}
			}
			list, err := n.Epochs(c.Context())
			if err != nil {
				return err
			}
			if js {
				return writeJSON(o.e.stdout, map[string]any{"dir": o.dir, "epochs": append([]kvnode.EpochState{}, list...)})
			}
			return printEpochs(o.e.stdout, list)
		},
	}
	c.Flags().StringVar(&model, "model", "", "name under which the model is served")
	c.Flags().StringVar(&weights, "weights", "", "weights that are the model's from now on, as this command shows them")
	return c
}

// printEpochs writes a table. What is left of old versions is of the memory alone in bytes,
// and of all tiers in versions: how much of a bucket is theirs nobody counts.
func printEpochs(w io.Writer, list []kvnode.EpochState) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "MODEL\tEPOCH\tWEIGHTS\tOLD VERSIONS LEFT\tBYTES LEFT")
	for _, s := range list {
		fmt.Fprintf(t, "%s\t%d\t%s\t%d\t%d\n", s.Model, s.Number, s.Weights, s.LeftVersions, s.LeftBytes)
	}
	return t.Flush()
}
