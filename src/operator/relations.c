/* Relations between fields that several operators share; see operator.h. Every refusal is one sentence here. */
#include <math.h>
#include <string.h>

#include "../support/error.h"
#include "operator.h"

#define L(x) ((long long)(x))

const char *ingot__dtype_name(int32_t dtype) {
	static const char *const names[] = {"NONE",         "F32",          "F16", "BF16", "F8_E4M3", "F8_E5M2",
	                                    "F8_E4M3_FNUZ", "F8_E5M2_FNUZ", "I32", "I64",  "U64",     "BOOL"};
	return names[dtype];
}

ingot_status ingot__need_extent(const char *name, const ingot_tensor *t, int axis, int64_t want, const char *meaning) {
	if (t->shape[axis] == want) return INGOT_OK;
	return ingot__fail(INGOT_INVALID, "%s.shape[%d] is %lld; it must be %lld (%s)", name, axis, L(t->shape[axis]),
	                   L(want), meaning);
}

/* ---- sides ---------------------------------------------------------------------------------------------------------- */

static const char *const length_names[] = {"MAX", "CUMULATIVE", "INDIVIDUAL", "LAST_PAGE"};

/* One side's byte, arrays and maximum. capacity, the storage's rows, is set by the caller. */
static ingot_status need_side(ingot__side *side, uint32_t byte, const char *letter, const char *prefix,
                              const char *storage, const ingot_tensor *lengths, const ingot_tensor *positions,
                              int64_t batch, int64_t max_seqlen, const char *max_name, bool csr) {
	side->stacked = byte & 1;
	side->length = byte >> 1 & 3;
	side->position = byte >> 3 & 3;
	if (byte >> 5)
		return ingot__fail(INGOT_INVALID,
		                   "varlen has reserved bits set on the %s side (byte 0x%02x); bits 5 to 7 must be 0", letter,
		                   byte);
	if (side->position == 3)
		return ingot__fail(INGOT_INVALID,
		                   "varlen has position 3 on the %s side; allowed are 0 IMPLIED, 1 REUSE, 2 ARRAY", letter);
	if (side->length == INGOT_LENGTH_LAST_PAGE && !csr)
		return ingot__fail(INGOT_INVALID,
		                   "varlen has length LAST_PAGE on the %s side; it is allowed for K with CSR pages only",
		                   letter);
	if (side->position != INGOT_POSITION_IMPLIED && !side->stacked)
		return ingot__fail(INGOT_INVALID,
		                   "varlen has position %s on the %s side, which is not stacked; REUSE and ARRAY need stacked",
		                   side->position == INGOT_POSITION_REUSE ? "REUSE" : "ARRAY", letter);
	if (side->position == INGOT_POSITION_REUSE && side->length != INGOT_LENGTH_CUMULATIVE)
		return ingot__fail(INGOT_INVALID,
		                   "varlen has position REUSE on the %s side with length %s; REUSE needs CUMULATIVE", letter,
		                   length_names[side->length]);
	if (side->length == INGOT_LENGTH_MAX) {
		if (lengths->dtype != INGOT_NONE)
			return ingot__fail(INGOT_INVALID,
			                   "%s_lengths is given but varlen has length MAX on the %s side; it would be ignored",
			                   prefix, letter);
	} else {
		const int64_t want = batch + (side->length == INGOT_LENGTH_CUMULATIVE);
		if (lengths->dtype == INGOT_NONE)
			return ingot__fail(INGOT_INVALID,
			                   "%s_lengths is absent; varlen has length %s on the %s side, which needs int32 [%lld]",
			                   prefix, length_names[side->length], letter, L(want));
		if (lengths->shape[0] != want)
			return ingot__fail(INGOT_INVALID, "%s_lengths.shape[0] is %lld; it must be %lld (batch%s)", prefix,
			                   L(lengths->shape[0]), L(want), side->length == INGOT_LENGTH_CUMULATIVE ? " + 1" : "");
		side->lengths = lengths->data;
	}
	if (side->position != INGOT_POSITION_ARRAY) {
		if (positions->dtype != INGOT_NONE)
			return ingot__fail(
				INGOT_INVALID,
				"%s_positions is given but varlen has no position ARRAY on the %s side; it would be ignored", prefix,
				letter);
	} else {
		if (positions->dtype == INGOT_NONE)
			return ingot__fail(
				INGOT_INVALID,
				"%s_positions is absent; varlen has position ARRAY on the %s side, which needs int32 [%lld]", prefix,
				letter, L(batch));
		if (positions->shape[0] != batch && positions->shape[0] != batch + 1)
			return ingot__fail(INGOT_INVALID,
			                   "%s_positions.shape[0] is %lld; it must be %lld or %lld (batch, or one more)", prefix,
			                   L(positions->shape[0]), L(batch), L(batch + 1));
		side->positions = positions->data;
	}
	if (max_seqlen < 0 || max_seqlen > INT32_MAX)
		return ingot__fail(INGOT_INVALID, "%s is %lld; allowed are 0 to 2147483647", max_name, L(max_seqlen));
	if (side->stacked) {
		if (max_seqlen == 0 && batch > 0 && side->capacity > 0)
			return ingot__fail(INGOT_INVALID, "%s is 0; it is mandatory where %s is stacked", max_name, storage);
		side->max_seqlen = max_seqlen;
	} else {
		if (max_seqlen != 0 && max_seqlen != side->capacity)
			return ingot__fail(INGOT_INVALID, "%s is %lld; where %s is not stacked it must be 0 or the storage's %lld",
			                   max_name, L(max_seqlen), storage, L(side->capacity));
		side->max_seqlen = side->capacity;
	}
	return INGOT_OK;
}

static ingot_status need_pages(const ingot__raw *raw, ingot__problem *p, const char *k, int64_t batch) {
	const ingot_tensor *table = &raw->page_table, *indptr = &raw->page_indptr, *indices = &raw->page_indices;
	if (table->dtype != INGOT_NONE && (indptr->dtype != INGOT_NONE || indices->dtype != INGOT_NONE))
		return ingot__fail(INGOT_INVALID, "page_table and %s are both given; pages are either dense or CSR",
		                   indptr->dtype != INGOT_NONE ? "page_indptr" : "page_indices");
	if ((indptr->dtype == INGOT_NONE) != (indices->dtype == INGOT_NONE))
		return ingot__fail(INGOT_INVALID, "%s is absent; CSR pages need page_indptr and page_indices",
		                   indptr->dtype == INGOT_NONE ? "page_indptr" : "page_indices");
	const uint32_t byte = raw->varlen >> 8 & 255;
	if (byte & 1)
		return ingot__fail(INGOT_INVALID, "varlen has the K side stacked, but %s is paged; pages are not stacked", k);
	if (byte >> 3 & 3)
		return ingot__fail(INGOT_INVALID, "varlen has a position on the K side, but %s is paged; pages need IMPLIED",
		                   k);
	const int length = byte >> 1 & 3;
	if (length != INGOT_LENGTH_INDIVIDUAL && length != INGOT_LENGTH_LAST_PAGE)
		return ingot__fail(
			INGOT_INVALID,
			"varlen has length %s on the K side, but %s is paged; pages need INDIVIDUAL, or LAST_PAGE with CSR",
			length_names[length], k);
	p->features |= INGOT__PAGED;
	p->pages.count = p->k.shape[0];
	p->pages.page_size = p->k.shape[1];
	if (p->pages.page_size < 1)
		return ingot__fail(INGOT_INVALID, "%s.shape[1] (page_size) is 0; it must be at least 1", k);
	if (table->dtype != INGOT_NONE) {
		ingot_status s = ingot__need_extent("page_table", table, 0, batch, "batch");
		if (s) return s;
		p->pages.max_pages = table->shape[1];
		p->pages.table = table->data;
		p->pages.table_stride = table->stride[0];
		p->k_side.capacity = p->pages.max_pages * p->pages.page_size;
		if (p->k_side.capacity > INT32_MAX)
			return ingot__fail(INGOT_INVALID,
			                   "page_table.shape[1] is %lld; times page_size %lld it must be at most 2147483647",
			                   L(table->shape[1]), L(p->pages.page_size));
		return INGOT_OK;
	}
	ingot_status s = ingot__need_extent("page_indptr", indptr, 0, batch + 1, "batch + 1");
	if (s) return s;
	p->pages.indptr = indptr->data;
	p->pages.indices = indices->data;
	p->pages.indices_count = indices->shape[0];
	if (raw->max_seqlen_k < 0 || raw->max_seqlen_k > INT32_MAX)
		return ingot__fail(INGOT_INVALID, "max_seqlen_k is %lld; allowed are 0 to 2147483647", L(raw->max_seqlen_k));
	if (raw->max_seqlen_k == 0 && batch > 0 && p->pages.indices_count > 0)
		return ingot__fail(INGOT_INVALID, "max_seqlen_k is 0; it is mandatory with CSR pages");
	p->k_side.capacity = raw->max_seqlen_k;
	return INGOT_OK;
}

/* Plans multiply the rows of a side by head sizes, splits and bytes, in 64 bits. */
static ingot_status need_countable(const ingot__problem *p, int64_t heads, const ingot__side *side, int bits,
                                   const char *heads_name, const char *max_name) {
	const double rows = (double)p->batch * (double)heads * (double)(side->max_seqlen ? side->max_seqlen : 1);
	if (rows <= ldexp(1, bits)) return INGOT_OK;
	return ingot__fail(INGOT_INVALID, "batch %lld, %s %lld and %s %lld: their product must be at most 2^%d",
	                   L(p->batch), heads_name, L(heads), max_name, L(side->max_seqlen), bits);
}

ingot_status ingot__need_sides(const ingot__raw *raw, ingot__problem *p, const char *q, const char *k,
                               const char *q_prefix) {
	const ingot_tensor *qt = p->op == INGOT__KV_APPEND ? &p->k_new : &p->q;
	const bool paged = raw->page_table.dtype != INGOT_NONE || raw->page_indptr.dtype != INGOT_NONE ||
	                   raw->page_indices.dtype != INGOT_NONE;
	const bool csr = paged && raw->page_table.dtype == INGOT_NONE;
	const uint32_t q_byte = raw->varlen & 255, k_byte = raw->varlen >> 8 & 255;
	const bool q_stacked = q_byte & 1, k_stacked = k_byte & 1;
	if (raw->varlen >> 18) return ingot__fail(INGOT_INVALID, "varlen is 0x%x; bits 18 to 31 must be 0", raw->varlen);
	if (raw->varlen >> 16 & 2)
		return ingot__fail(INGOT_INVALID, "varlen has lse_layout %u; allowed are 0 HT and 1 TH", raw->varlen >> 16 & 3);
	if ((raw->varlen >> 16 & 1) && (!q_stacked || p->op == INGOT__KV_APPEND))
		return ingot__fail(INGOT_INVALID,
		                   "varlen has lse_layout TH, which needs a stacked q with an lse; otherwise strides say it");
	if (raw->batch < 0 || raw->batch > INT32_MAX)
		return ingot__fail(INGOT_INVALID, "batch is %lld; allowed are 0 to 2147483647", L(raw->batch));

	ingot_status s;
	int64_t batch = raw->batch;
	if (!q_stacked) batch = qt->shape[0];
	else if (!k_stacked && !paged) batch = p->k.shape[0];
	if (q_stacked && (s = ingot__need_extent(q, qt, 0, 1, "stacked"))) return s;
	if (k_stacked && !paged && (s = ingot__need_extent(k, &p->k, 0, 1, "stacked"))) return s;
	if (!q_stacked && !k_stacked && !paged &&
	    (s = ingot__need_extent(k, &p->k, 0, batch, q_prefix[0] == 'q' ? "batch, as q" : "batch, as k_new")))
		return s;
	/* Forgotten: else the arrays that have one entry a sequence would be at fault. */
	if (q_stacked && batch == 0 &&
	    (raw->q_lengths.shape[0] > ((q_byte >> 1 & 3) == INGOT_LENGTH_CUMULATIVE) ||
	     raw->k_lengths.shape[0] > ((k_byte >> 1 & 3) == INGOT_LENGTH_CUMULATIVE) || raw->page_table.shape[0] > 0 ||
	     raw->page_indptr.shape[0] > 1))
		return ingot__fail(INGOT_INVALID, "batch is 0; it is mandatory where %s is stacked", q);
	const bool mandatory = q_stacked || k_stacked || csr;
	if (raw->batch != batch && (mandatory || raw->batch != 0))
		return ingot__fail(INGOT_INVALID, "batch is %lld; it must be %lld, the storage's%s", L(raw->batch), L(batch),
		                   mandatory ? " (batch is mandatory where a side is stacked or paged by CSR)" : ", or 0");
	p->batch = batch;
	p->q_side.capacity = qt->shape[2];
	if (paged) {
		if ((s = need_pages(raw, p, k, batch))) return s;
	} else p->k_side.capacity = p->k.shape[2];
	if ((s = need_side(&p->q_side, q_byte, "Q", q_prefix, q, &raw->q_lengths, &raw->q_positions, batch,
	                   raw->max_seqlen_q, q_prefix[0] == 'q' ? "max_seqlen_q" : "max_seqlen_new", false)))
		return s;
	if ((s = need_side(&p->k_side, k_byte, "K", "k", k, &raw->k_lengths, &raw->k_positions, batch, raw->max_seqlen_k,
	                   "max_seqlen_k", csr)))
		return s;
	if (q_stacked && batch == 0 && raw->q_lengths.dtype == INGOT_NONE && qt->shape[2] > 0)
		return ingot__fail(INGOT_INVALID, "batch is 0; it is mandatory where %s is stacked", q);
	if (q_byte || k_byte) p->features |= INGOT__VARLEN;
	const bool by_query = q_prefix[0] == 'q' && p->heads_q > 0;
	if ((s = need_countable(p, by_query ? p->heads_q : p->heads_k, &p->q_side, 44, by_query ? "Hq" : "Hk",
	                        q_prefix[0] == 'q' ? "max_seqlen_q" : "max_seqlen_new")))
		return s;
	return need_countable(p, p->heads_k, &p->k_side, 53, "Hk", "max_seqlen_k");
}

/* ---- mask ------------------------------------------------------------------------------------------------------------ */

/* Whether every sequence of a side is known to have max_seqlen rows. */
static bool side_full(const ingot__side *side, int64_t batch) {
	if (side->length != INGOT_LENGTH_MAX) return false;
	if (!side->stacked) return true;
	return side->position == INGOT_POSITION_IMPLIED && side->capacity >= batch * side->max_seqlen;
}

/* sum over i in [0, rows) of clamp(i + a, 0, keys) */
static double clamped_sum(int64_t a, int64_t rows, int64_t keys) {
	if (rows <= 0 || keys <= 0) return 0;
	const int64_t rise = a >= 0 ? 0 : -a < rows ? -a : rows;                          /* first row above 0 */
	const int64_t full = keys - a <= rise ? rise : keys - a < rows ? keys - a : rows; /* first row at keys */
	const double n = (double)(full - rise);
	return n * (double)(rise + a) + n * (n - 1) / 2 + (double)(rows - full) * (double)keys;
}

ingot_status ingot__need_mask(const ingot__raw *raw, ingot__problem *p) {
	const int64_t mq = p->q_side.max_seqlen, mk = p->k_side.max_seqlen;
	if (raw->align < 0 || raw->align > INGOT_BOTTOM_RIGHT)
		return ingot__fail(INGOT_INVALID, "align is %d; allowed are 0 UNSET, 1 TOP_LEFT, 2 BOTTOM_RIGHT", raw->align);
	int64_t left = INGOT__NO_BOUND, right = INGOT__NO_BOUND;
	switch (raw->mask) {
	case INGOT_MASK_NONE:
	case INGOT_MASK_CAUSAL:
		if (raw->window_left || raw->window_right)
			return ingot__fail(INGOT_INVALID, "%s is %d with mask %s; the bounds must be 0 unless mask is WINDOW",
			                   raw->window_left ? "window_left" : "window_right",
			                   raw->window_left ? raw->window_left : raw->window_right, raw->mask ? "CAUSAL" : "NONE");
		if (raw->mask == INGOT_MASK_CAUSAL) right = 0;
		break;
	case INGOT_MASK_WINDOW:
		if (raw->window_left != INGOT_UNBOUNDED) left = raw->window_left;
		if (raw->window_right != INGOT_UNBOUNDED) right = raw->window_right;
		break;
	default: return ingot__fail(INGOT_INVALID, "mask is %d; allowed are 0 NONE, 1 CAUSAL, 2 WINDOW", raw->mask);
	}
	const bool masked = left != INGOT__NO_BOUND || right != INGOT__NO_BOUND, alibi = p->alibi.dtype != INGOT_NONE;
	if (raw->align == INGOT_ALIGN_UNSET && (masked || alibi) &&
	    !(mq == mk && side_full(&p->q_side, p->batch) && side_full(&p->k_side, p->batch) &&
	      !(p->features & INGOT__PAGED)))
		return ingot__fail(
			INGOT_INVALID,
			"align is UNSET; with %s it must be TOP_LEFT or BOTTOM_RIGHT unless all lengths are full and "
			"equal (max_seqlen_q %lld, max_seqlen_k %lld)",
			masked ? "a mask" : "alibi", L(mq), L(mk));
	p->bottom_right = raw->align == INGOT_BOTTOM_RIGHT;
	/* A bound that no pair of these maxima can break is none. Bottom-right: j - i - off runs from 1 - len_k to len_q - 1. */
	if (left >= (p->bottom_right ? mk : mq) - 1) left = INGOT__NO_BOUND;
	if (right >= (p->bottom_right ? mq : mk) - 1) right = INGOT__NO_BOUND;
	p->left = left;
	p->right = right;
	if (left != INGOT__NO_BOUND || right != INGOT__NO_BOUND) p->features |= INGOT__MASK;
	const int64_t off = p->bottom_right ? mk - mq : 0;
	double kept = right < -left ? 0 : clamped_sum(off + right + 1, mq, mk) - clamped_sum(off - left, mq, mk);
	p->pairs = kept * (double)p->batch * (double)p->heads_q;
	return INGOT_OK;
}

/* ---- dropout, lse base, descale ------------------------------------------------------------------------------------- */

static ingot_status need_cell(const char *name, const ingot_tensor *t) {
	if (t->dtype != INGOT_NONE && t->shape[0] != 1)
		return ingot__fail(INGOT_INVALID, "%s.shape[0] is %lld; it must be 1", name, L(t->shape[0]));
	return INGOT_OK;
}

ingot_status ingot__need_dropout(const ingot__raw *raw, ingot__problem *p) {
	if (!(raw->dropout_p >= 0.0f && raw->dropout_p < 1.0f))
		return ingot__fail(INGOT_INVALID, "dropout_p is %g; dropout must be in [0, 1)", (double)raw->dropout_p);
	ingot_status s;
	if ((s = need_cell("dropout_seed_ptr", &p->dropout_seed_ptr)) ||
	    (s = need_cell("dropout_offset_ptr", &p->dropout_offset_ptr)) ||
	    (s = need_cell("dropout_seed_out", &p->dropout_seed_out)) ||
	    (s = need_cell("dropout_offset_out", &p->dropout_offset_out)))
		return s;
	if (p->dropout_seed_ptr.dtype != INGOT_NONE && raw->dropout_seed)
		return ingot__fail(INGOT_INVALID,
		                   "dropout_seed is %llu and dropout_seed_ptr is given; the value must be 0 then",
		                   (unsigned long long)raw->dropout_seed);
	p->dropout_p = raw->dropout_p;
	p->dropout_threshold = (uint32_t)floor((double)raw->dropout_p * 4294967296.0 + 0.5);
	p->dropout_seed = raw->dropout_seed;
	p->dropout_offset = raw->dropout_offset;
	if (raw->dropout_p > 0) p->features |= INGOT__DROPOUT;
	return INGOT_OK;
}

ingot_status ingot__need_lse_base(const ingot__raw *raw, ingot__problem *p) {
	if (raw->lse_base != INGOT_LSE_NATURAL && raw->lse_base != INGOT_LSE_BASE2)
		return ingot__fail(INGOT_INVALID, "lse_base is %d; allowed are 0 NATURAL and 1 BASE2", raw->lse_base);
	p->lse_base = raw->lse_base;
	return INGOT_OK;
}

static bool eight_bit(int32_t dtype) {
	return dtype >= INGOT_F8_E4M3 && dtype <= INGOT_F8_E5M2_FNUZ;
}

ingot_status ingot__need_descale(const ingot__problem *p, const char *name, const ingot_tensor *f, bool query,
                                 const ingot_tensor *of, const char *of_name) {
	if (f->dtype == INGOT_NONE) return INGOT_OK;
	if (!eight_bit(of->dtype))
		return ingot__fail(INGOT_INVALID, "%s is given but %s is not 8-bit; it would be ignored", name, of_name);
	if (f->ndim == 1) return ingot__need_extent(name, f, 0, 1, "one factor; per head it is [B,heads]");
	if (f->shape[0] == p->batch && (f->shape[1] == p->heads_k || (query && f->shape[1] == p->heads_q))) return INGOT_OK;
	return ingot__fail(INGOT_INVALID, "%s has shape [%lld,%lld]; allowed are [1] and [%lld,%lld]%s", name,
	                   L(f->shape[0]), L(f->shape[1]), L(p->batch), L(p->heads_k), query ? ", or [B,Hq]" : "");
}

/* ---- attention --------------------------------------------------------------------------------------------------------- */

static bool aligned(const ingot_tensor *t, int size) {
	if ((uintptr_t)t->data % 16) return false;
	for (int a = 0; a < t->ndim - 1; a++)
		if (t->stride[a] * size % 16) return false;
	return true;
}

static ingot_status need_types(const ingot__problem *p) {
	const int32_t q = p->q.dtype, k = p->k.dtype;
	if (p->v.dtype != k)
		return ingot__fail(INGOT_INVALID, "v.dtype is %s and k.dtype %s; K and V must be of one type",
		                   ingot__dtype_name(p->v.dtype), ingot__dtype_name(k));
	if (k == q) return INGOT_OK;
	if (eight_bit(k) && (q == INGOT_F16 || q == INGOT_BF16)) return INGOT_OK;
	return ingot__fail(INGOT_INVALID, "k.dtype is %s and q.dtype %s; allowed are q's type, or 8-bit with q F16 or BF16",
	                   ingot__dtype_name(k), ingot__dtype_name(q));
}

static ingot_status need_bias(ingot__problem *p) {
	ingot_tensor *const b = &p->bias;
	if (b->dtype == INGOT_NONE) return INGOT_OK;
	const int32_t wide = eight_bit(p->q.dtype) ? p->out.dtype : p->q.dtype;
	if (b->dtype != INGOT_F32 && b->dtype != INGOT_BOOL && b->dtype != wide)
		return ingot__fail(INGOT_INVALID, "bias.dtype is %s; allowed are F32, BOOL and %s's type, here %s",
		                   ingot__dtype_name(b->dtype), eight_bit(p->q.dtype) ? "out" : "q", ingot__dtype_name(wide));
	const int64_t full[4] = {p->batch, p->heads_q, p->q_side.max_seqlen, p->k_side.max_seqlen};
	static const char *const meaning[4] = {"batch", "Hq", "max_seqlen_q", "max_seqlen_k"};
	for (int a = 0; a < 4; a++)
		if (b->shape[a] != full[a] && b->shape[a] != 1)
			return ingot__fail(INGOT_INVALID, "bias.shape[%d] is %lld; it must be %lld (%s), or 1 to broadcast", a,
			                   L(b->shape[a]), L(full[a]), meaning[a]);
	p->features |= b->dtype == INGOT_BOOL ? INGOT__BIAS_BOOL : INGOT__BIAS;
	return INGOT_OK;
}

ingot_status ingot__need_attention(const ingot__raw *raw, ingot__problem *p) {
	const bool paged = raw->page_table.dtype != INGOT_NONE || raw->page_indptr.dtype != INGOT_NONE ||
	                   raw->page_indices.dtype != INGOT_NONE;
	ingot_status s;
	p->heads_q = p->q.shape[1];
	p->heads_k = p->k.shape[paged ? 2 : 1];
	p->head_dim = p->q.shape[3];
	p->head_dim_v = p->v.shape[3];
	if (p->heads_k == 0 ? p->heads_q != 0 : p->heads_q % p->heads_k != 0)
		return ingot__fail(INGOT_INVALID, "q has %lld heads (Hq) and k has %lld (Hk); Hq must be a multiple of Hk",
		                   L(p->heads_q), L(p->heads_k));
	p->group = p->heads_k && p->heads_q ? p->heads_q / p->heads_k : 1;
	if ((s = ingot__need_extent("k", &p->k, 3, p->head_dim, "head_dim, as q"))) return s;
	const bool mla = p->head_dim == 576 && p->head_dim_v == 512;
	if (!mla && (p->head_dim < 1 || p->head_dim > 512))
		return ingot__fail(INGOT_INVALID, "q.shape[3] (head_dim) is %lld; allowed are 1 to 512, and 576 with v's 512",
		                   L(p->head_dim));
	if (p->head_dim_v < 1 || p->head_dim_v > 512)
		return ingot__fail(INGOT_INVALID, "v.shape[3] (head_dim of V) is %lld; allowed are 1 to 512", L(p->head_dim_v));
	for (int a = 0; a < 3; a++)
		if ((s = ingot__need_extent("v", &p->v, a, p->k.shape[a], "as k"))) return s;
	if ((s = ingot__need_sides(raw, p, "q", "k", "q"))) return s;
	for (int a = 0; a < 4; a++)
		if ((s = ingot__need_extent("out", &p->out, a, a == 3 ? p->head_dim_v : p->q.shape[a],
		                            a == 3 ? "head_dim of V" : "as q")))
			return s;
	if (p->lse.dtype != INGOT_NONE) {
		ingot_tensor *const t = &p->lse;
		if (p->q_side.stacked) {
			const bool th = raw->varlen >> 16 & 1;
			if (t->ndim != 2)
				return ingot__fail(INGOT_INVALID, "lse.ndim is %d; with a stacked q it must be 2, %s", t->ndim,
				                   th ? "[T,Hq]" : "[Hq,T]");
			if ((s = ingot__need_extent("lse", t, !th, p->q.shape[2], "T, rows of q")) ||
			    (s = ingot__need_extent("lse", t, th, p->heads_q, "Hq")))
				return s;
			const int64_t h = t->stride[th], r = t->stride[!th];
			t->ndim = 3;
			t->shape[0] = 1, t->shape[1] = p->heads_q, t->shape[2] = p->q.shape[2];
			t->stride[0] = 0, t->stride[1] = h, t->stride[2] = r;
		} else {
			if (t->ndim != 3) return ingot__fail(INGOT_INVALID, "lse.ndim is %d; it must be 3, [B,Hq,Sq]", t->ndim);
			for (int a = 0; a < 3; a++)
				if ((s = ingot__need_extent("lse", t, a, p->q.shape[a], "as q"))) return s;
		}
	}
	if ((s = need_types(p)) || (s = need_bias(p)) || (s = ingot__need_mask(raw, p)) ||
	    (s = ingot__need_dropout(raw, p)) || (s = ingot__need_lse_base(raw, p)))
		return s;
	if (p->alibi.dtype != INGOT_NONE) {
		if (p->alibi.ndim == 2 && (s = ingot__need_extent("alibi", &p->alibi, 0, p->batch, "batch"))) return s;
		if ((s = ingot__need_extent("alibi", &p->alibi, p->alibi.ndim - 1, p->heads_q, "Hq"))) return s;
		p->features |= INGOT__ALIBI;
	}
	if (p->sink.dtype != INGOT_NONE) {
		if ((s = ingot__need_extent("sink", &p->sink, 0, p->heads_q, "Hq"))) return s;
		p->features |= INGOT__SINK;
	}
	if (!isfinite(raw->softmax_scale))
		return ingot__fail(INGOT_INVALID, "softmax_scale is %g; it must be finite (0: 1/sqrt(head_dim))",
		                   (double)raw->softmax_scale);
	p->softmax_scale = raw->softmax_scale != 0 ? (double)raw->softmax_scale : 1.0 / sqrt((double)p->head_dim);
	if (!(raw->softcap >= 0) || isinf(raw->softcap))
		return ingot__fail(INGOT_INVALID, "softcap is %g; it must be finite and >= 0 (0: none)", (double)raw->softcap);
	p->softcap = raw->softcap;
	if (p->softcap > 0) p->features |= INGOT__SOFTCAP;
	if (eight_bit(p->k.dtype)) p->features |= INGOT__8BIT_KV;
	if (eight_bit(p->q.dtype)) p->features |= INGOT__8BIT_Q;
	static const uint8_t sizes[] = {0, 4, 2, 2, 1, 1, 1, 1};
	if (!aligned(&p->q, sizes[p->q.dtype]) || !aligned(&p->k, sizes[p->k.dtype]) ||
	    !aligned(&p->v, sizes[p->v.dtype]) || !aligned(&p->out, sizes[p->out.dtype]))
		p->features |= INGOT__UNALIGNED;
	return INGOT_OK;
}
