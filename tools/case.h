/*
 * A problem line made into a call: lengths, tensors in the asked layout with live values in them and NaN in every dead
 * place, and the same values as plain arrays for the oracle. Everything follows from the line and a seed.
 */
#ifndef INGOT_TOOL_CASE_H
#define INGOT_TOOL_CASE_H

#include "buffer.h"
#include "oracle.h"
#include "problem.h"

typedef enum test_output { OUT, LSE, DQ, DK, DV, DBIAS, DSINK, SEED_OUT, OFFSET_OUT, TEST_OUTPUTS } test_output;

typedef struct test_case {
	problem p;
	uint64_t seed;
	case_mode mode;
	int64_t max_q, max_k;                       /* Mq, Mk */
	int64_t *len_q, *len_k, *start_q, *start_k; /* as clamped */
	bool *dead_key;                             /* [B][max_k]: no row of the sequence sees it by the mask */
	int64_t pages_used, page_columns;
	int32_t *page_of; /* [B][page_columns]: physical page of each logical one */
	buffer q, k, v, dout, bias, alibi, sink, q_descale, k_descale, v_descale;
	buffer q_lengths, q_positions, k_lengths, k_positions, page_table, page_indptr, page_indices;
	buffer seed_cell, offset_cell;
	uint64_t dropout_seed, dropout_offset; /* as used */
	oracle truth;
	ingot_attn_fwd_params fwd; /* without outputs */
	ingot_attn_bwd_params bwd; /* without outputs, out and lse */
} test_case;

/* Outputs of a call on the case, with the case's strides. */
typedef struct test_outputs {
	buffer at[TEST_OUTPUTS];
} test_outputs;

/* Whether the sizes can be counted and built; else a sentence. */
bool case_sizes(const problem *p, char *error, size_t capacity);
/* p.op is TOOL_FWD or TOOL_BWD. False with a sentence when the line's words do not fit together. */
bool case_build(test_case *c, const problem *p, uint64_t seed, case_mode mode, char *error, size_t capacity);
void case_release(test_case *c);

/* Inputs are still what they were; else the name of one that was written. */
const char *case_written_input(const test_case *c);

/* The outputs the case asks for; exact: all of them fp32. forward: out and lse, else the gradients. */
void outputs_make(test_outputs *o, const test_case *c, bool forward, bool exact);
void outputs_release(test_outputs *o);
void outputs_poison(test_outputs *o);

/* Params of the forward into o; of the backward into o, from the out and lse of `from`. */
ingot_attn_fwd_params case_fwd(const test_case *c, const test_outputs *o);
ingot_attn_bwd_params case_bwd(const test_case *c, const test_outputs *o, const test_outputs *from);

/* Live elements of an output, in order: their number, and each one's place in the tensor. */
int64_t case_live(const test_case *c, const test_outputs *o, test_output which, int64_t **elements);
/* Which (b, h, row, column) live element `index` of an output is. */
void case_locate(const test_case *c, test_output which, int64_t index, char *text, size_t capacity);
/* The oracle's value of every live element, to be freed; NULL for cells. */
double *case_truth(const test_case *c, test_output which, int64_t *count);
/* The scale of an output in the rule: negative for out and lse. */
double case_scale(const test_case *c, test_output which);

extern const char *const test_output_names[TEST_OUTPUTS];

#endif
