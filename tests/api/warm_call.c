/*
 * A warm call allocates nothing and costs little: this program's own malloc and mmap count what the library asks for, and a
 * problem of one query, one key and one head is timed.
 */
#include "support_api.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static atomic_bool trap;
static atomic_int allocations;

#ifndef SANITIZED /* a sanitizer has the allocator for itself */
/* Visible, or the library would go past them to the C library's. */
#pragma GCC visibility push(default)
static void count(void) {
	if (atomic_load_explicit(&trap, memory_order_relaxed)) atomic_fetch_add(&allocations, 1);
}

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

void *malloc(size_t size) {
	count();
	return __libc_malloc(size);
}
void *calloc(size_t number, size_t size) {
	count();
	return __libc_calloc(number, size);
}
void *realloc(void *memory, size_t size) {
	count();
	return __libc_realloc(memory, size);
}
void *memalign(size_t alignment, size_t size);
void *memalign(size_t alignment, size_t size) {
	count();
	return __libc_memalign(alignment, size);
}
void *aligned_alloc(size_t alignment, size_t size) {
	count();
	return __libc_memalign(alignment, size);
}
int posix_memalign(void **memory, size_t alignment, size_t size) {
	count();
	*memory = __libc_memalign(alignment, size);
	return *memory ? 0 : ENOMEM;
}
void *mmap(void *address, size_t length, int protection, int flags, int file, off_t offset) {
	count();
	return (void *)syscall(SYS_mmap, address, length, protection, flags, file, offset); /* NOLINT */
}
#pragma GCC visibility pop
#endif

#ifdef SANITIZED
enum { ROUNDS = 1, TIMED = 10 };
#else
enum { ROUNDS = 20, TIMED = 3000 };
#endif

/* Allocations in warm calls of this problem. */
static int warm_allocations(ingot_attn_fwd_params *p, ingot_attn_bwd_params *b, const ingot_options *o) {
	for (int i = 0; i < 3; i++) {
		assert_ok(ingot_attn_fwd(p, cpu, o));
		if (b) assert_ok(ingot_attn_bwd(b, cpu, o));
	}
	atomic_store(&allocations, 0);
	atomic_store(&trap, true);
	ingot_status status = INGOT_OK;
	for (int i = 0; i < ROUNDS && !status; i++) {
		status = ingot_attn_fwd(p, cpu, o);
		if (b && !status) status = ingot_attn_bwd(b, cpu, o);
	}
	atomic_store(&trap, false);
	assert_ok(status);
	return atomic_load(&allocations);
}

static void test_trap_catches(void **state) {
#ifdef SANITIZED
	skip();
#endif
	atomic_store(&allocations, 0);
	atomic_store(&trap, true);
	free(malloc(10)); /* NOLINT */
	void *volatile memory = malloc(20);
	free(memory);
	memory = aligned_alloc(256, 512);
	free(memory);
	atomic_store(&trap, false);
	assert_true(atomic_load(&allocations) >= 2);
	/* The library's own, too: the first call of the process needs a workspace. */
	attention a;
	attention_begin(&a, INGOT_BF16, 1, 2, 1, 40, 40, 64, 1);
	const ingot_options o = {.struct_size = sizeof o};
	atomic_store(&allocations, 0);
	atomic_store(&trap, true);
	const ingot_status status = ingot_attn_fwd(&a.fwd, cpu, &o);
	atomic_store(&trap, false);
	assert_ok(status);
	assert_true(atomic_load(&allocations) > 0);
	attention_end(&a);
}

static void test_nothing_is_allocated(void **state) {
	static const struct {
		int32_t dtype;
		int64_t b, hq, hk, sq, sk, d;
	} shape[] = {
		{INGOT_F32, 1, 1, 1, 1, 1, 64},
		{INGOT_BF16, 2, 4, 2, 70, 130, 64},
		{INGOT_F16, 1, 8, 1, 1, 700, 128},
	};
	for (size_t i = 0; i < sizeof shape / sizeof *shape; i++)
		for (int threads = 1; threads <= 4; threads += 3) {
			attention a;
			attention_begin(&a, shape[i].dtype, shape[i].b, shape[i].hq, shape[i].hk, shape[i].sq, shape[i].sk,
			                shape[i].d, i);
			a.fwd.mask = i == 1 ? INGOT_MASK_CAUSAL : INGOT_MASK_NONE;
			a.fwd.align = INGOT_BOTTOM_RIGHT;
			attention_backward(&a, i);
			ingot_options o = {.struct_size = sizeof o, .num_threads = threads};
			/* With the library's own memory, and with the caller's after prepare. */
			assert_int_equal(warm_allocations(&a.fwd, &a.bwd, &o), 0);
			uint64_t forward = 0, backward = 0;
			assert_ok(ingot_attn_fwd_workspace(&a.fwd, cpu, &o, &forward));
			assert_ok(ingot_attn_bwd_workspace(&a.bwd, cpu, &o, &backward));
			const size_t size = (size_t)(forward > backward ? forward : backward) / 256 * 256 + 512;
			void *const workspace = aligned_alloc(256, size);
			assert_non_null(workspace);
			o.workspace = workspace, o.workspace_size = size;
			assert_ok(ingot_attn_fwd_prepare(&a.fwd, cpu, &o));
			assert_int_equal(warm_allocations(&a.fwd, &a.bwd, &o), 0);
			free(workspace);
			attention_end(&a);
		}
}

static double nanoseconds_of_a_call(const ingot_attn_fwd_params *p, const ingot_options *o) {
	double best = 1e18;
	for (int round = 0; round < TIMED; round++) {
		struct timespec start, end;
		clock_gettime(CLOCK_MONOTONIC, &start);
		for (int i = 0; i < 10; i++)
			if (ingot_attn_fwd(p, cpu, o) != INGOT_OK) return 1e18;
		clock_gettime(CLOCK_MONOTONIC, &end);
		const double t = ((double)(end.tv_sec - start.tv_sec) * 1e9 + (double)(end.tv_nsec - start.tv_nsec)) / 10;
		if (t < best) best = t;
	}
	return best;
}

static void test_overhead(void **state) {
	attention a;
	attention_begin(&a, INGOT_F32, 1, 1, 1, 1, 1, 64, 1);
	const double time = nanoseconds_of_a_call(&a.fwd, NULL);
	printf("a call of 1x1x1x64: %.0f ns\n", time);
#if !defined(SANITIZED) && defined(__OPTIMIZE__)
	assert_true(time < 2000);
#endif
	attention_end(&a);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_trap_catches),
		cmocka_unit_test(test_nothing_is_allocated),
		cmocka_unit_test(test_overhead),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
