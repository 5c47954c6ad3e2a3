/* Packs, as src/support/pack.h declares them, for the command. */
#ifndef INGOT_PACKS_H
#define INGOT_PACKS_H

#include "../src/support/pack.h"

/* What the last failed pack function said. */
const char *packs_error(void);

#endif
