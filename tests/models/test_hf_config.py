"""Configurations of every family, odd ones too, against the models transformers makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.hf_config import FAMILIES, HfConfigError, read_hf_config
from models.llm_parameters import count_parameters
from models.llm_shape import AttentionShape, LlmShape

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
}
GEMMA_MOE = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "hidden_size_per_layer_input": 0,
    "head_dim": 8,
    "global_head_dim": 16,
}
ODD: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2}),
    ("llama", {"head_dim": 12, "tie_word_embeddings": True}),
    ("mistral", {"num_key_value_heads": 2}),
    ("mistral", {"num_key_value_heads": 4, "head_dim": 16, "sliding_window": None}),
    ("mixtral", {"num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 3}),
    ("mixtral", {"num_key_value_heads": 4, "num_local_experts": 8, "sliding_window": 16}),
    ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 2}),
    ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "attention_bias": True}),
    ("qwen2_moe", {**MOE, "num_key_value_heads": 2}),
    ("qwen2_moe", {**MOE, "num_key_value_heads": 4, "qkv_bias": False, "mlp_only_layers": [0, 3]}),
    (
        "qwen2_moe",
        {
            **MOE,
            "num_key_value_heads": 4,
            "decoder_sparse_step": 2,
            "shared_expert_intermediate_size": 20,
            "use_sliding_window": True,
            "max_window_layers": 4,
        },
    ),
    ("qwen2", {"num_key_value_heads": 2}),
    (
        "qwen2",
        {
            "num_key_value_heads": 4,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 4,
            "tie_word_embeddings": True,
        },
    ),
    ("qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    ("qwen3", {"num_key_value_heads": 4, "attention_bias": True}),
    ("qwen3_moe", {**MOE, "head_dim": 16}),
    ("qwen3_moe", {**MOE, "attention_bias": True, "decoder_sparse_step": 3, "head_dim": 8}),
    ("deepseek_v3", LATENT),
    ("deepseek_v3", {**LATENT, "q_lora_rank": None, "attention_bias": True}),
    ("deepseek_v3", {**LATENT, "first_k_dense_replace": 0, "n_shared_experts": 2}),
    ("gemma4_text", GEMMA_MOE),
    ("gemma4_text", {**GEMMA_MOE, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    ("gemma4_text", {**GEMMA_MOE, "attention_bias": True, "tie_word_embeddings": False}),
    ("gemma4_text", {"head_dim": 8, "hidden_size_per_layer_input": 4}),
    (
        "gemma4_text",
        {
            "num_hidden_layers": 12,
            "head_dim": 8,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": 40,
        },
    ),
    (
        "gemma4_text",
        {**GEMMA_MOE, "layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 3},
    ),
]


def built(model_type: str, changes: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The model on the meta device, and the configuration file transformers writes for it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **changes})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model, json.loads(config.to_json_string(use_diff=True))


@pytest.mark.parametrize(("model_type", "changes"), ODD)
def test_odd_configurations_have_the_parameters_transformers_builds(
    model_type: str, changes: dict[str, Any]
) -> None:
    model, written = built(model_type, changes)
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for key, p in model.named_parameters() if ".experts." in key)
    for table in ({"model_type": model_type, **SMALL, **changes}, written):
        found = count_parameters(read_hf_config(table))
        assert (found.total, found.experts) == (total, experts)


@pytest.mark.parametrize(("model_type", "changes"), ODD)
def test_windows_are_those_of_the_attention_layers(
    model_type: str, changes: dict[str, Any]
) -> None:
    model, written = built(model_type, changes)
    masked = [
        getattr(layer.self_attn, "sliding_window", None) or None for layer in model.model.layers
    ]
    if model_type == "mixtral":  # its layers read the window from the configuration
        masked = [model.config.sliding_window] * len(masked)
    if model_type == "mistral":
        masked = [model.config.sliding_window] * len(masked)
    shape = read_hf_config(written)
    assert [layer.attention.window_tokens for layer in shape.layers] == masked


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - {"gemma4"}))
def test_what_a_file_leaves_out_is_what_transformers_takes(model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    required = {
        **SMALL,
        **({"moe_intermediate_size": 24} if model_type.startswith(("qwen", "deepseek")) else {}),
        **({"num_key_value_heads": 16} if model_type in ("qwen2", "qwen3") else {}),
        **({"num_experts": 60} if model_type in ("qwen2_moe", "qwen3_moe", "olmoe") else {}),
        **({"num_local_experts": 8} if model_type == "mixtral" else {}),
        **({"n_routed_experts": 256} if model_type == "deepseek_v3" else {}),
        "num_attention_heads": 16,
        "hidden_size": 64,
    }
    full = transformers.AutoConfig.for_model(model_type, **required).to_dict()
    short = read_hf_config({"model_type": model_type, **required}, name="x")
    assert short == read_hf_config(full, name="x")


def test_gemma_with_towers_is_its_text_part_and_says_so() -> None:
    text = {"model_type": "gemma4_text", **SMALL, **GEMMA_MOE}
    outer = {"model_type": "gemma4", "text_config": text, "vision_config": {"hidden_size": 8}}
    found = read_hf_config(outer)
    assert count_parameters(found) == count_parameters(read_hf_config(text))
    assert found.notes == ("the vision tower is not counted",)


def test_layers_that_reuse_keys_project_and_cache_none() -> None:
    shape = read_hf_config(
        {"model_type": "gemma4_text", **SMALL, "num_hidden_layers": 12, "num_kv_shared_layers": 5}
    )
    assert [layer.attention.kv_values_per_token == 0 for layer in shape.layers] == (
        [False] * 7 + [True] * 5
    )


def test_files_and_folders_are_read_and_named(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **SMALL}))
    assert read_hf_config(folder) == read_hf_config(file)
    assert read_hf_config(folder).name == "my-model"
    other = tmp_path / "tiny.json"
    other.write_text(file.read_text())
    assert read_hf_config(other).name == "tiny"


QWEN: dict[str, Any] = {"model_type": "qwen2_moe", **SMALL, **MOE, "num_key_value_heads": 4}
GEMMA: dict[str, Any] = {"model_type": "gemma4_text", **SMALL, **GEMMA_MOE}


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (QWEN, {"model_type": None}, "model_type: must be one of 'deepseek_v3', .*; missing"),
        (QWEN, {"model_type": "qwen2_mo"}, r"found 'qwen2_mo' \(did you mean 'qwen2_moe'\?\)"),
        (QWEN, {"hidden_size": None}, "hidden_size: missing; must be a whole number >= 1"),
        (QWEN, {"hidden_size": 32.0}, "hidden_size: must be a whole number >= 1, found 32.0"),
        (QWEN, {"hidden_size": True}, "hidden_size: must be a whole number >= 1, found True"),
        (QWEN, {"vocab_size": -1}, "vocab_size: must be a whole number >= 1, found -1"),
        (QWEN, {"num_hidden_layers": 10**6}, "num_hidden_layers: must be .* within 1..10000"),
        (QWEN, {"num_attention_heads": 5}, "num_key_value_heads: must divide .* = 5, found 4"),
        (
            QWEN,
            {"num_attention_heads": 6, "num_key_value_heads": 6},
            "num_attention_heads: must divide hidden_size = 32 where head_dim is not given",
        ),
        (QWEN, {"num_experts": None}, r"num_experts: missing; .* \(also read: num_local_experts"),
        (
            QWEN,
            {"num_local_experts": 7},
            "num_experts: found num_experts = 6 and num_local_experts = 7; they mean the same",
        ),
        (QWEN, {"num_experts_per_tok": 7}, "num_experts_per_tok: must be <= the 6 experts"),
        (QWEN, {"hidden_act": "relu"}, "hidden_act: must be one of 'silu', .*; found 'relu'"),
        (QWEN, {"qkv_bias": 1}, "qkv_bias: must be true or false, found 1"),
        (QWEN, {"mlp_only_layers": [6]}, r"mlp_only_layers: must be a list of layers within 0..5"),
        (
            QWEN,
            {"layer_types": ["full_attention"]},
            "layer_types: must name .* = 6 layers, found 1",
        ),
        (QWEN, {"layer_types": ["linear"] * 6}, r"layer_types\[0\]: must be 'full_attention' or"),
        (
            QWEN,
            {"layer_types": ["sliding_attention"] * 6},
            "sliding_window: must be >= 1 where layer_types names",
        ),
        (QWEN, {"per_layer_config": {"0": {}}}, "per_layer_config: is understood for model_type"),
        (GEMMA, {"num_experts": None}, "num_experts: missing"),
        (GEMMA, {"top_k_experts": 9}, "top_k_experts: must be <= num_experts = 6, found 9"),
        (GEMMA, {"num_kv_shared_layers": 6}, "num_kv_shared_layers: must be .* within 0..5"),
        (GEMMA, {"num_kv_shared_layers": 1}, "num_kv_shared_layers: leaves no layer of type"),
        (GEMMA, {"per_layer_config": {"9": {"head_dim": 8}}}, "9: must be the table of a layer"),
        (GEMMA, {"per_layer_config": {"1": {"width": 8}}}, "1: width: unknown; known here: head"),
        (
            {"model_type": "deepseek_v3", **SMALL, **LATENT},
            {"moe_layer_freq": 2},
            "moe_layer_freq: must be 1",
        ),
        ({"model_type": "gemma4"}, {}, "text_config: missing; must be a table"),
        (
            {"model_type": "gemma4", "text_config": {**GEMMA, "tie_word_embeddings": True}},
            {"tie_word_embeddings": False},
            "tie_word_embeddings: must equal that of text_config, found False and True",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_file_and_field(
    base: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**base, **changes}))
    with pytest.raises(HfConfigError, match=message) as found:
        read_hf_config(file)
    assert str(found.value).startswith(f"{file}: ")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is no JSON"),
        (b"\xff\xfe\x00", "is no JSON"),
        (b"[1]", "must hold a JSON object, found list"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is no JSON"),
    ],
)
def test_files_that_are_no_configuration_are_refused(
    content: bytes, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(HfConfigError, match=message):
        read_hf_config(file)


def test_a_quantized_checkpoint_is_noted() -> None:
    found = read_hf_config({**QWEN, "quantization_config": {"quant_method": "fp8"}})
    assert "stored quantized" in found.notes[0]


def test_shapes_refuse_what_no_model_has() -> None:
    with pytest.raises(ValueError, match="num_kv_heads must divide num_heads = 4, found 3"):
        AttentionShape(num_heads=4, num_kv_heads=3, head_dim=8)
    shape = read_hf_config(QWEN)
    with pytest.raises(ValueError, match="num_layers must be >= 1, found 0"):
        LlmShape(
            name="x",
            model_type="x",
            hidden_size=8,
            vocab_size=8,
            is_tied=False,
            activation=shape.activation,
            max_context_tokens=8,
            layers=(),
        )
