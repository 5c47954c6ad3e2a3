/* The parts that `ingot check` stands on: problem lines, values of the storage types, the rule, the oracle, tuning rows. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "case.h"
#include "check.h"
#include "kernels/cpu.h"
#include "rows.h"
#include "rule.h"
#include "scratch.h"
#include "support/tuning.h"

/* Printing and reading again gives the same problem, for every line of the tiers and many generated ones. */
static void test_lines_round_trip(void **state) {
	problem p, q;
	char line[PROBLEM_TEXT], again[PROBLEM_TEXT], error[256];
	for (int t = 0; t < CHECK_TIERS; t++)
		for (int i = 0; i < check_tiers[t].count; i++) {
			if (!problem_parse(check_tiers[t].lines[i], &p, error, sizeof error))
				fail_msg("%s: %s", check_tiers[t].lines[i], error);
			problem_print(&p, line, sizeof line);
			if (!problem_parse(line, &q, error, sizeof error)) fail_msg("%s: %s", line, error);
			problem_print(&q, again, sizeof again);
			assert_string_equal(line, again);
			if (p.op != TOOL_APPEND && p.op != TOOL_MASK && p.op != TOOL_MERGE) assert_memory_equal(&p, &q, sizeof p);
		}
	for (int64_t i = 0; i < 5000; i++) {
		check_generate(i % 2 ? 2 : 3, i, tool_hash(1, 2, (uint64_t)i), &p);
		problem_print(&p, line, sizeof line);
		if (!problem_parse(line, &q, error, sizeof error)) fail_msg("%s: %s", line, error);
		if (memcmp(&p, &q, sizeof p) != 0) {
			problem_print(&q, again, sizeof again);
			fail_msg("%s comes back as %s", line, again);
		}
	}
}

/* Every line of the suites of `ingot bench` is a name and a problem, and no two are alike. */
static void test_suites_can_be_read(void **state) {
	const bench_lines *const suites[] = {&bench_suite_cpu, &bench_suite_cuda};
	for (int s = 0; s < 2; s++) {
		assert_true(suites[s]->count > 100);
		for (int i = 0; i < suites[s]->count; i++) {
			char name[64], line[PROBLEM_TEXT], error[256];
			problem p;
			assert_int_equal(sscanf(suites[s]->lines[i], "%63s %1023s", name, line), 2);
			if (!problem_parse(line, &p, error, sizeof error)) fail_msg("%s: %s", line, error);
			for (int j = 0; j < i; j++) assert_string_not_equal(suites[s]->lines[j], suites[s]->lines[i]);
		}
	}
}

/* Every type that a problem can have is read back from the rows that were written. */
static void test_buckets_can_be_read(void **state) {
	for (uint8_t dtype = INGOT_F32; dtype <= INGOT_BOOL; dtype++) {
		const ingot__bucket b = {.dtype = dtype, .kv_dtype = dtype, .d = 64, .dv = 128, .q = -1, .k = 13, .bh = 5};
		ingot__bucket again;
		char text[128];
		ingot__bucket_text(&b, text, sizeof text);
		if (!ingot__bucket_parse(text, &again)) fail_msg("%s cannot be read", text);
		assert_memory_equal(&b, &again, sizeof b);
	}
}

static void test_bad_lines_are_named(void **state) {
	static const struct {
		const char *line, *named;
	} bad[] = {{"", "no problem"},
	           {"sdpa:b1", "sdpa"},
	           {"fwd:b1,frobnicate", "frobnicate"},
	           {"fwd:b-1", "b-1"},
	           {"fwd:window=3", "window"},
	           {"fwd:bias=f31", "bias=f31"},
	           {"fwd:b2,ql=3", "ql"},
	           {"fwd:", "no words"},
	           {"fwd: ,", "no words"},
	           {"fwd:b1,parts=4", "parts=4"},
	           {"fwd:b1,do0", "do0"},
	           {"bwd:b1,paged=16", "paged=16"},
	           {"merge:b1,causal", "causal"},
	           {"merge:b1,paged=16", "paged=16"},
	           {"append:b1,window=3:0", "window=3:0"},
	           {"mask:b1,kv=bf16", "kv=bf16"},
	           {"fwd:b2,ql=3/5", "ql"},
	           {"fwd:b2,hnd", "hnd"},
	           {"fwd:b2,share", "share"},
	           {"fwd:b2,bias0", "bias0"},
	           {"bwd:b2,cells", "cells"},
	           {"fwd:b1,sk64,kl=99", "kl"},
	           {"fwd:b2,qside=cu,kl=3/5", "kl"},
	           {"fwd:b1,causal,window=3:0", "window=3:0"},
	           {"fwd:b1,window=3:0,causal", "causal"},
	           {"fwd:b99999999999999999999", "from 0"}};
	problem p;
	char error[256];
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		assert_false(problem_parse(bad[i].line, &p, error, sizeof error));
		if (!strstr(error, bad[i].named)) fail_msg("%s: \"%s\" does not name \"%s\"", bad[i].line, error, bad[i].named);
	}
}

/* The command's conversions and the library's were written apart: they must agree on every code and every rounding. */
static void test_values_agree_with_the_library(void **state) {
	for (int32_t dtype = INGOT_F16; dtype <= INGOT_F8_E5M2_FNUZ; dtype++) {
		const int codes = tool_dtype_size(dtype) == 1 ? 256 : 65536;
		for (int code = 0; code < codes; code++) {
			const uint16_t cell = (uint16_t)code;
			const float a = tool_load(&cell, 0, dtype), b = ingot__load(&cell, 0, dtype);
			/* signbit of a negative number is any value but 0, and not the same one wherever it is compiled. */
			if (!(a == b || (isnan(a) && isnan(b))) || !signbit(a) != !signbit(b))
				fail_msg("%s code 0x%x: %g and %g", tool_dtype_name(dtype), code, (double)a, (double)b);
			/* zeros of both signs are among them, which no random number meets */
			uint32_t again = 0;
			tool_store(&again, 0, dtype, a);
			if (again != cell && isfinite(a))
				fail_msg("%s code 0x%x: stored again 0x%x", tool_dtype_name(dtype), code, again);
		}
		for (uint64_t i = 0; i < 400000; i++) {
			uint32_t bits = (uint32_t)tool_hash(5, (uint64_t)dtype, i);
			if (i % 2) bits = (bits & 0x807fffffu) | (0x70u + (bits >> 23) % 0x1f) << 23; /* near 1 */
			float x;
			memcpy(&x, &bits, 4);
			uint32_t a = 0, b = 0;
			tool_store(&a, 0, dtype, x);
			ingot__store(&b, 0, dtype, x);
			if (a != b && !(isnan(x) && isnan(tool_load(&a, 0, dtype)) && isnan(tool_load(&b, 0, dtype))))
				fail_msg("%s of %.9g: 0x%x and 0x%x", tool_dtype_name(dtype), (double)x, a, b);
		}
	}
}

static void test_ulp(void **state) {
	assert_true(tool_ulp(INGOT_BF16, 1.0) == 0x1p-7);
	assert_true(tool_ulp(INGOT_BF16, 1.99) == 0x1p-7);
	assert_true(tool_ulp(INGOT_BF16, 2.0) == 0x1p-6);
	assert_true(tool_ulp(INGOT_F16, 0) == 0x1p-24);
	assert_true(tool_ulp(INGOT_F16, 65504) == 32);
	assert_true(tool_ulp(INGOT_F32, 1) == 0x1p-23);
}

static void test_the_rule(void **state) {
	const double want[4] = {1, -2, 0.5, 0}, good[4] = {1, -2, 0.5, 1e-6}, yardstick[4] = {1, -2, 0.5, 0};
	assert_true(rule_apply(RULE_VALUE, good, want, yardstick, 4, INGOT_F32, -1).pass);
	const double far[4] = {1, -2, 0.5, 3e-6};
	const rule_result r = rule_apply(RULE_VALUE, far, want, yardstick, 4, INGOT_F32, -1);
	assert_false(r.pass);
	assert_int_equal(r.index, 3);
	/* the yardstick's error widens it */
	const double loose[4] = {1 + 1e-6, -2, 0.5, 0};
	assert_true(rule_apply(RULE_VALUE, far, want, loose, 4, INGOT_F32, -1).pass);
	/* NaN where the reference has none, and none where it has one */
	const double nan_got[4] = {1, -2, (double)NAN, 0};
	assert_false(rule_apply(RULE_VALUE, nan_got, want, yardstick, 4, INGOT_F32, -1).pass);
	assert_false(rule_apply(RULE_VALUE, want, nan_got, nan_got, 4, INGOT_F32, -1).pass);
	assert_true(rule_apply(RULE_VALUE, nan_got, nan_got, nan_got, 4, INGOT_F32, -1).pass);
	/* many small errors fail by their norm though none fails alone */
	enum { N = 1000 };
	static double zero[N], slight[N], rare[N];
	for (int i = 0; i < N; i++) slight[i] = 2.5e-6;
	rare[0] = 1e-6;
	assert_false(rule_apply(RULE_VALUE, slight, zero, rare, N, INGOT_F32, -1).pass);
	/* overflow of fp16 is Inf, and nothing else is */
	const double large[1] = {70000}, infinite[1] = {(double)INFINITY}, most[1] = {65504};
	assert_true(rule_apply(RULE_VALUE, infinite, large, infinite, 1, INGOT_F16, -1).pass);
	assert_false(rule_apply(RULE_VALUE, most, large, infinite, 1, INGOT_F16, -1).pass);
	assert_false(rule_apply(RULE_VALUE, infinite, most, most, 1, INGOT_F16, -1).pass);
	/* lse: an infinity must be the reference's own */
	const double none[1] = {-(double)INFINITY}, some[1] = {-80};
	assert_true(rule_apply(RULE_LSE, none, none, none, 1, INGOT_F32, -1).pass);
	assert_false(rule_apply(RULE_LSE, some, none, none, 1, INGOT_F32, -1).pass);
}

/* Two rows, two keys, by hand; a row without keys; the known answer of the generator. */
static void test_the_oracle(void **state) {
	const float q[2] = {1, 2}, k[2] = {1, -1}, v[2] = {3, 5}, dout[2] = {1, 1};
	const int64_t two = 2;
	oracle o = {.batch = 1,
	            .heads_q = 1,
	            .heads_k = 1,
	            .max_q = 2,
	            .max_k = 2,
	            .d = 1,
	            .dv = 1,
	            .len_q = &two,
	            .len_k = &two,
	            .q = q,
	            .k = k,
	            .v = v,
	            .scale = 1,
	            .left = INT32_MAX,
	            .right = -1,
	            .dout = dout};
	oracle_run(&o);
	/* right = -1: row 0 sees nothing, row 1 sees key 0 alone */
	assert_true(o.out[0] == 0 && isinf(o.lse[0]) && o.lse[0] < 0 && o.dq[0] == 0);
	assert_true(o.out[1] == 3 && fabs(o.lse[1] - 2) < 1e-12 && o.dv_out[0] == 1 && o.dv_out[1] == 0);
	oracle_release(&o);
	o.right = INT32_MAX;
	oracle_run(&o);
	const double p = 1 / (1 + exp(-4.0));
	assert_true(fabs(o.out[1] - (3 * p + 5 * (1 - p))) < 1e-12);
	assert_true(fabs(o.dq[1] - (-4 * p * (1 - p))) < 1e-12);
	oracle_release(&o);
	/* Random123's known answer: counter and key all ones */
	uint32_t word[4];
	oracle_philox(~0ull, ~0ull, ~0ull, word);
	assert_int_equal(word[0], 0x408f276d);
	assert_int_equal(word[1], 0x41c83b0e);
	assert_int_equal(word[2], 0xa20bc7c6);
	assert_int_equal(word[3], 0x6d5451fd);
}

/* The textbook on matrix units of 8 bits: what it leaves of a product's terms and of a row's weights, by hand. */
static void test_the_textbook_in_8_bits(void **state) {
	/* the scores are 16 + 2^-10, 16 + 2^-9 and 15 */
	const float q[2] = {16, 1}, k[6] = {1, 0x1p-10f, 1, 0x1p-9f, 15.0f / 16, 0}, v[3] = {0, 0, 1};
	const int64_t one = 1, three = 3;
	oracle o = {.batch = 1,
	            .heads_q = 1,
	            .heads_k = 1,
	            .max_q = 1,
	            .max_k = 3,
	            .d = 2,
	            .dv = 1,
	            .len_q = &one,
	            .len_k = &three,
	            .q = q,
	            .k = k,
	            .v = v,
	            .scale = 1,
	            .left = INT32_MAX,
	            .right = INT32_MAX,
	            .eight_bit = true};
	oracle_run(&o);
	/* beside 16 = 2^4 the last bit that is kept is 2^(4 - 13) */
	const double first = 16, second = 16 + 0x1p-9, total = exp(first) + exp(second) + exp(15.0);
	assert_true(fabs(o.lse[0] - log(total)) < 1e-12);
	/* exp(15 - second) * 256 = 93.99: e4m3 has 88 and 96 */
	assert_true(fabs(o.out[0] - exp(second) / total * 96 / 256) < 1e-12);
	oracle_release(&o);
	o.eight_bit = false;
	oracle_run(&o);
	assert_true(fabs(o.lse[0] - log(exp(16 + 0x1p-10) + exp(second) + exp(15.0))) < 1e-12);
	oracle_release(&o);
	/* 1.5 * 1.5 is 2.25, but its exponent the sum of 0 and 0, so 2^-13 stays beside it, while as a sum 2.25 + 2^-13 does not */
	const float factors[3] = {1.5f, 0x1p-6f, 1}, keys[6] = {1.5f, 0x1p-7f, -1.5f, 1.5f, 0x1p-7f, 0};
	const int64_t two = 2;
	o.q = factors, o.k = keys, o.d = 3, o.len_k = &two, o.max_k = 2, o.eight_bit = true;
	oracle_run(&o);
	assert_true(fabs(o.lse[0] - log(exp(0.75 + 0x1p-13) + exp(2.25))) < 1e-12);
	oracle_release(&o);
}

/* The rates of ingot bench count what its call does: pairs and keys of the lengths, which are full where none are given. */
static void test_work_is_of_the_lengths(void **state) {
	static const char *const lines[] = {"fwd:b2,h8,s512,d64,varlen=cu,ql=256/256,kl=256/256",
	                                    "fwd:b3,h2,s65,d64,varlen=cu",
	                                    "fwd:b3,h2,s65,d64,causal,varlen=lengths,ql=3/0/65,kl=65/9/2",
	                                    "fwd:b2,h2,sq7,sk9,d16,window=3:1,tl,kside=cu,kl=9/4",
	                                    "fwd:b2,h2,s33,d16,window=inf:2,qside=gaps,ql=-1/99",
	                                    "fwd:b1,hq32,hk8,sq1,sk8192,d128,bf16,paged=16",
	                                    "fwd:b2,hq4,hk2,sq3,sk100,d64,bf16,causal,paged=16,kl=112/17",
	                                    "fwd:b2,h2,sq1,sk100,d64,csrlast=16,kl=100/3",
	                                    "bwd:b2,h2,s20,d16,dv8,causal,varlen=padded,ql=20/3,kl=5/20"};
	for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
		problem p;
		test_case c;
		char error[256];
		if (!problem_parse(lines[i], &p, error, sizeof error) ||
		    !case_build(&c, &p, 1, CASE_SPEED, error, sizeof error))
			fail_msg("%s: %s", lines[i], error);
		const double pairs = oracle_pairs(&c.truth);
		int64_t keys = 0;
		for (int64_t b = 0; b < p.batch; b++) keys += c.len_k[b];
		if (problem_pairs(&p) != pairs) fail_msg("%s: %g pairs, not %g", lines[i], pairs, problem_pairs(&p));
		const double bytes = (double)(keys * p.heads_k * (p.d + p.dv) * tool_dtype_size((int32_t)p.kv_dtype));
		if (problem_kv_bytes(&p) != bytes) fail_msg("%s: %g bytes, not %g", lines[i], bytes, problem_kv_bytes(&p));
		case_release(&c);
	}
	/* full: nothing given is as if the longest were */
	problem p, q;
	char error[256];
	assert_true(problem_parse("fwd:b2,h2,s64,d16,causal,varlen=cu", &p, error, sizeof error));
	assert_true(problem_parse("fwd:b2,h2,s64,d16,causal,varlen=cu,ql=64/64,kl=64/64", &q, error, sizeof error));
	assert_true(problem_flops(&p) == problem_flops(&q));
	assert_true(problem_parse("append:b2,hk2,s8,sk64,d16,varlen=cu", &p, error, sizeof error));
	assert_true(problem_parse("append:b2,hk2,s8,sk64,d16,varlen=cu,ql=8/0", &q, error, sizeof error));
	assert_true(problem_moved_bytes(&p) == 2 * problem_moved_bytes(&q));
}

static void test_rows(void **state) {
	static const char path[] = "rows.tsv";
	char error[256];
	row a = {.op = "attn_fwd",
	         .arch = "avx2",
	         .bucket = "f32",
	         .implementation = "attn_fwd_avx2",
	         .variant = "general",
	         .microseconds = 10,
	         .digest = "d1",
	         .device = "m",
	         .date = "2026-01-01"};
	assert_true(rows_merge(path, &a, 1, error, sizeof error));
	assert_true(rows_verify(path, "attn_fwd_avx2", "d1", 42, 0.5, error, sizeof error));
	assert_true(rows_verify(path, "attn_fwd_avx2", "d0", 7, 0.9, error, sizeof error)); /* another source's check */
	a.microseconds = 9;
	assert_true(rows_merge(path, &a, 1, error, sizeof error)); /* the same source keeps its evidence */
	row b = a;
	strcpy(b.bucket, "bf16");
	assert_true(rows_merge(path, &b, 1, error, sizeof error)); /* another size of it shares it */
	char text[2048] = "";
	FILE *f = fopen(path, "r");
	const size_t n = fread(text, 1, sizeof text - 1, f);
	text[n] = 0;
	fclose(f);
	assert_non_null(strstr(text, "attn_fwd\tavx2\tbf16\tattn_fwd_avx2\tgeneral\t9.0\t0.500\t42\td1"));
	assert_non_null(strstr(text, "attn_fwd\tavx2\tf32\tattn_fwd_avx2\tgeneral\t9.0\t0.500\t42\td1"));
	strcpy(a.digest, "d2");
	assert_true(rows_merge(path, &a, 1, error, sizeof error)); /* a changed source has none */
	f = fopen(path, "r");
	text[fread(text, 1, sizeof text - 1, f)] = 0;
	fclose(f);
	assert_non_null(strstr(text, "f32\tattn_fwd_avx2\tgeneral\t9.0\t0.000\t0\td2"));
	/* one file, one architecture; nothing but rows; missing only where it may be made */
	assert_true(rows_check(path, "avx2", true, error, sizeof error));
	assert_false(rows_check(path, "avx512", false, error, sizeof error));
	assert_non_null(strstr(error, "rows of avx2"));
	assert_false(rows_check(INGOT_SOURCE_DIR "/README.md", "avx2", false, error, sizeof error));
	assert_false(rows_check(".", "avx2", false, error, sizeof error));
	/* what cannot be read is not written back as something else */
	static const char *const wrong[] = {"fast\t0.5\t42", "9.0us\t0.5\t42", "9.0\t\t42", "9.0\t0.5\tmany"};
	for (int i = 0; i < 4; i++) {
		char line[256], kept[256] = "";
		snprintf(line, sizeof line, "attn_fwd\tavx2\tf32\tattn_fwd_avx2\tgeneral\t%s\td1\tm\t2026-01-01\n", wrong[i]);
		f = fopen(path, "w");
		assert_true(f && fputs(line, f) >= 0 && fclose(f) == 0);
		if (rows_merge(path, &a, 1, error, sizeof error)) fail_msg("%s was read", line);
		assert_non_null(strstr(error, "line 1"));
		f = fopen(path, "r");
		assert_true(f && fgets(kept, sizeof kept, f));
		fclose(f);
		assert_string_equal(kept, line);
	}
	unlink(path);
	assert_true(rows_check(path, "avx2", false, error, sizeof error));
	assert_false(rows_check(path, "avx2", true, error, sizeof error));
	assert_int_equal(access(path, F_OK), -1);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_lines_round_trip),
		cmocka_unit_test(test_suites_can_be_read),
		cmocka_unit_test(test_buckets_can_be_read),
		cmocka_unit_test(test_bad_lines_are_named),
		cmocka_unit_test(test_values_agree_with_the_library),
		cmocka_unit_test(test_ulp),
		cmocka_unit_test(test_the_rule),
		cmocka_unit_test(test_the_oracle),
		cmocka_unit_test(test_the_textbook_in_8_bits),
		cmocka_unit_test(test_work_is_of_the_lengths),
		cmocka_unit_test(test_rows),
	};
	return cmocka_run_group_tests(tests, scratch_begin, scratch_end);
}
