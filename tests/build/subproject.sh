#!/bin/sh
# A project that takes the source tree by add_subdirectory gets the library and keeps its own settings.
# Usage: subproject.sh CMAKE SOURCE_DIR CC
set -eu
cmake=$1
source=$2
cc=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/parent"

cat >"$work/parent/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.25)
project(parent LANGUAGES C)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(INGOT_BUILD_TOOLS OFF)
add_subdirectory($source ingot)
add_executable(program main.c)
target_link_libraries(program PRIVATE ingot::ingot)
install(TARGETS program EXPORT parent)
install(EXPORT parent DESTINATION cmake)
END
cp "$source/tests/build/consumer/main.c" "$work/parent/"

# CMake would take it from the environment, as if the parent had been given one.
unset CMAKE_BUILD_TYPE
"$cmake" -G Ninja -S "$work/parent" -B "$work/build" -DCMAKE_C_COMPILER="$cc" >"$work/log" 2>&1 ||
	{ cat "$work/log"; exit 1; }
if ! grep -q '^CMAKE_BUILD_TYPE:STRING=$' "$work/build/CMakeCache.txt"; then
	echo "the parent gave no build type, and now has one:"
	grep '^CMAKE_BUILD_TYPE' "$work/build/CMakeCache.txt"
	exit 1
fi
command_of() { grep "\"command\".*/$1 *\"" "$work/build/compile_commands.json"; }
if command_of main.c | grep -e -DNDEBUG -e -O2; then
	echo "the parent's file is compiled with the library's flags (above)"
	exit 1
fi
command_of call.c | grep -q -e -O2 || { echo "the library's own files are not optimised"; exit 1; }
if "$cmake" --build "$work/build" -t help | grep -e '^tests/' -e '^ingot_command'; then
	echo "tests or tools of the library are targets of its parent (above)"
	exit 1
fi
echo "the parent's settings are its own"
