/* See case.h. */
#include "case.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

const char *const test_output_names[TEST_OUTPUTS] = {
	"out", "lse", "dq", "dk", "dv", "dbias", "dsink", "dropout_seed_out", "dropout_offset_out"};

/* Streams of random numbers: one a use, so that a change of one does not move another. */
enum {
	RANDOM_Q,
	RANDOM_K,
	RANDOM_V,
	RANDOM_DOUT,
	RANDOM_BIAS,
	RANDOM_ALIBI,
	RANDOM_SINK,
	RANDOM_DESCALE,
	RANDOM_QLEN,
	RANDOM_KLEN,
	RANDOM_GAP,
	RANDOM_PAGE,
	RANDOM_DROPOUT
};

enum { SPARE_ROWS = 3, SPARE_PAGES = 2 };

__attribute__((format(printf, 3, 4))) static bool fail(char *error, size_t capacity, const char *format, ...) {
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(error, capacity, format, arguments);
	va_end(arguments);
	return false;
}

static int64_t clamp(int64_t x, int64_t low, int64_t high) {
	return x < low ? low : x > high ? high : x;
}

/* ---- lengths ---- */

typedef struct side {
	bool stacked;
	int length, position;
	int64_t max;          /* no sequence is longer */
	int64_t capacity;     /* rows of the token axis */
	int64_t *raw;         /* lengths as given, perhaps nonsense */
	int64_t *len, *start; /* as clamped */
} side;

static int64_t random_length(uint64_t seed, uint64_t stream, int64_t b, int64_t max) {
	const uint64_t x = tool_hash(seed, stream, (uint64_t)b);
	if (x % 8 == 0) return 0;
	if (x % 8 == 1 || x % 8 == 2) return max;
	return (int64_t)((x >> 8) % (uint64_t)(max + 1));
}

/* Lengths, starts and the token axis of one side; the arrays the call reads go into lengths and positions. */
static void lay_out_side(test_case *c, side *s, int64_t byte, const int64_t *given, int64_t count, uint64_t stream,
                         buffer *lengths, buffer *positions) {
	const int64_t batch = c->p.batch;
	const bool allocate = c->mode != CASE_SHAPES;
	s->stacked = byte & 1;
	s->length = byte >> 1 & 3;
	s->position = byte >> 3 & 3;
	int64_t total = 0;
	for (int64_t b = 0; b < batch; b++) {
		s->raw[b] = s->length == INGOT_LENGTH_MAX ? s->max
		            : count                       ? given[b]
		            : c->mode == CASE_SPEED       ? s->max
		                                          : random_length(c->seed, stream, b, s->max);
		total += s->raw[b] > 0 ? s->raw[b] : 0;
	}
	int64_t at = 0;
	int64_t *start = tool_alloc(sizeof(int64_t) * (size_t)(batch + 1)); /* as written into the arrays */
	for (int64_t b = 0; b < batch; b++) {
		if (s->position == INGOT_POSITION_ARRAY)
			at += (int64_t)(tool_hash(c->seed, RANDOM_GAP, (uint64_t)b + stream * 1000) % 4);
		start[b] = !s->stacked ? 0 : s->position == INGOT_POSITION_IMPLIED ? b * s->max : at;
		at += s->position == INGOT_POSITION_REUSE ? s->raw[b] : s->raw[b] > 0 ? s->raw[b] : 0;
	}
	start[batch] = at;
	s->capacity = !s->stacked                             ? s->max
	              : s->position == INGOT_POSITION_IMPLIED ? batch * s->max
	                                                      : (at > total ? at : total) + SPARE_ROWS;
	for (int64_t b = 0; b < batch; b++) {
		s->start[b] = clamp(start[b], 0, s->capacity);
		const int64_t most = s->capacity - s->start[b];
		s->len[b] = clamp(s->raw[b], 0, s->max < most ? s->max : most);
	}
	if (s->length != INGOT_LENGTH_MAX) {
		const int64_t n = batch + (s->length == INGOT_LENGTH_CUMULATIVE);
		buffer_dense(lengths, INGOT_I32, 1, &n, 1, allocate);
		buffer_fill_dead(lengths);
		int32_t *values = lengths->t.data;
		int64_t sum = 0;
		for (int64_t b = 0; values && b < batch; b++) {
			if (s->length == INGOT_LENGTH_CUMULATIVE) {
				values[b] = (int32_t)sum;
				sum += s->raw[b];
				values[b + 1] = (int32_t)sum;
			} else {
				values[b] = (int32_t)s->raw[b];
			}
		}
		if (values && batch == 0 && n == 1) values[0] = 0;
	}
	if (s->position == INGOT_POSITION_ARRAY) {
		const int64_t n = batch + (int64_t)(tool_hash(c->seed, RANDOM_GAP, 7777) % 2);
		buffer_dense(positions, INGOT_I32, 1, &n, 1, allocate);
		buffer_fill_dead(positions);
		for (int64_t b = 0; positions->t.data && b < n; b++) ((int32_t *)positions->t.data)[b] = (int32_t)start[b];
	}
	free(start);
}

/* Page lists: pages in a random physical order, some never used; past the end of a dense row, an id that faults if used. */
static void lay_out_pages(test_case *c, side *s) {
	const problem *p = &c->p;
	const int64_t size = p->page_size, batch = p->batch;
	const bool allocate = c->mode != CASE_SHAPES;
	c->page_columns = (p->sk + size - 1) / size;
	s->max = p->pages == PAGES_DENSE ? c->page_columns * size : p->sk;
	s->capacity = s->max;
	s->length = p->pages == PAGES_CSR_LAST ? INGOT_LENGTH_LAST_PAGE : INGOT_LENGTH_INDIVIDUAL;
	int64_t used = 0, *first = tool_alloc(sizeof(int64_t) * (size_t)(batch + 1));
	for (int64_t b = 0; b < batch; b++) {
		s->raw[b] = p->k_given              ? p->k_lengths[b]
		            : c->mode == CASE_SPEED ? p->sk
		                                    : random_length(c->seed, RANDOM_KLEN, b, p->sk);
		s->len[b] = clamp(s->raw[b], 0, p->pages == PAGES_DENSE ? s->max : p->sk);
		s->start[b] = 0;
		first[b] = used;
		used += (s->len[b] + size - 1) / size;
	}
	first[batch] = used;
	/* The first page of all sequences that fill it may be one. */
	int64_t *order = tool_alloc(sizeof(int64_t) * (size_t)(used + SPARE_PAGES));
	c->pages_used = used + SPARE_PAGES;
	for (int64_t i = 0; i < c->pages_used; i++) order[i] = i;
	for (int64_t i = c->pages_used - 1; i > 0; i--) {
		const int64_t j = (int64_t)(tool_hash(c->seed, RANDOM_PAGE, (uint64_t)i) % (uint64_t)(i + 1)), kept = order[i];
		order[i] = order[j];
		order[j] = kept;
	}
	c->page_of = tool_alloc(sizeof(int32_t) * (size_t)(batch * c->page_columns + 1));
	for (int64_t b = 0; b < batch; b++)
		for (int64_t i = 0; i < c->page_columns; i++) {
			const int64_t pages = (s->len[b] + size - 1) / size;
			c->page_of[b * c->page_columns + i] = i < pages ? (int32_t)order[first[b] + i] : 0x7ffffff0;
		}
	if (p->page_share)
		for (int64_t b = 1; b < batch; b++)
			if (s->len[0] >= size && s->len[b] >= size) c->page_of[b * c->page_columns] = c->page_of[0];
	buffer_dense(&c->k_lengths, INGOT_I32, 1, &batch, 1, allocate);
	buffer_fill_dead(&c->k_lengths);
	for (int64_t b = 0; c->k_lengths.t.data && b < batch; b++) {
		const int64_t pages = (s->len[b] + size - 1) / size;
		((int32_t *)c->k_lengths.t.data)[b] =
			(int32_t)(p->pages == PAGES_CSR_LAST ? (pages ? s->len[b] - (pages - 1) * size : 0x7ffffff0) : s->raw[b]);
	}
	if (p->pages == PAGES_DENSE) {
		const int64_t shape[] = {batch, c->page_columns}, stride[] = {c->page_columns + 1, 1};
		buffer_make(&c->page_table, INGOT_I32, 2, shape, stride, 1, allocate);
		buffer_fill_dead(&c->page_table);
		for (int64_t i = 0; c->page_table.t.data && i < batch * c->page_columns; i++)
			((int32_t *)c->page_table.t.data)[i / c->page_columns * stride[0] + i % c->page_columns] = c->page_of[i];
	} else {
		const int64_t n = batch + 1;
		buffer_dense(&c->page_indptr, INGOT_I32, 1, &n, 1, allocate);
		buffer_dense(&c->page_indices, INGOT_I32, 1, &used, 1, allocate);
		buffer_fill_dead(&c->page_indptr);
		buffer_fill_dead(&c->page_indices);
		for (int64_t b = 0; c->page_indptr.t.data && b <= batch; b++) {
			((int32_t *)c->page_indptr.t.data)[b] = (int32_t)first[b];
			for (int64_t i = first[b]; b < batch && i < first[b + 1]; i++)
				((int32_t *)c->page_indices.t.data)[i] = c->page_of[b * c->page_columns + i - first[b]];
		}
	}
	free(first);
	free(order);
}

/* ---- layouts ---- */

/* Strides of [B,H,S,E] (or, heads_first off, pages [N,page,H,E]). */
static void strides_of(const problem *p, const int64_t shape[4], int64_t stride[4]) {
	const int64_t width = shape[3] + p->pitch;
	stride[3] = 1;
	if (p->layout == LAYOUT_BHSD) {
		stride[2] = width;
		stride[1] = shape[2] * width;
		stride[0] = shape[1] * stride[1];
		return;
	}
	stride[1] = width;
	stride[2] = shape[1] * width * (p->layout == LAYOUT_PACKED ? 3 : 1);
	stride[0] = shape[2] * stride[2];
}

static void page_strides(const problem *p, const int64_t shape[4], int64_t stride[4]) {
	const int64_t width = shape[3] + p->pitch;
	stride[3] = 1;
	stride[1] = p->page_heads_first ? width : shape[2] * width;
	stride[2] = p->page_heads_first ? shape[1] * width : width;
	stride[0] = shape[1] * shape[2] * width;
}

static void q_shape(const test_case *c, int64_t width, int64_t shape[4]) {
	const bool stacked = c->p.q_side & 1;
	shape[0] = stacked ? 1 : c->p.batch;
	shape[1] = c->p.heads_q;
	shape[2] = stacked ? c->q.t.shape[2] : c->max_q;
	shape[3] = width;
}

static void k_shape(const test_case *c, int64_t width, int64_t shape[4]) {
	shape[0] = c->k.t.shape[0];
	shape[1] = c->k.t.shape[1];
	shape[2] = c->k.t.shape[2];
	shape[3] = width;
}

/* ---- values ---- */

static float value_of(const test_case *c, uint64_t stream, int64_t b, int64_t h, int64_t i, int64_t e,
                      const int64_t shape[4]) {
	const uint64_t index = (uint64_t)(((b * shape[1] + h) * shape[2] + i) * shape[3] + e);
	const float x = tool_normal(c->seed, stream, index);
	const bool q = stream == RANDOM_Q, k = stream == RANDOM_K, v = stream == RANDOM_V;
	switch ((problem_data)c->p.data) {
	case DATA_X5: return stream == RANDOM_DOUT ? x : 5 * x;
	case DATA_GROW:
		if (q) return 0.5f + 0.1f * fabsf(x);
		return k ? 0.05f * (float)i + 0.1f * x : x;
	case DATA_COLD:
		if ((q || k) && e == 0) return q ? 1.0f : -120.0f * sqrtf((float)shape[3]);
		return q || k ? 0.1f * x : x;
	case DATA_LOUD:
		if (stream == RANDOM_DOUT) return i == 0 ? 1000 * x : x;
		if (v) return x;
		return (e % 93 == 7 ? 8.0f : x + 0.5f) * (k && i == 0 ? 1.5f : 1.0f);
	case DATA_ZERO_Q: return q ? 0 : x;
	case DATA_ONES: return stream == RANDOM_DOUT ? x : 1;
	case DATA_BIG_V: return q ? 0 : v ? 60000.0f : x;
	case DATA_ALTERNATE_V: return q ? 0 : v ? (i % 2 ? -60000.0f : 60000.0f) : x;
	case DATA_NAN_ROW: return q && i == c->max_q / 2 && h == 0 && e == 0 ? NAN : x;
	default: return x;
	}
}

/* What the storage type makes of x. */
static float rounded(float x, int32_t dtype) {
	if (dtype == INGOT_F32) return x;
	uint32_t cell = 0;
	tool_store(&cell, 0, dtype, x);
	return tool_load(&cell, 0, dtype);
}

static bool page_is_shared(const test_case *c, int64_t b, int64_t j) {
	return c->p.page_share && b > 0 && j < c->p.page_size && c->len_k[0] >= c->p.page_size &&
	       c->len_k[b] >= c->p.page_size;
}

/* Element offset of key row j in K or V. */
static int64_t key_at(const test_case *c, const ingot_tensor *t, int64_t b, int64_t h, int64_t j) {
	if (c->p.pages) {
		const int64_t page = c->page_of[b * c->page_columns + j / c->p.page_size];
		return page * t->stride[0] + j % c->p.page_size * t->stride[1] + h * t->stride[2];
	}
	const bool stacked = c->p.k_side & 1;
	return (stacked ? 0 : b * t->stride[0]) + h * t->stride[1] + (c->start_k[b] + j) * t->stride[2];
}

static int64_t query_at(const test_case *c, const ingot_tensor *t, int64_t b, int64_t h, int64_t i) {
	const bool stacked = c->p.q_side & 1;
	return (stacked ? 0 : b * t->stride[0]) + h * t->stride[1] + (c->start_q[b] + i) * t->stride[2];
}

/* Fills the live rows of q or dout, or of k or v, and the plain array of them. */
static float *fill(test_case *c, buffer *t, uint64_t stream, bool keys, int64_t width) {
	const int64_t heads = keys ? c->p.heads_k : c->p.heads_q, rows = keys ? c->max_k : c->max_q;
	const int64_t shape[4] = {c->p.batch, heads, rows, width};
	const int32_t dtype = t->t.dtype;
	float *plain = NULL;
	if (c->mode == CASE_SPEED && c->p.data == DATA_NORMAL) {
		buffer_fill_normal(t, tool_hash(c->seed, stream, 0));
		return NULL;
	}
	if (c->mode == CASE_CHECK) {
		buffer_fill_dead(t);
		plain = tool_alloc(sizeof(float) * (size_t)(shape[0] * heads * rows * width));
	}
	for (int64_t b = 0; b < c->p.batch; b++)
		for (int64_t h = 0; h < heads; h++)
			for (int64_t i = 0; i < (keys ? c->len_k[b] : c->len_q[b]); i++) {
				if (keys && c->dead_key && c->dead_key[b * c->max_k + i]) continue;
				/* Along a stride of 0 all values are one. */
				const bool flat_q = stream == RANDOM_DOUT && c->p.dout_stride0;
				const int64_t vb = flat_q || (keys && page_is_shared(c, b, i)) ? 0 : b;
				const int64_t vh = flat_q || (keys && c->p.kv_stride0) ? 0 : h, vi = flat_q ? 0 : i;
				const int64_t at = keys ? key_at(c, &t->t, b, h, i) : query_at(c, &t->t, b, h, i);
				for (int64_t e = 0; e < width; e++) {
					const float x = value_of(c, stream, vb, vh, vi, e, shape);
					tool_store(t->t.data, at + e, dtype, x);
					if (plain) plain[((b * heads + h) * rows + i) * width + e] = rounded(x, dtype);
				}
			}
	buffer_seal(t);
	return plain;
}

/* ---- the bias ---- */

static float bias_value(const test_case *c, int64_t b, int64_t h, int64_t i, int64_t j) {
	const uint64_t index = (uint64_t)(((b * c->p.heads_q + h) * c->max_q + i) * c->max_k + j);
	const float x = tool_normal(c->seed, RANDOM_BIAS, index);
	const int32_t dtype = (int32_t)c->p.bias_dtype;
	if (c->p.data == DATA_EMPTY_ROWS) {
		const bool seen = i % 7 != 3 && i - 10 < j && j <= i;
		return dtype == INGOT_BOOL ? seen : seen ? x : -INFINITY;
	}
	if (c->p.data == DATA_LOWEST && dtype != INGOT_BOOL) {
		const float lowest = dtype == INGOT_F16 ? -65504.0f : dtype == INGOT_BF16 ? -3.3895314e38f : -3.4028235e38f;
		return i == 7 || j < c->max_k / 3 ? lowest : 0;
	}
	const bool masks = tool_hash(c->seed, RANDOM_BIAS * 4 + 3, index) % 8 == 0;
	return dtype == INGOT_BOOL ? !masks : masks ? -INFINITY : x;
}

static void build_bias(test_case *c) {
	const problem *p = &c->p;
	const int64_t full[4] = {p->batch, p->heads_q, c->max_q, c->max_k};
	int64_t shape[4], stride[4], elements = 1;
	for (int a = 0; a < 4; a++) shape[a] = p->bias_axes >> a & 1 ? full[a] : 1;
	stride[3] = 1;
	stride[2] = shape[3] + p->pitch;
	stride[1] = stride[2] * shape[2];
	stride[0] = stride[1] * shape[1];
	oracle *o = &c->truth;
	for (int a = 3; a >= 0; a--) {
		o->bias_stride[a] = shape[a] > 1 || (p->bias_axes >> a & 1) ? elements : 0;
		elements *= shape[a];
	}
	o->bias_elements = elements;
	int64_t seen_shape[4];
	for (int a = 0; a < 4; a++) {
		seen_shape[a] = p->bias_stride0 ? full[a] : shape[a];
		if (p->bias_stride0 && !(p->bias_axes >> a & 1)) stride[a] = 0;
	}
	buffer_make(&c->bias, (int32_t)p->bias_dtype, 4, seen_shape, stride, p->misalign ? 1 : 0, c->mode != CASE_SHAPES);
	if (c->mode == CASE_SHAPES) return;
	if (c->mode == CASE_SPEED && p->data == DATA_NORMAL && p->bias_dtype != INGOT_BOOL) {
		buffer_fill_normal(&c->bias, tool_hash(c->seed, RANDOM_BIAS, 0));
		return;
	}
	buffer_fill_dead(&c->bias);
	float *plain = c->mode == CASE_CHECK ? tool_alloc(sizeof(float) * (size_t)(elements > 0 ? elements : 1)) : NULL;
	for (int64_t b = 0; b < p->batch; b++)
		for (int64_t h = 0; h < p->heads_q; h++)
			for (int64_t i = 0; i < c->len_q[b]; i++)
				for (int64_t j = 0; j < c->len_k[b]; j++) {
					if (c->dead_key && c->dead_key[b * c->max_k + j]) continue;
					const int64_t at[4] = {p->bias_axes & AXIS_B ? b : 0, p->bias_axes & AXIS_H ? h : 0,
					                       p->bias_axes & AXIS_Q ? i : 0, p->bias_axes & AXIS_K ? j : 0};
					const float x = bias_value(c, at[0], at[1], at[2], at[3]);
					int64_t place = 0, element = 0;
					for (int a = 0; a < 4; a++) {
						place += at[a] * stride[a];
						element += at[a] * o->bias_stride[a];
					}
					tool_store(c->bias.t.data, place, (int32_t)p->bias_dtype, x);
					if (plain)
						plain[element] =
							p->bias_dtype == INGOT_BOOL ? (x != 0 ? 0 : -INFINITY) : rounded(x, (int32_t)p->bias_dtype);
				}
	buffer_seal(&c->bias);
	o->bias = plain;
}

/* ---- small tensors ---- */

static float *build_factors(test_case *c, buffer *t, uint64_t stream, int ndim, const int64_t *shape, float low,
                            float high) {
	buffer_dense(t, INGOT_F32, ndim, shape, 1, c->mode != CASE_SHAPES);
	if (c->mode == CASE_SHAPES) return NULL;
	buffer_fill_dead(t);
	const int64_t n = tool_elements(&t->t);
	for (int64_t i = 0; i < n; i++)
		((float *)t->t.data)[i] =
			low + (high - low) * (float)(tool_hash(c->seed, stream, (uint64_t)i) >> 40) * 0x1p-24f;
	buffer_seal(t);
	return t->t.data;
}

/* A factor table spread over [B][heads]. */
static float *spread(const test_case *c, const buffer *t, int64_t heads) {
	float *plain = tool_alloc(sizeof(float) * (size_t)(c->p.batch * heads + 1));
	const float *from = t->t.data;
	for (int64_t b = 0; b < c->p.batch; b++)
		for (int64_t h = 0; h < heads; h++) {
			const int64_t columns = t->t.shape[t->t.ndim - 1];
			const int64_t column = columns == 1 && t->t.ndim == 1 ? 0 : columns == heads ? h : h / (heads / columns);
			plain[b * heads + h] = from[(t->t.ndim == 2 ? b * columns : 0) + column];
		}
	return plain;
}

static void build_small(test_case *c) {
	const problem *p = &c->p;
	oracle *o = &c->truth;
	const bool check = c->mode == CASE_CHECK;
	if (p->alibi) {
		const int64_t one[] = {p->heads_q}, two[] = {p->batch, p->heads_q};
		build_factors(c, &c->alibi, RANDOM_ALIBI, (int)p->alibi, p->alibi == 2 ? two : one, -0.05f, 0.3f);
		o->alibi = check ? spread(c, &c->alibi, p->heads_q) : NULL;
	}
	if (p->sink) {
		build_factors(c, &c->sink, RANDOM_SINK, 1, &p->heads_q, -2, 2);
		o->sink = c->sink.t.data;
	}
	if (p->descale) {
		const int64_t one[] = {1}, keys[] = {p->batch, p->heads_k}, queries[] = {p->batch, p->heads_q};
		const int ndim = p->descale == 1 ? 1 : 2;
		if (tool_is_8bit((int32_t)p->dtype)) {
			build_factors(c, &c->q_descale, RANDOM_DESCALE, ndim,
			              p->descale == 1   ? one
			              : p->descale == 3 ? queries
			                                : keys,
			              0.5f, 1.5f);
			o->q_descale = check ? spread(c, &c->q_descale, p->heads_q) : NULL;
		}
		build_factors(c, &c->k_descale, RANDOM_DESCALE + 100, ndim, p->descale == 1 ? one : keys, 0.5f, 1.5f);
		build_factors(c, &c->v_descale, RANDOM_DESCALE + 200, ndim, p->descale == 1 ? one : keys, 0.5f, 1.5f);
		o->k_descale = check ? spread(c, &c->k_descale, p->heads_k) : NULL;
		o->v_descale = check ? spread(c, &c->v_descale, p->heads_k) : NULL;
	}
	if (p->dropout > 0) {
		const int64_t one = 1;
		c->dropout_seed = tool_hash(c->seed, RANDOM_DROPOUT, 0);
		c->dropout_offset = tool_hash(c->seed, RANDOM_DROPOUT, 1) >> (c->seed % 2 ? 1 : 40);
		if (p->cells) {
			buffer_dense(&c->seed_cell, INGOT_U64, 1, &one, 0, c->mode != CASE_SHAPES);
			buffer_dense(&c->offset_cell, INGOT_I64, 1, &one, 0, c->mode != CASE_SHAPES);
			if (c->mode != CASE_SHAPES) {
				*(uint64_t *)c->seed_cell.t.data = c->dropout_seed;
				*(uint64_t *)c->offset_cell.t.data = c->dropout_offset - 5;
			}
			buffer_seal(&c->seed_cell);
			buffer_seal(&c->offset_cell);
		}
		o->dropout_p = p->dropout;
		o->seed = c->dropout_seed;
		o->offset = c->dropout_offset;
	}
}

/* ---- the whole ---- */

static void mark_dead_keys(test_case *c) {
	const problem *p = &c->p;
	c->dead_key = tool_alloc((size_t)(p->batch * c->max_k + 1));
	for (int64_t b = 0; b < p->batch; b++) {
		bool *dead = c->dead_key + b * c->max_k;
		const int64_t off = p->align == INGOT_BOTTOM_RIGHT ? c->len_k[b] - c->len_q[b] : 0;
		for (int64_t j = 0; j < c->len_k[b]; j++) dead[j] = true;
		for (int64_t i = 0; i < c->len_q[b]; i++) {
			int64_t first = 0, last = c->len_k[b];
			if (p->mask == INGOT_MASK_WINDOW && p->left != INGOT_UNBOUNDED) first = clamp(i + off - p->left, 0, last);
			if (p->mask == INGOT_MASK_CAUSAL) last = clamp(i + off + 1, 0, last);
			if (p->mask == INGOT_MASK_WINDOW && p->right != INGOT_UNBOUNDED)
				last = clamp(i + off + p->right + 1, 0, last);
			for (int64_t j = first; j < last; j++) dead[j] = false;
		}
	}
	/* A shared page is dead only where it is dead for all. */
	for (int64_t b = 1; b < p->batch && p->page_share; b++)
		for (int64_t j = 0; j < p->page_size && page_is_shared(c, b, j); j++)
			c->dead_key[j] &= c->dead_key[b * c->max_k + j];
	for (int64_t b = 1; b < p->batch && p->page_share; b++)
		for (int64_t j = 0; j < p->page_size && page_is_shared(c, b, j); j++)
			c->dead_key[b * c->max_k + j] = c->dead_key[j];
}

bool case_sizes(const problem *p, char *error, size_t capacity) {
	const int64_t heads = p->heads_q > p->heads_k ? p->heads_q : p->heads_k, rows = p->sq > p->sk ? p->sq : p->sk;
	if (rows > (int64_t)1 << 24 || p->batch > 4096 || heads > 4096)
		return fail(error, capacity, "lengths up to 2^24 and up to 4096 sequences and heads can be built here");
	double width = (double)(p->d > p->dv ? p->d : p->dv);
	if (p->op == TOOL_MERGE) width *= (double)p->parts;
	if (p->op == TOOL_MASK || p->bias_dtype) width = fmax(width, (double)rows);
	if ((double)p->batch * (double)heads * (double)rows * (width + (double)p->pitch) > 0x1p56)
		return fail(error, capacity, "tensors of up to 2^56 elements can be built here");
	return true;
}

static bool check_words(const problem *p, char *error, size_t capacity) {
	if (p->op != TOOL_FWD && p->op != TOOL_BWD) return fail(error, capacity, "this operator has no attention case");
	if (p->heads_k == 0 ? p->heads_q != 0 : p->heads_q % p->heads_k != 0)
		return fail(error, capacity, "hq must be a multiple of hk");
	if (p->pages && p->op == TOOL_BWD) return fail(error, capacity, "backward has no pages");
	if ((p->q_side >> 1 & 3) == INGOT_LENGTH_LAST_PAGE || (!p->pages && (p->k_side >> 1 & 3) == INGOT_LENGTH_LAST_PAGE))
		return fail(error, capacity, "lengths of the last page need csrlast");
	return case_sizes(p, error, capacity);
}

static void build_params(test_case *c) {
	const problem *p = &c->p;
	const bool sized = (p->q_side & 1) || (p->k_side & 1) || p->pages == PAGES_CSR || p->pages == PAGES_CSR_LAST;
	const bool lse_th = p->lse && p->lse_th && (p->q_side & 1);
	ingot_attn_fwd_params *f = &c->fwd;
	*f = (ingot_attn_fwd_params){
		.struct_size = sizeof *f,
		.varlen = INGOT_VARLEN((uint32_t)p->q_side, (uint32_t)p->k_side, lse_th),
		.q = c->q.t,
		.k = c->k.t,
		.v = c->v.t,
		.bias = c->bias.t,
		.alibi = c->alibi.t,
		.sink = c->sink.t,
		.q_descale = c->q_descale.t,
		.k_descale = c->k_descale.t,
		.v_descale = c->v_descale.t,
		.q_lengths = c->q_lengths.t,
		.q_positions = c->q_positions.t,
		.k_lengths = c->k_lengths.t,
		.k_positions = c->k_positions.t,
		.page_table = c->page_table.t,
		.page_indptr = c->page_indptr.t,
		.page_indices = c->page_indices.t,
		.dropout_seed_ptr = c->seed_cell.t,
		.dropout_offset_ptr = c->offset_cell.t,
		.dropout_seed = p->cells ? 0 : c->dropout_seed,
		.dropout_offset = p->cells ? 5 : c->dropout_offset,
		.batch = sized ? p->batch : 0,
		.max_seqlen_q = (p->q_side & 1) ? p->sq : 0,
		.max_seqlen_k = (p->k_side & 1) || p->pages == PAGES_CSR || p->pages == PAGES_CSR_LAST ? p->sk : 0,
		.softmax_scale = (float)p->scale,
		.softcap = (float)p->softcap,
		.dropout_p = (float)p->dropout,
		.mask = (int32_t)p->mask,
		.align = (int32_t)p->align,
		.window_left = (int32_t)p->left,
		.window_right = (int32_t)p->right,
		.lse_base = p->lse_base2 ? INGOT_LSE_BASE2 : INGOT_LSE_NATURAL,
	};
	if (!(p->dropout > 0)) f->dropout_offset = f->dropout_seed = 0;
	c->bwd = (ingot_attn_bwd_params){
		.struct_size = sizeof c->bwd,
		.varlen = f->varlen,
		.q = f->q,
		.k = f->k,
		.v = f->v,
		.dout = c->dout.t,
		.bias = f->bias,
		.alibi = f->alibi,
		.sink = f->sink,
		.q_lengths = f->q_lengths,
		.q_positions = f->q_positions,
		.k_lengths = f->k_lengths,
		.k_positions = f->k_positions,
		.dropout_seed_ptr = f->dropout_seed_ptr,
		.dropout_offset_ptr = f->dropout_offset_ptr,
		.dropout_seed = f->dropout_seed,
		.dropout_offset = f->dropout_offset,
		.batch = f->batch,
		.max_seqlen_q = f->max_seqlen_q,
		.max_seqlen_k = f->max_seqlen_k,
		.softmax_scale = f->softmax_scale,
		.softcap = f->softcap,
		.dropout_p = f->dropout_p,
		.mask = f->mask,
		.align = f->align,
		.window_left = f->window_left,
		.window_right = f->window_right,
		.lse_base = f->lse_base,
	};
}

bool case_build(test_case *c, const problem *p, uint64_t seed, case_mode mode, char *error, size_t capacity) {
	*c = (test_case){.p = *p, .seed = seed, .mode = mode};
	if (!check_words(p, error, capacity)) return false;
	const int64_t batch = p->batch;
	const bool allocate = mode != CASE_SHAPES;
	int64_t *const arrays = tool_alloc(sizeof(int64_t) * 6 * (size_t)(batch + 1));
	side q = {.max = p->sq, .raw = arrays, .len = arrays + batch + 1, .start = arrays + 2 * (batch + 1)};
	side k = {.max = p->sk,
	          .raw = arrays + 3 * (batch + 1),
	          .len = arrays + 4 * (batch + 1),
	          .start = arrays + 5 * (batch + 1)};
	lay_out_side(c, &q, p->q_side, p->q_lengths, p->q_given, RANDOM_QLEN, &c->q_lengths, &c->q_positions);
	if (p->pages) lay_out_pages(c, &k);
	else lay_out_side(c, &k, p->k_side, p->k_lengths, p->k_given, RANDOM_KLEN, &c->k_lengths, &c->k_positions);
	c->len_q = q.len, c->start_q = q.start, c->len_k = k.len, c->start_k = k.start;
	c->max_q = q.max, c->max_k = k.max;
	if (mode == CASE_CHECK) mark_dead_keys(c);

	int64_t shape[4] = {q.stacked ? 1 : batch, p->heads_q, q.capacity, p->d}, stride[4];
	const int64_t offset = p->misalign ? 1 : 0;
	strides_of(p, shape, stride);
	buffer_make(&c->q, (int32_t)p->dtype, 4, shape, stride, offset, allocate);
	for (int side_v = 0; side_v < 2; side_v++) {
		const int64_t width = side_v ? p->dv : p->d;
		if (p->pages) {
			const int64_t page_shape[] = {c->pages_used, p->page_size, p->heads_k, width};
			page_strides(p, page_shape, stride);
			buffer_make(side_v ? &c->v : &c->k, (int32_t)p->kv_dtype, 4, page_shape, stride,
			            offset + (p->misalign && side_v), allocate);
			continue;
		}
		const int64_t kv_shape[] = {k.stacked ? 1 : batch, p->heads_k, k.capacity, width};
		strides_of(p, kv_shape, stride);
		if (p->kv_stride0) stride[1] = 0;
		buffer_make(side_v ? &c->v : &c->k, (int32_t)p->kv_dtype, 4, kv_shape, stride, offset + (p->misalign && side_v),
		            allocate);
	}
	if (p->op == TOOL_BWD) {
		int64_t dout_shape[4];
		q_shape(c, p->dv, dout_shape);
		strides_of(p, dout_shape, stride);
		if (p->dout_stride0) stride[0] = stride[1] = stride[2] = 0;
		buffer_make(&c->dout, (int32_t)p->out_dtype, 4, dout_shape, stride, offset, allocate);
	}
	oracle *o = &c->truth;
	*o = (oracle){
		.batch = batch,
		.heads_q = p->heads_q,
		.heads_k = p->heads_k,
		.max_q = c->max_q,
		.max_k = c->max_k,
		.d = p->d,
		.dv = p->dv,
		.len_q = c->len_q,
		.len_k = c->len_k,
		.scale = p->scale != 0 ? (double)(float)p->scale : 1 / sqrt((double)p->d),
		.softcap = (double)(float)p->softcap,
		.left = p->mask == INGOT_MASK_WINDOW ? p->left : INT32_MAX,
		.right = p->mask == INGOT_MASK_CAUSAL   ? 0
	             : p->mask == INGOT_MASK_WINDOW ? p->right
	                                            : INT32_MAX,
		.bottom_right = p->align == INGOT_BOTTOM_RIGHT,
		.base2 = p->lse_base2 != 0,
	};
	if (allocate) {
		o->q = fill(c, &c->q, RANDOM_Q, false, p->d);
		o->k = fill(c, &c->k, RANDOM_K, true, p->d);
		o->v = fill(c, &c->v, RANDOM_V, true, p->dv);
		if (p->op == TOOL_BWD) o->dout = fill(c, &c->dout, RANDOM_DOUT, false, p->dv);
	}
	if (p->bias_dtype) build_bias(c);
	build_small(c);
	buffer *const integers[] = {&c->q_lengths,  &c->q_positions, &c->k_lengths,   &c->k_positions,
	                            &c->page_table, &c->page_indptr, &c->page_indices};
	for (size_t i = 0; i < sizeof integers / sizeof *integers; i++) buffer_seal(integers[i]);
	build_params(c);
	return true;
}

enum { INPUTS = 19 };

static void inputs_of(const test_case *c, const buffer *at[INPUTS], const char *const **names) {
	static const char *const all[INPUTS] = {"q",
	                                        "k",
	                                        "v",
	                                        "dout",
	                                        "bias",
	                                        "alibi",
	                                        "sink",
	                                        "q_descale",
	                                        "k_descale",
	                                        "v_descale",
	                                        "q_lengths",
	                                        "q_positions",
	                                        "k_lengths",
	                                        "k_positions",
	                                        "page_table",
	                                        "page_indptr",
	                                        "page_indices",
	                                        "dropout_seed_ptr",
	                                        "dropout_offset_ptr"};
	const buffer *const list[INPUTS] = {
		&c->q,          &c->k,           &c->v,          &c->dout,        &c->bias,         &c->alibi,
		&c->sink,       &c->q_descale,   &c->k_descale,  &c->v_descale,   &c->q_lengths,    &c->q_positions,
		&c->k_lengths,  &c->k_positions, &c->page_table, &c->page_indptr, &c->page_indices, &c->seed_cell,
		&c->offset_cell};
	memcpy(at, list, sizeof list);
	*names = all;
}

const char *case_written_input(const test_case *c) {
	const buffer *at[INPUTS];
	const char *const *names;
	inputs_of(c, at, &names);
	for (int i = 0; i < INPUTS; i++)
		if (!buffer_intact(at[i])) return names[i];
	return NULL;
}

void case_release(test_case *c) {
	const buffer *at[INPUTS];
	const char *const *names;
	inputs_of(c, at, &names);
	oracle *o = &c->truth;
	oracle_release(o);
	const float *const plain[] = {o->q,     o->k,         o->v,         o->dout,     o->bias,
	                              o->alibi, o->q_descale, o->k_descale, o->v_descale};
	for (size_t i = 0; i < sizeof plain / sizeof *plain; i++) free((void *)plain[i]);
	for (int i = 0; i < INPUTS; i++) buffer_release((buffer *)at[i]);
	/* One allocation holds the lengths; its first part is the query side's raw lengths. */
	if (c->len_q) free(c->len_q - (c->p.batch + 1));
	free(c->dead_key);
	free(c->page_of);
	*c = (test_case){0};
}

/* ---- outputs ---- */

void outputs_make(test_outputs *o, const test_case *c, bool forward, bool exact) {
	*o = (test_outputs){0};
	const problem *p = &c->p;
	const bool allocate = c->mode != CASE_SHAPES;
	const int64_t offset = p->misalign ? 1 : 0;
	int64_t shape[4], stride[4];
	if (forward) {
		q_shape(c, p->dv, shape);
		strides_of(p, shape, stride);
		buffer_make(&o->at[OUT], exact ? INGOT_F32 : (int32_t)p->out_dtype, 4, shape, stride, offset, allocate);
		if (p->lse || p->op == TOOL_BWD) {
			if (p->q_side & 1) {
				const int64_t ht[] = {p->heads_q, shape[2]}, th[] = {shape[2], p->heads_q};
				buffer_dense(&o->at[LSE], INGOT_F32, 2, p->lse_th ? th : ht, offset, allocate);
			} else {
				buffer_dense(&o->at[LSE], INGOT_F32, 3, shape, offset, allocate);
			}
		}
		if (p->dropout > 0 && p->cells) {
			const int64_t one = 1;
			buffer_dense(&o->at[SEED_OUT], INGOT_U64, 1, &one, 0, allocate);
			buffer_dense(&o->at[OFFSET_OUT], INGOT_I64, 1, &one, 0, allocate);
		}
	} else {
		const int32_t dtype = exact ? INGOT_F32 : (int32_t)p->grad_dtype;
		if (p->grads & 1) {
			q_shape(c, p->d, shape);
			strides_of(p, shape, stride);
			buffer_make(&o->at[DQ], dtype, 4, shape, stride, offset, allocate);
		}
		for (int i = 0; i < 2; i++)
			if (p->grads & (i ? 4 : 2)) {
				k_shape(c, i ? p->dv : p->d, shape);
				strides_of(p, shape, stride);
				buffer_make(&o->at[i ? DV : DK], dtype, 4, shape, stride, offset, allocate);
			}
		if (p->bias_dtype && p->bias_dtype != INGOT_BOOL) {
			const int64_t full[] = {p->batch, p->heads_q, c->max_q, c->max_k};
			for (int a = 0; a < 4; a++) shape[a] = p->bias_axes >> a & 1 ? full[a] : 1;
			stride[3] = 1;
			stride[2] = shape[3] + p->pitch;
			stride[1] = stride[2] * shape[2];
			stride[0] = stride[1] * shape[1];
			buffer_make(&o->at[DBIAS], exact || c->seed % 2 ? INGOT_F32 : (int32_t)p->bias_dtype, 4, shape, stride,
			            offset, allocate);
		}
		if (p->sink) buffer_dense(&o->at[DSINK], INGOT_F32, 1, &p->heads_q, offset, allocate);
	}
	if (c->mode == CASE_CHECK) outputs_poison(o);
}

void outputs_poison(test_outputs *o) {
	for (int i = 0; i < TEST_OUTPUTS; i++) buffer_poison(&o->at[i]);
}

void outputs_release(test_outputs *o) {
	for (int i = 0; i < TEST_OUTPUTS; i++) buffer_release(&o->at[i]);
}

ingot_attn_fwd_params case_fwd(const test_case *c, const test_outputs *o) {
	ingot_attn_fwd_params p = c->fwd;
	p.out = o->at[OUT].t;
	p.lse = o->at[LSE].t;
	p.dropout_seed_out = o->at[SEED_OUT].t;
	p.dropout_offset_out = o->at[OFFSET_OUT].t;
	return p;
}

ingot_attn_bwd_params case_bwd(const test_case *c, const test_outputs *o, const test_outputs *from) {
	ingot_attn_bwd_params p = c->bwd;
	p.out = from->at[OUT].t;
	p.lse = from->at[LSE].t;
	p.dq = o->at[DQ].t;
	p.dk = o->at[DK].t;
	p.dv = o->at[DV].t;
	p.dbias = o->at[DBIAS].t;
	p.dsink = o->at[DSINK].t;
	return p;
}

int64_t case_live(const test_case *c, const test_outputs *o, test_output which, int64_t **elements) {
	const ingot_tensor *t = &o->at[which].t;
	const problem *p = &c->p;
	int64_t *list = *elements = tool_alloc(sizeof(int64_t) * (size_t)(tool_elements(t) + 1)), n = 0;
	if (which == DBIAS) {
		for (int64_t b = 0; b < t->shape[0]; b++)
			for (int64_t h = 0; h < t->shape[1]; h++)
				for (int64_t i = 0; i < t->shape[2]; i++)
					for (int64_t j = 0; j < t->shape[3]; j++)
						list[n++] = b * t->stride[0] + h * t->stride[1] + i * t->stride[2] + j;
		return n;
	}
	if (which == DSINK || which == SEED_OUT || which == OFFSET_OUT) {
		for (int64_t h = 0; h < t->shape[0]; h++) list[n++] = h;
		return n;
	}
	const bool keys = which == DK || which == DV;
	for (int64_t b = 0; b < p->batch; b++)
		for (int64_t h = 0; h < (keys ? p->heads_k : p->heads_q); h++)
			for (int64_t i = 0; i < (keys ? c->len_k[b] : c->len_q[b]); i++) {
				if (which == LSE) {
					list[n++] = p->q_side & 1 ? h * t->stride[p->lse_th ? 1 : 0] +
					                                (c->start_q[b] + i) * t->stride[p->lse_th ? 0 : 1]
					                          : b * t->stride[0] + h * t->stride[1] + i;
					continue;
				}
				const int64_t at = keys ? key_at(c, t, b, h, i) : query_at(c, t, b, h, i);
				for (int64_t e = 0; e < t->shape[3]; e++) list[n++] = at + e;
			}
	return n;
}

void case_locate(const test_case *c, test_output which, int64_t index, char *text, size_t capacity) {
	const problem *p = &c->p;
	if (which == DBIAS || which == DSINK || which == SEED_OUT || which == OFFSET_OUT) {
		snprintf(text, capacity, "%s[%lld]", test_output_names[which], (long long)index);
		return;
	}
	const bool keys = which == DK || which == DV;
	const int64_t heads = keys ? p->heads_k : p->heads_q, width = which == LSE                  ? 1
	                                                              : which == OUT || which == DV ? p->dv
	                                                                                            : p->d;
	int64_t left = index;
	for (int64_t b = 0; b < p->batch; b++) {
		const int64_t rows = keys ? c->len_k[b] : c->len_q[b];
		if (left < heads * rows * width) {
			snprintf(text, capacity, "%s[sequence %lld, head %lld, row %lld of %lld, column %lld]",
			         test_output_names[which], (long long)b, (long long)(left / (rows * width)),
			         (long long)(left / width % rows), (long long)rows, (long long)(left % width));
			return;
		}
		left -= heads * rows * width;
	}
	snprintf(text, capacity, "%s[%lld]", test_output_names[which], (long long)index);
}

double *case_truth(const test_case *c, test_output which, int64_t *count) {
	const problem *p = &c->p;
	const oracle *o = &c->truth;
	const double *const from[] = {o->out, o->lse, o->dq, o->dk, o->dv_out, o->dbias, o->dsink, NULL, NULL};
	*count = 0;
	if (!from[which]) return NULL;
	const bool keys = which == DK || which == DV, flat = which == DBIAS || which == DSINK;
	const int64_t heads = keys ? p->heads_k : p->heads_q, rows = keys ? c->max_k : c->max_q;
	const int64_t width = which == LSE ? 1 : which == OUT || which == DV ? p->dv : p->d;
	const int64_t most = flat ? (which == DBIAS ? o->bias_elements : p->heads_q) : p->batch * heads * rows * width;
	double *values = tool_alloc(sizeof(double) * (size_t)(most + 1));
	if (flat) {
		memcpy(values, from[which], sizeof(double) * (size_t)most);
		*count = most;
		return values;
	}
	for (int64_t b = 0; b < p->batch; b++)
		for (int64_t h = 0; h < heads; h++) {
			const int64_t n = (keys ? c->len_k[b] : c->len_q[b]) * width;
			memcpy(values + *count, from[which] + (b * heads + h) * rows * width, sizeof(double) * (size_t)n);
			*count += n;
		}
	return values;
}

double case_scale(const test_case *c, test_output which) {
	const oracle *o = &c->truth;
	switch (which) {
	case DQ: return o->dq_scale;
	case DK: return o->dk_scale;
	case DV: return o->dv_scale;
	case DBIAS: return o->dbias_scale;
	case DSINK: return o->dsink_scale;
	default: return -1;
	}
}
