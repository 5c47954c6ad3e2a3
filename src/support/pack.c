/* Reads and writes packs; see pack.h. Everything read from a file is taken for hostile until its digest and bounds agree. */
#include "pack.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>
#include <zstd.h>

#include "error.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "packs are read in place");

struct ingot__pack {
	int file;
	char *path;
	ingot__pack_header head;
	ingot__pack_entry *index; /* NULL until it is needed */
};

static uint64_t round_up(uint64_t x) {
	return (x + INGOT__PACK_PAGE - 1) / INGOT__PACK_PAGE * INGOT__PACK_PAGE;
}

static void digest128(const void *data, size_t size, uint8_t out[16]) {
	XXH128_canonical_t canonical;
	XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, size));
	memcpy(out, canonical.digest, 16);
}

/* Reads exactly size bytes. */
static bool read_at(int file, void *to, uint64_t size, uint64_t offset) {
	char *at = to;
	while (size) {
		const ssize_t n = pread(file, at, size < 1 << 30 ? (size_t)size : 1 << 30, (off_t)offset);
		if (n < 0 && errno == EINTR) continue;
		if (n <= 0) return false;
		at += n, offset += (uint64_t)n, size -= (uint64_t)n;
	}
	return true;
}

/* A name is text that ends within its room, of letters that need no quoting anywhere. */
static bool good_name(const char *name, size_t room, bool may_be_empty) {
	const char *end = memchr(name, 0, room);
	if (!end || (end == name && !may_be_empty)) return false;
	for (const char *c = name; c < end; c++)
		if (*c < ' ' || *c > '~') return false;
	return true;
}

/* ---- reading ------------------------------------------------------------------------------------------------------------ */

ingot_status ingot__pack_open(const char *path, ingot__pack **out, bool *missing) {
	*out = NULL;
	if (missing) *missing = false;
	/* O_NONBLOCK: a FIFO in the place of a pack must not hang the caller */
	const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (file < 0) {
		if (missing) *missing = errno == ENOENT || errno == ENOTDIR;
		return ingot__fail(INGOT_IMAGE, "pack %s cannot be opened: %s", path, strerror(errno));
	}
	struct stat st;
	const char *wrong = NULL;
	ingot__pack_header head;
	if (fstat(file, &st) || !S_ISREG(st.st_mode)) wrong = "it is no regular file";
	else if (st.st_size < (off_t)INGOT__PACK_PAGE) wrong = "it is shorter than its first page";
	else if (!read_at(file, &head, sizeof head, 0)) wrong = "its first page cannot be read";
	else if (memcmp(head.magic, INGOT__PACK_MAGIC, sizeof head.magic)) wrong = "it does not begin as a pack does";
	else if (head.digest != XXH3_64bits(&head, offsetof(ingot__pack_header, digest))) wrong = "its header is damaged";
	else if (head.version != INGOT__PACK_VERSION) wrong = "it is of another pack version";
	else if (head.entries > INGOT__PACK_ENTRIES_MOST) wrong = "its header names too many entries";
	else if (head.file_size != (uint64_t)st.st_size)
		wrong = "its length is not the one in its header: it was cut or added to";
	else if (head.file_size < INGOT__PACK_PAGE + (uint64_t)head.entries * sizeof(ingot__pack_entry))
		wrong = "its index is cut";
	else if (!good_name(head.arch, sizeof head.arch, false) || !good_name(head.toolchain, sizeof head.toolchain, true))
		wrong = "its header's names are no text";
	if (wrong) {
		close(file);
		return ingot__fail(INGOT_IMAGE, "pack %s: %s", path, wrong);
	}
	ingot__pack *p = malloc(sizeof *p);
	char *copy = strdup(path);
	if (!p || !copy) {
		free(p);
		free(copy);
		close(file);
		return ingot__fail(INGOT_OUT_OF_MEMORY, "no memory to open pack %s", path);
	}
	*p = (ingot__pack){file, copy, head, NULL};
	*out = p;
	return INGOT_OK;
}

void ingot__pack_close(ingot__pack *p) {
	if (!p) return;
	close(p->file);
	free(p->index);
	free(p->path);
	free(p);
}

const ingot__pack_header *ingot__pack_head(const ingot__pack *p) {
	return &p->head;
}

const char *ingot__pack_path(const ingot__pack *p) {
	return p->path;
}

static int compare_names(const char *a_implementation, const char *a_variant, const ingot__pack_entry *b) {
	const int c = strcmp(a_implementation, b->implementation);
	return c ? c : strcmp(a_variant, b->variant);
}

static const char *wrong_entry(const ingot__pack *p, const ingot__pack_entry *e) {
	if (e->digest != XXH3_64bits(e, offsetof(ingot__pack_entry, digest))) return "it is damaged";
	if (!good_name(e->implementation, sizeof e->implementation, false) ||
	    !good_name(e->variant, sizeof e->variant, false))
		return "its names are no text";
	for (int i = 0; i < INGOT__PACK_KERNELS; i++)
		if (!good_name(e->kernel[i].name, sizeof e->kernel[i].name, i > 0)) return "its kernels' names are no text";
	if (e->size == 0 || e->size > INGOT__PACK_OBJECT_MOST || e->stored == 0) return "its object is empty or too large";
	if (e->offset % INGOT__PACK_PAGE || e->offset > p->head.file_size || e->stored > p->head.file_size - e->offset)
		return "its object lies outside the file";
	return NULL;
}

ingot_status ingot__pack_index(ingot__pack *p, const ingot__pack_entry **entries, uint32_t *count) {
	*entries = p->index;
	*count = p->head.entries;
	if (p->index || p->head.entries == 0) return INGOT_OK;
	const uint64_t bytes = (uint64_t)p->head.entries * sizeof(ingot__pack_entry);
	ingot__pack_entry *index = malloc(bytes);
	if (!index) return ingot__fail(INGOT_OUT_OF_MEMORY, "no memory for the index of pack %s", p->path);
	uint8_t digest[16];
	ingot_status s = INGOT_OK;
	if (!read_at(p->file, index, bytes, INGOT__PACK_PAGE))
		s = ingot__fail(INGOT_IMAGE, "pack %s: its index cannot be read", p->path);
	else {
		digest128(index, bytes, digest);
		if (memcmp(digest, p->head.index_digest, sizeof digest))
			s = ingot__fail(INGOT_IMAGE, "pack %s: its index is damaged", p->path);
	}
	for (uint32_t i = 0; i < p->head.entries && !s; i++) {
		const char *wrong = wrong_entry(p, &index[i]);
		if (wrong) s = ingot__fail(INGOT_IMAGE, "pack %s, entry %u: %s", p->path, i, wrong);
		else if (i && compare_names(index[i].implementation, index[i].variant, &index[i - 1]) <= 0)
			s = ingot__fail(INGOT_IMAGE, "pack %s, entry %u: the index is not sorted", p->path, i);
	}
	if (s) {
		free(index);
		return s;
	}
	*entries = p->index = index;
	return INGOT_OK;
}

ingot_status ingot__pack_find(ingot__pack *p, const char *implementation, const char *variant,
                              const ingot__pack_entry **entry) {
	const ingot__pack_entry *index;
	uint32_t count, low = 0;
	*entry = NULL;
	ingot_status s = ingot__pack_index(p, &index, &count);
	if (s) return s;
	for (uint32_t high = count; low < high;) {
		const uint32_t middle = (low + high) / 2;
		const int c = compare_names(implementation, variant, &index[middle]);
		if (c == 0) {
			*entry = &index[middle];
			break;
		}
		if (c < 0) high = middle;
		else low = middle + 1;
	}
	return INGOT_OK;
}

ingot_status ingot__pack_read(ingot__pack *p, const ingot__pack_entry *e, void **object) {
	*object = NULL;
	void *stored = malloc(e->stored), *out = malloc(e->size);
	ingot_status s = INGOT_OK;
	if (!stored || !out)
		s = ingot__fail(INGOT_OUT_OF_MEMORY, "no memory for %s:%s of pack %s", e->implementation, e->variant, p->path);
	else if (!read_at(p->file, stored, e->stored, e->offset))
		s = ingot__fail(INGOT_IMAGE, "pack %s, %s:%s: its object cannot be read", p->path, e->implementation,
		                e->variant);
	else {
		const size_t n = ZSTD_decompress(out, e->size, stored, e->stored);
		uint8_t digest[16] = {0};
		if (!ZSTD_isError(n) && n == e->size) digest128(out, e->size, digest);
		if (ZSTD_isError(n) || n != e->size || memcmp(digest, e->object_digest, sizeof digest))
			s = ingot__fail(INGOT_IMAGE, "pack %s, %s:%s: its object is damaged", p->path, e->implementation,
			                e->variant);
	}
	free(stored);
	if (s) free(out);
	else *object = out;
	return s;
}

/* ---- writing ------------------------------------------------------------------------------------------------------------ */

static int compare_items(const void *a, const void *b) {
	const ingot__pack_item *const x = a, *const y = b;
	return compare_names(x->entry.implementation, x->entry.variant, &y->entry);
}

static bool write_at(int file, const void *from, uint64_t size, uint64_t offset) {
	const char *at = from;
	while (size) {
		const ssize_t n = pwrite(file, at, size < 1 << 30 ? (size_t)size : 1 << 30, (off_t)offset);
		if (n < 0 && errno == EINTR) continue;
		if (n <= 0) return false;
		at += n, offset += (uint64_t)n, size -= (uint64_t)n;
	}
	return true;
}

static ingot_status write_objects(int file, const char *path, ingot__pack_item *items, uint32_t count, uint64_t *end) {
	*end = round_up(INGOT__PACK_PAGE + (uint64_t)count * sizeof(ingot__pack_entry));
	for (uint32_t i = 0; i < count; i++) {
		ingot__pack_entry *const e = &items[i].entry;
		const size_t room = ZSTD_compressBound(e->size);
		void *frame = malloc(room);
		if (!frame) return ingot__fail(INGOT_OUT_OF_MEMORY, "no memory to pack %s:%s", e->implementation, e->variant);
		const size_t n = ZSTD_compress(frame, room, items[i].object, e->size, 12);
		const bool good = !ZSTD_isError(n) && write_at(file, frame, n, *end);
		free(frame);
		if (!good)
			return ingot__fail(INGOT_IMAGE, "pack %s: %s:%s cannot be written: %s", path, e->implementation, e->variant,
			                   strerror(errno));
		e->offset = *end;
		e->stored = n;
		memset(e->reserved, 0, sizeof e->reserved);
		digest128(items[i].object, e->size, e->object_digest);
		e->digest = XXH3_64bits(e, offsetof(ingot__pack_entry, digest));
		*end = round_up(*end + n);
	}
	return INGOT_OK;
}

static ingot_status write_pack(int file, const char *path, const char *arch, const char *toolchain,
                               ingot__pack_item *items, uint32_t count) {
	uint64_t end;
	ingot_status s = write_objects(file, path, items, count, &end);
	if (s) return s;
	const uint64_t bytes = (uint64_t)count * sizeof(ingot__pack_entry);
	ingot__pack_entry *index = calloc(count ? count : 1, sizeof *index);
	if (!index) return ingot__fail(INGOT_OUT_OF_MEMORY, "no memory for the index of pack %s", path);
	for (uint32_t i = 0; i < count; i++) index[i] = items[i].entry;
	ingot__pack_header head = {.version = INGOT__PACK_VERSION, .entries = count, .file_size = end};
	memcpy(head.magic, INGOT__PACK_MAGIC, sizeof head.magic);
	snprintf(head.arch, sizeof head.arch, "%s", arch);
	snprintf(head.toolchain, sizeof head.toolchain, "%s", toolchain);
	digest128(index, bytes, head.index_digest);
	head.digest = XXH3_64bits(&head, offsetof(ingot__pack_header, digest));
	const bool good = ftruncate(file, (off_t)end) == 0 && write_at(file, index, bytes, INGOT__PACK_PAGE) &&
	                  write_at(file, &head, sizeof head, 0) && fsync(file) == 0;
	free(index);
	return good ? INGOT_OK : ingot__fail(INGOT_IMAGE, "pack %s cannot be written: %s", path, strerror(errno));
}

ingot_status ingot__pack_write(const char *path, const char *arch, const char *toolchain, ingot__pack_item *items,
                               uint32_t count) {
	if (count > INGOT__PACK_ENTRIES_MOST)
		return ingot__fail(INGOT_INVALID, "pack %s: %u objects; a pack holds at most %u", path, count,
		                   INGOT__PACK_ENTRIES_MOST);
	if (count) qsort(items, count, sizeof *items, compare_items);
	for (uint32_t i = 0; i < count; i++) {
		const ingot__pack_entry *const e = &items[i].entry;
		if (e->size == 0 || e->size > INGOT__PACK_OBJECT_MOST)
			return ingot__fail(INGOT_INVALID, "pack %s: the object of %s:%s has %llu bytes", path, e->implementation,
			                   e->variant, (unsigned long long)e->size);
		if (i && !compare_items(&items[i - 1], &items[i]))
			return ingot__fail(INGOT_INVALID, "pack %s: two objects are called %s:%s", path, e->implementation,
			                   e->variant);
	}
	char *temporary = malloc(strlen(path) + 16);
	if (!temporary) return ingot__fail(INGOT_OUT_OF_MEMORY, "no memory to write pack %s", path);
	sprintf(temporary,
	        "%s.XX"
	        "XXXX",
	        path);
	const int file = mkstemp(temporary);
	if (file < 0) {
		free(temporary);
		return ingot__fail(INGOT_IMAGE, "pack %s cannot be written: %s", path, strerror(errno));
	}
	ingot_status s = write_pack(file, path, arch, toolchain, items, count);
	/* mkstemp's 0600 would surprise: the pack gets what open would have given it. */
	const mode_t mask = umask(0);
	umask(mask);
	if (!s && fchmod(file, 0666 & ~mask))
		s = ingot__fail(INGOT_IMAGE, "pack %s: its mode cannot be set: %s", path, strerror(errno));
	close(file);
	if (!s && rename(temporary, path))
		s = ingot__fail(INGOT_IMAGE, "pack %s cannot be put in place: %s", path, strerror(errno));
	if (s) unlink(temporary);
	free(temporary);
	return s;
}
