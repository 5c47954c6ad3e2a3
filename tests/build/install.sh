#!/bin/sh
# `cmake --install` gives a tree that a C program can use by find_package and by pkg-config, also after it was moved.
# Usage: install.sh CMAKE BUILD_DIR CONSUMER_DIR CC
set -eu
cmake=$1
build=$2
consumer=$3
cc=$4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$cmake" --install "$build" --prefix "$work/first" >"$work/log" || { cat "$work/log"; exit 1; }
mv "$work/first" "$work/moved"
prefix=$work/moved

"$cmake" -G Ninja -S "$consumer" -B "$work/consumer" -DCMAKE_C_COMPILER="$cc" -DCMAKE_PREFIX_PATH="$prefix" \
	>"$work/log" 2>&1 && "$cmake" --build "$work/consumer" >>"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$work/consumer/consumer"

# Before 1.0 names may change from 0.1 to 0.2, so each minor version is one of its own.
for wanted in 0.0 0.2; do
	if "$cmake" -G Ninja -S "$consumer" -B "$work/other" -DCMAKE_C_COMPILER="$cc" -DCMAKE_PREFIX_PATH="$prefix" \
		-DWANTED="$wanted" >"$work/log" 2>&1; then
		echo "find_package(ingot $wanted) takes version 0.1"
		exit 1
	fi
	grep -q "requested version" "$work/log" || { cat "$work/log"; exit 1; }
	rm -rf "$work/other"
done

pc=$(find "$prefix" -name ingot.pc)
[ -n "$pc" ] || { echo "no ingot.pc installed"; exit 1; }
PKG_CONFIG_PATH=$(dirname "$pc")
export PKG_CONFIG_PATH
lib=$(pkg-config --variable=libdir ingot)
# shellcheck disable=SC2046 # the flags are words
"$cc" -std=c17 -Wall -Wextra -Wpedantic -Werror "$consumer/main.c" $(pkg-config --cflags --libs ingot) -lm \
	-Wl,-rpath,"$lib" -o "$work/by_pkg_config"
"$work/by_pkg_config"

# The command finds the library beside it.
if [ -e "$build/ingot" ]; then
	"$prefix/bin/ingot" --help >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
fi
if find "$prefix/include" -name '*.h' | grep -v '/ingot[a-z_]*\.h$'; then
	echo "installed a header that is not public (above)"
	exit 1
fi
echo "installed, moved, and used by find_package and by pkg-config"
