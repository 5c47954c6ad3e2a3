"""Strides and page ids whose products leave 32 bits (LG-03, PG-02), in memory that is reserved but hardly touched."""

import mmap

import ingot_ctypes as ingot
import numpy as np
import pytest
from calls import ALL, QUICK, QUICK_BACKWARD, every, rounded
from ingot_ctypes import MASK_CAUSAL, TOP_LEFT


@pytest.fixture
def reserve():
    """reserve(elements, kind): a flat array of zeros; a page of it costs memory once it is written or read."""
    made = []

    def array(elements, kind):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)  # new in Python 3.13
        made.append(mmap.mmap(-1, elements * np.dtype(kind).itemsize, flags=flags))
        return np.frombuffer(made[-1], kind)

    yield array


def test_lg03_token_stride_of_a_cache(rng, reserve):
    """(a) K and V are [24000,700,128], viewed with 24000 tokens: the last two of 700 sequences, both ways."""
    tokens, slots, d, count = 24000, 700, 128, 2
    q, dout = (rounded(rng, (count, 1, 1, d), "bf16") for _ in range(2))
    views, copies = [], []
    for _ in range(2):
        whole = reserve(tokens * slots * d, np.uint16).reshape(tokens, slots, d)
        part = whole[:, slots - count :].transpose(1, 0, 2)[:, None]
        part[...] = ingot.encode_bits(rng.standard_normal((count, 1, tokens, d)).astype(np.float32), "bf16")
        views.append(ingot.Array(part, "bf16"))
        copies.append(ingot.Array(np.ascontiguousarray(part), "bf16"))
    out, lse = ingot.empty((count, 1, 1, d), "bf16"), ingot.empty((count, 1, 1), "f32")
    found = {}
    for k, v in (copies, views):
        for name in every("attn_fwd", QUICK, q=q, k=k, v=v, out=out, lse=lse):
            bits = found.setdefault(name, (out.bits.copy(), lse.bits.copy()))
            assert np.array_equal(bits[0], out.bits) and np.array_equal(bits[1], lse.bits), name
    ingot.attn_fwd(q=q, k=copies[0], v=copies[1], out=out, lse=lse)
    grads = {"dq": ingot.empty(q.bits.shape, "bf16")}
    wide = {name: reserve(tokens * slots * d, np.uint16).reshape(tokens, slots, d) for name in ("dk", "dv")}
    wide = {name: ingot.Array(x[:, slots - count :].transpose(1, 0, 2)[:, None], "bf16") for name, x in wide.items()}
    tight = {name: ingot.empty(x.bits.shape, "bf16") for name, x in wide.items()}
    found = {}
    options = dict(flags=ingot.DETERMINISTIC)
    for (k, v), more in ((copies, tight), (views, wide)):
        for name in every(
            "attn_bwd", QUICK_BACKWARD + ["reference/attn_bwd_reference"], q=q, k=k, v=v, out=out, lse=lse, dout=dout,
            **grads, **more, options=options,
        ):  # fmt: skip
            bits = {x: np.array(y.bits) for x, y in {**grads, **more}.items()}
            assert all(np.array_equal(bits[x], found.setdefault(name, bits)[x]) for x in bits), name


def test_lg03_slices_of_a_wide_projection(rng, reserve):
    """(b) q, k and v are slices of [119056,21504]; one sequence of 245 tokens starts at row 118811."""
    rows, width, heads, d, first, length = 119056, 21504, 24, 128, 118811, 245
    whole = reserve(rows * width, np.uint16).reshape(rows, width)
    whole[first:, : 3 * heads * d] = ingot.encode_bits(
        rng.standard_normal((length, 3 * heads * d)).astype(np.float32), "bf16"
    )
    item = whole.itemsize
    view = lambda i: np.lib.stride_tricks.as_strided(
        whole[:, i * heads * d :], (1, heads, rows, d), (0, d * item, width * item, item)
    )
    wide = [ingot.Array(view(i), "bf16") for i in range(3)]
    tight = [ingot.Array(np.ascontiguousarray(x.bits[:, :, first:]), "bf16") for x in wide]
    target = reserve(rows * heads * d, np.uint16).reshape(1, heads, rows, d)
    common = dict(batch=1, max_seqlen_q=length, max_seqlen_k=length, mask=MASK_CAUSAL, align=TOP_LEFT)
    out, lse, found = ingot.empty(tight[0].bits.shape, "bf16"), ingot.empty((heads, length), "f32"), {}
    arrays = lambda at: dict(
        q_lengths=ingot.ints([length]), k_lengths=ingot.ints([length]), q_positions=ingot.ints([at]),
        k_positions=ingot.ints([at]), varlen=ingot.varlen((1, 2, 2), (1, 2, 2)),
    )  # fmt: skip
    for name in every("attn_fwd", QUICK, q=tight[0], k=tight[1], v=tight[2], out=out, lse=lse, **arrays(0), **common):
        found[name] = out.bits.copy()
    for backend in QUICK:
        name = backend or "chosen"
        if name not in found:
            continue
        target[:, :, first:] = 0x7FDD
        ingot.attn_fwd(
            options=dict(backend=backend) if backend else None, q=wide[0], k=wide[1], v=wide[2],
            out=ingot.Array(target, "bf16"), **arrays(first), **common,
        )  # fmt: skip
        assert np.array_equal(target[:, :, first:], found[name]), name


@pytest.mark.parametrize("dtype, stride", [("f32", 2**31), ("bf16", 2**31), ("bf16", 2**32)])
def test_lg03_bias_batch_stride(rng, reserve, dtype, stride):
    """(c) bias [2,1,64,64] whose batches lie 2^31 elements apart."""
    q, k, v = (rounded(rng, (2, 2, 64, 64), dtype) for _ in range(3))
    compact = rounded(rng, (2, 1, 64, 64), dtype)
    flat = reserve(stride + 64 * 64, compact.bits.dtype)
    wide = np.lib.stride_tricks.as_strided(flat, (2, 1, 64, 64), [x * flat.itemsize for x in (stride, 0, 64, 1)])
    wide[...] = compact.bits
    out, found = ingot.empty((2, 2, 64, 64), dtype), {}
    for bias in (compact, ingot.Array(wide, dtype)):
        for name in every("attn_fwd", ALL, q=q, k=k, v=v, bias=bias, out=out):
            assert np.array_equal(found.setdefault(name, out.bits.copy()), out.bits), name


def test_pg02_page_id_times_page_stride(rng, reserve):
    """A cache of 65537 pages of 32768 elements each: the last two pages are read, and written by an append."""
    pages, size, hk, d = 65537, 16, 8, 128
    cache = reserve(pages * 2 * size * hk * d, np.uint16).reshape(pages, 2, size, hk, d)
    cache[:2, 1], cache[-2:, 1] = ingot.encode_bits(np.float32(100), "bf16"), ingot.encode_bits(
        np.float32(0.75), "bf16"
    )
    k, v = (ingot.Array(cache[:, i], "bf16") for i in range(2))
    q, out = rounded(rng, (1, 32, 1, d), "bf16"), ingot.empty((1, 32, 1, d), "bf16")
    paged = dict(k=k, v=v, varlen=ingot.varlen(k=(0, 2, 0)), page_table=ingot.ints([[pages - 2, pages - 1]]))
    for name in every("attn_fwd", ALL, q=q, out=out, k_lengths=ingot.ints([2 * size]), **paged):
        assert (out.values == 0.75).all(), name
    fresh = [rounded(rng, (1, hk, 1, d), "bf16") for _ in range(2)]
    before = [cache[at].copy() for at in (0, 1, pages - 2, pages - 1)]
    for backend in ingot.kernels("kv_append"):
        cache[pages - 1, :, 5] = 0
        ingot.kv_append(
            options=dict(backend=backend), k_new=fresh[0], v_new=fresh[1], k_lengths=ingot.ints([size + 5]), **paged
        )
        for i in range(2):
            assert np.array_equal(cache[pages - 1, i, 5], fresh[i].bits[0, :, 0]), backend
            before[3][i, 5] = fresh[i].bits[0, :, 0]
        for at, want in zip((0, 1, pages - 2, pages - 1), before):
            assert np.array_equal(cache[at], want), (backend, at)
