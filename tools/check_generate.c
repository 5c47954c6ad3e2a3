/*
 * Generated cases: every pair of features that can meet, the sizes round every tile edge, and random problems. A case is
 * made of words, as a person would write it, so that what fails can be run again from its line.
 */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FWD = 1, BWD = 2, BOTH = 3 };

/* Two features of one group exclude each other. */
static const struct {
	char group; /* t type, m mask, h heads, d head sizes, v lengths, b bias, ... */
	int ops;
	const char *words;
} features[] = {
	{'t', BOTH, "f32"},
	{'t', BOTH, "f16"},
	{'t', BOTH, "bf16"},
	{'t', FWD, "f16,kv=e4m3,descalek"},
	{'t', FWD, "bf16,kv=e5m2"},
	{'t', FWD, "e4m3,descale"},
	{'t', FWD, "e5m2,descaleq,out=f32"},
	{'t', FWD, "bf16,kv=e4m3fnuz,descale"},
	{'t', FWD, "bf16,out=f32"},
	{'t', BWD, "bf16,out=f32,grads=f32"},
	{'t', BOTH, "f32,out=f16"},
	{'m', BOTH, "causal"},
	{'m', BOTH, "causal,tl"},
	{'m', BOTH, "window=20:0"},
	{'m', BOTH, "window=5:9,tl"},
	{'m', BOTH, "window=-3:30"},
	{'m', BOTH, "window=inf:-4"},
	{'m', BOTH, "window=2:inf,tl"},
	{'h', BOTH, "hq6,hk2"},
	{'h', BOTH, "hq4,hk1"},
	{'h', BOTH, "hq5,hk5"},
	{'d', BOTH, "d32"},
	{'d', BOTH, "d40"},
	{'d', BOTH, "d72,dv24"},
	{'d', BOTH, "d17,dv33"},
	{'d', BOTH, "d128"},
	{'d', BOTH, "d96,dv128"},
	{'d', BOTH, "d192,dv128"},
	{'d', BOTH, "d256"},
	{'d', BOTH, "d1,dv1"},
	{'q', BOTH, "sq1"},
	{'v', BOTH, "varlen=cu"},
	{'v', BOTH, "varlen=padded"},
	{'v', BOTH, "varlen=strided"},
	{'v', BOTH, "varlen=lengths"},
	{'v', BOTH, "varlen=gaps"},
	{'v', BOTH, "varlen=slots"},
	{'v', BOTH, "varlen=slotscu"},
	{'v', BOTH, "qside=cu,kside=padded"},
	{'v', BOTH, "qside=lengths,kside=gaps"},
	{'v', BOTH, "kside=lengths"},
	{'v', BOTH, "qside=stackfull,kside=gapsfull"},
	{'v', FWD, "paged=16"},
	{'v', FWD, "paged=1"},
	{'v', FWD, "paged=24,hnd,share,qside=cu"},
	{'v', FWD, "csr=8"},
	{'v', FWD, "csrlast=16,qside=padded"},
	{'b', BOTH, "bias=f32"},
	{'b', BOTH, "bias=bool"},
	{'b', BOTH, "bias=f32:hk"},
	{'b', BOTH, "bias=f32:bqk,bias0"},
	{'b', BOTH, "bias=bool:bk"},
	{'b', BOTH, "bias=f32:q"},
	{'b', BOTH, "bias=f32:qk,data=emptyrows"},
	/* Forward only: an fp32 lse near the lowest value cannot say which of a row's keys share it, and backward reads it. */
	{'b', FWD, "bias=f32:qk,data=lowest"},
	{'a', BOTH, "alibi"},
	{'a', BOTH, "alibi2"},
	{'c', BOTH, "softcap=15"},
	{'c', BOTH, "softcap=1"},
	{'s', BOTH, "sink"},
	{'p', BOTH, "dropout=0.2"},
	{'p', BOTH, "dropout=0.5,cells"},
	{'l', BOTH, "bshd"},
	{'l', BOTH, "packed"},
	{'l', BOTH, "pitch=3"},
	{'i', BOTH, "misalign"},
	{'k', BOTH, "kv0"},
	{'k', BWD, "do0"},
	{'e', FWD, "nolse"},
	{'e', BOTH, "base2"},
	{'e', FWD, "th,qside=cu"},
	{'x', BOTH, "scale=-0.3"},
	{'x', BOTH, "scale=2"},
	{'z', BOTH, "data=x5"},
	{'z', BOTH, "data=grow"},
	{'z', BOTH, "data=cold"},
	{'z', BOTH, "data=loud"},
	{'g', BWD, "want=q"},
	{'g', BWD, "want=kv"},
	{'n', BOTH, "inv"},
};
enum { FEATURES = sizeof features / sizeof *features };

/* One before, at and after the edges of tiles of 2, 12, 16, 32, 48, 64, 96, 128, 192, 256 and 384. */
static const int edges[] = {1,  2,  3,  11, 12,  13,  15,  16,  17,  31,  32,  33,  47,  48,  49,  63, 64,
                            65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 255, 256, 257, 383, 384, 385};
enum { EDGES = sizeof edges / sizeof *edges };

static const int widths[] = {64, 128, 32, 64, 128, 1, 8, 15, 16, 17, 48, 63, 65, 80, 96, 112, 160, 192, 256};
enum { WIDTHS = sizeof widths / sizeof *widths };

static bool can_meet(int i, int j, int op) {
	const char a = features[i].group, b = features[j].group;
	if (a == b || !(features[i].ops & features[j].ops & op)) return false;
	/* Data kinds that come with a bias are data kinds too; th names its own lengths. */
	const char *const x = features[i].words, *const y = features[j].words;
	if (strstr(x, "data=") && strstr(y, "data=")) return false;
	if ((strstr(x, "th,") && b == 'v') || (strstr(y, "th,") && a == 'v')) return false;
	return true;
}

/* A bias of the inputs' own type in place of fp32, for some. */
static void vary_bias(problem *p, uint64_t dice) {
	if (p->bias_dtype == INGOT_F32 && dice % 2 && (p->dtype == INGOT_F16 || p->dtype == INGOT_BF16))
		p->bias_dtype = p->dtype;
}

static void parse(const char *line, problem *p) {
	char error[256];
	if (problem_parse(line, p, error, sizeof error)) return;
	fprintf(stderr, "ingot check: a generated line is wrong: %s: %s\n", line, error);
	abort();
}

static int pick_edge(uint64_t dice, int most) {
	int n = 0;
	while (n < EDGES && edges[n] <= most) n++;
	return edges[dice % (uint64_t)n];
}

typedef struct pair {
	unsigned char i, j, op;
} pair;

static pair pair_list[2 * FEATURES * FEATURES];
static int64_t pair_count;

static void make_pairs(void) {
	for (int op = FWD; op <= BWD; op++)
		for (int i = 0; i < FEATURES; i++)
			for (int j = i + 1; j < FEATURES; j++)
				if (can_meet(i, j, op))
					pair_list[pair_count++] = (pair){(unsigned char)i, (unsigned char)j, (unsigned char)op};
}

static const pair *pairs(int64_t *count) {
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	pthread_once(&once, make_pairs);
	*count = pair_count;
	return pair_list;
}

enum { EDGE_CASES = EDGES * 3 * 3 * 2, RANDOM_CASES = 200 };

int64_t check_generated(int level) {
	int64_t n;
	(void)pairs(&n);
	return level < 2 ? 0 : level == 2 ? n + EDGE_CASES + RANDOM_CASES : -1;
}

static void random_problem(uint64_t seed, problem *p) {
	char line[PROBLEM_TEXT] = "";
	bool used[128] = {false};
	uint64_t dice = tool_hash(seed, 2, 0);
	const int op = dice % 5 < 3 ? FWD : BWD;
	int chosen[FEATURES], n = 0;
	for (int i = 0; i < FEATURES; i++) {
		const int f = (int)(tool_hash(seed, 3, (uint64_t)i) % FEATURES);
		if (used[(int)features[f].group] || !(features[f].ops & op) || tool_hash(seed, 4, (uint64_t)i) % 10 >= 1)
			continue;
		bool meets = true;
		for (int c = 0; c < n; c++) meets &= can_meet(chosen[c], f, op);
		if (!meets) continue;
		used[(int)features[f].group] = true;
		chosen[n++] = f;
	}
	const int b = 1 + (int)((dice >> 8) % 3), h = 1 + (int)((dice >> 16) % 3), d = widths[(dice >> 24) % WIDTHS];
	const int dv = (dice >> 32) % 4 ? d : widths[(dice >> 36) % WIDTHS];
	const uint64_t sizes = tool_hash(seed, 5, 0);
	const int most = b * h > 3 ? 129 : 385;
	const int sq = sizes % 3 ? pick_edge(sizes >> 8, most) : 1 + (int)((sizes >> 8) % (uint64_t)most);
	const int sk = sizes % 5 ? pick_edge(sizes >> 24, most) : 1 + (int)((sizes >> 24) % (uint64_t)most);
	int at =
		snprintf(line, sizeof line, "%s:b%d,h%d,sq%d,sk%d,d%d,dv%d", op == FWD ? "fwd" : "bwd", b, h, sq, sk, d, dv);
	for (int c = 0; c < n; c++) at += snprintf(line + at, sizeof line - (size_t)at, ",%s", features[chosen[c]].words);
	parse(line, p);
	vary_bias(p, dice >> 40);
}

void check_generate(int level, int64_t index, uint64_t seed, problem *p) {
	char line[PROBLEM_TEXT];
	int64_t n;
	const pair *list = pairs(&n);
	const uint64_t dice = tool_hash(seed, 2, 7);
	if (level == 2 && index < n) {
		const pair two = list[index];
		const int sq = pick_edge(dice, two.op == FWD ? 129 : 97), sk = pick_edge(dice >> 16, two.op == FWD ? 193 : 129);
		snprintf(line, sizeof line, "%s:b2,h2,sq%d,sk%d,d%d,%s,%s,%s", two.op == FWD ? "fwd" : "bwd", sq, sk,
		         (dice >> 32) % 2 ? 64 : 32,
		         (dice >> 33) % 3 == 0   ? "f32"
		         : (dice >> 33) % 3 == 1 ? "bf16"
		                                 : "f16",
		         features[two.i].words, features[two.j].words);
		parse(line, p);
		vary_bias(p, dice >> 40);
		return;
	}
	index -= n;
	if (level == 2 && index < EDGE_CASES) {
		static const char *const masks[] = {"", ",causal", ",window=40:3"}, *const types[] = {"f32", "bf16", "f16"};
		const int op = (int)(index % 2), type = (int)(index / 2 % 3), mask = (int)(index / 6 % 3),
				  edge = edges[index / 18];
		const int other = pick_edge(dice >> 8, op ? 257 : 385);
		const char *const name = !op && (dice >> 48) % 4 == 0 ? "e4m3" : types[type]; /* forward only */
		snprintf(line, sizeof line, "%s:b1,h%d,sq%d,sk%d,d%d,%s%s", op ? "bwd" : "fwd", edge < 100 ? 2 : 1,
		         dice % 2 ? edge : other, dice % 2 ? other : edge, widths[(dice >> 32) % WIDTHS], name, masks[mask]);
		parse(line, p);
		return;
	}
	random_problem(seed, p);
}
