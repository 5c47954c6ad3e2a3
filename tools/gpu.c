/* See gpu.h. The driver is opened by name, as the library does it; nothing of CUDA is needed to build the command. */
#include "gpu.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long address;

#define DRIVER(X)                                                                         \
	X(cuInit, (unsigned flags))                                                           \
	X(cuDeviceGet, (int *device, int ordinal))                                            \
	X(cuDeviceGetAttribute, (int *value, int attribute, int device))                      \
	X(cuDevicePrimaryCtxRetain, (void **context, int device))                             \
	X(cuCtxSetCurrent, (void *context))                                                   \
	X(cuStreamCreate, (void **stream, unsigned flags))                                    \
	X(cuStreamDestroy_v2, (void *stream))                                                 \
	X(cuStreamSynchronize, (void *stream))                                                \
	X(cuMemAlloc_v2, (address * memory, size_t bytes))                                    \
	X(cuMemAllocHost_v2, (void **memory, size_t bytes))                                   \
	X(cuMemFreeHost, (void *memory))                                                      \
	X(cuMemFree_v2, (address memory))                                                     \
	X(cuMemsetD8Async, (address memory, unsigned char value, size_t bytes, void *stream)) \
	X(cuMemcpyHtoDAsync_v2, (address to, const void *from, size_t bytes, void *stream))   \
	X(cuMemcpyDtoHAsync_v2, (void *to, address from, size_t bytes, void *stream))         \
	X(cuEventCreate, (void **event, unsigned flags))                                      \
	X(cuEventDestroy_v2, (void *event))                                                   \
	X(cuEventRecord, (void *event, void *stream))                                         \
	X(cuEventElapsedTime, (float *milliseconds, void *start, void *end))
#define DECLARE(name, parameters) static int(*name) parameters;
DRIVER(DECLARE)
#undef DECLARE

enum { ATTRIBUTE_L2_BYTES = 38 };

static ingot_stream opened; /* which device; no handle */
static void *context;
static size_t l2_bytes;
/* Threads share nothing: each has a stream, memory on the device, and what it allocated itself. */
static _Thread_local ingot_stream stream;
static _Thread_local address arena;
static _Thread_local size_t arena_bytes;
/* Host memory that the device reads and writes by itself: a small call's tensors travel through it in one copy each way, where
 * one a tensor costs the driver many times the call. */
enum { STAGE_BYTES = 16 << 20 };
static _Thread_local unsigned char *stage;

/* ---- what memory there is ------------------------------------------------------------------------------------------------- */

typedef struct piece {
	const unsigned char *memory;
	size_t bytes;
	address device; /* during a run */
	size_t run;     /* the run `device` is of */
} piece;

static _Thread_local piece *pieces;
static _Thread_local size_t piece_count, piece_room, run_number;

/* Memory that was freed and given out again replaces what was there: nobody tells when it is freed. */
void gpu_know(const void *memory, size_t bytes) {
	if (opened.type == INGOT_CPU) return;
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

void gpu_forget(void) {
	piece_count = 0;
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
	int id, l2 = 0;
	if (cuInit(0) || cuDeviceGet(&id, (int)ordinal) || cuDeviceGetAttribute(&l2, ATTRIBUTE_L2_BYTES, id) ||
	    cuDevicePrimaryCtxRetain(&context, id))
		return false;
	l2_bytes = (size_t)l2;
	opened = (ingot_stream){INGOT_CUDA, (int32_t)ordinal, NULL};
	return gpu_stream().handle != NULL;
}

ingot_stream gpu_stream(void) {
	if (opened.type == INGOT_CPU || stream.handle) return stream;
	void *handle = NULL;
	if (cuCtxSetCurrent(context) || cuStreamCreate(&handle, 1)) {
		fprintf(stderr, "ingot: the device gives no stream\n");
		return opened;
	}
	stream = opened;
	stream.handle = handle;
	return stream;
}

void gpu_leave(void) {
	if (arena) cuMemFree_v2(arena);
	if (stream.handle) cuStreamDestroy_v2(stream.handle);
	if (stage) cuMemFreeHost(stage);
	free(pieces);
	stage = NULL;
	stream.handle = NULL;
	arena = arena_bytes = 0;
	pieces = NULL;
	piece_count = piece_room = 0;
}

bool gpu_takes(const ingot_options *options) {
	return opened.type != INGOT_CPU && !(options && options->backend && strncmp(options->backend, "reference", 9) == 0);
}

/* The driver's interface tells a CUDA version only; its management library tells its own. */
const char *gpu_driver(void) {
	static char version[32];
	int (*init)(void), (*get)(char *, unsigned);
	void *const library = *version ? NULL : dlopen("libnvidia-ml.so.1", RTLD_NOW);
	if (!library) return version;
	*(void **)&init = dlsym(library, "nvmlInit_v2");
	*(void **)&get = dlsym(library, "nvmlSystemGetDriverVersion");
	if (!init || !get || init() || get(version, sizeof version)) *version = 0;
	return version;
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

/* The first `used` bytes of the arena to or from the pieces that lie there; waits for what comes back. */
static bool copy(bool to_device, size_t used) {
	const bool staged = used <= STAGE_BYTES;
	if (!used) return to_device || !cuStreamSynchronize(stream.handle);
	if (staged && !stage && cuMemAllocHost_v2((void **)&stage, STAGE_BYTES)) return false;
	if (staged && !to_device &&
	    (cuMemcpyDtoHAsync_v2(stage, arena, used, stream.handle) || cuStreamSynchronize(stream.handle)))
		return false;
	for (size_t i = 0; i < piece_count; i++) {
		const piece *const p = &pieces[i];
		void *const host = (void *)(uintptr_t)p->memory;
		if (p->run != run_number) continue;
		if (staged && to_device) memcpy(stage + (p->device - arena), host, p->bytes);
		else if (staged) memcpy(host, stage + (p->device - arena), p->bytes);
		else if (to_device ? cuMemcpyHtoDAsync_v2(p->device, host, p->bytes, stream.handle)
		                   : cuMemcpyDtoHAsync_v2(host, p->device, p->bytes, stream.handle))
			return false;
	}
	if (!to_device) return staged || !cuStreamSynchronize(stream.handle);
	return !staged || !cuMemcpyHtoDAsync_v2(arena, stage, used, stream.handle);
}

static int compare(const void *a, const void *b) {
	const double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

/* Gives everything the call can reach a place on the device and fills it. */
static ingot_status send(tool_operator op, const void *params, const ingot_options *given, unsigned char *copied,
                         ingot_options *options, size_t *used) {
	const size_t size = tool_params_size(op);
	if (!gpu_stream().handle) return INGOT_DRIVER;
	memcpy(copied, params, size);
	*options = *given;
	if (!translate_all(op, copied, options, used))
		return broken("a tensor lies in memory that the command did not allocate");
	if (*used > arena_bytes) {
		if (arena) cuMemFree_v2(arena);
		arena_bytes = *used * 2;
		if (cuMemAlloc_v2(&arena, arena_bytes)) {
			arena = arena_bytes = 0;
			return broken("the device has not enough memory");
		}
		memcpy(copied, params, size);
		*options = *given;
		if (!translate_all(op, copied, options, used)) return INGOT_INTERNAL;
	}
	return copy(true, *used) ? INGOT_OK : broken("inputs cannot be copied to the device");
}

enum { PARAMS_MOST = 4096 };

ingot_status gpu_run(tool_operator op, const void *params, const ingot_options *given) {
	unsigned char copied[PARAMS_MOST];
	ingot_options options;
	size_t used;
	ingot_status s = send(op, params, given, copied, &options, &used);
	if (s != INGOT_OK) return s;
	s = tool_run_on(op, copied, stream, &options);
	/* also after a refusal: what it must not have written is compared by the caller */
	return copy(false, used) ? s : broken("the device failed after the call");
}

ingot_status gpu_time(tool_operator op, const void *params, const ingot_options *given, double budget, int most,
                      double *times, int *count) {
	unsigned char copied[PARAMS_MOST];
	ingot_options options;
	void *start = NULL, *end = NULL;
	address flushed = 0;
	size_t used;
	double spent = 0;
	*count = 0;
	ingot_status s = send(op, params, given, copied, &options, &used);
	if (s == INGOT_OK) s = tool_run_on(op, copied, stream, &options);
	if (s != INGOT_OK) return s;
	bool good = !cuMemAlloc_v2(&flushed, 2 * l2_bytes + 1) && !cuEventCreate(&start, 0) && !cuEventCreate(&end, 0);
	while (good && s == INGOT_OK && *count < most && (!*count || spent < (*count < 3 ? 3 : 1) * budget)) {
		float ms = 0;
		good = !cuMemsetD8Async(flushed, (unsigned char)*count, 2 * l2_bytes + 1, stream.handle) &&
		       !cuEventRecord(start, stream.handle);
		if (good) s = tool_run_on(op, copied, stream, &options);
		good = good && s == INGOT_OK && !cuEventRecord(end, stream.handle) && !cuStreamSynchronize(stream.handle) &&
		       !cuEventElapsedTime(&ms, start, end);
		times[*count] = (double)ms * 1e-3;
		spent += times[(*count)++];
	}
	if (start) cuEventDestroy_v2(start);
	if (end) cuEventDestroy_v2(end);
	if (flushed) cuMemFree_v2(flushed);
	if (s == INGOT_OK && !good) return broken("a timed run failed");
	if (s == INGOT_OK) qsort(times, (size_t)*count, sizeof *times, compare);
	return s;
}
