//go:build linux && (amd64 || arm64)

// Package libffi looks for libffi.so.8 before anything needs it, and says what to
// install when the dynamic linker will not find it.
//
// The foreign-function package below yzma opens that library in its own
// initializer and panics without it, so every command, `kvmesh doctor` too, would
// end in a stack trace. Initializers run in the order of import paths among those
// that are ready, and this package imports nothing but syscall, so that it is
// ready long before the other one. A test holds both.
package libffi

import "syscall"

// name is the library, as the dynamic linker knows it.
const name = "libffi.so.8"

const advice = "kvmesh: " + name + ` is not installed; the engine that runs models needs it
hint: Debian 12, Ubuntu 22.04 or newer: apt install libffi8; Fedora, RHEL 9: dnf install libffi
`

func init() {
	if installed("/", syscall.Getenv) {
		return
	}
	_, _ = syscall.Write(2, []byte(advice))
	syscall.Exit(1)
}

// installed looks where the dynamic linker does: LD_LIBRARY_PATH, its cache, the
// standard folders. Systems that have others (Nix) are taken to know better.
func installed(root string, getenv func(string) (string, bool)) bool {
	for _, variable := range []string{"LD_PRELOAD", "NIX_LD", "NIX_PROFILES"} {
		if _, set := getenv(variable); set {
			return true
		}
	}
	path, _ := getenv("LD_LIBRARY_PATH")
	for _, dir := range split(path) {
		if exists(dir + "/" + name) {
			return true
		}
	}
	for _, dir := range []string{"lib64", "usr/lib64", "lib", "usr/lib"} {
		if exists(root + dir + "/" + name) {
			return true
		}
	}
	cache, ok := read(root + "etc/ld.so.cache")
	return !ok || contains(cache, name+"\x00")
}

// split cuts a list of folders at its colons and semicolons.
func split(list string) (dirs []string) {
	start := 0
	for i := 0; i <= len(list); i++ {
		if i < len(list) && list[i] != ':' && list[i] != ';' {
			continue
		}
		if i > start {
			dirs = append(dirs, list[start:i])
		}
		start = i + 1
	}
	return dirs
}

// exists says whether there is a file.
func exists(path string) bool {
	var st syscall.Stat_t
	return syscall.Stat(path, &st) == nil
}

// read returns a file's content, and whether it could be read.
func read(path string) ([]byte, bool) {
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, false
	}
	defer syscall.Close(fd)
	var content []byte
	for chunk := make([]byte, 64<<10); ; {
		n, err := syscall.Read(fd, chunk)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return nil, false
		}
		if n == 0 {
			return content, true
		}
		content = append(content, chunk[:n]...)
	}
}

// contains looks for a text in bytes; package bytes would come too late.
func contains(content []byte, text string) bool {
	for i := 0; i+len(text) <= len(content); i++ {
		if string(content[i:i+len(text)]) == text {
			return true
		}
	}
	return false
}
