"""Ingot as an attention implementation of Hugging Face Transformers.

    import ingot.transformers                                             # registers "ingot" and "paged|ingot"
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ingot")

A model computes what its eager attention computes, sinks and softcap included, in training and in generation. Where the
mask is causal, a window or padding, it is told to the kernels as such, and no tensor of queries times keys is made. Calls
that Ingot does not run go to Transformers' own "sdpa"; `ingot.torch.statistics` counts both.
"""

from __future__ import annotations

import functools
import typing
import warnings
from typing import Any, Iterator, Optional

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, sdpa_mask

from . import _CUMULATIVE, _INDIVIDUAL, UnsupportedError, _mask
from .torch import _autocast, _count, _operator, _plain, _prepare, _seed

__all__ = ["attention", "mask", "paged_attention"]

# ---- masks ----


class _Mask:
    """A mask by its structure: what Transformers hands from the maker of masks to the layers in place of a tensor.

    Whoever looks into it on the way, as some models do, sees the boolean tensor [B, 1, Sq, Sk] that "sdpa" would have had.
    """

    ndim = 4

    def __init__(self, given: dict, keys: int, causal: bool, window: Optional[tuple], kept: Optional[Tensor], right: bool):
        self.given = given  # the arguments that it was made of
        self.keys = keys  # those beyond are masked
        self.causal, self.window = causal, window  # aligned at the last of the keys
        self.kept = kept  # [B, keys], bool: which keys are no padding; None: all
        self.right = right  # the padding of each sequence, if any, is at its end, and queries and keys begin together

    def dense(self) -> Tensor:
        return sdpa_mask(**{**self.given, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})

    @property
    def device(self):
        return torch.device(self.given["device"])

    def to(self, device: Any, *_: Any, **__: Any) -> "_Mask":
        """On another device, for models that are spread over several."""
        move = lambda x: x.to(device) if isinstance(x, Tensor) else x
        given = {**{name: move(x) for name, x in self.given.items()}, "device": device}
        return _Mask(given, self.keys, self.causal, self.window, move(self.kept), self.right)

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(cls, function, _types, args=(), kwargs=None):
        dense = lambda x: torch.utils._pytree.tree_map(lambda y: y.dense() if isinstance(y, cls) else y, x)
        return function(*dense(args), **dense(kwargs or {}))


def _window_of(function: Any) -> Optional[tuple]:
    """(causal, window) of a function that sliding_window_causal_mask_function or its bidirectional sibling has made."""
    parts = _closed_over(function, "and_masks.<locals>.and_mask")
    if not isinstance(parts, tuple) or len(parts) != 2:
        return None
    window, rest = parts
    size = _closed_over(window, "sliding_window_overlay.<locals>.inner_mask")
    if isinstance(size, int) and rest is causal_mask_function:
        return True, (size - 1, 0)
    size = _closed_over(window, "sliding_window_bidirectional_overlay.<locals>.inner_mask")
    if isinstance(size, int) and rest is bidirectional_mask_function:
        return False, (size, size)
    return None


def _closed_over(function: Any, name: str) -> Any:
    """What the only variable of a closure of this name holds."""
    cells = getattr(function, "__closure__", None)
    known = getattr(function, "__qualname__", None) == name and function.__module__ == causal_mask_function.__module__
    return cells[0].cell_contents if known and cells is not None and len(cells) == 1 else None


def _structure(
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Optional[Tensor] = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> Optional[tuple]:
    """(keys, causal, window, kept, right) of _Mask, or None where a tensor must say it."""
    compiling = torch.compiler.is_compiling()
    if mask_function is causal_mask_function:
        causal, window = True, None
    elif mask_function is bidirectional_mask_function:
        causal, window = False, None
    else:
        known = None if compiling else _window_of(mask_function)  # a compiler does not look into closures
        if known is None:
            return None
        causal, window = known
    if not (allow_is_causal_skip if causal else allow_is_bidirectional_skip):
        return None
    if isinstance(q_offset, Tensor):
        if compiling:
            return None
        q_offset = int(q_offset)
    keys = kv_length
    if causal or window:
        last = q_offset + q_length - kv_offset
        if last > kv_length or (not causal and last != kv_length):
            return None
        keys = last
        if window and window[0] >= keys - 1 and (causal or window[1] >= keys - 1):
            window = None
    kept, right = attention_mask, False
    if kept is not None:
        if compiling or kept.dim() != 2:
            return None
        kept = kept[:, kv_offset : kv_offset + keys].bool()
        if kept.shape[1] < keys:
            kept = torch.nn.functional.pad(kept, (0, keys - kept.shape[1]))
        every, right = torch.stack([kept.all(), (kept[:, 1:] <= kept[:, :-1]).all()]).tolist()
        if every:
            kept, right = None, False
        elif causal or window:
            right = right and keys == q_length
    return keys, causal, window, kept, right


def _subclasses(kind: type) -> Iterator[type]:
    for x in kind.__subclasses__():
        yield x
        yield from _subclasses(x)


@functools.lru_cache(maxsize=None)
def _look_up(config: type) -> bool:
    for kind in config.__mro__[:-1]:
        models = [x for x in _subclasses(PreTrainedModel) if kind in (x.config_class, *typing.get_args(x.config_class))]
        if models:
            break
    else:
        return False
    if any(x._supports_sdpa or x._supports_flash_attn or x._supports_flex_attn for x in models):
        return False
    if not any(x._can_set_attn_implementation() for x in models):
        warnings.warn(
            f'attn_implementation: models of {config.__name__} compute their attention themselves, so "ingot" changes nothing'
        )
    return True


@torch.compiler.assume_constant_result
def _adds_masks(config: type) -> bool:
    """Whether models of this kind of config add masks to their scores in code of their own, as those do that declare no other
    attention than eager's: a boolean mask would be added as 0 and 1."""
    return _look_up(config)


def mask(*args: Any, **given: Any) -> Any:
    """What AttentionMaskInterface asks of an implementation. None: no key is masked; the causal square is no None, as some
    decoders (UMT5's) do not say of themselves that they are causal."""
    already = given.get("attention_mask")
    if isinstance(already, _Mask):
        return already
    if "config" in given and _adds_masks(type(given["config"])):
        return eager_mask(*args, **given)
    found = _structure(**given) if not args and "q_length" in given else None
    if found is None:
        return sdpa_mask(*args, **{**given, "allow_is_causal_skip": False})
    keys, causal, window, kept, _right = found
    if window is None and kept is None and keys == given["kv_length"] and (not causal or given["q_length"] == 1):
        return None
    return _Mask(given, *found)


# ---- attention ----


def _sinks(s_aux: Optional[Tensor]) -> Optional[Tensor]:
    return None if s_aux is None else s_aux.reshape(-1).float()


def _eager(query, key, value, attention_mask, dropout, scaling, is_causal, softcap, s_aux, position_bias=None):
    """What "sdpa" would leave out in plain PyTorch: softcap, sinks, and the weights, which are returned, too."""
    key, value = (repeat_kv(x, query.shape[1] // x.shape[1]) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if position_bias is not None:
        scores = scores + position_bias
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if is_causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))[..., : key.shape[2]]
    weights = torch.nn.functional.dropout(weights.to(value.dtype), dropout)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def _selected(module, query, key, attention_mask, indices=None, block_indices=None, position_ids=None, **_):
    """The mask of a layer that attends to the keys it has chosen (indices [B, Sq, N]) or to chosen blocks of them."""
    if isinstance(attention_mask, _Mask):
        attention_mask = attention_mask.dense()
    rows, keys = query.shape[2], key.shape[2]
    if indices is not None:
        keep = indices.new_zeros((*indices.shape[:2], keys), dtype=torch.bool).scatter(-1, indices.long(), True)[:, None]
        if attention_mask is None:
            return keep
        if attention_mask.dtype == torch.bool:
            return attention_mask & keep
        return attention_mask.masked_fill(~keep, torch.finfo(attention_mask.dtype).min)
    build = getattr(getattr(module, "indexer", None), "build_block_mask", None)
    if build is None:
        raise UnsupportedError(f"block_indices of {type(module).__name__}, which has no indexer.build_block_mask", 20)
    if position_ids is None:
        position_ids = torch.arange(keys - rows, keys, device=query.device)
    position_ids = (position_ids if position_ids.dim() > 1 else position_ids[None]).expand(query.shape[0], -1)
    return build(block_indices, attention_mask, keys, query.dtype, query.device, position_ids)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    is_causal: Optional[bool] = None,
    position_bias: Optional[Tensor] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[Tensor] = None,
    **kwargs: Any,
) -> tuple[Tensor, Optional[Tensor]]:
    """The implementation "ingot" of AttentionInterface: query [B, Hq, Sq, D], key [B, Hk, Sk, D], value [B, Hk, Sk, Dv],
    attention_mask as `mask` makes it or as "sdpa" takes it, s_aux [Hq] the sinks. Returns [B, Sq, Hq, Dv] and, where
    output_attentions asks for them, the weights [B, Hq, Sq, Sk]."""
    seen = bool(kwargs.get("output_attentions"))  # the weights are wanted, too
    if kwargs.get("indices") is not None or kwargs.get("block_indices") is not None:
        attention_mask = _selected(module, query, key, attention_mask, **kwargs)
    if isinstance(attention_mask, _Mask) and attention_mask.given["kv_length"] != key.shape[2]:
        attention_mask = attention_mask.dense()  # of other keys, which is PyTorch's to say
    structure = attention_mask if isinstance(attention_mask, _Mask) else None
    cu_q, cu_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if (cu_q is None) != (cu_k is None):
        raise UnsupportedError("cu_seq_lens_q and cu_seq_lens_k: one without the other; both are needed", 20)
    stacked = cu_q is not None and (structure.kept is None if structure else attention_mask is None)
    bias, causal, window, k_lengths = (None if structure else attention_mask), False, None, None
    k, v = key, value
    if structure:
        causal, window = structure.causal and query.shape[2] > 1, structure.window
        if structure.keys < key.shape[2]:
            k, v = key[:, :, : structure.keys], value[:, :, : structure.keys]
        if structure.right:
            k_lengths = structure.kept.sum(-1, dtype=torch.int32)
        elif structure.kept is not None:
            bias = structure.kept[:, None, None, :]
    elif attention_mask is None and query.shape[2] > 1:
        causal = is_causal
        if causal is None:
            # where the masks are eager's they say it all, and many layers have no is_causal
            own = _adds_masks(type(getattr(module, "config", None)))
            causal = not own and getattr(module, "is_causal", True)
        if causal and key.shape[2] > query.shape[2]:  # what "sdpa" makes of an empty cache of fixed size
            k, v = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    if stacked:
        if position_bias is not None:
            raise UnsupportedError("position_bias with cu_seq_lens_q", 20)
        longest = kwargs.get("max_length_q"), kwargs.get("max_length_k")
        return _stacked(query, key, value, (cu_q, cu_k), longest, causal, window, dropout, scaling, softcap, s_aux, seen)
    square = structure is None or (window is structure.kept is None and (not causal or query.shape[2] == k.shape[2]))
    simple = square and bias is position_bias is s_aux is None and not (softcap or dropout)
    if simple and not seen:
        out = _plain(query, k, v, causal, scaling, True)
        if out is not None:
            _count()
            return out.transpose(1, 2), None
    if position_bias is not None:
        position = position_bias[..., : k.shape[2]]
        if bias is None:
            bias = position
        elif bias.dtype == torch.bool:
            bias = position.masked_fill(~bias, torch.finfo(position.dtype).min)
        else:
            bias = bias + position
    if seen:
        prepared = "output_attentions"
    else:
        cast = _autocast(query, k, v, bias)
        prepared = _prepare(*cast, dropout, False, scaling, True)
    if not isinstance(prepared, str):
        out = _attend(*prepared, dropout, scaling, softcap, s_aux, causal, window, k_lengths, bool(structure and structure.right))
        return out.transpose(1, 2), None
    _count(prepared)
    given = structure.dense() if structure else attention_mask
    if softcap or s_aux is not None or seen:
        if given is not None:
            k, v = key, value
        if position_bias is not None:
            position_bias = position_bias[..., : k.shape[2]]
        return _eager(query, k, v, given, dropout, scaling, causal and given is None, softcap, s_aux, position_bias)
    return sdpa_attention_forward(
        module, query, key, value, given, dropout=dropout, scaling=scaling, is_causal=causal and given is None,
        position_bias=position_bias, **kwargs,
    )  # fmt: skip


def _attend(q, k, v, bias, dropout, scaling, softcap, s_aux, causal, window, k_lengths, top_left):
    mask_kind, left, right = _mask(causal, window)
    out, _ = _operator(
        q, k, v, bias, None, _sinks(s_aux), None, k_lengths, _seed(q, dropout, None), scaling or 0.0, softcap or 0.0,
        dropout, mask_kind or 0, 1 if top_left else 2, left or 0, right or 0, _INDIVIDUAL << 8 if k_lengths is not None else 0,
        0, 0, 0, torch.are_deterministic_algorithms_enabled(), "", want_lse=False,
    )  # fmt: skip
    _count()
    return out


# ---- stacked sequences ----


def _blocks(cu_q: Tensor, cu_k: Tensor, rows: int, keys: int, causal: bool, window: Optional[tuple]) -> Tensor:
    """The mask [1, 1, rows, keys] of stacked sequences, each aligned at its end."""
    place = lambda cu, n: torch.searchsorted(cu[1:].contiguous(), torch.arange(n, device=cu.device, dtype=cu.dtype), right=True)
    of_q, of_k = place(cu_q, rows), place(cu_k, keys)
    last = cu_q.shape[0] - 2
    at_q = torch.arange(rows, device=cu_q.device) - cu_q[1:][of_q.clamp(max=last)]
    at_k = torch.arange(keys, device=cu_q.device) - cu_k[1:][of_k.clamp(max=last)]
    keep = of_q[:, None] == of_k
    if causal:
        keep &= at_k <= at_q[:, None]
    if window:
        keep &= (at_k >= at_q[:, None] - window[0]) & (at_k <= at_q[:, None] + window[1])
    return keep[None, None]


def _stacked(query, key, value, cu, longest, causal, window, dropout, scaling, softcap, s_aux, seen=False) -> tuple:
    """Attention of the sequences that lie one after another in the only row of query, key and value. seen: with the weights."""
    if query.shape[0] != 1:
        raise UnsupportedError(f"cu_seq_lens_q with a batch of {query.shape[0]}; 1 is allowed, as sequences are stacked in it", 20)
    cu_q, cu_k = (x.to(torch.int32) for x in cu)
    longest = [int(n) if n is not None else int(x.diff().max()) for n, x in zip(longest, (cu_q, cu_k))]
    prepared = "output_attentions" if seen else _prepare(*_autocast(query, key, value), None, dropout, False, scaling, True)
    if isinstance(prepared, str):
        _count(prepared)
        keep = _blocks(cu_q, cu_k, query.shape[2], key.shape[2], causal, window)
        return _eager(query, key, value, keep, dropout, scaling, False, softcap, s_aux)
    q, k, v, _ = prepared
    mask_kind, left, right = _mask(causal, window)
    out, _ = _operator(
        q, k, v, None, None, _sinks(s_aux), cu_q, cu_k, _seed(q, dropout, None), scaling or 0.0, softcap or 0.0, dropout,
        mask_kind or 0, 2, left or 0, right or 0, _CUMULATIVE | _CUMULATIVE << 8, cu_q.shape[0] - 1, *longest,
        torch.are_deterministic_algorithms_enabled(), "", want_lse=False,
    )  # fmt: skip
    _count()
    return out.transpose(1, 2), None


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[Tensor] = None,
    *,
    cache: Any = None,
    cu_seq_lens_q: Optional[Tensor] = None,
    cu_seq_lens_k: Any = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Any = None,
    read_index: Optional[list] = None,
    write_index: Optional[list] = None,
    block_table: Optional[Tensor] = None,
    **kwargs: Any,
) -> tuple[Tensor, Optional[Tensor]]:
    """The implementation "paged|ingot", which continuous batching calls: the new rows of all requests stacked in query, key and
    value [1, H, T, D]. They go into the cache, and each request attends to what the cache then holds of it."""
    if cache is None:
        raise UnsupportedError(
            "cache is None; paged|ingot is for generate_batch, which gives one, and for models that hand it on to their layers", 20
        )
    if block_table is not None:
        raise UnsupportedError("block_table: paged|ingot takes read_index and write_index", 20)
    if dropout:
        raise UnsupportedError(f"dropout is {dropout} with a paged cache", 20)
    for name in ("indices", "block_indices", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"{name} with a paged cache", 20)
    window = cache.sliding_windows[module.layer_idx]
    window = window if window > 1 else None  # 1 stands for a layer without
    if isinstance(cu_seq_lens_k, dict):
        kind = "sliding_attention" if window else "full_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
    keys, values = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, read_index=read_index, write_index=write_index
    )
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    return _stacked(
        query, keys, values, (cu_seq_lens_q, cu_seq_lens_k), (max_seqlen_q, max_seqlen_k), True,
        (window - 1, 0) if window else None, 0.0, scaling, softcap, s_aux,
    )  # fmt: skip


AttentionInterface.register("ingot", attention)
AttentionInterface.register("paged|ingot", paged_attention)
AttentionMaskInterface.register("ingot", mask)
