/*
 * Attention backward on NVIDIA GPUs from sm_80 on, in 16-bit types with heads up to 256, by mma.sync and cp.async.
 *
 * A block owns some keys of one key head: K, V and the sums of dK and dV stay with it while the query tiles of the whole head group
 * pass by, so that grouped heads need no atomics on dK and dV. The time goes into reading operands from shared memory, so each
 * product deals its result to the warps in the shape that reads least: S^T = K Q^T and dP^T = V dO^T by keys and queries,
 * dV += P^T dO and dK += dS^T Q by the same keys and columns, dQ += dS K by queries and columns. P^T and dS^T pass from one warp
 * to the others through shared memory. dQ is added to an fp32 image by atomics; a first kernel makes that image zero and computes
 * delta = rowsum(dO * O) and the row's LSE in base 2; a last one rounds dQ.
 *
 * The image holds 8 rows by 16 columns as the warp's lanes hold them, one after the other, so that a warp adds 512 bytes in a row.
 */
#include "../gpu_args.h"

enum { CLASS_PLAIN, CLASS_MASKED, CLASS_GENERAL };
enum {
	KEY_BLOCKS,
	ORDER_HEADS, /* key heads whose blocks take turns */
	DOUT_DTYPE,
	WIDE, /* bits: dq, dk, dv are of q's type and every row of them starts on 16 bytes */
	DQ_AT,
	PADDED_Q
}; /* numbers; DQ_AT is an offset into the workspace in 256 bytes */

/* Tiles by head size and by tier of the device. The smallest heads have blocks of few warps, several on a multiprocessor, whose phases
 * overlap. */
#define TILE_QUERIES(head, tier) ((head) > 128 && (tier) == 0 ? 32 : 64)
#define TILE_KEYS(head, tier) ((head) > 128 && (tier) == 0 ? 32 : (head) > 64 && (head) <= 128 && (tier) > 0 ? 128 : 64)
#define TILE_WARPS(head, tier) ((head) > 64 && (tier) > 0 ? 8 : 4)
#define STAGES(head, tier) ((head) <= 64 || (tier) == 2 || ((tier) == 1 && (head) <= 192) ? 2 : 1)
#define BLOCKS_PER_SM(head, tier) ((head) <= 64 ? (tier) + 1 : 1)
#define PANELS(head) (((head) + 63) / 64)
#define SHARED_BYTES(head, tier)                                                                            \
	((2 * TILE_KEYS(head, tier) + 2 * STAGES(head, tier) * TILE_QUERIES(head, tier)) * PANELS(head) * 128 + \
	 2 * TILE_KEYS(head, tier) * 128 + STAGES(head, tier) * TILE_QUERIES(head, tier) * 8)
#define ROW_LANES(head) ((head) <= 64 ? 8 : (head) <= 128 ? 16 : 32) /* lanes of a row in the first kernel */

#ifdef INGOT_HOST

#define IMAGES(type, number, head)                                                               \
	{type "_d" #head "_plain", "-DELEMENT=" #number " -DHEAD=" #head " -DCLASS=0", 1024},        \
		{type "_d" #head "_masked", "-DELEMENT=" #number " -DHEAD=" #head " -DCLASS=1", 1024}, { \
		type "_d" #head "_general", "-DELEMENT=" #number " -DHEAD=" #head " -DCLASS=2", 4096     \
	}
#define HEADS(type, number)                                                                                   \
	IMAGES(type, number, 64), IMAGES(type, number, 96), IMAGES(type, number, 128), IMAGES(type, number, 192), \
		IMAGES(type, number, 256)

static const ingot__image_variant images[] = {HEADS("f16", 2), HEADS("bf16", 3)};
static const int heads[] = {64, 96, 128, 192, 256};
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
	INGOT__REFUSE_IF(head_index(p) == HEAD_COUNT, "a head size above 256");
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

static bool wide(const ingot__problem *p, const ingot_tensor *t) {
	return t->dtype == p->q.dtype && aligned(t);
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)threads;
	ingot__gpu_args *const a = ingot__gpu_fill(p, out);
	const int head = heads[out->variant / 3 % HEAD_COUNT], tier = ingot__gpu_tier(device);
	const int64_t tile = TILE_QUERIES(head, tier), padded = divide_up(p->q_side.max_seqlen, tile) * tile,
				  rows = p->batch * p->heads_q * padded, key_heads = p->batch * p->heads_k,
				  key_blocks = divide_up(p->k_side.max_seqlen, TILE_KEYS(head, tier));
	/* Under a causal mask the first keys take longest, so that the longest blocks come first; only of as many heads as fill the
	 * device a few times, whose blocks then read the same queries at the same time. */
	const int64_t take_turns =
		p->right < INGOT__NO_BOUND && key_blocks > 0 ? divide_up(4 * (int64_t)device->multiprocessors, key_blocks) : 1;
	a->number[KEY_BLOCKS] = (int32_t)key_blocks;
	a->number[ORDER_HEADS] = (int32_t)(take_turns < key_heads ? take_turns : key_heads);
	a->number[DOUT_DTYPE] = p->dout.dtype;
	a->number[WIDE] = wide(p, &p->dq) | wide(p, &p->dk) << 1 | wide(p, &p->dv) << 2;
	a->number[PADDED_Q] = (int32_t)padded;
	a->number[DQ_AT] = (int32_t)divide_up(rows * 8, 256);
	const bool dq = p->dq.dtype != INGOT_NONE;
	out->workspace_bytes = (uint64_t)a->number[DQ_AT] * 256 + (dq ? (uint64_t)rows * (uint64_t)head * 4 : 0);
	ingot__step *step = out->step;
	if (rows > 0)
		*step++ = (ingot__step){.name = "rows",
		                        .kernel = kernels[0],
		                        .block = {256, 1, 1},
		                        .grid = {grid(divide_up(rows * ROW_LANES(head), 256)), 1, 1}};
	if (key_heads * key_blocks > 0)
		*step++ = (ingot__step){.name = "main",
		                        .kernel = kernels[1],
		                        .block = {(uint32_t)TILE_WARPS(head, tier) * 32, 1, 1},
		                        .shared_bytes = (uint32_t)SHARED_BYTES(head, tier),
		                        .grid = {grid(key_heads * key_blocks), 1, 1}};
	if (rows > 0 && dq)
		*step++ = (ingot__step){.name = "dq",
		                        .kernel = kernels[2],
		                        .block = {256, 1, 1},
		                        .grid = {grid(divide_up(rows * (head / 16), 256)), 1, 1}};
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

enum {
	GENERAL = CLASS == CLASS_GENERAL,
	BM = TILE_QUERIES(HEAD, INGOT__TIER),
	BN = TILE_KEYS(HEAD, INGOT__TIER),
	WARPS = TILE_WARPS(HEAD, INGOT__TIER),
	S = STAGES(HEAD, INGOT__TIER),
	THREADS = WARPS * 32,
	STAGE = BM * PANELS(HEAD) * 128,
	KEYS = BN * PANELS(HEAD) * 128,
	PAIRS = BN * 128,
	/* warps along the keys, of S, dP, dK and dV, and along the queries of dQ; fragments of a warp */
	KW = BN == 128 ? 4 : 2,
	XW = WARPS / KW,
	KF = BN / KW / 16,
	NF = BM / XW / 8,
	DF = HEAD / XW / 8,
	QW = WARPS == 8 && HEAD == 96 ? 4 : 2,
	CW = WARPS / QW,
	QM = BM / QW / 16,
	QF = HEAD / CW / 8,
	GROUPS = HEAD / 16 /* of 16 columns */
};
static_assert(DF % 2 == 0 && QF % 2 == 0 && NF % 2 == 0, "fragments are read in pairs");
static_assert(BM <= 64, "P and dS are one panel wide");
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

#if __CUDA_ARCH__ >= 900
enum { ADDS_FOUR = 1 };
#else
enum { ADDS_FOUR = 0 };
#endif
/* Offset of a warp's lane within 8 rows by 16 columns of the image, and how far apart its four numbers are: together where one
 * instruction adds them, else so that lanes are together. */
DEVICE int dq_lane() {
	return lane_id() * (ADDS_FOUR ? 4 : 1);
}
/* The four of `part` in row `row`: of the lane `part` of its quad, or the part'th of all lanes. */
DEVICE int dq_part(int row, int part) {
	return ADDS_FOUR ? row * 16 + part * 4 : part * 32 + row * 4;
}
DEVICE void dq_add(float *to, float x, float y, float z, float w) {
#if __CUDA_ARCH__ >= 900
	asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
#else
	atomicAdd(to, x);
	atomicAdd(to + 32, y);
	atomicAdd(to + 64, z);
	atomicAdd(to + 96, w);
#endif
}

/* A padded row's numbers, and zeros for its share of the dQ image. Rows past the length get LSE = +Inf, which makes every weight 0. */
extern "C" __global__ void __launch_bounds__(256) attn_bwd_sm80_rows(const __grid_constant__ ingot__gpu_args a) {
	enum { LANES = ROW_LANES(HEAD), AT_ONCE = 256 / LANES };
	const index_t rows = (index_t)a.batch * a.heads_q * a.number[PADDED_Q]; /* a multiple of AT_ONCE */
	const int column = thread_id() % LANES * 8;
	for (index_t n = (index_t)blockIdx.x * AT_ONCE + thread_id() / LANES; n < rows; n += (index_t)gridDim.x * AT_ONCE) {
		const int i = (int)(n % a.number[PADDED_Q]), head = (int)(n / a.number[PADDED_Q] % a.heads_q),
				  b = (int)(n / a.number[PADDED_Q] / a.heads_q);
		const span q = query_rows(a, b);
		float sum = 0;
		if (i < q.count && column < a.head_dim_v) {
			const index_t x = row_offset(a.out_stride, q, head, i) + column,
						  y = row_offset(a.dout_stride, q, head, i) + column;
			if (a.out_dtype == ELEMENT) {
				const uint4 u = *(const uint4 *)((const element *)a.out + x),
							w = *(const uint4 *)((const element *)a.dout + y);
				const element *const o = (const element *)&u, *const g = (const element *)&w;
#pragma unroll
				for (int d = 0; d < 8; d++) sum = fmaf((float)o[d], (float)g[d], sum);
			} else {
				for (int d = 0; d < 8; d++)
					sum = fmaf(load_value(a.out, x + d, a.out_dtype), (float)((const element *)a.dout)[y + d], sum);
			}
		}
#pragma unroll
		for (int m = LANES / 2; m; m >>= 1) sum += lane_xor(sum, m);
		if (column == 0) {
			float2 numbers = make_float2(INFINITY, 0.0f);
			if (i < q.count) {
				const float lse = a.lse[b * a.lse_stride[0] + head * a.lse_stride[1] + (q.start + i) * a.lse_stride[2]];
				if (lse != -INFINITY) numbers = make_float2(a.lse_base ? lse : lse * LOG2E, sum);
			}
			row_numbers(a, b, head)[i] = numbers;
		}
		if (a.dq && column < HEAD) {
			float4 *const to = (float4 *)(dq_image(a, b, head) + (index_t)i * HEAD + column);
			to[0] = to[1] = make_float4(0, 0, 0, 0);
		}
	}
}

/* A thread reads 16 columns of a row of the dQ image, which the four lanes of a quad added. */
extern "C" __global__ void __launch_bounds__(256) attn_bwd_sm80_dq(const __grid_constant__ ingot__gpu_args a) {
	const index_t parts = (index_t)a.batch * a.heads_q * a.number[PADDED_Q] * GROUPS;
	for (index_t n = (index_t)blockIdx.x * 256 + thread_id(); n < parts; n += (index_t)gridDim.x * 256) {
		const index_t eights = n / (8 * GROUPS), per_head = a.number[PADDED_Q] / 8;
		const int i = (int)(eights % per_head) * 8 + (int)(n % 8), group = (int)(n / 8 % GROUPS),
				  head = (int)(eights / per_head % a.heads_q), b = (int)(eights / per_head / a.heads_q);
		const span q = query_rows(a, b);
		if (i >= q.count) continue;
		const float *const from = dq_image(a, 0, 0) + (n - n % 8) * 16;
		float x[16];
#pragma unroll
		for (int part = 0; part < 4; part++) {
			const float4 f = *(const float4 *)(from + dq_part(n % 8, part));
			const float y[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
			for (int e = 0; e < 4; e++) {
				const int pair = ADDS_FOUR ? part : e, of = ADDS_FOUR ? e : part; /* lane of the quad, and its number */
				x[(of >> 1) * 8 + pair * 2 + (of & 1)] = y[e] * a.softmax_scale;
			}
		}
		const index_t to = row_offset(a.dq_stride, q, head, i) + group * 16;
#pragma unroll
		for (int half = 0; half < 2; half++) {
			if (group * 16 + half * 8 >= a.head_dim) continue;
			const float *const y = x + half * 8;
			if (a.number[WIDE] & 1)
				*(uint4 *)((element *)a.dq + to + half * 8) =
					make_uint4(matrix<element>::pack(y[0], y[1]), matrix<element>::pack(y[2], y[3]),
				               matrix<element>::pack(y[4], y[5]), matrix<element>::pack(y[6], y[7]));
			else
#pragma unroll
				for (int d = 0; d < 8; d++) store_value(a.dq, to + half * 8 + d, a.dq_dtype, y[d]);
		}
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

/* P and dS from S and dP. `check`: some pair may be masked, or be past the end. */
template <bool check>
DEVICE void weights(const ingot__gpu_args &a, const place_in_problem &t, float s[KF][NF][4], float g[KF][NF][4],
                    const float2 *numbers, const reader &p_to, const reader &ds_to, int i0, int j0, int keys,
                    float unit, uint64_t seed, uint64_t offset) {
#pragma unroll
	for (int c = 0; c < NF; c++) {
		const int i = i0 + c * 8 + fragment_column(0);
		const float4 n = *(const float4 *)(numbers + c * 8 + fragment_column(0)); /* of queries i and i + 1 */
#pragma unroll
		for (int m = 0; m < KF; m++) {
			float p[4], ds[4];
#pragma unroll
			for (int e = 0; e < 4; e++) {
				const int j = j0 + m * 16 + fragment_row(e), query = i + (e & 1);
				const float lse = e & 1 ? n.z : n.x, delta = e & 1 ? n.w : n.y;
				float slope = 1.0f, keep = 1.0f, x = fmaf(s[m][c][e], unit, -lse);
				bool valid = true;
				if (GENERAL)
					x = general_score(a, t, s[m][c][e], query < t.q.count ? query : 0, j < keys ? j : 0, &slope) - lse;
				if (check) {
					const index_t distance = (index_t)j - query - t.diagonal;
					valid = j < keys && query < t.q.count;
					if (CLASS != CLASS_PLAIN) valid &= distance >= -a.left && distance <= a.right;
					if (GENERAL) valid &= x != -INFINITY;
				}
				p[e] = valid ? fast_exp2(x) : 0.0f;
				if (GENERAL && (a.features & F_DROPOUT)) {
					const uint4 w = philox(seed, offset, dropout_index(a, t.b, t.head, query, j));
					const uint32_t word = (j & 3) == 0 ? w.x : (j & 3) == 1 ? w.y : (j & 3) == 2 ? w.z : w.w;
					keep = word >= a.dropout_threshold ? a.keep_scale : 0.0f;
				}
				ds[e] = valid ? p[e] * ((keep == 0.0f ? 0.0f : g[m][c][e] * keep) - delta) * slope : 0.0f;
				if (GENERAL) p[e] = keep == 0.0f ? 0.0f : p[e] * keep;
			}
#pragma unroll
			for (int half = 0; half < 2; half++) {
				store_shared(at<BN>(p_to, m * 16 + half * 8, c), matrix<element>::pack(p[2 * half], p[2 * half + 1]));
				store_shared(at<BN>(ds_to, m * 16 + half * 8, c),
				             matrix<element>::pack(ds[2 * half], ds[2 * half + 1]));
			}
		}
	}
}

/* sum[keys x columns] += pairs[keys x queries] tile[queries x columns] */
DEVICE void multiply_pairs(float sum[KF][DF][4], const reader &pairs, const reader &tile, uint32_t here) {
#pragma unroll
	for (int c = 0; c < BM / 8; c += 2) {
		uint32_t left[KF][4];
#pragma unroll
		for (int m = 0; m < KF; m++) load_matrix4(left[m], at<BN>(pairs, m * 16, c));
#pragma unroll
		for (int d = 0; d < DF; d += 2) {
			uint32_t right[4];
			load_matrix4_transposed(right, at<BM>(tile, c * 8, d * XW) + here);
#pragma unroll
			for (int m = 0; m < KF; m++) {
				matrix<element>::multiply(sum[m][d], left[m], right[0], right[1]);
				matrix<element>::multiply(sum[m][d + 1], left[m], right[2], right[3]);
			}
		}
	}
}

/* sum[keys x queries] = tile[keys x columns] other[queries x columns]^T */
DEVICE void multiply_rows(float sum[KF][NF][4], const reader &keys, const reader &queries, uint32_t here) {
#pragma unroll
	for (int m = 0; m < KF; m++)
#pragma unroll
		for (int c = 0; c < NF; c++) sum[m][c][0] = sum[m][c][1] = sum[m][c][2] = sum[m][c][3] = 0;
#pragma unroll
	for (int d = 0; d < HEAD / 8; d += 2) {
		uint32_t left[KF][4];
#pragma unroll
		for (int m = 0; m < KF; m++) load_matrix4(left[m], at<BN>(keys, m * 16, d));
#pragma unroll
		for (int c = 0; c < NF; c += 2) {
			uint32_t right[4];
			load_matrix4(right, at<BM>(queries, c * 8, d) + here);
#pragma unroll
			for (int m = 0; m < KF; m++) {
				matrix<element>::multiply(sum[m][c], left[m], right[0], right[1]);
				matrix<element>::multiply(sum[m][c + 1], left[m], right[2], right[3]);
			}
		}
	}
}

/* Rows of dK or dV from a warp's sums. */
DEVICE void store_sums(void *to, const int64_t *stride, int dtype, bool pairs, int columns, const span &k, int head,
                       int j0, int j1, int column_warp, const float sum[KF][DF][4], float scale) {
	if (!to) return;
#pragma unroll
	for (int m = 0; m < KF; m++)
#pragma unroll
		for (int half = 0; half < 2; half++) {
			const int j = j0 + m * 16 + (lane_id() >> 2) + 8 * half;
			if (j >= j1) continue;
			const index_t row = row_offset(stride, k, head, j);
#pragma unroll
			for (int d = 0; d < DF; d++) {
				const int column = ((d >> 1) * XW + column_warp) * 16 + (d & 1) * 8 + fragment_column(0);
				const float x = sum[m][d][2 * half] * scale, y = sum[m][d][2 * half + 1] * scale;
				if (column >= columns) continue;
				if (pairs) *(uint32_t *)((element *)to + row + column) = matrix<element>::pack(x, y);
				else {
					store_value(to, row + column, dtype, x);
					store_value(to, row + column + 1, dtype, y);
				}
			}
		}
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM(HEAD, INGOT__TIER))
	attn_bwd_sm80(const __grid_constant__ ingot__gpu_args a) {
	extern __shared__ __align__(128) unsigned char shared[];
	float2 *const numbers = (float2 *)(shared + 2 * KEYS + 2 * S * STAGE + 2 * PAIRS);
	const uint32_t sk = shared_address(shared), sv = sk + KEYS, sq = sv + KEYS, sdo = sq + S * STAGE,
				   sp = sdo + S * STAGE, sds = sp + PAIRS;
	const int warp = warp_id(), lane = lane_id();
	const int key_warp = warp % KW, other_warp = warp / KW, query_warp = warp % QW, column_warp = warp / QW;
	const int by_8 = (lane & 7) + (lane >> 4) * 8, by_16 = lane & 15, high = lane >> 4, middle = (lane >> 3) & 1;
	/* S and dP: both sides by rows; P and dS go out as the accumulators lie */
	const int key_row = key_warp * KF * 16;
	const reader k_rows = make_reader(sk, key_row + by_16, high), v_rows = make_reader(sv, key_row + by_16, high),
				 q_rows = make_reader(sq, other_warp * NF * 8 + by_8, middle),
				 do_rows = make_reader(sdo, other_warp * NF * 8 + by_8, middle);
	const reader p_to = make_reader(sp + (lane & 3) * 4, key_row + (lane >> 2), other_warp * NF),
				 ds_to = make_reader(sds + (lane & 3) * 4, key_row + (lane >> 2), other_warp * NF);
	/* dK and dV: pairs by rows, queries by columns; dQ: pairs, stored by keys, and keys by columns. Warps take turns along the
	 * columns, 16 each, so that what depends on the warp folds into the reader. */
	const reader p_rows = make_reader(sp, key_row + by_16, high), ds_rows = make_reader(sds, key_row + by_16, high),
				 q_columns = make_reader(sq, by_16, high | other_warp * 2),
				 do_columns = make_reader(sdo, by_16, high | other_warp * 2),
				 ds_columns = make_reader(sds, by_8, middle | query_warp * 2),
				 k_columns = make_reader(sk, by_16, high | column_warp * 2);

	const int key_blocks = a.number[KEY_BLOCKS];
	const index_t key_heads = (index_t)a.batch * a.heads_k, per_turn = (index_t)a.number[ORDER_HEADS] * key_blocks;
	for (index_t block = blockIdx.x; block < key_heads * key_blocks; block += gridDim.x) {
		const index_t head_0 = block / per_turn * a.number[ORDER_HEADS];
		const int take_turns =
			(int)(key_heads - head_0 < a.number[ORDER_HEADS] ? key_heads - head_0 : a.number[ORDER_HEADS]);
		const int j0 = (int)(block % per_turn) / take_turns * BN;
		const index_t key_head = head_0 + (int)(block % per_turn) % take_turns;
		const int head_k = (int)(key_head % a.heads_k);
		place_in_problem t;
		t.b = (int)(key_head / a.heads_k);
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
		/* queries that see some key of the block; queries that see all keys of the warp; keys that some query sees */
		const int w0 = j0 + key_row, w1 = w0 + KF * 16;
		int first = 0, last = t.q.count, all_first = 0, all_last = t.q.count, k_first = 0, k_last = t.k.count;
		if (CLASS != CLASS_PLAIN) {
			first = (int)clamp64(j0 - t.diagonal - a.right, 0, t.q.count);
			last = (int)clamp64(j1 - 1 - t.diagonal + a.left + 1, 0, t.q.count);
			all_first = (int)clamp64(w1 - 1 - t.diagonal - a.right, 0, t.q.count);
			all_last = (int)clamp64(w0 - t.diagonal + a.left + 1, 0, t.q.count);
			k_first = (int)clamp64(t.diagonal - a.left, 0, t.k.count);
			k_last = (int)clamp64(t.q.count - 1 + t.diagonal + a.right + 1, 0, t.k.count);
			if (a.right < -a.left || last < first) last = first;
		}
		if (w1 > t.k.count) all_last = all_first; /* the last keys are none */
		const int m_first = first / BM, m_last = last > first ? (last - 1) / BM : m_first - 1,
				  per_head = m_last - m_first + 1, turns = per_head * a.group;
		const uint64_t seed = GENERAL && (a.features & F_DROPOUT) ? dropout_seed(a) : 0,
					   offset = GENERAL && (a.features & F_DROPOUT) ? dropout_offset(a) : 0;
		const float unit = a.softmax_scale * LOG2E;

		float dk[KF][DF][4], dv[KF][DF][4];
#pragma unroll
		for (int m = 0; m < KF; m++)
#pragma unroll
			for (int d = 0; d < DF; d++) {
				dk[m][d][0] = dk[m][d][1] = dk[m][d][2] = dk[m][d][3] = 0;
				dv[m][d][0] = dv[m][d][1] = dv[m][d][2] = dv[m][d][3] = 0;
			}
		block_barrier(); /* the last block's tiles are done with */
		load_tile<BN>(sk, (const element *)a.k + row_offset(a.k_stride, t.k, head_k, 0), a.k_stride[2], j0, k_first,
		              k_last, a.head_dim);
		load_tile<BN>(sv, (const element *)a.v + row_offset(a.v_stride, t.k, head_k, 0), a.v_stride[2], j0, k_first,
		              k_last, a.head_dim_v);
		t.head = head_k * a.group;
		if (turns > 0) load_queries(a, t, sq, sdo, numbers, m_first * BM, first, last);
		else copy_commit();

		int tile = 0; /* of the head */
		for (int turn = 0; turn < turns; turn++) {
			const int i0 = (m_first + tile) * BM;
			const uint32_t stage = S == 2 ? turn & 1 : 0, here = stage * STAGE;
			place_in_problem next = t;
			if (++tile == per_head) tile = 0, next.head++;
			copy_wait<0>();
			block_barrier(); /* this tile is here; the last one's readers, and those of P and dS, have gone */
			if (S == 2 && turn + 1 < turns)
				load_queries(a, next, sq + (stage ^ 1) * STAGE, sdo + (stage ^ 1) * STAGE, numbers + (stage ^ 1) * BM,
				             (m_first + tile) * BM, first, last);

			float s[KF][NF][4], g[KF][NF][4];
			multiply_rows(s, k_rows, q_rows, here);
			multiply_rows(g, v_rows, do_rows, here);
			const int w_i0 = i0 + other_warp * NF * 8;
			const float2 *const w_numbers = numbers + stage * BM + other_warp * NF * 8;
			if (GENERAL || w_i0 < all_first || w_i0 + NF * 8 > all_last)
				weights<true>(a, t, s, g, w_numbers, p_to, ds_to, w_i0, w0, t.k.count, unit, seed, offset);
			else weights<false>(a, t, s, g, w_numbers, p_to, ds_to, w_i0, w0, t.k.count, unit, seed, offset);
			block_barrier(); /* P and dS are whole */

			multiply_pairs(dv, p_rows, do_columns, here);
			multiply_pairs(dk, ds_rows, q_columns, here);
			if (S == 1 && turn + 1 < turns) {
				block_barrier(); /* the tile's readers are done */
				load_queries(a, next, sq, sdo, numbers, (m_first + tile) * BM, first, last);
			}
			if (a.dq) {
				float dq[QM][QF][4];
#pragma unroll
				for (int m = 0; m < QM; m++)
#pragma unroll
					for (int d = 0; d < QF; d++) dq[m][d][0] = dq[m][d][1] = dq[m][d][2] = dq[m][d][3] = 0;
#pragma unroll
				for (int k = 0; k < BN; k += 16) {
					uint32_t left[QM][4];
#pragma unroll
					for (int m = 0; m < QM; m++) load_matrix4_transposed(left[m], at<BN>(ds_columns, k, 2 * QW * m));
#pragma unroll
					for (int d = 0; d < QF; d += 2) {
						uint32_t right[4];
						load_matrix4_transposed(right, at<BN>(k_columns, k, d * CW));
#pragma unroll
						for (int m = 0; m < QM; m++) {
							matrix<element>::multiply(dq[m][d], left[m], right[0], right[1]);
							matrix<element>::multiply(dq[m][d + 1], left[m], right[2], right[3]);
						}
					}
				}
				float *const to = dq_image(a, t.b, t.head) +
				                  ((index_t)(i0 / 8 + query_warp * 2) * GROUPS + column_warp) * 128 + dq_lane();
#pragma unroll
				for (int m = 0; m < QM; m++)
#pragma unroll
					for (int d = 0; d < QF; d += 2)
#pragma unroll
						for (int half = 0; half < 2; half++)
							dq_add(to + ((m * QW * 2 + half) * GROUPS + d / 2 * CW) * 128, dq[m][d][2 * half],
							       dq[m][d][2 * half + 1], dq[m][d + 1][2 * half], dq[m][d + 1][2 * half + 1]);
			}
			t.head = next.head;
		}
		copy_wait<0>();

		store_sums(a.dk, a.dk_stride, a.dk_dtype, a.number[WIDE] & 2, a.head_dim, t.k, head_k, w0, j1, other_warp, dk,
		           a.softmax_scale);
		store_sums(a.dv, a.dv_stride, a.dv_dtype, a.number[WIDE] & 4, a.head_dim_v, t.k, head_k, w0, j1, other_warp, dv,
		           1.0f);
	}
}
#endif
