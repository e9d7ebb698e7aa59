// Package chaos runs a mesh under a steady load while workers are killed, stopped,
// drained and cut off the network, and checks every answer, token by token, against
// an undisturbed one.
//
//	go test ./test/chaos                                          # 20 s
//	go test ./test/chaos -timeout 0 -args -chaos-for=30m          # make chaos
//	go test ./test/chaos -args -chaos-seed=7                      # the same schedule again
//
// A seed gives the same faults at the same times; what they meet depends on the
// machine. Of the two workers that are not on the mesh's machine, one is behind a proxy
// that closes connections, refuses new ones, or passes nothing on while they stay open.
// The other is in a network namespace, whose line goes down, or is slow and loses
// packets where the kernel has netem; without root or iproute2 it is behind a proxy, too.
package chaos
