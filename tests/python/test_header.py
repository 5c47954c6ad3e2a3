"""ingot_ctypes.py says of every struct and constant what the header says."""

import ctypes
import re
import shutil
import subprocess

import ingot_ctypes as ingot
import pytest


@pytest.fixture(scope="module")
def from_c(tmp_path_factory):
    """What a C program prints of the header: name -> number."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "needs a C compiler"
    lines = []
    for struct in ingot.STRUCTS:
        name = struct.__name__
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, _ in struct._fields_:
            lines.append(
                f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), ' f"sizeof((({name} *)0)->{field}));"
            )
    for name in CONSTANTS:
        lines.append(f'printf("{name} %lld\\n", (long long){name});')
    lines.append('#define X(name, number, text) printf(#name " %lld\\n", (long long)name);')
    lines.append("INGOT_STATUS_LIST(X)")
    where = tmp_path_factory.mktemp("header")
    (where / "print.c").write_text(
        "#define INGOT_EXPERIMENTAL\n#include <ingot.h>\n#include <stdio.h>\nint main(void) {\n"
        + "\n".join(lines)
        + "\nreturn 0;\n}\n"
    )
    subprocess.run(
        [compiler, "-std=c17", f"-I{ingot.HEADER.parent}", where / "print.c", "-o", where / "print"], check=True
    )
    out = subprocess.run([where / "print"], check=True, capture_output=True, text=True).stdout
    return {line.split()[0]: [int(x) for x in line.split()[1:]] for line in out.splitlines()}


CONSTANTS = {
    "INGOT_UNBOUNDED": ingot.UNBOUNDED,
    "INGOT_MASK_NONE": ingot.MASK_NONE,
    "INGOT_MASK_CAUSAL": ingot.MASK_CAUSAL,
    "INGOT_MASK_WINDOW": ingot.MASK_WINDOW,
    "INGOT_ALIGN_UNSET": ingot.ALIGN_UNSET,
    "INGOT_TOP_LEFT": ingot.TOP_LEFT,
    "INGOT_BOTTOM_RIGHT": ingot.BOTTOM_RIGHT,
    "INGOT_LSE_NATURAL": ingot.LSE_NATURAL,
    "INGOT_LSE_BASE2": ingot.LSE_BASE2,
    "INGOT_LENGTH_MAX": ingot.MAX,
    "INGOT_LENGTH_CUMULATIVE": ingot.CUMULATIVE,
    "INGOT_LENGTH_INDIVIDUAL": ingot.INDIVIDUAL,
    "INGOT_LENGTH_LAST_PAGE": ingot.LAST_PAGE,
    "INGOT_POSITION_IMPLIED": ingot.IMPLIED,
    "INGOT_POSITION_REUSE": ingot.REUSE,
    "INGOT_POSITION_ARRAY": ingot.ARRAY,
    "INGOT_DETERMINISTIC": ingot.DETERMINISTIC,
    "INGOT_BATCH_INVARIANT": ingot.BATCH_INVARIANT,
    "INGOT_STRICT": ingot.STRICT,
    "INGOT_TEXT": ingot.TEXT,
    "INGOT_JSON": ingot.JSON,
    "INGOT_MERGE_PARTS": ingot.MERGE_PARTS,
    "INGOT_VARLEN_COMPACT": ingot.varlen((1, 1, 1), (1, 1, 1)),
    "INGOT_VARLEN_PADDED": ingot.varlen((0, 1, 0), (0, 1, 0)),
    "INGOT_VARLEN_STRIDED": ingot.varlen((1, 1, 2), (1, 1, 2)),
    "INGOT_VARLEN(0,INGOT_SIDE(0,3,0),1)": ingot.varlen(k=(0, 3, 0), lse_layout=1),
    **{
        f"INGOT_{name}": ingot.DTYPES[key][0]
        for name, key in {
            "F32": "f32",
            "F16": "f16",
            "BF16": "bf16",
            "F8_E4M3": "e4m3",
            "F8_E5M2": "e5m2",
            "F8_E4M3_FNUZ": "e4m3fnuz",
            "F8_E5M2_FNUZ": "e5m2fnuz",
            "I32": "i32",
            "I64": "i64",
            "U64": "u64",
            "BOOL": "bool",
        }.items()
    },
}


@pytest.mark.parametrize("struct", ingot.STRUCTS, ids=lambda x: x.__name__)
def test_sizes_and_offsets(from_c, struct):
    name = struct.__name__
    assert from_c[name] == [ctypes.sizeof(struct)]
    for field, _ in struct._fields_:
        here = getattr(struct, field)
        assert from_c[f"{name}.{field}"] == [here.offset, here.size], f"{name}.{field}"


def test_every_field_is_mirrored():
    text = re.sub(r"/\*.*?\*/", "", ingot.HEADER.read_text(), flags=re.S)
    bodies = dict((name, body) for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", text, re.S))
    assert set(bodies) == {x.__name__ for x in ingot.STRUCTS}
    for struct in ingot.STRUCTS:
        fields = []
        for line in bodies[struct.__name__].split(";"):
            found = re.search(r"\(\*(\w+)\)", line) or re.search(r"(\w+)(\[\w+\])?(, \w+(\[\w+\])?)*\s*$", line)
            if found:
                fields += (
                    re.findall(r"(\w+)(?:\[\w+\])?(?=,|$)", line.strip())
                    if "(" not in line and "," in line
                    else [found.group(1)]
                )
        assert fields == [name for name, _ in struct._fields_], struct.__name__


def test_constants(from_c):
    for name, value in CONSTANTS.items():
        assert from_c[name] == [value], name


def test_statuses(from_c):
    listed = {name: x[0] for name, x in from_c.items() if name in ingot.STATUS.values()}
    assert listed == {name: number for number, name in ingot.STATUS.items()}
    count = len(re.findall(r"^\tX\(INGOT_\w+, \d+,", ingot.HEADER.read_text(), re.M))
    assert count == len(ingot.STATUS)
    for number, name in ingot.STATUS.items():
        assert ingot.lib.ingot_status_name(number).decode() == name
        assert ingot.lib.ingot_status_text(number)
    assert ingot.lib.ingot_status_name(7) == b"INGOT_?"


def test_names_in_c_are_not_repeated_in_the_mirror():
    text = ingot.HEADER.read_text()
    functions = set(re.findall(r"^INGOT_API [\w *]*?(ingot_\w+)\(", text, re.M))
    for name in functions:
        assert hasattr(ingot.lib, name), f"{name} is in the header but not in the library"
