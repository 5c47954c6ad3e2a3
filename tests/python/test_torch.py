"""PyTorch's scaled_dot_product_attention on the CPU as an independent second oracle, forward and by autograd.

Both sides get the same stored bits. torch computes the formula in double from them, so that the library's error is held
to the textbook algorithm's; torch's own result in each type is held to the same bound, as a check of the bound.
"""

import dense
import ingot_ctypes as ingot
import judge
import numpy as np
import pytest
from ingot_ctypes import BOTTOM_RIGHT, MASK_CAUSAL, TOP_LEFT
from problems import ORACLE_DTYPE

torch = pytest.importorskip("torch", reason="torch is not installed (tests/requirements-torch.txt)")
pytestmark = pytest.mark.torch
sdpa = torch.nn.functional.scaled_dot_product_attention
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
BACKENDS = [x for x in ingot.kernels("attn_fwd") if not x.endswith("reference_f64")] + [""]


def array(tensor):
    """A torch tensor as the library's array, over the same memory."""
    name = {kind: name for name, kind in TYPES.items()}.get(tensor.dtype) or {torch.bool: "bool"}[tensor.dtype]
    bits = tensor.detach().view(torch.uint16) if name == "bf16" else tensor.detach()
    return ingot.Array(bits.numpy(), name)


def run(q, k, v, backend="", **fields):
    """The library's (out, lse) as torch tensors."""
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype)
    lse = torch.full(q.shape[:3], float("nan"))
    ingot.attn_fwd(
        options=dict(backend=backend) if backend else None,
        q=array(q), k=array(k), v=array(v), out=array(out), lse=array(lse), **fields,
    )  # fmt: skip
    return out, lse


def compare(name, got, exact, yardstick, dtype, scale=None):
    double = lambda x: x.detach().double().cpu().numpy()
    judge.check_values(name, double(got), double(exact), [yardstick], dtype, scale)


def takes(backend, dtype, rows=0):
    """Whether a kernel must run this: pairs of bf16 are its name, and so are the few query rows of a key head."""
    return not ("_bf16" in backend and dtype != "bf16" or backend.endswith("_decode") and rows > 24)


def make(dtype, *shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(x, generator=generator, device="cpu").to(TYPES[dtype]) for x in shapes]


def textbook(q, k, v, dtype, **how):
    """The textbook algorithm's result, sequence by sequence."""
    values = lambda x: x.detach().double().numpy()
    found = [
        dense.attend(values(q)[b], values(k)[b], values(v)[b], **how, dtype=ORACLE_DTYPE[dtype])[0]
        for b in range(len(q))
    ]
    return np.stack(found)


SHAPES = [(1, 1, 1, 1, 8, 8), (2, 4, 33, 17, 64, 64), (1, 2, 64, 64, 64, 64), (1, 2, 65, 129, 64, 64)] + [
    (1, 2, 48, 47, 128, 128), (2, 2, 7, 200, 40, 24), (1, 3, 128, 128, 96, 96), (1, 1, 257, 255, 128, 128)
]  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
def test_forward(dtype, mask):
    for i, (b, h, sq, sk, d, dv) in enumerate(SHAPES):
        q, k, v = make(dtype, (b, h, sq, d), (b, h, sk, d), (b, h, sk, dv), seed=i)
        fields, given, how = {}, {}, {}
        if mask == "causal":
            fields, given = dict(mask=MASK_CAUSAL, align=TOP_LEFT), dict(is_causal=True)
            how["valid"] = dense.band(sq, sk, None, 0)
        elif mask == "bool":
            keep = torch.rand((b, 1, sq, sk), generator=torch.Generator().manual_seed(i)) > 0.3
            keep[..., 0] = True
            fields, given = dict(bias=array(keep)), dict(attn_mask=keep)
        elif mask == "float":
            bias = make(dtype, (1, h, sq, sk), seed=i + 100)[0]
            fields, given = dict(bias=array(bias)), dict(attn_mask=bias)
        wide = {x: y.double() if torch.is_tensor(y) and y.dtype != torch.bool else y for x, y in given.items()}
        exact = sdpa(q.double(), k.double(), v.double(), **wide)
        if mask in ("bool", "float"):
            table = torch.where(keep, 0.0, -torch.inf) if mask == "bool" else bias
            table = table.double().numpy()
            yardstick = np.concatenate(
                [
                    textbook(q[x : x + 1], k[x : x + 1], v[x : x + 1], dtype, bias=table[min(x, len(table) - 1)])
                    for x in range(b)
                ]
            )
        else:
            yardstick = textbook(q, k, v, dtype, **how)
        for backend in BACKENDS:
            if takes(backend, dtype, sq):
                out, _ = run(q, k, v, backend, **fields)
                compare(f"{backend} {b, h, sq, sk, d, dv}", out, exact, yardstick, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_torch_keeps_to_the_same_bound(dtype):
    """The bound is no softer than what a good implementation needs: torch's own result in this type passes it too."""
    q, k, v = make(dtype, (2, 4, 96, 64), (2, 4, 130, 64), (2, 4, 130, 64))
    compare("torch", sdpa(q, k, v), sdpa(q.double(), k.double(), v.double()), textbook(q, k, v, dtype), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hq, hk", [(4, 1), (6, 2), (9, 3)])
def test_grouped_heads_and_scale(dtype, hq, hk):
    q, k, v = make(dtype, (2, hq, 37, 64), (2, hk, 70, 64), (2, hk, 70, 64))
    exact = sdpa(q.double(), k.double(), v.double(), scale=0.3, enable_gqa=True)
    yardstick = textbook(q, k, v, dtype, scale=float(np.float32(0.3)))
    for backend in BACKENDS:
        if takes(backend, dtype, 37 * hq // hk):
            out, _ = run(q, k, v, backend, softmax_scale=0.3)
            compare(backend, out, exact, yardstick, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_lse(dtype):
    q, k, v = make(dtype, (2, 2, 40, 64), (2, 2, 90, 64), (2, 2, 90, 64))
    exact = torch.logsumexp(q.double() @ k.double().transpose(2, 3) / 8, -1).numpy()
    for backend in BACKENDS:
        if takes(backend, dtype, 40):
            _, lse = run(q, k, v, backend)
            judge.check_lse(lse.double().numpy(), exact, [exact])


@pytest.mark.parametrize("dtype", TYPES)
def test_views_without_a_copy(dtype):
    """A packed [B,S,3,H,D] projection, transposed views and an expanded key head are read where they are."""
    packed = make(dtype, (2, 65, 3, 4, 64))[0]
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    exact = sdpa(q.double(), k.double(), v.double())
    yardstick = textbook(q, k, v, dtype)
    out = torch.full((2, 65, 4, 64), float("nan"), dtype=q.dtype).transpose(1, 2)
    one_k, one_v = (x[:, :1].expand(2, 4, 65, 64) for x in (k, v))
    exact_one = sdpa(q.double(), one_k.double(), one_v.double())
    yardstick_one = textbook(q, one_k, one_v, dtype)
    for backend in BACKENDS:
        if not takes(backend, dtype, 65):
            continue
        for keys, values, want, own in ((k, v, exact, yardstick), (one_k, one_v, exact_one, yardstick_one)):
            out.fill_(float("nan"))
            ingot.attn_fwd(
                options=dict(backend=backend) if backend else None,
                q=array(q),
                k=array(keys),
                v=array(values),
                out=array(out),
            )
            compare(backend, out, want, own, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("hq, hk", [(2, 2), (4, 2)])
def test_backward_is_autograd(dtype, mask, hq, hk):
    for sq, sk, d in ((33, 47, 64), (64, 64, 40), (65, 130, 128)):
        q, k, v, dout = make(dtype, (1, hq, sq, d), (1, hk, sk, d), (1, hk, sk, d), (1, hq, sq, d), seed=sq)
        fields, given, how = {}, {}, {}
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        if mask == "causal":
            fields, given = dict(mask=MASK_CAUSAL, align=TOP_LEFT), dict(is_causal=True)
            how["valid"] = dense.band(sq, sk, None, 0)
        elif mask == "bool":
            keep = torch.rand((1, 1, sq, sk), generator=torch.Generator().manual_seed(sq)) > 0.3
            keep[..., 0] = True
            fields, given = dict(bias=array(keep)), dict(attn_mask=keep)
            how["valid"] = keep[0].numpy()
        elif mask == "float":
            bias = make(dtype, (1, hq, sq, sk), seed=100)[0]
            wide.append(bias.double().requires_grad_())
            fields, given, how["bias"] = dict(bias=array(bias)), dict(attn_mask=wide[3]), bias.double().numpy()[0]
        sdpa(*wide[:3], **given, enable_gqa=hq != hk).backward(dout.double())
        values = [x.double().numpy()[0] for x in (q, k, v, dout)]
        yardstick = dense.gradients(*values, **how, dtype=ORACLE_DTYPE[dtype])
        out, lse = run(q, k, v, **fields)
        for backend in [x for x in ingot.kernels("attn_bwd") if not x.endswith("reference_f64")] + [""]:
            if not takes(backend, dtype):
                continue
            grads = {name: torch.full_like(x, float("nan")) for name, x in (("dq", q), ("dk", k), ("dv", v))}
            if mask == "float":
                grads["dbias"] = torch.full_like(bias, float("nan"))
            ingot.attn_bwd(
                options=dict(backend=backend) if backend else None,
                q=array(q), k=array(k), v=array(v), out=array(out), lse=array(lse), dout=array(dout), **fields,
                **{name: array(x) for name, x in grads.items()},
            )  # fmt: skip
            for (name, got), true in zip(grads.items(), wide):
                if name == "dbias":
                    own, scale = (
                        judge.oracle.round_to(yardstick["ds"][0], ORACLE_DTYPE[dtype])[None],
                        yardstick["ds"][1],
                    )
                    compare(f"{backend} dbias", got, true.grad, own, dtype, scale)
                    continue
                own = judge.oracle.round_to(yardstick[name][0], ORACLE_DTYPE[dtype])
                compare(f"{backend} {name}", got[0], true.grad[0], own, dtype, yardstick[name][1])


def test_bottom_right_is_torchs_lower_right():
    bias = pytest.importorskip("torch.nn.attention.bias")
    q, k, v = make("f32", (1, 2, 20, 32), (1, 2, 50, 32), (1, 2, 50, 32))
    exact = sdpa(q, k, v, attn_mask=bias.causal_lower_right(20, 50))
    out, _ = run(q, k, v, mask=MASK_CAUSAL, align=BOTTOM_RIGHT)
    assert (out - exact).abs().max() < 1e-5
