/* The command's answers as a shell sees them: its exit statuses. What it prints is for people; what it computes is tested
 * where it is computed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "safetensors.h"
#include "tool.h"

/* The status of "ingot <line>"; blanks separate words. */
static int ingot(const char *line) {
	char text[512], *argv[16] = {(char *)"ingot"};
	int argc = 1;
	snprintf(text, sizeof text, "%s", line);
	for (char *save, *word = strtok_r(text, " ", &save); word; word = strtok_r(NULL, " ", &save)) argv[argc++] = word;
	return tool_main(argc, argv);
}

static void test_wrong_use_is_2(void **state) {
	static const char *const wrong[] = {
		"",
		"frobnicate",
		"attn",
		"attn --frobnicate",
		"attn --mask",
		"attn --threads x file",
		"attn a b",
		"explain",
		"explain fwd:frobnicate",
		"explain fwd:hq3,hk2",
		"list --json=1",
		"check --level 4",
		"check --level -1",
		"check --seed -1",
		"check --backend no_such_kernel",
		"bench --threads 0",
		"bench --problem merge:frobnicate",
		"bench --from 0",
		"bench --device gpu",
		"check --jobs 0",
		"check --device cuda:x",
		"bench --suite a --problem fwd:b1",
	};
	for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
		if (ingot(wrong[i]) != TOOL_USAGE) fail_msg("ingot %s: not status 2", wrong[i]);
}

static void test_help_is_0(void **state) {
	static const char *const good[] = {"--help",
	                                   "--version",
	                                   "attn --help",
	                                   "explain --help",
	                                   "list --help",
	                                   "check --help",
	                                   "bench --help",
	                                   "list",
	                                   "list --json",
	                                   "explain fwd:b1,h2,s8,d64,bf16,causal",
	                                   "explain bwd:b2,h2,s8,d64,f32,varlen=cu --json",
	                                   "explain append:b2,hk2,s1,sk64,d64,bf16,paged=16",
	                                   "explain merge:b1,h2,s8,d64,parts=3",
	                                   "explain mask:b1,h2,s8,dropout=0.1"};
	for (size_t i = 0; i < sizeof good / sizeof *good; i++)
		if (ingot(good[i]) != TOOL_OK) fail_msg("ingot %s: not status 0", good[i]);
}

static void test_nothing_run_is_inconclusive(void **state) {
	assert_int_equal(ingot("check --only no_line_holds_this"), TOOL_INCONCLUSIVE);
	assert_int_equal(ingot("check --problem fwd:b1,h1,s9,d16,f32 --seed 3"), TOOL_OK);
}

/* attn passes on the textbook's own result, and fails where the file expects another. */
static void test_attn_compares(void **state) {
	enum { ROWS = 6, D = 4, N = 2 * ROWS * D };
	float q[N], k[N], v[N], out[N];
	for (int i = 0; i < N; i++) {
		q[i] = tool_normal(1, 1, (uint64_t)i);
		k[i] = tool_normal(1, 2, (uint64_t)i);
		v[i] = tool_normal(1, 3, (uint64_t)i);
	}
	const int64_t shape[] = {1, 2, ROWS, D};
	const ingot_attn_fwd_params p = {.struct_size = sizeof p,
	                                 .q = tool_tensor(q, INGOT_F32, 4, shape),
	                                 .k = tool_tensor(k, INGOT_F32, 4, shape),
	                                 .v = tool_tensor(v, INGOT_F32, 4, shape),
	                                 .out = tool_tensor(out, INGOT_F32, 4, shape),
	                                 .mask = INGOT_MASK_CAUSAL};
	assert_int_equal(ingot_attn_fwd(&p, (ingot_stream){0}, NULL), INGOT_OK);
	safetensors_entry entries[4] = {{.name = "l.q", .data = q},
	                                {.name = "l.k", .data = k},
	                                {.name = "l.v", .data = v},
	                                {.name = "l.out", .data = out}};
	for (int i = 0; i < 4; i++) {
		entries[i].dtype = "F32";
		entries[i].ndim = 4;
		memcpy(entries[i].shape, shape, sizeof shape);
		entries[i].bytes = sizeof q;
	}
	char path[] = "attn-XXXXXX", line[128], error[SAFETENSORS_ERROR];
	close(mkstemp(path));
	assert_true(safetensors_write(path, entries, 4, NULL, error));
	snprintf(line, sizeof line, "attn %s --mask causal --repeats 1 --out %s.out", path, path);
	assert_int_equal(ingot(line), TOOL_OK);
	snprintf(line, sizeof line, "%s.out", path);
	safetensors written;
	assert_true(safetensors_open(line, &written));
	assert_non_null(safetensors_find(&written, "l.out"));
	assert_non_null(safetensors_find(&written, "l.lse"));
	safetensors_release(&written);
	unlink(line);
	snprintf(line, sizeof line, "attn %s --mask none --repeats 1", path);
	assert_int_equal(ingot(line), TOOL_FAILED);
	snprintf(line, sizeof line, "attn %s --backward", path);
	assert_int_equal(ingot(line), TOOL_FAILED);
	unlink(path);
	assert_int_equal(ingot(line), TOOL_FAILED);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_wrong_use_is_2),
		cmocka_unit_test(test_help_is_0),
		cmocka_unit_test(test_nothing_run_is_inconclusive),
		cmocka_unit_test(test_attn_compares),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
