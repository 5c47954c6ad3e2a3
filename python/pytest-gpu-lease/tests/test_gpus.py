"""Which GPUs a process sees, by pretended ones and by a double of the driver, and the errors that end a process."""

import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpu_lease import gpus, sticky
from pytest_gpu_lease.gpus import Gpu, GpuError, choose, normal_bus_id, visible_gpus

A, B, C = "00000000:3b:00.0", "00000000:86:00.0", "00000001:3b:00.0"


def test_a_bus_id_has_one_form():
    assert {normal_bus_id(text) for text in ("3B:00.0", "0000:3b:00.0", "00000000:3B:00.0", " 0:3b:0.0")} == {A}
    for text in ("", "3", "3b:00", "0000:3b:20.0", "0000:3b:00.8", "GPU-3b", "100:00.0", "123456789:3b:00.0"):
        assert normal_bus_id(text) is None, text


def bus_ids():
    return [gpu.bus_id for gpu in visible_gpus()]


def test_pretended_gpus_follow_the_variables_as_drivers_read_them(monkeypatch):
    monkeypatch.setenv("GPU_LEASE_PRETEND_GPUS", "3")
    assert [gpu.id for gpu in visible_gpus()] == [0, 1, 2] and len(set(bus_ids())) == 3
    monkeypatch.setenv("GPU_LEASE_PRETEND_GPUS", "3b:00.0, 0000:86:00.0, 1:3b:00.0")
    assert visible_gpus() == [Gpu(0, A), Gpu(1, B), Gpu(2, C)]
    for value, seen in ("2,0", [C, A]), ("1,7,0", [B]), ("1,-1,0", [B]), ("", []), ("-1", []):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert bus_ids() == seen, value
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "2,1")
    assert bus_ids() == [C]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,0")
    assert bus_ids() == [B, C]
    for value in "", "some", "65", "-1", "3b:00.0,86:00":
        monkeypatch.setenv("GPU_LEASE_PRETEND_GPUS", value)
        with pytest.raises(GpuError, match="must be a number up to 64 or PCI bus ids"):
            visible_gpus()


def test_a_pin_is_a_number_or_a_bus_id_of_a_visible_gpu():
    seen = [Gpu(0, B), Gpu(1, A)]
    assert choose(seen, None) == choose(seen, "") == seen
    assert choose(seen, "1") == choose(seen, "3B:00.0") == [Gpu(1, A)]
    for pin in "2", "-1", "1:3b:00.0", "cuda:1":
        with pytest.raises(GpuError, match=rf"GPU_LEASE_PIN is '{pin}'.* 0 \({B}\), 1 \({A}\)"):
            choose(seen, pin)
    with pytest.raises(GpuError, match="no GPU is visible"):
        choose([], "0")


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_the_driver_is_asked_in_a_child(vendor, driver, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver[vendor]))
    assert visible_gpus() == []
    monkeypatch.setenv("DRIVER_BUS_IDS", "00000001:3B:00.0,0000:86:00.0")
    assert visible_gpus() == [Gpu(0, C), Gpu(1, B)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible_gpus() == [Gpu(0, B)]
    monkeypatch.setenv("DRIVER_STATUS", "999")
    name = "cuInit" if vendor == "cuda" else "hipGetDeviceCount"
    with pytest.raises(GpuError, match=f"^the GPU driver answered 999 to {name}$"):
        visible_gpus()
    monkeypatch.setenv("DRIVER_HANGS", "yes")
    monkeypatch.setattr(gpus, "TIMEOUT", 1)
    with pytest.raises(GpuError, match="did not say within 1 s"):
        visible_gpus()
    assert str(driver[vendor]) not in Path("/proc/self/maps").read_text()


SENTENCES = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "HIP error: unspecified launch failure",
    "cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_FAILED: unspecified",
    "hipErrorIllegalAddress (700)",
    "cudaErrorMisalignedAddress",
    "CUDA error: uncorrectable ECC error encountered",
]


def test_words_that_name_a_dead_context():
    for text in SENTENCES:
        assert sticky.in_text(f"RuntimeError: {text}\n"), text
    for text in ("CUDA out of memory", "CUDA error: invalid argument", "cudaErrorAssertion", "CUDA_ERROR_NOT_FOUND",
                 "assert 1 == 2", "the launch was refused", ""):
        assert not sticky.in_text(text), text


def test_the_context_is_asked_only_where_there_is_one(driver):
    assert sticky.in_context() is None
    program = f"""if True:
        import ctypes, os, sys
        sys.path.insert(0, {str(Path(gpus.__file__).parent.parent)!r})
        from pytest_gpu_lease.sticky import in_context
        def answer(**variables):
            libc = ctypes.CDLL(None)
            for name, value in variables.items():
                libc.setenv(name.encode(), value.encode(), 1)
            return in_context()
        assert answer() is None and "libcuda" not in open("/proc/self/maps").read()
        ctypes.CDLL({str(driver["cuda"] / "libcuda.so.1")!r})
        assert answer(DRIVER_STATUS="700") is None
        assert answer(DRIVER_CONTEXT="yes") == "illegal memory access (CUDA error 700)"
        assert answer(DRIVER_STATUS="719") == "unspecified launch failure (CUDA error 719)"
        assert answer(DRIVER_STATUS="0") == answer(DRIVER_STATUS="2") == answer(DRIVER_STATUS="900") == ""
    """
    subprocess.run([sys.executable, "-c", program], check=True)
