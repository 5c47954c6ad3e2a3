/* What each driver gives device.c: the device of a stream, and its rows of arch.def. */
#ifndef INGOT_DEVICE_H
#define INGOT_DEVICE_H

#include "../pipeline.h"

ingot_status ingot__cpu_get(ingot_stream stream, const ingot__device **device);
ingot_status ingot__cuda_get(ingot_stream stream, const ingot__device **device);

/* 0 when the driver's families have no such architecture. */
uint64_t ingot__cpu_arch_bit(const char *arch);
uint64_t ingot__cuda_arch_bit(const char *arch);
/* NULL likewise; "" when the architecture has no parent. */
const char *ingot__cpu_arch_parent(const char *arch);
const char *ingot__cuda_arch_parent(const char *arch);

#endif
