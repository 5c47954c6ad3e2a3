/*
 * `ingot build`: compiles every variant of every GPU kernel that this library's own table names, with no GPU and no framework, into
 * one pack an architecture. It writes a Ninja file and lets Ninja run it: depfiles say which header rebuilds what, a killed
 * build goes on where it was, and a pack is published only when every one of its images is there and sound.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "packs.h"
#include "tool.h"

#ifndef INGOT_SOURCE_DIR
#define INGOT_SOURCE_DIR ""
#endif

/* The one compiler release that packs are made with: another makes other bytes, whose evidence nobody has. */
#define NVCC_RELEASE "13.0"

static const struct {
	const char *name, *flags;
} archs[] = {
#define ARCH(name, parent, flags, capability) {#name, flags},
#include "../src/kernels/cuda/arch.def"
#undef ARCH
};
enum { ARCHS = sizeof archs / sizeof *archs, VARIANTS_MOST = 400 };

typedef struct plan {
	const tool_command *command;
	char source[2048], out[2048], nvcc[2048], self[2048], toolchain[128];
	const char *only;
	int arch[ARCHS], arch_count;
	int64_t jobs, limit;
} plan;

static bool wanted(const plan *p, const char *impl, const char *variant) {
	char name[160];
	snprintf(name, sizeof name, "%s:%s", impl, variant);
	return !*p->only || strstr(name, p->only);
}

/* Hopper's own kernels run on sm_90a alone; the portable ones, without an architecture, on all. */
static bool built_for(const ingot_implementation *impl, const char *arch) {
	return impl->device_type == INGOT_CUDA && (!*impl->arch || !strcmp(impl->arch, arch));
}

/* ---- arguments ---------------------------------------------------------------------------------------------------------- */

static int parse_archs(plan *p, const char *text) {
	char copy[256];
	if (!text[strspn(text, ",")])
		return tool_usage(p->command,
		                  "--arch is missing; give one or more of the architectures that --help lists, by commas");
	snprintf(copy, sizeof copy, "%s", text);
	for (char *name = strtok(copy, ","); name; name = strtok(NULL, ",")) {
		int found = -1;
		for (int i = 0; i < ARCHS; i++)
			if (!strcmp(archs[i].name, name)) found = i;
		if (found < 0) {
			char list[256] = "";
			for (int i = 0; i < ARCHS; i++)
				snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i ? ", " : "", archs[i].name);
			return tool_usage(p->command, "--arch has \"%s\"; allowed are %s", name, list);
		}
		bool again = false;
		for (int i = 0; i < p->arch_count; i++) again |= p->arch[i] == found;
		if (!again) p->arch[p->arch_count++] = found;
	}
	return TOOL_OK;
}

static bool find_in_path(const char *name, char *out, size_t capacity) {
	const char *path = getenv("PATH");
	while (path && *path) {
		const size_t n = strcspn(path, ":");
		snprintf(out, capacity, "%.*s/%s", (int)n, path, name);
		if (n && !access(out, X_OK)) return true;
		path += n + (path[n] == ':');
	}
	return false;
}

static int find_compiler(plan *p, const char *given) {
	if (*given) {
		if (!realpath(given, p->nvcc)) return tool_failed(p->command, "--nvcc %s: %s", given, strerror(errno));
	} else if (!find_in_path("nvcc", p->nvcc, sizeof p->nvcc))
		return tool_failed(
			p->command,
			"no nvcc on PATH; give --nvcc, or let tools/fetch_nvcc.sh bring the pinned one into a local folder");
	char line[256], quoted[2100];
	snprintf(quoted, sizeof quoted, "'%s' --version 2>&1", p->nvcc);
	FILE *f = popen(quoted, "r");
	unsigned major, minor, patch;
	while (f && fgets(line, sizeof line, f)) {
		const char *v = strstr(line, ", V");
		if (v && sscanf(v, ", V%u.%u.%u", &major, &minor, &patch) == 3)
			snprintf(p->toolchain, sizeof p->toolchain, "nvcc %u.%u.%u", major, minor, patch);
	}
	if (f) pclose(f);
	if (!*p->toolchain) return tool_failed(p->command, "%s does not tell its version", p->nvcc);
	if (strncmp(p->toolchain, "nvcc " NVCC_RELEASE ".", sizeof "nvcc " NVCC_RELEASE))
		return tool_failed(p->command,
		                   "%s is %s; packs are made with nvcc " NVCC_RELEASE ", tools/fetch_nvcc.sh brings it",
		                   p->nvcc, p->toolchain);
	return TOOL_OK;
}

static int find_source(plan *p, const char *given) {
	char probe[2200], folder[2048];
	if (*given) {
		if (!realpath(given, p->source)) return tool_failed(p->command, "--source %s: %s", given, strerror(errno));
	} else {
		const ssize_t n = readlink("/proc/self/exe", folder, sizeof folder - 64);
		if (n > 0) {
			folder[n] = 0;
			*strrchr(folder, '/') = 0;
			strcat(folder, "/../share/ingot");
		} else strcpy(folder, "");
		if (!realpath(folder, p->source)) snprintf(p->source, sizeof p->source, "%s", INGOT_SOURCE_DIR);
	}
	snprintf(probe, sizeof probe, "%s/src/kernels/cuda/arch.def", p->source);
	if (access(probe, R_OK)) return tool_failed(p->command, "no kernel sources in \"%s\"; give --source", p->source);
	return TOOL_OK;
}

/* ---- the Ninja file --------------------------------------------------------------------------------------------------------- */

/* A path inside a Ninja file. */
static void put_path(FILE *f, const char *path) {
	for (; *path; path++) {
		if (*path == '$' || *path == ' ' || *path == ':') fputc('$', f);
		fputc(*path, f);
	}
}

/* A path inside a shell command inside a Ninja file. */
static void put_shell(FILE *f, const char *path) {
	fputc('\'', f);
	for (; *path; path++) {
		if (*path == '\'') fputs("'\\''", f);
		else {
			if (*path == '$') fputc('$', f);
			fputc(*path, f);
		}
	}
	fputc('\'', f);
}

/* Replaces a file only if its text is another: a file that stays rebuilds nothing. */
static int publish(const plan *p, const char *path, const char *text, size_t size) {
	FILE *f = fopen(path, "rb");
	if (f) {
		char *old = tool_alloc(size + 2);
		const size_t n = fread(old, 1, size + 1, f);
		fclose(f);
		const bool same = n == size && !memcmp(old, text, size);
		free(old);
		if (same) return TOOL_OK;
	}
	return tool_write_file(p->command, path, text, size);
}

/* Calls back for every image of an architecture, larger heads first: they take longest. */
static int each_image(const plan *p, const char *arch,
                      void (*act)(const ingot_implementation *, const ingot_variant *, void *), void *context) {
	ingot_implementation impl;
	int count = 0;
	for (int32_t i = 0; ingot_implementation_get(i, &impl) == INGOT_OK; i++) {
		ingot_variant variant;
		if (!built_for(&impl, arch)) continue;
		for (int32_t v = impl.variant_count - 1; v >= 0; v--) {
			if (ingot_variant_get(i, v, &variant) || !wanted(p, impl.name, variant.name)) continue;
			if (act) act(&impl, &variant, context);
			count++;
		}
	}
	return count;
}

typedef struct writing {
	FILE *ninja, *list;
	const plan *p;
	const char *arch;
} writing;

static void put_image(const ingot_implementation *impl, const ingot_variant *variant, void *context) {
	const writing *w = context;
	char object[512];
	snprintf(object, sizeof object, "objects/%s/%s.%s.cubin", w->arch, impl->name, variant->name);
	fprintf(w->ninja, "build %s: image ", object);
	put_path(w->ninja, w->p->source);
	fprintf(w->ninja, "/src/kernels/cuda/%s.cu\n  arch = %s\n  name = %s:%s\n  defines = %s\n", impl->name, w->arch,
	        impl->name, variant->name, variant->defines);
	for (int i = 0; i < ARCHS; i++)
		if (!strcmp(archs[i].name, w->arch)) fprintf(w->ninja, "  target = %s\n", archs[i].flags);
	fprintf(w->list, "%s\t%s\t%s\t%s.log\t%u\t%s\t", impl->name, variant->name, object, object, variant->spill_bytes,
	        impl->digest);
	for (int k = 0; variant->kernels[k]; k++) fprintf(w->list, "%s%s", k ? "," : "", variant->kernels[k]);
	fprintf(w->list, "\n");
}

static void put_object(const ingot_implementation *impl, const ingot_variant *variant, void *context) {
	const writing *w = context;
	fprintf(w->ninja, " objects/%s/%s.%s.cubin", w->arch, impl->name, variant->name);
}

/* Removes what killed compiles left of an architecture: NAME.cubin.NUMBER.part, and .d and .log. A compiler that outlived its
 * build loses its files, which nobody waits for. */
static void remove_leftovers(const char *folder) {
	DIR *d = opendir(folder);
	if (!d) return;
	for (const struct dirent *entry; (entry = readdir(d));) {
		const char *const at = strstr(entry->d_name, ".cubin.");
		if (!at) continue;
		const char *const number = at + strlen(".cubin."), *const end = number + strspn(number, "0123456789");
		if (end != number && (!strcmp(end, ".part") || !strcmp(end, ".d") || !strcmp(end, ".log")))
			unlinkat(dirfd(d), entry->d_name, 0);
	}
	closedir(d);
}

static int write_ninja(const plan *p) {
	char *text;
	size_t size;
	FILE *f = open_memstream(&text, &size);
	if (!f) return tool_failed(p->command, "out of memory");
	fprintf(
		f,
		"# Written by ingot build.\nninja_required_version = 1.8\n\npool compilers\n  depth = %lld\n\nrule image\n  command = ",
		(long long)p->jobs);
	fprintf(f, "timeout -k 10 %lld ", (long long)p->limit);
	put_shell(f, p->nvcc);
	/* What a compile writes bears its shell's number until it is whole: a compiler that outlived a killed build must not share a
	 * file with the next build's. */
	fprintf(f, " $target -cubin -O3 -std=c++17 -Xptxas -v -DINGOT_DEVICE $defines -MD -MF $out.$$$$.d -MT $out -o "
	           "$out.$$$$.part ");
	fprintf(
		f,
		"'$in' > $out.$$$$.log 2>&1 && mv $out.$$$$.log $out.log && mv $out.$$$$.d $out.d && mv $out.$$$$.part $out || { "
		"status=$$?; echo \"$arch $name failed with status $$status (124: over the limit of %lld s); the end of its log:\"; "
		"tail -n 25 $out.$$$$.log; rm -f $out.$$$$.*; exit 1; }\n",
		(long long)p->limit);
	fprintf(
		f,
		"  depfile = $out.d\n  deps = gcc\n  description = $arch $name\n  pool = compilers\n\nrule pack\n  command = ");
	put_shell(f, p->self);
	fprintf(f, " image create $list --arch $arch --toolchain '%s' -o $out\n  description = $out\n\n", p->toolchain);
	int status = TOOL_OK;
	for (int i = 0; i < p->arch_count && !status; i++) {
		const char *arch = archs[p->arch[i]].name;
		char *lines, path[4200];
		size_t length;
		writing w = {f, open_memstream(&lines, &length), p, arch};
		if (!w.list) return tool_failed(p->command, "out of memory");
		each_image(p, arch, put_image, &w);
		fclose(w.list);
		snprintf(path, sizeof path, "%s/objects/%s.list", p->out, arch);
		status = publish(p, path, lines, length);
		free(lines);
		fprintf(f, "build ingot-%s.pack: pack", arch);
		each_image(p, arch, put_object, &w);
		fprintf(f, " | objects/%s.list\n  arch = %s\n  list = objects/%s.list\n\n", arch, arch, arch);
	}
	fclose(f);
	char path[4200];
	snprintf(path, sizeof path, "%s/build.ninja", p->out);
	if (!status) status = publish(p, path, text, size);
	free(text);
	return status;
}

/* ---- running ---------------------------------------------------------------------------------------------------------------- */

static int make_folder(const plan *p, const char *path) {
	char copy[4200];
	snprintf(copy, sizeof copy, "%s", path);
	for (char *c = copy + 1;; c++) {
		const char was = *c;
		if (was && was != '/') continue;
		*c = 0;
		if (mkdir(copy, 0755) && errno != EEXIST) return tool_failed(p->command, "%s: %s", copy, strerror(errno));
		if (!was) return TOOL_OK;
		*c = was;
	}
}

static int run_ninja(const plan *p) {
	char jobs[24], ninja[2048];
	if (!find_in_path("ninja", ninja, sizeof ninja) && !find_in_path("ninja-build", ninja, sizeof ninja))
		return tool_failed(p->command, "no ninja on PATH");
	snprintf(jobs, sizeof jobs, "%lld", (long long)p->jobs);
	fflush(stdout);
	const pid_t child = fork();
	if (child < 0) return tool_failed(p->command, "ninja cannot be started: %s", strerror(errno));
	if (child == 0) {
		setenv("NINJA_STATUS", "[%f/%t, %e s] ", 1);
		/* -k 0: one bad image does not hide others */
		execl(ninja, "ninja", "-C", p->out, "-j", jobs, "-k", "0", (char *)NULL);
		_exit(127);
	}
	int status;
	while (waitpid(child, &status, 0) < 0)
		if (errno != EINTR) return tool_failed(p->command, "ninja was lost: %s", strerror(errno));
	if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return TOOL_OK;
	return tool_failed(p->command,
	                   "the build failed; packs stand as they were before. Run it again to go on from here");
}

static int summarise(const plan *p, double seconds) {
	printf("\n%-10s %8s %12s %10s %7s %8s\n", "arch", "images", "pack bytes", "code bytes", "regs", "spills");
	for (int i = 0; i < p->arch_count; i++) {
		char path[4200];
		ingot__pack *pack;
		const ingot__pack_entry *e;
		uint32_t count, registers = 0;
		uint64_t code = 0, spills = 0;
		snprintf(path, sizeof path, "%s/ingot-%s.pack", p->out, archs[p->arch[i]].name);
		if (ingot__pack_open(path, &pack, NULL) || ingot__pack_index(pack, &e, &count))
			return tool_failed(p->command, "%s", packs_error());
		for (uint32_t n = 0; n < count; n++) {
			code += e[n].size;
			for (int k = 0; k < INGOT__PACK_KERNELS; k++) {
				if (e[n].kernel[k].registers > registers) registers = e[n].kernel[k].registers;
				spills += e[n].kernel[k].spill_bytes;
			}
		}
		printf("%-10s %8u %12llu %10llu %7u %8llu\n", archs[p->arch[i]].name, count,
		       (unsigned long long)ingot__pack_head(pack)->file_size, (unsigned long long)code, registers,
		       (unsigned long long)spills);
		ingot__pack_close(pack);
	}
	printf("%s, %lld jobs, %.1f s", p->toolchain, (long long)p->jobs, seconds);
	if (seconds >= 60) printf(" (%.1f minutes)", seconds / 60);
	printf("\n");
	return TOOL_OK;
}

static void print_image(const ingot_implementation *impl, const ingot_variant *variant, void *context) {
	printf("%s %s:%s %s\n", (const char *)context, impl->name, variant->name, variant->defines);
}

static int run(const tool_command *command, int argc, char **argv) {
	static plan p;
	const char *arch = "", *out = "packs", *nvcc = "", *source = "";
	bool list = false;
	cpu_set_t set;
	p.command = command;
	p.only = "";
	p.limit = 900;
	p.jobs = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
	const tool_option options[] = {
		{"--arch", "LIST", "architectures, by commas: sm_80, sm_86, sm_89, sm_90, sm_90a, sm_100, sm_120", TOOL_TEXT,
	     &arch, 0, 0},
		{"-o", "DIR", "where packs and objects go (packs)", TOOL_TEXT, &out, 0, 0},
		{"--only", "TEXT", "only images whose implementation:variant holds TEXT; packs hold these alone", TOOL_TEXT,
	     &p.only, 0, 0},
		{"--list", NULL, "print what would be built, and build nothing", TOOL_FLAG, &list, 0, 0},
		{"--jobs", "N", "compilers at a time (the processors this process may run on)", TOOL_INTEGER, &p.jobs, 1, 1024},
		{"--limit", "SECONDS", "a compile that takes longer fails (900)", TOOL_INTEGER, &p.limit, 1, 86400},
		{"--nvcc", "PATH", "the compiler (from PATH)", TOOL_TEXT, &nvcc, 0, 0},
		{"--source", "DIR", "the folder that holds src/kernels (the installed one, or this build's)", TOOL_TEXT,
	     &source, 0, 0},
		{0}};
	int count;
	int status = tool_parse(command, options, argc, argv, NULL, 0, &count);
	if (status >= 0) return status;
	if ((status = parse_archs(&p, arch))) return status;
	if (!*out) return tool_usage(command, "-o \"\" is no folder");
	int images = 0;
	for (int i = 0; i < p.arch_count; i++) {
		const char *name = archs[p.arch[i]].name;
		const int n = each_image(&p, name, list ? print_image : NULL, (void *)(uintptr_t)name);
		if (!n) return tool_failed(command, "no image of %s is called like --only \"%s\"", name, p.only);
		if (n > VARIANTS_MOST)
			return tool_failed(command, "%s has %d images; more than %d are a design gone wrong", name, n,
			                   VARIANTS_MOST);
		images += n;
	}
	if (list) return TOOL_OK;
	if ((status = find_compiler(&p, nvcc)) || (status = find_source(&p, source)) || (status = make_folder(&p, out)))
		return status;
	if (!realpath(out, p.out)) return tool_failed(command, "%s: %s", out, strerror(errno));
	const ssize_t n = readlink("/proc/self/exe", p.self, sizeof p.self - 1);
	if (n <= 0) return tool_failed(command, "/proc/self/exe: %s", strerror(errno));
	p.self[n] = 0;
	for (int i = 0; i < p.arch_count; i++) {
		char folder[4200];
		snprintf(folder, sizeof folder, "%s/objects/%s", p.out, archs[p.arch[i]].name);
		if ((status = make_folder(&p, folder))) return status;
	}
	/* Ninja itself does not know of a second one in the same folder. */
	char lock_path[4200];
	snprintf(lock_path, sizeof lock_path, "%s/.lock", p.out);
	const int lock = open(lock_path, O_CREAT | O_RDWR | O_CLOEXEC, 0644);
	if (lock < 0) return tool_failed(command, "%s: %s", lock_path, strerror(errno));
	if (flock(lock, LOCK_EX | LOCK_NB)) {
		printf("another build is at work in %s; waiting for it\n", p.out);
		fflush(stdout);
		while (flock(lock, LOCK_EX))
			if (errno != EINTR) return tool_failed(command, "%s: %s", lock_path, strerror(errno));
	}
	for (int i = 0; i < p.arch_count; i++) {
		char folder[4200];
		snprintf(folder, sizeof folder, "%s/objects/%s", p.out, archs[p.arch[i]].name);
		remove_leftovers(folder);
	}
	printf("%d images, %s, into %s\n", images, p.toolchain, p.out);
	const double start = tool_now();
	if (!(status = write_ninja(&p))) status = run_ninja(&p);
	if (!status) status = summarise(&p, tool_now() - start);
	close(lock);
	return status;
}

const tool_command tool_build = {
	"build",
	"--arch LIST [options]",
	"compile every GPU kernel ahead of time, with no GPU, into packs",
	"  ingot build --arch sm_90a,sm_80 -o packs     # all images of two architectures\n"
	"  ingot build --arch sm_90a --only bf16_d128   # some of them\n"
	"A killed build goes on where it was. Then: INGOT_IMAGE_PATH=packs, or put the packs beside the library.\n",
	run,
};
