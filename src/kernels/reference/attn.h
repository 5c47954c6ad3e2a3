/*
 * What the textbook forward and backward share: tiles of ROWS query rows by KEYS keys of one head, computed literally by
 * the formula of the specification. A kernel file defines REFERENCE_F64 and includes its body; with 0 every value is fp32
 * and P and dS are rounded to the storage type as the textbook does, with 1 every value is double and only what is stored
 * is rounded. Tiles exist so that a stored value is converted once for many products and so that inner loops are contiguous
 * and long sums have two levels; they never decide what is summed. A pair that is not valid is never computed with: its
 * memory may hold anything.
 */
#ifndef INGOT_KERNELS_REFERENCE_ATTN_H
#define INGOT_KERNELS_REFERENCE_ATTN_H

#include "../cpu.h"
/* exp, log and tanh of real's own precision. */
#include <tgmath.h>

#if REFERENCE_F64
typedef double real;
#else
typedef float real;
#endif

enum { ROWS = 16, KEYS = 64, LEVEL = 64 };

/* Between columns of keys: a cache line more than KEYS, since a power of two would put them all in a few cache sets. */
enum { PITCH = KEYS + 64 / (int)sizeof(real) };

static inline int64_t blocks_of(int64_t n, int64_t size) {
	return (n + size - 1) / size;
}

/* Most rows or keys that a sequence of this side can have. */
static inline int64_t longest(const ingot__side *side) {
	return side->max_seqlen < side->capacity ? side->max_seqlen : side->capacity;
}

/* ---- scratch: one bump pointer, used by the plan to count and by a task to carve ------------------------------------- */

typedef struct arena {
	char *base; /* NULL only counts */
	uint64_t used;
} arena;

static inline void *arena_take(arena *a, int64_t count, uint64_t size) {
	void *const at = a->base ? a->base + a->used : NULL;
	a->used += ((uint64_t)count * size + 63) / 64 * 64;
	return at;
}

static inline real *arena_reals(arena *a, int64_t count) {
	return arena_take(a, count, sizeof(real));
}

/* ---- tiles ------------------------------------------------------------------------------------------------------------ */

typedef struct tile {
	int64_t row, key; /* the first of each; key is a multiple of KEYS */
	int rows, keys;
	/* The rest is set and read for valid pairs only. */
	bool valid[ROWS][KEYS];
	real score[ROWS][KEYS];
	real slope[ROWS][KEYS];    /* d score / d (scale q.k) */
	real weight[ROWS][KEYS];   /* what multiplies V in forward (the division comes later) and dO in backward */
	real dweight[ROWS][KEYS];  /* backward: dO.V */
	real dscore[ROWS][KEYS];   /* backward: d loss / d score */
	real dproduct[ROWS][KEYS]; /* backward: d loss / d (scale q.k) */
} tile;

#ifndef INGOT_HOST

#define REAL(x) ((real)(x))

/* ---- one query head of one sequence ----------------------------------------------------------------------------------- */

typedef struct scope {
	const ingot__problem *p;
	int64_t b, head, head_k;
	ingot__span q, k;
	const int32_t *pages;
	int64_t off; /* of the mask and ALiBi */
	real scale;
	float q_factor, k_factor, v_factor;
	uint64_t seed, offset;
	real kept;    /* factor of what dropout keeps */
	real *decode; /* 8-bit: the 256 values, by code */
} scope;

static inline scope scope_of(const ingot__problem *p, int64_t b, int64_t head, real *decode) {
	scope s = {.p = p, .b = b, .head = head, .head_k = head / p->group, .kept = 1, .decode = decode};
	int64_t pages = 0;
	s.q = ingot__locate(&p->q_side, b);
	s.k = ingot__key_rows(p, b);
	if (p->features & INGOT__PAGED) s.pages = ingot__page_list(p, b, &pages);
	s.off = ingot__diagonal(p, s.q.count, s.k.count);
	s.scale = REAL(p->softmax_scale);
	s.q_factor = ingot__descale(p, &p->q_descale, b, head);
	s.k_factor = ingot__descale(p, &p->k_descale, b, head);
	s.v_factor = ingot__descale(p, &p->v_descale, b, head);
	if (p->features & INGOT__DROPOUT) {
		s.seed = ingot__dropout_seed(p);
		s.offset = ingot__dropout_offset(p);
		s.kept = 1 / (1 - REAL(p->dropout_p));
	}
	if (p->features & (INGOT__8BIT_KV | INGOT__8BIT_Q)) {
		for (int code = 0; code < 256; code++) decode[code] = ingot__from_f8((uint8_t)code, p->k.dtype);
	}
	return s;
}

/* What the textbook stores between its two products: x in the storage type; 8-bit inputs are computed in bf16. */
static inline real rounded(real x, int32_t dtype) {
#if REFERENCE_F64
	(void)dtype;
	return x;
#else
	switch (dtype) {
	case INGOT_F32: return x;
	case INGOT_F16: return ingot__from_f16(ingot__to_f16(x));
	default: return ingot__from_bf16(ingot__to_bf16(x));
	}
#endif
}

/* n stored values from an element offset on, pitch apart in `to`, 8-bit ones times their factor. */
static inline void load_values(const scope *s, real *to, int64_t pitch, const ingot_tensor *t, int64_t offset,
                               int64_t n, float factor) {
	switch (t->dtype) {
	case INGOT_F32:
		for (int64_t i = 0; i < n; i++) to[i * pitch] = ingot__load(t->data, offset + i, INGOT_F32);
		break;
	case INGOT_F16:
		for (int64_t i = 0; i < n; i++) to[i * pitch] = ingot__load(t->data, offset + i, INGOT_F16);
		break;
	case INGOT_BF16:
		for (int64_t i = 0; i < n; i++) to[i * pitch] = ingot__load(t->data, offset + i, INGOT_BF16);
		break;
	default: {
		const uint8_t *const code = (const uint8_t *)t->data + offset;
		for (int64_t i = 0; i < n; i++) to[i * pitch] = rounded(s->decode[code[i]] * REAL(factor), t->dtype);
	}
	}
}

/* Rows [row, row + rows) of Q, O or dO, one after another. */
static inline void load_rows(const scope *s, real *to, const ingot_tensor *t, int64_t dim, int64_t row, int rows,
                             float factor) {
	for (int r = 0; r < rows; r++)
		load_values(s, to + r * dim, 1, t, ingot__row_offset(t, s->q, s->head, row + r), dim, factor);
}

/* Keys [key, key + keys) of K or V: `rows` [KEYS][dim] and `columns` [dim][PITCH], either may be NULL. */
static inline void load_keys(const scope *s, real *rows, real *columns, const ingot_tensor *t, int64_t dim, int64_t key,
                             int keys, float factor) {
	for (int c = 0; c < keys; c++) {
		const int64_t offset = ingot__key_offset(s->p, t, s->k, s->pages, s->head_k, key + c);
		if (rows) load_values(s, rows + c * dim, 1, t, offset, dim, factor);
		if (columns) load_values(s, columns + c, PITCH, t, offset, dim, factor);
	}
}

/* Keys [*first, *last) that any of some rows sees by the mask alone. */
static inline void keys_seen(const scope *s, int64_t row, int rows, int64_t *first, int64_t *last) {
	int64_t unused;
	ingot__visible(s->p, row, s->off, s->k.count, first, &unused);
	ingot__visible(s->p, row + rows - 1, s->off, s->k.count, &unused, last);
}

/* ---- what a tile is filled with ---------------------------------------------------------------------------------------- */

static inline int64_t bias_offset(const scope *s, int64_t row, int64_t key) {
	const int64_t *const stride = s->p->bias.stride;
	return s->b * stride[0] + s->head * stride[1] + row * stride[2] + key * stride[3];
}

/* Places the tile and finds its valid pairs; whether there are any. */
static inline bool tile_place(tile *t, const scope *s, int64_t row, int rows, int64_t key) {
	const ingot__problem *const p = s->p;
	bool any = false;
	t->row = row, t->rows = rows, t->key = key;
	t->keys = (int)ingot__clamp(s->k.count - key, 0, KEYS);
	for (int r = 0; r < rows; r++) {
		int64_t first, last;
		ingot__visible(p, row + r, s->off, s->k.count, &first, &last);
		for (int c = 0; c < KEYS; c++) {
			bool valid = first <= key + c && key + c < last;
			if (valid && p->features & INGOT__BIAS_BOOL)
				valid = ((const uint8_t *)p->bias.data)[bias_offset(s, row + r, key + c)] != 0;
			if (valid && p->features & INGOT__BIAS)
				valid = ingot__load(p->bias.data, bias_offset(s, row + r, key + c), p->bias.dtype) != -INFINITY;
			t->valid[r][c] = valid;
			any |= valid;
		}
	}
	return any;
}

/* product[r][c] = dot of row r of a [rows][dim] and column c of b [dim][PITCH]; summed in two levels, for as many columns at
 * a time as registers hold. */
static inline void multiply_columns(real product[ROWS][KEYS], const real *a, const real *b, int rows, int64_t dim) {
	enum { STRIP = 128 / sizeof(real) };
	for (int r = 0; r < rows; r++) {
		for (int first = 0; first < KEYS; first += STRIP) {
			real sum[STRIP] = {0};
			for (int64_t from = 0; from < dim; from += LEVEL) {
				const int64_t to = from + LEVEL < dim ? from + LEVEL : dim;
				real part[STRIP] = {0};
				for (int64_t d = from; d < to; d++) {
					const real x = a[r * dim + d];
					for (int c = 0; c < STRIP; c++) part[c] += x * b[d * PITCH + first + c];
				}
				for (int c = 0; c < STRIP; c++) sum[c] += part[c];
			}
			for (int c = 0; c < STRIP; c++) product[r][first + c] = sum[c];
		}
	}
}

/* Steps 1 to 4 of the formula: scores of the valid pairs from rows q and columns k. */
static inline void tile_scores(tile *t, const scope *s, const real *q, const real *k) {
	const ingot__problem *const p = s->p;
	const real alibi = p->features & INGOT__ALIBI ? ingot__alibi_slope(p, s->b, s->head) : 0;
	multiply_columns(t->score, q, k, t->rows, p->head_dim);
	for (int r = 0; r < t->rows; r++) {
		for (int c = 0; c < KEYS; c++) {
			if (!t->valid[r][c]) continue;
			const int64_t i = t->row + r, j = t->key + c;
			real x = s->scale * t->score[r][c], slope = 1;
			if (p->features & INGOT__SOFTCAP) {
				const real cap = p->softcap, bent = tanh(x / cap);
				x = cap * bent;
				slope = 1 - bent * bent;
			}
			if (p->features & INGOT__ALIBI) {
				const int64_t distance = i + s->off - j;
				x -= alibi * REAL(distance < 0 ? -distance : distance);
			}
			if (p->features & INGOT__BIAS) x += ingot__load(p->bias.data, bias_offset(s, i, j), p->bias.dtype);
			t->score[r][c] = x;
			t->slope[r][c] = slope;
		}
	}
}

/* factor[c] = what dropout makes of pair (row, key + c): 0 or kept; without dropout 1. */
static inline void dropout_factors(real factor[KEYS], const scope *s, int64_t row, int64_t key) {
	for (int c = 0; c < KEYS; c++) factor[c] = 1;
	for (int c = 0; c < KEYS && s->p->features & INGOT__DROPOUT; c += 4) {
		uint32_t word[4];
		ingot__philox(s->seed, s->offset, ingot__dropout_index(s->p, s->b, s->head, row, key + c), word);
		for (int w = 0; w < 4; w++) factor[c + w] = word[w] >= s->p->dropout_threshold ? s->kept : 0;
	}
}

/* sum += the n weighted rows, four at a time to read and write part [dim] less often; part holds their own sum, so that a
 * long axis is summed in two levels. */
static inline void add_weighted(real *restrict sum, real *restrict part, const real weight[], const real *const row[],
                                int n, int64_t dim) {
	for (int64_t d = 0; d < dim; d++) part[d] = 0;
	int i = 0;
	for (; i + 4 <= n; i += 4) {
		const real w0 = weight[i], w1 = weight[i + 1], w2 = weight[i + 2], w3 = weight[i + 3];
		const real *const r0 = row[i], *const r1 = row[i + 1], *const r2 = row[i + 2], *const r3 = row[i + 3];
		for (int64_t d = 0; d < dim; d++) part[d] += w0 * r0[d] + w1 * r1[d] + (w2 * r2[d] + w3 * r3[d]);
	}
	for (; i < n; i++) {
		for (int64_t d = 0; d < dim; d++) part[d] += weight[i] * row[i][d];
	}
	for (int64_t d = 0; d < dim; d++) sum[d] += part[d];
}

/* sum[r] += the tile's row r of weight times rows [KEYS][dim]; valid pairs only. */
static inline void add_products(real *sum, real *part, const tile *t, real weight[ROWS][KEYS], const real *rows,
                                int64_t dim) {
	for (int r = 0; r < t->rows; r++) {
		real valid_weight[KEYS];
		const real *valid_row[KEYS];
		int n = 0;
		for (int c = 0; c < t->keys; c++) {
			if (!t->valid[r][c]) continue;
			valid_weight[n] = weight[r][c];
			valid_row[n++] = rows + c * dim;
		}
		add_weighted(sum + r * dim, part, valid_weight, valid_row, n, dim);
	}
}

static inline void store_values(const ingot_tensor *t, int64_t offset, const real *from, int64_t n, real factor) {
	for (int64_t i = 0; i < n; i++) ingot__store(t->data, offset + i, t->dtype, (float)(from[i] * factor));
}

#endif
#endif
