"""Packs: built with the real compiler, by the real command, then damaged in every way a file can be.

Marked `images`: it needs nvcc (tools/fetch_nvcc.sh brings the pinned one; INGOT_NVCC names another place of it).
"""
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import ingot_ctypes as ingot

pytestmark = pytest.mark.images
ROOT = Path(__file__).resolve().parents[2]
COMMAND = os.environ.get("INGOT_COMMAND") or str(ROOT / "build/release/ingot")
SMALL = "attn_dropout_mask"  # one image, compiled within seconds
PAGE = 4096


def command(*words, **options):
    return subprocess.run([COMMAND, *map(str, words)], capture_output=True, text=True, timeout=600, **options)


def nvcc():
    path = os.environ.get("INGOT_NVCC") or shutil.which("nvcc")
    if path:
        return path
    return subprocess.run([ROOT / "tools/fetch_nvcc.sh"], capture_output=True, text=True, check=True).stdout.strip()


def build(out, arch="sm_90a", only=SMALL, **options):
    return command("build", "--arch", arch, "-o", out, "--only", only, "--nvcc", nvcc(), "--source", ROOT, **options)


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs")
    done = build(folder, "sm_90a,sm_80")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def pack(packs, tmp_path):
    return Path(shutil.copy(packs / "ingot-sm_90a.pack", tmp_path))


def verify(path):
    done = command("image", "verify", path, "--only", SMALL)
    assert done.returncode in (0, 1), f"no status but {done.returncode}: {done.stdout}{done.stderr}"
    return done


def test_a_good_pack_verifies_and_lists(packs):
    for arch in ("sm_90a", "sm_80"):
        done = verify(packs / f"ingot-{arch}.pack")
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"attn_dropout_mask_sm80" in command("image", "list", packs / f"ingot-{arch}.pack").stdout


def test_a_second_build_does_nothing(packs):
    def made():
        return {path: path.stat().st_mtime_ns for path in packs.rglob("*.cubin*")} | {
            path: path.stat().st_mtime_ns for path in packs.glob("*.pack")}

    before = made()
    done = build(packs, "sm_90a,sm_80")
    assert done.returncode == 0 and "no work to do" in done.stdout
    assert len(before) > 4 and made() == before


ONLY_DEPENDENCIES = """#!/bin/sh
# the real compiler for all but the compiling: it writes the depfile, and the object stays empty
case $1 in --version) exec {nvcc} --version ;; esac
words=
while [ $# -gt 0 ]; do
    case $1 in
    -MD) words="$words -M" ;;
    -cubin | -Xptxas) [ "$1" = -cubin ] || shift ;;
    -o) : >"$2" && shift ;;
    *) words="$words $1" ;;
    esac
    shift
done
exec {nvcc} $words
"""


def included(path, seen):
    """The headers of src/kernels that a file reads, itself or through others."""
    for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.M):
        header = (path.parent / name).resolve()
        if "kernels" in header.parts and header.exists() and header not in seen:
            seen.add(header)
            included(header, seen)
    return seen


def test_a_touched_header_rebuilds_exactly_what_includes_it(tmp_path):
    """All images of an architecture, each depfile by the real compiler; then Ninja is asked what it would build."""
    source, out = tmp_path / "source", tmp_path / "packs"
    shutil.copytree(ROOT / "src/kernels", source / "src/kernels")
    compiler = tmp_path / "nvcc"
    compiler.write_text(ONLY_DEPENDENCIES.format(nvcc=Path(nvcc()).resolve()))
    compiler.chmod(0o755)
    done = command("build", "--arch", "sm_90a", "-o", out, "--nvcc", compiler, "--source", source)
    assert "objects/sm_90a" in done.stderr + done.stdout and "is empty" in done.stderr + done.stdout

    def stale():
        """The images that Ninja would build now, by kernel."""
        words = subprocess.run(["ninja", "-C", out, "-n"], capture_output=True, text=True, check=True).stdout
        return Counter(re.findall(r"sm_90a (\w+):", words))

    images = Counter(line.split("\t")[0] for line in (out / "objects/sm_90a.list").read_text().splitlines())
    kernels = {name: source / f"src/kernels/cuda/{name}.cu" for name in images}
    reads = {name: included(path, set()) for name, path in kernels.items()}
    assert len(images) >= 7 and not stale()
    sets = set()
    for header in set().union(*reads.values()):
        was = header.stat()
        os.utime(header)
        want = {name for name in images if header in reads[name]}
        assert stale() == Counter({name: images[name] for name in want}), header.name
        os.utime(header, ns=(was.st_atime_ns, was.st_mtime_ns))
        sets.add(frozenset(want))
    assert len(sets) > 2 and not stale()  # headers of all, of some and of others
    for name, path in kernels.items():
        was = path.stat()
        os.utime(path)
        assert stale() == Counter({name: images[name]})
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def test_the_same_source_gives_the_same_bytes(packs, tmp_path):
    assert build(tmp_path / "a folder", "sm_90a").returncode == 0
    assert (tmp_path / "a folder/ingot-sm_90a.pack").read_bytes() == (packs / "ingot-sm_90a.pack").read_bytes()


def test_an_incomplete_pack_is_named_missing(pack):
    done = command("image", "verify", pack)
    assert done.returncode == 1 and "attn_merge_sm80:general: missing" in done.stdout


@pytest.mark.parametrize("sixteenth", range(16))
def test_a_cut_pack_is_refused(pack, sixteenth):
    data = pack.read_bytes()
    for length in {len(data) * sixteenth // 16, len(data) * sixteenth // 16 + 1}:
        pack.write_bytes(data[:length])
        done = verify(pack)
        assert done.returncode == 1 and str(pack) in done.stdout + done.stderr


def test_a_flipped_bit_is_found(pack):
    """Every bit that is read: of the header, of the index, of the objects. Padding is not read."""
    data = bytearray(pack.read_bytes())
    used = [*range(0, 256), *range(PAGE, PAGE + 512), *range(2 * PAGE, 2 * PAGE + 1500)]
    rng = np.random.default_rng(7)
    for at in rng.choice(used, 64, replace=False):
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(rng.integers(8))
        pack.write_bytes(flipped)
        assert verify(pack).returncode == 1, f"byte {at}"


def test_what_is_no_pack_is_refused(pack, tmp_path):
    data = pack.read_bytes()
    tail = tmp_path / "tail.pack"
    tail.write_bytes(data[: 2 * PAGE] + bytes(len(data) - 2 * PAGE))
    longer = tmp_path / "longer.pack"
    longer.write_bytes(data + b"x")
    empty = tmp_path / "empty.pack"
    empty.touch()
    folder = tmp_path / "folder.pack"
    folder.mkdir()
    fifo = tmp_path / "fifo.pack"
    os.mkfifo(fifo)
    loop = tmp_path / "loop.pack"
    loop.symlink_to(loop)
    for path in (tail, longer, empty, folder, fifo, loop, tmp_path / "absent.pack"):
        done = verify(path)
        assert done.returncode == 1 and str(path) in done.stdout + done.stderr, path


def listed(packs, arch="sm_90a"):
    """The build's list of one image, as fields."""
    return (packs / f"objects/{arch}.list").read_text().rstrip("\n").split("\t")


def create(packs, tmp_path, fields, arch="sm_90a"):
    path = tmp_path / "made.list"
    path.write_text("\t".join(fields) + "\n")
    return command("image", "create", path, "--arch", arch, "--toolchain", "nvcc", "-o", tmp_path / "made.pack", cwd=packs)


def test_a_hollow_object_fails_the_build(packs, tmp_path):
    fields = listed(packs)
    assert create(packs, tmp_path, fields).returncode == 0
    (tmp_path / "made.pack").unlink()
    fields[6] = "another_kernel"
    done = create(packs, tmp_path, fields)
    assert done.returncode == 1 and "holds no code of kernel another_kernel" in done.stderr
    assert not (tmp_path / "made.pack").exists()


def test_an_empty_a_missing_and_a_foreign_object_fail_the_build(packs, tmp_path):
    fields = listed(packs)
    empty = tmp_path / "empty.cubin"
    empty.touch()
    for object_, word in ((empty, "empty"), (tmp_path / "none.cubin", "missing"), (ROOT / "README.md", "no ELF")):
        done = create(packs, tmp_path, [*fields[:2], str(object_), *fields[3:]])
        assert done.returncode == 1 and word in done.stderr
    done = create(packs, tmp_path, listed(packs, "sm_80"))
    assert done.returncode == 1 and "another architecture" in done.stderr


def test_spills_above_the_row_fail_the_build(packs, tmp_path):
    fields = listed(packs)
    log = tmp_path / "log"
    text = (packs / fields[3]).read_text()
    log.write_text(text.replace(" 0 bytes spill stores", " 8 bytes spill stores"))
    assert log.read_text() != text
    done = create(packs, tmp_path, [*fields[:3], str(log), *fields[4:]])
    assert done.returncode == 1 and "8 bytes of register spills" in done.stderr


@pytest.mark.parametrize("number", ["C7508", "C7510", "C7511", "C7512", "C7513", "C7514", "C7515"])
def test_a_warning_that_spoils_a_kernel_fails_the_build(packs, tmp_path, number):
    fields = listed(packs)
    log = tmp_path / "log"
    log.write_text((packs / fields[3]).read_text() + f"ptxas info    : ({number}) Potential Performance Loss\n")
    done = create(packs, tmp_path, [*fields[:3], str(log), *fields[4:]])
    assert done.returncode == 1 and f"warns of {number}" in done.stderr


def test_a_kernel_of_one_architecture_is_asked_of_its_packs_only(packs):
    for arch, missing in (("sm_90a", True), ("sm_80", False)):
        done = command("image", "verify", packs / f"ingot-{arch}.pack")
        assert ("attn_fwd_sm90:bf16_d64v64_plain: missing" in done.stdout) == missing, done.stdout


def test_a_stale_pack_is_told(packs, tmp_path):
    fields = listed(packs)
    fields[5] = "0" * 32
    assert create(packs, tmp_path, fields).returncode == 0
    done = verify(tmp_path / "made.pack")
    assert done.returncode == 1 and "stale" in done.stdout


def test_diff_merge_and_extract(packs, pack, tmp_path):
    assert command("image", "diff", pack, packs / "ingot-sm_90a.pack").returncode == 0
    done = command("image", "diff", pack, packs / "ingot-sm_80.pack")
    assert done.returncode == 1 and "arch: sm_90a and sm_80" in done.stdout
    merged = tmp_path / "merged.pack"
    assert command("image", "merge", pack, packs / "ingot-sm_90a.pack", "-o", merged).returncode == 0
    assert merged.read_bytes() == pack.read_bytes()
    assert command("image", "merge", pack, packs / "ingot-sm_80.pack", "-o", merged).returncode == 1
    assert command("image", "extract", pack, "-o", tmp_path / "objects").returncode == 0
    assert (tmp_path / "objects/attn_dropout_mask_sm80.general.cubin").read_bytes() == \
        (packs / "objects/sm_90a/attn_dropout_mask_sm80.general.cubin").read_bytes()


def test_a_killed_build_leaves_nothing_half_made(tmp_path):
    with subprocess.Popen([COMMAND, "build", "--arch", "sm_90a", "-o", tmp_path, "--only", SMALL, "--nvcc", nvcc(), "--source",
                           ROOT], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True) as child:
        # as soon as the compiler is at work: its log is there before its object
        end = time.monotonic() + 60
        while not list(tmp_path.glob("objects/sm_90a/*.log")) and time.monotonic() < end:
            time.sleep(0.002)
        os.killpg(child.pid, signal.SIGKILL)
    assert not (tmp_path / "ingot-sm_90a.pack").exists()
    assert build(tmp_path).returncode == 0
    assert verify(tmp_path / "ingot-sm_90a.pack").returncode == 0


def test_what_killed_compiles_left_is_removed(tmp_path):
    assert build(tmp_path).returncode == 0
    objects = tmp_path / "objects/sm_90a"
    before = sorted(objects.iterdir())
    for end in "part", "d", "log":
        (objects / f"attn_fwd_sm80.bf16_d64_plain.cubin.4711.{end}").write_text("half")
    done = build(tmp_path)
    assert done.returncode == 0 and "no work to do" in done.stdout
    assert len(before) == 2 and sorted(objects.iterdir()) == before


def test_a_pack_is_as_open_as_the_umask_lets_it_be(pack, tmp_path):
    for umask, mode in (0o077, 0o600), (0o022, 0o644):
        merged = tmp_path / f"{mode:o}.pack"
        assert command("image", "merge", pack, "-o", merged, umask=umask).returncode == 0
        assert merged.stat().st_mode & 0o777 == mode


def test_an_object_is_extracted_whole_or_not_at_all(pack, tmp_path):
    done = command("image", "extract", pack, "-o", tmp_path / "objects",
                   preexec_fn=lambda: (signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
                                       resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))))
    assert done.returncode == 1 and "cannot be written: File too large" in done.stderr
    assert list((tmp_path / "objects").iterdir()) == []


def test_eight_builders_at_once_leave_one_good_tree(tmp_path):
    words = [COMMAND, "build", "--arch", "sm_90a", "-o", tmp_path, "--only", SMALL, "--nvcc", nvcc(), "--source", ROOT]
    children = [subprocess.Popen(words, stdout=subprocess.DEVNULL) for _ in range(8)]
    assert [child.wait(timeout=600) for child in children] == [0] * 8
    assert verify(tmp_path / "ingot-sm_90a.pack").returncode == 0


def test_the_page_on_nvidia_counts_every_kernels_images():
    images = Counter(re.findall(r"^sm_90a (\w+):", command("build", "--arch", "sm_90a", "--list").stdout, re.M))
    told = re.findall(r"^\| (\w+_sm\w+) \| (\d+) \|", (ROOT / "docs/nvidia.md").read_text(), re.M)
    assert images and {name: int(count) for name, count in told} == images


def on_the_double(packs, *words, **environment):
    """The command with a driver double for a GPU: what it launches computes nothing and takes a millisecond."""
    double = Path(COMMAND).parent / "tests/double"
    if not (double / "libcuda.so.1").exists():
        pytest.skip(f"no driver double in {double}")
    return command(*words, "--device", "cuda:0", env={
        **os.environ, "LD_LIBRARY_PATH": str(double), "INGOT_IMAGE_PATH": str(packs), **environment})


def test_rows_of_a_gpu_are_written_and_read(packs, tmp_path):
    rows = tmp_path / "rows.tsv"

    def bench(*words):
        done = on_the_double(packs, "bench", "--only", "mask:", "--rows", rows, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return [line.split("\t") for line in rows.read_text().splitlines() if line[0] != "#"]

    suite = [line.split()[1] for line in (ROOT / "bench/cuda.txt").read_text().splitlines() if line[0] != "#"]
    problems = [x for x in suite if x.startswith("mask:")]
    last = bench("--from", suite.index(problems[-1]) + 1)
    assert len(last) == 1
    found = bench()
    assert len(found) == len(problems) > 1 and last[0] in found
    digest = listed(packs)[5]
    for op, arch, bucket, kernel, _, microseconds, _, cases, of, device, _ in found:
        assert (op, arch, kernel, of, cases) == ("attn_dropout_mask", "sm_90a", "attn_dropout_mask_sm80", digest, "0")
        assert bucket.startswith("bool,") and microseconds == "1000.0" and device.startswith("sm_90a_h200")
    told = on_the_double(packs, "explain", problems[0], INGOT_TUNING_PATH=str(rows), INGOT_LOG="3")
    assert f"{len(found)} rows of {rows}" in told.stderr and "1000.0 us at bool," in told.stdout


@pytest.mark.parametrize("jobs", [1, 4])
def test_a_gpu_that_computes_nothing_fails_every_case(packs, tmp_path, jobs):
    rows, saved = tmp_path / "rows.tsv", tmp_path / "check.json"
    assert on_the_double(packs, "bench", "--only", "mask:", "--rows", rows).returncode == 0
    rows.write_text(rows.read_text().replace("\t0.000\t0\t", "\t0.500\t9\t"))  # as if it had passed once
    done = on_the_double(packs, "check", "--level", "2", "--jobs", jobs, "--rows", rows, "--save", saved,
                         "--backend", "attn_dropout_mask_sm80")
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads(saved.read_text())
    (kernel,) = result["kernels"]
    assert result["result"] == "FAIL" and result["model"] == "sm_90a_h200" and kernel["digest"] == listed(packs)[5]
    assert kernel["passed"] == 0 and kernel["failed"] > 4 and kernel["refused"] == 0
    assert {line.split("\t")[7] for line in rows.read_text().splitlines()[1:]} == {"0"}


def test_bad_words_are_named(tmp_path):
    done = command("build", "--arch", "sm_12", "-o", tmp_path)
    assert done.returncode == 2 and "sm_12" in done.stderr and "sm_90a" in done.stderr
    assert command("build", "-o", tmp_path).returncode == 2
    done = command("build", "--arch", "sm_90a", "-o", tmp_path, "--only", "no such", "--nvcc", nvcc())
    assert done.returncode == 1 and "no such" in done.stderr
    done = command("build", "--arch", "sm_90a", "-o", tmp_path, "--nvcc", "/bin/true")
    assert done.returncode == 1 and "version" in done.stderr


def test_a_gpu_call_without_a_driver_says_so():
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")
    x = np.zeros((1, 1, 4, 8), np.float32)
    params = ingot.PARAMS["attn_fwd"]()
    params.struct_size = ingot.sizeof(params)
    for name in ("q", "k", "v", "out"):
        t = getattr(params, name)
        t.data, t.dtype, t.ndim = x.ctypes.data, 1, 4
        for i in range(4):
            t.shape[i], t.stride[i] = x.shape[i], x.strides[i] // 4
    status = ingot.lib.ingot_attn_fwd(params, ingot.ingot_stream(1, 0, None), None)
    assert ingot.STATUS[status] == "INGOT_NO_DEVICE" and b"driver" in ingot.lib.ingot_last_error()
