/*
 * Appending to a cache on NVIDIA GPUs: a warp moves one new row of K or V into its place, padded or paged, as it is or converted
 * to 8 bits. In the arguments q and dout are the new rows, dk and dv the cache, the K side is the cache.
 */
#include "../gpu_args.h"

enum { LENGTHS_AFTER, WITH_V, THREADS = 128, WARPS = THREADS / 32 };

#ifdef INGOT_HOST

/* spills: a few registers around the call of the exact division, outside of every inner loop */
static const ingot__image_variant images[] = {{"general", "", 64}};
static const char *const kernels[] = {"kv_append_sm80", NULL};

static const char *refuse(const ingot__problem *p, const ingot__device *device, int *variant) {
	(void)device;
	*variant = 0;
	INGOT__REFUSE_IF(p->k.dtype >= INGOT_F8_E4M3_FNUZ || p->v.dtype >= INGOT_F8_E4M3_FNUZ,
	                 "NVIDIA GPUs have no FNUZ 8-bit types; use INGOT_F8_E4M3 or INGOT_F8_E5M2");
	return NULL;
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)threads;
	ingot__gpu_args *const a = ingot__gpu_fill(p, out);
	a->q = p->k_new.data;
	a->dout = p->v_new.data;
	a->dk = p->k.data;
	a->dv = p->v.data;
	ingot__gpu_strides(a->q_stride, &p->k_new, 3);
	ingot__gpu_strides(a->dout_stride, &p->v_new, 3);
	ingot__gpu_strides(a->dk_stride, &p->k, 3);
	ingot__gpu_strides(a->dv_stride, &p->v, 3);
	a->q_dtype = p->k_new.dtype;
	a->out_dtype = p->v_new.dtype;
	a->dk_dtype = p->k.dtype;
	a->dv_dtype = p->v.dtype;
	a->number[LENGTHS_AFTER] = p->lengths_after;
	a->number[WITH_V] = p->v.dtype != INGOT_NONE;
	const int64_t rows = p->batch * p->heads_k * p->q_side.max_seqlen;
	if (rows == 0) return;
	const int64_t blocks = (rows + WARPS - 1) / WARPS, most = (int64_t)device->multiprocessors * 32;
	out->steps = 1;
	out->step[0] = (ingot__step){.name = "append",
	                             .kernel = kernels[0],
	                             .block = {THREADS, 1, 1},
	                             .grid = {(uint32_t)(blocks < most ? blocks : most), 1, 1}};
}

const ingot__impl ingot__impl_kv_append_sm80 = {
	.name = "kv_append_sm80",
	.family = "cuda",
	.op = INGOT__KV_APPEND,
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

DEVICE void move_row(const void *from, index_t from_at, int from_dtype, void *to, index_t to_at, int to_dtype,
                     int columns, float descale) {
	if (from_dtype == to_dtype) {
		/* bits, not values: a NaN keeps its payload */
		if (from_dtype == DT_F32)
			for (int d = lane_id(); d < columns; d += 32)
				((uint32_t *)to)[to_at + d] = ((const uint32_t *)from)[from_at + d];
		else
			for (int d = lane_id(); d < columns; d += 32)
				((uint16_t *)to)[to_at + d] = ((const uint16_t *)from)[from_at + d];
		return;
	}
	for (int d = lane_id(); d < columns; d += 32)
		store_value(to, to_at + d, to_dtype, __fdiv_rn(load_value(from, from_at + d, from_dtype), descale));
}

extern "C" __global__ void __launch_bounds__(THREADS) kv_append_sm80(const __grid_constant__ ingot__gpu_args a) {
	const index_t all = (index_t)a.batch * a.heads_k * a.max_seqlen_q;
	for (index_t n = (index_t)blockIdx.x * WARPS + warp_id(); n < all; n += (index_t)gridDim.x * WARPS) {
		const int i = (int)(n % a.max_seqlen_q), h = (int)(n / a.max_seqlen_q % a.heads_k),
				  b = (int)(n / a.max_seqlen_q / a.heads_k);
		const span fresh = query_rows(a, b);
		if (i >= fresh.count) continue;
		index_t pages = 0, length = a.k_lengths[b], most = a.k_capacity;
		const int32_t *list = 0;
		if (a.features & F_PAGED) {
			list = page_list(a, b, &pages);
			if (a.k_length == 3) length = pages ? (pages - 1) * a.page_size + length : 0;
			most = a.page_count ? pages * a.page_size : 0;
			if (most > a.max_seqlen_k) most = a.max_seqlen_k;
		}
		const index_t at = length - (a.number[LENGTHS_AFTER] ? fresh.count : 0) + i;
		if (at < 0 || at >= most) continue;
		const span cache = {b, 0, 0};
		move_row(a.q, row_offset(a.q_stride, fresh, h, i), a.q_dtype, a.dk,
		         key_offset(a, a.dk_stride, cache, list, h, (int)at), a.dk_dtype, a.head_dim,
		         descale_of(a.k_descale, a.k_descale_stride, b, h));
		if (a.number[WITH_V])
			move_row(a.dout, row_offset(a.dout_stride, fresh, h, i), a.out_dtype, a.dv,
			         key_offset(a, a.dv_stride, cache, list, h, (int)at), a.dv_dtype, a.head_dim_v,
			         descale_of(a.v_descale, a.v_descale_stride, b, h));
	}
}
#endif
