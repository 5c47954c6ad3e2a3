/* A libcuda.so.1 or libamdhip64.so for tests: its devices and answers come from the environment. No context exists
   unless DRIVER_CONTEXT is set, and CUDA_VISIBLE_DEVICES holds at most one number, which shows that it was passed on. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *variable(const char *name) {
	const char *value = getenv(name);
	return value ? value : "";
}

static int ids(char (*id)[32]) {
	char text[1024];
	snprintf(text, sizeof text, "%s", variable("DRIVER_BUS_IDS"));
	int count = 0;
	for (const char *word = strtok(text, ","); word; word = strtok(NULL, ",")) snprintf(id[count++], 32, "%s", word);
	if (getenv("CUDA_VISIBLE_DEVICES")) {
		memmove(id[0], id[atoi(variable("CUDA_VISIBLE_DEVICES"))], 32);
		count = 1;
	}
	return count;
}

static int bus_id(char *text, int length, int device) {
	char id[32][32];
	ids(id);
	snprintf(text, (size_t)length, "%s", id[device]);
	return 0;
}

static int start(int *count) {
	char id[32][32];
	if (*variable("DRIVER_HANGS")) pause();
	const int status = atoi(variable("DRIVER_STATUS"));
	*count = ids(id);
	return status ? status : *count ? 0 : 100;
}

int cuInit(unsigned flags) {
	int count;
	(void)flags;
	return start(&count);
}

int cuDeviceGetCount(int *count) {
	return start(count);
}

int cuDeviceGet(int *device, int number) {
	*device = number;
	return 0;
}

int cuDeviceGetPCIBusId(char *text, int length, int device) {
	return bus_id(text, length, device);
}

int cuCtxGetCurrent(void **context) {
	*context = *variable("DRIVER_CONTEXT") ? context : NULL;
	return 0;
}

int cuCtxSynchronize(void) {
	return atoi(variable("DRIVER_STATUS"));
}

int hipGetDeviceCount(int *count) {
	return start(count);
}

int hipDeviceGetPCIBusId(char *text, int length, int device) {
	return bus_id(text, length, device);
}
