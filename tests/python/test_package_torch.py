"""ingot.torch: its operators and its scaled_dot_product_attention against PyTorch's own in double, by the rule of the
specification; autograd, torch.compile, autocast, and what is left to PyTorch. On the CPU, and on a GPU where there is one."""

# Where two ways to one result are held to each other (allclose), they may differ in the order of fp32 sums alone: values are of
# order 1 and the bounds a few roundings of such a sum. How far a kernel may be off is the judge's affair (judge.py). Whole modules are compared
# within 1e-4, since their linear layers are compiled, or run in another order, too.

import gc
import importlib.util
import re
import sys
import time

import dense
import ingot
import ingot_ctypes as c
import judge
import numpy as np
import pytest
from problems import ORACLE_DTYPE

torch = pytest.importorskip("torch", reason="torch is not installed (tests/requirements-torch.txt)")
pytestmark = pytest.mark.torch

import ingot.torch as it
from devices import device, here, rand  # noqa: F401
from test_torch import TYPES, compare
from test_torch import make as make_on_cpu

F = torch.nn.functional
original = it._original
op = torch.ops.ingot.attention_forward


def make(dtype, *shapes, seed=0):
    return [here(x) for x in make_on_cpu(dtype, *shapes, seed=seed)]


def double(x):
    return x.detach().double().cpu().numpy()


def held(name, q, k, v, mask=None, causal=False, scale=None, gqa=False, function=it.scaled_dot_product_attention):
    """Output and gradients of 4-axis tensors, held to PyTorch's in double. The yardstick goes sequence by sequence."""
    dtype = {kind: name for name, kind in TYPES.items()}[q.dtype]
    learns = mask is not None and mask.is_floating_point()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    if learns:
        leaves.append(mask.detach().requires_grad_())
        wide.append(mask.detach().double().requires_grad_())
    how = dict(is_causal=causal, scale=scale, enable_gqa=gqa)
    out = function(*leaves[:3], attn_mask=leaves[3] if learns else mask, **how)
    exact = original(*wide[:3], attn_mask=wide[3] if learns else mask, **how)
    assert out.dtype == q.dtype and out.shape == exact.shape
    dout = make(dtype, out.shape, seed=77)[0]
    grads = torch.autograd.grad(out, leaves, dout)
    true = torch.autograd.grad(exact, wide, dout.double())

    b, h, rows, keys = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    terms = dict(scale=float(np.float32(scale)) if scale else 0.0)
    table = None if mask is None else mask.detach().expand(b, h, rows, keys)
    outs, parts = [], {"dq": [], "dk": [], "dv": [], "ds": []}
    for i in range(b):
        if causal:
            terms["valid"] = dense.band(rows, keys, None, 0)
        if learns:
            terms["bias"] = double(table[i])
        elif mask is not None:
            terms["valid"] = table[i].cpu().numpy()
        outs.append(dense.attend(*(double(x[i]) for x in (q, k, v)), **terms, dtype=ORACLE_DTYPE[dtype])[0])
        found = dense.gradients(*(double(x[i]) for x in (q, k, v, dout)), **terms, dtype=ORACLE_DTYPE[dtype])
        for key, values in parts.items():
            values.append(found[key])
    compare(f"{name} out", out, exact, np.stack(outs), dtype)
    for key, got, want in zip(("dq", "dk", "dv"), grads, true):
        assert got.dtype == q.dtype and got.shape == want.shape
        own = judge.oracle.round_to(np.stack([x for x, _ in parts[key]]), ORACLE_DTYPE[dtype])
        compare(f"{name} {key}", got, want, own, dtype, max(x for _, x in parts[key]))
    if learns:
        assert grads[3].dtype == mask.dtype and grads[3].shape == mask.shape
        axes = tuple(i for i in range(4) if mask.shape[i] == 1)
        size = np.stack([np.full((1, 1, 1), x) for _, x in parts["ds"]])
        own = np.stack([x for x, _ in parts["ds"]]).sum(axes, keepdims=True)
        kept = {kind: name for name, kind in TYPES.items()}[mask.dtype]
        count = np.prod([(b, h, rows, keys)[i] for i in axes]) if axes else 1
        compare(f"{name} dbias", grads[3], true[3], judge.oracle.round_to(own, ORACLE_DTYPE[kept]), kept, size.max() * count)
    return out


SHAPES = [(1, 1, 1, 1, 8, 8), (2, 4, 33, 17, 64, 64), (1, 2, 65, 129, 64, 40), (2, 2, 7, 200, 128, 128)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", ["none", "causal", "scale"])
def test_sdpa(dtype, shape, mask):
    b, h, sq, sk, d, dv = shape
    q, k, v = make(dtype, (b, h, sq, d), (b, h, sk, d), (b, h, sk, dv), seed=sq)
    held(mask, q, k, v, causal=mask == "causal", scale=-0.4 if mask == "scale" else None)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["bool", "float", "float32"])
@pytest.mark.parametrize("extents", ["full", "heads", "keys", "rows", "matrix", "batch"])
def test_masks_broadcast(dtype, kind, extents):
    b, h, sq, sk = 2, 3, 19, 31
    q, k, v = make(dtype, (b, h, sq, 64), (b, h, sk, 64), (b, h, sk, 64))
    shape = dict(
        full=(b, h, sq, sk), heads=(1, h, sq, sk), keys=(b, 1, 1, sk), rows=(1, 1, sq, 1), matrix=(1, 1, sq, sk),
        batch=(b, 1, sq, sk),
    )[extents]  # fmt: skip
    if kind == "bool":
        mask = rand(*shape) > 0.4
        mask[..., 0, 0] = True
    else:
        mask = make("f32" if kind == "float32" else dtype, shape, seed=5)[0]
    held(f"{kind} {extents}", q, k, v, mask=mask)


def test_masks_of_fewer_axes():
    q, k, v = make("f32", (2, 3, 5, 16), (2, 3, 7, 16), (2, 3, 7, 16))
    mask = make("f32", (2, 3, 5, 7))[0]
    for few in (mask[0, 0], mask[0], mask[0, 0, :1], mask[:1, :1, :, :1], mask.permute(3, 0, 1, 2).permute(1, 2, 3, 0)):
        got, whole = it.scaled_dot_product_attention(q, k, v, few), few.expand(2, 3, 5, 7).contiguous()
        assert torch.equal(got, it.scaled_dot_product_attention(q, k, v, whole))
        assert (got - original(q, k, v, whole)).abs().max() < 1e-5  # on a GPU it takes no others
    assert not it.statistics(reset=True)["original"]


def test_rows_without_a_key():
    """Rows that a mask empties are 0, and so are their gradients, as PyTorch has it."""
    q, k, v = (x.requires_grad_() for x in make("f32", (1, 2, 4, 16), (1, 2, 6, 16), (1, 2, 6, 16)))
    keep = torch.ones(4, 6, dtype=torch.bool)
    keep[1] = False
    for mask in (keep, torch.zeros(4, 6).masked_fill(~keep, -torch.inf)):
        out = it.scaled_dot_product_attention(q, k, v, mask)
        assert (out[:, :, 1] == 0).all() and (original(q, k, v, mask)[:, :, 1] == 0).all()
        dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
        assert (dq[:, :, 1] == 0).all() and all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hq, hk", [(4, 1), (6, 2), (3, 3)])
def test_grouped_heads(dtype, hq, hk):
    q, k, v = make(dtype, (2, hq, 21, 64), (2, hk, 40, 64), (2, hk, 40, 64))
    held("gqa", q, k, v, gqa=True, causal=True)


def test_shapes_broadcast():
    """Batch and heads of extent 1 stand for all, as in PyTorch's formula, and collect the gradients."""
    q, k, v = make("f32", (2, 4, 9, 16), (1, 4, 11, 16), (2, 1, 11, 16))
    whole = [x.expand(2, 4, -1, -1).contiguous().requires_grad_() for x in (q, k, v)]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    got, want = (it.scaled_dot_product_attention(*x) for x in (leaves, whole))
    assert torch.equal(got, want) and (got - original(*leaves)).abs().max() < 1e-5
    for x, y, leaf in zip(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), whole), leaves):
        axes = [i for i in range(2) if leaf.shape[i] == 1]
        assert torch.allclose(x, y.sum(axes, keepdim=True) if axes else y, rtol=0, atol=1e-5)
    assert not it.statistics(reset=True)["original"]


def test_two_and_three_axes():
    q, k, v = make("f32", (3, 9, 16), (3, 11, 16), (3, 11, 24))
    mask = torch.rand(3, 9, 11) > 0.3
    for tensors in ((q, k, v), (q, k, v, mask), (q, k, v, mask[0]), (q[0], k[0], v[0]), (q[0], k[0], v[0], mask[0])):
        got, want = it.scaled_dot_product_attention(*tensors), original(*tensors)
        assert got.shape == want.shape and (got - want).abs().max() < 1e-5
    assert not it.statistics(reset=True)["original"]


def test_empty_extents():
    for sizes in ((0, 2, 5, 7), (2, 0, 5, 7), (2, 3, 0, 7), (2, 3, 5, 0)):
        b, h, sq, sk = sizes
        tensors = [torch.randn(b, h, n, 16).requires_grad_() for n in (sq, sk, sk)]
        got, want = it.scaled_dot_product_attention(*tensors), original(*tensors)
        assert got.shape == want.shape and torch.equal(got, want)
        assert all(torch.equal(x, torch.zeros_like(x)) for x in torch.autograd.grad(got.sum(), tensors))


@pytest.mark.parametrize("dtype", TYPES)
def test_strides(dtype):
    """Slices of a packed projection, transposed and expanded views, and a last axis that is not dense."""
    packed = make(dtype, (2, 33, 3, 4, 64))[0]
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    held("packed", q, k, v, causal=True)
    held("expanded", q, *(x[:, :1].expand(2, 4, 33, 64) for x in (k, v)))
    held("odd last axis", *(x.contiguous().transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)))
    # the gradient of a sum is one number for all
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    got = torch.autograd.grad(it.scaled_dot_product_attention(*leaves).sum(), leaves)
    ones = torch.ones(2, 4, 33, 64, dtype=q.dtype)
    want = torch.autograd.grad(it.scaled_dot_product_attention(*leaves), leaves, ones)
    assert all(torch.equal(x, y) for x, y in zip(got, want))


def test_dropout(device):
    """The seed is torch's generator's, the mask the library's, and out and gradients are the formula's with that mask."""
    from ingot import _core

    q, k, v = (x.requires_grad_() for x in make("f32", (2, 3, 20, 16), (2, 3, 30, 16), (2, 3, 30, 16)))
    torch.manual_seed(12)
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64)
    torch.manual_seed(12)
    out = it.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    torch.manual_seed(12)
    assert torch.equal(out, it.scaled_dot_product_attention(q, k, v, dropout_p=0.3))
    assert not torch.equal(out, it.scaled_dot_product_attention(q, k, v, dropout_p=0.3))
    assert torch.equal(out, it.attention(q, k, v, dropout_p=0.3, dropout_seed=seed))
    assert torch.equal(out, it.attention(q, k, v, dropout_p=0.3, dropout_seed=int(seed)))
    keep = torch.empty(2, 3, 20, 30, dtype=torch.bool)
    _core.attn_dropout_mask(mask=keep, dropout_p=0.3, dropout_seed_ptr=seed)
    assert 0.25 < 1 - keep.double().mean() < 0.35

    def formula(kind):
        leaves = [x.detach().to(kind).requires_grad_() for x in (q, k, v)]
        p = (leaves[0] @ leaves[1].transpose(2, 3) / 4).softmax(-1) * keep / (1 - 0.3)
        o = p @ leaves[2]
        return o, *torch.autograd.grad(o, leaves, make("f32", o.shape, seed=1)[0].to(kind))

    got = (out, *torch.autograd.grad(out, (q, k, v), make("f32", out.shape, seed=1)[0]))
    for name, x, want, own in zip(("out", "dq", "dk", "dv"), got, formula(torch.double), formula(torch.float32)):
        compare(name, x, want, double(own), "f32")
    if device == "cpu":  # on a GPU PyTorch takes it
        with pytest.raises(RuntimeError):
            it.scaled_dot_product_attention(q, k, v, dropout_p=1.5)
    for wrong in (1.5, np.float32(1.5)):
        with pytest.raises(TypeError, match="dropout_seed is .*1.5"):
            it.attention(q, k, v, dropout_p=0.3, dropout_seed=wrong)
    for call in (it.attention, ingot.attention):
        with torch.no_grad(), pytest.raises(ingot.InvalidError, match=r"\bdropout_seed\b"):
            call(q, k, v, dropout_p=0.3, dropout_seed=torch.ones(1))


@pytest.mark.parametrize("dtype", TYPES)
def test_the_short_way_is_the_long_one(dtype):
    """Calls without gradient, mask and dropout take a way of their own: the same bits, in the same order in memory."""
    from ingot import _core

    packed = make(dtype, (2, 9, 3, 4, 16))[0]
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    few = make(dtype, (2, 2, 13, 16), (2, 2, 13, 24), (2, 0, 13, 16), (0, 4, 9, 16), (2, 4, 0, 16))
    for tensors, given in (
        ((q, k, v), {}), ((q, k, v), dict(is_causal=True)), ((q, k, v), dict(scale=-0.3)),
        ((q, *few[:2]), dict(enable_gqa=True)), ((q, few[4], few[4]), {}), ((few[3],) * 3, {}), ((few[4], k, v), {}),
        ((q.mT.contiguous().mT, k, v), dict(is_causal=True)),
    ):  # fmt: skip
        answers, leaves = [], [x.detach().requires_grad_() for x in tensors]
        run, keep = _core.plain_sdpa, answers.append
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_core, "plain_sdpa", lambda *x: (keep(run(*x)), answers[-1])[1])
            short, long = (it.scaled_dot_product_attention(*x, **given) for x in (tensors, leaves))
        same = dict(causal=given.get("is_causal", False), align="top_left", softmax_scale=given.get("scale"))
        alone = it.attention(*tensors, **same)
        assert torch.equal(alone, short) and alone.transpose(1, 2).is_contiguous()
        assert len(answers) == 1 and (answers[0] is None) == (tensors[0].stride(-1) != 1)
        assert torch.equal(short, long) and short.shape == long.shape and short.is_contiguous() == long.is_contiguous()
        assert short.dtype == q.dtype and not short.requires_grad
        assert not short.numel() or short.stride() == long.stride()
    assert it.statistics() == {"ingot": 16, "original": {}}
    # what is not this simple does nothing here
    rest = (False, None, False, 0, 1, True)
    for tensors in (
        (q[0], k[0], v[0]), (q, k, v[:1]), (q, k[:1], v[:1]), (q, *few[:2]), (q, few[2], few[2]), (q, k[..., :8], v),
        (q, k, v[:, :, :5]), (q.double(), k.double(), v.double()), (q, k.double(), v), (None, k, v), (q, 3, v),
        (q.to_sparse(), k, v), (double(q), k, v), (torch.zeros(1, 1, 3, 600),) * 3,
    ):  # fmt: skip
        assert _core.plain_sdpa(*tensors, *rest) is None
    for causal, grouped in ((1, False), (False, 1), (None, False), (np.True_, False)):
        assert _core.plain_sdpa(q, k, v, causal, None, grouped, 0, 1, True) is None
    assert _core.plain_sdpa(q, few[2], few[2], False, None, True, 0, 1, True) is None
    # these two are the library's
    for flags, threads, name in ((1 << 20, 1, "flags"), (0, -3, "num_threads")):
        with pytest.raises(ingot.InvalidError, match=name):
            _core.plain_sdpa(q, k, v, False, None, False, flags, threads, True)


def test_gradients_are_those_of_differences(device):
    """torch.autograd.gradcheck, on the CPU of the reference kernel. Results are of float32: a difference over a step of 4e-3
    loses 6e-8 / 8e-3 to rounding and the step's square to curvature, hence steps and bounds; on a GPU sums come in no order."""
    backend = "reference" if device == "cpu" else None
    q, k, v, bias = (x.double().requires_grad_() for x in make("f32", (1, 2, 3, 8), (1, 1, 4, 8), (1, 1, 4, 8), (1, 2, 3, 4)))
    sink = make("f32", (2,))[0].double().requires_grad_()

    def run(*x):
        q, k, v, bias, sink = (y.float() for y in x)
        out = it.attention(
            q, k, v, bias=bias, sink=sink, causal=True, align="bottom_right", softcap=3.0, backend=backend
        )
        return out.double()

    assert torch.autograd.gradcheck(run, (q, k, v, bias, sink), eps=4e-3, atol=1e-3, rtol=1e-2, nondet_tol=1e-5)


def test_attention_has_every_argument(device):
    """ingot.torch.attention is ingot.attention, with gradients."""
    q, k, v = make("f32", (2, 4, 9, 16), (2, 2, 13, 16), (2, 2, 13, 16))
    ints = lambda *x: torch.tensor(x, dtype=torch.int32)
    for given in (
        dict(causal=True, align="bottom_right"), dict(window=(3, None), align="top_left"), dict(softcap=2.0),
        dict(softmax_scale=0.2), dict(bias=make("f32", (1, 4, 9, 13))[0]), dict(alibi=torch.rand(4), align="top_left"),
        dict(sink=torch.randn(4)), dict(k_lengths=ints(13, 4)), dict(deterministic=True),
        *([dict(backend="reference")] if device == "cpu" else []),
    ):  # fmt: skip
        out, lse = it.attention(q, k, v, return_lse=True, **given)
        want = ingot.attention(q, k, v, return_lse=True, **given)
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    out = it.attention(q, k, v, q_lengths=ints(9, 2))
    assert (out[1, :, 2:] == 0).all() and torch.equal(out[:1], it.attention(q[:1], k[:1], v[:1]))
    sink = torch.randn(4, requires_grad=True)
    (got,) = torch.autograd.grad(it.attention(q, k, v, sink=sink).sum(), sink)
    wide = sink.detach().double().requires_grad_()
    s = q.double() @ k.double().repeat_interleave(2, 1).transpose(2, 3) / 4
    p = torch.cat([s, wide.view(1, 4, 1, 1).expand(2, 4, 9, 1)], -1).softmax(-1)[..., :-1]
    (want,) = torch.autograd.grad((p @ v.double().repeat_interleave(2, 1)).sum(), wide)
    assert torch.allclose(got.double(), want, rtol=0, atol=1e-4)
    with pytest.raises(ingot.InvalidError, match="align is None; .* 'top_left' or 'bottom_right'"):
        it.attention(q, k, v, causal=True)
    with pytest.raises(ingot.InvalidError, match="q has 3 axes"):
        it.attention(q[0], k, v)
    with pytest.raises(ingot.InvalidError, match="v has 2 axes"):
        op(q, k, v[0, 0], *terms())
    with pytest.raises(ingot.UnsupportedError, match="alibi"):
        slopes = torch.rand(4, requires_grad=True)
        it.attention(q, k, v, alibi=slopes, align="top_left").sum().backward()
    with pytest.raises(ingot.InvalidError, match="q requires a gradient"):
        ingot.attention(q.requires_grad_(), k, v)
    with torch.no_grad():
        ingot.attention(q, k, v)


def test_varlen():
    """Sequences packed on one axis: each as if it were alone, in the output and in the gradients; no other row is touched."""
    lengths_q, lengths_k = (3, 0, 9), (5, 4, 11)
    cu = [torch.tensor([0, *np.cumsum(x)], dtype=torch.int32) for x in (lengths_q, lengths_k)]
    q, k, v = (x.requires_grad_() for x in make("f32", (1, 4, 14, 16), (1, 2, 20, 16), (1, 2, 20, 16)))
    arguments = dict(cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], max_seqlen_q=9, max_seqlen_k=11, causal=True, align="bottom_right")
    out, lse = it.attention_varlen(q, k, v, return_lse=True, **arguments)
    dout = make("f32", out.shape, seed=9)[0]
    grads = torch.autograd.grad(out, (q, k, v), dout)
    assert lse.shape == (4, 14) and (out[:, :, 12:] == 0).all() and (grads[0][:, :, 12:] == 0).all()
    for i in range(3):
        rows, keys = (slice(int(x[i]), int(x[i + 1])) for x in cu)
        own = [x[:, :, y].detach().requires_grad_() for x, y in ((q, rows), (k, keys), (v, keys))]
        alone = it.attention(*own, causal=True, align="bottom_right")
        assert torch.allclose(out[:, :, rows], alone, rtol=0, atol=1e-5)
        for x, y, part in zip(grads, torch.autograd.grad(alone, own, dout[:, :, rows]), (rows, keys, keys)):
            assert torch.allclose(x[:, :, part], y, rtol=0, atol=1e-5)


def terms(bias=None, sink=None, q_lengths=None, k_lengths=None, seed=None, p=0.0, mask=0, varlen=0, sizes=(0, 0, 0)):
    return (bias, None, sink, q_lengths, k_lengths, seed, 0.0, 0.0, p, mask, 1, 0, 0, varlen, *sizes, False, "", True)


def test_opcheck():
    q, k, v = (x.requires_grad_() for x in make("f32", (2, 4, 9, 16), (2, 2, 13, 16), (2, 2, 13, 16)))
    ints = lambda *x: torch.tensor(x, dtype=torch.int32)
    bias, sink = torch.randn(1, 4, 1, 13, requires_grad=True), torch.randn(4, requires_grad=True)
    for given in (
        terms(), terms(mask=1), terms(bias=bias, sink=sink), terms(bias=torch.rand(2, 1, 9, 13) > 0.2),
        terms(k_lengths=ints(13, 4), varlen=0x0400), terms(p=0.2, seed=torch.tensor([3])),
    ):  # fmt: skip
        torch.library.opcheck(op, (q, k, v, *given))
    stacked = [x.detach().reshape(1, x.shape[1], -1, 16).requires_grad_() for x in (q, k, v)]
    packed = terms(q_lengths=ints(0, 9, 18), k_lengths=ints(0, 13, 26), varlen=0x0B0B, sizes=(2, 9, 13))
    torch.library.opcheck(op, (*stacked, *packed))


class Block(torch.nn.Module):
    """A transformer's attention with what surrounds it."""

    def __init__(self, attend):
        super().__init__()
        self.attend, self.norm = attend, torch.nn.LayerNorm(64)
        self.inward, self.outward = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.inward(self.norm(x)).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        return x + self.outward(self.attend(q, k, v).transpose(1, 2).flatten(2))


ATTENDS = {
    "attention": lambda q, k, v: it.attention(q, k, v, causal=True),
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(21, 21, dtype=torch.bool).tril(2)),
}


@pytest.mark.parametrize("backend, name", [("inductor", "sdpa"), *(("aot_eager", x) for x in ATTENDS)])
def test_compile(backend, name):
    torch._dynamo.reset()
    torch.manual_seed(1)
    block, x = Block(ATTENDS[name]), torch.randn(2, 21, 64)
    with it.enable():
        compiled = torch.compile(block, fullgraph=True, backend=backend)
        results = []
        for module in (block, compiled):
            y = module(x)
            results.append((y, *torch.autograd.grad(y.square().sum(), tuple(block.parameters()))))
    for got, want in zip(*results):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)
    assert it.statistics(reset=True)["original"] == {}
    exported = []

    def keep(graph, _):
        exported.extend(str(x.target) for x in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    with it.enable():
        torch.compile(block, fullgraph=True, backend=keep)(x)
    assert any("ingot.attention_forward" in x for x in exported)
    torch._dynamo.reset()


def test_compile_with_dropout_and_other_lengths():
    """Seeds are drawn in the graph, so each call has another; lengths may be dynamic."""
    torch._dynamo.reset()
    with it.enable():
        call = torch.compile(
            lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), fullgraph=True, backend="aot_eager", dynamic=True
        )
        for n in (16, 23, 40):
            q = torch.randn(1, 2, n, 16)
            torch.manual_seed(n)
            first, second = call(q), call(q)
            torch.manual_seed(n)
            assert not torch.equal(first, second) and torch.equal(call(q), first)
    torch._dynamo.reset()


def test_other_ways_to_record():
    """Export, tracers, fake tensors and checkpoints all find the operator; a function mode is no reason to leave it."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.checkpoint import checkpoint

    class Model(torch.nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)

    q, longer = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 9, 16)
    want, model = [Model()(x) for x in (q, longer)], Model()
    with it.enable():
        for strict in (False, True):
            program = torch.export.export(model, (q,), strict=strict, dynamic_shapes={"q": {2: torch.export.Dim("s")}})
            assert any("ingot.attention_forward" in str(x.target) for x in program.graph.nodes)
            assert torch.allclose(program.module()(longer), want[1], rtol=0, atol=1e-6)
        assert "ingot.attention_forward" in make_fx(model)(q).code
        assert "ingot::attention_forward" in str(torch.jit.trace(lambda x: F.scaled_dot_product_attention(x, x, x), (q,)).graph)
        with FakeTensorMode() as mode:
            assert model(mode.from_tensor(longer)).shape == want[1].shape
        leaf = q.clone().requires_grad_()
        kept, made_again = model(leaf).sum(), checkpoint(model, leaf, use_reentrant=False).sum()
        assert torch.equal(*(torch.autograd.grad(x, leaf)[0] for x in (kept, made_again)))
        with torch.inference_mode(), torch.device("cpu"):
            assert torch.allclose(model(q), want[0], rtol=0, atol=1e-6)
    assert it.statistics()["original"] == {}


def test_second_derivatives_are_refused():
    q = torch.randn(1, 2, 5, 16, requires_grad=True)
    fixed = (*terms(),)
    for out in (it.attention(q, q, q), op(q, q, q, *fixed)[0]):
        (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(ingot.UnsupportedError, match="second derivatives"):
            first.sum().backward()


def test_torch_func_grad_is_refused():
    q = torch.randn(3, 2, 5, 16)
    for run in (
        lambda: torch.func.grad(lambda x: it.attention(x, q, q).sum())(q),
        lambda: torch.func.vmap(torch.func.grad(lambda x: it.attention(x[None], q, q).sum()))(q),
        lambda: torch.func.grad(lambda x: torch.func.vmap(lambda y: it.attention(y[None], y[None], y[None]))(x).sum())(q),
    ):
        with pytest.raises(ingot.UnsupportedError, match="no rule for torch.func.grad"):
            run()
    got = torch.func.vmap(lambda x: it.attention(x[None], x[None], x[None]))(q)
    assert torch.equal(got[:, 0], it.attention(q, q, q))


def test_several_gradients_at_once(device):
    """is_grads_batched hands the backward a tensor that stands for several."""
    q, k, v = (torch.randn(1, 2, 5, 16, requires_grad=True) for _ in range(3))
    for out in (it.attention(q, k, v), it.scaled_dot_product_attention(q, k, v)):
        several = torch.randn(3, *out.shape)
        got = torch.autograd.grad(out, (q, k, v), several, is_grads_batched=True, retain_graph=True)
        each = [torch.autograd.grad(out, (q, k, v), x, retain_graph=True) for x in several]
        for x, y in zip(got, zip(*each)):
            # on a GPU sums come in no fixed order
            assert torch.equal(x, torch.stack(y)) if device == "cpu" else torch.allclose(x, torch.stack(y), rtol=0, atol=1e-5)


def test_imaginary_parts_of_conjugated_numbers():
    """Their memory is the values times -1, also where its last axis is dense."""
    q, k, v = (torch.randn(2, 2, 5, 1) for _ in range(3))
    other = lambda x: torch.complex(x, -x).conj().imag
    bias = torch.randn(2, 2, 5, 1)
    want = it.attention(q, k, v), it.attention(q, k, v, bias=bias)
    for made in (other, lambda x: other(x[..., 0])[..., None]):
        args = [made(x) for x in (q, k, v)]
        assert all(x.is_neg() for x in args)
        for attend in (it.attention, it.scaled_dot_product_attention):
            assert torch.equal(attend(*args), want[0])
            assert torch.equal(attend(*[x.requires_grad_() for x in args]), want[0])
        assert torch.equal(it.attention(q, k, v, bias=made(bias).expand(2, 2, 5, 5)), want[1])


def test_autocast(device):
    q, k, v = (x.requires_grad_() for x in make("f32", (2, 3, 20, 16), (2, 3, 30, 16), (2, 3, 30, 16)))
    mask = torch.randn(20, 30)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = it.scaled_dot_product_attention(q, k, v, mask)
        assert original(q, k, v, mask).dtype == torch.bfloat16
        assert it.attention(q, k.bfloat16(), v).dtype == torch.bfloat16
    cast = [x.bfloat16() for x in (q, k, v, mask)]
    assert got.dtype == torch.bfloat16 and torch.equal(got, it.scaled_dot_product_attention(*cast))
    assert [x.dtype for x in torch.autograd.grad(got.sum(), (q, k, v))] == [torch.float32] * 3


def test_enable_and_disable():
    assert F.scaled_dot_product_attention is original
    with it.enable():
        assert F.scaled_dot_product_attention is it.scaled_dot_product_attention
        with it.enable():
            pass
        assert F.scaled_dot_product_attention is it.scaled_dot_product_attention
    assert F.scaled_dot_product_attention is original
    it.enable()
    with pytest.raises(KeyError), it.enable():
        raise KeyError
    assert F.scaled_dot_product_attention is it.scaled_dot_product_attention
    it.disable()
    assert F.scaled_dot_product_attention is original
    with it.enable():
        it.enable()
    assert F.scaled_dot_product_attention is original
    # as those of two threads, neither of which knows of the other
    first, second = it.enable(), it.enable()
    with second:
        with first:
            pass
        assert F.scaled_dot_product_attention is it.scaled_dot_product_attention
    assert F.scaled_dot_product_attention is original


def test_subclasses_and_modes_find_the_function_in_its_place(device):
    """They compare what they are given with torch.nn.functional's, and that is PyTorch's own, as without enable()."""
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left
    from torch.overrides import TorchFunctionMode

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is F.scaled_dot_product_attention and function is original:
                return "mine"
            return super().__torch_function__(function, types, args, kwargs or {})

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function is F.scaled_dot_product_attention and function is original)
            return function(*args, **(kwargs or {}))

    seen = []
    with it.enable():
        for make_bias in (causal_lower_right, causal_upper_left):
            for sq, sk in ((7, 100), (2, 2), (1, 2), (7, 9)):
                q, k, v = make("f32", (2, 4, sq, 16), (2, 4, sk, 16), (2, 4, sk, 16))
                bias = make_bias(sq, sk)
                want = original(q, k, v, bias._materialize(q.device))
                torch._dynamo.reset()
                compiled = torch.compile(lambda *x: F.scaled_dot_product_attention(*x), fullgraph=True, backend="aot_eager")
                # on a GPU PyTorch's own cannot be compiled everywhere
                for run in (F.scaled_dot_product_attention, compiled) if device == "cpu" else (F.scaled_dot_product_attention,):
                    # the mask picks is_causal where that says the same, another kernel with sums in another order
                    assert torch.allclose(run(q, k, v, bias), want, rtol=0, atol=1e-5), (make_bias, sq, sk)
        torch._dynamo.reset()
        q = torch.randn(1, 2, 3, 16)
        assert F.scaled_dot_product_attention(q, q, q.as_subclass(Mine)) == "mine"
        # a compiler leaves such a call out, or says that it cannot
        call = lambda *x: F.scaled_dot_product_attention(*x)
        assert torch.compile(call, backend="aot_eager")(q, q, q.as_subclass(Mine)) == "mine"
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(call, backend="aot_eager", fullgraph=True)(q, q, q.as_subclass(Mine))
        for plain in (torch.nn.Buffer(q), torch.nn.Parameter(q)):
            torch._dynamo.reset()
            got = torch.compile(call, backend="aot_eager", fullgraph=True)(plain, plain, plain)
            # Ingot's kernel sums in another order than PyTorch's
            assert torch.allclose(got, original(plain, plain, plain), rtol=0, atol=1e-5)
        torch._dynamo.reset()
        with Mode():
            F.scaled_dot_product_attention(q, q, q)
        assert seen == [True] and F.scaled_dot_product_attention is it.scaled_dot_product_attention
        with pytest.raises(ZeroDivisionError), it._place.original():
            with it.enable():  # another thread's
                pass
            it.disable()
            1 / 0
        assert F.scaled_dot_product_attention is original
    assert it.statistics(reset=True) == {"ingot": 0, "original": {"a subclass of Tensor": 9, "a mode of torch.overrides": 1}}


def test_memory_is_in_the_order_of_q(device):
    """[B, H, S, D] or [B, S, H, D], as PyTorch has it on the CPU, so that the views which callers take go on working."""
    first = lambda n: torch.randn(2, 4, n, 16)
    second = lambda n: torch.randn(2, n, 4, 16).transpose(1, 2)
    packed = torch.randn(2, 9, 3, 4, 16)
    keep = torch.ones(9, 9, dtype=torch.bool)
    for q, k, v in (
        [first(9)] * 3, [second(9)] * 3, [first(9), second(9), second(9)], [second(9), first(9), first(9)],
        [packed[:, :, i].transpose(1, 2) for i in range(3)], [first(9), *(x[:, :2] for x in (first(9), first(9)))],
    ):  # fmt: skip
        for learns in (False, True):
            for given in (dict(), dict(attn_mask=keep)):
                given["enable_gqa"] = k.shape[1] != 4
                leaf = q.detach().requires_grad_(learns)
                call = lambda q, k, v, function=it.scaled_dot_product_attention: function(q, k, v, **given)
                want = original(leaf, k, v, **given)
                torch._dynamo.reset()
                compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
                for out in (call(leaf, k, v), compiled(leaf, k, v)):
                    rows_first = out.transpose(1, 2).is_contiguous()
                    # Ingot's kernel sums in another order than PyTorch's
                    assert torch.allclose(out, want, rtol=0, atol=1e-5)
                    assert rows_first == (q.stride(1) < q.stride(2)) and rows_first != out.is_contiguous()
                    assert out.stride() == want.stride() or device != "cpu"
    torch._dynamo.reset()
    flat = torch.randn(3, 9, 16)
    assert it.scaled_dot_product_attention(flat, flat, flat).is_contiguous()


def test_forward_mode_is_torchs(device):
    from torch.autograd import forward_ad

    q, k, v = (torch.randn(1, 2, 5, 16) for _ in range(3))
    for learns in (False, True):
        q.requires_grad_(learns)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q, torch.ones_like(q))
            answers = []
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                for run in (original, it.scaled_dot_product_attention):
                    answers.append(forward_ad.unpack_dual(run(dual, k, v)).tangent)
            assert torch.equal(*answers) and answers[0].abs().sum() > 0
            if device == "cpu":
                with pytest.raises((RuntimeError, NotImplementedError)) as refusal:  # PyTorch's: no formula for its fast kernels
                    it.scaled_dot_product_attention(k, dual, v)
                assert not isinstance(refusal.value, ingot.Error)
            with pytest.raises(ingot.UnsupportedError, match="forward-mode"):
                it.attention(k, dual, v)
            with pytest.raises(NotImplementedError):
                op(k, dual, v, *terms())
            # Ingot's kernel sums in another order than PyTorch's
            assert torch.allclose(it.scaled_dot_product_attention(k, k, v), original(k, k, v), rtol=0, atol=1e-5)
    counted = {"backends chosen by torch.nn.attention.sdpa_kernel": 2, "forward-mode differentiation": 2 if device == "cpu" else 0}
    assert it.statistics(reset=True) == {"ingot": 2, "original": {reason: n for reason, n in counted.items() if n}}
    with pytest.raises(ingot.UnsupportedError, match="forward-mode"):
        torch.func.jvp(lambda x: it.attention(x, k, v), (v,), (v,))


def test_backends_chosen_by_sdpa_kernel_are_torchs():
    """Whoever names PyTorch's backends means them; so the way that the refusal of second derivatives names is one."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(1, 2, 5, 16, requires_grad=True)
    with it.enable():
        for backends in (SDPBackend.MATH, [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
            with sdpa_kernel(backends):
                out = F.scaled_dot_product_attention(q, q, q)
            assert it.statistics(reset=True) == {"ingot": 0, "original": {"backends chosen by torch.nn.attention.sdpa_kernel": 1}}
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, q, q)
            (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
            first.sum().backward()
        assert q.grad.abs().sum() > 0

        def chosen(q):
            with sdpa_kernel(SDPBackend.MATH):
                return F.scaled_dot_product_attention(q, q, q)

        graphs = []
        for run in (chosen, lambda q: F.scaled_dot_product_attention(q, q, q)):
            torch._dynamo.reset()
            torch.compile(run, fullgraph=True, backend=lambda graph, _: graphs.append(graph.code) or graph)(q)
        torch._dynamo.reset()
    assert ["attention_forward" in x for x in graphs] == [False, True]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_code_is_torchs():
    class Model(torch.nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    x = torch.randn(3, 2, 5, 16)
    heads, y = torch.nn.MultiheadAttention(64, 4), torch.randn(3, 2, 64)
    want = original(x, x, x), heads(y, y, y)[0]
    with it.enable():
        assert torch.equal(torch.jit.script(Model())(x), want[0])
        assert torch.equal(torch.jit.script(heads)(y, y, y)[0], want[1])


def test_refusals():
    """With the argument's name and a sentence, whatever the framework says of it."""
    q, k = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 7, 16)
    cu, wide = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([0, 5])
    varlen = dict(max_seqlen_q=5, max_seqlen_k=5)
    for error, sentence, call in (
        (TypeError, "q is no tensor of torch but <class 'NoneType'>", lambda: it.attention(None, k, k)),
        (TypeError, "k is no tensor of torch but <class 'list'>", lambda: it.attention(q, [[1.0]], k)),
        (TypeError, "v is no tensor of torch but <class 'numpy.ndarray'>$", lambda: it.attention(q, k, np.zeros((1, 2, 7, 16)))),
        (TypeError, "k_lengths is no tensor", lambda: it.attention(q, k, k, k_lengths=[7])),
        (ValueError, "q is on meta; ", lambda: it.attention(q.to("meta"), k, k)),
        (ValueError, "k is on meta; ", lambda: ingot.attention(q, k.to("meta"), k)),
        (ValueError, "k .*layout torch.sparse_coo; ", lambda: it.attention(q, k.to_sparse(), k)),
        (ValueError, "v .*layout torch.sparse_coo; ", lambda: ingot.attention(q, k, k.to_sparse())),
        (ValueError, "q is a nested tensor; ", lambda: ingot.attention(torch.nested.nested_tensor([q[0]]), k, k)),
        (ValueError, "softmax_scale is 1e-60, which is 0 ", lambda: it.attention(q, k, k, softmax_scale=1e-60)),
        (ValueError, "q is float64; ", lambda: it.attention(q.double(), k, k)),
        (ValueError, "window is .*-1.*None stands for no bound", lambda: it.attention(q, k, k, window=(-1, -1))),
        (TypeError, "cu_seqlens_k is no tensor", lambda: it.attention_varlen(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=[0, 5], **varlen)),
        (ValueError, "cu_seqlens_q.dtype is int64; allowed are int32",
         lambda: it.attention_varlen(q, q, q, cu_seqlens_q=wide, cu_seqlens_k=wide, **varlen)),
    ):  # fmt: skip
        with pytest.raises(error, match=sentence) as raised:
            call()
        assert "frame #" not in str(raised.value) and "\n" not in str(raised.value)


def test_models_of_torch():
    """nn.MultiheadAttention and an encoder layer, training and not, are the same with Ingot in them."""
    torch.manual_seed(3)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    x, padding = torch.randn(3, 17, 64), torch.arange(17) >= torch.tensor([[17], [5], [11]])
    for train in (True, False):
        layer.train(train)
        want = layer(x, src_key_padding_mask=padding)
        grads = torch.autograd.grad(want.square().sum(), tuple(layer.parameters()))
        it.statistics(reset=True)
        with it.enable():
            got = layer(x, src_key_padding_mask=padding)
        assert it.statistics() == {"ingot": 1, "original": {}}
        assert torch.allclose(got, want, rtol=0, atol=1e-5)
        again = torch.autograd.grad(got.square().sum(), tuple(layer.parameters()))
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(again, grads))


def test_what_is_left_to_torch():
    """Counted with the reason, and the result, or the refusal, is PyTorch's."""
    q, k, v = make("f32", (2, 4, 9, 16), (2, 4, 13, 16), (2, 4, 13, 16))
    wide = [x.double() for x in (q, k, v)]
    big = torch.randn(1, 1, 3, 600)
    five = q[None]
    from torch.testing._internal.two_tensor import TwoTensor

    call = it.scaled_dot_product_attention
    it.statistics(reset=True)
    for reason, run in (
        ("a type other", lambda f: f(*wide)),
        ("a scale of 0", lambda f: f(q, k, v, scale=0.0)),
        ("a scale of 0", lambda f: f(q, k, v, scale=1e-60)),
        ("a head size of 0 or beyond 512", lambda f: f(big, big, big)),
        ("not 2 to 4 axes", lambda f: f(five, five, five)),
        ("a subclass", lambda f: f(TwoTensor(q, q), TwoTensor(k, k), TwoTensor(v, v)).a),
        ("torch.func", lambda f: torch.func.vmap(f)(q, k, v)),
        ("torch.func", lambda f: torch.func.grad(lambda x: f(x, k, v).sum())(q)),
        ("enable_gqa without", lambda f: f(q[0], k[0], v[0], enable_gqa=True)),
        ("shapes that do not match", lambda f: f(q, k[:, :3], v)),
        ("shapes that do not match", lambda f: f(q, k[..., :8], v)),
        ("shapes that do not match", lambda f: f(q, k[:, :3], v[:, :3], enable_gqa=True)),
        ("attn_mask together", lambda f: f(q, k, v, torch.ones(9, 13, dtype=torch.bool), is_causal=True)),
        ("attn_mask of another type", lambda f: f(q, k, v, torch.ones(9, 13, dtype=torch.float64))),
        ("attn_mask that does not broadcast", lambda f: f(q, k, v, torch.ones(9, 5))),
        ("attn_mask with fewer axes", lambda f: f(q, k, v, torch.ones(13))),
        ("dropout_p outside", lambda f: f(q, k, v, dropout_p=-0.1)),
        ("dropout_p outside", lambda f: f(q, k[:, :, :0], v[:, :, :0], dropout_p=1 - 1e-9)),
        ("dropout_p or scale that is no", lambda f: f(q, k, v, dropout_p=None)),
        ("dropout_p or scale that is no", lambda f: f(q, k, v, scale="x")),
        ("dropout_p or scale that is no", lambda f: f(q, k, v, scale=torch.tensor([0.3]))),
        ("a scale of 0, NaN or infinity", lambda f: f(q, k[:, :, :0], v[:, :, :0], scale=1e60)),
        ("is_causal or enable_gqa", lambda f: f(q, k, v, is_causal="no")),
        ("is_causal or enable_gqa", lambda f: f(q, k, v, enable_gqa=1)),
        ("an argument that is no tensor", lambda f: f(q, 3, v)),
        ("a device other", lambda f: f(*(x.to("meta") for x in (q, k, v)))),
    ):
        answers = []
        for function in (call, original):
            try:
                answers.append(run(function))
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                answers.append(error)
        if any(isinstance(x, Exception) for x in answers):
            assert [type(x) for x in answers[:1]] == [type(x) for x in answers[1:]] and str(answers[0]) == str(answers[1])
        else:
            assert answers[0].is_meta or torch.equal(*answers)
        counted = it.statistics(reset=True)
        assert counted["ingot"] == 0 and [x.startswith(reason) for x in counted["original"]] == [True], (reason, counted)


def test_settings_of_torch_are_passed_on(monkeypatch, device):
    """Its deterministic mode and its number of threads on the CPU, forward and backward."""
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    seen = []

    def watch(name):
        run = getattr(it._core, name)
        monkeypatch.setattr(it._core, name, lambda **x: (seen.append((x.get("flags"), x["num_threads"])), run(**x))[1])

    watch("attn_fwd")
    watch("attn_bwd")
    for deterministic, threads in ((False, 3), (True, 1)):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        it.scaled_dot_product_attention(q, q, q).sum().backward()
    assert seen == [(None, 3 if device == "cpu" else None)] * 2 + [(1, 1 if device == "cpu" else None)] * 2

    # and on the short way of calls without gradients
    seen.clear()
    monkeypatch.setattr(it._core, "plain_sdpa", lambda *x: seen.append(x[3:]))
    with torch.no_grad():
        it.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.3)
    assert seen[0] == (True, 0.3, False, 1, 1, True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_cuda_graphs():
    """Forward and backward are captured through torch, and a replay reads what the tensors hold by then."""
    q, k, v = (x.cuda() for x in make("bf16", (2, 8, 200, 64), (2, 2, 200, 64), (2, 2, 200, 64)))
    keep = (rand(2, 1, 200, 200) > 0.3).cuda()
    keep[..., 0] = True

    def step(q, k, v):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        first = it.attention(*leaves, causal=True, align="top_left")
        second = F.scaled_dot_product_attention(first, *leaves[1:], enable_gqa=True, attn_mask=keep)
        with torch.no_grad():
            third = F.scaled_dot_product_attention(*leaves, enable_gqa=True, is_causal=True)
        return (second, third, *torch.autograd.grad(second.float().square().sum(), leaves))

    with it.enable():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step(q, k, v)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(q, k, v)
        for seed in (5, 6):
            for x, y in zip((q, k, v), make("bf16", q.shape, k.shape, v.shape, seed=seed)):
                x.copy_(y)
            graph.replay()
            torch.cuda.synchronize()
            want = step(q, k, v)
            assert torch.equal(captured[0], want[0]) and torch.equal(captured[1], want[1])
            # sums over queries come in no fixed order
            for x, y in zip(captured[2:], want[2:]):
                assert (x.float() - y.float()).norm() < 5e-3 * y.float().norm()
    assert it.statistics()["original"] == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_a_call_is_on_the_current_stream():
    q = torch.randn(1, 8, 4096, 64, device="cuda", dtype=torch.bfloat16)
    want = it.attention(q, q, q)
    stream, late = torch.cuda.Stream(), torch.zeros_like(q)
    torch.cuda.synchronize()
    for run in (it.scaled_dot_product_attention, it.attention):
        with torch.cuda.stream(stream):
            late.zero_()
            torch.cuda._sleep(50_000_000)
            late.copy_(q)
            got = run(late, late, late)
        stream.synchronize()
        assert torch.equal(got, want)


def test_nothing_leaks():
    """Ten thousand calls, forward and backward, leave no object and no tensor behind."""
    q = torch.randn(1, 2, 8, 16, requires_grad=True)

    def once():
        it.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        with torch.no_grad():
            ingot.attention(q, q, q, return_lse=True)

    for _ in range(200):
        once()
    gc.collect()
    tensors = lambda: sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
    blocks, before = sys.getallocatedblocks(), tensors()
    for _ in range(10000):
        once()
    gc.collect()
    assert sys.getallocatedblocks() - blocks < 1000 and tensors() - before < 20


def test_overhead_is_printed(capsys, device):
    x, y = torch.ones(1, 1, 1, 64), torch.ones(1, 1, 1, 64, requires_grad=True)
    rows = {
        "ingot.attention": lambda: ingot.attention(x, x, x),
        "ingot.torch.attention": lambda: it.attention(x, x, x),
        "enable(), no gradient": lambda: it.scaled_dot_product_attention(x, x, x),
        "enable(), gradient": lambda: it.scaled_dot_product_attention(y, y, y),
        "torch, no gradient": lambda: original(x, x, x),
        "torch, gradient": lambda: original(y, y, y),
    }
    with capsys.disabled():
        print(f"\n  1x1x1x64 fp32 on {device}, processor time, best of 20:")
        for name, run in rows.items():
            best = float("inf")
            for _ in range(20):
                start = time.process_time()
                for _ in range(200):
                    run()
                best = min(best, (time.process_time() - start) / 200)
                if device == "cuda":
                    torch.cuda.synchronize()
            print(f"  {name:26} {best * 1e6:7.1f} us a call")


def test_the_page_runs():
    """The Python of docs/python.md, as it stands there."""
    page = (c.ROOT / "docs/python.md").read_text()
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S):
        it.statistics(reset=True)
        if "ingot.transformers" in block and not importlib.util.find_spec("transformers"):
            continue
        exec(compile(block, "docs/python.md", "exec"), names)
    assert names["out"].shape == (2, 8, 100, 64)
