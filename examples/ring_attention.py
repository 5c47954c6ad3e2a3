"""A causal sequence over several processes: how far the ring's output and gradients are from fp64, beside those of one process.

    pip install ./python/ingot torch numpy && torchrun --nproc_per_node=4 examples/ring_attention.py

On GPUs, over NCCL, where each process can have one of its own; else on CPUs, over gloo.
"""

import os

import ingot.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ingot.torch.distributed import ring_attention, shard, unshard

local_rank, local_ranks = (int(os.environ[x]) for x in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
gpus = torch.cuda.device_count() >= local_ranks
if gpus:
    torch.cuda.set_device(local_rank)
dist.init_process_group("nccl" if gpus else "gloo")
torch.set_default_device("cuda" if gpus else "cpu")
torch.manual_seed(0)  # the same tensors on all ranks, to compare with
q = torch.randn(1, 8, 1000, 64, requires_grad=True)  # [B, Hq, S, D]
k, v = (torch.randn(1, 2, 1000, 64, requires_grad=True) for _ in range(2))

mine = [shard(x.detach(), 2, layout="zigzag").requires_grad_() for x in (q, k, v)]
out = ring_attention(*mine, causal=True, layout="zigzag")
out.square().sum().backward()

whole = ingot.torch.attention(q, k, v, causal=True)
whole.square().sum().backward()

exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
exact_out = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
exact_out.square().sum().backward()
print(f"rank {dist.get_rank()} of {dist.get_world_size()} has {out.shape[2]} rows of {whole.shape[2]}")
parts = [out.detach(), *(x.grad for x in mine)]
wholes, exacts = [whole.detach(), q.grad, k.grad, v.grad], [exact_out.detach(), *(x.grad for x in exact)]
for name, part, one, want in zip(("out", "dq", "dk", "dv"), parts, wholes, exacts):
    ring, alone = ((x - want).abs().max().item() for x in (unshard(part, 2, layout="zigzag"), one))
    if dist.get_rank() == 0:
        print(f"{name} is off by {ring:.1e} at most, of one process by {alone:.1e}")
    assert ring <= 2 * alone + 1e-6 * max(1, want.abs().max())  # docs/concepts.md, one process being the yardstick
dist.destroy_process_group()
