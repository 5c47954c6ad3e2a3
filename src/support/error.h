/* This thread's last sentence: what ingot_last_error() returns. */
#ifndef INGOT_SUPPORT_ERROR_H
#define INGOT_SUPPORT_ERROR_H

#include <ingot.h>
#include <stdbool.h>

/* Starts a public call: forgets the last sentence; `function` (a literal) will lead the next one. */
void ingot__error_begin(const char *function);
/* Until this says otherwise or the next public call begins, sentences are kept and not logged: for questions, where "no" is
 * an answer. Returns what it was before. */
bool ingot__error_quiet(bool on);
/* Logs the kept sentence, unless quiet: where the "no" to a question is the call's error after all. Returns status. */
ingot_status ingot__error_tell(ingot_status status);

/* Keeps the sentence "function: format..." for this thread, logs it at level 1 (OK: nothing) and returns status. */
ingot_status ingot__fail(ingot_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
