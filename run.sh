#!/bin/sh
# Sets up a fresh Debian 12 or 13, builds, and runs attention on a real layer's tensors: the main job in one command.
# Arguments go to `ingot attn`, paths in them being the caller's; without any it takes the example file.
# Afterwards `build/release/ingot attn --help` names its options.
set -u
here=$PWD
cd "$(dirname "$0")" || exit 1
root=$PWD
case ${1-} in
-h | --help)
	sed -n '2,4s/^# *//p' run.sh
	exit 0
	;;
esac
. tests/setup.sh

build() {
	cmake --preset release -DINGOT_BUILD_TESTS=OFF >build/configure.log 2>&1 || {
		cat build/configure.log
		return 1
	}
	cmake --build --preset release -j "$jobs"
}

[ $# -gt 0 ] || set -- "$root/examples/minilm.safetensors"
# shellcheck disable=SC2086 # one word a package
stage "set up" need_packages $build_packages || exit 1
mkdir -p build
stage "build" build || exit 1
cd "$here" || exit 1
stage "run" "$root/build/release/ingot" attn "$@" || exit 1
