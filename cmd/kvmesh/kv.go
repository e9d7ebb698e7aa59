package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/dirstore"
	"github.com/kvmesh/kvmesh/kvcache/kvnode"
)

func kvCommand(e *env) *cobra.Command {
	o := &kvStore{e: e}
	c := &cobra.Command{
		Use:   "kv",
		Short: "The KV that workers keep: list, check, drop",
		Long: `The KV store of a host is a directory that its workers share. These commands
open it beside them, while they run or not, and need no control plane. Where a KV node
keeps it they ask the node, which must run.`,
		Example: `  kvmesh kv ls
  kvmesh kv verify
  kvmesh kv invalidate --model gemma-3-270m`,
	}
	c.AddCommand(kvLsCommand(o), kvStatCommand(o), kvVerifyCommand(o), kvInvalidateCommand(o), kvGCCommand(o), kvPeersCommand(o), kvEpochCommand(o))
	for _, sub := range c.Commands() {
		sub.Args = cobra.NoArgs
		sub.Flags().StringVar(&o.dir, "kv-dir", "", "directory of the KV (default: that of the last 'kvmesh up' of this folder)")
		outputFlag(sub, &o.output)
	}
	c.AddCommand(kvPlanCommand(e)) // which needs no store
	return c
}

// kvStore is the store that a command of `kvmesh kv` works on.
type kvStore struct {
	e           *env
	dir, output string
	limit       int64
	tailTTL     time.Duration
}

// find says which directory is meant, and whether the result is wanted as JSON.
func (o *kvStore) find() (js bool, err error) {
	if js, err = asJSON(o.output); err != nil || o.dir != "" {
		return js, err
	}
	last, err := lastUp(".")
	if err != nil {
		return js, withHint(err, "name the directory with --kv-dir, as the workers have it")
	}
	if o.dir = last.KVDir; o.dir == "" {
		return js, withHint(errors.New("the mesh of this folder keeps no KV"), "Mesh.spec.kv.dir may be off, or no worker is local; or name a directory with --kv-dir")
	}
	return js, nil
}

// isNode says whether the store is a KV node's.
func (o *kvStore) isNode() (bool, error) {
	_, err := o.find()
	return err == nil && isKVNode(o.dir), err
}

// open opens a store whose files can be looked at.
func (o *kvStore) open() (s *dirstore.Store, js bool, err error) {
	if js, err = o.find(); err != nil {
		return nil, js, err
	}
	s, err = o.openDir()
	return s, js, err
}

// openDir opens a directory that workers share. Nothing is made where there is no store.
func (o *kvStore) openDir() (*dirstore.Store, error) {
	if _, err := os.Stat(filepath.Join(o.dir, "control")); errors.Is(err, fs.ErrNotExist) {
		return nil, withHint(fmt.Errorf("%s is no KV store", o.dir), "give --kv-dir the directory that the workers have as theirs")
	}
	return dirstore.Open(dirstore.Config{Dir: o.dir, Limit: o.limit, TailTTL: o.tailTTL, SweepEvery: 24 * time.Hour, Log: o.e.log})
}

// kvSurvey is what can be asked of every store.
type kvSurvey interface {
	Drop(context.Context, kvcache.Fingerprint) error
	Stats() kvcache.Stats
	Close() error
	modelLister
	sweeper
}

// modelLister lists what a store has.
type modelLister interface {
	Models(context.Context) ([]dirstore.Model, error)
}

// sweeper removes what is old, or a tenant's, and makes room.
type sweeper interface {
	tenantEraser
	Sweep(context.Context, time.Time) error
	MakeRoom(context.Context) error
}

// openAny opens a directory or asks a KV node.
func (o *kvStore) openAny() (s kvSurvey, js bool, err error) {
	if js, err = o.find(); err != nil {
		return nil, js, err
	}
	if !isKVNode(o.dir) {
		s, err := o.openDir()
		return dirSurvey{s}, js, err
	}
	c, err := o.dialNode()
	if err != nil {
		return nil, js, err
	}
	return nodeSurvey{c, o.limit}, js, nil
}

// openNode asks a KV node, and is an error where there is none.
func (o *kvStore) openNode() (c *kvnode.Client, js bool, err error) {
	if js, err = o.find(); err != nil {
		return nil, js, err
	}
	if !isKVNode(o.dir) {
		return nil, js, withHint(fmt.Errorf("%s is no KV node's directory", o.dir), "only a node can do this: docs/kv-store.md says what it is for")
	}
	c, err = o.dialNode()
	return c, js, err
}

// dialNode opens a client of the node, which must answer.
func (o *kvStore) dialNode() (*kvnode.Client, error) {
	c, err := kvnode.Open(o.dir)
	if err != nil {
		return nil, err
	}
	if _, err := c.NodeStats(context.Background()); err != nil {
		c.Close()
		return nil, withHint(err, "`kvmesh up` starts a KV node again by itself; else start it with `kvmesh kvnode --dir "+o.dir+"`")
	}
	return c, nil
}

// isKVNode says whether a directory is a KV node's.
func isKVNode(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, kvnode.SocketName))
	return err == nil
}

// nodeSurvey is a KV node as the commands see stores.
type nodeSurvey struct {
	*kvnode.Client
	limit int64 // of MakeRoom
}

// Sweep does nothing: the node does so by itself, and with MakeRoom.
func (n nodeSurvey) Sweep(context.Context, time.Time) error { return nil }

// MakeRoom has the node sweep and make room.
func (n nodeSurvey) MakeRoom(ctx context.Context) error { return n.Client.MakeRoom(ctx, n.limit) }

// Models lists what the node has.
func (n nodeSurvey) Models(ctx context.Context) ([]dirstore.Model, error) {
	models, err := n.Client.Models(ctx)
	var list []dirstore.Model
	for _, m := range models {
		list = append(list, nodeModel(m))
	}
	return list, err
}

// nodeModel is what a node's memory has of a model, as a directory says it.
func nodeModel(m arena.Model) dirstore.Model {
	return dirstore.Model{
		Fingerprint: m.Fingerprint, Label: m.Label, Blocks: m.Blocks, BlockBytes: m.Bytes, Tails: m.Tails, TailBytes: m.TailBytes, Used: m.Used,
	}
}

// known lists the models that the node knows of, wherever they are. One that was served under
// the name has it, whatever its label says.
func (n nodeSurvey) known(ctx context.Context, name string) ([]dirstore.Model, error) {
	models, err := n.Known(ctx)
	var list []dirstore.Model
	for _, m := range models {
		one := nodeModel(m.Model)
		if name != "" && slices.Contains(m.Names, name) {
			one.Label.Model = name
		}
		list = append(list, one)
	}
	return list, err
}

// models lists what the store has.
func (o *kvStore) models(ctx context.Context, s modelLister) ([]dirstore.Model, error) {
	list, err := s.Models(ctx)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", o.dir, err)
	}
	return list, nil
}

// errNoKV says that --model or --fingerprint means nothing that is known.
var errNoKV = errors.New("no KV")

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
		return nil, withHint(fmt.Errorf("%w of a model %q", errNoKV, name), "`kvmesh kv ls` lists the models, and `kvmesh kv stat` those of all tiers of a node; KV without a name is named by --fingerprint")
	case len(picked) == 0:
		return nil, withHint(fmt.Errorf("%w with the fingerprint %s", errNoKV, fingerprint), "`kvmesh kv ls` lists them, and `kvmesh kv stat` those of all tiers of a node")
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
func (p *progress) step(now time.Time) { p.at(p.done+1, now) }

// at says that so many are done.
func (p *progress) at(done int, now time.Time) {
	p.done = done
	if p.next.IsZero() {
		p.next = now.Add(time.Second)
	}
	if now.After(p.next) {
		p.next = now.Add(time.Second)
		about := ""
		if p.total > 0 {
			about = fmt.Sprintf(" of about %d", p.total)
		}
		fmt.Fprintf(p.e.stderr, "%s %d%s\n", p.what, p.done, about)
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
