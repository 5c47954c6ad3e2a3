"""ingot.torch.distributed on gloo processes: the ring against the formula on the whole sequence, by the rule of the
specification; what it skips, what it refuses, and what happens when a rank is gone."""

import multiprocessing
import multiprocessing.forkserver
import os
import subprocess
import sys

import dense
import ingot
import ingot_ctypes as c
import judge
import numpy as np
import pytest
from conftest import SEED
from problems import ORACLE_DTYPE

torch = pytest.importorskip("torch", reason="torch is not installed (tests/requirements-torch.txt)")
pytestmark = [pytest.mark.torch, pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="no gloo")]

import ingot.torch as it
import ring_worker
from ingot.torch import distributed as ring

PATIENCE = 90


class Ranks:
    """Processes that make one group of all, and those that ring_worker makes of it."""

    def __init__(self, size, folder, timeout):
        # Forked off a server that has imported torch once, and has no threads.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["ring_worker"])
        self.size, self.processes, self.ends = size, [], []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
            multiprocessing.forkserver.ensure_running()
        for rank in range(size):
            mine, theirs = context.Pipe()
            arguments = (theirs, rank, size, str(folder / "store"), timeout)
            process = context.Process(target=ring_worker.serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.ends.append(mine)
        for end in self.ends:
            assert end.poll(PATIENCE), "a rank did not start"
            end.recv()

    def each(self, name, size, without=(), **given):
        """The function's result, or the exception, on every rank of the group of that size, but for some."""
        ends = self.ends[1::2] if size == 2 and self.size == 4 else self.ends[:size]
        for end in ends:
            end.send((name, dict(size=size, **given)))
        ends = [x for i, x in enumerate(ends) if i not in without]
        for end in ends:
            assert end.poll(PATIENCE), f"{name} did not end"
        return [end.recv() for end in ends]

    def call(self, name, size, **given):
        """The same, where none may raise."""
        results = self.each(name, size, **given)
        for x in results:
            if isinstance(x, Exception):
                raise x
        return results

    def attend(self, size, **given):
        return self.call("attend", size, seed=SEED, **given)[0]

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made = Ranks(4, tmp_path_factory.mktemp("ring"), 60)
    yield made
    made.close()


# ---- against the formula ----


def held(found, dtype, shapes, window=None, bottom_right=False, scale=0.0):
    """What attend of ring_worker found, by the rule. The oracle is asked sequence by sequence."""
    *tensors, dout = (x.double().numpy() for x in ring_worker.make(dtype, *shapes, seed=SEED))
    q, k = tensors[:2]
    how = dict(scale=scale)
    if window is not None:
        how["valid"] = dense.band(q.shape[2], k.shape[2], *window, bottom_right)
    own = lambda x: judge.oracle.round_to(x, ORACLE_DTYPE[dtype])
    for i in range(len(q)):
        one = [x[i] for x in tensors]
        with np.errstate(divide="ignore"):
            (exact, exact_lse), (textbook, lse) = (dense.attend(*one, **how, dtype=x) for x in ("", ORACLE_DTYPE[dtype]))
            true, yardstick = (dense.gradients(*one, dout[i], **how, dtype=x) for x in ("", ORACLE_DTYPE[dtype]))
        judge.check_values("out", found["out"][i], exact, [textbook], dtype)
        judge.check_lse(found["lse"][i], exact_lse, [lse])
        for name in ("dq", "dk", "dv"):
            if name in found:
                judge.check_values(name, found[name][i], true[name][0], [own(yardstick[name][0])], dtype, yardstick[name][1])


def shapes_of(sq, sk, hq=4, hk=2, d=16, dv=24, batch=2):
    return [(batch, hq, sq, d), (batch, hk, sk, d), (batch, hk, sk, dv), (batch, hq, sq, dv)]


MASKS = {
    "none": (dict(), {}),
    "causal": (dict(causal=True), dict(window=(None, 0))),
    "window": (dict(window=(9, 4)), dict(window=(9, 4))),
    "behind": (dict(window=(None, -3)), dict(window=(None, -3))),
    "ahead": (dict(window=(-2, None)), dict(window=(-2, None))),
    "causal window": (dict(causal=True, window=(6, 3)), dict(window=(6, 0))),
}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("layout", ring._LAYOUT)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_is_the_whole(ranks, size, mask, layout, dtype):
    """A length that no number of slices divides, grouped heads, output and gradients."""
    shapes = shapes_of(53, 53)
    given, how = MASKS[mask]
    held(ranks.attend(size, dtype=dtype, shapes=shapes, layout=layout, **given), dtype, shapes, **how)


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("layout", ring._LAYOUT)
@pytest.mark.parametrize("sq, sk", [(19, 61), (61, 19), (3, 2)])
def test_q_and_k_of_other_lengths(ranks, sq, sk, layout, align):
    """Alignment is that of the whole; rows without a key are 0 and -inf; there may be fewer rows than ranks."""
    for window in ((None, 0), (4, 3)):
        shapes = shapes_of(sq, sk)
        found = ranks.attend(4, dtype="f32", shapes=shapes, layout=layout, align=align, window=window)
        held(found, "f32", shapes, window, align == "bottom_right")


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_slices_of_any_length(ranks, dtype):
    shapes, lengths = shapes_of(30, 41, hq=3, hk=3, d=64, dv=64), ((11, 0, 16, 3), (7, 20, 14, 0))
    given = dict(dtype=dtype, shapes=shapes, lengths=lengths, causal=True, align="bottom_right")
    held(ranks.attend(4, **given), dtype, shapes, (None, 0), True)


@pytest.mark.parametrize("given", [dict(softcap=1.5), dict(softmax_scale=-0.2), dict(backend="reference", deterministic=True)])
def test_terms_are_passed_on(ranks, given):
    shapes = shapes_of(40, 40)
    found = ranks.attend(3, dtype="f32", shapes=shapes, layout="zigzag", causal=True, **given)
    q, k, v, dout = ring_worker.make("f32", *shapes, seed=SEED)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = it.attention(*leaves, causal=True, return_lse=True, **given)
    for name, x in zip(found, (out, lse, *torch.autograd.grad(out, leaves, dout))):
        # that the term arrives: without it more than the last digits differ
        assert np.allclose(found[name], x.detach().numpy(), rtol=0, atol=1e-5), name


@pytest.mark.parametrize("learn", ["q", "k", "v", "qv", ""])
def test_gradients_of_some(ranks, learn):
    shapes = shapes_of(21, 21)
    given = dict(dtype="f32", shapes=shapes, layout="zigzag", causal=True)
    every, some = (ranks.attend(4, learn=x, **given) for x in ("qkv", learn))
    assert set(some) == {"out", "lse", *(f"d{x}" for x in learn)}
    for name, x in some.items():
        assert np.array_equal(x, every[name])


def test_bits_do_not_depend_on_timing(ranks):
    given = dict(dtype="bf16", shapes=shapes_of(64, 64), layout="zigzag", causal=True)
    first, *others = (ranks.attend(4, delay=x, **given) for x in (False, True, True))
    for other in others:
        assert all(np.array_equal(first[x], other[x]) for x in first)


def test_alone():
    """Without torch.distributed: ingot.torch.attention itself, and nothing is cut."""
    q, k, v = (x.requires_grad_() for x in ring_worker.make("f32", *[(1, 2, 7, 8)] * 3))
    want = it.attention(q, k, v, causal=True)
    out, lse = ring.ring_attention(q, k, v, causal=True, layout="zigzag", return_lse=True)
    assert torch.equal(out, want) and lse.shape == (1, 2, 7)
    for x, y in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(want.sum(), (q, k, v))):
        assert torch.equal(x, y)
    assert torch.equal(ring.shard(q, 2, layout="zigzag"), q)
    assert ring.position_ids(5, layout="zigzag").tolist() == [0, 1, 2, 3, 4]
    with torch.no_grad():
        assert ring.unshard(q, 2) is q
    with pytest.raises(ingot.InvalidError, match="group is given, but torch.distributed is not initialized"):
        ring.ring_attention(q, k, v, group=3)
    compiled = torch.compile(lambda x: ring.ring_attention(x, k, v, causal=True) * 2, backend="eager")
    assert torch.equal(compiled(q), want * 2)
    torch._dynamo.reset()


# ---- who holds what, and what is left out ----


def test_shard_and_unshard(ranks):
    for size, layout, extent, positions in (
        (2, "contiguous", 5, [[0, 1, 2], [3, 4]]),
        (3, "contiguous", 2, [[0], [1], []]),
        (2, "zigzag", 8, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (3, "zigzag", 14, [[0, 1, 2, 12, 13], [3, 4, 5, 10, 11], [6, 7, 8, 9]]),
        (4, "zigzag", 3, [[0], [1], [2], []]),
    ):
        for dim, kind in ((1, "float32"), (-1, "bfloat16"), (0, "int64"), (2, "bool")):
            found = ranks.call("whole", size, layout=layout, extent=extent, dim=dim, kind=kind)
            assert [x["positions"] for x in found] == positions and [x["rows"] for x in found] == [len(x) for x in positions]
    for layout in ring._LAYOUT:
        ranks.call("learn_through_shard", 3, layout=layout)


def test_what_the_mask_excludes_is_skipped(ranks):
    """Blocks attended to on each rank, and exchanges, forward and backward: zigzag is even, a window ends the round early."""
    count = lambda **given: ranks.call("count", 4, seqlen=64, **given)
    for given, blocks, messages in (
        (dict(), [4] * 4, 3 + 7),
        (dict(causal=True), [1, 2, 3, 4], 3 + 7),
        (dict(layout="zigzag"), [4] * 4, 3 + 7),
        (dict(layout="zigzag", causal=True), [6] * 4, 3 + 7),
        (dict(causal=True, window=(16, 0)), [1, 2, 2, 2], 1 + 3),
        (dict(causal=True, window=(17, 0)), [1, 2, 3, 3], 2 + 5),
        (dict(window=(-64, None)), [0] * 4, 0),
        (dict(causal=True, window=(0, 0)), [1] * 4, 0),
    ):
        found = count(**given)
        assert [x["blocks"] for x in found] == blocks and [x["messages"] for x in found] == [messages] * 4, given


# ---- refusals ----

SMALL = (1, 2, 4, 8)


@pytest.mark.parametrize(
    "given, kind, sentence",
    [
        (dict(layout="striped"), ingot.InvalidError, "layout is 'striped'; 'contiguous', 'zigzag' are allowed"),
        (dict(dropout_p=0.1), ingot.UnsupportedError, "dropout_p is 0.1; 0 is allowed"),
        (dict(window=(1.5, 0)), ingot.InvalidError, r"window is \(1.5, 0\); a pair of 32-bit integers"),
        (dict(align="left"), ingot.InvalidError, "align is 'left'"),
        (dict(softcap=-1.0), ingot.InvalidError, "softcap"),
        (dict(softcap=-1.0, window=(-64, None)), ingot.InvalidError, "softcap"),  # where no rank has a block
        (dict(shapes=(SMALL[1:], SMALL, SMALL)), ingot.InvalidError, "q has 3 axes; 4 are needed"),
        (dict(shapes=(SMALL, SMALL, (1, 2, 5, 8))), ingot.InvalidError, r"v is \[1, 2, 5, 8\] and k \[1, 2, 4, 8\]"),
        (dict(shapes=(SMALL, (1, 3, 4, 8), (1, 3, 4, 8))), ingot.InvalidError, "multiple of"),
        (dict(shapes=(SMALL, (1, 2, 3, 8), (1, 2, 3, 8)), causal=True), ingot.InvalidError, "align is None, .* 8 rows of q and 6"),
        (dict(cu_seqlens_q=None), TypeError, "cu_seqlens_q"),
    ],
)
def test_refusals(ranks, given, kind, sentence):
    for error in ranks.each("differ", 2, **given):
        with pytest.raises(kind, match=sentence):
            raise error


@pytest.mark.parametrize(
    "unlike, sentence",
    [
        (dict(shapes=((2, 2, 4, 8),) * 3), "the batch of q is 1 on rank 0 of the group and 2 on rank 1; all must have the same"),
        (dict(shapes=((1, 2, 4, 9),) * 3), "the head size of q is 8 .* 9 on rank 1"),
        (dict(shapes=(SMALL, SMALL, (1, 2, 4, 9))), "the head size of v"),
        (dict(shapes=(SMALL, (1, 1, 4, 8), (1, 1, 4, 8))), "the heads of k"),
        (dict(shapes=((1, 4, 4, 8), SMALL, SMALL)), "the heads of q"),
        (dict(dtype="bf16"), "the type of q .* is 0 on rank 0 .* 2 on rank 1"),
        (dict(layout="zigzag"), "layout .* is 1 on rank 0 .* 2 on rank 1"),
        (dict(causal=True), "window's right bound .* is 2147483647 on rank 0 of the group and 0 on rank 1"),
        (dict(window=(3, None)), "window's left bound"),
        (dict(align="top_left"), "align"),
        (dict(softmax_scale=0.25), "softmax_scale is 0 .* 0.25 on rank 1"),
        (dict(softcap=2.0), "softcap"),
        (dict(deterministic=True), "deterministic"),
        (dict(learn="q"), "requires_grad of q, k and v together is 0 .* 1 on rank 1"),
    ],
)
def test_ranks_that_differ(ranks, unlike, sentence):
    """All ranks say so, and none waits for another."""
    for error in ranks.each("differ", 2, unlike=unlike):
        with pytest.raises(ingot.InvalidError, match=sentence):
            raise error


def test_ranks_that_learn_differently(ranks):
    for error in ranks.each("differ", 3, learn="q", unlike=dict(learn="k")):
        with pytest.raises(ingot.InvalidError, match="requires_grad of k and v together is 0"):
            raise error


def test_zigzag_wants_the_slices_of_shard(ranks):
    given = dict(shapes=((1, 2, 4, 8),) * 3, layout="zigzag", unlike=dict(shapes=((1, 2, 5, 8),) * 3))
    for error in ranks.each("differ", 3, **given):
        with pytest.raises(ingot.InvalidError, match="q has 4 rows on rank 0; where zigzag slices have 13 rows together, 5 are"):
            raise error


def test_an_error_leaves_no_message_behind(ranks):
    shapes = shapes_of(24, 24)
    for size in (2, 4):
        before = ranks.attend(size, dtype="f32", shapes=shapes)
        assert all(isinstance(x, MemoryError) for x in ranks.each("fail_on_the_way", size))
        after = ranks.attend(size, dtype="f32", shapes=shapes)
        assert all(np.array_equal(before[x], after[x]) for x in before)


def test_meshes_and_their_tensors(ranks):
    for error in ranks.each("mesh", 4):
        with pytest.raises(TypeError, match=r"q is a DTensor; a plain torch.Tensor is needed, of a DTensor its to_local\(\)"):
            raise error


def test_a_graph_does_not_keep_its_group(ranks):
    for error in ranks.each("outlive", 4):
        with pytest.raises(ingot.InvalidError, match="group was destroyed before the backward, which needs it"):
            raise error


@pytest.mark.parametrize("how, within", [("ends", 10), ("sleeps", 10)])
def test_a_rank_that_is_gone(tmp_path, how, within):
    """The others get an error, at the latest after the group's timeout of two seconds, in place of waiting for ever."""
    gone = Ranks(2, tmp_path, 2)
    try:
        (found,) = gone.each("leave", 2, without=(1,), how=how, rank=1)
    finally:
        gone.close()
    assert found["error"] and found["seconds"] < within, found


@pytest.mark.parametrize("size", [2, 4])
def test_the_example_runs(size):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}"]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1")
    done = subprocess.run(
        [*torchrun, str(c.ROOT / "examples/ring_attention.py")], env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert f"rank 1 of {size} has {1000 // size} rows of 1000" in done.stdout
