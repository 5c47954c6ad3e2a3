/*
 * Fuzz target: any params and options through every public call. Each must end in a status, with a sentence unless it is OK;
 * the sanitizers look for the rest. What runs for real stays inside the arena, so that a write elsewhere is seen.
 */
#include <stdio.h>
#include <stdlib.h>

#include "../random_params.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static void whole_or_abort(ingot_status status, const char *what) {
	const char *sentence = ingot_last_error();
	const int ok = status == INGOT_OK ? sentence[0] == 0 : sentence[0] != 0 && ingot_status_name(status)[6] != '?';
	if (ok) return;
	fprintf(stderr, "%s: status %d, sentence \"%s\"\n", what, (int)status, sentence);
	abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
	static arena memory;
	if (!memory.memory) memory.memory = calloc(1, ARENA_BYTES);
	if (!memory.memory) return 0;
	source s = {.bytes = bytes, .left = size};
	static random_call c;
	random_call_draw(&s, &memory, &c);

	char text[512];
	const size_t capacity = draw(&s) % (sizeof text + 1);
	whole_or_abort(random_call_make(&c, WORKSPACE, text, capacity), "workspace");
	whole_or_abort(random_call_make(&c, PREPARE, text, capacity), "prepare");
	whole_or_abort(random_call_make(&c, EXPLAIN, text, capacity), "explain");
	whole_or_abort(random_call_make(&c, RUN, text, capacity), "run");
	return 0;
}
