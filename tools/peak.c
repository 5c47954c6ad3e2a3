/*
 * Time, and the rates this machine can reach: a loop that only multiplies and accumulates in registers, and one that only
 * reads memory. Both are measured in the process that measures the kernels, because clocks and neighbours change.
 */
#include "tool.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

double tool_now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Each loop body does `rounds` rounds over independent accumulators and returns the FLOPs it did. */
#if defined(__x86_64__)
#define EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

__attribute__((target("avx2,fma"))) static double spin_avx2(long rounds) {
	const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
#define DECLARE(i) __m256 c##i = _mm256_set1_ps((float)(i));
#define ROUND(i)                        \
	c##i = _mm256_fmadd_ps(c##i, a, b); \
	__asm__ volatile("" : "+x"(c##i));
	EACH(DECLARE)
	for (long r = 0; r < rounds; r++) {
		EACH(ROUND)
	}
#undef ROUND
	return 12.0 * 8 * 2 * (double)rounds;
}

__attribute__((target("avx512f"))) static double spin_avx512(long rounds) {
	const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
#undef DECLARE
#define DECLARE(i) __m512 c##i = _mm512_set1_ps((float)(i));
#define ROUND(i)                        \
	c##i = _mm512_fmadd_ps(c##i, a, b); \
	__asm__ volatile("" : "+v"(c##i));
	EACH(DECLARE)
	for (long r = 0; r < rounds; r++) {
		EACH(ROUND)
	}
#undef ROUND
	return 12.0 * 16 * 2 * (double)rounds;
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) static double spin_bf16(long rounds) {
	const __m512 half = _mm512_set1_ps(0.5f);
	const __m512bh a = _mm512_cvtne2ps_pbh(half, half);
	const __m512bh b = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.01f), _mm512_set1_ps(-0.01f));
#define ROUND(i)                         \
	c##i = _mm512_dpbf16_ps(c##i, a, b); \
	__asm__ volatile("" : "+v"(c##i));
	EACH(DECLARE)
	for (long r = 0; r < rounds; r++) {
		EACH(ROUND)
	}
#undef ROUND
#undef DECLARE
	return 12.0 * 32 * 2 * (double)rounds;
}

static double (*spinner(bool pairs))(long) {
	__builtin_cpu_init();
	if (pairs) return __builtin_cpu_supports("avx512bf16") ? spin_bf16 : NULL;
	if (__builtin_cpu_supports("avx512f")) return spin_avx512;
	return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? spin_avx2 : NULL;
}
#else
static double (*spinner(bool pairs))(long) {
	(void)pairs;
	return NULL;
}
#endif

typedef struct lane {
	pthread_t thread;
	pthread_barrier_t *barrier;
	double (*spin)(long);
	const char *memory;
	size_t bytes;
	double rate;
	uint64_t sum; /* keeps the reads from being removed */
	double begin, end;
} lane;

static void *spin_lane(void *argument) {
	lane *l = argument;
	pthread_barrier_wait(l->barrier);
	/* The best of short pieces: a piece that another process interrupted is not this machine's rate. */
	const double until = tool_now() + 0.02;
	do {
		const double begin = tool_now(), flops = l->spin(20000), took = tool_now() - begin;
		if (flops / took > l->rate) l->rate = flops / took;
	} while (tool_now() < until);
	return NULL;
}

#if defined(__x86_64__)
/* Prefetched far ahead into L2, as the hardware does not by itself across pages. */
__attribute__((target("avx2"))) static uint64_t read_avx2(const char *memory, size_t bytes) {
	__m256i s0 = _mm256_setzero_si256(), s1 = s0, s2 = s0, s3 = s0;
	for (size_t i = 0; i + 128 <= bytes; i += 128) {
		_mm_prefetch(memory + i + 16384, _MM_HINT_T1);
		_mm_prefetch(memory + i + 16384 + 64, _MM_HINT_T1);
		s0 = _mm256_add_epi64(s0, _mm256_loadu_si256((const __m256i *)(memory + i)));
		s1 = _mm256_add_epi64(s1, _mm256_loadu_si256((const __m256i *)(memory + i + 32)));
		s2 = _mm256_add_epi64(s2, _mm256_loadu_si256((const __m256i *)(memory + i + 64)));
		s3 = _mm256_add_epi64(s3, _mm256_loadu_si256((const __m256i *)(memory + i + 96)));
	}
	s0 = _mm256_add_epi64(_mm256_add_epi64(s0, s1), _mm256_add_epi64(s2, s3));
	return (uint64_t)_mm256_extract_epi64(s0, 0) + (uint64_t)_mm256_extract_epi64(s0, 3);
}
#endif

static uint64_t read_plain(const char *memory, size_t bytes) {
	uint64_t sum = 0, x;
	for (size_t i = 0; i + 8 <= bytes; i += 8) {
		memcpy(&x, memory + i, 8);
		sum += x;
	}
	return sum;
}

static void *read_lane(void *argument) {
	lane *l = argument;
	uint64_t (*reader)(const char *, size_t) = read_plain;
#if defined(__x86_64__)
	__builtin_cpu_init();
	if (__builtin_cpu_supports("avx2")) reader = read_avx2;
#endif
	pthread_barrier_wait(l->barrier);
	l->begin = tool_now();
	l->sum = reader(l->memory, l->bytes);
	l->end = tool_now();
	return NULL;
}

enum { LANES = 1024 };

/* Runs body on all lanes at once; the caller is the first. */
static void run_lanes(lane *lanes, int threads, void *(*body)(void *)) {
	pthread_barrier_t barrier;
	pthread_barrier_init(&barrier, NULL, (unsigned)threads);
	for (int i = 0; i < threads; i++) lanes[i].barrier = &barrier;
	for (int i = 1; i < threads; i++)
		if (pthread_create(&lanes[i].thread, NULL, body, &lanes[i]) != 0) {
			fprintf(stderr, "ingot: cannot start %d threads\n", threads);
			exit(TOOL_FAILED);
		}
	body(&lanes[0]);
	for (int i = 1; i < threads; i++) pthread_join(lanes[i].thread, NULL);
	pthread_barrier_destroy(&barrier);
}

static double rate_of(double (*spin)(long), int threads) {
	if (!spin) return 0;
	static lane lanes[LANES];
	memset(lanes, 0, sizeof lanes);
	for (int i = 0; i < threads; i++) lanes[i].spin = spin;
	run_lanes(lanes, threads, spin_lane);
	double sum = 0;
	for (int i = 0; i < threads; i++) sum += lanes[i].rate;
	return sum * 1e-9;
}

double tool_peak(int32_t dtype, int threads, const char **name) {
	const double single = rate_of(spinner(false), threads);
	const double pairs = dtype == INGOT_BF16 ? rate_of(spinner(true), threads) : 0;
	if (name) *name = pairs > single ? "bf16 pairs" : "fp32";
	return pairs > single ? pairs : single;
}

double tool_read_rate(const void *memory, size_t bytes, int threads) {
	static lane lanes[LANES];
	memset(lanes, 0, sizeof lanes);
	const size_t part = bytes / (size_t)threads / 128 * 128;
	for (int i = 0; i < threads; i++) {
		lanes[i].memory = (const char *)memory + part * (size_t)i;
		lanes[i].bytes = part;
	}
	run_lanes(lanes, threads, read_lane);
	double begin = lanes[0].begin, end = lanes[0].end;
	for (int i = 1; i < threads; i++) {
		begin = lanes[i].begin < begin ? lanes[i].begin : begin;
		end = lanes[i].end > end ? lanes[i].end : end;
	}
	return (double)part * threads / (end - begin) * 1e-9;
}
