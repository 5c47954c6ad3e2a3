/* The `ingot` command. Everything is in the other files of this folder, so that tests can reach it. */
#include "tool.h"

int main(int argc, char **argv) {
	return tool_main(argc, argv);
}
