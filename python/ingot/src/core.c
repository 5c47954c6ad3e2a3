/*
 * ingot._core: the library's operators as functions of keywords, one keyword a field of the operator's struct, under the
 * field's name.
 *
 *     out = _core.attn_fwd(q=q, k=k, v=v, out=True, mask=1, align=2)
 *
 * None stands for an absent field. True for an output makes a new array of the first tensor's framework. Besides the fields
 * every function takes those of ingot_options (backend, image_path, flags, num_threads), stream (the handle of a GPU's
 * stream), explain ("text" or "json": nothing runs, the explanation is returned), track (false: no complaint about tensors
 * that record gradients) and seq_major (true: an output with four axes that is made here lies in memory as [B, S, H, D],
 * where the framework has DLPack's C table). What the user sees is made of these in ingot/__init__.py.
 */
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "tensors.h"

#include <stddef.h>
#include <stdio.h>

typedef union any_params {
	uint32_t struct_size; /* each begins with it */
	ingot_attn_fwd_params attn_fwd;
	ingot_attn_bwd_params attn_bwd;
	ingot_attn_merge_params attn_merge;
	ingot_kv_append_params kv_append;
	ingot_attn_dropout_mask_params attn_dropout_mask;
} any_params;

/* ---- the operators' fields --------------------------------------------------------------------------------------------- */

typedef enum field_kind { END, INPUT, OUTPUT, PARTS, U32, I32, I64, U64, F32 } field_kind;

typedef struct field {
	const char *name;
	field_kind kind;
	size_t offset;
	PyObject *interned; /* the name; keywords are compared by address first */
} field;

enum { FIELDS_MAX = 48, RESULTS_MAX = 2 };

typedef struct operator_row {
	const char *name;
	uint32_t size;
	ingot_status (*run)(const void *, ingot_stream, const ingot_options *);
	ingot_status (*explain)(const void *, ingot_stream, const ingot_options *, int32_t, char *, size_t, size_t *);
	/* Sets dtype, ndim and shape of output `name` from the inputs; NULL: no output can be asked for by True. */
	bool (*shape)(const any_params *, const char *name, ingot_tensor *);
	const char *results[RESULTS_MAX]; /* outputs that the call returns, where given */
	field fields[FIELDS_MAX];
} operator_row;

#define VERBS(op)                                                                                           \
	static ingot_status run_##op(const void *params, ingot_stream stream, const ingot_options *options) {   \
		return ingot_##op(params, stream, options);                                                         \
	}                                                                                                       \
	static ingot_status explain_##op(const void *params, ingot_stream stream, const ingot_options *options, \
	                                 int32_t format, char *buffer, size_t capacity, size_t *needed) {       \
		return ingot_##op##_explain(params, stream, options, format, buffer, capacity, needed);             \
	}
INGOT_OPERATOR_LIST(VERBS)
#undef VERBS

/* The shape of the rows' array, its last axis cut off or replaced. */
static void rows_of(const ingot_tensor *from, int32_t axes, int64_t last, int32_t dtype, ingot_tensor *tensor) {
	*tensor = *from;
	tensor->data = NULL;
	tensor->dtype = dtype;
	tensor->ndim = axes;
	if (last >= 0) tensor->shape[axes - 1] = last;
	int64_t stride = 1;
	for (int axis = axes - 1; axis >= 0; axis--) {
		tensor->stride[axis] = stride;
		stride *= tensor->shape[axis];
	}
}

static bool ranked(const ingot_tensor *tensor, const char *name, int32_t axes) {
	if (tensor->dtype != INGOT_NONE && tensor->ndim == axes) return true;
	if (tensor->dtype == INGOT_NONE) raise_status(INGOT_INVALID, "%s is None; it is required", name);
	else raise_status(INGOT_INVALID, "%s has %d axes; %d are needed", name, (int)tensor->ndim, (int)axes);
	return false;
}

static bool shape_attn_fwd(const any_params *params, const char *name, ingot_tensor *tensor) {
	const ingot_attn_fwd_params *const p = &params->attn_fwd;
	if (!ranked(&p->q, "q", 4) || !ranked(&p->v, "v", 4)) return false;
	if (!strcmp(name, "out")) {
		/* Of q's type, whatever the library says to it, but for 8 bits. */
		const bool narrow = p->q.dtype >= INGOT_F8_E4M3 && p->q.dtype <= INGOT_F8_E5M2_FNUZ;
		rows_of(&p->q, 4, p->v.shape[3], narrow ? INGOT_BF16 : p->q.dtype, tensor);
		return true;
	}
	rows_of(&p->q, 3, -1, INGOT_F32, tensor);
	if (!(p->varlen & 1)) return true;
	/* Stacked: [Hq,T] or [T,Hq]. */
	const bool rows_first = (p->varlen >> 16 & 3) == INGOT_LSE_TH;
	tensor->ndim = 2;
	tensor->shape[0] = p->q.shape[rows_first ? 2 : 1];
	tensor->shape[1] = p->q.shape[rows_first ? 1 : 2];
	tensor->stride[0] = tensor->shape[1];
	tensor->stride[1] = 1;
	return true;
}

static bool shape_attn_merge(const any_params *params, const char *name, ingot_tensor *tensor) {
	const ingot_attn_merge_params *const p = &params->attn_merge;
	ingot_tensor part = p->out_parts[0];
	if (part.dtype == INGOT_NONE || (part.ndim != 4 && part.ndim != 5)) return ranked(&part, "out_parts[0]", 4);
	if (part.ndim == 5) {
		part.ndim = 4;
		memmove(part.shape, part.shape + 1, 4 * sizeof *part.shape);
	}
	const bool out = !strcmp(name, "out");
	rows_of(&part, out ? 4 : 3, -1, out ? part.dtype : INGOT_F32, tensor);
	return true;
}

#define ROW(op) #op, sizeof(ingot_##op##_params), run_##op, explain_##op
#define F(kind, name) {#name, kind, offsetof(P, name), NULL}

static operator_row operators[] = {
#define P ingot_attn_fwd_params
	{ROW(attn_fwd),
     shape_attn_fwd,
     {"out", "lse"},
     {F(INPUT, q),
      F(INPUT, k),
      F(INPUT, v),
      F(OUTPUT, out),
      F(OUTPUT, lse),
      F(U32, varlen),
      F(I32, mask),
      F(I32, align),
      F(F32, softmax_scale),
      F(INPUT, bias),
      F(F32, softcap),
      F(INPUT, alibi),
      F(INPUT, sink),
      F(I32, window_left),
      F(I32, window_right),
      F(I32, lse_base),
      F(F32, dropout_p),
      F(U64, dropout_seed),
      F(U64, dropout_offset),
      F(I64, batch),
      F(I64, max_seqlen_q),
      F(I64, max_seqlen_k),
      F(INPUT, q_lengths),
      F(INPUT, k_lengths),
      F(INPUT, q_positions),
      F(INPUT, k_positions),
      F(INPUT, page_table),
      F(INPUT, page_indptr),
      F(INPUT, page_indices),
      F(INPUT, q_descale),
      F(INPUT, k_descale),
      F(INPUT, v_descale),
      F(INPUT, dropout_seed_ptr),
      F(INPUT, dropout_offset_ptr),
      F(OUTPUT, dropout_seed_out),
      F(OUTPUT, dropout_offset_out)}},
#undef P
#define P ingot_attn_bwd_params
	{ROW(attn_bwd),
     NULL,
     {NULL},
     {F(INPUT, q),
      F(INPUT, k),
      F(INPUT, v),
      F(INPUT, out),
      F(INPUT, lse),
      F(INPUT, dout),
      F(OUTPUT, dq),
      F(OUTPUT, dk),
      F(OUTPUT, dv),
      F(U32, varlen),
      F(I32, mask),
      F(I32, align),
      F(F32, softmax_scale),
      F(INPUT, bias),
      F(OUTPUT, dbias),
      F(INPUT, alibi),
      F(INPUT, sink),
      F(OUTPUT, dsink),
      F(F32, softcap),
      F(I32, window_left),
      F(I32, window_right),
      F(I32, lse_base),
      F(F32, dropout_p),
      F(U64, dropout_seed),
      F(U64, dropout_offset),
      F(I64, batch),
      F(I64, max_seqlen_q),
      F(I64, max_seqlen_k),
      F(INPUT, q_lengths),
      F(INPUT, q_positions),
      F(INPUT, k_lengths),
      F(INPUT, k_positions),
      F(INPUT, dropout_seed_ptr),
      F(INPUT, dropout_offset_ptr)}},
#undef P
#define P ingot_attn_merge_params
	{ROW(attn_merge),
     shape_attn_merge,
     {"out", "lse"},
     {F(PARTS, out_parts), F(PARTS, lse_parts), F(OUTPUT, out), F(OUTPUT, lse), F(I32, lse_base)}},
#undef P
#define P ingot_kv_append_params
	{ROW(kv_append),
     NULL,
     {NULL},
     {F(INPUT, k_new), F(INPUT, v_new), F(OUTPUT, k), F(OUTPUT, v), F(U32, varlen), F(INPUT, k_lengths),
      F(INPUT, new_lengths), F(INPUT, new_positions), F(INPUT, page_table), F(INPUT, page_indptr),
      F(INPUT, page_indices), F(INPUT, k_descale), F(INPUT, v_descale), F(I64, batch), F(I64, max_seqlen_new),
      F(I64, max_seqlen_k), F(I32, lengths_after)}},
#undef P
#define P ingot_attn_dropout_mask_params
	{ROW(attn_dropout_mask),
     NULL,
     {NULL},
     {F(OUTPUT, mask), F(F32, dropout_p), F(U64, dropout_seed), F(U64, dropout_offset), F(I64, max_seqlen_q),
      F(I64, max_seqlen_k), F(INPUT, dropout_seed_ptr), F(INPUT, dropout_offset_ptr)}},
#undef P
};
enum { OPERATORS = sizeof operators / sizeof *operators };

/* ---- one call ---------------------------------------------------------------------------------------------------------- */

typedef struct option_names {
	PyObject *backend, *image_path, *flags, *num_threads, *stream, *explain, *track, *seq_major;
} option_names;
static option_names names;

typedef struct tensor_argument {
	const field *field;
	PyObject *object; /* borrowed: of the caller, or of parts */
} tensor_argument;

typedef struct operator_call {
	any_params params;
	ingot_options options;
	call_device where;
	held_tensors held;
	int tensors;
	tensor_argument tensor[FIELDS_MAX];
	bool track, seq_major;
	int part_fields;
	PyObject *parts[2];
	char part_names[2][INGOT_MERGE_PARTS][16];
	PyObject *backend, *image_path; /* owned bytes behind the options' strings */
	const char *explain;            /* NULL, "text" or "json" */
	PyObject *explain_bytes;
	PyObject *result[RESULTS_MAX], *convert[RESULTS_MAX];
} operator_call;

static void operator_call_release(operator_call *call) {
	held_tensors_release(&call->held);
	for (int i = 0; i < call->part_fields; i++) Py_DECREF(call->parts[i]);
	Py_XDECREF(call->backend);
	Py_XDECREF(call->image_path);
	Py_XDECREF(call->explain_bytes);
	for (int i = 0; i < RESULTS_MAX; i++) {
		Py_XDECREF(call->result[i]);
		Py_XDECREF(call->convert[i]);
	}
}

static bool same_name(PyObject *a, PyObject *b) {
	return a == b || (a && b && PyUnicode_Compare(a, b) == 0);
}

static const field *find_field(const operator_row *op, PyObject *name) {
	for (const field *f = op->fields; f->kind != END; f++)
		if (f->interned == name) return f;
	for (const field *f = op->fields; f->kind != END; f++)
		if (same_name(f->interned, name)) return f;
	return NULL;
}

static bool text_option(PyObject *value, const char *name, PyObject **bytes, const char **text) {
	if (!PyUnicode_Check(value)) {
		PyErr_Format(PyExc_TypeError, "%s is %R; it is a str or None", name, value);
		return false;
	}
	*bytes = PyUnicode_AsUTF8String(value);
	*text = *bytes ? PyBytes_AsString(*bytes) : NULL;
	if (!*text) return false;
	if (strlen(*text) == (size_t)PyBytes_Size(*bytes)) return true;
	raise_status(INGOT_INVALID, "%s has a NUL in it", name);
	return false;
}

/* An integer within [least, most]; most is read as unsigned. */
static bool integer(PyObject *value, const char *name, long long least, unsigned long long most, uint64_t *bits) {
	PyObject *number = PyNumber_Index(value);
	if (!number) {
		if (!PyErr_ExceptionMatches(PyExc_TypeError)) return false;
		PyErr_Clear();
		PyErr_Format(PyExc_TypeError, "%s is %R; it is an int", name, value);
		return false;
	}
	const long long small = PyLong_AsLongLong(number);
	bool fits = !(small == -1 && PyErr_Occurred());
	if (fits) {
		*bits = (uint64_t)small;
		fits = small >= least && (small < 0 || (unsigned long long)small <= most);
	} else {
		PyErr_Clear();
		const unsigned long long large = PyLong_AsUnsignedLongLong(number);
		fits = !(large == (unsigned long long)-1 && PyErr_Occurred()) && large <= most;
		PyErr_Clear();
		*bits = large;
	}
	if (!fits) raise_status(INGOT_INVALID, "%s is %R; %lld to %llu are allowed", name, number, least, most);
	Py_DECREF(number);
	return fits;
}

static bool scalar(any_params *params, const field *f, PyObject *value) {
	char *const at = (char *)params + f->offset;
	uint64_t bits = 0;
	switch (f->kind) {
	case F32: {
		const double wide = PyFloat_AsDouble(value);
		if (wide == -1.0 && PyErr_Occurred()) {
			if (!PyErr_ExceptionMatches(PyExc_TypeError)) return false;
			PyErr_Clear();
			PyErr_Format(PyExc_TypeError, "%s is %R; it is a float", f->name, value);
			return false;
		}
		const float number = (float)wide;
		if (number == 0 && wide != 0) {
			raise_status(INGOT_INVALID, "%s is %R, which is 0 in float32; 0 and magnitudes from 1e-45 on are allowed",
			             f->name, value);
			return false;
		}
		memcpy(at, &number, sizeof number);
		return true;
	}
	case U32:
	case I32: {
		if (!integer(value, f->name, f->kind == U32 ? 0 : INT32_MIN, f->kind == U32 ? UINT32_MAX : INT32_MAX, &bits))
			return false;
		const uint32_t number = (uint32_t)bits;
		memcpy(at, &number, sizeof number);
		return true;
	}
	default:
		if (!integer(value, f->name, f->kind == U64 ? 0 : INT64_MIN, f->kind == U64 ? UINT64_MAX : INT64_MAX, &bits))
			return false;
		memcpy(at, &bits, sizeof bits);
		return true;
	}
}

/* A keyword that is no field. */
static bool option(const operator_row *op, operator_call *call, PyObject *name, PyObject *value) {
	uint64_t bits = 0;
	if (same_name(name, names.backend)) return text_option(value, "backend", &call->backend, &call->options.backend);
	if (same_name(name, names.image_path))
		return text_option(value, "image_path", &call->image_path, &call->options.image_path);
	if (same_name(name, names.explain)) return text_option(value, "explain", &call->explain_bytes, &call->explain);
	if (same_name(name, names.track)) {
		call->track = PyObject_IsTrue(value) == 1;
		return true;
	}
	if (same_name(name, names.seq_major)) {
		call->seq_major = PyObject_IsTrue(value) == 1;
		return true;
	}
	if (same_name(name, names.flags)) {
		if (!integer(value, "flags", 0, UINT32_MAX, &bits)) return false;
		call->options.flags = (uint32_t)bits;
		return true;
	}
	if (same_name(name, names.num_threads)) {
		if (!integer(value, "num_threads", INT32_MIN, INT32_MAX, &bits)) return false;
		call->options.num_threads = (int32_t)bits;
		return true;
	}
	if (same_name(name, names.stream)) {
		if (!integer(value, "stream", 0, UINTPTR_MAX, &bits)) return false;
		call->where.handle_given = true;
		call->where.handle = (uintptr_t)bits;
		return true;
	}
	PyErr_Format(PyExc_TypeError, "%s() has no argument %R", op->name, name);
	return false;
}

/* The parts as a tuple of the call's own: the caller's list may change while the interpreter runs on. */
static bool take_parts(operator_call *call, const field *f, PyObject *object, tensor_argument *argument) {
	const bool several = PyList_Check(object) || PyTuple_Check(object);
	PyObject *parts = several ? PySequence_Tuple(object) : PyTuple_Pack(1, object);
	if (!parts) return false;
	*argument = (tensor_argument){f, call->parts[call->part_fields++] = parts};
	return true;
}

static bool read_arguments(const operator_row *op, operator_call *call, PyObject *const *values, PyObject *keywords) {
	const Py_ssize_t count = keywords ? PyTuple_Size(keywords) : 0;
	for (Py_ssize_t i = 0; i < count; i++) {
		PyObject *const value = values[i];
		if (value == Py_None) continue;
		PyObject *const name = PyTuple_GetItem(keywords, i);
		const field *const f = find_field(op, name);
		if (!f) {
			if (!option(op, call, name, value)) return false;
		} else if (f->kind == PARTS) {
			if (!take_parts(call, f, value, &call->tensor[call->tensors++])) return false;
		} else if (f->kind == INPUT || f->kind == OUTPUT) {
			call->tensor[call->tensors++] = (tensor_argument){f, value};
		} else if (!scalar(&call->params, f, value)) {
			return false;
		}
	}
	return true;
}

/* A tensor that records gradients would lose them here without a word. */
static bool no_gradients(const operator_call *call, PyObject *object, const char *name) {
	if (!call->track || !exchange_api(object)) return true;
	static PyObject *attribute;
	if (!attribute) attribute = PyUnicode_InternFromString("requires_grad");
	PyObject *needs = PyObject_GetAttr(object, attribute);
	if (!needs) {
		PyErr_Clear();
		return true;
	}
	const bool wanted = needs == Py_True;
	Py_DECREF(needs);
	if (!wanted) return true;
	PyObject *module = helpers();
	PyObject *done = module ? PyObject_CallMethod(module, "refuse_gradients", "s", name) : NULL;
	Py_XDECREF(done);
	return done != NULL;
}

static bool import_parts(operator_call *call, const field *f, PyObject *parts) {
	ingot_tensor *const tensors = (ingot_tensor *)(void *)((char *)&call->params + f->offset);
	const Py_ssize_t count = PyTuple_Size(parts);
	if (count > INGOT_MERGE_PARTS) {
		raise_status(INGOT_INVALID,
		             "%s has %zd parts; at most %d separate ones are allowed, or one array of any number", f->name,
		             count, (int)INGOT_MERGE_PARTS);
		return false;
	}
	for (Py_ssize_t i = 0; i < count; i++) {
		PyObject *const part = PyTuple_GetItem(parts, i);
		char *const name = call->part_names[parts == call->parts[0] ? 0 : 1][i];
		snprintf(name, sizeof call->part_names[0][0], count == 1 ? "%s" : "%s[%d]", f->name, (int)i);
		if (!no_gradients(call, part, name) ||
		    !tensor_import(part, name, false, &tensors[i], &call->where, &call->held))
			return false;
	}
	return true;
}

/* Strides of a compact [B,H,S,D] tensor whose memory is [B,S,H,D]. */
static void set_seq_major(ingot_tensor *tensor) {
	const int64_t heads = tensor->shape[1], rows = tensor->shape[2], size = tensor->shape[3];
	tensor->stride[0] = rows * heads * size;
	tensor->stride[1] = size;
	tensor->stride[2] = heads * size;
	tensor->stride[3] = 1;
}

static int result_index(const operator_row *op, const field *f) {
	for (int i = 0; i < RESULTS_MAX; i++)
		if (op->results[i] && !strcmp(op->results[i], f->name)) return i;
	return -1;
}

/* The first array of the call, whose framework makes what is made; NULL if it has none. */
static PyObject *first_array(const operator_call *call) {
	if (!call->tensors) return NULL;
	PyObject *const object = call->tensor[0].object;
	if (call->tensor[0].field->kind != PARTS) return object;
	return PyTuple_Size(object) ? PyTuple_GetItem(object, 0) : NULL;
}

static bool import_tensors(const operator_row *op, operator_call *call) {
	for (int i = 0; i < call->tensors; i++) {
		const field *const f = call->tensor[i].field;
		PyObject *const object = call->tensor[i].object;
		ingot_tensor *const tensor = (ingot_tensor *)(void *)((char *)&call->params + f->offset);
		if (f->kind == PARTS) {
			if (!import_parts(call, f, object)) return false;
		} else if (!(f->kind == OUTPUT && object == Py_True)) {
			if (!no_gradients(call, object, f->name) ||
			    !tensor_import(object, f->name, f->kind == OUTPUT, tensor, &call->where, &call->held))
				return false;
			const int result = f->kind == OUTPUT ? result_index(op, f) : -1;
			if (result >= 0) {
				Py_INCREF(object);
				call->result[result] = object;
			}
		}
	}
	for (int i = 0; i < call->tensors; i++) {
		const field *const f = call->tensor[i].field;
		if (f->kind != OUTPUT || call->tensor[i].object != Py_True) continue;
		ingot_tensor *const tensor = (ingot_tensor *)(void *)((char *)&call->params + f->offset);
		if (!op->shape) {
			PyErr_Format(PyExc_TypeError, "%s: %s must be an array", op->name, f->name);
			return false;
		}
		if (!op->shape(&call->params, f->name, tensor)) return false;
		if (call->seq_major && tensor->ndim == 4) set_seq_major(tensor);
		if (call->explain) continue;
		const int at = result_index(op, f);
		call->result[at] =
			tensor_empty(first_array(call), f->name, tensor, &call->where, &call->held, &call->convert[at]);
		if (!call->result[at]) return false;
		/* Rows of no sequence are not written: they read as 0. */
		const bool partial = op->run == run_attn_fwd && (call->params.attn_fwd.varlen & 0xff);
		if (partial && !tensor_zero(call->result[at], tensor, &call->where)) return false;
	}
	return true;
}

/* The bytes from the first element to the end of the last one, and whether all of them are elements. */
typedef struct extent {
	const char *from, *last, *end;
	bool dense;
} extent;

static extent extent_of(const ingot_tensor *tensor) {
	const int64_t size = element_size(tensor->dtype);
	int64_t count = 1, last = 0;
	bool repeats = false;
	for (int axis = 0; axis < tensor->ndim; axis++) {
		count *= tensor->shape[axis];
		last += (tensor->shape[axis] - 1) * tensor->stride[axis];
		repeats = repeats || (tensor->shape[axis] > 1 && tensor->stride[axis] <= 0);
	}
	if (!count || !tensor->data) return (extent){NULL, NULL, NULL, false};
	const char *const from = tensor->data;
	return (extent){from, from + last * size, from + (last + 1) * size, !repeats && last + 1 == count};
}

/* Whether the two surely share an element. Slices of one buffer that interleave do not, and need not be told apart here. */
static bool surely_share(const ingot_tensor *a, const ingot_tensor *b) {
	const extent x = extent_of(a), y = extent_of(b);
	if (!x.from || !y.from) return false;
	if (x.from == y.from) return true;
	if (x.dense && ((y.from >= x.from && y.from < x.end) || (y.last >= x.from && y.last < x.end))) return true;
	return y.dense && ((x.from >= y.from && x.from < y.end) || (x.last >= y.from && x.last < y.end));
}

/* Whether an output of merge is its first part's own memory, element for element: parts is that part or an array of all. */
static bool is_first_part(const ingot_tensor *output, const ingot_tensor *parts) {
	const int more = parts->ndim - output->ndim;
	if (parts->data != output->data || parts->dtype != output->dtype || more < 0 || more > 1) return false;
	for (int axis = 0; axis < output->ndim; axis++) {
		if (parts->shape[more + axis] != output->shape[axis]) return false;
		if (output->shape[axis] > 1 && parts->stride[more + axis] != output->stride[axis]) return false;
	}
	return true;
}

/* What a call writes shares no element with what it reads: results would be wrong without a word. */
static bool outputs_apart(const operator_call *call) {
	const char *const params = (const char *)&call->params;
	for (int i = 0; i < call->tensors; i++) {
		const field *const written = call->tensor[i].field;
		if (written->kind != OUTPUT || call->tensor[i].object == Py_True) continue;
		const ingot_tensor *const output = (const void *)(params + written->offset);
		for (int j = 0; j < call->tensors; j++) {
			const field *const read = call->tensor[j].field;
			if (read->kind != INPUT && read->kind != PARTS) continue;
			const ingot_tensor *const inputs = (const void *)(params + read->offset);
			const Py_ssize_t count = read->kind == PARTS ? PyTuple_Size(call->tensor[j].object) : 1;
			for (Py_ssize_t part = 0; part < count; part++) {
				if (!surely_share(output, &inputs[part])) continue;
				if (read->kind == PARTS && part == 0 && is_first_part(output, inputs)) continue;
				raise_status(INGOT_INVALID,
				             "%s shares memory with %s; what a call writes shares no element with its inputs%s",
				             written->name, read->name,
				             read->kind == PARTS ? ", but for a first part of the same type and strides" : "");
				return false;
			}
		}
	}
	return true;
}

static PyObject *explained(const operator_row *op, const operator_call *call, ingot_stream stream) {
	const bool json = !strcmp(call->explain, "json");
	size_t capacity = 0, needed = 0;
	char *text = NULL;
	/* The size may change between the two calls: another thread may have loaded something. */
	for (;;) {
		const ingot_status status =
			op->explain(&call->params, stream, &call->options, json ? INGOT_JSON : INGOT_TEXT, text, capacity, &needed);
		if (status != INGOT_OK) {
			raise_status(status, "%s", ingot_last_error());
			PyMem_Free(text);
			return NULL;
		}
		if (needed <= capacity) break;
		PyMem_Free(text);
		capacity = needed;
		text = PyMem_Malloc(capacity);
		if (!text) return PyErr_NoMemory();
	}
	PyObject *answer = PyUnicode_FromString(text ? text : "");
	PyMem_Free(text);
	return answer;
}

static PyObject *results(operator_call *call) {
	PyObject *made[RESULTS_MAX];
	int count = 0;
	for (int i = 0; i < RESULTS_MAX; i++) {
		if (!call->result[i]) continue;
		if (call->convert[i]) {
			PyObject *converted = PyObject_CallFunctionObjArgs(call->convert[i], call->result[i], NULL);
			if (!converted) return NULL;
			Py_DECREF(call->result[i]);
			call->result[i] = converted;
		}
		made[count++] = call->result[i];
	}
	if (count == 2) return PyTuple_Pack(2, made[0], made[1]);
	PyObject *const only = count ? made[0] : Py_None;
	Py_INCREF(only);
	return only;
}

static void operator_call_begin(const operator_row *op, operator_call *call) {
	memset(call, 0, sizeof *call);
	call->params.struct_size = op->size;
	call->options.struct_size = sizeof call->options;
	call->track = true;
}

/* Runs what is all there. A new reference, or NULL with an exception set. */
static PyObject *launch(const operator_row *op, operator_call *call, bool stream_given) {
	const int32_t kind = call->where.device.device_type;
	const ingot_stream stream = {
		.type = kind == kDLCUDA   ? INGOT_CUDA
	            : kind == kDLROCM ? INGOT_HIP
	                              : INGOT_CPU,
		.device = call->where.device.device_id,
		.handle = (void *)call->where.handle,
	};
	if (call->explain) return explained(op, call, stream);
	framework_memory memory = {.device = call->where.device};
	/* The framework's memory is in the order of its own stream. */
	if (stream.type != INGOT_CPU && !stream_given) {
		PyObject *const first = first_array(call);
		memory.api = first ? exchange_api(first) : NULL;
		if (memory.api && memory.api->managed_tensor_allocator) {
			call->options.alloc = framework_memory_alloc;
			call->options.free = framework_memory_free;
			call->options.alloc_context = &memory;
		}
	}
	PyThreadState *const thread = PyEval_SaveThread();
	const ingot_status status = op->run(&call->params, stream, &call->options);
	PyEval_RestoreThread(thread);
	if (status == INGOT_OK) return results(call);
	raise_status(status, "%s", ingot_last_error());
	return NULL;
}

static PyObject *run(const operator_row *op, PyObject *const *values, Py_ssize_t positional, PyObject *keywords) {
	if (positional) return PyErr_Format(PyExc_TypeError, "%s() takes keywords only", op->name);
	operator_call call;
	operator_call_begin(op, &call);
	PyObject *answer = NULL;
	if (read_arguments(op, &call, values, keywords)) {
		const bool stream_given = call.where.handle_given;
		if (import_tensors(op, &call) && outputs_apart(&call)) answer = launch(op, &call, stream_given);
	}
	operator_call_release(&call);
	return answer;
}

/* ---- the short way of ingot.torch -------------------------------------------------------------------------------------- */

/* Whether PyTorch takes these as they are for its scaled_dot_product_attention without a mask, with four axes and nothing
 * broadcast, and so does Ingot. */
static bool plain_attention(const ingot_attn_fwd_params *p, bool grouped) {
	const ingot_tensor *const q = &p->q, *const k = &p->k, *const v = &p->v;
	if (q->dtype != INGOT_F32 && q->dtype != INGOT_F16 && q->dtype != INGOT_BF16) return false;
	if (k->dtype != q->dtype || v->dtype != q->dtype) return false;
	if (q->ndim != 4 || k->ndim != 4 || v->ndim != 4) return false;
	if (q->stride[3] != 1 || k->stride[3] != 1 || v->stride[3] != 1) return false;
	if (k->shape[0] != q->shape[0] || v->shape[0] != q->shape[0]) return false;
	const int64_t heads = q->shape[1], heads_k = k->shape[1];
	if (v->shape[1] != heads_k || (grouped ? heads_k == 0 || heads % heads_k : heads != heads_k)) return false;
	if (v->shape[2] != k->shape[2] || k->shape[3] != q->shape[3]) return false;
	/* Rows of one element, dense or not, may be the imaginary part of conjugated numbers: the long way sees that. */
	return q->shape[3] > 1 && q->shape[3] <= 512 && v->shape[3] > 1 && v->shape[3] <= 512;
}

/*
 * plain_sdpa(q, k, v, is_causal, scale, enable_gqa, flags, num_threads, like_q): the most frequent call of
 * scaled_dot_product_attention in one step, since Python's own steps would take longer than a small call. The tensors are of
 * a type with DLPack's table, not of a subclass, and record no gradients; scale is None or a finite float other than 0.
 * The output lies in memory as [B, S, H, D], by like_q only where q does, otherwise as [B, H, S, D]. Returns None, and has done nothing, where the call is not this simple.
 */
static PyObject *py_plain_sdpa(PyObject *self, PyObject *const *values, Py_ssize_t count) {
	(void)self;
	if (count != 9) return PyErr_Format(PyExc_TypeError, "plain_sdpa() takes 9 arguments");
	const operator_row *const op = &operators[0];
	operator_call call;
	operator_call_begin(op, &call);
	ingot_attn_fwd_params *const p = &call.params.attn_fwd;
	PyObject *answer = NULL;
	const char *const field_names[] = {"q", "k", "v"};
	ingot_tensor *const tensors[] = {&p->q, &p->k, &p->v};
	for (int i = 0; i < 3; i++) {
		if (exchange_api(values[i]) &&
		    tensor_import(values[i], field_names[i], false, tensors[i], &call.where, &call.held))
			continue;
		PyErr_Clear(); /* the long way says what is wrong */
		goto otherwise;
	}
	PyObject *const causal = values[3], *const grouped = values[5];
	if ((causal != Py_True && causal != Py_False) || (grouped != Py_True && grouped != Py_False)) goto otherwise;
	if (!plain_attention(p, grouped == Py_True)) goto otherwise;
	p->mask = causal == Py_True ? INGOT_MASK_CAUSAL : INGOT_MASK_NONE;
	p->align = INGOT_TOP_LEFT;
	if (values[4] != Py_None) {
		p->softmax_scale = (float)PyFloat_AsDouble(values[4]);
		if (p->softmax_scale == 0) goto otherwise; /* too small for this type; 0 would mean another */
	}
	call.options.flags = (uint32_t)PyLong_AsUnsignedLong(values[6]);
	call.options.num_threads = (int32_t)PyLong_AsLong(values[7]);
	if (PyErr_Occurred()) goto end;
	call.tensor[call.tensors++] = (tensor_argument){&op->fields[0], values[0]};
	rows_of(&p->q, 4, p->v.shape[3], p->q.dtype, &p->out);
	if (values[8] != Py_True || (p->q.stride[1] > 0 && p->q.stride[1] < p->q.stride[2])) set_seq_major(&p->out);
	call.result[0] = tensor_empty(values[0], "out", &p->out, &call.where, &call.held, &call.convert[0]);
	if (call.result[0]) answer = launch(op, &call, false);
	goto end;
otherwise:
	Py_INCREF(Py_None);
	answer = Py_None;
end:
	operator_call_release(&call);
	return answer;
}

/* ---- the module -------------------------------------------------------------------------------------------------------- */

#define ENTRY(index, op)                                                                                           \
	static PyObject *py_##op(PyObject *self, PyObject *const *values, Py_ssize_t positional, PyObject *keywords) { \
		(void)self;                                                                                                \
		return run(&operators[index], values, positional, keywords);                                               \
	}
ENTRY(0, attn_fwd)
ENTRY(1, attn_bwd)
ENTRY(2, attn_merge)
ENTRY(3, kv_append)
ENTRY(4, attn_dropout_mask)
#undef ENTRY

#define METHOD(op) {#op, (PyCFunction)(void (*)(void))py_##op, METH_FASTCALL | METH_KEYWORDS, NULL},
static PyMethodDef methods[] = {
	INGOT_OPERATOR_LIST(METHOD){"plain_sdpa", (PyCFunction)(void (*)(void))py_plain_sdpa, METH_FASTCALL, NULL},
	{NULL, NULL, 0, NULL}};
#undef METHOD

static struct PyModuleDef definition = {
	.m_base = PyModuleDef_HEAD_INIT,
	.m_name = "ingot._core",
	.m_doc = "The library's operators as functions of keywords; see ingot.",
	.m_size = -1,
	.m_methods = methods,
};

PyMODINIT_FUNC PyInit__core(void);
PyMODINIT_FUNC PyInit__core(void) {
	for (int i = 0; i < OPERATORS; i++)
		for (field *f = operators[i].fields; f->kind != END; f++)
			if (!(f->interned = PyUnicode_InternFromString(f->name))) return NULL;
	names = (option_names){
		.backend = PyUnicode_InternFromString("backend"),
		.image_path = PyUnicode_InternFromString("image_path"),
		.flags = PyUnicode_InternFromString("flags"),
		.num_threads = PyUnicode_InternFromString("num_threads"),
		.stream = PyUnicode_InternFromString("stream"),
		.explain = PyUnicode_InternFromString("explain"),
		.track = PyUnicode_InternFromString("track"),
		.seq_major = PyUnicode_InternFromString("seq_major"),
	};
	PyObject *module = PyModule_Create(&definition);
	if (!module) return NULL;
	if (PyModule_AddStringConstant(module, "version", ingot_version_string())) {
		Py_DECREF(module);
		return NULL;
	}
	PyObject *statuses = PyDict_New();
#define STATUS(name, number, text)                               \
	if (statuses) {                                              \
		PyObject *value = PyLong_FromLong(number);               \
		if (value) PyDict_SetItemString(statuses, #name, value); \
		Py_XDECREF(value);                                       \
	}
	INGOT_STATUS_LIST(STATUS)
#undef STATUS
	if (!statuses || PyModule_AddObjectRef(module, "statuses", statuses)) {
		Py_XDECREF(statuses);
		Py_DECREF(module);
		return NULL;
	}
	Py_DECREF(statuses);
	return module;
}
