/*
 * Attention backward on any NVIDIA GPU, every feature, type and head size, in fp32 arithmetic without matrix units: the
 * fallback of the fast kernels. Each gradient has its own pass that recomputes the probabilities it needs, so that nothing is
 * added atomically and results are bitwise the same from run to run.
 */
#include "../gpu_args.h"

enum { DOUT_DTYPE, DBIAS_BLOCKS, GRADIENT_TILES };

#ifdef INGOT_HOST

static const ingot__image_variant images[] = {
	{"d64", "-DHEAD=64", 64}, {"d128", "-DHEAD=128", 64}, {"d256", "-DHEAD=256", 64}, {"d576", "-DHEAD=576", 4096}};
static const char *const kernels[] = {"attn_bwd_sm80_simt_delta", "attn_bwd_sm80_simt_dq", "attn_bwd_sm80_simt_dkv",
                                      "attn_bwd_sm80_simt_terms", NULL};

static const char *refuse(const ingot__problem *p, const ingot__device *device, int *variant) {
	(void)device;
	const int64_t d = p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v;
	*variant = d <= 64 ? 0 : d <= 128 ? 1 : d <= 256 ? 2 : 3;
	return NULL;
}

static void add_step(ingot__plan *out, const char *name, const char *kernel, int64_t blocks) {
	if (blocks <= 0) return;
	out->step[out->steps++] = (ingot__step){.name = name,
	                                        .kernel = kernel,
	                                        .block = {128, 1, 1},
	                                        .grid = {(uint32_t)(blocks < 2147483647 ? blocks : 2147483647), 1, 1}};
}

static int64_t tiles(int64_t n) {
	return (n + 31) / 32;
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)device;
	(void)threads;
	ingot__gpu_args *const a = ingot__gpu_fill(p, out);
	const int64_t rows = p->batch * p->heads_q * p->q_side.max_seqlen;
	a->number[DOUT_DTYPE] = p->dout.dtype;
	const int64_t *s = p->dbias.shape;
	const int64_t dbias_blocks = p->dbias.dtype == INGOT_NONE ? 0 : s[0] * s[1] * tiles(s[2]) * tiles(s[3]);
	a->number[DBIAS_BLOCKS] = (int32_t)dbias_blocks;
	out->workspace_bytes = (uint64_t)rows * 4;
	add_step(out, "delta", kernels[0], (rows + 3) / 4);
	if (p->dq.dtype != INGOT_NONE) add_step(out, "dq", kernels[1], p->batch * p->heads_q * tiles(p->q_side.max_seqlen));
	if (p->dk.dtype != INGOT_NONE || p->dv.dtype != INGOT_NONE)
		add_step(out, "dkv", kernels[2], 2 * p->batch * p->heads_k * tiles(p->k_side.max_seqlen));
	add_step(out, "terms", kernels[3], dbias_blocks + (p->dsink.dtype != INGOT_NONE ? p->heads_q : 0));
}

const ingot__impl ingot__impl_attn_bwd_sm80_simt = {
	.name = "attn_bwd_sm80_simt",
	.family = "cuda",
	.op = INGOT__ATTN_BWD,
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

enum { COLUMNS = HEAD / 4 };

DEVICE float *delta_of(const ingot__gpu_args &a, int b, int head) {
	return (float *)a.workspace + ((index_t)b * a.heads_q + head) * a.max_seqlen_q;
}

DEVICE float lse_of(const ingot__gpu_args &a, const attention &t, int i) {
	const float x = a.lse[t.b * a.lse_stride[0] + t.head * a.lse_stride[1] + (t.q.start + i) * a.lse_stride[2]];
	return a.lse_base ? x * LN2 : x;
}

/* A warp a row: delta = sum of dout * out. */
extern "C" __global__ void __launch_bounds__(THREADS)
	attn_bwd_sm80_simt_delta(const __grid_constant__ ingot__gpu_args a) {
	const index_t rows = (index_t)a.batch * a.heads_q * a.max_seqlen_q;
	for (index_t n = (index_t)blockIdx.x * 4 + warp_id(); n < rows; n += (index_t)gridDim.x * 4) {
		const int i = (int)(n % a.max_seqlen_q), head = (int)(n / a.max_seqlen_q % a.heads_q),
				  b = (int)(n / a.max_seqlen_q / a.heads_q);
		const span q = query_rows(a, b);
		if (i >= q.count) continue;
		const index_t x = row_offset(a.out_stride, q, head, i), y = row_offset(a.dout_stride, q, head, i);
		float sum = 0;
		for (int d = lane_id(); d < a.head_dim_v; d += 32)
			sum = fmaf(load_value(a.out, x + d, a.out_dtype), load_value(a.dout, y + d, a.number[DOUT_DTYPE]), sum);
		for (int m = 16; m; m >>= 1) sum += lane_xor(sum, m);
		if (lane_id() == 0) delta_of(a, b, head)[i] = sum;
	}
}

struct tiles {
	float A[TILE][PITCH], B[TILE][PITCH], W[TILE][TILE + 1];
};

/* The dots of an owner tile with another tile: q.k into s and dout.v into g, for owners that are queries or keys. */
DEVICE void dots(const ingot__gpu_args &a, const attention &t, tiles &m, bool owner_is_key, int i0, int i_last, int j0,
                 int j_first, int j_last, float s[QUARTER], float g[QUARTER], bool need_g) {
	exact_sum qk[QUARTER], dov[QUARTER];
#pragma unroll
	for (int n = 0; n < QUARTER; n++) qk[n].sum = qk[n].lost = dov[n].sum = dov[n].lost = 0;
	float(*const Q)[PITCH] = owner_is_key ? m.B : m.A, (*const K)[PITCH] = owner_is_key ? m.A : m.B;
	for (int c0 = 0; c0 < a.head_dim; c0 += CHUNK) {
		block_barrier();
		load_chunk(a, t, false, Q, a.q, a.q_stride, a.q_dtype, i0, 0, i_last, c0, a.head_dim);
		load_chunk(a, t, true, K, a.k, a.k_stride, a.kv_dtype, j0, j_first, j_last, c0, a.head_dim);
		block_barrier();
		dot_chunk(m.A, m.B, qk);
	}
	for (int c0 = 0; need_g && c0 < a.head_dim_v; c0 += CHUNK) {
		block_barrier();
		load_chunk(a, t, false, Q, a.dout, a.dout_stride, a.number[DOUT_DTYPE], i0, 0, i_last, c0, a.head_dim_v);
		load_chunk(a, t, true, K, a.v, a.v_stride, a.kv_dtype, j0, j_first, j_last, c0, a.head_dim_v);
		block_barrier();
		dot_chunk(m.A, m.B, dov);
	}
#pragma unroll
	for (int n = 0; n < QUARTER; n++) {
		s[n] = total_of(qk[n]);
		g[n] = total_of(dov[n]);
	}
}

/* p and ds (before the scale of q.k, with softcap's slope) of one pair from its dots; both exactly 0 where it is masked. */
DEVICE void weights(const ingot__gpu_args &a, const attention &t, int i, int j, float s, float g, float lse,
                    float delta, float *p_kept, float *ds_bias, float *ds) {
	float slope;
	*p_kept = *ds_bias = *ds = 0;
	s = score_of(a, t, s, i, j, &slope);
	if (s == -INFINITY && is_masked(a, t, i, j)) return;
	if (lse == -INFINITY) return;
	const float p = expf(s - lse), keep = kept(a, t, i, j);
	*p_kept = keep == 0.0f ? 0.0f : p * keep;
	*ds_bias = p * ((keep == 0.0f ? 0.0f : g * keep) - delta);
	*ds = *ds_bias * slope;
}

/* out[c] += sum over the other tile of W[owner][other] X[other][c], in chunks of columns. */
DEVICE void accumulate(const ingot__gpu_args &a, const attention &t, tiles &m, bool keys, const void *base,
                       const int64_t *stride, int dtype, int r0, int first, int last, int columns, float out[COLUMNS]) {
#pragma unroll
	for (int c0 = 0; c0 < HEAD; c0 += CHUNK) {
		if (c0 >= columns) break;
		block_barrier();
		load_chunk(a, t, keys, m.B, base, stride, dtype, r0, first, last, c0, columns);
		block_barrier();
		product_chunk(m.W, m.B, out + c0 / 4);
	}
}

DEVICE void store_row(void *base, index_t at, int dtype, const float out[COLUMNS], int columns, float factor) {
	const int quarter = thread_id() & 3;
#pragma unroll
	for (int c = 0; c < COLUMNS; c++) {
		const int d = c / (CHUNK / 4) * CHUNK + c % (CHUNK / 4) * 4 + quarter;
		if (d < columns) store_value(base, at + d, dtype, out[c] * factor);
	}
}

extern "C" __global__ void __launch_bounds__(THREADS) attn_bwd_sm80_simt_dq(const __grid_constant__ ingot__gpu_args a) {
	__shared__ tiles m;
	const int r = thread_id() / 4, quarter = thread_id() & 3;
	const int count = (a.max_seqlen_q + TILE - 1) / TILE;
	const index_t blocks = (index_t)count * a.batch * a.heads_q;
	for (index_t block = blockIdx.x; block < blocks; block += gridDim.x) {
		const int head = (int)(block / count % a.heads_q), b = (int)(block / count / a.heads_q);
		const int i0 = (count - 1 - (int)(block % count)) * TILE;
		const attention t = make_attention(a, b, head);
		if (i0 >= t.q.count) continue;
		const int i = i0 + r, i1 = i0 + TILE < t.q.count ? i0 + TILE : t.q.count;
		int first, last;
		visible_keys(a, t, i0, i1, &first, &last);
		const float lse = i < i1 ? lse_of(a, t, i) : -INFINITY, delta = i < i1 ? delta_of(a, b, head)[i] : 0.0f;
		float out[COLUMNS];
#pragma unroll
		for (int c = 0; c < COLUMNS; c++) out[c] = 0;
		for (int j0 = first / TILE * TILE; j0 < last; j0 += TILE) {
			float s[QUARTER], g[QUARTER];
			dots(a, t, m, false, i0, t.q.count, j0, first, last, s, g, true);
#pragma unroll
			for (int n = 0; n < QUARTER; n++) {
				float p, bias, ds;
				weights(a, t, i, j0 + 4 * n + quarter, s[n], g[n], lse, delta, &p, &bias, &ds);
				m.W[r][4 * n + quarter] = ds;
			}
			accumulate(a, t, m, true, a.k, a.k_stride, a.kv_dtype, j0, first, last, a.head_dim, out);
		}
		if (i < i1) store_row(a.dq, row_offset(a.dq_stride, t.q, head, i), a.dq_dtype, out, a.head_dim, t.scale);
	}
}

extern "C" __global__ void __launch_bounds__(THREADS)
	attn_bwd_sm80_simt_dkv(const __grid_constant__ ingot__gpu_args a) {
	__shared__ tiles m;
	const int r = thread_id() / 4, quarter = thread_id() & 3;
	const int count = (a.max_seqlen_k + TILE - 1) / TILE;
	const index_t blocks = 2 * (index_t)count * a.batch * a.heads_k;
	for (index_t block = blockIdx.x; block < blocks; block += gridDim.x) {
		const bool is_dk = block & 1;
		const index_t n0 = block >> 1;
		const int head_k = (int)(n0 / count % a.heads_k), b = (int)(n0 / count / a.heads_k),
				  j0 = (int)(n0 % count) * TILE;
		if (!(is_dk ? a.dk : a.dv)) continue;
		float out[COLUMNS];
#pragma unroll
		for (int c = 0; c < COLUMNS; c++) out[c] = 0;
		attention t = make_attention(a, b, head_k * a.group);
		if (j0 >= t.k.count) continue;
		const int j = j0 + r, j1 = j0 + TILE < t.k.count ? j0 + TILE : t.k.count;
		int first, last;
		seeing_queries(a, t, j0, j1, &first, &last);
		for (int g_head = 0; g_head < a.group; g_head++) {
			if (g_head) t = make_attention(a, b, head_k * a.group + g_head);
			for (int i0 = first / TILE * TILE; i0 < last; i0 += TILE) {
				float s[QUARTER], g[QUARTER];
				dots(a, t, m, true, i0, t.q.count, j0, 0, t.k.count, s, g, is_dk);
#pragma unroll
				for (int n = 0; n < QUARTER; n++) {
					const int i = i0 + 4 * n + quarter;
					const bool real = i < t.q.count;
					float p, bias, ds;
					weights(a, t, i, j, s[n], g[n], real ? lse_of(a, t, i) : -INFINITY,
					        real ? delta_of(a, b, t.head)[i] : 0.0f, &p, &bias, &ds);
					m.W[r][4 * n + quarter] = is_dk ? ds : p;
				}
				if (is_dk) accumulate(a, t, m, false, a.q, a.q_stride, a.q_dtype, i0, first, last, a.head_dim, out);
				else
					accumulate(a, t, m, false, a.dout, a.dout_stride, a.number[DOUT_DTYPE], i0, first, last,
					           a.head_dim_v, out);
			}
		}
		if (j >= j1) continue;
		const index_t at = (index_t)t.k.slot * (is_dk ? a.dk_stride : a.dv_stride)[0] +
		                   (index_t)head_k * (is_dk ? a.dk_stride : a.dv_stride)[1] +
		                   (t.k.start + j) * (is_dk ? a.dk_stride : a.dv_stride)[2];
		if (is_dk) store_row(a.dk, at, a.dk_dtype, out, a.head_dim, t.scale);
		else store_row(a.dv, at, a.dv_dtype, out, a.head_dim_v, 1.0f);
	}
}

/* One tile of dbias, summed over the axes where its extent is 1; or one head of dsink. */
extern "C" __global__ void __launch_bounds__(THREADS)
	attn_bwd_sm80_simt_terms(const __grid_constant__ ingot__gpu_args a) {
	__shared__ tiles m;
	const int r = thread_id() / 4, quarter = thread_id() & 3;
	const index_t blocks = a.number[DBIAS_BLOCKS] + (a.dsink ? a.heads_q : 0);
	for (index_t block = blockIdx.x; block < blocks; block += gridDim.x) {
		block_barrier();
		if (block >= a.number[DBIAS_BLOCKS]) {
			const int head = (int)(block - a.number[DBIAS_BLOCKS]);
			const float sink = a.sink[head * a.sink_stride];
			float sum = 0;
			for (int b = 0; b < a.batch; b++) {
				const attention t = make_attention(a, b, head);
				for (int i = thread_id(); i < t.q.count; i += THREADS) {
					const float lse = lse_of(a, t, i);
					if (lse != -INFINITY) sum -= expf(sink - lse) * delta_of(a, b, head)[i];
				}
			}
			m.W[thread_id() / TILE][thread_id() % TILE] = sum;
			block_barrier();
			if (thread_id() == 0) {
				float total = 0;
				for (int n = 0; n < THREADS; n++) total += m.W[n / TILE][n % TILE];
				a.dsink[head * a.dsink_stride] = total;
			}
			continue;
		}
		const int *s4 = a.dbias_shape;
		const int ti = (s4[2] + TILE - 1) / TILE, tj = (s4[3] + TILE - 1) / TILE;
		const int jt = (int)(block % tj), it = (int)(block / tj % ti), h0 = (int)(block / tj / ti % s4[1]),
				  b0 = (int)(block / tj / ti / s4[1]);
		const bool sum_b = s4[0] == 1, sum_h = s4[1] == 1, sum_i = s4[2] == 1, sum_j = s4[3] == 1;
		float sum[QUARTER];
#pragma unroll
		for (int n = 0; n < QUARTER; n++) sum[n] = 0;
		for (int b = sum_b ? 0 : b0; b < (sum_b ? a.batch : b0 + 1); b++)
			for (int h = sum_h ? 0 : h0; h < (sum_h ? a.heads_q : h0 + 1); h++) {
				const attention t = make_attention(a, b, h);
				for (int i0 = sum_i ? 0 : it * TILE; i0 < (sum_i ? t.q.count : it * TILE + 1) && i0 < t.q.count;
				     i0 += TILE) {
					const int i = i0 + r, i1 = i0 + TILE < t.q.count ? i0 + TILE : t.q.count;
					int first, last;
					visible_keys(a, t, i0, i1, &first, &last);
					const float lse = i < i1 ? lse_of(a, t, i) : -INFINITY,
								delta = i < i1 ? delta_of(a, b, h)[i] : 0.0f;
					for (int j0 = sum_j ? first / TILE * TILE : jt * TILE; j0 < (sum_j ? last : jt * TILE + 1);
					     j0 += TILE) {
						if (j0 >= last || j0 + TILE <= first) continue;
						float s[QUARTER], g[QUARTER];
						dots(a, t, m, false, i0, t.q.count, j0, first, last, s, g, true);
#pragma unroll
						for (int n = 0; n < QUARTER; n++) {
							float p, bias, ds;
							weights(a, t, i, j0 + 4 * n + quarter, s[n], g[n], lse, delta, &p, &bias, &ds);
							sum[n] += bias;
						}
					}
				}
			}
		block_barrier();
#pragma unroll
		for (int n = 0; n < QUARTER; n++) m.W[r][4 * n + quarter] = sum[n];
		block_barrier();
		for (int n = thread_id(); n < TILE * TILE; n += THREADS) {
			const int x = n / TILE, y = n % TILE, i = sum_i ? 0 : it * TILE + x, j = sum_j ? 0 : jt * TILE + y;
			if ((sum_i && x) || (sum_j && y) || i >= s4[2] || j >= s4[3]) continue;
			float total = 0;
			for (int u = sum_i ? 0 : x; u < (sum_i ? TILE : x + 1); u++)
				for (int v = sum_j ? 0 : y; v < (sum_j ? TILE : y + 1); v++) total += m.W[u][v];
			store_value(a.dbias,
			            b0 * a.dbias_stride[0] + h0 * a.dbias_stride[1] + i * a.dbias_stride[2] + j * a.dbias_stride[3],
			            a.dbias_dtype, total);
		}
	}
}
#endif
