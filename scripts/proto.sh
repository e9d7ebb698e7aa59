#!/bin/sh
# Makes the Go code of every .proto file of the module again. protoc comes with the wheel
# grpcio-tools, once into the user's cache; the plug-ins are pinned in tools.mod.
set -eu
cd "$(dirname "$0")/.."
go=${GO:-go}
version=1.76.0

cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvmesh/grpcio-tools-$version
if [ ! -f "$cache/done" ]; then
	python3 -m venv "$cache"
	"$cache/bin/python" -m pip install --quiet --disable-pip-version-check "grpcio-tools==$version"
	touch "$cache/done"
fi
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
for plugin in google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc; do
	"$go" build -modfile=tools.mod -o "$bin/$(basename $plugin)" "$plugin"
done
git ls-files -co --exclude-standard '*.proto' | while read -r file; do
	PATH="$bin:$PATH" "$cache/bin/python" -m grpc_tools.protoc -I. --go_out=. --go_opt=paths=source_relative \
		--go-grpc_out=. --go-grpc_opt=paths=source_relative "$file"
done
