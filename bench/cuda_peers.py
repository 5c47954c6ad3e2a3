#!/usr/bin/env python3
"""Ingot beside PyTorch's attention on one NVIDIA GPU: the rows of bench/suite.txt, every peer in the same process, interleaved.

    bench/cuda_peers.py [--suite FILE] [--rows T1,T5] [--op fwd,bwd] [--backend NAME ...] [--repeats N] [--data KIND,KIND] [--json FILE]

Needs torch with CUDA, and libingot with its packs (INGOT_LIBRARY, INGOT_IMAGE_PATH). A line for each row and operator: the
median time of each, its TFLOP/s by the exact pair count, the ratio of the best peer's time to Ingot's, the spread (third minus
first quartile over median), and the error against fp32 arithmetic on the same inputs (`err`, beside the peer's own). Inputs are
normal unless --data names kinds that are hard on a softmax: grow30 and grow300 (scores rise by so many nats along the keys),
fall300, saw150 (a sawtooth of 896 keys), outliers (two loud channels, a loud first key), late (one key near the end outweighs all),
cold (all scores near -200), loud (q and k times 30).
"""
import argparse
import ctypes
import json
import re
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/python"))
import ingot_ctypes as ingot  # noqa: E402
from commit import commit  # noqa: E402

PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
         "efficient": SDPBackend.EFFICIENT_ATTENTION}
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def parse(line):
    name, text = line.split()
    row = dict(name=name, text=text, causal=False, dtype="bf16", dv=0)
    for word in text.split(","):
        if word in DTYPES:
            row["dtype"] = word
        elif word == "causal":
            row["causal"] = True
        else:
            key, value = re.fullmatch(r"([a-z]+)(\d+)", word).groups()
            for k in {"h": ("hq", "hk"), "s": ("sq", "sk")}.get(key, (key,)):
                row[k] = int(value)
    row["dv"] = row["dv"] or row["d"]
    return row


def tensor(x):
    t = ingot.ingot_tensor(data=x.data_ptr(), dtype={torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}[x.dtype],
                           ndim=x.dim())
    for i in range(x.dim()):
        t.shape[i], t.stride[i] = x.shape[i], x.stride(i)
    return t


class Call:
    """An Ingot call on torch's current stream with a workspace of its own."""

    def __init__(self, op, tensors, row, backend):
        self.op = op
        self.params = ingot.PARAMS[op](struct_size=ctypes.sizeof(ingot.PARAMS[op]), mask=int(row["causal"]),
                                       align=ingot.TOP_LEFT)
        for name, x in tensors.items():
            setattr(self.params, name, tensor(x))
        stream = torch.cuda.current_stream()
        self.stream = ingot.ingot_stream(1, stream.device_index, stream.cuda_stream)
        self.options = ingot.ingot_options(struct_size=ctypes.sizeof(ingot.ingot_options),
                                           backend=backend.encode() if backend else None)
        size = ctypes.c_uint64()
        self.check(getattr(ingot.lib, f"ingot_{op}_workspace")(self.params, self.stream, self.options, size))
        self.workspace = torch.empty(size.value + 256, dtype=torch.uint8, device="cuda")
        self.options.workspace = (self.workspace.data_ptr() + 255) // 256 * 256
        self.options.workspace_size = size.value
        self.function = getattr(ingot.lib, f"ingot_{op}")

    @staticmethod
    def check(status):
        if status:
            raise RuntimeError(ingot.lib.ingot_last_error().decode())

    def __call__(self):
        self.check(self.function(self.params, self.stream, self.options))

    def winner(self):
        buffer = ctypes.create_string_buffer(1 << 16)
        self.check(getattr(ingot.lib, f"ingot_{self.op}_explain")(self.params, self.stream, self.options, 1, buffer,
                                                                  len(buffer), None))
        w = json.loads(buffer.value)["winner"]
        return f"{w['name']}:{w['variant']}"


def interleaved(candidates, repeats):
    """{name: [milliseconds]} of `repeats` rounds, each round running every candidate once, in turn."""
    times = {name: [] for name in candidates}
    for name in candidates:
        for _ in range(2):
            candidates[name]()
    torch.cuda.synchronize()
    for _ in range(repeats):
        for name, function in candidates.items():
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            function()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return times


def shape_data(kind, q, k):
    """Turns normal q and k into a kind of --data: channel 0 of q is 8, that of k makes the wanted scores."""
    keys, d = k.shape[2], k.shape[3]
    at = torch.arange(keys, device="cuda")
    nats = {"grow30": 30 * at / keys, "grow300": 300 * at / keys, "fall300": 300 - 300 * at / keys,
            "saw150": 150 * (at % 896) / 896, "late": 60.0 * (at == keys - 3), "cold": -200.0 + 0 * at}.get(kind)
    if nats is not None:
        q[..., 0] = 8
        k[..., 0] = nats * d**0.5 / 8
    elif kind == "outliers":
        q[..., 1:3] += 8
        k[..., 1:3] += 8
        k[:, :, 0] *= 4
    elif kind == "loud":
        q *= 30
        k *= 30
    elif kind != "normal":
        raise SystemExit(f"--data has no kind {kind}")


def relative(x, reference):
    return float((x.float() - reference).norm() / reference.norm())


def run_row(row, ops, backends, repeats, data):
    dtype = DTYPES[row["dtype"]]
    shape = lambda h, s, d: (row["b"], row[h], row[s], row[d])
    torch.manual_seed(1)
    q, k, v, dout = (torch.randn(shape(*x), device="cuda", dtype=dtype)
                     for x in (("hq", "sq", "d"), ("hk", "sk", "d"), ("hk", "sk", "dv"), ("hq", "sq", "dv")))
    shape_data(data, q, k)
    options = dict(is_causal=row["causal"], enable_gqa=row["hq"] != row["hk"])
    pairs = row["sq"] * row["sk"] if not row["causal"] else sum(min(row["sk"], i + 1) for i in range(row["sq"]))
    work = {"fwd": 2 * pairs * (row["d"] + row["dv"]), "bwd": 2 * pairs * (3 * row["d"] + 2 * row["dv"])}

    # fp32 on a few rows of one head: enough to see a wrong kernel beside a right one
    group = row["hq"] // row["hk"]
    h, rows = row["hq"] - 1, torch.arange(0, row["sq"], max(1, row["sq"] // 64), device="cuda")
    scores = q[0, h, rows].float() @ k[0, h // group].float().T / row["d"] ** 0.5
    if row["causal"]:
        scores.masked_fill_(torch.arange(row["sk"], device="cuda") > rows[:, None], -torch.inf)
    reference = scores.softmax(-1) @ v[0, h // group].float()

    out, lse = torch.empty_like(dout), torch.empty(dout.shape[:3], device="cuda")
    lines = []
    for op in ops:
        candidates, errors, notes = {}, {}, {}
        for name, backend in PEERS.items():
            if op == "fwd" and name == "efficient":
                continue
            try:
                with sdpa_kernel(backend):
                    if op == "fwd":
                        def peer(backend=backend):
                            with torch.no_grad(), sdpa_kernel(backend):
                                return F.scaled_dot_product_attention(q, k, v, **options)
                        errors[name] = relative(peer()[0, h, rows], reference)
                    else:
                        if name == "efficient":
                            continue
                        grads = [x.detach().requires_grad_() for x in (q, k, v)]
                        result = F.scaled_dot_product_attention(*grads, **options)

                        def peer(result=result, grads=grads):
                            return torch.autograd.grad(result, grads, dout, retain_graph=True)
                        errors[name] = 0.0
                        notes[name] = peer()
                candidates[name] = peer
            except RuntimeError as error:
                print(f"# {row['name']} {op} {name}: {str(error).splitlines()[0][:100]}", flush=True)
        forward = Call("attn_fwd", dict(q=q, k=k, v=v, out=out, lse=lse), row, "")
        forward()
        for backend in backends:
            label = f"ingot{':' + backend if backend else ''}"
            try:
                if op == "fwd":
                    call = Call("attn_fwd", dict(q=q, k=k, v=v, out=out, lse=lse), row, backend)
                    out.fill_(torch.nan)
                    call()
                    errors[label] = relative(out[0, h, rows], reference)
                else:
                    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
                    call = Call("attn_bwd", dict(q=q, k=k, v=v, out=out, lse=lse, dout=dout, dq=grads[0], dk=grads[1],
                                                 dv=grads[2]), row, backend)
                    call()
                    against = notes.get("cudnn") or notes.get("flash")
                    errors[label] = max((relative(x, y.float()) for x, y in zip(grads, against)), default=0.0) \
                        if against else float("nan")
                candidates[label] = call
                label_of = call.winner()
            except RuntimeError as error:
                print(f"# {row['name']} {op} {label}: {error}", flush=True)
                continue
            notes[label] = label_of
        times = interleaved(candidates, repeats)
        medians = {name: statistics.median(x) for name, x in times.items()}
        best = min((medians[x] for x in PEERS if x in medians), default=None)
        for name, ms in medians.items():
            quartiles = statistics.quantiles(times[name], n=4)
            line = dict(row=row["name"], problem=row["text"], data=data, op=op, who=name, ms=ms,
                        tflops=row["b"] * row["hq"] * work[op] / ms / 1e9, spread=(quartiles[2] - quartiles[0]) / ms,
                        err=errors.get(name), ratio=best / ms if best and name not in PEERS else None,
                        flash_ratio=medians["flash"] / ms if "flash" in medians and name not in PEERS else None,
                        runs=notes[name] if name not in PEERS else None)
            lines.append(line)
            extra = "" if name in PEERS else f"  best peer/ingot {line['ratio'] or 0:5.2f}  FA2/ingot " \
                f"{line['flash_ratio'] or 0:5.2f}  {line['runs']}"
            print(f"{row['name']:4} {data + ' ' if data != 'normal' else ''}{op} {name:28} {ms:9.3f} ms {line['tflops']:7.1f} TFLOP/s  +-{line['spread']:4.0%}"
                  f"  err {errors.get(name, 0):.1e}{extra}", flush=True)
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default=str(ROOT / "bench/suite.txt"))
    parser.add_argument("--rows", default="")
    parser.add_argument("--op", default="fwd,bwd")
    parser.add_argument("--backend", action="append", default=[])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--data", default="normal")
    parser.add_argument("--json")
    args = parser.parse_args()
    wanted = [x for x in args.rows.split(",") if x]
    rows = [parse(x) for x in open(args.suite) if x.strip() and not x.startswith("#")]
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    lines = []
    for row in rows:
        if not wanted or row["name"] in wanted:
            for data in args.data.split(","):
                lines += run_row(row, args.op.split(","), args.backend or [""], args.repeats, data)
                torch.cuda.empty_cache()
    if args.json:
        Path(args.json).write_text(json.dumps(dict(device=torch.cuda.get_device_name(), commit=commit(),
                                                   torch=torch.__version__, cudnn=torch.backends.cudnn.version(),
                                                   rows=lines), indent=1) + "\n")


if __name__ == "__main__":
    main()
