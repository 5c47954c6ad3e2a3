/*
 * Ingot: attention kernels, cast ahead of time.
 *
 * The only header a program needs. First the stable part: statuses, tensors, streams, options, and the operators, each with
 * the same four verbs (run, workspace, prepare, explain). Then, behind INGOT_EXPERIMENTAL, what may still change.
 *
 * Shapes use the field's letters: B batch, Hq/Hk query and key/value heads, Sq/Sk query and key lengths, D head_dim of Q and
 * K, Dv head_dim of V and the output, T rows of a stacked (ragged) token axis, Mq/Mk the host-known maxima of the lengths.
 *
 * Rules for every struct that starts with struct_size: zero-initialise it, set struct_size = sizeof it, set what you need.
 * Zero means the default everywhere. The structs only ever grow at the end: a smaller one from an older program is accepted
 * for ever, and bytes beyond what the library knows must be zero (INGOT_VERSION_MISMATCH otherwise). Nested structs
 * (ingot_tensor, ingot_stream) never change. Params and options are read during the call only and never written.
 *
 * No argument is silently ignored: one that this call could not honour is refused. What only qualifies something else may stay
 * where that is absent, and changes nothing then: align without a mask and ALiBi, lse_base without lse, seed and offset with
 * dropout_p 0; of the options image_path on a CPU, threads on a GPU, alloc beside a workspace.
 *
 * What a call writes must share no element with its inputs or its other outputs unless the declaration allows it; this is not
 * checked, and the results are undefined otherwise.
 *
 * Every function may be called from any thread at any time. A call that returns anything but INGOT_OK has launched nothing
 * and written nothing, unless its status is INGOT_DRIVER.
 */
#ifndef INGOT_H
#define INGOT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define INGOT_API __attribute__((visibility("default")))
#else
#define INGOT_API
#endif

#define INGOT_VERSION_MAJOR 0
#define INGOT_VERSION_MINOR 1
#define INGOT_VERSION_PATCH 0
#define INGOT_VERSION_NUMBER (INGOT_VERSION_MAJOR * 10000 + INGOT_VERSION_MINOR * 100 + INGOT_VERSION_PATCH)

/* ---- statuses ---------------------------------------------------------------------------------------------------- */

/* X(name, number, text). Numbers are pinned by tens and never reused. */
#define INGOT_STATUS_LIST(X)                                                                                          \
	X(INGOT_OK, 0, "ok")                                                                                              \
	X(INGOT_INVALID, 10, "an argument is outside what the declaration allows")                                        \
	X(INGOT_VERSION_MISMATCH, 11, "the struct carries fields that this library does not know")                        \
	X(INGOT_UNSUPPORTED, 20, "a valid call that no implementation of this device can run")                            \
	X(INGOT_NOT_FOUND, 21, "no implementation has the forced name")                                                   \
	X(INGOT_DEGRADED, 22, "strict: the call could run, but not on an implementation that is verified on this device") \
	X(INGOT_WORKSPACE, 30, "the given workspace is too small, or one is needed here and none was given")              \
	X(INGOT_OUT_OF_MEMORY, 31, "memory for the workspace could not be had")                                           \
	X(INGOT_IMAGE, 40, "a pack of code objects is missing, damaged or foreign")                                       \
	X(INGOT_NO_DEVICE, 50, "there is no such device or no driver for it")                                             \
	X(INGOT_DRIVER, 51, "the device's driver reported an error")                                                      \
	X(INGOT_INTERNAL, 90, "a fault of the library")

typedef enum ingot_status {
#define INGOT_STATUS_ENUM(name, number, text) name = number,
	INGOT_STATUS_LIST(INGOT_STATUS_ENUM)
#undef INGOT_STATUS_ENUM
		INGOT_STATUS_MAX_ = 0x7fffffff
} ingot_status;

/* The name ("INGOT_OK") and the one-line text of a status; for a number that is none, "INGOT_?" and "unknown status". */
INGOT_API const char *ingot_status_name(ingot_status status);
INGOT_API const char *ingot_status_text(ingot_status status);

/* This thread's sentence about its last call that failed: names the field, what was given and what is allowed. Never NULL;
 * "" when the last call succeeded. Owned by the library, valid until this thread's next call. */
INGOT_API const char *ingot_last_error(void);

/* INGOT_VERSION_NUMBER of the library that is loaded, and the same as text ("0.1.0"). */
INGOT_API int32_t ingot_version(void);
INGOT_API const char *ingot_version_string(void);

/* ---- log --------------------------------------------------------------------------------------------------------- */

/* Levels: 0 nothing (default), 1 errors, 2 degradations, 3 choices, 4 every call, 5 everything. The environment variable
 * INGOT_LOG gives the level and stderr the place, until this is called. callback NULL: back to stderr. The callback may run
 * on any thread, one call at a time; message is valid during it and ends without a newline. A wrong value in any INGOT_*
 * variable is ignored and logged at level 1; in INGOT_LOG itself it is said on stderr. */
typedef void (*ingot_log_callback)(void *context, int32_t level, const char *message);
INGOT_API void ingot_set_log(int32_t level, ingot_log_callback callback, void *context);

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

typedef enum ingot_dtype {
	INGOT_NONE = 0, /* the tensor is absent */
	INGOT_F32 = 1,
	INGOT_F16 = 2,
	INGOT_BF16 = 3,
	INGOT_F8_E4M3 = 4,      /* OCP: 0x7e = 448, 0x7f and 0xff NaN, no Inf */
	INGOT_F8_E5M2 = 5,      /* OCP: 0x7c = Inf */
	INGOT_F8_E4M3_FNUZ = 6, /* 0x80 is the only NaN, bias 8 */
	INGOT_F8_E5M2_FNUZ = 7, /* 0x80 is the only NaN, bias 16 */
	INGOT_I32 = 8,
	INGOT_I64 = 9,
	INGOT_U64 = 10,
	INGOT_BOOL = 11 /* one byte, 0 is false */
} ingot_dtype;

/* A strided view; sizes and strides in elements. Frozen: never grows. Absent iff dtype is INGOT_NONE (then nothing else is
 * read). data may be NULL when there are no elements, and always in workspace, prepare and explain. Memory stays the
 * caller's. Strides must be >= 0; the stride of an axis of extent <= 1 is ignored. */
typedef struct ingot_tensor {
	void *data;
	int32_t dtype; /* ingot_dtype */
	int32_t ndim;  /* 1 to 5 */
	int64_t shape[5];
	int64_t stride[5];
} ingot_tensor;

/* ---- devices and streams ----------------------------------------------------------------------------------------- */

typedef enum ingot_device_type { INGOT_CPU = 0, INGOT_CUDA = 1, INGOT_HIP = 2 } ingot_device_type;

/* Where a call runs. Zero: the CPU, where calls are synchronous. On a GPU, `device` is the ordinal as this process's driver
 * numbers it (mandatory: handle 0, the default stream, belongs to no device) and `handle` the CUstream or hipStream_t. */
typedef struct ingot_stream {
	int32_t type; /* ingot_device_type */
	int32_t device;
	void *handle;
} ingot_stream;

/* ---- options ----------------------------------------------------------------------------------------------------- */

enum {
	INGOT_DETERMINISTIC = 1 << 0,   /* bitwise equal results from run to run; on CPUs for any number of threads too */
	INGOT_BATCH_INVARIANT = 1 << 1, /* a sequence's result does not depend on its neighbours or on the batch */
	INGOT_STRICT = 1 << 2           /* running on an unverified implementation is INGOT_DEGRADED */
};

/* NULL options are the defaults. All pointers stay the caller's and are used during the call only. */
typedef struct ingot_options {
	uint32_t struct_size;
	uint32_t flags; /* INGOT_DETERMINISTIC | ... */
	/* Forces a family ("reference", "x86"), an implementation ("x86/attn_fwd_avx2" or "attn_fwd_avx2") or one of its
	 * variants ("x86/attn_fwd_avx2:general"); then there is no fallback. NULL or "": chosen by measurement. */
	const char *backend;
	/* Folders with packs, separated by colons, searched before INGOT_IMAGE_PATH and the library's own folder. NULL: those.
	 * Unused on a CPU. */
	const char *image_path;
	/* Memory of the stream's device, at least what the workspace verb says, aligned to 256 bytes. NULL: see alloc. */
	void *workspace;
	uint64_t workspace_size; /* bytes */
	/* Without a workspace: alloc gives device memory aligned to 256 bytes or NULL, free takes it back (both or neither). On a
	 * GPU free is called when the work was queued, not when it is done: order it after the work on the stream.
	 * Neither: the device's own pool. */
	void *(*alloc)(void *context, uint64_t size);
	void (*free)(void *context, void *memory);
	void *alloc_context;
	/* CPU only: runs body(argument, i) for i in [0, count), in any order, on any threads, and returns when all are done.
	 * NULL: the library's own threads. */
	void (*parallel_for)(void *context, int64_t count, void (*body)(void *argument, int64_t index), void *argument);
	void *parallel_context;
	/* CPU only: how many threads to use; 0: INGOT_NUM_THREADS, else the processors this process may run on. 0 to 1024. */
	int32_t num_threads;
	int32_t reserved; /* must be 0 */
} ingot_options;

/* ---- attention: masks, variable lengths --------------------------------------------------------------------------- */

#define INGOT_UNBOUNDED INT32_MAX

/* Pair (query i, key j) is valid iff -window_left <= j - (i + off) <= window_right. */
typedef enum ingot_mask {
	INGOT_MASK_NONE = 0,   /* both bounds must be 0 */
	INGOT_MASK_CAUSAL = 1, /* both bounds must be 0: left unbounded, right 0 */
	INGOT_MASK_WINDOW = 2  /* the bounds as given, negative ones too; INGOT_UNBOUNDED removes one */
} ingot_mask;

/* off: TOP_LEFT 0, BOTTOM_RIGHT len_k - len_q of that sequence. UNSET is refused where it matters: with a mask or ALiBi,
 * unless all lengths are full and Sq = Sk. */
typedef enum ingot_align { INGOT_ALIGN_UNSET = 0, INGOT_TOP_LEFT = 1, INGOT_BOTTOM_RIGHT = 2 } ingot_align;

typedef enum ingot_lse_base { INGOT_LSE_NATURAL = 0, INGOT_LSE_BASE2 = 1 } ingot_lse_base;

/* The variable-length word: one byte a side (Q bits 7:0, K and V bits 15:8), lse layout in bits 17:16. In a byte: bit 0
 * stacked, bits 1-2 length, bits 3-4 position, the rest 0. 0 is fixed length; 0x0B0B is the usual "cu_seqlens" pack. */
typedef enum ingot_length {
	INGOT_LENGTH_MAX = 0,        /* every sequence is full */
	INGOT_LENGTH_CUMULATIVE = 1, /* int32 [B+1] prefix sums in q_lengths / k_lengths */
	INGOT_LENGTH_INDIVIDUAL = 2, /* int32 [B] lengths */
	INGOT_LENGTH_LAST_PAGE = 3   /* K, CSR pages only: int32 [B] tokens in the last page */
} ingot_length;
typedef enum ingot_position {
	INGOT_POSITION_IMPLIED = 0, /* row 0 of its own slot, or b * max_seqlen when stacked */
	INGOT_POSITION_REUSE = 1,   /* stacked: the cumulative array also gives the starts */
	INGOT_POSITION_ARRAY = 2    /* stacked: a second int32 array, [B] or [B+1] starts, in q_positions / k_positions */
} ingot_position;
typedef enum ingot_lse_layout {
	INGOT_LSE_HT = 0,
	INGOT_LSE_TH = 1
} ingot_lse_layout; /* [Hq,T] or [T,Hq], stacked Q only */

#define INGOT_SIDE(stacked, length, position) \
	((uint32_t)(stacked) | (uint32_t)(length) << 1 | (uint32_t)(position) << 3)
#define INGOT_VARLEN(q_side, k_side, lse_layout) \
	((uint32_t)(q_side) | (uint32_t)(k_side) << 8 | (uint32_t)(lse_layout) << 16)
#define INGOT_VARLEN_NONE 0x0000u
#define INGOT_VARLEN_COMPACT 0x0B0Bu
#define INGOT_VARLEN_PADDED 0x0202u
#define INGOT_VARLEN_STRIDED 0x1313u

/*
 * Scaled dot product attention, forward:
 *   s = softmax_scale * q.k (* descale factors); softcap > 0: s = softcap * tanh(s / softcap);
 *   s -= alibi[h] * |i + off - j|; s += bias; masked pairs take no part;
 *   lse = log(sum exp(s) [+ exp(sink)]); p = exp(s - lse), dropped out; out = sum p v (* v_descale).
 * A row without a valid pair gives out = 0 and lse = -inf (with a sink: lse = sink).
 *
 * Shapes. Fixed or padded: q [B,Hq,Sq,D], k [B,Hk,Sk,D], v [B,Hk,Sk,Dv], out [B,Hq,Sq,Dv], lse [B,Hq,Sq]. A stacked side is
 * [1,H,T,D], and a stacked Q makes lse [Hq,T] or [T,Hq]. Paged: k and v are [pages,page_size,Hk,*], the side is unstacked and
 * IMPLIED, with INDIVIDUAL lengths and page_table [B,max_pages], or INDIVIDUAL or LAST_PAGE lengths and CSR page_indptr
 * [B+1], page_indices [n]. Strides may be anything >= 0 with the last one 1 (outputs: no 0 on an axis longer than 1).
 * Hq must be a multiple of Hk; query head h reads key head h / (Hq/Hk).
 * Types: q, k and v alike in F32, F16 or BF16; or F16/BF16 q with 8-bit k and v alike; or all 8-bit alike. out F32, F16 or
 * BF16.
 */
typedef struct ingot_attn_fwd_params {
	uint32_t struct_size;
	uint32_t varlen; /* INGOT_VARLEN word */
	ingot_tensor q;
	ingot_tensor k;
	ingot_tensor v;
	ingot_tensor out; /* written */
	ingot_tensor lse; /* written; F32; optional */
	/* Optional terms. bias: [B,Hq,Mq,Mk], any axis broadcast by extent 1 or stride 0; q's type (8-bit q: out's), F32, or
	 * BOOL (false masks). alibi: F32 [Hq] or [B,Hq]. sink: F32 [Hq], natural log. */
	ingot_tensor bias;
	ingot_tensor alibi;
	ingot_tensor sink;
	/* Optional F32 factors of 8-bit inputs: q [1], [B,Hq] or [B,Hk]; k and v [1] or [B,Hk]. */
	ingot_tensor q_descale;
	ingot_tensor k_descale;
	ingot_tensor v_descale;
	/* I32 arrays on the device, contents never read by the host; present exactly where the varlen word asks for them. */
	ingot_tensor q_lengths;
	ingot_tensor q_positions;
	ingot_tensor k_lengths;
	ingot_tensor k_positions;
	ingot_tensor page_table;
	ingot_tensor page_indptr;
	ingot_tensor page_indices;
	/* Dropout cells on the device, one U64 or I64 element each, optional. seed_ptr replaces dropout_seed (which must be 0
	 * then); offset_ptr's content is added to dropout_offset; the pair that was used is written to seed_out, offset_out.
	 * With dropout_p 0 nothing is drawn, whatever the seed; what is asked back is written all the same. */
	ingot_tensor dropout_seed_ptr;
	ingot_tensor dropout_offset_ptr;
	ingot_tensor dropout_seed_out;
	ingot_tensor dropout_offset_out;
	uint64_t dropout_seed;
	uint64_t dropout_offset;
	/* Mandatory where a side is stacked (batch, its max_seqlen) or paged by CSR (batch, max_seqlen_k); otherwise 0 or
	 * equal to the storage. 0 to 2^31 - 1; batch * Hq * max_seqlen_q at most 2^44, batch * Hk * max_seqlen_k 2^53. */
	int64_t batch;
	int64_t max_seqlen_q;
	int64_t max_seqlen_k;
	float softmax_scale;  /* 0: 1/sqrt(D); negative is legal; NaN and Inf are refused */
	float softcap;        /* 0: none; negative, NaN and Inf are refused */
	float dropout_p;      /* [0, 1) */
	int32_t mask;         /* ingot_mask */
	int32_t align;        /* ingot_align */
	int32_t window_left;  /* any int32, INGOT_UNBOUNDED: no bound */
	int32_t window_right; /* likewise */
	int32_t lse_base;     /* ingot_lse_base */
} ingot_attn_fwd_params;

/*
 * Gradients of the forward above. out and lse are the forward's results (lse in lse_base), dout [B,Hq,Sq,Dv] the gradient of
 * out. Wanted gradients are the present ones of dq, dk, dv (shapes of q, k, v; F32, F16 or BF16), dbias (F32 or bias's type;
 * [B,Hq,Mq,Mk] with extent 1 in the axes to sum over: those where bias is broadcast), dsink (F32 [Hq]). Written, never accumulated
 * into. Rows of no sequence are not written. Refused: pages and 8-bit inputs.
 */
typedef struct ingot_attn_bwd_params {
	uint32_t struct_size;
	uint32_t varlen;
	ingot_tensor q;
	ingot_tensor k;
	ingot_tensor v;
	ingot_tensor out;
	ingot_tensor lse;
	ingot_tensor dout;
	ingot_tensor dq;
	ingot_tensor dk;
	ingot_tensor dv;
	ingot_tensor bias;
	ingot_tensor dbias;
	ingot_tensor alibi;
	ingot_tensor sink;
	ingot_tensor dsink;
	ingot_tensor q_lengths;
	ingot_tensor q_positions;
	ingot_tensor k_lengths;
	ingot_tensor k_positions;
	ingot_tensor dropout_seed_ptr;
	ingot_tensor dropout_offset_ptr;
	uint64_t dropout_seed;
	uint64_t dropout_offset;
	int64_t batch;
	int64_t max_seqlen_q;
	int64_t max_seqlen_k;
	float softmax_scale;
	float softcap;
	float dropout_p;
	int32_t mask;
	int32_t align;
	int32_t window_left;
	int32_t window_right;
	int32_t lse_base;
} ingot_attn_bwd_params;

#define INGOT_MERGE_PARTS 8

/*
 * Merges partial results of the same rows by their lse: weights exp(lse - max). An empty part is (anything finite, -inf); all
 * parts empty give (0, -inf). The parts are either one 5-D tensor [N,B,H,S,Dv] in out_parts[0] with lse_parts[0] [N,B,H,S]
 * (any N >= 0), or 1 to 8 separate ones, [B,H,S,Dv] and [B,H,S], present from index 0 without a gap. Parts F32, F16 or
 * BF16 alike; out any of these; lse F32, optional. out and lse may be the first part's own memory (same strides).
 */
typedef struct ingot_attn_merge_params {
	uint32_t struct_size;
	int32_t lse_base; /* of the parts and of lse */
	ingot_tensor out_parts[INGOT_MERGE_PARTS];
	ingot_tensor lse_parts[INGOT_MERGE_PARTS];
	ingot_tensor out;
	ingot_tensor lse;
} ingot_attn_merge_params;

/*
 * Writes new K and V rows into a cache. New rows: k_new [B,Hk,Sn,D], v_new [B,Hk,Sn,Dv], described by the Q byte of varlen
 * (new_lengths, new_positions, max_seqlen_new); stacked ones are [1,Hk,T,*]. Cache: k, v [B,Hk,Sk,*], or paged exactly as in
 * attn_fwd, described by the K byte (unstacked; INDIVIDUAL, or LAST_PAGE with CSR pages). k_lengths holds each sequence's
 * length before the append, or after it when lengths_after is 1 (mandatory with LAST_PAGE): token t of sequence b goes to
 * row length_before + t. Rows below 0 or beyond the slot or page list are dropped, and with CSR pages those from
 * max_seqlen_k on. k_new and v_new F32, F16 or BF16; the cache that same type or 8-bit (then the value stored is
 * new / descale, saturated to the largest finite value). Rows of different sequences must not meet in one slot. v and v_new
 * may be absent together.
 */
typedef struct ingot_kv_append_params {
	uint32_t struct_size;
	uint32_t varlen;
	ingot_tensor k_new;
	ingot_tensor v_new;
	ingot_tensor k;         /* written; k_new's type or an 8-bit one */
	ingot_tensor v;         /* written; k's type */
	ingot_tensor k_descale; /* F32 [1] or [B,Hk]; 8-bit caches only; optional */
	ingot_tensor v_descale;
	ingot_tensor new_lengths;
	ingot_tensor new_positions;
	ingot_tensor k_lengths;
	ingot_tensor page_table;
	ingot_tensor page_indptr;
	ingot_tensor page_indices;
	/* As attn_fwd's, with max_seqlen_new and Hk in the place of max_seqlen_q and Hq. */
	int64_t batch;
	int64_t max_seqlen_new;
	int64_t max_seqlen_k;
	int32_t lengths_after; /* 0 or 1 */
	int32_t reserved;      /* must be 0 */
} ingot_kv_append_params;

/*
 * Writes the dropout mask that forward and backward use: mask BOOL [B,Hq,Sq,Sk], 1 = kept. Entry (b,h,i,j) is word j % 4 of
 * Philox4x32-10 with key = seed and counter (offset, ((b*Hq + h)*Mq + i) * ceil(Mk/4) + j/4), kept iff
 * word >= floor(dropout_p * 2^32 + 0.5) (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
 * max_seqlen_q, max_seqlen_k: Mq, Mk of the call it explains; 0: Sq, Sk.
 */
typedef struct ingot_attn_dropout_mask_params {
	uint32_t struct_size;
	float dropout_p;
	ingot_tensor mask; /* written */
	ingot_tensor dropout_seed_ptr;
	ingot_tensor dropout_offset_ptr;
	uint64_t dropout_seed;
	uint64_t dropout_offset;
	int64_t max_seqlen_q;
	int64_t max_seqlen_k;
} ingot_attn_dropout_mask_params;

/* ---- the verbs ---------------------------------------------------------------------------------------------------- */

enum { INGOT_TEXT = 0, INGOT_JSON = 1 }; /* format of an explanation */

/*
 * For each operator OP:
 *   ingot_OP            runs the call on the stream.
 *   ingot_OP_workspace  *bytes = the exact workspace the call needs, from host-known fields only.
 *   ingot_OP_prepare    loads every image that this call, or one with smaller lengths under the same bits, can choose. With a
 *                       workspace, a call after it allocates nothing, loads nothing and synchronises nothing.
 *   ingot_OP_explain    writes each candidate, refused why or measured what, and the winner, as text or JSON, cut to capacity
 *                       and always 0-terminated when capacity > 0; *needed (optional) = bytes of the whole with its 0.
 *                       INGOT_OK also when nothing can run: the text says so. buffer may be NULL when capacity is 0.
 * All go through one selection, so they cannot disagree. Statuses: OK, INVALID, VERSION_MISMATCH, UNSUPPORTED, NOT_FOUND,
 * DEGRADED, WORKSPACE, OUT_OF_MEMORY, IMAGE, NO_DEVICE, DRIVER, INTERNAL. bytes must not be NULL.
 */
#define INGOT_OPERATOR_LIST(X) X(attn_fwd) X(attn_bwd) X(attn_merge) X(kv_append) X(attn_dropout_mask)

INGOT_API ingot_status ingot_attn_fwd(const ingot_attn_fwd_params *params, ingot_stream stream,
                                      const ingot_options *options);
INGOT_API ingot_status ingot_attn_fwd_workspace(const ingot_attn_fwd_params *params, ingot_stream stream,
                                                const ingot_options *options, uint64_t *bytes);
INGOT_API ingot_status ingot_attn_fwd_prepare(const ingot_attn_fwd_params *params, ingot_stream stream,
                                              const ingot_options *options);
INGOT_API ingot_status ingot_attn_fwd_explain(const ingot_attn_fwd_params *params, ingot_stream stream,
                                              const ingot_options *options, int32_t format, char *buffer,
                                              size_t capacity, size_t *needed);

INGOT_API ingot_status ingot_attn_bwd(const ingot_attn_bwd_params *params, ingot_stream stream,
                                      const ingot_options *options);
INGOT_API ingot_status ingot_attn_bwd_workspace(const ingot_attn_bwd_params *params, ingot_stream stream,
                                                const ingot_options *options, uint64_t *bytes);
INGOT_API ingot_status ingot_attn_bwd_prepare(const ingot_attn_bwd_params *params, ingot_stream stream,
                                              const ingot_options *options);
INGOT_API ingot_status ingot_attn_bwd_explain(const ingot_attn_bwd_params *params, ingot_stream stream,
                                              const ingot_options *options, int32_t format, char *buffer,
                                              size_t capacity, size_t *needed);

INGOT_API ingot_status ingot_attn_merge(const ingot_attn_merge_params *params, ingot_stream stream,
                                        const ingot_options *options);
INGOT_API ingot_status ingot_attn_merge_workspace(const ingot_attn_merge_params *params, ingot_stream stream,
                                                  const ingot_options *options, uint64_t *bytes);
INGOT_API ingot_status ingot_attn_merge_prepare(const ingot_attn_merge_params *params, ingot_stream stream,
                                                const ingot_options *options);
INGOT_API ingot_status ingot_attn_merge_explain(const ingot_attn_merge_params *params, ingot_stream stream,
                                                const ingot_options *options, int32_t format, char *buffer,
                                                size_t capacity, size_t *needed);

INGOT_API ingot_status ingot_kv_append(const ingot_kv_append_params *params, ingot_stream stream,
                                       const ingot_options *options);
INGOT_API ingot_status ingot_kv_append_workspace(const ingot_kv_append_params *params, ingot_stream stream,
                                                 const ingot_options *options, uint64_t *bytes);
INGOT_API ingot_status ingot_kv_append_prepare(const ingot_kv_append_params *params, ingot_stream stream,
                                               const ingot_options *options);
INGOT_API ingot_status ingot_kv_append_explain(const ingot_kv_append_params *params, ingot_stream stream,
                                               const ingot_options *options, int32_t format, char *buffer,
                                               size_t capacity, size_t *needed);

INGOT_API ingot_status ingot_attn_dropout_mask(const ingot_attn_dropout_mask_params *params, ingot_stream stream,
                                               const ingot_options *options);
INGOT_API ingot_status ingot_attn_dropout_mask_workspace(const ingot_attn_dropout_mask_params *params,
                                                         ingot_stream stream, const ingot_options *options,
                                                         uint64_t *bytes);
INGOT_API ingot_status ingot_attn_dropout_mask_prepare(const ingot_attn_dropout_mask_params *params,
                                                       ingot_stream stream, const ingot_options *options);
INGOT_API ingot_status ingot_attn_dropout_mask_explain(const ingot_attn_dropout_mask_params *params,
                                                       ingot_stream stream, const ingot_options *options,
                                                       int32_t format, char *buffer, size_t capacity, size_t *needed);

/* One number over the choices this process would make on the stream's device: the tuning rows in use, every implementation's
 * source, the library's version, the device's architecture, and on a GPU the packs of INGOT_IMAGE_PATH and of the library's
 * folder (not those of an options.image_path). Ranks of one job compare it to be sure that they choose alike. OK, INVALID,
 * NO_DEVICE, DRIVER, OUT_OF_MEMORY; digest must not be NULL. */
INGOT_API ingot_status ingot_selection_digest(ingot_stream stream, uint64_t *digest);

/* ---- experimental: may change in any version ------------------------------------------------------------------------ */
#ifdef INGOT_EXPERIMENTAL

/* One implementation of the library's list. Strings are the library's, valid for ever. since 0.1 */
typedef struct ingot_implementation {
	const char *name;          /* "attn_fwd_avx512" */
	const char *family;        /* "x86", "reference" */
	const char *operator_name; /* "attn_fwd" */
	const char *arch;          /* architecture it is built for, "" = any */
	const char *digest;        /* of its source, 32 hex digits: what tuning rows and packs are compared with */
	int32_t variant_count;
	int32_t device_type; /* ingot_device_type */
	int32_t available;   /* 1: this machine can run it */
	int32_t reserved;
} ingot_implementation;

/* One variant of an implementation. On a GPU it is an image: `ingot build` compiles the implementation's file with `defines`
 * and accepts at most spill_bytes of register spills; the image holds the kernels, a NULL-terminated list. On a CPU defines is
 * "" and kernels NULL. Strings are the library's, valid for ever. since 0.1 */
typedef struct ingot_variant {
	const char *name; /* "bf16_d128_plain" */
	const char *defines;
	const char *const *kernels;
	uint32_t spill_bytes;
	uint32_t reserved;
} ingot_variant;

/* Implementation `index`, from 0; INGOT_NOT_FOUND past the last. The order is fixed in one build. since 0.1 */
INGOT_API ingot_status ingot_implementation_get(int32_t index, ingot_implementation *implementation);
/* Variant `variant`, from 0, of implementation `index`; INGOT_NOT_FOUND past the last. since 0.1 */
INGOT_API ingot_status ingot_variant_get(int32_t index, int32_t variant, ingot_variant *out);

/* Architecture ("avx512_bf16") and concrete processor or GPU ("intel_6_207") of the stream's device, cut to capacity, and
 * how many threads a CPU call uses (1 on a GPU). since 0.1 */
INGOT_API ingot_status ingot_device_describe(ingot_stream stream, char *arch, size_t arch_capacity, char *model,
                                             size_t model_capacity, int32_t *threads);

#endif /* INGOT_EXPERIMENTAL */

#ifdef __cplusplus
}
#endif
#endif
