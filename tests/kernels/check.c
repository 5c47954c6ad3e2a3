/* Every kernel this machine runs through the command's own conformance check, and the check's answers when there is nothing
 * to check. The command is linked in, so that the sanitizers see the kernels. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tool.h"

static int check(const char *option, const char *value) {
	char *argv[] = {(char *)"ingot", (char *)"check", (char *)option, (char *)value};
	return tool_main(4, argv);
}

static void test_every_feature(void **state) {
	assert_int_equal(check("--level", "1"), TOOL_OK);
}

static void test_nothing_run_is_inconclusive(void **state) {
	assert_int_equal(check("--only", "no line holds this"), TOOL_INCONCLUSIVE);
	assert_int_equal(check("--backend", "no_such_kernel"), TOOL_USAGE);
}

int main(void) {
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_every_feature),
		cmocka_unit_test(test_nothing_run_is_inconclusive),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
