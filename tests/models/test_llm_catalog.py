"""The catalog against transformers, which builds every model without its weights, and print."""

from pathlib import Path
from typing import Any

import pytest

from models.hf_config import HfConfigError
from models.kv_bytes import kv_token_bytes
from models.llm_catalog import PAGEDWEIGHT_MODELS, catalog, find_llm, load_llm
from models.llm_parameters import count_parameters, expert_parameters
from models.llm_shape import LlmShape

# Parameters as printed by the models' makers (model cards; arXiv 2401.04088, 2409.02060,
# 2412.19437), to the digits they print. DeepSeek-V3's 37 B leave the embedding out.
PUBLISHED_BILLIONS = {
    "Qwen1.5-MoE-A2.7B": (14.32, 2.69),
    "Mixtral-8x7B": (46.70, 12.88),
    "Gemma-4-26B-A4B": (25.23, 3.82),
    "Mistral-7B": (7.24, 7.24),
    "Llama-3.1-8B": (8.03, 8.03),
    "Qwen3-30B-A3B": (30.53, 3.35),
    "DeepSeek-V3": (671.03, 37.55),
    "OLMoE-1B-7B": (6.92, 1.28),
}

# Bytes at 16 bits as published for PagedWeight's three models. Its "other" counts matrices and
# biases; norm vectors and learned scales, a few hundred kilobytes, come on top.
PUBLISHED_BYTES = {
    "Qwen1.5-MoE-A2.7B": {"experts": 24_914_165_760, "other": 3_717_201_920, "one": 8_650_752},
    "Mixtral-8x7B": {"experts": 90_194_313_216, "other": 3_210_739_712, "one": 176_160_768},
    "Gemma-4-26B-A4B": {"experts": 45_675_970_560, "other": 4_788_912_128, "one": 5_947_392},
}


@pytest.mark.parametrize("name", list(catalog()))
def test_parameters_are_those_that_transformers_builds(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    entry = catalog()[name]
    fields = {k: v for k, v in entry.config.items() if k != "quantization_config"}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**fields)
        )
    sizes = {key: parameter.numel() for key, parameter in model.named_parameters()}
    found = count_parameters(entry.shape())
    assert found.total == sum(sizes.values())
    assert found.experts == sum(n for key, n in sizes.items() if ".experts." in key)
    assert found.routers == sum(
        n for k, n in sizes.items() if k.endswith(("mlp.gate.weight", "router.proj.weight"))
    )
    assert found.shared_experts == sum(n for k, n in sizes.items() if "shared_expert" in k)
    assert found.embeddings == sum(n for k, n in sizes.items() if "embed" in k or "lm_head" in k)
    norms = sum(n for k, n in sizes.items() if "norm" in k or "scale" in k)
    assert found.norms == norms


@pytest.mark.parametrize("name", list(catalog()))
def test_parameters_are_those_their_makers_print(name: str) -> None:
    found = count_parameters(load_llm(name))
    assert (round(found.total / 1e9, 2), round(found.active / 1e9, 2)) == PUBLISHED_BILLIONS[name]


@pytest.mark.parametrize("name", PAGEDWEIGHT_MODELS)
def test_bytes_of_the_papers_models_are_the_published_ones(name: str) -> None:
    shape, printed = load_llm(name), PUBLISHED_BYTES[name]
    found = count_parameters(shape)
    assert 2 * found.experts == printed["experts"]
    assert 2 * (found.other - found.norms) == printed["other"]
    assert expert_parameters(shape.moe_layers[0], shape.hidden_size) == printed["one"]
    assert 0 < found.norms < 0.0003 * found.other


def test_weight_blocks_of_the_papers_models() -> None:
    blocks = {
        name: [(m.module, m.rows, m.columns, m.count) for m in load_llm(name).expert_matrices]
        for name in PAGEDWEIGHT_MODELS
    }
    assert blocks == {
        "Qwen1.5-MoE-A2.7B": [("gate_up", 2816, 2048, 1440), ("down", 2048, 1408, 1440)],
        "Mixtral-8x7B": [("gate_up", 28672, 4096, 256), ("down", 4096, 14336, 256)],
        "Gemma-4-26B-A4B": [("gate_up", 1408, 2816, 3840), ("down", 2816, 704, 3840)],
    }


def test_deepseek_has_three_dense_layers_and_a_latent_cache() -> None:
    shape = load_llm("DeepSeek-V3")
    assert [layer.moe is None for layer in shape.layers] == [True] * 3 + [False] * 58
    assert kv_token_bytes(shape).unbounded == 61 * (512 + 64) * 2
    assert any("multi-token prediction" in note for note in shape.notes)


def test_gemma_alternates_five_sliding_layers_with_a_full_one() -> None:
    shape = load_llm("Gemma-4-26B-A4B")
    kinds = [
        (layer.attention.window_tokens, layer.attention.kv_values_per_token)
        for layer in shape.layers
    ]
    assert kinds == ([(1024, 2 * 8 * 256)] * 5 + [(None, 2 * 2 * 512)]) * 5


def test_names_are_found_in_any_case_and_unknown_ones_are_refused_with_all_known() -> None:
    assert load_llm("mixtral-8X7b").name == "Mixtral-8x7B"
    with pytest.raises(HfConfigError, match=r"known: .*OLMoE-1B-7B.*did you mean Mixtral-8x7B\?"):
        find_llm("mixtral-8x7")
    with pytest.raises(HfConfigError, match="No such file"):
        load_llm("./nothing/here")


def test_every_entry_says_where_it_comes_from_and_ships_with_the_package() -> None:
    for entry in catalog().values():
        assert len(entry.source) > 20
        assert len(entry.published) > 10
        assert isinstance(entry.shape(), LlmShape)
    import models

    folder = Path(models.__file__).parent / "llms"
    assert len(list(folder.glob("*.json"))) == len(catalog())


def test_tied_and_untied_outputs() -> None:
    config: dict[str, Any] = dict(catalog()["Llama-3.1-8B"].config)
    from models.hf_config import read_hf_config

    tied = count_parameters(read_hf_config({**config, "tie_word_embeddings": True}))
    untied = count_parameters(read_hf_config(config))
    assert untied.total - tied.total == 128_256 * 4096
