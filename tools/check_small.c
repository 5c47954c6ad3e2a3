/* See check_small.h. */
#include "check_small.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "case.h"
#include "oracle.h"

enum {
	RANDOM_PART = 40,
	RANDOM_PART_LSE,
	RANDOM_NEW,
	RANDOM_NEW_V,
	RANDOM_LENGTH,
	RANDOM_NEW_LENGTH,
	RANDOM_ORDER,
	RANDOM_SCALE,
	RANDOM_CACHE
};

__attribute__((format(printf, 3, 4))) static bool fail(char *error, size_t capacity, const char *format, ...) {
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(error, capacity, format, arguments);
	va_end(arguments);
	return false;
}

/* ---- merge ---- */

static void merge_build(small_case *c) {
	const problem *p = &c->p;
	const bool allocate = c->mode != CASE_SHAPES;
	const int64_t n = p->parts, rows = p->batch * p->heads_q * p->sq, shape[] = {n, p->batch, p->heads_q, p->sq, p->d};
	const int tensors = p->separate ? (int)n : 1, axes = p->separate ? 0 : 1;
	for (int i = 0; i < tensors; i++) {
		buffer_dense(&c->parts_out[i], (int32_t)p->dtype, 5 - (p->separate != 0), shape + 1 - axes, p->misalign,
		             allocate);
		buffer_dense(&c->parts_lse[i], INGOT_F32, 4 - (p->separate != 0), shape + 1 - axes, p->misalign, allocate);
		c->merge.out_parts[i] = c->parts_out[i].t;
		c->merge.lse_parts[i] = c->parts_lse[i].t;
	}
	buffer_dense(&c->out, p->inplace ? (int32_t)p->dtype : (int32_t)p->out_dtype, 4, shape + 1, p->misalign, allocate);
	if (p->lse) buffer_dense(&c->lse, INGOT_F32, 3, shape + 1, p->misalign, allocate);
	c->merge.struct_size = sizeof c->merge;
	c->merge.lse_base = p->lse_base2 ? INGOT_LSE_BASE2 : INGOT_LSE_NATURAL;
	c->merge.out = p->inplace ? c->parts_out[0].t : c->out.t;
	c->merge.lse = p->inplace && p->lse ? c->parts_lse[0].t : c->lse.t;
	for (int i = 0; i < tensors && c->mode == CASE_SPEED; i++) {
		buffer_fill_normal(&c->parts_out[i], tool_hash(c->seed, RANDOM_PART, (uint64_t)i));
		buffer_fill_normal(&c->parts_lse[i], tool_hash(c->seed, RANDOM_PART_LSE, (uint64_t)i));
	}
	if (c->mode != CASE_CHECK) return;

	c->want_out = tool_alloc(sizeof(double) * (size_t)(rows * p->d + 1));
	c->want_lse = tool_alloc(sizeof(double) * (size_t)(rows + 1));
	double *top = tool_alloc(sizeof(double) * (size_t)(n + 1));
	const double unit = p->lse_base2 ? log(2) : 1;
	for (int64_t row = 0; row < rows; row++) {
		/* Some parts are empty, some rows empty in all of them; an empty part's values are finite and large. */
		double most = -(double)INFINITY, total = 0;
		for (int64_t i = 0; i < n; i++) {
			const uint64_t x = tool_hash(c->seed, RANDOM_PART_LSE, (uint64_t)(row * n + i));
			const bool empty = x % 6 == 0 || tool_hash(c->seed, RANDOM_PART_LSE + 100, (uint64_t)row) % 7 == 0;
			const float lse = empty ? -INFINITY : 4 * tool_normal(c->seed, RANDOM_PART_LSE, (uint64_t)(row * n + i));
			top[i] = (double)lse * unit;
			if (top[i] > most) most = top[i];
			const int64_t at = p->separate ? row : i * rows + row;
			((float *)c->parts_lse[p->separate ? i : 0].t.data)[at] = lse;
			for (int64_t e = 0; e < p->d; e++)
				tool_store(c->parts_out[p->separate ? i : 0].t.data, at * p->d + e, (int32_t)p->dtype,
				           empty ? 30000.0f : tool_normal(c->seed, RANDOM_PART, (uint64_t)((row * n + i) * p->d + e)));
		}
		for (int64_t i = 0; i < n; i++)
			if (top[i] > -(double)INFINITY) total += exp(top[i] - most);
		c->want_lse[row] = total > 0 ? (most + log(total)) / unit : -(double)INFINITY;
		for (int64_t i = 0; i < n; i++)
			for (int64_t e = 0; e < p->d && top[i] > -(double)INFINITY; e++)
				c->want_out[row * p->d + e] +=
					exp(top[i] - most) / total *
					(double)tool_load(c->parts_out[p->separate ? i : 0].t.data,
				                      ((p->separate ? 0 : i * rows) + row) * p->d + e, (int32_t)p->dtype);
	}
	free(top);
	/* The call may write over its first part: both copies are kept. */
	if (p->inplace) {
		c->before[0] = tool_alloc(c->parts_out[0].bytes);
		c->before[1] = tool_alloc(c->parts_lse[0].bytes);
		memcpy(c->before[0], c->parts_out[0].memory, c->parts_out[0].bytes);
		memcpy(c->before[1], c->parts_lse[0].memory, c->parts_lse[0].bytes);
	}
	for (int i = p->inplace ? 1 : 0; i < tensors; i++) {
		buffer_seal(&c->parts_out[i]);
		buffer_seal(&c->parts_lse[i]);
	}
}

static double *values_of(const ingot_tensor *t, int64_t n) {
	double *values = tool_alloc(sizeof(double) * (size_t)(n + 1));
	for (int64_t i = 0; i < n; i++) values[i] = (double)tool_load(t->data, i, t->dtype);
	return values;
}

static bool merge_verify(small_case *c, const small_case *yardstick, double *ratio, char *text, size_t capacity) {
	const problem *p = &c->p;
	const int64_t rows = p->batch * p->heads_q * p->sq;
	for (int i = p->inplace ? 1 : 0; i < INGOT_MERGE_PARTS; i++)
		if ((c->parts_out[i].memory && !buffer_intact(&c->parts_out[i])) ||
		    (c->parts_lse[i].memory && !buffer_intact(&c->parts_lse[i])))
			return fail(text, capacity, "input part %d was written", i);
	/* A part rounded to 16 bits stays the input: the result's own type decides the bound. */
	for (int which = 0; which < (p->lse ? 2 : 1); which++) {
		const ingot_tensor *t = which ? &c->merge.lse : &c->merge.out;
		const int64_t n = which ? rows : rows * p->d;
		const double *want = which ? c->want_lse : c->want_out;
		double *got = values_of(t, n);
		double *other = yardstick ? values_of(which ? &yardstick->merge.lse : &yardstick->merge.out, n) : NULL;
		const rule_result r =
			rule_apply(which ? RULE_LSE : RULE_VALUE, got, want, other ? other : want, n, t->dtype, -1);
		free(got);
		free(other);
		if (r.ratio > *ratio) *ratio = r.ratio;
		if (!r.pass)
			return fail(text, capacity, "%s[%lld]: got %.9g, want %.9g (allowed error %.3g, ratio %.3g)",
			            which ? "lse" : "out", (long long)r.index, r.got, r.want, r.allowed, r.ratio);
		if (!p->inplace) {
			buffer *b = which ? &c->lse : &c->out;
			int64_t byte;
			for (int64_t i = 0; i < n; i++) {
				if (buffer_poisoned_at(b, i))
					return fail(text, capacity, "%s[%lld] was not written", which ? "lse" : "out", (long long)i);
				buffer_poison_at(b, i);
			}
			if (buffer_first_stray(b, &byte))
				return fail(text, capacity, "%s: byte %lld, outside the tensor, was written", which ? "lse" : "out",
				            (long long)byte);
		}
	}
	return true;
}

/* ---- append ---- */

typedef struct rows {
	int64_t slot, start, count;
} rows;

static int64_t clamp(int64_t x, int64_t low, int64_t high) {
	return x < low ? low : x > high ? high : x;
}

static void append_build(small_case *c) {
	const problem *p = &c->p;
	const int64_t batch = p->batch, heads = p->heads_k;
	const bool allocate = c->mode != CASE_SHAPES, stacked = p->q_side & 1;
	const int length = p->q_side >> 1 & 3, position = p->q_side >> 3 & 3;
	rows *fresh = tool_alloc(sizeof(rows) * (size_t)(batch + 1));
	int64_t *before = tool_alloc(sizeof(int64_t) * (size_t)(batch + 1));

	/* The new rows: lengths, places, the stacked axis. */
	int64_t total = 0;
	for (int64_t b = 0; b < batch; b++) {
		const uint64_t x = tool_hash(c->seed, RANDOM_NEW_LENGTH, (uint64_t)b);
		fresh[b].count = length == INGOT_LENGTH_MAX ? p->sq
		                 : p->q_given               ? clamp(p->q_lengths[b], 0, p->sq)
		                 : c->mode == CASE_SPEED    ? p->sq
		                                            : (int64_t)(x % (uint64_t)(p->sq + 1));
		if (position == INGOT_POSITION_ARRAY) total += (int64_t)(x >> 32) % 3;
		fresh[b].slot = stacked ? 0 : b;
		fresh[b].start = !stacked ? 0 : position == INGOT_POSITION_IMPLIED ? b * p->sq : total;
		total += fresh[b].count;
	}
	const int64_t token_rows = !stacked ? p->sq : position == INGOT_POSITION_IMPLIED ? batch * p->sq : total + 2;
	if (length != INGOT_LENGTH_MAX) {
		const int64_t n = batch + (length == INGOT_LENGTH_CUMULATIVE);
		buffer_dense(&c->new_lengths, INGOT_I32, 1, &n, 0, allocate);
		int32_t sum = 0, *at = c->new_lengths.t.data;
		for (int64_t b = 0; at && b < batch; b++) {
			at[b] = length == INGOT_LENGTH_CUMULATIVE ? sum : (int32_t)fresh[b].count;
			sum += (int32_t)fresh[b].count;
			if (length == INGOT_LENGTH_CUMULATIVE) at[b + 1] = sum;
		}
	}
	if (position == INGOT_POSITION_ARRAY) {
		buffer_dense(&c->new_positions, INGOT_I32, 1, &batch, 0, allocate);
		for (int64_t b = 0; allocate && b < batch; b++)
			((int32_t *)c->new_positions.t.data)[b] = (int32_t)fresh[b].start;
	}
	const int64_t k_shape[] = {stacked ? 1 : batch, heads, token_rows, p->d},
				  v_shape[] = {stacked ? 1 : batch, heads, token_rows, p->dv};
	buffer_dense(&c->k_new, (int32_t)p->dtype, 4, k_shape, p->misalign, allocate);
	buffer_dense(&c->v_new, (int32_t)p->dtype, 4, v_shape, p->misalign, allocate);

	/* The cache: slots, or pages in a random order. */
	const int64_t size = p->pages ? p->page_size : 1, columns = p->pages ? (p->sk + size - 1) / size : 0;
	const int64_t rows_most = p->pages == PAGES_DENSE ? columns * size : p->sk, pages = batch * columns + 1;
	int64_t *order = tool_alloc(sizeof(int64_t) * (size_t)(pages + 1));
	for (int64_t i = 0; i < pages; i++) order[i] = i;
	for (int64_t i = pages - 1; i > 0; i--) {
		const int64_t j = (int64_t)(tool_hash(c->seed, RANDOM_ORDER, (uint64_t)i) % (uint64_t)(i + 1)), kept = order[i];
		order[i] = order[j];
		order[j] = kept;
	}
	const bool last_page = p->pages == PAGES_CSR_LAST;
	for (int64_t b = 0; b < batch; b++) {
		before[b] = p->k_given ? p->k_lengths[b]
		            : c->mode == CASE_SPEED
		                ? rows_most - fresh[b].count /* all of them fit */
		                : (int64_t)(tool_hash(c->seed, RANDOM_LENGTH, (uint64_t)b) % (uint64_t)(rows_most + 1));
		/* What the last page tells is the length after: it must not lie before its own page. */
		if (last_page) before[b] = clamp(before[b], 0, rows_most - fresh[b].count);
	}
	const int64_t page_shape[2][4] = {{pages, size, heads, p->d}, {pages, size, heads, p->dv}};
	const int64_t slot_shape[2][4] = {{batch, heads, p->sk, p->d}, {batch, heads, p->sk, p->dv}};
	for (int i = 0; i < 2; i++)
		buffer_dense(i ? &c->v : &c->k, (int32_t)p->kv_dtype, 4, p->pages ? page_shape[i] : slot_shape[i], p->misalign,
		             allocate);
	buffer_dense(&c->lengths, INGOT_I32, 1, &batch, 0, allocate);
	int64_t *list = tool_alloc(sizeof(int64_t) * (size_t)(batch * columns + 1)); /* pages of each sequence */
	int64_t *has = tool_alloc(sizeof(int64_t) * (size_t)(batch + 1));
	for (int64_t b = 0; b < batch; b++) {
		const int64_t after = before[b] + fresh[b].count;
		has[b] = p->pages == PAGES_DENSE ? columns : last_page ? (after + size - 1) / size : columns;
		for (int64_t i = 0; i < has[b]; i++) list[b * columns + i] = order[b * columns + i];
		if (allocate)
			((int32_t *)c->lengths.t.data)[b] = (int32_t)(last_page  ? (has[b] ? after - (has[b] - 1) * size : 0)
			                                              : p->after ? after
			                                                         : before[b]);
	}
	if (p->pages == PAGES_DENSE) {
		const int64_t shape[] = {batch, columns};
		buffer_dense(&c->page_table, INGOT_I32, 2, shape, 0, allocate);
		for (int64_t i = 0; allocate && i < batch * columns; i++)
			((int32_t *)c->page_table.t.data)[i] = (int32_t)list[i];
	} else if (p->pages) {
		const int64_t n = batch + 1;
		int64_t used = 0;
		for (int64_t b = 0; b < batch; b++) used += has[b];
		buffer_dense(&c->page_indptr, INGOT_I32, 1, &n, 0, allocate);
		buffer_dense(&c->page_indices, INGOT_I32, 1, &used, 0, allocate);
		used = 0;
		for (int64_t b = 0; allocate && b <= batch; b++) {
			((int32_t *)c->page_indptr.t.data)[b] = (int32_t)used;
			for (int64_t i = 0; b < batch && i < has[b]; i++)
				((int32_t *)c->page_indices.t.data)[used++] = (int32_t)list[b * columns + i];
		}
	}
	float factor[2] = {1, 1};
	if (p->descale && tool_is_8bit((int32_t)p->kv_dtype)) {
		const int64_t one[] = {1}, table[] = {batch, heads};
		for (int i = 0; i < 2; i++) {
			buffer *t = i ? &c->v_descale : &c->k_descale;
			buffer_dense(t, INGOT_F32, p->descale == 1 ? 1 : 2, p->descale == 1 ? one : table, 0, allocate);
			for (int64_t x = 0; allocate && x < tool_elements(&t->t); x++)
				((float *)t->t.data)[x] =
					0.01f + (float)(tool_hash(c->seed, RANDOM_SCALE + (uint64_t)i * 100, (uint64_t)x) % 1000) * 0.001f;
		}
	}
	c->append = (ingot_kv_append_params){
		.struct_size = sizeof c->append,
		.varlen = INGOT_VARLEN((uint32_t)p->q_side,
	                           INGOT_SIDE(0, last_page ? INGOT_LENGTH_LAST_PAGE : INGOT_LENGTH_INDIVIDUAL, 0), 0),
		.k_new = c->k_new.t,
		.v_new = c->v_new.t,
		.k = c->k.t,
		.v = c->v.t,
		.k_descale = c->k_descale.t,
		.v_descale = c->v_descale.t,
		.new_lengths = c->new_lengths.t,
		.new_positions = c->new_positions.t,
		.k_lengths = c->lengths.t,
		.page_table = c->page_table.t,
		.page_indptr = c->page_indptr.t,
		.page_indices = c->page_indices.t,
		.batch = batch,
		.max_seqlen_new = p->sq,
		.max_seqlen_k = rows_most,
		.lengths_after = p->after || last_page,
	};

	for (int i = 0; i < 2 && c->mode == CASE_SPEED; i++)
		buffer_fill_normal(i ? &c->v_new : &c->k_new, tool_hash(c->seed, RANDOM_NEW, (uint64_t)i));
	/* The cache's bytes before, and what they must be after. */
	for (int i = 0; i < 2 && c->mode == CASE_CHECK; i++) {
		buffer *from = i ? &c->v_new : &c->k_new, *to = i ? &c->v : &c->k;
		const int64_t width = i ? p->dv : p->d, new_elements = tool_elements(&from->t);
		buffer_fill_dead(from);
		for (int64_t x = 0; x < new_elements; x++)
			tool_store(from->t.data, x, (int32_t)p->dtype,
			           3 * tool_normal(c->seed, i ? RANDOM_NEW_V : RANDOM_NEW, (uint64_t)x));
		for (size_t x = 0; x < to->bytes; x++)
			to->memory[x] = (unsigned char)tool_hash(c->seed, RANDOM_CACHE + (uint64_t)i, x);
		c->before[i] = tool_alloc(to->bytes);
		c->want[i] = tool_alloc(to->bytes);
		memcpy(c->before[i], to->memory, to->bytes);
		for (int64_t b = 0; b < batch; b++)
			for (int64_t h = 0; h < heads; h++)
				for (int64_t t = 0; t < fresh[b].count; t++) {
					const int64_t row = before[b] + t;
					if (row < 0 || row >= (p->pages ? has[b] * size : p->sk) || row >= rows_most) continue;
					const ingot_tensor *d = i ? &c->v_descale.t : &c->k_descale.t;
					factor[i] = d->dtype == INGOT_NONE ? 1 : ((const float *)d->data)[d->ndim == 1 ? 0 : b * heads + h];
					const int64_t source =
						fresh[b].slot * from->t.stride[0] + h * from->t.stride[1] + (fresh[b].start + t) * width;
					const int64_t place = p->pages ? list[b * columns + row / size] * to->t.stride[0] +
					                                     row % size * to->t.stride[1] + h * to->t.stride[2]
					                               : b * to->t.stride[0] + h * to->t.stride[1] + row * to->t.stride[2];
					for (int64_t e = 0; e < width; e++)
						tool_store(to->t.data, place + e, (int32_t)p->kv_dtype,
						           tool_load(from->t.data, source + e, (int32_t)p->dtype) / factor[i]);
				}
		memcpy(c->want[i], to->memory, to->bytes);
		memcpy(to->memory, c->before[i], to->bytes);
		buffer_seal(from);
	}
	buffer *const integers[] = {&c->new_lengths, &c->new_positions, &c->lengths,
	                            &c->page_table,  &c->page_indptr,   &c->page_indices};
	for (size_t i = 0; i < sizeof integers / sizeof *integers; i++) buffer_seal(integers[i]);
	free(fresh);
	free(before);
	free(order);
	free(list);
	free(has);
}

static bool append_verify(const small_case *c, char *text, size_t capacity) {
	const buffer *const inputs[] = {&c->k_new,   &c->v_new,      &c->new_lengths, &c->new_positions,
	                                &c->lengths, &c->page_table, &c->page_indptr, &c->page_indices};
	for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
		if (!buffer_intact(inputs[i])) return fail(text, capacity, "input %zu of the append was written", i);
	for (int i = 0; i < 2; i++) {
		const buffer *b = i ? &c->v : &c->k;
		for (size_t x = 0; x < b->bytes; x++)
			if (b->memory[x] != c->want[i][x])
				return fail(text, capacity, "cache %s, byte %td: got 0x%02x, want 0x%02x, was 0x%02x", i ? "v" : "k",
				            b->memory + x - (const unsigned char *)b->t.data, b->memory[x], c->want[i][x],
				            c->before[i][x]);
	}
	return true;
}

/* ---- the dropout mask ---- */

static void mask_build(small_case *c) {
	const problem *p = &c->p;
	const int64_t shape[] = {p->batch, p->heads_q, p->sq, p->sk}, one = 1;
	const bool allocate = c->mode != CASE_SHAPES;
	int64_t stride[] = {0, 0, p->sk + p->pitch, 1};
	stride[1] = stride[2] * p->sq;
	stride[0] = stride[1] * p->heads_q;
	buffer_make(&c->mask, INGOT_BOOL, 4, shape, stride, p->misalign, allocate);
	const uint64_t seed = tool_hash(c->seed, RANDOM_NEW, 0),
				   offset = tool_hash(c->seed, RANDOM_NEW, 1) >> (c->seed % 2 ? 2 : 40);
	c->dropout = (ingot_attn_dropout_mask_params){
		.struct_size = sizeof c->dropout, .dropout_p = (float)p->dropout, .mask = c->mask.t};
	if (p->cells) {
		buffer_dense(&c->seed_cell, INGOT_U64, 1, &one, 0, allocate);
		buffer_dense(&c->offset_cell, INGOT_U64, 1, &one, 0, allocate);
		if (allocate) {
			*(uint64_t *)c->seed_cell.t.data = seed;
			*(uint64_t *)c->offset_cell.t.data = offset - 7;
		}
		c->dropout.dropout_seed_ptr = c->seed_cell.t;
		c->dropout.dropout_offset_ptr = c->offset_cell.t;
		c->dropout.dropout_offset = 7;
		buffer_seal(&c->seed_cell);
		buffer_seal(&c->offset_cell);
	} else {
		c->dropout.dropout_seed = seed;
		c->dropout.dropout_offset = offset;
	}
}

static bool mask_verify(small_case *c, char *text, size_t capacity) {
	const problem *p = &c->p;
	oracle o = {.heads_q = p->heads_q, .max_q = p->sq, .max_k = p->sk, .dropout_p = p->dropout};
	o.seed = p->cells ? *(const uint64_t *)c->seed_cell.t.data : c->dropout.dropout_seed;
	o.offset = c->dropout.dropout_offset + (p->cells ? *(const uint64_t *)c->offset_cell.t.data : 0);
	for (int64_t b = 0; b < p->batch; b++)
		for (int64_t h = 0; h < p->heads_q; h++)
			for (int64_t i = 0; i < p->sq; i++)
				for (int64_t j = 0; j < p->sk; j++) {
					const int64_t at = b * c->mask.t.stride[0] + h * c->mask.t.stride[1] + i * c->mask.t.stride[2] + j;
					const unsigned char got = ((const unsigned char *)c->mask.t.data)[at];
					if (got != (oracle_keeps(&o, b, h, i, j) ? 1 : 0))
						return fail(text, capacity, "mask[%lld,%lld,%lld,%lld] is %d; the generator says otherwise",
						            (long long)b, (long long)h, (long long)i, (long long)j, got);
					buffer_poison_at(&c->mask, at);
				}
	int64_t byte;
	if (buffer_first_stray(&c->mask, &byte))
		return fail(text, capacity, "mask: byte %lld, outside the tensor, was written", (long long)byte);
	return buffer_intact(&c->seed_cell) && buffer_intact(&c->offset_cell)
	           ? true
	           : fail(text, capacity, "a dropout cell was written");
}

/* ---- all three ---- */

bool small_build(small_case *c, const problem *p, uint64_t seed, case_mode mode, char *error, size_t capacity) {
	*c = (small_case){.p = *p, .seed = seed, .mode = mode};
	if (!case_sizes(p, error, capacity)) return false;
	switch ((tool_operator)p->op) {
	case TOOL_MERGE:
		if (p->separate && (p->parts < 1 || p->parts > INGOT_MERGE_PARTS))
			return fail(error, capacity, "separate parts are 1 to %d", INGOT_MERGE_PARTS);
		if (p->inplace && !p->separate) return fail(error, capacity, "inplace needs separate parts");
		merge_build(c);
		break;
	case TOOL_APPEND: append_build(c); break;
	case TOOL_MASK: mask_build(c); break;
	default: return fail(error, capacity, "this operator is not merge, append or mask");
	}
	small_reset(c);
	return true;
}

const void *small_params(const small_case *c) {
	return c->p.op == TOOL_MERGE    ? (const void *)&c->merge
	       : c->p.op == TOOL_APPEND ? (const void *)&c->append
	                                : &c->dropout;
}

void small_reset(small_case *c) {
	if (c->mode != CASE_CHECK) return;
	buffer_poison(&c->out);
	buffer_poison(&c->lse);
	buffer_poison(&c->mask);
	if (c->p.op == TOOL_APPEND) {
		memcpy(c->k.memory, c->before[0], c->k.bytes);
		memcpy(c->v.memory, c->before[1], c->v.bytes);
	}
	if (c->p.op == TOOL_MERGE && c->p.inplace) {
		memcpy(c->parts_out[0].memory, c->before[0], c->parts_out[0].bytes);
		memcpy(c->parts_lse[0].memory, c->before[1], c->parts_lse[0].bytes);
	}
}

uint64_t small_hash(const small_case *c) {
	const buffer *const outputs[] = {&c->out,
	                                 &c->lse,
	                                 &c->k,
	                                 &c->v,
	                                 &c->mask,
	                                 c->p.inplace ? &c->parts_out[0] : &c->out,
	                                 c->p.inplace ? &c->parts_lse[0] : &c->out};
	uint64_t hash = 0;
	for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++)
		if (outputs[i]->memory) hash = hash * 31 + XXH3_64bits(outputs[i]->memory, outputs[i]->bytes);
	return hash;
}

bool small_verify(small_case *c, const small_case *yardstick, double *ratio, char *text, size_t capacity) {
	*ratio = 0;
	switch ((tool_operator)c->p.op) {
	case TOOL_MERGE: return merge_verify(c, yardstick, ratio, text, capacity);
	case TOOL_APPEND: return append_verify(c, text, capacity);
	default: return mask_verify(c, text, capacity);
	}
}

void small_release(small_case *c) {
	for (int i = 0; i < INGOT_MERGE_PARTS; i++) {
		buffer_release(&c->parts_out[i]);
		buffer_release(&c->parts_lse[i]);
	}
	buffer *const all[] = {&c->k_new,       &c->v_new,         &c->k_descale, &c->v_descale,
	                       &c->new_lengths, &c->new_positions, &c->lengths,   &c->page_table,
	                       &c->page_indptr, &c->page_indices,  &c->seed_cell, &c->offset_cell,
	                       &c->out,         &c->lse,           &c->k,         &c->v,
	                       &c->mask};
	for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_release(all[i]);
	for (int i = 0; i < 2; i++) {
		free(c->before[i]);
		free(c->want[i]);
	}
	free(c->want_out);
	free(c->want_lse);
	*c = (small_case){0};
}
