"""Faults that users of other attention libraries met, as the smallest input that would show them here. The two letters
and the number name the case."""

import calls
import dense
import ingot_ctypes as ingot
import numpy as np
import pytest
from calls import (
    ALL,
    ALL_BACKWARD,
    CAUSAL,
    CAUSAL_TOP_LEFT,
    CU,
    DETERMINISTIC,
    KEY_LENGTHS,
    LENGTHS,
    QUICK,
    TEXTBOOK,
    TEXTBOOK_BACKWARD,
    Part,
    arrays,
    backward,
    cumulative,
    every,
    forward,
    given,
    held_backward,
    held_forward,
    hold_backward,
    hold_forward,
    lengths,
    packed,
    rounded,
)
from ingot_ctypes import BOTTOM_RIGHT, MASK_CAUSAL, MASK_WINDOW, TOP_LEFT, UNBOUNDED


def raw(x):
    return x.view(f"u{x.itemsize}")


def same_bits(found, name, **results):
    """The first results of a kernel are kept; later ones must be the same bits."""
    bits = {key: raw(x.bits).copy() for key, x in results.items()}
    first = found.setdefault(name, bits)
    assert all(np.array_equal(first[key], bits[key]) for key in bits), name


# ---- masked rows, special values, numbers ----


@pytest.mark.parametrize("size", [600, 640])
@pytest.mark.parametrize("threads", [1, 8])
def test_ms01_whole_first_blocks_masked(size, threads):
    i, j = np.arange(size)[:, None], np.arange(size)[None]
    ones = ingot.encode(np.ones((1, 1, size, 4)), "f32")
    bias = ingot.encode(np.where((i - 10 < j) & (j <= i), 0.0, -np.inf)[None, None], "f32")
    for name, out, lse in forward(ALL, dict(q=ones, k=ones, v=ones, bias=bias, options=dict(num_threads=threads))):
        assert np.abs(out.values - 1).max() <= 1e-6, name
        assert np.abs(lse.values[0, 0] - 2 - np.log(np.minimum(np.arange(size) + 1, 10))).max() <= 1e-5, name


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("how", ["bias", "causal"])
def test_ms02_leading_rows_masked_with_sinks(rng, sinks, how):
    keys = 256 if how == "bias" else 50
    fields = arrays(rng, "bf16", q=(1, 16, 64, 512), k=(1, 1, keys, 512), v=(1, 1, keys, 512))
    if how == "bias":
        dead = np.r_[0:14, 20:34, 50:64]
        bias = np.zeros((1, 1, 64, keys))
        bias[:, :, dead] = -np.inf
        fields["bias"] = ingot.encode(bias, "f32")
    else:
        dead = np.r_[0:14]
        fields |= CAUSAL
    empty = np.full(16, -np.inf)
    if sinks:
        empty = -1.5 + np.arange(16) / 8
        fields["sink"] = ingot.encode(empty, "f32")
    for name, out, lse in held_forward(fields, TEXTBOOK):
        assert (out.values[0][:, dead] == 0).all(), name
        assert (lse.values[0][:, dead] == np.float32(empty)[:, None]).all(), name


@pytest.mark.parametrize("dtype, lowest", [("f32", -3.4028235e38), ("bf16", -3.3895314e38), ("f16", -65504.0)])
def test_ms04_lowest_finite_float_is_a_number(rng, dtype, lowest):
    """A third of the keys are out by it, and all of row 7's: its scores lose what they differ by, and it sees all keys."""
    size = 441
    bias = np.zeros((1, 1, size, size))
    bias[..., :128] = bias[:, :, 7] = lowest
    fields = dict(
        **arrays(rng, dtype, **{x: (1, 2, size, 64) for x in "qkv"}), bias=ingot.encode(bias, dtype)
    )
    others = Part(q=np.delete(np.arange(size), 7), k=slice(128, None), terms={})
    with np.errstate(over="ignore"):
        for name, out, lse in held_forward(fields, TEXTBOOK, [others, Part(q=slice(7, 8), lse=False)]):
            assert np.isfinite(lse.values[0, :, 7]).all() and (lse.values[0, :, 7] < lowest * 0.99).all(), name
            if dtype != "f16":
                mean = fields["v"].values[0].mean(1)
                assert np.abs(out.values[0, :, 7] - mean).max() < (1e-5 if dtype == "f32" else 1e-2), name


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("length", [64, 192, 640, 704, 0])
def test_ms06_scores_near_minus_120(rng, dtype, length):
    heads, sq, sk = (1, length, length) if length else (2, 1, 128)
    q, k = 0.1 * rng.standard_normal((1, heads, sq, 64)), 0.1 * rng.standard_normal((1, heads, sk, 64))
    q[..., 0], k[..., 0] = 1, -960
    fields = dict(q=ingot.encode(q, dtype), k=ingot.encode(k, dtype))
    fields |= arrays(rng, dtype, v=k.shape, dout=q.shape)
    for mask in ({}, CAUSAL_TOP_LEFT):
        for bias in ({}, dict(bias=ingot.encode(np.zeros((1, 1, sq, sk)), dtype))):
            hold_backward(fields | mask | bias, TEXTBOOK_BACKWARD)


@pytest.mark.parametrize("length", [580, 590])
def test_nu01_key_length_cut(rng, length):
    fields = arrays(rng, "bf16", 5, q=(1, 1, 1, 64), k=(1, 1, 1000, 64), v=(1, 1, 1000, 64))
    fields |= dict(varlen=KEY_LENGTHS, k_lengths=ingot.ints([length]))
    hold_forward(fields, ALL, [Part(k=slice(0, length))])


@pytest.mark.parametrize("rows", [1, 40])
def test_nu02_long_sums_do_not_overflow(rows):
    keys = 65536
    q, k = ingot.encode(np.zeros((1, 1, rows, 64)), "f16"), ingot.encode(np.ones((1, 1, keys, 64)), "f16")
    for turns in (False, True):
        v = np.full((1, 1, keys, 64), 60000.0)
        if turns:
            v[:, :, 1::2] = -60000
        for name, out, lse in forward(QUICK, dict(q=q, k=k, v=ingot.encode(v, "f16"))):
            worst = np.abs(out.values - (0 if turns else 60000)).max()
            assert worst <= (1 if turns else 32), (name, worst)
            assert np.abs(lse.values / np.log(keys) - 1).max() <= 1e-6, name


def test_nu03_backward_of_real_looking_activations(rng):
    shapes = dict(q=(2, 4, 448, 256), k=(2, 1, 448, 256), v=(2, 1, 448, 256), dout=(2, 4, 448, 256))
    values = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    for x in (values["q"], values["k"]):
        x += 0.5
        x[..., [7, 100]] = 8
    values["k"][:, :, 0] *= 1.5
    values["dout"][:, :, 0] *= 1000
    fields = {name: ingot.encode(x, "bf16") for name, x in values.items()} | CAUSAL_TOP_LEFT
    for name, grads in held_backward(fields, TEXTBOOK_BACKWARD):
        for b in range(2):
            inputs = (fields[x].values[b] for x in ("q", "k", "v", "dout"))
            valid = dense.band(448, 448, None, 0)
            want = calls.expected(dense.gradients, *inputs, dtype="bf16", valid=valid)[0]["dq"][0]
            for got, right in zip(grads["dq"].values[b], want):
                assert (got * right).sum() / np.linalg.norm(got) / np.linalg.norm(right) >= 0.99, name


# ---- windows ----

SIGNED_BOUNDS = [  # sq, sk, left, right, where the diagonal is, the keys each row sees
    (40, 40, UNBOUNDED, -3, TOP_LEFT, [max(0, i - 2) for i in range(40)]),
    (129, 40, 32, 64, BOTTOM_RIGHT, [len([j for j in range(40) if -32 <= j - (i - 89) <= 64]) for i in range(129)]),
    (1, 4096, 64, 0, BOTTOM_RIGHT, [65]),
    (16, 16, 3, 0, TOP_LEFT, [min(i + 1, 4) for i in range(16)]),
    (16, 16, -2, 5, TOP_LEFT, [4] * 11 + [3, 2, 1, 0, 0]),
]


def test_wn02_signed_bounds(rng):
    """q is 0, so exp(lse) counts the keys; then one row of gradient reaches the keys of its window alone."""
    assert SIGNED_BOUNDS[1][5][:26] == [0] * 25 + [1] and SIGNED_BOUNDS[1][5][128] == 33
    for sq, sk, left, right, align, seen in SIGNED_BOUNDS:
        q, k = (ingot.encode(np.zeros((1, 1, n, 8)), "f32") for n in (sq, sk))
        window = dict(mask=MASK_WINDOW, window_left=left, window_right=right, align=align)
        for name, _, lse in forward(ALL, dict(q=q, k=k, v=k) | window):
            assert np.rint(np.exp(lse.values[0, 0])).astype(int).tolist() == seen, name
    dout = np.zeros((1, 1, 16, 8))
    dout[0, 0, 5] = rng.standard_normal(8)
    fields = arrays(rng, "f32", **{x: (1, 1, 16, 8) for x in "qkv"}) | dict(dout=ingot.encode(dout, "f32"))
    fields |= dict(mask=MASK_WINDOW, window_left=3, window_right=0, align=TOP_LEFT)
    for name, grads in backward(ALL_BACKWARD, fields, ("dk", "dv")):
        for x in grads.values():
            assert np.flatnonzero(x.values[0, 0].any(1)).tolist() == [2, 3, 4, 5], name


# ---- head groups ----


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("hq, hk", [(71, 1), (9, 3), (28, 4), (40, 8)])
def test_gq01_odd_groups(rng, dtype, hq, hk):
    fields = arrays(rng, dtype, q=(1, hq, 5, 64), k=(1, hk, 5, 64), v=(1, hk, 5, 64))
    hold_forward(fields, ALL)
    hold_backward(fields | arrays(rng, dtype, dout=(1, hq, 5, 64)), ALL_BACKWARD)
    paged(rng, ALL, dtype, hq, hk, 64, [1], [37], 16)


# ---- 8-bit ----


@pytest.mark.parametrize("dtype", ingot.EIGHTS)
@pytest.mark.parametrize("query", ["f16", "bf16", "same"])
def test_f802_every_byte_by_its_own_table(dtype, query):
    zero = np.zeros((1, 1, 1, 16))
    fields = dict(
        q=ingot.encode(zero, dtype if query == "same" else query),
        k=ingot.encode(zero, dtype),
        v=ingot.Array(np.arange(256, dtype=np.uint8).reshape(1, 1, 1, 256), dtype),
        out=ingot.empty((1, 1, 1, 256), "f32"),
    )
    want = ingot.EIGHT_TABLES[dtype]
    for name in every("attn_fwd", ALL, **fields):
        got = fields["out"].values[0, 0, 0]
        assert ((got == want) | (np.isnan(got) & np.isnan(want))).all(), name


# ---- head sizes ----


@pytest.mark.parametrize("d", [192, 48, 160, 224, 256])
def test_hd02_every_element_is_written(rng, d):
    fields = arrays(rng, "f16", q=(1, 16, 3, d), k=(1, 16, 7, d), v=(1, 16, 7, d))
    hold_forward(fields | cumulative([0, 3], [0, 7]) | CAUSAL | dict(softmax_scale=0.1147213876247406), ALL)


# ---- variable length ----


@pytest.mark.parametrize("d", [128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_vl02_empty_queries_with_keys(rng, d, causal):
    cu_q, cu_k = [0, 0, 302, 512, 512], [0, 634, 1070, 1280, 2048]
    fields = arrays(rng, "bf16", q=(1, 4, 512, d), dout=(1, 4, 512, d), k=(1, 1, 2048, d), v=(1, 1, 2048, d))
    fields |= cumulative(cu_q, cu_k) | (CAUSAL if causal else {})
    for name, grads in held_backward(fields, TEXTBOOK_BACKWARD, packed(cu_q, cu_k)):
        for x in (grads["dk"], grads["dv"]):
            assert (x.values[0, :, :634] == 0).all() and (x.values[0, :, 1280:] == 0).all(), name


def test_vl03_single_token_sequences(rng):
    cu = [0, 0, 0, 0, 1]
    fields = arrays(rng, "bf16", q=(1, 21, 1, 120), k=(1, 7, 1, 120), v=(1, 7, 1, 120))
    for name, out, _ in held_forward(fields | cumulative(cu, cu) | dict(softmax_scale=120**0.5), ALL):
        assert np.array_equal(out.bits[0], np.repeat(fields["v"].bits[0], 3, 0)), name
    cu_q, cu_k = [0, 1, 1, 2], [0, 3, 3, 8]
    fields = arrays(rng, "bf16", q=(1, 9, 2, 64), k=(1, 3, 8, 64), v=(1, 3, 8, 64))
    fields |= cumulative(cu_q, cu_k) | CAUSAL | dict(softmax_scale=1)
    hold_forward(fields, ALL, packed(cu_q, cu_k))


@pytest.mark.parametrize(
    "tokens, count, starts", [(16, [3, 5], [0, 4]), (60, [9, 7, 8, 12, 8, 12], [0, 12, 20, 28, 40, 48])]
)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_vl05_padding_between_sequences(rng, dtype, tokens, count, starts):
    """Real rows are bit-equal to the compact pack's, padding rows are not touched."""
    real = np.concatenate([np.arange(n) + at for n, at in zip(count, starts)])
    padding = np.setdiff1d(np.arange(tokens), real)
    values = {name: rng.standard_normal((1, 2, tokens, 64)) for name in ("q", "k", "v", "dout")}
    for x in values.values():
        x[:, :, padding] = np.nan
    cu = np.cumsum([0, *count])
    common = CAUSAL_TOP_LEFT | dict(options=DETERMINISTIC)
    tight = {name: ingot.encode(x[:, :, real], dtype) for name, x in values.items()} | cumulative(cu, cu) | common
    wide = {name: ingot.encode(x, dtype) for name, x in values.items()} | cumulative(cu, cu) | common
    wide |= lengths(count, count) | dict(
        varlen=ingot.varlen((1, 2, 2), (1, 2, 2)), q_positions=ingot.ints(starts), k_positions=ingot.ints(starts)
    )
    for op, backends in (("attn_fwd", ALL), ("attn_bwd", ALL_BACKWARD)):
        found = {}
        for fields in (tight, wide):
            made = calls.outputs(**fields)
            if op == "attn_bwd":
                fields = fields | given(**fields)
                made = {"d" + x: ingot.empty(fields[x].bits.shape, dtype) for x in "qkv"}
            else:
                fields = {name: x for name, x in fields.items() if name != "dout"}
            for name in every(op, backends, 7.0, **fields, **made):
                for key, x in made.items():
                    bits, rows = x.bits, 1 if key == "lse" else 2
                    if fields["varlen"] != CU:
                        bits = bits.take(real, rows)
                        assert (x.values.take(padding, rows) == 7).all(), (name, key)
                    assert (ingot.decode_bits(bits, x.dtype) != 7).all(), (name, key)
                    assert np.array_equal(found.setdefault((name, key), raw(bits).copy()), raw(bits)), (name, key)


LYING = [  # the call's lengths; (sequence 0 keeps its first rows, sees so many keys), rows from here on are untouched
    (dict(varlen=CU, batch=3, **lengths([0, 256, 512, 768], [0, 256, 512, 768])), (256, 256), 256),
    (
        dict(
            varlen=ingot.varlen((1, 2, 2), (1, 2, 2)),
            batch=4,
            **lengths([8, 8, -1, -1], [8, 8, -1, -1]),
            q_positions=ingot.ints([0, 8, 16, 16]),
            k_positions=ingot.ints([0, 8, 16, 16]),
        ),
        (8, 8),
        16,
    ),
    (dict(varlen=CU, batch=3, **lengths([0, 100, 50, 256], [0, 100, 50, 256])), (50, 100), 256),
]


def test_vl06_arrays_that_lie(rng):
    fields = arrays(rng, "f32", **{x: (1, 2, 256, 32) for x in "qkv"}) | dict(max_seqlen_q=256, max_seqlen_k=256)
    guarded = np.full((1, 2, 300, 32), 7, np.float32)
    out = ingot.Array(guarded[:, :, 20:276], "f32")
    for lie, (rows, keys), rest in LYING:
        # the formula needs all rows of the sequence, of which another legally overwrites the last
        _, (q, k, v), _ = next(calls.parts_of(fields, [Part(q=slice(0, keys), k=slice(0, keys))]))
        for name in every("attn_fwd", ALL, 7.0, **fields, **lie, out=out):
            assert (guarded[:, :, :20] == 7).all() and (guarded[:, :, 276:] == 7).all(), name
            assert (out.values[:, :, rest:] == 7).all(), name
            calls.check_sequence(name, q[:, :rows], k, v, out.values[0, :, :rows], None, "f32")
    cu, wide = ingot.ints([0, 100, 256]), ingot.Array(np.array([0, 100, 256]), "i64")
    for field in ("q_lengths", "k_lengths"):
        guarded[...] = 7
        with pytest.raises(ingot.Refused, match=f"{field}.*I64") as refused:
            ingot.attn_fwd(**fields, out=out, varlen=CU, batch=2, **(dict(q_lengths=cu, k_lengths=cu) | {field: wide}))
        assert refused.value.name == "INGOT_INVALID" and (guarded == 7).all()


def test_vl09_bottom_right_hangs_on_each_length(rng):
    len_q, len_k = [10, 64], [64, 10]
    q, k, v = (rng.standard_normal((2, 2, 64, 64)) for _ in range(3))
    for b in range(2):
        q[b, :, len_q[b] :], k[b, :, len_k[b] :], v[b, :, len_k[b] :] = np.nan, np.inf, np.inf
    fields = {name: ingot.encode(x, "bf16") for name, x in (("q", q), ("k", k), ("v", v))}
    fields |= dict(varlen=LENGTHS) | lengths(len_q, len_k) | CAUSAL
    parts = [Part(b, slice(0, len_q[b]), slice(0, len_k[b])) for b in range(2)]
    for name, out, lse in held_forward(fields, ALL, parts):
        assert (out.values[1, :, :54] == 0).all() and np.isneginf(lse.values[1, :, :54]).all(), name


def test_em01_zero_sizes():
    def array(shape, dtype="f16"):
        return ingot.encode(np.zeros(shape), dtype)

    empty = array((7, 7, 0, 7))
    ingot.attn_fwd(q=empty, k=empty, v=empty, out=empty, lse=array((7, 7, 0), "f32"), mask=MASK_CAUSAL)
    q, k, lse = array((0, 10, 3952, 64)), array((0, 10, 16, 64)), array((0, 10, 3952), "f32")
    for op, fields in (
        ("attn_fwd", dict(q=q, k=k, v=k, out=q)),
        ("attn_bwd", dict(q=q, k=k, v=k, out=q, dout=q, dq=q, dk=k, dv=k, lse=lse)),
    ):
        params = ingot.make_params(op, **fields)
        for name in fields:
            getattr(params, name).data = None
        ingot.call(op, params)
    none = array((2, 0, 5, 8))
    ingot.attn_fwd(q=none, k=none, v=none, out=none)
    with pytest.raises(ingot.Refused, match="4.*Hq.*0.*Hk|Hq.*Hk") as refused:
        ingot.attn_fwd(q=array((2, 4, 5, 8)), k=none, v=none, out=array((2, 4, 5, 8)))
    assert refused.value.name == "INGOT_INVALID"
    cells = {f"dropout_{x}_out": ingot.Array(np.array([9], np.uint64), "u64") for x in ("seed", "offset")}
    ingot.attn_fwd(q=q, k=k, v=k, out=q, dropout_p=0.5, dropout_seed=2**40, dropout_offset=77, **cells)
    assert [int(x.bits[0]) for x in cells.values()] == [2**40, 77]
    q, k = array((1, 2, 5, 8)), array((1, 2, 0, 8))
    for name, out, lse in forward(ALL, dict(q=q, k=k, v=k)):
        assert (out.values == 0).all() and np.isneginf(lse.values).all(), name
    for name, grads in backward(ALL_BACKWARD, dict(q=q, k=k, v=k, dout=q), ("dq",)):
        assert (grads["dq"].values == 0).all(), name


# ---- pages ----


def paged(rng, backends, dtype, hq, hk, d, len_q, len_k, size, shared=False):
    """Paged causal calls with stacked queries: every kernel against each sequence's gathered keys. Its bits by name."""
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
    unused = np.setdiff1d(np.arange(pages), table)
    k[unused] = v[unused] = np.nan
    cu = np.cumsum([0, *len_q])
    q = rounded(rng, (1, hq, cu[-1], d), dtype)
    k, v = ingot.encode(k, dtype), ingot.encode(v, dtype)
    fields = dict(q=q, k=k, v=v, varlen=ingot.varlen((1, 1, 1), (0, 2, 0)), batch=count, max_seqlen_q=max(len_q))
    fields |= lengths(cu, len_k) | dict(page_table=ingot.ints(table)) | CAUSAL
    gathered = []
    for b in range(count):
        j = np.arange(len_k[b])
        gathered.append([x.values[table[b, j // size], j % size].transpose(1, 0, 2) for x in (k, v)])
    found = {}
    for name, out, lse in forward(backends, fields):
        for b in range(count):
            at = slice(cu[b], cu[b + 1])
            valid = dense.band(len_q[b], len_k[b], None, 0, True)
            calls.check_sequence(
                f"{name}, sequence {b}",
                q.values[0, :, at],
                *gathered[b],
                out.values[0, :, at],
                lse.values[:, at],
                dtype,
                valid=valid,
            )
        found[name] = out.bits.copy()
    return found


def test_pg03_length_past_the_table(rng):
    cells = np.full((2, 6), 0x7FFFFFFF, np.int32)
    cells[:, :4] = rng.permutation(8).reshape(2, 4)
    fields = arrays(rng, "bf16", q=(2, 4, 2, 64), k=(8, 64, 2, 64), v=(8, 64, 2, 64)) | CAUSAL
    fields |= dict(varlen=KEY_LENGTHS, page_table=ingot.Array(cells[:, :4], "i32"))
    found = {}
    for length in (256, 258):
        for name, out, _ in forward(ALL, fields | dict(k_lengths=ingot.ints([length, length])), lse=False):
            same_bits(found, name, out=out)
            assert np.isfinite(out.values).all(), name


@pytest.mark.parametrize("size", [1, 3, 16, 24, 128])
def test_pg06_any_page_size(rng, size):
    paged(rng, TEXTBOOK, "bf16", 8, 8, 128, [8, 16, 5], [300, 128, 5], size, shared=True)


def test_pg08_splits_of_ragged_sequences(rng):
    paged(rng, QUICK, "bf16", 8, 2, 128, [4, 1, 5], [8192, 33, 700], 16)


def test_pg09_every_length_of_a_paged_decode(rng):
    """150 of the first 600 lengths, others each time: no NaN, none but the formula's result; repeats are bit-equal."""
    for row in rng.permutation(np.arange(1, 601)).reshape(-1, 25)[:6]:
        paged(rng, QUICK, "bf16", 4, 2, 128, [1] * 25, row.tolist(), 16)
    for length in rng.integers(1, 601, 6):
        seed = int(rng.integers(2**31))
        first, *again = (
            paged(np.random.default_rng(seed), QUICK, "bf16", 16, 2, 128, [1], [int(length)], 16) for _ in range(3)
        )
        for other in again:
            assert all(np.array_equal(raw(other[name]), raw(first[name])) for name in other), length


def test_pg10_neighbours_and_batch_sizes(rng):
    for first in (900, 800):
        paged(rng, QUICK, "bf16", 32, 8, 128, [1] * 4, [first, 1000, 120, 500], 16)
    for batch in (1, 2, 3, 5, 8, 13, 25):
        paged(rng, QUICK, "bf16", 8, 2, 64, [1] * batch, rng.integers(1, 300, batch).tolist(), 16)
    cu_q, cu_k = [0, 1, 2, 3], [0, 512, 1024, 1536]
    for d in (64, 128, 256):
        fields = arrays(rng, "f16", q=(1, 8, 3, d), k=(1, 8, 1536, d), v=(1, 8, 1536, d))
        hold_forward(fields | cumulative(cu_q, cu_k), QUICK, packed(cu_q, cu_k))


# ---- strides, views, alignment ----


def test_st01_gradient_expanded_from_one_row(rng):
    shape = (1, 2, 5, 8)
    fields = arrays(rng, "bf16", q=shape, k=shape, v=shape) | dict(mask=MASK_CAUSAL, options=DETERMINISTIC)
    view = ingot.Array(np.broadcast_to(rounded(rng, (8,), "bf16").bits, shape), "bf16")
    found = {}
    for dout in (ingot.Array(view.bits.copy(), "bf16"), view):
        for name, grads in backward(ALL_BACKWARD, fields | dict(dout=dout)):
            same_bits(found, name, **grads)
    scalar = ingot.Array(np.broadcast_to(ingot.encode(np.ones(1), "bf16").bits, shape), "bf16")
    with pytest.raises(ingot.Refused, match=r"dout.stride\[3\] is 0"):
        ingot.attn_bwd(**fields, **given(**fields), dout=scalar, **grads)


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
    """Inputs and outputs off by one element, each kernel that takes them, as exact as aligned ones."""
    values = {name: rng.standard_normal((2, 2, 70, d)) for name in ("q", "k", "v", "dout")}
    zero = np.zeros((2, 2, 70, d))
    for make in (ingot.encode, shifted):
        fields = {name: make(x, dtype) for name, x in values.items()}
        inputs = {name: fields[name] for name in "qkv"}
        made = dict(out=make(zero, dtype), lse=ingot.empty((2, 2, 70), "f32"))
        for name in every("attn_fwd", ALL, **inputs, **made):
            for part, tensors, _ in calls.parts_of(fields, None):
                out, lse = (x.values[part.b] for x in made.values())
                calls.check_sequence(name, *tensors, out, lse, dtype)
        grads = {"d" + x: make(zero, dtype) for x in "qkv"}
        for name in every("attn_bwd", ALL_BACKWARD, **fields, **given(**inputs), **grads):
            for part, tensors, _ in calls.parts_of(fields, None):
                got = {x: y.values[part.b] for x, y in grads.items()}
                calls.check_gradients(name, *tensors, fields["dout"].values[part.b], got, dtype)


@pytest.mark.parametrize("keys, pitch", [(77, 80), (43, 43), (5, 5)])
def test_st03_bias_of_any_pitch(rng, keys, pitch):
    """Bias and its gradient in rows of the pitch, one element off, against compact ones; spare columns stay as they are."""
    shape = (2, 8, keys, 64)

    def spacious(fill):
        buffer = np.full(2 * 8 * keys * pitch + 1, fill, np.float16)
        return buffer, buffer[1:].reshape(2, 8, keys, pitch)[..., :keys]

    fields = arrays(rng, "f16", q=shape, k=shape, v=shape)
    buffer, wide = spacious(np.nan)
    wide[...] = rng.standard_normal(wide.shape)
    before = buffer.copy()
    compact, odd = ingot.Array(wide.copy(), "f16"), ingot.Array(wide, "f16")
    found = {}
    for bias in (compact, odd):
        for name, out, lse in forward(QUICK, fields | dict(bias=bias)):
            same_bits(found, name, out=out, lse=lse)
    assert np.array_equal(raw(before), raw(buffer))
    spare, dbias = spacious(7)
    rest, found = given(**fields, bias=compact) | arrays(rng, "f16", dout=shape) | dict(options=DETERMINISTIC), {}
    for bias, grad in ((compact, ingot.empty(wide.shape, "f16")), (odd, ingot.Array(dbias, "f16"))):
        for name in every("attn_bwd", TEXTBOOK_BACKWARD, **fields, **rest, bias=bias, dbias=grad):
            assert np.array_equal(found.setdefault(name, grad.values), grad.values), name
    assert spare[0] == 7 and (spare[1:].reshape(2, 8, keys, pitch)[..., keys:] == 7).all()


@pytest.mark.parametrize("keys", [33, 34, 65, 66, 1025, 1026])
def test_st04_keys_broadcast_over_heads(rng, keys):
    """Eight heads of keys by stride 0, as copies, and as one head for all."""
    for rows in (1, 17):
        one = arrays(rng, "bf16", k=(1, 1, keys, 512), v=(1, 1, keys, 512))
        bias = np.where(rng.random((1, 1, rows, keys)) < 0.4, -np.inf, 0.0)
        bias[..., 0] = 0
        fields = arrays(rng, "bf16", q=(1, 8, rows, 512)) | dict(bias=ingot.encode(bias, "f32"))
        views = {name: ingot.Array(np.broadcast_to(x.bits, (1, 8, keys, 512)), "bf16") for name, x in one.items()}
        copies = {name: ingot.Array(x.bits.copy(), "bf16") for name, x in views.items()}
        found = {}
        for both in (copies, views):
            for name, out, _ in held_forward(fields | both, QUICK, lse=False):
                same_bits(found, (name, rows), out=out)
        hold_forward(fields | one, QUICK, lse=False)
