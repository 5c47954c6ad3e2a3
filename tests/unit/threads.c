/*
 * The thread pool: each lane runs exactly once whatever the number of lanes and callers, nothing starts before it is needed,
 * a fork leaves a working pool on both sides, and a thread that cannot be made is done without. `threads exit` and
 * `threads limit` are the program's own children, for what needs a process of its own.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "support/threads.h"

/* Threads made after a fork in a program with threads are what is tested here; by default the thread sanitizer stops there. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) {
	return "die_after_fork=0:atexit_sleep_ms=50";
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif

typedef struct job {
	atomic_int ran[INGOT__LANES];
	atomic_int next; /* the tasks, as launch.c hands them out */
	int tasks;
	atomic_llong sum;
	int nested; /* lanes of a job begun inside the body */
	int plain;  /* written by the caller before and read in the body: publication is what the sanitizer watches */
	int64_t out[INGOT__LANES * 4];
} job;

static void body(void *argument, int lane) {
	job *const j = argument;
	atomic_fetch_add(&j->ran[lane], 1);
	for (int task; (task = atomic_fetch_add(&j->next, 1)) < j->tasks;) {
		j->out[task] = (int64_t)task * j->plain;
		atomic_fetch_add(&j->sum, task);
	}
	if (j->nested) {
		job *const inner = calloc(1, sizeof *inner);
		assert_non_null(inner);
		inner->tasks = 3, inner->plain = 5;
		ingot__parallel(j->nested, body, inner);
		for (int i = 0; i < j->nested; i++)
			if (atomic_load(&inner->ran[i]) != 1) abort();
		free(inner);
	}
}

/* Runs one job and says whether all of it happened exactly once. */
static bool run_job(int lanes, int tasks, int nested) {
	/* Not from malloc: a sanitizer's own allocator does not survive a fork while other threads are in it. */
	static _Thread_local job own;
	job *const j = &own;
	memset(j, 0, sizeof *j);
	j->tasks = tasks, j->nested = nested, j->plain = 7;
	ingot__parallel(lanes, body, j);
	bool good = atomic_load(&j->sum) == (long long)tasks * (tasks - 1) / 2;
	for (int i = 0; i < lanes; i++) good &= atomic_load(&j->ran[i]) == 1;
	for (int i = lanes; i < INGOT__LANES; i++) good &= atomic_load(&j->ran[i]) == 0;
	for (int i = 0; i < tasks; i++) good &= j->out[i] == (int64_t)i * 7;
	return good;
}

static int threads_of_this_process(void) {
	DIR *const folder = opendir("/proc/self/task");
	assert_non_null(folder);
	int count = 0;
	for (const struct dirent *entry; (entry = readdir(folder));) count += entry->d_name[0] != '.';
	closedir(folder);
	return count;
}

/* Runs child() in a forked process. One that takes two minutes counts as hung: with thirty other programs on two cores ten seconds
 * were too few once. */
static void expect_child(int (*child)(void)) {
	fflush(NULL);
	const pid_t pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		alarm(120);
		_exit(child());
	}
	int status = 0;
	assert_int_equal(waitpid(pid, &status, 0), pid);
	if (WIFSIGNALED(status)) fail_msg("the child died of signal %d", WTERMSIG(status));
	assert_int_equal(WEXITSTATUS(status), 0);
}

static void *nothing(void *argument) {
	return argument;
}

static void test_no_thread_before_use(void **state) {
	/* A sanitizer's own thread appears with the program's first. */
	pthread_t thread;
	assert_int_equal(pthread_create(&thread, NULL, nothing, NULL), 0);
	pthread_join(thread, NULL);
	const int before = threads_of_this_process();
	assert_true(run_job(1, 10, 0));
	assert_int_equal(threads_of_this_process(), before);
	assert_true(run_job(3, 10, 0));
	assert_int_equal(threads_of_this_process(), before + 2);
	assert_true(run_job(2, 10, 0));
	assert_int_equal(threads_of_this_process(), before + 2);
}

static void test_every_lane_once(void **state) {
	for (int lanes = 1; lanes <= 66; lanes += lanes < 9 ? 1 : 19)
		for (int tasks = 0; tasks < 40; tasks += 13)
			for (int round = 0; round < 20; round++) assert_true(run_job(lanes, tasks, 0));
	assert_true(run_job(256, 1000, 0));
	assert_true(run_job(INGOT__LANES, 4000, 0));
	for (int round = 0; round < 50; round++) assert_true(run_job(2 + round % 9, 100, 0));
}

/* Gaps around the length of the spin: workers that are just falling asleep must not be missed. */
static void test_gaps_between_jobs(void **state) {
	for (int i = 0; i < 3000; i++) {
		assert_true(run_job(2 + i % 2, 4, 0));
		struct timespec gap = {0, i % 7 * 10000};
		nanosleep(&gap, NULL);
	}
}

static void test_nested(void **state) {
	for (int round = 0; round < 50; round++) assert_true(run_job(4, 10, 3));
}

static void *many_jobs(void *argument) {
	bool *const good = argument;
	for (int i = 0; i < 300; i++) *good &= run_job(1 + i % 6, i % 50, i % 10 == 0 ? 2 : 0);
	return NULL;
}

static void test_many_callers(void **state) {
	pthread_t thread[8];
	bool good[8];
	for (int i = 0; i < 8; i++) {
		good[i] = true;
		assert_int_equal(pthread_create(&thread[i], NULL, many_jobs, &good[i]), 0);
	}
	for (int i = 0; i < 8; i++) {
		pthread_join(thread[i], NULL);
		assert_true(good[i]);
	}
}

typedef struct taken {
	pthread_t caller;
	atomic_int on_workers;
	atomic_int blocked;
} taken;

static void look_at_signals(void *argument, int lane) {
	taken *const t = argument;
	/* Long enough for a worker to wake up and take its part. */
	struct timespec pause = {0, 20000000};
	nanosleep(&pause, NULL);
	if (pthread_equal(pthread_self(), t->caller)) return;
	atomic_fetch_add(&t->on_workers, 1);
	sigset_t mask;
	pthread_sigmask(SIG_SETMASK, NULL, &mask);
	atomic_fetch_add(&t->blocked,
	                 sigismember(&mask, SIGINT) && sigismember(&mask, SIGALRM) && sigismember(&mask, SIGCHLD));
}

/* Whether other threads do take lanes, and none of them takes signals. */
static bool workers_take_part(void) {
	taken t = {.caller = pthread_self()};
	/* On a busy machine the caller may finish many a job before a worker wakes. */
	for (int i = 0; i < 3 || (i < 1000 && atomic_load(&t.on_workers) == 0); i++)
		ingot__parallel(4, look_at_signals, &t);
	return atomic_load(&t.on_workers) > 0 && atomic_load(&t.on_workers) == atomic_load(&t.blocked);
}

/* A sanitizer's runtime does not promise that a thread made after such a fork gets far: its own locks may have been held then.
 * There the child must finish its job, with workers or without; elsewhere workers must take part. */
static bool workers_take_part_after_fork(void) {
#ifdef SANITIZED
	return true;
#else
	return workers_take_part();
#endif
}

static int grandchild(void) {
	return run_job(8, 100, 0) && workers_take_part_after_fork() ? 0 : 1;
}

static int child(void) {
	/* Before its first job a child has no worker, and grandchildren are made both before and after. */
	if (threads_of_this_process() > 2) return 2; /* the thread sanitizer brings one of its own */
	expect_child(grandchild);
	for (int i = 0; i < 100; i++)
		if (!run_job(8, 100, i % 10 == 0 ? 3 : 0)) return 3;
	expect_child(grandchild);
	return 0;
}

static void test_fork(void **state) {
	assert_true(run_job(8, 100, 0));
	for (int i = 0; i < 5; i++) {
		expect_child(child);
		assert_true(run_job(8, 100, 0));
	}
}

static atomic_bool stop_callers;

static void *jobs_until_stopped(void *argument) {
	bool *const good = argument;
	while (!atomic_load(&stop_callers)) *good &= run_job(4, 20, 0);
	return NULL;
}

/* The fork falls into other threads' jobs: the child must find neither a job nor a lock left over. */
static void test_fork_while_busy(void **state) {
	pthread_t thread[2];
	bool good[2] = {true, true};
	atomic_store(&stop_callers, false);
	for (int i = 0; i < 2; i++) assert_int_equal(pthread_create(&thread[i], NULL, jobs_until_stopped, &good[i]), 0);
	for (int i = 0; i < 30; i++) expect_child(grandchild);
	atomic_store(&stop_callers, true);
	for (int i = 0; i < 2; i++) {
		pthread_join(thread[i], NULL);
		assert_true(good[i]);
	}
}

/* Work really goes to other threads, and no signal does. */
static void test_workers_take_part_without_signals(void **state) {
	assert_true(workers_take_part());
}

static int pinned(void) {
	cpu_set_t mask, one;
	if (sched_getaffinity(0, sizeof mask, &mask) != 0) return 1;
	if (ingot__processors() != CPU_COUNT(&mask)) return 2;
	CPU_ZERO(&one);
	for (int i = 0; i < CPU_SETSIZE; i++)
		if (CPU_ISSET(i, &mask)) {
			CPU_SET(i, &one);
			break;
		}
	if (sched_setaffinity(0, sizeof one, &one) != 0) return 3;
	struct timespec pause = {0, 300000000};
	nanosleep(&pause, NULL);
	if (ingot__processors() != 1) return 4;
	/* More lanes than processors: nobody spins, everything still ends. */
	for (int i = 0; i < 200; i++)
		if (!run_job(8, 50, 0)) return 5;
	return 0;
}

static cpu_set_t whole; /* the process's mask */
static pthread_t pinned_caller;
static atomic_int wide_lanes, narrow_lanes; /* run by other threads than the caller */

static void look_at_mask(void *argument, int lane) {
	(void)argument, (void)lane;
	cpu_set_t mask;
	if (!pthread_equal(pthread_self(), pinned_caller) && sched_getaffinity(0, sizeof mask, &mask) == 0)
		atomic_fetch_add(CPU_EQUAL(&mask, &whole) ? &wide_lanes : &narrow_lanes, 1);
	struct timespec pause = {0, 10000000};
	nanosleep(&pause, NULL); /* or the caller would have done all lanes before a worker is there */
}

static void *first_use_of_pinned_thread(void *argument) {
	cpu_set_t one;
	CPU_ZERO(&one);
	for (int i = 0; CPU_COUNT(&one) == 0; i++)
		if (CPU_ISSET(i, &whole)) CPU_SET(i, &one);
	pinned_caller = pthread_self();
	if (sched_setaffinity(0, sizeof one, &one) != 0 || ingot__processors() != 1) return NULL;
	if (ingot__processors_of_process() != CPU_COUNT(&whole)) return NULL;
	for (int i = 0; i < 100 && atomic_load(&wide_lanes) == 0; i++) ingot__parallel(4, look_at_mask, NULL);
	return argument;
}

/* Frameworks pin threads, and one of these may make a process's first call: neither the number of threads nor where the
 * workers run is to follow from it. */
static int pinned_thread_first(void) {
	pthread_t thread;
	void *outcome;
	if (sched_getaffinity(0, sizeof whole, &whole) != 0) return 1;
	if (pthread_create(&thread, NULL, first_use_of_pinned_thread, &whole) != 0) return 2;
	pthread_join(thread, &outcome);
	if (!outcome) return 3;
	return atomic_load(&wide_lanes) > 0 && atomic_load(&narrow_lanes) == 0 ? 0 : 4;
}

static void test_affinity(void **state) {
	expect_child(pinned);
	expect_child(pinned_thread_first);
}

static void test_variable(void **state) {
	static const struct {
		const char *text;
		int value;
	} rows[] = {
		{"1", 1},     {"2", 2},     {"1024", 1024}, {"007", 7},  {"", 0},
		{"0", -1},    {"1025", -1}, {"-3", -1},     {"+3", -1},  {"abc", -1},
		{"4x", -1},   {" 4", -1},   {"4 ", -1},     {"3.5", -1}, {"99999999999999999999999999", -1},
		{"0x10", -1}, {"4,4", -1},
	};
	const char *text;
	unsetenv("INGOT_NUM_THREADS");
	assert_int_equal(ingot__threads_variable(&text), 0);
	assert_null(text);
	for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
		setenv("INGOT_NUM_THREADS", rows[i].text, 1);
		assert_int_equal(ingot__threads_variable(&text), rows[i].value);
		assert_string_equal(text, rows[i].text);
	}
	unsetenv("INGOT_NUM_THREADS");
}

static void expect_self(const char *mode) {
	char self[4096];
	const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
	assert_true(length > 0);
	self[length] = 0;
	fflush(NULL);
	const pid_t pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		execl(self, self, mode, (char *)NULL);
		_exit(127);
	}
	int status = 0;
	assert_int_equal(waitpid(pid, &status, 0), pid);
	if (WIFSIGNALED(status)) fail_msg("%s died of signal %d", mode, WTERMSIG(status));
	assert_int_equal(WEXITSTATUS(status), 3);
}

/* A process of its own that returns from main with workers awake, and one that may make no thread at all. */
static void test_exit_with_workers(void **state) {
	for (int i = 0; i < 10; i++) expect_self("exit");
}

static void test_no_thread_to_be_had(void **state) {
#ifdef SANITIZED
	skip(); /* a sanitizer cannot live within a limit on the address space */
#endif
	expect_self("limit");
}

static int own_process(const char *mode) {
	alarm(120);
	if (strcmp(mode, "exit") == 0) {
		if (!run_job(8, 100, 0)) return 1;
		return 3;
	}
	/* An address space too small for one more stack. */
	struct rlimit limit;
	FILE *const file = fopen("/proc/self/statm", "r");
	unsigned long pages = 0;
	if (!file || fscanf(file, "%lu", &pages) != 1) return 1;
	fclose(file);
	job *const j = calloc(1, sizeof *j);
	if (!j) return 1;
	j->tasks = 100, j->plain = 7;
	limit.rlim_cur = limit.rlim_max = pages * (rlim_t)sysconf(_SC_PAGESIZE) + 300000;
	if (setrlimit(RLIMIT_AS, &limit) != 0) return 1;
	const int before = threads_of_this_process();
	ingot__parallel(8, body, j);
	if (threads_of_this_process() != before) return 2;
	const bool good = atomic_load(&j->sum) == 4950;
	free(j);
	return good ? 3 : 1;
}

int main(int argc, char **argv) {
	if (argc == 2) return own_process(argv[1]);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_no_thread_before_use), /* first: the pool must still be empty */
		cmocka_unit_test(test_every_lane_once),
		cmocka_unit_test(test_gaps_between_jobs),
		cmocka_unit_test(test_nested),
		cmocka_unit_test(test_many_callers),
		cmocka_unit_test(test_fork),
		cmocka_unit_test(test_fork_while_busy),
		cmocka_unit_test(test_workers_take_part_without_signals),
		cmocka_unit_test(test_affinity),
		cmocka_unit_test(test_variable),
		cmocka_unit_test(test_exit_with_workers),
		cmocka_unit_test(test_no_thread_to_be_had),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
