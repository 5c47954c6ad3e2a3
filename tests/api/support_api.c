/* See support_api.h. */
#include "support_api.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Tests fork and make threads afterwards on purpose, and end many processes. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) {
	return "die_after_fork=0:atexit_sleep_ms=20";
}

ingot_tensor tensor(void *data, int32_t dtype, int ndim, const int64_t *shape) {
	ingot_tensor t = {.data = data, .dtype = dtype, .ndim = ndim};
	int64_t stride = 1;
	for (int a = ndim - 1; a >= 0; a--) {
		t.shape[a] = shape[a];
		t.stride[a] = stride;
		stride *= shape[a];
	}
	return t;
}

int64_t elements(const ingot_tensor *t) {
	int64_t n = t->dtype == INGOT_NONE ? 0 : 1;
	for (int a = 0; a < t->ndim; a++) n *= t->shape[a];
	return n;
}

size_t element_size(int32_t dtype) {
	static const uint8_t sizes[] = {0, 4, 2, 2, 1, 1, 1, 1, 4, 8, 8, 1};
	return sizes[dtype];
}

static size_t bytes(const ingot_tensor *t) {
	return (size_t)elements(t) * element_size(t->dtype);
}

void *give_memory(ingot_tensor *t) {
	const size_t size = (bytes(t) + 63) / 64 * 64 + 64;
	t->data = aligned_alloc(64, size);
	assert_non_null(t->data);
	memset(t->data, 0, size);
	return t->data;
}

uint64_t random_bits(uint64_t *state) {
	/* splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014) */
	uint64_t z = *state += 0x9e3779b97f4a7c15u;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}

float value(const ingot_tensor *t, int64_t index) {
	if (t->dtype == INGOT_F32) return ((const float *)t->data)[index];
	const uint16_t h = ((const uint16_t *)t->data)[index];
	if (t->dtype == INGOT_BF16) {
		const uint32_t bits = (uint32_t)h << 16;
		float f;
		memcpy(&f, &bits, sizeof f);
		return f;
	}
	const int e = h >> 10 & 31, m = h & 1023;
	const float f = e == 31 ? (m ? NAN : INFINITY) : ldexpf((float)(e ? m + 1024 : m), (e ? e : 1) - 25);
	return h & 0x8000 ? -f : f;
}

void set_value(const ingot_tensor *t, int64_t index, float x) {
	if (t->dtype == INGOT_F32) {
		((float *)t->data)[index] = x;
		return;
	}
	uint16_t h;
	if (t->dtype == INGOT_BF16) {
		uint32_t bits;
		memcpy(&bits, &x, sizeof bits);
		h = (uint16_t)(isnan(x) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
	} else {
		const uint16_t sign = signbit(x) ? 0x8000 : 0;
		const float a = fabsf(x);
		if (isnan(x)) h = 0x7e00;
		else if (a >= 65520.0f) h = sign | 0x7c00;
		else {
			int e = 0;
			if (a > 0) (void)frexpf(a, &e);
			if (e < -13) e = -13;
			/* With e the exponent of [0.5, 1), the mantissa's unit is 2^(e-11); a carry moves into the exponent by itself. */
			h = (uint16_t)(sign | ((uint32_t)(e + 13) * 1024 + (uint32_t)nearbyintf(ldexpf(a, 11 - e))));
		}
	}
	((uint16_t *)t->data)[index] = h;
}

void fill(const ingot_tensor *t, uint64_t seed) {
	uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
	for (int64_t i = 0; i < elements(t); i++) {
		const double u = (double)((random_bits(&state) >> 11) + 1) * 0x1p-53,
					 w = (double)(random_bits(&state) >> 11) * 0x1p-53;
		set_value(t, i, (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * w)));
	}
}

void poison(const ingot_tensor *t) {
	if (bytes(t)) memset(t->data, 0xA5, bytes(t));
}

bool poisoned(const ingot_tensor *t) {
	for (size_t i = 0; i < bytes(t); i++)
		if (((const unsigned char *)t->data)[i] != 0xA5) return false;
	return true;
}

bool same_bytes(const ingot_tensor *a, const ingot_tensor *b) {
	return bytes(a) == bytes(b) && (bytes(a) == 0 || memcmp(a->data, b->data, bytes(a)) == 0);
}

static void keep(attention *a, ingot_tensor *t) {
	assert_true(a->count < 16);
	a->memory[a->count++] = give_memory(t);
}

void attention_begin(attention *a, int32_t dtype, int64_t b, int64_t hq, int64_t hk, int64_t sq, int64_t sk, int64_t d,
                     uint64_t seed) {
	memset(a, 0, sizeof *a);
	ingot_attn_fwd_params *const p = &a->fwd;
	p->struct_size = sizeof *p;
	p->q = TENSOR(NULL, dtype, b, hq, sq, d);
	p->k = TENSOR(NULL, dtype, b, hk, sk, d);
	p->v = TENSOR(NULL, dtype, b, hk, sk, d);
	p->out = TENSOR(NULL, dtype, b, hq, sq, d);
	p->lse = TENSOR(NULL, INGOT_F32, b, hq, sq);
	keep(a, &p->q), keep(a, &p->k), keep(a, &p->v), keep(a, &p->out), keep(a, &p->lse);
	fill(&p->q, seed * 4), fill(&p->k, seed * 4 + 1), fill(&p->v, seed * 4 + 2);
	poison(&p->out), poison(&p->lse);
}

void attention_backward(attention *a, uint64_t seed) {
	const ingot_attn_fwd_params *const f = &a->fwd;
	ingot_attn_bwd_params *const p = &a->bwd;
	memset(p, 0, sizeof *p);
	p->struct_size = sizeof *p;
	p->varlen = f->varlen;
	p->q = f->q, p->k = f->k, p->v = f->v, p->out = f->out, p->lse = f->lse;
	p->dout = f->out, p->dq = f->q, p->dk = f->k, p->dv = f->v;
	keep(a, &p->dout), keep(a, &p->dq), keep(a, &p->dk), keep(a, &p->dv);
	fill(&p->dout, seed * 4 + 3);
	poison(&p->dq), poison(&p->dk), poison(&p->dv);
	p->bias = f->bias, p->alibi = f->alibi, p->sink = f->sink;
	p->q_lengths = f->q_lengths, p->q_positions = f->q_positions;
	p->k_lengths = f->k_lengths, p->k_positions = f->k_positions;
	p->dropout_seed_ptr = f->dropout_seed_ptr, p->dropout_offset_ptr = f->dropout_offset_ptr;
	p->dropout_seed = f->dropout_seed, p->dropout_offset = f->dropout_offset;
	p->batch = f->batch, p->max_seqlen_q = f->max_seqlen_q, p->max_seqlen_k = f->max_seqlen_k;
	p->softmax_scale = f->softmax_scale, p->softcap = f->softcap, p->dropout_p = f->dropout_p;
	p->mask = f->mask, p->align = f->align, p->window_left = f->window_left, p->window_right = f->window_right;
	p->lse_base = f->lse_base;
}

void attention_end(attention *a) {
	for (int i = 0; i < a->count; i++) free(a->memory[i]);
	a->count = 0;
}

double forward_error(const attention *a) {
	const ingot_attn_fwd_params *const p = &a->fwd;
	const int64_t hq = p->q.shape[1], hk = p->k.shape[1], sq = p->q.shape[2], sk = p->k.shape[2], d = p->q.shape[3];
	const double scale = p->softmax_scale != 0 ? (double)p->softmax_scale : 1 / sqrt((double)d);
	const int64_t far = (int64_t)1 << 40, off = p->align == INGOT_BOTTOM_RIGHT ? sk - sq : 0;
	int64_t left = far, right = far;
	if (p->mask == INGOT_MASK_CAUSAL) right = 0;
	if (p->mask == INGOT_MASK_WINDOW && p->window_left != INGOT_UNBOUNDED) left = p->window_left;
	if (p->mask == INGOT_MASK_WINDOW && p->window_right != INGOT_UNBOUNDED) right = p->window_right;
	double worst = 0;
	double *const score = malloc(sizeof *score * (size_t)(sk + 1));
	assert_non_null(score);
	for (int64_t b = 0; b < p->q.shape[0]; b++)
		for (int64_t h = 0; h < hq; h++)
			for (int64_t i = 0; i < sq; i++) {
				const int64_t row = (b * hq + h) * sq + i, keys = (b * hk + h / (hq / hk)) * sk;
				double most = -INFINITY, sum = 0;
				for (int64_t j = 0; j < sk; j++) {
					double s = 0;
					for (int64_t c = 0; c < d; c++)
						s += (double)value(&p->q, row * d + c) * (double)value(&p->k, (keys + j) * d + c);
					score[j] = j - i - off >= -left && j - i - off <= right ? s * scale : -INFINITY;
					if (score[j] > most) most = score[j];
				}
				for (int64_t j = 0; j < sk; j++) {
					score[j] = isinf(most) ? 0 : exp(score[j] - most);
					sum += score[j];
				}
				for (int64_t c = 0; c < d; c++) {
					double o = 0;
					for (int64_t j = 0; j < sk; j++) o += score[j] * (double)value(&p->v, (keys + j) * d + c);
					const double error = fabs((sum > 0 ? o / sum : 0) - (double)value(&p->out, row * d + c));
					if (!(error <= worst)) worst = error;
				}
			}
	free(score);
	return worst;
}

void assert_status_is(ingot_status status, ingot_status wanted, const char *what, const char *file, int line) {
	if (status == wanted) return;
	print_error("%s:%d: %s is %s, not %s: %s\n", file, line, what, ingot_status_name(status), ingot_status_name(wanted),
	            ingot_last_error());
	_fail(file, line);
}

void assert_sentence_has(const char *word, const char *file, int line) {
	if (strstr(ingot_last_error(), word)) return;
	print_error("%s:%d: no \"%s\" in the sentence: \"%s\"\n", file, line, word, ingot_last_error());
	_fail(file, line);
}

/* ---- processes -------------------------------------------------------------------------------------------------------- */

static int outcome(pid_t pid) {
	int status = 0;
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR) return -1;
	return WIFSIGNALED(status) ? 1000 + WTERMSIG(status) : WEXITSTATUS(status);
}

int run_self(const char *mode, const char *const *environment, int seconds, char *text, size_t capacity) {
	char self[4096];
	const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
	assert_true(length > 0);
	self[length] = 0;
	int end[2];
	assert_int_equal(pipe(end), 0);
	fflush(NULL);
	const pid_t pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		if (capacity) dup2(end[1], STDERR_FILENO);
		close(end[0]), close(end[1]);
		for (; environment && *environment; environment++) putenv((char *)(uintptr_t)*environment);
		alarm((unsigned)seconds);
		execl(self, self, mode, (char *)NULL);
		_exit(127);
	}
	close(end[1]);
	size_t have = 0;
	char spare[512];
	for (ssize_t n; capacity;) {
		n = have + 1 < capacity ? read(end[0], text + have, capacity - 1 - have) : read(end[0], spare, sizeof spare);
		if (n <= 0) break;
		if (have + 1 < capacity) have += (size_t)n;
	}
	if (capacity) text[have] = 0;
	close(end[0]);
	return outcome(pid);
}

int run_fork(int (*child)(void *argument), void *argument, int seconds) {
	fflush(NULL);
	const pid_t pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		alarm((unsigned)seconds);
		_exit(child(argument));
	}
	return outcome(pid);
}

const char *library_path(void) {
	Dl_info info;
	union {
		const char *(*function)(void);
		void *object;
	} symbol = {ingot_version_string};
	assert_true(dladdr(symbol.object, &info) != 0);
	return info.dli_fname;
}
