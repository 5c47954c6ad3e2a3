/* Reads and writes tuning rows; see tuning.h for their form. */
#include "tuning.h"

#include <ingot.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const dtypes[] = {"none",     "f32",      "f16", "bf16", "e4m3", "e5m2",
                                     "e4m3fnuz", "e5m2fnuz", "i32", "i64",  "u64",  "bool"};
static const char *const masks[] = {"full", "causal", "window"};
static const char *const classes[] = {"plain", "general", "paged"};
enum { DTYPES = sizeof dtypes / sizeof *dtypes };

static const char *dtype_name(int dtype) {
	return dtype < DTYPES ? dtypes[dtype] : "other";
}

static int64_t size_of(int log2) {
	return log2 < 0 ? 0 : (int64_t)1 << log2;
}

void ingot__bucket_text(const ingot__bucket *b, char *text, size_t capacity) {
	char type[32];
	if (b->kv_dtype == b->dtype) snprintf(type, sizeof type, "%s", dtype_name(b->dtype));
	else snprintf(type, sizeof type, "%s/%s", dtype_name(b->dtype), dtype_name(b->kv_dtype));
	snprintf(text, capacity, "%s,d%u,dv%u,q%lld,k%lld,bh%lld,%s,%s", type, b->d, b->dv, (long long)size_of(b->q),
	         (long long)size_of(b->k), (long long)size_of(b->bh), masks[b->mask % 3], classes[b->features % 3]);
}

static int index_of(const char *const *names, int count, const char *text) {
	for (int i = 0; i < count; i++)
		if (!strcmp(names[i], text)) return i;
	return -1;
}

static bool parse_log2(const char *text, const char *prefix, int8_t *out) {
	size_t n = strlen(prefix);
	if (strncmp(text, prefix, n)) return false;
	char *end;
	long long x = strtoll(text + n, &end, 10);
	if (end == text + n || *end || x < 0) return false;
	*out = -1;
	for (; x; x >>= 1) ++*out;
	return true;
}

static bool parse_size(const char *text, const char *prefix, uint16_t *out) {
	size_t n = strlen(prefix);
	if (strncmp(text, prefix, n)) return false;
	char *end;
	long x = strtol(text + n, &end, 10);
	if (end == text + n || *end || x < 0 || x > 65535) return false;
	*out = (uint16_t)x;
	return true;
}

bool ingot__bucket_parse(const char *text, ingot__bucket *b) {
	char copy[128];
	if (strlen(text) >= sizeof copy) return false;
	strcpy(copy, text);
	char *part[8], *rest = copy;
	for (int i = 0; i < 8; i++) {
		part[i] = rest;
		rest = strchr(rest, ',');
		if (!rest != (i == 7)) return false;
		if (rest) *rest++ = 0;
	}
	char *slash = strchr(part[0], '/');
	if (slash) *slash++ = 0;
	int dtype = index_of(dtypes, DTYPES, part[0]), kv = slash ? index_of(dtypes, DTYPES, slash) : dtype;
	int mask = index_of(masks, 3, part[6]), features = index_of(classes, 3, part[7]);
	if (dtype < 0 || kv < 0 || mask < 0 || features < 0) return false;
	*b = (ingot__bucket){
		.dtype = (uint8_t)dtype, .kv_dtype = (uint8_t)kv, .mask = (uint8_t)mask, .features = (uint8_t)features};
	return parse_size(part[1], "d", &b->d) && parse_size(part[2], "dv", &b->dv) && parse_log2(part[3], "q", &b->q) &&
	       parse_log2(part[4], "k", &b->k) && parse_log2(part[5], "bh", &b->bh);
}

static bool parse_number(const char *text, float *out) {
	char *end;
	*out = strtof(text, &end);
	return end != text && !*end && isfinite(*out) && *out >= 0;
}

bool ingot__row_parse(char *line, ingot__row *row, const char **why) {
	enum { COLUMNS = 11 };
	char *column[COLUMNS], *rest = line;
	size_t n = strlen(line);
	while (n && (line[n - 1] == '\n' || line[n - 1] == '\r')) line[--n] = 0;
	for (int i = 0; i < COLUMNS; i++) {
		if (!rest) return *why = "fewer than 11 columns", false;
		column[i] = rest;
		rest = strchr(rest, '\t');
		if (rest) *rest++ = 0;
	}
	if (rest) return *why = "more than 11 columns", false;
	row->op = column[0], row->arch = column[1], row->implementation = column[3], row->variant = column[4];
	row->digest = column[8], row->device = column[9], row->date = column[10];
	if (!ingot__bucket_parse(column[2], &row->bucket)) return *why = "the bucket cannot be read", false;
	if (!parse_number(column[5], &row->microseconds)) return *why = "microseconds is no finite number >= 0", false;
	if (!parse_number(column[6], &row->error_ratio)) return *why = "error_ratio is no finite number >= 0", false;
	char *end;
	long cases = strtol(column[7], &end, 10);
	if (end == column[7] || *end || cases < 0 || cases > INT32_MAX) return *why = "cases is no count", false;
	row->cases = (int32_t)cases;
	return true;
}

int ingot__row_compare(const ingot__row *a, const ingot__row *b) {
	int c = strcmp(a->op, b->op);
	if (!c) c = strcmp(a->arch, b->arch);
	if (!c) c = memcmp(&a->bucket, &b->bucket, sizeof a->bucket);
	if (!c) c = strcmp(a->implementation, b->implementation);
	if (!c) c = strcmp(a->variant, b->variant);
	return c;
}
