package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/kvmesh/kvmesh/kvcache/kvnode"
)

// survey has the node look at all of its tiers, and says how far it is.
func (o *kvStore) survey(ctx context.Context, verify bool) (s kvnode.Survey, used int64, js bool, err error) {
	n, js, err := o.openNode()
	if err != nil {
		return s, 0, js, err
	}
	defer n.Close()
	p := progress{e: o.e, what: "read"}
	if verify {
		p.what = "verified"
	}
	s, err = n.Survey(ctx, verify, func(s kvnode.Survey) { p.at(s.Looked, time.Now()) })
	return s, n.Stats().Used, js, err
}

// kvTierStat is one tier of a node in the output of `kvmesh kv stat`.
type kvTierStat struct {
	Tier   string   `json:"tier"`
	Models []kvStat `json:"models"`
	Bad    int      `json:"bad"`
	// Hosts are those of the tier that is other hosts' memory, in the place of models.
	Hosts []kvnode.PeerNode `json:"hosts,omitempty"`
	Error string            `json:"error,omitempty"`
}

// tierStats are the tiers of a survey by headers.
func tierStats(s kvnode.Survey) (list []kvTierStat) {
	for _, t := range s.Tiers {
		one := kvTierStat{Tier: t.Tier, Models: []kvStat{}, Bad: t.Bad, Hosts: t.Hosts, Error: t.Error}
		for _, m := range t.Models {
			one.Models = append(one.Models, kvStat{
				kvModel{Model: m.Label.Model, Fingerprint: m.Fingerprint.String(), Text: m.Label.Text, Blocks: m.Blocks, BlockBytes: m.Bytes, Tails: m.Tails, TailBytes: m.TailBytes},
				census{Tokens: m.Tokens, Tenants: m.Tenants, Codecs: m.Codecs},
			})
		}
		list = append(list, one)
	}
	return list
}

// statNode is `kvmesh kv stat` of a node. It prints what is known before it fails because of
// what is not, since the tiers that answer are what somebody wants to see meanwhile.
func statNode(ctx context.Context, o *kvStore) error {
	s, used, js, err := o.survey(ctx, false)
	if err != nil {
		return err
	}
	tiers := tierStats(s)
	if js {
		err = writeJSON(o.e.stdout, map[string]any{"dir": o.dir, "used_bytes": used, "tiers": tiers})
	} else {
		fmt.Fprintf(o.e.stdout, "KV node      %s\nin use       %d bytes of memory, tails included\n", o.dir, used)
		for _, t := range tiers {
			t.print(o.e.stdout)
		}
	}
	return errors.Join(err, unseen(s))
}

// print writes a tier for people.
func (t kvTierStat) print(w io.Writer) {
	fmt.Fprintf(w, "\ntier         %s\n", t.Tier)
	if t.Error != "" {
		fmt.Fprintf(w, "not known    %s\n", t.Error)
	}
	if t.Bad > 0 {
		fmt.Fprintf(w, "not usable   %d, and removed\n", t.Bad)
	}
	for _, h := range t.Hosts {
		fmt.Fprintf(w, "host         %s, %s, %d of %d bytes of memory in use\n", h.ID, h.State, h.Used, h.Limit)
	}
	for _, m := range t.Models {
		fmt.Fprintf(w, "\nmodel        %s\nfingerprint  %s\n", dash(m.Model), m.Fingerprint)
		fmt.Fprintf(w, "blocks       %d, %d tokens, %d bytes\ntenants      %d\n", m.Blocks, m.Tokens, m.BlockBytes, m.Tenants)
		if m.Tails > 0 {
			fmt.Fprintf(w, "tails        %d, %d bytes\n", m.Tails, m.TailBytes)
		}
		m.printCodecs(w)
	}
}

// unseen is the error of tiers that could not be looked at.
func unseen(s kvnode.Survey) error {
	var names []string
	for _, t := range s.Tiers {
		if t.Error != "" {
			names = append(names, fmt.Sprintf("tier %s (%s)", t.Tier, t.Error))
		}
	}
	if len(names) == 0 {
		return nil
	}
	return withHint(fmt.Errorf("not all of the KV could be looked at: %s", strings.Join(names, ", ")), "a server may be away: run it again when it is back")
}

// kvTierVerified is one tier of a node in the output of `kvmesh kv verify`.
type kvTierVerified struct {
	Tier     string    `json:"tier"`
	Verified int       `json:"verified"`
	Bad      int       `json:"bad_blocks"`
	Faults   []kvFault `json:"bad"` // the first of them
	// Missing are blocks of the memory of which other hosts have no copy.
	Missing int    `json:"missing,omitempty"`
	Error   string `json:"error,omitempty"`
}

// verifyNode is `kvmesh kv verify` of a node, which removes what is wrong in any case: the
// node reads as any reader does, and leaves nothing for the next one to fall over. So --remove
// only says that what was found is no reason to fail.
func verifyNode(ctx context.Context, o *kvStore, remove bool) error {
	s, _, js, err := o.survey(ctx, true)
	if err != nil {
		return err
	}
	tiers, bad := []kvTierVerified{}, 0
	for _, t := range s.Tiers {
		one := kvTierVerified{Tier: t.Tier, Verified: t.Bad, Bad: t.Bad, Faults: []kvFault{}, Missing: t.Missing, Error: t.Error}
		for _, m := range t.Models {
			one.Verified += m.Blocks
		}
		for _, f := range t.Faults {
			one.Faults = append(one.Faults, kvFault{Path: f.Block, Error: f.Error, Removed: true})
		}
		tiers, bad = append(tiers, one), bad+t.Bad
	}
	if js {
		err = writeJSON(o.e.stdout, map[string]any{"dir": o.dir, "verified": s.Looked, "tiers": tiers})
	} else {
		err = printVerified(o.e.stdout, tiers)
	}
	if bad > 0 && !remove {
		err = errors.Join(err, withHint(fmt.Errorf("%d of %d blocks were not as they were written", bad, s.Looked), "they are removed; workers compute those tokens again"))
	}
	return errors.Join(err, unseen(s))
}

// printVerified writes the result for people.
func printVerified(w io.Writer, tiers []kvTierVerified) error {
	for _, t := range tiers {
		for _, f := range t.Faults {
			fmt.Fprintf(w, "%s: %s: %s\n", t.Tier, f.Path, f.Error)
		}
	}
	for _, t := range tiers {
		more := ""
		if t.Bad > 0 {
			more = ", removed"
		}
		if t.Missing > 0 {
			more += fmt.Sprintf("; %d blocks of the memory have no copy there", t.Missing)
		}
		if t.Error != "" {
			more += "; the rest could not be read: " + t.Error
		}
		if _, err := fmt.Fprintf(w, "%s: %d blocks verified, %d bad%s\n", t.Tier, t.Verified, t.Bad, more); err != nil {
			return err
		}
	}
	return nil
}
