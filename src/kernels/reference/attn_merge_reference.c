/*
 * Merge of partial attention results: each row's parts are weighted by exp(lse - max) and their weighted mean is written.
 * Sums are fp32. A part whose weight is 0 is never read, since an empty part may hold anything. It is memory-bound, and the
 * inner loops are contiguous, so plain C serves as the CPU's kernel too.
 */
#include "../cpu.h"

ingot__task ingot__attn_merge_reference_rows;

enum { ROWS_PER_TASK }; /* plan->number[] */

#ifdef INGOT_HOST

static const char *refuse(const ingot__problem *problem, const ingot__device *device, int *variant) {
	(void)problem, (void)device;
	*variant = 0;
	return NULL;
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)device, (void)threads;
	const int64_t rows = p->batch * p->heads_q * p->q_side.capacity;
	/* Some 16 thousand elements a task, whatever the shape. */
	const int64_t per_row = (p->parts + 1) * p->head_dim_v + 16, per_task = ingot__clamp(16384 / per_row, 1, 1024);
	out->number[ROWS_PER_TASK] = per_task;
	out->scratch_bytes = (uint64_t)p->head_dim_v * sizeof(float);
	if (rows)
		out->step[out->steps++] = (ingot__step){
			.name = "rows",
			.task = ingot__attn_merge_reference_rows,
			.tasks = (rows + per_task - 1) / per_task,
			.work = (double)rows * ((double)(p->parts * (p->head_dim_v + 40) + p->head_dim_v) * 0.5 + 30),
		};
}

static const char *const variants[] = {"general"};

const ingot__impl ingot__impl_attn_merge_reference = {
	.name = "attn_merge_reference",
	.family = "reference",
	.op = INGOT__ATTN_MERGE,
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

/* sum += weight * part, n values from an element offset on. */
static void add_part(float *restrict sum, const void *part, int64_t offset, int32_t dtype, int64_t n, float weight) {
	switch (dtype) {
	case INGOT_F32:
		for (int64_t d = 0; d < n; d++) sum[d] += weight * ingot__load(part, offset + d, INGOT_F32);
		break;
	case INGOT_F16:
		for (int64_t d = 0; d < n; d++) sum[d] += weight * ingot__load(part, offset + d, INGOT_F16);
		break;
	default:
		for (int64_t d = 0; d < n; d++) sum[d] += weight * ingot__load(part, offset + d, INGOT_BF16);
	}
}

static void store_row(const ingot_tensor *out, int64_t offset, const float *row, int64_t n, float factor) {
	switch (out->dtype) {
	case INGOT_F32:
		for (int64_t d = 0; d < n; d++) ingot__store(out->data, offset + d, INGOT_F32, row[d] * factor);
		break;
	case INGOT_F16:
		for (int64_t d = 0; d < n; d++) ingot__store(out->data, offset + d, INGOT_F16, row[d] * factor);
		break;
	default:
		for (int64_t d = 0; d < n; d++) ingot__store(out->data, offset + d, INGOT_BF16, row[d] * factor);
	}
}

static int64_t at(const ingot_tensor *t, int64_t b, int64_t h, int64_t row) {
	return b * t->stride[0] + h * t->stride[1] + row * t->stride[2];
}

static float part_lse(const ingot__problem *p, int64_t part, int64_t b, int64_t h, int64_t row) {
	const ingot_tensor *const t = &p->lse_parts[p->parts_stacked ? 0 : part];
	return ingot__load(t->data, at(t, b, h, row) + (p->parts_stacked ? part * p->lse_part_stride : 0), INGOT_F32);
}

static void merge_row(const ingot__problem *p, float *sum, int64_t b, int64_t h, int64_t row) {
	const bool base2 = p->lse_base == INGOT_LSE_BASE2;
	const int64_t n = p->head_dim_v;
	float top = -INFINITY, total = 0;
	for (int64_t i = 0; i < p->parts; i++) {
		const float lse = part_lse(p, i, b, h, row);
		if (lse > top) top = lse;
	}
	/* All parts empty, or NaN: subtract 0, so that an empty one's weight is exp(-inf) = 0. */
	if (top == -INFINITY) top = 0;
	for (int64_t d = 0; d < n; d++) sum[d] = 0;
	for (int64_t i = 0; i < p->parts; i++) {
		const float power = part_lse(p, i, b, h, row) - top, weight = base2 ? exp2f(power) : expf(power);
		if (weight == 0) continue;
		const ingot_tensor *const t = &p->out_parts[p->parts_stacked ? 0 : i];
		add_part(sum, t->data, at(t, b, h, row) + (p->parts_stacked ? i * p->out_part_stride : 0), t->dtype, n, weight);
		total += weight;
	}
	store_row(&p->out, at(&p->out, b, h, row), sum, n, total == 0 ? 1 : 1 / total);
	if (p->lse.dtype == INGOT_NONE) return;
	const float lse = total == 0 ? -INFINITY : top + (base2 ? log2f(total) : logf(total));
	ingot__store(p->lse.data, at(&p->lse, b, h, row), INGOT_F32, lse);
}

void ingot__attn_merge_reference_rows(const ingot__problem *p, const ingot__plan *plan, void *workspace, void *scratch,
                                      int64_t index) {
	(void)workspace;
	const int64_t seqlen = p->q_side.capacity, rows = p->batch * p->heads_q * seqlen;
	const int64_t first = index * plan->number[ROWS_PER_TASK], last = first + plan->number[ROWS_PER_TASK];
	for (int64_t r = first; r < last && r < rows; r++)
		merge_row(p, scratch, r / seqlen / p->heads_q, r / seqlen % p->heads_q, r % seqlen);
}

#endif
