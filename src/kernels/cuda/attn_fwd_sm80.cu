/*
 * Attention forward on NVIDIA GPUs from sm_80 on, in 16-bit types, by mma.sync and cp.async.
 *
 * A block owns BM query rows of one head and walks the keys from the last visible tile to the first. Q stays in shared memory; K and
 * V have one tile each: V is on its way while S = Q K^T is multiplied, the next K while P V is. A warp owns 16 or 32 rows, so that its
 * softmax needs only the four lanes that share a row; P goes from the accumulators of S straight into the operand of P V.
 * Tiles lie in panels of 64 columns whose 16-byte pieces are exchanged by row, which keeps both ways of reading free of bank
 * conflicts.
 *
 * Four classes: plain (no mask, fixed length), masked (causal, window, variable length), general (any term of the formula, pages),
 * long (as masked, of more keys than the matrix units' sums bear).
 */
#include "../gpu_args.h"

enum { CLASS_PLAIN, CLASS_MASKED, CLASS_GENERAL, CLASS_LONG, CLASSES };
enum { BLOCKS_PER_HEAD, FOLDED }; /* numbers */

/* Matrix units cut off what they add below the last bit of the sum, so that long sums of one sign drift: of 65,536 equal terms 0.1%
 * is lost. In more than twice FOLD_KEYS keys the sums go to memory every FOLD_KEYS, and are added there by rounding. It is a class of
 * its own because the code, run or not, costs the masked kernel registers. */
#define FOLD_KEYS 8192

/* Tiles by head size and by tier of the device. */
#define TILE_ROWS(head, tier) ((tier) == 0 && (head) > 128 ? 64 : 128)
#define TILE_WARPS(head, tier) ((tier) > 0 && (head) > 128 ? 8 : 4)
#define TILE_KEYS(head, tier, general) (((head) <= 64 || ((head) > 128 && (tier) == 2)) && !(general) ? 128 : 64)
#define PANELS(head) (((head) + 63) / 64)
#define SHARED_BYTES(head, tier, general) \
	((TILE_ROWS(head, tier) + 2 * TILE_KEYS(head, tier, general)) * PANELS(head) * 64 * 2)

#ifdef INGOT_HOST

#define IMAGES(type, number, head)                                                                \
	{type "_d" #head "_plain", "-DELEMENT=" #number " -DHEAD=" #head " -DCLASS=0", 512},          \
		{type "_d" #head "_masked", "-DELEMENT=" #number " -DHEAD=" #head " -DCLASS=1", 1024},    \
		{type "_d" #head "_general", "-DELEMENT=" #number " -DHEAD=" #head " -DCLASS=2", 4096}, { \
		type "_d" #head "_long", "-DELEMENT=" #number " -DHEAD=" #head " -DCLASS=3", 1024         \
	}
#define HEADS(type, number)                                                                                   \
	IMAGES(type, number, 64), IMAGES(type, number, 96), IMAGES(type, number, 128), IMAGES(type, number, 192), \
		IMAGES(type, number, 256)

static const ingot__image_variant images[] = {HEADS("f16", 2), HEADS("bf16", 3)};
static const int heads[] = {64, 96, 128, 192, 256};
enum { HEAD_COUNT = sizeof heads / sizeof *heads };
static const char *const kernels[] = {"attn_fwd_sm80", NULL};

static int head_index(const ingot__problem *p) {
	const int64_t d = p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v;
	int i = 0;
	while (i < HEAD_COUNT && heads[i] < d) i++;
	return i;
}

static const char *refuse(const ingot__problem *p, const ingot__device *device, int *variant) {
	(void)device;
	INGOT__REFUSE_IF(p->q.dtype != INGOT_F16 && p->q.dtype != INGOT_BF16,
	                 "it multiplies fp16 and bf16: q must be one of them");
	INGOT__REFUSE_IF(p->k.dtype != p->q.dtype, "k and v must be of q's type");
	INGOT__REFUSE_IF(head_index(p) == HEAD_COUNT, "a head size above 256");
	INGOT__REFUSE_IF(p->head_dim % 8 || p->head_dim_v % 8,
	                 "a head size that is no multiple of 8: rows are read in 16-byte pieces");
	INGOT__REFUSE_IF(p->features & INGOT__UNALIGNED,
	                 "a base address or stride of q, k, v or out that is no multiple of 16 bytes");
	const uint32_t terms =
		INGOT__BIAS | INGOT__BIAS_BOOL | INGOT__ALIBI | INGOT__SOFTCAP | INGOT__SINK | INGOT__DROPOUT | INGOT__PAGED;
	/* the other classes keep maxima of q.k itself, times a scale that must not turn or overflow them */
	const bool odd_scale = p->softmax_scale < 0 || p->softmax_scale > 0.69;
	const int class = p->features & terms || odd_scale              ? CLASS_GENERAL
	                  : p->k_side.max_seqlen > 2 * FOLD_KEYS        ? CLASS_LONG
	                  : p->features & (INGOT__MASK | INGOT__VARLEN) ? CLASS_MASKED
	                                                                : CLASS_PLAIN;
	*variant = ((p->q.dtype == INGOT_BF16) * HEAD_COUNT + head_index(p)) * CLASSES + class;
	return NULL;
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)threads;
	ingot__gpu_args *const a = ingot__gpu_fill(p, out);
	const int head = heads[out->variant / CLASSES % HEAD_COUNT], tier = ingot__gpu_tier(device),
			  general = out->variant % CLASSES == CLASS_GENERAL;
	const int64_t tiles = (p->q_side.max_seqlen + TILE_ROWS(head, tier) - 1) / TILE_ROWS(head, tier);
	const int64_t blocks = tiles * p->batch * p->heads_q;
	const bool cells = p->dropout_seed_out.dtype != INGOT_NONE || p->dropout_offset_out.dtype != INGOT_NONE;
	const bool folds = p->k_side.max_seqlen > 2 * FOLD_KEYS;
	const int64_t most = folds ? 2 * (int64_t)device->multiprocessors : 2147483647;
	a->number[BLOCKS_PER_HEAD] = (int32_t)tiles;
	a->number[FOLDED] = folds;
	if (blocks == 0 && !cells) return;
	out->steps = 1;
	out->step[0] = (ingot__step){.name = "rows",
	                             .kernel = kernels[0],
	                             .block = {(uint32_t)TILE_WARPS(head, tier) * 32, 1, 1},
	                             .shared_bytes = (uint32_t)SHARED_BYTES(head, tier, general),
	                             .grid = {(uint32_t)(blocks < 1      ? 1
	                                                 : blocks < most ? blocks
	                                                                 : most),
	                                      1, 1}};
	if (folds) /* a block's sums, and a maximum for each row of a quad's lanes */
		out->workspace_bytes =
			(uint64_t)out->step[0].grid[0] * (uint64_t)TILE_ROWS(head, tier) * (uint64_t)(head + 4) * 4;
}

const ingot__impl ingot__impl_attn_fwd_sm80 = {
	.name = "attn_fwd_sm80",
	.family = "cuda",
	.op = INGOT__ATTN_FWD,
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
#include "../gpu.h"

enum {
	GENERAL = CLASS == CLASS_GENERAL,
	FOLDS = GENERAL || CLASS == CLASS_LONG,
	BM = TILE_ROWS(HEAD, INGOT__TIER),
	BN = TILE_KEYS(HEAD, INGOT__TIER, GENERAL),
	WARPS = TILE_WARPS(HEAD, INGOT__TIER),
	THREADS = WARPS * 32,
	MF = BM / WARPS / 16,  /* row fragments of a warp */
	NF = BN / 8,           /* column fragments of S */
	DF = HEAD / 8,         /* column fragments of the output */
	FOLD = FOLD_KEYS / BN, /* tiles */
	Q_BYTES = BM * PANELS(HEAD) * 128,
	K_BYTES = BN * PANELS(HEAD) * 128
};
#include "../gpu_tile.h"

template <int rows>
DEVICE void load_keys(const ingot__gpu_args &a, uint32_t to, const element *base, const int64_t *stride, const span &k,
                      const int32_t *list, int head_k, int r0, int first, int last, int columns) {
	if (!GENERAL || !(a.features & F_PAGED)) {
		load_tile<rows>(to, base + k.slot * stride[0] + head_k * stride[1] + k.start * stride[2], stride[2], r0, first,
		                last, columns);
		return;
	}
	const int piece = thread_id() % PIECES_2, row = thread_id() / PIECES_2;
	if (PIECES_2 != PIECES && piece >= PIECES) return;
#pragma unroll 1
	for (int n = 0; n < rows / PASS; n++) {
		const int r = r0 + row + n * PASS;
		const bool valid = r >= first && r < last && piece * 8 < columns;
		copy_async16(to + place<rows>(row + n * PASS, piece),
		             base + (valid ? key_offset(a, stride, k, list, head_k, r) + piece * 8 : 0), valid);
	}
}

/* Adds what a thread keeps in memory, taken against earlier maxima, to its sums, or nothing the first time; then keeps the sums. */
DEVICE void fold(const ingot__gpu_args &a, float out[MF][DF][4], const float top[MF][2], float unit, bool empty,
                 bool keep) {
	float *const kept = (float *)a.workspace + (index_t)blockIdx.x * BM * (HEAD + 4) + thread_id();
#pragma unroll
	for (int m = 0; m < MF; m++)
#pragma unroll
		for (int half = 0; half < 2; half++) {
			float *const at = kept + (m * 2 + half) * (DF * 2 + 1) * THREADS;
			const float was = empty ? -INFINITY : *at, now = top[m][half];
			const float fade = was == -INFINITY ? 0.0f : fast_exp2((was - now) * unit);
			if (keep) *at = now;
#pragma unroll
			for (int x = 0; x < DF * 2; x++) {
				float *const sum = &out[m][x / 2][2 * half + x % 2];
				if (fade != 0.0f) *sum = fmaf(at[(x + 1) * THREADS], fade, *sum);
				if (keep) at[(x + 1) * THREADS] = *sum, *sum = 0;
			}
		}
}

struct terms { /* of the general class */
	int b, head;
	index_t diagonal;
	float slope, scale;
	uint64_t seed, offset;
};

/* The score of a pair that the mask lets through, in natural units; -Inf where its bias masks it. */
DEVICE float general_score(const ingot__gpu_args &a, const terms &t, float dot, int i, int j) {
	float s = dot * t.scale;
	if (a.features & F_SOFTCAP) s = a.softcap * tanhf(s / a.softcap);
	if (a.features & F_ALIBI) {
		const index_t distance = i + t.diagonal - j;
		s -= t.slope * (float)(distance < 0 ? -distance : distance);
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
	return s;
}

extern "C" __global__ void __launch_bounds__(THREADS) attn_fwd_sm80(const __grid_constant__ ingot__gpu_args a) {
	extern __shared__ __align__(128) unsigned char shared[];
	const uint32_t sq = shared_address(shared), sk = sq + Q_BYTES, sv = sk + K_BYTES;
	const int warp = warp_id(), lane = lane_id();
	const reader read_q = make_reader(sq, warp * MF * 16 + (lane & 15), lane >> 4);
	const reader read_k = make_reader(sk, (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
	const reader read_v = make_reader(sv, lane & 15, lane >> 4);
	const int tiles = a.number[BLOCKS_PER_HEAD];
	const index_t blocks = (index_t)tiles * a.batch * a.heads_q;
	if (blockIdx.x == 0 && thread_id() == 0) {
		if (a.seed_out) *a.seed_out = dropout_seed(a);
		if (a.offset_out) *a.offset_out = dropout_offset(a);
	}
	/* A block that folds has several turns, to and fro over blocks from the longest to the shortest, so that all end together. */
	const bool folded = FOLDS && a.number[FOLDED];
	index_t step = 2 * (index_t)gridDim.x - 1 - 2 * blockIdx.x;
	for (index_t block = blockIdx.x; block < blocks; block += step, step = 2 * (index_t)gridDim.x - step) {
		const int heads = a.batch * a.heads_q, b_head = (int)(folded ? block % heads : block / tiles);
		const int head = b_head % a.heads_q, b = b_head / a.heads_q, head_k = head / a.group;
		/* last rows first: under a causal mask they take longest */
		const int i0 = (tiles - 1 - (int)(folded ? block / heads : block % tiles)) * BM;
		span q, k;
		if (CLASS == CLASS_PLAIN) {
			q.slot = k.slot = b;
			q.start = k.start = 0;
			q.count = a.max_seqlen_q;
			k.count = a.max_seqlen_k;
		} else {
			q = query_rows(a, b);
			k = key_rows(a, b);
		}
		if (i0 >= q.count) continue;
		const int i1 = i0 + BM < q.count ? i0 + BM : q.count;
		index_t pages;
		const int32_t *list = GENERAL && (a.features & F_PAGED) ? page_list(a, b, &pages) : 0;
		const index_t diagonal = a.bottom_right ? (index_t)k.count - q.count : 0;
		/* keys that some row sees, and keys that all rows see */
		int first = 0, last = k.count, all_first = 0, all_last = k.count;
		if (CLASS != CLASS_PLAIN) {
			first = (int)clamp64(i0 + diagonal - a.left, 0, k.count);
			last = (int)clamp64(i1 - 1 + diagonal + a.right + 1, 0, k.count);
			all_first = (int)clamp64(i1 - 1 + diagonal - a.left, 0, k.count);
			all_last = (int)clamp64(i0 + diagonal + a.right + 1, 0, k.count);
			if (a.right < -a.left || last < first) last = first;
		}
		terms t;
		if (GENERAL) {
			t.b = b;
			t.head = head;
			t.diagonal = diagonal;
			t.scale = a.softmax_scale;
			t.slope = a.features & F_ALIBI ? a.alibi[b * a.alibi_stride[0] + head * a.alibi_stride[1]] : 0.0f;
			t.seed = a.features & F_DROPOUT ? dropout_seed(a) : 0;
			t.offset = a.features & F_DROPOUT ? dropout_offset(a) : 0;
		}
		const element *const qb =
			(const element *)a.q + q.slot * a.q_stride[0] + head * a.q_stride[1] + q.start * a.q_stride[2];
		const element *const kb = (const element *)a.k, *const vb = (const element *)a.v;
		const float unit = GENERAL ? LOG2E : a.softmax_scale * LOG2E; /* from scores to exponents of two */
		const float slack = 8.0f / unit;

		float out[MF][DF][4], top[MF][2], total[MF][2];
#pragma unroll
		for (int m = 0; m < MF; m++) {
			top[m][0] = top[m][1] = -INFINITY;
			total[m][0] = total[m][1] = 0;
#pragma unroll
			for (int d = 0; d < DF; d++) out[m][d][0] = out[m][d][1] = out[m][d][2] = out[m][d][3] = 0;
		}

		block_barrier(); /* the last block's tiles are done with */
		load_tile<BM>(sq, qb, a.q_stride[2], i0, 0, q.count, a.head_dim);
		const int n_first = first / BN, n_last = last > first ? (last - 1) / BN : n_first - 1;
		if (n_last >= n_first)
			load_keys<BN>(a, sk, kb, a.k_stride, k, list, head_k, n_last * BN, first, last, a.head_dim);
		copy_commit();

		int n = n_last;
		do {
			const int stop = folded && n / FOLD * FOLD > n_first ? n / FOLD * FOLD : n_first;
			for (; n >= stop; n--) {
				const int j0 = n * BN;
				copy_wait<0>();
				block_barrier(); /* K is here, and V's last reader has gone */
				load_keys<BN>(a, sv, vb, a.v_stride, k, list, head_k, j0, first, last, a.head_dim_v);
				copy_commit();

				float s[MF][NF][4];
#pragma unroll
				for (int m = 0; m < MF; m++)
#pragma unroll
					for (int c = 0; c < NF; c++) s[m][c][0] = s[m][c][1] = s[m][c][2] = s[m][c][3] = 0;
#pragma unroll
				for (int d = 0; d < HEAD / 16; d++) {
					uint32_t qf[MF][4];
#pragma unroll
					for (int m = 0; m < MF; m++) load_matrix4(qf[m], at<BM>(read_q, m * 16, 2 * d));
#pragma unroll
					for (int c = 0; c < NF; c += 2) {
						uint32_t kf[4];
						load_matrix4(kf, at<BN>(read_k, c * 8, 2 * d));
#pragma unroll
						for (int m = 0; m < MF; m++) {
							matrix<element>::multiply(s[m][c], qf[m], kf[0], kf[1]);
							matrix<element>::multiply(s[m][c + 1], qf[m], kf[2], kf[3]);
						}
					}
				}
				copy_wait<0>();
				block_barrier(); /* V is here, and K's readers are done */
				if (n > n_first)
					load_keys<BN>(a, sk, kb, a.k_stride, k, list, head_k, j0 - BN, first, last, a.head_dim);
				copy_commit();

				/* The reference that scores are taken against follows the maximum only when it falls behind by 2^8: weights up to 256
			 * lose nothing in either 16-bit type, and in most tiles nothing is reduced across lanes and nothing is rescaled. */
				const bool whole = j0 >= all_first && j0 + BN <= all_last;
				bool need = false;
				float s_best[MF][2];
#pragma unroll
				for (int m = 0; m < MF; m++) {
					const int row = i0 + (warp * MF + m) * 16 + (lane >> 2);
					if (GENERAL || !whole) {
#pragma unroll
						for (int half = 0; half < 2; half++) {
							const int i = row + 8 * half;
							int low = 0, high = k.count;
							if (CLASS != CLASS_PLAIN) {
								low = (int)clamp64(i + diagonal - a.left, 0, k.count);
								high = (int)clamp64(i + diagonal + a.right + 1, 0, k.count);
							}
#pragma unroll
							for (int c = 0; c < NF; c++)
#pragma unroll
								for (int e = 2 * half; e < 2 * half + 2; e++) {
									const int j = j0 + c * 8 + fragment_column(e);
									if (j < low || j >= high) s[m][c][e] = -INFINITY;
									else if (GENERAL && i < i1) s[m][c][e] = general_score(a, t, s[m][c][e], i, j);
								}
						}
					}
#pragma unroll
					for (int half = 0; half < 2; half++) {
						float best = -INFINITY;
#pragma unroll
						for (int c = 0; c < NF; c++)
							best = fmaxf(best, fmaxf(s[m][c][2 * half], s[m][c][2 * half + 1]));
						need |= best > top[m][half] + slack;
						s_best[m][half] = best;
					}
				}
				if (__any_sync(0xffffffffu, need)) {
#pragma unroll
					for (int m = 0; m < MF; m++)
#pragma unroll
						for (int half = 0; half < 2; half++) {
							float best = s_best[m][half];
							best = fmaxf(best, lane_xor(best, 1));
							best = fmaxf(best, lane_xor(best, 2));
							const float was = top[m][half];
							if (!(best > was + slack)) best = was;
							const float fade = was == best ? 1.0f : fast_exp2((was - best) * unit);
							top[m][half] = best;
							total[m][half] *= fade;
#pragma unroll
							for (int d = 0; d < DF; d++) {
								out[m][d][2 * half] *= fade;
								out[m][d][2 * half + 1] *= fade;
							}
						}
				}
#pragma unroll
				for (int m = 0; m < MF; m++) {
					const int row = i0 + (warp * MF + m) * 16 + (lane >> 2);
					(void)row;
#pragma unroll
					for (int half = 0; half < 2; half++) {
						const float base = top[m][half] == -INFINITY ? 0.0f : top[m][half], shift = base * unit;
						float sum = 0;
#pragma unroll
						for (int c = 0; c < NF; c++)
#pragma unroll
							for (int e = 2 * half; e < 2 * half + 2; e++) {
								const float x = s[m][c][e];
								s[m][c][e] = GENERAL ? fast_exp2((x - base) * unit) : fast_exp2(fmaf(x, unit, -shift));
								sum += s[m][c][e];
							}
						total[m][half] += sum;
						if (GENERAL && (a.features & F_DROPOUT)) {
							const int i = row + 8 * half;
#pragma unroll 1
							for (int c = 0; c < NF; c++) {
								/* this lane's two columns are half of one draw */
								const int j = j0 + c * 8 + fragment_column(0);
								const uint4 w = philox(t.seed, t.offset, dropout_index(a, b, head, i, j));
								const uint32_t w0 = j & 2 ? w.z : w.x, w1 = j & 2 ? w.w : w.y;
#pragma unroll
								for (int x = 0; x < NF; x++)
									if (x == c) {
										s[m][x][2 * half] =
											w0 >= a.dropout_threshold ? s[m][x][2 * half] * a.keep_scale : 0.0f;
										s[m][x][2 * half + 1] =
											w1 >= a.dropout_threshold ? s[m][x][2 * half + 1] * a.keep_scale : 0.0f;
									}
							}
						}
					}
				}
#pragma unroll
				for (int c = 0; c < NF; c += 2) {
					uint32_t pf[MF][4];
#pragma unroll
					for (int m = 0; m < MF; m++) {
						pf[m][0] = matrix<element>::pack(s[m][c][0], s[m][c][1]);
						pf[m][1] = matrix<element>::pack(s[m][c][2], s[m][c][3]);
						pf[m][2] = matrix<element>::pack(s[m][c + 1][0], s[m][c + 1][1]);
						pf[m][3] = matrix<element>::pack(s[m][c + 1][2], s[m][c + 1][3]);
					}
#pragma unroll
					for (int d = 0; d < DF; d += 2) {
						uint32_t vf[4];
						load_matrix4_transposed(vf, at<BN>(read_v, c * 8, d));
#pragma unroll
						for (int m = 0; m < MF; m++) {
							matrix<element>::multiply(out[m][d], pf[m], vf[0], vf[1]);
							matrix<element>::multiply(out[m][d + 1], pf[m], vf[2], vf[3]);
						}
					}
				}
			}
			if (FOLDS && n >= n_first) fold(a, out, top, unit, n + 1 + FOLD > n_last, true);
		} while (FOLDS && n >= n_first);
		copy_wait<0>();
		if (n_last < n_first)
			block_barrier(); /* Q is here, which the products else have waited for: its tile takes the output */
		if (folded && n_last / FOLD * FOLD > n_first) fold(a, out, top, unit, false, false);

		/* Each warp reads and writes its own rows of Q's tile only. */
		const bool narrow = a.out_dtype == ELEMENT;
#pragma unroll
		for (int m = 0; m < MF; m++)
#pragma unroll
			for (int half = 0; half < 2; half++) {
				const int local = (warp * MF + m) * 16 + (lane >> 2) + 8 * half, i = i0 + local;
				float sum = total[m][half];
				sum += lane_xor(sum, 1);
				sum += lane_xor(sum, 2);
				const bool none = top[m][half] == -INFINITY;
				const float high = GENERAL ? top[m][half] : top[m][half] * a.softmax_scale;
				float lse = none ? -INFINITY : high + logf(sum), factor = none ? 0.0f : 1.0f / sum;
				if (GENERAL && (a.features & F_SINK)) {
					const float sink = a.sink[head * a.sink_stride], peak = fmaxf(high, sink),
								base = peak == -INFINITY ? 0.0f : peak;
					const float fade = none ? 0.0f : expf(high - base), all = sum * fade + expf(sink - base);
					lse = peak == -INFINITY ? -INFINITY : base + logf(all);
					factor = none ? 0.0f : fade / all;
					if (isnan(sink) || sink == INFINITY) lse = factor = NAN;
				}
				if (isnan(sum)) lse = factor = NAN; /* a NaN score, which no maximum shows */
				if (a.lse && i < i1 && (lane & 3) == 0)
					a.lse[b * a.lse_stride[0] + head * a.lse_stride[1] + (q.start + i) * a.lse_stride[2]] =
						a.lse_base ? lse * LOG2E : lse;
#pragma unroll
				for (int d = 0; d < DF; d++) {
					const float x = factor == 0.0f ? 0.0f : out[m][d][2 * half] * factor,
								y = factor == 0.0f ? 0.0f : out[m][d][2 * half + 1] * factor;
					if (narrow)
						*(uint32_t *)(shared + place<BM>(local, d) + (lane & 3) * 4) = matrix<element>::pack(x, y);
					else if (i < i1) {
						const int column = d * 8 + fragment_column(0);
						const index_t to = row_offset(a.out_stride, q, head, i);
						if (column < a.head_dim_v) store_value(a.out, to + column, a.out_dtype, x);
						if (column + 1 < a.head_dim_v) store_value(a.out, to + column + 1, a.out_dtype, y);
					}
				}
			}
		if (narrow) {
			__syncwarp();
			const int pieces = a.head_dim_v / 8;
			for (int at = lane; at < MF * 16 * PIECES; at += 32) {
				const int local = warp * MF * 16 + at / PIECES, piece = at % PIECES, i = i0 + local;
				if (i < i1 && piece < pieces)
					*(uint4 *)((element *)a.out + row_offset(a.out_stride, q, head, i) + piece * 8) =
						*(const uint4 *)(shared + place<BM>(local, piece));
			}
		}
	}
}
#endif
