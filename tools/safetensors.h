/*
 * Files in the safetensors format: 8 bytes little-endian header length, a JSON header, the tensors' bytes. The reader
 * treats every byte as untrusted: it returns a sentence, never faults, whatever it is given.
 */
#ifndef INGOT_TOOL_SAFETENSORS_H
#define INGOT_TOOL_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cjson/cJSON.h>

#define SAFETENSORS_NDIM 8
#define SAFETENSORS_ERROR 256

typedef struct safetensors_entry {
	const char *name;  /* the header's, valid until release */
	const char *dtype; /* as written: "F32", "BF16", "I64" */
	int size;          /* bytes an element */
	int ndim;
	int64_t shape[SAFETENSORS_NDIM];
	int64_t elements;
	const void *data; /* not aligned to anything */
	uint64_t bytes;
} safetensors_entry;

typedef struct safetensors {
	int count;
	safetensors_entry *entries; /* in the header's order */
	cJSON *header;
	const cJSON *metadata; /* object of strings, or NULL */
	void *mapping;         /* of safetensors_open */
	size_t mapping_bytes;
	char error[SAFETENSORS_ERROR]; /* the sentence after a failure */
} safetensors;

/* Reads a file's bytes, which must outlive *out. On failure *out holds error alone and needs no release. */
bool safetensors_parse(const void *bytes, size_t size, safetensors *out);
/* Maps the file and reads it. */
bool safetensors_open(const char *path, safetensors *out);
void safetensors_release(safetensors *file);

/* NULL when there is none of that name. */
const safetensors_entry *safetensors_find(const safetensors *file, const char *name);
const char *safetensors_metadata(const safetensors *file, const char *key);

/* Writes a file whole or not at all: to a temporary name beside it, then renamed. metadata: object of strings or NULL. */
bool safetensors_write(const char *path, const safetensors_entry *entries, int count, const cJSON *metadata,
                       char *error);

#endif
