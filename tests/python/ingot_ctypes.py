"""ingot.h by ctypes, for the tests only: the structs and verbs as the header has them, and numpy arrays of every dtype.

    import ingot_ctypes as ingot
    out = ingot.empty((1, 2, 5, 8), "bf16")
    ingot.attn_fwd(q=ingot.encode(q, "bf16"), ..., out=out, mask=ingot.MASK_CAUSAL, align=ingot.TOP_LEFT)

A tensor is an `Array`: a numpy array of the storage's bits and the name of its dtype. Keywords are the struct's fields;
`options` is a dict of ingot_options' fields. A status other than INGOT_OK raises Refused with the library's sentence.
"""

import ctypes
import os
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
)
from ctypes import c_void_p, sizeof
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PATH = os.environ.get("INGOT_LIBRARY") or str(ROOT / "build/release/libingot.so")
HEADER = ROOT / "include/ingot.h"

UNBOUNDED = 2**31 - 1
MASK_NONE, MASK_CAUSAL, MASK_WINDOW = 0, 1, 2
ALIGN_UNSET, TOP_LEFT, BOTTOM_RIGHT = 0, 1, 2
LSE_NATURAL, LSE_BASE2 = 0, 1
MAX, CUMULATIVE, INDIVIDUAL, LAST_PAGE = 0, 1, 2, 3
IMPLIED, REUSE, ARRAY = 0, 1, 2
DETERMINISTIC, BATCH_INVARIANT, STRICT = 1, 2, 4
TEXT, JSON = 0, 1
MERGE_PARTS = 8
STATUS = {
    0: "INGOT_OK",
    10: "INGOT_INVALID",
    11: "INGOT_VERSION_MISMATCH",
    20: "INGOT_UNSUPPORTED",
    21: "INGOT_NOT_FOUND",
    22: "INGOT_DEGRADED",
    30: "INGOT_WORKSPACE",
    31: "INGOT_OUT_OF_MEMORY",
    40: "INGOT_IMAGE",
    50: "INGOT_NO_DEVICE",
    51: "INGOT_DRIVER",
    90: "INGOT_INTERNAL",
}
OPERATORS = ("attn_fwd", "attn_bwd", "attn_merge", "kv_append", "attn_dropout_mask")

# name: (ingot_dtype, numpy type of the storage)
DTYPES = {
    "f32": (1, np.float32),
    "f16": (2, np.float16),
    "bf16": (3, np.uint16),
    "e4m3": (4, np.uint8),
    "e5m2": (5, np.uint8),
    "e4m3fnuz": (6, np.uint8),
    "e5m2fnuz": (7, np.uint8),
    "i32": (8, np.int32),
    "i64": (9, np.int64),
    "u64": (10, np.uint64),
    "bool": (11, np.bool_),
}
EIGHTS = ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz")


def varlen(q=(0, 0, 0), k=(0, 0, 0), lse_layout=0):
    """The word: each side is (stacked, length, position)."""
    side = lambda s: s[0] | s[1] << 1 | s[2] << 3
    return side(q) | side(k) << 8 | lse_layout << 16


# ---- structs ----


class ingot_tensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("ndim", c_int32),
        ("shape", c_int64 * 5),
        ("stride", c_int64 * 5),
    ]


class ingot_stream(Structure):
    _fields_ = [("type", c_int32), ("device", c_int32), ("handle", c_void_p)]


Body = CFUNCTYPE(None, c_void_p, c_int64)
Alloc = CFUNCTYPE(c_void_p, c_void_p, c_uint64)
Free = CFUNCTYPE(None, c_void_p, c_void_p)
ParallelFor = CFUNCTYPE(None, c_void_p, c_int64, c_void_p, c_void_p)
LogCallback = CFUNCTYPE(None, c_void_p, c_int32, c_char_p)


class ingot_options(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("backend", c_char_p),
        ("image_path", c_char_p),
        ("workspace", c_void_p),
        ("workspace_size", c_uint64),
        ("alloc", c_void_p),
        ("free", c_void_p),
        ("alloc_context", c_void_p),
        ("parallel_for", c_void_p),
        ("parallel_context", c_void_p),
        ("num_threads", c_int32),
        ("reserved", c_int32),
    ]


def _tensors(names):
    return [(name, ingot_tensor) for name in names.split()]


_LENGTHS = _tensors("q_lengths q_positions k_lengths k_positions")
_PAGES = _tensors("page_table page_indptr page_indices")
_CALL = [
    ("dropout_seed", c_uint64),
    ("dropout_offset", c_uint64),
    ("batch", c_int64),
    ("max_seqlen_q", c_int64),
    ("max_seqlen_k", c_int64),
    ("softmax_scale", c_float),
    ("softcap", c_float),
    ("dropout_p", c_float),
    ("mask", c_int32),
    ("align", c_int32),
    ("window_left", c_int32),
    ("window_right", c_int32),
    ("lse_base", c_int32),
]


class ingot_attn_fwd_params(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("varlen", c_uint32),
        *_tensors("q k v out lse bias alibi sink q_descale k_descale v_descale"),
        *_LENGTHS,
        *_PAGES,
        *_tensors("dropout_seed_ptr dropout_offset_ptr dropout_seed_out dropout_offset_out"),
        *_CALL,
    ]


class ingot_attn_bwd_params(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("varlen", c_uint32),
        *_tensors("q k v out lse dout dq dk dv bias dbias alibi sink dsink"),
        *_LENGTHS,
        *_tensors("dropout_seed_ptr dropout_offset_ptr"),
        *_CALL,
    ]


class ingot_attn_merge_params(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("lse_base", c_int32),
        ("out_parts", ingot_tensor * MERGE_PARTS),
        ("lse_parts", ingot_tensor * MERGE_PARTS),
        *_tensors("out lse"),
    ]


class ingot_kv_append_params(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("varlen", c_uint32),
        *_tensors("k_new v_new k v k_descale v_descale new_lengths new_positions k_lengths"),
        *_PAGES,
        ("batch", c_int64),
        ("max_seqlen_new", c_int64),
        ("max_seqlen_k", c_int64),
        ("lengths_after", c_int32),
        ("reserved", c_int32),
    ]


class ingot_attn_dropout_mask_params(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("dropout_p", c_float),
        *_tensors("mask dropout_seed_ptr dropout_offset_ptr"),
        ("dropout_seed", c_uint64),
        ("dropout_offset", c_uint64),
        ("max_seqlen_q", c_int64),
        ("max_seqlen_k", c_int64),
    ]


class ingot_implementation(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("family", c_char_p),
        ("operator_name", c_char_p),
        ("arch", c_char_p),
        ("digest", c_char_p),
        ("variant_count", c_int32),
        ("device_type", c_int32),
        ("available", c_int32),
        ("reserved", c_int32),
    ]


class ingot_variant(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("defines", c_char_p),
        ("kernels", POINTER(c_char_p)),
        ("spill_bytes", c_uint32),
        ("reserved", c_uint32),
    ]


STRUCTS = (
    ingot_tensor,
    ingot_stream,
    ingot_options,
    ingot_attn_fwd_params,
    ingot_attn_bwd_params,
    ingot_attn_merge_params,
    ingot_kv_append_params,
    ingot_attn_dropout_mask_params,
    ingot_implementation,
    ingot_variant,
)
PARAMS = {op: globals()[f"ingot_{op}_params"] for op in OPERATORS}


# ---- the library ----


def load(path):
    """The library at path, with its functions declared."""
    library = ctypes.CDLL(path)
    for op, params in PARAMS.items():
        head = [POINTER(params), ingot_stream, POINTER(ingot_options)]
        for verb, tail in (
            ("", []),
            ("_workspace", [POINTER(c_uint64)]),
            ("_prepare", []),
            ("_explain", [c_int32, c_char_p, c_size_t, POINTER(c_size_t)]),
        ):
            getattr(library, f"ingot_{op}{verb}").argtypes = head + tail
    for name in ("status_name", "status_text", "last_error", "version_string"):
        getattr(library, f"ingot_{name}").restype = c_char_p
    library.ingot_last_error.argtypes = []
    library.ingot_set_log.argtypes = [c_int32, LogCallback, c_void_p]
    library.ingot_set_log.restype = None
    library.ingot_selection_digest.argtypes = [ingot_stream, POINTER(c_uint64)]
    library.ingot_implementation_get.argtypes = [c_int32, POINTER(ingot_implementation)]
    library.ingot_variant_get.argtypes = [c_int32, c_int32, POINTER(ingot_variant)]
    library.ingot_device_describe.argtypes = [ingot_stream, c_char_p, c_size_t, c_char_p, c_size_t, POINTER(c_int32)]
    return library


try:
    lib = load(PATH)
except OSError as error:
    raise ImportError(f"cannot load {PATH}: {error}\nBuild it (./test.sh does), or set INGOT_LIBRARY to libingot.so.")


class Refused(Exception):
    """A call that returned another status than INGOT_OK."""

    def __init__(self, status, sentence):
        super().__init__(f"{STATUS.get(status, status)}: {sentence}")
        self.status, self.name, self.sentence = status, STATUS.get(status), sentence


def _checked(status, library):
    if status:
        raise Refused(status, library.ingot_last_error().decode())


def implementations(operator=None):
    """Every implementation of the library as a dict, available on this machine or not."""
    found, one = [], ingot_implementation()
    while lib.ingot_implementation_get(len(found), byref(one)) == 0:
        row = {name: getattr(one, name) for name, _ in one._fields_}
        found.append({name: x.decode() if isinstance(x, bytes) else x for name, x in row.items()})
    return [x for x in found if operator in (None, x["operator_name"])]


def kernels(operator, family=None):
    """Names to force: the implementations of an operator that this machine's CPU can run."""
    return [
        f"{x['family']}/{x['name']}"
        for x in implementations(operator)
        if x["available"] and x["device_type"] == 0 and family in (None, x["family"])
    ]


# ---- arrays ----


def _eight(name):
    """(exponent bits, mantissa bits, bias, whether FNUZ) of an 8-bit type."""
    e5, fnuz = name.startswith("e5m2"), name.endswith("fnuz")
    return (5, 2, 15 + fnuz, fnuz) if e5 else (4, 3, 7 + fnuz, fnuz)


def _eight_table(name):
    ebits, mbits, bias, fnuz = _eight(name)
    code = np.arange(128)
    e, m = code >> mbits, code & ((1 << mbits) - 1)
    x = np.where(e > 0, np.ldexp(m + (1 << mbits), e - bias - mbits), np.ldexp(m, 1 - bias - mbits)).astype(np.float64)
    if not fnuz and ebits == 5:
        x[0x7C], x[0x7D:] = np.inf, np.nan
    if not fnuz and ebits == 4:
        x[0x7F] = np.nan
    both = np.concatenate([x, -x])
    if fnuz:
        both[0x80] = np.nan
    return both


EIGHT_TABLES = {name: _eight_table(name) for name in EIGHTS}


def encode_bits(values, dtype):
    """values rounded to nearest even into the storage of dtype. 8-bit types saturate; NaN stays NaN."""
    x = np.asarray(values)
    if dtype == "bf16":
        u = x.astype(np.float32).view(np.uint32).astype(np.uint64)
        rounded = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(x), ((u >> 16) | 0x40).astype(np.uint16), rounded)
    if dtype in EIGHTS:
        fnuz = _eight(dtype)[3]
        table = EIGHT_TABLES[dtype][:128]
        finite = table[np.isfinite(table)]
        a = np.abs(x.astype(np.float64))
        low = np.clip(np.searchsorted(finite, a, side="right") - 1, 0, len(finite) - 2)
        below, above = a - finite[low], finite[low + 1] - a
        code = low + ((above < below) | ((above == below) & (low % 2 == 1)))
        code = np.where(np.isnan(a), 0x80 if fnuz else 0x7F, code) | np.where(np.signbit(x) & ~np.isnan(a), 0x80, 0)
        return np.where((code == 0x80) & ~np.isnan(a) & fnuz, 0, code).astype(np.uint8)
    with np.errstate(over="ignore"):
        return x.astype(DTYPES[dtype][1])


def decode_bits(bits, dtype):
    """The exact values in double."""
    if dtype == "bf16":
        with np.errstate(invalid="ignore"):  # signalling NaN
            return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype in EIGHTS:
        return EIGHT_TABLES[dtype][bits]
    return bits.astype(np.float64)


@dataclass
class Array:
    bits: np.ndarray
    dtype: str
    junk: bool = False  # the strides of axes of extent <= 1 are nonsense

    @property
    def values(self):
        return decode_bits(self.bits, self.dtype)

    def tensor(self):
        t = ingot_tensor(data=self.bits.ctypes.data or None, dtype=DTYPES[self.dtype][0], ndim=self.bits.ndim)
        for axis in range(self.bits.ndim):
            t.shape[axis] = self.bits.shape[axis]
            t.stride[axis] = self.bits.strides[axis] // self.bits.itemsize
            if self.junk and self.bits.shape[axis] <= 1:
                t.stride[axis] = -12345
        return t


def encode(values, dtype):
    return Array(np.ascontiguousarray(encode_bits(values, dtype)).reshape(np.shape(values)), dtype)


def ints(values):
    return Array(np.ascontiguousarray(values, np.int32), "i32")


def empty(shape, dtype):
    """A compact array whose bits are no result: NaN where the type has one."""
    return Array(poison(np.empty(shape, DTYPES[dtype][1])), dtype)


def poison(bits):
    """Fills with one pattern: NaN in every floating type."""
    pattern = {8: 0x7FFFDEADDEADDEAD, 4: 0x7FC0DEAD, 2: 0x7FDD, 1: 0xFF}[bits.itemsize]
    bits.view({8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}[bits.itemsize])[...] = pattern
    return bits


# ---- calls ----


def make_params(op, **fields):
    params = PARAMS[op](struct_size=sizeof(PARAMS[op]))
    for name, value in fields.items():
        if value is None:
            continue
        if isinstance(value, (list, tuple)):
            for i, one in enumerate(value):
                getattr(params, name)[i] = one.tensor()
        else:
            setattr(params, name, value.tensor() if isinstance(value, Array) else value)
    return params


def make_options(**fields):
    encoded = {name: x.encode() if isinstance(x, str) else x for name, x in fields.items()}
    return ingot_options(struct_size=sizeof(ingot_options), **encoded)


CPU = ingot_stream()


def call(op, params, options=None, stream=CPU, library=lib):
    options = byref(make_options(**options)) if options else None
    _checked(getattr(library, f"ingot_{op}")(byref(params), stream, options), library)


def workspace(op, params, options=None, stream=CPU):
    size = c_uint64(2**64 - 1)
    options = byref(make_options(**options)) if options else None
    _checked(getattr(lib, f"ingot_{op}_workspace")(byref(params), stream, options, byref(size)), lib)
    return size.value


def explain(op, params, options=None, stream=CPU, fmt=TEXT):
    needed = c_size_t()
    verb = getattr(lib, f"ingot_{op}_explain")
    options = byref(make_options(**options)) if options else None
    _checked(verb(byref(params), stream, options, fmt, None, 0, byref(needed)), lib)
    text = ctypes.create_string_buffer(needed.value)
    _checked(verb(byref(params), stream, options, fmt, text, needed.value, byref(needed)), lib)
    return text.value.decode()


def _verb(op):
    def run(options=None, stream=CPU, **fields):
        call(op, make_params(op, **fields), options, stream)

    run.__name__ = op
    return run


attn_fwd, attn_bwd, attn_merge, kv_append, attn_dropout_mask = (_verb(op) for op in OPERATORS)
