"""The tensors besides experts, against transformers' own models; and numbers no run can use."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.hf_config import read_hf_config
from runtime.checkpoint_required import plain_name, require_tensors, required_tensors
from runtime.checkpoint_scan import scan_weights
from runtime.checkpoint_source import CheckpointSource, SourceError

FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gemma4_text")
Save = Callable[..., Path]


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def replace(tensors: dict[str, torch.Tensor], name: str, shape: tuple[int, ...] | None) -> None:
    del tensors[name]
    if shape is not None:
        tensors[name] = torch.zeros(shape)


def tensors_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes in memory by plain name, experts and tied output aside."""
    names = {plain_name(k): tuple(v.shape) for k, v in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del names["lm_head.weight"]
    return {name: shape for name, shape in names.items() if ".experts." not in name}


@pytest.mark.parametrize("family", FAMILIES)
def test_required_tensors_are_those_of_the_model(
    family: str, family_model: Callable[[str], Any]
) -> None:
    model = family_model(family)
    shape = read_hf_config(model.config.to_dict(), name=family, where=family)
    assert required_tensors(shape) == tensors_of(model)


def variants() -> dict[str, Any]:
    tf: Any = pytest.importorskip("transformers")
    common: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 24,
        "num_experts_per_tok": 2, "intermediate_size": 40,
    }  # fmt: skip
    gemma = tf.Gemma4TextConfig(
        **common, head_dim=8, global_head_dim=16, num_global_key_value_heads=1, top_k_experts=2,
        enable_moe_block=True, attention_k_eq_v=True, num_kv_shared_layers=2,
        hidden_size_per_layer_input=6, vocab_size_per_layer_input=20,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    qwen2 = tf.Qwen2MoeConfig(
        **common, shared_expert_intermediate_size=48, decoder_sparse_step=2, qkv_bias=False,
        tie_word_embeddings=True,
    )  # fmt: skip
    qwen3 = tf.Qwen3MoeConfig(**common, head_dim=10, attention_bias=True, mlp_only_layers=[1, 2])
    return {"gemma4": gemma, "qwen2": qwen2, "qwen3": qwen3}


@pytest.mark.parametrize("name", ["gemma4", "qwen2", "qwen3"])
def test_other_configurations_of_a_family_have_other_tensors(name: str) -> None:
    tf: Any = pytest.importorskip("transformers")
    config = variants()[name]
    with torch.device("meta"), contextlib.redirect_stderr(io.StringIO()):
        model = tf.AutoModelForCausalLM.from_config(config)
    shape = read_hf_config(config.to_dict(), name=name, where=name)
    assert required_tensors(shape) == tensors_of(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_tensor_that_is_missing_or_of_another_shape_is_named(
    family: str, save_checkpoint: Save
) -> None:
    folder = save_checkpoint(family)
    source = CheckpointSource.open(folder)
    require_tensors(folder, source.shape, source.shards)
    whole = shutil.copyfile(folder / "model.safetensors", folder.parent / "whole")
    names = {name for tensors in source.other_tensors.values() for name in tensors}
    assert len(names) == len(required_tensors(source.shape))
    for name in sorted(names):
        for other_shape in (None, (7,)):
            rewrite(folder, lambda t: replace(t, name, other_shape))  # noqa: B023
            broken = CheckpointSource.open(folder)
            called = plain_name(name) if other_shape is None else name
            with pytest.raises(SourceError, match=rf"tensor {called}[ :]"):
                require_tensors(folder, broken.shape, broken.shards)
            shutil.copyfile(whole, folder / "model.safetensors")


DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_that_is_not_finite_is_named_with_its_place(
    dtype: torch.dtype, save_checkpoint: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.checkpoint_scan.CHUNK_BYTES", 64)
    folder, name = save_checkpoint(), "model.layers.1.mlp.gate.weight"
    bad = [float("nan"), float("inf"), float("-inf")]
    for value in bad[:1] if dtype == torch.float8_e4m3fn else bad:

        def change(tensors: dict[str, torch.Tensor], value: float = value) -> None:
            tensors[name] = torch.ones(4, 48).to(dtype)
            tensors[name][2, 31] = value

        rewrite(folder, change)
        with pytest.raises(SourceError, match=rf"{name}, element \[2, 31\]: not a finite number"):
            scan_weights(CheckpointSource.open(folder), experts_in_float16=True)
    largest = torch.finfo(dtype).max
    rewrite(
        folder,
        lambda t: t.update({name: torch.full((4, 48), largest, dtype=torch.float64).to(dtype)}),
    )
    scan_weights(CheckpointSource.open(folder), experts_in_float16=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_expert_weights_stay_within_float16_where_asked(
    dtype: torch.dtype, save_checkpoint: Save
) -> None:
    folder, name = save_checkpoint(), "model.layers.0.mlp.experts.3.down_proj.weight"
    limit = torch.tensor(65504.0).to(dtype)
    if limit.float() > 65504:
        limit = torch.nextafter(limit, torch.zeros_like(limit))
    beyond = torch.nextafter(limit, torch.full_like(limit, torch.inf))
    for value, is_refused in ((limit, False), (-limit, False), (beyond, True), (-beyond, True)):

        def change(tensors: dict[str, torch.Tensor], value: torch.Tensor = value) -> None:
            tensors[name] = tensors[name].to(dtype)
            tensors[name][5, 6] = value

        rewrite(folder, change)
        source = CheckpointSource.open(folder)
        scan_weights(source, experts_in_float16=False)
        if is_refused:
            with pytest.raises(SourceError, match=rf"{name}, row 5 of expert 3: .* beyond 65504"):
                scan_weights(source, experts_in_float16=True)
        else:
            scan_weights(source, experts_in_float16=True)


def test_the_digest_is_of_the_tensors_not_of_files(save_checkpoint: Save) -> None:
    def digest(folder: Path) -> str:
        return scan_weights(CheckpointSource.open(folder), experts_in_float16=True)

    folder = save_checkpoint()
    whole = digest(folder)
    assert digest(folder.rename(folder.parent / "moved")) == whole
    assert digest(save_checkpoint("qwen2_moe", 20_000)) == whole
    moved = folder.parent / "moved"
    for name in ("model.norm.weight", "model.layers.0.mlp.experts.0.up_proj.weight"):
        rewrite(moved, lambda t: t[name].view(torch.uint8).reshape(-1)[-1].bitwise_xor_(1))  # noqa: B023
        assert digest(moved) != whole


def test_progress_of_the_scan_adds_up(save_checkpoint: Save) -> None:
    source = CheckpointSource.open(save_checkpoint())
    seen: list[int] = []
    scan_weights(source, experts_in_float16=True, on_bytes=seen.append)
    assert np.sum(seen) == source.expert_bytes + source.other_bytes
