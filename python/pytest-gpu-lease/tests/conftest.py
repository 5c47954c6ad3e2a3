"""Where the tests find the package: its sources for calls, and an installed copy for runs of pytest.

The installed copy has the entry point, so runs load the plugin as users' runs do, and this run of pytest does not.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PACKAGE / "src"), str(PACKAGE / "tests")]

from peers import Peer  # noqa: E402

VARIABLES = re.compile(r"GPU_LEASE_|(CUDA|HIP|ROCR)_VISIBLE_DEVICES$|PYTEST_")
ENOUGH = 300  # seconds after which something hangs that must not


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in [name for name in os.environ if VARIABLES.match(name)]:
        monkeypatch.delenv(name)


@pytest.fixture
def lockfile(tmp_path):
    return str(tmp_path / "lock")


@pytest.fixture
def start_peer(lockfile):
    """Starts processes that use the lock file as workers do, named gw0, gw1, ... unless a name is given, and ends them."""
    peers = []

    def start(worker=None, run="run"):
        peers.append(Peer(lockfile, worker or f"gw{len(peers)}", run))
        return peers[-1]

    yield start
    for one in peers:
        one.end()


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "--no-deps", "--target", target, PACKAGE], check=True)
    return target


class Run:
    """A project of its own, in which pytest is run as users do."""

    def __init__(self, path, installed):
        self.path = path
        self.lockfile = path / "lock"
        self.log = path / "log"
        self.processes = []
        self.environment = {
            **os.environ,
            "PYTHONPATH": f"{installed}:{PACKAGE / 'tests'}",
            "GPU_LEASE_LOCKFILE": str(self.lockfile),
            "LEASE_LOG": str(self.log),
        }

    def write(self, **files):
        for name, text in files.items():
            (self.path / f"{name}.py").write_text(text)

    def start(self, *arguments, **environment):
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=self.path, env={**self.environment, **environment}, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        self.processes.append(process)
        return process

    def pytest(self, *arguments, **environment):
        # Without hypothesis's plugin, which is in the environment by chance, a worker starts in half the time.
        options = ["-rpfE", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
        return self.start("pytest", *options, *arguments, **environment)

    def finish(self, process):
        """The outcome of each test, by the part of its name after ::, and all that was written."""
        try:
            output, _ = process.communicate(timeout=ENOUGH)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its workers, who may be stuck
            output, _ = process.communicate()
            pytest.fail(f"does not end:\n{output}")
        print(output)
        outcomes = {}
        for outcome, name in re.findall(r"^(PASSED|FAILED|ERROR) \S+?::(\S+)", output, re.M):
            outcomes.setdefault(name, []).append(outcome)
        return outcomes, output


@pytest.fixture
def run(tmp_path, installed):
    project = Run(tmp_path, installed)
    yield project
    for process in project.processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """A folder with driver.c as NVIDIA's driver library, and one with it as AMD's."""
    folders = {}
    for vendor, name in ("cuda", "libcuda.so.1"), ("hip", "libamdhip64.so"):
        folders[vendor] = tmp_path_factory.mktemp(vendor)
        source = PACKAGE / "tests/driver.c"
        subprocess.run(
            ["gcc", "-std=gnu17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{name}", source,
             "-o", folders[vendor] / name], check=True)
    return folders
