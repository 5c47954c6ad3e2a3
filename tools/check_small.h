/*
 * Cases of the operators beside attention: merge, append to a cache, and the dropout mask. Their results are known exactly
 * (append and mask: to the bit) or by a sum in fp64 (merge).
 */
#ifndef INGOT_TOOL_CHECK_SMALL_H
#define INGOT_TOOL_CHECK_SMALL_H

#include "buffer.h"
#include "problem.h"
#include "rule.h"

typedef struct small_case {
	problem p;
	uint64_t seed;
	case_mode mode;
	/* inputs */
	buffer parts_out[INGOT_MERGE_PARTS], parts_lse[INGOT_MERGE_PARTS];
	buffer k_new, v_new, k_descale, v_descale, new_lengths, new_positions, lengths, page_table, page_indptr,
		page_indices;
	buffer seed_cell, offset_cell;
	/* outputs */
	buffer out, lse, k, v, mask;
	unsigned char *before[2], *want[2]; /* the cache's memory of k and v, whole */
	double *want_out, *want_lse;
	ingot_attn_merge_params merge;
	ingot_kv_append_params append;
	ingot_attn_dropout_mask_params dropout;
} small_case;

bool small_build(small_case *c, const problem *p, uint64_t seed, case_mode mode, char *error, size_t capacity);
void small_release(small_case *c);
const void *small_params(const small_case *c);

/* Puts the outputs back to what they were before any call. */
void small_reset(small_case *c);
/* Bytes of the outputs as one number, to compare two calls. */
uint64_t small_hash(const small_case *c);

/* Whether the outputs are right after a call; else a sentence. yardstick: the textbook's results of the same case (merge;
 * may be NULL). *ratio is the error ratio of the rule (0 where results are exact). */
bool small_verify(small_case *c, const small_case *yardstick, double *ratio, char *text, size_t capacity);

#endif
