"""Processes that do to a lock file what they are told, one line at a time; run as a program, this is one of them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path


class Peer:
    """A process with a Worker on the lock file, w in the expressions it evaluates."""

    def __init__(self, lockfile, worker, run="run"):
        source = Path(__file__).resolve().parent.parent / "src"
        self.process = subprocess.Popen(
            [sys.executable, __file__, lockfile, worker, run],
            env={**os.environ, "PYTHONPATH": str(source)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        self.pid = self.process.pid
        assert json.loads(self.process.stdout.readline()) == "ready"

    def begin(self, expression):
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()

    def __call__(self, expression):
        self.begin(expression)
        return self.answer()

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def signal(self, number):
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()
        elif number == signal.SIGSTOP:
            os.waitpid(self.pid, os.WUNTRACED)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def fork(action):
    """Runs the action in a child that then stays, with all descriptors, until it is killed; returns its pid."""
    done, tell = os.pipe()
    child = os.fork()
    if child == 0:
        action()
        os.write(tell, b".")
        while True:
            signal.pause()
    os.read(done, 1)
    return child


def main():
    from pytest_gpu_lease.gpus import Gpu
    from pytest_gpu_lease.lockfile import open_lock_file
    from pytest_gpu_lease.plugin import Worker

    w = Worker(open_lock_file(sys.argv[1]), {"workerid": sys.argv[2], "testrunuid": sys.argv[3]})

    def take(*bus_ids):
        gpu = w.try_any([Gpu(number, bus_id) for number, bus_id in enumerate(bus_ids)])
        if gpu:
            w.gpu = gpu
            w.write(gpu=gpu.bus_id, wants=None, asked=None)
        return gpu and gpu.bus_id

    def want(asked, *bus_ids):
        w.write(wants=bus_ids, asked=asked)

    def refused(call, path):
        try:
            call()
        except Exception as error:
            Path(path).write_text(str(error))

    names = {"w": w, "take": take, "want": want, "refused": refused, "fork": fork, "Gpu": Gpu, "os": os,
             "open_lock_file": open_lock_file}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(eval(line, names)), flush=True)


if __name__ == "__main__":
    main()
