package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/kvmesh/kvmesh/internal/filesum"
	"github.com/kvmesh/kvmesh/kvcache/lmcache"
)

// lmcacheOptions are the flags of `kvmesh lmcache`.
type lmcacheOptions struct {
	lmcache.Config
	listen  []string
	models  []string
	metrics string
}

// lmcacheSocket is the name of the socket in the node's directory.
const lmcacheSocket = "lmcache.sock"

func lmcacheCommand(e *env) *cobra.Command {
	o := lmcacheOptions{}
	c := &cobra.Command{
		Use:   "lmcache",
		Short: "Let unmodified vLLM keep its KV in a KV node, by LMCache's protocol",
		Long: `Serve LMCache's multi-process protocol (gRPC, engine-driven mode) to the engines of this
host, which keep their KV in the memory of the KV node in --kv-node. Start it beside the
node; it outlives the node, and vLLM notices neither the node's death nor its return.

State is found again by weights: those in the folder that vLLM was given as its model, the
one in the cache of Hugging Face if there is one revision there, or what --model says.`,
		Example: `  kvmesh kvnode --dir /dev/shm/kvnode --limit 8589934592
  kvmesh lmcache --kv-node /dev/shm/kvnode
  vllm serve MODEL --kv-transfer-config '{"kv_connector":"LMCacheMPConnector", … }'   # see docs/lmcache.md`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return runLMCache(c.Context(), e, o) },
	}
	f := c.Flags()
	f.StringVar(&o.Dir, "kv-node", "", "directory of the KV node, below /dev/shm; the node may start later")
	f.StringSliceVar(&o.listen, "listen", nil, "where engines connect: unix:PATH or a loopback ip:port, several separated by commas (default unix:DIR/"+lmcacheSocket+")")
	f.IntVar(&o.Chunk, "chunk", 256, "tokens of a chunk, a multiple of vLLM's block size: so many tokens are stored at once, and found again")
	f.StringSliceVar(&o.models, "model", nil, "NAME=FOLDER or NAME=sha256:HASH: the weights of a model that engines call by that name")
	f.StringVar(&o.Variant, "variant", "", "anything else that changes KV and is not in the model's folder, such as rope scaling given to vLLM")
	f.DurationVar(&o.Budget, "budget", 2*time.Second, "most time of a look-up: then vLLM computes what was not found")
	f.StringVar(&o.metrics, "metrics", "", "ip:port of /health and /metrics (default none)")
	_ = c.MarkFlagRequired("kv-node")
	return c
}

func runLMCache(ctx context.Context, e *env, o lmcacheOptions) error {
	w, err := newWeights(e, o.models)
	if err != nil {
		return err
	}
	o.Weights, o.Log = w.hash, e.log
	if len(o.listen) == 0 {
		o.listen = []string{"unix:" + filepath.Join(o.Dir, lmcacheSocket)}
	}
	s, err := lmcache.New(o.Config)
	if _, wrong := errors.AsType[*lmcache.PoolError](err); wrong {
		return withHint(err, "engines open shared memory in /dev/shm only: give the KV node a --dir below it, and no --data elsewhere")
	}
	if err != nil {
		return withHint(err, "give --kv-node the directory of this user's KV node")
	}
	defer s.Close()
	var listeners []net.Listener
	for _, addr := range o.listen {
		l, err := listenLocal(ctx, "--listen", addr)
		if err != nil {
			for _, l := range listeners {
				l.Close()
			}
			return err
		}
		listeners = append(listeners, l)
	}
	e.log.Info("ready for engines", "listen", o.listen, "kv_node", o.Dir, "chunk", o.Chunk)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.Serve(ctx, listeners...) })
	if o.metrics != "" {
		group.Go(func() error { return serveHTTP(ctx, o.metrics, lmcacheHandler(s)) })
	}
	return group.Wait()
}

// lmcacheHandler serves /health and /metrics.
func lmcacheHandler(s *lmcache.Server) http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(s)
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	return mux
}

// listenLocal listens where only this host can connect: on a socket of mode 0600, or on a
// loopback address.
func listenLocal(ctx context.Context, flag, addr string) (net.Listener, error) {
	path, unix := strings.CutPrefix(addr, "unix:")
	if !unix {
		host, _, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, usagef("%s %q: want unix:PATH or ip:port", flag, addr)
		}
		if ip := net.ParseIP(host); ip == nil || !ip.IsLoopback() {
			return nil, usagef("%s %q: want a loopback address; engines of other hosts cannot reach this one's memory", flag, addr)
		}
		return listenTCP(ctx, addr)
	}
	if err := removeDead(flag, path); err != nil {
		return nil, err
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "unix", path)
	if err != nil {
		return nil, withHint(err, "the path of a Unix socket has about 100 characters at most, and its folder must be there")
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// removeDead removes the socket of a process that was killed, and nothing else.
func removeDead(flag, path string) error {
	st, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("%s: %w", flag, err)
	case st.Mode().Type() != fs.ModeSocket:
		return usagef("%s unix:%s: there is a file which is no socket", flag, path)
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	if !errors.Is(err, syscall.ECONNREFUSED) { // it may be slow, or stopped
		if err == nil {
			c.Close()
		}
		return withHint(fmt.Errorf("listen on %s: somebody does already", path), "another process has this socket: give this one another "+flag)
	}
	return os.Remove(path)
}

// weights knows the hashes of what engines load.
type weights struct {
	known map[string]string // folders and hashes by the names of models
	cache string            // of hashes
	hub   string            // the cache of Hugging Face
}

// newWeights reads --model and the environment.
func newWeights(e *env, models []string) (*weights, error) {
	w := &weights{known: map[string]string{}}
	for _, m := range models {
		name, what, ok := strings.Cut(m, "=")
		if !ok || name == "" || what == "" {
			return nil, usagef("--model %q: want NAME=FOLDER or NAME=sha256:HASH", m)
		}
		w.known[name] = what
	}
	cache, err := e.cacheDir()
	if err != nil {
		return nil, err
	}
	w.cache = filepath.Join(cache, "hashes")
	w.hub = e.getenv("HF_HUB_CACHE")
	if home := e.getenv("HF_HOME"); w.hub == "" && home != "" {
		w.hub = filepath.Join(home, "hub")
	}
	if home := e.getenv("HOME"); w.hub == "" && home != "" {
		w.hub = filepath.Join(home, ".cache", "huggingface", "hub")
	}
	return w, nil
}

// hash returns the hash of a model's weights. Behind ## LMCache says how the tokens of a
// chunk are shared out among ranks, which is a matter of the name alone.
func (w *weights) hash(ctx context.Context, model string) (string, error) {
	model, _, _ = strings.Cut(model, "##")
	what, ok := w.known[model]
	if ok && strings.HasPrefix(what, "sha256:") {
		return what, nil
	}
	if !ok {
		var err error
		if what, err = w.find(model); err != nil {
			return "", err
		}
	}
	sum := filesum.Folder
	if st, err := os.Stat(what); err == nil && !st.IsDir() {
		sum = filesum.SHA256 // one file, such as a GGUF
	}
	h, err := sum(ctx, what, w.cache)
	if err != nil {
		return "", err
	}
	return "sha256:" + h, nil
}

// find returns the folder of a model that --model does not name.
func (w *weights) find(model string) (string, error) {
	if filepath.IsAbs(model) {
		return model, nil
	}
	// Of several revisions nobody here knows which one vLLM has loaded.
	revisions, err := filepath.Glob(filepath.Join(w.hub, "models--"+strings.ReplaceAll(model, "/", "--"), "snapshots", "*"))
	if err == nil && len(revisions) == 1 {
		return revisions[0], nil
	}
	return "", fmt.Errorf("%d revisions of %q in %s: give --model %s=FOLDER", len(revisions), model, w.hub, model)
}
