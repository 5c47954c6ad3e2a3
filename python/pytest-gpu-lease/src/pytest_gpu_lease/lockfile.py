"""The lock file: which workers live, what each does now, who leases which GPU, and who waits.

A page of the file is a slot, and belongs to the process that holds the fcntl lock on it: a worker, or the process that
directs a run. The page holds its owner's record. A GPU is the one byte far beyond the file's end whose offset is made
from its PCI bus id, so processes that number GPUs differently agree on it, and no table has to be kept. The kernel
drops a process's locks when it ends, however it ends, and forked children never hold them.

It also drops them when the process closes any descriptor of the file, not only the one that was locked. Three things
guard against that. This module opens a file once in a process and never closes it. `holds` asks the kernel whether the
lock is still there. And the record is a second witness: a GPU that the record of a living process names is not free,
lock or no lock, and neither is that record's slot.
"""

import fcntl
import json
import os
import stat
import struct
import time
import zlib

PAGE = 4096
SLOTS = 1024
GPUS = 1 << 60
TITLE = b"pytest-gpu-lease 1: the locks on this file are leases of GPUs; do not remove it while tests run\n"

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux
_opened = {}


def started(pid):
    """When a process started, in the kernel's ticks; None if it has ended, reaped by its parent or not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in b"ZX" else int(fields[19])


def lives(record):
    """Whether the process that wrote a record has not ended; its pid may be another process's by now."""
    return started(record["pid"]) == record["started"]


def open_lock_file(path):
    """The LockFile of a path, the same object whenever it is the same file. It is created if it is not there."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        pass
    else:
        known = _opened.get((status.st_dev, status.st_ino))
        if known and known.intact():
            return known
    lock_file = LockFile(path)
    _opened[lock_file.identity] = lock_file
    return lock_file


class LockFile:
    """Use open_lock_file: a second descriptor of a file, once closed, would end every lease of the process."""

    def __init__(self, path):
        self.path = os.path.abspath(path)
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            self.fd = os.open(self.path, flags)  # O_CREAT on another user's file in a sticky directory is refused
        except FileNotFoundError:
            self.fd = os.open(self.path, flags | os.O_CREAT, 0o666)
        status = os.fstat(self.fd)
        self.identity = (status.st_dev, status.st_ino)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{self.path} is not a regular file; name one, or none yet")
        if status.st_size == 0:
            os.pwrite(self.fd, TITLE.ljust(PAGE, b"\0"), 0)
        elif os.pread(self.fd, len(TITLE), 0) != TITLE:
            raise ValueError(f"{self.path} is not a lock file of pytest-gpu-lease 1; name another, or a new one")

    def intact(self):
        """Whether the descriptor and the path still lead to the file that was opened."""
        try:
            here, there = os.fstat(self.fd), os.stat(self.path)
        except OSError:
            return False
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino) == self.identity

    # ---- locks ----

    def _lock(self, kind, start, length):
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
        except (BlockingIOError, PermissionError):
            raise
        except OSError as error:
            text = f"{error.strerror}; the file must be on a local file system"
            raise OSError(error.errno, text, self.path) from None

    def _try_lock(self, start, length):
        try:
            self._lock(fcntl.F_WRLCK, start, length)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def holds(self, start, length):
        """Whether this process still holds its lock on exactly this range, and the path still leads to the file."""
        if not self.intact():
            return False
        # F_GETLK never reports the caller's own lock. To the question of an open file description, it is another's.
        query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        kind, _, *held = _FLOCK.unpack(fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, query))
        return kind != fcntl.F_UNLCK and held == [start, length, os.getpid()]

    # ---- slots ----

    def take_slot(self, record):
        """Takes the first free slot for this process, writes the record there, and returns the slot's number."""
        for slot in range(SLOTS):
            old = self.read(slot)
            if old and old["pid"] != os.getpid() and lives(old):
                continue
            if self._try_lock(PAGE * (slot + 1), PAGE):
                self.write(slot, record)
                return slot
        raise RuntimeError(f"all {SLOTS} slots of {self.path} are taken")

    def leave_slot(self, slot):
        os.pwrite(self.fd, bytes(PAGE), PAGE * (slot + 1))
        self._lock(fcntl.F_UNLCK, PAGE * (slot + 1), PAGE)

    def holds_slot(self, slot):
        return self.holds(PAGE * (slot + 1), PAGE)

    def write(self, slot, record):
        if os.fstat(self.fd).st_ino != self.identity[1]:
            raise OSError(f"the descriptor of {self.path} was closed and is another file's now")
        text = json.dumps(record).encode()
        data = b"%08x %s\n" % (zlib.crc32(text), text)
        if len(data) > PAGE:
            raise ValueError(f"a record of {len(data)} bytes does not fit into {PAGE}")
        os.pwrite(self.fd, data.ljust(PAGE, b"\0"), PAGE * (slot + 1))

    def read(self, slot):
        """The record of a slot, also one left by a process that has ended; None if there is none."""
        for _ in range(100):  # a reader may see half of a write
            data = os.pread(self.fd, PAGE, PAGE * (slot + 1)).rstrip(b"\0")
            if not data:
                return None
            checksum, _, text = data.rstrip(b"\n").partition(b" ")
            if checksum == b"%08x" % zlib.crc32(text):
                return json.loads(text)
            time.sleep(0.001)
        return None

    def living(self):
        """The record of every other process that lives, whether it has lost its locks or not."""
        slots = min(SLOTS, os.fstat(self.fd).st_size // PAGE - 1)
        records = [self.read(slot) for slot in range(slots)]
        return [record for record in records if record and record["pid"] != os.getpid() and lives(record)]

    # ---- GPUs ----

    def try_gpu(self, bus_id):
        """Leases a GPU to this process if it is free. The caller then writes a record that names it."""
        byte = gpu_byte(bus_id)
        if not self._try_lock(byte, 1):
            return False
        if any(record["gpu"] == bus_id for record in self.living()):
            self._lock(fcntl.F_UNLCK, byte, 1)
            return False
        return True

    def release_gpu(self, bus_id):
        self._lock(fcntl.F_UNLCK, gpu_byte(bus_id), 1)

    def holds_gpu(self, bus_id):
        return self.holds(gpu_byte(bus_id), 1)


def gpu_byte(bus_id):
    """The offset of the byte that stands for a GPU: its PCI domain (32 bits), bus, device and function."""
    domain, bus, rest = bus_id.split(":")
    device, function = rest.split(".")
    return GPUS + (int(domain, 16) << 16 | int(bus, 16) << 8 | int(device, 16) << 3 | int(function, 16))
