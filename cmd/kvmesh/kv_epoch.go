package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/kvcache/kvnode"
)

// kvEpochCommand shows and sets the epochs of a node. To set one is for rollbacks, of which a
// node sees nothing but a worker with weights that it knows: an old worker that starts again
// in the middle of a rollout looks the same.
func kvEpochCommand(o *kvStore) *cobra.Command {
	var set epochSetting
	c := &cobra.Command{
		Use:   "epoch [--model NAME --weights KIND:HASH]",
		Short: "Show which weights are those of each model, or say so",
		Long: `A KV node keeps a record of each model: its weights, and the number of the epoch that
began with them. When a worker comes with weights that the model never had here, a new
epoch begins: new streams find no blocks of other weights any more, from that moment
on, and their room is given back in the background. Streams that have begun go on.

Weights that the model had before do not begin an epoch by themselves unless those of
today have not been used for ten minutes: after a rollback, say so with --weights. They
are named in full or by as many digits, 8 at least, as begin no others of the model.
What the model never had is taken with --new only: all KV of its present weights goes.`,
		Example: "  kvmesh kv epoch\n  kvmesh kv epoch --model gemma-3-270m --weights sha256:6f74ab7a --dry-run   # after a rollback",
		RunE: func(c *cobra.Command, _ []string) error {
			if (set.model == "") != (set.weights == "") {
				return usagef("--model and --weights: give both or none")
			}
			if set.model == "" && (set.fresh || set.dryRun) {
				return usagef("--new and --dry-run: of what? give --model and --weights")
			}
			n, js, err := o.openNode()
			if err != nil {
				return err
			}
			defer n.Close()
			if set.model != "" {
				if done, err := set.do(c.Context(), o, n, js); done || err != nil {
					return err
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
	c.Flags().StringVar(&set.model, "model", "", "name under which the model is served")
	c.Flags().StringVar(&set.weights, "weights", "", "weights that are the model's from now on, as this command shows them, or how they begin")
	c.Flags().BoolVar(&set.fresh, "new", false, "take weights that the model never had here, and a model that nobody has served here")
	c.Flags().BoolVar(&set.dryRun, "dry-run", false, "say whose KV would go and change nothing")
	return c
}

// epochSetting is what is asked of `kvmesh kv epoch --weights`.
type epochSetting struct {
	model, weights string
	fresh, dryRun  bool
}

// do begins an epoch, or says what would go, after which it is done. A node takes any weights
// that a worker comes with, so what a person writes is checked here.
func (e epochSetting) do(ctx context.Context, o *kvStore, n *kvnode.Client, js bool) (done bool, err error) {
	list, err := n.Epochs(ctx)
	if err != nil {
		return false, err
	}
	weights, err := e.resolve(list)
	if err != nil {
		return false, err
	}
	if e.dryRun {
		return true, e.wouldGo(ctx, o, n, list, weights, js)
	}
	_, err = n.SetEpoch(ctx, e.model, weights)
	return false, err
}

// resolve returns the weights in full.
func (e epochSetting) resolve(list []kvnode.EpochState) (string, error) {
	kind, hash, _ := strings.Cut(e.weights, ":")
	hash = strings.TrimRight(hash, "…")
	digits := strings.Trim(strings.ToLower(hash), "0123456789abcdef") == ""
	if kind == "" || hash == "" || kind == "sha256" && (!digits || len(hash) > 64) {
		return "", usagef("--weights %q: want KIND:HASH, such as sha256: and 64 hexadecimal digits", e.weights)
	}
	if kind == "sha256" {
		hash = strings.ToLower(hash)
	}
	given := kind + ":" + hash
	known := knownWeights(list, e.model)
	var begin []string
	for _, w := range known {
		if w == given {
			return w, nil
		}
		if len(hash) >= 8 && strings.HasPrefix(w, given) {
			begin = append(begin, w)
		}
	}
	_, herr := hex.DecodeString(hash)
	switch {
	case len(begin) == 1:
		return begin[0], nil
	case len(begin) > 1:
		return "", usagef("--weights %s begin %d of the model's (%s): give more digits", given, len(begin), strings.Join(begin, ", "))
	case kind == "sha256" && (len(hash) != 64 || herr != nil):
		return "", withHint(usagef("--weights %s: %d digits that begin none of the model's weights; others are named in full, by 64", given, len(hash)), e.hint(list, known))
	case !e.fresh && len(known) == 0:
		return "", withHint(fmt.Errorf("no model %q is known here", e.model), e.hint(list, known))
	case !e.fresh:
		return "", withHint(fmt.Errorf("model %q never had the weights %s here", e.model, given), e.hint(list, known))
	}
	return given, nil
}

// hint names what is known, and how to say something else.
func (e epochSetting) hint(list []kvnode.EpochState, known []string) string {
	what := "the weights that it has had here are " + strings.Join(known, ", ")
	if len(known) == 0 {
		what = "no model has a record here"
		var models []string
		for _, s := range list {
			models = append(models, s.Model)
		}
		if len(models) > 0 {
			what = "the models with a record are " + strings.Join(slices.Compact(models), ", ")
		}
	}
	return what + "; --new takes others, and has the KV of the present ones go (--dry-run says what)"
}

// knownWeights lists those that a model has or had, in all kinds of names.
func knownWeights(list []kvnode.EpochState, model string) (known []string) {
	for _, s := range list {
		if s.Model != model {
			continue
		}
		known = append(append(known, s.Weights), s.Past...)
		for _, o := range s.Old {
			if !slices.Contains(known, o.Weights) {
				known = append(known, o.Weights)
			}
		}
	}
	return known
}

// epochGoes is what `kvmesh kv epoch --dry-run` says.
type epochGoes struct {
	Dir     string `json:"dir"`
	DryRun  bool   `json:"dry_run"`
	Model   string `json:"model"`
	Weights string `json:"weights"`
	// Before are the weights of today; "" = none, or the same.
	Before string `json:"before,omitempty"`
	// Go is what new streams would not find any more, in memory and in all tiers. What is
	// counted is in memory.
	Go []kvModel `json:"would_go"`
}

// wouldGo says whose KV would go.
func (e epochSetting) wouldGo(ctx context.Context, o *kvStore, n *kvnode.Client, list []kvnode.EpochState, weights string, js bool) error {
	models, err := nodeSurvey{n, 0}.known(ctx, "")
	if err != nil {
		return err
	}
	out := epochGoes{Dir: o.dir, DryRun: true, Model: e.model, Weights: weights, Go: []kvModel{}}
	kind, _, _ := strings.Cut(weights, ":")
	for _, s := range list {
		if s.Model != e.model || s.Key().Kind != kind || s.Weights == weights {
			continue
		}
		out.Before = s.Weights
		for _, m := range models {
			if slices.Contains(s.Fingerprints, m.Fingerprint) {
				out.Go = append(out.Go, kvModelView(m))
			}
		}
	}
	if js {
		return writeJSON(o.e.stdout, out)
	}
	if out.Before == "" {
		_, err = fmt.Fprintf(o.e.stdout, "model %s with %s: nothing would go\n", out.Model, weights)
		return err
	}
	fmt.Fprintf(o.e.stdout, "model %s would have %s, and no more %s\n", out.Model, weights, out.Before)
	for _, m := range out.Go {
		fmt.Fprintf(o.e.stdout, "would go: %s: %d blocks, %d tails, %d bytes of memory, and what the tiers have of it\n", m.Fingerprint[:16], m.Blocks, m.Tails, m.BlockBytes+m.TailBytes)
	}
	return nil
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
