package llamacpp

import (
	"errors"
	"flag"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/enginetest"
	"github.com/kvmesh/kvmesh/worker/llamacpp/tinymodel"
)

var (
	libFlag   = flag.String("llama-lib", "", "folder of llama.cpp's libraries (default: .tools/llama of the repository)")
	modelFlag = flag.String("llama-model", "", "GGUF model (default: .tools/model.gguf of the repository)")
)

// realConfig is a small configuration of the real engine. It skips the test when
// neither libraries nor model are there; one without the other is an error.
func realConfig(tb testing.TB) Config {
	tb.Helper()
	cfg := Config{LibDir: *libFlag, ModelPath: *modelFlag, ContextLen: 256, Cells: 384, MaxSeqs: 3, MaxQueue: 32}
	if cfg.LibDir == "" {
		cfg.LibDir = filepath.Join("..", "..", ".tools", "llama")
	}
	if cfg.ModelPath == "" {
		cfg.ModelPath = filepath.Join("..", "..", ".tools", "model.gguf")
	}
	_, lerr := os.Stat(cfg.LibDir)
	_, merr := os.Stat(cfg.ModelPath)
	if errors.Is(lerr, fs.ErrNotExist) && errors.Is(merr, fs.ErrNotExist) {
		tb.Skip("no llama.cpp and no model: run make tools, or pass -args -llama-lib DIR -llama-model FILE")
	}
	return cfg
}

// openReal opens the real engine and closes it with the test.
func openReal(tb testing.TB, cfg Config) *Engine {
	tb.Helper()
	e, err := Open(tb.Context(), cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { e.Close() })
	return e
}

func TestConformanceFake(t *testing.T) {
	enginetest.Run(t, func(tb testing.TB) worker.Engine {
		return startFake(tb, fakeConfig(), newFakeContext(tb, 256))
	})
}

func TestConformanceReal(t *testing.T) {
	cfg := realConfig(t)
	cfg.ContextLen, cfg.Cells = 96, 160 // one case fills it
	enginetest.RunShared(t, func(tb testing.TB) worker.Engine { return openReal(tb, cfg) })
}

// tinyConfig is realConfig with the tiny model. It needs the libraries only.
func tinyConfig(tb testing.TB) Config {
	tb.Helper()
	cfg := realConfig(tb)
	path, err := tinymodel.Write(tb.TempDir(), 1)
	if err != nil {
		tb.Fatal(err)
	}
	cfg.ModelPath = path
	return cfg
}

func TestConformanceTiny(t *testing.T) {
	cfg := tinyConfig(t)
	enginetest.Run(t, func(tb testing.TB) worker.Engine { return openReal(tb, cfg) })
}

func tokenize(t testing.TB, e *Engine, text string) []int32 {
	t.Helper()
	ids, err := e.tokenize("prompt", text, e.voc.addBOS)
	if err != nil {
		t.Fatal(err)
	}
	return ids
}
