"""The oracle against itself: finite differences, a dense softmax, Philox's published vectors, merge, varlen, pages."""

import numpy as np
from attention_oracle import (
    CUMULATIVE,
    IMPLIED,
    INDIVIDUAL,
    LAST_PAGE,
    REUSE,
    UNBOUNDED,
    Problem,
    Side,
    backward,
    forward,
    merge,
    philox4x32_10,
    round_to,
    textbook,
    textbook_backward,
)

rng = np.random.default_rng(0)


def r(*s):
    return rng.standard_normal(s)


def dense(q, k, v, mask=None, bias=None):
    s = np.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(q.shape[-1])
    if bias is not None:
        s = s + bias
    if mask is not None:
        s = np.where(mask, s, -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def test_dense_softmax_and_causal_both_ways():
    q, k, v = r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 6)
    i, j = np.arange(5)[:, None], np.arange(7)[None]
    assert np.allclose(forward(Problem(q, k, v))[0], dense(q, k, v))
    assert np.allclose(forward(Problem(q, k, v, window=(UNBOUNDED, 0)))[0], dense(q, k, v, j <= i))
    assert np.allclose(
        forward(Problem(q, k, v, window=(UNBOUNDED, 0), align="bottom_right"))[0], dense(q, k, v, j <= i + 2)
    )


def differences(p, names):
    do = r(*p.q.shape[:3], p.v.shape[3])
    g, yardstick = backward(p, do), textbook_backward(p, do, "float32")
    for name in names:
        x = getattr(p, name)
        num = np.zeros(x.shape)
        for idx in np.ndindex(*x.shape):
            old, f = x[idx], []
            for e in (1e-5, -1e-5):
                x[idx] = old + e
                f.append(np.nansum(forward(p)[0] * do))
            x[idx] = old
            num[idx] = (f[0] - f[1]) / 2e-5
        assert np.allclose(num, g["d" + name], atol=1e-6), name
        if np.size(p.q_descale) == 1:
            values, scale = yardstick["d" + name]
            assert np.abs(values - num).max() < 1e-5 * max(1, scale), name


def test_gradients_are_those_of_finite_differences():
    differences(
        Problem(
            r(1, 4, 3, 4),
            r(1, 2, 5, 4),
            r(1, 2, 5, 3),
            softcap=1.5,
            window=(2, 1),
            align="bottom_right",
            bias=r(1, 4, 1, 5),
            alibi=np.array([0.1, 0.2, 0.3, 0.4]),
            sink=r(4),
            dropout_p=0.3,
            seed=7,
            offset=3,
        ),
        ["q", "k", "v", "bias", "sink"],
    )
    differences(
        Problem(r(2, 2, 3, 4), r(2, 1, 4, 4), r(2, 1, 4, 3), q_descale=r(2, 1), k_descale=r(2, 1), v_descale=r(2, 1)),
        ["q", "k", "v"],
    )


def test_philox_known_answers():
    words = philox4x32_10(0, np.array([0], np.uint64), 0)[0]
    assert [hex(int(x)) for x in words] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    words = philox4x32_10(2**64 - 1, np.array([2**64 - 1], np.uint64), 2**64 - 1)[0]
    assert [hex(int(x)) for x in words] == ["0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]


def test_masked_nan_does_not_leak():
    q, k, v = r(1, 1, 4, 4), r(1, 1, 4, 4), r(1, 1, 4, 4)
    p = Problem(q, k.copy(), v.copy(), window=(UNBOUNDED, -1))
    p.k[0, 0, 3], p.v[0, 0, 3] = np.nan, np.inf
    o, lse = forward(p)
    assert np.all(o[0, 0, 0] == 0) and np.isneginf(lse[0, 0, 0]) and np.isfinite(o).all()
    g = backward(p, r(1, 1, 4, 4))
    assert all(np.isfinite(x).all() for x in g.values()) and (g["dk"][0, 0, 3] == 0).all()
    p = Problem(q, k.copy(), v.copy(), bias=np.zeros((1, 1, 4, 4)))
    p.bias[..., 2] = -np.inf
    p.k[0, 0, 2] = p.v[0, 0, 2] = np.nan
    assert np.allclose(forward(p)[0], dense(q, np.delete(k, 2, 2), np.delete(v, 2, 2)))


def test_merge_of_parts_is_the_whole():
    q, k, v = r(1, 2, 3, 8), r(1, 2, 10, 8), r(1, 2, 10, 8)
    a = [forward(Problem(q, k[:, :, s], v[:, :, s])) for s in (slice(0, 4), slice(4, 10), slice(0, 0))]
    o, lse = merge(np.stack([x[0] for x in a]), np.stack([x[1] for x in a]))
    w = forward(Problem(q, k, v))
    assert np.allclose(o, w[0]) and np.allclose(lse, w[1])


def test_stacked_equals_separate_calls():
    cq, ck = np.cumsum([0, 3, 0, 2]), np.cumsum([0, 4, 5, 0])
    q, k, v = r(1, 2, 5, 4), r(1, 2, 9, 4), r(1, 2, 9, 4)
    p = Problem(
        q,
        k,
        v,
        sequences=3,
        window=(UNBOUNDED, 0),
        align="bottom_right",
        q_side=Side(True, CUMULATIVE, REUSE, cq, max_seqlen=3),
        k_side=Side(True, CUMULATIVE, REUSE, ck, max_seqlen=5),
    )
    o, lse = forward(p)
    for b in range(3):
        at_q, at_k = np.s_[:, :, cq[b] : cq[b + 1]], np.s_[:, :, ck[b] : ck[b + 1]]
        w = forward(Problem(q[at_q], k[at_k], v[at_k], window=(UNBOUNDED, 0), align="bottom_right"))
        assert np.allclose(o[at_q], w[0]) and np.array_equal(np.isneginf(lse[at_q]), np.isneginf(w[1]))


def test_paged_equals_contiguous():
    kp, vp = r(6, 2, 1, 4), r(6, 2, 1, 4)
    table, lens = np.array([[5, 0, 3], [2, 2, 1]]), np.array([5, 3])
    q = r(2, 2, 1, 4)
    o, _ = forward(Problem(q, kp, vp, k_side=Side(False, INDIVIDUAL, IMPLIED, lens), page_table=table))
    for b in range(2):
        rows = [(table[b][t // 2], t % 2) for t in range(lens[b])]
        kk, vv = (np.stack([x[row] for row in rows], 1)[None] for x in (kp, vp))
        assert np.allclose(o[b : b + 1], forward(Problem(q[b : b + 1], kk, vv))[0])
    o2, _ = forward(
        Problem(
            q,
            kp,
            vp,
            k_side=Side(False, LAST_PAGE, IMPLIED, np.array([1, 1])),
            max_seqlen_k=6,
            page_indptr=np.array([0, 3, 5]),
            page_indices=np.array([5, 0, 3, 2, 2]),
        )
    )
    assert np.allclose(o, o2)
    p = Problem(q, kp, vp, k_side=Side(False, INDIVIDUAL, IMPLIED, lens), page_table=table, dropout_p=0.5)
    assert np.isfinite(forward(p)[0]).all()


def test_empty_and_boolean_bias():
    p = Problem(r(1, 1, 0, 4), r(1, 1, 4, 4), r(1, 1, 4, 4), dropout_p=0.5)
    assert forward(p)[0].shape == (1, 1, 0, 4)
    keep = r(1, 1, 4, 4) > 0
    q, k, v = r(1, 1, 4, 4), r(1, 1, 4, 4), r(1, 1, 4, 4)
    assert np.allclose(
        forward(Problem(q, k, v, bias=keep))[0], forward(Problem(q, k, v, bias=np.where(keep, 0.0, -np.inf)))[0]
    )


def test_the_yardstick_is_close_and_rounds():
    q, k, v = (round_to(r(1, 2, 64, 32), "bfloat16") for _ in range(3))
    p = Problem(q, k, v)
    assert 1e-4 < np.abs(textbook(p, "bfloat16")[0] - forward(p)[0]).max() < 2e-2
    for amp in (1, 10):
        q, k, v = (r(1, 2, 64, 32).astype(np.float32) * amp for _ in range(3))
        p = Problem(q, k, v)
        x, lse = forward(p)
        o, m = textbook(p, "float32")
        assert 1e-8 < np.abs(o - x).max() < 1e-3 * amp and np.abs(lse - m).max() < 1e-3
        do = r(1, 2, 64, 32)
        for name, want in backward(p, do).items():
            values, scale = textbook_backward(p, do, "float32")[name]
            assert 1e-9 < np.abs(values - want).max() < 1e-4 * scale
    p = Problem(q, k, v, window=(UNBOUNDED, -5), sink=np.array([1.0, 2.0]))
    assert np.array_equal(forward(p)[1][0, :, 0], [1.0, 2.0]) and np.allclose(
        textbook(p, "float32")[1][0, :, 0], [1, 2]
    )
