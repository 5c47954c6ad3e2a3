/* `ingot explain`: what the library would run for a problem, every other candidate, and why. Nothing is computed. */
#include "case.h"
#include "check_small.h"
#include "choice.h"
#include "gpu.h"

#include <stdlib.h>

static int run(const tool_command *command, int argc, char **argv) {
	const char *backend = NULL, *device = "cpu", *why;
	int64_t threads = 0;
	bool json = false, deterministic = false, strict = false;
	const tool_option options[] = {
		{"--backend", "NAME", "force a family, an implementation or a variant", TOOL_TEXT, &backend, 0, 0},
		{"--device", "DEVICE", "cpu, or cuda:N", TOOL_TEXT, &device, 0, 0},
		{"--threads", "N", "threads the call may use; 0: all", TOOL_INTEGER, &threads, 0, 1024},
		{"--deterministic", NULL, "ask for bitwise equal results", TOOL_FLAG, &deterministic, 0, 0},
		{"--strict", NULL, "fail where what would run is not verified on this device", TOOL_FLAG, &strict, 0, 0},
		{"--json", NULL, "print JSON", TOOL_FLAG, &json, 0, 0},
		{0},
	};
	const char *words[1];
	int count;
	const int stop = tool_parse(command, options, argc, argv, words, 1, &count);
	if (stop >= 0) return stop;
	if (!gpu_open(device, &why)) return tool_usage(command, "--device %s: %s", device, why);
	if (threads && gpu_stream().type != INGOT_CPU)
		return tool_usage(command, "--threads are a CPU's; --device is %s", device);
	if (backend && !tool_backend_known(backend)) return tool_usage(command, TOOL_UNKNOWN_BACKEND, backend);
	if (count == 0) return tool_usage(command, "no problem given; usage: ingot explain %s", command->usage);
	problem p;
	char error[256];
	if (!problem_parse(words[0], &p, error, sizeof error)) return tool_usage(command, "%s", error);
	ingot_options o = tool_options(backend, (int32_t)threads);
	o.flags = problem_flags(&p) | (deterministic ? INGOT_DETERMINISTIC : 0u) | (strict ? INGOT_STRICT : 0u);

	char *text = NULL;
	ingot_status status = INGOT_OK;
	const int32_t format = json ? INGOT_JSON : INGOT_TEXT;
	if (p.op == TOOL_FWD || p.op == TOOL_BWD) {
		test_case c;
		if (!case_build(&c, &p, 0, CASE_SHAPES, error, sizeof error)) return tool_usage(command, "%s", error);
		test_outputs forward, backward = {0};
		outputs_make(&forward, &c, true, false);
		if (p.op == TOOL_BWD) outputs_make(&backward, &c, false, false);
		const ingot_attn_fwd_params f = case_fwd(&c, &forward);
		const ingot_attn_bwd_params b = case_bwd(&c, &backward, &forward);
		text = tool_explain((tool_operator)p.op, p.op == TOOL_FWD ? (const void *)&f : &b, &o, format, &status);
		case_release(&c);
	} else {
		small_case c;
		if (!small_build(&c, &p, 0, CASE_SHAPES, error, sizeof error)) return tool_usage(command, "%s", error);
		text = tool_explain((tool_operator)p.op, small_params(&c), &o, format, &status);
		small_release(&c);
	}
	if (!text) return tool_failed(command, "%s: %s", ingot_status_name(status), ingot_last_error());
	printf("%s%s", text, json ? "\n" : "");
	free(text);
	return TOOL_OK;
}

static char help[4096];

static int run_with_help(const tool_command *command, int argc, char **argv) {
	snprintf(help, sizeof help,
	         "%s\nexamples:\n"
	         "  ingot explain fwd:b1,hq32,hk8,sq1,sk8192,d128,bf16,causal,softcap=30,paged=16\n"
	         "  ingot explain bwd:b4,h16,s1024,d64,f32,dropout=0.1 --backend x86 --json\n",
	         problem_grammar());
	tool_command with = *command;
	with.text = help;
	return run(&with, argc, argv);
}

const tool_command tool_explain_command = {
	.name = "explain",
	.usage = "PROBLEM [options]",
	.summary = "say what would run for a problem, and why every other candidate would not",
	.run = run_with_help,
};
