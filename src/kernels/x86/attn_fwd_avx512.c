/*
 * Attention forward on AVX-512, fp32 arithmetic for fp32, fp16 and bf16: 16-bit rows become fp32 while they are packed, and P
 * stays fp32.
 */
#define FWD_NAME attn_fwd_avx512
enum { FWD_LANES = 16, FWD_ROWS = 12, FWD_PACK = 1 };
#include "attn_fwd.h"

#ifdef INGOT_HOST
static const char *refuse(const ingot__problem *p, const ingot__device *device, int *variant) {
	(void)device;
	*variant = 0;
	return fwd_refuse(p);
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)device;
	fwd_plan(p, threads, out, FWD_LANES, FWD_ROWS, FWD_PACK,
	         (ingot__task *const[]){FWD_TASK(_rows), FWD_TASK(_merge), FWD_TASK(_cells)});
}

extern const ingot__impl FWD_IMPL;
static const char *const variants[] = {"general"};
const ingot__impl FWD_IMPL = {
	.name = FWD_TEXT(FWD_NAME),
	.family = "x86",
	.op = INGOT__ATTN_FWD,
	.device = INGOT_CPU,
	.arch = "avx512",
	.rank = 20,
	.variants = variants,
	.variant_count = 1,
	.refuse = refuse,
	.plan = plan,
};
#else
_Static_assert((int)FWD_LANES == VL && (int)FWD_ROWS == MR && (int)FWD_PACK == PACK, "the host half knows the tile");
#endif
