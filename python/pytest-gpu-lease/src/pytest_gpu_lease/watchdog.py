"""Ends workers that hang, from outside, because nothing inside a process runs while it is stuck in a driver.

A worker hangs when the test in its record has not changed for the time limit, or when it has been stopped for as long.
It gets SIGTERM, on which it writes its stacks, and SIGKILL after the grace period; xdist then reports the test as
failed and starts another worker. Time is what this process saw pass, look by look, so a machine that was suspended
makes nobody hang. The watch ends with the run.
"""

import argparse
import os
import signal
import sys
import time

from pytest_gpu_lease import endings
from pytest_gpu_lease.lockfile import lives, open_lock_file


def say(text):
    print(f"gpu lease watchdog: {text}", file=sys.stderr, flush=True)


def stopped(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except OSError:
        return False


class Watched:
    """One worker: how long its beat has stood still, and what has been done about it."""

    def __init__(self):
        self.beat = None
        self.still = 0.0
        self.sent = None


class Watch:
    def __init__(self, lock_file, timeout, grace, run):
        self.lock_file = lock_file
        self.timeout = timeout
        self.grace = grace
        self.run = run
        self.watched = {}  # by (pid, start)
        self.seen = set()  # (run, worker)

    def look(self, passed):
        """Acts on every worker, `passed` seconds after the last look; whether any process of the run lives."""
        living = [record for record in self.lock_file.living() if self.run is None or record["run"] == self.run]
        # A worker that a test soon ended may have lived between two looks.
        for run in {record["run"] for record in living if record["run"]}:
            self.seen |= {(run, ending["worker"]) for ending in endings.read(self.lock_file, run)}
        now = {}
        for record in living:
            if record["worker"] is None:
                continue
            key = (record["pid"], record["started"])
            self.seen.add((record["run"], record["worker"]))
            now[key] = self.watched.get(key) or Watched()
            self.act(now[key], record, passed)
        for key, worker in self.watched.items():
            if key not in now and worker.sent:
                say(f"pid {key[0]} has ended")
        self.watched = now
        return bool(living)

    def act(self, worker, record, passed):
        busy = record["test"] is not None or stopped(record["pid"])
        if record["beat"] != worker.beat or not busy:
            if worker.sent:
                say(f"pid {record['pid']} goes on by itself after {worker.sent.name}")
            worker.beat, worker.still, worker.sent = record["beat"], 0.0, None
            return
        worker.still += passed
        name = f"{record['worker']} (pid {record['pid']}, GPU {record['gpu'] or 'none'})"
        if worker.sent is None and worker.still >= self.timeout:
            text = f"{name} hangs in {record['test'] or 'no test, stopped'}: nothing new for {worker.still:.0f} s"
            say(f"{text}; SIGTERM")
            if record["run"] and record["test"]:
                text = f"ended by the watchdog: {text}"
                endings.add(self.lock_file, record["run"], record["worker"], record["test"], text, reported=False)
            self.send(worker, record, signal.SIGTERM)
        elif worker.sent == signal.SIGTERM and worker.still >= self.grace:
            say(f"{name} has not ended {worker.still:.0f} s after SIGTERM; SIGKILL")
            self.send(worker, record, signal.SIGKILL)
        elif worker.sent == signal.SIGKILL and worker.still >= self.timeout:
            say(f"{name} has not ended {worker.still:.0f} s after SIGKILL: it is stuck in the kernel")
            worker.still = 0.0

    def send(self, worker, record, number):
        worker.sent, worker.still = number, 0.0
        try:
            process = os.pidfd_open(record["pid"])
        except ProcessLookupError:
            return
        try:
            # Asked again after the pid was held fast, so the signal cannot reach a later process of that number.
            if lives(record):
                signal.pidfd_send_signal(process, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            say(f"pid {record['pid']} is another user's; it gets no {number.name}")
        finally:
            os.close(process)


def seconds(text):
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"is {text}, and must be above 0")
    return value


def count(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"is {text}, and must be at least 1")
    return value


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m pytest_gpu_lease.watchdog", description=__doc__.split("\n\n")[0])
    parser.add_argument("--lockfile", required=True, help="the file GPU_LEASE_LOCKFILE names in the run")
    parser.add_argument("--workers", required=True, type=count, help="how many workers the run has: pytest -n WORKERS")
    parser.add_argument("--timeout", type=seconds, default=600, help="seconds a test may take (600)")
    parser.add_argument("--grace", type=seconds, default=30, help="seconds between SIGTERM and SIGKILL (30)")
    parser.add_argument("--poll", type=seconds, default=1, help="seconds between looks (1)")
    parser.add_argument("--run", help="watch this run alone: the ID of pytest --testrunuid ID")
    options = parser.parse_args(arguments)
    try:
        lock_file = open_lock_file(options.lockfile)
    except (OSError, ValueError) as error:
        parser.error(f"--lockfile: {error}")
    watch = Watch(lock_file, options.timeout, options.grace, options.run)
    began, idle, last = False, 0.0, time.monotonic()
    while True:
        # More often until all have been seen: a short run's workers live no longer than a look takes to come.
        time.sleep(options.poll if len(watch.seen) >= options.workers else min(options.poll, 0.1))
        now = time.monotonic()
        passed, last = min(now - last, 2 * options.poll), now
        if watch.look(passed):
            began = True
        elif began:
            break
        else:
            idle += passed
            if idle >= options.timeout:
                break
    if len(watch.seen) < options.workers:
        say(f"saw {len(watch.seen)} workers, and --workers is {options.workers}")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
