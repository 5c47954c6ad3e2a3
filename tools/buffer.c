/* See buffer.h. */
#include "buffer.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { GUARD = 512, ALIGN = 256 };

void buffer_make(buffer *b, int32_t dtype, int ndim, const int64_t *shape, const int64_t *stride, int64_t offset,
                 bool allocate) {
	*b = (buffer){.t = {.dtype = dtype, .ndim = ndim}};
	int64_t span = 1;
	for (int i = 0; i < ndim; i++) {
		b->t.shape[i] = shape[i];
		b->t.stride[i] = stride[i];
		if (shape[i] == 0) span = 0;
		if (span) span += (shape[i] - 1) * stride[i];
	}
	if (!allocate) return;
	const size_t size = (size_t)tool_dtype_size(dtype);
	b->bytes = GUARD + ((size_t)(offset + span) * size + 63) / 64 * 64 + GUARD;
	b->memory = tool_alloc_aligned(ALIGN, b->bytes);
	b->t.data = b->memory + GUARD + (size_t)offset * size;
}

void buffer_dense(buffer *b, int32_t dtype, int ndim, const int64_t *shape, int64_t offset, bool allocate) {
	const ingot_tensor t = tool_tensor(NULL, dtype, ndim, shape);
	buffer_make(b, dtype, ndim, shape, t.stride, offset, allocate);
}

void buffer_release(buffer *b) {
	free(b->memory);
	*b = (buffer){0};
}

void buffer_fill_dead(buffer *b) {
	/* All bits set is a NaN in every type but FNUZ, whose only NaN is 0x80. */
	const bool fnuz = b->t.dtype == INGOT_F8_E4M3_FNUZ || b->t.dtype == INGOT_F8_E5M2_FNUZ;
	if (b->memory) memset(b->memory, fnuz ? 0x80 : 0xff, b->bytes);
}

void buffer_fill_normal(buffer *b, uint64_t seed) {
	enum { PERIOD = 16381 }; /* a prime: rows of any width differ */
	const size_t size = (size_t)tool_dtype_size(b->t.dtype), period = PERIOD * size;
	for (int64_t i = 0; i < PERIOD && (size_t)i < b->bytes / size; i++)
		tool_store(b->memory, i, b->t.dtype, tool_normal(seed, 0, (uint64_t)i));
	for (size_t done = period; done < b->bytes; done += period)
		memcpy(b->memory + done, b->memory, b->bytes - done < period ? b->bytes - done : period);
}

void buffer_seal(buffer *b) {
	if (b->memory) b->hash = XXH3_64bits(b->memory, b->bytes);
}

bool buffer_intact(const buffer *b) {
	return !b->memory || b->hash == XXH3_64bits(b->memory, b->bytes);
}

/* A NaN whose low bits no operation makes; booleans and integers: a value that no result has. */
static uint64_t poison(int32_t dtype) {
	switch (dtype) {
	case INGOT_F32: return 0x7fc5a5d3;
	case INGOT_F16: return 0x7e5b;
	case INGOT_BF16: return 0x7fdb;
	case INGOT_I32: return 0x5a5b5a5b;
	case INGOT_I64:
	case INGOT_U64: return 0x5a5b5c5d5e5f5a5b;
	default: return 0x5b;
	}
}

void buffer_poison(buffer *b) {
	const uint64_t value = poison(b->t.dtype);
	const size_t size = (size_t)tool_dtype_size(b->t.dtype);
	for (size_t i = 0; b->memory && i < b->bytes; i += size)
		memcpy(b->memory + i, &value, size); /* little-endian, as every machine the library knows */
}

bool buffer_poisoned_at(const buffer *b, int64_t element) {
	const uint64_t value = poison(b->t.dtype);
	const size_t size = (size_t)tool_dtype_size(b->t.dtype);
	return memcmp((const unsigned char *)b->t.data + (size_t)element * size, &value, size) == 0;
}

void buffer_poison_at(buffer *b, int64_t element) {
	const uint64_t value = poison(b->t.dtype);
	const size_t size = (size_t)tool_dtype_size(b->t.dtype);
	memcpy((unsigned char *)b->t.data + (size_t)element * size, &value, size);
}

bool buffer_first_stray(const buffer *b, int64_t *byte) {
	const uint64_t value = poison(b->t.dtype);
	const size_t size = (size_t)tool_dtype_size(b->t.dtype);
	for (size_t i = 0; b->memory && i < b->bytes; i += size)
		if (memcmp(b->memory + i, &value, size) != 0) {
			*byte = (int64_t)(b->memory + i - (const unsigned char *)b->t.data);
			return true;
		}
	return false;
}
