/*
 * Arrays of any framework as the library's tensors, by DLPack, without a copy; and new arrays of a framework.
 *
 * Everything here needs the GIL.
 */
#ifndef INGOT_PYTHON_TENSORS_H
#define INGOT_PYTHON_TENSORS_H

#include "dlpack.h"

#include <ingot.h>
#include <stdbool.h>
#include <stdint.h>

struct _object; /* PyObject */

enum { HELD_MAX = 48 };

/* What a call has taken from capsules, to be given back after it. Zero-initialised by the caller. */
typedef struct held_tensors {
	int count;
	DLManagedTensor *legacy[HELD_MAX]; /* one of the two is NULL */
	DLManagedTensorVersioned *versioned[HELD_MAX];
} held_tensors;

void held_tensors_release(held_tensors *held);

/* Where the tensors of a call live; set by the first one. Zero-initialised by the caller but for the handle. */
typedef struct call_device {
	bool known;
	bool handle_given; /* stream= of the caller */
	uintptr_t handle;
	DLDevice device;
	const char *of; /* the field that set it */
} call_device;

/* The exchange table of the object's type, or NULL where it offers none that this package understands. */
const DLPackExchangeAPI *exchange_api(struct _object *object);

/* Takes object as the tensor of a field. written: it must not be read-only. false: a Python exception is set. */
bool tensor_import(struct _object *object, const char *field, bool written, ingot_tensor *tensor, call_device *where,
                   held_tensors *held);

/* A new array of like's framework on the call's device, its memory in tensor, whose dtype, ndim, shape and strides are given.
 * The strides are those of compact memory, with any order of axes where the type has an exchange table, in the order of the
 * axes otherwise. A new reference, or NULL with an exception set. *convert is NULL, or a callable that makes the result of the
 * array once it is written (a new reference). */
struct _object *tensor_empty(struct _object *like, const char *field, ingot_tensor *tensor, call_device *where,
                             held_tensors *held, struct _object **convert);

/* Bytes of an element. */
int64_t element_size(int32_t dtype);

/* Clears an array that tensor_empty has made. */
bool tensor_zero(struct _object *object, const ingot_tensor *tensor, const call_device *where);

/* Memory of the framework for the library's workspace on a GPU: it is the stream's, and under capture the graph's. Its
 * functions are ingot_options' alloc and free, for one block at a time; they need no GIL. */
typedef struct framework_memory {
	const DLPackExchangeAPI *api;
	DLDevice device;
	DLManagedTensorVersioned *block;
} framework_memory;

void *framework_memory_alloc(void *context, uint64_t size);
void framework_memory_free(void *context, void *memory);

/* Raises ingot's exception for the status; sentence as PyErr_Format takes it. */
void raise_status(ingot_status status, const char *sentence, ...);

/* The module ingot._arrays, with the parts that are easier in Python; a borrowed reference or NULL with an exception set. */
struct _object *helpers(void);

#endif
