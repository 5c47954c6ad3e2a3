/* Fuzz target: any bytes as a safetensors file. Either a sentence, or tensors that lie inside the bytes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
	safetensors file;
	if (!safetensors_parse(bytes, size, &file)) {
		if (file.error[0] == 0 || file.header || file.entries) abort();
		return 0;
	}
	volatile uint8_t sum = 0;
	for (int i = 0; i < file.count; i++) {
		const safetensors_entry *e = &file.entries[i];
		if (e->bytes != (uint64_t)e->elements * (uint64_t)e->size) abort();
		for (uint64_t b = 0; b < e->bytes; b++) sum = (uint8_t)(sum + ((const uint8_t *)e->data)[b]);
		if (safetensors_find(&file, e->name) != e) abort();
	}
	(void)safetensors_metadata(&file, "softmax_scale");
	safetensors_release(&file);
	return 0;
}
