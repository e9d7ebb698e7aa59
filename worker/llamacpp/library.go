//go:build !nollamacpp && (linux || darwin) && (amd64 || arm64)

package llamacpp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/hybridgroup/yzma/pkg/llama"
	"github.com/hybridgroup/yzma/pkg/loader"
	"github.com/hybridgroup/yzma/pkg/utils"
	"github.com/jupiterrider/ffi"
)

// library is llama.cpp in this process. A C library is loaded once, into one set
// of function addresses, and stays: there is one of these, and it is the only
// state of the package.
type library struct {
	build string                      // versions, part of the fingerprint
	log   atomic.Pointer[slog.Logger] // of the engine opened last
	lines lines

	stops sync.Map // llama.Context as uintptr → func() bool, during an abortable decode

	mu       sync.Mutex // held while opening and loading
	dir      string     // "" = not loaded yet
	tok      ffi.Fun
	setAbort ffi.Fun
	abort    uintptr            // ggml_abort_callback, for every context
	callback uintptr            // llama_progress_callback; made once, C closures are not freed
	progress func(float64) bool // what callback calls; false stops the loading
}

var theLibrary library

// openLibrary loads the libraries of dir, or checks that they are those loaded.
func openLibrary(dir string, log *slog.Logger) (*library, error) {
	l := &theLibrary
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dir != "" && l.dir != dir {
		return nil, fmt.Errorf("llama.cpp is already loaded from %s, one process cannot use %s too", l.dir, dir)
	}
	l.log.Store(log)
	if l.dir != "" {
		return l, nil
	}
	if err := checkLibDir(dir); err != nil {
		return nil, err
	}
	if err := l.open(dir); err != nil {
		return nil, explainLoad(err)
	}
	l.dir = dir
	return l, nil
}

// open checks the version before it lets the binding touch anything. The libraries
// are loaded in the order of their dependencies: a missing one is then named by
// itself, not as the cause of another's failure.
func (l *library) open(dir string) error {
	base, err := loader.LoadLibrary(dir, "ggml-base")
	if err != nil {
		return fmt.Errorf("load %s: %w", libraryNames()[0], err)
	}
	if _, err := loader.LoadLibrary(dir, "ggml"); err != nil {
		return fmt.Errorf("load %s: %w", libraryNames()[1], err)
	}
	lib, err := loader.LoadLibrary(dir, "llama")
	if err != nil {
		return fmt.Errorf("load %s: %w", libraryNames()[2], err)
	}
	version := text(lib, "llama_version")
	if err := checkVersion(dir, version); err != nil {
		return err
	}
	l.build = fmt.Sprintf("llama.cpp %s, ggml %s %s", version, text(base, "ggml_version"), text(base, "ggml_commit"))
	l.tok, err = lib.Prep("llama_tokenize", &ffi.TypeSint32, &ffi.TypePointer, &ffi.TypePointer, &ffi.TypeSint32,
		&ffi.TypePointer, &ffi.TypeSint32, &ffi.TypeUint8, &ffi.TypeUint8)
	if err != nil {
		return fmt.Errorf("find llama_tokenize: %w", err)
	}
	l.setAbort, err = lib.Prep("llama_set_abort_callback", &ffi.TypeVoid, &ffi.TypePointer, &ffi.TypePointer, &ffi.TypePointer)
	if err != nil {
		return fmt.Errorf("find llama_set_abort_callback: %w", err)
	}
	if err := llama.Load(dir); err != nil {
		return fmt.Errorf("bind llama.cpp: %w", err)
	}
	if err := checkLayout(llama.ModelDefaultParams(), llama.ContextDefaultParams()); err != nil {
		return err
	}
	l.abort = purego.NewCallback(func(ctx uintptr) bool {
		stop, ok := l.stops.Load(ctx)
		return ok && stop.(func() bool)()
	})
	llama.LogSet(purego.NewCallback(l.logged))
	llama.Init()
	// The folder has one CPU backend for each generation of processors.
	if llama.GGMLBackendDeviceCount() == 0 {
		return l.because(fmt.Errorf("no compute backend in %s fits this machine: want libggml-cpu-*", dir))
	}
	return nil
}

// text calls a function that returns a C string, "" when the library lacks it.
func text(lib loader.Lib, name string) string {
	f, err := lib.Prep(name, &ffi.TypePointer)
	if err != nil {
		return ""
	}
	var p *byte
	f.Call(unsafe.Pointer(&p))
	return utils.BytePtrToString(p)
}

// checkLayout reads llama.cpp's default parameters through the binding's structs:
// fields that moved do not hold the values known for this version. The fields
// compared are spread from the first to the last, since a field that was added or
// removed moves all that follow it.
func checkLayout(m llama.ModelParams, c llama.ContextParams) error {
	ok := m.SplitMode == llama.SplitModeLayer && m.LoadMode == llama.LoadModeAuto && m.UseExtraBufts == 1 &&
		m.VocabOnly == 0 && m.NoAlloc == 0 && m.ProgressCallback == 0 &&
		c.NCtx == 512 && c.NBatch == 2048 && c.NUbatch == 512 && c.NSeqMax == 1 &&
		c.TypeK == llama.GGMLTypeF16 && c.TypeV == llama.GGMLTypeF16 && c.YarnBetaFast == -1 &&
		c.Offload_kqv == 1 && c.OpOffload == 1 && c.SwaFull == 1 && c.KVUnified == 0 && c.NSamplers == 0 && c.CtxOther == 0
	if ok {
		return nil
	}
	return fmt.Errorf("llama.cpp's default parameters read back wrong: its structs differ from those of version %s, for which %s was made", engineVersion, bindingVersion)
}

// loadModel loads a GGUF file. One load at a time: the binding has one callback.
func (l *library) loadModel(ctx context.Context, path string, progress func(float64)) (llama.Model, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	last := 0.0
	l.progress = func(part float64) bool {
		// The last percent is the context's.
		if p := math.Floor(part * 99); p > last {
			last = p
			progress(p)
		}
		return ctx.Err() == nil
	}
	params := llama.ModelDefaultParams()
	if l.callback == 0 {
		params.SetProgressCallback(func(part float32, _ uintptr) uint8 {
			if l.progress(float64(part)) {
				return 1
			}
			return 0
		})
		l.callback = params.ProgressCallback
	}
	params.ProgressCallback = l.callback
	l.lines.forget()
	m, err := llama.ModelLoadFromFile(path, params)
	switch {
	case ctx.Err() != nil: // the callback may have come too late to stop it
		if err == nil {
			_ = llama.ModelFree(m)
		}
		return 0, fmt.Errorf("load the model %s: %w", path, context.Cause(ctx))
	case err != nil:
		return 0, l.because(fmt.Errorf("load the model %s: %w", path, err))
	}
	return m, nil
}

// tokenize calls llama_tokenize with a length, so that text may hold NUL bytes,
// and with room for the worst case, so that one call is enough. The binding's own
// function hands over a nil pointer for text with a NUL, which crashes the process.
func (l *library) tokenize(v llama.Vocab, s string, bos bool) ([]int32, error) {
	if len(s) > math.MaxInt32-16 {
		return nil, errors.New("text is too long")
	}
	var (
		ids    = make([]int32, len(s)+16)
		in     = unsafe.StringData(s + "\x00") // never nil
		out    = unsafe.SliceData(ids)
		length = int32(len(s))
		room   = int32(len(ids))
		parse  = true
		n      ffi.Arg
	)
	l.tok.Call(unsafe.Pointer(&n), unsafe.Pointer(&v), unsafe.Pointer(&in), unsafe.Pointer(&length),
		unsafe.Pointer(&out), unsafe.Pointer(&room), unsafe.Pointer(&bos), unsafe.Pointer(&parse))
	runtime.KeepAlive(ids)
	runtime.KeepAlive(in)
	if int32(n) < 0 {
		return nil, fmt.Errorf("%d bytes of text gave %d tokens, more than bytes", len(s), -int32(n))
	}
	return ids[:int32(n):int32(n)], nil
}

// abortable lets stop end the decodes of ctx until the returned func is called. C
// callbacks made from Go are never freed and limited in number, so there is one
// for all contexts, and it finds stop by the pointer that comes with it.
func (l *library) abortable(ctx llama.Context, stop func() bool) (done func()) {
	set := func(callback uintptr) {
		data := uintptr(ctx)
		l.setAbort.Call(nil, unsafe.Pointer(&ctx), unsafe.Pointer(&callback), unsafe.Pointer(&data))
	}
	l.stops.Store(uintptr(ctx), stop)
	set(l.abort)
	return func() {
		set(0)
		l.stops.Delete(uintptr(ctx))
	}
}

// logged is llama.cpp's log callback; any thread may call it.
func (l *library) logged(level int32, msg *byte, _ uintptr) uintptr {
	line, level := l.lines.add(level, utils.BytePtrToString(msg))
	if line == "" {
		return 0
	}
	to := slog.LevelDebug
	if llama.LogLevel(level) == llama.LogLevelError {
		to = slog.LevelWarn // what it means for us is for the caller to say
	}
	if log := l.log.Load(); log != nil {
		log.Log(context.Background(), to, "llama.cpp: "+line)
	}
	return 0
}

// because adds the last error that llama.cpp logged: its return values say only
// that something failed. With several engines in a process it may be another's.
func (l *library) because(err error) error {
	if line := l.lines.lastError(); line != "" {
		return fmt.Errorf("%w (llama.cpp: %s)", err, line)
	}
	return err
}

// lines puts llama.cpp's log together, which comes in pieces.
type lines struct {
	mu    sync.Mutex
	part  strings.Builder
	level int32
	last  string // newest error
}

// add takes a piece and returns the line it completes, if any, with its level.
func (p *lines) add(level int32, s string) (string, int32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if llama.LogLevel(level) != llama.LogLevelContinue {
		p.level = level
	}
	p.part.WriteString(s)
	if !strings.HasSuffix(s, "\n") && p.part.Len() < 4096 {
		return "", 0
	}
	line := strings.TrimSpace(p.part.String())
	p.part.Reset()
	if llama.LogLevel(p.level) == llama.LogLevelError {
		p.last = line
	}
	return line, p.level
}

func (p *lines) lastError() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.last
}

func (p *lines) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last = ""
}
