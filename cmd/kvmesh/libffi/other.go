//go:build !linux || !(amd64 || arm64)

// Package libffi does nothing on this platform: its libffi comes with the binary.
package libffi
