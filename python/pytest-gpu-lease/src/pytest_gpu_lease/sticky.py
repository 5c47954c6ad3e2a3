"""Errors after which a process can use its GPU no more: every later call returns them again, until it ends."""

import ctypes
import os
import re

# The driver's numbers of the errors whose documentation says that the process must be ended and started again.
_CODES = {
    214: "uncorrectable ECC error",
    220: "uncorrectable NVLink error",
    700: "illegal memory access",
    702: "launch timed out",
    709: "context is destroyed",
    710: "device-side assert",
    714: "hardware stack error",
    715: "illegal instruction",
    716: "misaligned address",
    717: "invalid address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
    721: "tensor memory leak",
}

# How runtimes and frameworks write them: CUDA's sentences, HIP's, and the names of both.
_TEXT = re.compile(
    r"an illegal memory access was encountered|the launch timed out and was terminated|device-side assert triggered|"
    r"hardware stack error|an illegal instruction was encountered|misaligned address|"
    r"operation not supported on global/shared address space|invalid program counter|unspecified launch failure|"
    r"uncorrectable (?:ECC|NVLink) error|"
    r"(?:CUDA_ERROR_|cudaError|hipError)_?(?:ECC_?Uncorrectable|NVLINK_?Uncorrectable|Illegal_?Address|Launch_?Timeout|"
    r"Context_?Is_?Destroyed|Assert|Hardware_?Stack_?Error|Illegal_?Instruction|Misaligned_?Address|"
    r"Invalid_?Address_?Space|Invalid_?PC|Launch_?Fail(?:ed|ure))\b",
    re.IGNORECASE,
)


def in_text(text):
    """The words in an exception's text that name such an error, or None."""
    found = _TEXT.search(text)
    return found and found.group()


def in_context():
    """What the CUDA context current to this thread died of; "" if it is alive; None if there is none to ask.

    Loads and initialises nothing: a process that has not used CUDA has no context. Waits for the work in the context,
    so that an error shows in the test that caused it, not in the next one.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    context = ctypes.c_void_p()
    if cuda.cuCtxGetCurrent(ctypes.byref(context)) != 0 or not context:
        return None
    status = cuda.cuCtxSynchronize()
    return f"{_CODES[status]} (CUDA error {status})" if status in _CODES else ""
