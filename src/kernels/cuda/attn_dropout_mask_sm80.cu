/*
 * The dropout mask on NVIDIA GPUs: one thread writes the four neighbours that one draw serves. The mask is dbias of the
 * arguments, [B,Hq,Sq,Sk] by stride.
 */
#include "../gpu_args.h"

enum { ROWS, COLUMNS, THREADS = 256 };

#ifdef INGOT_HOST

static const ingot__image_variant images[] = {{"general", "", 0}};
static const char *const kernels[] = {"attn_dropout_mask_sm80", NULL};

static const char *refuse(const ingot__problem *p, const ingot__device *device, int *variant) {
	(void)p;
	(void)device;
	*variant = 0;
	return NULL;
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)device;
	(void)threads;
	ingot__gpu_args *const a = ingot__gpu_fill(p, out);
	a->dbias = p->keep.data;
	ingot__gpu_strides(a->dbias_stride, &p->keep, 4);
	a->number[ROWS] = (int32_t)p->keep.shape[2];
	a->number[COLUMNS] = (int32_t)p->keep.shape[3];
	const int64_t quads = (p->keep.shape[3] + 3) / 4, work = p->batch * p->heads_q * p->keep.shape[2] * quads;
	if (work == 0) return;
	const int64_t blocks = (work + THREADS - 1) / THREADS;
	out->steps = 1;
	out->step[0] = (ingot__step){.name = "draw",
	                             .kernel = kernels[0],
	                             .block = {THREADS, 1, 1},
	                             .grid = {(uint32_t)(blocks < 65536 ? blocks : 65536), 1, 1}};
}

const ingot__impl ingot__impl_attn_dropout_mask_sm80 = {
	.name = "attn_dropout_mask_sm80",
	.family = "cuda",
	.op = INGOT__ATTN_DROPOUT_MASK,
	.device = INGOT_CUDA,
	.arch = "",
	.rank = 10,
	.variant_count = 1,
	.images = images,
	.kernels = kernels,
	.refuse = refuse,
	.plan = plan,
};

#else
#include "../gpu.h"

extern "C" __global__ void __launch_bounds__(THREADS)
	attn_dropout_mask_sm80(const __grid_constant__ ingot__gpu_args a) {
	const index_t rows = a.number[ROWS], columns = a.number[COLUMNS], quads = (columns + 3) / 4;
	const index_t all = (index_t)a.batch * a.heads_q * rows * quads;
	const uint64_t seed = dropout_seed(a), offset = dropout_offset(a);
	for (index_t n = (index_t)blockIdx.x * THREADS + thread_id(); n < all; n += (index_t)gridDim.x * THREADS) {
		const index_t quad = n % quads, i = n / quads % rows, bh = n / quads / rows;
		const int b = (int)(bh / a.heads_q), h = (int)(bh % a.heads_q), j = (int)quad * 4;
		const uint4 word = philox(seed, offset, dropout_index(a, b, h, (int)i, j));
		const uint32_t words[4] = {word.x, word.y, word.z, word.w};
		unsigned char *to =
			(unsigned char *)a.dbias + b * a.dbias_stride[0] + h * a.dbias_stride[1] + i * a.dbias_stride[2] + j;
		for (int x = 0; x < 4 && j + x < columns; x++) to[x] = words[x] >= a.dropout_threshold;
	}
}
#endif
