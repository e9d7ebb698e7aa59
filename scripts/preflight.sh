#!/bin/sh
# Refuses a Go that cannot build this module, before `go build` fails in a way
# that says nothing: Go before 1.21 cannot even read the go line of go.mod, and
# none before that version fetches the toolchain that a module asks for.
set -eu
cd "$(dirname "$0")/.."
go=${GO:-go}

refuse() {
	echo "kvmesh: $1" >&2
	echo "hint: $2" >&2
	exit 1
}

want=$(sed -n 's/^go \([0-9.]*\)$/\1/p' go.mod)
remedy="install Go $want, or any Go from 1.21 on, which fetches $want by itself; then put it first in PATH, or run make GO=/path/to/go"
command -v "$go" >/dev/null 2>&1 || refuse "no Go found (looked for '$go')" "$remedy"

# GOTOOLCHAIN=local makes a newer Go answer for itself; an older one ignores it.
have=$(GOTOOLCHAIN=local "$go" version | sed -n 's/^go version go\([0-9]*\.[0-9]*\).*/\1/p')
if [ -z "$have" ]; then
	# A development build names no version; it is as new as it can be.
	exit 0
fi
minor() { echo "$1" | cut -d. -f2; }
if [ "${have%%.*}" -gt 1 ] || [ "$(minor "$have")" -ge "$(minor "$want")" ]; then
	exit 0
fi
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
