package llamacpp

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/worker"
)

// drain runs a generation to its end and returns how many tokens came.
func drain(ctx context.Context, e *Engine, ids []int32, p worker.Params) (int, error) {
	n := 0
	for _, err := range e.Generate(ctx, ids, p) {
		if err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

// TestDepartureAbortsDecode has decodes that end only when they are aborted.
func TestDepartureAbortsDecode(t *testing.T) {
	f := newFakeContext(t, 256)
	entered := make(chan struct{}, 1)
	f.onDecode = func(_ []entry, stop func() bool) error {
		entered <- struct{}{}
		for !stop() {
			runtime.Gosched()
		}
		return errAborted
	}
	e := startFake(t, fakeConfig(), f)
	for _, leave := range []struct {
		name string
		how  func(cancel context.CancelFunc)
		want error
	}{
		{"cancel", func(cancel context.CancelFunc) { cancel() }, context.Canceled},
		{"close", func(context.CancelFunc) { e.Close() }, ErrClosed},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := drain(ctx, e, prompt(20, 1), exactly(4))
			done <- err
		}()
		<-entered
		leave.how(cancel)
		if err := <-done; !errors.Is(err, leave.want) {
			t.Errorf("%s: ended with %v, want %v", leave.name, err, leave.want)
		}
		if l := e.Load(); l.Running != 0 || l.KVUsage != 0 || l.PromptTokens != 0 {
			t.Errorf("%s: load is %+v, want nothing running and nothing counted", leave.name, l)
		}
		cancel()
	}
}

// TestDepartureSparesOthers leaves one of two sequences of a batch.
func TestDepartureSparesOthers(t *testing.T) {
	f := newFakeContext(t, 256)
	var (
		arrived, entered, hold = make(chan struct{}), make(chan struct{}), make(chan struct{})

		once    sync.Once
		stopped bool
	)
	f.onDecode = func(batch []entry, stop func() bool) error {
		<-arrived                                      // the first may not end before the second is there
		if batch[0].slot != batch[len(batch)-1].slot { // both are in
			once.Do(func() {
				close(entered)
				<-hold
				stopped = stop()
			})
		}
		return nil
	}
	e := startFake(t, fakeConfig(), f)
	defer e.Close()
	stay := make(chan error, 1)
	go func() {
		n, err := drain(t.Context(), e, prompt(8, 1), exactly(60))
		if err == nil && n != 60 {
			err = errors.New("wrong number of tokens")
		}
		stay <- err
	}()
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := drain(ctx, e, prompt(8, 2), exactly(60))
		left <- err
	}()
	for l := e.Load(); l.Running+l.Waiting < 2; l = e.Load() {
		runtime.Gosched()
	}
	close(arrived)
	<-entered
	cancel()
	close(hold)
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Errorf("the one that left ended with %v", err)
	}
	if err := <-stay; err != nil {
		t.Errorf("the one that stayed ended with %v", err)
	}
	if stopped {
		t.Error("a decode was aborted although one of its sequences has a consumer")
	}
}

func TestQueueLimit(t *testing.T) {
	cfg := fakeConfig()
	cfg.MaxSeqs, cfg.MaxQueue = 2, -1
	e := startFake(t, cfg, newFakeContext(t, 256))
	defer e.Close()
	ctx, cancel := context.WithCancel(t.Context())
	var wg, started sync.WaitGroup
	for range 2 {
		started.Add(1)
		wg.Go(func() {
			for range e.Generate(ctx, prompt(4, 1), exactly(100)) {
				started.Done()
				<-ctx.Done()
				return
			}
		})
	}
	started.Wait()
	if n, err := drain(t.Context(), e, prompt(4, 1), exactly(4)); !errors.Is(err, worker.ErrBusy) {
		t.Errorf("a third request without a queue: %d tokens, %v; want ErrBusy", n, err)
	}
	cancel()
	wg.Wait()
	if n, err := drain(t.Context(), e, prompt(4, 1), exactly(4)); n != 4 || err != nil {
		t.Errorf("after the others left: %d tokens, %v", n, err)
	}
}

func TestTokenizeAddsBOSOnce(t *testing.T) {
	e := startFake(t, fakeConfig(), newFakeContext(t, 256))
	defer e.Close()
	tokenize := func(ep openai.Endpoint, body string) []int32 {
		req, perr := openai.Parse(ep, []byte(body))
		if perr != nil {
			t.Fatal(perr)
		}
		ids, err := e.Tokenize(req, 0)
		if err != nil {
			t.Fatal(err)
		}
		return ids
	}
	if ids := tokenize(openai.Completions, `{"model":"m","prompt":"hi"}`); len(ids) != 3 || ids[0] != fakeBOS {
		t.Errorf("a prompt gives %v, want BOS and two bytes", ids)
	}
	if ids := tokenize(openai.Completions, `{"model":"m","prompt":[7,8]}`); len(ids) != 2 {
		t.Errorf("ids give %v, want them as they are", ids)
	}
	chat := `{"model":"m","messages":[{"role":"user","content":"hi"}]}`
	if ids := tokenize(openai.Chat, chat); ids[0] != fakeBOS {
		t.Errorf("a chat gives %v, want BOS first", ids[:2])
	}
	var err error
	if e.chat, err = newTemplate("{{ bos_token }}{{ messages[0].content }}", "<bos>", ""); err != nil {
		t.Fatal(err)
	}
	if ids := tokenize(openai.Chat, chat); ids[0] != '<' {
		t.Errorf("a template that writes BOS gives %v, want no second one", ids[:2])
	}
}

func TestTokenizeRefusesHugeTextUnread(t *testing.T) {
	e := startFake(t, fakeConfig(), newFakeContext(t, 256))
	defer e.Close()
	e.text = nil // would panic
	req, perr := openai.Parse(openai.Completions, []byte(`{"model":"m","prompt":"`+strings.Repeat("x", 1000)+`"}`))
	if perr != nil {
		t.Fatal(perr)
	}
	_, err := e.Tokenize(req, 0)
	if oe := (*openai.Error)(nil); !errors.As(err, &oe) || oe.Code != "context_length_exceeded" {
		t.Errorf("1000 bytes, one byte a token, context of 128: %v", err)
	}
}

func TestTemplateRefusalIsTheClients(t *testing.T) {
	e := startFake(t, fakeConfig(), newFakeContext(t, 256))
	defer e.Close()
	var err error
	if e.chat, err = newTemplate("{{ raise_exception('no system role') }}", "", ""); err != nil {
		t.Fatal(err)
	}
	req, perr := openai.Parse(openai.Chat, []byte(`{"model":"m","messages":[{"role":"system","content":"x"}]}`))
	if perr != nil {
		t.Fatal(perr)
	}
	_, err = e.Tokenize(req, 0)
	oe := (*openai.Error)(nil)
	if !errors.As(err, &oe) || oe.Status != 400 || oe.Param != "messages" || !strings.Contains(oe.Message, "no system role") {
		t.Errorf("Tokenize: %v, want a 400 with the template's own words", err)
	}
}

func TestTokenizeAfterClose(t *testing.T) {
	e := startFake(t, fakeConfig(), newFakeContext(t, 256))
	e.Close()
	req, perr := openai.Parse(openai.Completions, []byte(`{"model":"m","prompt":"x"}`))
	if perr != nil {
		t.Fatal(perr)
	}
	if _, err := e.Tokenize(req, 0); !errors.Is(err, ErrClosed) {
		t.Errorf("Tokenize after Close: %v, want ErrClosed", err)
	}
}

func TestConfigValidate(t *testing.T) {
	ok := Config{LibDir: "l", ModelPath: "dir/m.gguf"}
	if err := ok.Validate(); err != nil {
		t.Errorf("defaults: %v", err)
	}
	if got := ok.withDefaults(); got.Name != "m" || got.Cells != 8192 || got.MaxQueue != 256 || got.PrefillTokens != 64 {
		t.Errorf("defaults are %+v", got)
	}
	for name, change := range map[string]func(*Config){
		"LibDir":        func(c *Config) { c.LibDir = "" },
		"ModelPath":     func(c *Config) { c.ModelPath = "" },
		"ContextLen":    func(c *Config) { c.ContextLen = 7 },
		"Cells":         func(c *Config) { c.Cells = 100 },
		"MaxSeqs":       func(c *Config) { c.MaxSeqs = -1 },
		"MaxSeqs 257":   func(c *Config) { c.MaxSeqs = 257 },
		"BatchTokens":   func(c *Config) { c.BatchTokens = 2 },
		"PrefillTokens": func(c *Config) { c.PrefillTokens = -4 },
		"Threads":       func(c *Config) { c.Threads = -1 },
	} {
		c := ok
		change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("bad %s: %v, want an error that names it", name, err)
		}
	}
}
