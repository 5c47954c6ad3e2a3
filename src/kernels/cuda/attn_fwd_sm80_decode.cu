/*
 * Attention forward for few query rows on NVIDIA GPUs from sm_80 on, where the time goes into reading K and V: each key is read once
 * for the query rows of all heads that share it, which are packed as the rows of one 16-row tile.
 *
 * The keys that a tile sees are cut into parts, one a block, so that a single sequence keeps all multiprocessors busy. Within a
 * part every warp takes tiles of keys of its own through a ring of its own in shared memory, and waits for nobody: some 64 KB are on
 * their way into a multiprocessor at any time. The block merges its warps; parts, if there are several, go to the workspace as
 * unnormalised sums with their maxima, and a second step merges them in order. How many parts there may be follows from sizes
 * that the host knows, so that a graph can be replayed with other lengths; how many keys each has, from the sequence's own.
 *
 * 8-bit keys and values become 16-bit numbers in registers. Their fragments come in another order of columns: Q is loaded in the
 * same order, and the output put right when it is stored.
 */
#include "../gpu_args.h"

enum { PARTS, TILES }; /* numbers: parts of a tile at most, tiles of a key head */

/* Of a key head. Four tiles read the keys four times, from the second-level cache. */
#define ROWS_MOST 64
#define TILE_ROWS 16
#define PARTS_MOST 256
/* Matrix units cut off what they add below the last bit of a sum: a warp's sums are of no more keys than this. */
#define KEYS_MOST 8192
#define STAGES 3
#define BLOCK_WARPS(head) ((head) <= 128 ? 4 : 2)
#define STAGE_BYTES(head) ((head) <= 128 ? 8192 : 16384) /* K and V of a tile of keys */
#define TILE_KEYS(head, size) (STAGE_BYTES(head) / 2 / ((head) * (size)))
#define MERGE_THREADS(parts) ((parts) > 16 ? 256 : 128)

#ifdef INGOT_HOST

/* spills: a few registers round the exact division after the loop over keys; 256 columns fill the registers */
#define IMAGES(type, number)                                                    \
	{type "_d64", "-DELEMENT=" #number " -DHEAD=64 -DKEY=" #number, 64},        \
		{type "_d128", "-DELEMENT=" #number " -DHEAD=128 -DKEY=" #number, 64},  \
		{type "_d256", "-DELEMENT=" #number " -DHEAD=256 -DKEY=" #number, 256}, \
		{type "_d128_e4m3", "-DELEMENT=" #number " -DHEAD=128 -DKEY=4", 64},    \
		{type "_d256_e4m3", "-DELEMENT=" #number " -DHEAD=256 -DKEY=4", 256},   \
		{type "_d128_e5m2", "-DELEMENT=" #number " -DHEAD=128 -DKEY=5", 64}, {  \
		type "_d256_e5m2", "-DELEMENT=" #number " -DHEAD=256 -DKEY=5", 256      \
	}

static const ingot__image_variant images[] = {IMAGES("f16", 2), IMAGES("bf16", 3)};
static const struct {
	int head, size;
} shapes[] = {{64, 2}, {128, 2}, {256, 2}, {128, 1}, {256, 1}, {128, 1}, {256, 1}};
enum { SHAPES = sizeof shapes / sizeof *shapes, E4M3_128 = 3, E5M2_128 = 5 };
static const char *const kernels[] = {"attn_fwd_sm80_decode", "attn_fwd_sm80_decode_merge", NULL};

static int64_t tiles_of(const ingot__problem *p) {
	return (p->q_side.max_seqlen * p->group + TILE_ROWS - 1) / TILE_ROWS;
}

static int64_t divide_up(int64_t x, int64_t by) {
	return (x + by - 1) / by;
}

/* Keys that a tile can see at most. */
static int64_t keys_of(const ingot__problem *p) {
	const int64_t width = p->left + p->right + 1 + p->q_side.max_seqlen;
	if (width >= p->k_side.max_seqlen) return p->k_side.max_seqlen;
	return width < 0 ? 0 : width;
}

static const char *refuse(const ingot__problem *p, const ingot__device *device, int *variant) {
	(void)device;
	INGOT__REFUSE_IF(p->q.dtype != INGOT_F16 && p->q.dtype != INGOT_BF16,
	                 "it multiplies fp16 and bf16: q must be one of them");
	INGOT__REFUSE_IF(p->k.dtype != p->q.dtype && p->k.dtype != INGOT_F8_E4M3 && p->k.dtype != INGOT_F8_E5M2,
	                 "k and v are FNUZ types, which the device lacks");
	const int64_t d = p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v;
	const bool narrow = p->k.dtype != p->q.dtype;
	INGOT__REFUSE_IF(d > 256, "a head size above 256");
	INGOT__REFUSE_IF(p->head_dim % 8 || p->head_dim_v % 8,
	                 "a head size that is no multiple of 8: rows are read in 16-byte pieces");
	INGOT__REFUSE_IF(narrow && (p->head_dim % 16 || p->head_dim_v % 16),
	                 "8-bit keys with a head size that is no multiple of 16: rows are read in 16-byte pieces");
	INGOT__REFUSE_IF(p->features & INGOT__UNALIGNED,
	                 "a base address or stride of q, k, v or out that is no multiple of 16 bytes");
	INGOT__REFUSE_IF(p->features & (INGOT__BIAS | INGOT__BIAS_BOOL | INGOT__DROPOUT),
	                 "bias and dropout are left to the other kernels");
	INGOT__REFUSE_IF(p->dropout_seed_out.dtype != INGOT_NONE || p->dropout_offset_out.dtype != INGOT_NONE,
	                 "writing back the dropout seed is left to the other kernels");
	INGOT__REFUSE_IF(p->q_side.max_seqlen > ROWS_MOST / p->group,
	                 "more than 64 query rows share a key head: kernels with larger tiles read keys less often");
	INGOT__REFUSE_IF(p->batch * p->heads_k * tiles_of(p) > 1 << 22, "more than 4,194,304 key heads in the batch");
	INGOT__REFUSE_IF(keys_of(p) > (int64_t)PARTS_MOST * 2 * KEYS_MOST, "more than 4,194,304 keys");
	const int wide = d > 128;
	*variant = (p->q.dtype == INGOT_BF16) * SHAPES + (!narrow                       ? wide + (d > 64)
	                                                  : p->k.dtype == INGOT_F8_E4M3 ? E4M3_128 + wide
	                                                                                : E5M2_128 + wide);
	return NULL;
}

/* Parts of a tile, from sizes alone. A block costs, besides its keys, about as much as `start` more of them, and the merge about
 * as much as `merge`. */
static int64_t parts_of(const ingot__problem *p, const ingot__device *device, int head, int size) {
	enum { WAVES = 8, INVARIANT_KEYS = 1024, VARLEN_KEYS = 4096, VARLEN_WAVES = 16 };
	const int64_t keys = keys_of(p), pairs = p->batch * p->heads_k * tiles_of(p);
	const int64_t unit = (int64_t)BLOCK_WARPS(head) * TILE_KEYS(head, size), start = unit, merge = 2 * unit;
	const int64_t slots = (int64_t)device->multiprocessors * (ingot__gpu_tier(device) == 2 ? 2 : 1);
	int64_t parts = 1;
	if (p->batch_invariant) {
		parts = divide_up(keys, INVARIANT_KEYS);
	} else {
		int64_t least = INT64_MAX;
		for (int64_t waves = 1; waves <= WAVES; waves++) {
			int64_t n = waves * slots / pairs;
			if (n > divide_up(keys, unit)) n = divide_up(keys, unit);
			if (n < 1) n = 1;
			const int64_t each = divide_up(divide_up(keys, n), unit) * unit;
			const int64_t cost = divide_up(pairs * n, slots) * (each + start) + (n > 1 ? merge : 0);
			if (cost < least) least = cost, parts = n;
		}
		/* sequences may differ in length: smaller parts, so that the longest does not end alone */
		if (p->features & (INGOT__VARLEN | INGOT__PAGED)) {
			const int64_t wanted = divide_up(keys, VARLEN_KEYS), able = VARLEN_WAVES * slots / pairs;
			const int64_t more = wanted < able ? wanted : able;
			if (more > parts) parts = more;
		}
	}
	const int64_t least = divide_up(keys, (int64_t)BLOCK_WARPS(head) * KEYS_MOST);
	if (parts < least) parts = least;
	return parts < 1 ? 1 : parts > PARTS_MOST ? PARTS_MOST : parts;
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)threads;
	ingot__gpu_args *const a = ingot__gpu_fill(p, out);
	const int head = shapes[out->variant % SHAPES].head, size = shapes[out->variant % SHAPES].size;
	const int64_t rows = p->batch * p->heads_q * p->q_side.max_seqlen;
	if (rows == 0) return;
	const int64_t parts = parts_of(p, device, head, size);
	a->number[PARTS] = (int32_t)parts;
	a->number[TILES] = (int32_t)tiles_of(p);
	out->steps = 1;
	out->step[0] = (ingot__step){.name = parts > 1 ? "parts" : "whole",
	                             .kernel = kernels[0],
	                             .block = {(uint32_t)BLOCK_WARPS(head) * 32, 1, 1},
	                             .shared_bytes = (uint32_t)(BLOCK_WARPS(head) * STAGES * STAGE_BYTES(head)),
	                             .grid = {(uint32_t)(p->batch * p->heads_k * tiles_of(p) * parts), 1, 1}};
	if (parts == 1) return;
	/* of each row and part the sums, and their maximum and total */
	out->workspace_bytes = (uint64_t)(rows * parts * (p->head_dim_v + 2)) * 4;
	out->steps = 2;
	out->step[1] = (ingot__step){.name = "merge",
	                             .kernel = kernels[1],
	                             .block = {MERGE_THREADS(parts), 1, 1},
	                             .grid = {(uint32_t)rows, 1, 1},
	                             .early = ingot__gpu_tier(device) == 2};
}

const ingot__impl ingot__impl_attn_fwd_sm80_decode = {
	.name = "attn_fwd_sm80_decode",
	.family = "cuda",
	.op = INGOT__ATTN_FWD,
	.device = INGOT_CUDA,
	.arch = "",
	.rank = 15,
	.variant_count = sizeof images / sizeof *images,
	.images = images,
	.kernels = kernels,
	.refuse = refuse,
	.plan = plan,
};

#else
#include "../gpu.h"

enum {
	NARROW = KEY != ELEMENT,
	SIZE = NARROW ? 1 : 2,
	WARPS = BLOCK_WARPS(HEAD),
	THREADS = WARPS * 32,
	KEYS = TILE_KEYS(HEAD, SIZE),
	TILE_BYTES = STAGE_BYTES(HEAD) / 2,
	RING_BYTES = STAGES * 2 * TILE_BYTES,
	KF = KEYS / 8, /* column fragments of S */
	DF = HEAD / 8, /* column fragments of the output */
	ROW_PIECES = HEAD * SIZE / 16,
	ROWS_AT_ONCE = 32 / ROW_PIECES,
	COLUMNS_4 = HEAD / 4,
	PITCH = HEAD + 8, /* floats between rows of a warp's result: rows of a fragment then differ in banks */
	STATS = TILE_ROWS * PITCH
};
#include "../gpu_tile.h"

#if KEY == ELEMENT
typedef element weight; /* what P and V are multiplied as */
#else
typedef __half weight; /* which holds every 8-bit number */
#endif

/* Rows of a tile, the keys that some of them sees, and the parts that these make. */
struct share {
	span q, k;
	index_t diagonal;
	int row, rows, first, last, each, parts;
};

DEVICE share make_share(const ingot__gpu_args &a, int b, int tile) {
	share t;
	t.q = query_rows(a, b);
	t.k = key_rows(a, b);
	t.diagonal = a.bottom_right ? (index_t)t.k.count - t.q.count : 0;
	t.row = tile * TILE_ROWS;
	t.rows = t.q.count * a.group - t.row;
	if (t.rows > TILE_ROWS) t.rows = TILE_ROWS;
	const int i0 = t.row / a.group, i1 = (t.row + t.rows - 1) / a.group;
	t.first = (int)clamp64(i0 + t.diagonal - a.left, 0, t.k.count);
	t.last = (int)clamp64(i1 + t.diagonal + a.right + 1, 0, t.k.count);
	if (a.right < -a.left || t.last < t.first) t.last = t.first;
	const int unit = WARPS * KEYS, keys = t.last - t.first, even = (keys + a.number[PARTS] - 1) / a.number[PARTS];
	t.each = even > unit ? (even + unit - 1) / unit * unit : unit;
	t.parts = keys ? (keys + t.each - 1) / t.each : 1;
	return t;
}

/* ---- a warp's reading of K and V ------------------------------------------------------------------------------------------ */

struct source {
	const unsigned char *k, *v; /* this lane's piece of key 0, of page 0 where there are pages */
	bool k_column, v_column;    /* whether there is such a piece */
	const int32_t *list;
	int page, slot; /* of a key of the tile that is loaded next, looked up a tile ahead */
};

DEVICE void find_page(const ingot__gpu_args &a, source &s, int j, int end) {
	if (!s.list || j >= end) return;
	int at = j + lane_id() % KEYS;
	if (at >= end) at = end - 1;
	s.page = s.list[at / (int)a.page_size];
	s.slot = at % (int)a.page_size;
}

/* Keys [j, j + KEYS) of K, and behind them of V; those from `end` on as zeros. */
DEVICE void load_keys(const ingot__gpu_args &a, const source &s, uint32_t to, int j, int end) {
	const int row = lane_id() / ROW_PIECES, piece = lane_id() % ROW_PIECES;
	index_t k_page = 0, v_page = 0;
	if (s.list) {
		const index_t page = clamp64(s.page, 0, a.page_count - 1);
		k_page = (page * a.k_stride[0] + s.slot * a.k_stride[1]) * SIZE;
		v_page = (page * a.v_stride[0] + s.slot * a.v_stride[1]) * SIZE;
	}
#pragma unroll
	for (int n = 0; n < KEYS / ROWS_AT_ONCE; n++) {
		const int r = row + n * ROWS_AT_ONCE;
		const bool valid = j + r < end;
		index_t k_at, v_at;
		if (s.list) {
			k_at = __shfl_sync(0xffffffffu, k_page, r);
			v_at = __shfl_sync(0xffffffffu, v_page, r);
		} else {
			k_at = (j + r) * (a.k_stride[2] * SIZE);
			v_at = (j + r) * (a.v_stride[2] * SIZE);
		}
		const uint32_t at = to + place<KEYS>(r, piece);
		copy_async16(at, s.k + (valid ? k_at : 0), valid && s.k_column);
		copy_async16(at + TILE_BYTES, s.v + (valid ? v_at : 0), valid && s.v_column);
	}
}

/* ---- 8-bit numbers ------------------------------------------------------------------------------------------------------------ */

/* Two numbers, in the low half of x, as fp16. */
DEVICE uint32_t half_pair(uint32_t x) {
#if KEY == 5
	return __byte_perm(x, 0, 0x1404);
#elif defined __CUDA_ARCH__ && __CUDA_ARCH__ < 890
	/* fp16 that shares their bits holds 2^-8 of them; 0x7f and 0xff are NaN */
	const uint32_t wide = __byte_perm(x, 0, 0x1404), magnitude = wide >> 1 & 0x3f803f80;
	const uint32_t shared_bits = magnitude | (wide & 0x80008000), scale = 0x5c005c00, nan = 0x3f803f80;
	const __half2 y = __hmul2(*(const __half2 *)&shared_bits, *(const __half2 *)&scale);
	return *(const uint32_t *)&y | __vcmpeq2(magnitude, nan);
#else
	const __half2_raw y = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)x, __NV_E4M3);
	return *(const uint32_t *)&y;
#endif
}

DEVICE uint32_t element_pair(uint32_t x) {
	const uint32_t y = half_pair(x);
#if ELEMENT == 2
	return y;
#else
	const float2 f = __half22float2(*(const __half2 *)&y);
	return matrix<element>::pack(f.x, f.y);
#endif
}

/* ---- products ------------------------------------------------------------------------------------------------------------------ */

/* S += Q K^T over a tile. */
DEVICE void add_scores(float s[KF][4], const uint32_t q[HEAD / 16][4], const reader &keys) {
#pragma unroll
	for (int d = 0; d < HEAD / 16; d++)
#pragma unroll
		for (int c = 0; c < KF; c += 2) {
			uint32_t f[4];
			if (!NARROW) {
				load_matrix4(f, at<KEYS>(keys, c * 8, 2 * d));
				matrix<element>::multiply(s[c], q[d], f[0], f[1]);
				matrix<element>::multiply(s[c + 1], q[d], f[2], f[3]);
			} else if (d % 2 == 0) {
				/* a piece is all of 16 columns: a lane has four neighbours of them */
				load_matrix4(f, at<KEYS>(keys, c * 8, d));
#pragma unroll
				for (int x = 0; x < 4; x++)
					matrix<element>::multiply(s[c + x / 2], q[d + x % 2], element_pair(f[x]), element_pair(f[x] >> 16));
			}
		}
}

/* out += P V over a tile. */
DEVICE void add_values(float out[DF][4], const float s[KF][4], const reader &values) {
#pragma unroll
	for (int c = 0; c < KF; c += 2) {
		uint32_t p[4];
		p[0] = matrix<weight>::pack(s[c][0], s[c][1]);
		p[1] = matrix<weight>::pack(s[c][2], s[c][3]);
		p[2] = matrix<weight>::pack(s[c + 1][0], s[c + 1][1]);
		p[3] = matrix<weight>::pack(s[c + 1][2], s[c + 1][3]);
#pragma unroll
		for (int d = 0; d < DF; d += NARROW ? 4 : 2) {
			uint32_t f[4];
			if (!NARROW) {
				load_matrix4_transposed(f, at<KEYS>(values, c * 8, d));
				matrix<weight>::multiply(out[d], p, f[0], f[1]);
				matrix<weight>::multiply(out[d + 1], p, f[2], f[3]);
			} else {
				/* pairs of columns travel together: even ones make one fragment, odd ones the next */
				load_matrix4_transposed(f, at<KEYS>(values, c * 8, d / 2));
#pragma unroll
				for (int x = 0; x < 2; x++)
#pragma unroll
					for (int odd = 0; odd < 2; odd++)
						matrix<weight>::multiply(out[d + 2 * x + odd], p,
						                         half_pair(__byte_perm(f[2 * x], 0, odd ? 0x4431 : 0x4420)),
						                         half_pair(__byte_perm(f[2 * x + 1], 0, odd ? 0x4431 : 0x4420)));
			}
		}
	}
}

/* ---- results -------------------------------------------------------------------------------------------------------------------- */

DEVICE float weight_of(float top, float high) {
	return top == -INFINITY ? 0.0f : fast_exp2((top - high) * LOG2E);
}

/* Adds a part's sums; selects, since one of no weight may hold anything. */
DEVICE void add_weighted(float4 &to, float w, const float4 &x) {
	if (w == 0.0f) return;
	to.x += w * x.x, to.y += w * x.y, to.z += w * x.z, to.w += w * x.w;
}

/* Four columns of an output row, and with the first ones its lse, from the sums of weights against the maximum `high`. */
DEVICE void finish(const ingot__gpu_args &a, const share &t, int b, int head_k, int row, int column, float high,
                   float total, const float4 &x) {
	const int i = row / a.group, head = head_k * a.group + row % a.group;
	const bool none = high == -INFINITY;
	float lse = none ? -INFINITY : high + logf(total), factor = none ? 0.0f : 1.0f / total;
	if (a.features & F_SINK) {
		const float sink = a.sink[head * a.sink_stride], peak = fmaxf(high, sink),
					base = peak == -INFINITY ? 0.0f : peak;
		const float fade = none ? 0.0f : expf(high - base), all = total * fade + expf(sink - base);
		lse = peak == -INFINITY ? -INFINITY : base + logf(all);
		factor = none ? 0.0f : fade / all;
		if (isnan(sink) || sink == INFINITY) lse = factor = NAN;
	}
	if (isnan(total)) lse = factor = NAN; /* a NaN score, which no maximum shows */
	if (a.lse && column == 0)
		a.lse[b * a.lse_stride[0] + head * a.lse_stride[1] + (t.q.start + i) * a.lse_stride[2]] =
			a.lse_base ? lse * LOG2E : lse;
	const float v_factor = NARROW ? descale_of(a.v_descale, a.v_descale_stride, b, head_k) : 1.0f;
	float y[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
	for (int n = 0; n < 4; n++) y[n] = factor == 0.0f ? 0.0f : y[n] * factor * v_factor;
	const index_t to = row_offset(a.out_stride, t.q, head, i) + column;
	if (a.out_dtype == DT_F32) {
		*(float4 *)((float *)a.out + to) = make_float4(y[0], y[1], y[2], y[3]);
	} else {
		const bool half = a.out_dtype == DT_F16;
		*(uint2 *)((unsigned char *)a.out + to * 2) =
			make_uint2(half ? matrix<__half>::pack(y[0], y[1]) : matrix<__nv_bfloat16>::pack(y[0], y[1]),
		               half ? matrix<__half>::pack(y[2], y[3]) : matrix<__nv_bfloat16>::pack(y[2], y[3]));
	}
}

/* Where the workspace has a row's first part; its parts follow one another. */
DEVICE index_t record(const ingot__gpu_args &a, int b, int head_k, int row) {
	return (((index_t)b * a.heads_k + head_k) * ((index_t)a.max_seqlen_q * a.group) + row) * a.number[PARTS];
}

/* Maximum and total of a record, behind all sums. */
DEVICE float2 *record_stats(const ingot__gpu_args &a, index_t at) {
	const index_t records = (index_t)a.batch * a.heads_q * a.max_seqlen_q * a.number[PARTS];
	return (float2 *)((float *)a.workspace + records * a.head_dim_v) + at;
}

extern "C" __global__ void __launch_bounds__(THREADS) attn_fwd_sm80_decode(const __grid_constant__ ingot__gpu_args a) {
	extern __shared__ __align__(128) unsigned char shared[];
	const int warp = warp_id(), lane = lane_id(), quad = lane >> 2;
	/* tiles of a head side by side, so that the second reads from the cache */
	uint32_t x = blockIdx.x;
	const int tile = (int)(x % (uint32_t)a.number[TILES]);
	x /= (uint32_t)a.number[TILES];
	const int head_k = (int)(x % (uint32_t)a.heads_k);
	x /= (uint32_t)a.heads_k;
	const int part = (int)(x % (uint32_t)a.number[PARTS]), b = (int)(x / (uint32_t)a.number[PARTS]);
	start_next_step();
	const share t = make_share(a, b, tile);
	if (t.rows <= 0 || part >= t.parts) return;
	const int begin = t.first + part * t.each, end = begin + t.each < t.last ? begin + t.each : t.last;

	source s;
	const int piece = lane % ROW_PIECES;
	index_t pages;
	s.list = a.features & F_PAGED ? page_list(a, b, &pages) : 0;
	s.page = s.slot = 0;
	s.k_column = piece * 16 < a.head_dim * SIZE;
	s.v_column = piece * 16 < a.head_dim_v * SIZE;
	const index_t k_base = s.list ? head_k * a.k_stride[2] : row_offset(a.k_stride, t.k, head_k, 0);
	const index_t v_base = s.list ? head_k * a.v_stride[2] : row_offset(a.v_stride, t.k, head_k, 0);
	s.k = (const unsigned char *)a.k + k_base * SIZE + (s.k_column ? piece * 16 : 0);
	s.v = (const unsigned char *)a.v + v_base * SIZE + (s.v_column ? piece * 16 : 0);

	const uint32_t ring = shared_address(shared) + (uint32_t)warp * RING_BYTES;
	const int stride = WARPS * KEYS;
	int next = begin + warp * KEYS; /* the tile that is loaded next */
	find_page(a, s, next, end);
#pragma unroll
	for (int n = 0; n < STAGES - 1; n++, next += stride) {
		if (next < end) load_keys(a, s, ring + n * 2 * TILE_BYTES, next, end);
		copy_commit();
		find_page(a, s, next + stride, end);
	}

	/* this lane's two rows */
	int low[2], high[2], all_first = t.first, all_last = t.last;
	float slope[2], top[2], total[2];
	index_t position[2];
	const unsigned char *rows_q[2];
#pragma unroll
	for (int half = 0; half < 2; half++) {
		const int local = quad + 8 * half, row = t.row + (local < t.rows ? local : 0);
		const int i = row / a.group, head = head_k * a.group + row % a.group;
		position[half] = i + t.diagonal;
		low[half] = (int)clamp64(position[half] - a.left, 0, t.k.count);
		high[half] = (int)clamp64(position[half] + a.right + 1, 0, t.k.count);
		slope[half] = a.features & F_ALIBI ? a.alibi[b * a.alibi_stride[0] + head * a.alibi_stride[1]] : 0.0f;
		rows_q[half] = (const unsigned char *)a.q + row_offset(a.q_stride, t.q, head, i) * 2;
		top[half] = -INFINITY;
		total[half] = 0;
	}
	if (a.features & F_MASK) {
		all_first = (int)clamp64((t.row + t.rows - 1) / a.group + t.diagonal - a.left, 0, t.k.count);
		all_last = (int)clamp64(t.row / a.group + t.diagonal + a.right + 1, 0, t.k.count);
	}
	uint32_t q[HEAD / 16][4];
#pragma unroll
	for (int d = 0; d < HEAD / 16; d++)
#pragma unroll
		for (int n = 0; n < 4; n++) {
			/* n: row, then the second pair of columns; with 8-bit keys a lane's pairs are neighbours */
			const int column = d * 16 + (NARROW ? (lane & 3) * 4 + n / 2 * 2 : (lane & 3) * 2 + n / 2 * 8);
			q[d][n] = column < a.head_dim ? *(const uint32_t *)(rows_q[n % 2] + column * 2) : 0;
		}
	const float scale = a.softmax_scale * (NARROW ? descale_of(a.k_descale, a.k_descale_stride, b, head_k) : 1.0f);
	float out[DF][4];
#pragma unroll
	for (int d = 0; d < DF; d++) out[d][0] = out[d][1] = out[d][2] = out[d][3] = 0;

	const reader read_k = make_reader(ring, (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
	const reader read_v = make_reader(ring + TILE_BYTES, lane & 15, lane >> 4);
	int stage = 0;
	for (int j = begin + warp * KEYS; j < end; j += stride, next += stride) {
		copy_wait<STAGES - 2>();
		__syncwarp(); /* the tile is here, for all lanes, and the one before is done with */
		if (next < end) load_keys(a, s, ring + (stage == 0 ? STAGES - 1 : stage - 1) * 2 * TILE_BYTES, next, end);
		copy_commit();
		find_page(a, s, next + stride, end);

		const uint32_t offset = (uint32_t)stage * 2 * TILE_BYTES;
		const reader keys = {read_k.base + offset, read_k.turn}, values = {read_v.base + offset, read_v.turn};
		float p[KF][4];
#pragma unroll
		for (int c = 0; c < KF; c++) p[c][0] = p[c][1] = p[c][2] = p[c][3] = 0;
		add_scores(p, q, keys);

		/* The reference that scores are taken against follows the maximum only when it falls behind by 2^8: weights up to 256 lose
		 * nothing in either 16-bit type, and in most tiles nothing is reduced across lanes and nothing is rescaled. */
		const bool whole = j >= all_first && j + KEYS <= all_last;
		const float slack = 8.0f * LN2;
		bool need = false;
		float best[2];
#pragma unroll
		for (int half = 0; half < 2; half++) {
			best[half] = -INFINITY;
#pragma unroll
			for (int c = 0; c < KF; c++)
#pragma unroll
				for (int e = 2 * half; e < 2 * half + 2; e++) {
					const int key = j + c * 8 + fragment_column(e);
					float score = p[c][e] * scale;
					if (a.features & F_SOFTCAP) score = a.softcap * tanhf(score / a.softcap);
					if (a.features & F_ALIBI) {
						const index_t distance = position[half] - key;
						score -= slope[half] * (float)(distance < 0 ? -distance : distance);
					}
					if (!whole && (key < low[half] || key >= high[half])) score = -INFINITY;
					best[half] = fmaxf(best[half], score);
					p[c][e] = score;
				}
			need |= best[half] > top[half] + slack;
		}
		if (__any_sync(0xffffffffu, need)) {
#pragma unroll
			for (int half = 0; half < 2; half++) {
				float most = fmaxf(best[half], lane_xor(best[half], 1));
				most = fmaxf(most, lane_xor(most, 2));
				const float was = top[half];
				if (!(most > was + slack)) most = was;
				const float fade = was == most ? 1.0f : fast_exp2((was - most) * LOG2E);
				top[half] = most;
				total[half] *= fade;
#pragma unroll
				for (int d = 0; d < DF; d++) out[d][2 * half] *= fade, out[d][2 * half + 1] *= fade;
			}
		}
#pragma unroll
		for (int half = 0; half < 2; half++) {
			const float base = top[half] == -INFINITY ? 0.0f : top[half];
#pragma unroll
			for (int c = 0; c < KF; c++)
#pragma unroll
				for (int e = 2 * half; e < 2 * half + 2; e++) {
					p[c][e] = fast_exp2((p[c][e] - base) * LOG2E);
					total[half] += p[c][e];
				}
		}
		add_values(out, p, values);
		stage = stage == STAGES - 1 ? 0 : stage + 1;
	}

	/* The warps' results take their rings. */
	copy_wait<0>();
	__syncwarp();
	float *const mine = (float *)(shared + warp * RING_BYTES);
#pragma unroll
	for (int half = 0; half < 2; half++) {
		float sum = total[half];
		sum += lane_xor(sum, 1);
		sum += lane_xor(sum, 2);
		const int row = quad + 8 * half;
		if (row >= t.rows) continue;
		if ((lane & 3) == 0) *(float2 *)(mine + STATS + row * 2) = make_float2(top[half], sum);
		float *const to = mine + row * PITCH;
#pragma unroll
		for (int d = 0; d < DF; d += 2) {
			const float e0 = out[d][2 * half], e1 = out[d][2 * half + 1], o0 = out[d + 1][2 * half],
						o1 = out[d + 1][2 * half + 1];
			if (NARROW) {
				*(float4 *)(to + d * 8 + (lane & 3) * 4) = make_float4(e0, o0, e1, o1);
			} else {
				*(float2 *)(to + d * 8 + (lane & 3) * 2) = make_float2(e0, e1);
				*(float2 *)(to + d * 8 + 8 + (lane & 3) * 2) = make_float2(o0, o1);
			}
		}
	}
	block_barrier();
	for (int at = thread_id(); at < t.rows * COLUMNS_4; at += THREADS) {
		const int row = at / COLUMNS_4, column = at % COLUMNS_4 * 4;
		if (column >= a.head_dim_v) continue;
		float peak = -INFINITY, sum = 0;
		float4 all = make_float4(0, 0, 0, 0);
#pragma unroll
		for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, ((const float *)(shared + w * RING_BYTES))[STATS + row * 2]);
#pragma unroll
		for (int w = 0; w < WARPS; w++) {
			const float *const from = (const float *)(shared + w * RING_BYTES);
			const float2 stats = *(const float2 *)(from + STATS + row * 2);
			const float w8 = weight_of(stats.x, peak);
			sum += w8 * stats.y;
			add_weighted(all, w8, *(const float4 *)(from + row * PITCH + column));
		}
		if (a.number[PARTS] == 1) {
			finish(a, t, b, head_k, t.row + row, column, peak, sum, all);
		} else {
			const index_t to = record(a, b, head_k, t.row + row) + part;
			*(float4 *)((float *)a.workspace + to * a.head_dim_v + column) = all;
			if (column == 0) *record_stats(a, to) = make_float2(peak, sum);
		}
	}
}

/* A block merges the parts of one output row. */
extern "C" __global__ void __launch_bounds__(MERGE_THREADS(PARTS_MOST))
	attn_fwd_sm80_decode_merge(const __grid_constant__ ingot__gpu_args a) {
	enum { AHEAD = 5 };
	__shared__ float weights[PARTS_MOST], result[2];
	__shared__ float4 sums[MERGE_THREADS(PARTS_MOST)];
	const uint32_t rows = (uint32_t)(a.max_seqlen_q * a.group), pair = blockIdx.x / rows;
	const int row = (int)(blockIdx.x % rows), head_k = (int)(pair % (uint32_t)a.heads_k),
			  b = (int)(pair / (uint32_t)a.heads_k);
	const share t = make_share(a, b, row / TILE_ROWS);
	if (row - t.row >= t.rows) return;
	const index_t first = record(a, b, head_k, row);
	const int groups = blockDim.x / COLUMNS_4, group = thread_id() / COLUMNS_4, column = thread_id() % COLUMNS_4 * 4;
	const bool reads = column < a.head_dim_v;
	const float *const from = (const float *)a.workspace + first * a.head_dim_v + column;
	wait_for_step_before();
	/* the first sums are on their way while their weights are */
	float4 ahead[AHEAD];
#pragma unroll
	for (int x = 0; x < AHEAD; x++) {
		const int n = group + x * groups;
		if (reads && n < t.parts) ahead[x] = *(const float4 *)(from + (index_t)n * a.head_dim_v);
	}
	if (warp_id() == 0) {
		const float2 *const stats = record_stats(a, first);
		float high = -INFINITY, total = 0;
		for (int n = lane_id(); n < t.parts; n += 32) high = fmaxf(high, stats[n].x);
#pragma unroll
		for (int x = 16; x; x /= 2) high = fmaxf(high, lane_xor(high, x));
		for (int n = lane_id(); n < t.parts; n += 32) {
			const float2 one = stats[n];
			weights[n] = weight_of(one.x, high);
			total += weights[n] * one.y;
		}
#pragma unroll
		for (int x = 16; x; x /= 2) total += lane_xor(total, x);
		if (lane_id() == 0) result[0] = high, result[1] = total;
	}
	block_barrier();
	float4 sum = make_float4(0, 0, 0, 0);
	if (reads) {
#pragma unroll
		for (int x = 0; x < AHEAD; x++) {
			const int n = group + x * groups;
			if (n < t.parts) add_weighted(sum, weights[n], ahead[x]);
		}
#pragma unroll 4
		for (int n = group + AHEAD * groups; n < t.parts; n += groups)
			add_weighted(sum, weights[n], *(const float4 *)(from + (index_t)n * a.head_dim_v));
	}
	sums[thread_id()] = sum;
	block_barrier();
	if (group || !reads) return;
	for (int n = 1; n < groups; n++) add_weighted(sum, 1.0f, sums[n * COLUMNS_4 + thread_id()]);
	finish(a, t, b, head_k, row, column, result[0], result[1], sum);
}
#endif
