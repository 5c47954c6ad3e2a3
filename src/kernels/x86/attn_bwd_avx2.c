/*
 * Attention backward on AVX2 with FMA and F16C, fp32 arithmetic for fp32, fp16 and bf16: 16-bit rows become fp32 while they are
 * packed, P and dS stay fp32.
 */
#define BWD_NAME attn_bwd_avx2
enum { BWD_LANES = 8, BWD_ROWS = 6, BWD_PACK = 1 };
#include "attn_bwd.h"

#ifdef INGOT_HOST
static const char *refuse(const ingot__problem *p, const ingot__device *device, int *variant) {
	(void)device;
	*variant = bwd_variant(p);
	return bwd_refuse(p);
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)device, (void)threads;
	bwd_plan(p, out,
	         (ingot__task *const[]){BWD_TASK(_plain), BWD_TASK(_general), BWD_TASK(_dq), BWD_TASK(_dbias),
	                                BWD_TASK(_dsink)});
}

extern const ingot__impl BWD_IMPL;
static const char *const variants[] = {"plain", "general"};
const ingot__impl BWD_IMPL = {
	.name = BWD_TEXT(BWD_NAME),
	.family = "x86",
	.op = INGOT__ATTN_BWD,
	.device = INGOT_CPU,
	.arch = "avx2",
	.rank = 10,
	.variants = variants,
	.variant_count = 2,
	.refuse = refuse,
	.plan = plan,
};
#else
_Static_assert((int)BWD_LANES == VL && (int)BWD_ROWS == MR && (int)BWD_PACK == PACK, "the host half knows the tile");
#endif
