"""Short ways to run and judge one call in the cases taken from public bug reports.

A call is a dict of fields, as make_params takes them; what the formula needs of a sequence (mask, bias, sinks, scale) is read
from the same fields, so that a case says it once.
"""

from collections import deque
from typing import NamedTuple

import dense
import ingot_ctypes as ingot
import judge
import numpy as np
from ingot_ctypes import BOTTOM_RIGHT, MASK_CAUSAL, MASK_WINDOW, TOP_LEFT, UNBOUNDED
from problems import ORACLE_DTYPE

QUICK = [x for x in ingot.kernels("attn_fwd") if not x.startswith("reference/")] + [""]
ALL = ingot.kernels("attn_fwd") + [""]
QUICK_BACKWARD = [x for x in ingot.kernels("attn_bwd") if not x.startswith("reference/")] + [""]
ALL_BACKWARD = ingot.kernels("attn_bwd") + [""]
# With the textbook, but without the fp64 reference, which takes minutes where these are used.
TEXTBOOK = QUICK + ["reference/attn_fwd_reference"]
TEXTBOOK_BACKWARD = QUICK_BACKWARD + ["reference/attn_bwd_reference"]

CU = ingot.varlen((1, 1, 1), (1, 1, 1))  # both sides stacked, cumulative, reused
LENGTHS = ingot.varlen((0, 2, 0), (0, 2, 0))  # both sides padded, with lengths
KEY_LENGTHS = ingot.varlen(k=(0, 2, 0))
CAUSAL = dict(mask=MASK_CAUSAL, align=BOTTOM_RIGHT)
CAUSAL_TOP_LEFT = dict(mask=MASK_CAUSAL, align=TOP_LEFT)
DETERMINISTIC = dict(flags=ingot.DETERMINISTIC)


def rounded(rng, shape, dtype, scale=1.0):
    return ingot.encode(rng.standard_normal(shape) * scale, dtype)


def arrays(rng, dtype, scale=1.0, **shapes):
    """name -> normal values."""
    return {name: rounded(rng, shape, dtype, scale) for name, shape in shapes.items()}


def lengths(q, k):
    """The fields of both sides' lengths."""
    return dict(q_lengths=ingot.ints(q), k_lengths=ingot.ints(k))


def cumulative(q, k):
    """The fields of sequences packed on both sides, from their cumulative lengths."""
    most = [int(np.diff(x).max()) for x in (q, k)]
    return dict(varlen=CU, batch=len(q) - 1, max_seqlen_q=most[0], max_seqlen_k=most[1], **lengths(q, k))


def every(op, backends, fill=None, **fields):
    """Runs the call on each kernel that takes it; yields the name, after the outputs were poisoned (or filled) and written."""
    outputs = [
        fields[x]
        for x in ("out", "lse", "dq", "dk", "dv", "dbias", "dsink")
        if isinstance(fields.get(x), ingot.Array) and (op == "attn_fwd" or x not in ("out", "lse"))
    ]
    options, ran = fields.pop("options", {}), 0
    for backend in backends:
        for x in outputs:
            if fill is None:
                ingot.poison(x.bits)
            else:
                x.bits[...] = ingot.encode_bits(np.full(x.bits.shape, fill), x.dtype)
        try:
            ingot.call(op, ingot.make_params(op, **fields), {**options, **(dict(backend=backend) if backend else {})})
        except ingot.Refused as refused:
            assert refused.name == "INGOT_UNSUPPORTED" and backend, (backend, refused)
            continue
        ran += 1
        yield backend or "chosen"
    assert ran > 1, "no kernel took the call by name"


_expected = {}


def expected(formula, *arrays, dtype, **how):
    """(in double, by the textbook algorithm in dtype), computed once for all kernels that are held to it."""
    key = [formula.__name__, dtype]
    for x in [*arrays, *(y for pair in sorted(how.items(), key=lambda x: x[0]) for y in pair)]:
        key.append((x.shape, x.strides, hash(x.tobytes())) if isinstance(x, np.ndarray) else x)
    key = tuple(key)
    if key not in _expected:
        while len(_expected) >= 100:
            del _expected[next(iter(_expected))]
        _expected[key] = formula(*arrays, **how), formula(*arrays, **how, dtype=ORACLE_DTYPE[dtype])
    return _expected[key]


def check(name, got, want, yardstick, dtype, scale=None):
    try:
        judge.check_values(name, got, want, [yardstick], dtype, scale)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None


def check_sequence(name, q, k, v, out, lse, dtype, **how):
    """out [H,S,Dv] and lse [H,S] values of one sequence against the formula. q, k, v: their values."""
    (want, want_lse), (yardstick, yardstick_lse) = expected(dense.attend, q, k, v, dtype=dtype, **how)
    check(name, out, want, yardstick, dtype)
    if lse is not None:
        judge.check_lse(lse, want_lse, [yardstick_lse])


def check_gradients(name, q, k, v, dout, grads, dtype, **how):
    want, yardstick = expected(dense.gradients, q, k, v, dout, dtype=dtype, **how)
    for key, got in grads.items():
        held = judge.oracle.round_to(yardstick[key][0], ORACLE_DTYPE[dtype])
        check(f"{name} {key}", got, want[key][0], held, dtype, yardstick[key][1])


# ---- whole calls ----


def is_stacked(fields):
    return fields.get("varlen", 0) & 1


def outputs(lse=True, **fields):
    """out, and lse if wanted, of a forward."""
    q, v = fields["q"], fields["v"]
    shape = [*q.bits.shape[:3], v.bits.shape[3]]
    rows = shape[1:3] if is_stacked(fields) else shape[:3]
    return dict(out=ingot.empty(shape, q.dtype), **(dict(lse=ingot.empty(rows, "f32")) if lse else {}))


def given(dout=None, dbias=None, **fields):
    """out and lse as the chosen forward writes them, for a backward."""
    made = outputs(**fields)
    ingot.attn_fwd(**made, **fields)
    return made


def forward(backends, fields, lse=True, **how):
    """Each kernel's name, out and lse (None if it is not wanted)."""
    made = outputs(lse, **fields)
    for name in every("attn_fwd", backends, **made, **fields, **how):
        yield name, made["out"], made.get("lse")


def backward(backends, fields, want=("dq", "dk", "dv"), **how):
    """Each kernel's name and gradients, from the chosen forward's out and lse."""
    grads = {name: ingot.empty(fields[name[1:]].bits.shape, fields[name[1:]].dtype) for name in want}
    for name in every("attn_bwd", backends, **given(**fields), **grads, **fields, **how):
        yield name, grads


class Part(NamedTuple):
    """A sequence of a call: its slot, and its rows on both sides."""

    b: int = 0
    q: slice | np.ndarray = slice(None)
    k: slice = slice(None)
    lse: bool = True  # whether it is judged
    terms: dict | None = None  # of the formula; None: as the call's fields say


def packed(q, k):
    """The parts of cumulative lengths that have rows."""
    pairs = zip(zip(q, q[1:]), zip(k, k[1:]))
    return [Part(q=slice(*rows), k=slice(*keys)) for rows, keys in pairs if rows[0] < rows[1]]


def terms_of(fields, part, rows, keys):
    terms = {}
    if fields.get("mask"):
        left, right = None, 0
        if fields["mask"] == MASK_WINDOW:
            bounds = fields["window_left"], fields["window_right"]
            left, right = (None if x == UNBOUNDED else x for x in bounds)
        terms["valid"] = dense.band(rows, keys, left, right, fields.get("align") == BOTTOM_RIGHT)
    if fields.get("bias"):
        bias = fields["bias"].values
        bias = bias[min(part.b, len(bias) - 1)]
        terms["bias"] = bias[:, part.q if bias.shape[1] > 1 else slice(None)][:, :, part.k]
    if fields.get("sink"):
        terms["sink"] = fields["sink"].values
    if fields.get("softmax_scale"):
        terms["scale"] = float(np.float32(fields["softmax_scale"]))
    return terms


def parts_of(fields, parts):
    """The parts, or else each batch element whole: (part, q, k and v of it, the formula's terms)."""
    for part in parts or [Part(b) for b in range(fields["q"].bits.shape[0])]:
        q = fields["q"].values[part.b][:, part.q]
        k, v = (fields[x].values[part.b][:, part.k] for x in "kv")
        yield part, (q, k, v), terms_of(fields, part, q.shape[1], k.shape[1]) if part.terms is None else part.terms


def held_forward(fields, backends, parts=None, lse=True, **how):
    """As forward, with every part held to the formula before its kernel is named."""
    expect = list(parts_of(fields, parts))
    for name, out, sums in forward(backends, fields, lse, **how):
        rows = sums and (sums.values[None] if is_stacked(fields) else sums.values)
        for part, tensors, terms in expect:
            check_sequence(
                f"{name}, {part}" if len(expect) > 1 else name,
                *tensors,
                out.values[part.b][:, part.q],
                rows[part.b][:, part.q] if sums and part.lse else None,
                fields["q"].dtype,
                **terms,
            )
        yield name, out, sums


def held_backward(fields, backends, parts=None, **how):
    """As backward, with every part held to the formula before its kernel is named."""
    expect = list(parts_of(fields, parts))
    for name, grads in backward(backends, fields, **how):
        for part, tensors, terms in expect:
            check_gradients(
                f"{name}, {part}" if len(expect) > 1 else name,
                *tensors,
                fields["dout"].values[part.b][:, part.q],
                {x: y.values[part.b][:, part.q if x == "dq" else part.k] for x, y in grads.items()},
                fields["q"].dtype,
                **terms,
            )
        yield name, grads


def hold_forward(*call, **how):
    deque(held_forward(*call, **how), maxlen=0)


def hold_backward(*call, **how):
    deque(held_backward(*call, **how), maxlen=0)
