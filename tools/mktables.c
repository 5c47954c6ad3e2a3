/*
 * Build-time program: turns the rows of tuning/ into const tables and digests each implementation's source.
 *
 *     mktables TUNING_DIR KERNELS_DIR -o FILE.c
 *
 * The digest covers the implementation's file and the headers it includes from the kernels folder, without comments and blanks,
 * so that a remark keeps the evidence of tuning rows and any change of code makes them stale.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "../src/support/tuning.h"

static void die(const char *what, const char *which) {
	fprintf(stderr, "mktables: %s: %s\n", what, which);
	exit(1);
}

static void *need(void *p) {
	if (!p) die("out of memory", "");
	return p;
}

static char *read_file(const char *path) {
	FILE *f = fopen(path, "rb");
	if (!f) return NULL;
	size_t length = 0, room = 65536;
	char *text = need(malloc(room));
	for (size_t n; (n = fread(text + length, 1, room - length - 1, f)) > 0;) {
		length += n;
		if (room - length < 32768) text = need(realloc(text, room *= 2));
	}
	fclose(f);
	text[length] = 0;
	return text;
}

static int by_name(const void *a, const void *b) {
	return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Sorted paths of a folder's entries with that ending ("" any); the count through *count. */
static char **list(const char *folder, const char *ending, int *count) {
	char **names = NULL;
	*count = 0;
	DIR *d = opendir(folder);
	if (!d) return NULL;
	for (struct dirent *e; (e = readdir(d));) {
		const size_t n = strlen(e->d_name), m = strlen(ending);
		if (e->d_name[0] == '.' || n < m || strcmp(e->d_name + n - m, ending)) continue;
		names = need(realloc(names, sizeof *names * (size_t)(*count + 1)));
		const size_t whole = strlen(folder) + n + 2;
		names[*count] = need(malloc(whole));
		snprintf(names[(*count)++], whole, "%s/%s", folder, e->d_name);
	}
	closedir(d);
	if (*count) qsort(names, (size_t)*count, sizeof *names, by_name);
	return names;
}

/* ---- rows ------------------------------------------------------------------------------------------------------------- */

static ingot__row *rows;
static int row_count;

static void read_rows(const char *path) {
	char *text = read_file(path);
	if (!text) die("cannot read", path);
	int number = 0;
	for (char *line = text, *next; line; line = next) {
		next = strchr(line, '\n');
		if (next) *next++ = 0;
		number++;
		if (!*line || *line == '#') continue;
		const char *why;
		rows = need(realloc(rows, sizeof *rows * (size_t)(row_count + 1)));
		if (!ingot__row_parse(line, &rows[row_count], &why)) {
			fprintf(stderr, "%s:%d: %s\n", path, number, why);
			exit(1);
		}
		row_count++;
	}
}

static int compare(const void *a, const void *b) {
	return ingot__row_compare(a, b);
}

static void put_string(FILE *out, const char *s) {
	fputc('"', out);
	for (; *s; s++) {
		if (*s == '"' || *s == '\\') fputc('\\', out);
		fputc(*s, out);
	}
	fputc('"', out);
}

static void put_rows(FILE *out) {
	if (row_count) qsort(rows, (size_t)row_count, sizeof *rows, compare);
	fprintf(out, "const int ingot__row_count = %d;\nconst ingot__row ingot__rows[] = {\n", row_count);
	for (int i = 0; i < row_count; i++) {
		const ingot__row *r = &rows[i];
		const ingot__bucket *b = &r->bucket;
		if (i && !compare(r - 1, r)) die("two rows of one key, implementation and variant", r->implementation);
		fprintf(out, "\t{");
		const char *const head[] = {r->op, r->arch, r->implementation, r->variant};
		for (int j = 0; j < 4; j++) put_string(out, head[j]), fputs(", ", out);
		fprintf(out, "{%u, %u, %u, %u, %u, %u, %d, %d, %d, 0}, %.6ef, %.6ef, %d, ", b->dtype, b->kv_dtype, b->mask,
		        b->features, b->d, b->dv, b->q, b->k, b->bh, (double)r->microseconds, (double)r->error_ratio, r->cases);
		const char *const tail[] = {r->digest, r->device, r->date};
		for (int j = 0; j < 3; j++) put_string(out, tail[j]), fputs(j < 2 ? ", " : "},\n", out);
	}
	if (!row_count) fputs("\t{0},\n", out);
	fputs("};\n\n", out);
}

/* ---- digests ---------------------------------------------------------------------------------------------------------- */

/* Removes comments and blanks in place, keeping strings and newlines of preprocessor lines apart by one space. */
static void strip(char *text) {
	char *to = text;
	for (char *c = text; *c;) {
		if (c[0] == '/' && c[1] == '*') {
			char *end = strstr(c + 2, "*/");
			c = end ? end + 2 : c + strlen(c);
		} else if (c[0] == '/' && c[1] == '/') c += strcspn(c, "\n");
		else if (*c == '"' || *c == '\'') {
			const char quote = *c;
			*to++ = *c++;
			while (*c && *c != quote) {
				if (*c == '\\' && c[1]) *to++ = *c++;
				*to++ = *c++;
			}
			if (*c) *to++ = *c++;
		} else if (strchr(" \t\r\n", *c)) {
			c += strspn(c, " \t\r\n");
			if (to > text && to[-1] != ' ') *to++ = ' ';
		} else *to++ = *c++;
	}
	*to = 0;
}

enum { FILES = 128 };
static char *seen[FILES];
static int seen_count;

static void digest_file(XXH3_state_t *state, const char *path) {
	for (int i = 0; i < seen_count; i++)
		if (!strcmp(seen[i], path)) return;
	if (seen_count == FILES) die("more headers than expected", path);
	char *text = read_file(path);
	if (!text) return; /* not in the kernels folder: the pipeline's interface, a system header */
	seen[seen_count++] = need(strdup(path));
	const char *slash = strrchr(path, '/');
	for (char *c = text; (c = strstr(c, "#include \"")); c++) {
		char *name = c + strlen("#include \""), *end = strchr(name, '"');
		if (!end) continue;
		int folder = (int)(slash - path);
		while (!strncmp(name, "../", 3)) {
			name += 3;
			while (folder && path[--folder] != '/') {
			}
		}
		char full[4096];
		snprintf(full, sizeof full, "%.*s/%.*s", folder, path, (int)(end - name), name);
		if (strstr(full, "/kernels/")) digest_file(state, full);
	}
	strip(text);
	XXH3_128bits_update(state, text, strlen(text));
	free(text);
}

static void put_digests(FILE *out, const char *kernels) {
	fputs("static const struct {\n\tconst char *name, *digest;\n} digests[] = {\n", out);
	int families;
	char **family = list(kernels, "", &families);
	for (int i = 0; i < families; i++) {
		int files;
		char **file = list(family[i], "", &files);
		for (int j = 0; j < files; j++) {
			const char *base = strrchr(file[j], '/') + 1, *dot = strrchr(base, '.');
			if (!dot || (strcmp(dot, ".c") && strcmp(dot, ".cu") && strcmp(dot, ".hip"))) continue;
			XXH3_state_t *state = need(XXH3_createState());
			XXH3_128bits_reset(state);
			seen_count = 0;
			digest_file(state, file[j]);
			const XXH128_hash_t h = XXH3_128bits_digest(state);
			fprintf(out, "\t{\"%.*s\", \"%016llx%016llx\"},\n", (int)(dot - base), base, (unsigned long long)h.high64,
			        (unsigned long long)h.low64);
			XXH3_freeState(state);
		}
	}
	fputs("\t{\"\", \"\"},\n};\n\n"
	      "const char *ingot__impl_digest(const char *name) {\n"
	      "\tfor (int i = 0; *digests[i].name; i++)\n"
	      "\t\tif (!strcmp(digests[i].name, name)) return digests[i].digest;\n"
	      "\treturn \"\";\n"
	      "}\n",
	      out);
}

int main(int argc, char **argv) {
	if (argc != 5 || strcmp(argv[3], "-o")) die("usage", "mktables TUNING_DIR KERNELS_DIR -o FILE.c");
	int count;
	char **file = list(argv[1], ".tsv", &count);
	for (int i = 0; i < count; i++) read_rows(file[i]);
	FILE *out = fopen(argv[4], "w");
	if (!out) die("cannot write", argv[4]);
	fputs(
		"/* Generated by tools/mktables.c from tuning/ and src/kernels/. */\n#include <string.h>\n#include \"pipeline.h\"\n\n",
		out);
	put_rows(out);
	put_digests(out, argv[2]);
	if (fclose(out)) die("cannot write", argv[4]);
	return 0;
}
