"""The decoder step against transformers' own models, on random small checkpoints."""

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

from runtime.decoder import Decoder, Span
from runtime.decoder_config import DecoderConfigError, read_decoder_config
from runtime.paged_keys_values import PagedKeysValues

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SMALL, num_experts=4, moe_intermediate_size=48, shared_expert_intermediate_size=80
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, num_experts=4, moe_intermediate_size=48, head_dim=32, norm_topk_prob=True
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SMALL, num_local_experts=4, intermediate_size=48, sliding_window=7
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **SMALL, num_experts=4, intermediate_size=48, tie_word_embeddings=True
    ),
}


class FullPrecisionExperts:
    """Experts straight from the transformers model's tensors."""

    def __init__(self, model):
        self.layers = [layer.mlp.experts for layer in model.model.layers]

    def __call__(self, layer, hidden, experts, weights):
        held = self.layers[layer]
        out = torch.zeros_like(hidden)
        for t in range(len(hidden)):
            for expert, weight in zip(experts[t].tolist(), weights[t], strict=True):
                gate, up = functional.linear(hidden[t], held.gate_up_proj[expert]).chunk(2)
                out[t] += weight * functional.linear(
                    functional.silu(gate) * up, held.down_proj[expert]
                )
        return out


class AnyPages:
    def __init__(self, count):
        self.free = list(np.random.default_rng(3).permutation(count))

    def take(self, count):
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        return np.array(taken, dtype=np.int64)

    def give_back(self, pages):
        self.free.extend(pages.tolist())


def build(kind):
    torch.manual_seed(5)
    model = CONFIGS[kind]()
    model = transformers.AutoModelForCausalLM.from_config(model, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2
    config = read_decoder_config(model.config.to_dict())
    decoder = Decoder(config, model.state_dict())
    pages = AnyPages(400)
    cache = PagedKeysValues(
        buffer=np.zeros(400 * 2048, dtype=np.uint8),
        page_bytes=2048,
        layers=config.layers,
        key_value_heads=config.key_value_heads,
        head_dim=config.head_dim,
        source=pages,
    )
    return model, decoder, cache, pages


@pytest.mark.parametrize("kind", CONFIGS)
def test_prefill_in_chunks_and_decode_of_several_sequences_give_the_library_logits(kind):
    model, decoder, cache, pages = build(kind)
    experts = FullPrecisionExperts(model)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 97, size=n).tolist() for n in (13, 1, 22)]
    done = [0, 0, 0]
    last = {}
    for chunk in (5, 3, 4, 10, 1):
        spans = []
        for i, prompt in enumerate(prompts):
            part = prompt[done[i] : done[i] + chunk]
            if part:
                assert cache.reserve(i, len(part))
                spans.append(Span(i, part))
                done[i] += len(part)
        if spans:
            logits = decoder.step(spans, cache, experts)
            last.update({span.sequence: row for span, row in zip(spans, logits, strict=True)})
    with torch.inference_mode():
        for i, prompt in enumerate(prompts):
            expected = model(torch.tensor([prompt])).logits[0, -1]
            torch.testing.assert_close(last[i], expected, rtol=2e-4, atol=2e-4)
    for i in range(3):
        cache.release(i)
    assert len(pages.free) == 400


def test_a_reservation_that_does_not_fit_takes_nothing():
    _, _, cache, pages = build("mixtral")
    assert cache.reserve(1, 30)
    before = len(pages.free)
    assert not cache.reserve(2, 20_000)
    assert len(pages.free) == before and 2 not in cache.sequences


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "gpt2"),
        ("hidden_act", "gelu"),
        ("num_hidden_layers", None),
        ("head_dim", 19),
        ("rope_scaling", {"type": "yarn", "factor": 4}),
        ("layer_types", ["full_attention", "sliding_attention"]),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_by_field(field, value):
    fields = CONFIGS["qwen2_moe"]().to_dict() | {field: value}
    with pytest.raises(DecoderConfigError, match=field.split("_")[0]):
        read_decoder_config(fields)


def test_a_missing_tensor_is_named():
    model, decoder, _, _ = build("olmoe")
    tensors = dict(model.state_dict())
    del tensors["model.layers.1.self_attn.k_norm.weight"]
    with pytest.raises(DecoderConfigError, match=r"layers\.1\.self_attn\.k_norm"):
        Decoder(decoder.config, tensors)
