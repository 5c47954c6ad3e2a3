/*
 * The way of a call, in the order of its stages. Each section names the file that owns it; a stage includes this header and
 * support/ and never another stage.
 *
 *   call.c    public functions: run() takes a call through the stages below
 *   check.c   arguments of any struct size -> one const problem in normal form, or a status and a sentence
 *   choose.c  implementations refuse with a reason; the measured fastest wins
 *   explain.c the same choice as text or JSON
 *   image.c   the packed code objects of the choice (nothing to do on a CPU)
 *   launch.c  workspace and steps -> the device
 *   device/   drivers, architectures, threads, memory
 */
#ifndef INGOT_PIPELINE_H
#define INGOT_PIPELINE_H

#ifndef INGOT_EXPERIMENTAL
#define INGOT_EXPERIMENTAL
#endif
#include <ingot.h>
#include <stdbool.h>

#include "support/tuning.h"

/* ---- check.c and operator/: the problem in normal form -------------------------------------------------------------- */

typedef enum ingot__operator {
	INGOT__ATTN_FWD,
	INGOT__ATTN_BWD,
	INGOT__ATTN_MERGE,
	INGOT__KV_APPEND,
	INGOT__ATTN_DROPOUT_MASK,
	INGOT__OPERATORS
} ingot__operator;

/* What a call uses beyond plain attention: one bit each, so that a kernel can refuse or select by one test. */
enum {
	INGOT__MASK = 1 << 0,      /* a causal or window bound survives the normal form */
	INGOT__VARLEN = 1 << 1,    /* some length or position comes from the device */
	INGOT__PAGED = 1 << 2,     /* dense or CSR pages */
	INGOT__BIAS = 1 << 3,      /* additive bias */
	INGOT__BIAS_BOOL = 1 << 4, /* boolean bias */
	INGOT__ALIBI = 1 << 5,
	INGOT__SOFTCAP = 1 << 6,
	INGOT__SINK = 1 << 7,
	INGOT__DROPOUT = 1 << 8,
	INGOT__8BIT_KV = 1 << 9, /* K and V are 8-bit */
	INGOT__8BIT_Q = 1 << 10,
	INGOT__UNALIGNED =
		1 << 11 /* a base address or a row stride is no multiple of 16 bytes (false when data is not read) */
};

/* A bound that is not there. Large, yet j - i - off +- INGOT__NO_BOUND cannot overflow. */
#define INGOT__NO_BOUND ((int64_t)1 << 40)

/* One side of the variable-length word. The arrays are the device's: only kernels read them. */
typedef struct ingot__side {
	bool stacked;
	int length;               /* ingot_length */
	int position;             /* ingot_position */
	const int32_t *lengths;   /* [B+1] or [B]; NULL with LENGTH_MAX */
	const int32_t *positions; /* starts; NULL unless POSITION_ARRAY */
	int64_t max_seqlen;       /* Mq or Mk: no sequence is longer */
	int64_t capacity;         /* rows of the token axis: T when stacked, S otherwise; pages: Mk */
} ingot__side;

typedef struct ingot__pages {
	int64_t count;        /* pages in the cache; page ids are clamped into [0, count - 1] */
	int64_t page_size;    /* rows a page */
	int64_t max_pages;    /* dense: columns of the table */
	const int32_t *table; /* dense: [B, max_pages], row pitch table_stride; NULL with CSR */
	int64_t table_stride;
	const int32_t *indptr;  /* CSR: [B+1] */
	const int32_t *indices; /* CSR: [indices_count] */
	int64_t indices_count;
} ingot__pages;

/* The arguments of any operator in normal form: computed once by check.c, const afterwards, and all that later stages see.
 * Tensors keep the caller's strides with these changes: the stride of an axis of extent <= 1 is 0; q, out, dout, dq are
 * [B or 1,Hq,S or T,*], k, v, dk, dv [B or 1,Hk,S or T,*] (paged: [pages,page_size,Hk,*]); lse is [B,Hq,S] by stride, with
 * batch stride 0 when stacked (row = start + i); bias and dbias are [B,Hq,Mq,Mk] by stride, a broadcast axis having stride 0.
 * Fields an operator does not use are zero. */
typedef struct ingot__problem {
	ingot__operator op;
	uint32_t features;
	int64_t batch, heads_q, heads_k, group; /* group = heads_q / heads_k; 1 when there are no heads */
	int64_t head_dim, head_dim_v;
	ingot__side q_side, k_side; /* kv_append: q_side is the new rows, k_side the cache */
	ingot__pages pages;
	ingot_tensor q, k, v, out, lse;
	ingot_tensor dout, dq, dk, dv;
	ingot_tensor bias, dbias, alibi, sink, dsink;
	ingot_tensor q_descale, k_descale, v_descale;
	/* the mask: pair (i, j) is valid iff -left <= j - (i + off) <= right; NO_BOUND where there is none */
	int64_t left, right;
	bool bottom_right;    /* off = len_k - len_q of the sequence, else 0 */
	double softmax_scale; /* never 0 */
	float softcap;
	float dropout_p;
	uint32_t dropout_threshold; /* floor(p * 2^32 + 0.5); kept iff word >= threshold */
	int lse_base;               /* ingot_lse_base */
	uint64_t dropout_seed, dropout_offset;
	ingot_tensor dropout_seed_ptr, dropout_offset_ptr, dropout_seed_out, dropout_offset_out;
	/* attn_merge: parts in order; a 5-D tensor is split into its N parts by part_stride */
	int64_t parts;      /* N */
	bool parts_stacked; /* all parts are in out_parts[0] / lse_parts[0], part_stride elements apart */
	int64_t out_part_stride, lse_part_stride;
	/* kv_append */
	ingot_tensor k_new, v_new;
	bool lengths_after;
	/* attn_dropout_mask */
	ingot_tensor keep;
	bool deterministic, batch_invariant; /* from the options */
	double
		pairs; /* query-key pairs kept by the mask when every sequence is full, over all query heads: the cost of the call */
	/* attn_merge; unspecified in any other problem, so that a call need not clear them. [B,H,S,Dv], [B,H,S] */
	ingot_tensor out_parts[INGOT_MERGE_PARTS], lse_parts[INGOT_MERGE_PARTS];
} ingot__problem;

/* Reads params (of operator op, any struct size) into *problem. data_read: run, where NULL data is refused; the other verbs
 * read no data pointer. INVALID or VERSION_MISMATCH with a sentence; *problem is unspecified then. */
ingot_status ingot__check(ingot__operator op, const void *params, const ingot_options *options, bool data_read,
                          ingot__problem *problem);

/* Reads caller options of any size into *out (defaults when NULL). */
ingot_status ingot__check_options(const ingot_options *options, ingot_options *out);

/* ---- device/: what runs a call --------------------------------------------------------------------------------------- */

typedef struct ingot__plan ingot__plan;
struct ingot__device;

struct ingot__step;

/* A tensor of 16-bit elements as a GPU's copy engine fetches boxes of it into shared memory. An axis of extent 1 may have any
 * stride that is a multiple of 8 elements and not 0. */
typedef struct ingot__tensor_map {
	const void *data;  /* aligned to 16 bytes */
	int64_t extent[4]; /* columns, rows, heads, batches; each at least 1 */
	int64_t stride[3]; /* elements from row to row, head to head, batch to batch: multiples of 8 below 2^39 */
	uint32_t box[2];   /* columns and rows that one copy takes: 64 (straight: to 256, all there are), and at most 256 */
	bool straight;     /* rows of a box follow one another; else, of 64 columns, they are swizzled by 128 bytes */
	bool in_workspace; /* data counts from the workspace's begin */
	uint32_t at;       /* byte of the arguments where its 128 bytes go, a multiple of 64 */
} ingot__tensor_map;

/* What enter() changed and leave() puts back. */
typedef struct ingot__visit {
	bool pushed;
} ingot__visit;

/* What a GPU's driver does for image.c and launch.c; NULL on a CPU. A failure is a status with a sentence that names the
 * driver's error: OUT_OF_MEMORY, IMAGE or DRIVER, and DRIVER alone from what may follow a first launch. */
typedef struct ingot__driver {
	/* Loads a code object into the device, where it stays until unload. Both enter the device's own context by themselves.
	 * `of` says in a sentence what the object is. */
	ingot_status (*load)(const struct ingot__device *device, const void *object, size_t size, const char *of,
	                     void **module);
	void (*unload)(void *module);
	/* A kernel of a module, allowed `shared_bytes` of shared memory. IMAGE: no such kernel. */
	ingot_status (*function)(const struct ingot__device *device, void *module, const char *of, const char *kernel,
	                         uint32_t shared_bytes, void **function);
	/* Makes the stream's context current, until leave() restores the caller's; what follows is used in between. INVALID: the
	 * stream is another device's. */
	ingot_status (*enter)(const struct ingot__device *device, void *stream, ingot__visit *visit);
	/* leave() and free() are told how it went so far, and return that when it is not OK: the first failure is the one to tell. */
	ingot_status (*leave)(const ingot__visit *visit, ingot_status so_far);
	/* Writes tensor maps into an argument struct, each where it says. */
	ingot_status (*encode)(const ingot__tensor_map *maps, int count, unsigned char *arguments);
	/* Queues a step with one argument struct by value. */
	ingot_status (*launch)(void *stream, void *function, const struct ingot__step *step, const void *arguments,
	                       size_t arguments_size);
	/* Stream-ordered memory, aligned to 256 bytes. */
	ingot_status (*alloc)(void *stream, uint64_t size, void **memory);
	ingot_status (*free)(void *stream, void *memory, ingot_status so_far);
	/* Whether the stream is being captured into a graph. */
	ingot_status (*capturing)(void *stream, bool *capturing);
} ingot__driver;

typedef struct ingot__device {
	ingot_device_type type;
	int32_t ordinal;
	char arch[32];               /* "avx512_bf16", "sm_90a" */
	char model[48];              /* "intel_6_207", "sm_90a_h200" */
	uint64_t arch_mask;          /* bit per row of the families' arch.def whose code this device runs */
	int32_t threads;             /* CPU: what num_threads 0 means */
	int32_t multiprocessors;     /* GPU: SMs or CUs */
	uint32_t shared_most;        /* GPU: bytes of shared memory a block may ask for */
	uint64_t l2_bytes;           /* GPU */
	const ingot__driver *driver; /* NULL on a CPU */
} ingot__device;

/* The device behind a stream, detected once, owned by the device layer. NO_DEVICE, DRIVER. */
ingot_status ingot__device_get(ingot_stream stream, const ingot__device **device);
/* Whether the device runs code built for arch ("" always). */
bool ingot__device_runs(const ingot__device *device, const char *arch);
/* The folder that holds the library's own file, "" if it cannot be told. The library's, valid for ever. */
const char *ingot__library_folder(void);
/* The architecture whose code and rows also serve `arch`, "" at the root. */
const char *ingot__arch_parent(const char *arch);

/* ---- kernels/: an implementation of an operator ----------------------------------------------------------------------- */

/* CPU: one task of a step. Tasks of a step are independent and run in any order on any thread; scratch is this lane's own
 * plan->scratch_bytes, uninitialised, 256-byte aligned; workspace is plan->workspace_bytes, likewise. */
typedef void ingot__task(const ingot__problem *problem, const ingot__plan *plan, void *workspace, void *scratch,
                         int64_t index);

typedef struct ingot__step {
	const char *name; /* in logs and explanations */
	/* CPU */
	ingot__task *task;
	int64_t tasks;
	double work; /* estimated nanoseconds of one thread for the whole step: decides how many threads are worth waking */
	/* GPU: the image's kernel symbol and its launch. Every kernel of an image takes the plan's one argument struct. */
	const char *kernel;
	uint32_t grid[3], block[3], shared_bytes;
	/* Not in a plan's first step: its blocks may start before the step before has ended, and wait for it by themselves
	 * (wait_for_step_before in kernels/gpu.h). From sm_90 on. */
	bool early;
} ingot__step;

#define INGOT__STEPS 4
#define INGOT__MAPS 7
#define INGOT__ARGUMENTS 2048
#define INGOT__PLAN_NUMBERS 24

struct ingot__plan {
	int variant;
	int steps;
	ingot__step step[INGOT__STEPS];
	uint64_t workspace_bytes;            /* shared by all tasks, laid out by the implementation */
	uint64_t scratch_bytes;              /* CPU: one thread's own memory, besides */
	int64_t number[INGOT__PLAN_NUMBERS]; /* CPU: the implementation's own offsets and tile counts */
	/* GPU: the argument struct of all steps. It begins with a pointer that launch.c sets to the workspace. Its size is kept in
	 * the image's index too, and the two must agree. */
	uint32_t arguments_size;
	int maps; /* which launch.c has the driver write into the arguments */
	ingot__tensor_map map[INGOT__MAPS];
	_Alignas(16) unsigned char arguments[INGOT__ARGUMENTS];
};

/* One image of a GPU implementation: what makes the compiler build it, and nothing else. */
typedef struct ingot__image_variant {
	const char *name;     /* "bf16_d128_plain" */
	const char *defines;  /* "-DTYPE=2 -DHEAD_DIM=128 -DCLASS=0" */
	uint32_t spill_bytes; /* spill stores and loads allowed; more fails the build */
} ingot__image_variant;

/* An implementation file defines one of these, named ingot__impl_<file name>, in its host half (compiled with -DINGOT_HOST,
 * baseline flags). All functions are pure. The device half (CPU: compiled once with its architecture's flags) defines the
 * tasks that the plan names. */
typedef struct ingot__impl {
	const char *name;   /* the file's: "attn_fwd_avx512" */
	const char *family; /* the folder's: "x86" */
	ingot__operator op;
	ingot_device_type device;
	const char *arch; /* row of the family's arch.def; "" any */
	int rank;         /* order among unmeasured candidates: higher first; below 0: only when forced by name */
	bool verified_by_definition; /* the reference: it is what others are verified against */
	const char *const *variants; /* CPU: names; NULL on a GPU, whose variants are images */
	int variant_count;
	/* GPU: the images that `ingot build` compiles, one a variant, and the kernels each must hold (NULL-terminated). */
	const ingot__image_variant *images;
	const char *const *kernels;
	/* NULL when it can run the problem on that device, *variant then says which; else one sentence saying why not. */
	const char *(*refuse)(const ingot__problem *problem, const ingot__device *device, int *variant);
	/* Fills a zeroed plan (variant is set). threads: how many lanes may run; results must not depend on it. */
	void (*plan)(const ingot__problem *problem, const ingot__device *device, int threads, ingot__plan *plan);
} ingot__impl;

static inline const char *ingot__variant_name(const ingot__impl *impl, int variant) {
	return impl->images ? impl->images[variant].name : impl->variants[variant];
}

extern const ingot__impl *const ingot__impls[]; /* made by the build from the folders, sorted by name */
extern const int ingot__impl_count;

/* A clause of a refuse function. */
#define INGOT__REFUSE_IF(condition, reason) \
	do {                                    \
		if (condition) return (reason);     \
	} while (0)

/* ---- choose.c: candidates and the winner ------------------------------------------------------------------------------ */

/* tuning/ as const tables, sorted; made by tools/mktables.c. */
extern const ingot__row ingot__rows[];
extern const int ingot__row_count;
/* The digest of an implementation's source as built, "" if unknown: a row with another digest is stale. Made likewise. */
const char *ingot__impl_digest(const char *name);

#define INGOT__CANDIDATES 32

typedef struct ingot__candidate {
	const ingot__impl *impl;
	int index; /* ingot__impls[index] is impl */
	int variant;
	const char *refusal;             /* NULL: it can run */
	const ingot__row *row;           /* the nearest bucket's figure, NULL: none */
	int32_t cases;                   /* passed on this architecture, the most of any row */
	bool verified, stale, inherited; /* inherited: the rows are of a parent architecture */
} ingot__candidate;

typedef struct ingot__choice {
	const ingot__impl *impl;
	int index;
	int variant;
	const char *because; /* "measured fastest", "forced", ... */
	bool verified;
	int candidates;
	ingot__candidate candidate[INGOT__CANDIDATES];
} ingot__choice;

/* Picks what runs the problem and says how every candidate fared, also when none can. UNSUPPORTED, NOT_FOUND, DEGRADED with
 * a sentence. */
ingot_status ingot__choose(const ingot__problem *problem, const ingot__device *device, const ingot_options *options,
                           ingot__choice *choice);

/* operator/bucket.c: the bucket of a problem, the key of tuning rows. */
void ingot__bucket_of(const ingot__problem *problem, ingot__bucket *bucket);
uint64_t ingot__table_digest(void); /* over rows and implementations */

/* ---- explain.c ------------------------------------------------------------------------------------------------------- */

void ingot__explain(const ingot__problem *problem, const ingot__device *device, const ingot__choice *choice,
                    const ingot__plan *plan, uint64_t workspace, int32_t format, char *buffer, size_t capacity,
                    size_t *needed);

/* ---- image.c ----------------------------------------------------------------------------------------------------------- */

/* What a plan's steps run, in their order; all NULL on a CPU. */
typedef struct ingot__functions {
	void *function[INGOT__STEPS];
} ingot__functions;

/* Makes sure that the code of a plan is loaded on the device: finds, maps, verifies and caches its image. CPU code is part of
 * the library. IMAGE with a sentence naming file and entry. */
ingot_status ingot__image_load(const ingot__choice *choice, const ingot__plan *plan, const ingot__device *device,
                               const ingot_options *options, ingot__functions *functions);
/* Whether an image of that variant of ingot__impls[index] is present for the device, without reading its bytes. Always on a
 * CPU. */
bool ingot__image_present(int index, int variant, const ingot__device *device, const ingot_options *options);
/* IMAGE, with a sentence that says where an image that is not present was looked for. OUT_OF_MEMORY. */
ingot_status ingot__image_missing(int index, int variant, const ingot__device *device, const ingot_options *options);
/* One number over the packs that a device's calls search without options.image_path, in their order; 0 on a CPU.
 * OUT_OF_MEMORY. */
ingot_status ingot__image_digest(const ingot__device *device, uint64_t *digest);

/* ---- launch.c ---------------------------------------------------------------------------------------------------------- */

/* The whole workspace of a plan on a device: shared part plus the lanes' scratch. */
uint64_t ingot__launch_bytes(const ingot__plan *plan, const ingot__device *device, int threads);
/* Runs a plan. WORKSPACE, OUT_OF_MEMORY, DRIVER. */
ingot_status ingot__launch(const ingot__problem *problem, const ingot__device *device, const ingot_options *options,
                           ingot_stream stream, ingot__plan *plan, const ingot__functions *functions, int threads);

#endif
