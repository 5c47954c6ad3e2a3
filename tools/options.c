/*
 * The list of subcommands, their help, and how options are read: one table a subcommand, errors that name what is allowed.
 */
#include "tool.h"

#include <errno.h>
#include <libgen.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gpu.h"

static const tool_command *const commands[] = {&tool_attn,  &tool_explain_command, &tool_list, &tool_check,
                                               &tool_bench, &tool_build,           &tool_image};
enum { COMMANDS = sizeof commands / sizeof *commands };

static void print_help(FILE *to) {
	fprintf(to, "ingot %s: attention kernels, cast ahead of time\n\nusage: ingot COMMAND [options]\n\n",
	        ingot_version_string());
	for (int i = 0; i < COMMANDS; i++) fprintf(to, "  %-8s %s\n", commands[i]->name, commands[i]->summary);
	fprintf(to,
	        "\n`ingot COMMAND --help` says more. Exit status: 0 good, 1 failed, 2 wrong use or nothing was tested.\n"
	        "INGOT_NUM_THREADS sets the number of threads, INGOT_LOG (0 to 5) how much the library says on stderr.\n");
}

/* What the library says of a variable of its environment; its other errors are the subcommands' to tell. */
static void tell_variable(void *context, int32_t level, const char *message) {
	(void)context, (void)level;
	if (!strncmp(message, "INGOT_", 6)) fprintf(stderr, "ingot: %s\n", message);
}

/* On a full disk, results that are not there must not look like good ones. */
static int flushed(int status, const char *name) {
	const bool lost = fflush(stdout) != 0 || ferror(stdout);
	clearerr(stdout);
	if (status != TOOL_OK || !lost) return status;
	fprintf(stderr, "ingot%s%s: the output cannot be written\n", *name ? " " : "", name);
	return TOOL_FAILED;
}

int tool_main(int argc, char **argv) {
	const char *const log = getenv("INGOT_LOG");
	if (!log || !*log) ingot_set_log(1, tell_variable, NULL);
	if (argc < 2) {
		print_help(stderr);
		return TOOL_USAGE;
	}
	if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
		print_help(stdout);
		return flushed(TOOL_OK, "");
	}
	if (strcmp(argv[1], "--version") == 0) {
		printf("ingot %s\n", ingot_version_string());
		return flushed(TOOL_OK, "");
	}
	for (int i = 0; i < COMMANDS; i++)
		if (strcmp(argv[1], commands[i]->name) == 0)
			return flushed(commands[i]->run(commands[i], argc - 2, argv + 2), commands[i]->name);
	fprintf(stderr, "ingot: unknown command \"%s\"; allowed are", argv[1]);
	for (int i = 0; i < COMMANDS; i++) fprintf(stderr, "%s %s", i ? "," : "", commands[i]->name);
	fprintf(stderr, "\n");
	return TOOL_USAGE;
}

static void print_command_help(const tool_command *command, const tool_option *options) {
	printf("ingot %s %s\n%s\n\noptions:\n", command->name, command->usage, command->summary);
	for (const tool_option *o = options; o->name; o++) {
		char left[64];
		snprintf(left, sizeof left, "%s%s%s", o->name, o->argument ? " " : "", o->argument ? o->argument : "");
		printf("  %-24s %s\n", left, o->help);
	}
	printf("  %-24s %s\n", "--help", "this text");
	if (command->text) printf("\n%s", command->text);
}

static int complain(const tool_command *command, int status, const char *format, va_list arguments) {
	fflush(stdout); /* the message belongs after what was printed before it */
	fprintf(stderr, "ingot %s: ", command->name);
	vfprintf(stderr, format, arguments);
	fprintf(stderr, "\n");
	return status;
}

int tool_usage(const tool_command *command, const char *format, ...) {
	va_list arguments;
	va_start(arguments, format);
	const int status = complain(command, TOOL_USAGE, format, arguments);
	va_end(arguments);
	return status;
}

int tool_failed(const tool_command *command, const char *format, ...) {
	va_list arguments;
	va_start(arguments, format);
	const int status = complain(command, TOOL_FAILED, format, arguments);
	va_end(arguments);
	return status;
}

/* Whether the value was understood; *allowed says what would be. */
static bool read_value(const tool_option *o, const char *value, char *allowed, size_t capacity) {
	char *end;
	errno = 0;
	switch (o->kind) {
	case TOOL_FLAG: *(bool *)o->target = true; return true;
	case TOOL_TEXT: *(const char **)o->target = value; return true;
	case TOOL_INTEGER: {
		const long long x = strtoll(value, &end, 10);
		snprintf(allowed, capacity, "an integer from %lld to %lld", (long long)o->low, (long long)o->high);
		if (errno || end == value || *end || x < o->low || x > o->high) return false;
		*(int64_t *)o->target = x;
		return true;
	}
	case TOOL_UNSIGNED: {
		const unsigned long long x = strtoull(value, &end, 0);
		snprintf(allowed, capacity, "an integer from 0 to 2^64 - 1");
		if (errno || end == value || *end || *value == '-') return false;
		*(uint64_t *)o->target = x;
		return true;
	}
	case TOOL_NUMBER: {
		const double x = strtod(value, &end);
		snprintf(allowed, capacity, "a finite number");
		if (end == value || *end || !isfinite(x)) return false;
		*(double *)o->target = x;
		return true;
	}
	}
	return false;
}

int tool_parse(const tool_command *command, const tool_option *options, int argc, char **argv, const char **words,
               int most, int *count) {
	*count = 0;
	bool only_words = false;
	for (int i = 0; i < argc; i++) {
		const char *word = argv[i];
		if (!only_words && strcmp(word, "--") == 0) {
			only_words = true;
			continue;
		}
		if (!only_words && (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0)) {
			print_command_help(command, options);
			return TOOL_OK;
		}
		if (only_words || word[0] != '-' || word[1] == 0) {
			if (*count == most)
				return tool_usage(command, "one word too many: \"%s\"; usage: ingot %s %s", word, command->name,
				                  command->usage);
			words[(*count)++] = word;
			continue;
		}
		const size_t length = strcspn(word, "=");
		const tool_option *o = options;
		while (o->name && !(strlen(o->name) == length && strncmp(o->name, word, length) == 0)) o++;
		if (!o->name) {
			fprintf(stderr, "ingot %s: unknown option %.*s; allowed are", command->name, (int)length, word);
			for (o = options; o->name; o++) fprintf(stderr, " %s,", o->name);
			fprintf(stderr, " --help\n");
			return TOOL_USAGE;
		}
		const char *value = word[length] ? word + length + 1 : NULL;
		if (o->kind == TOOL_FLAG && value)
			return tool_usage(command, "%s takes no value, given \"%s\"", o->name, value);
		if (o->kind != TOOL_FLAG && !value) {
			if (i + 1 == argc)
				return tool_usage(command, "%s needs a value: %s %s (%s)", o->name, o->name, o->argument, o->help);
			value = argv[++i];
		}
		char allowed[96] = "";
		if (!read_value(o, value, allowed, sizeof allowed))
			return tool_usage(command, "%s \"%s\" is not %s", o->name, value, allowed);
	}
	return -1;
}

int tool_check_writable(const tool_command *command, const char *option, const char *path) {
	struct stat is;
	if (!*path) return tool_usage(command, "%s \"\" is no file", option);
	if (stat(path, &is) == 0 && !S_ISREG(is.st_mode))
		return tool_usage(command, "%s %s is %s", option, path,
		                  S_ISDIR(is.st_mode) ? "a folder" : "no regular file; it is not replaced");
	char *copy = strdup(path);
	const bool writable = copy && access(dirname(copy), W_OK | X_OK) == 0;
	free(copy);
	return writable ? -1 : tool_usage(command, "%s %s cannot be written: %s", option, path, strerror(errno));
}

int tool_write_file(const tool_command *command, const char *path, const void *bytes, size_t size) {
	struct stat is;
	const bool direct = stat(path, &is) == 0 && !S_ISREG(is.st_mode);
	const size_t room = strlen(path) + 32;
	char *const temporary = malloc(room);
	if (!temporary) return tool_failed(command, "%s cannot be written: out of memory", path);
	if (direct) snprintf(temporary, room, "%s", path);
	else snprintf(temporary, room, "%s.%ld", path, (long)getpid());
	FILE *f = fopen(temporary, "we");
	bool good = f && fwrite(bytes, 1, size, f) == size;
	int reason = errno;
	if (f && fclose(f) && good) reason = errno, good = false;
	if (good && !direct && rename(temporary, path)) reason = errno, good = false;
	if (!good && f && !direct) unlink(temporary);
	free(temporary);
	return good ? TOOL_OK : tool_failed(command, "%s cannot be written: %s", path, strerror(reason));
}

int tool_integers(const char *text, int64_t low, int64_t high, int64_t *values, int most) {
	int count = 0;
	for (const char *at = text;;) {
		char *end;
		errno = 0;
		const long long x = strtoll(at, &end, 10);
		if (errno || end == at || x < low || x > high || count == most || (*end && *end != ',')) return -1;
		values[count++] = x;
		if (!*end) return count;
		at = end + 1;
	}
}

void *tool_alloc_aligned(size_t align, size_t bytes) {
	void *memory = NULL;
	if (posix_memalign(&memory, align < sizeof(void *) ? sizeof(void *) : align, bytes ? bytes : 1) != 0) {
		fprintf(stderr, "ingot: out of memory (%zu bytes)\n", bytes);
		exit(TOOL_FAILED);
	}
	memset(memory, 0, bytes);
	gpu_know(memory, bytes);
	return memory;
}

void *tool_alloc(size_t bytes) {
	return tool_alloc_aligned(64, bytes);
}
