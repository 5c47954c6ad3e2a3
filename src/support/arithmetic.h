/*
 * The arithmetic that kernels are written for: rounding to nearest, denormals kept, no trap. A thread may have been left with
 * another (a host built with -ffast-math, one that traps on NaN), and then bits would depend on which thread does what, or a
 * masked -inf would end the process. So a call sets its own and gives the thread's back as it was, flags included.
 */
#ifndef INGOT_ARITHMETIC_H
#define INGOT_ARITHMETIC_H

#if defined(__x86_64__)
#include <xmmintrin.h>

typedef unsigned ingot__arithmetic;

static inline ingot__arithmetic ingot__arithmetic_begin(void) {
	const ingot__arithmetic before = _mm_getcsr();
	_mm_setcsr(0x1f80); /* what a process starts with */
	return before;
}

static inline void ingot__arithmetic_end(ingot__arithmetic before) {
	_mm_setcsr(before);
}
#else
#include <fenv.h>

typedef fenv_t ingot__arithmetic;

static inline ingot__arithmetic ingot__arithmetic_begin(void) {
	ingot__arithmetic before;
	(void)fegetenv(&before);
	(void)fesetenv(FE_DFL_ENV);
	return before;
}

static inline void ingot__arithmetic_end(ingot__arithmetic before) {
	(void)fesetenv(&before);
}
#endif

#endif
