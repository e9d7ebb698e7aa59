package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/internal/drill"
	"github.com/kvmesh/kvmesh/internal/fleet"
)

// drillOptions are what a drill does.
type drillOptions struct {
	fault  string
	prompt string
	model  string // "" for that of the first worker
	tokens int    // of the answer
	at     int    // tokens after which the fault happens
}

// drillReport is what a drill found.
type drillReport struct {
	Fault  string `json:"fault"`
	Model  string `json:"model"`
	From   string `json:"from"`         // worker that the fault was done to
	To     string `json:"to,omitempty"` // worker that went on, "" where the answer stayed
	Cause  string `json:"cause,omitempty"`
	KV     string `json:"kv,omitempty"` // exact, restored, quantized, replayed, text or anew
	At     int    `json:"at"`           // tokens that had come
	Tokens int    `json:"tokens"`       // that came in all
	// GapMS is the longest pause after the fault, MedianMS the usual one.
	GapMS    float64 `json:"gap_ms"`
	MedianMS float64 `json:"median_ms"`
	Restored int     `json:"tokens_restored"` // whose KV the new worker had
	Computed int     `json:"tokens_computed"` // that it had to compute before the next one
	Error    string  `json:"error,omitempty"` // that ended the answer
	drill.Verdict
	Before string `json:"text_before"`
	After  string `json:"text_after"`
}

// drillCommand makes `kvmesh drill`. It fails when the answer did not survive, so that it
// can stand in a script.
func drillCommand(e *env) *cobra.Command {
	var f meshFlags
	var output string
	var o drillOptions
	c := &cobra.Command{
		Use:   "drill " + strings.Join(faultNames(), "|"),
		Short: "Harm the worker of a running answer and show how it goes on",
		Long: `Ask twice for the same answer, and the second time do something to the worker that
gives it: kill it with SIGKILL, hang it with SIGSTOP, drain it, spoil the stored KV and
then kill it (corrupt), let it run a tenth of the time (slow), or kill all workers of
its zone. Then print the text with the place where it moved, the gap, and the tokens
that were lost or repeated against the first answer. All but drain need the workers on
this machine. What was stopped or drained is set right again at the end; the killed
come back by themselves under 'kvmesh up'.`,
		Example: `  kvmesh drill kill
  kvmesh drill hang --prompt 'The capital of France is' --tokens 80 --at 30
  kvmesh drill drain -o json`,
		ValidArgs: faultNames(),
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		RunE: func(c *cobra.Command, args []string) error {
			js, err := asJSON(output)
			if err != nil {
				return err
			}
			if o.fault = args[0]; o.at < 1 || o.tokens <= o.at {
				return usagef("--at %d --tokens %d: want at least one token before the fault and one after it", o.at, o.tokens)
			}
			d, err := newDriller(c.Context(), e, f)
			if err != nil {
				return err
			}
			r, err := d.run(c.Context(), o)
			if err != nil {
				return err
			}
			if js {
				err = writeJSON(e.stdout, r)
			} else {
				_, err = io.WriteString(e.stdout, r.text(o.prompt))
			}
			return errors.Join(err, r.failure())
		},
	}
	opsFlags(c, &f)
	outputFlag(c, &output)
	c.Flags().StringVar(&o.prompt, "prompt", "The three primary colors are", "prompt of the completion")
	c.Flags().StringVar(&o.model, "model", "", "model to ask (default: that of the first worker)")
	c.Flags().IntVar(&o.tokens, "tokens", 64, "tokens of the answer")
	c.Flags().IntVar(&o.at, "at", 20, "tokens after which it happens")
	return c
}

// driller runs drills against one mesh.
type driller struct {
	mesh   runningMesh
	client *fleet.Client
	note   func(format string, args ...any) // progress, for people
}

// newDriller finds the mesh.
func newDriller(ctx context.Context, e *env, f meshFlags) (*driller, error) {
	m, err := f.find(e)
	if err != nil {
		return nil, err
	}
	if m.Gateway, err = f.findGateway(ctx, e); err != nil {
		return nil, err
	}
	if m.OpenAI == "" {
		return nil, withHint(errors.New("the address of the OpenAI API is not known"), "run the drill in the folder of `kvmesh up`")
	}
	return &driller{mesh: m, client: fleet.NewClient(m.API), note: func(format string, args ...any) {
		fmt.Fprintf(e.stderr, format+"\n", args...)
	}}, nil
}

// run asks twice, the second time with the fault.
func (d *driller) run(ctx context.Context, o drillOptions) (*drillReport, error) {
	list, err := d.client.Workers(ctx)
	if err != nil {
		return nil, withHint(err, hintControlPlane)
	}
	if o.model == "" {
		if len(list) == 0 {
			return nil, errors.New("the mesh has no workers")
		}
		o.model = list[0].Model
	}
	d.note("asking %s for %d tokens, undisturbed", o.model, o.tokens)
	want, err := d.ask(ctx, o, nil)
	if err != nil {
		return nil, err
	}
	if want.failed != "" {
		return nil, fmt.Errorf("the undisturbed answer failed: %s", want.failed)
	}
	if len(want.tokens) <= o.at {
		return nil, withHint(fmt.Errorf("the undisturbed answer ends after %d tokens, before --at %d", len(want.tokens), o.at), "take another --prompt, or a smaller --at")
	}
	h := &harm{d: d, fault: o.fault, list: list}
	defer h.undo()
	got, err := d.ask(ctx, o, h.do)
	if err != nil {
		return nil, err
	}
	return d.report(o, h, want, got), nil
}

// report puts together what was seen.
func (d *driller) report(o drillOptions, h *harm, want, got *heard) *drillReport {
	cut := min(o.at, len(got.tokens))
	for i, at := range got.times { // tokens that were on their way when it happened
		if at.Before(h.at) {
			cut = max(cut, i+1)
		}
	}
	r := &drillReport{
		Fault: o.fault, Model: o.model, From: h.worker, At: cut, Tokens: len(got.tokens), Error: got.failed,
		Verdict: judge(want, got, cut),
		Before:  strings.Join(got.tokens[:cut], ""), After: strings.Join(got.tokens[cut:], ""),
	}
	r.GapMS, r.MedianMS = pauses(got.times, cut)
	if n := len(got.moves); n > 0 {
		last := got.moves[n-1]
		r.To, r.Cause, r.KV, r.Restored, r.Computed = last.To, last.Cause, last.KV, last.Restored, last.Computed
	}
	return r
}

// judge holds an answer against the undisturbed one: by the ids of the tokens if both
// have them.
func judge(want, got *heard, cut int) drill.Verdict {
	w, g := want.told(), got.told()
	if (len(want.ids) == len(want.tokens)) != (len(got.ids) == len(got.tokens)) {
		w, g = want.tokens, got.tokens
	}
	return drill.Judge(w, g, cut)
}

// pauses returns the longest pause from the token before the cut on, and the median of
// all, in milliseconds.
func pauses(times []time.Time, cut int) (longest, median float64) {
	var all []float64
	for i := 1; i < len(times); i++ {
		ms := float64(times[i].Sub(times[i-1]).Microseconds()) / 1000
		if all = append(all, ms); i >= cut {
			longest = max(longest, ms)
		}
	}
	if slices.Sort(all); len(all) > 0 {
		median = all[len(all)/2]
	}
	return longest, median
}

// text is the report for a person.
func (r *drillReport) text(prompt string) string {
	w := &strings.Builder{}
	mark := fmt.Sprintf(" ⟦%s: %s went on", r.Fault, r.From)
	if r.To != "" {
		mark = fmt.Sprintf(" ⟦%s: %s → %s, %s", r.Fault, r.From, r.To, r.KV)
	}
	fmt.Fprintf(w, "%s%s%s⟧ %s\n\n", prompt, r.Before, mark, r.After)
	fmt.Fprintf(w, "tokens     %d before, %d after; %d lost, %d repeated", r.At, r.Tokens-r.At, r.Lost, r.Repeated)
	switch {
	case r.Equal:
		fmt.Fprintln(w, "; all as in the undisturbed answer")
	case r.DivergedAt >= 0:
		fmt.Fprintf(w, "; another way than the undisturbed answer from token %d on\n", r.DivergedAt)
	default:
		fmt.Fprintf(w, "; %d missing at the end\n", r.Missing)
	}
	fmt.Fprintf(w, "gap        %.0f ms (usually %.0f ms between two tokens)\n", r.GapMS, r.MedianMS)
	if r.To != "" {
		fmt.Fprintf(w, "move       %s: KV of %d tokens restored, %d computed\n", r.Cause, r.Restored, r.Computed)
	}
	if r.Error != "" {
		fmt.Fprintf(w, "error      %s\n", r.Error)
	}
	return w.String()
}

// failure is what makes a drill fail: the answer did not survive.
func (r *drillReport) failure() error {
	switch {
	case r.Error != "":
		return fmt.Errorf("the answer ended with an error: %s", r.Error)
	case r.Lost+r.Repeated+r.Missing > 0:
		return fmt.Errorf("%d tokens were lost, %d repeated, %d are missing at the end", r.Lost, r.Repeated, r.Missing)
	}
	return nil
}
