"""Whole runs of pytest and xdist with the installed plugin, some of them with workers killed, stopped and stuck."""

import os
import random
import re
import signal
import time

import leaselog
from conftest import ENOUGH
from pytest_gpu_lease import endings
from pytest_gpu_lease.lockfile import open_lock_file
from pytest_gpu_lease.plugin import NAME_LENGTH, name_of

USE = """
import ctypes, os, signal, subprocess, sys, time
import pytest
from leaselog import doom, using
from peers import fork

@pytest.fixture(autouse=True)
def gpu(gpu_id):
    with using(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")[gpu_id]):
        yield
"""


def check_log(run):
    lines = leaselog.read(run.log)
    assert leaselog.overlaps(lines) == []
    return lines


def test_the_log_shows_what_it_must():
    def found(text):
        return leaselog.overlaps([line.split() for line in text.split(",")])

    assert found("begin 0 a,end 0 a,begin 0 b,begin 1 a,end 1 a,end 0 b") == []
    assert found("begin 0 a,begin 0 b,end 0 a,end 0 b") == [("begin", "0", "b", "a")]
    assert found("begin 0 a,begin 0 b,doomed a,end 0 b") == [("begin", "0", "b", "a")]
    assert found("begin 0 a,doomed a,begin 0 b") == []
    assert len(found("begin 0 a,doomed a,begin 0 b,overlap 0 a b")) == 1


def test_eight_workers_never_share_one_of_four_gpus_while_some_are_killed(run):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    choice = random.Random(seed)
    run.write(test_many=USE + """
@pytest.mark.parametrize("number", range(200))
def test_one(number):
    time.sleep(0.03)
""")
    process = run.pytest("-n", "8", GPU_LEASE_PRETEND_GPUS="4")
    lock_file = open_lock_file(run.lockfile)
    killed = set()
    limit = time.monotonic() + ENOUGH
    # Six kills, each after so many more tests have begun, of workers with a GPU and of those that wait for one.
    for begun in range(20, 140, 20):
        while process.poll() is None and time.monotonic() < limit:
            if run.log.exists() and sum(line[0] == "begin" for line in leaselog.read(run.log)) >= begun:
                workers = [r for r in lock_file.living() if r["test"] and r["test"] != "(collection)"]
                if workers:
                    victim = choice.choice(workers)["pid"]
                    leaselog.doom(run.log, victim)
                    os.kill(victim, signal.SIGKILL)
                    killed.add(victim)
                    break
            time.sleep(0.01)
    outcomes, output = run.finish(process)
    lines = check_log(run)
    assert len(killed) == 6
    assert set(outcomes) == {f"test_one[{number}]" for number in range(200)}
    failed = {name for name, ends in outcomes.items() if "FAILED" in ends}
    assert len(failed) <= 6
    assert len(re.findall(r"^worker '\w+' crashed while running", output, re.M)) == len(failed)
    assert len({line[1] for line in lines if line[0] == "begin"}) == 4
    assert "waits for a GPU since 0 s" in output
    # Each test that has passed used its GPU from beginning to end.
    assert sum(line[0] == "end" for line in lines) >= 200 - len(failed)


def test_workers_that_see_other_gpus_in_another_order_never_share_one(run):
    run.write(
        conftest="""
import os
seen = {"gw0": "0,1,2", "gw1": "2,1,0", "gw2": "1", "gw3": "2,1"}.get(os.environ.get("PYTEST_XDIST_WORKER"))
if seen:
    os.environ["CUDA_VISIBLE_DEVICES"] = seen
""",
        test_orders=USE + """
@pytest.mark.parametrize("number", range(40))
def test_one(number):
    time.sleep(0.03)
""")
    outcomes, output = run.finish(run.pytest("-n", "4", GPU_LEASE_PRETEND_GPUS="3b:00.0,86:00.0,1:3b:00.0"))
    lines = check_log(run)
    assert len(outcomes) == 40 and set(map(tuple, outcomes.values())) == {("PASSED",)}
    assert len({line[1] for line in lines}) == 3


def test_hung_stopped_and_broken_workers_are_replaced_and_the_rest_runs(run, driver):
    library = driver["cuda"] / "libcuda.so.1"
    run.write(test_bad=USE + f"""
def break_context():
    libc = ctypes.CDLL(None)
    ctypes.CDLL({str(library)!r})
    libc.setenv(b"DRIVER_CONTEXT", b"yes", 1)
    libc.setenv(b"DRIVER_STATUS", b"700", 1)

def test_stuck_with_the_interpreter_held():
    doom()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.PyDLL(None).pause()

def test_fine_0(): pass

def test_stuck_and_deaf():
    doom()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.PyDLL(None).pause()

def test_fine_1(): pass

def test_stopped():
    doom()
    os.kill(os.getpid(), signal.SIGSTOP)

def test_fine_2(): pass

@pytest.fixture
def resource():
    yield
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_breaks_and_says_so(resource):
    break_context()
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_fine_3(): pass

def test_breaks_and_says_nothing():
    break_context()

def test_fine_4(): pass

def test_says_so_without_a_context():
    raise RuntimeError("HIP error: unspecified launch failure")

def test_fine_5(): pass

def test_opens_the_lock_file():
    with open(os.environ["GPU_LEASE_LOCKFILE"]) as file:
        file.readline()

def test_fine_6(): pass

def test_fails_by_itself():
    assert 1 == 2

def test_fine_7():
    child = subprocess.Popen([sys.executable, "-c", ""])
    assert child.wait() == 0
    if os.fork() == 0:
        os.close(os.open(os.environ["GPU_LEASE_LOCKFILE"], os.O_RDONLY))
        os._exit(0)
    os.wait()
    child = fork(lambda: None)
    os.kill(child, signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
""")
    watchdog = run.start("pytest_gpu_lease.watchdog", "--lockfile", str(run.lockfile), "--workers", "5",
                         "--timeout", "8", "--grace", "2", "--poll", "0.2")
    process = run.pytest("-n", "5", GPU_LEASE_PRETEND_GPUS="4")
    outcomes, output = run.finish(process)
    _, told = run.finish(watchdog)
    check_log(run)
    hung = {"test_stuck_with_the_interpreter_held", "test_stuck_and_deaf", "test_stopped"}
    failed = hung | {"test_breaks_and_says_so", "test_breaks_and_says_nothing", "test_says_so_without_a_context",
                     "test_opens_the_lock_file", "test_fails_by_itself"}
    expected = {name: ["FAILED"] for name in failed} | {f"test_fine_{number}": ["PASSED"] for number in range(8)}
    assert outcomes == expected
    assert re.search(r"\b8 failed, 8 passed\b", output)
    assert output.count("the GPU's context is dead: illegal memory access (CUDA error 700)") >= 2
    assert "the GPU's context is dead: unspecified launch failure" in output
    assert "the lease is lost: this process opened" in output
    assert "RuntimeError: CUDA error: an illegal memory access was encountered" in output
    assert watchdog.returncode == 0
    for name in hung:
        assert len(re.findall(rf"hangs in test_bad\.py::{name}: nothing new for \d+ s; SIGTERM", told)) == 1
        assert re.search(rf"^ended by the watchdog: .* hangs in test_bad\.py::{name}:", output, re.M)
    killed = re.findall(r"(gw\d+) \(pid \d+, .* has not ended \d+ s after SIGTERM; SIGKILL", told)
    deaf = re.findall(r"(gw\d+) \(pid \d+, .* hangs in test_bad.py::(?:test_stuck_and_deaf|test_stopped):", told)
    assert sorted(killed) == sorted(deaf)
    assert "in test_stuck_with_the_interpreter_held" in output  # the stacks that SIGTERM brought
    assert "in test_fine_7" not in output  # a child that a test ends by SIGTERM writes none
    assert not open_lock_file(run.lockfile).living()
    assert not list(run.path.glob("lock.*"))


def test_one_process_without_xdist(run):
    run.write(test_plain="""
import os
import pytest

def test_ids(gpu_id, gpu_device):
    assert (gpu_id, gpu_device) == (1, "cuda:1")

def test_a_session_inside_borrows_the_lease(pytester, request, gpu_id):
    pytester.makepyfile("def test_inner(gpu_id): assert gpu_id == 1")
    pytester.runpytest_inprocess().assert_outcomes(passed=1)

def test_dies():
    raise RuntimeError("CUDA error: device-side assert triggered")

def test_never_runs(): pass
""", conftest="pytest_plugins = ['pytester']")
    variables = {"GPU_LEASE_PRETEND_GPUS": "3", "GPU_LEASE_PIN": "FFFFFFFF:01:00.0"}
    outcomes, output = run.finish(run.pytest(**variables))
    assert outcomes == {"test_ids": ["PASSED"], "test_a_session_inside_borrows_the_lease": ["PASSED"],
                        "test_dies": ["FAILED"]}
    assert "PRETENDED GPUs (GPU_LEASE_PRETEND_GPUS=3)" in output
    assert "GPU_LEASE_PIN=FFFFFFFF:01:00.0" in output
    assert "the GPU's context is dead: device-side assert triggered" in output

    outcomes, output = run.finish(run.pytest("-k", "ids", CUDA_VISIBLE_DEVICES="", **variables))
    assert outcomes == {"test_ids": ["ERROR"]} and "no GPU is visible to this process" in output


def test_nothing_happens_without_the_variable_and_a_wrong_file_is_refused(run):
    run.write(test_plain="def test_a(): pass\ndef test_b(gpu_device): pass")
    environment = dict(run.environment)
    del run.environment["GPU_LEASE_LOCKFILE"]
    outcomes, output = run.finish(run.pytest())
    assert outcomes == {"test_a": ["PASSED"], "test_b": ["ERROR"]}
    assert "GPU_LEASE_LOCKFILE is not set: name a file that every test run on this machine uses" in output
    assert not run.lockfile.exists()

    run.environment = environment
    run.lockfile.write_text("something of value\n")
    outcomes, output = run.finish(run.pytest("-n", "1"))
    assert outcomes == {} and re.search("^ERROR: GPU_LEASE_LOCKFILE: .* is not a lock file", output, re.M)
    assert run.lockfile.read_text() == "something of value\n"


def test_a_test_that_ended_its_worker_is_not_run_again(run):
    """xdist by itself gives it to the next worker under --dist loadscope, until no restart is left."""
    run.write(test_scope="""
import os, signal

def test_first(gpu_id): pass

def test_breaks(gpu_id):
    raise RuntimeError("CUDA error: unspecified launch failure")

def test_crashes():
    os.kill(os.getpid(), signal.SIGKILL)

def test_hangs():
    while True:
        signal.pause()

def test_last(gpu_id): pass
""")
    # What an earlier run of the same name left when it was killed does not count.
    endings.add(open_lock_file(run.lockfile), "mine/0", "gw0", "test_scope.py::test_first", "", reported=True)
    watchdog = run.start("pytest_gpu_lease.watchdog", "--lockfile", str(run.lockfile), "--workers", "1",
                         "--timeout", "6", "--grace", "2", "--poll", "0.2", "--run", "mine/0")
    process = run.pytest("-n", "1", "--dist", "loadscope", "--testrunuid", "mine/0", GPU_LEASE_PRETEND_GPUS="1")
    outcomes, output = run.finish(process)
    _, told = run.finish(watchdog)
    assert outcomes == {"test_first": ["PASSED"], "test_breaks": ["FAILED"], "test_crashes": ["FAILED"],
                        "test_hangs": ["FAILED"], "test_last": ["PASSED"]}
    assert watchdog.returncode == 0 and told.count("SIGTERM") == 1
    assert not list(run.path.glob("lock.*"))


def test_names_in_records_are_short_and_differ():
    assert name_of("test_a.py::test_b[\u00e9]") == "test_a.py::test_b[\\xe9]"
    long = [name_of("x" * 1000 + end) for end in "ab"]
    assert long[0] != long[1] and {len(name) for name in long} == {NAME_LENGTH}
