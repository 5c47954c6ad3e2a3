/* The safetensors reader and writer: what is read back, and that every fault of a file is named. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "safetensors.h"
#include "scratch.h"

/* A file of that header and that many bytes of data, each byte its own place. */
static unsigned char *make(const char *header, size_t data, size_t *size) {
	const size_t length = strlen(header);
	*size = 8 + length + data;
	unsigned char *bytes = malloc(*size);
	for (int i = 0; i < 8; i++) bytes[i] = (unsigned char)((uint64_t)length >> 8 * i);
	memcpy(bytes + 8, header, length);
	for (size_t i = 0; i < data; i++) bytes[8 + length + i] = (unsigned char)i;
	return bytes;
}

static void refuses(const char *header, size_t data, const char *named) {
	size_t size;
	unsigned char *bytes = make(header, data, &size);
	safetensors file;
	if (safetensors_parse(bytes, size, &file)) fail_msg("accepted: %s", header);
	if (!strstr(file.error, named)) fail_msg("%s: \"%s\" does not name \"%s\"", header, file.error, named);
	free(bytes);
}

static void test_reads(void **state) {
	size_t size;
	unsigned char *bytes = make("{\"__metadata__\":{\"mask\":\"causal\"},"
	                            "\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[4,16]},"
	                            "\"a\":{\"dtype\":\"I32\",\"shape\":[],\"data_offsets\":[0,4]},"
	                            "\"none\":{\"dtype\":\"F32\",\"shape\":[2,0,5],\"data_offsets\":[16,16]}}   ",
	                            16, &size);
	safetensors file;
	assert_true(safetensors_parse(bytes, size, &file));
	assert_int_equal(file.count, 3);
	const safetensors_entry *b = safetensors_find(&file, "b"), *a = safetensors_find(&file, "a");
	assert_non_null(a);
	assert_non_null(b);
	assert_int_equal(a->ndim, 0);
	assert_int_equal(a->elements, 1);
	assert_int_equal(b->shape[1], 3);
	assert_int_equal(*(const unsigned char *)b->data, 4);
	assert_int_equal(safetensors_find(&file, "none")->elements, 0);
	assert_null(safetensors_find(&file, "c"));
	assert_string_equal(safetensors_metadata(&file, "mask"), "causal");
	assert_null(safetensors_metadata(&file, "align"));
	safetensors_release(&file);
	free(bytes);
}

static void test_faults_are_named(void **state) {
	safetensors file;
	assert_false(safetensors_parse("abc", 3, &file));
	assert_non_null(strstr(file.error, "3 bytes"));
	assert_false(safetensors_parse("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10, &file));
	assert_non_null(strstr(file.error, "header length"));
	assert_false(safetensors_parse("\x09\0\0\0\0\0\0\0{}", 10, &file));
	assert_non_null(strstr(file.error, "only 2 bytes"));
	refuses("[]", 0, "begin with {");
	refuses("{\"a\":", 0, "no JSON object");
	refuses("{} {}", 0, "goes on after");
	refuses("{\"a\":3}", 0, "\"a\" is not an object");
	refuses("{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "no dtype");
	refuses("{\"a\":{\"dtype\":\"F4\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "F4");
	refuses("{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "no shape");
	refuses("{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}", 1, "axis 0");
	refuses("{\"a\":{\"dtype\":\"U8\",\"shape\":[1.5],\"data_offsets\":[0,1]}}", 1, "axis 0");
	refuses("{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1, "more than 8 axes");
	refuses("{\"a\":{\"dtype\":\"F64\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0, "more elements");
	refuses("{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,3]}}", 2, "outside");
	refuses("{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[2,0]}}", 2, "outside");
	refuses("{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,2]}}", 2, "needs 3");
	refuses("{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,1e400]}}", 2, "data_offsets");
	refuses("{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 3, "belong to no tensor");
	refuses("{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
	        "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}",
	        3, "overlap");
	refuses("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
	        "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
	        2, "twice");
	refuses("{\"__metadata__\":{\"scale\":1}}", 0, "not a string");
	refuses("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":1}}", 1, "\"x\"");
}

static void test_every_cut_is_refused(void **state) {
	size_t size;
	unsigned char *bytes = make("{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}", 16, &size);
	for (size_t cut = 0; cut < size; cut++) {
		/* A copy of its own size, so that the address sanitizer sees a read past its end. */
		unsigned char *part = malloc(cut ? cut : 1);
		memcpy(part, bytes, cut);
		safetensors file;
		assert_false(safetensors_parse(part, cut, &file));
		assert_true(file.error[0] != 0);
		free(part);
	}
	free(bytes);
}

static void test_writes_whole_or_not_at_all(void **state) {
	static const char path[] = "folder/file", missing[] = "folder/none/file";
	assert_int_equal(mkdir("folder", 0755), 0);
	const float values[4] = {1, 2, 3, 4};
	const safetensors_entry entries[] = {
		{.name = "layer \"0\".q", .dtype = "F32", .ndim = 2, .shape = {2, 2}, .data = values, .bytes = 16},
		{.name = "empty", .dtype = "BF16", .ndim = 1, .shape = {0}, .data = values, .bytes = 0},
	};
	char error[SAFETENSORS_ERROR] = "";
	assert_true(safetensors_write(path, entries, 2, NULL, error));
	safetensors file;
	assert_true(safetensors_open(path, &file));
	const safetensors_entry *e = safetensors_find(&file, "layer \"0\".q");
	assert_non_null(e);
	assert_memory_equal(e->data, values, 16);
	safetensors_release(&file);
	unlink(path);

	assert_false(safetensors_write(missing, entries, 2, NULL, error));
	assert_true(error[0] != 0);
	assert_false(safetensors_open(missing, &file));
	assert_true(file.error[0] != 0);
	assert_false(safetensors_open("folder", &file));
	assert_non_null(strstr(file.error, "regular file"));
	/* Nothing is left behind by the failure: the folder can be removed. */
	assert_int_equal(rmdir("folder"), 0);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_reads),
		cmocka_unit_test(test_faults_are_named),
		cmocka_unit_test(test_every_cut_is_refused),
		cmocka_unit_test(test_writes_whole_or_not_at_all),
	};
	return cmocka_run_group_tests(tests, scratch_begin, scratch_end);
}
