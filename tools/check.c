/* `ingot check`: which cases run, on which kernels, and what is said about them. */
#include "check.h"
#include "gpu.h"
#include "rows.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { GUARD = 4096 };

void *check_workspace(uint64_t bytes, int fill) {
	unsigned char *memory = tool_alloc_aligned(256, bytes + GUARD);
	if (fill == 1) memset(memory, 0xff, bytes);
	if (fill == 2)
		for (uint64_t i = 0; i + 4 <= bytes; i += 4) {
			const float large = 1e30f;
			memcpy(memory + i, &large, 4);
		}
	memset(memory + bytes, 0xc3, GUARD);
	return memory;
}

bool check_workspace_intact(const void *workspace, uint64_t bytes) {
	for (int i = 0; i < GUARD; i++)
		if (((const unsigned char *)workspace)[bytes + (uint64_t)i] != 0xc3) return false;
	return true;
}

void check_fail(check_run *run, check_kernel *kernel, const problem *p, uint64_t seed, const char *format, ...) {
	if (kernel) kernel->failed++;
	else run->broken++;
	if (run->printed++ >= run->most_failures) return;
	char line[PROBLEM_TEXT], text[CHECK_ERROR];
	problem_print(p, line, sizeof line);
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(text, sizeof text, format, arguments);
	va_end(arguments);
	fflush(stdout);
	fprintf(stderr, "FAIL %s: %s\n  again: ingot check --problem '%s' --seed %llu", kernel ? kernel->name : "case",
	        text, line, (unsigned long long)seed);
	fprintf(stderr, "%s%s\n", kernel ? " --backend " : "", kernel ? kernel->name : "");
	if (run->printed == run->most_failures)
		fprintf(stderr, "(further failures are counted, not printed; --failures N prints more)\n");
}

void check_refused(check_run *run, check_kernel *kernel, const problem *p) {
	kernel->refused++;
	snprintf(kernel->refusal, sizeof kernel->refusal, "%s", ingot_last_error());
	if (!run->verbose) return;
	char line[PROBLEM_TEXT];
	problem_print(p, line, sizeof line);
	printf("refused %s %s: %s\n", kernel->name, line, kernel->refusal);
}

void check_passed(check_run *run, check_kernel *kernel, const problem *p, double ratio) {
	kernel->cases++;
	if (ratio > kernel->worst || !*kernel->worst_case) {
		kernel->worst = ratio;
		problem_print(p, kernel->worst_case, sizeof kernel->worst_case);
	}
	if (!run->verbose) return;
	char line[PROBLEM_TEXT];
	problem_print(p, line, sizeof line);
	printf("pass %s %s: error ratio %.3f\n", kernel->name, line, ratio);
}

void check_small_case(check_run *run, const problem *p, uint64_t seed) {
	small_case c, yardstick;
	char error[CHECK_ERROR];
	if (!small_build(&c, p, seed, true, error, sizeof error)) {
		check_fail(run, NULL, p, seed, "the case cannot be made: %s", error);
		return;
	}
	const tool_operator op = (tool_operator)p->op;
	/* Merge has a yardstick: the textbook in the same types. */
	const bool measured = op == TOOL_MERGE && small_build(&yardstick, p, seed, true, error, sizeof error);
	if (measured) {
		const ingot_options options = tool_options("reference/attn_merge_reference", 0);
		const ingot_status status = tool_run(op, small_params(&yardstick), &options);
		if (status != INGOT_OK) {
			check_fail(run, NULL, p, seed, "reference/attn_merge_reference cannot run it: %s: %s",
			           ingot_status_name(status), ingot_last_error());
			small_release(&yardstick);
			small_release(&c);
			return;
		}
	}
	for (int i = 0; i < run->count; i++) {
		check_kernel *kernel = &run->kernels[i];
		if (kernel->op != op) continue;
		static const int32_t counts[] = {2, 1, 3, 7, 17};
		uint64_t bits = 0;
		bool good = true;
		double worst = 0;
		const int runs = run->level == 0 ? 2 : 5;
		for (int r = 0; good && r < runs; r++) {
			ingot_options options = tool_options(kernel->name, counts[r]);
			options.flags = INGOT_DETERMINISTIC;
			small_reset(&c);
			uint64_t bytes = 0;
			ingot_status status = INGOT_OK;
			if (r % 2 == 0) {
				status = tool_workspace(op, small_params(&c), &options, &bytes);
				if (status == INGOT_OK) options.workspace = check_workspace(bytes, r / 2 % 3);
				options.workspace_size = bytes;
			}
			if (status == INGOT_OK) status = tool_run(op, small_params(&c), &options);
			const bool intact = !options.workspace || check_workspace_intact(options.workspace, bytes);
			free(options.workspace);
			if (status == INGOT_UNSUPPORTED && r == 0) {
				check_refused(run, kernel, p);
				good = false;
				break;
			}
			const uint64_t now = small_hash(&c);
			double ratio;
			if (status != INGOT_OK) {
				check_fail(run, kernel, p, seed, "%s: %s", ingot_status_name(status), ingot_last_error());
				good = false;
			} else if (!intact) {
				check_fail(run, kernel, p, seed, "it wrote past the workspace it asked for");
				good = false;
			} else if (r == 0 && !small_verify(&c, measured ? &yardstick : NULL, &ratio, error, sizeof error)) {
				check_fail(run, kernel, p, seed, "%s", error);
				good = false;
			} else if (r > 0 && now != bits) {
				check_fail(run, kernel, p, seed, "deterministic, yet %d threads give other bits than 2", counts[r]);
				good = false;
			}
			if (r == 0) {
				bits = now;
				worst = ratio;
			}
		}
		if (good) check_passed(run, kernel, p, worst);
	}
	if (measured) small_release(&yardstick);
	small_release(&c);
}

static void tell_progress(check_run *run) {
	static int on_terminal = -1;
	if (on_terminal < 0) on_terminal = isatty(STDERR_FILENO);
	const double now = tool_now();
	if (run->quiet || now - run->told < (on_terminal ? 0.2 : 10)) return;
	run->told = now;
	int64_t failed = run->broken;
	for (int i = 0; i < run->count; i++) failed += run->kernels[i].failed;
	char total[32] = "";
	if (run->total) snprintf(total, sizeof total, " of %lld", (long long)run->total);
	fprintf(stderr, "%s%lld%s cases, %.0f s, %lld failed%s", on_terminal ? "\r" : "", (long long)run->done, total,
	        now - run->begun, (long long)failed, on_terminal ? "  " : "\n");
}

void check_case(check_run *run, const problem *p, uint64_t seed) {
	if (run->only) {
		char line[PROBLEM_TEXT];
		problem_print(p, line, sizeof line);
		if (!strstr(line, run->only)) return;
	}
	bool wanted = false;
	for (int i = 0; i < run->count; i++) wanted |= run->kernels[i].op == (tool_operator)p->op;
	if (!wanted) return;
	if (p->op == TOOL_FWD || p->op == TOOL_BWD) check_attention(run, p, seed);
	else check_small_case(run, p, seed);
	run->done++;
	tell_progress(run);
}

/* The kernels this machine runs that a forced name means. */
static int find_kernels(check_run *run, const char *backend) {
	ingot_implementation impl;
	for (int32_t i = 0; ingot_implementation_get(i, &impl) == INGOT_OK && run->count < CHECK_KERNELS; i++) {
		check_kernel *k = &run->kernels[run->count];
		snprintf(k->name, sizeof k->name, "%s/%s", impl.family, impl.name);
		const int op = tool_operator_parse(impl.operator_name);
		if (!impl.available || impl.device_type != gpu_stream().type || op < 0) continue;
		if (backend && strcmp(backend, impl.family) != 0 && strcmp(backend, impl.name) != 0 &&
		    strcmp(backend, k->name) != 0)
			continue;
		k->file = impl.name;
		k->op = (tool_operator)op;
		run->count++;
	}
	return run->count;
}

static int print_results(const check_run *run, bool json) {
	int64_t cases = 0, failed = run->broken;
	for (int i = 0; i < run->count; i++) {
		cases += run->kernels[i].cases + run->kernels[i].failed;
		failed += run->kernels[i].failed;
	}
	const int status = failed ? TOOL_FAILED : cases == 0 ? TOOL_INCONCLUSIVE : TOOL_OK;
	static const char *const words[] = {"PASS", "FAIL", "INCONCLUSIVE"};
	const double took = tool_now() - run->begun;
	if (json) {
		cJSON *root = cJSON_CreateObject();
		cJSON_AddStringToObject(root, "result", words[status]);
		cJSON_AddNumberToObject(root, "level", run->level);
		char seed[24];
		snprintf(seed, sizeof seed, "%llu", (unsigned long long)run->seed);
		cJSON_AddStringToObject(root, "seed", seed);
		cJSON_AddNumberToObject(root, "seconds", took);
		cJSON_AddNumberToObject(root, "cases", (double)run->done);
		cJSON_AddNumberToObject(root, "broken_cases", (double)run->broken);
		cJSON *list = cJSON_AddArrayToObject(root, "kernels");
		for (int i = 0; i < run->count; i++) {
			const check_kernel *k = &run->kernels[i];
			cJSON *item = cJSON_CreateObject();
			cJSON_AddStringToObject(item, "name", k->name);
			cJSON_AddNumberToObject(item, "passed", (double)k->cases);
			cJSON_AddNumberToObject(item, "refused", (double)k->refused);
			cJSON_AddNumberToObject(item, "failed", (double)k->failed);
			cJSON_AddNumberToObject(item, "worst_ratio", k->worst);
			cJSON_AddStringToObject(item, "worst_case", k->worst_case);
			cJSON_AddItemToArray(list, item);
		}
		char *text = cJSON_Print(root);
		puts(text);
		free(text);
		cJSON_Delete(root);
		return status;
	}
	printf("%-34s %7s %8s %7s %12s  %s\n", "kernel", "passed", "refused", "failed", "worst ratio", "its case");
	for (int i = 0; i < run->count; i++) {
		const check_kernel *k = &run->kernels[i];
		printf("%-34s %7lld %8lld %7lld %12.3f  %s\n", k->name, (long long)k->cases, (long long)k->refused,
		       (long long)k->failed, k->worst, k->worst_case);
		if (run->verbose && k->refused) printf("    last refusal: %s\n", k->refusal);
	}
	if (run->broken) printf("%lld cases could not be judged\n", (long long)run->broken);
	printf("%s: level %d, seed %llu, %lld cases, %.1f s\n", words[status], run->level, (unsigned long long)run->seed,
	       (long long)run->done, took);
	return status;
}

static void run_tiers(check_run *run, int64_t from, int64_t *index) {
	for (int t = 0; t < CHECK_TIERS && t <= run->level; t++)
		for (int i = 0; i < check_tiers[t].count; i++, ++*index) {
			problem p;
			char error[256];
			if (*index < from) continue;
			if (!problem_parse(check_tiers[t].lines[i], &p, error, sizeof error)) {
				fprintf(stderr, "FAIL tier %s: %s: %s\n", check_tiers[t].name, check_tiers[t].lines[i], error);
				run->broken++;
				continue;
			}
			check_case(run, &p, tool_hash(run->seed, 1, (uint64_t)*index));
		}
}

/* Random problems without end, or `most` of them from index `from` on. */
static void run_generated(check_run *run, int level, int64_t from, int64_t *index, double until) {
	const int64_t count = check_generated(level);
	for (int64_t i = 0; count < 0 || i < count; i++, ++*index) {
		if (*index < from) {
			if (count < 0) {
				i += from - *index - 1;
				*index = from - 1;
			}
			continue;
		}
		if (until > 0 && tool_now() > until) {
			fprintf(stderr, "stopped by --seconds; go on with --from %lld --seed %llu\n", (long long)*index,
			        (unsigned long long)run->seed);
			return;
		}
		problem p;
		const uint64_t seed = tool_hash(run->seed, 1, (uint64_t)*index);
		check_generate(level, i, seed, &p);
		check_case(run, &p, seed);
	}
}

static int run(const tool_command *command, int argc, char **argv) {
	check_run r = {.most_failures = 20, .seed = (uint64_t)(tool_now() * 1e6) ^ (uint64_t)getpid() << 40};
	const char *backend = NULL, *line = NULL, *rows = NULL, *device = "cpu", *why;
	int64_t level = 1, threads = 0, from = 0, seconds = 0;
	bool json = false;
	r.seed %= 1000000000;
	const tool_option options[] = {
		{"--level", "N",
	     "0 smoke (10 s), 1 every feature (1 min), 2 features in pairs and edges (minutes), 3 random without end",
	     TOOL_INTEGER, &level, 0, 3},
		{"--backend", "NAME", "only this family or implementation (see ingot list)", TOOL_TEXT, &backend, 0, 0},
		{"--device", "DEVICE", "cpu, or cuda:N", TOOL_TEXT, &device, 0, 0},
		{"--seed", "N", "of the random inputs; printed at the end of every run", TOOL_UNSIGNED, &r.seed, 0, 0},
		{"--only", "TEXT", "only cases whose line holds this text", TOOL_TEXT, &r.only, 0, 0},
		{"--problem", "PROBLEM", "one case, with --seed as its own seed", TOOL_TEXT, &line, 0, 0},
		{"--threads", "N", "threads of each first run; 0: all", TOOL_INTEGER, &threads, 0, 1024},
		{"--from", "INDEX", "go on at this case (with the same seed)", TOOL_INTEGER, &from, 0, INT64_MAX},
		{"--seconds", "N", "stop after so long; 0: never", TOOL_INTEGER, &seconds, 0, 1 << 30},
		{"--failures", "N", "how many failures to print", TOOL_INTEGER, &r.most_failures, 1, 1 << 30},
		{"--rows", "FILE", "write error ratio and passed cases into the tuning rows of FILE", TOOL_TEXT, &rows, 0, 0},
		{"--json", NULL, "print JSON", TOOL_FLAG, &json, 0, 0},
		{"--verbose", NULL, "a line for every case and kernel, refusals with their reasons", TOOL_FLAG, &r.verbose, 0,
	     0},
		{0},
	};
	int count;
	const int stop = tool_parse(command, options, argc, argv, NULL, 0, &count);
	if (stop >= 0) return stop;
	if (!gpu_open(device, &why)) return tool_usage(command, "--device %s: %s", device, why);
	r.level = (int)level;
	r.threads = (int32_t)threads;
	r.begun = r.told = tool_now();
	if (find_kernels(&r, backend) == 0)
		return tool_usage(command,
		                  backend ? "no kernel of this machine is named \"%s\"; see ingot list"
		                          : "this library has no kernel%s",
		                  backend ? backend : "");
	if (line) {
		problem p;
		char error[256];
		if (!problem_parse(line, &p, error, sizeof error)) return tool_usage(command, "%s", error);
		check_case(&r, &p, r.seed);
	} else {
		int64_t index = 0;
		const double until = seconds ? r.begun + (double)seconds : 0;
		for (int t = 0; t < CHECK_TIERS && t <= level; t++) r.total += check_tiers[t].count;
		for (int l = 1; l <= level && l < 3; l++) r.total += check_generated(l);
		if (level == 3 || r.only) r.total = 0;
		run_tiers(&r, from, &index);
		for (int l = 1; l <= level; l++) {
			if (l == 3 && from <= index) check_special(&r);
			run_generated(&r, l, from, &index, until);
		}
		if (level == 2) check_special(&r);
	}
	if (isatty(STDERR_FILENO)) fprintf(stderr, "\r                                                  \r");
	const int status = print_results(&r, json);
	if (rows) {
		char error[256];
		for (int i = 0; i < r.count; i++) {
			const check_kernel *k = &r.kernels[i];
			if (!rows_verify(rows, k->file, k->failed ? 0 : k->cases, k->worst, error, sizeof error))
				return tool_failed(command, "%s", error);
		}
	}
	return status;
}

const tool_command tool_check = {
	.name = "check",
	.usage = "[options]",
	.summary = "hold every kernel this machine runs against the fp64 reference",
	.text =
		"A result passes when its largest error is at most twice that of the textbook algorithm in the same type plus one\n"
		"unit in the last place (fp32: 1e-6), and the same in the 2-norm. Outputs are poisoned before a call and all memory\n"
		"round them is compared after it; every dead place of the inputs holds NaN. Nothing run: INCONCLUSIVE, status 2.\n\n"
		"examples:\n"
		"  ingot check                              every feature once\n"
		"  ingot check --level 2 --backend x86      pairs of features, tile edges, known faults\n"
		"  ingot check --level 3 --seed 7 --from 40000\n"
		"  ingot check --problem fwd:b2,hq4,hk2,sq33,sk65,d64,bf16,causal --seed 12\n",
	.run = run,
};
