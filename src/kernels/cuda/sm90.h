/*
 * Hopper's own instructions, for kernels built for sm_90a: memory barriers that count bytes, the copy engine, and matrix products
 * of a warpgroup. Operands of the products lie in shared memory as the copy engine leaves them with a 128-byte swizzle: panels of
 * 64 columns, a row of a panel being 128 bytes, every panel on a multiple of 1024 bytes. ELEMENT (an ingot_dtype) is defined by the
 * image. The host half describes tensors for the copy engine, and orders tiles.
 */
#ifndef INGOT_KERNELS_CUDA_SM90_H
#define INGOT_KERNELS_CUDA_SM90_H

#include "../gpu_args.h"

#define PANELS(columns) (((columns) + 63) / 64)
#define TILE_BYTES(rows, columns) ((rows) * PANELS(columns) * 128)
/* Where a plan's tensor maps stand: behind the arguments, 128 bytes each. */
#define MAPS_AT ((sizeof(ingot__gpu_args) + 63) / 64 * 64)

#ifdef INGOT_HOST

/* Whether the copy engine can tell where a tensor's rows, heads and batches are. */
static inline bool can_map(const ingot_tensor *t) {
	for (int i = 0; i < 3; i++)
		if (t->stride[i] * 2 >= (int64_t)1 << 40) return false;
	return t->stride[2] != 0 || t->shape[2] <= 1;
}

/* Boxes of `rows` rows and 64 columns of a tensor, as the plan's map `index`. */
static inline ingot__tensor_map map_of(int index, const ingot_tensor *t, int rows) {
	ingot__tensor_map m = {
		.at = (uint32_t)(MAPS_AT + 128 * (size_t)index), .data = t->data, .box = {64, (uint32_t)rows}};
	for (int i = 0; i < 4; i++) {
		const int axis = 3 - i;
		/* an axis without a stride has one place, and the kernel stays there */
		const bool still = i && t->stride[axis] == 0;
		m.extent[i] = still ? 1 : t->shape[axis];
		if (i) m.stride[i - 1] = still ? 8 : t->stride[axis];
	}
	return m;
}

/* How many heads, `least` groups or more, are worked on together where tiles differ in length: the longest come first, so that
 * blocks end together, but the `bytes` that the tiles of a group share must stay in the second-level cache. */
static inline int64_t even_sections(const ingot__device *device, int64_t heads, int64_t group, int64_t least,
                                    double bytes) {
	const int64_t cached = (int64_t)((double)device->l2_bytes * 9 / 16 / (bytes > 1 ? bytes : 1));
	const int64_t most = (cached > least ? cached : least) * group;
	if (most >= heads) return heads;
	const int64_t sections = (heads + most - 1) / most, even = (heads + sections - 1) / sections;
	return (even + group - 1) / group * group;
}

/* Likewise for blocks that take a section's tiles in turn: some for each multiprocessor at least, lest nothing evens out. */
static inline int64_t section_heads(const ingot__device *device, int64_t heads, int64_t group, int64_t tiles,
                                    double bytes) {
	return even_sections(device, heads, group, (device->multiprocessors * 7 / 2 + tiles * group - 1) / (tiles * group),
	                     bytes);
}

#else
#include "../gpu.h"

#if ELEMENT == 2
typedef __half element;
#else
typedef __nv_bfloat16 element;
#endif

/* What the copy engine knows of a tensor: made by the driver, see ingot__tensor_map of pipeline.h. */
struct __align__(64) tensor_map {
	unsigned char opaque[128];
};

/* ---- memory barriers: a phase ends when all arrivals and all announced bytes are there ---------------------------------- */

DEVICE void barrier_init(uint32_t barrier, int arrivals) {
	asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/* Makes initialised barriers known to the copy engine; then block_barrier() for the block's own threads. */
DEVICE void barrier_init_done() {
	asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void barrier_arrive(uint32_t barrier) {
	asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/* Arrives, and lets the phase wait for so many bytes of the copy engine. */
DEVICE void barrier_expect(uint32_t barrier, int bytes) {
	asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/* Waits for the end of the phase of that parity: 0 for a barrier's first. Parity 1 of a new barrier is taken for ended. */
DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
	asm volatile("{\n"
	             ".reg .pred done;\n"
	             "again:\n"
	             "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
	             "@!done bra again;\n"
	             "}" ::"r"(barrier),
	             "r"(parity)
	             : "memory");
}

/* Place in a ring of buffers, each with a barrier for full and one for empty. Who fills begins with parity 1. */
template <int stages> struct ring {
	int stage;
	uint32_t parity;
	__device__ __forceinline__ void next() {
		if (++stage == stages) stage = 0, parity ^= 1;
	}
};

/* A value that is the same in all lanes, and known to be so. */
DEVICE int same(int x) {
	return __shfl_sync(0xffffffffu, x, 0);
}

/* Threads of a warpgroup, by a barrier of their own. */
DEVICE void warpgroup_barrier(int group) {
	asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

/* ---- the copy engine -------------------------------------------------------------------------------------------------- */

/* A box into shared memory; what lies outside the tensor arrives as zeros, and counts. */
DEVICE void load_box(uint32_t to, const tensor_map *map, uint32_t barrier, int column, int row, int head, int batch) {
	asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
	             "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
	             "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
	             : "memory");
}
/* A tile of rows, panel by panel. */
template <int columns, int rows>
DEVICE void load_tile(uint32_t to, const tensor_map *map, uint32_t barrier, int row, int head, int batch) {
#pragma unroll
	for (int i = 0; i < PANELS(columns); i++) load_box(to + i * rows * 128, map, barrier, i * 64, row, head, batch);
}
/* Adds floats in shared memory to those in global memory; part of this thread's stores. */
DEVICE void add_floats(float *to, uint32_t from, int bytes) {
	asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
	             "r"(bytes)
	             : "memory");
}
/* Adds four floats in registers. */
DEVICE void add_four(float *to, const float *x) {
	asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
	             : "memory");
}
/* A box out of shared memory; what lies outside the tensor is not written. */
DEVICE void store_box(const tensor_map *map, uint32_t from, int column, int row, int head, int batch) {
	asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
	             "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch)
	             : "memory");
}
DEVICE void store_commit() {
	asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* Until the copy engine has read what this thread's stores are made of. */
DEVICE void store_wait_read() {
	asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/* Until this thread's stores are done. */
DEVICE void store_wait() {
	asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
/* What this thread wrote to shared memory comes before what the copy engine and the matrix products read later. */
DEVICE void fence_async() {
	asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void prefetch_map(const tensor_map *map) {
	asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* ---- registers of a warpgroup ------------------------------------------------------------------------------------------- */

template <int count> DEVICE void registers_release() {
	asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count> DEVICE void registers_claim() {
	asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

/* ---- matrix products of a warpgroup ------------------------------------------------------------------------------------- */

DEVICE void wgmma_fence() {
	asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void wgmma_commit() {
	asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending> DEVICE void wgmma_wait() {
	asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
/* The wait names no registers: without this the compiler takes results for known before it. */
template <int count> DEVICE void pin(float (&d)[count]) {
#pragma unroll
	for (int i = 0; i < count; i++) asm volatile("" : "+f"(d[i])::"memory");
}

/* An operand in shared memory. K-major (rows of the operand are rows of the panel): step to the next 8 rows 1024, the other is
 * ignored. MN-major (columns of the panel): step to the next 8 k 1024, to the next panel panel_bytes. */
DEVICE uint64_t operand(uint32_t address, int panel_bytes) {
	return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(panel_bytes >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
	       (uint64_t)1 << 62;
}

#if ELEMENT == 2
#define WGMMA_TYPES "f32.f16.f16"
#else
#define WGMMA_TYPES "f32.bf16.bf16"
#endif

/* Accumulators as text and as operands. */
#define WGMMA_D16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_D24                                            \
	"%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
	"%16,%17,%18,%19,%20,%21,%22,%23"
#define WGMMA_D32 \
	WGMMA_D24     \
	",%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_D48 \
	WGMMA_D32     \
	",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_D64 \
	WGMMA_D48     \
	",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_D96                                                      \
	WGMMA_D64                                                          \
	",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
	",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_D128                                                                 \
	WGMMA_D96                                                                      \
	",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
	",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA_O8(i)                                                                                             \
	"+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
		"+f"(d[i + 7])
#define WGMMA_O16 WGMMA_O8(0), WGMMA_O8(8)
#define WGMMA_O24 WGMMA_O8(0), WGMMA_O8(8), WGMMA_O8(16)
#define WGMMA_O32 WGMMA_O24, WGMMA_O8(24)
#define WGMMA_O48 WGMMA_O32, WGMMA_O8(32), WGMMA_O8(40)
#define WGMMA_O64 WGMMA_O48, WGMMA_O8(48), WGMMA_O8(56)
#define WGMMA_O96 WGMMA_O64, WGMMA_O8(64), WGMMA_O8(72), WGMMA_O8(80), WGMMA_O8(88)
#define WGMMA_O128 WGMMA_O96, WGMMA_O8(96), WGMMA_O8(104), WGMMA_O8(112), WGMMA_O8(120)

/* d[64 x n] (+)= A[64 x 16] B[16 x n], d being added to where `add`. shared(): A K-major in shared memory. held(): A in
 * registers. B K-major or (transposed) MN-major. r0 to r6 are the numbers of the operands behind the accumulators. */
template <int n> struct wgmma;
#define WGMMA(n, registers, r0, r1, r2, r3, r4, r5, r6)                                                              \
	template <> struct wgmma<n> {                                                                                    \
		template <int transposed, int transposed_a = 0>                                                              \
		static __device__ __forceinline__ void shared(float (&d)[registers], uint64_t a, uint64_t b, int add) {      \
			asm volatile("{\n"                                                                                       \
			             ".reg .pred add;\n"                                                                         \
			             "setp.ne.b32 add, %" #r2 ", 0;\n"                                                           \
			             "wgmma.mma_async.sync.aligned.m64n" #n "k16." WGMMA_TYPES " {" WGMMA_D##registers           \
			             "}, %" #r0 ", %" #r1 ", add, 1, 1, %" #r4 ", %" #r3 ";\n"                                   \
			             "}"                                                                                         \
			             : WGMMA_O##registers                                                                        \
			             : "l"(a), "l"(b), "r"(add), "n"(transposed), "n"(transposed_a));                            \
		}                                                                                                            \
		template <int transposed>                                                                                    \
		static __device__ __forceinline__ void held(float (&d)[registers], const uint32_t *a, uint64_t b, int add) { \
			asm volatile("{\n"                                                                                       \
			             ".reg .pred add;\n"                                                                         \
			             "setp.ne.b32 add, %" #r5 ", 0;\n"                                                           \
			             "wgmma.mma_async.sync.aligned.m64n" #n "k16." WGMMA_TYPES " {" WGMMA_D##registers           \
			             "}, {%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4 ", add, 1, 1, %" #r6 ";\n"             \
			             "}"                                                                                         \
			             : WGMMA_O##registers                                                                        \
			             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(transposed));           \
		}                                                                                                            \
	};
WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
WGMMA(48, 24, 24, 25, 26, 27, 28, 29, 30)
WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

#endif
#endif
