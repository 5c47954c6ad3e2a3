/*
 * The log: nothing by default, levels from the environment or the program, one message at a time, whole, from any thread.
 */
#define INGOT_EXPERIMENTAL
#include "support_api.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct seen {
	int messages, of_level[6];
	char last[2048];
	atomic_int inside;
	bool overlapped, broken;
} seen;

static void take(void *context, int32_t level, const char *message) {
	seen *const s = context;
	if (atomic_fetch_add(&s->inside, 1) != 0) s->overlapped = true;
	s->messages++;
	if (level < 1 || level > 5) s->broken = true;
	else s->of_level[level]++;
	if (strchr(message, '\n') || !*message) s->broken = true;
	snprintf(s->last, sizeof s->last, "%s", message);
	atomic_fetch_sub(&s->inside, 1);
}

static void calls(int32_t level, seen *s) {
	memset(s, 0, sizeof *s);
	attention a;
	attention_begin(&a, INGOT_F32, 1, 1, 1, 2, 2, 4, 1);
	ingot_set_log(level, take, s);
	assert_ok(ingot_attn_fwd(&a.fwd, cpu, NULL));
	a.fwd.softcap = -1;
	assert_status(ingot_attn_fwd(&a.fwd, cpu, NULL), INGOT_INVALID);
	ingot_set_log(0, NULL, NULL);
	attention_end(&a);
	assert_false(s->broken);
	assert_false(s->overlapped);
}

static void test_levels(void **state) {
	seen s;
	calls(0, &s);
	assert_int_equal(s.messages, 0);
	calls(1, &s);
	assert_int_equal(s.messages, 1);
	assert_int_equal(s.of_level[1], 1);
	assert_non_null(strstr(s.last, "softcap"));
	int before = 1;
	for (int level = 2; level <= 5; level++) {
		calls(level, &s);
		assert_true(s.messages >= before);
		for (int above = level + 1; above <= 5; above++) assert_int_equal(s.of_level[above], 0);
		before = s.messages;
		if (level == 3) assert_true(s.of_level[3] >= 1); /* the choice of the good call */
		if (level == 4) assert_true(s.of_level[4] >= 1); /* the call itself */
	}
	calls(99, &s); /* as 5 */
	assert_int_equal(s.messages, before);
	calls(-7, &s); /* as 0 */
	assert_int_equal(s.messages, 0);
}

/* A loop over a list ends by asking past it, and a machine may lack a kernel's device: neither is an error. */
static void test_lists_are_quiet(void **state) {
	seen s = {0};
	ingot_implementation impl;
	ingot_variant variant;
	ingot_set_log(1, take, &s);
	int32_t count = 0;
	for (; ingot_implementation_get(count, &impl) == INGOT_OK; count++)
		assert_status(ingot_variant_get(count, impl.variant_count, &variant), INGOT_NOT_FOUND);
	assert_true(count > 0);
	assert_sentence("index is");
	assert_int_equal(s.messages, 0);
	assert_status(ingot_variant_get(0, 0, NULL), INGOT_INVALID);
	assert_int_equal(s.messages, 1);
	ingot_set_log(0, NULL, NULL);
}

/* That nothing can run is what an explanation says, and no error of a call that is OK; one that is not is told once. */
static void test_explanations_are_quiet(void **state) {
	seen s = {0};
	attention a;
	char text[4096];
	int none = 0;
	ingot_implementation impl;
	attention_begin(&a, INGOT_F32, 1, 1, 1, 2, 2, 4, 1);
	a.fwd.dropout_p = 0.5f; /* what many refuse */
	ingot_set_log(1, take, &s);
	for (int32_t i = 0; ingot_implementation_get(i, &impl) == INGOT_OK; i++) {
		if (strcmp(impl.operator_name, "attn_fwd") || impl.device_type != INGOT_CPU) continue;
		const ingot_options o = {.struct_size = sizeof o, .backend = impl.name};
		assert_ok(ingot_attn_fwd_explain(&a.fwd, cpu, &o, INGOT_TEXT, text, sizeof text, NULL));
		none += strstr(text, "none: ") != NULL;
		assert_int_equal(s.messages, 0);
	}
#ifdef __x86_64__
	assert_true(none > 0);
#endif
	const ingot_options nothing = {.struct_size = sizeof nothing, .backend = "frobnicate"};
	assert_status(ingot_attn_fwd_explain(&a.fwd, cpu, &nothing, INGOT_TEXT, text, sizeof text, NULL), INGOT_NOT_FOUND);
	assert_int_equal(s.messages, 1);
	assert_non_null(strstr(s.last, "frobnicate"));
	ingot_set_log(0, NULL, NULL);
	attention_end(&a);
}

static void *noisy(void *argument) {
	attention *const a = argument;
	ingot_attn_fwd_params bad = a->fwd;
	bad.dropout_p = -1;
	for (int i = 0; i < 500; i++)
		if (ingot_attn_fwd(&bad, cpu, NULL) != INGOT_INVALID) return argument;
	return NULL;
}

static void test_one_at_a_time(void **state) {
	attention a;
	attention_begin(&a, INGOT_F32, 1, 1, 1, 2, 2, 4, 1);
	static seen s;
	ingot_set_log(1, take, &s);
	pthread_t thread[6];
	for (int i = 0; i < 6; i++) assert_int_equal(pthread_create(&thread[i], NULL, noisy, &a), 0);
	for (int i = 0; i < 6; i++) {
		void *result;
		pthread_join(thread[i], &result);
		assert_null(result);
	}
	ingot_set_log(0, NULL, NULL);
	assert_int_equal(s.messages, 3000);
	assert_false(s.overlapped);
	assert_false(s.broken);
	attention_end(&a);
}

/* A process of its own: the environment's level, one bad and one good call, stderr as the place. */
static int speak(void) {
	attention a;
	attention_begin(&a, INGOT_F32, 1, 1, 1, 2, 2, 4, 1);
	const bool good = ingot_attn_fwd(&a.fwd, cpu, NULL) == INGOT_OK;
	a.fwd.softcap = -1;
	const bool refused = ingot_attn_fwd(&a.fwd, cpu, NULL) == INGOT_INVALID;
	attention_end(&a);
	return good && refused ? 0 : 1;
}

/* A callback may call the library; what that would log is left out. */
static void call_back(void *context, int32_t level, const char *message) {
	seen *const s = context;
	s->messages++;
	if (s->messages > 100) return;
	ingot_attn_fwd_params none = {.struct_size = sizeof none};
	if (ingot_attn_fwd(&none, cpu, NULL) != INGOT_INVALID) s->broken = true;
	ingot_set_log(1, call_back, context);
	(void)level, (void)message;
}

static void test_callback_that_calls(void **state) {
	static seen s;
	ingot_attn_fwd_params none = {.struct_size = sizeof none};
	ingot_set_log(1, call_back, &s);
	assert_status(ingot_attn_fwd(&none, cpu, NULL), INGOT_INVALID);
	assert_status(ingot_attn_bwd(NULL, cpu, NULL), INGOT_INVALID);
	assert_sentence("ingot_attn_bwd: params");
	ingot_set_log(0, NULL, NULL);
	assert_int_equal(s.messages, 2);
	assert_false(s.broken);
}

static void test_environment(void **state) {
	char text[8192];
	assert_int_equal(run_self("speak", (const char *const[]){"INGOT_LOG=", NULL}, 30, text, sizeof text), 0);
	assert_string_equal(text, "");
	assert_int_equal(run_self("speak", (const char *const[]){"INGOT_LOG=0", NULL}, 30, text, sizeof text), 0);
	assert_string_equal(text, "");
	assert_int_equal(run_self("speak", (const char *const[]){"INGOT_LOG=1", NULL}, 30, text, sizeof text), 0);
	assert_non_null(strstr(text, "softcap"));
	assert_int_equal(run_self("speak", (const char *const[]){"INGOT_LOG=5", NULL}, 30, text, sizeof text), 0);
	assert_non_null(strstr(text, "softcap"));
	assert_non_null(strstr(text, "attn_fwd"));
	/* A level that is none is said, not guessed. */
	assert_int_equal(run_self("speak", (const char *const[]){"INGOT_LOG=loud", NULL}, 30, text, sizeof text), 0);
	assert_non_null(strstr(text, "INGOT_LOG"));
	assert_null(strstr(text, "softcap"));
}

static atomic_bool stop;

static void *noisy_until_stopped(void *argument) {
	while (!atomic_load(&stop)) noisy(argument);
	return NULL;
}

static int quiet_child(void *argument) {
	return noisy(argument) ? 1 : 0;
}

static atomic_int parent; /* its callback is slow, so that a fork nearly always falls into one */

static void linger(void *context, int32_t level, const char *message) {
	(void)context, (void)level, (void)message;
	if (getpid() == atomic_load(&parent)) usleep(300);
}

/* A fork while another thread is logging: the child can log, too. */
static void test_fork_while_logging(void **state) {
	attention a;
	attention_begin(&a, INGOT_F32, 1, 1, 1, 2, 2, 4, 1);
	atomic_store(&parent, getpid());
	ingot_set_log(1, linger, NULL);
	atomic_store(&stop, false);
	pthread_t thread[2];
	for (int i = 0; i < 2; i++) assert_int_equal(pthread_create(&thread[i], NULL, noisy_until_stopped, &a), 0);
	for (int i = 0; i < 30; i++) assert_int_equal(run_fork(quiet_child, &a, 60), 0);
	atomic_store(&stop, true);
	for (int i = 0; i < 2; i++) pthread_join(thread[i], NULL);
	ingot_set_log(0, NULL, NULL);
	attention_end(&a);
}

int main(int argc, char **argv) {
	if (argc == 2 && strcmp(argv[1], "speak") == 0) return speak();
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_levels),
		cmocka_unit_test(test_lists_are_quiet),
		cmocka_unit_test(test_explanations_are_quiet),
		cmocka_unit_test(test_one_at_a_time),
		cmocka_unit_test(test_callback_that_calls),
		cmocka_unit_test(test_environment),
		cmocka_unit_test(test_fork_while_logging),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
