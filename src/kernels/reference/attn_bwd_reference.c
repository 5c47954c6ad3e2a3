/*
 * Attention backward by the textbook algorithm in fp32: any problem, on any processor, slowly, always deterministic. It is
 * the fallback of the CPU and the yardstick of errors: it takes the forward's rounded out and lse, and rounds P and dS to
 * the storage type.
 */
#define REFERENCE_F64 0
#include "attn_bwd.h"

ingot__task ingot__attn_bwd_reference_rows, ingot__attn_bwd_reference_keys, ingot__attn_bwd_reference_bias,
	ingot__attn_bwd_reference_sink;

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
					  .rows = ingot__attn_bwd_reference_rows,
					  .keys = ingot__attn_bwd_reference_keys,
					  .bias = ingot__attn_bwd_reference_bias,
					  .sink = ingot__attn_bwd_reference_sink,
				  });
}

static const char *const variants[] = {"general"};

const ingot__impl ingot__impl_attn_bwd_reference = {
	.name = "attn_bwd_reference",
	.family = "reference",
	.op = INGOT__ATTN_BWD,
	.device = INGOT_CPU,
	.arch = "",
	.rank = 1,
	.verified_by_definition = true,
	.variants = variants,
	.variant_count = 1,
	.refuse = refuse,
	.plan = plan,
};

#else

void ingot__attn_bwd_reference_rows(const ingot__problem *problem, const ingot__plan *plan, void *workspace,
                                    void *scratch, int64_t index) {
	(void)plan;
	backward_rows(problem, workspace, scratch, index);
}

void ingot__attn_bwd_reference_keys(const ingot__problem *problem, const ingot__plan *plan, void *workspace,
                                    void *scratch, int64_t index) {
	(void)plan;
	backward_keys(problem, workspace, scratch, index);
}

void ingot__attn_bwd_reference_bias(const ingot__problem *problem, const ingot__plan *plan, void *workspace,
                                    void *scratch, int64_t index) {
	(void)plan;
	backward_bias(problem, workspace, scratch, index);
}

void ingot__attn_bwd_reference_sink(const ingot__problem *problem, const ingot__plan *plan, void *workspace,
                                    void *scratch, int64_t index) {
	(void)plan, (void)scratch;
	backward_sink(problem, workspace, index);
}

#endif
