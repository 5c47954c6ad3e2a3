#!/usr/bin/env python3
"""The form of the house: formatting, who may include whom, headers that compile alone, text files that are clean.

Usage: tests/house.py [--fix]    --fix lets clang-format rewrite the C files first
"""

import concurrent.futures
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
problems = []


def problem(path, line, text):
    problems.append(f"{path}:{line}: {text}" if line else f"{path}: {text}")


def files():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, check=True, capture_output=True).stdout.decode()
    return sorted(p for p in listed.split("\0") if p and (ROOT / p).is_file())


# ---- text ----

BINARY = {".safetensors", ".npy", ".npz", ".png", ".zst", ".pack", ".bin"}
INVISIBLE = re.compile("[\u00a0\u00ad\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff]")
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|placeh" r"older|HA" r"CK)\b")
MACHINE_PATH = re.compile(r"(?<![\w.$}~/-])/(?:home|root|work|Users|opt)/\w")
HOST = re.compile(r"https?://([^/\s\"'>)]+)")
HOSTS = {"arxiv.org", "www.apache.org", "docs.nvidia.com", "github.com", "doi.org", "dmlc.github.io"}


def check_text(path):
    data = (ROOT / path).read_bytes()
    if Path(path).suffix in BINARY or path.startswith("tests/fuzz/corpus/") or not data:
        return
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        problem(path, 0, f"not UTF-8: {error}")
        return
    if not text.endswith("\n") or text.endswith("\n\n"):
        problem(path, text.count("\n") + 1, "must end in exactly one newline")
    for number, line in enumerate(text.split("\n"), 1):
        if line != line.rstrip():
            problem(path, number, "trailing blank")
        if "\r" in line:
            problem(path, number, "carriage return")
        if INVISIBLE.search(line):
            problem(path, number, "invisible character")
        if re.match(r"(<{7}|={7}|>{7})( |$)", line):
            problem(path, number, "merge conflict marker")
        if path == "LICENSE":
            continue
        if UNFINISHED.search(line):
            problem(path, number, "unfinished work is finished or filed, not marked")
        if MACHINE_PATH.search(line) and not line.startswith("#!"):
            problem(path, number, "names a path of one machine")
        for host in HOST.findall(line):
            if host not in HOSTS:
                problem(path, number, f"names the host {host}; allowed are {', '.join(sorted(HOSTS))}")
        if Path(path).suffix == ".py" and re.match(r" *\t", line):
            problem(path, number, "Python is indented by spaces")


# ---- who may include whom ----

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.M)
PUBLIC = {"ingot.h", "ingot_dlpack.h"}
DRIVER = re.compile(r"^(dlfcn\.h|cuda(?!_(bf16|fp16|fp8)\.h).*\.h|hip/.*|nvml\.h|hsa/.*)$")  # types are no driver


def area(path):
    """The part of src a file belongs to: stage, operator, device, kernels/<family>, support."""
    parts = path.split("/")
    if len(parts) == 2:
        return "stage"
    if parts[1] == "kernels":
        return "/".join(parts[1:3])
    return parts[1]


def allowed(path, where, target):
    """Whether a file of that part may include that file of src."""
    if target.startswith("support/"):
        return True
    if where == "support":
        return False
    if target == "pipeline.h":
        return True
    if where == "device" and re.match(r"kernels/\w+/arch\.def$", target):
        return True
    if where.startswith("kernels/") and re.match(r"kernels/\w+\.h$", target):
        return True
    if path == "src/check.c" and target == "operator/operator.h":
        return True  # the check stage is the engine of the operators' field tables
    return where != "stage" and target.startswith(where + "/")


def check_includes(path):
    text = (ROOT / path).read_text()
    for match in INCLUDE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        name = match.group(1) or match.group(2)
        if path.startswith("src/"):
            if DRIVER.match(name) and area(path) != "device":
                problem(path, line, f"<{name}>: only src/device talks to a driver")
            beside = (ROOT / path).parent / name
            if match.group(1) and beside.exists():
                target = str(beside.resolve().relative_to(ROOT / "src"))
            elif (ROOT / "src" / name).exists():
                target = name
            else:
                if match.group(1) and name not in PUBLIC:
                    problem(path, line, f'"{name}": no such header in src')
                continue
            if not allowed(path, area(path), target):
                problem(path, line, f"{area(path)} must not include {target}")
        elif path.startswith(("tests/api/", "tests/double/", "tests/golden/", "examples/", "python/")):
            if name == "pipeline.h" or name.startswith(("support/", "kernels/", "device/")):
                problem(path, line, f"{name}: this program sees the public header only")
    if path.startswith("src/") and area(path) != "device":
        for match in re.finditer(r"\b(dlopen|dlsym)\s*\(", text):
            problem(path, text.count("\n", 0, match.start()) + 1, f"{match.group(1)}: only src/device opens drivers")
    if path.startswith("include/") and re.search(r"#\s*include\s*\"", text):
        problem(path, 0, "a public header includes system headers and its neighbours by <>")


# ---- headers alone ----

def x86_flags():
    definitions = ROOT / "src/kernels/x86/arch.def"
    if not definitions.exists() or os.uname().machine != "x86_64":
        return None
    flags = re.findall(r'^\s*ARCH\w*\([^"]*"([^"]*)"', definitions.read_text(), re.M)
    return sorted({flag for row in flags for flag in row.split()})


def check_header(path):
    # A text that each including file completes with its own constants says so, and is compiled with them alone.
    if "The including file defines" in (ROOT / path).read_text():
        return
    flags = ["-std=gnu17", "-D_GNU_SOURCE=", "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror",
             "-Wno-unused-function", "-Wno-unused-const-variable",
             "-Iinclude", "-Isrc", "-Itools", "-Itests"]
    if path.startswith("src/kernels/x86/"):
        extra = x86_flags()
        if extra is None:
            return
        flags += ["-O1"] + extra
    elif path.startswith("src/kernels/") and not path.startswith("src/kernels/reference/"):
        return
    done = subprocess.run(["gcc", *flags, "-x", "c", path], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        problem(path, 0, "does not compile alone:\n" + done.stderr)


# ---- format and size ----

def clang_format():
    pinned = re.search(r"^clang-format==(\S+)", (ROOT / "tests/requirements.txt").read_text(), re.M).group(1)
    beside = Path(sys.executable).parent / "clang-format"
    tool = str(beside) if beside.exists() else "clang-format"
    try:
        version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        version = "none"
    if pinned not in version:
        sys.exit(f"needs clang-format {pinned}, found {version.strip()}; run ./test.sh --setup, then .venv/bin/python tests/house.py")
    return tool


def check_format(sources, fix):
    if not sources:
        return
    tool = clang_format()
    if fix:
        subprocess.run([tool, "-i", *sources], cwd=ROOT, check=True)
    for start in range(0, len(sources), 20):
        done = subprocess.run([tool, "--dry-run", "--Werror", *sources[start:start + 20]],
                              cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            wrong = sorted(set(re.findall(r"^(\S+?):\d+:\d+: error", done.stderr, re.M)))
            for path in wrong:
                line = re.search(rf"^{re.escape(path)}:(\d+)", done.stderr, re.M).group(1)
                problem(path, int(line), "not as clang-format writes it; tests/house.py --fix")
            if not wrong:
                problem("clang-format", 0, done.stderr)


def sizes(sources):
    for path in sources:
        limit = 1500 if path.startswith("src/kernels/") else 600
        lines = (ROOT / path).read_text().count("\n")
        if path.startswith("src/") and lines > limit:
            print(f"note: {path} has {lines} lines, the target is {limit}")


def main():
    everything = files()
    kept = re.compile(r"^tests/golden/(ingot-.*\.h|layout-.*\.c)$")
    sources = [p for p in everything if Path(p).suffix in {".c", ".h", ".def", ".cu", ".hip"} and not kept.match(p)]
    headers = [p for p in sources if p.endswith(".h")]
    check_format([p for p in sources if not p.endswith(".def")], "--fix" in sys.argv[1:])
    for path in everything:
        check_text(path)
    for path in sources:
        check_includes(path)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(check_header, headers))
    sizes(sources)
    for text in problems:
        print(text)
    print(f"house: {len(everything)} files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
