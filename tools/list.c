/* `ingot list`: the library's kernels, the architectures they are built for, and which of them this machine runs. */
#include "tool.h"

#include <stdlib.h>
#include <string.h>

static cJSON *as_json(void) {
	char arch[64] = "", model[64] = "";
	int32_t threads = 0;
	ingot_device_describe((ingot_stream){0}, arch, sizeof arch, model, sizeof model, &threads);
	uint64_t digest = 0;
	ingot_selection_digest((ingot_stream){0}, &digest);
	char number[24];
	snprintf(number, sizeof number, "%016llx", (unsigned long long)digest);
	cJSON *root = cJSON_CreateObject();
	cJSON_AddStringToObject(root, "version", ingot_version_string());
	cJSON *device = cJSON_AddObjectToObject(root, "device");
	cJSON_AddStringToObject(device, "type", "cpu");
	cJSON_AddStringToObject(device, "arch", arch);
	cJSON_AddStringToObject(device, "model", model);
	cJSON_AddNumberToObject(device, "threads", threads);
	cJSON_AddStringToObject(device, "selection_digest", number);
	cJSON *list = cJSON_AddArrayToObject(root, "implementations");
	ingot_implementation impl;
	for (int32_t i = 0; ingot_implementation_get(i, &impl) == INGOT_OK; i++) {
		static const char *const devices[] = {"cpu", "cuda", "hip"};
		cJSON *item = cJSON_CreateObject();
		cJSON_AddStringToObject(item, "name", impl.name);
		cJSON_AddStringToObject(item, "family", impl.family);
		cJSON_AddStringToObject(item, "operator", impl.operator_name);
		cJSON_AddStringToObject(item, "arch", impl.arch);
		cJSON_AddStringToObject(item, "device", devices[impl.device_type < 3 ? impl.device_type : 0]);
		cJSON_AddBoolToObject(item, "available", impl.available);
		cJSON *variants = cJSON_AddArrayToObject(item, "variants");
		ingot_variant variant;
		for (int32_t v = 0; v < impl.variant_count && ingot_variant_get(i, v, &variant) == INGOT_OK; v++)
			cJSON_AddItemToArray(variants, cJSON_CreateString(variant.name));
		cJSON_AddItemToArray(list, item);
	}
	return root;
}

static int run(const tool_command *command, int argc, char **argv) {
	bool json = false, verbose = false;
	const tool_option options[] = {{"--verbose", NULL, "name the variants too", TOOL_FLAG, &verbose, 0, 0},
	                               {"--json", NULL, "print JSON, variants by name", TOOL_FLAG, &json, 0, 0},
	                               {0}};
	int count;
	const int status = tool_parse(command, options, argc, argv, NULL, 0, &count);
	if (status >= 0) return status;
	cJSON *root = as_json();
	if (json) {
		char *text = cJSON_Print(root);
		puts(text);
		free(text);
		cJSON_Delete(root);
		return TOOL_OK;
	}
	const cJSON *device = cJSON_GetObjectItem(root, "device"), *item;
	printf("ingot %s on %s (%s), %d threads, selection %s\n\n", ingot_version_string(),
	       cJSON_GetStringValue(cJSON_GetObjectItem(device, "arch")),
	       cJSON_GetStringValue(cJSON_GetObjectItem(device, "model")), cJSON_GetObjectItem(device, "threads")->valueint,
	       cJSON_GetStringValue(cJSON_GetObjectItem(device, "selection_digest")));
	printf("%-18s %-38s %-12s %-5s %s\n", "operator", "implementation", "arch", "runs", "variants");
	cJSON_ArrayForEach(item, cJSON_GetObjectItem(root, "implementations")) {
		char name[128];
		snprintf(name, sizeof name, "%s/%s", cJSON_GetStringValue(cJSON_GetObjectItem(item, "family")),
		         cJSON_GetStringValue(cJSON_GetObjectItem(item, "name")));
		const char *arch = cJSON_GetStringValue(cJSON_GetObjectItem(item, "arch"));
		const cJSON *variants = cJSON_GetObjectItem(item, "variants"), *variant;
		printf("%-18s %-38s %-12s %-5s %8d\n", cJSON_GetStringValue(cJSON_GetObjectItem(item, "operator")), name,
		       *arch ? arch : "any", cJSON_IsTrue(cJSON_GetObjectItem(item, "available")) ? "yes" : "no",
		       cJSON_GetArraySize(variants));
		if (verbose) cJSON_ArrayForEach(variant, variants) printf("  %s\n", variant->valuestring);
	}
	cJSON_Delete(root);
	return TOOL_OK;
}

const tool_command tool_list = {
	.name = "list",
	.usage = "[options]",
	.summary = "list the kernels, their architectures and whether this machine runs them",
	.text =
		"A name of the list (x86/attn_fwd_avx2), its family (x86) or one variant (x86/attn_fwd_avx2:plain) can be forced with\n"
		"--backend in the other commands. A name that ends in _reference_f64 is the fp64 oracle of `ingot check`; it runs in a\n"
		"call only when forced by its own name.\n",
	.run = run,
};
