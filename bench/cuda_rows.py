"""What bench/cuda_peers.py times on one GPU: a row of a suite on Ingot and on PyTorch's attention, in turns, each result checked.

A call is timed alone by events behind a kernel that only waits, so that the host's part of it is over when its first kernel
starts; a decoding row by replay of a graph of calls, each on the next of several caches, which together are far larger than L2. In
the same rounds run a product of two 8192 x 8192 matrices or, for rows that are bound by memory, a sum over a large array: the rates
that results are held against.

Results are held to the rule of docs/concepts.md on samples: forward on up to 64 rows of up to 8 heads, backward on one key head
and the query heads that share it, against fp64 on the inputs' own bits.
"""

import ctypes
import json
import math
import random
import statistics
import subprocess
import threading
import time
from pathlib import Path

import ingot_ctypes as ingot
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_tensor import TYPES, tensor

DEVICE = "cuda"  # a test of what is made and checked here, on a machine without a GPU, says cpu
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}  # fmt: skip
LARGEST = {"e4m3": 448, "e5m2": 57344}
ROTATED_BYTES = 2 << 30  # caches of a decoding row together
MATH_SCORES = 1 << 31  # beyond that many scores the unfused form is only a wait


class Clock:
    """Samples of the SM clock and the power by nvidia-smi, while the rows run."""

    def __init__(self):
        self.samples, self.driver = [], None
        try:
            query = ["nvidia-smi", f"--id={torch.cuda.current_device()}", "--format=csv,noheader,nounits"]
            done = subprocess.run([*query, "--query-gpu=driver_version"], capture_output=True, text=True, check=True)
            self.driver = done.stdout.strip()
            self.child = subprocess.Popen([*query, "--query-gpu=clocks.sm,power.draw", "--loop-ms=100"],
                                          stdout=subprocess.PIPE, text=True)  # fmt: skip
        except (OSError, subprocess.CalledProcessError):
            self.child = None
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.child.stdout:
            try:
                self.samples.append((time.monotonic(), *map(float, line.split(","))))
            except ValueError:
                pass

    def since(self, start):
        """Median MHz and W, or nothing known."""
        found = [x[1:] for x in list(self.samples) if x[0] >= start]
        return dict(zip(("sm_mhz", "watt"), map(statistics.median, zip(*found)))) if found else {}

    def close(self):
        if self.child:
            self.child.terminate()


def device():
    return dict(device=torch.cuda.get_device_name(), torch=torch.__version__, cudnn=torch.backends.cudnn.version())


# ---- inputs ----


def recorded():
    """{layer: {name: [heads, tokens, 32]}}: q, k and v of a real model on real text, from examples/minilm.safetensors."""
    from safetensors.torch import load_file  # which only this kind of data needs

    told, made = load_file(Path(__file__).resolve().parent.parent / "examples/minilm.safetensors"), {}
    for layer in ("layer0", "layer5"):
        lengths = told[f"{layer}.k_lengths"].tolist()
        made[layer] = {name: torch.cat([told[f"{layer}.{name}"][b, :, :n] for b, n in enumerate(lengths)], 1) for name in "qkv"}
    return made


def shape_data(kind, q, k, v):
    """Turns normal q, k and v into a kind of --data: channel 0 of q is 8, that of k makes the wanted scores."""
    if kind == "minilm":
        # heads of 32 side by side, of the first and the last layer in turn; their sentences over and over
        layers = list(recorded().values())
        for name, x in dict(q=q, k=k, v=v).items():
            parts, group = x.shape[3] // 32, 1 if name != "q" else q.shape[1] // k.shape[1]
            for h in range(x.shape[1]):
                layer = layers[h // group % 2][name].to(DEVICE)
                at = torch.arange(x.shape[2], device=DEVICE) % layer.shape[1]
                for i in range(parts):
                    x[:, h, :, 32 * i : 32 * (i + 1)] = layer[(h // group // 2 * parts + i) % 12, at]
        return
    keys, d = k.shape[2], k.shape[3]
    at = torch.arange(keys, device=DEVICE)
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


class Inputs:
    """Tensors of a problem: q, k, v and dout as Ingot takes them, and what describes lengths and pages."""

    def __init__(self, p, data="normal"):
        self.p = p
        torch.manual_seed(1)
        queries, keys = zip(*p.lengths())
        self.q_start, self.k_start = ([sum(x[:i]) for i in range(p.batch + 1)] for x in (queries, keys))
        ints = lambda x: torch.tensor(x, dtype=torch.int32, device=DEVICE)
        self.extra = {}
        side = ingot.varlen
        self.varlen = 0
        if p.packed:
            self.varlen = side((1, ingot.CUMULATIVE, ingot.REUSE), (1, ingot.CUMULATIVE, ingot.REUSE))
            self.extra = dict(q_lengths=ints(self.q_start), k_lengths=ints(self.k_start))
            self.q, self.dout = (self._rows(self.q_start[-1], p.hq, x) for x in (p.d, p.dv))
        else:
            self.q, self.dout = (torch.randn(p.batch, p.hq, p.sq, x, device=DEVICE) for x in (p.d, p.dv))
        if p.page:
            columns = -(-max(keys) // p.page)
            self.pages = p.batch * columns
            self.table = ints(random.Random(1).sample(range(self.pages), self.pages)).view(p.batch, columns)
            self.varlen = side(k=(0, ingot.INDIVIDUAL, ingot.IMPLIED))
            self.extra = dict(page_table=self.table, k_lengths=ints(list(keys)))
        self.scale = {}
        if p.descale:
            shape = (p.batch, p.hk) if p.descale == "heads" else (1,)
            wanted = "qkv" if p.dtype in LARGEST else "kv"
            self.scale = {x: 0.5 + torch.rand(shape, device=DEVICE) for x in wanted}
            self.extra |= {f"{x}_descale": y for x, y in self.scale.items()}
        self.k, self.v = self.keys()
        if data != "normal":
            shape_data(data, self.q, self.k, self.v)
        self.q, self.dout = self.q.to(TYPES[p.dtype]), self.dout.to(self.out_dtype())
        self.k, self.v = self.k.to(TYPES[p.kv]), self.v.to(TYPES[p.kv])

    def _rows(self, tokens, heads, d):
        """Stacked tokens as frameworks keep them, [T,H,D] in memory, in Ingot's view [1,H,T,D]."""
        return torch.randn(tokens, heads, d, device=DEVICE).transpose(0, 1)[None]

    def keys(self):
        """Fresh k and v."""
        p = self.p
        make = lambda d: (torch.randn(self.pages, p.page, p.hk, d, device=DEVICE) if p.page
                          else self._rows(self.k_start[-1], p.hk, d) if p.packed
                          else torch.randn(p.batch, p.hk, p.sk, d, device=DEVICE))
        return [make(d).to(TYPES[p.kv]) if p.kv in LARGEST else make(d) for d in (p.d, p.dv)]

    def out_dtype(self):
        return torch.bfloat16 if self.p.dtype in LARGEST else TYPES[self.p.dtype]

    def empty(self):
        """out and lse, all NaN."""
        p = self.p
        out = torch.empty_like(self.dout).fill_(torch.nan)
        shape = (p.hq, self.q_start[-1]) if p.packed else (p.batch, p.hq, p.sq)
        return out, torch.full(shape, torch.nan, device=DEVICE)

    def of(self, x, b, h):
        """[S,D] of one sequence and head of a tensor that is shaped as q is."""
        return x[0, h, self.q_start[b] : self.q_start[b + 1]] if self.p.packed else x[b, h]

    def keys_of(self, x, b, h):
        """The same of one that is shaped as k is."""
        p = self.p
        length = p.lengths()[b][1]
        if p.packed:
            return x[0, h, self.k_start[b] : self.k_start[b + 1]]
        if p.page:
            return x[self.table[b].long(), :, h].flatten(0, 1)[:length]
        return x[b, h, :length]

    def factor(self, name, b, h):
        x = self.scale.get(name)
        return 1.0 if x is None else float(x[b, h] if x.dim() == 2 else x[0])

    def kept(self, b, rows):
        """[rows, Sk]: which keys those query rows of a sequence see."""
        p = self.p
        queries, keys = p.lengths()[b]
        at, key = rows[:, None] + (keys - queries), torch.arange(keys, device=DEVICE)
        if p.mask == "none":
            return torch.ones(len(rows), keys, dtype=torch.bool, device=DEVICE)
        return (key <= at + p.right) & ((key >= at - p.left) | (p.mask == "causal"))


# ---- Ingot ----


class Call:
    """An Ingot call on the stream that is PyTorch's current one when it is made, with a workspace of its own."""

    def __init__(self, op, inputs, tensors, backend):
        p = inputs.p
        self.op = op
        self.kept = tensors, inputs
        masks = dict(none=ingot.MASK_NONE, causal=ingot.MASK_CAUSAL, window=ingot.MASK_WINDOW)
        self.params = ingot.PARAMS[op](struct_size=ctypes.sizeof(ingot.PARAMS[op]), varlen=inputs.varlen, mask=masks[p.mask],
                                       align=ingot.BOTTOM_RIGHT if p.mask != "none" else ingot.ALIGN_UNSET,
                                       window_left=p.left, window_right=p.right)  # fmt: skip
        if p.packed:
            self.params.batch, self.params.max_seqlen_q, self.params.max_seqlen_k = p.batch, p.sq, p.sk
        for name, x in (tensors | inputs.extra).items():
            setattr(self.params, name, tensor(x))
        self.stream = ingot.ingot_stream()
        if DEVICE == "cuda":
            stream = torch.cuda.current_stream()
            self.stream = ingot.ingot_stream(1, stream.device_index, stream.cuda_stream)
        self.options = ingot.ingot_options(struct_size=ctypes.sizeof(ingot.ingot_options),
                                           flags=ingot.DETERMINISTIC if p.deterministic else 0,
                                           backend=backend.encode() if backend else None)  # fmt: skip
        size = ctypes.c_uint64()
        self.check(getattr(ingot.lib, f"ingot_{op}_workspace")(self.params, self.stream, self.options, size))
        self.workspace = torch.empty(size.value + 256, dtype=torch.uint8, device=DEVICE)
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
                                                                  len(buffer), None))  # fmt: skip
        w = json.loads(buffer.value)["winner"]
        return f"{w['name']}:{w['variant']}"


# ---- peers ----


def sdpa(backend, p, q, k, v):
    with sdpa_kernel(BACKENDS[backend]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=p.mask == "causal", enable_gqa=p.hq != p.hk)


def flash(inputs, q, k, v):
    """FA2 as PyTorch carries it, for masks and packed sequences that its attention function has no argument for."""
    p = inputs.p
    lengths = (inputs.extra["q_lengths"], inputs.extra["k_lengths"]) if p.packed else (None, None)
    rows = lambda x: x[0].transpose(0, 1) if p.packed else x.transpose(1, 2)
    window = dict(window_size_left=p.left, window_size_right=p.right) if p.mask == "window" else {}
    out = torch.ops.aten._flash_attention_forward(rows(q), rows(k), rows(v), *lengths, p.sq, p.sk, 0.0, p.mask == "causal",
                                                  False, **window)[0]  # fmt: skip
    return out.transpose(0, 1)[None] if p.packed else out.transpose(1, 2)


def flex(p):
    """flex_attention, compiled for a mask that the others have no argument for."""
    made = []

    def run(q, k, v):
        if not made:
            import torch._functorch.config
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            torch._functorch.config.donated_buffer = False  # its backward runs many times
            keeps = lambda b, h, i, j: (j <= i + p.right) & (j >= i - p.left)
            made.extend((torch.compile(flex_attention, dynamic=False),
                         create_block_mask(keeps, None, None, p.sq, p.sk, device=DEVICE)))  # fmt: skip
        return made[0](q, k, v, block_mask=made[1], enable_gqa=p.hq != p.hk)

    return run


def peers(inputs):
    """{name: function of q, k, v}, those first that make the later ones needless."""
    p = inputs.p
    if p.page or p.descale or p.dtype in LARGEST or p.kv in LARGEST:
        return {}
    if p.packed or (p.mask != "none" and p.sq != p.sk):
        return {"flash": lambda q, k, v: flash(inputs, q, k, v)}
    if p.mask == "window":
        return {"flash": lambda q, k, v: flash(inputs, q, k, v), "flex": flex(p)}
    found = {name: (lambda q, k, v, name=name: sdpa(name, p, q, k, v)) for name in BACKENDS}
    if p.batch * p.hq * p.sq * p.sk > MATH_SCORES:
        del found["math"]
    return found


class Deterministic:
    """PyTorch's switch, for the calls inside."""

    def __init__(self, on):
        self.on = on
        torch.utils.deterministic.fill_uninitialized_memory = False

    def __enter__(self):
        torch.use_deterministic_algorithms(self.on)

    def __exit__(self, *_):
        torch.use_deterministic_algorithms(False)


# ---- checks ----


def ulp(dtype, x):
    bits = {torch.bfloat16: 7, torch.float16: 10}.get(dtype)
    return 1e-6 * max(1, x) if bits is None else 2.0 ** (math.floor(math.log2(max(x, 2**-14))) - bits)


class Judge:
    """The rule, over parts: at most twice the yardstick's largest error and norm, and one unit in the last place."""

    def __init__(self, dtype):
        self.dtype, self.parts, self.size = dtype, [], 0.0

    def add(self, reference, yardstick, size=None):
        """size: the largest sum of absolute terms, where the reference may cancel."""
        self.parts.append((reference, yardstick.double()))
        self.size = max(self.size, float(reference.abs().max() if size is None else size))

    def of(self, results):
        """(relative error, whether it passes) of results, one for each part."""
        flat = lambda x: torch.cat([y.double().flatten() for y in x])
        references, yardsticks = (flat(x) for x in zip(*self.parts))
        wrong, allowed, a = flat(results) - references, yardsticks - references, ulp(self.dtype, self.size)
        good = wrong.abs().max() <= 2 * allowed.abs().max() + a
        good &= wrong.norm() <= 2 * allowed.norm() + a * math.sqrt(len(wrong))
        return float(wrong.norm() / references.norm()), bool(good)


def softmax(scores, kept):
    """Probabilities, 0 in rows without keys."""
    return scores.masked_fill(~kept, -torch.inf).softmax(-1).nan_to_num(0)


def forward_reference(inputs):
    """A judge, and what takes its parts out of a result."""
    p = inputs.p
    judge, places = Judge(inputs.out_dtype()), []
    heads = sorted({(b * (p.batch - 1) // 7, b * (p.hq - 1) // 7) for b in range(8)})
    for b, h in heads:
        queries = p.lengths()[b][0]
        rows = torch.linspace(0, queries - 1, min(64, queries), device=DEVICE).long()
        q, k, v = (x * inputs.factor(name, b, kh) for name, kh, x in (
            ("q", h // (p.hq // p.hk), inputs.of(inputs.q, b, h)[rows].double()),
            ("k", h // (p.hq // p.hk), inputs.keys_of(inputs.k, b, h // (p.hq // p.hk)).double()),
            ("v", h // (p.hq // p.hk), inputs.keys_of(inputs.v, b, h // (p.hq // p.hk)).double())))  # fmt: skip
        kept, scale = inputs.kept(b, rows), p.d**-0.5
        reference = softmax(q @ k.T * scale, kept) @ v
        storage = inputs.out_dtype()
        stored = lambda x: x.to(storage).float()
        if p.dtype in LARGEST:
            q, k, v = stored(q), stored(k), stored(v)
        yardstick = stored(stored(softmax(q.float() @ k.float().T * scale, kept)) @ v.float())
        judge.add(reference, yardstick)
        places.append((b, h, rows))
    return judge, lambda out: [inputs.of(out, b, h)[rows] for b, h, rows in places]


def backward_reference(inputs):
    """Judges of dq, dk and dv, and what takes their parts out of the three."""
    p, dtype = inputs.p, inputs.out_dtype()
    b, kh, group = p.batch - 1, p.hk - 1, p.hq // p.hk
    k, v = inputs.keys_of(inputs.k, b, kh), inputs.keys_of(inputs.v, b, kh)
    heads = range(kh * group, (kh + 1) * group)
    zeros = lambda t: [torch.zeros(x.shape, dtype=t, device=DEVICE) for x in (k, v)]
    sums, sizes = {torch.float64: zeros(torch.float64), torch.float32: zeros(torch.float32)}, zeros(torch.float32)
    dq, scale, dq_size = {torch.float64: [], torch.float32: []}, p.d**-0.5, 0.0
    for h in heads:
        whole = {t: [] for t in dq}
        for rows in torch.arange(p.lengths()[b][0], device=DEVICE).split(2048):
            kept = inputs.kept(b, rows)
            q, dout = inputs.of(inputs.q, b, h)[rows], inputs.of(inputs.dout, b, h)[rows]
            for t in dq:
                # the yardstick rounds what it stores: P, O, dS
                stored = (lambda x: x) if t == torch.float64 else (lambda x: x.to(dtype).float())
                Q, K, V, dO = (x.to(t) for x in (q, k, v, dout))
                probabilities = softmax(Q @ K.T * scale, kept)
                P = stored(probabilities)
                delta = (stored(P @ V) * dO).sum(-1, keepdim=True)
                dS = stored(probabilities * (dO @ V.T - delta))
                whole[t].append(stored(dS @ K * scale))
                sums[t][0] += dS.T @ Q * scale
                sums[t][1] += P.T @ dO
            S = dS.abs()
            dq_size = max(dq_size, float((S @ K.abs()).max()) * scale)
            sizes[0] += S.T @ Q.abs() * scale
            sizes[1] += P.T @ dO.abs()
        for t in dq:
            dq[t].append(torch.cat(whole[t]))
    judges = [Judge(dtype) for _ in range(3)]
    for exact, near in zip(dq[torch.float64], dq[torch.float32]):
        judges[0].add(exact, near, dq_size)
    for i in range(2):
        judges[1 + i].add(sums[torch.float64][i], sums[torch.float32][i].to(dtype), sizes[i].max())
    return judges, lambda grads: [[inputs.of(grads[0], b, h) for h in heads], *([inputs.keys_of(x, b, kh)] for x in grads[1:])]


# ---- time ----


def timed(functions, repeats, seconds):
    """{name: [milliseconds]}: rounds of all, each in an order of its own, until there are enough or the time is over."""
    host, times = {}, {name: [] for name in functions}
    for name, function in functions.items():
        function()
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        host[name] = time.perf_counter() - start
        torch.cuda.synchronize()
    order, begin, turn = list(functions), time.monotonic(), random.Random(1)
    for done in range(repeats):
        if done >= 3 and time.monotonic() - begin > seconds:
            break
        turn.shuffle(order)
        for name in order:
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            torch.cuda._sleep(int((host[name] * 1.5 + 20e-6) * 2e9))
            start.record()
            functions[name]()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return times


def graph(calls):
    """A function that replays the calls, and how many they are."""
    again = max(1, 16 // len(calls))
    captured = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made = [make() for make in calls]
        made[0]()
        with torch.cuda.graph(captured, stream=stream):
            for _ in range(again):
                for call in made:
                    call()
    torch.cuda.synchronize()
    return (lambda made=made: captured.replay()), again * len(calls)  # the calls own what they use


class Limits:
    """What the device reaches on plain work of the row's kind, run in the same rounds."""

    def __init__(self):
        self.made = {}

    def of(self, p):
        """(name, function, its TFLOP/s or GB/s per millisecond)."""
        kind = "read" if p.decodes() else "gemm8" if p.dtype in LARGEST else "gemm"
        if kind not in self.made:
            n = 8192
            if kind == "read":
                x = torch.randn(1 << 29, device=DEVICE)
                self.made[kind] = (lambda: x.sum()), x.numel() * 4 / 1e6
            else:
                a, b = (torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
                function = lambda: a @ b
                if kind == "gemm8":
                    one = torch.ones((), device=DEVICE)
                    x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T
                    function = lambda: torch._scaled_mm(x, y, one, one, out_dtype=torch.bfloat16)
                self.made[kind] = function, 2 * n**3 / 1e9
        return kind, *self.made[kind]


# ---- rows ----


def sentence(error):
    text = str(error).strip()
    if "CUDA error" in text:
        raise error  # nothing that runs after it in this process can be trusted
    return text.splitlines()[0][:200] if text else type(error).__name__


def forward_calls(inputs, backends, lines):
    """{who: call or list of makers of calls}: what runs, its result checked; what refuses gets its line."""
    p = inputs.p
    judge, take = forward_reference(inputs)
    out, lse = inputs.empty()
    sets = [(inputs.k, inputs.v)]
    if p.decodes():
        copies = max(1, min(64, int(ROTATED_BYTES // p.kv_bytes())))
        sets += [[x.to(TYPES[p.kv]) for x in inputs.keys()] for _ in range(copies - 1)]
    found = {}
    for who, function in peers(inputs).items():
        if who in ("efficient", "math") and "cudnn" in found and "flash" in found:
            continue  # they are what runs where the others do not
        try:
            with torch.no_grad():
                result = function(inputs.q, inputs.k, inputs.v)
            lines[who].update(zip(("err", "ok"), judge.of(take(result))))
        except Exception as error:
            lines[who]["refused"] = sentence(error)
            continue
        del result

        def run(k=inputs.k, v=inputs.v, function=function):
            with torch.no_grad():
                return function(inputs.q, k, v)

        found[who] = [lambda k=k, v=v, run=run: lambda: run(k, v) for k, v in sets] if p.decodes() else run
    for backend in backends:
        who = f"ingot{':' + backend if backend else ''}"
        make = lambda k, v, backend=backend: Call("attn_fwd", inputs, dict(q=inputs.q, k=k, v=v, out=out, lse=lse), backend)
        try:
            call = make(inputs.k, inputs.v)
            out.fill_(torch.nan)
            call()
            lines[who].update(zip(("err", "ok"), judge.of(take(out))), runs=call.winner())
            lines[who]["ok"] &= bool(out.isfinite().all())
        except RuntimeError as error:
            lines[who]["refused"] = sentence(error)
            continue
        found[who] = [lambda k=k, v=v, make=make: make(k, v) for k, v in sets] if p.decodes() else call
    return found


def backward_calls(inputs, backends, lines):
    p = inputs.p
    judges, take = backward_reference(inputs)

    def check(line, grads, again):
        parts = [judge.of(x) for judge, x in zip(judges, take(grads))]
        line.update(err=max(x for x, _ in parts), ok=all(x for _, x in parts))
        line["ok"] &= all(bool(x.isfinite().all()) for x in grads)
        if p.deterministic:
            kept = [x.clone() for x in grads]
            line["repeats"] = all(torch.equal(x, y) for _ in range(3) for x, y in zip(kept, again()))

    found = {}
    wanted = [(who, function, p.deterministic) for who, function in peers(inputs).items()]
    wanted += [(f"{who}, any order", function, False) for who, function, on in wanted if on and who == "cudnn"]
    for who, function, on in wanted:
        if who in ("efficient", "math") and "cudnn" in found and "flash" in found:
            continue
        try:
            leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
            result = function(*leaves)

            def run(result=result, leaves=leaves, on=on):
                with Deterministic(on):
                    return torch.autograd.grad(result, leaves, inputs.dout, retain_graph=True)

            check(lines[who], run(), run)
        except Exception as error:
            lines[who]["refused"] = sentence(error)
            continue
        found[who] = run
    out, lse = inputs.empty()
    tensors = dict(q=inputs.q, k=inputs.k, v=inputs.v, out=out, lse=lse)
    for backend in backends:
        who = f"ingot{':' + backend if backend else ''}"
        try:
            Call("attn_fwd", inputs, tensors, "")()
            grads = [torch.empty_like(x).fill_(torch.nan) for x in (inputs.q, inputs.k, inputs.v)]
            more = dict(dout=inputs.dout, dq=grads[0], dk=grads[1], dv=grads[2])
            call = Call("attn_bwd", inputs, tensors | more, backend)
            call()
            check(lines[who], grads, lambda call=call, grads=grads: (call(), grads)[1])
            lines[who]["runs"] = call.winner()
        except RuntimeError as error:
            lines[who]["refused"] = sentence(error)
            continue
        found[who] = call
    return found


class Lines(dict):
    def __missing__(self, who):
        return self.setdefault(who, {})


def head(row, data):
    return dict(row=row.name, title=row.title, goals=row.goals, problem=row.text, data=data, op=row.problem.op)


def measure(row, backends, repeats, seconds, data, limits, clock):
    """The lines of a row: one for each who, with ms, spread, tflops or gbs, err, ok and the rest; or refused, with why."""
    p, lines, start = row.problem, Lines(), time.monotonic()
    inputs = Inputs(p, data)
    found = (forward_calls if p.op == "fwd" else backward_calls)(inputs, backends, lines)
    counts = dict.fromkeys(found, 1)
    for who, calls in list(found.items()):
        if isinstance(calls, list):
            try:
                found[who], counts[who] = graph(calls)
            except Exception as error:
                lines[who]["refused"] = sentence(error)
                del found[who]
    kind, function, work = limits.of(p)
    begin = time.monotonic()
    times = timed(found | {kind: function}, repeats, seconds) if found else {}
    about = clock.since(begin)
    limit = work / statistics.median(times[kind]) if times else None
    for who in found:
        samples = [x / counts[who] for x in times[who]]
        ms = statistics.median(samples)
        quartiles = statistics.quantiles(samples, n=4)
        rate = p.kv_bytes() / ms / 1e6 if p.decodes() else p.flops() / ms / 1e9
        lines[who].update(ms=ms, spread=(quartiles[2] - quartiles[0]) / ms, rounds=len(samples), tflops=p.flops() / ms / 1e9,
                          limit=limit, share=rate / limit, **about)  # fmt: skip
        if p.decodes():
            lines[who]["gbs"] = rate
    mine = lambda who: who.split(":")[0] == "ingot"
    # One that does not give what was asked for is no peer.
    rivals = {who: lines[who]["ms"] for who in found
              if not mine(who) and lines[who]["ok"] and lines[who].get("repeats", True) and "any order" not in who}  # fmt: skip
    best = min(rivals, key=rivals.get, default=None)
    for who, line in lines.items():
        if mine(who) and "ms" in line:
            line["ratio"] = rivals[best] / line["ms"] if best else None
            line["best"] = best
            line["flash_ratio"] = lines["flash"]["ms"] / line["ms"] if "flash" in found else None
    return [head(row, data) | dict(who=who) | line for who, line in lines.items()], time.monotonic() - start
