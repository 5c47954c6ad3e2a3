/*
 * Attention backward on Hopper (sm_90a), as bwd_sm90.h has it, without dQ, which a second kernel computes with rows in the place of
 * keys: S and dP are computed twice, seven products in the place of five, but nothing is added in memory. So results do not depend on
 * the order in which blocks run, and the workspace has two numbers a row.
 */
#define ADDS_DQ 0
#include "bwd_sm90.h"

#ifdef INGOT_HOST

const ingot__impl ingot__impl_attn_bwd_sm90_split = {
	.name = "attn_bwd_sm90_split",
	.family = "cuda",
	.op = INGOT__ATTN_BWD,
	.device = INGOT_CUDA,
	.arch = "sm_90a",
	.rank = 0, /* behind the fallback until a device's rows tell that it was checked there */
	.variant_count = sizeof images / sizeof *images,
	.images = images,
	.kernels = kernels,
	.refuse = refuse,
	.plan = plan,
};

#else

/* ---- dQ by itself: S and dP once more, and no additions whose order is left to chance ------------------------------------------ */

/* Shared memory: Q and dO of 128 rows, K and V of two blocks. */
enum {
	DQ_Q_BYTES = TILE_BYTES(DQ_ROWS, HEAD),
	DQ_AT_DOUT = DQ_Q_BYTES,
	DQ_AT_K = DQ_AT_DOUT + DQ_Q_BYTES,
	DQ_AT_V = DQ_AT_K + STAGES * K_BYTES,
	DQ_AT_WORK = DQ_AT_V + STAGES * K_BYTES,
	DQ_AT_ROWS_FULL = DQ_AT_WORK + 64,
	DQ_AT_K_FULL = DQ_AT_ROWS_FULL + 8,
	DQ_AT_K_FETCHED = DQ_AT_K_FULL + 8 * STAGES,
	DQ_AT_K_EMPTY = DQ_AT_K_FETCHED + 8 * STAGES,
	DQ_AT_V_FULL = DQ_AT_K_EMPTY + 8 * STAGES,
	DQ_AT_V_EMPTY = DQ_AT_V_FULL + 8 * STAGES,
	DQ_AT_END = DQ_AT_V_EMPTY + 8 * STAGES
};
static_assert(DQ_AT_END <= DQ_SHARED_BYTES(HEAD), "barriers and the block's work fit into the control bytes");

/* Rows i0 and on of a query head, numbered within their sequence as keys are. */
struct dq_work {
	int batch, head;
	int i0, rows; /* rows: of the sequence */
	int q_slot, q_row, k_slot, k_row;
	int first_block, blocks; /* of keys; no others hold any that these rows see */
	int see_first, see_last; /* row i sees keys [i + see_first, i + see_last) */
	int keys, live_first_key, live_last_key, pad;
};
static_assert(sizeof(dq_work) == 64, "as DQ_AT_WORK has room for");

/* False where there are no such rows. Under a causal mask the last rows see most keys: they come first. */
DEVICE bool look(const ingot__gpu_args &a, int block, dq_work &w) {
	const int per_head = a.number[ROW_BLOCKS], heads = a.batch * a.heads_q, wide_most = a.number[ROW_SECTION];
	const int section = block / (wide_most * per_head), at = block - section * wide_most * per_head;
	const int wide = min(wide_most, heads - section * wide_most);
	const int place = at / wide, head = section * wide_most + at - place * wide;
	w.batch = head / a.heads_q;
	w.head = head - w.batch * a.heads_q;
	w.i0 = (per_head - 1 - place) * DQ_ROWS;
	const span q = rows_of(a, w.batch), k = keys_of(a, w.batch);
	if (w.i0 >= q.count) return false;
	w.rows = q.count;
	w.q_slot = (int)q.slot;
	w.q_row = (int)q.start;
	w.k_slot = (int)k.slot;
	w.k_row = (int)k.start;
	w.keys = k.count;
	w.see_first = -FAR, w.see_last = FAR;
	w.live_first_key = 0, w.live_last_key = k.count;
	int first = 0, last = k.count;
	if (MASKED) {
		const index_t diagonal = a.bottom_right ? (index_t)k.count - q.count : 0;
		const index_t low = diagonal - a.left, high = diagonal + a.right + 1;
		w.see_first = limit(low);
		w.see_last = limit(high);
		w.live_first_key = (int)clamp64(low, 0, k.count);
		w.live_last_key = (int)clamp64(q.count - 1 + high, 0, k.count);
		first = (int)clamp64(w.i0 + low, 0, k.count);
		last = (int)clamp64(min(w.i0 + DQ_ROWS, q.count) - 1 + high, 0, k.count);
		if (a.right < -a.left) last = first;
	}
	w.first_block = first / BN;
	w.blocks = last > first ? (last + BN - 1) / BN - w.first_block : 0;
	return true;
}

DEVICE bool clears_keys(const ingot__gpu_args &a, const dq_work &w, int j0) {
	return MASKED && (j0 < w.live_first_key || (j0 + BN > w.live_last_key && w.k_row + w.live_last_key < a.k_capacity));
}

/* One lane. */
DEVICE void fetch(const arguments &x, const dq_work &w, uint32_t shared) {
	const int moves = x.a.number[MOVES];
	auto at_head = [&](int map, int head) { return moves & MOVES_HEAD(map) ? head : 0; };
	auto at_batch = [&](int map, int batch) { return moves & MOVES_BATCH(map) ? batch : 0; };
	auto load_rows = [&](int to, int map) {
		for (int i = 0; i < DQ_ROWS / BM; i++)
			load_tile<HEAD, BM>(shared + to + i * Q_BYTES, &x.map[map], shared + DQ_AT_ROWS_FULL,
			                    w.q_row + w.i0 + i * BM, at_head(map, w.head), at_batch(map, w.q_slot));
	};
	barrier_expect(shared + DQ_AT_ROWS_FULL, 2 * DQ_Q_BYTES);
	load_rows(0, Q_MAP);
	load_rows(DQ_AT_DOUT, DOUT_MAP);
	for (int t = 0; t < w.blocks; t++) {
		const int stage = t % STAGES, j0 = (w.first_block + t) * BN, head = w.head / x.a.group;
		barrier_wait(shared + DQ_AT_K_EMPTY + 8 * stage, empty_parity(t));
		const uint32_t arrived = shared + (clears_keys(x.a, w, j0) ? DQ_AT_K_FETCHED : DQ_AT_K_FULL) + 8 * stage;
		barrier_expect(arrived, K_BYTES);
		load_tile<HEAD, BN>(shared + DQ_AT_K + stage * K_BYTES, &x.map[K_MAP], arrived, w.k_row + j0,
		                    at_head(K_MAP, head), at_batch(K_MAP, w.k_slot));
		barrier_wait(shared + DQ_AT_V_EMPTY + 8 * stage, empty_parity(t));
		barrier_expect(shared + DQ_AT_V_FULL + 8 * stage, K_BYTES);
		load_tile<HEAD, BN>(shared + DQ_AT_V + stage * K_BYTES, &x.map[V_MAP], shared + DQ_AT_V_FULL + 8 * stage,
		                    w.k_row + j0, at_head(V_MAP, head), at_batch(V_MAP, w.k_slot));
	}
}

/* A warp. */
DEVICE void clear(const ingot__gpu_args &a, const dq_work &w, uint32_t shared, unsigned char *memory) {
	uint32_t parity = 0;
	for (int t = 0; t < w.blocks; t++) {
		const int stage = t % STAGES, j0 = (w.first_block + t) * BN;
		if (!clears_keys(a, w, j0)) continue;
		barrier_wait(shared + DQ_AT_K_FETCHED + 8 * stage, parity >> stage & 1);
		clear_rows<BN>(memory + DQ_AT_K + stage * K_BYTES, w.live_first_key - j0, w.live_last_key - j0,
		               shared + DQ_AT_K_FULL + 8 * stage);
		parity ^= 1u << stage;
	}
}

/* x[64][BN] = 64 rows of Q or dO times a block of K or V, transposed. */
DEVICE void multiply_block(float (&x)[BN / 2], uint64_t rows, uint64_t keys) {
#pragma unroll
	for (int i = 0; i < HEAD / 16; i++)
		wgmma<BN>::shared<0>(x, rows + ((i / 4 * BM * 128 + i % 4 * 32) >> 4),
		                     keys + ((i / 4 * BN * 128 + i % 4 * 32) >> 4), i > 0);
}

extern "C" __global__ void __launch_bounds__(128 * (OWNERS + 1), 1)
	attn_bwd_sm90_dq(const __grid_constant__ arguments x) {
	extern __shared__ __align__(1024) unsigned char memory[];
	const ingot__gpu_args &a = x.a;
	const uint32_t shared = shared_address(memory);
	const int warpgroup = same(warp_id()) / 4, warp = same(warp_id()) % 4;
	const dq_work &w = *(const dq_work *)(memory + DQ_AT_WORK);

	dq_work mine;
	if (!look(a, blockIdx.x, mine)) return;
	if (thread_id() == 0) {
		*(dq_work *)(memory + DQ_AT_WORK) = mine;
		barrier_init(shared + DQ_AT_ROWS_FULL, 1);
		for (int i = 0; i < STAGES; i++) {
			barrier_init(shared + DQ_AT_K_FULL + 8 * i, 1);
			barrier_init(shared + DQ_AT_K_FETCHED + 8 * i, 1);
			barrier_init(shared + DQ_AT_K_EMPTY + 8 * i, 4 * OWNERS);
			barrier_init(shared + DQ_AT_V_FULL + 8 * i, 1);
			barrier_init(shared + DQ_AT_V_EMPTY + 8 * i, 4 * OWNERS);
		}
		barrier_init_done();
		for (int i = 0; i < MAPS; i++) prefetch_map(&x.map[i]);
	}
	block_barrier();
	const int blocks = same(w.blocks);

	if (warpgroup == 0) {
		registers_release<24>();
		if (blocks > 0 && warp == 0 && lane_id() == 0) fetch(x, w, shared);
		if (MASKED && blocks > 0 && warp == 1) clear(a, w, shared, memory);
		return;
	}

	registers_claim<240>();
	const int group = warpgroup - 1, lane = lane_id();
	const bool leader = lane == 0;
	const float unit = a.softmax_scale * LOG2E;
	const int first_row = w.i0 + group * 64;
	/* blocks of keys that begin outside [whole_from, whole_to] hold pairs that are masked, or keys that are none */
	const int whole_from = MASKED ? same(first_row + 63 + w.see_first) : -FAR;
	const int whole_to = same(MASKED ? min(first_row + w.see_last, w.keys) - BN : w.keys - BN);
	const uint32_t rows_at = BM == 64 ? group * Q_BYTES : group * 64 * 128;
	const uint64_t q_left = operand(shared + rows_at, 16);
	const uint64_t k_right = operand(shared + DQ_AT_K, 16), k_columns = operand(shared + DQ_AT_K, BN * 128);
	float lse[2], delta[2], dq[HEAD / 2], s[BN / 2], g[BN / 2];
	uint32_t ds[BN / 4];
#pragma unroll
	for (int half = 0; half < 2; half++) {
		const int i = first_row + warp * 16 + (lane >> 2) + 8 * half;
		const int tile = (w.batch * a.heads_q + w.head) * a.number[ROW_TILES] + i / BM;
		lse[half] = i < w.rows ? lse_numbers(a, tile)[number_place(i % BM)] : -INFINITY;
		delta[half] = i < w.rows ? delta_numbers(a, tile)[number_place(i % BM)] : 0.0f;
	}

	auto step = [&](int t, auto is_first) {
		constexpr bool first = decltype(is_first)::value;
		const int stage = t % STAGES;
		barrier_wait(shared + DQ_AT_K_FULL + 8 * stage, full_parity(t));
		wgmma_fence();
		multiply_block(s, q_left, k_right + (stage * K_BYTES >> 4));
		wgmma_commit();
		barrier_wait(shared + DQ_AT_V_FULL + 8 * stage, full_parity(t));
		wgmma_fence();
		multiply_block(g, q_left + (DQ_AT_DOUT >> 4), k_right + ((DQ_AT_V - DQ_AT_K + stage * K_BYTES) >> 4));
		wgmma_commit();
		wgmma_wait<1>();
		pin(s);
#pragma unroll
		for (int i = 0; i < BN / 2; i++) s[i] = fast_exp2(fmaf(s[i], unit, lse[i >> 1 & 1]));
		wgmma_wait<0>();
		pin(g);
		if (leader) barrier_arrive(shared + DQ_AT_V_EMPTY + 8 * stage);
#pragma unroll
		for (int i = 0; i < BN / 4; i++)
			ds[i] = matrix<element>::pack(s[2 * i] * (g[2 * i] + delta[i & 1]),
			                              s[2 * i + 1] * (g[2 * i + 1] + delta[i & 1]));
		const int j0 = (same(w.first_block) + t) * BN;
		if (j0 < whole_from || j0 > whole_to) {
			const int again = read_lane(), row = w.i0 + group * 64 + warp * 16 + (again >> 2), keys = w.keys;
			const int low = MASKED ? row + w.see_first : -FAR, high = MASKED ? row + w.see_last : FAR;
			hide(ds, j0 + 2 * (again & 3), low, min(high, keys), low + (MASKED ? 8 : 0),
			     min(high + (MASKED ? 8 : 0), keys));
		}
		wgmma_fence();
#pragma unroll
		for (int i = 0; i < BN / 16; i++)
			wgmma<HEAD>::held<1>(dq, &ds[4 * i], k_columns + ((stage * K_BYTES + i * 2048) >> 4), i > 0 ? 1 : !first);
		wgmma_commit();
		wgmma_wait<0>();
		if (leader) barrier_arrive(shared + DQ_AT_K_EMPTY + 8 * stage);
	};

	if (blocks > 0) {
		barrier_wait(shared + DQ_AT_ROWS_FULL, 0);
		step(0, truth<true>());
		for (int t = 1; t < blocks; t++) step(t, truth<false>());
		pin(dq);
	} else {
#pragma unroll
		for (int i = 0; i < HEAD / 2; i++) dq[i] = 0;
	}

#pragma unroll
	for (int half = 0; half < 2; half++) {
		const int i = first_row + warp * 16 + (lane >> 2) + 8 * half;
		if (i >= w.rows) continue;
		element *const to = (element *)a.dq + w.q_slot * a.dq_stride[0] + w.head * a.dq_stride[1] +
		                    (w.q_row + (index_t)i) * a.dq_stride[2] + 2 * (lane & 3);
#pragma unroll
		for (int n = 0; n < HEAD / 8; n++)
			if (n * 8 < a.head_dim)
				*(uint32_t *)(to + n * 8) = matrix<element>::pack(dq[4 * n + 2 * half] * a.softmax_scale,
				                                                  dq[4 * n + 2 * half + 1] * a.softmax_scale);
	}
}
#endif
