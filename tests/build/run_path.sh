#!/bin/sh
# Nothing that was built looks for libraries in the current folder: the loader takes an empty element of a run path for
# it, and CMake pads the run path of what it will change at install with empty ones.
# Usage: run_path.sh FILE...
set -eu
[ $# -gt 0 ] || { echo "no file given"; exit 1; }
for file; do
	path=$(objdump -p "$file" | sed -n 's/^ *R\(UN\)\{0,1\}PATH *//p')
	case :${path:-none}: in
	*::*) echo "$file: the run path \"$path\" has an empty element"; exit 1 ;;
	esac
done
echo "$# files, no empty element in a run path"
