#!/bin/sh
# Every GPU kernel of a build on small shapes under NVIDIA's compute-sanitizer, on a machine with an NVIDIA GPU.
#
#     tests/device/sanitize.sh BUILD RESULTS [option of ingot check]...
#
# BUILD as in check.sh; RESULTS gets memcheck.txt and racecheck.txt. Exit status: not 0 when a tool found something or nothing ran.
set -u
build=$1 results=$2 status=0
shift 2
mkdir -p "$results"
export LD_LIBRARY_PATH="$build${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" INGOT_IMAGE_PATH="$build"
for tool in memcheck racecheck; do
	compute-sanitizer --tool "$tool" --error-exitcode 9 \
		"$build/ingot" check --device cuda:0 --level 1 --jobs 1 "$@" >"$results/$tool.txt" 2>&1 || status=1
	echo "$tool: $(grep -E "^(PASS|FAIL|INCONCLUSIVE)" "$results/$tool.txt"), $(grep -E "SUMMARY" "$results/$tool.txt")"
done
exit $status
