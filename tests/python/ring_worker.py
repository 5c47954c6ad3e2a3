"""One rank of test_ring.py: a process that joins a gloo group and runs this module's functions as it is told."""

import gc
import os
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

import ingot.torch as it
from ingot.torch import distributed as ring

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
groups = {}
original = dict(attn_fwd=it._core.attn_fwd, batch_isend_irecv=dist.batch_isend_irecv)


def serve(connection, rank, size, file, timeout):
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=timeout)
    for n in range(2, size + 1):  # of two: ranks 1 and 3, so that a rank in the group is not that of all
        groups[n] = dist.new_group(list(range(size))[1::2] if n == 2 and size == 4 else list(range(n)), timeout=timeout)
    connection.send(None)
    while True:
        name, given = connection.recv()
        try:
            result = globals()[name](**given)
        except Exception as error:
            result = error
        connection.send(result)
        result = None  # an error holds on to the frames it passed, and so to what was on its way
        gc.collect()


def make(dtype, *shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(x, generator=generator).to(TYPES[dtype]) for x in shapes]


def cut(x, group, layout, lengths):
    """The slice by shard, or of the given lengths."""
    if lengths is None:
        return ring.shard(x, 2, group=group, layout=layout)
    at, rank = sum(lengths[: dist.get_rank(group)]), dist.get_rank(group)
    return x[:, :, at : at + lengths[rank]]


def attend(size, dtype, shapes, seed, layout="contiguous", lengths=(None, None), learn="qkv", delay=False, **given):
    """Everything of one call of the ring on whole tensors, put together on the group's rank 0: out, lse, dq, dk, dv."""
    group = groups[size]
    *whole, dout = make(dtype, *shapes, seed=seed)
    slices = [cut(x, group, layout, n).clone() for x, n in zip(whole, (lengths[0], lengths[1], lengths[1]))]
    for name, x in zip("qkv", slices):
        x.requires_grad_(name in learn)
    if delay:

        def late(**fields):
            time.sleep(0.01 * torch.randint(4, ()).item())
            return original["attn_fwd"](**fields)

        it._core.attn_fwd = late
    try:
        out, lse = ring.ring_attention(*slices, group=group, layout=layout, return_lse=True, **given)
    finally:
        it._core.attn_fwd = original["attn_fwd"]
    found = dict(out=out.detach(), lse=lse)
    if learn:
        leaves = [x for x in slices if x.requires_grad]
        grads = torch.autograd.grad(out, leaves, cut(dout, group, layout, lengths[0]))
        found.update(zip((f"d{x}" for x in learn), grads))
        assert all(x.dtype == TYPES[dtype] for x in grads)
    assert out.dtype == TYPES[dtype] and lse.dtype == torch.float32
    found = {x: ring.unshard(y, 2, group=group, layout=layout) for x, y in found.items()}
    return {x: y.float().numpy() for x, y in found.items()} if dist.get_rank(group) == 0 else None


def count(size, seqlen, **given):
    """How many blocks this rank attends to and how many messages it sends, forward and backward."""
    counts = dict(blocks=0, messages=0)

    def counted(name, function):
        def run(*args, **fields):
            counts[name] += not fields or fields["q"].shape[2] > 0
            return function(*args, **fields)

        return run

    it._core.attn_fwd = counted("blocks", original["attn_fwd"])
    dist.batch_isend_irecv = counted("messages", original["batch_isend_irecv"])
    try:
        q, k, v = (x.requires_grad_() for x in make("f32", *[(1, 1, seqlen // size, 8)] * 3))
        ring.ring_attention(q, k, v, group=groups[size], **given).sum().backward()
    finally:
        it._core.attn_fwd, dist.batch_isend_irecv = original["attn_fwd"], original["batch_isend_irecv"]
    return counts


def whole(size, layout, extent, dim, kind):
    """unshard of shard, and the slice."""
    x = torch.arange(6 * extent).reshape(2, extent, 3).movedim(1, dim)
    x = x % 2 == 0 if kind == "bool" else x.to(getattr(torch, kind))
    part = ring.shard(x, dim, group=groups[size], layout=layout)
    assert torch.equal(ring.unshard(part, dim, group=groups[size], layout=layout), x)
    return dict(positions=ring.position_ids(extent, group=groups[size], layout=layout).tolist(), rows=part.shape[dim])


def learn_through_shard(size, layout):
    """The gradient of the whole is this rank's rows of it."""
    x = torch.randn(1, 1, 11, 4, requires_grad=True)
    ring.shard(x, 2, group=groups[size], layout=layout).sum().backward()
    mine = torch.zeros(11)
    mine[ring.position_ids(11, group=groups[size], layout=layout)] = 1
    assert torch.equal(x.grad, mine.view(1, 1, 11, 1).expand(1, 1, 11, 4))


def differ(size, shapes=((1, 2, 4, 8),) * 3, dtype="f32", learn="", unlike=None, **given):
    """A call in which rank 1 of the group does something else, as unlike says."""
    if unlike and dist.get_rank(groups[size]) == 1:
        shapes, dtype, learn = (unlike.pop(x, y) for x, y in (("shapes", shapes), ("dtype", dtype), ("learn", learn)))
        given.update(unlike)
    q, k, v = make(dtype, *shapes)
    for name, x in zip("qkv", (q, k, v)):
        x.requires_grad_(name in learn)
    ring.ring_attention(q, k, v, group=groups[size], **given)


def fail_on_the_way(size):
    """The library fails at every rank's first block, before the message of rank 0 is there."""

    def fail(**fields):
        if fields["q"].shape[2]:
            raise MemoryError("no memory for the first block")
        return original["attn_fwd"](**fields)

    it._core.attn_fwd = fail
    if dist.get_rank(groups[size]) == 0:
        time.sleep(0.3)
    try:
        differ(size, check=False)
    finally:
        it._core.attn_fwd = original["attn_fwd"]


def mesh(size):
    """A DeviceMesh in place of the group; its tensors are no slices."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    axes = init_device_mesh("cpu", (size,))
    q, k, v = make("f32", *[(1, 2, 5, 8)] * 3)
    out = ring.ring_attention(q, k, v, group=axes)
    assert torch.equal(out, ring.ring_attention(q, k, v, group=groups[size], check=False))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ring.ring_attention(q, k, v, group=axes).dtype == torch.bfloat16
    ring.ring_attention(DTensor.from_local(q, axes, [Replicate()]), k, v, group=axes)


def outlive(size):
    """A graph lives longer than its group, and does not keep that."""
    group = dist.new_group(list(range(size)))
    held = weakref.ref(group)
    q, k, v = (x.requires_grad_() for x in make("f32", *[(1, 2, 4, 8)] * 3))
    out = ring.ring_attention(q, k, v, group=group)
    dist.destroy_process_group(group)
    del group
    assert held() is None
    out.sum().backward()


def leave(size, how, rank):
    """Rank `rank` of the group ends, or does nothing for long; the others make a call and say how it ended and when."""
    if dist.get_rank(groups[size]) == rank:
        if how == "ends":
            os._exit(3)
        time.sleep(60)
    q, k, v = make("f32", *[(1, 2, 4, 8)] * 3)
    start = time.monotonic()
    try:
        ring.ring_attention(q, k, v, group=groups[size], check=False)
    except Exception as error:
        return dict(error=str(error), seconds=time.monotonic() - start)
    return dict(error=None, seconds=time.monotonic() - start)
