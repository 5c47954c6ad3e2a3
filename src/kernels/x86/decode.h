/*
 * Attention forward for few query rows, where the time goes into reading K and V. Each row of them is read once, in place, for
 * all query rows that share its key head. An item is one key head of one sequence, up to TILE query rows and a range of keys;
 * ranges are decided by sizes that the host knows and by the sequence's own length, and merged in order by a second step, so
 * results are the same for any number of threads. A task is a run of items.
 *
 * The including file defines DECODE_NAME, DECODE_KEYS, how many keys a block has, and DECODE_HINT, where rows are fetched
 * to, and tells decode_plan its vector length.
 *
 * K and V are walked through tables of row pointers, a block of keys at a time: pages and strides are dealt with there and
 * nowhere else. While a block's K is multiplied its V is fetched, and with its V the K of the block after, be it the next
 * item's: the hardware does not see that far ahead. Elements of a row are taken in units of 2 VL: two vectors, one line of
 * 16-bit elements on AVX-512. bf16 units are split into even and odd elements by a shift and a mask, which needs no shuffle; Q
 * and O are kept in that order too. vdpbf16ps is not used: where 512-bit products go to two ports it does half of what
 * fp32 does, and it would round P.
 */
#ifndef INGOT_KERNELS_X86_DECODE_H
#define INGOT_KERNELS_X86_DECODE_H

#include "../cpu.h"

#define DECODE_JOIN_(a, b, c) a##b##c
#define DECODE_JOIN(a, b, c) DECODE_JOIN_(a, b, c)
#define DECODE_TEXT_(a) #a
#define DECODE_TEXT(a) DECODE_TEXT_(a)
#define DECODE_IMPL DECODE_JOIN(ingot__impl_, DECODE_NAME, )
#define DECODE_TASK(step) DECODE_JOIN(ingot__, DECODE_NAME, step)

enum {
	KEYS = DECODE_KEYS,             /* in a block */
	TILE = 32,                      /* query rows that share one reading of K and V */
	ROWS_MOST = 24,                 /* query rows per key head: beyond, packing K and V pays */
	PART_BLOCKS = 512 / KEYS,       /* the fewest blocks worth a task of their own */
	INVARIANT_BLOCKS = 1024 / KEYS, /* blocks in a task when results must not depend on the batch */
	ITEMS_WANTED = 128,
	TASKS_PER_THREAD = 8
};

/* plan->number */
enum { N_PARTS, N_TILES, N_TILE_ROWS, N_Q_PITCH, N_O_PITCH, N_RECORD, N_ITEMS, N_RUN };

/* A row's own terms and its running softmax. */
typedef struct query_row {
	int64_t first, last; /* the keys it sees */
	int64_t position;    /* i + off */
	const char *bias;    /* its element of key 0 */
	float slope;
	float top; /* the largest score so far, natural units */
} query_row;

typedef struct row_table {
	const char *k[KEYS], *v[KEYS];
} row_table;

/* The head of a task's scratch; rows of floats follow: scores and sums (of KEYS and of VL), Q, and O when it is not in the
 * workspace. */
typedef struct decode_scratch {
	row_table table[2];
	query_row row[2][TILE];
	float alpha[TILE];
} decode_scratch;

ingot__task DECODE_TASK(_part), DECODE_TASK(_merge);

static inline int64_t round_up(int64_t x, int64_t to) {
	return (x + to - 1) / to * to;
}

#ifdef INGOT_HOST

static inline const char *decode_refuse(const ingot__problem *p) {
	INGOT__REFUSE_IF(p->features & INGOT__DROPOUT, "dropout is left to the general kernels");
	INGOT__REFUSE_IF(p->dropout_seed_out.dtype != INGOT_NONE || p->dropout_offset_out.dtype != INGOT_NONE,
	                 "writing back the dropout seed is left to the general kernels");
	INGOT__REFUSE_IF(p->features & INGOT__8BIT_Q, "q is 8-bit: it reads fp32, fp16 and bf16 queries");
	INGOT__REFUSE_IF(p->k.dtype == INGOT_F8_E5M2_FNUZ, "k and v are F8_E5M2_FNUZ, whose exponents fp16 lacks");
	/* with 8-bit keys there is no other kernel but the reference */
	INGOT__REFUSE_IF(!(p->features & INGOT__8BIT_KV) && p->q_side.max_seqlen > ROWS_MOST / p->group,
	                 "more than 24 query rows share a key head: kernels that pack K and V are faster");
	return NULL;
}

/* lanes: floats in a vector. */
static inline void decode_plan(const ingot__problem *p, ingot__plan *out, int threads, int64_t lanes) {
	const int64_t rows = p->q_side.max_seqlen * p->group, sequences = p->batch * p->heads_k;
	if (rows == 0 || sequences == 0) return;
	const int64_t tile_rows = round_up(rows < TILE ? rows : TILE, 4), tiles = (rows + TILE - 1) / TILE;
	const int64_t q_pitch = round_up(p->head_dim, 2 * lanes), o_pitch = round_up(p->head_dim_v, 2 * lanes);

	/* keys that a tile can see at most */
	int64_t span = p->k_side.max_seqlen;
	const int64_t width = p->left + p->right + 1 + p->q_side.max_seqlen;
	if (width < span) span = width < 0 ? 0 : width;
	const int64_t blocks = (span + KEYS - 1) / KEYS;
	int64_t parts = blocks / PART_BLOCKS, wanted = (ITEMS_WANTED + sequences * tiles - 1) / (sequences * tiles);
	if (parts > wanted) parts = wanted;
	if (p->batch_invariant) parts = (blocks + INVARIANT_BLOCKS - 1) / INVARIANT_BLOCKS;
	if (parts < 1) parts = 1;

	const int64_t record = round_up(tile_rows * (o_pitch + 2), 16);
	out->number[N_PARTS] = parts;
	out->number[N_TILES] = tiles;
	out->number[N_TILE_ROWS] = tile_rows;
	out->number[N_Q_PITCH] = q_pitch;
	out->number[N_O_PITCH] = o_pitch;
	out->number[N_RECORD] = record;
	out->scratch_bytes = (uint64_t)round_up(sizeof(decode_scratch), 64) +
	                     (uint64_t)(tile_rows * (KEYS + lanes + q_pitch) + record) * sizeof(float);

	/* A task is a run of items, each of which fetches the start of the next. Only runs depend on the number of threads. */
	const int64_t items = sequences * tiles * parts, tasks = threads > 1 ? (int64_t)threads * TASKS_PER_THREAD : 1;
	const int64_t run = (items + tasks - 1) / tasks;
	const double elements = (double)(sequences * span) * (double)(p->head_dim + p->head_dim_v);
	const double bytes = elements * ingot__dtype_size(p->k.dtype);
	out->number[N_ITEMS] = items;
	out->number[N_RUN] = run;

	/* nanoseconds: what a core reads from its cache or from memory, and multiplies, in one */
	const double reading = bytes / (bytes < 1e6 ? 50 : 15), products = elements * (double)rows / (3.4 * (double)lanes);
	out->step[out->steps++] = (ingot__step){.name = parts > 1 ? "parts" : "whole",
	                                        .task = DECODE_TASK(_part),
	                                        .tasks = (items + run - 1) / run,
	                                        .work = (reading > products ? reading : products) + 100.0 * (double)items};
	if (parts == 1) return;
	out->workspace_bytes = (uint64_t)(sequences * tiles * parts * record) * sizeof(float);
	out->step[out->steps++] = (ingot__step){.name = "merge",
	                                        .task = DECODE_TASK(_merge),
	                                        .tasks = sequences * tiles,
	                                        .work = (double)(sequences * rows * parts * o_pitch) / 8};
}

#else /* the kernel */

#include "vec.h"

enum { UNIT = 2 * VL };

#define LOG2E 1.44269504088896340736f

/* 2^x for x <= 127, relative error 8e-8 and exactly 1 at 0, so that the row of a single key is that key's V; 0 for -inf. The
 * polynomial is a minimax fit on [-1/2, 1/2]. */
X86_INLINE vf exp2_exact_at_0(vf x) {
#ifdef __AVX512F__
	const vf f = _mm512_reduce_ps(x, 0x08); /* x - round(x), 0 for -inf */
#else
	const vf low = v_set(-126.0f);
	x = v_max(low, x);
	const vf n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = v_sub(x, n);
#endif
	vf p = v_fma(v_set(0.0001535336196f), f, v_set(0.001339887385f));
	p = v_fma(p, f, v_set(0.009618436918f));
	p = v_fma(p, f, v_set(0.05550332367f));
	p = v_fma(p, f, v_set(0.2402264774f));
	p = v_fma(p, f, v_set(0.6931471825f));
	p = v_fma(p, f, v_set(1.0f));
#ifdef __AVX512F__
	return _mm512_scalef_ps(p, v_sub(x, f));
#else
	const __m256i e = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
	p = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), e));
	return _mm256_and_ps(p, _mm256_cmp_ps(x, low, _CMP_NLE_UQ));
#endif
}

X86_INLINE float v_first_lane(vf x) {
#ifdef __AVX512F__
	return _mm512_cvtss_f32(x);
#else
	return _mm256_cvtss_f32(x);
#endif
}

/* exp(x) of one value by the same arithmetic. */
X86_INLINE float exp_one(float x) {
	return v_first_lane(exp2_exact_at_0(v_set(x * LOG2E)));
}

/* ---- units of a row ------------------------------------------------------------------------------------------------- */

/* VL bytes as the fp16 numbers whose exponent field they share: e5m2 exactly, the e4m3 types 2^-8 and 2^-7 of their value. */
#ifdef __AVX512F__
typedef __m256i half_vector;
#define HALF(op) _mm256_##op
#define HALF_LOGIC(op) _mm256_##op##_si256
#define HALF_WIDEN(p) _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)(p)))
#define HALF_FLOATS(x) _mm512_cvtph_ps(x)
#else
typedef __m128i half_vector;
#define HALF(op) _mm_##op
#define HALF_LOGIC(op) _mm_##op##_si128
#define HALF_WIDEN(p) _mm_cvtepu8_epi16(_mm_loadl_epi64((const void *)(p)))
#define HALF_FLOATS(x) _mm256_cvtph_ps(x)
#endif

X86_INLINE vf load_8bit(const int32_t type, const char *p) {
	const half_vector w = HALF_WIDEN(p);
	if (type == INGOT_F8_E5M2) return HALF_FLOATS(HALF(slli_epi16)(w, 8));
	const half_vector sign = HALF(slli_epi16)(HALF_LOGIC(and)(w, HALF(set1_epi16)(0x80)), 8);
	const half_vector rest = HALF_LOGIC(and)(w, HALF(set1_epi16)(0x7f));
	const half_vector nan = type == INGOT_F8_E4M3 ? HALF(cmpeq_epi16)(rest, HALF(set1_epi16)(0x7f))
	                                              : HALF(cmpeq_epi16)(w, HALF(set1_epi16)(0x80));
	half_vector h = HALF_LOGIC(or)(sign, HALF(slli_epi16)(rest, 7));
	h = HALF_LOGIC(or)(h, HALF_LOGIC(and)(nan, HALF(set1_epi16)(0x7fff)));
	return HALF_FLOATS(h);
}

/* What load_8bit leaves out. */
static float factor_8bit(int32_t type) {
	return type == INGOT_F8_E4M3 ? 256 : type == INGOT_F8_E4M3_FNUZ ? 128 : 1;
}

X86_INLINE int size_of(const int32_t type) {
	return type == INGOT_F32 ? 4 : type == INGOT_F16 || type == INGOT_BF16 ? 2 : 1;
}

X86_INLINE void split_bf16(vf x, vf *even, vf *odd) {
#ifdef __AVX512F__
	const __m512i u = _mm512_castps_si512(x);
	*even = _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
	*odd = _mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32((int)0xffff0000u)));
#else
	const __m256i u = _mm256_castps_si256(x);
	*even = _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
	*odd = _mm256_castsi256_ps(_mm256_and_si256(u, _mm256_set1_epi32((int)0xffff0000u)));
#endif
}

/* UNIT elements from p on. */
X86_INLINE void load_unit(const int32_t type, const char *p, vf *lo, vf *hi) {
	if (type == INGOT_F32) {
		*lo = v_load((const float *)p);
		*hi = v_load((const float *)p + VL);
	} else if (type == INGOT_F16) {
		*lo = v_load_f16((const uint16_t *)p, VL);
		*hi = v_load_f16((const uint16_t *)p + VL, VL);
	} else if (type == INGOT_BF16) {
		split_bf16(v_load((const float *)p), lo, hi);
	} else {
		*lo = load_8bit(type, p);
		*hi = load_8bit(type, p + VL);
	}
}

/* The first n < UNIT of them, zeros above; nothing beyond them is read. */
X86_INLINE void load_unit_tail(const int32_t type, const char *p, int64_t n, vf *lo, vf *hi) {
	if (type == INGOT_F32) {
		*lo = v_load_f32((const float *)p, n);
		*hi = n > VL ? v_load_f32((const float *)p + VL, n - VL) : v_zero();
		return;
	}
#ifdef __AVX512F__
	if (type == INGOT_F16) {
		*lo = v_load_f16((const uint16_t *)p, n);
		*hi = n > VL ? v_load_f16((const uint16_t *)p + VL, n - VL) : v_zero();
		return;
	}
	if (type == INGOT_BF16) {
		split_bf16(v_load_pairs((const uint16_t *)p, n), lo, hi);
		return;
	}
#endif
	char part[UNIT * 2] = {0};
	memcpy(part, p, (size_t)n * (size_t)size_of(type));
	load_unit(type, part, lo, hi);
}

/* From the order of bf16 units to that of their elements, and back. */
X86_INLINE void interleave(vf *lo, vf *hi) {
#ifdef __AVX512F__
	const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
	const vf a = _mm512_permutex2var_ps(*lo, first, *hi);
	*hi = _mm512_permutex2var_ps(*lo, _mm512_add_epi32(first, _mm512_set1_epi32(8)), *hi);
	*lo = a;
#else
	const vf a = _mm256_unpacklo_ps(*lo, *hi), b = _mm256_unpackhi_ps(*lo, *hi);
	*lo = _mm256_permute2f128_ps(a, b, 0x20);
	*hi = _mm256_permute2f128_ps(a, b, 0x31);
#endif
}

/* Lane i = the sum of a[i]. */
X86_INLINE vf sum_lanes(const vf a[VL]) {
#ifdef __AVX512F__
#define PD(x) _mm512_castps_pd(x)
#define HALVES(i) v_add(_mm512_unpacklo_ps(a[i], a[(i) + 1]), _mm512_unpackhi_ps(a[i], a[(i) + 1]))
#define QUARTERS(x, y) \
	v_add(_mm512_castpd_ps(_mm512_unpacklo_pd(PD(x), PD(y))), _mm512_castpd_ps(_mm512_unpackhi_pd(PD(x), PD(y))))
#define BLOCKS(x, y) v_add(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd))
	const vf b0 = HALVES(0), b1 = HALVES(2), b2 = HALVES(4), b3 = HALVES(6);
	const vf b4 = HALVES(8), b5 = HALVES(10), b6 = HALVES(12), b7 = HALVES(14);
	const vf c0 = QUARTERS(b0, b1), c1 = QUARTERS(b2, b3), c2 = QUARTERS(b4, b5), c3 = QUARTERS(b6, b7);
	const vf d0 = BLOCKS(c0, c1), d1 = BLOCKS(c2, c3);
	return BLOCKS(d0, d1);
#undef PD
#undef HALVES
#undef QUARTERS
#undef BLOCKS
#else
#define PAIRS(x, y) _mm256_hadd_ps(x, y)
	const vf b0 = PAIRS(PAIRS(a[0], a[1]), PAIRS(a[2], a[3])), b1 = PAIRS(PAIRS(a[4], a[5]), PAIRS(a[6], a[7]));
	return v_add(_mm256_permute2f128_ps(b0, b1, 0x20), _mm256_permute2f128_ps(b0, b1, 0x31));
#undef PAIRS
#endif
}

/* ---- the two products ----------------------------------------------------------------------------------------------- */

#define EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)

/* Rows that the products fetch on their way, line by line in the order of memory, which lets the hardware see ahead too. */
typedef struct fetcher {
	const char *const *row;
	int64_t rows, bytes; /* rows left, and bytes in each */
	const char *next;    /* in the present row */
	int64_t left, due;   /* bytes of it, and of all that the products have gone through */
} fetcher;

X86_INLINE void fetch(fetcher *f, const int bytes) {
	for (f->due += bytes; f->due >= 64; f->due -= 64) {
		if (f->left <= 0) {
			if (f->rows == 0) return;
			f->rows--;
			f->next = *f->row++;
			f->left = f->bytes;
		}
		_mm_prefetch(f->next, DECODE_HINT);
		f->next += 64;
		f->left -= 64;
	}
}

/* a[r * per + x] = products of R rows of Q with the G keys key[x], lane by lane. All but pointers and dim are constants. */
X86_INLINE void score_keys(const int32_t type, const int R, const int G, const int per, vf *a, const float *q,
                           int64_t pitch, const char *const *key, fetcher *f, int64_t dim) {
	const char *const k0 = key[0], *const k1 = key[1], *const k2 = key[G - 2], *const k3 = key[G - 1];
	const int64_t whole = dim / UNIT * UNIT;
	vf l0, h0, l1, h1, l2, h2, l3, h3;
#define ADD(r)                                                                        \
	if (r < R) {                                                                      \
		const vf ql = v_load(q + r * pitch + d), qh = v_load(q + r * pitch + d + VL); \
		a[r * per] = v_fma(l0, ql, a[r * per]);                                       \
		a[r * per + 1] = v_fma(l1, ql, a[r * per + 1]);                               \
		if (G == 4) a[r * per + G - 2] = v_fma(l2, ql, a[r * per + G - 2]);           \
		if (G == 4) a[r * per + G - 1] = v_fma(l3, ql, a[r * per + G - 1]);           \
		a[r * per] = v_fma(h0, qh, a[r * per]);                                       \
		a[r * per + 1] = v_fma(h1, qh, a[r * per + 1]);                               \
		if (G == 4) a[r * per + G - 2] = v_fma(h2, qh, a[r * per + G - 2]);           \
		if (G == 4) a[r * per + G - 1] = v_fma(h3, qh, a[r * per + G - 1]);           \
	}
	int64_t d = 0;
	for (; d < whole; d += UNIT) {
		const int64_t at = d * size_of(type);
		fetch(f, G * UNIT * size_of(type));
		load_unit(type, k0 + at, &l0, &h0);
		load_unit(type, k1 + at, &l1, &h1);
		if (G == 4) load_unit(type, k2 + at, &l2, &h2);
		if (G == 4) load_unit(type, k3 + at, &l3, &h3);
		EACH_ROW(ADD)
	}
	if (d < dim) {
		const int64_t at = d * size_of(type), n = dim - d;
		fetch(f, G * UNIT * size_of(type));
		load_unit_tail(type, k0 + at, n, &l0, &h0);
		load_unit_tail(type, k1 + at, n, &l1, &h1);
		if (G == 4) load_unit_tail(type, k2 + at, n, &l2, &h2);
		if (G == 4) load_unit_tail(type, k3 + at, n, &l3, &h3);
		EACH_ROW(ADD)
	}
#undef ADD
}

/* Raw scores of R query rows (s, KEYS apart) with `count` keys, rounded up to a multiple of VL: the tables hold a valid row
 * for each. */
X86_INLINE void scores(const int32_t type, const int R, const float *q, int64_t pitch, const char *const *key,
                       fetcher ahead, int count, int64_t dim, float *s) {
	const int per = VL / R; /* keys whose sums fill a vector */
	const int G = R == 1 || (VL == 16 && R < 8) ? 4 : 2;
	for (int j = 0; j < count; j += per) {
		vf a[VL];
#define ZERO(i) a[i] = v_zero();
		X86_EACH_LANE(ZERO)
#undef ZERO
		score_keys(type, R, G, per, a, q, pitch, key + j, &ahead, dim);
		if (G < per) score_keys(type, R, G, per, a + G, q, pitch, key + j + G, &ahead, dim);
		if (2 * G < per) score_keys(type, R, G, per, a + 2 * G, q, pitch, key + j + 2 * G, &ahead, dim);
		if (2 * G < per) score_keys(type, R, G, per, a + 3 * G, q, pitch, key + j + 3 * G, &ahead, dim);
		float t[VL];
		v_store(t, sum_lanes(a));
#define PUT(r) \
	if (r < R) memcpy(s + r * KEYS + j, t + r * per, sizeof *t * (size_t)per);
		EACH_ROW(PUT)
#undef PUT
	}
}

/* W units of O, R rows (pitch apart) = alpha O + P V: V's units begin at byte `at` of each row and hold n elements if tail. The
 * block is summed from zero, which keeps long sums of like numbers exact. */
X86_INLINE void value_units(const int32_t type, const int R, const int W, const bool tail, const float *p,
                            const float *alpha, const char *const *row, fetcher *ahead, int count, int64_t at,
                            int64_t n, float *o, int64_t pitch) {
	const int step = UNIT * size_of(type);
	vf a[16];
#define ZERO(r)                                                         \
	if (r < R) {                                                        \
		a[r * 2 * W] = a[r * 2 * W + 1] = v_zero();                     \
		a[r * 2 * W + 2 * W - 2] = a[r * 2 * W + 2 * W - 1] = v_zero(); \
	}
	EACH_ROW(ZERO)
#undef ZERO
	for (int j = 0; j < count; j++) {
		const char *const v = row[j] + at;
		vf l0, h0, l1 = v_zero(), h1 = l1;
		fetch(ahead, W * step);
		if (tail) load_unit_tail(type, v, n, &l0, &h0);
		else load_unit(type, v, &l0, &h0);
		if (W == 2) load_unit(type, v + step, &l1, &h1);
#define ADD(r)                                                                         \
	if (r < R) {                                                                       \
		const vf w = v_set(p[r * KEYS + j]);                                           \
		a[r * 2 * W] = v_fma(w, l0, a[r * 2 * W]);                                     \
		a[r * 2 * W + 1] = v_fma(w, h0, a[r * 2 * W + 1]);                             \
		if (W == 2) a[r * 2 * W + 2 * W - 2] = v_fma(w, l1, a[r * 2 * W + 2 * W - 2]); \
		if (W == 2) a[r * 2 * W + 2 * W - 1] = v_fma(w, h1, a[r * 2 * W + 2 * W - 1]); \
	}
		EACH_ROW(ADD)
#undef ADD
	}
#define PUT(r)                                                                                     \
	if (r < R) {                                                                                   \
		const vf f = v_set(alpha[r]);                                                              \
		float *const to = o + r * pitch;                                                           \
		v_store(to, v_fma(f, v_load(to), a[r * 2 * W]));                                           \
		v_store(to + VL, v_fma(f, v_load(to + VL), a[r * 2 * W + 1]));                             \
		if (W == 2) v_store(to + 2 * VL, v_fma(f, v_load(to + 2 * VL), a[r * 2 * W + 2 * W - 2])); \
		if (W == 2) v_store(to + 3 * VL, v_fma(f, v_load(to + 3 * VL), a[r * 2 * W + 2 * W - 1])); \
	}
	EACH_ROW(PUT)
#undef PUT
}

X86_INLINE void values(const int32_t type, const int R, const float *p, const float *alpha, const char *const *row,
                       fetcher ahead, int count, int64_t dim, float *o, int64_t pitch) {
	const int size = size_of(type);
	const bool wide = 4 * R <= VL; /* accumulators of two units fit */
	int64_t d = 0;
	if (wide)
		for (; d + 2 * UNIT <= dim; d += 2 * UNIT)
			value_units(type, R, wide ? 2 : 1, false, p, alpha, row, &ahead, count, d * size, UNIT, o + d, pitch);
	for (; d + UNIT <= dim; d += UNIT)
		value_units(type, R, 1, false, p, alpha, row, &ahead, count, d * size, UNIT, o + d, pitch);
	if (d < dim) value_units(type, R, 1, true, p, alpha, row, &ahead, count, d * size, dim - d, o + d, pitch);
}

typedef void scores_fn(const float *q, int64_t pitch, const char *const *key, fetcher ahead, int count, int64_t dim,
                       float *s);
typedef void values_fn(const float *p, const float *alpha, const char *const *row, fetcher ahead, int count,
                       int64_t dim, float *o, int64_t pitch);

#define PRODUCTS(name, type, R)                                                                                      \
	static void scores_##name##_##R(const float *q, int64_t pitch, const char *const *key, fetcher ahead, int count, \
	                                int64_t dim, float *s) {                                                         \
		scores(type, R, q, pitch, key, ahead, count, dim, s);                                                        \
	}                                                                                                                \
	static void values_##name##_##R(const float *p, const float *alpha, const char *const *row, fetcher ahead,       \
	                                int count, int64_t dim, float *o, int64_t pitch) {                               \
		values(type, R, p, alpha, row, ahead, count, dim, o, pitch);                                                 \
	}
/* X(name, type): the types that K and V may have. */
#define EACH_TYPE(X)  \
	X(f32, INGOT_F32) \
	X(f16, INGOT_F16) X(bf16, INGOT_BF16) X(e4m3, INGOT_F8_E4M3) X(e5m2, INGOT_F8_E5M2) X(e4m3_fnuz, INGOT_F8_E4M3_FNUZ)

enum { CHUNK = VL / 2 }; /* query rows in one product at most */
#ifdef __AVX512F__
#define PRODUCTS_MOST(name, type) PRODUCTS(name, type, 8)
#define MOST(kind, name) kind##_##name##_8
#else
#define PRODUCTS_MOST(name, type)
#define MOST(kind, name) NULL
#endif
#define DEFINE(name, type) \
	PRODUCTS(name, type, 1) PRODUCTS(name, type, 2) PRODUCTS(name, type, 4) PRODUCTS_MOST(name, type)
EACH_TYPE(DEFINE)
#undef DEFINE

/* By type, then by the logarithm of the rows. */
static scores_fn *const scores_of[][4] = {
#define ROW(name, type) [type] = {scores_##name##_1, scores_##name##_2, scores_##name##_4, MOST(scores, name)},
	EACH_TYPE(ROW)
#undef ROW
};
static values_fn *const values_of[][4] = {
#define ROW(name, type) [type] = {values_##name##_1, values_##name##_2, values_##name##_4, MOST(values, name)},
	EACH_TYPE(ROW)
#undef ROW
};

/* Logarithm of the rows of the next product when `left` are to be done: 3 and 7 are padded, other counts are not. */
X86_INLINE int chunk_log(int left) {
	return CHUNK == 8 && left >= 7 ? 3 : left >= 3 ? 2 : left - 1;
}

/* ---- between the products ------------------------------------------------------------------------------------------- */

typedef struct context {
	const ingot__problem *p;
	ingot__span keys;
	const int32_t *pages;
	int64_t head_k;
	float scale; /* of the raw score */
	bool terms;  /* softcap, ALiBi or bias are there */
} context;

X86_INLINE vf load_bias(int32_t type, const char *p, int64_t n) {
	switch (type) {
	case INGOT_F32: return v_load_f32((const float *)p, n);
	case INGOT_F16: return v_load_f16((const uint16_t *)p, n);
	default: return v_load_bf16((const uint16_t *)p, n);
	}
}

/* Raw scores of `count` keys from k0 on become scores in natural units: the terms of the formula in its order, then -inf at
 * what the row does not see, whatever stands there. */
static void finish_scores(const context *c, const query_row *row, int64_t k0, int count, float *s) {
	const ingot__problem *const p = c->p;
	const vf scale = v_set(c->scale), cap = v_set(p->softcap), none = v_set(-INFINITY);
	const int64_t first = row->first - k0, last = row->last - k0, size = ingot__dtype_size(p->bias.dtype);
	for (int64_t j = 0; j < count; j += VL) {
		vf x = v_mul(v_load(s + j), scale);
		if (p->features & INGOT__SOFTCAP) x = v_mul(cap, v_tanh(v_div(x, cap)));
		if (p->features & INGOT__ALIBI)
			x = v_fma(v_set(-row->slope), v_abs(v_add(v_set((float)(k0 + j - row->position)), v_lanes())), x);
		if (p->features & INGOT__BIAS_BOOL) {
			const uint8_t *const b = (const uint8_t *)row->bias + (p->bias.stride[3] ? k0 + j : 0);
			const int64_t n = count - j;
			x = p->bias.stride[3] ? v_select(v_load_bool(b, n < VL ? n : VL), x, none) : *b ? x : none;
		} else if (p->features & INGOT__BIAS) {
			const vf b = p->bias.stride[3] ? load_bias(p->bias.dtype, row->bias + (k0 + j) * size, count - j)
			                               : v_set(ingot__load(row->bias, 0, p->bias.dtype));
			x = v_select(v_equal(b, none), none, v_add(x, b));
		}
		if (first > j) x = v_select(v_first(first - j), none, x);
		if (last < j + VL) x = v_select(v_first(last - j), x, none);
		v_store(s + j, x);
	}
}

/* Scores of one row become probabilities against the largest so far; what was summed before must be multiplied by the result.
 * The maximum is subtracted before the base changes: scores may be as large as floats are. */
X86_INLINE float soften(const context *c, query_row *row, int64_t k0, int count, float *s, float *sum) {
	float factor = c->scale;
	const int filled = (count + VL - 1) / VL * VL;
	if (c->terms || row->first > k0 || row->last < k0 + filled) {
		finish_scores(c, row, k0, count, s);
		factor = 1;
	}
	const vf scale = v_set(factor);
	vf top = v_set(-INFINITY);
	for (int j = 0; j < filled; j += VL) {
		const vf x = v_mul(v_load(s + j), scale);
		v_store(s + j, x);
		top = v_max(x, top); /* a NaN leaves it */
	}
	const float before = row->top, largest = v_largest(top), now = largest > before ? largest : before;
	const float reference = now == -INFINITY ? 0 : now;
	const float alpha = now == before ? 1 : exp_one(before - reference);
	const vf reference_v = v_set(reference), log2e = v_set(LOG2E);
	vf total = v_mul(v_load(sum), v_set(alpha));
	for (int j = 0; j < filled; j += VL) {
		const vf e = exp2_exact_at_0(v_mul(v_sub(v_load(s + j), reference_v), log2e));
		v_store(s + j, e);
		total = v_add(total, e);
	}
	v_store(sum, total);
	row->top = now;
	return alpha;
}

/* Pointers to `count` rows of K and V from key k0 on, and the last one again in the rest. */
static void fill_table(const context *c, row_table *t, int64_t k0, int count) {
	const ingot__problem *const p = c->p;
	const int64_t size = ingot__dtype_size(p->k.dtype);
	const char *const k = p->k.data, *const v = p->v.data;
	if (p->features & INGOT__PAGED) {
		const int64_t page_size = p->pages.page_size;
		for (int64_t page = k0 / page_size, slot = k0 % page_size, j = 0; j < count; page++, slot = 0) {
			const int64_t id = ingot__clamp(c->pages[page], 0, p->pages.count - 1);
			const char *kr = k + (id * p->k.stride[0] + slot * p->k.stride[1] + c->head_k * p->k.stride[2]) * size;
			const char *vr = v + (id * p->v.stride[0] + slot * p->v.stride[1] + c->head_k * p->v.stride[2]) * size;
			for (; slot < page_size && j < count; slot++, j++) {
				t->k[j] = kr, t->v[j] = vr;
				kr += p->k.stride[1] * size, vr += p->v.stride[1] * size;
			}
		}
	} else {
		const char *const kr = k + ingot__row_offset(&p->k, c->keys, c->head_k, k0) * size;
		const char *const vr = v + ingot__row_offset(&p->v, c->keys, c->head_k, k0) * size;
		const int64_t k_step = p->k.stride[2] * size, v_step = p->v.stride[2] * size;
		for (int j = 0; j < count; j++) t->k[j] = kr + j * k_step;
		for (int j = 0; j < count; j++) t->v[j] = vr + j * v_step;
	}
	for (int j = count; j < KEYS; j++) t->k[j] = t->k[count - 1], t->v[j] = t->v[count - 1];
}

/* ---- rows of Q and O ------------------------------------------------------------------------------------------------ */

/* n floats to elements of O's type. */
X86_INLINE void store_row(void *to, int32_t type, int64_t i, int64_t n, vf x) {
	switch (type) {
	case INGOT_F32: v_store_f32((float *)to + i, x, n); break;
	case INGOT_F16: v_store_f16((uint16_t *)to + i, x, n); break;
	default: v_store_bf16((uint16_t *)to + i, x, n); break;
	}
}

/* A row of Q as floats, zeros up to the pitch, in the order in which K's units are loaded. */
static void load_query(const ingot__problem *p, const char *from, float *to) {
	const bool unmix = p->q.dtype == INGOT_BF16 && p->k.dtype != INGOT_BF16;
#define LOAD(type)                                                                        \
	for (int64_t d = 0; d < p->head_dim; d += UNIT) {                                     \
		vf lo, hi;                                                                        \
		if (p->head_dim - d >= UNIT) load_unit(type, from + d * size_of(type), &lo, &hi); \
		else load_unit_tail(type, from + d * size_of(type), p->head_dim - d, &lo, &hi);   \
		if (unmix) interleave(&lo, &hi);                                                  \
		v_store(to + d, lo);                                                              \
		v_store(to + d + VL, hi);                                                         \
	}
	switch (p->q.dtype) {
	case INGOT_F32: LOAD(INGOT_F32) break;
	case INGOT_F16: LOAD(INGOT_F16) break;
	default: LOAD(INGOT_BF16) break;
	}
#undef LOAD
}

/* ---- the tasks ------------------------------------------------------------------------------------------------------ */

/* Which query rows a task has. */
typedef struct share {
	int64_t b, head_k, first_row;
	int rows, padded; /* padded: with the rows that the last product adds */
	ingot__span span;
} share;

static share share_of(const ingot__problem *p, int64_t tile, int64_t sequence) {
	share s = {.b = sequence / p->heads_k, .head_k = sequence % p->heads_k, .first_row = tile * TILE};
	s.span = ingot__locate(&p->q_side, s.b);
	s.rows = (int)ingot__clamp(s.span.count * p->group - s.first_row, 0, TILE);
	s.padded = s.rows + (s.rows % 4 == 3);
	return s;
}

static int64_t query_of(const ingot__problem *p, const share *s, int r) {
	return (s->first_row + r) / p->group;
}
static int64_t head_of(const ingot__problem *p, const share *s, int r) {
	return s->head_k * p->group + (s->first_row + r) % p->group;
}

/* The row's own terms; *low and *high grow to hold the keys it sees. */
static void place_row(const context *c, const share *s, int64_t i, int64_t head, query_row *row, int64_t *low,
                      int64_t *high) {
	const ingot__problem *const p = c->p;
	const int64_t off = ingot__diagonal(p, s->span.count, c->keys.count);
	*row = (query_row){.position = i + off, .top = -INFINITY};
	ingot__visible(p, i, off, c->keys.count, &row->first, &row->last);
	if (row->first < row->last) {
		if (row->first < *low) *low = row->first;
		if (row->last > *high) *high = row->last;
	} else {
		row->first = row->last = 0;
	}
	if (p->features & INGOT__ALIBI) row->slope = ingot__alibi_slope(p, s->b, head);
	if (p->features & (INGOT__BIAS | INGOT__BIAS_BOOL)) {
		const int64_t *const stride = p->bias.stride;
		row->bias = (const char *)p->bias.data +
		            (s->b * stride[0] + head * stride[1] + i * stride[2]) * ingot__dtype_size(p->bias.dtype);
	}
}

/* Writes a row of out and its lse from the sums over all its keys: of the weights, relative to exp(top), and of weights times
 * V. Without weight it is 0, whatever V holds. */
static void finish_row(const ingot__problem *p, const share *s, int r, float top, float total, const float *o) {
	const int64_t i = query_of(p, s, r), head = head_of(p, s, r);
	float rescale = 1, all = total;
	const bool nothing = total == 0;
	if (p->features & INGOT__SINK) {
		const float sink = ((const float *)p->sink.data)[head * p->sink.stride[0]];
		if (sink > top) rescale = exp_one(top - sink), top = sink;
		all = total * rescale + (sink == -INFINITY ? 0 : exp_one(sink - top));
	}
	if (p->lse.dtype != INGOT_NONE) {
		float lse = all == 0 ? -INFINITY : top + logf(all);
		if (p->lse_base == INGOT_LSE_BASE2) lse *= LOG2E;
		((float *)p->lse.data)[ingot__lse_offset(p, s->span, s->b, head, i)] = lse;
	}
	float factor = rescale / all;
	if (p->features & INGOT__8BIT_KV) factor *= factor_8bit(p->v.dtype) * ingot__descale(p, &p->v_descale, s->b, head);
	char *const to =
		(char *)p->out.data + ingot__row_offset(&p->out, s->span, head, i) * ingot__dtype_size(p->out.dtype);
	const vf f = v_set(factor);
	for (int64_t d = 0; d < p->head_dim_v; d += UNIT) {
		vf lo = v_load(o + d), hi = v_load(o + d + VL);
		if (p->v.dtype == INGOT_BF16) interleave(&lo, &hi);
		lo = nothing ? v_zero() : v_mul(lo, f);
		hi = nothing ? v_zero() : v_mul(hi, f);
		store_row(to, p->out.dtype, d, p->head_dim_v - d, lo);
		if (p->head_dim_v - d > VL) store_row(to, p->out.dtype, d + VL, p->head_dim_v - d - VL, hi);
	}
}

/* One tile of one key head with its range of keys. */
typedef struct item {
	share mine;
	context c;
	query_row *row;
	int64_t begin, end;
	bool tabled; /* its first block is in the table */
} item;

static void place_item(const ingot__problem *p, const ingot__plan *plan, int64_t index, query_row *row, item *it) {
	const int64_t tiles = plan->number[N_TILES], parts = plan->number[N_PARTS], part = index / tiles % parts;
	*it = (item){.mine = share_of(p, index % tiles, index / tiles / parts), .row = row};
	it->c = (context){.p = p, .keys = ingot__key_rows(p, it->mine.b), .head_k = it->mine.head_k};
	it->c.terms = (p->features & (INGOT__SOFTCAP | INGOT__ALIBI | INGOT__BIAS | INGOT__BIAS_BOOL)) != 0;
	it->c.scale = (float)p->softmax_scale;
	if (p->features & INGOT__8BIT_KV)
		it->c.scale *=
			factor_8bit(p->k.dtype) * ingot__descale(p, &p->k_descale, it->mine.b, it->mine.head_k * p->group);
	int64_t unused;
	if (p->features & INGOT__PAGED) it->c.pages = ingot__page_list(p, it->mine.b, &unused);

	int64_t low = INT64_MAX, high = 0;
	for (int r = 0; r < it->mine.rows; r++)
		place_row(&it->c, &it->mine, query_of(p, &it->mine, r), head_of(p, &it->mine, r), row + r, &low, &high);
	if (low > high) low = high;
	const int64_t blocks = (high - low + KEYS - 1) / KEYS;
	int64_t share_blocks = blocks;
	if (p->batch_invariant) {
		share_blocks = INVARIANT_BLOCKS;
	} else if (parts > 1) {
		const int64_t useful = ingot__clamp(blocks / PART_BLOCKS, 1, parts);
		share_blocks = (blocks + useful - 1) / useful;
	}
	it->begin = low + part * share_blocks * KEYS;
	it->end = it->begin + share_blocks * KEYS < high ? it->begin + share_blocks * KEYS : high;
}

static int block_at(const item *it, int64_t k0) {
	return (int)ingot__clamp(it->end - k0, 0, KEYS);
}

/* Task: a run of items. */
void DECODE_TASK(_part)(const ingot__problem *p, const ingot__plan *plan, void *workspace, void *scratch,
                        int64_t index) {
	const int64_t *const number = plan->number;
	const int64_t parts = number[N_PARTS], tile_rows = number[N_TILE_ROWS];
	const int64_t q_pitch = number[N_Q_PITCH], o_pitch = number[N_O_PITCH];
	const int64_t first = index * number[N_RUN];
	const int64_t last = first + number[N_RUN] < number[N_ITEMS] ? first + number[N_RUN] : number[N_ITEMS];
	decode_scratch *const own = scratch;
	float *const s = (float *)((char *)scratch + round_up(sizeof *own, 64));
	float *const sums = s + tile_rows * KEYS, *const q = sums + tile_rows * VL;
	scores_fn *const *const score = scores_of[p->k.dtype];
	values_fn *const *const value = values_of[p->v.dtype];

	const int64_t k_bytes = p->head_dim * ingot__dtype_size(p->k.dtype);
	const int64_t v_bytes = p->head_dim_v * ingot__dtype_size(p->v.dtype);

	item pair[2];
	int now = 0; /* the table of the current block */
	for (int64_t n = first; n < last; n++) {
		item *const it = &pair[(n - first) & 1], *const next = &pair[(n + 1 - first) & 1];
		if (n == first) place_item(p, plan, n, own->row[0], it);
		float *const o = parts > 1 ? (float *)workspace + n * number[N_RECORD] : q + tile_rows * q_pitch;
		const share *const mine = &it->mine;
		const int rows = mine->rows;
		bool placed = false;
		if (rows && it->begin < it->end) {
			for (int r = 0; r < rows; r++) {
				const int64_t at = ingot__row_offset(&p->q, mine->span, head_of(p, mine, r), query_of(p, mine, r));
				load_query(p, (const char *)p->q.data + at * ingot__dtype_size(p->q.dtype), q + r * q_pitch);
			}
			memset(q + rows * q_pitch, 0, (size_t)((mine->padded - rows) * q_pitch) * sizeof *q);
			memset(sums, 0, (size_t)(mine->padded * VL) * sizeof *sums);
			memset(o, 0, (size_t)(mine->padded * o_pitch) * sizeof *o);
			for (int r = rows; r < mine->padded; r++) own->alpha[r] = 0;
			int count = block_at(it, it->begin);
			if (!it->tabled) fill_table(&it->c, &own->table[now], it->begin, count);
			for (int64_t k0 = it->begin; k0 < it->end; k0 += KEYS, now ^= 1) {
				const row_table *const t = &own->table[now];
				row_table *const after = &own->table[now ^ 1];
				const int more = block_at(it, k0 + KEYS);
				int following = more; /* keys in the table after this */
				if (more) {
					fill_table(&it->c, after, k0 + KEYS, more);
				} else if (n + 1 < last) {
					place_item(p, plan, n + 1, own->row[(n + 1 - first) & 1], next);
					placed = true;
					if (next->mine.rows && next->begin < next->end) {
						following = block_at(next, next->begin);
						fill_table(&next->c, after, next->begin, following);
						next->tabled = true;
					}
				}
				/* K's rows fetch V's, and V's the next block's K; later products find what the first one fetched */
				for (int r = 0, log; r < rows; r += 1 << log) {
					log = chunk_log(rows - r);
					score[log](q + r * q_pitch, q_pitch, t->k,
					           (fetcher){.row = t->v, .rows = r ? 0 : count, .bytes = v_bytes}, count, p->head_dim,
					           s + r * KEYS);
				}
				for (int r = 0; r < rows; r++)
					own->alpha[r] = soften(&it->c, &it->row[r], k0, count, s + r * KEYS, sums + r * VL);
				for (int r = 0, log; r < rows; r += 1 << log) {
					log = chunk_log(rows - r);
					value[log](s + r * KEYS, own->alpha + r, t->v,
					           (fetcher){.row = after->k, .rows = r ? 0 : following, .bytes = k_bytes}, count,
					           p->head_dim_v, o + r * o_pitch, o_pitch);
				}
				count = more;
			}
		}
		float *const tops = o + tile_rows * o_pitch, *const totals = tops + tile_rows;
		for (int r = 0; r < rows; r++) {
			const float total = it->begin < it->end ? v_sum(v_load(sums + r * VL)) : 0;
			if (parts > 1) {
				tops[r] = it->row[r].top;
				totals[r] = total;
			} else {
				finish_row(p, mine, r, it->row[r].top, total, o + r * o_pitch);
			}
		}
		if (!placed && n + 1 < last) place_item(p, plan, n + 1, own->row[(n + 1 - first) & 1], next);
	}
}

/* Task: the parts of one tile of one key head, added up in their order. */
void DECODE_TASK(_merge)(const ingot__problem *p, const ingot__plan *plan, void *workspace, void *scratch,
                         int64_t index) {
	const int64_t *const number = plan->number;
	const int64_t tiles = number[N_TILES], parts = number[N_PARTS], tile_rows = number[N_TILE_ROWS];
	const int64_t o_pitch = number[N_O_PITCH], record = number[N_RECORD], tile = index % tiles;
	const share mine = share_of(p, tile, index / tiles);
	const float *const first = (const float *)workspace + (index / tiles * parts * tiles + tile) * record;
	float *const sum = scratch;
	for (int r = 0; r < mine.rows; r++) {
		float top = -INFINITY, total = 0;
		for (int64_t part = 0; part < parts; part++) {
			const float t = first[part * tiles * record + tile_rows * o_pitch + r];
			if (t > top) top = t;
		}
		const float reference = top == -INFINITY ? 0 : top;
		memset(sum, 0, (size_t)o_pitch * sizeof *sum);
		for (int64_t part = 0; part < parts; part++) {
			const float *const o = first + part * tiles * record, *const tops = o + tile_rows * o_pitch;
			if (tops[r] == -INFINITY && tops[tile_rows + r] == 0) continue; /* no weight, perhaps nothing written */
			const float weight = exp_one(tops[r] - reference);
			const vf w = v_set(weight);
			total += weight * tops[tile_rows + r];
			for (int64_t d = 0; d < o_pitch; d += VL)
				v_store(sum + d, v_fma(w, v_load(o + r * o_pitch + d), v_load(sum + d)));
		}
		finish_row(p, &mine, r, top, total, sum);
	}
}

#endif
#endif
