/*
 * The launch stage: finds the workspace and runs a plan's steps one after another. On a CPU a step is a number of independent
 * tasks, handed out by a shared counter to as many lanes as its work is worth waking; a lane keeps its scratch.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "pipeline.h"
#include "support/arithmetic.h"
#include "support/error.h"
#include "support/threads.h"

enum { ALIGNMENT = 256 };

/* A second lane must save at least this many nanoseconds of work to be worth waking. */
#define WORTH_WAKING 4000.0

static uint64_t round_up(uint64_t x) {
	return (x + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static int step_lanes(const ingot__step *step, int threads) {
	int64_t lanes = threads;
	const double worth = 1 + step->work / WORTH_WAKING;
	if (worth < (double)lanes) lanes = (int64_t)worth;
	if (step->tasks < lanes) lanes = step->tasks;
	return lanes < 1 ? 1 : (int)lanes;
}

static int plan_lanes(const ingot__plan *plan, int threads) {
	int most = 1;
	for (int i = 0; i < plan->steps; i++) {
		const int lanes = step_lanes(&plan->step[i], threads);
		if (lanes > most) most = lanes;
	}
	return most;
}

uint64_t ingot__launch_bytes(const ingot__plan *plan, const ingot__device *device, int threads) {
	if (device->type != INGOT_CPU) return plan->workspace_bytes;
	return round_up(plan->workspace_bytes) + (uint64_t)plan_lanes(plan, threads) * round_up(plan->scratch_bytes);
}

/* ---- memory between calls: a few blocks are kept, so that a warm call allocates nothing ------------------------------- */

typedef struct block {
	uint64_t size; /* bytes after the header */
	_Alignas(ALIGNMENT) unsigned char memory[];
} block;

enum { KEPT = 16, HUGE_PAGE = 2 << 20 };
static _Atomic(block *) kept[KEPT];

static block *take(uint64_t size) {
	for (int i = 0; i < KEPT; i++) {
		if (!atomic_load_explicit(&kept[i], memory_order_relaxed)) continue;
		block *b = atomic_exchange_explicit(&kept[i], NULL, memory_order_acq_rel);
		if (!b) continue;
		if (b->size >= size) return b;
		free(b);
	}
	if (size > UINT64_MAX - 2 * HUGE_PAGE) return NULL;
	uint64_t whole = size + sizeof(block);
	const uint64_t alignment = whole >= 2 * HUGE_PAGE ? HUGE_PAGE : ALIGNMENT;
	whole = (whole + alignment - 1) / alignment * alignment;
	block *b = aligned_alloc(alignment, whole);
	if (!b) return NULL;
	if (alignment == HUGE_PAGE) madvise(b, whole, MADV_HUGEPAGE);
	b->size = whole - sizeof(block);
	return b;
}

static void put(block *b) {
	for (int i = 0; i < KEPT; i++) {
		block *empty = NULL;
		if (atomic_compare_exchange_strong_explicit(&kept[i], &empty, b, memory_order_acq_rel, memory_order_relaxed))
			return;
	}
	free(b);
}

/* ---- memory from the caller ------------------------------------------------------------------------------------------- */

static bool comes_from_alloc(const ingot_options *options, uint64_t bytes) {
	return bytes && !options->workspace && options->alloc;
}

/* The caller's workspace, or what the caller's alloc gives; NULL when there is neither, or no need. */
static ingot_status given_memory(const ingot_options *options, uint64_t bytes, void **memory) {
	*memory = options->workspace;
	if (*memory && options->workspace_size < bytes)
		return ingot__fail(INGOT_WORKSPACE, "options.workspace_size is %llu; this call needs %llu bytes",
		                   (unsigned long long)options->workspace_size, (unsigned long long)bytes);
	if (!comes_from_alloc(options, bytes)) return INGOT_OK;
	*memory = options->alloc(options->alloc_context, bytes);
	if (!*memory)
		return ingot__fail(INGOT_OUT_OF_MEMORY, "options.alloc gave no %llu bytes", (unsigned long long)bytes);
	if ((uintptr_t)*memory % ALIGNMENT == 0) return INGOT_OK;
	options->free(options->alloc_context, *memory);
	return ingot__fail(INGOT_INVALID, "options.alloc gave %p; memory must be aligned to %d bytes", *memory, ALIGNMENT);
}

static void take_back(const ingot_options *options, uint64_t bytes, void *memory) {
	if (comes_from_alloc(options, bytes)) options->free(options->alloc_context, memory);
}

/* ---- running ------------------------------------------------------------------------------------------------------------ */

typedef struct job {
	const ingot__problem *problem;
	const ingot__plan *plan;
	const ingot__step *step;
	void *workspace;
	char *scratch;
	uint64_t scratch_stride;
	_Alignas(64) _Atomic int64_t next;
} job;

static void run_lane(void *argument, int lane) {
	job *const j = argument;
	void *const scratch = j->scratch ? j->scratch + (uint64_t)lane * j->scratch_stride : NULL;
	for (;;) {
		const int64_t i = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed);
		if (i >= j->step->tasks) return;
		j->step->task(j->problem, j->plan, j->workspace, scratch, i);
	}
}

static void run_lane_of_caller(void *argument, int64_t lane) {
	const ingot__arithmetic before = ingot__arithmetic_begin();
	run_lane(argument, (int)lane);
	ingot__arithmetic_end(before);
}

static void run_steps(const ingot__problem *problem, const ingot_options *options, const ingot__plan *plan, int threads,
                      void *memory) {
	for (int i = 0; i < plan->steps; i++) {
		const ingot__step *const step = &plan->step[i];
		if (step->tasks <= 0) continue;
		job j = {.problem = problem,
		         .plan = plan,
		         .step = step,
		         .workspace = memory,
		         .scratch = memory ? (char *)memory + round_up(plan->workspace_bytes) : NULL,
		         .scratch_stride = round_up(plan->scratch_bytes)};
		atomic_init(&j.next, 0);
		const int lanes = step_lanes(step, threads);
		if (lanes == 1) run_lane(&j, 0);
		else if (options->parallel_for) options->parallel_for(options->parallel_context, lanes, run_lane_of_caller, &j);
		else ingot__parallel(lanes, run_lane, &j);
	}
}

/* ---- on a GPU ----------------------------------------------------------------------------------------------------------- */

static ingot_status launch_kernels(const ingot__device *device, const ingot_options *options, ingot_stream stream,
                                   ingot__plan *plan, const ingot__functions *functions) {
	const ingot__driver *const driver = device->driver;
	const uint64_t bytes = plan->workspace_bytes;
	void *memory;
	ingot_status s = given_memory(options, bytes, &memory);
	if (s) return s;
	ingot__visit visit;
	bool own = false;
	if (!(s = driver->enter(device, stream.handle, &visit))) {
		if (bytes && !memory) {
			bool capturing;
			if (!(s = driver->capturing(stream.handle, &capturing)) && capturing)
				s = ingot__fail(INGOT_WORKSPACE,
				                "the stream is being captured and this call needs %llu bytes; give options.workspace",
				                (unsigned long long)bytes);
			if (!s) own = !(s = driver->alloc(stream.handle, bytes, &memory));
		}
		memcpy(plan->arguments, &memory, sizeof memory);
		if (plan->maps && !s) {
			for (int i = 0; i < plan->maps; i++)
				if (plan->map[i].in_workspace) plan->map[i].data = (char *)memory + (uintptr_t)plan->map[i].data;
			s = driver->encode(plan->map, plan->maps, plan->arguments);
		}
		for (int i = 0; i < plan->steps && !s; i++) {
			const ingot__step *const step = &plan->step[i];
			if (step->grid[0] && step->grid[1] && step->grid[2])
				s = driver->launch(stream.handle, functions->function[i], step, plan->arguments, plan->arguments_size);
		}
		if (own) s = driver->free(stream.handle, memory, s);
		s = driver->leave(&visit, s);
	}
	take_back(options, bytes, memory);
	return s;
}

ingot_status ingot__launch(const ingot__problem *problem, const ingot__device *device, const ingot_options *options,
                           ingot_stream stream, ingot__plan *plan, const ingot__functions *functions, int threads) {
	if (device->type != INGOT_CPU) return launch_kernels(device, options, stream, plan, functions);
	const uint64_t bytes = ingot__launch_bytes(plan, device, threads);
	void *memory;
	const ingot_status s = given_memory(options, bytes, &memory);
	if (s) return s;
	block *own = NULL;
	if (bytes && !memory) {
		if (!(own = take(bytes)))
			return ingot__fail(INGOT_OUT_OF_MEMORY, "no %llu bytes of workspace could be had",
			                   (unsigned long long)bytes);
		memory = own->memory;
	}
	run_steps(problem, options, plan, threads, memory);
	if (own) put(own);
	take_back(options, bytes, memory);
	return INGOT_OK;
}
