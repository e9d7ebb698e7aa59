// Package rollout empties workers and replaces them, one at a time, without a
// stream lost:
//
//	room ──▶ drain ──▶ restart ──▶ ready ──▶ observe ──▶ next worker
//
// Room is the pool's minimum: a worker is drained only while enough others take
// requests. A drain moves the worker's streams to others of the same weights; the
// last worker of its weights keeps its own until they end, because nobody else
// could go on with them. Ready is what the control plane says of a new start of the
// worker, which a worker is only after it generated a token. Observe watches it for
// a while under real traffic. A worker that misses a bound stops the rollout, and
// takes no requests until somebody decides to go on or back.
//
// A Plan says how far a rollout came. It is saved before each step, so that an
// interrupted rollout goes on where it was.
package rollout
