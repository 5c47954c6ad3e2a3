#!/bin/sh
# The commands of CONTRIBUTING.md after run.sh, which builds without tests: a run of none fails, and the preset alone brings
# them back.
# Usage: presets.sh CMAKE CTEST SOURCE_DIR
set -eu
cmake=$1
ctest=$2
source=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The presets of the tree on a project that is configured at once.
cp "$source/CMakePresets.json" "$work"
cat >"$work/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.25)
project(presets LANGUAGES NONE)
option(INGOT_BUILD_TESTS "Build the tests" OFF)
enable_testing()
if(INGOT_BUILD_TESTS)
	add_test(NAME one COMMAND ${CMAKE_COMMAND} -E true)
	set_tests_properties(one PROPERTIES LABELS unit)
endif()
END
cd "$work"

for preset in release debug asan tsan; do
	"$cmake" --preset "$preset" -DINGOT_BUILD_TESTS=OFF >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
	if "$ctest" --preset "$preset" -L unit >"$work/log" 2>&1; then
		echo "ctest --preset $preset: status 0 without a test"
		exit 1
	fi
	"$cmake" --preset "$preset" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
	"$ctest" --preset "$preset" -L unit >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
done
echo "every preset builds the tests, and a run of none fails"
