/*
 * What the subcommands of `ingot` share: the list of subcommands, options, messages, values of the storage types, the
 * library's operators by name, time, and the rates this machine can reach. The command uses the public header only.
 */
#ifndef INGOT_TOOL_H
#define INGOT_TOOL_H

#ifndef INGOT_EXPERIMENTAL
#define INGOT_EXPERIMENTAL
#endif
#include <ingot.h>
#include <stdbool.h>
#include <stdio.h>

#include <cjson/cJSON.h>

/* Exit statuses of every subcommand. */
enum { TOOL_OK = 0, TOOL_FAILED = 1, TOOL_INCONCLUSIVE = 2, TOOL_USAGE = 2 };

/* ---- subcommands and options (options.c) ---- */

typedef enum tool_kind {
	TOOL_FLAG,     /* bool * */
	TOOL_TEXT,     /* const char ** */
	TOOL_INTEGER,  /* int64_t *, within [low, high] */
	TOOL_UNSIGNED, /* uint64_t * */
	TOOL_NUMBER    /* double * */
} tool_kind;

typedef struct tool_option {
	const char *name;     /* "--dtype" */
	const char *argument; /* "TYPE"; NULL for a flag */
	const char *help;
	tool_kind kind;
	void *target;
	int64_t low, high;
} tool_option;

typedef struct tool_command {
	const char *name;
	const char *usage;   /* after "ingot NAME" */
	const char *summary; /* one line */
	const char *text;    /* what it does, with examples; NULL for none */
	int (*run)(const struct tool_command *command, int argc, char **argv);
} tool_command;

extern const tool_command tool_attn, tool_explain_command, tool_list, tool_check, tool_bench, tool_build, tool_image;

/* The whole command: argv[0] is the program. Returns the exit status. */
int tool_main(int argc, char **argv);

/* Reads the options of a subcommand (ended by one without a name) and up to `most` other words into words. Returns -1 to
 * go on, else the exit status: after --help, or after a message about what is wrong. */
int tool_parse(const tool_command *command, const tool_option *options, int argc, char **argv, const char **words,
               int most, int *count);

/* "ingot NAME: message" on stderr. Returns TOOL_USAGE or TOOL_FAILED for `return tool_...(...)`. */
int tool_usage(const tool_command *command, const char *format, ...) __attribute__((format(printf, 2, 3)));
int tool_failed(const tool_command *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* -1, or TOOL_USAGE after a message: whether a file could be put at the path that an option gives, before what takes long. */
int tool_check_writable(const tool_command *command, const char *option, const char *path);
/* Writes a file whole or not at all; what is no regular file (a pipe, /dev/null) as it goes. Returns TOOL_OK, or TOOL_FAILED
 * after a message. */
int tool_write_file(const tool_command *command, const char *path, const void *bytes, size_t size);

/* Comma-separated list of integers in [low, high]; their number, or -1. */
int tool_integers(const char *text, int64_t low, int64_t high, int64_t *values, int most);

/* ---- memory ---- */

/* Never NULL: a command that cannot get memory says so and ends. Zeroed; align is a power of two. */
void *tool_alloc(size_t bytes);
void *tool_alloc_aligned(size_t align, size_t bytes);

/* ---- values (values.c) ---- */

int tool_dtype_size(int32_t dtype);
const char *tool_dtype_name(int32_t dtype); /* "bf16" */
int32_t tool_dtype_parse(const char *name); /* INGOT_NONE if it is none */
bool tool_is_8bit(int32_t dtype);
float tool_load(const void *base, int64_t index, int32_t dtype);
void tool_store(void *base, int64_t index, int32_t dtype, float value);
/* One unit in the last place of the type at magnitude x. */
double tool_ulp(int32_t dtype, double x);
/* Random words and normal values that depend on (seed, stream, index) alone. */
uint64_t tool_hash(uint64_t seed, uint64_t stream, uint64_t index);
float tool_normal(uint64_t seed, uint64_t stream, uint64_t index);

/* A tensor over memory with dense strides. */
ingot_tensor tool_tensor(void *data, int32_t dtype, int ndim, const int64_t *shape);
int64_t tool_elements(const ingot_tensor *t);

/* ---- operators by name (operators.c) ---- */

typedef enum tool_operator { TOOL_FWD, TOOL_BWD, TOOL_MERGE, TOOL_APPEND, TOOL_MASK, TOOL_OPERATORS } tool_operator;

const char *tool_operator_name(tool_operator op); /* "attn_fwd" */
int tool_operator_parse(const char *name);        /* by the library's name; -1 */
/* Whether any implementation of the library is meant by it: a family, an implementation or a variant. */
bool tool_backend_known(const char *name);
#define TOOL_UNKNOWN_BACKEND "--backend \"%s\" names no family, implementation or variant; see ingot list"
/* With tensors in the command's memory, on the device that --device names; the reference always runs on the CPU. */
ingot_status tool_run(tool_operator op, const void *params, const ingot_options *options);
/* With tensors in the stream's memory, asynchronously on a GPU. */
ingot_status tool_run_on(tool_operator op, const void *params, ingot_stream stream, const ingot_options *options);
ingot_status tool_workspace(tool_operator op, const void *params, const ingot_options *options, uint64_t *bytes);
ingot_status tool_prepare(tool_operator op, const void *params, const ingot_options *options);
/* The explanation, to be freed; NULL with the status when the call itself is refused. */
char *tool_explain(tool_operator op, const void *params, const ingot_options *options, int32_t format,
                   ingot_status *status);
ingot_options tool_options(const char *backend, int32_t threads);

/* ---- time and this machine's rates (peak.c) ---- */

double tool_now(void); /* seconds */

/* GFLOP/s that a loop which only multiplies and accumulates in registers reaches on that many threads, in about 20 ms a
 * kind of instruction: fp32, and for bf16 also pairs summed in fp32, whichever is faster on this processor. *name says which
 * (NULL: not wanted). 0: unknown. */
double tool_peak(int32_t dtype, int threads, const char **name);
/* GB/s of a loop that only reads `bytes` of memory, on that many threads; one pass. */
double tool_read_rate(const void *memory, size_t bytes, int threads);

/* The built-in suites: the lines of bench/cpu.txt and bench/cuda.txt, made by the build. */
typedef struct bench_lines {
	const char *const *lines;
	int count;
} bench_lines;
extern const bench_lines bench_suite_cpu, bench_suite_cuda;

#endif
