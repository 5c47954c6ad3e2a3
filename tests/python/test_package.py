"""The Python package on numpy arrays: the same call by ctypes gives the same bits; arguments, lifetimes, errors."""

# Where two ways to one result are held to each other (allclose), they may differ in the order of fp32 sums alone: values are of
# order 1 and the bounds a few roundings of such a sum. How far a kernel may be off is the judge's affair (judge.py).

import gc
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import calls
import dense
import ingot
import ingot_ctypes as c
import numpy as np
import pytest

TYPES = {"f32": np.float32, "f16": np.float16}
WORDS = dict(top_left=c.TOP_LEFT, bottom_right=c.BOTTOM_RIGHT)


def normal(rng, *shape, dtype="f32"):
    return rng.standard_normal(shape).astype(TYPES[dtype])


def wrap(x):
    """A numpy array as the ctypes side has it; other values as they are."""
    names = {y: name for name, (_, y) in c.DTYPES.items() if name in ("f32", "f16", "i32", "i64", "u64", "bool")}
    return c.Array(x, names[x.dtype.type]) if isinstance(x, np.ndarray) else x


def by_ctypes(op, **fields):
    parts = lambda x: [wrap(y) for y in x] if isinstance(x, list) else wrap(x)
    c.call(op, c.make_params(op, **{name: parts(x) for name, x in fields.items()}))


def forward_by_ctypes(q, k, v, **fields):
    stacked = fields.get("varlen", 0) & 1
    out = np.full((*q.shape[:3], v.shape[3]), np.nan, q.dtype)
    lse = np.full(q.shape[1:3] if stacked else q.shape[:3], np.nan, np.float32)
    by_ctypes("attn_fwd", q=q, k=k, v=v, out=out, lse=lse, **fields)
    return out, lse


def same(got, want):
    assert len(got) == len(want)
    for x, y in zip(got, want):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert x.tobytes() == y.tobytes()


# name: (arguments of ingot.attention, fields of ingot_attn_fwd_params)
ARGUMENTS = {
    "none": (dict(), dict()),
    "causal": (dict(causal=True, align="top_left"), dict(mask=c.MASK_CAUSAL, align=c.TOP_LEFT)),
    "bottom right": (dict(causal=True, align="bottom_right"), dict(mask=c.MASK_CAUSAL, align=c.BOTTOM_RIGHT)),
    "window": (
        dict(window=(3, 2), align="top_left"),
        dict(mask=c.MASK_WINDOW, window_left=3, window_right=2, align=c.TOP_LEFT),
    ),
    "open window": (
        dict(window=(None, 1), align="top_left"),
        dict(mask=c.MASK_WINDOW, window_left=c.UNBOUNDED, window_right=1, align=c.TOP_LEFT),
    ),
    "causal window": (
        dict(window=(4, None), causal=True, align="top_left"),
        dict(mask=c.MASK_WINDOW, window_left=4, window_right=0, align=c.TOP_LEFT),
    ),
    "scale": (dict(softmax_scale=-0.3), dict(softmax_scale=-0.3)),
    "softcap": (dict(softcap=2.5), dict(softcap=2.5)),
    "base 2": (dict(lse_base="2"), dict(lse_base=c.LSE_BASE2)),
    "dropout": (
        dict(dropout_p=0.4, dropout_seed=2**64 - 3, dropout_offset=7),
        dict(dropout_p=0.4, dropout_seed=2**64 - 3, dropout_offset=7),
    ),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(rng, dtype, name):
    arguments, fields = ARGUMENTS[name]
    q, k, v = (normal(rng, 2, h, s, 24, dtype=dtype) for h, s in ((4, 9), (2, 13), (2, 13)))
    same(ingot.attention(q, k, v, return_lse=True, **arguments), forward_by_ctypes(q, k, v, **fields))
    alone = ingot.attention(q, k, v, **arguments)
    same([alone], forward_by_ctypes(q, k, v, **fields)[:1])


def test_tensor_arguments(rng):
    q, k, v = (normal(rng, 2, h, s, 16) for h, s in ((4, 9), (2, 13), (2, 13)))
    ints = lambda *x: np.array(x, np.int32)
    for given in (
        dict(bias=normal(rng, 2, 4, 9, 13)),
        dict(bias=normal(rng, 1, 4, 1, 13)),
        dict(bias=rng.random((1, 1, 9, 13)) > 0.3),
        dict(sink=normal(rng, 4)),
    ):
        same(ingot.attention(q, k, v, return_lse=True, **given), forward_by_ctypes(q, k, v, **given))
    slopes = dict(alibi=np.abs(normal(rng, 4)))
    same(
        ingot.attention(q, k, v, return_lse=True, align="top_left", **slopes),
        forward_by_ctypes(q, k, v, align=c.TOP_LEFT, **slopes),
    )
    # Rows past a length are not written, so the two sides begin with the same bits.
    for given, word in (
        (dict(k_lengths=ints(13, 5)), c.varlen(k=(0, 2, 0))),
        (dict(q_lengths=ints(0, 9)), c.varlen(q=(0, 2, 0))),
        (dict(q_lengths=ints(4, 9), k_lengths=ints(1, 12)), c.varlen((0, 2, 0), (0, 2, 0))),
    ):
        want = [np.zeros((2, 4, 9, 16), np.float32), np.zeros((2, 4, 9), np.float32)]
        by_ctypes("attn_fwd", q=q, k=k, v=v, out=want[0], lse=want[1], varlen=word, **given)
        got = [np.zeros_like(x) for x in want]
        back = ingot.attention(q, k, v, out=got[0], lse=got[1], **given)
        assert back[0] is got[0] and back[1] is got[1]
        same(got, want)
        same(ingot.attention(q, k, v, return_lse=True, **given), want)  # new results begin with 0
    cells = dict(dropout_seed=np.array([11], np.int64), dropout_offset=np.array([5], np.uint64))
    same(
        [ingot.attention(q, k, v, dropout_p=0.5, **cells)],
        [ingot.attention(q, k, v, dropout_p=0.5, dropout_seed=np.int64(11), dropout_offset=5)],
    )


@pytest.mark.parametrize("dtype", TYPES)
def test_against_the_formula(rng, dtype):
    for b, hq, hk, sq, sk, d, dv in ((1, 1, 1, 1, 1, 8, 8), (2, 4, 2, 33, 17, 64, 40), (1, 3, 1, 65, 129, 128, 128)):
        q, k, v = (normal(rng, b, h, s, n, dtype=dtype) for h, s, n in ((hq, sq, d), (hk, sk, d), (hk, sk, dv)))
        for causal in (False, True):
            out, lse = ingot.attention(q, k, v, causal=causal, align="bottom_right", return_lse=True)
            valid = dense.band(sq, sk, None, 0, bottom_right=True) if causal else None
            for i in range(b):
                tensors = [x[i].astype(np.float64) for x in (q, k, v, out)]
                calls.check_sequence("chosen", *tensors, lse[i].astype(np.float64), dtype, valid=valid)


def test_strides(rng):
    """[B, S, H, D] memory, slices of a packed projection, one key head for all: read and written where they are."""
    packed = normal(rng, 2, 11, 3, 4, 16)
    q, k, v = (packed[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    copied = [np.ascontiguousarray(x) for x in (q, k, v)]
    same([ingot.attention(q, k, v)], [ingot.attention(*copied)])
    one = [np.broadcast_to(x[:, :1], x.shape) for x in (k, v)]
    same([ingot.attention(q, *one)], [ingot.attention(copied[0], *(np.ascontiguousarray(x) for x in one))])
    memory = np.full((2, 11, 4, 16), np.nan, np.float32)
    out = memory.transpose(0, 2, 1, 3)
    assert ingot.attention(q, k, v, out=out) is out
    same([np.ascontiguousarray(out)], [ingot.attention(*copied)])


def test_varlen(rng):
    q, k, v = (normal(rng, n, h, 16) for n, h in ((12, 4), (20, 2), (20, 2)))
    cu_q, cu_k = (np.array(x, np.int32) for x in ([0, 3, 3, 12], [0, 9, 14, 20]))
    stacked = [x.swapaxes(0, 1)[None] for x in (q, k, v)]
    fields = dict(batch=3, max_seqlen_q=9, max_seqlen_k=9, q_lengths=cu_q, k_lengths=cu_k)
    arguments = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=9, max_seqlen_k=9, return_lse=True)
    same(ingot.attention_varlen(*stacked, **arguments), forward_by_ctypes(*stacked, varlen=calls.CU, **fields))
    _, turned = ingot.attention_varlen(*stacked, lse_layout="TH", **arguments)
    assert turned.shape == (12, 4) and (turned.T == ingot.attention_varlen(*stacked, **arguments)[1]).all()


def test_pages_and_append(rng):
    """Tokens appended to pages, read as pages, are those of plain tensors."""
    lengths, size = [5, 0, 8], 4
    table = np.array([[4, 1], [0, 2], [3, 5]], np.int32)
    indptr, indices = np.array([0, 2, 2, 4], np.int32), np.array([4, 1, 3, 5], np.int32)
    k_pages, v_pages = (np.full((7, size, 2, 16), np.nan, np.float32) for _ in "kv")
    k_new, v_new = (normal(rng, 3, 2, 8, 16) for _ in "kv")
    before = np.zeros(3, np.int32)
    k_lengths = np.array(lengths, np.int32)
    assert ingot.append(k_new, v_new, k_pages, v_pages, k_lengths=before, new_lengths=k_lengths, page_table=table) is None
    q = normal(rng, 3, 4, 2, 16)
    got = ingot.attention_paged(q, k_pages, v_pages, page_table=table, k_lengths=k_lengths, return_lse=True)
    plain = [ingot.attention(q[i : i + 1], *(x[i : i + 1, :, :n] for x in (k_new, v_new))) for i, n in enumerate(lengths)]
    assert np.allclose(got[0], np.concatenate(plain), rtol=0, atol=2e-6) and (got[1][1] == -np.inf).all()
    # the same cache by the other form of the page list, and by the other form of the lengths
    last = np.array([1, 0, 4], np.int32)
    for given in (dict(k_lengths=k_lengths), dict(last_page_lengths=last)):
        other = ingot.attention_paged(
            q, k_pages, v_pages, page_indptr=indptr, page_indices=indices, max_seqlen_k=8, return_lse=True, **given
        )
        assert np.allclose(other[0], got[0], rtol=0, atol=2e-6)
    # stacked queries
    cu = np.array([0, 2, 4, 6], np.int32)
    stacked = ingot.attention_paged(
        q.transpose(1, 0, 2, 3).reshape(1, 4, 6, 16), k_pages, v_pages, page_table=table, k_lengths=k_lengths,
        cu_seqlens_q=cu, max_seqlen_q=2,
    )  # fmt: skip
    assert np.allclose(stacked.reshape(4, 3, 2, 16).transpose(1, 0, 2, 3), got[0], rtol=0, atol=2e-6)
    # one by one, with the lengths after the append, into a plain cache
    cache = [np.zeros((3, 2, 8, 16), np.float32) for _ in "kv"]
    for t in range(8):
        after = np.array([t + 1] * 3, np.int32)
        rows = [np.ascontiguousarray(x[:, :, t : t + 1]) for x in (k_new, v_new)]
        ingot.append(*rows, *cache, k_lengths=after, lengths_after=True)
    same(cache, [k_new, v_new])


def test_merge(rng):
    q, k, v = (normal(rng, 2, 2, n, 16) for n in (5, 12, 12))
    whole = ingot.attention(q, k, v, return_lse=True)
    cuts = [(0, 4), (4, 4), (4, 12)]
    parts = [ingot.attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in cuts]
    outs, lses = ([x[i] for x in parts] for i in range(2))
    merged = ingot.merge(outs, lses)
    assert all(np.allclose(x, y, rtol=0, atol=3e-6) for x, y in zip(merged, whole))
    same(ingot.merge(np.stack(outs), np.stack(lses)), merged)
    want = [np.empty_like(x) for x in merged]
    by_ctypes("attn_merge", out_parts=outs, lse_parts=lses, out=want[0], lse=want[1])
    same(merged, want)
    back = ingot.merge(outs, lses, out=outs[0], lse=lses[0])
    assert back[0] is outs[0]
    same(back, merged)


def test_explain(rng):
    q = normal(rng, 1, 2, 5, 16)
    text = ingot.explain(ingot.attention, q, q, q, causal=True)
    assert text.startswith("attn_fwd on ") and "\n* " in text
    assert ingot.explain(ingot.attention, q, q, q, format="json").startswith("{")
    assert ingot.explain(ingot.merge, [q], [q[..., 0].copy()]).startswith("attn_merge on ")
    assert ingot.explain(ingot.attention, q, q, q, backend="reference").count("forced")
    for wrong in ("xml", None):  # None would run the call
        with pytest.raises(ingot.InvalidError, match=f"format is {wrong!r}; 'text', 'json' are allowed"):
            ingot.explain(ingot.attention, q, q, q, format=wrong)
    with pytest.raises(ingot.InvalidError, match="function is array"):
        ingot.explain(q, q, q)
    with pytest.raises(ingot.InvalidError, match="function is"):
        ingot.explain(len, q)


def test_backend_is_forced(rng):
    q = normal(rng, 1, 2, 5, 16)
    want = np.empty_like(q)
    c.attn_fwd(options=dict(backend="reference/attn_fwd_reference"), q=wrap(q), k=wrap(q), v=wrap(q), out=wrap(want))
    same([ingot.attention(q, q, q, backend="reference/attn_fwd_reference")], [want])
    with pytest.raises(ingot.InvalidError, match="no such kernel") as raised:
        ingot.attention(q, q, q, backend="no such kernel")
    assert raised.value.name == "INGOT_NOT_FOUND"
    for decode in (x for x in c.kernels("attn_fwd") if "decode" in x):
        with pytest.raises(ingot.UnsupportedError, match=f'"{decode}" cannot run this call: dropout'):
            ingot.attention(q, q, q, dropout_p=0.5, dropout_seed=1, backend=decode)


class Liar:
    """An array with a protocol of its own."""

    def __init__(self, array, device, capsule=None):
        self.array, self.device, self.capsule = array, device, capsule

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **keywords):
        return self.capsule or self.array.__dlpack__(**keywords)


def test_results_of_a_framework_with_a_namespace(rng):
    """The array API's: the results are of the arguments' framework, where its namespace has the type."""

    class Other(Producer):
        device = "cpu"

        def __array_namespace__(self):
            return types.SimpleNamespace(
                float32="float32", empty=lambda shape, dtype, device: Other(np.empty(shape, dtype), True)
            )

    q = normal(rng, 1, 2, 5, 16)
    other, half = Other(q, True), Other(q.astype(np.float16), True)
    out, lse = ingot.attention(other, other, other, return_lse=True)
    assert type(out) is type(lse) is Other
    same([out.array, lse.array], ingot.attention(q, q, q, return_lse=True))
    assert type(ingot.attention(half, half, half)) is np.ndarray


def test_refusals(rng):
    q, k = normal(rng, 1, 2, 5, 16), normal(rng, 1, 2, 7, 16)
    fixed = q.copy()
    fixed.flags.writeable = False
    double = q.astype(np.float64)
    lengths = np.array([0, 5], np.int32)
    for error, sentence, call in (
        (ValueError, "align is None; .* 'top_left' or 'bottom_right'", lambda: ingot.attention(q, k, k, causal=True)),
        (ValueError, "q has 2 heads .* k has 7", lambda: ingot.attention(q, *[np.zeros((1, 7, 7, 16), "f")] * 2)),
        (ValueError, "q is float64; Ingot takes float32", lambda: ingot.attention(double, q, q)),
        (ValueError, "k: ", lambda: ingot.attention(q, np.array(["x"]), q)),
        (ValueError, "out is read-only", lambda: ingot.attention(q, q, q, out=fixed)),
        (ValueError, "q has 6 axes", lambda: ingot.attention(q[None, None], q, q)),
        (ValueError, r"q.stride\[3\] is -1", lambda: ingot.attention(q[..., ::-1], q, q)),
        (ValueError, "window is 3", lambda: ingot.attention(q, q, q, window=3)),
        (ValueError, "align is 'middle'", lambda: ingot.attention(q, q, q, align="middle")),
        (ValueError, "num_threads is 4294967296", lambda: ingot.attention(q, q, q, num_threads=2**32)),
        (ValueError, "out_parts has 9 parts", lambda: ingot.merge([q] * 9, [q[..., 0].copy()] * 9)),
        (ValueError, "exactly one", lambda: ingot.attention_paged(q, k, k, k_lengths=q)),
        (TypeError, "cu_seqlens_q is no array: <class 'list'>", lambda: ingot.attention_varlen(
            q, q, q, cu_seqlens_q=[0, 5], cu_seqlens_k=[0, 5], max_seqlen_q=5, max_seqlen_k=5)),
        (ValueError, r"cu_seqlens_q has the shape \(1, 2\)", lambda: ingot.attention_varlen(
            q, q, q, cu_seqlens_q=lengths[None], cu_seqlens_k=lengths, max_seqlen_q=5, max_seqlen_k=5)),
        (ValueError, "cu_seqlens_k.dtype is int64; allowed are int32", lambda: ingot.attention_varlen(
            q, q, q, cu_seqlens_q=lengths, cu_seqlens_k=lengths.astype(np.int64), max_seqlen_q=5, max_seqlen_k=5)),
        (ValueError, "q has 2 heads .* and k_pages has 7", lambda: ingot.attention_paged(
            q, k, k, page_table=lengths[None], k_lengths=lengths[:1])),
        (ValueError, "q is None; it is required", lambda: ingot.attention(None, k, k)),
        (ValueError, "k is None; it is required", lambda: ingot.attention(q, None, k)),
        (ValueError, "v is None; it is required", lambda: ingot.attention(q, k, None)),
        (ValueError, "q.dtype is int32; allowed are float32, float16, bfloat16,", lambda: ingot.attention(q.astype(np.int32), k, k)),
        (ValueError, "q is complex64; ", lambda: ingot.attention(q.astype(np.complex64), k, k)),
        (ValueError, ': backend is "nowhere"; ', lambda: ingot.attention(q, q, q, backend="nowhere")),
        (ValueError, r"window is \(-1, 0\); -1 is refused: None", lambda: ingot.attention(q, q, q, window=(-1, 0))),
        (ValueError, r"window is \[4, -1\]; -1 is refused", lambda: ingot.attention(q, q, q, window=[4, -1])),
        (TypeError, "q is no array: <class 'int'>", lambda: ingot.attention(1, q, q)),
        (TypeError, "softcap is 'x'; it is a float", lambda: ingot.attention(q, q, q, softcap="x")),
        (TypeError, "unexpected keyword", lambda: ingot.attention(q, q, q, is_causal=True)),
        (ValueError, "nowhere", lambda: ingot.attention(q, q, q, backend="nowhere")),
        (ValueError, "dropout_seed is None and dropout_p 0.5", lambda: ingot.attention(q, q, q, dropout_p=0.5)),
        (ValueError, "dropout_seed is None", lambda: ingot.attention_varlen(
            q, q, q, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=5, max_seqlen_k=5, dropout_p=0.5)),
        (TypeError, "dropout_seed is 1.5; it is an int", lambda: ingot.attention(q, q, q, dropout_p=0.5, dropout_seed=1.5)),
        # 0 would mean another scale, and no softcap
        (ValueError, "softmax_scale is 1e-60, which is 0 in float32; ", lambda: ingot.attention(q, q, q, softmax_scale=1e-60)),
        (ValueError, "softcap is 1e-60, which is 0 in float32; ", lambda: ingot.attention(q, q, q, softcap=1e-60)),
        (ValueError, r"window is \(1.5, 0\); a pair of 32-bit", lambda: ingot.attention(q, q, q, window=(1.5, 0))),
        (ValueError, r"window is \(3, 2.5\); ", lambda: ingot.attention(q, q, q, window=(3, 2.5), causal=True)),
        (ValueError, r"window is \(4294967296, 0\); ", lambda: ingot.attention(q, q, q, window=(2**32, 0))),
        (ValueError, "q is a masked array", lambda: ingot.attention(np.ma.masked_array(q, q > 0), q, q)),
        (ValueError, "cu_seqlens_k is None; it is required", lambda: ingot.attention_varlen(
            q, q, q, cu_seqlens_q=lengths, cu_seqlens_k=None, max_seqlen_q=5, max_seqlen_k=5)),
        (ValueError, "last_page_lengths is given with page_table", lambda: ingot.attention_paged(
            q, k, k, page_table=lengths[None], last_page_lengths=lengths[:1])),
        (ValueError, "page_indptr and page_indices are given together", lambda: ingot.append(
            q, q, k, k, k_lengths=lengths[:1], page_indices=lengths)),
        (TypeError, r"out_parts\[1\] is no array: <class 'NoneType'>", lambda: ingot.merge([q, None], [q[..., 0].copy()] * 2)),
        (TypeError, r"q: its __dlpack_device__ gave \[1, 0\]; a tuple", lambda: ingot.attention(Liar(q, [1, 0]), q, q)),
        (TypeError, r"k: its __dlpack_device__ gave \(1,\); a tuple", lambda: ingot.attention(q, Liar(q, (1,)), q)),
        (TypeError, "q: its __dlpack__ gave 5; a DLPack capsule", lambda: ingot.attention(Liar(q, (1, 0), 5), q, q)),
    ):
        with pytest.raises(error, match=sentence) as raised:
            call()
        if error is not TypeError:
            assert isinstance(raised.value, ingot.Error) and raised.value.name in c.STATUS.values()
            assert c.STATUS[raised.value.status] == raised.value.name
    same([ingot.attention(fixed, fixed, fixed)], [ingot.attention(q, q, q)])  # inputs may be read-only


def test_outputs_share_no_memory_with_inputs(rng):
    """Refused where it is sure; slices of one buffer that interleave are the caller's business."""
    q, k, v = (normal(rng, 2, 3, 5, 16) for _ in range(3))
    room = np.zeros(3 * q.size, np.float32)
    whole, late = room[: q.size].reshape(q.shape), room[8 : 8 + q.size].reshape(q.shape)
    whole[:] = q
    for out in (whole, late):
        before = out.copy()
        with pytest.raises(ingot.InvalidError, match="out shares memory with q; "):
            ingot.attention(whole, k, v, out=out)
        assert (out == before).all()
    with pytest.raises(ingot.InvalidError, match="out shares memory with v; "):
        ingot.attention(q, k, v, out=v)
    with pytest.raises(ingot.InvalidError, match="out shares memory with k; "):  # a slice of what is all there
        ingot.attention(q[:1], room[: 2 * 3 * 5 * 16].reshape(2, 3, 5, 16)[:1], v[:1], out=room[:240].reshape(1, 3, 5, 16))
    with pytest.raises(ingot.InvalidError, match="k shares memory with k_new; "):
        ingot.append(k[:, :, :1], v[:, :, :1].copy(), k, v, k_lengths=np.zeros(2, np.int32))
    # merge may write over its first part, if that is the same elements
    parts, lses = np.stack([q, k]), [q[..., 0].copy(), k[..., 0].copy()]
    want = ingot.merge([q, k], lses)[0]
    same([ingot.merge(parts, np.stack(lses), out=parts[0])[0]], [want])
    bytes_of_half = np.zeros(q.nbytes, np.uint8)
    halves = [bytes_of_half[: q.nbytes // 2].view(np.float16).reshape(q.shape), k.astype(np.float16)]
    for error, run in (
        ("out shares memory with out_parts; ", lambda: ingot.merge([q, k], lses, out=k)),
        ("out shares memory with out_parts; ", lambda: ingot.merge(parts, np.stack(lses), out=parts[1])),
        ("out shares memory with out_parts; ", lambda: ingot.merge(
            halves, lses, out=bytes_of_half.view(np.float32).reshape(q.shape))),
        ("lse shares memory with lse_parts; ", lambda: ingot.merge([q, k], lses, lse=lses[1])),
    ):
        with pytest.raises(ingot.InvalidError, match=error):
            run()
    want = ingot.attention(q, k, v)
    packed = np.zeros((2, 5, 2, 3, 16), np.float32)
    mine, out = (packed[:, :, i].transpose(0, 2, 1, 3) for i in range(2))
    mine[:] = q
    same([ingot.attention(mine, k, v, out=out)], [want])
    beside = room[q.size : 2 * q.size].reshape(q.shape)
    same([ingot.attention(whole * 0 + q, k, v, out=beside)], [want])
    same([ingot.attention(whole, k, v, out=beside)], [ingot.attention(whole.copy(), k, v)])


class Producer:
    """An array of a framework of its own; keeps the capsules that it gave away."""

    def __init__(self, array, versioned):
        self.array, self.versioned, self.capsules = array, versioned, []

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **keywords):
        if not self.versioned and "max_version" in keywords:
            raise TypeError("a producer from before versions")
        self.capsules.append(self.array.__dlpack__(**keywords))
        return self.capsules[-1]


@pytest.mark.parametrize("versioned", [True, False])
def test_capsules_are_used_up(rng, versioned):
    name = '"used_dltensor_versioned"' if versioned else '"used_dltensor"'
    array = normal(rng, 1, 2, 5, 16)
    references = sys.getrefcount(array)
    for call in (
        lambda *x: ingot.attention(*x),
        lambda *x: pytest.raises(ingot.Error, ingot.attention, *x, backend="nowhere"),
        lambda *x: pytest.raises(TypeError, ingot.attention, *x, out=3.5),
    ):
        tensors = [Producer(array, versioned) for _ in range(3)]
        call(*tensors)
        assert [repr(x.capsules[0]).split()[2] for x in tensors] == [name] * 3
        del tensors
        # The deleter was called: numpy's drops its reference there, and not with the capsule.
        assert sys.getrefcount(array) == references


def test_nothing_leaks(rng):
    """Ten thousand calls of every kind, refused ones among them: no Python object and no memory stays."""
    q = normal(rng, 1, 2, 64, 64)
    lse = q[..., 0].copy()
    producer = Producer(q, False)

    def once():
        ingot.attention(q, q, q, return_lse=True, causal=True)
        ingot.attention(q, q, q, backend="reference", bias=q[:, :, :1], window=(1, None), align="top_left")
        ingot.merge([q, q], [lse, lse])
        ingot.attention(producer, q, q)
        producer.capsules.clear()
        ingot.explain(ingot.attention, q, q, q)
        for bad in (dict(backend="nowhere"), dict(out=1), dict(align="x"), dict(softcap="y"), dict(nothing=1)):
            try:
                ingot.attention(q, q, q, **bad)
            except (TypeError, ValueError, NotImplementedError):
                pass
            else:
                raise AssertionError(bad)

    pages = lambda: int(Path("/proc/self/statm").read_text().split()[1])
    for _ in range(100):
        once()
    gc.collect()
    blocks, before = sys.getallocatedblocks(), pages()
    for _ in range(1000):
        once()
    gc.collect()
    # A block or 4 kB a call would be 1,000 and more of either; what is seen besides comes of Python's own stores.
    assert sys.getallocatedblocks() - blocks < 500
    assert pages() - before < 500


def test_the_interpreter_runs_on_during_a_call(rng):
    q = normal(rng, 1, 8, 700, 64)
    for _ in range(5):
        out, begun = np.full_like(q, np.nan), threading.Event()

        def call():
            begun.set()
            ingot.attention(q, q, q, out=out, backend="reference", num_threads=1)

        thread = threading.Thread(target=call)
        thread.start()
        begun.wait()
        time.sleep(0)
        unfinished = bool(np.isnan(out[0, -1, -1, -1]))
        thread.join()
        assert not np.isnan(out).any()
        if unfinished:
            return
    raise AssertionError("five times the main thread ran again only after the other thread's call")


def test_overhead_is_printed(capsys):
    x = np.ones((1, 1, 1, 64), np.float32)
    best = float("inf")
    for _ in range(20):
        start = time.process_time()
        for _ in range(500):
            ingot.attention(x, x, x)
        best = min(best, (time.process_time() - start) / 500)
    with capsys.disabled():
        print(f"\n  numpy, 1x1x1x64 fp32: {best * 1e6:.1f} us a call (processor time, best of 20)", end=" ")


@pytest.mark.torch
def test_jax(rng):
    """jax arrays in and out, and numpy arrays of the types that jax brings; an interpreter of its own, for jax has threads."""
    code = """
import sys; sys.path.insert(0, sys.argv[1])
import ingot, jax.numpy as jnp, numpy as np
x = np.random.default_rng(0).standard_normal((1, 2, 5, 16)).astype("f")
for kind in ("float32", "float16", "bfloat16"):
    j = jnp.asarray(x, kind)
    out, lse = ingot.attention(j, j, j, return_lse=True)
    assert isinstance(out, type(j)) and isinstance(lse, type(j)) and out.dtype == kind
    bits = np.asarray(j)
    assert (np.asarray(out) == ingot.attention(bits, bits, bits)).all()
try:
    ingot.attention(j, j, j, out=j)
except ingot.InvalidError as error:
    assert "read-only" in str(error)
else:
    raise SystemExit("a jax array was written")
eight = np.asarray(jnp.asarray(x, "float8_e4m3fn"))
out = ingot.attention(eight, eight, eight)
assert out.dtype == jnp.bfloat16 and (out == ingot.attention(eight, eight, eight, out=np.empty_like(out))).all()
swapped = [x.view(x.dtype.newbyteorder()) for x in [np.ones((1, 1, 2, 16), jnp.bfloat16)]]
try:
    ingot.attention(*swapped * 3)
except ValueError as error:
    assert "native byte order" in str(error)
else:
    raise SystemExit("bytes in another order were taken as they are")
print("right")
"""
    place = Path(ingot.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code, place], capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr


@pytest.mark.parametrize("op", c.OPERATORS)
def test_every_field_can_be_given(op):
    """The extension's tables have what the structs have: a field added to the header is missed here."""
    from ingot import _core

    for name, _ in c.PARAMS[op]._fields_:
        if name not in ("struct_size", "reserved"):
            with pytest.raises(TypeError, match=f"^{name} is "):
                getattr(_core, op)(**{name: object()})
    with pytest.raises(TypeError, match="has no argument 'nothing'"):
        getattr(_core, op)(nothing=1)
