/*
 * Tensors in memory that shows every stray access: guard bands on both sides, a fill in all that the tensor does not own.
 * Inputs are filled with NaN before their live elements are written, and compared afterwards with what they were; outputs
 * are filled with a NaN that no arithmetic gives, so that a missing or a stray write is seen bit for bit.
 */
#ifndef INGOT_TOOL_BUFFER_H
#define INGOT_TOOL_BUFFER_H

#include "tool.h"

typedef struct buffer {
	ingot_tensor t; /* dtype INGOT_NONE: absent */
	unsigned char *memory;
	size_t bytes; /* of memory, guard bands included */
	uint64_t hash;
} buffer;

/* Lays the tensor out and, with allocate, gives it memory; its base is `offset` elements past an aligned address. */
void buffer_make(buffer *b, int32_t dtype, int ndim, const int64_t *shape, const int64_t *stride, int64_t offset,
                 bool allocate);
/* The same with dense strides. */
void buffer_dense(buffer *b, int32_t dtype, int ndim, const int64_t *shape, int64_t offset, bool allocate);
void buffer_release(buffer *b);

void buffer_fill_dead(buffer *b); /* an input: NaN everywhere, for integers -1 */
/* Normal values that repeat after some ten thousand: enough for timing, and a thousand times faster than one by one. */
void buffer_fill_normal(buffer *b, uint64_t seed);
void buffer_seal(buffer *b);         /* an input: remembers its bytes */
bool buffer_intact(const buffer *b); /* whether they are still the same */

void buffer_poison(buffer *b); /* an output: the poison everywhere */
bool buffer_poisoned_at(const buffer *b, int64_t element);
void buffer_poison_at(buffer *b, int64_t element);
/* The first byte, from the tensor's base, that is not poison; false if there is none. */
bool buffer_first_stray(const buffer *b, int64_t *byte);

#endif
