/*
 * The library in the life of a process: loaded, unloaded, there twice, used in exit handlers, left behind with threads at
 * work; and machines without the GPU that is asked for. Each part runs in a process of its own.
 */
#include "support_api.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef ADDRESS_SANITIZED
/* Two copies of one library are what a test here is about. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) {
	return "detect_odr_violation=0";
}
#endif

enum { PATH_ROOM = 4096 };

typedef ingot_status forward(const ingot_attn_fwd_params *, ingot_stream, const ingot_options *);

static const ingot_options four = {.struct_size = sizeof(ingot_options), .num_threads = 4};

/* One call with threads through any copy of the library, its result compared with the formula. */
static bool works(forward *call) {
	attention a;
	attention_begin(&a, INGOT_F32, 2, 2, 1, 40, 50, 16, 1);
	const bool good = call(&a.fwd, cpu, &four) == INGOT_OK && forward_error(&a) < 1e-5;
	attention_end(&a);
	return good;
}

/* ---- exit (apache/tvm#18624, pytorch/pytorch#96229) ---------------------------------------------------------------------- */

static atomic_int started;

static void *call_for_ever(void *argument) {
	attention a;
	attention_begin(&a, INGOT_F32, 2, 2, 1, 40, 50, 16, 1);
	for (;;) {
		if (ingot_attn_fwd(&a.fwd, cpu, &four)) abort();
		atomic_fetch_add(&started, 1);
	}
	return argument;
}

static int exit_in_flight(void) {
	for (int i = 0; i < 3; i++) {
		pthread_t thread;
		if (pthread_create(&thread, NULL, call_for_ever, NULL)) return 1;
		pthread_detach(thread);
	}
	while (atomic_load(&started) < 10) usleep(100);
	return 42;
}

static void call_in_handler(void) {
	if (!works(ingot_attn_fwd)) _exit(1);
}

static int exit_handler(void) {
	/* Registered before the first call and after it: the library's own threads exist in one of them only. */
	if (atexit(call_in_handler)) return 1;
	if (!works(ingot_attn_fwd) || atexit(call_in_handler)) return 1;
	return 42;
}

static int exit_handler_first(void) {
	return atexit(call_in_handler) ? 1 : 42;
}

/* A second copy of the library's file: the first cannot be unloaded from a program that is linked with it. */
static void *load_copy(char *path, forward **call) {
	const char *const folder = getenv("TMPDIR");
	snprintf(path, PATH_ROOM, "%s/ingot-copy-XXXXXX", folder && *folder ? folder : "/tmp");
	const int to = mkstemp(path), from = open(library_path(), O_RDONLY);
	if (to < 0 || from < 0) return NULL;
	char block[65536];
	for (ssize_t n; (n = read(from, block, sizeof block)) > 0;)
		if (write(to, block, (size_t)n) != n) return NULL;
	close(from), close(to);
	void *const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	unlink(path);
	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		return NULL;
	}
	union {
		void *object;
		forward *function;
	} symbol = {dlsym(library, "ingot_attn_fwd")};
	*call = symbol.function;
	return library;
}

static int close_then_exit(void) {
	char path[PATH_ROOM];
	forward *call;
	void *const library = load_copy(path, &call);
	if (!library || call == ingot_attn_fwd || !works(call)) return 1;
	if (dlclose(library)) return 1;
	usleep(20000); /* threads that were looking for work go to sleep in the meantime */
	return 42;
}

static int two_copies(void) {
	char path[PATH_ROOM];
	forward *first, *second;
	void *const one = load_copy(path, &first), *const two = load_copy(path, &second);
	if (!one || !two || first == second) return 1;
	if (!works(first) || !works(second) || !works(ingot_attn_fwd)) return 1;
	if (dlclose(one)) return 1;
	usleep(20000);
	if (!works(second) || !works(ingot_attn_fwd)) return 1;
	return 42;
}

static void expect_exit(const char *mode, int rounds) {
	char text[8192];
	for (int i = 0; i < rounds; i++) {
		const int status = run_self(mode, NULL, 60, text, sizeof text);
		if (status != 42 || *text) fail_msg("%s: status %d: %s", mode, status, text);
	}
}

static void test_exit_in_flight(void **state) {
#ifndef THREAD_SANITIZED /* which reports what it finds half done in threads that exit cut off */
	expect_exit("flight", 10);
#endif
}

static void test_exit_handlers(void **state) {
	expect_exit("handler", 3);
	expect_exit("handler-first", 3);
}

static void test_unloading(void **state) {
	expect_exit("close", 5);
	expect_exit("copies", 3);
}

/* ---- no device (vllm-project/vllm#6582, rapidsai/rmm#616) ----------------------------------------------------------------- */

static int no_device(void) {
	attention a;
	attention_begin(&a, INGOT_F32, 1, 1, 1, 2, 2, 8, 1);
	const bool any_gpu = access("/dev/nvidiactl", F_OK) == 0 || access("/dev/kfd", F_OK) == 0;
	for (int32_t type = INGOT_CUDA; type <= INGOT_HIP; type++)
		for (int32_t ordinal = -1; ordinal <= 64; ordinal += 13) {
			const ingot_stream gpu = {type, ordinal, NULL};
			uint64_t number;
			size_t needed;
			const ingot_status status[] = {
				ingot_attn_fwd(&a.fwd, gpu, NULL),
				ingot_attn_fwd_workspace(&a.fwd, gpu, NULL, &number),
				ingot_attn_fwd_prepare(&a.fwd, gpu, NULL),
				ingot_attn_fwd_explain(&a.fwd, gpu, NULL, INGOT_TEXT, NULL, 0, &needed),
				ingot_selection_digest(gpu, &number),
			};
			if (!any_gpu || ordinal < 0 || ordinal > 32)
				for (int i = 0; i < 5; i++)
					if (status[i] != INGOT_NO_DEVICE) {
						fprintf(stderr, "type %d ordinal %d verb %d: %s\n", type, ordinal, i,
						        ingot_status_name(status[i]));
						return 1;
					}
			if (status[4] && strlen(ingot_last_error()) < 20) return 2;
			if (!any_gpu && !poisoned(&a.fwd.out)) return 3;
		}
	attention_end(&a);
	return works(ingot_attn_fwd) ? 42 : 4;
}

static void test_device_lists(void **state) {
	static const char *const lists[] = {
		"", "-1", "GPU-8f6d2a1e-0000-0000-0000-000000000000", "MIG-8f6d2a1e", "0,0", "7", "none", "\xff\xfe"};
	static const char *const names[] = {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"};
	char text[4096];
	for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
		char setting[3][128];
		for (int n = 0; n < 3; n++) snprintf(setting[n], sizeof setting[n], "%s=%s", names[n], lists[i]);
		const char *const environment[] = {setting[0], setting[1], setting[2], NULL};
		const int status = run_self("no-device", environment, 60, text, sizeof text);
		if (status != 42 || *text) fail_msg("%s: status %d: %s", setting[0], status, text);
	}
}

int main(int argc, char **argv) {
	static const struct {
		const char *mode;
		int (*run)(void);
	} modes[] = {
		{"flight", exit_in_flight}, {"handler", exit_handler}, {"handler-first", exit_handler_first},
		{"close", close_then_exit}, {"copies", two_copies},    {"no-device", no_device},
	};
	for (size_t i = 0; argc == 2 && i < sizeof modes / sizeof *modes; i++)
		if (strcmp(argv[1], modes[i].mode) == 0) return modes[i].run();
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_exit_in_flight),
		cmocka_unit_test(test_exit_handlers),
		cmocka_unit_test(test_unloading),
		cmocka_unit_test(test_device_lists),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
