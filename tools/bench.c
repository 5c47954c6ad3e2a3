/*
 * `ingot bench`: time of the rows of a suite beside what this processor can reach, measured in the same process between the
 * repeats. With --rows every candidate of a problem is timed, and becomes a tuning row.
 */
#include "case.h"
#include "choice.h"
#include "rows.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { ROWS_MOST = 8192, THREADS_MOST = 16, TIMES_MOST = 100000 };

typedef struct settings {
	const char *backend, *rows, *only;
	double seconds;
	bool json;
	int64_t threads[THREADS_MOST];
	int thread_counts;
} settings;

/* One measured implementation of one problem. */
typedef struct measured {
	char implementation[96], variant[64];
	double least, median; /* seconds */
	int repeats;
	double rate, limit; /* GFLOP/s, or GB/s of K and V for decode, and what the processor reaches */
	bool decode;
} measured;

/* The best rates seen in this process: a disturbed sample of the peak must not flatter a kernel. */
static double best_peak[INGOT_BF16 + 1][1025];

static double peak_of(int32_t dtype, int threads) {
	/* fp16 and 8-bit inputs are multiplied as fp32. */
	double *best = &best_peak[dtype == INGOT_BF16 ? INGOT_BF16 : INGOT_F32][threads];
	*best = fmax(*best, tool_peak(dtype, threads, NULL));
	return *best;
}

static int by_value(const void *a, const void *b) {
	const double x = *(const double *)a, y = *(const double *)b;
	return x < y ? -1 : x > y;
}

/* GB/s of reading K and V once, the better of two passes. */
static double read_rate(const test_case *c, int threads) {
	double best = 0;
	for (int pass = 0; pass < 2; pass++) {
		double seconds = 0;
		const buffer *const both[] = {&c->k, &c->v};
		for (int i = 0; i < 2; i++)
			seconds += (double)both[i]->bytes / tool_read_rate(both[i]->memory, both[i]->bytes, threads);
		const double rate = (double)(both[0]->bytes + both[1]->bytes) / seconds;
		if (rate > best) best = rate;
	}
	return best;
}

/* A row counts as decode where K and V are read for less arithmetic than reading them costs. */
static bool is_decode(const problem *p) {
	return p->op == TOOL_FWD && p->sq * (p->heads_k ? p->heads_q / p->heads_k : 1) <= 8 && p->sk >= 256;
}

static ingot_status measure(const test_case *c, const void *params, const char *backend, int32_t threads,
                            double seconds, measured *m) {
	const problem *p = &c->p;
	const tool_operator op = (tool_operator)p->op;
	ingot_options options = tool_options(backend, threads);
	uint64_t bytes = 0;
	ingot_status status = tool_workspace(op, params, &options, &bytes);
	if (status != INGOT_OK) return status;
	options.workspace = tool_alloc_aligned(256, bytes);
	options.workspace_size = bytes;
	status = tool_prepare(op, params, &options);
	if (status == INGOT_OK) status = tool_run(op, params, &options); /* touches the workspace, wakes the threads */
	m->decode = is_decode(p);
	const int32_t dtype = (int32_t)p->dtype;
	m->limit = m->decode ? read_rate(c, threads) : peak_of(dtype, threads);
	double *times = tool_alloc(sizeof(double) * TIMES_MOST), spent = 0;
	m->repeats = 0;
	double next_sample = seconds / 2;
	while (status == INGOT_OK && m->repeats < TIMES_MOST && (m->repeats < 3 || spent < seconds)) {
		const double begin = tool_now();
		status = tool_run(op, params, &options);
		times[m->repeats] = tool_now() - begin;
		spent += times[m->repeats++];
		if (m->repeats >= 3 && spent > 5 * seconds) break;
		if (spent > next_sample) {
			m->limit = m->decode ? fmax(m->limit, read_rate(c, threads)) : peak_of(dtype, threads);
			next_sample = INFINITY;
		}
	}
	m->limit = m->decode ? fmax(m->limit, read_rate(c, threads)) : peak_of(dtype, threads);
	if (status == INGOT_OK) {
		qsort(times, (size_t)m->repeats, sizeof *times, by_value);
		m->least = times[0];
		m->median = times[m->repeats / 2];
		m->rate = (m->decode ? problem_kv_bytes(p) : problem_flops(p)) / m->least * 1e-9;
	}
	free(times);
	free(options.workspace);
	return status;
}

static void print_head(void) {
	printf("%-12s %-44s %3s %-30s %10s %10s %8s %6s\n", "row", "problem", "thr", "implementation", "min ms",
	       "median ms", "rate", "limit%");
}

static void print_measured(const char *name, const char *line, int threads, const measured *m) {
	char shown[192];
	snprintf(shown, sizeof shown, "%s:%s", m->implementation, m->variant);
	printf("%-12s %-44s %3d %-30s %10.4f %10.4f %8.1f %5.1f%% %s\n", name, line, threads, shown, m->least * 1e3,
	       m->median * 1e3, m->rate, m->limit > 0 ? 100 * m->rate / m->limit : 0, m->decode ? "GB/s" : "GFLOP/s");
	fflush(stdout);
}

static void add_json(cJSON *list, const char *name, const char *line, int threads, const measured *m) {
	cJSON *item = cJSON_CreateObject();
	cJSON_AddStringToObject(item, "row", name);
	cJSON_AddStringToObject(item, "problem", line);
	cJSON_AddNumberToObject(item, "threads", threads);
	cJSON_AddStringToObject(item, "implementation", m->implementation);
	cJSON_AddStringToObject(item, "variant", m->variant);
	cJSON_AddNumberToObject(item, "min_us", m->least * 1e6);
	cJSON_AddNumberToObject(item, "median_us", m->median * 1e6);
	cJSON_AddNumberToObject(item, "repeats", m->repeats);
	cJSON_AddStringToObject(item, "unit", m->decode ? "GB/s" : "GFLOP/s");
	cJSON_AddNumberToObject(item, "rate", m->rate);
	cJSON_AddNumberToObject(item, "limit", m->limit);
	cJSON_AddItemToArray(list, item);
}

typedef struct bench {
	const tool_command *command;
	const settings *s;
	cJSON *json;
	row *rows;
	int row_count;
	int measured, failed;
} bench;

static void keep_row(bench *b, const cJSON *explanation, const cJSON *candidate, const char *op, const measured *m) {
	if (!b->rows || b->row_count == ROWS_MOST) return;
	row *r = &b->rows[b->row_count];
	*r = (row){.microseconds = m->least * 1e6};
	const time_t now = time(NULL);
	struct tm day;
	gmtime_r(&now, &day);
	strftime(r->date, sizeof r->date, "%Y-%m-%d", &day);
	snprintf(r->op, sizeof r->op, "%s", op);
	snprintf(r->arch, sizeof r->arch, "%s", choice_text(explanation, "arch"));
	snprintf(r->bucket, sizeof r->bucket, "%s", choice_text(explanation, "bucket"));
	snprintf(r->implementation, sizeof r->implementation, "%s", choice_text(candidate, "name"));
	snprintf(r->variant, sizeof r->variant, "%s", m->variant);
	snprintf(r->digest, sizeof r->digest, "%s", choice_text(candidate, "digest"));
	snprintf(r->device, sizeof r->device, "%s", choice_text(explanation, "model"));
	/* Of problems that share a bucket the fastest call speaks for it. */
	for (int i = 0; i < b->row_count; i++) {
		row *old = &b->rows[i];
		if (strcmp(old->op, r->op) || strcmp(old->bucket, r->bucket) ||
		    strcmp(old->implementation, r->implementation) || strcmp(old->variant, r->variant))
			continue;
		if (r->microseconds < old->microseconds) old->microseconds = r->microseconds;
		return;
	}
	b->row_count++;
}

/* The plain reference is hundreds of times slower: beyond this its row would cost minutes and say nothing new. */
#define REFERENCE_FLOPS 3e9

static void bench_problem(bench *b, const char *name, const problem *p, int32_t threads) {
	const settings *s = b->s;
	char line[PROBLEM_TEXT], error[256];
	problem_print(p, line, sizeof line);
	test_case c;
	if (!case_build(&c, p, 1, CASE_SPEED, error, sizeof error)) {
		tool_failed(b->command, "%s %s: %s", name, line, error);
		b->failed++;
		return;
	}
	test_outputs forward, backward = {0};
	outputs_make(&forward, &c, true, false);
	if (p->op == TOOL_BWD) outputs_make(&backward, &c, false, false);
	const ingot_attn_fwd_params f = case_fwd(&c, &forward);
	const ingot_attn_bwd_params g = case_bwd(&c, &backward, &forward);
	const tool_operator op = (tool_operator)p->op;
	const void *params = op == TOOL_FWD ? (const void *)&f : &g;
	const ingot_options plain = tool_options(NULL, 0);
	ingot_status status = op == TOOL_BWD ? tool_run(TOOL_FWD, &f, &plain) : INGOT_OK;
	const ingot_options forced = tool_options(s->backend, threads);
	cJSON *explanation = status == INGOT_OK ? choice_json(op, params, &forced) : NULL;
	const cJSON *winner = choice_winner(explanation), *candidate;
	if (!winner) {
		tool_failed(b->command, "%s %s: %s", name, line,
		            explanation ? choice_text(explanation, "because") : ingot_last_error());
		b->failed++;
	}
	if (winner) cJSON_ArrayForEach(candidate, cJSON_GetObjectItemCaseSensitive(explanation, "candidates")) {
			if (*choice_text(candidate, "refusal")) continue;
			const bool wins = strcmp(choice_text(candidate, "name"), choice_text(winner, "name")) == 0;
			const bool reference = strcmp(choice_text(candidate, "family"), "reference") == 0;
			if (!wins && (!b->rows || (reference && problem_flops(p) > REFERENCE_FLOPS))) continue;
			measured m = {0};
			snprintf(m.implementation, sizeof m.implementation, "%s/%s", choice_text(candidate, "family"),
			         choice_text(candidate, "name"));
			snprintf(m.variant, sizeof m.variant, "%s", choice_text(candidate, "variant"));
			status = measure(&c, params, m.implementation, threads, s->seconds, &m);
			if (status != INGOT_OK) {
				tool_failed(b->command, "%s %s on %s: %s: %s", name, line, m.implementation, ingot_status_name(status),
				            ingot_last_error());
				b->failed++;
				continue;
			}
			b->measured++;
			if (b->json) add_json(b->json, name, line, threads, &m);
			else print_measured(name, line, threads, &m);
			keep_row(b, explanation, candidate, tool_operator_name(op), &m);
		}
	cJSON_Delete(explanation);
	outputs_release(&forward);
	outputs_release(&backward);
	case_release(&c);
}

/* A line of a suite: a name and a problem; '#' begins a remark. False after a message. */
static bool bench_line(bench *b, const char *text, const char *where, int number) {
	char name[64], line[PROBLEM_TEXT], error[256];
	problem p;
	if (sscanf(text, "%63s %1023s", name, line) != 2) {
		tool_usage(b->command, "%s line %d: \"%s\" is not a name and a problem", where, number, text);
		return false;
	}
	if (!problem_parse(line, &p, error, sizeof error)) {
		tool_usage(b->command, "%s line %d: %s", where, number, error);
		return false;
	}
	if (p.op != TOOL_FWD && p.op != TOOL_BWD) {
		tool_usage(b->command, "%s line %d: only fwd and bwd are timed", where, number);
		return false;
	}
	if (b->s->only && !strstr(name, b->s->only) && !strstr(line, b->s->only)) return true;
	static int on_terminal = -1;
	if (on_terminal < 0) on_terminal = isatty(STDERR_FILENO) && !isatty(STDOUT_FILENO);
	if (on_terminal) fprintf(stderr, "\r%s %-60s", name, line);
	for (int i = 0; i < b->s->thread_counts; i++) bench_problem(b, name, &p, (int32_t)b->s->threads[i]);
	return true;
}

static bool bench_file(bench *b, const char *path) {
	FILE *f = fopen(path, "re");
	if (!f) {
		tool_failed(b->command, "%s: %s", path, strerror(errno));
		return false;
	}
	char text[PROBLEM_TEXT + 80];
	bool good = true;
	for (int number = 1; good && fgets(text, sizeof text, f); number++) {
		text[strcspn(text, "\r\n")] = 0;
		if (text[strspn(text, " \t")] && text[0] != '#') good = bench_line(b, text, path, number);
	}
	fclose(f);
	return good;
}

static int run(const tool_command *command, int argc, char **argv) {
	settings s = {.seconds = 0.4};
	const char *suite = NULL, *problem_text = NULL, *threads = NULL;
	const tool_option options[] = {
		{"--suite", "FILE", "a file of lines NAME PROBLEM; else the built-in suite for CPUs", TOOL_TEXT, &suite, 0, 0},
		{"--problem", "PROBLEM", "time this one problem", TOOL_TEXT, &problem_text, 0, 0},
		{"--only", "TEXT", "only rows whose name or problem holds this text", TOOL_TEXT, &s.only, 0, 0},
		{"--threads", "LIST", "thread counts to use, as 1,2; else all this process may use", TOOL_TEXT, &threads, 0, 0},
		{"--backend", "NAME", "force a family, an implementation or a variant", TOOL_TEXT, &s.backend, 0, 0},
		{"--seconds", "X", "time spent on each measurement (0.4)", TOOL_NUMBER, &s.seconds, 0, 0},
		{"--rows", "FILE", "time every candidate and write tuning rows to FILE (tuning/ARCH.tsv)", TOOL_TEXT, &s.rows,
	     0, 0},
		{"--json", NULL, "print JSON", TOOL_FLAG, &s.json, 0, 0},
		{0},
	};
	int count;
	const int stop = tool_parse(command, options, argc, argv, NULL, 0, &count);
	if (stop >= 0) return stop;
	if (suite && problem_text) return tool_usage(command, "--suite and --problem exclude each other");
	if (s.seconds < 0) return tool_usage(command, "--seconds %g; allowed is 0 or more", s.seconds);
	if (threads) {
		s.thread_counts = tool_integers(threads, 1, 1024, s.threads, THREADS_MOST);
		if (s.thread_counts < 1)
			return tool_usage(command, "--threads \"%s\" is no list of up to %d numbers from 1 to 1024", threads,
			                  THREADS_MOST);
	} else {
		int32_t all = 1;
		ingot_device_describe((ingot_stream){0}, NULL, 0, NULL, 0, &all);
		s.threads[0] = all;
		s.thread_counts = 1;
	}
	bench b = {.command = command, .s = &s};
	cJSON *root = NULL;
	char arch[64] = "", model[64] = "";
	ingot_device_describe((ingot_stream){0}, arch, sizeof arch, model, sizeof model, NULL);
	if (s.json) {
		root = cJSON_CreateObject();
		cJSON_AddStringToObject(root, "version", ingot_version_string());
		cJSON_AddStringToObject(root, "arch", arch);
		cJSON_AddStringToObject(root, "model", model);
		b.json = cJSON_AddArrayToObject(root, "rows");
	} else {
		printf("ingot %s on %s (%s)\n", ingot_version_string(), arch, model);
		print_head();
	}
	if (s.rows) b.rows = tool_alloc(sizeof *b.rows * ROWS_MOST);
	bool good = true;
	char error[256];
	if (problem_text) {
		char text[PROBLEM_TEXT + 8];
		snprintf(text, sizeof text, "- %s", problem_text);
		good = bench_line(&b, text, "--problem", 1);
	} else if (suite) {
		good = bench_file(&b, suite);
	} else {
		for (int i = 0; good && i < bench_suite_count; i++)
			good = bench_line(&b, bench_suite[i], "built-in suite", i + 1);
	}
	if (s.json) {
		char *text = cJSON_Print(root);
		puts(text);
		free(text);
		cJSON_Delete(root);
	} else {
		for (int dtype = INGOT_F32; dtype <= INGOT_BF16; dtype++)
			for (int i = 0; i < s.thread_counts; i++)
				if (best_peak[dtype][s.threads[i]] > 0)
					printf("peak for %s, %lld thread%s: %.1f GFLOP/s\n", tool_dtype_name(dtype),
					       (long long)s.threads[i], s.threads[i] == 1 ? "" : "s", best_peak[dtype][s.threads[i]]);
	}
	if (good && s.rows && b.row_count) {
		if (!rows_merge(s.rows, b.rows, b.row_count, error, sizeof error)) {
			tool_failed(command, "%s", error);
			b.failed++;
		} else if (!s.json)
			printf("%d tuning rows in %s; `ingot check --level 2 --rows %s` adds their evidence\n", b.row_count, s.rows,
			       s.rows);
	}
	free(b.rows);
	return !good ? TOOL_USAGE : b.failed ? TOOL_FAILED : b.measured ? TOOL_OK : TOOL_INCONCLUSIVE;
}

const tool_command tool_bench = {
	.name = "bench",
	.usage = "[options]",
	.summary = "time the rows of a suite beside what this processor can reach",
	.text =
		"Rates count query-key pairs exactly: 2 pairs (D + Dv) forward, 2 pairs (3 D + 2 Dv) backward. The limit is a loop of\n"
		"multiply-accumulates in registers, for decode a loop that reads K and V; both run between the repeats.\n\n"
		"examples:\n"
		"  ingot bench --threads 1,2 --only C1\n"
		"  ingot bench --problem fwd:b1,h8,s2048,d64,bf16,causal --backend x86\n"
		"  ingot bench --rows tuning/avx512_bf16.tsv\n",
	.run = run,
};
