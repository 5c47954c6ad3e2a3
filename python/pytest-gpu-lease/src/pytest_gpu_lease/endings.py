"""Which test ended which worker of a run, and why: one line each, written before the worker ends.

They are in a file beside the lock file, of that run alone; the run's director removes it.
"""

import json
import os
import urllib.parse
from pathlib import Path


def _path(lock_file, run):
    return Path(f"{lock_file.path}.{urllib.parse.quote(run, safe='')}.ended")


def add(lock_file, run, worker, test, text, reported):
    """`reported`: whether the worker has reported the test's failure itself."""
    line = json.dumps({"worker": worker, "test": test, "text": text, "reported": reported})
    file = os.open(_path(lock_file, run), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.write(file, line.encode() + b"\n")
    finally:
        os.close(file)


def read(lock_file, run):
    try:
        text = _path(lock_file, run).read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines()]


def remove(lock_file, run):
    _path(lock_file, run).unlink(missing_ok=True)
