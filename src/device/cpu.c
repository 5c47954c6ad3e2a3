/*
 * The CPU as a device: which rows of the families' arch.def this processor runs, what it is called, and how many threads a call
 * uses. INGOT_CPU_ARCH names a row to pretend to be, so that a lesser processor's choice can be seen and tested on a better one.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../support/error.h"
#include "../support/log.h"
#include "../support/threads.h"
#include "device.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* Where CPUID tells of a feature: leaf 1 ecx; leaf 7.0 ebx; leaf 7.1 eax. */
static uint32_t leaf1_ecx, leaf7_ebx, leaf7_1_eax;
static bool ymm_enabled, zmm_enabled; /* the system saves those registers */

#define CPU(feature) CPU_##feature
#define CPU_FMA (ymm_enabled && (leaf1_ecx >> 12 & 1))
#define CPU_F16C (ymm_enabled && (leaf1_ecx >> 29 & 1))
#define CPU_AVX2 (ymm_enabled && (leaf7_ebx >> 5 & 1))
#define CPU_AVX512F (zmm_enabled && (leaf7_ebx >> 16 & 1))
#define CPU_AVX512DQ (zmm_enabled && (leaf7_ebx >> 17 & 1))
#define CPU_AVX512BW (zmm_enabled && (leaf7_ebx >> 30 & 1))
#define CPU_AVX512VL (zmm_enabled && (leaf7_ebx >> 31 & 1))
#define CPU_AVX512BF16 (zmm_enabled && (leaf7_1_eax >> 5 & 1))

static void detect(char *model, size_t capacity) {
	uint32_t a, b, c, d, most;
	char vendor[13] = "";
	__cpuid(0, most, b, c, d);
	memcpy(vendor, &b, 4);
	memcpy(vendor + 4, &d, 4);
	memcpy(vendor + 8, &c, 4);
	__cpuid(1, a, b, leaf1_ecx, d);
	const uint32_t family = (a >> 8 & 15) + ((a >> 8 & 15) == 15 ? a >> 20 & 255 : 0);
	const uint32_t number = (a >> 4 & 15) | (a >> 16 & 15) << 4;
	if (leaf1_ecx >> 27 & 1) { /* OSXSAVE: xgetbv may be asked */
		uint32_t low, high;
		__asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
		ymm_enabled = (low & 6) == 6;
		zmm_enabled = (low & 0xe6) == 0xe6;
	}
	if (most >= 7) {
		uint32_t subleaves;
		__cpuid_count(7, 0, subleaves, leaf7_ebx, c, d);
		if (subleaves >= 1) __cpuid_count(7, 1, leaf7_1_eax, b, c, d);
	}
	const char *name = !strcmp(vendor, "GenuineIntel") ? "intel" : !strcmp(vendor, "AuthenticAMD") ? "amd" : "x86";
	snprintf(model, capacity, "%s_%u_%u", name, family, number);
}

enum {
#define ARCH(name, parent, flags, condition) BIT_##name,
#include "../kernels/x86/arch.def"
#undef ARCH
	ROWS
};

static const struct {
	const char *name, *parent;
} rows[ROWS] = {
#define ARCH(name, parent, flags, condition) {#name, #parent},
#include "../kernels/x86/arch.def"
#undef ARCH
};

static const char root[] = "x86_64";

static uint64_t supported(void) {
	uint64_t mask = 0;
#define ARCH(name, parent, flags, condition) \
	if (condition) mask |= (uint64_t)1 << BIT_##name;
#include "../kernels/x86/arch.def"
#undef ARCH
	return mask;
}
#else
enum { ROWS = 0 };
static const struct {
	const char *name, *parent;
} rows[1] = {{"", ""}};
#if defined(__aarch64__)
static const char root[] = "aarch64";
#else
static const char root[] = "generic";
#endif

static void detect(char *model, size_t capacity) {
	snprintf(model, capacity, "%s", root);
}
static uint64_t supported(void) {
	return 0;
}
#endif

static int row_of(const char *arch) {
	for (int i = 0; i < ROWS; i++)
		if (!strcmp(rows[i].name, arch)) return i;
	return -1;
}

uint64_t ingot__cpu_arch_bit(const char *arch) {
	const int i = row_of(arch);
	return i < 0 ? 0 : (uint64_t)1 << i;
}

const char *ingot__cpu_arch_parent(const char *arch) {
	const int i = row_of(arch);
	if (i >= 0) return rows[i].parent;
	return strcmp(arch, root) ? NULL : "";
}

static ingot__device cpu;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void find(void) {
	detect(cpu.model, sizeof cpu.model);
	uint64_t mask = supported();
	/* a row counts only with its parents */
	for (int i = 0; i < ROWS; i++) {
		const int parent = row_of(rows[i].parent);
		if (parent >= 0 && !(mask >> parent & 1)) mask &= ~((uint64_t)1 << i);
	}
	const char *pretend = getenv("INGOT_CPU_ARCH");
	if (pretend && *pretend) {
		uint64_t only = 0;
		for (int i = row_of(pretend); i >= 0; i = row_of(rows[i].parent)) only |= (uint64_t)1 << i;
		if (!strcmp(pretend, root) || (only && (only & mask) == only)) mask = only;
		else ingot__log(1, "INGOT_CPU_ARCH is \"%s\", which this processor does not run; it is ignored", pretend);
	}
	cpu.type = INGOT_CPU;
	cpu.arch_mask = mask;
	snprintf(cpu.arch, sizeof cpu.arch, "%s", root);
	for (int i = 0; i < ROWS; i++)
		if (mask >> i & 1) snprintf(cpu.arch, sizeof cpu.arch, "%s", rows[i].name);
	const char *text;
	const int asked = ingot__threads_variable(&text);
	if (asked < 0) ingot__log(1, "INGOT_NUM_THREADS is \"%s\"; allowed are 1 to %d; it is ignored", text, INGOT__LANES);
	cpu.threads = asked > 0 ? asked : ingot__processors_of_process();
	ingot__log(3, "CPU: %s, %s, %d threads", cpu.arch, cpu.model, cpu.threads);
}

ingot_status ingot__cpu_get(ingot_stream stream, const ingot__device **device) {
	if (stream.device) return ingot__fail(INGOT_INVALID, "stream.device is %d; the CPU is device 0", stream.device);
	if (stream.handle)
		return ingot__fail(INGOT_INVALID, "stream.handle is %p; on the CPU it must be NULL", stream.handle);
	pthread_once(&once, find);
	*device = &cpu;
	return INGOT_OK;
}
