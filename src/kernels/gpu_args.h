/*
 * The argument struct of every GPU kernel, read as C by the host halves and as CUDA or HIP by the device halves. It says what
 * the problem says, in the order pointers, 64-bit, 32-bit, so that it has no padding; `number` is the implementation's own.
 */
#ifndef INGOT_KERNELS_GPU_ARGS_H
#define INGOT_KERNELS_GPU_ARGS_H

#include <stdint.h>

typedef struct ingot__gpu_args {
	void *workspace; /* first: set by launch.c */
	const void *q, *k, *v;
	void *out;
	float *lse;
	const void *dout;
	void *dq, *dk, *dv;
	const void *bias;
	void *dbias;
	const float *alibi, *sink;
	float *dsink;
	const float *q_descale, *k_descale, *v_descale;
	const int32_t *q_lengths, *q_positions, *k_lengths, *k_positions;
	const int32_t *page_table, *page_indptr, *page_indices;
	const uint64_t *seed_ptr, *offset_ptr;
	uint64_t *seed_out, *offset_out;
	uint64_t seed, offset;
	/* strides in elements: batch or page, head or slot, row or head (as the tensors of the problem) */
	int64_t q_stride[3], k_stride[3], v_stride[3], out_stride[3], lse_stride[3];
	int64_t dout_stride[3], dq_stride[3], dk_stride[3], dv_stride[3];
	int64_t bias_stride[4], dbias_stride[4];
	int64_t alibi_stride[2], q_descale_stride[2], k_descale_stride[2], v_descale_stride[2];
	int64_t dsink_stride, sink_stride, table_stride;
	int64_t left, right; /* INGOT__NO_BOUND where there is none */
	int64_t q_capacity, k_capacity;
	int64_t page_count, page_size, max_pages, indices_count;
	int32_t batch, heads_q, heads_k, group, head_dim, head_dim_v, max_seqlen_q, max_seqlen_k;
	int32_t q_dtype, kv_dtype, out_dtype, bias_dtype, dq_dtype, dk_dtype, dv_dtype, dbias_dtype; /* ingot_dtype */
	int32_t q_stacked, q_length, q_position, k_stacked, k_length, k_position;
	int32_t bottom_right, lse_base;
	int32_t q_descale_per_query_head, dbias_shape[4]; /* extents of dbias: 1 where it sums */
	uint32_t features;                                /* INGOT__MASK | ... of pipeline.h */
	uint32_t dropout_threshold;
	float softmax_scale, softcap, keep_scale; /* keep_scale: 1 / (1 - dropout_p) */
	int32_t number[22];
} ingot__gpu_args;

/* Tiles depend on the shared memory that a block may have: tier 0 has 99 KB, 1 has 163 KB, 2 has 227 KB. Both halves go by the
 * architecture that the image was built for, which is the device's own: arch.def has no parents of another tier. */
#ifdef __CUDA_ARCH__
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
#define INGOT__TIER 0
#elif __CUDA_ARCH__ < 900
#define INGOT__TIER 1
#else
#define INGOT__TIER 2
#endif
#elif !defined INGOT_HOST
#define INGOT__TIER 0 /* the compiler's pass over host code */
#endif

#ifdef INGOT_HOST
#include <string.h>

#include "../pipeline.h"

_Static_assert(sizeof(ingot__gpu_args) <= INGOT__ARGUMENTS, "the plan holds the arguments");
_Static_assert(sizeof(ingot__gpu_args) % 8 == 0, "host and device agree on the size");

static inline int ingot__gpu_tier(const ingot__device *device) {
	if (!strncmp(device->arch, "sm_90", 5) || !strcmp(device->arch, "sm_100")) return 2;
	return !strcmp(device->arch, "sm_80");
}

static inline void ingot__gpu_strides(int64_t *to, const ingot_tensor *t, int count) {
	for (int i = 0; i < count; i++) to[i] = t->stride[i];
}

/* The problem as arguments; the caller adds its numbers. */
static inline ingot__gpu_args *ingot__gpu_fill(const ingot__problem *p, ingot__plan *plan) {
	ingot__gpu_args *const a = (ingot__gpu_args *)(void *)plan->arguments;
	*a = (ingot__gpu_args){
		.q = p->q.data,
		.k = p->k.data,
		.v = p->v.data,
		.out = p->out.data,
		.lse = (float *)p->lse.data,
		.dout = p->dout.data,
		.dq = p->dq.data,
		.dk = p->dk.data,
		.dv = p->dv.data,
		.bias = p->bias.data,
		.dbias = p->dbias.data,
		.alibi = (const float *)p->alibi.data,
		.sink = (const float *)p->sink.data,
		.dsink = (float *)p->dsink.data,
		.q_descale = (const float *)p->q_descale.data,
		.k_descale = (const float *)p->k_descale.data,
		.v_descale = (const float *)p->v_descale.data,
		.q_lengths = p->q_side.lengths,
		.q_positions = p->q_side.positions,
		.k_lengths = p->k_side.lengths,
		.k_positions = p->k_side.positions,
		.page_table = p->pages.table,
		.page_indptr = p->pages.indptr,
		.page_indices = p->pages.indices,
		.seed_ptr = (const uint64_t *)p->dropout_seed_ptr.data,
		.offset_ptr = (const uint64_t *)p->dropout_offset_ptr.data,
		.seed_out = (uint64_t *)p->dropout_seed_out.data,
		.offset_out = (uint64_t *)p->dropout_offset_out.data,
		.seed = p->dropout_seed,
		.offset = p->dropout_offset,
		.left = p->left,
		.right = p->right,
		.q_capacity = p->q_side.capacity,
		.k_capacity = p->k_side.capacity,
		.page_count = p->pages.count,
		.page_size = p->pages.page_size,
		.max_pages = p->pages.max_pages,
		.indices_count = p->pages.indices_count,
		.table_stride = p->pages.table_stride,
		.dsink_stride = p->dsink.stride[0],
		.sink_stride = p->sink.stride[0],
		.batch = (int32_t)p->batch,
		.heads_q = (int32_t)p->heads_q,
		.heads_k = (int32_t)p->heads_k,
		.group = (int32_t)p->group,
		.head_dim = (int32_t)p->head_dim,
		.head_dim_v = (int32_t)p->head_dim_v,
		.max_seqlen_q = (int32_t)p->q_side.max_seqlen,
		.max_seqlen_k = (int32_t)p->k_side.max_seqlen,
		.q_dtype = p->q.dtype,
		.kv_dtype = p->k.dtype,
		.out_dtype = p->out.dtype,
		.bias_dtype = p->bias.dtype,
		.dq_dtype = p->dq.dtype,
		.dk_dtype = p->dk.dtype,
		.dv_dtype = p->dv.dtype,
		.dbias_dtype = p->dbias.dtype,
		.q_stacked = p->q_side.stacked,
		.q_length = p->q_side.length,
		.q_position = p->q_side.position,
		.k_stacked = p->k_side.stacked,
		.k_length = p->k_side.length,
		.k_position = p->k_side.position,
		.bottom_right = p->bottom_right,
		.lse_base = p->lse_base,
		.q_descale_per_query_head = p->q_descale.ndim == 2 && p->q_descale.shape[1] == p->heads_q,
		.features = p->features,
		.dropout_threshold = p->dropout_threshold,
		.softmax_scale = (float)p->softmax_scale,
		.softcap = p->softcap,
		.keep_scale = 1.0f / (1.0f - p->dropout_p),
	};
	ingot__gpu_strides(a->q_stride, &p->q, 3);
	ingot__gpu_strides(a->k_stride, &p->k, 3);
	ingot__gpu_strides(a->v_stride, &p->v, 3);
	ingot__gpu_strides(a->out_stride, &p->out, 3);
	ingot__gpu_strides(a->lse_stride, &p->lse, 3);
	ingot__gpu_strides(a->dout_stride, &p->dout, 3);
	ingot__gpu_strides(a->dq_stride, &p->dq, 3);
	ingot__gpu_strides(a->dk_stride, &p->dk, 3);
	ingot__gpu_strides(a->dv_stride, &p->dv, 3);
	ingot__gpu_strides(a->bias_stride, &p->bias, 4);
	ingot__gpu_strides(a->dbias_stride, &p->dbias, 4);
	/* one-dimensional factors serve every sequence: their batch stride is 0 */
	const int two = p->alibi.ndim == 2;
	a->alibi_stride[0] = two ? p->alibi.stride[0] : 0;
	a->alibi_stride[1] = p->alibi.stride[two];
	const ingot_tensor *const descale[3] = {&p->q_descale, &p->k_descale, &p->v_descale};
	int64_t *const strides[3] = {a->q_descale_stride, a->k_descale_stride, a->v_descale_stride};
	for (int i = 0; i < 3; i++)
		if (descale[i]->ndim == 2) ingot__gpu_strides(strides[i], descale[i], 2);
	for (int i = 0; i < 4; i++) a->dbias_shape[i] = (int32_t)p->dbias.shape[i];
	plan->arguments_size = sizeof *a;
	return a;
}
#endif
#endif
