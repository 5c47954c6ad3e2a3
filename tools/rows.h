/* Tuning rows as text, as tuning/<arch>.tsv holds them: read, changed, and written back sorted, whole or not at all. */
#ifndef INGOT_TOOL_ROWS_H
#define INGOT_TOOL_ROWS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct row {
	char op[32], arch[32], bucket[128], implementation[64], variant[64];
	double microseconds, error_ratio;
	int64_t cases;
	char digest[40], device[64], date[16];
} row;

/* Whether FILE holds tuning rows of `arch`, an architecture or a model, and nothing else; a missing one may be made unless it must be there. */
bool rows_check(const char *path, const char *arch, bool must_exist, char *error, size_t capacity);

/* Adds or replaces rows of FILE (made if it is missing). A row that replaces one of the same digest keeps its evidence. */
bool rows_merge(const char *path, const row *rows, int count, char *error, size_t capacity);

/* Sets the evidence of every row of an implementation that is of the source with that digest: what its check gave; 0 cases: not
 * verified. */
bool rows_verify(const char *path, const char *implementation, const char *digest, int64_t cases, double error_ratio,
                 char *error, size_t capacity);

#endif
