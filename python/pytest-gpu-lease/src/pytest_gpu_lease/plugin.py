"""The hooks and fixtures pytest sees. Nothing happens unless GPU_LEASE_LOCKFILE is set.

A process that runs tests is a Worker: one of xdist's, or pytest itself without xdist. It writes what it does into its
slot of the lock file, and leases a GPU when a test first asks for one: not earlier, because xdist hands out no test
before every worker has collected, so a worker that waited during collection would wait for ever. The process that
directs xdist's workers is the Director.
"""

import faulthandler
import hashlib
import os
import signal
import sys
import time

import pytest

from pytest_gpu_lease import endings, gpus, sticky
from pytest_gpu_lease.lockfile import open_lock_file, started

LOCKFILE = "GPU_LEASE_LOCKFILE"
PIN = "GPU_LEASE_PIN"
ONCE = "gpu_lease_once"  # in a worker's input: xdist's scheduler gives a test that ended its worker to the next one
ONCE_SCHEDULERS = ("loadscope", "loadfile", "loadgroup")
POLL = 0.1
REMIND = 30
NAME_LENGTH = 600

_worker = None  # this process's only one: a session run inside a test, by pytester, borrows it


@pytest.fixture(scope="session")
def gpu_id():
    """The GPU leased to this worker, as the driver numbers it in this process."""
    if _worker is None:
        pytest.fail(f"{LOCKFILE} is not set: name a file that every test run on this machine uses", pytrace=False)
    try:
        return _worker.lease().id
    except gpus.GpuError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def gpu_device(gpu_id):
    """The leased GPU as frameworks name it, of either vendor: cuda:3."""
    return f"cuda:{gpu_id}"


def pytest_report_header(config):
    if not os.environ.get(LOCKFILE):
        return None
    parts = [f"lock file {os.environ[LOCKFILE]}"]
    if os.environ.get(PIN):
        parts.append(f"{PIN}={os.environ[PIN]}")
    if gpus.PRETEND in os.environ:
        parts.append(f"PRETENDED GPUs ({gpus.PRETEND}={os.environ[gpus.PRETEND]})")
    return "gpu lease: " + ", ".join(parts)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session):
    if not os.environ.get(LOCKFILE) or _worker is not None:
        return
    config = session.config
    try:
        lock_file = open_lock_file(os.environ[LOCKFILE])
        if config.pluginmanager.hasplugin("dsession"):
            plugin = Director(lock_file, config.getoption("dist") in ONCE_SCHEDULERS)
        else:
            plugin = Worker(lock_file, getattr(config, "workerinput", None))
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"{LOCKFILE}: {error}") from None
    config.pluginmanager.register(plugin, "gpu_lease_process")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    """Passes over a test that has ended a worker of this run. It has been reported, and would only do it again."""
    if _worker is None or not _worker.once:
        return None
    ended = endings.read(_worker.lock_file, _worker.record["run"])
    return any(ending["test"] == name_of(item.nodeid) for ending in ended) or None


def name_of(nodeid):
    """A test's name as it is in records: short enough for them, and still no other test's."""
    name = nodeid.encode("ascii", "backslashreplace").decode()
    if len(name) <= NAME_LENGTH:
        return name
    return f"{name[:NAME_LENGTH - 44]}... {hashlib.sha1(name.encode()).hexdigest()}"


def forget_stacks():
    """A child that a test ends by SIGTERM has nothing to say."""
    if _worker is not None:
        faulthandler.unregister(signal.SIGTERM)


os.register_at_fork(after_in_child=forget_stacks)


class Process:
    """A slot of the lock file and the record in it."""

    def __init__(self, lock_file, worker, run):
        self.lock_file = lock_file
        self.pid = os.getpid()
        self.record = {
            "pid": self.pid,
            "started": started(self.pid),
            "worker": worker,  # gw0 and so on; main without xdist; null for the director of workers
            "run": run,  # xdist's id of the run
            "gpu": None,  # the PCI bus id of the leased GPU
            "wants": None,  # while waiting: the bus ids of the GPUs any of which will do
            "asked": None,  # while waiting: since when, in nanoseconds of the machine's monotonic clock
            "test": None,  # what runs now
            "since": None,  # since when, in seconds of the epoch
            "beat": 0,  # another number whenever anything happens
        }
        self.slot = lock_file.take_slot(self.record)

    def write(self, **changes):
        self.record.update(changes, beat=self.record["beat"] + 1)
        try:
            self.lock_file.write(self.slot, self.record)
        except OSError:
            pass  # the file is lost; why_lost says so after the test

    def pytest_unconfigure(self):
        if os.getpid() == self.pid and self.lock_file.intact():
            self.lock_file.leave_slot(self.slot)


class Worker(Process):
    def __init__(self, lock_file, workerinput):
        global _worker
        self.replaceable = workerinput is not None
        identity = workerinput or {"workerid": "main", "testrunuid": None}
        self.once = identity.get(ONCE, False)
        super().__init__(lock_file, identity["workerid"], identity["testrunuid"])
        self.gpu = None
        self.ending = None
        self.stderr = os.fdopen(os.dup(2), "w", buffering=1)  # past pytest's capture, which has not begun yet
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            # Written by the signal's handler in C, so it needs no bytecode to run; then the process ends as before.
            faulthandler.register(signal.SIGTERM, file=self.stderr, all_threads=True, chain=True)
        _worker = self

    def pytest_unconfigure(self):
        # xdist keeps the process of a worker that is done until the run ends, while others may wait for its GPU.
        global _worker
        if os.getpid() != self.pid:
            return
        gpu, self.gpu, _worker = self.gpu, None, None
        if self.lock_file.intact():
            self.write(gpu=None)
            if gpu:
                self.lock_file.release_gpu(gpu.bus_id)
        super().pytest_unconfigure()
        faulthandler.unregister(signal.SIGTERM)
        self.stderr.close()

    # ---- the lease ----

    def lease(self):
        if self.gpu:
            return self.gpu
        if os.getpid() != self.pid:
            raise gpus.GpuError("a forked child of the worker asked for the GPU first, and a lease would die with it")
        wanted = gpus.choose(gpus.visible_gpus(), os.environ.get(PIN))
        self.write(wants=list({gpu.bus_id: None for gpu in wanted}), asked=time.monotonic_ns())
        try:
            self.gpu = self.wait(wanted)
        finally:
            # Also when something raises into the wait, such as a test's time limit: this worker holds up nobody then.
            self.write(gpu=self.gpu and self.gpu.bus_id, wants=None, asked=None, since=time.time())
        return self.gpu

    def wait(self, wanted):
        began = told = beaten = time.monotonic()
        waited = False
        while not (gpu := self.try_any(wanted)):
            now = time.monotonic()
            if not waited or now - told >= REMIND:
                self.tell(self.waiting_for(wanted, now - began))
                waited, told = True, now
            if now - beaten >= 1:
                self.write()  # waiting is no hang, unless the worker itself is stopped
                beaten = now
            time.sleep(POLL)
        if waited:
            self.tell(f"leases GPU {gpu.id} ({gpu.bus_id}) after {time.monotonic() - began:.1f} s")
        return gpu

    def try_any(self, wanted):
        """One of the GPUs, if it is free and nobody who wants it too has asked earlier."""
        asked = self.record["asked"]
        ahead = {
            bus_id
            for other in self.lock_file.living()
            if other["wants"] and (other["asked"], other["pid"]) < (asked, self.pid)
            for bus_id in other["wants"]
        }
        for gpu in wanted:
            if gpu.bus_id not in ahead and self.lock_file.try_gpu(gpu.bus_id):
                return gpu
        return None

    def waiting_for(self, wanted, seconds):
        others = self.lock_file.living()
        asked = self.record["asked"]
        before = sum(1 for other in others if other["wants"] and other["asked"] < asked)
        holders = {other["gpu"]: f"{other['worker']}, pid {other['pid']}" for other in others if other["gpu"]}
        leases = "; ".join(f"{gpu.bus_id} by {holders.get(gpu.bus_id, 'another')}" for gpu in wanted)
        return f"waits for a GPU since {seconds:.0f} s, with {before} before it; leased are {leases}"

    def tell(self, text):
        print(f"gpu lease: {self.record['worker']} (pid {self.pid}) {text}", file=self.stderr)

    # ---- the heartbeat ----

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self):
        self.write(test="(collection)", since=time.time())
        try:
            return (yield)
        finally:
            self.write(test=None, since=None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.write(test=name_of(item.nodeid), since=time.time())
        try:
            result = yield
            if self.ending:
                self.end(item.session)
        finally:
            self.write(test=None, since=None)
        return result

    # ---- the end of a worker whose GPU it can use no more ----

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if os.getpid() != self.pid:
            return report
        raised = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
        if self.ending:
            if report.when == "teardown" and report.failed and sticky.in_text(raised):
                # The same error again: the test has failed of it once, and that is enough.
                report.outcome, report.longrepr = "passed", None
        else:
            self.ending = self.why_lost() or self.why_dead(report, raised)
            if self.ending:
                text = f"{self.ending}; nothing more runs in this process"
                if report.passed:
                    report.outcome, report.longrepr = "failed", text
                else:
                    report.sections.append(("gpu lease", text))
        return report

    def why_lost(self):
        if self.lock_file.holds_slot(self.slot) and (not self.gpu or self.lock_file.holds_gpu(self.gpu.bus_id)):
            return None
        if not self.lock_file.intact():
            return f"the lease is lost: {self.lock_file.path} was removed or replaced, or its descriptor was closed"
        return (
            f"the lease is lost: this process opened {self.lock_file.path} a second time and closed it, "
            "and with that the kernel drops the process's locks on it"
        )

    def why_dead(self, report, raised):
        """What the GPU's context died of. HIP has no harmless question: there, a failure's own words must do."""
        error = sticky.in_context()
        if error is None and report.failed:
            error = sticky.in_text(raised)
        return f"the GPU's context is dead: {error}" if error else None

    def end(self, session):
        """xdist starts a new worker for one that ends, and takes the test that ran for the one that ended it."""
        if not self.replaceable:
            session.shouldfail = self.ending
            return
        self.tell(f"ends: {self.ending}")
        record = self.record
        endings.add(self.lock_file, record["run"], record["worker"], record["test"], self.ending, reported=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


class Director(Process):
    """Tells the watchdog that the run goes on, and completes the reports of workers that ended."""

    def __init__(self, lock_file, once):
        super().__init__(lock_file, None, None)
        self.once = once

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        if self.record["run"] is None:
            self.write(run=node.workerinput["testrunuid"])
            endings.remove(self.lock_file, self.record["run"])  # of an earlier run with the same --testrunuid
        node.workerinput[ONCE] = self.once

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem, report):
        worker, test = report.node.gateway.id, name_of(crashitem)
        known = [
            ending
            for ending in endings.read(self.lock_file, self.record["run"])
            if (ending["worker"], ending["test"]) == (worker, test)
        ]
        if any(ending["reported"] for ending in known):
            # The worker has reported this test's failure before it ended, and one is enough.
            report.when, report.outcome, report.longrepr = "teardown", "passed", None
            return
        report.longrepr = "\n".join([str(report.longrepr), *(ending["text"] for ending in known)])
        if not known:
            endings.add(self.lock_file, self.record["run"], worker, test, "crashed", reported=True)

    def pytest_unconfigure(self):
        if os.getpid() == self.pid and self.record["run"] is not None:
            endings.remove(self.lock_file, self.record["run"])
        super().pytest_unconfigure()
