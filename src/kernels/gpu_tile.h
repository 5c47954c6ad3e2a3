/*
 * Tiles of 16-bit matrices in shared memory: panels of 64 columns whose 16-byte pieces are exchanged by row, which keeps reading
 * by rows and by columns free of bank conflicts. The including kernel defines ELEMENT (an ingot_dtype), HEAD (columns of a row) and
 * THREADS (of the block) first.
 */
#ifndef INGOT_KERNELS_GPU_TILE_H
#define INGOT_KERNELS_GPU_TILE_H

#include "gpu.h"

#if ELEMENT == 2
typedef __half element;
#else
typedef __nv_bfloat16 element;
#endif

enum {
	PIECES = HEAD / 8, /* 16-byte pieces of a row */
	PIECES_2 = HEAD <= 64    ? 8
	           : HEAD <= 128 ? 16
	                         : 32,
	PASS = THREADS / PIECES_2 /* rows that the block copies at once */
};

/* Byte offset of a 16-byte piece within a tile of `rows` rows. */
template <int rows> DEVICE uint32_t place(int row, int piece) {
	return (uint32_t)((piece >> 3) * rows * 128 + row * 128 + (((piece & 7) ^ (row & 7)) << 4));
}

/* The same for reading and writing fragments: `row` holds all of the row but multiples of 8 that are added as constants, and `bits`
 * those of the piece within its panel that depend on the thread. What depends on it is base and turn; the rest, a piece without
 * those bits, folds into the instruction. */
struct reader {
	uint32_t base, turn;
};
DEVICE reader make_reader(uint32_t tile, int row, int bits) {
	const reader r = {tile + (uint32_t)row * 128, (uint32_t)((bits ^ (row & 7)) << 4)};
	return r;
}
template <int rows> DEVICE uint32_t at(const reader &r, int more_rows, int piece) {
	return r.base + (uint32_t)((piece >> 3) * rows * 128 + more_rows * 128) + (r.turn ^ (uint32_t)((piece & 7) << 4));
}

/* Rows [r0, r0 + rows) of a matrix, those outside [first, last) and columns past `columns` as zeros. A thread copies one piece of
 * every so many rows, so that its addresses step by constants; offsets within a tile are 32 bits (the host half refuses larger
 * strides), since 64-bit ones would cost the registers that the accumulators need. */
template <int rows>
DEVICE void load_tile(uint32_t to, const element *base, int64_t row_stride, int r0, int first, int last, int columns) {
	const int piece = thread_id() % PIECES_2, row = thread_id() / PIECES_2;
	if (PIECES_2 != PIECES && piece >= PIECES) return;
	const bool column = piece * 8 < columns;
	const uint32_t step = (uint32_t)row_stride * PASS;
	const element *const from = base + (r0 + row) * row_stride + piece * 8;
	/* the exchange of pieces repeats every 8 rows: passes of 4 need two addresses */
	const uint32_t target[2] = {to + place<rows>(row, piece), to + place<rows>(row + PASS, piece) - PASS * 128};
	if (r0 >= first && r0 + rows <= last) {
#pragma unroll
		for (int n = 0; n < rows / PASS; n++)
			copy_async16(target[PASS % 8 && n % 2] + n * PASS * 128, column ? from + (uint32_t)n * step : base, column);
	} else {
#pragma unroll
		for (int n = 0; n < rows / PASS; n++) {
			const int r = r0 + row + n * PASS;
			const bool valid = r >= first && r < last && column;
			copy_async16(target[PASS % 8 && n % 2] + n * PASS * 128, valid ? from + (uint32_t)n * step : base, valid);
		}
	}
}

/* Four bytes, a 16-bit pair, to a shared address. */
DEVICE void store_shared(uint32_t address, uint32_t value) {
	asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

#endif
