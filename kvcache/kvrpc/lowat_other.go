//go:build unix && !linux

package kvrpc

import "net"

// lowat is on Linux what the kernel waits for before it wakes a reader.
type lowat struct{}

func newLowat(net.Conn) *lowat { return nil }

// expect does nothing: the reader is woken whenever something has come.
func (*lowat) expect(int) error { return nil }
