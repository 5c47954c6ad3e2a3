/*
 * Threads and forks as programs use them: results that do not depend on the number of threads, first calls from many threads
 * at once, use on both sides of a fork, memory that does not grow with the number of shapes or of threads.
 */
#define INGOT_EXPERIMENTAL
#include "support_api.h"

#include <dlfcn.h>
#include <fenv.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

static ingot_options deterministic(int threads) {
	return (ingot_options){.struct_size = sizeof(ingot_options), .flags = INGOT_DETERMINISTIC, .num_threads = threads};
}

typedef struct result {
	attention a;
} result;

static const struct shape {
	int32_t dtype;
	int64_t b, hq, hk, sq, sk, d;
	int32_t mask;
} shapes[] = {
	{INGOT_F32, 1, 1, 1, 32, 32, 64, INGOT_MASK_NONE},    {INGOT_F32, 1, 1, 1, 33, 33, 64, INGOT_MASK_CAUSAL},
	{INGOT_F32, 2, 4, 4, 64, 64, 64, INGOT_MASK_NONE},    {INGOT_BF16, 2, 4, 2, 64, 64, 64, INGOT_MASK_CAUSAL},
	{INGOT_F16, 1, 6, 2, 130, 97, 64, INGOT_MASK_CAUSAL}, {INGOT_BF16, 1, 4, 1, 1, 1500, 64, INGOT_MASK_NONE},
	{INGOT_F32, 1, 2, 1, 5, 2000, 40, INGOT_MASK_CAUSAL},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static void make(attention *a, int i) {
	const struct shape *const s = &shapes[i];
	attention_begin(a, s->dtype, s->b, s->hq, s->hk, s->sq, s->sk, s->d, (uint64_t)i + 1);
	a->fwd.mask = s->mask;
	a->fwd.align = INGOT_BOTTOM_RIGHT;
	attention_backward(a, (uint64_t)i + 1);
}

static ingot_status run_both(const attention *a, const ingot_options *o) {
	poison(&a->fwd.out), poison(&a->fwd.lse), poison(&a->bwd.dq), poison(&a->bwd.dk), poison(&a->bwd.dv);
	const ingot_status status = ingot_attn_fwd(&a->fwd, cpu, o);
	return status ? status : ingot_attn_bwd(&a->bwd, cpu, o);
}

static bool same(const attention *a, const attention *b) {
	return same_bytes(&a->fwd.out, &b->fwd.out) && same_bytes(&a->fwd.lse, &b->fwd.lse) &&
	       same_bytes(&a->bwd.dq, &b->bwd.dq) && same_bytes(&a->bwd.dk, &b->bwd.dk) &&
	       same_bytes(&a->bwd.dv, &b->bwd.dv);
}

/* ---- thread counts (pytorch/pytorch#176091, vllm-project/vllm#32651) --------------------------------------------------- */

static void in_turn(void *context, int64_t count, void (*body)(void *argument, int64_t index), void *argument) {
	(void)context;
	for (int64_t i = count - 1; i >= 0; i--) body(argument, i);
}

static void test_thread_counts(void **state) {
	static const int counts[] = {2, 3, 4, 7, 17, 64, 256, 1024, 0};
	for (int i = 0; i < SHAPES; i++) {
		attention a, b;
		make(&a, i), make(&b, i);
		ingot_options o = deterministic(1);
		assert_ok(run_both(&a, &o));
		assert_false(poisoned(&a.bwd.dk));
		assert_true(forward_error(&a) < (shapes[i].dtype == INGOT_F32   ? 1e-5
		                                 : shapes[i].dtype == INGOT_F16 ? 4e-3
		                                                                : 3e-2));
		for (size_t n = 0; n < sizeof counts / sizeof *counts; n++) {
			o = deterministic(counts[n]);
			assert_ok(run_both(&b, &o));
			if (!same(&a, &b)) fail_msg("shape %d: %d threads give another result than one", i, counts[n]);
		}
		/* The caller's own threads. */
		o = deterministic(8);
		o.parallel_for = in_turn;
		assert_ok(run_both(&b, &o));
		assert_true(same(&a, &b));
		attention_end(&a), attention_end(&b);
	}
}

/* ---- the caller's floating-point environment ----------------------------------------------------------------------------- */

enum { FLUSHING, ROUNDING_UP, TRAPPING, ENVIRONMENTS };

static void disturb(int how) {
	if (how == ROUNDING_UP) (void)fesetround(FE_UPWARD);
	if (how == TRAPPING) (void)feenableexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW);
#if defined(__x86_64__)
	if (how == FLUSHING) _mm_setcsr(_mm_getcsr() | 0x8040);
#endif
}

typedef struct lane {
	int how;
	void (*body)(void *argument, int64_t index);
	void *argument;
	int64_t index;
} lane;

static void *run_disturbed(void *argument) {
	const lane *const l = argument;
	disturb(l->how);
	l->body(l->argument, l->index);
	return NULL;
}

static void by_disturbed_threads(void *context, int64_t count, void (*body)(void *argument, int64_t index),
                                 void *argument) {
	for (int64_t i = 0; i < count; i++) {
		lane l = {*(const int *)context, body, argument, i};
		pthread_t thread;
		if (pthread_create(&thread, NULL, run_disturbed, &l) || pthread_join(thread, NULL)) abort();
	}
}

/* In a process of its own: a trap ends it. Values and gradients are small enough for denormals to matter. */
static int environment(void *argument) {
	const int how = *(const int *)argument;
	attention a, b;
	attention_begin(&a, INGOT_F32, 2, 4, 2, 150, 190, 40, 5), attention_begin(&b, INGOT_F32, 2, 4, 2, 150, 190, 40, 5);
	a.fwd.mask = b.fwd.mask = INGOT_MASK_CAUSAL;
	a.fwd.align = b.fwd.align = INGOT_BOTTOM_RIGHT;
	attention_backward(&a, 5), attention_backward(&b, 5);
	const ingot_tensor *const small[] = {&a.fwd.v, &b.fwd.v, &a.bwd.dout, &b.bwd.dout};
	for (int t = 0; how == FLUSHING && t < 4; t++)
		for (int64_t i = 0; i < elements(small[t]); i++) set_value(small[t], i, value(small[t], i) * 1e-38f);
	ingot_options o = deterministic(1);
	if (run_both(&a, &o)) return 1;
	fenv_t before;
	(void)fegetenv(&before);
	for (int round = 0; round < 8; round++) {
		o = deterministic(round % 4 + 1);
		int context = how;
		if (round >= 4) o.parallel_for = by_disturbed_threads, o.parallel_context = &context;
		disturb(how);
		(void)feclearexcept(FE_ALL_EXCEPT);
		const int rounding = fegetround(), traps = fegetexcept();
		const ingot_status status = run_both(&b, &o);
		const bool left_alone = fegetround() == rounding && fegetexcept() == traps && fetestexcept(FE_ALL_EXCEPT) == 0;
		(void)fesetenv(&before);
		if (status || !left_alone) return 2;
		if (!same(&a, &b)) return 3;
	}
	/* A refusal reads numbers, too. */
	disturb(how);
	a.fwd.dropout_p = NAN;
	const ingot_status status = ingot_attn_fwd(&a.fwd, cpu, NULL);
	(void)fesetenv(&before);
	attention_end(&a), attention_end(&b);
	return status == INGOT_INVALID ? 42 : 4;
}

static void test_floating_point_environment(void **state) {
	for (int how = 0; how < ENVIRONMENTS; how++) {
		const int status = run_fork(environment, &how, 60);
		if (status != 42) fail_msg("environment %d: status %d", how, status);
	}
}

/* Writes one checksum over the results of all shapes to stderr, for comparison between processes. */
static int checksum(void) {
	uint64_t sum = 1469598103934665603u;
	for (int i = 0; i < SHAPES; i++) {
		attention a;
		make(&a, i);
		const ingot_options o = deterministic(0);
		if (run_both(&a, &o)) return 1;
		const ingot_tensor *const t[] = {&a.fwd.out, &a.fwd.lse, &a.bwd.dq, &a.bwd.dk, &a.bwd.dv};
		for (int k = 0; k < 5; k++)
			for (size_t n = 0; n < (size_t)elements(t[k]) * element_size(t[k]->dtype); n++)
				sum = (sum ^ ((const unsigned char *)t[k]->data)[n]) * 1099511628211u;
		attention_end(&a);
	}
	fprintf(stderr, "sum %016llx\n", (unsigned long long)sum);
	return 0;
}

static int pin(void) {
	cpu_set_t mask;
	CPU_ZERO(&mask);
	CPU_SET((size_t)sched_getcpu(), &mask);
	return sched_setaffinity(0, sizeof mask, &mask);
}

static int checksum_pinned(void) {
	return pin() ? 1 : checksum();
}

static void *count_pinned(void *argument) {
	if (pin() || ingot_device_describe(cpu, NULL, 0, NULL, 0, argument)) *(int32_t *)argument = 0;
	return NULL;
}

/* The first call comes from a thread that is pinned: the process may run on more. */
static int first_call_pinned(void) {
	cpu_set_t mask;
	pthread_t thread;
	int32_t threads = 0;
	if (sched_getaffinity(0, sizeof mask, &mask) || pthread_create(&thread, NULL, count_pinned, &threads)) return 1;
	pthread_join(thread, NULL);
	return threads == CPU_COUNT(&mask) ? 42 : 2;
}

static int checksum_with_openmp(void) {
	/* Another runtime's threads and their pinning; a machine without one has nothing to be confused by. */
	(void)dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL);
	return checksum();
}

static void test_environments(void **state) {
	char plain[4096], text[4096];
	assert_int_equal(run_self("checksum", NULL, 60, plain, sizeof plain), 0);
	assert_non_null(strstr(plain, "sum "));
	static const char *const unset[] = {"INGOT_NUM_THREADS=", NULL};
	assert_int_equal(run_self("pinned-first", unset, 60, text, sizeof text), 42);
	static const char *const good[] = {"INGOT_NUM_THREADS=1", "INGOT_NUM_THREADS=3",  "INGOT_NUM_THREADS=256",
	                                   "INGOT_NUM_THREADS=",  "OMP_NUM_THREADS=0",    "OMP_NUM_THREADS=abc",
	                                   "OMP_NUM_THREADS=-1",  "GOMP_CPU_AFFINITY=99", "OMP_PROC_BIND=garbage",
	                                   "MKL_NUM_THREADS=0"};
	for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
		const char *const environment[] = {good[i], "INGOT_LOG=1", NULL};
		assert_int_equal(run_self("checksum", environment, 60, text, sizeof text), 0);
		if (strcmp(text, plain) != 0) fail_msg("%s: %s instead of %s", good[i], text, plain);
	}
	static const char *const nonsense[] = {"abc", "0", "-1", "1025", "4x", "99999999999999999999", "2.5"};
	for (size_t i = 0; i < sizeof nonsense / sizeof *nonsense; i++) {
		char setting[64];
		snprintf(setting, sizeof setting, "INGOT_NUM_THREADS=%s", nonsense[i]);
		const char *const environment[] = {setting, "INGOT_LOG=1", NULL};
		assert_int_equal(run_self("checksum", environment, 60, text, sizeof text), 0);
		/* Said once, with the name and what was given; and nothing else changes. */
		const char *const said = strstr(text, "INGOT_NUM_THREADS");
		if (!said || !strstr(said, nonsense[i]) || strstr(said + 1, "INGOT_NUM_THREADS"))
			fail_msg("%s: not reported once: %s", setting, text);
		assert_non_null(strstr(text, plain));
		/* With the log off, silence. */
		const char *const silent[] = {setting, NULL};
		assert_int_equal(run_self("checksum", silent, 60, text, sizeof text), 0);
		assert_string_equal(text, plain);
	}
	assert_int_equal(run_self("pinned", NULL, 60, text, sizeof text), 0);
	assert_string_equal(text, plain);
	assert_int_equal(run_self("openmp", NULL, 60, text, sizeof text), 0);
	assert_string_equal(text, plain);
}

/* ---- first calls from many threads (ROCm/hip#1846, NVIDIA/warp#1705) ---------------------------------------------------- */

enum { FIRST = 16 };
static pthread_barrier_t barrier;

static void *first_call(void *argument) {
	attention *const a = argument;
	pthread_barrier_wait(&barrier);
	return ingot_attn_fwd(&a->fwd, cpu, NULL) == INGOT_OK ? NULL : argument;
}

/* A fresh process: sixteen threads, each the first call of its own kind; then all the same kind. */
static int first_calls(void) {
	static const int32_t types[] = {INGOT_F32, INGOT_BF16};
	static const int64_t sizes[] = {64, 72, 96, 128};
	attention a[FIRST];
	pthread_t thread[FIRST];
	if (pthread_barrier_init(&barrier, NULL, FIRST)) return 1;
	int bad = 0;
	for (int round = 0; round < 2; round++) {
		for (int i = 0; i < FIRST; i++) {
			const int kind = round ? 5 : i;
			attention_begin(&a[i], types[kind & 1], 1, 2, 1, 20, 20, sizes[kind >> 1 & 3], 7);
			a[i].fwd.mask = kind >> 3 ? INGOT_MASK_CAUSAL : INGOT_MASK_NONE;
			if (pthread_create(&thread[i], NULL, first_call, &a[i])) return 1;
		}
		for (int i = 0; i < FIRST; i++) {
			void *outcome;
			pthread_join(thread[i], &outcome);
			if (outcome || !(forward_error(&a[i]) < 3e-2)) bad++;
			if (round && !same_bytes(&a[i].fwd.out, &a[0].fwd.out)) bad++;
		}
		for (int i = 0; i < FIRST; i++) attention_end(&a[i]);
	}
	return bad ? 2 : 0;
}

static void test_first_calls(void **state) {
#ifdef SANITIZED
	const int processes = 6;
#else
	const int processes = 50;
#endif
	char text[4096];
	for (int i = 0; i < processes; i++) {
		const int status = run_self("first", NULL, 60, text, sizeof text);
		if (status || *text) fail_msg("process %d: status %d: %s", i, status, text);
	}
}

/* ---- fork (OpenMathLib/OpenBLAS#294, facebookresearch/faiss#5206) ------------------------------------------------------- */

static bool again(const attention *a) {
	attention b;
	make(&b, 3);
	const ingot_options o = deterministic(8);
	const bool good = run_both(&b, &o) == INGOT_OK && same(a, &b);
	attention_end(&b);
	return good;
}

static int grandchild(void *argument) {
	return again(argument) ? 0 : 1;
}

static int child(void *argument) {
	if (run_fork(grandchild, argument, 60)) return 2; /* before the child's own first call */
	if (!again(argument)) return 1;
	return run_fork(grandchild, argument, 60) ? 3 : 0;
}

static void test_fork(void **state) {
	attention a;
	make(&a, 3);
	const ingot_options o = deterministic(8);
	assert_ok(run_both(&a, &o));
	for (int i = 0; i < 5; i++) {
		assert_int_equal(run_fork(child, &a, 180), 0);
		assert_true(again(&a));
	}
	attention_end(&a);
}

static atomic_bool stop;

static void *calls_until_stopped(void *argument) {
	attention a;
	make(&a, 3);
	const ingot_options o = deterministic(4);
	ingot_status status = INGOT_OK;
	while (!atomic_load(&stop) && !status) {
		status = run_both(&a, &o);
		/* Errors and explanations take other ways through the library. */
		ingot_attn_fwd_params bad = a.fwd;
		bad.mask = 77;
		if (!status && ingot_attn_fwd(&bad, cpu, NULL) != INGOT_INVALID) status = INGOT_INTERNAL;
		char text[256];
		if (!status) status = ingot_attn_fwd_explain(&a.fwd, cpu, &o, INGOT_JSON, text, sizeof text, NULL);
	}
	attention_end(&a);
	return status ? argument : NULL;
}

/* A sanitizer's own locks may be held at such a fork, by threads that allocate or make threads: the address sanitizer's child stood
 * still in 2 of 7 runs, the thread sanitizer's in 2 of 16, within aligned_alloc. So under one the child does neither: it is given its
 * tensors and workspace. */
typedef struct prepared {
	attention before, again;
	void *workspace;
} prepared;

enum { WORKSPACE = 8 << 20 };

static int child_among_threads(void *argument) {
	const prepared *const p = argument;
#ifdef SANITIZED
	ingot_options o = deterministic(1);
	o.workspace = p->workspace;
	o.workspace_size = WORKSPACE;
	return run_both(&p->again, &o) == INGOT_OK && same(&p->before, &p->again) ? 0 : 1;
#else
	return again(&p->before) ? 0 : 1;
#endif
}

static void test_fork_while_others_call(void **state) {
	prepared p = {.workspace = aligned_alloc(256, WORKSPACE)};
	assert_non_null(p.workspace);
	make(&p.before, 3), make(&p.again, 3);
	const ingot_options o = deterministic(8);
	assert_ok(run_both(&p.before, &o));
	pthread_t thread[3];
	atomic_store(&stop, false);
	for (int i = 0; i < 3; i++) assert_int_equal(pthread_create(&thread[i], NULL, calls_until_stopped, &p), 0);
	for (int i = 0; i < 20; i++) assert_int_equal(run_fork(child_among_threads, &p, 60), 0);
	atomic_store(&stop, true);
	for (int i = 0; i < 3; i++) {
		void *outcome;
		pthread_join(thread[i], &outcome);
		assert_null(outcome);
	}
	attention_end(&p.before), attention_end(&p.again);
	free(p.workspace);
}

/* ---- memory (pytorch/pytorch#104701, #191576) --------------------------------------------------------------------------- */

static long resident_kib(void) {
	FILE *const file = fopen("/proc/self/statm", "r");
	long whole = 0, resident = 0;
	if (file) {
		if (fscanf(file, "%ld %ld", &whole, &resident) != 2) resident = 0;
		fclose(file);
	}
	return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

#ifdef SANITIZED
enum { MEMORY_THREADS = 8, MOST = 160, SHAPES_OF_A_THREAD = 20 };
#else
enum { MEMORY_THREADS = 8, MOST = 160, SHAPES_OF_A_THREAD = 250 };
#endif

static void *many_shapes(void *argument) {
	const int64_t first = *(const int64_t *)argument;
	attention a;
	attention_begin(&a, INGOT_F32, 1, 1, 1, MOST, MOST, 8, 3);
	ingot_status status = INGOT_OK;
	for (int64_t n = first; n < first + SHAPES_OF_A_THREAD && !status; n++) {
		ingot_attn_fwd_params p = a.fwd;
		const int64_t sq = 1 + n % MOST, sk = 1 + n / MOST % MOST;
		p.q.shape[2] = p.out.shape[2] = p.lse.shape[2] = sq;
		p.k.shape[2] = p.v.shape[2] = sk;
		status = ingot_attn_fwd(&p, cpu, NULL);
	}
	attention_end(&a);
	return status ? argument : NULL;
}

/* Twenty thousand shapes, each thread living for 250 of them only: what threads leave behind would pile up. */
static void test_memory_does_not_grow(void **state) {
	long settled = 0;
	for (int64_t n = 0, calls = 0; n < 10; n++) {
		pthread_t thread[MEMORY_THREADS];
		int64_t first[MEMORY_THREADS];
		for (int i = 0; i < MEMORY_THREADS; i++, calls += SHAPES_OF_A_THREAD) {
			first[i] = calls;
			assert_int_equal(pthread_create(&thread[i], NULL, many_shapes, &first[i]), 0);
		}
		for (int i = 0; i < MEMORY_THREADS; i++) {
			void *outcome;
			pthread_join(thread[i], &outcome);
			assert_null(outcome);
		}
		if (n == 0) settled = resident_kib();
	}
	const long grown = resident_kib() - settled;
	printf("resident memory grew by %ld KiB over %d shapes\n", grown, 9 * MEMORY_THREADS * SHAPES_OF_A_THREAD);
#ifndef SANITIZED /* whose quarantine and shadow grow by design */
	assert_true(grown < 64 * 1024);
#endif
}

int main(int argc, char **argv) {
	if (argc == 2) {
		if (strcmp(argv[1], "checksum") == 0) return checksum();
		if (strcmp(argv[1], "pinned") == 0) return checksum_pinned();
		if (strcmp(argv[1], "pinned-first") == 0) return first_call_pinned();
		if (strcmp(argv[1], "openmp") == 0) return checksum_with_openmp();
		if (strcmp(argv[1], "first") == 0) return first_calls();
	}
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_thread_counts),
		cmocka_unit_test(test_floating_point_environment),
		cmocka_unit_test(test_environments),
		cmocka_unit_test(test_first_calls),
		cmocka_unit_test(test_fork),
		cmocka_unit_test(test_fork_while_others_call),
		cmocka_unit_test(test_memory_does_not_grow),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
