/*
 * Attention forward by the textbook algorithm in fp32: any problem, on any processor, slowly. It is the fallback of the CPU
 * and the yardstick of errors: what a faster kernel may be wrong by is measured on this one.
 */
#define REFERENCE_F64 0
#include "attn_fwd.h"

ingot__task ingot__attn_fwd_reference_rows, ingot__attn_fwd_reference_cells;

#ifdef INGOT_HOST

static const char *refuse(const ingot__problem *problem, const ingot__device *device, int *variant) {
	(void)problem, (void)device;
	*variant = 0;
	return NULL;
}

static void plan(const ingot__problem *problem, const ingot__device *device, int threads, ingot__plan *out) {
	(void)device, (void)threads;
	forward_plan(problem, out, ingot__attn_fwd_reference_rows, ingot__attn_fwd_reference_cells);
}

static const char *const variants[] = {"general"};

const ingot__impl ingot__impl_attn_fwd_reference = {
	.name = "attn_fwd_reference",
	.family = "reference",
	.op = INGOT__ATTN_FWD,
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

void ingot__attn_fwd_reference_rows(const ingot__problem *problem, const ingot__plan *plan, void *workspace,
                                    void *scratch, int64_t index) {
	(void)plan, (void)workspace;
	forward_rows(problem, scratch, index);
}

void ingot__attn_fwd_reference_cells(const ingot__problem *problem, const ingot__plan *plan, void *workspace,
                                     void *scratch, int64_t index) {
	(void)plan, (void)workspace, (void)scratch, (void)index;
	forward_cells(problem);
}

#endif
