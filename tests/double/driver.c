/*
 * The library on a driver that can be asked to fail: the double of double.h, with the real images of a pack. Every launch is
 * held against what its image says of itself, every driver call fails once with every error, and nothing may crash, leak, stay
 * behind, or go without a sentence. It stands beside the tests on a real GPU, tests/device: no kernel runs here.
 *
 * Needs a pack of sm_90a in INGOT_IMAGE_PATH; ends with status 77 without one. Each part runs in a process of its own, because
 * a process opens the driver once.
 */
#define INGOT_EXPERIMENTAL
#include "../api/support_api.h"
#include "double.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* In a child process: what is wrong goes to stderr, and the child is done. exit() lets the leak checker look. */
#define CHECK(condition, ...)                                               \
	do {                                                                    \
		if (!(condition)) {                                                 \
			fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
			fprintf(stderr, __VA_ARGS__);                                   \
			fputc('\n', stderr);                                            \
			exit(1);                                                        \
		}                                                                   \
	} while (0)

static char pack_path[4096];

static int finish(void) {
	exit(0);
}

static void in_child(int (*child)(void *), void *argument) {
	assert_int_equal(run_fork(child, argument, 300), 0);
}

/* ---- calls: one of every operator, over device memory that the host cannot touch --------------------------------------------- */

typedef struct call {
	const char *op;
	const char *backend; /* NULL: as it is chosen */
	union {
		ingot_attn_fwd_params fwd;
		ingot_attn_bwd_params bwd;
		ingot_attn_merge_params merge;
		ingot_kv_append_params append;
		ingot_attn_dropout_mask_params mask;
	} params;
	const void *pointers[8]; /* data that the kernel must be given */
} call;

typedef enum verb { RUN, PREPARE, WORKSPACE } verb;

static uint64_t workspace_bytes; /* what WORKSPACE said */

static ingot_status make(const call *c, verb v, ingot_stream stream, const ingot_options *options) {
#define VERBS(name)                                                                 \
	if (!strcmp(c->op, #name)) {                                                    \
		const void *const params = &c->params;                                      \
		if (v == RUN) return ingot_##name(params, stream, options);                 \
		if (v == PREPARE) return ingot_##name##_prepare(params, stream, options);   \
		return ingot_##name##_workspace(params, stream, options, &workspace_bytes); \
	}
	INGOT_OPERATOR_LIST(VERBS)
#undef VERBS
	abort();
}

static ingot_tensor on_device(int32_t dtype, int ndim, const int64_t *shape) {
	static char *memory;
	static _Atomic size_t used;
	enum { ROOM = 1 << 28 };
	if (!memory) memory = double_memory(ROOM);
	ingot_tensor t = tensor(NULL, dtype, ndim, shape);
	const size_t bytes = ((size_t)elements(&t) * element_size(dtype) + 255) / 256 * 256,
				 at = atomic_fetch_add(&used, bytes);
	if (at + bytes > ROOM) abort();
	t.data = memory + at;
	return t;
}
#define DEVICE_TENSOR(dtype, ...) \
	on_device((dtype), (int)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (const int64_t[]){__VA_ARGS__})

static call forward(const char *backend) {
	call c = {.op = "attn_fwd", .backend = backend};
	ingot_attn_fwd_params *const p = &c.params.fwd;
	*p = (ingot_attn_fwd_params){.struct_size = sizeof *p,
	                             .q = DEVICE_TENSOR(INGOT_BF16, 2, 4, 130, 64),
	                             .k = DEVICE_TENSOR(INGOT_BF16, 2, 2, 130, 64),
	                             .v = DEVICE_TENSOR(INGOT_BF16, 2, 2, 130, 64),
	                             .out = DEVICE_TENSOR(INGOT_BF16, 2, 4, 130, 64),
	                             .lse = DEVICE_TENSOR(INGOT_F32, 2, 4, 130),
	                             .mask = INGOT_MASK_CAUSAL,
	                             .align = INGOT_TOP_LEFT};
	const void *const pointers[] = {p->q.data, p->k.data, p->v.data, p->out.data, p->lse.data};
	memcpy(c.pointers, pointers, sizeof pointers);
	return c;
}

/* So few rows of so many keys that these are split. */
static call decoding(const char *backend) {
	call c = {.op = "attn_fwd", .backend = backend};
	ingot_attn_fwd_params *const p = &c.params.fwd;
	*p = (ingot_attn_fwd_params){.struct_size = sizeof *p,
	                             .q = DEVICE_TENSOR(INGOT_BF16, 2, 4, 1, 64),
	                             .k = DEVICE_TENSOR(INGOT_BF16, 2, 2, 2048, 64),
	                             .v = DEVICE_TENSOR(INGOT_BF16, 2, 2, 2048, 64),
	                             .out = DEVICE_TENSOR(INGOT_BF16, 2, 4, 1, 64),
	                             .lse = DEVICE_TENSOR(INGOT_F32, 2, 4, 1)};
	const void *const pointers[] = {p->q.data, p->k.data, p->v.data, p->out.data, p->lse.data};
	memcpy(c.pointers, pointers, sizeof pointers);
	return c;
}

static call backward(const char *backend) {
	const call f = forward(backend);
	call c = {.op = "attn_bwd", .backend = backend};
	ingot_attn_bwd_params *const p = &c.params.bwd;
	*p = (ingot_attn_bwd_params){.struct_size = sizeof *p,
	                             .q = f.params.fwd.q,
	                             .k = f.params.fwd.k,
	                             .v = f.params.fwd.v,
	                             .out = f.params.fwd.out,
	                             .lse = f.params.fwd.lse,
	                             .dout = DEVICE_TENSOR(INGOT_BF16, 2, 4, 130, 64),
	                             .dq = DEVICE_TENSOR(INGOT_BF16, 2, 4, 130, 64),
	                             .dk = DEVICE_TENSOR(INGOT_BF16, 2, 2, 130, 64),
	                             .dv = DEVICE_TENSOR(INGOT_BF16, 2, 2, 130, 64),
	                             .mask = INGOT_MASK_CAUSAL,
	                             .align = INGOT_TOP_LEFT};
	const void *const pointers[] = {p->q.data,    p->k.data,  p->v.data,  p->out.data,
	                                p->dout.data, p->dq.data, p->dk.data, p->dv.data};
	memcpy(c.pointers, pointers, sizeof pointers);
	return c;
}

static call merging(const char *backend) {
	call c = {.op = "attn_merge", .backend = backend};
	ingot_attn_merge_params *const p = &c.params.merge;
	*p = (ingot_attn_merge_params){.struct_size = sizeof *p,
	                               .out = DEVICE_TENSOR(INGOT_F32, 2, 4, 16, 64),
	                               .lse = DEVICE_TENSOR(INGOT_F32, 2, 4, 16)};
	c.pointers[0] = p->out.data;
	for (int i = 0; i < 3; i++) {
		p->out_parts[i] = DEVICE_TENSOR(INGOT_F32, 2, 4, 16, 64);
		p->lse_parts[i] = DEVICE_TENSOR(INGOT_F32, 2, 4, 16);
		c.pointers[1 + i] = p->out_parts[i].data;
		c.pointers[4 + i] = p->lse_parts[i].data;
	}
	return c;
}

static call appending(const char *backend) {
	call c = {.op = "kv_append", .backend = backend};
	ingot_kv_append_params *const p = &c.params.append;
	*p = (ingot_kv_append_params){.struct_size = sizeof *p,
	                              .varlen = INGOT_VARLEN(0, INGOT_SIDE(0, INGOT_LENGTH_INDIVIDUAL, 0), 0),
	                              .k_new = DEVICE_TENSOR(INGOT_BF16, 2, 2, 5, 64),
	                              .v_new = DEVICE_TENSOR(INGOT_BF16, 2, 2, 5, 64),
	                              .k = DEVICE_TENSOR(INGOT_BF16, 2, 2, 64, 64),
	                              .v = DEVICE_TENSOR(INGOT_BF16, 2, 2, 64, 64),
	                              .k_lengths = DEVICE_TENSOR(INGOT_I32, 2)};
	const void *const pointers[] = {p->k_new.data, p->v_new.data, p->k.data, p->v.data, p->k_lengths.data};
	memcpy(c.pointers, pointers, sizeof pointers);
	return c;
}

static call masking(const char *backend) {
	call c = {.op = "attn_dropout_mask", .backend = backend};
	ingot_attn_dropout_mask_params *const p = &c.params.mask;
	*p = (ingot_attn_dropout_mask_params){.struct_size = sizeof *p,
	                                      .dropout_p = 0.5f,
	                                      .mask = DEVICE_TENSOR(INGOT_BOOL, 2, 4, 32, 32),
	                                      .dropout_seed_ptr = DEVICE_TENSOR(INGOT_U64, 1)};
	const void *const pointers[] = {p->mask.data, p->dropout_seed_ptr.data};
	memcpy(c.pointers, pointers, sizeof pointers);
	return c;
}

static call call_of(const char *op, const char *backend) {
	return backend && strstr(backend, "_decode") ? decoding(backend)
	       : !strcmp(op, "attn_fwd")             ? forward(backend)
	       : !strcmp(op, "attn_bwd")             ? backward(backend)
	       : !strcmp(op, "attn_merge")           ? merging(backend)
	       : !strcmp(op, "kv_append")            ? appending(backend)
	                                             : masking(backend);
}

static ingot_stream on(int device, void *handle) {
	return (ingot_stream){INGOT_CUDA, device, handle};
}

static ingot_options options_of(const call *c) {
	return (ingot_options){.struct_size = sizeof(ingot_options), .backend = c->backend};
}

/* ---- every launch ----------------------------------------------------------------------------------------------------------- */

static bool has_word(const double_event *e, const void *pointer) {
	for (size_t at = 0; at + sizeof pointer <= e->arguments_size; at += sizeof pointer)
		if (!memcmp(e->arguments + at, &pointer, sizeof pointer)) return true;
	return false;
}

/* A pack's layout, as docs/images.md and pack.h have it: names of implementation and variant, kernels, then the object's place. */
enum { INDEX = 4096, ENTRY = 512, NAME = 56, KERNEL = 72, KERNELS = 4 };

/* The bytes of arguments that the pack states for a kernel. */
static uint32_t stated_bytes(const char *implementation, const char *kernel) {
	FILE *const f = fopen(pack_path, "rb");
	CHECK(f && !fseek(f, INDEX, SEEK_SET), "%s", pack_path);
	char entry[ENTRY];
	uint32_t bytes = 0;
	while (!bytes && fread(entry, sizeof entry, 1, f) == 1)
		for (int k = 0; k < KERNELS && !strcmp(entry, implementation); k++) {
			const char *const at = entry + 2 * NAME + k * KERNEL;
			if (!strcmp(at, kernel)) memcpy(&bytes, at + KERNEL - sizeof bytes, sizeof bytes);
		}
	fclose(f);
	return bytes;
}

/* What was queued is the implementation's kernels in their order, each on this stream in this context, with the caller's data;
 * and the workspace, when it is the driver's, is taken before them and given back after. */
static void check_events(const call *c, const ingot_implementation *impl, int index, ingot_stream stream, void *context,
                         const void *workspace, uint64_t bytes) {
	const bool own = bytes && !workspace;
	const int n = double_events(), first = own, last = own ? n - 1 : n;
	CHECK(!*double_faults(), "%s: %s", impl->name, double_faults());
	CHECK(last > first, "%s: %d events", impl->name, n);
	if (own) {
		const double_event alloc = double_event_at(0), release = double_event_at(n - 1);
		CHECK(alloc.kind == DOUBLE_ALLOC && alloc.bytes == bytes && alloc.stream == stream.handle, "%s", impl->name);
		CHECK(release.kind == DOUBLE_FREE && release.memory == alloc.memory && release.stream == stream.handle, "%s",
		      impl->name);
		workspace = alloc.memory;
	}
	int32_t at = 0;
	uint64_t seen = 0;
	for (int i = first; i < last; i++) {
		const double_event e = double_event_at(i);
		CHECK(e.kind == DOUBLE_LAUNCH && e.stream == stream.handle, "%s: event %d", impl->name, i);
		CHECK(e.context == context && e.device == stream.device, "%s: launch %d is in another context", impl->name, i);
		/* the kernels of an image are listed in the order of its steps */
		bool found = false;
		for (int32_t v = 0; v < impl->variant_count && !found; v++) {
			ingot_variant variant;
			CHECK(!ingot_variant_get(index, v, &variant), "%s", ingot_last_error());
			for (int32_t k = at; variant.kernels[k] && !found; k++)
				if ((found = !strcmp(variant.kernels[k], e.kernel))) at = k + 1;
		}
		CHECK(found, "%s: kernel %s is out of its order", impl->name, e.kernel);
		CHECK(e.arguments_size == stated_bytes(impl->name, e.kernel), "%s: the image takes %zu bytes, its pack says %u",
		      e.kernel, e.arguments_size, stated_bytes(impl->name, e.kernel));
		if (bytes)
			CHECK(!memcmp(e.arguments, &workspace, sizeof workspace), "%s: %s has another workspace", impl->name,
			      e.kernel);
		for (int p = 0; p < 8; p++)
			if (c->pointers[p] && has_word(&e, c->pointers[p])) seen |= 1u << p;
	}
	for (int p = 0; p < 8; p++)
		CHECK(!c->pointers[p] || seen >> p & 1, "%s: pointer %d is given to no kernel", impl->name, p);
}

static bool only_warm_calls(bool own_memory) {
	static const char *const cold[] = {"cuLibrary", "cuKernel", "cuDevice", "cuInit"};
	for (long i = 0; i < double_calls(); i++) {
		for (size_t j = 0; j < sizeof cold / sizeof *cold; j++)
			if (!strncmp(double_call(i), cold[j], strlen(cold[j]))) return false;
		if (!own_memory && !strncmp(double_call(i), "cuMem", 5)) return false;
	}
	return true;
}

static int every_launch(void *argument) {
	(void)argument;
	double_devices(2);
	int ran = 0, early = 0;
	uint32_t most_shared = 0;
	ingot_implementation impl;
	for (int32_t index = 0; ingot_implementation_get(index, &impl) == INGOT_OK; index++) {
		if (impl.device_type != INGOT_CUDA) continue;
		const call c = call_of(impl.operator_name, impl.name);
		for (int device = 0; device < 2; device++) {
			void *const own = double_context(device), *const others = double_context(1 - device);
			void *const streams[] = {NULL, (void *)1, (void *)2, double_stream(double_primary(device)),
			                         double_stream(own)};
			for (int s = 0; s < 5; s++)
				for (int given = 0; given < 2; given++) {
					const ingot_stream stream = on(device, streams[s]);
					void *const context = s == 4 ? own : double_primary(device);
					ingot_options o = options_of(&c);
					double_make_current(s % 2 ? others : NULL);
					void *const before = double_current();
					double_forget();
					const ingot_status asked = make(&c, WORKSPACE, stream, &o);
					if (asked == INGOT_UNSUPPORTED) goto next;
					CHECK(!asked, "%s", ingot_last_error());
					if (given && workspace_bytes) {
						o.workspace = double_memory(workspace_bytes);
						o.workspace_size = workspace_bytes;
					}
					CHECK(!make(&c, PREPARE, stream, &o), "%s", ingot_last_error());
					double_forget();
					CHECK(!make(&c, RUN, stream, &o), "%s", ingot_last_error());
					CHECK(!*ingot_last_error(), "a sentence after OK: %s", ingot_last_error());
					check_events(&c, &impl, index, stream, context, o.workspace, workspace_bytes);
					CHECK(only_warm_calls(!given), "%s: a prepared call loads or allocates", impl.name);
					CHECK(double_current() == before, "%s: the caller's context is not restored", impl.name);
					for (int i = 0; i < double_events(); i++) {
						if (double_event_at(i).shared_bytes > most_shared)
							most_shared = double_event_at(i).shared_bytes;
						early += double_event_at(i).early;
					}
					ran++;
				}
		}
	next:;
	}
	const double_counts counts = double_count();
	CHECK(counts.allocations == 0 && counts.primary_retained == 2, "%d, %d", counts.allocations,
	      counts.primary_retained);
	printf("driver double: %d calls, their launches as the images say; up to %u bytes of shared memory\n", ran,
	       most_shared);
	fflush(stdout);
	CHECK(ran >= 100, "%d", ran);
	CHECK(early, "no second step starts before the first has ended");
	CHECK(most_shared > 49152, "no launch needs more shared memory than is granted without asking");
	return finish();
}

static void test_every_launch(void **state) {
	in_child(every_launch, NULL);
}

/* The alignment that a kernel asks for is checked before it is chosen. */
static int misaligned(void *argument) {
	(void)argument;
	call c = forward("attn_fwd_sm80");
	ingot_options o = options_of(&c);
	ingot_tensor *const tensors[] = {&c.params.fwd.q, &c.params.fwd.k, &c.params.fwd.v, &c.params.fwd.out};
	for (int i = 0; i < 8; i++) {
		const ingot_tensor whole = *tensors[i / 2];
		if (i % 2) tensors[i / 2]->stride[2] += 1;
		else tensors[i / 2]->data = (char *)tensors[i / 2]->data + 2;
		c.backend = o.backend = "attn_fwd_sm80";
		double_forget();
		CHECK(make(&c, RUN, on(0, NULL), &o) == INGOT_UNSUPPORTED && strstr(ingot_last_error(), "16 bytes"), "%d: %s",
		      i, ingot_last_error());
		CHECK(double_events() == 0, "%d", i);
		c.backend = o.backend = NULL;
		CHECK(!make(&c, RUN, on(0, NULL), &o), "%d: %s", i, ingot_last_error());
		CHECK(double_events() == 1 && strstr(double_event_at(0).kernel, "simt"), "%d: %s", i,
		      double_event_at(0).kernel);
		*tensors[i / 2] = whole;
	}
	return finish();
}

static void test_alignment(void **state) {
	in_child(misaligned, NULL);
}

/* Tensors as the copy engine takes them: axes without a stride have one place, rows must have one, and lengths that the device
 * knows have their tiles ordered by a kernel before. */
static int mapped(void *argument) {
	(void)argument;
	call c = forward("attn_fwd_sm90");
	ingot_attn_fwd_params *const p = &c.params.fwd;
	const ingot_options o = options_of(&c);
	const ingot_attn_fwd_params whole = *p;
	p->k.stride[1] = p->v.stride[0] = p->q.stride[1] = 0;
	CHECK(!make(&c, RUN, on(0, NULL), &o), "%s", ingot_last_error());
	CHECK(double_events() == 1 && !*double_faults(), "%d events, %s", double_events(), double_faults());
	*p = whole;
	p->v.stride[2] = 0;
	CHECK(make(&c, RUN, on(0, NULL), &o) == INGOT_UNSUPPORTED && strstr(ingot_last_error(), "row stride of 0"), "%s",
	      ingot_last_error());
	*p = whole;
	/* sums of more keys are folded in the workspace, but not with a softcap */
	for (int longer = 0; longer < 2; longer++) {
		p->k = p->v = DEVICE_TENSOR(INGOT_F16, 2, 2, 16384 + longer, 64);
		p->q = p->out = DEVICE_TENSOR(INGOT_F16, 2, 4, 130, 64);
		CHECK(!make(&c, WORKSPACE, on(0, NULL), &o), "%s", ingot_last_error());
		CHECK(!workspace_bytes == !longer, "%d: %llu bytes", longer, (unsigned long long)workspace_bytes);
	}
	p->softcap = 10;
	CHECK(make(&c, WORKSPACE, on(0, NULL), &o) == INGOT_UNSUPPORTED && strstr(ingot_last_error(), "16384 keys"), "%s",
	      ingot_last_error());
	*p = whole;
	enum { SEQUENCES = 50, ROWS = 3000 };
	p->q = DEVICE_TENSOR(INGOT_BF16, 1, 4, ROWS, 64);
	p->k = DEVICE_TENSOR(INGOT_BF16, 1, 2, ROWS, 64);
	p->v = DEVICE_TENSOR(INGOT_BF16, 1, 2, ROWS, 64);
	p->out = DEVICE_TENSOR(INGOT_BF16, 1, 4, ROWS, 64);
	p->lse = (ingot_tensor){0};
	p->q_lengths = p->k_lengths = DEVICE_TENSOR(INGOT_I32, SEQUENCES + 1);
	p->varlen = INGOT_VARLEN(INGOT_SIDE(1, INGOT_LENGTH_CUMULATIVE, INGOT_POSITION_REUSE),
	                         INGOT_SIDE(1, INGOT_LENGTH_CUMULATIVE, INGOT_POSITION_REUSE), 0);
	p->batch = SEQUENCES;
	p->max_seqlen_q = p->max_seqlen_k = 200;
	CHECK(!make(&c, WORKSPACE, on(0, NULL), &o) && workspace_bytes, "%s", ingot_last_error());
	double_forget();
	CHECK(!make(&c, RUN, on(0, NULL), &o), "%s", ingot_last_error());
	CHECK(double_events() == 4 && !*double_faults(), "%d events, %s", double_events(), double_faults());
	const double_event first = double_event_at(1), second = double_event_at(2);
	CHECK(!strcmp(first.kernel, "attn_fwd_sm90_order") && !strcmp(second.kernel, "attn_fwd_sm90"), "%s, %s",
	      first.kernel, second.kernel);
	CHECK(first.arguments_size == second.arguments_size &&
	          !memcmp(first.arguments, second.arguments, first.arguments_size),
	      "two argument structs");
	/* the backward: rows' numbers, products, dQ, with heads that all lie in one place; only the split form has a fixed order */
	for (int split = 0; split < 2; split++) {
		call b = backward(split ? "attn_bwd_sm90_split" : "attn_bwd_sm90");
		const ingot_options plain = options_of(&b);
		ingot_options ordered = plain;
		ordered.flags = INGOT_DETERMINISTIC;
		const ingot_status status = make(&b, WORKSPACE, on(0, NULL), &ordered);
		CHECK(split ? !status : status == INGOT_UNSUPPORTED && strstr(ingot_last_error(), "atomics"), "%s",
		      ingot_last_error());
		b.params.bwd.k.stride[1] = b.params.bwd.v.stride[0] = b.params.bwd.dout.stride[1] = 0;
		double_forget();
		CHECK(!make(&b, RUN, on(0, NULL), &plain), "%s", ingot_last_error());
		CHECK(double_events() == 5 && !*double_faults(), "%d events, %s", double_events(), double_faults());
		/* the later steps start before the ones ahead of them have ended */
		const double_event event = double_event_at(2);
		CHECK(!double_event_at(1).early && event.early && double_event_at(3).early, "%d", split);
		/* one map is of the workspace, to which the arguments begin with a pointer */
		const unsigned char *workspace, *mapped_data;
		memcpy(&workspace, event.arguments, sizeof workspace);
		memcpy(&mapped_data, (const char *)event.arguments + event.arguments_size - (split ? 3 : 1) * 128,
		       sizeof mapped_data);
		CHECK(mapped_data >= workspace && mapped_data < workspace + double_event_at(0).bytes &&
		          (mapped_data > workspace) == !split,
		      "%s: map of %p, workspace %p", event.kernel, (const void *)mapped_data, (const void *)workspace);
	}
	return finish();
}

static void test_tensor_maps(void **state) {
	in_child(mapped, NULL);
}

/* ---- streams, devices, contexts, capture, fork --------------------------------------------------------------------------------- */

static int wrong_devices(void *argument) {
	(void)argument;
	double_devices(2);
	const call c = forward(NULL);
	const ingot_options o = options_of(&c);
	void *const of_0 = double_stream(double_primary(0)), *const foreign_1 = double_stream(double_context(1));
	CHECK(make(&c, RUN, on(2, NULL), &o) == INGOT_NO_DEVICE && strstr(ingot_last_error(), "stream.device is 2"), "%s",
	      ingot_last_error());
	CHECK(make(&c, RUN, on(-1, NULL), &o) == INGOT_NO_DEVICE, "%s", ingot_last_error());
	CHECK(make(&c, RUN, on(1, of_0), &o) == INGOT_INVALID && strstr(ingot_last_error(), "another device"), "%s",
	      ingot_last_error());
	CHECK(make(&c, RUN, on(0, foreign_1), &o) == INGOT_INVALID && strstr(ingot_last_error(), "another device"), "%s",
	      ingot_last_error());
	CHECK(double_events() == 0 && !double_current(), "%d", double_events());
	CHECK(!make(&c, RUN, on(1, foreign_1), &o), "%s", ingot_last_error());
	CHECK(double_events() > 0 && double_event_at(0).device == 1, "%d", double_events());
	/* a stream that is gone, and one whose context is */
	double_destroy(foreign_1);
	CHECK(make(&c, RUN, on(1, foreign_1), &o) == INGOT_DRIVER && strstr(ingot_last_error(), "CONTEXT_IS_DESTROYED"),
	      "%s", ingot_last_error());
	void *const context = double_context(0), *const orphan = double_stream(context);
	CHECK(!make(&c, RUN, on(0, orphan), &o), "%s", ingot_last_error());
	double_destroy(context);
	CHECK(make(&c, RUN, on(0, orphan), &o) == INGOT_DRIVER && strstr(ingot_last_error(), "CONTEXT_IS_DESTROYED"), "%s",
	      ingot_last_error());
	CHECK(!double_current() && !*double_faults(), "%s", double_faults());
	CHECK(!make(&c, RUN, on(0, of_0), &o), "%s", ingot_last_error());
	return finish();
}

static void test_devices(void **state) {
	in_child(wrong_devices, NULL);
}

static int captured(void *argument) {
	(void)argument;
	const call c = backward(NULL);
	ingot_options o = options_of(&c);
	void *const stream = double_stream(double_primary(0));
	CHECK(!make(&c, WORKSPACE, on(0, stream), &o) && workspace_bytes, "%s", ingot_last_error());
	CHECK(!make(&c, PREPARE, on(0, stream), &o), "%s", ingot_last_error());
	double_capture(stream, true);
	double_forget();
	CHECK(make(&c, RUN, on(0, stream), &o) == INGOT_WORKSPACE && strstr(ingot_last_error(), "captured"), "%s",
	      ingot_last_error());
	CHECK(double_events() == 0, "%d", double_events());
	o.workspace = double_memory(workspace_bytes);
	o.workspace_size = workspace_bytes;
	CHECK(!make(&c, RUN, on(0, stream), &o), "%s", ingot_last_error());
	CHECK(double_events() > 1 && only_warm_calls(false) && !*double_faults(), "%s", double_faults());
	o.workspace_size--;
	CHECK(make(&c, RUN, on(0, stream), &o) == INGOT_WORKSPACE && strstr(ingot_last_error(), "workspace_size"), "%s",
	      ingot_last_error());
	return finish();
}

static void test_capture(void **state) {
	in_child(captured, NULL);
}

static int forked_child(void *argument) {
	const call *const c = argument;
	const ingot_options o = options_of(c);
	double_forget();
	CHECK(make(c, RUN, on(0, NULL), &o) == INGOT_NO_DEVICE && strstr(ingot_last_error(), "forked"), "%s",
	      ingot_last_error());
	CHECK(double_calls() == 0, "the child called %s", double_call(0));
	return 0;
}

static int forks(void *argument) {
	(void)argument;
	call c = forward(NULL);
	const ingot_options o = options_of(&c);
	CHECK(!make(&c, RUN, on(0, NULL), &o), "%s", ingot_last_error());
	CHECK(run_fork(forked_child, &c, 60) == 0, "the forked child");
	CHECK(!make(&c, RUN, on(0, NULL), &o), "%s", ingot_last_error());
	return finish();
}

static void test_fork(void **state) {
	in_child(forks, NULL);
}

/* ---- workspace of the caller's functions ---------------------------------------------------------------------------------------- */

static int taken, shift;

static void *caller_alloc(void *context, uint64_t size) {
	taken++;
	/* the caller's function runs in the caller's context */
	return double_current() == context ? (char *)double_memory(size + 256) + shift : NULL;
}

static void caller_free(void *context, void *memory) {
	(void)memory;
	if (double_current() == context) taken--;
}

static int callers_memory(void *argument) {
	(void)argument;
	const call c = backward(NULL);
	ingot_options o = options_of(&c);
	o.alloc = caller_alloc;
	o.free = caller_free;
	void *const other = o.alloc_context = double_context(0);
	double_make_current(other);
	CHECK(!make(&c, RUN, on(0, NULL), &o), "%s", ingot_last_error());
	CHECK(taken == 0 && double_events() > 1 && double_event_at(0).kind == DOUBLE_LAUNCH, "%d", taken);
	double_inject("cuLaunchKernelEx", 1, 700, false);
	CHECK(make(&c, RUN, on(0, NULL), &o) == INGOT_DRIVER && taken == 0, "%d", taken);
	double_forget();
	shift = 16;
	CHECK(make(&c, RUN, on(0, NULL), &o) == INGOT_INVALID && strstr(ingot_last_error(), "256"), "%s",
	      ingot_last_error());
	CHECK(taken == 0 && double_events() == 0, "%d", taken);
	return finish();
}

static void test_callers_memory(void **state) {
	in_child(callers_memory, NULL);
}

/* ---- the first call ------------------------------------------------------------------------------------------------------- */

static char heard[8192];

static void hear(void *context, int32_t level, const char *message) {
	(void)context, (void)level;
	strncat(heard, message, sizeof heard - strlen(heard) - 1);
	strncat(heard, "\n", sizeof heard - strlen(heard) - 1);
}

/* The log of a first call says how long each part took; a warm one has nothing to say of it. */
static int first_call(void *argument) {
	(void)argument;
	static const char *const parts[] = {"found and opened in ", "read and verified in ", "loaded by the driver in ",
	                                    "ingot-sm_90a.pack, attn_fwd_sm80:bf16_d64_masked"};
	const call c = forward("attn_fwd_sm80");
	const ingot_options o = options_of(&c);
	ingot_set_log(3, hear, NULL);
	CHECK(!make(&c, RUN, on(0, NULL), &o), "%s", ingot_last_error());
	for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
		CHECK(strstr(heard, parts[i]), "no \"%s\" in: %s", parts[i], heard);
	heard[0] = 0;
	CHECK(!make(&c, RUN, on(0, NULL), &o), "%s", ingot_last_error());
	CHECK(!strstr(heard, " in "), "%s", heard);
	return finish();
}

static void test_first_call(void **state) {
	in_child(first_call, NULL);
}

/* ---- threads ---------------------------------------------------------------------------------------------------------------------- */

enum { THREADS = 8 };
static pthread_barrier_t barrier;

static void *first_calls(void *argument) {
	const int me = (int)(intptr_t)argument;
	const call fwd = forward("attn_fwd_sm80"), bwd = backward("attn_bwd_sm80");
	const ingot_options a = options_of(&fwd), b = options_of(&bwd);
	void *const stream = double_stream(double_primary(me % 2));
	pthread_barrier_wait(&barrier);
	for (int i = 0; i < 3; i++) {
		CHECK(!make(&fwd, RUN, on(me % 2, stream), &a), "%s", ingot_last_error());
		CHECK(!make(&bwd, RUN, on(me % 2, stream), &b), "%s", ingot_last_error());
	}
	return NULL;
}

/* All threads at once, from the opening of the driver on: each image is loaded once a device. */
static int race(void *argument) {
	(void)argument;
	double_devices(2);
	double_load_time(20000);
	pthread_t threads[THREADS];
	(void)on_device(INGOT_F32, 1, (const int64_t[]){1}); /* the memory's own first use is no part of it */
	CHECK(!pthread_barrier_init(&barrier, NULL, THREADS), "no barrier");
	for (int i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&threads[i], NULL, first_calls, (void *)(intptr_t)i), "no thread");
	for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
	const double_counts counts = double_count();
	CHECK(counts.libraries == 4, "%d images are loaded of two on two devices", counts.libraries);
	CHECK(counts.primary_retained == 2 && !counts.allocations && !*double_faults(), "%s", double_faults());
	return finish();
}

static void test_threads(void **state) {
	in_child(race, NULL);
}

/* ---- every error at every call ------------------------------------------------------------------------------------------------------- */

/* One call of every operator, on a foreign context's stream, on a stream of the primary one, and on the default one. */
enum { CALLS = 5 };
static call calls[CALLS];
static void *call_streams[CALLS];
static void *callers_context;

static void make_calls(void) {
	static const char *const ops[CALLS] = {"attn_fwd", "attn_bwd", "attn_merge", "kv_append", "attn_dropout_mask"};
	for (int i = 0; i < CALLS; i++) calls[i] = call_of(ops[i], NULL);
	callers_context = double_context(0);
	call_streams[0] = call_streams[1] = double_stream(double_context(0));
	call_streams[2] = double_stream(double_primary(0));
	double_make_current(callers_context);
}

static int count_calls(void *argument) {
	make_calls();
	for (int i = 0; i < CALLS; i++) {
		const ingot_options o = options_of(&calls[i]);
		CHECK(!make(&calls[i], RUN, on(0, call_streams[i]), &o), "%s", ingot_last_error());
	}
	CHECK(!*double_faults() && double_current() == callers_context, "%s", double_faults());
	const long n = double_calls();
	CHECK(write(*(int *)argument, &n, sizeof n) == sizeof n, "no pipe");
	return finish();
}

typedef struct trial {
	long nth;
	int error;
	bool lost;
} trial;

static bool starts_with(const char *text, const char *with) {
	return !strncmp(text, with, strlen(with));
}

static int fail_once(void *argument) {
	const trial *const t = argument;
	make_calls();
	double_inject(NULL, t->nth, t->error, t->lost);
	int failed = 0;
	for (int i = 0; i < CALLS; i++) {
		const ingot_options o = options_of(&calls[i]);
		const bool had = double_injected() != NULL;
		const ingot_status s = make(&calls[i], RUN, on(0, call_streams[i]), &o);
		const char *const where = double_injected(), *const sentence = ingot_last_error();
		if (!where) {
			CHECK(!s, "%s: %s", calls[i].op, sentence);
			continue;
		}
		if (had && !t->lost) { /* healthy again */
			CHECK(!s && !*sentence, "after %s in an earlier call: %s", where, sentence);
			continue;
		}
		failed++;
		CHECK(s, "%s: %s gives error %d, and the call is OK", calls[i].op, where, t->error);
		CHECK(strstr(sentence, double_error_name(t->error)), "%s: no name of the error in: %s", where, sentence);
		CHECK(!t->lost || strstr(sentence, "context is lost"), "%s: %s", where, sentence);
		/* the statuses that the header allows, and no other than INGOT_DRIVER once work was queued */
		const bool queued = !strcmp(where, "cuLaunchKernelEx") || !strcmp(where, "cuMemFreeAsync");
		const ingot_status want = starts_with(where, "cuInit") || starts_with(where, "cuDeviceGet") ? INGOT_NO_DEVICE
		                          : queued || starts_with(where, "cuCtxPop")                        ? INGOT_DRIVER
		                          : t->error == 2                                           ? INGOT_OUT_OF_MEMORY
		                          : t->error == 200                                         ? INGOT_IMAGE
		                          : !strcmp(where, "cuLibraryGetKernel") && t->error == 500 ? INGOT_IMAGE
		                                                                                    : INGOT_DRIVER;
		CHECK(t->lost || s == want, "%s, error %d: %s", where, t->error, ingot_status_name(s));
		CHECK(double_current() == callers_context, "%s: the caller's context is not current", where);
	}
	const char *const where = double_injected();
	CHECK(where && failed > 0, "call %ld never came", t->nth);
	CHECK(!*double_faults(), "%s: %s", where, double_faults());
	/* what could not be freed is the driver's to free; everything else is given back */
	const int kept = t->lost || !strcmp(where, "cuMemFreeAsync");
	CHECK(double_count().allocations <= kept, "%s: %d allocations stay", where, double_count().allocations);
	if (!t->lost) {
		for (int i = 0; i < CALLS; i++) {
			const ingot_options o = options_of(&calls[i]);
			CHECK(!make(&calls[i], RUN, on(0, call_streams[i]), &o), "after %s: %s", where, ingot_last_error());
		}
		CHECK(double_count().libraries == CALLS, "%s: %d images are loaded of %d", where, double_count().libraries,
		      CALLS);
	}
	return finish();
}

static long healthy_calls(void) {
	int ends[2];
	long n = 0;
	assert_int_equal(pipe(ends), 0);
	in_child(count_calls, &ends[1]);
	assert_int_equal(read(ends[0], &n, sizeof n), sizeof n);
	close(ends[0]);
	close(ends[1]);
	assert_true(n > 50);
	return n;
}

static void test_every_error_at_every_call(void **state) {
	static const int each[] = {1, 2, 200, 500, 700, 999};
	const long n = healthy_calls();
	for (size_t e = 0; e < sizeof each / sizeof *each; e++)
		for (long i = 0; i < n; i++) {
			trial t = {i, each[e], false};
			in_child(fail_once, &t);
		}
	printf("driver double: %zu errors at each of %ld driver calls\n", sizeof each / sizeof *each, n);
}

/* An error that ends the context: from its first sight on every call says so, and nothing crashes. */
static void test_lost_context(void **state) {
	static const int each[] = {700, 719};
	const long n = healthy_calls();
	for (size_t e = 0; e < 2; e++)
		for (long i = 0; i < n; i += 3) {
			trial t = {i, each[e], true};
			in_child(fail_once, &t);
		}
}

/* An error whose name the driver cannot tell keeps its number. */
static int nameless(void *argument) {
	(void)argument;
	const call c = forward(NULL);
	const ingot_options o = options_of(&c);
	CHECK(!make(&c, RUN, on(0, NULL), &o), "%s", ingot_last_error());
	double_inject("cuLaunchKernelEx", 0, 12345, false);
	CHECK(make(&c, RUN, on(0, NULL), &o) == INGOT_DRIVER && strstr(ingot_last_error(), "12345"), "%s",
	      ingot_last_error());
	return finish();
}

static void test_nameless_error(void **state) {
	in_child(nameless, NULL);
}

/* ---- packs ------------------------------------------------------------------------------------------------------------------------- */

static char folder[64];

/* The pack with one byte changed, in a folder of its own. */
static void damaged_pack(long at) {
	char path[128];
	snprintf(path, sizeof path, "%s/ingot-sm_90a.pack", folder);
	FILE *from = fopen(pack_path, "rb"), *to = fopen(path, "wb");
	assert_true(from && to);
	for (int c; (c = fgetc(from)) != EOF;) fputc(ftell(from) - 1 == at ? c ^ 4 : c, to);
	fclose(from);
	assert_int_equal(fclose(to), 0);
}

static int call_damaged(void *argument) {
	(void)argument;
	setenv("INGOT_IMAGE_PATH", folder, 1);
	const call c = forward("attn_fwd_sm80");
	const ingot_options o = options_of(&c);
	CHECK(make(&c, RUN, on(0, NULL), &o) == INGOT_IMAGE && strstr(ingot_last_error(), "damaged") &&
	          strstr(ingot_last_error(), folder),
	      "%s", ingot_last_error());
	for (long i = 0; i < double_calls(); i++)
		CHECK(strcmp(double_call(i), "cuLibraryLoadData"), "a damaged image was given to the driver");
	CHECK(double_events() == 0, "%d", double_events());
	/* another folder's whole one still serves */
	char both[4200];
	snprintf(both, sizeof both, "%.*s", (int)(strrchr(pack_path, '/') - pack_path), pack_path);
	ingot_options good = o;
	good.image_path = both;
	CHECK(!make(&c, RUN, on(0, NULL), &good), "%s", ingot_last_error());
	return finish();
}

static int end_of_pipe;

static int tell_digest(void *argument) {
	if (*(bool *)argument) setenv("INGOT_IMAGE_PATH", folder, 1);
	uint64_t digest;
	CHECK(!ingot_selection_digest(on(0, NULL), &digest) && !*ingot_last_error(), "%s", ingot_last_error());
	CHECK(write(end_of_pipe, &digest, sizeof digest) == sizeof digest, "no pipe");
	return finish();
}

static uint64_t digest_of(bool without_packs) {
	int ends[2];
	uint64_t digest = 0;
	assert_int_equal(pipe(ends), 0);
	end_of_pipe = ends[1];
	in_child(tell_digest, &without_packs);
	assert_int_equal(read(ends[0], &digest, sizeof digest), sizeof digest);
	close(ends[0]);
	close(ends[1]);
	return digest;
}

/* Where the object of an implementation's variant lies in the pack. */
static long object_of(const char *implementation, const char *variant) {
	FILE *const f = fopen(pack_path, "rb");
	assert_true(f && !fseek(f, INDEX, SEEK_SET));
	char entry[ENTRY];
	uint64_t at = 0;
	while (!at && fread(entry, sizeof entry, 1, f) == 1)
		if (!strcmp(entry, implementation) && !strcmp(entry + NAME, variant))
			memcpy(&at, entry + 2 * NAME + KERNELS * KERNEL, sizeof at);
	fclose(f);
	assert_true(at > 0);
	return (long)at;
}

static void test_a_damaged_image_never_reaches_the_driver(void **state) {
	damaged_pack(object_of("attn_fwd_sm80", "bf16_d64_masked") + 3000);
	in_child(call_damaged, NULL);
}

static int logged;
static char last_logged[512];

static void count_logged(void *context, int32_t level, const char *message) {
	(void)context, (void)level;
	logged++;
	snprintf(last_logged, sizeof last_logged, "%s", message);
}

/* argument: whether a damaged pack is looked into first. */
static int call_logged(void *argument) {
	const bool damaged = *(bool *)argument;
	ingot_set_log(1, count_logged, NULL);
	const call c = forward(NULL);
	const ingot_options o = {.struct_size = sizeof o, .image_path = damaged ? folder : NULL};
	CHECK(!make(&c, RUN, on(0, NULL), &o), "%s", ingot_last_error());
	CHECK(logged == damaged && (!damaged || strstr(last_logged, "header is damaged")), "%d: %s", logged, last_logged);
	return finish();
}

/* argument: the variable or the option. */
static int call_with_no_folder(void *argument) {
	char list[4200], named[128];
	const bool option = argument != NULL;
	snprintf(list, sizeof list, "/no/such/packs:%s", getenv("INGOT_IMAGE_PATH"));
	if (!option) setenv("INGOT_IMAGE_PATH", list, 1);
	ingot_set_log(1, count_logged, NULL);
	const call c = forward(NULL);
	const ingot_options o = {.struct_size = sizeof o, .image_path = option ? list : NULL};
	for (int i = 0; i < 2; i++) CHECK(!make(&c, RUN, on(0, NULL), &o), "%s", ingot_last_error());
	snprintf(named, sizeof named, "%s: \"/no/such/packs\"", option ? "options.image_path" : "INGOT_IMAGE_PATH");
	CHECK(logged == 1 && strstr(last_logged, named), "%d: %s", logged, last_logged);
	return finish();
}

/* A folder without a pack is no error in the log; a damaged pack is one, and so is a folder that is not there. */
static void test_the_log_of_the_search(void **state) {
	bool damaged = false;
	in_child(call_logged, &damaged);
	damaged_pack(100);
	damaged = true;
	in_child(call_logged, &damaged);
	in_child(call_with_no_folder, NULL);
	in_child(call_with_no_folder, &damaged);
}

/* Where no pack is found, the sentence is about that, and about where it was looked for; `explain` says the same of a call. */
static int call_without_packs(void *argument) {
	(void)argument;
	setenv("INGOT_IMAGE_PATH", folder, 1);
	const call c = forward(NULL);
	char parts[3][128], text[4096];
	snprintf(parts[0], sizeof parts[0], "no pack for this device (sm_90a) was found");
	snprintf(parts[1], sizeof parts[1], "options.image_path \"%s/none\"", folder);
	snprintf(parts[2], sizeof parts[2], "INGOT_IMAGE_PATH \"%s\"", folder);
	char none[128];
	snprintf(none, sizeof none, "%s/none", folder);
	/* chosen, of a family, and by name: there the image is looked for when it is loaded */
	static const char *const backends[] = {NULL, "cuda", "attn_fwd_sm80"};
	for (int i = 0; i < 3; i++) {
		const ingot_options o = {.struct_size = sizeof o, .backend = backends[i], .image_path = none};
		CHECK(make(&c, RUN, on(0, NULL), &o) == INGOT_IMAGE, "%s", ingot_last_error());
		for (int p = 0; p < 3; p++) CHECK(strstr(ingot_last_error(), parts[p]), "%s", ingot_last_error());
		CHECK(i == 2 || make(&c, PREPARE, on(0, NULL), &o) == INGOT_IMAGE, "%s", ingot_last_error());
		if (i == 2) continue;
		const ingot_status s =
			ingot_attn_fwd_explain(&c.params.fwd, on(0, NULL), &o, INGOT_TEXT, text, sizeof text, NULL);
		CHECK(!s && strstr(text, "none: ") && strstr(text, parts[2]), "%s: %s", ingot_last_error(), text);
	}
	return finish();
}

/* A pack that is there and damaged is named. */
static int call_with_a_damaged_pack(void *argument) {
	(void)argument;
	setenv("INGOT_IMAGE_PATH", folder, 1);
	const call c = forward(NULL);
	char named[128];
	snprintf(named, sizeof named, "%s/ingot-sm_90a.pack was left out", folder);
	CHECK(make(&c, RUN, on(0, NULL), NULL) == INGOT_IMAGE && strstr(ingot_last_error(), named), "%s",
	      ingot_last_error());
	return finish();
}

static void test_missing_packs_are_told(void **state) {
	char path[128];
	snprintf(path, sizeof path, "%s/ingot-sm_90a.pack", folder);
	unlink(path);
	in_child(call_without_packs, NULL);
	damaged_pack(100);
	in_child(call_with_a_damaged_pack, NULL);
}

/* Ranks with other packs have another number. */
static void test_the_digest_covers_the_packs(void **state) {
	char path[128];
	snprintf(path, sizeof path, "%s/ingot-sm_90a.pack", folder);
	unlink(path);
	assert_true(digest_of(false) == digest_of(false));
	assert_true(digest_of(false) != digest_of(true));
}

int main(void) {
	const char *const path = getenv("INGOT_IMAGE_PATH");
	snprintf(pack_path, sizeof pack_path, "%s/ingot-sm_90a.pack", path ? path : "");
	if (access(pack_path, R_OK)) {
		fprintf(stderr, "no %s: this test needs INGOT_IMAGE_PATH and `ingot build --arch sm_90a`\n", pack_path);
		return 77;
	}
	printf("driver double: no GPU, no kernel runs; this stands beside the tests on a device and replaces none\n");
	snprintf(folder, sizeof folder, "/tmp/ingot-double-%ld", (long)getpid());
	if (mkdir(folder, 0700)) return 1;
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_every_launch),
		cmocka_unit_test(test_alignment),
		cmocka_unit_test(test_tensor_maps),
		cmocka_unit_test(test_devices),
		cmocka_unit_test(test_capture),
		cmocka_unit_test(test_fork),
		cmocka_unit_test(test_callers_memory),
		cmocka_unit_test(test_first_call),
		cmocka_unit_test(test_threads),
		cmocka_unit_test(test_nameless_error),
		cmocka_unit_test(test_every_error_at_every_call),
		cmocka_unit_test(test_lost_context),
		cmocka_unit_test(test_a_damaged_image_never_reaches_the_driver),
		cmocka_unit_test(test_the_log_of_the_search),
		cmocka_unit_test(test_missing_packs_are_told),
		cmocka_unit_test(test_the_digest_covers_the_packs),
	};
	const int failed = cmocka_run_group_tests(tests, NULL, NULL);
	char made[128];
	snprintf(made, sizeof made, "%s/ingot-sm_90a.pack", folder);
	unlink(made);
	rmdir(folder);
	return failed;
}
