/* `ingot check`: which cases run, on which kernels, and what is said about them. */
#include "check.h"
#include "gpu.h"
#include "rows.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
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

ingot_options check_reference(const check_run *run, const char *backend) {
	return tool_options(backend, run->jobs > 1 ? 1 : 0);
}

void check_fail(check_run *run, check_kernel *kernel, const problem *p, uint64_t seed, const char *format, ...) {
	pthread_mutex_lock(&run->lock);
	if (kernel) kernel->failed++;
	else run->broken++;
	if (run->printed++ < run->most_failures) {
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
	pthread_mutex_unlock(&run->lock);
}

void check_refused(check_run *run, check_kernel *kernel, const problem *p) {
	pthread_mutex_lock(&run->lock);
	kernel->refused++;
	snprintf(kernel->refusal, sizeof kernel->refusal, "%s", ingot_last_error());
	if (run->verbose) {
		char line[PROBLEM_TEXT];
		problem_print(p, line, sizeof line);
		printf("refused %s %s: %s\n", kernel->name, line, kernel->refusal);
	}
	pthread_mutex_unlock(&run->lock);
}

void check_passed(check_run *run, check_kernel *kernel, const problem *p, double ratio) {
	pthread_mutex_lock(&run->lock);
	kernel->cases++;
	if (ratio > kernel->worst || !*kernel->worst_case) {
		kernel->worst = ratio;
		problem_print(p, kernel->worst_case, sizeof kernel->worst_case);
	}
	if (run->verbose) {
		char line[PROBLEM_TEXT];
		problem_print(p, line, sizeof line);
		printf("pass %s %s: error ratio %.3f\n", kernel->name, line, ratio);
	}
	pthread_mutex_unlock(&run->lock);
}

void check_spent(check_run *run, check_kernel *kernel, double since) {
	pthread_mutex_lock(&run->lock);
	*(kernel ? &kernel->seconds : &run->reference_seconds) += tool_now() - since;
	pthread_mutex_unlock(&run->lock);
}

void check_small_case(check_run *run, const problem *p, uint64_t seed) {
	small_case c, yardstick;
	char error[CHECK_ERROR];
	const double begun = tool_now();
	if (!small_build(&c, p, seed, CASE_CHECK, error, sizeof error)) {
		check_fail(run, NULL, p, seed, "the case cannot be made: %s", error);
		return;
	}
	const tool_operator op = (tool_operator)p->op;
	/* Merge has a yardstick: the textbook in the same types. */
	const bool measured = op == TOOL_MERGE && small_build(&yardstick, p, seed, CASE_CHECK, error, sizeof error);
	if (measured) {
		const ingot_options options = check_reference(run, "reference/attn_merge_reference");
		const ingot_status status = tool_run(op, small_params(&yardstick), &options);
		if (status != INGOT_OK) {
			check_fail(run, NULL, p, seed, "reference/attn_merge_reference cannot run it: %s: %s",
			           ingot_status_name(status), ingot_last_error());
			small_release(&yardstick);
			small_release(&c);
			return;
		}
	}
	check_spent(run, NULL, begun);
	for (int i = 0; i < run->count; i++) {
		check_kernel *kernel = &run->kernels[i];
		if (kernel->op != op) continue;
		const double turn = tool_now();
		const int32_t counts[] = {run->threads, 1, 3, 7, 17};
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
				check_fail(run, kernel, p, seed, "deterministic, yet %d threads give other bits than %d%s", counts[r],
				           counts[0], counts[0] ? "" : " (all)");
				good = false;
			}
			if (r == 0) {
				bits = now;
				worst = ratio;
			}
		}
		if (good) check_passed(run, kernel, p, worst);
		check_spent(run, kernel, turn);
	}
	if (measured) small_release(&yardstick);
	small_release(&c);
}

/* Counts a case that is done, and says from time to time how far the run is. */
static void tell_progress(check_run *run) {
	static int on_terminal = -1;
	pthread_mutex_lock(&run->lock);
	run->done++;
	if (on_terminal < 0) on_terminal = isatty(STDERR_FILENO);
	const double now = tool_now();
	if (!run->quiet && now - run->told >= (on_terminal ? 0.2 : 10)) {
		run->told = now;
		int64_t failed = run->broken;
		for (int i = 0; i < run->count; i++) failed += run->kernels[i].failed;
		char total[32] = "";
		if (run->total) snprintf(total, sizeof total, " of %lld", (long long)run->total);
		fprintf(stderr, "%s%lld%s cases, %.0f s, %lld failed%s", on_terminal ? "\r" : "", (long long)run->done, total,
		        now - run->begun, (long long)failed, on_terminal ? "  " : "\n");
	}
	pthread_mutex_unlock(&run->lock);
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
		k->digest = impl.digest;
		k->op = (tool_operator)op;
		run->count++;
	}
	return run->count;
}

static const char *const words[] = {[TOOL_OK] = "PASS", [TOOL_FAILED] = "FAIL", [TOOL_INCONCLUSIVE] = "INCONCLUSIVE"};

static int verdict_of(const check_run *run) {
	int64_t cases = 0, failed = run->broken;
	for (int i = 0; i < run->count; i++) {
		cases += run->kernels[i].cases + run->kernels[i].failed;
		failed += run->kernels[i].failed;
	}
	return failed ? TOOL_FAILED : cases == 0 ? TOOL_INCONCLUSIVE : TOOL_OK;
}

/* The results as JSON, to be freed. */
static char *results_json(const check_run *run, double took) {
	const ingot_stream stream = gpu_stream();
	char arch[64] = "", model[64] = "", seed[24];
	ingot_device_describe(stream, arch, sizeof arch, model, sizeof model, NULL);
	snprintf(seed, sizeof seed, "%llu", (unsigned long long)run->seed);
	cJSON *root = cJSON_CreateObject();
	cJSON_AddStringToObject(root, "result", words[verdict_of(run)]);
	cJSON_AddStringToObject(root, "version", ingot_version_string());
	cJSON_AddStringToObject(root, "arch", arch);
	cJSON_AddStringToObject(root, "model", model);
	if (stream.type != INGOT_CPU) cJSON_AddStringToObject(root, "driver", gpu_driver());
	cJSON_AddNumberToObject(root, "level", run->level);
	cJSON_AddStringToObject(root, "seed", seed);
	cJSON_AddNumberToObject(root, "seconds", took);
	cJSON_AddNumberToObject(root, "jobs", run->jobs);
	cJSON_AddNumberToObject(root, "reference_seconds", run->reference_seconds);
	cJSON_AddNumberToObject(root, "cases", (double)run->done);
	cJSON_AddNumberToObject(root, "broken_cases", (double)run->broken);
	cJSON *list = cJSON_AddArrayToObject(root, "kernels");
	for (int i = 0; i < run->count; i++) {
		const check_kernel *k = &run->kernels[i];
		cJSON *item = cJSON_CreateObject();
		cJSON_AddStringToObject(item, "name", k->name);
		cJSON_AddStringToObject(item, "digest", k->digest);
		cJSON_AddNumberToObject(item, "passed", (double)k->cases);
		cJSON_AddNumberToObject(item, "refused", (double)k->refused);
		cJSON_AddNumberToObject(item, "failed", (double)k->failed);
		cJSON_AddNumberToObject(item, "worst_ratio", k->worst);
		cJSON_AddStringToObject(item, "worst_case", k->worst_case);
		cJSON_AddNumberToObject(item, "seconds", k->seconds);
		cJSON_AddItemToArray(list, item);
	}
	char *text = cJSON_Print(root);
	cJSON_Delete(root);
	return text;
}

static void print_results(const check_run *run, double took) {
	printf("%-34s %7s %8s %7s %8s %12s  %s\n", "kernel", "passed", "refused", "failed", "seconds", "worst ratio",
	       "its case");
	for (int i = 0; i < run->count; i++) {
		const check_kernel *k = &run->kernels[i];
		printf("%-34s %7lld %8lld %7lld %8.1f %12.3f  %s\n", k->name, (long long)k->cases, (long long)k->refused,
		       (long long)k->failed, k->seconds, k->worst, k->worst_case);
		if (run->verbose && k->refused) printf("    last refusal: %s\n", k->refusal);
	}
	printf("seconds are summed over %d case%s at a time; references and oracle took %.1f more\n", run->jobs,
	       run->jobs == 1 ? "" : "s", run->reference_seconds);
	if (run->broken) printf("%lld cases could not be judged\n", (long long)run->broken);
	printf("%s: level %d, seed %llu, %lld cases, %.1f s\n", words[verdict_of(run)], run->level,
	       (unsigned long long)run->seed, (long long)run->done, took);
}

/* ---- many cases ---- */

/* Cases in order: the lines of the tiers up to the level, then what is generated for level 2, then level 3 without end. */
static int64_t tier_cases(const check_run *run) {
	int64_t count = 0;
	for (int t = 0; t < CHECK_TIERS && t <= run->level; t++) count += check_tiers[t].count;
	return count;
}

static void numbered_case(check_run *run, int64_t index) {
	const uint64_t seed = tool_hash(run->seed, 1, (uint64_t)index);
	const int64_t tiers = tier_cases(run), pairs = check_generated(2);
	problem p;
	if (index < tiers) {
		char error[256];
		int t = 0;
		while (index >= check_tiers[t].count) index -= check_tiers[t++].count;
		if (!problem_parse(check_tiers[t].lines[index], &p, error, sizeof error)) {
			pthread_mutex_lock(&run->lock);
			fprintf(stderr, "FAIL tier %s: %s: %s\n", check_tiers[t].name, check_tiers[t].lines[index], error);
			run->broken++;
			pthread_mutex_unlock(&run->lock);
			return;
		}
	} else if (index - tiers < pairs) check_generate(2, index - tiers, seed, &p);
	else check_generate(3, index - tiers - pairs, seed, &p);
	check_case(run, &p, seed);
}

static void special_case(check_run *run, int64_t index) {
	check_special(run, index);
	tell_progress(run);
}

/* The cases [run->next, end), shared out to the threads. */
typedef struct phase {
	check_run *run;
	void (*one)(check_run *run, int64_t index);
	int64_t end;
	double until; /* 0: no limit */
} phase;

static void *work(void *argument) {
	const phase *const p = argument;
	for (;;) {
		pthread_mutex_lock(&p->run->lock);
		const int64_t index = p->run->next;
		const bool stop = index >= p->end || (p->until > 0 && tool_now() > p->until);
		p->run->next += !stop;
		pthread_mutex_unlock(&p->run->lock);
		if (stop) break;
		p->one(p->run, index);
		gpu_forget();
	}
	return NULL;
}

static void *work_and_leave(void *argument) {
	work(argument);
	gpu_leave();
	return NULL;
}

/* False when the time was over before all of them had begun. */
static bool run_phase(check_run *run, void (*one)(check_run *, int64_t), int64_t begin, int64_t end, double until) {
	phase p = {run, one, end, until};
	pthread_t thread[CHECK_JOBS];
	int started = 0;
	run->next = begin;
	while (started < run->jobs - 1 && !pthread_create(&thread[started], NULL, work_and_leave, &p)) started++;
	work(&p);
	for (int i = 0; i < started; i++) pthread_join(thread[i], NULL);
	return run->next >= end;
}

static void run_level(check_run *run, int64_t from, double until) {
	const int64_t finite = tier_cases(run) + (run->level < 2 ? 0 : check_generated(2));
	run->total = run->level == 3 || run->only ? 0 : finite + (run->level == 2 ? check_specials : 0);
	bool on = run_phase(run, numbered_case, from, from < finite ? finite : from, until);
	int64_t next = run->next;
	if (on && run->level >= 2 && from <= finite) on = run_phase(run, special_case, 0, check_specials, until);
	if (on && run->level == 3) {
		on = run_phase(run, numbered_case, next, INT64_MAX, until);
		next = run->next;
	}
	if (!on)
		fprintf(stderr, "stopped by --seconds; go on with --from %lld --seed %llu\n", (long long)next,
		        (unsigned long long)run->seed);
}

static int run(const tool_command *command, int argc, char **argv) {
	check_run r = {.most_failures = 20, .seed = (uint64_t)(tool_now() * 1e6) ^ (uint64_t)getpid() << 40};
	const char *backend = NULL, *line = NULL, *rows = NULL, *save = NULL, *device = "cpu", *why;
	int64_t level = 1, threads = 0, jobs = 0, from = 0, seconds = 0;
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
		{"--jobs", "N", "cases at a time (cpu: 1; a GPU: one a processor this process may run on)", TOOL_INTEGER, &jobs,
	     1, CHECK_JOBS},
		{"--from", "INDEX", "go on at this case (with the same seed)", TOOL_INTEGER, &from, 0, INT64_MAX},
		{"--seconds", "N", "stop after so long; 0: never", TOOL_INTEGER, &seconds, 0, 1 << 30},
		{"--failures", "N", "how many failures to print", TOOL_INTEGER, &r.most_failures, 1, 1 << 30},
		{"--rows", "FILE", "with --level 2: write error ratio and passed cases into the tuning rows of FILE", TOOL_TEXT,
	     &rows, 0, 0},
		{"--json", NULL, "print JSON", TOOL_FLAG, &json, 0, 0},
		{"--save", "FILE", "write the results to FILE, as --json prints them, whole or not at all", TOOL_TEXT, &save, 0,
	     0},
		{"--verbose", NULL, "a line for every case and kernel, refusals with their reasons", TOOL_FLAG, &r.verbose, 0,
	     0},
		{0},
	};
	int count;
	const int stop = tool_parse(command, options, argc, argv, NULL, 0, &count);
	if (stop >= 0) return stop;
	if (line && (from || seconds || r.only))
		return tool_usage(command, "%s chooses among many cases; --problem is one",
		                  from      ? "--from"
		                  : seconds ? "--seconds"
		                            : "--only");
	if (json && r.verbose) return tool_usage(command, "--json and --verbose exclude each other: a line is no JSON");
	if (!gpu_open(device, &why)) return tool_usage(command, "--device %s: %s", device, why);
	if (threads && gpu_stream().type != INGOT_CPU)
		return tool_usage(command, "--threads are a CPU's; --device is %s", device);
	if (!jobs) {
		int32_t processors = 1;
		ingot_device_describe((ingot_stream){0}, NULL, 0, NULL, 0, &processors);
		jobs = gpu_stream().type == INGOT_CPU ? 1 : processors < CHECK_JOBS ? processors : CHECK_JOBS;
	}
	struct stat is;
	const bool file = save && (stat(save, &is) != 0 || S_ISREG(is.st_mode) || S_ISDIR(is.st_mode));
	if (file && tool_check_writable(command, "--save", save) >= 0) return TOOL_USAGE;
	if (rows) {
		char arch[64] = "", model[64] = "", error[256];
		/* A row's evidence is the whole of level 2, of whichever kernels. */
		if (level != 2 || r.only || line || from || seconds)
			return tool_usage(
				command, "--rows needs --level 2, without --only, --problem, --from and --seconds: all of its cases");
		ingot_device_describe(gpu_stream(), arch, sizeof arch, model, sizeof model, NULL);
		if (tool_check_writable(command, "--rows", rows) >= 0) return TOOL_USAGE;
		if (!rows_check(rows, model, true, error, sizeof error) && !rows_check(rows, arch, true, error, sizeof error))
			return tool_usage(command, "--rows %s", error);
	}
	pthread_mutex_init(&r.lock, NULL);
	r.jobs = (int)jobs;
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
		run_level(&r, from, seconds ? r.begun + (double)seconds : 0);
	}
	if (isatty(STDERR_FILENO)) fprintf(stderr, "\r                                                  \r");
	const double took = tool_now() - r.begun;
	char *text = results_json(&r, took);
	if (json) puts(text);
	else print_results(&r, took);
	const size_t length = strlen(text);
	text[length] = '\n'; /* in the place of the 0 */
	const int saved = save ? tool_write_file(command, save, text, length + 1) : TOOL_OK;
	free(text);
	const int verdict = verdict_of(&r);
	if (verdict == TOOL_INCONCLUSIVE)
		tool_usage(command, "nothing was tested: %s",
		           r.done ? "every kernel refused; --verbose says why"
		           : line ? "the problem is of another operator than --backend"
		                  : "no case is left by --only, --from, --seconds and --backend");
	if (saved) return saved;
	if (rows) {
		char error[256];
		for (int i = 0; i < r.count; i++) {
			const check_kernel *k = &r.kernels[i];
			if (!rows_verify(rows, k->file, k->digest, k->failed ? 0 : k->cases, k->worst, error, sizeof error))
				return tool_failed(command, "%s", error);
		}
	}
	return verdict;
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
		"  ingot check                              # every feature once\n"
		"  ingot check --level 2 --backend x86      # pairs of features, tile edges, known faults\n"
		"  ingot check --level 3 --seed 7 --from 40000\n"
		"  ingot check --level 2 --device cuda:0    # every kernel of the pack\n"
		"  ingot check --problem fwd:b2,hq4,hk2,sq33,sk65,d64,bf16,causal --seed 12\n",
	.run = run,
};
