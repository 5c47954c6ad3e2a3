/* kv_append: its fields, and how new rows and cache fit together. */
#include "../support/error.h"
#include "operator.h"

#define P ingot_kv_append_params
#define R4 INGOT__RANK(4)

static const ingot__field fields[] = {
	INGOT__S(P, INGOT__U32, varlen),
	INGOT__T(P, k_new, INGOT__REQUIRED | INGOT__LAST_1, INGOT__FLOATS, R4),
	INGOT__T(P, v_new, INGOT__LAST_1, INGOT__FLOATS, R4),
	INGOT__T(P, k, INGOT__REQUIRED | INGOT__LAST_1 | INGOT__OUTPUT, INGOT__FLOATS | INGOT__EIGHTS, R4),
	INGOT__T(P, v, INGOT__LAST_1 | INGOT__OUTPUT, INGOT__FLOATS | INGOT__EIGHTS, R4),
	INGOT__T(P, k_descale, 0, INGOT__DT(F32), INGOT__RANK(1) | INGOT__RANK(2)),
	INGOT__T(P, v_descale, 0, INGOT__DT(F32), INGOT__RANK(1) | INGOT__RANK(2)),
	INGOT__A_AS(P, new_lengths, q_lengths, INGOT__RANK(1)),
	INGOT__A_AS(P, new_positions, q_positions, INGOT__RANK(1)),
	INGOT__A(P, k_lengths, INGOT__RANK(1)),
	INGOT__A(P, page_table, INGOT__RANK(2)),
	INGOT__A(P, page_indptr, INGOT__RANK(1)),
	INGOT__A(P, page_indices, INGOT__RANK(1)),
	INGOT__S(P, INGOT__I64, batch),
	INGOT__S_AS(P, INGOT__I64, max_seqlen_new, max_seqlen_q),
	INGOT__S(P, INGOT__I64, max_seqlen_k),
	INGOT__S(P, INGOT__I32, lengths_after),
	INGOT__S(P, INGOT__I32, reserved),
};

static ingot_status need_pair(const char *name, const ingot_tensor *fresh, const ingot_tensor *cache,
                              const char *fresh_name) {
	if (cache->dtype != fresh->dtype && cache->dtype < INGOT_F8_E4M3)
		return ingot__fail(INGOT_INVALID,
		                   "%s.dtype is %s and %s's %s; the cache has the new rows' type or an 8-bit one", name,
		                   ingot__dtype_name(cache->dtype), fresh_name, ingot__dtype_name(fresh->dtype));
	return INGOT_OK;
}

static ingot_status normalize(const ingot__raw *raw, ingot__problem *p) {
	const bool paged = raw->page_table.dtype != INGOT_NONE || raw->page_indptr.dtype != INGOT_NONE ||
	                   raw->page_indices.dtype != INGOT_NONE;
	ingot_status s;
	if (raw->reserved) return ingot__fail(INGOT_INVALID, "reserved is %d; it must be 0", raw->reserved);
	if (raw->lengths_after != 0 && raw->lengths_after != 1)
		return ingot__fail(INGOT_INVALID, "lengths_after is %d; allowed are 0 and 1", raw->lengths_after);
	if ((p->v.dtype == INGOT_NONE) != (p->v_new.dtype == INGOT_NONE))
		return ingot__fail(INGOT_INVALID, "%s is absent; v and v_new may be absent together only",
		                   p->v.dtype == INGOT_NONE ? "v" : "v_new");
	if (raw->varlen >> 8 & 1)
		return ingot__fail(INGOT_INVALID, "varlen has the K side stacked; a cache is padded or paged");
	const int length = raw->varlen >> 9 & 3;
	if (length != INGOT_LENGTH_INDIVIDUAL && length != INGOT_LENGTH_LAST_PAGE)
		return ingot__fail(
			INGOT_INVALID,
			"varlen has length %d on the K side; append needs 2 INDIVIDUAL, or 3 LAST_PAGE with CSR pages", length);
	if (length == INGOT_LENGTH_LAST_PAGE && !raw->lengths_after)
		return ingot__fail(INGOT_INVALID, "lengths_after is 0; with LAST_PAGE lengths it must be 1");
	p->heads_q = p->heads_k = p->k_new.shape[1];
	p->head_dim = p->k_new.shape[3];
	p->head_dim_v = p->v_new.shape[3];
	p->lengths_after = raw->lengths_after;
	if ((s = ingot__need_extent("k", &p->k, paged ? 2 : 1, p->heads_k, "Hk, as k_new")) ||
	    (s = ingot__need_extent("k", &p->k, 3, p->head_dim, "head_dim, as k_new")))
		return s;
	if ((s = ingot__need_sides(raw, p, "k_new", "k", "new"))) return s;
	if (p->v.dtype != INGOT_NONE)
		for (int a = 0; a < 4; a++) {
			if (a < 3 && (s = ingot__need_extent("v_new", &p->v_new, a, p->k_new.shape[a], "as k_new"))) return s;
			if ((s = ingot__need_extent("v", &p->v, a, a < 3 ? p->k.shape[a] : p->head_dim_v,
			                            a < 3 ? "as k" : "head_dim of v_new")))
				return s;
		}
	if ((s = need_pair("k", &p->k_new, &p->k, "k_new")) ||
	    (p->v.dtype != INGOT_NONE && (s = need_pair("v", &p->v_new, &p->v, "v_new"))))
		return s;
	if (p->v.dtype != INGOT_NONE && p->v.dtype != p->k.dtype)
		return ingot__fail(INGOT_INVALID, "v.dtype is %s and k.dtype %s; attention reads caches of one type alone",
		                   ingot__dtype_name(p->v.dtype), ingot__dtype_name(p->k.dtype));
	if (!(s = ingot__need_descale(p, "k_descale", &p->k_descale, false, &p->k, "k")))
		s = ingot__need_descale(p, "v_descale", &p->v_descale, false, &p->v, "v");
	return s;
}

const ingot__operator_def ingot__kv_append_def = {
	"ingot_kv_append", "kv_append", sizeof(P), sizeof(P), fields, sizeof fields / sizeof *fields, normalize,
};
