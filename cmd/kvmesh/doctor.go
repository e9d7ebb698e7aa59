package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/internal/doctor"
	"github.com/kvmesh/kvmesh/internal/fetch"
	"github.com/kvmesh/kvmesh/internal/policy"
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
	var files []string
	c := &cobra.Command{
		Use:   "doctor [-f FILE …]",
		Short: "Check what a run needs on this machine, with a remedy for what is missing",
		Long: `Doctor checks the platform, the tools that fetch what a run needs, the shared
libraries, memory, disks and limits, your own Envoy where KVMESH_ENVOY names one,
and with -f the ports of a policy. Each line is ok, warn or fail; it exits with 1
when one failed. Nothing is changed and nothing is fetched.`,
		Example: `  kvmesh doctor
  kvmesh doctor -f examples/quickstart.yaml
  kvmesh doctor -o json | jq '.checks[] | select(.status != "ok")'`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			json, err := asJSON(output)
			if err != nil {
				return err
			}
			d := diagnose(c.Context(), e, files)
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
	c.Flags().StringArrayVarP(&files, "file", "f", nil, "policy file whose ports are to be checked, may be repeated")
	return c
}

// diagnose looks at the machine, at what is already in the cache and at the policy
// files. What is wrong is a finding, never an error: the other lines still help.
func diagnose(ctx context.Context, e *env, files []string) diagnosis {
	wd, err := os.Getwd()
	if err != nil {
		wd = "."
	}
	p := doctor.Places{WorkDir: wd, Go: "go", Python: "python3", NPM: "npm"}
	var dir string
	dir, p.TempComplaint, p.TempError = e.tempDir()
	p.Socket = filepath.Join(dir, longestSocket())
	cfg, err := fetchConfig(e)
	if err != nil {
		p.CacheError = err
		cfg.CacheDir = filepath.Join(wd, "no-cache") // nothing is there
	} else {
		p.CacheDir = cfg.CacheDir
	}
	d := diagnosis{Fetch: []fetch.Item{}}
	wrong := d.plan(cfg, &p)
	if len(files) > 0 {
		set, err := readPolicies(files)
		if err != nil {
			wrong = append(wrong, finding("policy", err))
		} else {
			p.Ports = fixedPorts(set)
		}
	}
	d.Checks = append(doctor.Check(doctor.Gather(ctx, p)), wrong...)
	d.OK = doctor.Failed(d.Checks) == 0
	return d
}

// plan notes what a run would fetch, and returns what is wrong with the user's own
// files.
func (d *diagnosis) plan(cfg fetch.Config, p *doctor.Places) (wrong []doctor.Result) {
	for _, name := range []string{fetch.Envoy, fetch.Llama, fetch.Model} {
		own, items, err := fetch.Plan(cfg, name)
		if errors.Is(err, fetch.ErrUnsupported) {
			p.Unsupported = append(p.Unsupported, name)
			continue
		}
		if err != nil {
			wrong = append(wrong, finding(name, err))
			continue
		}
		if name == fetch.Envoy {
			p.OwnEnvoy = own.Envoy
		}
		for _, it := range items {
			p.ToFetch = append(p.ToFetch, it.Name)
			p.FetchBytes += it.Download + it.Disk
		}
		d.Fetch = append(d.Fetch, items...)
	}
	return wrong
}

// finding is an error as a line of the report.
func finding(name string, err error) doctor.Result {
	r := doctor.Result{Name: name, Status: doctor.Fail, Found: err.Error(), Remedy: "correct it"}
	if h, ok := errors.AsType[hinter](err); ok {
		r.Remedy = h.Hint()
	}
	return r
}

// fixedPorts lists the addresses of a policy whose port is not left open.
func fixedPorts(set *policy.Set) (list []string) {
	l := set.Mesh.Listen
	all := []string{l.OpenAI, l.Admin, l.API, l.Metrics}
	for _, p := range set.Pools {
		for _, w := range p.Local {
			all = append(all, net.JoinHostPort(loopback, strconv.Itoa(w.Port)))
		}
	}
	for _, addr := range all {
		if !strings.HasSuffix(addr, ":0") {
			list = append(list, addr)
		}
	}
	return list
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
