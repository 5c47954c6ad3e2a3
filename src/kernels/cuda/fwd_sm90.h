/*
 * Attention forward on Hopper (sm_90a), by warpgroup products and the copy engine: what is the same in the kernels for 16-bit types,
 * for e4m3 and for heads of more than 256. Refusals and tensor maps of the host half; which keys the rows of a tile see; tiles on their
 * way to those who work on them; scores that a mask hides; the end of a row.
 */
#ifndef INGOT_KERNELS_CUDA_FWD_SM90_H
#define INGOT_KERNELS_CUDA_FWD_SM90_H

#include "sm90.h"

enum { Q_MAP, K_MAP, V_MAP, INPUT_MAPS, OUT_MAP = INPUT_MAPS, MAPS };
/* Bits of a kernel's number STEPS: axes along which a tensor moves. Others are broadcast by stride 0, which the copy engine does not
 * know. */
enum { Q_HEADS = 1, Q_BATCH = 2, K_HEADS = 4, K_BATCH = 8, V_HEADS = 16, V_BATCH = 32 };
/* Tiles decoded ahead. */
#define TILE_STAGES 4
/* Rows and keys are counted in 32 bits, with room for sums. */
#define FAR (1 << 30)

#ifdef INGOT_HOST

static inline int64_t tiles_per_head(const ingot__problem *p, int rows) {
	return (p->q_side.max_seqlen + rows - 1) / rows;
}

/* What none of the kernels takes. */
static inline const char *refuse_features(const ingot__problem *p) {
	INGOT__REFUSE_IF(p->features & INGOT__UNALIGNED,
	                 "a base address or stride of q, k, v or out that is no multiple of 16 bytes");
	INGOT__REFUSE_IF(p->features & (INGOT__BIAS | INGOT__BIAS_BOOL), "a bias");
	INGOT__REFUSE_IF(p->features & INGOT__ALIBI, "ALiBi");
	INGOT__REFUSE_IF(p->features & INGOT__DROPOUT || p->dropout_seed_out.dtype != INGOT_NONE ||
	                     p->dropout_offset_out.dtype != INGOT_NONE,
	                 "dropout");
	INGOT__REFUSE_IF(p->q_side.capacity > FAR || p->k_side.capacity > FAR,
	                 "as many rows as the copy engine cannot count");
	return NULL;
}

/* What those for 16-bit types do not take, these included. */
static inline const char *refuse_16bit(const ingot__problem *p) {
	INGOT__REFUSE_IF(p->q.dtype != INGOT_F16 && p->q.dtype != INGOT_BF16,
	                 "it multiplies fp16 and bf16: q must be one of them");
	INGOT__REFUSE_IF(p->k.dtype != p->q.dtype, "k and v must be of q's type");
	INGOT__REFUSE_IF(p->out.dtype != p->q.dtype, "out must be of q's type");
	INGOT__REFUSE_IF(p->head_dim % 8 || p->head_dim_v % 8,
	                 "a head size that is no multiple of 8: rows are copied in 16-byte pieces");
	INGOT__REFUSE_IF(!(p->features & INGOT__SOFTCAP) && (p->softmax_scale < 0 || p->softmax_scale > 0.69),
	                 "a softmax_scale below 0 or above 0.69: maxima are kept of q.k itself");
	return refuse_features(p);
}

static inline int32_t steps_of(const ingot_tensor *q, const ingot_tensor *k, const ingot_tensor *v) {
	return (q->stride[1] ? Q_HEADS : 0) | (q->stride[0] ? Q_BATCH : 0) | (k->stride[1] ? K_HEADS : 0) |
	       (k->stride[0] ? K_BATCH : 0) | (v->stride[1] ? V_HEADS : 0) | (v->stride[0] ? V_BATCH : 0);
}

/* Q in boxes of a warpgroup's 64 rows, K and V in boxes of so many. */
static inline void map_inputs(ingot__plan *out, const ingot_tensor *q, const ingot_tensor *k, const ingot_tensor *v,
                              int k_rows, int v_rows) {
	/* without keys, nothing is fetched: any tensor will do */
	const bool keys = k->shape[0] && k->shape[2];
	out->map[Q_MAP] = map_of(Q_MAP, q, 64);
	out->map[K_MAP] = map_of(K_MAP, keys ? k : q, k_rows);
	out->map[V_MAP] = map_of(V_MAP, keys ? v : q, v_rows);
	out->maps = INPUT_MAPS;
}

#else

/* As the host half lays them out. */
template <int maps> struct arguments_with {
	ingot__gpu_args a;
	tensor_map map[maps];
};
static_assert(sizeof(arguments_with<MAPS>) == MAPS_AT + 128 * MAPS, "nothing between the maps, nor behind them");

/* ---- tiles ------------------------------------------------------------------------------------------------------------ */

/* Rows and keys are numbered within their sequence, map rows within the tensor. */
struct tile {
	int blocks;      /* of keys; 0: no row sees a key; below 0: there are no more tiles */
	int first_block; /* blocks are first_block + blocks - 1 down to first_block */
	int head, batch;
	int q_slot, q_row;         /* batch and row of the map where the tile begins */
	int rows;                  /* rows to write from there, may be more than the tile's */
	int keys;                  /* of the sequence */
	int k_slot, k_row;         /* batch and row of the map where the sequence's keys begin */
	int see_first, see_last;   /* the tile's first row sees keys [see_first, see_last), each later row one further on */
	int live_first, live_last; /* keys that some row of the sequence sees; outside, V may hold anything */
	int pad[2];
};
static_assert(sizeof(tile) == 64, "a tile's place in shared memory");

DEVICE int limit(index_t x) {
	return (int)clamp64(x, -FAR, FAR);
}

template <bool masked> DEVICE void find_sequence(const ingot__gpu_args &a, int batch, span &q, span &k) {
	q = {batch, 0, a.max_seqlen_q}, k = {batch, 0, a.max_seqlen_k};
	if (masked && (a.features & F_VARLEN)) {
		q = query_rows(a, batch);
		k = key_rows(a, batch);
	}
}

/* What the tile's rows see, of which there are tile_rows at most, from row i0 of the sequence on; its blocks of keys. */
template <bool masked, int tile_rows, int block_keys>
DEVICE void see_keys(const ingot__gpu_args &a, const span &q, const span &k, int i0, tile &t) {
	t.keys = k.count;
	t.see_first = -FAR, t.see_last = FAR;
	t.live_first = 0, t.live_last = k.count;
	int first = 0, last = k.count;
	if (masked) {
		const index_t diagonal = a.bottom_right ? (index_t)k.count - q.count : 0;
		t.see_first = limit(i0 + diagonal - a.left);
		t.see_last = limit(i0 + diagonal + a.right + 1);
		t.live_first = (int)clamp64(diagonal - a.left, 0, k.count);
		t.live_last = (int)clamp64(q.count + diagonal + a.right, 0, k.count);
		first = min(max(t.see_first, 0), k.count);
		last = min(max(t.see_last + min(t.rows, tile_rows) - 1, 0), k.count);
		if (a.right < -a.left) last = first;
	}
	t.first_block = first / block_keys;
	t.blocks = last > first ? (last + block_keys - 1) / block_keys - t.first_block : 0;
}

/* The tile from row i0 of a sequence on, of any head. False where there are no such rows. */
template <bool masked, int tile_rows, int block_keys>
DEVICE bool look(const ingot__gpu_args &a, int batch, int i0, tile &t) {
	span q, k;
	find_sequence<masked>(a, batch, q, k);
	t.batch = batch;
	t.rows = q.count - i0;
	if (masked && t.rows <= 0) return false;
	t.q_slot = (int)q.slot;
	t.q_row = (int)q.start + i0;
	t.k_slot = (int)k.slot;
	t.k_row = (int)k.start;
	see_keys<masked, tile_rows, block_keys>(a, q, k, i0, t);
	return true;
}

/* Whether a block's V, `keys` rows from key j0 on, holds rows that may be anything. What lies behind the tensor's last row arrives as
 * zeros. */
template <bool masked, int keys> DEVICE bool needs_clearing(const ingot__gpu_args &a, const tile &t, int j0) {
	return masked && (j0 < t.live_first || (j0 + keys > t.live_last && t.k_row + t.live_last < a.k_capacity));
}

/* Blocks of keys from high_from on and those before low_to hold pairs that some of `rows` rows of a tile, from `row` on, do not see. Both
 * are counted from the tile's first block, and the same in all lanes. */
template <bool masked, int rows, int block_keys>
DEVICE void find_cut_blocks(const tile &t, int row, int first_block, int &high_from, int &low_to) {
	high_from = same((masked ? max(min(t.keys, t.see_last + row), 0) : t.keys) / block_keys) - first_block;
	low_to = masked ? same((max(t.see_first + row + rows - 1, 0) + block_keys - 1) / block_keys) - first_block : 0;
}

/* What a block that stays on its multiprocessor is to do, in rounds in which tiles get shorter: sections of heads, in which every tile's
 * place comes with each head. */
struct schedule {
	int heads, per_head, section, tiles, round;

	/* From the three before them: tiles, and those of a round. */
	__device__ __forceinline__ void divide(int even) {
		tiles = per_head * heads;
		round = even ? tiles : per_head * section;
	}
	/* A tile's place among those of its head, and that head. */
	__device__ __forceinline__ int rank_of(int number, int &head) const {
		const int in_section = section * per_head, n = number / in_section, at = number - n * in_section;
		const int wide = min(section, heads - n * section), rank = at / wide;
		head = n * section + at - rank * wide;
		return rank;
	}
};

/* Tiles on their way from the helper that decodes them to those that work on them: places at `tiles` in shared memory, their barriers for
 * full at `full`, and those for empty behind. */
template <int tiles, int full> struct tile_queue {
	enum { EMPTY = full + 8 * TILE_STAGES };
	/* One thread, before the others. */
	DEVICE void init(uint32_t shared, int readers) {
		for (int i = 0; i < TILE_STAGES; i++) {
			barrier_init(shared + full + 8 * i, 1);
			barrier_init(shared + EMPTY + 8 * i, readers);
		}
	}
	/* Waits for the next tile. It stays in its place until every reader has called done. */
	DEVICE const tile &next(uint32_t shared, const unsigned char *memory, const ring<TILE_STAGES> &place) {
		barrier_wait(shared + full + 8 * place.stage, place.parity);
		return *(const tile *)(memory + tiles + sizeof(tile) * place.stage);
	}
	/* One lane of each reader. */
	DEVICE void done(uint32_t shared, const ring<TILE_STAGES> &place) {
		barrier_arrive(shared + EMPTY + 8 * place.stage);
	}
	/* One lane. Blocks take a round's tiles in turn, there and back, so that what the first has more in one turn it has less in the
	 * next; each round begins with a turn of its own, since a turn over the end of one and the start of the next would give a few
	 * blocks the longest tiles beside the shortest. `decode` is false for a tile without rows. */
	template <auto make, auto decode>
	DEVICE void put_all(const ingot__gpu_args &a, uint32_t shared, unsigned char *memory) {
		const int blocks = gridDim.x, block = blockIdx.x;
		const auto w = make(a);
		ring<TILE_STAGES> place = {0, 1};
		bool back = false;
		for (int base = 0; base < w.tiles; base += w.round)
			for (int turn = 0; turn < w.round; turn += blocks, back = !back) {
				const int at = turn + (back ? blocks - 1 - block : block);
				tile t;
				if (at >= w.round || base + at >= w.tiles || !decode(a, w, base + at, t)) continue;
				barrier_wait(shared + EMPTY + 8 * place.stage, place.parity);
				*(tile *)(memory + tiles + sizeof(tile) * place.stage) = t;
				barrier_arrive(shared + full + 8 * place.stage);
				place.next();
			}
		barrier_wait(shared + EMPTY + 8 * place.stage, place.parity);
		((tile *)(memory + tiles + sizeof(tile) * place.stage))->blocks = -1;
		barrier_arrive(shared + full + 8 * place.stage);
	}
};

/* The queries of a tile, 64 rows for each of its owners. */
template <int columns, int owners>
DEVICE void load_queries(uint32_t to, const tensor_map *map, uint32_t barrier, int row, int head, int batch) {
#pragma unroll
	for (int i = 0; i < owners; i++)
		load_tile<columns, 64>(to + i * TILE_BYTES(64, columns), map, barrier, row + i * 64, head, batch);
}

/* ---- scores of a warpgroup's 64 rows, as products leave them ------------------------------------------------------------ */

/* A thread has two rows, 8 apart. Elements 4 n to 4 n + 3: columns 8 n + 2 (lane % 4) and the next, of the first and of the second
 * row. */

/* -Inf for columns from high on, or before low, which are counted from the thread's first column. */
template <int count> DEVICE void mask_high(float (&s)[count], int high0, int high1) {
#pragma unroll
	for (int i = 0; i < count; i += 4) {
		const int column = i * 2;
		if (column >= high0) s[i] = -INFINITY;
		if (column + 1 >= high0) s[i + 1] = -INFINITY;
		if (column >= high1) s[i + 2] = -INFINITY;
		if (column + 1 >= high1) s[i + 3] = -INFINITY;
	}
}
template <int count> DEVICE void mask_low(float (&s)[count], int low0, int low1) {
#pragma unroll
	for (int i = 0; i < count; i += 4) {
		const int column = i * 2;
		if (column < low0) s[i] = -INFINITY;
		if (column + 1 < low0) s[i + 1] = -INFINITY;
		if (column < low1) s[i + 2] = -INFINITY;
		if (column + 1 < low1) s[i + 3] = -INFINITY;
	}
}

/* Products q.k to tanh(q.k scale / softcap), which is the score in units of the cap. */
template <int count> DEVICE void cap(float (&s)[count], float twice) {
#pragma unroll
	for (int i = 0; i < count; i++) {
		float inverse;
		asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + fast_exp2(s[i] * twice)));
		s[i] = fmaf(-2.0f, inverse, 1.0f);
	}
}

/* The maxima of a thread's part of both rows. */
template <int count> DEVICE void find_maxima(const float (&s)[count], float &top0, float &top1) {
	float a = s[0], b = s[1], c = s[2], d = s[3];
#pragma unroll
	for (int i = 4; i < count; i += 4) {
		a = fmaxf(a, s[i]);
		b = fmaxf(b, s[i + 1]);
		c = fmaxf(c, s[i + 2]);
		d = fmaxf(d, s[i + 3]);
	}
	top0 = fmaxf(a, b), top1 = fmaxf(c, d);
}

/* Byte offset of a 16-byte piece within a tile of `rows` rows, as the copy engine swizzles it. */
template <int rows> DEVICE uint32_t place_of(int row, int piece) {
	return (uint32_t)((piece >> 3) * rows * 128 + row * 128 + (((piece & 7) ^ (row & 7)) << 4));
}

/* A warp's 16 rows of scores once more, by the products of a warp, of 32 bytes of the head each. */
template <class product, int steps, int count>
DEVICE void repeat_scores(float (&s)[count], uint32_t q, uint32_t k, int warp) {
	const int lane = lane_id(), q_row = warp * 16 + (lane & 15), k_row = (lane & 7) + (lane >> 4) * 8;
#pragma unroll
	for (int i = 0; i < count; i++) s[i] = 0;
#pragma unroll 1
	for (int i = 0; i < steps; i++) {
		uint32_t qf[4];
		load_matrix4(qf, q + place_of<64>(q_row, 2 * i + (lane >> 4)));
		const uint32_t from = k + place_of<2 * count>(k_row, 2 * i + (lane >> 3 & 1));
#pragma unroll
		for (int n = 0; n < count / 8; n++) {
			uint32_t kf[4];
			load_matrix4(kf, from + n * 16 * 128);
#pragma unroll
			for (int m = 0; m < 2; m++) product::multiply(&s[8 * n + 4 * m], qf, kf[2 * m], kf[2 * m + 1]);
		}
	}
}

/* ---- the end of a tile -------------------------------------------------------------------------------------------------- */

/* The lane, read again, lest registers hold it and what comes of it. */
DEVICE int lane_read() {
	int lane;
	asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
	return lane;
}

/* From a row's reference, in units of base 2 / unit, and its whole sum: what its output is multiplied by, and its LSE in base 2. */
DEVICE float finish_row(float top, float total, float unit, bool has_sink, float sink, float &lse) {
	const bool none = top == -INFINITY;
	float high = none ? -INFINITY : top * unit, log_sum;
	asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log_sum) : "f"(total));
	lse = none ? -INFINITY : high + log_sum;
	float factor = none ? 0.0f : 1.0f / total;
	if (has_sink) {
		const float peak = fmaxf(high, sink), base = peak == -INFINITY ? 0.0f : peak;
		const float fade = none ? 0.0f : fast_exp2(high - base),
					all = (none ? 0.0f : total * fade) + fast_exp2(sink - base);
		asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log_sum) : "f"(all));
		lse = peak == -INFINITY ? -INFINITY : base + log_sum;
		factor = none ? 0.0f : fade / all;
		if (isnan(sink) || sink == INFINITY) lse = factor = NAN;
	}
	if (isnan(total)) lse = factor = NAN; /* a NaN score, which no maximum shows */
	return factor;
}

/* Both rows of a thread, of a warp whose rows begin at first_row of the tile: sums over their four lanes, LSE, and the output's factors. */
DEVICE void finish_rows(const ingot__gpu_args &a, const tile &t, int first_row, int lane, float top0, float top1,
                        float total0, float total1, float unit, float &factor0, float &factor1) {
	const int row = first_row + (lane >> 2);
	total0 += lane_xor(total0, 1);
	total1 += lane_xor(total1, 1);
	total0 += lane_xor(total0, 2);
	total1 += lane_xor(total1, 2);
	const bool has_sink = a.features & F_SINK;
	const float sink = has_sink ? a.sink[t.head * a.sink_stride] * LOG2E : 0.0f;
	float lse0, lse1;
	factor0 = finish_row(top0, total0, unit, has_sink, sink, lse0);
	factor1 = finish_row(top1, total1, unit, has_sink, sink, lse1);
	if (a.lse && (lane & 3) == 0) {
		float *const to = a.lse + t.batch * a.lse_stride[0] + t.head * a.lse_stride[1];
		const float base = a.lse_base ? 1.0f : LN2;
		if (row < t.rows) to[(t.q_row + (index_t)row) * a.lse_stride[2]] = lse0 * base;
		if (row + 8 < t.rows) to[(t.q_row + (index_t)row + 8) * a.lse_stride[2]] = lse1 * base;
	}
}

/* Rows of zeros for a warp's part of a tile without keys. */
DEVICE void store_nothing(const ingot__gpu_args &a, const tile &t, int first_row) {
	const int pieces = a.head_dim_v / 8;
#pragma unroll 1
	for (int i = lane_id(); i < 16 * pieces; i += 32) {
		const int row = first_row + i / pieces;
		if (row < t.rows)
			*(uint4 *)((uint16_t *)a.out + t.q_slot * a.out_stride[0] + t.head * a.out_stride[1] +
			           (t.q_row + (index_t)row) * a.out_stride[2] + i % pieces * 8) = make_uint4(0, 0, 0, 0);
	}
}

DEVICE void store_matrix4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
	asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
	             "r"(r2), "r"(r3)
	             : "memory");
}

/* A warpgroup's 64 rows of output, from the tile's first_row on: one lane. */
template <int columns>
DEVICE void store_rows(const ingot__gpu_args &a, const tensor_map *map, const tile &t, uint32_t from, int first_row) {
#pragma unroll
	for (int i = 0; i < PANELS(columns); i++)
		if (i * 64 < a.head_dim_v) store_box(map, from + i * 64 * 128, i * 64, t.q_row + first_row, t.head, t.q_slot);
	store_commit();
}

/* Those of them that belong to the sequence: 16 rows of a warp. */
DEVICE void store_part(const ingot__gpu_args &a, const tile &t, const unsigned char *from, int first_row, int warp,
                       int lane) {
	const int pieces = a.head_dim_v / 8;
	__syncwarp();
#pragma unroll 1
	for (int i = lane; i < 16 * pieces; i += 32) {
		const int row = warp * 16 + i / pieces;
		if (first_row + row < t.rows)
			*(uint4 *)((uint16_t *)a.out + t.q_slot * a.out_stride[0] + t.head * a.out_stride[1] +
			           (t.q_row + (index_t)(first_row + row)) * a.out_stride[2] + i % pieces * 8) =
				*(const uint4 *)(from + place_of<64>(row, i % pieces));
	}
}

#endif
#endif
