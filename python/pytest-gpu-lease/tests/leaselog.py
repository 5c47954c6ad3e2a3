"""An append-only log of who uses which GPU, written by tests, and the proof that no two processes use one at once.

Lines are `begin GPU PROCESS`, `end GPU PROCESS`, `doomed PROCESS`, written before a process is killed, and
`overlap GPU PROCESS PROCESS`. A process is its pid and start, so a pid that comes again is another process.
"""

import contextlib
import os
import time

from pytest_gpu_lease.lockfile import started


def process(pid):
    return f"{pid}/{started(pid)}"


def write(path, *words):
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.write(log, (" ".join(words) + "\n").encode())
    os.close(log)


def doom(path=None, pid=None):
    """To be called before a process is killed, or stops for ever."""
    write(path or os.environ["LEASE_LOG"], "doomed", process(pid or os.getpid()))


def read(path):
    with open(path) as file:
        return [line.split() for line in file]


def open_uses(lines):
    """{GPU: processes that began and have not ended}."""
    uses = {}
    for word, *rest in lines:
        if word == "begin":
            uses.setdefault(rest[0], set()).add(rest[1])
        elif word == "end":
            uses[rest[0]].discard(rest[1])
    return uses


@contextlib.contextmanager
def using(gpu):
    """What a test does with its GPU happens within this. The name of the GPU is the same in every process."""
    path = os.environ["LEASE_LOG"]
    me = process(os.getpid())
    write(path, "begin", gpu, me)
    for other in open_uses(read(path))[gpu] - {me}:
        pid, start = other.split("/")
        for _ in range(1000):
            if str(started(int(pid))) != start:
                break
            time.sleep(0.01)
        else:
            write(path, "overlap", gpu, other, me)
    yield
    write(path, "end", gpu, me)


def overlaps(lines):
    """Every use of a GPU that began while another process's had not ended, except one that had been killed by then."""
    found, doomed, uses = [], set(), {}
    for line in lines:
        word, *rest = line
        if word == "overlap":
            found.append(line)
        elif word == "doomed":
            doomed.add(rest[0])
        elif word == "begin":
            found += [("begin", *rest, other) for other in uses.get(rest[0], set()) - doomed]
            uses.setdefault(rest[0], set()).add(rest[1])
        else:
            uses[rest[0]].remove(rest[1])
    return found
