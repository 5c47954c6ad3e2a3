"""Short ways to run and judge one call in the cases taken from public bug reports."""

import dense
import ingot_ctypes as ingot
import judge
import numpy as np
from problems import ORACLE_DTYPE

QUICK = [x for x in ingot.kernels("attn_fwd") if not x.startswith("reference/")] + [""]
ALL = ingot.kernels("attn_fwd") + [""]
QUICK_BACKWARD = [x for x in ingot.kernels("attn_bwd") if not x.startswith("reference/")] + [""]
ALL_BACKWARD = ingot.kernels("attn_bwd") + [""]


def rounded(rng, shape, dtype, scale=1.0):
    return ingot.encode(rng.standard_normal(shape) * scale, dtype)


def every(op, backends, **fields):
    """Runs the call on each kernel that takes it; yields the name, after the outputs were poisoned and written."""
    outputs = [
        fields[x]
        for x in ("out", "lse", "dq", "dk", "dv", "dbias", "dsink")
        if isinstance(fields.get(x), ingot.Array) and (op == "attn_fwd" or x not in ("out", "lse"))
    ]
    options, ran = fields.pop("options", {}), 0
    for backend in backends:
        for x in outputs:
            ingot.poison(x.bits)
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
