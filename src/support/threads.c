/*
 * The thread pool. One job at a time; its lanes are handed out by one atomic word, which is also what idle workers sleep on.
 * The caller works too and takes every lane that no worker has claimed yet, so it never waits for a thread to wake up, only
 * for lanes that are really running elsewhere.
 *
 * There is no lock to be found locked in a forked child, and all state is static: a child's handler sets it back to "no
 * workers", and a process may exit with workers asleep.
 */
#include "threads.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define STACK_BYTES ((size_t)1 << 20)
/* How long an idle worker looks for the next job before it sleeps: the gap between the calls of one layer and the next. */
#define SPIN_NANOSECONDS 40000
/* After a failure to make a thread, so many jobs go by before another attempt. */
#define CREATE_PAUSE 1000
#define MASK_NANOSECONDS 250000000

/* Lanes of the job in the high half, the next lane to claim in the low half: there is something to do iff next < lanes. */
typedef uint32_t lane_word;

static struct {
	_Atomic lane_word word;
	_Atomic uint32_t unfinished; /* lanes of the job that have not returned */
	atomic_bool owner_sleeps;
	atomic_int sleepers;
	atomic_bool spin; /* there is a processor for every lane of the last job */
	/* Held by the caller whose job it is. The fields below are its own; workers read the job after claiming a lane of it,
	 * and it stays as it is until that lane has returned. */
	atomic_bool taken;
	bool fork_handled;
	int workers, create_pause;
	void (*body)(void *argument, int lane);
	void *argument;
} pool;

static void futex_wait(_Atomic uint32_t *word, uint32_t value) {
	(void)syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int count) {
	(void)syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

static int64_t now(clockid_t clock) {
	struct timespec t;
	(void)clock_gettime(clock, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static bool open_lane(lane_word word) {
	return (word & 0xffff) < word >> 16;
}

/* The next lane of the current job, -1 if there is none. A claimed lane holds the job open until lane_done. */
static int claim_lane(void) {
	lane_word word = atomic_load_explicit(&pool.word, memory_order_relaxed);
	while (open_lane(word))
		if (atomic_compare_exchange_weak_explicit(&pool.word, &word, word + 1, memory_order_acquire,
		                                          memory_order_relaxed))
			return (int)(word & 0xffff);
	return -1;
}

static void run_lane(int lane) {
	pool.body(pool.argument, lane);
	/* The owner says that it sleeps before the kernel compares the counter; seq_cst keeps one of the two from being missed.
	 * Past the decrement the job may be over and the next one begun: a wake-up too many does no harm. */
	if (atomic_fetch_sub(&pool.unfinished, 1) == 1 && atomic_load(&pool.owner_sleeps)) futex_wake(&pool.unfinished, 1);
}

static void *worker(void *unused) {
	(void)unused;
	for (;;) {
		const int lane = claim_lane();
		if (lane >= 0) {
			run_lane(lane);
			continue;
		}
		if (atomic_load_explicit(&pool.spin, memory_order_relaxed)) {
			const int64_t until = now(CLOCK_MONOTONIC) + SPIN_NANOSECONDS;
			bool found = false;
			do {
				for (int i = 0; i < 16 && !found; i++) {
					relax();
					found = open_lane(atomic_load_explicit(&pool.word, memory_order_relaxed));
				}
			} while (!found && now(CLOCK_MONOTONIC) < until);
			if (found) continue;
		}
		/* Counted as asleep before the last look at the word: an owner that publishes later sees the count. */
		atomic_fetch_add(&pool.sleepers, 1);
		const lane_word word = atomic_load(&pool.word);
		if (!open_lane(word)) futex_wait(&pool.word, word);
		atomic_fetch_sub(&pool.sleepers, 1);
	}
	return NULL;
}

/* The child has none of the workers, and no owner but, maybe, a thread of the parent's. */
static void forget_workers(void) {
	atomic_store(&pool.word, 0);
	atomic_store(&pool.unfinished, 0);
	atomic_store(&pool.owner_sleeps, false);
	atomic_store(&pool.sleepers, 0);
	pool.workers = 0;
	pool.create_pause = 0;
	atomic_store(&pool.taken, false);
}

enum { MASK_WORDS = 8 };

/* The processors of a thread, 0: the calling one; none if they cannot be told. */
static int mask_of(pid_t thread, cpu_set_t mask[MASK_WORDS]) {
	const size_t size = MASK_WORDS * sizeof *mask;
	return sched_getaffinity(thread, size, mask) == 0 ? CPU_COUNT_S(size, mask) : 0;
}

static int mask_of_process(cpu_set_t mask[MASK_WORDS]) {
	cpu_set_t own[MASK_WORDS];
	const int first = mask_of(getpid(), mask), here = mask_of(0, own);
	if (here <= first) return first;
	memcpy(mask, own, sizeof own);
	return here;
}

static void create_workers(int wanted) {
	if (pool.workers >= wanted) return;
	if (pool.create_pause > 0) {
		pool.create_pause--;
		return;
	}
	if (!pool.fork_handled) pool.fork_handled = pthread_atfork(NULL, NULL, forget_workers) == 0;
	pthread_attr_t attributes;
	if (!pool.fork_handled || pthread_attr_init(&attributes) != 0) {
		pool.create_pause = CREATE_PAUSE;
		return;
	}
	(void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	(void)pthread_attr_setstacksize(&attributes, STACK_BYTES);
	/* They serve every caller, so the mask of the one that needs them first is not theirs. */
	cpu_set_t mask[MASK_WORDS];
	if (mask_of_process(mask) > 0) (void)pthread_attr_setaffinity_np(&attributes, sizeof mask, mask);
	/* Signals belong to the program's own threads. */
	sigset_t all, before;
	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_SETMASK, &all, &before);
	while (pool.workers < wanted) {
		pthread_t thread;
		if (pthread_create(&thread, &attributes, worker, NULL) != 0) {
			pool.create_pause = CREATE_PAUSE;
			break;
		}
		pool.workers++;
	}
	(void)pthread_sigmask(SIG_SETMASK, &before, NULL);
	(void)pthread_attr_destroy(&attributes);
}

static void wait_for_lanes(bool spin) {
	const int64_t until = spin ? now(CLOCK_MONOTONIC) + SPIN_NANOSECONDS : 0;
	uint32_t left;
	while ((left = atomic_load_explicit(&pool.unfinished, memory_order_acquire)) != 0) {
		if (spin && now(CLOCK_MONOTONIC) < until) {
			for (int i = 0; i < 16 && atomic_load_explicit(&pool.unfinished, memory_order_relaxed) != 0; i++) relax();
			continue;
		}
		atomic_store(&pool.owner_sleeps, true);
		futex_wait(&pool.unfinished, left);
	}
}

void ingot__parallel(int lanes, void (*body)(void *argument, int lane), void *argument) {
	if (lanes < 2 || lanes > INGOT__LANES || atomic_exchange_explicit(&pool.taken, true, memory_order_acquire)) {
		for (int lane = 0; lane < lanes; lane++) body(argument, lane);
		return;
	}
	create_workers(lanes - 1);
	const bool spin = lanes <= ingot__processors();
	atomic_store_explicit(&pool.spin, spin, memory_order_relaxed);
	atomic_store_explicit(&pool.owner_sleeps, false, memory_order_relaxed);
	atomic_store_explicit(&pool.unfinished, (uint32_t)lanes, memory_order_relaxed);
	pool.body = body;
	pool.argument = argument;
	atomic_store(&pool.word, (lane_word)lanes << 16 | 1);
	/* Workers that are awake come by themselves. */
	const int sleepers = atomic_load(&pool.sleepers);
	const int wake = lanes - 1 - (pool.workers - sleepers);
	if (sleepers > 0 && wake > 0) futex_wake(&pool.word, wake);
	for (int lane = 0; lane >= 0; lane = claim_lane()) run_lane(lane);
	wait_for_lanes(spin);
	atomic_store_explicit(&pool.taken, false, memory_order_release);
}

static int lanes_of(int processors) {
	return processors < 1 ? 1 : processors > INGOT__LANES ? INGOT__LANES : processors;
}

int ingot__processors_of_process(void) {
	cpu_set_t mask[MASK_WORDS];
	return lanes_of(mask_of_process(mask));
}

int ingot__processors(void) {
	/* The mask is the thread's own, so the memory of it is, too. */
	static _Thread_local int64_t read_at;
	static _Thread_local int count;
	const int64_t time = now(CLOCK_MONOTONIC_COARSE);
	if (count == 0 || time - read_at > MASK_NANOSECONDS) {
		cpu_set_t mask[MASK_WORDS];
		count = lanes_of(mask_of(0, mask));
		read_at = time;
	}
	return count;
}

int ingot__threads_variable(const char **text) {
	*text = getenv("INGOT_NUM_THREADS");
	if (!*text || !**text) return 0;
	int number = 0;
	for (const char *c = *text; *c; c++) {
		if (*c < '0' || *c > '9') return -1;
		number = number * 10 + (*c - '0');
		if (number > INGOT__LANES) return -1;
	}
	return number > 0 ? number : -1;
}
