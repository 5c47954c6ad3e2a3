/*
 * Calls of the library on a GPU, for tensors that lie in the command's own memory: everything a call can reach is copied to the
 * device, guard bands and all, and copied back after it. So every check that reads memory afterwards works unchanged.
 */
#ifndef INGOT_TOOL_GPU_H
#define INGOT_TOOL_GPU_H

#include "tool.h"

/* "cpu", or "cuda:N". Opens the device and makes a stream of its own; false with a sentence in *why. */
bool gpu_open(const char *device, const char **why);
/* The stream calls go to: the CPU's until gpu_open. */
ingot_stream gpu_stream(void);
/* Whether a call with these options runs on the GPU: the reference never does. */
bool gpu_takes(const ingot_options *options);

/* Makes an allocation of the command known, so that pointers into it can be translated. tool_alloc does. */
void gpu_know(const void *memory, size_t bytes);

/* Runs a call: run(params, options) with every tensor's data, and the workspace, on the device. `repeats` > 0 also times that
 * many more runs by the device's events and gives their median, in seconds. A fault of the tool itself (memory it does not
 * know, a driver that fails) is INGOT_DRIVER with a sentence on stderr. */
ingot_status gpu_run(tool_operator op, const void *params, const ingot_options *options, int repeats, double *seconds);

/* The size of the operator's params struct (operators.c). */
size_t tool_params_size(tool_operator op);

#endif
