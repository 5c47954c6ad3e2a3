/* attn_bwd: its fields, and what the gradients must look like. */
#include "operator.h"

#include "../support/error.h"

#define P ingot_attn_bwd_params
#define R4 INGOT__RANK(4)
#define IN (INGOT__REQUIRED | INGOT__LAST_1)
#define GRAD (INGOT__LAST_1 | INGOT__OUTPUT)

static const ingot__field fields[] = {
	INGOT__S(P, INGOT__U32, varlen),
	INGOT__T(P, q, IN, INGOT__FLOATS, R4),
	INGOT__T(P, k, IN, INGOT__FLOATS, R4),
	INGOT__T(P, v, IN, INGOT__FLOATS, R4),
	INGOT__T(P, out, IN, INGOT__FLOATS, R4),
	INGOT__T(P, lse, INGOT__REQUIRED, INGOT__DT(F32), INGOT__RANK(2) | INGOT__RANK(3)),
	INGOT__T(P, dout, IN, INGOT__FLOATS, R4),
	INGOT__T(P, dq, GRAD, INGOT__FLOATS, R4),
	INGOT__T(P, dk, GRAD, INGOT__FLOATS, R4),
	INGOT__T(P, dv, GRAD, INGOT__FLOATS, R4),
	INGOT__T(P, bias, INGOT__LAST_01, INGOT__FLOATS | INGOT__DT(BOOL), R4),
	INGOT__T(P, dbias, GRAD, INGOT__FLOATS, R4),
	INGOT__T(P, alibi, 0, INGOT__DT(F32), INGOT__RANK(1) | INGOT__RANK(2)),
	INGOT__T(P, sink, 0, INGOT__DT(F32), INGOT__RANK(1)),
	INGOT__T(P, dsink, INGOT__OUTPUT, INGOT__DT(F32), INGOT__RANK(1)),
	INGOT__A(P, q_lengths, INGOT__RANK(1)),
	INGOT__A(P, q_positions, INGOT__RANK(1)),
	INGOT__A(P, k_lengths, INGOT__RANK(1)),
	INGOT__A(P, k_positions, INGOT__RANK(1)),
	INGOT__T(P, dropout_seed_ptr, 0, INGOT__CELLS, INGOT__RANK(1)),
	INGOT__T(P, dropout_offset_ptr, 0, INGOT__CELLS, INGOT__RANK(1)),
	INGOT__S(P, INGOT__U64, dropout_seed),
	INGOT__S(P, INGOT__U64, dropout_offset),
	INGOT__S(P, INGOT__I64, batch),
	INGOT__S(P, INGOT__I64, max_seqlen_q),
	INGOT__S(P, INGOT__I64, max_seqlen_k),
	INGOT__S(P, INGOT__F32, softmax_scale),
	INGOT__S(P, INGOT__F32, softcap),
	INGOT__S(P, INGOT__F32, dropout_p),
	INGOT__S(P, INGOT__I32, mask),
	INGOT__S(P, INGOT__I32, align),
	INGOT__S(P, INGOT__I32, window_left),
	INGOT__S(P, INGOT__I32, window_right),
	INGOT__S(P, INGOT__I32, lse_base),
};

static ingot_status like(const char *name, const ingot_tensor *t, const ingot_tensor *model, const char *meaning) {
	if (t->dtype == INGOT_NONE) return INGOT_OK;
	for (int a = 0; a < 4; a++) {
		ingot_status s = ingot__need_extent(name, t, a, model->shape[a], meaning);
		if (s) return s;
	}
	return INGOT_OK;
}

static ingot_status need_dbias(const ingot__problem *p) {
	const ingot_tensor *const g = &p->dbias, *const b = &p->bias;
	if (g->dtype == INGOT_NONE) return INGOT_OK;
	if (b->dtype == INGOT_NONE) return ingot__fail(INGOT_INVALID, "dbias is given but bias is absent");
	if (b->dtype == INGOT_BOOL)
		return ingot__fail(INGOT_INVALID, "dbias is given but bias is BOOL, which has no gradient");
	if (g->dtype != INGOT_F32 && g->dtype != b->dtype)
		return ingot__fail(INGOT_INVALID, "dbias.dtype is %s; allowed are F32 and bias's type, here %s",
		                   ingot__dtype_name(g->dtype), ingot__dtype_name(b->dtype));
	const int64_t full[4] = {p->batch, p->heads_q, p->q_side.max_seqlen, p->k_side.max_seqlen};
	for (int a = 0; a < 4; a++) {
		const bool broadcast = b->shape[a] != full[a] || b->stride[a] == 0;
		if (g->shape[a] != full[a] && !(broadcast && g->shape[a] == 1))
			return ingot__fail(INGOT_INVALID, "dbias.shape[%d] is %lld; it must be %lld%s", a, (long long)g->shape[a],
			                   (long long)full[a], broadcast ? ", or 1 to sum over the broadcast axis" : "");
	}
	return INGOT_OK;
}

static ingot_status normalize(const ingot__raw *raw, ingot__problem *p) {
	ingot_status s = ingot__need_attention(raw, p);
	if (!s) s = like("dout", &p->dout, &p->out, "as out");
	if (!s) s = like("dq", &p->dq, &p->q, "as q");
	if (!s) s = like("dk", &p->dk, &p->k, "as k");
	if (!s) s = like("dv", &p->dv, &p->v, "as v");
	if (!s) s = need_dbias(p);
	if (!s && p->dsink.dtype != INGOT_NONE) {
		if (p->sink.dtype == INGOT_NONE) return ingot__fail(INGOT_INVALID, "dsink is given but sink is absent");
		s = ingot__need_extent("dsink", &p->dsink, 0, p->heads_q, "Hq");
	}
	return s;
}

const ingot__operator_def ingot__attn_bwd_def = {
	"ingot_attn_bwd", "attn_bwd", sizeof(P), sizeof(P), fields, sizeof fields / sizeof *fields, normalize,
};
