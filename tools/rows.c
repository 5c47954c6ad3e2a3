/* See rows.h. */
#include "rows.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tool.h"

typedef struct table {
	row *rows;
	int count, room;
} table;

static const char head[] =
	"# op\tarch\tbucket\timplementation\tvariant\tmicroseconds\terror_ratio\tcases\tdigest\tdevice\tdate\n";

static row *add(table *t) {
	if (t->count == t->room) {
		t->room = t->room ? 2 * t->room : 256;
		row *more = tool_alloc(sizeof *more * (size_t)t->room);
		if (t->count) memcpy(more, t->rows, sizeof *more * (size_t)t->count);
		free(t->rows);
		t->rows = more;
	}
	t->rows[t->count] = (row){0};
	return &t->rows[t->count++];
}

static bool read_line(char *line, row *r) {
	char *column[11], *rest = line;
	for (int i = 0; i < 11; i++) {
		if (!rest) return false;
		column[i] = rest;
		rest = strchr(rest, '\t');
		if (rest) *rest++ = 0;
	}
	char *const text[] = {r->op, r->arch, r->bucket, r->implementation, r->variant, NULL,
	                      NULL,  NULL,    r->digest, r->device,         r->date};
	const size_t size[] = {
		sizeof r->op,     sizeof r->arch,   sizeof r->bucket, sizeof r->implementation, sizeof r->variant, 0, 0, 0,
		sizeof r->digest, sizeof r->device, sizeof r->date};
	for (int i = 0; i < 11; i++) {
		if (!text[i]) continue;
		if (strlen(column[i]) >= size[i]) return false;
		strcpy(text[i], column[i]);
	}
	/* a number that cannot be read must not be written back as 0 */
	char *end[3];
	r->microseconds = strtod(column[5], &end[0]);
	r->error_ratio = strtod(column[6], &end[1]);
	r->cases = strtoll(column[7], &end[2], 10);
	for (int i = 0; i < 3; i++)
		if (end[i] == column[5 + i] || *end[i]) return false;
	return !rest;
}

static bool read_table(const char *path, table *t, char *error, size_t capacity) {
	FILE *f = fopen(path, "re");
	if (!f) {
		if (errno == ENOENT) return true;
		snprintf(error, capacity, "%s: %s", path, strerror(errno));
		return false;
	}
	char line[1024];
	for (int number = 1; fgets(line, sizeof line, f); number++) {
		line[strcspn(line, "\r\n")] = 0;
		if (!*line || *line == '#') continue;
		if (!read_line(line, add(t))) {
			snprintf(error, capacity, "%s line %d: no tuning row of 11 columns", path, number);
			fclose(f);
			return false;
		}
	}
	/* what is not read would be lost when the table is written */
	const bool good = !ferror(f);
	if (!good) snprintf(error, capacity, "%s cannot be read: %s", path, strerror(errno));
	fclose(f);
	return good;
}

static int compare_keys(const row *a, const row *b) {
	int c = strcmp(a->op, b->op);
	if (!c) c = strcmp(a->arch, b->arch);
	if (!c) c = strcmp(a->bucket, b->bucket);
	if (!c) c = strcmp(a->implementation, b->implementation);
	return c ? c : strcmp(a->variant, b->variant);
}

static int by_key(const void *a, const void *b) {
	return compare_keys(a, b);
}

static bool write_table(const char *path, table *t, char *error, size_t capacity) {
	if (t->count) qsort(t->rows, (size_t)t->count, sizeof *t->rows, by_key);
	char temporary[4096];
	snprintf(temporary, sizeof temporary, "%s.%ld", path, (long)getpid());
	FILE *f = fopen(temporary, "we");
	bool good = f && fputs(head, f) >= 0;
	for (int i = 0; good && i < t->count; i++) {
		const row *r = &t->rows[i];
		good = fprintf(f, "%s\t%s\t%s\t%s\t%s\t%.1f\t%.3f\t%lld\t%s\t%s\t%s\n", r->op, r->arch, r->bucket,
		               r->implementation, r->variant, r->microseconds, r->error_ratio, (long long)r->cases, r->digest,
		               r->device, r->date) > 0;
	}
	if (f && fclose(f) != 0) good = false;
	if (good) good = rename(temporary, path) == 0;
	if (!good) {
		snprintf(error, capacity, "%s cannot be written: %s", path, strerror(errno));
		if (f) unlink(temporary);
	}
	return good;
}

bool rows_check(const char *path, const char *arch, bool must_exist, char *error, size_t capacity) {
	table t = {0};
	if (must_exist && access(path, R_OK) != 0) {
		snprintf(error, capacity, "%s: %s", path, strerror(errno));
		return false;
	}
	bool good = read_table(path, &t, error, capacity);
	for (int i = 0; good && i < t.count; i++) {
		good = strcmp(t.rows[i].arch, arch) == 0;
		if (!good)
			snprintf(error, capacity, "%s holds rows of %s; those asked for are of %s", path, t.rows[i].arch, arch);
	}
	free(t.rows);
	return good;
}

bool rows_merge(const char *path, const row *rows, int count, char *error, size_t capacity) {
	table t = {0};
	bool good = read_table(path, &t, error, capacity);
	const int old = t.count;
	for (int i = 0; good && i < count; i++) {
		row *at = NULL;
		for (int j = 0; j < t.count && !at; j++)
			if (compare_keys(&t.rows[j], &rows[i]) == 0) at = &t.rows[j];
		const bool keeps = at && strcmp(at->digest, rows[i].digest) == 0 && rows[i].cases == 0;
		const int64_t cases = keeps ? at->cases : rows[i].cases;
		const double ratio = keeps ? at->error_ratio : rows[i].error_ratio;
		if (!at) {
			at = add(&t);
			/* A new row of a source that other rows have verified shares their evidence: it is of the kernel, not of the size. */
			*at = rows[i];
			for (int j = 0; j < old && at->cases == 0; j++)
				if (strcmp(t.rows[j].implementation, at->implementation) == 0 &&
				    strcmp(t.rows[j].digest, at->digest) == 0 && strcmp(t.rows[j].arch, at->arch) == 0) {
					at->cases = t.rows[j].cases;
					at->error_ratio = t.rows[j].error_ratio;
				}
			continue;
		}
		*at = rows[i];
		at->cases = cases;
		at->error_ratio = ratio;
	}
	good = good && write_table(path, &t, error, capacity);
	free(t.rows);
	return good;
}

bool rows_verify(const char *path, const char *implementation, const char *digest, int64_t cases, double error_ratio,
                 char *error, size_t capacity) {
	table t = {0};
	bool good = read_table(path, &t, error, capacity);
	for (int i = 0; good && i < t.count; i++)
		if (strcmp(t.rows[i].implementation, implementation) == 0 && strcmp(t.rows[i].digest, digest) == 0) {
			t.rows[i].cases = cases;
			t.rows[i].error_ratio = error_ratio;
		}
	good = good && write_table(path, &t, error, capacity);
	free(t.rows);
	return good;
}
