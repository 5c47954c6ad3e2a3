/*
 * Structs grow at the end only: a smaller one from an older program is accepted, a larger one as long as what the library does
 * not know is zero, and what an older program did not have reads as zero. Every operator and the options alike.
 */
#include "support_api.h"

#include <stdlib.h>
#include <string.h>

typedef struct verbs {
	const char *name;
	size_t size;
	ingot_status (*run)(const void *, ingot_stream, const ingot_options *);
	ingot_status (*workspace)(const void *, ingot_stream, const ingot_options *, uint64_t *);
	ingot_status (*prepare)(const void *, ingot_stream, const ingot_options *);
	ingot_status (*explain)(const void *, ingot_stream, const ingot_options *, int32_t, char *, size_t, size_t *);
} verbs;

/* One signature for all operators, so that a loop can go over them. */
#define SHIMS(op)                                                                                                \
	static ingot_status run_##op(const void *p, ingot_stream s, const ingot_options *o) {                        \
		return ingot_##op(p, s, o);                                                                              \
	}                                                                                                            \
	static ingot_status workspace_##op(const void *p, ingot_stream s, const ingot_options *o, uint64_t *bytes) { \
		return ingot_##op##_workspace(p, s, o, bytes);                                                           \
	}                                                                                                            \
	static ingot_status prepare_##op(const void *p, ingot_stream s, const ingot_options *o) {                    \
		return ingot_##op##_prepare(p, s, o);                                                                    \
	}                                                                                                            \
	static ingot_status explain_##op(const void *p, ingot_stream s, const ingot_options *o, int32_t f, char *b,  \
	                                 size_t c, size_t *n) {                                                      \
		return ingot_##op##_explain(p, s, o, f, b, c, n);                                                        \
	}
INGOT_OPERATOR_LIST(SHIMS)
#define ROW(op) {#op, sizeof(ingot_##op##_params), run_##op, workspace_##op, prepare_##op, explain_##op},
static const verbs operators[] = {INGOT_OPERATOR_LIST(ROW)};
enum { OPERATORS = sizeof operators / sizeof *operators };

/* A valid call of each operator with memory of its own, its struct in a buffer with room behind it. */
typedef struct call {
	attention a;
	ingot_tensor extra[4];
	union {
		uint32_t struct_size;
		unsigned char bytes[8192];
	} params;
} call;

static void call_begin(call *c, int op) {
	memset(c, 0, sizeof *c);
	attention_begin(&c->a, INGOT_F32, 1, 2, 1, 3, 4, 8, 5);
	assert_ok(ingot_attn_fwd(&c->a.fwd, cpu, NULL));
	attention_backward(&c->a, 5);
	const void *from = NULL;
	ingot_attn_merge_params merge = {.struct_size = sizeof merge};
	ingot_kv_append_params append = {.struct_size = sizeof append};
	ingot_attn_dropout_mask_params dropout = {.struct_size = sizeof dropout, .dropout_p = 0.5f};
	if (op == 0) from = &c->a.fwd;
	if (op == 1) from = &c->a.bwd;
	if (op == 2) {
		merge.out_parts[0] = c->a.fwd.out, merge.lse_parts[0] = c->a.fwd.lse;
		merge.out = c->extra[0] = c->a.fwd.out, merge.lse = c->extra[1] = c->a.fwd.lse;
		give_memory(&merge.out), give_memory(&merge.lse);
		c->extra[0] = merge.out, c->extra[1] = merge.lse;
		from = &merge;
	}
	if (op == 3) {
		append.varlen = INGOT_VARLEN(0, INGOT_SIDE(0, INGOT_LENGTH_INDIVIDUAL, 0), 0);
		append.k = c->a.fwd.k, append.v = c->a.fwd.v;
		append.k_new = TENSOR(NULL, INGOT_F32, 1, 1, 2, 8);
		append.v_new = append.k_new;
		append.k_lengths = TENSOR(NULL, INGOT_I32, 1);
		give_memory(&append.k_new), give_memory(&append.v_new), give_memory(&append.k_lengths);
		c->extra[0] = append.k_new, c->extra[1] = append.v_new, c->extra[2] = append.k_lengths;
		from = &append;
	}
	if (op == 4) {
		dropout.mask = TENSOR(NULL, INGOT_BOOL, 1, 1, 2, 2);
		give_memory(&dropout.mask);
		c->extra[0] = dropout.mask;
		from = &dropout;
	}
	memcpy(c->params.bytes, from, operators[op].size);
}

static void call_end(call *c) {
	for (int i = 0; i < 4; i++) free(c->extra[i].data);
	attention_end(&c->a);
}

/* The same status from all four verbs. */
static void expect_all(int op, const void *params, const ingot_options *o, ingot_status wanted) {
	const verbs *const v = &operators[op];
	uint64_t bytes;
	size_t needed;
	char text[64];
	assert_status(v->prepare(params, cpu, o), wanted);
	assert_status(v->workspace(params, cpu, o, &bytes), wanted);
	assert_status(v->explain(params, cpu, o, INGOT_TEXT, text, sizeof text, &needed), wanted);
	if (wanted == INGOT_OK) assert_true(needed > 1 && strlen(text) < sizeof text);
	assert_status(v->run(params, cpu, o), wanted);
}

static void test_sizes(void **state) {
	for (int op = 0; op < OPERATORS; op++) {
		const uint32_t size = (uint32_t)operators[op].size;
		call *const c = malloc(sizeof *c);
		assert_non_null(c);
		call_begin(c, op);
		expect_all(op, c->params.bytes, NULL, INGOT_OK);
		/* A newer program that uses nothing new. */
		const uint32_t larger[] = {size + 1, size + 4, size + 104, 4096, 8192};
		for (int i = 0; i < 5; i++) {
			c->params.struct_size = larger[i];
			expect_all(op, c->params.bytes, NULL, INGOT_OK);
			/* The same with something new in use, in the first and in the last byte. */
			const uint32_t spots[] = {size, larger[i] - 1};
			for (int k = 0; k < 2; k++) {
				c->params.bytes[spots[k]] = 1;
				expect_all(op, c->params.bytes, NULL, INGOT_VERSION_MISMATCH);
				assert_sentence("params");
				c->params.bytes[spots[k]] = 0;
			}
		}
		/* Bytes beyond the size that was given are not looked at. */
		c->params.struct_size = size;
		memset(c->params.bytes + size, 0xff, sizeof c->params.bytes - size);
		expect_all(op, c->params.bytes, NULL, INGOT_OK);
		/* No program ever had a smaller one than the first release's; an uninitialised one may hold anything. */
		const uint32_t wrong[] = {0, 1, 3, 4, 8, size - 1};
		for (int i = 0; i < 6; i++) {
			c->params.struct_size = wrong[i];
			expect_all(op, c->params.bytes, NULL, INGOT_INVALID);
			assert_sentence("struct_size");
		}
		assert_status(operators[op].run(NULL, cpu, NULL), INGOT_INVALID);
		assert_sentence("params");
		call_end(c);
		free(c);
	}
}

static void test_options(void **state) {
	call *const c = malloc(sizeof *c);
	assert_non_null(c);
	union {
		ingot_options o;
		unsigned char bytes[512];
	} u;
	for (int op = 0; op < OPERATORS; op++) {
		call_begin(c, op);
		memset(&u, 0, sizeof u);
		u.o.struct_size = sizeof u.o;
		expect_all(op, c->params.bytes, &u.o, INGOT_OK);
		u.o.struct_size = sizeof u;
		expect_all(op, c->params.bytes, &u.o, INGOT_OK);
		u.bytes[sizeof u - 1] = 1;
		expect_all(op, c->params.bytes, &u.o, INGOT_VERSION_MISMATCH);
		assert_sentence("options");
		u.bytes[sizeof u - 1] = 0;
		u.o.struct_size = 0;
		expect_all(op, c->params.bytes, &u.o, INGOT_INVALID);
		assert_sentence("struct_size");
		static const struct {
			const char *word;
			size_t offset;
			uint64_t value;
			size_t size;
		} wrong[] = {
			{"flags", offsetof(ingot_options, flags), 8, 4},
			{"num_threads", offsetof(ingot_options, num_threads), UINT32_MAX, 4},
			{"num_threads", offsetof(ingot_options, num_threads), 1025, 4},
			{"reserved", offsetof(ingot_options, reserved), 1, 4},
			{"alloc", offsetof(ingot_options, alloc), 64, 8},
			{"free", offsetof(ingot_options, free), 64, 8},
			{"workspace", offsetof(ingot_options, workspace), 64, 8},
			{"workspace", offsetof(ingot_options, workspace_size), 64, 8},
		};
		for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
			memset(&u, 0, sizeof u);
			memcpy(u.bytes + wrong[i].offset, &wrong[i].value, wrong[i].size);
			u.o.struct_size = sizeof u.o;
			expect_all(op, c->params.bytes, &u.o, INGOT_INVALID);
			assert_sentence(wrong[i].word);
		}
		call_end(c);
	}
	free(c);
}

/* A stream that is none. */
static void test_streams(void **state) {
	call *const c = malloc(sizeof *c);
	assert_non_null(c);
	for (int op = 0; op < OPERATORS; op++) {
		call_begin(c, op);
		const ingot_stream wrong[] = {
			{3, 0, NULL}, {-1, 0, NULL}, {INT32_MAX, 0, NULL}, {INGOT_CPU, 1, NULL}, {INGOT_CPU, -1, NULL}};
		for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
			assert_status(operators[op].run(c->params.bytes, wrong[i], NULL), INGOT_INVALID);
			assert_sentence("stream");
		}
		call_end(c);
	}
	free(c);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_sizes),
		cmocka_unit_test(test_options),
		cmocka_unit_test(test_streams),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
