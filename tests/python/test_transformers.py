"""ingot.transformers: tiny random models of Transformers, their attention by Ingot, held to the same models in double and to
Transformers' own attention in the same type; generation, training, and what is left to "sdpa"."""

import copy
import os
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (tests/requirements-torch.txt)")
os.environ["HF_HUB_OFFLINE"] = "1"
tf = pytest.importorskip("transformers", reason="transformers is not installed (tests/requirements-torch.txt)")
pytestmark = pytest.mark.torch

import ingot
import ingot.torch as it
import ingot.transformers as itf
from devices import device, here, rand  # noqa: F401
from transformers.masking_utils import sdpa_mask

tf.logging.set_verbosity_error()
SMALL = dict(
    vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
DECODER = dict(SMALL, num_key_value_heads=2)
# Of float32 logits whose sums are taken in two orders; whether a result is right is `held` by the rule.
NEAR = dict(rtol=0, atol=1e-5)
# Each has what the others have not: grouped heads; a window; windows in turns, softcap and a scale; sinks and experts.
DECODERS = {
    "llama": lambda: tf.LlamaConfig(**DECODER),
    "mistral": lambda: tf.MistralConfig(**DECODER, sliding_window=6),
    "gemma2": lambda: tf.Gemma2Config(
        **DECODER, head_dim=24, sliding_window=6, attn_logit_softcapping=5.0, query_pre_attn_scalar=40
    ),
    "gpt_oss": lambda: tf.GptOssConfig(
        **DECODER, head_dim=16, sliding_window=6, num_local_experts=3, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"], initial_context_length=64,
    ),
}  # fmt: skip
ENCODERS = {
    "bert": lambda: tf.BertConfig(**SMALL),
    "modernbert": lambda: tf.ModernBertConfig(
        **SMALL, local_attention=8, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2
    ),
}
# Of these the masks are added to the scores by the model itself, in all of its layers or in some, or there is no mask without
# padding and nothing in the layers says that they are not causal.
OWN = {
    "bloom": (tf.AutoModelForCausalLM, lambda: tf.BloomConfig(vocab_size=99, hidden_size=64, n_layer=2, n_head=4)),
    "bigbird_pegasus": (
        tf.BigBirdPegasusModel,
        lambda: tf.BigBirdPegasusConfig(
            vocab_size=99, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=128, attention_type="original_full",
        ),
    ),
    "splinter": (tf.SplinterModel, lambda: tf.SplinterConfig(**SMALL)),
}  # fmt: skip
SPARSE = dict(
    SMALL, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
    n_routed_experts=4, n_shared_experts=1, moe_intermediate_size=32, num_experts_per_tok=2, n_group=2, topk_group=1,
    index_topk=5, index_n_heads=2, index_head_dim=16,
)  # fmt: skip
# Layers that choose the keys that they attend to, single ones or blocks.
CHOOSING = {
    "deepseek_v32": lambda: tf.DeepseekV32Config(**SPARSE),
    "minimax_m3": lambda: tf.MiniMaxM3VLTextConfig(
        **DECODER, head_dim=16, num_local_experts=4, num_experts_per_tok=2, index_block_size=4, index_topk_blocks=2,
        index_local_blocks=1, index_n_heads=2, index_head_dim=16, layer_types=["full_attention", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "dense"], dense_intermediate_size=96, shared_intermediate_size=32,
    ),
}  # fmt: skip
TEXTBOOK = "textbook"


def textbook(module, query, key, value, attention_mask, dropout=0.0, scaling=None, softcap=None, s_aux=None,
             position_bias=None, **_):  # fmt: skip
    """Attention as it is written down, in the type of its arguments, with every mask as a tensor."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if position_bias is not None:
        scores = scores + position_bias
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask[..., : key.shape[2]], torch.finfo(scores.dtype).min)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2), None


tf.AttentionInterface.register(TEXTBOOK, textbook)
tf.AttentionMaskInterface.register(TEXTBOOK, lambda **x: sdpa_mask(**{**x, "allow_is_causal_skip": False}))


def build(kind, config, implementation="ingot"):
    torch.manual_seed(7)
    experts = any(hasattr(config, x) for x in ("num_experts_per_tok", "num_local_experts"))
    how = dict(experts_implementation="eager") if experts else {}
    make = kind.from_config if hasattr(kind, "from_config") else kind._from_config
    model = make(config, attn_implementation=implementation, **how).eval()
    for name, x in model.named_parameters():
        # away from the uniform softmax of an untrained model
        x.data.mul_(4.0) if "q_proj" in name or "query" in name or "Wqkv" in name else None
        x.data.normal_() if "sinks" in name else None
    return model


def decoder(name, implementation="ingot"):
    return build(tf.AutoModelForCausalLM, DECODERS[name](), implementation)


def tokens(rows=3, length=17):
    return here(torch.randint(3, 99, (rows, length), generator=torch.Generator().manual_seed(2), device="cpu"))


def padded(side, rows=3, length=17):
    """None, or which tokens count: the first row has 5 tokens less, the second 2."""
    if side == "none":
        return None
    keep = torch.arange(length).expand(rows, -1) >= torch.tensor([5, 2, 0])[:rows, None]
    return (keep.flip(1) if side == "right" else keep).long()


def held(found, exact, own):
    """As near to the exact result as Transformers' own computation in this type, which takes its sums in another order."""
    error, allowed = ((x.double() - exact).abs().max() for x in (found, own))
    assert error <= 2 * allowed + 1e-7 * exact.abs().max(), (error, allowed)


def by(model, implementation, *args, **given):
    model.set_attn_implementation(implementation)
    return model(*args, **given)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_logits(name, side):
    model = decoder(name) if name in DECODERS else build(tf.AutoModelForMaskedLM, ENCODERS[name]())
    ids, keep = tokens(), padded(side)
    counts = keep.bool() if keep is not None else torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        run = lambda m, how: by(m, how, ids, attention_mask=keep).logits[counts]
        got = run(model, "ingot")
        assert it.statistics() == {"ingot": 2, "original": {}}
        held(got, run(copy.deepcopy(model).double(), TEXTBOOK), run(model, "eager"))


@pytest.mark.parametrize("name", DECODERS)
def test_masks_have_no_size(name, monkeypatch):
    """What these masks say goes to the kernels as numbers: no mask of queries times keys is made, and none is passed."""
    seen = []
    run = itf._operator
    monkeypatch.setattr(itf, "_operator", lambda *x, **y: (seen.append((x[3], x[7], x[12:16])), run(*x, **y))[1])
    monkeypatch.setattr(itf, "_plain", lambda *_: None)
    monkeypatch.setattr(itf, "sdpa_mask", None)
    model = decoder(name)
    full, band = (1, 2, 0, 0), (2, 2, 5, 0)
    bands = {"llama": [full, full], "mistral": [band, band], "gemma2": [band, full], "gpt_oss": [band, full]}[name]
    with torch.no_grad():
        model(tokens())
        assert [x[0] is None and x[1] is None for x in seen] == [True] * 2 and [x[2] for x in seen] == bands
        seen.clear()
        model(tokens(), attention_mask=padded("left"))
        assert [tuple(x[0].shape) for x in seen] == [(3, 1, 1, 17)] * 2 and [x[2] for x in seen] == bands
        seen.clear()
        model(tokens(), attention_mask=padded("right"))
        assert [x[1].tolist() for x in seen] == [[12, 15, 17]] * 2 and all(x[0] is None for x in seen)
        assert [x[2] for x in seen] == [(x[0], 1, *x[2:]) for x in bands]


@pytest.mark.parametrize("name", DECODERS)
def test_a_cache_is_continued(name):
    """Chunks of a prompt, then tokens: as if it had been seen at once, with rows padded at the left."""
    model, ids = decoder(name), tokens()
    exact = copy.deepcopy(model).double()
    for keep in (padded("left"), None):
        counts = keep.bool() if keep is not None else torch.ones_like(ids, dtype=torch.bool)
        places = (counts.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            run = lambda m, how: by(m, how, ids, attention_mask=keep, position_ids=places).logits[counts]
            want, own = run(exact, TEXTBOOK), run(model, "eager")
            model.set_attn_implementation("ingot")
            for cache in (tf.DynamicCache(), tf.DynamicCache(config=model.config)):
                parts = []
                for start, end in ((0, 8), (8, 15), (15, 16), (16, 17)):
                    given = dict(attention_mask=None if keep is None else keep[:, :end], past_key_values=cache)
                    parts.append(model(ids[:, start:end], position_ids=places[:, start:end], **given).logits)
                held(torch.cat(parts, 1)[counts], want, own)
    assert it.statistics()["original"] == {}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation(name, cache):
    """Greedy tokens and their scores are those of Transformers' own attention."""
    model, ids, keep = decoder(name), tokens(), padded("left")
    given = dict(
        attention_mask=keep, max_new_tokens=9, do_sample=False, cache_implementation=cache, disable_compile=True,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    found = {}
    for how in ("eager", "ingot"):
        model.set_attn_implementation(how)
        it.statistics(reset=True)
        found[how] = model.generate(ids, **given)
    assert it.statistics() == {"ingot": 9 * 2, "original": {}}
    assert torch.equal(found["ingot"].sequences, found["eager"].sequences)
    for got, want in zip(found["ingot"].logits, found["eager"].logits):
        assert torch.allclose(got, want, **NEAR)


@pytest.mark.parametrize("name", DECODERS)
def test_continuous_batching(name):
    """paged|ingot: prompts of several lengths in one batch, longer than a window and a block."""
    model = decoder(name, "eager")
    prompts = [x[:n].tolist() for x, n in zip(tokens(4, 23), (3, 23, 9, 14))]
    want = []
    for x in prompts:
        out = model.generate(torch.tensor([x]), max_new_tokens=7, do_sample=False)
        want.append(out[0, len(x) :].tolist())
    model.set_attn_implementation("paged|ingot")
    it.statistics(reset=True)
    batching = tf.ContinuousBatchingConfig(block_size=8, num_blocks=32, max_batch_tokens=24)
    got = model.generate_batch(
        prompts, generation_config=tf.GenerationConfig(max_new_tokens=7, do_sample=False, eos_token_id=-1),
        continuous_batching_config=batching, progress_bar=False,
    )  # fmt: skip
    counted = it.statistics()
    assert [x.generated_tokens for x in got.values()] == want
    assert counted["ingot"] >= 2 * 8 and counted["original"] == {}


@pytest.mark.parametrize("name", [*DECODERS, "bert"])
def test_training(name):
    """Loss and gradients of every parameter, sinks included, with padding."""
    if name == "bert":
        model = build(tf.AutoModelForMaskedLM, ENCODERS[name]())
    else:
        model = decoder(name)
    ids, keep = tokens(), padded("right")
    labels = ids.masked_fill(keep == 0, -100)

    def run(m, how):
        m.zero_grad()
        loss = by(m, how, ids, attention_mask=keep, labels=labels).loss
        loss.backward()
        return [loss.detach(), *(x.grad for x in m.parameters() if x.grad is not None)]

    got = run(model, "ingot")
    got = [x.clone() for x in got]
    assert it.statistics() == {"ingot": 2, "original": {}}
    exact = run(copy.deepcopy(model).double(), TEXTBOOK)
    own = run(model, "eager")
    assert len(got) == len(exact) == len(own)
    for x, y, z in zip(got, exact, own):
        # a sum over tokens may round either way by chance where it is small, so the largest of each is the measure
        assert (x.double() - y).abs().max() <= 4 * (z.double() - y).abs().max() + 3e-7 * max(y.abs().max(), 1e-2)


def test_dropout_in_training():
    config = DECODERS["llama"]()
    config.attention_dropout = 0.4
    model = build(tf.AutoModelForCausalLM, config).train()
    ids = tokens()
    torch.manual_seed(1)
    first = model(ids).logits
    torch.manual_seed(1)
    assert torch.equal(model(ids).logits, first)
    assert not torch.allclose(model(ids).logits, first, atol=1e-3)
    with torch.no_grad():
        runs = torch.stack([model(ids).logits for _ in range(30)])
        want = model.eval()(ids).logits
        assert it.statistics()["original"] == {}
        model.set_attn_implementation("sdpa")
        model.train()
        theirs = torch.stack([model(ids).logits for _ in range(30)])
    spread = theirs.std(0).mean()
    assert abs(runs.std(0).mean() / spread - 1) < 0.1
    assert (runs.mean(0) - want).abs().mean() < 2 * (theirs.mean(0) - want).abs().mean() + 1e-3


@pytest.mark.parametrize("config", [tf.T5Config, tf.UMT5Config])
def test_encoder_and_decoder(config):
    """T5: a learned bias of positions in every layer, and attention across. The decoder of UMT5 does not say of itself that it
    is causal."""
    config = config(
        vocab_size=99, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, pad_token_id=0, decoder_start_token_id=0
    )
    # one each, as the stacks keep what they were made with
    models = {how: build(tf.AutoModelForSeq2SeqLM, config, how) for how in ("ingot", "eager", TEXTBOOK)}
    ids, target, keep = tokens(), tokens(3, 11), padded("right")
    with torch.no_grad():
        run = lambda m: m(input_ids=ids, attention_mask=keep, decoder_input_ids=target).logits
        got = run(models["ingot"])
        assert it.statistics() == {"ingot": 6, "original": {}}
        held(got, run(models[TEXTBOOK].double()), run(models["eager"]))
    found = [models[x].generate(ids, attention_mask=keep, max_new_tokens=6, do_sample=False) for x in ("eager", "ingot")]
    assert torch.equal(*found)


def test_masks_of_the_caller():
    """Four axes, boolean or added, are taken as they are; so are several sequences in one row, told by their positions."""
    model, ids = decoder("llama"), tokens()
    keep = torch.ones(17, 17, dtype=torch.bool).tril() & (rand(3, 1, 17, 17) > 0.2) | torch.eye(17, dtype=torch.bool)
    added = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    packed = torch.cat([torch.arange(9), torch.arange(8)])[None].expand(3, -1)
    for given in (dict(attention_mask=keep), dict(attention_mask=added), dict(position_ids=packed, use_cache=False)):
        with torch.no_grad():
            got, want = (by(model, x, ids, **given).logits for x in ("ingot", "sdpa"))
        assert torch.allclose(got, want, **NEAR)
    assert it.statistics() == {"ingot": 6, "original": {}}


def test_any_mask(device, rng):
    """Whatever lengths, offsets and padding a model may ask a mask for: attention with it is attention with its tensor."""
    masks, seen = tf.masking_utils, set()
    module = torch.nn.Module()
    for _ in range(300):
        kind = rng.choice(["causal", "both", "band", "both band", "chunks"])
        size, rows, offset = (int(x) for x in rng.integers(1, 7, 3))
        offset = max(0, offset - 2)
        fixed = int(rng.integers(0, 4)) if rng.random() < 0.4 else 0  # a cache of fixed size, with room for more
        start = int(rng.integers(0, offset + 1)) if rng.random() < 0.3 else 0  # or one that has dropped its first keys
        keys = offset + rows - start + fixed
        function = {
            "causal": masks.causal_mask_function, "both": masks.bidirectional_mask_function,
            "band": masks.sliding_window_causal_mask_function(size), "both band": masks.sliding_window_bidirectional_mask_function(size),
            "chunks": masks.chunked_causal_mask_function(size, torch.zeros(2, dtype=torch.int)),
        }[kind]  # fmt: skip
        padding = rng.choice(["none", "left", "right", "any", "short"])
        keep = torch.from_numpy(rng.random((2, start + keys)) < 0.6)
        if padding in ("left", "right"):
            keep = keep.sort(1, descending=padding == "right")[0]
        elif padding == "short":  # as a cache of fixed size has it: nothing of what is not there yet
            keep = torch.ones(2, start + keys - fixed, dtype=torch.bool)
        given = dict(
            batch_size=2, q_length=rows, kv_length=keys, q_offset=offset, kv_offset=start, mask_function=function,
            attention_mask=None if padding == "none" else here(keep), device=device, dtype=torch.float32,
            **(dict(local_size=size) if "band" in kind or kind == "chunks" else {}),
        )  # fmt: skip
        skips = "allow_is_bidirectional_skip" if "both" in kind else "allow_is_causal_skip"
        # with room for more and one query, Transformers always asks for a tensor; of chunks it leaves some out
        skip = rng.random() < 0.8 and kind != "chunks" and not (fixed and rows == 1)
        given |= dict(allow_is_causal_skip=False) | {skips: bool(skip)}
        full = sdpa_mask(**{**given, skips: False})
        q = here(torch.from_numpy(rng.normal(size=(2, 4, rows, 16))).float())
        k, v = (here(torch.from_numpy(rng.normal(size=(2, 2, keys, 16))).float()) for _ in range(2))
        mask = itf.mask(**given)
        seen.add((type(mask), kind))
        got, _ = itf.attention(module, q, k, v, mask, is_causal="both" not in kind)
        want, _ = textbook(module, q, k, v, full)
        any_key = full.any(-1).expand(2, 4, -1).transpose(1, 2)
        error = (got - want)[any_key].abs().max() if any_key.any() else 0
        assert error < 2e-6, (kind, size, rows, offset, start, fixed, padding, error, type(mask), given)
        if isinstance(mask, itf._Mask):
            assert torch.equal(mask.dense(), full)
    assert len(seen) >= 10, seen


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", OWN)
def test_models_that_add_the_mask_themselves(name, side):
    """They get what eager's do, and whoever gains nothing by "ingot" is told."""
    kind, config = OWN[name]
    itf._look_up.cache_clear()
    ids, keep = tokens(), padded(side)
    models = [build(kind, config(), x) for x in ("ingot", "eager")]
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got, want = (m(ids, attention_mask=keep)[0] for m in models)
    counts = keep.bool() if keep is not None and got.shape[1] == ids.shape[1] else slice(None)
    assert torch.allclose(got[counts], want[counts], **NEAR)
    nothing = [x for x in told if "compute their attention themselves" in str(x.message)]
    assert len(nothing) == (name == "bloom") and bool(it.statistics()["ingot"]) == (name != "bloom")


def test_a_mask_that_eager_leaves_out():
    """Informer halves its sequences between layers, which is right only as long as there is no mask."""
    config = tf.InformerConfig(
        prediction_length=5, context_length=14, lags_sequence=[1, 2, 7], num_time_features=2, d_model=32, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32,
    )  # fmt: skip
    given = dict(
        past_values=rand(2, 21), past_time_features=rand(2, 21, 2), past_observed_mask=torch.ones(2, 21),
        future_values=rand(2, 5), future_time_features=rand(2, 5, 2),
    )  # fmt: skip
    found = []
    for how in ("ingot", "eager"):
        model = build(tf.InformerModel, config, how)
        torch.manual_seed(1)  # it samples keys
        with torch.no_grad():
            found.append(model(**given).last_hidden_state)
    assert torch.allclose(*found, **NEAR) and it.statistics()["ingot"] == 2


@pytest.mark.parametrize("name", CHOOSING)
def test_models_that_choose_keys(name):
    model = build(tf.AutoModelForCausalLM, CHOOSING[name]())
    with torch.no_grad():
        got, own = (by(model, x, tokens()).logits for x in ("ingot", "eager"))
        held(got, by(copy.deepcopy(model).double(), "eager", tokens()).logits, own)
    assert it.statistics() == {"ingot": 2, "original": {}}
    module = torch.nn.Module()
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ingot.UnsupportedError, match="block_indices"):
        itf.attention(module, q, q, q, None, block_indices=torch.zeros(1, 2, 4, 1, dtype=torch.int64))


@pytest.mark.parametrize("name", [*DECODERS, "t5"])
def test_weights(name):
    """output_attentions gives what eager gives, by plain PyTorch, and says so."""
    if name == "t5":
        config = tf.T5Config(vocab_size=99, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0)
        models = [build(tf.AutoModelForSeq2SeqLM, config, x) for x in ("ingot", "eager")]
        given = dict(decoder_input_ids=tokens(3, 11))
    else:
        models = [decoder(name, x) for x in ("ingot", "eager")]
        given = {}
    ids, keep = tokens(), padded("right")
    with torch.no_grad():
        got, want = (m(ids, attention_mask=keep, output_attentions=True, **given) for m in models)
    assert it.statistics()["original"] == {"output_attentions": 6 if name == "t5" else 2}
    for kind in ("encoder_attentions", "decoder_attentions", "cross_attentions") if name == "t5" else ("attentions",):
        assert len(got[kind]) == len(want[kind]) == 2
        for x, y in zip(got[kind], want[kind]):
            assert torch.allclose(x, y, **NEAR)
    counts = slice(None) if name == "t5" else keep.bool()
    assert torch.allclose(got.logits[counts], want.logits[counts], **NEAR)


@pytest.mark.parametrize("kind", ["float", "double", "weights"])
@pytest.mark.parametrize("name", DECODERS)
def test_stacked_sequences(name, kind):
    """cu_seq_lens_q and its siblings, as FlashAttention has them: two sequences in one row do not see each other."""
    model = decoder(name)
    if kind == "double":
        model.double()
    ids = tokens(1, 24)
    cu = torch.tensor([0, 9, 24], dtype=torch.int32)
    given = dict(position_ids=torch.cat([torch.arange(9), torch.arange(15)])[None], cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    with torch.no_grad():
        want = torch.cat([model(ids[:, :9]).logits, model(ids[:, 9:]).logits], 1)
        it.statistics(reset=True)
        for more in (dict(max_length_q=15, max_length_k=15), {}):
            got = model(ids, **given, **more, output_attentions=kind == "weights")
            assert torch.allclose(got.logits, want, **NEAR)
            assert kind != "weights" or got.attentions[0].shape == (1, 4, 24, 24)
        counted = it.statistics()
        assert counted["ingot"] == (4 if kind == "float" else 0) and sum(counted["original"].values()) == 4 - counted["ingot"]
        with pytest.raises(ingot.UnsupportedError, match="batch of 3"):
            model(tokens(), cu_seq_lens_q=cu, cu_seq_lens_k=cu)
        with pytest.raises(ingot.UnsupportedError, match="both are needed"):
            model(ids, cu_seq_lens_q=cu)


def test_a_mask_of_other_keys(device):
    """A model that adds keys behind the mask's back is refused by PyTorch, and not answered without them."""
    mask = itf.mask(batch_size=1, q_length=4, kv_length=4, device=device)
    q, k = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 6, 8)
    with pytest.raises(RuntimeError, match="must match|expand"):
        itf.attention(torch.nn.Module(), q, k, k, mask)


def test_a_mask_that_a_model_looks_into(device):
    """It is a boolean tensor to whoever treats it as one."""
    given = dict(
        batch_size=3, q_length=17, kv_length=17, attention_mask=padded("left").bool(), device=device,
        mask_function=tf.masking_utils.sliding_window_causal_mask_function(4), local_size=4,
    )  # fmt: skip
    mask, want = itf.mask(**given), sdpa_mask(**given)
    assert isinstance(mask, itf._Mask) and not isinstance(want, itf._Mask)
    assert mask.shape == want.shape and mask.dtype == torch.bool and mask.ndim == 4
    assert torch.equal(mask[:, :, 3:, :9], want[:, :, 3:, :9])
    assert torch.equal(torch.where(mask, 1.0, 0.0), torch.where(want, 1.0, 0.0))
    assert torch.equal(torch.cat([mask, mask], dim=-1), torch.cat([want, want], dim=-1))
    assert torch.equal(mask.to(device).dense(), want) and mask.to("meta").kept.is_meta
    assert itf.mask(**{**given, "attention_mask": mask}) is mask
    # a function of masks that is not known by its name makes a tensor
    other = tf.masking_utils.and_masks(given["mask_function"], lambda b, h, q, k: k % 2 == 0)
    assert isinstance(itf.mask(**{**given, "mask_function": other}), torch.Tensor)
    chunks = tf.masking_utils.chunked_causal_mask_function(4, torch.zeros(3, dtype=torch.int))
    assert isinstance(itf.mask(**{**given, "mask_function": chunks}), torch.Tensor)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("side", ["none", "left"])
def test_what_ingot_does_not_run(name, side):
    """A model in double: its attention is counted with the reason, and is right to the last digits."""
    model = decoder(name).double()
    ids, keep = tokens(), padded(side)
    counts = keep.bool() if keep is not None else torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        got, want = (by(model, x, ids, attention_mask=keep).logits[counts] for x in ("ingot", TEXTBOOK))
    assert torch.allclose(got, want, rtol=0, atol=1e-12)  # float64, two orders of its sums
    counted = it.statistics()
    assert counted["ingot"] == 0 and sum(counted["original"].values()) == 2
    if side == "none":
        model.set_attn_implementation("paged|ingot")
        prompts = [x[:n].tolist() for x, n in zip(ids, (3, 17, 9))]
        given = tf.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1)
        batching = tf.ContinuousBatchingConfig(block_size=8, num_blocks=32, max_batch_tokens=24)
        got = model.generate_batch(prompts, generation_config=given, continuous_batching_config=batching, progress_bar=False)
        model.set_attn_implementation(TEXTBOOK)
        want = [model.generate(torch.tensor([x]), generation_config=given)[0, len(x) :].tolist() for x in prompts]
        assert [x.generated_tokens for x in got.values()] == want


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compile(name):
    """One graph, with gradients, and the same result."""
    torch._dynamo.reset()
    model = decoder(name)
    ids, labels = tokens(), tokens()
    results = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        loss = run(ids, labels=labels).loss
        loss.backward()
        results.append([loss.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)])
    torch._dynamo.reset()
    for got, want in zip(*results):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)  # gradients too; the compiler's sums have orders of their own
    assert it.statistics()["original"] == {}


def test_bf16():
    model = decoder("llama").bfloat16()
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        got, own = (by(model, x, tokens()).logits for x in ("ingot", "sdpa"))
        held(got, by(exact, TEXTBOOK, tokens()).logits, own)
    assert it.statistics() == {"ingot": 2, "original": {}}


def test_paged_refuses_what_it_does_not_know():
    with pytest.raises(ingot.UnsupportedError, match="generate_batch"):
        decoder("llama", "paged|ingot")(tokens())
    with pytest.raises(ingot.UnsupportedError, match="block_table"):
        itf.paged_attention(
            None, None, None, None, cache=0, cu_seq_lens_q=None, cu_seq_lens_k=None, max_seqlen_q=1, max_seqlen_k=1,
            read_index=[], write_index=[], block_table=torch.zeros(1),
        )  # fmt: skip
