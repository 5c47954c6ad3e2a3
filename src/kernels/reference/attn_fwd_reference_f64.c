/*
 * Attention forward by the textbook algorithm in double from the exact stored inputs: the oracle that every other kernel is
 * compared with. Its rank keeps it from being chosen unless it is forced by name.
 */
#define REFERENCE_F64 1
#include "attn_fwd.h"

ingot__task ingot__attn_fwd_reference_f64_rows, ingot__attn_fwd_reference_f64_cells;

#ifdef INGOT_HOST

static const char *refuse(const ingot__problem *problem, const ingot__device *device, int *variant) {
	(void)problem, (void)device;
	*variant = 0;
	return NULL;
}

static void plan(const ingot__problem *problem, const ingot__device *device, int threads, ingot__plan *out) {
	(void)device, (void)threads;
	forward_plan(problem, out, ingot__attn_fwd_reference_f64_rows, ingot__attn_fwd_reference_f64_cells);
}

static const char *const variants[] = {"general"};

const ingot__impl ingot__impl_attn_fwd_reference_f64 = {
	.name = "attn_fwd_reference_f64",
	.family = "reference",
	.op = INGOT__ATTN_FWD,
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

void ingot__attn_fwd_reference_f64_rows(const ingot__problem *problem, const ingot__plan *plan, void *workspace,
                                        void *scratch, int64_t index) {
	(void)plan, (void)workspace;
	forward_rows(problem, scratch, index);
}

void ingot__attn_fwd_reference_f64_cells(const ingot__problem *problem, const ingot__plan *plan, void *workspace,
                                         void *scratch, int64_t index) {
	(void)plan, (void)workspace, (void)scratch, (void)index;
	forward_cells(problem);
}

#endif
