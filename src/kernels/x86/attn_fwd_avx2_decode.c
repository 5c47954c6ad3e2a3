/*
 * Attention forward for few query rows on AVX2; see decode.h. Arithmetic is fp32 for every type of K and V.
 */
#define DECODE_NAME attn_fwd_avx2_decode
/* Processors without AVX-512 that serve models are mostly AMD's: on family 23 model 49, blocks that fit in L1 (K and V of 32 rows)
 * fetched past L2 read 15 % faster than 64 rows fetched into it. */
#define DECODE_HINT _MM_HINT_NTA
enum { DECODE_KEYS = 32 };
#include "decode.h"

#ifdef INGOT_HOST
static const char *refuse(const ingot__problem *p, const ingot__device *device, int *variant) {
	(void)device;
	*variant = 0;
	return decode_refuse(p);
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)device;
	decode_plan(p, out, threads, 8);
}

extern const ingot__impl DECODE_IMPL;
static const char *const variants[] = {"decode"};
const ingot__impl DECODE_IMPL = {
	.name = DECODE_TEXT(DECODE_NAME),
	.family = "x86",
	.op = INGOT__ATTN_FWD,
	.device = INGOT_CPU,
	.arch = "avx2",
	.rank = 50,
	.variants = variants,
	.variant_count = 1,
	.refuse = refuse,
	.plan = plan,
};
#endif
