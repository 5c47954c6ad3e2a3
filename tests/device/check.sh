#!/bin/sh
# Holds every GPU kernel of a build against the fp64 reference, on a machine with an NVIDIA GPU.
#
#     tests/device/check.sh BUILD RESULTS [level]
#
# BUILD holds ingot, libingot.so and the packs (`ingot build --arch sm_90a -o BUILD`); RESULTS gets check.json, device.txt and
# log.txt. Exit status: that of the check.
set -u
build=$1 results=$2 level=${3:-2}
mkdir -p "$results"
export LD_LIBRARY_PATH="$build${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" INGOT_IMAGE_PATH="$build"
nvidia-smi --query-gpu=name,driver_version,pci.bus_id,clocks.sm,power.limit --format=csv,noheader | tee "$results/device.txt"
sha256sum "$build"/*.pack | sed "s|$build/||" | tee -a "$results/device.txt"
"$build/ingot" check --device cuda:0 --level "$level" --failures 40 ${4:-} ${5:-} 2>&1 | tee "$results/log.txt" | tail -n 60
status=$(tail -n 1 "$results/log.txt" | cut -d: -f1)
[ "$status" = PASS ]
