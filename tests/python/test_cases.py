"""Faults that users of other attention libraries met, as the smallest input that would show them here. The two letters
and the number name the case."""

import calls
import dense
import ingot_ctypes as ingot
import judge
import numpy as np
import pytest
from calls import ALL, ALL_BACKWARD, QUICK, QUICK_BACKWARD, check_gradients, check_sequence, every, rounded
from ingot_ctypes import BOTTOM_RIGHT, MASK_CAUSAL, MASK_WINDOW, TOP_LEFT, UNBOUNDED

CU = ingot.varlen((1, 1, 1), (1, 1, 1))  # both sides stacked, cumulative, reused


def raw(x):
    return x.view(f"u{x.itemsize}")


def forward_for_backward(**fields):
    """out and lse as the chosen forward wrote them."""
    q, v = fields["q"], fields["v"]
    stacked = fields.get("varlen", 0) & 1
    shape = [*q.bits.shape[:3], v.bits.shape[3]]
    out, lse = ingot.empty(shape, q.dtype), ingot.empty(shape[1:3] if stacked else shape[:3], "f32")
    ingot.attn_fwd(out=out, lse=lse, **fields)
    return dict(out=out, lse=lse)


# ---- masked rows, special values, numbers ----


@pytest.mark.parametrize("size", [600, 640])
@pytest.mark.parametrize("threads", [1, 8])
def test_ms01_whole_first_blocks_masked(size, threads):
    i, j = np.arange(size)[:, None], np.arange(size)[None]
    ones = ingot.encode(np.ones((1, 1, size, 4)), "f32")
    bias = ingot.encode(np.where((i - 10 < j) & (j <= i), 0.0, -np.inf)[None, None], "f32")
    out, lse = ingot.empty((1, 1, size, 4), "f32"), ingot.empty((1, 1, size), "f32")
    for name in every(
        "attn_fwd", ALL, q=ones, k=ones, v=ones, bias=bias, out=out, lse=lse, options=dict(num_threads=threads)
    ):
        assert np.abs(out.values - 1).max() <= 1e-6, name
        assert np.abs(lse.values[0, 0] - 2 - np.log(np.minimum(np.arange(size) + 1, 10))).max() <= 1e-5, name


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("how", ["bias", "causal"])
def test_ms02_leading_rows_masked_with_sinks(rng, sinks, how):
    heads, rows, keys, d = 16, 64, 256 if how == "bias" else 50, 512
    q, k, v = (rounded(rng, (1, h, s, d), "bf16") for h, s in ((heads, rows), (1, keys), (1, keys)))
    sink = -1.5 + np.arange(heads) / 8 if sinks else None
    out, lse = ingot.empty((1, heads, rows, d), "bf16"), ingot.empty((1, heads, rows), "f32")
    fields, formula = {}, {}
    if how == "bias":
        dead = np.r_[0:14, 20:34, 50:64]
        bias = np.zeros((1, 1, rows, keys))
        bias[:, :, dead] = -np.inf
        fields["bias"], formula["bias"] = ingot.encode(bias, "f32"), bias[0]
    else:
        dead = np.r_[0:14]
        fields.update(mask=MASK_CAUSAL, align=BOTTOM_RIGHT)
        formula["valid"] = dense.band(rows, keys, None, 0, True)
    if sinks:
        fields["sink"], formula["sink"] = ingot.encode(sink, "f32"), sink
    for name in every("attn_fwd", QUICK + ["reference/attn_fwd_reference"], q=q, k=k, v=v, out=out, lse=lse, **fields):
        assert (out.values[0][:, dead] == 0).all(), name
        assert (lse.values[0][:, dead] == (np.float32(sink)[:, None] if sinks else -np.inf)).all(), name
        check_sequence(name, q.values[0], k.values[0], v.values[0], out.values[0], lse.values[0], "bf16", **formula)


@pytest.mark.parametrize("dtype, lowest", [("f32", -3.4028235e38), ("bf16", -3.3895314e38), ("f16", -65504.0)])
def test_ms04_lowest_finite_float_is_a_number(rng, dtype, lowest):
    size = 441
    q, k, v = (rounded(rng, (1, 2, size, 64), dtype) for _ in range(3))
    bias = np.zeros((1, 1, size, size))
    bias[..., :128] = lowest
    bias[:, :, 7] = lowest
    bias = ingot.encode(bias, dtype)
    out, lse = ingot.empty((1, 2, size, 64), dtype), ingot.empty((1, 2, size), "f32")
    rest = np.delete(np.arange(size), 7)
    for name in every("attn_fwd", QUICK + ["reference/attn_fwd_reference"], q=q, k=k, v=v, bias=bias, out=out, lse=lse):
        check_sequence(
            name,
            q.values[0][:, rest],
            k.values[0][:, 128:],
            v.values[0][:, 128:],
            out.values[0][:, rest],
            lse.values[0][:, rest],
            dtype,
        )
        with np.errstate(over="ignore"):
            check_sequence(
                f"{name} row 7",
                q.values[0][:, 7:8],
                k.values[0],
                v.values[0],
                out.values[0][:, 7:8],
                None,
                dtype,
                bias=bias.values[0][:, 7:8],
            )
        assert np.isfinite(lse.values[0, :, 7]).all() and (lse.values[0, :, 7] < lowest * 0.99).all(), name
        if dtype != "f16":
            assert np.abs(out.values[0, :, 7] - v.values[0].mean(1)).max() < (1e-5 if dtype == "f32" else 1e-2), name


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("length", [64, 192, 640, 704, 0])
def test_ms06_scores_near_minus_120(rng, dtype, length):
    heads, sq, sk = (1, length, length) if length else (2, 1, 128)
    q, k = 0.1 * rng.standard_normal((1, heads, sq, 64)), 0.1 * rng.standard_normal((1, heads, sk, 64))
    q[..., 0], k[..., 0] = 1, -960
    q, k, v, dout = (
        ingot.encode(q, dtype),
        ingot.encode(k, dtype),
        *(rounded(rng, (1, heads, n, 64), dtype) for n in (sk, sq)),
    )
    zero = ingot.encode(np.zeros((1, 1, sq, sk)), dtype)
    grads = dict(
        dq=ingot.empty(q.bits.shape, dtype), dk=ingot.empty(k.bits.shape, dtype), dv=ingot.empty(v.bits.shape, dtype)
    )
    for causal in (False, True):
        for bias in (None, zero):
            fields = dict(q=q, k=k, v=v, bias=bias, **(dict(mask=MASK_CAUSAL, align=TOP_LEFT) if causal else {}))
            valid = dense.band(sq, sk, None, 0) if causal else None
            given = forward_for_backward(**fields)
            for name in every(
                "attn_bwd", QUICK_BACKWARD + ["reference/attn_bwd_reference"], **fields, **given, dout=dout, **grads
            ):
                check_gradients(
                    name,
                    q.values[0],
                    k.values[0],
                    v.values[0],
                    dout.values[0],
                    {x: y.values[0] for x, y in grads.items()},
                    dtype,
                    valid=valid,
                )


@pytest.mark.parametrize("length", [580, 590])
def test_nu01_key_length_cut(rng, length):
    q = rounded(rng, (1, 1, 1, 64), "bf16", 5)
    k, v = (rounded(rng, (1, 1, 1000, 64), "bf16", 5) for _ in range(2))
    out, lse = ingot.empty((1, 1, 1, 64), "bf16"), ingot.empty((1, 1, 1), "f32")
    for name in every(
        "attn_fwd",
        ALL,
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        varlen=ingot.varlen(k=(0, 2, 0)),
        k_lengths=ingot.ints([length]),
    ):
        check_sequence(
            name, q.values[0], k.values[0][:, :length], v.values[0][:, :length], out.values[0], lse.values[0], "bf16"
        )


@pytest.mark.parametrize("rows", [1, 40])
def test_nu02_long_sums_do_not_overflow(rows):
    keys = 65536
    q, k = ingot.encode(np.zeros((1, 1, rows, 64)), "f16"), ingot.encode(np.ones((1, 1, keys, 64)), "f16")
    out, lse = ingot.empty((1, 1, rows, 64), "f16"), ingot.empty((1, 1, rows), "f32")
    for turns in (False, True):
        v = np.full((1, 1, keys, 64), 60000.0)
        if turns:
            v[:, :, 1::2] = -60000
        for name in every("attn_fwd", QUICK, q=q, k=k, v=ingot.encode(v, "f16"), out=out, lse=lse):
            worst = np.abs(out.values - (0 if turns else 60000)).max()
            assert worst <= (1 if turns else 32), (name, worst)
            assert np.abs(lse.values / np.log(keys) - 1).max() <= 1e-6, name


def test_nu03_backward_of_real_looking_activations(rng):
    heads, size, d = (4, 1), 448, 256
    q, k = (rng.standard_normal((2, h, size, d)) + 0.5 for h in heads)
    for x in (q, k):
        x[..., [7, 100]] = 8
    k[:, :, 0] *= 1.5
    dout = rng.standard_normal(q.shape)
    dout[:, :, 0] *= 1000
    q, k, v, dout = (ingot.encode(x, "bf16") for x in (q, k, rng.standard_normal(k.shape), dout))
    grads = {name: ingot.empty(x.bits.shape, "bf16") for name, x in (("dq", q), ("dk", k), ("dv", v))}
    fields = dict(q=q, k=k, v=v, mask=MASK_CAUSAL, align=TOP_LEFT)
    given, valid = forward_for_backward(**fields), dense.band(size, size, None, 0)
    for name in every(
        "attn_bwd", QUICK_BACKWARD + ["reference/attn_bwd_reference"], **fields, **given, dout=dout, **grads
    ):
        for b in range(2):
            check_gradients(
                name,
                q.values[b],
                k.values[b],
                v.values[b],
                dout.values[b],
                {x: y.values[b] for x, y in grads.items()},
                "bf16",
                valid=valid,
            )
            want = calls.expected(
                dense.gradients, q.values[b], k.values[b], v.values[b], dout.values[b], dtype="bf16", valid=valid
            )[0]["dq"][0]
            for h in range(heads[0]):
                got = grads["dq"].values[b, h]
                assert (got * want[h]).sum() / np.linalg.norm(got) / np.linalg.norm(want[h]) >= 0.99, name


# ---- windows ----


def count_keys(sq, sk, left, right, align):
    """How many keys each row sees, on every kernel: q is 0, so exp(lse) counts them."""
    q, k = (ingot.encode(np.zeros((1, 1, n, 8)), "f32") for n in (sq, sk))
    out, lse = ingot.empty((1, 1, sq, 8), "f32"), ingot.empty((1, 1, sq), "f32")
    for name in every(
        "attn_fwd",
        ALL,
        q=q,
        k=k,
        v=k,
        out=out,
        lse=lse,
        mask=MASK_WINDOW,
        window_left=left,
        window_right=right,
        align=align,
    ):
        yield name, np.rint(np.exp(lse.values[0, 0])).astype(int).tolist()


def test_wn02_signed_bounds(rng):
    for name, seen in count_keys(40, 40, UNBOUNDED, -3, TOP_LEFT):
        assert seen == [max(0, i - 2) for i in range(40)], name
    for name, seen in count_keys(129, 40, 32, 64, BOTTOM_RIGHT):
        assert seen[:25] == [0] * 25 and seen[25] == 1 and seen[128] == 33, name
        assert seen == [len([j for j in range(40) if -32 <= j - (i - 89) <= 64]) for i in range(129)], name
    for name, seen in count_keys(1, 4096, 64, 0, BOTTOM_RIGHT):
        assert seen == [65], name
    for name, seen in count_keys(16, 16, 3, 0, TOP_LEFT):
        assert seen == [min(i + 1, 4) for i in range(16)], name
    for name, seen in count_keys(16, 16, -2, 5, TOP_LEFT):
        assert seen == [4] * 11 + [3, 2, 1, 0, 0], name
    q, k, v = (rounded(rng, (1, 1, 16, 8), "f32") for _ in range(3))
    dout = np.zeros((1, 1, 16, 8))
    dout[0, 0, 5] = rng.standard_normal(8)
    window = dict(q=q, k=k, v=v, mask=MASK_WINDOW, window_left=3, window_right=0, align=TOP_LEFT)
    dk, dv = (ingot.empty((1, 1, 16, 8), "f32") for _ in range(2))
    for name in every(
        "attn_bwd",
        ALL_BACKWARD,
        **window,
        **forward_for_backward(**window),
        dout=ingot.encode(dout, "f32"),
        dk=dk,
        dv=dv,
    ):
        for x in (dk, dv):
            assert np.flatnonzero(x.values[0, 0].any(1)).tolist() == [2, 3, 4, 5], name


# ---- head groups ----


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("hq, hk", [(71, 1), (9, 3), (28, 4), (40, 8)])
def test_gq01_odd_groups(rng, dtype, hq, hk):
    q, dout = (rounded(rng, (1, hq, 5, 64), dtype) for _ in range(2))
    k, v = (rounded(rng, (1, hk, 5, 64), dtype) for _ in range(2))
    out, lse = ingot.empty((1, hq, 5, 64), dtype), ingot.empty((1, hq, 5), "f32")
    for name in every("attn_fwd", ALL, q=q, k=k, v=v, out=out, lse=lse):
        check_sequence(name, q.values[0], k.values[0], v.values[0], out.values[0], lse.values[0], dtype)
    grads = {name: ingot.empty(x.bits.shape, dtype) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    for name in every(
        "attn_bwd", ALL_BACKWARD, q=q, k=k, v=v, **forward_for_backward(q=q, k=k, v=v), dout=dout, **grads
    ):
        check_gradients(
            name,
            q.values[0],
            k.values[0],
            v.values[0],
            dout.values[0],
            {x: y.values[0] for x, y in grads.items()},
            dtype,
        )
    paged(rng, ALL, dtype, hq, hk, 64, [1], [37], 16)


# ---- 8-bit ----


@pytest.mark.parametrize("dtype", ingot.EIGHTS)
@pytest.mark.parametrize("query", ["f16", "bf16", "same"])
def test_f802_every_byte_by_its_own_table(dtype, query):
    query = dtype if query == "same" else query
    q, k = ingot.encode(np.zeros((1, 1, 1, 16)), query), ingot.encode(np.zeros((1, 1, 1, 16)), dtype)
    v = ingot.Array(np.arange(256, dtype=np.uint8).reshape(1, 1, 1, 256), dtype)
    out = ingot.empty((1, 1, 1, 256), "f32")
    want = ingot.EIGHT_TABLES[dtype]
    for name in every("attn_fwd", ALL, q=q, k=k, v=v, out=out):
        got = out.values[0, 0, 0]
        assert ((got == want) | (np.isnan(got) & np.isnan(want))).all(), name


# ---- head sizes ----


@pytest.mark.parametrize("d", [192, 48, 160, 224, 256])
def test_hd02_every_element_is_written(rng, d):
    q, k, v = (rounded(rng, (1, 16, n, d), "f16") for n in (3, 7, 7))
    out, lse = ingot.empty((1, 16, 3, d), "f16"), ingot.empty((16, 3), "f32")
    scale = 0.1147213876247406
    for name in every(
        "attn_fwd",
        ALL,
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        varlen=CU,
        batch=1,
        max_seqlen_q=3,
        max_seqlen_k=7,
        q_lengths=ingot.ints([0, 3]),
        k_lengths=ingot.ints([0, 7]),
        mask=MASK_CAUSAL,
        align=BOTTOM_RIGHT,
        softmax_scale=scale,
    ):
        check_sequence(
            name,
            q.values[0],
            k.values[0],
            v.values[0],
            out.values[0],
            lse.values,
            "f16",
            scale=float(np.float32(scale)),
            valid=dense.band(3, 7, None, 0, True),
        )


# ---- variable length ----


@pytest.mark.parametrize("d", [128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_vl02_empty_queries_with_keys(rng, d, causal):
    cu_q, cu_k = [0, 0, 302, 512, 512], [0, 634, 1070, 1280, 2048]
    q, dout = (rounded(rng, (1, 4, 512, d), "bf16") for _ in range(2))
    k, v = (rounded(rng, (1, 1, 2048, d), "bf16") for _ in range(2))
    fields = dict(
        q=q,
        k=k,
        v=v,
        varlen=CU,
        batch=4,
        max_seqlen_q=302,
        max_seqlen_k=768,
        q_lengths=ingot.ints(cu_q),
        k_lengths=ingot.ints(cu_k),
        **(dict(mask=MASK_CAUSAL, align=BOTTOM_RIGHT) if causal else {}),
    )
    given = forward_for_backward(**fields)
    grads = {name: ingot.empty(x.bits.shape, "bf16") for name, x in (("dq", q), ("dk", k), ("dv", v))}
    for name in every(
        "attn_bwd", QUICK_BACKWARD + ["reference/attn_bwd_reference"], **fields, **given, dout=dout, **grads
    ):
        for x in (grads["dk"], grads["dv"]):
            assert (x.values[0, :, :634] == 0).all() and (x.values[0, :, 1280:] == 0).all(), name
        for b in (1, 2):
            at_q, at_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            valid = dense.band(cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b], None, 0, True) if causal else None
            check_gradients(
                name,
                q.values[0, :, at_q],
                k.values[0, :, at_k],
                v.values[0, :, at_k],
                dout.values[0, :, at_q],
                {x: y.values[0, :, at_q if x == "dq" else at_k] for x, y in grads.items()},
                "bf16",
                valid=valid,
            )


def test_vl02_no_tokens_at_all(rng):
    """Three empty sequences with maxima of 0: nothing to write, or rows without a key."""
    none = ingot.ints([0, 0, 0, 0])
    k = ingot.empty((1, 2, 0, 64), "f32")
    for rows in (0, 6):
        q = rounded(rng, (1, 2, rows, 64), "f32")
        out, lse = ingot.empty((1, 2, rows, 64), "f32"), ingot.empty((2, rows), "f32")
        lengths = ingot.ints([0, 2, 4, 6]) if rows else none
        for name in every("attn_fwd", ALL, q=q, k=k, v=k, out=out, lse=lse, varlen=CU, batch=3, max_seqlen_q=rows and 2,
                          max_seqlen_k=0, q_lengths=lengths, k_lengths=none):
            assert (out.values == 0).all() and np.isneginf(lse.values).all(), name


def test_vl03_single_token_sequences(rng):
    q, k, v = (rounded(rng, (1, h, 1, 120), "bf16") for h in (21, 7, 7))
    out, lse = ingot.empty((1, 21, 1, 120), "bf16"), ingot.empty((21, 1), "f32")
    cu = ingot.ints([0, 0, 0, 0, 1])
    for name in every(
        "attn_fwd",
        ALL,
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        varlen=CU,
        batch=4,
        max_seqlen_q=1,
        max_seqlen_k=1,
        q_lengths=cu,
        k_lengths=cu,
        softmax_scale=120**0.5,
    ):
        assert np.array_equal(out.bits[0], np.repeat(v.bits[0], 3, 0)), name
        check_sequence(
            name,
            q.values[0],
            k.values[0],
            v.values[0],
            out.values[0],
            lse.values,
            "bf16",
            scale=float(np.float32(120**0.5)),
        )
    q, k, v = (rounded(rng, (1, h, n, 64), "bf16") for h, n in ((9, 2), (3, 8), (3, 8)))
    out, lse = ingot.empty((1, 9, 2, 64), "bf16"), ingot.empty((9, 2), "f32")
    cu_q, cu_k = [0, 1, 1, 2], [0, 3, 3, 8]
    for name in every(
        "attn_fwd",
        ALL,
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        varlen=CU,
        batch=3,
        max_seqlen_q=1,
        max_seqlen_k=5,
        q_lengths=ingot.ints(cu_q),
        k_lengths=ingot.ints(cu_k),
        mask=MASK_CAUSAL,
        align=BOTTOM_RIGHT,
        softmax_scale=1,
    ):
        for row, at in ((0, slice(0, 3)), (1, slice(3, 8))):
            check_sequence(
                name,
                q.values[0, :, row : row + 1],
                k.values[0, :, at],
                v.values[0, :, at],
                out.values[0, :, row : row + 1],
                lse.values[:, row : row + 1],
                "bf16",
                scale=1,
            )


@pytest.mark.parametrize(
    "tokens, lengths, starts", [(16, [3, 5], [0, 4]), (60, [9, 7, 8, 12, 8, 12], [0, 12, 20, 28, 40, 48])]
)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_vl05_padding_between_sequences(rng, dtype, tokens, lengths, starts):
    """Real rows are bit-equal to the compact pack's, padding rows are not touched."""
    real = np.concatenate([np.arange(n) + at for n, at in zip(lengths, starts)])
    data = {name: rng.standard_normal((1, 2, tokens, 64)) for name in ("q", "k", "v", "dout")}
    for x in data.values():
        x[:, :, np.setdiff1d(np.arange(tokens), real)] = np.nan
    wide = {name: ingot.encode(x, dtype) for name, x in data.items()}
    tight = {name: ingot.encode(x[:, :, real], dtype) for name, x in data.items()}
    cu = ingot.ints(np.cumsum([0, *lengths]))
    common = dict(
        batch=len(lengths), max_seqlen_q=max(lengths), max_seqlen_k=max(lengths), mask=MASK_CAUSAL, align=TOP_LEFT
    )
    strided = dict(
        varlen=ingot.varlen((1, 2, 2), (1, 2, 2)),
        q_lengths=ingot.ints(lengths),
        k_lengths=ingot.ints(lengths),
        q_positions=ingot.ints(starts),
        k_positions=ingot.ints(starts),
        **common,
    )
    compact = dict(varlen=CU, q_lengths=cu, k_lengths=cu, **common)

    def run(op, backend, arrays, fields, given):
        rows = arrays["q"].bits.shape[2]
        names = ("out",) if op == "attn_fwd" else ("dq", "dk", "dv")
        outputs = {name: ingot.encode(np.full((1, 2, rows, 64), 7.0), dtype) for name in names}
        if op == "attn_fwd":
            outputs["lse"] = ingot.encode(np.full((2, rows), 7.0), "f32")
            arrays = {name: x for name, x in arrays.items() if name != "dout"}
        try:
            ingot.call(
                op,
                ingot.make_params(op, **arrays, **outputs, **given, **fields),
                dict(flags=ingot.DETERMINISTIC, **(dict(backend=backend) if backend else {})),
            )
        except ingot.Refused as refused:
            assert refused.name == "INGOT_UNSUPPORTED" and backend, (backend, refused)
            return None
        return outputs

    padding = np.setdiff1d(np.arange(tokens), real)
    for backend in ALL:
        a, b = run("attn_fwd", backend, wide, strided, {}), run("attn_fwd", backend, tight, compact, {})
        if a is None:
            continue
        assert np.array_equal(raw(a["out"].bits[:, :, real]), raw(b["out"].bits)), backend
        assert np.array_equal(raw(a["lse"].bits[:, real]), raw(b["lse"].bits)), backend
        assert (a["out"].values[:, :, padding] == 7).all() and (a["lse"].values[:, padding] == 7).all(), backend
    for backend in ALL_BACKWARD:
        x, y = (run("attn_bwd", backend, *how) for how in ((wide, strided, a), (tight, compact, b)))
        if x is None:
            continue
        for name in x:
            assert np.array_equal(raw(x[name].bits[:, :, real]), raw(y[name].bits)), (backend, name)
            assert (x[name].values[:, :, padding] == 7).all(), (backend, name)


def test_vl06_arrays_that_lie(rng):
    q, k, v = (rounded(rng, (1, 2, 256, 32), "f32") for _ in range(3))
    guarded = np.full((1, 2, 300, 32), 7, np.float32)
    out = ingot.Array(guarded[:, :, 20:276], "f32")

    def runs(**fields):
        for backend in ALL:
            guarded[...] = 7
            try:
                ingot.attn_fwd(
                    q=q,
                    k=k,
                    v=v,
                    out=out,
                    max_seqlen_q=256,
                    max_seqlen_k=256,
                    options=dict(backend=backend) if backend else None,
                    **fields,
                )
            except ingot.Refused as refused:
                assert refused.name == "INGOT_UNSUPPORTED" and backend, (backend, refused)
                continue
            assert (guarded[:, :, :20] == 7).all() and (guarded[:, :, 276:] == 7).all(), backend
            yield backend

    def is_sequence(name, length, rows=None):
        at = slice(0, length)
        check_sequence(
            name,
            q.values[0, :, at][:, :rows],
            k.values[0, :, at],
            v.values[0, :, at],
            out.values[0, :, at][:, :rows],
            None,
            "f32",
        )

    cu = ingot.ints([0, 256, 512, 768])
    for name in runs(varlen=CU, batch=3, q_lengths=cu, k_lengths=cu):
        is_sequence(name, 256)
    some = ingot.ints([8, 8, -1, -1])
    starts = ingot.ints([0, 8, 16, 16])
    for name in runs(
        varlen=ingot.varlen((1, 2, 2), (1, 2, 2)),
        batch=4,
        q_lengths=some,
        k_lengths=some,
        q_positions=starts,
        k_positions=starts,
    ):
        is_sequence(name, 8)
        assert (out.values[:, :, 16:] == 7).all(), name
    cu = ingot.ints([0, 100, 50, 256])
    for name in runs(varlen=CU, batch=3, q_lengths=cu, k_lengths=cu):
        is_sequence(name, 100, 50)
    wide = ingot.Array(np.array([0, 100, 256]), "i64")
    for field in ("q_lengths", "k_lengths"):
        arrays = {**dict(q_lengths=ingot.ints(wide.bits), k_lengths=ingot.ints(wide.bits)), field: wide}
        guarded[...] = 7
        with pytest.raises(ingot.Refused, match=f"{field}.*I64") as refused:
            ingot.attn_fwd(q=q, k=k, v=v, out=out, max_seqlen_q=256, max_seqlen_k=256, varlen=CU, batch=2, **arrays)
        assert refused.value.name == "INGOT_INVALID" and (guarded == 7).all()


def test_vl09_bottom_right_hangs_on_each_length(rng):
    len_q, len_k = [10, 64], [64, 10]
    q, k, v = (rng.standard_normal((2, 2, 64, 64)) for _ in range(3))
    for b in range(2):
        q[b, :, len_q[b] :], k[b, :, len_k[b] :], v[b, :, len_k[b] :] = np.nan, np.inf, np.inf
    q, k, v = (ingot.encode(x, "bf16") for x in (q, k, v))
    out, lse = ingot.empty((2, 2, 64, 64), "bf16"), ingot.empty((2, 2, 64), "f32")
    for name in every(
        "attn_fwd",
        ALL,
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        varlen=ingot.varlen((0, 2, 0), (0, 2, 0)),
        q_lengths=ingot.ints(len_q),
        k_lengths=ingot.ints(len_k),
        mask=MASK_CAUSAL,
        align=BOTTOM_RIGHT,
    ):
        for b in range(2):
            at_q, at_k = slice(0, len_q[b]), slice(0, len_k[b])
            check_sequence(
                name,
                q.values[b, :, at_q],
                k.values[b, :, at_k],
                v.values[b, :, at_k],
                out.values[b, :, at_q],
                lse.values[b, :, at_q],
                "bf16",
                valid=dense.band(len_q[b], len_k[b], None, 0, True),
            )
        assert (out.values[1, :, :54] == 0).all() and np.isneginf(lse.values[1, :, :54]).all(), name


def test_em01_zero_sizes():
    def array(shape, dtype="f16"):
        return ingot.encode(np.zeros(shape), dtype)

    empty = array((7, 7, 0, 7))
    ingot.attn_fwd(q=empty, k=empty, v=empty, out=empty, lse=array((7, 7, 0), "f32"), mask=MASK_CAUSAL)
    q, k = array((0, 10, 3952, 64)), array((0, 10, 16, 64))
    params = ingot.make_params("attn_fwd", q=q, k=k, v=k, out=q)
    for name in ("q", "k", "v", "out"):
        getattr(params, name).data = None
    ingot.call("attn_fwd", params)
    params = ingot.make_params(
        "attn_bwd", q=q, k=k, v=k, out=q, dout=q, dq=q, dk=k, dv=k, lse=array((0, 10, 3952), "f32")
    )
    for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "lse"):
        getattr(params, name).data = None
    ingot.call("attn_bwd", params)
    none = array((2, 0, 5, 8))
    ingot.attn_fwd(q=none, k=none, v=none, out=none)
    with pytest.raises(ingot.Refused, match="4.*Hq.*0.*Hk|Hq.*Hk") as refused:
        ingot.attn_fwd(q=array((2, 4, 5, 8)), k=none, v=none, out=array((2, 4, 5, 8)))
    assert refused.value.name == "INGOT_INVALID"
    cells = [ingot.Array(np.array([9], np.uint64), "u64") for _ in range(2)]
    ingot.attn_fwd(
        q=q,
        k=k,
        v=k,
        out=q,
        dropout_p=0.5,
        dropout_seed=2**40,
        dropout_offset=77,
        dropout_seed_out=cells[0],
        dropout_offset_out=cells[1],
    )
    assert [int(x.bits[0]) for x in cells] == [2**40, 77]
    q, k = array((1, 2, 5, 8)), array((1, 2, 0, 8))
    out, lse, dq = ingot.empty((1, 2, 5, 8), "f16"), ingot.empty((1, 2, 5), "f32"), ingot.empty((1, 2, 5, 8), "f16")
    for name in every("attn_fwd", ALL, q=q, k=k, v=k, out=out, lse=lse):
        assert (out.values == 0).all() and np.isneginf(lse.values).all(), name
    out, lse = array((1, 2, 5, 8)), ingot.encode(np.full((1, 2, 5), -np.inf), "f32")
    for name in every("attn_bwd", ALL_BACKWARD, q=q, k=k, v=k, out=out, lse=lse, dout=q, dq=dq):
        assert (dq.values == 0).all(), name


# ---- pages ----


def paged(rng, backends, dtype, hq, hk, d, len_q, len_k, size, shared=False, causal=True, **options):
    """Paged calls with stacked queries of every kernel against each sequence's gathered keys."""
    count, most = len(len_q), -(-max(len_k) // size)
    pages = count * most + 3
    physical = rng.permutation(pages)
    table = np.full((count, most), 0x7FFFFFF0, np.int64)
    for b in range(count):
        n = -(-len_k[b] // size)
        table[b, :n] = physical[b * most : b * most + n]
    if shared:
        table[1, 0] = table[0, 0]
    k, v = (rng.standard_normal((pages, size, hk, d)) for _ in range(2))
    k[np.setdiff1d(np.arange(pages), table)] = v[np.setdiff1d(np.arange(pages), table)] = np.nan
    cu = np.cumsum([0, *len_q])
    q, k, v = (
        ingot.encode(rng.standard_normal((1, hq, cu[-1], d)), dtype),
        ingot.encode(k, dtype),
        ingot.encode(v, dtype),
    )
    out, lse = ingot.empty((1, hq, cu[-1], d), dtype), ingot.empty((hq, cu[-1]), "f32")
    found, parts = {}, []
    for b in range(count):
        j = np.arange(len_k[b])
        gathered = [x.values[table[b, j // size], j % size].transpose(1, 0, 2) for x in (k, v)]
        valid = dense.band(len_q[b], len_k[b], None, 0, True) if causal else None
        parts.append((q.values[0, :, cu[b] : cu[b + 1]], *gathered, valid))
    for name in every(
        "attn_fwd",
        backends,
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        varlen=ingot.varlen((1, 1, 1), (0, 2, 0)),
        batch=count,
        max_seqlen_q=max(len_q),
        q_lengths=ingot.ints(cu),
        k_lengths=ingot.ints(len_k),
        page_table=ingot.ints(table),
        options=options,
        **(dict(mask=MASK_CAUSAL, align=BOTTOM_RIGHT) if causal else {}),
    ):
        for b in range(count):
            at = slice(cu[b], cu[b + 1])
            check_sequence(
                f"{name}, sequence {b}",
                *parts[b][:3],
                out.values[0, :, at],
                lse.values[:, at],
                dtype,
                valid=parts[b][3],
            )
        found[name] = out.bits.copy()
    return found


def test_pg03_length_past_the_table(rng):
    q, kv = rounded(rng, (2, 4, 2, 64), "bf16"), [rounded(rng, (8, 64, 2, 64), "bf16") for _ in range(2)]
    cells = np.full((2, 6), 0x7FFFFFFF, np.int32)
    cells[:, :4] = rng.permutation(8).reshape(2, 4)
    table = ingot.Array(cells[:, :4], "i32")
    out = ingot.empty((2, 4, 2, 64), "bf16")
    found = {}
    for length in (256, 258):
        for name in every(
            "attn_fwd",
            ALL,
            q=q,
            k=kv[0],
            v=kv[1],
            out=out,
            varlen=ingot.varlen(k=(0, 2, 0)),
            page_table=table,
            k_lengths=ingot.ints([length, length]),
            mask=MASK_CAUSAL,
            align=BOTTOM_RIGHT,
        ):
            assert np.array_equal(found.setdefault(name, out.bits.copy()), out.bits), name
            assert np.isfinite(out.values).all(), name


@pytest.mark.parametrize("size", [1, 3, 16, 24, 128])
def test_pg06_any_page_size(rng, size):
    paged(
        rng, QUICK + ["reference/attn_fwd_reference"], "bf16", 8, 8, 128, [8, 16, 5], [300, 128, 5], size, shared=True
    )


def test_pg08_splits_of_ragged_sequences(rng):
    paged(rng, QUICK, "bf16", 8, 2, 128, [4, 1, 5], [8192, 33, 700], 16)


def test_pg09_every_length_of_a_paged_decode(rng):
    """150 of the first 600 lengths, others each time: no NaN, none but the formula's result; repeats are bit-equal."""
    lengths = rng.permutation(np.arange(1, 601)).reshape(-1, 25)
    for row in lengths[:6]:
        paged(rng, QUICK, "bf16", 4, 2, 128, [1] * 25, row.tolist(), 16)
    for length in rng.integers(1, 601, 6):
        seed = int(rng.integers(2**31))
        found = [
            paged(np.random.default_rng(seed), QUICK, "bf16", 16, 2, 128, [1], [int(length)], 16) for _ in range(3)
        ]
        for other in found[1:]:
            assert all(np.array_equal(raw(other[name]), raw(found[0][name])) for name in other), length


def test_pg10_neighbours_and_batch_sizes(rng):
    for first in (900, 800):
        paged(rng, QUICK, "bf16", 32, 8, 128, [1] * 4, [first, 1000, 120, 500], 16)
    for batch in (1, 2, 3, 5, 8, 13, 25):
        paged(rng, QUICK, "bf16", 8, 2, 64, [1] * batch, rng.integers(1, 300, batch).tolist(), 16)
    for d in (64, 128, 256):
        cu_k = np.cumsum([0, 512, 512, 512])
        q, k, v = (
            rounded(rng, (1, 8, 3, d), "f16"),
            rounded(rng, (1, 8, 1536, d), "f16"),
            rounded(rng, (1, 8, 1536, d), "f16"),
        )
        out, lse = ingot.empty((1, 8, 3, d), "f16"), ingot.empty((8, 3), "f32")
        for name in every(
            "attn_fwd",
            QUICK,
            q=q,
            k=k,
            v=v,
            out=out,
            lse=lse,
            varlen=CU,
            batch=3,
            max_seqlen_q=1,
            max_seqlen_k=512,
            q_lengths=ingot.ints([0, 1, 2, 3]),
            k_lengths=ingot.ints(cu_k),
        ):
            for b in range(3):
                at = slice(cu_k[b], cu_k[b + 1])
                check_sequence(
                    name,
                    q.values[0, :, b : b + 1],
                    k.values[0, :, at],
                    v.values[0, :, at],
                    out.values[0, :, b : b + 1],
                    lse.values[:, b : b + 1],
                    "f16",
                )


# ---- strides, views, alignment ----


def test_st01_gradient_expanded_from_one_row(rng):
    q, k, v = (rounded(rng, (1, 2, 5, 8), "bf16") for _ in range(3))
    fields = dict(q=q, k=k, v=v, mask=MASK_CAUSAL)
    given = forward_for_backward(**fields)
    row = ingot.encode(rng.standard_normal(8), "bf16")
    view = ingot.Array(np.broadcast_to(row.bits, (1, 2, 5, 8)), "bf16")
    grads = {name: ingot.empty((1, 2, 5, 8), "bf16") for name in ("dq", "dk", "dv")}
    found = {}
    for dout in (ingot.Array(view.bits.copy(), "bf16"), view):
        for name in every(
            "attn_bwd", ALL_BACKWARD, **fields, **given, dout=dout, **grads, options=dict(flags=ingot.DETERMINISTIC)
        ):
            bits = {x: y.bits.copy() for x, y in grads.items()}
            assert all(np.array_equal(bits[x], found.setdefault(name, bits)[x]) for x in bits), name
    scalar = ingot.Array(np.broadcast_to(ingot.encode(np.ones(1), "bf16").bits, (1, 2, 5, 8)), "bf16")
    with pytest.raises(ingot.Refused, match=r"dout.stride\[3\] is 0"):
        ingot.attn_bwd(**fields, **given, dout=scalar, **grads)


def shifted(values, dtype):
    """The same values one element past an aligned address."""
    bits = ingot.encode_bits(values, dtype)
    buffer = np.empty(bits.size + 65, bits.dtype)
    at = -buffer.ctypes.data % 64 // bits.itemsize + 1
    view = buffer[at : at + bits.size].reshape(bits.shape)
    view[...] = bits
    return ingot.Array(view, dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("d", [64, 72])
def test_st02_bases_off_by_one_element(rng, dtype, d):
    data = {name: rng.standard_normal((2, 2, 70, d)) for name in ("q", "k", "v", "dout")}
    aligned, off = ({name: make(x, dtype) for name, x in data.items()} for make in (ingot.encode, shifted))
    out = {
        id(x): {name: make(np.zeros((2, 2, 70, d)), dtype) for name in ("out", "dq", "dk", "dv")}
        for x, make in ((aligned, ingot.encode), (off, shifted))
    }
    lse = ingot.empty((2, 2, 70), "f32")
    for backend in ALL:
        found = []
        for x in (aligned, off):
            try:
                ingot.attn_fwd(
                    q=x["q"],
                    k=x["k"],
                    v=x["v"],
                    out=out[id(x)]["out"],
                    lse=lse,
                    options=dict(backend=backend) if backend else None,
                )
            except ingot.Refused as refused:
                assert refused.name == "INGOT_UNSUPPORTED" and backend, (backend, refused)
                break
            found.append(out[id(x)]["out"].values)
            for b in range(2):
                check_sequence(backend, *(x[name].values[b] for name in "qkv"), found[-1][b], lse.values[b], dtype)
    given = forward_for_backward(q=aligned["q"], k=aligned["k"], v=aligned["v"])
    o = out[id(off)]
    for name in every("attn_bwd", ALL_BACKWARD, **off, **given, dq=o["dq"], dk=o["dk"], dv=o["dv"]):
        for b in range(2):
            check_gradients(
                name,
                *(aligned[x].values[b] for x in ("q", "k", "v", "dout")),
                {x: o[x].values[b] for x in ("dq", "dk", "dv")},
                dtype,
            )


@pytest.mark.parametrize("keys, pitch", [(77, 80), (43, 43), (5, 5)])
def test_st03_bias_of_any_pitch(rng, keys, pitch):
    q, k, v, dout = (rounded(rng, (2, 8, n, 64), "f16") for n in (keys, keys, keys, keys))
    buffer = np.full(2 * 8 * keys * pitch + 1, np.nan, np.float16)
    wide = buffer[1:].reshape(2, 8, keys, pitch)[..., :keys]
    wide[...] = rng.standard_normal(wide.shape)
    before = buffer.copy()
    compact, odd = ingot.Array(wide.copy(), "f16"), ingot.Array(wide, "f16")
    out, lse = ingot.empty((2, 8, keys, 64), "f16"), ingot.empty((2, 8, keys), "f32")
    found = {}
    for bias in (compact, odd):
        for name in every("attn_fwd", QUICK, q=q, k=k, v=v, bias=bias, out=out, lse=lse):
            bits = found.setdefault(name, (out.bits.copy(), lse.bits.copy()))
            assert np.array_equal(raw(bits[0]), raw(out.bits)) and np.array_equal(bits[1], lse.bits), name
    assert np.array_equal(raw(before), raw(buffer))
    given, found = forward_for_backward(q=q, k=k, v=v, bias=compact), {}
    spare = np.full_like(buffer, 7)
    for bias, dbias in (
        (compact, ingot.empty(wide.shape, "f16")),
        (odd, ingot.Array(spare[1:].reshape(2, 8, keys, pitch)[..., :keys], "f16")),
    ):
        for name in every(
            "attn_bwd",
            QUICK_BACKWARD + ["reference/attn_bwd_reference"],
            q=q,
            k=k,
            v=v,
            bias=bias,
            **given,
            dout=dout,
            dbias=dbias,
            options=dict(flags=ingot.DETERMINISTIC),
        ):
            assert np.array_equal(found.setdefault(name, dbias.values), dbias.values), name
    assert spare[0] == 7 and (spare[1:].reshape(2, 8, keys, pitch)[..., keys:] == 7).all()


@pytest.mark.parametrize("keys", [33, 34, 65, 66, 1025, 1026])
def test_st04_keys_broadcast_over_heads(rng, keys):
    for rows in (1, 17):
        q, one = rounded(rng, (1, 8, rows, 512), "bf16"), [rounded(rng, (1, 1, keys, 512), "bf16") for _ in range(2)]
        bias = np.where(rng.random((1, 1, rows, keys)) < 0.4, -np.inf, 0.0)
        bias[..., 0] = 0
        views = [ingot.Array(np.broadcast_to(x.bits, (1, 8, keys, 512)), "bf16") for x in one]
        copies = [ingot.Array(x.bits.copy(), "bf16") for x in views]
        out, found = ingot.empty((1, 8, rows, 512), "bf16"), {}
        for k, v in (copies, views):
            for name in every("attn_fwd", QUICK, q=q, k=k, v=v, bias=ingot.encode(bias, "f32"), out=out):
                assert np.array_equal(found.setdefault(name, out.bits.copy()), out.bits), (name, rows)
                check_sequence(
                    name, q.values[0], one[0].values[0], one[1].values[0], out.values[0], None, "bf16", bias=bias[0]
                )
        for name in every("attn_fwd", QUICK, q=q, k=one[0], v=one[1], bias=ingot.encode(bias, "f32"), out=out):
            check_sequence(
                name, q.values[0], one[0].values[0], one[1].values[0], out.values[0], None, "bf16", bias=bias[0]
            )
