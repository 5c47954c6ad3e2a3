/*
 * Attention forward for few query rows on AVX-512: see decode.h. Arithmetic is fp32 for every type.
 */
#define DECODE_NAME attn_fwd_avx512_decode
#define DECODE_ARCH "avx512"
#define DECODE_LANES 16
#define DECODE_RANK 60
#include "decode.h"
