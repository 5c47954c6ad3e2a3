/*
 * Between ingot_tensor and DLPack's DLTensor, for callers whose tensors come from a framework. Header only; nothing is copied
 * but the description: memory and its lifetime stay with whoever owns it, and whoever hands over a DLManagedTensor still has to
 * have its deleter called, after the calls that use the tensor have ended (on a GPU: on its stream).
 *
 * DLPack's own header is needed: <dlpack/dlpack.h>, any version from 0.6, included before this file or found by it. Types that an
 * older one does not name are known here by the numbers that DLPack gave them later.
 */
#ifndef INGOT_DLPACK_H
#define INGOT_DLPACK_H

#include <dlpack/dlpack.h>
#include <ingot.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(ingot_dtype, DLPack's code, bits): every type there is here. The codes are kDLInt, kDLUInt, kDLFloat, kDLBfloat, kDLBool and
 * the kDLFloat8_* of DLPack 1.1. */
#define INGOT_DLPACK_TYPES(X)    \
	X(INGOT_F32, 2, 32)          \
	X(INGOT_F16, 2, 16)          \
	X(INGOT_BF16, 4, 16)         \
	X(INGOT_F8_E4M3, 10, 8)      \
	X(INGOT_F8_E4M3_FNUZ, 11, 8) \
	X(INGOT_F8_E5M2, 12, 8)      \
	X(INGOT_F8_E5M2_FNUZ, 13, 8) \
	X(INGOT_I32, 0, 32)          \
	X(INGOT_I64, 0, 64)          \
	X(INGOT_U64, 1, 64)          \
	X(INGOT_BOOL, 6, 8)

/* Fills *to with the tensor that from describes, and, unless stream is NULL, stream->type and stream->device with where it is;
 * stream->handle is not touched. from->strides NULL is row-major and compact, as DLPack says. Host memory that a GPU has pinned
 * is the CPU's, managed memory the GPU's. Returns NULL, or a sentence (static) that says what Ingot has no word for; nothing is
 * written then. An axis of extent 1 may have any stride; others negative ones too, which the call will refuse by name. */
static inline const char *ingot_tensor_from_dlpack(const DLTensor *from, ingot_tensor *to, ingot_stream *stream) {
	enum { CPU = 1, CUDA = 2, CUDA_HOST = 3, ROCM = 10, ROCM_HOST = 11, CUDA_MANAGED = 13 };
	ingot_tensor t = {NULL, INGOT_NONE, 0, {0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}};
	int32_t type;
	uint64_t step = 1;
	switch ((int)from->device.device_type) {
	case CPU:
	case CUDA_HOST:
	case ROCM_HOST: type = INGOT_CPU; break;
	case CUDA:
	case CUDA_MANAGED: type = INGOT_CUDA; break;
	case ROCM: type = INGOT_HIP; break;
	default: return "device.device_type is none of the CPU, CUDA and ROCm";
	}
	if (from->ndim < 1 || from->ndim > 5) return "ndim is outside 1 to 5";
	if (from->dtype.lanes != 1) return "dtype.lanes is not 1";
#define INGOT_DLPACK_TYPE(name, number, size) \
	if (from->dtype.code == number && from->dtype.bits == size) t.dtype = name;
	INGOT_DLPACK_TYPES(INGOT_DLPACK_TYPE)
#undef INGOT_DLPACK_TYPE
	if (t.dtype == INGOT_NONE)
		return "dtype is none of float32, float16, bfloat16, the 8-bit floats e4m3fn, e5m2, e4m3fnuz and e5m2fnuz, int32, "
			   "int64, uint64 and bool";
	t.ndim = from->ndim;
	for (int i = from->ndim - 1; i >= 0; i--) {
		t.shape[i] = from->shape[i];
		t.stride[i] = from->strides ? from->strides[i] : (int64_t)step;
		step *= (uint64_t)from->shape[i];
	}
	t.data = from->data ? (char *)from->data + from->byte_offset : NULL;
	*to = t;
	if (stream) {
		stream->type = type;
		stream->device = type == INGOT_CPU ? 0 : from->device.device_id;
	}
	return NULL;
}

/* Fills *to with a description of from, which lies on the device of stream. Its shape and strides are those of *from, not copies:
 * *from must stay while *to is used. Returns NULL, or a sentence (static) and writes nothing: an absent tensor has none. */
static inline const char *ingot_tensor_to_dlpack(const ingot_tensor *from, ingot_stream stream, DLTensor *to) {
	int code = -1, bits = 0;
#define INGOT_DLPACK_TYPE(name, number, size) \
	if (from->dtype == name) code = number, bits = size;
	INGOT_DLPACK_TYPES(INGOT_DLPACK_TYPE)
#undef INGOT_DLPACK_TYPE
	if (code < 0) return "the tensor is absent, or its dtype is no ingot_dtype";
	if (stream.type != INGOT_CPU && stream.type != INGOT_CUDA && stream.type != INGOT_HIP)
		return "stream.type is no ingot_device_type";
	to->data = from->data;
	to->device.device_type = (DLDeviceType)(stream.type == INGOT_CPU ? 1 : stream.type == INGOT_CUDA ? 2 : 10);
	to->device.device_id = stream.type == INGOT_CPU ? 0 : stream.device;
	to->ndim = from->ndim;
	to->dtype.code = (uint8_t)code;
	to->dtype.bits = (uint8_t)bits;
	to->dtype.lanes = 1;
	to->shape = (int64_t *)(uintptr_t)from->shape;
	to->strides = (int64_t *)(uintptr_t)from->stride;
	to->byte_offset = 0;
	return NULL;
}

#ifdef __cplusplus
}
#endif

#endif
