package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/dirstore"
)

func kvCommand(e *env) *cobra.Command {
	o := &kvStore{e: e}
	c := &cobra.Command{
		Use:   "kv",
		Short: "The KV that workers keep: list, check, drop",
		Long: `The KV store of a host is a directory that its workers share. These commands
open it beside them, while they run or not, and need no control plane.`,
		Example: `  kvmesh kv ls
  kvmesh kv verify
  kvmesh kv invalidate --model gemma-3-270m`,
	}
	c.AddCommand(kvLsCommand(o), kvStatCommand(o), kvVerifyCommand(o), kvInvalidateCommand(o), kvGCCommand(o))
	for _, sub := range c.Commands() {
		sub.Args = cobra.NoArgs
		sub.Flags().StringVar(&o.dir, "kv-dir", "", "directory of the KV (default: that of the last 'kvmesh up' of this folder)")
		outputFlag(sub, &o.output)
	}
	return c
}

// kvStore is the store that a command of `kvmesh kv` works on.
type kvStore struct {
	e           *env
	dir, output string
	limit       int64
	tailTTL     time.Duration
}

// open opens the store and says whether the result is wanted as JSON. Nothing is made
// where there is no store.
func (o *kvStore) open() (s *dirstore.Store, js bool, err error) {
	if js, err = asJSON(o.output); err != nil {
		return nil, js, err
	}
	if o.dir == "" {
		last, err := lastUp(".")
		if err != nil {
			return nil, js, withHint(err, "name the directory with --kv-dir, as the workers have it")
		}
		if o.dir = last.KVDir; o.dir == "" {
			return nil, js, withHint(errors.New("the mesh of this folder keeps no KV"), "Mesh.spec.kv.dir may be off, or no worker is local; or name a directory with --kv-dir")
		}
	}
	if _, err := os.Stat(filepath.Join(o.dir, "control")); errors.Is(err, fs.ErrNotExist) {
		return nil, js, withHint(fmt.Errorf("%s is no KV store", o.dir), "give --kv-dir the directory that the workers have as theirs")
	}
	s, err = dirstore.Open(dirstore.Config{Dir: o.dir, Limit: o.limit, TailTTL: o.tailTTL, SweepEvery: 24 * time.Hour, Log: o.e.log})
	return s, js, err
}

// models lists what the store has.
func (o *kvStore) models(ctx context.Context, s *dirstore.Store) ([]dirstore.Model, error) {
	list, err := s.Models(ctx)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", o.dir, err)
	}
	return list, nil
}

// pick chooses the models that --model or --fingerprint mean; none given = all.
func pick(list []dirstore.Model, name, fingerprint string) ([]dirstore.Model, error) {
	if name == "" && fingerprint == "" {
		return list, nil
	}
	if name != "" && fingerprint != "" {
		return nil, usagef("--model and --fingerprint: give one of them")
	}
	if n := len(fingerprint); fingerprint != "" && (n < 8 || n > 64) {
		return nil, usagef("--fingerprint %q: want 8 to 64 hexadecimal digits, as `kvmesh kv ls` shows them", fingerprint)
	}
	var picked []dirstore.Model
	for _, m := range list {
		if name != "" && m.Label.Model == name || fingerprint != "" && strings.HasPrefix(m.Fingerprint.String(), strings.ToLower(fingerprint)) {
			picked = append(picked, m)
		}
	}
	switch {
	case len(picked) == 0 && name != "":
		return nil, withHint(fmt.Errorf("no KV of a model %q", name), "`kvmesh kv ls` lists the models; KV without a name is named by --fingerprint")
	case len(picked) == 0:
		return nil, withHint(fmt.Errorf("no KV with the fingerprint %s", fingerprint), "`kvmesh kv ls` lists them")
	case len(picked) > 1 && fingerprint != "":
		return nil, usagef("--fingerprint %s is that of %d models: give more digits", fingerprint, len(picked))
	}
	return picked, nil
}

// kvModel is one model in the output of every command.
type kvModel struct {
	Model       string     `json:"model"`
	Fingerprint string     `json:"fingerprint"`
	Text        string     `json:"text,omitempty"` // what was hashed
	Blocks      int        `json:"blocks"`
	BlockBytes  int64      `json:"block_bytes"`
	Tails       int        `json:"tails"`
	TailBytes   int64      `json:"tail_bytes"`
	Used        *time.Time `json:"used,omitempty"` // last
}

func kvModelView(m dirstore.Model) kvModel {
	v := kvModel{
		Model: m.Label.Model, Fingerprint: m.Fingerprint.String(), Text: m.Label.Text,
		Blocks: m.Blocks, BlockBytes: m.BlockBytes, Tails: m.Tails, TailBytes: m.TailBytes,
	}
	if !m.Used.IsZero() {
		v.Used = &m.Used
	}
	return v
}

// progress tells people on stderr how far a long walk is, once a second.
type progress struct {
	e           *env
	what        string
	done, total int
	next        time.Time
}

// step counts one more at a time.
func (p *progress) step(now time.Time) {
	p.done++
	if p.next.IsZero() {
		p.next = now.Add(time.Second)
	}
	if now.After(p.next) {
		p.next = now.Add(time.Second)
		fmt.Fprintf(p.e.stderr, "%s %d of about %d\n", p.what, p.done, p.total)
	}
}

// census is what is counted of a model's blocks by their headers.
type census struct {
	Tokens  int64          `json:"tokens"`
	Tenants int            `json:"tenants"`
	Codecs  map[string]int `json:"codecs"` // blocks
	Bad     int            `json:"bad"`    // not usable

	roots map[kvcache.Key]bool
}

func (c *census) add(en dirstore.Entry) {
	switch {
	case en.Err != nil:
		c.Bad++
	case !en.Tail:
		c.Tokens += int64(len(en.Header.IDs))
		c.Codecs[en.Header.Codec().String()]++
		c.roots[en.Header.Root] = true
		c.Tenants = len(c.roots)
	}
}

// count walks over a model's blocks.
func (p *progress) count(ctx context.Context, s *dirstore.Store, f kvcache.Fingerprint) (census, error) {
	c := census{Codecs: map[string]int{}, roots: map[kvcache.Key]bool{}}
	for en := range s.Entries(ctx, f, false) {
		p.step(time.Now())
		c.add(en)
	}
	return c, ctx.Err()
}
