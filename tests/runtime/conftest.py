"""Tiny mixture-of-experts checkpoints made by transformers; the ``runtime`` command."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gemma4_text")
COMMON = {
    "vocab_size": 64,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny_model(family: str) -> Any:
    import torch
    import transformers as tf

    torch.manual_seed(1)
    small: dict[str, Any] = {**COMMON, "num_experts": 4, "num_experts_per_tok": 2}
    if family == "qwen2_moe":
        config = tf.Qwen2MoeConfig(
            **small, moe_intermediate_size=40, shared_expert_intermediate_size=56
        )
        return tf.Qwen2MoeForCausalLM(config)
    if family == "qwen3_moe":
        config = tf.Qwen3MoeConfig(
            **small,
            intermediate_size=56,
            moe_intermediate_size=40,
            head_dim=16,
            mlp_only_layers=[0],
        )
        return tf.Qwen3MoeForCausalLM(config)
    if family == "mixtral":
        config = tf.MixtralConfig(
            **COMMON, intermediate_size=40, num_local_experts=4, num_experts_per_tok=2
        )
        return tf.MixtralForCausalLM(config)
    if family == "olmoe":
        return tf.OlmoeForCausalLM(tf.OlmoeConfig(**small, intermediate_size=40))
    config = tf.Gemma4TextConfig(
        **COMMON,
        intermediate_size=56,
        moe_intermediate_size=40,
        num_experts=4,
        top_k_experts=2,
        head_dim=16,
        global_head_dim=16,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=0,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
    )
    return tf.Gemma4ForCausalLM(config)


@pytest.fixture(scope="session")
def family_model() -> Callable[[str], Any]:
    """``family_model(family)``: a bfloat16 model of two layers, four experts of 40 by 48."""
    models: dict[str, Any] = {}

    def get(family: str) -> Any:
        if family not in models:
            import torch

            with contextlib.redirect_stderr(io.StringIO()):
                models[family] = tiny_model(family).to(torch.bfloat16)
        return models[family]

    return get


@pytest.fixture
def save_checkpoint(family_model: Callable[[str], Any], tmp_path: Path) -> Callable[..., Path]:
    """``save_checkpoint(family, shard_bytes=...)``: a folder as transformers writes it."""

    def save(family: str = "qwen2_moe", shard_bytes: int = 10**9) -> Path:
        folder = tmp_path / family
        with contextlib.redirect_stderr(io.StringIO()):
            family_model(family).save_pretrained(folder, max_shard_size=shard_bytes)
        (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))
        (folder / "merges.txt").write_text("a b\n")
        return folder

    return save


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Finished]:
    """``run_command("inspect", folder)``: the ``runtime`` command in this process."""

    def run(*arguments: Any) -> Finished:
        from runtime.cli import main

        monkeypatch.setattr(sys, "argv", ["runtime", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        return Finished(code, *capsys.readouterr())

    return run
