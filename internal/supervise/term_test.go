package supervise

import (
	"os"
	"os/signal"
	"syscall"
)

// notifyTerm makes this process survive SIGTERM.
func notifyTerm(c chan os.Signal) { signal.Notify(c, syscall.SIGTERM) }
