"""Ingot's attention as PyTorch operators: autograd, torch.compile, autocast; and in place of PyTorch's own attention.

    import ingot.torch
    out = ingot.torch.attention(q, k, v, causal=True)      # gradients and torch.compile as with any operator
    ingot.torch.enable()                                    # F.scaled_dot_product_attention now runs on Ingot

The operators are torch.ops.ingot.attention_forward and attention_backward. On CUDA tensors they run on the current stream.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import weakref
from collections import Counter
from typing import Any, Callable, Iterator, Optional, Union

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.nn.attention.bias import CausalBias

from .. import (
    _ALIGN,
    _CUMULATIVE,
    _INDIVIDUAL,
    Align,
    Error,
    UnsupportedError,
    Window,
    _batch,
    _choice,
    _core,
    _invalid,
    _mask,
    _renamed,
)

__all__ = ["attention", "attention_varlen", "disable", "enable", "scaled_dot_product_attention", "statistics"]

# ---- the operators ----

_library = torch.library.Library("ingot", "DEF")
# What forward and backward have in common, after their tensors. varlen, mask, align and lse's layout as in ingot.h.
_TERMS = (
    "Tensor? bias, Tensor? alibi, Tensor? sink, Tensor? q_lengths, Tensor? k_lengths, Tensor? dropout_seed, "
    "float softmax_scale, float softcap, float dropout_p, int mask, int align, int window_left, int window_right, "
    "int varlen, SymInt batch, SymInt max_seqlen_q, SymInt max_seqlen_k, bool deterministic, str backend"
)
_TENSOR_TERMS = 6
# seq_major: the output's memory is [B, S, H, D], as models read it on; otherwise [B, H, S, D].
_library.define(f"attention_forward(Tensor q, Tensor k, Tensor v, {_TERMS}, bool seq_major) -> (Tensor out, Tensor lse)")
_library.define(
    f"attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_TERMS}, bool[5] wanted) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)"
)


def _dense(x: Optional[Tensor]) -> Optional[Tensor]:
    """x with its last axis dense, which the library asks for; a copy only where it is not. The imaginary part of conjugated
    numbers is its memory times -1, which DLPack does not say."""
    return x if x is None or (x.stride(-1) == 1 and not x.is_neg()) else x.contiguous().resolve_neg()


@functools.lru_cache(maxsize=256)
def _numbers(softmax_scale, softcap, dropout_p, mask, align, window_left, window_right, varlen, batch, max_seqlen_q,
             max_seqlen_k, deterministic, backend):  # fmt: skip
    """What is no tensor of the common arguments as keywords of _core, but for what is 0, the default everywhere."""
    terms = dict(
        softmax_scale=softmax_scale, softcap=softcap, dropout_p=dropout_p, mask=mask, align=align,
        window_left=window_left, window_right=window_right, varlen=varlen, batch=batch, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, flags=1 if deterministic else 0, backend=backend,
    )  # fmt: skip
    return {name: x for name, x in terms.items() if x}


def _terms(bias, alibi, sink, q_lengths, k_lengths, dropout_seed, *numbers):
    """The common arguments as keywords of _core."""
    if bias is alibi is sink is q_lengths is k_lengths is dropout_seed is None:
        return _numbers(*numbers)
    if bias is not None:
        bias = bias.resolve_neg() if bias.stride(-1) == 0 else _dense(bias)
    tensors = dict(
        bias=bias, alibi=alibi, sink=sink, q_lengths=q_lengths, k_lengths=k_lengths, dropout_seed_ptr=dropout_seed
    )
    return {**tensors, **_numbers(*numbers)}


def _new_results(q: Tensor, v: Tensor, varlen: int, seq_major: bool) -> tuple:
    """Tensors like those that the library makes: out and lse."""
    for name, x in (("q", q), ("v", v)):
        if x.dim() != 4:
            raise _invalid(f"{name} has {x.dim()} axes; 4 are needed")
    b, h, s, _ = q.shape
    d = v.shape[3]
    inner = (d, h * d) if seq_major else (s * d, d)
    out = torch.empty_strided((b, h, s, d), (s * h * d, *inner, 1), dtype=q.dtype, device=q.device)
    lse = torch.empty((h, s) if varlen & 1 else (b, h, s), dtype=torch.float32, device=q.device)
    return out, lse


def _threads(q: Tensor) -> Optional[int]:
    """As many as PyTorch's own kernels take."""
    return torch.get_num_threads() if q.is_cpu else None


def _dual(*tensors: Optional[Tensor]) -> bool:
    """Whether one of them carries a tangent of forward-mode differentiation."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def _refuse_dual(*tensors: Optional[Tensor]) -> None:
    if _dual(*tensors):
        raise UnsupportedError(
            "attention: Ingot has no forward-mode derivatives; PyTorch's own attention has, on SDPBackend.MATH", 20
        )


def _refuse_func_grad() -> None:
    """PyTorch's own refusal speaks of autograd.Function, which the caller did not write."""
    levels = None if torch.compiler.is_compiling() else torch._C._functorch.get_interpreter_stack()
    if any(x.key() == torch._C._functorch.TransformType.Grad for x in levels or ()):
        raise UnsupportedError(
            "attention: Ingot has no rule for torch.func.grad and its like; use torch.autograd.grad, or PyTorch's own attention",
            20,
        )


def _forward(q, k, v, *terms_and_layout, want_lse=True):
    *terms, seq_major = terms_and_layout
    if forward_ad._current_level >= 0:
        _refuse_dual(q, k, v, *terms[:_TENSOR_TERMS])
    found = _core.attn_fwd(
        q=_dense(q), k=_dense(k), v=_dense(v), out=True, lse=True if want_lse else None, seq_major=seq_major, track=False,
        num_threads=_threads(q), **_terms(*terms),
    )  # fmt: skip
    return found if want_lse else (found, None)


def _forward_fake(q, k, v, *terms):
    return _new_results(q, v, terms[_VARLEN], terms[-1])


def _new_gradients(q, k, v, bias, sink, varlen, wanted):
    like = (q, k, v, bias, sink)
    new = torch.zeros_like if varlen else torch.empty_like
    return tuple(
        new(x, memory_format=torch.contiguous_format) if want else q.new_empty(0) for x, want in zip(like, wanted)
    )


def _backward(dout, q, k, v, out, lse, *terms_and_wanted):
    *terms, wanted = terms_and_wanted
    grads = _new_gradients(q, k, v, terms[0], terms[2], terms[_VARLEN], wanted)
    names = ("dq", "dk", "dv", "dbias", "dsink")
    outputs = {name: x for name, x, want in zip(names, grads, wanted) if want}
    if outputs:
        _core.attn_bwd(
            dout=_dense(dout), q=_dense(q), k=_dense(k), v=_dense(v), out=out, lse=lse, track=False,
            num_threads=_threads(q), **outputs, **_terms(*terms),
        )  # fmt: skip
    return grads


def _backward_fake(dout, q, k, v, out, lse, *terms_and_wanted):
    *terms, wanted = terms_and_wanted
    return _new_gradients(q, k, v, terms[0], terms[2], terms[_VARLEN], wanted)


_VARLEN = [x.split()[1].split("=")[0] for x in _TERMS.split(", ")].index("varlen")


def _setup_context(ctx, inputs, output, returns_lse=True):
    q, k, v, *terms, _ = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, *terms[:_TENSOR_TERMS])
    ctx.terms = terms[_TENSOR_TERMS:]
    if returns_lse:
        ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, _dlse):
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    bias, _, sink = tensors[:3]
    nothing = (None,) * (3 + _TENSOR_TERMS + len(ctx.terms) + 1)
    if dout is None:
        return nothing
    needed = ctx.needs_input_grad
    wanted = [*needed[:3], needed[3] and bias is not None, needed[5] and sink is not None]
    if needed[4]:
        raise UnsupportedError("alibi: the library computes no gradient of its slopes; detach it", 20)
    # With grad mode on, gradients of these are wanted in turn: the operator's own autograd refuses those.
    # Without a storage dout is several at once, of is_grads_batched.
    plain = _unobserved(dout, q, k, v) and _has_storage(dout) and not torch.is_grad_enabled()
    backward = _backward if plain else torch.ops.ingot.attention_backward
    grads = backward(dout, q, k, v, out, lse, *tensors, *ctx.terms, wanted)
    dq, dk, dv, dbias, dsink = (x if want else None for x, want in zip(grads, wanted))
    return dq, dk, dv, dbias, None, dsink, *nothing[6:]


def _no_second_derivative(_ctx, *_):
    raise UnsupportedError("attention: Ingot has no second derivatives; PyTorch's own attention has, on SDPBackend.MATH", 20)


for _device in ("CPU", "CUDA"):
    _library.impl("attention_forward", _forward, _device)
    _library.impl("attention_backward", _backward, _device)
torch.library.register_fake("ingot::attention_forward", _forward_fake, lib=_library)
torch.library.register_fake("ingot::attention_backward", _backward_fake, lib=_library)
torch.library.register_autograd("ingot::attention_forward", _gradients, setup_context=_setup_context, lib=_library)
torch.library.register_autograd("ingot::attention_backward", _no_second_derivative, lib=_library)


# ---- without the dispatcher ----

# An operator written in Python costs the dispatcher and its autograd hundreds of microseconds a call. Where nobody looks on
# (a compiler, a mode, functorch), the same functions are called without them.


class _Function(torch.autograd.Function):
    """What register_autograd makes of the operator; what has no gradient comes as one argument, which is faster."""

    @staticmethod
    def forward(ctx, q, k, v, bias, alibi, sink, rest, want_lse):
        out, lse = _forward(q, k, v, bias, alibi, sink, *rest)
        _setup_context(ctx, (q, k, v, bias, alibi, sink, *rest), (out, lse), want_lse)
        return (out, lse) if want_lse else out

    @staticmethod
    def backward(ctx, dout, dlse=None):
        return *_gradients(ctx, dout, dlse)[:6], None, None


try:
    _modes, _tracing = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
    _level = torch._C._functorch.maybe_current_level
    _autocasting = torch._C._is_any_autocast_enabled
    _has_storage = torch._C._has_storage
    _modes(), _tracing(), _level(), _autocasting()
except AttributeError:  # another version of PyTorch: the dispatcher is always right
    _modes = lambda: 1
_PLAIN = (Tensor, torch.nn.Parameter, type(None))


def _unobserved(*tensors: Optional[Tensor]) -> bool:
    if torch.compiler.is_compiling() or _modes() or _tracing() is not None or _level() is not None:
        return False
    if forward_ad._current_level >= 0:
        return False
    for x in tensors:
        if type(x) not in _PLAIN:
            return False
    return True


def _plain(q, k, v, is_causal, scale, grouped, like_q=False) -> Optional[Tensor]:
    """PyTorch's attention without mask and dropout in one step of the extension, where nobody looks on, no gradient is wanted
    and nothing is special; None otherwise. A small call takes a third of the time so."""
    if not (scale is None or (type(scale) is float and 2.0**-126 <= abs(scale) < 2.0**127)):
        return None
    if q is None or k is None or v is None or not _unobserved(q, k, v) or _autocasting():
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    deterministic, threads = int(torch.are_deterministic_algorithms_enabled()), torch.get_num_threads()
    return _core.plain_sdpa(q, k, v, is_causal, scale, grouped, deterministic, threads, like_q)


def _operator(q, k, v, *terms, want_lse=True, seq_major=True):
    tensors = (q, k, v, *terms[:_TENSOR_TERMS])
    if not _unobserved(*tensors):
        _refuse_dual(*tensors)
        _refuse_func_grad()
        return torch.ops.ingot.attention_forward(q, k, v, *terms, seq_major)
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                found = _Function.apply(q, k, v, *terms[:3], (*terms[3:], seq_major), want_lse)
                return found if want_lse else (found, None)
    return _forward(q, k, v, *terms, seq_major, want_lse=want_lse)


# ---- functions ----


def _autocast(*tensors: Optional[Tensor]) -> tuple:
    """As PyTorch does for its own attention: what is float and not double gets autocast's type."""
    q = tensors[0]
    device = "cpu" if q.is_cpu else "cuda" if q.is_cuda else None
    if device is None or not torch.is_autocast_enabled(device):
        return tensors
    to = torch.get_autocast_dtype(device)
    eligible = lambda x: isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return tuple(x.to(to) if eligible(x) else x for x in tensors)


def _seed(q: Tensor, dropout_p: float, dropout_seed: Union[int, Tensor, None]) -> Optional[Tensor]:
    """The cell with the seed. Drawn on the device by torch's generator, so torch.manual_seed repeats it."""
    if not dropout_p:
        return None
    if dropout_seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    if isinstance(dropout_seed, Tensor):
        return dropout_seed
    try:
        number = operator.index(dropout_seed)
    except TypeError:
        raise TypeError(f"dropout_seed is {dropout_seed!r}; it is an int or an int64 tensor of one element") from None
    return torch.tensor([(number + 2**63) % 2**64 - 2**63], dtype=torch.int64, device=q.device)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    align: Align = None,
    softmax_scale: Optional[float] = None,
    softcap: Optional[float] = None,
    bias: Optional[Tensor] = None,
    alibi: Optional[Tensor] = None,
    sink: Optional[Tensor] = None,
    q_lengths: Optional[Tensor] = None,
    k_lengths: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    dropout_seed: Union[int, Tensor, None] = None,
    return_lse: bool = False,
    backend: Optional[str] = None,
    deterministic: Optional[bool] = None,
) -> Any:
    """`ingot.attention` as an operator of PyTorch: q [B, Hq, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv] in float32, float16
    or bfloat16; returns [B, Hq, Sq, Dv], with return_lse also the log-sum-exp [B, Hq, Sq], which has no gradient.

    Gradients flow into q, k, v, bias (float) and sink. The output lies in memory as [B, S, H, D], so that .transpose(1, 2) is
    contiguous and .view of the output itself may be refused; rows past q_lengths are 0.
    dropout_seed: a number, or an int64 tensor of one element; None: drawn by torch's generator of the device.
    deterministic: None for torch.are_deterministic_algorithms_enabled(). Under autocast q, k, v and bias are cast as PyTorch's
    own attention casts them. The other arguments are those of `ingot.attention`.
    """
    if (
        (window is softcap is bias is alibi is sink is q_lengths is k_lengths is dropout_seed is backend is deterministic is None)
        and (align == "top_left" or (not causal and (align is None or align == "bottom_right")))
        and dropout_p == 0
        and not return_lse
    ):
        out = _plain(q, k, v, causal, softmax_scale, True)
        if out is not None:
            return out
    varlen = (0 if q_lengths is None else _INDIVIDUAL) | (0 if k_lengths is None else _INDIVIDUAL << 8)
    return _attention(q, k, v, causal, window, align, softmax_scale, softcap, bias, alibi, sink, q_lengths, k_lengths,
                      dropout_p, dropout_seed, return_lse, backend, deterministic, varlen, 0, 0, 0)  # fmt: skip


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    window: Window = None,
    align: Align = None,
    softmax_scale: Optional[float] = None,
    softcap: Optional[float] = None,
    alibi: Optional[Tensor] = None,
    sink: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    dropout_seed: Union[int, Tensor, None] = None,
    return_lse: bool = False,
    backend: Optional[str] = None,
    deterministic: Optional[bool] = None,
) -> Any:
    """`ingot.attention_varlen` as an operator of PyTorch: q [1, Hq, Tq, D], k [1, Hk, Tk, D], v [1, Hk, Tk, Dv], sequences
    stacked along T; cu_seqlens_q and cu_seqlens_k [B + 1], int32. Returns [1, Hq, Tq, Dv], with return_lse also [Hq, Tq].

    Rows of no sequence are 0, in the output and in the gradients. The other arguments are those of `attention`.
    """
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is no tensor of torch but {type(x)}")
    batch = _batch(cu_seqlens_q=cu_seqlens_q)
    try:
        return _attention(q, k, v, causal, window, align, softmax_scale, softcap, None, alibi, sink, cu_seqlens_q,
                          cu_seqlens_k, dropout_p, dropout_seed, return_lse, backend, deterministic,
                          _CUMULATIVE | _CUMULATIVE << 8, batch, max_seqlen_q, max_seqlen_k)  # fmt: skip
    except Error as error:
        raise _renamed(error, q_lengths="cu_seqlens_q", k_lengths="cu_seqlens_k") from None


def _attention(q, k, v, causal, window, align, softmax_scale, softcap, bias, alibi, sink, q_lengths, k_lengths,
               dropout_p, dropout_seed, return_lse, backend, deterministic, varlen, batch, max_seqlen_q,
               max_seqlen_k):  # fmt: skip
    tensors = (q, k, v, bias, alibi, sink, q_lengths, k_lengths)
    for name, x in zip(("q", "k", "v", "bias", "alibi", "sink", "q_lengths", "k_lengths"), tensors):
        if isinstance(x, Tensor):
            if x.layout != torch.strided or x.is_nested:
                raise _invalid(f"{name} is a nested tensor or of layout {x.layout}; it must be strided")
        elif x is not None or name in ("q", "k", "v"):
            raise TypeError(f"{name} is no tensor of torch but {type(x)}")
    q, k, v, bias = _autocast(q, k, v, bias)
    mask, left, right = _mask(causal, window)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    out, lse = _operator(
        q, k, v, bias, alibi, sink, q_lengths, k_lengths, _seed(q, dropout_p, dropout_seed), softmax_scale or 0.0,
        softcap or 0.0, dropout_p, mask or 0, _choice("align", align, _ALIGN) or 0, left or 0, right or 0, varlen,
        batch, max_seqlen_q, max_seqlen_k, deterministic, backend or "", want_lse=return_lse,
    )  # fmt: skip
    return (out, lse) if return_lse else out


# ---- in place of PyTorch's own attention ----

_functional = torch.nn.functional
_original = _functional.scaled_dot_product_attention
_KINDS = (Tensor, torch.nn.Parameter, FakeTensor, getattr(torch.nn, "Buffer", Tensor))  # a compiler's buffers, else plain
_BOOLS, _NUMBERS = (bool, torch.SymBool), (int, float, torch.SymInt, torch.SymFloat)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_on_ingot = 0
_on_original: Counter[str] = Counter()


def _count(reason: Optional[str] = None) -> None:
    """Counts a call that Ingot ran, or one that was left to PyTorch and why. Compiled code does not count."""
    global _on_ingot
    if torch.compiler.is_compiling():
        return
    if reason is None:
        _on_ingot += 1
    else:
        _on_original[reason] += 1


try:
    _function_modes, _function_mode_at = torch._C._len_torch_function_stack, torch._C._get_function_stack_at
    _flags = [getattr(torch._C, f"_get_{x}_sdp_enabled") for x in ("flash", "mem_efficient", "math", "cudnn")]
    _function_modes(), [x() for x in _flags]
    _flash, _mem_efficient, _math, _cudnn = _flags
    if not _cudnn():  # a version that has it off by itself, or the user's choice for all that follows
        _cudnn = _flash
except AttributeError:  # another version of PyTorch
    _function_modes = _function_mode_at = lambda *_: 0
    _flash = _mem_efficient = _math = _cudnn = lambda: True
# Modes that are about other functions, and those of a tracer, which finds the operator.
_OTHER_MODES = ("torch.utils._device.DeviceContext", "torch.fx.experimental.proxy_tensor.TorchFunctionMetadataMode")


def _wants_original() -> Optional[str]:
    """Why PyTorch's own function is meant, whatever the tensors are. In compiled code what holds while it is compiled."""
    if not (_flash() and _mem_efficient() and _math() and _cudnn()):
        return "backends chosen by torch.nn.attention.sdpa_kernel"
    if torch.compiler.is_compiling():
        return None
    for i in range(_function_modes()):
        kind = type(_function_mode_at(i))
        if f"{kind.__module__}.{kind.__qualname__}" not in _OTHER_MODES:
            return "a mode of torch.overrides"
    return None


def _prepare(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa) -> Union[tuple, str]:
    """(q, k, v, bias) with four axes each, or why the call is left to PyTorch. Wrong calls are left to it too, for its own
    message."""
    tensors = (q, k, v) if attn_mask is None else (q, k, v, attn_mask)
    for x in tensors:
        if type(x) not in _KINDS:
            return "a subclass of Tensor" if isinstance(x, Tensor) else "an argument that is no tensor"
    if not torch.compiler.is_compiling() and _level() is not None:
        return "torch.func"
    if _dual(*tensors):
        return "forward-mode differentiation"
    device = q.device
    if not (q.is_cpu or q.is_cuda):
        return "a device other than cpu and cuda"
    for x in tensors:
        if x.is_nested or x.layout != torch.strided:
            return "a nested or sparse tensor"
        if x.device != device:
            return "several devices"
    axes, dtype = q.dim(), q.dtype
    if not 2 <= axes <= 4 or k.dim() != axes or v.dim() != axes:
        return "not 2 to 4 axes, alike in q, k and v"
    if dtype not in _FLOATS or k.dtype != dtype or v.dtype != dtype:
        return "a type other than float32, float16 and bfloat16, or not alike in q, k and v"
    if not isinstance(is_causal, _BOOLS) or not isinstance(enable_gqa, _BOOLS):
        return "is_causal or enable_gqa that is no bool"
    if not isinstance(dropout_p, _NUMBERS) or not (scale is None or isinstance(scale, _NUMBERS)):
        return "dropout_p or scale that is no number"
    if not 0.0 <= dropout_p < 1.0 - 2.0**-25:
        return "dropout_p outside [0, 1) in float32"
    if scale is not None and not 2.0**-126 <= abs(scale) < 2.0**127:
        return "a scale of 0, NaN or infinity, or as good as that in float32"
    (*outer, queries, d), (*outer_k, keys, dk), (*outer_v, keys_v, dv) = q.shape, k.shape, v.shape
    if not (1 <= d <= 512 and 1 <= dv <= 512):
        return "a head size of 0 or beyond 512"
    if dk != d or keys_v != keys:
        return "shapes that do not match"
    if attn_mask is not None:
        if is_causal:
            return "attn_mask together with is_causal"
        if attn_mask.dtype not in (torch.bool, torch.float32, dtype):
            return "attn_mask of another type than bool, float32 and q's"
        if not 2 <= attn_mask.dim() <= axes:
            return "attn_mask with fewer axes than 2, or more than q"

    if axes < 4:
        if enable_gqa:
            return "enable_gqa without an axis of heads"
        q, k, v = (x.reshape(-1, 1, *x.shape[-2:]) for x in (q, k, v))
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(1)
        outer, outer_k, outer_v = ([x.shape[0], 1] for x in (q, k, v))
    if enable_gqa and (outer_v[1] != outer_k[1] or outer_k[1] == 0 or outer[1] % outer_k[1]):
        return "shapes that do not match"
    if outer_k != outer_v or (outer[0] != outer_k[0] if enable_gqa else outer != outer_k):
        # Extents of 1 stand for all, but under enable_gqa not in the axis of heads.
        to = [_common(*x) for x in zip(outer, outer_k, outer_v)]
        to_k = [to[0], outer_k[1] if enable_gqa else to[1]]
        to = [to[0], outer[1] if enable_gqa else to[1]]
        for x, wanted in ((outer, to), (outer_k, to_k), (outer_v, to_k)):
            if any(n not in (1, m) for n, m in zip(x, wanted)):
                return "shapes that do not match"
        q, k, v = q.expand(*to, -1, -1), k.expand(*to_k, -1, -1), v.expand(*to_k, -1, -1)
        outer = to
    if attn_mask is not None:
        while attn_mask.dim() < 4:
            attn_mask = attn_mask.unsqueeze(0)
        for n, m in zip(attn_mask.shape, (*outer, queries, keys)):
            if n != 1 and n != m:
                return "attn_mask that does not broadcast to the scores"
    return q, k, v, attn_mask


def _common(*extents):
    """The extent that those other than 1 have, if they have one."""
    for n in extents:
        if n != 1:
            return n
    return 1


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, argument for argument: run by Ingot where it can be, by PyTorch's own
    function otherwise; `statistics` tells which and why. The output's memory is in q's order, [B, H, S, D] or [B, S, H, D]."""
    global _on_ingot
    prepared = _wants_original()
    if prepared is None and attn_mask is None and dropout_p == 0:
        out = _plain(query, key, value, is_causal, scale, enable_gqa, True)
        if out is not None:
            _on_ingot += 1
            return out
    tensors = (query, key, value, attn_mask)
    if prepared is None:
        cast = _autocast(*tensors) if isinstance(query, Tensor) else tensors
        prepared = _prepare(*cast, dropout_p, is_causal, scale, enable_gqa)
    if isinstance(prepared, str):
        _count(prepared)
        given = dict(dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        return _run_original(*tensors, **given)
    q, k, v, bias = prepared
    # As in PyTorch the output's memory is in q's order: callers view it.
    seq_major = 0 < q.stride(1) < q.stride(2)
    out, _ = _operator(
        q, k, v, bias, None, None, None, None, _seed(q, dropout_p, None), scale or 0.0, 0.0, dropout_p,
        1 if is_causal else 0, 1, 0, 0, 0, 0, 0, 0, torch.are_deterministic_algorithms_enabled(), "", want_lse=False,
        seq_major=seq_major,
    )  # fmt: skip
    _count()
    return out if query.dim() == 4 else out.reshape(*out.shape[: query.dim() - 2], *out.shape[2:])


# Scripted code calls PyTorch's own.
torch.jit._builtins._register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")


class _Place:
    """The name torch.nn.functional.scaled_dot_product_attention and what stands there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._visits = 0  # calls of PyTorch's own that are under way with its function in its place
        self._function: Callable = _original  # what stands there otherwise
        self._blocks: list[weakref.ref[_Enabled]] = []  # those that will end, in the order in which they began

    def _put(self, function: Callable) -> None:
        self._function = function
        if not self._visits:
            _functional.scaled_dot_product_attention = function

    def put(self, function: Callable) -> None:
        with self._lock:
            self._put(function)

    def begin(self, block: _Enabled, function: Callable) -> None:
        """Puts the function there until the block's end."""
        with self._lock:
            block.before = self._function if self._visits else _functional.scaled_dot_product_attention
            self._blocks = [x for x in self._blocks if x()] + [weakref.ref(block)]
            self._put(function)

    def end(self, block: _Enabled) -> None:
        """Brings back what was there before the block. Those of several threads end in any order: where a later one goes on,
        it does so in the end."""
        with self._lock:
            blocks = [y for x in self._blocks if (y := x())]
            at = blocks.index(block) if block in blocks else len(blocks)
            if blocks[at + 1 :]:
                blocks[at + 1].before = block.before
            else:
                self._put(block.before)
            self._blocks = [weakref.ref(x) for x in blocks if x is not block]

    @contextlib.contextmanager
    def original(self) -> Iterator[None]:
        """With PyTorch's own function in its place: subclasses of Tensor and modes compare what they are given with what stands
        there, CausalBias for one. Calls of other threads run on PyTorch meanwhile."""
        with self._lock:
            if not self._visits:
                self._function = _functional.scaled_dot_product_attention
                _functional.scaled_dot_product_attention = _original
            self._visits += 1
        try:
            yield
        finally:
            with self._lock:
                self._visits -= 1
                if not self._visits:
                    _functional.scaled_dot_product_attention = self._function


_place = _Place()


def _run_original(*args, **kwargs) -> Tensor:
    """PyTorch's own function, for subclasses and modes as if it had never been replaced."""
    if torch.compiler.is_compiling():
        # What the mask would do of itself, if it knew the function by the name where it looks for it.
        if type(args[3]) is CausalBias:
            return CausalBias._dispatch(*args, **kwargs)
        for x in args[:4]:
            if type(x) not in _KINDS and isinstance(x, Tensor) and _looks_at_functions(type(x)):
                return _run_original_uncompiled(*args, **kwargs)
        return _original(*args, **kwargs)
    if all(type(x) in _PLAIN for x in args[:4]) and not _function_modes():
        return _original(*args, **kwargs)
    with _place.original():
        return _original(*args, **kwargs)


def _looks_at_functions(kind: type) -> bool:
    """Whether the subclass has a __torch_function__ of its own."""
    for base in kind.__mro__:
        if "__torch_function__" in base.__dict__:
            own = base.__dict__["__torch_function__"]
            return base is not torch._C.TensorBase and base is not Tensor and own is not torch._C._disabled_torch_function_impl
    return False


@torch.compiler.disable
def _run_original_uncompiled(*args, **kwargs) -> Tensor:
    return _run_original(*args, **kwargs)


class _Enabled:
    """What enable returns: as a context manager it brings back what was there before."""

    before: Callable

    def __enter__(self) -> _Enabled:
        return self

    def __exit__(self, *_: Any) -> None:
        _place.end(self)


def enable() -> _Enabled:
    """Puts Ingot in the place of torch.nn.functional.scaled_dot_product_attention, until disable() or, as a context manager,
    until the end of the block. Code that had imported the function by its name before keeps PyTorch's."""
    block = _Enabled()
    _place.begin(block, scaled_dot_product_attention)
    return block


def disable() -> None:
    """Puts PyTorch's own function back."""
    _place.put(_original)


def statistics(reset: bool = False) -> dict[str, Any]:
    """{"ingot": calls of scaled_dot_product_attention that Ingot ran, "original": {why not: calls left to PyTorch}} of this
    process. Calls of compiled code are not counted. reset: begin anew."""
    global _on_ingot
    counted = {"ingot": _on_ingot, "original": dict(_on_original)}
    if reset:
        _on_ingot = 0
        _on_original.clear()
    return counted
