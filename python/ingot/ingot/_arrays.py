"""The parts of the extension that are easier in Python: exceptions, and what each framework needs that DLPack leaves open."""

import functools
import re
import sys

from . import _errors


# What the library's sentences call by the names of C, as a caller from Python knows it.
_WORDS = {
    "dropout_seed_ptr": "dropout_seed",
    "dropout_offset_ptr": "dropout_offset",
    "options.": "",
    "absent (dtype NONE)": "None",
    "align is UNSET": "align is None",
    "TOP_LEFT": "'top_left'",
    "BOTTOM_RIGHT": "'bottom_right'",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3_FNUZ": "float8_e4m3fnuz",
    "F8_E5M2_FNUZ": "float8_e5m2fnuz",
    "I32": "int32",
    "I64": "int64",
    "U64": "uint64",
    "BOOL": "bool",
}
_WORD = re.compile(r"\boptions\.|absent \(dtype NONE\)|\b(?:" + "|".join(x for x in _WORDS if x[-1].isalnum()) + r")\b")


def error(status, sentence):
    """The exception of a status of the library."""
    sentence = _WORD.sub(lambda found: _WORDS[found[0]], sentence)
    return _errors.BY_STATUS.get(status, _errors.Error)(sentence, status)


def refusal(array, error):
    """Why a framework did not hand its array over, to follow the field's name."""
    if getattr(array, "is_meta", False):
        return "is on meta; it must have memory on cpu, cuda or rocm"
    layout = str(getattr(array, "layout", "torch.strided"))
    if getattr(array, "is_nested", False):
        return "is a nested tensor; it must be strided"
    if layout != "torch.strided":
        return f"is of layout {layout}; it must be strided"
    return "cannot be taken: " + str(error).partition("\n")[0]


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
    if _framework(array) != "numpy" or name not in _BITS:
        return None
    import numpy

    # With the order of its bytes, which numpy then refuses where it is not the machine's.
    return array.view(numpy.dtype(_BITS[name]).newbyteorder(array.dtype.byteorder)), name


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
    if framework != "numpy" and hasattr(like, "__array_namespace__"):
        namespace = like.__array_namespace__()
        if hasattr(namespace, dtype):
            return namespace.empty(shape, dtype=getattr(namespace, dtype), device=like.device), None
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
