/*
 * A problem in one line, as `explain`, `check` and `bench` take and print it:
 *
 *     fwd:b1,hq32,hk8,sq1,sk8192,d128,bf16,causal,softcap=30,paged=16
 *
 * problem_grammar() is the whole language; a line printed for a failing case runs that very case again.
 */
#ifndef INGOT_TOOL_PROBLEM_H
#define INGOT_TOOL_PROBLEM_H

#include "tool.h"

#define PROBLEM_TEXT 1024
#define PROBLEM_LENGTHS 64

typedef enum problem_layout {
	LAYOUT_BHSD,  /* dense [B,H,S,D] */
	LAYOUT_BSHD,  /* a transposed view of [B,S,H,D] */
	LAYOUT_PACKED /* a slice of [B,S,3,H,D], as of a packed QKV */
} problem_layout;

typedef enum problem_pages { PAGES_NONE, PAGES_DENSE, PAGES_CSR, PAGES_CSR_LAST } problem_pages;

enum { AXIS_B = 1, AXIS_H = 2, AXIS_Q = 4, AXIS_K = 8, AXIS_ALL = 15 };

/* Plain data: one may be copied and compared by its text. */
typedef struct problem {
	int64_t op; /* tool_operator */
	int64_t batch, heads_q, heads_k, sq, sk, d, dv;
	int64_t dtype, kv_dtype, out_dtype, grad_dtype; /* ingot_dtype */
	int64_t mask, left, right, align;
	double scale, softcap, dropout;
	int64_t alibi; /* 0 none, 1 [Hq], 2 [B,Hq] */
	int64_t sink;
	int64_t bias_dtype, bias_axes, bias_stride0; /* stride0: broadcast by stride 0, not by extent 1 */
	int64_t descale;                             /* 0 none, 1 one element, 2 [B,Hk], 3 q [B,Hq] */
	int64_t q_side, k_side;                      /* bytes of the variable-length word */
	int64_t q_lengths[PROBLEM_LENGTHS], k_lengths[PROBLEM_LENGTHS], q_given, k_given; /* none given: random */
	int64_t pages, page_size, page_heads_first, page_share;
	int64_t layout, pitch, misalign, kv_stride0, dout_stride0;
	int64_t lse, lse_base2, lse_th, cells;
	int64_t grads; /* bits of dq, dk, dv: 7 for all */
	int64_t det, invariant;
	int64_t parts, separate, inplace; /* merge */
	int64_t after;                    /* append: the lengths are those after it */
	int64_t data;                     /* problem_data */
} problem;

/* How much of a problem is made into memory. */
typedef enum case_mode {
	CASE_SHAPES, /* none: enough for explain, workspace and prepare */
	CASE_SPEED,  /* tensors with values; sequences are full where the line gives no lengths */
	CASE_CHECK   /* and all that judging the results needs */
} case_mode;

typedef enum problem_data {
	DATA_NORMAL,      /* standard normal */
	DATA_X5,          /* five times that */
	DATA_GROW,        /* scores that grow with the key's index, so that a running maximum moves every block */
	DATA_COLD,        /* all scores near -120: exp(0 - lse) overflows where a dead score is taken for 0 */
	DATA_LOUD,        /* a few channels of 8 and a first key half as large again, as in real layers */
	DATA_ZERO_Q,      /* all scores 0 */
	DATA_ONES,        /* q = k = v = 1 */
	DATA_BIG_V,       /* v = 60000 */
	DATA_ALTERNATE_V, /* v = +60000, -60000 by turns */
	DATA_NAN_ROW,     /* one query row is NaN */
	DATA_LOWEST,      /* the bias holds the lowest finite value in place of -inf */
	DATA_EMPTY_ROWS,  /* the bias empties whole rows and whole first key blocks */
	DATA_KINDS
} problem_data;

/* False with a sentence in error. */
bool problem_parse(const char *text, problem *p, char *error, size_t capacity);
/* The shortest line that parses to the same problem. */
void problem_print(const problem *p, char *text, size_t capacity);
const char *problem_grammar(void);

/* The flags of ingot_options that a problem asks for. */
uint32_t problem_flags(const problem *p);
/* Query-key pairs the mask keeps, over all query heads. Here and below sequences are of the given lengths, else full. */
double problem_pairs(const problem *p);
/* Work of one call: FLOPs of an attention, bytes of K and V read once a key head. */
double problem_flops(const problem *p);
double problem_kv_bytes(const problem *p);
/* Bytes that a merge, an append or a mask reads and writes at most. */
double problem_moved_bytes(const problem *p);

#endif
