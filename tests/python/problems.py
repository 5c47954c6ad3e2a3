"""Attention problems of every kind the specification knows, made from a short description.

A `Spec` says everything about a problem: its `repr` in a failing test is enough to run it again. `draw_spec` draws one
from a source of choices (a seeded generator or hypothesis), `Case` makes arrays, the oracle's Problem and the call's
fields of it. Memory is hostile: guard bands round every array, poison in every output, NaN or Inf in all that the
specification calls dead, odd strides and bases.
"""

from dataclasses import dataclass, field, replace

import attention_oracle as oracle
import ingot_ctypes as ingot
import numpy as np
from ingot_ctypes import ARRAY, CUMULATIVE, IMPLIED, INDIVIDUAL, LAST_PAGE, MAX, REUSE, UNBOUNDED

ORACLE_DTYPE = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
FLOATS = ("f32", "f16", "bf16")
FULL_SIDE = (0, MAX, IMPLIED)
SIDES = [
    (0, MAX, IMPLIED),
    (0, CUMULATIVE, IMPLIED),
    (0, INDIVIDUAL, IMPLIED),
    (1, MAX, IMPLIED),
    (1, CUMULATIVE, IMPLIED),
    (1, INDIVIDUAL, IMPLIED),
    (1, CUMULATIVE, REUSE),
    (1, MAX, ARRAY),
    (1, CUMULATIVE, ARRAY),
    (1, INDIVIDUAL, ARRAY),
]


@dataclass(frozen=True)
class Spec:
    seed: int = 0  # of the values
    dtype: str = "f32"  # of q
    kv: str = "f32"  # of k and v
    out: str = "f32"
    batch: int = 1
    heads_k: int = 1
    group: int = 1
    mq: int = 5  # longest query sequence
    mk: int = 7  # longest key sequence
    d: int = 8
    dv: int = 8
    mask: object = None  # None, "causal" or (left, right)
    align: str = "top_left"  # or "bottom_right", "unset"
    q_side: tuple = FULL_SIDE  # (stacked, length, position)
    k_side: tuple = FULL_SIDE
    pages: str = ""  # "", "dense", "csr" (INDIVIDUAL) or "last" (CSR, LAST_PAGE)
    page_size: int = 4
    bad: bool = False  # lying length, position and page arrays
    bias: str = ""  # "", "own", "f32", "bool"
    bias_axes: tuple = ("full",) * 4  # each "full", "one" (extent 1) or "zero" (stride 0)
    bias_inf: float = 0.0  # share of -inf (false)
    alibi: int = 0  # 1: [Hq], 2: [B,Hq]
    softcap: float = 0.0
    sink: bool = False
    dropout: float = 0.0
    rng_seed: int = 0
    rng_offset: int = 0
    cells: bool = False  # seed and offset through pointers, and asked back
    scale: float = 0.0
    base2: bool = False
    th: bool = False  # lse [T,Hq]
    descale: tuple = ("", "", "")  # of q, k, v: "", "one", "hk" or (q only) "hq"
    zero: str = ""  # k and v: stride 0 over "batch" or "heads"
    odd: int = 0  # seed of the memory layouts; 0: compact
    dirty: bool = False  # NaN and Inf in dead memory
    amplitude: float = 1.0

    @property
    def heads_q(self):
        return self.heads_k * self.group


class Source:
    """Choices from a seeded numpy generator."""

    def __init__(self, rng):
        self.rng = rng

    def of(self, options):
        return options[int(self.rng.integers(len(options)))]

    def between(self, low, high):
        return int(self.rng.integers(low, high + 1))

    def chance(self, p):
        return bool(self.rng.random() < p)


class Drawn:
    """Choices drawn by hypothesis, so that a failing problem shrinks."""

    def __init__(self, draw):
        from hypothesis import strategies

        self.draw, self.st = draw, strategies

    def of(self, options):
        return self.draw(self.st.sampled_from(options))

    def between(self, low, high):
        return self.draw(self.st.integers(low, high))

    def chance(self, p):
        return self.draw(self.st.integers(0, 99)) >= 100 - round(100 * p)


def draw_spec(s, dtypes=FLOATS, backward=False, largest=40, eight=True, head_dims=None):
    """A problem in which each feature is present about a third of the time."""
    dtype = s.of(dtypes)
    fields = dict(dtype=dtype, kv=dtype, out=dtype, seed=s.between(0, 2**31))
    if eight and not backward and s.chance(0.2):
        kind = s.of(ingot.EIGHTS)
        dtype = fields["dtype"] = s.of(["f16", "bf16", kind])
        fields.update(
            kv=kind,
            out=s.of(FLOATS),
            descale=(
                s.of(["", "one", "hk", "hq"]) if dtype == kind else "",
                s.of(["", "one", "hk"]),
                s.of(["", "one", "hk"]),
            ),
        )
    elif s.chance(0.2):
        fields["out"] = s.of(FLOATS)
    fields.update(batch=s.of([1, 2, 3, 2, 4, 0]), heads_k=s.of([1, 2, 1, 3]), group=s.of([1, 1, 2, 3, 5]))
    edge = lambda: s.of([0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33]) if s.chance(0.4) else s.between(1, largest)
    fields.update(mq=min(edge(), largest), mk=min(edge(), largest))
    d = s.of(head_dims or [1, 3, 8, 15, 16, 17, 32, 40, 64])
    fields.update(d=d, dv=d if s.chance(0.6) else s.of(head_dims or [1, 5, 8, 16, 24, 33, 64]))
    if s.chance(0.5):
        fields["q_side"] = s.of(SIDES)
    paged = not backward and s.chance(0.3)
    if paged:
        fields["pages"] = s.of(["dense", "csr", "last"])
        fields["k_side"] = (0, LAST_PAGE if fields["pages"] == "last" else INDIVIDUAL, IMPLIED)
        fields["page_size"] = s.of([1, 2, 3, 4, 7, 16])
        if fields["pages"] != "dense":
            fields["mk"] = max(fields["mk"], 1)  # mandatory
    elif s.chance(0.5):
        fields["k_side"] = s.of(SIDES)
    plain = fields.get("q_side", FULL_SIDE) == fields.get("k_side", FULL_SIDE) == FULL_SIDE
    if s.chance(0.25) and not plain:
        fields["bad"] = True
    fields["align"] = s.of(["top_left", "bottom_right"])
    if s.chance(0.6):
        reach = fields["mk"] + 3
        bound = lambda: (
            UNBOUNDED
            if s.chance(0.3)
            else s.between(-reach, reach) if s.chance(0.9) else s.of([-(2**31), 2**31 - 2, 0])
        )
        fields["mask"] = "causal" if s.chance(0.3) else (bound(), bound())
    fields["alibi"] = s.of([0, 0, 1, 2])
    if plain and not paged and fields["mq"] == fields["mk"] and s.chance(0.3):
        fields["align"] = "unset"
    if fields["mask"] is None and not fields["alibi"] and s.chance(0.3) if "mask" in fields else False:
        fields["align"] = "unset"
    if s.chance(0.4):
        fields["bias"] = s.of(["own", "f32"] if backward and s.chance(0.7) else ["own", "f32", "bool"])
        fields["bias_axes"] = tuple(s.of(["full", "full", "one", "zero"]) for _ in range(4))
        fields["bias_inf"] = s.of([0.0, 0.3, 0.9])
    if s.chance(0.25):
        fields["softcap"] = s.of([0.5, 2.0, 30.0])
    fields["sink"] = s.chance(0.25)
    if s.chance(0.25):
        fields.update(
            dropout=s.of([0.1, 0.5, 0.9, 1e-3]),
            rng_seed=s.of([0, 1, 2**32 + 5, 2**64 - 1, 42]),
            rng_offset=s.of([0, 3, 2**32 - 1, 2**40]),
        )
    fields["cells"] = s.chance(0.3)
    if s.chance(0.3):
        fields["scale"] = s.of([0.5, -0.3, 1.0, 0.07])
    fields["base2"] = s.chance(0.3)
    if fields.get("q_side", FULL_SIDE)[0]:
        fields["th"] = s.chance(0.5)
    if s.chance(0.15) and not fields.get("pages"):
        fields["zero"] = s.of(["batch", "heads"])
    if s.chance(0.6):
        fields["odd"] = s.between(1, 2**20)
    fields["dirty"] = s.chance(0.5)
    fields["amplitude"] = s.of([1.0, 1.0, 4.0])
    return Spec(**fields)


# ---- memory ----


class Placed:
    """An array inside a buffer whose every other element is poison."""

    def __init__(self, shape, dtype, rng=None, any_last=False):
        kind = ingot.DTYPES[dtype][1]
        n = len(shape)
        axes, pads, base, self.junk = list(range(n)), [0] * n, 64, False
        if rng is not None:
            if n > 1:
                axes = list(rng.permutation(n)) if any_last else [*rng.permutation(n - 1), n - 1]
            pads = [int(rng.choice([0, 0, 1])) for _ in shape]
            pads[axes[-1]] = int(rng.choice([0, 0, 1, 3, 8]))
            base += int(rng.choice([0, 1, 8]))
            self.junk = bool(rng.integers(2))
        strides, step = [0] * n, 1
        for axis in reversed(axes):
            strides[axis] = step
            step *= max(shape[axis] + pads[axis], 1)
        self.base, self.strides, self.shape = base, strides, tuple(shape)
        self.buffer = ingot.poison(np.empty(base + step + 64, kind))
        self.array = ingot.Array(self._view(self.buffer), dtype)
        self.array.junk = self.junk
        self.before = None

    def _view(self, flat):
        return np.lib.stride_tricks.as_strided(flat[self.base :], self.shape, [x * flat.itemsize for x in self.strides])

    def fill(self, bits):
        self.array.bits[...] = bits
        return self

    def freeze(self):
        """From here on the whole buffer must stay as it is."""
        self.before = self.buffer.copy()
        return self

    def untouched(self, written=None):
        """Whether everything but the elements in `written` (a mask of the array's shape) is as it was."""
        outside = np.ones(self.buffer.shape, bool)
        if written is not None and 0 not in self.shape:
            self._view(outside)[...] = ~written
        raw = lambda x: x.view(f"u{x.itemsize}")[outside]
        return np.array_equal(raw(self.buffer), raw(self.before))


# ---- sides ----


def wrong(rng, values, rows):
    """Some entries replaced by what no sane caller writes."""
    values = np.array(values, np.int64)
    lies = np.array([-1, -7, -(2**31), 2**31 - 1, 10**9, rows, rows + 1, rows // 2])
    at = rng.random(values.shape) < 0.4
    return np.where(at, rng.choice(lies, values.shape), values)


def some_lengths(rng, batch, longest):
    n = rng.integers(0, longest + 1, batch)
    pick = rng.random(batch)
    return np.where(pick < 0.2, 0, np.where(pick < 0.5, longest, n))


@dataclass
class Layout:
    """One side: rows of the storage and the int32 arrays that describe it."""

    rows: int
    lengths: np.ndarray | None = None
    positions: np.ndarray | None = None
    side: oracle.Side = field(default_factory=oracle.Side)


def lay_out(rng, kind, batch, longest, bad):
    stacked, length, position = kind
    n = np.full(batch, longest) if length == MAX else some_lengths(rng, batch, longest)
    lengths = {MAX: None, CUMULATIVE: np.concatenate([[0], np.cumsum(n)]), INDIVIDUAL: n}[length]
    positions, rows = None, longest
    if stacked:
        gap = int(rng.choice([0, 0, 3]))
        if position == IMPLIED:
            rows = batch * longest + gap
        elif position == REUSE:
            rows = int(n.sum()) + gap
        else:
            starts, at = np.zeros(batch, np.int64), 0
            for b in rng.permutation(batch):
                at += int(rng.choice([0, 0, 2]))
                starts[b] = at
                at += int(n[b])
            rows = at + gap
            positions = np.append(starts, at) if rng.integers(2) else starts
    if stacked and not (batch and longest):  # 0 rows at most: the call must say batch and max_seqlen otherwise
        rows = 0
    if bad:
        lengths, positions = (None if x is None else wrong(rng, x, rows) for x in (lengths, positions))
        if stacked and rng.random() < 0.3 and rows > 1:
            rows -= 1
    side = oracle.Side(bool(stacked), length, position, lengths, positions, longest if stacked else 0)
    return Layout(rows, lengths, positions, side)


class Case:
    """Arrays, oracle and call of a Spec."""

    def __init__(self, spec):
        self.spec = spec
        self.rng = rng = np.random.default_rng(spec.seed)
        self.layout_rng = np.random.default_rng(spec.odd) if spec.odd else None
        self.inputs, self.fields = {}, {}
        self.q_layout = lay_out(rng, spec.q_side, spec.batch, spec.mq, spec.bad)
        self.mq, self.mk = spec.mq, spec.mk
        problem = dict(
            softcap=float(np.float32(spec.softcap)),
            scale=float(np.float32(spec.scale)),
            sequences=spec.batch,
            q_side=self.q_layout.side,
            max_seqlen_q=spec.mq,
        )
        shape_q = [1 if spec.q_side[0] else spec.batch, spec.heads_q, self.q_layout.rows, spec.d]
        problem["q"] = self.value("q", rng.standard_normal(shape_q) * spec.amplitude, spec.dtype)
        self.out_shape = shape_q[:3] + [spec.dv]
        if spec.pages:
            problem.update(self.place_pages())
        else:
            self.k_layout = lay_out(rng, spec.k_side, spec.batch, spec.mk, spec.bad)
            shape = [1 if spec.k_side[0] else spec.batch, spec.heads_k, self.k_layout.rows]
            problem.update(
                k_side=self.k_layout.side,
                k=self.value("k", self.keys(shape + [spec.d]), spec.kv),
                v=self.value("v", self.keys(shape + [spec.dv]), spec.kv),
            )
            problem["max_seqlen_k"] = spec.mk
        for letter, layout in (("q", self.q_layout), ("k", self.k_layout)):
            if layout.lengths is not None:
                self.integers(f"{letter}_lengths", layout.lengths)
            if layout.positions is not None:
                self.integers(f"{letter}_positions", layout.positions)
        problem.update(self.place_terms())
        self.problem = oracle.Problem(**problem)
        self.sequences = [self.problem.q_rows(b) for b in range(spec.batch)]
        self.place_call()
        if spec.dirty:
            self.spoil()
        for placed in self.inputs.values():
            placed.freeze()

    # -- arrays

    def place(self, shape, dtype, any_last=False):
        return Placed(shape, dtype, self.layout_rng, any_last)

    def value(self, name, values, dtype):
        """Places an input and returns its exact values for the oracle."""
        values = np.asarray(values)
        placed = self.inputs[name] = self.place(values.shape, dtype).fill(ingot.encode_bits(values, dtype))
        self.fields[name] = placed.array
        if name in "kv" and self.spec.zero and not self.spec.pages:
            axis = {"batch": 0, "heads": 1}[self.spec.zero]
            bits = placed.array.bits
            if bits.shape[axis] > 1:
                strides = list(bits.strides)
                strides[axis] = 0
                placed.array = self.fields[name] = ingot.Array(
                    np.lib.stride_tricks.as_strided(bits, bits.shape, strides), dtype
                )
        return placed.array.values

    def keys(self, shape):
        return self.rng.standard_normal(shape) * (self.spec.amplitude if shape[-1] == self.spec.d else 1)

    def integers(self, name, values):
        values = np.asarray(values, np.int64)
        placed = self.inputs[name] = Placed(values.shape, "i32").fill(values.astype(np.int32))
        self.fields[name] = placed.array

    # -- pages

    def place_pages(self):
        spec, rng = self.spec, self.rng
        size, csr = spec.page_size, spec.pages != "dense"
        most = -(-spec.mk // size)
        if not csr:
            self.mk = most * size
        lengths = some_lengths(rng, spec.batch, self.mk)
        count = most * spec.batch + 2
        physical = rng.permutation(count)
        if rng.random() < 0.3:
            physical[:] = rng.integers(0, count, count)  # shared pages
        used = [-(-int(n) // size) for n in lengths]
        lists, at = [], 0
        for b in range(spec.batch):
            spare = int(rng.integers(0, 2)) if spec.pages == "csr" else 0
            take = most if not csr else used[b] + spare
            one = np.array(physical[at : at + take].tolist() + [0] * take, np.int64)[:take]
            at += used[b]
            one[used[b] :] = rng.choice([0x7FFFFFF0, -7, 3], take - used[b])  # never read
            lists.append(one)
        given = lengths
        if spec.pages == "last":
            given = np.array([n - (u - 1) * size if u else 1 for n, u in zip(lengths, used)], np.int64)
        if spec.bad:
            given = wrong(rng, given, self.mk)
            lists = [wrong(rng, x, count) for x in lists]
        shape = [count, size, spec.heads_k]
        k = self.value("k", self.keys(shape + [spec.d]), spec.kv)
        v = self.value("v", self.keys(shape + [spec.dv]), spec.kv)
        self.integers("k_lengths", given)
        if not csr:
            table = np.stack(lists) if lists else np.zeros((0, most), np.int64)
            self.integers("page_table", table)
        else:
            indptr = np.concatenate([[0], np.cumsum([len(x) for x in lists])]).astype(np.int64)
            indices = np.concatenate([np.zeros(0, np.int64), *lists])
            if spec.bad:
                indptr = wrong(rng, indptr, len(indices))
            self.integers("page_indptr", indptr)
            self.integers("page_indices", indices)
            # The list of each sequence, clamped into the index array.
            lists = []
            for b in range(spec.batch):
                first = min(max(int(indptr[b]), 0), len(indices))
                lists.append(indices[first : min(max(int(indptr[b + 1]), first), len(indices))])
            given = (
                np.array([(len(x) - 1) * size + n if len(x) else 0 for x, n in zip(lists, given)], np.int64)
                if spec.pages == "last"
                else given
            )
            given = np.array([min(max(int(n), 0), len(x) * size, self.mk) for x, n in zip(lists, given)], np.int64)
            widest = max([len(x) for x in lists], default=0)
            table = np.array([x.tolist() + [0] * (widest - len(x)) for x in lists], np.int64).reshape(
                spec.batch, widest
            )
        self.k_layout = Layout(0)
        return dict(
            k=k, v=v, page_table=table, max_seqlen_k=self.mk, k_side=oracle.Side(False, INDIVIDUAL, IMPLIED, given)
        )

    # -- bias, slopes, sinks, factors

    def place_terms(self):
        spec, rng, found = self.spec, self.rng, {}
        if spec.bias:
            full = (spec.batch, spec.heads_q, self.mq, self.mk)
            own = spec.out if spec.dtype in ingot.EIGHTS else spec.dtype
            dtype = {"own": own, "f32": "f32", "bool": "bool"}[spec.bias]
            small = [1 if how != "full" else n for how, n in zip(spec.bias_axes, full)]
            values = rng.standard_normal(small)
            masked = rng.random(small) < spec.bias_inf
            values = ~masked if dtype == "bool" else np.where(masked, -np.inf, values)
            placed = self.inputs["bias"] = self.place(small, dtype)
            placed.fill(values if dtype == "bool" else ingot.encode_bits(values, dtype))
            bits = placed.array.bits
            shape = [n if how == "zero" else m for how, n, m in zip(spec.bias_axes, full, small)]
            strides = [0 if how == "zero" else x for how, x in zip(spec.bias_axes, bits.strides)]
            view = np.lib.stride_tricks.as_strided(bits, shape, strides)
            self.fields["bias"] = ingot.Array(view, dtype)
            self.bias_small = placed.array.bits if dtype == "bool" else placed.array.values
            found["bias"] = np.broadcast_to(self.bias_small, shape) if dtype == "bool" else self.fields["bias"].values
        if spec.alibi:
            found["alibi"] = self.value("alibi", rng.random([spec.batch, spec.heads_q][2 - spec.alibi :]) * 0.5, "f32")
        if spec.sink:
            found["sink"] = self.value("sink", rng.standard_normal(spec.heads_q), "f32")
        for letter, kind in zip("qkv", spec.descale):
            if kind:
                shape = {"one": [1], "hk": [spec.batch, spec.heads_k], "hq": [spec.batch, spec.heads_q]}[kind]
                found[f"{letter}_descale"] = self.value(f"{letter}_descale", 0.5 + rng.random(shape), "f32")
        if spec.mask is not None:
            found["window"] = (UNBOUNDED, 0) if spec.mask == "causal" else spec.mask
        found["align"] = "bottom_right" if spec.align == "bottom_right" else "top_left"
        if spec.dropout:
            found.update(
                dropout_p=float(np.float32(spec.dropout)),
                seed=spec.rng_seed,
                offset=spec.rng_offset + (5 if spec.cells else 0) & 2**64 - 1,
            )
        return found

    def place_call(self):
        spec, f = self.spec, self.fields
        f["varlen"] = ingot.varlen(spec.q_side, spec.k_side, int(spec.th))
        if spec.q_side[0] or spec.k_side[0] or spec.pages in ("csr", "last"):
            f["batch"] = spec.batch
        if spec.q_side[0]:
            f["max_seqlen_q"] = spec.mq
        if spec.k_side[0] or spec.pages in ("csr", "last"):
            f["max_seqlen_k"] = spec.mk
        f["align"] = {"unset": 0, "top_left": 1, "bottom_right": 2}[spec.align]
        if spec.mask == "causal":
            f["mask"] = ingot.MASK_CAUSAL
        elif spec.mask is not None:
            f.update(mask=ingot.MASK_WINDOW, window_left=spec.mask[0], window_right=spec.mask[1])
        f.update(softmax_scale=spec.scale, softcap=spec.softcap, dropout_p=spec.dropout, lse_base=int(spec.base2))
        if spec.dropout:
            if spec.cells:
                for name, cell in (("seed", spec.rng_seed), ("offset", spec.rng_offset)):
                    placed = self.inputs[f"dropout_{name}_ptr"] = Placed([1], "u64").fill(np.uint64(cell))
                    f[f"dropout_{name}_ptr"] = placed.array
                f["dropout_offset"] = 5
            else:
                f.update(dropout_seed=spec.rng_seed, dropout_offset=spec.rng_offset)

    # -- dead memory

    def spoil(self):
        """NaN and Inf wherever the specification lets memory hold anything."""
        p, spec, rng = self.problem, self.spec, self.rng
        q_used = np.zeros(p.q.shape[:3], bool)
        k_used = np.zeros(p.k.shape[:3], bool)
        bias_used = None
        if spec.bias:
            bias_used = np.zeros(self.bias_small.shape, bool)
        bare = replace(
            p,
            bias=None,
            q=np.zeros(p.q.shape),
            k=np.zeros(p.k.shape),
            v=np.zeros(p.v.shape),
            softcap=0.0,
            alibi=None,
            sink=None,
            dropout_p=0.0,
        )
        for b in range(spec.batch):
            qb, start, n = self.sequences[b]
            q_used[qb, :, start : start + n] = True
            for h in range(spec.heads_q):
                valid = oracle._scores(bare, b, h)["valid"] if h == 0 else valid
                seen = np.flatnonzero(valid.any(0))
                hk = h // spec.group
                if spec.pages:
                    pages = np.clip(p.page_table[b][seen // spec.page_size], 0, p.k.shape[0] - 1)
                    k_used[pages, seen % spec.page_size, hk] = True
                else:
                    ks, _ = p.k_side.locate(b, p.k.shape[2])
                    k_used[0 if spec.k_side[0] else b, hk, ks + seen] = True
                if spec.bias:
                    one = bias_used[b if bias_used.shape[0] > 1 else 0, h if bias_used.shape[1] > 1 else 0]
                    if one.shape[0] == 1:
                        valid_b = valid.any(0, keepdims=True)
                    else:
                        valid_b = valid
                    if one.shape[1] == 1:
                        valid_b = valid_b.any(1, keepdims=True)
                    one[: valid_b.shape[0], : valid_b.shape[1]] |= valid_b
        if spec.zero and not spec.pages:
            axis = {"batch": 0, "heads": 1}[spec.zero]
            k_used[...] = k_used.any(axis, keepdims=True)
        self.q_used, self.k_used = q_used, k_used
        for name, used in (("q", q_used), ("k", k_used), ("v", k_used)):
            dtype, view = self.fields[name].dtype, self.fields[name].bits
            fill = ingot.encode_bits(np.array(rng.choice([np.nan, np.inf, -np.inf])), dtype)
            if dtype in ingot.EIGHTS:
                fill = np.uint8(0x80 if dtype.endswith("fnuz") else 0x7F)
            view[~used] = fill
            setattr(p, name, self.fields[name].values)
        if spec.bias and spec.bias != "bool":
            bits = self.inputs["bias"].array.bits
            bits[~bias_used] = ingot.encode_bits(
                np.array(rng.choice([np.nan, np.inf, -np.inf])), self.fields["bias"].dtype
            )
            p.bias = self.fields["bias"].values
        elif spec.bias:
            self.inputs["bias"].array.bits[~bias_used] = True

    # -- what a result must look like

    def rows(self):
        """(rows that exactly one sequence owns, rows that none owns) as masks of [slots, rows]."""
        owners = np.zeros((self.out_shape[0], self.out_shape[2]), int)
        for qb, start, n in self.sequences:
            owners[qb, start : start + n] += 1
        return owners == 1, owners == 0

    def key_rows(self):
        owners = np.zeros((self.problem.k.shape[0], self.problem.k.shape[2]), int)
        for b in range(self.spec.batch):
            start, n = self.problem.k_side.locate(b, self.problem.k.shape[2])
            owners[0 if self.spec.k_side[0] else b, start : start + n] += 1
        return owners

    def lse_shape(self):
        s, rows = self.spec, self.q_layout.rows
        return ([rows, s.heads_q] if s.th else [s.heads_q, rows]) if s.q_side[0] else [s.batch, s.heads_q, rows]

    def lse_as_bhs(self, lse):
        """lse of the call as [slots, Hq, rows]."""
        if not self.spec.q_side[0]:
            return lse
        return (lse.T if self.spec.th else lse)[None]

    def yardstick_problem(self):
        """The problem as the textbook algorithm reads it: 8-bit inputs are dequantised to bf16 first."""
        p, spec = self.problem, self.spec
        if spec.kv not in ingot.EIGHTS:
            return p, ORACLE_DTYPE[spec.dtype]
        width = max([p.kv(b, p.k).shape[1] for b in range(spec.batch)], default=0)
        q = p.q.copy()
        k, v = (np.zeros((spec.batch, spec.heads_k, width, n)) for n in (spec.d, spec.dv))
        lengths = np.zeros(spec.batch, np.int64)
        bf16 = lambda x: oracle.round_to(x, "bfloat16").astype(np.float64)
        for b in range(spec.batch):
            lengths[b] = p.kv(b, p.k).shape[1]
            for to, x, factor in ((k, p.k, p.k_descale), (v, p.v, p.v_descale)):
                for h in range(spec.heads_k):
                    to[b, h, : lengths[b]] = bf16(p.kv(b, x)[h] * oracle._head(factor, b, h))
            if spec.dtype in ingot.EIGHTS:
                qb, start, n = self.sequences[b]
                by_key = spec.group if spec.descale[0] == "hk" and spec.group > 1 else 1
                for h in range(spec.heads_q):
                    at = np.s_[qb, h, start : start + n]
                    q[at] = bf16(p.q[at] * oracle._head(p.q_descale, b, h, by_key))
        return (
            replace(
                p,
                q=q,
                k=k,
                v=v,
                q_descale=1.0,
                k_descale=1.0,
                v_descale=1.0,
                page_table=None,
                k_side=oracle.Side(False, INDIVIDUAL, IMPLIED, lengths),
                max_seqlen_k=self.mk,
            ),
            "bfloat16",
        )
