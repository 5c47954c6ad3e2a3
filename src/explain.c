/* Renders a choice: each candidate, refused why or measured what, and the winner; as text for people or JSON for programs. */
#include <string.h>

#include "pipeline.h"
#include "support/text.h"

static const char *const operator_names[INGOT__OPERATORS] = {"attn_fwd", "attn_bwd", "attn_merge", "kv_append",
                                                             "attn_dropout_mask"};

static void as_text(ingot__text *t, const ingot__problem *p, const ingot__device *d, const ingot__choice *c,
                    const ingot__plan *plan, uint64_t workspace, const char *bucket) {
	ingot__text_add(t, "%s on %s (%s), bucket %s\n", operator_names[p->op], d->arch, d->model, bucket);
	for (int i = 0; i < c->candidates; i++) {
		const ingot__candidate *x = &c->candidate[i];
		const bool winner = x->impl == c->impl;
		ingot__text_add(t, "%c %s/%s", winner ? '*' : ' ', x->impl->family, x->impl->name);
		if (x->refusal) {
			ingot__text_add(t, ": refused: %s\n", x->refusal);
			continue;
		}
		ingot__text_add(t, ":%s: ", ingot__variant_name(x->impl, x->variant));
		if (x->row) {
			char at[128];
			ingot__bucket_text(&x->row->bucket, at, sizeof at);
			ingot__text_add(t, "%.1f us at %s on %s", (double)x->row->microseconds, at, x->row->device);
		} else ingot__text_add(t, "not measured");
		if (x->impl->verified_by_definition) ingot__text_add(t, "; the reference\n");
		else if (x->verified) ingot__text_add(t, "; verified by %d cases\n", x->cases);
		else if (x->inherited) ingot__text_add(t, "; unverified here, %d cases on a parent architecture\n", x->cases);
		else ingot__text_add(t, "; unverified%s\n", x->stale ? ": its rows are of an older source" : "");
	}
	if (!c->impl) {
		ingot__text_add(t, "none: %s\n", ingot_last_error());
		return;
	}
	ingot__text_add(t, "runs %s/%s:%s (%s), workspace %llu bytes, steps", c->impl->family, c->impl->name,
	                ingot__variant_name(c->impl, c->variant), c->because, (unsigned long long)workspace);
	for (int i = 0; i < plan->steps; i++)
		ingot__text_add(t, "%s %s x%lld", i ? "," : "", plan->step[i].name, (long long)plan->step[i].tasks);
	ingot__text_add(t, "%s\n", plan->steps ? "" : " none: nothing to write");
}

static void key(ingot__text *t, const char *name, const char *value) {
	ingot__text_add(t, "\"%s\":", name);
	ingot__text_add_json(t, value);
}

static void as_json(ingot__text *t, const ingot__problem *p, const ingot__device *d, const ingot__choice *c,
                    const ingot__plan *plan, uint64_t workspace, const char *bucket) {
	ingot__text_add(t, "{");
	key(t, "operator", operator_names[p->op]);
	ingot__text_add(t, ",");
	key(t, "arch", d->arch);
	ingot__text_add(t, ",");
	key(t, "model", d->model);
	ingot__text_add(t, ",");
	key(t, "bucket", bucket);
	ingot__text_add(t, ",\"candidates\":[");
	for (int i = 0; i < c->candidates; i++) {
		const ingot__candidate *x = &c->candidate[i];
		ingot__text_add(t, "%s{", i ? "," : "");
		key(t, "name", x->impl->name);
		ingot__text_add(t, ",");
		key(t, "family", x->impl->family);
		ingot__text_add(t, ",");
		key(t, "digest", ingot__impl_digest(x->impl->name));
		ingot__text_add(t, ",\"verified\":%s,\"stale\":%s,\"inherited\":%s,\"cases\":%d,",
		                x->verified ? "true" : "false", x->stale ? "true" : "false", x->inherited ? "true" : "false",
		                x->cases);
		if (x->refusal) key(t, "refusal", x->refusal);
		else key(t, "variant", ingot__variant_name(x->impl, x->variant));
		if (x->row) {
			char at[128];
			ingot__bucket_text(&x->row->bucket, at, sizeof at);
			ingot__text_add(t, ",\"microseconds\":%.3f,\"error_ratio\":%.3f,", (double)x->row->microseconds,
			                (double)x->row->error_ratio);
			key(t, "measured_bucket", at);
			ingot__text_add(t, ",");
			key(t, "measured_on", x->row->device);
		}
		ingot__text_add(t, "}");
	}
	ingot__text_add(t, "],");
	if (!c->impl) {
		ingot__text_add(t, "\"winner\":null,");
		key(t, "because", ingot_last_error());
		ingot__text_add(t, "}");
		return;
	}
	ingot__text_add(t, "\"winner\":{");
	key(t, "name", c->impl->name);
	ingot__text_add(t, ",");
	key(t, "family", c->impl->family);
	ingot__text_add(t, ",");
	key(t, "variant", ingot__variant_name(c->impl, c->variant));
	ingot__text_add(t, "},");
	key(t, "because", c->because);
	ingot__text_add(t, ",\"workspace\":%llu,\"steps\":[", (unsigned long long)workspace);
	for (int i = 0; i < plan->steps; i++) {
		ingot__text_add(t, "%s{", i ? "," : "");
		key(t, "name", plan->step[i].name);
		ingot__text_add(t, ",\"tasks\":%lld}", (long long)plan->step[i].tasks);
	}
	ingot__text_add(t, "]}");
}

void ingot__explain(const ingot__problem *problem, const ingot__device *device, const ingot__choice *choice,
                    const ingot__plan *plan, uint64_t workspace, int32_t format, char *buffer, size_t capacity,
                    size_t *needed) {
	ingot__text t = {buffer, capacity, 0};
	ingot__bucket b;
	char bucket[128];
	ingot__bucket_of(problem, &b);
	ingot__bucket_text(&b, bucket, sizeof bucket);
	if (capacity) buffer[0] = 0;
	(format == INGOT_JSON ? as_json : as_text)(&t, problem, device, choice, plan, workspace, bucket);
	if (needed) *needed = t.length + 1;
}
