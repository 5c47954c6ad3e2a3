/* attn_dropout_mask: its fields. */
#include "../support/error.h"
#include "operator.h"

#define P ingot_attn_dropout_mask_params

static const ingot__field fields[] = {
	INGOT__S(P, INGOT__F32, dropout_p),
	INGOT__T_AS(P, mask, keep, INGOT__REQUIRED | INGOT__LAST_1 | INGOT__OUTPUT, INGOT__DT(BOOL), INGOT__RANK(4)),
	INGOT__T(P, dropout_seed_ptr, 0, INGOT__CELLS, INGOT__RANK(1)),
	INGOT__T(P, dropout_offset_ptr, 0, INGOT__CELLS, INGOT__RANK(1)),
	INGOT__S(P, INGOT__U64, dropout_seed),
	INGOT__S(P, INGOT__U64, dropout_offset),
	INGOT__S(P, INGOT__I64, max_seqlen_q),
	INGOT__S(P, INGOT__I64, max_seqlen_k),
};

static ingot_status need_maximum(const char *name, int64_t given, int64_t extent, int axis, int64_t *out) {
	if (given != 0 && (given < extent || given > INT32_MAX))
		return ingot__fail(INGOT_INVALID,
		                   "%s is %lld; allowed are 0 (mask.shape[%d]) and mask.shape[%d] = %lld to 2147483647", name,
		                   (long long)given, axis, axis, (long long)extent);
	*out = given ? given : extent;
	return INGOT_OK;
}

static ingot_status normalize(const ingot__raw *raw, ingot__problem *p) {
	ingot_status s;
	if ((s = need_maximum("max_seqlen_q", raw->max_seqlen_q, p->keep.shape[2], 2, &p->q_side.max_seqlen)) ||
	    (s = need_maximum("max_seqlen_k", raw->max_seqlen_k, p->keep.shape[3], 3, &p->k_side.max_seqlen)))
		return s;
	p->batch = p->keep.shape[0];
	p->heads_q = p->heads_k = p->keep.shape[1];
	p->q_side.capacity = p->keep.shape[2];
	p->k_side.capacity = p->keep.shape[3];
	return ingot__need_dropout(raw, p);
}

const ingot__operator_def ingot__attn_dropout_mask_def = {
	"ingot_attn_dropout_mask",      "attn_dropout_mask", sizeof(P), sizeof(P), fields,
	sizeof fields / sizeof *fields, normalize,
};
