package doctor

import (
	"bufio"
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/ebitengine/purego"
	"golang.org/x/sys/cpu"
	"golang.org/x/sys/unix"

	"github.com/kvmesh/kvmesh/internal/supervise"
)

// Places is where Gather looks, and what its caller knows already.
type Places struct {
	// CacheDir and WorkDir are folders that need not exist yet. Without a
	// CacheDir, CacheError says why.
	CacheDir, WorkDir string
	CacheError        error
	// Socket, TempComplaint and TempError are as in Facts.
	Socket                   string
	TempComplaint, TempError error
	// Go, Python and NPM are the programs to ask for their versions, and OwnEnvoy
	// the user's Envoy, empty for none.
	Go, Python, NPM, OwnEnvoy string
	// Ports are addresses that must be free.
	Ports []string
	// ToFetch, FetchBytes and Unsupported are as in Facts.
	ToFetch     []string
	FetchBytes  int64
	Unsupported []string
}

// Gather looks at the machine. What cannot be found out is reported as missing,
// so it has no error. A program that does not answer is given up after a while.
func Gather(ctx context.Context, p Places) Facts {
	f := Facts{
		OS: runtime.GOOS, Arch: runtime.GOARCH,
		CacheDir: p.CacheDir, WorkDir: p.WorkDir, CacheError: p.CacheError, WorkError: writable(p.WorkDir),
		ToFetch: p.ToFetch, FetchBytes: p.FetchBytes, Unsupported: p.Unsupported,
		SSE42: cpu.X86.HasSSE42, AVX2: cpu.X86.HasAVX2,
		CacheFree: -1, WorkFree: free(p.WorkDir),
		SharedMemory: -1, Memory: available("/proc/meminfo"),
		Socket: p.Socket, TempComplaint: p.TempComplaint, TempError: p.TempError,
		Loopback: listen(ctx), OwnEnvoy: p.OwnEnvoy,
	}
	if p.CacheDir != "" {
		f.CacheFree, f.CacheError = free(p.CacheDir), writable(p.CacheDir)
	}
	if p.OwnEnvoy != "" {
		f.EnvoyVersion = Version(ctx, p.OwnEnvoy, "--version")
	}
	for _, addr := range p.Ports {
		_, err := supervise.FreePort(addr)
		f.Ports = append(f.Ports, Port{addr, err})
	}
	programs(ctx, p, &f)
	if f.OS == "linux" {
		f.Glibc = glibc()
		if info, err := os.Stat("/dev/shm"); err == nil && info.IsDir() {
			f.SharedMemory = free("/dev/shm")
		}
		for _, lib := range []string{"libffi.so.8", "libstdc++.so.6", "libgcc_s.so.1"} {
			if !loads(lib) {
				f.MissingLibraries = append(f.MissingLibraries, lib)
			}
		}
	}
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) == nil {
		// Go raises its own soft limit to the hard one, and children are given
		// what they need out of that.
		f.OpenFiles = uint64(limit.Max)
	}
	return f
}

// programs asks the tools for their versions.
func programs(ctx context.Context, p Places, f *Facts) {
	// Outside of any module, so that an old Go is not asked to read go.mod and
	// a new one does not fetch a toolchain just to say its name.
	f.Go = Version(ctx, p.Go, "version")
	f.NPM = Version(ctx, p.NPM, "--version")
	f.Python = Version(ctx, p.Python, "--version")
	f.Pip = Version(ctx, p.Python, "-m", "pip", "--version")
	managed := `import os, sysconfig; print(os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")))`
	f.ManagedPython = strings.TrimSpace(output(ctx, p.Python, "-c", managed)) == "True"
}

// Version runs a program and returns the first version in its answer, empty when
// there is none. It gives up after a while.
func Version(ctx context.Context, name string, args ...string) string {
	return firstVersion(output(ctx, name, args...))
}

// firstVersion finds a version, as in "pip 23.0.1 from …" or "go version go1.26.8".
func firstVersion(text string) string {
	return regexp.MustCompile(`\d+(\.\d+)+`).FindString(text)
}

// output runs a program outside of any project and returns what it prints.
func output(ctx context.Context, name string, args ...string) string {
	// A wrapper script may ask a network, and one that hangs must not hang this.
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = "/"
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if err != nil {
		return ""
	}
	return string(out)
}

// free returns the free bytes of the disk that holds path, or will hold it.
func free(path string) int64 {
	for {
		var st unix.Statfs_t
		if err := unix.Statfs(path, &st); err == nil {
			return int64(st.Bavail) * int64(st.Bsize)
		}
		parent := filepath.Dir(path)
		if parent == path {
			return -1
		}
		path = parent
	}
}

// writable reports why files cannot be made at path, or in the nearest folder
// above it that exists. Nothing is written.
func writable(path string) error {
	for {
		err := unix.Access(path, unix.W_OK|unix.X_OK)
		parent := filepath.Dir(path)
		if !errors.Is(err, unix.ENOENT) || parent == path {
			return err
		}
		path = parent
	}
}

// available reads how much memory processes may still take, -1 when unknown.
func available(meminfo string) int64 {
	// MemAvailable counts what the kernel would give back from its caches; free
	// memory alone says nothing on a machine that has run for a while.
	f, err := os.Open(meminfo)
	if err != nil {
		return -1
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 || fields[0] != "MemAvailable:" {
			continue
		}
		if kib, err := strconv.ParseInt(fields[1], 10, 64); err == nil {
			return kib << 10
		}
	}
	return -1
}

// listen tries to bind a loopback port and returns what keeps it from that.
func listen(ctx context.Context) error {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	return l.Close()
}

// loads asks the dynamic linker for a library, which is the only one that knows
// all the places it looks in.
func loads(library string) bool {
	handle, err := purego.Dlopen(library, purego.RTLD_LAZY|purego.RTLD_LOCAL)
	if err != nil {
		return false
	}
	// Closing gives the handle back; a library that is in use stays.
	_ = purego.Dlclose(handle)
	return true
}

// glibc asks the C library for its version, empty when it is another one.
func glibc() string {
	handle, err := purego.Dlopen("libc.so.6", purego.RTLD_LAZY|purego.RTLD_LOCAL)
	if err != nil {
		return ""
	}
	address, err := purego.Dlsym(handle, "gnu_get_libc_version")
	if err != nil {
		return ""
	}
	var ask func() string
	purego.RegisterFunc(&ask, address)
	return ask()
}
