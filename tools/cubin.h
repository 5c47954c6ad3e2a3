/* Reads what a compiled CUDA object says of itself: its architecture and its kernels. The object is taken for hostile. */
#ifndef INGOT_CUBIN_H
#define INGOT_CUBIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Whether the object is machine code for `arch` ("sm_90a"); else *why says what it is. */
bool cubin_is_for(const void *object, size_t size, const char *arch, const char **why);

/* A kernel's code size, bytes of parameters and registers; false when the object has no such kernel, or an empty one. */
bool cubin_kernel(const void *object, size_t size, const char *kernel, uint64_t *code_bytes, uint32_t *arguments_size,
                  uint32_t *registers);

#endif
