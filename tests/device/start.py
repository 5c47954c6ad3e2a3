#!/usr/bin/env python3
"""The first call of a fresh process, split, and the host time of a warm one, beside torch's.

    INGOT_LIBRARY=... INGOT_IMAGE_PATH=... python3 tests/device/start.py
"""
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))
import test_device as device  # noqa: E402

ingot = device.ingot
LOOP = r"""
#include <stdint.h>
#include <time.h>
#include <ingot.h>
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e9 + t.tv_nsec; }
int loop(const ingot_attn_fwd_params *p, ingot_stream s, const ingot_options *o, int n, float *each) {
    for (int i = 0; i < n; i++) {
        const double t = now();
        if (ingot_attn_fwd(p, s, o)) return 1;
        each[i] = (float)(now() - t);
    }
    return 0;
}
"""


def main():
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    fwd, _ = device.attention(b=1, hq=1, hk=1, s=1, d=64)
    marks = [("start", time.perf_counter())]
    arch = ctypes.create_string_buffer(64)
    ingot.lib.ingot_device_describe(ingot.ingot_stream(1, 0, None), arch, 64, None, 0, None)
    marks.append(("driver and device", time.perf_counter()))
    call = device.Call("attn_fwd", fwd)
    marks.append(("find packs, choose", time.perf_counter()))
    call("_prepare")
    marks.append(("read, verify and load the image", time.perf_counter()))
    call()
    torch.cuda.synchronize()
    marks.append(("launch and run", time.perf_counter()))
    for (_, a), (name, b) in zip(marks, marks[1:]):
        print(f"{name:34} {1e3 * (b - a):8.3f} ms")
    print(f"{'first call in all':34} {1e3 * (marks[-1][1] - marks[0][1]):8.3f} ms  ({arch.value.decode()})")

    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "loop.c", Path(folder) / "loop.so"
        source.write_text(LOOP)
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", f"-I{device.ingot.ROOT}/include", source, "-o", library, ingot.PATH], check=True)
        loop = ctypes.CDLL(str(library)).loop
        n = 100000
        each = (ctypes.c_float * n)()
        stream = torch.cuda.Stream()
        handle = ingot.ingot_stream(1, 0, stream.cuda_stream)
        # in short runs, so that the driver's queue is never full
        times = []
        for _ in range(n // 500):
            assert loop(ctypes.byref(call.params), handle, ctypes.byref(call.options), 500, each) == 0
            times += each[:500]
            stream.synchronize()
        print(f"warm call: median {statistics.median(times) / 1e3:.2f} us of {len(times)}, 1x1x1x64 bf16")
        start = []
        for _ in range(2000):
            t = time.perf_counter()
            F.scaled_dot_product_attention(fwd["q"], fwd["k"], fwd["v"])
            start.append(time.perf_counter() - t)
            torch.cuda.synchronize()
        print(f"torch:     median {statistics.median(start) * 1e6:.2f} us of {len(start)}")


if __name__ == "__main__":
    main()
