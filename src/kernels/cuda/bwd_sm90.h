/*
 * Attention backward on Hopper (sm_90a), in 16-bit types, by warpgroup products and the copy engine: what is the same whether dQ is
 * added tile by tile (ADDS_DQ, which the including kernel defines as 0 or 1) or computed by itself.
 *
 * A block of threads owns BN keys of one key head, 64 in each of its two warpgroups of owners: K and V stay in shared memory, the sums
 * of dK and dV in registers, while the row tiles of the whole head group pass by, so that grouped heads need no atomics on dK and dV.
 * Then it draws the next keys, whose first tiles are fetched meanwhile. Of a third warpgroup, one warp draws, and has the copy engine
 * fetch Q and dO with their rows' numbers into rings, and one clears rows that may hold anything. Owners multiply transposed,
 * S^T = K Q^T and dP^T = V dO^T, whose accumulators are already the left operands of dV += P^T dO and dK += dS^T Q. A first kernel
 * computes each row's numbers.
 */
#ifndef INGOT_KERNELS_CUDA_BWD_SM90_H
#define INGOT_KERNELS_CUDA_BWD_SM90_H

#include "sm90.h"

/* Defined as 1: heads above 256, by a plan and a main kernel of the file that includes this. */
#ifndef LONG_HEADS
#define LONG_HEADS 0
#endif

enum { CLASS_PLAIN, CLASS_MASKED }; /* masked: causal, window, variable length */
enum { Q_MAP, DOUT_MAP, K_MAP, V_MAP, INPUT_MAPS, NUMBERS_MAP = INPUT_MAPS, MAPS };
/* Of the second kernel for dQ, whose blocks of keys may be of another size. */
enum { DQ_K_MAP = MAPS, DQ_V_MAP, ALL_MAPS };
#define USED_MAPS (LONG_HEADS ? INPUT_MAPS : ADDS_DQ ? MAPS : ALL_MAPS)
/* numbers: tiles of a query head, blocks of a key head, heads worked on together; of the second kernel for dQ, blocks of rows;
 * whether keys are drawn from the workspace's counter */
enum { ROW_TILES, KEY_BLOCKS, SECTION, MOVES, ROW_BLOCKS, ROW_SECTION, DRAWS };
/* Bits of MOVES: whether a map has an axis of heads and one of batches, or a stride of 0, which the copy engine does not know. */
#define MOVES_HEAD(map) (1 << 2 * (map))
#define MOVES_BATCH(map) (2 << 2 * (map))

/* By head size of Q and K, and of V. */
#define OWNERS 2
#define SHARES_KEYS(head) (!ADDS_DQ && (head) > 128)
#define BLOCK_KEYS(head) (SHARES_KEYS(head) ? 64 : 64 * OWNERS)
#define TILE_ROWS(head) ((head) == 64 ? 128 : 64)
/* Buffers for tiles of rows; STAGES for what passes between owners, and for blocks of keys in the second kernel for dQ. */
#define ROW_STAGES(head) (ADDS_DQ || (head) == 64 || (head) > 192 ? 2 : 4)
#define STAGES 2
/* From owner to owner: dS of a tile where dQ is added, else P where keys are shared. */
#define PASSED_BYTES(head) (ADDS_DQ || SHARES_KEYS(head) ? TILE_ROWS(head) * BLOCK_KEYS(head) * 2 : 0)
/* The image of a tile's dQ consists of slabs of 64 rows and 64 columns, or the 32 that are left; a slab, of four warps' parts. */
#define DQ_PART 1024
#define DQ_SLABS(head) ((head) == 64 ? 2 : PANELS(head))
/* Parts on their way to it; of heads of 192 they come out of registers. */
#define DQ_BYTES(head) (ADDS_DQ && (head) != 192 ? 4 * OWNERS * DQ_PART * 4 : 0)
#define CONTROL_BYTES 512
#define SHARED_BYTES(head, value)                                                                             \
	(TILE_BYTES(BLOCK_KEYS(head), head) + TILE_BYTES(BLOCK_KEYS(head), value) + STAGES * PASSED_BYTES(head) + \
	 ROW_STAGES(head) *                                                                                       \
	     (TILE_BYTES(TILE_ROWS(head), head) + TILE_BYTES(TILE_ROWS(head), value) + 2 * TILE_ROWS(head) * 4) + \
	 DQ_BYTES(head) + CONTROL_BYTES)
/* Of the kernel that computes dQ by itself. */
#define DQ_ROWS (64 * OWNERS)
#define DQ_KEYS(head) ((head) <= 128 ? 128 : (head) <= 192 ? 96 : 48)
#define DQ_SHARED_BYTES(head, value)                          \
	(TILE_BYTES(DQ_ROWS, head) + TILE_BYTES(DQ_ROWS, value) + \
	 STAGES * (TILE_BYTES(DQ_KEYS(head), head) + TILE_BYTES(DQ_KEYS(head), value)) + CONTROL_BYTES)
/* Rows and keys are counted in 32 bits, with room for sums. */
#define FAR (1 << 30)

#ifdef INGOT_HOST

/* spills: of the lane that draws and fetches, where dQ is added and owners take its registers */
#define IMAGES(type, number, head, value, name, spills)                                                        \
	{type "_" name "_plain", "-DELEMENT=" #number " -DHEAD=" #head " -DVALUE=" #value " -DCLASS=0", spills}, { \
		type "_" name "_masked", "-DELEMENT=" #number " -DHEAD=" #head " -DVALUE=" #value " -DCLASS=1", spills \
	}
#define SIZES_TO_192(type, number)                                                  \
	IMAGES(type, number, 64, 64, "d64", 0), IMAGES(type, number, 96, 96, "d96", 0), \
		IMAGES(type, number, 128, 128, "d128", 0), IMAGES(type, number, 192, 128, "d192v128", ADDS_DQ ? 256 : 0)

#if ADDS_DQ
static const ingot__image_variant images[] = {SIZES_TO_192("f16", 2), SIZES_TO_192("bf16", 3)};
#elif LONG_HEADS
static const ingot__image_variant images[] = {IMAGES("f16", 2, 512, 512, "d512", 0),
                                              IMAGES("bf16", 3, 512, 512, "d512", 0)};
#else
static const ingot__image_variant images[] = {SIZES_TO_192("f16", 2), IMAGES("f16", 2, 256, 256, "d256", 0),
                                              SIZES_TO_192("bf16", 3), IMAGES("bf16", 3, 256, 256, "d256", 0)};
#endif
static const struct {
	int head, value;
} sizes[] = {
#if LONG_HEADS
	{512, 512}
#else
	{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}
#endif
};
enum { SIZES = sizeof sizes / sizeof *sizes - ADDS_DQ };
static const char *const kernels[] = {"attn_bwd_sm90_rows", "attn_bwd_sm90", "attn_bwd_sm90_dq", NULL};

static int size_of(const ingot__problem *p) {
	int i = 0;
	while (i < SIZES && (sizes[i].head < p->head_dim || sizes[i].value < p->head_dim_v)) i++;
	return i;
}

static int64_t divide_up(int64_t a, int64_t b) {
	return (a + b - 1) / b;
}

static bool aligned(const ingot_tensor *t) {
	if ((uintptr_t)t->data % 16) return false;
	for (int i = 0; i < 3; i++)
		if (t->stride[i] % 8) return false;
	return true;
}

static const char *refuse(const ingot__problem *p, const ingot__device *device, int *variant) {
	(void)device;
	INGOT__REFUSE_IF(p->q.dtype != INGOT_F16 && p->q.dtype != INGOT_BF16,
	                 "it multiplies fp16 and bf16: q must be one of them");
	INGOT__REFUSE_IF(p->k.dtype != p->q.dtype, "k and v must be of q's type");
	INGOT__REFUSE_IF(p->out.dtype != p->q.dtype || p->dout.dtype != p->q.dtype, "out and dout must be of q's type");
	INGOT__REFUSE_IF(p->dq.dtype == INGOT_NONE, "no dq: it always computes dq");
	INGOT__REFUSE_IF(p->dq.dtype != p->q.dtype || (p->dk.dtype != INGOT_NONE && p->dk.dtype != p->q.dtype) ||
	                     (p->dv.dtype != INGOT_NONE && p->dv.dtype != p->q.dtype),
	                 "dq, dk and dv must be of q's type");
	INGOT__REFUSE_IF(ADDS_DQ && p->deterministic, "dq is summed by atomics, in no fixed order");
	INGOT__REFUSE_IF(p->dbias.dtype != INGOT_NONE || p->dsink.dtype != INGOT_NONE, "it computes no dbias and no dsink");
	const int size = size_of(p);
	INGOT__REFUSE_IF(LONG_HEADS && p->head_dim <= 256 && p->head_dim_v <= 256,
	                 "head sizes up to 256: attn_bwd_sm90_split takes them");
	INGOT__REFUSE_IF(size == SIZES, LONG_HEADS ? "a head size above 512"
	                                : ADDS_DQ  ? "a head size above 192, or of V above 128"
	                                           : "a head size above 256");
	INGOT__REFUSE_IF(p->head_dim % 8 || p->head_dim_v % 8,
	                 "a head size that is no multiple of 8: rows are copied in 16-byte pieces");
	INGOT__REFUSE_IF(p->features & INGOT__UNALIGNED || !aligned(&p->dout) || !aligned(&p->dq) || !aligned(&p->dk) ||
	                     !aligned(&p->dv),
	                 "a base address or stride of q, k, v, out, dout, dq, dk or dv that is no multiple of 16 bytes");
	INGOT__REFUSE_IF(p->features & (INGOT__BIAS | INGOT__BIAS_BOOL), "a bias");
	INGOT__REFUSE_IF(p->features & INGOT__ALIBI, "ALiBi");
	INGOT__REFUSE_IF(p->features & INGOT__SOFTCAP, "a softcap");
	INGOT__REFUSE_IF(p->features & INGOT__DROPOUT, "dropout");
	INGOT__REFUSE_IF(!can_map(&p->q) || !can_map(&p->k) || !can_map(&p->v) || !can_map(&p->dout),
	                 "a row stride of 0 or a stride of 2^40 bytes in q, k, v or dout, which the copy engine cannot do");
	INGOT__REFUSE_IF(p->q_side.capacity > FAR || p->k_side.capacity > FAR,
	                 "as many rows as the copy engine cannot count");
	INGOT__REFUSE_IF((double)divide_up(p->q_side.max_seqlen, 64) * (double)p->batch * (double)p->heads_q > 1e8 ||
	                     (double)divide_up(p->k_side.max_seqlen, DQ_KEYS(256)) * (double)p->batch * (double)p->heads_k >
	                         1e8,
	                 "more than 1e8 tiles of rows or blocks of keys");
	const int class = p->features & (INGOT__MASK | INGOT__VARLEN) ? CLASS_MASKED : CLASS_PLAIN;
	*variant = ((p->q.dtype == INGOT_BF16) * SIZES + size) * 2 + class;
	return NULL;
}

static int32_t moves(int map, const ingot_tensor *t) {
	return (t->stride[1] ? MOVES_HEAD(map) : 0) | (t->stride[0] ? MOVES_BATCH(map) : 0);
}

#if !LONG_HEADS
static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)threads;
	ingot__gpu_args *const a = ingot__gpu_fill(p, out);
	const int head = sizes[out->variant / 2 % SIZES].head, value = sizes[out->variant / 2 % SIZES].value;
	const int tile = TILE_ROWS(head), block = BLOCK_KEYS(head);
	const int64_t row_tiles = divide_up(p->q_side.max_seqlen, tile),
				  key_blocks = divide_up(p->k_side.max_seqlen, block);
	const int64_t tiles = row_tiles * p->batch * p->heads_q, blocks = key_blocks * p->batch * p->heads_k;
	const bool rows = p->q.shape[0] && p->q.shape[2], keys = p->k.shape[0] && p->k.shape[2];
	if ((tiles == 0 && blocks == 0) || (!rows && !keys)) return;
	out->maps = USED_MAPS;
	out->arguments_size = (uint32_t)(MAPS_AT + 128 * (size_t)out->maps);
	a->number[ROW_TILES] = (int32_t)row_tiles;
	a->number[KEY_BLOCKS] = (int32_t)key_blocks;
	/* blocks differ in length where later keys are seen by fewer rows, or lengths are the device's. Blocks of threads draw them: few
	 * heads even out */
	const bool uneven = p->features & INGOT__VARLEN || (p->right != INGOT__NO_BOUND && p->left == INGOT__NO_BOUND);
	a->number[SECTION] = 1;
	if (uneven && blocks > 0)
		a->number[SECTION] =
			(int32_t)even_sections(device, p->batch * p->heads_k, 1, 8,
		                           (double)(p->group * p->q_side.max_seqlen) *
		                               (double)(2 * p->head_dim + 2 * p->head_dim_v + ADDS_DQ * 4 * head));
	a->number[MOVES] = moves(Q_MAP, &p->q) | moves(DOUT_MAP, &p->dout) | moves(K_MAP, &p->k) | moves(V_MAP, &p->v);
	/* without rows or keys, nothing is fetched: any tensor will do */
	out->map[Q_MAP] = map_of(Q_MAP, rows ? &p->q : &p->k, tile);
	out->map[DOUT_MAP] = map_of(DOUT_MAP, rows ? &p->dout : &p->v, tile);
	const ingot_tensor *const k = keys ? &p->k : &p->q, *const v = keys ? &p->v : &p->dout;
	out->map[K_MAP] = map_of(K_MAP, k, block);
	out->map[V_MAP] = map_of(V_MAP, v, block);
	if (!ADDS_DQ) {
		out->map[DQ_K_MAP] = map_of(DQ_K_MAP, k, DQ_KEYS(head));
		out->map[DQ_V_MAP] = map_of(DQ_V_MAP, v, DQ_KEYS(head));
	}
	out->workspace_bytes = (uint64_t)tiles * (uint64_t)(tile * (ADDS_DQ * head + 2) * 4) + 16;
	/* tiles' LSE, then tiles' delta */
	const int64_t some = tiles > 0 ? tiles : 1;
	out->map[NUMBERS_MAP] =
		(ingot__tensor_map){.at = (uint32_t)(MAPS_AT + 128 * (size_t)NUMBERS_MAP),
	                        .data = (const void *)(uintptr_t)(ADDS_DQ * (uint64_t)tiles * (uint64_t)(tile * head * 4)),
	                        .in_workspace = true,
	                        .straight = true,
	                        .extent = {2 * tile, some, 2, 1},
	                        .stride = {2 * tile, 2 * tile * some, 8},
	                        .box = {2 * (uint32_t)tile, 1}};
	a->number[DRAWS] = tiles > 0 && blocks > device->multiprocessors;
	if (tiles > 0)
		out->step[out->steps++] =
			(ingot__step){.name = "rows", .kernel = kernels[0], .block = {256, 1, 1}, .grid = {(uint32_t)tiles, 1, 1}};
	if (blocks > 0)
		out->step[out->steps++] =
			(ingot__step){.name = "main",
		                  .kernel = kernels[1],
		                  .block = {128 * (OWNERS + 1), 1, 1},
		                  .shared_bytes = (uint32_t)SHARED_BYTES(head, value),
		                  .early = tiles > 0,
		                  .grid = {(uint32_t)(a->number[DRAWS] ? device->multiprocessors : blocks), 1, 1}};
	if (tiles > 0 && ADDS_DQ)
		out->step[out->steps++] = (ingot__step){.name = "dq",
		                                        .kernel = kernels[2],
		                                        .block = {128, 1, 1},
		                                        .early = blocks > 0,
		                                        .grid = {(uint32_t)tiles * (uint32_t)DQ_SLABS(head), 1, 1}};
	if (tiles > 0 && !ADDS_DQ) {
		const int64_t row_blocks = divide_up(p->q_side.max_seqlen, DQ_ROWS);
		a->number[ROW_BLOCKS] = (int32_t)row_blocks;
		a->number[ROW_SECTION] = 1;
		if (uneven)
			a->number[ROW_SECTION] =
				(int32_t)section_heads(device, p->batch * p->heads_q, p->group, row_blocks,
			                           (double)p->k_side.max_seqlen * (double)(2 * p->head_dim + 2 * p->head_dim_v));
		out->step[out->steps++] = (ingot__step){.name = "dq",
		                                        .kernel = kernels[2],
		                                        .block = {128 * (OWNERS + 1), 1, 1},
		                                        .shared_bytes = (uint32_t)DQ_SHARED_BYTES(head, value),
		                                        .early = blocks > 0,
		                                        .grid = {(uint32_t)(row_blocks * p->batch * p->heads_q), 1, 1}};
	}
}
#endif

#else

enum {
	MASKED = CLASS == CLASS_MASKED,
	BM = TILE_ROWS(HEAD),
	BN = BLOCK_KEYS(HEAD),
	ROWS_STAGES = ROW_STAGES(HEAD),
	/* dK of a tile is issued behind the next tile's S; else behind dQ of the tile before */
	LATE_DK = HEAD == 128,
	K_BYTES = TILE_BYTES(BN, HEAD),
	V_BYTES = TILE_BYTES(BN, VALUE),
	Q_BYTES = TILE_BYTES(BM, HEAD),
	DOUT_BYTES = TILE_BYTES(BM, VALUE),
	PASS_BYTES = PASSED_BYTES(HEAD),
	/* who tells that he has written what passes, or read it: warps, or lanes where no product reads it, as racecheck sees what the lane
	 * that arrives has done itself alone */
	PASSERS = SHARES_KEYS(HEAD) ? 128 : 4 * OWNERS,
	NUMBERS_BYTES = BM * 4,
	/* sums of dK and dV fill two thirds of an owner's registers */
	TIGHT = HEAD == 192 && ADDS_DQ,
	/* dQ: each warpgroup has 64 of the tile's rows, or 64 of its columns; of 192 columns, half the middle 64 besides */
	BY_ROWS = BM == 128,
	DQ_FLOATS = 32, /* a thread's */
	SLABS = DQ_SLABS(HEAD),
	TURNS = 4,
	WORKS = 2,
	/* shared memory */
	AT_K = 0,
	AT_V = AT_K + K_BYTES,
	AT_Q = AT_V + V_BYTES,
	AT_DOUT = AT_Q + ROWS_STAGES * Q_BYTES,
	AT_PASSED = AT_DOUT + ROWS_STAGES * DOUT_BYTES,
	AT_DQ = AT_PASSED + STAGES * PASS_BYTES,
	AT_LSE = AT_DQ + DQ_BYTES(HEAD),
	AT_DELTA = AT_LSE + ROWS_STAGES * NUMBERS_BYTES,
	AT_WORK = AT_DELTA + ROWS_STAGES * NUMBERS_BYTES,
	AT_TURNS = AT_WORK + 64 * WORKS,
	AT_KEYS_FULL = AT_TURNS + 8 * TURNS,
	AT_KEYS_FETCHED = AT_KEYS_FULL + 8,
	AT_KEYS_EMPTY = AT_KEYS_FETCHED + 8,
	AT_VALUES_FULL = AT_KEYS_EMPTY + 8,
	AT_WORK_FULL = AT_VALUES_FULL + 8,
	AT_WORK_EMPTY = AT_WORK_FULL + 8 * WORKS,
	AT_Q_FULL = AT_WORK_EMPTY + 8 * WORKS,
	AT_Q_FETCHED = AT_Q_FULL + 8 * ROWS_STAGES,
	AT_Q_EMPTY = AT_Q_FETCHED + 8 * ROWS_STAGES,
	AT_DOUT_FULL = AT_Q_EMPTY + 8 * ROWS_STAGES,
	AT_DOUT_FETCHED = AT_DOUT_FULL + 8 * ROWS_STAGES,
	AT_DOUT_EMPTY = AT_DOUT_FETCHED + 8 * ROWS_STAGES,
	AT_PASSED_FULL = AT_DOUT_EMPTY + 8 * ROWS_STAGES,
	AT_PASSED_EMPTY = AT_PASSED_FULL + 8 * STAGES,
	K_TO_V = (AT_V - AT_K) / 16,
	Q_TO_DOUT = (AT_DOUT - AT_Q) / 16,
	AT_END = AT_PASSED_EMPTY + 8 * STAGES
};
static_assert(AT_END <= SHARED_BYTES(HEAD, VALUE) && ROWS_STAGES <= TURNS,
              "barriers and the block's work fit into the control bytes");

struct arguments {
	ingot__gpu_args a;
	tensor_map map[USED_MAPS];
};
static_assert(sizeof(arguments) == MAPS_AT + 128 * USED_MAPS, "as the host half lays it out");

/* ---- the workspace: where dQ is added an fp32 image of it, tile by tile as warps hold it; two numbers a row; a counter ---------------------- */

DEVICE index_t all_tiles(const ingot__gpu_args &a) {
	return (index_t)a.batch * a.heads_q * a.number[ROW_TILES];
}
DEVICE float *dq_image(const ingot__gpu_args &a, int tile) {
	return (float *)a.workspace + (index_t)tile * (BM * HEAD);
}
DEVICE int part_at(int slab, int warp) {
	return (slab * 4 + warp) * DQ_PART - (HEAD == 96 && slab ? warp * (DQ_PART / 2) : 0);
}
/* Minus LSE in base 2, and minus delta = rowsum(dO * O), so that P = 2^(s unit + lse) and dS = P (dP + delta). LSE of -Inf, so a weight
 * of 0, for rows behind the last. In every 16 rows the order is that in which the four lanes of an accumulator's row read them. */
DEVICE float *lse_numbers(const ingot__gpu_args &a, int tile) {
	return (float *)a.workspace + (ADDS_DQ ? all_tiles(a) * (BM * HEAD) : 0) + (index_t)tile * BM;
}
DEVICE float *delta_numbers(const ingot__gpu_args &a, int tile) {
	return lse_numbers(a, tile) + all_tiles(a) * BM;
}
DEVICE int *counter(const ingot__gpu_args &a) {
	return (int *)(delta_numbers(a, 0) + all_tiles(a) * BM);
}
DEVICE int number_place(int row) {
	return (row & ~15) + (row >> 1 & 3) * 4 + (row >> 3 & 1) * 2 + (row & 1);
}

DEVICE span rows_of(const ingot__gpu_args &a, int batch) {
	if (MASKED && (a.features & F_VARLEN)) return query_rows(a, batch);
	return {batch, 0, a.max_seqlen_q};
}

DEVICE span keys_of(const ingot__gpu_args &a, int batch) {
	span k = {batch, 0, a.max_seqlen_k};
	if (MASKED && (a.features & F_VARLEN)) k = key_rows(a, batch);
	return k;
}

/* A block takes a tile, 8 columns a lane, or twice 8. */
extern "C" __global__ void __launch_bounds__(256) attn_bwd_sm90_rows(const __grid_constant__ arguments x) {
	enum {
		PIECES = VALUE > 256 ? 2 : 1,
		LANES = VALUE == 96 ? 16 : VALUE / 8 / PIECES,
		ROWS = 256 / LANES,
		TIMES = BM / ROWS
	};
	const ingot__gpu_args &a = x.a;
	const int lane = thread_id() % LANES, tile = blockIdx.x, first = thread_id() / LANES;
	const int head = tile / a.number[ROW_TILES], i0 = (tile - head * a.number[ROW_TILES]) * BM;
	const int batch = head / a.heads_q, h = head - batch * a.heads_q;
	const span q = rows_of(a, batch);
	start_next_step();
	if (tile == 0 && thread_id() == 0) *counter(a) = 0;
	if (i0 >= q.count) return;
	const element *const out = (const element *)a.out + row_offset(a.out_stride, q, h, i0 + first) + lane * 8;
	const element *const dout = (const element *)a.dout + row_offset(a.dout_stride, q, h, i0 + first) + lane * 8;
	const float *const lse =
		a.lse + batch * a.lse_stride[0] + h * a.lse_stride[1] + (q.start + i0 + first) * a.lse_stride[2];
	uint4 o[TIMES][PIECES], g[TIMES][PIECES];
	float l[TIMES];
#pragma unroll
	for (int n = 0; n < TIMES; n++) {
		const bool is_row = i0 + first + n * ROWS < q.count;
#pragma unroll
		for (int k = 0; k < PIECES; k++) {
			o[n][k] = g[n][k] = make_uint4(0, 0, 0, 0);
			if (is_row && (k * LANES + lane) * 8 < a.head_dim_v) {
				o[n][k] = *(const uint4 *)(out + n * ROWS * a.out_stride[2] + k * LANES * 8);
				g[n][k] = *(const uint4 *)(dout + n * ROWS * a.dout_stride[2] + k * LANES * 8);
			}
		}
		l[n] = is_row && lane == 0 ? lse[n * ROWS * a.lse_stride[2]] : -INFINITY;
	}
	if (ADDS_DQ) {
		float4 *const image = (float4 *)dq_image(a, tile);
#pragma unroll
		for (int n = 0; n < BM * HEAD / 4 / 256; n++) image[n * 256 + thread_id()] = make_float4(0, 0, 0, 0);
	}
#pragma unroll
	for (int n = 0; n < TIMES; n++) {
		const element *const left = (const element *)o[n], *const right = (const element *)g[n];
		float sum = 0;
#pragma unroll
		for (int k = 0; k < 8 * PIECES; k++) sum = fmaf((float)left[k], (float)right[k], sum);
		for (int m = LANES / 2; m; m >>= 1) sum += lane_xor(sum, m);
		if (lane > 0) continue;
		const bool none = l[n] == -INFINITY;
		const int place = number_place(first + n * ROWS);
		lse_numbers(a, tile)[place] = none ? -INFINITY : a.lse_base ? -l[n] : -l[n] * LOG2E;
		delta_numbers(a, tile)[place] = none ? 0.0f : -sum;
	}
}

/* ---- what a block does -------------------------------------------------------------------------------------------------- */

/* Keys j0 and on of a key head, with all its query heads. Rows and keys are numbered within their sequence. */
struct work {
	int batch, head;
	int j0, keys;                      /* keys: of the sequence */
	int q_slot, q_row, k_slot, k_row;  /* batch and row of the maps where the sequence begins */
	int first_tile, tiles;             /* of each head; no others hold rows that see keys of the block */
	int see_first, see_last;           /* key j is seen by rows [j + see_first, j + see_last) */
	int live_first, live_last;         /* rows that see some key of the sequence; outside, Q and dO may hold anything */
	int live_first_key, live_last_key; /* keys that some row sees */
};
static_assert(sizeof(work) == 64, "as AT_WORK has room for");

/* A tile of rows on its way: its number over all heads, and its first row. */
struct turn {
	int tile, i0;
};

DEVICE int limit(index_t x) {
	return (int)clamp64(x, -FAR, FAR);
}

/* False where there are no such keys. Sections of heads, in which every place comes with each head: under a causal mask the first
 * keys are seen by most rows. */
DEVICE bool look(const ingot__gpu_args &a, int block, work &w) {
	const int heads = a.batch * a.heads_k, in_section = a.number[SECTION] * a.number[KEY_BLOCKS];
	const int section = block / in_section, at = block - section * in_section;
	const int wide = min(a.number[SECTION], heads - section * a.number[SECTION]);
	const int place = at / wide, head = section * a.number[SECTION] + at - place * wide;
	w.batch = head / a.heads_k;
	w.head = head - w.batch * a.heads_k;
	w.j0 = place * BN;
	const span q = rows_of(a, w.batch), k = keys_of(a, w.batch);
	if (MASKED && w.j0 >= k.count) return false;
	w.keys = k.count;
	w.q_slot = (int)q.slot;
	w.q_row = (int)q.start;
	w.k_slot = (int)k.slot;
	w.k_row = (int)k.start;
	w.see_first = -FAR, w.see_last = FAR;
	w.live_first = 0, w.live_last = q.count;
	w.live_first_key = 0, w.live_last_key = k.count;
	int first = 0, last = q.count;
	if (MASKED) {
		const index_t diagonal = a.bottom_right ? (index_t)k.count - q.count : 0;
		const index_t low = -diagonal - a.right, high = a.left - diagonal + 1;
		w.see_first = limit(low);
		w.see_last = limit(high);
		w.live_first = (int)clamp64(low, 0, q.count);
		w.live_last = (int)clamp64(k.count - 1 + high, 0, q.count);
		w.live_first_key = (int)clamp64(diagonal - a.left, 0, k.count);
		w.live_last_key = (int)clamp64(q.count + diagonal + a.right, 0, k.count);
		first = (int)clamp64(w.j0 + low, 0, q.count);
		last = (int)clamp64(min(w.j0 + BN, k.count) - 1 + high, 0, q.count);
		if (a.right < -a.left) last = first;
	}
	w.first_tile = first / BM;
	w.tiles = last > first ? (last + BM - 1) / BM - w.first_tile : 0;
	return true;
}

/* Whether K, or the Q and dO of a tile, hold rows that may be anything: these become 0 between the copy engine and the products, in which
 * 0 times NaN is NaN. What lies behind the tensor's last row arrives as zeros. V needs none: it is no right operand, nor is K without dQ. */
DEVICE bool clears_keys(const ingot__gpu_args &a, const work &w) {
	return MASKED && ADDS_DQ &&
	       (w.j0 < w.live_first_key || (w.j0 + BN > w.live_last_key && w.k_row + w.live_last_key < a.k_capacity));
}
DEVICE bool clears_rows(const ingot__gpu_args &a, const work &w, int i0) {
	return MASKED && (i0 < w.live_first || (i0 + BM > w.live_last && w.q_row + w.live_last < a.q_capacity));
}

/* Of the barriers of turn t's stage. */
template <int stages> DEVICE uint32_t full_parity(int t) {
	return t / stages & 1;
}
template <int stages> DEVICE uint32_t empty_parity(int t) {
	return full_parity<stages>(t) ^ 1;
}

/* ---- helpers ------------------------------------------------------------------------------------------------------------ */

DEVICE work &work_at(unsigned char *memory, int n) {
	return *(work *)(memory + AT_WORK + sizeof(work) * (n % WORKS));
}

/* All that this block of threads works on, one after another. A warp of owners, or that which clears. */
template <class act_type> DEVICE void each_work(uint32_t shared, unsigned char *memory, const act_type &act) {
	for (int n = 0;; n++) {
		barrier_wait(shared + AT_WORK_FULL + 8 * (n % WORKS), full_parity<WORKS>(n));
		const work &w = work_at(memory, n);
		if (same(w.batch) < 0) return;
		act(w);
		__syncwarp();
		if (lane_id() == 0) barrier_arrive(shared + AT_WORK_EMPTY + 8 * (n % WORKS));
	}
}

/* One lane: draws, and fetches. */
DEVICE void fetch(const arguments &x, uint32_t shared, unsigned char *memory) {
	const int moves = x.a.number[MOVES], blocks = x.a.number[KEY_BLOCKS] * x.a.batch * x.a.heads_k;
	auto at_head = [&](int map, int head) { return moves & MOVES_HEAD(map) ? head : 0; };
	auto at_batch = [&](int map, int batch) { return moves & MOVES_BATCH(map) ? batch : 0; };
	auto draw = [&] { return x.a.number[DRAWS] ? (int)gridDim.x + atomicAdd(counter(x.a), 1) : blocks; };
	int t = 0, keys = 0, block = blockIdx.x;
	wait_for_step_before(); /* for rows' numbers, zeros of dQ, the counter */
	start_next_step();
#pragma unroll 1
	for (int n = 0;; n++) {
		work &w = work_at(memory, n);
		barrier_wait(shared + AT_WORK_EMPTY + 8 * (n % WORKS), empty_parity<WORKS>(n));
		bool is_work = false;
		while (block < blocks && !(is_work = look(x.a, block, w))) block = draw();
		if (!is_work) w.batch = -1;
		barrier_arrive(shared + AT_WORK_FULL + 8 * (n % WORKS));
		if (!is_work) return;
		/* blocks that run side by side begin at different tiles, lest all add to the same rows */
		const int begin = MASKED || !ADDS_DQ ? 0 : (int)((index_t)(w.j0 / BN) * w.tiles / x.a.number[KEY_BLOCKS]);
		for (int head = w.head * x.a.group; head < (w.head + 1) * x.a.group; head++)
			for (int i = 0; i < w.tiles; i++, t++) {
				const int at = w.first_tile + (i + begin < w.tiles ? i + begin : i + begin - w.tiles);
				const int stage = t % ROWS_STAGES, tile = (w.batch * x.a.heads_q + head) * x.a.number[ROW_TILES] + at;
				const bool clears = clears_rows(x.a, w, at * BM);
				barrier_wait(shared + AT_Q_EMPTY + 8 * stage, empty_parity<ROWS_STAGES>(t));
				*(turn *)(memory + AT_TURNS + sizeof(turn) * (t % TURNS)) = {tile, at * BM};
				const uint32_t q_arrived = shared + (clears ? AT_Q_FETCHED : AT_Q_FULL) + 8 * stage;
				barrier_expect(q_arrived, Q_BYTES + NUMBERS_BYTES);
				load_tile<HEAD, BM>(shared + AT_Q + stage * Q_BYTES, &x.map[Q_MAP], q_arrived, w.q_row + at * BM,
				                    at_head(Q_MAP, head), at_batch(Q_MAP, w.q_slot));
				load_box(shared + AT_LSE + stage * NUMBERS_BYTES, &x.map[NUMBERS_MAP], q_arrived, 0, tile, 0, 0);
				if (i == 0 && head == w.head * x.a.group) {
					const uint32_t k_arrived = shared + (clears_keys(x.a, w) ? AT_KEYS_FETCHED : AT_KEYS_FULL);
					barrier_wait(shared + AT_KEYS_EMPTY, ~keys & 1);
					barrier_expect(k_arrived, K_BYTES);
					load_tile<HEAD, BN>(shared + AT_K, &x.map[K_MAP], k_arrived, w.k_row + w.j0, at_head(K_MAP, w.head),
					                    at_batch(K_MAP, w.k_slot));
					barrier_expect(shared + AT_VALUES_FULL, V_BYTES);
					load_tile<VALUE, BN>(shared + AT_V, &x.map[V_MAP], shared + AT_VALUES_FULL, w.k_row + w.j0,
					                     at_head(V_MAP, w.head), at_batch(V_MAP, w.k_slot));
					keys++;
				}
				barrier_wait(shared + AT_DOUT_EMPTY + 8 * stage, empty_parity<ROWS_STAGES>(t));
				const uint32_t dout_arrived = shared + (clears ? AT_DOUT_FETCHED : AT_DOUT_FULL) + 8 * stage;
				barrier_expect(dout_arrived, DOUT_BYTES + NUMBERS_BYTES);
				load_tile<VALUE, BM>(shared + AT_DOUT + stage * DOUT_BYTES, &x.map[DOUT_MAP], dout_arrived,
				                     w.q_row + at * BM, at_head(DOUT_MAP, head), at_batch(DOUT_MAP, w.q_slot));
				load_box(shared + AT_DELTA + stage * NUMBERS_BYTES, &x.map[NUMBERS_MAP], dout_arrived, 0, tile, 1, 0);
			}
		block = draw();
	}
}

/* A warp: zeros for rows outside [first, last) of a tile, and then its other barrier's arrival. */
template <int columns, int rows> DEVICE void clear_rows(unsigned char *tile, int first, int last, uint32_t full) {
#pragma unroll 1
	for (int i = lane_id(); i < TILE_BYTES(rows, columns) / 16; i += 32) {
		const int row = i / 8 % rows;
		if (row < first || row >= last) *(uint4 *)(tile + i * 16) = make_uint4(0, 0, 0, 0);
	}
	fence_async();
	__syncwarp();
	if (lane_id() == 0) barrier_arrive(full);
}

/* A warp. */
DEVICE void clear(const ingot__gpu_args &a, uint32_t shared, unsigned char *memory) {
	uint32_t parity = 0, keys_parity = 0; /* bit per stage: tiles that need clearing come seldom */
	int t = 0;
	each_work(shared, memory, [&](const work &w) {
		if (w.tiles > 0 && clears_keys(a, w)) {
			barrier_wait(shared + AT_KEYS_FETCHED, keys_parity);
			clear_rows<HEAD, BN>(memory + AT_K, w.live_first_key - w.j0, w.live_last_key - w.j0, shared + AT_KEYS_FULL);
			keys_parity ^= 1;
		}
		for (int h = 0; h < a.group; h++)
			for (int n = w.first_tile; n < w.first_tile + w.tiles; n++, t++) {
				if (!clears_rows(a, w, n * BM)) continue;
				const int stage = t % ROWS_STAGES, first = w.live_first - n * BM, last = w.live_last - n * BM;
				barrier_wait(shared + AT_Q_FETCHED + 8 * stage, parity >> stage & 1);
				clear_rows<HEAD, BM>(memory + AT_Q + stage * Q_BYTES, first, last, shared + AT_Q_FULL + 8 * stage);
				barrier_wait(shared + AT_DOUT_FETCHED + 8 * stage, parity >> stage & 1);
				clear_rows<VALUE, BM>(memory + AT_DOUT + stage * DOUT_BYTES, first, last,
				                      shared + AT_DOUT_FULL + 8 * stage);
				parity ^= 1u << stage;
			}
	});
}

/* ---- owners ------------------------------------------------------------------------------------------------------------- */

/* x[64 keys][BM] = 64 rows of K or V times a tile of Q or dO, transposed. */
template <int columns> DEVICE void multiply_rows(float (&x)[BM / 2], uint64_t keys, uint64_t rows) {
#pragma unroll
	for (int i = 0; i < columns / 16; i++)
		wgmma<BM>::shared<0>(x, keys + ((i / 4 * BN * 128 + i % 4 * 32) >> 4),
		                     rows + ((i / 4 * BM * 128 + i % 4 * 32) >> 4), i > 0);
}
/* sum[64 keys][columns] += P^T or dS^T times a tile of dO or Q. */
template <int columns>
DEVICE void multiply_keys(float (&sum)[columns / 2], const uint32_t (&left)[BM / 4], uint64_t rows, int add) {
#pragma unroll
	for (int i = 0; i < BM / 16; i++)
		wgmma<columns>::held<1>(sum, &left[4 * i], rows + (i * 2048 >> 4), i > 0 ? 1 : add);
}
/* dq[64][columns] = dS K. */
template <int columns> DEVICE void multiply_dq(float (&dq)[columns / 2], uint64_t ds, uint64_t keys) {
#pragma unroll
	for (int i = 0; i < BN / 16; i++)
		wgmma<columns>::shared<1>(dq, ds + ((i / 4 * BM * 128 + i % 4 * 32) >> 4), keys + (i * 2048 >> 4), i > 0);
}

/* The numbers of the rows that this lane's accumulators belong to: of 16 rows, or of a tile. */
DEVICE void load_four(float *numbers, uint32_t from) {
	asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
	             : "=f"(numbers[0]), "=f"(numbers[1]), "=f"(numbers[2]), "=f"(numbers[3])
	             : "r"(from + (lane_id() & 3) * 16));
}
DEVICE void load_numbers(float (&numbers)[BM / 4], uint32_t from) {
#pragma unroll
	for (int i = 0; i < BM / 4; i += 4)
		asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
		             : "=f"(numbers[i]), "=f"(numbers[i + 1]), "=f"(numbers[i + 2]), "=f"(numbers[i + 3])
		             : "r"(from + i * 16 + (lane_id() & 3) * 16));
}

DEVICE float low_half(uint32_t pair) {
	return ELEMENT == 2 ? __low2float(*(const __half2 *)&pair) : __int_as_float(pair << 16);
}
DEVICE float high_half(uint32_t pair) {
	return ELEMENT == 2 ? __high2float(*(const __half2 *)&pair) : __int_as_float(pair & 0xffff0000u);
}

/* Zeros where rows at, at + 1, at + 8 and so on lie outside [low, high): of two keys, 8 apart. */
template <int count> DEVICE void hide(uint32_t (&pairs)[count], int at, int low0, int high0, int low1, int high1) {
#pragma unroll
	for (int i = 0; i < count; i++) {
		const int low = i & 1 ? low1 : low0, high = i & 1 ? high1 : high0, row = at + i / 2 * 8;
		if (row < low || row >= high) pairs[i] &= 0xffff0000u;
		if (row + 1 < low || row + 1 >= high) pairs[i] &= 0xffffu;
	}
}

DEVICE int read_lane() {
	int lane;
	asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
	return lane;
}

template <bool is> struct truth {
	static constexpr bool value = is;
};

/* What sums are without a step; the first step does not add. */
template <int count> DEVICE void clear_sums(float (&sum)[count]) {
#pragma unroll
	for (int i = 0; i < count; i++) sum[i] = 0;
}

DEVICE const turn &turn_of(const unsigned char *memory, int t) {
	return *(const turn *)(memory + AT_TURNS + sizeof(turn) * (t % TURNS));
}

/* What a warpgroup sees of its 64 keys, which begin `offset` behind the block's first: tiles that begin outside [whole_from, whole_to]
 * hold pairs that are masked, or keys that are none. */
struct sight {
	int offset, whole_from, whole_to;
	bool ragged;
};

DEVICE sight look_at(const work &w, int offset) {
	const int first_key = w.j0 + offset;
	const bool ragged = same(first_key + 64 > w.keys);
	return {offset, MASKED ? same(ragged ? FAR : first_key + 63 + w.see_first) : 0,
	        MASKED ? same(first_key + w.see_last - BM) : 0, ragged};
}

DEVICE void hide_masked(uint32_t (&pairs)[BM / 4], const work &w, const sight &sees, const turn &at) {
	if (!MASKED && !sees.ragged) return;
	const int i0 = at.i0;
	if (MASKED && i0 >= sees.whole_from && i0 <= sees.whole_to) return;
	/* from scratch, lest registers hold it through the loop */
	const int again = read_lane(), key = w.j0 + sees.offset + same(warp_id()) % 4 * 16 + (again >> 2), keys = w.keys;
	const int low = MASKED ? key + w.see_first : -FAR, high0 = MASKED ? min(key + w.see_last, w.live_last) : FAR,
			  high1 = MASKED ? min(key + 8 + w.see_last, w.live_last) : FAR;
	hide(pairs, i0 + 2 * (again & 3), key < keys ? low : FAR, high0, key + 8 < keys ? low + (MASKED ? 8 : 0) : FAR,
	     high1);
}

/* Of 4 lanes, lane i gets what each has in its x[i]. */
DEVICE void transpose(uint32_t (&x)[4]) {
#pragma unroll
	for (int m = 1; m <= 2; m *= 2) {
		const bool upper = lane_id() & m;
#pragma unroll
		for (int i = 0; i < 4; i++) {
			if (i & m) continue;
			const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + m], m);
			if (upper) x[i] = got;
			else x[i + m] = got;
		}
	}
}

/* A warp's 16 rows of sums, of which `rows` exist, to a gradient at its row 0: lanes write 16 bytes each. */
template <int columns>
DEVICE void store_sums(element *gradient, int64_t pitch, int rows, int width, const float (&sum)[columns / 2],
                       float scale) {
	const int row = lane_id() >> 2, column = (lane_id() & 3) * 8;
#pragma unroll
	for (int half = 0; half < 2; half++) {
		element *const to = gradient + (row + 8 * half) * pitch + column;
#pragma unroll
		for (int i = 0; i < columns / 32; i++) {
			uint32_t x[4];
#pragma unroll
			for (int n = 0; n < 4; n++) {
				const float *const from = sum + 16 * i + 4 * n + 2 * half;
				x[n] = matrix<element>::pack(from[0] * scale, from[1] * scale);
			}
			transpose(x);
			if (row + 8 * half < rows && i * 32 + column < width)
				*(uint4 *)(to + i * 32) = make_uint4(x[0], x[1], x[2], x[3]);
		}
	}
}

/* Likewise of a warpgroup's keys, behind the block's first by `offset`; nothing if the gradient is not asked for. */
template <int columns>
DEVICE void store_keys(void *gradient, const int64_t *stride, int width, const float (&sum)[columns / 2], float scale,
                       const work &w, int offset) {
	const int key = w.j0 + offset + same(warp_id()) % 4 * 16;
	if (gradient)
		store_sums<columns>((element *)gradient + w.k_slot * stride[0] + w.head * stride[1] +
		                        (w.k_row + (index_t)key) * stride[2],
		                    stride[2], w.keys - key, width, sum, scale);
}

#if SHARES_KEYS(HEAD)
/* An owner of sums alone: the kernel that includes this has it. */
DEVICE void share_keys(const ingot__gpu_args &a, uint32_t shared, unsigned char *memory, int group);
#else
/* An owner with 64 keys of its own. */
DEVICE void own_keys(const ingot__gpu_args &a, uint32_t shared, unsigned char *memory, int group) {
	const int warp = same(warp_id()) % 4, lane = lane_id();
	const bool leader = lane == 0;
	const float unit = a.softmax_scale * LOG2E;
	/* few operands, and others by their distance: uniform registers do not suffice for more */
	const uint64_t q_right = operand(shared + AT_Q, 16), q_columns = operand(shared + AT_Q, BM * 128);
	const uint64_t ds_left = operand(shared + AT_PASSED + (BY_ROWS ? group * 64 * 128 : 0), 16),
				   k_columns = operand(shared + AT_K + (BY_ROWS ? 0 : group * (SLABS - 1) * BN * 128), BN * 128);
	/* where this lane stores dS of 16 rows, transposed */
	const int ds_row = (lane >> 4) * 8 + (lane & 7), ds_piece = 2 * warp + (lane >> 3 & 1);
	const uint32_t ds_to = shared + AT_PASSED + group * BM * 128 + ds_row * 128 + ((ds_piece ^ (ds_row & 7)) << 4);
	const uint32_t dq_part = shared + AT_DQ + (group * 4 + warp) * DQ_PART * 4;
	int begin = 0, keys = 0; /* turns and blocks of keys so far */
	each_work(shared, memory, [&](const work &w) {
		const int turns = same(w.tiles) * a.group, end = begin + turns;
		const sight sees = look_at(w, group * 64);
		float dk[HEAD / 2], dv[VALUE / 2], s[BM / 2], numbers[BM / 4];
		uint32_t p[BM / 4], ds[BM / 4];

		auto issue_dq = [&](float(&dq)[DQ_FLOATS], int t) {
			barrier_wait(shared + AT_PASSED_FULL + 8 * (t % STAGES), full_parity<STAGES>(t));
			wgmma_fence();
			multiply_dq<64>(dq, ds_left + (t % STAGES * PASS_BYTES >> 4), k_columns);
			wgmma_commit();
		};
		auto add_dq = [&](const float(&dq)[DQ_FLOATS], int t) {
			if (leader) store_wait_read();
			__syncwarp();
#pragma unroll
			for (int i = 0; i < DQ_FLOATS; i += 4) {
				if (HEAD == 96 && group && i == DQ_FLOATS / 2) break;
				asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(dq_part + (i / 4 * 32 + lane) * 16),
				             "f"(dq[i]), "f"(dq[i + 1]), "f"(dq[i + 2]), "f"(dq[i + 3])
				             : "memory");
			}
			fence_async();
			__syncwarp();
			if (leader) {
				add_floats(dq_image(a, turn_of(memory, t).tile) + part_at(group, warp), dq_part,
				           HEAD == 96 && group ? DQ_PART * 2 : DQ_PART * 4);
				store_commit();
			}
		};
		/* Where registers are tight: half the middle slab; additions out of registers, without memory of their own; and dK, whose
		 * left operand is dS in shared memory, so that it runs under these. */
		auto issue_middle = [&](float(&dq)[DQ_FLOATS / 2], int t) {
			wgmma_fence();
			multiply_dq<32>(dq, ds_left + (t % STAGES * PASS_BYTES >> 4),
			                operand(shared + AT_K + BN * 128 + group * 64, BN * 128));
			wgmma_commit();
		};
		auto add_held = [&](const auto &dq, int t, int slab, int from) {
			float *const to = dq_image(a, turn_of(memory, t).tile) + part_at(slab, warp) + from + lane * 4;
#pragma unroll
			for (int i = 0; i < (int)sizeof dq / 4; i += 4) add_four(to + i * 32, dq + i);
		};
		auto issue_dk = [&](int t) {
			warpgroup_barrier(group);
			wgmma_fence();
			const uint64_t left =
				operand(shared + AT_PASSED + t % STAGES * PASS_BYTES + same(warp_id() / 4 - 1) * 64 * BM * 2, BM * 128);
#pragma unroll
			for (int i = 0; i < BM / 16; i++)
				wgmma<HEAD>::template shared<1, 1>(dk, left + (i * 2048 >> 4),
				                                   q_columns + ((t % ROWS_STAGES * Q_BYTES + i * 2048) >> 4),
				                                   i > 0 ? 1 : t > begin);
			wgmma_commit();
		};

		/* One tile. Where LATE_DK, dK of the tile before comes first. Nothing is in flight at its ends: the compiler follows no
		 * products around a loop. */
		auto step = [&](int t, auto is_first) {
			constexpr bool first = decltype(is_first)::value;
			const int stage = t % ROWS_STAGES, before = (t + ROWS_STAGES - 1) % ROWS_STAGES;
			/* known afresh to be the same in all lanes: else eight operands of K's would lie in vector registers through the loop */
			const int group = same(warp_id()) / 4 - 1;
			const uint64_t k_left = operand(shared + AT_K + group * 64 * 128, 16);
			barrier_wait(shared + AT_Q_FULL + 8 * stage, full_parity<ROWS_STAGES>(t));
			wgmma_fence();
			multiply_rows<HEAD>(s, k_left, q_right + (stage * Q_BYTES >> 4));
			wgmma_commit();
			if constexpr (LATE_DK && !first) {
				wgmma_fence();
				multiply_keys<HEAD>(dk, ds, q_columns + (before * Q_BYTES >> 4), t > begin + 1);
				wgmma_commit();
			}
			if (!TIGHT) load_numbers(numbers, shared + AT_LSE + stage * NUMBERS_BYTES);
			wgmma_wait<LATE_DK && !first>();
			pin(s);
#pragma unroll
			for (int i = 0; i < BM / 4; i++) {
				if (TIGHT && i % 4 == 0) load_four(numbers + i, shared + AT_LSE + stage * NUMBERS_BYTES + i * 16);
				p[i] = matrix<element>::pack(fast_exp2(fmaf(s[2 * i], unit, numbers[i / 2 * 2])),
				                             fast_exp2(fmaf(s[2 * i + 1], unit, numbers[i / 2 * 2 + 1])));
			}
			hide_masked(p, w, sees, turn_of(memory, t));
			barrier_wait(shared + AT_DOUT_FULL + 8 * stage, full_parity<ROWS_STAGES>(t));
			if constexpr (first) barrier_wait(shared + AT_VALUES_FULL, keys & 1);
			wgmma_fence();
			multiply_rows<VALUE>(s, k_left + K_TO_V, q_right + Q_TO_DOUT + (stage * DOUT_BYTES >> 4));
			wgmma_commit();
			wgmma_fence();
			multiply_keys<VALUE>(dv, p, q_columns + Q_TO_DOUT + (stage * DOUT_BYTES >> 4), !first);
			wgmma_commit();
			if (!TIGHT) load_numbers(numbers, shared + AT_DELTA + stage * NUMBERS_BYTES);
			wgmma_wait<1>();
			pin(s);
			if constexpr (LATE_DK && !first)
				if (leader) barrier_arrive(shared + AT_Q_EMPTY + 8 * before);
#pragma unroll
			for (int i = 0; i < BM / 4; i++) {
				if (TIGHT && i % 4 == 0) load_four(numbers + i, shared + AT_DELTA + stage * NUMBERS_BYTES + i * 16);
				ds[i] = matrix<element>::pack(low_half(p[i]) * (s[2 * i] + numbers[i / 2 * 2]),
				                              high_half(p[i]) * (s[2 * i + 1] + numbers[i / 2 * 2 + 1]));
			}
			hide_masked(ds, w, sees, turn_of(memory, t));
			if (!ADDS_DQ) {
				__syncwarp(); /* all lanes have read what the leader gives back */
				if (!LATE_DK) {
					wgmma_fence();
					multiply_keys<HEAD>(dk, ds, q_columns + (stage * Q_BYTES >> 4), !first);
					wgmma_commit();
				}
				wgmma_wait<!LATE_DK>();
				if (leader) barrier_arrive(shared + AT_DOUT_EMPTY + 8 * stage);
				wgmma_wait<0>();
				if (!LATE_DK && leader) barrier_arrive(shared + AT_Q_EMPTY + 8 * stage);
				return;
			}
			barrier_wait(shared + AT_PASSED_EMPTY + 8 * stage, empty_parity<STAGES>(t));
#pragma unroll
			for (int i = 0; i < BM / 16; i++)
				asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
								 ds_to + stage * PASS_BYTES + i * 2048),
				             "r"(ds[4 * i]), "r"(ds[4 * i + 1]), "r"(ds[4 * i + 2]), "r"(ds[4 * i + 3])
				             : "memory");
			fence_async();
			__syncwarp();
			if (leader) barrier_arrive(shared + AT_PASSED_FULL + 8 * stage);
			if constexpr (TIGHT) {
				wgmma_wait<0>();
				if (leader) barrier_arrive(shared + AT_DOUT_EMPTY + 8 * stage);
				float(&dq)[DQ_FLOATS] = *(float(*)[DQ_FLOATS])s;
				if constexpr (!first) issue_dq(dq, t - 1);
				issue_dk(t);
				if constexpr (!first) {
					float middle[DQ_FLOATS / 2];
					wgmma_wait<1>();
					pin(dq);
					add_held(dq, t - 1, 2 * group, 0);
					issue_middle(middle, t - 1);
					wgmma_wait<0>();
					pin(middle);
					if (leader) barrier_arrive(shared + AT_PASSED_EMPTY + 8 * ((t - 1) % STAGES));
					add_held(middle, t - 1, 1, group * (DQ_PART / 2));
				} else wgmma_wait<0>();
			} else if constexpr (first) {
				if (!LATE_DK) {
					wgmma_fence();
					multiply_keys<HEAD>(dk, ds, q_columns + (stage * Q_BYTES >> 4), 0);
					wgmma_commit();
				}
				wgmma_wait<0>();
				if (leader) barrier_arrive(shared + AT_DOUT_EMPTY + 8 * stage);
			} else {
				float own[DQ_FLOATS];
				/* where tiles have 64 rows, dQ takes the place of the scores */
				float(&dq)[DQ_FLOATS] = *(float(*)[DQ_FLOATS])(BM == 64 ? s : own);
				issue_dq(dq, t - 1);
				if (!LATE_DK) {
					wgmma_fence();
					multiply_keys<HEAD>(dk, ds, q_columns + (stage * Q_BYTES >> 4), 1);
					wgmma_commit();
				}
				wgmma_wait<!LATE_DK>();
				pin(dq);
				if (leader) {
					barrier_arrive(shared + AT_PASSED_EMPTY + 8 * ((t - 1) % STAGES));
					barrier_arrive(shared + AT_DOUT_EMPTY + 8 * stage);
				}
				add_dq(dq, t - 1);
				if (!LATE_DK) wgmma_wait<0>();
			}
			if (!LATE_DK && leader) barrier_arrive(shared + AT_Q_EMPTY + 8 * stage);
		};

		if (turns > 0) {
			barrier_wait(shared + AT_KEYS_FULL, keys & 1);
			step(begin, truth<true>());
			for (int t = begin + 1; t < end; t++) step(t, truth<false>());
			if (LATE_DK) {
				wgmma_fence();
				multiply_keys<HEAD>(dk, ds, q_columns + ((end - 1) % ROWS_STAGES * Q_BYTES >> 4), turns > 1);
				wgmma_commit();
			}
			float dq[DQ_FLOATS], middle[DQ_FLOATS / 2];
			if (ADDS_DQ) issue_dq(dq, end - 1);
			if (TIGHT) issue_middle(middle, end - 1);
			wgmma_wait<0>();
			if (ADDS_DQ) pin(dq);
			if (TIGHT) pin(middle);
			if (leader) {
				if (LATE_DK) barrier_arrive(shared + AT_Q_EMPTY + 8 * ((end - 1) % ROWS_STAGES));
				if (ADDS_DQ) barrier_arrive(shared + AT_PASSED_EMPTY + 8 * ((end - 1) % STAGES));
				barrier_arrive(shared + AT_KEYS_EMPTY);
			}
			if (TIGHT) {
				add_held(dq, end - 1, 2 * group, 0);
				add_held(middle, end - 1, 1, group * (DQ_PART / 2));
			} else if (ADDS_DQ) add_dq(dq, end - 1);
			pin(dk);
			pin(dv);
			begin = end;
			keys++;
		} else {
			clear_sums(dk);
			clear_sums(dv);
		}

		store_keys<HEAD>(a.dk, a.dk_stride, a.head_dim, dk, a.softmax_scale, w, group * 64);
		store_keys<VALUE>(a.dv, a.dv_stride, a.head_dim_v, dv, 1.0f, w, group * 64);
	});
	if (leader) store_wait();
}

#endif

#if !LONG_HEADS
extern "C" __global__ void __launch_bounds__(128 * (OWNERS + 1), 1) attn_bwd_sm90(const __grid_constant__ arguments x) {
	extern __shared__ __align__(1024) unsigned char memory[];
	const ingot__gpu_args &a = x.a;
	const uint32_t shared = shared_address(memory);
	const int warpgroup = same(warp_id()) / 4, warp = same(warp_id()) % 4;

	if (thread_id() == 0) {
		barrier_init(shared + AT_KEYS_FULL, 1);
		barrier_init(shared + AT_KEYS_FETCHED, 1);
		barrier_init(shared + AT_KEYS_EMPTY, 4 * OWNERS);
		barrier_init(shared + AT_VALUES_FULL, 1);
		for (int i = 0; i < WORKS; i++) {
			barrier_init(shared + AT_WORK_FULL + 8 * i, 1);
			barrier_init(shared + AT_WORK_EMPTY + 8 * i, 4 * OWNERS + MASKED);
		}
		for (int i = 0; i < ROWS_STAGES; i++) {
			barrier_init(shared + AT_Q_FULL + 8 * i, 1);
			barrier_init(shared + AT_Q_FETCHED + 8 * i, 1);
			barrier_init(shared + AT_Q_EMPTY + 8 * i, 4 * OWNERS);
			barrier_init(shared + AT_DOUT_FULL + 8 * i, 1);
			barrier_init(shared + AT_DOUT_FETCHED + 8 * i, 1);
			barrier_init(shared + AT_DOUT_EMPTY + 8 * i, 4 * OWNERS);
		}
		for (int i = 0; i < STAGES; i++) {
			barrier_init(shared + AT_PASSED_FULL + 8 * i, PASSERS);
			barrier_init(shared + AT_PASSED_EMPTY + 8 * i, PASSERS);
		}
		barrier_init_done();
		for (int i = 0; i < MAPS; i++) prefetch_map(&x.map[i]);
	}
	block_barrier();

	if (warpgroup == 0) {
		registers_release<TIGHT ? 24 : 40>();
		if (warp == 0 && lane_id() == 0) fetch(x, shared, memory);
		if (MASKED && warp == 1) clear(a, shared, memory);
		return;
	}

	registers_claim<TIGHT ? 240 : 232>();
#if SHARES_KEYS(HEAD)
	share_keys(a, shared, memory, warpgroup - 1);
#else
	own_keys(a, shared, memory, warpgroup - 1);
#endif
}
#endif

#endif
#endif
