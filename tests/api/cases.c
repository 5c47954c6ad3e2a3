/*
 * Small inputs on which other attention libraries went wrong, each with the public report it comes from, as calls of the C
 * API. Every implementation that says it can run the case is made to, by name.
 */
#define INGOT_EXPERIMENTAL
#include "support_api.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- every implementation ------------------------------------------------------------------------------------------------ */

static ingot_options options; /* forces the implementation of the moment */
static int ran;               /* cases that were run, over all implementations of a test */

/* Calls test once for each available implementation of an operator. */
static void each(const char *operator_name, void (*test)(void)) {
	ingot_implementation impl;
	ran = 0;
	for (int32_t i = 0; ingot_implementation_get(i, &impl) == INGOT_OK; i++) {
		if (strcmp(impl.operator_name, operator_name) != 0 || !impl.available || impl.device_type != INGOT_CPU)
			continue;
		options = (ingot_options){.struct_size = sizeof options, .flags = INGOT_DETERMINISTIC, .backend = impl.name};
		test();
	}
	assert_true(ran > 0);
}

/* Runs the forward unless the implementation refuses the case with a reason. */
static bool runs_forward(const ingot_attn_fwd_params *p) {
	const ingot_status status = ingot_attn_fwd(p, cpu, &options);
	if (status == INGOT_UNSUPPORTED && *ingot_last_error()) return false;
	assert_ok(status);
	ran++;
	return true;
}

static bool all_are(const ingot_tensor *t, float x) {
	for (int64_t i = 0; i < elements(t); i++)
		if (!(value(t, i) == x)) return false;
	return true;
}

/* ---- zero sizes (pytorch/pytorch#141219, #174950, #133780, #195812) ------------------------------------------------------ */

static void empty_forward(void) {
	attention a;
	attention_begin(&a, INGOT_F16, 7, 7, 7, 0, 0, 7, 1);
	a.fwd.mask = INGOT_MASK_CAUSAL, a.fwd.align = INGOT_TOP_LEFT;
	(void)runs_forward(&a.fwd);
	attention_end(&a);

	attention_begin(&a, INGOT_F16, 0, 10, 10, 3952, 16, 64, 1);
	a.fwd.q.data = a.fwd.k.data = a.fwd.v.data = a.fwd.out.data = a.fwd.lse.data = NULL;
	(void)runs_forward(&a.fwd);
	/* Nothing to attend to, but the seed and the offset are asked back. */
	uint64_t cell[4] = {99, 1000, 0, 0};
	a.fwd.dropout_p = 0.5f;
	a.fwd.dropout_offset = 24;
	a.fwd.dropout_seed_ptr = TENSOR(&cell[0], INGOT_U64, 1);
	a.fwd.dropout_offset_ptr = TENSOR(&cell[1], INGOT_I64, 1);
	a.fwd.dropout_seed_out = TENSOR(&cell[2], INGOT_U64, 1);
	a.fwd.dropout_offset_out = TENSOR(&cell[3], INGOT_U64, 1);
	if (runs_forward(&a.fwd)) {
		assert_int_equal(cell[0], 99);
		assert_int_equal(cell[1], 1000);
		assert_int_equal(cell[2], 99);
		assert_int_equal(cell[3], 1024);
	}
	attention_end(&a);

	attention_begin(&a, INGOT_F32, 2, 0, 0, 5, 5, 8, 1);
	(void)runs_forward(&a.fwd);
	attention_end(&a);

	attention_begin(&a, INGOT_F32, 2, 4, 1, 5, 5, 8, 1);
	a.fwd.k.shape[1] = a.fwd.v.shape[1] = 0;
	assert_status(ingot_attn_fwd(&a.fwd, cpu, &options), INGOT_INVALID);
	assert_sentence("Hq");
	assert_sentence("Hk");
	assert_sentence("4");
	assert_sentence("0");
	assert_true(poisoned(&a.fwd.out));
	attention_end(&a);

	attention_begin(&a, INGOT_F32, 2, 4, 2, 5, 0, 8, 1);
	if (runs_forward(&a.fwd)) {
		assert_true(all_are(&a.fwd.out, 0));
		assert_true(all_are(&a.fwd.lse, -INFINITY));
	}
	attention_end(&a);
}

static void empty_backward(void) {
	static const int64_t shape[][6] = {
		{7, 7, 7, 0, 0, 7}, {0, 10, 10, 3952, 16, 64}, {2, 0, 0, 5, 5, 8}, {2, 4, 2, 5, 0, 8}, {2, 4, 2, 0, 5, 8}};
	for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
		attention a;
		const int64_t *const n = shape[i];
		attention_begin(&a, INGOT_F32, n[0], n[1], n[2], n[3], n[4], n[5], 1);
		attention_backward(&a, 1);
		for (int64_t k = 0; k < elements(&a.fwd.out); k++) set_value(&a.fwd.out, k, 0);
		for (int64_t k = 0; k < elements(&a.fwd.lse); k++) set_value(&a.fwd.lse, k, -INFINITY);
		const ingot_status status = ingot_attn_bwd(&a.bwd, cpu, &options);
		if (status != INGOT_UNSUPPORTED) {
			assert_ok(status);
			ran++;
			assert_true(all_are(&a.bwd.dq, 0));
			assert_true(all_are(&a.bwd.dk, 0));
			assert_true(all_are(&a.bwd.dv, 0));
		}
		attention_end(&a);
	}
}

/* No query heads, yet key heads: there is no q to be read, no out to be written, and the gradients of k and v are 0. */
static void no_query_heads_forward(void) {
	attention a;
	attention_begin(&a, INGOT_BF16, 2, 2, 2, 3, 700, 8, 1);
	ingot_tensor *const of_queries[] = {&a.fwd.q, &a.fwd.out, &a.fwd.lse};
	for (int i = 0; i < 3; i++) of_queries[i]->shape[1] = 0, of_queries[i]->data = NULL;
	(void)runs_forward(&a.fwd);
	attention_end(&a);
}

static void no_query_heads_backward(void) {
	attention a;
	attention_begin(&a, INGOT_F32, 2, 2, 2, 300, 700, 8, 1);
	attention_backward(&a, 1);
	ingot_tensor *const of_queries[] = {&a.bwd.q, &a.bwd.out, &a.bwd.dout, &a.bwd.dq, &a.bwd.lse};
	for (int i = 0; i < 5; i++) of_queries[i]->shape[1] = 0, of_queries[i]->data = NULL;
	ingot_tensor bias = TENSOR(NULL, INGOT_F32, 1, 1, 300, 700), dbias = bias;
	(void)give_memory(&bias), (void)give_memory(&dbias);
	a.bwd.bias = bias, a.bwd.dbias = dbias;
	for (int varlen = 0; varlen < 2; varlen++) {
		int32_t cumulative[] = {0, 300, 600};
		poison(&dbias);
		if (varlen) {
			a.bwd.varlen = INGOT_VARLEN(INGOT_SIDE(0, INGOT_LENGTH_CUMULATIVE, INGOT_POSITION_IMPLIED), 0, 0);
			a.bwd.q_lengths = TENSOR(cumulative, INGOT_I32, 3);
		}
		const ingot_status status = ingot_attn_bwd(&a.bwd, cpu, &options);
		if (status == INGOT_UNSUPPORTED) continue;
		assert_ok(status);
		ran++;
		assert_true(all_are(&a.bwd.dk, 0));
		assert_true(all_are(&a.bwd.dv, 0));
		assert_true(all_are(&dbias, 0));
		poison(&a.bwd.dk), poison(&a.bwd.dv);
	}
	free(bias.data), free(dbias.data);
	attention_end(&a);
}

static void test_empty(void **state) {
	each("attn_fwd", empty_forward);
	each("attn_bwd", empty_backward);
	each("attn_fwd", no_query_heads_forward);
	each("attn_bwd", no_query_heads_backward);
}

/* ---- length arrays that lie (huggingface/transformers#44911, jax-ml/jax#30023, flashinfer-ai/flashinfer#737) --------------- */

enum { TOKENS = 256, HEADS = 2, DIM = 16, GUARD = 64 };

/* out and lse rows [first, last) must be what the query rows give over keys [key_first, key_last) alone. */
static void rows_are(const attention *a, int64_t first, int64_t last, int64_t key_first, int64_t key_last) {
	attention one;
	attention_begin(&one, INGOT_F32, 1, HEADS, HEADS, last - first, key_last - key_first, DIM, 1);
	for (int64_t h = 0; h < HEADS; h++) {
		for (int64_t i = 0; i < (last - first) * DIM; i++)
			set_value(&one.fwd.q, h * (last - first) * DIM + i, value(&a->fwd.q, (h * TOKENS + first) * DIM + i));
		for (int64_t i = 0; i < (key_last - key_first) * DIM; i++) {
			set_value(&one.fwd.k, h * (key_last - key_first) * DIM + i,
			          value(&a->fwd.k, (h * TOKENS + key_first) * DIM + i));
			set_value(&one.fwd.v, h * (key_last - key_first) * DIM + i,
			          value(&a->fwd.v, (h * TOKENS + key_first) * DIM + i));
		}
		for (int64_t i = 0; i < (last - first) * DIM; i++)
			set_value(&one.fwd.out, h * (last - first) * DIM + i, value(&a->fwd.out, (h * TOKENS + first) * DIM + i));
	}
	assert_true(forward_error(&one) < 1e-5);
	attention_end(&one);
}

static void untouched(const attention *a, int64_t first, int64_t last) {
	for (int64_t h = 0; h < HEADS; h++) {
		for (int64_t i = first * DIM; i < last * DIM; i++)
			assert_memory_equal((const char *)a->fwd.out.data + (h * TOKENS * DIM + i) * 4, "\xA5\xA5\xA5\xA5", 4);
		for (int64_t i = first; i < last; i++)
			assert_memory_equal((const char *)a->fwd.lse.data + (h * TOKENS + i) * 4, "\xA5\xA5\xA5\xA5", 4);
	}
}

static void lying_lengths(void) {
	int32_t cumulative[] = {0, 256, 512, 768}, lengths[] = {8, 8, -1, -1}, starts[] = {0, 8, 16, 16},
			folded[] = {0, 100, 50, 256};
	int64_t wide[] = {0, 256, 512, 768};
	/* Sequences that overlap are written twice; threads would race for their rows, as they may. */
	options.num_threads = 1;
	attention a;
	attention_begin(&a, INGOT_F32, 1, HEADS, HEADS, TOKENS, TOKENS, DIM, 3);
	/* Guards on both sides of what is written. */
	float *const guarded_out = malloc((size_t)(HEADS * TOKENS * DIM + 2 * GUARD) * 4),
				 *const guarded_lse = malloc((size_t)(HEADS * TOKENS + 2 * GUARD) * 4);
	assert_non_null(guarded_out);
	assert_non_null(guarded_lse);
	memset(guarded_out, 0x5A, (size_t)(HEADS * TOKENS * DIM + 2 * GUARD) * 4);
	memset(guarded_lse, 0x5A, (size_t)(HEADS * TOKENS + 2 * GUARD) * 4);
	a.fwd.out.data = guarded_out + GUARD;
	a.fwd.lse = TENSOR(guarded_lse + GUARD, INGOT_F32, HEADS, TOKENS);
	a.fwd.max_seqlen_q = a.fwd.max_seqlen_k = TOKENS;

	/* Three times the tokens that there are. */
	poison(&a.fwd.out), poison(&a.fwd.lse);
	a.fwd.varlen = INGOT_VARLEN_COMPACT;
	a.fwd.batch = 3;
	a.fwd.q_lengths = a.fwd.k_lengths = TENSOR(cumulative, INGOT_I32, 4);
	if (runs_forward(&a.fwd)) rows_are(&a, 0, TOKENS, 0, TOKENS);

	/* -1 for unused sequences. */
	poison(&a.fwd.out), poison(&a.fwd.lse);
	const uint32_t side = INGOT_SIDE(1, INGOT_LENGTH_INDIVIDUAL, INGOT_POSITION_ARRAY);
	a.fwd.varlen = INGOT_VARLEN(side, side, 0);
	a.fwd.batch = 4;
	a.fwd.q_lengths = a.fwd.k_lengths = TENSOR(lengths, INGOT_I32, 4);
	a.fwd.q_positions = a.fwd.k_positions = TENSOR(starts, INGOT_I32, 4);
	if (runs_forward(&a.fwd)) {
		rows_are(&a, 0, 8, 0, 8);
		rows_are(&a, 8, 16, 8, 16);
		untouched(&a, 16, TOKENS);
	}

	/* Sums that go back. */
	poison(&a.fwd.out), poison(&a.fwd.lse);
	a.fwd.varlen = INGOT_VARLEN_COMPACT;
	a.fwd.batch = 3;
	a.fwd.q_positions = a.fwd.k_positions = (ingot_tensor){0};
	a.fwd.q_lengths = a.fwd.k_lengths = TENSOR(folded, INGOT_I32, 4);
	if (runs_forward(&a.fwd)) rows_are(&a, 0, 50, 0, 100);

	/* 64-bit numbers where 32-bit ones are read. */
	poison(&a.fwd.out), poison(&a.fwd.lse);
	a.fwd.k_lengths = TENSOR(wide, INGOT_I64, 4);
	assert_status(ingot_attn_fwd(&a.fwd, cpu, &options), INGOT_INVALID);
	assert_sentence("k_lengths");
	assert_sentence("I64");
	assert_sentence("I32");
	assert_true(poisoned(&a.fwd.out));

	for (int i = 0; i < GUARD; i++) {
		assert_memory_equal(guarded_out + i, "\x5A\x5A\x5A\x5A", 4);
		assert_memory_equal(guarded_out + GUARD + HEADS * TOKENS * DIM + i, "\x5A\x5A\x5A\x5A", 4);
		assert_memory_equal(guarded_lse + i, "\x5A\x5A\x5A\x5A", 4);
		assert_memory_equal(guarded_lse + GUARD + HEADS * TOKENS + i, "\x5A\x5A\x5A\x5A", 4);
	}
	free(guarded_out), free(guarded_lse);
	attention_end(&a);
}

static void test_lying_lengths(void **state) {
	each("attn_fwd", lying_lengths);
}

/* ---- an expanded gradient (Dao-AILab/flash-attention#325) ------------------------------------------------------------------ */

static void expanded_gradient(void) {
	const int64_t rows = 2 * 5, d = 8;
	attention a, copied;
	attention_begin(&a, INGOT_BF16, 1, 2, 2, 5, 5, d, 4);
	a.fwd.mask = INGOT_MASK_CAUSAL;
	assert_ok(ingot_attn_fwd(&a.fwd, cpu, NULL));
	copied = a;
	copied.count = 0; /* only what attention_backward adds is its own */
	attention_backward(&a, 4), attention_backward(&copied, 4);

	/* One row for all. */
	for (int64_t i = 0; i < rows * d; i++) set_value(&copied.bwd.dout, i, value(&a.bwd.dout, i % d));
	ingot_attn_bwd_params p = a.bwd;
	p.dout.stride[0] = p.dout.stride[1] = p.dout.stride[2] = 0;
	const ingot_status status = ingot_attn_bwd(&p, cpu, &options);
	if (status != INGOT_UNSUPPORTED) {
		assert_ok(status);
		ran++;
		assert_ok(ingot_attn_bwd(&copied.bwd, cpu, &options));
		assert_true(same_bytes(&a.bwd.dq, &copied.bwd.dq));
		assert_true(same_bytes(&a.bwd.dk, &copied.bwd.dk));
		assert_true(same_bytes(&a.bwd.dv, &copied.bwd.dv));
		/* One number for all: honoured, or refused by name and untouched. */
		poison(&a.bwd.dq), poison(&a.bwd.dk), poison(&a.bwd.dv);
		for (int64_t i = 0; i < rows * d; i++) set_value(&copied.bwd.dout, i, 1);
		set_value(&a.bwd.dout, 0, 1);
		p.dout.stride[3] = 0;
		if (ingot_attn_bwd(&p, cpu, &options) == INGOT_OK) {
			assert_ok(ingot_attn_bwd(&copied.bwd, cpu, &options));
			assert_true(same_bytes(&a.bwd.dq, &copied.bwd.dq));
			assert_true(same_bytes(&a.bwd.dk, &copied.bwd.dk));
			assert_true(same_bytes(&a.bwd.dv, &copied.bwd.dv));
		} else {
			assert_sentence("dout.stride[3] is 0");
			assert_true(poisoned(&a.bwd.dq));
			assert_true(poisoned(&a.bwd.dk));
			assert_true(poisoned(&a.bwd.dv));
		}
	}
	attention_end(&copied), attention_end(&a);
}

static void test_expanded_gradient(void **state) {
	each("attn_bwd", expanded_gradient);
}

/* ---- dropout rates that are none (google/flax#5497) ------------------------------------------------------------------------ */

static void dropout_rates(void) {
	attention a, plain;
	attention_begin(&a, INGOT_F32, 1, 2, 1, 9, 11, 8, 6), attention_begin(&plain, INGOT_F32, 1, 2, 1, 9, 11, 8, 6);
	const float wrong[] = {NAN, -0.1f, 1.0f, 1.5f, INFINITY, -INFINITY, -1e-45f};
	for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
		a.fwd.dropout_p = wrong[i];
		assert_status(ingot_attn_fwd(&a.fwd, cpu, &options), INGOT_INVALID);
		assert_sentence("dropout");
		assert_sentence("[0, 1)");
		attention_backward(&a, 6);
		assert_status(ingot_attn_bwd(&a.bwd, cpu, NULL), INGOT_INVALID);
		assert_sentence("dropout");
		assert_true(poisoned(&a.fwd.out));
		for (int n = 0; n < 4; n++) free(a.memory[--a.count]);
	}
	if (runs_forward(&plain.fwd)) {
		a.fwd.dropout_p = 0; /* the seed changes nothing */
		a.fwd.dropout_seed = 12345;
		assert_ok(ingot_attn_fwd(&a.fwd, cpu, &options));
		assert_true(same_bytes(&a.fwd.out, &plain.fwd.out));
		/* and is given back all the same: a loop may keep its cells while dropout is off */
		uint64_t cell[4] = {99, 1000, 0, 0};
		a.fwd.dropout_seed = 0;
		a.fwd.dropout_offset = 24;
		a.fwd.dropout_seed_ptr = TENSOR(&cell[0], INGOT_U64, 1);
		a.fwd.dropout_offset_ptr = TENSOR(&cell[1], INGOT_I64, 1);
		poison(&a.fwd.out);
		assert_ok(ingot_attn_fwd(&a.fwd, cpu, &options));
		assert_true(same_bytes(&a.fwd.out, &plain.fwd.out));
		a.fwd.dropout_seed_out = TENSOR(&cell[2], INGOT_U64, 1);
		a.fwd.dropout_offset_out = TENSOR(&cell[3], INGOT_U64, 1);
		poison(&a.fwd.out);
		if (runs_forward(&a.fwd)) {
			assert_true(forward_error(&a) < 1e-5);
			assert_int_equal(cell[2], 99);
			assert_int_equal(cell[3], 1024);
		}
		memset(&a.fwd.dropout_seed_ptr, 0, 4 * sizeof a.fwd.dropout_seed_ptr);
		a.fwd.dropout_p = 1e-45f; /* less than one in 2^32: keeps everything */
		poison(&a.fwd.out);
		if (runs_forward(&a.fwd)) {
			assert_true(forward_error(&a) < 1e-5);
			assert_true(same_bytes(&a.fwd.lse, &plain.fwd.lse));
		}
	}
	attention_end(&a), attention_end(&plain);
}

static void test_dropout_rates(void **state) {
	each("attn_fwd", dropout_rates);
}

/* ---- negative and zero bounds (Dao-AILab/flash-attention#1116, #2199, #2574, jax-ml/jax#39576) ------------------------------ */

/* q is 0, so that exp(lse) counts the keys a row sees. */
static void counts_are(int64_t sq, int64_t sk, int32_t align, int32_t left, int32_t right,
                       int64_t (*count)(int64_t row)) {
	attention a;
	attention_begin(&a, INGOT_F32, 1, 1, 1, sq, sk, 64, 8);
	memset(a.fwd.q.data, 0, (size_t)elements(&a.fwd.q) * 4);
	a.fwd.mask = INGOT_MASK_WINDOW;
	a.fwd.align = align, a.fwd.window_left = left, a.fwd.window_right = right;
	if (runs_forward(&a.fwd)) {
		assert_true(forward_error(&a) < 1e-5);
		for (int64_t i = 0; i < sq; i++) {
			const double seen = exp((double)value(&a.fwd.lse, i)), wanted = (double)count(i);
			if (fabs(seen - wanted) > 1e-3 * (1 + wanted) || (wanted == 0 && seen != 0))
				fail_msg("%s, window (%d,%d): row %lld of %lld sees %g keys of %lld, not %g", options.backend, left,
				         right, (long long)i, (long long)sq, seen, (long long)sk, wanted);
		}
	}
	attention_end(&a);
}

static int64_t three_back(int64_t i) {
	return i < 3 ? 0 : i - 2;
}
static int64_t far_below(int64_t i) {
	const int64_t first = i - 121 < 0 ? 0 : i - 121, last = i - 25 > 39 ? 39 : i - 25;
	return last < first ? 0 : last - first + 1;
}
static int64_t sixty_five(int64_t i) {
	(void)i;
	return 65;
}
static int64_t four_back(int64_t i) {
	return i + 1 < 4 ? i + 1 : 4;
}
static int64_t ahead(int64_t i) {
	return i <= 10 ? 4 : i >= 14 ? 0 : 14 - i;
}

static void bounds(void) {
	counts_are(40, 40, INGOT_TOP_LEFT, INGOT_UNBOUNDED, -3, three_back);
	counts_are(129, 40, INGOT_BOTTOM_RIGHT, 32, 64, far_below);
	counts_are(1, 4096, INGOT_BOTTOM_RIGHT, 64, 0, sixty_five);
	counts_are(16, 16, INGOT_TOP_LEFT, 3, 0, four_back);
	counts_are(16, 16, INGOT_TOP_LEFT, -2, 5, ahead);
}

/* A gradient that comes in at row 5 only reaches exactly the keys that row sees. */
static void bounds_backward(void) {
	attention a;
	attention_begin(&a, INGOT_F32, 1, 1, 1, 16, 16, 64, 9);
	a.fwd.mask = INGOT_MASK_WINDOW;
	a.fwd.align = INGOT_TOP_LEFT, a.fwd.window_left = 3, a.fwd.window_right = 0;
	assert_ok(ingot_attn_fwd(&a.fwd, cpu, NULL));
	attention_backward(&a, 9);
	for (int64_t i = 0; i < 16 * 64; i++)
		if (i / 64 != 5) set_value(&a.bwd.dout, i, 0);
	const ingot_status status = ingot_attn_bwd(&a.bwd, cpu, &options);
	if (status != INGOT_UNSUPPORTED) {
		assert_ok(status);
		ran++;
		for (int64_t j = 0; j < 16; j++)
			for (int64_t c = 0; c < 64; c++) {
				assert_int_equal(value(&a.bwd.dk, j * 64 + c) != 0, j >= 2 && j <= 5);
				assert_int_equal(value(&a.bwd.dv, j * 64 + c) != 0, j >= 2 && j <= 5);
			}
	}
	attention_end(&a);
}

static void test_bounds(void **state) {
	each("attn_fwd", bounds);
	each("attn_bwd", bounds_backward);
}

/* ---- sinks that are no numbers ------------------------------------------------------------------------------------------ */

/* A sink of -inf is none, and hides no NaN; one that is NaN makes no out of a row that has no pair. */
static void odd_sinks(void) {
	enum { ROWS = 3, KEYS = 5, D = 8 };
	attention a;
	attention_begin(&a, INGOT_F32, 1, 2, 2, ROWS, KEYS, D, 12);
	float sinks[2] = {-INFINITY, NAN};
	a.fwd.sink = TENSOR(sinks, INGOT_F32, 2);
	set_value(&a.fwd.q, D, NAN); /* head 0, row 1 */
	if (runs_forward(&a.fwd))
		for (int64_t r = 0; r < 2 * ROWS; r++) {
			assert_int_equal(isnan(value(&a.fwd.out, r * D)) != 0, r == 1 || r >= ROWS);
			assert_int_equal(isnan(value(&a.fwd.lse, r)) != 0, r == 1 || r >= ROWS);
		}
	a.fwd.mask = INGOT_MASK_WINDOW, a.fwd.align = INGOT_TOP_LEFT; /* nobody sees a key */
	a.fwd.window_left = INGOT_UNBOUNDED, a.fwd.window_right = -2 * KEYS;
	if (runs_forward(&a.fwd)) {
		assert_true(all_are(&a.fwd.out, 0));
		for (int64_t r = 0; r < 2 * ROWS; r++)
			assert_true(r < ROWS ? value(&a.fwd.lse, r) == -INFINITY : isnan(value(&a.fwd.lse, r)));
	}
	attention_end(&a);
}

static void test_odd_sinks(void **state) {
	each("attn_fwd", odd_sinks);
}

/* ---- zeros, by their sign -------------------------------------------------------------------------------------------------- */

/* Each row's weights but that of key 0, whose V is 0, are the smallest denormal: their products with V underflow, to a zero of
 * either sign. Which rows are computed side by side, and so which masked keys beside them, depends on the threads. */
static void zeros_that_underflow(void) {
	enum { ROWS = 65, QUERY_HEADS = 12, D = 8 };
	attention one, many;
	attention_begin(&one, INGOT_F32, 1, QUERY_HEADS, 1, ROWS, ROWS, D, 13);
	attention_begin(&many, INGOT_F32, 1, QUERY_HEADS, 1, ROWS, ROWS, D, 13);
	attention *const both[] = {&one, &many};
	for (int n = 0; n < 2; n++) {
		ingot_attn_fwd_params *const p = &both[n]->fwd;
		p->mask = INGOT_MASK_CAUSAL;
		p->softmax_scale = 1;
		for (int64_t i = 0; i < elements(&p->q); i++) set_value(&p->q, i, i % D == 0);
		for (int64_t i = 0; i < elements(&p->k); i++) {
			set_value(&p->k, i, i % D == 0 && i >= D ? -103 : 0);
			set_value(&p->v, i, i < D ? 0 : value(&p->v, i) < 0 ? -0.1f : 0.1f);
		}
	}
	options.num_threads = 1;
	if (runs_forward(&one.fwd))
		for (options.num_threads = 2; options.num_threads < 12; options.num_threads++) {
			(void)runs_forward(&many.fwd);
			assert_true(same_bytes(&one.fwd.out, &many.fwd.out));
		}
	attention_end(&one), attention_end(&many);
}

static void test_zeros_that_underflow(void **state) {
	each("attn_fwd", zeros_that_underflow);
}

/* ---- sizes whose products leave 64 bits ------------------------------------------------------------------------------------ */

/* A plan multiplies them; a product that wraps to 0 once divided by it. Nothing but a few tokens has to exist for such a call. */
static void test_sizes_beyond_counting(void **state) {
	const int64_t many = INT32_MAX;
	uint64_t bytes;
	attention a;
	attention_begin(&a, INGOT_F32, 1, 2, 2, 10, 10, 8, 11);
	int32_t unread;
	a.fwd.varlen = INGOT_VARLEN(INGOT_SIDE(1, INGOT_LENGTH_MAX, INGOT_POSITION_IMPLIED),
	                            INGOT_SIDE(1, INGOT_LENGTH_MAX, INGOT_POSITION_IMPLIED), 0);
	a.fwd.lse = TENSOR(a.fwd.lse.data, INGOT_F32, 2, 10);
	a.fwd.batch = a.fwd.max_seqlen_q = many;
	a.fwd.max_seqlen_k = 10;
	assert_status(ingot_attn_fwd_workspace(&a.fwd, cpu, NULL, &bytes), INGOT_INVALID);
	assert_sentence("batch 2147483647, Hq 2 and max_seqlen_q 2147483647");
	assert_sentence("2^44");
	attention_backward(&a, 11);
	assert_status(ingot_attn_bwd(&a.bwd, cpu, NULL), INGOT_INVALID);
	assert_sentence("max_seqlen_q");
	assert_true(poisoned(&a.bwd.dq));
	a.fwd.max_seqlen_q = 10;
	a.fwd.max_seqlen_k = many;
	assert_status(ingot_attn_fwd(&a.fwd, cpu, NULL), INGOT_INVALID);
	assert_sentence("max_seqlen_k");
	assert_true(poisoned(&a.fwd.out));

	/* No query heads: the key heads count. */
	ingot_attn_bwd_params b = {.struct_size = sizeof b};
	b.q = b.out = b.dout = b.dq = TENSOR(NULL, INGOT_F32, many, 0, many, 1);
	b.lse = TENSOR(NULL, INGOT_F32, many, 0, many);
	b.k = b.v = b.dk = b.dv = TENSOR(NULL, INGOT_F32, many, 4, 10, 1);
	assert_status(ingot_attn_bwd_workspace(&b, cpu, NULL, &bytes), INGOT_INVALID);
	assert_sentence("Hk 4");

	ingot_kv_append_params k = {.struct_size = sizeof k, .varlen = 0x0400};
	k.k_new = TENSOR(NULL, INGOT_F32, many, 1 << 20, 1 << 5, 1);
	k.k = TENSOR(NULL, INGOT_F32, many, 1 << 20, 1, 1);
	k.k_lengths = TENSOR(&unread, INGOT_I32, many);
	assert_status(ingot_kv_append_workspace(&k, cpu, NULL, &bytes), INGOT_INVALID);
	assert_sentence("max_seqlen_new");
	attention_end(&a);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_empty),
		cmocka_unit_test(test_lying_lengths),
		cmocka_unit_test(test_expanded_gradient),
		cmocka_unit_test(test_dropout_rates),
		cmocka_unit_test(test_bounds),
		cmocka_unit_test(test_odd_sinks),
		cmocka_unit_test(test_zeros_that_underflow),
		cmocka_unit_test(test_sizes_beyond_counting),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
