"""What the watchdog does at each look, with seconds that are told to it; its runs beside pytest are in test_runs.py."""

import os
import signal
import subprocess
import sys
import time

import pytest

from conftest import ENOUGH, PACKAGE
from pytest_gpu_lease import endings
from pytest_gpu_lease.lockfile import open_lock_file
from pytest_gpu_lease.watchdog import Watch


@pytest.fixture
def peer(start_peer):
    """A peer in a test of that name."""

    def start(test, run="run"):
        one = start_peer(run=run)
        one(f"w.write(test={test!r})")
        return one

    return start


@pytest.fixture
def watch(lockfile):
    return Watch(open_lock_file(lockfile), timeout=10, grace=5, run=None)


def ended(peer):
    return os.waitid(os.P_PID, peer.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def signal_that_ended(peer):
    return -peer.process.wait(timeout=ENOUGH)


def test_a_test_that_stands_still_gets_sigterm_and_is_named(peer, watch, capsys):
    worker = peer("test_a.py::test_slow")
    for _ in range(10):
        assert watch.look(1)
    assert not ended(worker) and capsys.readouterr().err == ""
    watch.look(1)
    assert signal_that_ended(worker) == signal.SIGTERM
    told = capsys.readouterr().err
    assert f"gw0 (pid {worker.pid}, GPU none) hangs in test_a.py::test_slow: nothing new for 10 s; SIGTERM" in told
    [ending] = endings.read(watch.lock_file, "run")
    assert (ending["worker"], ending["test"], ending["reported"]) == ("gw0", "test_a.py::test_slow", False)
    assert "hangs in test_a.py::test_slow" in ending["text"]
    assert not watch.look(1)
    assert f"pid {worker.pid} has ended" in capsys.readouterr().err


def test_a_stopped_worker_gets_sigkill_after_the_grace_period_even_between_tests(peer, watch, capsys):
    worker = peer(None)
    for _ in range(100):
        watch.look(1)
    assert not ended(worker)
    worker.signal(signal.SIGSTOP)
    for _ in range(14):
        watch.look(1)
    assert not ended(worker)
    watch.look(1)
    assert signal_that_ended(worker) == signal.SIGKILL
    told = capsys.readouterr().err
    assert "hangs in no test, stopped: nothing new for 10 s; SIGTERM" in told
    assert "has not ended 5 s after SIGTERM; SIGKILL" in told


def test_a_worker_that_goes_on_is_left_alone(peer, watch, capsys):
    worker = peer("test_a.py::test_0")
    worker("__import__('signal').signal(15, __import__('signal').SIG_IGN) and 0")
    for number in range(1, 9):
        watch.look(9)
        worker(f"w.write(test='test_a.py::test_{number}')")
    assert capsys.readouterr().err == ""
    watch.look(1)
    watch.look(10)
    worker("w.write(test='test_a.py::test_next')")
    for _ in range(9):
        watch.look(1)
    assert "goes on by itself after SIGTERM" in capsys.readouterr().err
    assert not ended(worker)


def test_a_worker_that_waits_for_a_gpu_does_not_stand_still(peer, watch, monkeypatch, capfd):
    monkeypatch.setenv("GPU_LEASE_PRETEND_GPUS", "1")
    holder, waiting = peer("test_a.py::test_a"), peer("test_a.py::test_b")
    assert holder("w.lease()")[0] == 0
    waiting.begin("w.lease()")
    beats, limit = set(), time.monotonic() + ENOUGH
    while len(beats) < 3 and time.monotonic() < limit:
        beats |= {record["beat"] for record in watch.lock_file.living() if record["wants"]}
        time.sleep(0.01)
    assert len(beats) >= 3
    holder.signal(signal.SIGKILL)
    assert waiting.answer() == [0, "ffffffff:00:00.0"]
    told = capfd.readouterr().err
    assert "gw1 (pid %d) waits for a GPU since 0 s, with 0 before it" % waiting.pid in told
    assert "leased are ffffffff:00:00.0 by gw0, pid %d" % holder.pid in told
    assert "gw1 (pid %d) leases GPU 0 (ffffffff:00:00.0) after" % waiting.pid in told


def test_a_worker_that_lived_between_two_looks_is_seen(peer, watch):
    peer("test_a.py::test_a")
    endings.add(watch.lock_file, "run", "gw7", "test_a.py::test_b", "the GPU's context is dead", reported=True)
    assert watch.look(1)
    assert watch.seen == {("run", "gw0"), ("run", "gw7")}


def test_one_run_can_be_watched_alone(peer, lockfile):
    watch = Watch(open_lock_file(lockfile), timeout=10, grace=5, run="mine")
    mine, other = peer("test_a.py::test_a", run="mine"), peer("test_a.py::test_a", run="other")
    watch.look(1)
    watch.look(10)
    assert signal_that_ended(mine) == signal.SIGTERM
    assert not watch.look(100)
    assert not ended(other)


def watchdog(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "pytest_gpu_lease.watchdog", *arguments],
        env={**os.environ, "PYTHONPATH": str(PACKAGE / "src")}, capture_output=True, text=True)


def test_a_run_that_never_begins_is_told(lockfile):
    done = watchdog("--lockfile", lockfile, "--workers", "2", "--timeout", "0.5", "--poll", "0.1")
    assert (done.returncode, done.stderr) == (3, "gpu lease watchdog: saw 0 workers, and --workers is 2\n")


def test_a_run_shorter_than_the_time_between_two_looks_is_seen(lockfile, start_peer):
    with subprocess.Popen(
        [sys.executable, "-m", "pytest_gpu_lease.watchdog", "--lockfile", lockfile, "--workers", "1", "--poll", "3",
         "--timeout", "6"],
        env={**os.environ, "PYTHONPATH": str(PACKAGE / "src")}, stderr=subprocess.PIPE, text=True) as process:
        one = start_peer()
        one("w.write(test='test_a.py::test_a')")
        time.sleep(1)
        one.signal(signal.SIGKILL)
        assert (process.wait(), process.stderr.read()) == (0, "")


def test_wrong_arguments_are_refused(lockfile):
    for arguments, text in [
        (["--workers", "2"], "the following arguments are required: --lockfile"),
        (["--lockfile", lockfile], "the following arguments are required: --workers"),
        (["--lockfile", lockfile, "--workers", "0"], "--workers: is 0, and must be at least 1"),
        (["--lockfile", lockfile, "--workers", "2", "--grace", "-1"], "--grace: is -1, and must be above 0"),
        (["--lockfile", str(PACKAGE / "pyproject.toml"), "--workers", "2"], "is not a lock file"),
    ]:
        done = watchdog(*arguments)
        assert done.returncode == 2 and text in done.stderr, done.stderr
