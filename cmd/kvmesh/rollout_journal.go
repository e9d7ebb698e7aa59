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

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/rollout"
	"github.com/kvmesh/kvmesh/xds/registry"
)

// journal is a rollout's file: what was asked for and how far it came.
type journal struct {
	Command  string       `json:"restart_cmd"`
	Rollback string       `json:"rollback_cmd,omitempty"`
	Back     bool         `json:"back"` // it is itself a rollback
	Plan     rollout.Plan `json:"plan"`
	// before is the unfinished rollout whose place this one takes, nil for none.
	before *journal
}

// prepare makes the journal: a new one, the unfinished one, or the way back.
func (o *rolloutOptions) prepare(ctx context.Context, e *env, m *liveMesh, args []string) (*journal, error) {
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
	var before rollout.Plan
	if old != nil {
		before = old.Plan
	}
	if err := o.fits(list, args); err != nil {
		return nil, err
	}
	ids := args
	if len(ids) == 0 {
		ids = o.selected(e, list, before)
	}
	if len(ids) == 0 {
		return nil, withHint(errors.New("no worker is meant"), "`kvmesh workers` lists them with their models and pools")
	}
	if before.Left() > 0 && !o.startOver {
		if old.Back {
			return nil, withHint(fmt.Errorf("a rollback that is not finished is in %s", o.journal), "go on with --rollback"+o.journalFlag+", or forget it with --start-over")
		}
		if why := o.differs(old, list, ids); why != "" {
			return nil, withHint(fmt.Errorf("an unfinished rollout %s is in %s", why, o.journal), "finish it, undo it with --rollback"+o.journalFlag+", or forget it with --start-over")
		}
		return old, nil
	}
	plan, err := rollout.NewPlan(list, ids, before)
	if err != nil {
		return nil, drainHint(err, "")
	}
	return &journal{Command: o.restart, Rollback: o.back, Plan: plan, before: old}, nil
}

// differs says in what the unfinished rollout is not what the command line asks for; "" if
// it is. Flags that are left out are those of before.
func (o *rolloutOptions) differs(old *journal, list []fleet.WorkerView, ids []string) string {
	if o.restartGiven && o.restart != old.Command {
		return "with another --restart-cmd"
	}
	if o.rollbackCmdIsGiven {
		old.Rollback = o.back
	}
	steps := map[string]bool{}
	for _, s := range old.Plan.Steps {
		// One that is away, in the middle of its restart for instance, need not be named.
		if steps[s.Worker] = true; !slices.Contains(ids, s.Worker) && has(list, s.Worker) {
			return "of other workers (" + s.Worker + " is one of them)"
		}
	}
	for _, id := range ids {
		if !steps[id] {
			return "of other workers (" + id + " is none of them)"
		}
	}
	return ""
}

// has reports whether list has a worker of that id.
func has(list []fleet.WorkerView, id string) bool {
	return slices.ContainsFunc(list, func(w fleet.WorkerView) bool { return w.ID == id })
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
	drained := slices.ContainsFunc(old.Plan.Steps, func(s rollout.Step) bool { return s.Drained })
	if len(back.Steps) == 0 && !drained {
		return nil, errors.New("the last rollout restarted no worker: there is nothing to undo")
	}
	command := old.Rollback
	if o.rollbackCmdIsGiven {
		command = o.back
	}
	if command == "" {
		command = old.Command
	}
	return &journal{Command: command, Back: true, Plan: back, before: old}, nil
}

// fits refuses named workers that --model or --pool leaves out.
func (o *rolloutOptions) fits(list []fleet.WorkerView, named []string) error {
	for _, w := range list {
		switch {
		case !slices.Contains(named, w.ID):
		case o.model != "" && w.Model != o.model && !slices.Contains(w.Aliases, o.model):
			return usagef("--model %s: %s serves %s", o.model, w.ID, w.Model)
		case o.pool != "" && w.Pool != o.pool:
			return usagef("--pool %s: %s is of pool %s", o.pool, w.ID, w.Pool)
		}
	}
	return nil
}

// selected are the workers that --model and --pool leave, those first that the rollout of
// before left away. Servers that tell nothing of their starts are left out where there
// are others.
func (o *rolloutOptions) selected(e *env, list []fleet.WorkerView, before rollout.Plan) []string {
	away := before.Away(list)
	list = slices.DeleteFunc(slices.Clone(list), func(w fleet.WorkerView) bool {
		return o.model != "" && w.Model != o.model && !slices.Contains(w.Aliases, o.model) || o.pool != "" && w.Pool != o.pool
	})
	chosen := rollout.Replaceable(list)
	if len(chosen) == 0 {
		chosen = list // to be refused by name
	}
	var ids []string
	for _, s := range away {
		if (o.model == "" || s.Model == o.model) && (o.pool == "" || s.Pool == o.pool) && !slices.Contains(ids, s.Worker) {
			ids = append(ids, s.Worker)
		}
	}
	for _, w := range list {
		if has(chosen, w.ID) {
			ids = append(ids, w.ID)
		} else {
			fmt.Fprintf(e.stderr, "%s: left out, a server that tells nothing of its starts\n", w.ID)
		}
	}
	return ids
}

// save stores the journal so that a crash of this process or of the machine leaves the
// old or the new one whole. The file names no secrets but what the commands hold.
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
