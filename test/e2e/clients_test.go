package e2e

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
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

// pythonClient returns the folder of the installed client. pip's --target does
// not touch the system's Python, so PEP 668 does not stand in its way.
func pythonClient(t *testing.T) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(cache, "kvmesh", "python-openai-3.57.0")
	if _, err := os.Stat(dir); err == nil {
		return dir
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), "python-*")
	if err != nil {
		t.Fatal(err)
	}
	reqs := filepath.Join(testmesh.Root(), "test", "clients", "requirements.txt")
	out, err := exec.Command("python3", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "--only-binary", ":all:", "--target", tmp, "-r", reqs).CombinedOutput()
	if err != nil {
		t.Fatalf("install the Python client: %v\n%s", err, out)
	}
	if err := os.Rename(tmp, dir); err != nil && !os.IsExist(err) {
		t.Fatal(err)
	}
	return dir
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
