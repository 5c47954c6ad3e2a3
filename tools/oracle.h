/*
 * Attention as the specification writes it, in fp64, over plain dense arrays of one value each. It knows no strides, no
 * pages and no stacked axes, and shares no line with the library: what the library reads through its tensors must come out
 * the same. It also gives the scales of gradients: the largest sum of absolute terms, so that a true 0 has a bound.
 */
#ifndef INGOT_TOOL_ORACLE_H
#define INGOT_TOOL_ORACLE_H

#include <stdbool.h>
#include <stdint.h>

typedef struct oracle {
	int64_t batch, heads_q, heads_k, max_q, max_k, d,
		dv;                       /* max_q, max_k: extents of the arrays, and of dropout's index */
	const int64_t *len_q, *len_k; /* [batch] */
	const float *q, *k, *v;       /* [batch][heads][max][d]; only rows below the length are read */
	double scale, softcap;
	int64_t left, right; /* pair (i, j): -left <= j - (i + off) <= right; INT32_MAX: no bound */
	bool bottom_right;
	const float *bias; /* by bias_stride over (batch, head, i, j), 0 on broadcast axes; -inf masks; NULL: none */
	int64_t bias_stride[4], bias_elements;
	const float *alibi;     /* [batch][heads_q] or NULL */
	const float *sink;      /* [heads_q] or NULL */
	const float *q_descale; /* [batch][heads_q] or NULL */
	const float *k_descale; /* [batch][heads_k] or NULL */
	const float *v_descale;
	double dropout_p;
	uint64_t seed, offset;
	bool base2;        /* lse in base 2 */
	const float *dout; /* [batch][heads_q][max_q][dv] or NULL: forward only */
	/* What a backward is given, dense like out and lse (in base 2 with base2): then P and delta are taken from them, not from
	 * the forward's own fp64 results. Both or neither. */
	const double *given_out, *given_lse;
	/* Above 0: scores are summed in fp32, as a textbook would that takes the columns in another order. */
	int order;
	/* As a textbook on matrix units of 8-bit inputs: see oracle.c. */
	bool eight_bit;

	/* Results, dense like the inputs, zero in rows past the lengths; given by oracle_run, freed by oracle_release. */
	double *out, *lse;                        /* lse [batch][heads_q][max_q] */
	double *dq, *dk, *dv_out, *dbias, *dsink; /* with dout */
	double dq_scale, dk_scale, dv_scale, dbias_scale, dsink_scale;
} oracle;

void oracle_run(oracle *o);
void oracle_release(oracle *o);

/* Pairs that the mask keeps, over all sequences and query heads. */
double oracle_pairs(const oracle *o);

/* Whether dropout keeps (b, h, i, j). */
bool oracle_keeps(const oracle *o, int64_t b, int64_t h, int64_t i, int64_t j);

/* The four words of Philox4x32-10 for the counter (offset, index) under the key seed. */
void oracle_philox(uint64_t seed, uint64_t offset, uint64_t index, uint32_t word[4]);

#endif
