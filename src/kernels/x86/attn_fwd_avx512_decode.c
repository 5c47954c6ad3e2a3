/*
 * Attention forward for few query rows on AVX-512; see decode.h. Arithmetic is fp32 for every type of K and V.
 */
#define DECODE_NAME attn_fwd_avx512_decode
/* Fetched into L2, not L1, whose few miss buffers are what limits a core that reads. The non-temporal hint is the worst: 2 to 4
 * GB/s of 28 on an Intel model 207. */
#define DECODE_HINT _MM_HINT_T1
enum { DECODE_KEYS = 64 };
#include "decode.h"

#ifdef INGOT_HOST
static const char *refuse(const ingot__problem *p, const ingot__device *device, int *variant) {
	(void)device;
	*variant = 0;
	return decode_refuse(p);
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)device;
	decode_plan(p, out, threads, 16);
}

extern const ingot__impl DECODE_IMPL;
static const char *const variants[] = {"decode"};
const ingot__impl DECODE_IMPL = {
	.name = DECODE_TEXT(DECODE_NAME),
	.family = "x86",
	.op = INGOT__ATTN_FWD,
	.device = INGOT_CPU,
	.arch = "avx512",
	.rank = 60,
	.variants = variants,
	.variant_count = 1,
	.refuse = refuse,
	.plan = plan,
};
#endif
