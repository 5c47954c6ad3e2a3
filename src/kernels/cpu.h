/*
 * What every CPU kernel needs of the problem's meaning: where a sequence's rows are, which page holds a key, the mask's
 * bounds of a row, dropout's random words, and conversions of single values. Plain C, no instruction set assumed; all of it
 * follows docs and the specification literally, so that kernels cannot differ in it.
 */
#ifndef INGOT_KERNELS_CPU_H
#define INGOT_KERNELS_CPU_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../pipeline.h"

static inline int64_t ingot__clamp(int64_t x, int64_t low, int64_t high) {
	return x < low ? low : x > high ? high : x;
}

/* ---- sequences and pages ------------------------------------------------------------------------------------------- */

typedef struct ingot__span {
	int64_t slot;  /* index along the storage's batch axis */
	int64_t start; /* first row along its token axis */
	int64_t count; /* rows */
} ingot__span;

/* Rows of sequence b on one side, clamped into the storage whatever the arrays hold. Not for pages. */
static inline ingot__span ingot__locate(const ingot__side *side, int64_t b) {
	int64_t start = 0, count = side->stacked ? side->max_seqlen : side->capacity;
	if (side->length == INGOT_LENGTH_CUMULATIVE) count = (int64_t)side->lengths[b + 1] - side->lengths[b];
	else if (side->length == INGOT_LENGTH_INDIVIDUAL) count = side->lengths[b];
	if (side->stacked) {
		if (side->position == INGOT_POSITION_REUSE) start = side->lengths[b];
		else if (side->position == INGOT_POSITION_ARRAY) start = side->positions[b];
		else start = b * side->max_seqlen;
	}
	start = ingot__clamp(start, 0, side->capacity);
	int64_t most = side->capacity - start;
	if (most > side->max_seqlen) most = side->max_seqlen;
	return (ingot__span){side->stacked ? 0 : b, start, ingot__clamp(count, 0, most)};
}

/* The page list of sequence b: pointer and length, clamped into the index array. */
static inline const int32_t *ingot__page_list(const ingot__problem *p, int64_t b, int64_t *pages) {
	if (p->pages.table) {
		*pages = p->pages.max_pages;
		return p->pages.table + b * p->pages.table_stride;
	}
	int64_t first = ingot__clamp(p->pages.indptr[b], 0, p->pages.indices_count);
	*pages = ingot__clamp(p->pages.indptr[b + 1], first, p->pages.indices_count) - first;
	return p->pages.indices + first;
}

/* Key rows of sequence b, pages included. For pages slot and start are 0 and meaningless. */
static inline ingot__span ingot__key_rows(const ingot__problem *p, int64_t b) {
	if (!(p->features & INGOT__PAGED)) return ingot__locate(&p->k_side, b);
	int64_t pages, n = p->k_side.lengths[b];
	(void)ingot__page_list(p, b, &pages);
	if (p->k_side.length == INGOT_LENGTH_LAST_PAGE) n = pages ? (pages - 1) * p->pages.page_size + n : 0;
	int64_t most = pages * p->pages.page_size;
	if (p->pages.count == 0) most = 0;
	return (ingot__span){0, 0, ingot__clamp(n, 0, most < p->k_side.max_seqlen ? most : p->k_side.max_seqlen)};
}

/* Element offset of key row j of a sequence within K or V (t), its head's offset included. list: of ingot__page_list. */
static inline int64_t ingot__key_offset(const ingot__problem *p, const ingot_tensor *t, ingot__span rows,
                                        const int32_t *list, int64_t head, int64_t j) {
	if (!(p->features & INGOT__PAGED))
		return rows.slot * t->stride[0] + head * t->stride[1] + (rows.start + j) * t->stride[2];
	int64_t page = ingot__clamp(list[j / p->pages.page_size], 0, p->pages.count - 1);
	return page * t->stride[0] + j % p->pages.page_size * t->stride[1] + head * t->stride[2];
}

/* Element offset of row i of a sequence in a [B or 1,H,S or T,*] tensor. */
static inline int64_t ingot__row_offset(const ingot_tensor *t, ingot__span rows, int64_t head, int64_t i) {
	return rows.slot * t->stride[0] + head * t->stride[1] + (rows.start + i) * t->stride[2];
}

/* Element offset of row i of a sequence in lse ([B,Hq,S] by stride, batch stride 0 when stacked). */
static inline int64_t ingot__lse_offset(const ingot__problem *p, ingot__span rows, int64_t b, int64_t head, int64_t i) {
	return b * p->lse.stride[0] + head * p->lse.stride[1] + (rows.start + i) * p->lse.stride[2];
}

/* off of the mask and of ALiBi for a sequence with these lengths. */
static inline int64_t ingot__diagonal(const ingot__problem *p, int64_t len_q, int64_t len_k) {
	return p->bottom_right ? len_k - len_q : 0;
}

/* Keys [*first, *last) that query row i sees by the mask alone (empty: *first >= *last). */
static inline void ingot__visible(const ingot__problem *p, int64_t i, int64_t off, int64_t len_k, int64_t *first,
                                  int64_t *last) {
	*first = ingot__clamp(i + off - p->left, 0, len_k);
	*last = ingot__clamp(i + off + p->right + 1, 0, len_k);
}

/* ---- factors ------------------------------------------------------------------------------------------------------- */

/* A descale factor: absent 1, one element, or [B,heads] with heads the query or the key heads. */
static inline float ingot__descale(const ingot__problem *p, const ingot_tensor *t, int64_t b, int64_t head_q) {
	if (t->dtype == INGOT_NONE) return 1.0f;
	const float *f = t->data;
	if (t->ndim == 1) return f[0];
	int64_t head = t->shape[1] == p->heads_q ? head_q : head_q / p->group;
	if (t != &p->q_descale) head = head_q / p->group;
	return f[b * t->stride[0] + head * t->stride[1]];
}

static inline float ingot__alibi_slope(const ingot__problem *p, int64_t b, int64_t head_q) {
	const float *f = p->alibi.data;
	return p->alibi.ndim == 1 ? f[head_q * p->alibi.stride[0]]
	                          : f[b * p->alibi.stride[0] + head_q * p->alibi.stride[1]];
}

/* ---- dropout ------------------------------------------------------------------------------------------------------- */

/* Philox4x32-10 (Salmon et al., SC 2011): four words of counter (offset, index) under the key seed. */
static inline void ingot__philox(uint64_t seed, uint64_t offset, uint64_t index, uint32_t word[4]) {
	uint32_t c0 = (uint32_t)offset, c1 = (uint32_t)(offset >> 32), c2 = (uint32_t)index, c3 = (uint32_t)(index >> 32);
	uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
	for (int round = 0; round < 10; round++) {
		uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
		uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ k0, n2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
		c0 = n0, c1 = (uint32_t)b, c2 = n2, c3 = (uint32_t)a;
		k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
	}
	word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
}

/* The seed and offset a call uses, read from its cells where given. */
static inline uint64_t ingot__dropout_seed(const ingot__problem *p) {
	return p->dropout_seed_ptr.dtype == INGOT_NONE ? p->dropout_seed : *(const uint64_t *)p->dropout_seed_ptr.data;
}
static inline uint64_t ingot__dropout_offset(const ingot__problem *p) {
	return p->dropout_offset +
	       (p->dropout_offset_ptr.dtype == INGOT_NONE ? 0 : *(const uint64_t *)p->dropout_offset_ptr.data);
}

/* Counter index of keys j..j|3 of a row. */
static inline uint64_t ingot__dropout_index(const ingot__problem *p, int64_t b, int64_t head_q, int64_t i, int64_t j) {
	uint64_t quads = ((uint64_t)p->k_side.max_seqlen + 3) / 4;
	return ((uint64_t)(b * p->heads_q + head_q) * (uint64_t)p->q_side.max_seqlen + (uint64_t)i) * quads +
	       (uint64_t)j / 4;
}

/* ---- values -------------------------------------------------------------------------------------------------------- */

static inline float ingot__bits_float(uint32_t bits) {
	float f;
	memcpy(&f, &bits, sizeof f);
	return f;
}
static inline uint32_t ingot__float_bits(float f) {
	uint32_t bits;
	memcpy(&bits, &f, sizeof bits);
	return bits;
}

static inline float ingot__from_bf16(uint16_t h) {
	return ingot__bits_float((uint32_t)h << 16);
}
static inline uint16_t ingot__to_bf16(float f) {
	uint32_t u = ingot__float_bits(f);
	if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40);
	return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* a where the condition holds, else b; by bits, since a compiler cannot make vector code of a branch round a float sum. */
static inline uint32_t ingot__select(bool condition, uint32_t a, uint32_t b) {
	const uint32_t mask = 0u - (uint32_t)condition;
	return (a & mask) | (b & ~mask);
}

static inline float ingot__from_f16(uint16_t h) {
	const uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h & 0x7c00, m = h & 1023;
	const uint32_t low = ingot__float_bits((float)(int32_t)m * 0x1p-24f);
	const uint32_t high = ((uint32_t)(h & 0x7fff) << 13) + (112u << 23) + ingot__select(e == 0x7c00, 112u << 23, 0);
	return ingot__bits_float(sign | ingot__select(e == 0, low, high));
}
/* Round to nearest even; overflow becomes Inf. */
static inline uint16_t ingot__to_f16(float f) {
	const uint32_t u = ingot__float_bits(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffffu;
	/* Denormal: let the adder round at 2^-24. */
	const uint32_t low = ingot__float_bits(ingot__bits_float(a) + 0.5f) - 0x3f000000u;
	const uint32_t high = ((a + 0xfff + (a >> 13 & 1)) >> 13) - (112u << 10);
	uint32_t code = ingot__select(a < 0x38800000u, low, high);
	code = ingot__select(a >= 0x477ff000u, 0x7c00, code);
	return (uint16_t)(sign | ingot__select(a > 0x7f800000u, 0x7e00 | (a >> 13 & 0x1ff), code));
}

/* 8-bit types: exponent bits, bias, and which codes are special. */
static inline float ingot__from_f8(uint8_t x, int32_t dtype) {
	bool e5 = dtype == INGOT_F8_E5M2 || dtype == INGOT_F8_E5M2_FNUZ, fnuz = dtype >= INGOT_F8_E4M3_FNUZ;
	int mbits = e5 ? 2 : 3, bias = (e5 ? 15 : 7) + fnuz;
	int e = x >> mbits & (e5 ? 31 : 15), m = x & ((1 << mbits) - 1);
	if (fnuz && x == 0x80) return NAN;
	if (!fnuz && e5 && e == 31) return m ? NAN : x & 0x80 ? -INFINITY : INFINITY;
	if (!fnuz && !e5 && (x & 0x7f) == 0x7f) return NAN;
	float f = e ? ldexpf((float)(m + (1 << mbits)), e - bias - mbits) : ldexpf((float)m, 1 - bias - mbits);
	return x & 0x80 ? -f : f;
}
/* Round to nearest even, saturating to the largest finite value; NaN stays NaN. */
static inline uint8_t ingot__to_f8(float f, int32_t dtype) {
	const bool e5 = dtype == INGOT_F8_E5M2 || dtype == INGOT_F8_E5M2_FNUZ, fnuz = dtype >= INGOT_F8_E4M3_FNUZ;
	const uint32_t mbits = e5 ? 2 : 3, bias = (e5 ? 15 : 7) + fnuz, most = fnuz ? 0x7f : e5 ? 0x7b : 0x7e;
	const uint32_t u = ingot__float_bits(f), sign = u >> 24 & 0x80, a = u & 0x7fffffffu, drop = 23 - mbits;
	/* Below the smallest normal number let the adder round: `one` has the denormals' spacing as its last place. */
	const uint32_t one = (150 - bias + 1 - mbits) << 23;
	const uint32_t low = ingot__float_bits(ingot__bits_float(a) + ingot__bits_float(one)) - one;
	const uint32_t high = ((a + (1u << (drop - 1)) - 1 + (a >> drop & 1)) >> drop) - ((127 - bias) << mbits);
	uint32_t code = ingot__select(a < (128 - bias) << 23, low, high);
	if (code > most) code = most;
	code = fnuz && code == 0 ? 0 : sign | code;
	return (uint8_t)ingot__select(a > 0x7f800000u, fnuz ? 0x80 : sign | 0x7f, code);
}

static inline int ingot__dtype_size(int32_t dtype) {
	switch (dtype) {
	case INGOT_F32:
	case INGOT_I32: return 4;
	case INGOT_F16:
	case INGOT_BF16: return 2;
	case INGOT_I64:
	case INGOT_U64: return 8;
	case INGOT_NONE: return 0;
	default: return 1;
	}
}

static inline float ingot__load(const void *base, int64_t index, int32_t dtype) {
	const char *p = (const char *)base + index * ingot__dtype_size(dtype);
	float f;
	uint16_t h;
	switch (dtype) {
	case INGOT_F32: memcpy(&f, p, 4); return f;
	case INGOT_F16: memcpy(&h, p, 2); return ingot__from_f16(h);
	case INGOT_BF16: memcpy(&h, p, 2); return ingot__from_bf16(h);
	default: return ingot__from_f8(*(const uint8_t *)p, dtype);
	}
}

static inline void ingot__store(void *base, int64_t index, int32_t dtype, float f) {
	char *p = (char *)base + index * ingot__dtype_size(dtype);
	uint16_t h;
	switch (dtype) {
	case INGOT_F32: memcpy(p, &f, 4); break;
	case INGOT_F16:
		h = ingot__to_f16(f);
		memcpy(p, &h, 2);
		break;
	case INGOT_BF16:
		h = ingot__to_bf16(f);
		memcpy(p, &h, 2);
		break;
	default: *(uint8_t *)p = ingot__to_f8(f, dtype); break;
	}
}

#endif
