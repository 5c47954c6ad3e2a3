/*
 * One attention case: the fp64 reference held against the oracle, the textbook's error as the yardstick, then every kernel:
 * the values by the rule, the bytes round them untouched, the same bits for other thread counts and workspaces.
 */
#include "check.h"
#include "rule.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { ORDERS = 8 };

typedef struct session {
	check_run *run;
	const problem *p;
	uint64_t seed;
	test_case c;
	bool forward;
	test_outputs reference, yardstick;          /* of the operator under test */
	test_outputs forward_exact, forward_stored; /* backward: what it is given */
	double *want[TEST_OUTPUTS], *textbook[TEST_OUTPUTS];
	double *eight_bit[TEST_OUTPUTS]; /* forward: the textbook of kernels that multiply in 8 bits, once one has asked */
	double *exact[TEST_OUTPUTS];     /* backward: what the fp64 reference must give, which takes nothing as given */
	double *given_out, *given_lse;   /* backward: the forward's stored results as dense values */
} session;

static const char *params_of(const session *s, const test_outputs *o, const test_outputs *from, void *space) {
	if (s->forward) *(ingot_attn_fwd_params *)space = case_fwd(&s->c, o);
	else *(ingot_attn_bwd_params *)space = case_bwd(&s->c, o, from);
	return space;
}

typedef union params {
	ingot_attn_fwd_params fwd;
	ingot_attn_bwd_params bwd;
} params;

static double *values_of(const test_case *c, const test_outputs *o, test_output which, int64_t *count) {
	int64_t *at;
	*count = case_live(c, o, which, &at);
	const ingot_tensor *t = &o->at[which].t;
	double *values = tool_alloc(sizeof(double) * (size_t)(*count + 1));
	for (int64_t i = 0; i < *count; i++) values[i] = (double)tool_load(t->data, at[i], t->dtype);
	free(at);
	return values;
}

/* The stored type that bounds a result: the coarser of the inputs' and the result's own. */
static int32_t bound_dtype(const problem *p, int32_t own) {
	const int32_t stored = tool_is_8bit((int32_t)p->dtype) ? INGOT_BF16 : (int32_t)p->dtype;
	if (own == INGOT_BF16 || stored == INGOT_BF16) return INGOT_BF16;
	if (own == INGOT_F16 || stored == INGOT_F16) return INGOT_F16;
	return INGOT_F32;
}

/* Kernels whose products are of 8-bit numbers: P is rounded to V's type and sums are those of the matrix units. They are held to the
 * textbook that does the same, all others to that in bf16. */
static bool multiplies_in_8_bits(const check_kernel *kernel) {
	static const char *const names[] = {"cuda/attn_fwd_sm90_fp8"};
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		if (strcmp(kernel->name, names[i]) == 0) return true;
	return false;
}

static bool is_cell(test_output which) {
	return which == SEED_OUT || which == OFFSET_OUT;
}

/* Runs one implementation that must not refuse. */
static bool run_needed(session *s, const char *backend, test_outputs *o, const test_outputs *from, bool forward) {
	params space;
	const bool kept = s->forward;
	s->forward = forward;
	const void *call = params_of(s, o, from, &space);
	s->forward = kept;
	const ingot_options options = check_reference(s->run, backend);
	const ingot_status status = tool_run(forward ? TOOL_FWD : TOOL_BWD, call, &options);
	if (status == INGOT_OK) return true;
	check_fail(s->run, NULL, s->p, s->seed, "%s cannot run it: %s: %s", backend, ingot_status_name(status),
	           ingot_last_error());
	return false;
}

/* The reference against the oracle, which shares no line with it. */
static bool reference_is_right(session *s) {
	for (int which = 0; which < TEST_OUTPUTS; which++) {
		if (!s->want[which]) continue;
		int64_t n, m;
		double *truth = case_truth(&s->c, (test_output)which, &n);
		if (!truth) continue;
		double *got = values_of(&s->c, &s->reference, (test_output)which, &m);
		const rule_result r =
			rule_apply(which == LSE ? RULE_LSE : RULE_VALUE, got, truth, truth, n, INGOT_F32, case_scale(&s->c, which));
		free(truth);
		free(got);
		if (n != m || !r.pass) {
			char place[128];
			case_locate(&s->c, (test_output)which, r.index, place, sizeof place);
			check_fail(s->run, NULL, s->p, s->seed,
			           "the fp64 reference differs from the formula: %s: reference %.9g, formula %.9g", place, r.got,
			           r.want);
			return false;
		}
	}
	return true;
}

/* The values of a forward output as dense rows of `width`, zero where no sequence is. */
static double *dense_of(const session *s, test_output which, int64_t width) {
	const problem *p = s->p;
	int64_t count, n = 0;
	double *values = values_of(&s->c, &s->forward_stored, which, &count);
	double *dense = tool_alloc(sizeof(double) * (size_t)(p->batch * p->heads_q * s->c.max_q * width + 1));
	for (int64_t b = 0; b < p->batch; b++)
		for (int64_t h = 0; h < p->heads_q; h++) {
			const int64_t live = s->c.len_q[b] * width;
			memcpy(dense + (b * p->heads_q + h) * s->c.max_q * width, values + n, sizeof(double) * (size_t)live);
			n += live;
		}
	free(values);
	return dense;
}

/* Runs the oracle on what a backward is given; order > 0: with fp32 scores summed in that order of the columns. */
static void run_given(session *s, int order) {
	oracle *const o = &s->c.truth;
	oracle_release(o);
	o->given_out = s->given_out;
	o->given_lse = s->given_lse;
	o->order = order;
	o->dq_scale = o->dk_scale = o->dv_scale = o->dbias_scale = o->dsink_scale = 0;
	oracle_run(o);
	o->given_out = o->given_lse = NULL;
	o->order = 0;
}

/* The truth of a backward is that of the bits it is given, LSE and out among them, as the reference works on the exact input
 * bits: an fp32 LSE of 500 is off by 1e-5, which no backward could know or mend. */
static void take_given(session *s) {
	s->given_out = dense_of(s, OUT, s->p->dv);
	s->given_lse = dense_of(s, LSE, 1);
	run_given(s, 0);
	for (int which = 0; which < TEST_OUTPUTS; which++) {
		int64_t n;
		double *truth =
			s->want[which] && which != OUT && which != LSE ? case_truth(&s->c, (test_output)which, &n) : NULL;
		if (!truth) continue;
		s->exact[which] = s->want[which];
		s->want[which] = truth;
	}
}

static bool prepare(session *s) {
	char error[256];
	if (!case_build(&s->c, s->p, s->seed, CASE_CHECK, error, sizeof error)) {
		check_fail(s->run, NULL, s->p, s->seed, "the case cannot be made: %s", error);
		return false;
	}
	oracle_run(&s->c.truth);
	outputs_make(&s->forward_exact, &s->c, true, true);
	outputs_make(&s->forward_stored, &s->c, true, false);
	if (!run_needed(s, "reference/attn_fwd_reference_f64", &s->forward_exact, NULL, true) ||
	    !run_needed(s, "reference/attn_fwd_reference", &s->forward_stored, NULL, true))
		return false;
	if (s->forward) {
		s->reference = s->forward_exact;
		s->yardstick = s->forward_stored;
	} else {
		outputs_make(&s->reference, &s->c, false, true);
		outputs_make(&s->yardstick, &s->c, false, false);
		if (!run_needed(s, "reference/attn_bwd_reference_f64", &s->reference, &s->forward_exact, false) ||
		    !run_needed(s, "reference/attn_bwd_reference", &s->yardstick, &s->forward_stored, false))
			return false;
	}
	for (int which = 0; which < TEST_OUTPUTS; which++) {
		int64_t n;
		if (s->reference.at[which].t.dtype == INGOT_NONE || is_cell((test_output)which)) continue;
		s->want[which] = values_of(&s->c, &s->reference, (test_output)which, &n);
		s->textbook[which] = values_of(&s->c, &s->yardstick, (test_output)which, &n);
	}
	if (!reference_is_right(s)) return false;
	if (!s->forward) take_given(s);
	return true;
}

static void release(session *s) {
	for (int which = 0; which < TEST_OUTPUTS; which++) {
		free(s->want[which]);
		free(s->eight_bit[which]);
		free(s->exact[which]);
		free(s->textbook[which]);
	}
	if (!s->forward) {
		outputs_release(&s->reference);
		outputs_release(&s->yardstick);
	}
	free(s->given_out);
	free(s->given_lse);
	outputs_release(&s->forward_exact);
	outputs_release(&s->forward_stored);
	case_release(&s->c);
}

/* The textbook's values that a kernel's errors are compared with. */
static const double *textbook_of(session *s, const check_kernel *kernel, test_output which) {
	if (!multiplies_in_8_bits(kernel)) return s->textbook[which];
	if (!s->eight_bit[which]) {
		oracle *const o = &s->c.truth;
		int64_t n;
		oracle_release(o);
		o->eight_bit = true;
		oracle_run(o);
		o->eight_bit = false;
		for (int i = 0; i < TEST_OUTPUTS; i++)
			if (s->want[i]) s->eight_bit[i] = case_truth(&s->c, (test_output)i, &n);
	}
	return s->eight_bit[which];
}

/* Holds every output to the rule, and all memory that is not a live element to what it was. Spoils the outputs. */
static bool verify(session *s, check_kernel *kernel, test_outputs *o, double *ratio) {
	for (int which = 0; which < TEST_OUTPUTS; which++) {
		buffer *b = &o->at[which];
		if (b->t.dtype == INGOT_NONE) continue;
		int64_t *at, byte;
		const int64_t n = case_live(&s->c, o, (test_output)which, &at);
		char place[160];
		for (int64_t i = 0; i < n; i++)
			if (buffer_poisoned_at(b, at[i])) {
				case_locate(&s->c, (test_output)which, i, place, sizeof place);
				check_fail(s->run, kernel, s->p, s->seed, "%s was not written", place);
				free(at);
				return false;
			}
		if (is_cell((test_output)which)) {
			const uint64_t got = *(const uint64_t *)b->t.data,
						   want = which == SEED_OUT ? s->c.dropout_seed : s->c.dropout_offset;
			if (got != want) {
				check_fail(s->run, kernel, s->p, s->seed, "%s is %llu; the one used is %llu", test_output_names[which],
				           (unsigned long long)got, (unsigned long long)want);
				free(at);
				return false;
			}
		} else {
			double *got = tool_alloc(sizeof(double) * (size_t)(n + 1));
			for (int64_t i = 0; i < n; i++) got[i] = (double)tool_load(b->t.data, at[i], b->t.dtype);
			const int32_t bound = which == LSE ? INGOT_F32 : bound_dtype(s->p, b->t.dtype);
			const bool exact = strcmp(kernel->name, "reference/attn_bwd_reference_f64") == 0 && s->exact[which];
			const double *const want = exact ? s->exact[which] : s->want[which];
			const double *const textbook = textbook_of(s, kernel, (test_output)which);
			rule_result r = rule_apply(which == LSE ? RULE_LSE : RULE_VALUE, got, want, textbook, n, bound,
			                           case_scale(&s->c, (test_output)which));
			/* The textbook's error is that of one order of summation, and with few keys it can be exact by chance: in fp32, where
			 * nothing else rounds, it is taken over other orders too. */
			for (int order = 1; !r.pass && which != LSE && bound == INGOT_F32 && order <= ORDERS; order++) {
				int64_t m;
				run_given(s, order);
				double *other = case_truth(&s->c, (test_output)which, &m);
				const rule_result again =
					rule_apply(RULE_VALUE, got, want, other, n, bound, case_scale(&s->c, (test_output)which));
				if (again.ratio < r.ratio || again.pass) r = again;
				free(other);
			}
			free(got);
			if (r.ratio > *ratio) *ratio = r.ratio;
			if (!r.pass) {
				case_locate(&s->c, (test_output)which, r.index, place, sizeof place);
				check_fail(s->run, kernel, s->p, s->seed,
				           "%s: got %.9g, want %.9g; largest error %.3g, textbook's %.3g, allowed %.3g, ratio %.3g",
				           place, r.got, r.want, r.error, r.yardstick, r.allowed, r.ratio);
				free(at);
				return false;
			}
		}
		for (int64_t i = 0; i < n; i++) buffer_poison_at(b, at[i]);
		free(at);
		if (buffer_first_stray(b, &byte)) {
			check_fail(
				s->run, kernel, s->p, s->seed,
				"%s: byte %lld from its base is written but belongs to no live row (the tensor has %lld elements)",
				test_output_names[which], (long long)byte, (long long)tool_elements(&b->t));
			return false;
		}
	}
	const char *input = case_written_input(&s->c);
	if (input) {
		check_fail(s->run, kernel, s->p, s->seed, "it wrote into its input %s", input);
		buffer *const all[] = {&s->c.q, &s->c.k, &s->c.v, &s->c.dout, &s->c.bias};
		for (size_t i = 0; i < sizeof all / sizeof *all; i++) buffer_seal(all[i]);
		return false;
	}
	return true;
}

static uint64_t hash_outputs(const test_outputs *o) {
	uint64_t hash = 0;
	for (int which = 0; which < TEST_OUTPUTS; which++)
		if (o->at[which].memory) hash = hash * 31 + XXH3_64bits(o->at[which].memory, o->at[which].bytes);
	return hash;
}

typedef struct manner {
	int32_t threads;
	uint32_t flags;
	int fill; /* workspace: 0 to 2 exact with that fill, -1 the library's own */
} manner;

static ingot_status run_kernel(session *s, check_kernel *kernel, test_outputs *o, manner m, bool *intact) {
	params space;
	const void *call = params_of(s, o, &s->forward_stored, &space);
	ingot_options options = tool_options(kernel->name, m.threads);
	options.flags = m.flags;
	*intact = true;
	outputs_poison(o);
	if (m.fill >= 0) {
		uint64_t bytes = 0;
		const ingot_status status = tool_workspace(kernel->op, call, &options, &bytes);
		if (status != INGOT_OK) return status;
		options.workspace = check_workspace(bytes, m.fill);
		options.workspace_size = bytes;
		const ingot_status ran = tool_run(kernel->op, call, &options);
		*intact = check_workspace_intact(options.workspace, bytes);
		free(options.workspace);
		return ran;
	}
	return tool_run(kernel->op, call, &options);
}

static void check_kernel_on(session *s, check_kernel *kernel) {
	check_run *run = s->run;
	test_outputs o;
	outputs_make(&o, &s->c, s->forward, false);
	const uint64_t dice = tool_hash(s->seed, 991, 0);
	bool det = s->p->det || dice % 4 != 0;
	manner first = {run->threads, (det ? INGOT_DETERMINISTIC : 0u) | (s->p->invariant ? INGOT_BATCH_INVARIANT : 0u),
	                (int)(dice >> 8) % 3};
	bool intact;
	ingot_status status = run_kernel(s, kernel, &o, first, &intact);
	if (status == INGOT_UNSUPPORTED && det && !s->p->det) {
		/* perhaps only that was too much */
		det = false;
		first.flags &= ~(uint32_t)INGOT_DETERMINISTIC;
		status = run_kernel(s, kernel, &o, first, &intact);
	}
	if (status == INGOT_UNSUPPORTED) {
		check_refused(run, kernel, s->p);
		outputs_release(&o);
		return;
	}
	double ratio = 0;
	const uint64_t bits = hash_outputs(&o);
	if (status != INGOT_OK) {
		check_fail(run, kernel, s->p, s->seed, "%s: %s", ingot_status_name(status), ingot_last_error());
	} else if (!intact) {
		check_fail(run, kernel, s->p, s->seed, "it wrote past the workspace it asked for");
	} else if (verify(s, kernel, &o, &ratio)) {
		/* Again in other manners: the same bits. Without `deterministic` a repeat may differ, but not in what it writes where. */
		static const int32_t counts[] = {1, 2, 3, 7, 17};
		/* The references are slow and plain: on large cases two more runs of theirs say as much as six. */
		const bool slow = strncmp(kernel->name, "reference/", 10) == 0 && problem_flops(s->p) > 3e7;
		const int runs = run->level == 0 ? 1 : s->p->det && !slow ? 6 : 2;
		bool good = true;
		for (int i = 0; good && i < runs; i++) {
			manner again = first;
			again.threads = counts[s->p->det && i < 5 ? i : (int)((dice >> (16 + 4 * i)) % 5)];
			again.fill = i % 2 ? (first.fill + 1 + i / 2) % 3 : -1;
			const ingot_status other = run_kernel(s, kernel, &o, again, &intact);
			if (other != INGOT_OK) {
				check_fail(run, kernel, s->p, s->seed, "with %d threads: %s: %s", again.threads,
				           ingot_status_name(other), ingot_last_error());
				good = false;
			} else if (!intact) {
				check_fail(run, kernel, s->p, s->seed, "with %d threads it wrote past the workspace it asked for",
				           again.threads);
				good = false;
			} else if (det && hash_outputs(&o) != bits) {
				check_fail(
					run, kernel, s->p, s->seed,
					"deterministic, yet %d threads and a workspace %s give other bits than %d threads and one filled with %s",
					again.threads,
					again.fill < 0    ? "of the library"
					: again.fill == 0 ? "of zeros"
					: again.fill == 1 ? "of NaN"
									  : "of 1e30",
					first.threads,
					first.fill == 0   ? "zeros"
					: first.fill == 1 ? "NaN"
									  : "1e30");
				good = false;
			} else if (!det) {
				good = verify(s, kernel, &o, &ratio);
			}
		}
		if (good) check_passed(run, kernel, s->p, ratio);
	}
	outputs_release(&o);
}

void check_attention(check_run *run, const problem *p, uint64_t seed) {
	session s = {.run = run, .p = p, .seed = seed, .forward = p->op == TOOL_FWD};
	const double begun = tool_now();
	const bool ready = prepare(&s);
	check_spent(run, NULL, begun);
	for (int i = 0; ready && i < run->count; i++) {
		if (run->kernels[i].op != (tool_operator)p->op) continue;
		const double turn = tool_now();
		check_kernel_on(&s, &run->kernels[i]);
		check_spent(run, &run->kernels[i], turn);
	}
	release(&s);
}
