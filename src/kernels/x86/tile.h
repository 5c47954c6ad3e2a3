/*
 * The register tile: C[MR x NR] = init + A B, the one loop in which the products of every x86 kernel spend their time.
 * 12 x 32 floats on AVX-512, 6 x 16 on AVX2: 24 (12) accumulators, two vectors of B, and A broadcast from memory. On
 * processors with one or two 512-bit multiply-add ports alike this shape runs at 99 % of the port's rate (kc 64) from
 * B panels in L2, as do 14 x 32 and 8 x 48, which leave no registers or read more of B.
 *
 * With X86_PAIRS the "floats" of A and B are bf16 pairs along the contraction, multiplied by vdpbf16ps: same shapes, half
 * the steps.
 *
 * Accumulators are named variables made by macros, never an array: gcc 12 keeps arrays in memory. tests/kernels/spills.sh
 * looks at the loops in the object code.
 */
#ifndef INGOT_KERNELS_X86_TILE_H
#define INGOT_KERNELS_X86_TILE_H

#include "vec.h"

#ifndef X86_PAIRS
#define X86_PAIRS 0
#endif

enum {
	NR = 2 * VL,             /* columns of a tile */
	PACK = X86_PAIRS ? 2 : 1 /* elements of the contraction in one "float" */
};

#ifdef __AVX512F__
enum { MR = 12 }; /* rows of a tile */
#define X86_EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#if defined(__GNUC__) && !defined(__clang__)
/* gcc loads the broadcast once for both products into a register it does not have, and spills accumulators. */
#if X86_PAIRS
#define X86_PRODUCT "vdpbf16ps"
#else
#define X86_PRODUCT "vfmadd231ps"
#endif
#define X86_MAC(acc, b, a) __asm__(X86_PRODUCT " %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(b), "m"(*(const float *)(a)))
#elif X86_PAIRS
#define X86_MAC(acc, b, a) acc = _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_ps(*(a)), (__m512bh)(b))
#else
#define X86_MAC(acc, b, a) acc = _mm512_fmadd_ps(_mm512_set1_ps(*(a)), b, acc)
#endif
#define X86_ROW_STEP(r, u)                                              \
	if (r < rows) {                                                     \
		X86_MAC(c0_##r, b0, a + (r) * rs + (u) * cs);                   \
		if (vectors == 2) X86_MAC(c1_##r, b1, a + (r) * rs + (u) * cs); \
	}
#else
enum { MR = 6 };
#define X86_EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5)
#if defined(__GNUC__) && !defined(__clang__)
/* gcc folds the broadcast into neither of the two products and spills; with the instructions spelled out it gains 5 %. */
#define X86_BROADCAST(x, a) __asm__("vbroadcastss %1, %0" : "=x"(x) : "m"(*(const float *)(a)))
#define X86_MAC(acc, b, x) __asm__("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(b), "x"(x))
#else
#define X86_BROADCAST(x, a) x = _mm256_broadcast_ss(a)
#define X86_MAC(acc, b, x) acc = _mm256_fmadd_ps(x, b, acc)
#endif
#define X86_ROW_STEP(r, u)                         \
	if (r < rows) {                                \
		vf x;                                      \
		X86_BROADCAST(x, a + (r) * rs + (u) * cs); \
		X86_MAC(c0_##r, b0, x);                    \
		if (vectors == 2) X86_MAC(c1_##r, b1, x);  \
	}
#endif

typedef enum tile_init { TILE_ZERO, TILE_ADD, TILE_SCALE, TILE_SUM } tile_init;

/* Operands in pieces: after every `steps` steps the next ones begin a (b) floats after where these began. second: from a row
 * of B to its second vector. All but a and b are constants; steps 0: one piece. */
typedef struct tile_pieces {
	int64_t steps, a, b, second;
} tile_pieces;

/* C(rows x vectors*VL, row stride ldc) = init + A B over kc steps; A(r,k) = a[r*rs + k*cs], row k of B at b + k*ldb. init: zero,
 * C itself, or C with row r scaled by alpha[r]; TILE_SUM is C too, but added last, which halves the roundings of a long sum.
 * Constants at every call: rs, cs, ldb, ldc, rows <= MR, vectors 1 or 2, init. */
X86_INLINE void tile_in_pieces(const float *a, int64_t rs, int64_t cs, const float *b, int64_t ldb, float *c,
                               int64_t ldc, int64_t kc, int rows, int vectors, tile_init init, const float *alpha,
                               tile_pieces piece) {
#define X86_DECLARE(r) vf c0_##r = v_zero(), c1_##r = v_zero();
	X86_EACH_ROW(X86_DECLARE)
#undef X86_DECLARE
#define X86_START(r)                                            \
	if (r < rows && (init == TILE_ADD || init == TILE_SCALE)) { \
		c0_##r = v_load(c + (r) * ldc);                         \
		if (vectors == 2) c1_##r = v_load(c + (r) * ldc + VL);  \
		if (init == TILE_SCALE) {                               \
			vf scale = v_set(alpha[r]);                         \
			c0_##r = v_mul(scale, c0_##r);                      \
			c1_##r = v_mul(scale, c1_##r);                      \
		}                                                       \
	}
	X86_EACH_ROW(X86_START)
#undef X86_START
#define X86_ROW_STEP_0(r) X86_ROW_STEP(r, 0)
#define X86_ROW_STEP_1(r) X86_ROW_STEP(r, 1)
#define X86_ROW_STEP_2(r) X86_ROW_STEP(r, 2)
#define X86_ROW_STEP_3(r) X86_ROW_STEP(r, 3)
#define X86_STEP(u)                                                                                         \
	{                                                                                                       \
		vf b0 = v_load(b + (u) * ldb), b1 = vectors == 2 ? v_load(b + (u) * ldb + piece.second) : v_zero(); \
		(void)b1;                                                                                           \
		X86_EACH_ROW(X86_ROW_STEP_##u)                                                                      \
	}
	int64_t left = kc;
	const float *a_next = a, *b_next = b;
	do {
		int64_t k = piece.steps && left > piece.steps ? piece.steps : left;
		left -= k;
		a = a_next;
		b = b_next;
		for (; k >= 4; k -= 4, a += 4 * cs, b += 4 * ldb) {
			X86_STEP(0)
			X86_STEP(1)
			X86_STEP(2)
			X86_STEP(3)
		}
		for (; k > 0; k--, a += cs, b += ldb) X86_STEP(0)
		a_next += piece.a;
		b_next += piece.b;
	} while (piece.steps && left > 0);
#undef X86_STEP
#undef X86_ROW_STEP_0
#undef X86_ROW_STEP_1
#undef X86_ROW_STEP_2
#undef X86_ROW_STEP_3
#define X86_FINISH(r)                                                             \
	if (r < rows) {                                                               \
		if (init == TILE_SUM) {                                                   \
			c0_##r = v_add(c0_##r, v_load(c + (r) * ldc));                        \
			if (vectors == 2) c1_##r = v_add(c1_##r, v_load(c + (r) * ldc + VL)); \
		}                                                                         \
		v_store(c + (r) * ldc, c0_##r);                                           \
		if (vectors == 2) v_store(c + (r) * ldc + VL, c1_##r);                    \
	}
	X86_EACH_ROW(X86_FINISH)
#undef X86_FINISH
}

/* The same in one piece. */
X86_INLINE void tile(const float *a, int64_t rs, int64_t cs, const float *b, int64_t ldb, float *c, int64_t ldc,
                     int64_t kc, int rows, int vectors, tile_init init, const float *alpha) {
	tile_in_pieces(a, rs, cs, b, ldb, c, ldc, kc, rows, vectors, init, alpha, (tile_pieces){.second = VL});
}

#endif
