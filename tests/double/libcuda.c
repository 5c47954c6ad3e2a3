/*
 * A double of the NVIDIA driver: a libcuda.so.1 with the entry points that Ingot asks for, which runs nothing. It stands beside
 * the tests on a real GPU (tests/device) and replaces none of them: no kernel is executed here, no result is computed, and
 * what it says of a driver is what the driver's documentation says.
 *
 * What it is good for: it loads the real images of real packs, reads from them what each kernel takes and needs, and holds
 * every launch against that; it counts what the library makes and gives back; and it returns any error at any call, which no
 * healthy GPU does. See double.h for how a test speaks to it.
 */
#include "double.h"

#include <elf.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int CUresult, CUdevice;
/* All of them are objects. The names are those of src/device/cuda.c, because a sanitizer compares the type that a function is
 * called by with its own. */
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUlib_st *CUlibrary;
typedef struct CUkern_st *CUkernel;
typedef unsigned long long CUdeviceptr;

enum {
	SUCCESS = 0,
	INVALID_VALUE = 1,
	OUT_OF_MEMORY = 2,
	NOT_INITIALIZED = 3,
	INVALID_DEVICE = 101,
	INVALID_IMAGE = 200,
	INVALID_CONTEXT = 201,
	NO_BINARY = 209,
	INVALID_HANDLE = 400,
	NOT_FOUND = 500,
	LAUNCH_OUT_OF_RESOURCES = 701,
	CONTEXT_IS_DESTROYED = 709
};

static const struct {
	int number;
	const char *name, *text;
} errors[] = {
	{SUCCESS, "CUDA_SUCCESS", "no error"},
	{INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
	{OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
	{NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
	{INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
	{INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
	{INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
	{NO_BINARY, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
	{INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
	{NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
	{700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
	{LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
	{CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
	{719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
	{999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

/* An H200, as a driver describes it. */
enum {
	MAJOR = 9,
	MINOR = 0,
	MULTIPROCESSORS = 132,
	L2_BYTES = 62914560,
	SHARED_DEFAULT = 49152,
	SHARED_OPTIN = 232448,
	REGISTERS = 65536,
	DEVICES = 8
};

/* ---- objects ------------------------------------------------------------------------------------------------------------ */

enum {
	CONTEXT = 0x43545844,
	STREAM = 0x5354524d,
	LIBRARY = 0x4c494252,
	KERNEL = 0x4b45524e,
	KERNELS = 8,
	PARAMETERS = 8
};

typedef struct object {
	unsigned kind;
	bool alive;
	int error; /* of a lost context */
	struct object *next;
	int device;             /* of a context */
	struct object *context; /* of a stream */
	bool capturing;
	struct object *library; /* of a kernel, and so all below */
	char name[64];
	unsigned parameter_size[PARAMETERS], parameters, threads_most, registers, fixed_shared;
	int dynamic_shared[DEVICES];
} object;

typedef struct allocation {
	struct allocation *next;
	void *memory;
	size_t bytes;
	int device;
} allocation;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static object *objects; /* never freed: a handle that outlived its object is told from one that never was */
static allocation *allocations;
static object *primary[DEVICES];
static int retained[DEVICES], device_count = 1;
static bool started;
static unsigned load_time;

enum { STACK = 16 };
static _Thread_local object *stack[STACK];
static _Thread_local int depth;

enum { CALLS = 65536, EVENTS = 256 };
static const char *calls[CALLS];
static long call_count;
static double_event events[EVENTS];
static int event_count;
static char faults[8192];

static struct {
	const char *entry;
	long left; /* calls until it happens; below 0: none is pending */
	int error;
	bool lost;
	const char *happened;
} injection = {.left = -1};

static object *make(unsigned kind) {
	object *const o = calloc(1, sizeof *o);
	if (!o) abort();
	o->kind = kind;
	o->alive = true;
	o->next = objects;
	objects = o;
	return o;
}

static object *find(const void *handle, unsigned kind) {
	for (object *o = objects; o; o = o->next)
		if (o == handle && o->kind == kind) return o;
	return NULL;
}

static int count(unsigned kind) {
	int n = 0;
	for (const object *o = objects; o; o = o->next) n += o->alive && o->kind == kind;
	return n;
}

__attribute__((format(printf, 1, 2))) static void fault(const char *format, ...) {
	const size_t have = strlen(faults);
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(faults + have, sizeof faults - have, format, arguments);
	va_end(arguments);
	strncat(faults, "\n", sizeof faults - strlen(faults) - 1);
}

static double_event *queue(double_kind kind, const object *context, void *stream) {
	/* what does not fit any more is counted only */
	double_event *const e = &events[event_count < EVENTS ? event_count : EVENTS - 1];
	event_count++;
	memset(e, 0, sizeof *e);
	e->kind = kind;
	e->device = context->device;
	e->context = (void *)(uintptr_t)context;
	e->stream = stream;
	return e;
}

/* ---- entering ------------------------------------------------------------------------------------------------------------ */

/* Counts a call and gives the error that was asked for; what is left is the call itself, under the lock. */
static CUresult arrive(const char *entry) {
	pthread_mutex_lock(&lock);
	if (call_count < CALLS) calls[call_count++] = entry;
	if (injection.left < 0 || (injection.entry && strcmp(injection.entry, entry)) || injection.left-- > 0)
		return SUCCESS;
	injection.happened = entry;
	if (injection.lost)
		for (object *o = objects; o; o = o->next)
			if (o->kind == CONTEXT) o->error = injection.error;
	return injection.error;
}

static CUresult leave(CUresult e) {
	pthread_mutex_unlock(&lock);
	return e;
}

#define CALL(name)                            \
	const CUresult injected_ = arrive(#name); \
	if (injected_) return leave(injected_);   \
	if (!started) return leave(NOT_INITIALIZED)

/* The context a stream's work goes to. */
static CUresult context_of(void *handle, object **context) {
	*context = depth ? stack[depth - 1] : NULL;
	if ((uintptr_t)handle > 2) {
		const object *const stream = find(handle, STREAM);
		if (!stream) {
			fault("%p is no stream", handle);
			return INVALID_HANDLE;
		}
		if (!stream->alive || !stream->context->alive) return CONTEXT_IS_DESTROYED;
		/* A driver would take the stream's own; the library promises to make it current. */
		if (*context != stream->context) fault("the stream's context is not current");
		*context = stream->context;
	}
	if (!*context) return INVALID_CONTEXT;
	if (!(*context)->alive) return CONTEXT_IS_DESTROYED;
	return (*context)->error;
}

#define EXPORT __attribute__((visibility("default")))
#define ENTRY(result, name, parameters) \
	EXPORT result name parameters;      \
	EXPORT result name parameters

/* ---- start and devices --------------------------------------------------------------------------------------------------- */

ENTRY(CUresult, cuInit, (unsigned flags)) {
	const CUresult e = arrive("cuInit");
	if (e) return leave(e);
	started = true;
	return leave(flags ? INVALID_VALUE : SUCCESS);
}

ENTRY(CUresult, cuGetErrorName, (CUresult error, const char **name)) {
	const CUresult e = arrive("cuGetErrorName");
	*name = e ? NULL : double_error_name(error);
	return leave(*name ? SUCCESS : INVALID_VALUE);
}

ENTRY(CUresult, cuGetErrorString, (CUresult error, const char **text)) {
	const CUresult e = arrive("cuGetErrorString");
	*text = NULL;
	for (size_t i = 0; i < sizeof errors / sizeof *errors && !e; i++)
		if (errors[i].number == error) *text = errors[i].text;
	return leave(*text ? SUCCESS : INVALID_VALUE);
}

ENTRY(CUresult, cuDeviceGetCount, (int *number)) {
	CALL(cuDeviceGetCount);
	*number = device_count;
	return leave(SUCCESS);
}

static bool is_device(CUdevice device) {
	return device >= 0 && device < device_count;
}

ENTRY(CUresult, cuDeviceGet, (CUdevice * device, int ordinal)) {
	CALL(cuDeviceGet);
	if (!is_device(ordinal)) return leave(INVALID_DEVICE);
	*device = ordinal;
	return leave(SUCCESS);
}

ENTRY(CUresult, cuDeviceGetName, (char *name, int length, CUdevice device)) {
	CALL(cuDeviceGetName);
	if (!is_device(device)) return leave(INVALID_DEVICE);
	snprintf(name, (size_t)length, "NVIDIA H200");
	return leave(SUCCESS);
}

ENTRY(CUresult, cuDeviceGetPCIBusId, (char *id, int length, CUdevice device)) {
	CALL(cuDeviceGetPCIBusId);
	if (!is_device(device)) return leave(INVALID_DEVICE);
	snprintf(id, (size_t)length, "0000:%02x:00.0", device + 1);
	return leave(SUCCESS);
}

ENTRY(CUresult, cuDeviceGetAttribute, (int *value, int attribute, CUdevice device)) {
	CALL(cuDeviceGetAttribute);
	if (!is_device(device)) return leave(INVALID_DEVICE);
	static const struct {
		int attribute, value;
	} known[] = {{1, 1024},      {8, SHARED_DEFAULT}, {12, REGISTERS}, {16, MULTIPROCESSORS},
	             {38, L2_BYTES}, {75, MAJOR},         {76, MINOR},     {97, SHARED_OPTIN}};
	for (size_t i = 0; i < sizeof known / sizeof *known; i++)
		if (known[i].attribute == attribute) {
			*value = known[i].value;
			return leave(SUCCESS);
		}
	fault("the double knows no device attribute %d", attribute);
	return leave(INVALID_VALUE);
}

/* ---- contexts and streams -------------------------------------------------------------------------------------------------- */

static object *primary_of(int device) {
	if (!primary[device]) {
		primary[device] = make(CONTEXT);
		primary[device]->device = device;
	}
	return primary[device];
}

ENTRY(CUresult, cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device)) {
	CALL(cuDevicePrimaryCtxRetain);
	if (!is_device(device)) return leave(INVALID_DEVICE);
	retained[device]++;
	*context = (CUcontext)primary_of(device);
	return leave(primary[device]->error);
}

ENTRY(CUresult, cuCtxGetCurrent, (CUcontext * context)) {
	CALL(cuCtxGetCurrent);
	*context = depth ? (CUcontext)stack[depth - 1] : NULL;
	return leave(SUCCESS);
}

ENTRY(CUresult, cuCtxPushCurrent_v2, (CUcontext handle)) {
	CALL(cuCtxPushCurrent_v2);
	object *const context = find(handle, CONTEXT);
	if (!context) {
		fault("%p is no context", (void *)handle);
		return leave(INVALID_CONTEXT);
	}
	if (!context->alive) return leave(CONTEXT_IS_DESTROYED);
	if (depth == STACK) {
		fault("contexts are pushed and never popped");
		return leave(INVALID_CONTEXT);
	}
	stack[depth++] = context;
	return leave(SUCCESS);
}

ENTRY(CUresult, cuCtxPopCurrent_v2, (CUcontext * context)) {
	CALL(cuCtxPopCurrent_v2);
	if (!depth) {
		fault("a context is popped that nobody pushed");
		return leave(INVALID_CONTEXT);
	}
	*context = (CUcontext)stack[--depth];
	return leave(SUCCESS);
}

ENTRY(CUresult, cuCtxGetDevice, (CUdevice * device)) {
	CALL(cuCtxGetDevice);
	if (!depth) return leave(INVALID_CONTEXT);
	*device = stack[depth - 1]->device;
	return leave(SUCCESS);
}

ENTRY(CUresult, cuStreamGetCtx, (CUstream handle, CUcontext *context)) {
	CALL(cuStreamGetCtx);
	const object *const stream = find(handle, STREAM);
	if (!stream) {
		fault("%p is no stream", (void *)handle);
		return leave(INVALID_HANDLE);
	}
	if (!stream->alive || !stream->context->alive) return leave(CONTEXT_IS_DESTROYED);
	*context = (CUcontext)stream->context;
	return leave(stream->context->error);
}

ENTRY(CUresult, cuStreamIsCapturing, (CUstream handle, int *status)) {
	CALL(cuStreamIsCapturing);
	object *context;
	const CUresult e = context_of(handle, &context);
	const object *const stream = find(handle, STREAM);
	*status = stream && stream->capturing;
	return leave(e);
}

/* ---- images ------------------------------------------------------------------------------------------------------------------ */

/* What nvcc writes beside a kernel's code: a run of (format, attribute, size or 16-bit value, bytes). */
enum {
	INFO_MAX_THREADS = 0x05,
	INFO_PARAMETER = 0x17,
	INFO_REGISTERS = 0x2f,
	MACHINE_CUDA = 190,
};

typedef struct image {
	const unsigned char *bytes;
	const Elf64_Ehdr *head;
	const Elf64_Shdr *section;
	const char *names;
} image;

static const Elf64_Shdr *section_of(const image *i, const char *prefix, const char *name) {
	char full[160];
	snprintf(full, sizeof full, "%s%s", prefix, name);
	for (unsigned s = 0; s < i->head->e_shnum; s++)
		if (!strcmp(i->names + i->section[s].sh_name, full)) return &i->section[s];
	return NULL;
}

static void read_info(const image *i, const Elf64_Shdr *info, object *kernel, unsigned symbol) {
	const unsigned char *at = i->bytes + info->sh_offset, *const end = at + info->sh_size;
	while (end - at >= 4) {
		const unsigned format = at[0], name = at[1], size = at[2] | (unsigned)at[3] << 8;
		at += 4;
		if (format != 4) continue;
		unsigned word[3] = {0};
		memcpy(word, at, size < sizeof word ? size : sizeof word);
		if (name == INFO_MAX_THREADS) kernel->threads_most = word[0] * word[1] * word[2];
		/* ordinal and offset, 16 bits each; the size above 18 bits of properties */
		if (name == INFO_PARAMETER && (word[1] & 0xffff) < PARAMETERS) {
			kernel->parameter_size[word[1] & 0xffff] = word[2] >> 18;
			if (kernel->parameters <= (word[1] & 0xffff)) kernel->parameters = (word[1] & 0xffff) + 1;
		}
		if (name == INFO_REGISTERS && word[0] == symbol) kernel->registers = word[1];
		at += size;
	}
}

static unsigned symbol_of(const image *i, const char *name) {
	const Elf64_Shdr *const symbols = section_of(i, ".symtab", ""), *const text = section_of(i, ".strtab", "");
	if (!symbols || !text) return 0;
	const Elf64_Sym *const s = (const Elf64_Sym *)(const void *)(i->bytes + symbols->sh_offset);
	for (unsigned n = 0; n < symbols->sh_size / sizeof *s; n++)
		if (!strcmp((const char *)i->bytes + text->sh_offset + s[n].st_name, name)) return n;
	return 0;
}

static CUresult read_image(const void *code, object *library) {
	image i = {.bytes = code, .head = code};
	if (memcmp(i.head->e_ident, ELFMAG, SELFMAG) || i.head->e_ident[EI_CLASS] != ELFCLASS64 ||
	    i.head->e_machine != MACHINE_CUDA || i.head->e_shentsize != sizeof(Elf64_Shdr))
		return INVALID_IMAGE;
	i.section = (const Elf64_Shdr *)(const void *)(i.bytes + i.head->e_shoff);
	i.names = (const char *)i.bytes + i.section[i.head->e_shstrndx].sh_offset;
	const Elf64_Shdr *const note = section_of(&i, ".note.nv.tkinfo", ""), *const common =
																			  section_of(&i, ".nv.info", "");
	if (!note || !common) return INVALID_IMAGE;
	if (!memmem(i.bytes + note->sh_offset, note->sh_size, "-arch sm_90 ", 12) &&
	    !memmem(i.bytes + note->sh_offset, note->sh_size, "-arch sm_90a ", 13))
		return NO_BINARY;
	for (unsigned s = 0; s < i.head->e_shnum; s++) {
		const char *const name = i.names + i.section[s].sh_name;
		if (strncmp(name, ".text.", 6)) continue;
		object *const kernel = make(KERNEL);
		kernel->library = library;
		snprintf(kernel->name, sizeof kernel->name, "%s", name + 6);
		const Elf64_Shdr *const info = section_of(&i, ".nv.info.", kernel->name), *const shared = section_of(
																					  &i, ".nv.shared.", kernel->name);
		if (!info) return INVALID_IMAGE;
		kernel->fixed_shared = shared ? (unsigned)shared->sh_size : 0;
		read_info(&i, info, kernel, 0);
		read_info(&i, common, kernel, symbol_of(&i, kernel->name));
		/* what is granted without asking: the default, less what the kernel has anyway */
		for (int d = 0; d < DEVICES; d++) kernel->dynamic_shared[d] = SHARED_DEFAULT - (int)kernel->fixed_shared;
		if (!kernel->parameters || !kernel->registers || !kernel->threads_most)
			fault("the double cannot read parameters, registers and threads of %s", kernel->name);
	}
	return SUCCESS;
}

static void unload(object *library) {
	library->alive = false;
	for (object *o = objects; o; o = o->next)
		if (o->kind == KERNEL && o->library == library) o->alive = false;
}

ENTRY(CUresult, cuLibraryLoadData,
      (CUlibrary * library, const void *code, int *jit, void **jit_values, unsigned jit_count, int *options,
       void **option_values, unsigned option_count)) {
	CALL(cuLibraryLoadData);
	(void)jit, (void)jit_values, (void)options, (void)option_values;
	if (jit_count || option_count) fault("the double knows no options of loading");
	const unsigned time = load_time;
	pthread_mutex_unlock(&lock);
	usleep(time);
	pthread_mutex_lock(&lock);
	object *const made = make(LIBRARY);
	const CUresult e = read_image(code, made);
	if (e) unload(made);
	else *library = (CUlibrary)made;
	return leave(e);
}

ENTRY(CUresult, cuLibraryUnload, (CUlibrary handle)) {
	CALL(cuLibraryUnload);
	object *const library = find(handle, LIBRARY);
	if (!library || !library->alive) {
		fault("%p is no library, or not loaded any more", (void *)handle);
		return leave(INVALID_HANDLE);
	}
	unload(library);
	return leave(SUCCESS);
}

ENTRY(CUresult, cuLibraryGetKernel, (CUkernel * kernel, CUlibrary handle, const char *name)) {
	CALL(cuLibraryGetKernel);
	const object *const library = find(handle, LIBRARY);
	if (!library || !library->alive) return leave(INVALID_HANDLE);
	for (object *o = objects; o; o = o->next)
		if (o->kind == KERNEL && o->library == library && !strcmp(o->name, name)) {
			*kernel = (CUkernel)o;
			return leave(SUCCESS);
		}
	return leave(NOT_FOUND);
}

enum { FIXED_SHARED = 1, DYNAMIC_SHARED_MOST = 8 };

static object *kernel_of(CUkernel handle, CUdevice device) {
	object *const kernel = find(handle, KERNEL);
	if (kernel && kernel->alive && is_device(device)) return kernel;
	fault("%p is no kernel that is loaded", (void *)handle);
	return NULL;
}

ENTRY(CUresult, cuKernelGetAttribute, (int *value, int attribute, CUkernel handle, CUdevice device)) {
	CALL(cuKernelGetAttribute);
	object *const kernel = kernel_of(handle, device);
	if (!kernel) return leave(INVALID_HANDLE);
	if (attribute == FIXED_SHARED) *value = (int)kernel->fixed_shared;
	else if (attribute == DYNAMIC_SHARED_MOST) *value = kernel->dynamic_shared[device];
	else {
		fault("the double knows no kernel attribute %d", attribute);
		return leave(INVALID_VALUE);
	}
	return leave(SUCCESS);
}

ENTRY(CUresult, cuKernelSetAttribute, (int attribute, int value, CUkernel handle, CUdevice device)) {
	CALL(cuKernelSetAttribute);
	object *const kernel = kernel_of(handle, device);
	if (!kernel) return leave(INVALID_HANDLE);
	if (attribute != DYNAMIC_SHARED_MOST || value < 0 || value + (int)kernel->fixed_shared > SHARED_OPTIN) {
		fault("kernel %s: attribute %d cannot be %d with %u fixed bytes", kernel->name, attribute, value,
		      kernel->fixed_shared);
		return leave(INVALID_VALUE);
	}
	kernel->dynamic_shared[device] = value;
	return leave(SUCCESS);
}

/* ---- work -------------------------------------------------------------------------------------------------------------------- */

static bool legal_launch(const object *k, int device, const uint32_t grid[3], const uint32_t block[3],
                         uint32_t shared) {
	const size_t before = strlen(faults);
	const uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
	if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 2147483647 || grid[1] > 65535 || grid[2] > 65535)
		fault("%s: a grid of %u x %u x %u", k->name, grid[0], grid[1], grid[2]);
	if (!block[0] || !block[1] || !block[2] || block[0] > 1024 || block[1] > 1024 || block[2] > 64 || threads > 1024)
		fault("%s: a block of %u x %u x %u", k->name, block[0], block[1], block[2]);
	if (k->threads_most && threads > k->threads_most)
		fault("%s: a block of %llu threads, but it was compiled for %u", k->name, (unsigned long long)threads,
		      k->threads_most);
	/* registers are given to a warp in steps of 8 a thread */
	if ((threads + 31) / 32 * 32 * ((k->registers + 7) / 8 * 8) > REGISTERS)
		fault("%s: %llu threads of %u registers", k->name, (unsigned long long)threads, k->registers);
	if ((int64_t)shared > k->dynamic_shared[device])
		fault("%s: %u bytes of dynamic shared memory, but device %d was told at most %d", k->name, shared, device,
		      k->dynamic_shared[device]);
	return strlen(faults) == before;
}

/* The arguments as the image lays them out, read from where the caller keeps them: a struct that is smaller than the image's is
 * read beyond its end, which the address sanitizer sees. */
static bool read_arguments(const object *k, void **parameters, void **extra, double_event *e) {
	enum { END, POINTER, SIZE };
	if (extra) {
		const void *buffer = NULL;
		const size_t *size = NULL;
		for (; *extra != (void *)END; extra += 2) {
			if (*extra == (void *)POINTER) buffer = extra[1];
			else if (*extra == (void *)SIZE) size = extra[1];
		}
		if (k->parameters != 1 || !buffer || !size || *size != k->parameter_size[0] || parameters) {
			fault("%s: takes %u bytes, and is given %zu", k->name, k->parameter_size[0], size ? *size : 0);
			return false;
		}
		memcpy(e->arguments, buffer, *size);
		e->arguments_size = *size;
		return true;
	}
	for (unsigned i = 0; i < k->parameters; i++) {
		if (!parameters || !parameters[i] || e->arguments_size + k->parameter_size[i] > sizeof e->arguments) {
			fault("%s: no argument %u", k->name, i);
			return false;
		}
		memcpy(e->arguments + e->arguments_size, parameters[i], k->parameter_size[i]);
		e->arguments_size += k->parameter_size[i];
	}
	return true;
}

/* The map's own bytes are the driver's secret: here they begin with the address, which a launch can be held against. */
ENTRY(CUresult, cuTensorMapEncodeTiled,
      (void *map, int type, unsigned rank, void *data, const uint64_t *extent, const uint64_t *stride_bytes,
       const unsigned *box, const unsigned *element_stride, int interleave, int swizzle, int promotion, int fill)) {
	CALL(cuTensorMapEncodeTiled);
	bool good = (uintptr_t)map % 64 == 0 && type >= 0 && type <= 12 && rank >= 1 && rank <= 5 && data &&
	            (uintptr_t)data % 16 == 0 && interleave == 0 && swizzle >= 0 && swizzle <= 3 && promotion >= 0 &&
	            promotion <= 3 && (fill == 0 || fill == 1);
	for (unsigned i = 0; good && i < rank; i++)
		good = extent[i] >= 1 && extent[i] <= (uint64_t)1 << 32 && box[i] >= 1 && box[i] <= 256 &&
		       element_stride[i] >= 1 && element_stride[i] <= 8 &&
		       (!i || (stride_bytes[i - 1] % 16 == 0 && stride_bytes[i - 1] && stride_bytes[i - 1] >> 40 == 0));
	/* 16-bit elements: a row of the box is no longer than the swizzle */
	if (good && type == 1 && swizzle == 3) good = box[0] * 2 <= 128;
	if (!good) {
		fault("a tensor map of %p is asked for that no driver makes", data);
		return leave(INVALID_VALUE);
	}
	memset(map, 0, 128);
	memcpy(map, &data, sizeof data);
	return leave(SUCCESS);
}

typedef struct launch_attribute {
	uint32_t id, unused;
	union {
		uint32_t programmatic_serialization_allowed;
		uint64_t unused[8];
	} value;
} launch_attribute;

typedef struct CUlaunchConfig {
	uint32_t gx, gy, gz, bx, by, bz, shared;
	void *stream;
	const launch_attribute *attributes;
	uint32_t attribute_count;
} CUlaunchConfig;

/* Whether the kernel may start before the work ahead of it in the stream has ended. */
static bool starts_early(const CUlaunchConfig *c, const char *name) {
	bool early = false;
	for (uint32_t i = 0; i < c->attribute_count; i++) {
		if (c->attributes[i].id == 6) early = c->attributes[i].value.programmatic_serialization_allowed;
		else fault("%s: launch attribute %u", name, c->attributes[i].id);
	}
	return early;
}

ENTRY(CUresult, cuLaunchKernelEx, (const CUlaunchConfig *config, CUkernel handle, void **parameters, void **extra)) {
	CALL(cuLaunchKernelEx);
	void *const stream = config->stream;
	const uint32_t shared = config->shared;
	object *context;
	const CUresult e = context_of(stream, &context);
	if (e) return leave(e);
	const object *const kernel = kernel_of(handle, context->device);
	if (!kernel) return leave(INVALID_HANDLE);
	const uint32_t grid[3] = {config->gx, config->gy, config->gz}, block[3] = {config->bx, config->by, config->bz};
	if (!legal_launch(kernel, context->device, grid, block, shared)) return leave(LAUNCH_OUT_OF_RESOURCES);
	const bool early = starts_early(config, kernel->name);
	/* what it overlaps must be a kernel of the same call, which knows of it */
	const double_event *before = NULL;
	for (int i = 0; i < event_count && i < EVENTS; i++)
		if (events[i].stream == stream && events[i].context == context) before = &events[i];
	if (early && (!before || before->kind != DOUBLE_LAUNCH))
		fault("%s: starts early, but no kernel is ahead of it", kernel->name);
	double_event *const event = queue(DOUBLE_LAUNCH, context, stream);
	event->early = early;
	memcpy(event->kernel, kernel->name, sizeof event->kernel);
	memcpy(event->grid, grid, sizeof grid);
	memcpy(event->block, block, sizeof block);
	event->shared_bytes = shared;
	return leave(read_arguments(kernel, parameters, extra, event) ? SUCCESS : INVALID_VALUE);
}

ENTRY(CUresult, cuMemAllocAsync, (CUdeviceptr * memory, size_t size, CUstream stream)) {
	CALL(cuMemAllocAsync);
	object *context;
	const CUresult e = context_of(stream, &context);
	if (e) return leave(e);
	if (!size) return leave(INVALID_VALUE);
	allocation *const a = malloc(sizeof *a);
	if (!a) abort();
	*a = (allocation){allocations, double_memory(size), size, context->device};
	allocations = a;
	double_event *const event = queue(DOUBLE_ALLOC, context, stream);
	event->memory = a->memory;
	event->bytes = size;
	*memory = (CUdeviceptr)(uintptr_t)a->memory;
	return leave(SUCCESS);
}

ENTRY(CUresult, cuMemFreeAsync, (CUdeviceptr memory, CUstream stream)) {
	CALL(cuMemFreeAsync);
	object *context;
	const CUresult e = context_of(stream, &context);
	if (e) return leave(e);
	for (allocation **a = &allocations; *a; a = &(*a)->next)
		if ((CUdeviceptr)(uintptr_t)(*a)->memory == memory) {
			allocation *const gone = *a;
			if (gone->device != context->device) fault("memory of device %d is freed on another", gone->device);
			double_event *const event = queue(DOUBLE_FREE, context, stream);
			event->memory = gone->memory;
			event->bytes = gone->bytes;
			*a = gone->next;
			munmap(gone->memory, gone->bytes);
			free(gone);
			return leave(SUCCESS);
		}
	fault("memory is freed that was not allocated, or twice");
	return leave(INVALID_VALUE);
}

/* ---- what tests ask ------------------------------------------------------------------------------------------------------------ */

void double_devices(int number) {
	if (number < 1 || number > DEVICES || started) abort();
	device_count = number;
}

void double_load_time(unsigned microseconds) {
	pthread_mutex_lock(&lock);
	load_time = microseconds;
	pthread_mutex_unlock(&lock);
}

void *double_context(int device) {
	pthread_mutex_lock(&lock);
	object *const o = make(CONTEXT);
	o->device = device;
	pthread_mutex_unlock(&lock);
	return o;
}

void *double_primary(int device) {
	pthread_mutex_lock(&lock);
	object *const o = primary_of(device);
	pthread_mutex_unlock(&lock);
	return o;
}

void *double_stream(void *context) {
	pthread_mutex_lock(&lock);
	object *const o = make(STREAM);
	o->context = context;
	pthread_mutex_unlock(&lock);
	return o;
}

void double_destroy(void *handle) {
	pthread_mutex_lock(&lock);
	((object *)handle)->alive = false;
	pthread_mutex_unlock(&lock);
}

void double_capture(void *stream, bool capturing) {
	pthread_mutex_lock(&lock);
	((object *)stream)->capturing = capturing;
	pthread_mutex_unlock(&lock);
}

void *double_current(void) {
	return depth ? stack[depth - 1] : NULL;
}

void double_make_current(void *context) {
	depth = context != NULL;
	stack[0] = context;
}

void *double_memory(size_t bytes) {
	void *const m = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (m == MAP_FAILED) abort();
	return m;
}

void double_inject(const char *entry, long nth, int error, bool lost) {
	pthread_mutex_lock(&lock);
	injection.entry = entry;
	injection.left = nth;
	injection.error = error;
	injection.lost = lost;
	injection.happened = NULL;
	pthread_mutex_unlock(&lock);
}

const char *double_injected(void) {
	pthread_mutex_lock(&lock);
	const char *const happened = injection.happened;
	pthread_mutex_unlock(&lock);
	return happened;
}

const char *double_error_name(int error) {
	for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
		if (errors[i].number == error) return errors[i].name;
	return NULL;
}

void double_forget(void) {
	pthread_mutex_lock(&lock);
	call_count = event_count = 0;
	faults[0] = 0;
	injection.left = -1;
	injection.happened = NULL;
	pthread_mutex_unlock(&lock);
}

long double_calls(void) {
	pthread_mutex_lock(&lock);
	const long n = call_count;
	pthread_mutex_unlock(&lock);
	return n;
}

const char *double_call(long index) {
	pthread_mutex_lock(&lock);
	const char *const name = index >= 0 && index < call_count ? calls[index] : "";
	pthread_mutex_unlock(&lock);
	return name;
}

int double_events(void) {
	pthread_mutex_lock(&lock);
	const int n = event_count;
	pthread_mutex_unlock(&lock);
	return n;
}

double_event double_event_at(int index) {
	pthread_mutex_lock(&lock);
	if (index < 0 || index >= event_count || index >= EVENTS) abort();
	const double_event e = events[index];
	pthread_mutex_unlock(&lock);
	return e;
}

const char *double_faults(void) {
	static _Thread_local char copy[sizeof faults];
	pthread_mutex_lock(&lock);
	memcpy(copy, faults, sizeof faults);
	pthread_mutex_unlock(&lock);
	return copy;
}

double_counts double_count(void) {
	pthread_mutex_lock(&lock);
	double_counts c = {.contexts = count(CONTEXT), .libraries = count(LIBRARY)};
	for (int d = 0; d < DEVICES; d++) c.primary_retained += retained[d];
	for (const allocation *a = allocations; a; a = a->next) c.allocations++;
	pthread_mutex_unlock(&lock);
	return c;
}
