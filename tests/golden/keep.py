#!/usr/bin/env python3
"""Keeps a release: its header, what a program compiled against it relies on, and its ABI's description.

Usage: tests/golden/keep.py VERSION     once a release, on the release build

  ingot-VERSION.h      the header, for program-VERSION.c
  layout-VERSION.c     every offset, size, number and prototype, as assertions on the header of today
  ingot-VERSION.abi    for abidiff: no symbol goes away
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests/golden"


def bare(text):
    return re.sub(r"/\*.*?\*/", " ", text, flags=re.S)


def structs(text):
    """(name, field names) of every struct; a field's name is the last word before `;`, `,` or its brackets."""
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\}\s*(\w+);", text, re.S):
        fields = []
        for declaration in body.split(";"):
            if not declaration.strip():
                continue
            pointer = re.search(r"\(\*(\w+)\)\s*\(", declaration)
            if pointer:
                fields.append(pointer.group(1))
            else:
                fields += re.findall(r"(\w+)\s*(?:\[\w+\])?\s*(?:,|$)", declaration.strip())
        yield name, fields


def numbers(text):
    """Names of enumerators and plain macros that stand for a number."""
    for body in re.findall(r"enum \w*\s*\{([^#]*?)\}", text, re.S):
        yield from re.findall(r"\b(INGOT_[A-Z0-9_]+)\b\s*(?==|,|$)", body)
    for body in re.findall(r"#define INGOT_STATUS_LIST\(X\)((?:.*\\\n)*.*)", text):
        yield from re.findall(r"X\((INGOT_\w+),", body)
    yield from re.findall(r"^#define (INGOT_\w+) (?:0x[0-9A-Fa-f]+u|\d+|INT32_MAX)$", text, re.M)


def write_layout(version, header):
    stable = bare(header.split("#ifdef INGOT_EXPERIMENTAL")[0])
    sizes, lines = [], []
    for name, fields in structs(stable):
        grows = fields[0] == "struct_size"
        sizes.append((name, ">=" if grows else "=="))
        lines += [(name, field) for field in fields]
    pinned = [n for n in dict.fromkeys(numbers(stable)) if not re.match(r"INGOT_VERSION_(MAJOR|MINOR|PATCH)$", n)]
    program = ["#include <ingot.h>", "#include <stdio.h>", "int main(void) {"]
    for name, relation in sizes:
        program.append(f'printf("_Static_assert(sizeof({name}) {relation} %zu, \\"{name}\\");\\n", sizeof({name}));')
    for name, field in lines:
        program.append(f'printf("_Static_assert(offsetof({name}, {field}) == %zu && sizeof((({name} *)0)->{field}) == %zu, '
                       f'\\"{name}.{field}\\");\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));')
    for name in pinned:
        program.append(f'printf("_Static_assert({name} == %lld, \\"{name}\\");\\n", (long long){name});')
    program.append("return 0; }")
    with tempfile.TemporaryDirectory() as work:
        source, binary = Path(work) / "layout.c", Path(work) / "layout"
        source.write_text("\n".join(program))
        subprocess.run(["gcc", "-std=c17", f"-I{ROOT / 'include'}", str(source), "-o", str(binary)], check=True)
        asserted = subprocess.run([str(binary)], check=True, capture_output=True, text=True).stdout
    prototypes = re.findall(r"^INGOT_API [^;{]*\);", stable, re.M)
    (GOLDEN / f"layout-{version}.c").write_text(
        f"/*\n * What programs compiled against release {version} rely on, as assertions on the header of today. Written by keep.py\n"
        " * at the release and never edited: a struct with a struct_size may grow at its end, all else stays.\n */\n"
        "#include <ingot.h>\n\n" + asserted + "\n/* A prototype that differs from today's is an error. */\n"
        + "\n".join(re.sub(r"\s+", " ", p) for p in prototypes) + "\n")


def main():
    if len(sys.argv) != 2 or not re.fullmatch(r"\d+\.\d+", sys.argv[1]):
        sys.exit(__doc__)
    version = sys.argv[1]
    kept = [GOLDEN / f"ingot-{version}.h", GOLDEN / f"ingot-{version}.abi", GOLDEN / f"layout-{version}.c"]
    for path in kept:
        if path.exists():
            sys.exit(f"{path.relative_to(ROOT)} is kept already and never changes")
    header = (ROOT / "include/ingot.h").read_text()
    kept[0].write_text(header)
    write_layout(version, header)
    experimental = re.findall(r"^INGOT_API [^;{]*?(ingot_\w+)\(", header.split("#ifdef INGOT_EXPERIMENTAL")[1], re.M)
    with tempfile.NamedTemporaryFile("w", suffix=".abignore") as ignore:
        ignore.write(f"[suppress_function]\nsymbol_name_regexp = ^({'|'.join(experimental)})$\ndrop = yes\n")
        ignore.flush()
        abi = subprocess.run(
            ["abidw", "--no-show-locs", "--no-comp-dir-path", "--no-corpus-path", "--suppressions", ignore.name,
             "build/release/libingot.so"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    # Where the tree lay does not belong to the description.
    kept[1].write_text(abi.replace(f"{ROOT}/", ""))


if __name__ == "__main__":
    main()
