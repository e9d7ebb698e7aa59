package filesum

import (
	"fmt"
	"io/fs"
	"syscall"
)

// changed tells files apart that have the same name, size and time of writing.
func changed(st fs.FileInfo) string {
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return fmt.Sprint(s.Dev, s.Ino, s.Ctimespec.Nano())
	}
	return ""
}
