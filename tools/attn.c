/*
 * `ingot attn`: attention on the tensors of a file. Every prefix of the file (`layer0.q`, `layer5.q`, or plain `q`) is one
 * call forward, and one backward where the file holds the gradient of the output. It says what ran and why, how far the
 * result is from fp64 and from what the file expects, and how fast it was beside what this processor can reach.
 */
#include "choice.h"
#include "oracle.h"
#include "rule.h"
#include "safetensors.h"
#include "tool.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Above this many query-key pairs the fp64 reference takes minutes: it then needs --reference full. */
#define REFERENCE_PAIRS 0x1p28

typedef struct settings {
	const char *mask, *window, *align, *dtype, *backend, *out, *reference, *only;
	double softcap, softmax_scale; /* NaN: not given */
	int64_t threads, repeats;
	bool backward, forward, verbose;
} settings;

/* One prefix of the file: its tensors converted, and the results. Arrays are dense [B,H,S,*]. */
typedef struct layer {
	char prefix[128];
	const safetensors *file;
	int64_t batch, heads_q, heads_k, sq, sk, d, dv;
	int32_t dtype;      /* of q, k, v in the call */
	int32_t file_dtype; /* in the file */
	int64_t *len_q, *len_k;
	ingot_attn_fwd_params fwd;
	ingot_attn_bwd_params bwd;
	bool has_dout;
	bool compared; /* with fp64 */
	bool passed;
	oracle truth;
} layer;

static const struct {
	const char *name;
	int32_t dtype;
} file_dtypes[] = {
	{"F32", INGOT_F32},         {"F16", INGOT_F16},         {"BF16", INGOT_BF16},
	{"F8_E4M3", INGOT_F8_E4M3}, {"F8_E5M2", INGOT_F8_E5M2}, {"I32", INGOT_I32},
	{"I64", INGOT_I64},         {"BOOL", INGOT_BOOL},       {"U8", INGOT_BOOL},
};

static int32_t dtype_of(const char *name) {
	for (size_t i = 0; i < sizeof file_dtypes / sizeof *file_dtypes; i++)
		if (strcmp(file_dtypes[i].name, name) == 0) return file_dtypes[i].dtype;
	return INGOT_NONE;
}

static const safetensors_entry *find(const layer *l, const char *name) {
	char full[192];
	snprintf(full, sizeof full, "%s%s", l->prefix, name);
	return safetensors_find(l->file, full);
}

/* The value of an option, else of the file's metadata, else fallback. */
static const char *setting(const layer *l, const char *given, const char *key, const char *fallback) {
	const char *text = given ? given : safetensors_metadata(l->file, key);
	return text ? text : fallback;
}

static void *aligned_copy(const safetensors_entry *e) {
	void *copy = tool_alloc(e->bytes);
	if (e->bytes) memcpy(copy, e->data, e->bytes);
	return copy;
}

/* The tensor in the wanted type (NONE: as it is in the file). */
static ingot_tensor convert(const safetensors_entry *e, int32_t dtype) {
	const int32_t from = dtype_of(e->dtype);
	if (dtype == INGOT_NONE || dtype == from) return tool_tensor(aligned_copy(e), from, e->ndim, e->shape);
	void *memory = tool_alloc((size_t)e->elements * (size_t)tool_dtype_size(dtype));
	void *source = aligned_copy(e);
	for (int64_t i = 0; i < e->elements; i++) tool_store(memory, i, dtype, tool_load(source, i, from));
	free(source);
	return tool_tensor(memory, dtype, e->ndim, e->shape);
}

static float *floats(const ingot_tensor *t) {
	const int64_t n = tool_elements(t);
	float *values = tool_alloc(sizeof(float) * (size_t)n);
	for (int64_t i = 0; i < n; i++) values[i] = tool_load(t->data, i, t->dtype);
	return values;
}

static bool is_float(int32_t dtype) {
	return dtype != INGOT_NONE && dtype < INGOT_I32;
}

static bool has_shape(const safetensors_entry *e, int ndim, const int64_t *shape) {
	bool same = e->ndim == ndim;
	for (int i = 0; same && i < ndim; i++) same = e->shape[i] == shape[i];
	return same;
}

static bool check_shape(const tool_command *command, const safetensors_entry *e, int ndim, const int64_t *shape) {
	if (has_shape(e, ndim, shape)) return true;
	char text[128] = "";
	for (int i = 0; i < ndim; i++)
		snprintf(text + strlen(text), sizeof text - strlen(text), "%s%lld", i ? "," : "", (long long)shape[i]);
	tool_failed(command, "tensor \"%s\" should have the shape [%s]", e->name, text);
	return false;
}

static bool read_lengths(const tool_command *command, layer *l, const char *name, int64_t most, ingot_tensor *t,
                         int64_t *lengths) {
	const safetensors_entry *e = find(l, name);
	for (int64_t b = 0; b < l->batch; b++) lengths[b] = most;
	if (!e) return true;
	if (!check_shape(command, e, 1, &l->batch)) return false;
	const int32_t dtype = dtype_of(e->dtype);
	if (dtype != INGOT_I32 && dtype != INGOT_I64) {
		tool_failed(command, "tensor \"%s\" has the dtype %s; lengths are I32 or I64", e->name, e->dtype);
		return false;
	}
	int32_t *values = tool_alloc(sizeof(int32_t) * (size_t)l->batch);
	for (int64_t b = 0; b < l->batch; b++) {
		int64_t x;
		int32_t y;
		if (dtype == INGOT_I64) {
			memcpy(&x, (const char *)e->data + 8 * b, 8);
		} else {
			memcpy(&y, (const char *)e->data + 4 * b, 4);
			x = y;
		}
		if (x < 0 || x > most) {
			tool_failed(command, "tensor \"%s\" holds the length %lld; allowed are 0 to %lld", e->name, (long long)x,
			            (long long)most);
			free(values);
			return false;
		}
		values[b] = (int32_t)x;
		lengths[b] = x;
	}
	*t = tool_tensor(values, INGOT_I32, 1, &l->batch);
	return true;
}

static bool read_number(const tool_command *command, const char *text, const char *what, double *value) {
	char *end;
	*value = strtod(text, &end);
	if (end != text && !*end && isfinite(*value)) return true;
	tool_failed(command, "%s \"%s\" is not a finite number", what, text);
	return false;
}

static bool read_bound(const char *text, char **end, int32_t *bound) {
	if (strncmp(text, "inf", 3) == 0) {
		*end = (char *)text + 3;
		*bound = INGOT_UNBOUNDED;
		return true;
	}
	const long long x = strtoll(text, end, 10);
	*bound = (int32_t)x;
	return *end != text && x >= INT32_MIN && x <= INT32_MAX;
}

static bool read_window(const char *text, int32_t *left, int32_t *right) {
	char *end;
	return read_bound(text, &end, left) && *end == ':' && read_bound(end + 1, &end, right) && !*end;
}

/* The place of text in names, which NULL ends; -1: none. */
static int place_of(const char *text, const char *const *names) {
	for (int i = 0; names[i]; i++)
		if (strcmp(names[i], text) == 0) return i;
	return -1;
}

static const char *const masks[] = {
	[INGOT_MASK_NONE] = "none", [INGOT_MASK_CAUSAL] = "causal", [INGOT_MASK_WINDOW] = "window", NULL};
static const char *const aligns[] = {
	[INGOT_ALIGN_UNSET] = "unset", [INGOT_TOP_LEFT] = "top_left", [INGOT_BOTTOM_RIGHT] = "bottom_right", NULL};

/* -1, or the status after a message: the options alone, before any file is read. */
static int check_options(const tool_command *command, const settings *s) {
	int32_t left, right;
	const int32_t dtype = s->dtype ? tool_dtype_parse(s->dtype) : INGOT_F32;
	if (s->mask && place_of(s->mask, masks) < 0)
		return tool_usage(command, "--mask \"%s\"; allowed are none, causal, window", s->mask);
	if (s->align && place_of(s->align, aligns) < 0)
		return tool_usage(command, "--align \"%s\"; allowed are unset, top_left, bottom_right", s->align);
	if (s->window && !read_window(s->window, &left, &right))
		return tool_usage(command, "--window \"%s\"; it is LEFT:RIGHT, each a 32-bit integer or inf", s->window);
	if (s->window && s->mask && strcmp(s->mask, "window") != 0)
		return tool_usage(command, "--window %s needs --mask window, not %s", s->window, s->mask);
	if (s->softcap < 0) return tool_usage(command, "--softcap %g; allowed is 0 (none) or more", s->softcap);
	if (dtype != INGOT_F32 && dtype != INGOT_F16 && dtype != INGOT_BF16)
		return tool_usage(command, "--dtype \"%s\"; allowed are f32, f16, bf16", s->dtype);
	if (strcmp(s->reference, "auto") != 0 && strcmp(s->reference, "full") != 0 && strcmp(s->reference, "none") != 0)
		return tool_usage(command, "--reference \"%s\"; allowed are auto, full, none", s->reference);
	if (s->backend && !tool_backend_known(s->backend)) return tool_usage(command, TOOL_UNKNOWN_BACKEND, s->backend);
	if (s->forward && s->backward) return tool_usage(command, "--forward and --backward exclude each other");
	return -1;
}

/* -1, or the status after a message: without bounds a window would be no mask. */
static int check_window(const tool_command *command, const settings *s, const safetensors *file) {
	const char *mask = s->mask ? s->mask : safetensors_metadata(file, "mask");
	if (s->window || !mask || strcmp(mask, "window") != 0 || safetensors_metadata(file, "window_left") ||
	    safetensors_metadata(file, "window_right"))
		return -1;
	return tool_usage(command, "the mask is a window, and neither --window LEFT:RIGHT nor the file says which");
}

/* Options were checked by check_options; what is wrong here is the file's. */
static bool read_mask(const tool_command *command, const settings *s, layer *l) {
	ingot_attn_fwd_params *p = &l->fwd;
	const char *mask = setting(l, s->window ? "window" : s->mask, "mask", "none");
	p->mask = place_of(mask, masks);
	if (p->mask < 0) {
		tool_failed(command, "the file's mask is \"%s\"; allowed are none, causal, window", mask);
		return false;
	}
	const char *const bound = safetensors_metadata(l->file, "window_left") ? "window_left" : "window_right";
	if (!s->mask && p->mask != INGOT_MASK_WINDOW && safetensors_metadata(l->file, bound)) {
		tool_failed(command, "the file has %s \"%s\", and its mask is \"%s\", not window", bound,
		            safetensors_metadata(l->file, bound), mask);
		return false;
	}
	if (p->mask == INGOT_MASK_WINDOW) {
		char joined[64];
		const char *left = safetensors_metadata(l->file, "window_left"),
				   *right = safetensors_metadata(l->file, "window_right");
		snprintf(joined, sizeof joined, "%s:%s", left ? left : "inf", right ? right : "inf");
		if (!read_window(s->window ? s->window : joined, &p->window_left, &p->window_right)) {
			tool_failed(command, "the file's window is \"%s\"; it is LEFT:RIGHT, each a 32-bit integer or inf", joined);
			return false;
		}
	}
	const char *align = setting(l, s->align, "align", p->mask == INGOT_MASK_NONE ? "unset" : "bottom_right");
	p->align = place_of(align, aligns);
	if (p->align < 0) {
		tool_failed(command, "the file's align is \"%s\"; allowed are unset, top_left, bottom_right", align);
		return false;
	}
	return true;
}

/* Reads q, k, v and what belongs to them; false after a message. */
static bool read_layer(const tool_command *command, const settings *s, layer *l) {
	const char *const names[] = {"q", "k", "v"};
	const safetensors_entry *e[3];
	for (int i = 0; i < 3; i++) {
		e[i] = find(l, names[i]);
		if (!e[i]) {
			tool_failed(command, "the file has no tensor \"%s%s\"", l->prefix, names[i]);
			return false;
		}
		if (e[i]->ndim != 4) {
			tool_failed(command, "tensor \"%s\" has %d axes; [B,H,S,D] has 4", e[i]->name, e[i]->ndim);
			return false;
		}
		if (!is_float(dtype_of(e[i]->dtype))) {
			tool_failed(command, "tensor \"%s\" has the dtype %s; allowed are F32, F16, BF16, F8_E4M3, F8_E5M2",
			            e[i]->name, e[i]->dtype);
			return false;
		}
	}
	l->batch = e[0]->shape[0], l->heads_q = e[0]->shape[1], l->sq = e[0]->shape[2], l->d = e[0]->shape[3];
	l->heads_k = e[1]->shape[1], l->sk = e[1]->shape[2], l->dv = e[2]->shape[3];
	const int64_t k_shape[] = {l->batch, l->heads_k, l->sk, l->d}, v_shape[] = {l->batch, l->heads_k, l->sk, l->dv};
	if (!check_shape(command, e[1], 4, k_shape) || !check_shape(command, e[2], 4, v_shape)) return false;
	if (l->heads_k == 0 ? l->heads_q != 0 : l->heads_q % l->heads_k != 0) {
		tool_failed(command, "%lld query heads are no multiple of %lld key heads", (long long)l->heads_q,
		            (long long)l->heads_k);
		return false;
	}
	l->file_dtype = dtype_of(e[0]->dtype);
	const int32_t wanted = s->dtype ? tool_dtype_parse(s->dtype) : INGOT_NONE;
	l->dtype = wanted == INGOT_NONE ? l->file_dtype : wanted;

	ingot_attn_fwd_params *p = &l->fwd;
	p->struct_size = sizeof *p;
	p->q = convert(e[0], wanted);
	p->k = convert(e[1], wanted);
	p->v = convert(e[2], wanted);
	const int32_t out_dtype = tool_is_8bit(l->dtype) ? INGOT_BF16 : l->dtype;
	const int64_t out_shape[] = {l->batch, l->heads_q, l->sq, l->dv};
	p->out = tool_tensor(tool_alloc((size_t)(l->batch * l->heads_q * l->sq * l->dv) * 4), out_dtype, 4, out_shape);
	p->lse = tool_tensor(tool_alloc((size_t)(l->batch * l->heads_q * l->sq) * 4), INGOT_F32, 3, out_shape);

	l->len_q = tool_alloc(sizeof(int64_t) * (size_t)l->batch);
	l->len_k = tool_alloc(sizeof(int64_t) * (size_t)l->batch);
	if (!read_lengths(command, l, "q_lengths", l->sq, &p->q_lengths, l->len_q) ||
	    !read_lengths(command, l, "k_lengths", l->sk, &p->k_lengths, l->len_k))
		return false;
	p->varlen = INGOT_VARLEN(p->q_lengths.dtype ? INGOT_SIDE(0, INGOT_LENGTH_INDIVIDUAL, 0) : 0,
	                         p->k_lengths.dtype ? INGOT_SIDE(0, INGOT_LENGTH_INDIVIDUAL, 0) : 0, 0);

	const safetensors_entry *bias = find(l, "bias"), *alibi = find(l, "alibi"), *sink = find(l, "sink");
	if (bias) {
		const int32_t dtype = dtype_of(bias->dtype);
		if (bias->ndim != 4 || dtype == INGOT_NONE || dtype == INGOT_I32 || dtype == INGOT_I64) {
			tool_failed(command, "tensor \"%s\" must be [B,Hq,Sq,Sk] (any axis 1) of F32, F16, BF16 or BOOL",
			            bias->name);
			return false;
		}
		p->bias =
			convert(bias, dtype == INGOT_BOOL || dtype == INGOT_F32 || dtype == l->dtype ? INGOT_NONE : out_dtype);
	}
	if (alibi) p->alibi = convert(alibi, INGOT_F32);
	if (sink) p->sink = convert(sink, INGOT_F32);

	double number;
	const char *text;
	if (!isnan(s->softmax_scale)) {
		p->softmax_scale = (float)s->softmax_scale;
	} else if ((text = safetensors_metadata(l->file, "softmax_scale"))) {
		if (!read_number(command, text, "metadata softmax_scale", &number)) return false;
		p->softmax_scale = (float)number;
	}
	if (!isnan(s->softcap)) {
		p->softcap = (float)s->softcap;
	} else if ((text = safetensors_metadata(l->file, "softcap"))) {
		if (!read_number(command, text, "metadata softcap", &number)) return false;
		p->softcap = (float)number;
	}
	if (!read_mask(command, s, l)) return false;

	const safetensors_entry *dout = find(l, "dout");
	if (!dout && s->backward) {
		tool_failed(command, "--backward needs the tensor \"%sdout\", the gradient of the output", l->prefix);
		return false;
	}
	if (!dout || s->forward) return true;
	if (!check_shape(command, dout, 4, out_shape)) return false;
	l->has_dout = true;
	l->bwd = (ingot_attn_bwd_params){
		.struct_size = sizeof l->bwd,
		.varlen = p->varlen,
		.q = p->q,
		.k = p->k,
		.v = p->v,
		.out = p->out,
		.lse = p->lse,
		.dout = convert(dout, out_dtype),
		.bias = p->bias,
		.alibi = p->alibi,
		.sink = p->sink,
		.q_lengths = p->q_lengths,
		.k_lengths = p->k_lengths,
		.softmax_scale = p->softmax_scale,
		.softcap = p->softcap,
		.mask = p->mask,
		.align = p->align,
		.window_left = p->window_left,
		.window_right = p->window_right,
	};
	ingot_tensor *const grads[] = {&l->bwd.dq, &l->bwd.dk, &l->bwd.dv};
	const ingot_tensor *const of[] = {&p->q, &p->k, &p->v};
	for (int i = 0; i < 3; i++)
		*grads[i] = tool_tensor(tool_alloc((size_t)tool_elements(of[i]) * 4), l->dtype, 4, of[i]->shape);
	if (p->bias.dtype && p->bias.dtype != INGOT_BOOL)
		l->bwd.dbias = tool_tensor(tool_alloc((size_t)tool_elements(&p->bias) * 4), INGOT_F32, 4, p->bias.shape);
	if (p->sink.dtype) l->bwd.dsink = tool_tensor(tool_alloc((size_t)l->heads_q * 4), INGOT_F32, 1, &l->heads_q);
	return true;
}

/* The same call as plain arrays, for the pairs, the scales of the gradients and the fp64 figures. */
static void fill_truth(layer *l) {
	const ingot_attn_fwd_params *p = &l->fwd;
	oracle *o = &l->truth;
	*o = (oracle){
		.batch = l->batch,
		.heads_q = l->heads_q,
		.heads_k = l->heads_k,
		.max_q = l->sq,
		.max_k = l->sk,
		.d = l->d,
		.dv = l->dv,
		.len_q = l->len_q,
		.len_k = l->len_k,
		.scale = p->softmax_scale != 0 ? (double)p->softmax_scale : 1 / sqrt((double)l->d),
		.softcap = (double)p->softcap,
		.left = p->mask == INGOT_MASK_WINDOW ? p->window_left : INT32_MAX,
		.right = p->mask == INGOT_MASK_CAUSAL   ? 0
	             : p->mask == INGOT_MASK_WINDOW ? p->window_right
	                                            : INT32_MAX,
		.bottom_right = p->align == INGOT_BOTTOM_RIGHT,
	};
}

static void fill_truth_data(layer *l) {
	const ingot_attn_fwd_params *p = &l->fwd;
	oracle *o = &l->truth;
	o->q = floats(&p->q);
	o->k = floats(&p->k);
	o->v = floats(&p->v);
	if (p->bias.dtype) {
		float *bias = floats(&p->bias);
		o->bias_elements = tool_elements(&p->bias);
		if (p->bias.dtype == INGOT_BOOL)
			for (int64_t i = 0; i < o->bias_elements; i++) bias[i] = bias[i] != 0 ? 0 : -INFINITY;
		o->bias = bias;
		for (int i = 0; i < 4; i++) o->bias_stride[i] = p->bias.shape[i] > 1 ? p->bias.stride[i] : 0;
	}
	if (p->alibi.dtype) {
		float *alibi = tool_alloc(sizeof(float) * (size_t)(l->batch * l->heads_q));
		for (int64_t i = 0; i < l->batch * l->heads_q; i++)
			alibi[i] = tool_load(p->alibi.data, p->alibi.ndim == 1 ? i % l->heads_q : i, INGOT_F32);
		o->alibi = alibi;
	}
	if (p->sink.dtype) o->sink = floats(&p->sink);
	if (l->has_dout) o->dout = floats(&l->bwd.dout);
}

static void free_layer(layer *l) {
	ingot_tensor *const all[] = {&l->fwd.q,         &l->fwd.k,         &l->fwd.v,     &l->fwd.out,
	                             &l->fwd.lse,       &l->fwd.bias,      &l->fwd.alibi, &l->fwd.sink,
	                             &l->fwd.q_lengths, &l->fwd.k_lengths, &l->bwd.dout,  &l->bwd.dq,
	                             &l->bwd.dk,        &l->bwd.dv,        &l->bwd.dbias, &l->bwd.dsink};
	for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]->data);
	const float *const arrays[] = {l->truth.q,     l->truth.k,    l->truth.v,   l->truth.bias,
	                               l->truth.alibi, l->truth.sink, l->truth.dout};
	for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) free((void *)arrays[i]);
	oracle_release(&l->truth);
	free(l->len_q);
	free(l->len_k);
}

/* The values of a dense [B,H,S,width] array in the rows below each sequence's length, in order. */
static double *live(const layer *l, const void *data, int32_t dtype, bool keys, int64_t width, int64_t *count) {
	const int64_t heads = keys ? l->heads_k : l->heads_q, rows = keys ? l->sk : l->sq;
	const int64_t *lengths = keys ? l->len_k : l->len_q;
	double *values = tool_alloc(sizeof(double) * (size_t)(l->batch * heads * rows * width));
	*count = 0;
	for (int64_t b = 0; b < l->batch; b++)
		for (int64_t h = 0; h < heads; h++)
			for (int64_t i = 0; i < lengths[b] * width; i++) {
				const int64_t at = (b * heads + h) * rows * width + i;
				values[(*count)++] = dtype ? (double)tool_load(data, at, dtype) : ((const double *)data)[at];
			}
	return values;
}

/* One compared output: against fp64, and against what the file expects. */
typedef struct compared {
	const char *name;
	const ingot_tensor *got;
	const void *reference; /* fp32, of the fp64 reference */
	const void *yardstick;
	int32_t yardstick_dtype;
	bool keys;
	int64_t width;
	double scale; /* negative: the reference's own */
} compared;

static bool print_compared(const layer *l, const compared *c) {
	int64_t n;
	double *got = live(l, c->got->data, c->got->dtype, c->keys, c->width, &n);
	double *want = live(l, c->reference, INGOT_F32, c->keys, c->width, &n);
	double *yardstick = live(l, c->yardstick, c->yardstick_dtype, c->keys, c->width, &n);
	const rule_kind kind = strcmp(c->name, "lse") == 0 ? RULE_LSE : RULE_VALUE;
	const int32_t dtype = kind == RULE_LSE ? INGOT_F32 : tool_is_8bit(l->dtype) ? INGOT_BF16 : l->dtype;
	const rule_result r = rule_apply(kind, got, want, yardstick, n, dtype, c->scale);
	printf("    %-5s max error %.2e against fp64; textbook %.2e, allowed %.2e: %s\n", c->name, r.error, r.yardstick,
	       r.allowed, r.pass ? "pass" : "FAIL");
	bool good = r.pass;
	if (!r.pass)
		printf("          worst at live element %lld: got %.9g, want %.9g\n", (long long)r.index, r.got, r.want);

	const safetensors_entry *e = find(l, c->name);
	if (e && has_shape(e, c->got->ndim, c->got->shape) && is_float(dtype_of(e->dtype))) {
		void *copy = aligned_copy(e);
		double *expected = live(l, copy, dtype_of(e->dtype), c->keys, c->width, &n);
		double apart = 0;
		for (int64_t i = 0; i < n; i++)
			if (!(expected[i] == got[i]) && !(fabs(expected[i] - got[i]) <= apart)) apart = fabs(expected[i] - got[i]);
		printf("          from the file's %s: %.2e", e->name, apart);
		if (l->dtype == l->file_dtype) {
			/* The expectation is held to the same rule: where it fails, mask or scale are not those it was made with. */
			const rule_result f = rule_apply(kind, expected, want, yardstick, n, dtype, c->scale);
			const bool agrees = apart <= r.allowed + f.allowed;
			printf("; the file's own error against fp64 %.2e: %s\n", f.error,
			       f.pass && agrees ? "pass" : "FAIL (made with another mask, scale or length?)");
			good = good && f.pass && agrees;
		} else {
			printf(", of which most is the conversion to %s\n", tool_dtype_name(l->dtype));
		}
		free(copy);
		free(expected);
	} else if (e) {
		printf("          the file's %s has another shape or type and cannot be compared: FAIL\n", e->name);
		good = false;
	}
	free(got);
	free(want);
	free(yardstick);
	return good;
}

static int by_value(const void *a, const void *b) {
	const double x = *(const double *)a, y = *(const double *)b;
	return x < y ? -1 : x > y;
}

/* Runs the call until the repeats or 0.3 s are over, and prints time and rate. */
static ingot_status time_call(const layer *l, tool_operator op, const void *params, const settings *s, double flops) {
	ingot_options options = tool_options(s->backend, (int32_t)s->threads);
	uint64_t bytes = 0;
	ingot_status status = tool_workspace(op, params, &options, &bytes);
	if (status != INGOT_OK) return status;
	options.workspace = tool_alloc_aligned(256, bytes);
	options.workspace_size = bytes;
	status = tool_prepare(op, params, &options);
	int32_t threads = (int32_t)s->threads;
	if (threads == 0) ingot_device_describe((ingot_stream){0}, NULL, 0, NULL, 0, &threads);
	const char *name;
	double peak = tool_peak(l->dtype, threads, &name);
	enum { MOST = 10000 };
	double *times = tool_alloc(sizeof(double) * MOST);
	int count = 0;
	const double until = tool_now() + 0.3;
	while (status == INGOT_OK && count < MOST && (s->repeats ? count < s->repeats : count < 3 || tool_now() < until)) {
		const double begin = tool_now();
		status = tool_run(op, params, &options);
		times[count++] = tool_now() - begin;
	}
	if (status == INGOT_OK) {
		peak = fmax(peak, tool_peak(l->dtype, threads, &name));
		qsort(times, (size_t)count, sizeof *times, by_value);
		printf("    time  min %.3f ms, median %.3f ms of %d; %.1f GFLOP/s", times[0] * 1e3, times[count / 2] * 1e3,
		       count, flops / times[0] * 1e-9);
		if (peak > 0)
			printf(", %.0f %% of this processor's %.0f (%s, %d thread%s, measured now)", flops / times[0] * 1e-7 / peak,
			       peak, name, threads, threads == 1 ? "" : "s");
		printf("\n");
	}
	free(times);
	free(options.workspace);
	return status;
}

/* The same call on another implementation, into memory of its own. */
static ingot_status run_forward_on(const layer *l, const char *backend, int32_t out_dtype, void **out, float **lse) {
	ingot_attn_fwd_params p = l->fwd;
	p.out.dtype = out_dtype;
	p.out.data = *out = tool_alloc((size_t)tool_elements(&p.out) * 4);
	p.lse.data = *lse = tool_alloc((size_t)tool_elements(&p.lse) * 4);
	const ingot_options options = tool_options(backend, 0);
	return ingot_attn_fwd(&p, (ingot_stream){0}, &options);
}

static ingot_status run_backward_on(const layer *l, const char *backend, int32_t dtype, void *out, int32_t out_dtype,
                                    float *lse, ingot_attn_bwd_params *p) {
	*p = l->bwd;
	p->out.data = out;
	p->out.dtype = out_dtype;
	p->lse.data = lse;
	ingot_tensor *const grads[] = {&p->dq, &p->dk, &p->dv, &p->dbias, &p->dsink};
	for (int i = 0; i < 5; i++) {
		if (grads[i]->dtype == INGOT_NONE) continue;
		if (i < 3) grads[i]->dtype = dtype;
		grads[i]->data = tool_alloc((size_t)tool_elements(grads[i]) * 4);
	}
	const ingot_options options = tool_options(backend, 0);
	return ingot_attn_bwd(p, (ingot_stream){0}, &options);
}

static void free_grads(ingot_attn_bwd_params *p) {
	ingot_tensor *const grads[] = {&p->dq, &p->dk, &p->dv, &p->dbias, &p->dsink};
	for (int i = 0; i < 5; i++) free(grads[i]->data);
}

static bool refused(const tool_command *command, const layer *l, const char *what, ingot_status status) {
	tool_failed(command, "%s%s: %s: %s", l->prefix, what, ingot_status_name(status), ingot_last_error());
	return false;
}

static void describe(const layer *l) {
	const ingot_attn_fwd_params *p = &l->fwd;
	const size_t length = strlen(l->prefix);
	printf("%.*s: q [%lld,%lld,%lld,%lld], k [%lld,%lld,%lld,%lld], v [..,%lld], %s", length ? (int)length - 1 : 4,
	       length ? l->prefix : "attn", (long long)l->batch, (long long)l->heads_q, (long long)l->sq, (long long)l->d,
	       (long long)l->batch, (long long)l->heads_k, (long long)l->sk, (long long)l->d, (long long)l->dv,
	       tool_dtype_name(l->dtype));
	if (l->dtype != l->file_dtype) printf(" (from %s)", tool_dtype_name(l->file_dtype));
	if (p->q_lengths.dtype) printf(", q_lengths");
	if (p->k_lengths.dtype) printf(", k_lengths");
	if (p->mask == INGOT_MASK_CAUSAL) printf(", causal");
	if (p->mask == INGOT_MASK_WINDOW) {
		const int32_t bounds[] = {p->window_left, p->window_right};
		for (int i = 0; i < 2; i++) {
			printf(i ? ":" : ", window ");
			if (bounds[i] == INGOT_UNBOUNDED) printf("inf");
			else printf("%d", bounds[i]);
		}
	}
	if (p->mask != INGOT_MASK_NONE && p->align != INGOT_ALIGN_UNSET)
		printf(" (%s)", p->align == INGOT_TOP_LEFT ? "top_left" : "bottom_right");
	if (p->bias.dtype) printf(", bias");
	if (p->alibi.dtype) printf(", alibi");
	if (p->sink.dtype) printf(", sink");
	if (p->softcap > 0) printf(", softcap %g", (double)p->softcap);
	printf(", softmax_scale %g\n", l->truth.scale);
}

/* Sets passed. False where the calls did not all run, which has been printed. */
static bool run_layer(const tool_command *command, const settings *s, layer *l) {
	fill_truth(l);
	describe(l);
	const ingot_options options = tool_options(s->backend, (int32_t)s->threads);
	const double pairs = oracle_pairs(&l->truth);
	const bool full = strcmp(s->reference, "full") == 0;
	const bool reference = l->compared = full || (strcmp(s->reference, "auto") == 0 && pairs <= REFERENCE_PAIRS);

	printf("  forward: ");
	choice_print(TOOL_FWD, &l->fwd, &options, s->verbose);
	ingot_status status = ingot_attn_fwd(&l->fwd, (ingot_stream){0}, &options);
	if (status != INGOT_OK) return refused(command, l, "forward", status);
	bool good = true;
	void *reference_out = NULL, *textbook_out = NULL;
	float *reference_lse = NULL, *textbook_lse = NULL;
	const int32_t out_dtype = l->fwd.out.dtype;
	if (reference) {
		fill_truth_data(l);
		if (l->has_dout) oracle_run(&l->truth);
		status = run_forward_on(l, "reference/attn_fwd_reference_f64", INGOT_F32, &reference_out, &reference_lse);
		if (status == INGOT_OK)
			status = run_forward_on(l, "reference/attn_fwd_reference", out_dtype, &textbook_out, &textbook_lse);
		if (status != INGOT_OK) return refused(command, l, "reference", status);
		good &= print_compared(
			l, &(compared){"out", &l->fwd.out, reference_out, textbook_out, out_dtype, false, l->dv, -1});
		good &=
			print_compared(l, &(compared){"lse", &l->fwd.lse, reference_lse, textbook_lse, INGOT_F32, false, 1, -1});
	} else {
		printf("    not compared: --reference %s with %.3g query-key pairs\n", s->reference, pairs);
	}
	status = time_call(l, TOOL_FWD, &l->fwd, s, 2 * pairs * (double)(l->d + l->dv));
	if (status != INGOT_OK) return refused(command, l, "forward", status);

	if (l->has_dout) {
		printf("  backward: ");
		choice_print(TOOL_BWD, &l->bwd, &options, s->verbose);
		status = ingot_attn_bwd(&l->bwd, (ingot_stream){0}, &options);
		if (status != INGOT_OK) return refused(command, l, "backward", status);
		if (reference) {
			ingot_attn_bwd_params exact, textbook;
			status = run_backward_on(l, "reference/attn_bwd_reference_f64", INGOT_F32, reference_out, INGOT_F32,
			                         reference_lse, &exact);
			if (status == INGOT_OK)
				status = run_backward_on(l, "reference/attn_bwd_reference", l->dtype, textbook_out, out_dtype,
				                         textbook_lse, &textbook);
			if (status != INGOT_OK) return refused(command, l, "reference", status);
			const oracle *o = &l->truth;
			good &= print_compared(
				l, &(compared){"dq", &l->bwd.dq, exact.dq.data, textbook.dq.data, l->dtype, false, l->d, o->dq_scale});
			good &= print_compared(
				l, &(compared){"dk", &l->bwd.dk, exact.dk.data, textbook.dk.data, l->dtype, true, l->d, o->dk_scale});
			good &= print_compared(
				l, &(compared){"dv", &l->bwd.dv, exact.dv.data, textbook.dv.data, l->dtype, true, l->dv, o->dv_scale});
			free_grads(&exact);
			free_grads(&textbook);
		}
		status = time_call(l, TOOL_BWD, &l->bwd, s, 2 * pairs * (double)(3 * l->d + 2 * l->dv));
		if (status != INGOT_OK) return refused(command, l, "backward", status);
	}
	free(reference_out);
	free(reference_lse);
	free(textbook_out);
	free(textbook_lse);
	l->passed = good;
	return true;
}

static const char *file_dtype_name(int32_t dtype) {
	for (size_t i = 0; i < sizeof file_dtypes / sizeof *file_dtypes; i++)
		if (file_dtypes[i].dtype == dtype) return file_dtypes[i].name;
	return "F32";
}

static int write_results(const tool_command *command, const settings *s, const layer *layers, int count,
                         const safetensors *file) {
	safetensors_entry *entries = tool_alloc(sizeof *entries * (size_t)count * 7);
	char *names = tool_alloc((size_t)count * 7 * 160);
	int n = 0;
	for (int i = 0; i < count; i++) {
		const layer *l = &layers[i];
		const struct {
			const char *name;
			const ingot_tensor *t;
		} results[] = {{"out", &l->fwd.out}, {"lse", &l->fwd.lse},     {"dq", &l->bwd.dq},      {"dk", &l->bwd.dk},
		               {"dv", &l->bwd.dv},   {"dbias", &l->bwd.dbias}, {"dsink", &l->bwd.dsink}};
		for (size_t r = 0; r < sizeof results / sizeof *results; r++) {
			const ingot_tensor *t = results[r].t;
			if (t->dtype == INGOT_NONE) continue;
			char *name = names + 160 * n;
			snprintf(name, 160, "%s%s", l->prefix, results[r].name);
			safetensors_entry *e = &entries[n++];
			*e = (safetensors_entry){.name = name,
			                         .dtype = file_dtype_name(t->dtype),
			                         .ndim = t->ndim,
			                         .data = t->data,
			                         .bytes = (uint64_t)tool_elements(t) * (uint64_t)tool_dtype_size(t->dtype)};
			memcpy(e->shape, t->shape, sizeof(int64_t) * (size_t)t->ndim);
		}
	}
	char error[SAFETENSORS_ERROR];
	const bool good = safetensors_write(s->out, entries, n, file->metadata, error);
	free(entries);
	free(names);
	if (!good) return tool_failed(command, "%s: %s", s->out, error);
	printf("wrote %d tensors to %s\n", n, s->out);
	return TOOL_OK;
}

/* The prefixes of the file, each once, in the order of their q. */
static int find_layers(const safetensors *file, const char *only, layer *layers, int most) {
	int count = 0;
	for (int i = 0; i < file->count && count < most; i++) {
		const char *name = file->entries[i].name;
		const size_t length = strlen(name);
		if (length == 0 || name[length - 1] != 'q' || (length > 1 && name[length - 2] != '.')) continue;
		if (length - 1 >= sizeof layers->prefix || (only && strncmp(name, only, strlen(only)) != 0)) continue;
		layer *l = &layers[count++];
		*l = (layer){.file = file};
		memcpy(l->prefix, name, length - 1);
	}
	return count;
}

/* Names the tensors that no call read or was compared with: a misspelt one would else change the result unseen. */
static void print_unused(const settings *s, const layer *layers, int count, const safetensors *file) {
	static const char *const forward[] = {"q",         "k",         "v",   "bias", "alibi", "sink",
	                                      "q_lengths", "k_lengths", "out", "lse",  NULL};
	static const char *const backward[] = {"dout", "dq", "dk", "dv", NULL};
	int unused = 0;
	for (int e = 0; e < file->count; e++) {
		const char *name = file->entries[e].name;
		bool used = s->only && strncmp(name, s->only, strlen(s->only)) != 0;
		for (int i = 0; i < count && !used; i++) {
			const layer *l = &layers[i];
			const size_t length = strlen(l->prefix);
			if (strncmp(name, l->prefix, length) != 0) continue;
			used = place_of(name + length, forward) >= 0 ||
			       ((l->has_dout || s->forward) && place_of(name + length, backward) >= 0);
		}
		if (!used) printf("%s%s", unused++ ? ", " : "not used: ", name);
	}
	if (unused) printf("\n");
}

/* -1, or the status after a message: before anything is computed, whether the results could be written there. */
static int check_out(const tool_command *command, const char *in, const char *out) {
	struct stat a, b;
	if (stat(out, &b) == 0 && stat(in, &a) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino)
		return tool_usage(command, "--out %s is the file that is read", out);
	return tool_check_writable(command, "--out", out);
}

static int run(const tool_command *command, int argc, char **argv) {
	settings s = {.softcap = NAN, .softmax_scale = NAN, .reference = "auto"};
	const tool_option options[] = {
		{"--mask", "MASK", "none, causal or window; else the file's metadata, else none", TOOL_TEXT, &s.mask, 0, 0},
		{"--window", "LEFT:RIGHT", "keys a row sees before and after its own; inf for no bound", TOOL_TEXT, &s.window,
	     0, 0},
		{"--align", "CORNER", "top_left, bottom_right or unset: where the mask's diagonal is (bottom_right)", TOOL_TEXT,
	     &s.align, 0, 0},
		{"--softmax-scale", "X", "else the file's, else 1/sqrt(D)", TOOL_NUMBER, &s.softmax_scale, 0, 0},
		{"--softcap", "X", "scores become X * tanh(score / X); 0 for none", TOOL_NUMBER, &s.softcap, 0, 0},
		{"--dtype", "TYPE", "convert q, k, v to f32, f16 or bf16 first", TOOL_TEXT, &s.dtype, 0, 0},
		{"--backend", "NAME", "force a family, an implementation or a variant (see ingot list)", TOOL_TEXT, &s.backend,
	     0, 0},
		{"--threads", "N", "threads to use; 0: all this process may use", TOOL_INTEGER, &s.threads, 0, 1024},
		{"--forward", NULL, "no backward, even where the file has the gradient of out", TOOL_FLAG, &s.forward, 0, 0},
		{"--backward", NULL, "fail where the file lacks the gradient of out", TOOL_FLAG, &s.backward, 0, 0},
		{"--only", "PREFIX", "only tensors whose name begins so (layer5)", TOOL_TEXT, &s.only, 0, 0},
		{"--out", "FILE", "write out, lse and gradients to another safetensors file, whole or not at all", TOOL_TEXT,
	     &s.out, 0, 0},
		{"--repeats", "N", "calls to time; 0: as many as fit in 0.3 s", TOOL_INTEGER, &s.repeats, 0, 10000},
		{"--reference", "HOW", "auto, full or none: compare with fp64 (auto: up to 2^28 pairs)", TOOL_TEXT,
	     &s.reference, 0, 0},
		{"--verbose", NULL, "list every candidate with its refusal or its figure", TOOL_FLAG, &s.verbose, 0, 0},
		{0},
	};
	const char *words[1];
	int count;
	int status = tool_parse(command, options, argc, argv, words, 1, &count);
	if (status >= 0) return status;
	if (count == 0) return tool_usage(command, "no file given; usage: ingot attn %s", command->usage);
	if ((status = check_options(command, &s)) >= 0) return status;

	safetensors file;
	if (!safetensors_open(words[0], &file)) return tool_failed(command, "%s: %s", words[0], file.error);
	if ((status = check_window(command, &s, &file)) >= 0 ||
	    (s.out && (status = check_out(command, words[0], s.out)) >= 0)) {
		safetensors_release(&file);
		return status;
	}
	enum { MOST = 256 };
	layer *layers = tool_alloc(sizeof *layers * MOST);
	const int found = find_layers(&file, s.only, layers, MOST);
	if (found == 0) {
		tool_failed(command, "%s: no tensor named q or PREFIX.q%s%s", words[0], s.only ? " begins with " : "",
		            s.only ? s.only : "");
	} else {
		const char *source = safetensors_metadata(&file, "source");
		printf("%s: %d tensors%s%s\n", words[0], file.count, source ? "; " : "", source ? source : "");
	}
	int ran = 0, judged = 0;
	bool good = found > 0;
	for (int i = 0; i < found; i++) {
		layer *l = &layers[i];
		if (!read_layer(command, &s, l)) break;
		if (!run_layer(command, &s, l)) continue;
		ran++;
		judged += l->compared;
		good &= l->passed;
	}
	good &= ran == found;
	if (s.out && found && ran == found) good &= write_results(command, &s, layers, found, &file) == TOOL_OK;
	else if (s.out) tool_failed(command, "%s was not written: not every call ran", s.out);
	if (found > 0) {
		print_unused(&s, layers, found, &file);
		if (!good) printf("FAILED\n");
		else if (judged == found) printf("all results pass\n");
		else printf("every call ran; %d of %d were compared with fp64\n", judged, found);
	}
	for (int i = 0; i < found; i++) free_layer(&layers[i]);
	free(layers);
	safetensors_release(&file);
	return good ? TOOL_OK : TOOL_FAILED;
}

const tool_command tool_attn = {
	.name = "attn",
	.usage = "FILE.safetensors [options]",
	.summary = "run attention on the tensors of a file and compare with fp64",
	.text =
		"The file holds q [B,Hq,Sq,D], k [B,Hk,Sk,D] and v [B,Hk,Sk,Dv], plain or under prefixes (layer0.q), and may hold\n"
		"bias [B,Hq,Sq,Sk], alibi, sink, q_lengths and k_lengths [B], dout; and what is expected: out, lse, dq, dk, dv.\n"
		"Its metadata may give softmax_scale, softcap, mask, window_left, window_right, align and source.\n"
		"A result passes when its error against fp64 is at most twice that of the textbook algorithm in the same type. A result\n"
		"of another shape or type than the file expects fails; tensors of the file that nothing reads are named.\n\n"
		"examples:\n"
		"  ingot attn examples/minilm.safetensors\n"
		"  ingot attn examples/minilm.safetensors --dtype bf16 --backend x86 --threads 1\n"
		"  ingot attn layer.safetensors --mask window --window 128:0 --out result.safetensors\n",
	.run = run,
};
