package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/internal/s3link"
	"github.com/kvmesh/kvmesh/worker/modelstore"
)

func modelsCommand(e *env) *cobra.Command {
	c := &cobra.Command{
		Use:   "models",
		Short: "Keep models on this machine's disk: list, pull, verify",
		Long: `The model store holds versions of models on this machine's own disk, so that a worker
starts without the network. A manifest (JSON or YAML) says what a version is: name,
version, files with size and SHA-256, and settings of the engine. A version appears
when all of it is there and checked, and never changes; the next one can be pulled
while workers run from it.

The store is the folder of --store, else KVMESH_STORE, else kvmesh/models in
$XDG_DATA_HOME or ~/.local/share.`,
		Example: `  kvmesh models pull https://models.example/llama-3/v2/manifest.yaml
  kvmesh worker --model-ref llama-3@v2`,
	}
	c.AddCommand(modelsList(e), modelsPull(e), modelsVerify(e))
	return c
}

// storeFlag adds --store to a command.
func storeFlag(c *cobra.Command, to *string) {
	c.Flags().StringVar(to, "store", "", "folder of the model store (default KVMESH_STORE, else kvmesh/models in the user's data folder)")
}

// store opens the model store of a flag or of the environment.
func (e *env) store(flag string) (*modelstore.Store, error) {
	dir := flag
	if dir == "" {
		dir = e.getenv("KVMESH_STORE")
	}
	if data := e.getenv("XDG_DATA_HOME"); dir == "" && filepath.IsAbs(data) {
		dir = filepath.Join(data, "kvmesh", "models")
	}
	if dir == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return nil, withHint(fmt.Errorf("model store: %w", err), "give --store, or set HOME or XDG_DATA_HOME")
		}
		dir = filepath.Join(home, ".local", "share", "kvmesh", "models")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("model store: %w", err)
	}
	return modelstore.Open(dir), nil
}

// sources says how models are reached.
func (e *env) sources() modelstore.Sources { return modelstore.Sources{S3: e.s3()} }

// s3 says how S3 is reached, by the variables of Amazon's own tools.
func (e *env) s3() s3link.Config {
	first := func(names ...string) string {
		for _, name := range names {
			if v := e.getenv(name); v != "" {
				return v
			}
		}
		return ""
	}
	return s3link.Config{
		Endpoint:  first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
		Region:    first("AWS_REGION", "AWS_DEFAULT_REGION"),
		AccessKey: e.getenv("AWS_ACCESS_KEY_ID"), SecretKey: e.getenv("AWS_SECRET_ACCESS_KEY"),
		SessionToken: e.getenv("AWS_SESSION_TOKEN"),
	}
}

func modelsList(e *env) *cobra.Command {
	var dir, output string
	c := &cobra.Command{
		Use:     "ls",
		Short:   "List the models in the store",
		Example: `  kvmesh models ls -o json`,
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			js, err := asJSON(output)
			if err != nil {
				return err
			}
			s, err := e.store(dir)
			if err != nil {
				return err
			}
			list, err := s.List()
			if err != nil {
				return err
			}
			if js {
				return writeJSON(e.stdout, map[string]any{"models": list})
			}
			return printModels(e.stdout, list)
		},
	}
	storeFlag(c, &dir)
	outputFlag(c, &output)
	return c
}

// printModels writes a table.
func printModels(w io.Writer, list []modelstore.Entry) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "NAME\tVERSION\tSTATE\tFILES\tSIZE\tFOLDER\tREASON")
	for _, m := range list {
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\t%s\t%s\n", m.Name, m.Version, m.State, m.Files, megabytes(m.Bytes), m.Dir, dash(m.Reason))
	}
	return t.Flush()
}

// megabytes writes a size for people.
func megabytes(n int64) string { return fmt.Sprintf("%.1f MB", float64(n)/1e6) }

func modelsPull(e *env) *cobra.Command {
	var dir, output string
	c := &cobra.Command{
		Use:   "pull MANIFEST",
		Short: "Fetch a version of a model into the store",
		Long: `Fetch what a manifest describes. MANIFEST is a file, an http(s):// or an s3:// URL;
files without a URL of their own are beside it. A pull that was cut goes on where it
stopped, and every file must have the manifest's size and SHA-256.

S3 takes AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION and
AWS_ENDPOINT_URL.`,
		Example: `  kvmesh models pull s3://models/llama-3/v2/manifest.json`,
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			js, err := asJSON(output)
			if err != nil {
				return err
			}
			s, err := e.store(dir)
			if err != nil {
				return err
			}
			m, err := e.pull(c.Context(), s, args[0])
			if err != nil {
				return err
			}
			if js {
				return writeJSON(e.stdout, modelView(m))
			}
			fmt.Fprintf(e.stdout, "%s: %s in %s\n", m.Manifest.Ref(), megabytes(m.Manifest.Bytes()), m.Dir)
			return nil
		},
	}
	storeFlag(c, &dir)
	outputFlag(c, &output)
	return c
}

// modelView is a model as -o json shows it.
func modelView(m modelstore.Model) map[string]any {
	return map[string]any{
		"name": m.Manifest.Name, "version": m.Manifest.Version, "ref": m.Manifest.Ref().String(),
		"bytes": m.Manifest.Bytes(), "dir": m.Dir, "main": m.Main(),
	}
}

// pull fetches a model and shows how far it is on stderr.
func (e *env) pull(ctx context.Context, s *modelstore.Store, manifest string) (modelstore.Model, error) {
	var done, total atomic.Int64
	shown := make(chan struct{})
	var drawing sync.WaitGroup
	drawing.Go(func() { e.drawProgress(shown, &done, &total) })
	m, err := s.Pull(ctx, e.sources(), manifest, func(d, t int64) {
		done.Store(d)
		total.Store(t)
	})
	close(shown)
	drawing.Wait()
	if _, wrong := errors.AsType[*modelstore.HashError](err); wrong {
		return m, withHint(err, "what was fetched is deleted; the source or the manifest is wrong")
	}
	return m, err
}

// drawProgress shows how far a pull is until shown is closed: redrawn in place on a
// terminal, else as a line every few seconds.
func (e *env) drawProgress(shown <-chan struct{}, done, total *atomic.Int64) {
	terminal, every := isTerminal(e.stderr), 5*time.Second
	if terminal {
		every = 200 * time.Millisecond
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	drawn := false
	for {
		select {
		case <-shown:
			if drawn && terminal {
				fmt.Fprintln(e.stderr)
			}
			return
		case <-tick.C:
		}
		of := total.Load()
		if of == 0 { // the manifest is still on its way
			continue
		}
		line := fmt.Sprintf("%3d %% of %s", 100*done.Load()/of, megabytes(of))
		if drawn = true; terminal {
			fmt.Fprintf(e.stderr, "\r%s\x1b[K", line)
		} else {
			fmt.Fprintln(e.stderr, line)
		}
	}
}

func modelsVerify(e *env) *cobra.Command {
	var dir, output string
	c := &cobra.Command{
		Use:   "verify [NAME@VERSION ...]",
		Short: "Hash models in the store again",
		Long: `Read every file of the named versions, or of all, and compare the SHA-256 with the
manifest's. A file that is wrong is named with both.`,
		Example: `  kvmesh models verify llama-3@v2`,
		RunE: func(c *cobra.Command, args []string) error {
			js, err := asJSON(output)
			if err != nil {
				return err
			}
			s, err := e.store(dir)
			if err != nil {
				return err
			}
			return e.verifyModels(c.Context(), s, args, js)
		},
	}
	storeFlag(c, &dir)
	outputFlag(c, &output)
	return c
}

// verifyModels checks the named versions, or all.
func (e *env) verifyModels(ctx context.Context, s *modelstore.Store, names []string, js bool) error {
	refs, err := wantedModels(s, names)
	if err != nil {
		return err
	}
	type outcome struct {
		Ref string `json:"ref"`
		OK  bool   `json:"ok"`
		Why string `json:"error,omitempty"`
	}
	results, wrong := []outcome{}, 0
	for _, r := range refs {
		o := outcome{Ref: r.String(), OK: true}
		if _, err := s.Verify(ctx, r); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			o.OK, o.Why = false, err.Error()
			wrong++
		}
		results = append(results, o)
		if !js {
			fmt.Fprintf(e.stdout, "%s: %s\n", o.Ref, map[bool]string{true: "ok", false: o.Why}[o.OK])
		}
	}
	if js {
		if err := writeJSON(e.stdout, map[string]any{"models": results}); err != nil {
			return err
		}
	}
	if wrong > 0 {
		return withHint(fmt.Errorf("%d of %d models are not as their manifests say", wrong, len(refs)), "remove the model's folder and pull it again")
	}
	return nil
}

// wantedModels reads names, or lists every whole version for none.
func wantedModels(s *modelstore.Store, names []string) (refs []modelstore.Ref, err error) {
	for _, name := range names {
		r, err := modelstore.ParseRef(name)
		if err != nil {
			return nil, usageError{err}
		}
		refs = append(refs, r)
	}
	if len(names) > 0 {
		return refs, nil
	}
	list, err := s.List()
	if err != nil {
		return nil, err
	}
	for _, m := range list {
		if m.State != modelstore.StatePartial {
			refs = append(refs, modelstore.Ref{Name: m.Name, Version: m.Version})
		}
	}
	return refs, nil
}
