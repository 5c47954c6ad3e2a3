"""The command on the driver double, as any program gets it: by LD_LIBRARY_PATH. No GPU, and no kernel runs.

Marked `images`, as the double's own tests are (tests/double, run by ctest).
"""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ingot_ctypes as ingot

pytestmark = pytest.mark.images
COMMAND = os.environ.get("INGOT_COMMAND") or str(Path(ingot.PATH).parent / "ingot")
DOUBLE = Path(COMMAND).parent / "tests/double"


def listed(**environment):
    done = subprocess.run([COMMAND, "list", "--json"], capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return {x["name"]: x["available"] for x in json.loads(done.stdout)["implementations"] if x["device"] == "cuda"}


def test_a_gpu_is_there_with_the_double_alone():
    assert (DOUBLE / "libcuda.so.1").exists()
    assert all(listed(LD_LIBRARY_PATH=str(DOUBLE)).values())
    if not Path("/dev/nvidiactl").exists():
        assert not any(listed().values())


@pytest.fixture(scope="module")
def pack():
    found = Path(os.environ.get("INGOT_IMAGE_PATH") or ingot.ROOT / "build/packs")
    assert (found / "ingot-sm_90a.pack").exists(), "./test.sh makes it"
    return found


@pytest.mark.parametrize("words, refused", [("", False), (",det", True)])
def test_a_row_is_timed_with_the_flags_it_asks_for(pack, words, refused):
    done = subprocess.run(
        [COMMAND, "bench", "--device", "cuda:0", "--json", "--backend", "cuda/attn_bwd_sm80",
         "--problem", f"bwd:b1,h1,s64,d64,bf16{words}"],
        env={**os.environ, "LD_LIBRARY_PATH": str(DOUBLE), "INGOT_IMAGE_PATH": str(pack)}, capture_output=True, text=True,
    )  # fmt: skip
    (line,) = json.loads(done.stdout)["rows"]
    assert done.returncode == refused and ("atomics" in line.get("refused", "")) == refused, done.stdout + done.stderr


@pytest.mark.parametrize("words", ["bench --problem", "explain", "check --problem"])
def test_threads_are_refused_for_a_gpu(pack, words):
    done = subprocess.run(
        [COMMAND, *words.split(), "fwd:b1,h1,s64,d64,bf16", "--device", "cuda:0", "--threads", "3"],
        env={**os.environ, "LD_LIBRARY_PATH": str(DOUBLE), "INGOT_IMAGE_PATH": str(pack)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "--threads" in done.stderr, done.stdout + done.stderr


def test_the_python_package_on_a_gpu(pack):
    """Its GPU half up to the driver: device, stream, results and workspace from the framework, and capture."""
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "double_framework.py", Path(ingot.PATH).parent / "python"],
        env={**os.environ, "LD_LIBRARY_PATH": str(DOUBLE), "INGOT_IMAGE_PATH": str(pack)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "right\n", done.stdout + done.stderr
