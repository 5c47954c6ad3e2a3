/* What the library says about a call: the choice in one line, or every candidate. */
#ifndef INGOT_TOOL_CHOICE_H
#define INGOT_TOOL_CHOICE_H

#include "tool.h"

/* One line on stdout: the implementation that will run and why; with all, a line a candidate below it. */
void choice_print(tool_operator op, const void *params, const ingot_options *options, bool all);

/* The explanation as JSON, to be deleted; NULL when the call itself is refused. */
cJSON *choice_json(tool_operator op, const void *params, const ingot_options *options);

/* A text field of an explanation or of a candidate, "" when it is absent. */
const char *choice_text(const cJSON *item, const char *name);
double choice_number(const cJSON *item, const char *name);
/* The candidate that won, or NULL. */
const cJSON *choice_winner(const cJSON *explanation);

#endif
