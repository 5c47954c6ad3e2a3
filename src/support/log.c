/*
 * The log. Off by default; one atomic load decides in a call that logs nothing. A message is formatted on the stack and handed
 * on whole, under a lock, so that lines of different threads do not mix.
 */
#include "log.h"

#include <ingot.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

static atomic_int threshold = -1; /* -1: the environment was not read yet */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ingot_log_callback callback;
static void *callback_context;
static _Thread_local bool inside; /* this thread is in the callback: it has the lock */

/* A child's only thread may have been forked while another held the lock. */
static void free_lock(void) {
	if (!inside) (void)pthread_mutex_init(&lock, NULL);
}

static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void handle_fork(void) {
	(void)pthread_atfork(NULL, NULL, free_lock);
}

/* false: this thread has it already */
static bool take_lock(void) {
	if (inside) return false;
	pthread_once(&fork_once, handle_fork);
	pthread_mutex_lock(&lock);
	return true;
}

static int level_of_environment(void) {
	const char *text = getenv("INGOT_LOG");
	int level = text && text[0] >= '0' && text[0] <= '5' && !text[1] ? text[0] - '0' : 0;
	int unread = -1;
	if (!atomic_compare_exchange_strong(&threshold, &unread, level)) return unread;
	if (text && text[0] && level == 0 && (text[0] != '0' || text[1]))
		fprintf(stderr, "ingot: INGOT_LOG is \"%s\"; allowed are 0 to 5; nothing is logged\n", text);
	return level;
}

bool ingot__log_wants(int level) {
	int most = atomic_load_explicit(&threshold, memory_order_relaxed);
	if (most < 0) most = level_of_environment();
	return level <= most;
}

void ingot__log(int level, const char *format, ...) {
	if (!ingot__log_wants(level)) return;
	char text[1024];
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(text, sizeof text, format, arguments);
	va_end(arguments);
	/* What a callback's own calls would log is left out: it would only call itself. */
	if (!take_lock()) return;
	inside = true;
	if (callback) callback(callback_context, level, text);
	else fprintf(stderr, "ingot %d: %s\n", level, text);
	inside = false;
	pthread_mutex_unlock(&lock);
}

void ingot_set_log(int32_t level, ingot_log_callback new_callback, void *context) {
	const bool taken = take_lock();
	callback = new_callback;
	callback_context = context;
	atomic_store(&threshold, level < 0 ? 0 : level > 5 ? 5 : level);
	if (taken) pthread_mutex_unlock(&lock);
}
