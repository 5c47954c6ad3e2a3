"""A suite file as `ingot bench --suite` reads it, for the scripts here: its rows, their goals, and what a row counts.

Of the words of a problem (`ingot explain --help`) it knows those that a row beside other libraries has needed; any other is an
error, so that no script measures something else than the command.
"""

import re
from dataclasses import dataclass, field

BYTES = {"bf16": 2, "f16": 2, "f32": 4, "e4m3": 1, "e5m2": 1}
SIZES = {"b": ["batch"], "h": ["hq", "hk"], "hq": ["hq"], "hk": ["hk"], "s": ["sq", "sk"], "sq": ["sq"], "sk": ["sk"],
         "d": ["d", "dv"], "dv": ["dv"]}  # fmt: skip


@dataclass
class Problem:
    op: str
    batch: int = 1
    hq: int = 1
    hk: int = 1
    sq: int = 64
    sk: int = 64
    d: int = 64
    dv: int = 64
    dtype: str = "f32"
    kv: str = ""
    mask: str = "none"  # none, causal, window; the diagonal ends at the last query and the last key
    left: int = 0
    right: int = 0
    deterministic: bool = False
    packed: bool = False  # both sides stacked by cumulative lengths
    ql: list = field(default_factory=list)
    kl: list = field(default_factory=list)
    page: int = 0
    descale: str = ""  # "", one, heads

    def lengths(self):
        """(queries, keys) of each sequence."""
        return list(zip(self.ql or [self.sq] * self.batch, self.kl or [self.sk] * self.batch))

    def pairs(self):
        """Query-key pairs the mask keeps, over all sequences, of one query head."""
        return sum(_pairs(self, *lengths) for lengths in self.lengths())

    def flops(self):
        width = self.d + self.dv if self.op == "fwd" else 3 * self.d + 2 * self.dv
        return 2 * self.pairs() * self.hq * width

    def kv_bytes(self):
        return sum(k for _, k in self.lengths()) * self.hk * (self.d + self.dv) * BYTES[self.kv]

    def bytes(self):
        """The least a call can move: every input read once, every output written once."""
        queries = sum(q for q, _ in self.lengths()) * self.hq
        size = 2 if BYTES[self.dtype] == 1 else BYTES[self.dtype]  # of out
        if self.op == "fwd":
            return self.kv_bytes() + queries * (self.d * BYTES[self.dtype] + self.dv * size + 4)
        return 2 * self.kv_bytes() + queries * (2 * (self.d + self.dv) * size + 4)

    def decodes(self):
        """Whether K and V are read for less arithmetic than reading them costs: its rate is of bytes."""
        return self.op == "fwd" and self.sq * (self.hq // max(1, self.hk)) <= 8 and self.sk >= 256


def _pairs(p, sq, sk):
    if p.mask == "none":
        return sq * sk
    left = p.left if p.mask == "window" else sk + sq
    return sum(max(0, min(sk, i + sk - sq + p.right + 1) - max(0, i + sk - sq - left)) for i in range(sq))


def parse(text):
    """A Problem, or ValueError with a sentence."""
    op, _, words = text.partition(":")
    if op not in ("fwd", "bwd"):
        raise ValueError(f'"{text}" is no fwd: or bwd: problem')
    p = Problem(op)
    for word in words.split(","):
        name, _, value = word.partition("=")
        size = re.fullmatch(r"([a-z]+)(\d+)", word)
        if size and size[1] in SIZES:
            for key in SIZES[size[1]]:
                setattr(p, key, int(size[2]))
        elif word in BYTES:
            p.dtype = word
        elif word == "causal":
            p.mask = "causal"
        elif word == "det":
            p.deterministic = True
        elif word == "descale" or word == "descalek":
            p.descale = "heads" if word == "descalek" else "one"
        elif word == "varlen=cu":
            p.packed = True
        elif name == "kv" and value in BYTES:
            p.kv = value
        elif name == "window" and re.fullmatch(r"\d+:\d+", value):
            p.mask, p.left, p.right = "window", *map(int, value.split(":"))
        elif name == "paged" and value.isdigit():
            p.page = int(value)
        elif name in ("ql", "kl") and re.fullmatch(r"\d+(/\d+)*", value):
            setattr(p, name, [int(x) for x in value.split("/")])
        else:
            raise ValueError(f'"{word}" is no word that bench/suite.py knows, in "{text}"')
    p.kv = p.kv or p.dtype
    if any(x and len(x) != p.batch for x in (p.ql, p.kl)):
        raise ValueError(f'"{text}" needs one length for each of the {p.batch} sequences')
    return p


GOAL = re.compile(r"(peer|gemm|read|us) (\d+(?:\.\d+)?)|(own) (\S+) (\d+(?:\.\d+)?)")


def goals(text):
    """{"peer": 1.05, "own": ["T7", 0.9]} of "peer 1.05, own T7 0.90"."""
    found = {}
    for one in filter(None, (x.strip() for x in text.split(","))):
        match = GOAL.fullmatch(one)
        if not match:
            raise ValueError(f'"{one}" is no goal; see the head of bench/suite.txt')
        found[match[1] or "own"] = float(match[2]) if match[1] else [match[4], float(match[5])]
    return found


@dataclass
class Row:
    name: str
    text: str
    problem: Problem
    title: str
    goals: dict


def read(path):
    """The rows of a suite file."""
    rows = []
    for number, line in enumerate(open(path, encoding="utf-8"), 1):
        before, _, remark = line.partition("#")
        if not before.strip():
            continue
        words = before.split()
        title, _, wanted = remark.partition("|")
        try:
            if len(words) != 2:
                raise ValueError(f'"{before.strip()}" is not a name and a problem')
            rows.append(Row(*words, parse(words[1]), title.strip(), goals(wanted)))
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from None
    return rows


def short(n):
    """8192 as 8k."""
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def words(p):
    """A problem for people: "4 x 32 heads, 4k, D 64, causal"."""
    heads = f"{p.hq} heads" if p.hq == p.hk else f"{p.hq}/{p.hk} heads"
    if p.packed:
        length = f"{short(sum(p.ql))} tokens in {p.batch} sequences"
    elif p.kl and len(set(p.kl)) > 1:
        length = f"{short(p.sq)} on {short(min(p.kl))} to {short(max(p.kl))}"
    else:
        length = short(p.sq) if p.sq == p.sk else f"{short(p.sq)} on {short(p.sk)}"
    parts = [heads if p.packed else f"{p.batch} × {heads}", length, f"D\u00a0{p.d}" + (f"/{p.dv}" if p.dv != p.d else "")]
    if p.mask != "none":
        parts.append("causal" if p.mask == "causal" else f"window {short(p.left)}")
    if p.dtype != "bf16" or p.kv != p.dtype:
        parts.append(p.dtype if p.kv == p.dtype else f"cache {p.kv}")
    if p.page:
        parts.append(f"pages of {p.page}")
    if p.deterministic:
        parts.append("deterministic")
    return ", ".join(parts)
