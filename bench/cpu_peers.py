#!/usr/bin/env python3
"""Ingot beside PyTorch's attention on this CPU: problems of a suite file, both in the same process, interleaved.

    bench/cpu_peers.py [--suite bench/cpu.txt] [--only TEXT] [--threads 1,2] [--seconds 0.6] [--json FILE]

Needs torch, numpy and gcc, and libingot (INGOT_LIBRARY). A line for each problem and number of threads: the fastest time of each
over rounds that run one, then the other; GFLOP/s by the exact pair count and percent of the multiply-accumulate peak measured in
this process between the rounds (one query row: GB/s of K and V and percent of a read loop timed before and after); the ratio of
torch's time to Ingot's, above 1 where Ingot is faster. Before it is timed, Ingot's result is held to torch's.
"""
import argparse
import ctypes
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import suite
from commit import commit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/python"))
import ingot_ctypes as ingot  # noqa: E402
from torch_tensor import TYPES, tensor  # noqa: E402


def rates():
    """tools/peak.c as a library: the peak and the read loop are those of `ingot bench`."""
    folder = tempfile.mkdtemp()
    library = Path(folder) / "peak.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-D_GNU_SOURCE", f"-I{ROOT}/include", f"-I{ROOT}/tools",
                    ROOT / "tools/peak.c", "-o", library, "-lpthread", "-lm"], check=True)
    lib = ctypes.CDLL(str(library))
    lib.tool_peak.restype = lib.tool_read_rate.restype = ctypes.c_double
    lib.tool_peak.argtypes = [ctypes.c_int32, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    lib.tool_read_rate.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return lib


def call(op, tensors, p, threads):
    params = ingot.PARAMS[op](struct_size=ctypes.sizeof(ingot.PARAMS[op]), mask=int(p.mask == "causal"), align=ingot.TOP_LEFT)
    for name, x in tensors.items():
        setattr(params, name, tensor(x))
    options = ingot.ingot_options(struct_size=ctypes.sizeof(ingot.ingot_options), num_threads=threads)
    function, stream = getattr(ingot.lib, f"ingot_{op}"), ingot.ingot_stream()

    def run():
        if function(params, stream, options):
            raise RuntimeError(ingot.lib.ingot_last_error().decode())

    buffer = ctypes.create_string_buffer(1 << 16)
    if getattr(ingot.lib, f"ingot_{op}_explain")(params, stream, options, 1, buffer, len(buffer), None):
        raise RuntimeError(ingot.lib.ingot_last_error().decode())
    return run, json.loads(buffer.value)["winner"]["name"]


def best(mine, theirs, seconds, between):
    """The fastest of each over rounds of both; `between` runs after each round."""
    times = [math.inf, math.inf]
    mine(), theirs()
    end, rounds = time.perf_counter() + seconds, 0
    # three rounds at least; one of a call of seconds, which outlasts what disturbs a short one
    while time.perf_counter() < end or rounds < (1 if 5 < times[1] < math.inf else 3):
        for i, function in enumerate((mine, theirs)):
            repeats = max(1, min(200, int(2e-3 / times[i]))) if math.isfinite(times[i]) else 1
            start = time.perf_counter()
            for _ in range(repeats):
                function()
            times[i] = min(times[i], (time.perf_counter() - start) / repeats)
        between()
        rounds += 1
    return times


def measure(row, threads, seconds, lib):
    p = row.problem
    if p.mask == "causal" and p.sq != p.sk:
        raise ValueError(f"{row.text}: PyTorch's causal mask is that of the suite in squares only")
    dtype, code, size = TYPES[p.dtype], ingot.DTYPES[p.dtype][0], suite.BYTES[p.dtype]
    torch.set_num_threads(threads)
    torch.manual_seed(3)
    make = lambda h, s, d: torch.randn(p.batch, h, s, d).to(dtype)
    q, k, v, dout = make(p.hq, p.sq, p.d), make(p.hk, p.sk, p.d), make(p.hk, p.sk, p.dv), make(p.hq, p.sq, p.dv)
    # rotate over copies larger than any cache where memory is what counts
    decode = p.decodes()
    copies = max(1, min(8, int(6e8 // p.kv_bytes()))) if decode else 1
    kv = [(k, v)] + [(k.clone(), v.clone()) for _ in range(copies - 1)]
    out, lse = torch.empty_like(dout), torch.empty(dout.shape[:3])
    options = dict(is_causal=p.mask == "causal", enable_gqa=p.hq != p.hk)
    turn = [0, 0, 0]
    if p.op == "fwd":
        calls = [call("attn_fwd", dict(q=q, k=a, v=b, out=out, lse=lse), p, threads) for a, b in kv]
        name = calls[0][1]

        def mine():
            turn[0] += 1
            calls[turn[0] % copies][0]()

        def theirs():
            turn[1] += 1
            a, b = kv[turn[1] % copies]
            with torch.no_grad():
                return F.scaled_dot_product_attention(q, a, b, **options)
        mine()
        results, wants = [out], [theirs()]
    else:
        grads = [torch.empty_like(x) for x in (q, k, v)]
        call("attn_fwd", dict(q=q, k=k, v=v, out=out, lse=lse), p, threads)[0]()
        mine, name = call("attn_bwd", dict(q=q, k=k, v=v, out=out, lse=lse, dout=dout, dq=grads[0], dk=grads[1], dv=grads[2]), p, threads)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        result = F.scaled_dot_product_attention(*leaves, **options)

        def theirs():
            return torch.autograd.grad(result, leaves, dout, retain_graph=True)
        mine()
        results, wants = grads, theirs()
    error = max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(results, wants))
    if not error < (0.02 if size == 2 else 1e-4):
        raise RuntimeError(f"{row.text}: differs from torch by {error}")

    limit = [0.0]
    if decode:
        unit, work = "GB/s", p.kv_bytes()

        def between():  # of the copies in turn, as the calls read them: one K alone may stay in the third-level cache
            turn[2] += 1
            size_of = lambda x: x.numel() * size
            read = sum(size_of(x) / lib.tool_read_rate(x.data_ptr(), size_of(x), threads) for x in kv[turn[2] % copies])
            limit[0] = max(limit[0], p.kv_bytes() / read)
    else:
        unit, work = "GFLOP/s", p.flops()

        def between():
            limit[0] = max(limit[0], lib.tool_peak(code, threads, ctypes.byref(ctypes.c_char_p())))
    between()
    mine_s, theirs_s = best(mine, theirs, seconds, between)
    return dict(row=row.name, problem=row.text, threads=threads, runs=name, us=mine_s * 1e6, torch_us=theirs_s * 1e6,
                rate=work / mine_s / 1e9, unit=unit, limit=limit[0], percent=100 * work / mine_s / 1e9 / limit[0] if limit[0] else 0,
                ratio=theirs_s / mine_s, error=error)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default=str(ROOT / "bench/cpu.txt"))
    parser.add_argument("--only", default="")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--json")
    args = parser.parse_args()
    lib = rates()
    arch, model = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
    ingot.lib.ingot_device_describe(ingot.ingot_stream(), arch, 64, model, 64, None)
    print(f"# {arch.value.decode()} ({model.value.decode()}), torch {torch.__version__}", flush=True)
    lines, slower = [], []
    for row in suite.read(args.suite):
        if not re.search(args.only, f"{row.name} {row.text}"):
            continue
        for threads in map(int, args.threads.split(",")):
            x = measure(row, threads, args.seconds, lib)
            lines.append(x)
            if x["ratio"] < 1:
                slower.append(x)
            print(f"{x['row']:12} {x['problem']:40} {threads}t {x['us']:11.1f} us {x['rate']:7.1f} {x['unit']:7} {x['percent']:4.0f} %"
                  f"  torch {x['torch_us']:11.1f} us  {x['ratio']:6.2f}x  {x['runs']}", flush=True)
    ratios = [x["ratio"] for x in lines]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"# {len(lines)} lines, geometric mean {mean:.2f}x torch, least {min(ratios):.2f}x, torch faster on {len(slower)}")
    if args.json:
        Path(args.json).write_text(json.dumps(dict(arch=arch.value.decode(), model=model.value.decode(), commit=commit(),
                                                   torch=torch.__version__, rows=lines), indent=0) + "\n")


if __name__ == "__main__":
    main()
