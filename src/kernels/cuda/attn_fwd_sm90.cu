/*
 * Attention forward on Hopper (sm_90a), in 16-bit types, by warpgroup products and the copy engine.
 *
 * A block stays on its multiprocessor and works through tiles of query rows: a warpgroup of helpers, and two or three
 * warpgroups that own 64 rows each. Of the helpers, one warp decodes the next tiles, two have the copy engine fetch Q and
 * K, and V, into rings, and one clears rows of V that belong to no pair. A row warpgroup walks the keys from the last block
 * to the first and keeps two products in flight, S of this block and P V of the one before, under which it does the
 * softmax. What limits it is the length of that softmax, so:
 *
 * There is no row maximum in the loop. A block whose row maxima are taken (the first of a tile, and masked ones) sets the
 * reference that exponents are taken against; later blocks keep it, since softmax does not depend on it and P holds weights
 * far above 1. The sums of a block, which are needed anyway, tell whether some weight left that range. Then, which is rare,
 * a warp computes its scores once more from what still lies in shared memory, takes maxima, and goes on taking them to the
 * end of the tile: no data costs more than one such repetition per warp and tile.
 */
#include "fwd_sm90.h"

/* masked: causal, window, variable length; paged: as masked, with pages; capped: as these, with a softcap; long: as masked or paged, with
 * sums that are folded */
enum { CLASS_PLAIN, CLASS_MASKED, CLASS_CAPPED, CLASS_LONG, CLASS_PAGED, CLASSES };
enum { TILES_PER_HEAD, SECTION, ORDERED, EVEN, STEPS, PIECE, BLOCK_PAGES, BLOCK_ROWS, FOLDS_AT }; /* numbers */

/* By head size of Q and K, and of V: row warpgroups, keys of a block, buffers for Q. */
#define GROUPS(head) ((head) <= 64 ? 3 : 2)
#define KEYS(head, value) ((head) <= 128 || (value) <= 128 ? 128 : (head) <= 192 ? 96 : 64)
#define Q_STAGES(head) ((head) <= 128 ? 2 : 1)
/* Blocks of K and of V in flight. Pages come in many copies, which take longer: where there is room, there are more of them. */
#define K_STAGES(head, class) ((class) != CLASS_PAGED ? 2 : (head) <= 64 ? 4 : (head) <= 128 || (head) > 192 ? 3 : 2)
#define V_STAGES(head, class) ((class) == CLASS_PAGED && (head) <= 64 ? 3 : 2)
/* Where there is room, a tile's output has memory of its own, else that of its queries. */
#define OUT_BYTES(head, value, class) \
	((head) <= 64 || ((head) <= 128 && (class) != CLASS_PAGED) ? TILE_BYTES(64 * GROUPS(head), value) : 0)
#define CONTROL_BYTES 512
#define SHARED_BYTES(head, value, class)                           \
	(Q_STAGES(head) * TILE_BYTES(64 * GROUPS(head), head) +        \
	 K_STAGES(head, class) * TILE_BYTES(KEYS(head, value), head) + \
	 V_STAGES(head, class) * TILE_BYTES(KEYS(head, value), value) + OUT_BYTES(head, value, class) + CONTROL_BYTES)
/* Matrix units cut off what they add below the last bit of the sum: of n equal terms about n / 2^26 is lost, which must stay below
 * half a unit of the result's type. Where there are more keys, the sums go to memory every FOLD_BLOCKS and are added there by rounding. */
#define KEYS_UNFOLDED(type) ((type) == 2 ? 16384 : 131072)
#define FOLD_BLOCKS 64
#define FOLD_BYTES(head, value) (128 * GROUPS(head) * ((value) / 8 + 1) * 16)
/* The workspace: places of tiles in a head, those with most keys first. */
struct place {
	int32_t batch, tile;
};
struct order {
	int32_t count, pad[63]; /* then the places */
};
enum { ORDER_THREADS = 1024, LENGTHS = 2 * ORDER_THREADS, PLACES = 1 << 22 };

#ifdef INGOT_HOST

#define IMAGE(type, number, head, value, class, name)                                                                  \
	{type "_d" #head "v" #value "_" name, "-DELEMENT=" #number " -DHEAD=" #head " -DVALUE=" #value " -DCLASS=" #class, \
	 0}
#define IMAGES(type, number, head, value)                                                           \
	IMAGE(type, number, head, value, 0, "plain"), IMAGE(type, number, head, value, 1, "masked"),    \
		IMAGE(type, number, head, value, 2, "capped"), IMAGE(type, number, head, value, 3, "long"), \
		IMAGE(type, number, head, value, 4, "paged")
#define HEADS(type, number)                                                                     \
	IMAGES(type, number, 64, 64), IMAGES(type, number, 96, 96), IMAGES(type, number, 128, 128), \
		IMAGES(type, number, 192, 128), IMAGES(type, number, 192, 192), IMAGES(type, number, 256, 256)

static const ingot__image_variant images[] = {HEADS("f16", 2), HEADS("bf16", 3)};
static const struct {
	int head, value;
} sizes[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};
enum { SIZES = sizeof sizes / sizeof *sizes };
static const char *const kernels[] = {"attn_fwd_sm90_order", "attn_fwd_sm90", NULL};

static int size_index(const ingot__problem *p) {
	int i = 0;
	while (i < SIZES && (sizes[i].head < p->head_dim || sizes[i].value < p->head_dim_v)) i++;
	return i;
}

/* K or V with its rows, heads and batches, or pages, in the order that tensor maps have. */
static ingot_tensor rows_of(const ingot__problem *p, const ingot_tensor *t) {
	ingot_tensor x = *t;
	if (p->features & INGOT__PAGED) {
		x.shape[1] = t->shape[2], x.stride[1] = t->stride[2];
		x.shape[2] = t->shape[1], x.stride[2] = t->stride[1];
	}
	return x;
}

/* Rows of a page that one copy fetches: the most that divide a page and a block. */
static int64_t piece_rows(const ingot__problem *p, int64_t keys) {
	int64_t piece = p->pages.page_size;
	while (piece) {
		const int64_t rest = keys % piece;
		keys = piece, piece = rest;
	}
	return keys;
}

static const char *refuse(const ingot__problem *p, const ingot__device *device, int *variant) {
	(void)device;
	const char *const why = refuse_16bit(p);
	if (why) return why;
	const int size = size_index(p);
	INGOT__REFUSE_IF(size == SIZES, "a head size above 256");
	INGOT__REFUSE_IF(p->features & INGOT__PAGED && p->pages.page_size % 8,
	                 "pages of a number of rows that is no multiple of 8: the copy engine swizzles 8 at a time");
	const ingot_tensor k = rows_of(p, &p->k), v = rows_of(p, &p->v);
	INGOT__REFUSE_IF(!can_map(&p->q) || !can_map(&k) || !can_map(&v) || !can_map(&p->out),
	                 "a row stride of 0 or a stride of 2^40 bytes in q, k, v or out, which the copy engine cannot do");
	INGOT__REFUSE_IF(p->pages.count > FAR || p->pages.page_size > FAR, "as many pages as the copy engine cannot count");
	const bool folds = p->k_side.max_seqlen > KEYS_UNFOLDED(p->q.dtype);
	INGOT__REFUSE_IF(
		folds && p->features & INGOT__SOFTCAP,
		"a softcap with more than 16384 keys in fp16 or 131072 in bf16: sums this long lose bits of the result");
	INGOT__REFUSE_IF((double)tiles_per_head(p, 64 * GROUPS(sizes[size].head)) * (double)p->batch * (double)p->heads_q >
	                     1e9,
	                 "more than 1e9 tiles of query rows");
	const int class = folds                                         ? CLASS_LONG
	                  : p->features & INGOT__SOFTCAP                ? CLASS_CAPPED
	                  : p->features & INGOT__PAGED                  ? CLASS_PAGED
	                  : p->features & (INGOT__MASK | INGOT__VARLEN) ? CLASS_MASKED
	                                                                : CLASS_PLAIN;
	*variant = ((p->q.dtype == INGOT_BF16) * SIZES + size) * CLASSES + class;
	return NULL;
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)threads;
	ingot__gpu_args *const a = ingot__gpu_fill(p, out);
	const int head = sizes[out->variant / CLASSES % SIZES].head, value = sizes[out->variant / CLASSES % SIZES].value;
	const int tile_rows = 64 * GROUPS(head);
	const int64_t per_head = tiles_per_head(p, tile_rows), tiles = per_head * p->batch * p->heads_q;
	const int64_t key_bytes = 2 * (p->head_dim + p->head_dim_v);
	if (tiles == 0 || p->q.shape[2] == 0) return;
	out->arguments_size = MAPS_AT + 128 * MAPS;
	a->number[TILES_PER_HEAD] = (int32_t)per_head;
	/* lengths that only the device knows: it orders the tiles first, where there are enough of them for the order to matter */
	a->number[ORDERED] =
		p->features & INGOT__VARLEN && tiles > device->multiprocessors && per_head * p->batch <= PLACES;
	a->number[EVEN] = !a->number[ORDERED] && (p->right == INGOT__NO_BOUND || p->left != INGOT__NO_BOUND);
	a->number[SECTION] = 1;
	if (a->number[ORDERED]) {
		const int64_t rows = p->q_side.stacked ? p->q_side.capacity : p->q_side.capacity * p->batch;
		const int64_t keys = p->k_side.stacked ? p->k_side.capacity : p->k_side.capacity * p->batch;
		a->number[SECTION] = (int32_t)section_heads(device, p->heads_q, p->group, rows / tile_rows + 1,
		                                            (double)keys * (double)key_bytes);
	} else if (!a->number[EVEN])
		a->number[SECTION] = (int32_t)section_heads(device, p->batch * p->heads_q, p->group, per_head,
		                                            (double)p->k_side.max_seqlen * (double)key_bytes);
	const ingot_tensor k = rows_of(p, &p->k), v = rows_of(p, &p->v);
	a->number[STEPS] = steps_of(&p->q, &k, &v);
	if (p->features & INGOT__PAGED) {
		a->number[PIECE] = (int32_t)piece_rows(p, KEYS(head, value));
		a->number[BLOCK_PAGES] = (int32_t)(KEYS(head, value) / p->pages.page_size);
		a->number[BLOCK_ROWS] = (int32_t)(KEYS(head, value) % p->pages.page_size);
	}
	const int rows = a->number[PIECE] ? a->number[PIECE] : KEYS(head, value);
	map_inputs(out, &p->q, &k, &v, rows, rows);
	out->map[OUT_MAP] = map_of(OUT_MAP, &p->out, 64);
	out->maps = MAPS;
	if (a->number[ORDERED]) {
		out->workspace_bytes = sizeof(struct order) + (uint64_t)(per_head * p->batch) * sizeof(struct place);
		out->step[out->steps++] =
			(ingot__step){.name = "order", .kernel = kernels[0], .block = {ORDER_THREADS, 1, 1}, .grid = {1, 1, 1}};
	}
	const int64_t blocks = tiles < device->multiprocessors ? tiles : device->multiprocessors;
	if (out->variant % CLASSES == CLASS_LONG) {
		const uint64_t at = (out->workspace_bytes + 255) / 256 * 256;
		a->number[FOLDS_AT] = (int32_t)(at / 256);
		out->workspace_bytes = at + (uint64_t)blocks * FOLD_BYTES(head, value);
	}
	out->step[out->steps++] = (ingot__step){.name = "rows",
	                                        .kernel = kernels[1],
	                                        .block = {128 * (1 + (uint32_t)GROUPS(head)), 1, 1},
	                                        .shared_bytes = (uint32_t)SHARED_BYTES(head, value, out->variant % CLASSES),
	                                        .grid = {(uint32_t)blocks, 1, 1}};
}

const ingot__impl ingot__impl_attn_fwd_sm90 = {
	.name = "attn_fwd_sm90",
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
	LONG = CLASS == CLASS_LONG,
	PAGED = CLASS == CLASS_PAGED,
	MAYBE_PAGED = CAPPED || LONG,
	OWNERS = GROUPS(HEAD),
	BM = 64 * OWNERS,
	BN = KEYS(HEAD, VALUE),
	Q_GROUP_BYTES = TILE_BYTES(64, HEAD),
	Q_BYTES = OWNERS * Q_GROUP_BYTES,
	K_BYTES = TILE_BYTES(BN, HEAD),
	V_BYTES = TILE_BYTES(BN, VALUE),
	OUT_GROUP_BYTES = TILE_BYTES(64, VALUE),
	K_BUFFERS = K_STAGES(HEAD, CLASS),
	V_BUFFERS = V_STAGES(HEAD, CLASS),
	OWN_OUT = OUT_BYTES(HEAD, VALUE, CLASS) != 0,
	/* with two buffers for Q, that of a tile is given back only in the next tile: nobody waits for the copy of its output */
	OWING = !OWN_OUT && Q_STAGES(HEAD) == 2,
	/* Q as the first operand comes from registers where they suffice: one read of shared memory less for each product */
	Q_HELD = HEAD > 64 && HEAD <= 128,
	OWNER_REGISTERS = OWNERS == 3 ? 160 : 232,
	HELPER_REGISTERS = OWNERS == 3 ? 32 : 40,
	/* shared memory */
	AT_K = Q_STAGES(HEAD) * Q_BYTES,
	AT_V = AT_K + K_BUFFERS * K_BYTES,
	AT_OUT = AT_V + V_BUFFERS * V_BYTES,
	AT_TILES = AT_OUT + OUT_BYTES(HEAD, VALUE, CLASS),
	AT_Q_FULL = AT_TILES + 64 * TILE_STAGES,
	AT_Q_EMPTY = AT_Q_FULL + 16,
	AT_K_FULL = AT_Q_EMPTY + 16,
	AT_K_EMPTY = AT_K_FULL + 8 * K_BUFFERS,
	AT_V_FULL = AT_K_EMPTY + 8 * K_BUFFERS,
	AT_V_EMPTY = AT_V_FULL + 8 * V_BUFFERS,
	AT_V_FETCHED = AT_V_EMPTY + 8 * V_BUFFERS,
	AT_TILE_FULL = AT_V_FETCHED + 8 * V_BUFFERS,
	AT_END = AT_TILE_FULL + 16 * TILE_STAGES
};
static_assert(AT_END <= SHARED_BYTES(HEAD, VALUE, CLASS), "barriers and tiles fit into the control bytes");

typedef arguments_with<MAPS> arguments;

/* A weight sum of a block that tells of no weight beyond what P's type holds without loss. */
#define SUM_MOST (ELEMENT == 2 ? 16384.0f : 1048576.0f)

/* ---- tiles ------------------------------------------------------------------------------------------------------------ */

typedef tile_queue<AT_TILES, AT_TILE_FULL> queue;

struct ordered_schedule : schedule {
	const place *places; /* NULL: the last rows of each sequence come first */
};

DEVICE ordered_schedule make_schedule(const ingot__gpu_args &a) {
	ordered_schedule w;
	w.heads = a.batch * a.heads_q;
	w.per_head = a.number[TILES_PER_HEAD];
	w.section = a.number[SECTION];
	w.places = NULL;
	if (MASKED && a.number[ORDERED]) {
		const order *const o = (const order *)a.workspace;
		w.heads = a.heads_q;
		w.per_head = o->count;
		w.places = (const place *)(o + 1);
	}
	w.divide(a.number[EVEN]);
	return w;
}

DEVICE bool decode(const ingot__gpu_args &a, const ordered_schedule &w, int number, tile &t) {
	int head;
	const int rank = w.rank_of(number, head);
	int batch = head / a.heads_q, n = w.per_head - 1 - rank;
	t.head = head - batch * a.heads_q;
	if (MASKED && w.places) {
		batch = w.places[rank].batch;
		n = w.places[rank].tile;
	}
	return look<MASKED, BM, BN>(a, batch, n * BM, t);
}

/* Whether a block's V holds rows that may be anything. What lies behind the tensor's last row arrives as zeros. */
DEVICE bool needs_clearing(const ingot__gpu_args &a, const tile &t, int j0) {
	return MASKED && (j0 < t.live_first || (j0 + BN > t.live_last && (PAGED || (MAYBE_PAGED && a.number[PIECE]) ||
	                                                                  t.k_row + t.live_last < a.k_capacity)));
}

/* True in one lane of a warp whose lanes are all here: the compiler knows that it is one, and issues what follows once. */
DEVICE bool elected() {
	int one;
	asm volatile("{\n"
	             ".reg .pred one;\n"
	             "elect.sync _|one, 0xffffffff;\n"
	             "selp.b32 %0, 1, 0, one;\n"
	             "}"
	             : "=r"(one));
	return one;
}
/* A warp's way over the pages of a sequence, from a block of keys to the one before it. Lane i has the place of the block's i-th piece:
 * what a fetch needs is known before the buffer for it is free. */
struct walk {
	const int32_t *list;
	int entry, row, page; /* of the list, in the page, of the map */
};

/* Behind a sequence's keys the list may hold anything: there, the page behind the last one, which arrives as zeros. */
DEVICE void find_page(const ingot__gpu_args &a, walk &w, int keys, bool moves) {
	w.page = (int)a.page_count;
	if (w.entry * (int)a.page_size + w.row < keys)
		w.page = moves ? min(max(w.list[w.entry], 0), (int)a.page_count - 1) : 0;
}
DEVICE walk begin_walk(const ingot__gpu_args &a, int batch, int j0, int keys, bool moves) {
	index_t pages;
	const int j = j0 + lane_id() * a.number[PIECE], size = (int)a.page_size;
	walk w = {page_list(a, batch, &pages), j / size, j % size, 0};
	find_page(a, w, keys, moves);
	return w;
}
DEVICE void step_back(const ingot__gpu_args &a, walk &w, int keys, bool moves) {
	w.entry -= a.number[BLOCK_PAGES];
	w.row -= a.number[BLOCK_ROWS];
	if (w.row < 0) w.row += (int)a.page_size, w.entry--;
	find_page(a, w, keys, moves);
}
template <int columns>
DEVICE void load_pages(const ingot__gpu_args &a, uint32_t to, const tensor_map *map, uint32_t barrier, const walk &w,
                       int next_page, int next_row, int head) {
#pragma unroll 1
	for (int i = 0, at = 0; at < BN; at += a.number[PIECE]) {
		const int page = next_page, row = next_row;
		i++;
		next_page = __shfl_sync(0xffffffffu, w.page, i);
		next_row = __shfl_sync(0xffffffffu, w.row, i);
		if (elected()) {
#pragma unroll
			for (int n = 0; n < PANELS(columns); n++)
				load_box(to + (n * BN + at) * 128, map, barrier, n * 64, row, head, page);
		}
	}
}

/* ---- the order of tiles ------------------------------------------------------------------------------------------------- */

/* One block: sorts the tiles of a head by their number of key blocks, by counting. Which of equals comes first is left to chance:
 * no result depends on it. */
extern "C" __global__ void __launch_bounds__(ORDER_THREADS) attn_fwd_sm90_order(const __grid_constant__ arguments x) {
	__shared__ int counts[LENGTHS], total;
	const ingot__gpu_args &a = x.a;
	order *const o = (order *)a.workspace;
	const int per_head = a.number[TILES_PER_HEAD], all = a.batch * per_head, me = thread_id();
	const int scale = a.max_seqlen_k / BN / LENGTHS + 1;
	counts[me] = counts[me + ORDER_THREADS] = 0;
	block_barrier();
	for (int pass = 0; pass < 2; pass++) {
		for (int i = me; i < all; i += ORDER_THREADS) {
			const place p = {i / per_head, i % per_head};
			tile t;
			if (!look<MASKED, BM, BN>(a, p.batch, p.tile * BM, t)) continue;
			int *const count = &counts[LENGTHS - 1 - min(t.blocks / scale, LENGTHS - 1)];
			if (pass == 0) atomicAdd(count, 1);
			else ((place *)(o + 1))[atomicAdd(count, 1)] = p;
		}
		block_barrier();
		if (pass == 1) break;
		/* counts to where each length begins: sums of pairs, over threads by doubling, and back */
		const int low = counts[2 * me], high = counts[2 * me + 1];
		int sum = low + high;
		for (int step = 1; step < ORDER_THREADS; step *= 2) {
			block_barrier();
			counts[me] = sum;
			block_barrier();
			if (me >= step) sum += counts[me - step];
		}
		block_barrier();
		if (me == ORDER_THREADS - 1) total = sum;
		counts[2 * me] = sum - high - low;
		counts[2 * me + 1] = sum - high;
		block_barrier();
	}
	if (me == 0) o->count = total;
}

/* ---- helpers ---------------------------------------------------------------------------------------------------------- */

/* One lane; a warp where K and V are paged. */
template <bool paged>
DEVICE void fetch_queries_and_keys(const arguments &x, uint32_t shared, const unsigned char *memory) {
	const int steps = x.a.number[STEPS];
	ring<TILE_STAGES> place = {0, 0};
	ring<Q_STAGES(HEAD)> q = {0, 1};
	ring<K_BUFFERS> k = {0, 1};
	for (;;) {
		const tile t = queue::next(shared, memory, place);
		if (paged) __syncwarp();
		if (!paged || elected()) queue::done(shared, place);
		place.next();
		if (t.blocks < 0) return;
		if (t.blocks == 0) continue;
		const int head_q = steps & Q_HEADS ? t.head : 0, batch_q = steps & Q_BATCH ? t.q_slot : 0;
		const int head = steps & K_HEADS ? t.head / x.a.group : 0, batch = steps & K_BATCH ? t.k_slot : 0;
		barrier_wait(shared + AT_Q_EMPTY + 8 * q.stage, q.parity);
		if (!paged || elected()) {
			barrier_expect(shared + AT_Q_FULL + 8 * q.stage, Q_BYTES);
			load_queries<HEAD, OWNERS>(shared + q.stage * Q_BYTES, &x.map[Q_MAP], shared + AT_Q_FULL + 8 * q.stage,
			                           t.q_row, head_q, batch_q);
		}
		q.next();
		walk w;
		if (paged) w = begin_walk(x.a, t.batch, (t.first_block + t.blocks - 1) * BN, t.keys, steps & K_BATCH);
		for (int j0 = (t.first_block + t.blocks - 1) * BN; j0 >= t.first_block * BN; j0 -= BN) {
			const uint32_t to = shared + AT_K + k.stage * K_BYTES, arrived = shared + AT_K_FULL + 8 * k.stage;
			const int page = paged ? same(w.page) : 0, row = paged ? same(w.row) : 0;
			barrier_wait(shared + AT_K_EMPTY + 8 * k.stage, k.parity);
			if (!paged || elected()) barrier_expect(arrived, K_BYTES);
			if (paged) {
				load_pages<HEAD>(x.a, to, &x.map[K_MAP], arrived, w, page, row, head);
				if (j0 > t.first_block * BN) step_back(x.a, w, t.keys, steps & K_BATCH);
			} else load_tile<HEAD, BN>(to, &x.map[K_MAP], arrived, t.k_row + j0, head, batch);
			k.next();
		}
	}
}

/* Likewise. */
template <bool paged> DEVICE void fetch_values(const arguments &x, uint32_t shared, const unsigned char *memory) {
	const int steps = x.a.number[STEPS];
	ring<TILE_STAGES> place = {0, 0};
	ring<V_BUFFERS> v = {0, 1};
	for (;;) {
		const tile t = queue::next(shared, memory, place);
		if (paged) __syncwarp();
		if (!paged || elected()) queue::done(shared, place);
		place.next();
		if (t.blocks < 0) return;
		const int head = steps & V_HEADS ? t.head / x.a.group : 0, batch = steps & V_BATCH ? t.k_slot : 0;
		walk w;
		if (paged && t.blocks)
			w = begin_walk(x.a, t.batch, (t.first_block + t.blocks - 1) * BN, t.keys, steps & V_BATCH);
		for (int n = t.blocks - 1; n >= 0; n--) {
			const int j0 = (t.first_block + n) * BN;
			const uint32_t arrived = shared + (needs_clearing(x.a, t, j0) ? AT_V_FETCHED : AT_V_FULL) + 8 * v.stage;
			const uint32_t to = shared + AT_V + v.stage * V_BYTES;
			const int page = paged ? same(w.page) : 0, row = paged ? same(w.row) : 0;
			barrier_wait(shared + AT_V_EMPTY + 8 * v.stage, v.parity);
			if (!paged || elected()) barrier_expect(arrived, V_BYTES);
			if (paged) {
				load_pages<VALUE>(x.a, to, &x.map[V_MAP], arrived, w, page, row, head);
				if (n) step_back(x.a, w, t.keys, steps & V_BATCH);
			} else load_tile<VALUE, BN>(to, &x.map[V_MAP], arrived, t.k_row + j0, head, batch);
			v.next();
		}
	}
}

/* A warp. Rows of V that no row of the sequence sees become 0 between the copy engine and the products: 0 times NaN is NaN. */
DEVICE void clear_values(const ingot__gpu_args &a, uint32_t shared, unsigned char *memory) {
	ring<TILE_STAGES> place = {0, 0};
	int stage = 0;
	uint32_t parity = 0; /* bit per stage: blocks that need clearing come seldom */
	for (;;) {
		const tile t = queue::next(shared, memory, place);
		__syncwarp();
		if (lane_id() == 0) queue::done(shared, place);
		place.next();
		for (int n = t.blocks - 1; n >= 0; n--) {
			const int j0 = (t.first_block + n) * BN;
			if (needs_clearing(a, t, j0)) {
				barrier_wait(shared + AT_V_FETCHED + 8 * stage, parity >> stage & 1);
				parity ^= 1u << stage;
				for (int i = lane_id(); i < PANELS(VALUE) * BN * 8; i += 32) {
					const int j = j0 + i / 8 % BN;
					if (j < t.live_first || j >= t.live_last)
						*(uint4 *)(memory + AT_V + stage * V_BYTES + i * 16) = make_uint4(0, 0, 0, 0);
				}
				fence_async();
				__syncwarp();
				if (lane_id() == 0) barrier_arrive(shared + AT_V_FULL + 8 * stage);
			}
			stage = stage + 1 == V_BUFFERS ? 0 : stage + 1;
		}
		if (t.blocks < 0) return;
	}
}

/* ---- softmax of a warpgroup's 64 x BN scores ------------------------------------------------------------------------------ */

/* Of a thread's two rows. */
struct rows {
	float top0, top1;     /* reference of exponents: scores q.k; -Inf before the first key */
	float total0, total1; /* this thread's part of the sum of weights */
};

/* Scores to weights 2^(s unit - shift), and their sums. */
DEVICE void weigh(float (&s)[BN / 2], float unit, float shift0, float shift1, float &sum0, float &sum1) {
	float a = 0, b = 0, c = 0, d = 0;
#pragma unroll
	for (int i = 0; i < BN / 2; i += 4) {
		s[i] = fast_exp2(fmaf(s[i], unit, -shift0));
		s[i + 1] = fast_exp2(fmaf(s[i + 1], unit, -shift0));
		s[i + 2] = fast_exp2(fmaf(s[i + 2], unit, -shift1));
		s[i + 3] = fast_exp2(fmaf(s[i + 3], unit, -shift1));
		a = i ? a + s[i] : s[i];
		b = i ? b + s[i + 1] : s[i + 1];
		c = i ? c + s[i + 2] : s[i + 2];
		d = i ? d + s[i + 3] : s[i + 3];
	}
	sum0 = a + b;
	sum1 = c + d;
}

/* The way without maxima. False, with scores lost, where a weight grew beyond P's type or is NaN. The test is on the sums: one on
 * the scores would let the compiler move all exponentials behind it. */
DEVICE bool weigh_by_reference(float (&s)[BN / 2], rows &r, float unit) {
	float sum0, sum1;
	weigh(s, unit, r.top0 * unit, r.top1 * unit, sum0, sum1);
	if (__any_sync(0xffffffffu, !(sum0 + sum1 < SUM_MOST))) return false;
	r.total0 += sum0;
	r.total1 += sum1;
	return true;
}

/* The way with maxima. The reference follows only where it falls behind by 2^8; fade is then what the output shrinks by. True if it
 * does in any row of the warp. */
DEVICE bool weigh_by_maximum(float (&s)[BN / 2], rows &r, float unit, float &fade0, float &fade1) {
	float top0, top1;
	find_maxima(s, top0, top1);
	top0 = fmaxf(top0, lane_xor(top0, 1));
	top1 = fmaxf(top1, lane_xor(top1, 1));
	top0 = fmaxf(r.top0, fmaxf(top0, lane_xor(top0, 2)));
	top1 = fmaxf(r.top1, fmaxf(top1, lane_xor(top1, 2)));
	const bool moves = __any_sync(0xffffffffu, (top0 - r.top0) * unit > 8.0f || (top1 - r.top1) * unit > 8.0f);
	fade0 = fade1 = 1.0f;
	if (moves) {
		fade0 = r.top0 == top0 ? 1.0f : fast_exp2((r.top0 - top0) * unit);
		fade1 = r.top1 == top1 ? 1.0f : fast_exp2((r.top1 - top1) * unit);
		r.top0 = top0;
		r.top1 = top1;
	}
	float sum0, sum1;
	weigh(s, unit, r.top0 == -INFINITY ? 0.0f : r.top0 * unit, r.top1 == -INFINITY ? 0.0f : r.top1 * unit, sum0, sum1);
	r.total0 = r.total0 * fade0 + sum0;
	r.total1 = r.total1 * fade1 + sum1;
	return moves;
}

/* ---- products ------------------------------------------------------------------------------------------------------------- */

DEVICE void multiply_qk(float (&s)[BN / 2], const uint32_t (&held)[HEAD / 4], uint64_t q, uint64_t k) {
#pragma unroll
	for (int i = 0; i < HEAD / 16; i++) {
		const int k_at = (i / 4 * BN * 128 + i % 4 * 32) >> 4;
		if (Q_HELD) wgmma<BN>::held<0>(s, &held[4 * i], k + k_at, i > 0);
		else wgmma<BN>::shared<0>(s, q + ((i / 4 * 64 * 128 + i % 4 * 32) >> 4), k + k_at, i > 0);
	}
}

DEVICE void multiply_pv(float (&out)[VALUE / 2], const uint32_t (&p)[BN / 4], uint64_t v, int add) {
#pragma unroll
	for (int i = 0; i < BN / 16; i++) wgmma<VALUE>::held<1>(out, &p[4 * i], v + (i * 16 * 128 >> 4), i > 0 ? 1 : add);
}

DEVICE void pack(uint32_t (&p)[BN / 4], const float (&s)[BN / 2]) {
#pragma unroll
	for (int i = 0; i < BN / 4; i++) p[i] = matrix<element>::pack(s[2 * i], s[2 * i + 1]);
}

DEVICE void shrink(float (&out)[VALUE / 2], float fade0, float fade1) {
#pragma unroll
	for (int i = 0; i < VALUE / 2; i += 4) {
		out[i] *= fade0;
		out[i + 1] *= fade0;
		out[i + 2] *= fade1;
		out[i + 3] *= fade1;
	}
}

/* Where a thread's sums go in memory: four of them each 128 OWNERS apart, then what they are relative to. */
DEVICE float4 *folds_of(const ingot__gpu_args &a) {
	return (float4 *)((char *)a.workspace + (index_t)a.number[FOLDS_AT] * 256) +
	       (index_t)blockIdx.x * (FOLD_BYTES(HEAD, VALUE) / 16) + thread_id() - 128;
}

/* Adds what is in memory to the sums, and writes them there. The order of volatile loads and stores keeps the compiler from loading
 * all at once, for which there are no registers. */
DEVICE void fold(const ingot__gpu_args &a, float (&out)[VALUE / 2], const rows &r, float unit, bool first) {
	enum { AT_ONCE = VALUE == 96 ? 4 : 8 };
	float4 *const to = folds_of(a);
	float2 *const tops = (float2 *)(to + VALUE / 8 * 128 * OWNERS);
	float fade0 = 0, fade1 = 0;
	if (!first) {
		const float2 top = *tops;
		fade0 = top.x == r.top0 ? 1.0f : fast_exp2((top.x - r.top0) * unit);
		fade1 = top.y == r.top1 ? 1.0f : fast_exp2((top.y - r.top1) * unit);
	}
	*tops = make_float2(r.top0, r.top1);
#pragma unroll
	for (int i = 0; i < VALUE / 8; i += AT_ONCE) {
		if (!first) {
			float4 x[AT_ONCE];
#pragma unroll
			for (int j = 0; j < AT_ONCE; j++)
				asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];"
				             : "=f"(x[j].x), "=f"(x[j].y), "=f"(x[j].z), "=f"(x[j].w)
				             : "l"(to + (i + j) * 128 * OWNERS)
				             : "memory");
#pragma unroll
			for (int j = 0; j < AT_ONCE; j++) {
				float *const o = &out[4 * (i + j)];
				o[0] = fmaf(x[j].x, fade0, o[0]), o[1] = fmaf(x[j].y, fade0, o[1]);
				o[2] = fmaf(x[j].z, fade1, o[2]), o[3] = fmaf(x[j].w, fade1, o[3]);
			}
		}
#pragma unroll
		for (int j = 0; j < AT_ONCE; j++) {
			const float *const o = &out[4 * (i + j)];
			asm volatile("st.volatile.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + (i + j) * 128 * OWNERS),
			             "f"(o[0]), "f"(o[1]), "f"(o[2]), "f"(o[3])
			             : "memory");
		}
	}
}

extern "C" __global__ void __launch_bounds__(128 * (1 + OWNERS), 1) attn_fwd_sm90(const __grid_constant__ arguments x) {
	extern __shared__ __align__(1024) unsigned char memory[];
	const ingot__gpu_args &a = x.a;
	const uint32_t shared = shared_address(memory);
	const int warpgroup = same(warp_id()) / 4, warp = same(warp_id()) % 4;

	if (thread_id() == 0) {
		queue::init(shared, 4 * OWNERS + 2 + MASKED);
		for (int i = 0; i < Q_STAGES(HEAD); i++) {
			barrier_init(shared + AT_Q_FULL + 8 * i, 1);
			barrier_init(shared + AT_Q_EMPTY + 8 * i, 4 * OWNERS);
		}
		for (int i = 0; i < K_BUFFERS; i++) {
			barrier_init(shared + AT_K_FULL + 8 * i, 1);
			barrier_init(shared + AT_K_EMPTY + 8 * i, 4 * OWNERS);
		}
		for (int i = 0; i < V_BUFFERS; i++) {
			barrier_init(shared + AT_V_FULL + 8 * i, 1);
			barrier_init(shared + AT_V_EMPTY + 8 * i, 4 * OWNERS);
			barrier_init(shared + AT_V_FETCHED + 8 * i, 1);
		}
		barrier_init_done();
		for (int i = 0; i < MAPS; i++) prefetch_map(&x.map[i]);
	}
	block_barrier();

	if (warpgroup == 0) {
		registers_release<HELPER_REGISTERS>();
		if (!PAGED && !MAYBE_PAGED) {
			if (warp == 0 && lane_id() == 0) fetch_queries_and_keys<false>(x, shared, memory);
			if (warp == 1 && lane_id() == 0) fetch_values<false>(x, shared, memory);
			if (warp == 2 && lane_id() == 0) queue::put_all<make_schedule, decode>(a, shared, memory);
			if (MASKED && warp == 3) clear_values(a, shared, memory);
			return;
		}
		/* the same; branches in this order, lest what they share live in registers, of which a helper has few */
		if (warp == 3) {
			clear_values(a, shared, memory);
		} else if (warp == 2) {
			if (lane_id() == 0) queue::put_all<make_schedule, decode>(a, shared, memory);
		} else if (PAGED || a.number[PIECE]) {
			if (warp == 0) fetch_queries_and_keys<true>(x, shared, memory);
			else fetch_values<true>(x, shared, memory);
		} else if (lane_id() == 0) {
			if (warp == 0) fetch_queries_and_keys<false>(x, shared, memory);
			else fetch_values<false>(x, shared, memory);
		}
		return;
	}

	registers_claim<OWNER_REGISTERS>();
	const int group = warpgroup - 1, lane = lane_id();
	const bool leader = lane == 0;
	const int my_row = group * 64 + warp * 16 + (lane >> 2), my_column = 2 * (lane & 3);
	const float unit = (CAPPED ? a.softcap : a.softmax_scale) * LOG2E, twice = 2 * a.softmax_scale * LOG2E / a.softcap;
	const uint64_t k_operand = operand(shared + AT_K, 16), v_operand = operand(shared + AT_V, BN * 128);
	ring<TILE_STAGES> place = {0, 0};
	ring<Q_STAGES(HEAD)> q = {0, 0};
	ring<K_BUFFERS> k = {0, 0};
	ring<V_BUFFERS> v = {0, 0};
	float s[BN / 2], out[VALUE / 2];
	uint32_t p[BN / 4], held[HEAD / 4];
	rows r;
	bool owing = false;

	for (;;) {
		const tile &t = queue::next(shared, memory, place);
		const int blocks = same(t.blocks), first_block = same(t.first_block);
		if (blocks < 0) break;
		/* after the divergent end of a tile the compiler no longer knows that these are the same in all lanes, and would fetch the
		 * products' operands from vector registers */
		q.stage = same(q.stage), q.parity = same(q.parity);
		k.stage = same(k.stage), k.parity = same(k.parity);
		v.stage = same(v.stage), v.parity = same(v.parity);
		r.top0 = r.top1 = -INFINITY;
		r.total0 = r.total1 = 0;

		if (blocks > 0) {
			const uint32_t q_at = shared + q.stage * Q_BYTES + group * Q_GROUP_BYTES;
			const uint64_t q_operand = operand(q_at, 16);
			/* blocks from high_from on and those before low_to hold pairs that this warp's rows do not see */
			const int warp_row = group * 64 + warp * 16;
			int high_from, low_to;
			find_cut_blocks<MASKED, 16, BN>(t, warp_row, first_block, high_from, low_to);
			auto mask = [&](int n) {
				const int to_mine = -(first_block + n) * BN - my_column;
				if (n >= high_from) {
					const int end0 = MASKED ? min(t.keys, t.see_last + my_row) : t.keys;
					const int end1 = MASKED ? min(t.keys, t.see_last + my_row + 8) : t.keys;
					mask_high(s, end0 + to_mine, end1 + to_mine);
				}
				if (n < low_to) mask_low(s, t.see_first + my_row + to_mine, t.see_first + my_row + 8 + to_mine);
			};
			auto empty = [&] { return __any_sync(0xffffffffu, r.top0 == -INFINITY || r.top1 == -INFINITY); };

			barrier_wait(shared + AT_Q_FULL + 8 * q.stage, q.parity);
			if (Q_HELD) {
#pragma unroll
				for (int i = 0; i < HEAD / 16; i++)
					load_matrix4(&held[4 * i], q_at + place_of<64>(warp * 16 + (lane & 15), 2 * i + (lane >> 4)));
			}
			float fade0, fade1;
			barrier_wait(shared + AT_K_FULL + 8 * k.stage, k.parity);
			wgmma_fence();
			multiply_qk(s, held, q_operand, k_operand + (k.stage * K_BYTES >> 4));
			wgmma_commit();
			wgmma_wait<0>();
			pin(s);
			if (CAPPED) cap(s, twice);
			if (leader) barrier_arrive(shared + AT_K_EMPTY + 8 * k.stage);
			k.next();
			mask(blocks - 1);
			(void)weigh_by_maximum(s, r, unit, fade0, fade1);
			pack(p, s);
			if (OWING && owing) {
				if (warp == 0 && leader) store_wait_read();
				if (leader) barrier_arrive(shared + AT_Q_EMPTY + 8 * (q.stage ^ 1));
			}
			bool maxima = empty(), outgrown = false;
			int add = 0;

			for (int n = blocks - 2; n >= 0; n--) {
				barrier_wait(shared + AT_K_FULL + 8 * k.stage, k.parity);
				wgmma_fence();
				multiply_qk(s, held, q_operand, k_operand + (k.stage * K_BYTES >> 4));
				wgmma_commit();
				barrier_wait(shared + AT_V_FULL + 8 * v.stage, v.parity);
				wgmma_fence();
				multiply_pv(out, p, v_operand + (v.stage * V_BYTES >> 4), add);
				wgmma_commit();
				add = 1;
				wgmma_wait<1>();
				pin(s);
				if (CAPPED) cap(s, twice);
				/* what a cap costs hides what a maximum does */
				bool moved = false, by_maximum = CAPPED || maxima;
				if (MASKED && (n >= high_from || n < low_to)) {
					mask(n);
					by_maximum = true;
				}
				if (!by_maximum && !weigh_by_reference(s, r, unit)) {
					repeat_scores<matrix<element>, HEAD / 16>(s, q_at, shared + AT_K + k.stage * K_BYTES, warp);
					by_maximum = outgrown = true;
				}
				if (by_maximum) {
					moved = weigh_by_maximum(s, r, unit, fade0, fade1);
					maxima = outgrown || empty();
				}
				if (leader) barrier_arrive(shared + AT_K_EMPTY + 8 * k.stage);
				k.next();
				wgmma_wait<0>();
				pin(out);
				if (leader) barrier_arrive(shared + AT_V_EMPTY + 8 * v.stage);
				v.next();
				if (moved) shrink(out, fade0, fade1);
				pack(p, s);
				if (LONG && (blocks - 1 - n) % FOLD_BLOCKS == 0) {
					fold(a, out, r, unit, blocks - 1 - n == FOLD_BLOCKS);
					add = 0;
				}
			}
			if (OWN_OUT && leader) barrier_arrive(shared + AT_Q_EMPTY + 8 * q.stage);
			barrier_wait(shared + AT_V_FULL + 8 * v.stage, v.parity);
			wgmma_fence();
			multiply_pv(out, p, v_operand + (v.stage * V_BYTES >> 4), add);
			wgmma_commit();
			wgmma_wait<0>();
			pin(out);
			if (leader) barrier_arrive(shared + AT_V_EMPTY + 8 * v.stage);
			v.next();
			if (LONG && blocks > FOLD_BLOCKS) fold(a, out, r, unit, false);
		}

		/* read again here, lest registers hold it, and what comes of it, through the loop */
		const int lane = lane_read();
		const bool leader = lane == 0;
		float factor0, factor1;
		finish_rows(a, t, group * 64 + warp * 16, lane, r.top0, r.top1, r.total0, r.total1, unit, factor0, factor1);
		if (blocks == 0) {
			store_nothing(a, t, group * 64 + warp * 16);
			__syncwarp();
			if (leader) queue::done(shared, place);
			place.next();
			continue;
		}

		/* a row without keys is 0, whatever V is that other rows of the tile see */
		if (MASKED && __any_sync(0xffffffffu, factor0 == 0.0f || factor1 == 0.0f)) {
#pragma unroll
			for (int i = 0; i < VALUE / 2; i += 4) {
				if (factor0 == 0.0f) out[i] = out[i + 1] = 0;
				if (factor1 == 0.0f) out[i + 2] = out[i + 3] = 0;
			}
		}

		const uint32_t at = OWN_OUT ? AT_OUT + group * OUT_GROUP_BYTES : q.stage * Q_BYTES + group * Q_GROUP_BYTES;
		if (OWN_OUT && warp == 0 && leader) store_wait_read();
		warpgroup_barrier(group);
#pragma unroll
		for (int i = 0; i < VALUE / 8; i += 2) {
			const uint32_t to = shared + at + place_of<64>(warp * 16 + (lane & 15), i + (lane >> 4));
			store_matrix4(to, matrix<element>::pack(out[4 * i] * factor0, out[4 * i + 1] * factor0),
			              matrix<element>::pack(out[4 * i + 2] * factor1, out[4 * i + 3] * factor1),
			              matrix<element>::pack(out[4 * i + 4] * factor0, out[4 * i + 5] * factor0),
			              matrix<element>::pack(out[4 * i + 6] * factor1, out[4 * i + 7] * factor1));
		}
		/* the copy engine leaves out rows behind the tensor, but would write those of the next sequence */
		if (!MASKED || !(a.features & F_VARLEN) || t.rows >= BM) {
			fence_async();
			warpgroup_barrier(group);
			if (warp == 0 && leader) {
				store_rows<VALUE>(a, &x.map[OUT_MAP], t, shared + at, group * 64);
				if (!OWN_OUT && !OWING) store_wait_read();
			}
		} else {
			store_part(a, t, memory + at, group * 64, warp, lane);
			if (!OWN_OUT) fence_async(); /* queries come there next */
		}
		__syncwarp();
		if (leader) {
			if (!OWN_OUT && !OWING) barrier_arrive(shared + AT_Q_EMPTY + 8 * q.stage);
			queue::done(shared, place);
		}
		owing = true;
		q.next();
		place.next();
	}
	if (warp == 0 && leader) store_wait_read();
}
#endif
