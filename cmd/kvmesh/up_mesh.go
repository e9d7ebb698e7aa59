package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"gopkg.in/natefinch/lumberjack.v2"

	"github.com/kvmesh/kvmesh/internal/fetch"
	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/internal/supervise"
)

// localMesh is everything that `kvmesh up` decided before it starts anything,
// and the children it then runs.
type localMesh struct {
	e     *env
	set   *policy.Set
	self  string // this executable
	paths fetch.Paths

	stateDir string // .kvmesh: up.json and logs, kept after the end
	runDir   string // sockets, generated files and state of this run, removed at the end
	addr     struct{ openai, admin, api, metrics string }
	workers  []localWorker
	policies []string // files in runDir for the children

	reaper   *supervise.Reaper
	group    *supervise.Group
	envoyLog *lumberjack.Logger
}

// localWorker is one worker process.
type localWorker struct {
	pool *policy.WorkerPool
	policy.Local
	addr string
}

// newLocalMesh fetches what is missing, picks ports and makes the folders. The
// caller must close it.
func newLocalMesh(ctx context.Context, e *env, o upOptions, set *policy.Set) (*localMesh, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find own executable: %w", err)
	}
	m := &localMesh{e: e, set: set, self: self}
	if m.paths, err = ensureAssets(ctx, e, set); err != nil {
		return nil, err
	}
	if err := m.pickPorts(); err != nil {
		return nil, err
	}
	if m.stateDir, err = filepath.Abs(filepath.Join(o.dir, ".kvmesh")); err != nil {
		return nil, fmt.Errorf("state folder: %w", err)
	}
	if err := os.MkdirAll(filepath.Join(m.stateDir, "logs"), 0o700); err != nil {
		return nil, fmt.Errorf("state folder: %w", err)
	}
	// Unix socket paths are short, so the sockets live in the system's folder
	// for temporary files. MkdirTemp makes it 0700.
	if m.runDir, err = os.MkdirTemp("", "kvmesh-"); err != nil {
		return nil, fmt.Errorf("run folder: %w", err)
	}
	if m.reaper, err = supervise.StartReaper(self, []string{"reap"}, m.runDir); err != nil {
		_ = os.RemoveAll(m.runDir) // nothing is in it yet
		return nil, err
	}
	m.group = supervise.NewGroup(e.log, m.reaper)
	m.envoyLog = &lumberjack.Logger{Filename: m.logFile("envoy.log"), MaxSize: 16, MaxBackups: 1}
	return m, nil
}

// ensureAssets fetches what the policy's engines need.
func ensureAssets(ctx context.Context, e *env, set *policy.Set) (fetch.Paths, error) {
	names := []string{fetch.Envoy}
	for _, p := range set.Pools {
		if p.Engine == policy.EngineLlamaCpp && len(p.Local) > 0 {
			names = append(names, fetch.Llama)
			if p.Worker.Weights == "" {
				names = append(names, fetch.Model)
			}
			break
		}
	}
	cfg, err := fetchConfig(e)
	if err != nil {
		return fetch.Paths{}, err
	}
	return e.ensure(ctx, cfg, names...)
}

func (m *localMesh) pickPorts() error {
	l := m.set.Mesh.Listen
	for _, p := range []struct {
		to   *string
		addr string
	}{{&m.addr.openai, l.OpenAI}, {&m.addr.admin, l.Admin}, {&m.addr.api, l.API}, {&m.addr.metrics, l.Metrics}} {
		addr, err := supervise.FreePort(p.addr)
		if err != nil {
			return withHint(err, "set another port in the Mesh document's listen, or 0 for a free one; is another `kvmesh up` running?")
		}
		*p.to = addr
	}
	for i := range m.set.Pools {
		pool := &m.set.Pools[i]
		for _, w := range pool.Local {
			addr, err := supervise.FreePort(net.JoinHostPort("127.0.0.1", strconv.Itoa(w.Port)))
			if err != nil {
				return fmt.Errorf("worker %s: %w", w.ID, err)
			}
			m.workers = append(m.workers, localWorker{pool: pool, Local: w, addr: addr})
		}
	}
	return nil
}

// writeFiles puts the policy where the children read it.
func (m *localMesh) writeFiles(files []policy.File) error {
	for i, f := range files {
		name := filepath.Join(m.runDir, fmt.Sprintf("policy-%d.yaml", i))
		if err := os.WriteFile(name, f.Data, 0o600); err != nil {
			return fmt.Errorf("write policy for the children: %w", err)
		}
		m.policies = append(m.policies, name)
	}
	return nil
}

func (m *localMesh) logFile(name string) string { return filepath.Join(m.stateDir, "logs", name) }

func (m *localMesh) close() {
	if err := m.reaper.Close(); err != nil {
		m.e.log.Warn("run folder not removed", "dir", m.runDir, "err", err)
	}
	if err := m.envoyLog.Close(); err != nil {
		m.e.log.Warn("close Envoy's log", "err", err)
	}
	// A later command must not take this mesh for a running one.
	if err := os.Remove(filepath.Join(m.stateDir, "up.json")); err != nil && !os.IsNotExist(err) {
		m.e.log.Warn("remove up.json", "err", err)
	}
}

// start runs all children until ctx ends, then stops them in order: traffic
// first, the control plane last. The channel is closed when all are gone.
func (m *localMesh) start(ctx context.Context) <-chan struct{} {
	background := context.WithoutCancel(ctx)
	layers := [][]func(context.Context){
		{m.child(m.envoySpec()), m.serveSnapshot, m.rotateAccessLog},
		{m.child(m.gatewaySpec())},
		nil,
		{m.child(m.controlPlaneSpec())},
	}
	for _, w := range m.workers {
		layers[2] = append(layers[2], m.child(m.workerSpec(w)))
	}
	stops := make([]func(), len(layers))
	for i := len(layers) - 1; i >= 0; i-- {
		lctx, cancel := context.WithCancel(background)
		var wg sync.WaitGroup
		for _, run := range layers[i] {
			wg.Go(func() { run(lctx) })
		}
		stops[i] = func() { cancel(); wg.Wait() }
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		<-ctx.Done()
		for _, stop := range stops {
			stop()
		}
	}()
	return done
}

func (m *localMesh) child(s supervise.Spec) func(context.Context) {
	return func(ctx context.Context) { m.group.Run(ctx, s) }
}

func (m *localMesh) selfSpec(name string, args ...string) supervise.Spec {
	args = append(args, "--log-level", m.e.logLevel, "--log-format", m.e.logFormat)
	return supervise.Spec{Name: name, Path: m.self, Args: args, Log: m.e.stderr, Grace: 5 * time.Second}
}

func (m *localMesh) withPolicies(args ...string) []string {
	for _, p := range m.policies {
		args = append(args, "-f", p)
	}
	return args
}

func (m *localMesh) controlPlaneSpec() supervise.Spec {
	return m.selfSpec("controlplane", m.withPolicies("controlplane", "--run-dir", m.runDir,
		"--openai", m.addr.openai, "--api", m.addr.api, "--access-log", m.logFile("access.log"))...)
}

func (m *localMesh) gatewaySpec() supervise.Spec {
	return m.selfSpec("gateway", m.withPolicies("gateway", "--run-dir", m.runDir, "--metrics", m.addr.metrics)...)
}

func (m *localMesh) workerSpec(w localWorker) supervise.Spec {
	p, set := w.pool, w.pool.Worker
	args := []string{
		"worker", "--id", w.ID, "--zone", w.Zone, "--pool", p.Name, "--model", p.Model, "--engine", p.Engine,
		"--listen", w.addr, "--control-plane", "http://" + m.addr.api,
		"--max-body", strconv.FormatInt(int64(m.set.Mesh.MaxBody), 10),
		"--context-length", strconv.Itoa(set.ContextLength), "--max-num-seqs", strconv.Itoa(set.MaxNumSeqs),
		"--max-queue", strconv.Itoa(set.MaxQueue), "--drain", p.Drain.D().String(),
	}
	for _, a := range m.set.Aliases(p.Name) {
		args = append(args, "--alias", a)
	}
	switch p.Engine {
	case policy.EngineLlamaCpp:
		weights := set.Weights
		if weights == "" {
			weights = m.paths.Model
		}
		args = append(args, "--llama-lib", m.paths.LlamaLib, "--weights", weights, "--threads", strconv.Itoa(set.Threads))
	case policy.EngineSim:
		args = append(args, "--sim-ttft", p.Sim.TTFT.D().String(), "--sim-itl", p.Sim.ITL.D().String())
	}
	return m.selfSpec(w.ID, args...)
}
