/*
 * Causal attention with grouped heads, on the CPU: 8 query heads share 2 key heads, and the tensors lie in memory as
 * [B, S, H, D], the way a model's projections leave them.
 * The README shows this file from its first include to the end of attend().
 */
#include <ingot.h>
#include <stdio.h>

enum { BATCH = 2, SEQLEN = 100, HEADS = 8, KEY_HEADS = 2, HEAD_DIM = 64 };

/* A shape is always [B, H, S, D]; the strides say that the memory is [B, S, H, D]. */
static ingot_tensor view(float *data, int64_t heads) {
	return (ingot_tensor){
		.data = data,
		.dtype = INGOT_F32,
		.ndim = 4,
		.shape = {BATCH, heads, SEQLEN, HEAD_DIM},
		.stride = {SEQLEN * heads * HEAD_DIM, HEAD_DIM, heads * HEAD_DIM, 1},
	};
}

static int attend(float *q, float *k, float *v, float *out) {
	const ingot_attn_fwd_params params = {
		.struct_size = sizeof params,
		.q = view(q, HEADS),
		.k = view(k, KEY_HEADS),
		.v = view(v, KEY_HEADS),
		.out = view(out, HEADS),
		.mask = INGOT_MASK_CAUSAL,
	};
	const ingot_stream cpu = {.type = INGOT_CPU};
	if (ingot_attn_fwd(&params, cpu, NULL) == INGOT_OK) return 0;
	fprintf(stderr, "attention failed: %s\n", ingot_last_error());
	return 1;
}

/* Values in [-0.5, 0.5) without an order. */
static void fill(float *data, size_t count) {
	for (size_t i = 0; i < count; i++) data[i] = (float)(i * 7919 % 1009) / 1009 - 0.5f;
}

int main(void) {
	static float q[BATCH * SEQLEN * HEADS * HEAD_DIM], out[BATCH * SEQLEN * HEADS * HEAD_DIM];
	static float k[BATCH * SEQLEN * KEY_HEADS * HEAD_DIM], v[BATCH * SEQLEN * KEY_HEADS * HEAD_DIM];
	fill(q, sizeof q / sizeof *q);
	fill(k, sizeof k / sizeof *k);
	fill(v, sizeof v / sizeof *v);

	if (attend(q, k, v, out)) return 1;

	/* The first query sees the first key alone, so its output is that key's value. */
	for (int h = 0; h < HEADS; h++)
		for (int d = 0; d < HEAD_DIM; d++) {
			const float value = v[h / (HEADS / KEY_HEADS) * HEAD_DIM + d];
			const float apart = out[h * HEAD_DIM + d] - value;
			if (!(apart > -1e-6f && apart < 1e-6f)) {
				fprintf(stderr, "head %d: the first row is not the first key's value\n", h);
				return 1;
			}
		}
	printf("out[0][0][0][0] = %g\n", (double)out[0]);
	return 0;
}
