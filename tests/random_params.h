/*
 * Random calls for the fuzz target and for the test of a million: params of every operator, drawn from a byte source. Most
 * draws keep the fields consistent with each other, so that the call gets past the checks; then, half of the time, a few
 * fields or bytes are spoiled. Tensors point into one arena, each at its own place; a spoiled call loses its data pointers,
 * because its shapes say nothing any more about memory that exists.
 */
#ifndef INGOT_TESTS_RANDOM_PARAMS_H
#define INGOT_TESTS_RANDOM_PARAMS_H

#include <ingot.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

/* Bytes first, then a generator seeded by them: a short input is a whole call, too. */
typedef struct source {
	const uint8_t *bytes;
	size_t left;
	uint64_t state;
} source;

static inline uint64_t draw(source *s) {
	if (s->left > 0) {
		s->left--;
		s->state = s->state * 31 + *s->bytes;
		return *s->bytes++;
	}
	/* splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014) */
	uint64_t z = s->state += 0x9e3779b97f4a7c15u;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}

static inline int64_t below(source *s, int64_t n) {
	return (int64_t)(draw(s) % (uint64_t)n);
}

static inline bool one_in(source *s, int64_t n) {
	return below(s, n) == 0;
}

#define PICK(s, ...) \
	((const int64_t[]){__VA_ARGS__}[below((s), (int64_t)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))])

enum { ARENA_BYTES = 1 << 24 };

typedef struct random_call {
	int operator_index; /* in the order of INGOT_OPERATOR_LIST */
	union {
		uint32_t struct_size;
		ingot_attn_fwd_params attn_fwd;
		ingot_attn_bwd_params attn_bwd;
		ingot_attn_merge_params attn_merge;
		ingot_kv_append_params kv_append;
		ingot_attn_dropout_mask_params attn_dropout_mask;
		uint8_t bytes[1]; /* of whichever it is */
	} params;
	size_t size; /* of the params */
	ingot_stream stream;
	ingot_options options;
	bool spoiled; /* shapes and memory no longer agree: every data pointer is NULL */
} random_call;

typedef struct arena {
	uint8_t *memory; /* ARENA_BYTES */
	size_t used;
} arena;

static inline int64_t dtype_size(int32_t dtype) {
	switch (dtype) {
	case INGOT_F32:
	case INGOT_I32: return 4;
	case INGOT_F16:
	case INGOT_BF16: return 2;
	case INGOT_I64:
	case INGOT_U64: return 8;
	default: return 1;
	}
}

/* A tensor of that shape: dense in the order given, or with its axes 1 and 2 exchanged in memory, or with gaps. */
static inline ingot_tensor random_tensor(source *s, arena *a, int32_t dtype, int ndim, const int64_t *shape) {
	ingot_tensor t = {.dtype = dtype, .ndim = ndim};
	int64_t order[5] = {0, 1, 2, 3, 4};
	if (ndim >= 4 && one_in(s, 3)) {
		order[1] = 2;
		order[2] = 1;
	}
	int64_t step = 1;
	for (int n = ndim - 1; n >= 0; n--) {
		const int64_t axis = order[n];
		t.shape[axis] = shape[axis];
		t.stride[axis] = step;
		step *= shape[axis] > 0 ? shape[axis] : 1;
		if (n == ndim - 1 && ndim > 1 && one_in(s, 4)) step += below(s, 9);
	}
	const int64_t element = dtype_size(dtype);
	size_t place = (a->used + 63) / 64 * 64;
	if (one_in(s, 8)) place += (size_t)element;
	const size_t end = place + (size_t)(step * element);
	/* Out of room: no data, which the library must refuse. */
	if (end > ARENA_BYTES) return t;
	t.data = a->memory + place;
	a->used = end;
	return t;
}

static inline ingot_tensor tensor_1(source *s, arena *a, int32_t dtype, int64_t n) {
	return random_tensor(s, a, dtype, 1, (const int64_t[]){n});
}
static inline ingot_tensor tensor_2(source *s, arena *a, int32_t dtype, int64_t n0, int64_t n1) {
	return random_tensor(s, a, dtype, 2, (const int64_t[]){n0, n1});
}
static inline ingot_tensor tensor_3(source *s, arena *a, int32_t dtype, int64_t n0, int64_t n1, int64_t n2) {
	return random_tensor(s, a, dtype, 3, (const int64_t[]){n0, n1, n2});
}
static inline ingot_tensor tensor_4(source *s, arena *a, int32_t dtype, int64_t n0, int64_t n1, int64_t n2,
                                    int64_t n3) {
	return random_tensor(s, a, dtype, 4, (const int64_t[]){n0, n1, n2, n3});
}

/* An int32 array of lengths, starts or pages: mostly sensible, sometimes anything. */
static inline ingot_tensor random_indices(source *s, arena *a, int64_t n, int64_t most, bool rising) {
	ingot_tensor t = tensor_1(s, a, INGOT_I32, n);
	if (!t.data) return t;
	int64_t sum = 0;
	for (int64_t i = 0; i < n; i++) {
		int64_t value = below(s, most + 1);
		if (rising) {
			value = sum;
			sum += below(s, most + 1);
		}
		if (one_in(s, 16)) value = PICK(s, -1, 0, INT32_MAX, INT32_MIN, 1 << 20);
		const int32_t stored = (int32_t)value;
		memcpy((uint8_t *)t.data + i * 4, &stored, 4);
	}
	return t;
}

typedef struct shapes {
	int64_t b, hq, hk, sq, sk, d, dv;
	int32_t type, out_type;
} shapes;

static inline shapes random_shapes(source *s) {
	shapes x;
	x.b = PICK(s, 1, 1, 2, 3, 0);
	x.hk = PICK(s, 1, 1, 2, 3);
	x.hq = x.hk * PICK(s, 1, 1, 2, 4);
	x.sq = one_in(s, 24) ? below(s, 70) : below(s, 9);
	x.sk = one_in(s, 24) ? below(s, 140) : below(s, 17);
	x.d = one_in(s, 24) ? 1 + below(s, 512) : PICK(s, 8, 16, 64, 3);
	x.dv = one_in(s, 4) ? PICK(s, 1, 24, 64, 128) : x.d;
	x.type = (int32_t)PICK(s, INGOT_F32, INGOT_F16, INGOT_BF16);
	x.out_type = one_in(s, 8) ? (int32_t)PICK(s, INGOT_F32, INGOT_F16, INGOT_BF16) : x.type;
	return x;
}

/* One side of the variable-length word, its arrays, and its maximum. */
static inline uint32_t random_side(source *s, arena *a, int64_t b, int64_t rows, ingot_tensor *lengths,
                                   ingot_tensor *positions, int64_t *max_seqlen, bool *stacked) {
	const uint32_t length = (uint32_t)below(s, 3);
	*stacked = one_in(s, 2);
	uint32_t position = INGOT_POSITION_IMPLIED;
	if (*stacked) {
		position = (uint32_t)PICK(s, INGOT_POSITION_IMPLIED, INGOT_POSITION_ARRAY, INGOT_POSITION_REUSE);
		if (position == INGOT_POSITION_REUSE && length != INGOT_LENGTH_CUMULATIVE) position = INGOT_POSITION_IMPLIED;
		*max_seqlen = rows;
	}
	if (length == INGOT_LENGTH_CUMULATIVE) *lengths = random_indices(s, a, b + 1, rows, true);
	if (length == INGOT_LENGTH_INDIVIDUAL) *lengths = random_indices(s, a, b, rows, false);
	if (position == INGOT_POSITION_ARRAY) *positions = random_indices(s, a, b + below(s, 2), b * rows, false);
	return INGOT_SIDE(*stacked, length, position);
}

/* The fields that forward and backward share under the same names. */
#define RANDOM_ATTENTION(s, a, p, x)                                                                                  \
	do {                                                                                                              \
		(p)->mask = (int32_t)PICK(s, INGOT_MASK_NONE, INGOT_MASK_CAUSAL, INGOT_MASK_WINDOW);                          \
		(p)->align = (int32_t)PICK(s, INGOT_TOP_LEFT, INGOT_BOTTOM_RIGHT);                                            \
		if ((p)->mask == INGOT_MASK_WINDOW) {                                                                         \
			(p)->window_left = (int32_t)PICK(s, 0, 1, 5, -3, 64, INGOT_UNBOUNDED, INT32_MIN);                         \
			(p)->window_right = (int32_t)PICK(s, 0, 1, 5, -3, 64, INGOT_UNBOUNDED, INT32_MIN);                        \
		}                                                                                                             \
		if (one_in(s, 4)) (p)->softmax_scale = (float)PICK(s, -1, 1, 2) / 4;                                          \
		if (one_in(s, 4)) (p)->softcap = (float)PICK(s, 1, 30, 50);                                                   \
		if (one_in(s, 4)) {                                                                                           \
			(p)->dropout_p = (float)PICK(s, 0, 1, 50, 99) / 100;                                                      \
			(p)->dropout_seed = draw(s);                                                                              \
			(p)->dropout_offset = draw(s);                                                                            \
			if (one_in(s, 3)) {                                                                                       \
				(p)->dropout_seed = 0;                                                                                \
				(p)->dropout_seed_ptr = tensor_1(s, a, (int32_t)PICK(s, INGOT_U64, INGOT_I64), 1);                    \
			}                                                                                                         \
			if (one_in(s, 3)) (p)->dropout_offset_ptr = tensor_1(s, a, (int32_t)PICK(s, INGOT_U64, INGOT_I64), 1);    \
		}                                                                                                             \
		if (one_in(s, 4)) (p)->sink = tensor_1(s, a, INGOT_F32, (x).hq);                                              \
		if (one_in(s, 4))                                                                                             \
			(p)->alibi = one_in(s, 2) ? tensor_1(s, a, INGOT_F32, (x).hq) : tensor_2(s, a, INGOT_F32, (x).b, (x).hq); \
		if (one_in(s, 4))                                                                                             \
			(p)->bias = tensor_4(s, a, (int32_t)PICK(s, (x).type, INGOT_F32, INGOT_BOOL), one_in(s, 2) ? 1 : (x).b,   \
			                     one_in(s, 2) ? 1 : (x).hq, one_in(s, 4) ? 1 : (x).sq, one_in(s, 8) ? 1 : (x).sk);    \
		(p)->lse_base = (int32_t)PICK(s, INGOT_LSE_NATURAL, INGOT_LSE_NATURAL, INGOT_LSE_BASE2);                      \
	} while (0)

static inline void random_attn_fwd(source *s, arena *a, ingot_attn_fwd_params *p) {
	shapes x = random_shapes(s);
	int32_t kv_type = x.type;
	if (one_in(s, 8)) {
		kv_type = (int32_t)PICK(s, INGOT_F8_E4M3, INGOT_F8_E5M2, INGOT_F8_E4M3_FNUZ, INGOT_F8_E5M2_FNUZ);
		if (x.type == INGOT_F32) x.type = x.out_type = INGOT_F16;
		if (one_in(s, 2)) x.type = kv_type;
		if (one_in(s, 2)) p->k_descale = tensor_2(s, a, INGOT_F32, x.b, x.hk);
		if (one_in(s, 2)) p->v_descale = tensor_1(s, a, INGOT_F32, 1);
		if (x.type == kv_type && one_in(s, 2))
			p->q_descale = tensor_2(s, a, INGOT_F32, x.b, one_in(s, 2) ? x.hk : x.hq);
	}
	bool q_stacked = false, k_stacked = false;
	const bool paged = one_in(s, 5);
	if (one_in(s, 3) || paged) {
		const uint32_t q = random_side(s, a, x.b, x.sq, &p->q_lengths, &p->q_positions, &p->max_seqlen_q, &q_stacked);
		uint32_t k;
		if (paged) {
			const int64_t page_size = PICK(s, 1, 3, 16), pages = 1 + below(s, 9), max_pages = below(s, 6);
			const bool csr = one_in(s, 2);
			k = INGOT_SIDE(0, INGOT_LENGTH_INDIVIDUAL, 0);
			if (csr && one_in(s, 2)) k = INGOT_SIDE(0, INGOT_LENGTH_LAST_PAGE, 0);
			x.sk = page_size * max_pages;
			p->k_lengths = random_indices(s, a, x.b, x.sk, false);
			if (csr) {
				p->page_indptr = random_indices(s, a, x.b + 1, max_pages, true);
				p->page_indices = random_indices(s, a, x.b * max_pages, pages, false);
				p->batch = x.b;
				p->max_seqlen_k = x.sk;
			} else {
				p->page_table = tensor_2(s, a, INGOT_I32, x.b, max_pages);
			}
			p->k = tensor_4(s, a, kv_type, pages, page_size, x.hk, x.d);
			p->v = tensor_4(s, a, kv_type, pages, page_size, x.hk, x.dv);
		} else {
			k = random_side(s, a, x.b, x.sk, &p->k_lengths, &p->k_positions, &p->max_seqlen_k, &k_stacked);
		}
		if (q_stacked || k_stacked) p->batch = x.b;
		p->varlen = INGOT_VARLEN(q, k, q_stacked ? below(s, 2) : 0);
	}
	const int64_t tokens_q = x.b * x.sq, tokens_k = x.b * x.sk;
	p->q = q_stacked ? tensor_4(s, a, x.type, 1, x.hq, tokens_q, x.d) : tensor_4(s, a, x.type, x.b, x.hq, x.sq, x.d);
	if (p->k.dtype == INGOT_NONE) {
		p->k =
			k_stacked ? tensor_4(s, a, kv_type, 1, x.hk, tokens_k, x.d) : tensor_4(s, a, kv_type, x.b, x.hk, x.sk, x.d);
		p->v = k_stacked ? tensor_4(s, a, kv_type, 1, x.hk, tokens_k, x.dv)
		                 : tensor_4(s, a, kv_type, x.b, x.hk, x.sk, x.dv);
	}
	if (dtype_size(x.out_type) == 1) x.out_type = INGOT_BF16;
	p->out = q_stacked ? tensor_4(s, a, x.out_type, 1, x.hq, tokens_q, x.dv)
	                   : tensor_4(s, a, x.out_type, x.b, x.hq, x.sq, x.dv);
	if (one_in(s, 2)) {
		if (!q_stacked) p->lse = tensor_3(s, a, INGOT_F32, x.b, x.hq, x.sq);
		else if (p->varlen >> 16 & 1) p->lse = tensor_2(s, a, INGOT_F32, tokens_q, x.hq);
		else p->lse = tensor_2(s, a, INGOT_F32, x.hq, tokens_q);
	}
	RANDOM_ATTENTION(s, a, p, x);
	if (dtype_size(x.type) == 1 && p->bias.dtype != INGOT_BOOL && p->bias.dtype != INGOT_NONE) {
		/* With an 8-bit Q the bias has the output's type. */
		memset(&p->bias, 0, sizeof p->bias);
	}
	if (p->dropout_p > 0 && one_in(s, 3)) {
		p->dropout_seed_out = tensor_1(s, a, INGOT_U64, 1);
		p->dropout_offset_out = tensor_1(s, a, INGOT_U64, 1);
	}
}

static inline void random_attn_bwd(source *s, arena *a, ingot_attn_bwd_params *p) {
	const shapes x = random_shapes(s);
	bool q_stacked = false, k_stacked = false;
	if (one_in(s, 3)) {
		const uint32_t q = random_side(s, a, x.b, x.sq, &p->q_lengths, &p->q_positions, &p->max_seqlen_q, &q_stacked);
		const uint32_t k = random_side(s, a, x.b, x.sk, &p->k_lengths, &p->k_positions, &p->max_seqlen_k, &k_stacked);
		if (q_stacked || k_stacked) p->batch = x.b;
		p->varlen = INGOT_VARLEN(q, k, q_stacked ? below(s, 2) : 0);
	}
	const int64_t bq = q_stacked ? 1 : x.b, bk = k_stacked ? 1 : x.b;
	const int64_t sq = q_stacked ? x.b * x.sq : x.sq, sk = k_stacked ? x.b * x.sk : x.sk;
	p->q = tensor_4(s, a, x.type, bq, x.hq, sq, x.d);
	p->k = tensor_4(s, a, x.type, bk, x.hk, sk, x.d);
	p->v = tensor_4(s, a, x.type, bk, x.hk, sk, x.dv);
	p->out = tensor_4(s, a, x.out_type, bq, x.hq, sq, x.dv);
	p->dout = tensor_4(s, a, x.out_type, bq, x.hq, sq, x.dv);
	if (!q_stacked) p->lse = tensor_3(s, a, INGOT_F32, x.b, x.hq, x.sq);
	else if (p->varlen >> 16 & 1) p->lse = tensor_2(s, a, INGOT_F32, sq, x.hq);
	else p->lse = tensor_2(s, a, INGOT_F32, x.hq, sq);
	if (!one_in(s, 6)) p->dq = tensor_4(s, a, x.type, bq, x.hq, sq, x.d);
	if (!one_in(s, 6)) p->dk = tensor_4(s, a, x.type, bk, x.hk, sk, x.d);
	if (!one_in(s, 6)) p->dv = tensor_4(s, a, x.type, bk, x.hk, sk, x.dv);
	RANDOM_ATTENTION(s, a, p, x);
	if (p->bias.dtype != INGOT_NONE && p->bias.dtype != INGOT_BOOL && one_in(s, 2))
		p->dbias = random_tensor(s, a, p->bias.dtype, 4, p->bias.shape);
	if (p->sink.dtype != INGOT_NONE && one_in(s, 2)) p->dsink = tensor_1(s, a, INGOT_F32, x.hq);
}

static inline void random_attn_merge(source *s, arena *a, ingot_attn_merge_params *p) {
	const shapes x = random_shapes(s);
	const int64_t parts = one_in(s, 8) ? below(s, 9) : 1 + below(s, 4);
	p->lse_base = (int32_t)below(s, 2);
	if (one_in(s, 2)) {
		p->out_parts[0] = random_tensor(s, a, x.type, 5, (const int64_t[]){parts, x.b, x.hq, x.sq, x.dv});
		p->lse_parts[0] = tensor_4(s, a, INGOT_F32, parts, x.b, x.hq, x.sq);
	} else {
		for (int64_t i = 0; i < parts && i < INGOT_MERGE_PARTS; i++) {
			p->out_parts[i] = tensor_4(s, a, x.type, x.b, x.hq, x.sq, x.dv);
			p->lse_parts[i] = tensor_3(s, a, INGOT_F32, x.b, x.hq, x.sq);
		}
	}
	p->out = tensor_4(s, a, x.out_type, x.b, x.hq, x.sq, x.dv);
	if (one_in(s, 2)) p->lse = tensor_3(s, a, INGOT_F32, x.b, x.hq, x.sq);
}

static inline void random_kv_append(source *s, arena *a, ingot_kv_append_params *p) {
	const shapes x = random_shapes(s);
	int32_t cache_type = x.type;
	if (one_in(s, 4)) {
		cache_type = (int32_t)PICK(s, INGOT_F8_E4M3, INGOT_F8_E5M2, INGOT_F8_E4M3_FNUZ, INGOT_F8_E5M2_FNUZ);
		if (one_in(s, 2)) p->k_descale = tensor_2(s, a, INGOT_F32, x.b, x.hk);
		if (one_in(s, 2)) p->v_descale = tensor_1(s, a, INGOT_F32, 1);
	}
	bool stacked = false;
	const uint32_t side =
		random_side(s, a, x.b, x.sq, &p->new_lengths, &p->new_positions, &p->max_seqlen_new, &stacked);
	if (stacked) p->batch = x.b;
	const int64_t bn = stacked ? 1 : x.b, sn = stacked ? x.b * x.sq : x.sq;
	const bool with_v = !one_in(s, 6);
	p->k_new = tensor_4(s, a, x.type, bn, x.hk, sn, x.d);
	if (with_v) p->v_new = tensor_4(s, a, x.type, bn, x.hk, sn, x.dv);
	p->k_lengths = random_indices(s, a, x.b, x.sk, false);
	p->lengths_after = (int32_t)below(s, 2);
	uint32_t cache = INGOT_SIDE(0, INGOT_LENGTH_INDIVIDUAL, 0);
	if (one_in(s, 2)) {
		p->k = tensor_4(s, a, cache_type, x.b, x.hk, x.sk, x.d);
		if (with_v) p->v = tensor_4(s, a, cache_type, x.b, x.hk, x.sk, x.dv);
	} else {
		const int64_t page_size = PICK(s, 1, 3, 16), pages = 1 + below(s, 9), max_pages = below(s, 6);
		if (one_in(s, 2)) {
			p->page_table = tensor_2(s, a, INGOT_I32, x.b, max_pages);
		} else {
			p->page_indptr = random_indices(s, a, x.b + 1, max_pages, true);
			p->page_indices = random_indices(s, a, x.b * max_pages, pages, false);
			p->batch = x.b;
			p->max_seqlen_k = page_size * max_pages;
			if (p->lengths_after && one_in(s, 2)) cache = INGOT_SIDE(0, INGOT_LENGTH_LAST_PAGE, 0);
		}
		p->k = tensor_4(s, a, cache_type, pages, page_size, x.hk, x.d);
		if (with_v) p->v = tensor_4(s, a, cache_type, pages, page_size, x.hk, x.dv);
	}
	if (!with_v) memset(&p->v_descale, 0, sizeof p->v_descale);
	p->varlen = INGOT_VARLEN(side, cache, 0);
}

static inline void random_attn_dropout_mask(source *s, arena *a, ingot_attn_dropout_mask_params *p) {
	const shapes x = random_shapes(s);
	p->mask = tensor_4(s, a, INGOT_BOOL, x.b, x.hq, x.sq, x.sk);
	p->dropout_p = (float)below(s, 100) / 100;
	p->dropout_offset = draw(s);
	if (one_in(s, 3)) p->dropout_seed_ptr = tensor_1(s, a, INGOT_U64, 1);
	else p->dropout_seed = draw(s);
	if (one_in(s, 3)) p->dropout_offset_ptr = tensor_1(s, a, INGOT_I64, 1);
	if (one_in(s, 3)) {
		p->max_seqlen_q = x.sq;
		p->max_seqlen_k = x.sk;
	}
}

/* Every data pointer to NULL: params are a few plain words, then tensors in a row, then plain words. */
static inline void forget_data(random_call *c) {
	ingot_tensor *first = NULL;
	size_t count = 0;
	switch (c->operator_index) {
	case 0:
		first = &c->params.attn_fwd.q, count = (offsetof(ingot_attn_fwd_params, dropout_seed) - 8) / sizeof *first;
		break;
	case 1:
		first = &c->params.attn_bwd.q, count = (offsetof(ingot_attn_bwd_params, dropout_seed) - 8) / sizeof *first;
		break;
	case 2: first = c->params.attn_merge.out_parts, count = (sizeof c->params.attn_merge - 8) / sizeof *first; break;
	case 3:
		first = &c->params.kv_append.k_new, count = (offsetof(ingot_kv_append_params, batch) - 8) / sizeof *first;
		break;
	default: first = &c->params.attn_dropout_mask.mask, count = 3; break;
	}
	for (size_t i = 0; i < count; i++) first[i].data = NULL;
}

static inline void spoil(source *s, random_call *c) {
	const int64_t times = 1 + below(s, 3);
	for (int64_t n = 0; n < times; n++) {
		const size_t word = (size_t)below(s, (int64_t)(c->size / 4)) * 4;
		uint8_t *at = c->params.bytes + word;
		const int64_t wide[] = {
			0, 1, -1, 2, 3, 5, 17, 513, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, (int64_t)1 << 40};
		const float odd[] = {NAN, INFINITY, -INFINITY, -1, 1, 1e-45f, -0.0f, 3e38f};
		int64_t value = wide[below(s, (int64_t)(sizeof wide / sizeof *wide))];
		switch (below(s, 4)) {
		case 0: memcpy(at, &odd[below(s, 8)], 4); break;
		case 1: memcpy(at, &value, 4); break;
		case 2: value = (int64_t)draw(s), memcpy(at, &value, word + 8 <= c->size ? 8 : 4); break;
		default: memcpy(at, &value, word + 8 <= c->size ? 8 : 4); break;
		}
	}
	if (one_in(s, 16)) c->params.struct_size = (uint32_t)below(s, (int64_t)c->size + 64);
	/* Never claim more bytes than there are: reading beyond them is what the caller asked for. */
	if (c->params.struct_size > sizeof c->params) c->params.struct_size = sizeof c->params;
}

static inline void random_options(source *s, random_call *c) {
	static const char *const backends[] = {"",       "reference", "x86", "x86/attn_fwd_avx2", "attn_bwd_reference",
	                                       "nobody", ":",         "/"};
	c->options.struct_size = sizeof c->options;
	c->options.num_threads = 1;
	if (one_in(s, 4)) c->options.flags = (uint32_t)below(s, 8);
	if (one_in(s, 4)) c->options.backend = backends[below(s, (int64_t)(sizeof backends / sizeof *backends))];
	if (one_in(s, 32)) c->options.flags = (uint32_t)draw(s);
	if (one_in(s, 32)) c->options.num_threads = (int32_t)PICK(s, -1, 0, 1025, INT32_MAX, INT32_MIN);
	if (one_in(s, 32)) c->options.reserved = 1;
	if (one_in(s, 32)) c->options.struct_size = (uint32_t)below(s, (int64_t)sizeof c->options + 1);
	if (one_in(s, 32)) c->stream.type = (int32_t)PICK(s, 1, 2, 3, -1, INT32_MAX);
	if (one_in(s, 32)) c->stream.device = (int32_t)PICK(s, 1, -1, INT32_MAX);
}

static inline void random_call_draw(source *s, arena *a, random_call *c) {
	memset(c, 0, sizeof *c);
	a->used = 0;
	c->operator_index = (int)PICK(s, 0, 0, 0, 1, 1, 2, 3, 4);
	switch (c->operator_index) {
	case 0: c->size = sizeof c->params.attn_fwd, random_attn_fwd(s, a, &c->params.attn_fwd); break;
	case 1: c->size = sizeof c->params.attn_bwd, random_attn_bwd(s, a, &c->params.attn_bwd); break;
	case 2: c->size = sizeof c->params.attn_merge, random_attn_merge(s, a, &c->params.attn_merge); break;
	case 3: c->size = sizeof c->params.kv_append, random_kv_append(s, a, &c->params.kv_append); break;
	default:
		c->size = sizeof c->params.attn_dropout_mask, random_attn_dropout_mask(s, a, &c->params.attn_dropout_mask);
		break;
	}
	c->params.struct_size = (uint32_t)c->size;
	random_options(s, c);
	if (one_in(s, 2)) {
		spoil(s, c);
		c->spoiled = true;
		forget_data(c);
	}
}

typedef enum verb { RUN, WORKSPACE, PREPARE, EXPLAIN } verb;

/* Makes the call by that verb. */
static inline ingot_status random_call_make(random_call *c, verb v, char *text, size_t capacity) {
	uint64_t bytes;
	size_t needed;
	switch (c->operator_index) {
#define CASE(index, name)                                                                                     \
	case index:                                                                                               \
		if (v == RUN) return ingot_##name(&c->params.name, c->stream, &c->options);                           \
		if (v == WORKSPACE) return ingot_##name##_workspace(&c->params.name, c->stream, &c->options, &bytes); \
		if (v == PREPARE) return ingot_##name##_prepare(&c->params.name, c->stream, &c->options);             \
		return ingot_##name##_explain(&c->params.name, c->stream, &c->options, INGOT_JSON, text, capacity, &needed)
		CASE(0, attn_fwd);
		CASE(1, attn_bwd);
		CASE(2, attn_merge);
		CASE(3, kv_append);
	default: CASE(4, attn_dropout_mask);
#undef CASE
	}
}

#endif
