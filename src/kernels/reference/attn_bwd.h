/*
 * The textbook backward. For a valid pair, P = exp(score - lse), dP = dO.V with dropout's factor, dS = P (dP - delta) where
 * delta is the row's sum of P dP; then dV = P^T dO, dQ = scale dS K, dK = scale dS^T Q. In fp32 lse is the given one and
 * delta is the sum of dO O, as implementations do; in double both are computed anew, since the given ones are rounded.
 * Every output element is summed by one task in one order: nothing depends on the threads. Scores are computed once for
 * each of dQ, dK and dV together, and dBias. Included by attn_bwd_reference.c and attn_bwd_reference_f64.c.
 */
#include "attn.h"

typedef struct backward_scratch {
	real *q, *out, *dout; /* [ROWS][D], [ROWS][Dv] twice */
	real *k, *kt, *vt;    /* [KEYS][D], [D][PITCH], [Dv][PITCH] */
	real *sum, *sum_v;    /* [KEYS][D], [KEYS][Dv] */
	real *part;           /* [D or Dv] */
	tile *tile;
} backward_scratch;

static inline uint64_t backward_carve(const ingot__problem *p, void *base, backward_scratch *f) {
	arena a = {.base = base};
	f->q = arena_reals(&a, ROWS * p->head_dim);
	f->out = arena_reals(&a, ROWS * p->head_dim_v);
	f->dout = arena_reals(&a, ROWS * p->head_dim_v);
	f->k = arena_reals(&a, KEYS * p->head_dim);
	f->kt = arena_reals(&a, PITCH * p->head_dim);
	f->vt = arena_reals(&a, PITCH * p->head_dim_v);
	f->sum = arena_reals(&a, KEYS * p->head_dim);
	f->sum_v = arena_reals(&a, KEYS * p->head_dim_v);
	f->part = arena_reals(&a, p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v);
	f->tile = arena_take(&a, 1, sizeof(tile));
	return a.used;
}

/* The workspace: lse (natural) and delta of each stored query row, [sequences or 1][Hq][S or T]. */
typedef struct row_figures {
	real *lse, *delta;
} row_figures;

static inline uint64_t figures_carve(const ingot__problem *p, void *base, row_figures *w) {
	arena a = {.base = base};
	const int64_t rows = (p->q_side.stacked ? 1 : p->batch) * p->heads_q * p->q_side.capacity;
	w->lse = arena_reals(&a, rows);
	w->delta = arena_reals(&a, rows);
	return a.used;
}

#ifdef INGOT_HOST

typedef struct backward_tasks {
	ingot__task *rows, *keys, *bias, *sink;
} backward_tasks;

static inline void backward_plan(const ingot__problem *p, ingot__plan *plan, backward_tasks task) {
	backward_scratch unused;
	row_figures also_unused;
	const bool keys = p->dk.dtype != INGOT_NONE || p->dv.dtype != INGOT_NONE, bias = p->dbias.dtype != INGOT_NONE;
	const bool sink = p->dsink.dtype != INGOT_NONE;
	const int64_t row_blocks = blocks_of(longest(&p->q_side), ROWS), key_blocks = blocks_of(longest(&p->k_side), KEYS);
	const double nanoseconds = p->pairs * (double)sizeof(real) * 0.05, dims = (double)(p->head_dim + p->head_dim_v);
	const int64_t *const n = p->dbias.shape;
	const ingot__step step[INGOT__STEPS] = {
		{.name = "rows",
	     .task = task.rows,
	     .tasks = p->dq.dtype != INGOT_NONE || keys || bias || sink ? p->batch * p->heads_q * row_blocks : 0,
	     .work = nanoseconds * (dims * (REFERENCE_F64 ? 4 : 1) + (double)p->head_dim)},
		{.name = "keys",
	     .task = task.keys,
	     .tasks = keys ? p->batch * p->heads_k * key_blocks : 0,
	     .work = nanoseconds * dims * 2},
		{.name = "bias",
	     .task = task.bias,
	     .tasks = bias ? n[0] * n[1] * blocks_of(n[2], ROWS) * blocks_of(n[3], KEYS) : 0,
	     .work = nanoseconds * dims},
		{.name = "sink", .task = task.sink, .tasks = sink ? p->heads_q : 0, .work = 100},
	};
	plan->scratch_bytes = backward_carve(p, NULL, &unused);
	plan->workspace_bytes = figures_carve(p, NULL, &also_unused);
	for (int i = 0; i < INGOT__STEPS; i++) {
		if (step[i].tasks) plan->step[plan->steps++] = step[i];
	}
}

#else

static inline int64_t figures_index(const scope *s, int64_t row) {
	return (s->q.slot * s->p->heads_q + s->head) * s->p->q_side.capacity + s->q.start + row;
}

/* sum[c] += the tile's column c of weight times rows [ROWS][dim]: add_products, transposed. */
static inline void add_transposed(real *sum, real *part, const tile *t, real weight[ROWS][KEYS], const real *rows,
                                  int64_t dim) {
	for (int c = 0; c < t->keys; c++) {
		real valid_weight[ROWS];
		const real *valid_row[ROWS];
		int n = 0;
		for (int r = 0; r < t->rows; r++) {
			if (!t->valid[r][c]) continue;
			valid_weight[n] = weight[r][c];
			valid_row[n++] = rows + r * dim;
		}
		add_weighted(sum + c * dim, part, valid_weight, valid_row, n, dim);
	}
}

/* Fills a placed tile up to dproduct, from rows q and dout and the columns of K and V, all loaded. */
static inline void tile_gradients(const backward_scratch *f, const scope *s, const real *lse, const real *delta) {
	const ingot__problem *const p = s->p;
	tile *const t = f->tile;
	tile_scores(t, s, f->q, f->kt);
	multiply_columns(t->dweight, f->dout, f->vt, t->rows, p->head_dim_v);
	for (int r = 0; r < t->rows; r++) {
		real factor[KEYS];
		dropout_factors(factor, s, t->row + r, t->key);
		for (int c = 0; c < KEYS; c++) {
			if (!t->valid[r][c]) continue;
			/* lse is -inf when every valid score is: such weights are 0. */
			const real prob = lse[r] == REAL(-INFINITY) ? 0 : exp(t->score[r][c] - lse[r]);
			t->weight[r][c] = rounded(prob, p->v.dtype) * factor[c];
			t->dscore[r][c] = prob * (t->dweight[r][c] * factor[c] - delta[r]);
			t->dproduct[r][c] = rounded(t->dscore[r][c] * t->slope[r][c], p->q.dtype);
		}
	}
}

static inline void load_key_columns(const backward_scratch *f, const scope *s) {
	const ingot__problem *const p = s->p;
	load_keys(s, NULL, f->kt, &p->k, p->head_dim, f->tile->key, f->tile->keys, 1);
	load_keys(s, NULL, f->vt, &p->v, p->head_dim_v, f->tile->key, f->tile->keys, 1);
}

static inline real sink_of(const ingot__problem *p, int64_t head) {
	return p->features & INGOT__SINK ? ((const float *)p->sink.data)[head * p->sink.stride[0]] : REAL(-INFINITY);
}

#if REFERENCE_F64

/* lse and delta of rows whose q and dout are loaded: a pass for the maximum, one for the sum, one for delta. */
static inline void row_figures_of(const backward_scratch *f, const scope *s, int64_t row, int rows, real *lse,
                                  real *delta) {
	enum { MAXIMUM, SUM, DELTA, PASSES };
	tile *const t = f->tile;
	const real sink = sink_of(s->p, s->head);
	real top[ROWS], total[ROWS];
	int64_t first, last;
	keys_seen(s, row, rows, &first, &last);
	for (int r = 0; r < rows; r++) {
		top[r] = isnan(sink) ? REAL(-INFINITY) : sink;
		delta[r] = 0;
	}
	for (int pass = 0; pass < PASSES; pass++) {
		for (int64_t key = first / KEYS * KEYS; key < last; key += KEYS) {
			if (!tile_place(t, s, row, rows, key)) continue;
			load_key_columns(f, s);
			if (pass == DELTA) tile_gradients(f, s, lse, delta);
			else tile_scores(t, s, f->q, f->kt);
			for (int r = 0; r < rows; r++) {
				real part = 0;
				for (int c = 0; c < KEYS; c++) {
					if (!t->valid[r][c]) continue;
					if (pass == MAXIMUM) top[r] = t->score[r][c] > top[r] ? t->score[r][c] : top[r];
					else part += pass == SUM ? exp(t->score[r][c] - top[r]) : t->weight[r][c] * t->dweight[r][c];
				}
				if (pass == SUM) total[r] += part;
				if (pass == DELTA) delta[r] += part;
			}
		}
		for (int r = 0; r < rows; r++) {
			if (pass == MAXIMUM) {
				top[r] = top[r] == REAL(-INFINITY) ? 0 : top[r];
				total[r] = exp(sink - top[r]);
			}
			if (pass == SUM) lse[r] = total[r] == 0 ? REAL(-INFINITY) : top[r] + log(total[r]);
		}
	}
}

#else

/* lse and delta of rows whose dout is loaded, from the forward's results. A row without a valid pair has no gradient, so
 * its dO, which may be anything, must not reach delta. */
static inline void row_figures_of(const backward_scratch *f, const scope *s, int64_t row, int rows, real *lse,
                                  real *delta) {
	const ingot__problem *const p = s->p;
	const tile *const t = f->tile;
	bool any[ROWS] = {false};
	int64_t first, last;
	keys_seen(s, row, rows, &first, &last);
	for (int64_t key = first / KEYS * KEYS; key < last; key += KEYS) {
		if (!tile_place(f->tile, s, row, rows, key)) continue;
		for (int r = 0; r < rows; r++) {
			for (int c = 0; c < KEYS; c++) any[r] |= t->valid[r][c];
		}
	}
	load_rows(s, f->out, &p->out, p->head_dim_v, row, rows, 1);
	for (int r = 0; r < rows; r++) {
		lse[r] = ingot__load(p->lse.data, ingot__lse_offset(p, s->q, s->b, s->head, row + r), INGOT_F32);
		if (p->lse_base == INGOT_LSE_BASE2) lse[r] *= REAL(0.69314718055994530942); /* ln 2 */
		delta[r] = 0;
		for (int64_t d = 0; any[r] && d < p->head_dim_v; d++)
			delta[r] += f->dout[r * p->head_dim_v + d] * f->out[r * p->head_dim_v + d];
	}
}

#endif

/* Task of step "rows": lse, delta and dQ of ROWS query rows of one head of one sequence. */
static inline void backward_rows(const ingot__problem *p, void *workspace, void *scratch, int64_t index) {
	backward_scratch f;
	row_figures w;
	(void)backward_carve(p, scratch, &f);
	(void)figures_carve(p, workspace, &w);
	const int64_t blocks = blocks_of(longest(&p->q_side), ROWS), row = index % blocks * ROWS,
				  head = index / blocks % p->heads_q;
	const scope s = scope_of(p, index / blocks / p->heads_q, head, NULL);
	const int rows = (int)ingot__clamp(s.q.count - row, 0, ROWS);
	if (!rows) return;
	load_rows(&s, f.q, &p->q, p->head_dim, row, rows, 1);
	load_rows(&s, f.dout, &p->dout, p->head_dim_v, row, rows, 1);
	real lse[ROWS], delta[ROWS];
	row_figures_of(&f, &s, row, rows, lse, delta);
	memcpy(w.lse + figures_index(&s, row), lse, (size_t)rows * sizeof *lse);
	memcpy(w.delta + figures_index(&s, row), delta, (size_t)rows * sizeof *delta);
	if (p->dq.dtype == INGOT_NONE) return;

	int64_t first, last;
	keys_seen(&s, row, rows, &first, &last);
	for (int64_t d = 0; d < rows * p->head_dim; d++) f.sum[d] = 0;
	for (int64_t key = first / KEYS * KEYS; key < last; key += KEYS) {
		if (!tile_place(f.tile, &s, row, rows, key)) continue;
		load_key_columns(&f, &s);
		load_keys(&s, f.k, NULL, &p->k, p->head_dim, key, f.tile->keys, 1);
		tile_gradients(&f, &s, lse, delta);
		add_products(f.sum, f.part, f.tile, f.tile->dproduct, f.k, p->head_dim);
	}
	for (int r = 0; r < rows; r++)
		store_values(&p->dq, ingot__row_offset(&p->dq, s.q, head, row + r), f.sum + r * p->head_dim, p->head_dim,
		             s.scale);
}

/* Places the tile and loads its rows: whether it has a valid pair. Its gradients need the columns of K and V besides. */
static inline bool place_and_load_rows(const backward_scratch *f, const scope *s, int64_t row, int64_t key) {
	const ingot__problem *const p = s->p;
	const int rows = (int)ingot__clamp(s->q.count - row, 0, ROWS);
	int64_t first, last;
	keys_seen(s, row, rows, &first, &last);
	if (last <= key || first >= key + KEYS || !tile_place(f->tile, s, row, rows, key)) return false;
	load_rows(s, f->q, &p->q, p->head_dim, row, rows, 1);
	load_rows(s, f->dout, &p->dout, p->head_dim_v, row, rows, 1);
	return true;
}

/* Task of step "keys": dK and dV of KEYS keys of one key head of one sequence, over its group's heads and all rows. */
static inline void backward_keys(const ingot__problem *p, void *workspace, void *scratch, int64_t index) {
	backward_scratch f;
	row_figures w;
	(void)backward_carve(p, scratch, &f);
	(void)figures_carve(p, workspace, &w);
	const int64_t blocks = blocks_of(longest(&p->k_side), KEYS), key = index % blocks * KEYS;
	const int64_t head_k = index / blocks % p->heads_k, b = index / blocks / p->heads_k;
	scope s = scope_of(p, b, head_k * p->group, NULL);
	const int keys = (int)ingot__clamp(s.k.count - key, 0, KEYS);
	if (!keys) return;
	for (int64_t d = 0; d < keys * p->head_dim; d++) f.sum[d] = 0;
	for (int64_t d = 0; d < keys * p->head_dim_v; d++) f.sum_v[d] = 0;
	bool loaded = false;
	for (int64_t h = 0; h < p->group; h++) {
		s.head = head_k * p->group + h;
		for (int64_t row = 0; row < s.q.count; row += ROWS) {
			if (!place_and_load_rows(&f, &s, row, key)) continue;
			if (!loaded) load_key_columns(&f, &s);
			loaded = true;
			const int64_t at = figures_index(&s, row);
			tile_gradients(&f, &s, w.lse + at, w.delta + at);
			add_transposed(f.sum, f.part, f.tile, f.tile->dproduct, f.q, p->head_dim);
			add_transposed(f.sum_v, f.part, f.tile, f.tile->weight, f.dout, p->head_dim_v);
		}
	}
	for (int c = 0; c < keys; c++) {
		if (p->dk.dtype != INGOT_NONE)
			store_values(&p->dk, ingot__row_offset(&p->dk, s.k, head_k, key + c), f.sum + c * p->head_dim, p->head_dim,
			             s.scale);
		if (p->dv.dtype != INGOT_NONE)
			store_values(&p->dv, ingot__row_offset(&p->dv, s.k, head_k, key + c), f.sum_v + c * p->head_dim_v,
			             p->head_dim_v, 1);
	}
}

/* The first and past-the-last index that is summed into one element or block at `at` of an axis of dbias. */
static inline void summed(int64_t extent, int64_t at, int64_t block, int64_t whole, int64_t *first, int64_t *last) {
	*first = extent == 1 ? 0 : at;
	*last = extent == 1 ? whole : at + block < whole ? at + block : whole;
}

/* Task of step "bias": ROWS by KEYS elements of dbias, or the one that stands for a whole axis, over all that is summed. */
static inline void backward_bias(const ingot__problem *p, void *workspace, void *scratch, int64_t index) {
	backward_scratch f;
	row_figures w;
	(void)backward_carve(p, scratch, &f);
	(void)figures_carve(p, workspace, &w);
	const int64_t *const n = p->dbias.shape, *const stride = p->dbias.stride;
	const int64_t row_blocks = blocks_of(n[2], ROWS), key_blocks = blocks_of(n[3], KEYS);
	const int64_t at_key = index % key_blocks * KEYS, at_row = index / key_blocks % row_blocks * ROWS;
	const int64_t at_head = index / key_blocks / row_blocks % n[1], at_b = index / key_blocks / row_blocks / n[1];
	real sum[ROWS][KEYS] = {{0}};
	int64_t b, last_b, first_head, last_head;
	summed(n[0], at_b, 1, p->batch, &b, &last_b);
	summed(n[1], at_head, 1, p->heads_q, &first_head, &last_head);
	for (; b < last_b; b++) {
		for (int64_t head = first_head; head < last_head; head++) {
			const scope s = scope_of(p, b, head, NULL);
			int64_t row, last_row, first_key, last_key;
			summed(n[2], at_row, ROWS, s.q.count, &row, &last_row);
			summed(n[3], at_key, KEYS, s.k.count, &first_key, &last_key);
			for (; row < last_row; row += ROWS) {
				for (int64_t key = first_key; key < last_key; key += KEYS) {
					if (!place_and_load_rows(&f, &s, row, key)) continue;
					load_key_columns(&f, &s);
					tile_gradients(&f, &s, w.lse + figures_index(&s, row), w.delta + figures_index(&s, row));
					real part[ROWS][KEYS] = {{0}};
					for (int r = 0; r < f.tile->rows; r++) {
						for (int c = 0; c < f.tile->keys; c++) {
							if (f.tile->valid[r][c]) part[n[2] == 1 ? 0 : r][n[3] == 1 ? 0 : c] += f.tile->dscore[r][c];
						}
					}
					for (int r = 0; r < ROWS; r++) {
						for (int c = 0; c < KEYS; c++) sum[r][c] += part[r][c];
					}
				}
			}
		}
	}
	for (int64_t r = 0; r < ROWS && at_row + r < n[2]; r++) {
		for (int64_t c = 0; c < KEYS && at_key + c < n[3]; c++)
			ingot__store(p->dbias.data,
			             at_b * stride[0] + at_head * stride[1] + (at_row + r) * stride[2] + (at_key + c) * stride[3],
			             p->dbias.dtype, (float)sum[r][c]);
	}
}

/* Task of step "sink": dSink of one head. The sink's weight is the only one without a value, so its dP is 0. */
static inline void backward_sink(const ingot__problem *p, void *workspace, int64_t head) {
	row_figures w;
	(void)figures_carve(p, workspace, &w);
	const real sink = sink_of(p, head);
	real sum = 0;
	for (int64_t b = 0; b < p->batch; b++) {
		const scope s = scope_of(p, b, head, NULL);
		for (int64_t from = 0; from < s.q.count; from += LEVEL) {
			const int64_t to = from + LEVEL < s.q.count ? from + LEVEL : s.q.count;
			real part = 0;
			for (int64_t row = from; row < to; row++) {
				const real lse = w.lse[figures_index(&s, row)];
				if (lse != REAL(-INFINITY)) part += exp(sink - lse) * w.delta[figures_index(&s, row)];
			}
			sum -= part;
		}
	}
	ingot__store(p->dsink.data, head * p->dsink.stride[0], INGOT_F32, (float)sum);
}

#endif
