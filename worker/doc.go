// Package worker is the process that generates: an OpenAI-compatible HTTP server
// over an Engine, its load reports over ORCA, and its registration with the
// control plane. Engines live in the sub-packages.
package worker
