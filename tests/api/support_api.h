/*
 * What the API tests share: tensors over plain memory, random contents, a direct float64 attention for tiny cases, and running
 * a piece of a test in a process of its own. Uses the public header only, as a user's program does.
 */
#ifndef INGOT_TESTS_API_SUPPORT_H
#define INGOT_TESTS_API_SUPPORT_H

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <ingot.h>
#include <stdbool.h>

#if defined(__SANITIZE_ADDRESS__)
#define ADDRESS_SANITIZED 1
#elif defined(__SANITIZE_THREAD__)
#define THREAD_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ADDRESS_SANITIZED 1
#elif __has_feature(thread_sanitizer)
#define THREAD_SANITIZED 1
#endif
#endif
#if defined(ADDRESS_SANITIZED) || defined(THREAD_SANITIZED)
#define SANITIZED 1
#endif

static const ingot_stream cpu = {0, 0, NULL};

/* A contiguous view; the shape's length is the rank. */
#define TENSOR(data, dtype, ...)                                                             \
	tensor((data), (dtype), (int)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), \
	       (const int64_t[]){__VA_ARGS__})
ingot_tensor tensor(void *data, int32_t dtype, int ndim, const int64_t *shape);
int64_t elements(const ingot_tensor *t);
size_t element_size(int32_t dtype);

/* Zeroed memory of the tensor's elements, aligned to 64 bytes, with the tensor made to point at it. Fails the test when there
 * is none; free() takes it back. */
void *give_memory(ingot_tensor *t);
/* Normal numbers in the tensor's type, from a seed. Contiguous tensors of floating type. */
void fill(const ingot_tensor *t, uint64_t seed);
uint64_t random_bits(uint64_t *state);
float value(const ingot_tensor *t, int64_t index);
void set_value(const ingot_tensor *t, int64_t index, float x);

/* A whole forward problem with memory of its own: q, k, v filled from the seed, out and lse poisoned. */
typedef struct attention {
	ingot_attn_fwd_params fwd;
	ingot_attn_bwd_params bwd; /* after attention_backward */
	void *memory[16];
	int count;
} attention;
void attention_begin(attention *a, int32_t dtype, int64_t b, int64_t hq, int64_t hk, int64_t sq, int64_t sk, int64_t d,
                     uint64_t seed);
/* Adds the backward's struct: same arguments, dout filled, dq, dk, dv poisoned. After the last change to a->fwd. */
void attention_backward(attention *a, uint64_t seed);
void attention_end(attention *a);
/* Bytes that no result is made of, over the tensor's whole memory (contiguous). */
void poison(const ingot_tensor *t);
bool poisoned(const ingot_tensor *t); /* still, everywhere */
bool same_bytes(const ingot_tensor *a, const ingot_tensor *b);

/* Largest |out - formula| over a->fwd's out; covers masks, fixed lengths and head groups, no other feature. */
double forward_error(const attention *a);

/* Fails the test with the library's sentence when status is not OK. */
#define assert_ok(status) assert_status_is((status), INGOT_OK, #status, __FILE__, __LINE__)
#define assert_status(status, wanted) assert_status_is((status), (wanted), #status, __FILE__, __LINE__)
void assert_status_is(ingot_status status, ingot_status wanted, const char *what, const char *file, int line);
/* The last call failed with a sentence that has this word in it. */
#define assert_sentence(word) assert_sentence_has((word), __FILE__, __LINE__)
void assert_sentence_has(const char *word, const char *file, int line);

/* Runs this program again as `program mode`, with "NAME=value" settings; returns its exit status, or 1000 + the signal that
 * ended it. What it wrote to stderr is cut to capacity. At most `seconds`. */
int run_self(const char *mode, const char *const *environment, int seconds, char *text, size_t capacity);
/* Runs child() in a fork and returns the same. */
int run_fork(int (*child)(void *argument), void *argument, int seconds);
/* The file that the library was loaded from. */
const char *library_path(void);

#endif
