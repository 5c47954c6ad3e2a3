#!/bin/sh
# The ABI only grows: abidiff compares the library with the description kept for each release in tests/golden.
# Usage: abi.sh LIBRARY INCLUDE_DIR GOLDEN_DIR
# A release adds its description with: abidw --headers-dir include --no-show-locs LIBRARY > tests/golden/ingot-VERSION.abi
set -eu
library=$1
include=$2
golden=$3
compared=0
for old in "$golden"/ingot-*.abi; do
	[ -e "$old" ] || continue
	# Status bits: 1 error, 2 usage, 4 a change, 8 an incompatible change. New functions alone are 4.
	status=0
	report=$(abidiff --headers-dir2 "$include" --no-added-syms "$old" "$library") || status=$?
	if [ $((status & 11)) -ne 0 ] || { [ "$status" -ne 0 ] && [ -n "$report" ]; }; then
		echo "$(basename "$old"): the ABI changed"
		echo "$report"
		exit 1
	fi
	compared=$((compared + 1))
done
echo "compared with $compared earlier descriptions"
