/* From a stream to the device behind it, whatever its driver. */
#include "device.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "../support/error.h"

ingot_status ingot__device_get(ingot_stream stream, const ingot__device **device) {
	switch (stream.type) {
	case INGOT_CPU: return ingot__cpu_get(stream, device);
	case INGOT_CUDA: return ingot__cuda_get(stream, device);
	case INGOT_HIP:
		return ingot__fail(INGOT_NO_DEVICE, "stream.type is INGOT_HIP, but this library has no driver layer for it");
	default:
		return ingot__fail(INGOT_INVALID, "stream.type is %d; allowed are 0 INGOT_CPU, 1 INGOT_CUDA, 2 INGOT_HIP",
		                   stream.type);
	}
}

bool ingot__device_runs(const ingot__device *device, const char *arch) {
	const uint64_t bit = device->type == INGOT_CPU ? ingot__cpu_arch_bit(arch) : ingot__cuda_arch_bit(arch);
	return !*arch || (device->arch_mask & bit);
}

const char *ingot__arch_parent(const char *arch) {
	const char *parent = ingot__cpu_arch_parent(arch);
	if (!parent) parent = ingot__cuda_arch_parent(arch);
	return parent ? parent : "";
}

static char library_folder[4096];
static pthread_once_t library_once = PTHREAD_ONCE_INIT;

static void find_library(void) {
	Dl_info info;
	if (!dladdr(library_folder, &info) || !info.dli_fname) return;
	/* resolved once: a relative path would not survive a chdir */
	char *const full = realpath(info.dli_fname, NULL), *const slash = full ? strrchr(full, '/') : NULL;
	if (slash && (size_t)(slash - full) < sizeof library_folder) memcpy(library_folder, full, (size_t)(slash - full));
	free(full);
}

const char *ingot__library_folder(void) {
	pthread_once(&library_once, find_library);
	return library_folder;
}
