/*
 * Attention backward on Hopper (sm_90a), as bwd_sm90.h has it, without dQ, which a second kernel computes with rows in the place of
 * keys: S and dP are computed twice, seven products in the place of five, but nothing is added in memory. So results do not depend on
 * the order in which blocks run, and the workspace has two numbers a row. For heads of 256 it is the fast way, too: there
 * additions to dQ take longer than the two products.
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
	.rank = 15, /* before the portable kernel; dQ beside dK and dV is faster where there is an image for it */
	.variant_count = sizeof images / sizeof *images,
	.images = images,
	.kernels = kernels,
	.refuse = refuse,
	.plan = plan,
};

#else

#if SHARES_KEYS(HEAD)
/* ---- owners of sums: dK and dV of 64 keys each fill the registers of a warpgroup ------------------------------------------------ */

/* Whether an owner issues a tile's product with P or dS behind the next tile's first, as LATE_DK has it. That holds a tile of rows
 * longer, which two stages do not bear. */
enum { LATE_SUM = ROWS_STAGES > 2 };

/* All tiles: step(t, before, next, first) makes the P or dS of turn t from scores in `next`, finish(last) is what is left then. */
template <class step_type, class finish_type>
DEVICE void take_turns(int begin, int end, const step_type &step, const finish_type &finish) {
	uint32_t even[BM / 4], odd[BM / 4];
	if (begin == end) return;
	step(begin, odd, even, truth<true>());
	int t = begin + 1;
	for (; t + 1 < end; t += 2) {
		step(t, even, odd, truth<false>());
		step(t + 1, odd, even, truth<false>());
	}
	if (t < end) {
		step(t, even, odd, truth<false>());
		finish(odd);
	} else finish(even);
}

/* The first owner computes S^T, P^T and dV; the second dP^T, dS^T and dK, for which P^T passes through shared memory, in registers'
 * order. Each waits for its own products: the other's run meanwhile. */
DEVICE void share_keys(const ingot__gpu_args &a, uint32_t shared, unsigned char *memory, int group) {
	const bool leader = lane_id() == 0;
	const float unit = a.softmax_scale * LOG2E;
	const uint32_t passed = shared + AT_PASSED + thread_id() % 128 * 16;
	float s[BM / 2], numbers[BM / 4];

	int begin = 0, keys = 0; /* turns and blocks of keys so far */
	if (group == 0) {
		const uint64_t k_left = operand(shared + AT_K, 16), q_right = operand(shared + AT_Q, 16),
					   dout_columns = operand(shared + AT_DOUT, BM * 128);
		each_work(shared, memory, [&](const work &w) {
			const int end = begin + same(w.tiles) * a.group;
			const sight sees = look_at(w, 0);
			if (end > begin) barrier_wait(shared + AT_KEYS_FULL, keys & 1);
			float dv[VALUE / 2];
			clear_sums(dv);
			auto add_dv = [&](int t, const uint32_t(&p)[BM / 4], bool first) {
				const int stage = t % ROWS_STAGES;
				barrier_wait(shared + AT_DOUT_FULL + 8 * stage, full_parity<ROWS_STAGES>(t));
				wgmma_fence();
				multiply_keys<VALUE>(dv, p, dout_columns + (stage * DOUT_BYTES >> 4), !first);
				wgmma_commit();
			};
			auto end_dv = [&](int t) {
				wgmma_wait<0>();
				if (leader) barrier_arrive(shared + AT_DOUT_EMPTY + 8 * (t % ROWS_STAGES));
			};
			auto step = [&](int t, const uint32_t(&before)[BM / 4], uint32_t(&p)[BM / 4], auto is_first) {
				constexpr bool first = decltype(is_first)::value;
				const int stage = t % ROWS_STAGES, passing = t % STAGES;
				barrier_wait(shared + AT_Q_FULL + 8 * stage, full_parity<ROWS_STAGES>(t));
				wgmma_fence();
				multiply_rows<HEAD>(s, k_left, q_right + (stage * Q_BYTES >> 4));
				wgmma_commit();
				if constexpr (LATE_SUM && !first) add_dv(t - 1, before, t == begin + 1);
				load_numbers(numbers, shared + AT_LSE + stage * NUMBERS_BYTES);
				wgmma_wait<LATE_SUM && !first>();
				pin(s);
#pragma unroll
				for (int i = 0; i < BM / 4; i++)
					p[i] = matrix<element>::pack(fast_exp2(fmaf(s[2 * i], unit, numbers[i / 2 * 2])),
					                             fast_exp2(fmaf(s[2 * i + 1], unit, numbers[i / 2 * 2 + 1])));
				hide_masked(p, w, sees, turn_of(memory, t));
				barrier_wait(shared + AT_PASSED_EMPTY + 8 * passing, empty_parity<STAGES>(t));
#pragma unroll
				for (int i = 0; i < BM / 16; i++)
					asm volatile(
						"st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(passed + passing * PASS_BYTES + i * 2048),
						"r"(p[4 * i]), "r"(p[4 * i + 1]), "r"(p[4 * i + 2]), "r"(p[4 * i + 3])
						: "memory");
				barrier_arrive(shared + AT_PASSED_FULL + 8 * passing);
				__syncwarp();
				if (leader) barrier_arrive(shared + AT_Q_EMPTY + 8 * stage);
				if constexpr (!LATE_SUM) {
					add_dv(t, p, first);
					end_dv(t);
				} else if constexpr (!first) end_dv(t - 1);
			};
			take_turns(begin, end, step, [&](const uint32_t(&p)[BM / 4]) {
				if (!LATE_SUM) return;
				add_dv(end - 1, p, end == begin + 1);
				end_dv(end - 1);
			});
			if (end > begin) {
				if (leader) barrier_arrive(shared + AT_KEYS_EMPTY);
				begin = end;
				keys++;
			}
			pin(dv);
			store_keys<VALUE>(a.dv, a.dv_stride, a.head_dim_v, dv, 1.0f, w, 0);
		});
	} else {
		const uint64_t v_left = operand(shared + AT_V, 16), dout_right = operand(shared + AT_DOUT, 16),
					   q_columns = operand(shared + AT_Q, BM * 128);
		each_work(shared, memory, [&](const work &w) {
			const int end = begin + same(w.tiles) * a.group;
			const sight sees = look_at(w, 0);
			if (end > begin) barrier_wait(shared + AT_VALUES_FULL, keys & 1);
			float dk[HEAD / 2];
			clear_sums(dk);
			auto add_dk = [&](int t, const uint32_t(&ds)[BM / 4], bool first) {
				const int stage = t % ROWS_STAGES;
				barrier_wait(shared + AT_Q_FULL + 8 * stage, full_parity<ROWS_STAGES>(t));
				wgmma_fence();
				multiply_keys<HEAD>(dk, ds, q_columns + (stage * Q_BYTES >> 4), !first);
				wgmma_commit();
			};
			auto end_dk = [&](int t) {
				wgmma_wait<0>();
				if (leader) barrier_arrive(shared + AT_Q_EMPTY + 8 * (t % ROWS_STAGES));
			};
			auto step = [&](int t, const uint32_t(&before)[BM / 4], uint32_t(&ds)[BM / 4], auto is_first) {
				constexpr bool first = decltype(is_first)::value;
				const int stage = t % ROWS_STAGES, passing = t % STAGES;
				barrier_wait(shared + AT_DOUT_FULL + 8 * stage, full_parity<ROWS_STAGES>(t));
				wgmma_fence();
				multiply_rows<VALUE>(s, v_left, dout_right + (stage * DOUT_BYTES >> 4));
				wgmma_commit();
				if constexpr (LATE_SUM && !first) add_dk(t - 1, before, t == begin + 1);
				load_numbers(numbers, shared + AT_DELTA + stage * NUMBERS_BYTES);
				wgmma_wait<LATE_SUM && !first>();
				pin(s);
				barrier_wait(shared + AT_PASSED_FULL + 8 * passing, full_parity<STAGES>(t));
#pragma unroll
				for (int i = 0; i < BM / 16; i++)
					asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
					             : "=r"(ds[4 * i]), "=r"(ds[4 * i + 1]), "=r"(ds[4 * i + 2]), "=r"(ds[4 * i + 3])
					             : "r"(passed + passing * PASS_BYTES + i * 2048)
					             : "memory");
#pragma unroll
				for (int i = 0; i < BM / 4; i++)
					ds[i] = matrix<element>::pack(low_half(ds[i]) * (s[2 * i] + numbers[i / 2 * 2]),
					                              high_half(ds[i]) * (s[2 * i + 1] + numbers[i / 2 * 2 + 1]));
				hide_masked(ds, w, sees, turn_of(memory, t));
				barrier_arrive(shared + AT_PASSED_EMPTY + 8 * passing);
				__syncwarp();
				if (leader) barrier_arrive(shared + AT_DOUT_EMPTY + 8 * stage);
				if constexpr (!LATE_SUM) {
					add_dk(t, ds, first);
					end_dk(t);
				} else if constexpr (!first) end_dk(t - 1);
			};
			take_turns(begin, end, step, [&](const uint32_t(&ds)[BM / 4]) {
				if (!LATE_SUM) return;
				add_dk(end - 1, ds, end == begin + 1);
				end_dk(end - 1);
			});
			if (end > begin) {
				if (leader) barrier_arrive(shared + AT_KEYS_EMPTY);
				begin = end;
				keys++;
			}
			pin(dk);
			store_keys<HEAD>(a.dk, a.dk_stride, a.head_dim, dk, a.softmax_scale, w, 0);
		});
	}
}
#endif

/* ---- dQ by itself: S and dP once more, and no additions whose order is left to chance ------------------------------------------ */

/* Shared memory: Q and dO of 128 rows, K and V of two blocks. */
enum {
	DQ_BN = DQ_KEYS(HEAD),
	DQ_K_BYTES = TILE_BYTES(DQ_BN, HEAD),
	DQ_V_BYTES = TILE_BYTES(DQ_BN, VALUE),
	DQ_Q_BYTES = TILE_BYTES(DQ_ROWS, HEAD),
	DQ_DOUT_BYTES = TILE_BYTES(DQ_ROWS, VALUE),
	DQ_AT_DOUT = DQ_Q_BYTES,
	DQ_AT_K = DQ_AT_DOUT + DQ_DOUT_BYTES,
	DQ_AT_V = DQ_AT_K + STAGES * DQ_K_BYTES,
	DQ_AT_WORK = DQ_AT_V + STAGES * DQ_V_BYTES,
	DQ_AT_ROWS_FULL = DQ_AT_WORK + 64,
	DQ_AT_K_FULL = DQ_AT_ROWS_FULL + 8,
	DQ_AT_K_FETCHED = DQ_AT_K_FULL + 8 * STAGES,
	DQ_AT_K_EMPTY = DQ_AT_K_FETCHED + 8 * STAGES,
	DQ_AT_V_FULL = DQ_AT_K_EMPTY + 8 * STAGES,
	DQ_AT_V_EMPTY = DQ_AT_V_FULL + 8 * STAGES,
	DQ_AT_END = DQ_AT_V_EMPTY + 8 * STAGES
};
static_assert(DQ_AT_END <= DQ_SHARED_BYTES(HEAD, VALUE), "barriers and the block's work fit into the control bytes");

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
	w.first_block = first / DQ_BN;
	w.blocks = last > first ? (last + DQ_BN - 1) / DQ_BN - w.first_block : 0;
	return true;
}

DEVICE bool clears_keys(const ingot__gpu_args &a, const dq_work &w, int j0) {
	return MASKED &&
	       (j0 < w.live_first_key || (j0 + DQ_BN > w.live_last_key && w.k_row + w.live_last_key < a.k_capacity));
}

/* One lane. */
DEVICE void fetch(const arguments &x, const dq_work &w, uint32_t shared) {
	const int moves = x.a.number[MOVES];
	auto at_head = [&](int map, int head) { return moves & MOVES_HEAD(map) ? head : 0; };
	auto at_batch = [&](int map, int batch) { return moves & MOVES_BATCH(map) ? batch : 0; };
	barrier_expect(shared + DQ_AT_ROWS_FULL, DQ_Q_BYTES + DQ_DOUT_BYTES);
	for (int i = 0; i < DQ_ROWS / BM; i++) {
		load_tile<HEAD, BM>(shared + i * Q_BYTES, &x.map[Q_MAP], shared + DQ_AT_ROWS_FULL, w.q_row + w.i0 + i * BM,
		                    at_head(Q_MAP, w.head), at_batch(Q_MAP, w.q_slot));
		load_tile<VALUE, BM>(shared + DQ_AT_DOUT + i * DOUT_BYTES, &x.map[DOUT_MAP], shared + DQ_AT_ROWS_FULL,
		                     w.q_row + w.i0 + i * BM, at_head(DOUT_MAP, w.head), at_batch(DOUT_MAP, w.q_slot));
	}
	for (int t = 0; t < w.blocks; t++) {
		const int stage = t % STAGES, j0 = (w.first_block + t) * DQ_BN, head = w.head / x.a.group;
		barrier_wait(shared + DQ_AT_K_EMPTY + 8 * stage, empty_parity<STAGES>(t));
		const uint32_t arrived = shared + (clears_keys(x.a, w, j0) ? DQ_AT_K_FETCHED : DQ_AT_K_FULL) + 8 * stage;
		barrier_expect(arrived, DQ_K_BYTES);
		load_tile<HEAD, DQ_BN>(shared + DQ_AT_K + stage * DQ_K_BYTES, &x.map[DQ_K_MAP], arrived, w.k_row + j0,
		                       at_head(K_MAP, head), at_batch(K_MAP, w.k_slot));
		barrier_wait(shared + DQ_AT_V_EMPTY + 8 * stage, empty_parity<STAGES>(t));
		barrier_expect(shared + DQ_AT_V_FULL + 8 * stage, DQ_V_BYTES);
		load_tile<VALUE, DQ_BN>(shared + DQ_AT_V + stage * DQ_V_BYTES, &x.map[DQ_V_MAP],
		                        shared + DQ_AT_V_FULL + 8 * stage, w.k_row + j0, at_head(V_MAP, head),
		                        at_batch(V_MAP, w.k_slot));
	}
}

/* A warp. */
DEVICE void clear(const ingot__gpu_args &a, const dq_work &w, uint32_t shared, unsigned char *memory) {
	uint32_t parity = 0;
	for (int t = 0; t < w.blocks; t++) {
		const int stage = t % STAGES, j0 = (w.first_block + t) * DQ_BN;
		if (!clears_keys(a, w, j0)) continue;
		barrier_wait(shared + DQ_AT_K_FETCHED + 8 * stage, parity >> stage & 1);
		clear_rows<HEAD, DQ_BN>(memory + DQ_AT_K + stage * DQ_K_BYTES, w.live_first_key - j0, w.live_last_key - j0,
		                        shared + DQ_AT_K_FULL + 8 * stage);
		parity ^= 1u << stage;
	}
}

/* x[64][DQ_BN] = 64 rows of Q or dO times a block of K or V, transposed. */
template <int columns> DEVICE void multiply_block(float (&x)[DQ_BN / 2], uint64_t rows, uint64_t keys) {
#pragma unroll
	for (int i = 0; i < columns / 16; i++)
		wgmma<DQ_BN>::shared<0>(x, rows + ((i / 4 * BM * 128 + i % 4 * 32) >> 4),
		                        keys + ((i / 4 * DQ_BN * 128 + i % 4 * 32) >> 4), i > 0);
}

extern "C" __global__ void __launch_bounds__(128 * (OWNERS + 1), 1)
	attn_bwd_sm90_dq(const __grid_constant__ arguments x) {
	extern __shared__ __align__(1024) unsigned char memory[];
	const ingot__gpu_args &a = x.a;
	const uint32_t shared = shared_address(memory);
	const int warpgroup = same(warp_id()) / 4, warp = same(warp_id()) % 4;
	const dq_work &w = *(const dq_work *)(memory + DQ_AT_WORK);

	/* Nothing is needed of the step before, which has waited for that before it. But what follows in the stream waits for this one. */
	dq_work mine;
	if (!look(a, blockIdx.x, mine)) {
		wait_for_step_before();
		return;
	}
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
		for (int i = 0; i < ALL_MAPS; i++) prefetch_map(&x.map[i]);
	}
	block_barrier();
	const int blocks = same(w.blocks);

	if (warpgroup == 0) {
		registers_release<24>();
		if (blocks > 0 && warp == 0 && lane_id() == 0) fetch(x, w, shared);
		if (MASKED && blocks > 0 && warp == 1) clear(a, w, shared, memory);
		wait_for_step_before();
		return;
	}

	registers_claim<240>();
	const int group = warpgroup - 1, lane = lane_id();
	const bool leader = lane == 0;
	const float unit = a.softmax_scale * LOG2E;
	const int first_row = w.i0 + group * 64;
	/* blocks of keys that begin outside [whole_from, whole_to] hold pairs that are masked, or keys that are none */
	const int whole_from = MASKED ? same(first_row + 63 + w.see_first) : -FAR;
	const int whole_to = same(MASKED ? min(first_row + w.see_last, w.keys) - DQ_BN : w.keys - DQ_BN);
	const uint64_t k_right = operand(shared + DQ_AT_K, 16), k_columns = operand(shared + DQ_AT_K, DQ_BN * 128);
	float lse[2], delta[2], dq[HEAD / 2], s[DQ_BN / 2], g[DQ_BN / 2];
	uint32_t ds[DQ_BN / 4];
	clear_sums(dq);
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
		/* known afresh to be the same in all lanes, as own_keys has it */
		const int group = same(warp_id()) / 4 - 1;
		const uint64_t q_left = operand(shared + group * (BM == 64 ? Q_BYTES : 64 * 128), 16);
		const uint64_t dout_left = operand(shared + DQ_AT_DOUT + group * (BM == 64 ? DOUT_BYTES : 64 * 128), 16);
		barrier_wait(shared + DQ_AT_K_FULL + 8 * stage, full_parity<STAGES>(t));
		wgmma_fence();
		multiply_block<HEAD>(s, q_left, k_right + (stage * DQ_K_BYTES >> 4));
		wgmma_commit();
		barrier_wait(shared + DQ_AT_V_FULL + 8 * stage, full_parity<STAGES>(t));
		wgmma_fence();
		multiply_block<VALUE>(g, dout_left, k_right + ((DQ_AT_V - DQ_AT_K + stage * DQ_V_BYTES) >> 4));
		wgmma_commit();
		wgmma_wait<1>();
		pin(s);
#pragma unroll
		for (int i = 0; i < DQ_BN / 2; i++) s[i] = fast_exp2(fmaf(s[i], unit, lse[i >> 1 & 1]));
		wgmma_wait<0>();
		pin(g);
		if (leader) barrier_arrive(shared + DQ_AT_V_EMPTY + 8 * stage);
#pragma unroll
		for (int i = 0; i < DQ_BN / 4; i++)
			ds[i] = matrix<element>::pack(s[2 * i] * (g[2 * i] + delta[i & 1]),
			                              s[2 * i + 1] * (g[2 * i + 1] + delta[i & 1]));
		const int j0 = (same(w.first_block) + t) * DQ_BN;
		if (j0 < whole_from || j0 > whole_to) {
			const int again = read_lane(), row = w.i0 + group * 64 + warp * 16 + (again >> 2), keys = w.keys;
			const int low = MASKED ? row + w.see_first : -FAR, high = MASKED ? row + w.see_last : FAR;
			hide(ds, j0 + 2 * (again & 3), low, min(high, keys), low + (MASKED ? 8 : 0),
			     min(high + (MASKED ? 8 : 0), keys));
		}
		wgmma_fence();
#pragma unroll
		for (int i = 0; i < DQ_BN / 16; i++)
			wgmma<HEAD>::held<1>(dq, &ds[4 * i], k_columns + ((stage * DQ_K_BYTES + i * 2048) >> 4),
			                     i > 0 ? 1 : !first);
		wgmma_commit();
		wgmma_wait<0>();
		if (leader) barrier_arrive(shared + DQ_AT_K_EMPTY + 8 * stage);
	};

	if (blocks > 0) barrier_wait(shared + DQ_AT_ROWS_FULL, 0);
	if (blocks > 0) {
		step(0, truth<true>());
		for (int t = 1; t < blocks; t++) step(t, truth<false>());
	}
	pin(dq);

	const int row = first_row + warp * 16;
	store_sums<HEAD>((element *)a.dq + w.q_slot * a.dq_stride[0] + w.head * a.dq_stride[1] +
	                     (w.q_row + (index_t)row) * a.dq_stride[2],
	                 a.dq_stride[2], w.rows - row, a.head_dim, dq, a.softmax_scale);
}
#endif
