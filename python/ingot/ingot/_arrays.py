"""The parts of the extension that are easier in Python: exceptions, and what each framework needs that DLPack leaves open."""

import functools
import sys

from . import _errors


def error(status, sentence):
    """The exception of a status of the library. Its sentences name an array's field where the caller knows one argument, number
    or array."""
    sentence = sentence.replace("dropout_seed_ptr", "dropout_seed").replace("dropout_offset_ptr", "dropout_offset")
    return _errors.BY_STATUS.get(status, _errors.Error)(sentence, status)


def refuse_gradients(name):
    """Called for a tensor that requires a gradient: refused, unless the framework records none just now."""
    if sys.modules["torch"].is_grad_enabled():
        raise error(
            10,
            f"{name} requires a gradient, which this function does not record; use ingot.torch.attention, "
            "or torch.no_grad(), or detach it",
        )


@functools.lru_cache(maxsize=64)
def _name(dtype):
    """numpy makes the name anew each time, which takes longer than a small call."""
    return getattr(dtype, "name", None)


def _framework(array):
    return type(array).__module__.partition(".")[0]


def current_stream(array):
    """The handle of the stream that the array's framework works on just now; asked for GPU arrays only."""
    framework = _framework(array)
    if framework == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream().ptr
    if framework == "torch":
        return sys.modules["torch"].cuda.current_stream(array.device).cuda_stream
    raise error(20, f"{framework} does not tell its stream: give the handle as stream=")


# numpy types of other packages (ml_dtypes), by the width of their bits
_BITS = {"bfloat16": "uint16"} | {f"float8_{x}": "uint8" for x in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")}


def as_bits(array):
    """(the array as unsigned integers, the name of its type) for numpy arrays of types that numpy does not export."""
    name = _name(array.dtype) if hasattr(array, "dtype") else None
    return (array.view(_BITS[name]), name) if _framework(array) == "numpy" and name in _BITS else None


def empty(like, shape, dtype):
    """(a new writable array of like's framework, None or what makes the result of it)."""
    framework = _framework(like)
    if framework == "torch":
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device), None
    if framework == "cupy":
        return sys.modules["cupy"].empty(shape, dtype), None
    if framework in ("jax", "jaxlib"):
        if list(like.devices())[0].platform != "cpu":
            raise error(20, "the results of jax arrays can be made on the CPU only: give out= on a GPU")
        import jax.numpy
        import numpy

        # Their arrays never change, so the result is written before it becomes one.
        return numpy.empty(shape, jax.numpy.dtype(dtype)), jax.numpy.asarray
    import numpy

    if hasattr(like, "dtype") and _name(like.dtype) == dtype:
        return numpy.empty(shape, like.dtype), None
    try:
        return numpy.empty(shape, dtype), None
    except TypeError:
        raise error(10, f"numpy has no type {dtype} for the result: give out=") from None


def zero(array):
    """Clears a new array on a GPU."""
    array.zero_() if _framework(array) == "torch" else array.fill(0)
