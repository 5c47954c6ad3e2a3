/* See choice.h. */
#include "choice.h"

#include <stdlib.h>
#include <string.h>

const char *choice_text(const cJSON *item, const char *name) {
	const char *text = item ? cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, name)) : NULL;
	return text ? text : "";
}

double choice_number(const cJSON *item, const char *name) {
	const cJSON *number = item ? cJSON_GetObjectItemCaseSensitive(item, name) : NULL;
	return cJSON_IsNumber(number) ? number->valuedouble : 0;
}

const cJSON *choice_winner(const cJSON *explanation) {
	const cJSON *winner = explanation ? cJSON_GetObjectItemCaseSensitive(explanation, "winner") : NULL;
	return cJSON_IsObject(winner) ? winner : NULL;
}

cJSON *choice_json(tool_operator op, const void *params, const ingot_options *options) {
	ingot_status status;
	char *text = tool_explain(op, params, options, INGOT_JSON, &status);
	if (!text) return NULL;
	cJSON *json = cJSON_Parse(text);
	free(text);
	return json;
}

void choice_print(tool_operator op, const void *params, const ingot_options *options, bool all) {
	cJSON *json = choice_json(op, params, options);
	const cJSON *winner = choice_winner(json);
	if (!winner) printf("none can run: %s\n", json ? choice_text(json, "because") : ingot_last_error());
	else
		printf("%s/%s:%s (%s)\n", choice_text(winner, "family"), choice_text(winner, "name"),
		       choice_text(winner, "variant"), choice_text(json, "because"));
	const cJSON *candidate;
	if (all) cJSON_ArrayForEach(candidate, cJSON_GetObjectItemCaseSensitive(json, "candidates")) {
			const char *refusal = choice_text(candidate, "refusal");
			const double microseconds = choice_number(candidate, "microseconds");
			printf("    %s/%s: ", choice_text(candidate, "family"), choice_text(candidate, "name"));
			if (*refusal) printf("refused: %s\n", refusal);
			else if (microseconds > 0)
				printf("%s, %.1f us in its tuning row\n", choice_text(candidate, "variant"), microseconds);
			else printf("%s, not measured\n", choice_text(candidate, "variant"));
		}
	cJSON_Delete(json);
}
