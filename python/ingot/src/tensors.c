/* See tensors.h. The C exchange table is asked first (a view costs tens of nanoseconds), the capsule protocol otherwise. */
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "tensors.h"

/* ---- dtypes ------------------------------------------------------------------------------------------------------------ */

/* One row a type of the library: DLPack's code and width, the name that frameworks give it. */
static const struct {
	int32_t dtype;
	DLDataType dlpack;
	const char *name;
} dtypes[] = {
	{INGOT_F32, {kDLFloat, 32, 1}, "float32"},
	{INGOT_F16, {kDLFloat, 16, 1}, "float16"},
	{INGOT_BF16, {kDLBfloat, 16, 1}, "bfloat16"},
	{INGOT_F8_E4M3, {kDLFloat8_e4m3fn, 8, 1}, "float8_e4m3fn"},
	{INGOT_F8_E5M2, {kDLFloat8_e5m2, 8, 1}, "float8_e5m2"},
	{INGOT_F8_E4M3_FNUZ, {kDLFloat8_e4m3fnuz, 8, 1}, "float8_e4m3fnuz"},
	{INGOT_F8_E5M2_FNUZ, {kDLFloat8_e5m2fnuz, 8, 1}, "float8_e5m2fnuz"},
	{INGOT_I32, {kDLInt, 32, 1}, "int32"},
	{INGOT_I64, {kDLInt, 64, 1}, "int64"},
	{INGOT_U64, {kDLUInt, 64, 1}, "uint64"},
	{INGOT_BOOL, {kDLBool, 8, 1}, "bool"},
};
enum { DTYPES = sizeof dtypes / sizeof *dtypes };

static int32_t dtype_of(DLDataType type) {
	for (int i = 0; i < DTYPES; i++) {
		const DLDataType row = dtypes[i].dlpack;
		if (row.code == type.code && row.bits == type.bits && row.lanes == type.lanes) return dtypes[i].dtype;
	}
	return INGOT_NONE;
}

static int row_of(int32_t dtype) {
	for (int i = 0; i < DTYPES; i++)
		if (dtypes[i].dtype == dtype) return i;
	return 0;
}

int64_t element_size(int32_t dtype) {
	return dtypes[row_of(dtype)].dlpack.bits / 8;
}

static int32_t dtype_named(const char *name) {
	for (int i = 0; i < DTYPES; i++)
		if (!strcmp(dtypes[i].name, name)) return dtypes[i].dtype;
	return INGOT_NONE;
}

/* ---- errors, helpers --------------------------------------------------------------------------------------------------- */

PyObject *helpers(void) {
	static PyObject *module;
	if (!module) module = PyImport_ImportModule("ingot._arrays");
	return module;
}

void raise_status(ingot_status status, const char *sentence, ...) {
	va_list arguments;
	va_start(arguments, sentence);
	PyObject *text = PyUnicode_FromFormatV(sentence, arguments);
	va_end(arguments);
	PyObject *module = text ? helpers() : NULL;
	PyObject *error = module ? PyObject_CallMethod(module, "error", "iO", (int)status, text) : NULL;
	if (error) PyErr_SetObject((PyObject *)Py_TYPE(error), error);
	Py_XDECREF(error);
	Py_XDECREF(text);
}

/* ---- the exchange table ------------------------------------------------------------------------------------------------ */

/* What is known of a type. Programs have a handful of tensor types; the references are kept for ever. */
typedef struct known_type {
	PyTypeObject *type;
	const DLPackExchangeAPI *api;
	bool host;     /* its arrays are never anywhere else */
	bool constant; /* its arrays never change */
	bool masked;   /* its arrays have a mask, which DLPack leaves out */
} known_type;

static known_type known_type_of(PyObject *object) {
	enum { TYPES = 16 };
	static known_type known[TYPES];
	static int count;
	PyTypeObject *const type = Py_TYPE(object);
	for (int i = 0; i < count; i++)
		if (known[i].type == type) return known[i];
	const DLPackExchangeAPI *api = NULL;
	PyObject *capsule = PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
	if (capsule && PyCapsule_CheckExact(capsule))
		api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api"); /* alive as long as the process, says DLPack */
	Py_XDECREF(capsule);
	PyErr_Clear();
	while (api && api->header.version.major != DLPACK_MAJOR) api = (const DLPackExchangeAPI *)api->header.prev_api;
	PyObject *module = PyObject_GetAttrString((PyObject *)type, "__module__");
	PyObject *ascii = module && PyUnicode_Check(module) ? PyUnicode_AsASCIIString(module) : NULL;
	const char *const from = ascii ? PyBytes_AsString(ascii) : "";
	const known_type row = {type, api, !strcmp(from, "numpy"), !strncmp(from, "jax", 3),
	                        !strcmp(from, "numpy.ma") || !strncmp(from, "numpy.ma.", 9)};
	Py_XDECREF(ascii);
	Py_XDECREF(module);
	PyErr_Clear();
	if (count < TYPES) {
		Py_INCREF(type);
		known[count++] = row;
	}
	return row;
}

const DLPackExchangeAPI *exchange_api(PyObject *object) {
	return known_type_of(object).api;
}

/* ---- in ---------------------------------------------------------------------------------------------------------------- */

void held_tensors_release(held_tensors *held) {
	for (int i = 0; i < held->count; i++) {
		DLManagedTensor *const legacy = held->legacy[i];
		DLManagedTensorVersioned *const versioned = held->versioned[i];
		if (legacy && legacy->deleter) legacy->deleter(legacy);
		if (versioned && versioned->deleter) versioned->deleter(versioned);
	}
	held->count = 0;
}

static const char *device_name(int32_t type) {
	switch (type) {
	case kDLCPU:
	case kDLCUDAHost:
	case kDLROCMHost: return "cpu";
	case kDLCUDA:
	case kDLCUDAManaged: return "cuda";
	case kDLROCM: return "rocm";
	default: return "other";
	}
}

/* Host memory of any kind is the CPU's, and managed memory the GPU's. */
static bool one_device(DLDevice *device, const char *field, call_device *where) {
	const char *const name = device_name(device->device_type);
	if (!strcmp(name, "cpu")) *device = (DLDevice){kDLCPU, 0};
	if (!strcmp(name, "cuda")) device->device_type = kDLCUDA;
	if (!strcmp(name, "other")) {
		raise_status(INGOT_INVALID, "%s is on a device of DLPack type %d; Ingot runs on cpu, cuda and rocm", field,
		             (int)device->device_type);
		return false;
	}
	if (!where->known) {
		where->known = true;
		where->device = *device;
		where->of = field;
		return true;
	}
	if (device->device_type == where->device.device_type && device->device_id == where->device.device_id) return true;
	raise_status(INGOT_INVALID, "%s is on %s:%d and %s on %s:%d; all tensors of a call are on one device", field, name,
	             (int)device->device_id, where->of, device_name(where->device.device_type),
	             (int)where->device.device_id);
	return false;
}

static bool take_view(const DLTensor *view, int32_t dtype, const char *field, ingot_tensor *tensor) {
	if (dtype == INGOT_NONE) dtype = dtype_of(view->dtype);
	if (dtype == INGOT_NONE) {
		static const char *const kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
		const unsigned code = view->dtype.code;
		const bool known = code < sizeof kinds / sizeof *kinds;
		raise_status(INGOT_INVALID,
		             "%s is %s%d; Ingot takes float32, float16, bfloat16, float8, bool, int32, int64 and uint64, each "
		             "where its field allows it",
		             field, known ? kinds[code] : "of DLPack type code ", known ? (int)view->dtype.bits : (int)code);
		return false;
	}
	if (view->ndim > 5) {
		raise_status(INGOT_INVALID, "%s has %d axes; at most 5 are allowed", field, (int)view->ndim);
		return false;
	}
	tensor->data = view->data ? (char *)view->data + view->byte_offset : NULL;
	tensor->dtype = dtype;
	tensor->ndim = view->ndim;
	int64_t compact = 1;
	for (int axis = view->ndim - 1; axis >= 0; axis--) {
		tensor->shape[axis] = view->shape[axis];
		tensor->stride[axis] = view->strides ? view->strides[axis] : compact;
		compact *= view->shape[axis];
	}
	/* A single number as the library wants it: one axis of one element. */
	if (!view->ndim) {
		tensor->ndim = 1;
		tensor->shape[0] = tensor->stride[0] = 1;
	}
	return true;
}

/* Tells the call's stream from the object's framework, where the caller gave none. */
static bool find_stream(PyObject *object, const DLPackExchangeAPI *api, call_device *where) {
	if (where->handle_given || where->device.device_type == kDLCPU) return true;
	where->handle_given = true;
	if (api && api->current_work_stream) {
		void *stream = NULL;
		if (api->current_work_stream(where->device.device_type, where->device.device_id, &stream)) return false;
		where->handle = (uintptr_t)stream;
		return true;
	}
	PyObject *module = helpers();
	PyObject *handle = module ? PyObject_CallMethod(module, "current_stream", "O", object) : NULL;
	if (!handle) return false;
	where->handle = (uintptr_t)PyLong_AsVoidPtr(handle);
	Py_DECREF(handle);
	return !PyErr_Occurred();
}

static PyObject *call_dlpack(PyObject *object, bool gpu, uintptr_t handle) {
	static PyObject *host_keywords, *none, *name;
	if (!host_keywords) host_keywords = Py_BuildValue("{s(ii)}", "max_version", DLPACK_MAJOR, 1);
	if (!none) none = PyTuple_New(0);
	if (!name) name = PyUnicode_InternFromString("__dlpack__");
	if (!host_keywords || !none || !name) return NULL;
	PyObject *method = PyObject_GetAttr(object, name);
	if (!method) return NULL;
	PyObject *keywords = host_keywords, *capsule = NULL;
	Py_INCREF(keywords);
	if (gpu) {
		Py_DECREF(keywords);
		/* 1 is the legacy default stream, which the driver numbers 0. */
		const unsigned long long number = handle ? handle : 1;
		keywords = Py_BuildValue("{s(ii)sK}", "max_version", DLPACK_MAJOR, 1, "stream", number);
	}
	if (keywords) capsule = PyObject_Call(method, none, keywords);
	if (!capsule && keywords && PyErr_ExceptionMatches(PyExc_TypeError)) {
		/* A producer from before versions knows no max_version. */
		PyErr_Clear();
		PyObject *old = PyDict_Copy(keywords);
		if (old && !PyDict_DelItemString(old, "max_version")) capsule = PyObject_Call(method, none, old);
		Py_XDECREF(old);
	}
	Py_XDECREF(keywords);
	Py_DECREF(method);
	return capsule;
}

/* Takes the tensor out of the capsule: from here on its deleter is ours to call. */
static const DLTensor *consume(PyObject *capsule, const char *field, held_tensors *held, bool *read_only) {
	if (held->count == HELD_MAX) {
		raise_status(INGOT_INVALID, "%s is one tensor too many; a call takes at most %d", field, (int)HELD_MAX);
		return NULL;
	}
	const int slot = held->count;
	held->legacy[slot] = NULL;
	held->versioned[slot] = NULL;
	*read_only = false;
	if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
		DLManagedTensorVersioned *const tensor = PyCapsule_GetPointer(capsule, "dltensor_versioned");
		if (tensor->version.major != DLPACK_MAJOR) {
			/* Left in its capsule, which deletes it. */
			PyErr_Format(PyExc_BufferError, "%s comes by DLPack %d; this package knows %d", field,
			             (int)tensor->version.major, (int)DLPACK_MAJOR);
			return NULL;
		}
		if (PyCapsule_SetName(capsule, "used_dltensor_versioned")) return NULL;
		held->versioned[slot] = tensor;
		held->count++;
		*read_only = tensor->flags & DLPACK_FLAG_READ_ONLY;
		return &tensor->dl_tensor;
	}
	if (!PyCapsule_IsValid(capsule, "dltensor")) {
		PyErr_Format(PyExc_TypeError, "%s: its __dlpack__ gave %R; a DLPack capsule that nobody has used is needed",
		             field, capsule);
		return NULL;
	}
	DLManagedTensor *const tensor = PyCapsule_GetPointer(capsule, "dltensor");
	if (!tensor || PyCapsule_SetName(capsule, "used_dltensor")) return NULL;
	held->legacy[slot] = tensor;
	held->count++;
	return &tensor->dl_tensor;
}

static bool device_of(PyObject *object, const char *field, DLDevice *device) {
	if (known_type_of(object).host) {
		*device = (DLDevice){kDLCPU, 0};
		return true;
	}
	PyObject *told = PyObject_CallMethod(object, "__dlpack_device__", NULL);
	if (!told) return false;
	/* The first is an IntEnum in some frameworks. */
	long type = -1, id = -1;
	const bool pair = PyTuple_Check(told) && PyTuple_Size(told) == 2;
	if (pair) type = PyLong_AsLong(PyTuple_GetItem(told, 0));
	if (pair && !PyErr_Occurred()) id = PyLong_AsLong(PyTuple_GetItem(told, 1));
	if (!pair || PyErr_Occurred()) {
		PyErr_Clear();
		PyErr_Format(PyExc_TypeError, "%s: its __dlpack_device__ gave %R; a tuple of two ints is needed", field, told);
	}
	Py_DECREF(told);
	*device = (DLDevice){(int32_t)type, (int32_t)id};
	return !PyErr_Occurred();
}

static bool import_capsule(PyObject *object, const char *field, bool written, int32_t dtype, ingot_tensor *tensor,
                           call_device *where, held_tensors *held) {
	DLDevice device;
	if (known_type_of(object).masked) {
		raise_status(INGOT_INVALID,
		             "%s is a masked array, whose mask would be lost; give its .filled(), and the mask as a bias",
		             field);
		return false;
	}
	if (!device_of(object, field, &device) || !one_device(&device, field, where) || !find_stream(object, NULL, where))
		return false;
	PyObject *capsule = call_dlpack(object, device.device_type != kDLCPU, where->handle);
	if (!capsule) return false;
	bool read_only;
	const DLTensor *const view = consume(capsule, field, held, &read_only);
	Py_DECREF(capsule);
	if (!view) return false;
	if (written && (read_only || known_type_of(object).constant)) {
		raise_status(INGOT_INVALID, "%s is read-only; a tensor that the call writes must be writable", field);
		return false;
	}
	return take_view(view, dtype, field, tensor);
}

/* Puts a sentence with the field's name in place of the framework's refusal, which may come with frames of its C++. */
static bool name_refusal(PyObject *object, const char *field) {
	PyObject *kind, *refusal, *trace;
	PyErr_Fetch(&kind, &refusal, &trace);
	PyObject *module = helpers();
	PyObject *why = module ? PyObject_CallMethod(module, "refusal", "OO", object, refusal ? refusal : kind) : NULL;
	if (why) raise_status(INGOT_INVALID, "%s %U", field, why);
	Py_XDECREF(why);
	Py_XDECREF(kind);
	Py_XDECREF(refusal);
	Py_XDECREF(trace);
	return false;
}

bool tensor_import(PyObject *object, const char *field, bool written, ingot_tensor *tensor, call_device *where,
                   held_tensors *held) {
	const DLPackExchangeAPI *const api = exchange_api(object);
	if (api && api->dltensor_from_py_object_no_sync) {
		DLTensor view;
		if (api->dltensor_from_py_object_no_sync(object, &view)) return name_refusal(object, field);
		return one_device(&view.device, field, where) && find_stream(object, api, where) &&
		       take_view(&view, INGOT_NONE, field, tensor);
	}
	if (import_capsule(object, field, written, INGOT_NONE, tensor, where, held)) return true;
	if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
		PyErr_Clear();
		PyErr_Format(PyExc_TypeError, "%s is no array: %R has no __dlpack__ and __dlpack_device__", field,
		             (PyObject *)Py_TYPE(object));
		return false;
	}
	if (!PyErr_ExceptionMatches(PyExc_BufferError)) return false;
	/* numpy has no bfloat16 and float8 of its own and exports nobody else's: take their bits. */
	PyObject *kind, *refusal, *trace;
	PyErr_Fetch(&kind, &refusal, &trace);
	PyObject *module = helpers();
	PyObject *bits = module ? PyObject_CallMethod(module, "as_bits", "O", object) : NULL;
	bool done = false;
	if (bits == Py_None) {
		PyErr_Restore(kind, refusal, trace);
	} else {
		Py_XDECREF(kind);
		Py_XDECREF(refusal);
		Py_XDECREF(trace);
		PyObject *array, *name;
		if (bits && PyArg_ParseTuple(bits, "OO", &array, &name)) {
			PyObject *ascii = PyUnicode_AsASCIIString(name);
			done = ascii &&
			       import_capsule(array, field, written, dtype_named(PyBytes_AsString(ascii)), tensor, where, held);
			Py_XDECREF(ascii);
		}
	}
	Py_XDECREF(bits);
	if (done || !PyErr_ExceptionMatches(PyExc_BufferError)) return done;
	PyErr_Fetch(&kind, &refusal, &trace);
	raise_status(INGOT_INVALID, "%s: %S", field, refusal ? refusal : kind);
	Py_XDECREF(kind);
	Py_XDECREF(refusal);
	Py_XDECREF(trace);
	return false;
}

/* ---- out --------------------------------------------------------------------------------------------------------------- */

static void set_error(void *context, const char *kind, const char *message) {
	(void)context;
	PyErr_Format(strcmp(kind, "MemoryError") ? PyExc_RuntimeError : PyExc_MemoryError, "%s", message);
}

PyObject *tensor_empty(PyObject *like, const char *field, ingot_tensor *tensor, call_device *where, held_tensors *held,
                       PyObject **convert) {
	*convert = NULL;
	const int row = row_of(tensor->dtype);
	const DLPackExchangeAPI *const api = exchange_api(like);
	if (api && api->managed_tensor_allocator && api->managed_tensor_to_py_object_no_sync) {
		DLTensor prototype = {
			.device = where->device, .ndim = tensor->ndim, .dtype = dtypes[row].dlpack, .shape = tensor->shape};
		DLManagedTensorVersioned *made = NULL;
		if (api->managed_tensor_allocator(&prototype, &made, NULL, set_error)) {
			if (!PyErr_Occurred()) PyErr_Format(PyExc_MemoryError, "no memory for %s", field);
			return NULL;
		}
		DLTensor *const view = &made->dl_tensor;
		tensor->data = view->data ? (char *)view->data + view->byte_offset : NULL;
		/* What was made has its axes in the order of its memory; another order is a matter of strides alone. */
		int64_t *const strides = view->strides;
		view->strides = tensor->stride;
		void *object = NULL;
		if (api->managed_tensor_to_py_object_no_sync(made, &object)) return NULL;
		view->strides = strides; /* the object keeps what was made, but not the caller's array */
		return object;
	}
	PyObject *shape = PyTuple_New(tensor->ndim), *module = helpers();
	for (int axis = 0; shape && axis < tensor->ndim; axis++)
		PyTuple_SetItem(shape, axis, PyLong_FromLongLong(tensor->shape[axis]));
	PyObject *made =
		shape && module ? PyObject_CallMethod(module, "empty", "OOs", like, shape, dtypes[row].name) : NULL;
	Py_XDECREF(shape);
	PyObject *array, *then;
	if (!made || !PyArg_ParseTuple(made, "OO", &array, &then)) {
		Py_XDECREF(made);
		return NULL;
	}
	Py_INCREF(array);
	if (then != Py_None) {
		Py_INCREF(then);
		*convert = then;
	}
	Py_DECREF(made);
	if (tensor_import(array, field, true, tensor, where, held)) return array;
	Py_DECREF(array);
	Py_XDECREF(*convert);
	*convert = NULL;
	return NULL;
}

bool tensor_zero(PyObject *object, const ingot_tensor *tensor, const call_device *where) {
	if (where->device.device_type != kDLCPU) {
		PyObject *module = helpers();
		PyObject *done = module ? PyObject_CallMethod(module, "zero", "O", object) : NULL;
		Py_XDECREF(done);
		return done != NULL;
	}
	size_t bytes = dtypes[row_of(tensor->dtype)].dlpack.bits / 8u;
	for (int axis = 0; axis < tensor->ndim; axis++) bytes *= (size_t)tensor->shape[axis];
	if (bytes) memset(tensor->data, 0, bytes);
	return true;
}

/* ---- workspace --------------------------------------------------------------------------------------------------------- */

static void ignore_error(void *context, const char *kind, const char *message) {
	(void)context, (void)kind, (void)message; /* the library says what could not be had */
}

void *framework_memory_alloc(void *context, uint64_t size) {
	framework_memory *const memory = context;
	int64_t shape[1] = {(int64_t)size};
	DLTensor prototype = {.device = memory->device, .ndim = 1, .dtype = {kDLUInt, 8, 1}, .shape = shape};
	if (memory->block || memory->api->managed_tensor_allocator(&prototype, &memory->block, NULL, ignore_error))
		return NULL;
	const DLTensor *const tensor = &memory->block->dl_tensor;
	return (char *)tensor->data + tensor->byte_offset;
}

void framework_memory_free(void *context, void *data) {
	(void)data;
	framework_memory *const memory = context;
	if (memory->block && memory->block->deleter) memory->block->deleter(memory->block);
	memory->block = NULL;
}
