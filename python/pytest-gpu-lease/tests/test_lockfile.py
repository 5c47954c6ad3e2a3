"""Leases and records, between processes that are told what to do: nothing here depends on time."""

import errno
import fcntl
import os
import signal

import pytest

from pytest_gpu_lease.lockfile import PAGE, LockFile, gpu_byte, open_lock_file

A, B = "00000000:3b:00.0", "00000000:86:00.0"


@pytest.fixture
def peer(start_peer):
    """Each peer wants A, and is one later in the line than the one before."""
    count = 0

    def start(worker=None, run="run"):
        nonlocal count
        count += 1
        one = start_peer(worker, run)
        one("want(%d, '%s')" % (count, A))
        return one

    return start


def take(peer, *bus_ids):
    return peer(f"take(*{bus_ids})")


def test_one_gpu_has_one_holder_and_the_next_gets_it_when_it_is_given_back(peer):
    first, second = peer(), peer()
    assert take(first, A) == A
    assert take(second, A) is None
    assert take(second, A, B) == B
    assert first("w.lock_file.holds_gpu('%s')" % A)
    first("w.pytest_unconfigure()")
    third = peer()
    assert take(third, A) == A


@pytest.mark.parametrize("child_closes", [False, True])
def test_a_lease_ends_with_its_process_even_if_a_forked_child_has_the_descriptor(peer, child_closes):
    first, second = peer(), peer()
    assert take(first, A) == A
    child = first("fork(lambda: %s)" % ("os.close(w.lock_file.fd)" if child_closes else "0"))
    try:
        assert first("w.why_lost()") is None
        assert take(second, A) is None
        first.signal(signal.SIGKILL)
        os.kill(child, 0)
        assert take(second, A) == A
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_neither_gives_the_lease_back_nor_takes_one(peer, tmp_path):
    first, second = peer(), peer()
    refusal = tmp_path / "refusal"
    os.kill(first("fork(lambda: refused(w.lease, %r))" % str(refusal)), signal.SIGKILL)
    assert "a forked child of the worker asked for the GPU first" in refusal.read_text()
    assert take(first, A) == A
    os.kill(first("fork(w.pytest_unconfigure)"), signal.SIGKILL)
    assert first("w.why_lost()") is None
    assert first("w.lock_file.read(w.slot)['gpu']") == A
    assert take(second, A) is None


def test_a_stopped_process_keeps_its_lease(peer):
    first, second = peer(), peer()
    assert take(first, A) == A
    first.signal(signal.SIGSTOP)
    assert take(second, A) is None
    first.signal(signal.SIGKILL)
    assert take(second, A) == A


def test_a_closed_descriptor_loses_the_lease_but_gives_it_to_nobody(peer, lockfile):
    first, second = peer(), peer()
    assert take(first, A) == A
    assert first("w.why_lost()") is None
    first("os.close(os.open(w.lock_file.path, os.O_RDONLY))")
    assert "opened " + lockfile in first("w.why_lost()")
    # The kernel has dropped the locks; the record stands for both the GPU and the slot.
    assert second(f"w.lock_file._try_lock({gpu_byte(A)}, 1)")
    second("w.lock_file.release_gpu('%s')" % A)
    assert take(second, A) is None
    third = peer()
    assert third("w.slot") == 2
    first.signal(signal.SIGKILL)
    assert take(second, A) == A


def test_the_package_itself_opens_a_file_once_in_a_process(peer, tmp_path, lockfile):
    first = peer()
    (tmp_path / "link").symlink_to(lockfile)
    assert first("open_lock_file(%r) is w.lock_file" % str(tmp_path / "link"))
    assert first("open_lock_file(os.path.relpath(%r)) is w.lock_file" % lockfile)
    assert first("w.why_lost()") is None


LOSSES = {
    "removed": "os.remove(w.lock_file.path)",
    "replaced": "os.close(os.open(w.lock_file.path + '.other', os.O_CREAT)) or "
                "os.replace(w.lock_file.path + '.other', w.lock_file.path)",
    "closed": "os.close(w.lock_file.fd)",
    "reused": "os.dup2(os.open(w.lock_file.path + '.other', os.O_RDWR | os.O_CREAT), w.lock_file.fd)",
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_file_is_noticed_and_not_written_to(peer, tmp_path, loss):
    first = peer()
    assert take(first, A) == A
    first(LOSSES[loss])
    assert "removed or replaced, or its descriptor was closed" in first("w.why_lost()")
    first("w.write(test='next')")
    first("w.pytest_unconfigure()")
    assert loss != "reused" or (tmp_path / "lock.other").read_bytes() == b""


def test_who_asked_first_is_served_first_but_holds_up_nobody_else(peer):
    holder, late, early = peer(), peer(), peer()
    assert take(holder, A) == A
    late("want(8, '%s', '%s')" % (A, B))
    early("want(7, '%s')" % A)
    holder("w.pytest_unconfigure()")
    assert late("w.try_any([Gpu(0, '%s')])" % A) is None
    assert "with 1 before it" in late("w.waiting_for([], 0)")
    assert take(late, A, B) == B
    assert take(early, A) == A


def test_one_who_died_waiting_holds_up_nobody(peer):
    early, late = peer(), peer()
    assert take(late, A) is None
    early.signal(signal.SIGKILL)
    assert take(late, A) == A


def test_one_who_gives_up_waiting_holds_up_nobody(peer, tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_LEASE_PRETEND_GPUS", "1")
    first, reason = peer(), tmp_path / "reason"
    first("setattr(w, 'try_any', lambda wanted: 1 / 0)")
    first("refused(w.lease, %r)" % str(reason))
    assert reason.read_text() == "division by zero"
    assert first("[w.lock_file.read(w.slot)[key] for key in ('wants', 'asked', 'gpu')]") == [None, None, None]


def test_a_half_written_record_is_no_record(lockfile):
    lock_file = open_lock_file(lockfile)
    lock_file.write(0, {"pid": 1, "test": "x"})
    assert lock_file.read(0) == {"pid": 1, "test": "x"}
    os.pwrite(lock_file.fd, b"2", PAGE + 18)
    assert lock_file.read(0) is None
    with pytest.raises(ValueError, match="does not fit"):
        lock_file.write(0, {"test": "x" * PAGE})


def test_another_file_is_refused(tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text("something of value\n")
    with pytest.raises(ValueError, match="is not a lock file"):
        LockFile(other)
    assert other.read_text() == "something of value\n"


def test_what_is_no_file_is_refused(tmp_path):
    """/dev/null can be locked, and keeps no record."""
    os.mkfifo(tmp_path / "fifo")
    for path in ("/dev/null", tmp_path / "fifo"):
        with pytest.raises(ValueError, match=f"{path} is not a regular file"):
            open_lock_file(path)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    lock_file = LockFile(tmp_path / "lock")
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(OSError, match="No locks available; the file must be on a local file system: '.*/lock'"):
        lock_file.try_gpu(A)


def test_every_gpu_has_a_byte_of_its_own():
    ids = ["00000000:3b:00.0", "00000000:3b:00.1", "00000000:3b:01.0", "00000000:3c:00.0", "00000001:3b:00.0",
           "ffffffff:ff:1f.7"]
    assert len({gpu_byte(bus_id) for bus_id in ids}) == len(ids)
    assert max(gpu_byte(bus_id) for bus_id in ids) < 2**63 - 1
