/*
 * What a test asks of the driver double (libcuda.c): machines, contexts, streams and memory to call the library with; errors to
 * give at the right moment; and what the library did. Nothing here is part of a driver. All functions may be called from any
 * thread; contexts are current per thread, as in the driver.
 */
#ifndef INGOT_TESTS_DOUBLE_H
#define INGOT_TESTS_DOUBLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DOUBLE_API __attribute__((visibility("default")))

/* ---- the machine ------------------------------------------------------------------------------------------------------ */

/* How many H200 the machine has, 1 to 8; 1 unless said before the library's first call. */
DOUBLE_API void double_devices(int count);
/* How long loading an image takes, so that threads meet in it; 0 unless said. */
DOUBLE_API void double_load_time(unsigned microseconds);
/* A context that a caller made on a device, not its primary one; the device's primary context. */
DOUBLE_API void *double_context(int device);
DOUBLE_API void *double_primary(int device);
DOUBLE_API void *double_stream(void *context);
/* Destroys a stream or a context that a test made; a handle is never given out again. */
DOUBLE_API void double_destroy(void *handle);
DOUBLE_API void double_capture(void *stream, bool capturing);
/* The thread's current context. */
DOUBLE_API void *double_current(void);
DOUBLE_API void double_make_current(void *context);
/* A range of device memory, aligned to 256 bytes. The host may neither read nor write it: doing so ends the process. */
DOUBLE_API void *double_memory(size_t bytes);

/* ---- errors ----------------------------------------------------------------------------------------------------------- */

/* The call numbered `nth` from now on, counted from 0 over all entry points, or over `entry` alone where it is not NULL, does
 * nothing and returns `error`. lost: the context is lost with it, and every later call that needs one returns the same. */
DOUBLE_API void double_inject(const char *entry, long nth, int error, bool lost);
/* The entry point that gave the injected error, NULL before that happened. */
DOUBLE_API const char *double_injected(void);
/* "CUDA_ERROR_OUT_OF_MEMORY" of 2; NULL for a number that is none of the double's. */
DOUBLE_API const char *double_error_name(int error);

/* ---- what the library did --------------------------------------------------------------------------------------------- */

typedef enum double_kind { DOUBLE_ALLOC, DOUBLE_FREE, DOUBLE_LAUNCH } double_kind;

/* Work that was queued. */
typedef struct double_event {
	double_kind kind;
	int device;
	void *context, *stream; /* stream as it was given: NULL is the default one */
	void *memory;           /* of ALLOC and FREE */
	size_t bytes;
	char kernel[64]; /* of LAUNCH, and so all below */
	uint32_t grid[3], block[3], shared_bytes;
	bool early; /* may overlap the launch ahead of it */
	size_t arguments_size;
	unsigned char arguments[4096];
} double_event;

/* Forgets calls, events and faults, and a pending injection; objects stay. */
DOUBLE_API void double_forget(void);
DOUBLE_API long double_calls(void);
DOUBLE_API const char *double_call(long index); /* name of the entry point, "" past the last */
DOUBLE_API int double_events(void);
DOUBLE_API double_event double_event_at(int index);
/* What no driver would have let pass, or what only a driver's crash would have told: one sentence a line, "" if nothing. */
DOUBLE_API const char *double_faults(void);
/* Objects alive in the process. */
typedef struct double_counts {
	int contexts, primary_retained, libraries, allocations;
} double_counts;
DOUBLE_API double_counts double_count(void);

#endif
