package doctor

import (
	"cmp"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/kvmesh/kvmesh/internal/supervise"
)

// needMemory is what Envoy and three workers with the real model take, of which
// they share the model's 250 MB.
const needMemory = 1500 * mega

// memory is only warned about: the simulated engine runs in far less, and the
// system may have swap.
func memory(f Facts) Result {
	r := Result{Name: "memory", Status: OK, Found: size(f.Memory) + " available"}
	switch {
	case f.Memory < 0:
		r.Found = "not known on this system"
	case f.Memory < needMemory:
		r.Status = Warn
		r.Remedy = "three workers with the real model take about " + size(needMemory) + "; close something, or use examples/sim.yaml"
	}
	return r
}

// sharedMemory holds KV checkpoints that processes of one machine share. A
// container has 64 MB there unless told otherwise.
func sharedMemory(f Facts) Result {
	r := Result{Name: "/dev/shm", Status: OK, Found: size(f.SharedMemory) + " free"}
	switch {
	case f.OS != "linux":
		r.Found = "not used on this system"
	case f.SharedMemory < 0:
		r.Status, r.Found = Warn, "missing"
		r.Remedy = "mount it (mount -t tmpfs tmpfs /dev/shm), or checkpoints go to disk"
	case f.SharedMemory < 256*mega:
		r.Status = Warn
		r.Remedy = "give it 1 GB for checkpoints (docker run --shm-size=1g; else mount -o remount,size=1g /dev/shm)"
	}
	return r
}

// cacheDisk must hold packages and unpacked assets at the same time, until the
// packages are removed.
func cacheDisk(f Facts) Result {
	r := Result{Name: "disk, cache", Status: OK, Found: fmt.Sprintf("%s free at %s, %s needed", size(f.CacheFree), f.CacheDir, size(f.FetchBytes))}
	const remedy = "set XDG_CACHE_HOME to a folder on a larger disk"
	switch {
	case f.CacheDir == "":
		r.Status, r.Found = Fail, fmt.Sprintf("no place for it: %v", f.CacheError)
		r.Remedy = "set HOME or XDG_CACHE_HOME to a folder that can be written"
	case f.CacheError != nil && len(f.ToFetch) > 0:
		r.Status, r.Found = Fail, fmt.Sprintf("%s cannot be written: %v", f.CacheDir, f.CacheError)
		r.Remedy = "set XDG_CACHE_HOME to a folder that can be written"
	case f.CacheFree < f.FetchBytes:
		r.Status = Fail
		r.Remedy = "free some, or " + remedy
	}
	return r
}

// workDisk gets .kvmesh with logs and checkpoints, and bin.
func workDisk(f Facts) Result {
	r := Result{Name: "disk, here", Status: OK, Found: fmt.Sprintf("%s free at %s", size(f.WorkFree), f.WorkDir)}
	switch {
	case f.WorkError != nil:
		r.Status, r.Found = Warn, fmt.Sprintf("%s cannot be written: %v", f.WorkDir, f.WorkError)
		r.Remedy = "run in another folder, or give kvmesh up another one with --dir DIR"
	case f.WorkFree < 500*mega:
		r.Status = Warn
		r.Remedy = "logs, builds and checkpoints go here: free 500 MB"
	}
	return r
}

// openFiles: a stream takes one descriptor in each of client, Envoy, gateway and
// worker. Envoy's own default for its breakers is 1024 connections.
func openFiles(f Facts) Result {
	r := Result{Name: "open files", Status: OK, Found: strconv.FormatUint(f.OpenFiles, 10)}
	switch {
	case f.OpenFiles < 256:
		r.Status = Fail
	case f.OpenFiles < 4096:
		r.Status = Warn
	default:
		return r
	}
	r.Remedy = "raise the limit: ulimit -n 65536 (each stream takes about four)"
	return r
}

// socket: the kernel's sockaddr_un has a fixed size, and a path that is longer
// fails only when the run is under way.
func socket(f Facts) Result {
	n, limit := len(f.Socket), supervise.MaxSocketPath(f.OS)
	r := Result{Name: "socket path", Status: OK, Found: fmt.Sprintf("%d of %d bytes", n, limit)}
	const remedy = "set TMPDIR to a short folder that exists and is writable, such as /tmp"
	switch {
	case f.TempError != nil:
		r.Status, r.Found, r.Remedy = Fail, f.TempError.Error(), remedy
	case n > limit:
		r.Status, r.Remedy = Fail, remedy
		r.Found += ": " + f.Socket
	case f.TempComplaint != nil:
		r.Status, r.Remedy = Warn, remedy
		r.Found += fmt.Sprintf(" in %s, because of %v", filepath.Dir(filepath.Dir(f.Socket)), f.TempComplaint)
	}
	return r
}

// ownEnvoy asks the user's own Envoy, because the configuration uses what older
// ones do not know.
func ownEnvoy(f Facts) Result {
	r := Result{Name: "envoy", Status: OK, Found: cmp.Or(f.EnvoyVersion, "no version") + " at " + f.OwnEnvoy}
	switch {
	case f.EnvoyVersion == "":
		r.Status = Fail
		r.Remedy = "it does not answer --version: set KVMESH_ENVOY to an Envoy for this machine, or unset it to use the pinned one"
	case f.EnvoyVersion != testedEnvoy && !strings.HasPrefix(f.EnvoyVersion, testedEnvoy+"."):
		r.Status = Warn
		r.Remedy = "Envoy " + testedEnvoy + " is tested; another may refuse a part of its configuration: unset KVMESH_ENVOY to use the pinned one"
	}
	return r
}

// ports are those that the policy fixes; free ones are chosen at the start.
func ports(f Facts) Result {
	r := Result{Name: "ports", Status: OK}
	var free, taken []string
	for _, p := range f.Ports {
		if p.Error == nil {
			free = append(free, p.Address)
			continue
		}
		taken = append(taken, p.Error.Error())
	}
	r.Found = "free: " + strings.Join(free, ", ")
	if len(taken) > 0 {
		r.Status, r.Found = Fail, strings.Join(taken, "; ")
		r.Remedy = "stop what listens there (is another kvmesh up running?), or change the port in the policy; 0 takes a free one"
	}
	return r
}

// loopback: everything listens there by default, and some sandboxes have none.
func loopback(f Facts) Result {
	r := Result{Name: "loopback", Status: OK, Found: "ports of 127.0.0.1 can be bound"}
	if f.Loopback != nil {
		r.Status, r.Found = Fail, f.Loopback.Error()
		r.Remedy = "bring the loopback interface up (ip link set lo up), or allow listening on 127.0.0.1 in the sandbox"
	}
	return r
}

// size writes bytes for people.
func size(n int64) string {
	if n >= giga {
		return fmt.Sprintf("%.1f GiB", float64(n)/giga)
	}
	return fmt.Sprintf("%d MiB", n/mega)
}

// older compares dotted versions by their numbers. What is not a number ends a
// version: 1.27rc1 is 1.27.
func older(have, want string) bool {
	h, w := numbers(have), numbers(want)
	for i := range w {
		if i >= len(h) || h[i] < w[i] {
			return true
		}
		if h[i] > w[i] {
			return false
		}
	}
	return false
}

// numbers splits a version.
func numbers(version string) (list []int) {
	for part := range strings.SplitSeq(version, ".") {
		digits := len(part) - len(strings.TrimLeft(part, "0123456789"))
		n, err := strconv.Atoi(part[:digits])
		if err != nil {
			break
		}
		list = append(list, n)
		if digits < len(part) {
			break
		}
	}
	return list
}
