/*
 * Merging partial results on NVIDIA GPUs: a warp owns one row, weighs the parts by their lse in fp32 and selects, never
 * multiplies, so that an empty part may hold anything finite or not. Every part of a row is read before the row is written,
 * since the output may be the first part's own memory.
 */
#include <stdint.h>

enum { PARTS_SEPARATE = 8, THREADS = 128, WARPS = THREADS / 32 };

typedef struct merge_args {
	void *workspace; /* unused; first by the rule of plans */
	const void *out_part[PARTS_SEPARATE];
	const float *lse_part[PARTS_SEPARATE];
	int64_t out_part_stride[PARTS_SEPARATE][3], lse_part_stride[PARTS_SEPARATE][3];
	void *out;
	float *lse;
	int64_t out_stride[3], lse_stride[3];
	int64_t out_step, lse_step; /* stacked parts: elements from part to part of part 0 */
	int64_t parts, rows;
	int32_t stacked, part_dtype, out_dtype, base2, batch, heads, seqlen, head_dim;
} merge_args;

#ifdef INGOT_HOST
#include "../../pipeline.h"

_Static_assert(sizeof(merge_args) <= INGOT__ARGUMENTS && sizeof(merge_args) % 8 == 0, "the plan holds the arguments");

/* spills: a few registers around the call of the exact division, outside of every inner loop */
static const ingot__image_variant images[] = {{"general", "", 64}};
static const char *const kernels[] = {"attn_merge_sm80", NULL};

static const char *refuse(const ingot__problem *p, const ingot__device *device, int *variant) {
	(void)p;
	(void)device;
	*variant = 0;
	return NULL;
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)threads;
	merge_args *const a = (merge_args *)(void *)out->arguments;
	*a = (merge_args){
		.out = p->out.data,
		.lse = (float *)p->lse.data,
		.out_step = p->out_part_stride,
		.lse_step = p->lse_part_stride,
		.parts = p->parts,
		.rows = p->batch * p->heads_q * p->out.shape[2],
		.stacked = p->parts_stacked,
		.part_dtype = p->out_parts[0].dtype,
		.out_dtype = p->out.dtype,
		.base2 = p->lse_base == INGOT_LSE_BASE2,
		.batch = (int32_t)p->batch,
		.heads = (int32_t)p->heads_q,
		.seqlen = (int32_t)p->out.shape[2],
		.head_dim = (int32_t)p->head_dim,
	};
	for (int i = 0; i < PARTS_SEPARATE; i++) {
		a->out_part[i] = p->out_parts[i].data;
		a->lse_part[i] = (const float *)p->lse_parts[i].data;
		for (int x = 0; x < 3; x++) {
			a->out_part_stride[i][x] = p->out_parts[i].stride[x];
			a->lse_part_stride[i][x] = p->lse_parts[i].stride[x];
		}
	}
	for (int x = 0; x < 3; x++) {
		a->out_stride[x] = p->out.stride[x];
		a->lse_stride[x] = p->lse.stride[x];
	}
	out->arguments_size = sizeof *a;
	if (a->rows == 0) return;
	const int64_t blocks = (a->rows + WARPS - 1) / WARPS, most = (int64_t)device->multiprocessors * 64;
	out->steps = 1;
	out->step[0] = (ingot__step){.name = "merge",
	                             .kernel = kernels[0],
	                             .block = {THREADS, 1, 1},
	                             .grid = {(uint32_t)(blocks < most ? blocks : most), 1, 1}};
}

const ingot__impl ingot__impl_attn_merge_sm80 = {
	.name = "attn_merge_sm80",
	.family = "cuda",
	.op = INGOT__ATTN_MERGE,
	.device = INGOT_CUDA,
	.arch = "",
	.rank = 10,
	.variant_count = 1,
	.images = images,
	.kernels = kernels,
	.refuse = refuse,
	.plan = plan,
};

#else
#include "../gpu.h"

struct row {
	index_t b, h, i;
};

DEVICE index_t at(const int64_t *stride, const row &r) {
	return r.b * stride[0] + r.h * stride[1] + r.i * stride[2];
}

DEVICE float part_lse(const merge_args &a, const row &r, index_t n) {
	const int t = a.stacked ? 0 : (int)n;
	const float x = a.lse_part[t][at(a.lse_part_stride[t], r) + (a.stacked ? n * a.lse_step : 0)];
	return a.base2 ? x * LN2 : x;
}

extern "C" __global__ void __launch_bounds__(THREADS) attn_merge_sm80(const __grid_constant__ merge_args a) {
	for (index_t n = (index_t)blockIdx.x * WARPS + warp_id(); n < a.rows; n += (index_t)gridDim.x * WARPS) {
		const row r = {n / a.seqlen / a.heads, n / a.seqlen % a.heads, n % a.seqlen};
		const float none = -INFINITY;
		float top = none, total = 0;
		bool nan = false;
		for (index_t p = 0; p < a.parts; p++) {
			const float x = part_lse(a, r, p);
			nan |= isnan(x);
			top = fmaxf(top, x);
		}
		for (index_t p = 0; p < a.parts && top != none; p++) {
			const float x = part_lse(a, r, p);
			if (x != none) total += top == INFINITY ? expf(x == INFINITY ? 0.0f : none) : expf(x - top);
		}
		float lse = top == none ? none : top + logf(total);
		if (nan) lse = NAN;
		/* 16 columns a lane are kept while the parts are read */
		for (int first = 0; first < a.head_dim; first += 512) {
			float sum[16];
#pragma unroll
			for (int x = 0; x < 16; x++) sum[x] = 0;
			for (index_t p = 0; p < a.parts && top != none; p++) {
				const float l = part_lse(a, r, p);
				if (l == none) continue;
				const float weight =
					nan ? NAN : (top == INFINITY ? (l == INFINITY ? 1.0f : 0.0f) : expf(l - top)) / total;
				if (weight == 0.0f) continue;
				const int t = a.stacked ? 0 : (int)p;
				const index_t from = at(a.out_part_stride[t], r) + (a.stacked ? p * a.out_step : 0) + first;
#pragma unroll
				for (int x = 0; x < 16; x++) {
					const int d = lane_id() + 32 * x;
					if (first + d < a.head_dim) sum[x] += weight * load_value(a.out_part[t], from + d, a.part_dtype);
				}
			}
			const index_t to = at(a.out_stride, r) + first;
#pragma unroll
			for (int x = 0; x < 16; x++) {
				const int d = lane_id() + 32 * x;
				if (first + d < a.head_dim) store_value(a.out, to + d, a.out_dtype, sum[x]);
			}
		}
		__syncwarp();
		if (a.lse && lane_id() == 0) a.lse[at(a.lse_stride, r)] = a.base2 ? lse * LOG2E : lse;
	}
}
#endif
