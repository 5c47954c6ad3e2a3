"""The suite files of bench/, what its scripts check results by, and the page they draw. No GPU is needed."""

import json
import os
import re
import subprocess
import sys
import types
from html.parser import HTMLParser
from pathlib import Path

import pytest

import ingot_ctypes as ingot

ROOT = ingot.ROOT
sys.path.insert(0, str(ROOT / "bench"))
import page  # noqa: E402
import suite  # noqa: E402

COMMAND = os.environ.get("INGOT_COMMAND") or str(Path(ingot.PATH).parent / "ingot")
ROWS = suite.read(ROOT / "bench/suite.txt")


def command(*words):
    return subprocess.run([COMMAND, *map(str, words)], capture_output=True, text=True)


# ---- suite files ----


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}-{row.problem.op}")
def test_the_command_reads_every_row_as_the_scripts_do(row):
    done = command("explain", row.text)
    assert done.returncode == 0, done.stderr
    p = row.problem
    bucket = re.search(r"bucket (\S+)", done.stdout)[1].split(",")
    types = p.dtype if p.kv == p.dtype else f"{p.dtype}/{p.kv}"
    about = [types, f"d{p.d}", f"dv{p.dv}", f"q{p.sq}", f"k{p.sk}", {"none": "full"}.get(p.mask, p.mask)]
    assert [bucket[i] for i in (0, 1, 2, 3, 4, 6)] == about and ("paged" in bucket) == bool(p.page)
    assert done.stdout.startswith(f"attn_{p.op} ")


def test_the_headline_suite_is_whole():
    both = {f"T{i}" for i in range(1, 15)}
    assert {x.name for x in ROWS if x.problem.op == "bwd"} == both | {"T15"}
    assert {x.name for x in ROWS if x.problem.op == "fwd"} == both | {
        *("P1", "P2", "P3", "P4", "P4-16", "P4-128"), *(f"D{i}" for i in range(1, 9))}  # fmt: skip
    packed = next(x.problem for x in ROWS if x.name == "T13")
    assert sum(packed.ql) == 32768 and packed.ql == packed.kl and 128 <= min(packed.ql) and max(packed.ql) <= packed.sq
    for row in ROWS:
        if "own" in row.goals:
            assert row.goals["own"][0] in {x.name for x in ROWS if x.problem.op == row.problem.op}


def test_the_suite_of_processors_is_read_too():
    """By bench/cpu_peers.py, whose peer has a causal mask for squares only."""
    rows = [x.problem for x in suite.read(ROOT / "bench/cpu.txt")]
    assert rows and all(p.sq == p.sk for p in rows if p.mask == "causal") and {p.decodes() for p in rows} == {True, False}


@pytest.mark.parametrize("text", [
    "fwd:b2,h3,s65,d8,f32", "bwd:b2,hq4,hk2,sq40,sk70,d16,dv8,f32,causal", "fwd:b1,h2,sq70,sk40,d8,f32,causal",
    "fwd:b1,h2,sq33,sk50,d8,f32,window=9:3", "bwd:b3,h2,s40,d8,f32,varlen=cu,causal,ql=3/0/40,kl=7/2/40",
])  # fmt: skip
def test_operations_are_counted_as_the_command_counts_them(text):
    done = command("bench", "--problem", text, "--json", "--seconds", "0", "--threads", "1")
    assert done.returncode == 0, done.stderr
    (line,) = json.loads(done.stdout)["rows"]
    flops = line["rate"] * 1e9 * line["min_us"] * 1e-6
    assert line["unit"] == "GFLOP/s" and suite.parse(text).flops() == pytest.approx(flops, rel=1e-6)


def test_bytes_are_counted_as_the_command_counts_them():
    text = "fwd:b2,hq4,hk2,sq1,sk300,d8,f32,paged=16,kl=300/17"
    (line,) = json.loads(command("bench", "--problem", text, "--json", "--seconds", "0").stdout)["rows"]
    assert line["unit"] == "GB/s" and suite.parse(text).decodes()
    assert suite.parse(text).kv_bytes() == pytest.approx(line["rate"] * 1e9 * line["min_us"] * 1e-6, rel=1e-6)


@pytest.mark.parametrize("line, why", [
    ("A fwd:b1,softcap=3", "softcap"), ("A merge:b1,s4", "merge"), ("A", "not a name and a problem"),
    ("A fwd:b1 extra", "not a name and a problem"), ("A fwd:b1 # x | peer much", "no goal"),
    ("A fwd:b2,varlen=cu,ql=3,kl=3", "one length for each"),
])  # fmt: skip
def test_a_line_that_a_script_cannot_read_is_named(tmp_path, line, why):
    file = tmp_path / "suite.txt"
    file.write_text(f"# remark\n{line}\n")
    with pytest.raises(ValueError, match=f"line 2: .*{why}"):
        suite.read(file)


def test_remarks_and_refused_rows_do_not_stop_the_command(tmp_path):
    file = tmp_path / "suite.txt"
    file.write_text("# head\nA fwd:b1,h1,s16,d8,f32 # a small one | peer 1.0\nB bwd:b1,h1,s16,d8,f32,det\n"
                    "C bwd:b1,h1,s16,d8,e4m3\nD fwd:b1,h1,s16,d8,f32\n")  # fmt: skip
    words = ["bench", "--suite", file, "--seconds", "0", "--threads", "1"]
    done = command(*words)
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line[:2] in ("A ", "B ", "C ", "D ")}
    assert done.returncode == 1 and list(rows) == ["A", "B", "C", "D"]
    assert "refused: " in rows["C"] and "e4m3" in rows["C"] and not any("refused" in rows[x] for x in "ABD")
    lines = json.loads(command(*words, "--json").stdout)["rows"]
    assert ["refused" in x for x in lines] == [False, False, True, False]
    file.write_text("A fwd:b1,h1,s16,d8,f32 extra\n")
    done = command(*words)
    assert done.returncode == 2 and "line 1" in done.stderr and "extra" in done.stderr


# ---- what the GPU script holds results to ----

SMALL = [
    "fwd:b3,hq4,hk2,s70,d16,bf16,causal", "fwd:b2,h2,sq20,sk90,d16,dv8,f16,causal", "fwd:b2,hq4,hk2,s90,d16,bf16,window=20:0",
    "fwd:b3,hq4,hk2,s64,d16,bf16,varlen=cu,causal,ql=5/64/3,kl=5/64/3", "fwd:b2,hq4,hk2,sq1,sk300,d16,bf16,paged=16,kl=300/33",
    "fwd:b2,hq4,hk2,s70,d16,e4m3,descalek", "fwd:b2,hq4,hk2,sq1,sk300,d16,bf16,kv=e4m3,descalek",
    "bwd:b2,hq4,hk2,s70,d16,bf16,causal", "bwd:b2,h2,s90,d16,dv8,f16,window=20:0", "bwd:b1,h2,s50,d16,f32,det",
    "bwd:b3,hq4,hk2,s64,d16,bf16,varlen=cu,causal,ql=5/3/64,kl=5/3/64",
]  # fmt: skip


@pytest.fixture
def cuda_rows(monkeypatch):
    import cuda_rows

    monkeypatch.setattr(cuda_rows, "DEVICE", "cpu")
    return cuda_rows


@pytest.mark.torch
@pytest.mark.parametrize("text", SMALL)
def test_a_right_result_passes_and_a_wrong_one_does_not(cuda_rows, text):
    """On Ingot's CPU kernels: tensors are as the library takes them, and the reference has the problem's mask and lengths."""
    p = suite.parse(text)
    lines = cuda_rows.Lines()
    found = (cuda_rows.forward_calls if p.op == "fwd" else cuda_rows.backward_calls)(
        inputs := cuda_rows.Inputs(p), [""], lines)  # fmt: skip
    assert "ingot" in found and lines["ingot"]["ok"] and 0 < lines["ingot"]["err"] < 0.1, lines["ingot"]
    assert lines["ingot"].get("repeats", False) == p.deterministic
    judge, take = (cuda_rows.forward_reference if p.op == "fwd" else cuda_rows.backward_reference)(inputs)
    if p.op == "fwd":
        wrong = [part.clone() for part, _ in judge.parts]
        assert judge.of(wrong)[1]
        wrong[-1][-1, -1] += 0.1
        assert not judge.of(wrong)[1]
        wrong[-1][-1, -1] = float("nan")
        assert not judge.of(wrong)[1]
    for one in judge if p.op == "bwd" else []:
        wrong = [part.clone() for part, _ in one.parts]
        assert one.of(wrong)[1]
        wrong[0][-1, -1] += 0.2 * one.size
        assert not one.of(wrong)[1]


@pytest.mark.torch
def test_every_peer_of_a_plain_row_is_asked(cuda_rows):
    lines = cuda_rows.Lines()
    found = cuda_rows.forward_calls(cuda_rows.Inputs(suite.parse("fwd:b1,hq4,hk2,s64,d16,bf16,causal")), ["no such"], lines)
    assert {"cudnn", "flash", "efficient", "math", "ingot:no such"} <= set(lines)
    assert "no such" in lines["ingot:no such"]["refused"] and "ingot:no such" not in found
    assert lines["math"]["ok"] and not cuda_rows.peers(cuda_rows.Inputs(suite.parse("fwd:b1,h2,sq1,sk64,d16,bf16,paged=16")))


# ---- a run that is stopped and gone on with ----


class Device:
    """In the place of cuda_rows: counts what is measured, and is interrupted at a row."""

    class Clock:
        driver = "1"
        close = staticmethod(lambda: None)

    Limits = dict
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(empty_cache=lambda: None), OutOfMemoryError=MemoryError)
    sentence = str

    def __init__(self, stop=None, name="a GPU"):
        self.asked, self.stop, self.name = [], stop, name

    def device(self):
        return dict(device=self.name, torch="2", cudnn=9)

    def head(self, row, data):
        return dict(row=row.name, problem=row.text, op=row.problem.op, data=data)

    def measure(self, row, backends, *_):
        if (row.name, row.problem.op) == self.stop:
            raise KeyboardInterrupt
        self.asked.append((row.name, row.problem.op, *backends))
        if row.name == "T2":
            raise MemoryError("too large")
        return [line(row.name, f"ingot:{x}" if x else "ingot", 1.0, row.problem.op) | self.head(row, "normal") for x in backends], 1.0


def peers(monkeypatch, device, *words):
    """What bench/cuda_peers.py asks of a device."""
    monkeypatch.setitem(sys.modules, "cuda_rows", device)
    monkeypatch.setattr(sys, "argv", ["cuda_peers.py", *map(str, words)])
    import cuda_peers

    cuda_peers.main()
    return device.asked


def test_a_stopped_run_is_gone_on_with(monkeypatch, tmp_path):
    words = ["--rows", "T1,T2,T3", "--json", tmp_path / "a.json", "--html", tmp_path / "a.html"]
    first = peers(monkeypatch, Device(stop=("T2", "bwd")), *words)
    assert first == [("T1", "fwd", ""), ("T1", "bwd", ""), ("T2", "fwd", "")]
    kept = json.loads((tmp_path / "a.json").read_text())
    assert [(x["row"], x["op"], "refused" in x) for x in kept["rows"]] == [
        ("T1", "fwd", False), ("T1", "bwd", False), ("T2", "fwd", True)]  # fmt: skip
    assert "Not run: T2 forward (too large)" in told((tmp_path / "a.html").read_text(encoding="utf-8"))
    second = peers(monkeypatch, Device(), *words)
    assert second == [("T2", "bwd", ""), ("T3", "fwd", ""), ("T3", "bwd", "")]
    assert len(json.loads((tmp_path / "a.json").read_text())["rows"]) == 6 and not peers(monkeypatch, Device(), *words)
    with pytest.raises(SystemExit, match="another device"):
        peers(monkeypatch, Device(name="another GPU"), *words)


def test_rows_operators_and_backends_are_those_that_were_named(monkeypatch, tmp_path, capsys):
    assert peers(monkeypatch, Device(), "--rows", "T3", "--op", "bwd") == [("T3", "bwd", "")]
    both = ["--backend", "cuda/attn_fwd_sm80", "--backend", "cuda/attn_bwd_sm80"]
    assert peers(monkeypatch, Device(), "--rows", "T3,P3", *both) == [
        ("T3", "fwd", "cuda/attn_fwd_sm80"), ("T3", "bwd", "cuda/attn_bwd_sm80"), ("P3", "fwd", "cuda/attn_fwd_sm80")]  # fmt: skip
    with pytest.raises(SystemExit):
        peers(monkeypatch, Device(), "--rows", "T3,T99")
    assert "no row T99" in capsys.readouterr().err


# ---- the page ----


class Checker(HTMLParser):
    """Balanced elements, what is fetched, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.fetched, self.words = [], set(), [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.seen.add(tag)
        self.fetched += [y for x, y in attributes if x in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "br", "th"):  # th is closed by what follows it
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.words.append(data)


def line(name, who, ms, op="fwd", problem="b1,h4,s1024,d64,bf16", goals=None, **more):
    p = suite.parse(f"{op}:{problem}")
    rate = {"gbs": p.kv_bytes() / ms / 1e6} if p.decodes() else {}
    return dict(row=name, problem=f"{op}:{problem}", op=op, data="normal", who=who, ms=ms, tflops=p.flops() / ms / 1e9, **rate,
                spread=0.01, err=1e-3, ok=True, goals=goals or {}, title="a title & more", limit=700.0, share=0.5) | more  # fmt: skip


def drawn(*lines, **head):
    return page.page([dict(device="NVIDIA H200", torch="2", cudnn=9, rows=list(lines)) | head])


def told(html):
    return re.sub(r"\s+", " ", " ".join(Checker(html).words))


WHOLE = [
    line("T1", "cudnn", 2.0), line("T1", "ingot", 1.6, goals={"peer": 1.1, "gemm": 0.9}, ratio=1.25, best="cudnn", runs="k:v"),
    line("T1", "cudnn", 3.0, "bwd"), line("T1", "ingot", 4.0, "bwd", goals={"peer": 1.0}, ratio=0.75, best="cudnn"),
    line("T13", "ingot", 1.0, goals={"own": ["T1", 0.9]}, ratio=None, best=None),
    line("D1", "ingot", 0.01, problem="b1,hq8,hk2,sq1,sk4096,d64,bf16", goals={"us": 15.0, "peer": 1.0}, ratio=9.0, best="flash"),
    line("D1", "flash", 0.09, problem="b1,hq8,hk2,sq1,sk4096,d64,bf16"),
    dict(row="P1", problem="fwd:b1,h4,s64,d64,e4m3", op="fwd", data="normal", who="ingot", refused="<no kernel> takes e4m3"),
]  # fmt: skip


def test_the_page_says_where_ingot_is_faster_and_where_not():
    html = drawn(*WHOLE)
    words = told(html)
    assert "2 of 3" in words and "1.25 ×" in words and "0.75 ×" in words
    assert "Slower than the best peer: T1 backward 0.75 ." in words
    assert "4 of 6 goals met" in words  # T1's share and T1 backward's ratio are short of theirs
    assert "T1 forward (90% of the matrix product), T1 backward (1.00 × the best peer)" in words
    assert "Not run: P1 forward (<no kernel> takes e4m3)" in words and "forward: no peer" in words
    assert "T13 forward beside T1" in words and "geometric mean of 1" in words


def test_what_does_less_than_was_asked_is_no_peer_but_is_told():
    words = told(drawn(line("T15", "cudnn", 2.0, "bwd", repeats=False), line("T15", "flash", 8.0, "bwd", repeats=True),
                       line("T15", "ingot", 4.0, "bwd", repeats=True, ratio=2.0, best="flash", runs="x_simt:d64")))  # fmt: skip
    assert "2.00 ×" in words and "not repeatable: cudnn at 0.50 ×" in words and "Slower than the best peer: none" in words
    assert "By the fallback without matrix units: T15 backward" in words


def test_the_page_stands_alone():
    html = drawn(*WHOLE)
    checked = Checker(html)
    assert not checked.fetched and not {"script", "link", "img", "iframe", "object"} & checked.seen and "svg" in checked.seen
    assert not re.search(r"https?:|url\(|@import", html)
    assert "prefers-color-scheme: dark" in html and "@media print" in html and "a title &amp; more" in html


def test_a_wrong_result_wins_nothing():
    words = told(drawn(line("T1", "cudnn", 2.0), line("T1", "ingot", 1.0, ok=False, ratio=2.0, best="cudnn", goals={"peer": 1.0})))
    assert "Results that fail their check: T1 forward" in words and "0 of 1 goals met" in words
    assert "geometric mean" not in words
    # of two of Ingot's kernels the right one speaks, however slow
    words = told(drawn(line("T1", "cudnn", 2.0), line("T1", "ingot:a", 1.0, ok=False, ratio=2.0, best="cudnn"),
                       line("T1", "ingot:b", 4.0, ratio=0.5, best="cudnn")))  # fmt: skip
    assert "Results that fail" not in words and "T1 forward 0.50" in words


@pytest.mark.parametrize("lines", [[], WHOLE[:1], WHOLE[1:2], WHOLE[-1:], WHOLE[4:5], WHOLE[5:6]], ids=len)
def test_a_partial_file_is_drawn(lines):
    words = told(drawn(*lines))
    assert ("Nothing was measured yet" in words) == (not lines)


def test_files_of_earlier_runs_are_drawn(tmp_path):
    """By the command line, which needs neither torch nor the library for it."""
    results = sorted((ROOT / "bench/results").glob("h200_*.json"))
    assert results
    for files in [[x] for x in results] + [[ROOT / f"bench/results/h200_{x}.json" for x in ("forward_sm90_f16", "backward_sm90_f16")]]:
        done = subprocess.run(
            [sys.executable, ROOT / "bench/cuda_peers.py", "--from-json", *files, "--html", tmp_path / "page.html"],
            capture_output=True, text=True, env={**os.environ, "INGOT_LIBRARY": "/nowhere"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        words = told((tmp_path / "page.html").read_text(encoding="utf-8"))
        assert "NVIDIA H200" in words and "geometric mean" in words and "no limit" not in words
    assert "forward" in words and "backward" in words and "1.35 ×" in words


def test_labels_do_not_lie_on_each_other():
    labels = page.Labels((0, 0, 400, 400))
    places = [labels.place(200, 200, 20, 12) for _ in range(20)]
    boxes = [(x, y - 10, x + 20, y + 2) for x, y in places]
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
