#!/bin/sh
# Measures and verifies every GPU kernel of a build, on a machine with an NVIDIA GPU: the whole tuning/ARCH.tsv of that machine.
#
#     tests/device/rows.sh BUILD RESULTS ARCH [option of ingot bench]...
#
# BUILD and RESULTS as in check.sh; RESULTS gets ARCH.tsv, bench.txt and the files of check.sh. Exit status: not 0 when a kernel
# failed its check or could not be timed.
set -u
here=$(dirname "$0") build=$1 results=$2 arch=$3
shift 3
mkdir -p "$results"
rm -f "$results/$arch.tsv"
(
	export LD_LIBRARY_PATH="$build${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" INGOT_IMAGE_PATH="$build"
	"$build/ingot" bench --device cuda:0 --rows "$results/$arch.tsv" "$@" >"$results/bench.txt" 2>&1
)
status=$?
tail -n 1 "$results/bench.txt"
grep "^ingot bench: " "$results/bench.txt"
"$here/check.sh" "$build" "$results" --rows "$results/$arch.tsv" && [ $status -eq 0 ]
