/* The specification's formula, row by row. Loops run along memory so that the compiler can use vectors. */
#include "oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tool.h"

void oracle_philox(uint64_t seed, uint64_t offset, uint64_t index, uint32_t word[4]) {
	uint32_t c[4] = {(uint32_t)offset, (uint32_t)(offset >> 32), (uint32_t)index, (uint32_t)(index >> 32)};
	uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
	for (int round = 0; round < 10; round++) {
		const uint64_t x = 0xD2511F53ull * c[0], y = 0xCD9E8D57ull * c[2];
		const uint32_t next[4] = {(uint32_t)(y >> 32) ^ c[1] ^ key[0], (uint32_t)y, (uint32_t)(x >> 32) ^ c[3] ^ key[1],
		                          (uint32_t)x};
		memcpy(c, next, sizeof c);
		key[0] += 0x9E3779B9u;
		key[1] += 0xBB67AE85u;
	}
	memcpy(word, c, sizeof c);
}

bool oracle_keeps(const oracle *o, int64_t b, int64_t h, int64_t i, int64_t j) {
	if (!(o->dropout_p > 0)) return true;
	const uint64_t quads = ((uint64_t)o->max_k + 3) / 4;
	uint32_t word[4];
	oracle_philox(o->seed, o->offset,
	              ((uint64_t)(b * o->heads_q + h) * (uint64_t)o->max_q + (uint64_t)i) * quads + (uint64_t)(j / 4),
	              word);
	return (double)word[j % 4] >= floor((double)(float)o->dropout_p * 0x1p32 + 0.5);
}

static void visible(const oracle *o, int64_t b, int64_t i, int64_t *first, int64_t *last) {
	const int64_t n = o->len_k[b], at = i + (o->bottom_right ? n - o->len_q[b] : 0);
	*first = o->left == INT32_MAX ? 0 : at - o->left;
	*last = o->right == INT32_MAX ? n : at + o->right + 1;
	if (*first < 0) *first = 0;
	if (*last > n) *last = n;
	if (*first >= *last) *first = *last = 0;
}

double oracle_pairs(const oracle *o) {
	double pairs = 0;
	for (int64_t b = 0; b < o->batch; b++)
		for (int64_t i = 0; i < o->len_q[b]; i++) {
			int64_t first, last;
			visible(o, b, i, &first, &last);
			pairs += (double)(last - first);
		}
	return pairs * (double)o->heads_q;
}

/* dst[j] += x * src[j] */
static void add_scaled(double *restrict dst, double x, const double *restrict src, int64_t n) {
	for (int64_t j = 0; j < n; j++) dst[j] += x * src[j];
}

typedef struct head {
	double *k, *v, *k_columns, *v_columns; /* [keys][d] and [d][keys] */
	double *s, *p, *dp, *slope, *row, *terms;
	double *dk_terms, *dv_terms; /* [keys][d], over the query heads of the group */
} head;

static void load_keys(const oracle *o, int64_t b, int64_t hk, head *w) {
	const int64_t n = o->len_k[b];
	const float *k = o->k + (b * o->heads_k + hk) * o->max_k * o->d,
				*v = o->v + (b * o->heads_k + hk) * o->max_k * o->dv;
	for (int64_t j = 0; j < n; j++) {
		for (int64_t c = 0; c < o->d; c++) w->k[j * o->d + c] = w->k_columns[c * n + j] = k[j * o->d + c];
		for (int64_t c = 0; c < o->dv; c++) w->v[j * o->dv + c] = w->v_columns[c * n + j] = v[j * o->dv + c];
	}
}

static double largest(double a, const double *x, int64_t n) {
	for (int64_t i = 0; i < n; i++)
		if (x[i] > a) a = x[i];
	return a;
}

/* The order-th number above 1 that shares no factor with d. */
static int64_t step_of(int64_t d, int order) {
	int64_t step = 1;
	for (int found = 0; found < order;) {
		int64_t a = ++step, b = d;
		while (b) {
			const int64_t r = a % b;
			a = b;
			b = r;
		}
		found += a == 1;
	}
	return step;
}

/* The e of 2^e <= |x| < 2^(e + 1); of no use for 0. */
static int exponent_of(double x) {
	uint64_t bits;
	memcpy(&bits, &x, sizeof bits);
	return (int)(bits >> 52 & 0x7ff) - 1023;
}

/* The exponent an e4m3 number is stored with: numbers below 2^-6 have that of 2^-6. */
static int stored_exponent(double x) {
	const int exponent = exponent_of(x);
	return exponent < -6 ? -6 : exponent;
}

/* q.k as Hopper's matrix units make it of e4m3, 32 products a time. These and the sum so far are aligned to the largest exponent, and
 * 13 bits behind the point are kept of each; so they are of the new sum, aligned to itself. A product is not normalised before: its
 * exponent is the sum of those that its factors are stored with, be it 2 or more, or below 1 by a subnormal factor. */
static double dot_cut(const float *q, const double *k, int64_t d) {
	double sum = 0, term[32];
	for (int64_t from = 0; from < d; from += 32) {
		const int64_t n = d - from < 32 ? d - from : 32;
		double exact = sum;
		bool any = sum != 0;
		int most = any ? exponent_of(sum) : 0;
		for (int64_t c = 0; c < n; c++) {
			term[c] = (double)q[from + c] * k[from + c];
			exact += term[c];
			if (term[c] == 0 || !isfinite(term[c])) continue;
			const int exponent = stored_exponent((double)q[from + c]) + stored_exponent(k[from + c]);
			if (!any || exponent > most) most = exponent;
			any = true;
		}
		if (!any || !isfinite(exact)) {
			sum = exact;
			continue;
		}
		const double steps = ldexp(1, 13 - most); /* of what is kept, to 1 */
		double all = trunc(sum * steps);
		for (int64_t c = 0; c < n; c++) all += trunc(term[c] * steps);
		if (all != 0) {
			const double own = ldexp(1, exponent_of(all) - 13);
			all = trunc(all / own) * own;
		}
		sum = all / steps;
	}
	return sum;
}

/* A weight of a row whose largest is 1, as e4m3 has it times 2^8, which leaves room above and below. */
static double round_weight(double p) {
	uint8_t cell;
	tool_store(&cell, 0, INGOT_F8_E4M3, (float)(p * 256));
	return (double)tool_load(&cell, 0, INGOT_F8_E4M3) / 256;
}

/* One query row of head h: out, lse and what it adds to the gradients. */
static void run_row(oracle *o, head *w, int64_t b, int64_t h, int64_t i, double *dbias_terms, double *dsink_terms) {
	const int64_t hk = h / (o->heads_q / o->heads_k), n = o->len_k[b], row = (b * o->heads_q + h) * o->max_q + i;
	const float *q = o->q + row * o->d;
	int64_t first, last;
	visible(o, b, i, &first, &last);
	const int64_t count = last - first;
	double scale = o->scale;
	if (o->q_descale) scale *= (double)o->q_descale[b * o->heads_q + h];
	if (o->k_descale) scale *= (double)o->k_descale[b * o->heads_k + hk];
	const double v_factor = o->v_descale ? (double)o->v_descale[b * o->heads_k + hk] : 1;
	const int64_t off = o->bottom_right ? n - o->len_q[b] : 0;
	const float *bias =
		o->bias ? o->bias + b * o->bias_stride[0] + h * o->bias_stride[1] + i * o->bias_stride[2] : NULL;
	const double sink = o->sink ? (double)o->sink[h] : (double)-INFINITY;

	double *s = w->s, *p = w->p;
	for (int64_t j = 0; j < count; j++) s[j] = 0;
	for (int64_t c = 0; c < o->d && !o->order; c++) add_scaled(s, q[c], w->k_columns + c * n + first, count);
	const int64_t step = o->order ? step_of(o->d, o->order) : 0; /* meets every column once */
	for (int64_t j = 0; j < count && o->order; j++) {
		float sum = 0;
		for (int64_t c = 0; c < o->d; c++) {
			const int64_t at = o->order == 1 ? o->d - 1 - c : (c * step + o->order) % o->d;
			const float term = q[at] * (float)w->k_columns[at * n + first + j];
			sum += term;
		}
		s[j] = (double)sum;
	}
	for (int64_t j = 0; j < count && o->eight_bit; j++) s[j] = dot_cut(q, w->k + (first + j) * o->d, o->d);
	double top = sink, top_key = (double)-INFINITY;
	bool any = false;
	for (int64_t j = 0; j < count; j++) {
		s[j] *= scale;
		w->slope[j] = 1;
		if (o->softcap > 0) {
			const double t = tanh(s[j] / o->softcap);
			s[j] = o->softcap * t;
			w->slope[j] = 1 - t * t;
		}
		if (o->alibi) s[j] -= (double)o->alibi[b * o->heads_q + h] * fabs((double)(i + off - (first + j)));
		p[j] = 1;
		if (bias) {
			const float term = bias[(first + j) * o->bias_stride[3]];
			if (term == -INFINITY) {
				s[j] = (double)-INFINITY;
				p[j] = 0; /* masked */
			} else {
				s[j] += (double)term;
			}
		}
		if (p[j] != 0) {
			any = true;
			if (!(s[j] <= top)) /* a NaN stays */
				top = isnan(top) ? top : s[j];
			if (!(s[j] <= top_key)) top_key = s[j];
		}
	}
	double total = isfinite(sink) && isfinite(top) ? exp(sink - top) : isnan(sink) || sink > 0 ? (double)NAN : 0;
	const double sink_share = total;
	for (int64_t j = 0; j < count; j++) {
		p[j] = p[j] == 0 || s[j] == (double)-INFINITY ? 0 : exp(s[j] - top);
		total += p[j];
	}
	const bool empty = !(any || o->sink) || total == 0;
	const double lse = empty ? (double)-INFINITY : isnan(total) ? (double)NAN : top + log(total);
	o->lse[row] = o->base2 ? lse / log(2) : lse;
	double *out = o->out + row * o->dv;
	const double keep_factor = o->dropout_p > 0 ? 1 / (1 - (double)(float)o->dropout_p) : 1;
	const double lse_given = !o->given_lse ? 0 : o->base2 ? o->given_lse[row] * log(2) : o->given_lse[row];
	const bool none = o->given_lse ? lse_given == (double)-INFINITY : empty;
	for (int64_t j = 0; j < count; j++) {
		p[j] = none || p[j] == 0 ? 0 : o->given_lse ? exp(s[j] - lse_given) : p[j] / total;
		if (o->eight_bit && p[j] > 0) {
			const double largest_weight = exp(top_key - top) / total;
			p[j] = round_weight(p[j] / largest_weight) * largest_weight;
		}
		if (p[j] != 0) /* a NaN differs from 0 */
			add_scaled(out, p[j] * (oracle_keeps(o, b, h, i, first + j) ? keep_factor : 0) * v_factor,
			           w->v + (first + j) * o->dv, o->dv);
	}
	if (!o->dout) return;

	const float *dout = o->dout + row * o->dv;
	double *dp = w->dp;
	for (int64_t j = 0; j < count; j++) dp[j] = 0;
	for (int64_t c = 0; c < o->dv; c++) add_scaled(dp, dout[c], w->v_columns + c * n + first, count);
	double delta = 0;
	for (int64_t j = 0; j < count; j++) {
		const double keep = oracle_keeps(o, b, h, i, first + j) ? keep_factor : 0, weight = p[j] * keep;
		dp[j] = p[j] == 0 ? 0 : dp[j] * keep;
		delta += p[j] * dp[j];
		if (weight == 0) continue;
		double *dv = o->dv_out + ((b * o->heads_k + hk) * o->max_k + first + j) * o->dv,
			   *terms = w->dv_terms + (first + j) * o->dv;
		for (int64_t c = 0; c < o->dv; c++) {
			dv[c] += weight * (double)dout[c];
			terms[c] += weight * fabs((double)dout[c]);
		}
	}
	if (o->given_out) {
		delta = 0;
		for (int64_t c = 0; c < o->dv; c++) delta += o->given_out[row * o->dv + c] * (double)dout[c];
	}
	if (o->sink && !none) {
		const double share = o->given_lse ? exp(sink - lse_given) : sink_share / total;
		o->dsink[h] -= share * delta;
		dsink_terms[h] += share * fabs(delta);
	}
	double *dq = o->dq + row * o->d;
	memset(w->terms, 0, sizeof(double) * (size_t)o->d);
	for (int64_t j = 0; j < count; j++) {
		if (p[j] == 0) continue;
		const double ds = p[j] * (dp[j] - delta), size = p[j] * (fabs(dp[j]) + fabs(delta));
		if (bias) {
			const int64_t at = bias + (first + j) * o->bias_stride[3] - o->bias;
			o->dbias[at] += ds;
			dbias_terms[at] += size;
		}
		const double x = ds * w->slope[j] * scale, y = size * w->slope[j] * fabs(scale);
		const double *k = w->k + (first + j) * o->d;
		double *dk = o->dk + ((b * o->heads_k + hk) * o->max_k + first + j) * o->d,
			   *terms = w->dk_terms + (first + j) * o->d;
		for (int64_t c = 0; c < o->d; c++) {
			dq[c] += x * k[c];
			w->terms[c] += y * fabs(k[c]);
			dk[c] += x * (double)q[c];
			terms[c] += y * fabs((double)q[c]);
		}
	}
	o->dq_scale = largest(o->dq_scale, w->terms, o->d);
}

static double *doubles(int64_t n) {
	return tool_alloc(sizeof(double) * (size_t)(n > 0 ? n : 1));
}

void oracle_run(oracle *o) {
	const int64_t rows = o->batch * o->heads_q * o->max_q, keys = o->batch * o->heads_k * o->max_k,
				  group = o->heads_k ? o->heads_q / o->heads_k : 0;
	o->out = doubles(rows * o->dv);
	o->lse = doubles(rows);
	head w = {
		.k = doubles(o->max_k * o->d),
		.v = doubles(o->max_k * o->dv),
		.k_columns = doubles(o->max_k * o->d),
		.v_columns = doubles(o->max_k * o->dv),
		.s = doubles(o->max_k),
		.p = doubles(o->max_k),
		.dp = doubles(o->max_k),
		.slope = doubles(o->max_k),
		.terms = doubles(o->d),
	};
	double *dbias_terms = NULL, *dsink_terms = NULL;
	if (o->dout) {
		o->dq = doubles(rows * o->d);
		o->dk = doubles(keys * o->d);
		o->dv_out = doubles(keys * o->dv);
		o->dbias = o->bias ? doubles(o->bias_elements) : NULL;
		o->dsink = o->sink ? doubles(o->heads_q) : NULL;
		dbias_terms = doubles(o->bias ? o->bias_elements : 1);
		dsink_terms = doubles(o->heads_q);
		w.dk_terms = doubles(o->max_k * o->d);
		w.dv_terms = doubles(o->max_k * o->dv);
	}
	for (int64_t b = 0; b < o->batch; b++)
		for (int64_t hk = 0; hk < o->heads_k; hk++) {
			load_keys(o, b, hk, &w);
			if (o->dout) {
				memset(w.dk_terms, 0, sizeof(double) * (size_t)(o->max_k * o->d));
				memset(w.dv_terms, 0, sizeof(double) * (size_t)(o->max_k * o->dv));
			}
			for (int64_t h = hk * group; h < (hk + 1) * group; h++)
				for (int64_t i = 0; i < o->len_q[b]; i++) run_row(o, &w, b, h, i, dbias_terms, dsink_terms);
			if (o->dout) {
				o->dk_scale = largest(o->dk_scale, w.dk_terms, o->len_k[b] * o->d);
				o->dv_scale = largest(o->dv_scale, w.dv_terms, o->len_k[b] * o->dv);
			}
		}
	if (o->dout) {
		o->dbias_scale = o->bias ? largest(0, dbias_terms, o->bias_elements) : 0;
		o->dsink_scale = largest(0, dsink_terms, o->heads_q);
	}
	double *const all[] = {w.k,     w.v,     w.k_columns, w.v_columns, w.s,         w.p,        w.dp,
	                       w.slope, w.terms, w.dk_terms,  w.dv_terms,  dbias_terms, dsink_terms};
	for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

void oracle_release(oracle *o) {
	double **const all[] = {&o->out, &o->lse, &o->dq, &o->dk, &o->dv_out, &o->dbias, &o->dsink};
	for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
		free(*all[i]);
		*all[i] = NULL;
	}
}
