"""Specifications against the models that transformers makes of the same configurations."""

import json

import pytest
import torch
import transformers

from runtime.model.spec_config import ModelConfigError, read_model_spec

BASE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 56,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LLAMA = {"model_type": "llama", **BASE}
QWEN = {"model_type": "qwen2_moe", **BASE, **MOE}
GEMMA = {"model_type": "gemma4_text", **BASE, "head_dim": 32, "hidden_size_per_layer_input": 0}


def test_a_mixed_model_is_described_layer_by_layer():
    spec = read_model_spec(
        {**QWEN, "decoder_sparse_step": 2, "mlp_only_layers": [3], "use_sliding_window": True,
         "sliding_window": 16, "max_window_layers": 3, "norm_topk_prob": True}
    )  # fmt: skip
    assert spec.moe_layers == (1, 5)
    assert [layer.mlp is None for layer in spec.layers] == [False, True, False, False, False, True]
    assert [layer.attention.window_tokens for layer in spec.layers] == [
        16,
        None,
        16,
        None,
        None,
        None,
    ]
    moe = spec.layers[1].moe
    assert (moe.experts, moe.experts_per_token, moe.width) == (6, 2, 40)
    assert (moe.renormalises, moe.shared_width) == (True, 5632)


def test_layers_without_keys_of_their_own_name_the_last_one_of_their_kind():
    spec = read_model_spec({**GEMMA, "num_hidden_layers": 12, "num_kv_shared_layers": 5})
    reused = [layer.attention.reuses_kv for layer in spec.layers]
    assert reused == [None] * 7 + [6, 6, 6, 6, 5]
    assert [entry if isinstance(entry, int) else None for entry in spec.kv_layers] == reused


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
ROTARY = {
    "old theta": ("llama", {"rope_theta": 5e5}),
    "old linear": ("llama", {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 3.0}}),
    "default of mixtral": ("mixtral", {"num_local_experts": 4}),
    "llama3": (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "yarn": ("qwen3", {"rope_parameters": {**YARN, "original_max_position_embeddings": 64}}),
    "yarn of the whole context": ("llama", {"rope_parameters": YARN}),
    "yarn not truncated": ("llama", {"rope_parameters": {**YARN, "truncate": False}}),
    "yarn with scales": (
        "llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}
    ),
    "yarn with its factor": (
        "qwen2", {"rope_parameters": {**YARN, "attention_factor": 1.25, "beta_slow": 2.0}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROTARY)
def test_frequencies_and_amplitude_are_those_of_the_library(name):
    kind, changes = ROTARY[name]
    fields = {**BASE, "head_dim": 32, **changes}
    config = transformers.AutoConfig.for_model(kind, **json.loads(json.dumps(fields)))
    with torch.device("cpu"):
        rotary = transformers.AutoModelForCausalLM.from_config(config).model.rotary_emb
    for table in ({"model_type": kind, **fields}, config.to_dict()):
        found = read_model_spec(table).layers[0].attention.rotary
        torch.testing.assert_close(found.frequencies(), rotary.inv_freq, rtol=1e-6, atol=0)
        assert found.amplitude == pytest.approx(rotary.attention_scaling, rel=1e-12)


@pytest.mark.parametrize(
    "tables",
    [
        None,
        {
            "sliding_attention": {"rope_type": "linear", "rope_theta": 2e4, "factor": 2.0},
            "full_attention": {
                "rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5,
            },
        },
    ],
)  # fmt: skip
def test_gemma_turns_heads_by_the_kind_of_attention(tables):
    fields = {**GEMMA, "global_head_dim": 64, "rope_parameters": tables}
    config = transformers.Gemma4TextConfig(**json.loads(json.dumps(fields)))
    rotary = transformers.AutoModelForCausalLM.from_config(config).model.rotary_emb
    spec = read_model_spec(fields)
    for layer, kind in zip(spec.layers, config.layer_types, strict=True):
        wanted = getattr(rotary, f"{kind}_inv_freq")
        assert layer.attention.rotary.frequencies().tolist() == pytest.approx(wanted.tolist())


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, 256),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0,
                           "original_max_position_embeddings": 256}}, 1024),
        ({"max_position_embeddings": 1024,
          "rope_scaling": {"type": "yarn", "factor": 4.0,
                           "original_max_position_embeddings": 256}}, 1024),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
    ],
)  # fmt: skip
def test_yarn_stretches_the_context_once(changes, tokens):
    assert read_model_spec({**LLAMA, **changes}).context_tokens == tokens


def test_end_tokens_are_those_of_both_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 7}))
    assert read_model_spec(tmp_path).end_tokens == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5, 7]}))
    assert read_model_spec(tmp_path / "config.json").end_tokens == (5, 7, 9)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "olmoe", "gemma4_text"])
def test_end_tokens_that_a_file_leaves_out_are_those_of_the_library(kind):
    fields = {**BASE, "vocab_size": 60_000, **({} if kind != "olmoe" else MOE)}
    wanted = transformers.AutoConfig.for_model(kind, **fields).eos_token_id
    found = read_model_spec({"model_type": kind, **fields}).end_tokens
    assert found == (() if wanted is None else (wanted,))


def test_gemma_with_towers_is_its_text_part():
    outer = {
        "model_type": "gemma4", "text_config": {**GEMMA, "eos_token_id": 1},
        "vision_config": {}, "eos_token_id": [1, 50],
    }  # fmt: skip
    spec = read_model_spec(outer)
    assert spec.layers == read_model_spec(GEMMA).layers
    assert (spec.end_tokens, spec.is_tied, spec.embedding_scale) == ((1, 50), True, 8.0)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (LLAMA, {"model_type": "gpt2"}, r"model_type: must be one of 'gemma4', .*, found 'gpt2'"),
        (LLAMA, {"model_type": "deepseek_v3"}, r"model_type: must be one of .* 'deepseek_v3'"),
        (LLAMA, {"hidden_size": None}, r"hidden_size: missing"),
        (LLAMA, {"hidden_act": "gelu"}, r"hidden_act: must be one of .*; found 'gelu'"),
        (LLAMA, {"head_dim": 19}, r"head_dim: rotary positions need an even number, found 19"),
        (LLAMA, {"rms_norm_eps": "x"}, r"rms_norm_eps: must be a number > 0, found 'x'"),
        (LLAMA, {"rms_norm_eps": float("nan")}, r"rms_norm_eps: must be a number > 0, found nan"),
        (
            LLAMA,
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            r"rope_scaling: type: must be one of 'default', .*, found 'dynamic'",
        ),
        (
            LLAMA,
            {"rope_parameters": {"rope_type": "longrope"}},
            r"rope_parameters: rope_type: must be one of .*, found 'longrope'",
        ),
        (
            LLAMA,
            {"rope_parameters": {"rope_type": "linear"}},
            r"rope_parameters: factor: must be a number > 0, found None",
        ),
        (LLAMA, {"rope_scaling": [1]}, r"rope_scaling: must be a table, found \[1\]"),
        (
            LLAMA,
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            r"partial_rotary_factor: must be 1 but for rope_type 'proportional'",
        ),
        (
            LLAMA,
            {"layer_types": ["sliding_attention"] * 6, "sliding_window": 4},
            r"layer_types: all layers of this llama have 'full_attention', found",
        ),
        (
            {**QWEN, "model_type": "qwen3_moe"},
            {"layer_types": ["full_attention", "sliding_attention"] * 3, "sliding_window": 4},
            r"layer_types: all layers of this qwen3_moe have 'full_attention'",
        ),
        (
            QWEN,
            {"layer_types": ["full_attention", "sliding_attention"] * 3, "sliding_window": 4},
            r"use_sliding_window: must be true where layer_types has 'sliding_attention', found",
        ),
        (QWEN, {"quantization_config": {"quant_method": "fp8"}}, r"quantization_config: weights"),
        (QWEN, {"eos_token_id": "</s>"}, r"eos_token_id: must be a token number or a list"),
        (QWEN, {"norm_topk_prob": 1}, r"norm_topk_prob: must be true or false, found 1"),
        (
            {**QWEN, "model_type": "olmoe"},
            {"clip_qkv": -1.0},
            r"clip_qkv: must be a number > 0, found -1.0",
        ),
        (
            GEMMA,
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96},
            r"vocab_size_per_layer_input: must be >= vocab_size = 97, found 96",
        ),
        (
            GEMMA,
            {"use_bidirectional_attention": "all"},
            r"use_bidirectional_attention: only causal attention is built, found 'all'",
        ),
        (
            GEMMA,
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            r"rope_parameters: sliding_attention: must be a table",
        ),
    ],
)
def test_what_is_not_built_is_refused_with_file_and_field(base, changes, message, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**base, **changes}))
    with pytest.raises(ModelConfigError, match=message) as found:
        read_model_spec(tmp_path)
    assert str(file) in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is no JSON"), ("[]", "must hold a JSON object, found list")]
)
def test_a_file_that_is_no_configuration_is_refused(content, message, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelConfigError, match=message):
        read_model_spec(tmp_path)


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ModelConfigError, match=r"config\.json: cannot be read: No such file"):
        read_model_spec(tmp_path)
