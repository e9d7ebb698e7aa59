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
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/envoy/admin"
	"github.com/kvmesh/kvmesh/examples"
	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/internal/supervise"
)

func demoCommand(e *env) *cobra.Command {
	file := ""
	c := &cobra.Command{
		Use:   "demo",
		Short: "Start a mesh, stream an answer, kill its worker and watch it go on",
		Long: `Start the mesh of examples/quickstart.yaml (or -f), stream an answer through Envoy,
show the workers with their weights as Envoy has them, kill a worker with SIGKILL in the
middle of an answer, show how the answer goes on elsewhere, and ask again. Everything is
stopped at the end.`,
		Example: "  kvmesh demo\n  kvmesh demo -f examples/sim.yaml",
		Args:    cobra.NoArgs,
		RunE:    func(c *cobra.Command, _ []string) error { return runDemo(c.Context(), e, file) },
	}
	c.Flags().StringVarP(&file, "file", "f", "", "policy file (default: the quick start's, built in)")
	return c
}

// demoPrompt is what the demo asks.
const demoPrompt = "The three primary colors are"

// demo is one run: a `kvmesh up` as a child, and what its ready line said.
type demo struct {
	e      *env
	cmd    *exec.Cmd
	stderr *gate             // of the child
	reaper *supervise.Reaper // removes dir and ends the child when this process is killed
	mesh   readyLine
	dir    string
}

// gate passes on what is written to it until it is shut. Safe for concurrent use.
type gate struct {
	to   io.Writer
	shut atomic.Bool
}

// Write implements io.Writer.
func (g *gate) Write(p []byte) (int, error) {
	if g.shut.Load() {
		return len(p), nil
	}
	return g.to.Write(p)
}

func runDemo(ctx context.Context, e *env, file string) (err error) {
	// The child is tied to this thread: see supervise.Attr.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	d := &demo{e: e, stderr: &gate{to: e.stderr}}
	if d.dir, err = e.makeTemp("kvmesh-demo-"); err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, d.stop(ctx)); ctx.Err() != nil {
			err = ctx.Err()
		}
	}()
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own executable: %w", err)
	}
	if d.reaper, err = supervise.StartReaper(e.log, self, []string{"reap"}, d.dir); err != nil {
		return err
	}
	if file == "" {
		if file, err = d.builtin(); err != nil {
			return err
		}
	}
	d.say("Starting the mesh: kvmesh up -f %s", file)
	if err := d.up(ctx, self, file); err != nil {
		return err
	}
	return d.show(ctx)
}

// show is what a user of the running mesh does and sees.
func (d *demo) show(ctx context.Context) error {
	d.say("Ready. Any OpenAI client can use %s", d.mesh.OpenAI)
	list, err := d.workers(ctx)
	if err != nil {
		return err
	}
	if list[0].Engine == policy.EngineSim {
		d.say("The engine is simulated: what it answers means nothing.")
	} else {
		d.say("The model, %s, is a base model: it goes on with a text and does not chat.", list[0].Model)
	}
	if _, err := d.ask(ctx, demoPrompt); err != nil {
		return err
	}
	d.say("The workers, as Envoy's admin port %s shows them:", d.mesh.Admin)
	if err := d.table(ctx); err != nil {
		return err
	}
	d.say("Now the same question, and its worker is killed in the middle of the answer (`kvmesh drill kill`):")
	killed, err := d.drill(ctx, list[0].Model)
	if err != nil {
		return err
	}
	again, err := d.ask(ctx, "The capital of Italy is")
	if err != nil {
		return fmt.Errorf("request after the kill: %w", err)
	}
	// By now the killed worker may be up again, so nothing is said of how it is.
	d.say("%s was killed, and %s answered. kvmesh up starts %s again by itself; until it is\n  ready, the others take its requests. The workers, as Envoy shows them now:", killed, again, killed)
	if err := d.table(ctx); err != nil {
		return err
	}
	d.say("Done. Next: `%s up -f examples/quickstart.yaml` keeps it running; README.md goes on from there.", d.e.self())
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
func (d *demo) up(ctx context.Context, self, file string) error {
	d.cmd = exec.Command(self, "up", "-f", file, "--dir", d.dir, "--log-level", "error")
	d.cmd.Stderr = d.stderr
	// In a group of its own: a terminal's Ctrl-C comes here only, and stop passes
	// it on once. A second signal would end the child at once.
	d.cmd.SysProcAttr = supervise.Attr()
	d.cmd.WaitDelay = time.Second
	out, err := d.cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("start the mesh: %w", err)
	}
	if err := d.cmd.Start(); err != nil {
		return fmt.Errorf("start the mesh: %w", err)
	}
	d.reaper.Add(d.cmd.Process.Pid)
	type read struct {
		line []byte
		err  error
	}
	ready := make(chan read, 1)
	go func() {
		line, err := bufio.NewReader(out).ReadBytes('\n')
		ready <- read{line, err}
	}()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case r := <-ready:
		if r.err != nil {
			return errors.New("the mesh did not come up; its messages are above")
		}
		if err := json.Unmarshal(r.line, &d.mesh); err != nil {
			return fmt.Errorf("ready line %q: %w", r.line, err)
		}
	}
	return nil
}

// stop ends the mesh and removes its folder.
func (d *demo) stop(ctx context.Context) error {
	defer func() { _ = d.reaper.Close() }() // removes the folder, if it is still there
	if d.cmd == nil || d.cmd.Process == nil {
		return os.RemoveAll(d.dir)
	}
	if ctx.Err() != nil {
		d.stderr.shut.Store(true) // that it is interrupted is said once, by this process
	}
	_ = d.cmd.Process.Signal(syscall.SIGTERM) // it may have ended by itself
	err := d.cmd.Wait()
	d.reaper.Remove(d.cmd.Process.Pid)
	if err != nil && d.mesh.Ready {
		return fmt.Errorf("stop the mesh: %w", err)
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

// drill has the kill drill run, prints what it found and returns who was killed.
func (d *demo) drill(ctx context.Context, model string) (killed string, err error) {
	view, err := askMesh(ctx, d.mesh.API)
	if err != nil {
		return "", err
	}
	r, err := (&driller{
		mesh:   runningMesh{readyLine: d.mesh, Gateway: view.Gateway},
		client: fleet.NewClient(d.mesh.API),
		note:   func(format string, args ...any) { fmt.Fprintf(d.e.stdout, "  "+format+"\n", args...) },
	}).run(ctx, drillOptions{fault: faultKill, prompt: demoPrompt, model: model, tokens: 40, at: 15})
	if err != nil {
		return "", err
	}
	fmt.Fprintln(d.e.stdout)
	for line := range strings.Lines(r.text(demoPrompt)) {
		fmt.Fprint(d.e.stdout, "  "+line)
	}
	return r.From, r.failure()
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
