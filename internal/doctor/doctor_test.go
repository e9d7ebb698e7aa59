package doctor

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// debian is a machine on which all is well.
func debian() Facts {
	return Facts{
		OS: "linux", Arch: "amd64", Glibc: "2.36",
		Go: "1.26.1", Python: "3.11.2", Pip: "23.0.1", ManagedPython: true, NPM: "9.2.0",
		SSE42: true, AVX2: true,
		SharedMemory: 4 * giga, Memory: 8 * giga, CacheFree: 20 * giga, WorkFree: 20 * giga,
		CacheDir: "/home/u/.cache/kvmesh", WorkDir: "/home/u/kvmesh",
		OpenFiles: 1 << 20, Socket: "/tmp/kvmesh-1234567890/xds-snapshot.sock",
		ToFetch: []string{"envoy", "llama", "model"}, FetchBytes: 700 * mega,
	}
}

func TestCheck(t *testing.T) {
	tests := map[string]struct {
		change func(f *Facts)
		name   string
		status Status
		found  string
		remedy string
	}{
		"pep 668 is fine":        {func(*Facts) {}, "python3, pip", OK, "PEP 668", ""},
		"no pip":                 {func(f *Facts) { f.Pip = "" }, "python3, pip", Fail, "pip not found", "apt install python3-pip"},
		"no pip, all is cached":  {func(f *Facts) { f.Pip, f.ToFetch = "", nil }, "python3, pip", Warn, "not found", "python3-pip"},
		"pip of Debian 10":       {func(f *Facts) { f.Pip = "18.1" }, "python3, pip", Fail, "18.1", "20.3"},
		"no npm":                 {func(f *Facts) { f.NPM = "" }, "npm", Fail, "not found", "apt install npm"},
		"no npm, own libraries":  {func(f *Facts) { f.NPM, f.ToFetch = "", []string{"envoy"} }, "npm", Warn, "not found", "KVMESH_LLAMA_LIB"},
		"old npm":                {func(f *Facts) { f.NPM = "5.8.0" }, "npm", Fail, "5.8.0", "npm 6"},
		"no go":                  {func(f *Facts) { f.Go = "" }, "go", Warn, "not found", "build and test only"},
		"go of Debian 12":        {func(f *Facts) { f.Go = "1.19.8" }, "go", Warn, "1.19.8", "too old"},
		"go that can switch":     {func(f *Facts) { f.Go = "1.21" }, "go", OK, "1.21", ""},
		"musl":                   {func(f *Facts) { f.Glibc = "" }, "platform", Fail, "not found", "Debian"},
		"glibc of Ubuntu 20.04":  {func(f *Facts) { f.Glibc = "2.31" }, "platform", Warn, "2.31", "sim"},
		"intel mac":              {func(f *Facts) { f.OS, f.Glibc, f.Unsupported = "darwin", "", []string{"envoy"} }, "platform", Fail, "no package of envoy", "KVMESH_ENVOY"},
		"riscv":                  {func(f *Facts) { f.Arch, f.Unsupported = "riscv64", []string{"envoy", "llama"} }, "platform", Fail, "envoy, llama", "KVMESH_ENVOY and KVMESH_LLAMA_LIB"},
		"no libffi":              {func(f *Facts) { f.MissingLibraries = []string{"libffi.so.8"} }, "libraries", Fail, "libffi.so.8", "apt install libffi8"},
		"no C++":                 {func(f *Facts) { f.MissingLibraries = []string{"libstdc++.so.6", "libgcc_s.so.1"} }, "libraries", Fail, "libgcc_s", "libgcc-s1"},
		"old cpu":                {func(f *Facts) { f.SSE42 = false }, "cpu", Fail, "no sse4.2", "virtual machine"},
		"no avx2":                {func(f *Facts) { f.AVX2 = false }, "cpu", Warn, "no avx2", "slower"},
		"arm":                    {func(f *Facts) { f.Arch, f.SSE42, f.AVX2 = "arm64", false, false }, "cpu", OK, "arm64", ""},
		"little memory":          {func(f *Facts) { f.Memory = giga }, "memory", Warn, "1.0 GiB", "sim.yaml"},
		"memory unknown":         {func(f *Facts) { f.Memory = -1 }, "memory", OK, "not known", ""},
		"docker's /dev/shm":      {func(f *Facts) { f.SharedMemory = 64 * mega }, "/dev/shm", Warn, "64 MiB", "--shm-size"},
		"no /dev/shm":            {func(f *Facts) { f.SharedMemory = -1 }, "/dev/shm", Warn, "missing", "tmpfs"},
		"mac has none":           {func(f *Facts) { f.OS, f.SharedMemory = "darwin", -1 }, "/dev/shm", OK, "not used", ""},
		"cache disk full":        {func(f *Facts) { f.CacheFree = 600 * mega }, "disk, cache", Fail, "600 MiB", "XDG_CACHE_HOME"},
		"full, nothing to fetch": {func(f *Facts) { f.CacheFree, f.FetchBytes = 0, 0 }, "disk, cache", OK, "0 MiB", ""},
		"work disk full":         {func(f *Facts) { f.WorkFree = 100 * mega }, "disk, here", Warn, "100 MiB", "500 MB"},
		"few files":              {func(f *Facts) { f.OpenFiles = 1024 }, "open files", Warn, "1024", "ulimit"},
		"no files":               {func(f *Facts) { f.OpenFiles = 64 }, "open files", Fail, "64", "ulimit"},
		"long socket":            {func(f *Facts) { f.Socket = "/" + strings.Repeat("x", 107) }, "socket path", Fail, "108 of 107", "TMPDIR"},
		"just fits":              {func(f *Facts) { f.Socket = "/" + strings.Repeat("x", 106) }, "socket path", OK, "107 of 107", ""},
		"mac is shorter":         {func(f *Facts) { f.OS, f.Socket = "darwin", "/"+strings.Repeat("x", 103) }, "socket path", Fail, "104 of 103", "TMPDIR"},
		"fallback of TMPDIR":     {func(f *Facts) { f.TempComplaint = errors.New("TMPDIR=x: no such folder") }, "socket path", Warn, "in /tmp, because of TMPDIR=x: no such", "TMPDIR"},
		"no temp folder":         {func(f *Facts) { f.TempError = errors.New("no folder for") }, "socket path", Fail, "no folder for", "TMPDIR"},
		"read-only folder":       {func(f *Facts) { f.WorkError = errors.New("read-only file system") }, "disk, here", Warn, "/home/u/kvmesh cannot be written: read-only", "--dir"},
		"read-only cache":        {func(f *Facts) { f.CacheError = errors.New("permission denied") }, "disk, cache", Fail, "cannot be written: permission", "XDG_CACHE_HOME"},
		"read-only and full":     {func(f *Facts) { f.CacheError, f.ToFetch, f.FetchBytes = errors.New("x"), nil, 0 }, "disk, cache", OK, "free", ""},
		"no home":                {func(f *Facts) { f.CacheDir, f.CacheFree, f.CacheError = "", -1, errors.New("$HOME not defined") }, "disk, cache", Fail, "$HOME not defined", "HOME"},
		"own envoy":              {func(f *Facts) { f.OwnEnvoy, f.EnvoyVersion = "/opt/envoy", "1.40.2" }, "envoy", OK, "1.40.2 at /opt/envoy", ""},
		"older envoy":            {func(f *Facts) { f.OwnEnvoy, f.EnvoyVersion = "/opt/envoy", "1.4" }, "envoy", Warn, "1.4 at", "1.40 is tested"},
		"no envoy at all":        {func(f *Facts) { f.OwnEnvoy = "/bin/true" }, "envoy", Fail, "no version at /bin/true", "KVMESH_ENVOY"},
		"ports":                  {func(f *Facts) { f.Ports = []Port{{Address: "127.0.0.1:1"}} }, "ports", OK, "free: 127.0.0.1:1", ""},
		"taken port":             {func(f *Facts) { f.Ports = []Port{{Address: "a"}, {"b", errors.New("address b cannot be used")}} }, "ports", Fail, "address b", "0 takes"},
		"no loopback":            {func(f *Facts) { f.Loopback = errors.New("cannot assign") }, "loopback", Fail, "cannot assign", "lo up"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			f := debian()
			tt.change(&f)
			results := Check(f)
			var got Result
			for _, r := range results {
				if r.Name == tt.name {
					got = r
				}
				if (r.Remedy == "") != (r.Status == OK) {
					t.Errorf("%s is %s with remedy %q", r.Name, r.Status, r.Remedy)
				}
			}
			if got.Status != tt.status || !strings.Contains(got.Found, tt.found) || !strings.Contains(got.Remedy, tt.remedy) {
				t.Errorf("got %+v\nwant %s, found %q, remedy %q", got, tt.status, tt.found, tt.remedy)
			}
			if (Failed(results) > 0) != (tt.status == Fail) {
				t.Errorf("%d failures", Failed(results))
			}
		})
	}
	for _, r := range Check(debian()) {
		if r.Status != OK {
			t.Errorf("a good machine: %+v", r)
		}
	}
}

func TestOlder(t *testing.T) {
	for _, tt := range []struct {
		have, want string
		older      bool
	}{
		{"1.19.8", "1.21", true},
		{"1.21", "1.21", false},
		{"1.9", "1.21", true},
		{"1.27rc1", "1.27", false},
		{"2", "1.21", false},
		{"1", "1.21", true},
		{"20.3.4", "20.3", false},
		{"", "6", true},
		{"6", "6", false},
		{"rubbish", "6", true},
	} {
		if got := older(tt.have, tt.want); got != tt.older {
			t.Errorf("older(%q, %q) = %v", tt.have, tt.want, got)
		}
	}
}

func TestFirstVersion(t *testing.T) {
	for text, want := range map[string]string{
		"pip 23.0.1 from /usr/lib/python3/dist-packages/pip (python 3.11)": "23.0.1",
		"go version go1.26.8 linux/amd64":                                  "1.26.8",
		"go version go1.27rc1 linux/amd64":                                 "1.27",
		"glibc 2.36\n":                                                     "2.36",
		"Python 3.11.2\n":                                                  "3.11.2",
		"none":                                                             "",
	} {
		if got := firstVersion(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func TestGather(t *testing.T) {
	dir := t.TempDir()
	fake := filepath.Join(dir, "python")
	script := "#!/bin/sh\ncase \"$*\" in *version*) echo \"$2 9.8.7 in $(pwd)\" ;; -c*) echo True ;; esac\n"
	if err := os.WriteFile(fake, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	f := Gather(t.Context(), Places{
		CacheDir: filepath.Join(dir, "not", "yet"), WorkDir: dir, Socket: "/tmp/s", OwnEnvoy: fake, Ports: []string{taken.Addr().String()},
		Go: "/nowhere/go", Python: fake, NPM: "no-such-npm", ToFetch: []string{"envoy"}, FetchBytes: 5,
	})
	if f.Go != "" || f.NPM != "" || f.Python != "9.8.7" || f.Pip != "9.8.7" || !f.ManagedPython {
		t.Errorf("programs: %+v", f)
	}
	if f.CacheFree <= 0 || f.CacheFree != f.WorkFree || f.OpenFiles == 0 || f.Loopback != nil || f.FetchBytes != 5 {
		t.Errorf("machine: %+v", f)
	}
	if f.CacheError != nil || f.WorkError != nil || f.EnvoyVersion != "9.8.7" || len(f.Ports) != 1 || f.Ports[0].Error == nil {
		t.Errorf("what the caller asked for: %+v", f)
	}
	if f := Gather(t.Context(), Places{CacheError: os.ErrNotExist, WorkDir: filepath.Join(fake, "x")}); f.CacheError == nil || f.CacheFree != -1 || f.WorkError == nil {
		t.Errorf("no cache, a folder that cannot be made: %+v", f)
	}
}

func TestLibraryLookup(t *testing.T) {
	if loads("libno-such-library.so.1") {
		t.Error("a library that does not exist was found")
	}
}

func TestAvailableMemory(t *testing.T) {
	file := filepath.Join(t.TempDir(), "meminfo")
	for text, want := range map[string]int64{
		"MemTotal: 9 kB\nMemAvailable:    2048 kB\n": 2 << 20,
		"MemTotal: 9 kB\n":                           -1,
		"MemAvailable: x kB\n":                       -1,
	} {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := available(file); got != want {
			t.Errorf("%q: %d, want %d", text, got, want)
		}
	}
	if got := available(file + ".none"); got != -1 {
		t.Errorf("no such file: %d", got)
	}
}
