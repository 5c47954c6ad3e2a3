"""One run on a machine with an NVIDIA GPU, through its real driver: contexts that die, a kernel that never ends, workers that wait."""

import importlib.util
import re
import shutil
import subprocess

import pytest
from test_runs import USE, check_log

from pytest_gpu_lease import gpus

# Nothing here can be shown without a real driver; test_runs.py does the same with a pretended one. nvidia-smi is a process of its
# own, so that this one has no context.
NVIDIA_SMI = shutil.which("nvidia-smi")
if not NVIDIA_SMI or not importlib.util.find_spec("torch"):
    pytest.skip("needs an NVIDIA GPU, nvidia-smi and torch", allow_module_level=True)
FOUND = [gpus.normal_bus_id(line) for line in subprocess.check_output(
    [NVIDIA_SMI, "--query-gpu=pci.bus_id", "--format=csv,noheader"], text=True).splitlines()]


def test_a_gpu_is_known_by_the_bus_id_that_nvidia_smi_gives():
    assert FOUND and {gpu.bus_id for gpu in gpus.visible_gpus()} <= set(FOUND)


def test_dead_contexts_and_an_endless_kernel_cost_one_test_each(run):
    run.write(test_gpu=USE + """
import torch

def product(device):
    x = torch.rand(512, 512, device=device, dtype=torch.float64)
    assert torch.allclose((x @ x).cpu(), x.cpu() @ x.cpu())

@pytest.mark.parametrize("number", range(4))
def test_fine(number, gpu_device):
    product(gpu_device)

def test_index_outside(gpu_device):
    x = torch.zeros(8, device=gpu_device)
    try:
        x[torch.full((4,), 1 << 40, device=gpu_device)] = 1
        torch.cuda.synchronize()
    except RuntimeError:
        pass  # the test says nothing; the context is dead all the same

@pytest.mark.parametrize("number", range(4, 8))
def test_fine_then(number, gpu_device):
    product(gpu_device)

def test_endless_kernel(gpu_device):
    torch.zeros(1, device=gpu_device)
    doom()
    torch.cuda._sleep(1 << 45)
    torch.cuda.synchronize()

@pytest.mark.parametrize("number", range(8, 12))
def test_fine_after_all(number, gpu_device):
    product(gpu_device)
""")
    workers = len(FOUND) + 1  # one of them waits
    watchdog = run.start("pytest_gpu_lease.watchdog", "--lockfile", str(run.lockfile), "--workers", str(workers),
                         "--timeout", "40", "--grace", "3", "--poll", "0.2")
    outcomes, output = run.finish(run.pytest("-n", str(workers)))
    _, told = run.finish(watchdog)
    check_log(run)
    assert {name for name, ends in outcomes.items() if ends != ["PASSED"]} == {"test_index_outside", "test_endless_kernel"}
    assert outcomes["test_index_outside"] == outcomes["test_endless_kernel"] == ["FAILED"]
    assert re.search(r"\b2 failed, 12 passed\b", output)
    assert "the GPU's context is dead: " in output
    assert re.search(r"hangs in test_gpu\.py::test_endless_kernel: nothing new for \d+ s; SIGTERM", told)
    assert "waits for a GPU since 0 s" in output and FOUND[0] in output
