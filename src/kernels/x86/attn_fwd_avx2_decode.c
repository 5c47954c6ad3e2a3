/*
 * Attention forward for few query rows on AVX2: see decode.h. Arithmetic is fp32 for every type.
 */
#define DECODE_NAME attn_fwd_avx2_decode
#define DECODE_ARCH "avx2"
#define DECODE_LANES 8
#define DECODE_RANK 50
#include "decode.h"
