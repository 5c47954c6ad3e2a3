/*
 * The part of the driver double that the library never calls and the `ingot` command does: memory, copies, streams and events
 * of its own. Memory is the host's, a copy happens at once, every event is a millisecond after the one before. Since kernels
 * compute nothing, outputs stay what they were: every check of a kernel must fail.
 */
#include <stdlib.h>
#include <string.h>

#include "double.h"

typedef int CUresult;
typedef unsigned long long CUdeviceptr;

enum { SUCCESS = 0, OUT_OF_MEMORY = 2 };

#define ENTRY(name, parameters)          \
	DOUBLE_API CUresult name parameters; \
	CUresult name parameters

static CUresult allocate(void **memory, size_t bytes) {
	*memory = aligned_alloc(512, (bytes + 511) / 512 * 512);
	return *memory ? SUCCESS : OUT_OF_MEMORY;
}

static void *host(CUdeviceptr memory) {
	return (void *)(uintptr_t)memory;
}

ENTRY(cuCtxSetCurrent, (void *context)) {
	double_make_current(context);
	return SUCCESS;
}

ENTRY(cuStreamCreate, (void **stream, unsigned flags)) {
	(void)flags;
	*stream = double_stream(double_current());
	return SUCCESS;
}

ENTRY(cuStreamDestroy_v2, (void *stream)) {
	double_destroy(stream);
	return SUCCESS;
}

ENTRY(cuStreamSynchronize, (void *stream)) {
	(void)stream;
	return SUCCESS;
}

ENTRY(cuMemAlloc_v2, (CUdeviceptr * memory, size_t bytes)) {
	void *m;
	const CUresult e = allocate(&m, bytes);
	*memory = (CUdeviceptr)(uintptr_t)m;
	return e;
}

ENTRY(cuMemFree_v2, (CUdeviceptr memory)) {
	free(host(memory));
	return SUCCESS;
}

ENTRY(cuMemAllocHost_v2, (void **memory, size_t bytes)) {
	return allocate(memory, bytes);
}

ENTRY(cuMemFreeHost, (void *memory)) {
	free(memory);
	return SUCCESS;
}

ENTRY(cuMemsetD8Async, (CUdeviceptr memory, unsigned char value, size_t bytes, void *stream)) {
	(void)stream;
	memset(host(memory), value, bytes);
	return SUCCESS;
}

ENTRY(cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void *from, size_t bytes, void *stream)) {
	(void)stream;
	memcpy(host(to), from, bytes);
	return SUCCESS;
}

ENTRY(cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t bytes, void *stream)) {
	(void)stream;
	memcpy(to, host(from), bytes);
	return SUCCESS;
}

ENTRY(cuEventCreate, (void **event, unsigned flags)) {
	(void)flags;
	return allocate(event, 1);
}

ENTRY(cuEventDestroy_v2, (void *event)) {
	free(event);
	return SUCCESS;
}

ENTRY(cuEventRecord, (void *event, void *stream)) {
	(void)event, (void)stream;
	return SUCCESS;
}

ENTRY(cuEventElapsedTime, (float *milliseconds, void *start, void *end)) {
	(void)start, (void)end;
	*milliseconds = 1;
	return SUCCESS;
}
