/*
 * What never changes: the numbers of statuses and types, structs without padding, the version; and the sentence that a thread
 * gets about its last call.
 */
/* No padding: every byte of a struct is a field, so that "all later bytes are zero" can be asked of it. */
#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wpadded"
#include <ingot.h>
#pragma GCC diagnostic pop
#include "support_api.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static void test_numbers(void **state) {
	static const struct {
		int number;
		const char *name;
	} pinned[] = {
		{0, "INGOT_OK"},         {10, "INGOT_INVALID"},   {11, "INGOT_VERSION_MISMATCH"}, {20, "INGOT_UNSUPPORTED"},
		{21, "INGOT_NOT_FOUND"}, {22, "INGOT_DEGRADED"},  {30, "INGOT_WORKSPACE"},        {31, "INGOT_OUT_OF_MEMORY"},
		{40, "INGOT_IMAGE"},     {50, "INGOT_NO_DEVICE"}, {51, "INGOT_DRIVER"},           {90, "INGOT_INTERNAL"},
	};
	size_t row = 0;
	for (int number = -3; number < 1000; number++) {
		const ingot_status s = (ingot_status)number;
		if (row < sizeof pinned / sizeof *pinned && pinned[row].number == number) {
			assert_string_equal(ingot_status_name(s), pinned[row].name);
			assert_true(strlen(ingot_status_text(s)) > 1);
			assert_string_not_equal(ingot_status_text(s), "unknown status");
			row++;
		} else {
			assert_string_equal(ingot_status_name(s), "INGOT_?");
			assert_string_equal(ingot_status_text(s), "unknown status");
		}
	}
	assert_int_equal(row, sizeof pinned / sizeof *pinned);
	assert_int_equal(sizeof(ingot_status), 4);

	const int types[] = {INGOT_NONE,         INGOT_F32,          INGOT_F16, INGOT_BF16, INGOT_F8_E4M3, INGOT_F8_E5M2,
	                     INGOT_F8_E4M3_FNUZ, INGOT_F8_E5M2_FNUZ, INGOT_I32, INGOT_I64,  INGOT_U64,     INGOT_BOOL};
	for (int i = 0; i < 12; i++) assert_int_equal(types[i], i);
	assert_int_equal(INGOT_CPU, 0);
	assert_int_equal(INGOT_CUDA, 1);
	assert_int_equal(INGOT_HIP, 2);
	assert_int_equal(INGOT_DETERMINISTIC, 1);
	assert_int_equal(INGOT_BATCH_INVARIANT, 2);
	assert_int_equal(INGOT_STRICT, 4);
	assert_int_equal(INGOT_VARLEN(INGOT_SIDE(1, INGOT_LENGTH_CUMULATIVE, INGOT_POSITION_REUSE),
	                              INGOT_SIDE(1, INGOT_LENGTH_CUMULATIVE, INGOT_POSITION_REUSE), INGOT_LSE_HT),
	                 INGOT_VARLEN_COMPACT);
	assert_int_equal(
		INGOT_VARLEN(INGOT_SIDE(0, INGOT_LENGTH_CUMULATIVE, 0), INGOT_SIDE(0, INGOT_LENGTH_CUMULATIVE, 0), 0),
		INGOT_VARLEN_PADDED);
	assert_int_equal(INGOT_VARLEN(INGOT_SIDE(1, INGOT_LENGTH_CUMULATIVE, INGOT_POSITION_ARRAY),
	                              INGOT_SIDE(1, INGOT_LENGTH_CUMULATIVE, INGOT_POSITION_ARRAY), 0),
	                 INGOT_VARLEN_STRIDED);
}

static void test_version(void **state) {
	char text[32];
	snprintf(text, sizeof text, "%d.%d.%d", INGOT_VERSION_MAJOR, INGOT_VERSION_MINOR, INGOT_VERSION_PATCH);
	assert_int_equal(ingot_version(), INGOT_VERSION_NUMBER);
	assert_string_equal(ingot_version_string(), text);
}

/* A bad call leaves a sentence that leads with the function and names the field; a good call takes it away. */
static void test_sentence_of_the_last_call(void **state) {
	attention a;
	attention_begin(&a, INGOT_F32, 1, 1, 1, 2, 2, 4, 1);
	assert_string_equal(ingot_last_error(), "");
	a.fwd.softcap = -1;
	assert_status(ingot_attn_fwd(&a.fwd, cpu, NULL), INGOT_INVALID);
	assert_sentence("softcap");
	assert_sentence("ingot_attn_fwd");
	a.fwd.softcap = 0;
	assert_ok(ingot_attn_fwd(&a.fwd, cpu, NULL));
	assert_string_equal(ingot_last_error(), "");
	assert_status(ingot_attn_bwd(NULL, cpu, NULL), INGOT_INVALID);
	assert_sentence("ingot_attn_bwd");
	assert_sentence("params");
	assert_status(ingot_attn_fwd_workspace(&a.fwd, cpu, NULL, NULL), INGOT_INVALID);
	assert_sentence("bytes");
	assert_status(ingot_selection_digest(cpu, NULL), INGOT_INVALID);
	assert_sentence("digest");
	assert_status(ingot_attn_fwd_explain(&a.fwd, cpu, NULL, 7, NULL, 0, NULL), INGOT_INVALID);
	assert_sentence("format");
	assert_status(ingot_attn_fwd_explain(&a.fwd, cpu, NULL, INGOT_TEXT, NULL, 9, NULL), INGOT_INVALID);
	assert_sentence("buffer");
	attention_end(&a);
}

static void *good_call(void *argument) {
	attention *const a = argument;
	if (*ingot_last_error()) return (void *)(uintptr_t)1;
	ingot_attn_fwd_params bad = a->fwd;
	bad.dropout_p = 2;
	if (ingot_attn_fwd(&bad, cpu, NULL) != INGOT_INVALID) return (void *)(uintptr_t)2;
	return (void *)(uintptr_t)(strstr(ingot_last_error(), "dropout") ? 0 : 3);
}

static void test_sentence_is_the_threads_own(void **state) {
	attention a;
	attention_begin(&a, INGOT_F32, 1, 1, 1, 2, 2, 4, 1);
	ingot_attn_fwd_params bad = a.fwd;
	bad.lse_base = 9;
	assert_status(ingot_attn_fwd(&bad, cpu, NULL), INGOT_INVALID);
	pthread_t thread;
	void *result;
	assert_int_equal(pthread_create(&thread, NULL, good_call, &a), 0);
	pthread_join(thread, &result);
	assert_int_equal((uintptr_t)result, 0);
	assert_sentence("lse_base");
	attention_end(&a);
}

/* A refusal has written nothing, whatever it is about. */
static void test_refusal_writes_nothing(void **state) {
	attention a;
	attention_begin(&a, INGOT_BF16, 1, 2, 1, 5, 7, 8, 1);
	ingot_options o = {.struct_size = sizeof o, .backend = "no_such_kernel"};
	assert_status(ingot_attn_fwd(&a.fwd, cpu, &o), INGOT_NOT_FOUND);
	assert_sentence("no_such_kernel");
	a.fwd.window_left = 3; /* with mask NONE */
	assert_status(ingot_attn_fwd(&a.fwd, cpu, NULL), INGOT_INVALID);
	assert_sentence("window_left");
	assert_true(poisoned(&a.fwd.out));
	assert_true(poisoned(&a.fwd.lse));
	attention_end(&a);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_numbers),
		cmocka_unit_test(test_version),
		cmocka_unit_test(test_sentence_of_the_last_call),
		cmocka_unit_test(test_sentence_is_the_threads_own),
		cmocka_unit_test(test_refusal_writes_nothing),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
