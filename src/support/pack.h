/*
 * A pack: one file with every code object of one GPU architecture. This is the only reader and the only writer.
 *
 *     page 0      ingot__pack_header
 *     page 1...   ingot__pack_entry [entries], sorted by implementation and variant
 *     then        the objects, each a zstd frame that starts on a page
 *
 * All numbers are little-endian. The header carries a digest of itself and of the index, an entry a digest of itself, of its
 * object and of the source it was built from: opening reads one page, a lookup the index, a load one object, and nothing is
 * used that was not verified. Files are read by pread, not mapped: a pack cut short under a running process is a status then,
 * where a mapping would be a signal. Same objects, same bytes: no time, no path, no order of building is in a pack.
 */
#ifndef INGOT_SUPPORT_PACK_H
#define INGOT_SUPPORT_PACK_H

#include <ingot.h>
#include <stdbool.h>

#define INGOT__PACK_MAGIC "INGOTPK\n"
#define INGOT__PACK_VERSION 1u
#define INGOT__PACK_PAGE 4096u
#define INGOT__PACK_KERNELS 4
#define INGOT__PACK_ENTRIES_MOST 4096u
#define INGOT__PACK_OBJECT_MOST ((uint64_t)256 << 20) /* bytes of one object, unpacked */

typedef struct ingot__pack_header {
	char magic[8];
	uint32_t version, entries;
	uint64_t file_size;
	uint8_t index_digest[16]; /* XXH3-128 of the entries */
	char arch[32];            /* "sm_90a" */
	char toolchain[128];      /* "nvcc 13.0.88" */
	uint8_t reserved[48];
	uint64_t digest; /* XXH3-64 of all before */
} ingot__pack_header;

typedef struct ingot__pack_kernel {
	char name[56]; /* "" past the last */
	uint32_t registers, shared_bytes, spill_bytes, arguments_size;
} ingot__pack_kernel;

typedef struct ingot__pack_entry {
	char implementation[56], variant[56];
	ingot__pack_kernel kernel[INGOT__PACK_KERNELS];
	uint64_t offset, stored, size; /* of the frame in the file; bytes there; bytes unpacked */
	uint8_t object_digest[16];     /* XXH3-128 of the unpacked object */
	uint8_t source_digest[16];     /* of the implementation's source, as in tuning rows */
	uint8_t reserved[48];
	uint64_t digest; /* XXH3-64 of all before */
} ingot__pack_entry;

_Static_assert(sizeof(ingot__pack_header) == 256 && sizeof(ingot__pack_entry) == 512,
               "the file's layout has no padding");

/* ---- reading ---------------------------------------------------------------------------------------------------------- */

typedef struct ingot__pack ingot__pack;

/* Opens and checks the first page. IMAGE with a sentence naming the file and what is wrong; *missing (optional) tells that
 * there is no such file. Takes no lock and never writes. Close with ingot__pack_close. */
ingot_status ingot__pack_open(const char *path, ingot__pack **pack, bool *missing);
void ingot__pack_close(ingot__pack *pack); /* NULL is fine */

const ingot__pack_header *ingot__pack_head(const ingot__pack *pack);
const char *ingot__pack_path(const ingot__pack *pack);

/* The checked index, read on first use; entries stay valid until close. IMAGE. Not for two threads at once. */
ingot_status ingot__pack_index(ingot__pack *pack, const ingot__pack_entry **entries, uint32_t *count);
/* One entry, NULL when the pack has none of that name. IMAGE. */
ingot_status ingot__pack_find(ingot__pack *pack, const char *implementation, const char *variant,
                              const ingot__pack_entry **entry);
/* Unpacks and verifies an object into memory from malloc, which becomes the caller's. IMAGE, OUT_OF_MEMORY. */
ingot_status ingot__pack_read(ingot__pack *pack, const ingot__pack_entry *entry, void **object);

/* ---- writing ---------------------------------------------------------------------------------------------------------- */

/* An object to be packed: of the entry, names, kernels, size and source_digest are read. */
typedef struct ingot__pack_item {
	ingot__pack_entry entry;
	const void *object;
} ingot__pack_item;

/* Writes a pack in a temporary file beside `path` and renames it there: readers see the old pack or the new one, whole.
 * Sorts items. Two items of one name are refused. INVALID, IMAGE (the file system's word), OUT_OF_MEMORY. */
ingot_status ingot__pack_write(const char *path, const char *arch, const char *toolchain, ingot__pack_item *items,
                               uint32_t count);

#endif
