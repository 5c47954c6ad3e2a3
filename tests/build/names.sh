#!/bin/sh
# Every global symbol of the library's objects is named ingot_ (public) or ingot__ (internal), so that a program may link
# the static objects beside its own.
# Usage: names.sh ARCHIVE
set -eu
foreign=$(nm -g --defined-only "$1" | awk 'NF == 3 && $3 !~ /^(ingot_|_?_?(asan|ubsan|odr_asan|tsan))/ { print $3 }')
if [ -n "$foreign" ]; then
	echo "global symbols that do not begin with ingot_:"
	echo "$foreign"
	exit 1
fi
echo "$(nm -g --defined-only "$1" | awk 'NF == 3' | wc -l) global symbols"
