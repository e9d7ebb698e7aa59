package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/kvcache/dirstore"
)

func kvLsCommand(o *kvStore) *cobra.Command {
	return &cobra.Command{
		Use:     "ls",
		Short:   "List the models of which there is KV",
		Example: "  kvmesh kv ls\n  kvmesh kv ls --kv-dir /dev/shm/kv -o json",
		RunE: func(c *cobra.Command, _ []string) error {
			s, js, err := o.openAny()
			if err != nil {
				return err
			}
			defer s.Close()
			list, err := o.models(c.Context(), s)
			if err != nil {
				return err
			}
			views := []kvModel{}
			for _, m := range list {
				views = append(views, kvModelView(m))
			}
			if js {
				return writeJSON(o.e.stdout, map[string]any{"dir": o.dir, "models": views})
			}
			return printKVModels(o.e.stdout, views, time.Now())
		},
	}
}

func printKVModels(w io.Writer, list []kvModel, now time.Time) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "MODEL\tFINGERPRINT\tBLOCKS\tTAILS\tBYTES\tLAST USED")
	for _, m := range list {
		used := "-"
		if m.Used != nil {
			used = now.Sub(*m.Used).Round(time.Second).String() + " ago"
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%d\t%s\n", dash(m.Model), m.Fingerprint[:16], m.Blocks, m.Tails, m.BlockBytes+m.TailBytes, used)
	}
	return t.Flush()
}

func kvStatCommand(o *kvStore) *cobra.Command {
	return &cobra.Command{
		Use:   "stat",
		Short: "Count tokens, tenants and codecs, from the header of every block",
		Long: `Stat reads the header of every block. A KV node is asked, and looks at its memory and
at each tier below it: disk, Redis, S3. Of other hosts it says how much of their memory
is in use.`,
		Example: `  kvmesh kv stat
  kvmesh kv stat -o json | jq '.models[] | {model, tokens, codecs}'`,
		RunE: func(c *cobra.Command, _ []string) error {
			if node, err := o.isNode(); err != nil {
				return err
			} else if node {
				return statNode(c.Context(), o)
			}
			s, js, err := o.open()
			if err != nil {
				return err
			}
			defer s.Close()
			list, err := o.models(c.Context(), s)
			if err != nil {
				return err
			}
			stats, err := statModels(c.Context(), o.e, s, list)
			if err != nil {
				return err
			}
			used := s.Stats().Used
			if js {
				return writeJSON(o.e.stdout, map[string]any{"dir": o.dir, "used_bytes": used, "models": stats})
			}
			fmt.Fprintf(o.e.stdout, "directory    %s\nin use       %d bytes, folders and control words included\n", o.dir, used)
			for _, m := range stats {
				m.print(o.e.stdout)
			}
			return nil
		},
	}
}

// kvStat is a model with what its headers say.
type kvStat struct {
	kvModel
	census
}

// statModels reads all headers.
func statModels(ctx context.Context, e *env, s *dirstore.Store, list []dirstore.Model) ([]kvStat, error) {
	p := progress{e: e, what: "read", total: entries(list)}
	stats := []kvStat{}
	for _, m := range list {
		c, err := p.count(ctx, s, m.Fingerprint)
		if err != nil {
			return nil, err
		}
		stats = append(stats, kvStat{kvModelView(m), c})
	}
	return stats, nil
}

// entries counts blocks and tails.
func entries(list []dirstore.Model) (n int) {
	for _, m := range list {
		n += m.Blocks + m.Tails
	}
	return n
}

func (m kvStat) print(w io.Writer) {
	fmt.Fprintf(w, "\nmodel        %s\nfingerprint  %s\n", dash(m.Model), m.Fingerprint)
	fmt.Fprintf(w, "blocks       %d, %d tokens, %d bytes\n", m.Blocks, m.Tokens, m.BlockBytes)
	fmt.Fprintf(w, "tails        %d, %d bytes\ntenants      %d\n", m.Tails, m.TailBytes, m.Tenants)
	m.printCodecs(w)
	if m.Bad > 0 {
		fmt.Fprintf(w, "not usable   %d; `kvmesh kv verify` names them\n", m.Bad)
	}
}

// printCodecs writes how many blocks there are of each codec.
func (m kvStat) printCodecs(w io.Writer) {
	for _, c := range slices.Sorted(maps.Keys(m.Codecs)) {
		fmt.Fprintf(w, "codec        %s, %d blocks\n", c, m.Codecs[c])
	}
}

func kvVerifyCommand(o *kvStore) *cobra.Command {
	var remove bool
	c := &cobra.Command{
		Use:   "verify",
		Short: "Read everything and check every checksum, key and place",
		Long: `Verify reads every block and tail. What is wrong would be refused by a worker
as soon as it came upon it; this finds it before. It exits with 1 if there is any.

A KV node is asked, and reads the blocks of its memory and of each tier below it, and of
other hosts' memory those that this one's has, too. Like any reader it removes what is
wrong, with --remove or without; the ends of streams are checked when they are read.`,
		Example: "  kvmesh kv verify\n  kvmesh kv verify --remove   # remove what is wrong",
		RunE: func(c *cobra.Command, _ []string) error {
			if node, err := o.isNode(); err != nil {
				return err
			} else if node {
				return verifyNode(c.Context(), o, remove)
			}
			return verifyKV(c.Context(), o, remove)
		},
	}
	c.Flags().BoolVar(&remove, "remove", false, "remove what is wrong")
	return c
}

// kvFault is one block or tail that cannot be used.
type kvFault struct {
	Path    string `json:"path"` // below the directory
	Error   string `json:"error"`
	Removed bool   `json:"removed"`
}

func verifyKV(ctx context.Context, o *kvStore, remove bool) error {
	s, js, err := o.open()
	if err != nil {
		return err
	}
	defer s.Close()
	list, err := o.models(ctx, s)
	if err != nil {
		return err
	}
	p := progress{e: o.e, what: "verified", total: entries(list)}
	faults := []kvFault{}
	for _, m := range list {
		for en := range s.Entries(ctx, m.Fingerprint, true) {
			p.step(time.Now())
			if en.Err == nil {
				continue
			}
			f := kvFault{Path: en.Path, Error: en.Err.Error()}
			if remove {
				if err := s.Remove(ctx, en); err != nil {
					return err
				}
				f.Removed = true
			}
			faults = append(faults, f)
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if js {
		err = writeJSON(o.e.stdout, map[string]any{"dir": o.dir, "verified": p.done, "bad": faults})
	} else {
		err = printFaults(o.e.stdout, p.done, faults)
	}
	if err == nil && len(faults) > 0 && !remove {
		err = withHint(fmt.Errorf("%d of %d blocks and tails are not as they were written", len(faults), p.done), "`kvmesh kv verify --remove` removes them; workers compute those tokens again")
	}
	return err
}

func printFaults(w io.Writer, verified int, faults []kvFault) error {
	for _, f := range faults {
		fmt.Fprintf(w, "%s: %s\n", f.Path, f.Error)
	}
	removed := ""
	if len(faults) > 0 && faults[0].Removed {
		removed = ", removed"
	}
	_, err := fmt.Fprintf(w, "%d blocks and tails verified, %d bad%s\n", verified, len(faults), removed)
	return err
}
