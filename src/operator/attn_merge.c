/* attn_merge: its fields, and how the parts become one list. */
#include <stdio.h>
#include <string.h>

#include "../support/error.h"
#include "operator.h"

#define P ingot_attn_merge_params

static const ingot__field fields[] = {
	INGOT__S(P, INGOT__I32, lse_base),
	{"out_parts", offsetof(P, out_parts), offsetof(ingot__problem, out_parts), INGOT__TENSOR, INGOT__LAST_1,
     INGOT__FLOATS, INGOT__RANK(4) | INGOT__RANK(5), INGOT_MERGE_PARTS},
	{"lse_parts", offsetof(P, lse_parts), offsetof(ingot__problem, lse_parts), INGOT__TENSOR, 0, INGOT__DT(F32),
     INGOT__RANK(3) | INGOT__RANK(4), INGOT_MERGE_PARTS},
	INGOT__T(P, out, INGOT__REQUIRED | INGOT__LAST_1 | INGOT__OUTPUT, INGOT__FLOATS, INGOT__RANK(4)),
	INGOT__T(P, lse, INGOT__OUTPUT, INGOT__DT(F32), INGOT__RANK(3)),
};

/* Drops axis 0 of a stacked tensor and returns its stride. */
static int64_t unstack(ingot_tensor *t) {
	const int64_t stride = t->stride[0];
	t->ndim--;
	memmove(t->shape, t->shape + 1, 4 * sizeof *t->shape);
	memmove(t->stride, t->stride + 1, 4 * sizeof *t->stride);
	t->shape[4] = t->stride[4] = 0;
	return stride;
}

static ingot_status normalize(const ingot__raw *raw, ingot__problem *p) {
	ingot_status s = ingot__need_lse_base(raw, p);
	if (s) return s;
	int count = 0;
	while (count < INGOT_MERGE_PARTS && p->out_parts[count].dtype != INGOT_NONE) count++;
	if (count == 0)
		return ingot__fail(INGOT_INVALID, "out_parts[0] is absent (dtype NONE); at least one part is required");
	for (int i = 0; i < INGOT_MERGE_PARTS; i++) {
		if (i >= count && p->out_parts[i].dtype != INGOT_NONE)
			return ingot__fail(INGOT_INVALID,
			                   "out_parts[%d] is given but out_parts[%d] is absent; parts stand without a gap", i,
			                   count);
		if ((i < count) != (p->lse_parts[i].dtype != INGOT_NONE))
			return ingot__fail(INGOT_INVALID, "lse_parts[%d] is %s but out_parts[%d] is %s; each part has both", i,
			                   i < count ? "absent" : "given", i, i < count ? "given" : "absent");
	}
	p->parts = count;
	if (p->out_parts[0].ndim == 5) {
		if (count > 1)
			return ingot__fail(
				INGOT_INVALID,
				"out_parts[1] is given but out_parts[0] is [N,B,H,S,Dv]; a stacked tensor holds all parts");
		if (p->lse_parts[0].ndim != 4)
			return ingot__fail(INGOT_INVALID, "lse_parts[0].ndim is %d; with a stacked out_parts[0] it must be 4",
			                   p->lse_parts[0].ndim);
		if ((s = ingot__need_extent("lse_parts[0]", &p->lse_parts[0], 0, p->out_parts[0].shape[0],
		                            "N, as out_parts[0]")))
			return s;
		p->parts_stacked = true;
		p->parts = p->out_parts[0].shape[0];
		p->out_part_stride = unstack(&p->out_parts[0]);
		p->lse_part_stride = unstack(&p->lse_parts[0]);
	}
	const ingot_tensor *const first = &p->out_parts[0];
	for (int i = 0; i < count; i++) {
		char name[24];
		snprintf(name, sizeof name, "out_parts[%d]", i);
		const ingot_tensor *const t = &p->out_parts[i];
		if (t->ndim != 4)
			return ingot__fail(INGOT_INVALID, "%s.ndim is %d; separate parts are 4-D, one stacked part is 5-D", name,
			                   t->ndim);
		if (t->dtype != first->dtype)
			return ingot__fail(INGOT_INVALID, "%s.dtype is %s and that of out_parts[0] %s; parts must be of one type",
			                   name, ingot__dtype_name(t->dtype), ingot__dtype_name(first->dtype));
		for (int a = 0; a < 4; a++)
			if ((s = ingot__need_extent(name, t, a, p->out.shape[a], "as out"))) return s;
		snprintf(name, sizeof name, "lse_parts[%d]", i);
		if (p->lse_parts[i].ndim != 3)
			return ingot__fail(INGOT_INVALID, "%s.ndim is %d; it must be one less than its part's", name,
			                   p->lse_parts[i].ndim);
		for (int a = 0; a < 3; a++)
			if ((s = ingot__need_extent(name, &p->lse_parts[i], a, p->out.shape[a], "as out"))) return s;
	}
	for (int a = 0; a < 3 && p->lse.dtype != INGOT_NONE; a++)
		if ((s = ingot__need_extent("lse", &p->lse, a, p->out.shape[a], "as out"))) return s;
	p->batch = p->out.shape[0];
	p->heads_q = p->heads_k = p->out.shape[1];
	p->head_dim = p->head_dim_v = p->out.shape[3];
	p->q_side.max_seqlen = p->q_side.capacity = p->out.shape[2];
	return INGOT_OK;
}

const ingot__operator_def ingot__attn_merge_def = {
	"ingot_attn_merge", "attn_merge", sizeof(P), sizeof(P), fields, sizeof fields / sizeof *fields, normalize,
};
