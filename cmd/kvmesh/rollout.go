package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/rollout"
	"github.com/kvmesh/kvmesh/internal/supervise"
)

// rolloutOptions are the flags of `kvmesh rollout`.
type rolloutOptions struct {
	mesh        meshFlags
	model, pool string // "" for all
	// restart and back are shell commands; "" for SIGTERM, and for the same as restart.
	restart, back    string
	journal, output  string
	journalFlag      string // as the user gave it, to be repeated in hints
	dryRun, rollback bool
	startOver        bool
	least            int // negative for the pool's own minimum
	bounds           rollout.Config
	// What the command line names overrides what the journal has.
	restartGiven       bool
	rollbackCmdIsGiven bool
}

// rolloutCommand makes `kvmesh rollout`. All of its work is in internal/rollout, which
// knows no files and no processes: the command adds the journal, its lock, the pools'
// leases, and the ways to restart a worker.
func rolloutCommand(e *env) *cobra.Command {
	o := rolloutOptions{bounds: rollout.Defaults()}
	c := &cobra.Command{
		Use:   "rollout [WORKER…]",
		Short: "Restart workers one at a time without losing a stream",
		Long: `Restart workers one after the other: drain, restart, wait until ready, watch, next.
A worker is drained only while enough others of its pool take requests. Its streams
move to others of the same weights; the last worker of its weights waits for its own.

The restart is --restart-cmd, run by sh with KVMESH_WORKER, KVMESH_WORKER_ADDRESS,
KVMESH_WORKER_POOL and KVMESH_WORKER_PID set (the last is empty while the worker is
away); without it, workers of a 'kvmesh up' on this machine get SIGTERM and are started
again by it.

A worker that misses a bound stops the rollout and takes no requests; so does one of
whose answers the gateway saw too many break. The same command goes on from there, also
after an interruption and while the worker is away; --rollback goes back, with
--rollback-cmd, over the workers that were restarted, the last one first. A worker that
was only drained is given back. One that an operator had drained before is restarted
and stays drained. A pool has one rollout at a time.`,
		Example: `  kvmesh rollout --dry-run                       # all workers, in this order
  kvmesh rollout                                 # restart them
  kvmesh rollout worker-1 worker-3
  kvmesh rollout --model llama-70b --restart-cmd 'ssh $KVMESH_WORKER systemctl restart kvmesh' \
    --rollback-cmd 'ssh $KVMESH_WORKER /opt/kvmesh/previous'
  kvmesh rollout --rollback`,
		ValidArgsFunction: workerNames(e, &o.mesh),
		RunE: func(c *cobra.Command, args []string) error {
			o.restartGiven, o.rollbackCmdIsGiven = c.Flags().Changed("restart-cmd"), c.Flags().Changed("rollback-cmd")
			if err := checkRolloutFlags(c.Flags(), &o); err != nil {
				return err
			}
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
	fl.DurationVar(&o.bounds.Drain.Timeout, "timeout", o.bounds.Drain.Timeout, "how long a drain may take")
	fl.BoolVar(&o.bounds.Drain.KeepStreams, "wait-streams", false, "let running streams end where they are instead of moving them")
	fl.DurationVar(&o.bounds.Ready, "ready-timeout", o.bounds.Ready, "how long a worker may take until it is ready")
	fl.DurationVar(&o.bounds.Observe, "observe", o.bounds.Observe, "how long a new worker is watched")
	fl.Float64Var(&o.bounds.MaxErrorRate, "max-error-rate", o.bounds.MaxErrorRate, "largest share of failed requests meanwhile, 0 to 1")
	return c
}

// checkRolloutFlags reports the first flag whose value makes no sense.
func checkRolloutFlags(flags *pflag.FlagSet, o *rolloutOptions) error {
	least := int64(-1)
	if flags.Changed("min-ready") {
		least = 0
	}
	if rate := o.bounds.MaxErrorRate; !(rate >= 0 && rate <= 1) { // NaN is neither
		return usagef("--max-error-rate %v: want a share from 0 to 1", rate)
	}
	return checkSpans(flags, span{"min-ready", least, mostNumber}, span{"timeout", shortest, anyTime},
		span{"ready-timeout", shortest, anyTime}, span{"observe", 0, anyTime})
}

// runRollout plans the rollout, refuses what can never be done before anything is
// touched, and carries it out. With --dry-run nothing is written, locked or leased.
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
	o.journalFlag = " --journal " + o.journal
	if o.journal == "" {
		o.journal, o.journalFlag = filepath.Join(stateFolder, "rollout.json"), ""
	}
	if !o.dryRun {
		l, err := supervise.Take(o.journal + ".lock")
		if h, ok := errors.AsType[*supervise.HeldError](err); ok {
			return withHint(fmt.Errorf("a rollout with this journal is under way, process %d", h.PID), "wait for its end, or name another with --journal")
		}
		if err != nil {
			return err
		}
		defer l.Close()
	}
	j, err := o.prepare(ctx, e, m, args)
	if err != nil {
		return err
	}
	rooms, err := rollout.Rooms(ctx, m, j.Plan)
	if err != nil {
		return err
	}
	if o.dryRun {
		return printRooms(e, j.Plan, rooms, js)
	}
	for _, r := range rooms {
		if len(r.Never) > 0 {
			return withHint(errors.New(r.String()), "--min-ready 0 lets the pool go without")
		}
	}
	m.command = j.Command
	if err := o.alone(ctx, e, m, j); err != nil {
		return err
	}
	return printPlan(e, j.Plan, js)
}

// alone carries the journal's plan out while no other rollout may touch its pools.
func (o *rolloutOptions) alone(ctx context.Context, e *env, m *liveMesh, j *journal) error {
	steps := j.Plan.Steps
	if j.before != nil { // what it left is given back
		steps = slices.Concat(steps, j.before.Plan.Lent().Steps)
	}
	held, release, err := rollout.Hold(ctx, m.client, rollout.Plan{Steps: steps}.Pools(), o.owner())
	if errors.Is(err, fleet.ErrLeased) {
		return withHint(err, "wait for its end; the right of one that was killed ends by itself")
	}
	if err != nil {
		return withHint(err, hintControlPlane)
	}
	defer release()
	err = o.run(held, e, m, j)
	if held.Err() != nil && ctx.Err() == nil {
		err = errors.Join(context.Cause(held), err)
	}
	return err
}

// owner says to others whose the leases are. A journal whose path is too long for that is
// told by a hash of the path.
func (o *rolloutOptions) owner() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown" // it is for people
	}
	who := fmt.Sprintf("process %d on %.64s, journal ", os.Getpid(), host)
	if len(who)+len(o.journal) <= fleet.MostOwner {
		return who + o.journal
	}
	return who + fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(o.journal)))
}

// run carries the journal's plan out. The journal on disk is ahead of what is done: a
// step's state is stored before the step begins, so that whoever goes on after a death
// of this process knows what may have happened. The error's hint says how to go on.
func (o *rolloutOptions) run(ctx context.Context, e *env, m *liveMesh, j *journal) error {
	c := o.bounds
	c.Drain.Progress = func(l rollout.Left) {
		fmt.Fprintf(e.stderr, "%s: %d streams, %d requests left\n", l.Worker, l.Streams, l.Requests)
	}
	c.Progress = func(worker, what string) { fmt.Fprintf(e.stderr, "%s: %s\n", worker, what) }
	if err := o.leaveBehind(ctx, m, j, c); err != nil {
		return err
	}
	c.Save = func(p rollout.Plan) error { return o.save(j, p) }
	if err := c.Save(j.Plan); err != nil {
		return err
	}
	err := rollout.Run(ctx, m, &j.Plan, c)
	again := "run the same command to go on"
	if b, ok := errors.AsType[*rollout.BoundError](err); ok && !j.Back {
		return withHint(fmt.Errorf("the rollout stopped at %w", err), fmt.Sprintf("%s takes no requests now; %s, or `%s rollout --rollback%s` to go back", b.Worker, again, e.self(), o.journalFlag))
	}
	if err != nil {
		return withHint(fmt.Errorf("the rollout stopped: %w", err), again)
	}
	return nil
}

// leaveBehind gives back what the rollout of before had only drained, where the new one
// takes its place in the journal.
func (o *rolloutOptions) leaveBehind(ctx context.Context, m *liveMesh, j *journal, c rollout.Config) error {
	if j.before == nil {
		return nil
	}
	c.Save = func(p rollout.Plan) error { return o.save(j.before, p) }
	ids, err := rollout.GiveBack(ctx, m, &j.before.Plan, c)
	for i := range j.Plan.Steps {
		if s := &j.Plan.Steps[i]; slices.Contains(ids, s.Worker) {
			s.Drained = false // who drains it from here on is an operator
		}
	}
	for _, s := range j.before.Plan.Steps {
		if s.Drained && !slices.ContainsFunc(j.Plan.Steps, func(n rollout.Step) bool { return n.Worker == s.Worker }) {
			c.Progress(s.Worker, "stays drained, as the rollout of before left it ("+string(s.State)+"); `kvmesh undrain` takes it back")
		}
	}
	return err
}

// printPlan prints one line per worker, in the order of their turns.
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

// printRooms prints what would be done.
func printRooms(e *env, p rollout.Plan, rooms []rollout.Room, js bool) error {
	if js {
		return writeJSON(e.stdout, struct {
			rollout.Plan
			Pools []rollout.Room `json:"pools"`
		}{p, rooms})
	}
	if err := printPlan(e, p, false); err != nil {
		return err
	}
	for _, r := range rooms {
		if _, err := fmt.Fprintln(e.stdout, r); err != nil {
			return err
		}
	}
	return nil
}
