/* A growing-in-place text: writes into a caller's buffer, never past it, and counts what the whole would need. */
#ifndef INGOT_SUPPORT_TEXT_H
#define INGOT_SUPPORT_TEXT_H

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

typedef struct ingot__text {
	char *buffer;
	size_t capacity, length; /* length of the whole, without its 0 */
} ingot__text;

static inline void ingot__text_add(ingot__text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline void ingot__text_add(ingot__text *t, const char *format, ...) {
	va_list arguments;
	va_start(arguments, format);
	size_t room = t->length < t->capacity ? t->capacity - t->length : 0;
	int n = vsnprintf(room ? t->buffer + t->length : NULL, room, format, arguments);
	va_end(arguments);
	if (n > 0) t->length += (size_t)n;
}

/* A JSON string with its quotes. */
static inline void ingot__text_add_json(ingot__text *t, const char *s) {
	ingot__text_add(t, "\"");
	for (; *s; s++) {
		if (*s == '"' || *s == '\\') ingot__text_add(t, "\\%c", *s);
		else if ((unsigned char)*s < 0x20) ingot__text_add(t, "\\u%04x", (unsigned char)*s);
		else ingot__text_add(t, "%c", *s);
	}
	ingot__text_add(t, "\"");
}

#endif
