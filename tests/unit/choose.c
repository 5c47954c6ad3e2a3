/*
 * The choosing stage: forcing by name, refusals with reasons, evidence before speed, the nearest measured shape, and a user's
 * own rows. The program writes such rows before its first call, because a process reads them once.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pipeline.h"

static ingot__problem problem;
static ingot__choice choice;
static const ingot__device *device;
static char rows_path[4096];

/* Fixed lengths, one type, no data: [b,h,sq,d] against [b,h,sk,d]. */
static void attention(ingot__operator op, int32_t dtype, int64_t b, int64_t h, int64_t sq, int64_t sk, int64_t d) {
	const ingot_tensor q = {NULL, dtype, 4, {b, h, sq, d}, {h * sq * d, sq * d, d, 1}};
	const ingot_tensor k = {NULL, dtype, 4, {b, h, sk, d}, {h * sk * d, sk * d, d, 1}};
	const ingot_tensor lse = {NULL, INGOT_F32, 3, {b, h, sq}, {h * sq, sq, 1}};
	const ingot_attn_fwd_params f = {.struct_size = sizeof f, .q = q, .k = k, .v = k, .out = q, .lse = lse};
	const ingot_attn_bwd_params g = {
		.struct_size = sizeof g, .q = q, .k = k, .v = k, .out = q, .lse = lse, .dout = q, .dq = q, .dk = k, .dv = k};
	const ingot_options o = {0};
	assert_int_equal(ingot__check(op, op == INGOT__ATTN_FWD ? (const void *)&f : &g, &o, false, &problem), INGOT_OK);
}

static ingot_status choose(const ingot__device *d, const char *backend, uint32_t flags) {
	const ingot_options o = {.struct_size = sizeof o, .flags = flags, .backend = backend};
	return ingot__choose(&problem, d, &o, &choice);
}

static const ingot__candidate *candidate(const ingot__impl *impl) {
	for (int i = 0; i < choice.candidates; i++)
		if (choice.candidate[i].impl == impl) return &choice.candidate[i];
	return NULL;
}

static void expect_sentence(const char *word) {
	if (!strstr(ingot_last_error(), word)) fail_msg("no \"%s\" in: %s", word, ingot_last_error());
}

static bool able(const ingot__impl *x, ingot__operator op, int64_t rows) {
	int variant;
	attention(op, INGOT_F32, 1, 4, rows, rows, 64);
	return ingot__device_runs(device, x->arch) && !x->refuse(&problem, device, &variant);
}

/* The first two of an operator, besides the reference, that run a plain f32 problem of few and of many rows; how many there
 * are. The problem is left at 16 rows. */
static int fast_ones(ingot__operator op, const ingot__impl *out[2]) {
	int count = 0;
	for (int i = 0; i < ingot__impl_count && count < 2; i++) {
		const ingot__impl *const x = ingot__impls[i];
		if (x->op == op && x->device == INGOT_CPU && x->rank >= 0 && !x->verified_by_definition && able(x, op, 4096) &&
		    able(x, op, 16))
			out[count++] = x;
	}
	attention(op, INGOT_F32, 1, 4, 16, 16, 64);
	return count;
}

/* ---- names --------------------------------------------------------------------------------------------------------------- */

static void test_forced(void **state) {
	attention(INGOT__ATTN_FWD, INGOT_F32, 1, 4, 16, 16, 64);
	static const char *const good[] = {"attn_fwd_reference", "reference/attn_fwd_reference", "reference"};
	for (int i = 0; i < 3; i++) {
		assert_int_equal(choose(device, good[i], 0), INGOT_OK);
		assert_string_equal(choice.impl->name, "attn_fwd_reference");
		assert_string_equal(choice.because, "forced");
		assert_int_equal(choice.candidates, 1); /* no fallback to look at */
	}
	/* forced by its own name, one that is never chosen otherwise */
	assert_int_equal(choose(device, "attn_fwd_reference_f64", 0), INGOT_OK);
	assert_string_equal(choice.impl->name, "attn_fwd_reference_f64");
	assert_int_equal(choose(device, NULL, 0), INGOT_OK);
	for (int i = 0; i < choice.candidates; i++)
		assert_string_not_equal(choice.candidate[i].impl->name, "attn_fwd_reference_f64");

	static const char *const wrong[] = {"no_such_kernel",
	                                    "attn_bwd_reference",
	                                    "reference/no_such",
	                                    "x86/attn_fwd_reference",
	                                    "/",
	                                    "reference/",
	                                    ":general",
	                                    "REFERENCE",
	                                    "attn_fwd",
	                                    "attn_fwd_reference:no_such_variant",
	                                    "reference:no_such_variant",
	                                    "attn_fwd_reference:",
	                                    " reference",
	                                    "reference ",
	                                    "%s%s%n"};
	for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
		if (choose(device, wrong[i], 0) != INGOT_NOT_FOUND) fail_msg("\"%s\" was found", wrong[i]);
		expect_sentence("options.backend");
		expect_sentence(wrong[i]);
		expect_sentence("reference/attn_fwd_reference"); /* what is allowed */
		assert_null(choice.impl);
	}
	char long_name[5000];
	memset(long_name, 'a', sizeof long_name - 1);
	for (size_t n = 40; n < sizeof long_name; n += 709) {
		long_name[n] = 0;
		assert_int_equal(choose(device, long_name, 0), INGOT_NOT_FOUND);
		expect_sentence("options.backend");
		long_name[n] = n % 2 ? '/' : ':';
	}
	assert_int_equal(choose(device, "", 0), INGOT_OK); /* as NULL */
	assert_string_not_equal(choice.because, "forced");
}

/* A variant that is there runs what it is chosen for, and is refused, not missed, for the rest. */
static void test_forced_variants(void **state) {
	int refused = 0;
	attention(INGOT__ATTN_BWD, INGOT_F32, 1, 4, 16, 16, 64);
	for (int i = 0; i < ingot__impl_count; i++) {
		const ingot__impl *const x = ingot__impls[i];
		int chosen;
		if (x->op != INGOT__ATTN_BWD || x->device != INGOT_CPU || !ingot__device_runs(device, x->arch) ||
		    x->refuse(&problem, device, &chosen))
			continue;
		for (int v = 0; v < x->variant_count; v++) {
			char name[128];
			snprintf(name, sizeof name, "%s:%s", x->name, ingot__variant_name(x, v));
			if (v == chosen) {
				assert_int_equal(choose(device, name, 0), INGOT_OK);
				assert_int_equal(choice.variant, v);
				continue;
			}
			assert_int_equal(choose(device, name, 0), INGOT_UNSUPPORTED);
			expect_sentence("variant");
			refused++;
		}
	}
	if (!refused) skip(); /* a machine whose kernels have one variant each */
}

/* Forced and unable: refused with its reason, though another could. */
static void test_no_fallback(void **state) {
	const ingot__device bare = {.type = INGOT_CPU, .arch = "x86_64", .threads = 1};
	int refused = 0;
	attention(INGOT__ATTN_FWD, INGOT_F32, 1, 4, 16, 16, 64);
	for (int i = 0; i < ingot__impl_count; i++) {
		const ingot__impl *const x = ingot__impls[i];
		if (x->op != INGOT__ATTN_FWD || x->device != INGOT_CPU || !*x->arch) continue;
		assert_int_equal(choose(&bare, x->name, 0), INGOT_UNSUPPORTED);
		expect_sentence("forced");
		expect_sentence("instructions");
		char full[128]; /* as it was given, family and variant too */
		snprintf(full, sizeof full, "%s/%s:%s", x->family, x->name, ingot__variant_name(x, 0));
		assert_int_equal(choose(&bare, full, 0), INGOT_UNSUPPORTED);
		expect_sentence(full);
		assert_null(choice.impl);
		refused++;
	}
	if (refused > 1) {
		assert_int_equal(choose(&bare, "x86", 0), INGOT_UNSUPPORTED);
		expect_sentence("candidates of the forced \"x86\"");
	}
	assert_int_equal(choose(&bare, NULL, 0), INGOT_OK);
	assert_string_equal(choice.impl->name, "attn_fwd_reference");
	assert_int_equal(choice.candidates, refused + 1);
	for (int i = 0; i < choice.candidates; i++)
		assert_true(choice.candidate[i].impl == choice.impl
		                ? !choice.candidate[i].refusal
		                : choice.candidate[i].refusal && strlen(choice.candidate[i].refusal) > 10);
}

/* ---- evidence and speed --------------------------------------------------------------------------------------------------- */

static void test_measured_fastest(void **state) {
	const ingot__impl *fast[2];
	if (fast_ones(INGOT__ATTN_FWD, fast) < 2) skip();
	attention(INGOT__ATTN_FWD, INGOT_F32, 1, 4, 16, 16, 64);
	assert_int_equal(choose(device, NULL, 0), INGOT_OK);
	assert_ptr_equal(choice.impl, fast[0]);
	assert_string_equal(choice.because, "measured fastest");
	assert_true(choice.verified);
	assert_int_equal(candidate(fast[0])->cases, 50);
	/* large, and unseen shapes near to it */
	static const int64_t shapes[][4] = {{1, 4, 4096, 4096}, {2, 3, 3000, 5000}, {1, 4, 6000, 2000}};
	for (int i = 0; i < 3; i++) {
		attention(INGOT__ATTN_FWD, INGOT_F32, shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], 64);
		assert_int_equal(choose(device, NULL, INGOT_STRICT), INGOT_OK);
		if (choice.impl != fast[1]) fail_msg("shape %d: %s runs", i, choice.impl->name);
		assert_true(candidate(fast[1])->row->microseconds == 100);
	}
	attention(INGOT__ATTN_FWD, INGOT_F32, 1, 4, 20, 12, 64);
	assert_int_equal(choose(device, NULL, 0), INGOT_OK);
	assert_ptr_equal(choice.impl, fast[0]);
}

/* The rows that are built in are of the sources that are built in; a GPU's cannot be renewed without that GPU. */
static void test_built_in_rows_of_processors_are_fresh(void **state) {
	for (int i = 0; i < ingot__row_count; i++) {
		const ingot__row *const r = &ingot__rows[i];
		if (!strncmp(r->arch, "sm_", 3)) continue;
		if (strcmp(r->digest, ingot__impl_digest(r->implementation)))
			fail_msg("row %d, %s on %s, is stale: docs/tuning.md tells how it is made again", i, r->implementation,
			         r->arch);
	}
}

/* Of an operator whose only rows are of another source text, nothing is verified but the reference: it runs, slow as it is. */
static void test_stale_rows_prove_nothing(void **state) {
	const ingot__impl *fast[2];
	if (fast_ones(INGOT__ATTN_BWD, fast) < 1) skip();
	if (!*ingot__impl_digest(fast[0]->name)) skip();
	assert_int_equal(choose(device, NULL, 0), INGOT_OK);
	assert_string_equal(choice.impl->name, "attn_bwd_reference");
	assert_true(candidate(fast[0])->stale);
	assert_false(candidate(fast[0])->verified);
	/* forced it runs, strict it does not, and says why */
	assert_int_equal(choose(device, fast[0]->name, 0), INGOT_OK);
	assert_int_equal(choose(device, fast[0]->name, INGOT_STRICT), INGOT_DEGRADED);
	expect_sentence("not verified");
	expect_sentence(fast[0]->name);
	/* the explanation says so as well */
	char text[8192];
	ingot__plan plan = {0};
	assert_int_equal(choose(device, NULL, 0), INGOT_OK);
	ingot__explain(&problem, device, &choice, &plan, 0, INGOT_TEXT, text, sizeof text, NULL);
	assert_non_null(strstr(text, "older source"));
	assert_non_null(strstr(text, "attn_bwd_reference"));
}

/* A measured choice may turn with the batch, unless a sequence's result must not. */
static void test_batch_invariant(void **state) {
	const ingot__impl *fast[2];
	if (fast_ones(INGOT__ATTN_FWD, fast) < 1) skip();
	for (int invariant = 0; invariant < 2; invariant++)
		for (int64_t batch = 1; batch <= 16; batch += 15) {
			attention(INGOT__ATTN_FWD, INGOT_F32, batch, 4, 16, 16, 64);
			problem.batch_invariant = invariant;
			assert_int_equal(choose(device, NULL, invariant ? INGOT_BATCH_INVARIANT : 0), INGOT_OK);
			assert_string_equal(choice.impl->name, batch > 1 && !invariant ? "attn_fwd_reference" : fast[0]->name);
		}
}

typedef struct meeting {
	ingot__operator op;
	int32_t dtype;
	int64_t batch, seqlen;
	const ingot__row *row[INGOT__CANDIDATES];
} meeting;

static void *meet(void *argument) {
	meeting *const m = argument;
	attention(m->op, m->dtype, m->batch, 4, m->seqlen, m->seqlen, 64);
	memset(m->row, 0, sizeof m->row);
	if (choose(device, NULL, 0) == INGOT_OK)
		for (int i = 0; i < choice.candidates; i++) m->row[i] = choice.candidate[i].row;
	return NULL;
}

/* A thread remembers the rows of the buckets it met last. More than it remembers, in turns, find what a new thread finds. */
static void test_rows_that_a_thread_has_met(void **state) {
	static const int32_t types[] = {INGOT_F32, INGOT_F16, INGOT_BF16};
	int changes = 0;
	const ingot__row *before = NULL;
	for (int round = 0; round < 2; round++)
		for (int64_t seqlen = 1; seqlen <= 8192; seqlen *= 2)
			for (int n = 0; n < 12; n++) {
				meeting m = {n % 2 ? INGOT__ATTN_FWD : INGOT__ATTN_BWD, types[n / 2 % 3], n < 6 ? 1 : 16, seqlen, {0}},
						fresh = m;
				meet(&m);
				pthread_t thread;
				assert_int_equal(pthread_create(&thread, NULL, meet, &fresh), 0);
				assert_int_equal(pthread_join(thread, NULL), 0);
				assert_memory_equal(m.row, fresh.row, sizeof m.row);
				changes += m.row[0] != before;
				before = m.row[0];
			}
	const ingot__impl *fast[2];
	if (fast_ones(INGOT__ATTN_FWD, fast)) assert_true(changes > 2);
}

/* Rows are of the architecture they were measured on: they say nothing about its parent. */
static void test_rows_of_a_child(void **state) {
	const ingot__impl *fast[2];
	if (fast_ones(INGOT__ATTN_FWD, fast) < 2) skip();
	ingot__device other = *device;
	snprintf(other.arch, sizeof other.arch, "test_parent");
	other.model[0] = 0;
	assert_int_equal(choose(&other, NULL, 0), INGOT_OK);
	assert_int_equal(candidate(fast[0])->cases, 0);
	assert_null(candidate(fast[0])->row);
	assert_string_equal(choice.impl->name, "attn_fwd_reference");
}

static void test_every_candidate_is_answered(void **state) {
	static const ingot__operator ops[] = {INGOT__ATTN_FWD, INGOT__ATTN_BWD};
	static const int32_t types[] = {INGOT_F32, INGOT_F16, INGOT_BF16};
	for (int o = 0; o < 2; o++)
		for (int t = 0; t < 3; t++)
			for (int64_t sq = 0; sq < 300; sq = sq * 2 + 1) {
				attention(ops[o], types[t], 1, 4, sq, 200, 72);
				assert_int_equal(choose(device, NULL, 0), INGOT_OK);
				assert_true(choice.candidates > 0);
				assert_null(candidate(choice.impl)->refusal);
				for (int i = 0; i < choice.candidates; i++) {
					const ingot__candidate *const x = &choice.candidate[i];
					assert_int_equal(x->impl->op, ops[o]);
					if (x->refusal) assert_true(strlen(x->refusal) > 10);
					else if (x->verified) assert_true(choice.verified);
				}
			}
}

/* ---- a user's file --------------------------------------------------------------------------------------------------------- */

static void add_row(FILE *f, const char *op, const ingot__impl *impl, const char *bucket, double us,
                    const char *digest) {
	fprintf(f, "%s\t%s\t%s\t%s\t%s\t%g\t0.5\t50\t%s\there\t2026-01-01\n", op, device->arch, bucket, impl->name,
	        ingot__variant_name(impl, 0), us, digest);
}

static void write_rows(void) {
	const ingot__impl *fast[2];
	FILE *const f = fopen(rows_path, "w");
	if (!f) abort();
	fprintf(f, "# rows of a test\n");
	const int count = fast_ones(INGOT__ATTN_FWD, fast);
	if (count) { /* of the largest batch the reference is told to be the fastest */
		add_row(f, "attn_fwd", fast[0], "f32,d64,dv64,q16,k16,bh4,full,plain", 10, ingot__impl_digest(fast[0]->name));
		add_row(f, "attn_fwd", fast[0], "f32,d64,dv64,q16,k16,bh64,full,plain", 30, ingot__impl_digest(fast[0]->name));
		fprintf(
			f,
			"attn_fwd\t%s\tf32,d64,dv64,q16,k16,bh64,full,plain\tattn_fwd_reference\tgeneral\t20\t0.5\t50\t%s\there\t2026-01-01\n",
			device->arch, ingot__impl_digest("attn_fwd_reference"));
	}
	if (count == 2)
		for (int i = 0; i < 2; i++) {
			add_row(f, "attn_fwd", fast[i], "f32,d64,dv64,q16,k16,bh4,full,plain", i ? 20 : 10,
			        ingot__impl_digest(fast[i]->name));
			add_row(f, "attn_fwd", fast[i], "f32,d64,dv64,q4096,k4096,bh4,full,plain", i ? 100 : 200,
			        ingot__impl_digest(fast[i]->name));
		}
	if (fast_ones(INGOT__ATTN_BWD, fast) >= 1)
		add_row(f, "attn_bwd", fast[0], "f32,d64,dv64,q16,k16,bh4,full,plain", 1, "0123456789abcdef");
	if (fclose(f)) abort();
}

/* This program again, with other rows; what it writes to stderr comes back. */
static int run_self(const char *path, char *text, size_t capacity) {
	int end[2];
	assert_int_equal(pipe(end), 0);
	fflush(NULL);
	const pid_t pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		dup2(end[1], STDERR_FILENO);
		close(end[0]), close(end[1]);
		setenv("INGOT_TUNING_PATH", path, 1);
		setenv("INGOT_LOG", "1", 1);
		execl("/proc/self/exe", "choose", "digest", (char *)NULL);
		_exit(127);
	}
	close(end[1]);
	size_t have = 0;
	for (ssize_t n; have + 1 < capacity && (n = read(end[0], text + have, capacity - 1 - have)) > 0;) have += (size_t)n;
	text[have] = 0;
	close(end[0]);
	int status = 0;
	assert_int_equal(waitpid(pid, &status, 0), pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static int print_digest(void) {
	const ingot_stream cpu = {0};
	uint64_t digest, again;
	if (ingot_selection_digest(cpu, &digest) || ingot_selection_digest(cpu, &again) || digest != again) return 1;
	fprintf(stderr, "%016llx\n", (unsigned long long)digest);
	return 0;
}

/* A file that cannot be read whole is left out whole, with its name, line and fault in the log; the digest tells. */
static void test_damaged_files(void **state) {
	char plain[8192], good[8192], text[8192], path[4096 + 8];
	assert_int_equal(run_self("", plain, sizeof plain), 0);
	assert_int_equal(run_self(rows_path, good, sizeof good), 0);
	assert_int_equal(strlen(plain), 17);
	assert_int_equal(strlen(good), 17);
	assert_string_not_equal(plain, good); /* ranks with and without the file would choose differently */
	static const char *const bad[] = {
		"attn_fwd\n",
		"attn_fwd\tavx2\tnonsense\tattn_fwd_avx2\tplain\t1\t1\t1\tx\ty\tz\n",
		"attn_fwd\tavx2\tf32,d64,dv64,q16,k16,bh4,full,plain\tattn_fwd_avx2\tplain\tfast\t1\t1\tx\ty\tz\n",
		"attn_fwd\tavx2\tf32,d64,dv64,q16,k16,bh4,full,plain\tattn_fwd_avx2\tplain\tnan\t1\t1\tx\ty\tz\n",
		"attn_fwd\tavx2\tf32,d64,dv64,q16,k16,bh4,full,plain\tattn_fwd_avx2\tplain\t-1\t1\t1\tx\ty\tz\n",
		"attn_fwd\tavx2\tf32,d64,dv64,q16,k16,bh4,full,plain\tattn_fwd_avx2\tplain\t1\t1\t-1\tx\ty\tz\n",
		"attn_fwd\tavx2\tf32,d64,dv64,q16,k16,bh4,full,plain\tattn_fwd_avx2\tplain\t1\t1\t1\tx\ty\tz\tmore\n",
		"\x80\xff\x01",
	};
	snprintf(path, sizeof path, "%s-bad", rows_path);
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		FILE *const f = fopen(path, "w");
		assert_non_null(f);
		fprintf(f, "# remark\n\n%s", bad[i]);
		fclose(f);
		assert_int_equal(run_self(path, text, sizeof text), 0);
		if (!strstr(text, path) || !strstr(text, "line 3") || !strstr(text, plain))
			fail_msg("row %d: name, line 3 and %s expected in: %s", (int)i, plain, text);
	}
	unlink(path);
	assert_int_equal(run_self(path, text, sizeof text), 0); /* is not there */
	assert_non_null(strstr(text, path));
	assert_non_null(strstr(text, plain));
	assert_int_equal(run_self("/", text, sizeof text), 0); /* a folder */
	assert_non_null(strstr(text, plain));
}

int main(int argc, char **argv) {
	if (argc == 2 && strcmp(argv[1], "digest") == 0) return print_digest();
	const ingot_stream cpu = {0};
	const char *const folder = getenv("TMPDIR");
	snprintf(rows_path, sizeof rows_path, "%s/ingot-rows-XXXXXX", folder && *folder ? folder : "/tmp");
	const int file = mkstemp(rows_path);
	if (file < 0 || ingot__device_get(cpu, &device) != INGOT_OK) return 1;
	/* an architecture of this test's own: the library's rows are of other ones and come and go */
	static ingot__device own;
	own = *device;
	snprintf(own.arch, sizeof own.arch, "test_child");
	snprintf(own.model, sizeof own.model, "test_model");
	device = &own;
	close(file);
	write_rows();
	setenv("INGOT_TUNING_PATH", rows_path, 1);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_forced),
		cmocka_unit_test(test_forced_variants),
		cmocka_unit_test(test_no_fallback),
		cmocka_unit_test(test_measured_fastest),
		cmocka_unit_test(test_built_in_rows_of_processors_are_fresh),
		cmocka_unit_test(test_stale_rows_prove_nothing),
		cmocka_unit_test(test_batch_invariant),
		cmocka_unit_test(test_rows_that_a_thread_has_met),
		cmocka_unit_test(test_rows_of_a_child),
		cmocka_unit_test(test_every_candidate_is_answered),
		cmocka_unit_test(test_damaged_files),
	};
	const int failed = cmocka_run_group_tests(tests, NULL, NULL);
	unlink(rows_path);
	return failed;
}
