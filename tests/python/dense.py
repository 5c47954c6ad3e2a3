"""Attention of one sequence by whole matrices: the oracle's formula where its row by row form would take minutes.

Arrays are [H, S, D]; `dtype` "" gives float64, else the textbook algorithm in float32 with P, dS and O rounded to it.
"""

import numpy as np
from attention_oracle import round_to


def band(sq, sk, left=None, right=None, bottom_right=False):
    """Valid pairs of a window; None: no bound."""
    gap = np.arange(sk)[None, :] - np.arange(sq)[:, None] - (sk - sq if bottom_right else 0)
    return (gap >= -left if left is not None else True) & (gap <= right if right is not None else True) & (gap == gap)


def _weights(q, k, scale, valid, bias, sink):
    kind, group = q.dtype, q.shape[0] // k.shape[0]
    k = np.repeat(k, group, 0)
    s = q @ k.transpose(0, 2, 1) * kind.type(scale or 1 / np.sqrt(q.shape[2]))
    masked = np.zeros(s.shape, bool) if valid is None else np.broadcast_to(~valid, s.shape)
    if bias is not None:
        masked = masked | np.isneginf(bias)
        s = s + np.where(np.isneginf(bias), 0, bias).astype(kind)
    s = np.where(masked, kind.type(-np.inf), s)
    sinks = np.full((q.shape[0], 1), -np.inf, kind) if sink is None else np.asarray(sink, kind)[:, None]
    top = np.maximum(s.max(2, initial=-np.inf), sinks)
    safe = np.where(np.isneginf(top), 0, top).astype(kind)
    e = np.exp(s - safe[..., None])
    total = e.sum(2, dtype=kind) + np.exp(sinks - safe)
    with np.errstate(divide="ignore"):
        return s, e, total, np.where(total > 0, safe + np.log(total), -np.inf).astype(kind)


def attend(q, k, v, scale=0.0, valid=None, bias=None, sink=None, dtype=""):
    """(out, lse)."""
    kind = np.float32 if dtype else np.float64
    q, k, v = (x.astype(kind) for x in (q, k, v))
    _, e, total, lse = _weights(q, k, scale, valid, bias, sink)
    if dtype:
        e = round_to(e, dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = e @ np.repeat(v, q.shape[0] // k.shape[0], 0) / total[..., None]
    out = np.where(total[..., None] > 0, out, kind(0))
    return (round_to(out, dtype) if dtype else out), lse


def gradients(q, k, v, dout, scale=0.0, valid=None, bias=None, sink=None, dtype=""):
    """name -> (gradient, largest sum of absolute terms); ds is that of the scores, and so of a full bias."""
    kind, group = np.float32 if dtype else np.float64, q.shape[0] // k.shape[0]
    q, k, v, dout = (x.astype(kind) for x in (q, k, v, dout))
    out, _ = attend(q, k, v, scale, valid, bias, sink, dtype)
    s, _, _, lse = _weights(q, k, scale, valid, bias, sink)
    scale = kind(scale or 1 / np.sqrt(q.shape[2]))
    prob = np.exp(s - np.where(np.isneginf(lse), 0, lse)[..., None])
    dp = dout @ np.repeat(v, group, 0).transpose(0, 2, 1)
    delta = (dout * out).sum(2, keepdims=True)
    ds, size = prob * (dp - delta), prob * (np.abs(dp) + np.abs(delta))
    weights = prob
    if dtype:
        ds, weights = round_to(ds, dtype), round_to(prob, dtype)
    by_key = lambda x: x.reshape(k.shape[0], group, *x.shape[1:]).sum(1)
    turn = lambda x: x.transpose(0, 2, 1)
    wide = np.repeat(k, group, 0)
    return dict(
        ds=(ds, size.max(initial=0)),
        dq=(ds @ wide * scale, (size @ np.abs(wide)).max(initial=0) * abs(scale)),
        dk=(by_key(turn(ds) @ q) * scale, by_key(turn(size) @ np.abs(q)).max(initial=0) * abs(scale)),
        dv=(by_key(turn(weights) @ dout), by_key(turn(weights) @ np.abs(dout)).max(initial=0)),
    )
