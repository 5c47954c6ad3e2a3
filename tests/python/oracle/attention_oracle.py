"""spec.md as a program: attention forward and backward in float64 with numpy, one query row's rule at a time.

Written from the spec alone, independent of the library; slow and obvious on purpose. Inputs are numpy arrays that
already hold the exact values of the storage type (see `round_to`). Needs numpy only.

    out, lse = forward(Problem(q=..., k=..., v=..., window=(UNBOUNDED, 0), align="bottom_right"))
    grads = backward(problem, dout)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

UNBOUNDED = 2**31 - 1
MAX, CUMULATIVE, INDIVIDUAL, LAST_PAGE = 0, 1, 2, 3  # length axis
IMPLIED, REUSE, ARRAY = 0, 1, 2  # position axis


@dataclass
class Side:
    """One side of the variable-length description (spec section 4)."""

    stacked: bool = False
    length: int = MAX
    position: int = IMPLIED
    lengths: np.ndarray | None = None  # [N+1] cumulative or [N] individual, int32
    positions: np.ndarray | None = None  # [N] or [N+1] starts, int32
    max_seqlen: int = 0  # used when stacked

    def locate(self, b: int, capacity: int) -> tuple[int, int]:
        """(start row, row count) of sequence b along the token axis of its storage, clamped into it."""
        full = self.max_seqlen if self.stacked else capacity
        if self.length == MAX:
            n = full
        elif self.length == CUMULATIVE:
            n = int(self.lengths[b + 1]) - int(self.lengths[b])
        else:
            n = int(self.lengths[b])
        if self.position == IMPLIED:
            start = b * self.max_seqlen if self.stacked else 0
        elif self.position == REUSE:
            start = int(self.lengths[b])
        else:
            start = int(self.positions[b])
        start = min(max(start, 0), capacity)
        return start, min(max(n, 0), full, capacity - start)


@dataclass
class Problem:
    """q [B,Hq,Sq,D], k [B,Hk,Sk,D], v [B,Hk,Sk,Dv]; stacked sides are [1,H,T,*]. Paged K/V: [pages,page_size,Hk,*]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float = 0.0  # 0: 1/sqrt(D)
    softcap: float = 0.0
    window: tuple[int, int] | None = None  # (left, right), None: no mask
    align: str = "top_left"  # or "bottom_right"
    bias: np.ndarray | None = None  # broadcastable to [N,Hq,max Sq,max Sk]
    alibi: np.ndarray | None = None  # [Hq]
    sink: np.ndarray | None = None  # [Hq], natural log
    q_side: Side = field(default_factory=Side)
    k_side: Side = field(default_factory=Side)
    sequences: int | None = None  # N, needed when stacked
    page_table: np.ndarray | None = None  # [N, max_pages] int32 (dense); or CSR:
    page_indptr: np.ndarray | None = None  # [N+1]
    page_indices: np.ndarray | None = None  # [nnz]
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0
    max_seqlen_q: int = 0  # 0: from the storage
    max_seqlen_k: int = 0  # mandatory with CSR pages
    q_descale: float | np.ndarray = 1.0
    k_descale: float | np.ndarray = 1.0
    v_descale: float | np.ndarray = 1.0

    @property
    def count(self) -> int:
        return self.sequences if self.sequences is not None else self.q.shape[0]

    @property
    def max_q(self) -> int:
        return self.max_seqlen_q or self.q_side.max_seqlen or self.q.shape[2]

    @property
    def max_k(self) -> int:
        """Host-known maximum key length: given, or the storage (dense pages: max_pages * page_size)."""
        if self.max_seqlen_k or self.k_side.max_seqlen:
            return self.max_seqlen_k or self.k_side.max_seqlen
        return self.page_table.shape[1] * self.k.shape[1] if self.page_table is not None else self.k.shape[2]

    @property
    def paged(self) -> bool:
        return self.page_table is not None or self.page_indptr is not None

    def q_rows(self, b: int) -> tuple[int, int, int]:
        start, n = self.q_side.locate(b, self.q.shape[2])
        return (0 if self.q_side.stacked else b), start, n

    def kv(self, b: int, x: np.ndarray) -> np.ndarray:
        """[Hk, len, d] of sequence b."""
        if self.paged:
            size = x.shape[1]
            pages = (
                self.page_table[b]
                if self.page_table is not None
                else self.page_indices[self.page_indptr[b] : self.page_indptr[b + 1]]
            )
            n = int(self.k_side.lengths[b])
            if self.k_side.length == LAST_PAGE:
                n = (len(pages) - 1) * size + n if len(pages) else 0
            n = min(max(n, 0), len(pages) * size, self.max_k)
            rows = [x[min(max(int(pages[j // size]), 0), x.shape[0] - 1), j % size] for j in range(n)]
            return np.stack(rows, 1) if rows else np.zeros((x.shape[2], 0, x.shape[3]))
        start, n = self.k_side.locate(b, x.shape[2])
        return x[0 if self.k_side.stacked else b, :, start : start + n]


def philox4x32_10(offset: int, index: np.ndarray, seed: int) -> np.ndarray:
    """Philox4x32, 10 rounds: counter (offset low, offset high, index low, index high), key seed -> uint32 [..., 4]."""
    c = [
        np.full_like(index, offset & 0xFFFFFFFF),
        np.full_like(index, (offset >> 32) & 0xFFFFFFFF),
        index & np.uint64(0xFFFFFFFF),
        index >> np.uint64(32),
    ]
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    m0, m1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
    for _ in range(10):
        p0, p1 = m0 * c[0], m1 * c[2]
        c = [
            (p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            p1 & np.uint64(0xFFFFFFFF),
            (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            p0 & np.uint64(0xFFFFFFFF),
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, -1).astype(np.uint32)


def keep_mask(p: Problem, b: int, h: int, rows: int, cols: int) -> np.ndarray:
    """bool [rows, cols]: which entries dropout keeps (spec section 5)."""
    quads = (p.max_k + 3) // 4
    i = np.arange(rows, dtype=np.uint64)[:, None]
    j4 = np.arange((cols + 3) // 4, dtype=np.uint64)[None, :]
    index = (np.uint64((b * p.q.shape[1] + h) * p.max_q) + i) * np.uint64(quads) + j4
    words = philox4x32_10(p.offset, index, p.seed).reshape(rows, 4 * j4.shape[1])[:, :cols]
    return words.astype(np.uint64) >= np.uint64(int(np.floor(p.dropout_p * 2.0**32 + 0.5)))


def _head(x, b: int, h: int, group: int = 1) -> float:
    """A factor for (sequence, head): scalar, [H] or [B, H]; a table of key heads is read at h // group."""
    x = np.asarray(x, np.float64)
    if x.ndim == 0 or x.size == 1:
        return float(x.reshape(-1)[0])
    row = x if x.ndim == 1 else x[b]
    return float(row[h if h < len(row) and group == 1 else h // group])


def _scores(p: Problem, b: int, h: int):
    """Scores, validity, probabilities before dropout, and what the backward needs, for one (sequence, head)."""
    group = p.q.shape[1] // p.k.shape[2 if p.paged else 1]
    hk = h // group
    qb, start, n = p.q_rows(b)
    q = p.q[qb, h, start : start + n].astype(np.float64)
    k, v = (p.kv(b, x)[hk].astype(np.float64) for x in (p.k, p.v))
    m = k.shape[0]
    scale = p.scale or 1.0 / np.sqrt(p.q.shape[3])
    by_key_head = group if np.ndim(p.q_descale) == 2 and np.shape(p.q_descale)[1] != p.q.shape[1] else 1
    scale *= _head(p.q_descale, b, h, by_key_head) * _head(p.k_descale, b, hk)
    i, j = np.arange(n)[:, None], np.arange(m)[None, :]
    off = m - n if p.align == "bottom_right" else 0
    valid = np.ones((n, m), bool)
    if p.window is not None:
        left, right = p.window
        if left != UNBOUNDED:
            valid &= j - (i + off) >= -left
        if right != UNBOUNDED:
            valid &= j - (i + off) <= right
    bias = None
    if p.bias is not None:
        full = np.broadcast_to(p.bias, (p.count, p.q.shape[1]) + p.bias.shape[2:])[b, h]
        bias = np.broadcast_to(full, (max(full.shape[0], n), max(full.shape[1], m)))[:n, :m]
        if bias.dtype == bool:
            valid &= bias
            bias = np.zeros(bias.shape)
        bias = bias.astype(np.float64)
        valid &= ~np.isneginf(bias)
    raw = np.zeros((n, m))
    for r in range(n):  # a masked pair takes no part at all: never 0 * NaN
        raw[r, valid[r]] = scale * (k[valid[r]] @ q[r])
    s, slope = raw, np.ones((n, m))
    if p.softcap > 0:
        t = np.tanh(raw / p.softcap)
        s = p.softcap * t
        with np.errstate(over="ignore"):
            slope = 1 / np.cosh(raw / p.softcap) ** 2  # 1 - t * t would be 0 where t is nearly 1
    added = np.zeros((n, m))
    if p.alibi is not None:
        added = added - _head(p.alibi, b, h) * np.abs(i + off - j)
    if bias is not None:
        added = added + np.where(valid, bias, 0)
    s = s + added
    s = np.where(valid, s, -np.inf)
    sink = float(p.sink[h]) if p.sink is not None else -np.inf
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        top = np.maximum(s.max(1, initial=-np.inf), sink)
        safe = np.where(np.isneginf(top), 0.0, top)
        total = np.exp(s - safe[:, None]).sum(1) + np.exp(sink - safe)
        lse = np.where(total == 0, -np.inf, safe + np.log(total))
        prob = np.where(valid & (total != 0)[:, None], np.exp(s - np.where(np.isneginf(lse), 0.0, lse)[:, None]), 0.0)
        sink_prob = np.where(total == 0, 0.0, np.exp(sink - np.where(np.isneginf(lse), 0.0, lse)))
    if np.isnan(sink) or sink == np.inf:
        prob, lse = np.full_like(prob, np.nan), np.full_like(lse, np.nan)
    keep = keep_mask(p, b, h, n, m) / (1 - p.dropout_p) if p.dropout_p > 0 else np.ones((n, m))
    return dict(
        q=q,
        k=k,
        v=v,
        valid=valid,
        scale=scale,
        slope=slope,
        added=added,
        prob=prob,
        keep=keep,
        lse=lse,
        sink_prob=sink_prob,
        hk=hk,
        at=(qb, start, n),
    )


def forward(p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse): out like q with head size Dv, lse [N, Hq, rows of the storage]; rows of no sequence stay NaN."""
    out = np.full(p.q.shape[:3] + (p.v.shape[3],), np.nan)
    lse = np.full(p.q.shape[:3], np.nan)
    for b in range(p.count):
        for h in range(p.q.shape[1]):
            r = _scores(p, b, h)
            qb, start, n = r["at"]
            w = r["prob"] * r["keep"]
            o = np.zeros((n, p.v.shape[3]))
            for row in range(n):
                ok = r["valid"][row]
                o[row] = w[row, ok] @ r["v"][ok]
            out[qb, h, start : start + n] = o * _head(p.v_descale, b, r["hk"])
            lse[qb, h, start : start + n] = r["lse"]
    return out, lse


def backward(
    p: Problem, dout: np.ndarray, out: np.ndarray | None = None, lse: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """dq, dk, dv (storage shapes, not paged), dbias (summed over broadcast axes) and dsink, when present. out and lse
    (natural log): the forward's stored results, of which the gradients are then a function; by default the exact ones.
    """
    if p.paged:
        raise ValueError("backward refuses pages")
    dq, dk, dv = (np.zeros(x.shape) for x in (p.q, p.k, p.v))
    dbias = np.zeros(p.bias.shape) if p.bias is not None else None
    dsink = np.zeros(p.q.shape[1]) if p.sink is not None else None
    for b in range(p.count):
        for h in range(p.q.shape[1]):
            r = _scores(p, b, h)
            qb, start, n = r["at"]
            ks, m = p.k_side.locate(b, p.k.shape[2])
            kb, hk = (0 if p.k_side.stacked else b), r["hk"]
            if lse is not None:
                true, given = r["lse"], lse[qb, h, start : start + n].astype(np.float64)
                factor = np.where(np.isneginf(true) & np.isneginf(given), 0.0, np.exp(true - given))
                r["prob"], r["sink_prob"] = r["prob"] * factor[:, None], r["sink_prob"] * factor
            do = dout[qb, h, start : start + n].astype(np.float64) * _head(p.v_descale, b, hk)
            k, v = (np.where(r["valid"].any(0)[:, None], x, 0.0) for x in (r["k"], r["v"]))
            w = r["prob"] * r["keep"]
            dv[kb, hk, ks : ks + m] += w.T @ do
            dp = np.where(r["valid"], do @ v.T, 0.0) * r["keep"]
            rows = np.s_[qb, h, start : start + n]
            delta = (r["prob"] * dp).sum(1) if out is None else (dout[rows].astype(np.float64) * out[rows]).sum(1)
            ds = r["prob"] * (dp - delta[:, None])
            if dsink is not None:
                dsink[h] -= (r["sink_prob"] * delta).sum()
            if dbias is not None:
                cut = [slice(None) if d > 1 else 0 for d in p.bias.shape]
                at = (b if p.bias.shape[0] > 1 else 0, h if p.bias.shape[1] > 1 else 0)
                g = ds
                if p.bias.shape[2] == 1:
                    g = g.sum(0, keepdims=True)
                if p.bias.shape[3] == 1:
                    g = g.sum(1, keepdims=True)
                dbias[at][: g.shape[0], : g.shape[1]] += g
            draw = ds * r["slope"] * r["scale"]
            dq[qb, h, start : start + n] += draw @ k
            dk[kb, hk, ks : ks + m] += draw.T @ r["q"]
    return {name: x for name, x in dict(dq=dq, dk=dk, dv=dv, dbias=dbias, dsink=dsink).items() if x is not None}


def merge(outs: np.ndarray, lses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[parts, ..., Dv] and [parts, ...] -> merged (out, lse); the empty part is (anything finite, -inf)."""
    top = lses.max(0)
    safe = np.where(np.isneginf(top), 0.0, top)
    w = np.exp(lses - safe)
    total = w.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = (w[..., None] * np.where(w[..., None] > 0, outs, 0)).sum(0)
        out = np.where((total > 0)[..., None], parts / total[..., None], 0.0)
        return out, np.where(total > 0, safe + np.log(total), -np.inf)


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """x rounded to float32/float16/bfloat16 (round to nearest even), returned as float32."""
    x = np.asarray(x, np.float32)
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        u = x.view(np.uint32).astype(np.uint64)
        r = ((u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        return np.where(np.isnan(x), x, r)
    return x


def _product(a: np.ndarray, b: np.ndarray, order: int) -> np.ndarray:
    """a @ b in float32, one term after another as the textbook sums (numpy's own product is more exact): from the first
    on with order 0, from the last with 1, else shuffled by that number."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    terms = np.arange(a.shape[1])
    for i in (terms, terms[::-1], np.random.default_rng(order).permutation(terms))[min(order, 2)]:
        total += a[:, i : i + 1] * b[i]
    return total


def _textbook_rows(p: Problem, b: int, h: int, order: int):
    """Scores, weights exp(s - max) and their sums in float32 from the stored inputs, for one (sequence, head)."""
    f = np.float32
    r = _scores(p, b, h)
    q, k, v, ok = r["q"].astype(f), r["k"].astype(f), r["v"].astype(f), r["valid"]
    k, v = (np.where(ok.any(0)[:, None], x, f(0)) for x in (k, v))
    slope = np.ones(ok.shape, f)
    s = _product(q, k.T, order) * f(r["scale"])
    if p.softcap > 0:
        t = np.tanh(s / f(p.softcap))
        s, slope = f(p.softcap) * t, 1 - t * t
    s = s + r["added"].astype(f)
    sink = f(p.sink[h]) if p.sink is not None else f(-np.inf)
    s = np.where(ok, s, f(-np.inf))
    top = np.maximum(s.max(1, initial=-np.inf), sink)
    safe = np.where(np.isneginf(top), f(0), top).astype(f)
    e = np.exp(s - safe[:, None])
    total = e.sum(1, dtype=f) + np.exp(sink - safe)
    lse = np.where(total > 0, safe + np.log(total), f(-np.inf)).astype(f)
    return r, q, k, v, s, slope, sink, e, total, lse


def textbook(p: Problem, dtype: str, out_dtype: str = "", order: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The yardstick of spec section 9: (out, lse) by the plain algorithm, float32 scores, softmax and sums, P rounded
    to `dtype` and O to `out_dtype` (default: the same). order: of the sums over D and over keys, see _product."""
    f = np.float32
    out = np.full(p.q.shape[:3] + (p.v.shape[3],), np.nan, f)
    lse = np.full(p.q.shape[:3], np.nan, f)
    for b in range(p.count):
        for h in range(p.q.shape[1]):
            with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
                r, _, _, v, _, _, _, e, total, row_lse = _textbook_rows(p, b, h, order)
                qb, start, n = r["at"]
                weights = round_to(e, dtype) * r["keep"].astype(f)
                o = np.where((total > 0)[:, None], _product(weights, v, order) / total[:, None], f(0))
                out[qb, h, start : start + n] = round_to(o * f(_head(p.v_descale, b, r["hk"])), out_dtype or dtype)
                lse[qb, h, start : start + n] = row_lse
    return out, lse


def textbook_backward(
    p: Problem,
    dout: np.ndarray,
    dtype: str,
    out: np.ndarray | None = None,
    lse: np.ndarray | None = None,
    order: int = 0,
) -> dict[str, tuple[np.ndarray, float]]:
    """The yardstick of gradients: name -> (values in float32, scale). P and dS are rounded to `dtype`; out and lse are
    the stored ones that the judged call gets too, by default the textbook forward's own. The scale is the largest sum
    of absolute terms, so that a true 0 has a bound."""
    f = np.float32
    got = {name: np.zeros(x.shape, f) for name, x in (("dq", p.q), ("dk", p.k), ("dv", p.v))}
    if p.bias is not None:
        got["dbias"] = np.zeros(p.bias.shape, f)
    if p.sink is not None:
        got["dsink"] = np.zeros(p.q.shape[1], f)
    size = {name: np.zeros(x.shape) for name, x in got.items()}
    if out is None:
        out, lse = textbook(p, dtype)
    for b in range(p.count):
        for h in range(p.q.shape[1]):
            with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
                r, q, k, v, s, slope, sink, _, _, _ = _textbook_rows(p, b, h, order)
                qb, start, n = r["at"]
                row_lse = lse[qb, h, start : start + n].astype(f)
                ks, m = p.k_side.locate(b, p.k.shape[2])
                kb, hk = (0 if p.k_side.stacked else b), r["hk"]
                do = dout[qb, h, start : start + n].astype(f)
                o = out[qb, h, start : start + n].astype(f)
                live = ~np.isneginf(row_lse)
                safe = np.where(live, row_lse, f(0))
                prob = np.where(r["valid"] & live[:, None], np.exp(s - safe[:, None]), f(0))
                keep = r["keep"].astype(f)
                dp = np.where(r["valid"], _product(do, v.T, order), f(0)) * keep
                delta = (do * o).sum(1, dtype=f)
                ds = round_to(prob * (dp - delta[:, None]), dtype)
                terms = (prob * (np.abs(dp) + np.abs(delta)[:, None])).astype(np.float64)
                draw, draw_terms = round_to(ds * slope, dtype) * f(r["scale"]), terms * r["slope"] * abs(r["scale"])
                weights = round_to(prob * keep, dtype)
                for name, at, x, y in (
                    ("dv", np.s_[kb, hk, ks : ks + m], _product(weights.T, do, order), np.abs(weights).T @ np.abs(do)),
                    ("dk", np.s_[kb, hk, ks : ks + m], _product(draw.T, q, order), draw_terms.T @ np.abs(q)),
                    ("dq", np.s_[qb, h, start : start + n], _product(draw, k, order), draw_terms @ np.abs(k)),
                ):
                    got[name][at] += x
                    size[name][at] += y
                if p.sink is not None:
                    share = np.where(live, np.exp(sink - safe), f(0))
                    got["dsink"][h] -= (share * delta).sum(dtype=f)
                    size["dsink"][h] += (share * np.abs(delta)).sum()
                if p.bias is not None:
                    at = (b if p.bias.shape[0] > 1 else 0, h if p.bias.shape[1] > 1 else 0)
                    for table, g in ((got["dbias"], ds), (size["dbias"], terms)):
                        if p.bias.shape[2] == 1:
                            g = g.sum(0, keepdims=True)
                        if p.bias.shape[3] == 1:
                            g = g.sum(1, keepdims=True)
                        table[at][: g.shape[0], : g.shape[1]] += g
    return {name: (got[name], float(np.max(size[name], initial=0))) for name in got}
