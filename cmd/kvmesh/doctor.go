package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/internal/doctor"
	"github.com/kvmesh/kvmesh/internal/fetch"
)

// diagnosis is what `kvmesh doctor -o json` prints.
type diagnosis struct {
	OK     bool            `json:"ok"`
	Checks []doctor.Result `json:"checks"`
	// Fetch is what a run would still download.
	Fetch []fetch.Item `json:"fetch"`
}

func doctorCommand(e *env) *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Check what a run needs on this machine, with a remedy for what is missing",
		Long: `Doctor checks the platform, the tools that fetch what a run needs, the shared
libraries, memory, disks and limits. Each line is ok, warn or fail; it exits
with 1 when one failed. Nothing is changed and nothing is fetched.`,
		Example: `  kvmesh doctor
  kvmesh doctor -o json | jq '.checks[] | select(.status != "ok")'`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			json, err := asJSON(output)
			if err != nil {
				return err
			}
			d, err := diagnose(c.Context(), e)
			if err != nil {
				return err
			}
			if json {
				err = writeJSON(e.stdout, d)
			} else {
				err = d.print(e)
			}
			if n := doctor.Failed(d.Checks); err == nil && n > 0 {
				return withHint(fmt.Errorf("this machine cannot run the mesh yet: %d of %d checks failed", n, len(d.Checks)),
					"see the arrows above")
			}
			return err
		},
	}
	outputFlag(c, &output)
	return c
}

// diagnose looks at the machine and at what is already in the cache.
func diagnose(ctx context.Context, e *env) (diagnosis, error) {
	cfg, err := fetchConfig(e)
	if err != nil {
		return diagnosis{}, err
	}
	wd, err := os.Getwd()
	if err != nil {
		return diagnosis{}, fmt.Errorf("working folder: %w", err)
	}
	p := doctor.Places{
		CacheDir: cfg.CacheDir, WorkDir: wd, TempDir: os.TempDir(),
		Go: "go", Python: "python3", NPM: "npm",
	}
	d := diagnosis{Fetch: []fetch.Item{}}
	var wrong []doctor.Result
	for _, name := range []string{fetch.Envoy, fetch.Llama, fetch.Model} {
		items, err := fetch.Plan(cfg, name)
		if errors.Is(err, fetch.ErrUnsupported) {
			p.Unsupported = append(p.Unsupported, name)
			continue
		}
		if err != nil {
			// The user's own file is none: a finding like the others.
			r := doctor.Result{Name: name, Status: doctor.Fail, Found: err.Error(), Remedy: "correct it"}
			if h, ok := errors.AsType[hinter](err); ok {
				r.Remedy = h.Hint()
			}
			wrong = append(wrong, r)
			continue
		}
		for _, it := range items {
			p.ToFetch = append(p.ToFetch, it.Name)
			p.FetchBytes += it.Download + it.Disk
		}
		d.Fetch = append(d.Fetch, items...)
	}
	d.Checks = append(doctor.Check(doctor.Gather(ctx, p)), wrong...)
	d.OK = doctor.Failed(d.Checks) == 0
	return d, nil
}

// print writes one line per check, and what can be done about it below.
func (d diagnosis) print(e *env) error {
	for _, r := range d.Checks {
		fmt.Fprintf(e.stdout, "%-5s %-13s %s\n", r.Status, r.Name, r.Found)
		if r.Remedy != "" {
			fmt.Fprintf(e.stdout, "%20s→ %s\n", "", r.Remedy)
		}
	}
	_, err := fmt.Fprintln(e.stdout, fetch.Announce(d.Fetch))
	return err
}
