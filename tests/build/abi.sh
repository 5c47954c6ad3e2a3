#!/bin/sh
# No symbol that a release had goes away: abidiff compares the library with the description kept of each release. What it
# reports about types is left to golden/layout-VERSION.c, which knows that a struct with a struct_size may grow at its end.
# Usage: abi.sh LIBRARY GOLDEN_DIR
set -eu
library=$1
golden=$2
compared=0
for old in "$golden"/ingot-*.abi; do
	[ -e "$old" ] || continue
	# Status bits: 1 error, 2 usage, 4 a change, 8 an incompatible change.
	status=0
	report=$(abidiff --no-added-syms "$old" "$library" 2>&1) || status=$?
	if [ $((status & 11)) -ne 0 ]; then
		echo "$(basename "$old"): the ABI changed (abidiff: $status)"
		echo "$report"
		exit 1
	fi
	compared=$((compared + 1))
done
echo "compared with $compared kept descriptions"
