#!/bin/sh
# The shared library exports exactly the functions its headers declare, each under its version, and nothing internal.
# Usage: exports.sh LIBRARY INCLUDE_DIR
set -eu
library=$1
include=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

nm -D --defined-only "$library" | awk '$2 != "A" { print $3 }' | sort >"$work/exported"
# A declaration is INGOT_API, then everything up to its parenthesis; the last word before it is the name.
cat "$include"/*.h | tr '\n' ' ' | grep -o 'INGOT_API[^(;{]*(' | grep -o 'ingot_[a-z0-9_]* *($' | tr -d ' (' |
	sort -u >"$work/declared"
[ -s "$work/declared" ] || { echo "no declaration found in $include"; exit 1; }

sed 's/@.*//' "$work/exported" | sort -u >"$work/names"
if ! diff "$work/declared" "$work/names" >"$work/diff"; then
	echo "declared in the headers (<) and exported by the library (>) differ:"
	cat "$work/diff"
	exit 1
fi
if grep -v '@@INGOT_[0-9.]*$' "$work/exported"; then
	echo "exported without a version (above)"
	exit 1
fi
needed=$(objdump -p "$library" | awk '$1 == "NEEDED" { print $2 }')
for name in $needed; do
	case $name in
	libc.so.*|libm.so.*|libzstd.so.*|libxxhash.so.*|libgcc_s.so.*|ld-linux-*) ;;
	*) echo "the library needs $name, which is not among its run-time dependencies"; exit 1 ;;
	esac
done
if objdump -R "$library" | grep ' ingot_'; then
	echo "the library calls its own functions by names that another copy in the process would answer to (above)"
	exit 1
fi
objdump -p "$library" | grep -q 'SONAME.*libingot\.so\.[0-9]' || { echo "no SONAME with a version"; exit 1; }
echo "$(wc -l <"$work/names") functions exported"
