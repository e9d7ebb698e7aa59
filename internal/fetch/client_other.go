//go:build !linux

package fetch

import "syscall"

// processGroup puts a client into a process group of its own. Where the kernel
// cannot end it together with kvmesh it goes on in a folder that nobody reads.
func processGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
