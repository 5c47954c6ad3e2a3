"""What only a real NVIDIA GPU can show: streams, graphs, contexts, large offsets, and a real layer beside cuDNN.

    INGOT_LIBRARY=... INGOT_IMAGE_PATH=... python3 -m pytest -q tests/device/test_device.py

Needs torch with CUDA, which gives memory, streams, graphs and the peer.
"""
import ctypes
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import ingot_ctypes as ingot  # noqa: E402
from torch_tensor import tensor  # noqa: E402

if not torch.cuda.is_available():
    pytest.skip("no NVIDIA GPU", allow_module_level=True)

BF16 = torch.bfloat16
HOPPER = torch.cuda.get_device_capability() == (9, 0)


class Call:
    def __init__(self, op, tensors, backend=None, workspace=True, flags=0, **fields):
        params = ingot.PARAMS[op]
        self.op, self.keep = op, tensors
        self.params = params(struct_size=ctypes.sizeof(params), **fields)
        for name, x in tensors.items():
            if isinstance(x, (list, tuple)):
                for i, y in enumerate(x):
                    getattr(self.params, name)[i] = tensor(y)
            else:
                setattr(self.params, name, tensor(x))
        self.options = ingot.ingot_options(struct_size=ctypes.sizeof(ingot.ingot_options), flags=flags,
                                           backend=backend.encode() if backend else None)
        if workspace:
            size = ctypes.c_uint64()
            self.check(getattr(ingot.lib, f"ingot_{op}_workspace")(self.params, self.stream(), self.options, size))
            self.memory = torch.full((size.value + 512,), 0xff, dtype=torch.uint8, device="cuda")
            self.options.workspace = (self.memory.data_ptr() + 255) // 256 * 256
            self.options.workspace_size = size.value

    @staticmethod
    def stream():
        s = torch.cuda.current_stream()
        return ingot.ingot_stream(1, s.device_index, s.cuda_stream)

    @staticmethod
    def check(status):
        if status:
            raise ingot.Refused(status, ingot.lib.ingot_last_error().decode())

    def __call__(self, verb=""):
        self.check(getattr(ingot.lib, f"ingot_{self.op}{verb}")(self.params, self.stream(), self.options))


def randn(*shape, dtype=BF16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def attention(b=2, hq=4, hk=2, s=512, d=64, dtype=BF16):
    q, k, v, dout = randn(b, hq, s, d, dtype=dtype), randn(b, hk, s, d, dtype=dtype), randn(b, hk, s, d, dtype=dtype), \
        randn(b, hq, s, d, dtype=dtype)
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan, device="cuda")
    return dict(q=q, k=k, v=v, out=out, lse=lse), dout


CAUSAL = dict(mask=ingot.MASK_CAUSAL, align=ingot.TOP_LEFT)


def operators():
    """One call of every operator, and the outputs to compare."""
    fwd, dout = attention()
    Call("attn_fwd", fwd, **CAUSAL)()
    grads = {name: torch.full_like(x, torch.nan) for name, x in (("dq", fwd["q"]), ("dk", fwd["k"]), ("dv", fwd["v"]))}
    yield "attn_fwd", Call("attn_fwd", fwd, **CAUSAL), fwd["q"], [fwd["out"], fwd["lse"]]
    yield "attn_bwd", Call("attn_bwd", {**fwd, "dout": dout, **grads}, flags=ingot.DETERMINISTIC, **CAUSAL), dout, list(grads.values())
    parts = [torch.randn(2, 4, 256, 64, device="cuda") for _ in range(3)]
    lses = [torch.randn(2, 4, 256, device="cuda") for _ in range(3)]
    merged = dict(out_parts=parts, lse_parts=lses, out=torch.zeros_like(parts[0]), lse=torch.zeros_like(lses[0]))
    yield "attn_merge", Call("attn_merge", merged), parts[0], [merged["out"], merged["lse"]]
    new, cache = randn(2, 2, 64, 64), torch.zeros(2, 2, 512, 64, device="cuda", dtype=BF16)
    lengths = torch.tensor([5, 100], dtype=torch.int32, device="cuda")
    yield "kv_append", Call("kv_append", dict(k_new=new, k=cache, k_lengths=lengths),
                            varlen=ingot.varlen(k=(0, ingot.INDIVIDUAL, 0))), new, [cache]
    seed = torch.tensor([7], dtype=torch.int64, device="cuda")
    mask = torch.zeros(2, 4, 256, 256, dtype=torch.bool, device="cuda")
    yield "attn_dropout_mask", Call("attn_dropout_mask", dict(mask=mask, dropout_seed_ptr=seed), dropout_p=0.5), seed, [mask]


@pytest.mark.parametrize("name", ingot.OPERATORS)
def test_ballast(name):
    """Inputs that arrive late on the stream: a launch anywhere else would read what was there before."""
    call, late, outputs = next((c, x, o) for n, c, x, o in operators() if n == name)
    right = late.clone()
    call()
    torch.cuda.synchronize()
    want = [x.clone() for x in outputs]
    heavy = randn(8192, 8192)
    for x in outputs:
        x.zero_()
    late.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(8):
            heavy = (heavy @ heavy).clamp_(-1, 1)
        late.copy_(right)
        call()
    stream.synchronize()
    for x, y in zip(outputs, want):
        assert torch.equal(x, y)


@pytest.mark.skipif(not HOPPER, reason="attn_fwd_sm90 is built for sm_90a alone")
@pytest.mark.parametrize("hq, hk", [(4, 4), (8, 2)])
@pytest.mark.parametrize("d, dv", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_a_deterministic_backward_gives_the_same_bits(d, dv, hq, hk):
    """More blocks than multiprocessors, beside other work: in whatever order blocks run, sums keep theirs."""
    q, k, v, dout = (randn(3, h, 1500, n) for h, n in ((hq, d), (hk, d), (hk, dv), (hq, dv)))
    fwd = dict(q=q, k=k, v=v, out=torch.empty_like(dout), lse=torch.empty(q.shape[:3], device="cuda"))
    Call("attn_fwd", fwd, **CAUSAL)()
    grads = [torch.empty_like(x) for x in (q, k, v)]
    call = Call("attn_bwd", {**fwd, "dout": dout, **dict(zip(("dq", "dk", "dv"), grads))},
                backend="cuda/attn_bwd_sm90_split", flags=ingot.DETERMINISTIC, **CAUSAL)
    call()
    torch.cuda.synchronize()
    first, heavy, other = [x.clone() for x in grads], randn(2048, 2048), torch.cuda.Stream()
    assert all(x.isfinite().all() and x.any() for x in first)
    for _ in range(20):
        with torch.cuda.stream(other):
            heavy @ heavy
        for x in grads:
            x.fill_(torch.nan)
        call()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(grads, first))


def reference(q, k, v, causal):
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    s = q.double() @ k.transpose(2, 3) / q.shape[3] ** 0.5
    if causal:
        s.masked_fill_(~torch.ones(s.shape[2:], dtype=torch.bool, device="cuda").tril(), -torch.inf)
    return s.softmax(-1) @ v


@pytest.mark.parametrize("backend, rows, page", [(None, 1, 16), ("cuda/attn_fwd_sm80", 1, 16), ("cuda/attn_fwd_sm80_decode", 1, 16),
                                                 (None, 200, 16), ("cuda/attn_fwd_sm80", 200, 16),
                                                 ("cuda/attn_fwd_sm90", 200, 16), ("cuda/attn_fwd_sm90", 200, 128),
                                                 ("cuda/attn_fwd_sm90", 200, 48)])  # fmt: skip
def test_graph_replays_with_other_lengths_and_pages(backend, rows, page):
    """What lies behind a sequence's pages in its list is no page, and pages of nobody are NaN."""
    if backend == "cuda/attn_fwd_sm90" and not HOPPER:
        pytest.skip("attn_fwd_sm90 is built for sm_90a alone")
    b, hq, hk, d, most = 4, 32, 8, 128, 1024 // page
    pages = 2 * b * most
    q, k, v = randn(b, hq, rows, d), randn(pages, page, hk, d), randn(pages, page, hk, d)
    kept = k.clone(), v.clone()
    out = torch.zeros_like(q)
    lengths = torch.full((b,), page * most, dtype=torch.int32, device="cuda")
    table = torch.randperm(pages, device="cuda")[: b * most].to(torch.int32).view(b, most)
    call = Call("attn_fwd", dict(q=q, k=k, v=v, out=out, k_lengths=lengths, page_table=table), backend=backend,
                varlen=ingot.varlen(k=(0, ingot.INDIVIDUAL, 0)))
    call("_prepare")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        with torch.cuda.graph(graph, stream=stream):
            call()
    for new in ([17, page * most, 0, 900], [1, 2, 3, 4], [page * most] * 4):
        lengths.copy_(torch.tensor(new, dtype=torch.int32))
        table.copy_(torch.randperm(pages, device="cuda")[: b * most].to(torch.int32).view(b, most))
        right = table.clone()
        k.fill_(torch.nan)
        v.fill_(torch.nan)
        for i, n in enumerate(new):
            used = -(-n // page)
            own = right[i, :used].long()
            k[own], v[own] = kept[0][own], kept[1][own]
            if n % page:
                k[own[-1], n % page :] = torch.nan
                v[own[-1], n % page :] = torch.nan
            table[i, used:] = 0x7FFFFFF0
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for i, n in enumerate(new):
            if n == 0:
                assert (out[i] == 0).all()
                continue
            own = [x[right[i].long()].reshape(-1, hk, d)[:n].transpose(0, 1)[None] for x in (k, v)]
            assert (out[i:i + 1].double() - reference(q[i:i + 1], *own, False)).abs().max() < 2e-2


def test_decoding_does_not_depend_on_the_batch_when_told():
    b, hq, hk, s, d = 40, 8, 2, 3000, 128
    q, k, v = randn(b, hq, 1, d), randn(b, hk, s, d), randn(b, hk, s, d)
    lengths = torch.randint(1, s + 1, (b,), device="cuda").to(torch.int32)
    varlen, results = ingot.varlen(k=(0, ingot.INDIVIDUAL, 0)), []
    for rows in (slice(0, b), slice(7, 8)):
        out = torch.full_like(q[rows], torch.nan)
        Call("attn_fwd", dict(q=q[rows], k=k[rows], v=v[rows], out=out, k_lengths=lengths[rows]), varlen=varlen,
             backend="cuda/attn_fwd_sm80_decode", flags=ingot.BATCH_INVARIANT)()
        results.append(out)
    torch.cuda.synchronize()
    assert torch.equal(results[0][7:8], results[1])


@pytest.mark.parametrize("backend", [None, "cuda/attn_fwd_sm80"])
def test_graph_replays_with_other_stacked_sequences(backend):
    """More tiles than multiprocessors: where lengths are the device's, their order is made there too."""
    b, hq, hk, d, most, total = 40, 8, 2, 128, 600, 8000
    q, k, v = randn(1, hq, total, d), randn(1, hk, total, d), randn(1, hk, total, d)
    out, lse = torch.empty_like(q), torch.empty(hq, total, device="cuda")
    starts = torch.zeros(b + 1, dtype=torch.int32, device="cuda")
    stacked = (1, ingot.CUMULATIVE, ingot.REUSE)
    call = Call("attn_fwd", dict(q=q, k=k, v=v, out=out, lse=lse, q_lengths=starts, k_lengths=starts), backend=backend,
                varlen=ingot.varlen(q=stacked, k=stacked), batch=b, max_seqlen_q=most, max_seqlen_k=most, **CAUSAL)
    call("_prepare")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        with torch.cuda.graph(graph, stream=stream):
            call()
    torch.manual_seed(3)
    for lengths in (torch.randint(0, 400, (b,)), torch.tensor([600, 0, 1] + [5] * 37), torch.tensor([0] * 39 + [600])):
        lengths = lengths.clamp(max=most) * (lengths.cumsum(0) <= total)
        starts[1:] = lengths.cumsum(0)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        at = 0
        for n in lengths.tolist():
            rows = slice(at, at + n)
            if n:
                want = reference(q[:, :, rows], k[:, :, rows], v[:, :, rows], True)
                assert (out[:, :, rows].double() - want).abs().max() < 2e-2
            at += n
        assert not lse[:, :at].isnan().any()
        assert out[:, :, at:].isnan().all() and lse[:, at:].isnan().all()


def test_capture_without_a_workspace_is_refused_and_breaks_nothing():
    fwd, dout = attention()
    call = Call("attn_bwd", {**fwd, "dout": dout, "dq": torch.zeros_like(dout)}, workspace=False, **CAUSAL)
    call("_prepare")
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
        with pytest.raises(ingot.Refused) as refused:
            call()
    assert refused.value.name == "INGOT_WORKSPACE"
    graph.replay()
    torch.cuda.synchronize()
    assert x[0] == 1


def test_two_threads_on_two_streams():
    made = [attention(s=700 + 100 * i) for i in range(2)]
    wrong = []

    def work(fwd):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call = Call("attn_fwd", fwd, **CAUSAL)
            call()
            stream.synchronize()
            first = fwd["out"].clone()
            for _ in range(200):
                call()
                stream.synchronize()
                if not torch.equal(first, fwd["out"]):
                    wrong.append(1)

    threads = [threading.Thread(target=work, args=(fwd,)) for fwd, _ in made]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    for fwd, _ in made:
        assert (fwd["out"].double() - reference(fwd["q"], fwd["k"], fwd["v"], True)).abs().max() < 2e-2


def test_contexts_and_memory_of_others_are_left_alone():
    cuda = ctypes.CDLL("libcuda.so.1")
    fwd, dout = attention()
    call = Call("attn_fwd", fwd, **CAUSAL)
    call()
    torch.cuda.synchronize()
    before, after = ctypes.c_void_p(), ctypes.c_void_p()
    cuda.cuCtxGetCurrent(ctypes.byref(before))
    call()
    cuda.cuCtxGetCurrent(ctypes.byref(after))
    assert before.value == after.value
    outcome = []

    def bare():  # a thread with no current context stays one
        call_here = Call("attn_fwd", fwd, workspace=False, **CAUSAL)
        now = ctypes.c_void_p()
        cuda.cuCtxSetCurrent(None)
        call_here.check(ingot.lib.ingot_attn_fwd(call_here.params, ingot.ingot_stream(1, 0, None), call_here.options))
        cuda.cuCtxGetCurrent(ctypes.byref(now))
        outcome.append(now.value)

    thread = threading.Thread(target=bare)
    thread.start()
    thread.join()
    assert outcome == [None]


def test_a_llama_layer_is_as_exact_as_cudnn():
    q, k, v = randn(1, 32, 8192, 128), randn(1, 8, 8192, 128), randn(1, 8, 8192, 128)
    out = torch.full_like(q, torch.nan)
    Call("attn_fwd", dict(q=q, k=k, v=v, out=out), **CAUSAL)()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        peer = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    rows = torch.cat([torch.arange(64), torch.arange(8128, 8192), torch.randint(0, 8192, (64,))]).cuda()
    worst = [0.0, 0.0]
    for h in range(32):
        s = q[0, h, rows].double() @ k[0, h // 4].double().T / 128**0.5
        s.masked_fill_(torch.arange(8192, device="cuda") > rows[:, None], -torch.inf)
        want = s.softmax(-1) @ v[0, h // 4].double()
        ulp = 2.0 ** (want.abs().max().log2().floor().item() - 7)
        mine, theirs = ((x[0, h, rows].double() - want).abs().max().item() for x in (out, peer))
        worst = [max(worst[0], mine), max(worst[1], theirs)]
        assert mine <= 2 * theirs + ulp, (h, mine, theirs)
    print(f"largest error {worst[0]:.2e}, cuDNN's {worst[1]:.2e}")


@pytest.mark.parametrize("backend", [None, "cuda/attn_fwd_sm80_simt"])
def test_strides_that_leave_32_bits(backend):
    """K and V as [700,1,24000,128] views whose token stride is 89600: the product of row and stride passes 2^31."""
    k, v = (randn(24000, 700, 128) for _ in range(2))
    far = [x.transpose(0, 1)[699:, None] for x in (k, v)]
    q = randn(1, 1, 1, 128)
    out, compact = torch.empty_like(q), torch.empty_like(q)
    Call("attn_fwd", dict(q=q, k=far[0], v=far[1], out=out), backend=backend)()
    Call("attn_fwd", dict(q=q, k=far[0].contiguous(), v=far[1].contiguous(), out=compact), backend=backend)()
    assert torch.equal(out, compact)


def test_a_cache_beyond_4_gib():
    """65537 pages of 16 rows, 32768 elements apart: page id times page stride passes 2^31."""
    cache = torch.zeros(65537, 2, 16, 8, 128, device="cuda", dtype=BF16)
    k, v = cache[:, 0], cache[:, 1]
    v.fill_(100)
    v[65535:] = 0.75
    k[65535:] = 0
    q, out = randn(1, 8, 1, 128), torch.zeros(1, 8, 1, 128, device="cuda", dtype=BF16)
    table = torch.tensor([[65535, 65536]], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([32], dtype=torch.int32, device="cuda")
    paged = dict(k_lengths=lengths, page_table=table)
    Call("attn_fwd", dict(q=q, k=k, v=v, out=out, **paged), varlen=ingot.varlen(k=(0, ingot.INDIVIDUAL, 0)))()
    assert (out == 0.75).all()
    before = cache.clone()
    lengths.fill_(31)
    new = torch.full((1, 8, 1, 128), 5, device="cuda", dtype=BF16)
    Call("kv_append", dict(k_new=new, v_new=new, k=k, v=v, **paged), varlen=ingot.varlen(k=(0, ingot.INDIVIDUAL, 0)))()
    changed = (cache != before).nonzero()
    assert {tuple(x[:3]) for x in changed.tolist()} == {(65536, 0, 15), (65536, 1, 15)}


def test_bias_batch_stride_of_2_to_31():
    q, k, v = randn(2, 1, 64, 64), randn(2, 1, 64, 64), randn(2, 1, 64, 64)
    memory = torch.empty(2**31 + 64 * 64, device="cuda", dtype=BF16)
    bias = torch.as_strided(memory, (2, 1, 64, 64), (2**31, 4096, 64, 1))
    bias.copy_(randn(2, 1, 64, 64))
    out, compact = torch.empty_like(q), torch.empty_like(q)
    Call("attn_fwd", dict(q=q, k=k, v=v, out=out, bias=bias))()
    Call("attn_fwd", dict(q=q, k=k, v=v, out=compact, bias=bias.contiguous()))()
    assert torch.equal(out, compact)


def test_a_forked_child_is_told():
    import os
    fwd, _ = attention()
    call = Call("attn_fwd", fwd, **CAUSAL)
    call()
    torch.cuda.synchronize()
    child = os.fork()
    if child == 0:
        status = ingot.lib.ingot_attn_fwd(call.params, ingot.ingot_stream(1, 0, None), call.options)
        os._exit(0 if ingot.STATUS[status] == "INGOT_NO_DEVICE" and b"forked" in ingot.lib.ingot_last_error() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    call()
    torch.cuda.synchronize()


def test_a_stream_of_nobody_is_refused():
    fwd, _ = attention()
    call = Call("attn_fwd", fwd, **CAUSAL)
    status = ingot.lib.ingot_attn_fwd(call.params, ingot.ingot_stream(1, 99, None), call.options)
    assert ingot.STATUS[status] == "INGOT_NO_DEVICE" and b"99" in ingot.lib.ingot_last_error()
