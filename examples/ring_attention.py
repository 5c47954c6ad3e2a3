"""A causal sequence over several processes: the ring's output and gradients beside those of one process.

    pip install ./python/ingot torch numpy && torchrun --nproc_per_node=4 examples/ring_attention.py
"""

import ingot.torch
import torch
import torch.distributed as dist
from ingot.torch.distributed import ring_attention, shard, unshard

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same tensors on all ranks, to compare with
q = torch.randn(1, 8, 1000, 64, requires_grad=True)  # [B, Hq, S, D]
k, v = (torch.randn(1, 2, 1000, 64, requires_grad=True) for _ in range(2))

mine = [shard(x.detach(), 2, layout="zigzag").requires_grad_() for x in (q, k, v)]
out = ring_attention(*mine, causal=True, layout="zigzag")
out.square().sum().backward()

whole = ingot.torch.attention(q, k, v, causal=True)
whole.square().sum().backward()
print(f"rank {dist.get_rank()} of {dist.get_world_size()} has {out.shape[2]} rows of {whole.shape[2]}")
found = [out.detach(), *(x.grad for x in mine)]
for name, part, want in zip(("out", "dq", "dk", "dv"), found, (whole.detach(), q.grad, k.grad, v.grad)):
    difference = (unshard(part, 2, layout="zigzag") - want).abs().max().item()
    if dist.get_rank() == 0:
        print(f"largest difference of {name}: {difference:.1e}")
    assert difference < 1e-4
dist.destroy_process_group()
