// Package test holds the tests that run the whole mesh: end-to-end scripts in
// e2e, fault drills in chaos, benchmarks in bench.
package test
