#!/bin/sh
# The README's C example is the beginning of examples/attn.c, word for word, and with a main() it compiles, links and runs.
# Every file that a page links to is there.
# Usage: readme.sh SOURCE_DIR LIBRARY CC
set -eu
source=$1
library=$2
cc=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

awk '/^```c$/ { inside = 1; next } /^```$/ { inside = 0 } inside' "$source/README.md" >"$work/block"
lines=$(wc -l <"$work/block")
[ "$lines" -gt 10 ] || { echo "README.md: no C example found"; exit 1; }
sed -n '/^#include <ingot.h>$/,$p' "$source/examples/attn.c" | head -n "$lines" >"$work/example"
if ! diff "$work/example" "$work/block" >"$work/diff"; then
	echo "examples/attn.c (<) and the README's example (>) differ:"
	cat "$work/diff"
	exit 1
fi

{
	cat "$work/block"
	cat <<-'END'

		int main(void) {
			static float q[BATCH * SEQLEN * HEADS * HEAD_DIM], out[BATCH * SEQLEN * HEADS * HEAD_DIM];
			static float k[BATCH * SEQLEN * KEY_HEADS * HEAD_DIM], v[BATCH * SEQLEN * KEY_HEADS * HEAD_DIM];
			v[0] = 1;
			return attend(q, k, v, out) || !(out[0] > 0.999f && out[0] < 1.001f);
		}
	END
} >"$work/main.c"
folder=$(dirname "$library")
"$cc" -std=c17 -Wall -Wextra -Wpedantic -Werror -I"$source/include" "$work/main.c" -L"$folder" -lingot \
	-Wl,-rpath,"$folder" -o "$work/main"
"$work/main" || { echo "the README's example failed"; exit 1; }

missing=0
for page in "$source"/*.md "$source"/docs/*.md "$source"/examples/*.md; do
	for link in $(grep -o '](\([^)#]*\)' "$page" | cut -c3- | grep -v '^[a-z]*:' | sort -u); do
		[ -e "$(dirname "$page")/$link" ] || { echo "$page links to $link, which is not there"; missing=1; }
	done
done
[ "$missing" -eq 0 ] || exit 1
echo "$lines lines of the README compiled and run, every link leads to a file"
