/* attn_fwd: its fields. All relations are shared with backward. */
#include "operator.h"

#define P ingot_attn_fwd_params
#define R4 INGOT__RANK(4)

static const ingot__field fields[] = {
	INGOT__S(P, INGOT__U32, varlen),
	INGOT__T(P, q, INGOT__REQUIRED | INGOT__LAST_1, INGOT__FLOATS | INGOT__EIGHTS, R4),
	INGOT__T(P, k, INGOT__REQUIRED | INGOT__LAST_1, INGOT__FLOATS | INGOT__EIGHTS, R4),
	INGOT__T(P, v, INGOT__REQUIRED | INGOT__LAST_1, INGOT__FLOATS | INGOT__EIGHTS, R4),
	INGOT__T(P, out, INGOT__REQUIRED | INGOT__LAST_1 | INGOT__OUTPUT, INGOT__FLOATS, R4),
	INGOT__T(P, lse, INGOT__OUTPUT, INGOT__DT(F32), INGOT__RANK(2) | INGOT__RANK(3)),
	INGOT__T(P, bias, INGOT__LAST_01, INGOT__FLOATS | INGOT__DT(BOOL), R4),
	INGOT__T(P, alibi, 0, INGOT__DT(F32), INGOT__RANK(1) | INGOT__RANK(2)),
	INGOT__T(P, sink, 0, INGOT__DT(F32), INGOT__RANK(1)),
	INGOT__T(P, q_descale, 0, INGOT__DT(F32), INGOT__RANK(1) | INGOT__RANK(2)),
	INGOT__T(P, k_descale, 0, INGOT__DT(F32), INGOT__RANK(1) | INGOT__RANK(2)),
	INGOT__T(P, v_descale, 0, INGOT__DT(F32), INGOT__RANK(1) | INGOT__RANK(2)),
	INGOT__A(P, q_lengths, INGOT__RANK(1)),
	INGOT__A(P, q_positions, INGOT__RANK(1)),
	INGOT__A(P, k_lengths, INGOT__RANK(1)),
	INGOT__A(P, k_positions, INGOT__RANK(1)),
	INGOT__A(P, page_table, INGOT__RANK(2)),
	INGOT__A(P, page_indptr, INGOT__RANK(1)),
	INGOT__A(P, page_indices, INGOT__RANK(1)),
	INGOT__T(P, dropout_seed_ptr, 0, INGOT__CELLS, INGOT__RANK(1)),
	INGOT__T(P, dropout_offset_ptr, 0, INGOT__CELLS, INGOT__RANK(1)),
	INGOT__T(P, dropout_seed_out, INGOT__OUTPUT, INGOT__CELLS, INGOT__RANK(1)),
	INGOT__T(P, dropout_offset_out, INGOT__OUTPUT, INGOT__CELLS, INGOT__RANK(1)),
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

static ingot_status normalize(const ingot__raw *raw, ingot__problem *p) {
	ingot_status s = ingot__need_attention(raw, p);
	if (!s) s = ingot__need_descale(p, "q_descale", &p->q_descale, true, &p->q, "q");
	if (!s) s = ingot__need_descale(p, "k_descale", &p->k_descale, false, &p->k, "k");
	if (!s) s = ingot__need_descale(p, "v_descale", &p->v_descale, false, &p->v, "v");
	return s;
}

const ingot__operator_def ingot__attn_fwd_def = {
	"ingot_attn_fwd", "attn_fwd", sizeof(P), sizeof(P), fields, sizeof fields / sizeof *fields, normalize,
};
