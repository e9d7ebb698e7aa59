package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"

	"github.com/kvmesh/kvmesh/test/testmesh"
)

const (
	simModel = "sim-1"
	alias    = "gpt-4o-mini"
)

func startSim(t *testing.T) *testmesh.Mesh {
	t.Helper()
	return testmesh.Start(t, bin, t.TempDir(), "-f", filepath.Join(testmesh.Root(), "examples", "sim.yaml"))
}

// TestOpenAIPython runs the official Python client, installed with pinned hashes
// into the cache folder that the fetched assets use.
func TestOpenAIPython(t *testing.T) {
	lib := pythonClient(t)
	m := startSim(t)
	cmd := exec.Command("python3", filepath.Join(testmesh.Root(), "test", "clients", "client.py"), m.OpenAI, simModel, alias)
	cmd.Env = append(os.Environ(), "PYTHONPATH="+lib, "PYTHONNOUSERSITE=1")
	out, err := cmd.CombinedOutput()
	if err != nil || string(out) != "ok\n" {
		t.Errorf("client: %v\n%s", err, out)
	}
}

// pythonClient returns the folder of the installed client, which is one for each
// Python and each set of pins.
func pythonClient(t *testing.T) string {
	t.Helper()
	dir, err := installClient(t, os.Environ())
	if err != nil {
		t.Fatalf("install the Python client: %v", err)
	}
	return dir
}

// installClient runs the script in an environment.
func installClient(t *testing.T, env []string) (string, error) {
	t.Helper()
	cmd := exec.Command("sh", filepath.Join(testmesh.Root(), "scripts", "openai-python.sh"))
	var said strings.Builder
	cmd.Env, cmd.Stderr = env, &said
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, said.String())
	}
	if said.Len() > 0 {
		t.Log(said.String())
	}
	return strings.TrimSpace(string(out)), nil
}

// TestPythonClientCache: a pip that dies leaves nothing that a later run takes for the
// client, and another Python gets a client of its own.
func TestPythonClientCache(t *testing.T) {
	real, err := exec.LookPath("python3")
	if err != nil {
		t.Fatal(err)
	}
	bin, cache := t.TempDir(), t.TempDir()
	// A Python whose pip writes half a client, and all of it unless it is to die; and
	// whose version is $TAG.
	fake := `#!/bin/sh
case $* in
*"-m pip"*)
	while [ "$1" != --target ]; do shift; done
	mkdir -p "$2" && echo >"$2/half"
	[ -z "${DIE:-}" ] || kill -KILL $$
	echo >"$2/whole" ;;
"- "*) cat >/dev/null; echo "$TAG" ;;
*) exec "` + real + `" "$@" ;;
esac
`
	if err := os.WriteFile(filepath.Join(bin, "python3"), []byte(fake), 0o755); err != nil {
		t.Fatal(err)
	}
	run := func(extra ...string) (string, error) {
		env := append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "XDG_CACHE_HOME="+cache)
		return installClient(t, append(env, extra...))
	}
	if dir, err := run("TAG=a", "DIE=1"); err == nil {
		t.Errorf("pip died, and the client is %s", dir)
	}
	left := filepath.Join(cache, "kvmesh", "python-openai-a.part.99999999") // of a run that was killed with its pip
	if err := os.Mkdir(left, 0o755); err != nil {
		t.Fatal(err)
	}
	a, err := run("TAG=a")
	if err != nil {
		t.Fatal(err)
	}
	b, err := run("TAG=b")
	if err != nil || a == b {
		t.Errorf("two Pythons: %s and %s, %v", a, b, err)
	}
	for _, dir := range []string{a, b} {
		if _, err := os.Stat(filepath.Join(dir, "whole")); err != nil {
			t.Error(err)
		}
	}
	if again, err := run("TAG=a", "DIE=1"); err != nil || again != a { // nothing is fetched
		t.Errorf("again: %s, %v; want %s", again, err, a)
	}
	if parts, err := filepath.Glob(filepath.Join(cache, "kvmesh", "*.part.*")); err != nil || len(parts) > 0 {
		t.Errorf("left behind: %v, %v", parts, err)
	}
}

// TestOpenAIGo drives the mesh with the official Go client.
func TestOpenAIGo(t *testing.T) {
	m := startSim(t)
	ctx := t.Context()
	c := openai.NewClient(option.WithBaseURL(m.OpenAI), option.WithAPIKey("unused"), option.WithMaxRetries(0))
	messages := []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Hello")}

	models, err := c.Models.List(ctx)
	if err != nil || len(models.Data) < 2 {
		t.Fatalf("models: %+v, %v", models, err)
	}
	comp, err := c.Completions.New(ctx, openai.CompletionNewParams{
		Model: simModel, Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String("Hello")}, MaxTokens: openai.Int(5),
	})
	if err != nil || comp.Usage.CompletionTokens != 5 || string(comp.Choices[0].FinishReason) != "length" {
		t.Fatalf("completion: %+v, %v", comp, err)
	}
	params := openai.ChatCompletionNewParams{Model: alias, Messages: messages, MaxCompletionTokens: openai.Int(8), Temperature: openai.Float(0)}
	whole, err := c.Chat.Completions.New(ctx, params)
	if err != nil {
		t.Fatal(err)
	}
	params.StreamOptions.IncludeUsage = openai.Bool(true)
	stream := c.Chat.Completions.NewStreaming(ctx, params)
	acc := openai.ChatCompletionAccumulator{}
	for stream.Next() {
		acc.AddChunk(stream.Current())
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	if acc.Choices[0].Message.Content != whole.Choices[0].Message.Content || acc.Usage.CompletionTokens != whole.Usage.CompletionTokens {
		t.Errorf("stream gave %q (%d tokens), whole %q (%d)", acc.Choices[0].Message.Content, acc.Usage.CompletionTokens,
			whole.Choices[0].Message.Content, whole.Usage.CompletionTokens)
	}
	_, err = c.Chat.Completions.New(ctx, openai.ChatCompletionNewParams{Model: "nope", Messages: messages})
	var apiErr *openai.Error
	if !errors.As(err, &apiErr) || apiErr.StatusCode != 404 || apiErr.Code != "model_not_found" || apiErr.Param != "model" {
		t.Errorf("unknown model: %v", err)
	}
}
