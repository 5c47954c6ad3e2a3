/*
 * Writes the dropout mask of attention. Draws of neighbouring keys run side by side through the rounds, which the compiler
 * turns into vector code.
 */
#include "../cpu.h"

ingot__task ingot__attn_dropout_mask_reference_rows;

enum { ROWS_PER_TASK, TASKS_PER_HEAD }; /* plan->number[] */

#ifdef INGOT_HOST

static const char *refuse(const ingot__problem *problem, const ingot__device *device, int *variant) {
	(void)problem, (void)device;
	*variant = 0;
	return NULL;
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)device, (void)threads;
	const int64_t rows = p->keep.shape[2], keys = p->keep.shape[3];
	const int64_t per_task = ingot__clamp(16384 / (keys ? keys : 1), 1, 1024);
	out->number[ROWS_PER_TASK] = per_task;
	out->number[TASKS_PER_HEAD] = (rows + per_task - 1) / per_task;
	const int64_t tasks = p->batch * p->heads_q * out->number[TASKS_PER_HEAD];
	if (tasks && keys)
		out->step[out->steps++] = (ingot__step){
			.name = "rows",
			.task = ingot__attn_dropout_mask_reference_rows,
			.tasks = tasks,
			.work = (double)(p->batch * p->heads_q * rows) * (double)keys * 3,
		};
}

static const char *const variants[] = {"general"};

const ingot__impl ingot__impl_attn_dropout_mask_reference = {
	.name = "attn_dropout_mask_reference",
	.family = "reference",
	.op = INGOT__ATTN_DROPOUT_MASK,
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

enum { LANES = 64 };

/* ingot__philox of LANES consecutive indices; word[w][lane]. */
static void philox_lanes(uint64_t seed, uint64_t offset, uint64_t index, uint32_t word[restrict 4][LANES]) {
	for (int lane = 0; lane < LANES; lane++) {
		uint32_t w[4];
		ingot__philox(seed, offset, index + (uint64_t)lane, w);
		word[0][lane] = w[0], word[1][lane] = w[1], word[2][lane] = w[2], word[3][lane] = w[3];
	}
}

void ingot__attn_dropout_mask_reference_rows(const ingot__problem *p, const ingot__plan *plan, void *workspace,
                                             void *scratch, int64_t index) {
	(void)workspace, (void)scratch;
	const int64_t b = index / plan->number[TASKS_PER_HEAD] / p->heads_q;
	const int64_t head = index / plan->number[TASKS_PER_HEAD] % p->heads_q;
	const int64_t first = index % plan->number[TASKS_PER_HEAD] * plan->number[ROWS_PER_TASK], keys = p->keep.shape[3];
	const int64_t last = ingot__clamp(first + plan->number[ROWS_PER_TASK], 0, p->keep.shape[2]);
	const uint64_t seed = ingot__dropout_seed(p), offset = ingot__dropout_offset(p);
	for (int64_t i = first; i < last; i++) {
		uint8_t *const row =
			(uint8_t *)p->keep.data + b * p->keep.stride[0] + head * p->keep.stride[1] + i * p->keep.stride[2];
		for (int64_t j = 0; j < keys; j += 4 * LANES) {
			uint32_t word[4][LANES];
			uint8_t keep[4 * LANES];
			philox_lanes(seed, offset, ingot__dropout_index(p, b, head, i, j), word);
			for (int lane = 0; lane < LANES; lane++) {
				for (int w = 0; w < 4; w++) keep[4 * lane + w] = word[w][lane] >= p->dropout_threshold;
			}
			memcpy(row + j, keep, (size_t)(keys - j < 4 * LANES ? keys - j : 4 * LANES));
		}
	}
}

#endif
