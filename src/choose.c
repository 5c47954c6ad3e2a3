/*
 * The choosing stage. Every implementation of the operator says whether it can run the problem; among those that can, a verified
 * one beats an unverified one, then a measured one beats an unmeasured one, then the faster one wins. Figures come from the
 * rows of tuning/ and of the user's own file, taken from the bucket nearest to the problem.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "pipeline.h"
#include "support/error.h"
#include "support/log.h"

static const char *const operator_names[INGOT__OPERATORS] = {"attn_fwd", "attn_bwd", "attn_merge", "kv_append",
                                                             "attn_dropout_mask"};

/* ---- the rows: built in, overlaid by INGOT_TUNING_PATH ------------------------------------------------------------- */

typedef struct table {
	const ingot__row *rows;
	int count;
} table;

static table rows_in_use;
static pthread_once_t rows_once = PTHREAD_ONCE_INIT;

static int compare_rows(const void *a, const void *b) {
	return ingot__row_compare(a, b);
}

/* Merges the file's rows over the built-in ones. The memory lives as long as the process. A bad line is reported and the
 * whole file left out: half of somebody's measurements would choose worse than none. */
static void overlay(const char *path) {
	FILE *f = fopen(path, "re");
	if (!f) {
		ingot__log(1, "INGOT_TUNING_PATH: %s cannot be opened; the built-in rows stand alone", path);
		return;
	}
	char *text = NULL;
	size_t length = 0, room = 0;
	for (size_t n = 1; n;) {
		if (room - length < 65536) {
			char *more = room < ((size_t)64 << 20) ? realloc(text, room = room ? room * 2 : 131072) : NULL;
			if (!more) {
				ingot__log(1, "INGOT_TUNING_PATH: %s is too large; the built-in rows stand alone", path);
				free(text);
				fclose(f);
				return;
			}
			text = more;
		}
		n = fread(text + length, 1, room - length - 1, f);
		length += n;
	}
	const bool unread = ferror(f) != 0;
	fclose(f);
	if (unread) {
		ingot__log(1, "INGOT_TUNING_PATH: %s cannot be read; the built-in rows stand alone", path);
		free(text);
		return;
	}
	text[length] = 0;
	int lines = 1;
	for (size_t i = 0; i < length; i++) lines += text[i] == '\n';
	ingot__row *merged = malloc(sizeof *merged * (size_t)(lines + ingot__row_count));
	int count = 0, number = 0;
	const char *why = merged ? NULL : "out of memory";
	for (char *line = text, *next; line && !why; line = next) {
		next = strchr(line, '\n');
		if (next) *next++ = 0;
		number++;
		if (*line && *line != '#' && ingot__row_parse(line, &merged[count], &why)) count++;
	}
	if (why) {
		ingot__log(1, "INGOT_TUNING_PATH: %s line %d: %s; the built-in rows stand alone", path, number, why);
		free(merged);
		free(text);
		return;
	}
	const int own = count;
	if (!own) {
		ingot__log(1, "INGOT_TUNING_PATH: %s has no rows; the built-in rows stand alone", path);
		free(merged);
		free(text);
		return;
	}
	qsort(merged, (size_t)own, sizeof *merged, compare_rows);
	for (int i = 0; i < ingot__row_count; i++)
		if (!bsearch(&ingot__rows[i], merged, (size_t)own, sizeof *merged, compare_rows))
			merged[count++] = ingot__rows[i];
	qsort(merged, (size_t)count, sizeof *merged, compare_rows);
	rows_in_use = (table){merged, count};
	ingot__log(3, "INGOT_TUNING_PATH: %d rows of %s", own, path);
}

static void read_rows(void) {
	rows_in_use = (table){ingot__rows, ingot__row_count};
	const char *path = getenv("INGOT_TUNING_PATH");
	if (path && *path) overlay(path);
}

static const table *rows(void) {
	pthread_once(&rows_once, read_rows);
	return &rows_in_use;
}

/* A run of rows, [first, last). */
typedef struct range {
	int first, last;
} range;

/* The first row that is not before, or is after, those of (op, arch); within these, likewise those of two types. */
static int name_bound(const table *t, const char *op, const char *arch, bool after) {
	int low = 0, high = t->count;
	while (low < high) {
		const int middle = (low + high) / 2;
		int c = strcmp(t->rows[middle].op, op);
		if (!c) c = strcmp(t->rows[middle].arch, arch);
		if (c < 0 || (after && c == 0)) low = middle + 1;
		else high = middle;
	}
	return low;
}

static int type_bound(const table *t, range of, const ingot__bucket *b, bool after) {
	while (of.first < of.last) {
		const int middle = (of.first + of.last) / 2;
		const ingot__bucket *const r = &t->rows[middle].bucket;
		int c = r->dtype - b->dtype;
		if (!c) c = r->kv_dtype - b->kv_dtype;
		if (c < 0 || (after && c == 0)) of.first = middle + 1;
		else of.last = middle;
	}
	return of.first;
}

static int distance(const ingot__bucket *a, const ingot__bucket *b) {
	const int head = a->d > b->d ? a->d - b->d : b->d - a->d, value = a->dv > b->dv ? a->dv - b->dv : b->dv - a->dv;
	const int q = abs(a->q - b->q), k = abs(a->k - b->k), bh = abs(a->bh - b->bh);
	/* one query row is another regime than many, whatever the logarithm says */
	const int regime = ((a->q <= 0) != (b->q <= 0)) * 12;
	return head / 8 + value / 8 + 4 * q + 3 * k + 2 * bh + regime + 8 * (a->mask != b->mask) +
	       16 * (a->features != b->features);
}

/* Of the rows of one operator and architecture, those of the bucket nearest to b. */
static range nearest(const table *t, range of, const ingot__bucket *b) {
	const int low = type_bound(t, of, b, false), high = type_bound(t, of, b, true);
	int best = -1, least = 0;
	for (int i = low; i < high; i++) {
		const int d = distance(&t->rows[i].bucket, b);
		if (best < 0 || d < least) best = i, least = d;
	}
	if (best < 0) return (range){0, 0};
	range found = {best, best};
	while (found.last < high && !memcmp(&t->rows[found.last].bucket, &t->rows[best].bucket, sizeof *b)) found.last++;
	return found;
}

/* ---- what is known, once per device ----------------------------------------------------------------------------------------- */

typedef struct evidence {
	int32_t cases;
	bool verified, stale, inherited, runs; /* runs: the device has the instructions */
} evidence;

enum { DEVICES = 32, IMPLS = 256, NAMES = 8 };

/* All that names are compared for, so that a call compares none. */
typedef struct knowledge {
	_Atomic(const ingot__device *) device;
	evidence of[IMPLS]; /* indexed like ingot__impls */
	int count[INGOT__OPERATORS],
		impl[INGOT__OPERATORS][INGOT__CANDIDATES]; /* indices of the device's implementations */
	range rows[INGOT__OPERATORS][NAMES];           /* of the device's model, its architecture, and that one's parents */
} knowledge;

static knowledge known[DEVICES];
static pthread_mutex_t known_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t known_once = PTHREAD_ONCE_INIT;

/* In a child whose parent forked while another thread was gathering. What that had not published is gathered again. */
static void free_known_lock(void) {
	(void)pthread_mutex_init(&known_lock, NULL);
}

static void handle_fork(void) {
	(void)pthread_atfork(NULL, NULL, free_known_lock);
}

static bool row_is_stale(const ingot__row *r) {
	const char *now = ingot__impl_digest(r->implementation);
	return *now && strcmp(now, r->digest);
}

/* of: the rows of the implementation's operator, as in knowledge. */
static evidence gather(const ingot__impl *impl, const ingot__device *device, const range *of) {
	enum { MODEL, ARCHITECTURE };
	evidence e = {.runs = ingot__device_runs(device, impl->arch)};
	const table *const t = rows();
	for (int n = MODEL; n < NAMES; n++) {
		for (const ingot__row *r = t->rows + of[n].first; r < t->rows + of[n].last; r++) {
			if (strcmp(r->implementation, impl->name)) continue;
			if (row_is_stale(r)) e.stale = true;
			else if (r->cases > e.cases) e.cases = r->cases;
		}
		if (n >= ARCHITECTURE && e.cases) {
			e.verified = n == ARCHITECTURE;
			e.inherited = n > ARCHITECTURE;
			e.stale = false;
			break;
		}
	}
	if (impl->verified_by_definition) e.verified = true;
	return e;
}

static void learn(knowledge *k, const ingot__device *device) {
	const table *const t = rows();
	for (int op = 0; op < INGOT__OPERATORS; op++) {
		const char *name = device->model, *next = device->arch;
		for (int n = 0; n < NAMES && (*name || *next); n++) {
			k->rows[op][n] =
				(range){name_bound(t, operator_names[op], name, false), name_bound(t, operator_names[op], name, true)};
			name = next;
			next = ingot__arch_parent(next);
		}
	}
	for (int i = 0; i < ingot__impl_count && i < IMPLS; i++) {
		const ingot__impl *const impl = ingot__impls[i];
		k->of[i] = gather(impl, device, k->rows[impl->op]);
		if (impl->device == device->type && k->count[impl->op] < INGOT__CANDIDATES)
			k->impl[impl->op][k->count[impl->op]++] = i;
	}
}

static const knowledge *knowledge_of(const ingot__device *device) {
	for (int i = 0; i < DEVICES; i++) {
		const ingot__device *d = atomic_load_explicit(&known[i].device, memory_order_acquire);
		if (d == device) return &known[i];
		if (!d) break;
	}
	const knowledge *found = NULL;
	pthread_once(&known_once, handle_fork);
	pthread_mutex_lock(&known_lock);
	for (int i = 0; i < DEVICES && !found; i++) {
		const ingot__device *d = atomic_load(&known[i].device);
		if (!d) {
			learn(&known[i], device);
			atomic_store_explicit(&known[i].device, device, memory_order_release);
		}
		if (!d || d == device) found = &known[i];
	}
	pthread_mutex_unlock(&known_lock);
	return found;
}

/* ---- the choice ---------------------------------------------------------------------------------------------------------- */

/* backend is "", "family", "name", "family/name", each name with an optional ":variant". */
typedef struct forced {
	char family[48], name[64], variant[48];
	bool one_variant;
} forced;

static bool split(const char *backend, forced *f) {
	memset(f, 0, sizeof *f);
	const char *slash = strchr(backend, '/'), *name = slash ? slash + 1 : backend, *colon = strchr(name, ':');
	const size_t family = slash ? (size_t)(slash - backend) : 0, length = colon ? (size_t)(colon - name) : strlen(name);
	if (family >= sizeof f->family || length >= sizeof f->name || (colon && strlen(colon + 1) >= sizeof f->variant))
		return false;
	memcpy(f->family, backend, family);
	memcpy(f->name, name, length);
	f->one_variant = colon;
	if (colon) strcpy(f->variant, colon + 1);
	return true;
}

static bool has_variant(const ingot__impl *impl, const char *name) {
	for (int v = 0; v < impl->variant_count; v++)
		if (!strcmp(ingot__variant_name(impl, v), name)) return true;
	return false;
}

/* Whether impl is meant by a forced name; `exactly`: by its own name, not its family's. */
static bool meant(const ingot__impl *impl, const forced *f, bool *exactly) {
	*exactly = !strcmp(f->name, impl->name) && (!*f->family || !strcmp(f->family, impl->family));
	return *exactly || (!*f->family && !strcmp(f->name, impl->family));
}

static bool better(const ingot__candidate *a, const ingot__candidate *b) {
	if (a->verified != b->verified) return a->verified;
	if (!a->row != !b->row) return a->row != NULL;
	if (a->row && a->row->microseconds != b->row->microseconds) return a->row->microseconds < b->row->microseconds;
	return a->impl->rank > b->impl->rank;
}

/* The rows of buckets that this thread met last: going through all of them takes longer than the rest of a call's host time. */
typedef struct met {
	const knowledge *k;
	ingot__bucket bucket;
	range rows;
} met;

enum { MET_BITS = 4 };
static _Thread_local met met_last[INGOT__OPERATORS][1 << MET_BITS];

static range rows_of_bucket(const table *t, const knowledge *k, int op, const ingot__bucket *bucket) {
	uint64_t words[2] = {0};
	_Static_assert(sizeof *bucket <= sizeof words, "a bucket is hashed whole");
	memcpy(words, bucket, sizeof *bucket);
	met *const m = &met_last[op][((words[0] ^ words[1] * 31) * UINT64_C(0x9e3779b97f4a7c15)) >> (64 - MET_BITS)];
	if (m->k == k && !memcmp(&m->bucket, bucket, sizeof *bucket)) return m->rows;
	range found = {0, 0};
	for (int n = 0; n < NAMES && found.first == found.last; n++)
		if (k->rows[op][n].first < k->rows[op][n].last) found = nearest(t, k->rows[op][n], bucket);
	*m = (met){k, *bucket, found};
	return found;
}

static void add_figures(const ingot__problem *problem, const knowledge *k, ingot__choice *choice) {
	const table *t = rows();
	ingot__bucket bucket;
	ingot__bucket_of(problem, &bucket);
	const range found = rows_of_bucket(t, k, problem->op, &bucket);
	for (int i = found.first; i < found.last; i++)
		for (int c = 0; c < choice->candidates; c++) {
			ingot__candidate *x = &choice->candidate[c];
			if (x->refusal || strcmp(x->impl->name, t->rows[i].implementation)) continue;
			if (!x->row || t->rows[i].microseconds < x->row->microseconds) x->row = &t->rows[i];
		}
}

static const char no_image[] = "no pack holds its image for this device";

/* The names that could have been meant: those of the implementations whose instructions the device has. */
static ingot_status not_found(const char *backend, const knowledge *k, int op) {
	char names[512] = "";
	size_t length = 0;
	for (int n = 0; n < k->count[op]; n++) {
		const ingot__impl *const impl = ingot__impls[k->impl[op][n]];
		if (!k->of[k->impl[op][n]].runs) continue;
		const int more =
			snprintf(names + length, sizeof names - length, "%s%s/%s", length ? ", " : "", impl->family, impl->name);
		if (more < 0 || (size_t)more >= sizeof names - length) {
			names[length] = 0; /* whole names only */
			break;
		}
		length += (size_t)more;
	}
	return ingot__fail(
		INGOT_NOT_FOUND,
		"options.backend is \"%.80s\"; allowed for %s on this device are the names, families and variants of %s",
		backend, operator_names[op], length ? names : "none");
}

ingot_status ingot__choose(const ingot__problem *problem, const ingot__device *device, const ingot_options *options,
                           ingot__choice *choice) {
	const char *backend = options->backend ? options->backend : "";
	forced f;
	choice->impl = NULL;
	choice->variant = 0;
	choice->because = "";
	choice->verified = false;
	choice->candidates = 0;
	const bool force = *backend;
	if (force && !split(backend, &f))
		return ingot__fail(INGOT_NOT_FOUND,
		                   "options.backend is longer than any name; `ingot list` shows what there is");
	const knowledge *const k = knowledge_of(device);
	if (!k) return ingot__fail(INGOT_UNSUPPORTED, "this process has used more than %d devices", DEVICES);
	bool named = false;
	int able = 0;
	for (int n = 0; n < k->count[problem->op]; n++) {
		const int i = k->impl[problem->op][n];
		const ingot__impl *impl = ingot__impls[i];
		bool exactly = false;
		if (force && !meant(impl, &f, &exactly)) continue;
		if (!exactly && impl->rank < 0) continue;
		if (force && f.one_variant && !has_variant(impl, f.variant)) continue;
		named = true;
		ingot__candidate *c = &choice->candidate[choice->candidates++];
		*c = (ingot__candidate){.impl = impl, .index = i};
		const evidence *const e = &k->of[i];
		c->cases = e->cases;
		c->verified = e->verified;
		c->stale = e->stale;
		c->inherited = e->inherited;
		if (!e->runs) c->refusal = "this device lacks the instructions it is built for";
		else c->refusal = impl->refuse(problem, device, &c->variant);
		if (!c->refusal && force && *f.variant && strcmp(f.variant, ingot__variant_name(impl, c->variant)))
			c->refusal = "the forced variant is not the one that runs this problem";
		if (!c->refusal && !exactly && !(options->flags & INGOT_STRICT) &&
		    !ingot__image_present(i, c->variant, device, options))
			c->refusal = no_image;
		if (!c->refusal) able++;
	}
	if (force && !named) return not_found(backend, k, problem->op);
	if (able > 1 || (options->flags & INGOT_STRICT) || ingot__log_wants(3)) add_figures(problem, k, choice);
	const ingot__candidate *best = NULL;
	for (int c = 0; c < choice->candidates; c++) {
		const ingot__candidate *x = &choice->candidate[c];
		if (!x->refusal && (!best || better(x, best))) best = x;
	}
	if (!best) {
		if (!choice->candidates)
			return ingot__fail(INGOT_UNSUPPORTED, "no implementation of %s is built for this device",
			                   operator_names[problem->op]);
		/* Without a pack only that one thing is wrong; what another kernel is not made for would lead astray. */
		const ingot__candidate *near = NULL;
		for (int c = 0; c < choice->candidates; c++) {
			const ingot__candidate *const x = &choice->candidate[c];
			if (x->refusal == no_image && (!near || x->impl->rank > near->impl->rank)) near = x;
		}
		if (near) return ingot__image_missing(near->index, near->variant, device, options);
		const ingot__candidate *const last = &choice->candidate[choice->candidates - 1];
		if (force && choice->candidates == 1)
			return ingot__fail(INGOT_UNSUPPORTED, "the forced \"%.80s\" cannot run this call: %s", backend,
			                   last->refusal);
		return ingot__fail(INGOT_UNSUPPORTED, "none of the %d candidates%s%.80s%s can run this call; the last, %s: %s",
		                   choice->candidates, force ? " of the forced \"" : "", backend, force ? "\"" : "",
		                   last->impl->name, last->refusal);
	}
	choice->impl = best->impl;
	choice->index = best->index;
	choice->variant = best->variant;
	choice->verified = best->verified;
	choice->because = force       ? "forced"
	                  : able == 1 ? "the only one that can run it"
	                  : best->row
	                      ? best->verified ? "measured fastest" : "measured fastest, not verified on this device"
	                  : best->verified ? "verified, not measured"
	                                   : "by rank, not verified";
	if ((options->flags & INGOT_STRICT) && !best->verified)
		return ingot__fail(INGOT_DEGRADED, "strict: the best candidate %s/%s is not verified on %s", best->impl->family,
		                   best->impl->name, device->arch);
	return INGOT_OK;
}

uint64_t ingot__table_digest(void) {
	const table *t = rows();
	XXH3_state_t *const state = XXH3_createState();
	if (!state) return 0;
	XXH3_64bits_reset(state);
	for (int i = 0; i < t->count; i++) {
		const ingot__row *r = &t->rows[i];
		const char *const text[] = {r->op, r->arch, r->implementation, r->variant, r->digest};
		for (int j = 0; j < 5; j++) XXH3_64bits_update(state, text[j], strlen(text[j]) + 1);
		XXH3_64bits_update(state, &r->bucket, sizeof r->bucket);
		XXH3_64bits_update(state, &r->microseconds, sizeof r->microseconds);
		XXH3_64bits_update(state, &r->cases, sizeof r->cases);
	}
	for (int i = 0; i < ingot__impl_count; i++) {
		const char *const text[] = {ingot__impls[i]->name, ingot__impl_digest(ingot__impls[i]->name)};
		for (int j = 0; j < 2; j++) XXH3_64bits_update(state, text[j], strlen(text[j]) + 1);
	}
	const uint64_t digest = XXH3_64bits_digest(state);
	XXH3_freeState(state);
	return digest;
}
