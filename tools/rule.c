/* See rule.h. */
#include "rule.h"

#include <math.h>

#include "tool.h"

/* The reference's value as the result's type holds it, where that is no finite number; else unchanged. */
static double overflown(double want, int32_t dtype) {
	if (!isfinite(want)) return want;
	if (dtype == INGOT_F32) return isfinite((float)want) ? want : (double)(float)want;
	uint32_t cell;
	tool_store(&cell, 0, dtype, (float)want);
	const float held = tool_load(&cell, 0, dtype);
	return isfinite(held) ? want : (double)held;
}

rule_result rule_apply(rule_kind kind, const double *got, const double *want, const double *yardstick, int64_t n,
                       int32_t dtype, double scale) {
	rule_result r = {.pass = true, .count = n, .index = -1};
	double norm = 0, yardstick_norm = 0, most = 0;
	for (int64_t i = 0; i < n; i++) {
		const double w = overflown(want[i], dtype);
		if (!isfinite(w)) continue;
		if (fabs(w) > most) most = fabs(w);
		const double e = fabs(yardstick[i] - want[i]);
		if (isfinite(e)) {
			yardstick_norm += e * e;
			if (e > r.yardstick) r.yardstick = e;
		}
	}
	if (scale < 0) scale = most;
	const double a = dtype == INGOT_F32 ? 1e-6 * fmax(1, scale) : tool_ulp(dtype, scale);
	r.allowed = 2 * r.yardstick + (kind == RULE_LSE ? 1e-5 : a);
	for (int64_t i = 0; i < n; i++) {
		const double w = overflown(want[i], dtype);
		double ratio;
		if (!isfinite(w) || !isfinite(got[i])) {
			ratio = (isnan(w) && isnan(got[i])) || w == got[i] ? 0 : (double)INFINITY;
		} else {
			const double e = fabs(got[i] - want[i]);
			const double allowed = kind == RULE_LSE ? 2 * r.yardstick + 1e-5 * fmax(1, fabs(want[i])) : r.allowed;
			norm += e * e;
			if (e > r.error) r.error = e;
			ratio = e / allowed;
		}
		if (ratio > r.ratio || r.index < 0) {
			r.ratio = ratio;
			r.index = i;
			r.got = got[i];
			r.want = want[i];
			if (isinf(ratio)) r.error = (double)INFINITY;
		}
	}
	if (kind == RULE_VALUE && n > 0) {
		const double ratio = sqrt(norm) / (2 * sqrt(yardstick_norm) + a * sqrt((double)n));
		if (ratio > r.ratio) r.ratio = ratio;
	}
	r.pass = r.ratio <= 1;
	return r;
}
