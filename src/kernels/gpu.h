/*
 * Device primitives that GPU kernels are written over: thread and block ids, shared memory, barriers, exp2, conversions,
 * asynchronous copies, and matrix fragments with the row and column of each element. This is NVIDIA's side; AMD's defines the
 * same names. Below them, the problem's meaning on a device: rows of a sequence, pages, masks, dropout, as kernels/cpu.h has it.
 */
#ifndef INGOT_KERNELS_GPU_H
#define INGOT_KERNELS_GPU_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "gpu_args.h"

/* The constants of ingot.h and pipeline.h that device code needs; a kernel's host half asserts that they agree. */
enum { DT_F32 = 1, DT_F16 = 2, DT_BF16 = 3, DT_E4M3 = 4, DT_E5M2 = 5, DT_BOOL = 11 };
enum {
	F_MASK = 1 << 0,
	F_VARLEN = 1 << 1,
	F_PAGED = 1 << 2,
	F_BIAS = 1 << 3,
	F_BIAS_BOOL = 1 << 4,
	F_ALIBI = 1 << 5,
	F_SOFTCAP = 1 << 6,
	F_SINK = 1 << 7,
	F_DROPOUT = 1 << 8,
	F_8BIT_KV = 1 << 9
};

#define DEVICE static __device__ __forceinline__
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

typedef long long index_t; /* element offsets: 64-bit everywhere */

/* ---- threads -------------------------------------------------------------------------------------------------------- */

DEVICE int thread_id() {
	return threadIdx.x;
}
DEVICE int lane_id() {
	return threadIdx.x & 31;
}
DEVICE int warp_id() {
	return threadIdx.x >> 5;
}
DEVICE void block_barrier() {
	__syncthreads();
}
/* In a step that starts early: what the step before wrote is there from here on. */
DEVICE void wait_for_step_before() {
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/* The next step, if it starts early, may take the places that this one's last blocks leave. */
DEVICE void start_next_step() {
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.launch_dependents;");
#endif
}
DEVICE float lane_xor(float x, int mask) {
	return __shfl_xor_sync(0xffffffffu, x, mask);
}

/* ---- arithmetic ------------------------------------------------------------------------------------------------------ */

DEVICE float fast_exp2(float x) {
	float y;
	asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
	return y;
}

/* ---- values of the storage types -------------------------------------------------------------------------------------- */

DEVICE float load_value(const void *base, index_t i, int dtype) {
	switch (dtype) {
	case DT_F32: return ((const float *)base)[i];
	case DT_F16: return __half2float(((const __half *)base)[i]);
	case DT_BF16: return __bfloat162float(((const __nv_bfloat16 *)base)[i]);
	case DT_E4M3:
		return __half2float(__half(__nv_cvt_fp8_to_halfraw(((const __nv_fp8_storage_t *)base)[i], __NV_E4M3)));
	default: return __half2float(__half(__nv_cvt_fp8_to_halfraw(((const __nv_fp8_storage_t *)base)[i], __NV_E5M2)));
	}
}

DEVICE void store_value(void *base, index_t i, int dtype, float x) {
	switch (dtype) {
	case DT_F32: ((float *)base)[i] = x; break;
	case DT_F16: ((__half *)base)[i] = __float2half_rn(x); break;
	case DT_BF16: ((__nv_bfloat16 *)base)[i] = __float2bfloat16_rn(x); break;
	case DT_E4M3: ((__nv_fp8_storage_t *)base)[i] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); break;
	default: ((__nv_fp8_storage_t *)base)[i] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2); break;
	}
}

/* ---- sequences, pages, masks, dropout ----------------------------------------------------------------------------------- */

struct span {
	index_t slot, start;
	int count;
};

DEVICE index_t clamp64(index_t x, index_t low, index_t high) {
	return x < low ? low : x > high ? high : x;
}

DEVICE span locate(bool stacked, int length, int position, const int32_t *lengths, const int32_t *positions,
                   int max_seqlen, index_t capacity, int b) {
	index_t start = 0, count = stacked ? max_seqlen : capacity;
	if (length == 1) count = (index_t)lengths[b + 1] - lengths[b];
	else if (length == 2) count = lengths[b];
	if (stacked)
		start = position == 1 ? (index_t)lengths[b] : position == 2 ? (index_t)positions[b] : (index_t)b * max_seqlen;
	start = clamp64(start, 0, capacity);
	index_t most = capacity - start;
	if (most > max_seqlen) most = max_seqlen;
	span s = {stacked ? 0 : b, start, (int)clamp64(count, 0, most)};
	return s;
}

DEVICE span query_rows(const ingot__gpu_args &a, int b) {
	return locate(a.q_stacked, a.q_length, a.q_position, a.q_lengths, a.q_positions, a.max_seqlen_q, a.q_capacity, b);
}

DEVICE const int32_t *page_list(const ingot__gpu_args &a, int b, index_t *pages) {
	if (a.page_table) {
		*pages = a.max_pages;
		return a.page_table + b * a.table_stride;
	}
	index_t first = clamp64(a.page_indptr[b], 0, a.indices_count);
	*pages = clamp64(a.page_indptr[b + 1], first, a.indices_count) - first;
	return a.page_indices + first;
}

DEVICE span key_rows(const ingot__gpu_args &a, int b) {
	if (!(a.features & F_PAGED))
		return locate(a.k_stacked, a.k_length, a.k_position, a.k_lengths, a.k_positions, a.max_seqlen_k, a.k_capacity,
		              b);
	index_t pages, n = a.k_lengths[b];
	(void)page_list(a, b, &pages);
	if (a.k_length == 3) n = pages ? (pages - 1) * a.page_size + n : 0;
	index_t most = a.page_count ? pages * a.page_size : 0;
	if (most > a.max_seqlen_k) most = a.max_seqlen_k;
	span s = {0, 0, (int)clamp64(n, 0, most)};
	return s;
}

/* Element offset of key row j of a sequence within K or V, head offset included. */
DEVICE index_t key_offset(const ingot__gpu_args &a, const int64_t *stride, const span &rows, const int32_t *list,
                          int head, int j) {
	if (!(a.features & F_PAGED)) return rows.slot * stride[0] + head * stride[1] + (rows.start + j) * stride[2];
	index_t page = clamp64(list[j / (int)a.page_size], 0, a.page_count - 1);
	return page * stride[0] + (index_t)(j % (int)a.page_size) * stride[1] + head * stride[2];
}

DEVICE index_t row_offset(const int64_t *stride, const span &rows, int head, int i) {
	return rows.slot * stride[0] + head * stride[1] + (rows.start + i) * stride[2];
}

DEVICE float descale_of(const float *factor, const int64_t *stride, int b, int head) {
	return factor ? factor[b * stride[0] + head * stride[1]] : 1.0f;
}

/* Philox4x32-10 (Salmon et al., SC 2011). */
DEVICE uint4 philox(uint64_t seed, uint64_t offset, uint64_t index) {
	uint32_t c0 = (uint32_t)offset, c1 = (uint32_t)(offset >> 32), c2 = (uint32_t)index, c3 = (uint32_t)(index >> 32);
	uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma unroll
	for (int round = 0; round < 10; round++) {
		const uint32_t h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0, h1 = __umulhi(0xCD9E8D57u, c2),
					   l1 = 0xCD9E8D57u * c2;
		c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
		k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
	}
	return make_uint4(c0, c1, c2, c3);
}

DEVICE uint64_t dropout_seed(const ingot__gpu_args &a) {
	return a.seed_ptr ? *a.seed_ptr : a.seed;
}
DEVICE uint64_t dropout_offset(const ingot__gpu_args &a) {
	return a.offset + (a.offset_ptr ? *a.offset_ptr : 0);
}

/* Counter index of keys j..j|3 of a query row. */
DEVICE uint64_t dropout_index(const ingot__gpu_args &a, int b, int head, int i, int j) {
	return ((uint64_t)((index_t)b * a.heads_q + head) * (uint64_t)a.max_seqlen_q + (uint64_t)i) *
	           (((uint64_t)a.max_seqlen_k + 3) / 4) +
	       (uint64_t)(j / 4);
}

/* ---- asynchronous copies to shared memory -------------------------------------------------------------------------------- */

DEVICE uint32_t shared_address(const void *p) {
	return (uint32_t)__cvta_generic_to_shared(p);
}

/* 16 bytes, of which so many are read; the rest are zeros. */
DEVICE void copy_async16_of(uint32_t to, const void *from, uint32_t bytes) {
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
/* With valid false, zeros, and nothing is read. */
DEVICE void copy_async16(uint32_t to, const void *from, bool valid) {
	copy_async16_of(to, from, valid ? 16 : 0);
}
DEVICE void copy_commit() {
	asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int pending> DEVICE void copy_wait() {
	asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/* ---- matrix fragments: C[16 x 8] += A[16 x 16] B[16 x 8] over a warp --------------------------------------------------------- */

/* Element e of a C fragment held by this lane. */
DEVICE int fragment_row(int e) {
	return (lane_id() >> 2) + (e >> 1) * 8;
}
DEVICE int fragment_column(int e) {
	return (lane_id() & 3) * 2 + (e & 1);
}

DEVICE void load_matrix4(uint32_t r[4], uint32_t address) {
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
	             : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
	             : "r"(address)
	             : "memory");
}
DEVICE void load_matrix4_transposed(uint32_t r[4], uint32_t address) {
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
	             : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
	             : "r"(address)
	             : "memory");
}

template <typename T> struct matrix;
template <> struct matrix<__half> {
	static __device__ __forceinline__ void multiply(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
		asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
		    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
	}
	static __device__ __forceinline__ uint32_t pack(float low, float high) {
		const __half2 h = __floats2half2_rn(low, high);
		return *(const uint32_t *)&h;
	}
};
template <> struct matrix<__nv_bfloat16> {
	static __device__ __forceinline__ void multiply(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
		asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
		    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
	}
	static __device__ __forceinline__ uint32_t pack(float low, float high) {
		const __nv_bfloat162 h = __floats2bfloat162_rn(low, high);
		return *(const uint32_t *)&h;
	}
};

#endif
