// Package chaos runs a mesh under a steady load while workers are killed, stopped,
// drained and cut off the network, and checks every answer, token by token, against
// an undisturbed one.
//
//	go test ./test/chaos                                          # 20 s
//	go test ./test/chaos -timeout 0 -args -chaos-for=30m          # make chaos
//	go test ./test/chaos -args -chaos-seed=7                      # the same schedule again
//
// A seed gives the same faults in the same order, as long and as far apart; what they meet
// depends on the machine. Each round of the schedule has every fault of every worker once.
//
// Of the two workers that are not on the mesh's machine, far-1 is behind a proxy that
// closes connections and refuses new ones, or passes nothing on while they stay open.
// far-2 is in a network namespace. Its line is a wire (testmesh.Wire) that is down and
// loses every frame in silence, has each arrive 100 ms late, or loses one of 20: on every
// kernel alike, also on those without netem. Without root, iproute2 or packet sockets it
// is behind a proxy, too, and the test says so.
//
// The report counts the troubles of each line, the answers that were under way at its
// worker meanwhile and the frames that were lost or late while they were. Trouble that did
// nothing fails the test.
package chaos
