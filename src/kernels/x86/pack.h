/*
 * Rows of the caller's tensors in the forms that the register tile reads, whatever their type, stride, alignment or page. Only
 * elements of the rows themselves are read. Rows that must not count are given as a row of zeros, so no form has a case for
 * them. Forms, in "floats" (with X86_PAIRS: bf16 pairs along the contraction):
 *
 *   columns  rows along the tile's columns (K in QK^T): panels of NR rows, each [ceil(n / PACK)][NR]
 *   inner    rows along the contraction (V in PV): panels of NR columns, each [rows / PACK][NR]; the last may be VL wide
 *   strip    rows along the tile's rows (Q in QK^T): strips of MR rows, each [ceil(n / PACK)][MR], PACK_STRIP floats apart
 */
#ifndef INGOT_KERNELS_X86_PACK_H
#define INGOT_KERNELS_X86_PACK_H

#include "../cpu.h"
#include "tile.h"

#define X86_UP(x, m) (((x) + (m) - 1) / (m) * (m))

/* Floats between strips of n contraction steps: VL-wide stores of the transposition run over a strip's end. */
#define PACK_STRIP(steps) X86_UP((steps) * MR + VL, VL)

/* VL floats (or VL pairs) of a row from element i on; zeros beyond n. dtype is a constant. */
X86_INLINE vf row_load(const void *row, int64_t i, int64_t n, int32_t dtype) {
#if X86_PAIRS
	(void)dtype;
	return v_load_pairs((const uint16_t *)row + i, n - i);
#else
	switch (dtype) {
	case INGOT_F32: return v_load_f32((const float *)row + i, n - i);
	case INGOT_F16: return v_load_f16((const uint16_t *)row + i, n - i);
	default: return v_load_bf16((const uint16_t *)row + i, n - i);
	}
#endif
}

/* n floats as a row of the tensor's type. */
X86_INLINE void row_store(void *row, int64_t i, int64_t n, int32_t dtype, vf x) {
	switch (dtype) {
	case INGOT_F32: v_store_f32((float *)row + i, x, n - i); break;
	case INGOT_F16: v_store_f16((uint16_t *)row + i, x, n - i); break;
	default: v_store_bf16((uint16_t *)row + i, x, n - i); break;
	}
}

/* VL rows transposed: dst[k * ldd + r] = row r, step k. Stores are VL wide. sign: -0.0f lanes to negate (0 to keep). */
X86_INLINE void pack_transposed(float *dst, int64_t ldd, const void *const row[VL], int64_t n, int32_t dtype, vf sign) {
	for (int64_t k = 0; k * PACK < n; k += VL, dst += VL * ldd) {
		vf r[VL];
#define X86_LANE(i) r[i] = row_load(row[i], k * PACK, n, dtype);
		X86_EACH_LANE(X86_LANE)
#undef X86_LANE
		v_transpose(r);
		int64_t steps = (n + PACK - 1) / PACK - k;
#define X86_LANE(i) \
	if (i < steps) v_store(dst + (i) * ldd, v_xor(r[i], sign));
		X86_EACH_LANE(X86_LANE)
#undef X86_LANE
	}
}

/* Runs statement with dtype a constant in each of its copies. */
#if X86_PAIRS
#define X86_BY_DTYPE(given, statement) \
	{                                  \
		enum { dtype = INGOT_BF16 };   \
		(void)(given);                 \
		statement;                     \
	}
#else
#define X86_BY_DTYPE(given, statement) \
	if ((given) == INGOT_F32) {        \
		enum { dtype = INGOT_F32 };    \
		statement;                     \
	} else if ((given) == INGOT_F16) { \
		enum { dtype = INGOT_F16 };    \
		statement;                     \
	} else {                           \
		enum { dtype = INGOT_BF16 };   \
		statement;                     \
	}
#endif

/* `count` rows (a multiple of VL) of n elements in columns form. */
static inline void pack_columns(float *dst, const void *const *row, int64_t count, int64_t n, int32_t given) {
	const int64_t steps = (n + PACK - 1) / PACK;
	X86_BY_DTYPE(given, {
		for (int64_t r = 0; r < count; r += VL)
			pack_transposed(dst + r / NR * steps * NR + r % NR, NR, row + r, n, dtype, v_zero());
	})
}

/* One strip: MR rows of n elements (row holds VL pointers), negated when asked. */
static inline void pack_strip(float *dst, const void *const row[VL], int64_t n, int32_t given, bool negate) {
	const uint32_t bits = !negate ? 0 : X86_PAIRS ? 0x80008000u : 0x80000000u;
	const vf sign = v_set(ingot__bits_float(bits));
	X86_BY_DTYPE(given, pack_transposed(dst, MR, row, n, dtype, sign))
}

/* `count` rows (a multiple of PACK) of n elements in inner form, panels `panel` floats apart. */
static inline void pack_inner(float *dst, int64_t panel, const void *const *row, int64_t count, int64_t n,
                              int32_t given) {
	const int64_t width = X86_UP(n, VL);
#if X86_PAIRS
	/* words of the low and of the high half of two rows, interleaved */
	uint16_t index[64];
	for (int i = 0; i < 64; i++) index[i] = (uint16_t)(i / 2 + (i % 2) * 32);
	const __m512i low = _mm512_loadu_si512(index), high = _mm512_loadu_si512(index + 32);
	(void)given;
	for (int64_t r = 0; r < count; r += 2)
		for (int64_t c = 0; c < width; c += NR) {
			const int64_t w = width - c < NR ? VL : NR;
			float *d = dst + c / NR * panel + r / 2 * w;
			const __m512i even = _mm512_castps_si512(v_load_pairs((const uint16_t *)row[r] + c, n - c));
			const __m512i odd = _mm512_castps_si512(v_load_pairs((const uint16_t *)row[r + 1] + c, n - c));
			_mm512_storeu_si512(d, _mm512_permutex2var_epi16(even, low, odd));
			if (w == NR) _mm512_storeu_si512(d + VL, _mm512_permutex2var_epi16(even, high, odd));
		}
#else
	X86_BY_DTYPE(given, {
		for (int64_t r = 0; r < count; r++)
			for (int64_t c = 0; c < width; c += NR) {
				const int64_t w = width - c < NR ? VL : NR;
				float *d = dst + c / NR * panel + r * w;
				v_store(d, row_load(row[r], c, n, dtype));
				if (w == NR) v_store(d + VL, row_load(row[r], c + VL, n, dtype));
			}
	})
#endif
}

#endif
