"""Ingot: attention kernels, cast ahead of time.

The functions take arrays of any framework that speaks DLPack (numpy, torch, jax, cupy and others), without a copy, and give
back new arrays of the framework of their first argument. On a GPU they run on the framework's current stream. They record
no gradients; for PyTorch with autograd and torch.compile see `ingot.torch`.

Shapes use the field's letters: B batch, Hq and Hk query and key heads (Hq a multiple of Hk), Sq and Sk query and key
lengths, D head size of q and k, Dv of v and of the output, T rows of a stacked token axis. Axes are always in this order;
memory may have any strides with the last axis dense, so a [B, S, H, D] buffer is passed as its transposed view.

A refused call raises `Error` with the library's sentence: `InvalidError` (a ValueError) for a bad argument,
`UnsupportedError` (a NotImplementedError) where nothing can run it, `OutOfMemoryError` (a MemoryError).
"""

from __future__ import annotations

import operator
import re
from typing import Any, Callable, Literal, Optional, Sequence, Union

from . import _core
from ._errors import Error, InvalidError, OutOfMemoryError, UnsupportedError

__version__: str = _core.version
__all__ = [
    "Error",
    "InvalidError",
    "OutOfMemoryError",
    "UnsupportedError",
    "append",
    "attention",
    "attention_paged",
    "attention_varlen",
    "explain",
    "merge",
]

Array = Any  # whatever has __dlpack__ and __dlpack_device__
Align = Optional[Literal["top_left", "bottom_right"]]
Window = Optional[Sequence[Optional[int]]]
LseBase = Literal["e", "2"]

_UNBOUNDED = 2**31 - 1
_ALIGN = {None: None, "top_left": 1, "bottom_right": 2}
_LSE_BASE = {"e": None, "2": 1}
# One byte a side of the library's word for variable lengths: stacked | length << 1 | position << 3.
_CUMULATIVE, _INDIVIDUAL, _LAST_PAGE = 0x0B, 0x04, 0x06


def _invalid(sentence: str) -> InvalidError:
    return InvalidError(sentence, _core.statuses["INGOT_INVALID"])


def _renamed(error: Error, **names: Optional[str]) -> Error:
    """The error in terms of a function whose arguments have other names than the library's fields, and that takes no batch."""
    names = {"batch": "the number of sequences", **{field: name for field, name in names.items() if name}}
    sentence = re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], str(error))
    return type(error)(sentence, error.status)


def _choice(name: str, value: Any, table: dict) -> Any:
    try:
        return table[value]
    except (KeyError, TypeError):
        allowed = ", ".join(repr(x) for x in table)
        raise _invalid(f"{name} is {value!r}; {allowed} are allowed") from None


def _mask(causal: bool, window: Window) -> tuple:
    """(mask, window_left, window_right) as the library has them."""
    if window is None:
        return (1 if causal else None), None, None
    try:
        bounds = [_UNBOUNDED if x is None else operator.index(x) for x in window]
    except TypeError:
        bounds = []
    if len(bounds) != 2 or not all(-(2**31) <= x < 2**31 for x in bounds):
        raise _invalid(
            f"window is {window!r}; a pair of 32-bit integers (left, right) is allowed, None in it for no bound"
        )
    left, right = bounds
    if left == -1 or right == -1:
        # Legal in C, but what ports from FlashAttention mean by it is no bound, and (-1, -1) would give zeros.
        raise _invalid(f"window is {window!r}; -1 is refused: None stands for no bound")
    return 2, left, min(right, 0) if causal else right


def _flags(deterministic: bool, batch_invariant: bool, strict: bool) -> Optional[int]:
    return (1 if deterministic else 0) | (2 if batch_invariant else 0) | (4 if strict else 0) or None


def _cell(value: Any) -> tuple:
    """(number, array of one) of a dropout seed or offset."""
    return (None, value) if hasattr(value, "__dlpack__") else (value, None)


def _seed(dropout_p: Optional[float], dropout_seed: Union[int, Array, None]) -> tuple:
    """The seed's cell. Without one every call would drop the same pairs, which nobody who trains means."""
    if dropout_p and dropout_seed is None:
        raise _invalid(f"dropout_seed is None and dropout_p {dropout_p!r}; dropout needs a seed, another one for each call")
    return _cell(dropout_seed)


def _needed(**arrays: Optional[Array]) -> None:
    for name, x in arrays.items():
        if x is None:
            raise _invalid(f"{name} is None; it is required")


def _batch(**cumulative: Optional[Array]) -> Optional[int]:
    """The number of sequences where an array [B + 1] says it; the library holds the others to it."""
    for name, x in cumulative.items():
        if x is not None:
            if not hasattr(x, "shape"):
                raise TypeError(f"{name} is no array: {type(x)}; an array [B + 1] is needed")
            if len(x.shape) != 1 or x.shape[0] < 1:
                raise _invalid(f"{name} has the shape {tuple(x.shape)}; [B + 1] is needed")
            return x.shape[0] - 1
    return None


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    window: Window = None,
    align: Align = None,
    softmax_scale: Optional[float] = None,
    softcap: Optional[float] = None,
    bias: Optional[Array] = None,
    alibi: Optional[Array] = None,
    sink: Optional[Array] = None,
    q_lengths: Optional[Array] = None,
    k_lengths: Optional[Array] = None,
    q_descale: Optional[Array] = None,
    k_descale: Optional[Array] = None,
    v_descale: Optional[Array] = None,
    dropout_p: Optional[float] = None,
    dropout_seed: Union[int, Array, None] = None,
    dropout_offset: Union[int, Array, None] = None,
    return_lse: bool = False,
    lse_base: LseBase = "e",
    out: Optional[Array] = None,
    lse: Optional[Array] = None,
    backend: Optional[str] = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    strict: bool = False,
    num_threads: Optional[int] = None,
    stream: Optional[int] = None,
    _explain: Optional[str] = None,
) -> Any:
    """Scaled dot product attention of padded or full sequences.

    q [B, Hq, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv]: alike in float32, float16 or bfloat16; or float16 or bfloat16 q with
    float8 k and v; or all float8. Query head h reads key head h // (Hq // Hk).

    causal: query i sees key j iff j <= i + off. window=(left, right): iff -left <= j - (i + off) <= right, None for no bound;
    with causal as well, right is at most 0; -1, no bound in FlashAttention, is refused. align says where the diagonal lies, off = 0 for "top_left", Sk - Sq (of that
    sequence) for "bottom_right"; it must be given where the two differ.
    softmax_scale: None or 0 for 1 / sqrt(D). softcap: scores become softcap * tanh(score / softcap).
    bias [B, Hq, Sq, Sk], axes of extent 1 broadcast: of q's type or float32, added to the scores, or bool, false masks.
    alibi [Hq] or [B, Hq], float32 slopes. sink [Hq], float32: one more logit in the denominator.
    q_lengths, k_lengths [B], int32: how much of each sequence counts. Rows past q_lengths are 0 in new results and not written in
    given ones.
    q_descale, k_descale, v_descale: float32 factors of float8 inputs, [1] or [B, Hk] (q also [B, Hq]).
    dropout_p in [0, 1), above 0 with a dropout_seed; dropout_seed and dropout_offset: numbers, or arrays of one uint64 or int64
    on the device. Equal numbers give the equal mask on every device, so each call takes another seed or offset.

    Returns the output [B, Hq, Sq, Dv] of q's type (bfloat16 for float8 q); with return_lse or lse also the log-sum-exp of
    the scores [B, Hq, Sq], float32, natural or by lse_base "2". out (float32, float16 or bfloat16) and lse are written and
    returned if given. A query without any valid key has output 0 and log-sum-exp -inf.

    backend forces a family ("reference"), a kernel or its variant by name. deterministic: equal bits from run to run;
    batch_invariant: a sequence's result does not depend on its neighbours; strict: a kernel that is not verified on this
    device is an error. num_threads: of a CPU call. stream: the handle of a GPU stream, otherwise the framework's current one.
    """
    mask, left, right = (1 if causal else None, None, None) if window is None else _mask(causal, window)
    if align is not None:
        align = _choice("align", align, _ALIGN)
    if out is None:
        out = True
    if return_lse and lse is None:
        lse = True
    # The common call: CPython passes more than 15 keywords by way of a dict, which would take longer than all the rest.
    if (
        (alibi is q_lengths is k_lengths is q_descale is k_descale is v_descale is dropout_p is dropout_seed)
        and (dropout_seed is dropout_offset is backend is num_threads is stream is _explain is None)
        and not (deterministic or batch_invariant or strict)
        and lse_base == "e"
    ):
        return _core.attn_fwd(
            q=q,
            k=k,
            v=v,
            out=out,
            lse=lse,
            mask=mask,
            align=align,
            window_left=left,
            window_right=right,
            softmax_scale=softmax_scale,
            softcap=softcap,
            bias=bias,
            sink=sink,
        )
    seed, seed_ptr = _seed(dropout_p, dropout_seed)
    offset, offset_ptr = _cell(dropout_offset)
    varlen = (0 if q_lengths is None else _INDIVIDUAL) | (0 if k_lengths is None else _INDIVIDUAL << 8)
    return _core.attn_fwd(
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        varlen=varlen,
        mask=mask,
        align=align,
        window_left=left,
        window_right=right,
        softmax_scale=softmax_scale,
        softcap=softcap,
        bias=bias,
        alibi=alibi,
        sink=sink,
        q_lengths=q_lengths,
        k_lengths=k_lengths,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        dropout_p=dropout_p,
        dropout_seed=seed,
        dropout_seed_ptr=seed_ptr,
        dropout_offset=offset,
        dropout_offset_ptr=offset_ptr,
        lse_base=_choice("lse_base", lse_base, _LSE_BASE),
        backend=backend,
        flags=_flags(deterministic, batch_invariant, strict),
        num_threads=num_threads,
        stream=stream,
        explain=_explain,
    )


def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    *,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    window: Window = None,
    align: Align = None,
    softmax_scale: Optional[float] = None,
    softcap: Optional[float] = None,
    alibi: Optional[Array] = None,
    sink: Optional[Array] = None,
    q_descale: Optional[Array] = None,
    k_descale: Optional[Array] = None,
    v_descale: Optional[Array] = None,
    dropout_p: Optional[float] = None,
    dropout_seed: Union[int, Array, None] = None,
    dropout_offset: Union[int, Array, None] = None,
    return_lse: bool = False,
    lse_base: LseBase = "e",
    lse_layout: Literal["HT", "TH"] = "HT",
    out: Optional[Array] = None,
    lse: Optional[Array] = None,
    backend: Optional[str] = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    strict: bool = False,
    num_threads: Optional[int] = None,
    stream: Optional[int] = None,
    _explain: Optional[str] = None,
) -> Any:
    """Attention of sequences stacked along one token axis ("packed", "ragged").

    q [1, Hq, Tq, D], k [1, Hk, Tk, D], v [1, Hk, Tk, Dv]; a [T, H, D] buffer is `x.transpose(0, 1)[None]` in torch,
    `x.swapaxes(0, 1)[None]` in numpy. cu_seqlens_q, cu_seqlens_k [B + 1], int32: prefix sums of the lengths. max_seqlen_q and
    max_seqlen_k: no sequence is longer; a longer one is cut. B is taken from the shape of cu_seqlens_q.

    Returns the output [1, Hq, Tq, Dv]; with return_lse also the log-sum-exp [Hq, Tq], or [Tq, Hq] by lse_layout "TH". Rows of
    no sequence are 0 in new results and not written in given ones. The other arguments are those of `attention`.
    """
    _needed(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    mask, left, right = _mask(causal, window)
    seed, seed_ptr = _seed(dropout_p, dropout_seed)
    offset, offset_ptr = _cell(dropout_offset)
    layout = _choice("lse_layout", lse_layout, {"HT": 0, "TH": 1})
    try:
        return _core.attn_fwd(
            q=q,
            k=k,
            v=v,
            out=True if out is None else out,
            lse=(True if return_lse else None) if lse is None else lse,
            varlen=_CUMULATIVE | _CUMULATIVE << 8 | layout << 16,
            batch=_batch(cu_seqlens_q=cu_seqlens_q),
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            q_lengths=cu_seqlens_q,
            k_lengths=cu_seqlens_k,
            mask=mask,
            align=_choice("align", align, _ALIGN),
            window_left=left,
            window_right=right,
            softmax_scale=softmax_scale,
            softcap=softcap,
            alibi=alibi,
            sink=sink,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            dropout_p=dropout_p,
            dropout_seed=seed,
            dropout_seed_ptr=seed_ptr,
            dropout_offset=offset,
            dropout_offset_ptr=offset_ptr,
            lse_base=_choice("lse_base", lse_base, _LSE_BASE),
            backend=backend,
            flags=_flags(deterministic, batch_invariant, strict),
            num_threads=num_threads,
            stream=stream,
            explain=_explain,
        )
    except Error as error:
        raise _renamed(error, q_lengths="cu_seqlens_q", k_lengths="cu_seqlens_k") from None


def _pages(page_table: Any, page_indptr: Any, page_indices: Any, lengths: Any, last_page_lengths: Any) -> int:
    """The K byte of the word for variable lengths."""
    if (lengths is None) == (last_page_lengths is None):
        raise _invalid("k_lengths and last_page_lengths: exactly one of them must be given")
    if (page_indptr is None) != (page_indices is None):
        raise _invalid("page_indptr and page_indices are given together or not at all")
    if (page_table is None) == (page_indptr is None):
        raise _invalid("page_table and page_indptr with page_indices: exactly one form must be given")
    if page_table is not None and last_page_lengths is not None:
        raise _invalid("last_page_lengths is given with page_table; it is allowed with page_indptr and page_indices")
    return _INDIVIDUAL if last_page_lengths is None else _LAST_PAGE


def attention_paged(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    *,
    page_table: Optional[Array] = None,
    page_indptr: Optional[Array] = None,
    page_indices: Optional[Array] = None,
    k_lengths: Optional[Array] = None,
    last_page_lengths: Optional[Array] = None,
    max_seqlen_k: Optional[int] = None,
    q_lengths: Optional[Array] = None,
    cu_seqlens_q: Optional[Array] = None,
    max_seqlen_q: Optional[int] = None,
    causal: bool = False,
    window: Window = None,
    align: Align = None,
    softmax_scale: Optional[float] = None,
    softcap: Optional[float] = None,
    alibi: Optional[Array] = None,
    sink: Optional[Array] = None,
    q_descale: Optional[Array] = None,
    k_descale: Optional[Array] = None,
    v_descale: Optional[Array] = None,
    return_lse: bool = False,
    lse_base: LseBase = "e",
    lse_layout: Literal["HT", "TH"] = "HT",
    out: Optional[Array] = None,
    lse: Optional[Array] = None,
    backend: Optional[str] = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    strict: bool = False,
    num_threads: Optional[int] = None,
    stream: Optional[int] = None,
    _explain: Optional[str] = None,
) -> Any:
    """Attention on a paged cache of K and V.

    k_pages [pages, page_size, Hk, D], v_pages [pages, page_size, Hk, Dv] (page_size and Hk in either order in memory).
    Pages of each sequence, int32: dense, page_table [B, max_pages]; or CSR, page_indptr [B + 1] and page_indices [n].
    Lengths of K, int32: k_lengths [B]; or, with CSR, last_page_lengths [B], the tokens in each sequence's last page.
    max_seqlen_k is mandatory with CSR.
    q [B, Hq, Sq, D], with q_lengths [B], int32, where not all rows count; or stacked, [1, Hq, T, D], with cu_seqlens_q [B + 1]
    and max_seqlen_q.

    Returns the output, shaped as q with Dv last; with return_lse also the log-sum-exp, [B, Hq, Sq] or of stacked q as
    `attention_varlen` has it. Decoding with causal wants align="bottom_right". The other arguments are those of `attention`.
    """
    side = _pages(page_table, page_indptr, page_indices, k_lengths, last_page_lengths)
    mask, left, right = _mask(causal, window)
    layout = _choice("lse_layout", lse_layout, {"HT": 0, "TH": 1})
    if cu_seqlens_q is not None and q_lengths is not None:
        raise _invalid("q_lengths and cu_seqlens_q: at most one of them is allowed")
    queries = _CUMULATIVE if cu_seqlens_q is not None else 0 if q_lengths is None else _INDIVIDUAL
    batch = _batch(cu_seqlens_q=cu_seqlens_q, page_indptr=page_indptr)
    try:
        return _core.attn_fwd(
            q=q,
            k=k_pages,
            v=v_pages,
            out=True if out is None else out,
            lse=(True if return_lse else None) if lse is None else lse,
            varlen=queries | side << 8 | layout << 16,
            batch=batch,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            q_lengths=q_lengths if cu_seqlens_q is None else cu_seqlens_q,
            k_lengths=k_lengths if last_page_lengths is None else last_page_lengths,
            page_table=page_table,
            page_indptr=page_indptr,
            page_indices=page_indices,
            mask=mask,
            align=_choice("align", align, _ALIGN),
            window_left=left,
            window_right=right,
            softmax_scale=softmax_scale,
            softcap=softcap,
            alibi=alibi,
            sink=sink,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            lse_base=_choice("lse_base", lse_base, _LSE_BASE),
            backend=backend,
            flags=_flags(deterministic, batch_invariant, strict),
            num_threads=num_threads,
            stream=stream,
            explain=_explain,
        )
    except Error as error:
        names = dict(
            k="k_pages",
            v="v_pages",
            q_lengths=None if cu_seqlens_q is None else "cu_seqlens_q",
            k_lengths=None if last_page_lengths is None else "last_page_lengths",
        )
        raise _renamed(error, **names) from None


def merge(
    out_parts: Union[Array, Sequence[Array]],
    lse_parts: Union[Array, Sequence[Array]],
    *,
    lse_base: LseBase = "e",
    out: Optional[Array] = None,
    lse: Optional[Array] = None,
    backend: Optional[str] = None,
    num_threads: Optional[int] = None,
    stream: Optional[int] = None,
    _explain: Optional[str] = None,
) -> Any:
    """One result from partial results of the same query rows over disjoint keys.

    out_parts: one array [N, B, H, S, Dv], or a list of 1 to 8 arrays [B, H, S, Dv], in float32, float16 or bfloat16. lse_parts,
    float32:
    [N, B, H, S], or as many [B, H, S], in lse_base. An empty part is (anything finite, -inf).

    Returns (out [B, H, S, Dv], lse [B, H, S]). out and lse are written and returned if given; they may be the first part's own,
    of the same type and strides. The other arguments are those of `attention`.
    """
    return _core.attn_merge(
        out_parts=out_parts,
        lse_parts=lse_parts,
        out=True if out is None else out,
        lse=True if lse is None else lse,
        lse_base=_choice("lse_base", lse_base, _LSE_BASE),
        backend=backend,
        num_threads=num_threads,
        stream=stream,
        explain=_explain,
    )


def append(
    k_new: Array,
    v_new: Optional[Array],
    k: Array,
    v: Optional[Array],
    *,
    k_lengths: Optional[Array] = None,
    last_page_lengths: Optional[Array] = None,
    lengths_after: bool = False,
    new_lengths: Optional[Array] = None,
    cu_seqlens_new: Optional[Array] = None,
    max_seqlen_new: Optional[int] = None,
    page_table: Optional[Array] = None,
    page_indptr: Optional[Array] = None,
    page_indices: Optional[Array] = None,
    max_seqlen_k: Optional[int] = None,
    k_descale: Optional[Array] = None,
    v_descale: Optional[Array] = None,
    backend: Optional[str] = None,
    num_threads: Optional[int] = None,
    stream: Optional[int] = None,
    _explain: Optional[str] = None,
) -> Any:
    """Writes new K and V rows into a cache, in place.

    k_new [B, Hk, Sn, D], v_new [B, Hk, Sn, Dv], with new_lengths [B], int32, where not all rows count; or stacked, [1, Hk, T, *],
    with cu_seqlens_new [B + 1] and max_seqlen_new. k and v: the cache, [B, Hk, Sk, *], or pages as `attention_paged` has
    them, of the rows' type or float8 (stored is new / descale). v_new and v may both be None.
    k_lengths [B], int32: each sequence's length before the append, or after it with lengths_after. last_page_lengths [B], with
    CSR pages: the tokens in the last page after it.
    Rows beyond the slot or the page list are dropped. The other arguments are those of `attention_paged`.

    Returns None; with jax nothing can be appended, its arrays never change.
    """
    if page_table is page_indptr is page_indices is None:
        if k_lengths is None or last_page_lengths is not None:
            raise _invalid("k_lengths must be given, and last_page_lengths only with page_indptr")
        side = _INDIVIDUAL
    else:
        side = _pages(page_table, page_indptr, page_indices, k_lengths, last_page_lengths)
    if cu_seqlens_new is not None and new_lengths is not None:
        raise _invalid("new_lengths and cu_seqlens_new: at most one of them is allowed")
    rows = _CUMULATIVE if cu_seqlens_new is not None else 0 if new_lengths is None else _INDIVIDUAL
    batch = _batch(cu_seqlens_new=cu_seqlens_new, page_indptr=page_indptr)
    try:
        return _core.kv_append(
            k_new=k_new,
            v_new=v_new,
            k=k,
            v=v,
            varlen=rows | side << 8,
            batch=batch,
            max_seqlen_new=max_seqlen_new,
            max_seqlen_k=max_seqlen_k,
            k_lengths=k_lengths if last_page_lengths is None else last_page_lengths,
            new_lengths=new_lengths if cu_seqlens_new is None else cu_seqlens_new,
            page_table=page_table,
            page_indptr=page_indptr,
            page_indices=page_indices,
            k_descale=k_descale,
            v_descale=v_descale,
            lengths_after=1 if lengths_after or last_page_lengths is not None else None,
            backend=backend,
            num_threads=num_threads,
            stream=stream,
            explain=_explain,
        )
    except Error as error:
        names = dict(
            new_lengths=None if cu_seqlens_new is None else "cu_seqlens_new",
            k_lengths=None if last_page_lengths is None else "last_page_lengths",
        )
        raise _renamed(error, **names) from None


def explain(
    function: Callable[..., Any], /, *args: Any, format: Literal["text", "json"] = "text", **kwargs: Any
) -> str:
    """What `function(*args, **kwargs)` would run, and why every other kernel would not; nothing runs.

        print(ingot.explain(ingot.attention, q, k, v, causal=True))

    function: attention, attention_varlen, attention_paged, merge or append. format: "text" or "json".
    """
    if not any(function is x for x in (attention, attention_varlen, attention_paged, merge, append)):
        raise _invalid(
            f"function is {function!r}; ingot.attention, attention_varlen, attention_paged, merge and append are allowed"
        )
    return function(*args, **kwargs, _explain=_choice("format", format, {"text": "text", "json": "json"}))
