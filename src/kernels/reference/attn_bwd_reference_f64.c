/*
 * Attention backward by the textbook algorithm in double: the oracle that every other kernel is compared with. It depends
 * on q, k, v and dout alone, never on the given out and lse, which carry the forward's rounding. Its rank keeps it from
 * being chosen unless it is forced by name.
 */
#define REFERENCE_F64 1
#include "attn_bwd.h"

ingot__task ingot__attn_bwd_reference_f64_rows, ingot__attn_bwd_reference_f64_keys, ingot__attn_bwd_reference_f64_bias,
	ingot__attn_bwd_reference_f64_sink;

#ifdef INGOT_HOST

static const char *refuse(const ingot__problem *problem, const ingot__device *device, int *variant) {
	(void)problem, (void)device;
	*variant = 0;
	return NULL;
}

static void plan(const ingot__problem *problem, const ingot__device *device, int threads, ingot__plan *out) {
	(void)device, (void)threads;
	backward_plan(problem, out,
	              (backward_tasks){
					  .rows = ingot__attn_bwd_reference_f64_rows,
					  .keys = ingot__attn_bwd_reference_f64_keys,
					  .bias = ingot__attn_bwd_reference_f64_bias,
					  .sink = ingot__attn_bwd_reference_f64_sink,
				  });
}

static const char *const variants[] = {"general"};

const ingot__impl ingot__impl_attn_bwd_reference_f64 = {
	.name = "attn_bwd_reference_f64",
	.family = "reference",
	.op = INGOT__ATTN_BWD,
	.device = INGOT_CPU,
	.arch = "",
	.rank = -1,
	.verified_by_definition = true,
	.variants = variants,
	.variant_count = 1,
	.refuse = refuse,
	.plan = plan,
};

#else

void ingot__attn_bwd_reference_f64_rows(const ingot__problem *problem, const ingot__plan *plan, void *workspace,
                                        void *scratch, int64_t index) {
	(void)plan;
	backward_rows(problem, workspace, scratch, index);
}

void ingot__attn_bwd_reference_f64_keys(const ingot__problem *problem, const ingot__plan *plan, void *workspace,
                                        void *scratch, int64_t index) {
	(void)plan;
	backward_keys(problem, workspace, scratch, index);
}

void ingot__attn_bwd_reference_f64_bias(const ingot__problem *problem, const ingot__plan *plan, void *workspace,
                                        void *scratch, int64_t index) {
	(void)plan;
	backward_bias(problem, workspace, scratch, index);
}

void ingot__attn_bwd_reference_f64_sink(const ingot__problem *problem, const ingot__plan *plan, void *workspace,
                                        void *scratch, int64_t index) {
	(void)plan, (void)scratch;
	backward_sink(problem, workspace, index);
}

#endif
