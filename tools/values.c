/*
 * Values of the storage types, written apart from the library's own conversions so that the two can disagree; random
 * values that depend on a seed and an index alone; dense tensors.
 */
#include "tool.h"

#include <math.h>
#include <string.h>

static const struct {
	int32_t dtype;
	int size;
	const char *name;
	int mantissa; /* explicit bits */
	int least;    /* exponent of the smallest normal number */
} types[] = {
	{INGOT_F32, 4, "f32", 23, -126},
	{INGOT_F16, 2, "f16", 10, -14},
	{INGOT_BF16, 2, "bf16", 7, -126},
	{INGOT_F8_E4M3, 1, "e4m3", 3, -6},
	{INGOT_F8_E5M2, 1, "e5m2", 2, -14},
	{INGOT_F8_E4M3_FNUZ, 1, "e4m3fnuz", 3, -7},
	{INGOT_F8_E5M2_FNUZ, 1, "e5m2fnuz", 2, -15},
	{INGOT_I32, 4, "i32", 0, 0},
	{INGOT_I64, 8, "i64", 0, 0},
	{INGOT_U64, 8, "u64", 0, 0},
	{INGOT_BOOL, 1, "bool", 0, 0},
};
enum { TYPES = sizeof types / sizeof *types };

static int find(int32_t dtype) {
	for (int i = 0; i < TYPES; i++)
		if (types[i].dtype == dtype) return i;
	return -1;
}

int tool_dtype_size(int32_t dtype) {
	const int i = find(dtype);
	return i < 0 ? 0 : types[i].size;
}

const char *tool_dtype_name(int32_t dtype) {
	const int i = find(dtype);
	return i < 0 ? "none" : types[i].name;
}

int32_t tool_dtype_parse(const char *name) {
	for (int i = 0; i < TYPES; i++)
		if (strcmp(types[i].name, name) == 0) return types[i].dtype;
	return INGOT_NONE;
}

bool tool_is_8bit(int32_t dtype) {
	return dtype >= INGOT_F8_E4M3 && dtype <= INGOT_F8_E5M2_FNUZ;
}

double tool_ulp(int32_t dtype, double x) {
	const int i = find(dtype);
	int exponent;
	(void)frexp(fabs(x), &exponent);
	exponent -= 1;
	if (x == 0 || exponent < types[i].least) exponent = types[i].least;
	return ldexp(1, exponent - types[i].mantissa);
}

static float decode_8bit(uint8_t code, int32_t dtype) {
	const bool wide = dtype == INGOT_F8_E5M2 || dtype == INGOT_F8_E5M2_FNUZ;
	const bool fnuz = dtype == INGOT_F8_E4M3_FNUZ || dtype == INGOT_F8_E5M2_FNUZ;
	const int mantissa = wide ? 2 : 3, least = types[find(dtype)].least;
	const int exponent = (code & 0x7f) >> mantissa, fraction = code & ((1 << mantissa) - 1);
	if (fnuz && code == 0x80) return NAN;
	if (!fnuz && wide && exponent == 31) return fraction ? NAN : code & 0x80 ? -INFINITY : INFINITY;
	if (!fnuz && !wide && (code & 0x7f) == 0x7f) return NAN;
	const double magnitude =
		exponent ? ldexp(1 + ldexp(fraction, -mantissa), exponent - 1 + least) : ldexp(fraction, least - mantissa);
	return (float)(code & 0x80 ? -magnitude : magnitude);
}

/* The nearest finite code, ties to the even one; saturates. */
static uint8_t encode_8bit(float value, int32_t dtype) {
	const bool fnuz = dtype == INGOT_F8_E4M3_FNUZ || dtype == INGOT_F8_E5M2_FNUZ;
	if (isnan(value)) return fnuz ? 0x80 : 0x7f;
	const float magnitude = fabsf(value);
	int low = 0, high = 0x7f; /* codes of one sign rise with their values */
	while (!isfinite(decode_8bit((uint8_t)high, dtype))) high--;
	if (magnitude >= decode_8bit((uint8_t)high, dtype)) {
		low = high;
	} else {
		while (high - low > 1) {
			const int middle = (low + high) / 2;
			if (decode_8bit((uint8_t)middle, dtype) <= magnitude) low = middle;
			else high = middle;
		}
		const double below = (double)magnitude - decode_8bit((uint8_t)low, dtype);
		const double above = (double)decode_8bit((uint8_t)high, dtype) - magnitude;
		if (above < below || (above == below && low % 2)) low = high;
	}
	if (fnuz && low == 0) return 0;
	return (uint8_t)(low | (signbit(value) ? 0x80 : 0));
}

static float decode_f16(uint16_t code) {
	const int exponent = code >> 10 & 31, fraction = code & 1023;
	double magnitude;
	if (exponent == 31) magnitude = fraction ? (double)NAN : (double)INFINITY;
	else if (exponent) magnitude = ldexp(1024 + fraction, exponent - 25);
	else magnitude = ldexp(fraction, -24);
	return (float)(code & 0x8000 ? -magnitude : magnitude);
}

static uint16_t encode_f16(float value) {
	const uint16_t sign = signbit(value) ? 0x8000 : 0;
	if (isnan(value)) return (uint16_t)(sign | 0x7e00);
	const float magnitude = fabsf(value);
	if (magnitude >= 65520) return (uint16_t)(sign | 0x7c00);
	if (magnitude == 0) return sign;
	/* In units of the last place the rounding is nearbyint's, to even; a carry moves on into the exponent. */
	int exponent;
	(void)frexpf(magnitude, &exponent);
	if (exponent < -13) exponent = -13;
	const uint32_t units = (uint32_t)nearbyint(ldexp(magnitude, 11 - exponent));
	return (uint16_t)(sign | (units + ((uint32_t)(exponent + 13) << 10)));
}

float tool_load(const void *base, int64_t index, int32_t dtype) {
	const unsigned char *p = (const unsigned char *)base + index * tool_dtype_size(dtype);
	float f;
	uint32_t bits;
	uint16_t half;
	switch (dtype) {
	case INGOT_F32: memcpy(&f, p, 4); return f;
	case INGOT_F16: memcpy(&half, p, 2); return decode_f16(half);
	case INGOT_BF16:
		memcpy(&half, p, 2);
		bits = (uint32_t)half << 16;
		memcpy(&f, &bits, 4);
		return f;
	case INGOT_BOOL: return *p ? 1 : 0;
	default: return decode_8bit(*p, dtype);
	}
}

void tool_store(void *base, int64_t index, int32_t dtype, float value) {
	unsigned char *p = (unsigned char *)base + index * tool_dtype_size(dtype);
	uint32_t bits;
	uint16_t half;
	switch (dtype) {
	case INGOT_F32: memcpy(p, &value, 4); break;
	case INGOT_F16:
		half = encode_f16(value);
		memcpy(p, &half, 2);
		break;
	case INGOT_BF16:
		memcpy(&bits, &value, 4);
		if (isnan(value)) bits |= 0x400000;
		else bits += 0x7fff + (bits >> 16 & 1);
		half = (uint16_t)(bits >> 16);
		memcpy(p, &half, 2);
		break;
	case INGOT_BOOL: *p = value != 0; break;
	default: *p = encode_8bit(value, dtype);
	}
}

uint64_t tool_hash(uint64_t seed, uint64_t stream, uint64_t index) {
	uint64_t x = seed * 0x9E3779B97F4A7C15u + stream * 0xD1B54A32D192ED03u + index + 0x632BE59BD9B4E019u;
	x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
	x = (x ^ x >> 27) * 0x94D049BB133111EBu;
	x ^= x >> 31;
	x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
	return x ^ x >> 29;
}

/* The sum of twelve uniform values less 6: near enough to normal, without a logarithm an element. */
float tool_normal(uint64_t seed, uint64_t stream, uint64_t index) {
	uint32_t sum = 0;
	for (uint64_t part = 0; part < 3; part++) {
		const uint64_t x = tool_hash(seed, stream * 4 + part, index);
		for (int i = 0; i < 64; i += 16) sum += (uint32_t)(x >> i & 0xffff);
	}
	return (float)sum * 0x1p-16f - 6.0f + 6 * 0x1p-16f;
}

ingot_tensor tool_tensor(void *data, int32_t dtype, int ndim, const int64_t *shape) {
	ingot_tensor t = {.data = data, .dtype = dtype, .ndim = ndim};
	int64_t stride = 1;
	for (int i = ndim - 1; i >= 0; i--) {
		t.shape[i] = shape[i];
		t.stride[i] = stride;
		stride *= shape[i];
	}
	return t;
}

int64_t tool_elements(const ingot_tensor *t) {
	int64_t n = 1;
	for (int i = 0; i < t->ndim; i++) n *= t->shape[i];
	return n;
}
