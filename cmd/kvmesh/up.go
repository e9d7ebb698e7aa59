package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/internal/policy"
)

// upOptions are the flags of `kvmesh up`.
type upOptions struct {
	files    []string
	backends []string
	dir      string        // where .kvmesh goes
	timeout  time.Duration // until all is ready
	listen   policy.Listen // replaces the Mesh document's, where not ""
}

// Names below --dir.
const (
	stateFolder = ".kvmesh"
	upFile      = "up.json" // where the running mesh is; removed by the `up` that wrote it
	lockFile    = "lock"    // held by the `up` of this folder
)

func upCommand(e *env) *cobra.Command {
	o := upOptions{}
	c := &cobra.Command{
		Use:   "up (-f FILE … | --backend URL …)",
		Short: "Run a whole mesh on this machine: Envoy, control plane, gateway, workers",
		Long: `Run a whole mesh on this machine and keep it running until Ctrl-C.

When everything is ready, one line of JSON on stdout says where it listens. Logs go
to stderr, Envoy's to .kvmesh/logs/. Parts that die are started again; when this
process ends, however it ends, all of them end with it. Ctrl-C gives running answers
two seconds, then ends them with an error; a second Ctrl-C ends everything at once.`,
		Example: `  kvmesh up -f examples/quickstart.yaml     # three workers with a real model
  kvmesh up -f examples/sim.yaml            # the same with a simulated engine
  kvmesh up --openai 127.0.0.1:8080 --backend http://127.0.0.1:8000 --backend http://127.0.0.1:8001`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := checkSpans(c.Flags(), span{"ready-timeout", 1, anyTime}); err != nil {
				return err
			}
			return runUp(c.Context(), e, o)
		},
	}
	f := c.Flags()
	f.StringArrayVarP(&o.files, "file", "f", nil, "policy file, may be repeated")
	f.StringArrayVar(&o.backends, "backend", nil, "an existing OpenAI-compatible server, may be repeated; needs no file")
	f.StringVar(&o.dir, "dir", ".", "folder that gets .kvmesh/ with logs and the addresses of the mesh; one mesh per folder")
	f.DurationVar(&o.timeout, "ready-timeout", 10*time.Minute, "give up when not everything is ready by then")
	f.StringVar(&o.listen.OpenAI, "openai", "", "ip:port where Envoy takes clients (default the Mesh document's, else a free port)")
	f.StringVar(&o.listen.Admin, "admin", "", "ip:port of Envoy's admin port (default likewise)")
	f.StringVar(&o.listen.API, "api", "", "ip:port of the control plane's API (default likewise)")
	f.StringVar(&o.listen.Metrics, "metrics", "", "ip:port of the gateway's /health and /metrics (default likewise)")
	return c
}

// readyLine is the one line that `kvmesh up` prints on stdout.
type readyLine struct {
	Ready  bool   `json:"ready"`
	OpenAI string `json:"openai"`
	Admin  string `json:"admin"`
	API    string `json:"api"`
}

// runningMesh is the content of .kvmesh/up.json, by which other commands find
// the last `kvmesh up` of this folder.
type runningMesh struct {
	readyLine
	Gateway string `json:"gateway"` // the gateway's /health and /metrics
	PID     int    `json:"pid"`
	RunDir  string `json:"run_dir"`
	KVDir   string `json:"kv_dir,omitempty"` // where the workers keep their KV
}

func runUp(ctx context.Context, e *env, o upOptions) error {
	set, files, err := loadPolicy(o)
	if err != nil {
		return err
	}
	if err := resolveBackends(ctx, o.backends); err != nil {
		return err
	}
	m, err := newLocalMesh(ctx, e, o, set)
	if err != nil {
		return err
	}
	defer m.close()
	if err := m.writeFiles(files); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stopped := m.start(ctx)
	if err := m.waitReady(ctx, o.timeout); err != nil {
		cancel(err)
		<-stopped
		return err
	}
	m.warnServers(ctx)
	m.warnPools()
	go m.serveControl(ctx)
	var kept sync.WaitGroup
	if err := m.announce(); err != nil {
		cancel(err)
	} else {
		kept.Go(func() { m.keep(ctx) })
	}
	<-stopped
	kept.Wait()
	if err := context.Cause(ctx); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// loadPolicy reads the files, or makes a policy for the backends.
func loadPolicy(o upOptions) (*policy.Set, []policy.File, error) {
	switch {
	case len(o.files) > 0 && len(o.backends) > 0:
		return nil, nil, usagef("-f and --backend exclude each other: list the servers under a WorkerPool's static")
	case len(o.files) == 0 && len(o.backends) == 0:
		return nil, nil, withHint(usagef("nothing to run"), "give -f FILE (try -f examples/quickstart.yaml) or --backend URL; `kvmesh init` writes a file")
	}
	var files []policy.File
	for _, name := range o.files {
		data, err := os.ReadFile(name)
		if err != nil {
			return nil, nil, withHint(fmt.Errorf("read policy: %w", err), "`kvmesh init` writes one to start from")
		}
		files = append(files, policy.File{Name: name, Data: data})
	}
	if len(o.backends) > 0 {
		data, err := backendPolicy(o.backends)
		if err != nil {
			return nil, nil, err
		}
		files = append(files, policy.File{Name: "--backend", Data: data})
	}
	set, err := policy.Parse(files...)
	if err != nil {
		return nil, nil, fmt.Errorf("policy is not usable:\n%w", err)
	}
	return set, files, o.override(set)
}

// override puts the addresses that flags name over those of the policy.
func (o upOptions) override(set *policy.Set) error {
	l, given := &set.Mesh.Listen, ""
	for _, f := range []struct {
		name, value string
		to          *string
	}{
		{"openai", o.listen.OpenAI, &l.OpenAI},
		{"admin", o.listen.Admin, &l.Admin},
		{"api", o.listen.API, &l.API},
		{"metrics", o.listen.Metrics, &l.Metrics},
	} {
		if f.value == "" {
			continue
		}
		addr, err := policy.ListenAddress(f.value)
		if err != nil {
			return usagef("--%s %w", f.name, err)
		}
		*f.to = addr
		given += " --" + f.name + " " + f.value
	}
	if first, second, twice := set.PortTwice(); twice {
		return usagef("with%s, %s and %s want the same port", given, first, second)
	}
	return nil
}

// backendPolicy is the policy of `kvmesh up --backend`: one pool of existing
// servers that takes every model name.
func backendPolicy(urls []string) ([]byte, error) {
	servers := make([]map[string]string, len(urls))
	for i, text := range urls {
		u, err := policy.ServerURL(withScheme(text))
		if err != nil {
			return nil, usagef("--backend %w", err)
		}
		servers[i] = map[string]string{"url": u.String()}
	}
	// JSON is YAML; marshalling strings cannot fail.
	list, _ := json.Marshal(servers)
	return fmt.Appendf(nil, `apiVersion: %s
kind: WorkerPool
metadata: {name: backends}
spec: {engine: openai, static: %s}
`, policy.APIVersion, list), nil
}

// resolveTime bounds how long the name of a backend may take to be looked up.
const resolveTime = 5 * time.Second

// resolveBackends sees that the names of the backends are known: a mistyped one would
// only look like a server that is down.
func resolveBackends(ctx context.Context, urls []string) error {
	ctx, cancel := context.WithTimeout(ctx, resolveTime)
	defer cancel()
	for _, text := range urls {
		u, err := policy.ServerURL(withScheme(text))
		if err != nil {
			return usagef("--backend %w", err)
		}
		if _, err := net.DefaultResolver.LookupHost(ctx, u.Hostname()); err != nil {
			return withHint(fmt.Errorf("--backend %s, that is %s: the host is not known: %w", text, u, err), "want http://HOST:PORT; without a port it is 80, with https 443")
		}
	}
	return nil
}

// writeUp writes .kvmesh/up.json.
func (m *localMesh) writeUp() error {
	r := runningMesh{readyLine: m.ready(), Gateway: "http://" + m.addr.metrics, PID: os.Getpid(), RunDir: m.runDir, KVDir: m.kv.dir}
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encode up.json: %w", err)
	}
	if err := os.WriteFile(filepath.Join(m.stateDir, upFile), append(data, '\n'), 0o600); err != nil {
		return fmt.Errorf("write up.json: %w", err)
	}
	return nil
}

// announce writes .kvmesh/up.json and the ready line.
func (m *localMesh) announce() error {
	if err := m.writeUp(); err != nil {
		return err
	}
	line, err := json.Marshal(m.ready())
	if err != nil {
		return fmt.Errorf("encode ready line: %w", err)
	}
	if _, err := fmt.Fprintf(m.e.stdout, "%s\n", line); err != nil {
		return fmt.Errorf("write ready line: %w", err)
	}
	return nil
}

func (m *localMesh) ready() readyLine {
	return readyLine{
		Ready:  true,
		OpenAI: "http://" + m.addr.openai + "/v1",
		Admin:  "http://" + m.addr.admin,
		API:    "http://" + m.addr.api,
	}
}
