/*
 * The safetensors reader and writer. What the format asks for is checked before anything is believed: lengths against the
 * file's size, offsets against the data, shapes against both with no product that can overflow, no overlap, no hole.
 */
#include "safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* The format's own limit; it also keeps a hostile header from costing gigabytes. */
#define HEADER_LIMIT 100000000u

static const struct {
	const char *name;
	int size;
} dtypes[] = {
	{"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"I64", 8},  {"I32", 4},
	{"I16", 2}, {"I8", 1},  {"U64", 8}, {"U32", 4},  {"U16", 2},     {"U8", 1},      {"BOOL", 1},
};

static int dtype_size(const char *name) {
	for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
		if (strcmp(dtypes[i].name, name) == 0) return dtypes[i].size;
	return 0;
}

__attribute__((format(printf, 2, 3))) static bool fail(safetensors *out, const char *format, ...) {
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(out->error, sizeof out->error, format, arguments);
	va_end(arguments);
	return false;
}

/* An integer in [0, 2^53]: JSON numbers are doubles here, and above that they are no longer one integer each. */
static bool read_integer(const cJSON *item, uint64_t *value) {
	if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0) || item->valuedouble > 0x1p53 ||
	    item->valuedouble != floor(item->valuedouble))
		return false;
	*value = (uint64_t)item->valuedouble;
	return true;
}

static bool read_entry(const cJSON *item, const unsigned char *data, uint64_t data_bytes, safetensors_entry *e,
                       safetensors *out) {
	if (!cJSON_IsObject(item)) return fail(out, "tensor \"%.80s\" is not an object", e->name);
	const cJSON *dtype = NULL, *shape = NULL, *offsets = NULL;
	for (const cJSON *field = item->child; field; field = field->next) {
		const cJSON **slot = strcmp(field->string, "dtype") == 0          ? &dtype
		                     : strcmp(field->string, "shape") == 0        ? &shape
		                     : strcmp(field->string, "data_offsets") == 0 ? &offsets
		                                                                  : NULL;
		if (!slot) return fail(out, "tensor \"%.80s\" has an unknown field \"%.40s\"", e->name, field->string);
		if (*slot) return fail(out, "tensor \"%.80s\" has the field \"%.40s\" twice", e->name, field->string);
		*slot = field;
	}
	if (!cJSON_IsString(dtype)) return fail(out, "tensor \"%.80s\" has no dtype", e->name);
	e->dtype = dtype->valuestring;
	e->size = dtype_size(e->dtype);
	if (!e->size)
		return fail(out, "tensor \"%.80s\" has the dtype \"%.40s\", which this reader does not know", e->name,
		            e->dtype);
	if (!cJSON_IsArray(shape)) return fail(out, "tensor \"%.80s\" has no shape", e->name);
	e->elements = 1;
	bool empty = false;
	for (const cJSON *extent = shape->child; extent; extent = extent->next) {
		uint64_t n;
		if (e->ndim == SAFETENSORS_NDIM)
			return fail(out, "tensor \"%.80s\" has more than %d axes", e->name, SAFETENSORS_NDIM);
		if (!read_integer(extent, &n))
			return fail(out, "shape of tensor \"%.80s\", axis %d, is no integer from 0 to 2^53", e->name, e->ndim);
		e->shape[e->ndim++] = (int64_t)n;
		empty |= n == 0;
		if (n && e->elements > INT64_MAX / 8 / (int64_t)n)
			return fail(out, "shape of tensor \"%.80s\" has more elements than can be addressed", e->name);
		e->elements *= n ? (int64_t)n : 1;
	}
	if (empty) e->elements = 0;
	uint64_t begin, end;
	if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 || !read_integer(offsets->child, &begin) ||
	    !read_integer(offsets->child->next, &end))
		return fail(out, "data_offsets of tensor \"%.80s\" are not two integers from 0 to 2^53", e->name);
	if (begin > end || end > data_bytes)
		return fail(out,
		            "data_offsets of tensor \"%.80s\" are [%" PRIu64 ", %" PRIu64 "], outside the file's %" PRIu64
		            " bytes of data",
		            e->name, begin, end, data_bytes);
	if (end - begin != (uint64_t)e->elements * (uint64_t)e->size)
		return fail(out, "tensor \"%.80s\" has %" PRIu64 " bytes, but its shape needs %" PRIu64, e->name, end - begin,
		            (uint64_t)e->elements * (uint64_t)e->size);
	e->data = data + begin;
	e->bytes = end - begin;
	return true;
}

static int by_place(const void *a, const void *b) {
	const safetensors_entry *x = *(const safetensors_entry *const *)a, *y = *(const safetensors_entry *const *)b;
	const unsigned char *p = x->data, *q = y->data;
	return p != q ? (p < q ? -1 : 1) : x->bytes != y->bytes ? (x->bytes < y->bytes ? -1 : 1) : 0;
}

static int by_name(const void *a, const void *b) {
	return strcmp((*(const safetensors_entry *const *)a)->name, (*(const safetensors_entry *const *)b)->name);
}

/* No name twice; the tensors lie one after the other and fill the data. */
static bool check_layout(const unsigned char *data, uint64_t data_bytes, safetensors *out) {
	if (out->count == 0)
		return data_bytes == 0 || fail(out, "the file has %" PRIu64 " bytes of data but no tensor", data_bytes);
	const safetensors_entry **order = calloc((size_t)out->count, sizeof *order);
	if (!order) return fail(out, "out of memory for %d tensors", out->count);
	for (int i = 0; i < out->count; i++) order[i] = &out->entries[i];
	bool good = true;
	qsort(order, (size_t)out->count, sizeof *order, by_name);
	for (int i = 1; good && i < out->count; i++)
		if (strcmp(order[i - 1]->name, order[i]->name) == 0)
			good = fail(out, "tensor \"%.80s\" is there twice", order[i]->name);
	qsort(order, (size_t)out->count, sizeof *order, by_place);
	const unsigned char *at = data;
	for (int i = 0; good && i < out->count; i++) {
		if ((const unsigned char *)order[i]->data != at)
			good = fail(
				out,
				"tensor \"%.80s\" begins at byte %td of the data instead of %td: the tensors overlap or leave a hole",
				order[i]->name, (const unsigned char *)order[i]->data - data, at - data);
		at = (const unsigned char *)order[i]->data + order[i]->bytes;
	}
	if (good && (uint64_t)(at - data) != data_bytes)
		good = fail(out, "%" PRIu64 " bytes at the file's end belong to no tensor", data_bytes - (uint64_t)(at - data));
	free(order);
	return good;
}

static bool parse(const unsigned char *bytes, size_t size, safetensors *out) {
	if (size < 8)
		return fail(out, "the file has %zu bytes; a safetensors file begins with 8 bytes of header length", size);
	uint64_t header_bytes = 0;
	for (int i = 7; i >= 0; i--) header_bytes = header_bytes << 8 | bytes[i];
	if (header_bytes > HEADER_LIMIT)
		return fail(out, "the header length is %" PRIu64 ", more than the format's limit of %u", header_bytes,
		            HEADER_LIMIT);
	if (header_bytes > size - 8)
		return fail(out, "the header length is %" PRIu64 ", but only %zu bytes follow", header_bytes, size - 8);
	if (header_bytes == 0 || bytes[8] != '{') return fail(out, "the header does not begin with {");
	if (memchr(bytes + 8, 0, header_bytes)) return fail(out, "the header holds a zero byte");
	const char *end = NULL;
	out->header = cJSON_ParseWithLengthOpts((const char *)bytes + 8, header_bytes, &end, 0);
	if (!out->header || !cJSON_IsObject(out->header))
		return fail(out, "the header is no JSON object (near byte %td)",
		            end ? end - (const char *)bytes : (ptrdiff_t)8);
	for (; end < (const char *)bytes + 8 + header_bytes; end++)
		if (*end != ' ' && *end != '\n' && *end != '\t' && *end != '\r')
			return fail(out, "the header goes on after its JSON object (byte %td)", end - (const char *)bytes);
	const unsigned char *data = bytes + 8 + header_bytes;
	const uint64_t data_bytes = size - 8 - header_bytes;
	int most = 0;
	for (const cJSON *item = out->header->child; item; item = item->next) most++;
	out->entries = calloc((size_t)most + 1, sizeof *out->entries);
	if (!out->entries) return fail(out, "out of memory for %d tensors", most);
	for (const cJSON *item = out->header->child; item; item = item->next) {
		if (strcmp(item->string, "__metadata__") == 0) {
			if (out->metadata) return fail(out, "__metadata__ is there twice");
			if (!cJSON_IsObject(item)) return fail(out, "__metadata__ is not an object");
			for (const cJSON *field = item->child; field; field = field->next)
				if (!cJSON_IsString(field)) return fail(out, "__metadata__ \"%.80s\" is not a string", field->string);
			out->metadata = item;
			continue;
		}
		safetensors_entry *e = &out->entries[out->count];
		e->name = item->string;
		if (!read_entry(item, data, data_bytes, e, out)) return false;
		out->count++;
	}
	return check_layout(data, data_bytes, out);
}

bool safetensors_parse(const void *bytes, size_t size, safetensors *out) {
	*out = (safetensors){0};
	if (parse(bytes, size, out)) return true;
	/* The sentence may quote names of the header: it is complete before the header goes. */
	cJSON_Delete(out->header);
	free(out->entries);
	out->header = NULL;
	out->entries = NULL;
	out->metadata = NULL;
	out->count = 0;
	return false;
}

bool safetensors_open(const char *path, safetensors *out) {
	*out = (safetensors){0};
	/* O_NONBLOCK: opening a FIFO must fail below, not wait for a writer. */
	const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (file < 0) return fail(out, "%s", strerror(errno));
	struct stat about;
	if (fstat(file, &about) != 0 || !S_ISREG(about.st_mode)) {
		close(file);
		return fail(out, "not a regular file");
	}
	const size_t size = (size_t)about.st_size;
	void *mapping = size ? mmap(NULL, size, PROT_READ, MAP_PRIVATE, file, 0) : NULL;
	const int reason = errno;
	close(file);
	if (mapping == MAP_FAILED) return fail(out, "cannot be mapped: %s", strerror(reason));
	if (!safetensors_parse(mapping, size, out)) {
		if (mapping) munmap(mapping, size);
		return false;
	}
	out->mapping = mapping;
	out->mapping_bytes = size;
	return true;
}

void safetensors_release(safetensors *file) {
	cJSON_Delete(file->header);
	free(file->entries);
	if (file->mapping) munmap(file->mapping, file->mapping_bytes);
	*file = (safetensors){0};
}

const safetensors_entry *safetensors_find(const safetensors *file, const char *name) {
	for (int i = 0; i < file->count; i++)
		if (strcmp(file->entries[i].name, name) == 0) return &file->entries[i];
	return NULL;
}

const char *safetensors_metadata(const safetensors *file, const char *key) {
	const cJSON *item = file->metadata ? cJSON_GetObjectItemCaseSensitive(file->metadata, key) : NULL;
	return item ? item->valuestring : NULL;
}

static bool write_all(int file, const void *bytes, size_t size) {
	const char *at = bytes;
	while (size) {
		const ssize_t n = write(file, at, size);
		if (n < 0 && errno == EINTR) continue;
		if (n <= 0) return false;
		at += n;
		size -= (size_t)n;
	}
	return true;
}

static char *header_text(const safetensors_entry *entries, int count, const cJSON *metadata) {
	cJSON *header = cJSON_CreateObject();
	if (metadata) cJSON_AddItemToObject(header, "__metadata__", cJSON_Duplicate(metadata, 1));
	double offset = 0;
	for (int i = 0; i < count; i++) {
		const safetensors_entry *e = &entries[i];
		cJSON *item = cJSON_AddObjectToObject(header, e->name);
		cJSON_AddStringToObject(item, "dtype", e->dtype);
		cJSON *shape = cJSON_AddArrayToObject(item, "shape");
		for (int axis = 0; axis < e->ndim; axis++)
			cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)e->shape[axis]));
		cJSON *offsets = cJSON_AddArrayToObject(item, "data_offsets");
		cJSON_AddItemToArray(offsets, cJSON_CreateNumber(offset));
		offset += (double)e->bytes;
		cJSON_AddItemToArray(offsets, cJSON_CreateNumber(offset));
	}
	char *text = cJSON_PrintUnformatted(header);
	cJSON_Delete(header);
	return text;
}

bool safetensors_write(const char *path, const safetensors_entry *entries, int count, const cJSON *metadata,
                       char *error) {
	char *text = header_text(entries, count, metadata);
	const size_t length = text ? strlen(text) : 0, padded = (length + 63) / 64 * 64 + 56; /* data at a multiple of 64 */
	char *header = calloc(1, 8 + padded), *temporary = malloc(strlen(path) + 16);
	bool good = text && header && temporary;
	int file = -1;
	if (good) {
		for (int i = 0; i < 8; i++) header[i] = (char)(padded >> 8 * i);
		memcpy(header + 8, text, length);
		memset(header + 8 + length, ' ', padded - length);
		sprintf(temporary, "%s.XXXXXX", path);
		file = mkstemp(temporary);
		good = file >= 0 && write_all(file, header, 8 + padded);
		for (int i = 0; good && i < count; i++) good = write_all(file, entries[i].data, entries[i].bytes);
		/* mkstemp's 0600 would surprise: the file gets what open would have given it. */
		const mode_t mask = umask(0);
		umask(mask);
		good = good && fchmod(file, 0666 & ~mask) == 0 && fsync(file) == 0;
	}
	int reason = errno;
	if (file >= 0 && close(file) != 0 && good) {
		reason = errno;
		good = false;
	}
	if (good && rename(temporary, path) != 0) {
		reason = errno;
		good = false;
	}
	if (!good) {
		snprintf(error, SAFETENSORS_ERROR, "cannot be written: %s", strerror(reason));
		if (file >= 0) unlink(temporary);
	}
	free(text);
	free(header);
	free(temporary);
	return good;
}
