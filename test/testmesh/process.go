package testmesh

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// process is one process of this machine.
type process struct {
	pid, parent int
	zombie      bool
	rss         int // KiB
	args        []string
	name        string // as a part of a mesh, filled in by whoever knows
}

// Alive reports whether a process exists and is no zombie.
func Alive(pid int) bool {
	for _, p := range all() {
		if p.pid == pid {
			return !p.zombie
		}
	}
	return false
}

// Resident returns the resident memory of a process in KiB, 0 when it is gone.
func Resident(pid int) int {
	for _, p := range all() {
		if p.pid == pid {
			return p.rss
		}
	}
	return 0
}

// children lists the living children of a process.
func children(parent int) (list []process) {
	for _, p := range all() {
		if p.parent == parent && !p.zombie {
			list = append(list, p)
		}
	}
	return list
}

// all lists every process: from /proc, for small systems have no ps, and where there
// is none from ps.
func all() (list []process) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil || len(dirs) == 0 {
		return fromPS()
	}
	for _, dir := range dirs {
		if p, ok := fromProc(dir); ok {
			list = append(list, p)
		}
	}
	return list
}

// fromProc reads one folder of /proc; ok is false when the process has ended.
func fromProc(dir string) (p process, ok bool) {
	stat, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return p, false
	}
	line, err := os.ReadFile(filepath.Join(dir, "cmdline"))
	if err != nil {
		return p, false
	}
	// pid (name) state parent …; the name may hold blanks and brackets.
	end := strings.LastIndexByte(string(stat), ')')
	f := strings.Fields(string(stat[end+1:]))
	if end < 0 || len(f) < 22 {
		return p, false
	}
	p.zombie = f[0] == "Z"
	p.parent, _ = strconv.Atoi(f[1]) // the kernel writes numbers
	pages, _ := strconv.Atoi(f[21])
	p.rss = pages * os.Getpagesize() / 1024
	p.args = strings.Split(strings.TrimRight(string(line), "\x00"), "\x00")
	p.pid, err = strconv.Atoi(filepath.Base(dir))
	return p, err == nil
}

// fromPS asks ps.
func fromPS() (list []process) {
	out, err := exec.Command("ps", "-A", "-o", "pid=,ppid=,rss=,stat=,args=").Output()
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(out)) {
		var p process
		var state string
		if n, err := fmt.Sscan(line, &p.pid, &p.parent, &p.rss, &state); n < 4 || err != nil {
			continue
		}
		p.zombie = strings.HasPrefix(state, "Z")
		p.args = strings.Fields(line)[4:]
		list = append(list, p)
	}
	return list
}
