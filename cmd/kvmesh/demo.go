package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/envoy/admin"
	"github.com/kvmesh/kvmesh/examples"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
)

func demoCommand(e *env) *cobra.Command {
	file := ""
	c := &cobra.Command{
		Use:   "demo",
		Short: "Start a mesh, stream an answer, kill the worker that gave it, ask again",
		Long: `Start the mesh of examples/quickstart.yaml (or -f), stream an answer through Envoy,
show the workers with their weights as Envoy has them, kill the worker that answered
with SIGKILL, and ask again. Everything is stopped at the end.`,
		Example: "  kvmesh demo\n  kvmesh demo -f examples/sim.yaml",
		Args:    cobra.NoArgs,
		RunE:    func(c *cobra.Command, _ []string) error { return runDemo(c.Context(), e, file) },
	}
	c.Flags().StringVarP(&file, "file", "f", "", "policy file (default: the quick start's, built in)")
	return c
}

// demo is one run: a `kvmesh up` as a child, and what its ready line said.
type demo struct {
	e    *env
	cmd  *exec.Cmd
	mesh readyLine
	dir  string
}

func runDemo(ctx context.Context, e *env, file string) (err error) {
	d := &demo{e: e}
	if d.dir, err = os.MkdirTemp("", "kvmesh-demo-"); err != nil {
		return fmt.Errorf("demo folder: %w", err)
	}
	defer func() { err = errors.Join(err, d.stop()) }()
	if file == "" {
		if file, err = d.builtin(); err != nil {
			return err
		}
	}
	d.say("Starting the mesh: kvmesh up -f %s", file)
	if err := d.up(ctx, file); err != nil {
		return err
	}
	d.say("Ready. Any OpenAI client can use %s", d.mesh.OpenAI)
	served, err := d.ask(ctx, "The three primary colors are")
	if err != nil {
		return err
	}
	d.say("The workers, as Envoy's admin port %s shows them:", d.mesh.Admin)
	if err := d.table(ctx); err != nil {
		return err
	}
	if err := d.kill(ctx, served); err != nil {
		return err
	}
	again, err := d.ask(ctx, "The capital of Italy is")
	if err != nil {
		return fmt.Errorf("request after the kill: %w", err)
	}
	d.say("%s is dead, %s answered. The same view from Envoy:", served, again)
	if err := d.table(ctx); err != nil {
		return err
	}
	d.say("Done. Next: `kvmesh up -f examples/quickstart.yaml` keeps it running; README.md goes on from there.")
	return nil
}

func (d *demo) say(format string, args ...any) {
	fmt.Fprintf(d.e.stdout, "\n▸ "+format+"\n", args...)
}

func (d *demo) builtin() (string, error) {
	data, err := examples.Files.ReadFile("quickstart.yaml")
	if err != nil {
		return "", fmt.Errorf("built-in example: %w", err)
	}
	// The demo shares the machine with whatever else runs: take a free port.
	data = bytes.ReplaceAll(data, []byte("127.0.0.1:10000"), []byte("127.0.0.1:0"))
	name := filepath.Join(d.dir, "quickstart.yaml")
	if err := os.WriteFile(name, data, 0o600); err != nil {
		return "", fmt.Errorf("built-in example: %w", err)
	}
	return name, nil
}

// up starts the mesh and waits for its ready line.
func (d *demo) up(ctx context.Context, file string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own executable: %w", err)
	}
	d.cmd = exec.Command(self, "up", "-f", file, "--dir", d.dir, "--log-level", "error")
	d.cmd.Stderr = d.e.stderr
	out, err := d.cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("start the mesh: %w", err)
	}
	if err := d.cmd.Start(); err != nil {
		return fmt.Errorf("start the mesh: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = d.cmd.Process.Signal(syscall.SIGTERM) })
	defer stop()
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err != nil {
		return errors.New("the mesh did not come up; its messages are above")
	}
	if err := json.Unmarshal(line, &d.mesh); err != nil {
		return fmt.Errorf("ready line %q: %w", line, err)
	}
	return nil
}

func (d *demo) stop() error {
	if d.cmd != nil && d.cmd.Process != nil {
		_ = d.cmd.Process.Signal(syscall.SIGTERM) // it may have ended by itself
		if err := d.cmd.Wait(); err != nil {
			return fmt.Errorf("stop the mesh: %w", err)
		}
	}
	return os.RemoveAll(d.dir)
}

// ask streams one completion to stdout and returns the worker that served it.
func (d *demo) ask(ctx context.Context, prompt string) (string, error) {
	list, err := d.workers(ctx)
	if err != nil {
		return "", err
	}
	body, err := json.Marshal(map[string]any{"model": list[0].Model, "prompt": prompt, "max_tokens": 40, "temperature": 0, "stream": true})
	if err != nil {
		return "", fmt.Errorf("encode request: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, d.mesh.OpenAI+"/completions", bytes.NewReader(body))
	if err != nil {
		return "", fmt.Errorf("request: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", fmt.Errorf("request: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096)) // only for the message
		return "", fmt.Errorf("request: status %d: %s", resp.StatusCode, text)
	}
	worker := resp.Header.Get(names.Worker)
	d.say("POST %s/completions, answered by %s:", d.mesh.OpenAI, worker)
	fmt.Fprintf(d.e.stdout, "  %s", prompt)
	return worker, d.print(resp.Body)
}

// print writes the text of a completions stream as it comes.
func (d *demo) print(body io.Reader) error {
	events := openai.NewEventReader(body, 1<<20)
	for {
		ev, err := events.Next()
		if err != nil {
			return fmt.Errorf("stream ended early: %w", err)
		}
		if string(ev.Data) == "[DONE]" {
			fmt.Fprintln(d.e.stdout)
			return nil
		}
		if len(ev.Data) == 0 {
			continue
		}
		var chunk struct {
			Choices []struct{ Text string }
			Error   *struct{ Message string }
		}
		if err := json.Unmarshal(ev.Data, &chunk); err != nil {
			return fmt.Errorf("stream: %w", err)
		}
		if chunk.Error != nil {
			return fmt.Errorf("stream: %s", chunk.Error.Message)
		}
		for _, c := range chunk.Choices {
			fmt.Fprint(d.e.stdout, strings.ReplaceAll(c.Text, "\n", "\n  "))
		}
	}
}

func (d *demo) workers(ctx context.Context) ([]fleet.WorkerView, error) {
	list, err := fleet.NewClient(d.mesh.API).Workers(ctx)
	if err != nil {
		return nil, err
	}
	if len(list) == 0 {
		return nil, errors.New("no workers are registered")
	}
	return list, nil
}

// table prints Envoy's own view of the endpoints.
func (d *demo) table(ctx context.Context) error {
	clusters, err := admin.NewClient(d.mesh.Admin).Clusters(ctx, "^"+names.PoolPrefix)
	if err != nil {
		return err
	}
	for _, cl := range clusters {
		for _, h := range cl.Hosts {
			fmt.Fprintf(d.e.stdout, "  %-14s %-10s %-22s %-10s weight %d\n", cl.Name, h.WorkerID, h.Address, h.EDSHealth, h.Weight)
		}
	}
	return nil
}

// kill sends SIGKILL to a worker's process.
func (d *demo) kill(ctx context.Context, id string) error {
	list, err := d.workers(ctx)
	if err != nil {
		return err
	}
	for _, w := range list {
		if w.ID == id && w.PID > 0 {
			d.say("kill -9 %d (%s)", w.PID, id)
			if err := syscall.Kill(int(w.PID), syscall.SIGKILL); err != nil {
				return fmt.Errorf("kill %s: %w", id, err)
			}
			return nil
		}
	}
	return fmt.Errorf("worker %q that answered is not in the list", id)
}
