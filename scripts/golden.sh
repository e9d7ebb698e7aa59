#!/bin/sh
# Writes every golden file again and fails when one of them changed: the tests of
# a package with golden files have a flag -update.
set -eu
cd "$(dirname "$0")/.."
go=${GO:-go}

dirs=$(grep -rlE --include='*_test.go' 'flag\.Bool\("update"' . | xargs -r -n1 dirname | sort -u)
for dir in $dirs; do
	# The flag exists only in that package, so each runs on its own.
	"$go" test -count=1 "$dir" -update
done
git diff --exit-code -- '*testdata*'
new=$(git ls-files --others --exclude-standard -- '*testdata*')
if [ -n "$new" ]; then
	echo "golden files that are not committed:" >&2
	echo "$new" >&2
	exit 1
fi
