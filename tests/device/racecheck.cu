/*
 * What compute-sanitizer's racecheck knows of the ways in which shared memory is handed over on Hopper, by small kernels of the forms that
 * ours use and by ones that differ in a single respect. All but the last wait for what they read, and for readers before they write,
 * as the PTX manual asks; the last writes too early.
 *
 *     nvcc -O2 -std=c++17 -arch=sm_90a -cudart static -o racecheck tests/device/racecheck.cu
 *     for way in 0 1 2 3 4 5 6; do compute-sanitizer --tool racecheck ./racecheck $way; done
 *
 * On an H200 (CUDA 13.0, 2026-11-30) hazards were shown for ways 0, 3, 5 and 6, none for 1, 2 and 4: a lane that arrives at an mbarrier
 * counts for itself alone, what other lanes of its warp read before a __syncwarp does not, nor does bar.arrive; copies by a tensor
 * map are not held against readers.
 */
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { BULK_LEADER, BULK_ALL, TENSOR_LEADER, STORES_LEADER, STORES_ALL, STORES_NAMED, RACE, WAYS };
static const char *const names[WAYS] = {"cp.async.bulk to an mbarrier, lanes read, __syncwarp, one lane arrives",
                                        "cp.async.bulk to an mbarrier, lanes read, all arrive",
                                        "cp.async.bulk.tensor to an mbarrier, lanes read, __syncwarp, one lane arrives",
                                        "lanes write, __syncwarp, one lane arrives at an mbarrier, and back",
                                        "lanes write, all arrive at an mbarrier, and back",
                                        "lanes write, named barriers, and back",
                                        "a race: lanes write, then wait for readers"};
enum { TILE = 32, TILES = 16 };

struct __align__(64) tensor_map {
	unsigned char opaque[128];
};

static __device__ void init(uint32_t barrier, int count) {
	asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
static __device__ void arrive(uint32_t barrier) {
	asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
static __device__ void expect(uint32_t barrier, int bytes) {
	asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
static __device__ void wait(uint32_t barrier, uint32_t parity) {
	asm volatile("{\n.reg .pred done;\nagain:\n"
	             "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier),
	             "r"(parity)
	             : "memory");
}
static __device__ void arrive_as(bool all, uint32_t barrier) {
	__syncwarp();
	if (all || threadIdx.x % 32 == 0) arrive(barrier);
}

/* Warp 0 hands tiles over to warp 1 in one buffer. */
template <int way>
static __global__ void hand_over(const float *from, const __grid_constant__ tensor_map map, float *sums) {
	__shared__ __align__(128) float tile[TILE];
	__shared__ __align__(8) uint64_t barriers[2];
	const bool copies = way <= TENSOR_LEADER, all = way == BULK_ALL || way == STORES_ALL;
	const uint32_t to = (uint32_t)__cvta_generic_to_shared(tile), full = (uint32_t)__cvta_generic_to_shared(barriers),
				   empty = full + 8;
	const int lane = threadIdx.x % 32;
	if (threadIdx.x == 0) {
		init(full, copies || !all ? 1 : 32);
		init(empty, all ? 32 : 1);
		asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
	}
	__syncthreads();
	if (threadIdx.x < 32) {
		for (int t = 0; t < TILES; t++) {
			if (copies && lane > 0) break;
			if (way == STORES_NAMED) asm volatile("bar.sync 2, 64;" ::: "memory");
			else if (way != RACE) wait(empty, ~t & 1);
			if (copies) expect(full, sizeof tile);
			if (way == BULK_LEADER || way == BULK_ALL)
				asm volatile(
					"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
					"l"(from + t * TILE), "r"((int)sizeof tile), "r"(full)
					: "memory");
			else if (way == TENSOR_LEADER)
				asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
				             "[%1, {%2, %3}], [%4];" ::"r"(to),
				             "l"(&map), "r"(0), "r"(t), "r"(full)
				             : "memory");
			else {
				tile[lane] = from[t * TILE + lane];
				if (way == RACE) wait(empty, ~t & 1);
				if (way == STORES_NAMED) asm volatile("bar.arrive 1, 64;" ::: "memory");
				else arrive_as(all, full);
			}
		}
	} else {
		float sum = 0;
		if (way == STORES_NAMED) asm volatile("bar.arrive 2, 64;" ::: "memory");
		for (int t = 0; t < TILES; t++) {
			if (way == STORES_NAMED) asm volatile("bar.sync 1, 64;" ::: "memory");
			else wait(full, t & 1);
			sum += ((volatile float *)tile)[lane ^ 1] * (1 + t);
			if (way == STORES_NAMED) {
				if (t + 1 < TILES) asm volatile("bar.arrive 2, 64;" ::: "memory");
			} else arrive_as(all, empty);
		}
		sums[lane] = sum;
	}
}

template <int way> static int run(const float *from, const tensor_map &map, float *sums, const float *numbers) {
	hand_over<way><<<1, 64>>>(from, map, sums);
	float got[TILE];
	if (cudaMemcpy(got, sums, sizeof got, cudaMemcpyDeviceToHost)) return 2;
	int wrong = 0;
	for (int i = 0; i < TILE; i++) {
		float sum = 0;
		for (int t = 0; t < TILES; t++) sum += numbers[t * TILE + (i ^ 1)] * (1 + t);
		wrong += got[i] != sum;
	}
	printf("%d: %s: %s\n", way, names[way], wrong ? "wrong sums" : "right sums");
	return wrong && way != RACE;
}

int main(int count, char **words) {
	const int way = count > 1 ? atoi(words[1]) : 0;
	float numbers[TILES * TILE], *from, *sums;
	for (int i = 0; i < TILES * TILE; i++) numbers[i] = (float)(i * 7 % 31);
	if (cudaMalloc(&from, sizeof numbers) || cudaMalloc(&sums, TILE * 4) ||
	    cudaMemcpy(from, numbers, sizeof numbers, cudaMemcpyHostToDevice))
		return 2;
	void *encode;
	cudaDriverEntryPointQueryResult found;
	if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found)) return 2;
	tensor_map map;
	const cuuint64_t extent[] = {TILE, TILES}, stride[] = {TILE * 4};
	const cuuint32_t box[] = {TILE, 1}, step[] = {1, 1};
	if (((decltype(&cuTensorMapEncodeTiled))encode)((CUtensorMap *)&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, from,
	                                                extent, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
	                                                CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
	                                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
		return 2;
	switch (way) {
	case BULK_LEADER: return run<BULK_LEADER>(from, map, sums, numbers);
	case BULK_ALL: return run<BULK_ALL>(from, map, sums, numbers);
	case TENSOR_LEADER: return run<TENSOR_LEADER>(from, map, sums, numbers);
	case STORES_LEADER: return run<STORES_LEADER>(from, map, sums, numbers);
	case STORES_ALL: return run<STORES_ALL>(from, map, sums, numbers);
	case STORES_NAMED: return run<STORES_NAMED>(from, map, sums, numbers);
	case RACE: return run<RACE>(from, map, sums, numbers);
	}
	return 2;
}
