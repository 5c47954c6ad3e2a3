/*
 * Checks that compare several calls, or need more than a problem line: words of 8-bit types one by one, visible keys counted
 * by exp(lse), dropout's statistics, a sequence's independence of its neighbours, refusals that must name their field.
 */
#include "check.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* A named check on every kernel of an operator; false with a sentence. UNSUPPORTED counts as refused. */
typedef enum verdict { GOOD, BAD, REFUSED } verdict;

typedef struct special {
	const char *name;
	tool_operator op;
	verdict (*check)(const char *backend, uint64_t seed, char *text, size_t capacity);
} special;

__attribute__((format(printf, 3, 4))) static verdict bad(char *text, size_t capacity, const char *format, ...) {
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(text, capacity, format, arguments);
	va_end(arguments);
	return BAD;
}

static verdict refused_or_bad(ingot_status status, char *text, size_t capacity) {
	if (status == INGOT_UNSUPPORTED) return REFUSED;
	return bad(text, capacity, "%s: %s", ingot_status_name(status), ingot_last_error());
}

/* One forward of a problem line; the values of out and lse, dense in the order of live elements, to be freed. */
static verdict forward(const char *line, const char *backend, uint64_t seed, uint32_t flags, double **out, double **lse,
                       int64_t *rows, char *text, size_t capacity) {
	problem p;
	test_case c;
	test_outputs o;
	*out = *lse = NULL;
	if (!problem_parse(line, &p, text, capacity) || !case_build(&c, &p, seed, CASE_CHECK, text, capacity)) return BAD;
	outputs_make(&o, &c, true, false);
	const ingot_attn_fwd_params params = case_fwd(&c, &o);
	ingot_options options = tool_options(backend, 0);
	options.flags = flags;
	const ingot_status status = tool_run(TOOL_FWD, &params, &options);
	verdict v = GOOD;
	if (status != INGOT_OK) v = refused_or_bad(status, text, capacity);
	for (int which = OUT; v == GOOD && which <= LSE; which++) {
		int64_t *at;
		const int64_t n = case_live(&c, &o, (test_output)which, &at);
		double *values = tool_alloc(sizeof(double) * (size_t)(n + 1));
		for (int64_t i = 0; i < n; i++) values[i] = (double)tool_load(o.at[which].t.data, at[i], o.at[which].t.dtype);
		if (which == OUT) *out = values;
		else {
			*lse = values;
			*rows = n;
		}
		free(at);
	}
	outputs_release(&o);
	case_release(&c);
	return v;
}

/* q = 0: exp(lse) counts the visible keys of each row. */
static verdict check_counts(const char *backend, uint64_t seed, char *text, size_t capacity) {
	static const struct {
		const char *line;
		int64_t sq, sk, left, right, off;
	} masks[] = {
		{"fwd:b1,h1,s40,d64,f32,window=inf:-3,tl,data=zeroq", 40, 40, INT32_MAX, -3, 0},
		{"fwd:b1,h1,sq129,sk40,d64,f32,window=32:64,data=zeroq", 129, 40, 32, 64, -89},
		{"fwd:b1,h1,sq1,sk4096,d64,bf16,window=64:0,data=zeroq", 1, 4096, 64, 0, 4095},
		{"fwd:b1,h1,s16,d64,f32,window=3:0,tl,data=zeroq", 16, 16, 3, 0, 0},
		{"fwd:b1,h1,s16,d64,bf16,window=-2:5,tl,data=zeroq", 16, 16, -2, 5, 0},
		{"fwd:b1,h1,sq70,sk100,d64,f32,causal,data=zeroq", 70, 100, INT32_MAX, 0, 30},
		{"fwd:b1,h1,sq100,sk70,d64,bf16,causal,data=zeroq", 100, 70, INT32_MAX, 0, -30},
	};
	verdict worst = REFUSED;
	for (size_t m = 0; m < sizeof masks / sizeof *masks; m++) {
		double *out, *lse;
		int64_t rows = 0;
		const verdict v = forward(masks[m].line, backend, seed, 0, &out, &lse, &rows, text, capacity);
		if (v == BAD) return BAD;
		if (v == REFUSED) continue;
		worst = GOOD;
		for (int64_t i = 0; i < rows && worst == GOOD; i++) {
			int64_t count = 0;
			for (int64_t j = 0; j < masks[m].sk; j++) {
				const int64_t d = j - i - masks[m].off;
				count += (masks[m].left == INT32_MAX || d >= -masks[m].left) && d <= masks[m].right;
			}
			const double seen = exp(lse[i]);
			if (fabs(seen - (double)count) > 1e-3 * fmax(1, (double)count))
				worst = bad(text, capacity, "%s: row %lld sees %.4g keys instead of %lld", masks[m].line, (long long)i,
				            seen, (long long)count);
		}
		free(out);
		free(lse);
		if (worst == BAD) return BAD;
	}
	return worst;
}

/* Every code of an 8-bit type, through V with one key: out is its decoded value. */
static verdict check_codes(const char *backend, uint64_t seed, char *text, size_t capacity) {
	(void)seed;
	verdict worst = REFUSED;
	struct {
		float out[256];
		uint16_t q[64];
		unsigned char k[64], v[256];
	} *const m = tool_alloc(sizeof *m);
	for (int i = 0; i < 256; i++) m->v[i] = (unsigned char)i;
	for (int32_t dtype = INGOT_F8_E4M3; dtype <= INGOT_F8_E5M2_FNUZ && worst != BAD; dtype++) {
		const int64_t q_shape[] = {1, 1, 1, 64}, v_shape[] = {1, 1, 1, 256};
		const ingot_attn_fwd_params p = {.struct_size = sizeof p,
		                                 .q = tool_tensor(m->q, INGOT_BF16, 4, q_shape),
		                                 .k = tool_tensor(m->k, dtype, 4, q_shape),
		                                 .v = tool_tensor(m->v, dtype, 4, v_shape),
		                                 .out = tool_tensor(m->out, INGOT_F32, 4, v_shape)};
		const ingot_options options = tool_options(backend, 1);
		memset(m->out, 0x5a, sizeof m->out);
		const ingot_status status = tool_run(TOOL_FWD, &p, &options);
		if (status == INGOT_UNSUPPORTED) continue;
		worst = status == INGOT_OK ? GOOD : refused_or_bad(status, text, capacity);
		for (int i = 0; i < 256 && worst == GOOD; i++) {
			const float got = m->out[i], want = tool_load(m->v, i, dtype);
			if (!(got == want || (isnan(got) && isnan(want))))
				worst = bad(text, capacity, "%s code 0x%02x gives %.9g instead of %.9g", tool_dtype_name(dtype), i,
				            (double)got, (double)want);
		}
	}
	free(m);
	return worst;
}

/* A sequence's rows do not depend on its neighbours' lengths: ok against each other within two units, equal when asked. */
static verdict check_neighbours(const char *backend, uint64_t seed, char *text, size_t capacity) {
	double *out[2], *lse[2];
	int64_t rows[2] = {0, 0};
	static const char *const lines[] = {"fwd:b4,hq8,hk2,sq1,sk1000,d128,bf16,kside=lengths,kl=900/1000/120/500,inv",
	                                    "fwd:b4,hq8,hk2,sq1,sk1000,d128,bf16,kside=lengths,kl=800/1000/120/500,inv"};
	for (int i = 0; i < 2; i++) {
		const verdict v = forward(lines[i], backend, seed, INGOT_BATCH_INVARIANT | INGOT_DETERMINISTIC, &out[i],
		                          &lse[i], &rows[i], text, capacity);
		if (v != GOOD) {
			if (i) {
				free(out[0]);
				free(lse[0]);
			}
			return v;
		}
	}
	verdict v = GOOD;
	for (int64_t i = 8; i < rows[0] && v == GOOD; i++)
		if (lse[0][i] != lse[1][i])
			v = bad(text, capacity, "lse of row %lld changes from %.9g to %.9g with the length of another sequence",
			        (long long)i, lse[0][i], lse[1][i]);
	for (int64_t i = 8 * 128; i < rows[0] * 128 && v == GOOD; i++)
		if (out[0][i] != out[1][i])
			v = bad(text, capacity, "out[%lld] changes from %.9g to %.9g with the length of another sequence",
			        (long long)i, out[0][i], out[1][i]);
	for (int i = 0; i < 2; i++) {
		free(out[i]);
		free(lse[i]);
	}
	return v;
}

/* Keep rates by word lane, groups of four, neighbouring rows. */
static verdict check_dropout_statistics(const char *backend, uint64_t seed, char *text, size_t capacity) {
	for (int odd = 0; odd < 2; odd++) {
		const int64_t keys = 4096 + odd, shape[] = {2, 3, 64, keys}, all = 2 * 3 * 64 * keys;
		unsigned char *mask = tool_alloc((size_t)all);
		const ingot_attn_dropout_mask_params p = {.struct_size = sizeof p,
		                                          .dropout_p = 0.5f,
		                                          .mask = tool_tensor(mask, INGOT_BOOL, 4, shape),
		                                          .dropout_seed = seed};
		const ingot_options options = tool_options(backend, 0);
		const ingot_status status = tool_run(TOOL_MASK, &p, &options);
		if (status != INGOT_OK) {
			free(mask);
			return refused_or_bad(status, text, capacity);
		}
		double lane[4] = {0}, quads = 0, alike = 0, rows = 0;
		for (int64_t row = 0; row < 2 * 3 * 64; row++) {
			const unsigned char *m = mask + row * keys;
			for (int64_t j = 0; j < 4096; j++) lane[j % 4] += m[j];
			for (int64_t j = 0; j < 4096; j += 4) {
				const int sum = m[j] + m[j + 1] + m[j + 2] + m[j + 3];
				quads += sum == 0 || sum == 4;
			}
			if (row % 64 < 63)
				for (int64_t j = 0; j < 4096; j++) {
					alike += m[j] == m[keys + j];
					rows++;
				}
		}
		free(mask);
		const double each = 2 * 3 * 64 * 1024;
		for (int i = 0; i < 4; i++)
			if (fabs(lane[i] / each - 0.5) > 0.004)
				return bad(text, capacity, "lane %d keeps %.4f instead of 0.5", i, lane[i] / each);
		if (fabs(quads / each - 0.125) > 0.003)
			return bad(text, capacity, "%.4f of the groups of four are all alike, not 0.125", quads / each);
		if (fabs(alike / rows - 0.5) > 0.004)
			return bad(text, capacity, "neighbouring rows agree in %.4f, not 0.5", alike / rows);
	}
	return GOOD;
}

/* What must be refused, with a sentence that names the field, and nothing written. */
static verdict check_refusals(const char *backend, uint64_t seed, char *text, size_t capacity) {
	(void)seed;
	struct {
		float q[4 * 8], k[4 * 8], v[4 * 8], out[4 * 8];
	} *const m = tool_alloc(sizeof *m);
	const int64_t shape[] = {1, 1, 4, 8}, one_key[] = {1, 0, 4, 8};
	const ingot_attn_fwd_params good = {.struct_size = sizeof good,
	                                    .q = tool_tensor(m->q, INGOT_F32, 4, shape),
	                                    .k = tool_tensor(m->k, INGOT_F32, 4, shape),
	                                    .v = tool_tensor(m->v, INGOT_F32, 4, shape),
	                                    .out = tool_tensor(m->out, INGOT_F32, 4, shape)};
	static const float rates[] = {NAN, -0.1f, 1.0f, 1.5f, INFINITY};
	verdict result = GOOD;
	for (int which = 0; which < 9 && result == GOOD; which++) {
		ingot_attn_fwd_params p = good;
		const char *field = "dropout_p";
		if (which < 5) p.dropout_p = rates[which];
		if (which == 5) {
			p.k = tool_tensor(m->k, INGOT_F32, 4, one_key);
			p.v = tool_tensor(m->v, INGOT_F32, 4, one_key);
			field = "Hk"; /* both head counts are named */
		}
		if (which == 6) {
			p.softmax_scale = NAN;
			field = "softmax_scale";
		}
		if (which == 7) {
			p.softcap = -1;
			field = "softcap";
		}
		if (which == 8) {
			p.out.stride[2] = 0;
			field = "out";
		}
		memset(m->out, 0x5a, sizeof m->out);
		const ingot_options options = tool_options(backend, 1);
		const ingot_status status = tool_run(TOOL_FWD, &p, &options);
		if (status == INGOT_OK)
			result = bad(text, capacity, "a call with a bad %s was accepted (case %d)", field, which);
		else if (!strstr(ingot_last_error(), field))
			result = bad(text, capacity, "the refusal of a bad %s does not name it: %s", field, ingot_last_error());
		for (size_t i = 0; i < sizeof m->out && result == GOOD; i++)
			if (((unsigned char *)m->out)[i] != 0x5a)
				result = bad(text, capacity, "a refused call wrote its output (bad %s)", field);
	}
	free(m);
	return result;
}

/* Decode lengths one by one, the workspace poisoned each time: no NaN, and the same bits again. */
static verdict check_every_length(const char *backend, uint64_t seed, char *text, size_t capacity) {
	for (int length = 1; length <= 600; length += length < 70 ? 1 : 7) {
		char line[128];
		double *out[2], *lse[2];
		int64_t rows = 0;
		snprintf(line, sizeof line, "fwd:b1,hq16,hk2,sq1,sk600,d128,bf16,paged=16,kl=%d", length);
		for (int i = 0; i < 2; i++) {
			const verdict v =
				forward(line, backend, seed, INGOT_DETERMINISTIC, &out[i], &lse[i], &rows, text, capacity);
			if (v != GOOD) {
				if (i) {
					free(out[0]);
					free(lse[0]);
				}
				return v;
			}
		}
		verdict v = GOOD;
		for (int64_t i = 0; i < rows * 128 && v == GOOD; i++)
			if (!(out[0][i] == out[1][i]))
				v = bad(text, capacity, "length %d: out[%lld] is %.9g, then %.9g", length, (long long)i, out[0][i],
				        out[1][i]);
		for (int i = 0; i < 2; i++) {
			free(out[i]);
			free(lse[i]);
		}
		if (v != GOOD) return v;
	}
	return GOOD;
}

static const special specials[] = {
	{"visible keys", TOOL_FWD, check_counts},         {"8-bit codes", TOOL_FWD, check_codes},
	{"neighbours", TOOL_FWD, check_neighbours},       {"refusals", TOOL_FWD, check_refusals},
	{"decode lengths", TOOL_FWD, check_every_length}, {"dropout statistics", TOOL_MASK, check_dropout_statistics},
};

const int check_specials = sizeof specials / sizeof *specials;

void check_special(check_run *run, int64_t index) {
	const special *const s = &specials[index];
	if (run->only && !strstr(s->name, run->only)) return;
	for (int i = 0; i < run->count; i++) {
		check_kernel *kernel = &run->kernels[i];
		if (kernel->op != s->op) continue;
		char text[CHECK_ERROR];
		const double turn = tool_now();
		const verdict v = s->check(kernel->name, tool_hash(run->seed, 77, (uint64_t)index), text, sizeof text);
		check_spent(run, kernel, turn);
		pthread_mutex_lock(&run->lock);
		if (v == REFUSED) kernel->refused++;
		else if (v == GOOD) kernel->cases++;
		else {
			kernel->failed++;
			if (run->printed++ < run->most_failures) fprintf(stderr, "FAIL %s: %s: %s\n", kernel->name, s->name, text);
		}
		pthread_mutex_unlock(&run->lock);
	}
}
