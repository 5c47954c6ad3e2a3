/*
 * The command's own copy of the pack reader and writer. The library's is hidden, and its sentences go to ingot_last_error();
 * the command keeps them here instead of exporting a second public interface for the sake of one program.
 */
#include "packs.h"

#include <stdarg.h>
#include <stdio.h>

static char sentence[1024];

const char *packs_error(void) {
	return sentence;
}

#define ingot__fail packs_fail
#include "../src/support/pack.c"
#undef ingot__fail

ingot_status packs_fail(ingot_status status, const char *format, ...) {
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(sentence, sizeof sentence, format, arguments);
	va_end(arguments);
	return status;
}
