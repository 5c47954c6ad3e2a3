/* The tuning bucket of a problem: what two calls must share for one's measurement to speak for the other. */
#include "operator.h"

/* floor(log2(x)), rounded to the nearest power of two on a log scale (x >= 1.41 * 2^n counts as 2^(n+1)); -1 for 0. */
static int8_t nearest_log2(int64_t x) {
	if (x <= 0) return -1;
	const int n = 63 - __builtin_clzll((unsigned long long)x);
	if (n >= 31) return 31;
	return (int8_t)(n + ((uint64_t)x * (uint64_t)x >= (uint64_t)2 << (2 * n)));
}

void ingot__bucket_of(const ingot__problem *p, ingot__bucket *b) {
	const ingot_tensor *const q = p->op == INGOT__ATTN_MERGE          ? &p->out_parts[0]
	                              : p->op == INGOT__KV_APPEND         ? &p->k_new
	                              : p->op == INGOT__ATTN_DROPOUT_MASK ? &p->keep
	                                                                  : &p->q;
	const uint32_t general =
		INGOT__BIAS | INGOT__BIAS_BOOL | INGOT__ALIBI | INGOT__SOFTCAP | INGOT__SINK | INGOT__DROPOUT;
	*b = (ingot__bucket){
		.dtype = (uint8_t)q->dtype,
		.kv_dtype = (uint8_t)(p->k.dtype != INGOT_NONE ? p->k.dtype : q->dtype),
		.mask = !(p->features & INGOT__MASK)                  ? 0
	            : p->left == INGOT__NO_BOUND && p->right == 0 ? 1
	                                                          : 2,
		.features = p->features & INGOT__PAGED ? 2
	                : p->features & general    ? 1
	                                           : 0,
		.d = (uint16_t)p->head_dim,
		.dv = (uint16_t)p->head_dim_v,
		.q = nearest_log2(p->q_side.max_seqlen),
		.k = nearest_log2(p->k_side.max_seqlen),
		/* batch invariant: no other sequence may turn the choice */
		.bh = nearest_log2((p->batch_invariant ? 1 : p->batch) * p->heads_q),
	};
}
