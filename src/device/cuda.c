/*
 * NVIDIA GPUs through libcuda, opened at the first GPU call; no CUDA header and no CUDA runtime. Code objects are loaded as
 * libraries, which belong to no context, so that streams of the primary context (PyTorch's too) and of contexts that a caller
 * made run the same kernels. Every call makes the stream's context current for its own length only.
 */
#include <ctype.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../support/error.h"
#include "../support/log.h"
#include "device.h"

/* ---- the driver's interface, as its documentation gives it ------------------------------------------------------------- */

typedef int CUresult, CUdevice;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUlib_st *CUlibrary;
typedef struct CUkern_st *CUkernel;
typedef unsigned long long CUdeviceptr;

enum {
	CUDA_SUCCESS = 0,
	CUDA_ERROR_OUT_OF_MEMORY = 2,
	CUDA_ERROR_INVALID_IMAGE = 200,
	CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
	CUDA_ERROR_NOT_FOUND = 500,
	ATTRIBUTE_MULTIPROCESSORS = 16,
	ATTRIBUTE_L2_BYTES = 38,
	ATTRIBUTE_MAJOR = 75,
	ATTRIBUTE_MINOR = 76,
	ATTRIBUTE_SHARED_OPTIN = 97,
	FUNCTION_STATIC_SHARED = 1,
	FUNCTION_DYNAMIC_SHARED_MOST = 8,
	LAUNCH_PROGRAMMATIC_SERIALIZATION = 6,
	MAP_UINT16 = 1,
	MAP_SWIZZLE_NONE = 0,
	MAP_SWIZZLE_128 = 3,
	MAP_PROMOTION_256 = 3
};

typedef struct CUlaunchAttribute {
	int id;
	union {
		int number;
		_Alignas(8) char bytes[64];
	} value;
} CUlaunchAttribute;

typedef struct CUlaunchConfig {
	unsigned grid[3], block[3], shared_bytes;
	CUstream stream;
	CUlaunchAttribute *attribute;
	unsigned attributes;
} CUlaunchConfig;

#define FUNCTIONS(X)                                                                                                \
	X(CUresult, cuInit, (unsigned flags))                                                                           \
	X(CUresult, cuGetErrorName, (CUresult error, const char **name))                                                \
	X(CUresult, cuGetErrorString, (CUresult error, const char **text))                                              \
	X(CUresult, cuDeviceGetCount, (int *count))                                                                     \
	X(CUresult, cuDeviceGet, (CUdevice * device, int ordinal))                                                      \
	X(CUresult, cuDeviceGetName, (char *name, int length, CUdevice device))                                         \
	X(CUresult, cuDeviceGetPCIBusId, (char *id, int length, CUdevice device))                                       \
	X(CUresult, cuDeviceGetAttribute, (int *value, int attribute, CUdevice device))                                 \
	X(CUresult, cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))                                   \
	X(CUresult, cuCtxGetCurrent, (CUcontext * context))                                                             \
	X(CUresult, cuCtxPushCurrent_v2, (CUcontext context))                                                           \
	X(CUresult, cuCtxPopCurrent_v2, (CUcontext * context))                                                          \
	X(CUresult, cuCtxGetDevice, (CUdevice * device))                                                                \
	X(CUresult, cuStreamGetCtx, (CUstream stream, CUcontext * context))                                             \
	X(CUresult, cuStreamIsCapturing, (CUstream stream, int *status))                                                \
	X(CUresult, cuLibraryLoadData,                                                                                  \
	  (CUlibrary * library, const void *code, int *jit, void **jit_values, unsigned jit_count, int *options,        \
	   void **option_values, unsigned option_count))                                                                \
	X(CUresult, cuLibraryUnload, (CUlibrary library))                                                               \
	X(CUresult, cuLibraryGetKernel, (CUkernel * kernel, CUlibrary library, const char *name))                       \
	X(CUresult, cuKernelGetAttribute, (int *value, int attribute, CUkernel kernel, CUdevice device))                \
	X(CUresult, cuKernelSetAttribute, (int attribute, int value, CUkernel kernel, CUdevice device))                 \
	X(CUresult, cuLaunchKernelEx, (const CUlaunchConfig *config, CUkernel kernel, void **parameters, void **extra)) \
	X(CUresult, cuTensorMapEncodeTiled,                                                                             \
	  (void *map, int type, unsigned rank, void *data, const uint64_t *extent, const uint64_t *stride_bytes,        \
	   const unsigned *box, const unsigned *element_stride, int interleave, int swizzle, int promotion, int fill))  \
	X(CUresult, cuMemAllocAsync, (CUdeviceptr * memory, size_t size, CUstream stream))                              \
	X(CUresult, cuMemFreeAsync, (CUdeviceptr memory, CUstream stream))

#define DECLARE(result, name, parameters) static result(*name) parameters;
FUNCTIONS(DECLARE)
#undef DECLARE

/* Errors that end a context: after one of them the driver answers every call with it. */
static bool loses_context(CUresult error) {
	static const short lost[] = {214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719};
	for (size_t i = 0; i < sizeof lost / sizeof *lost; i++)
		if (lost[i] == error) return true;
	return false;
}

static ingot_status report(ingot_status status, CUresult error, const char *what) {
	const char *name = NULL, *text = NULL;
	if (cuGetErrorName(error, &name) || !name) name = "an unknown CUDA error";
	if (cuGetErrorString(error, &text) || !text) text = "no text";
	return ingot__fail(status, "%s: %s (%d, %s)%s", what, name, error, text,
	                   loses_context(error) ? "; the device's context is lost, and with it every later call of this "
	                                          "process on the device"
	                                        : "");
}

/* Before anything was launched. */
static ingot_status driver_failed(CUresult error, const char *what) {
	return report(error == CUDA_ERROR_OUT_OF_MEMORY                                            ? INGOT_OUT_OF_MEMORY
	              : error == CUDA_ERROR_INVALID_IMAGE || error == CUDA_ERROR_NO_BINARY_FOR_GPU ? INGOT_IMAGE
	                                                                                           : INGOT_DRIVER,
	              error, what);
}

/* Where something may have been: INGOT_DRIVER is the one status that allows it. */
static ingot_status driver_failed_late(CUresult error, const char *what) {
	return report(INGOT_DRIVER, error, what);
}

/* ---- opening --------------------------------------------------------------------------------------------------------------- */

enum { DEVICES = 32 };
static ingot__device devices[DEVICES];
static struct {
	pthread_mutex_t lock;
	_Atomic(CUcontext) primary; /* NULL until the first call on the device */
	CUdevice device;
} states[DEVICES];
static int device_count;
static atomic_bool opened, forked;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static const ingot__driver driver;

static const struct {
	const char *name, *parent;
	int capability;
} rows[] = {
#define ARCH(name, parent, flags, capability) {#name, #parent, capability},
#include "../kernels/cuda/arch.def"
#undef ARCH
};
enum { ROWS = sizeof rows / sizeof *rows };

const char *ingot__cuda_arch_parent(const char *arch) {
	for (int i = 0; i < ROWS; i++)
		if (!strcmp(rows[i].name, arch)) return strcmp(rows[i].parent, "none") ? rows[i].parent : "";
	return NULL;
}

uint64_t ingot__cuda_arch_bit(const char *arch) {
	for (int i = 0; i < ROWS; i++)
		if (!strcmp(rows[i].name, arch)) return (uint64_t)1 << i;
	return 0;
}

static void in_child(void) {
	if (atomic_load(&opened)) atomic_store(&forked, true);
	pthread_mutex_init(&opening, NULL);
}

/* "NVIDIA H200" -> "h200" */
static void short_name(const char *name, char *out, size_t capacity) {
	if (!strncmp(name, "NVIDIA ", 7)) name += 7;
	size_t n = 0;
	for (; *name && n + 1 < capacity; name++) {
		if (isalnum((unsigned char)*name)) out[n++] = (char)tolower((unsigned char)*name);
		else if (n && out[n - 1] != '_') out[n++] = '_';
	}
	out[n] = 0;
}

static CUresult describe(int ordinal) {
	ingot__device *const d = &devices[ordinal];
	CUdevice device;
	int major = 0, minor = 0, shared = 0, l2 = 0;
	char name[128] = "", text[24], bus[32] = "";
	CUresult e = cuDeviceGet(&device, ordinal);
	if (!e) e = cuDeviceGetAttribute(&major, ATTRIBUTE_MAJOR, device);
	if (!e) e = cuDeviceGetAttribute(&minor, ATTRIBUTE_MINOR, device);
	if (!e) e = cuDeviceGetAttribute(&d->multiprocessors, ATTRIBUTE_MULTIPROCESSORS, device);
	if (!e) e = cuDeviceGetAttribute(&shared, ATTRIBUTE_SHARED_OPTIN, device);
	if (!e) e = cuDeviceGetAttribute(&l2, ATTRIBUTE_L2_BYTES, device);
	if (!e) e = cuDeviceGetName(name, sizeof name, device);
	if (!e) e = cuDeviceGetPCIBusId(bus, sizeof bus, device);
	if (e) return e;
	/* the last row of this major that is not above this minor; rows rise */
	int best = -1;
	for (int i = 0; i < ROWS; i++)
		if (rows[i].capability / 10 == major && rows[i].capability <= major * 10 + minor) best = i;
	d->type = INGOT_CUDA;
	d->ordinal = ordinal;
	d->arch_mask = 0;
	d->threads = 1;
	d->shared_most = (uint32_t)shared;
	d->l2_bytes = (uint64_t)l2;
	d->driver = &driver;
	const char *const arch_name = best < 0 ? "sm_unknown" : rows[best].name;
	snprintf(d->arch, sizeof d->arch, "%s", arch_name);
	for (const char *arch = d->arch; arch && *arch; arch = ingot__cuda_arch_parent(arch))
		d->arch_mask |= ingot__cuda_arch_bit(arch);
	short_name(name, text, sizeof text);
	snprintf(d->model, sizeof d->model, "%.22s_%s", arch_name, text);
	states[ordinal].device = device;
	pthread_mutex_init(&states[ordinal].lock, NULL);
	ingot__log(3, "CUDA device %d: %s, %s, compute capability %d.%d, %s", ordinal, name, bus, major, minor, d->arch);
	return CUDA_SUCCESS;
}

/* What failed is tried again at the next call: a driver that was out of memory may have some then. */
static ingot_status open_driver(void) {
	static void *library;
	static bool handles_fork;
	if (!library && !(library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)))
		return ingot__fail(INGOT_NO_DEVICE, "there is no NVIDIA driver: %.160s", dlerror());
#define RESOLVE(result, name, parameters)                                                                         \
	*(void **)&name = dlsym(library, #name);                                                                      \
	if (!name)                                                                                                    \
		return ingot__fail(INGOT_NO_DEVICE, "the NVIDIA driver has no %s; Ingot needs one of CUDA 12.0 or later", \
		                   #name);
	FUNCTIONS(RESOLVE)
#undef RESOLVE
	if (!handles_fork) handles_fork = pthread_atfork(NULL, NULL, in_child) == 0;
	int count = 0;
	CUresult e = cuInit(0);
	if (!e) e = cuDeviceGetCount(&count);
	if (count > DEVICES) count = DEVICES;
	for (int i = 0; i < count && !e; i++) e = describe(i);
	if (e) return report(INGOT_NO_DEVICE, e, "the NVIDIA driver does not start");
	if (!count) return ingot__fail(INGOT_NO_DEVICE, "the NVIDIA driver sees no device");
	device_count = count;
	atomic_store_explicit(&opened, true, memory_order_release);
	return INGOT_OK;
}

/* ---- contexts ------------------------------------------------------------------------------------------------------------ */

static ingot_status primary_context(int ordinal, CUcontext *context) {
	*context = atomic_load_explicit(&states[ordinal].primary, memory_order_acquire);
	if (*context) return INGOT_OK;
	pthread_mutex_lock(&states[ordinal].lock);
	CUresult e = CUDA_SUCCESS;
	*context = atomic_load(&states[ordinal].primary);
	if (!*context) {
		/* retained for the life of the process, as the CUDA runtime does */
		e = cuDevicePrimaryCtxRetain(context, states[ordinal].device);
		if (!e) atomic_store_explicit(&states[ordinal].primary, *context, memory_order_release);
	}
	pthread_mutex_unlock(&states[ordinal].lock);
	return e ? driver_failed(e, "the device's primary context cannot be had") : INGOT_OK;
}

/* The default streams (0, and the legacy and per-thread handles 1 and 2) belong to whatever context is current. */
static bool is_default(const void *stream) {
	return (uintptr_t)stream <= 2;
}

static ingot_status leave(const ingot__visit *v, ingot_status so_far) {
	CUcontext popped;
	if (!v->pushed) return so_far;
	const CUresult e = cuCtxPopCurrent_v2(&popped);
	if (!e) return so_far;
	(void)cuCtxPopCurrent_v2(&popped); /* the caller's context should come back whatever the first one failed of */
	return so_far ? so_far : driver_failed_late(e, "the caller's context cannot be restored");
}

/* Makes the context of a stream of the device current until leave(). */
static ingot_status enter(const ingot__device *device, void *stream, ingot__visit *v) {
	CUcontext want, now;
	CUresult e;
	v->pushed = false;
	ingot_status s = primary_context(device->ordinal, &want);
	if (s) return s;
	if (!is_default(stream)) {
		CUcontext own;
		if ((e = cuStreamGetCtx(stream, &own))) return driver_failed(e, "stream.handle is no stream of this process");
		if (own != want) {
			CUdevice of = -1;
			if ((e = cuCtxPushCurrent_v2(own))) return driver_failed(e, "the stream's context cannot be entered");
			e = cuCtxGetDevice(&of);
			v->pushed = true;
			s = leave(v, e ? driver_failed(e, "the stream's device cannot be told") : INGOT_OK);
			v->pushed = false;
			if (s) return s;
			if (of != states[device->ordinal].device)
				return ingot__fail(INGOT_INVALID,
				                   "stream.handle belongs to another device than stream.device, which is %d",
				                   device->ordinal);
			want = own;
		}
	}
	if ((e = cuCtxGetCurrent(&now))) return driver_failed(e, "the current context cannot be told");
	if (now == want) return INGOT_OK;
	if ((e = cuCtxPushCurrent_v2(want))) return driver_failed(e, "the device's context cannot be entered");
	v->pushed = true;
	return INGOT_OK;
}

/* ---- what launch.c and image.c use ----------------------------------------------------------------------------------- */

static ingot_status load(const ingot__device *device, const void *object, size_t size, const char *of, void **module) {
	(void)size; /* the object's own headers say it; pack.c verified every byte */
	ingot__visit v;
	ingot_status s = enter(device, NULL, &v);
	if (s) return s;
	CUlibrary library = NULL;
	const CUresult e = cuLibraryLoadData(&library, object, NULL, NULL, 0, NULL, NULL, 0);
	if (e) {
		char what[1024];
		snprintf(what, sizeof what, "%s: the driver refuses the image", of);
		s = driver_failed(e, what);
	}
	s = leave(&v, s);
	if (s && !e) (void)cuLibraryUnload(library);
	*module = library;
	return s;
}

static void unload(void *module) {
	(void)cuLibraryUnload(module);
}

static ingot_status function(const ingot__device *device, void *module, const char *of, const char *name,
                             uint32_t shared_bytes, void **out) {
	ingot__visit v;
	ingot_status s = enter(device, NULL, &v);
	if (s) return s;
	CUkernel kernel;
	const CUdevice id = states[device->ordinal].device;
	int fixed = 0;
	CUresult e = cuLibraryGetKernel(&kernel, module, name);
	const bool none = e == CUDA_ERROR_NOT_FOUND;
	if (!e) e = cuKernelGetAttribute(&fixed, FUNCTION_STATIC_SHARED, kernel, id);
	/* static shared memory counts against the same limit */
	if (!e) e = cuKernelSetAttribute(FUNCTION_DYNAMIC_SHARED_MOST, (int)shared_bytes - fixed, kernel, id);
	if (e) {
		char what[1024];
		snprintf(what, sizeof what, "%s: kernel %s cannot be prepared", of, name);
		s = none ? report(INGOT_IMAGE, e, what) : driver_failed(e, what);
	}
	s = leave(&v, s);
	if (!s) *out = kernel;
	return s;
}

static ingot_status encode(const ingot__tensor_map *maps, int count, unsigned char *arguments) {
	static const unsigned dense[4] = {1, 1, 1, 1};
	for (const ingot__tensor_map *m = maps; m < maps + count; m++) {
		_Alignas(64) unsigned char map[128];
		uint64_t extent[4], stride[3];
		for (int i = 0; i < 4; i++) extent[i] = (uint64_t)m->extent[i];
		for (int i = 0; i < 3; i++) stride[i] = (uint64_t)m->stride[i] * 2;
		const unsigned box[4] = {m->box[0], m->box[1], 1, 1};
		/* bits are moved, not numbers: any type of 16 bits serves */
		const CUresult e =
			cuTensorMapEncodeTiled(map, MAP_UINT16, 4, (void *)(uintptr_t)m->data, extent, stride, box, dense, 0,
		                           m->straight ? MAP_SWIZZLE_NONE : MAP_SWIZZLE_128, MAP_PROMOTION_256, 0);
		if (e) return driver_failed(e, "a tensor map cannot be made");
		memcpy(arguments + m->at, map, sizeof map);
	}
	return INGOT_OK;
}

static ingot_status launch(void *stream, void *kernel, const ingot__step *step, const void *arguments,
                           size_t arguments_size) {
	(void)arguments_size; /* image.c compared it with the image's */
	void *parameters[] = {(void *)(uintptr_t)arguments};
	CUlaunchAttribute early = {.id = LAUNCH_PROGRAMMATIC_SERIALIZATION, .value.number = 1};
	const CUlaunchConfig config = {.grid = {step->grid[0], step->grid[1], step->grid[2]},
	                               .block = {step->block[0], step->block[1], step->block[2]},
	                               .shared_bytes = step->shared_bytes,
	                               .stream = stream,
	                               .attribute = &early,
	                               .attributes = step->early};
	const CUresult e = cuLaunchKernelEx(&config, kernel, parameters, NULL);
	if (!e) return INGOT_OK;
	char what[96];
	snprintf(what, sizeof what, "kernel %.64s cannot be launched", step->kernel);
	return driver_failed_late(e, what);
}

static ingot_status alloc(void *stream, uint64_t size, void **memory) {
	CUdeviceptr p = 0;
	const CUresult e = cuMemAllocAsync(&p, size, stream);
	if (e) return driver_failed(e, "workspace cannot be allocated on the stream");
	*memory = (void *)(uintptr_t)p;
	return INGOT_OK;
}

static ingot_status release(void *stream, void *memory, ingot_status so_far) {
	const CUresult e = cuMemFreeAsync((CUdeviceptr)(uintptr_t)memory, stream);
	return so_far || !e ? so_far : driver_failed_late(e, "workspace cannot be freed on the stream");
}

static ingot_status capturing(void *stream, bool *out) {
	int status = 0;
	const CUresult e = cuStreamIsCapturing(stream, &status);
	if (e) return driver_failed(e, "the stream's capture state cannot be told");
	*out = status != 0;
	return INGOT_OK;
}

static const ingot__driver driver = {load, unload, function, enter, leave, encode, launch, alloc, release, capturing};

ingot_status ingot__cuda_get(ingot_stream stream, const ingot__device **device) {
	if (!atomic_load_explicit(&opened, memory_order_acquire)) {
		pthread_mutex_lock(&opening);
		const ingot_status s = atomic_load(&opened) ? INGOT_OK : open_driver();
		pthread_mutex_unlock(&opening);
		if (s) return s;
	}
	if (atomic_load_explicit(&forked, memory_order_relaxed))
		return ingot__fail(
			INGOT_NO_DEVICE,
			"this process was forked after its parent had used the NVIDIA driver, which then does not work here; "
			"fork before the first GPU call, or spawn");
	if (stream.device < 0 || stream.device >= device_count)
		return ingot__fail(INGOT_NO_DEVICE, "stream.device is %d; the driver sees %d device%s, numbered from 0",
		                   stream.device, device_count, device_count == 1 ? "" : "s");
	*device = &devices[stream.device];
	return INGOT_OK;
}
