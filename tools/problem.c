/* The language of problem lines: one table of words, used to read and to print. */
#include "problem.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static const char *const op_names[TOOL_OPERATORS] = {"fwd", "bwd", "merge", "append", "mask"};
static const char *const data_names[DATA_KINDS] = {"normal", "x5",   "grow", "cold",   "loud",   "zeroq",
                                                   "ones",   "bigv", "altv", "nanrow", "lowest", "emptyrows"};

static const struct {
	const char *name;
	int64_t side;
} side_names[] = {
	{"full", 0x00},  {"cu", 0x0b},      {"padded", 0x02}, {"strided", 0x13},   {"lengths", 0x04},
	{"slots", 0x05}, {"slotscu", 0x03}, {"gaps", 0x15},   {"stackfull", 0x01}, {"gapsfull", 0x11},
};
enum { SIDES = sizeof side_names / sizeof *side_names };

#define AT(field) offsetof(problem, field)

/* Operators that a word applies to. Sizes and types apply to all. */
enum {
	FWD = 1 << TOOL_FWD,
	BWD = 1 << TOOL_BWD,
	MERGE = 1 << TOOL_MERGE,
	APPEND = 1 << TOOL_APPEND,
	MASK = 1 << TOOL_MASK,
	BOTH = FWD | BWD,
	EVERY = (1 << TOOL_OPERATORS) - 1
};

/* A word followed by a number: b4. */
static const struct {
	const char *word;
	size_t at, also; /* also: a second field of the same value; 0: none */
	int64_t high;
} sizes[] = {
	{"b", AT(batch), 0, INT32_MAX},
	{"h", AT(heads_q), AT(heads_k), INT32_MAX},
	{"hq", AT(heads_q), 0, INT32_MAX},
	{"hk", AT(heads_k), 0, INT32_MAX},
	{"s", AT(sq), AT(sk), INT32_MAX},
	{"sq", AT(sq), 0, INT32_MAX},
	{"sk", AT(sk), 0, INT32_MAX},
	{"d", AT(d), AT(dv), 576},
	{"dv", AT(dv), 0, 512},
};

/* A word alone sets a field to a value. */
static const struct {
	const char *word;
	size_t at;
	int64_t value;
	int operators;
} words[] = {
	{"causal", AT(mask), INGOT_MASK_CAUSAL, BOTH},
	{"tl", AT(align), INGOT_TOP_LEFT, BOTH},
	{"br", AT(align), INGOT_BOTTOM_RIGHT, BOTH},
	{"alibi", AT(alibi), 1, BOTH},
	{"alibi2", AT(alibi), 2, BOTH},
	{"sink", AT(sink), 1, BOTH},
	{"bias0", AT(bias_stride0), 1, BOTH},
	{"descale", AT(descale), 1, FWD | APPEND},
	{"descalek", AT(descale), 2, FWD | APPEND},
	{"descaleq", AT(descale), 3, FWD},
	{"hnd", AT(page_heads_first), 1, FWD},
	{"share", AT(page_share), 1, FWD},
	{"bshd", AT(layout), LAYOUT_BSHD, BOTH},
	{"packed", AT(layout), LAYOUT_PACKED, BOTH},
	{"misalign", AT(misalign), 1, EVERY},
	{"kv0", AT(kv_stride0), 1, BOTH},
	{"do0", AT(dout_stride0), 1, BWD},
	{"nolse", AT(lse), 0, FWD | MERGE},
	{"base2", AT(lse_base2), 1, BOTH | MERGE},
	{"th", AT(lse_th), 1, BOTH},
	{"cells", AT(cells), 1, BOTH | MASK},
	{"det", AT(det), 1, EVERY},
	{"inv", AT(invariant), 1, EVERY},
	{"separate", AT(separate), 1, MERGE},
	{"inplace", AT(inplace), 1, MERGE},
	{"after", AT(after), 1, APPEND},
};

static const struct {
	const char *word;
	int operators;
} assignments[] = {
	{"kv", BOTH | APPEND},
	{"out", BOTH | MERGE},
	{"grads", BWD},
	{"scale", BOTH},
	{"softcap", BOTH},
	{"dropout", BOTH | MASK},
	{"pitch", BOTH | MASK},
	{"parts", MERGE},
	{"ql", BOTH | APPEND},
	{"kl", BOTH | APPEND},
	{"qside", BOTH | APPEND},
	{"kside", BOTH},
	{"varlen", BOTH | APPEND},
	{"paged", FWD | APPEND},
	{"csr", FWD | APPEND},
	{"csrlast", FWD | APPEND},
	{"window", BOTH},
	{"bias", BOTH},
	{"want", BWD},
	{"data", BOTH},
};

enum {
	SIZES = sizeof sizes / sizeof *sizes,
	WORDS = sizeof words / sizeof *words,
	ASSIGNMENTS = sizeof assignments / sizeof *assignments
};

static int64_t *field(problem *p, size_t at) {
	return (int64_t *)((char *)p + at);
}

static int64_t value(const problem *p, size_t at) {
	return *(const int64_t *)((const char *)p + at);
}

const char *problem_grammar(void) {
	return "A problem is OP:WORD,WORD,... with OP one of fwd, bwd, merge, append, mask (the dropout mask), and words\n"
		   "that apply to it; of two that say the same the later counts:\n"
		   "  b2 h8 hq8 hk2 s512 sq1 sk512 d64 dv64   batch, heads, lengths, head sizes (merge: b h s d; append: s new rows)\n"
		   "  f32 f16 bf16 e4m3 e5m2 e4m3fnuz e5m2fnuz   type of q, k, v (f32)\n"
		   "  kv=e4m3 out=f32 grads=f32               types of k and v, of out, of the gradients\n"
		   "  causal, window=128:0 (inf: no bound), tl, br   mask, and where its diagonal is (br)\n"
		   "  scale=0.1 softcap=30 sink alibi alibi2 (a slope for each sequence) dropout=0.1 cells (seed in memory)\n"
		   "  bias=f32 bias=bool:hk                   bias, with the axes that are not broadcast (bhqk); bias0: by stride 0\n"
		   "  varlen=cu qside=gaps kside=0x04         how lengths are given: full, padded, lengths, cu, strided, slots, slotscu,\n"
		   "                                          gaps, stackfull, gapsfull or the byte itself\n"
		   "  ql=3/0/17 kl=5/12/0                     the lengths; else random ones (bench: full)\n"
		   "  paged=16 csr=16 csrlast=16 hnd share    pages of that many keys: dense table, CSR, CSR with last-page lengths\n"
		   "  descale descalek descaleq               factors of 8-bit inputs: one, [B,Hk], or q's [B,Hq]\n"
		   "  bshd packed pitch=3 misalign kv0 do0    strides: transposed, packed QKV, spare columns, odd bases, stride 0\n"
		   "  nolse base2 th det inv want=qkv         LSE, determinism, batch invariance, which gradients\n"
		   "  parts=4 separate inplace                merge; after (append: lengths are those after it)\n"
		   "  data=normal|x5|grow|cold|loud|zeroq|ones|bigv|altv|nanrow|lowest|emptyrows   values\n";
}

__attribute__((format(printf, 3, 4))) static bool fail(char *error, size_t capacity, const char *format, ...) {
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(error, capacity, format, arguments);
	va_end(arguments);
	return false;
}

static bool read_integer(const char *text, int64_t low, int64_t high, int64_t *x) {
	char *end;
	errno = 0;
	*x = strtoll(text, &end, 10);
	return !errno && end != text && !*end && *x >= low && *x <= high;
}

static bool read_number(const char *text, double *x) {
	char *end;
	*x = (double)(float)strtod(text, &end); /* the call's own type, so that nine digits print it exactly */
	return end != text && !*end && isfinite(*x);
}

static bool read_side(const char *text, int64_t *side) {
	for (int i = 0; i < SIDES; i++)
		if (strcmp(side_names[i].name, text) == 0) {
			*side = side_names[i].side;
			return true;
		}
	char *end;
	*side = strtoll(text, &end, 16);
	return end != text && !*end && *side >= 0 && *side <= 255;
}

static bool read_lengths(char *text, int64_t *lengths, int64_t *count) {
	*count = 0;
	for (char *save, *part = strtok_r(text, "/", &save); part; part = strtok_r(NULL, "/", &save))
		if (*count == PROBLEM_LENGTHS || !read_integer(part, INT32_MIN, INT32_MAX, &lengths[(*count)++])) return false;
	return *count > 0;
}

static bool read_bound(const char *text, int64_t *bound) {
	if (strcmp(text, "inf") == 0) {
		*bound = INGOT_UNBOUNDED;
		return true;
	}
	return read_integer(text, INT32_MIN, INT32_MAX, bound);
}

/* word=value; false: not understood. *known says whether at least the word was. */
static bool read_assignment(problem *p, const char *word, char *text, bool *known) {
	*known = true;
	if (strcmp(word, "kv") == 0) return (p->kv_dtype = tool_dtype_parse(text)) != INGOT_NONE;
	if (strcmp(word, "out") == 0) return (p->out_dtype = tool_dtype_parse(text)) != INGOT_NONE;
	if (strcmp(word, "grads") == 0) return (p->grad_dtype = tool_dtype_parse(text)) != INGOT_NONE;
	if (strcmp(word, "scale") == 0) return read_number(text, &p->scale);
	if (strcmp(word, "softcap") == 0) return read_number(text, &p->softcap);
	if (strcmp(word, "dropout") == 0) return read_number(text, &p->dropout);
	if (strcmp(word, "pitch") == 0) return read_integer(text, 0, 4096, &p->pitch);
	if (strcmp(word, "parts") == 0) return read_integer(text, 0, 4096, &p->parts);
	if (strcmp(word, "ql") == 0) return read_lengths(text, p->q_lengths, &p->q_given);
	if (strcmp(word, "kl") == 0) return read_lengths(text, p->k_lengths, &p->k_given);
	if (strcmp(word, "qside") == 0) return read_side(text, &p->q_side);
	if (strcmp(word, "kside") == 0) return read_side(text, &p->k_side);
	if (strcmp(word, "varlen") == 0) {
		const bool good = read_side(text, &p->q_side);
		p->k_side = p->q_side;
		return good;
	}
	static const char *const page_words[] = {"", "paged", "csr", "csrlast"};
	for (int i = PAGES_DENSE; i <= PAGES_CSR_LAST; i++)
		if (strcmp(word, page_words[i]) == 0) {
			p->pages = i;
			p->k_side = INGOT_SIDE(0, i == PAGES_CSR_LAST ? INGOT_LENGTH_LAST_PAGE : INGOT_LENGTH_INDIVIDUAL, 0);
			return read_integer(text, 1, 1 << 20, &p->page_size);
		}
	if (strcmp(word, "window") == 0) {
		char *colon = strchr(text, ':');
		if (!colon) return false;
		*colon = 0;
		p->mask = INGOT_MASK_WINDOW;
		return read_bound(text, &p->left) && read_bound(colon + 1, &p->right);
	}
	if (strcmp(word, "bias") == 0) {
		char *colon = strchr(text, ':');
		p->bias_axes = AXIS_ALL;
		if (colon) {
			*colon = 0;
			p->bias_axes = 0;
			for (const char *c = colon + 1; *c; c++) {
				const char *at = strchr("bhqk", *c);
				if (!at) return false;
				p->bias_axes |= 1 << (at - "bhqk");
			}
		}
		return (p->bias_dtype = tool_dtype_parse(text)) != INGOT_NONE;
	}
	if (strcmp(word, "want") == 0) {
		p->grads = 0;
		for (const char *c = text; *c; c++) {
			const char *at = strchr("qkv", *c);
			if (!at) return false;
			p->grads |= 1 << (at - "qkv");
		}
		return p->grads != 0;
	}
	if (strcmp(word, "data") == 0) {
		for (int i = 0; i < DATA_KINDS; i++)
			if (strcmp(data_names[i], text) == 0) {
				p->data = i;
				return true;
			}
		return false;
	}
	*known = false;
	return false;
}

/* Whether the operator takes the word, and a mask is given once; else a sentence. */
static bool applies(const problem *p, const char *word, int operators, bool is_mask, char *error, size_t capacity) {
	if (!(operators >> p->op & 1)) {
		char others[64] = "";
		for (int i = 0; i < TOOL_OPERATORS; i++)
			if (operators >> i & 1)
				snprintf(others + strlen(others), sizeof others - strlen(others), "%s%s", *others ? ", " : "",
				         op_names[i]);
		return fail(error, capacity, "\"%s\" does not apply to %s; it is for %s", word, op_names[p->op], others);
	}
	if (is_mask && p->mask != INGOT_MASK_NONE)
		return fail(error, capacity, "\"%s\" is a second mask; causal and window exclude each other", word);
	return true;
}

static bool read_word(problem *p, char *word, char *error, size_t capacity) {
	char *equal = strchr(word, '=');
	if (equal) {
		bool known;
		char kept[96];
		snprintf(kept, sizeof kept, "%s", word);
		*equal = 0;
		for (int i = 0; i < ASSIGNMENTS; i++)
			if (strcmp(assignments[i].word, word) == 0 &&
			    !applies(p, kept, assignments[i].operators, strcmp(word, "window") == 0, error, capacity))
				return false;
		if (read_assignment(p, word, equal + 1, &known)) return true;
		return known ? fail(error, capacity, "\"%s\" has no good value; see ingot explain --help", kept)
		             : fail(error, capacity, "\"%s\" is no word of a problem; see ingot explain --help", kept);
	}
	for (int i = 0; i < WORDS; i++)
		if (strcmp(words[i].word, word) == 0) {
			if (!applies(p, word, words[i].operators, words[i].at == AT(mask), error, capacity)) return false;
			*field(p, words[i].at) = words[i].value;
			return true;
		}
	if (tool_dtype_parse(word) != INGOT_NONE) {
		p->dtype = tool_dtype_parse(word);
		return true;
	}
	const size_t letters = strcspn(word, "0123456789");
	for (int i = 0; i < SIZES; i++) {
		int64_t x;
		if (strlen(sizes[i].word) != letters || strncmp(sizes[i].word, word, letters) != 0) continue;
		if (!read_integer(word + letters, 0, sizes[i].high, &x))
			return fail(error, capacity, "\"%s\": the number must be from 0 to %lld", word, (long long)sizes[i].high);
		*field(p, sizes[i].at) = x;
		if (sizes[i].also) *field(p, sizes[i].also) = x;
		return true;
	}
	return fail(error, capacity, "\"%s\" is no word of a problem; see ingot explain --help", word);
}

static const problem start = {
	.batch = 1,
	.heads_q = 1,
	.heads_k = 1,
	.sq = 64,
	.sk = 64,
	.d = 64,
	.dv = 64,
	.dtype = INGOT_F32,
	.lse = 1,
	.grads = 7,
	.parts = 2,
	.bias_axes = AXIS_ALL,
	.align = -1,
};

/* What is implied by the rest: done after reading, undone when printing. */
static void complete(problem *p) {
	if (p->kv_dtype == INGOT_NONE) p->kv_dtype = p->dtype;
	if (p->out_dtype == INGOT_NONE) p->out_dtype = tool_is_8bit(p->dtype) ? INGOT_BF16 : p->dtype;
	if (p->grad_dtype == INGOT_NONE) p->grad_dtype = p->dtype;
	if (p->align < 0) p->align = p->mask != INGOT_MASK_NONE || p->alibi ? INGOT_BOTTOM_RIGHT : INGOT_ALIGN_UNSET;
}

bool problem_parse(const char *text, problem *p, char *error, size_t capacity) {
	*p = start;
	char copy[PROBLEM_TEXT];
	if (strlen(text) >= sizeof copy)
		return fail(error, capacity, "the problem has more than %d characters", PROBLEM_TEXT - 1);
	strcpy(copy, text);
	char *colon = strchr(copy, ':');
	if (!colon)
		return fail(error, capacity, "\"%s\" is no problem: it begins with fwd:, bwd:, merge:, append: or mask:", text);
	*colon = 0;
	p->op = -1;
	for (int i = 0; i < TOOL_OPERATORS; i++)
		if (strcmp(op_names[i], copy) == 0) p->op = i;
	if (p->op < 0)
		return fail(error, capacity, "\"%s\" is no operator; allowed are fwd, bwd, merge, append, mask", copy);
	if (!colon[1 + strspn(colon + 1, ", ")])
		return fail(error, capacity, "\"%s\" has no words, as b1,h8,s512,d64; see ingot explain --help", text);
	for (char *save, *word = strtok_r(colon + 1, ", ", &save); word; word = strtok_r(NULL, ", ", &save))
		if (!read_word(p, word, error, capacity)) return false;
	if ((p->q_given && p->q_given != p->batch) || (p->k_given && p->k_given != p->batch))
		return fail(error, capacity, "ql and kl need one length for each of the %lld sequences", (long long)p->batch);
	if ((p->page_heads_first || p->page_share) && !p->pages)
		return fail(error, capacity, "\"%s\" does not apply without paged, csr or csrlast",
		            p->page_share ? "share" : "hnd");
	if (p->bias_stride0 && !p->bias_dtype) return fail(error, capacity, "\"bias0\" does not apply without bias");
	if (p->cells && p->op != TOOL_MASK && p->dropout == 0)
		return fail(error, capacity, "\"cells\" does not apply without dropout");
	if (p->q_given && (p->q_side >> 1 & 3) == INGOT_LENGTH_MAX)
		return fail(error, capacity,
		            "\"ql\" does not apply where every sequence is full; varlen or qside says how lengths are given");
	if (p->k_given && p->op != TOOL_APPEND && (p->k_side >> 1 & 3) == INGOT_LENGTH_MAX)
		return fail(
			error, capacity,
			"\"kl\" does not apply where every sequence is full; varlen, kside or pages say how lengths are given");
	complete(p);
	return true;
}

typedef struct text {
	char *at;
	size_t left;
} text;

__attribute__((format(printf, 2, 3))) static void add(text *t, const char *format, ...) {
	va_list arguments;
	va_start(arguments, format);
	const int n = vsnprintf(t->at, t->left, format, arguments);
	va_end(arguments);
	const size_t moved = n < 0 ? 0 : (size_t)n < t->left ? (size_t)n : t->left ? t->left - 1 : 0;
	t->at += moved;
	t->left -= moved;
}

static void add_side(text *t, const char *word, int64_t side) {
	for (int i = 0; i < SIDES; i++)
		if (side_names[i].side == side) {
			add(t, ",%s=%s", word, side_names[i].name);
			return;
		}
	add(t, ",%s=0x%02llx", word, (unsigned long long)side);
}

static void add_lengths(text *t, const char *word, const int64_t *lengths, int64_t count) {
	for (int64_t i = 0; i < count; i++) {
		if (i == 0) add(t, ",%s=", word);
		add(t, i ? "/%lld" : "%lld", (long long)lengths[i]);
	}
}

static void add_bound(text *t, int64_t bound) {
	if (bound == INGOT_UNBOUNDED) add(t, "inf");
	else add(t, "%lld", (long long)bound);
}

void problem_print(const problem *p, char *buffer, size_t capacity) {
	text t = {buffer, capacity};
	add(&t, "%s:b%lld", op_names[p->op], (long long)p->batch);
	if (p->op == TOOL_APPEND) add(&t, ",hk%lld", (long long)p->heads_k);
	else if (p->heads_q == p->heads_k || p->op == TOOL_MERGE || p->op == TOOL_MASK)
		add(&t, ",h%lld", (long long)p->heads_q);
	else add(&t, ",hq%lld,hk%lld", (long long)p->heads_q, (long long)p->heads_k);
	if (p->sq == p->sk) add(&t, ",s%lld", (long long)p->sq);
	else add(&t, ",sq%lld,sk%lld", (long long)p->sq, (long long)p->sk);
	add(&t, ",d%lld", (long long)p->d);
	if (p->dv != p->d) add(&t, ",dv%lld", (long long)p->dv);
	add(&t, ",%s", tool_dtype_name((int32_t)p->dtype));
	problem plain = start;
	plain.dtype = p->dtype;
	plain.mask = p->mask;
	plain.alibi = p->alibi;
	complete(&plain);
	if (p->kv_dtype != plain.kv_dtype) add(&t, ",kv=%s", tool_dtype_name((int32_t)p->kv_dtype));
	if (p->out_dtype != plain.out_dtype) add(&t, ",out=%s", tool_dtype_name((int32_t)p->out_dtype));
	if (p->grad_dtype != plain.grad_dtype) add(&t, ",grads=%s", tool_dtype_name((int32_t)p->grad_dtype));
	if (p->mask == INGOT_MASK_WINDOW) {
		add(&t, ",window=");
		add_bound(&t, p->left);
		add(&t, ":");
		add_bound(&t, p->right);
	}
	if (p->pages) {
		static const char *const page_words[] = {"", "paged", "csr", "csrlast"};
		add(&t, ",%s=%lld", page_words[p->pages], (long long)p->page_size);
		if (p->q_side) add_side(&t, "qside", p->q_side);
	} else if (p->q_side == p->k_side && p->q_side) {
		add_side(&t, "varlen", p->q_side);
	} else {
		if (p->q_side) add_side(&t, "qside", p->q_side);
		if (p->k_side) add_side(&t, "kside", p->k_side);
	}
	/* Flags: a field that differs from what the rest implies and has a word for its value. */
	for (int i = 0; i < WORDS; i++)
		if (value(p, words[i].at) == words[i].value && value(&plain, words[i].at) != words[i].value)
			add(&t, ",%s", words[i].word);
	if (p->mask == INGOT_MASK_CAUSAL) add(&t, ",causal");
	if (p->alibi) add(&t, p->alibi == 2 ? ",alibi2" : ",alibi");
	if (p->bias_dtype) {
		add(&t, ",bias=%s", tool_dtype_name((int32_t)p->bias_dtype));
		if (p->bias_axes != AXIS_ALL) {
			add(&t, ":");
			for (int i = 0; i < 4; i++)
				if (p->bias_axes >> i & 1) add(&t, "%c", "bhqk"[i]);
		}
	}
	if (p->scale != 0) add(&t, ",scale=%.9g", p->scale);
	if (p->softcap != 0) add(&t, ",softcap=%.9g", p->softcap);
	if (p->dropout != 0) add(&t, ",dropout=%.9g", p->dropout);
	if (p->pitch) add(&t, ",pitch=%lld", (long long)p->pitch);
	if (p->op == TOOL_MERGE) add(&t, ",parts=%lld", (long long)p->parts);
	add_lengths(&t, "ql", p->q_lengths, p->q_given);
	add_lengths(&t, "kl", p->k_lengths, p->k_given);
	if (p->grads != 7) {
		add(&t, ",want=");
		for (int i = 0; i < 3; i++)
			if (p->grads >> i & 1) add(&t, "%c", "qkv"[i]);
	}
	if (p->data) add(&t, ",data=%s", data_names[p->data]);
}

uint32_t problem_flags(const problem *p) {
	return (p->det ? INGOT_DETERMINISTIC : 0u) | (p->invariant ? INGOT_BATCH_INVARIANT : 0u);
}

/* Live rows of sequence b on one side: the given length, else the longest. */
static int64_t rows_of(const int64_t *lengths, int64_t given, int64_t side, int64_t b, int64_t most) {
	if (!given || (side >> 1 & 3) == INGOT_LENGTH_MAX) return most;
	return lengths[b] < 0 ? 0 : lengths[b] < most ? lengths[b] : most;
}

static int64_t queries_of(const problem *p, int64_t b) {
	return rows_of(p->q_lengths, p->q_given, p->q_side, b, p->sq);
}

static int64_t keys_of(const problem *p, int64_t b) {
	const int64_t size = p->page_size;
	return rows_of(p->k_lengths, p->k_given, p->k_side, b,
	               p->k_given && p->pages == PAGES_DENSE ? (p->sk + size - 1) / size * size : p->sk);
}

/* Pairs of one query head of a sequence of sq rows and sk keys. */
static double pairs_of(const problem *p, int64_t sq, int64_t sk) {
	if (p->mask == INGOT_MASK_NONE) return (double)sq * (double)sk;
	const int64_t off = p->align == INGOT_BOTTOM_RIGHT ? sk - sq : 0;
	const int64_t right = p->mask == INGOT_MASK_CAUSAL ? 0 : p->right;
	double pairs = 0;
	for (int64_t i = 0; i < sq; i++) {
		int64_t first = 0, last = sk;
		if (p->mask == INGOT_MASK_WINDOW && p->left != INGOT_UNBOUNDED && i + off - p->left > first)
			first = i + off - p->left;
		if (right != INGOT_UNBOUNDED && i + off + right + 1 < last) last = i + off + right + 1;
		if (last > first) pairs += (double)(last - first);
	}
	return pairs;
}

double problem_pairs(const problem *p) {
	if (!p->q_given && !p->k_given) return pairs_of(p, p->sq, p->sk) * (double)p->batch * (double)p->heads_q;
	double pairs = 0;
	for (int64_t b = 0; b < p->batch; b++) pairs += pairs_of(p, queries_of(p, b), keys_of(p, b));
	return pairs * (double)p->heads_q;
}

double problem_flops(const problem *p) {
	const double width = p->op == TOOL_BWD ? (double)(3 * p->d + 2 * p->dv) : (double)(p->d + p->dv);
	return 2 * problem_pairs(p) * width;
}

double problem_kv_bytes(const problem *p) {
	int64_t keys = 0;
	for (int64_t b = 0; b < p->batch; b++) keys += keys_of(p, b);
	return (double)keys * (double)p->heads_k * (double)(p->d + p->dv) * tool_dtype_size((int32_t)p->kv_dtype);
}

double problem_moved_bytes(const problem *p) {
	const double rows = (double)p->batch * (double)p->heads_q * (double)p->sq;
	const double own = tool_dtype_size((int32_t)p->dtype);
	switch ((tool_operator)p->op) {
	case TOOL_MERGE:
		return rows * ((double)p->parts * ((double)p->d * own + 4) +
		               (double)p->d * tool_dtype_size((int32_t)p->out_dtype) + 4);
	case TOOL_APPEND: {
		int64_t fresh = 0;
		for (int64_t b = 0; b < p->batch; b++) fresh += queries_of(p, b);
		return (double)fresh * (double)p->heads_k * (double)(p->d + p->dv) *
		       (own + tool_dtype_size((int32_t)p->kv_dtype));
	}
	case TOOL_MASK: return rows * (double)p->sk;
	default: return 0;
	}
}
