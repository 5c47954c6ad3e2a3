"""Merging partial results: the oracle's weights by exp(lse), in every layout and type; attention over split keys."""

import attention_oracle as oracle
import ingot_ctypes as ingot
import judge
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import FLOATS, ORACLE_DTYPE, Placed

BACKENDS = ingot.kernels("attn_merge")


@pytest.mark.parametrize("backend", BACKENDS)
def test_merge(backend):
    @settings(max_examples=120)
    @given(
        shape=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 9), st.sampled_from([1, 3, 16, 40, 512])),
        parts=st.integers(0, 8),
        stacked=st.booleans(),
        dtype=st.sampled_from(FLOATS),
        out=st.sampled_from(FLOATS),
        base2=st.booleans(),
        empty=st.sampled_from([0.0, 0.3, 1.0]),
        want_lse=st.booleans(),
        in_place=st.booleans(),
        spread=st.sampled_from([1.0, 50.0, 1e4]),
        seed=st.integers(0, 2**32),
    )
    def run(shape, parts, stacked, dtype, out, base2, empty, want_lse, in_place, spread, seed):
        parts, rng = (parts if stacked else max(parts, 1)), np.random.default_rng(seed)
        base = judge.LOG2E if base2 else 1.0
        none = rng.random((parts, *shape[:3])) < empty
        lse_values = np.where(none, -np.inf, rng.standard_normal((parts, *shape[:3])) * spread)
        values = np.where(none[..., None], 12345.0, rng.standard_normal((parts, *shape)))
        place = lambda x, kind: Placed(x.shape, kind, rng).fill(ingot.encode_bits(x, kind))
        if stacked:
            placed = [place(values, dtype)], [place(lse_values * base, "f32")]
        else:
            placed = [[place(x, kind) for x in many] for many, kind in ((values, dtype), (lse_values * base, "f32"))]
        given_values = [x.array.values for x in placed[0]]
        given_lse = [x.array.values / base for x in placed[1]]
        values, lses = (x[0] if stacked else np.stack(x) for x in (given_values, given_lse))
        to = Placed(shape, out, rng)
        to_lse = Placed(shape[:3], "f32", rng)
        fields = dict(out_parts=[x.array for x in placed[0]], lse_parts=[x.array for x in placed[1]])
        if in_place and out == dtype and want_lse and parts:
            to, to_lse = placed[0][0], placed[1][0]
            if stacked:
                fields.update(out=ingot.Array(to.array.bits[0], out), lse=ingot.Array(to_lse.array.bits[0], "f32"))
        fields.setdefault("out", to.array)
        if want_lse:
            fields.setdefault("lse", to_lse.array)
        every = {id(x): x.freeze() for x in [*placed[0], *placed[1], to, to_lse]}
        ingot.attn_merge(options=dict(backend=backend), lse_base=int(base2), **fields)
        for x in every.values():
            written = np.zeros(x.shape, bool)
            if x is to or (x is to_lse and want_lse):
                written[() if x.array.bits.ndim == fields["out" if x is to else "lse"].bits.ndim else 0] = True
            assert x.untouched(written)
        if not parts:
            want, want_lse_values = np.zeros(shape), np.full(shape[:3], -np.inf)
        else:
            want, want_lse_values = oracle.merge(values, lses)
        finite = np.where(np.isfinite(lses), np.abs(values).max(-1, initial=0), 0)
        yardstick = oracle.round_to(want.astype(np.float32), ORACLE_DTYPE[out])
        scale = max(float(finite.max(initial=0)), 1e-3)
        judge.check_values("out", fields["out"].values, want, [yardstick], judge.coarser(dtype, out), scale)
        if want_lse:
            judge.check_lse(fields["lse"].values / base, want_lse_values, [want_lse_values.astype(np.float32)])

    run()


def attend(q, k, v, out, dtype="bf16", **fields):
    """Forward by the reference: what it leaves of the error is not to turn with the kernel that a length is fastest by."""
    lse = ingot.empty(q.shape[:3], "f32")
    ingot.attn_fwd(
        q=ingot.encode(q, dtype), k=ingot.encode(k, dtype), v=ingot.encode(v, dtype), out=out, lse=lse,
        options=dict(backend="reference"), **fields
    )
    return out, lse


@pytest.mark.parametrize("dtype, partial", [("bf16", "f32"), ("bf16", "bf16"), ("f32", "f32")])
def test_many_small_parts(rng, dtype, partial):
    """MG-03: 64 chunks of 128 keys, one by one and as a tree, are as exact as one call when the parts are fp32."""
    shape_q, shape_k = (1, 4, 16, 128), (1, 4, 8192, 128)
    q, k, v = (oracle.round_to(rng.standard_normal(x), ORACLE_DTYPE[dtype]) for x in (shape_q, shape_k, shape_k))
    s = np.einsum("bhid,bhjd->bhij", q.astype(np.float64), k) / np.sqrt(128)
    e = np.exp(s - s.max(-1, keepdims=True))
    want = e / e.sum(-1, keepdims=True) @ v.astype(np.float64)
    whole = attend(q, k, v, ingot.empty(shape_q, "f32"), dtype)[0].values
    parts = [
        attend(q, k[:, :, at : at + 128], v[:, :, at : at + 128], ingot.empty(shape_q, partial), dtype)
        for at in range(0, 8192, 128)
    ]

    def join(*some):
        out, lse = ingot.empty(shape_q, partial), ingot.empty(shape_q[:3], "f32")
        ingot.attn_merge(out_parts=[x[0] for x in some], lse_parts=[x[1] for x in some], out=out, lse=lse)
        return out, lse

    ring = parts[0]
    for one in parts[1:]:
        ring = join(ring, one)
    tree = parts
    while len(tree) > 1:
        tree = [join(*tree[i : i + 2]) for i in range(0, len(tree), 2)]
    error = lambda x: np.abs(x - want).max()
    allowed = 2 * error(whole) + 1e-6
    found = error(ring[0].values), error(tree[0][0].values)
    print(f"{dtype}, parts {partial}: whole {error(whole):.2e}, ring {found[0]:.2e}, tree {found[1]:.2e}")
    # Rounding 63 times to bf16 is worse, and the size of it is known: half a unit each time.
    slack = 0 if partial == "f32" else 64 * judge.ulp(np.abs(want).max(), "bf16")
    assert max(found) <= allowed + slack
