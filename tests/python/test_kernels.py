"""Every kernel that this machine can run, forced by name, and the library's own choice, against the oracle."""

from dataclasses import replace

import ingot_ctypes as ingot
import judge
import numpy as np
import pytest
from conftest import SEED
from problems import Case, Source, draw_spec

FORWARD = [x for x in ingot.kernels("attn_fwd") if not x.startswith("reference/")]
BACKWARD = [x for x in ingot.kernels("attn_bwd") if not x.startswith("reference/")]
JUDGES = {"attn_fwd": judge.check_forward, "attn_bwd": judge.check_backward}
RUNS = {"attn_fwd": judge.Forward, "attn_bwd": judge.Backward}
EVERY = [("attn_fwd", x) for x in FORWARD + [""]] + [("attn_bwd", x) for x in BACKWARD + [""]]
TILE_EDGES = (47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 255, 256, 257)


def fit(spec, backend):
    """The problem as a kernel takes it: what is left out here is all that a kernel may refuse."""
    eight = spec.kv in ingot.EIGHTS
    if backend.endswith("_bf16") or "_bf16_" in backend:
        spec = replace(
            spec, dtype="bf16", kv=spec.kv if eight else "bf16", out="bf16" if spec.out == spec.dtype else spec.out
        )
    if backend.endswith("_decode"):
        align = "top_left" if spec.align == "unset" else spec.align
        rows = spec.mq if eight else min(spec.mq, 24 // spec.group)
        spec = replace(spec, mq=rows, align=align, dropout=0.0, cells=False)
        if spec.dtype in ingot.EIGHTS:
            spec = replace(spec, dtype="f16", descale=("", *spec.descale[1:]))
        if spec.kv == "e5m2fnuz":
            spec = replace(spec, kv="e5m2")
    elif backend and eight:
        dtype = "bf16" if spec.dtype in ingot.EIGHTS else spec.dtype
        spec = replace(spec, dtype=dtype, kv=dtype, descale=("", "", ""))
    return spec


def specs(op, backend, count, **how):
    for i in range(count):
        s = Source(np.random.default_rng([SEED, i, *op.encode(), *backend.encode()]))
        spec = fit(draw_spec(s, backward=op == "attn_bwd", **how), backend)
        threads = s.of([0, 1, 2, 3, 7])
        flags = s.of([0, ingot.DETERMINISTIC, ingot.BATCH_INVARIANT, ingot.DETERMINISTIC | ingot.BATCH_INVARIANT])
        yield spec, dict(num_threads=threads, flags=flags, **(dict(backend=backend) if backend else {}))


def judged(op, spec, options):
    try:
        return JUDGES[op](Case(spec), options)
    except Exception as error:
        error.add_note(f"{op} {options}\n{spec}")
        raise


@pytest.mark.parametrize("op, backend", EVERY)
def test_small_problems(op, backend):
    for spec, options in specs(op, backend, 70 if op == "attn_fwd" else 50):
        judged(op, spec, options)


@pytest.mark.parametrize("op, backend", EVERY)
def test_tile_edges(op, backend):
    for i, (spec, options) in enumerate(specs(op, backend, 10 if op == "attn_fwd" else 5, head_dims=[16, 64, 72, 128])):
        s = Source(np.random.default_rng([SEED, i, 7]))
        spec = replace(spec, batch=1, heads_k=1, group=s.of([1, 2]), mq=s.of(TILE_EDGES), mk=s.of(TILE_EDGES))
        if spec.align == "unset":
            spec = replace(spec, align="top_left")
        judged(op, fit(spec, backend), options)


@pytest.mark.parametrize("op, backend", EVERY)
def test_large_head_dims(op, backend):
    pairs = [(576, 512), (512, 512), (256, 80), (129, 511), (200, 256)]
    for i, (spec, options) in enumerate(specs(op, backend, 5)):
        d, dv = pairs[i]
        spec = replace(
            spec, d=d, dv=dv, group=min(spec.group, 2), heads_k=1, batch=min(spec.batch, 2), mq=min(spec.mq, 20)
        )
        if spec.align == "unset":
            spec = replace(spec, align="top_left")
        judged(op, fit(spec, backend), options)


@pytest.mark.parametrize("op, backend", EVERY)
def test_result_does_not_depend_on_threads(op, backend):
    """Deterministic: bitwise equal for any number of threads."""
    for spec, options in specs(op, backend, 4, largest=150, eight=False):
        spec = replace(spec, bad=False)
        found = [
            RUNS[op](Case(spec), {**options, "flags": ingot.DETERMINISTIC, "num_threads": n}).bits()
            for n in (1, 2, 3, 7, 64)
        ]
        assert all(x == found[0] for x in found), f"{options}\n{spec}"


@pytest.mark.parametrize("op, backend", EVERY)
def test_workspace_is_exact_and_may_hold_anything(op, backend):
    """HD-01: a workspace full of 0, NaN or 1e30 changes nothing; what the call says it needs is enough; a byte less is
    refused, with nothing written."""
    for spec, options in specs(op, backend, 4, largest=100, head_dims=[40, 72, 88, 104, 120]):
        spec, options["flags"] = replace(spec, bad=False), ingot.DETERMINISTIC
        params = RUNS[op](Case(spec), options).params
        size = ingot.workspace(op, params, options)
        memory = np.zeros(size + 1024, np.uint8)
        at = -memory.ctypes.data % 256
        found = []
        for fill in (0.0, np.nan, 1e30):
            memory[: len(memory) // 4 * 4].view(np.float32)[...] = fill
            memory[at + size :] = 0x5A
            given = dict(options, workspace=memory.ctypes.data + at, workspace_size=size) if size else options
            found.append(RUNS[op](Case(spec), given).bits())
            assert (memory[at + size :] == 0x5A).all(), "wrote past the workspace"
        assert found[0] == found[1] == found[2], f"{options}\n{spec}"
        if size:
            with pytest.raises(ingot.Refused, match="workspace") as refused:
                ingot.call(op, params, dict(options, workspace=memory.ctypes.data + at, workspace_size=size - 1))
            assert refused.value.name == "INGOT_WORKSPACE"


@pytest.mark.parametrize("backend", FORWARD + [""])
def test_batch_invariant(backend):
    """A sequence's result is the same bits alone and among others."""
    for i in range(4):
        s = Source(np.random.default_rng([SEED, i, 11]))
        dtype = "bf16" if "_bf16" in backend else s.of(["f32", "f16", "bf16"])
        b, hq, hk, sq, sk, d = s.of([2, 5, 8]), 8, s.of([1, 2, 8]), s.of([1, 3, 8]), s.between(1, 900), s.of([64, 128])
        if "_decode" in backend:
            sq = min(sq, 24 * hk // hq)
        lengths = s.rng.integers(0, sk + 1, b)
        q, k, v = (
            ingot.encode(s.rng.standard_normal(x), dtype) for x in ((b, hq, sq, d), (b, hk, sk, d), (b, hk, sk, d))
        )
        options = dict(flags=ingot.BATCH_INVARIANT, **(dict(backend=backend) if backend else {}))

        def run(at):
            cut = lambda x: ingot.Array(x.bits[at], dtype)
            out = ingot.empty((len(range(b)[at]), hq, sq, d), dtype)
            ingot.attn_fwd(
                options=options,
                q=cut(q),
                k=cut(k),
                v=cut(v),
                out=out,
                varlen=ingot.varlen(k=(0, 2, 0)),
                k_lengths=ingot.ints(lengths[at]),
                mask=ingot.MASK_CAUSAL,
                align=ingot.BOTTOM_RIGHT,
            )
            return out.bits.view(np.uint32 if dtype == "f32" else np.uint16)

        whole = run(slice(None))
        for one in range(b):
            assert np.array_equal(whole[one : one + 1], run(slice(one, one + 1))), (backend, dtype, lengths, one)


def test_choice_names_are_forced_exactly():
    """A forced name runs that kernel or nothing: no fallback, and a name that is none is NOT_FOUND."""
    q = ingot.encode(np.ones((1, 1, 2, 4)), "f32")
    call = dict(q=q, k=q, v=q, out=ingot.empty((1, 1, 2, 4), "f32"))
    with pytest.raises(ingot.Refused, match="attn_fwd_avx9000") as refused:
        ingot.attn_fwd(options=dict(backend="x86/attn_fwd_avx9000"), **call)
    assert refused.value.name == "INGOT_NOT_FOUND"
    for backend in ingot.kernels("attn_fwd"):
        if "_bf16" in backend:
            with pytest.raises(ingot.Refused, match="bf16") as refused:
                ingot.attn_fwd(options=dict(backend=backend), **call)
            assert refused.value.name == "INGOT_UNSUPPORTED"
            continue
        text = ingot.explain("attn_fwd", ingot.make_params("attn_fwd", **call), dict(backend=backend))
        assert backend.split("/")[1] in text
        ingot.attn_fwd(options=dict(backend=backend), **call)
        assert (call["out"].values == 1).all()
