/*
 * `ingot bench`: time of the rows of a suite, on a CPU beside what this processor can reach, measured in the same process
 * between the repeats. With --rows every candidate of a problem is timed, and becomes a tuning row.
 */
#include "case.h"
#include "check_small.h"
#include "choice.h"
#include "gpu.h"
#include "rows.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { ROWS_MOST = 8192, THREADS_MOST = 16, TIMES_MOST = 100000, GPU_TIMES_MOST = 50, SEEN_MOST = 64 };

typedef struct settings {
	const char *backend, *rows, *only;
	double seconds; /* NaN: not given */
	int64_t from;
	bool json, of_model;
	int64_t threads[THREADS_MOST];
	int thread_counts;
} settings;

/* One measured implementation of one problem. */
typedef struct measured {
	char implementation[96], variant[64];
	double least, median; /* seconds */
	int repeats;
	double rate, limit; /* by unit, and what the processor reaches (0: not known) */
	const char *unit;
} measured;

/* A problem as tensors and a call. */
typedef struct call {
	problem p;
	test_case c; /* attention */
	test_outputs forward, backward;
	ingot_attn_fwd_params fwd;
	ingot_attn_bwd_params bwd;
	small_case small; /* the others */
	const void *params;
} call;

static bool is_attention(const problem *p) {
	return p->op == TOOL_FWD || p->op == TOOL_BWD;
}

/* False with a sentence. */
static bool make_call(call *a, const problem *p, char *error, size_t capacity) {
	*a = (call){.p = *p};
	if (!is_attention(p)) {
		if (!small_build(&a->small, p, 1, CASE_SPEED, error, capacity)) return false;
		a->params = small_params(&a->small);
		return true;
	}
	if (!case_build(&a->c, p, 1, CASE_SPEED, error, capacity)) return false;
	outputs_make(&a->forward, &a->c, true, false);
	if (p->op == TOOL_BWD) outputs_make(&a->backward, &a->c, false, false);
	a->fwd = case_fwd(&a->c, &a->forward);
	a->bwd = case_bwd(&a->c, &a->backward, &a->forward);
	a->params = p->op == TOOL_FWD ? (const void *)&a->fwd : &a->bwd;
	/* a backward reads what its forward wrote */
	const ingot_options plain = tool_options(NULL, 0);
	if (p->op == TOOL_BWD && tool_run(TOOL_FWD, &a->fwd, &plain) != INGOT_OK) {
		snprintf(error, capacity, "its forward fails: %s", ingot_last_error());
		return false;
	}
	return true;
}

static void release_call(call *a) {
	outputs_release(&a->forward);
	outputs_release(&a->backward);
	if (is_attention(&a->p)) case_release(&a->c);
	else small_release(&a->small);
}

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

/* What a problem's rate counts. */
static const char *unit_of(const problem *p) {
	return is_attention(p) && !is_decode(p) ? "GFLOP/s" : "GB/s";
}

static double work_of(const problem *p) {
	return !is_attention(p) ? problem_moved_bytes(p) : is_decode(p) ? problem_kv_bytes(p) : problem_flops(p);
}

/* What the processor reaches, sampled now; the best sample so far. */
static double sample_limit(const call *a, int32_t threads, double before) {
	if (!is_attention(&a->p)) return 0;
	return is_decode(&a->p) ? fmax(before, read_rate(&a->c, threads)) : peak_of((int32_t)a->p.dtype, threads);
}

static ingot_status time_on_cpu(const call *a, const ingot_options *options, int32_t threads, double seconds,
                                double *times, measured *m) {
	const tool_operator op = (tool_operator)a->p.op;
	double spent = 0, next_sample = seconds / 2;
	ingot_status status = tool_run(op, a->params, options); /* touches the workspace, wakes the threads */
	m->limit = sample_limit(a, threads, 0);
	while (status == INGOT_OK && m->repeats < TIMES_MOST && (m->repeats < 3 || spent < seconds)) {
		const double begin = tool_now();
		status = tool_run(op, a->params, options);
		times[m->repeats] = tool_now() - begin;
		spent += times[m->repeats++];
		if (m->repeats >= 3 && spent > 5 * seconds) break;
		if (spent > next_sample) {
			m->limit = sample_limit(a, threads, m->limit);
			next_sample = INFINITY;
		}
	}
	m->limit = sample_limit(a, threads, m->limit);
	qsort(times, (size_t)m->repeats, sizeof *times, by_value);
	return status;
}

static ingot_options options_of(const problem *p, const char *backend, int32_t threads) {
	ingot_options options = tool_options(backend, threads);
	options.flags = problem_flags(p);
	return options;
}

static ingot_status measure(const call *a, const char *backend, int32_t threads, double seconds, measured *m) {
	const problem *p = &a->p;
	const tool_operator op = (tool_operator)p->op;
	ingot_options options = options_of(p, backend, threads);
	uint64_t bytes = 0;
	ingot_status status = tool_workspace(op, a->params, &options, &bytes);
	if (status != INGOT_OK) return status;
	options.workspace = tool_alloc_aligned(256, bytes);
	options.workspace_size = bytes;
	double *const times = tool_alloc(sizeof(double) * TIMES_MOST);
	status = tool_prepare(op, a->params, &options);
	if (status == INGOT_OK)
		status = gpu_takes(&options) ? gpu_time(op, a->params, &options, seconds, GPU_TIMES_MOST, times, &m->repeats)
		                             : time_on_cpu(a, &options, threads, seconds, times, m);
	if (status == INGOT_OK) {
		m->least = times[0];
		m->median = times[m->repeats / 2];
		m->unit = unit_of(p);
		m->rate = work_of(p) / m->least * 1e-9;
	}
	free(times);
	free(options.workspace);
	return status;
}

static void print_head(void) {
	printf("%-12s %-44s %3s %-30s %10s %10s %8s %6s\n", "row", "problem", "thr", "implementation", "min ms",
	       "median ms", "rate", "limit%");
}

/* The columns that a refused row has too. */
static void print_row(const char *name, const char *line, int threads) {
	char on[16] = "-";
	if (threads) snprintf(on, sizeof on, "%d", threads);
	printf("%-12s %-44s %3s ", name, line, on);
}

static void print_refused(const char *name, const char *line, int threads, const char *why) {
	print_row(name, line, threads);
	printf("refused: %s\n", why);
	fflush(stdout);
}

static void print_measured(const char *name, const char *line, int threads, const measured *m) {
	char shown[192];
	char limit[16] = "-";
	snprintf(shown, sizeof shown, "%s:%s", m->implementation, m->variant);
	if (m->limit > 0) snprintf(limit, sizeof limit, "%.1f%%", 100 * m->rate / m->limit);
	print_row(name, line, threads);
	printf("%-30s %10.4f %10.4f %8.1f %6s %s\n", shown, m->least * 1e3, m->median * 1e3, m->rate, limit, m->unit);
	fflush(stdout);
}

static cJSON *add_row(cJSON *list, const char *name, const char *line, int threads) {
	cJSON *item = cJSON_CreateObject();
	cJSON_AddStringToObject(item, "row", name);
	cJSON_AddStringToObject(item, "problem", line);
	if (threads) cJSON_AddNumberToObject(item, "threads", threads);
	cJSON_AddItemToArray(list, item);
	return item;
}

static void add_refused(cJSON *list, const char *name, const char *line, int threads, const char *why) {
	cJSON_AddStringToObject(add_row(list, name, line, threads), "refused", why);
}

static void add_json(cJSON *list, const char *name, const char *line, int threads, const measured *m) {
	cJSON *const item = add_row(list, name, line, threads);
	cJSON_AddStringToObject(item, "implementation", m->implementation);
	cJSON_AddStringToObject(item, "variant", m->variant);
	cJSON_AddNumberToObject(item, "min_us", m->least * 1e6);
	cJSON_AddNumberToObject(item, "median_us", m->median * 1e6);
	cJSON_AddNumberToObject(item, "repeats", m->repeats);
	cJSON_AddStringToObject(item, "unit", m->unit);
	cJSON_AddNumberToObject(item, "rate", m->rate);
	if (m->limit > 0) cJSON_AddNumberToObject(item, "limit", m->limit);
}

typedef struct bench {
	const tool_command *command;
	const settings *s;
	cJSON *json;
	row *rows;
	int row_count;
	int measured, failed;
	bool unwritten;   /* rows that could not be */
	int64_t problems; /* read so far */
	/* The best rate of each implementation so far, by unit: what it would take is known before it is run. */
	struct {
		char implementation[96];
		const char *unit;
		double rate;
	} seen[SEEN_MOST];
	int seen_count;
} bench;

static void keep_row(bench *b, const cJSON *explanation, const cJSON *candidate, const char *op, const measured *m) {
	if (!b->rows || b->row_count == ROWS_MOST) return;
	row *r = &b->rows[b->row_count];
	/* A CPU's neighbours only ever add to a time; a GPU is not shared, and its fastest run is one in many. */
	const bool gpu = gpu_stream().type != INGOT_CPU;
	*r = (row){.microseconds = (gpu ? m->median : m->least) * 1e6};
	const time_t now = time(NULL);
	struct tm day;
	gmtime_r(&now, &day);
	strftime(r->date, sizeof r->date, "%Y-%m-%d", &day);
	snprintf(r->op, sizeof r->op, "%s", op);
	snprintf(r->arch, sizeof r->arch, "%s", choice_text(explanation, b->s->of_model ? "model" : "arch"));
	snprintf(r->bucket, sizeof r->bucket, "%s", choice_text(explanation, "bucket"));
	snprintf(r->implementation, sizeof r->implementation, "%s", choice_text(candidate, "name"));
	snprintf(r->variant, sizeof r->variant, "%s", m->variant);
	snprintf(r->digest, sizeof r->digest, "%s", choice_text(candidate, "digest"));
	snprintf(r->device, sizeof r->device, "%s%s%s", choice_text(explanation, "model"), gpu ? " " : "",
	         gpu ? gpu_driver() : "");
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

static double *rate_of(bench *b, const char *implementation, const char *unit) {
	int i = 0;
	while (i < b->seen_count && (strcmp(b->seen[i].implementation, implementation) || strcmp(b->seen[i].unit, unit)))
		i++;
	if (i == SEEN_MOST) return NULL;
	if (i == b->seen_count) {
		snprintf(b->seen[i].implementation, sizeof b->seen[i].implementation, "%s", implementation);
		b->seen[i].unit = unit;
		b->seen_count++;
	}
	return &b->seen[i].rate;
}

/* On a GPU a fallback can be a hundred times slower than what would be chosen: where one call of it would take this many times
 * what is spent on a measurement, its row would cost minutes and say nothing new. */
enum { TOO_SLOW = 5 };

static bool too_slow(bench *b, const problem *p, const char *implementation) {
	const double *const rate = rate_of(b, implementation, unit_of(p));
	return gpu_stream().type != INGOT_CPU && rate && *rate > 0 && work_of(p) * 1e-9 / *rate > TOO_SLOW * b->s->seconds;
}

/* The plain reference is hundreds of times slower: beyond this its row would cost minutes and say nothing new. */
#define REFERENCE_FLOPS 3e9

static void bench_problem(bench *b, const char *name, const problem *p, int32_t threads) {
	const settings *s = b->s;
	char line[PROBLEM_TEXT], error[256];
	problem_print(p, line, sizeof line);
	call a;
	if (!make_call(&a, p, error, sizeof error)) {
		tool_failed(b->command, "%s %s: %s", name, line, error);
		b->failed++;
		release_call(&a);
		return;
	}
	const tool_operator op = (tool_operator)p->op;
	const ingot_options forced = options_of(p, s->backend, threads);
	cJSON *explanation = choice_json(op, a.params, &forced);
	const cJSON *winner = choice_winner(explanation), *candidate;
	if (!winner) {
		const char *const why = explanation ? choice_text(explanation, "because") : ingot_last_error();
		if (b->json) add_refused(b->json, name, line, threads, why);
		else print_refused(name, line, threads, why);
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
			if (!wins && too_slow(b, p, m.implementation)) continue;
			const ingot_status status = measure(&a, m.implementation, threads, s->seconds, &m);
			if (status != INGOT_OK) {
				tool_failed(b->command, "%s %s on %s: %s: %s", name, line, m.implementation, ingot_status_name(status),
				            ingot_last_error());
				b->failed++;
				continue;
			}
			double *const rate = rate_of(b, m.implementation, m.unit);
			if (rate) *rate = fmax(*rate, m.rate);
			b->measured++;
			if (b->json) add_json(b->json, name, line, threads, &m);
			else print_measured(name, line, threads, &m);
			keep_row(b, explanation, candidate, tool_operator_name(op), &m);
		}
	cJSON_Delete(explanation);
	release_call(&a);
	gpu_forget();
	/* Kept problem by problem: a run that ends early has done what it printed. */
	if (b->rows && b->row_count && !rows_merge(s->rows, b->rows, b->row_count, error, sizeof error)) {
		tool_failed(b->command, "%s", error);
		b->failed++;
		b->unwritten = true;
	}
}

/* A line of a suite: a name and a problem; '#' begins a remark, there or in place of a row. Without `times` it is only read.
 * False after a message. */
static bool bench_line(bench *b, const char *text, const char *where, int number, bool times) {
	char name[64], line[PROBLEM_TEXT], error[256];
	problem p;
	int end = 0;
	if (sscanf(text, "%63s %1023s %n", name, line, &end) != 2 || (text[end] && text[end] != '#')) {
		tool_usage(b->command, "%s line %d: \"%s\" is not a name and a problem", where, number, text);
		return false;
	}
	if (!problem_parse(line, &p, error, sizeof error)) {
		tool_usage(b->command, "%s line %d: %s", where, number, error);
		return false;
	}
	if (!times) return true;
	if (++b->problems < b->s->from) return true;
	if (b->s->only && !strstr(name, b->s->only) && !strstr(line, b->s->only)) return true;
	static int on_terminal = -1;
	if (on_terminal < 0) on_terminal = isatty(STDERR_FILENO) && !isatty(STDOUT_FILENO);
	if (on_terminal) fprintf(stderr, "\r%lld %s %-60s", (long long)b->problems, name, line);
	for (int i = 0; i < b->s->thread_counts; i++) bench_problem(b, name, &p, (int32_t)b->s->threads[i]);
	return true;
}

static bool bench_file(bench *b, const char *path) {
	FILE *f = fopen(path, "re");
	if (!f) {
		tool_usage(b->command, "--suite %s: %s", path, strerror(errno));
		return false;
	}
	char *text = NULL;
	size_t room = 0;
	ssize_t length = getdelim(&text, &room, 0, f);
	const bool unread = ferror(f) != 0, cut = length > 0 && !text[length - 1];
	bool good = !unread && !cut;
	if (unread) tool_usage(b->command, "--suite %s cannot be read: %s", path, strerror(errno));
	else if (cut) tool_usage(b->command, "--suite %s holds a zero byte: it is no text", path);
	if (length < 0) length = 0;
	/* All of it is read before any is timed: what is wrong at its end is no news for the end of hours. */
	for (int times = 0; good && times < 2; times++) {
		char *line = text, *const end = text + length;
		for (int number = 1; good && line < end; number++) {
			char *const stop = line + strcspn(line, "\r\n"), was = *stop;
			*stop = 0;
			if (line[strspn(line, " \t")] && line[0] != '#') good = bench_line(b, line, path, number, times);
			*stop = was;
			line = stop + (was == '\r' && stop[1] == '\n') + 1;
		}
	}
	free(text);
	fclose(f);
	return good;
}

static int run(const tool_command *command, int argc, char **argv) {
	settings s = {.seconds = NAN, .from = 1};
	const char *suite = NULL, *problem_text = NULL, *threads = NULL, *device = "cpu", *why;
	const tool_option options[] = {
		{"--device", "DEVICE", "cpu, or cuda:N", TOOL_TEXT, &device, 0, 0},
		{"--suite", "FILE", "a file of lines NAME PROBLEM [# remark]; else the built-in suite of the device", TOOL_TEXT,
	     &suite, 0, 0},
		{"--problem", "PROBLEM", "time this one problem", TOOL_TEXT, &problem_text, 0, 0},
		{"--only", "TEXT", "only rows whose name or problem holds this text", TOOL_TEXT, &s.only, 0, 0},
		{"--from", "N", "begin with the N-th problem of the suite, to go on where a run ended", TOOL_INTEGER, &s.from,
	     1, INT64_MAX},
		{"--threads", "LIST", "thread counts to use, as 1,2; else all this process may use", TOOL_TEXT, &threads, 0, 0},
		{"--backend", "NAME", "force a family, an implementation or a variant", TOOL_TEXT, &s.backend, 0, 0},
		{"--seconds", "X", "time spent on each measurement (0.4; on a GPU 0.02)", TOOL_NUMBER, &s.seconds, 0, 0},
		{"--rows", "FILE", "time every candidate and write tuning rows to FILE (tuning/ARCH.tsv)", TOOL_TEXT, &s.rows,
	     0, 0},
		{"--of-model", NULL,
	     "with --rows: of this model alone (tuning/MODEL.tsv), which is served by them before its architecture's",
	     TOOL_FLAG, &s.of_model, 0, 0},
		{"--json", NULL, "print JSON", TOOL_FLAG, &s.json, 0, 0},
		{0},
	};
	int count;
	const int stop = tool_parse(command, options, argc, argv, NULL, 0, &count);
	if (stop >= 0) return stop;
	if (suite && problem_text) return tool_usage(command, "--suite and --problem exclude each other");
	if (!gpu_open(device, &why)) return tool_usage(command, "--device %s: %s", device, why);
	if (s.backend && !tool_backend_known(s.backend)) return tool_usage(command, TOOL_UNKNOWN_BACKEND, s.backend);
	const ingot_stream stream = gpu_stream();
	const bool gpu = stream.type != INGOT_CPU;
	if (isnan(s.seconds)) s.seconds = gpu ? 0.02 : 0.4;
	if (s.seconds < 0) return tool_usage(command, "--seconds %g; allowed is 0 or more", s.seconds);
	if (threads && gpu) return tool_usage(command, "--threads are a CPU's; --device is %s", device);
	if (threads) {
		s.thread_counts = tool_integers(threads, 1, 1024, s.threads, THREADS_MOST);
		if (s.thread_counts < 1)
			return tool_usage(command, "--threads \"%s\" is no list of up to %d numbers from 1 to 1024", threads,
			                  THREADS_MOST);
	} else {
		int32_t all = 0;
		if (!gpu) ingot_device_describe(stream, NULL, 0, NULL, 0, &all);
		s.threads[0] = all;
		s.thread_counts = 1;
	}
	bench b = {.command = command, .s = &s};
	cJSON *root = NULL;
	char arch[64] = "", model[64] = "";
	ingot_device_describe(stream, arch, sizeof arch, model, sizeof model, NULL);
	char error[256];
	if (s.rows && (tool_check_writable(command, "--rows", s.rows) >= 0)) return TOOL_USAGE;
	if (s.of_model && !s.rows) return tool_usage(command, "--of-model says what --rows are of; there are none");
	if (s.rows && !rows_check(s.rows, s.of_model ? model : arch, false, error, sizeof error))
		return tool_usage(command, "--rows %s", error);
	if (s.json) {
		root = cJSON_CreateObject();
		cJSON_AddStringToObject(root, "version", ingot_version_string());
		cJSON_AddStringToObject(root, "arch", arch);
		cJSON_AddStringToObject(root, "model", model);
		if (gpu) cJSON_AddStringToObject(root, "driver", gpu_driver());
		b.json = cJSON_AddArrayToObject(root, "rows");
	} else {
		printf("ingot %s on %s (%s%s%s)\n", ingot_version_string(), arch, model, gpu ? ", driver " : "",
		       gpu ? gpu_driver() : "");
		print_head();
	}
	if (s.rows) b.rows = tool_alloc(sizeof *b.rows * ROWS_MOST);
	bool good = true;
	if (problem_text) {
		char text[PROBLEM_TEXT + 8];
		snprintf(text, sizeof text, "- %s", problem_text);
		good = bench_line(&b, text, "--problem", 1, true);
	} else if (suite) {
		good = bench_file(&b, suite);
	} else {
		const bench_lines *const lines = gpu ? &bench_suite_cuda : &bench_suite_cpu;
		for (int i = 0; good && i < lines->count; i++)
			good = bench_line(&b, lines->lines[i], "built-in suite", i + 1, true);
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
	if (good && b.row_count && !b.unwritten && !s.json)
		printf("%d tuning rows in %s; `ingot check --level 2 --rows %s` adds their evidence\n", b.row_count, s.rows,
		       s.rows);
	free(b.rows);
	if (good && !b.measured && !b.failed)
		return tool_usage(command, "nothing was timed: of %lld problems --from %lld%s%s%s leaves none",
		                  (long long)b.problems, (long long)s.from, s.only ? " --only \"" : "", s.only ? s.only : "",
		                  s.only ? "\"" : "");
	return !good ? TOOL_USAGE : b.failed ? TOOL_FAILED : TOOL_OK;
}

const tool_command tool_bench = {
	.name = "bench",
	.usage = "[options]",
	.summary = "time the rows of a suite beside what this processor can reach",
	.text =
		"Rates count query-key pairs exactly: 2 pairs (D + Dv) forward, 2 pairs (3 D + 2 Dv) backward; sequences are full where\n"
		"the problem gives no lengths (ql, kl). The limit is a loop of\n"
		"multiply-accumulates in registers, for decode a loop that reads K and V; both run between the repeats.\n"
		"On a GPU calls are timed by events, inputs in memory rather than in the cache; rows get the median.\n\n"
		"examples:\n"
		"  ingot bench --threads 1,2 --only C1\n"
		"  ingot bench --problem fwd:b1,h8,s2048,d64,bf16,causal --backend x86\n"
		"  ingot bench --rows tuning/avx512_bf16.tsv\n"
		"  ingot bench --device cuda:0 --rows tuning/sm_90a.tsv\n",
	.run = run,
};
