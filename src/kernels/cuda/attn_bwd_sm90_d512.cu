/*
 * Attention backward on Hopper (sm_90a) for heads of more than 256, in 16-bit types.
 *
 * The sums of 64 keys and 512 columns fill half the register file, so dV, dK and dQ have blocks of their own, eight products in the
 * place of five. Nothing is added in memory, so that results do not depend on the order in which blocks run. A first kernel computes
 * each row's numbers. One launch has all the blocks: a small problem has few of a kind.
 *
 * A block for dK owns 64 keys, whose K and V stay in place while Q and dO pass by in tiles of 32 rows; a block for dQ owns 64 rows of
 * Q and dO, and K and V pass by. Two warpgroups divide the products: the first computes S and P, the second dP and dS, each the left
 * half of dS times Q (or K) or the right. A thread hands its weights to the thread of its place in the other warpgroup and gets dS back
 * in the same memory. Meanwhile S and dP of the next tile are multiplied. Products of 64 by 32 read shared memory more than they
 * multiply: the last columns of what is owned are held in registers, which also makes room for the tiles.
 *
 * A block for dV is as the forward's: two warpgroups own 64 keys each and 256 columns, for both halves of which S is computed.
 */
#define ADDS_DQ 0
#define LONG_HEADS 1
#include "bwd_sm90.h"

/* more numbers: blocks of 128 keys of a key head; parts of V's columns; blocks for dQ, and for dQ and dK */
enum { VALUE_BLOCKS = DRAWS + 1, PARTS, DQ_END, DK_END };
enum {
	BOX_ROWS = 32, /* of all maps */
	OWNED = 64,    /* rows of a block for dK or dQ */
	OWNED_VALUES = 64 * OWNERS,
	PART = 256, /* columns of a warpgroup's sums */
	/* shared memory of a block for dK or dQ: what it owns, tiles of Q or K, pieces of tiles of dO or V, what passes between threads */
	OWNED_BYTES = TILE_BYTES(OWNED, 512),
	PASSING = 32, /* rows of a tile */
	PASSING_BYTES = TILE_BYTES(PASSING, 512),
	PASSING_STAGES = 3,
	PIECE_COLUMNS = 128,
	PIECE_BYTES = TILE_BYTES(PASSING, PIECE_COLUMNS),
	TILE_PIECES = 512 / PIECE_COLUMNS,
	/* steps of 16 columns, the last ones, whose owned rows a warpgroup holds in registers */
	HELD = 15,
	HELD_TOO = 8,
	AT_OWNED_TOO = TILE_BYTES(OWNED, 512 - 16 * HELD),
	AT_PASSING = AT_OWNED_TOO + TILE_BYTES(OWNED, 512 - 16 * HELD_TOO),
	AT_PIECES = AT_PASSING + PASSING_STAGES * PASSING_BYTES,
	AT_MAIL = AT_PIECES + TILE_PIECES * PIECE_BYTES,
	MAIL_BYTES = OWNED * PASSING * 4,
	/* and of a block for dV: K, chunks of 128 columns of 64 rows of Q or of 32 rows of dO */
	VALUE_ROWS = 64,
	CHUNK_COLUMNS = 128,
	CHUNK_ROWS = 32,
	CHUNK_BYTES = TILE_BYTES(VALUE_ROWS, CHUNK_COLUMNS),
	Q_CHUNKS = 512 / CHUNK_COLUMNS,
	DOUT_CHUNKS = VALUE_ROWS / CHUNK_ROWS,
	CHUNK_STAGES = 6,
	AT_CHUNKS = OWNERS * OWNED_BYTES,
	AT_JOB = AT_MAIL + MAIL_BYTES,
	AT_BARRIERS = AT_JOB + 64,
	LONG_SHARED_BYTES = AT_BARRIERS + 8 * 32
};

#ifdef INGOT_HOST

_Static_assert((int)CHUNK_BYTES == (int)TILE_BYTES(CHUNK_ROWS, PART), "chunks of Q and dO are alike");
_Static_assert((int)AT_CHUNKS + (int)CHUNK_STAGES * (int)CHUNK_BYTES <= (int)AT_JOB, "blocks for dV have room");

static const char *const long_kernels[] = {"attn_bwd_sm90_rows", "attn_bwd_sm90_d512", NULL};

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)device, (void)threads, (void)kernels;
	ingot__gpu_args *const a = ingot__gpu_fill(p, out);
	const int64_t row_tiles = divide_up(p->q_side.max_seqlen, TILE_ROWS(512)),
				  tiles = row_tiles * p->batch * p->heads_q;
	const int64_t key_blocks = divide_up(p->k_side.max_seqlen, OWNED),
				  value_blocks = divide_up(p->k_side.max_seqlen, OWNED_VALUES), parts = divide_up(p->head_dim_v, PART);
	const bool rows = p->q.shape[0] && p->q.shape[2], keys = p->k.shape[0] && p->k.shape[2];
	const int64_t dq_end = tiles, heads_k = p->batch * p->heads_k,
				  dk_end = dq_end + (p->dk.dtype != INGOT_NONE ? key_blocks * heads_k : 0),
				  blocks = dk_end + (p->dv.dtype != INGOT_NONE ? value_blocks * parts * heads_k : 0);
	if (blocks == 0 || (!rows && !keys)) return;
	out->maps = USED_MAPS;
	out->arguments_size = (uint32_t)(MAPS_AT + 128 * (size_t)USED_MAPS);
	a->number[ROW_TILES] = (int32_t)row_tiles;
	a->number[KEY_BLOCKS] = (int32_t)key_blocks;
	a->number[VALUE_BLOCKS] = (int32_t)value_blocks;
	a->number[PARTS] = (int32_t)parts;
	a->number[DQ_END] = (int32_t)dq_end;
	a->number[DK_END] = (int32_t)dk_end;
	a->number[MOVES] = moves(Q_MAP, &p->q) | moves(DOUT_MAP, &p->dout) | moves(K_MAP, &p->k) | moves(V_MAP, &p->v);
	/* without rows or keys, nothing is fetched: any tensor will do */
	out->map[Q_MAP] = map_of(Q_MAP, rows ? &p->q : &p->k, BOX_ROWS);
	out->map[DOUT_MAP] = map_of(DOUT_MAP, rows ? &p->dout : &p->v, BOX_ROWS);
	out->map[K_MAP] = map_of(K_MAP, keys ? &p->k : &p->q, BOX_ROWS);
	out->map[V_MAP] = map_of(V_MAP, keys ? &p->v : &p->dout, BOX_ROWS);
	out->workspace_bytes = (uint64_t)tiles * (TILE_ROWS(512) * 2 * 4) + 16;
	if (tiles > 0)
		out->step[out->steps++] = (ingot__step){
			.name = "rows", .kernel = long_kernels[0], .block = {256, 1, 1}, .grid = {(uint32_t)tiles, 1, 1}};
	out->step[out->steps++] = (ingot__step){.name = "main",
	                                        .kernel = long_kernels[1],
	                                        .block = {128 * (OWNERS + 1), 1, 1},
	                                        .shared_bytes = LONG_SHARED_BYTES,
	                                        .grid = {(uint32_t)blocks, 1, 1}};
}

const ingot__impl ingot__impl_attn_bwd_sm90_d512 = {
	.name = "attn_bwd_sm90_d512",
	.family = "cuda",
	.op = INGOT__ATTN_BWD,
	.device = INGOT_CUDA,
	.arch = "sm_90a",
	.rank = 15,
	.variant_count = sizeof images / sizeof *images,
	.images = images,
	.kernels = long_kernels,
	.refuse = refuse,
	.plan = plan,
};

#else

static_assert(BM == 64, "numbers come in tiles of as many rows");

/* ---- what a block does ---------------------------------------------------------------------------------------------------- */

/* Rows of one side, keys or queries, and the other side's tiles, which pass. Rows are numbered within their sequence. */
struct job {
	int batch, head;           /* of the owned side */
	int first, count;          /* first owned row; rows of the sequence */
	int slot, row;             /* batch and row of the maps where the sequence begins */
	int other_slot, other_row; /* likewise of the other side */
	int others;                /* its rows */
	int first_tile, tiles;     /* of each head; no others hold rows that see any owned */
	int see_first, see_last;   /* owned row i sees, or is seen by, [i + see_first, i + see_last) */
	int live_first, live_last; /* of the other side, rows that see any of this; outside, they may hold anything */
	int column;                /* of dV */
};
static_assert(sizeof(job) == 64, "as AT_JOB has room for");

/* False where there are no such rows. */
template <bool keys, int owned, int passing>
DEVICE bool take(const ingot__gpu_args &a, int head, int first, int column, job &w) {
	const int heads = keys ? a.heads_k : a.heads_q;
	w.batch = head / heads;
	w.head = head - w.batch * heads;
	w.first = first;
	w.column = column;
	const span q = rows_of(a, w.batch), k = keys_of(a, w.batch);
	const span &mine = keys ? k : q, &other = keys ? q : k;
	if (first >= mine.count) return false;
	w.count = mine.count;
	w.slot = (int)mine.slot;
	w.row = (int)mine.start;
	w.other_slot = (int)other.slot;
	w.other_row = (int)other.start;
	w.others = other.count;
	w.see_first = -FAR, w.see_last = FAR;
	w.live_first = 0, w.live_last = other.count;
	int from = 0, to = other.count;
	if (MASKED) {
		const index_t diagonal = a.bottom_right ? (index_t)k.count - q.count : 0;
		const index_t low = keys ? -diagonal - a.right : diagonal - a.left;
		const index_t high = (keys ? a.left - diagonal : diagonal + a.right) + 1;
		w.see_first = limit(low);
		w.see_last = limit(high);
		w.live_first = (int)clamp64(low, 0, other.count);
		w.live_last = (int)clamp64(mine.count - 1 + high, 0, other.count);
		from = (int)clamp64(first + low, 0, other.count);
		to = (int)clamp64(min(first + owned, mine.count) - 1 + high, 0, other.count);
		if (a.right < -a.left) to = from;
	}
	w.first_tile = from / passing;
	w.tiles = to > from ? (to + passing - 1) / passing - w.first_tile : 0;
	return true;
}

/* Whether rows [i0, i0 + rows) of the other side may hold anything, as clears_rows has it. */
template <bool keys, int rows> DEVICE bool clears(const ingot__gpu_args &a, const job &w, int i0) {
	return MASKED && (i0 < w.live_first ||
	                  (i0 + rows > w.live_last && w.other_row + w.live_last < (keys ? a.q_capacity : a.k_capacity)));
}

/* Tiles that pass, one after another: act(t, head, i0). */
template <bool keys, int passing, class act_type>
DEVICE void each_tile(const ingot__gpu_args &a, const job &w, const act_type &act) {
	int t = 0;
	const int heads = keys ? a.group : 1, first_head = keys ? w.head * a.group : w.head / a.group;
#pragma unroll 1
	for (int h = 0; h < heads; h++)
#pragma unroll 1
		for (int i = 0; i < w.tiles; i++) act(t++, first_head + h, (w.first_tile + i) * passing);
}

/* A tensor whose rows are fetched. */
struct source {
	const tensor_map *map;
	int row, head, batch;
};
DEVICE source source_of(const arguments &x, int map, int row, int head, int batch) {
	const int moves = x.a.number[MOVES];
	return {&x.map[map], row, moves & MOVES_HEAD(map) ? head : 0, moves & MOVES_BATCH(map) ? batch : 0};
}
template <int rows, int columns>
DEVICE void load_rows(uint32_t to, const source &s, uint32_t barrier, int row, int column) {
#pragma unroll
	for (int i = 0; i < PANELS(columns); i++)
#pragma unroll
		for (int j = 0; j < rows / BOX_ROWS; j++)
			load_box(to + i * rows * 128 + j * BOX_ROWS * 128, s.map, barrier, column + i * 64,
			         s.row + row + j * BOX_ROWS, s.head, s.batch);
}

/* Barriers, of a block for dK or dQ. */
enum {
	AT_OWNED_FULL = AT_BARRIERS, /* two */
	AT_PASSING_FULL = AT_OWNED_FULL + 16,
	AT_PASSING_FETCHED = AT_PASSING_FULL + 8 * PASSING_STAGES,
	AT_PASSING_EMPTY = AT_PASSING_FETCHED + 8 * PASSING_STAGES,
	AT_PIECE_FULL = AT_PASSING_EMPTY + 8 * PASSING_STAGES,
	AT_PIECE_EMPTY = AT_PIECE_FULL + 8 * TILE_PIECES,
	/* for each warp and its opposite: P is there, and dS. All lanes arrive, as racecheck sees what a lane did itself alone. */
	AT_WEIGHTS = AT_PIECE_EMPTY + 8 * TILE_PIECES,
	AT_ANSWERED = AT_WEIGHTS + 8 * 4,
	AT_PASS_END = AT_ANSWERED + 8 * 4,
	/* and of a block for dV */
	AT_K_FULL = AT_BARRIERS,
	AT_CHUNK_FULL = AT_K_FULL + 8,
	AT_CHUNK_FETCHED = AT_CHUNK_FULL + 8 * CHUNK_STAGES,
	AT_CHUNK_EMPTY = AT_CHUNK_FETCHED + 8 * CHUNK_STAGES,
	AT_VALUE_END = AT_CHUNK_EMPTY + 8 * CHUNK_STAGES
};
static_assert(Q_CHUNKS == 4 && DOUT_CHUNKS == 2 && CHUNK_STAGES == 6, "sum_values goes by it");
static_assert(TILE_PIECES == 4, "answer_tiles goes by it");
static_assert(HELD_TOO <= PIECE_COLUMNS / 16, "of one piece");
static_assert((int)AT_PASS_END <= (int)LONG_SHARED_BYTES && (int)AT_VALUE_END <= (int)LONG_SHARED_BYTES,
              "barriers fit");

/* Tiles that begin outside [whole_from, whole_to] hold rows that some of a warpgroup's 64 owned ones do not see, or that are none. */
struct view {
	int group_first, whole_from, whole_to;
};
template <int passing> DEVICE view view_of(const job &w, int group_first) {
	return {group_first, MASKED ? same(group_first + 63 + w.see_first) : -FAR,
	        same((MASKED ? min(group_first + w.see_last, w.others) : w.others) - passing)};
}
template <int count> DEVICE void hide_unseen(uint32_t (&pairs)[count], const job &w, const view &v, int i0) {
	if (i0 >= v.whole_from && i0 <= v.whole_to) return;
	/* from scratch, lest registers hold it through the loop */
	const int again = read_lane(), row = v.group_first + same(warp_id()) % 4 * 16 + (again >> 2), others = w.others;
	const int low = MASKED ? row + w.see_first : -FAR, high = MASKED ? row + w.see_last : FAR;
	hide(pairs, i0 + 2 * (again & 3), low, min(high, others), low + (MASKED ? 8 : 0),
	     min(high + (MASKED ? 8 : 0), others));
}

/* Numbers of the rows that this thread's accumulators are columns for. */
template <int count> DEVICE void read_numbers(float (&numbers)[count], const float *from) {
#pragma unroll
	for (int i = 0; i < count; i += 4) {
		const float4 x = *(const float4 *)(from + i * 4 + (lane_id() & 3) * 4);
		numbers[i] = x.x, numbers[i + 1] = x.y, numbers[i + 2] = x.z, numbers[i + 3] = x.w;
	}
}
DEVICE int head_tile(const ingot__gpu_args &a, int batch, int head) {
	return (batch * a.heads_q + head) * a.number[ROW_TILES];
}

/* Owned rows of a warpgroup to a gradient, from its column `column` on. */
DEVICE void store_owned(void *gradient, const int64_t *stride, int width, int column, const float (&sum)[PART / 2],
                        float scale, const job &w, int group_first) {
	const int row = group_first + same(warp_id()) % 4 * 16;
	store_sums<PART>((element *)gradient + w.slot * stride[0] + w.head * stride[1] +
	                     (w.row + (index_t)row) * stride[2] + column,
	                 stride[2], w.count - row, width - column, sum, scale);
}

/* ---- dK and dQ: helpers ------------------------------------------------------------------------------------------------- */

/* One lane of a warp: what is owned first, and tiles of Q or K. */
template <bool keys> DEVICE void fetch_tiles(const arguments &x, const job &w, uint32_t shared) {
	barrier_expect(shared + AT_OWNED_FULL, TILE_BYTES(OWNED, 512 - 16 * HELD));
	load_rows<OWNED, 512 - 16 * HELD>(shared, source_of(x, keys ? K_MAP : Q_MAP, w.row, w.head, w.slot),
	                                  shared + AT_OWNED_FULL, w.first, 0);
	each_tile<keys, PASSING>(x.a, w, [&](int t, int head, int i0) {
		const int stage = t % PASSING_STAGES;
		const uint32_t arrived =
			shared + (clears<keys, PASSING>(x.a, w, i0) ? AT_PASSING_FETCHED : AT_PASSING_FULL) + 8 * stage;
		barrier_wait(shared + AT_PASSING_EMPTY + 8 * stage, empty_parity<PASSING_STAGES>(t));
		barrier_expect(arrived, PASSING_BYTES);
		load_rows<PASSING, 512>(shared + AT_PASSING + stage * PASSING_BYTES,
		                        source_of(x, keys ? Q_MAP : K_MAP, w.other_row, head, w.other_slot), arrived, i0, 0);
	});
}

/* One lane of another: likewise of dO or V. */
template <bool keys> DEVICE void fetch_pieces(const arguments &x, const job &w, uint32_t shared) {
	barrier_expect(shared + AT_OWNED_FULL + 8, TILE_BYTES(OWNED, 512 - 16 * HELD_TOO));
	load_rows<OWNED, 512 - 16 * HELD_TOO>(shared + AT_OWNED_TOO,
	                                      source_of(x, keys ? V_MAP : DOUT_MAP, w.row, w.head, w.slot),
	                                      shared + AT_OWNED_FULL + 8, w.first, 0);
	each_tile<keys, PASSING>(x.a, w, [&](int t, int head, int i0) {
		const source from = source_of(x, keys ? DOUT_MAP : V_MAP, w.other_row, head, w.other_slot);
#pragma unroll 1
		for (int i = 0; i < TILE_PIECES; i++) {
			barrier_wait(shared + AT_PIECE_EMPTY + 8 * i, ~t & 1);
			barrier_expect(shared + AT_PIECE_FULL + 8 * i, PIECE_BYTES);
			load_rows<PASSING, PIECE_COLUMNS>(shared + AT_PIECES + i * PIECE_BYTES, from,
			                                  shared + AT_PIECE_FULL + 8 * i, i0, i * PIECE_COLUMNS);
		}
	});
}

/* A warp: rows of Q or K that may hold anything. dO and V are no right operands here. */
template <bool keys>
DEVICE void clear_tiles(const ingot__gpu_args &a, const job &w, uint32_t shared, unsigned char *memory) {
	uint32_t parity = 0; /* bit per stage: tiles that need clearing come seldom */
	each_tile<keys, PASSING>(a, w, [&](int t, int, int i0) {
		if (!clears<keys, PASSING>(a, w, i0)) return;
		const int stage = t % PASSING_STAGES;
		barrier_wait(shared + AT_PASSING_FETCHED + 8 * stage, parity >> stage & 1);
		clear_rows<512, PASSING>(memory + AT_PASSING + stage * PASSING_BYTES, w.live_first - i0, w.live_last - i0,
		                         shared + AT_PASSING_FULL + 8 * stage);
		parity ^= 1u << stage;
	});
}

template <int number> struct whole {
	static constexpr int value = number;
};

/* ---- dK and dQ: the two warpgroups ---------------------------------------------------------------------------------------- */

/* x[64][PASSING] (+)= 64 owned rows times the rows of a tile, columns [16 from, 16 to) of both. */
template <int from, int to, int panel>
DEVICE void multiply_owned(float (&x)[PASSING / 2], uint64_t owned, uint64_t tile) {
#pragma unroll
	for (int i = from; i < to; i++)
		wgmma<PASSING>::shared<0>(x, owned + ((i / 4 * OWNED * 128 + i % 4 * 32) >> 4),
		                          tile + (((i / 4 - panel) * PASSING * 128 + i % 4 * 32) >> 4), i > 0);
}
/* Of the last `count` steps, with what this thread holds of them. */
template <int count, int panel>
DEVICE void multiply_held(float (&x)[PASSING / 2], const uint32_t (&held)[4 * count], uint64_t tile) {
#pragma unroll
	for (int n = 0; n < count; n++) {
		const int i = 512 / 16 - count + n;
		wgmma<PASSING>::held<0>(x, &held[4 * n], tile + (((i / 4 - panel) * PASSING * 128 + i % 4 * 32) >> 4), 1);
	}
}
template <int count>
DEVICE void hold(uint32_t (&held)[4 * count], const void *tensor, const int64_t *stride, int width, const job &w) {
	const int row = w.first + same(warp_id()) % 4 * 16 + (lane_id() >> 2);
	const element *const from =
		(const element *)tensor + w.slot * stride[0] + w.head * stride[1] + (w.row + (index_t)row) * stride[2];
#pragma unroll
	for (int i = 0; i < 4 * count; i++) {
		const int column = 512 - 16 * count + i / 4 * 16 + (i & 2) * 4 + 2 * (lane_id() & 3), down = (i & 1) * 8;
		held[i] = row + down < w.count && column < width ? *(const uint32_t *)(from + down * stride[2] + column) : 0;
	}
}
/* A warpgroup's half of the columns of tiles, and what it owns of shared memory. Known afresh to be the same in all lanes, as own_keys
 * has it. */
DEVICE uint64_t my_rows(uint32_t shared, int bytes) {
	return operand(shared + (same(warp_id()) / 4 - 1) * bytes, 16);
}
DEVICE uint64_t my_columns(uint32_t shared, int stage) {
	return operand(shared + AT_PASSING + (same(warp_id()) / 4 - 1) * (PART / 64 * PASSING * 128), PASSING * 128) +
	       (stage * PASSING_BYTES >> 4);
}
/* sum[64][PART] += dS times half the columns of a tile. */
DEVICE void add_tile(float (&sum)[PART / 2], const uint32_t (&ds)[PASSING / 4], uint64_t tile) {
	wgmma_fence();
#pragma unroll
	for (int i = 0; i < PASSING / 16; i++) wgmma<PART>::held<1>(sum, &ds[4 * i], tile + (i * 2048 >> 4), 1);
	wgmma_commit();
}

/* Minus LSE or minus delta: where rows are owned, of this thread's two. */
template <bool keys>
DEVICE void read_two(float (&two)[2], const ingot__gpu_args &a, const job &w, const float *numbers, float none) {
#pragma unroll
	for (int half = 0; half < 2; half++) {
		const int i = w.first + same(warp_id()) % 4 * 16 + (lane_id() >> 2) + 8 * half;
		two[half] = !keys && i < w.count ? numbers[i / BM * BM + number_place(i % BM)] : none;
	}
}

/* S, P, and the left columns of the sums. */
template <bool keys> DEVICE void weigh_tiles(const ingot__gpu_args &a, const job &w, uint32_t shared) {
	const int warp = same(warp_id()) % 4, tiles = same(w.tiles), turns = tiles * (keys ? a.group : 1);
	const bool leader = lane_id() == 0;
	const float unit = a.softmax_scale * LOG2E;
	const uint32_t mail = shared + AT_MAIL + thread_id() % 128 * 16;
	const uint64_t right = operand(shared + AT_PASSING, 16);
	const float *lse = lse_numbers(a, head_tile(a, w.batch, keys ? w.head * a.group : w.head));
	float sum[PART / 2], s[PASSING / 2], numbers[PASSING / 4], two[2];
	uint32_t ds[PASSING / 4], held[4 * HELD];
	clear_sums(sum);
	read_two<keys>(two, a, w, lse, -INFINITY);
	hold<HELD>(held, keys ? a.k : a.q, keys ? a.k_stride : a.q_stride, a.head_dim, w);
	int at = 0;
	if (keys) lse += w.first_tile * PASSING;
	ring<PASSING_STAGES> next = {0, 0};

	auto multiply = [&] {
		const uint64_t owned = my_rows(shared, AT_OWNED_TOO), tile = right + (next.stage * PASSING_BYTES >> 4);
		barrier_wait(shared + AT_PASSING_FULL + 8 * next.stage, next.parity);
		wgmma_fence();
		multiply_owned<0, 512 / 16 - HELD, 0>(s, owned, tile);
		multiply_held<HELD, 0>(s, held, tile);
		wgmma_commit();
		next.next();
		if (keys) {
			read_numbers(numbers, lse);
			lse += PASSING;
			if (++at == tiles) at = 0, lse += a.number[ROW_TILES] * BM - tiles * PASSING;
		}
	};
	auto hand_over = [&] {
#pragma unroll
		for (int i = 0; i < PASSING / 2; i++)
			s[i] = fast_exp2(fmaf(s[i], unit, keys ? numbers[i / 4 * 2 + i % 2] : two[i / 2 % 2]));
#pragma unroll
		for (int i = 0; i < PASSING / 2; i += 4)
			asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mail + i / 4 * 2048), "f"(s[i]),
			             "f"(s[i + 1]), "f"(s[i + 2]), "f"(s[i + 3])
			             : "memory");
		barrier_arrive(shared + AT_WEIGHTS + 8 * warp);
	};
	/* the sums of turn t, whose P is handed over, and P of the next */
	auto step = [&](int t, auto is_last) {
		constexpr bool last = decltype(is_last)::value;
		const int stage = next.stage ? next.stage - 1 : PASSING_STAGES - 1;
		if constexpr (!last) multiply();
		barrier_wait(shared + AT_ANSWERED + 8 * warp, t & 1);
#pragma unroll
		for (int i = 0; i < PASSING / 4; i += 4)
			asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
			             : "=r"(ds[i]), "=r"(ds[i + 1]), "=r"(ds[i + 2]), "=r"(ds[i + 3])
			             : "r"(mail + i / 4 * 2048)
			             : "memory");
		add_tile(sum, ds, my_columns(shared, stage));
		if constexpr (!last) {
			wgmma_wait<1>();
			pin(s);
			hand_over();
		}
		wgmma_wait<0>();
		pin(sum);
		if (leader) barrier_arrive(shared + AT_PASSING_EMPTY + 8 * stage);
	};
	if (turns > 0) {
		barrier_wait(shared + AT_OWNED_FULL, 0);
		multiply();
		wgmma_wait<0>();
		pin(s);
		hand_over();
		for (int t = 0; t + 1 < turns; t++) step(t, truth<false>());
		step(turns - 1, truth<true>());
	}
	store_owned(keys ? a.dk : a.dq, keys ? a.dk_stride : a.dq_stride, a.head_dim, 0, sum, a.softmax_scale, w, w.first);
}

/* dP, dS, and the right columns of the sums. */
template <bool keys> DEVICE void answer_tiles(const ingot__gpu_args &a, const job &w, uint32_t shared) {
	const int warp = same(warp_id()) % 4, tiles = same(w.tiles), turns = tiles * (keys ? a.group : 1);
	const bool leader = lane_id() == 0;
	const uint32_t mail = shared + AT_MAIL + thread_id() % 128 * 16;
	const float *delta = delta_numbers(a, head_tile(a, w.batch, keys ? w.head * a.group : w.head));
	const view sees = view_of<PASSING>(w, w.first);
	float sum[PART / 2], even[PASSING / 2], odd[PASSING / 2], numbers[PASSING / 4], two[2];
	uint32_t held[4 * HELD_TOO];
	clear_sums(sum);
	read_two<keys>(two, a, w, delta, 0.0f);
	hold<HELD_TOO>(held, keys ? a.v : a.dout, keys ? a.v_stride : a.dout_stride, a.head_dim_v, w);
	int at = 0;
	if (keys) delta += w.first_tile * PASSING;
	ring<PASSING_STAGES> tile = {0, 0};
	auto release = [&](int piece) {
		if (leader) barrier_arrive(shared + AT_PIECE_EMPTY + 8 * piece);
	};
	auto multiply_piece = [&](float(&g)[PASSING / 2], int t, auto number) {
		constexpr int piece = decltype(number)::value, first = piece * PIECE_COLUMNS / 16,
					  end = first + PIECE_COLUMNS / 16, owned_end = piece < TILE_PIECES - 1 ? end : end - HELD_TOO;
		const uint64_t owned = my_rows(shared, AT_OWNED_TOO),
					   from = owned + ((AT_PIECES - AT_OWNED_TOO + piece * PIECE_BYTES) >> 4);
		barrier_wait(shared + AT_PIECE_FULL + 8 * piece, t & 1);
		wgmma_fence();
		multiply_owned<first, owned_end, first / 4>(g, owned, from);
		if constexpr (piece == TILE_PIECES - 1) multiply_held<HELD_TOO, first / 4>(g, held, from);
		wgmma_commit();
	};
	auto multiply = [&](float(&g)[PASSING / 2], int t) {
		multiply_piece(g, t, whole<0>());
		multiply_piece(g, t, whole<1>());
		multiply_piece(g, t, whole<2>());
		multiply_piece(g, t, whole<3>());
	};

	/* dS of turn t from its dP, under which that of the next turn is multiplied */
	auto step = [&](int t, float(&g)[PASSING / 2], float(&ahead)[PASSING / 2], auto is_last) {
		constexpr bool last = decltype(is_last)::value;
		uint32_t ds[PASSING / 4];
		float p[PASSING / 2];
		if constexpr (!last) multiply(ahead, t + 1);
		barrier_wait(shared + AT_WEIGHTS + 8 * warp, t & 1);
#pragma unroll
		for (int i = 0; i < PASSING / 2; i += 4)
			asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
			             : "=f"(p[i]), "=f"(p[i + 1]), "=f"(p[i + 2]), "=f"(p[i + 3])
			             : "r"(mail + i / 4 * 2048)
			             : "memory");
#pragma unroll
		for (int i = 0; i < PASSING / 4; i++) {
			const float low = keys ? numbers[i / 2 * 2] : two[i % 2], high = keys ? numbers[i / 2 * 2 + 1] : two[i % 2];
			ds[i] = matrix<element>::pack(p[2 * i] * (g[2 * i] + low), p[2 * i + 1] * (g[2 * i + 1] + high));
		}
		hide_unseen(ds, w, sees, (same(w.first_tile) + at) * PASSING);
		if (++at == tiles) {
			at = 0;
			if (keys) delta += a.number[ROW_TILES] * BM;
		}
#pragma unroll
		for (int i = 0; i < PASSING / 4; i += 4)
			asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(mail + i / 4 * 2048), "r"(ds[i]),
			             "r"(ds[i + 1]), "r"(ds[i + 2]), "r"(ds[i + 3])
			             : "memory");
		barrier_arrive(shared + AT_ANSWERED + 8 * warp);
		if constexpr (!last) {
			/* early: they come from afar */
			if (keys) read_numbers(numbers, delta + at * PASSING);
			wgmma_wait<2>();
			release(0);
			release(1);
		}
		barrier_wait(shared + AT_PASSING_FULL + 8 * tile.stage, tile.parity);
		add_tile(sum, ds, my_columns(shared, tile.stage));
		if constexpr (!last) {
			wgmma_wait<1>();
			pin(ahead);
			release(2);
			release(3);
		}
		wgmma_wait<0>();
		if (leader) barrier_arrive(shared + AT_PASSING_EMPTY + 8 * tile.stage);
		tile.next();
		pin(sum);
	};
	if (turns > 0) {
		barrier_wait(shared + AT_OWNED_FULL + 8, 0);
		multiply(even, 0);
		wgmma_wait<0>();
		pin(even);
		if (keys) read_numbers(numbers, delta);
		for (int i = 0; i < TILE_PIECES; i++) release(i);
		int t = 0;
		for (; t + 2 < turns; t += 2) {
			step(t, even, odd, truth<false>());
			step(t + 1, odd, even, truth<false>());
		}
		if (t + 1 < turns) {
			step(t, even, odd, truth<false>());
			step(t + 1, odd, even, truth<true>());
		} else step(t, even, odd, truth<true>());
	}
	store_owned(keys ? a.dk : a.dq, keys ? a.dk_stride : a.dq_stride, a.head_dim, PART, sum, a.softmax_scale, w,
	            w.first);
}

/* ---- dV ------------------------------------------------------------------------------------------------------------------- */

/* One lane: K, and in the order of their use Q of this tile and dO of the one before. */
DEVICE void fetch_values(const arguments &x, const job &w, uint32_t shared) {
	const source k = source_of(x, K_MAP, w.row, w.head, w.slot);
	barrier_expect(shared + AT_K_FULL, OWNERS * OWNED_BYTES);
	for (int i = 0; i < OWNERS; i++)
		load_rows<OWNED, 512>(shared + i * OWNED_BYTES, k, shared + AT_K_FULL, w.first + i * OWNED, 0);
	ring<CHUNK_STAGES> to = {0, 1};
	int head_before = 0, before = 0;
	auto load_dout = [&] {
		const source from = source_of(x, DOUT_MAP, w.other_row, head_before, w.other_slot);
#pragma unroll 1
		for (int i = 0; i < DOUT_CHUNKS; i++) {
			const int i0 = before + i * CHUNK_ROWS;
			const uint32_t arrived =
				shared + (clears<true, CHUNK_ROWS>(x.a, w, i0) ? AT_CHUNK_FETCHED : AT_CHUNK_FULL) + 8 * to.stage;
			barrier_wait(shared + AT_CHUNK_EMPTY + 8 * to.stage, to.parity);
			barrier_expect(arrived, CHUNK_BYTES);
			load_rows<CHUNK_ROWS, PART>(shared + AT_CHUNKS + to.stage * CHUNK_BYTES, from, arrived, i0, w.column);
			to.next();
		}
	};
	each_tile<true, VALUE_ROWS>(x.a, w, [&](int t, int head, int i0) {
		const source from = source_of(x, Q_MAP, w.other_row, head, w.other_slot);
#pragma unroll 1
		for (int i = 0; i < Q_CHUNKS; i++) {
			barrier_wait(shared + AT_CHUNK_EMPTY + 8 * to.stage, to.parity);
			barrier_expect(shared + AT_CHUNK_FULL + 8 * to.stage, CHUNK_BYTES);
			load_rows<VALUE_ROWS, CHUNK_COLUMNS>(shared + AT_CHUNKS + to.stage * CHUNK_BYTES, from,
			                                     shared + AT_CHUNK_FULL + 8 * to.stage, i0, i * CHUNK_COLUMNS);
			to.next();
		}
		if (t > 0) load_dout();
		head_before = head, before = i0;
	});
	if (w.tiles > 0) load_dout();
}

/* A warp. */
DEVICE void clear_values(const ingot__gpu_args &a, const job &w, uint32_t shared, unsigned char *memory) {
	uint32_t parity = 0;
	const int turns = w.tiles * a.group;
	each_tile<true, VALUE_ROWS>(a, w, [&](int t, int, int i0) {
		/* behind Q of the next tile */
		const int chunk = t * (Q_CHUNKS + DOUT_CHUNKS) + Q_CHUNKS + (t + 1 < turns ? Q_CHUNKS : 0);
		for (int i = 0; i < DOUT_CHUNKS; i++) {
			const int first = i0 + i * CHUNK_ROWS, slot = (chunk + i) % CHUNK_STAGES;
			if (!clears<true, CHUNK_ROWS>(a, w, first)) continue;
			barrier_wait(shared + AT_CHUNK_FETCHED + 8 * slot, parity >> slot & 1);
			clear_rows<PART, CHUNK_ROWS>(memory + AT_CHUNKS + slot * CHUNK_BYTES, w.live_first - first,
			                             w.live_last - first, shared + AT_CHUNK_FULL + 8 * slot);
			parity ^= 1u << slot;
		}
	});
}

/* S and P of 64 keys, and their sums of dV. P dO of a tile is multiplied under the softmax of the next. */
DEVICE void sum_values(const ingot__gpu_args &a, const job &w, uint32_t shared, int group) {
	const int tiles = same(w.tiles), turns = tiles * a.group, first_key = w.first + group * OWNED;
	const bool leader = lane_id() == 0;
	const float unit = a.softmax_scale * LOG2E;
	const uint64_t right = operand(shared + AT_CHUNKS, 16), columns = operand(shared + AT_CHUNKS, CHUNK_ROWS * 128);
	const float *lse = lse_numbers(a, head_tile(a, w.batch, w.head * a.group)) + w.first_tile * VALUE_ROWS;
	const view sees = view_of<VALUE_ROWS>(w, first_key);
	float sum[PART / 2], s[VALUE_ROWS / 2], numbers[VALUE_ROWS / 4];
	uint32_t p[VALUE_ROWS / 4];
	clear_sums(sum);
	int at = 0, i0 = 0;
	/* A turn passes once through the ring: Q of the first tile begins it, Q of others goes on behind dO. */
	auto release = [&](int slot) {
		if (leader) barrier_arrive(shared + AT_CHUNK_EMPTY + 8 * slot);
	};
	/* leaves the last chunk in flight */
	auto multiply_q = [&](int t, auto first_slot) {
		const uint64_t k = my_rows(shared, OWNED_BYTES);
#pragma unroll
		for (int i = 0; i < Q_CHUNKS; i++) {
			const int n = decltype(first_slot)::value + i, slot = n % CHUNK_STAGES;
			barrier_wait(shared + AT_CHUNK_FULL + 8 * slot, (t + n / CHUNK_STAGES) & 1);
			wgmma_fence();
			const uint64_t from = right + (slot * CHUNK_BYTES >> 4);
#pragma unroll
			for (int j = 0; j < CHUNK_COLUMNS / 16; j++)
				wgmma<VALUE_ROWS>::shared<0>(s, k + (((i * 2 + j / 4) * OWNED * 128 + j % 4 * 32) >> 4),
				                             from + ((j / 4 * VALUE_ROWS * 128 + j % 4 * 32) >> 4), i + j > 0);
			wgmma_commit();
			if (i > 0) {
				wgmma_wait<1>();
				release((n - 1) % CHUNK_STAGES);
			}
		}
	};
	auto multiply_dout = [&](int t, auto first_slot) {
#pragma unroll
		for (int i = 0; i < DOUT_CHUNKS; i++) {
			const int slot = decltype(first_slot)::value + i;
			barrier_wait(shared + AT_CHUNK_FULL + 8 * slot, t & 1);
			wgmma_fence();
			const uint64_t from = columns + (slot * CHUNK_BYTES >> 4);
#pragma unroll
			for (int j = 0; j < CHUNK_ROWS / 16; j++)
				wgmma<PART>::held<1>(sum, &p[4 * (i * 2 + j)], from + (j * 2048 >> 4), 1);
			wgmma_commit();
		}
	};
	auto read_lse = [&] {
		read_numbers(numbers, lse);
		lse += VALUE_ROWS;
		i0 = (same(w.first_tile) + at) * VALUE_ROWS;
		if (++at == tiles) at = 0, lse += a.number[ROW_TILES] * BM - tiles * VALUE_ROWS;
	};
	auto weigh = [&] {
#pragma unroll
		for (int i = 0; i < VALUE_ROWS / 2; i++) s[i] = fast_exp2(fmaf(s[i], unit, numbers[i / 4 * 2 + i % 2]));
	};
	auto pack = [&] {
#pragma unroll
		for (int i = 0; i < VALUE_ROWS / 4; i++) p[i] = matrix<element>::pack(s[2 * i], s[2 * i + 1]);
		hide_unseen(p, w, sees, i0);
	};
	if (turns > 0) {
		barrier_wait(shared + AT_K_FULL, 0);
		multiply_q(0, whole<0>());
		read_lse();
		wgmma_wait<0>();
		pin(s);
		release(3);
		weigh();
		pack();
		for (int t = 1; t < turns; t++) {
			multiply_q(t - 1, whole<4>());
			multiply_dout(t, whole<2>());
			read_lse();
			wgmma_wait<DOUT_CHUNKS>();
			pin(s);
			release(1);
			weigh();
			wgmma_wait<0>();
			pin(sum);
			for (int i = 0; i < DOUT_CHUNKS; i++) release(2 + i);
			pack();
		}
		multiply_dout(turns - 1, whole<4>());
		wgmma_wait<0>();
		pin(sum);
	}
	store_owned(a.dv, a.dv_stride, a.head_dim_v, w.column, sum, 1.0f, w, first_key);
}

/* ---- all blocks ------------------------------------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(128 * (OWNERS + 1), 1)
	attn_bwd_sm90_d512(const __grid_constant__ arguments x) {
	extern __shared__ __align__(1024) unsigned char memory[];
	const ingot__gpu_args &a = x.a;
	const uint32_t shared = shared_address(memory);
	const int warpgroup = same(warp_id()) / 4, warp = same(warp_id()) % 4, lane = lane_id();
	const int block = blockIdx.x, dq_end = a.number[DQ_END], dk_end = a.number[DK_END];
	const bool is_dq = block < dq_end, is_dv = block >= dk_end;

	job mine;
	bool is_work;
	if (is_dq) {
		/* under a causal mask the last rows see most keys, and the first keys are seen by most rows */
		const int in_head = a.number[ROW_TILES], head = block / in_head;
		is_work = take<false, OWNED, PASSING>(a, head, (in_head - 1 - (block - head * in_head)) * OWNED, 0, mine);
	} else if (is_dv) {
		const int parts = a.number[PARTS], in_head = a.number[VALUE_BLOCKS], at = (block - dk_end) / parts;
		const int head = at / in_head, part = block - dk_end - at * parts;
		is_work =
			take<true, OWNED_VALUES, VALUE_ROWS>(a, head, (at - head * in_head) * OWNED_VALUES, part * PART, mine);
	} else {
		const int in_head = a.number[KEY_BLOCKS], head = (block - dq_end) / in_head;
		is_work = take<true, OWNED, PASSING>(a, head, (block - dq_end - head * in_head) * OWNED, 0, mine);
	}
	if (!is_work) return;
	if (thread_id() == 0) {
		*(job *)(memory + AT_JOB) = mine;
		if (is_dv) {
			barrier_init(shared + AT_K_FULL, 1);
			for (int i = 0; i < CHUNK_STAGES; i++) {
				barrier_init(shared + AT_CHUNK_FULL + 8 * i, 1);
				barrier_init(shared + AT_CHUNK_FETCHED + 8 * i, 1);
				barrier_init(shared + AT_CHUNK_EMPTY + 8 * i, 4 * OWNERS);
			}
		} else {
			for (int i = 0; i < 2; i++) barrier_init(shared + AT_OWNED_FULL + 8 * i, 1);
			for (int i = 0; i < PASSING_STAGES; i++) {
				barrier_init(shared + AT_PASSING_FULL + 8 * i, 1);
				barrier_init(shared + AT_PASSING_FETCHED + 8 * i, 1);
				barrier_init(shared + AT_PASSING_EMPTY + 8 * i, 4 * OWNERS);
			}
			for (int i = 0; i < TILE_PIECES; i++) {
				barrier_init(shared + AT_PIECE_FULL + 8 * i, 1);
				barrier_init(shared + AT_PIECE_EMPTY + 8 * i, 4);
			}
			for (int i = 0; i < 4; i++) {
				barrier_init(shared + AT_WEIGHTS + 8 * i, 32);
				barrier_init(shared + AT_ANSWERED + 8 * i, 32);
			}
		}
		barrier_init_done();
		for (int i = 0; i < USED_MAPS; i++) prefetch_map(&x.map[i]);
	}
	block_barrier();
	const job &w = *(const job *)(memory + AT_JOB);

	if (warpgroup == 0) {
		registers_release<24>();
		if (same(w.tiles) == 0) return;
		if (is_dv) {
			if (warp == 0 && lane == 0) fetch_values(x, w, shared);
			if (MASKED && warp == 1) clear_values(a, w, shared, memory);
		} else if (is_dq) {
			if (warp == 0 && lane == 0) fetch_tiles<false>(x, w, shared);
			if (MASKED && warp == 1) clear_tiles<false>(a, w, shared, memory);
			if (warp == 2 && lane == 0) fetch_pieces<false>(x, w, shared);
		} else {
			if (warp == 0 && lane == 0) fetch_tiles<true>(x, w, shared);
			if (MASKED && warp == 1) clear_tiles<true>(a, w, shared, memory);
			if (warp == 2 && lane == 0) fetch_pieces<true>(x, w, shared);
		}
		return;
	}

	registers_claim<240>();
	if (is_dv) sum_values(a, w, shared, warpgroup - 1);
	else if (is_dq) {
		if (warpgroup == 1) weigh_tiles<false>(a, w, shared);
		else answer_tiles<false>(a, w, shared);
	} else if (warpgroup == 1) weigh_tiles<true>(a, w, shared);
	else answer_tiles<true>(a, w, shared);
}
#endif
