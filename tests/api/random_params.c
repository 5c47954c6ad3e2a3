/*
 * Random params through every public call: a status each time, a sentence with every refusal, the four verbs agreeing with
 * each other, and enough calls that get past the checks for the later stages to be tried too. INGOT_RANDOM_CALLS says how
 * many (a million is the full run), INGOT_RANDOM_SEED repeats one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../random_params.h"

static uint64_t setting(const char *name, uint64_t otherwise) {
	const char *text = getenv(name);
	return text && text[0] ? strtoull(text, NULL, 0) : otherwise;
}

/* The fields that a refusal can be about. */
static const char *const fields[] = {
	"params",
	"options",
	"stream",
	"struct_size",
	"varlen",
	"q.",
	"k.",
	"v.",
	"out",
	"lse",
	"bias",
	"alibi",
	"sink",
	"descale",
	"q_lengths",
	"q_positions",
	"k_lengths",
	"k_positions",
	"page_table",
	"page_indptr",
	"page_indices",
	"dropout",
	"batch",
	"max_seqlen",
	"softmax_scale",
	"softcap",
	"mask",
	"align",
	"window",
	"k_new",
	"v_new",
	"new_lengths",
	"new_positions",
	"reserved",
	"lengths_after",
	"dout",
	"dq",
	"dk",
	"dv",
	"q is",
	"k is",
	"v is",
	"head",
};

static bool names_a_field(const char *sentence) {
	const char *after = strstr(sentence, ": ");
	for (size_t i = 0; after && i < sizeof fields / sizeof *fields; i++)
		if (strstr(after, fields[i])) return true;
	return false;
}

static void expect_sentence(ingot_status status, uint64_t seed, uint64_t call, const char *verb_name) {
	const char *sentence = ingot_last_error();
	const bool refused = status == INGOT_INVALID || status == INGOT_VERSION_MISMATCH;
	if (status == INGOT_OK ? sentence[0] == 0 : sentence[0] != 0 && (!refused || names_a_field(sentence))) return;
	fail_msg("seed %llu, call %llu, %s: status %s with sentence \"%s\"", (unsigned long long)seed,
	         (unsigned long long)call, verb_name, ingot_status_name(status), sentence);
}

static void every_call_answers(void **state) {
	const uint64_t calls = setting("INGOT_RANDOM_CALLS", 20000);
	const uint64_t seed = setting("INGOT_RANDOM_SEED", (uint64_t)time(NULL));
	print_message("%llu calls from seed %llu\n", (unsigned long long)calls, (unsigned long long)seed);
	arena memory = {.memory = calloc(1, ARENA_BYTES)};
	assert_non_null(memory.memory);
	static random_call c;
	static char text[1 << 16];
	uint64_t past_checks = 0, ran = 0, refused = 0;

	for (uint64_t n = 0; n < calls; n++) {
		/* Each call has a seed of its own, so that a failure can be repeated alone. */
		source s = {.state = seed + n};
		random_call_draw(&s, &memory, &c);

		const ingot_status workspace = random_call_make(&c, WORKSPACE, text, sizeof text);
		expect_sentence(workspace, seed, n, "workspace");
		const ingot_status prepare = random_call_make(&c, PREPARE, text, sizeof text);
		expect_sentence(prepare, seed, n, "prepare");
		const ingot_status explain = random_call_make(&c, EXPLAIN, text, sizeof text);
		expect_sentence(explain, seed, n, "explain");
		if (workspace != prepare)
			fail_msg("seed %llu, call %llu: workspace says %s, prepare %s", (unsigned long long)seed,
			         (unsigned long long)n, ingot_status_name(workspace), ingot_status_name(prepare));
		/* Explaining is fine also when nothing can run, so its refusals are those of the checks. */
		if (explain == INGOT_OK) past_checks++;
		else assert_int_equal(explain, workspace);

		const ingot_status run = random_call_make(&c, RUN, text, sizeof text);
		expect_sentence(run, seed, n, "run");
		if (run == INGOT_OK) {
			ran++;
			if (workspace != INGOT_OK)
				fail_msg("seed %llu, call %llu: run is OK, workspace says %s", (unsigned long long)seed,
				         (unsigned long long)n, ingot_status_name(workspace));
		} else {
			refused++;
		}
	}
	free(memory.memory);
	print_message("%llu past the checks, %llu ran, %llu refused\n", (unsigned long long)past_checks,
	              (unsigned long long)ran, (unsigned long long)refused);
	assert_true(past_checks * 10 >= calls * 3);
	assert_true(ran > 0 && refused > 0);
}

int main(void) {
	/* Random lengths make sequences overlap, whose rows are then written twice; threads would race for them, as they may. */
	setenv("INGOT_NUM_THREADS", "1", 1);
	const struct CMUnitTest tests[] = {cmocka_unit_test(every_call_answers)};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
