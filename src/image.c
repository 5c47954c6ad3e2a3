/*
 * The image stage: makes sure that a plan's kernels are on the device. Packs are looked for in the folders of the options, of
 * INGOT_IMAGE_PATH and of the library itself, under the name ingot-ARCH.pack, for the device's architecture and those whose
 * machine code it also runs. What is found stays loaded for the life of the process, so that a warm call takes two atomic
 * loads. CPU code is part of the library. Nothing here ever writes to the file system.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "pipeline.h"
#include "support/error.h"
#include "support/log.h"
#include "support/pack.h"

enum { UNKNOWN, PRESENT, ABSENT };

typedef struct loaded {
	void *function[INGOT__PACK_KERNELS]; /* in the order of impl->kernels */
	uint32_t arguments_size[INGOT__PACK_KERNELS];
} loaded;

typedef struct slot {
	atomic_int presence;
	_Atomic(loaded *) code;
} slot;

/* The packs that one search path gives one device, and what was loaded from them. Made once, never freed. */
typedef struct store {
	struct store *next;
	const ingot__device *device;
	char *path;     /* options.image_path, "" without */
	char *searched; /* INGOT_IMAGE_PATH as it was then, "" without */
	char *left_out; /* a pack that is there and cannot be used; NULL without */
	ingot__pack **pack;
	int packs;
	int *first; /* per implementation: index of its first variant's slot */
	slot *slots;
} store;

static _Atomic(store *) stores;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static double milliseconds(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* ---- finding packs ------------------------------------------------------------------------------------------------------ */

/* A pack that cannot be opened is an absent one here: another folder may have a good one. What was wrong is in the log, and
 * `ingot image verify` tells it again. */
static void add_packs(store *s, const char *folder, size_t length) {
	char path[4096];
	for (const char *arch = s->device->arch; *arch; arch = ingot__arch_parent(arch)) {
		if (length + strlen(arch) + sizeof "/ingot-.pack" > sizeof path) {
			ingot__log(1, "image path: a folder's name of %zu characters is too long", length);
			return;
		}
		snprintf(path, sizeof path, "%.*s/ingot-%s.pack", (int)length, folder, arch);
		ingot__pack *pack;
		bool missing;
		const bool quiet = ingot__error_quiet(true); /* most places have no pack, and that is no error */
		const ingot_status status = ingot__pack_open(path, &pack, &missing);
		ingot__error_quiet(quiet);
		if (status) {
			if (missing) continue;
			ingot__log(1, "%s", ingot_last_error());
			if (!s->left_out) s->left_out = strdup(path);
			continue;
		}
		if (strcmp(ingot__pack_head(pack)->arch, arch)) {
			ingot__log(1, "pack %s is for %s, not for %s: it is left out", path, ingot__pack_head(pack)->arch, arch);
			if (!s->left_out) s->left_out = strdup(path);
			ingot__pack_close(pack);
			continue;
		}
		ingot__pack **more = realloc(s->pack, sizeof *more * (size_t)(s->packs + 1));
		if (!more) {
			ingot__pack_close(pack);
			return;
		}
		s->pack = more;
		s->pack[s->packs++] = pack;
		ingot__log(3, "pack %s: %u images, %s", path, ingot__pack_head(pack)->entries,
		           ingot__pack_head(pack)->toolchain);
	}
}

static bool is_folder(const char *path, size_t length) {
	char copy[4096];
	struct stat is;
	snprintf(copy, sizeof copy, "%.*s", (int)length, path);
	return stat(copy, &is) == 0 && S_ISDIR(is.st_mode);
}

static void add_folders(store *s, const char *list, const char *from) {
	while (*list) {
		const size_t length = strcspn(list, ":");
		if (length && length < 4096 && !is_folder(list, length))
			ingot__log(1, "%s: \"%.*s\" is no folder; it is left out", from, (int)length, list);
		else if (length) add_packs(s, list, length);
		list += length + (list[length] == ':');
	}
}

static store *make_store(const ingot__device *device, const char *path) {
	store *s = calloc(1, sizeof *s);
	if (!s) return NULL;
	int slots = 0;
	s->device = device;
	const char *const environment = getenv("INGOT_IMAGE_PATH");
	s->path = strdup(path);
	s->searched = strdup(environment ? environment : "");
	s->first = calloc((size_t)ingot__impl_count + 1, sizeof *s->first);
	for (int i = 0; s->first && i < ingot__impl_count; i++) {
		s->first[i] = slots;
		slots += ingot__impls[i]->variant_count;
	}
	s->slots = calloc((size_t)slots + 1, sizeof *s->slots);
	if (!s->path || !s->searched || !s->first || !s->slots) {
		free(s->path);
		free(s->searched);
		free(s->first);
		free(s->slots);
		free(s);
		return NULL;
	}
	const double start = milliseconds();
	add_folders(s, path, "options.image_path");
	add_folders(s, s->searched, "INGOT_IMAGE_PATH");
	const char *own = ingot__library_folder();
	if (*own) add_packs(s, own, strlen(own));
	ingot__log(3, "%s: %d packs found and opened in %.3f ms", device->model, s->packs, milliseconds() - start);
	return s;
}

static store *store_of(const ingot__device *device, const ingot_options *options) {
	const char *path = options->image_path ? options->image_path : "";
	for (store *s = atomic_load_explicit(&stores, memory_order_acquire); s; s = s->next)
		if (s->device == device && !strcmp(s->path, path)) return s;
	pthread_mutex_lock(&lock);
	store *found = NULL;
	for (store *s = atomic_load(&stores); s && !found; s = s->next)
		if (s->device == device && !strcmp(s->path, path)) found = s;
	if (!found && (found = make_store(device, path))) {
		found->next = atomic_load(&stores);
		atomic_store_explicit(&stores, found, memory_order_release);
	}
	pthread_mutex_unlock(&lock);
	return found;
}

/* The first pack that has the image; the lock is held. A damaged index is reported by the pack and passed over. */
static const ingot__pack_entry *find_entry(store *s, const ingot__impl *impl, int variant, ingot__pack **pack) {
	for (int i = 0; i < s->packs; i++) {
		const ingot__pack_entry *entry;
		if (!ingot__pack_find(s->pack[i], impl->name, ingot__variant_name(impl, variant), &entry) && entry) {
			*pack = s->pack[i];
			return entry;
		}
	}
	return NULL;
}

bool ingot__image_present(int index, int variant, const ingot__device *device, const ingot_options *options) {
	if (device->type == INGOT_CPU) return true;
	store *s = store_of(device, options);
	if (!s) return false;
	const ingot__impl *const impl = ingot__impls[index];
	slot *const at = &s->slots[s->first[index] + variant];
	int presence = atomic_load_explicit(&at->presence, memory_order_relaxed);
	if (presence == UNKNOWN) {
		ingot__pack *pack;
		pthread_mutex_lock(&lock);
		presence = find_entry(s, impl, variant, &pack) ? PRESENT : ABSENT;
		atomic_store(&at->presence, presence);
		pthread_mutex_unlock(&lock);
		if (presence == ABSENT)
			ingot__log(2, "no image of %s:%s for %s among %d packs: it is passed over", impl->name,
			           ingot__variant_name(impl, variant), device->arch, s->packs);
	}
	return presence == PRESENT;
}

/* Where was looked comes last: folders may be longer than a sentence. */
static ingot_status no_image(const store *s, const ingot__impl *impl, int variant) {
	char packs[64] = "no pack";
	if (s->packs) snprintf(packs, sizeof packs, "no image of it among the %d packs", s->packs);
	return ingot__fail(
		INGOT_IMAGE,
		"%s:%s could run this call, but %s for this device (%s) was found: `ingot build` makes one%s%s%s; looked in "
		"options.image_path \"%s\", INGOT_IMAGE_PATH \"%s\" and the library's folder \"%s\"",
		impl->name, ingot__variant_name(impl, variant), packs, s->device->arch, s->left_out ? "; " : "",
		s->left_out ? s->left_out : "", s->left_out ? " was left out, `ingot image verify` says why" : "", s->path,
		s->searched, ingot__library_folder());
}

ingot_status ingot__image_missing(int index, int variant, const ingot__device *device, const ingot_options *options) {
	const store *const s = store_of(device, options);
	if (!s) return ingot__fail(INGOT_OUT_OF_MEMORY, "no memory to search for packs");
	return no_image(s, ingot__impls[index], variant);
}

ingot_status ingot__image_digest(const ingot__device *device, uint64_t *digest) {
	*digest = 0;
	if (device->type == INGOT_CPU) return INGOT_OK;
	const store *const s = store_of(device, &(const ingot_options){0});
	if (!s) return ingot__fail(INGOT_OUT_OF_MEMORY, "no memory to search for packs");
	/* a header's digest covers the index, whose entries carry those of their objects */
	for (int i = 0; i < s->packs; i++) *digest = (*digest ^ ingot__pack_head(s->pack[i])->digest) * 0x100000001b3u;
	return INGOT_OK;
}

/* ---- loading ------------------------------------------------------------------------------------------------------------- */

static ingot_status load(store *s, const ingot__impl *impl, int variant, loaded **out) {
	const char *name = ingot__variant_name(impl, variant);
	ingot__pack *pack;
	const ingot__pack_entry *entry = find_entry(s, impl, variant, &pack);
	if (!entry) return no_image(s, impl, variant);
	void *object, *module;
	const double start = milliseconds();
	ingot_status status = ingot__pack_read(pack, entry, &object);
	if (status) return status;
	const double whole = milliseconds();
	loaded *l = calloc(1, sizeof *l);
	if (!l) {
		free(object);
		return ingot__fail(INGOT_OUT_OF_MEMORY, "no memory to load %s:%s", impl->name, name);
	}
	const ingot__driver *const driver = s->device->driver;
	char of[768];
	snprintf(of, sizeof of, "pack %.512s, %s:%s", ingot__pack_path(pack), impl->name, name);
	status = driver->load(s->device, object, entry->size, of, &module);
	free(object);
	const bool is_loaded = !status;
	for (int i = 0; !status && i < INGOT__PACK_KERNELS && impl->kernels[i]; i++) {
		const ingot__pack_kernel *kernel = NULL;
		for (int j = 0; j < INGOT__PACK_KERNELS && !kernel; j++)
			if (!strcmp(entry->kernel[j].name, impl->kernels[i])) kernel = &entry->kernel[j];
		if (!kernel) status = ingot__fail(INGOT_IMAGE, "%s has no kernel %s", of, impl->kernels[i]);
		else {
			l->arguments_size[i] = kernel->arguments_size;
			status = driver->function(s->device, module, of, kernel->name, s->device->shared_most, &l->function[i]);
		}
	}
	if (!status)
		ingot__log(3, "%s: %llu bytes read and verified in %.3f ms, loaded by the driver in %.3f ms", of,
		           (unsigned long long)entry->size, whole - start, milliseconds() - whole);
	/* what is loaded belongs to nobody now */
	if (status && is_loaded) driver->unload(module);
	if (status) free(l);
	else *out = l;
	return status;
}

ingot_status ingot__image_load(const ingot__choice *choice, const ingot__plan *plan, const ingot__device *device,
                               const ingot_options *options, ingot__functions *functions) {
	memset(functions, 0, sizeof *functions);
	if (device->type == INGOT_CPU) return INGOT_OK;
	const ingot__impl *const impl = choice->impl;
	store *s = store_of(device, options);
	if (!s) return ingot__fail(INGOT_OUT_OF_MEMORY, "no memory to search for packs");
	slot *const at = &s->slots[s->first[choice->index] + choice->variant];
	loaded *l = atomic_load_explicit(&at->code, memory_order_acquire);
	if (!l) {
		ingot_status status = INGOT_OK;
		pthread_mutex_lock(&lock);
		if (!(l = atomic_load(&at->code)) && !(status = load(s, impl, choice->variant, &l))) {
			atomic_store_explicit(&at->code, l, memory_order_release);
			atomic_store(&at->presence, PRESENT);
		}
		pthread_mutex_unlock(&lock);
		if (status) return status;
	}
	for (int step = 0; step < plan->steps; step++)
		for (int i = 0; i < INGOT__PACK_KERNELS && impl->kernels[i]; i++)
			if (impl->kernels[i] == plan->step[step].kernel || !strcmp(impl->kernels[i], plan->step[step].kernel)) {
				if (l->arguments_size[i] != plan->arguments_size)
					return ingot__fail(
						INGOT_IMAGE,
						"the image of %s:%s takes %u bytes of arguments where the library gives %u: it is of "
						"another version",
						impl->name, ingot__variant_name(impl, choice->variant), l->arguments_size[i],
						plan->arguments_size);
				functions->function[step] = l->function[i];
			}
	return INGOT_OK;
}
