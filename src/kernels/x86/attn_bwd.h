/*
 * Attention backward for x86, the text that its implementations share; each .c file sets the names and includes it. Every
 * feature of the operator.
 *
 * A task is one key head of one sequence and a range of its keys. For each query head of the group it walks the keys in
 * blocks, whose dK and dV stay in L2, and for each block the query tiles that see it: scores and dP of 12 rows by 32 keys, their
 * probabilities and dS at once while they are in L1, then dQ, dV and dK of the whole tile. dQ is added up in the order of the
 * keys in memory of the task's own, so nothing is shared between threads and results do not depend on how many there are. Only
 * when the shapes give few tasks are the keys of a head split into ranges; then each range has a dQ of its own in the workspace,
 * and a second step adds them in order. dBias and dSink, sums over other axes than the tasks', are steps of their own, paid for
 * only when they are asked for.
 *
 * Rows of Q and dO are packed in a form that serves two products: as rows of the tile in QK^T and dO V^T, and as rows along the
 * contraction in dS^T Q and P^T dO. It is a plain copy, strips of [vectors][MR][VL].
 *
 * Nothing that must not count is computed with: rows beyond a length and rows or keys outside of every window are packed as
 * zeros, and masked pairs are selected away, never multiplied by zero.
 *
 * The including file defines BWD_NAME and, for the host half, the constants of its tile: BWD_LANES, BWD_ROWS, BWD_PACK.
 */
#ifndef INGOT_KERNELS_X86_ATTN_BWD_H
#define INGOT_KERNELS_X86_ATTN_BWD_H

#include "../cpu.h"
#include <stddef.h>

#define BWD_PASTE_(a, b, c) a##b##c
#define BWD_PASTE(a, b, c) BWD_PASTE_(a, b, c)
#define BWD_IMPL BWD_PASTE(ingot__impl_, BWD_NAME, )
#define BWD_TASK(name) BWD_PASTE(ingot__, BWD_NAME, name)
#define BWD_TEXT_(x) #x
#define BWD_TEXT(x) BWD_TEXT_(x)

ingot__task BWD_TASK(_plain), BWD_TASK(_general), BWD_TASK(_dq), BWD_TASK(_dbias), BWD_TASK(_dsink);

enum {
	BWD_TILE = 96,   /* query rows of a tile: a multiple of BWD_ROWS */
	BWD_BLOCK = 192, /* keys of a block: a multiple of the tile's columns and rows, and of 4 for dropout's quads */
	BWD_PITCH = BWD_BLOCK + BWD_LANES /* floats between rows of P and dS: an odd number of lines spreads them over L1 */
};

/* What the plan tells the tasks. Offsets into scratch, in floats. */
enum {
	BWD_RANGES,       /* ranges of keys */
	BWD_RANGE_BLOCKS, /* blocks in each */
	BWD_KEEP,         /* 1: a head's packed tiles are all kept; 0: one at a time, packed again for each block */
	BWD_TILE_SIZE,    /* floats of a packed tile */
	BWD_SLAB,         /* floats of one head's dQ */
	BWD_AT_TILES,
	BWD_AT_DQ, /* unless there are ranges: then the workspace holds them */
	BWD_AT_K,
	BWD_AT_V,
	BWD_AT_K_ROWS,
	BWD_AT_DK,
	BWD_AT_DV,
	BWD_AT_P,
	BWD_AT_DS,
	BWD_AT_DS_ROWS, /* dS as rows of bf16; BWD_AT_DS where it stays fp32 */
	BWD_AT_BIAS,
	BWD_AT_ZEROS,
	BWD_NUMBERS
};
_Static_assert(BWD_NUMBERS <= INGOT__PLAN_NUMBERS, "the plan has room for the numbers");

static inline int64_t bwd_up(int64_t x, int64_t m) {
	return (x + m - 1) / m * m;
}

#ifdef INGOT_HOST

/* ---- host half ------------------------------------------------------------------------------------------------------ */

enum {
	BWD_TASKS_LEAST = 8, /* with fewer tasks the keys are split, down to BWD_RANGE_LEAST */
	BWD_TASKS_GOOD = 32, /* up to here long heads are split, down to BWD_RANGE_GOOD */
	BWD_RANGE_LEAST = 2, /* blocks */
	BWD_RANGE_GOOD = 6,
	BWD_SLABS_MOST = 64 << 20, /* floats */
	BWD_KEEP_MOST = 16 << 20   /* floats of packed tiles kept per thread */
};

static inline const char *bwd_refuse(const ingot__problem *p) {
	INGOT__REFUSE_IF(p->features & INGOT__PAGED, "paged k and v have no gradients");
	INGOT__REFUSE_IF(p->features & (INGOT__8BIT_KV | INGOT__8BIT_Q), "8-bit q, k or v have no gradients");
	return NULL;
}

static inline int bwd_variant(const ingot__problem *p) {
	return (p->features & (INGOT__BIAS | INGOT__BIAS_BOOL | INGOT__ALIBI | INGOT__SOFTCAP | INGOT__DROPOUT)) != 0;
}

static inline int64_t bwd_take(int64_t *end, int64_t floats) {
	const int64_t at = *end;
	*end += bwd_up(floats, 64);
	return at;
}

/* Scratch and split. task: plain, general, dq, dbias, dsink. */
static inline void bwd_plan(const ingot__problem *p, ingot__plan *plan, ingot__task *const task[5]) {
	const int64_t panel = 2 * BWD_LANES, d = p->head_dim, dv = p->head_dim_v;
	const int64_t steps_d = (d + BWD_PACK - 1) / BWD_PACK, steps_v = (dv + BWD_PACK - 1) / BWD_PACK;
	const int64_t wide_d = bwd_up(d, panel), wide_v = bwd_up(dv, panel);
	const int64_t mq = p->q_side.max_seqlen, mk = p->k_side.max_seqlen;
	const int64_t tiles = (mq + BWD_TILE - 1) / BWD_TILE, blocks = (mk + BWD_BLOCK - 1) / BWD_BLOCK;
	const bool want_dq = p->dq.dtype != INGOT_NONE, want_dk = p->dk.dtype != INGOT_NONE,
			   want_dv = p->dv.dtype != INGOT_NONE;
	int64_t *n = plan->number;

	n[BWD_TILE_SIZE] = BWD_TILE * (bwd_up(steps_d, BWD_LANES) + bwd_up(steps_v, BWD_LANES)) + 2 * BWD_TILE;
	if (BWD_PACK == 2) n[BWD_TILE_SIZE] += BWD_TILE / 2 * (wide_d + wide_v);
	n[BWD_SLAB] = tiles * BWD_TILE * wide_d;

	/* Ranges by shapes alone: as many as give enough tasks, long enough that packing the queries again costs little. */
	const int64_t heads = (p->batch_invariant ? 1 : p->batch) * p->heads_k;
	int64_t ranges = 1;
	if (heads > 0 && blocks > 0) {
		const int64_t least = (BWD_TASKS_LEAST + heads - 1) / heads, good = (BWD_TASKS_GOOD + heads - 1) / heads;
		const int64_t may_least = blocks / BWD_RANGE_LEAST, may_good = blocks / BWD_RANGE_GOOD;
		ranges = least < may_least ? least : may_least;
		const int64_t more = good < may_good ? good : may_good;
		if (more > ranges) ranges = more;
		if (want_dq && n[BWD_SLAB] > 0) {
			const int64_t fit = BWD_SLABS_MOST / (n[BWD_SLAB] * p->heads_q * (p->batch_invariant ? 1 : p->batch));
			if (ranges > fit) ranges = fit;
		}
		if (ranges < 1) ranges = 1;
	}
	n[BWD_RANGE_BLOCKS] = blocks ? (blocks + ranges - 1) / ranges : 1;
	n[BWD_RANGES] = blocks ? (blocks + n[BWD_RANGE_BLOCKS] - 1) / n[BWD_RANGE_BLOCKS] : 1;
	n[BWD_KEEP] = tiles * n[BWD_TILE_SIZE] <= BWD_KEEP_MOST;
	const bool slabs = want_dq && n[BWD_RANGES] > 1;

	int64_t end = 0;
	const int64_t sums = p->group > 1 ? n[BWD_RANGE_BLOCKS] : 1, longest = d > dv ? d : dv;
	n[BWD_AT_TILES] = bwd_take(&end, (n[BWD_KEEP] && tiles ? tiles : 1) * n[BWD_TILE_SIZE]);
	n[BWD_AT_DQ] = bwd_take(&end, want_dq && !slabs ? n[BWD_SLAB] : 0);
	n[BWD_AT_K] = bwd_take(&end, BWD_BLOCK * steps_d);
	n[BWD_AT_V] = bwd_take(&end, BWD_BLOCK * steps_v);
	n[BWD_AT_K_ROWS] = bwd_take(&end, BWD_BLOCK / BWD_PACK * wide_d);
	n[BWD_AT_DK] = bwd_take(&end, want_dk ? sums * BWD_BLOCK * wide_d : 0);
	n[BWD_AT_DV] = bwd_take(&end, want_dv ? sums * BWD_BLOCK * wide_v : 0);
	n[BWD_AT_P] = bwd_take(&end, BWD_TILE / BWD_PACK * BWD_PITCH);
	n[BWD_AT_DS] = bwd_take(&end, BWD_TILE / BWD_PACK * BWD_PITCH);
	n[BWD_AT_DS_ROWS] = BWD_PACK == 1 ? n[BWD_AT_DS] : bwd_take(&end, BWD_TILE * BWD_PITCH / BWD_PACK);
	n[BWD_AT_BIAS] = bwd_take(&end, p->dbias.dtype != INGOT_NONE ? BWD_TILE * BWD_PITCH : 0);
	n[BWD_AT_ZEROS] = bwd_take(&end, longest + 4 * BWD_LANES);
	plan->scratch_bytes = 4 * (uint64_t)end;
	if (slabs) plan->workspace_bytes = 4 * (uint64_t)(p->batch * p->heads_q * n[BWD_RANGES] * n[BWD_SLAB]);

	/* five products of 2 D flops a pair, at about 64 flops a nanosecond; three for the gradient of the bias */
	const double product = 2.0 * p->pairs * (double)(d + dv) / 2 / 64;
	ingot__step *step = plan->step;
	if (want_dq || want_dk || want_dv)
		*step++ = (ingot__step){.name = "gradients",
		                        .task = task[plan->variant],
		                        .tasks = p->batch * p->heads_k * n[BWD_RANGES],
		                        .work = 5 * product};
	if (slabs)
		*step++ = (ingot__step){.name = "dq",
		                        .task = task[2],
		                        .tasks = p->batch * p->heads_q * tiles,
		                        .work = (double)plan->workspace_bytes / 8};
	if (p->dbias.dtype != INGOT_NONE) {
		const int64_t *const shape = p->dbias.shape;
		*step++ = (ingot__step){.name = "dbias",
		                        .task = task[3],
		                        .tasks = shape[0] * shape[1] * ((shape[2] + BWD_TILE - 1) / BWD_TILE) *
		                                 ((shape[3] + BWD_BLOCK - 1) / BWD_BLOCK),
		                        .work = 3 * product};
	}
	if (p->dsink.dtype != INGOT_NONE)
		*step++ = (ingot__step){.name = "dsink",
		                        .task = task[4],
		                        .tasks = p->heads_q,
		                        .work = (double)(p->batch * p->heads_q * mq * dv) / 4};
	plan->steps = (int)(step - plan->step);
}

#else

/* ---- device half ---------------------------------------------------------------------------------------------------- */

#include "pack.h"
#include "softmax.h"

_Static_assert(BWD_TILE % MR == 0 && BWD_BLOCK % NR == 0 && BWD_BLOCK % MR == 0 && BWD_BLOCK % (4 * VL) == 0,
               "tiles fit");

enum { BWD_STRIPS = BWD_TILE / MR, BWD_PITCH_ROWS = BWD_PITCH / PACK };

/* One query head of one sequence, and where its task is: a block of keys, a tile of queries. */
typedef struct bwd_scope {
	const ingot__problem *p;
	const int64_t *n; /* the plan's numbers */
	float *base;      /* scratch */
	int64_t b, head_k, head;
	ingot__span q, k;
	int64_t off;
	int64_t first_row, last_row; /* rows that see some key */
	int64_t first_key, last_key; /* keys that some row sees */
	int64_t steps_d, steps_v, vectors_d, vectors_v, wide_d, wide_v;
	bool want_dq, want_dk, want_dv, want_ds;
	float scale;
	/* Exponents of two are (score * to_lse - lse) * to_two: what cancels is subtracted before it is rounded in other units. */
	float to_lse, product_to_lse, to_two;
	float slope; /* ALiBi's */
	uint64_t seed, offset;
	float kept; /* 1 / (1 - dropout_p) */
	const void *zeros;
	/* the block */
	int64_t key, keys;
	/* the tile, packed */
	int64_t row;
	int rows, strips;
	float *q_rows, *dout_rows;       /* rows of the tile */
	float *q_columns, *dout_columns; /* rows along the contraction: the same memory without pairs */
	float *lse, *delta;              /* lse as given, +inf for rows that take no part */
	/* what the rows see of the block, relative to its first key */
	int32_t first[BWD_TILE], last[BWD_TILE];
	int32_t from[BWD_STRIPS], to[BWD_STRIPS];         /* some row of the strip */
	int32_t all_from[BWD_STRIPS], all_to[BWD_STRIPS]; /* every row */
	uint16_t keep[BWD_TILE][BWD_BLOCK / VL];          /* dropout */
} bwd_scope;

/* VL floats of a row, zeros beyond n. */
X86_INLINE vf bwd_load(const void *row, int64_t i, int64_t n, int32_t dtype) {
	switch (dtype) {
	case INGOT_F32: return v_load_f32((const float *)row + i, n - i);
	case INGOT_F16: return v_load_f16((const uint16_t *)row + i, n - i);
	default: return v_load_bf16((const uint16_t *)row + i, n - i);
	}
}

/* Sum of dO O. Where O is 0, as in a row without a valid pair, dO does not matter, whatever it is. */
X86_INLINE float bwd_delta(const ingot__problem *p, const void *dout, const void *out) {
	vf sum = v_zero();
	for (int64_t d = 0; d < p->head_dim_v; d += VL) {
		const vf o = bwd_load(out, d, p->head_dim_v, p->out.dtype), g = bwd_load(dout, d, p->head_dim_v, p->dout.dtype);
		sum = v_fma(v_select(v_equal(o, v_zero()), v_zero(), g), o, sum);
	}
	return v_sum(sum);
}

static inline const void *bwd_row(const ingot_tensor *t, ingot__span rows, int64_t head, int64_t i) {
	return (const char *)t->data + ingot__row_offset(t, rows, head, i) * ingot__dtype_size(t->dtype);
}

/* ---- where things are -------------------------------------------------------------------------------------------------- */

static inline void bwd_begin(bwd_scope *c, const ingot__problem *p, const ingot__plan *plan, void *scratch) {
	c->p = p;
	c->n = plan->number;
	c->base = scratch;
	c->steps_d = (p->head_dim + PACK - 1) / PACK;
	c->steps_v = (p->head_dim_v + PACK - 1) / PACK;
	c->vectors_d = (c->steps_d + VL - 1) / VL;
	c->vectors_v = (c->steps_v + VL - 1) / VL;
	c->wide_d = X86_UP(p->head_dim, NR);
	c->wide_v = X86_UP(p->head_dim_v, NR);
	c->want_dq = p->dq.dtype != INGOT_NONE;
	c->want_dk = p->dk.dtype != INGOT_NONE;
	c->want_dv = p->dv.dtype != INGOT_NONE;
	c->want_ds = c->want_dq || c->want_dk;
	c->scale = (float)p->softmax_scale;
	c->to_lse = p->lse_base == INGOT_LSE_BASE2 ? (float)X86_LOG2E : 1;
	c->product_to_lse = (float)(p->softmax_scale * (p->lse_base == INGOT_LSE_BASE2 ? X86_LOG2E : 1));
	c->to_two = p->lse_base == INGOT_LSE_BASE2 ? 1 : (float)X86_LOG2E;
	c->kept = 1;
	if (p->features & INGOT__DROPOUT) {
		c->seed = ingot__dropout_seed(p);
		c->offset = ingot__dropout_offset(p);
		c->kept = (float)(1 / (1 - (double)p->dropout_p));
	}
	float *const zeros = c->base + c->n[BWD_AT_ZEROS];
	const int64_t longest = p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v;
	memset(zeros, 0, sizeof *zeros * (size_t)longest);
	c->zeros = zeros;
}

static inline void bwd_sequence(bwd_scope *c, int64_t b) {
	const ingot__problem *p = c->p;
	c->b = b;
	c->q = ingot__locate(&p->q_side, b);
	c->k = ingot__locate(&p->k_side, b);
	c->off = ingot__diagonal(p, c->q.count, c->k.count);
	c->first_row = c->last_row = c->first_key = c->last_key = 0;
	if (c->q.count == 0 || c->k.count == 0 || p->left + p->right < 0) return;
	c->first_row = ingot__clamp(-c->off - p->right, 0, c->q.count);
	c->last_row = ingot__clamp(c->k.count - c->off + p->left, 0, c->q.count);
	c->first_key = ingot__clamp(c->off - p->left, 0, c->k.count);
	c->last_key = ingot__clamp(c->q.count + c->off + p->right, 0, c->k.count);
}

static inline void bwd_head(bwd_scope *c, int64_t head) {
	c->head = head;
	c->head_k = head / c->p->group;
	c->slope = c->p->features & INGOT__ALIBI ? ingot__alibi_slope(c->p, c->b, head) : 0;
}

/* Rows [*first, *last) that see some key of the block. */
static inline void bwd_seers(const bwd_scope *c, int64_t *first, int64_t *last) {
	*first = ingot__clamp(c->key - c->off - c->p->right, c->first_row, c->last_row);
	*last = ingot__clamp(c->key + c->keys - c->off + c->p->left, *first, c->last_row);
}

/* What the tile's rows see of the block. */
static inline void bwd_see(bwd_scope *c) {
	for (int s = 0; s < c->strips; s++) {
		int32_t from = BWD_BLOCK, to = 0, all_from = 0, all_to = BWD_BLOCK;
		for (int r = s * MR; r < s * MR + MR; r++) {
			int64_t first = 0, last = 0;
			if (r < c->rows) {
				ingot__visible(c->p, c->row + r, c->off, c->k.count, &first, &last);
				first = ingot__clamp(first - c->key, 0, c->keys);
				last = ingot__clamp(last - c->key, 0, c->keys);
				if (first >= last) first = last = 0;
			}
			c->first[r] = (int32_t)first;
			c->last[r] = (int32_t)last;
			if (first < last) {
				if (first < from) from = (int32_t)first;
				if (last > to) to = (int32_t)last;
			}
			if (first > all_from) all_from = (int32_t)first;
			if (last < all_to) all_to = (int32_t)last;
		}
		c->from[s] = to ? from : 0;
		c->to[s] = to;
		c->all_from[s] = all_from;
		c->all_to[s] = all_to;
	}
}

/* ---- packing ------------------------------------------------------------------------------------------------------------ */

/* Rows as strips of [vectors][MR][VL], whole strips. */
static inline void bwd_pack_strips(float *dst, const void *const *row, int64_t count, int64_t vectors, int64_t n,
                                   int32_t given) {
	X86_BY_DTYPE(given, {
		for (int64_t r = 0; r < count; r++) {
			float *d = dst + (r / MR * vectors * MR + r % MR) * VL;
			for (int64_t v = 0; v < vectors; v++, d += MR * VL) v_store(d, row_load(row[r], v * VL * PACK, n, dtype));
		}
	})
}

/* Places the tile that begins at row i in its packed memory. */
static inline void bwd_tile(bwd_scope *c, float *at, int64_t i) {
	c->row = i;
	c->rows = (int)(c->q.count - i < BWD_TILE ? c->q.count - i : BWD_TILE);
	c->strips = (c->rows + MR - 1) / MR;
	c->lse = at;
	c->delta = c->lse + BWD_TILE;
	c->q_rows = c->q_columns = c->delta + BWD_TILE;
	c->dout_rows = c->dout_columns = c->q_rows + BWD_TILE * c->vectors_d * VL;
#if X86_PAIRS
	c->q_columns = c->dout_rows + BWD_TILE * c->vectors_v * VL;
	c->dout_columns = c->q_columns + BWD_TILE / 2 * c->wide_d;
#endif
}

/* Packs the tile's Q and dO and computes what its rows need besides. */
static inline void bwd_pack_tile(bwd_scope *c) {
	const ingot__problem *p = c->p;
	const void *q[BWD_TILE], *dout[BWD_TILE];
	const int count = c->strips * MR;
	for (int r = 0; r < count; r++) {
		const int64_t i = c->row + r;
		q[r] = dout[r] = c->zeros;
		c->lse[r] = INFINITY;
		c->delta[r] = 0;
		if (r >= c->rows || i < c->first_row || i >= c->last_row) continue;
		const float lse = ((const float *)p->lse.data)[ingot__lse_offset(p, c->q, c->b, c->head, i)];
		if (lse == -INFINITY) continue;
		c->lse[r] = lse;
		q[r] = bwd_row(&p->q, c->q, c->head, i);
		dout[r] = bwd_row(&p->dout, c->q, c->head, i);
		if (!c->want_ds && p->dbias.dtype == INGOT_NONE) continue;
		c->delta[r] = bwd_delta(p, dout[r], bwd_row(&p->out, c->q, c->head, i));
	}
	bwd_pack_strips(c->q_rows, q, count, c->vectors_d, p->head_dim, p->q.dtype);
	bwd_pack_strips(c->dout_rows, dout, count, c->vectors_v, p->head_dim_v, p->dout.dtype);
#if X86_PAIRS
	pack_inner(c->q_columns, BWD_TILE / 2 * NR, q, count, p->head_dim, p->q.dtype);
	pack_inner(c->dout_columns, BWD_TILE / 2 * NR, dout, count, p->head_dim_v, p->dout.dtype);
#endif
}

/* Packs the block's K and V; keys that no row sees count as zeros. */
static inline void bwd_pack_block(const bwd_scope *c, bool k_rows, bool v_columns) {
	const ingot__problem *p = c->p;
	const void *k[BWD_BLOCK + VL], *v[BWD_BLOCK + VL];
	const int64_t count = X86_UP(c->keys, VL);
	for (int64_t j = 0; j < count; j++) {
		const int64_t key = c->key + j;
		const bool seen = j < c->keys && key >= c->first_key && key < c->last_key;
		k[j] = seen ? bwd_row(&p->k, c->k, c->head_k, key) : c->zeros;
		v[j] = seen ? bwd_row(&p->v, c->k, c->head_k, key) : c->zeros;
	}
	pack_columns(c->base + c->n[BWD_AT_K], k, count, p->head_dim, p->k.dtype);
	if (v_columns) pack_columns(c->base + c->n[BWD_AT_V], v, count, p->head_dim_v, p->v.dtype);
	if (k_rows) pack_inner(c->base + c->n[BWD_AT_K_ROWS], BWD_BLOCK / PACK * NR, k, count, p->head_dim, p->k.dtype);
}

/* ---- the products -------------------------------------------------------------------------------------------------------- */

/* Runs statement with `rows` and `vectors` constants: whole or half strips, whole or half panels. */
#define BWD_BY_SHAPE(row_count, columns, statement) \
	if ((row_count) > MR / 2 && (columns) > VL) {   \
		enum { rows = MR, vectors = 2 };            \
		statement;                                  \
	} else if ((row_count) > MR / 2) {              \
		enum { rows = MR, vectors = 1 };            \
		statement;                                  \
	} else if ((columns) > VL) {                    \
		enum { rows = MR / 2, vectors = 2 };        \
		statement;                                  \
	} else {                                        \
		enum { rows = MR / 2, vectors = 1 };        \
		statement;                                  \
	}

/* c[MR][NR] = a strip of packed rows times a panel of packed keys. */
static __attribute__((noinline)) void bwd_multiply_rows(float *c, const float *a, const float *b, int64_t steps,
                                                        int64_t count, int64_t columns) {
	/* fp32 in two levels of 64 steps, as the forward sums its scores: they then share every rounding with the LSE. */
	const int64_t level = BWD_PACK == 1 ? 64 : steps, once = steps < level ? steps : level;
	BWD_BY_SHAPE(count, columns,
	             tile_in_pieces(a, VL, 1, b, NR, c, NR, once, rows, vectors, TILE_ZERO, NULL,
	                            (tile_pieces){.steps = VL, .a = MR * VL, .b = VL * NR, .second = VL}))
	for (int64_t from = once; from < steps; from += level) {
		const int64_t some = steps - from < level ? steps - from : level;
		const float *const x = a + from * MR, *const y = b + from * NR;
		BWD_BY_SHAPE(count, columns,
		             tile_in_pieces(x, VL, 1, y, NR, c, NR, some, rows, vectors, TILE_SUM, NULL,
		                            (tile_pieces){.steps = VL, .a = MR * VL, .b = VL * NR, .second = VL}))
	}
}

/* dQ of a strip += dS K, a panel of columns; likewise the block's sum first. */
static __attribute__((noinline)) void bwd_multiply_keys(float *c, const float *a, const float *b, int64_t steps,
                                                        int64_t count, int64_t columns) {
	BWD_BY_SHAPE(count, columns,
	             tile(a, BWD_PITCH_ROWS, 1, b, vectors * VL, c, NR, steps, rows, vectors, TILE_SUM, NULL))
}

/* dK or dV of MR keys += the transpose of dS or P, times rows of Q or dO; a panel of columns. The sum of a tile comes first: of many
 * rows alike, each rounding would else go the same way. */
static __attribute__((noinline)) void bwd_multiply_queries(float *c, const float *a, const float *b, int64_t piece,
                                                           int64_t steps, int64_t count, int64_t columns) {
#if X86_PAIRS
	(void)piece;
	BWD_BY_SHAPE(count, columns, tile(a, 1, BWD_PITCH, b, vectors * VL, c, NR, steps, rows, vectors, TILE_SUM, NULL))
#else
	BWD_BY_SHAPE(count, columns,
	             tile_in_pieces(a, 1, BWD_PITCH, b, VL, c, NR, steps, rows, vectors, TILE_SUM, NULL,
	                            (tile_pieces){.steps = MR, .a = MR * BWD_PITCH, .b = piece, .second = MR * VL}))
#endif
}

/* ---- from products to P and dS ------------------------------------------------------------------------------------------- */

typedef enum bwd_purpose {
	BWD_FOR_PRODUCTS, /* P and dS as the products read them, dS by the raw score */
	BWD_FOR_BIAS      /* dS by the score is added up */
} bwd_purpose;

/* Dropout's bits of the tile and block. */
static inline void bwd_draw(bwd_scope *c) {
	for (int r = 0; r < c->rows; r++) {
		const uint64_t index = ingot__dropout_index(c->p, c->b, c->head, c->row + r, c->key);
		for (int j = c->first[r] / (4 * VL) * (4 * VL); j < c->last[r]; j += 4 * VL) {
			vi word[4];
			philox_words(c->seed, c->offset, index + (uint64_t)j / 4, word);
			for (int t = 0; t < 4; t++)
				c->keep[r][j / VL + t] = (uint16_t)v_bits(philox_keep(word[t], c->p->dropout_threshold));
		}
	}
}

/* What a row adds to its scores. */
typedef struct bwd_row_terms {
	vf lse, delta, to_two, to_lse;
	score_terms terms;
} bwd_row_terms;

X86_INLINE bwd_row_terms bwd_terms(const bwd_scope *c, int r, bool general) {
	const ingot__problem *p = c->p;
	bwd_row_terms t = {.lse = v_set(c->lse[r]), .delta = v_set(c->delta[r]), .to_two = v_set(c->to_two)};
	t.to_lse = v_set(general ? c->to_lse : c->product_to_lse);
	if (general) {
		t.terms =
			(score_terms){.scale = c->scale, .softcap = p->softcap, .slope = c->slope, .position = c->row + r + c->off};
		if (p->features & (INGOT__BIAS | INGOT__BIAS_BOOL) && r < c->rows) {
			const int64_t at =
				c->b * p->bias.stride[0] + c->head * p->bias.stride[1] + (c->row + r) * p->bias.stride[2];
			t.terms.bias = (const char *)p->bias.data + at * ingot__dtype_size(p->bias.dtype);
			t.terms.bias_stride = p->bias.stride[3];
			t.terms.bias_dtype = p->bias.dtype;
		}
	}
	return t;
}

/* VL products x and dp of row r, from key j of the block on: *prob multiplies dO, *grad is dS by the score, or by the raw product
 * when that is asked for. ends: some of them may be masked. */
X86_INLINE void bwd_entries(const bwd_scope *c, const bwd_row_terms *t, int r, int64_t j, vf x, vf dp, bool general,
                            bool ends, bool raw, vf *prob, vf *grad) {
	/* only the gradient of the bias is stored as it is; what else is made of P has been rounded to PACK's type */
	const int degree = raw ? EXP2_DEGREE : 5;
	if (!general) {
		/* fp32: the score is rounded before LSE is subtracted, as the forward rounded it, so that a row of one key gets 1 */
		const vf y = BWD_PACK == 1 ? v_sub(v_mul(x, t->to_lse), t->lse) : v_fms(x, t->to_lse, t->lse);
		*prob = v_exp2(v_mul(y, t->to_two), degree);
		*grad = v_mul(*prob, v_sub(dp, t->delta));
	} else {
		const score_terms *s = &t->terms;
		const int64_t key = c->key + j, n = c->k.count - key;
		vf slope = v_set(1), live = v_set(1);
		x = v_mul(x, v_set(s->scale));
		if (s->softcap > 0) {
			const vf bent = v_tanh(v_div(x, v_set(s->softcap)));
			slope = v_sub(slope, v_mul(bent, bent));
			x = v_mul(v_set(s->softcap), bent);
		}
		if (s->slope != 0) x = v_fma(v_set(-s->slope), v_abs(v_add(v_set((float)(key - s->position)), v_lanes())), x);
		if (s->bias && n > 0) {
			if (s->bias_dtype == INGOT_BOOL) {
				const uint8_t *b = s->bias;
				live = s->bias_stride ? v_select(v_load_bool(b + key, n), live, v_zero()) : v_set(*b ? 1 : 0);
			} else {
				const vf bias = bias_load(s, key, n);
				live = v_select(v_equal(bias, v_set(-INFINITY)), v_zero(), live);
				x = v_add(x, bias);
			}
		}
		vf p = v_exp2(v_mul(v_fms(x, t->to_lse, t->lse), t->to_two), degree), weight = p;
		if (c->p->features & INGOT__DROPOUT) {
			const vmask keep = v_from_bits(c->keep[r][j / VL]);
			weight = v_select(keep, p, v_zero()); /* dV is scaled as it is stored, so that P is what is rounded */
			dp = v_select(keep, v_mul(dp, v_set(c->kept)), v_zero());
		}
		vf ds = v_mul(p, v_sub(dp, t->delta));
		if (raw) ds = v_mul(ds, slope);
		const vmask dead = v_equal(live, v_zero());
		*prob = v_select(dead, v_zero(), weight);
		*grad = v_select(dead, v_zero(), ds);
	}
	if (ends) {
		const vmask last = v_first(c->last[r] - j), first = v_first(c->first[r] - j);
		*prob = v_select(first, v_zero(), v_select(last, *prob, v_zero()));
		*grad = v_select(first, v_zero(), v_select(last, *grad, v_zero()));
	}
}

/* One tile of products, strip s and keys [j, j + NR) of the block, of which vectors * VL columns were computed. */
X86_INLINE void bwd_convert_as(const bwd_scope *c, const float *x, const float *dp, int s, int64_t j, int rows,
                               int vectors, bool general, bool ends, bwd_purpose purpose) {
	float *const bias = c->base + c->n[BWD_AT_BIAS], *const prob = c->base + c->n[BWD_AT_P],
				 *const grad = c->base + c->n[BWD_AT_DS];
	if (purpose == BWD_FOR_BIAS || !X86_PAIRS) {
		for (int r = 0; r < rows; r++) {
			const bwd_row_terms t = bwd_terms(c, s * MR + r, general);
			const int64_t at = (s * MR + r) * BWD_PITCH + j;
			for (int v = 0; v < 2; v++) {
				vf p = v_zero(), g = v_zero();
				if (v < vectors)
					bwd_entries(c, &t, s * MR + r, j + v * VL, v_load(x + r * NR + v * VL),
					            v_load(dp + r * NR + v * VL), general, ends, purpose == BWD_FOR_PRODUCTS, &p, &g);
				if (purpose == BWD_FOR_BIAS) {
					v_store(bias + at + v * VL, v_add(v_load(bias + at + v * VL), g));
				} else {
					v_store(prob + at + v * VL, p);
					v_store(grad + at + v * VL, g);
				}
			}
		}
		return;
	}
#if X86_PAIRS
	uint16_t index[32];
	for (int i = 0; i < 32; i++) index[i] = (uint16_t)(i / 2 + i % 2 * 16);
	const __m512i pairs = _mm512_loadu_si512(index);
	uint16_t *const grad_rows = (uint16_t *)(c->base + c->n[BWD_AT_DS_ROWS]);
	for (int r = 0; r < rows; r += 2) {
		vf p[2][2], g[2][2];
		for (int i = 0; i < 2; i++) {
			const bwd_row_terms t = bwd_terms(c, s * MR + r + i, general);
			for (int v = 0; v < 2; v++) {
				p[i][v] = g[i][v] = v_zero();
				if (v < vectors)
					bwd_entries(c, &t, s * MR + r + i, j + v * VL, v_load(x + (r + i) * NR + v * VL),
					            v_load(dp + (r + i) * NR + v * VL), general, ends, true, &p[i][v], &g[i][v]);
			}
		}
		const int64_t at = (s * MR + r) / 2 * BWD_PITCH + j;
		for (int v = 0; v < 2; v++) {
			const __m512i two = (__m512i)_mm512_cvtne2ps_pbh(p[1][v], p[0][v]);
			_mm512_storeu_si512(prob + at + v * VL, _mm512_permutexvar_epi16(pairs, two));
		}
		/* rows of dS as bf16, and from them the pairs of rows */
		const __m512i row0 = (__m512i)_mm512_cvtne2ps_pbh(g[0][1], g[0][0]),
					  row1 = (__m512i)_mm512_cvtne2ps_pbh(g[1][1], g[1][0]);
		_mm512_storeu_si512(grad_rows + (s * MR + r) * BWD_PITCH + j, row0);
		_mm512_storeu_si512(grad_rows + (s * MR + r + 1) * BWD_PITCH + j, row1);
		const __m512i low = _mm512_inserti64x4(row0, _mm512_castsi512_si256(row1), 1),
					  high = _mm512_shuffle_i64x2(row0, row1, 0xee);
		_mm512_storeu_si512(grad + at, _mm512_permutexvar_epi16(pairs, low));
		_mm512_storeu_si512(grad + at + VL, _mm512_permutexvar_epi16(pairs, high));
	}
#else
	(void)prob, (void)grad;
#endif
}

X86_INLINE void bwd_convert(const bwd_scope *c, const float *x, const float *dp, int s, int64_t j, int rows,
                            int columns, bool general, bwd_purpose purpose) {
	const bool ends = c->all_from[s] > j || c->all_to[s] < j + (columns > VL ? NR : VL);
	if (ends && columns > VL) bwd_convert_as(c, x, dp, s, j, rows, 2, general, true, purpose);
	else if (ends) bwd_convert_as(c, x, dp, s, j, rows, 1, general, true, purpose);
	else if (columns > VL) bwd_convert_as(c, x, dp, s, j, rows, 2, general, false, purpose);
	else bwd_convert_as(c, x, dp, s, j, rows, 1, general, false, purpose);
}

/* Zeros where strip s sees nothing of keys [j, j + NR). */
static inline void bwd_clear(const bwd_scope *c, int s, int64_t j, int rows) {
	float *const prob = c->base + c->n[BWD_AT_P] + s * (MR / PACK) * BWD_PITCH + j;
	float *const grad = c->base + c->n[BWD_AT_DS] + s * (MR / PACK) * BWD_PITCH + j;
	for (int r = 0; r < rows / PACK; r++) {
		for (int v = 0; v < NR; v += VL) {
			v_store(prob + r * BWD_PITCH + v, v_zero());
			v_store(grad + r * BWD_PITCH + v, v_zero());
		}
	}
	if (X86_PAIRS) {
		float *const grad_rows = c->base + c->n[BWD_AT_DS_ROWS] + s * MR * BWD_PITCH_ROWS + j / PACK;
		for (int r = 0; r < rows; r++) v_store(grad_rows + r * BWD_PITCH_ROWS, v_zero());
	}
}

/* P and dS of the tile against the block. */
X86_INLINE void bwd_score(bwd_scope *c, bool general, bool want_ds, bwd_purpose purpose) {
	const float *const k = c->base + c->n[BWD_AT_K], *const v = c->base + c->n[BWD_AT_V];
	float x[MR * NR] X86_ALIGNED, dp[MR * NR] X86_ALIGNED;
	bwd_see(c);
	if (general && c->p->features & INGOT__DROPOUT) bwd_draw(c);
	if (!want_ds) memset(dp, 0, sizeof dp);
	for (int64_t j = 0; j < c->keys; j += NR) {
		for (int s = 0; s < c->strips; s++) {
			const int rows = c->rows - s * MR > MR / 2 ? MR : MR / 2;
			if (c->to[s] <= j || c->from[s] >= j + NR) {
				if (purpose == BWD_FOR_PRODUCTS && c->to[s]) bwd_clear(c, s, j, rows);
				continue;
			}
			const int columns = c->to[s] - j > VL ? NR : VL;
			bwd_multiply_rows(x, c->q_rows + s * c->vectors_d * MR * VL, k + j * c->steps_d, c->steps_d, rows, columns);
			if (want_ds)
				bwd_multiply_rows(dp, c->dout_rows + s * c->vectors_v * MR * VL, v + j * c->steps_v, c->steps_v, rows,
				                  columns);
			bwd_convert(c, x, dp, s, j, rows, columns, general, purpose);
		}
	}
}

/* ---- gradients of a tile and block ---------------------------------------------------------------------------------------- */

static inline void bwd_add_dq(const bwd_scope *c, float *dq) {
	const float *const ds = c->base + c->n[BWD_AT_DS_ROWS], *const k = c->base + c->n[BWD_AT_K_ROWS];
	const int64_t width = X86_UP(c->p->head_dim, VL);
	for (int64_t d = 0; d < width; d += NR) {
		const int64_t w = width - d > VL ? NR : VL;
		for (int s = 0; s < c->strips; s++) {
			if (!c->to[s]) continue;
			const int64_t from = c->from[s] / 4 * 4 / PACK, to = (c->to[s] + PACK - 1) / PACK;
			bwd_multiply_keys(dq + s * MR * c->wide_d + d * MR, ds + s * MR * BWD_PITCH_ROWS + from,
			                  k + d * (BWD_BLOCK / PACK) + from * w, to - from, c->rows - s * MR, w);
		}
	}
}

/* sum (the block's dK or dV) += the transpose of weight (dS or P) times rows (Q or dO). */
static inline void bwd_add_dkv(const bwd_scope *c, float *sum, const float *weight, const float *rows, int64_t n,
                               int64_t wide, int64_t vectors) {
	const int64_t width = X86_UP(n, VL);
	/* strips that see each MR keys */
	int first[BWD_BLOCK / MR], last[BWD_BLOCK / MR];
	for (int64_t m = 0; m * MR < c->keys; m++) {
		first[m] = c->strips;
		last[m] = 0;
		for (int s = 0; s < c->strips; s++) {
			if (c->to[s] <= m * MR || c->from[s] >= (m + 1) * MR) continue;
			if (first[m] == c->strips) first[m] = s;
			last[m] = s + 1;
		}
	}
	for (int64_t d = 0; d < width; d += NR) {
		const int64_t w = width - d > VL ? NR : VL;
		for (int64_t m = 0; m * MR < c->keys; m++) {
			if (first[m] >= last[m]) continue;
			const int64_t row = first[m] * MR, end = last[m] * MR < c->rows ? last[m] * MR : X86_UP(c->rows, PACK);
#if X86_PAIRS
			(void)vectors;
			const float *const b = rows + d * (BWD_TILE / PACK) + row / PACK * w;
#else
			const float *const b = rows + (first[m] * vectors + d / VL) * MR * VL;
#endif
			bwd_multiply_queries(sum + m * MR * wide + d * MR, weight + row / PACK * BWD_PITCH + m * MR, b,
			                     vectors * MR * VL, (end - row) / PACK, c->keys - m * MR, w);
		}
	}
}

/* Row i of sums that lie in strips of [panels][MR][NR], times factor, to a row of a tensor. */
X86_INLINE void bwd_store_row(const ingot_tensor *t, int64_t offset, const float *sum, int64_t wide, int64_t i,
                              int64_t n, float factor) {
	char *const row = (char *)t->data + offset * ingot__dtype_size(t->dtype);
	const float *const from = sum + i / MR * MR * wide + i % MR * NR;
	const vf f = v_set(factor);
	for (int64_t d = 0; d < n; d += VL)
		row_store(row, d, n, t->dtype, v_mul(f, v_load(from + d / NR * MR * NR + d % NR)));
}

/* ---- tasks ---------------------------------------------------------------------------------------------------------------- */

X86_INLINE void bwd_gradients(const ingot__problem *p, const ingot__plan *plan, void *workspace, void *scratch,
                              int64_t index, bool general) {
	const int64_t *const n = plan->number;
	const int64_t ranges = n[BWD_RANGES], range = index % ranges, head_k = index / ranges % p->heads_k;
	bwd_scope scope, *const c = &scope;
	memset(c, 0, offsetof(bwd_scope, first));
	bwd_begin(c, p, plan, scratch);
	bwd_sequence(c, index / ranges / p->heads_k);
	const int64_t blocks = (c->k.count + BWD_BLOCK - 1) / BWD_BLOCK, first_block = range * n[BWD_RANGE_BLOCKS];
	const int64_t last_block = first_block + n[BWD_RANGE_BLOCKS] < blocks ? first_block + n[BWD_RANGE_BLOCKS] : blocks;
	const int64_t tiles = (c->q.count + BWD_TILE - 1) / BWD_TILE, tile_dq = BWD_TILE * c->wide_d;

	for (int64_t h = 0; h < p->group; h++) {
		bwd_head(c, head_k * p->group + h);
		float *dq = c->base + n[BWD_AT_DQ];
		if (ranges > 1 && c->want_dq)
			dq = (float *)workspace + ((c->b * p->heads_q + c->head) * ranges + range) * n[BWD_SLAB];
		/* tiles [0, met) have been met: packed if they are kept, and their dQ begun */
		int64_t met = 0;
		for (int64_t block = first_block; block < last_block; block++) {
			const int64_t sum = p->group > 1 ? block - first_block : 0;
			float *const dk = c->base + n[BWD_AT_DK] + sum * BWD_BLOCK * c->wide_d;
			float *const dv = c->base + n[BWD_AT_DV] + sum * BWD_BLOCK * c->wide_v;
			c->key = block * BWD_BLOCK;
			c->keys = c->k.count - c->key < BWD_BLOCK ? c->k.count - c->key : BWD_BLOCK;
			const size_t kept_rows = (size_t)X86_UP(c->keys, MR);
			if (h == 0 && c->want_dk) memset(dk, 0, sizeof *dk * kept_rows * (size_t)c->wide_d);
			if (h == 0 && c->want_dv) memset(dv, 0, sizeof *dv * kept_rows * (size_t)c->wide_v);
			int64_t row, end;
			bwd_seers(c, &row, &end);
			if (row < end) bwd_pack_block(c, c->want_dq, c->want_ds);
			for (int64_t t = row / BWD_TILE; t * BWD_TILE < end && row < end; t++) {
				bwd_tile(c, c->base + n[BWD_AT_TILES] + (n[BWD_KEEP] ? t : 0) * n[BWD_TILE_SIZE], t * BWD_TILE);
				if (t >= met || !n[BWD_KEEP]) bwd_pack_tile(c);
				for (; met <= t; met++)
					if (c->want_dq) memset(dq + met * tile_dq, 0, sizeof *dq * (size_t)tile_dq);
				bwd_score(c, general, c->want_ds, BWD_FOR_PRODUCTS);
				if (c->want_dq) bwd_add_dq(c, dq + t * tile_dq);
				if (c->want_dv)
					bwd_add_dkv(c, dv, c->base + n[BWD_AT_P], c->dout_columns, p->head_dim_v, c->wide_v, c->vectors_v);
				if (c->want_dk)
					bwd_add_dkv(c, dk, c->base + n[BWD_AT_DS], c->q_columns, p->head_dim, c->wide_d, c->vectors_d);
			}
			if (h < p->group - 1) continue;
			for (int64_t j = 0; j < c->keys; j++) {
				if (c->want_dk)
					bwd_store_row(&p->dk, ingot__row_offset(&p->dk, c->k, head_k, c->key + j), dk, c->wide_d, j,
					              p->head_dim, c->scale);
				if (c->want_dv)
					bwd_store_row(&p->dv, ingot__row_offset(&p->dv, c->k, head_k, c->key + j), dv, c->wide_v, j,
					              p->head_dim_v, c->kept);
			}
		}
		if (!c->want_dq) continue;
		if (met < tiles) memset(dq + met * tile_dq, 0, sizeof *dq * (size_t)((tiles - met) * tile_dq));
		for (int64_t i = 0; i < c->q.count && ranges == 1; i++)
			bwd_store_row(&p->dq, ingot__row_offset(&p->dq, c->q, c->head, i), dq, c->wide_d, i, p->head_dim, c->scale);
	}
}

void BWD_TASK(_plain)(const ingot__problem *p, const ingot__plan *plan, void *workspace, void *scratch, int64_t index) {
	bwd_gradients(p, plan, workspace, scratch, index, false);
}

void BWD_TASK(_general)(const ingot__problem *p, const ingot__plan *plan, void *workspace, void *scratch,
                        int64_t index) {
	bwd_gradients(p, plan, workspace, scratch, index, true);
}

/* A tile of dQ: the ranges' parts, in the order of their keys. */
void BWD_TASK(_dq)(const ingot__problem *p, const ingot__plan *plan, void *workspace, void *scratch, int64_t index) {
	(void)scratch;
	const int64_t *const n = plan->number;
	const int64_t tiles = (p->q_side.max_seqlen + BWD_TILE - 1) / BWD_TILE, wide = X86_UP(p->head_dim, NR);
	const int64_t head = index / tiles % p->heads_q, b = index / tiles / p->heads_q, row = index % tiles * BWD_TILE;
	const ingot__span q = ingot__locate(&p->q_side, b);
	float *const part = (float *)workspace + (b * p->heads_q + head) * n[BWD_RANGES] * n[BWD_SLAB] + row * wide;
	if (row >= q.count) return;
	const int64_t rows = q.count - row < BWD_TILE ? q.count - row : BWD_TILE, size = X86_UP(rows, MR) * wide;
	for (int64_t range = 1; range < n[BWD_RANGES]; range++) {
		const float *const other = part + range * n[BWD_SLAB];
		for (int64_t i = 0; i < size; i += VL) v_store(part + i, v_add(v_load(part + i), v_load(other + i)));
	}
	for (int64_t i = 0; i < rows; i++)
		bwd_store_row(&p->dq, ingot__row_offset(&p->dq, q, head, row + i), part, wide, i, p->head_dim,
		              (float)p->softmax_scale);
}

/* A tile of the bias's gradient, or what stands for a summed axis: dS of all tiles that share it, in the order of sequences,
 * heads, keys and rows. */
void BWD_TASK(_dbias)(const ingot__problem *p, const ingot__plan *plan, void *workspace, void *scratch, int64_t index) {
	(void)workspace;
	const int64_t *const shape = p->dbias.shape, *const stride = p->dbias.stride;
	const int64_t blocks = (shape[3] + BWD_BLOCK - 1) / BWD_BLOCK, tiles = (shape[2] + BWD_TILE - 1) / BWD_TILE;
	const int64_t key = index % blocks * BWD_BLOCK, row = index / blocks % tiles * BWD_TILE;
	const int64_t head = index / blocks / tiles % shape[1], b = index / blocks / tiles / shape[1];
	const bool all_sequences = shape[0] == 1, all_heads = shape[1] == 1, all_rows = shape[2] == 1,
			   all_keys = shape[3] == 1;
	bwd_scope scope, *const c = &scope;
	memset(c, 0, offsetof(bwd_scope, first));
	bwd_begin(c, p, plan, scratch);
	float *const sum = c->base + c->n[BWD_AT_BIAS];
	memset(sum, 0, sizeof *sum * BWD_TILE * BWD_PITCH);
	for (int64_t sequence = b; sequence < (all_sequences ? p->batch : b + 1); sequence++) {
		bwd_sequence(c, sequence);
		const int64_t last_key = all_keys || key + BWD_BLOCK > c->k.count ? c->k.count : key + BWD_BLOCK;
		const int64_t last_row = all_rows || row + BWD_TILE > c->q.count ? c->q.count : row + BWD_TILE;
		for (int64_t h = head; h < (all_heads ? p->heads_q : head + 1); h++) {
			bwd_head(c, h);
			for (c->key = key; c->key < last_key; c->key += BWD_BLOCK) {
				c->keys = last_key - c->key < BWD_BLOCK ? last_key - c->key : BWD_BLOCK;
				bwd_pack_block(c, false, true);
				for (int64_t i = row; i < last_row; i += BWD_TILE) {
					bwd_tile(c, c->base + c->n[BWD_AT_TILES], i);
					bwd_pack_tile(c);
					bwd_score(c, true, true, BWD_FOR_BIAS);
				}
			}
		}
	}
	const int64_t rows = shape[2] - row < BWD_TILE ? shape[2] - row : BWD_TILE;
	const int64_t keys = shape[3] - key < BWD_BLOCK ? shape[3] - key : BWD_BLOCK;
	for (int64_t r = 1; all_rows && r < BWD_TILE; r++)
		for (int64_t j = 0; j < BWD_BLOCK; j++) sum[j] += sum[r * BWD_PITCH + j];
	for (int64_t r = 0; all_keys && r < rows; r++)
		for (int64_t j = 1; j < BWD_BLOCK; j++) sum[r * BWD_PITCH] += sum[r * BWD_PITCH + j];
	for (int64_t r = 0; r < rows; r++) {
		const int64_t at = b * stride[0] + head * stride[1] + (row + r) * stride[2] + key * stride[3];
		char *const to = (char *)p->dbias.data + at * ingot__dtype_size(p->dbias.dtype);
		for (int64_t j = 0; j < keys; j += VL) row_store(to, j, keys, p->dbias.dtype, v_load(sum + r * BWD_PITCH + j));
	}
}

/* One head's sink: -sum of exp(sink - lse) delta over all rows. */
void BWD_TASK(_dsink)(const ingot__problem *p, const ingot__plan *plan, void *workspace, void *scratch, int64_t index) {
	(void)plan, (void)workspace, (void)scratch;
	const double sink = ((const float *)p->sink.data)[index * p->sink.stride[0]];
	double sum = 0;
	for (int64_t b = 0; b < p->batch; b++) {
		const ingot__span q = ingot__locate(&p->q_side, b);
		for (int64_t i = 0; i < q.count; i++) {
			const double lse = ((const float *)p->lse.data)[ingot__lse_offset(p, q, b, index, i)];
			if (lse == -INFINITY) continue;
			const double delta = bwd_delta(p, bwd_row(&p->dout, q, index, i), bwd_row(&p->out, q, index, i));
			sum -= exp(sink - (p->lse_base == INGOT_LSE_BASE2 ? lse * X86_LN2 : lse)) * delta;
		}
	}
	((float *)p->dsink.data)[index * p->dsink.stride[0]] = (float)sum;
}

#endif
#endif
