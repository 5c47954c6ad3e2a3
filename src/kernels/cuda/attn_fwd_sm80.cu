/*
 * Attention forward on NVIDIA GPUs from sm_80 on, in 16-bit types, by mma.sync and cp.async.
 *
 * A block owns BM query rows of one head and walks the keys from the last visible tile to the first. Q stays in shared memory; K and
 * V have one tile each: V is on its way while S = Q K^T is multiplied, the next K while P V is. A warp owns 16 or 32 rows, so that its
 * softmax needs only the four lanes that share a row; P goes from the accumulators of S straight into the operand of P V.
 * Tiles lie in panels of 64 columns whose 16-byte pieces are exchanged by row, which keeps both ways of reading free of bank
 * conflicts.
 *
 * Five classes: plain (no mask, fixed length), masked (causal, window, variable length), general (any term of the formula),
 * long (as masked, of more keys than the matrix units' sums bear), paged (as long, K and V in pages of any size).
 */
#include "../gpu_args.h"

enum { CLASS_PLAIN, CLASS_MASKED, CLASS_GENERAL, CLASS_LONG, CLASS_PAGED, CLASSES };

/* Numbers: BY_X and the one after it divide by X. */
enum {
	BLOCKS_PER_HEAD,
	FOLDED,
	LAST, /* heads whose blocks come last, in an order of their own */
	BY_LAST,
	BY_GROUP = BY_LAST + 2,
	BY_GROUP_BLOCKS = BY_GROUP + 2,
	BY_HEADS = BY_GROUP_BLOCKS + 2,
	BY_PAGE = BY_HEADS + 2, /* the rows of a page */
	LAST_PAGE = BY_PAGE + 2,
	LEFT, /* the window's bounds, within FARTHEST */
	RIGHT
};

/* Rows of a sequence are below 2^29, so that sums of a row, the diagonal and a bound of the window are 32-bit numbers. */
#define MOST_ROWS (1 << 29)
#define FARTHEST ((1 << 30) - 1024)

/* Matrix units cut off what they add below the last bit of the sum, so that long sums of one sign drift: of 65,536 equal terms 0.1%
 * is lost. In more than twice FOLD_KEYS keys the sums go to memory every FOLD_KEYS, and are added there by rounding. It is a class of
 * its own because the code, run or not, costs the masked kernel registers. */
#define FOLD_KEYS 8192

/* Tiles by head size and by tier of the device. */
#define TILE_ROWS(head, tier) ((tier) == 0 && (head) > 128 ? 64 : 128)
#define TILE_WARPS(head, tier) ((tier) > 0 && (head) > 128 ? 8 : 4)
#define TILE_KEYS(head, tier, class) \
	(((head) <= 64 || ((head) > 128 && (tier) == 2)) && (class) != CLASS_GENERAL ? 128 : 64)
#define PANELS(head) (((head) + 63) / 64)
#define SHARED_BYTES(head, tier, class) \
	((TILE_ROWS(head, tier) + 2 * TILE_KEYS(head, tier, class)) * PANELS(head) * 64 * 2)

#ifdef INGOT_HOST

#define IMAGES(type, number, head)                                                              \
	{type "_d" #head "_plain", "-DELEMENT=" #number " -DHEAD=" #head " -DCLASS=0", 512},        \
		{type "_d" #head "_masked", "-DELEMENT=" #number " -DHEAD=" #head " -DCLASS=1", 1024},  \
		{type "_d" #head "_general", "-DELEMENT=" #number " -DHEAD=" #head " -DCLASS=2", 4096}, \
		{type "_d" #head "_long", "-DELEMENT=" #number " -DHEAD=" #head " -DCLASS=3", 1024}, {  \
		type "_d" #head "_paged", "-DELEMENT=" #number " -DHEAD=" #head " -DCLASS=4", 1024      \
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
	INGOT__REFUSE_IF(p->q_side.max_seqlen >= MOST_ROWS || p->k_side.max_seqlen >= MOST_ROWS,
	                 "2^29 or more queries or keys in a sequence");
	INGOT__REFUSE_IF((p->q_side.max_seqlen / 64 + 1) * p->batch * p->heads_q > 2147483647,
	                 "2^31 or more tiles of queries");
	const uint32_t terms =
		INGOT__BIAS | INGOT__BIAS_BOOL | INGOT__ALIBI | INGOT__SOFTCAP | INGOT__SINK | INGOT__DROPOUT;
	/* the other classes keep maxima of q.k itself, times a scale that must not turn or overflow them */
	const bool odd_scale = p->softmax_scale < 0 || p->softmax_scale > 0.69;
	const int class = p->features & terms || odd_scale              ? CLASS_GENERAL
	                  : p->features & INGOT__PAGED                  ? CLASS_PAGED
	                  : p->k_side.max_seqlen > 2 * FOLD_KEYS        ? CLASS_LONG
	                  : p->features & (INGOT__MASK | INGOT__VARLEN) ? CLASS_MASKED
	                                                                : CLASS_PLAIN;
	*variant = ((p->q.dtype == INGOT_BF16) * HEAD_COUNT + head_index(p)) * CLASSES + class;
	return NULL;
}

static int32_t bounded(int64_t x) {
	return (int32_t)(x < -FARTHEST ? -FARTHEST : x > FARTHEST ? FARTHEST : x);
}

/* n / d for n below 2^31 is n * magic >> shift. */
static void divisor(int64_t d, int32_t *magic_shift) {
	int bits = 0;
	if (d < 1) d = 1;
	while (((int64_t)1 << bits) < d) bits++;
	const uint64_t magic = (((uint64_t)1 << (31 + bits)) + (uint64_t)d - 1) / (uint64_t)d;
	magic_shift[0] = (int32_t)(uint32_t)magic;
	magic_shift[1] = 31 + bits;
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)threads;
	ingot__gpu_args *const a = ingot__gpu_fill(p, out);
	const int head = heads[out->variant / CLASSES % HEAD_COUNT], tier = ingot__gpu_tier(device),
			  class = out->variant % CLASSES;
	const int64_t tiles = (p->q_side.max_seqlen + TILE_ROWS(head, tier) - 1) / TILE_ROWS(head, tier);
	const int64_t blocks = tiles * p->batch * p->heads_q;
	const bool cells = p->dropout_seed_out.dtype != INGOT_NONE || p->dropout_offset_out.dtype != INGOT_NONE;
	const bool folds = p->k_side.max_seqlen > 2 * FOLD_KEYS;
	const int64_t most = 2 * (int64_t)device->multiprocessors;
	/* Where blocks take unlike times, those of the last heads, two rounds of them, run from the longest to the shortest, so that all
	 * end together; before them the heads of a group run side by side, since they read the same keys. */
	if (p->features & INGOT__MASK && blocks) {
		const int64_t all = p->batch * p->heads_q, last = (2 * most + tiles - 1) / tiles;
		a->number[LAST] = (int32_t)(last < all ? all - (all - last) / p->group * p->group : all);
	}
	divisor(a->number[LAST], &a->number[BY_LAST]);
	divisor(p->group * tiles, &a->number[BY_GROUP_BLOCKS]);
	a->number[LEFT] = bounded(p->left);
	a->number[RIGHT] = bounded(p->right);
	divisor(p->heads_q, &a->number[BY_HEADS]);
	divisor(p->group, &a->number[BY_GROUP]);
	divisor(p->pages.page_size < 1           ? 1
	        : p->pages.page_size < MOST_ROWS ? p->pages.page_size
	                                         : MOST_ROWS,
	        &a->number[BY_PAGE]);
	a->number[LAST_PAGE] = (int32_t)(p->pages.count <= 2147483647 ? p->pages.count - 1 : 2147483647);
	a->number[BLOCKS_PER_HEAD] = (int32_t)tiles;
	a->number[FOLDED] = folds;
	if (blocks == 0 && !cells) return;
	out->steps = 1;
	out->step[0] = (ingot__step){.name = "rows",
	                             .kernel = kernels[0],
	                             .block = {(uint32_t)TILE_WARPS(head, tier) * 32, 1, 1},
	                             .shared_bytes = (uint32_t)SHARED_BYTES(head, tier, class),
	                             .grid = {(uint32_t)(blocks < 1 ? 1 : blocks), 1, 1}};
	if (folds && blocks > most) out->step[0].grid[0] = (uint32_t)most;
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
	PAGED = CLASS == CLASS_PAGED,
	FOLDS = GENERAL || PAGED || CLASS == CLASS_LONG,
	BM = TILE_ROWS(HEAD, INGOT__TIER),
	BN = TILE_KEYS(HEAD, INGOT__TIER, CLASS),
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

/* What a call seldom does must not lie in the way: where the loop's instructions are not read in one run, warps wait for them. */
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

DEVICE int clamp32(int x, int low, int high) {
	return min(max(x, low), high);
}
DEVICE int quotient(int n, const int32_t *magic_shift) {
	return (int)((uint64_t)(uint32_t)n * (uint32_t)magic_shift[0] >> magic_shift[1]);
}

/* Pieces are exchanged by row in groups of 8: passes of 4 rows flip between two places. */
DEVICE uint32_t to_row(uint32_t to, int n) {
	return (PASS % 8 && n % 2 ? to ^ 64 : to) + n * PASS * 128;
}

/* A tile of K or V. A thread copies one piece of every PASS rows: `from` is that of its first row, and only rows [first, last), counted
 * from that one, are read; `bytes` is 16, or 0 past the last column. */
template <int rows>
DEVICE void copy_rows(uint32_t to, const element *from, int64_t row_stride, int first, int last, uint32_t bytes,
                      bool whole) {
	if (PIECES_2 != PIECES && thread_id() % PIECES_2 >= PIECES) return;
	if (whole) {
#pragma unroll
		for (int n = 0; n < rows / PASS; n++, from += row_stride * PASS) copy_async16_of(to_row(to, n), from, bytes);
	} else {
#pragma unroll 1
		for (int n = 0; n < rows / PASS; n++, from += row_stride * PASS)
			copy_async16_of(to_row(to, n), from, n * PASS >= first && n * PASS < last ? bytes : 0);
	}
}

/* The same from pages: each lane knows where one of the warp's rows begins, `row` elements into K or V. */
DEVICE void copy_pages(uint32_t to, const element *base, index_t row, int first, int last, uint32_t bytes, bool whole) {
	const bool mine = PIECES_2 == PIECES || thread_id() % PIECES_2 < PIECES;
	const int lane = lane_id() / PIECES_2;
	if (whole) {
#pragma unroll
		for (int n = 0; n < BN / PASS; n++) {
			const index_t at = __shfl_sync(0xffffffffu, row, n * (32 / PIECES_2) + lane);
			if (mine) copy_async16_of(to_row(to, n), base + at, bytes);
		}
	} else {
#pragma unroll 1
		for (int n = 0; n < BN / PASS; n++) {
			const index_t at = __shfl_sync(0xffffffffu, row, n * (32 / PIECES_2) + lane);
			if (mine) copy_async16_of(to_row(to, n), base + at, n * PASS >= first && n * PASS < last ? bytes : 0);
		}
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

DEVICE void store_pair(void *base, index_t at, int dtype, float x, float y) {
	if (dtype == DT_F32) *(float2 *)((float *)base + at) = make_float2(x, y);
	else if (dtype == DT_F16) *(uint32_t *)((__half *)base + at) = matrix<__half>::pack(x, y);
	else *(uint32_t *)((__half *)base + at) = matrix<__nv_bfloat16>::pack(x, y);
}

extern "C" __global__ void __launch_bounds__(THREADS) attn_fwd_sm80(const __grid_constant__ ingot__gpu_args a) {
	extern __shared__ __align__(128) unsigned char shared[];
	const uint32_t sq = shared_address(shared), sk = sq + Q_BYTES, sv = sk + K_BYTES;
	const int warp = warp_id(), lane = lane_id();
	const int tiles = a.number[BLOCKS_PER_HEAD];
	const bool folded = FOLDS && a.number[FOLDED];
	const int heads = a.batch * a.heads_q;
	/* A block that folds has several turns, to and fro over blocks from the longest to the shortest, so that all end together. */
	const index_t blocks = (index_t)tiles * heads;
	index_t block = blockIdx.x, step = 2 * (index_t)gridDim.x - 1 - 2 * blockIdx.x;
	do {
		if (block >= blocks) break;
		int b_head, tile;
		if (folded) {
			b_head = (int)(block % heads);
			tile = (int)(block / heads);
			block += step;
			step = 2 * (index_t)gridDim.x - step;
		} else {
			int from = heads - a.number[LAST], rest = (int)block - from * tiles, side = a.number[LAST];
			const int32_t *by = &a.number[BY_LAST];
			if (rest < 0) {
				side = a.group;
				by = &a.number[BY_GROUP];
				from = quotient((int)block, &a.number[BY_GROUP_BLOCKS]) * side;
				rest = (int)block - from * tiles;
			}
			tile = quotient(rest, by);
			b_head = from + rest - tile * side;
		}
		const int b = quotient(b_head, &a.number[BY_HEADS]), head = b_head - b * a.heads_q,
				  head_k = quotient(head, &a.number[BY_GROUP]);
		/* last rows first: under a causal mask they take longest */
		const int i0 = (tiles - 1 - tile) * BM;
		span q = {b, 0, a.max_seqlen_q}, k = {b, 0, a.max_seqlen_k};
		if (CLASS != CLASS_PLAIN && UNLIKELY(a.features & F_VARLEN)) q = query_rows(a, b);
		if (i0 >= q.count) continue;
		const int i1 = i0 + BM < q.count ? i0 + BM : q.count;
		const int piece = thread_id() % PIECES_2, row = thread_id() / PIECES_2;
		if (FOLDS) block_barrier(); /* the last block's tiles are done with */
		{
			const element *const from = (const element *)a.q + q.slot * a.q_stride[0] + head * a.q_stride[1] +
			                            (q.start + i0 + row) * a.q_stride[2] + piece * 8;
			const uint32_t bytes = piece * 8 < a.head_dim ? 16 : 0;
			copy_rows<BM>(sq + place<BM>(row, piece), from, a.q_stride[2], -row, i1 - i0 - row, bytes, i1 == i0 + BM);
		}
		if (CLASS != CLASS_PLAIN && (PAGED || UNLIKELY(a.features & (F_VARLEN | F_PAGED)))) k = key_rows(a, b);
		index_t pages;
		const bool paged = PAGED || (GENERAL && a.features & F_PAGED);
		const int32_t *const list = paged ? page_list(a, b, &pages) : 0;
		const int diagonal = a.bottom_right ? k.count - q.count : 0;
		/* keys that the first row sees; keys that some row sees, and keys that all rows see */
		const int low_0 = clamp32(i0 + diagonal - a.number[LEFT], -BM, k.count),
				  high_0 = clamp32(i0 + diagonal + a.number[RIGHT] + 1, -BM, k.count);
		int first = 0, last = k.count, all_first = 0, all_last = k.count;
		if (CLASS != CLASS_PLAIN) {
			first = max(low_0, 0);
			last = clamp32(high_0 + i1 - 1 - i0, 0, k.count);
			all_first = clamp32(low_0 + i1 - 1 - i0, 0, k.count);
			all_last = max(high_0, 0);
			if (a.number[RIGHT] < -a.number[LEFT] || last < first) last = first;
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

		const int n_first = first / BN, n_last = last > first ? (last - 1) / BN : n_first - 1;
		const uint32_t to = place<BN>(row, piece);
		const element *k_from = kb + head_k * a.k_stride[paged ? 2 : 1] + piece * 8,
					  *v_from = vb + head_k * a.v_stride[paged ? 2 : 1] + piece * 8;
		if (!paged) {
			k_from += k.slot * a.k_stride[0] + (k.start + n_last * BN + row) * a.k_stride[2];
			v_from += k.slot * a.v_stride[0] + (k.start + n_last * BN + row) * a.v_stride[2];
		}
		/* this lane's row of the warp's: its page and its place there */
		enum { ROWS = 32 / PIECES_2 };
		const int lane_row = warp * ROWS + lane % ROWS + lane / ROWS * PASS;
		int page = 0, slot = 0;
		const bool whole_pages = paged && a.page_size % BN == 0; /* each tile in one page */
		auto find = [&](int n) {
			const int j = min(max(n * BN + (whole_pages ? 0 : lane_row), first), last - 1),
					  at = quotient(j, &a.number[BY_PAGE]);
			page = clamp32(list[at], 0, a.number[LAST_PAGE]);
			slot = (whole_pages ? n * BN + row : j) - at * (int)a.page_size;
		};
		auto load = [&](uint32_t tile, const element *&from, const int64_t *stride, int n, int columns) {
			const int r0 = n * BN + row;
			const uint32_t bytes = piece * 8 < columns ? 16 : 0;
			const bool whole = n * BN >= first && n * BN + BN <= last;
			const index_t in_page = paged ? page * stride[0] + slot * stride[1] : 0;
			if (paged && !whole_pages) copy_pages(tile + to, from, in_page, first - r0, last - r0, bytes, whole);
			else copy_rows<BN>(tile + to, from + in_page, stride[paged ? 1 : 2], first - r0, last - r0, bytes, whole);
			if (!paged) from -= stride[2] * BN;
		};
		if (n_last >= n_first) {
			if (paged) find(n_last);
			load(sk, k_from, a.k_stride, n_last, a.head_dim);
		}
		copy_commit();

		const reader read_q = make_reader(sq, warp * MF * 16 + (lane & 15), lane >> 4);
		const reader read_k = make_reader(sk, (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
		const reader read_v = make_reader(sv, lane & 15, lane >> 4);
		int n = n_last;
		do {
			const int stop = folded && n / FOLD * FOLD > n_first ? n / FOLD * FOLD : n_first;
			for (; n >= stop; n--) {
				const int j0 = n * BN;
				copy_wait<0>();
				block_barrier(); /* K is here, and V's last reader has gone */
				load(sv, v_from, a.v_stride, n, a.head_dim_v);
				if (paged && n > n_first) find(n - 1); /* long before it is needed */
				copy_commit();

				float s[MF][NF][4];
#pragma unroll
				for (int m = 0; m < MF; m++)
#pragma unroll
					for (int c = 0; c < NF; c++) s[m][c][0] = s[m][c][1] = s[m][c][2] = s[m][c][3] = 0;
				/* each fragment is read before the products of the one before it */
				uint32_t qf[2][MF][4], kf[2][4];
#pragma unroll
				for (int m = 0; m < MF; m++) load_matrix4(qf[0][m], at<BM>(read_q, m * 16, 0));
				load_matrix4(kf[0], at<BN>(read_k, 0, 0));
#pragma unroll
				for (int d = 0; d < HEAD / 16; d++) {
#pragma unroll
					for (int c = 0; c < NF; c += 2) {
						const int now = (d * (NF / 2) + c / 2) % 2, next_d = c + 2 < NF ? d : d + 1,
								  next_c = c + 2 < NF ? c + 2 : 0;
						if (next_d < HEAD / 16) {
							if (next_d > d)
#pragma unroll
								for (int m = 0; m < MF; m++)
									load_matrix4(qf[next_d % 2][m], at<BM>(read_q, m * 16, 2 * next_d));
							load_matrix4(kf[1 - now], at<BN>(read_k, next_c * 8, 2 * next_d));
						}
#pragma unroll
						for (int m = 0; m < MF; m++) {
							matrix<element>::multiply(s[m][c], qf[d % 2][m], kf[now][0], kf[now][1]);
							matrix<element>::multiply(s[m][c + 1], qf[d % 2][m], kf[now][2], kf[now][3]);
						}
					}
				}
				copy_wait<0>();
				block_barrier(); /* V is here, and K's readers are done */
				if (n > n_first) load(sk, k_from, a.k_stride, n - 1, a.head_dim);
				copy_commit();

				/* The reference that scores are taken against follows the maximum only when it falls behind by 2^8: weights up to 256
			 * lose nothing in either 16-bit type, and in most tiles nothing is reduced across lanes and nothing is rescaled. */
				if (GENERAL || UNLIKELY(j0 < all_first || j0 + BN > all_last)) {
#pragma unroll
					for (int m = 0; m < MF; m++)
#pragma unroll
						for (int half = 0; half < 2; half++) {
							const int local = (warp * MF + m) * 16 + (lane >> 2) + 8 * half,
									  column = fragment_column(0);
							const int high = (CLASS == CLASS_PLAIN ? k.count - j0
							                                       : min(min(high_0 - j0, BN) + local, k.count - j0)) -
							                 column;
							const int low = low_0 - j0 + local - column;
#pragma unroll
							for (int c = 0; c < NF; c++)
#pragma unroll
								for (int e = 2 * half; e < 2 * half + 2; e++) {
									if (c * 8 + e % 2 >= high || (GENERAL && c * 8 + e % 2 < low))
										s[m][c][e] = -INFINITY;
									else if (GENERAL && i0 + local < i1)
										s[m][c][e] =
											general_score(a, t, s[m][c][e], i0 + local, j0 + c * 8 + column + e % 2);
								}
							if (CLASS != CLASS_PLAIN && !GENERAL && UNLIKELY(j0 < all_first)) {
#pragma unroll
								for (int c = 0; c < NF; c++)
#pragma unroll
									for (int e = 2 * half; e < 2 * half + 2; e++)
										if (c * 8 + e % 2 < low) s[m][c][e] = -INFINITY;
							}
						}
				}
				bool need = false;
				float s_best[MF][2];
#pragma unroll
				for (int m = 0; m < MF; m++) {
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
				if (UNLIKELY(__any_sync(0xffffffffu, need))) {
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
				uint32_t vf[2][4];
				load_matrix4_transposed(vf[0], at<BN>(read_v, 0, 0));
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
						const int x = c / 2 * (DF / 2) + d / 2, next = x + 1;
						if (next < NF / 2 * (DF / 2))
							load_matrix4_transposed(vf[next % 2],
							                        at<BN>(read_v, next / (DF / 2) * 16, next % (DF / 2) * 2));
#pragma unroll
						for (int m = 0; m < MF; m++) {
							matrix<element>::multiply(out[m][d], pf[m], vf[x % 2][0], vf[x % 2][1]);
							matrix<element>::multiply(out[m][d + 1], pf[m], vf[x % 2][2], vf[x % 2][3]);
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

		float factor[MF][2];
		bool blank = false;
#pragma unroll
		for (int m = 0; m < MF; m++)
#pragma unroll
			for (int half = 0; half < 2; half++) {
				const int i = i0 + (warp * MF + m) * 16 + (lane >> 2) + 8 * half;
				float sum = total[m][half];
				sum += lane_xor(sum, 1);
				sum += lane_xor(sum, 2);
				const bool none = top[m][half] == -INFINITY;
				const float high = GENERAL ? top[m][half] : top[m][half] * a.softmax_scale;
				float lse = none ? -INFINITY : high + logf(sum), by = none ? 0.0f : __fdividef(1.0f, sum);
				if (GENERAL && (a.features & F_SINK)) {
					const float sink = a.sink[head * a.sink_stride], peak = fmaxf(high, sink),
								base = peak == -INFINITY ? 0.0f : peak;
					const float fade = none ? 0.0f : expf(high - base), all = sum * fade + expf(sink - base);
					lse = peak == -INFINITY ? -INFINITY : base + logf(all);
					by = none ? 0.0f : fade / all;
					if (isnan(sink) || sink == INFINITY) lse = by = NAN;
				}
				if (isnan(sum)) lse = by = NAN; /* a NaN score, which no maximum shows */
				factor[m][half] = by;
				blank |= by == 0.0f;
				if (a.lse && i < i1 && (lane & 3) == 0)
					a.lse[b * a.lse_stride[0] + head * a.lse_stride[1] + (q.start + i) * a.lse_stride[2]] =
						a.lse_base ? lse * LOG2E : lse;
			}
		if (UNLIKELY(blank)) /* 0 whatever V holds */
#pragma unroll
			for (int m = 0; m < MF; m++)
#pragma unroll
				for (int d = 0; d < DF; d++)
#pragma unroll
					for (int e = 0; e < 4; e++)
						if (factor[m][e / 2] == 0.0f) out[m][d][e] = 0;
		if (UNLIKELY(a.out_dtype != ELEMENT)) {
#pragma unroll
			for (int m = 0; m < MF; m++)
#pragma unroll
				for (int half = 0; half < 2; half++) {
					const int i = i0 + (warp * MF + m) * 16 + (lane >> 2) + 8 * half;
					const index_t to = row_offset(a.out_stride, q, head, i) + fragment_column(0);
					if (i < i1)
#pragma unroll
						for (int d = 0; d < DF; d++)
							if (d * 8 < a.head_dim_v)
								store_pair(a.out, to + d * 8, a.out_dtype, out[m][d][2 * half] * factor[m][half],
								           out[m][d][2 * half + 1] * factor[m][half]);
				}
		} else { /* each warp reads and writes its own rows of Q's tile only */
#pragma unroll
			for (int m = 0; m < MF; m++)
#pragma unroll
				for (int half = 0; half < 2; half++)
#pragma unroll
					for (int d = 0; d < DF; d++)
						*(uint32_t *)(shared + place<BM>((warp * MF + m) * 16 + (lane >> 2) + 8 * half, d) +
						              (lane & 3) * 4) =
							matrix<element>::pack(out[m][d][2 * half] * factor[m][half],
						                          out[m][d][2 * half + 1] * factor[m][half]);
			__syncwarp();
			const int local = warp * MF * 16 + lane / PIECES_2;
			element *to = (element *)a.out + row_offset(a.out_stride, q, head, i0 + local) + piece * 8;
			const index_t more = a.out_stride[2] * (32 / PIECES_2);
			const int rows = piece * 8 < a.head_dim_v ? i1 - i0 - local : 0;
#pragma unroll
			for (int x = 0; x < MF * 16; x += 32 / PIECES_2, to += more)
				if (x < rows) *(uint4 *)to = *(const uint4 *)(shared + place<BM>(local + x, piece));
		}
	} while (folded);
	if (blockIdx.x == 0 && thread_id() == 0) {
		if (a.seed_out) *a.seed_out = dropout_seed(a);
		if (a.offset_out) *a.offset_out = dropout_offset(a);
	}
}
#endif
