/*
 * Attention forward on Hopper (sm_90a), in e4m3, by warpgroup products and the copy engine.
 *
 * A block stays on its multiprocessor and works through tiles of query rows: a warpgroup of helpers, one that transposes V, and
 * two that own 64 rows each. Of the helpers, one warp decodes the next tiles and two have the copy engine fetch Q and K, and V,
 * into rings. A row warpgroup walks the keys from the last block to the first and keeps two products in flight, S of this block
 * and P V of the one before, under which it does the softmax. Two sets of registers for P, by turns: while the products read one,
 * the softmax packs the other.
 *
 * Maxima are taken of the first 256 keys and of blocks that a mask cuts. Elsewhere the reference stays, and a block's sums tell
 * whether a weight may have outgrown P's type; its scores are then computed once more, by the products of a warp, and its maxima
 * taken.
 *
 * 8-bit products read both operands along k, so V is transposed in shared memory. P's registers hold other keys than the second
 * product's first operand wants in them; the order of keys within a product is free, and transposing gives V the order that P has.
 *
 * P is rounded to e4m3, scaled so that the largest weight of a row's first blocks is about 2^NEAR; a later one may reach 2^8.75.
 * What lies above 2^-6 has all three bits. The matrix units keep some 14 bits of a sum. Those of P V are taken out of them every
 * FOLD_KEYS keys and added in fp32.
 */
#define ELEMENT 2 /* sm90.h's 16-bit type, of which nothing is used here: bytes are moved in pairs */
#include "fwd_sm90.h"

enum { CLASS_PLAIN, CLASS_MASKED, CLASSES };   /* masked: causal, window, variable length */
enum { TILES_PER_HEAD, SECTION, EVEN, STEPS }; /* numbers */

/* Panels of 128 columns, a byte each. */
#define BYTE_PANELS(columns) (((columns) + 127) / 128)
#define BYTE_TILE(rows, columns) ((rows) * BYTE_PANELS(columns) * 128)

/* Row warpgroups; blocks of K, of V and of V transposed in flight. By head size: keys of a block, buffers for Q. */
#define OWNERS 2
#define KEYS(head) ((head) <= 128 ? 128 : 64)
#define Q_STAGES(head) ((head) <= 128 ? 2 : 1)
#define K_STAGES 3
#define V_STAGES 3
#define T_STAGES 2
#define FOLD_KEYS 512
/* Whose maxima are taken. */
#define FIRST_KEYS 256
/* V transposed: a row of 128 bytes for each column, a byte for each key. Two blocks of 64 keys share rows. */
#define TURNED_BYTES(head) ((head) * 128 * T_STAGES * KEYS(head) / 128)
/* A row warpgroup's output on its way out, which is also where sums are folded: in fp32, or in bf16 where that leaves no room. */
#define FOLD_HALF(head) ((head) > 128)
#define OUT_BYTES(head) (OWNERS * 64 * (head) * (FOLD_HALF(head) ? 2 : 4))
#define CONTROL_BYTES 512
#define SHARED_BYTES(head)                                                                                 \
	(Q_STAGES(head) * BYTE_TILE(64 * OWNERS, head) + (K_STAGES + V_STAGES) * BYTE_TILE(KEYS(head), head) + \
	 TURNED_BYTES(head) + OUT_BYTES(head) + CONTROL_BYTES)
#define THREADS (128 * (2 + OWNERS))

#ifdef INGOT_HOST

#define IMAGE(head, class, name, spills) {"e4m3_d" #head "_" name, "-DHEAD=" #head " -DCLASS=" #class, spills}
#define IMAGES(head, spills) IMAGE(head, 0, "plain", spills), IMAGE(head, 1, "masked", 0)

/* what spills at 256 is the transposing warps' place among tiles */
static const ingot__image_variant images[] = {IMAGES(64, 0), IMAGES(128, 0), IMAGES(192, 0), IMAGES(256, 16)};
static const int sizes[] = {64, 128, 192, 256};
enum { SIZES = sizeof sizes / sizeof *sizes };
static const char *const kernels[] = {"attn_fwd_sm90_fp8", NULL};

static int size_index(const ingot__problem *p) {
	int i = 0;
	while (i < SIZES && (sizes[i] < p->head_dim || sizes[i] < p->head_dim_v)) i++;
	return i;
}

/* A tensor of bytes as one of pairs, which is what the copy engine is told. */
static ingot_tensor pairs_of(const ingot_tensor *t) {
	ingot_tensor pairs = *t;
	pairs.shape[3] /= 2;
	for (int i = 0; i < 3; i++) pairs.stride[i] /= 2;
	return pairs;
}

static const char *refuse(const ingot__problem *p, const ingot__device *device, int *variant) {
	(void)device;
	INGOT__REFUSE_IF(p->q.dtype != INGOT_F8_E4M3 || p->k.dtype != INGOT_F8_E4M3,
	                 "it multiplies e4m3: q, k and v must be F8_E4M3");
	INGOT__REFUSE_IF(p->out.dtype != INGOT_F16 && p->out.dtype != INGOT_BF16, "out must be fp16 or bf16");
	const int size = size_index(p);
	INGOT__REFUSE_IF(size == SIZES, "a head size above 256");
	INGOT__REFUSE_IF(p->head_dim % 16 || p->head_dim_v % 16,
	                 "a head size that is no multiple of 16: rows are copied in 16-byte pieces");
	const char *const why = refuse_features(p);
	if (why) return why;
	INGOT__REFUSE_IF(p->features & INGOT__PAGED, "pages");
	INGOT__REFUSE_IF(p->features & INGOT__SOFTCAP, "softcap");
	const ingot_tensor q = pairs_of(&p->q), k = pairs_of(&p->k), v = pairs_of(&p->v);
	INGOT__REFUSE_IF(!can_map(&q) || !can_map(&k) || !can_map(&v) || !can_map(&p->out),
	                 "a row stride of 0 or a stride of 2^40 bytes in q, k, v or out, which the copy engine cannot do");
	INGOT__REFUSE_IF((double)tiles_per_head(p, 64 * OWNERS) * (double)p->batch * (double)p->heads_q > 1e9,
	                 "more than 1e9 tiles of query rows");
	*variant = size * CLASSES + (p->features & (INGOT__MASK | INGOT__VARLEN) ? CLASS_MASKED : CLASS_PLAIN);
	return NULL;
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)threads;
	ingot__gpu_args *const a = ingot__gpu_fill(p, out);
	const int head = sizes[out->variant / CLASSES];
	const int64_t per_head = tiles_per_head(p, 64 * OWNERS), tiles = per_head * p->batch * p->heads_q;
	if (tiles == 0 || p->q.shape[2] == 0) return;
	out->arguments_size = MAPS_AT + 128 * MAPS;
	a->number[TILES_PER_HEAD] = (int32_t)per_head;
	a->number[EVEN] = p->right == INGOT__NO_BOUND || p->left != INGOT__NO_BOUND;
	a->number[SECTION] = 1;
	if (!a->number[EVEN])
		a->number[SECTION] =
			(int32_t)section_heads(device, p->batch * p->heads_q, p->group, per_head,
		                           (double)p->k_side.max_seqlen * (double)(p->head_dim + p->head_dim_v));
	const ingot_tensor q = pairs_of(&p->q), k = pairs_of(&p->k), v = pairs_of(&p->v);
	a->number[STEPS] = steps_of(&q, &k, &v);
	map_inputs(out, &q, &k, &v, KEYS(head), KEYS(head));
	out->map[OUT_MAP] = map_of(OUT_MAP, &p->out, 64);
	out->maps = MAPS;
	const int64_t blocks = tiles < device->multiprocessors ? tiles : device->multiprocessors;
	out->step[out->steps++] = (ingot__step){.name = "rows",
	                                        .kernel = kernels[0],
	                                        .block = {THREADS, 1, 1},
	                                        .shared_bytes = (uint32_t)SHARED_BYTES(head),
	                                        .grid = {(uint32_t)blocks, 1, 1}};
}

const ingot__impl ingot__impl_attn_fwd_sm90_fp8 = {
	.name = "attn_fwd_sm90_fp8",
	.family = "cuda",
	.op = INGOT__ATTN_FWD,
	.device = INGOT_CUDA,
	.arch = "sm_90a",
	.rank = 20,
	.variant_count = sizeof images / sizeof *images,
	.images = images,
	.kernels = kernels,
	.refuse = refuse,
	.plan = plan,
};

#else

enum {
	MASKED = CLASS != CLASS_PLAIN,
	BM = 64 * OWNERS,
	BN = KEYS(HEAD),
	Q_GROUP_BYTES = BYTE_TILE(64, HEAD),
	Q_BYTES = OWNERS * Q_GROUP_BYTES,
	KV_BYTES = BYTE_TILE(BN, HEAD),
	/* two blocks of 64 keys lie side by side */
	TURNED_STEP = BN == 64 ? 64 : HEAD * 128,
	OUT_GROUP_BYTES = OUT_BYTES(HEAD) / OWNERS,
	FOLD_BLOCKS = FOLD_KEYS / BN,
	FOLD_HALF_IMAGE = FOLD_HALF(HEAD),
	Q_HELD = HEAD <= 192, /* in registers */
	OUT_PARTS = HEAD <= 128 ? 1 : 2,
	PART = HEAD / OUT_PARTS / 2, /* a lane's elements of one */
	OWNER_REGISTERS = HEAD <= 192 ? 216 : 224,
	HELPER_REGISTERS = HEAD <= 192 || MASKED ? 32 : 24,
	TURNER_REGISTERS = (512 - OWNERS * OWNER_REGISTERS) - HELPER_REGISTERS,
	/* shared memory */
	AT_K = Q_STAGES(HEAD) * Q_BYTES,
	AT_V = AT_K + K_STAGES * KV_BYTES,
	AT_TURNED = AT_V + V_STAGES * KV_BYTES,
	AT_OUT = AT_TURNED + TURNED_BYTES(HEAD),
	AT_TILES = AT_OUT + OUT_BYTES(HEAD),
	AT_Q_FULL = AT_TILES + 64 * TILE_STAGES,
	AT_Q_EMPTY = AT_Q_FULL + 16,
	AT_K_FULL = AT_Q_EMPTY + 16,
	AT_K_EMPTY = AT_K_FULL + 8 * K_STAGES,
	AT_V_FULL = AT_K_EMPTY + 8 * K_STAGES,
	AT_V_EMPTY = AT_V_FULL + 8 * V_STAGES,
	AT_TURNED_FULL = AT_V_EMPTY + 8 * V_STAGES,
	AT_TURNED_EMPTY = AT_TURNED_FULL + 8 * T_STAGES,
	AT_TILE_FULL = AT_TURNED_EMPTY + 8 * T_STAGES,
	AT_END = AT_TILE_FULL + 16 * TILE_STAGES
};
static_assert(AT_END <= SHARED_BYTES(HEAD), "barriers and tiles fit into the control bytes");
static_assert(SHARED_BYTES(HEAD) <= 232448, "a block's shared memory");

typedef arguments_with<MAPS> arguments;

/* Where a new reference puts a row's largest weight; how far it may fall behind where maxima are taken; and what a lane's sum of a
 * block must stay below where they are not: e4m3 ends at 448, and rounds 432 and more to that. */
#define NEAR 3.0f
#define LAG 0.75f
#define MOST 432.0f

/* ---- tiles ------------------------------------------------------------------------------------------------------------ */

typedef tile_queue<AT_TILES, AT_TILE_FULL> queue;

DEVICE schedule make_schedule(const ingot__gpu_args &a) {
	schedule w;
	w.heads = a.batch * a.heads_q;
	w.per_head = a.number[TILES_PER_HEAD];
	w.section = a.number[SECTION];
	w.divide(a.number[EVEN]);
	return w;
}

DEVICE bool decode(const ingot__gpu_args &a, const schedule &w, int number, tile &t) {
	int head;
	const int rank = w.rank_of(number, head), batch = head / a.heads_q;
	t.head = head - batch * a.heads_q;
	/* the last rows of each sequence come first */
	return look<MASKED, BM, BN>(a, batch, (w.per_head - 1 - rank) * BM, t);
}

/* ---- helpers ---------------------------------------------------------------------------------------------------------- */

/* One lane. */
DEVICE void fetch_queries_and_keys(const arguments &x, uint32_t shared, const unsigned char *memory) {
	const int steps = x.a.number[STEPS];
	ring<TILE_STAGES> place = {0, 0};
	ring<Q_STAGES(HEAD)> q = {0, 1};
	ring<K_STAGES> k = {0, 1};
	for (;;) {
		const tile t = queue::next(shared, memory, place);
		queue::done(shared, place);
		place.next();
		if (t.blocks < 0) return;
		if (t.blocks == 0) continue;
		const int head_q = steps & Q_HEADS ? t.head : 0, batch_q = steps & Q_BATCH ? t.q_slot : 0;
		const int head = steps & K_HEADS ? t.head / x.a.group : 0, batch = steps & K_BATCH ? t.k_slot : 0;
		barrier_wait(shared + AT_Q_EMPTY + 8 * q.stage, q.parity);
		barrier_expect(shared + AT_Q_FULL + 8 * q.stage, Q_BYTES);
		load_queries<HEAD / 2, OWNERS>(shared + q.stage * Q_BYTES, &x.map[Q_MAP], shared + AT_Q_FULL + 8 * q.stage,
		                               t.q_row, head_q, batch_q);
		q.next();
		for (int j0 = (t.first_block + t.blocks - 1) * BN; j0 >= t.first_block * BN; j0 -= BN) {
			barrier_wait(shared + AT_K_EMPTY + 8 * k.stage, k.parity);
			barrier_expect(shared + AT_K_FULL + 8 * k.stage, KV_BYTES);
			load_tile<HEAD / 2, BN>(shared + AT_K + k.stage * KV_BYTES, &x.map[K_MAP], shared + AT_K_FULL + 8 * k.stage,
			                        t.k_row + j0, head, batch);
			k.next();
		}
	}
}

/* One lane. */
DEVICE void fetch_values(const arguments &x, uint32_t shared, const unsigned char *memory) {
	const int steps = x.a.number[STEPS];
	ring<TILE_STAGES> place = {0, 0};
	ring<V_STAGES> v = {0, 1};
	for (;;) {
		const tile t = queue::next(shared, memory, place);
		queue::done(shared, place);
		place.next();
		if (t.blocks < 0) return;
		const int head = steps & V_HEADS ? t.head / x.a.group : 0, batch = steps & V_BATCH ? t.k_slot : 0;
		for (int n = t.blocks - 1; n >= 0; n--) {
			barrier_wait(shared + AT_V_EMPTY + 8 * v.stage, v.parity);
			barrier_expect(shared + AT_V_FULL + 8 * v.stage, KV_BYTES);
			load_tile<HEAD / 2, BN>(shared + AT_V + v.stage * KV_BYTES, &x.map[V_MAP], shared + AT_V_FULL + 8 * v.stage,
			                        t.k_row + (t.first_block + n) * BN, head, batch);
			v.next();
		}
	}
}

/* A block of V, keys by columns, to columns by keys. A warp reads squares of 8 keys by 8 pairs of columns and has of each pair of
 * columns two pairs of keys 8 apart in a word: the keys of a k step that a lane of P holds. Odd and even columns are stored in
 * turns, so that the eight rows of a store lie in banks of their own. Keys outside [first, last) of the block become 0: 0 times NaN
 * is NaN. */
template <bool clear> DEVICE void turn_values(uint32_t from, uint32_t to, int to_piece, int warp, int first, int last) {
	const int lane = lane_id(), low = lane & 7, high = lane >> 3;
	const bool swap = (lane >> 4) != 0; /* rows 4 to 7 of what this lane's words go to */
	const uint32_t even = swap ? 0x7531 : 0x6420, odd = swap ? 0x6420 : 0x7531;
	const int column = 2 * low + ((low >> 2) ^ (high & 1)); /* whose row this lane gives the address of */
	/* Pieces of 16 columns are the warps' in turn. Swizzled places differ in bits: as place_of has them, of few instructions. */
	const uint32_t source = from + place_of<BN>(high * 8 + low, warp);
	const uint32_t target = to + place_of<HEAD>(warp * 16 + column, to_piece + (high >> 1));
	enum { STEPS_OF_WARP = HEAD / 64 * (BN / 32), AHEAD = HEAD <= 128 ? 4 : 2 };
#pragma unroll
	for (int begin = 0; begin < STEPS_OF_WARP; begin += AHEAD) {
		uint32_t r[AHEAD][4];
#pragma unroll
		for (int i = 0; i < AHEAD; i++) {
			const int turn = (begin + i) % (HEAD / 64), step = (begin + i) / (HEAD / 64);
			load_matrix4_transposed(r[i], (source ^ (turn & 1) << 6) + (turn >> 1) * BN * 128 + step * 32 * 128);
		}
#pragma unroll
		for (int i = 0; i < AHEAD; i++) {
			const int turn = (begin + i) % (HEAD / 64), step = (begin + i) / (HEAD / 64);
			if (clear) {
#pragma unroll
				for (int j = 0; j < 4; j++) {
					const int key = step * 32 + j * 8 + 2 * (lane & 3);
					if (key < first || key >= last) r[i][j] &= 0xffff0000u;
					if (key + 1 < first || key + 1 >= last) r[i][j] &= 0x0000ffffu;
				}
			}
			store_matrix4((target ^ step << 5) + turn * 64 * 128, __byte_perm(r[i][0], r[i][1], even),
			              __byte_perm(r[i][0], r[i][1], odd), __byte_perm(r[i][2], r[i][3], even),
			              __byte_perm(r[i][2], r[i][3], odd));
		}
	}
}

/* A warpgroup. */
DEVICE void turn_tiles(const ingot__gpu_args &a, uint32_t shared, const unsigned char *memory, int warp) {
	ring<TILE_STAGES> place = {0, 0};
	ring<V_STAGES> v = {0, 0};
	ring<T_STAGES> turned = {0, 0};
	const bool leader = lane_id() == 0;
	for (;;) {
		const tile &t = queue::next(shared, memory, place); /* in its place to the end, lest registers hold it */
		if (t.blocks < 0) return;
		for (int n = t.blocks - 1; n >= 0; n--) {
			const uint32_t from = shared + AT_V + v.stage * KV_BYTES;
			/* two blocks of 64 keys share rows */
			const uint32_t to = shared + AT_TURNED + (BN == 64 ? 0 : turned.stage * TURNED_STEP);
			const int to_piece = BN == 64 ? turned.stage * 4 : 0;
			barrier_wait(shared + AT_V_FULL + 8 * v.stage, v.parity);
			barrier_wait(shared + AT_TURNED_EMPTY + 8 * turned.stage, turned.parity ^ 1);
			const int j0 = (t.first_block + n) * BN;
			if (needs_clearing<MASKED, BN>(a, t, j0))
				turn_values<true>(from, to, to_piece, warp, t.live_first - j0, t.live_last - j0);
			else turn_values<false>(from, to, to_piece, warp, 0, BN);
			fence_async();
			__syncwarp();
			if (leader) {
				barrier_arrive(shared + AT_V_EMPTY + 8 * v.stage);
				barrier_arrive(shared + AT_TURNED_FULL + 8 * turned.stage);
			}
			v.next();
			turned.next();
		}
		__syncwarp();
		if (leader) queue::done(shared, place);
		place.next();
	}
}

/* Whether a barrier's phase has ended, without waiting; and the wait where it had not. */
DEVICE int barrier_ended(uint32_t barrier, uint32_t parity) {
	int ended;
	asm volatile("{\n"
	             ".reg .pred done;\n"
	             "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
	             "selp.b32 %0, 1, 0, done;\n"
	             "}"
	             : "=r"(ended)
	             : "r"(barrier), "r"(parity)
	             : "memory");
	return ended;
}
/* ---- products of a warpgroup in e4m3 ------------------------------------------------------------------------------------ */

/* As wgmma of sm90.h, d[64 x n] (+)= A[64 x 32] B[32 x n], both operands K-major. */
template <int n> struct products;
#define PRODUCTS(n, registers, r0, r1, r2, r3, r4, r5)                                                               \
	template <> struct products<n> {                                                                                 \
		static __device__ __forceinline__ void shared(float (&d)[registers], uint64_t a, uint64_t b, int add) {      \
			asm volatile("{\n"                                                                                       \
			             ".reg .pred add;\n"                                                                         \
			             "setp.ne.b32 add, %" #r2 ", 0;\n"                                                           \
			             "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" WGMMA_D##registers             \
			             "}, %" #r0 ", %" #r1 ", add, 1, 1;\n"                                                       \
			             "}"                                                                                         \
			             : WGMMA_O##registers                                                                        \
			             : "l"(a), "l"(b), "r"(add));                                                                \
		}                                                                                                            \
		static __device__ __forceinline__ void held(float (&d)[registers], const uint32_t *a, uint64_t b, int add) { \
			asm volatile("{\n"                                                                                       \
			             ".reg .pred add;\n"                                                                         \
			             "setp.ne.b32 add, %" #r5 ", 0;\n"                                                           \
			             "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" WGMMA_D##registers             \
			             "}, {%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4 ", add, 1, 1;\n"                       \
			             "}"                                                                                         \
			             : WGMMA_O##registers                                                                        \
			             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                            \
		}                                                                                                            \
	};
PRODUCTS(64, 32, 32, 33, 34, 35, 36, 37)
PRODUCTS(96, 48, 48, 49, 50, 51, 52, 53)
PRODUCTS(128, 64, 64, 65, 66, 67, 68, 69)

DEVICE void multiply_qk(float (&s)[BN / 2], const uint32_t (&held)[HEAD / 8], uint64_t q, uint64_t k) {
#pragma unroll
	for (int i = 0; i < HEAD / 32; i++) {
		const int k_at = (i / 4 * BN * 128 + i % 4 * 32) >> 4;
		if (Q_HELD) products<BN>::held(s, &held[4 * i], k + k_at, i > 0);
		else products<BN>::shared(s, q + ((i / 4 * 64 * 128 + i % 4 * 32) >> 4), k + k_at, i > 0);
	}
}

/* By at most 128 columns: an instruction's registers must fit into those that a thread has before it claims more. */
DEVICE void multiply_pv(float (&out)[OUT_PARTS][PART], const uint32_t (&p)[BN / 8], uint64_t v, int add) {
#pragma unroll
	for (int n = 0; n < OUT_PARTS; n++)
#pragma unroll
		for (int i = 0; i < BN / 32; i++)
			products<HEAD / OUT_PARTS>::held(out[n], &p[4 * i], v + ((n * HEAD / OUT_PARTS * 128 + i * 32) >> 4),
			                                 i > 0 ? 1 : add);
}

DEVICE void pin_all(float (&out)[OUT_PARTS][PART]) {
#pragma unroll
	for (int n = 0; n < OUT_PARTS; n++) pin(out[n]);
}

/* ---- softmax of a warpgroup's 64 x BN scores ------------------------------------------------------------------------------ */

/* Of a thread's two rows. */
struct rows {
	float high0, high1;   /* reference of exponents: weights are 2^(s unit - high); -Inf before the first key */
	float total0, total1; /* this thread's part of the sum of weights */
};

DEVICE uint32_t four_bytes(float a, float b, float c, float d) {
	uint32_t x;
	asm("{\n"
	    ".reg .b16 low, high;\n"
	    "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
	    "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
	    "mov.b32 %0, {low, high};\n"
	    "}"
	    : "=r"(x)
	    : "f"(a), "f"(b), "f"(c), "f"(d));
	return x;
}

/* Scores to weights 2^(s unit - high), packed, and their sums. A lane's words hold keys 2 c, 2 c + 1, 2 c + 8, 2 c + 9 of 16, c being
 * lane % 4: as turn_values orders them. */
DEVICE void weigh(uint32_t (&p)[BN / 8], const float (&s)[BN / 2], float unit, float high0, float high1, float &sum0,
                  float &sum1) {
	float sum[4] = {0, 0, 0, 0}; /* of the even and the odd keys of each row */
#pragma unroll
	for (int i = 0; i < BN / 8; i++) {
		const float *const x = &s[8 * (i / 2) + 2 * (i & 1)], high = i & 1 ? high1 : high0;
		float w[4];
#pragma unroll
		for (int j = 0; j < 4; j++) {
			float &to = sum[2 * (i & 1) + (j & 1)];
			w[j] = fast_exp2(fmaf(x[j + (j & 2)], unit, -high));
			to = i < 2 && j < 2 ? w[j] : to + w[j];
		}
		p[i] = four_bytes(w[0], w[1], w[2], w[3]);
	}
	sum0 = sum[0] + sum[1];
	sum1 = sum[2] + sum[3];
}

/* The way without maxima. False, with scores lost, where a weight may have grown beyond P's type or is NaN. */
DEVICE bool weigh_by_reference(uint32_t (&p)[BN / 8], const float (&s)[BN / 2], rows &r, float unit) {
	float sum0, sum1;
	weigh(p, s, unit, r.high0, r.high1, sum0, sum1);
	if (__any_sync(0xffffffffu, !(sum0 < MOST && sum1 < MOST))) return false;
	r.total0 += sum0;
	r.total1 += sum1;
	return true;
}

/* The way with maxima. The reference follows only where it falls behind by LAG; fade is then what the output shrinks by. True if it
 * does in any row of the warp. */
DEVICE bool weigh_by_maximum(uint32_t (&p)[BN / 8], const float (&s)[BN / 2], rows &r, float unit, float &fade0,
                             float &fade1) {
	float top0, top1;
	find_maxima(s, top0, top1);
	top0 = fmaxf(top0, lane_xor(top0, 1));
	top1 = fmaxf(top1, lane_xor(top1, 1));
	top0 = fmaxf(top0, lane_xor(top0, 2));
	top1 = fmaxf(top1, lane_xor(top1, 2));
	const float high0 = fmaf(top0, unit, -NEAR), high1 = fmaf(top1, unit, -NEAR);
	const bool moves = __any_sync(0xffffffffu, high0 - r.high0 > LAG || high1 - r.high1 > LAG);
	fade0 = fade1 = 1.0f;
	if (moves) {
		if (high0 > r.high0) {
			fade0 = fast_exp2(r.high0 - high0);
			r.high0 = high0;
		}
		if (high1 > r.high1) {
			fade1 = fast_exp2(r.high1 - high1);
			r.high1 = high1;
		}
	}
	float sum0, sum1;
	weigh(p, s, unit, r.high0 == -INFINITY ? 0.0f : r.high0, r.high1 == -INFINITY ? 0.0f : r.high1, sum0, sum1);
	r.total0 = r.total0 * fade0 + sum0;
	r.total1 = r.total1 * fade1 + sum1;
	return moves;
}

/* A warp's product, as matrix of gpu.h. */
struct warp_product {
	DEVICE void multiply(float *c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
		asm volatile(
			"mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
			"{%0, %1, %2, %3};"
			: "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
			: "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
	}
};

DEVICE void shrink(float (&out)[OUT_PARTS][PART], float fade0, float fade1) {
#pragma unroll
	for (int i = 0; i < HEAD / 2; i++) out[i / PART][i % PART] *= i & 2 ? fade1 : fade0;
}

/* What has been taken out of the matrix units, in this lane's part of `memory`, and what is still in them. In bf16 the units keep
 * the rest, so that no bit is lost. */
#if FOLD_HALF(HEAD)
typedef uint4 folded_part; /* of 8 elements */
DEVICE float2 two_of(uint32_t x) {
	return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
DEVICE void add_folded(float *o, uint32_t x, float fade) {
	const float2 had = two_of(x);
	o[0] = fmaf(had.x, fade, o[0]);
	o[1] = fmaf(had.y, fade, o[1]);
}
/* Rounds to bf16 and leaves the rest. */
DEVICE uint32_t take_out(float *o) {
	const uint32_t x = matrix<__nv_bfloat16>::pack(o[0], o[1]);
	const float2 has = two_of(x);
	o[0] -= has.x;
	o[1] -= has.y;
	return x;
}
DEVICE void add_folded(float (&out)[OUT_PARTS][PART], const folded_part *memory, float fade0, float fade1) {
#pragma unroll
	for (int i = 0; i < HEAD / 16; i++) {
		float *const o = &out[8 * i / PART][8 * i % PART];
		const folded_part part = memory[i * 128];
		add_folded(o, part.x, fade0);
		add_folded(o + 2, part.y, fade1);
		add_folded(o + 4, part.z, fade0);
		add_folded(o + 6, part.w, fade1);
	}
}
DEVICE void fold(folded_part *memory, float (&out)[OUT_PARTS][PART]) {
#pragma unroll
	for (int i = 0; i < HEAD / 16; i++) {
		float *const o = &out[8 * i / PART][8 * i % PART];
		folded_part part;
		part.x = take_out(o);
		part.y = take_out(o + 2);
		part.z = take_out(o + 4);
		part.w = take_out(o + 6);
		memory[i * 128] = part;
	}
}
#else
typedef float4 folded_part; /* of 4 elements */
DEVICE void add_folded(float (&out)[OUT_PARTS][PART], const folded_part *memory, float fade0, float fade1) {
#pragma unroll
	for (int i = 0; i < HEAD / 8; i++) {
		float *const o = &out[4 * i / PART][4 * i % PART];
		const folded_part part = memory[i * 128];
		o[0] = fmaf(part.x, fade0, o[0]);
		o[1] = fmaf(part.y, fade0, o[1]);
		o[2] = fmaf(part.z, fade1, o[2]);
		o[3] = fmaf(part.w, fade1, o[3]);
	}
}
DEVICE void fold(folded_part *memory, float (&out)[OUT_PARTS][PART]) {
#pragma unroll
	for (int i = 0; i < HEAD / 8; i++) {
		const float *const o = &out[4 * i / PART][4 * i % PART];
		memory[i * 128] = make_float4(o[0], o[1], o[2], o[3]);
	}
}
#endif

/* ---- the end of a tile ---------------------------------------------------------------------------------------------------- */

/* Two results as out's 16-bit type has them. */
DEVICE uint32_t two_results(bool bf16, float low, float high) {
	return bf16 ? matrix<__nv_bfloat16>::pack(low, high) : matrix<__half>::pack(low, high);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attn_fwd_sm90_fp8(const __grid_constant__ arguments x) {
	extern __shared__ __align__(1024) unsigned char memory[];
	const ingot__gpu_args &a = x.a;
	const uint32_t shared = shared_address(memory);
	const int warpgroup = same(warp_id()) / 4, warp = same(warp_id()) % 4;

	if (thread_id() == 0) {
		queue::init(shared, 4 * OWNERS + 4 + 2);
		for (int i = 0; i < Q_STAGES(HEAD); i++) {
			barrier_init(shared + AT_Q_FULL + 8 * i, 1);
			barrier_init(shared + AT_Q_EMPTY + 8 * i, 4 * OWNERS);
		}
		for (int i = 0; i < K_STAGES; i++) {
			barrier_init(shared + AT_K_FULL + 8 * i, 1);
			barrier_init(shared + AT_K_EMPTY + 8 * i, 4 * OWNERS);
		}
		for (int i = 0; i < V_STAGES; i++) {
			barrier_init(shared + AT_V_FULL + 8 * i, 1);
			barrier_init(shared + AT_V_EMPTY + 8 * i, 4);
		}
		for (int i = 0; i < T_STAGES; i++) {
			barrier_init(shared + AT_TURNED_FULL + 8 * i, 4);
			barrier_init(shared + AT_TURNED_EMPTY + 8 * i, 4 * OWNERS);
		}
		barrier_init_done();
		for (int i = 0; i < MAPS; i++) prefetch_map(&x.map[i]);
	}
	block_barrier();

	if (warpgroup == 0) {
		registers_release<HELPER_REGISTERS>();
		if (warp == 0 && lane_id() == 0) fetch_queries_and_keys(x, shared, memory);
		if (warp == 1 && lane_id() == 0) fetch_values(x, shared, memory);
		if (warp == 2 && lane_id() == 0) queue::put_all<make_schedule, decode>(a, shared, memory);
		return;
	}
	if (warpgroup == 1) {
		registers_release<TURNER_REGISTERS>();
		turn_tiles(a, shared, memory, warp);
		return;
	}

	registers_claim<OWNER_REGISTERS>();
	const int group = warpgroup - 2, lane = lane_id();
	const uint32_t never =
		a.features & 0x80000000u; /* 0, unknown to the compiler, which would give both sets of P one place */
	const bool leader = lane == 0;
	const uint64_t k_operand = operand(shared + AT_K, 16), v_operand = operand(shared + AT_TURNED, 16);
	folded_part *const folded = (folded_part *)(memory + AT_OUT + group * OUT_GROUP_BYTES) + warp * 32 + lane;
	ring<TILE_STAGES> place = {0, 0};
	ring<Q_STAGES(HEAD)> q = {0, 0};
	ring<K_STAGES> k = {0, 0};
	ring<T_STAGES> v = {0, 0};
	float s[BN / 2], out[OUT_PARTS][PART];
	uint32_t p[BN / 8], next[BN / 8], held[HEAD / 8];
	rows r;

	for (;;) {
		const tile &t = queue::next(shared, memory, place);
		const int blocks = same(t.blocks), first_block = same(t.first_block);
		if (blocks < 0) break;
		/* after the divergent end of a tile the compiler no longer knows that these are the same in all lanes, and would fetch the
		 * products' operands from vector registers */
		q.stage = same(q.stage), q.parity = same(q.parity);
		k.stage = same(k.stage), k.parity = same(k.parity);
		v.stage = same(v.stage), v.parity = same(v.parity);
		r.high0 = r.high1 = -INFINITY;
		r.total0 = r.total1 = 0;
		const int head_k = t.head / a.group;
		const float factors =
			a.softmax_scale * LOG2E *
			descale_of(a.q_descale, a.q_descale_stride, t.batch, a.q_descale_per_query_head ? t.head : head_k) *
			descale_of(a.k_descale, a.k_descale_stride, t.batch, head_k);
		/* never 0, since a masked score is -Inf, and finite, since 0 is a product like others; a NaN stays */
		const float unit = isfinite(factors) ? fminf(fmaxf(fabsf(factors), 1e-30f), 1e30f) : NAN;

		if (blocks > 0) {
			const uint32_t q_at = shared + q.stage * Q_BYTES + group * Q_GROUP_BYTES;
			const uint64_t q_operand = operand(q_at, 16);
			/* blocks from high_from on and those before low_to hold pairs that this warpgroup's rows do not see */
			const int group_row = group * 64;
			int high_from, low_to;
			find_cut_blocks<MASKED, 64, BN>(t, group_row, first_block, high_from, low_to);
			if (MASKED) low_to = max(low_to, 0);
			auto mask = [&](int n) {
				const int lane = lane_read(),
						  my_row = group * 64 + warp * 16 + (lane >> 2); /* not held through the loop */
				const int to_mine = -(first_block + n) * BN - 2 * (lane & 3);
				if (n >= high_from) {
					const int end0 = MASKED ? min(t.keys, t.see_last + my_row) : t.keys;
					const int end1 = MASKED ? min(t.keys, t.see_last + my_row + 8) : t.keys;
					mask_high(s, end0 + to_mine, end1 + to_mine);
				}
				if (MASKED && n < low_to)
					mask_low(s, t.see_first + my_row + to_mine, t.see_first + my_row + 8 + to_mine);
			};

			barrier_wait(shared + AT_Q_FULL + 8 * q.stage, q.parity);
			/* maxima are kept of q.k, so a factor below 0 is q's: signs are bits */
			if (same(factors < 0)) {
				for (int i = warp * 32 + lane; i < Q_GROUP_BYTES / 16; i += 128) {
					uint4 *const piece = (uint4 *)(memory + (q_at - shared) + i * 16);
					const uint32_t sign = 0x80808080u;
					*piece = make_uint4(piece->x ^ sign, piece->y ^ sign, piece->z ^ sign, piece->w ^ sign);
				}
				fence_async();
				warpgroup_barrier(group);
			}
			if (Q_HELD) {
#pragma unroll
				for (int i = 0; i < HEAD / 32; i++)
					load_matrix4(&held[4 * i], q_at + place_of<64>(warp * 16 + (lane & 15), 2 * i + (lane >> 4)));
			}
			float fade0, fade1;
			int add = 0, held_blocks = 0;
			bool folds = false;
			float fold_fade0 = 0, fold_fade1 = 0; /* what the folded sums are still to shrink by */
			auto k_at = [&] { return k_operand + (k.stage * KV_BYTES >> 4); };
			auto v_at = [&] { return v_operand + (v.stage * TURNED_STEP >> 4); };

			barrier_wait(shared + AT_K_FULL + 8 * k.stage, k.parity);
			wgmma_fence();
			multiply_qk(s, held, q_operand, k_at());
			wgmma_commit();
			wgmma_wait<0>();
			pin(s);
			if (leader) barrier_arrive(shared + AT_K_EMPTY + 8 * k.stage);
			k.next();
			mask(blocks - 1);
			(void)weigh_by_maximum(p, s, r, unit, fade0, fade1);
			int k_there = 0, v_there = 0;

			/* Q K of a block, P V of the one before with the weights in `now` */
			auto issue = [&](const uint32_t(&now)[BN / 8]) {
				if (!k_there) barrier_wait(shared + AT_K_FULL + 8 * k.stage, k.parity);
				wgmma_fence();
				multiply_qk(s, held, q_operand, k_at());
				wgmma_commit();
				if (!v_there) barrier_wait(shared + AT_TURNED_FULL + 8 * v.stage, v.parity);
				wgmma_fence();
				multiply_pv(out, now, v_at(), add);
				wgmma_commit();
				add = 1;
				wgmma_wait<1>();
				pin(s);
			};
			auto shrunk = [&](bool moved) {
				wgmma_wait<0>();
				pin_all(out);
				if (!moved) return;
				shrink(out, fade0, fade1);
				fold_fade0 *= fade0;
				fold_fade1 *= fade1;
			};
			auto complete = [&] {
				const int k_stage = k.stage, v_stage = v.stage;
				k.next();
				v.next();
				k_there = barrier_ended(shared + AT_K_FULL + 8 * k.stage, k.parity);
				v_there = barrier_ended(shared + AT_TURNED_FULL + 8 * v.stage, v.parity);
				if (leader) barrier_arrive(shared + AT_K_EMPTY + 8 * k_stage);
				wgmma_wait<0>();
				pin_all(out);
				if (leader) barrier_arrive(shared + AT_TURNED_EMPTY + 8 * v_stage);
				if (++held_blocks == FOLD_BLOCKS) {
					if (folds) {
						add_folded(out, folded, fold_fade0, fold_fade1);
					} else { /* where the last tile's output may still be */
						if (warp == 0 && leader) store_wait_read();
						warpgroup_barrier(group);
					}
					fold(folded, out);
					folds = true;
					fold_fade0 = fold_fade1 = 1;
					held_blocks = 0;
					add = FOLD_HALF_IMAGE;
				}
			};
			/* without maxima; with them where that fails */
			auto step = [&](const uint32_t(&now)[BN / 8], uint32_t(&next)[BN / 8]) {
				issue(now);
				if (!weigh_by_reference(next, s, r, unit)) {
					repeat_scores<warp_product, HEAD / 32>(s, q_at, shared + AT_K + k.stage * KV_BYTES, warp);
					shrunk(weigh_by_maximum(next, s, r, unit, fade0, fade1));
				}
				complete();
			};
			/* pairs of blocks without maxima, for the two places of weights */
			const int fast_from = min(high_from, blocks - FIRST_KEYS / BN);
			for (int n = blocks - 2; n >= 0;) {
				if (n >= fast_from || n < low_to || (n - low_to) % 2 == 0) {
					issue(p);
					mask(n);
					const bool moved = weigh_by_maximum(next, s, r, unit, fade0, fade1);
					shrunk(moved);
					complete();
#pragma unroll
					for (int i = 0; i < BN / 8; i++) p[i] = next[i] | never;
					n--;
				}
				for (; n < fast_from && n > low_to && (n - low_to) % 2 != 0; n -= 2) {
					step(p, next);
					step(next, p);
				}
			}
			if (leader) barrier_arrive(shared + AT_Q_EMPTY + 8 * q.stage);
			barrier_wait(shared + AT_TURNED_FULL + 8 * v.stage, v.parity);
			wgmma_fence();
			multiply_pv(out, p, v_at(), add);
			wgmma_commit();
			wgmma_wait<0>();
			pin_all(out);
			if (leader) barrier_arrive(shared + AT_TURNED_EMPTY + 8 * v.stage);
			v.next();
			if (folds) add_folded(out, folded, fold_fade0, fold_fade1);
		}

		/* read again here, lest registers hold it, and what comes of it, through the loop */
		const int lane = lane_read();
		const bool leader = lane == 0;
		float factor0, factor1;
		finish_rows(a, t, group * 64 + warp * 16, lane, r.high0, r.high1, r.total0, r.total1, 1, factor0, factor1);
		if (blocks == 0) {
			store_nothing(a, t, group * 64 + warp * 16);
			__syncwarp();
			if (leader) queue::done(shared, place);
			place.next();
			continue;
		}

		/* a row without keys is 0, whatever V is that other rows of the tile see */
		if (MASKED && __any_sync(0xffffffffu, factor0 == 0.0f || factor1 == 0.0f)) {
#pragma unroll
			for (int i = 0; i < HEAD / 2; i++)
				if ((i & 2 ? factor1 : factor0) == 0.0f) out[i / PART][i % PART] = 0;
		}
		const float v_factor = descale_of(a.v_descale, a.v_descale_stride, t.batch, head_k);
		if (factor0 != 0.0f) factor0 *= v_factor;
		if (factor1 != 0.0f) factor1 *= v_factor;

		const uint32_t at = AT_OUT + group * OUT_GROUP_BYTES;
		if (warp == 0 && leader) store_wait_read();
		warpgroup_barrier(group);
		const bool bf16 = a.out_dtype == DT_BF16;
#pragma unroll
		for (int i = 0; i < HEAD / 8; i += 2) {
			const uint32_t to = shared + at + place_of<64>(warp * 16 + (lane & 15), i + (lane >> 4));
			const float *const o = &out[4 * i / PART][4 * i % PART];
			store_matrix4(to, two_results(bf16, o[0] * factor0, o[1] * factor0),
			              two_results(bf16, o[2] * factor1, o[3] * factor1),
			              two_results(bf16, o[4] * factor0, o[5] * factor0),
			              two_results(bf16, o[6] * factor1, o[7] * factor1));
		}
		/* the copy engine leaves out rows behind the tensor, but would write those of the next sequence */
		if (!MASKED || !(a.features & F_VARLEN) || t.rows >= BM) {
			fence_async();
			warpgroup_barrier(group);
			if (warp == 0 && leader) {
				store_rows<HEAD>(a, &x.map[OUT_MAP], t, shared + at, group * 64);
			}
		} else {
			store_part(a, t, memory + at, group * 64, warp, lane);
		}
		__syncwarp();
		if (leader) queue::done(shared, place);
		q.next();
		place.next();
	}
	if (warp == 0 && leader) store_wait_read();
}
#endif
