/*
 * Attention backward on NVIDIA GPUs from sm_80 on, in 16-bit types with heads up to 128, by mma.sync and cp.async.
 *
 * A block owns BN keys of one key head: K, V and the sums of dK and dV stay with it while the query tiles of the whole head group
 * pass by, so that grouped heads need no atomics on dK and dV. A warp owns 16 keys; it multiplies transposed, S^T = K Q^T and
 * dP^T = V dO^T, whose accumulators are already the left operands of dV += P^T dO and dK += dS^T Q. dS^T also goes to shared
 * memory, for dQ += dS K over all warps, which is added to an fp32 image of dQ by atomics. A first kernel makes that image
 * zero and computes delta = rowsum(dO * O) and the row's LSE in base 2; a last one rounds dQ.
 */
#include "../gpu_args.h"

enum { CLASS_PLAIN, CLASS_MASKED, CLASS_GENERAL };
enum {
	KEY_BLOCKS,
	DOUT_DTYPE,
	ROWS_AT,
	DQ_AT,
	DQ_COLUMNS,
	PADDED_Q
}; /* numbers; offsets into the workspace in 256 bytes */

#define ROWS 64 /* queries of a tile */
#define BLOCK_WARPS(small) ((small) ? 4 : 8)
#define PANELS(head) (((head) + 63) / 64)
#define STAGES(head, small) ((small) && (head) > 64 ? 1 : 2)
#define SHARED_BYTES(head, small)                                                          \
	((2 * BLOCK_WARPS(small) * 16 + 2 * STAGES(head, small) * ROWS) * PANELS(head) * 128 + \
	 BLOCK_WARPS(small) * 16 * 128 + STAGES(head, small) * ROWS * 8)

#ifdef INGOT_HOST

#define IMAGES(type, number, head)                                                               \
	{type "_d" #head "_plain", "-DELEMENT=" #number " -DHEAD=" #head " -DCLASS=0", 1024},        \
		{type "_d" #head "_masked", "-DELEMENT=" #number " -DHEAD=" #head " -DCLASS=1", 1024}, { \
		type "_d" #head "_general", "-DELEMENT=" #number " -DHEAD=" #head " -DCLASS=2", 4096     \
	}
#define HEADS(type, number) IMAGES(type, number, 64), IMAGES(type, number, 96), IMAGES(type, number, 128)

static const ingot__image_variant images[] = {HEADS("f16", 2), HEADS("bf16", 3)};
static const int heads[] = {64, 96, 128};
enum { HEAD_COUNT = sizeof heads / sizeof *heads };
static const char *const kernels[] = {"attn_bwd_sm80_rows", "attn_bwd_sm80", "attn_bwd_sm80_dq", NULL};

static int head_index(const ingot__problem *p) {
	const int64_t d = p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v;
	int i = 0;
	while (i < HEAD_COUNT && heads[i] < d) i++;
	return i;
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
	INGOT__REFUSE_IF(p->dout.dtype != p->q.dtype, "dout must be of q's type");
	INGOT__REFUSE_IF(p->deterministic, "dq is summed by atomics, in no fixed order");
	INGOT__REFUSE_IF(p->dbias.dtype != INGOT_NONE || p->dsink.dtype != INGOT_NONE, "it computes no dbias and no dsink");
	INGOT__REFUSE_IF(head_index(p) == HEAD_COUNT, "a head size above 128");
	INGOT__REFUSE_IF(p->head_dim % 8 || p->head_dim_v % 8,
	                 "a head size that is no multiple of 8: rows are read in 16-byte pieces");
	INGOT__REFUSE_IF(p->features & INGOT__UNALIGNED || !aligned(&p->dout),
	                 "a base address or stride of q, k, v, out or dout that is no multiple of 16 bytes");
	const int64_t far = 1 << 23;
	INGOT__REFUSE_IF(p->q.stride[2] > far || p->k.stride[2] > far || p->v.stride[2] > far || p->dout.stride[2] > far,
	                 "rows more than 2^23 elements apart");
	const uint32_t terms = INGOT__BIAS | INGOT__BIAS_BOOL | INGOT__ALIBI | INGOT__SOFTCAP | INGOT__DROPOUT;
	const int class = p->features & terms                           ? CLASS_GENERAL
	                  : p->features & (INGOT__MASK | INGOT__VARLEN) ? CLASS_MASKED
	                                                                : CLASS_PLAIN;
	*variant = ((p->q.dtype == INGOT_BF16) * HEAD_COUNT + head_index(p)) * 3 + class;
	return NULL;
}

static int64_t divide_up(int64_t a, int64_t b) {
	return (a + b - 1) / b;
}

static uint32_t grid(int64_t blocks) {
	return (uint32_t)(blocks < 2147483647 ? blocks : 2147483647);
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)threads;
	ingot__gpu_args *const a = ingot__gpu_fill(p, out);
	const int head = heads[out->variant / 3 % HEAD_COUNT], small = ingot__gpu_tier(device) == 0,
			  keys = BLOCK_WARPS(small) * 16;
	const int64_t mq = p->q_side.max_seqlen, padded = divide_up(mq, ROWS) * ROWS, rows = p->batch * p->heads_q * padded;
	a->number[KEY_BLOCKS] = (int32_t)divide_up(p->k_side.max_seqlen, keys);
	a->number[DOUT_DTYPE] = p->dout.dtype;
	a->number[PADDED_Q] = (int32_t)padded;
	a->number[DQ_COLUMNS] = head;
	a->number[ROWS_AT] = 0;
	a->number[DQ_AT] = (int32_t)divide_up(rows * 8, 256);
	const bool dq = p->dq.dtype != INGOT_NONE;
	out->workspace_bytes = (uint64_t)a->number[DQ_AT] * 256 + (dq ? (uint64_t)rows * (uint64_t)head * 4 : 0);
	ingot__step *step = out->step;
	if (rows > 0)
		*step++ = (ingot__step){
			.name = "rows", .kernel = kernels[0], .block = {256, 1, 1}, .grid = {grid(divide_up(rows, 8)), 1, 1}};
	const int64_t blocks = p->batch * p->heads_k * a->number[KEY_BLOCKS];
	if (blocks > 0)
		*step++ = (ingot__step){.name = "main",
		                        .kernel = kernels[1],
		                        .block = {(uint32_t)BLOCK_WARPS(small) * 32, 1, 1},
		                        .shared_bytes = (uint32_t)SHARED_BYTES(head, small),
		                        .grid = {grid(blocks), 1, 1}};
	if (rows > 0 && dq)
		*step++ = (ingot__step){
			.name = "dq", .kernel = kernels[2], .block = {256, 1, 1}, .grid = {grid(divide_up(rows, 8)), 1, 1}};
	out->steps = (int)(step - out->step);
}

const ingot__impl ingot__impl_attn_bwd_sm80 = {
	.name = "attn_bwd_sm80",
	.family = "cuda",
	.op = INGOT__ATTN_BWD,
	.device = INGOT_CUDA,
	.arch = "",
	.rank = 10,
	.variant_count = sizeof images / sizeof *images,
	.images = images,
	.kernels = kernels,
	.refuse = refuse,
	.plan = plan,
};

#else

enum { SMALL = INGOT__TIER == 0 };
enum {
	GENERAL = CLASS == CLASS_GENERAL,
	WARPS = BLOCK_WARPS(SMALL),
	THREADS = WARPS * 32,
	BM = ROWS,
	BN = WARPS * 16,
	NF = BM / 8,   /* column fragments of S^T: queries */
	DF = HEAD / 8, /* column fragments of dK and dV */
	STAGE = BM * PANELS(HEAD) * 128,
	KEYS = BN * PANELS(HEAD) * 128,
	QW = 4, /* warps along the queries of dQ */
	DW = WARPS / QW,
	QF = DF / DW /* column fragments of a warp's dQ */
};
#include "../gpu_tile.h"

struct place_in_problem {
	int b, head;
	span q, k;
	index_t diagonal;
};

DEVICE float2 *row_numbers(const ingot__gpu_args &a, int b,
                           int head) { /* (LSE in base 2, delta) of each padded query row */
	return (float2 *)a.workspace + ((index_t)b * a.heads_q + head) * a.number[PADDED_Q];
}
DEVICE float *dq_image(const ingot__gpu_args &a, int b, int head) {
	return (float *)((char *)a.workspace + (index_t)a.number[DQ_AT] * 256) +
	       ((index_t)b * a.heads_q + head) * a.number[PADDED_Q] * HEAD;
}

/* A warp a padded row: its numbers, and zeros for its dQ. Rows past the length get LSE = +Inf, which makes every weight 0. */
extern "C" __global__ void __launch_bounds__(256) attn_bwd_sm80_rows(const __grid_constant__ ingot__gpu_args a) {
	const index_t rows = (index_t)a.batch * a.heads_q * a.number[PADDED_Q];
	for (index_t n = (index_t)blockIdx.x * 8 + warp_id(); n < rows; n += (index_t)gridDim.x * 8) {
		const int i = (int)(n % a.number[PADDED_Q]), head = (int)(n / a.number[PADDED_Q] % a.heads_q),
				  b = (int)(n / a.number[PADDED_Q] / a.heads_q);
		const span q = query_rows(a, b);
		float2 numbers = make_float2(INFINITY, 0.0f);
		if (i < q.count) {
			const index_t x = row_offset(a.out_stride, q, head, i), y = row_offset(a.dout_stride, q, head, i);
			float sum = 0;
			for (int d = lane_id(); d < a.head_dim_v; d += 32)
				sum = fmaf(load_value(a.out, x + d, a.out_dtype), load_value(a.dout, y + d, a.number[DOUT_DTYPE]), sum);
			for (int m = 16; m; m >>= 1) sum += lane_xor(sum, m);
			const float lse = a.lse[b * a.lse_stride[0] + head * a.lse_stride[1] + (q.start + i) * a.lse_stride[2]];
			if (lse != -INFINITY) numbers = make_float2(a.lse_base ? lse : lse * LOG2E, sum);
		}
		if (lane_id() == 0) row_numbers(a, b, head)[i] = numbers;
		if (a.dq)
			for (int d = lane_id() * 4; d < HEAD; d += 128)
				*(float4 *)(dq_image(a, b, head) + (index_t)i * HEAD + d) = make_float4(0, 0, 0, 0);
	}
}

extern "C" __global__ void __launch_bounds__(256) attn_bwd_sm80_dq(const __grid_constant__ ingot__gpu_args a) {
	const index_t rows = (index_t)a.batch * a.heads_q * a.number[PADDED_Q];
	for (index_t n = (index_t)blockIdx.x * 8 + warp_id(); n < rows; n += (index_t)gridDim.x * 8) {
		const int i = (int)(n % a.number[PADDED_Q]), head = (int)(n / a.number[PADDED_Q] % a.heads_q),
				  b = (int)(n / a.number[PADDED_Q] / a.heads_q);
		const span q = query_rows(a, b);
		if (i >= q.count) continue;
		const float *const from = dq_image(a, b, head) + (index_t)i * HEAD;
		const index_t to = row_offset(a.dq_stride, q, head, i);
		for (int d = lane_id(); d < a.head_dim; d += 32)
			store_value(a.dq, to + d, a.dq_dtype, from[d] * a.softmax_scale);
	}
}

/* The score of a pair in base 2, the slope of softcap, and whether its bias masks it. */
DEVICE float general_score(const ingot__gpu_args &a, const place_in_problem &t, float dot, int i, int j, float *slope) {
	float s = dot * a.softmax_scale;
	*slope = 1.0f;
	if (a.features & F_SOFTCAP) {
		const float x = tanhf(s / a.softcap);
		s = a.softcap * x;
		*slope = 1.0f - x * x;
	}
	if (a.features & F_ALIBI) {
		const index_t distance = i + t.diagonal - j;
		s -= a.alibi[t.b * a.alibi_stride[0] + t.head * a.alibi_stride[1]] *
		     (float)(distance < 0 ? -distance : distance);
	}
	if (a.features & (F_BIAS | F_BIAS_BOOL)) {
		const index_t at =
			t.b * a.bias_stride[0] + t.head * a.bias_stride[1] + i * a.bias_stride[2] + j * a.bias_stride[3];
		if (a.features & F_BIAS_BOOL) {
			if (!((const unsigned char *)a.bias)[at]) s = -INFINITY;
		} else {
			const float bias =
				a.bias_dtype == DT_F32 ? ((const float *)a.bias)[at] : (float)((const element *)a.bias)[at];
			s = bias == -INFINITY ? -INFINITY : s + bias;
		}
	}
	return s * LOG2E;
}

DEVICE void load_queries(const ingot__gpu_args &a, const place_in_problem &t, uint32_t sq, uint32_t sdo,
                         float2 *numbers, int i0, int first, int last) {
	load_tile<BM>(sq, (const element *)a.q + row_offset(a.q_stride, t.q, t.head, 0), a.q_stride[2], i0, first, last,
	              a.head_dim);
	load_tile<BM>(sdo, (const element *)a.dout + row_offset(a.dout_stride, t.q, t.head, 0), a.dout_stride[2], i0, first,
	              last, a.head_dim_v);
	if (thread_id() < BM) {
		const float2 *const from = row_numbers(a, t.b, t.head) + i0 + thread_id();
		asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(numbers + thread_id())), "l"(from)
		             : "memory");
	}
	copy_commit();
}

DEVICE void add_pair(float *to, float x, float y) {
#if __CUDA_ARCH__ >= 900
	asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
#else
	atomicAdd(to, x);
	atomicAdd(to + 1, y);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attn_bwd_sm80(const __grid_constant__ ingot__gpu_args a) {
	extern __shared__ __align__(128) unsigned char shared[];
	enum { S = STAGES(HEAD, SMALL) };
	unsigned char *const k_tile = shared, *const v_tile = k_tile + KEYS, *const q_tile = v_tile + KEYS,
						 *const do_tile = q_tile + S * STAGE, *const ds_tile = do_tile + S * STAGE;
	float2 *const numbers = (float2 *)(ds_tile + BN * 128);
	const uint32_t sk = shared_address(k_tile), sv = shared_address(v_tile), sq = shared_address(q_tile),
				   sdo = shared_address(do_tile), sds = shared_address(ds_tile);
	const int warp = warp_id(), lane = lane_id();
	/* as left operands by rows; as right operands by rows and by columns */
	const reader k_left = make_reader(sk, warp * 16 + (lane & 15), lane >> 4),
				 v_left = make_reader(sv, warp * 16 + (lane & 15), lane >> 4);
	const reader q_rows = make_reader(sq, (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1),
				 do_rows = make_reader(sdo, (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
	const reader q_columns = make_reader(sq, lane & 15, lane >> 4), do_columns = make_reader(sdo, lane & 15, lane >> 4);
	const reader k_columns = make_reader(sk, lane & 15, lane >> 4);
	const int query_warp = warp % QW, column_warp = warp / QW;
	const reader ds_left = make_reader(sds, (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);

	const index_t blocks = (index_t)a.number[KEY_BLOCKS] * a.batch * a.heads_k;
	for (index_t block = blockIdx.x; block < blocks; block += gridDim.x) {
		const int j0 = (int)(block % a.number[KEY_BLOCKS]) * BN,
				  head_k = (int)(block / a.number[KEY_BLOCKS] % a.heads_k);
		place_in_problem t;
		t.b = (int)(block / a.number[KEY_BLOCKS] / a.heads_k);
		if (CLASS == CLASS_PLAIN) {
			t.q.slot = t.k.slot = t.b;
			t.q.start = t.k.start = 0;
			t.q.count = a.max_seqlen_q;
			t.k.count = a.max_seqlen_k;
		} else {
			t.q = query_rows(a, t.b);
			t.k = key_rows(a, t.b);
		}
		if (j0 >= t.k.count) continue;
		const int j1 = j0 + BN < t.k.count ? j0 + BN : t.k.count;
		t.diagonal = a.bottom_right ? (index_t)t.k.count - t.q.count : 0;
		/* queries that see some key of the block, queries that see all of them; keys that some query sees */
		int first = 0, last = t.q.count, all_first = 0, all_last = t.q.count, k_first = 0, k_last = t.k.count;
		if (CLASS != CLASS_PLAIN) {
			first = (int)clamp64(j0 - t.diagonal - a.right, 0, t.q.count);
			last = (int)clamp64(j1 - 1 - t.diagonal + a.left + 1, 0, t.q.count);
			all_first = (int)clamp64(j1 - 1 - t.diagonal - a.right, 0, t.q.count);
			all_last = (int)clamp64(j0 - t.diagonal + a.left + 1, 0, t.q.count);
			k_first = (int)clamp64(t.diagonal - a.left, 0, t.k.count);
			k_last = (int)clamp64(t.q.count - 1 + t.diagonal + a.right + 1, 0, t.k.count);
			if (a.right < -a.left || last < first) last = first;
		}
		if (j1 < j0 + BN) all_last = all_first; /* the last keys are none */
		const int m_first = first / BM, m_last = last > first ? (last - 1) / BM : m_first - 1,
				  per_head = m_last - m_first + 1, turns = per_head * a.group;
		const uint64_t seed = GENERAL && (a.features & F_DROPOUT) ? dropout_seed(a) : 0,
					   offset = GENERAL && (a.features & F_DROPOUT) ? dropout_offset(a) : 0;
		const float unit = a.softmax_scale * LOG2E;

		float dk[DF][4], dv[DF][4];
#pragma unroll
		for (int d = 0; d < DF; d++) {
			dk[d][0] = dk[d][1] = dk[d][2] = dk[d][3] = 0;
			dv[d][0] = dv[d][1] = dv[d][2] = dv[d][3] = 0;
		}
		block_barrier(); /* the last block's tiles are done with */
		load_tile<BN>(sk, (const element *)a.k + row_offset(a.k_stride, t.k, head_k, 0), a.k_stride[2], j0, k_first,
		              k_last, a.head_dim);
		load_tile<BN>(sv, (const element *)a.v + row_offset(a.v_stride, t.k, head_k, 0), a.v_stride[2], j0, k_first,
		              k_last, a.head_dim_v);
		t.head = head_k * a.group;
		if (turns > 0) load_queries(a, t, sq, sdo, numbers, m_first * BM, first, last);
		else copy_commit();

		for (int turn = 0; turn < turns; turn++) {
			const int stage = S == 2 ? turn & 1 : 0, i0 = (m_first + turn % per_head) * BM;
			t.head = head_k * a.group + turn / per_head;
			if (S == 1 && turn > 0) {
				block_barrier();
				load_queries(a, t, sq, sdo, numbers, i0, first, last);
			}
			copy_wait<0>();
			block_barrier(); /* this tile is here; the last one's readers, and dS's, have gone */
			if (S == 2 && turn + 1 < turns) {
				place_in_problem next = t;
				next.head = head_k * a.group + (turn + 1) / per_head;
				load_queries(a, next, sq + (stage ^ 1) * STAGE, sdo + (stage ^ 1) * STAGE, numbers + (stage ^ 1) * BM,
				             (m_first + (turn + 1) % per_head) * BM, first, last);
			}
			const uint32_t here = stage * STAGE;

			float s[NF][4], g[NF][4];
#pragma unroll
			for (int c = 0; c < NF; c++) {
				s[c][0] = s[c][1] = s[c][2] = s[c][3] = 0;
				g[c][0] = g[c][1] = g[c][2] = g[c][3] = 0;
			}
#pragma unroll
			for (int d = 0; d < HEAD / 16; d++) {
				uint32_t left[4];
				load_matrix4(left, at<BN>(k_left, 0, 2 * d));
#pragma unroll
				for (int c = 0; c < NF; c += 2) {
					uint32_t right[4];
					load_matrix4(right, at<BM>(q_rows, c * 8, 2 * d) + here);
					matrix<element>::multiply(s[c], left, right[0], right[1]);
					matrix<element>::multiply(s[c + 1], left, right[2], right[3]);
				}
			}
#pragma unroll
			for (int d = 0; d < HEAD / 16; d++) {
				uint32_t left[4];
				load_matrix4(left, at<BN>(v_left, 0, 2 * d));
#pragma unroll
				for (int c = 0; c < NF; c += 2) {
					uint32_t right[4];
					load_matrix4(right, at<BM>(do_rows, c * 8, 2 * d) + here);
					matrix<element>::multiply(g[c], left, right[0], right[1]);
					matrix<element>::multiply(g[c + 1], left, right[2], right[3]);
				}
			}

			const bool whole = i0 >= all_first && i0 + BM <= all_last;
			uint32_t p_left[NF / 2][4], ds_pair[NF][2];
#pragma unroll
			for (int c = 0; c < NF; c++) {
				const int i = i0 + c * 8 + fragment_column(0);
				const float4 n =
					*(const float4 *)(numbers + stage * BM + c * 8 + fragment_column(0)); /* of queries i and i + 1 */
				float p[4], ds[4];
#pragma unroll
				for (int e = 0; e < 4; e++) {
					const int j = j0 + warp * 16 + fragment_row(e), query = i + (e & 1);
					const float lse = e & 1 ? n.z : n.x, delta = e & 1 ? n.w : n.y;
					float slope = 1.0f, keep = 1.0f, x = fmaf(s[c][e], unit, -lse);
					bool valid = true;
					if (GENERAL)
						x = general_score(a, t, s[c][e], query < t.q.count ? query : 0, j < t.k.count ? j : 0, &slope) -
						    lse;
					if (!whole || GENERAL) {
						const index_t distance = (index_t)j - query - t.diagonal;
						valid = j < t.k.count && query < t.q.count;
						if (CLASS != CLASS_PLAIN) valid &= distance >= -a.left && distance <= a.right;
						if (GENERAL) valid &= x != -INFINITY;
					}
					p[e] = valid ? fast_exp2(x) : 0.0f;
					if (GENERAL && (a.features & F_DROPOUT)) {
						const uint4 w = philox(seed, offset, dropout_index(a, t.b, t.head, query, j));
						const uint32_t word = (j & 3) == 0 ? w.x : (j & 3) == 1 ? w.y : (j & 3) == 2 ? w.z : w.w;
						keep = word >= a.dropout_threshold ? a.keep_scale : 0.0f;
					}
					ds[e] = valid ? p[e] * ((keep == 0.0f ? 0.0f : g[c][e] * keep) - delta) * slope : 0.0f;
					if (GENERAL) p[e] = keep == 0.0f ? 0.0f : p[e] * keep;
				}
				p_left[c / 2][(c & 1) * 2] = matrix<element>::pack(p[0], p[1]);
				p_left[c / 2][(c & 1) * 2 + 1] = matrix<element>::pack(p[2], p[3]);
				ds_pair[c][0] = matrix<element>::pack(ds[0], ds[1]);
				ds_pair[c][1] = matrix<element>::pack(ds[2], ds[3]);
				if (a.dq) {
					store_pair<BN>(ds_tile, warp * 16 + (lane >> 2), c, lane & 3, ds_pair[c][0]);
					store_pair<BN>(ds_tile, warp * 16 + (lane >> 2) + 8, c, lane & 3, ds_pair[c][1]);
				}
			}
#pragma unroll
			for (int c = 0; c < NF; c += 2)
#pragma unroll
				for (int d = 0; d < DF; d += 2) {
					uint32_t right[4];
					load_matrix4_transposed(right, at<BM>(do_columns, c * 8, d) + here);
					matrix<element>::multiply(dv[d], p_left[c / 2], right[0], right[1]);
					matrix<element>::multiply(dv[d + 1], p_left[c / 2], right[2], right[3]);
				}
			block_barrier(); /* dS is whole */
#pragma unroll
			for (int c = 0; c < NF; c += 2) {
				const uint32_t left[4] = {ds_pair[c][0], ds_pair[c][1], ds_pair[c + 1][0], ds_pair[c + 1][1]};
#pragma unroll
				for (int d = 0; d < DF; d += 2) {
					uint32_t right[4];
					load_matrix4_transposed(right, at<BM>(q_columns, c * 8, d) + here);
					matrix<element>::multiply(dk[d], left, right[0], right[1]);
					matrix<element>::multiply(dk[d + 1], left, right[2], right[3]);
				}
			}
			if (a.dq) {
				float dq[QF][4];
#pragma unroll
				for (int d = 0; d < QF; d++) dq[d][0] = dq[d][1] = dq[d][2] = dq[d][3] = 0;
#pragma unroll
				for (int k = 0; k < BN / 16; k++) {
					uint32_t left[4];
					/* stored by keys: read transposed, queries become rows */
					load_matrix4_transposed(left, ds_left.base + (uint32_t)(k * 16 * 128) +
					                                  (ds_left.turn ^ (uint32_t)((query_warp * 2) << 4)));
#pragma unroll
					for (int d = 0; d < QF; d += 2) {
						uint32_t right[4];
						load_matrix4_transposed(right, at<BN>(k_columns, k * 16, column_warp * QF + d));
						matrix<element>::multiply(dq[d], left, right[0], right[1]);
						matrix<element>::multiply(dq[d + 1], left, right[2], right[3]);
					}
				}
				float *const to = dq_image(a, t.b, t.head) + (index_t)(i0 + query_warp * 16 + (lane >> 2)) * HEAD +
				                  column_warp * QF * 8 + fragment_column(0);
#pragma unroll
				for (int d = 0; d < QF; d++) {
					add_pair(to + d * 8, dq[d][0], dq[d][1]);
					add_pair(to + 8 * HEAD + d * 8, dq[d][2], dq[d][3]);
				}
			}
		}
		copy_wait<0>();

#pragma unroll
		for (int half = 0; half < 2; half++) {
			const int j = j0 + warp * 16 + (lane >> 2) + 8 * half;
			if (j >= j1) continue;
			const index_t dk_at = row_offset(a.dk_stride, t.k, head_k, j),
						  dv_at = row_offset(a.dv_stride, t.k, head_k, j);
#pragma unroll
			for (int d = 0; d < DF; d++)
#pragma unroll
				for (int x = 0; x < 2; x++) {
					const int column = d * 8 + fragment_column(x);
					if (a.dk && column < a.head_dim)
						store_value(a.dk, dk_at + column, a.dk_dtype, dk[d][2 * half + x] * a.softmax_scale);
					if (a.dv && column < a.head_dim_v)
						store_value(a.dv, dv_at + column, a.dv_dtype, dv[d][2 * half + x]);
				}
		}
	}
}
#endif
