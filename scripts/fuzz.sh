#!/bin/sh
# Runs every fuzz target of the module for FUZZTIME each; Go runs one at a time.
set -eu
cd "$(dirname "$0")/.."
go=${GO:-go}
time=${FUZZTIME:-10s}

grep -rl --include='*_test.go' '^func Fuzz' . | xargs -r -n1 dirname | sort -u | while read -r dir; do
	sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' "$dir"/*_test.go | sort -u | while read -r target; do
		echo "== $dir $target ($time)"
		"$go" test -run '^$' -fuzz "^$target\$" -fuzztime "$time" "$dir" </dev/null || exit 1
	done
done
