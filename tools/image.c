/*
 * `ingot image`: looks into packs, proves them whole, and makes them. Packs are read and written through packs.h alone.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "cubin.h"
#include "packs.h"
#include "tool.h"

static int open_pack(const tool_command *command, const char *path, ingot__pack **pack,
                     const ingot__pack_entry **entries, uint32_t *count) {
	if (ingot__pack_open(path, pack, NULL)) return tool_failed(command, "%s", packs_error());
	if (!ingot__pack_index(*pack, entries, count)) return TOOL_OK;
	tool_failed(command, "%s", packs_error());
	ingot__pack_close(*pack);
	return TOOL_FAILED;
}

static void hexadecimal(const uint8_t digest[16], char out[33]) {
	for (int i = 0; i < 16; i++) sprintf(out + 2 * i, "%02x", digest[i]);
}

/* ---- list ------------------------------------------------------------------------------------------------------------- */

static int list(const tool_command *command, const char *path, bool json) {
	ingot__pack *pack;
	const ingot__pack_entry *entry;
	uint32_t count;
	int status = open_pack(command, path, &pack, &entry, &count);
	if (status) return status;
	const ingot__pack_header *head = ingot__pack_head(pack);
	cJSON *root = cJSON_CreateObject(), *images = cJSON_AddArrayToObject(root, "images");
	cJSON_AddStringToObject(root, "arch", head->arch);
	cJSON_AddStringToObject(root, "toolchain", head->toolchain);
	cJSON_AddNumberToObject(root, "bytes", (double)head->file_size);
	if (!json) {
		printf("%s: %s, %u images, %llu bytes, %s\n\n", path, head->arch, count, (unsigned long long)head->file_size,
		       head->toolchain);
		printf("%-26s %-28s %10s %10s %5s %6s %s\n", "implementation", "variant", "bytes", "stored", "regs", "spills",
		       "kernels");
	}
	for (uint32_t i = 0; i < count; i++, entry++) {
		uint32_t registers = 0, spills = 0;
		cJSON *image = cJSON_CreateObject(), *kernels = cJSON_AddArrayToObject(image, "kernels");
		char digest[33], names[256] = "";
		for (int k = 0; k < INGOT__PACK_KERNELS && entry->kernel[k].name[0]; k++) {
			const ingot__pack_kernel *x = &entry->kernel[k];
			if (x->registers > registers) registers = x->registers;
			spills += x->spill_bytes;
			cJSON_AddItemToArray(kernels, cJSON_CreateString(x->name));
			snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", k ? " " : "", x->name);
		}
		hexadecimal(entry->object_digest, digest);
		cJSON_AddStringToObject(image, "implementation", entry->implementation);
		cJSON_AddStringToObject(image, "variant", entry->variant);
		cJSON_AddStringToObject(image, "digest", digest);
		cJSON_AddNumberToObject(image, "bytes", (double)entry->size);
		cJSON_AddNumberToObject(image, "registers", registers);
		cJSON_AddNumberToObject(image, "spill_bytes", spills);
		cJSON_AddItemToArray(images, image);
		if (!json)
			printf("%-26s %-28s %10llu %10llu %5u %6u %s\n", entry->implementation, entry->variant,
			       (unsigned long long)entry->size, (unsigned long long)entry->stored, registers, spills, names);
	}
	if (json) {
		char *text = cJSON_Print(root);
		puts(text);
		free(text);
	}
	cJSON_Delete(root);
	ingot__pack_close(pack);
	return TOOL_OK;
}

/* ---- verify ------------------------------------------------------------------------------------------------------------ */

/* Whether the image is what the library asks for: its own kernels, architecture and source. */
static const char *wrong_image(const ingot__pack_entry *entry, const void *object, const char *arch) {
	static char text[256];
	const char *why;
	if (!cubin_is_for(object, entry->size, arch, &why)) return why;
	for (int k = 0; k < INGOT__PACK_KERNELS && entry->kernel[k].name[0]; k++) {
		uint64_t code;
		uint32_t arguments, registers;
		if (!cubin_kernel(object, entry->size, entry->kernel[k].name, &code, &arguments, &registers)) {
			snprintf(text, sizeof text, "it holds no code of kernel %s", entry->kernel[k].name);
			return text;
		}
		if (arguments != entry->kernel[k].arguments_size) {
			snprintf(text, sizeof text, "kernel %s takes %u bytes of arguments, the index says %u",
			         entry->kernel[k].name, arguments, entry->kernel[k].arguments_size);
			return text;
		}
	}
	return NULL;
}

static int compare(const ingot__pack_entry *entry, const char *implementation, const char *variant) {
	const int c = strcmp(entry->implementation, implementation);
	return c ? c : strcmp(entry->variant, variant);
}

static bool is_asked_for(const ingot__pack_entry *entry, const char *only) {
	char name[128];
	snprintf(name, sizeof name, "%s:%s", entry->implementation, entry->variant);
	return strstr(name, only) != NULL;
}

/* Of what --only leaves, every image of this library's table is in the pack, from this source, and nothing else is. Prints what
 * is not. */
static int against_library(const ingot__pack_entry *entries, uint32_t count, const char *arch, const char *only) {
	int wrong = 0;
	char *seen = tool_alloc(count + 1);
	ingot_implementation impl;
	for (int32_t i = 0; ingot_implementation_get(i, &impl) == INGOT_OK; i++) {
		ingot_variant variant;
		/* kernels of one architecture are in its packs only */
		if (impl.device_type == INGOT_CPU || (*impl.arch && strcmp(impl.arch, arch))) continue;
		for (int32_t v = 0; v < impl.variant_count; v++) {
			char name[128], digest[33];
			bool found = false;
			if (ingot_variant_get(i, v, &variant)) continue;
			snprintf(name, sizeof name, "%s:%s", impl.name, variant.name);
			if (!strstr(name, only)) continue;
			for (uint32_t e = 0; e < count && !found; e++)
				if (!compare(&entries[e], impl.name, variant.name)) {
					found = true, seen[e] = 1;
					hexadecimal(entries[e].source_digest, digest);
					if (strcmp(digest, impl.digest))
						wrong++, printf("%s: stale: built from another source than this library's\n", name);
				}
			if (!found) wrong++, printf("%s: missing\n", name);
		}
	}
	for (uint32_t e = 0; e < count; e++)
		if (!seen[e] && is_asked_for(&entries[e], only))
			wrong++,
				printf("%s:%s: this library asks for no such image\n", entries[e].implementation, entries[e].variant);
	free(seen);
	return wrong;
}

static int no_image(const tool_command *command, const char *path, const char *only) {
	return tool_failed(command, "%s: no image%s%s%s", path, *only ? " is called like --only \"" : "", only,
	                   *only ? "\"" : "");
}

static int verify(const tool_command *command, const char *path, const char *only) {
	ingot__pack *pack;
	const ingot__pack_entry *entry;
	uint32_t count, verified = 0;
	int status = open_pack(command, path, &pack, &entry, &count), wrong = 0;
	if (status) return status;
	for (uint32_t i = 0; i < count; i++) {
		void *object;
		if (!is_asked_for(&entry[i], only)) continue;
		verified++;
		if (ingot__pack_read(pack, &entry[i], &object)) {
			printf("%s\n", packs_error());
			wrong++;
			continue;
		}
		const char *why = wrong_image(&entry[i], object, ingot__pack_head(pack)->arch);
		if (why) wrong++, printf("%s:%s: %s\n", entry[i].implementation, entry[i].variant, why);
		free(object);
	}
	wrong += against_library(entry, count, ingot__pack_head(pack)->arch, only);
	if (!wrong && !verified) status = no_image(command, path, only);
	else if (wrong) status = TOOL_FAILED, printf("%s: %d faults\n", path, wrong);
	else
		printf("%s: %u of %u images verified, for %s: whole, complete and of this library's source\n", path, verified,
		       count, ingot__pack_head(pack)->arch);
	ingot__pack_close(pack);
	return status;
}

/* ---- extract, diff, merge ---------------------------------------------------------------------------------------------- */

static int extract(const tool_command *command, const char *path, const char *folder, const char *only) {
	ingot__pack *pack;
	const ingot__pack_entry *entry;
	uint32_t count, wanted = 0;
	int status = open_pack(command, path, &pack, &entry, &count);
	if (status) return status;
	for (uint32_t i = 0; i < count; i++) wanted += is_asked_for(&entry[i], only);
	if (!wanted) status = no_image(command, path, only);
	else if (mkdir(folder, 0755) && errno != EEXIST) status = tool_failed(command, "%s: %s", folder, strerror(errno));
	for (uint32_t i = 0; i < count && !status; i++) {
		char name[4096];
		void *object;
		snprintf(name, sizeof name, "%s:%s", entry[i].implementation, entry[i].variant);
		if (!is_asked_for(&entry[i], only)) continue;
		/* names come from a file: none may leave the folder */
		if (strchr(name, '/') || name[0] == '.')
			status = tool_failed(command, "%s: the name %s is no file name", path, name);
		else if (ingot__pack_read(pack, &entry[i], &object)) status = tool_failed(command, "%s", packs_error());
		else {
			snprintf(name, sizeof name, "%s/%s.%s.cubin", folder, entry[i].implementation, entry[i].variant);
			status = tool_write_file(command, name, object, entry[i].size);
			free(object);
		}
	}
	if (!status) printf("%u objects in %s\n", wanted, folder);
	ingot__pack_close(pack);
	return status;
}

static int diff(const tool_command *command, const char *a_path, const char *b_path) {
	ingot__pack *a, *b;
	const ingot__pack_entry *x, *y;
	uint32_t nx, ny, i = 0, j = 0, differing = 0;
	int status = open_pack(command, a_path, &a, &x, &nx);
	if (status) return status;
	if ((status = open_pack(command, b_path, &b, &y, &ny))) {
		ingot__pack_close(a);
		return status;
	}
	if (strcmp(ingot__pack_head(a)->arch, ingot__pack_head(b)->arch))
		differing++, printf("arch: %s and %s\n", ingot__pack_head(a)->arch, ingot__pack_head(b)->arch);
	if (strcmp(ingot__pack_head(a)->toolchain, ingot__pack_head(b)->toolchain))
		differing++, printf("toolchain: %s and %s\n", ingot__pack_head(a)->toolchain, ingot__pack_head(b)->toolchain);
	while (i < nx || j < ny) {
		const int c = i == nx ? 1 : j == ny ? -1 : compare(&x[i], y[j].implementation, y[j].variant);
		const ingot__pack_entry *one = c <= 0 ? &x[i] : &y[j];
		const char *what = c < 0                                                ? "only in the first"
		                   : c > 0                                              ? "only in the second"
		                   : memcmp(x[i].object_digest, y[j].object_digest, 16) ? "differs"
		                                                                        : NULL;
		if (what) differing++, printf("%s:%s: %s\n", one->implementation, one->variant, what);
		i += c <= 0, j += c >= 0;
	}
	if (!differing) printf("the same %u images\n", nx);
	ingot__pack_close(a);
	ingot__pack_close(b);
	return differing ? TOOL_FAILED : TOOL_OK;
}

/* TOOL_OK where out is free or a pack, which a new one may replace; else the status after a message. */
static int check_replaced(const tool_command *command, const char *out) {
	char magic[sizeof INGOT__PACK_MAGIC - 1];
	FILE *f = fopen(out, "rb");
	if (!f) return errno == ENOENT ? TOOL_OK : tool_usage(command, "-o %s: %s", out, strerror(errno));
	const bool is_pack =
		fread(magic, 1, sizeof magic, f) == sizeof magic && !memcmp(magic, INGOT__PACK_MAGIC, sizeof magic);
	fclose(f);
	return is_pack ? TOOL_OK : tool_usage(command, "-o %s is there and is no pack; it is not replaced", out);
}

static int merge(const tool_command *command, const char *out, const char *const *paths, int count) {
	ingot__pack_item *items = NULL;
	uint32_t total = 0;
	char arch[32] = "", toolchain[128] = "";
	int status = TOOL_OK;
	for (int i = 0; i < count && !status; i++) {
		ingot__pack *pack;
		const ingot__pack_entry *entry;
		uint32_t n;
		if ((status = open_pack(command, paths[i], &pack, &entry, &n))) break;
		const ingot__pack_header *head = ingot__pack_head(pack);
		if (i && strcmp(arch, head->arch))
			status = tool_failed(command, "%s is for %s, %s for %s", paths[0], arch, paths[i], head->arch);
		else if (i && strcmp(toolchain, head->toolchain))
			status =
				tool_failed(command, "%s was made by %s, %s by %s", paths[0], toolchain, paths[i], head->toolchain);
		strcpy(arch, head->arch);
		strcpy(toolchain, head->toolchain);
		items = realloc(items, (total + n + 1) * sizeof *items);
		if (!items) status = tool_failed(command, "out of memory");
		for (uint32_t e = 0; e < n && !status; e++) {
			/* the same image in two packs is one image */
			bool known = false;
			for (uint32_t k = 0; k < total && !known; k++)
				known = !compare(&items[k].entry, entry[e].implementation, entry[e].variant) &&
				        !memcmp(items[k].entry.object_digest, entry[e].object_digest, 16);
			if (known) continue;
			void *object;
			if (ingot__pack_read(pack, &entry[e], &object)) status = tool_failed(command, "%s", packs_error());
			else items[total++] = (ingot__pack_item){entry[e], object};
		}
		ingot__pack_close(pack);
	}
	if (!status && ingot__pack_write(out, arch, toolchain, items, total))
		status = tool_failed(command, "%s", packs_error());
	if (!status) printf("%s: %u images for %s\n", out, total, arch);
	for (uint32_t k = 0; k < total; k++) free((void *)(uintptr_t)items[k].object);
	free(items);
	return status;
}

/* ---- create: from the objects and logs that `ingot build` made ------------------------------------------------------------ */

static char *read_file(const char *path, size_t *size) {
	FILE *f = fopen(path, "rb");
	if (!f) return NULL;
	size_t length = 0, room = 1 << 16;
	char *text = tool_alloc(room);
	for (size_t n; (n = fread(text + length, 1, room - length - 1, f)) > 0;) {
		length += n;
		if (room - length > 1) continue;
		char *more = realloc(text, room *= 2);
		if (!more) break;
		text = more;
	}
	fclose(f);
	text[length] = 0;
	*size = length;
	return text;
}

/* Registers and spills of a kernel as the assembler's log has them. */
static bool read_log(const char *log, const char *kernel, uint32_t *registers, uint32_t *spills) {
	char mark[128];
	snprintf(mark, sizeof mark, "Function properties for %s\n", kernel);
	const char *at = strstr(log, mark);
	unsigned frame, stores, loads, used;
	if (!at || sscanf(at + strlen(mark), " %u bytes stack frame, %u bytes spill stores, %u bytes spill loads", &frame,
	                  &stores, &loads) != 3)
		return false;
	at = strstr(at, "Used ");
	if (!at || sscanf(at, "Used %u registers", &used) != 1) return false;
	*registers = used;
	*spills = stores + loads;
	return true;
}

/* The assembler's warnings that a kernel is not what it was written to be: registers that are not handed over between warpgroups,
 * and matrix products that wait for one another. NULL without any. */
static const char *spoiling_warning(const char *log) {
	static const char *const warnings[] = {"C7508", "C7510", "C7511", "C7512", "C7513", "C7514", "C7515"};
	for (size_t i = 0; i < sizeof warnings / sizeof *warnings; i++)
		if (strstr(log, warnings[i])) return warnings[i];
	return NULL;
}

static bool digest_of(const char *text, uint8_t out[16]) {
	for (int i = 0; i < 16; i++) {
		unsigned byte;
		if (sscanf(text + 2 * i, "%2x", &byte) != 1) return false;
		out[i] = (uint8_t)byte;
	}
	return strlen(text) == 32;
}

enum { FIELDS = 7 }; /* implementation, variant, object, log, spill bytes allowed, source digest, kernels by commas */

static int create_one(const tool_command *command, const char *arch, char *line, ingot__pack_item *item) {
	char *field[FIELDS];
	for (int i = 0; i < FIELDS; i++) {
		field[i] = line;
		line = line ? strchr(line, '\t') : NULL;
		if (line) *line++ = 0;
		if (!line != (i == FIELDS - 1)) return tool_failed(command, "a line of the list has not %d fields", FIELDS);
	}
	ingot__pack_entry *const e = &item->entry;
	size_t size, log_size;
	const char *why;
	char *log = NULL;
	memset(item, 0, sizeof *item);
	snprintf(e->implementation, sizeof e->implementation, "%s", field[0]);
	snprintf(e->variant, sizeof e->variant, "%s", field[1]);
	if (!digest_of(field[5], e->source_digest))
		return tool_failed(command, "%s:%s: its source digest cannot be read", field[0], field[1]);
	void *object = read_file(field[2], &size);
	item->object = object;
	if (!object || size == 0)
		return tool_failed(command, "%s:%s: %s is %s", field[0], field[1], field[2], object ? "empty" : "missing");
	if (!cubin_is_for(object, size, arch, &why))
		return tool_failed(command, "%s:%s: %s: %s (%s)", field[0], field[1], field[2], why, arch);
	if (!(log = read_file(field[3], &log_size)))
		return tool_failed(command, "%s:%s: the compiler's log %s is missing", field[0], field[1], field[3]);
	e->size = size;
	uint32_t all_spills = 0;
	int status = TOOL_OK, k = 0;
	for (char *name = strtok(field[6], ","); name && !status; name = strtok(NULL, ","), k++) {
		uint64_t code;
		uint32_t registers;
		if (k == INGOT__PACK_KERNELS) {
			status = tool_failed(command, "%s: an image holds at most %d kernels", field[0], INGOT__PACK_KERNELS);
			break;
		}
		ingot__pack_kernel *const x = &e->kernel[k];
		snprintf(x->name, sizeof x->name, "%s", name);
		if (!cubin_kernel(object, size, name, &code, &x->arguments_size, &registers))
			status = tool_failed(command, "%s:%s: the object holds no code of kernel %s", field[0], field[1], name);
		else if (!read_log(log, name, &x->registers, &x->spill_bytes))
			status =
				tool_failed(command, "%s:%s: the compiler's log does not tell of kernel %s", field[0], field[1], name);
		else all_spills += x->spill_bytes;
	}
	const char *const warning = spoiling_warning(log);
	if (!status && warning)
		status = tool_failed(command, "%s:%s: the assembler warns of %s: its products or registers are not as written",
		                     field[0], field[1], warning);
	free(log);
	if (!status && all_spills > strtoul(field[4], NULL, 10))
		status = tool_failed(command, "%s:%s: %u bytes of register spills; its row allows %s", field[0], field[1],
		                     all_spills, field[4]);
	return status;
}

static int create(const tool_command *command, const char *path, const char *arch, const char *toolchain,
                  const char *list_path) {
	size_t size;
	char *text = read_file(list_path, &size);
	if (!text) return tool_failed(command, "%s: %s", list_path, strerror(errno));
	uint32_t lines = 0, count = 0;
	for (char *c = text; *c; c++) lines += *c == '\n';
	ingot__pack_item *items = tool_alloc((lines + 1) * sizeof *items);
	int failed = 0, status;
	for (char *line = text, *next; *line; line = next) {
		next = strchr(line, '\n');
		if (next) *next++ = 0;
		else next = line + strlen(line);
		if (*line && create_one(command, arch, line, &items[count++])) failed++;
	}
	if (failed) status = tool_failed(command, "%s was not made: %d of %u images are at fault", path, failed, count);
	else if (!count) status = tool_failed(command, "%s was not made: %s lists no image", path, list_path);
	else status = TOOL_OK;
	if (!status && ingot__pack_write(path, arch, toolchain, items, count))
		status = tool_failed(command, "%s", packs_error());
	for (uint32_t i = 0; i < count; i++) free((void *)(uintptr_t)items[i].object);
	free(items);
	free(text);
	return status;
}

/* ---- the command ------------------------------------------------------------------------------------------------------- */

static int run(const tool_command *command, int argc, char **argv) {
	bool json = false;
	const char *out = "", *only = "", *arch = "", *toolchain = "", *words[16];
	const tool_option options[] = {
		{"--json", NULL, "list: print JSON", TOOL_FLAG, &json, 0, 0},
		{"--only", "TEXT", "extract, verify: only images whose implementation:variant holds TEXT", TOOL_TEXT, &only, 0,
	     0},
		{"-o", "PATH", "extract: the folder; merge, create: the pack", TOOL_TEXT, &out, 0, 0},
		{"--arch", "ARCH", "create: the architecture", TOOL_TEXT, &arch, 0, 0},
		{"--toolchain", "TEXT", "create: the compiler and its version", TOOL_TEXT, &toolchain, 0, 0},
		{0}};
	int count;
	int status = tool_parse(command, options, argc, argv, words, 16, &count);
	if (status >= 0) return status;
	const char *verb = count ? words[0] : "";
	const bool lists = !strcmp(verb, "list"), creates = !strcmp(verb, "create"), merges = !strcmp(verb, "merge"),
			   extracts = !strcmp(verb, "extract"), verifies = !strcmp(verb, "verify");
	const char *const stray = json && !lists                             ? "--json"
	                          : *only && !extracts && !verifies          ? "--only"
	                          : *out && !extracts && !merges && !creates ? "-o"
	                          : *arch && !creates                        ? "--arch"
	                          : *toolchain && !creates                   ? "--toolchain"
	                                                                     : NULL;
	if (*verb && stray) return tool_usage(command, "%s does not apply to %s; see ingot image --help", stray, verb);
	if ((merges || creates) && *out && (status = check_replaced(command, out))) return status;
	if (lists && count == 2) return list(command, words[1], json);
	if (verifies && count == 2) return verify(command, words[1], only);
	if (extracts && count == 2 && *out) return extract(command, words[1], out, only);
	if (!strcmp(verb, "diff") && count == 3) return diff(command, words[1], words[2]);
	if (merges && count >= 2 && *out) return merge(command, out, words + 1, count - 1);
	if (creates && count == 2 && *out && *arch) return create(command, out, arch, toolchain, words[1]);
	return tool_usage(
		command, "allowed are: list PACK; verify PACK; extract PACK -o FOLDER; diff PACK PACK; merge PACK... -o PACK; "
				 "create LIST --arch ARCH -o PACK");
}

const tool_command tool_image = {
	"image",
	"list|verify|extract|diff|merge|create ...",
	"look into packs of code objects, prove them whole, make them",
	"  ingot image list build/packs/ingot-sm_90a.pack\n"
	"  ingot image verify PACK            # every image read, compared with its digest, its kernels and this library's table\n"
	"  ingot image extract PACK -o DIR    # the objects as files\n"
	"  ingot image diff OLD NEW           # exit 1 when they differ\n"
	"  ingot image merge A B -o PACK      # one pack of several of one architecture and compiler\n",
	run,
};
