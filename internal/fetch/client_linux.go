package fetch

import (
	"os/exec"
	"syscall"
)

// dieWithParent makes the kernel end a client whose kvmesh was killed, so that
// it does not go on writing to a staging folder that another one cleans.
func dieWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
