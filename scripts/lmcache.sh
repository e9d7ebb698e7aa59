#!/bin/sh
# Installs LMCache once beside the vLLM that scripts/vllm.sh has installed, and prints a line
# for the shell: KVMESH_LMCACHE, the folder to put into PYTHONPATH. It is the real client of
# `make e2e-lmcache` and `make e2e-vllm`, never a part of kvmesh.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
version=0.5.6

if [ -n "${KVMESH_LMCACHE:-}" ]; then
	echo "KVMESH_LMCACHE='$KVMESH_LMCACHE'"
	exit
fi
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvmesh/lmcache-$version
python=${KVMESH_VLLM:?run scripts/vllm.sh first, and export what it prints}
if [ ! -f "$cache/done" ]; then
	mkdir -p "$cache"
	{
		[ -x "$cache/uv/bin/uv" ] || python3 -m pip install --quiet --disable-pip-version-check --target "$cache/uv" uv
		"$cache/uv/bin/uv" pip install --python "$python" --target "$cache/site" --no-deps --require-hashes -r "$here/lmcache-requirements.txt"
		touch "$cache/done"
	} >"$cache/install.log" 2>&1 || { tail -n 20 "$cache/install.log" >&2; echo "kvmesh: installing LMCache: see $cache/install.log" >&2; exit 1; }
fi
echo "KVMESH_LMCACHE='$cache/site'"
