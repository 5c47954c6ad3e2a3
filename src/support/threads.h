/*
 * The library's own threads for CPU calls: a pool that is empty until it is first needed, survives fork, and never has to be
 * shut down.
 */
#ifndef INGOT_SUPPORT_THREADS_H
#define INGOT_SUPPORT_THREADS_H

#define INGOT__LANES 1024

/* Runs body(argument, lane) for each lane in [0, lanes), each once, on up to `lanes` threads, the caller being one of them;
 * returns when all are done. lanes: 1 to INGOT__LANES. How many threads take part depends on the moment: with the pool busy
 * for another caller, or from inside a body, the caller runs all lanes itself, one after another. So bodies take their work
 * from a shared counter, and results must not depend on which lane did what. */
void ingot__parallel(int lanes, void (*body)(void *argument, int lane), void *argument);

/* How many processors the calling thread may run on, 1 to INGOT__LANES. Follows a change of the affinity mask within a
 * quarter of a second. */
int ingot__processors(void);

/* How many processors the process may run on, 1 to INGOT__LANES: those of its first thread or of the calling one, whichever
 * has more, since frameworks pin some of their threads. The library's threads run on these. */
int ingot__processors_of_process(void);

/* The environment's INGOT_NUM_THREADS: 1 to INGOT__LANES; 0 when it is unset or empty; -1 when it is anything else, which
 * the caller reports and ignores. *text is what was given, NULL when unset. */
int ingot__threads_variable(const char **text);

#endif
