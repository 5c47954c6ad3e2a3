/*
 * `ingot check`: every implementation that this machine can run, forced by name, against the fp64 reference. The kernels come
 * from the library's own list; the cases from text tiers built into the command, from features taken in pairs, from the
 * sizes round every tile edge, and from a random generator.
 */
#ifndef INGOT_TOOL_CHECK_H
#define INGOT_TOOL_CHECK_H

#include <pthread.h>

#include "case.h"
#include "check_small.h"

enum { CHECK_KERNELS = 64, CHECK_ERROR = 512, CHECK_JOBS = 64 };

typedef struct check_kernel {
	char name[96];    /* "x86/attn_fwd_avx2" */
	const char *file; /* "attn_fwd_avx2": the name of tuning rows */
	const char *digest;
	tool_operator op;
	int64_t cases, refused, failed;
	double worst; /* error ratio of the rule: 1 is the bound */
	char worst_case[PROBLEM_TEXT];
	char refusal[256]; /* the last one */
	double seconds;    /* in it, its copies and its judging, over all cases */
} check_kernel;

/* Cases run on several threads: what changes after the start is read and written under the lock. */
typedef struct check_run {
	check_kernel kernels[CHECK_KERNELS];
	int count;
	uint64_t seed;
	int level;
	int32_t threads; /* 0: the library's */
	int jobs;        /* cases at a time */
	bool verbose, quiet;
	pthread_mutex_t lock;
	int64_t next;          /* the first case that nobody has taken */
	int64_t done, total;   /* cases; total 0: unknown */
	int64_t broken;        /* cases that could not be made, or whose reference failed */
	int64_t most_failures; /* how many are printed */
	int64_t printed;
	double begun, told;
	double reference_seconds; /* in references and oracle, over all cases */
	const char *only;         /* run cases whose line holds this text */
} check_run;

/* One case on every kernel of its operator. seed is the case's own. */
void check_case(check_run *run, const problem *p, uint64_t seed);
void check_attention(check_run *run, const problem *p, uint64_t seed);
void check_small_case(check_run *run, const problem *p, uint64_t seed);

/* Counts a failure and says it: the kernel, the case and how to run it again. kernel NULL: the case itself is broken. */
void check_fail(check_run *run, check_kernel *kernel, const problem *p, uint64_t seed, const char *format, ...)
	__attribute__((format(printf, 5, 6)));
void check_refused(check_run *run, check_kernel *kernel, const problem *p);
/* Adds the time since to a kernel's, or with NULL to the references'. */
void check_spent(check_run *run, check_kernel *kernel, double since);
/* The options of a reference's call: one thread of the library when cases share the processors. */
ingot_options check_reference(const check_run *run, const char *backend);
void check_passed(check_run *run, check_kernel *kernel, const problem *p, double ratio);

/* Memory for a workspace, with a guard band behind it and one of several fills in it: 0 zeros, 1 NaN, 2 1e30. */
void *check_workspace(uint64_t bytes, int fill);
bool check_workspace_intact(const void *workspace, uint64_t bytes);

/* Number of generated cases of a level, and the index'th (check_generate.c). Level 3 has no end. */
int64_t check_generated(int level);
void check_generate(int level, int64_t index, uint64_t seed, problem *p);

/* Lines of the text tiers tests/kernels/{smoke,level1,level2}.txt, made by the build; the first `level` + 1 tiers. */
typedef struct check_tier {
	const char *name;
	const char *const *lines;
	int count;
} check_tier;
extern const check_tier check_tiers[];
enum { CHECK_TIERS = 3 };

/* What needs more than a line: several calls compared with each other, words that count keys (check_cases.c). The index'th of
 * check_specials on every kernel of its operator. */
extern const int check_specials;
void check_special(check_run *run, int64_t index);

#endif
