"""The dropout mask: the oracle's Philox bit for bit, for all shapes, however seed and offset come (DR-01, DR-03)."""

import attention_oracle as oracle
import ingot_ctypes as ingot
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Placed


def mask_of(shape, p, seed=0, offset=0, backend=None, array=None, **fields):
    mask = array or ingot.empty(shape, "bool")
    ingot.attn_dropout_mask(
        options=dict(backend=backend) if backend else None,
        mask=mask,
        dropout_p=p,
        dropout_seed=seed,
        dropout_offset=offset,
        **fields
    )
    return mask.bits.view(np.uint8)


def wanted(shape, p, seed, offset, mq=0, mk=0):
    b, h, sq, sk = shape
    problem = oracle.Problem(
        np.zeros((b, h, mq or sq, 1)),
        np.zeros((b, h, mk or sk, 1)),
        np.zeros((b, h, mk or sk, 1)),
        dropout_p=float(np.float32(p)),
        seed=seed,
        offset=offset,
    )
    return np.array([[oracle.keep_mask(problem, i, j, sq, sk) for j in range(h)] for i in range(b)]).reshape(shape)


words = st.one_of(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))


@pytest.mark.parametrize("backend", ingot.kernels("attn_dropout_mask"))
def test_bit_equal_to_the_oracle(backend):
    @settings(max_examples=80)
    @given(
        shape=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 20), st.integers(0, 40)),
        p=st.floats(0, 1, exclude_max=True, width=32),
        seed=words,
        offset=words,
        more=st.tuples(*[st.integers(0, 3)] * 2),
        odd=st.integers(0, 1000),
    )
    def run(shape, p, seed, offset, more, odd):
        placed = Placed(shape, "bool", np.random.default_rng(odd)).freeze()
        maxima = {
            "max_seqlen_q": shape[2] + more[0] if more[0] else 0,
            "max_seqlen_k": shape[3] + more[1] if more[1] else 0,
        }
        got = mask_of(shape, p, seed, offset, backend, placed.array, **maxima)
        want = wanted(shape, p, seed, offset, maxima["max_seqlen_q"], maxima["max_seqlen_k"])
        assert placed.untouched(np.ones(shape, bool))
        assert np.array_equal(got, want)

    run()


def test_seed_by_value_and_by_pointer_at_any_address():
    """DR-01: the same value is the same mask however passed, and 43 is another."""
    shape = (2, 2, 70, 70)
    by_value = mask_of(shape, 0.2, 42)
    cells = [ingot.Array(np.array([42], kind), name) for kind, name in ((np.uint64, "u64"), (np.int64, "i64"))]
    for cell in cells:
        assert np.array_equal(mask_of(shape, 0.2, dropout_seed_ptr=cell), by_value)
    cells[0].bits[0] = 43
    assert not np.array_equal(mask_of(shape, 0.2, dropout_seed_ptr=cells[0]), by_value)
    assert np.array_equal(mask_of(shape, 0.2, dropout_seed_ptr=cells[0]), mask_of(shape, 0.2, 43))
    offset = ingot.Array(np.array([2**33], np.uint64), "u64")
    assert np.array_equal(mask_of(shape, 0.2, 42, 7, dropout_offset_ptr=offset), mask_of(shape, 0.2, 42, 2**33 + 7))
    assert offset.bits[0] == 2**33


@pytest.mark.parametrize("keys", [4096, 4097])
def test_every_lane_is_random(keys):
    """DR-03: each word of a draw decides one key of its own."""
    mask = mask_of((2, 3, 64, keys), 0.5, 2024).astype(bool)
    for lane in range(4):
        assert abs(mask[..., lane::4].mean() - 0.5) < 0.004
    quads = mask[..., : keys // 4 * 4].reshape(2, 3, 64, -1, 4)
    alike = (quads.all(-1) | ~quads.any(-1)).mean()
    assert abs(alike - 0.125) < 0.003
    for agree in (mask[:, :, 1:] == mask[:, :, :-1], mask[:, 1:] == mask[:, :-1], mask[1:] == mask[:-1]):
        assert abs(agree.mean() - 0.5) < 0.004


def test_rates_that_are_none():
    """DR-05: what is no rate is refused by name; p = 0 keeps all, and so does the least positive float."""
    for p in (float("nan"), -0.1, 1.0, 1.5, float("inf")):
        with pytest.raises(ingot.Refused, match=r"dropout.*\[0, 1\)"):
            mask_of((1, 1, 2, 8), p)
    assert mask_of((1, 1, 8, 64), 0.0).all() and mask_of((1, 1, 8, 64), 1e-45, 5).all()


def test_probability_is_compared_in_double():
    """Kept iff word >= floor(double(p) * 2^32 + 0.5)."""
    p = float(np.float32(0.1))
    words = oracle.philox4x32_10(0, np.arange(64 * 64 // 4, dtype=np.uint64), 9).reshape(64, 64)
    assert np.array_equal(mask_of((1, 1, 64, 64), p, 9)[0, 0], words >= int(np.floor(p * 2.0**32 + 0.5)))
