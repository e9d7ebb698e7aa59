#!/bin/sh
# Format, modernizers, vet and staticcheck. Tools are pinned in tools.mod.
set -eu
cd "$(dirname "$0")/.."
go=${GO:-go}
tool() { "$go" tool -modfile=tools.mod "$@"; }

unformatted=$(git ls-files -co --exclude-standard '*.go' | grep -v '\.pb\.go$' | xargs -r "$go" tool -modfile=tools.mod gofumpt -l)
if [ -n "$unformatted" ]; then
	echo "not formatted; run: go tool -modfile=tools.mod gofumpt -w FILES" >&2
	echo "$unformatted" >&2
	exit 1
fi
"$go" fix -diff ./...
"$go" vet ./...
tool staticcheck ./...
