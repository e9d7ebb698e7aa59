# Every target works from a fresh clone on a machine with Go, Python 3 with pip,
# and npm. `make help` lists them.

GO        ?= go
FUZZTIME  ?= 10s
COUNT     ?= 6
BENCH     ?= .
BENCHPKGS ?= ./...
# Tests start real Envoys and models: one package at a time, so that one's load is
# not another's failure. The limit is for one that hangs.
TIMEOUT   ?= 40m
PKGS      ?= ./...
CHAOS     ?= 30m
SEED      ?= 0

# A folder that is no clone, or one that git refuses to read, builds as well.
VCS := $(shell git rev-parse HEAD >/dev/null 2>&1 && echo true || echo false)

export GO FUZZTIME

.PHONY: help demo tools build test race fuzz golden lint chaos e2e e2e-llama-server e2e-vllm-sidecar e2e-vllm-events e2e-lmcache e2e-vllm bench check leak vuln purge preflight clients python-client

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

preflight:
	@sh scripts/preflight.sh

# Before the build, which takes a while: what fetches the rest must be there.
clients:
	@sh scripts/preflight.sh fetch

demo: clients build ## fetch what is needed, run the main job on a real model and show it
	@bin/kvmesh doctor
	@bin/kvmesh fetch --quiet envoy llama model
	@bin/kvmesh demo

tools: clients build ## fetch Envoy, llama.cpp, the model, a Redis and an S3 server into the user's cache
	@bin/kvmesh fetch envoy llama model redis s3

# Of the tests only; they would fetch it as well, without a word.
python-client: preflight
	@sh scripts/openai-python.sh >/dev/null

build: preflight ## build bin/kvmesh, without a C compiler
	CGO_ENABLED=0 $(GO) build -buildvcs=$(VCS) -o bin/kvmesh ./cmd/kvmesh

test: tools python-client ## fetch what the tests need and run them all
	CGO_ENABLED=0 $(GO) test -p 1 -timeout $(TIMEOUT) $(PKGS)

race: tools python-client ## all tests with the race detector, in random order (needs a C compiler)
	@command -v $${CC:-cc} >/dev/null || { echo "kvmesh: the race detector needs a C compiler" >&2; echo "hint: Debian, Ubuntu: apt install gcc; Fedora: dnf install gcc; macOS: xcode-select --install" >&2; exit 1; }
	CGO_ENABLED=1 $(GO) test -race -shuffle=on -p 1 -timeout $(TIMEOUT) $(PKGS)

fuzz: preflight ## run every fuzz target for FUZZTIME (10s)
	@sh scripts/fuzz.sh

golden: tools ## write the golden files again and fail if one changed
	@sh scripts/golden.sh

lint: preflight ## format, go fix, vet, staticcheck
	@sh scripts/lint.sh

e2e: tools python-client ## the scripts on a real Envoy only, never from the test cache
	CGO_ENABLED=0 $(GO) test -count=1 -timeout $(TIMEOUT) ./test/e2e/...

# The servers are built or installed once into the user's cache, or are your own:
# KVMESH_LLAMA_SERVER; KVMESH_VLLM (a Python with vLLM) and KVMESH_VLLM_MODEL.
e2e-llama-server: tools ## sidecars in front of a real llama-server, built the first time (5 to 20 minutes)
	@server=$$(sh scripts/llama-server.sh) && KVMESH_LLAMA_SERVER=$$server CGO_ENABLED=0 exec $(GO) test -count=1 -timeout $(TIMEOUT) -v -run 'TestLlamaServer' ./test/e2e

e2e-vllm-sidecar: tools ## sidecars in front of a real vLLM on the CPU, installed the first time (3 GB)
	@vllm=$$(sh scripts/vllm.sh) && eval "export $$vllm" && CGO_ENABLED=0 exec $(GO) test -count=1 -timeout $(TIMEOUT) -v -run 'TestVLLM' ./test/e2e

e2e-vllm-events: tools ## the gateway follows the KV events of a real vLLM on the CPU
	@vllm=$$(sh scripts/vllm.sh) && eval "export $$vllm" && CGO_ENABLED=0 exec $(GO) test -count=1 -timeout $(TIMEOUT) -v -run 'TestEventsVLLM' ./test/e2e

# Neither needs Envoy or a model of its own: kvmesh, vLLM and LMCache only.
e2e-lmcache: preflight ## LMCache's own client in front of a KV node, installed the first time with vLLM (3 GB)
	@vllm=$$(sh scripts/vllm.sh) && eval "export $$vllm" && lmcache=$$(sh scripts/lmcache.sh) && eval "export $$lmcache" && CGO_ENABLED=0 exec $(GO) test -count=1 -timeout $(TIMEOUT) -v -run 'TestLMCache' ./test/e2e

e2e-vllm: preflight ## real vLLM on the CPU keeps its KV in a KV node: it and the node are killed
	@vllm=$$(sh scripts/vllm.sh) && eval "export $$vllm" && lmcache=$$(sh scripts/lmcache.sh) && eval "export $$lmcache" && CGO_ENABLED=0 exec $(GO) test -count=1 -timeout $(TIMEOUT) -v -run 'TestVLLMLMCache' ./test/e2e

bench: tools ## benchmarks, COUNT times each; BENCH and BENCHPKGS choose, OLD=FILE compares
	@mkdir -p bin
	CGO_ENABLED=0 $(GO) test -run '^$$' -bench '$(BENCH)' -benchmem -count=$(COUNT) -timeout 60m $(BENCHPKGS) >bin/bench.txt || { cat bin/bench.txt; exit 1; }
	$(GO) tool -modfile=tools.mod benchstat $(OLD) bin/bench.txt

chaos: tools ## faults of workers, network and control plane under load for CHAOS (30m); SEED repeats a schedule
	CGO_ENABLED=0 $(GO) test ./test/chaos -count=1 -v -timeout 0 -args -chaos-for=$(CHAOS) -chaos-seed=$(SEED)

check: lint race golden ## what a change must pass: lint, race, golden files, clean tree
	@test -z "$$(git status --porcelain)" || { git status --short; echo "kvmesh: the tree is not clean" >&2; exit 1; }

leak: tools ## tests named Leak, with the runtime's profile of leaked goroutines
	CGO_ENABLED=0 GOEXPERIMENT=goroutineleakprofile $(GO) test -count=1 -run Leak -timeout $(TIMEOUT) $(PKGS)

vuln: preflight ## known vulnerabilities in what is linked
	$(GO) tool -modfile=tools.mod govulncheck ./...

purge: build ## remove everything that was fetched or left behind, saying what and how big
	@bin/kvmesh purge
	rm -rf bin
