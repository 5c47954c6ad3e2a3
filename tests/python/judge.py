"""When a result passes: the specification's section 9, and the calls whose results are judged."""

from dataclasses import replace

import attention_oracle as oracle
import ingot_ctypes as ingot
import numpy as np
from problems import FLOATS, ORACLE_DTYPE, Placed

LOG2E = 1.4426950408889634
BITS = {"f32": (23, -126), "f16": (10, -14), "bf16": (7, -126)}  # of the mantissa; the least exponent


def ulp(x, dtype):
    """The unit in the last place of |x| in dtype."""
    mantissa, least = BITS[dtype]
    with np.errstate(divide="ignore"):
        e = np.floor(np.log2(np.maximum(np.abs(np.asarray(x, np.float64)), 1e-300)))
    return np.ldexp(1.0, (np.maximum(e, least) - mantissa).astype(int))


def coarser(a, b):
    """The one with the larger error: the yardstick's allowance is in its units."""
    return max((x if x in FLOATS else "bf16" for x in (a, b)), key=lambda x: -BITS[x][0])


def overflown(want, dtype):
    """The reference where the type holds it, and what the conversion makes of it where not."""
    held = ingot.decode_bits(ingot.encode_bits(want, dtype), dtype)
    return np.where(np.isfinite(held), want, held)


def special(got, want):
    """NaN and Inf stand where the reference has them, and nowhere else. Returns the finite rest."""
    finite = np.isfinite(want)
    same = (np.isnan(want) & np.isnan(got)) | (want == got)
    wrong = ~finite & ~same
    assert not wrong.any(), f"{wrong.sum()} elements must be {want[wrong][0]}, the first is {got[wrong][0]}"
    wrong = finite & ~np.isfinite(got)
    assert not wrong.any(), f"{wrong.sum()} elements are {got[wrong][0]} where {want[wrong][0]} is right"
    return finite


def by_yardsticks(yardsticks, want, finite, judge):
    """judge(largest error, norm of errors) of the textbook algorithm must be None; it is asked with one result of it
    after another, the larger figures kept. The results differ in the order of their sums: where one score decides the
    error of a small problem, a single order is exact by chance too often."""
    most = norm = 0.0
    for x in yardsticks:
        own = np.abs(np.asarray(x, np.float64)[finite] - want)
        own = own[np.isfinite(own)]
        most, norm = max(most, own.max(initial=0)), max(norm, np.linalg.norm(own))
        wrong = judge(most, norm)
        if wrong is None:
            return
    raise AssertionError(wrong)


def check_values(name, got, want, yardsticks, dtype, scale=None):
    """max |got - want| <= 2 max |yardstick - want| + a, and the same for the norms. yardsticks: see by_yardsticks."""
    want = overflown(np.asarray(want, np.float64), dtype)
    finite = special(got, want)
    got, want = got[finite], want[finite]
    if not got.size:
        return
    scale = np.abs(want).max() if scale is None else scale
    a = 1e-6 * max(1.0, scale) if dtype == "f32" else float(ulp(scale, dtype))
    off = np.abs(got - want)
    worst = int(off.argmax())

    def judge(most, norm):
        if off[worst] > 2 * most + a:
            return f"{name}: {got[worst]!r} is off {want[worst]!r} by {off[worst]:.3g}; allowed {2 * most + a:.3g}"
        whole, allowed = np.linalg.norm(off), 2 * norm + a * np.sqrt(off.size)
        return f"{name}: the error's norm is {whole:.3g}; allowed {allowed:.3g}" if whole > allowed else None

    by_yardsticks(yardsticks, want, finite, judge)


def check_lse(got, want, yardsticks):
    finite = special(got, want)
    got, want = got[finite], want[finite]
    if not got.size:
        return
    off = np.abs(got - want)

    def judge(most, norm):
        excess = off - 2 * most - 1e-5 * np.maximum(1, np.abs(want))
        worst = int(excess.argmax())
        return f"lse: {got[worst]!r} is off {want[worst]!r} by {off[worst]:.3g}" if excess[worst] > 0 else None

    by_yardsticks(yardsticks, want, finite, judge)


class Orders:
    """Results of the textbook algorithm by the order of its sums, each computed once and only when asked for."""

    def __init__(self, textbook, count=8):
        self.textbook, self.count, self.found = textbook, count, {}

    def of(self, pick):
        for order in range(self.count):
            if order not in self.found:
                with np.errstate(all="ignore"):
                    self.found[order] = self.textbook(order)
            yield pick(self.found[order])


def check_rounded(name, got, want, dtype, slack):
    """A result in double, rounded once when it was stored: half a unit in the last place, and slack for the sums."""
    want = overflown(np.asarray(want, np.float64), dtype)
    finite = special(got, want)
    got, want = got[finite], want[finite]
    if not got.size:
        return
    off, allowed = np.abs(got - want), 0.5005 * ulp(want, dtype) + slack
    worst = int((off / allowed).argmax())
    assert off[worst] <= allowed[worst], f"{name}: {got[worst]!r} is off {want[worst]!r} by {off[worst]:.3g}"


# ---- forward ----


class Forward:
    """One forward call on a case: results in place, memory checked."""

    def __init__(self, case, options=None, want_lse=True):
        spec = case.spec
        self.case = case
        self.out = case.place(case.out_shape, spec.out)
        self.lse = case.place(case.lse_shape(), "f32", any_last=True) if want_lse else None
        fields = dict(case.fields, out=self.out.array, lse=self.lse.array if want_lse else None)
        self.cells = {}
        if spec.cells:
            self.cells = {name: Placed([1], "u64").freeze() for name in ("seed", "offset")}
            fields.update({f"dropout_{name}_out": x.array for name, x in self.cells.items()})
        written = [x for x in (self.out, self.lse) if x]
        for x in written:
            x.freeze()
        self.params = ingot.make_params("attn_fwd", **fields)
        ingot.call("attn_fwd", self.params, options)
        owned, free = case.rows()
        rows = lambda x: np.broadcast_to(x[:, None, :], self.case.out_shape[:3])
        assert self.out.untouched(np.broadcast_to(~rows(free)[..., None], case.out_shape)), "wrote outside out's rows"
        if want_lse:
            mask = case.lse_as_bhs(np.ones(self.lse.shape, bool)) & ~rows(free)
            if spec.q_side[0]:
                mask = mask[0].T if spec.th else mask[0]
            assert self.lse.untouched(mask), "wrote outside lse's rows"
        for name, x in case.inputs.items():
            assert x.untouched(), f"{name} was written"
        for x in self.cells.values():
            assert x.untouched(np.ones(1, bool)), "wrote round a cell"
        self.owned = rows(owned)

    def results(self):
        out = self.out.array.values[self.owned]
        lse = self.case.lse_as_bhs(self.lse.array.values)[self.owned] if self.lse else None
        return out, lse

    def bits(self):
        return [x.array.bits[()].tobytes() for x in (self.out, self.lse) if x]


def check_forward(case, options=None, exact=False):
    """Runs and judges. exact: the kernel works in double."""
    spec, run = case.spec, Forward(case, options)
    with np.errstate(all="ignore"):
        want, want_lse = oracle.forward(case.problem)
    got, got_lse = run.results()
    base = LOG2E if spec.base2 else 1.0
    want, want_lse = want[run.owned], want_lse[run.owned] * base
    if exact:
        slack = 1e-12 * (1 + np.abs(want[np.isfinite(want)]).max(initial=0))
        check_rounded("out", got, want, spec.out, slack)
        check_rounded("lse", got_lse, want_lse, "f32", 1e-11)
    else:
        p, dtype = case.yardstick_problem()
        textbook = Orders(lambda order: oracle.textbook(p, dtype, ORACLE_DTYPE[spec.out], order))
        check_values("out", got, want, textbook.of(lambda x: x[0][run.owned]), coarser(spec.dtype, spec.out))
        check_lse(got_lse, want_lse, textbook.of(lambda x: x[1][run.owned] * base))
    if spec.cells:
        used = (spec.rng_seed, spec.rng_offset + 5 & 2**64 - 1) if spec.dropout else (0, 0)
        assert tuple(int(x.array.bits[0]) for x in run.cells.values()) == used
    return run


# ---- backward ----


class Backward:
    """The forward's results by the oracle, as arrays, and one backward call with them."""

    def __init__(self, case, options=None, absent=(), grads=None, out_exact=False):
        spec = case.spec
        self.case, rng = case, np.random.default_rng(spec.seed + 1)
        with np.errstate(all="ignore"):
            out, lse = oracle.forward(case.problem)
        base = LOG2E if spec.base2 else 1.0
        pairs = "_bf16" in (options or {}).get("backend", "")  # multiplies what is stored: dO must be bf16 too
        dout_dtype = spec.dtype if rng.random() < 0.7 or pairs else str(rng.choice(FLOATS))
        out_dtype = "f32" if out_exact else spec.out
        place = (
            lambda values, dtype, any_last=False: case.place(values.shape, dtype, any_last)
            .fill(ingot.encode_bits(values, dtype))
            .freeze()
        )
        lse_call = lse[0] if spec.q_side[0] else lse
        self.lse = place((lse_call.T if spec.th else lse_call) * base, "f32", True)
        dout = rng.standard_normal(case.out_shape)
        dead = ~np.broadcast_to((~case.rows()[1])[:, None, :], case.out_shape[:3])
        dout[dead] = np.nan if spec.dirty else 0
        self.out, self.dout = place(out, out_dtype), place(dout, dout_dtype)
        shapes = dict(dq=case.problem.q.shape, dk=case.problem.k.shape, dv=case.problem.v.shape)
        grads = grads or {name: spec.dtype if rng.random() < 0.7 else str(rng.choice(FLOATS)) for name in shapes}
        self.grads = {name: case.place(shape, grads.get(name, "f32")) for name, shape in shapes.items()}
        if spec.bias in ("own", "f32"):
            how = [("zero" if rng.random() < 0.3 else "one") if x == "zero" else x for x in spec.bias_axes]
            full = [spec.batch, spec.heads_q, case.mq, case.mk]
            self.bias_shape = [1 if x == "one" else n for x, n in zip(how, full)]
            dtype = "f32" if rng.random() < 0.5 else case.fields["bias"].dtype
            self.grads["dbias"] = case.place(self.bias_shape, dtype)
        if spec.sink:
            self.grads["dsink"] = case.place([spec.heads_q], "f32")
        for name in absent:
            self.grads.pop(name, None)
        fields = {name: x for name, x in case.fields.items() if not name.endswith("_out")}
        fields.update(
            out=self.out.array,
            lse=self.lse.array,
            dout=self.dout.array,
            **{name: x.freeze().array for name, x in self.grads.items()},
        )
        self.params = ingot.make_params("attn_bwd", **fields)
        ingot.call("attn_bwd", self.params, options)
        self.check_memory()

    def check_memory(self):
        case = self.case
        for name, x in [*case.inputs.items(), ("out", self.out), ("lse", self.lse), ("dout", self.dout)]:
            assert x.untouched(), f"{name} was written"
        self.masks = {}
        q_rows, keys = case.rows()[0], case.key_rows()
        for name, x in self.grads.items():
            if name in ("dbias", "dsink"):
                self.masks[name] = may = np.ones(x.shape, bool)
            else:
                one, some = (q_rows, ~case.rows()[1]) if name == "dq" else (keys == 1, keys > 0)
                self.masks[name] = np.broadcast_to(one[:, None, :, None], x.shape)
                may = np.broadcast_to(some[:, None, :, None], x.shape)
            assert x.untouched(may), f"wrote outside {name}'s rows"

    def bits(self):
        return [x.array.bits[()].tobytes() for x in self.grads.values()]


def check_backward(case, options=None, exact=False, **how):
    run = Backward(case, options, out_exact=exact, **how)
    spec, p = case.spec, case.problem
    if "dbias" in run.grads:  # the oracle sums over the axes that dbias has not
        cut = p.bias[tuple(slice(0, 1) if n == 1 else slice(None) for n in run.bias_shape)]
        p = replace(p, bias=cut if list(cut.shape) == run.bias_shape else np.zeros(run.bias_shape))
    if not (~case.rows()[1] == case.rows()[0]).all():
        return run  # query rows in two sequences: their results are anything, and so is what they add to K and V
    dout = np.where(np.isnan(run.dout.array.values), 0, run.dout.array.values)
    with np.errstate(all="ignore"):
        out, lse = run.out.array.values, case.lse_as_bhs(run.lse.array.values) / (LOG2E if spec.base2 else 1)
        # the truth is that of the bits given, as an fp32 LSE of 500 is off by 1e-5, which no backward could know or mend;
        # the reference in double takes nothing as given
        want = oracle.backward(p, dout) if exact else oracle.backward(p, dout, out, lse)
        dtype = ORACLE_DTYPE[spec.dtype]
        textbook = Orders(lambda order: oracle.textbook_backward(p, dout, dtype, out, lse, order))
    for name, x in run.grads.items():
        mask, kind = run.masks[name], x.array.dtype
        got, true = x.array.values[mask], want[name][mask]
        scale = next(textbook.of(lambda y: y[name][1]))
        if exact:
            check_rounded(name, got, true, kind, 1e-11 * (1 + scale))
        else:
            own = textbook.of(lambda y: oracle.round_to(y[name][0], ORACLE_DTYPE[kind])[mask])
            check_values(name, got, true, own, coarser(spec.dtype, kind), scale)
    return run
