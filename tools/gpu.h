/*
 * Calls of the library on a GPU, for tensors that lie in the command's own memory: everything a call can reach is copied to the
 * device, guard bands and all, and copied back after it. So every check that reads memory afterwards works unchanged.
 */
#ifndef INGOT_TOOL_GPU_H
#define INGOT_TOOL_GPU_H

#include "tool.h"

/* "cpu", or "cuda:N". Opens the device; false with a sentence in *why. Before it calls go to the CPU. */
bool gpu_open(const char *device, const char **why);
/* The stream of the calling thread, made at its first use; the CPU's when no GPU is open. */
ingot_stream gpu_stream(void);
/* Frees what the calling thread has on the device. */
void gpu_leave(void);
/* Whether a call with these options runs on the GPU: the reference never does. */
bool gpu_takes(const ingot_options *options);
/* The driver's own version, "580.159.04"; "" when it does not tell. */
const char *gpu_driver(void);

/* Makes an allocation of the calling thread known, so that this thread can translate pointers into it. tool_alloc does. */
void gpu_know(const void *memory, size_t bytes);
/* Forgets what the calling thread allocated so far: none of it is given to a call again. */
void gpu_forget(void);

/* Runs a call: run(params, options) with every tensor's data, and the workspace, on the device. A fault of the tool itself
 * (memory it does not know, a driver that fails) is INGOT_DRIVER with a sentence on stderr. */
ingot_status gpu_run(tool_operator op, const void *params, const ingot_options *options);

/* Times a call that gpu_run could run: the first warms up, then up to `most` runs by the device's events until `budget` seconds
 * are spent, three at least unless one takes that long by itself; before each a buffer of twice the second-level cache is
 * written, so that inputs come from memory. Seconds go to times, sorted, their number to *count. Results stay on the device. */
ingot_status gpu_time(tool_operator op, const void *params, const ingot_options *options, double budget, int most,
                      double *times, int *count);

/* The size of the operator's params struct (operators.c). */
size_t tool_params_size(tool_operator op);

#endif
