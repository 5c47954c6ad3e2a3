/*
 * The check stage: one engine over each operator's field table. A caller's struct of any size becomes one const problem in
 * normal form, or a status and a sentence; after this stage nobody reads user structs.
 */
#include <stdio.h>
#include <string.h>

#include "operator/operator.h"
#include "support/error.h"

static const ingot__operator_def *const operators[INGOT__OPERATORS] = {
	[INGOT__ATTN_FWD] = &ingot__attn_fwd_def,
	[INGOT__ATTN_BWD] = &ingot__attn_bwd_def,
	[INGOT__ATTN_MERGE] = &ingot__attn_merge_def,
	[INGOT__KV_APPEND] = &ingot__kv_append_def,
	[INGOT__ATTN_DROPOUT_MASK] = &ingot__attn_dropout_mask_def,
};

static const uint8_t dtype_sizes[] = {0, 4, 2, 2, 1, 1, 1, 1, 4, 8, 8, 1};
enum { DTYPES = sizeof dtype_sizes };

/* No struct of this library will ever be larger: a struct_size beyond it is a struct that was never initialised. */
enum { LARGEST_STRUCT = 65536 };

/* A caller's struct of any size as one of ours: *whole is the caller's where it is long enough, else `own`, to which it is
 * copied and filled up with zeros. */
static ingot_status adopt(void *own, size_t size, size_t first_size, const void *given, const char *what,
                          const void **whole) {
	uint32_t given_size;
	*whole = given;
	if (!given) return ingot__fail(INGOT_INVALID, "%s is NULL", what);
	memcpy(&given_size, given, sizeof given_size);
	if (given_size < first_size)
		return ingot__fail(INGOT_INVALID, "%s.struct_size is %u; set it to sizeof the struct, at least %zu", what,
		                   given_size, first_size);
	if (given_size > LARGEST_STRUCT)
		return ingot__fail(INGOT_VERSION_MISMATCH,
		                   "%s.struct_size is %u; this library's struct has %zu bytes and none has over %d", what,
		                   given_size, size, LARGEST_STRUCT);
	const unsigned char *bytes = given;
	for (size_t i = size; i < given_size; i++)
		if (bytes[i])
			return ingot__fail(
				INGOT_VERSION_MISMATCH,
				"%s has a non-zero byte at offset %zu; library %s knows %zu bytes, later fields must be 0", what, i,
				ingot_version_string(), size);
	if (given_size < size) {
		memcpy(own, given, given_size);
		memset((char *)own + given_size, 0, size - given_size);
		*whole = own;
	}
	return INGOT_OK;
}

ingot_status ingot__check_options(const ingot_options *given, ingot_options *o) {
	enum { FIRST_SIZE = offsetof(ingot_options, reserved) + sizeof(int32_t) };
	if (!given) {
		memset(o, 0, sizeof *o);
		return INGOT_OK;
	}
	const void *whole;
	ingot_status s = adopt(o, sizeof *o, FIRST_SIZE, given, "options", &whole);
	if (s) return s;
	if (whole != o) memcpy(o, whole, sizeof *o);
	const uint32_t known = INGOT_DETERMINISTIC | INGOT_BATCH_INVARIANT | INGOT_STRICT;
	if (o->flags & ~known)
		return ingot__fail(INGOT_INVALID, "options.flags is 0x%x; allowed are the bits 0x%x", o->flags, known);
	if (!o->alloc != !o->free)
		return ingot__fail(INGOT_INVALID, "options.%s is NULL; alloc and free are given both or neither",
		                   o->alloc ? "free" : "alloc");
	if (!o->workspace && o->workspace_size)
		return ingot__fail(INGOT_INVALID, "options.workspace is NULL but workspace_size is %llu; give both or neither",
		                   (unsigned long long)o->workspace_size);
	if ((uintptr_t)o->workspace % 256)
		return ingot__fail(INGOT_INVALID, "options.workspace is %p; it must be aligned to 256 bytes", o->workspace);
	if (o->num_threads < 0 || o->num_threads > 1024)
		return ingot__fail(INGOT_INVALID, "options.num_threads is %d; allowed are 0 (default) to 1024", o->num_threads);
	if (o->reserved) return ingot__fail(INGOT_INVALID, "options.reserved is %d; it must be 0", o->reserved);
	return INGOT_OK;
}

static ingot_status bad_dtype(const char *name, int32_t dtype, unsigned allowed) {
	char list[192] = "";
	for (int i = 1; i < DTYPES; i++)
		if (allowed >> i & 1) {
			if (*list) strcat(list, ", ");
			strcat(list, ingot__dtype_name(i));
		}
	if (dtype < 0 || dtype >= DTYPES)
		return ingot__fail(INGOT_INVALID, "%s.dtype is %d, which is no dtype; allowed are %s", name, dtype, list);
	return ingot__fail(INGOT_INVALID, "%s.dtype is %s; allowed are %s", name, ingot__dtype_name(dtype), list);
}

/* A tensor by itself, present or required. On OK, strides of axes of extent <= 1 and everything past ndim are 0. */
static ingot_status check_tensor(const char *name, const ingot__field *f, bool data_read, ingot_tensor *t) {
	if (t->dtype == INGOT_NONE) return ingot__fail(INGOT_INVALID, "%s is absent (dtype NONE); it is required", name);
	if (t->dtype < 0 || t->dtype >= DTYPES || !(f->dtypes >> t->dtype & 1)) return bad_dtype(name, t->dtype, f->dtypes);
	if (t->ndim < 1 || t->ndim > 5 || !(f->ranks >> t->ndim & 1)) {
		char list[32] = "";
		for (int n = 1; n <= 5; n++)
			if (f->ranks >> n & 1)
				snprintf(list + strlen(list), sizeof list - strlen(list), "%s%d", *list ? " or " : "", n);
		return ingot__fail(INGOT_INVALID, "%s.ndim is %d; it must be %s", name, t->ndim, list);
	}
	const int size = dtype_sizes[t->dtype];
	/* Dense strides of an empty tensor hold zeros: without elements none can meet another. */
	bool empty = false;
	for (int a = 0; a < t->ndim; a++) empty |= t->shape[a] == 0;
	int64_t reach = 1;
	for (int a = 0; a < t->ndim; a++) {
		if (t->shape[a] < 0 || t->shape[a] > INT32_MAX)
			return ingot__fail(INGOT_INVALID, "%s.shape[%d] is %lld; allowed are 0 to 2147483647", name, a,
			                   (long long)t->shape[a]);
		if (t->shape[a] <= 1) {
			t->stride[a] = 0;
			continue;
		}
		if (t->stride[a] < 0)
			return ingot__fail(INGOT_INVALID, "%s.stride[%d] is %lld; strides must be >= 0", name, a,
			                   (long long)t->stride[a]);
		if ((f->flags & INGOT__OUTPUT) && t->stride[a] == 0 && !empty)
			return ingot__fail(INGOT_INVALID,
			                   "%s.stride[%d] is 0 on an axis of extent %lld; an output's elements must be distinct",
			                   name, a, (long long)t->shape[a]);
		int64_t step;
		if (__builtin_mul_overflow(t->shape[a] - 1, t->stride[a], &step) ||
		    __builtin_add_overflow(reach, step, &reach) || reach > INT64_MAX / 16)
			return ingot__fail(INGOT_INVALID,
			                   "%s.stride[%d] is %lld; with extent %lld the tensor leaves the address space", name, a,
			                   (long long)t->stride[a], (long long)t->shape[a]);
	}
	const int last = t->ndim - 1;
	if (t->shape[last] > 1 && !empty) {
		if ((f->flags & INGOT__LAST_1) && t->stride[last] != 1)
			return ingot__fail(INGOT_INVALID, "%s.stride[%d] is %lld; the last axis must have stride 1", name, last,
			                   (long long)t->stride[last]);
		if ((f->flags & INGOT__LAST_01) && t->stride[last] > 1)
			return ingot__fail(INGOT_INVALID,
			                   "%s.stride[%d] is %lld; the last axis must have stride 1, or 0 to broadcast", name, last,
			                   (long long)t->stride[last]);
	}
	for (int a = t->ndim; a < 5; a++) t->shape[a] = t->stride[a] = 0;
	if (data_read && !empty && !t->data)
		return ingot__fail(INGOT_INVALID, "%s.data is NULL; the tensor has elements", name);
	if (!empty && size > 1 && (uintptr_t)t->data % (unsigned)size)
		return ingot__fail(INGOT_INVALID, "%s.data is %p; it must be aligned to the element's %d bytes", name, t->data,
		                   size);
	return INGOT_OK;
}

/* The tensors of a field, of which an optional one may be absent. */
static ingot_status read_tensors(const ingot__field *f, const ingot_tensor *from, bool data_read, ingot_tensor *to) {
	for (int i = 0; i < f->count; i++) {
		if (from[i].dtype == INGOT_NONE && !(f->flags & INGOT__REQUIRED)) continue;
		to[i] = from[i];
		char name[48];
		const char *full = f->name;
		if (f->count > 1) {
			/* by hand: this runs in every call, and a count is one digit */
			const size_t length = strlen(f->name);
			memcpy(name, f->name, length);
			memcpy(name + length, (char[]){'[', (char)('0' + i), ']', 0}, 4);
			full = name;
		}
		const ingot_status s = check_tensor(full, f, data_read, &to[i]);
		if (s) return s;
	}
	return INGOT_OK;
}

ingot_status ingot__check(ingot__operator op, const void *params, const ingot_options *options, bool data_read,
                          ingot__problem *p) {
	_Alignas(16) unsigned char copy[4096];
	const ingot__operator_def *const def = operators[op];
	_Static_assert(sizeof(ingot_attn_fwd_params) <= sizeof copy && sizeof(ingot_attn_bwd_params) <= sizeof copy &&
	                   sizeof(ingot_attn_merge_params) <= sizeof copy && sizeof(ingot_kv_append_params) <= sizeof copy,
	               "the copy holds any params struct");
	const void *whole;
	ingot_status s = adopt(copy, def->size, def->first_size, params, "params", &whole);
	if (s) return s;
	ingot__raw raw;
	memset(&raw, 0, sizeof raw);
	memset(p, 0, op == INGOT__ATTN_MERGE ? sizeof *p : offsetof(ingot__problem, out_parts));
	raw.data_read = data_read;
	p->op = op;
	p->group = 1;
	p->deterministic = options->flags & INGOT_DETERMINISTIC;
	p->batch_invariant = options->flags & INGOT_BATCH_INVARIANT;
	for (const ingot__field *f = def->fields; f < def->fields + def->field_count; f++) {
		const unsigned char *from = (const unsigned char *)whole + f->offset;
		unsigned char *to = (f->flags & INGOT__TO_RAW ? (unsigned char *)&raw : (unsigned char *)p) + f->target;
		if (f->kind != INGOT__TENSOR) {
			/* two copies of known size, which need no call */
			if (f->kind >= INGOT__I64) memcpy(to, from, 8);
			else memcpy(to, from, 4);
			continue;
		}
		/* most are absent, and what they would be is 0 already */
		const bool may_be_absent = !(f->flags & INGOT__REQUIRED);
		if (f->count == 1 && may_be_absent && ((const ingot_tensor *)(const void *)from)->dtype == INGOT_NONE) continue;
		if ((s = read_tensors(f, (const ingot_tensor *)(const void *)from, data_read, (ingot_tensor *)(void *)to)))
			return s;
	}
	s = def->normalize(&raw, p);
	/* Kernels walk over each key head's group, which is 1 where there are no query heads: then no rows for it to have. */
	if (!s && p->heads_q == 0) p->q_side.capacity = p->q_side.max_seqlen = 0;
	return s;
}
