/*
 * Attention forward for bf16 by vdpbf16ps: both products take pairs of bf16, sums are fp32, and P is rounded to bf16. Twice the
 * rate of fp32 arithmetic on AMD's processors; on Intel's up to Granite Rapids the instruction has half of that rate, and
 * attn_fwd_avx512 is the faster one there.
 */
#define X86_PAIRS 1
#define FWD_NAME attn_fwd_avx512_bf16
enum { FWD_LANES = 16, FWD_ROWS = 12, FWD_PACK = 2 };
#include "attn_fwd.h"

#ifdef INGOT_HOST
static const char *refuse(const ingot__problem *p, const ingot__device *device, int *variant) {
	(void)device;
	*variant = 0;
	INGOT__REFUSE_IF(p->q.dtype != INGOT_BF16, "it multiplies bf16 pairs: q, k and v must be bf16");
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
	.arch = "avx512_bf16",
	.rank = 30,
	.variants = variants,
	.variant_count = 1,
	.refuse = refuse,
	.plan = plan,
};
#else
_Static_assert((int)FWD_LANES == VL && (int)FWD_ROWS == MR && (int)FWD_PACK == PACK, "the host half knows the tile");
#endif
