/*
 * Statuses and the thread's last sentence. The sentence lives in thread-local storage of fixed size, so that reporting an
 * error can itself not fail.
 */
#include "error.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "log.h"

static _Thread_local char sentence[768];
static _Thread_local const char *current = "ingot";
static _Thread_local bool quiet;

void ingot__error_begin(const char *function) {
	sentence[0] = 0;
	current = function;
	quiet = false;
}

bool ingot__error_quiet(bool on) {
	const bool before = quiet;
	quiet = on;
	return before;
}

ingot_status ingot__error_tell(ingot_status status) {
	if (!quiet && ingot__log_wants(1)) {
		/* a log callback may call the library, which must not change what this call leaves behind */
		char copy[sizeof sentence];
		const char *const function = current;
		memcpy(copy, sentence, sizeof copy);
		ingot__log(1, "%s (%s)", copy, ingot_status_name(status));
		memcpy(sentence, copy, sizeof copy);
		current = function;
	}
	return status;
}

ingot_status ingot__fail(ingot_status status, const char *format, ...) {
	int n = snprintf(sentence, sizeof sentence, "%s: ", current);
	if (n < 0 || (size_t)n >= sizeof sentence) n = 0;
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(sentence + n, sizeof sentence - (size_t)n, format, arguments);
	va_end(arguments);
	return ingot__error_tell(status);
}

const char *ingot_last_error(void) {
	return sentence;
}

const char *ingot_status_name(ingot_status status) {
	switch (status) {
#define NAME(name, number, text) \
	case name: return #name;
		INGOT_STATUS_LIST(NAME)
#undef NAME
	default: return "INGOT_?";
	}
}

const char *ingot_status_text(ingot_status status) {
	switch (status) {
#define TEXT(name, number, text) \
	case name: return text;
		INGOT_STATUS_LIST(TEXT)
#undef TEXT
	default: return "unknown status";
	}
}
