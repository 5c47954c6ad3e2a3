/*
 * Attention forward on any NVIDIA GPU, every feature, type and head size, in fp32 arithmetic without matrix units. It is the
 * fallback of the fast kernels, and what they are compared with on a device. A block owns 32 query rows of one head; K and V
 * pass through shared memory in tiles of 32 keys by 64 columns, so that any head size fits.
 */
#include "../gpu_args.h"

#ifdef INGOT_HOST

static const ingot__image_variant images[] = {{"dv64", "-DHEAD_V=64", 0},
                                              {"dv128", "-DHEAD_V=128", 0},
                                              {"dv256", "-DHEAD_V=256", 0},
                                              {"dv512", "-DHEAD_V=512", 0}};
static const char *const kernels[] = {"attn_fwd_sm80_simt", NULL};

static const char *refuse(const ingot__problem *p, const ingot__device *device, int *variant) {
	(void)device;
	INGOT__REFUSE_IF(p->k.dtype >= INGOT_F8_E4M3_FNUZ || p->q.dtype >= INGOT_F8_E4M3_FNUZ,
	                 "NVIDIA GPUs have no FNUZ 8-bit types; use INGOT_F8_E4M3 or INGOT_F8_E5M2");
	*variant = p->head_dim_v <= 64 ? 0 : p->head_dim_v <= 128 ? 1 : p->head_dim_v <= 256 ? 2 : 3;
	return NULL;
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)device;
	(void)threads;
	(void)ingot__gpu_fill(p, out);
	const int64_t heads = p->batch * p->heads_q, tiles = (p->q_side.max_seqlen + 31) / 32;
	const bool cells = p->dropout_seed_out.dtype != INGOT_NONE || p->dropout_offset_out.dtype != INGOT_NONE;
	if ((heads == 0 || tiles == 0) && !cells) return;
	const int64_t blocks = heads * tiles;
	out->steps = 1;
	out->step[0] = (ingot__step){.name = "rows",
	                             .kernel = kernels[0],
	                             .block = {128, 1, 1},
	                             .grid = {(uint32_t)(blocks < 1            ? 1
	                                                 : blocks < 2147483647 ? blocks
	                                                                       : 2147483647),
	                                      1, 1}};
}

const ingot__impl ingot__impl_attn_fwd_sm80_simt = {
	.name = "attn_fwd_sm80_simt",
	.family = "cuda",
	.op = INGOT__ATTN_FWD,
	.device = INGOT_CUDA,
	.arch = "",
	.rank = 1,
	.variant_count = sizeof images / sizeof *images,
	.images = images,
	.kernels = kernels,
	.refuse = refuse,
	.plan = plan,
};

#else
#include "../gpu_simt.h"

enum { COLUMNS = HEAD_V / 4 }; /* of the output, per thread */

extern "C" __global__ void __launch_bounds__(THREADS) attn_fwd_sm80_simt(const __grid_constant__ ingot__gpu_args a) {
	__shared__ float A[TILE][PITCH], B[TILE][PITCH], P[TILE][TILE + 1];
	const int r = thread_id() / 4, quarter = thread_id() & 3;
	const int tiles = (a.max_seqlen_q + TILE - 1) / TILE;
	const index_t blocks = (index_t)tiles * a.batch * a.heads_q;
	if (blockIdx.x == 0 && thread_id() == 0) {
		if (a.seed_out) *a.seed_out = dropout_seed(a);
		if (a.offset_out) *a.offset_out = dropout_offset(a);
	}
	for (index_t block = blockIdx.x; block < blocks; block += gridDim.x) {
		const int head = (int)(block / tiles % a.heads_q), b = (int)(block / tiles / a.heads_q);
		/* last rows first: under a causal mask they take longest */
		const int i0 = (tiles - 1 - (int)(block % tiles)) * TILE;
		const attention t = make_attention(a, b, head);
		const int i1 = i0 + TILE < t.q.count ? i0 + TILE : t.q.count;
		if (i0 >= t.q.count) continue;
		int first, last;
		visible_keys(a, t, i0, i1, &first, &last);
		float top = -INFINITY, total = 0, out[COLUMNS];
#pragma unroll
		for (int c = 0; c < COLUMNS; c++) out[c] = 0;
		for (int j0 = first / TILE * TILE; j0 < last; j0 += TILE) {
			exact_sum dot[QUARTER];
			float s[QUARTER], best = -INFINITY;
#pragma unroll
			for (int n = 0; n < QUARTER; n++) dot[n].sum = dot[n].lost = 0;
			for (int c0 = 0; c0 < a.head_dim; c0 += CHUNK) {
				block_barrier();
				load_chunk(a, t, false, A, a.q, a.q_stride, a.q_dtype, i0, 0, t.q.count, c0, a.head_dim);
				load_chunk(a, t, true, B, a.k, a.k_stride, a.kv_dtype, j0, first, last, c0, a.head_dim);
				block_barrier();
				dot_chunk(A, B, dot);
			}
#pragma unroll
			for (int n = 0; n < QUARTER; n++) {
				float slope;
				s[n] = score_of(a, t, total_of(dot[n]), i0 + r, j0 + 4 * n + quarter, &slope);
				best = fmaxf(best, s[n]);
			}
			best = fmaxf(best, lane_xor(best, 1));
			best = fmaxf(best, lane_xor(best, 2));
			const float next = fmaxf(top, best), base = next == -INFINITY ? 0.0f : next;
			const float fade = top == next ? 1.0f : expf(top - base);
			top = next;
			total *= fade;
#pragma unroll
			for (int c = 0; c < COLUMNS; c++) out[c] *= fade;
#pragma unroll
			for (int n = 0; n < QUARTER; n++) {
				const int j = j0 + 4 * n + quarter;
				const float p = s[n] == -INFINITY ? 0.0f : expf(s[n] - base);
				total += p;
				P[r][4 * n + quarter] = p == 0.0f ? 0.0f : p * kept(a, t, i0 + r, j);
			}
#pragma unroll
			for (int c0 = 0; c0 < HEAD_V; c0 += CHUNK) {
				block_barrier();
				load_chunk(a, t, true, B, a.v, a.v_stride, a.kv_dtype, j0, first, last, c0, a.head_dim_v);
				block_barrier();
				product_chunk(P, B, out + c0 / 4);
			}
		}
		total += lane_xor(total, 1);
		total += lane_xor(total, 2);
		float lse = top == -INFINITY ? -INFINITY : top + logf(total),
			  factor = top == -INFINITY ? 0.0f : t.v_factor / total;
		if (a.features & F_SINK) {
			const float sink = a.sink[head * a.sink_stride];
			const float high = fmaxf(top, sink), base = high == -INFINITY ? 0.0f : high;
			const float mine = top == -INFINITY ? 0.0f : total * expf(top - base), all = mine + expf(sink - base);
			lse = high == -INFINITY ? -INFINITY : base + logf(all);
			factor = top == -INFINITY ? 0.0f : t.v_factor * expf(top - base) / all;
			if (isnan(sink) || sink == INFINITY) lse = factor = NAN;
		}
		if (isnan(total)) lse = factor = NAN; /* a NaN score, which no maximum shows */
		const int i = i0 + r;
		if (i < i1) {
			const index_t to = row_offset(a.out_stride, t.q, head, i);
#pragma unroll
			for (int c = 0; c < COLUMNS; c++) {
				const int d = c / (CHUNK / 4) * CHUNK + c % (CHUNK / 4) * 4 + quarter;
				/* a factor of 0 means no key: the row is 0 whatever was read */
				if (d < a.head_dim_v) store_value(a.out, to + d, a.out_dtype, factor == 0.0f ? 0.0f : out[c] * factor);
			}
			if (a.lse && quarter == 0)
				a.lse[b * a.lse_stride[0] + head * a.lse_stride[1] + (t.q.start + i) * a.lse_stride[2]] =
					a.lse_base ? lse * LOG2E : lse;
		}
	}
}
#endif
