/*
 * Append of new K and V rows to a cache, padded or paged, as they are or as 8-bit values. Rows are copied whole; nothing is
 * computed but their place, so plain C serves as the CPU's kernel too.
 */
#include "../cpu.h"

ingot__task ingot__kv_append_reference_tokens;

enum { TOKENS_PER_TASK, TASKS_PER_SEQUENCE }; /* plan->number[] */

#ifdef INGOT_HOST

static const char *refuse(const ingot__problem *problem, const ingot__device *device, int *variant) {
	(void)problem, (void)device;
	*variant = 0;
	return NULL;
}

static void plan(const ingot__problem *p, const ingot__device *device, int threads, ingot__plan *out) {
	(void)device, (void)threads;
	const int64_t tokens = p->q_side.max_seqlen < p->q_side.capacity ? p->q_side.max_seqlen : p->q_side.capacity;
	const int64_t values = p->heads_k * (p->head_dim + p->head_dim_v);
	const int64_t per_task = ingot__clamp(16384 / (values ? values : 1), 1, 1024);
	const bool convert = p->k.dtype != p->k_new.dtype || p->v.dtype != p->v_new.dtype;
	out->number[TOKENS_PER_TASK] = per_task;
	out->number[TASKS_PER_SEQUENCE] = (tokens + per_task - 1) / per_task;
	const int64_t tasks = p->batch * out->number[TASKS_PER_SEQUENCE];
	if (tasks && values)
		out->step[out->steps++] = (ingot__step){
			.name = "tokens",
			.task = ingot__kv_append_reference_tokens,
			.tasks = tasks,
			.work = (double)(p->batch * tokens * values) * (convert ? 2 : 0.25),
		};
}

static const char *const variants[] = {"general"};

const ingot__impl ingot__impl_kv_append_reference = {
	.name = "kv_append_reference",
	.family = "reference",
	.op = INGOT__KV_APPEND,
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

/* n new values, divided by the factor, as 8-bit codes. */
static inline void narrow(uint8_t *restrict to, const void *from, int64_t offset, int32_t from_dtype, int64_t n,
                          float descale, int32_t dtype) {
	for (int64_t d = 0; d < n; d++) to[d] = ingot__to_f8(ingot__load(from, offset + d, from_dtype) / descale, dtype);
}

static inline void narrow_from(uint8_t *restrict to, const ingot_tensor *from, int64_t offset, int64_t n, float descale,
                               int32_t dtype) {
	switch (from->dtype) {
	case INGOT_F32: narrow(to, from->data, offset, INGOT_F32, n, descale, dtype); break;
	case INGOT_F16: narrow(to, from->data, offset, INGOT_F16, n, descale, dtype); break;
	default: narrow(to, from->data, offset, INGOT_BF16, n, descale, dtype);
	}
}

static void store_row(const ingot_tensor *to, int64_t to_offset, const ingot_tensor *from, int64_t offset, int64_t n,
                      float descale) {
	const int64_t size = ingot__dtype_size(to->dtype);
	uint8_t *const row = (uint8_t *)to->data + to_offset * size;
	if (to->dtype == from->dtype) {
		memcpy(row, (const uint8_t *)from->data + offset * size, (size_t)(n * size));
		return;
	}
	switch (to->dtype) {
	case INGOT_F8_E4M3: narrow_from(row, from, offset, n, descale, INGOT_F8_E4M3); break;
	case INGOT_F8_E5M2: narrow_from(row, from, offset, n, descale, INGOT_F8_E5M2); break;
	case INGOT_F8_E4M3_FNUZ: narrow_from(row, from, offset, n, descale, INGOT_F8_E4M3_FNUZ); break;
	default: narrow_from(row, from, offset, n, descale, INGOT_F8_E5M2_FNUZ);
	}
}

static float descale_of(const ingot_tensor *t, int64_t b, int64_t head) {
	if (t->dtype == INGOT_NONE) return 1;
	return ((const float *)t->data)[t->ndim == 1 ? 0 : b * t->stride[0] + head * t->stride[1]];
}

void ingot__kv_append_reference_tokens(const ingot__problem *p, const ingot__plan *plan, void *workspace, void *scratch,
                                       int64_t index) {
	(void)workspace, (void)scratch;
	const int64_t b = index / plan->number[TASKS_PER_SEQUENCE];
	const int64_t first = index % plan->number[TASKS_PER_SEQUENCE] * plan->number[TOKENS_PER_TASK];
	const ingot__span fresh = ingot__locate(&p->q_side, b), cache = {b, 0, 0};
	const int64_t last = ingot__clamp(first + plan->number[TOKENS_PER_TASK], 0, fresh.count);
	const int32_t *list = NULL;
	int64_t rows = p->k_side.capacity, before = p->k_side.lengths[b];
	if (p->features & INGOT__PAGED) {
		int64_t pages;
		list = ingot__page_list(p, b, &pages);
		rows = p->pages.count ? ingot__clamp(pages * p->pages.page_size, 0, p->k_side.max_seqlen) : 0;
		if (p->k_side.length == INGOT_LENGTH_LAST_PAGE) before += (pages - 1) * p->pages.page_size;
	}
	if (p->lengths_after) before -= fresh.count;
	for (int64_t t = first; t < last; t++) {
		const int64_t row = before + t;
		if (row < 0 || row >= rows) continue;
		for (int64_t h = 0; h < p->heads_k; h++) {
			store_row(&p->k, ingot__key_offset(p, &p->k, cache, list, h, row), &p->k_new,
			          ingot__row_offset(&p->k_new, fresh, h, t), p->head_dim, descale_of(&p->k_descale, b, h));
			if (p->v.dtype != INGOT_NONE)
				store_row(&p->v, ingot__key_offset(p, &p->v, cache, list, h, row), &p->v_new,
				          ingot__row_offset(&p->v_new, fresh, h, t), p->head_dim_v, descale_of(&p->v_descale, b, h));
		}
	}
}

#endif
