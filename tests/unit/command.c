/* The command's answers as a shell sees them: its exit statuses. What it prints is for people; what it computes is tested
 * where it is computed. */
#define INGOT_EXPERIMENTAL
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "packs.h"
#include "rows.h"
#include "safetensors.h"
#include "scratch.h"
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
		"explain fwd:b4096,h4096,s16777216,bias=f32",
		"explain fwd:b1,hq0,hk2147483647",
		"explain merge:b4096,h4096,s16777216,d64,parts=4096",
		"explain append:b65536,hk65536,s65536,sk65536",
		"explain mask:b65536,h65536,s65536",
		"list --json=1",
		"check --level 4",
		"check --level -1",
		"check --seed -1",
		"check --backend no_such_kernel",
		"build --arch ,",
		"build --arch sm_90a -o=",
		"bench --threads 0",
		"bench --problem merge:frobnicate",
		"bench --from 0",
		"bench --device gpu",
		"check --jobs 0",
		"check --problem fwd:b1,h1,s9,d16,f32 --from 1",
		"check --problem fwd:b1,h1,s9,d16,f32 --seconds 9",
		"check --problem fwd:b1,h1,s9,d16,f32 --only b1",
		"check --problem fwd:b1,h1,s9,d16,f32 --json --verbose",
		"check --level 0 --save no_such_folder/check.json",
		"check --level 0 --save .",
		"check --device cuda:x",
		"bench --suite a --problem fwd:b1",
		"bench --seconds -1 --problem fwd:b1,h1,s9,d16",
		"bench --problem fwd:b1,h1,s9,d16 --backend no_such_kernel",
		"explain fwd:b1,h1,s9,d16 --backend no_such_kernel",
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
	                                   "list --verbose",
	                                   "list --json",
	                                   "explain fwd:b1,h2,s8,d64,bf16,causal",
	                                   "explain bwd:b2,h2,s8,d64,f32,varlen=cu --json",
	                                   "explain append:b2,hk2,s1,sk64,d64,bf16,paged=16",
	                                   "explain merge:b1,h2,s8,d64,parts=3",
	                                   "explain mask:b1,h2,s8,dropout=0.1"};
	for (size_t i = 0; i < sizeof good / sizeof *good; i++)
		if (ingot(good[i]) != TOOL_OK) fail_msg("ingot %s: not status 0", good[i]);
}

/* The status of "ingot <line>"; what it prints to the stream (1 or 2) goes to said. */
static char said[1 << 16];

static int ingot_heard(const char *line, int stream) {
	fflush(NULL);
	FILE *f = tmpfile();
	const int kept = dup(stream);
	assert_true(f && kept >= 0 && dup2(fileno(f), stream) == stream);
	const int status = ingot(line);
	fflush(NULL);
	assert_true(dup2(kept, stream) == stream);
	close(kept);
	rewind(f);
	said[fread(said, 1, sizeof said - 1, f)] = 0;
	fclose(f);
	return status;
}

/* A variable that is wrong changes nothing, and the command says so without being asked for a log. In processes of their own,
 * made before this one has read any. */
static void test_wrong_variables_are_told(void **state) {
	static const char *const wrong[][2] = {{"INGOT_NUM_THREADS", "abc"},
	                                       {"INGOT_NUM_THREADS", "99999999999"},
	                                       {"INGOT_CPU_ARCH", "z80"},
	                                       {"INGOT_TUNING_PATH", "/no/such/rows"},
	                                       {"INGOT_LOG", "loud"}};
	for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
		fflush(NULL);
		const pid_t child = fork();
		if (child == 0) {
			unsetenv("INGOT_LOG");
			setenv(wrong[i][0], wrong[i][1], 1);
			const int status = ingot_heard("explain fwd:b1,h1,s9,d16", 2);
			const char *const name = strstr(said, wrong[i][0]);
			_exit(status != TOOL_OK ? 1 : !name || !strstr(name, wrong[i][1]) ? 2 : strstr(name + 1, "INGOT_") ? 3 : 0);
		}
		int status = -1;
		assert_true(child > 0 && waitpid(child, &status, 0) == child);
		if (status) fail_msg("%s=%s: %d", wrong[i][0], wrong[i][1], WEXITSTATUS(status));
	}
}

/* Output that went nowhere is no success. */
static void test_a_full_disk_is_told(void **state) {
	static const char *const lines[] = {"list", "explain fwd:b1,h1,s9,d16 --json", "list --help", "--help",
	                                    "--version"};
	enum { LINES = sizeof lines / sizeof *lines };
	int status[LINES];
	fflush(NULL);
	const int kept = dup(1), full = open("/dev/full", O_WRONLY);
	assert_true(kept >= 0 && full >= 0 && dup2(full, 1) == 1);
	for (int i = 0; i < LINES; i++) status[i] = ingot(lines[i]);
	assert_true(dup2(kept, 1) == 1);
	close(full);
	close(kept);
	for (int i = 0; i < LINES; i++)
		if (status[i] != TOOL_FAILED) fail_msg("ingot %s: not status 1", lines[i]);
	assert_int_equal(ingot("list"), TOOL_OK);
}

/* How many lines "ingot <line>" prints, and the length of the longest. */
static int printed_lines(const char *line, size_t *longest) {
	assert_int_equal(ingot_heard(line, 1), TOOL_OK);
	int lines = 0;
	*longest = 0;
	for (char *save, *at = strtok_r(said, "\n", &save); at; at = strtok_r(NULL, "\n", &save), lines++)
		if (strlen(at) > *longest) *longest = strlen(at);
	return lines;
}

/* A kernel is one line that fits a terminal, however many variants it has; --verbose gives each of these a line. */
static void test_list_fits_a_terminal(void **state) {
	int variants = 0;
	ingot_implementation impl;
	for (int32_t i = 0; ingot_implementation_get(i, &impl) == INGOT_OK; i++) variants += impl.variant_count;
	size_t longest, longest_verbose;
	const int lines = printed_lines("list", &longest), verbose = printed_lines("list --verbose", &longest_verbose);
	assert_in_range(longest, 1, 100);
	assert_in_range(longest_verbose, 1, 100);
	assert_int_equal(verbose - lines, variants);
}

static void test_nothing_run_is_inconclusive(void **state) {
	static const char *const nothing[][2] = {
		{"check --level 0 --only no_line_holds_this", "no case is left by --only"},
		{"check --level 0 --from 99999", "--from"},
		{"check --problem merge:b1,h1,s9,d16 --backend attn_fwd_reference", "another operator"},
		{"check --problem fwd:b1,h1,s64,d16,f32 --backend attn_fwd_avx2_decode", "every kernel refused"}};
	bool has_decode = false;
	ingot_implementation impl;
	for (int32_t i = 0; ingot_implementation_get(i, &impl) == INGOT_OK; i++)
		has_decode |= impl.available && strcmp(impl.name, "attn_fwd_avx2_decode") == 0;
	for (int i = 0; i < 3 + has_decode; i++) {
		assert_int_equal(ingot_heard(nothing[i][0], 2), TOOL_INCONCLUSIVE);
		if (!strstr(said, nothing[i][1])) fail_msg("ingot %s: %s", nothing[i][0], said);
	}
	assert_int_equal(ingot("check --problem fwd:b1,h1,s9,d16,f32 --seed 3"), TOOL_OK);
}

static void count_threads(void *context, int32_t level, const char *message) {
	(void)level;
	*(int *)context += strstr(message, "up to 5 threads") != NULL;
}

/* Each operator's first run has the threads that were asked for. */
static void test_check_threads(void **state) {
	static const char *const problems[] = {"fwd:b1,h1,s9,d16", "bwd:b1,h1,s9,d16", "merge:b1,h2,s8,d64,parts=3",
	                                       "append:b2,hk2,s1,sk64,d64", "mask:b1,h2,s8,dropout=0.1"};
	char line[128];
	setenv("INGOT_LOG", "4", 1); /* the command leaves the log to it */
	for (size_t i = 0; i < sizeof problems / sizeof *problems; i++) {
		int count = 0;
		ingot_set_log(4, count_threads, &count);
		snprintf(line, sizeof line, "check --problem %s --threads 5", problems[i]);
		const int status = ingot(line);
		if (status != TOOL_OK || count == 0) fail_msg("ingot %s: status %d, %d calls", line, status, count);
	}
	ingot_set_log(0, NULL, NULL);
	unsetenv("INGOT_LOG");
}

/* A disk that is full takes no earlier results with it. */
static void test_check_saves_whole_or_not_at_all(void **state) {
	static const char line[] = "check --problem fwd:b1,h1,s9,d16,f32 --seed 3 --backend reference --save saved";
	char kept[64] = "";
	FILE *f = fopen("saved", "w");
	assert_true(f && fputs("before", f) >= 0 && fclose(f) == 0);
	struct rlimit limit;
	assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
	const struct rlimit small = {64, limit.rlim_max};
	signal(SIGXFSZ, SIG_IGN);
	assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
	const int status = ingot(line);
	assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
	assert_int_equal(status, TOOL_FAILED);
	f = fopen("saved", "r");
	assert_true(f && fgets(kept, sizeof kept, f));
	fclose(f);
	assert_string_equal(kept, "before");
	assert_int_equal(ingot(line), TOOL_OK);
	f = fopen("saved", "r");
	assert_true(f && fgets(kept, sizeof kept, f));
	fclose(f);
	assert_int_equal(kept[0], '{');
	assert_int_equal(ingot("check --problem fwd:b1,h1,s9,d16,f32 --seed 3 --backend reference --save /dev/null"),
	                 TOOL_OK);
}

/* A small file with a causal result, for attn: tensors l.q, l.k, l.v, l.out. */
enum { ATTN_ROWS = 6, ATTN_D = 4, ATTN_N = 2 * ATTN_ROWS * ATTN_D };
static float attn_values[4][ATTN_N];
static safetensors_entry attn_entries[5];
static const char attn_path[] = "attn.safetensors";

static void write_attn(int count, const cJSON *metadata) {
	char error[SAFETENSORS_ERROR];
	assert_true(safetensors_write(attn_path, attn_entries, count, metadata, error));
}

static int make_attn(void **state) {
	if (scratch_begin(state)) return -1;
	const int64_t shape[] = {1, 2, ATTN_ROWS, ATTN_D};
	static const char *const names[] = {"l.q", "l.k", "l.v", "l.out"};
	ingot_tensor t[4];
	for (int n = 0; n < 4; n++) {
		for (int i = 0; i < ATTN_N; i++) attn_values[n][i] = tool_normal(1, (uint64_t)n, (uint64_t)i);
		t[n] = tool_tensor(attn_values[n], INGOT_F32, 4, shape);
		attn_entries[n] = (safetensors_entry){
			.name = names[n], .dtype = "F32", .ndim = 4, .data = attn_values[n], .bytes = sizeof attn_values[n]};
		memcpy(attn_entries[n].shape, shape, sizeof shape);
	}
	const ingot_attn_fwd_params p = {
		.struct_size = sizeof p, .q = t[0], .k = t[1], .v = t[2], .out = t[3], .mask = INGOT_MASK_CAUSAL};
	assert_int_equal(ingot_attn_fwd(&p, (ingot_stream){0}, NULL), INGOT_OK);
	write_attn(4, NULL);
	return 0;
}

static int attn(const char *more) {
	char line[256];
	snprintf(line, sizeof line, "attn %s --repeats 1 %s", attn_path, more);
	return ingot_heard(line, 1);
}

/* Tuning rows are written where they belong, or nothing is measured. */
static void test_rows_files(void **state) {
	static const char path[] = "rows.tsv";
	char line[256], error[256];
	row r = {.op = "attn_fwd",
	         .bucket = "f32",
	         .implementation = "attn_fwd_reference",
	         .variant = "general",
	         .digest = "d1",
	         .device = "m",
	         .date = "2026-01-01"};
	ingot_device_describe((ingot_stream){0}, r.arch, sizeof r.arch, NULL, 0, NULL);
	assert_true(rows_merge(path, &r, 1, error, sizeof error));
	static const char *const partial[] = {"--problem fwd:b1,h1,s9,d16,f32", "--level 1 --only b1,h1,s1,",
	                                      "--level 2 --only b1,h1,s1,", "--level 2 --seconds 1",
	                                      "--level 2 --from 100000000"};
	for (int i = 0; i < 5; i++) {
		snprintf(line, sizeof line, "check %s --rows %s", partial[i], path);
		if (ingot(line) != TOOL_USAGE) fail_msg("ingot %s: not status 2", line);
	}
	static const char *const cannot[] = {"no_such_folder/rows.tsv", ".", INGOT_SOURCE_DIR "/README.md"};
	for (int i = 0; i < 3; i++) {
		snprintf(line, sizeof line, "bench --problem fwd:b1,h1,s9,d16,f32 --seconds 0 --rows %s", cannot[i]);
		assert_int_equal(ingot_heard(line, 1), TOOL_USAGE);
		assert_string_equal(said, "");
	}
	snprintf(line, sizeof line, "bench --problem fwd:b1,h1,s9,d16,f32 --seconds 0 --rows %s", path);
	assert_int_equal(ingot_heard(line, 1), TOOL_OK);
	assert_non_null(strstr(said, "tuning rows in rows.tsv"));
	unlink(path);
	strcpy(r.arch, "another");
	assert_true(rows_merge(path, &r, 1, error, sizeof error));
	assert_int_equal(ingot_heard(line, 2), TOOL_USAGE);
	assert_non_null(strstr(said, "rows of another"));
	/* the model's rows in a file of their own */
	unlink(path);
	snprintf(line, sizeof line, "bench --problem fwd:b1,h1,s9,d16,f32 --seconds 0 --of-model --rows %s", path);
	assert_int_equal(ingot_heard(line, 1), TOOL_OK);
	char text[4096] = "", model[64], key[80];
	FILE *f = fopen(path, "r");
	assert_non_null(f);
	assert_true(fread(text, 1, sizeof text - 1, f) > 0);
	fclose(f);
	ingot_device_describe((ingot_stream){0}, NULL, 0, model, sizeof model, NULL);
	snprintf(key, sizeof key, "attn_fwd\t%s\t", model);
	assert_non_null(strstr(text, key));
	snprintf(line, sizeof line, "check --level 2 --backend attn_merge_reference --rows %s", path);
	assert_int_equal(ingot(line), TOOL_OK);
	assert_int_equal(ingot("bench --problem fwd:b1,h1,s9,d16,f32 --of-model"), TOOL_USAGE);
	unlink(path);
	snprintf(line, sizeof line, "check --level 2 --backend attn_merge_reference --rows %s", path);
	assert_int_equal(ingot(line), TOOL_USAGE);
	assert_int_equal(access(path, F_OK), -1);
}

/* A file takes the place of files only, never of a device. */
static void test_devices_are_not_replaced(void **state) {
	static const char *const lines[] = {"bench --problem fwd:b1,h1,s9,d16,f32 --seconds 0 --rows fifo",
	                                    "check --level 2 --backend attn_merge_reference --rows fifo"};
	assert_int_equal(mkfifo("fifo", 0600), 0);
	/* its two ends are held, so that nobody waits for the other */
	const int fd = open("fifo", O_RDWR | O_NONBLOCK);
	assert_true(fd >= 0 && write(fd, "#\n", 2) == 2);
	assert_int_equal(attn("--mask causal --out fifo"), TOOL_USAGE);
	for (int i = 0; i < 2; i++) {
		if (ingot_heard(lines[i], 2) != TOOL_USAGE) fail_msg("ingot %s: not status 2", lines[i]);
		assert_non_null(strstr(said, "--rows fifo is no regular file"));
	}
	struct stat is;
	assert_true(stat("fifo", &is) == 0 && S_ISFIFO(is.st_mode));
	close(fd);
	unlink("fifo");
	assert_int_equal(ingot("check --level 0 --save="), TOOL_USAGE);
}

/* Nothing to time is said. */
static void test_bench_says_that_nothing_is_left(void **state) {
	assert_int_equal(ingot_heard("bench --only zzz", 2), TOOL_USAGE);
	assert_non_null(strstr(said, "--only \"zzz\""));
	assert_int_equal(ingot_heard("bench --from 99999", 2), TOOL_USAGE);
	assert_non_null(strstr(said, "--from 99999"));
}

/* A suite that cannot be read to its end is told before anything of it is timed. */
static void test_bench_reads_the_suite_first(void **state) {
	FILE *f = fopen("suite", "w");
	assert_non_null(f);
	fputs("good fwd:b1,h1,s9,d16,f32 # a remark\n\nbad fwd:b1,frobnicate\n", f);
	fclose(f);
	assert_int_equal(ingot_heard("bench --suite suite --seconds 0", 1), TOOL_USAGE);
	assert_null(strstr(said, "good"));
	assert_int_equal(ingot_heard("bench --suite suite --seconds 0", 2), TOOL_USAGE);
	assert_non_null(strstr(said, "suite line 3: \"frobnicate\""));
	assert_int_equal(ingot("bench --suite /dev/zero"), TOOL_USAGE);
	assert_int_equal(ingot_heard("bench --suite .", 2), TOOL_USAGE);
	assert_non_null(strstr(said, "--suite . cannot be read"));
	f = fopen("suite", "w");
	assert_non_null(f);
	fputs("one fwd:b1,h1,s9,d16,f32\r\ntwo fwd:b1,h1,s9,d16,f32", f); /* no newline at its end */
	fclose(f);
	assert_int_equal(ingot_heard("bench --suite suite --seconds 0 --from 2", 1), TOOL_OK);
	assert_true(!strstr(said, "one ") && strstr(said, "two "));
}

/* Packs: nothing to verify is no success, a verb takes its own options only, and a pack replaces packs only. */
static void test_image(void **state) {
	static const char pack[] = "ingot-sm_90a.pack";
	char line[128];
	assert_int_equal(ingot__pack_write(pack, "sm_90a", "none", NULL, 0), INGOT_OK);
	static const char *const failed[] = {"image verify %s --only zzz", "image extract %s --only zzz -o objects"};
	for (int i = 0; i < 2; i++) {
		snprintf(line, sizeof line, failed[i], pack);
		if (ingot(line) != TOOL_FAILED) fail_msg("ingot %s: not status 1", line);
	}
	assert_int_equal(access("objects", F_OK), -1);
	static const char *const stray[] = {"image list %s --only zzz", "image verify %s --json", "image diff %s %s -o x",
	                                    "image list %s --arch sm_90a"};
	for (int i = 0; i < 4; i++) {
		snprintf(line, sizeof line, stray[i], pack, pack);
		if (ingot(line) != TOOL_USAGE) fail_msg("ingot %s: not status 2", line);
	}
	snprintf(line, sizeof line, "image merge %s -o %s", pack, attn_path); /* no pack, and it stays */
	assert_int_equal(ingot(line), TOOL_USAGE);
	safetensors file;
	assert_true(safetensors_open(attn_path, &file));
	safetensors_release(&file);
	snprintf(line, sizeof line, "image merge %s -o %s", pack, pack);
	assert_int_equal(ingot(line), TOOL_OK);
	unlink(pack);
	snprintf(line, sizeof line, "image create /dev/null --arch sm_90a -o %s", pack); /* of nothing, nothing */
	assert_int_equal(ingot(line), TOOL_FAILED);
	assert_int_equal(access(pack, F_OK), -1);
	assert_int_equal(ingot("build --arch sm_90a --list --only zzz"), TOOL_FAILED);
	assert_int_equal(ingot("build --arch sm_90a --list --only sm90"), TOOL_OK);
	assert_int_equal(ingot("build --arch sm_90a,sm_80 --list --only sm90"),
	                 TOOL_FAILED); /* half of what was asked for */
}

/* attn passes on the textbook's own result, and fails where the file expects another; the results are written both times. */
static void test_attn_compares(void **state) {
	char line[128], out[64];
	snprintf(out, sizeof out, "%s.out", attn_path);
	for (int wrong = 0; wrong < 2; wrong++) {
		snprintf(line, sizeof line, "--mask %s --out %s", wrong ? "none" : "causal", out);
		assert_int_equal(attn(line), wrong ? TOOL_FAILED : TOOL_OK);
		assert_non_null(strstr(said, wrong ? "FAILED" : "all results pass"));
		safetensors written;
		assert_true(safetensors_open(out, &written));
		assert_non_null(safetensors_find(&written, "l.out"));
		assert_non_null(safetensors_find(&written, "l.lse"));
		safetensors_release(&written);
		unlink(out);
	}
	assert_int_equal(attn("--backward"), TOOL_FAILED);
	assert_int_equal(attn("--mask causal --reference none"), TOOL_OK);
	assert_null(strstr(said, "pass"));
	assert_int_equal(ingot("attn no_such_file"), TOOL_FAILED);
}

/* What the file expects in another shape or type is a failure; a tensor that nothing reads is named. */
static void test_attn_uses_every_tensor(void **state) {
	const safetensors_entry kept = attn_entries[3];
	attn_entries[3].shape[2] = 3;
	attn_entries[3].shape[1] = 4;
	write_attn(4, NULL);
	assert_int_equal(attn("--mask causal"), TOOL_FAILED);
	attn_entries[3] = kept;
	attn_entries[3].dtype = "I32";
	write_attn(4, NULL);
	assert_int_equal(attn("--mask causal"), TOOL_FAILED);
	attn_entries[3] = kept;
	static const int32_t length = 3;
	attn_entries[4] = (safetensors_entry){
		.name = "l.K_lengths", .dtype = "I32", .ndim = 1, .shape = {1}, .data = &length, .bytes = sizeof length};
	write_attn(5, NULL);
	assert_int_equal(attn("--mask causal"), TOOL_OK);
	assert_non_null(strstr(said, "not used: l.K_lengths\n"));
	write_attn(4, NULL);
	assert_int_equal(attn("--mask causal"), TOOL_OK);
	assert_null(strstr(said, "not used"));
}

/* Options that cannot be meant are refused before anything runs: the file named here does not exist. */
static void test_attn_refuses_options(void **state) {
	static const char *const wrong[] = {"--softcap -1",
	                                    "--dtype f64",
	                                    "--mask diagonal",
	                                    "--align left",
	                                    "--window 3",
	                                    "--window 3:x",
	                                    "--mask causal --window 3:0",
	                                    "--backend nope",
	                                    "--backend x86/attn_fwd_avx2:nope",
	                                    "--reference maybe",
	                                    "--forward --backward"};
	char line[128];
	for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
		snprintf(line, sizeof line, "attn no_such_file %s", wrong[i]);
		if (ingot(line) != TOOL_USAGE) fail_msg("ingot %s: not status 2", line);
	}
	assert_int_equal(ingot("attn no_such_file --backend reference/attn_fwd_reference:general"), TOOL_FAILED);
}

static void test_attn_windows_have_bounds(void **state) {
	assert_int_equal(attn("--mask window"), TOOL_USAGE);
	assert_int_equal(attn("--mask window --window inf:0"), TOOL_OK);
	assert_non_null(strstr(said, "window inf:0 "));
	cJSON *metadata = cJSON_CreateObject();
	cJSON_AddStringToObject(metadata, "mask", "window");
	write_attn(4, metadata);
	assert_int_equal(attn(""), TOOL_USAGE);
	cJSON_AddStringToObject(metadata, "window_right", "0");
	write_attn(4, metadata);
	assert_int_equal(attn(""), TOOL_OK);
	/* bounds of another mask are a contradiction of the file's, and nothing where the option says which mask */
	cJSON_ReplaceItemInObject(metadata, "mask", cJSON_CreateString("causal"));
	write_attn(4, metadata);
	assert_int_equal(attn(""), TOOL_FAILED);
	assert_int_equal(attn("--mask causal"), TOOL_OK);
	cJSON_Delete(metadata);
	write_attn(4, NULL);
}

/* The input is never the output, by whatever name; a place that cannot be written is told before the work. */
static void test_attn_keeps_its_input(void **state) {
	char line[128], other[64];
	snprintf(other, sizeof other, "%s.other", attn_path);
	assert_int_equal(link(attn_path, other), 0);
	const char *const outs[] = {attn_path, other, "no_such_folder/out", "."};
	for (int i = 0; i < 4; i++) {
		snprintf(line, sizeof line, "--mask causal --out %s", outs[i]);
		assert_int_equal(attn(line), TOOL_USAGE);
		assert_string_equal(said, "");
	}
	unlink(other);
	assert_int_equal(attn("--mask causal"), TOOL_OK);
}

int main(void) {
	const struct CMUnitTest before[] = {cmocka_unit_test(test_wrong_variables_are_told)};
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_wrong_use_is_2),
		cmocka_unit_test(test_help_is_0),
		cmocka_unit_test(test_a_full_disk_is_told),
		cmocka_unit_test(test_list_fits_a_terminal),
		cmocka_unit_test(test_nothing_run_is_inconclusive),
		cmocka_unit_test(test_check_threads),
		cmocka_unit_test(test_check_saves_whole_or_not_at_all),
		cmocka_unit_test(test_rows_files),
		cmocka_unit_test(test_devices_are_not_replaced),
		cmocka_unit_test(test_bench_says_that_nothing_is_left),
		cmocka_unit_test(test_bench_reads_the_suite_first),
		cmocka_unit_test(test_image),
		cmocka_unit_test(test_attn_compares),
		cmocka_unit_test(test_attn_uses_every_tensor),
		cmocka_unit_test(test_attn_refuses_options),
		cmocka_unit_test(test_attn_windows_have_bounds),
		cmocka_unit_test(test_attn_keeps_its_input),
	};
	const int failed = cmocka_run_group_tests(before, NULL, NULL); /* before a call reads them */
	return failed + cmocka_run_group_tests(tests, make_attn, scratch_end);
}
