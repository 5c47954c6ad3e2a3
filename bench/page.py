"""One page of the results of bench/cuda_peers.py: HTML with its pictures in it, without scripts and without anything to fetch."""

import html
import math
import statistics

import suite

# Dense bf16 and 8-bit TFLOP/s and GB/s of memory, by the vendor's data sheet.
SHEETS = {"NVIDIA H200": dict(gemm=989, gemm8=1979, read=4800), "NVIDIA H100 80GB HBM3": dict(gemm=989, gemm8=1979, read=3350)}
OPS = {"fwd": "forward", "bwd": "backward"}
GROUPS = {"T": "Training and whole prompts", "P": "Prompts: 8-bit inputs, chunks, pages", "D": "Decoding"}
RATIO_LEAST, RATIO_MOST = 0.5, 2.0  # a bar beyond them ends in an arrow

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --card: #f5f7f9; --ink: #16191d; --soft: #59636e; --grid: #d9dee4;
  --fwd: #1769c9; --bwd: #c46a00; --bad: #b3261e; --good: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --back: #121519; --card: #1c2127; --ink: #e8ebee; --soft: #9aa5b1; --grid: #353c45;
  --fwd: #5aa2f5; --bwd: #f0a04b; --bad: #ff8a80; --good: #5fd07f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 74rem; padding: 1.5rem 1rem 3rem; background: var(--back); color: var(--ink);
  font: 15px/1.45 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .3rem; }
h3 { font-size: .95rem; margin: 1.1rem 0 .2rem; }
p { margin: .3rem 0 .6rem; max-width: 56rem; }
.soft, small { color: var(--soft); }
small { font-size: .8rem; }
.bad { color: var(--bad); font-weight: 650; }
.good { color: var(--good); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem; margin: 1.1rem 0 .8rem; }
.tile { background: var(--card); border: 1px solid var(--grid); border-radius: .5rem; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.7rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; color: var(--soft); font-size: .85rem; margin: .3rem 0 .4rem; }
.key svg { vertical-align: -2px; margin-right: .35rem; }
.bar { display: grid; grid-template-columns: 19.5rem 1fr 4.4rem; gap: 0 .8rem; align-items: center; break-inside: avoid; }
.bar > div:first-child { line-height: 1.2; padding: .18rem 0; }
.bar > div:last-child { text-align: right; font-variant-numeric: tabular-nums; line-height: 16px; font-size: .85rem; }
.bar svg { display: block; width: 100%; overflow: visible; }
svg text { fill: var(--ink); font-family: inherit; }
svg .soft { fill: var(--soft); }
.grid { stroke: var(--grid); } .one { stroke: var(--ink); stroke-width: 1.5; } .goal { stroke: var(--ink); stroke-width: 2.5; }
.fwd { fill: var(--fwd); } .bwd { fill: var(--bwd); } .bwd.point { fill: var(--back); stroke: var(--bwd); stroke-width: 2.2; }
text.fwd { fill: var(--fwd); } text.bwd { fill: var(--bwd); }
.roof { fill: none; stroke: var(--ink); stroke-width: 1.8; } .lead { stroke: var(--soft); stroke-width: .8; } .sheet { fill: none; stroke: var(--soft); stroke-dasharray: 5 4; }
.wide { overflow-x: auto; } .wide > svg { min-width: 46rem; width: 100%; display: block; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .5rem; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { font-weight: 600; color: var(--soft); vertical-align: bottom; }
.left { text-align: left; } td.why { white-space: normal; text-align: left; min-width: 16rem; }
@media screen and (max-width: 46rem) {
  .bar { grid-template-columns: 1fr 4.2rem; } .bar > div:first-child { grid-column: 1 / -1; padding: .45rem 0 .1rem; }
  .bar.axis > div:first-child { display: none; }
  h1 { font-size: 1.4rem; } }
@media print {
  :root { --back: #fff; --card: #fff; --ink: #000; --soft: #444; --grid: #bbb; --fwd: #1769c9; --bwd: #c46a00; --bad: #b3261e;
    --good: #1a7f37; color-scheme: light; }
  @page { margin: 12mm; }
  html { font-size: 11px; } body { max-width: none; font-size: 11px; padding: 0; } .wide { overflow: visible; } .wide > svg { min-width: 0; }
  table { font-size: 7.5px; } th, td { padding: .1rem .25rem; white-space: normal; } h2 { break-after: avoid; } h3 { break-after: avoid; }
  svg, rect, circle { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def text(x):
    return html.escape(str(x))


# ---- what there is to draw ----


class Entry:
    """A row for one operator and kind of data: its lines, of which the fastest right one of Ingot's speaks for it."""

    def __init__(self, lines, sheet):
        first = lines[0]
        self.row, self.op, self.data, self.lines = first["row"], first["op"], first.get("data", "normal"), lines
        self.title = first.get("title", "")
        self.goals = next((x["goals"] for x in lines if x.get("goals")), {})
        problem = first["problem"]
        try:
            self.problem = suite.parse(problem if ":" in problem.split(",")[0] else f"{self.op}:{problem}")
            self.words = suite.words(self.problem)
        except ValueError:
            self.problem, self.words = None, problem
        ours = [x for x in lines if x["who"].split(":")[0] == "ingot"]
        ran = [x for x in ours if "ms" in x]
        self.line = min(ran, key=lambda x: (x.get("ok") is False, x["ms"]), default=None)
        self.refused = next((x["refused"] for x in ours if "refused" in x), "not measured") if not ran else ""
        self.wrong = bool(self.line) and (self.line.get("ok") is False or self.line.get("repeats") is False)
        self.peers = [x for x in lines if x["who"].split(":")[0] != "ingot" and "ms" in x]
        self.decodes = bool(self.problem) and self.problem.decodes()
        self.kind = "read" if self.decodes else "gemm8" if self.problem and self.problem.dtype in ("e4m3", "e5m2") else "gemm"
        self.ratio = self.line and self.line.get("ratio")
        best = self.line and (self.line.get("best") or min((x["who"] for x in self.peers), default=None,
                                                          key=lambda who: next(x["ms"] for x in self.peers if x["who"] == who)))
        self.best = next((x for x in self.peers if x["who"] == best), None)
        self.share = self.line and self.line.get("share")
        self.rate = self.line and (self.line.get("gbs") if self.decodes else self.line["tflops"])
        self.of_sheet = self.rate / sheet[self.kind] if self.rate and sheet else None
        # what is faster because it does less than was asked: (who, its time over Ingot's)
        loose = min((x for x in self.peers if x.get("repeats") is False), key=lambda x: x["ms"], default=None)
        self.loose = (loose["who"].split(",")[0], loose["ms"] / self.line["ms"]) if loose and self.line else None
        self.own = None  # (row, share of its rate, goal)

    def reached(self):
        """{goal's words: whether it is met}, of those that could be judged here."""
        found = {}
        if not self.line:
            return found
        for name, have in (("peer", self.ratio), ("gemm", self.share), ("read", self.share)):
            if name in self.goals and have:
                wanted = self.goals[name]
                found[f"{wanted:.2f} × the best peer" if name == "peer" else
                      f"{wanted:.0%} of {'the matrix product' if name == 'gemm' else 'the read'}"] = have >= wanted  # fmt: skip
        if "us" in self.goals:
            found[f"{self.goals['us']:g} µs"] = self.line["ms"] * 1e3 <= self.goals["us"]
        if self.own:
            found[f"{self.own[2]:.0%} of {self.own[0]}'s rate"] = self.own[1] >= self.own[2]
        return found if not self.wrong else dict.fromkeys(found, False)


def natural(name):
    head = name.rstrip("0123456789-")
    return "TPD".find(name[:1]) % 9, head[:1], [int(x) if x.isdigit() else 0 for x in name[1:].split("-")]


def entries(results):
    groups = {}
    for result in results:
        for line in result["rows"]:
            key = line["row"], line["op"], line.get("data", "normal")
            groups.setdefault(key, (SHEETS.get(result.get("device")), []))[1].append(line)
    found = [Entry(lines, sheet) for sheet, lines in groups.values()]
    found.sort(key=lambda e: (natural(e.row), e.data != "normal", e.data, e.op != "fwd"))
    by = {(e.row, e.op, e.data): e for e in found}
    for e in found:
        if "own" in e.goals:
            other = by.get((e.goals["own"][0], e.op, e.data))
            if e.rate and other and other.rate:
                e.own = e.goals["own"][0], e.rate / other.rate, e.goals["own"][1]
    return found


def together(found):
    """[(group's title, [entries of one row])]."""
    groups = {}
    for e in found:
        title = GROUPS.get(e.row[:1], "Other")
        groups.setdefault(title, {}).setdefault((e.row, e.data), []).append(e)
    return [(title, list(rows.values())) for title, rows in groups.items()]


def mean(values):
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


# ---- bars ----


class Axis:
    """Places on a line from 0 to 100 percent."""

    def __init__(self, low, high, ticks, log=False, form="{:g}"):
        self.f = math.log if log else float
        self.low, self.high = low, high
        self.ticks = [x for x in ticks if low <= x <= high]
        self.form = form

    def __call__(self, x):
        x = min(max(x, self.low), self.high)
        return 100 * (self.f(x) - self.f(self.low)) / (self.f(self.high) - self.f(self.low))


def bar_svg(axis, bars, base, label):
    """bars: [(css class, value or None, goal or None, note)]; each grows from base."""
    height = 16 * len(bars)
    parts = [f'<line class="grid" x1="{axis(x):.2f}%" x2="{axis(x):.2f}%" y1="0" y2="{height}"/>' for x in axis.ticks]
    for i, (kind, value, goal, note) in enumerate(bars):
        y = 16 * i + 2
        if value is None:
            parts.append(f'<text class="soft" x="{axis(base):.2f}%" dx="6" y="{y + 10}" font-size="11.5">{text(note)}</text>')
            continue
        a, b = sorted((axis(base), axis(value)))
        parts.append(f'<rect class="{kind}" x="{a:.2f}%" width="{max(b - a, 0.3):.2f}%" y="{y}" height="12"/>')
        if value > axis.high:
            parts.append(f'<svg x="100%" y="{y}" overflow="visible"><path class="{kind}" d="M0 0l9 6l-9 6z"/></svg>')
        if value < axis.low:
            parts.append(f'<svg x="0%" y="{y}" overflow="visible"><path class="{kind}" d="M0 0l-9 6l9 6z"/></svg>')
        if goal:
            parts.append(f'<line class="goal" x1="{axis(goal):.2f}%" x2="{axis(goal):.2f}%" y1="{y - 1}" y2="{y + 13}"/>')
    parts.append(f'<line class="one" x1="{axis(base):.2f}%" x2="{axis(base):.2f}%" y1="0" y2="{height}"/>')
    return f'<svg height="{height}" role="img" aria-label="{text(label)}"><title>{text(label)}</title>{"".join(parts)}</svg>'


def axis_row(axis):
    ticks = "".join(
        f'<text class="soft" x="{axis(x):.2f}%" y="12" text-anchor="middle" font-size="11.5">{axis.form.format(x)}</text>'
        for x in axis.ticks)  # fmt: skip
    return f'<div class="bar axis"><div></div><div><svg height="16">{ticks}</svg></div><div></div></div>'


def bar_rows(found, axis, base, value, goal, shown, none):
    """Rows of bars under their groups' titles. value, goal of an entry; shown(value); none(entry): what stands without one."""
    out = []
    for title, rows in together(found):
        out.append(f"<h3>{text(title)}</h3>{axis_row(axis)}")
        for row in rows:
            first = row[0]
            bars, values, label = [], [], []
            for e in row:
                have, wanted = value(e), goal(e)
                note = f"{OPS[e.op]}: {none(e)}" if have is None else ""
                bars.append((e.op, have, wanted, note))
                missed = have is not None and (e.wrong or (wanted and have < wanted) or (base == 1 and have < 1))
                bad = have is not None and (e.wrong or (base == 1 and have < 1))
                mark = " wrong" if e.wrong else ""
                values.append(f'<div{" class=bad" if bad else ""}>{shown(have) + mark if have is not None else "–"}'
                              f'{"" if not missed or bad else " ↓"}</div>')  # fmt: skip
                label.append(f"{OPS[e.op]} {shown(have) if have is not None else none(e)}")
            loose = next((e.loose for e in row if e.loose), None) if base == 1 else None
            words = text(first.words) + (f"<br>not repeatable: {text(loose[0])} at {loose[1]:.2f} ×" if loose else "")
            name = f"<b>{text(first.row)}</b> {text(first.title)}{'' if first.data == 'normal' else f' ({text(first.data)})'}"
            out.append(f'<div class="bar"><div>{name}<br><small>{words}</small></div>'
                       f'<div>{bar_svg(axis, bars, base, f"{first.row}: " + ", ".join(label))}</div>'
                       f'<div>{"".join(values)}</div></div>')  # fmt: skip
    return "".join(out)


def swatch(kind, words):
    return f'<span><svg width="12" height="12"><rect class="{kind}" width="12" height="12"/></svg>{text(words)}</span>'


def key(base=""):
    mark = lambda kind, words: (f'<span><svg width="6" height="14"><line class="{kind}" x1="3" x2="3" y1="0" y2="14"/></svg>'
                                f"{text(words)}</span>")  # fmt: skip
    return (f'<div class="key">{swatch("fwd", "forward")}{swatch("bwd", "backward")}{mark("one", base) if base else ""}'
            f'{mark("goal", "goal (↓ missed)")}</div>')  # fmt: skip


# ---- roofline ----


class Labels:
    """Places for short labels beside points, so that none lies on another."""

    def __init__(self, box):
        self.box, self.taken = box, []

    def take(self, x0, y0, x1, y1):
        self.taken.append((x0, y0, x1, y1))

    def free(self, x0, y0, x1, y1):
        a, b, c, d = self.box
        inside = a <= x0 and b <= y0 and x1 <= c and y1 <= d
        return inside and all(x1 <= p or r <= x0 or y1 <= q or s <= y0 for p, q, r, s in self.taken)

    def place(self, x, y, width, height):
        """Left end and base line of the text, nearest to the point."""
        for distance in (7, 13, 20, 28, 37, 47, 58, 70, 85, 100):
            for turn in (0, 180, 315, 45, 225, 135, 270, 90, 290, 70, 250, 110, 340, 20, 200, 160):
                angle = math.radians(turn)
                cx = x + math.cos(angle) * (distance + width / 2)
                cy = y + math.sin(angle) * (distance + height / 2 - 2)
                place = cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2
                if self.free(*place):
                    self.take(*place)
                    return place[0], cy + height * 0.32
        return x + 8, y + 4


class Plot:
    """A plane of arithmetic intensity and TFLOP/s with its grid; y by its logarithm, or from 0."""

    W, LEFT, RIGHT, TOP, BOTTOM = 980, 56, 16, 14, 46

    def __init__(self, height, x, y, log_y):
        self.H, self.x, self.y, self.log_y = height, x, y, log_y
        self.parts = []
        self.labels = Labels((self.LEFT + 2, self.TOP + 2, self.W - self.RIGHT, height - self.BOTTOM - 2))
        ends = self.LEFT, self.W - self.RIGHT, self.TOP, height - self.BOTTOM
        steps = [s * 10.0**p for p in range(-2, 6) for s in (1, 2, 5)]
        for tick in (t for t in steps if x[0] <= t <= x[1]):
            self.line("grid", self.X(tick), ends[2], self.X(tick), ends[3])
            self.text(self.X(tick), ends[3] + 16, f"{tick:,g}" if tick < 1e4 else f"{tick:,.0f}", "middle")
        for tick in (t for t in (steps if log_y else range(0, 4000, 200)) if y[0] <= t <= y[1]):
            self.line("grid", ends[0], self.Y(tick), ends[1], self.Y(tick))
            self.text(ends[0] - 6, self.Y(tick) + 4, f"{tick:g}", "end")
        self.text((ends[0] + self.W) / 2, height - 8, "FLOP for each byte that must move", "middle")
        self.text(13, height / 2 - 15, "TFLOP/s", "middle", -90)

    def X(self, x):
        return self.LEFT + (self.W - self.LEFT - self.RIGHT) * math.log(x / self.x[0]) / math.log(self.x[1] / self.x[0])

    def Y(self, y):
        low, high = self.y
        part = math.log(max(y, low) / low) / math.log(high / low) if self.log_y else y / high
        return self.H - self.BOTTOM - (self.H - self.TOP - self.BOTTOM) * part

    def line(self, kind, *ends):
        self.parts.append('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>'.format(kind, *ends))

    def text(self, x, y, words, anchor="start", turn=0):
        at = f'transform="translate({x:.1f} {y:.1f}) rotate({turn:.1f})"' if turn else f'x="{x:.1f}" y="{y:.1f}"'
        self.parts.append(f'<text class="soft" {at} text-anchor="{anchor}" font-size="12">{text(words)}</text>')

    def roofs(self, kind, limits, words, above):
        """The lines of {gemm, gemm8: TFLOP/s, read: GB/s}, with their figures above or below them."""
        slope = limits.get("read", 0) / 1e3
        for compute, dtype in (("gemm", "bf16"), ("gemm8", "8-bit")):
            if compute not in limits:
                continue
            top, end = limits[compute], self.W - self.RIGHT
            if slope:
                knee = top / slope
                curve = [(x, x * slope) for x in (knee * (self.x[0] / knee) ** (i / 60) for i in range(61))]
                places = [(self.X(x), self.Y(y)) for x, y in curve if x >= self.x[0] and self.y[0] <= y <= self.y[1]]
                self.parts.append(f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>')
                for x, y in places:
                    self.labels.take(x - 4, y - 4, x + 4, y + 4)
            if top > self.y[1]:
                continue
            start, y = self.X(max(top / slope if slope else 0, self.x[0])), self.Y(top)
            self.line(kind, start, y, end, y)
            # one kind's figure at the right end, the other's at the left, so that close lines do not share a place
            label = f"{dtype} {words} {top:,.0f}"
            width, y = 6.6 * len(label), y + (-5 if above else 14)
            x = end - 4 if above else start + 8 + width
            self.text(x, y, label, "end")
            self.labels.take(x - width, y - 11, x, y + 3)

    def slope(self, limit, words, above):
        """A figure along the line of memory's rate (log y only), where no row of the suite lies."""
        at, rate = self.x[0] * (self.x[1] / self.x[0]) ** 0.36, limit / 1e3
        x, y = self.X(at), self.Y(at * rate)
        turn = math.degrees(math.atan2(self.Y(2 * at * rate) - y, self.X(2 * at) - x))
        self.text(x, y + (-6 if above else 17), f"{words} {rate:.2f} TB/s", "start", turn)

    def point(self, x, y, e, named):
        at = self.X(x), self.Y(y)
        words = f"{e.row} {OPS[e.op]}: {y:.0f} TFLOP/s at {x:.0f} FLOP/byte"
        shape = (f'<circle class="fwd point" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="4.5"/>' if e.op == "fwd" else
                 f'<rect class="bwd point" x="{at[0] - 4:.1f}" y="{at[1] - 4:.1f}" width="8" height="8"/>')  # fmt: skip
        label = ""
        if named:
            width = 7.4 * len(e.row)
            tx, ty = self.labels.place(*at, width, 12)
            near = max(tx, min(at[0], tx + width)), max(ty - 9, min(at[1], ty))
            if math.dist(near, at) > 12:
                self.line("lead", *at, *near)
            label = f'<text class="{e.op}" x="{tx:.1f}" y="{ty:.1f}" font-size="12">{text(e.row)}</text>'
        self.parts.append(f"<g><title>{text(words)}</title>{shape}{label}</g>")

    def svg(self, label):
        return (f'<div class="wide"><svg viewBox="0 0 {self.W} {self.H}" role="img" aria-label="{text(label)}">'
                f'{"".join(self.parts)}</svg></div>')  # fmt: skip


def roofline(found, sheet):
    """All rows under what limits them, and the crowded corner once more."""
    points = [(e.problem.flops() / e.problem.bytes(), e.line["tflops"], e) for e in found if e.line and e.problem]
    if not points:
        return ""
    points.sort(key=lambda p: p[:2])
    measured = {kind: statistics.median(x) for kind in ("gemm", "gemm8", "read")
                if (x := [e.line["limit"] for e in found if e.kind == kind and e.line and e.line.get("limit")])}  # fmt: skip
    published = {k: v for k, v in (sheet or {}).items() if k != "gemm8" or any(e.kind == "gemm8" for *_, e in points)}
    tops = [x for limits in (measured, published) for k, x in limits.items() if k != "read"]
    top = max([y for _, y, _ in points] + tops)
    out = []

    def draw(plot, some, named, label):
        plot.roofs("sheet", published, "data sheet", True)
        plot.roofs("roof", measured, "measured", False)
        for x, y, _ in some:
            plot.labels.take(plot.X(x) - 5, plot.Y(y) - 5, plot.X(x) + 5, plot.Y(y) + 5)
        for x, y, e in some:
            plot.point(x, y, e, named(e))
        out.append(plot.svg(label))

    few = [p for p in points if p[2].decodes]
    most = [p for p in points if not p[2].decodes]
    if few:
        plot = Plot(430, (points[0][0] / 1.6, points[-1][0] * 1.6), (min(y for _, y, _ in points) / 1.6, top * 1.35), True)
        if "read" in published:
            plot.slope(published["read"], "data sheet", True)
        if "read" in measured:
            plot.slope(measured["read"], "measured", False)
        draw(plot, points, lambda e: e.decodes, "Roofline of all rows; the table has the figures")
    if most:
        if few:
            out.append("<h3>The upper right corner, from 0</h3>")
        high = max([y * 1.15 for _, y, _ in most] + [limits.get("gemm", 0) * 1.06 for limits in (measured, published)])
        draw(Plot(500, (most[0][0] / 1.3, most[-1][0] * 1.6), (0, high), False), most, lambda e: True,
             "Rates of the rows that are bound by arithmetic; the table has the figures")  # fmt: skip
    points_key = ('<div class="key"><span><svg width="12" height="12"><circle class="fwd" cx="6" cy="6" r="4.5"/></svg>forward</span>'
                  '<span><svg width="12" height="12"><rect class="bwd point" x="2" y="2" width="8" height="8"/></svg>backward</span></div>')  # fmt: skip
    return ("<h2>Under the roof</h2><p class=\"soft\">Ingot's rates against how much arithmetic a row has for each byte that it must "
            f"read or write.{' Measured limits ran in the same rounds.' if measured else ''}</p>{points_key}" + "".join(out))  # fmt: skip


# ---- the page ----


def tile(big, words):
    return f'<div class="tile"><b>{text(big)}</b>{words}</div>'


def named(e):
    data = "" if e.data == "normal" else f" ({e.data})"
    return f"{e.row}{data} {OPS[e.op]}"


def verdict(found):
    """The head of the page: how much faster, where not, what did not run."""
    compared = [e for e in found if e.ratio and not e.wrong]
    kinds = [("forward", [e for e in compared if e.op == "fwd" and not e.decodes]),
             ("backward", [e for e in compared if e.op == "bwd"]), ("decoding", [e for e in compared if e.decodes])]  # fmt: skip
    tiles = []
    if compared:
        ahead = sum(e.ratio >= 1 for e in compared)
        tiles.append(tile(f"{ahead} of {len(compared)}", "measurements have Ingot at least as fast as the best peer"))
    for name, some in kinds:
        if some:
            low, high = min(e.ratio for e in some), max(e.ratio for e in some)
            tiles.append(tile(f"{mean([e.ratio for e in some]):.2f} ×", f"the best peer's speed, {name}<br>"
                              f"<small>geometric mean of {len(some)}, {low:.2f} to {high:.2f}</small>"))  # fmt: skip
    judged = [met for e in found for met in e.reached().values()]
    if judged:
        tiles.append(tile(f"{sum(judged)} of {len(judged)}", "goals met"))
    sentences = []
    behind = sorted((e for e in compared if e.ratio < 1), key=lambda e: e.ratio)
    if compared:
        listed = ", ".join(f'{text(named(e))} <span class="bad">{e.ratio:.2f}</span>' for e in behind)
        sentences.append(f"<b>Slower than the best peer:</b> {listed or 'none'}.")
    missed = [f"{text(named(e))} ({text(goal)})" for e in found for goal, met in e.reached().items() if not met]
    if judged:
        sentences.append(f"<b>Goals missed:</b> {', '.join(missed) or 'none'}.")
    wrong = [text(named(e)) for e in found if e.wrong]
    if wrong:
        sentences.append(f'<b class="bad">Results that fail their check:</b> {", ".join(wrong)}.')
    plain = [text(named(e)) for e in found if e.line and "_simt:" in (e.line.get("runs") or "")]
    if plain:
        sentences.append(f"<b>By the fallback without matrix units:</b> {', '.join(plain)}.")
    refused = [f"{text(named(e))} ({text(e.refused)})" for e in found if e.refused]
    if refused:
        sentences.append(f"<b>Not run:</b> {'; '.join(refused)}.")
    return f'<div class="tiles">{"".join(tiles)}</div>{"".join(f"<p>{x}</p>" for x in sentences)}'


def ratios(found):
    have = [e.ratio for e in found if e.ratio]
    if not have:
        return ""
    low, high = max(RATIO_LEAST, min(0.8, min(have) * 0.97)), min(RATIO_MOST, max(1.5, max(have) * 1.03))
    axis = Axis(low, high, [0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.6, 1.8, 2], log=True)

    def none(e):
        return (e.refused and "refused") or ("no peer" if not e.peers else "no peer is comparable")

    return ("<h2>Ingot against the best peer</h2>"
            '<p class="soft">The best peer\'s time over Ingot\'s, in the same process and in turns: to the right of the line Ingot is '
            f"faster, to the left slower.</p>{key('the best peer')}"
            + bar_rows(found, axis, 1, lambda e: e.ratio, lambda e: e.goals.get("peer"), lambda x: f"{x:.2f} ×", none))  # fmt: skip


def shares(found):
    if not any(e.share for e in found):
        return ""
    high = max(1.0, max(e.share for e in found if e.share))
    axis = Axis(0, high, [0, 0.2, 0.4, 0.6, 0.8, 1], form="{:.0%}")
    goal = lambda e: e.goals.get("read" if e.decodes else "gemm")
    return ("<h2>Of what the device reaches</h2>"
            '<p class="soft">Share of the rate of a large matrix product of the same type (8192³), for decoding rows of the rate of a '
            f"sum over a large array, both run in the same rounds.</p>{key()}"
            + bar_rows(found, axis, 0, lambda e: e.share, goal, percent,
                       lambda e: "refused" if e.refused else "no limit was measured"))  # fmt: skip


def owns(found):
    some = [e for e in found if "own" in e.goals]
    if not some:
        return ""
    axis = Axis(0, max([1.2, *(e.own[1] for e in some if e.own)]), [0, 0.25, 0.5, 0.75, 1])
    lines = [f"{e.row} {OPS[e.op]} beside {e.goals['own'][0]}" for e in some]
    return ("<h2>Against Ingot's own rate on another row</h2>"
            f'<p class="soft">What packing, pages, chunks and repeatability cost: {text(", ".join(lines))}.</p>{key()}'
            + bar_rows(some, axis, 0, lambda e: e.own and e.own[1], lambda e: e.goals["own"][1], lambda x: f"{x:.2f}",
                       lambda e: "refused" if e.refused else f"no {e.goals['own'][0]} in this file"))  # fmt: skip


def percent(x):
    return f"{x:.0%}" if x >= 0.095 else f"{x:.1%}"


def cell(x, form="{}", css=""):
    return f"<td{f' class={css}' if css else ''}>{form.format(x) if x is not None else '–'}</td>"


def time_of(ms):
    return f"{ms:.3f} ms" if ms >= 0.1 else f"{ms * 1e3:.1f} µs"


def rate_of(line):
    return f"{line['gbs']:,.0f} GB/s" if "gbs" in line else f"{line['tflops']:,.0f} TFLOP/s"


def table(found):
    out = ["<h2>The figures</h2>"
           '<p class="soft">Medians; spread is the third minus the first quartile over the median; errors are relative, against fp64.</p>'
           '<div class="wide"><table><tr><th class="left">row<th class="left">problem<th class="left"><th>Ingot<th>rate<th>ratio'
           '<th class="left">best peer<th>its time<th>its rate<th>of measured<br>limit<th>of data<br>sheet<th>spread<br>Ingot / peer'
           '<th>error<br>Ingot / peer<th class="left">kernel</tr>']  # fmt: skip
    for e in found:
        head = (f'<tr><td class="left"><b>{text(e.row)}</b></td><td class="left">{text(e.words)}</td>'
                f'<td class="left">{OPS[e.op]}{"" if e.data == "normal" else " " + text(e.data)}</td>')  # fmt: skip
        if not e.line:
            out.append(f'{head}<td class="why" colspan="11">{text(e.refused)}</td></tr>')
            continue
        line, best = e.line, e.best
        pair = lambda f: f"{f(line)} / {f(best) if best else '–'}"
        error = lambda x: ("–" if x.get("err") is None else f"{x['err']:.1e}") + ("" if x.get("ok") is not False else " wrong")
        out.append(head + cell(time_of(line["ms"])) + cell(rate_of(line)) + cell(e.ratio, "{:.2f}", "bad" if e.ratio and e.ratio < 1 else "")
                   + cell(text(best["who"] if best else "none"), css="left") + cell(best and time_of(best["ms"]))
                   + cell(best and rate_of(best)) + cell(e.share and percent(e.share)) + cell(e.of_sheet and percent(e.of_sheet)) + cell(pair(lambda x: f"{x['spread']:.0%}"))
                   + cell(pair(error), css="bad" if e.wrong else "") + cell(text(line.get("runs") or ""), css="left") + "</tr>")  # fmt: skip
    return "".join(out) + "</table></div>"


def every_line(found):
    out = ["<h2>Every measurement</h2>"
           '<div class="wide"><table><tr><th class="left">row<th class="left"><th class="left">who<th>time<th>rate<th>of limit<th>spread'
           '<th>error<th>SM clock<th>power<th class="left"></tr>']  # fmt: skip
    for e in found:
        for x in e.lines:
            head = f'<tr><td class="left">{text(e.row)}</td><td class="left">{OPS[e.op]}</td><td class="left">{text(x["who"])}</td>'
            if "ms" not in x:
                out.append(f'{head}<td class="why" colspan="8">{text(x.get("refused", ""))}</td></tr>')
                continue
            notes = [w for w, on in (("wrong", x.get("ok") is False), ("not repeatable", x.get("repeats") is False),
                                     ("repeatable", x.get("repeats"))) if on]  # fmt: skip
            out.append(head + cell(time_of(x["ms"])) + cell(rate_of(x)) + cell(x.get("share") and percent(x["share"])) + cell(x["spread"], "{:.1%}")
                       + cell(x.get("err"), "{:.1e}") + cell(x.get("sm_mhz"), "{:.0f} MHz") + cell(x.get("watt"), "{:.0f} W")
                       + cell(text(" ".join([*notes, x.get("runs") or ""])), css="left") + "</tr>")  # fmt: skip
    return "".join(out) + "</table></div>"


def about(result):
    pairs = [("driver", result.get("driver")), ("PyTorch", result.get("torch")), ("cuDNN", result.get("cudnn")),
             ("source", (result.get("commit") or "")[:12] + ("-dirty" if (result.get("commit") or "").endswith("-dirty") else ""))]  # fmt: skip
    return ", ".join([*filter(None, [result.get("date")]), *(f"{name} {x}" for name, x in pairs if x)])


def page(results):
    """The page of one or more results (as bench/cuda_peers.py writes them), as text."""
    found = entries(results)
    devices = ", ".join(dict.fromkeys(x.get("device") or "a GPU" for x in results))
    sheet = SHEETS.get(results[0].get("device")) if results else None
    abouts = "<br>".join(dict.fromkeys(text(about(x)) for x in results))
    body = (verdict(found) + ratios(found) + shares(found) + owns(found) + roofline(found, sheet) + table(found) + every_line(found)
            if found else "<p>Nothing was measured yet.</p>")  # fmt: skip
    return (f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>Ingot on {text(devices)}</title>\n'
            f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>Ingot beside PyTorch’s attention, {text(devices)}</h1>\n"
            f'<p class="soft">{abouts}</p>\n{body}\n</body>\n</html>\n')  # fmt: skip
