package doctor

import (
	"fmt"
	"strconv"
	"strings"
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
	if f.CacheFree < f.FetchBytes {
		r.Status = Fail
		r.Remedy = "free some, or set XDG_CACHE_HOME to a folder on a larger disk"
	}
	return r
}

// workDisk gets .kvmesh with logs and checkpoints, and bin.
func workDisk(f Facts) Result {
	r := Result{Name: "disk, here", Status: OK, Found: fmt.Sprintf("%s free at %s", size(f.WorkFree), f.WorkDir)}
	if f.WorkFree < 500*mega {
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

// maxSocket is the longest path of a unix socket, without its final NUL.
func maxSocket(goos string) int {
	if goos == "darwin" {
		return 103
	}
	return 107
}

// socket: the kernel's sockaddr_un has a fixed size, and a path that is longer
// fails only when the run is under way.
func socket(f Facts) Result {
	n, limit := len(f.Socket), maxSocket(f.OS)
	r := Result{Name: "socket path", Status: OK, Found: fmt.Sprintf("%d of %d bytes", n, limit)}
	if n > limit {
		r.Status = Fail
		r.Found += ": " + f.Socket
		r.Remedy = "set TMPDIR to a shorter path, such as /tmp"
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
