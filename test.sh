#!/bin/sh
# Sets up a fresh Debian 12 or 13, builds and runs every test; not 0 if anything failed or nothing ran.
#   --quick     the release build's tests and the Python ones, without sanitizers, fuzzing and torch
#   --no-torch  without the group that needs torch
#   --setup     install what is missing, then stop
set -u
cd "$(dirname "$0")" || exit 1
. tests/setup.sh

quick=
torch=yes
only_setup=
for argument in "$@"; do
	case $argument in
	--quick) quick=yes torch= ;;
	--no-torch) torch= ;;
	--setup) only_setup=yes ;;
	-h | --help)
		sed -n '2,6s/^# *//p' "$0"
		exit 0
		;;
	*)
		echo "unknown option $argument; see --help" >&2
		exit 2
		;;
	esac
done

set_up() {
	# shellcheck disable=SC2086 # one word a package
	need_packages $build_packages $test_packages && need_python tests/requirements.txt
}

build() {
	preset=$1
	shift
	cmake --preset "$preset" "$@" >"build/configure-$preset.log" 2>&1 || {
		cat "build/configure-$preset.log"
		return 1
	}
	cmake --build --preset "$preset" -j "$jobs"
}

# ThreadSanitizer needs the addresses it knows: without setarch it may refuse to start under a randomised layout.
run_ctest() {
	preset=$1 wrapper=
	shift
	if [ "$preset" = tsan ] && setarch -R true 2>/dev/null; then
		wrapper="setarch -R"
	fi
	$wrapper ctest --preset "$preset" -j "$jobs" "$@"
}

c_tests() {
	run_ctest "$1" -LE images
}

# The library on the driver double, with the pack of gpu_images.
double_tests() {
	for preset in release asan tsan; do
		[ ! -e "build/$preset/libingot.so" ] || run_ctest "$preset" -L images || return 1
	done
}

# pytest's own answer is not 0 when no test was found.
python_tests() {
	INGOT_LIBRARY=$PWD/build/release/libingot.so INGOT_COMMAND=$PWD/build/release/ingot \
		.venv/bin/python -m pytest -q "$@"
}

# The README's one command in a fresh environment. The build folder stays, so that only a first run compiles everything.
pip_install() {
	rm -rf build/pip && python3 -m venv build/pip &&
		build/pip/bin/python -m pip --disable-pip-version-check install -q --config-settings=build-dir="$PWD/build/pip-build" \
			./python/ingot numpy &&
		build/pip/bin/python examples/attention.py
}

# Every image of one architecture and some of each other, with the compiler on PATH or the pinned one; no GPU is needed.
gpu_images() {
	INGOT_NVCC=$(command -v nvcc || tools/fetch_nvcc.sh) || return 1
	export INGOT_NVCC
	build/release/ingot build --arch sm_90a --nvcc "$INGOT_NVCC" -o build/packs &&
		build/release/ingot image verify build/packs/ingot-sm_90a.pack || return 1
	for only in attn_fwd_sm80:bf16_d64 attn_bwd_sm80:bf16_d64 attn_fwd_sm80_simt:dv64 attn_merge attn_dropout_mask kv_append; do
		build/release/ingot build --arch sm_80,sm_86,sm_89,sm_100,sm_120 --nvcc "$INGOT_NVCC" --only "$only" \
			-o "build/packs-$only" || return 1
	done
}

stage "set up" set_up || exit 1
[ -z "$only_setup" ] || exit 0
mkdir -p build

stage "pytest-gpu-lease" .venv/bin/python -m pytest -q python/pytest-gpu-lease/tests
stage "build release" build release -DINGOT_BUILD_PYTHON=ON -DPython_EXECUTABLE="$PWD/.venv/bin/python" && {
	stage "C tests, release" c_tests release
	[ -n "$quick" ] || stage "every kernel, level 1" build/release/ingot check --level 1
	stage "Python tests" python_tests tests/python -m "not torch and not images"
}
if [ -z "$quick" ]; then
	stage "build asan" build asan && stage "C tests and fuzzing, asan" c_tests asan
	stage "build tsan" build tsan && stage "C tests, tsan" c_tests tsan
fi
[ -n "$quick" ] || stage "pip install" pip_install
if [ -z "$quick" ]; then
	stage "GPU images" gpu_images && {
		stage "tests of packs" python_tests tests/python -m images
		stage "tests on the driver double" double_tests
	}
fi
if [ -n "$torch" ] && [ -e build/release/libingot.so ]; then
	stage "set up torch" need_python tests/requirements-torch.txt && stage "torch tests" python_tests tests/python -m torch
fi

echo
echo "$summary"
if [ "$failures" -ne 0 ]; then
	echo "$failures stages failed"
	exit 1
fi
echo "all stages passed"
