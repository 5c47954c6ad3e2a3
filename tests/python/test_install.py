"""An installed tree works wherever it was put (LD-06): odd characters, long paths, symlinks, relative paths, LC_ALL."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import ingot_ctypes as ingot
import pytest

BUILD = Path(os.path.realpath(ingot.PATH)).parent
CALL = """
import sys; sys.path.insert(0, sys.argv[1])
import numpy as np, ingot_ctypes as ingot
x = ingot.encode(np.ones((1, 2, 5, 8)), "f32")
out = ingot.empty((1, 2, 5, 8), "f32")
ingot.attn_fwd(q=x, k=x, v=x, out=out)
assert (out.values == 1).all() and ingot.lib.ingot_version_string()
print("right", len(ingot.kernels("attn_fwd")))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    if not (BUILD / "cmake_install.cmake").exists():
        pytest.fail(f"{BUILD} is no build folder to install from")
    tree = tmp_path_factory.mktemp("installed") / "tree"
    subprocess.run(["cmake", "--install", BUILD, "--prefix", tree], check=True, capture_output=True)
    return tree


def uses(tree, cwd=None):
    """The library by ctypes and the command, from a tree."""
    library = next(Path(cwd or ".", tree).glob("lib*/**/libingot.so"))
    library = library.relative_to(cwd) if cwd else library
    path = str(library)
    env = {**os.environ, "LC_ALL": "C", "INGOT_LIBRARY": path if os.path.isabs(path) else f"./{path}"}
    env.pop("LD_LIBRARY_PATH", None)
    done = subprocess.run(
        [sys.executable, "-c", CALL, Path(__file__).parent], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.stdout.startswith("right"), done.stderr
    command = Path(tree) / "bin/ingot"
    if not (Path(cwd or ".") / command).exists():
        return
    command = str(command) if os.path.isabs(command) else f"./{command}"
    listed = subprocess.run([command, "list"], cwd=cwd, env=env, capture_output=True)
    assert listed.returncode == 0 and b"attn_fwd" in listed.stdout, listed.stderr
    missing = f"{tree}/no such file %s.safetensors"
    told = subprocess.run([command, "attn", missing], cwd=cwd, env=env, capture_output=True)
    assert told.returncode not in (0, -6, -11) and os.fsencode(missing) in told.stderr + told.stdout, told.stderr


LONG = "/".join(["long" * 60] * 12)  # 2,891 characters


@pytest.mark.parametrize(
    "name",
    ["with space", "quo'te\"s", "per%cent%s%n", "вниманье", "новая папка 100% 'да'", LONG],
    ids=["space", "quotes", "percent", "cyrillic", "mixed", "long"],
)
def test_any_folder(installed, tmp_path, name):
    tree = tmp_path / name
    shutil.copytree(installed, tree, symlinks=True)
    uses(tree)


def test_through_a_symlink_and_by_a_relative_path(installed, tmp_path):
    (tmp_path / "real").mkdir()
    shutil.copytree(installed, tmp_path / "real/tree", symlinks=True)
    (tmp_path / "link").symlink_to("real/tree")
    uses(tmp_path / "link")
    uses(Path("link"), cwd=tmp_path)


def test_relative_path_then_another_folder(installed, tmp_path):
    """What was opened by a relative path goes on working when the process has left the folder."""
    shutil.copytree(installed, tmp_path / "tree", symlinks=True)
    library = next((tmp_path / "tree").glob("lib*/**/libingot.so")).relative_to(tmp_path)
    env = {**os.environ, "INGOT_LIBRARY": f"./{library}"}
    leave = CALL.replace("x = ingot.encode", "import os; os.chdir('/')\nx = ingot.encode")
    done = subprocess.run(
        [sys.executable, "-c", leave, Path(__file__).parent], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.stdout.startswith("right"), done.stderr
