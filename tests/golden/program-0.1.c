/*
 * A user's program of release 0.1, compiled for ever against the header of that release and run against the library of
 * today: the same calls must mean the same. It makes each operator's call by each verb, on sizes a person can check.
 */
#include <ingot.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

static int failures;

static void expect(int holds, const char *what) {
	if (holds) return;
	failures++;
	fprintf(stderr, "not so: %s (%s)\n", what, ingot_last_error());
}

static int close_to(float a, double b) {
	return fabs((double)a - b) <= 1e-5 * fmax(1, fabs(b));
}

static ingot_tensor f32(float *data, int64_t b, int64_t h, int64_t s, int64_t d) {
	return (ingot_tensor){
		.data = data, .dtype = INGOT_F32, .ndim = 4, .shape = {b, h, s, d}, .stride = {h * s * d, s * d, d, 1}};
}

static ingot_tensor f32_rows(float *data, int64_t b, int64_t h, int64_t s) {
	return (ingot_tensor){.data = data, .dtype = INGOT_F32, .ndim = 3, .shape = {b, h, s}, .stride = {h * s, s, 1}};
}

/* The verbs that run nothing; each must accept what run accepts. */
#define ASK(name, params)                                                                                            \
	do {                                                                                                             \
		uint64_t bytes = UINT64_MAX;                                                                                 \
		size_t needed = 0;                                                                                           \
		char text[4096] = "";                                                                                        \
		expect(ingot_##name##_workspace(&(params), cpu, &options, &bytes) == INGOT_OK, #name "_workspace");          \
		expect(bytes != UINT64_MAX, #name "_workspace writes the bytes");                                            \
		expect(ingot_##name##_prepare(&(params), cpu, &options) == INGOT_OK, #name "_prepare");                      \
		expect(ingot_##name##_explain(&(params), cpu, &options, INGOT_TEXT, text, sizeof text, &needed) == INGOT_OK, \
		       #name "_explain");                                                                                    \
		expect(needed > 1 && text[0] != 0, #name "_explain writes a text");                                          \
	} while (0)

int main(void) {
	const ingot_stream cpu = {.type = INGOT_CPU};
	const ingot_options options = {.struct_size = sizeof options, .num_threads = 1};

	expect(ingot_version() >= 100, "the library is of 0.1 or later");
	expect(strcmp(ingot_status_name(INGOT_INVALID), "INGOT_INVALID") == 0 && INGOT_INVALID == 10,
	       "statuses keep their numbers");

	/* Two keys with scores 0 and log 3 under scale 1: weights 1/4 and 3/4. */
	float q[1] = {1}, k[2] = {0, 1.0986122887f}, v[2] = {10, 20}, out[1] = {0}, lse[1] = {0};
	ingot_attn_fwd_params forward = {.struct_size = sizeof forward,
	                                 .q = f32(q, 1, 1, 1, 1),
	                                 .k = f32(k, 1, 1, 2, 1),
	                                 .v = f32(v, 1, 1, 2, 1),
	                                 .out = f32(out, 1, 1, 1, 1),
	                                 .lse = f32_rows(lse, 1, 1, 1),
	                                 .softmax_scale = 1};
	ASK(attn_fwd, forward);
	expect(ingot_attn_fwd(&forward, cpu, &options) == INGOT_OK, "attn_fwd");
	expect(close_to(out[0], 17.5) && close_to(lse[0], log(4)), "attn_fwd: 17.5 and log 4");

	/* dv = p dout; ds = p (dp - sum p dp) = 3/4 * 1/4 * 10 for the second key, the negative for the first. */
	float dout[1] = {1}, dq[1] = {0}, dk[2] = {0}, dv[2] = {0};
	ingot_attn_bwd_params backward = {.struct_size = sizeof backward,
	                                  .q = forward.q,
	                                  .k = forward.k,
	                                  .v = forward.v,
	                                  .out = forward.out,
	                                  .lse = forward.lse,
	                                  .dout = f32(dout, 1, 1, 1, 1),
	                                  .dq = f32(dq, 1, 1, 1, 1),
	                                  .dk = f32(dk, 1, 1, 2, 1),
	                                  .dv = f32(dv, 1, 1, 2, 1),
	                                  .softmax_scale = 1};
	ASK(attn_bwd, backward);
	expect(ingot_attn_bwd(&backward, cpu, &options) == INGOT_OK, "attn_bwd");
	expect(close_to(dv[0], 0.25) && close_to(dv[1], 0.75), "attn_bwd: dv");
	expect(close_to(dk[0], -1.875) && close_to(dk[1], 1.875) && close_to(dq[0], 1.875 * log(3)), "attn_bwd: dq and dk");

	/* The same two keys as two parts of one key each. */
	float part_lse[2] = {0, 1.0986122887f}, merged[1] = {0}, merged_lse[1] = {0};
	ingot_attn_merge_params merge = {.struct_size = sizeof merge,
	                                 .out_parts = {f32(v, 1, 1, 1, 1), f32(v + 1, 1, 1, 1, 1)},
	                                 .lse_parts = {f32_rows(part_lse, 1, 1, 1), f32_rows(part_lse + 1, 1, 1, 1)},
	                                 .out = f32(merged, 1, 1, 1, 1),
	                                 .lse = f32_rows(merged_lse, 1, 1, 1)};
	ASK(attn_merge, merge);
	expect(ingot_attn_merge(&merge, cpu, &options) == INGOT_OK, "attn_merge");
	expect(close_to(merged[0], 17.5) && close_to(merged_lse[0], log(4)), "attn_merge: 17.5 and log 4");

	/* One new row behind a sequence of one. */
	float cache_k[3] = {1, 2, 3}, cache_v[3] = {4, 5, 6}, new_k[1] = {7}, new_v[1] = {8};
	int32_t length[1] = {1};
	const ingot_tensor lengths = {.data = length, .dtype = INGOT_I32, .ndim = 1, .shape = {1}, .stride = {1}};
	ingot_kv_append_params append = {.struct_size = sizeof append,
	                                 .varlen = INGOT_VARLEN(0, INGOT_SIDE(0, INGOT_LENGTH_INDIVIDUAL, 0), 0),
	                                 .k_new = f32(new_k, 1, 1, 1, 1),
	                                 .v_new = f32(new_v, 1, 1, 1, 1),
	                                 .k = f32(cache_k, 1, 1, 3, 1),
	                                 .v = f32(cache_v, 1, 1, 3, 1),
	                                 .k_lengths = lengths};
	ASK(kv_append, append);
	expect(ingot_kv_append(&append, cpu, &options) == INGOT_OK, "kv_append");
	expect(cache_k[0] == 1 && cache_k[1] == 7 && cache_k[2] == 3, "kv_append: k");
	expect(cache_v[0] == 4 && cache_v[1] == 8 && cache_v[2] == 6, "kv_append: v");

	/* Pinned words of Philox4x32-10 for seed 0, offset 0, index 0; p 0.5 keeps those with the top bit set. */
	uint8_t mask[4] = {9, 9, 9, 9};
	ingot_attn_dropout_mask_params keep = {
		.struct_size = sizeof keep,
		.dropout_p = 0.5f,
		.mask = {.data = mask, .dtype = INGOT_BOOL, .ndim = 4, .shape = {1, 1, 1, 4}, .stride = {4, 4, 4, 1}}};
	ASK(attn_dropout_mask, keep);
	expect(ingot_attn_dropout_mask(&keep, cpu, &options) == INGOT_OK, "attn_dropout_mask");
	expect(mask[0] == 0 && mask[1] == 1 && mask[2] == 1 && mask[3] == 1,
	       "attn_dropout_mask: 6627e8d5 e169c58d bc57ac4c 9b00dbd8");

	/* A field that is wrong: refused, with a sentence that names it, and nothing is written. */
	forward.softcap = -1;
	out[0] = 99;
	expect(ingot_attn_fwd(&forward, cpu, &options) == INGOT_INVALID, "a negative softcap is refused");
	expect(strstr(ingot_last_error(), "softcap") != NULL, "the sentence names softcap");
	expect(out[0] == 99, "a refused call writes nothing");

	return failures == 0 ? 0 : 1;
}
