package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"gopkg.in/natefinch/lumberjack.v2"

	"github.com/kvmesh/kvmesh/internal/fetch"
	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/internal/supervise"
)

// localMesh is everything that `kvmesh up` decided before it starts anything,
// and the children it then runs.
type localMesh struct {
	ports supervise.Ports // of all parts
	e     *env
	set   *policy.Set
	self  string // this executable
	paths fetch.Paths

	stateDir string // .kvmesh: up.json and logs, kept after the end
	runDir   string // sockets, generated files and state of this run, removed at the end
	addr     struct{ openai, admin, api, metrics string }
	workers  []localWorker
	policies []string // files in runDir for the children
	secret   string   // file in runDir, by which workers know the relay
	folder   runFolder
	kv       struct { // of the local workers, together
		dir   string // "" keeps none
		limit int64  // bytes
	}

	lock     *supervise.Lock   // of stateDir
	owned    []*supervise.Lock // of the folders of this run
	reaper   *supervise.Reaper
	group    *supervise.Group
	envoyLog *lumberjack.Logger
	hot      hotRestart // of Envoy
}

// localWorker is one worker process.
type localWorker struct {
	pool *policy.WorkerPool
	policy.Local
	addr string
}

// newLocalMesh locks the folder, fetches what is missing, picks ports and makes the
// folders. The caller must close it.
func newLocalMesh(ctx context.Context, e *env, o upOptions, set *policy.Set) (*localMesh, error) {
	m := &localMesh{e: e, set: set}
	if err := m.prepare(ctx, o.dir); err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

// prepare does what can fail before anything runs.
func (m *localMesh) prepare(ctx context.Context, dir string) (err error) {
	if m.self, err = os.Executable(); err != nil {
		return fmt.Errorf("find own executable: %w", err)
	}
	if err := m.takeFolder(dir); err != nil {
		return err
	}
	if m.paths, err = ensureAssets(ctx, m.e, m.set); err != nil {
		return err
	}
	if err := m.pickPorts(); err != nil {
		return err
	}
	if m.runDir, err = m.makeRun(); err != nil {
		return err
	}
	if m.reaper, err = supervise.StartReaper(m.e.log, m.self, []string{"reap"}, m.runDir); err != nil {
		_ = os.RemoveAll(m.runDir) // nothing is in it yet
		return err
	}
	if len(m.owned) == 0 { // a named folder is marked already
		if err := m.own(m.runDir); err != nil {
			return err
		}
	}
	if err := m.writeSecret(); err != nil {
		return err
	}
	if err := m.makeKV(); err != nil {
		return err
	}
	if err := m.makeAccessLog(); err != nil {
		return fmt.Errorf("make the access log: %w", err)
	}
	m.hot.reaper = m.reaper
	m.group = supervise.NewGroup(m.e.log, m.reaper)
	m.envoyLog = &lumberjack.Logger{Filename: m.logFile("envoy.log"), MaxSize: 16, MaxBackups: 1}
	return nil
}

const hintDir = "--dir DIR puts it into a folder that can be written"

// takeFolder makes dir/.kvmesh and claims it for this process.
func (m *localMesh) takeFolder(dir string) (err error) {
	if m.stateDir, err = filepath.Abs(filepath.Join(dir, stateFolder)); err != nil {
		return fmt.Errorf("state folder: %w", err)
	}
	if err := os.MkdirAll(filepath.Join(m.stateDir, "logs"), 0o700); err != nil {
		return fullError(fmt.Errorf("state folder: %w", err), m.stateDir, hintDir)
	}
	m.lock, err = supervise.Take(filepath.Join(m.stateDir, lockFile))
	if h, ok := errors.AsType[*supervise.HeldError](err); ok {
		by := "another process"
		if h.PID != 0 {
			by = fmt.Sprintf("process %d", h.PID)
		}
		return withHint(fmt.Errorf("a mesh of this folder is running already: %s holds %s", by, h.Path),
			"stop that one first (Ctrl-C, or kill its process), or give this one a folder of its own with --dir DIR")
	}
	if err != nil {
		return fullError(fmt.Errorf("state folder: %w", err), m.stateDir, hintDir)
	}
	m.sweep()
	// What a killed process left there must not be taken for this mesh.
	return m.forget()
}

// forget removes up.json. Only the holder of the lock may do that.
func (m *localMesh) forget() error {
	if err := os.Remove(filepath.Join(m.stateDir, upFile)); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("remove %s: %w", upFile, err)
	}
	return nil
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
		name string
		to   *string
		addr string
	}{
		{"openai", &m.addr.openai, l.OpenAI},
		{"admin", &m.addr.admin, l.Admin},
		{"api", &m.addr.api, l.API},
		{"metrics", &m.addr.metrics, l.Metrics},
	} {
		addr, err := m.ports.Free(p.addr)
		if err != nil {
			return withHint(fmt.Errorf("%s: %w", p.name, err),
				"is another `kvmesh up` running? --"+p.name+" 127.0.0.1:0 takes a free port; the Mesh document's listen."+p.name+" does so for good")
		}
		*p.to = addr
	}
	for i := range m.set.Pools {
		pool := &m.set.Pools[i]
		for _, w := range pool.Local {
			addr, err := m.ports.Free(net.JoinHostPort("127.0.0.1", strconv.Itoa(w.Port)))
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
		if err := m.folder.write(name, f.Data); err != nil {
			return fmt.Errorf("write policy for the children: %w", err)
		}
		m.policies = append(m.policies, name)
	}
	return nil
}

func (m *localMesh) logFile(name string) string { return filepath.Join(m.stateDir, "logs", name) }

// close removes what this run made. It may be called on a half-made mesh.
func (m *localMesh) close() {
	if err := m.reaper.Close(); err != nil {
		m.e.log.Warn("run folder not removed", "dir", m.runDir, "err", err)
	}
	if m.envoyLog != nil {
		if err := m.envoyLog.Close(); err != nil {
			m.e.log.Warn("close Envoy's log", "err", err)
		}
	}
	for _, l := range m.owned {
		_ = l.Close() // of a folder that is gone
	}
	if m.lock == nil {
		return
	}
	if err := m.forget(); err != nil {
		m.e.log.Warn("a later command may take this mesh for a running one", "err", err)
	}
	if err := m.lock.Close(); err != nil {
		m.e.log.Warn("unlock the folder", "err", err)
	}
}

func (m *localMesh) selfSpec(name string, args ...string) supervise.Spec {
	args = append(args, "--log-level", m.e.logLevel, "--log-format", m.e.logFormat)
	return supervise.Spec{Name: name, Path: m.self, Args: args, Log: m.e.stderr, Grace: graceOther}
}

func (m *localMesh) withPolicies(args ...string) []string {
	for _, p := range m.policies {
		args = append(args, "-f", p)
	}
	return args
}

func (m *localMesh) controlPlaneSpec() supervise.Spec {
	return m.selfSpec("controlplane", m.withPolicies("controlplane", "--run-dir", m.runDir,
		"--openai", m.addr.openai, "--api", m.addr.api, "--access-log", m.logFile("access.log"),
		"--envoy-admin", "http://"+m.addr.admin, "--gateway", "http://"+m.addr.metrics)...)
}

func (m *localMesh) gatewaySpec() supervise.Spec {
	s := m.selfSpec("gateway", m.withPolicies("gateway", "--run-dir", m.runDir, "--metrics", m.addr.metrics,
		"--drain", gatewayDrain.String(), "--relay-secret-file", m.secret)...)
	s.Grace = graceGateway
	return s
}

func (m *localMesh) kvNodeSpec() supervise.Spec {
	args := []string{"kvnode", "--dir", m.kv.dir, "--limit", strconv.FormatInt(m.kv.limit, 10)}
	args = append(args, tierArgs(m.set.Mesh.KV.Tiers)...)
	return m.selfSpec("kvnode", append(args, peerArgs(m.set.Mesh.KV.Peers, m.set.Mesh.Registry.Redis)...)...)
}

func (m *localMesh) lmcacheSpec() supervise.Spec {
	l := m.set.Mesh.KV.LMCache
	listen := l.Listen + ",unix:" + m.lmcacheSocket() // in this order
	return m.selfSpec(partLMCache, "lmcache", "--kv-node", m.kv.dir, "--listen", listen, "--chunk", strconv.Itoa(l.Chunk))
}

// lmcacheSocket is where lmcache listens when it listens everywhere.
func (m *localMesh) lmcacheSocket() string { return filepath.Join(m.kv.dir, lmcacheSocket) }

// partLMCache is the name of the child that serves the KV node to engines.
const partLMCache = "lmcache"

// servesEngines reports whether the KV node is to be served to engines.
func (m *localMesh) servesEngines() bool {
	return m.kv.dir != "" && m.set.Mesh.KV.Node && m.set.Mesh.KV.LMCache.Listen != ""
}

func (m *localMesh) workerSpec(w localWorker) supervise.Spec {
	p, set := w.pool, w.pool.Worker
	args := []string{
		"worker", "--id", w.ID, "--zone", w.Zone, "--pool", p.Name, "--model", p.Model, "--engine", p.Engine,
		"--listen", w.addr, "--control-plane", "http://" + m.addr.api,
		"--max-body", strconv.FormatInt(int64(m.set.Mesh.MaxBody), 10),
		"--context-length", strconv.Itoa(set.ContextLength), "--max-num-seqs", strconv.Itoa(set.MaxNumSeqs),
		"--max-queue", strconv.Itoa(set.MaxQueue), "--drain", p.Drain.D().String(),
		"--relay-secret-file", m.secret,
	}
	switch {
	case m.kv.dir != "" && m.set.Mesh.KV.Node:
		args = append(args, "--kv-node", m.kv.dir)
	case m.kv.dir != "":
		args = append(args, "--kv-dir", m.kv.dir, "--kv-limit", strconv.FormatInt(m.kv.limit, 10))
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
