// Package bench measures what the mesh costs: time and allocations of a decision,
// CPU per token of a stream. Run it on an idle machine and compare with benchstat:
//
//	go test -run '^$' -bench . -count 6 ./test/bench
package bench
