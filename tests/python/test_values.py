"""The conversions that the tests themselves rely on."""

import ingot_ctypes as ingot
import numpy as np
import pytest


@pytest.mark.parametrize("dtype, codes", [("bf16", 2**16), ("f16", 2**16), *((x, 2**8) for x in ingot.EIGHTS)])
def test_every_code_survives(dtype, codes):
    bits = np.arange(codes, dtype=ingot.DTYPES[dtype][1] if dtype != "f16" else np.uint16)
    bits = bits.view(np.float16) if dtype == "f16" else bits
    values = ingot.decode_bits(bits, dtype)
    again = ingot.encode_bits(values, dtype)
    nan = np.isnan(values)
    saturated = np.isinf(values) & (dtype in ingot.EIGHTS)
    raw = lambda x: x.view(np.uint16) if dtype == "f16" else x
    assert np.array_equal(raw(again)[~nan & ~saturated], raw(bits)[~nan & ~saturated])
    assert np.isnan(ingot.decode_bits(again[nan], dtype)).all()


@pytest.mark.parametrize("dtype", ingot.EIGHTS)
def test_eight_bit_rounding(dtype):
    table = ingot.EIGHT_TABLES[dtype]
    finite = np.unique(table[np.isfinite(table)])
    x = np.random.default_rng(0).standard_normal(20000) * np.exp(np.random.default_rng(1).uniform(-14, 14, 20000))
    got = ingot.decode_bits(ingot.encode_bits(x, dtype), dtype)
    nearest = np.abs(finite[None, :] - x[:, None]).min(1)
    assert (np.abs(got - x) == nearest).all()
    ties = (finite[1:] + finite[:-1]) / 2
    codes = ingot.encode_bits(ties, dtype)
    assert ((codes & 1) == 0).all()


def test_known_values():
    known = {
        "e4m3": {0x7E: 448, 0x01: 2**-9, 0xC0: -2},
        "e5m2": {0x7B: 57344, 0x7C: np.inf, 0x01: 2**-16},
        "e4m3fnuz": {0x7F: 240, 0x01: 2**-10, 0x40: 1},
        "e5m2fnuz": {0x7F: 57344, 0x01: 2**-17, 0x40: 1},
    }
    for dtype, codes in known.items():
        for code, value in codes.items():
            assert ingot.EIGHT_TABLES[dtype][code] == value, (dtype, hex(code))
    assert np.isnan(ingot.EIGHT_TABLES["e4m3"][[0x7F, 0xFF]]).all()
    assert np.isnan(ingot.EIGHT_TABLES["e4m3fnuz"][0x80]) and np.isnan(ingot.EIGHT_TABLES["e5m2fnuz"][0x80])
    assert (
        ingot.encode_bits(np.float32(1 + 2**-8), "bf16") == 0x3F80
        and ingot.encode_bits(np.float32(1 + 3 * 2**-8), "bf16") == 0x3F82
    )
