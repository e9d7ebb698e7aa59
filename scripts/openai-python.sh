#!/bin/sh
# Installs the official Python client once into the user's cache, pinned by version and
# hash, and prints its folder. Wheels are for one Python: the folder's name has its version and
# platform, and a hash of the pins, so that another Python or another pin gets one of its own.
# pip's --target leaves the system's Python alone, so PEP 668 does not stand in its way.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
pins=$here/test/clients/requirements.txt

key=$(python3 - "$pins" <<'PY'
import hashlib, sys, sysconfig
tag = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
pins = hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest()[:8]
print(f"{tag}-{sysconfig.get_platform()}-{pins}")
PY
)
case $(uname -s) in
Darwin) cache=${XDG_CACHE_HOME:-$HOME/Library/Caches}/kvmesh ;;
*) cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvmesh ;;
esac
dir=$cache/python-openai-$key
if [ ! -d "$dir" ]; then
	mkdir -p "$cache"
	# What a killed run left half done is never found under the name, and goes with the next run.
	for old in "$cache"/python-openai-*.part.*; do
		kill -0 "${old##*.}" 2>/dev/null || rm -rf "$old"
	done
	part=$dir.part.$$ log=$dir.log.part.$$
	trap 'rm -rf "$part" "$log"' EXIT
	trap 'exit 1' HUP INT TERM
	echo "kvmesh: fetching the official Python client, $(grep '^openai==' "$pins" | cut -d' ' -f1), and what it needs (6 MB) into $dir" >&2
	python3 -m pip install --disable-pip-version-check --no-input --no-cache-dir --progress-bar off --require-hashes --only-binary :all: \
		--target "$part" --requirement "$pins" >"$log" 2>&1 ||
		{ tail -n 20 "$log" >&2; echo "kvmesh: installing the Python client for $key failed" >&2; exit 1; }
	# Another run may have been faster; a folder under that name is whole.
	python3 -c 'import os, sys; os.rename(*sys.argv[1:])' "$part" "$dir" 2>/dev/null || [ -d "$dir" ]
fi
echo "$dir"
