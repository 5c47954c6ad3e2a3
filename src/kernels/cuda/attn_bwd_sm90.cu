/*
 * Attention backward on Hopper (sm_90a), as bwd_sm90.h has it, with dQ beside dK and dV: five products for a tile of rows and a block of
 * keys. dS goes to shared memory, for dQ = dS K over both warpgroups of owners, one tile later so that neither waits for the other;
 * each warp has the copy engine add its part to an fp32 image of dQ, from memory of its own and without a barrier. The first
 * kernel makes that image zero; a last one rounds it.
 *
 * What limits it is the bandwidth of shared memory, then the additions to dQ. So something must run under these: the next tile's S where
 * dK is issued late (heads of 128), else dK.
 */
#define ADDS_DQ 1
#include "bwd_sm90.h"

#ifdef INGOT_HOST

const ingot__impl ingot__impl_attn_bwd_sm90 = {
	.name = "attn_bwd_sm90",
	.family = "cuda",
	.op = INGOT__ATTN_BWD,
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

/* A block rounds a slab. */
extern "C" __global__ void __launch_bounds__(128) attn_bwd_sm90_dq(const __grid_constant__ arguments x) {
	enum { PITCH = 64 + 8 };
	__shared__ __align__(16) element part[64 * PITCH];
	const ingot__gpu_args &a = x.a;
	const int tile = blockIdx.x / SLABS, slab = blockIdx.x % SLABS, warp = warp_id(), lane = lane_id();
	const int head = tile / a.number[ROW_TILES], batch = head / a.heads_q, h = head - batch * a.heads_q;
	const int i0 = (tile - head * a.number[ROW_TILES]) * BM + (BY_ROWS ? slab * 64 : 0);
	const int column0 = BY_ROWS ? 0 : slab * 64;
	const span q = rows_of(a, batch);
	wait_for_step_before();
	if (i0 >= q.count || column0 >= a.head_dim) return;
	const float *const from = dq_image(a, tile) + part_at(slab, warp);
#pragma unroll
	for (int n = 0; n < DQ_FLOATS / 4; n++) {
		if (HEAD == 96 && slab && n == DQ_FLOATS / 8) break;
		const float4 v = *(const float4 *)(from + (n * 32 + lane) * 4);
		uint32_t *const to = (uint32_t *)(part + (warp * 16 + (lane >> 2)) * PITCH + n * 8 + 2 * (lane & 3));
		to[0] = matrix<element>::pack(v.x * a.softmax_scale, v.y * a.softmax_scale);
		to[8 * PITCH / 2] = matrix<element>::pack(v.z * a.softmax_scale, v.w * a.softmax_scale);
	}
	block_barrier();
	for (int n = thread_id(); n < 64 * 8; n += 128) {
		const int row = n / 8, column = n % 8 * 8;
		if (i0 + row < q.count && column0 + column < a.head_dim)
			*(uint4 *)((element *)a.dq + row_offset(a.dq_stride, q, h, i0 + row) + column0 + column) =
				*(const uint4 *)(part + row * PITCH + column);
	}
}
#endif
