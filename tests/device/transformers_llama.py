#!/usr/bin/env python3
"""A Llama of Transformers on a GPU with attention by Ingot, beside "sdpa": what it computes and tokens per second.

    INGOT_IMAGE_PATH=... python3 tests/device/transformers_llama.py [--layers N] [--json FILE]

The shape is Llama-3-8B's with fewer layers; weights are random. "sdpa" is PyTorch's choice of its kernels and, as "cudnn",
cuDNN's. The yardstick is the same model with attention in float32 (and all else as in the others): a logit or a loss of Ingot's
may be as far from it as sdpa's is, and half as much again. Exit status: 1 when it is farther.
"""
import argparse
import contextlib
import hashlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

import ingot.torch
import ingot.transformers
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def exact(module, query, key, value, attention_mask, **given):
    """"sdpa" in float32, the result rounded once."""
    out, _ = sdpa_attention_forward(module, query.float(), key.float(), value.float(), attention_mask, **given)
    return out.to(query.dtype), None


transformers.AttentionInterface.register("exact", exact)
transformers.AttentionMaskInterface.register("exact", transformers.masking_utils.sdpa_mask)
WAYS = {"ingot": "ingot", "sdpa": "sdpa", "cudnn": "sdpa"}


def backend(who):
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if who == "cudnn" else contextlib.nullcontext()


def rate(runs, tokens, rounds):
    """{who: tokens per second, and the spread over rounds}, in turns so that all see the same clock rates."""
    seconds = {who: [] for who in runs}
    for _ in range(2):
        for who, run in runs.items():
            run()
    for _ in range(rounds):
        for who, run in runs.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            seconds[who].append(time.perf_counter() - start)
    median = {who: statistics.median(x) for who, x in seconds.items()}
    return {who: dict(tokens_per_s=round(tokens / x), spread=round((max(seconds[who]) - min(seconds[who])) / x, 4)) for who, x in median.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a toy's shape, to try the program itself")
    parser.add_argument("--json")
    given = parser.parse_args()
    shape = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256)
    prompts, decoded, trained = [(1, 8192), (4, 2048)], [(1, 4096, 64), (16, 4096, 32)], [(1, 4096)]
    if given.small:
        shape = dict(hidden_size=128, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=300)
        prompts, decoded, trained = [(1, 128), (2, 64)], [(1, 64, 4)], [(1, 64)]
    config = transformers.LlamaConfig(**shape, num_hidden_layers=given.layers, rope_theta=500000.0, max_position_embeddings=8192 * 2)
    torch.manual_seed(0)
    with torch.device(given.device):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    for name, x in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:  # attention that has something to choose from
            x.data.mul_(2)
    if given.device == "cpu":
        torch.cuda.synchronize = lambda: None
        WAYS.pop("cudnn")
    folders = [Path(x) for x in os.environ.get("INGOT_IMAGE_PATH", "").split(":") if x]
    packs = {x.name: hashlib.sha256(x.read_bytes()).hexdigest() for folder in folders for x in sorted(folder.glob("*.pack"))}
    result = dict(
        device=torch.cuda.get_device_name() if given.device == "cuda" else "cpu", torch=torch.__version__,
        transformers=transformers.__version__, packs=packs, layers=given.layers, rows=[],
        parameters=sum(x.numel() for x in model.parameters()),
    )  # fmt: skip
    wrong = []

    def by(who, run):
        model.set_attn_implementation(WAYS.get(who, who))
        with backend(who):
            return run()

    def add(what, rows, errors):
        result["rows"].append(dict(what=what, who=rows, errors=errors))
        print(what, *(f"{who} {x['tokens_per_s']}/s (spread {x['spread']:.1%})" for who, x in rows.items()), sep="  ")
        for name, x in errors.items():
            print(f"    {name}: " + ", ".join(f"{who} {y:.3g}" for who, y in x.items()))
            if x["ingot"] > 1.5 * x["sdpa"] + 1e-7:
                wrong.append(f"{what}: {name}")

    ids = lambda b, s: torch.randint(0, config.vocab_size, (b, s), device=given.device, generator=torch.Generator(given.device).manual_seed(s))
    distance = lambda got, want: ((got.float() - want.float()).norm() / want.float().norm()).item()
    ingot.torch.statistics(reset=True)

    with torch.no_grad():
        for b, s in prompts:
            for padding in (0, s // 4) if b > 1 else (0,):
                x = ids(b, s)
                keep = None
                if padding:  # at the end of all sequences but the first, as in training
                    keep = torch.ones_like(x)
                    keep[1:, -padding:] = 0
                counts = slice(None) if keep is None else keep.bool()
                run = lambda: model(x, attention_mask=keep, use_cache=False).logits
                logits = lambda who: by(who, run)[counts]
                want = logits("exact")
                errors = {who: distance(logits(who), want) for who in WAYS if not (padding and who == "cudnn")}
                del want
                only = {who: (lambda who=who: by(who, lambda: model.model(x, attention_mask=keep, use_cache=False))) for who in errors}
                add(f"prefill {b} x {s}" + (f", {padding} of them padding" if padding else ""), rate(only, b * s, given.rounds), {"logits": errors})

        for b, s, steps in decoded:
            x, more = ids(b, s), ids(b, steps + 8)

            def decode(who, count=steps, keep=False):
                cache = caches[who]
                if cache.get_seq_length() > s:
                    cache.crop(s - cache.get_seq_length())
                out = [by(who, lambda: model(more[:, i : i + 1], past_key_values=cache).logits) for i in range(count)]
                return torch.cat(out, 1) if keep else None

            caches = {}
            for who in (*WAYS, "exact"):
                caches[who] = transformers.DynamicCache()
                by("sdpa", lambda: model.model(x, past_key_values=caches[who]))
            want = decode("exact", 8, True)
            errors = {who: distance(decode(who, 8, True), want) for who in WAYS}
            add(f"decode {b} x {steps} after {s}", rate({who: (lambda who=who: decode(who)) for who in WAYS}, b * steps, given.rounds), {"logits": errors})
            caches.clear()

    for b, s in trained:
        x = ids(b, s)

        def train(who, keep=False):
            model.zero_grad(set_to_none=True)
            loss = by(who, lambda: model(x, labels=x, use_cache=False).loss)
            by(who, loss.backward)
            return (loss.item(), [y.grad.clone() for name, y in model.named_parameters() if "layers.0.self_attn" in name]) if keep else None

        loss, grads = train("exact", True)
        found = {who: train(who, True) for who in WAYS}
        errors = {"loss": {who: abs(y[0] - loss) for who, y in found.items()}}
        far = lambda y: max(distance(a, c) for a, c in zip(y, grads))
        errors["gradients of the first layer's projections"] = {who: far(y[1]) for who, y in found.items()}
        print(f"loss: exact {loss:.6f}, " + ", ".join(f"{who} {y[0]:.6f}" for who, y in found.items()))
        # a loss is one number, which may come out exact by chance: its last bit in bf16 is the measure
        errors["loss"]["sdpa"] = max(errors["loss"]["sdpa"], loss * 2**-9)
        add(f"training step {b} x {s}", rate({who: (lambda who=who: train(who)) for who in WAYS}, b * s, given.rounds), errors)

    result["statistics"] = ingot.torch.statistics()
    print(result["statistics"])
    if given.json:
        with open(given.json, "w") as f:
            json.dump(result, f, indent=1)
            f.write("\n")
    for x in wrong:
        print(f"farther from the exact result than sdpa: {x}")
    if result["statistics"]["original"]:
        wrong.append("calls were left to sdpa")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
