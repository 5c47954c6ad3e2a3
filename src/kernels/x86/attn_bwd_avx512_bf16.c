/*
 * Attention backward for bf16 by vdpbf16ps: all five products take pairs of bf16, sums are fp32, P and dS are rounded to bf16.
 * Twice the rate of fp32 arithmetic on AMD's processors; where the instruction has half of that rate, as on Intel's, attn_bwd_avx512
 * is the faster one.
 */
#define X86_PAIRS 1
#define BWD_NAME attn_bwd_avx512_bf16
enum { BWD_LANES = 16, BWD_ROWS = 12, BWD_PACK = 2 };
#include "attn_bwd.h"

#ifdef INGOT_HOST
static const char *refuse(const ingot__problem *p, const ingot__device *device, int *variant) {
	(void)device;
	*variant = bwd_variant(p);
	INGOT__REFUSE_IF(p->q.dtype != INGOT_BF16, "it multiplies bf16 pairs: q, k and v must be bf16");
	INGOT__REFUSE_IF(p->dout.dtype != INGOT_BF16, "it multiplies bf16 pairs: dout must be bf16");
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
	.arch = "avx512_bf16",
	.rank = 30,
	.variants = variants,
	.variant_count = 2,
	.refuse = refuse,
	.plan = plan,
};
#else
_Static_assert((int)BWD_LANES == VL && (int)BWD_ROWS == MR && (int)BWD_PACK == PACK, "the host half knows the tile");
#endif
