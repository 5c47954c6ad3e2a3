"""The devices that PyTorch's half of the tests runs on: the CPU, and an NVIDIA GPU where there is one."""

import ingot.torch
import pytest
import torch

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


@pytest.fixture(autouse=True, params=DEVICES)
def device(request):
    """Where new tensors of the test are. Calls are counted anew."""
    ingot.torch.statistics(reset=True)
    if request.param == "cpu":
        yield request.param
    else:
        with torch.device(request.param):
            yield request.param


def here(x):
    return x.to(torch.get_default_device())


def rand(*shape, seed=3):
    """The same numbers in [0, 1) on every device."""
    return here(torch.rand(shape, generator=torch.Generator().manual_seed(seed), device="cpu"))
