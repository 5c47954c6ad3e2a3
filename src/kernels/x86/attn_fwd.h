/*
 * Attention forward for x86, the text that its implementations share; each .c file sets the names and includes it. Any length of
 * Q and K, every feature of the operator but 8-bit types.
 *
 * A task is a range of query rows of all heads that read one key head (a "chunk"), and a range of keys. It packs its queries
 * once, then walks the keys in blocks: a block of K and V is packed once, into L2, and used at once by all strips of the
 * chunk. A strip (MR rows) multiplies with the block's keys, goes through the softmax in L1, and adds P V to its running
 * output. So packed keys never leave the cache, memory is bounded by the chunk, nothing is shared between threads, and a row's
 * bits do not depend on how rows are dealt out. Only when the rows are few are the keys split too (by shapes alone, so that
 * results never depend on the number of threads); a second step then merges.
 *
 * What a row may see is an interval of keys, kept per row; a strip-block computes only panels that some row sees and masks
 * only where the interval's ends fall. Terms of the score, dropout and pages are branches per row of a strip-block.
 *
 * The including file defines FWD_NAME, and tells fwd_plan its tile.
 */
#ifndef INGOT_KERNELS_X86_ATTN_FWD_H
#define INGOT_KERNELS_X86_ATTN_FWD_H

#include "../cpu.h"

#define FWD_PASTE_(a, b, c) a##b##c
#define FWD_PASTE(a, b, c) FWD_PASTE_(a, b, c)
#define FWD_IMPL FWD_PASTE(ingot__impl_, FWD_NAME, )
#define FWD_TASK(name) FWD_PASTE(ingot__, FWD_NAME, name)
#define FWD_TEXT_(x) #x
#define FWD_TEXT(x) FWD_TEXT_(x)

ingot__task FWD_TASK(_rows), FWD_TASK(_merge), FWD_TASK(_cells);

/* What the plan tells the tasks. Offsets into scratch are in bytes, into the workspace in floats. */
enum {
	FWD_CHUNKS,     /* ranges of query rows */
	FWD_CHUNK_ROWS, /* rows of one head in each but the last */
	FWD_SPLITS,     /* ranges of keys */
	FWD_Q,          /* packed queries */
	FWD_OUT,        /* running output, strips of [panels][MR][NR] */
	FWD_SUM,        /* VL a row */
	FWD_MAX,        /* per row */
	FWD_FIRST,      /* int32 per row: keys [first, last) are seen */
	FWD_LAST,
	FWD_HEAD, /* int32 per row: head within the group, and query row */
	FWD_QUERY,
	FWD_ENDS,    /* int32 x 4 per strip */
	FWD_SCORES,  /* one strip-block */
	FWD_WEIGHTS, /* the same as probabilities: fp32 or bf16 pairs */
	FWD_K,       /* packed block */
	FWD_V,
	FWD_STATISTICS, /* workspace: after the partial outputs, m and l of each partial row */
	FWD_NUMBERS
};
_Static_assert(FWD_NUMBERS <= INGOT__PLAN_NUMBERS, "the plan has room for the numbers");

enum { FWD_LONGEST = 1024 }; /* head_dim at most */

/* Rows of a partial result are numbered (split, b, query head, query). */
static inline int64_t fwd_partial_row(const ingot__problem *p, int64_t split, int64_t b, int64_t head, int64_t i) {
	return ((split * p->batch + b) * p->heads_q + head) * p->q_side.max_seqlen + i;
}

#ifdef INGOT_HOST

/* ---- host half ------------------------------------------------------------------------------------------------------ */

enum {
	FWD_BLOCK = 192,           /* BLOCK of softmax.h */
	FWD_CHUNK_BYTES = 4 << 20, /* packed queries and running output of a chunk: each is read once a block, in order */
	FWD_CHUNK_LEAST = 192,     /* rows for which packing a block of keys stays small */
	FWD_TASKS_LEAST = 16,      /* with fewer tasks the keys are split */
	FWD_SPLIT_LEAST = 4 * FWD_BLOCK /* keys in a split at least */
};

#define FWD_UP(x, m) (((x) + (m) - 1) / (m) * (m))

static inline int64_t fwd_divide_up(int64_t a, int64_t b) {
	return (a + b - 1) / b;
}

static inline const char *fwd_refuse(const ingot__problem *p) {
	INGOT__REFUSE_IF(p->features & (INGOT__8BIT_KV | INGOT__8BIT_Q),
	                 "8-bit q, k or v: it reads fp32, fp16 and bf16 only");
	INGOT__REFUSE_IF(p->head_dim > FWD_LONGEST || p->head_dim_v > FWD_LONGEST,
	                 "head sizes above 1024 are not among its cases");
	return NULL;
}

static inline int64_t fwd_take(uint64_t *end, int64_t bytes) {
	const uint64_t at = *end;
	*end += (uint64_t)FWD_UP(bytes, 64);
	return (int64_t)at;
}

static inline void fwd_plan(const ingot__problem *p, int threads, ingot__plan *plan, int64_t lanes,
                            int64_t rows_of_tile, int64_t pack, ingot__task *const task[3]) {
	const int64_t steps = fwd_divide_up(p->head_dim, pack), width = FWD_UP(p->head_dim_v, 2 * lanes);
	const int64_t mq = p->q_side.max_seqlen, mk = p->k_side.max_seqlen, heads = p->batch * p->heads_k;
	int64_t *n = plan->number;

	/* few rows: split the keys, by shapes alone */
	const int64_t rows = mq * p->group, heads_counted = p->batch_invariant ? p->heads_k : heads;
	const int64_t natural = heads_counted * fwd_divide_up(rows, FWD_CHUNK_LEAST);
	int64_t splits = 1;
	if (natural > 0 && natural < FWD_TASKS_LEAST)
		splits = ingot__clamp(fwd_divide_up(FWD_TASKS_LEAST, natural), 1, ingot__clamp(mk / FWD_SPLIT_LEAST, 1, 64));

	/* chunks: as long as the cache holds, as many as threads need */
	const int64_t row_bytes = 4 * (steps + width + lanes);
	const int64_t most = ingot__clamp(FWD_CHUNK_BYTES / row_bytes / p->group, 1, mq > 0 ? mq : 1);
	const int64_t least = ingot__clamp(fwd_divide_up(FWD_CHUNK_LEAST, p->group), 1, most);
	int64_t chunks = fwd_divide_up(mq, most);
	if (threads > 1 && heads > 0) {
		const int64_t wanted = fwd_divide_up(4 * (int64_t)threads, heads * splits);
		const int64_t possible = fwd_divide_up(mq, least);
		if (chunks < wanted) chunks = wanted < possible ? wanted : possible;
	}
	const int64_t chunk_rows =
		FWD_UP(fwd_divide_up(mq, chunks ? chunks : 1), p->group == 1 && mq > rows_of_tile ? rows_of_tile : 1);
	n[FWD_CHUNK_ROWS] = chunk_rows;
	n[FWD_CHUNKS] = chunk_rows ? fwd_divide_up(mq, chunk_rows) : 0;
	n[FWD_SPLITS] = splits;

	const int64_t strips = fwd_divide_up(chunk_rows * p->group, rows_of_tile),
				  slots = strips * rows_of_tile + 2 * lanes;
	uint64_t *end = &plan->scratch_bytes;
	n[FWD_Q] = fwd_take(end, 4 * strips * FWD_UP(steps * rows_of_tile + lanes, lanes));
	n[FWD_OUT] = fwd_take(end, 4 * strips * rows_of_tile * width);
	n[FWD_SUM] = fwd_take(end, 4 * slots * lanes);
	n[FWD_MAX] = fwd_take(end, 4 * slots);
	n[FWD_FIRST] = fwd_take(end, 4 * slots);
	n[FWD_LAST] = fwd_take(end, 4 * slots);
	n[FWD_HEAD] = fwd_take(end, 4 * slots);
	n[FWD_QUERY] = fwd_take(end, 4 * slots);
	n[FWD_ENDS] = fwd_take(end, 16 * strips);
	n[FWD_SCORES] = fwd_take(end, 4 * rows_of_tile * FWD_BLOCK);
	n[FWD_WEIGHTS] = fwd_take(end, 4 * rows_of_tile * FWD_BLOCK / pack);
	n[FWD_K] = fwd_take(end, 4 * FWD_BLOCK * steps);
	n[FWD_V] = fwd_take(end, 4 * FWD_BLOCK / pack * width);

	const double nanoseconds = 2.0 * p->pairs * (double)(p->head_dim + p->head_dim_v) / 64.0;
	ingot__step *step = plan->step;
	*step++ =
		(ingot__step){.name = "rows", .task = task[0], .tasks = n[FWD_CHUNKS] * splits * heads, .work = nanoseconds};
	if (splits > 1) {
		const int64_t partial = splits * p->batch * p->heads_q * mq;
		n[FWD_STATISTICS] = partial * p->head_dim_v;
		plan->workspace_bytes = 4 * (uint64_t)(n[FWD_STATISTICS] + 2 * partial);
		*step++ = (ingot__step){.name = "merge",
		                        .task = task[1],
		                        .tasks = p->batch * p->heads_q * fwd_divide_up(mq, 64),
		                        .work = (double)partial * (double)p->head_dim_v / 4};
	}
	if (p->dropout_seed_out.dtype != INGOT_NONE || p->dropout_offset_out.dtype != INGOT_NONE)
		*step++ = (ingot__step){.name = "cells", .task = task[2], .tasks = 1, .work = 1};
	plan->steps = (int)(step - plan->step);
}

#else

/* ---- device half ---------------------------------------------------------------------------------------------------- */

#include "pack.h"
#include "softmax.h"

_Static_assert(BLOCK == 192, "the host half knows the block");

/* What stands for a row that must not count. */
static const float fwd_zeros[FWD_LONGEST];

typedef struct fwd_row_ends {
	int32_t any_first, any_last; /* keys that some row sees lie in this interval */
	int32_t all_first, all_last; /* every row sees these */
} fwd_row_ends;

typedef struct fwd_chunk {
	const ingot__problem *p;
	int64_t b, head_k;
	ingot__span q_rows, k_rows;
	int64_t diagonal;
	int64_t query, queries; /* query rows of each head */
	int64_t rows, strips;   /* rows: queries of all heads of the group, head after head */
	int64_t panels;         /* of V */
	bool natural;           /* scores get terms: m is in natural units; else in units of the raw product */
	float factor;           /* from m's units to exponents of two */
	double unit;            /* from m's units to natural ones */
	uint64_t seed, offset;
	const int32_t *pages;
	int q_size, k_size; /* bytes of an element */
	float *q, *out, *sum, *max, *scores, *weights, *k, *v;
	int32_t *first, *last, *head, *row;
	fwd_row_ends *ends;
} fwd_chunk;

X86_INLINE int64_t fwd_steps(const ingot__problem *p) {
	return (p->head_dim + PACK - 1) / PACK;
}

/* What each row sees, and each strip. */
static inline void fwd_see(fwd_chunk *c) {
	const ingot__problem *p = c->p;
	int64_t t = 0;
	for (int64_t h = 0; h < p->group; h++)
		for (int64_t i = 0; i < c->queries; i++, t++) {
			int64_t first = 0, last = c->k_rows.count;
			if (p->features & INGOT__MASK) ingot__visible(p, c->query + i, c->diagonal, c->k_rows.count, &first, &last);
			if (first >= last) first = last = 0;
			c->first[t] = (int32_t)first;
			c->last[t] = (int32_t)last;
			c->head[t] = (int32_t)h;
			c->row[t] = (int32_t)(c->query + i);
		}
	for (int64_t s = 0; s < c->strips; s++) {
		fwd_row_ends e = {INT32_MAX, 0, 0, INT32_MAX};
		for (int64_t r = s * MR; r < (s + 1) * MR && r < c->rows; r++) {
			if (c->first[r] < c->last[r]) {
				e.any_first = c->first[r] < e.any_first ? c->first[r] : e.any_first;
				e.any_last = c->last[r] > e.any_last ? c->last[r] : e.any_last;
			}
			e.all_first = c->first[r] > e.all_first ? c->first[r] : e.all_first;
			e.all_last = c->last[r] < e.all_last ? c->last[r] : e.all_last;
		}
		c->ends[s] = e;
	}
}

/* The rows of a strip of queries. */
static inline void fwd_query_rows(const fwd_chunk *c, int64_t strip, const void *row[VL]) {
	const ingot__problem *p = c->p;
	for (int r = 0; r < VL; r++) {
		const int64_t t = strip * MR + r;
		row[r] = fwd_zeros;
		if (r < MR && t < c->rows)
			row[r] = (const char *)p->q.data +
			         ingot__row_offset(&p->q, c->q_rows, c->head_k * p->group + c->head[t], c->row[t]) * c->q_size;
	}
}

/* Rows of a block of K and V, as the caller holds them. */
typedef struct fwd_block {
	const void *k[BLOCK], *v[BLOCK];
} fwd_block;

/* Keys [k0, k0 + n); rows outside [first, last), which no query of the chunk sees, and those that fill a panel, are zeros. */
static inline void fwd_block_rows(const fwd_chunk *c, fwd_block *block, int64_t k0, int64_t n, int64_t first,
                                  int64_t last) {
	const ingot__problem *p = c->p;
	const int64_t from = ingot__clamp(first - k0, 0, n), to = ingot__clamp(last - k0, from, n), end = X86_UP(n, NR);
	for (int64_t j = 0; j < from; j++) block->k[j] = block->v[j] = fwd_zeros;
	for (int64_t j = to; j < end; j++) block->k[j] = block->v[j] = fwd_zeros;
	if (p->features & INGOT__PAGED) {
		for (int64_t j = from; j < to; j++) {
			block->k[j] = (const char *)p->k.data +
			              ingot__key_offset(p, &p->k, c->k_rows, c->pages, c->head_k, k0 + j) * c->k_size;
			block->v[j] = (const char *)p->v.data +
			              ingot__key_offset(p, &p->v, c->k_rows, c->pages, c->head_k, k0 + j) * c->k_size;
		}
		return;
	}
	const char *k = (const char *)p->k.data + ingot__row_offset(&p->k, c->k_rows, c->head_k, k0) * c->k_size;
	const char *v = (const char *)p->v.data + ingot__row_offset(&p->v, c->k_rows, c->head_k, k0) * c->k_size;
	const int64_t k_pitch = p->k.stride[2] * c->k_size, v_pitch = p->v.stride[2] * c->k_size;
	for (int64_t j = from; j < to; j++) {
		block->k[j] = k + j * k_pitch;
		block->v[j] = v + j * v_pitch;
	}
}

/* The caller's rows are far away (L3 or memory), and packing alone would wait for them: the next block's come to L2 while this
 * block is computed, a share with each strip. */
static inline void fwd_prefetch(const fwd_chunk *c, const fwd_block *block, int64_t begin, int64_t end) {
	const int64_t bytes_k = c->p->head_dim * c->k_size, bytes_v = c->p->head_dim_v * c->k_size;
	for (int64_t j = begin; j < end; j++) {
		for (int64_t i = 0; i < bytes_k; i += 64) _mm_prefetch((const char *)block->k[j] + i, _MM_HINT_T1);
		for (int64_t i = 0; i < bytes_v; i += 64) _mm_prefetch((const char *)block->v[j] + i, _MM_HINT_T1);
	}
}

/* Q K^T of a strip for columns [c0, c1). fp32 is summed in two levels, for its precision: 64 steps, then their sums, one sweep
 * over the columns after another, since a tile that soon reads what it has just written waits for it. */
X86_INLINE void fwd_scores(const fwd_chunk *c, const float *q, int64_t c0, int64_t c1, int rows) {
	const int64_t steps = fwd_steps(c->p), level = c->p->q.dtype == INGOT_F32 ? 64 : steps;
	const int64_t once = steps < level ? steps : level;
	for (int64_t j = c0; j < c1; j += NR) {
		const float *k = c->k + j * steps;
		if (c1 - j > VL) tile(q, 1, MR, k, NR, c->scores + j, BLOCK, once, rows, 2, TILE_ZERO, NULL);
		else tile(q, 1, MR, k, NR, c->scores + j, BLOCK, once, rows, 1, TILE_ZERO, NULL);
	}
	for (int64_t from = once; from < steps; from += level) {
		const int64_t some = steps - from < level ? steps - from : level;
		for (int64_t j = c0; j < c1; j += NR) {
			const float *k = c->k + j * steps + from * NR;
			if (c1 - j > VL) tile(q + from * MR, 1, MR, k, NR, c->scores + j, BLOCK, some, rows, 2, TILE_SUM, NULL);
			else tile(q + from * MR, 1, MR, k, NR, c->scores + j, BLOCK, some, rows, 1, TILE_SUM, NULL);
		}
	}
}

/* out = alpha out + P V of a strip for columns [c0, c1); rows and init are constants. */
X86_INLINE void fwd_outputs(const fwd_chunk *c, float *out, const float *alpha, int64_t c0, int64_t c1, int rows,
                            tile_init init) {
	const int64_t width = X86_UP(c->p->head_dim_v, VL), steps = (c1 - c0 + PACK - 1) / PACK;
	const float *weights = c->weights + c0 / PACK;
	for (int64_t d = 0; d < width; d += NR) {
		const float *panel = c->v + d * (BLOCK / PACK);
		if (width - d > VL)
			tile(weights, BLOCK / PACK, 1, panel + c0 / PACK * NR, NR, out + d * MR, NR, steps, rows, 2, init, alpha);
		else tile(weights, BLOCK / PACK, 1, panel + c0 / PACK * VL, VL, out + d * MR, NR, steps, rows, 1, init, alpha);
	}
}

static inline void fwd_add_terms(const fwd_chunk *c, int64_t strip, int64_t k0, int64_t c0, int64_t c1) {
	const ingot__problem *p = c->p;
	score_terms t = {.scale = (float)fabs(p->softmax_scale), .softcap = p->softcap, .bias_dtype = p->bias.dtype};
	for (int64_t r = 0; r < MR && strip * MR + r < c->rows; r++) {
		const int64_t at = strip * MR + r, head = c->head_k * p->group + c->head[at];
		t.position = c->row[at] + c->diagonal;
		if (p->features & INGOT__ALIBI) t.slope = ingot__alibi_slope(p, c->b, head);
		if (p->features & (INGOT__BIAS | INGOT__BIAS_BOOL)) {
			const int64_t element =
				c->b * p->bias.stride[0] + head * p->bias.stride[1] + c->row[at] * p->bias.stride[2];
			t.bias = (const char *)p->bias.data + element * ingot__dtype_size(p->bias.dtype);
			t.bias_stride = p->bias.stride[3];
		}
		scores_add_terms(c->scores + r * BLOCK, &t, k0, c0, c1, c->k_rows.count);
	}
}

static inline void fwd_drop(const fwd_chunk *c, int64_t strip, int64_t k0, int64_t c0, int64_t c1) {
	const ingot__problem *p = c->p;
	for (int64_t r = 0; r < MR && strip * MR + r < c->rows; r++) {
		const int64_t at = strip * MR + r, head = c->head_k * p->group + c->head[at];
		probabilities_drop(c->weights + r * (BLOCK / PACK), c->seed, c->offset,
		                   ingot__dropout_index(p, c->b, head, c->row[at], k0), p->dropout_threshold, c0, c1);
	}
}

/* One strip against one block; rows: the tile's, a constant. fresh: the strip has no results yet. */
X86_INLINE void fwd_strip_block(const fwd_chunk *c, int64_t strip, int64_t k0, int64_t n, int rows, bool fresh) {
	const fwd_row_ends e = c->ends[strip];
	float alpha[VL] X86_ALIGNED;
	float *const scores = c->scores;
	const int64_t first = e.any_first - k0, last = e.any_last - k0 < n ? e.any_last - k0 : n;
	const int64_t c0 = first <= 0 ? 0 : first / NR * NR, end = X86_UP(last, NR);

	fwd_scores(c, c->q + strip * PACK_STRIP(fwd_steps(c->p)), c0, last, rows);
	if (c->natural) fwd_add_terms(c, strip, k0, c0, last);
	if (e.all_first - k0 > c0 || e.all_last - k0 < end)
		for (int64_t r = 0; r < rows; r++) {
			const int64_t at = strip * MR + r;
			const bool real = at < c->rows;
			scores_mask(scores + r * BLOCK, c0, end, real ? c->first[at] - k0 : 0, real ? c->last[at] - k0 : last);
		}
	const bool moved = softmax_strip(scores, c->weights, c->max + strip * MR, c->sum + strip * MR * VL, alpha, rows, c0,
	                                 end, c->factor);
	if (c->p->features & INGOT__DROPOUT) fwd_drop(c, strip, k0, c0, end);
	float *out = c->out + strip * MR * X86_UP(c->p->head_dim_v, NR);
	if (fresh) fwd_outputs(c, out, alpha, c0, last, rows, TILE_ZERO);
	else if (moved) fwd_outputs(c, out, alpha, c0, last, rows, TILE_SCALE);
	else fwd_outputs(c, out, alpha, c0, last, rows, TILE_ADD);
}

/* What a row's unnormalised output is multiplied by, and its natural lse, from its maximum (natural units) and sum. */
static inline float fwd_weight(const ingot__problem *p, int64_t head, double max, double sum, float *lse) {
	double weight = sum == 0 ? 0 : 1 / sum, log_sum = sum == 0 ? -INFINITY : max + log(sum);
	if (p->features & INGOT__SINK) {
		const double sink = ((const float *)p->sink.data)[head * p->sink.stride[0]];
		const double top = max <= sink ? sink : max; /* a NaN of either comes through */
		const double mine = sum == 0 ? 0 : exp(max - top);
		const double total = mine * sum + (sink == -INFINITY ? 0 : exp(sink - top));
		weight = sum == 0 ? 0 : mine / total;
		log_sum = total == 0 ? -INFINITY : top + log(total);
	}
	*lse = (float)log_sum;
	return (float)weight;
}

static inline void fwd_write_row(const ingot__problem *p, ingot__span q_rows, int64_t b, int64_t head, int64_t i,
                                 const float *out, int64_t panel, float weight, float lse) {
	const int64_t width = p->head_dim_v;
	char *row = (char *)p->out.data + ingot__row_offset(&p->out, q_rows, head, i) * ingot__dtype_size(p->out.dtype);
	/* a row without a valid pair is 0 even where V is not finite */
	const bool empty = weight == 0;
	if (p->features & INGOT__DROPOUT) weight = (float)(weight / (1.0 - (double)p->dropout_p));
	const vf w = v_set(weight);
	for (int64_t d = 0; d < width; d += VL) {
		/* + 0: the sign of a sum that underflowed to 0 follows the strip's masked keys, and so the number of threads */
		const vf x = empty ? v_zero() : v_fma(w, v_load_f32(out + d / NR * panel + d % NR, width - d), v_zero());
		row_store(row, d, width, p->out.dtype, x);
	}
	if (p->lse.dtype != INGOT_NONE)
		((float *)p->lse.data)[ingot__lse_offset(p, q_rows, b, head, i)] =
			p->lse_base == INGOT_LSE_BASE2 ? (float)(lse * X86_LOG2E) : lse;
}

/* The rows that a strip will write. */
static inline void fwd_prefetch_out(const fwd_chunk *c, int64_t strip) {
	const ingot_tensor *out = &c->p->out;
	const int64_t size = ingot__dtype_size(out->dtype);
	for (int64_t t = strip * MR; t < (strip + 1) * MR && t < c->rows; t++) {
		const int64_t row = ingot__row_offset(out, c->q_rows, c->head_k * c->p->group + c->head[t], c->row[t]);
		for (int64_t i = 0; i < c->p->head_dim_v * size; i += 64)
			__builtin_prefetch((char *)out->data + row * size + i, 1);
	}
}

static inline void fwd_finish_strip(const fwd_chunk *c, int64_t strip, const ingot__plan *plan, float *workspace,
                                    int64_t split) {
	const ingot__problem *p = c->p;
	const int64_t width = p->head_dim_v, rows = ingot__clamp(c->rows - strip * MR, 0, MR);
	float sums[VL] X86_ALIGNED = {0}, weights[VL] X86_ALIGNED, lses[VL] X86_ALIGNED, maxima[VL] X86_ALIGNED;
	for (int64_t r = 0; r < rows; r++) sums[r] = v_sum(v_load(c->sum + (strip * MR + r) * VL));
	const vf sum = v_load(sums), max = v_mul(v_load(c->max + strip * MR), v_set((float)c->unit));
	const vmask empty = v_equal(sum, v_zero());
	v_store(maxima, max);
	v_store(weights, v_select(empty, v_zero(), v_div(v_set(1.0f), sum)));
	v_store(lses, v_select(empty, v_set(-INFINITY), v_add(max, v_log(sum))));
	for (int64_t r = 0; r < rows; r++) {
		const int64_t t = strip * MR + r, head = c->head_k * p->group + c->head[t];
		const float *out = c->out + strip * MR * X86_UP(width, NR) + r * NR;
		if (plan->number[FWD_SPLITS] == 1) {
			if (p->features & INGOT__SINK) weights[r] = fwd_weight(p, head, c->max[t] * c->unit, sums[r], lses + r);
			fwd_write_row(p, c->q_rows, c->b, head, c->row[t], out, NR * MR, weights[r], lses[r]);
			continue;
		}
		const int64_t at = fwd_partial_row(p, split, c->b, head, c->row[t]);
		for (int64_t d = 0; sums[r] != 0 && d < width; d += VL)
			v_store_f32(workspace + at * width + d, v_load(out + d / NR * NR * MR + d % NR), width - d);
		workspace[plan->number[FWD_STATISTICS] + 2 * at] = maxima[r];
		workspace[plan->number[FWD_STATISTICS] + 2 * at + 1] = sums[r];
	}
}

/* A strip from its first block to its last: queries are packed just before they are used, and results leave as soon as they
 * are complete, so that both wait for memory beside arithmetic. */
static inline void fwd_strip(const fwd_chunk *c, int64_t strip, int64_t k0, int64_t n, bool fresh) {
	if (fresh) {
		for (int64_t r = 0; r < MR; r++) v_store(c->sum + (strip * MR + r) * VL, v_zero());
		const void *row[VL];
		fwd_query_rows(c, strip, row);
		pack_strip(c->q + strip * PACK_STRIP(fwd_steps(c->p)), row, c->p->head_dim, c->p->q.dtype,
		           c->p->softmax_scale < 0);
		if (strip + 1 < c->strips) {
			fwd_query_rows(c, strip + 1, row);
			for (int r = 0; r < MR; r++)
				for (int64_t i = 0; i < c->p->head_dim * c->q_size; i += 64)
					_mm_prefetch((const char *)row[r] + i, _MM_HINT_T0);
		}
	}
	if (c->rows - strip * MR > MR / 2) fwd_strip_block(c, strip, k0, n, MR, fresh);
	else fwd_strip_block(c, strip, k0, n, MR / 2, fresh);
}

void FWD_TASK(_rows)(const ingot__problem *p, const ingot__plan *plan, void *workspace, void *scratch, int64_t index) {
	const int64_t *n = plan->number;
	const int64_t heads = p->batch * p->heads_k, splits = n[FWD_SPLITS];
	/* the last rows see the most keys under a causal mask: they go first */
	const int64_t chunk = n[FWD_CHUNKS] - 1 - index / (heads * splits), split = index / heads % splits;
	fwd_chunk c = {.p = p, .b = index % heads / p->heads_k, .head_k = index % p->heads_k};
	c.q_rows = ingot__locate(&p->q_side, c.b);
	c.query = chunk * n[FWD_CHUNK_ROWS];
	c.queries = ingot__clamp(c.q_rows.count - c.query, 0, n[FWD_CHUNK_ROWS]);
	if (c.queries == 0) return;
	c.k_rows = ingot__key_rows(p, c.b);
	c.q_size = ingot__dtype_size(p->q.dtype);
	c.k_size = ingot__dtype_size(p->k.dtype);
	c.diagonal = ingot__diagonal(p, c.q_rows.count, c.k_rows.count);
	c.rows = c.queries * p->group;
	c.strips = (c.rows + MR - 1) / MR;
	if (p->features & INGOT__PAGED) {
		int64_t pages;
		c.pages = ingot__page_list(p, c.b, &pages);
	}
	const double scale = fabs(p->softmax_scale);
	c.natural = (p->features & (INGOT__BIAS | INGOT__BIAS_BOOL | INGOT__ALIBI | INGOT__SOFTCAP)) != 0 || scale > 1e30;
	c.factor = (float)((c.natural ? 1 : scale) * X86_LOG2E);
	c.unit = c.natural ? 1 : scale;
	if (p->features & INGOT__DROPOUT) {
		c.seed = ingot__dropout_seed(p);
		c.offset = ingot__dropout_offset(p);
	}
	char *base = scratch;
	c.q = (void *)(base + n[FWD_Q]);
	c.out = (void *)(base + n[FWD_OUT]);
	c.sum = (void *)(base + n[FWD_SUM]);
	c.max = (void *)(base + n[FWD_MAX]);
	c.first = (void *)(base + n[FWD_FIRST]);
	c.last = (void *)(base + n[FWD_LAST]);
	c.head = (void *)(base + n[FWD_HEAD]);
	c.row = (void *)(base + n[FWD_QUERY]);
	c.ends = (void *)(base + n[FWD_ENDS]);
	c.scores = (void *)(base + n[FWD_SCORES]);
	c.weights = (void *)(base + n[FWD_WEIGHTS]);
	c.k = (void *)(base + n[FWD_K]);
	c.v = (void *)(base + n[FWD_V]);
	for (int64_t t = 0; t < c.strips * MR + VL; t++) c.max[t] = t < c.rows ? -INFINITY : 0;

	fwd_see(&c);
	int64_t first = INT32_MAX, last = 0;
	for (int64_t s = 0; s < c.strips; s++) {
		first = c.ends[s].any_first < first ? c.ends[s].any_first : first;
		last = c.ends[s].any_last > last ? c.ends[s].any_last : last;
	}
	int64_t begin = 0, end = last;
	if (splits > 1) {
		const int64_t share = X86_UP((c.k_rows.count + splits - 1) / splits, BLOCK);
		begin = split * share;
		end = begin + share < end ? begin + share : end;
	}
	if (first > begin) begin = first / BLOCK * BLOCK;
	for (int64_t s = 0; s < c.strips; s++)
		if (c.ends[s].any_first >= end || c.ends[s].any_last <= begin) {
			for (int64_t r = 0; r < MR; r++) v_store(c.sum + (s * MR + r) * VL, v_zero());
			fwd_finish_strip(&c, s, plan, workspace, split);
		}

	fwd_block blocks[2], *block = blocks, *next = blocks + 1;
	if (begin < end) fwd_block_rows(&c, block, begin, ingot__clamp(end - begin, 0, BLOCK), first, last);
	for (int64_t k0 = begin; k0 < end; k0 += BLOCK) {
		const int64_t keys = ingot__clamp(end - k0, 0, BLOCK), more = ingot__clamp(end - k0 - BLOCK, 0, BLOCK);
		pack_columns(c.k, block->k, X86_UP(keys, VL), p->head_dim, p->k.dtype);
		pack_inner(c.v, BLOCK / PACK * NR, block->v, X86_UP(keys, PACK), p->head_dim_v, p->v.dtype);
		if (more) fwd_block_rows(&c, next, k0 + BLOCK, more, first, last);
		int64_t seeing = 0, seen = 0;
		for (int64_t s = 0; s < c.strips; s++) seeing += c.ends[s].any_first < k0 + keys && c.ends[s].any_last > k0;
		for (int64_t s = 0; s < c.strips; s++) {
			const fwd_row_ends e = c.ends[s];
			if (e.any_first >= k0 + keys || e.any_last <= k0) continue;
			if (more) fwd_prefetch(&c, next, seen * more / seeing, (seen + 1) * more / seeing);
			seen++;
			const bool complete = k0 + keys >= end || k0 + keys >= e.any_last;
			if (complete) fwd_prefetch_out(&c, s);
			fwd_strip(&c, s, k0, keys, k0 == begin || e.any_first >= k0);
			if (complete) fwd_finish_strip(&c, s, plan, workspace, split);
		}
		fwd_block *swap = block;
		block = next;
		next = swap;
	}
}

/* 64 rows of one head: their partial results, in the order of their keys. */
void FWD_TASK(_merge)(const ingot__problem *p, const ingot__plan *plan, void *workspace, void *scratch, int64_t index) {
	enum { ROWS = 64 };
	const int64_t tiles = (p->q_side.max_seqlen + ROWS - 1) / ROWS, width = p->head_dim_v,
				  splits = plan->number[FWD_SPLITS];
	const int64_t head = index / tiles % p->heads_q, b = index / tiles / p->heads_q;
	const ingot__span q_rows = ingot__locate(&p->q_side, b);
	const float *out = workspace, *statistics = out + plan->number[FWD_STATISTICS];
	float *const row = scratch;
	for (int64_t i = index % tiles * ROWS; i < (index % tiles + 1) * ROWS && i < q_rows.count; i++) {
		double max = -INFINITY, sum = 0;
		for (int64_t s = 0; s < splits; s++) {
			const float m = statistics[2 * fwd_partial_row(p, s, b, head, i)];
			max = m <= max ? max : m;
		}
		memset(row, 0, sizeof *row * (size_t)X86_UP(width, VL));
		for (int64_t s = 0; s < splits; s++) {
			const int64_t at = fwd_partial_row(p, s, b, head, i);
			const float l = statistics[2 * at + 1];
			if (l == 0) continue;
			const double weight = exp(statistics[2 * at] - max);
			sum += weight * l;
			for (int64_t d = 0; d < width; d += VL)
				v_store(row + d,
				        v_fma(v_set((float)weight), v_load_f32(out + at * width + d, width - d), v_load(row + d)));
		}
		float lse;
		const float weight = fwd_weight(p, head, max, sum, &lse);
		fwd_write_row(p, q_rows, b, head, i, row, NR, weight, lse);
	}
}

/* Gives back the seed and offset that were used. Last, so that a cell may be given for both directions. */
void FWD_TASK(_cells)(const ingot__problem *p, const ingot__plan *plan, void *workspace, void *scratch, int64_t index) {
	(void)plan, (void)workspace, (void)scratch, (void)index;
	const uint64_t seed = ingot__dropout_seed(p), offset = ingot__dropout_offset(p);
	if (p->dropout_seed_out.dtype != INGOT_NONE) memcpy(p->dropout_seed_out.data, &seed, sizeof seed);
	if (p->dropout_offset_out.dtype != INGOT_NONE) memcpy(p->dropout_offset_out.data, &offset, sizeof offset);
}

#endif
#endif
