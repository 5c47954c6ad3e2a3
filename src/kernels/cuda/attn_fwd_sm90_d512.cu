/*
 * Attention forward on Hopper (sm_90a) for heads of more than 256, in 16-bit types.
 *
 * The sums of 128 query rows and 512 columns would fill the register file, so a block computes 256 columns of V, and the scores that
 * both halves need are computed twice: three products instead of two. 64 rows a block would need no fourth, but read K and V twice as
 * often, more than the second-level cache can deliver.
 *
 * A block has one tile of 128 query rows, a warpgroup of helpers, and two warpgroups that own 64 rows each. The queries stay in shared
 * memory. K and V pass through one ring, in the order of their use, as chunks of 16 KB: 128 columns of a block of 64 keys, or 32 rows
 * of V. A chunk's place is free as soon as both warpgroups have multiplied by it. An owner has two products in flight, S of this block
 * and P V of the one before, under which it does the softmax. Blocks of the grid come in the order of heads, so that K and V stay in the
 * cache.
 */
#include "fwd_sm90.h"

/* masked: causal, window, variable length; capped: also softcap */
enum { CLASS_PLAIN, CLASS_MASKED, CLASS_CAPPED, CLASSES };
enum { TILES, PARTS, STEPS }; /* numbers: tiles of a head, parts of V's columns */
enum {
	HEAD = 512,
	PART = 256, /* columns of V */
	OWNERS = 2,
	BM = 64 * OWNERS,
	BN = 64,
	CHUNK_KEYS = 32,     /* of V */
	CHUNK_COLUMNS = 128, /* of K */
	SLOTS = 6,
	CHUNK_BYTES = TILE_BYTES(BN, CHUNK_COLUMNS),
	Q_GROUP_BYTES = TILE_BYTES(64, HEAD),
	Q_BYTES = OWNERS * Q_GROUP_BYTES,
	/* shared memory */
	AT_RING = Q_BYTES,
	AT_FULL = AT_RING + SLOTS * CHUNK_BYTES,
	AT_EMPTY = AT_FULL + 8 * SLOTS,
	AT_FETCHED = AT_EMPTY + 8 * SLOTS,
	AT_Q_FULL = AT_FETCHED + 8 * SLOTS,
	SHARED_BYTES = AT_Q_FULL + 8
};

#ifdef INGOT_HOST

_Static_assert((int)CHUNK_BYTES == (int)TILE_BYTES(CHUNK_KEYS, PART), "chunks of K and V are alike");

#define IMAGES(type, number)                                                                                         \
	{type "_plain", "-DELEMENT=" #number " -DCLASS=0", 0}, {type "_masked", "-DELEMENT=" #number " -DCLASS=1", 0}, { \
		type "_capped", "-DELEMENT=" #number " -DCLASS=2", 0                                                         \
	}
static const ingot__image_variant images[] = {IMAGES("f16", 2), IMAGES("bf16", 3)};
static const char *const kernels[] = {"attn_fwd_sm90_d512", NULL};

static const char *refuse(const ingot__problem *p, const ingot__device *device, int *variant) {
	(void)device;
	const char *const why = refuse_16bit(p);
	if (why) return why;
	INGOT__REFUSE_IF(p->head_dim <= 256 && p->head_dim_v <= 256, "head sizes up to 256: attn_fwd_sm90 takes them");
	INGOT__REFUSE_IF(p->head_dim > HEAD || p->head_dim_v > 2 * PART, "a head size above 512");
	INGOT__REFUSE_IF(p->features & INGOT__PAGED, "pages");
	INGOT__REFUSE_IF(!can_map(&p->q) || !can_map(&p->k) || !can_map(&p->v),
	                 "a row stride of 0 or a stride of 2^40 bytes in q, k or v, which the copy engine cannot do");
	/* Matrix units cut off what they add below the last bit of the sum: of n equal terms about n / 2^26 is lost, which must stay
	 * below half a unit of the result's type. */
	INGOT__REFUSE_IF(p->q.dtype == INGOT_F16 && p->k_side.max_seqlen > 16384,
	                 "more than 16384 keys in fp16: sums this long lose bits of the result");
	INGOT__REFUSE_IF(p->k_side.max_seqlen > 131072,
	                 "more than 131072 keys in bf16: sums this long lose bits of the result");
	INGOT__REFUSE_IF((double)(p->q_side.max_seqlen / BM + 1) * 2 * (double)p->batch * (double)p->heads_q > 1e9,
	                 "more than 1e9 blocks");
	const int class = p->features & INGOT__SOFTCAP                  ? CLASS_CAPPED
	                  : p->features & (INGOT__MASK | INGOT__VARLEN) ? CLASS_MASKED
	                                                                : CLASS_PLAIN;
	*variant = (p->q.dtype == INGOT_BF16) * CLASSES + class;
	return NULL;
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)threads, (void)device;
	ingot__gpu_args *const a = ingot__gpu_fill(p, out);
	const int64_t tiles = tiles_per_head(p, BM), parts = (p->head_dim_v + PART - 1) / PART;
	const int64_t blocks = tiles * parts * p->batch * p->heads_q;
	if (blocks == 0 || p->q.shape[2] == 0) return;
	out->arguments_size = MAPS_AT + 128 * INPUT_MAPS;
	a->number[TILES] = (int32_t)tiles;
	a->number[PARTS] = (int32_t)parts;
	a->number[STEPS] = steps_of(&p->q, &p->k, &p->v);
	map_inputs(out, &p->q, &p->k, &p->v, BN, CHUNK_KEYS);
	out->step[out->steps++] = (ingot__step){.name = "rows",
	                                        .kernel = kernels[0],
	                                        .block = {128 * (1 + OWNERS), 1, 1},
	                                        .shared_bytes = SHARED_BYTES,
	                                        .grid = {(uint32_t)blocks, 1, 1}};
}

const ingot__impl ingot__impl_attn_fwd_sm90_d512 = {
	.name = "attn_fwd_sm90_d512",
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
	CAPPED = CLASS == CLASS_CAPPED,
	K_CHUNKS = HEAD / CHUNK_COLUMNS,
	V_CHUNKS = BN / CHUNK_KEYS
};

typedef arguments_with<INPUT_MAPS> arguments;

/* ---- a block's tile ----------------------------------------------------------------------------------------------------- */

struct part : tile {
	int column;  /* first of V */
	index_t row; /* of the tensor */
};

DEVICE part find_part(const ingot__gpu_args &a) {
	const int parts = a.number[PARTS], tiles = a.number[TILES], at = blockIdx.x / parts, head = at / tiles;
	/* last rows first: under a causal mask they take longest */
	const int i0 = (tiles - 1 - (at - head * tiles)) * BM;
	part t;
	t.column = (blockIdx.x - at * parts) * PART;
	t.batch = head / a.heads_q;
	t.head = head - t.batch * a.heads_q;
	span q, k;
	find_sequence<MASKED>(a, t.batch, q, k);
	t.rows = q.count - i0;
	t.q_slot = (int)q.slot;
	t.row = q.start + i0;
	t.k_slot = (int)k.slot;
	t.k_row = (int)k.start;
	see_keys<MASKED, BM, BN>(a, q, k, i0, t);
	return t;
}

/* ---- helpers ------------------------------------------------------------------------------------------------------------ */

/* One lane. */
DEVICE void fetch(const arguments &x, const part &t, uint32_t shared) {
	const int steps = x.a.number[STEPS], head_k = t.head / x.a.group;
	const int k_head = steps & K_HEADS ? head_k : 0, k_batch = steps & K_BATCH ? t.k_slot : 0;
	const int v_head = steps & V_HEADS ? head_k : 0, v_batch = steps & V_BATCH ? t.k_slot : 0;
	ring<SLOTS> to = {0, 1};
	barrier_expect(shared + AT_Q_FULL, Q_BYTES);
	load_queries<HEAD, OWNERS>(shared, &x.map[Q_MAP], shared + AT_Q_FULL, (int)t.row, steps & Q_HEADS ? t.head : 0,
	                           steps & Q_BATCH ? t.q_slot : 0);
	for (int n = t.blocks - 1; n >= -1; n--) {
		int j0 = (t.first_block + n) * BN;
		if (n >= 0)
			for (int i = 0; i < K_CHUNKS; i++) {
				const uint32_t full = shared + AT_FULL + 8 * to.stage, at = shared + AT_RING + to.stage * CHUNK_BYTES;
				barrier_wait(shared + AT_EMPTY + 8 * to.stage, to.parity);
				barrier_expect(full, CHUNK_BYTES);
				for (int panel = 0; panel < CHUNK_COLUMNS / 64; panel++)
					load_box(at + panel * BN * 128, &x.map[K_MAP], full, i * CHUNK_COLUMNS + panel * 64, t.k_row + j0,
					         k_head, k_batch);
				to.next();
			}
		if (n == t.blocks - 1) continue;
		j0 += BN;
		for (int i = 0; i < V_CHUNKS; i++, j0 += CHUNK_KEYS) {
			const uint32_t full =
				shared + (needs_clearing<MASKED, CHUNK_KEYS>(x.a, t, j0) ? AT_FETCHED : AT_FULL) + 8 * to.stage;
			const uint32_t at = shared + AT_RING + to.stage * CHUNK_BYTES;
			barrier_wait(shared + AT_EMPTY + 8 * to.stage, to.parity);
			barrier_expect(full, CHUNK_BYTES);
			for (int panel = 0; panel < PART / 64; panel++)
				load_box(at + panel * CHUNK_KEYS * 128, &x.map[V_MAP], full, t.column + panel * 64, t.k_row + j0,
				         v_head, v_batch);
			to.next();
		}
	}
}

/* A warp. Rows of V that no row of the sequence sees become 0 between the copy engine and the products: 0 times NaN is NaN. */
DEVICE void clear_values(const ingot__gpu_args &a, const part &t, uint32_t shared, unsigned char *memory) {
	int slot = 0;
	uint32_t parity = 0; /* bit per slot: chunks that need clearing come seldom */
	for (int n = t.blocks - 1; n >= -1; n--) {
		if (n >= 0) slot = (slot + K_CHUNKS) % SLOTS;
		if (n == t.blocks - 1) continue;
		for (int i = 0; i < V_CHUNKS; i++) {
			const int j0 = (t.first_block + n + 1) * BN + i * CHUNK_KEYS;
			if (needs_clearing<MASKED, CHUNK_KEYS>(a, t, j0)) {
				barrier_wait(shared + AT_FETCHED + 8 * slot, parity >> slot & 1);
				parity ^= 1u << slot;
				for (int piece = lane_id(); piece < CHUNK_BYTES / 16; piece += 32) {
					const int j = j0 + piece / 8 % CHUNK_KEYS;
					if (j < t.live_first || j >= t.live_last)
						*(uint4 *)(memory + AT_RING + slot * CHUNK_BYTES + piece * 16) = make_uint4(0, 0, 0, 0);
				}
				fence_async();
				__syncwarp();
				if (lane_id() == 0) barrier_arrive(shared + AT_FULL + 8 * slot);
			}
			slot = (slot + 1) % SLOTS;
		}
	}
}

/* ---- softmax of a warpgroup's 64 x BN scores ------------------------------------------------------------------------------ */

/* Of a thread's two rows. */
struct rows {
	float top[2];   /* reference of exponents: scores q.k; -Inf before the first key */
	float total[2]; /* this thread's part of the sum of weights */
};

/* -Inf for columns outside [low, high) of each row. */
DEVICE void mask_scores(float (&s)[BN / 2], const int (&low)[2], const int (&high)[2]) {
#pragma unroll
	for (int i = 0; i < BN / 2; i++) {
		const int column = i / 4 * 8 + i % 2, row = i / 2 % 2;
		if (column < low[row] || column >= high[row]) s[i] = -INFINITY;
	}
}

/* Scores to weights. The reference follows only where it falls behind by 2^8; fade is then what the output shrinks by. True if it does
 * in any row of the warp. */
DEVICE bool weigh(float (&s)[BN / 2], rows &r, float unit, float (&fade)[2]) {
	float top[2];
	bool moves = false;
#pragma unroll
	for (int row = 0; row < 2; row++) {
		float a = s[2 * row], b = s[2 * row + 1];
#pragma unroll
		for (int i = 4 + 2 * row; i < BN / 2; i += 4) {
			a = fmaxf(a, s[i]);
			b = fmaxf(b, s[i + 1]);
		}
		a = fmaxf(a, b);
		a = fmaxf(a, lane_xor(a, 1));
		top[row] = fmaxf(r.top[row], fmaxf(a, lane_xor(a, 2)));
		moves |= (top[row] - r.top[row]) * unit > 8.0f;
		fade[row] = 1.0f;
	}
	moves = __any_sync(0xffffffffu, moves);
#pragma unroll
	for (int row = 0; row < 2; row++) {
		if (moves) {
			fade[row] = r.top[row] == top[row] ? 1.0f : fast_exp2((r.top[row] - top[row]) * unit);
			r.top[row] = top[row];
		}
		const float shift = r.top[row] == -INFINITY ? 0.0f : r.top[row] * unit;
		float a = 0, b = 0;
#pragma unroll
		for (int i = 2 * row; i < BN / 2; i += 4) {
			a += s[i] = fast_exp2(fmaf(s[i], unit, -shift));
			b += s[i + 1] = fast_exp2(fmaf(s[i + 1], unit, -shift));
		}
		r.total[row] = r.total[row] * fade[row] + (a + b);
	}
	return moves;
}

extern "C" __global__ void __launch_bounds__(128 * (1 + OWNERS), 1)
	attn_fwd_sm90_d512(const __grid_constant__ arguments x) {
	extern __shared__ __align__(1024) unsigned char memory[];
	const ingot__gpu_args &a = x.a;
	const uint32_t shared = shared_address(memory);
	const int warpgroup = same(warp_id()) / 4, warp = same(warp_id()) % 4, lane = lane_id();
	const part t = find_part(a);
	if (t.rows <= 0) return;

	if (thread_id() == 0) {
		for (int i = 0; i < SLOTS; i++) {
			barrier_init(shared + AT_FULL + 8 * i, 1);
			barrier_init(shared + AT_EMPTY + 8 * i, 4 * OWNERS);
			barrier_init(shared + AT_FETCHED + 8 * i, 1);
		}
		barrier_init(shared + AT_Q_FULL, 1);
		barrier_init_done();
	}
	block_barrier();

	if (warpgroup == 0) {
		registers_release<40>();
		if (warp == 0 && lane == 0 && t.blocks > 0) fetch(x, t, shared);
		if (MASKED && warp == 1) clear_values(a, t, shared, memory);
		return;
	}

	registers_claim<232>();
	const int group = warpgroup - 1;
	const bool leader = lane == 0;
	const int my_row = group * 64 + warp * 16 + (lane >> 2);
	const float unit = (CAPPED ? a.softcap : a.softmax_scale) * LOG2E;
	float s[BN / 2], out[PART / 2];
	uint32_t p[BN / 4];
	rows r = {{-INFINITY, -INFINITY}, {0, 0}};
#pragma unroll
	for (int i = 0; i < PART / 2; i++) out[i] = 0;

	if (t.blocks > 0) {
		const float twice = 2 * a.softmax_scale * LOG2E / a.softcap;
		const uint64_t q = operand(shared + group * Q_GROUP_BYTES, 16);
		const uint64_t k = operand(shared + AT_RING, 16), v = operand(shared + AT_RING, CHUNK_KEYS * 128);
		const int blocks = same(t.blocks), warp_row = group * 64 + warp * 16;
		/* blocks from high_from on and those before low_to hold pairs that this warp's rows do not see */
		int high_from, low_to;
		find_cut_blocks<MASKED, 16, BN>(t, warp_row, t.first_block, high_from, low_to);
		ring<SLOTS> next = {0, 0}, used = {0, 0};
		auto release = [&] {
			if (leader) barrier_arrive(shared + AT_EMPTY + 8 * used.stage);
			used.next();
		};
		/* leaves the last chunk in flight */
		auto multiply_qk = [&] {
#pragma unroll
			for (int i = 0; i < K_CHUNKS; i++) {
				barrier_wait(shared + AT_FULL + 8 * next.stage, next.parity);
				wgmma_fence();
				const uint64_t from = k + (next.stage * CHUNK_BYTES >> 4);
#pragma unroll
				for (int j = 0; j < CHUNK_COLUMNS / 16; j++)
					wgmma<BN>::shared<0>(s, q + ((i * 2 + j / 4) * 64 * 128 + j % 4 * 32 >> 4),
					                     from + ((j / 4 * BN * 128 + j % 4 * 32) >> 4), i + j > 0);
				wgmma_commit();
				next.next();
				if (i > 0) {
					wgmma_wait<1>();
					release();
				}
			}
		};
		auto multiply_pv = [&] {
#pragma unroll
			for (int i = 0; i < V_CHUNKS; i++) {
				barrier_wait(shared + AT_FULL + 8 * next.stage, next.parity);
				wgmma_fence();
				const uint64_t from = v + (next.stage * CHUNK_BYTES >> 4);
#pragma unroll
				for (int j = 0; j < CHUNK_KEYS / 16; j++)
					wgmma<PART>::held<1>(out, &p[4 * (i * 2 + j)], from + (j * 16 * 128 >> 4), 1);
				wgmma_commit();
				next.next();
			}
		};
		float fade[2];
		auto softmax = [&](int n) {
			if (CAPPED) cap(s, twice);
			if (n >= high_from || n < low_to) {
				const int j0 = (t.first_block + n) * BN + 2 * (lane & 3);
				const int low[2] = {t.see_first + my_row - j0, t.see_first + my_row + 8 - j0};
				const int high[2] = {min(t.keys, t.see_last + my_row) - j0, min(t.keys, t.see_last + my_row + 8) - j0};
				mask_scores(s, low, high);
			}
			return weigh(s, r, unit, fade);
		};
		auto pack = [&] {
#pragma unroll
			for (int i = 0; i < BN / 4; i++) p[i] = matrix<element>::pack(s[2 * i], s[2 * i + 1]);
		};

		barrier_wait(shared + AT_Q_FULL, 0);
		multiply_qk();
		wgmma_wait<0>();
		pin(s);
		release();
		(void)softmax(blocks - 1);
		pack();
		for (int n = blocks - 2; n >= 0; n--) {
			multiply_qk();
			multiply_pv();
			wgmma_wait<V_CHUNKS>();
			pin(s);
			release();
			const bool moved = softmax(n);
			wgmma_wait<0>();
			pin(out);
			for (int i = 0; i < V_CHUNKS; i++) release();
			if (moved) {
#pragma unroll
				for (int i = 0; i < PART / 2; i++) out[i] *= fade[i / 2 % 2];
			}
			pack();
		}
		multiply_pv();
		wgmma_wait<0>();
		pin(out);
	}

	/* sums over the four lanes of a row, LSE, and the output's factors */
	const bool has_sink = a.features & F_SINK;
	const float sink = has_sink ? a.sink[t.head * a.sink_stride] * LOG2E : 0.0f;
	float factor[2];
#pragma unroll
	for (int i = 0; i < 2; i++) {
		r.total[i] += lane_xor(r.total[i], 1);
		r.total[i] += lane_xor(r.total[i], 2);
		float lse;
		factor[i] = finish_row(r.top[i], r.total[i], unit, has_sink, sink, lse);
		if (a.lse && t.column == 0 && (lane & 3) == 0 && my_row + 8 * i < t.rows)
			a.lse[t.batch * a.lse_stride[0] + t.head * a.lse_stride[1] + (t.row + my_row + 8 * i) * a.lse_stride[2]] =
				lse * (a.lse_base ? 1.0f : LN2);
	}
	/* a row without keys is 0, whatever V is that other rows of the tile see */
#pragma unroll
	for (int i = 0; i < PART / 2; i++) out[i] = factor[i / 2 % 2] == 0.0f ? 0.0f : out[i] * factor[i / 2 % 2];

	/* through the memory of the warpgroup's queries to whole rows; the other warps may still be multiplying by theirs */
	const uint32_t at = group * Q_GROUP_BYTES;
	warpgroup_barrier(group);
#pragma unroll
	for (int i = 0; i < PART / 8; i += 2) {
		const uint32_t to = shared + at + place_of<64>(warp * 16 + (lane & 15), i + (lane >> 4));
		store_matrix4(to, matrix<element>::pack(out[4 * i], out[4 * i + 1]),
		              matrix<element>::pack(out[4 * i + 2], out[4 * i + 3]),
		              matrix<element>::pack(out[4 * i + 4], out[4 * i + 5]),
		              matrix<element>::pack(out[4 * i + 6], out[4 * i + 7]));
	}
	__syncwarp();
	const int columns = min(a.head_dim_v - t.column, (int)PART);
	element *const to =
		(element *)a.out + t.q_slot * a.out_stride[0] + t.head * a.out_stride[1] + t.row * a.out_stride[2] + t.column;
#pragma unroll 1
	for (int i = lane; i < 16 * (PART / 8); i += 32) {
		const int row = warp * 16 + i / (PART / 8), piece = i % (PART / 8);
		if (group * 64 + row < t.rows && piece * 8 < columns)
			*(uint4 *)(to + (index_t)(group * 64 + row) * a.out_stride[2] + piece * 8) =
				*(const uint4 *)(memory + at + place_of<64>(row, piece));
	}
}
#endif
