package fetch

import "syscall"

// processGroup puts a client into a process group of its own, and makes the
// kernel end it when kvmesh is killed.
func processGroup() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
