/* The rule by which a result passes: its error against the reference beside the textbook algorithm's own error. */
#ifndef INGOT_TOOL_RULE_H
#define INGOT_TOOL_RULE_H

#include <stdbool.h>
#include <stdint.h>

typedef enum rule_kind { RULE_VALUE, RULE_LSE } rule_kind;

typedef struct rule_result {
	bool pass;
	double error;     /* largest |got - want| */
	double yardstick; /* largest |textbook - want| */
	double allowed;   /* 2 * yardstick + a */
	double
		ratio; /* error / allowed, or that of the norms if larger; 1 and below passes; Inf: NaN or Inf in a wrong place */
	int64_t index; /* the worst element */
	double got, want;
	int64_t count;
} rule_result;

/*
 * n values of a result, of the reference and of the textbook algorithm, all as doubles. dtype: the coarser of the storage
 * type and the result's own. scale: the largest |reference| or, for a gradient, the largest sum of absolute terms; negative:
 * taken from the reference.
 *   value: max|got - want| <= 2 max|yardstick - want| + a, and ||got - want|| <= 2 ||yardstick - want|| + a sqrt(n);
 *          a = 1e-6 * max(1, scale) for fp32, one unit in the last place of scale otherwise
 *   lse:   |got - want| <= 2 max|yardstick - want| + 1e-5 * max(1, |want|)
 * A NaN or an infinity must be the reference's own, after rounding to dtype.
 */
rule_result rule_apply(rule_kind kind, const double *got, const double *want, const double *yardstick, int64_t n,
                       int32_t dtype, double scale);

#endif
