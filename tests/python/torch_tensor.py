"""The library's tensors over PyTorch's memory, for what calls the C interface on them."""

import ingot_ctypes as ingot
import torch

TYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2, "i32": torch.int32, "i64": torch.int64, "bool": torch.bool,
}  # fmt: skip
NUMBERS = {TYPES[name]: ingot.DTYPES[name][0] for name in TYPES}


def tensor(x):
    t = ingot.ingot_tensor(data=x.data_ptr(), dtype=NUMBERS[x.dtype], ndim=x.dim())
    for i in range(x.dim()):
        t.shape[i], t.stride[i] = x.shape[i], x.stride(i)
    return t
