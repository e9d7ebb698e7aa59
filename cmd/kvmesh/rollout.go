package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/rollout"
	"github.com/kvmesh/kvmesh/xds/registry"
)

// rolloutOptions are the flags of `kvmesh rollout`.
type rolloutOptions struct {
	mesh               meshFlags
	model, pool        string
	restart, back      string
	journal, output    string
	dryRun, rollback   bool
	startOver          bool
	least              int
	bounds             rollout.Config
	drainTimeout       time.Duration
	waitStreams        bool
	restartGiven       bool
	rollbackCmdIsGiven bool
}

// journal is a rollout's file: what was asked for and how far it came.
type journal struct {
	Command  string       `json:"restart_cmd"`
	Rollback string       `json:"rollback_cmd,omitempty"`
	Back     bool         `json:"back"` // it is itself a rollback
	Plan     rollout.Plan `json:"plan"`
}

func rolloutCommand(e *env) *cobra.Command {
	var o rolloutOptions
	c := &cobra.Command{
		Use:   "rollout [WORKER…]",
		Short: "Restart workers one at a time without losing a stream",
		Long: `Restart workers one after the other: drain, restart, wait until ready, watch, next.
A worker is drained only while enough others of its pool take requests. Its streams
move to others of the same weights; the last worker of its weights waits for its own.

The restart is --restart-cmd, run by sh with KVMESH_WORKER, KVMESH_WORKER_ADDRESS,
KVMESH_WORKER_POOL and KVMESH_WORKER_PID set; without it, workers of a 'kvmesh up' on
this machine get SIGTERM and are started again by it.

A worker that misses a bound stops the rollout and takes no requests. The same command
goes on from there, also after an interruption; --rollback goes back, with
--rollback-cmd, over the workers that were restarted, the last one first.`,
		Example: `  kvmesh rollout --dry-run                       # all workers, in this order
  kvmesh rollout                                 # restart them
  kvmesh rollout worker-1 worker-3
  kvmesh rollout --model llama-70b --restart-cmd 'ssh $KVMESH_WORKER systemctl restart kvmesh' \
    --rollback-cmd 'ssh $KVMESH_WORKER /opt/kvmesh/previous'
  kvmesh rollout --rollback`,
		ValidArgsFunction: workerNames(e, &o.mesh),
		RunE: func(c *cobra.Command, args []string) error {
			o.restartGiven, o.rollbackCmdIsGiven = c.Flags().Changed("restart-cmd"), c.Flags().Changed("rollback-cmd")
			return runRollout(c.Context(), e, &o, args)
		},
	}
	opsFlags(c, &o.mesh)
	outputFlag(c, &o.output)
	fl := c.Flags()
	fl.StringVar(&o.model, "model", "", "only workers of this model")
	fl.StringVar(&o.pool, "pool", "", "only workers of this pool")
	fl.StringVar(&o.restart, "restart-cmd", "", "shell command that restarts $KVMESH_WORKER (default: SIGTERM, for workers of 'kvmesh up' on this machine)")
	fl.StringVar(&o.back, "rollback-cmd", "", "shell command that brings the old version of $KVMESH_WORKER back (default: --restart-cmd)")
	fl.StringVar(&o.journal, "journal", "", "file that says how far it came (default .kvmesh/rollout.json)")
	fl.BoolVar(&o.dryRun, "dry-run", false, "only say what would be done")
	fl.BoolVar(&o.rollback, "rollback", false, "undo the last rollout")
	fl.BoolVar(&o.startOver, "start-over", false, "forget an unfinished rollout")
	fl.IntVar(&o.least, "min-ready", -1, "how many other workers of the pool must take requests (default: the pool's minimum share)")
	fl.DurationVar(&o.drainTimeout, "timeout", 300*time.Second, "how long a drain may take")
	fl.BoolVar(&o.waitStreams, "wait-streams", false, "let running streams end where they are instead of moving them")
	fl.DurationVar(&o.bounds.Ready, "ready-timeout", 600*time.Second, "how long a worker may take until it is ready")
	fl.DurationVar(&o.bounds.Observe, "observe", 10*time.Second, "how long a new worker is watched")
	fl.Float64Var(&o.bounds.MaxErrorRate, "max-error-rate", 0.05, "largest share of failed requests meanwhile")
	return c
}

func runRollout(ctx context.Context, e *env, o *rolloutOptions, args []string) error {
	js, err := asJSON(o.output)
	if err != nil {
		return err
	}
	m, err := openMesh(ctx, e, o.mesh)
	if err != nil {
		return err
	}
	m.least = o.least
	if o.journal == "" {
		o.journal = filepath.Join(stateFolder, "rollout.json")
	}
	j, err := o.prepare(ctx, m, args)
	if err != nil {
		return err
	}
	if o.dryRun {
		return printPlan(e, j.Plan, js)
	}
	m.command = j.Command
	if err := o.run(ctx, e, m, j); err != nil {
		return err
	}
	return printPlan(e, j.Plan, js)
}

// run carries the journal's plan out.
func (o *rolloutOptions) run(ctx context.Context, e *env, m *liveMesh, j *journal) error {
	c := o.bounds
	c.Drain = rollout.DrainConfig{Timeout: o.drainTimeout, KeepStreams: o.waitStreams, Progress: func(l rollout.Left) {
		fmt.Fprintf(e.stderr, "%s: %d streams, %d requests left\n", l.Worker, l.Streams, l.Requests)
	}}
	c.Save = func(p rollout.Plan) error { return o.save(j, p) }
	c.Progress = func(worker, what string) { fmt.Fprintf(e.stderr, "%s: %s\n", worker, what) }
	if err := c.Save(j.Plan); err != nil {
		return err
	}
	err := rollout.Run(ctx, m, &j.Plan, c)
	again := "run the same command to go on"
	if o.journal != filepath.Join(stateFolder, "rollout.json") {
		again += " (with --journal " + o.journal + ")"
	}
	if b, ok := errors.AsType[*rollout.BoundError](err); ok && !j.Back {
		return withHint(fmt.Errorf("the rollout stopped at %w", err), fmt.Sprintf("%s takes no requests now; %s, or `%s rollout --rollback` to go back", b.Worker, again, e.self()))
	}
	if err != nil {
		return withHint(fmt.Errorf("the rollout stopped: %w", err), again)
	}
	return nil
}

// prepare makes the journal: a new one, the unfinished one, or the way back.
func (o *rolloutOptions) prepare(ctx context.Context, m *liveMesh, args []string) (*journal, error) {
	old, err := readJournal(o.journal)
	if err != nil {
		return nil, err
	}
	if o.rollback {
		return o.wayBack(old)
	}
	list, err := m.Workers(ctx)
	if err != nil {
		return nil, err
	}
	ids := args
	if len(ids) == 0 {
		ids = o.selected(list)
	}
	if len(ids) == 0 {
		return nil, withHint(errors.New("no worker is meant"), "`kvmesh workers` lists them with their models and pools")
	}
	if old != nil && old.Plan.Left() > 0 && !o.startOver {
		if !o.continues(old, ids) {
			return nil, withHint(fmt.Errorf("an unfinished rollout of other workers is in %s", o.journal), "finish it, undo it with --rollback, or forget it with --start-over")
		}
		return old, nil
	}
	plan, err := rollout.NewPlan(list, ids)
	if err != nil {
		return nil, drainHint(err, "")
	}
	return &journal{Command: o.restart, Rollback: o.back, Plan: plan}, nil
}

// continues reports whether the unfinished rollout is what the command line asks
// for. Flags that are left out are those of before.
func (o *rolloutOptions) continues(old *journal, ids []string) bool {
	if old.Back || o.restartGiven && o.restart != old.Command {
		return false
	}
	if o.rollbackCmdIsGiven {
		old.Rollback = o.back
	}
	for _, s := range old.Plan.Steps {
		// One that is in the middle of its restart may be missing in the list.
		if s.State != rollout.Restarting && !slices.Contains(ids, s.Worker) {
			return false
		}
	}
	return len(old.Plan.Steps) >= len(ids)
}

// wayBack is the rollout that undoes the last one, or goes on with undoing it.
func (o *rolloutOptions) wayBack(old *journal) (*journal, error) {
	switch {
	case old == nil:
		return nil, withHint(errors.New("there is no rollout to undo"), "looked in "+o.journal+"; --journal FILE names another")
	case old.Back && old.Plan.Left() > 0:
		return old, nil
	case old.Back:
		return nil, errors.New("the last rollout was undone already")
	}
	back := old.Plan.Back()
	if len(back.Steps) == 0 {
		return nil, errors.New("the last rollout restarted no worker: there is nothing to undo")
	}
	command := old.Rollback
	if o.rollbackCmdIsGiven {
		command = o.back
	}
	if command == "" {
		command = old.Command
	}
	return &journal{Command: command, Back: true, Plan: back}, nil
}

// selected are the workers that --model and --pool leave.
func (o *rolloutOptions) selected(list []fleet.WorkerView) []string {
	var ids []string
	for _, w := range list {
		if (o.model == "" || w.Model == o.model || slices.Contains(w.Aliases, o.model)) && (o.pool == "" || w.Pool == o.pool) {
			ids = append(ids, w.ID)
		}
	}
	return ids
}

func (o *rolloutOptions) save(j *journal, p rollout.Plan) error {
	j.Plan = p
	data, err := json.MarshalIndent(j, "", "  ")
	if err != nil {
		return fmt.Errorf("store the rollout: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(o.journal), 0o700); err != nil {
		return fmt.Errorf("store the rollout: %w", err)
	}
	if err := registry.WriteSynced(o.journal, data); err != nil {
		return fmt.Errorf("store the rollout: %w", err)
	}
	return nil
}

// readJournal returns nil where there is none.
func readJournal(name string) (*journal, error) {
	data, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the last rollout: %w", err)
	}
	var j journal
	if err := json.Unmarshal(data, &j); err != nil {
		return nil, withHint(fmt.Errorf("read the last rollout: %s: %w", name, err), "remove the file to forget it")
	}
	return &j, nil
}

func printPlan(e *env, p rollout.Plan, js bool) error {
	if js {
		return writeJSON(e.stdout, p)
	}
	t := tabwriter.NewWriter(e.stdout, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "WORKER\tPOOL\tSTATE\tREASON")
	for _, s := range p.Steps {
		fmt.Fprintln(t, strings.Join([]string{s.Worker, s.Pool, string(s.State), dash(s.Reason)}, "\t"))
	}
	return t.Flush()
}
