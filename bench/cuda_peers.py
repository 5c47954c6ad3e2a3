#!/usr/bin/env python3
"""Ingot beside PyTorch's attention on one NVIDIA GPU: the rows of bench/suite.txt, every peer in the same process, in turns.

    bench/cuda_peers.py --json FILE --html FILE [--suite FILE] [--rows T1,T5] [--op fwd,bwd] [--backend NAME ...]
                        [--repeats N] [--seconds X] [--data KIND,KIND]
    bench/cuda_peers.py --from-json FILE ... --html FILE          draws the page again, without a GPU

Measuring needs torch with CUDA, and libingot with its packs (INGOT_LIBRARY, INGOT_IMAGE_PATH). A line for each row, operator and
implementation: the median time, its rate by the exact pair count (decoding rows: by bytes of K and V), its share of what a large
matrix product (decoding rows: a read of memory) reached in the same rounds, the spread (third minus first quartile over median),
the error against fp64 on the same inputs and whether it passes the rule of docs/concepts.md, and the ratio of the best peer's time
to Ingot's. --json is written after every row, and the same command goes on where it was stopped. Inputs are normal unless --data
names kinds that are hard on a softmax: grow30 and grow300 (scores rise by so many nats along the keys), fall300, saw150 (a sawtooth
of 896 keys), outliers (two loud channels, a loud first key), late (one key near the end outweighs all), cold (all scores near
-200), loud (q and k times 30), minilm (what the attention of a real sentence model read, examples/minilm.safetensors; needs the package safetensors).
"""
import argparse
import json
import os
import sys
import time
from pathlib import Path

import page
import suite
from commit import commit

ROOT = Path(__file__).resolve().parent.parent


def told(line):
    """A line of the table."""
    head = f"{line['row']:6} {line['data'] + ' ' if line['data'] != 'normal' else ''}{line['op']} {line['who']:28} "
    if "refused" in line:
        return head + f"refused: {line['refused']}"
    rate = f"{line['gbs']:7.0f} GB/s   " if "gbs" in line else f"{line['tflops']:7.1f} TFLOP/s"
    checks = f"err {line['err']:.1e} {'' if line['ok'] else 'WRONG '}{'' if line.get('repeats', True) else 'NOT REPEATABLE '}"
    beside = f"{line['best']}/ingot {line['ratio']:5.2f}" if line.get("ratio") else "no peer"
    end = f" {beside}  {line['runs']}" if "ratio" in line else ""
    return head + f"{line['ms']:9.4f} ms {rate} {line['share']:4.0%}  +-{line['spread']:4.0%}  {checks}{end}"


def keep(path, result):
    """Whole or not at all: a run may be stopped at any time."""
    partial = Path(f"{path}.part")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def begun(path, head):
    """The result so far in a file; it must be of the same code on the same device."""
    if not path or not Path(path).exists():
        return head | dict(rows=[])
    result = json.loads(Path(path).read_text(encoding="utf-8"))
    other = [name for name in head if name != "date" and result.get(name) != head[name]]
    if other:
        raise SystemExit(f"{path} is of another {', '.join(other)}; name another --json")
    return result


def measure(args, rows):
    sys.path.insert(0, str(ROOT / "tests/python"))
    import cuda_rows

    clock, limits = cuda_rows.Clock(), cuda_rows.Limits()
    head = cuda_rows.device() | dict(driver=clock.driver, commit=commit())
    result = begun(args.json, head | dict(date=time.strftime("%Y-%m-%d")))
    print("# " + ", ".join(f"{name} {x}" for name, x in head.items()))
    try:
        for row in rows:
            # A name forced for the one operator says nothing of the other.
            other = "attn_bwd" if row.problem.op == "fwd" else "attn_fwd"
            backends = [x for x in args.backend or [""] if other not in x]
            for data in args.data.split(",") if backends else []:
                mine = lambda x: (x["row"], x["problem"], x["data"]) == (row.name, row.text, data)
                have = {x["who"] for x in result["rows"] if mine(x)}
                if have >= {f"ingot:{x}" if x else "ingot" for x in backends}:
                    print(f"{row.name:6} {row.problem.op} is in {args.json}")
                    continue
                try:
                    lines, took = cuda_rows.measure(row, backends, args.repeats, args.seconds, data, limits, clock)
                except cuda_rows.torch.OutOfMemoryError as error:
                    lines, took = [cuda_rows.head(row, data) | dict(who="ingot", refused=cuda_rows.sentence(error))], 0
                for line in lines:
                    print(told(line), flush=True)
                result["rows"] = [x for x in result["rows"] if not mine(x)] + lines
                print(f"# {row.name} {row.problem.op} took {took:.1f} s", flush=True)
                if args.json:
                    keep(args.json, result)
                cuda_rows.torch.cuda.empty_cache()
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from {args.json}" if args.json else "stopped")
    finally:
        clock.close()
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default=str(ROOT / "bench/suite.txt"))
    parser.add_argument("--rows", default="", help="names, as T1,T5; else all")
    parser.add_argument("--op", default="fwd,bwd")
    parser.add_argument("--backend", action="append", default=[], help="an implementation to force, besides or instead of the choice")
    parser.add_argument("--repeats", type=int, default=20, help="rounds of a row (20)")
    parser.add_argument("--seconds", type=float, default=5, help="no further round of a row once they took so long (5)")
    parser.add_argument("--data", default="normal")
    parser.add_argument("--json", help="results; a file that exists is gone on with")
    parser.add_argument("--html", help="a page of the results")
    parser.add_argument("--from-json", nargs="+", default=[], help="draw results that are there")
    args = parser.parse_args()
    if args.from_json:
        if not args.html:
            parser.error("--from-json draws a page: --html says where")
        results = [json.loads(Path(x).read_text(encoding="utf-8")) for x in args.from_json]
    else:
        rows = suite.read(args.suite)
        wanted = [x for x in args.rows.split(",") if x]
        unknown = set(wanted) - {x.name for x in rows}
        if unknown:
            parser.error(f"{args.suite} has no row {', '.join(sorted(unknown))}")
        results = [measure(args, [x for x in rows if (not wanted or x.name in wanted) and x.problem.op in args.op.split(",")])]
    if args.html:
        Path(args.html).write_text(page.page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
