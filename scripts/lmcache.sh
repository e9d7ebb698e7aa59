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
python=${KVMESH_VLLM:?run scripts/vllm.sh first, and export what it prints}
# Wheels are for one Python: another one, and other pins, get a folder of their own.
key=$("$python" - "$here/lmcache-requirements.txt" <<'PY'
import hashlib, sys, sysconfig
print(sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag, hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest()[:8], sep="-")
PY
)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvmesh/lmcache-$version-$key
if [ ! -f "$cache/done" ]; then
	mkdir -p "$cache"
	# The shell's -e does not hold in what is followed by ||, so each command is chained.
	{
		# Each of these does nothing where all is there, and mends what a killed run left.
		python3 -m venv "$cache/venv" &&
			"$cache/venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off uv &&
			"$cache/venv/bin/uv" pip install --python "$python" --target "$cache/site" --no-deps --require-hashes -r "$here/lmcache-requirements.txt" &&
			touch "$cache/done"
	} >"$cache/install.log" 2>&1 || { tail -n 20 "$cache/install.log" >&2; echo "kvmesh: installing LMCache: see $cache/install.log" >&2; exit 1; }
fi
echo "KVMESH_LMCACHE='$cache/site'"
