#!/bin/sh
# Holds every GPU kernel of a build against the fp64 reference, on a machine with an NVIDIA GPU.
#
#     tests/device/check.sh BUILD RESULTS [option of ingot check]...
#
# BUILD holds ingot, libingot.so and the packs (`ingot build --arch sm_90a -o BUILD`); RESULTS gets device.txt (the GPU and what
# the packs are), check.json (kernels, cases, error ratios) and log.txt. Exit status: that of the check.
set -u
build=$1 results=$2
shift 2
mkdir -p "$results"
export LD_LIBRARY_PATH="$build${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" INGOT_IMAGE_PATH="$build"
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit --format=csv,noheader | tee "$results/device.txt"
for pack in "$build"/*.pack; do
	"$build/ingot" image list "$pack" | sed -n "1s|^.*/||p" | tee -a "$results/device.txt"
	sha256sum "$pack" | sed "s|$build/||" | tee -a "$results/device.txt"
done
"$build/ingot" check --device cuda:0 --level 2 --failures 40 --save "$results/check.json" "$@" >"$results/log.txt" 2>&1
status=$?
tail -n 60 "$results/log.txt"
exit $status
