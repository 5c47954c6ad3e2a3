/*
 * What happens to a strip of scores between the two products: the terms added to a score, masks, the running softmax, dropout.
 * A strip is MR rows by up to BLOCK keys, in L1. Rows keep their running maximum m in the units of the scores, and their sum l
 * in VL lanes, which are added up once, at the end.
 */
#ifndef INGOT_KERNELS_X86_SOFTMAX_H
#define INGOT_KERNELS_X86_SOFTMAX_H

#include "../cpu.h"
#include "tile.h"

enum {
	BLOCK = 192, /* keys in a strip at most: a multiple of NR, and of 4 for dropout's quads */
	EXP2_DEGREE = X86_PAIRS ? 4 : 5
};

#define X86_LOG2E 1.44269504088896340736
#define X86_LN2 0.69314718055994530942

/* ---- terms of the score -------------------------------------------------------------------------------------------- */

typedef struct score_terms {
	float scale;         /* of the raw product; its sign is already in Q */
	float softcap;       /* 0: none */
	float slope;         /* ALiBi's; 0: none */
	int64_t position;    /* i + off of the row */
	const void *bias;    /* the row's first element; NULL: none */
	int64_t bias_stride; /* along the keys: 1, or 0 when broadcast */
	int32_t bias_dtype;
} score_terms;

X86_INLINE vf bias_load(const score_terms *t, int64_t key, int64_t n) {
	const bool one = t->bias_stride == 0;
	switch (t->bias_dtype) {
	case INGOT_F32: {
		const float *p = t->bias;
		return one ? v_set(*p) : v_load_f32(p + key, n);
	}
	case INGOT_F16: {
		const uint16_t *p = t->bias;
		return one ? v_set(ingot__from_f16(*p)) : v_load_f16(p + key, n);
	}
	default: {
		const uint16_t *p = t->bias;
		return one ? v_set(ingot__from_bf16(*p)) : v_load_bf16(p + key, n);
	}
	}
}

/* Raw products of one row, columns [c0, c1) of a block that starts at key k0, become scores in natural units. Bias is read for
 * keys below len_k only; a bias of -inf (or false) masks its pair even where the score is NaN. */
static inline void scores_add_terms(float *s, const score_terms *t, int64_t k0, int64_t c0, int64_t c1, int64_t len_k) {
	const vf scale = v_set(t->scale), cap = v_set(t->softcap), slope = v_set(-t->slope), none = v_set(-INFINITY);
	for (int64_t j = c0; j < c1; j += VL) {
		const int64_t key = k0 + j, n = len_k - key;
		if (n <= 0) break;
		vf x = v_mul(v_load(s + j), scale);
		if (t->softcap > 0) x = v_mul(cap, v_tanh(v_div(x, cap)));
		if (t->slope != 0) x = v_fma(slope, v_abs(v_add(v_set((float)(key - t->position)), v_lanes())), x);
		if (t->bias && t->bias_dtype == INGOT_BOOL) {
			const uint8_t *p = t->bias;
			x = t->bias_stride ? v_select(v_load_bool(p + key, n), x, none) : *p ? x : none;
		} else if (t->bias) {
			const vf bias = bias_load(t, key, n);
			x = v_select(v_equal(bias, none), none, v_add(x, bias));
		}
		v_store(s + j, x);
	}
}

/* Columns of [c0, c1) outside [first, last) become -inf, whatever they hold. */
static inline void scores_mask(float *s, int64_t c0, int64_t c1, int64_t first, int64_t last) {
	const vf none = v_set(-INFINITY);
	for (int64_t j = c0; j < c1 && j < first; j += VL)
		v_store(s + j, v_select(v_first(first - j), none, v_load(s + j)));
	int64_t j = last <= c0 ? c0 : c0 + (last - c0) / VL * VL;
	for (; j < c1; j += VL) v_store(s + j, v_select(v_first(last - j), v_load(s + j), none));
}

/* ---- dropout ------------------------------------------------------------------------------------------------------- */

#ifdef __AVX512F__
typedef __m512i vi;
#define X86_VI(op) _mm512_##op
#define X86_ODD(even, odd) _mm512_mask_mov_epi32(even, 0xaaaa, odd)
#define X86_VI_AND(a, b) _mm512_and_si512(a, b)
#define X86_VI_XOR(a, b) _mm512_xor_si512(a, b)
#define X86_VI_LOAD(p) _mm512_loadu_si512(p)
#else
typedef __m256i vi;
#define X86_VI(op) _mm256_##op
#define X86_ODD(even, odd) _mm256_blend_epi32(even, odd, 0xaa)
#define X86_VI_AND(a, b) _mm256_and_si256(a, b)
#define X86_VI_XOR(a, b) _mm256_xor_si256(a, b)
#define X86_VI_LOAD(p) _mm256_loadu_si256((const void *)(p))
#endif

/* Both halves of the 64-bit products of 32-bit lanes. */
X86_INLINE void philox_multiply(vi a, uint32_t by, vi *high, vi *low) {
	const vi m = X86_VI(set1_epi32)((int)by);
	const vi even = X86_VI(mul_epu32)(a, m), odd = X86_VI(mul_epu32)(X86_VI(srli_epi64)(a, 32), m);
	*low = X86_ODD(even, X86_VI(slli_epi64)(odd, 32));
	*high = X86_ODD(X86_VI(srli_epi64)(even, 32), odd);
}

/* Words of VL consecutive draws from index on, in the order of their keys: word[t] serves keys [t VL, t VL + VL). */
static inline void philox_words(uint64_t seed, uint64_t offset, uint64_t index, vi word[4]) {
	/* lane 4 L + t computes draw t VL/4 + L, so that two rounds of unpacking put the words in order */
	uint32_t draw[VL];
	for (int i = 0; i < VL; i++) draw[i] = (uint32_t)(i % 4 * (VL / 4) + i / 4);
	const vi lane = X86_VI_LOAD(draw);
	vi c2 = X86_VI(add_epi32)(X86_VI(set1_epi32)((int)(uint32_t)index), lane),
	   c3 = X86_VI(set1_epi32)((int)(index >> 32));
	if ((uint32_t)index > UINT32_MAX - VL) {
		uint32_t high[VL];
		for (int i = 0; i < VL; i++) high[i] = (uint32_t)((index + draw[i]) >> 32);
		c3 = X86_VI_LOAD(high);
	}
	vi c0 = X86_VI(set1_epi32)((int)(uint32_t)offset), c1 = X86_VI(set1_epi32)((int)(offset >> 32));
	uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
	for (int round = 0; round < 10; round++) {
		vi high0, low0, high2, low2;
		philox_multiply(c0, 0xD2511F53u, &high0, &low0);
		philox_multiply(c2, 0xCD9E8D57u, &high2, &low2);
		c0 = X86_VI_XOR(X86_VI_XOR(high2, c1), X86_VI(set1_epi32)((int)key0));
		c2 = X86_VI_XOR(X86_VI_XOR(high0, c3), X86_VI(set1_epi32)((int)key1));
		c1 = low2;
		c3 = low0;
		key0 += 0x9E3779B9u;
		key1 += 0xBB67AE85u;
	}
	const vi low01 = X86_VI(unpacklo_epi32)(c0, c1), low23 = X86_VI(unpacklo_epi32)(c2, c3);
	const vi high01 = X86_VI(unpackhi_epi32)(c0, c1), high23 = X86_VI(unpackhi_epi32)(c2, c3);
	word[0] = X86_VI(unpacklo_epi64)(low01, low23);
	word[1] = X86_VI(unpackhi_epi64)(low01, low23);
	word[2] = X86_VI(unpacklo_epi64)(high01, high23);
	word[3] = X86_VI(unpackhi_epi64)(high01, high23);
}

/* Lanes whose word keeps its entry. */
X86_INLINE vmask philox_keep(vi word, uint32_t threshold) {
	const vi t = X86_VI(set1_epi32)((int)threshold);
#ifdef __AVX512F__
	return _mm512_cmpge_epu32_mask(word, t);
#else
	return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_max_epu32(word, t), word));
#endif
}

/* Zeros the dropped entries of one row of probabilities (packed as the product reads them), columns [c0, c1) of a block.
 * index: the counter of the block's first key. */
static inline void probabilities_drop(float *p, uint64_t seed, uint64_t offset, uint64_t index, uint32_t threshold,
                                      int64_t c0, int64_t c1) {
	for (int64_t j = c0 / (4 * VL) * (4 * VL); j < c1; j += 4 * VL) {
		vi word[4];
		philox_words(seed, offset, index + (uint64_t)j / 4, word);
		for (int t = 0; t < 4; t++) {
			const int64_t at = j + t * VL;
			if (at < c0 || at >= c1) continue;
#if X86_PAIRS
			uint16_t *q = (uint16_t *)p + at;
			v_store_16bit(q, _mm256_maskz_mov_epi16(philox_keep(word[t], threshold), v_load_16bit(q, VL)), VL);
#else
			v_store(p + at, v_select(philox_keep(word[t], threshold), v_load(p + at), v_zero()));
#endif
		}
	}
}

/* ---- the running softmax -------------------------------------------------------------------------------------------- */

/*
 * A row's reference m is the maximum of the first block in which it sees a key, and moves only when a later block holds a score
 * far above it: then exponents would grow, not lose precision, so a block is first tried against the old reference and done
 * again, with its maximum, when some lane's sum exceeds SOFTMAX_LIMIT. That saves the pass for the maximum nearly always, and
 * costs one more pass at worst. It is decided for each row by its own scores, so strips may be cut anywhere.
 */
#define SOFTMAX_LIMIT 256.0f
/* Exponents m * factor up to which their rounding, which all exponents of a row then share, stays below one half. */
#define SOFTMAX_FUSED 4194304.0f

/* Probabilities of one row against the reference, returned are their lane-wise sums. factor turns scores into exponents of
 * two. exact: subtract first, which costs an operation and is right for scores of any size. */
X86_INLINE vf softmax_row(const float *s, float *p, float m, float factor, int64_t c0, int64_t c1, bool exact) {
	const vf f = v_set(factor), reference = v_set(exact ? m : m * factor);
	vf sum0 = v_zero(), sum1 = v_zero();
	for (int64_t j = c0; j < c1; j += NR) {
		vf e0 = v_load(s + j), e1 = v_load(s + j + VL);
		if (exact) {
			e0 = v_mul(v_sub(e0, reference), f);
			e1 = v_mul(v_sub(e1, reference), f);
		} else {
			e0 = v_fms(e0, f, reference);
			e1 = v_fms(e1, f, reference);
		}
		e0 = v_exp2(e0, EXP2_DEGREE);
		e1 = v_exp2(e1, EXP2_DEGREE);
		sum0 = v_add(sum0, e0);
		sum1 = v_add(sum1, e1);
#if X86_PAIRS
		_mm512_storeu_si512((uint16_t *)p + j, (__m512i)_mm512_cvtne2ps_pbh(e1, e0));
#else
		v_store(p + j, e0);
		v_store(p + j + VL, e1);
#endif
	}
	return v_add(sum0, sum1);
}

X86_INLINE float softmax_top(const float *s, int64_t c0, int64_t c1) {
	vf a = v_load(s + c0), b = v_load(s + c0 + VL);
	for (int64_t j = c0 + NR; j < c1; j += NR) {
		a = v_max(a, v_load(s + j));
		b = v_max(b, v_load(s + j + VL));
	}
	return v_largest(v_max(a, b));
}

/* New references from the old ones and the maxima of a block (-inf: keep), and what earlier results must be multiplied by. */
X86_INLINE vf softmax_move(vf old, vf top, float factor, vf *alpha) {
	const vf new = v_max(old, top);
	/* exactly 1 where the reference stayed: the polynomial is not exact at 0 and its error would grow with every block */
	*alpha = v_select(v_equal(old, new), v_set(1.0f), v_exp2(v_mul(v_sub(old, new), v_set(factor)), 5));
	return new;
}

/* One strip of `rows` rows: scores s (row stride BLOCK) to probabilities p (row stride BLOCK / PACK), columns [c0, c1), both
 * multiples of NR. m (VL slots readable) and l (VL floats a row) are updated; alpha (VL slots) is what earlier results of each
 * row must be multiplied by. Whether any alpha is not 1 is returned. Rows that are -inf everywhere give zeros. */
static inline bool softmax_strip(const float *s, float *p, float *m, float *l, float *alpha, int rows, int64_t c0,
                                 int64_t c1, float factor) {
	const vf none = v_set(-INFINITY), limit = v_set(SOFTMAX_LIMIT), huge = v_set(SOFTMAX_FUSED / factor);
	bool moved = false;
	float reference[VL] X86_ALIGNED;
	vf old = v_load(m);
	v_store(alpha, v_set(1.0f));
	if (v_any(v_equal(old, none))) {
		float top[VL] X86_ALIGNED;
		v_store(top, none);
		for (int r = 0; r < rows; r++)
			if (m[r] == -INFINITY) top[r] = softmax_top(s + r * BLOCK, c0, c1);
		vf a;
		old = softmax_move(old, v_load(top), factor, &a);
		v_store(alpha, a);
		v_store(reference, old);
		memcpy(m, reference, (size_t)rows * sizeof *m);
		moved = true;
	}
	/* a row that has seen nothing yet: any finite reference gives zeros */
	v_store(reference, v_select(v_equal(old, none), v_zero(), old));
	const bool exact = v_any(v_less(huge, v_abs(old)));
	for (int r = 0; r < rows; r++) {
		const float *x = s + r * BLOCK;
		float *y = p + r * (BLOCK / PACK);
		vf sum;
		if (!exact) sum = softmax_row(x, y, reference[r], factor, c0, c1, false);
		else sum = softmax_row(x, y, reference[r], factor, c0, c1, fabsf(reference[r]) > SOFTMAX_FUSED / factor);
		if (v_any(v_less(limit, sum))) {
			vf a, new = softmax_move(v_set(m[r]), v_set(softmax_top(x, c0, c1)), factor, &a);
			m[r] = v_lane0(new);
			alpha[r] = v_lane0(a);
			sum = softmax_row(x, y, m[r], factor, c0, c1, true);
			moved = true;
		}
		v_store(l + r * VL, v_fma(v_load(l + r * VL), v_set(alpha[r]), sum));
	}
	return moved;
}

#endif
