/*
 * The binary layout of DLPack (https://dmlc.github.io/dlpack): tensors as capsules carry them, in both versions, and the table
 * of C functions that a framework may offer on its tensor type.
 *
 * Only what this package uses is declared, under the specification's names.
 */
#ifndef INGOT_PYTHON_DLPACK_H
#define INGOT_PYTHON_DLPACK_H

#include <stdint.h>

enum { DLPACK_MAJOR = 1 };

enum { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLROCM = 10, kDLROCMHost = 11, kDLCUDAManaged = 13 };

enum {
	kDLInt = 0,
	kDLUInt = 1,
	kDLFloat = 2,
	kDLBfloat = 4,
	kDLBool = 6,
	kDLFloat8_e4m3fn = 10,
	kDLFloat8_e4m3fnuz = 11,
	kDLFloat8_e5m2 = 12,
	kDLFloat8_e5m2fnuz = 13
};

enum { DLPACK_FLAG_READ_ONLY = 1 };

typedef struct DLDevice {
	int32_t device_type;
	int32_t device_id;
} DLDevice;

typedef struct DLDataType {
	uint8_t code;
	uint8_t bits;
	uint16_t lanes;
} DLDataType;

typedef struct DLTensor {
	void *data;
	DLDevice device;
	int32_t ndim;
	DLDataType dtype;
	int64_t *shape;
	int64_t *strides; /* in elements; NULL: compact */
	uint64_t byte_offset;
} DLTensor;

/* In a capsule named "dltensor". */
typedef struct DLManagedTensor {
	DLTensor dl_tensor;
	void *manager_ctx;
	void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;

typedef struct DLPackVersion {
	uint32_t major;
	uint32_t minor;
} DLPackVersion;

/* In a capsule named "dltensor_versioned". */
typedef struct DLManagedTensorVersioned {
	DLPackVersion version;
	void *manager_ctx;
	void (*deleter)(struct DLManagedTensorVersioned *self);
	uint64_t flags;
	DLTensor dl_tensor;
} DLManagedTensorVersioned;

typedef struct DLPackExchangeAPIHeader {
	DLPackVersion version;
	struct DLPackExchangeAPIHeader *prev_api;
} DLPackExchangeAPIHeader;

/* In the capsule "dlpack_exchange_api" that a tensor type has as __dlpack_c_exchange_api__. A function answers 0, or -1 with a
 * Python exception set (the allocator: with SetError called). */
typedef struct DLPackExchangeAPI {
	DLPackExchangeAPIHeader header;
	int (*managed_tensor_allocator)(DLTensor *prototype, DLManagedTensorVersioned **out, void *error_ctx,
	                                void (*set_error)(void *error_ctx, const char *kind, const char *message));
	int (*managed_tensor_from_py_object_no_sync)(void *py_object, DLManagedTensorVersioned **out);
	int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned *tensor, void **out_py_object);
	int (*dltensor_from_py_object_no_sync)(void *py_object, DLTensor *out); /* may be NULL */
	int (*current_work_stream)(int32_t device_type, int32_t device_id, void **out_stream);
} DLPackExchangeAPI;

#endif
