/*
 * The public functions. Each is one line: run() takes a call through check, device, choose, plan, image and launch, and stops
 * where its verb is answered, so that the four verbs of an operator cannot disagree.
 */
#include <stdio.h>
#include <string.h>

#include "pipeline.h"
#include "support/arithmetic.h"
#include "support/error.h"
#include "support/log.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)

int32_t ingot_version(void) {
	return INGOT_VERSION_NUMBER;
}

const char *ingot_version_string(void) {
	return STRING(INGOT_VERSION_MAJOR) "." STRING(INGOT_VERSION_MINOR) "." STRING(INGOT_VERSION_PATCH);
}

typedef enum verb { RUN, WORKSPACE, PREPARE, EXPLAIN } verb;

typedef struct answer {
	uint64_t *bytes;
	int32_t format;
	char *buffer;
	size_t capacity, *needed;
} answer;

static ingot_status need_answer(verb v, const answer *a) {
	if (v == WORKSPACE && !a->bytes) return ingot__fail(INGOT_INVALID, "bytes is NULL");
	if (v != EXPLAIN) return INGOT_OK;
	if (a->format != INGOT_TEXT && a->format != INGOT_JSON)
		return ingot__fail(INGOT_INVALID, "format is %d; allowed are 0 INGOT_TEXT and 1 INGOT_JSON", a->format);
	if (!a->buffer && a->capacity) return ingot__fail(INGOT_INVALID, "buffer is NULL but capacity is %zu", a->capacity);
	return INGOT_OK;
}

static ingot_status run(const char *function, ingot__operator op, verb v, const void *params, ingot_stream stream,
                        const ingot_options *given, const answer *a) {
	ingot_options options;
	ingot__problem problem;
	const ingot__device *device;
	ingot__choice choice;
	ingot__plan plan;
	ingot__functions functions;
	ingot_status s;

	if ((s = need_answer(v, a)) || (s = ingot__check_options(given, &options)) ||
	    (s = ingot__check(op, params, &options, v == RUN, &problem)) || (s = ingot__device_get(stream, &device)))
		return s;

	/* that nothing can run is what an explanation says, and no error of its call */
	ingot__error_quiet(v == EXPLAIN);
	s = ingot__choose(&problem, device, &options, &choice);
	ingot__error_quiet(false);
	const int threads = options.num_threads ? options.num_threads : device->threads;
	uint64_t bytes = 0;
	if (choice.impl) {
		memset(&plan, 0, offsetof(ingot__plan, arguments));
		plan.variant = choice.variant;
		choice.impl->plan(&problem, device, threads, &plan);
		bytes = ingot__launch_bytes(&plan, device, threads);
	}
	if (v == EXPLAIN) {
		if (s && s != INGOT_UNSUPPORTED && s != INGOT_IMAGE && s != INGOT_DEGRADED) return ingot__error_tell(s);
		ingot__explain(&problem, device, &choice, &plan, bytes, a->format, a->buffer, a->capacity, a->needed);
		return INGOT_OK;
	}
	if (s) return s;
	if (v == WORKSPACE) {
		*a->bytes = bytes;
		return INGOT_OK;
	}
	if ((s = ingot__image_load(&choice, &plan, device, &options, &functions))) return s;
	if (ingot__log_wants(3))
		ingot__log(3, "%s: %s/%s:%s (%s)", function, choice.impl->family, choice.impl->name,
		           ingot__variant_name(choice.impl, choice.variant), choice.because);
	if (ingot__log_wants(4))
		ingot__log(4, "%s: %d steps, %llu bytes of workspace, up to %d threads", function, plan.steps,
		           (unsigned long long)bytes, threads);
	if (v == PREPARE) return INGOT_OK;
	return ingot__launch(&problem, device, &options, stream, &plan, &functions, threads);
}

static ingot_status make_call(const char *function, ingot__operator op, verb v, const void *params, ingot_stream stream,
                              const ingot_options *given, const answer *a) {
	const ingot__arithmetic before = ingot__arithmetic_begin();
	ingot__error_begin(function);
	const ingot_status s = run(function, op, v, params, stream, given, a);
	ingot__arithmetic_end(before);
	if (!s)
		ingot__error_begin(function); /* a folder without packs, a candidate that cannot run: no error of this call */
	return s;
}

#define VERBS(op, OP)                                                                                               \
	ingot_status ingot_##op(const ingot_##op##_params *params, ingot_stream stream, const ingot_options *options) { \
		return make_call("ingot_" #op, INGOT__##OP, RUN, params, stream, options, NULL);                            \
	}                                                                                                               \
	ingot_status ingot_##op##_workspace(const ingot_##op##_params *params, ingot_stream stream,                     \
	                                    const ingot_options *options, uint64_t *bytes) {                            \
		const answer a = {.bytes = bytes};                                                                          \
		return make_call("ingot_" #op "_workspace", INGOT__##OP, WORKSPACE, params, stream, options, &a);           \
	}                                                                                                               \
	ingot_status ingot_##op##_prepare(const ingot_##op##_params *params, ingot_stream stream,                       \
	                                  const ingot_options *options) {                                               \
		return make_call("ingot_" #op "_prepare", INGOT__##OP, PREPARE, params, stream, options, NULL);             \
	}                                                                                                               \
	ingot_status ingot_##op##_explain(const ingot_##op##_params *params, ingot_stream stream,                       \
	                                  const ingot_options *options, int32_t format, char *buffer, size_t capacity,  \
	                                  size_t *needed) {                                                             \
		const answer a = {.format = format, .buffer = buffer, .capacity = capacity, .needed = needed};              \
		return make_call("ingot_" #op "_explain", INGOT__##OP, EXPLAIN, params, stream, options, &a);               \
	}

VERBS(attn_fwd, ATTN_FWD)
VERBS(attn_bwd, ATTN_BWD)
VERBS(attn_merge, ATTN_MERGE)
VERBS(kv_append, KV_APPEND)
VERBS(attn_dropout_mask, ATTN_DROPOUT_MASK)

ingot_status ingot_selection_digest(ingot_stream stream, uint64_t *digest) {
	ingot__error_begin("ingot_selection_digest");
	const ingot__device *device;
	if (!digest) return ingot__fail(INGOT_INVALID, "digest is NULL");
	ingot_status s = ingot__device_get(stream, &device);
	if (s) return s;
	uint64_t packs;
	if ((s = ingot__image_digest(device, &packs))) return s;
	uint64_t d = ingot__table_digest() ^ (uint64_t)ingot_version() ^ packs;
	for (const char *c = device->arch; *c; c++) d = (d ^ (unsigned char)*c) * 0x100000001b3u; /* FNV-1a */
	*digest = d;
	ingot__error_begin("ingot_selection_digest");
	return INGOT_OK;
}

ingot_status ingot_implementation_get(int32_t index, ingot_implementation *out) {
	static const char *const operator_names[INGOT__OPERATORS] = {"attn_fwd", "attn_bwd", "attn_merge", "kv_append",
	                                                             "attn_dropout_mask"};
	ingot__error_begin("ingot_implementation_get");
	if (!out) return ingot__fail(INGOT_INVALID, "implementation is NULL");
	ingot__error_quiet(true);
	if (index < 0 || index >= ingot__impl_count)
		return ingot__fail(INGOT_NOT_FOUND, "index is %d; this library has %d implementations", index,
		                   ingot__impl_count);
	const ingot__impl *const impl = ingot__impls[index];
	const ingot__device *device;
	const ingot_stream stream = {.type = impl->device};
	const bool available = ingot__device_get(stream, &device) == INGOT_OK && ingot__device_runs(device, impl->arch);
	ingot__error_begin("ingot_implementation_get");
	*out = (ingot_implementation){impl->name,
	                              impl->family,
	                              operator_names[impl->op],
	                              impl->arch,
	                              ingot__impl_digest(impl->name),
	                              impl->variant_count,
	                              impl->device,
	                              available,
	                              0};
	return INGOT_OK;
}

ingot_status ingot_variant_get(int32_t index, int32_t variant, ingot_variant *out) {
	ingot__error_begin("ingot_variant_get");
	if (!out) return ingot__fail(INGOT_INVALID, "out is NULL");
	ingot__error_quiet(true);
	if (index < 0 || index >= ingot__impl_count)
		return ingot__fail(INGOT_NOT_FOUND, "index is %d; this library has %d implementations", index,
		                   ingot__impl_count);
	const ingot__impl *const impl = ingot__impls[index];
	if (variant < 0 || variant >= impl->variant_count)
		return ingot__fail(INGOT_NOT_FOUND, "variant is %d; %s has %d", variant, impl->name, impl->variant_count);
	*out = (ingot_variant){.name = ingot__variant_name(impl, variant), .defines = ""};
	if (impl->images) {
		out->defines = impl->images[variant].defines;
		out->spill_bytes = impl->images[variant].spill_bytes;
		out->kernels = impl->kernels;
	}
	return INGOT_OK;
}

ingot_status ingot_device_describe(ingot_stream stream, char *arch, size_t arch_capacity, char *model,
                                   size_t model_capacity, int32_t *threads) {
	ingot__error_begin("ingot_device_describe");
	if ((!arch && arch_capacity) || (!model && model_capacity))
		return ingot__fail(INGOT_INVALID, "%s is NULL but its capacity is not 0",
		                   !arch && arch_capacity ? "arch" : "model");
	const ingot__device *device;
	ingot_status s = ingot__device_get(stream, &device);
	if (s) return s;
	if (arch_capacity) snprintf(arch, arch_capacity, "%s", device->arch);
	if (model_capacity) snprintf(model, model_capacity, "%s", device->model);
	if (threads) *threads = device->type == INGOT_CPU ? device->threads : 1;
	return INGOT_OK;
}
