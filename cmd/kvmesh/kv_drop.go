package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/dirstore"
	"github.com/kvmesh/kvmesh/kvcache/kvnode"
)

func kvInvalidateCommand(o *kvStore) *cobra.Command {
	var name, fingerprint, tenant string
	var dryRun bool
	c := &cobra.Command{
		Use:   "invalidate (--model NAME | --fingerprint FP | --tenant T)",
		Short: "Drop the KV of a model, or erase that of a tenant",
		Long: `Invalidate drops all blocks and tails of a model, or of one fingerprint, of all
tenants. From then on no look-up finds them, and running streams of the model keep
nothing more in their tails. A worker that still runs with it begins anew with
the blocks it computes from now on: stop it first if those are not wanted.

With --tenant it erases what there is of one tenant, the cache_salt of its requests, of
all models: blocks and tails, in the memory and, by the node, in its tiers. What is
computed for the tenant meanwhile may stay.

A node has the nodes of other hosts do the same, with their memory and disks. One that is
away is named, the command then exits with 1, and it is told when it is back.
A fingerprint in full is dropped there also where this host has nothing of it. Disks,
Redis and S3 that are away are named, too; what they have of it is found no more through
this node, which has them drop it when they are back.`,
		Example: "  kvmesh kv invalidate --model gemma-3-270m\n  kvmesh kv invalidate --fingerprint 6f74ab7a8555b747 --dry-run\n  kvmesh kv invalidate --tenant acme -o json",
		RunE: func(c *cobra.Command, _ []string) error {
			if tenant != "" {
				if name != "" || fingerprint != "" || dryRun {
					return usagef("--tenant stands alone: no --model, --fingerprint or --dry-run")
				}
				return eraseTenantKV(c.Context(), o, tenant)
			}
			if name == "" && fingerprint == "" {
				return usagef("invalidate what? give --model, --fingerprint or --tenant")
			}
			s, js, err := o.openAny()
			if err != nil {
				return err
			}
			defer s.Close()
			list, err := o.toDrop(c.Context(), s, name, fingerprint)
			if err != nil {
				return err
			}
			return dropKV(c.Context(), o, s, list, dryRun, js)
		},
	}
	c.Flags().StringVar(&name, "model", "", "name under which the model is served; all its fingerprints")
	c.Flags().StringVar(&fingerprint, "fingerprint", "", "fingerprint, or at least 8 digits that begin only one")
	c.Flags().StringVar(&tenant, "tenant", "", "tenant whose KV is erased, of all models")
	c.Flags().BoolVar(&dryRun, "dry-run", false, "say what would be dropped and drop nothing")
	return c
}

// toDrop says which models are meant. A node knows also those of which its memory has nothing,
// by their names and fingerprints; what only a bucket or a server has is looked for there,
// which takes as long as `kvmesh kv stat`.
func (o *kvStore) toDrop(ctx context.Context, s kvSurvey, name, fingerprint string) ([]dirstore.Model, error) {
	n, isNode := s.(nodeSurvey)
	if !isNode {
		list, err := o.models(ctx, s)
		if err != nil {
			return nil, err
		}
		return pick(list, name, fingerprint)
	}
	list, err := n.known(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", o.dir, err)
	}
	picked, err := pickOrName(list, name, fingerprint)
	if !errors.Is(err, errNoKV) || name != "" {
		return picked, err // tiers know no names but those that the node knows, too
	}
	p := progress{e: o.e, what: "not in memory: looked through"}
	all, serr := n.Survey(ctx, false, func(s kvnode.Survey) { p.at(s.Looked, time.Now()) })
	if serr != nil {
		return nil, errors.Join(err, serr)
	}
	if picked, perr := pick(surveyed(all), name, fingerprint); !errors.Is(perr, errNoKV) {
		return picked, perr
	}
	return nil, errors.Join(err, unseen(all))
}

// surveyed are the models of all tiers, each once.
func surveyed(s kvnode.Survey) (list []dirstore.Model) {
	for _, t := range s.Tiers {
		for _, m := range t.Models {
			if !slices.ContainsFunc(list, func(o dirstore.Model) bool { return o.Fingerprint == m.Fingerprint }) {
				list = append(list, dirstore.Model{Fingerprint: m.Fingerprint, Label: m.Label})
			}
		}
	}
	return list
}

// pickOrName is pick, but for a fingerprint that is given in full: other hosts may have what
// this one has not.
func pickOrName(list []dirstore.Model, name, fingerprint string) ([]dirstore.Model, error) {
	picked, err := pick(list, name, fingerprint)
	if k, perr := kvcache.ParseKey(fingerprint); err != nil && perr == nil && name == "" {
		return []dirstore.Model{{Fingerprint: kvcache.Fingerprint(k)}}, nil
	}
	return picked, err
}

// dropKV drops models and says what there was of them. The error is of where one could not
// be dropped; the others are all the same.
func dropKV(ctx context.Context, o *kvStore, s kvSurvey, list []dirstore.Model, dryRun, js bool) error {
	views, left := []kvModel{}, []error{}
	for _, m := range list {
		v := kvModelView(m)
		views = append(views, v)
		if !dryRun {
			if err := s.Drop(ctx, m.Fingerprint); err != nil {
				left = append(left, fmt.Errorf("drop %s: %w", v.Fingerprint[:16], err))
			}
		}
		if !js {
			where := ""
			if _, isNode := s.(nodeSurvey); isNode {
				where = " of memory"
			}
			fmt.Fprintf(o.e.stdout, "%s %s (%s): %d blocks, %d tails, %d bytes%s\n",
				dropVerb(dryRun), dash(v.Model), v.Fingerprint[:16], v.Blocks, v.Tails, v.BlockBytes+v.TailBytes, where)
		}
	}
	err := errors.Join(left...)
	if js {
		out := map[string]any{"dir": o.dir, "dropped": views, "dry_run": dryRun, "used_bytes": s.Stats().Used}
		if err != nil {
			out["left"] = err.Error()
		}
		if werr := writeJSON(o.e.stdout, out); werr != nil {
			return werr
		}
	}
	if err != nil {
		return withHint(err, "what a tier that is named still has is found no more through this node, and is dropped when the tier is back; a KV peer drops it when it is back. That lasts as long as this node runs, or its --dir")
	}
	return nil
}

func dropVerb(dryRun bool) string {
	if dryRun {
		return "would drop"
	}
	return "dropped"
}

// kvGC is the result of `kvmesh kv gc`.
type kvGC struct {
	Dir     string `json:"dir"`
	Swept   uint64 `json:"swept"`   // files of dead processes
	Expired uint64 `json:"expired"` // tails
	Evicted uint64 `json:"evicted"` // blocks
	Freed   int64  `json:"freed_bytes"`
	Used    int64  `json:"used_bytes"`
}

func kvGCCommand(o *kvStore) *cobra.Command {
	c := &cobra.Command{
		Use:   "gc",
		Short: "Remove what dead processes left and old tails, and make room",
		Long: `Workers do the same every 30 seconds; this is for a store that none has open. With
--limit the blocks that were not used for longest go until an eighth of it is free.`,
		Example: "  kvmesh kv gc --kv-dir /dev/shm/kv\n  kvmesh kv gc --limit 1073741824",
		RunE: func(c *cobra.Command, _ []string) error {
			if o.limit < 0 || o.tailTTL < 0 {
				return usagef("--limit and --tail-ttl are not negative")
			}
			if o.limit == 0 {
				o.limit = 1 << 60
			}
			s, js, err := o.openAny()
			if err != nil {
				return err
			}
			defer s.Close()
			before := s.Stats()
			if err := errors.Join(s.Sweep(c.Context(), time.Now()), s.MakeRoom(c.Context())); err != nil {
				return err
			}
			st := s.Stats()
			r := kvGC{o.dir, st.Swept - before.Swept, st.Expired - before.Expired, st.Evictions - before.Evictions, max(0, before.Used-st.Used), st.Used}
			if js {
				return writeJSON(o.e.stdout, r)
			}
			_, err = fmt.Fprintf(o.e.stdout, "%d files of dead processes, %d old tails and %d blocks removed; %d bytes freed, %d in use\n",
				r.Swept, r.Expired, r.Evicted, r.Freed, r.Used)
			return err
		},
	}
	c.Flags().Int64Var(&o.limit, "limit", 0, "bytes that the store may have; 0 evicts nothing")
	c.Flags().DurationVar(&o.tailTTL, "tail-ttl", 0, "age without an append at which a tail goes (default 10m, as workers have it)")
	return c
}
