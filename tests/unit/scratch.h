/* A folder of a test program's own, in which its group of tests runs: what a test that fails leaves behind goes with it. */
#ifndef INGOT_TEST_SCRATCH_H
#define INGOT_TEST_SCRATCH_H

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static char scratch_folder[512];

static int scratch_begin(void **state) {
	(void)state;
	const char *const folder = getenv("TMPDIR");
	snprintf(scratch_folder, sizeof scratch_folder, "%s/ingot-test-XXXXXX", folder && *folder ? folder : "/tmp");
	return mkdtemp(scratch_folder) ? chdir(scratch_folder) : -1;
}

static int scratch_remove(const char *path, const struct stat *is, int what, struct FTW *place) {
	(void)is, (void)what, (void)place;
	return remove(path);
}

static int scratch_end(void **state) {
	(void)state;
	return chdir("/") || nftw(scratch_folder, scratch_remove, 16, FTW_DEPTH | FTW_PHYS);
}

#endif
