/*
 * The textbook forward: for each row the maximum of its scores, then the sum of exp(score - maximum) and of those weights
 * times V, then one division. Scores are computed twice rather than kept, so that scratch does not grow with the keys.
 * Included by attn_fwd_reference.c and attn_fwd_reference_f64.c, which choose the precision.
 */
#include "attn.h"

typedef struct forward_scratch {
	real *decode;      /* [256] */
	real *q, *k, *v;   /* [ROWS][D], [D][PITCH], [KEYS][Dv] */
	real *sum, *part;  /* [ROWS][Dv], [Dv] */
	real *top, *total; /* [ROWS]: the maximum, the sum of weights */
	bool *any;         /* [ROWS]: has a valid pair */
	tile *tile;
} forward_scratch;

/* Carves the scratch at base; with NULL only its size counts. */
static inline uint64_t forward_carve(const ingot__problem *p, void *base, forward_scratch *f) {
	arena a = {.base = base};
	f->decode = arena_reals(&a, 256);
	f->q = arena_reals(&a, ROWS * p->head_dim);
	f->k = arena_reals(&a, PITCH * p->head_dim);
	f->v = arena_reals(&a, KEYS * p->head_dim_v);
	f->sum = arena_reals(&a, ROWS * p->head_dim_v);
	f->part = arena_reals(&a, p->head_dim_v);
	f->top = arena_reals(&a, ROWS);
	f->total = arena_reals(&a, ROWS);
	f->any = arena_take(&a, ROWS, sizeof(bool));
	f->tile = arena_take(&a, 1, sizeof(tile));
	return a.used;
}

#ifdef INGOT_HOST

static inline void forward_plan(const ingot__problem *p, ingot__plan *plan, ingot__task *rows, ingot__task *cells) {
	forward_scratch unused;
	const int64_t tasks = p->batch * p->heads_q * blocks_of(longest(&p->q_side), ROWS);
	/* Twice the scores and once P V at what plain code reaches, and an exponential a pair. */
	const double dims = 2.0 * (double)p->head_dim + (double)p->head_dim_v;
	plan->scratch_bytes = forward_carve(p, NULL, &unused);
	if (tasks)
		plan->step[plan->steps++] = (ingot__step){
			.name = "rows", .task = rows, .tasks = tasks, .work = p->pairs * (dims * (double)sizeof(real) * 0.05 + 10)};
	/* Last, since the cells written may be those that are read. */
	if (p->dropout_seed_out.dtype != INGOT_NONE || p->dropout_offset_out.dtype != INGOT_NONE)
		plan->step[plan->steps++] = (ingot__step){.name = "cells", .task = cells, .tasks = 1, .work = 10};
}

#else

/* Steps 6 and 7 of the formula for one row whose weights are summed, and its stores. */
static inline void forward_finish(const scope *s, const forward_scratch *f, int64_t row, int r) {
	const ingot__problem *const p = s->p;
	real *const out = f->sum + r * p->head_dim_v;
	const real total = f->total[r];
	for (int64_t d = 0; d < p->head_dim_v; d++) out[d] = f->any[r] && total != 0 ? out[d] / total : 0;
	store_values(&p->out, ingot__row_offset(&p->out, s->q, s->head, row + r), out, p->head_dim_v, 1);
	if (p->lse.dtype == INGOT_NONE) return;
	real lse = total == 0 ? REAL(-INFINITY) : f->top[r] + log(total);
	if (p->lse_base == INGOT_LSE_BASE2) lse *= REAL(1.4426950408889634074); /* 1 / ln 2 */
	ingot__store(p->lse.data, ingot__lse_offset(p, s->q, s->b, s->head, row + r), INGOT_F32, (float)lse);
}

/* Adds the tile's weights and weights times V to its rows' sums. */
static inline void forward_add(const scope *s, const forward_scratch *f) {
	const ingot__problem *const p = s->p;
	tile *const t = f->tile;
	for (int r = 0; r < t->rows; r++) {
		real factor[KEYS], total = 0;
		dropout_factors(factor, s, t->row + r, t->key);
		for (int c = 0; c < KEYS; c++) {
			if (!t->valid[r][c]) continue;
			const real e = exp(t->score[r][c] - f->top[r]);
			total += e;
			t->weight[r][c] = rounded(e, p->v.dtype) * factor[c];
		}
		f->total[r] += total;
	}
	load_keys(s, f->v, NULL, &p->v, p->head_dim_v, t->key, t->keys, s->v_factor);
	add_products(f->sum, f->part, t, t->weight, f->v, p->head_dim_v);
}

/* Task: ROWS query rows of one head of one sequence. */
static inline void forward_rows(const ingot__problem *p, void *scratch, int64_t index) {
	forward_scratch f;
	(void)forward_carve(p, scratch, &f);
	const int64_t blocks = blocks_of(longest(&p->q_side), ROWS), row = index % blocks * ROWS,
				  head = index / blocks % p->heads_q;
	const scope s = scope_of(p, index / blocks / p->heads_q, head, f.decode);
	const int rows = (int)ingot__clamp(s.q.count - row, 0, ROWS);
	if (!rows) return;
	int64_t first, last;
	keys_seen(&s, row, rows, &first, &last);
	load_rows(&s, f.q, &p->q, p->head_dim, row, rows, s.q_factor);

	const real sink =
		p->features & INGOT__SINK ? ((const float *)p->sink.data)[head * p->sink.stride[0]] : REAL(-INFINITY);
	for (int r = 0; r < rows; r++) {
		f.any[r] = false;
		f.top[r] = isnan(sink) ? REAL(-INFINITY) : sink;
	}
	for (int64_t key = first / KEYS * KEYS; key < last; key += KEYS) {
		if (!tile_place(f.tile, &s, row, rows, key)) continue;
		load_keys(&s, NULL, f.k, &p->k, p->head_dim, key, f.tile->keys, s.k_factor);
		tile_scores(f.tile, &s, f.q, f.k);
		for (int r = 0; r < rows; r++) {
			for (int c = 0; c < KEYS; c++) {
				if (!f.tile->valid[r][c]) continue;
				f.any[r] = true;
				if (f.tile->score[r][c] > f.top[r]) f.top[r] = f.tile->score[r][c];
			}
		}
	}
	for (int r = 0; r < rows; r++) {
		/* Nothing above -inf: subtract 0, so that a weight is exp(-inf) = 0 and not exp(-inf + inf). */
		if (f.top[r] == REAL(-INFINITY)) f.top[r] = 0;
		f.total[r] = exp(sink - f.top[r]);
		for (int64_t d = 0; d < p->head_dim_v; d++) f.sum[r * p->head_dim_v + d] = 0;
	}
	for (int64_t key = first / KEYS * KEYS; key < last; key += KEYS) {
		if (!tile_place(f.tile, &s, row, rows, key)) continue;
		load_keys(&s, NULL, f.k, &p->k, p->head_dim, key, f.tile->keys, s.k_factor);
		tile_scores(f.tile, &s, f.q, f.k);
		forward_add(&s, &f);
	}
	for (int r = 0; r < rows; r++) forward_finish(&s, &f, row, r);
}

/* Task: the seed and offset that were used, where asked for. */
static inline void forward_cells(const ingot__problem *p) {
	const uint64_t seed = ingot__dropout_seed(p), offset = ingot__dropout_offset(p);
	if (p->dropout_seed_out.dtype != INGOT_NONE) memcpy(p->dropout_seed_out.data, &seed, sizeof seed);
	if (p->dropout_offset_out.dtype != INGOT_NONE) memcpy(p->dropout_offset_out.data, &offset, sizeof offset);
}

#endif
