/*
 * Tensors to and from DLPack, through DLPack's own header: attention on DLTensors gives what it gives on the memory itself.
 */
#include "support_api.h"

#include <ingot_dlpack.h>
#include <string.h>

static const struct {
	int32_t dtype;
	uint8_t code, bits;
} types[] = {{INGOT_F32, kDLFloat, 32}, {INGOT_F16, kDLFloat, 16},  {INGOT_BF16, kDLBfloat, 16},
             {INGOT_I32, kDLInt, 32},   {INGOT_I64, kDLInt, 64},    {INGOT_U64, kDLUInt, 64},
             {INGOT_BOOL, 6, 8},        {INGOT_F8_E4M3, 10, 8},     {INGOT_F8_E4M3_FNUZ, 11, 8},
             {INGOT_F8_E5M2, 12, 8},    {INGOT_F8_E5M2_FNUZ, 13, 8}};

static void test_there_and_back(void **state) {
	static char memory[64];
	for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
		const ingot_tensor t = {memory, types[i].dtype, 5, {1, 2, 3, 4, 5}, {7, 60, 20, 5, 1}};
		const ingot_stream where = {.type = INGOT_CUDA, .device = 3, .handle = memory};
		DLTensor d = {0};
		assert_null(ingot_tensor_to_dlpack(&t, where, &d));
		assert_int_equal(d.device.device_type, kDLCUDA);
		assert_int_equal(d.device.device_id, 3);
		assert_int_equal(d.dtype.code, types[i].code);
		assert_int_equal(d.dtype.bits, types[i].bits);
		assert_int_equal(d.dtype.lanes, 1);
		d.byte_offset = 16;
		ingot_tensor back;
		ingot_stream found = {.handle = memory + 1};
		assert_null(ingot_tensor_from_dlpack(&d, &back, &found));
		assert_int_equal(found.type, INGOT_CUDA);
		assert_int_equal(found.device, 3);
		assert_ptr_equal(found.handle, memory + 1);
		assert_ptr_equal(back.data, memory + 16);
		back.data = memory;
		assert_memory_equal(&back, &t, sizeof t);
	}
}

static void test_compact_strides(void **state) {
	int64_t shape[] = {2, 3, 4};
	const DLTensor d = {.device = {kDLCPU, 9}, .ndim = 3, .dtype = {kDLFloat, 32, 1}, .shape = shape};
	ingot_tensor t;
	ingot_stream where = {.type = INGOT_CUDA, .device = 5};
	assert_null(ingot_tensor_from_dlpack(&d, &t, &where));
	assert_int_equal(where.type, INGOT_CPU);
	assert_int_equal(where.device, 0);
	assert_int_equal(t.stride[0], 12);
	assert_int_equal(t.stride[1], 4);
	assert_int_equal(t.stride[2], 1);
	assert_null(t.data);
}

/* What has no counterpart is named, and nothing is written. */
static void test_refused(void **state) {
	int64_t shape[] = {1, 1, 1, 1, 1, 1};
	const DLTensor good = {.device = {kDLCPU, 0}, .ndim = 4, .dtype = {kDLFloat, 32, 1}, .shape = shape};
	const struct {
		int device, ndim, code, bits, lanes;
		const char *word;
	} bad[] = {{kDLVulkan, 4, kDLFloat, 32, 1, "device_type"},
	           {kDLCPU, 0, kDLFloat, 32, 1, "ndim"},
	           {kDLCPU, 6, kDLFloat, 32, 1, "ndim"},
	           {kDLCPU, -1, kDLFloat, 32, 1, "ndim"},
	           {kDLCPU, 4, kDLFloat, 64, 1, "dtype"},
	           {kDLCPU, 4, kDLComplex, 64, 1, "dtype"},
	           {kDLCPU, 4, kDLUInt, 8, 1, "dtype"},
	           {kDLCPU, 4, kDLFloat, 32, 4, "lanes"}};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		DLTensor d = good;
		d.device.device_type = bad[i].device;
		d.ndim = bad[i].ndim;
		d.dtype = (DLDataType){(uint8_t)bad[i].code, (uint8_t)bad[i].bits, (uint16_t)bad[i].lanes};
		ingot_tensor t, before;
		ingot_stream where = {.device = 77};
		memset(&t, 0x5a, sizeof t);
		before = t;
		const char *why = ingot_tensor_from_dlpack(&d, &t, &where);
		assert_non_null(why);
		if (!strstr(why, bad[i].word)) fail_msg("no \"%s\" in: %s", bad[i].word, why);
		assert_memory_equal(&t, &before, sizeof t);
		assert_int_equal(where.device, 77);
	}
	const ingot_tensor absent = {0};
	DLTensor d = good;
	assert_non_null(ingot_tensor_to_dlpack(&absent, cpu, &d));
	assert_int_equal(d.ndim, 4);
}

static void test_attention(void **state) {
	enum { B = 2, H = 3, S = 5, D = 8, N = B * H * S * D };
	static float q[N], k[N], v[N], direct[N], through[N];
	for (int i = 0; i < N; i++) q[i] = (float)(i % 7) - 3, k[i] = (float)(i % 5) - 2, v[i] = (float)(i % 11);
	float *const memory[] = {q, k, v, through};
	ingot_tensor t[4];
	ingot_stream where;
	int64_t shape[] = {B, H, S, D}, strides[] = {S * H * D, D, H * D, 1}; /* [B, S, H, D] in memory */
	for (int i = 0; i < 4; i++) {
		const DLTensor d = {.data = memory[i],
		                    .device = {kDLCPU, 0},
		                    .ndim = 4,
		                    .dtype = {kDLFloat, 32, 1},
		                    .shape = shape,
		                    .strides = strides};
		where = (ingot_stream){0};
		assert_null(ingot_tensor_from_dlpack(&d, &t[i], &where));
	}
	const ingot_attn_fwd_params a = {.struct_size = sizeof a, .q = t[0], .k = t[1], .v = t[2], .out = t[3]};
	assert_ok(ingot_attn_fwd(&a, where, NULL));
	ingot_attn_fwd_params b = a;
	b.out.data = direct;
	const ingot_tensor own = {q, INGOT_F32, 4, {B, H, S, D}, {S * H * D, D, H * D, 1}};
	b.q = own;
	assert_ok(ingot_attn_fwd(&b, cpu, NULL));
	assert_memory_equal(direct, through, sizeof direct);
	assert_true(direct[N - 1] > 0);
}

int main(void) {
	const struct CMUnitTest tests[] = {cmocka_unit_test(test_there_and_back), cmocka_unit_test(test_compact_strides),
	                                   cmocka_unit_test(test_refused), cmocka_unit_test(test_attention)};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
