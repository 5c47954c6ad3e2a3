/* The library's operators behind one signature a verb, so that the rest of the command can loop over them. */
#include "tool.h"

#include <stdlib.h>
#include <string.h>

#include "gpu.h"

static ingot_stream stream_of(const ingot_options *o) {
	return gpu_takes(o) ? gpu_stream() : (ingot_stream){0};
}

#define VERBS(op)                                                                                         \
	static ingot_status op##_run(const void *p, ingot_stream stream, const ingot_options *o) {            \
		return ingot_##op(p, stream, o);                                                                  \
	}                                                                                                     \
	static ingot_status op##_workspace(const void *p, const ingot_options *o, uint64_t *bytes) {          \
		return ingot_##op##_workspace(p, stream_of(o), o, bytes);                                         \
	}                                                                                                     \
	static ingot_status op##_prepare(const void *p, const ingot_options *o) {                             \
		return ingot_##op##_prepare(p, stream_of(o), o);                                                  \
	}                                                                                                     \
	static ingot_status op##_explain(const void *p, const ingot_options *o, int32_t format, char *buffer, \
	                                 size_t capacity, size_t *needed) {                                   \
		return ingot_##op##_explain(p, stream_of(o), o, format, buffer, capacity, needed);                \
	}
INGOT_OPERATOR_LIST(VERBS)

static const struct {
	const char *name;
	size_t size;
	ingot_status (*run)(const void *, ingot_stream, const ingot_options *);
	ingot_status (*workspace)(const void *, const ingot_options *, uint64_t *);
	ingot_status (*prepare)(const void *, const ingot_options *);
	ingot_status (*explain)(const void *, const ingot_options *, int32_t, char *, size_t, size_t *);
} operators[] = {
#define ENTRY(op) {#op, sizeof(ingot_##op##_params), op##_run, op##_workspace, op##_prepare, op##_explain},
	INGOT_OPERATOR_LIST(ENTRY)};

_Static_assert(sizeof operators / sizeof *operators == TOOL_OPERATORS, "tool_operator follows INGOT_OPERATOR_LIST");

const char *tool_operator_name(tool_operator op) {
	return operators[op].name;
}

bool tool_backend_known(const char *name) {
	ingot_implementation impl;
	for (int32_t i = 0; ingot_implementation_get(i, &impl) == INGOT_OK; i++) {
		char whole[160];
		snprintf(whole, sizeof whole, "%s/%s", impl.family, impl.name);
		const char *const names[] = {impl.family, impl.name, whole};
		for (int n = 0; n < 3; n++) {
			const size_t length = strlen(names[n]);
			if (strncmp(name, names[n], length) != 0 || (name[length] && name[length] != ':')) continue;
			if (!name[length]) return true;
			ingot_variant variant;
			for (int32_t v = 0; v < impl.variant_count; v++)
				if (ingot_variant_get(i, v, &variant) == INGOT_OK && strcmp(variant.name, name + length + 1) == 0)
					return true;
		}
	}
	return false;
}

int tool_operator_parse(const char *name) {
	for (int i = 0; i < TOOL_OPERATORS; i++)
		if (strcmp(operators[i].name, name) == 0) return i;
	return -1;
}

size_t tool_params_size(tool_operator op) {
	return operators[op].size;
}

ingot_status tool_run_on(tool_operator op, const void *params, ingot_stream stream, const ingot_options *options) {
	return operators[op].run(params, stream, options);
}

ingot_status tool_run(tool_operator op, const void *params, const ingot_options *options) {
	if (gpu_takes(options)) return gpu_run(op, params, options);
	return operators[op].run(params, (ingot_stream){0}, options);
}

ingot_status tool_workspace(tool_operator op, const void *params, const ingot_options *options, uint64_t *bytes) {
	return operators[op].workspace(params, options, bytes);
}

ingot_status tool_prepare(tool_operator op, const void *params, const ingot_options *options) {
	return operators[op].prepare(params, options);
}

char *tool_explain(tool_operator op, const void *params, const ingot_options *options, int32_t format,
                   ingot_status *status) {
	size_t needed = 0;
	*status = operators[op].explain(params, options, format, NULL, 0, &needed);
	if (*status != INGOT_OK) return NULL;
	char *text = tool_alloc(needed + 1);
	*status = operators[op].explain(params, options, format, text, needed + 1, &needed);
	if (*status != INGOT_OK) {
		free(text);
		return NULL;
	}
	return text;
}

ingot_options tool_options(const char *backend, int32_t threads) {
	return (ingot_options){.struct_size = sizeof(ingot_options), .backend = backend, .num_threads = threads};
}
