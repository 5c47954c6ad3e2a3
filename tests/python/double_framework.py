"""Run by test_double.py: the Python package with tensors of a framework that is made here, on a GPU that is the driver double.

The framework has DLPack's C exchange table, as PyTorch has it, over device memory that the host cannot touch.
"""

import ctypes
import sys
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64
from ctypes import c_void_p, cast, py_object, pythonapi

sys.path.insert(0, sys.argv[1])
import ingot
import numpy as np
from ingot import _core

CUDA = 2
double = ctypes.CDLL("libcuda.so.1")
for name in ("double_memory", "double_stream", "double_primary"):
    getattr(double, name).restype = c_void_p
double.double_faults.restype = c_char_p
double.double_stream.argtypes = [c_void_p]
double.double_capture.argtypes = [c_void_p, ctypes.c_bool]
double.double_memory.argtypes = [ctypes.c_size_t]
ALLOC, FREE, LAUNCH = range(3)


class Event(Structure):
    _fields_ = [("kind", c_int), ("device", c_int), ("context", c_void_p), ("stream", c_void_p), ("memory", c_void_p),
                ("bytes", ctypes.c_size_t), ("kernel", ctypes.c_char * 64), ("grid", c_uint32 * 3), ("block", c_uint32 * 3),
                ("shared_bytes", c_uint32), ("early", ctypes.c_bool), ("arguments_size", ctypes.c_size_t), ("arguments", c_uint8 * 4096)]  # fmt: skip


double.double_event_at.restype = Event


# ---- DLPack's structs ----


class View(Structure):
    _fields_ = [("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32), ("code", c_uint8),
                ("bits", c_uint8), ("lanes", c_uint16), ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)),
                ("offset", c_uint64)]  # fmt: skip


class Managed(Structure):
    pass


Deleter = CFUNCTYPE(None, POINTER(Managed))
Managed._fields_ = [("major", c_uint32), ("minor", c_uint32), ("context", c_void_p), ("deleter", Deleter),
                    ("flags", c_uint64), ("view", View)]  # fmt: skip
SetError = CFUNCTYPE(None, c_void_p, c_char_p, c_char_p)
Allocator = CFUNCTYPE(c_int, POINTER(View), POINTER(c_void_p), c_void_p, SetError)
FromObject = CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p))
ToObject = CFUNCTYPE(c_int, POINTER(Managed), POINTER(c_void_p))
ViewOfObject = CFUNCTYPE(c_int, c_void_p, POINTER(View))
Stream = CFUNCTYPE(c_int, c_int32, c_int32, POINTER(c_void_p))


class Table(Structure):
    _fields_ = [("major", c_uint32), ("minor", c_uint32), ("previous", c_void_p), ("allocator", Allocator),
                ("from_object", FromObject), ("to_object", ToObject), ("view_of_object", ViewOfObject),
                ("stream", Stream)]  # fmt: skip


# ---- the framework ----

BF16, F32 = (4, 16), (2, 32)
alive = {}  # address of a Managed -> what it keeps
stream = None


def new_view(shape, kind):
    extents = (c_int64 * len(shape))(*shape)
    memory = double.double_memory(max(int(np.prod(shape)), 1) * kind[1] // 8)
    return View(memory, CUDA, 0, len(shape), *kind, 1, cast(extents, POINTER(c_int64)), None, 0), extents


class Tensor:
    """A tensor on the GPU."""

    def __init__(self, shape, kind=BF16, view=None):
        self.view, self.keep = (view, None) if view else new_view(shape, kind)

    shape = property(lambda self: tuple(self.view.shape[i] for i in range(self.view.ndim)))


@Deleter
def deleter(managed):
    del alive[ctypes.addressof(managed.contents)]


@Allocator
def allocator(prototype, out, _context, _error):
    p = prototype.contents
    view, extents = new_view([p.shape[i] for i in range(p.ndim)], (p.code, p.bits))
    managed = Managed(1, 1, None, deleter, 0, view)
    alive[ctypes.addressof(managed)] = managed, extents
    out[0] = ctypes.addressof(managed)
    return 0


@ToObject
def to_object(managed, out):
    made = Tensor(None, view=managed.contents.view)
    made.keep = alive.pop(ctypes.addressof(managed.contents))
    pythonapi.Py_IncRef(py_object(made))
    out[0] = id(made)
    return 0


@ViewOfObject
def view_of_object(address, out):
    ctypes.memmove(out, ctypes.byref(cast(address, py_object).value.view), ctypes.sizeof(View))
    return 0


@Stream
def current_stream(_type, _device, out):
    out[0] = stream
    return 0


table = Table(1, 3, None, allocator, FromObject(lambda *_: -1), to_object, view_of_object, current_stream)
pythonapi.PyCapsule_New.restype = py_object
pythonapi.PyCapsule_New.argtypes = [c_void_p, c_char_p, c_void_p]
Tensor.__dlpack_c_exchange_api__ = pythonapi.PyCapsule_New(ctypes.addressof(table), b"dlpack_exchange_api", None)


# ---- the calls ----


def events():
    found = [double.double_event_at(i) for i in range(double.double_events())]
    double.double_forget()
    assert all(x.device == 0 and (x.stream or None) == stream for x in found), [x.stream for x in found]
    return [x.kind for x in found]


def refused(status, words, call):
    try:
        call()
    except ingot.Error as error:
        assert error.name == status and words in str(error), error
        return
    raise AssertionError(f"not refused: {words}")


q, k, v = Tensor((1, 4, 100, 64)), Tensor((1, 2, 130, 64)), Tensor((1, 2, 130, 64))
for capturing in (False, True):
    stream = double.double_stream(double.double_primary(0))
    double.double_capture(stream, capturing)
    double.double_forget()
    out, lse = ingot.attention(q, k, v, causal=True, align="bottom_right", return_lse=True)
    assert type(out) is Tensor and out.shape == (1, 4, 100, 64) and lse.shape == (1, 4, 100)
    launched = events()
    assert LAUNCH in launched and ALLOC not in launched and not double.double_faults()

    # Backward needs a workspace: the framework's, also while the stream is captured, and given back.
    grads = [Tensor(x.shape) for x in (q, k, v)]
    backward = dict(q=q, k=k, v=v, out=out, lse=lse, dout=Tensor(out.shape), mask=1, align=2)
    backward.update(zip(("dq", "dk", "dv"), grads))
    _core.attn_bwd(**backward)
    launched = events()
    assert LAUNCH in launched and ALLOC not in launched and not alive and not double.double_faults()
    # On another stream than the framework's own, the memory is not its either.
    if capturing:
        refused("INGOT_WORKSPACE", "being captured", lambda: _core.attn_bwd(stream=stream, **backward))
    else:
        _core.attn_bwd(stream=stream, **backward)
        assert ALLOC in events()

host = np.zeros((1, 2, 130, 64), np.float32)
refused("INGOT_INVALID", "k is on cpu:0 and q on cuda:0", lambda: ingot.attention(q, host, v))
refused("INGOT_INVALID", "out_parts", lambda: ingot.merge([], [], out=out, lse=lse))


class Unknown:
    """A GPU array whose framework nobody knows."""

    def __dlpack_device__(self):
        return (CUDA, 0)

    def __dlpack__(self, **keywords):
        raise AssertionError("never asked")


refused("INGOT_UNSUPPORTED", "give the handle as stream=", lambda: ingot.attention(Unknown(), k, v))
print("right")
