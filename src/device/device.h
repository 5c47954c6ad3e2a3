/* What each driver gives device.c. */
#ifndef INGOT_DEVICE_H
#define INGOT_DEVICE_H

#include "../pipeline.h"

ingot_status ingot__cpu_get(ingot_stream stream, const ingot__device **device);
/* 0 when no CPU family has that architecture. */
uint64_t ingot__cpu_arch_bit(const char *arch);
/* NULL when no CPU family has that architecture. */
const char *ingot__cpu_arch_parent(const char *arch);

#endif
