/* See gpu.h. The driver is opened by name, as the library does it; nothing of CUDA is needed to build the command. */
#include "gpu.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long address;

#define DRIVER(X)                                                                       \
	X(cuInit, (unsigned flags))                                                         \
	X(cuDeviceGet, (int *device, int ordinal))                                          \
	X(cuDevicePrimaryCtxRetain, (void **context, int device))                           \
	X(cuCtxSetCurrent, (void *context))                                                 \
	X(cuStreamCreate, (void **stream, unsigned flags))                                  \
	X(cuStreamSynchronize, (void *stream))                                              \
	X(cuMemAlloc_v2, (address * memory, size_t bytes))                                  \
	X(cuMemFree_v2, (address memory))                                                   \
	X(cuMemcpyHtoDAsync_v2, (address to, const void *from, size_t bytes, void *stream)) \
	X(cuMemcpyDtoHAsync_v2, (void *to, address from, size_t bytes, void *stream))       \
	X(cuEventCreate, (void **event, unsigned flags))                                    \
	X(cuEventRecord, (void *event, void *stream))                                       \
	X(cuEventElapsedTime, (float *milliseconds, void *start, void *end))
#define DECLARE(name, parameters) static int(*name) parameters;
DRIVER(DECLARE)
#undef DECLARE

static ingot_stream stream;
static address arena;
static size_t arena_bytes;

/* ---- what memory there is ------------------------------------------------------------------------------------------------- */

typedef struct piece {
	const unsigned char *memory;
	size_t bytes;
	address device; /* during a run */
	size_t run;     /* the run `device` is of */
} piece;

static piece *pieces;
static size_t piece_count, piece_room, run_number;

/* Memory that was freed and given out again replaces what was there: nobody tells when it is freed. */
void gpu_know(const void *memory, size_t bytes) {
	if (stream.type == INGOT_CPU) return;
	const unsigned char *const m = memory;
	size_t kept = 0;
	for (size_t i = 0; i < piece_count; i++)
		if (pieces[i].memory + pieces[i].bytes <= m || m + bytes <= pieces[i].memory) pieces[kept++] = pieces[i];
	piece_count = kept;
	if (piece_count == piece_room) {
		piece_room = piece_room ? 2 * piece_room : 256;
		pieces = realloc(pieces, piece_room * sizeof *pieces);
		if (!pieces) abort();
	}
	pieces[piece_count++] = (piece){m, bytes, 0, 0};
}

static piece *find(const void *memory) {
	const unsigned char *const m = memory;
	for (size_t i = piece_count; i-- > 0;)
		if (m >= pieces[i].memory && m <= pieces[i].memory + pieces[i].bytes) return &pieces[i];
	return NULL;
}

/* ---- opening --------------------------------------------------------------------------------------------------------------- */

bool gpu_open(const char *device, const char **why) {
	char *end;
	if (strcmp(device, "cpu") == 0) return true;
	*why = "allowed are cpu and cuda:N";
	if (strncmp(device, "cuda", 4) != 0 || (device[4] && device[4] != ':')) return false;
	const long ordinal = device[4] ? strtol(device + 5, &end, 10) : 0;
	if (device[4] && (end == device + 5 || *end || ordinal < 0 || ordinal > 1023)) return false;
	const ingot_stream wanted = {INGOT_CUDA, (int32_t)ordinal, NULL};
	if (ingot_device_describe(wanted, NULL, 0, NULL, 0, NULL) != INGOT_OK) {
		*why = ingot_last_error();
		return false;
	}
	*why = "the NVIDIA driver does not do what this command needs";
	void *const library = dlopen("libcuda.so.1", RTLD_NOW);
	if (!library) return false;
#define RESOLVE(name, parameters) \
	if (!(*(void **)&name = dlsym(library, #name))) return false;
	DRIVER(RESOLVE)
#undef RESOLVE
	int id;
	void *context, *handle;
	if (cuInit(0) || cuDeviceGet(&id, (int)ordinal) || cuDevicePrimaryCtxRetain(&context, id) ||
	    cuCtxSetCurrent(context) || cuStreamCreate(&handle, 1))
		return false;
	stream = (ingot_stream){INGOT_CUDA, (int32_t)ordinal, handle};
	return true;
}

ingot_stream gpu_stream(void) {
	return stream;
}

bool gpu_takes(const ingot_options *options) {
	return stream.type != INGOT_CPU && !(options && options->backend && strncmp(options->backend, "reference", 9) == 0);
}

/* ---- running --------------------------------------------------------------------------------------------------------------- */

/* Every params struct holds its tensors in one row. */
static const struct {
	size_t first, count;
} tensors[TOOL_OPERATORS] = {
#define SPAN(type, from, to) \
	{offsetof(type, from), (offsetof(type, to) - offsetof(type, from)) / sizeof(ingot_tensor) + 1}
	[TOOL_FWD] = SPAN(ingot_attn_fwd_params, q, dropout_offset_out),
	[TOOL_BWD] = SPAN(ingot_attn_bwd_params, q, dropout_offset_ptr),
	[TOOL_MERGE] = SPAN(ingot_attn_merge_params, out_parts, lse),
	[TOOL_APPEND] = SPAN(ingot_kv_append_params, k_new, page_indices),
	[TOOL_MASK] = SPAN(ingot_attn_dropout_mask_params, mask, dropout_offset_ptr),
#undef SPAN
};

static ingot_status broken(const char *what) {
	fprintf(stderr, "ingot: %s\n", what);
	return INGOT_DRIVER;
}

/* The device's address of a host pointer; its piece gets a place in the arena. */
static bool translate(void **data, size_t *used) {
	if (!*data) return true;
	piece *const p = find(*data);
	if (!p) return false;
	if (p->run != run_number) {
		p->run = run_number;
		p->device = arena + *used;
		*used += (p->bytes + 511) / 256 * 256;
	}
	*data = (void *)(uintptr_t)(p->device + (address)((const unsigned char *)*data - p->memory));
	return true;
}

static bool translate_all(tool_operator op, unsigned char *params, ingot_options *options, size_t *used) {
	run_number++;
	*used = 0;
	for (size_t i = 0; i < tensors[op].count; i++) {
		ingot_tensor *const t = (ingot_tensor *)(void *)(params + tensors[op].first) + i;
		if (t->dtype != INGOT_NONE && !translate(&t->data, used)) return false;
	}
	return translate(&options->workspace, used);
}

static bool copy(bool to_device) {
	for (size_t i = 0; i < piece_count; i++) {
		const piece *const p = &pieces[i];
		if (p->run != run_number) continue;
		if (to_device ? cuMemcpyHtoDAsync_v2(p->device, p->memory, p->bytes, stream.handle)
		              : cuMemcpyDtoHAsync_v2((void *)(uintptr_t)p->memory, p->device, p->bytes, stream.handle))
			return false;
	}
	return true;
}

static int compare(const void *a, const void *b) {
	const double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

/* Median seconds of one call, by events round each. */
static bool time_runs(tool_operator op, const void *params, const ingot_options *options, int repeats,
                      double *seconds) {
	void *start, *end;
	double *each = tool_alloc((size_t)repeats * sizeof *each);
	bool good = !cuEventCreate(&start, 0) && !cuEventCreate(&end, 0);
	for (int i = 0; i < repeats && good; i++) {
		float ms = 0;
		good = !cuEventRecord(start, stream.handle) && tool_run_on(op, params, stream, options) == INGOT_OK &&
		       !cuEventRecord(end, stream.handle) && !cuStreamSynchronize(stream.handle) &&
		       !cuEventElapsedTime(&ms, start, end);
		each[i] = (double)ms * 1e-3;
	}
	qsort(each, (size_t)repeats, sizeof *each, compare);
	*seconds = each[repeats / 2];
	free(each);
	return good;
}

ingot_status gpu_run(tool_operator op, const void *params, const ingot_options *given, int repeats, double *seconds) {
	unsigned char copied[4096];
	ingot_options options = *given;
	size_t used;
	const size_t size = tool_params_size(op);
	memcpy(copied, params, size);
	if (!translate_all(op, copied, &options, &used))
		return broken("a tensor lies in memory that the command did not allocate");
	if (used > arena_bytes) {
		if (arena) cuMemFree_v2(arena);
		arena_bytes = used * 2;
		if (cuMemAlloc_v2(&arena, arena_bytes)) return broken("the device has not enough memory");
		memcpy(copied, params, size);
		options = *given;
		if (!translate_all(op, copied, &options, &used)) return INGOT_INTERNAL;
	}
	if (!copy(true)) return broken("inputs cannot be copied to the device");
	ingot_status s = tool_run_on(op, copied, stream, &options);
	if (s == INGOT_OK && repeats > 0 && !time_runs(op, copied, &options, repeats, seconds))
		return broken("a timed run failed");
	/* also after a refusal: what it must not have written is compared by the caller */
	if (!copy(false) || cuStreamSynchronize(stream.handle)) return broken("the device failed after the call");
	return s;
}
