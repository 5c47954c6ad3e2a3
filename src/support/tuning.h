/*
 * One row of tuning/<arch>.tsv as text and as a struct. The same reader serves tools/mktables.c, which turns the repository's
 * rows into const tables, and the overlay of a user's own rows (INGOT_TUNING_PATH). Knows no stage.
 *
 * Columns, tab-separated: op, arch, bucket, implementation, variant, microseconds, error_ratio, cases, digest, device, date.
 * A line that starts with '#' is a remark. The bucket is "DTYPE,dD,dvDV,qQ,kK,bhN,MASK,CLASS": element type (of K and V after
 * a slash when it differs), head sizes, query and key length and batch * query heads rounded to powers of two, "full",
 * "causal" or "window", and "plain", "general" or "paged".
 */
#ifndef INGOT_SUPPORT_TUNING_H
#define INGOT_SUPPORT_TUNING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct ingot__bucket {
	uint8_t dtype, kv_dtype; /* ingot_dtype */
	uint8_t mask;            /* 0 full, 1 causal, 2 window */
	uint8_t features;        /* 0 plain, 1 general, 2 paged */
	uint16_t d, dv;
	int8_t q, k, bh, unused; /* log2, -1: zero; unused keeps the struct without padding */
} ingot__bucket;

typedef struct ingot__row {
	const char *op, *arch, *implementation, *variant;
	ingot__bucket bucket;
	float microseconds, error_ratio;
	int32_t cases;
	const char *digest, *device, *date;
} ingot__row;

void ingot__bucket_text(const ingot__bucket *bucket, char *text, size_t capacity);
bool ingot__bucket_parse(const char *text, ingot__bucket *bucket);

/* Splits one line (changed in place, its strings stay in it) into a row. false: *why says what is wrong. */
bool ingot__row_parse(char *line, ingot__row *row, const char **why);
/* The order of tables: op, arch, types, mask, class, sizes, implementation, variant. */
int ingot__row_compare(const ingot__row *a, const ingot__row *b);

#endif
