/*
 * The vector vocabulary of the x86 kernels: one set of names for 512-bit and 256-bit registers, so that a kernel's text is
 * written once. The width follows the flags of the file's row in arch.def. Functions here are exact unless they say otherwise;
 * NaN goes through all of them.
 */
#ifndef INGOT_KERNELS_X86_VEC_H
#define INGOT_KERNELS_X86_VEC_H

#include <immintrin.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define X86_INLINE static inline __attribute__((always_inline))
#define X86_ALIGNED __attribute__((aligned(64)))

#ifdef __AVX512F__
enum { VL = 16 }; /* floats in a vector */
typedef __m512 vf;
typedef __mmask16 vmask;
#define X86_EACH_LANE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)

X86_INLINE vf v_zero(void) {
	return _mm512_setzero_ps();
}
X86_INLINE vf v_set(float x) {
	return _mm512_set1_ps(x);
}
X86_INLINE vf v_load(const float *p) {
	return _mm512_loadu_ps(p);
}
X86_INLINE void v_store(float *p, vf x) {
	_mm512_storeu_ps(p, x);
}
X86_INLINE vf v_add(vf a, vf b) {
	return _mm512_add_ps(a, b);
}
X86_INLINE vf v_sub(vf a, vf b) {
	return _mm512_sub_ps(a, b);
}
X86_INLINE vf v_mul(vf a, vf b) {
	return _mm512_mul_ps(a, b);
}
X86_INLINE vf v_div(vf a, vf b) {
	return _mm512_div_ps(a, b);
}
X86_INLINE vf v_fma(vf a, vf b, vf c) /* a b + c */
{
	return _mm512_fmadd_ps(a, b, c);
}
X86_INLINE vf v_fms(vf a, vf b, vf c) /* a b - c */
{
	return _mm512_fmsub_ps(a, b, c);
}
/* The larger; b where either is NaN. v_min likewise. */
X86_INLINE vf v_max(vf a, vf b) {
	return _mm512_max_ps(a, b);
}
X86_INLINE vf v_min(vf a, vf b) {
	return _mm512_min_ps(a, b);
}
X86_INLINE vf v_abs(vf x) {
	return _mm512_abs_ps(x);
}
X86_INLINE vf v_xor(vf a, vf b) {
	return _mm512_xor_ps(a, b);
}
X86_INLINE vf v_lanes(void) /* 0, 1, 2, ... */
{
	return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
X86_INLINE vmask v_equal(vf a, vf b) {
	return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
}
X86_INLINE vmask v_less(vf a, vf b) {
	return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
X86_INLINE bool v_any(vmask m) {
	return m != 0;
}
X86_INLINE vf v_select(vmask m, vf yes, vf no) {
	return _mm512_mask_mov_ps(no, m, yes);
}
X86_INLINE vmask v_first(int64_t n) /* lanes below n */
{
	return (vmask)(n <= 0 ? 0 : n >= VL ? 0xffff : (1 << n) - 1);
}
X86_INLINE vmask v_from_bits(uint32_t bits) {
	return (vmask)bits;
}
X86_INLINE uint32_t v_bits(vmask m) {
	return m;
}
X86_INLINE float v_largest(vf x) {
	return _mm512_reduce_max_ps(x);
}
X86_INLINE float v_sum(vf x) {
	return _mm512_reduce_add_ps(x);
}
X86_INLINE float v_lane0(vf x) {
	return _mm512_cvtss_f32(x);
}

/* n elements from p on (n >= VL: VL of them), zeros above; nothing beyond them is read. */
X86_INLINE vf v_load_f32(const float *p, int64_t n) {
	return n >= VL ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(v_first(n), p);
}
X86_INLINE __m256i v_load_16bit(const uint16_t *p, int64_t n) {
	return n >= VL ? _mm256_loadu_si256((const void *)p) : _mm256_maskz_loadu_epi16(v_first(n), p);
}
X86_INLINE vf v_load_f16(const uint16_t *p, int64_t n) {
	return _mm512_cvtph_ps(v_load_16bit(p, n));
}
X86_INLINE vf v_load_bf16(const uint16_t *p, int64_t n) {
	return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v_load_16bit(p, n)), 16));
}
/* Lanes where a byte of p[0, n) is not 0. */
X86_INLINE vmask v_load_bool(const uint8_t *p, int64_t n) {
	__m128i x = n >= VL ? _mm_loadu_si128((const void *)p) : _mm_maskz_loadu_epi8(v_first(n), p);
	return _mm_test_epi8_mask(x, x);
}
/* bf16 pairs as they lie in memory: n elements of 2 VL. */
X86_INLINE vf v_load_pairs(const uint16_t *p, int64_t n) {
	return n >= 2 * VL ? _mm512_castsi512_ps(_mm512_loadu_si512(p))
	                   : _mm512_castsi512_ps(_mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1), p));
}

/* The first n lanes to p; nothing else is written. */
X86_INLINE void v_store_f32(float *p, vf x, int64_t n) {
	if (n >= VL) _mm512_storeu_ps(p, x);
	else _mm512_mask_storeu_ps(p, v_first(n), x);
}
X86_INLINE void v_store_16bit(uint16_t *p, __m256i x, int64_t n) {
	if (n >= VL) _mm256_storeu_si256((void *)p, x);
	else _mm256_mask_storeu_epi16(p, v_first(n), x);
}
X86_INLINE void v_store_f16(uint16_t *p, vf x, int64_t n) {
	v_store_16bit(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), n);
}
X86_INLINE void v_store_bf16(uint16_t *p, vf x, int64_t n) {
	__m512i u = _mm512_castps_si512(x);
	__m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
	__m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
	__mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
	rounded = _mm512_mask_or_epi32(rounded, nan, u, _mm512_set1_epi32(0x400000));
	v_store_16bit(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)), n);
}

/* r[i][j] = r[j][i] */
X86_INLINE void v_transpose(vf r[VL]) {
	vf t[VL];
#define X86_PAIR(i)                              \
	t[i] = _mm512_unpacklo_ps(r[i], r[(i) + 1]); \
	t[(i) + 1] = _mm512_unpackhi_ps(r[i], r[(i) + 1]);
	X86_PAIR(0)
	X86_PAIR(2)
	X86_PAIR(4)
	X86_PAIR(6)
	X86_PAIR(8)
	X86_PAIR(10)
	X86_PAIR(12)
	X86_PAIR(14)
#undef X86_PAIR
#define X86_PD(x) _mm512_castps_pd(x)
#define X86_QUAD(i)                                                                            \
	r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(X86_PD(t[i]), X86_PD(t[(i) + 2])));             \
	r[(i) + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(X86_PD(t[i]), X86_PD(t[(i) + 2])));       \
	r[(i) + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(X86_PD(t[(i) + 1]), X86_PD(t[(i) + 3]))); \
	r[(i) + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(X86_PD(t[(i) + 1]), X86_PD(t[(i) + 3])));
	X86_QUAD(0)
	X86_QUAD(4)
	X86_QUAD(8)
	X86_QUAD(12)
#undef X86_QUAD
#undef X86_PD
#define X86_LOW(i)                                                    \
	t[i] = _mm512_shuffle_f32x4(r[i], r[(i) + 4], 0x88);              \
	t[(i) + 4] = _mm512_shuffle_f32x4(r[i], r[(i) + 4], 0xdd);        \
	t[(i) + 8] = _mm512_shuffle_f32x4(r[(i) + 8], r[(i) + 12], 0x88); \
	t[(i) + 12] = _mm512_shuffle_f32x4(r[(i) + 8], r[(i) + 12], 0xdd);
	X86_LOW(0)
	X86_LOW(1)
	X86_LOW(2)
	X86_LOW(3)
#undef X86_LOW
#define X86_HIGH(i)                                                   \
	r[i] = _mm512_shuffle_f32x4(t[i], t[(i) + 8], 0x88);              \
	r[(i) + 8] = _mm512_shuffle_f32x4(t[i], t[(i) + 8], 0xdd);        \
	r[(i) + 4] = _mm512_shuffle_f32x4(t[(i) + 4], t[(i) + 12], 0x88); \
	r[(i) + 12] = _mm512_shuffle_f32x4(t[(i) + 4], t[(i) + 12], 0xdd);
	X86_HIGH(0) X86_HIGH(1) X86_HIGH(2) X86_HIGH(3)
#undef X86_HIGH
}

#else /* 256 bits */

enum { VL = 8 };
typedef __m256 vf;
typedef __m256 vmask; /* all ones or all zeros a lane */
#define X86_EACH_LANE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)

X86_INLINE vf v_zero(void) {
	return _mm256_setzero_ps();
}
X86_INLINE vf v_set(float x) {
	return _mm256_set1_ps(x);
}
X86_INLINE vf v_load(const float *p) {
	return _mm256_loadu_ps(p);
}
X86_INLINE void v_store(float *p, vf x) {
	_mm256_storeu_ps(p, x);
}
X86_INLINE vf v_add(vf a, vf b) {
	return _mm256_add_ps(a, b);
}
X86_INLINE vf v_sub(vf a, vf b) {
	return _mm256_sub_ps(a, b);
}
X86_INLINE vf v_mul(vf a, vf b) {
	return _mm256_mul_ps(a, b);
}
X86_INLINE vf v_div(vf a, vf b) {
	return _mm256_div_ps(a, b);
}
X86_INLINE vf v_fma(vf a, vf b, vf c) /* a b + c */
{
	return _mm256_fmadd_ps(a, b, c);
}
X86_INLINE vf v_fms(vf a, vf b, vf c) /* a b - c */
{
	return _mm256_fmsub_ps(a, b, c);
}
/* The larger; b where either is NaN. v_min likewise. */
X86_INLINE vf v_max(vf a, vf b) {
	return _mm256_max_ps(a, b);
}
X86_INLINE vf v_min(vf a, vf b) {
	return _mm256_min_ps(a, b);
}
X86_INLINE vf v_abs(vf x) {
	return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
}
X86_INLINE vf v_xor(vf a, vf b) {
	return _mm256_xor_ps(a, b);
}
X86_INLINE vf v_lanes(void) /* 0, 1, 2, ... */
{
	return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
}
X86_INLINE vmask v_equal(vf a, vf b) {
	return _mm256_cmp_ps(a, b, _CMP_EQ_OQ);
}
X86_INLINE vmask v_less(vf a, vf b) {
	return _mm256_cmp_ps(a, b, _CMP_LT_OQ);
}
X86_INLINE bool v_any(vmask m) {
	return _mm256_movemask_ps(m) != 0;
}
X86_INLINE vf v_select(vmask m, vf yes, vf no) {
	return _mm256_blendv_ps(no, yes, m);
}
X86_INLINE vmask v_first(int64_t n) /* lanes below n */
{
	__m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
	return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n > VL ? VL : n < 0 ? 0 : (int)n), lane));
}
X86_INLINE vmask v_from_bits(uint32_t bits) {
	__m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
	return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), bit), bit));
}
X86_INLINE uint32_t v_bits(vmask m) {
	return (uint32_t)_mm256_movemask_ps(m);
}
X86_INLINE float v_largest(vf x) {
	__m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
	y = _mm_max_ps(y, _mm_movehl_ps(y, y));
	return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
X86_INLINE float v_lane0(vf x) {
	return _mm256_cvtss_f32(x);
}
X86_INLINE float v_sum(vf x) {
	__m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
	y = _mm_add_ps(y, _mm_movehl_ps(y, y));
	return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

/* n elements from p on (n >= VL: VL of them), zeros above; nothing beyond them is read. */
X86_INLINE vf v_load_f32(const float *p, int64_t n) {
	return n >= VL ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, _mm256_castps_si256(v_first(n)));
}
X86_INLINE __m128i v_load_16bit(const uint16_t *p, int64_t n) {
	if (n >= VL) return _mm_loadu_si128((const void *)p);
	uint16_t part[VL] = {0};
	for (int64_t i = 0; i < n; i++) memcpy(part + i, p + i, sizeof *part);
	return _mm_loadu_si128((const void *)part);
}
X86_INLINE vf v_load_f16(const uint16_t *p, int64_t n) {
	return _mm256_cvtph_ps(v_load_16bit(p, n));
}
X86_INLINE vf v_load_bf16(const uint16_t *p, int64_t n) {
	return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v_load_16bit(p, n)), 16));
}
/* Lanes where a byte of p[0, n) is not 0. */
X86_INLINE vmask v_load_bool(const uint8_t *p, int64_t n) {
	uint8_t part[VL] = {0};
	for (int64_t i = 0; i < n && i < VL; i++) part[i] = p[i];
	__m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)part));
	return _mm256_castsi256_ps(_mm256_cmpgt_epi32(x, _mm256_setzero_si256()));
}

/* The first n lanes to p; nothing else is written. */
X86_INLINE void v_store_f32(float *p, vf x, int64_t n) {
	if (n >= VL) _mm256_storeu_ps(p, x);
	else _mm256_maskstore_ps(p, _mm256_castps_si256(v_first(n)), x);
}
X86_INLINE void v_store_16bit(uint16_t *p, __m128i x, int64_t n) {
	if (n >= VL) {
		_mm_storeu_si128((void *)p, x);
		return;
	}
	uint16_t part[VL];
	_mm_storeu_si128((void *)part, x);
	for (int64_t i = 0; i < n; i++) memcpy(p + i, part + i, sizeof *part);
}
X86_INLINE void v_store_f16(uint16_t *p, vf x, int64_t n) {
	v_store_16bit(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), n);
}
X86_INLINE void v_store_bf16(uint16_t *p, vf x, int64_t n) {
	__m256i u = _mm256_castps_si256(x);
	__m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
	__m256i rounded = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
	__m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
	vmask nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
	rounded = _mm256_castps_si256(v_select(nan, _mm256_castsi256_ps(quiet), _mm256_castsi256_ps(rounded)));
	rounded = _mm256_srli_epi32(rounded, 16);
	v_store_16bit(p, _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)), n);
}

/* r[i][j] = r[j][i] */
X86_INLINE void v_transpose(vf r[VL]) {
	vf t[VL], u[VL];
#define X86_PAIR(i)                              \
	t[i] = _mm256_unpacklo_ps(r[i], r[(i) + 1]); \
	t[(i) + 1] = _mm256_unpackhi_ps(r[i], r[(i) + 1]);
	X86_PAIR(0)
	X86_PAIR(2)
	X86_PAIR(4)
	X86_PAIR(6)
#undef X86_PAIR
#define X86_QUAD(i)                                               \
	u[i] = _mm256_shuffle_ps(t[i], t[(i) + 2], 0x44);             \
	u[(i) + 1] = _mm256_shuffle_ps(t[i], t[(i) + 2], 0xee);       \
	u[(i) + 2] = _mm256_shuffle_ps(t[(i) + 1], t[(i) + 3], 0x44); \
	u[(i) + 3] = _mm256_shuffle_ps(t[(i) + 1], t[(i) + 3], 0xee);
	X86_QUAD(0)
	X86_QUAD(4)
#undef X86_QUAD
#define X86_HALF(i)                                        \
	r[i] = _mm256_permute2f128_ps(u[i], u[(i) + 4], 0x20); \
	r[(i) + 4] = _mm256_permute2f128_ps(u[i], u[(i) + 4], 0x31);
	X86_HALF(0) X86_HALF(1) X86_HALF(2) X86_HALF(3)
#undef X86_HALF
}
#endif

/* 2^f on [0, 1): minimax polynomials of relative error, from an own Remez fit. Degree 5 is off by 7.5e-8, degree 4 by 2.6e-6:
 * enough where the result is rounded to bf16. Neither is exact at 0. */
X86_INLINE vf v_exp2_fraction(vf f, int degree) {
	if (degree == 4) {
		vf p = v_fma(v_set(0.01353416791f), f, v_set(0.05201146062f));
		p = v_fma(p, f, v_set(0.2414427569f));
		p = v_fma(p, f, v_set(0.6930038345f));
		return v_fma(p, f, v_set(1.000002593f));
	}
	vf p = v_fma(v_set(0.001877576673f), f, v_set(0.008989340095f));
	p = v_fma(p, f, v_set(0.05582631805f));
	p = v_fma(p, f, v_set(0.240153617f));
	p = v_fma(p, f, v_set(0.6931530732f));
	return v_fma(p, f, v_set(0.9999999251f));
}

/* 2^x to the polynomial's error; 0 for -inf (and on 256 bits below -126), Inf from 128 on. degree is a constant. */
X86_INLINE vf v_exp2(vf x, int degree) {
#ifdef __AVX512F__
	vf f = _mm512_reduce_ps(x, 0x09); /* x - floor(x), 0 for -inf */
	return _mm512_scalef_ps(v_exp2_fraction(f, degree), x);
#else
	vf low = v_set(-126.0f);
	x = v_min(v_set(128.0f), v_max(low, x));
	vf n = _mm256_floor_ps(x);
	vf p = v_exp2_fraction(v_sub(x, n), degree);
	__m256i e = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
	p = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), e));
	return _mm256_and_ps(p, _mm256_cmp_ps(x, low, _CMP_NLE_UQ));
#endif
}

/* Natural logarithm of a normal number above 0, error 1e-7 of max(1, |result|). */
X86_INLINE vf v_log(vf x) {
#ifdef __AVX512F__
	vf e = _mm512_getexp_ps(x), m = _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);
#else
	__m256i bits = _mm256_castps_si256(x);
	vf e = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(127)));
	bits = _mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff)), _mm256_set1_epi32(0x3f800000));
	vf m = v_select(_mm256_cmp_ps(x, x, _CMP_UNORD_Q), x, _mm256_castsi256_ps(bits));
#endif
	const vf one = v_set(1.0f);
	const vmask upper = v_less(v_set(1.41421356f), m);
	e = v_select(upper, v_add(e, one), e);
	m = v_select(upper, v_mul(m, v_set(0.5f)), m);
	/* log m = 2 artanh((m - 1) / (m + 1)), |.| <= 0.172 */
	const vf s = v_div(v_sub(m, one), v_add(m, one)), z = v_mul(s, s);
	vf p = v_fma(v_set(2.0f / 9), z, v_set(2.0f / 7));
	p = v_fma(p, z, v_set(2.0f / 5));
	p = v_fma(p, z, v_set(2.0f / 3));
	p = v_fma(v_mul(p, z), s, v_add(s, s));
	return v_fma(e, v_set(0.693147181f), p);
}

/* tanh(x), relative error 3e-7 (own fit for the small arguments, where 1 - 2 / (e^2x + 1) would cancel). */
X86_INLINE vf v_tanh(vf x) {
	vf a = v_min(v_set(10.0f), v_abs(x)), z = v_mul(x, x);
	vf e = v_exp2(v_mul(a, v_set(2.885390082f)), 5);
	vf large = v_sub(v_set(1.0f), v_div(v_set(2.0f), v_add(e, v_set(1.0f))));
	vf p = v_fma(v_set(-0.00589515917f), z, v_set(0.0207959736f));
	p = v_fma(p, z, v_set(-0.0537838312f));
	p = v_fma(p, z, v_set(0.133319241f));
	p = v_fma(p, z, v_set(-0.33333298f));
	vf small = v_fma(v_mul(p, z), x, x);
	vf sign = v_set(-0.0f);
#ifdef __AVX512F__
	large = _mm512_or_ps(large, _mm512_and_ps(x, sign));
#else
	large = _mm256_or_ps(large, _mm256_and_ps(x, sign));
#endif
	return v_select(v_less(a, v_set(0.6f)), small, large);
}

#endif
