/* A user's program: compiled against an installed tree, it must find the header, link, start and make a call. */
#include <ingot.h>

#include <math.h>
#include <stdio.h>

int main(void) {
	float q[4] = {1, 2, 3, 4}, out[4] = {0};
	const ingot_tensor t = {.data = q, .dtype = INGOT_F32, .ndim = 4, .shape = {1, 1, 1, 4}, .stride = {4, 4, 4, 1}};
	ingot_attn_fwd_params params = {.struct_size = sizeof params, .q = t, .k = t, .v = t, .out = t};
	params.out.data = out;
	const ingot_status status = ingot_attn_fwd(&params, (ingot_stream){0}, NULL);
	if (status != INGOT_OK) {
		fprintf(stderr, "%s: %s\n", ingot_status_name(status), ingot_last_error());
		return 1;
	}
	if (ingot_version() != INGOT_VERSION_NUMBER) {
		fprintf(stderr, "header %d, library %s\n", INGOT_VERSION_NUMBER, ingot_version_string());
		return 1;
	}
	/* One key: its weight is 1, so the output is v itself, up to rounding. */
	for (int i = 0; i < 4; i++) {
		if (fabsf(out[i] - q[i]) > 1e-5f) {
			fprintf(stderr, "out[%d] is %g, not %g\n", i, (double)out[i], (double)q[i]);
			return 1;
		}
	}
	return 0;
}
