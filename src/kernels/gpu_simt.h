/*
 * What the plain (SIMT) attention kernels share: how a tile of scores is made from any input type, with every term of the
 * formula. A block has 128 threads; a tile is 32 owner rows by 32 other rows; four neighbouring threads work on one owner row,
 * each on every fourth column. Nothing here is fast; all of it follows the formula to the letter, for every type and head size.
 */
#ifndef INGOT_KERNELS_GPU_SIMT_H
#define INGOT_KERNELS_GPU_SIMT_H

#include "gpu.h"

enum { TILE = 32, THREADS = 128, CHUNK = 64, PITCH = CHUNK + 1, QUARTER = TILE / 4 };

/* One sequence and head as a block sees it. */
struct attention {
	int b, head, head_k;
	span q, k;
	const int32_t *list;
	index_t diagonal;
	float scale, slope, v_factor;
	uint64_t seed, offset;
};

DEVICE attention make_attention(const ingot__gpu_args &a, int b, int head) {
	attention t;
	index_t pages;
	t.b = b;
	t.head = head;
	t.head_k = head / a.group;
	t.q = query_rows(a, b);
	t.k = key_rows(a, b);
	t.list = a.features & F_PAGED ? page_list(a, b, &pages) : 0;
	t.diagonal = a.bottom_right ? (index_t)t.k.count - t.q.count : 0;
	t.scale = a.softmax_scale *
	          descale_of(a.q_descale, a.q_descale_stride, b, a.q_descale_per_query_head ? head : t.head_k) *
	          descale_of(a.k_descale, a.k_descale_stride, b, t.head_k);
	t.v_factor = descale_of(a.v_descale, a.v_descale_stride, b, t.head_k);
	t.slope = a.features & F_ALIBI ? a.alibi[b * a.alibi_stride[0] + head * a.alibi_stride[1]] : 0.0f;
	t.seed = a.features & F_DROPOUT ? dropout_seed(a) : 0;
	t.offset = a.features & F_DROPOUT ? dropout_offset(a) : 0;
	return t;
}

/* Keys [first, last) that some query row of [i0, i1) sees by the mask alone. */
DEVICE void visible_keys(const ingot__gpu_args &a, const attention &t, int i0, int i1, int *first, int *last) {
	*first = (int)clamp64(i0 + t.diagonal - a.left, 0, t.k.count);
	*last = i1 > i0 ? (int)clamp64(i1 - 1 + t.diagonal + a.right + 1, 0, t.k.count) : 0;
	if (a.right < -a.left || *last < *first) *last = *first;
}

/* Query rows [first, last) that see some key of [j0, j1). */
DEVICE void seeing_queries(const ingot__gpu_args &a, const attention &t, int j0, int j1, int *first, int *last) {
	*first = (int)clamp64(j0 - t.diagonal - a.right, 0, t.q.count);
	*last = j1 > j0 ? (int)clamp64(j1 - 1 - t.diagonal + a.left + 1, 0, t.q.count) : 0;
	if (a.right < -a.left || *last < *first) *last = *first;
}

DEVICE bool sees(const ingot__gpu_args &a, const attention &t, int i, int j) {
	const index_t d = (index_t)j - i - t.diagonal;
	return i < t.q.count && j < t.k.count && d >= -a.left && d <= a.right;
}

/* The bias of a pair; false: it masks. */
DEVICE bool bias_of(const ingot__gpu_args &a, const attention &t, int i, int j, float *bias) {
	const index_t at = t.b * a.bias_stride[0] + t.head * a.bias_stride[1] + i * a.bias_stride[2] + j * a.bias_stride[3];
	*bias = 0;
	if (a.features & F_BIAS_BOOL) return ((const unsigned char *)a.bias)[at] != 0;
	*bias = load_value(a.bias, at, a.bias_dtype);
	return *bias != -INFINITY;
}

/* From q.k to the score in natural units; -Inf where the pair is masked, whatever q.k is. slope: d score / d (scale * q.k). */
DEVICE float score_of(const ingot__gpu_args &a, const attention &t, float dot, int i, int j, float *slope) {
	float bias = 0;
	*slope = 1;
	if (!sees(a, t, i, j)) return -INFINITY;
	if ((a.features & (F_BIAS | F_BIAS_BOOL)) && !bias_of(a, t, i, j, &bias)) return -INFINITY;
	float s = dot * t.scale;
	if (a.features & F_SOFTCAP) {
		const float x = tanhf(s / a.softcap);
		s = a.softcap * x;
		*slope = 1 - x * x;
	}
	if (a.features & F_ALIBI) {
		const index_t distance = i + t.diagonal - j;
		s -= t.slope * (float)(distance < 0 ? -distance : distance);
	}
	return s + bias;
}

DEVICE bool is_masked(const ingot__gpu_args &a, const attention &t, int i, int j) {
	float bias;
	return !sees(a, t, i, j) || ((a.features & (F_BIAS | F_BIAS_BOOL)) && !bias_of(a, t, i, j, &bias));
}

/* The factor that dropout gives a pair: 0, or 1 / (1 - p). */
DEVICE float kept(const ingot__gpu_args &a, const attention &t, int i, int j) {
	if (!(a.features & F_DROPOUT)) return 1.0f;
	const uint4 w = philox(t.seed, t.offset, dropout_index(a, t.b, t.head, i, j));
	const uint32_t word = (j & 3) == 0 ? w.x : (j & 3) == 1 ? w.y : (j & 3) == 2 ? w.z : w.w;
	return word >= a.dropout_threshold ? a.keep_scale : 0.0f;
}

/* Columns [c0, c0 + CHUNK) of rows [r0, r0 + TILE) into shared memory as floats; rows outside [first, last) and columns past
 * `columns` are zeros, and not read: they may hold anything. keys: through the page list. */
DEVICE void load_chunk(const ingot__gpu_args &a, const attention &t, bool keys, float (*to)[PITCH], const void *base,
                       const int64_t *stride, int dtype, int r0, int first, int last, int c0, int columns) {
	for (int n = thread_id(); n < TILE * CHUNK; n += THREADS) {
		const int r = n / CHUNK, c = n % CHUNK, row = r0 + r;
		float x = 0;
		if (row >= first && row < last && c0 + c < columns) {
			const index_t at =
				keys ? key_offset(a, stride, t.k, t.list, t.head_k, row) : row_offset(stride, t.q, t.head, row);
			x = load_value(base, at + c0 + c, dtype);
		}
		to[r][c] = x;
	}
}

/* A sum with the part that its rounding lost (Neumaier). Scores may be large and differ little: one long chain of fp32 additions
 * would lose more bits of them than the textbook algorithm may. */
struct exact_sum {
	float sum, lost;
};

DEVICE void add_exactly(exact_sum &s, float x) {
	const float next = s.sum + x, back = next - s.sum;
	s.lost += (s.sum - (next - back)) + (x - back);
	s.sum = next;
}

/* An infinite sum stays what it is: what it "lost" is no number. */
DEVICE float total_of(const exact_sum &s) {
	return isinf(s.sum) ? s.sum : s.sum + s.lost;
}

/* dot[x] += sum over columns of A[owner row][.] B[4 x + quarter][.] */
DEVICE void dot_chunk(const float (*A)[PITCH], const float (*B)[PITCH], exact_sum dot[QUARTER]) {
	const int r = thread_id() / 4, quarter = thread_id() & 3;
	for (int c = 0; c < CHUNK; c += 4) {
		const float x0 = A[r][c], x1 = A[r][c + 1], x2 = A[r][c + 2], x3 = A[r][c + 3];
#pragma unroll
		for (int n = 0; n < QUARTER; n++) {
			const float *const y = &B[4 * n + quarter][c];
			add_exactly(dot[n], fmaf(x0, y[0], x1 * y[1]) + fmaf(x2, y[2], x3 * y[3]));
		}
	}
}

/* out[c] += sum over the tile's rows of W[owner row][.] B[.][4 c + quarter], likewise. */
DEVICE void product_chunk(const float (*W)[TILE + 1], const float (*B)[PITCH], float out[CHUNK / 4]) {
	const int r = thread_id() / 4, quarter = thread_id() & 3;
	for (int x0 = 0; x0 < TILE; x0 += 8) {
		float part[CHUNK / 4];
#pragma unroll
		for (int c = 0; c < CHUNK / 4; c++) part[c] = 0;
		for (int x = x0; x < x0 + 8; x++) {
			const float w = W[r][x];
#pragma unroll
			for (int c = 0; c < CHUNK / 4; c++) part[c] = fmaf(w, B[x][4 * c + quarter], part[c]);
		}
#pragma unroll
		for (int c = 0; c < CHUNK / 4; c++) out[c] += part[c];
	}
}

#endif
