"""Attention of sequences that are split over processes: ring attention, also called context parallelism.

    from ingot.torch.distributed import ring_attention, shard
    q, k, v = (shard(x, 2, layout="zigzag") for x in (q, k, v))    # or made from a slice of the tokens to begin with
    out = ring_attention(q, k, v, causal=True, layout="zigzag")    # this rank's rows, with gradients

Each rank of a group of torch.distributed holds a slice of the queries and a slice of the keys and values. K and V go round
the ring of ranks, and each rank merges, by the log-sum-exp, what its queries find in every slice; in the backward the
gradients of K and V travel with them. While a block is computed the next one is on its way. CPU tensors need a group with
gloo, CUDA tensors one with NCCL.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import Any, Literal, NamedTuple, Optional, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _ALIGN, _UNBOUNDED, Align, UnsupportedError, Window, _choice, _core, _invalid, _mask
from . import _FLOATS, _PLAIN, _autocast, _dense, _threads, attention

__all__ = ["position_ids", "ring_attention", "shard", "unshard"]

_Function = TypeVar("_Function")
Layout = Literal["contiguous", "zigzag"]
Group = Any  # a ProcessGroup, a DeviceMesh of one axis, or None for all processes


def _between_graphs(function: _Function) -> _Function:
    """torch.compiler.disable, which has no types."""
    return torch.compiler.disable(function)


_LAYOUT = {"contiguous": 1, "zigzag": 2}  # pieces of the sequence that a rank holds


def _member(group: Group) -> tuple:
    """(the group, this rank in it, its size); one rank where there is no group at all."""
    if hasattr(group, "get_group"):
        group = group.get_group()
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise _invalid("group is given, but torch.distributed is not initialized")
        return None, 0, 1
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0:
        raise _invalid("group does not hold this process")
    return group, rank, dist.get_world_size(group)


# ---- who holds what ----


def _split(seqlen: int, ranks: int, layout: Layout) -> list:
    """Per rank its pieces of the sequence, as (first position, rows)."""
    count = ranks * _LAYOUT[layout]
    least, longer = divmod(seqlen, count)
    pieces = [(i * least + min(i, longer), least + (i < longer)) for i in range(count)]
    if layout == "contiguous":
        return [[x] for x in pieces]
    return [[pieces[i], pieces[-1 - i]] for i in range(ranks)]


def _split_as(name: str, lengths: tuple, layout: Layout) -> list:
    """The same from the lengths that the ranks' slices have. Contiguous slices may have any."""
    if layout == "contiguous":
        return [[(sum(lengths[:i]), n)] for i, n in enumerate(lengths)]
    split = _split(sum(lengths), len(lengths), layout)
    for rank, pieces in enumerate(split):
        rows = sum(n for _, n in pieces)
        if rows != lengths[rank]:
            raise _invalid(
                f"{name} has {lengths[rank]} rows on rank {rank}; where zigzag slices have {sum(lengths)} rows together, "
                f"{rows} are needed there"
            )
    return split


class _Cell(NamedTuple):
    """One call of the library: some rows of this rank's q with some of a slice of k, and the mask between them."""

    rows: slice
    keys: slice
    mask: int
    window_left: int
    window_right: int


def _window(shift: int, rows: int, keys: int, left: Optional[int], right: Optional[int]) -> Optional[tuple]:
    """(mask, left, right) of a block whose row 0 is at position `shift` of its keys; None if no pair in it is valid."""
    left = None if left is None or left - shift >= rows - 1 else left - shift
    right = None if right is None or right + shift >= keys - 1 else right + shift
    first = 1 - rows if left is None else -left
    last = keys - 1 if right is None else right
    if not rows or not keys or max(first, 1 - rows) > min(last, keys - 1):
        return None
    if left is right is None:
        return 0, 0, 0
    return 2, _UNBOUNDED if left is None else left, _UNBOUNDED if right is None else right


def _join(cells: list, along: str, across: str) -> list:
    """Neighbours without a mask as one."""
    joined: list = []
    for cell in cells:
        for i, other in enumerate(joined):
            x, y = getattr(other, along), getattr(cell, along)
            if cell.mask == other.mask == 0 and x.stop == y.start and getattr(other, across) == getattr(cell, across):
                joined[i] = other._replace(**{along: slice(x.start, y.stop)})
                break
        else:
            joined.append(cell)
    return joined


def _cells(q_pieces: list, k_pieces: list, offset: int, left: Optional[int], right: Optional[int]) -> list:
    """The calls that cover each valid pair of two slices once."""
    cells, row = [], 0
    for q_start, rows in q_pieces:
        key = 0
        for k_start, keys in k_pieces:
            window = _window(q_start + offset - k_start, rows, keys, left, right)
            if window is not None:
                cells.append(_Cell(slice(row, row + rows), slice(key, key + keys), *window))
            key += keys
        row += rows
    return _join(_join(cells, "keys", "rows"), "rows", "keys")


@functools.lru_cache(maxsize=64)
def _plan(q_lengths: tuple, k_lengths: tuple, layout: Layout, align: int, left: Optional[int], right: Optional[int],
          rank: int) -> tuple:  # fmt: skip
    """This rank's calls of each step. Step i is with the slice of the rank i places before it, and the last step is the last
    in which any rank has a call, so that all ranks take as many."""
    q_split, k_split = _split_as("q", q_lengths, layout), _split_as("k", k_lengths, layout)
    size, offset = len(q_split), sum(k_lengths) - sum(q_lengths) if align == _ALIGN["bottom_right"] else 0
    cells = lambda at, step: _cells(q_split[at], k_split[(at - step) % size], offset, left, right)
    steps = next((i for i in range(size - 1, 0, -1) if any(cells(at, i) for at in range(size))), 0) + 1
    return tuple(cells(rank, i) for i in range(steps))


# ---- messages ----


def _alike(group: Group, device: torch.device, own: list, terms: dict) -> list:
    """`own`, integers, of every rank. terms: what must be equal on all of them."""
    numbers = torch.tensor([*own, *terms.values()], dtype=torch.float64, device=device)
    found = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, numbers, group=group)
    found = torch.stack(found).tolist()
    for rank, values in enumerate(found):
        for name, x, first in zip(terms, values[len(own) :], found[0][len(own) :]):
            if x != first:
                raise _invalid(
                    f"{name} is {first:.10g} on rank 0 of the group and {x:.10g} on rank {rank}; all must have the same"
                )
    return [[int(x) for x in values[: len(own)]] for values in found]


class _Slices:
    """K and V of any rank, or their gradients, as views of one message."""

    def __init__(self, k: Tensor, v: Tensor, lengths: tuple):
        (b, h, _, d), dv = k.shape, v.shape[3]
        self.shapes = [((b, h, n, d), (b, h, n, dv)) for n in lengths]
        self.sizes = [(b * h * n * d, b * h * n * dv) for n in lengths]

    def room(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(max(sum(x) for x in self.sizes), dtype=dtype, device=like.device)

    def message(self, room: Tensor, source: int) -> Tensor:
        return room[: sum(self.sizes[source])]

    def views(self, room: Tensor, source: int) -> list:
        parts = self.message(room, source).split(self.sizes[source])
        return [x.view(shape) for x, shape in zip(parts, self.shapes[source])]


class _Ring:
    """This rank's exchanges with the others, which `land` in the order in which they were begun."""

    def __init__(self, group: Group, rank: int, size: int):
        # Weakly, since graphs keep this: a group that is held after destroy_process_group runs its threads until Python ends,
        # and one of gloo's that frees a tensor then aborts the process.
        self._group, self.rank, self.size, self.flying = weakref.ref(group), rank, size, []

    @property
    def group(self) -> Group:
        group = self._group()
        if group is None:
            raise _invalid("group was destroyed before the backward, which needs it")
        return group

    def source(self, step: int) -> int:
        return (self.rank - step) % self.size

    def send(self, sent: Tensor, received: Tensor, places: int = 1) -> None:
        """Begins to send to the rank so many places further, and to receive from the one as many before."""
        peer = lambda places: dist.get_global_rank(self.group, (self.rank + places) % self.size)
        operations = []
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, peer(places), self.group))
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, peer(-places), self.group))
        self.flying.append(dist.batch_isend_irecv(operations) if operations else [])

    def land(self) -> None:
        for work in self.flying.pop(0):
            work.wait()

    def round(self, k: Tensor, v: Tensor, slices: _Slices, steps: int):
        """Each step's (step, source, k, v), while those of the next step are on their way."""
        held, room = slices.room(k, k.dtype), slices.room(k, k.dtype)
        for x, own in zip(slices.views(held, self.rank), (k, v)):
            x.copy_(own)
        for step in range(steps):
            source, more = self.source(step), step + 1 < steps
            if more:
                self.send(slices.message(held, source), slices.message(room, self.source(step + 1)))
            yield step, source, *slices.views(held, source)
            if more:
                self.land()
            held, room = room, held

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # After an error too: a message left behind would be taken for one of the next call.
        while self.flying:
            self.land()


# ---- forward and backward ----


def _mask_terms(cell: _Cell) -> dict:
    if not cell.mask:
        return {}
    return dict(
        mask=cell.mask, align=_ALIGN["top_left"], window_left=cell.window_left, window_right=cell.window_right
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ring, plan, lengths, terms):
        (b, h, s, _), slices = q.shape, _Slices(k, v, lengths)
        total = q.new_zeros((b, s, h, v.shape[3]), dtype=torch.float32).transpose(1, 2)
        lse = q.new_full((b, h, s), -torch.inf, dtype=torch.float32)
        with ring:
            for step, _, keys, values in ring.round(k, v, slices, len(plan)):
                for cell in plan[step]:
                    # A part in q's type is what the fastest kernels write; the sum of the parts is float32.
                    part, part_lse = _core.attn_fwd(
                        q=q[:, :, cell.rows], k=keys[:, :, cell.keys], v=values[:, :, cell.keys], out=True, lse=True,
                        **_mask_terms(cell), **terms,
                    )  # fmt: skip
                    to, to_lse = total[:, :, cell.rows], lse[:, :, cell.rows]
                    _core.attn_merge(
                        out_parts=[to, part.float()], lse_parts=[to_lse, part_lse], out=to, lse=to_lse, track=False,
                        num_threads=terms["num_threads"],
                    )  # fmt: skip
        out = total.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.plan, ctx.slices, ctx.terms = ring, plan, slices, terms
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _dlse):
        q, k, v, out, lse = ctx.saved_tensors
        ring, plan, slices, dout = ctx.ring, ctx.plan, ctx.slices, _dense(dout)
        want_q, want_k, want_v = ctx.needs_input_grad[:3]
        dq = torch.zeros_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
        if want_k or want_v:
            grads, room = slices.room(k, torch.float32).zero_(), slices.room(k, torch.float32)
        with ring:
            for step, source, keys, values in ring.round(k, v, slices, len(plan)):
                found = []
                for cell in plan[step]:
                    mine, theirs = [x[:, :, cell.rows] for x in (q, dout, out, lse)], (keys, values)
                    theirs = [x[:, :, cell.keys] for x in theirs]
                    part, *parts = (
                        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (mine[0], *theirs)
                    )
                    _core.attn_bwd(
                        **dict(zip(("q", "dout", "out", "lse", "k", "v"), (*mine, *theirs))), dq=part,
                        **(dict(dk=parts[0], dv=parts[1]) if want_k or want_v else {}), **_mask_terms(cell), **ctx.terms,
                    )  # fmt: skip
                    dq[:, :, cell.rows] += part
                    found.append((cell.keys, parts))
                if not (want_k or want_v):
                    continue
                # The gradients of this slice come from the rank before, go on to the next and, from the last, home.
                if step:
                    ring.land()
                    grads, room = room, grads
                for rows, parts in found:
                    for x, part in zip(slices.views(grads, source), parts):
                        x[:, :, rows] += part
                if step + 1 < len(plan):
                    ring.send(slices.message(grads, source), slices.message(room, ring.source(step + 1)))
                elif step:
                    ring.send(slices.message(grads, source), slices.message(room, ring.rank), -step)
            if (want_k or want_v) and len(plan) > 1:
                ring.land()
                grads = room
        dk, dv = slices.views(grads, ring.rank) if want_k or want_v else (None, None)
        of_type = lambda x, like, want: x.to(like.dtype) if want else None
        return of_type(dq, q, want_q), of_type(dk, k, want_k), of_type(dv, v, want_v), None, None, None, None


# ---- functions ----


def _bounds(causal: bool, window: Window) -> tuple:
    """(left, right), None for no bound."""
    mask, left, right = _mask(causal, window)
    if mask != 2:
        return None, (0 if mask else None)
    return tuple(None if x == _UNBOUNDED else x for x in (left, right))


@_between_graphs
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    layout: Layout = "contiguous",
    causal: bool = False,
    window: Window = None,
    align: Align = None,
    softmax_scale: Optional[float] = None,
    softcap: Optional[float] = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    backend: Optional[str] = None,
    deterministic: Optional[bool] = None,
    check: bool = True,
) -> Any:
    """`ingot.torch.attention` of a sequence that is split over the ranks of a group. Each rank gives its slice, q [B, Hq, Sq,
    D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv] in float32, float16 or bfloat16, and gets its rows of the output [B, Hq, Sq, Dv]
    in q's type, with return_lse also of the log-sum-exp [B, Hq, Sq], which has no gradient. Gradients flow into q, k and v.
    All ranks of the group make the call, with the same arguments but for the slices, and all or none the backward.

    group: a ProcessGroup or a DeviceMesh of one axis; None: all processes, or without torch.distributed this one alone.
    layout: where the slices lie in the sequence. "contiguous": one after another in the order of ranks, of any lengths.
    "zigzag": as `shard` cuts them, so that all ranks have the same work under a causal mask.
    causal, window and align are about positions in the whole sequence; align must be given with a mask where the whole of q
    and the whole of k differ in length. softmax_scale, softcap, backend and deterministic are those of
    `ingot.torch.attention`. dropout_p must be 0.
    check: first compare the arguments of all ranks, for which the host waits for the device; a CUDA graph cannot capture
    that. Without it, slices must be as long on each rank, and ranks that differ get wrong results or wait for each other.

    Sums are float32, in an order that is the same in every run. If a rank is gone the others get torch.distributed's error,
    at the latest after the group's timeout.
    """
    _choice("layout", layout, _LAYOUT)
    group, rank, size = _member(group)
    if dropout_p:
        raise UnsupportedError(
            f"dropout_p is {dropout_p!r}; 0 is allowed: the draws are numbered within one call of the library, so the parts of "
            "a ring would not drop what one process drops",
            20,
        )
    if size == 1:
        return attention(
            q, k, v, causal=causal, window=window, align=align, softmax_scale=softmax_scale, softcap=softcap,
            return_lse=return_lse, backend=backend, deterministic=deterministic,
        )  # fmt: skip
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x) not in _PLAIN or x is None:
            raise TypeError(f"{name} is a {type(x).__name__}; a plain torch.Tensor is needed, of a DTensor its to_local()")
        if x.dim() != 4:
            raise _invalid(f"{name} has {x.dim()} axes; 4 are needed")
        if x.dtype not in _FLOATS:
            raise _invalid(f"{name} is {x.dtype}; float32, float16 and bfloat16 are allowed")
        if x.device != q.device:
            raise _invalid(f"{name} is on {x.device} and q on {q.device}")
    if k.shape[:3] != v.shape[:3]:
        raise _invalid(f"v is {list(v.shape)} and k {list(k.shape)}; they must have the same batch, heads and rows")
    q, k, v = _autocast(q, k, v)
    left, right = _bounds(causal, window)
    align_number = _choice("align", align, _ALIGN) or 0
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    terms = dict(softmax_scale=softmax_scale or 0.0, softcap=softcap or 0.0, flags=1 if deterministic else 0,
                 backend=backend or "", num_threads=_threads(q), track=False)  # fmt: skip
    # The library's own refusals, before anything is sent: without rows it runs nothing.
    _core.attn_fwd(**{x: y.new_empty((*y.shape[:2], 0, y.shape[3])) for x, y in (("q", q), ("k", k), ("v", v))}, out=True,
                   **terms)  # fmt: skip
    lengths = [[q.shape[2], k.shape[2]]] * size
    if check:
        learns = torch.is_grad_enabled()
        lengths = _alike(group, q.device, lengths[0], {
            "the batch of q": q.shape[0], "the heads of q": q.shape[1], "the heads of k": k.shape[1],
            "the head size of q": q.shape[3], "the head size of v": v.shape[3],
            "the type of q (0 float32, 1 float16, 2 bfloat16)": _FLOATS.index(q.dtype),
            "layout (1 contiguous, 2 zigzag)": _LAYOUT[layout],
            "window's left bound (2147483647 for none)": _UNBOUNDED if left is None else left,
            "window's right bound (2147483647 for none)": _UNBOUNDED if right is None else right,
            "align (1 top_left, 2 bottom_right)": align_number,
            "softmax_scale": terms["softmax_scale"], "softcap": terms["softcap"], "deterministic": terms["flags"],
            "requires_grad of q, k and v together": learns and (q.requires_grad or k.requires_grad or v.requires_grad),
            "requires_grad of k and v together": learns and (k.requires_grad or v.requires_grad),
        })  # fmt: skip
    q_lengths, k_lengths = (tuple(x) for x in zip(*lengths))
    if align is None and sum(q_lengths) != sum(k_lengths) and (left, right) != (None, None):
        raise _invalid(
            f"align is None, with a mask and {sum(q_lengths)} rows of q and {sum(k_lengths)} of k together; 'top_left' and "
            "'bottom_right' are allowed"
        )
    plan = _plan(q_lengths, k_lengths, layout, align_number, left, right, rank)
    out, lse = _Attention.apply(_dense(q), k, v, _Ring(group, rank, size), plan, k_lengths, terms)
    return (out, lse) if return_lse else out


def position_ids(
    seqlen: int, *, group: Group = None, layout: Layout = "contiguous", device: Any = None
) -> Tensor:
    """The positions, int64, that this rank's rows have in a sequence of seqlen rows that `shard` cuts: for rotary embeddings
    and the like."""
    _choice("layout", layout, _LAYOUT)
    _, rank, size = _member(group)
    return torch.cat([torch.arange(at, at + n, device=device) for at, n in _split(seqlen, size, layout)[rank]])


def shard(x: Tensor, dim: int, *, group: Group = None, layout: Layout = "contiguous") -> Tensor:
    """This rank's slice along dim of x, which is the same on all ranks. Any extent can be cut: slices differ by one row at
    most. Gradients flow into this rank's rows of x."""
    _choice("layout", layout, _LAYOUT)
    _, rank, size = _member(group)
    pieces = [x.narrow(dim, at, n) for at, n in _split(x.shape[dim], size, layout)[rank]]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def unshard(x: Tensor, dim: int, *, group: Group = None, layout: Layout = "contiguous") -> Tensor:
    """The whole, on every rank, of which each rank's x is the slice along dim. All ranks of the group make the call. No
    gradient is recorded: an x that requires one is refused, unless within torch.no_grad()."""
    _choice("layout", layout, _LAYOUT)
    group, rank, size = _member(group)
    if x.requires_grad and torch.is_grad_enabled():
        raise _invalid("x requires a gradient, which unshard does not record; use torch.no_grad(), or detach it")
    if size == 1:
        return x
    x = x.movedim(dim, 0)
    row = math.prod(x.shape[1:])
    lengths = _alike(group, x.device, [x.shape[0]], {
        "the number of axes of x": x.dim(), "the elements of a row of x": row, "the bytes of one": x.element_size(),
    })  # fmt: skip
    lengths = tuple(n for (n,) in lengths)
    split = _split_as("x", lengths, layout)
    bytes_of_row = row * x.element_size()
    held = torch.zeros(max(lengths) * bytes_of_row, dtype=torch.uint8, device=x.device)
    held[: x.shape[0] * bytes_of_row] = x.contiguous().flatten().view(torch.uint8)
    found = [torch.empty_like(held) for _ in lengths]
    dist.all_gather(found, held, group=group)
    pieces = []
    for room, n, parts in zip(found, lengths, split):
        rows = room[: n * bytes_of_row].view(x.dtype).view(n, *x.shape[1:])
        pieces += zip([at for at, _ in parts], rows.split([n for _, n in parts]))
    return torch.cat([rows for _, rows in sorted(pieces, key=lambda y: y[0])]).movedim(0, dim)
