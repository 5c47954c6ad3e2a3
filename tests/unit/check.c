/*
 * The check stage: each refusal names its field and what is allowed; the normal form means what the arguments meant. The masks'
 * normal form is compared pair by pair over all small sizes, lengths and bounds; the variable-length words over all words.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pipeline.h"

static ingot_tensor view(int32_t dtype, int ndim, const int64_t *shape) {
	ingot_tensor t = {.dtype = dtype, .ndim = ndim};
	int64_t stride = 1;
	for (int a = ndim - 1; a >= 0; a--) {
		t.shape[a] = shape[a], t.stride[a] = stride;
		stride *= shape[a] > 1 ? shape[a] : 1;
	}
	return t;
}
#define VIEW(dtype, ...) \
	view(INGOT_##dtype, (int)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (const int64_t[]){__VA_ARGS__})

/* One valid call of each operator, tensors without data. B2 Hq4 Hk2 Sq5 Sk7 D8. */
static ingot_attn_fwd_params fwd(void) {
	return (ingot_attn_fwd_params){
		.struct_size = sizeof(ingot_attn_fwd_params),
		.q = VIEW(BF16, 2, 4, 5, 8),
		.k = VIEW(BF16, 2, 2, 7, 8),
		.v = VIEW(BF16, 2, 2, 7, 8),
		.out = VIEW(BF16, 2, 4, 5, 8),
		.lse = VIEW(F32, 2, 4, 5),
	};
}
static ingot_attn_bwd_params bwd(void) {
	const ingot_attn_fwd_params f = fwd();
	return (ingot_attn_bwd_params){
		.struct_size = sizeof(ingot_attn_bwd_params),
		.q = f.q,
		.k = f.k,
		.v = f.v,
		.out = f.out,
		.lse = f.lse,
		.dout = f.out,
		.dq = f.q,
		.dk = f.k,
		.dv = f.v,
	};
}
static ingot_attn_merge_params merge(void) {
	ingot_attn_merge_params p = {.struct_size = sizeof p, .out = VIEW(F32, 2, 4, 5, 8), .lse = VIEW(F32, 2, 4, 5)};
	for (int i = 0; i < 3; i++) p.out_parts[i] = p.out, p.lse_parts[i] = p.lse;
	return p;
}
static ingot_kv_append_params append(void) {
	return (ingot_kv_append_params){
		.struct_size = sizeof(ingot_kv_append_params),
		.varlen = INGOT_VARLEN(0, INGOT_SIDE(0, INGOT_LENGTH_INDIVIDUAL, 0), 0),
		.k_new = VIEW(BF16, 2, 2, 3, 8),
		.v_new = VIEW(BF16, 2, 2, 3, 8),
		.k = VIEW(BF16, 2, 2, 7, 8),
		.v = VIEW(BF16, 2, 2, 7, 8),
		.k_lengths = VIEW(I32, 2),
	};
}
static ingot_attn_dropout_mask_params keep(void) {
	return (ingot_attn_dropout_mask_params){
		.struct_size = sizeof(ingot_attn_dropout_mask_params), .dropout_p = 0.25f, .mask = VIEW(BOOL, 2, 4, 5, 7)};
}

static ingot__problem problem;
static const ingot_options defaults;

static void accepted(ingot__operator op, const void *params, const char *what, int line) {
	if (ingot__check(op, params, &defaults, false, &problem) != INGOT_OK)
		fail_msg("line %d: %s is refused: %s", line, what, ingot_last_error());
}

static void refused(ingot__operator op, const void *params, bool run, const char *field, const char *allowed,
                    const char *what, int line) {
	const ingot_status s = ingot__check(op, params, &defaults, run, &problem);
	if (s != INGOT_INVALID) fail_msg("line %d: %s gives %s", line, what, ingot_status_name(s));
	if (!strstr(ingot_last_error(), field) || !strstr(ingot_last_error(), allowed))
		fail_msg("line %d: %s: no \"%s\" and \"%s\" in: %s", line, what, field, allowed, ingot_last_error());
}

/* X(change, field, allowed): a valid call with one change is refused by that field's name. */
#define REFUSED(make, OP, change, field, allowed)                                      \
	do {                                                                               \
		__typeof__(make()) p = make();                                                 \
		change;                                                                        \
		refused(INGOT__##OP, &p, false, field, allowed, #make ": " #change, __LINE__); \
	} while (0)
#define ACCEPTED(make, OP, change)                               \
	do {                                                         \
		__typeof__(make()) p = make();                           \
		change;                                                  \
		accepted(INGOT__##OP, &p, #make ": " #change, __LINE__); \
	} while (0)

/* ---- each field ---------------------------------------------------------------------------------------------------------- */

/* What any tensor of an operator may get wrong by itself. */
static void each_tensor(ingot__operator op, const void *valid, size_t size, size_t offset, const char *name,
                        bool required) {
	unsigned char *const p = malloc(size);
	assert_non_null(p);
	ingot_tensor *const t = (ingot_tensor *)(void *)(p + offset);
#define TENSOR_REFUSED(change, field, allowed)                    \
	do {                                                          \
		char text_[96];                                           \
		memcpy(p, valid, size);                                   \
		change;                                                   \
		snprintf(text_, sizeof text_, "%s" field, name);          \
		refused(op, p, false, text_, allowed, #change, __LINE__); \
	} while (0)
	TENSOR_REFUSED(t->dtype = 12, ".dtype", "allowed are");
	TENSOR_REFUSED(t->dtype = -1, ".dtype", "allowed are");
	TENSOR_REFUSED(t->dtype = INT32_MAX, ".dtype", "allowed are");
	TENSOR_REFUSED(t->dtype = INGOT_I64, ".dtype", "allowed are");
	TENSOR_REFUSED(t->ndim = 0, ".ndim", "must be");
	TENSOR_REFUSED(t->ndim = 6, ".ndim", "must be");
	TENSOR_REFUSED(t->ndim = -1, ".ndim", "must be");
	TENSOR_REFUSED(t->ndim = INT32_MIN, ".ndim", "must be");
	TENSOR_REFUSED(t->shape[0] = -1, ".shape[0]", "0 to 2147483647");
	TENSOR_REFUSED(t->shape[0] = (int64_t)1 << 31, ".shape[0]", "0 to 2147483647");
	TENSOR_REFUSED(t->shape[0] = INT64_MIN, ".shape[0]", "0 to 2147483647");
	TENSOR_REFUSED(t->stride[1] = -1, ".stride[1]", ">= 0");
	TENSOR_REFUSED(t->stride[1] = INT64_MAX, ".stride[1]", "address space");
	TENSOR_REFUSED(t->stride[t->ndim - 1] = 2, ".stride[", "stride 1");
	TENSOR_REFUSED(t->data = (void *)(uintptr_t)3, ".data", "aligned");
	if (required) TENSOR_REFUSED(t->dtype = INGOT_NONE, "", "required");
	/* run reads data: NULL is refused by name, unless there are no elements */
	memcpy(p, valid, size);
	char text[96];
	snprintf(text, sizeof text, "%s.data is NULL", name);
	static uint64_t memory[4096];
	for (size_t o = 8; o + sizeof(ingot_tensor) <= size; o += 8) {
		ingot_tensor *const other = (ingot_tensor *)(void *)(p + o);
		/* whatever looks like a tensor of the valid call gets memory */
		if (other->dtype >= 1 && other->dtype <= INGOT_BOOL && other->ndim >= 1 && other->ndim <= 5 && !other->data &&
		    other->shape[0] > 0 && other->shape[0] < 10 && other->stride[0] > 0)
			other->data = memory;
	}
	t->data = NULL;
	refused(op, p, true, text, "has elements", "data = NULL", __LINE__);
	free(p);
}
#define EACH(make, OP, field, required)                                                                            \
	do {                                                                                                           \
		const __typeof__(make()) valid_ = make();                                                                  \
		each_tensor(INGOT__##OP, &valid_, sizeof valid_, offsetof(__typeof__(make()), field), #field, (required)); \
	} while (0)

static void test_tensors(void **state) {
	EACH(fwd, ATTN_FWD, q, true);
	EACH(fwd, ATTN_FWD, k, true);
	EACH(fwd, ATTN_FWD, v, true);
	EACH(fwd, ATTN_FWD, out, true);
	EACH(bwd, ATTN_BWD, q, true);
	EACH(bwd, ATTN_BWD, out, true);
	EACH(bwd, ATTN_BWD, dout, true);
	EACH(bwd, ATTN_BWD, dq, false);
	EACH(bwd, ATTN_BWD, dk, false);
	EACH(bwd, ATTN_BWD, dv, false);
	EACH(merge, ATTN_MERGE, out, true);
	EACH(merge, ATTN_MERGE, out_parts[0], false);
	EACH(merge, ATTN_MERGE, out_parts[2], false);
	EACH(append, KV_APPEND, k_new, true);
	EACH(append, KV_APPEND, v_new, false);
	EACH(append, KV_APPEND, k, true);
	EACH(append, KV_APPEND, v, false);
}

static void test_attention_fields(void **state) {
	ACCEPTED(fwd, ATTN_FWD, (void)0);
	ACCEPTED(fwd, ATTN_FWD, p.lse.dtype = INGOT_NONE);
	ACCEPTED(fwd, ATTN_FWD, p.out.dtype = INGOT_F32);
	ACCEPTED(fwd, ATTN_FWD, p.softmax_scale = -2);
	ACCEPTED(fwd, ATTN_FWD, p.batch = 2; p.max_seqlen_q = 5; p.max_seqlen_k = 7);
	ACCEPTED(fwd, ATTN_FWD, p.k.stride[1] = p.v.stride[0] = 0);
	REFUSED(fwd, ATTN_FWD, p.q.shape[1] = 3, "Hq", "multiple of Hk");
	REFUSED(fwd, ATTN_FWD, p.k.shape[1] = p.v.shape[1] = 0, "Hk", "multiple of Hk");
	REFUSED(fwd, ATTN_FWD, p.k.shape[0] = p.v.shape[0] = 3, "k.shape[0]", "2");
	REFUSED(fwd, ATTN_FWD, p.k.shape[3] = 4, "k.shape[3]", "must be 8");
	REFUSED(fwd, ATTN_FWD, p.v.shape[2] = 6, "v.shape[2]", "must be 7");
	REFUSED(fwd, ATTN_FWD, p.v.shape[1] = 1, "v.shape[1]", "must be 2");
	REFUSED(fwd, ATTN_FWD, p.out.shape[2] = 6, "out.shape[2]", "must be 5");
	REFUSED(fwd, ATTN_FWD, p.out.shape[3] = 16, "out.shape[3]", "must be 8");
	REFUSED(fwd, ATTN_FWD, p.out.stride[1] = 0, "out.stride[1]", "distinct");
	REFUSED(fwd, ATTN_FWD, p.lse.stride[2] = 0, "lse.stride[2]", "distinct");
	REFUSED(fwd, ATTN_FWD, p.lse.shape[1] = 2, "lse.shape[1]", "must be 4");
	REFUSED(fwd, ATTN_FWD, p.lse.ndim = 2, "lse.ndim", "3");
	REFUSED(fwd, ATTN_FWD, p.lse.dtype = INGOT_BF16, "lse.dtype", "F32");
	REFUSED(fwd, ATTN_FWD, p.q.shape[3] = p.k.shape[3] = 0, "head_dim", "1 to 512");
	REFUSED(fwd, ATTN_FWD, p.q = VIEW(BF16, 2, 4, 5, 513); p.k = VIEW(BF16, 2, 2, 7, 513), "head_dim", "1 to 512");
	ACCEPTED(fwd, ATTN_FWD, p.q = VIEW(BF16, 2, 4, 5, 576); p.k = VIEW(BF16, 2, 2, 7, 576);
	         p.v = VIEW(BF16, 2, 2, 7, 512); p.out = VIEW(BF16, 2, 4, 5, 512));
	REFUSED(fwd, ATTN_FWD, p.k.dtype = INGOT_F16, "v.dtype is BF16 and k.dtype F16", "one type");
	REFUSED(fwd, ATTN_FWD, p.k.dtype = p.v.dtype = INGOT_F16, "k.dtype is F16 and q.dtype BF16", "q's type");
	ACCEPTED(fwd, ATTN_FWD, p.k.dtype = p.v.dtype = INGOT_F8_E4M3);
	ACCEPTED(fwd, ATTN_FWD, p.q.dtype = p.k.dtype = p.v.dtype = INGOT_F8_E5M2);
	REFUSED(fwd, ATTN_FWD, p.q.dtype = INGOT_F32; p.k.dtype = p.v.dtype = INGOT_F8_E4M3, "k.dtype", "F16 or BF16");
	REFUSED(fwd, ATTN_FWD, p.out.dtype = INGOT_F8_E4M3, "out.dtype", "F32, F16, BF16");
	REFUSED(fwd, ATTN_FWD, p.bias = VIEW(BF16, 2, 4, 5, 6), "bias.shape[3]", "must be 7");
	REFUSED(fwd, ATTN_FWD, p.bias = VIEW(F16, 2, 4, 5, 7), "bias.dtype is F16", "F32, BOOL and q's type, here BF16");
	REFUSED(fwd, ATTN_FWD, p.bias = VIEW(F32, 4, 5, 7), "bias.ndim", "4");
	ACCEPTED(fwd, ATTN_FWD, p.bias = VIEW(BOOL, 1, 1, 1, 7));
	ACCEPTED(fwd, ATTN_FWD, p.bias = VIEW(F32, 2, 4, 5, 7); p.bias.stride[3] = 0);
	REFUSED(fwd, ATTN_FWD, p.alibi = VIEW(F32, 2); p.align = 1, "alibi.shape[0]", "must be 4");
	REFUSED(fwd, ATTN_FWD, p.alibi = VIEW(F32, 3, 4); p.align = 1, "alibi.shape[0]", "must be 2");
	REFUSED(fwd, ATTN_FWD, p.alibi = VIEW(F32, 4), "align", "TOP_LEFT or BOTTOM_RIGHT");
	REFUSED(fwd, ATTN_FWD, p.sink = VIEW(F32, 2), "sink.shape[0]", "must be 4");
	REFUSED(fwd, ATTN_FWD, p.q_descale = VIEW(F32, 1), "q_descale", "not 8-bit");
	REFUSED(fwd, ATTN_FWD, p.k_descale = VIEW(F32, 1), "k_descale", "not 8-bit");
	REFUSED(fwd, ATTN_FWD, p.k.dtype = p.v.dtype = INGOT_F8_E4M3; p.v_descale = VIEW(F32, 2, 4), "v_descale", "[2,2]");
	ACCEPTED(fwd, ATTN_FWD, p.q.dtype = p.k.dtype = p.v.dtype = INGOT_F8_E5M2; p.q_descale = VIEW(F32, 2, 4));
	REFUSED(fwd, ATTN_FWD, p.softmax_scale = NAN, "softmax_scale", "finite");
	REFUSED(fwd, ATTN_FWD, p.softmax_scale = -INFINITY, "softmax_scale", "finite");
	REFUSED(fwd, ATTN_FWD, p.softcap = -1, "softcap", ">= 0");
	REFUSED(fwd, ATTN_FWD, p.softcap = NAN, "softcap", "finite");
	REFUSED(fwd, ATTN_FWD, p.softcap = INFINITY, "softcap", "finite");
	REFUSED(fwd, ATTN_FWD, p.dropout_p = 1, "dropout_p", "[0, 1)");
	REFUSED(fwd, ATTN_FWD, p.dropout_p = NAN, "dropout_p", "[0, 1)");
	REFUSED(fwd, ATTN_FWD, p.dropout_seed_ptr = VIEW(U64, 1); p.dropout_seed = 1, "dropout_seed", "must be 0");
	REFUSED(fwd, ATTN_FWD, p.dropout_seed_ptr = VIEW(U64, 2), "dropout_seed_ptr.shape[0]", "must be 1");
	REFUSED(fwd, ATTN_FWD, p.dropout_offset_out = VIEW(I32, 1), "dropout_offset_out.dtype", "I64, U64");
	REFUSED(fwd, ATTN_FWD, p.mask = 3, "mask", "2 WINDOW");
	REFUSED(fwd, ATTN_FWD, p.mask = -1, "mask", "2 WINDOW");
	REFUSED(fwd, ATTN_FWD, p.align = 3, "align", "2 BOTTOM_RIGHT");
	REFUSED(fwd, ATTN_FWD, p.mask = INGOT_MASK_CAUSAL, "align", "TOP_LEFT or BOTTOM_RIGHT");
	REFUSED(fwd, ATTN_FWD, p.window_left = 1, "window_left", "must be 0");
	REFUSED(fwd, ATTN_FWD, p.mask = INGOT_MASK_CAUSAL; p.window_right = -1; p.align = 1, "window_right", "must be 0");
	REFUSED(fwd, ATTN_FWD, p.lse_base = 2, "lse_base", "1 BASE2");
	REFUSED(fwd, ATTN_FWD, p.batch = 3, "batch", "must be 2");
	REFUSED(fwd, ATTN_FWD, p.batch = -1, "batch", "0 to 2147483647");
	REFUSED(fwd, ATTN_FWD, p.max_seqlen_q = 4, "max_seqlen_q", "5");
	REFUSED(fwd, ATTN_FWD, p.max_seqlen_k = 8, "max_seqlen_k", "7");
	REFUSED(fwd, ATTN_FWD, p.q_lengths = VIEW(I32, 2), "q_lengths", "ignored");
	REFUSED(fwd, ATTN_FWD, p.k_positions = VIEW(I32, 2), "k_positions", "ignored");
	REFUSED(fwd, ATTN_FWD, p.varlen = INGOT_VARLEN_PADDED, "q_lengths", "int32 [3]");
	REFUSED(fwd, ATTN_FWD, p.varlen = 1u << 31, "varlen", "must be 0");
	REFUSED(fwd, ATTN_FWD, p.varlen = 1u << 16, "varlen", "stacked");
	REFUSED(fwd, ATTN_FWD, p.varlen = 2u << 16, "varlen", "1 TH");

	/* A stacked side of no tokens has no longest sequence to name; one with room for tokens must say it. */
	ACCEPTED(fwd, ATTN_FWD, p.varlen = INGOT_VARLEN_COMPACT; p.q = p.out = VIEW(BF16, 1, 4, 0, 8);
	         p.lse = VIEW(F32, 4, 0); p.k = p.v = VIEW(BF16, 1, 2, 0, 8); p.q_lengths = p.k_lengths = VIEW(I32, 4);
	         p.batch = 3);
	assert_int_equal(problem.q_side.max_seqlen, 0);
	assert_int_equal(problem.k_side.max_seqlen, 0);
	ACCEPTED(fwd, ATTN_FWD, p.varlen = INGOT_VARLEN_COMPACT; p.q = p.out = VIEW(BF16, 1, 4, 5, 8);
	         p.lse = VIEW(F32, 4, 5); p.k = p.v = VIEW(BF16, 1, 2, 0, 8); p.q_lengths = p.k_lengths = VIEW(I32, 4);
	         p.batch = 3; p.max_seqlen_q = 5);
	REFUSED(fwd, ATTN_FWD, p.varlen = INGOT_VARLEN_COMPACT; p.q = p.out = VIEW(BF16, 1, 4, 5, 8);
	        p.lse = VIEW(F32, 4, 5); p.k = p.v = VIEW(BF16, 1, 2, 7, 8); p.q_lengths = p.k_lengths = VIEW(I32, 4);
	        p.batch = 3; p.max_seqlen_q = 5, "max_seqlen_k", "mandatory");
	REFUSED(fwd, ATTN_FWD, p.varlen = INGOT_VARLEN_COMPACT; p.q = p.out = VIEW(BF16, 1, 4, 5, 8);
	        p.lse = VIEW(F32, 4, 5); p.k = p.v = VIEW(BF16, 1, 2, 7, 8); p.q_lengths = p.k_lengths = VIEW(I32, 4);
	        p.max_seqlen_q = p.max_seqlen_k = 5, "batch is 0", "mandatory where q is stacked");
	REFUSED(fwd, ATTN_FWD, p.varlen = 0x040B; p.q = p.out = VIEW(BF16, 1, 4, 5, 8); p.lse = VIEW(F32, 4, 5);
	        p.k = p.v = VIEW(BF16, 6, 4, 2, 8); p.q_lengths = VIEW(I32, 4); p.k_lengths = VIEW(I32, 3);
	        p.page_table = VIEW(I32, 3, 2); p.max_seqlen_q = 5, "batch is 0", "mandatory where q is stacked");

	ACCEPTED(bwd, ATTN_BWD, p.dq.dtype = p.dk.dtype = p.dv.dtype = INGOT_NONE);
	ACCEPTED(bwd, ATTN_BWD, p.bias = VIEW(BF16, 1, 4, 5, 7); p.dbias = VIEW(F32, 1, 4, 5, 7));
	REFUSED(bwd, ATTN_BWD, p.lse.dtype = INGOT_NONE, "lse", "required");
	REFUSED(bwd, ATTN_BWD, p.k.dtype = p.v.dtype = INGOT_F8_E4M3, "k.dtype", "F32, F16, BF16");
	REFUSED(bwd, ATTN_BWD, p.dout.shape[2] = 6, "dout.shape[2]", "must be 5");
	REFUSED(bwd, ATTN_BWD, p.dk.shape[1] = 4, "dk.shape[1]", "must be 2");
	REFUSED(bwd, ATTN_BWD, p.dv.stride[2] = 0, "dv.stride[2]", "distinct");
	REFUSED(bwd, ATTN_BWD, p.dbias = VIEW(F32, 2, 4, 5, 7), "dbias", "bias is absent");
	REFUSED(bwd, ATTN_BWD, p.bias = VIEW(BOOL, 2, 4, 5, 7); p.dbias = VIEW(F32, 2, 4, 5, 7), "dbias", "BOOL");
	REFUSED(bwd, ATTN_BWD, p.bias = VIEW(F32, 2, 4, 5, 7);
	        p.dbias = VIEW(F32, 1, 4, 5, 7), "dbias.shape[0]", "must be 2");
	REFUSED(bwd, ATTN_BWD, p.bias = VIEW(F32, 2, 4, 5, 7);
	        p.dbias = VIEW(F16, 2, 4, 5, 7), "dbias.dtype is F16", "F32");
	REFUSED(bwd, ATTN_BWD, p.dsink = VIEW(F32, 4), "dsink", "sink is absent");
	REFUSED(bwd, ATTN_BWD, p.sink = VIEW(F32, 4); p.dsink = VIEW(F32, 2), "dsink.shape[0]", "must be 4");
}

static void test_other_fields(void **state) {
	ACCEPTED(merge, ATTN_MERGE, (void)0);
	ACCEPTED(merge, ATTN_MERGE, p.lse.dtype = INGOT_NONE; p.out.dtype = INGOT_BF16);
	ACCEPTED(merge, ATTN_MERGE, memset(p.out_parts, 0, sizeof p.out_parts); memset(p.lse_parts, 0, sizeof p.lse_parts);
	         p.out_parts[0] = VIEW(BF16, 0, 2, 4, 5, 8); p.lse_parts[0] = VIEW(F32, 0, 2, 4, 5));
	REFUSED(merge, ATTN_MERGE, p.lse_base = -1, "lse_base", "1 BASE2");
	REFUSED(merge, ATTN_MERGE, p.out_parts[0].dtype = INGOT_NONE, "out_parts[0]", "required");
	REFUSED(merge, ATTN_MERGE, p.out_parts[1].dtype = p.lse_parts[1].dtype = INGOT_NONE, "out_parts[2]", "gap");
	REFUSED(merge, ATTN_MERGE, p.lse_parts[1].dtype = INGOT_NONE, "lse_parts[1]", "both");
	REFUSED(merge, ATTN_MERGE, p.lse_parts[7] = p.lse, "lse_parts[7]", "both");
	REFUSED(merge, ATTN_MERGE, p.out_parts[1].dtype = INGOT_F16, "out_parts[1].dtype is F16",
	        "[0] F32; parts must be of one type");
	REFUSED(merge, ATTN_MERGE, p.out_parts[2].shape[1] = 3, "out_parts[2].shape[1]", "must be 4");
	REFUSED(merge, ATTN_MERGE, p.lse_parts[2].shape[2] = 3, "lse_parts[2].shape[2]", "must be 5");
	REFUSED(merge, ATTN_MERGE, p.out_parts[0] = VIEW(F32, 3, 2, 4, 5, 8), "out_parts[1]", "stacked");
	REFUSED(merge, ATTN_MERGE, p.lse.shape[0] = 1, "lse.shape[0]", "must be 2");

	ACCEPTED(append, KV_APPEND, (void)0);
	ACCEPTED(append, KV_APPEND, p.v.dtype = p.v_new.dtype = INGOT_NONE);
	ACCEPTED(append, KV_APPEND, p.k.dtype = p.v.dtype = INGOT_F8_E4M3; p.k_descale = VIEW(F32, 2, 2));
	REFUSED(append, KV_APPEND, p.v.dtype = INGOT_NONE, "v is absent", "together");
	REFUSED(append, KV_APPEND, p.k.dtype = INGOT_F8_E4M3, "v.dtype is BF16", "one type");
	REFUSED(append, KV_APPEND, p.v_new.dtype = INGOT_NONE, "v_new is absent", "together");
	REFUSED(append, KV_APPEND, p.reserved = 1, "reserved", "must be 0");
	REFUSED(append, KV_APPEND, p.lengths_after = 2, "lengths_after", "0 and 1");
	REFUSED(append, KV_APPEND, p.varlen = 0, "varlen", "INDIVIDUAL");
	REFUSED(append, KV_APPEND, p.varlen = 0x0300, "varlen", "stacked");
	REFUSED(append, KV_APPEND, p.varlen = 0x0600, "lengths_after", "must be 1");
	REFUSED(append, KV_APPEND, p.k.shape[1] = p.v.shape[1] = 3, "k.shape[1]", "must be 2");
	REFUSED(append, KV_APPEND, p.v.shape[2] = 6, "v.shape[2]", "must be 7");
	REFUSED(append, KV_APPEND, p.k.dtype = INGOT_F16, "k.dtype is F16 and k_new's BF16", "8-bit");
	REFUSED(append, KV_APPEND, p.k_descale = VIEW(F32, 1), "k_descale", "not 8-bit");
	REFUSED(append, KV_APPEND, p.k_lengths = VIEW(I32, 3), "k_lengths.shape[0]", "must be 2");
	REFUSED(append, KV_APPEND, p.new_lengths = VIEW(I32, 2), "new_lengths", "ignored");
	REFUSED(append, KV_APPEND, p.max_seqlen_new = 4, "max_seqlen_new", "3");

	ACCEPTED(keep, ATTN_DROPOUT_MASK, p.max_seqlen_q = 9; p.max_seqlen_k = 2147483647);
	REFUSED(keep, ATTN_DROPOUT_MASK, p.mask.dtype = INGOT_F32, "mask.dtype", "BOOL");
	REFUSED(keep, ATTN_DROPOUT_MASK, p.mask.dtype = INGOT_NONE, "mask", "required");
	REFUSED(keep, ATTN_DROPOUT_MASK, p.mask.stride[0] = 0, "mask.stride[0]", "distinct");
	REFUSED(keep, ATTN_DROPOUT_MASK, p.max_seqlen_q = 4, "max_seqlen_q", "5");
	REFUSED(keep, ATTN_DROPOUT_MASK, p.max_seqlen_k = -1, "max_seqlen_k", "7");
	REFUSED(keep, ATTN_DROPOUT_MASK, p.max_seqlen_k = (int64_t)1 << 31, "max_seqlen_k", "2147483647");
	REFUSED(keep, ATTN_DROPOUT_MASK, p.dropout_p = -0.5f, "dropout_p", "[0, 1)");
}

static ingot_attn_fwd_params dense(void) {
	ingot_attn_fwd_params p = fwd();
	p.varlen = INGOT_VARLEN(0, INGOT_SIDE(0, INGOT_LENGTH_INDIVIDUAL, 0), 0);
	p.k = p.v = VIEW(BF16, 11, 4, 2, 8);
	p.k_lengths = VIEW(I32, 2);
	p.page_table = VIEW(I32, 2, 3);
	return p;
}
static ingot_attn_fwd_params csr(void) {
	ingot_attn_fwd_params p = dense();
	p.page_table = (ingot_tensor){0};
	p.page_indptr = VIEW(I32, 3), p.page_indices = VIEW(I32, 6);
	p.batch = 2, p.max_seqlen_k = 12;
	return p;
}

static void test_pages(void **state) {
	ACCEPTED(dense, ATTN_FWD, p.max_seqlen_k = 12);
	assert_int_equal(problem.k_side.max_seqlen, 12);
	assert_int_equal(problem.pages.page_size, 4);
	assert_true(problem.features & INGOT__PAGED);
	ACCEPTED(csr, ATTN_FWD, p.varlen = INGOT_VARLEN(0, INGOT_SIDE(0, INGOT_LENGTH_LAST_PAGE, 0), 0));
	REFUSED(dense, ATTN_FWD, p.varlen = INGOT_VARLEN(0, INGOT_SIDE(0, INGOT_LENGTH_LAST_PAGE, 0), 0), "varlen", "CSR");
	REFUSED(dense, ATTN_FWD, p.varlen = 0; p.k_lengths.dtype = INGOT_NONE, "varlen", "INDIVIDUAL");
	REFUSED(dense, ATTN_FWD, p.varlen = 0x0500; p.batch = 2, "varlen", "not stacked");
	REFUSED(dense, ATTN_FWD, p.varlen = 0x0C00, "varlen", "IMPLIED");
	REFUSED(dense, ATTN_FWD, p.page_indptr = VIEW(I32, 3), "page_indptr", "dense or CSR");
	REFUSED(dense, ATTN_FWD, p.page_table.shape[0] = 3, "page_table.shape[0]", "must be 2");
	REFUSED(dense, ATTN_FWD, p.page_table.dtype = INGOT_I64, "page_table.dtype", "I32");
	REFUSED(dense, ATTN_FWD, p.k.shape[1] = p.v.shape[1] = 0, "page_size", "at least 1");
	REFUSED(dense, ATTN_FWD, p.max_seqlen_k = 11, "max_seqlen_k", "12");
	REFUSED(dense, ATTN_FWD, p.page_table = VIEW(I32, 2, 1 << 30), "page_table.shape[1]", "2147483647");
	REFUSED(dense, ATTN_FWD, p.k_lengths.dtype = INGOT_NONE, "k_lengths", "int32 [2]");
	REFUSED(csr, ATTN_FWD, p.page_indices.dtype = INGOT_NONE, "page_indices", "CSR");
	REFUSED(csr, ATTN_FWD, p.page_indptr.shape[0] = 2, "page_indptr.shape[0]", "must be 3");
	REFUSED(csr, ATTN_FWD, p.batch = 0, "batch", "must be 2");
	REFUSED(csr, ATTN_FWD, p.max_seqlen_k = 0, "max_seqlen_k", "mandatory");
}

/* ---- variable length: every word is honoured or refused ------------------------------------------------------------------- */

static bool side_allowed(unsigned byte) {
	const unsigned stacked = byte & 1, length = byte >> 1 & 3, position = byte >> 3 & 3;
	if (byte >> 5 || position == 3 || length == INGOT_LENGTH_LAST_PAGE) return false;
	if (position && !stacked) return false;
	return position != INGOT_POSITION_REUSE || length == INGOT_LENGTH_CUMULATIVE;
}

static void give_arrays(unsigned byte, ingot_tensor *lengths, ingot_tensor *positions) {
	const unsigned length = byte >> 1 & 3;
	if (length) *lengths = VIEW(I32, 2 + (length == INGOT_LENGTH_CUMULATIVE));
	if ((byte >> 3 & 3) == INGOT_POSITION_ARRAY) *positions = VIEW(I32, 2);
}

static void test_every_varlen_word(void **state) {
	int honoured = 0;
	for (unsigned q = 0; q < 256; q++)
		for (unsigned k = 0; k < 256; k++)
			for (unsigned top = 0; top < 4; top++) {
				ingot_attn_fwd_params p = fwd();
				p.varlen = q | k << 8 | top << 16;
				if (q & 1) {
					p.q = VIEW(BF16, 1, 4, 9, 8), p.out = p.q;
					if (top & 1) p.lse = VIEW(F32, 9, 4);
					else p.lse = VIEW(F32, 4, 9);
					p.max_seqlen_q = 5, p.batch = 2;
				}
				if (k & 1) p.k = p.v = VIEW(BF16, 1, 2, 13, 8), p.max_seqlen_k = 7, p.batch = 2;
				give_arrays(q, &p.q_lengths, &p.q_positions), give_arrays(k, &p.k_lengths, &p.k_positions);
				const bool allowed = side_allowed(q) && side_allowed(k) && !(top & 2) && (!(top & 1) || (q & 1));
				const ingot_status s = ingot__check(INGOT__ATTN_FWD, &p, &defaults, false, &problem);
				if ((s == INGOT_OK) != allowed)
					fail_msg("word 0x%05x: %s: %s", p.varlen, ingot_status_name(s), ingot_last_error());
				if (!allowed) {
					assert_non_null(strstr(ingot_last_error(), "varlen"));
					continue;
				}
				honoured++;
				assert_int_equal(problem.batch, 2);
				assert_int_equal(problem.q_side.max_seqlen, 5);
				assert_int_equal(problem.k_side.max_seqlen, 7);
				assert_int_equal(problem.q_side.capacity, q & 1 ? 9 : 5);
				assert_int_equal(problem.q_side.stacked, q & 1);
				assert_int_equal(problem.k_side.length, k >> 1 & 3);
				assert_int_equal(problem.k_side.position, k >> 3 & 3);
				assert_int_equal((problem.features & INGOT__VARLEN) != 0, (q | k) != 0);
				/* [Hq,T] and [T,Hq] become the same axes, by stride */
				if (q & 1) {
					assert_int_equal(problem.lse.stride[0], 0);
					assert_int_equal(problem.lse.stride[1], top & 1 ? 1 : 9);
					assert_int_equal(problem.lse.stride[2], top & 1 ? 4 : 1);
				}
				/* a missing array is asked for by name */
				if (q >> 1 & 3) {
					p.q_lengths.dtype = INGOT_NONE;
					refused(INGOT__ATTN_FWD, &p, false, "q_lengths", "int32", "q_lengths = NONE", __LINE__);
				}
			}
	/* sides: 3 lengths unstacked; stacked 3 lengths x (IMPLIED, ARRAY) and REUSE; TH doubles the stacked q's */
	assert_int_equal(honoured, (3 + 7 * 2) * (3 + 7));
}

/* ---- the normal form ------------------------------------------------------------------------------------------------------ */

static bool pair_given(const ingot_attn_fwd_params *p, int64_t i, int64_t j, int64_t len_q, int64_t len_k) {
	const int64_t off = p->align == INGOT_BOTTOM_RIGHT ? len_k - len_q : 0, d = j - (i + off);
	if (p->mask == INGOT_MASK_NONE) return true;
	if (p->mask == INGOT_MASK_CAUSAL) return d <= 0;
	return (p->window_left == INGOT_UNBOUNDED || d >= -(int64_t)p->window_left) &&
	       (p->window_right == INGOT_UNBOUNDED || d <= p->window_right);
}

static bool pair_kept(int64_t i, int64_t j, int64_t len_q, int64_t len_k) {
	const int64_t off = problem.bottom_right ? len_k - len_q : 0, d = j - i - off;
	return -problem.left <= d && d <= problem.right;
}

/* Compares all pairs, for full lengths and, with padded sequences, for all lengths up to the maxima. */
static void compare_pairs(const ingot_attn_fwd_params *p, int64_t mq, int64_t mk, bool lengths) {
	double pairs = 0;
	for (int64_t len_q = lengths ? 0 : mq; len_q <= mq; len_q++)
		for (int64_t len_k = lengths ? 0 : mk; len_k <= mk; len_k++)
			for (int64_t i = 0; i < len_q; i++)
				for (int64_t j = 0; j < len_k; j++) {
					const bool given = pair_given(p, i, j, len_q, len_k);
					if (given != pair_kept(i, j, len_q, len_k))
						fail_msg(
							"Mq %d Mk %d lengths %d %d mask %d align %d window (%d,%d): pair (%d,%d) is %d, not %d",
							(int)mq, (int)mk, (int)len_q, (int)len_k, p->mask, p->align, p->window_left,
							p->window_right, (int)i, (int)j, !given, given);
					if (len_q == mq && len_k == mk) pairs += given;
				}
	assert_true(problem.pairs == pairs * 2 * 4);
}

static void test_normal_form_of_masks(void **state) {
	static const int32_t far[] = {INGOT_UNBOUNDED, INGOT_UNBOUNDED - 1, INT32_MIN, INT32_MIN + 1, 100, -100};
	enum { MOST = 6, NEAR = 2 * MOST + 3, BOUNDS = NEAR + 6 };
	for (int64_t mq = 0; mq <= MOST; mq++)
		for (int64_t mk = 0; mk <= MOST; mk++)
			for (int align = 1; align <= 2; align++)
				for (int l = -1; l < BOUNDS; l++)
					for (int r = 0; r < (l < 0 ? 2 : BOUNDS); r++) {
						ingot_attn_fwd_params p = fwd();
						p.q = p.out = VIEW(BF16, 2, 4, mq, 8);
						p.k = p.v = VIEW(BF16, 2, 2, mk, 8);
						p.lse.dtype = INGOT_NONE;
						p.align = align;
						p.mask = l < 0 ? r : INGOT_MASK_WINDOW;
						if (l >= 0) {
							p.window_left = l < NEAR ? l - MOST - 1 : far[l - NEAR];
							p.window_right = r < NEAR ? r - MOST - 1 : far[r - NEAR];
						}
						const bool lengths = mq < 5 && mk < 5;
						if (lengths) {
							p.varlen = INGOT_VARLEN(INGOT_SIDE(0, INGOT_LENGTH_INDIVIDUAL, 0),
							                        INGOT_SIDE(0, INGOT_LENGTH_INDIVIDUAL, 0), 0);
							p.q_lengths = p.k_lengths = VIEW(I32, 2);
						}
						accepted(INGOT__ATTN_FWD, &p, "a mask", __LINE__);
						compare_pairs(&p, mq, mk, lengths);
						/* the rule itself, so that every user of the key gets the same one */
						const int64_t left = p.mask == INGOT_MASK_WINDOW && p.window_left != INGOT_UNBOUNDED
						                         ? p.window_left
						                         : INGOT__NO_BOUND;
						const int64_t right = p.mask == INGOT_MASK_CAUSAL ? 0
						                      : p.mask == INGOT_MASK_WINDOW && p.window_right != INGOT_UNBOUNDED
						                          ? p.window_right
						                          : INGOT__NO_BOUND;
						const bool bottom = align == INGOT_BOTTOM_RIGHT;
						assert_true(problem.left == (left >= (bottom ? mk : mq) - 1 ? INGOT__NO_BOUND : left));
						assert_true(problem.right == (right >= (bottom ? mq : mk) - 1 ? INGOT__NO_BOUND : right));
						assert_int_equal((problem.features & INGOT__MASK) != 0,
						                 problem.left != INGOT__NO_BOUND || problem.right != INGOT__NO_BOUND);
						assert_int_equal(problem.bottom_right, bottom);
					}
}

static void test_unset_align(void **state) {
	ingot_attn_fwd_params p = fwd();
	p.k = p.v = VIEW(BF16, 2, 2, 5, 8); /* as long as q */
	p.mask = INGOT_MASK_CAUSAL;
	accepted(INGOT__ATTN_FWD, &p, "UNSET with equal full lengths", __LINE__);
	p.varlen = INGOT_VARLEN_PADDED, p.q_lengths = p.k_lengths = VIEW(I32, 3);
	refused(INGOT__ATTN_FWD, &p, false, "align", "TOP_LEFT", "UNSET with lengths", __LINE__);
	p.mask = INGOT_MASK_NONE;
	accepted(INGOT__ATTN_FWD, &p, "UNSET without a mask", __LINE__);
	p.mask = INGOT_MASK_WINDOW, p.window_left = p.window_right = INGOT_UNBOUNDED;
	accepted(INGOT__ATTN_FWD, &p, "UNSET with a window of no bound", __LINE__);
}

static void test_normal_form_of_the_rest(void **state) {
	ingot_attn_fwd_params p = fwd();
	p.k = p.v = VIEW(BF16, 2, 1, 7, 8);
	p.k.stride[1] = -77; /* of one head: ignored */
	accepted(INGOT__ATTN_FWD, &p, "a stride of an axis of one", __LINE__);
	assert_int_equal(problem.k.stride[1], 0);
	assert_int_equal(problem.group, 4);
	assert_int_equal(problem.head_dim, 8);
	assert_true(problem.softmax_scale == 1 / sqrt(8.0));
	assert_int_equal(problem.features & ~(uint32_t)INGOT__UNALIGNED, 0);
	p.softmax_scale = -0.5f;
	p.softcap = 3, p.sink = VIEW(F32, 4), p.bias = VIEW(F32, 1, 1, 5, 7), p.alibi = VIEW(F32, 2, 4), p.align = 2;
	p.dropout_p = 0.5f;
	accepted(INGOT__ATTN_FWD, &p, "all terms", __LINE__);
	assert_true(problem.softmax_scale == -0.5);
	assert_int_equal(problem.features & ~(uint32_t)INGOT__UNALIGNED,
	                 INGOT__SOFTCAP | INGOT__SINK | INGOT__BIAS | INGOT__ALIBI | INGOT__DROPOUT);
	assert_true(problem.bottom_right);
	assert_int_equal(problem.bias.stride[0], 0);
	assert_int_equal(problem.bias.stride[1], 0);
	assert_true(problem.dropout_threshold == 0x80000000u);
	p.dropout_p = 1e-45f;
	accepted(INGOT__ATTN_FWD, &p, "the least rate", __LINE__);
	assert_true(problem.dropout_threshold == 0);
	p.dropout_p = 0x1.fffffep-1f;
	accepted(INGOT__ATTN_FWD, &p, "the largest rate", __LINE__);
	assert_true(problem.dropout_threshold == 0xffffff00u);

	ingot_attn_merge_params m = {.struct_size = sizeof m, .out = VIEW(F32, 2, 4, 5, 8), .lse = VIEW(F32, 2, 4, 5)};
	m.out_parts[0] = VIEW(F32, 6, 2, 4, 5, 8), m.lse_parts[0] = VIEW(F32, 6, 2, 4, 5);
	accepted(INGOT__ATTN_MERGE, &m, "stacked parts", __LINE__);
	assert_int_equal(problem.parts, 6);
	assert_true(problem.parts_stacked);
	assert_int_equal(problem.out_part_stride, 320);
	assert_int_equal(problem.lse_part_stride, 40);
	assert_int_equal(problem.out_parts[0].stride[0], 160);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_tensors),           cmocka_unit_test(test_attention_fields),
		cmocka_unit_test(test_other_fields),      cmocka_unit_test(test_pages),
		cmocka_unit_test(test_every_varlen_word), cmocka_unit_test(test_normal_form_of_masks),
		cmocka_unit_test(test_unset_align),       cmocka_unit_test(test_normal_form_of_the_rest),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
