#!/bin/sh
# Every GPU kernel of a build on small shapes under NVIDIA's compute-sanitizer, on a machine with an NVIDIA GPU.
#
#     tests/device/sanitize.sh BUILD RESULTS [SECONDS [KERNEL]...]
#
# BUILD as in check.sh; RESULTS gets a file for each tool and kernel. SECONDS are of checking, for a kernel and tool (20); KERNEL
# names those to check (all). What a tool finds is printed with its places, offsets into the kernel as `cuobjdump -sass` counts
# them. Exit status: not 0 when a tool found something or nothing ran.
set -u
build=$1 results=$2 seconds=${3:-20} status=0
shift $(($# < 3 ? $# : 3))
mkdir -p "$results"
export LD_LIBRARY_PATH="$build${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" INGOT_IMAGE_PATH="$build"
kernels=$*
[ "$kernels" ] || kernels=$(for pack in "$build"/*.pack; do "$build/ingot" image list "$pack"; done | awk '$1 ~ /_sm[0-9]/ { print $1 }' | sort -u)
for tool in memcheck racecheck; do
	for kernel in $kernels; do
		# heads of 512, and 8-bit queries, are met at level 2 only
		case $kernel in
		*_d512) cases="--level 2 --only d512" ;;
		*_fp8) cases="--level 2 --only e4m3" ;;
		*) cases="--level 1" ;;
		esac
		file=$results/$tool-$kernel.txt
		# shellcheck disable=SC2086 # words of their own
		compute-sanitizer --tool $tool --error-exitcode 9 "$build/ingot" check --device cuda:0 --jobs 4 \
			--backend "cuda/$kernel" --seconds "$seconds" $cases >"$file" 2>&1 || status=1
		echo "$tool $kernel: $(grep -E "^(PASS|FAIL|INCONCLUSIVE)" "$file"), $(grep SUMMARY "$file")"
		sed -n 's/^=* *\(\(Error\|Warning\): \|Invalid \)/    \1/p' "$file" | sort | uniq -c | sort -rn | head -20
	done
done
exit $status
