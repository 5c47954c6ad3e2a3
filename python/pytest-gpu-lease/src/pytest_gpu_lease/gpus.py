"""Which GPUs this process would see, and how it would number them.

The driver is asked, because it alone knows how visible-device variables, its own order and partitions work together.
It is asked in a child, this file run as a program, because a driver that has been initialised stays in the process:
it takes memory, breaks forked children, and ignores variables that are set later.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
from typing import NamedTuple

PRETEND = "GPU_LEASE_PRETEND_GPUS"
LIMIT = 64  # what a waiting worker's record has room for
TIMEOUT = 120
_NONE = 100  # "no device" to CUDA and HIP alike


class Gpu(NamedTuple):
    id: int  # as this process's driver numbers it
    bus_id: str  # dddddddd:bb:dd.f, hexadecimal


class GpuError(Exception):
    """The GPUs cannot be told, or a variable is wrong; its text is a sentence for the user."""


def normal_bus_id(text):
    """The one form of a PCI bus id from any of those in use, 3B:00.0 or 0000:3b:00.0 or 00000000:3B:00.0, or None."""
    match = re.fullmatch(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([01]?[0-9a-f])\.([0-7])", text.strip().lower())
    return match and "%08x:%02x:%02x.%x" % tuple(int(part or "0", 16) for part in match.groups())


def visible_gpus():
    """The GPUs of this process in its driver's order, or the pretended ones."""
    pretended = pretended_gpus()
    if pretended is not None:
        return pretended
    try:
        done = subprocess.run([sys.executable, "-I", "-S", __file__], capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise GpuError(f"the driver did not say within {TIMEOUT} s which GPUs there are; it may need a reset") from None
    if done.returncode:
        said = done.stderr.strip() or f"asking the driver ended with status {done.returncode}"
        raise GpuError(said.splitlines()[-1])
    return [Gpu(number, normal_bus_id(bus_id)) for number, bus_id in enumerate(json.loads(done.stdout))]


def choose(gpus, pin):
    """The GPUs that GPU_LEASE_PIN allows: those given, or the one it names by number or PCI bus id."""
    if not gpus:
        raise GpuError("no GPU is visible to this process")
    if not pin:
        return gpus
    wanted = normal_bus_id(pin)
    chosen = [gpu for gpu in gpus if gpu.bus_id == wanted or str(gpu.id) == pin.strip()]
    if not chosen:
        listed = ", ".join(f"{gpu.id} ({gpu.bus_id})" for gpu in gpus)
        raise GpuError(f"GPU_LEASE_PIN is {pin!r}, and must be the number or PCI bus id of a visible GPU: {listed}")
    return chosen[:1]


# ---- pretended ones ----

def pretended_gpus():
    """GPUs for tests of tests: a number of them, or their PCI bus ids. None without the variable."""
    text = os.environ.get(PRETEND)
    if text is None:
        return None
    if text.strip().isdecimal():
        bus_ids = [f"ffffffff:{number:02x}:00.0" for number in range(int(text))]  # no real domain
    else:
        bus_ids = [normal_bus_id(part) for part in text.split(",")]
    if None in bus_ids or len(bus_ids) > LIMIT:
        raise GpuError(f"{PRETEND} is {text!r}, and must be a number up to {LIMIT} or PCI bus ids separated by commas")
    # AMD's driver takes the first variable, its runtime one of the others; NVIDIA's knows the last alone.
    second = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"
    for variable in ("ROCR_VISIBLE_DEVICES", second):
        if variable in os.environ:
            bus_ids = _listed(bus_ids, os.environ[variable])
    return [Gpu(number, bus_id) for number, bus_id in enumerate(bus_ids)]


def _listed(bus_ids, numbers):
    """As drivers read these lists: up to the first entry that is no device."""
    kept = []
    for number in numbers.split(","):
        if not number.strip().isdecimal() or int(number) >= len(bus_ids):
            break
        kept.append(bus_ids[int(number)])
    return kept


# ---- the child ----

def _library(*names):
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _checked(name, status):
    if status != 0:
        sys.exit(f"the GPU driver answered {status} to {name}")


def _cuda_bus_ids():
    cuda = _library("libcuda.so.1")
    status = cuda.cuInit(0) if cuda else _NONE
    if status == _NONE:
        return []
    _checked("cuInit", status)
    count, device, text = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(32)
    _checked("cuDeviceGetCount", cuda.cuDeviceGetCount(ctypes.byref(count)))
    bus_ids = []
    for number in range(count.value):
        _checked("cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), number))
        _checked("cuDeviceGetPCIBusId", cuda.cuDeviceGetPCIBusId(text, len(text), device))
        bus_ids.append(text.value.decode())
    return bus_ids


def _hip_bus_ids():
    names = ["libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"]
    if "ROCM_PATH" in os.environ:
        names.append(os.path.join(os.environ["ROCM_PATH"], "lib", "libamdhip64.so"))
    hip = _library(*names)
    count, text = ctypes.c_int(), ctypes.create_string_buffer(32)
    status = hip.hipGetDeviceCount(ctypes.byref(count)) if hip else _NONE
    if status == _NONE:
        return []
    _checked("hipGetDeviceCount", status)
    bus_ids = []
    for number in range(count.value):
        _checked("hipDeviceGetPCIBusId", hip.hipDeviceGetPCIBusId(text, len(text), number))
        bus_ids.append(text.value.decode())
    return bus_ids


if __name__ == "__main__":
    print(json.dumps(_cuda_bus_ids() or _hip_bus_ids()))
