"""Attention from Python: numpy arrays in and out, and what would run.

    pip install ./python/ingot numpy && python examples/attention.py
"""

import ingot
import numpy as np

rng = np.random.default_rng(0)
q = rng.standard_normal((2, 8, 5, 64), dtype=np.float32)  # [B, Hq, Sq, D]
k = rng.standard_normal((2, 2, 100, 64), dtype=np.float32)  # [B, Hk, Sk, D]: four query heads read one key head
v = rng.standard_normal((2, 2, 100, 64), dtype=np.float32)

# The last query sees every key.
out, lse = ingot.attention(q, k, v, causal=True, align="bottom_right", return_lse=True)
print("out", out.shape, "lse", lse.shape)

# The same from two halves of the keys, each attended to by itself. The queries are the last five, so the causal mask is in
# the second half only.
left = ingot.attention(q, k[:, :, :50], v[:, :, :50], return_lse=True)
right = ingot.attention(q, k[:, :, 50:], v[:, :, 50:], causal=True, align="bottom_right", return_lse=True)
merged, _ = ingot.merge([left[0], right[0]], [left[1], right[1]])
print("largest difference of the merged halves:", np.abs(merged - out).max())
assert np.allclose(merged, out, rtol=0, atol=1e-5)

try:
    ingot.attention(q, k, v, causal=True)
except ingot.InvalidError as error:
    print("refused:", error)

print(ingot.explain(ingot.attention, q, k, v, causal=True, align="bottom_right"))
