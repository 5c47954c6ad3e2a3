#!/usr/bin/env python3
"""The first call of a fresh process, split, and the host time of a warm one, beside torch's.

    INGOT_LIBRARY=... INGOT_IMAGE_PATH=... python3 tests/device/start.py
"""
import ctypes
import os
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
#include <dlfcn.h>
#include <stdint.h>
#include <time.h>
#include <ingot.h>
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e9 + t.tv_nsec; }
#define EACH(call) for (int i = 0; i < n; i++) { const double t = now(); if (call) return 1; each[i] = (float)(now() - t); } return 0
int calls(const ingot_attn_fwd_params *p, ingot_stream s, const ingot_options *o, int n, float *each) { EACH(ingot_attn_fwd(p, s, o)); }
int clocks(int n, float *each) { EACH(0); }

typedef int launch(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
static void *driver(const char *name) { return dlsym(dlopen("libcuda.so.1", RTLD_NOW), name); }
int launches(void *kernel, void *stream, int n, float *each) {
    static char arguments[4096];
    void *parameters[] = {arguments};
    launch *const f = driver("cuLaunchKernel");
    EACH(f(kernel, 1, 1, 1, 32, 1, 1, 0, stream, parameters, 0));
}
int contexts(void *stream, int n, float *each) {
    int (*const of_stream)(void *, void **) = driver("cuStreamGetCtx"), (*const current)(void **) = driver("cuCtxGetCurrent");
    void *context;
    EACH(of_stream(stream, &context) || current(&context));
}
/* A tensor map like the library's for a [1,1,16,64] tensor. */
int maps(void *memory, int n, float *each) {
    int (*const encode)(void *, int, unsigned, void *, const uint64_t *, const uint64_t *, const unsigned *, const unsigned *, int, int, int, int) =
        driver("cuTensorMapEncodeTiled");
    static const uint64_t extent[4] = {64, 16, 1, 1}, stride[3] = {128, 2048, 2048};
    static const unsigned box[4] = {64, 16, 1, 1}, dense[4] = {1, 1, 1, 1};
    _Alignas(64) unsigned char map[128];
    EACH(encode(map, 1, 4, memory, extent, stride, box, dense, 0, 3, 3, 0));
}
/* Empty kernels of an image: by name, as the library takes them (`function` 0), or as functions of the current context. */
void *kernel_of(const void *image, const char *name, int function) {
    int (*const load)(void **, const void *, void *, void *, unsigned, void *, void *, unsigned) = driver("cuLibraryLoadData");
    int (*const get)(void **, void *, const char *) = driver("cuLibraryGetKernel"), (*const as)(void **, void *) = driver("cuKernelGetFunction");
    void *library, *kernel, *f;
    if (load(&library, image, 0, 0, 0, 0, 0, 0) || get(&kernel, library, name) || as(&f, kernel)) return 0;
    return function ? f : kernel;
}
"""
# the bytes of arguments that attention's kernels take: the portable ones', and with tensor maps
SIZES = (0, 904, 1472)
EMPTY = 'template <int n> struct bytes { char byte[n]; };' + "".join(
    f'extern "C" __global__ void empty_{n}({f"const __grid_constant__ bytes<{n}> a" if n else ""}) {{}}' for n in SIZES)


def empty_kernels(folder):
    """Their image, for the floor: what a launch costs that does nothing."""
    source = Path(folder) / "empty.cu"
    source.write_text(EMPTY)
    major, minor = torch.cuda.get_device_capability()
    subprocess.run(["nvcc", f"-arch=sm_{major}{minor}", "-cubin", source, "-o", source.with_suffix(".cubin")], check=True)
    return source.with_suffix(".cubin").read_bytes()


def out_of_the_page_cache(path):
    for pack in Path(path).glob("*.pack"):
        with open(pack, "rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main():
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    fwd, _ = device.attention(b=1, hq=1, hk=1, s=1, d=64)
    said = []
    log = ingot.LogCallback(lambda _, level, text: said.append(text.decode()))
    ingot.lib.ingot_set_log(3, log, None)
    for folder in os.environ.get("INGOT_IMAGE_PATH", "").split(":"):
        out_of_the_page_cache(folder)
    marks = [("start", time.perf_counter())]
    arch = ctypes.create_string_buffer(64)
    ingot.lib.ingot_device_describe(ingot.ingot_stream(1, 0, None), arch, 64, None, 0, None)
    marks.append(("driver and device", time.perf_counter()))
    call = device.Call("attn_fwd", fwd)
    marks.append(("find and open packs, choose", time.perf_counter()))
    call("_prepare")
    marks.append(("read, verify and load the image", time.perf_counter()))
    call()
    marks.append(("launch", time.perf_counter()))
    torch.cuda.synchronize()
    marks.append(("run", time.perf_counter()))
    for (_, a), (name, b) in zip(marks, marks[1:]):
        print(f"{name:34} {1e3 * (b - a):8.3f} ms")
    print(f"{'first call in all':34} {1e3 * (marks[-1][1] - marks[0][1]):8.3f} ms  ({arch.value.decode()}, packs not in the page cache)")
    print("of these, as the log says:", *(x for x in said if " ms" in x), sep="\n  ")
    chosen = next(x for x in reversed(said) if "_attn_fwd:" in x).split(": ", 1)[1]
    ingot.lib.ingot_set_log(0, ingot.LogCallback(), None)

    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "loop.c", Path(folder) / "loop.so"
        source.write_text(LOOP)
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", f"-I{device.ingot.ROOT}/include", source, "-o", library, ingot.PATH, "-ldl"], check=True)
        c = ctypes.CDLL(str(library))
        c.kernel_of.restype = ctypes.c_void_p
        image = empty_kernels(folder)
        kernels = {(n, function): ctypes.c_void_p(c.kernel_of(image, f"empty_{n}".encode(), function)) for n in SIZES for function in (0, 1)}
        memory = torch.zeros(4096, device="cuda")
        stream = torch.cuda.Stream()
        handle = ctypes.c_void_p(stream.cuda_stream)
        call_stream = ingot.ingot_stream(1, 0, stream.cuda_stream)

        # in short runs, so that the driver's queue is never full, and in turns, so that all see the same clock rates
        rows = {
            "ingot_attn_fwd, 1x1x1x64 bf16": lambda n, each: c.calls(ctypes.byref(call.params), call_stream, ctypes.byref(call.options), n, each),
            **{f"empty kernel, {n} bytes{', function' if function else ''}": lambda count, each, kernel=kernel: c.launches(kernel, handle, count, each)
               for (n, function), kernel in kernels.items()},
            "cuTensorMapEncodeTiled": lambda n, each: c.maps(ctypes.c_void_p(memory.data_ptr()), n, each),
            "cuStreamGetCtx and cuCtxGetCurrent": lambda n, each: c.contexts(handle, n, each),
            "the clock itself": lambda n, each: c.clocks(n, each),
        }
        times = {name: [] for name in rows}
        each = (ctypes.c_float * 500)()
        for _ in range(200):
            for name, run in rows.items():
                assert run(500, each) == 0, name
                times[name] += each[:]
                stream.synchronize()
        median = {name: statistics.median(x) / 1e3 for name, x in times.items()}
        print(f"host time, median of {len(times['the clock itself'])} (the clock's own in each):")
        for name, x in median.items():
            low, high = statistics.quantiles(times[name], n=10)[::8]
            print(f"  {name:36} {x:6.2f} us   ({low / 1e3:.2f} to {high / 1e3:.2f} for 8 of 10)")
        whole, floor = median["ingot_attn_fwd, 1x1x1x64 bf16"], median["empty kernel, 904 bytes"]
        print(f"warm call of {chosen}: {whole:.2f} us in all, {whole - floor:.2f} us more than an empty kernel of 904 bytes")
        start = []
        for _ in range(2000):
            t = time.perf_counter()
            F.scaled_dot_product_attention(fwd["q"], fwd["k"], fwd["v"])
            start.append(time.perf_counter() - t)
            torch.cuda.synchronize()
        print(f"torch:     {statistics.median(start) * 1e6:.2f} us, median of {len(start)}")


if __name__ == "__main__":
    main()
