// Package kvmesh is the root of an inference mesh on a stock Envoy: a control
// plane that steers Envoy by the health of GPU workers over xDS, a gateway that
// chooses model, tier and worker for each request, and workers that serve the
// OpenAI API. The command is cmd/kvmesh; README.md is for its users, and
// ARCHITECTURE.md shows the paths of a request and of a health report.
package kvmesh
