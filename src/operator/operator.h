/*
 * How an operator describes its arguments: a table of its struct's fields and a function that relates them. check.c reads any
 * operator's struct by its table into `ingot__raw` (scalars) and the problem (tensors, each valid by itself), then calls
 * normalize, which checks the relations between fields and completes the normal form.
 */
#ifndef INGOT_OPERATOR_H
#define INGOT_OPERATOR_H

#include "../pipeline.h"

/* The scalars of every operator, and the arrays of which the problem keeps only pointers. */
typedef struct ingot__raw {
	uint32_t varlen;
	int64_t batch, max_seqlen_q, max_seqlen_k;
	float softmax_scale, softcap, dropout_p;
	int32_t mask, align, window_left, window_right, lse_base, lengths_after, reserved;
	uint64_t dropout_seed, dropout_offset;
	ingot_tensor q_lengths, q_positions, k_lengths, k_positions;
	ingot_tensor page_table, page_indptr, page_indices;
	bool data_read;
} ingot__raw;

typedef enum ingot__kind { INGOT__U32, INGOT__I32, INGOT__F32, INGOT__I64, INGOT__U64, INGOT__TENSOR } ingot__kind;

enum {
	INGOT__REQUIRED = 1 << 0,
	INGOT__OUTPUT = 1 << 1,  /* no stride 0 on an axis longer than 1 */
	INGOT__LAST_1 = 1 << 2,  /* the last stride is 1 */
	INGOT__LAST_01 = 1 << 3, /* the last stride is 0 or 1 */
	INGOT__TO_RAW = 1 << 4   /* the destination is in ingot__raw, else in the problem */
};

typedef struct ingot__field {
	const char *name;
	uint16_t offset; /* in the params struct */
	uint16_t target; /* in ingot__raw (scalars, INGOT__TO_RAW) or ingot__problem */
	uint8_t kind;
	uint8_t flags;
	uint16_t dtypes; /* tensors: bit per allowed ingot_dtype */
	uint8_t ranks;   /* tensors: bit per allowed ndim */
	uint8_t count;   /* tensors: how many in a row */
} ingot__field;

typedef struct ingot__operator_def {
	const char *function;    /* "ingot_attn_fwd", leads sentences */
	const char *name;        /* "attn_fwd" */
	size_t size, first_size; /* of the struct now and in its first release */
	const ingot__field *fields;
	int field_count;
	ingot_status (*normalize)(const ingot__raw *raw, ingot__problem *problem);
} ingot__operator_def;

extern const ingot__operator_def ingot__attn_fwd_def, ingot__attn_bwd_def, ingot__attn_merge_def, ingot__kv_append_def,
	ingot__attn_dropout_mask_def;

#define INGOT__DT(x) (1u << INGOT_##x)
#define INGOT__FLOATS (INGOT__DT(F32) | INGOT__DT(F16) | INGOT__DT(BF16))
#define INGOT__EIGHTS (INGOT__DT(F8_E4M3) | INGOT__DT(F8_E5M2) | INGOT__DT(F8_E4M3_FNUZ) | INGOT__DT(F8_E5M2_FNUZ))
#define INGOT__CELLS (INGOT__DT(U64) | INGOT__DT(I64))
#define INGOT__RANK(n) (1u << (n))

/* Rows of a field table. S: a scalar; T: a tensor of the problem; A: an array kept in raw; *_AS: under another name there. */
#define INGOT__S(struct_, kind_, field) INGOT__S_AS(struct_, kind_, field, field)
#define INGOT__S_AS(struct_, kind_, field, to) \
	{#field, offsetof(struct_, field), offsetof(ingot__raw, to), kind_, INGOT__TO_RAW, 0, 0, 0}
#define INGOT__T(struct_, field, flags_, dtypes_, ranks_) INGOT__T_AS(struct_, field, field, flags_, dtypes_, ranks_)
#define INGOT__T_AS(struct_, field, to, flags_, dtypes_, ranks_) \
	{#field, offsetof(struct_, field), offsetof(ingot__problem, to), INGOT__TENSOR, flags_, dtypes_, ranks_, 1}
#define INGOT__A(struct_, field, ranks_) INGOT__A_AS(struct_, field, field, ranks_)
#define INGOT__A_AS(struct_, field, to, ranks_) \
	{#field,                                    \
	 offsetof(struct_, field),                  \
	 offsetof(ingot__raw, to),                  \
	 INGOT__TENSOR,                             \
	 INGOT__TO_RAW | INGOT__LAST_1,             \
	 INGOT__DT(I32),                            \
	 ranks_,                                    \
	 1}

/* ---- relations, each OK or a sentence (relations.c) ---------------------------------------------------------------- */

/* "F32"; of a dtype that is one, or NONE. */
const char *ingot__dtype_name(int32_t dtype);
/* tensor.shape[axis] must equal `want`, which is `meaning`. */
ingot_status ingot__need_extent(const char *name, const ingot_tensor *tensor, int axis, int64_t want,
                                const char *meaning);
/* The variable-length word and its arrays; fills batch, sides and pages. q and k name the two sides' tensors. */
ingot_status ingot__need_sides(const ingot__raw *raw, ingot__problem *p, const char *q, const char *k,
                               const char *q_prefix);
/* mask, align and bounds; fills left, right, bottom_right and the MASK feature. After the sides. */
ingot_status ingot__need_mask(const ingot__raw *raw, ingot__problem *p);
/* dropout_p, the seed and its cells; fills the dropout fields. */
ingot_status ingot__need_dropout(const ingot__raw *raw, ingot__problem *p);
ingot_status ingot__need_lse_base(const ingot__raw *raw, ingot__problem *p);
/* A descale factor `name`: [1] or [B,heads] with heads Hk, or Hq where query is true; only with 8-bit `of`. */
ingot_status ingot__need_descale(const ingot__problem *p, const char *name, const ingot_tensor *factor, bool query,
                                 const ingot_tensor *of, const char *of_name);
/* What attention forward and backward share: shapes of q, k, v, out, lse, bias, alibi, sink; scale and softcap. */
ingot_status ingot__need_attention(const ingot__raw *raw, ingot__problem *p);

#endif
