/* The log: levels 0 (nothing) to 5 (everything), see ingot_set_log. */
#ifndef INGOT_SUPPORT_LOG_H
#define INGOT_SUPPORT_LOG_H

#include <stdbool.h>

bool ingot__log_wants(int level);
void ingot__log(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
