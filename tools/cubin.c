/* ELF as nvcc writes it for a GPU: e_machine EM_CUDA, a text and an info section for each kernel, and a note with the
 * assembler's options, which alone tells sm_90a from sm_90. */
#include "cubin.h"

#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MACHINE_CUDA = 190, INFO_PARAMETER = 0x17, INFO_REGISTERS = 0x2f };

typedef struct object {
	const unsigned char *bytes;
	size_t size;
	Elf64_Ehdr head;
} object;

static bool inside(const object *o, uint64_t offset, uint64_t length) {
	return offset <= o->size && length <= o->size - offset;
}

static bool section(const object *o, unsigned index, Elf64_Shdr *s) {
	const uint64_t at = o->head.e_shoff + (uint64_t)index * sizeof *s;
	if (index >= o->head.e_shnum || !inside(o, at, sizeof *s)) return false;
	memcpy(s, o->bytes + at, sizeof *s);
	return s->sh_type == SHT_NOBITS || inside(o, s->sh_offset, s->sh_size);
}

static bool open_object(object *o, const void *bytes, size_t size, const char **why) {
	*o = (object){bytes, size, {{0}, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}};
	*why = "it is no ELF file";
	if (size < sizeof o->head) return false;
	memcpy(&o->head, bytes, sizeof o->head);
	if (memcmp(o->head.e_ident, ELFMAG, SELFMAG) || o->head.e_ident[EI_CLASS] != ELFCLASS64) return false;
	*why = "it is no CUDA object";
	if (o->head.e_machine != MACHINE_CUDA) return false;
	*why = "its section table is damaged";
	Elf64_Shdr s;
	return o->head.e_shentsize == sizeof s && section(o, o->head.e_shstrndx, &s);
}

/* The section of that name. */
static bool find(const object *o, const char *name, Elf64_Shdr *found) {
	Elf64_Shdr names;
	if (!section(o, o->head.e_shstrndx, &names) || names.sh_type == SHT_NOBITS) return false;
	const size_t length = strlen(name) + 1;
	for (unsigned i = 0; i < o->head.e_shnum; i++) {
		if (!section(o, i, found)) return false;
		if (found->sh_name < names.sh_size && names.sh_size - found->sh_name >= length &&
		    !memcmp(o->bytes + names.sh_offset + found->sh_name, name, length))
			return true;
	}
	return false;
}

bool cubin_is_for(const void *bytes, size_t size, const char *arch, const char **why) {
	object o;
	Elf64_Shdr note;
	char option[48];
	if (!open_object(&o, bytes, size, why)) return false;
	*why = "it does not say which architecture it is for";
	if (!find(&o, ".note.nv.tkinfo", &note) || note.sh_type == SHT_NOBITS) return false;
	const int length = snprintf(option, sizeof option, "-arch %s ", arch);
	const char *text = (const char *)bytes + note.sh_offset;
	for (uint64_t i = 0; i + (uint64_t)length <= note.sh_size; i++)
		if (!memcmp(text + i, option, (size_t)length)) return true;
	*why = "it is for another architecture";
	return false;
}

/* The value of one attribute in a kernel's info section: a run of (format, attribute, size or 16-bit value, bytes). */
static bool attribute(const object *o, const Elf64_Shdr *info, unsigned want, unsigned skip, uint32_t *value) {
	const unsigned char *at = o->bytes + info->sh_offset, *const end = at + info->sh_size;
	while (end - at >= 4) {
		const unsigned format = at[0], name = at[1], size = at[2] | at[3] << 8;
		at += 4;
		if (format != 4) continue;
		if (size > end - at) return false;
		if (name == want && size >= skip + 4) {
			memcpy(value, at + skip, 4);
			return true;
		}
		at += size;
	}
	return false;
}

bool cubin_kernel(const void *bytes, size_t size, const char *kernel, uint64_t *code_bytes, uint32_t *arguments_size,
                  uint32_t *registers) {
	object o;
	Elf64_Shdr text, info;
	char name[128];
	const char *why;
	uint32_t parameter = 0;
	if (!open_object(&o, bytes, size, &why)) return false;
	snprintf(name, sizeof name, ".text.%s", kernel);
	if (!find(&o, name, &text) || text.sh_type == SHT_NOBITS || text.sh_size == 0) return false;
	snprintf(name, sizeof name, ".nv.info.%s", kernel);
	if (!find(&o, name, &info) || info.sh_type == SHT_NOBITS) return false;
	/* index, then ordinal and offset, then the size in the upper 14 bits: of the one parameter, without what aligns it */
	if (!attribute(&o, &info, INFO_PARAMETER, 8, &parameter)) return false;
	*code_bytes = text.sh_size;
	*arguments_size = parameter >> 18;
	*registers = text.sh_info >> 24; /* where this object format keeps it; newer ones keep it in the log only */
	return true;
}
