"""Checkpoints as weight blocks, against the models that wrote them; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.checkpoint_source import CheckpointSource, SourceError, as_float32

FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gemma4_text")
Save = Callable[..., Path]


def experts_of(model: Any, layer: int) -> Any:
    block = model.model.layers[layer]
    return block.experts if hasattr(block, "experts") else block.mlp.experts


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_blocks_are_the_models_expert_matrices(
    family: str, shard_bytes: int, save_checkpoint: Save, family_model: Callable[[str], Any]
) -> None:
    folder = save_checkpoint(family, shard_bytes)
    source = CheckpointSource.open(folder)
    assert (len(source.shards.headers) > 1) == (shard_bytes < 10**9)
    layers = [1] if family == "qwen3_moe" else [0, 1]  # its first layer is dense
    wanted = [(a, b, c) for a in layers for b in range(4) for c in ("gate_up", "down")]
    assert [(x.layer, x.expert, x.module) for x in source.blocks] == wanted
    assert [x.moe_layer for x in source.blocks] == [layers.index(x[0]) for x in wanted]
    for block in source.blocks:
        experts = experts_of(family_model(family), block.layer)
        matrix = experts.gate_up_proj if block.module == "gate_up" else experts.down_proj
        exact = matrix[block.expert].detach().float().numpy()
        assert exact.shape == (block.rows, block.columns)
        np.testing.assert_array_equal(source.read_rows(block, 0, block.rows), exact)
        np.testing.assert_array_equal(source.read_rows(block, 17, 45), exact[17:45])
    count = sum(parameter.numel() for parameter in family_model(family).parameters())
    buffers = 2 * len(layers) if family == "gemma4_text" else 0  # one layer scalar each
    assert source.expert_bytes + source.other_bytes in (2 * count, 2 * count + buffers)


def test_fused_tensors_are_read_as_separate_ones_are(
    save_checkpoint: Save, family_model: Callable[[str], Any]
) -> None:
    folder = save_checkpoint("qwen2_moe")
    before = CheckpointSource.open(folder)
    exact = [before.read_rows(block, 0, block.rows) for block in before.blocks]

    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]
        for layer in (0, 1):
            experts = experts_of(family_model("qwen2_moe"), layer)
            prefix = f"model.layers.{layer}.mlp.experts"
            tensors[f"{prefix}.gate_up_proj"] = experts.gate_up_proj.detach().clone()
            tensors[f"{prefix}.down_proj"] = experts.down_proj.detach().clone()

    rewrite(folder, fuse)
    after = CheckpointSource.open(folder)
    for block, rows in zip(after.blocks, exact, strict=True):
        np.testing.assert_array_equal(after.read_rows(block, 0, block.rows), rows)
        np.testing.assert_array_equal(after.read_rows(block, 39, 41), rows[39:41])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_float_types_are_read_exactly(dtype: torch.dtype, save_checkpoint: Save) -> None:
    folder = save_checkpoint("olmoe")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    values = torch.randn(48, 40, generator=torch.Generator().manual_seed(3)).to(dtype)
    rewrite(folder, lambda tensors: tensors.update({name: values}))
    source = CheckpointSource.open(folder)
    block = source.blocks[(1 * 4 + 2) * 2 + 1]
    np.testing.assert_array_equal(source.read_rows(block, 0, 48), values.float().numpy())


def test_every_bfloat16_is_converted_exactly() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    wanted = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(
        as_float32(bits.tobytes(), "BF16").view(np.uint32), wanted.view(np.uint32)
    )


def test_a_tower_in_the_prefix_is_understood(save_checkpoint: Save) -> None:
    folder = save_checkpoint("gemma4_text")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)

    rewrite(folder, rename)
    config = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "gemma4", "text_config": config}
    (folder / "config.json").write_text(json.dumps(outer))
    assert len(CheckpointSource.open(folder).blocks) == 16


EXPERT = "model.layers.1.mlp.experts.3"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{EXPERT}.up_proj.weight"), r"the up matrix of layer 1, expert 3"),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.4.up_proj.weight": torch.zeros(1)}),
            r"model.safetensors: tensor .*experts.4.up_proj.weight: one .* too many",
        ),
        (
            lambda t: t.update({f"{EXPERT}.up_proj.weight_scale_inv": torch.zeros(1)}),
            r"tensor .*experts.3.up_proj.weight_scale_inv: no known layout",
        ),
        (
            lambda t: t.update({f"{EXPERT}.down_proj.weight": torch.zeros(40, 48)}),
            r"tensor .*experts.3.down_proj.weight: shape \[40, 48\], .*\[48, 40\]",
        ),
        (
            lambda t: t.update({f"{EXPERT}.down_proj.weight": torch.zeros(48, 40).char()}),
            r"tensor .*experts.3.down_proj.weight: dtype I8, must be one of BF16, F16, F32",
        ),
        (
            lambda t: t.update(
                {"model.layers.0.block_sparse_moe.experts.0.w1.weight": torch.ones(1)}
            ),
            r"are the same matrix",
        ),
        (
            lambda t: t.update({"model.layers.2.mlp.experts.0.up_proj.weight": torch.ones(40, 48)}),
            r"tensor model.layers.2.mlp.experts.0.up_proj.weight: one expert matrix too many",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.down_proj": torch.ones(4, 48, 40)}),
            r"one expert matrix too many",
        ),
    ],
)
def test_expert_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, torch.Tensor]], Any], message: str, save_checkpoint: Save
) -> None:
    folder = save_checkpoint()
    rewrite(folder, change)
    with pytest.raises(SourceError, match=message):
        CheckpointSource.open(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt_oss"}, r"config.json: model_type: 'gpt_oss', must be one of"),
        ({"model_type": "llama"}, r"config.json: model_type: 'llama'"),
        ({"quantization_config": {"bits": 4}}, r"config.json: quantization_config: .*quantized"),
        ({"num_experts": "many"}, r"config.json: num_experts"),
        ({"num_experts": 5}, r"layer 0, expert 4"),
        ({"mlp_only_layers": [0, 1]}, r"no layer has experts"),
    ],
)
def test_configurations_that_do_not_fit_are_named(
    fields: dict[str, Any], message: str, save_checkpoint: Save
) -> None:
    folder = save_checkpoint()
    edit_config(folder, **fields)
    with pytest.raises(SourceError, match=message):
        CheckpointSource.open(folder)


@pytest.mark.parametrize("cut", [1, 1000, 40_000])
def test_a_shard_that_is_cut_short_is_named(cut: int, save_checkpoint: Save) -> None:
    path = save_checkpoint() / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    with pytest.raises(SourceError, match=r"model.safetensors: cut short: \d+ bytes"):
        CheckpointSource.open(path.parent)
    path.write_bytes(content + b"\0")
    with pytest.raises(SourceError, match=r"model.safetensors: longer than its tensors"):
        CheckpointSource.open(path.parent)
    path.write_bytes(content[:100])
    with pytest.raises(SourceError, match=r"model.safetensors: no safetensors file, or cut short"):
        CheckpointSource.open(path.parent)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "no JSON"),
        (b"[]", "no JSON object"),
        (b'{"a": {"dtype": "F4", "shape": [], "data_offsets": [0, 0]}}', "a: dtype 'F4'"),
        (
            b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1]}}',
            r"a: 1 bytes, but U8 \[2",
        ),
        (b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}', "a starts at byte"),
        (b'{"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}', "whole numbers"),
        (b'{"a": {"dtype": "U8"}}', "a: needs dtype, shape and data_offsets"),
        (b'{"a": {}, "a": {}}', "a is there twice"),
    ],
)
def test_a_header_that_contradicts_itself_is_named(
    header: bytes, message: str, save_checkpoint: Save
) -> None:
    path = save_checkpoint() / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(SourceError, match=rf"model.safetensors: .*{message}"):
        CheckpointSource.open(path.parent)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", "pytorch_model.bin: PyTorch pickle weights; need safetensors"),
        ("model-Q4_K_M.gguf", "model-Q4_K_M.gguf: GGUF weights; need safetensors"),
        ("model-00001-of-00002.safetensors", "model-00001-of-00002.safetensors without"),
        ("notes.txt", "no safetensors weights"),
    ],
)
def test_weights_of_another_format_are_named(
    file: str, message: str, save_checkpoint: Save
) -> None:
    folder = save_checkpoint()
    (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(b"x")
    with pytest.raises(SourceError, match=message):
        CheckpointSource.open(folder)


def test_an_index_that_disagrees_with_its_shards_is_named(save_checkpoint: Save) -> None:
    folder = save_checkpoint("qwen2_moe", 20_000)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name, file = next(iter(index["weight_map"].items()))

    def refused(weight_map: Any, message: str) -> None:
        path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(SourceError, match=message):
            CheckpointSource.open(folder)

    whole = index["weight_map"]
    other = next(shard for shard in whole.values() if shard != file)
    refused(whole | {name: other}, rf"tensor {name} .* not there, it is in {file}")
    refused(whole | {"extra": file}, r"tensor extra of .* is not there")
    refused({k: v for k, v in whole.items() if k != name}, rf"{file}: tensor {name} is not in")
    refused(whole | {name: "../x.safetensors"}, r"'../x.safetensors' is no file of this folder")
    refused(whole | {name: "weights.bin"}, r"weights.bin is no safetensors file")
    refused({}, r"weight_map: must be a table")
    (folder / file).unlink()
    refused(whole, rf"{file}: cannot be read: No such file")


def test_a_tensor_in_two_shards_is_named(save_checkpoint: Save) -> None:
    folder = save_checkpoint("qwen2_moe", 20_000)
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    first, last = min(weight_map.values()), max(weight_map.values())
    both = load_file(folder / first) | load_file(folder / last)
    save_file(both, folder / last)
    with pytest.raises(SourceError, match=rf"{last}: tensor .* is also in {first}"):
        CheckpointSource.open(folder)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"nowhere: no folder"):
        CheckpointSource.open(tmp_path / "nowhere")
    with pytest.raises(SourceError, match=r"config.json: cannot be read"):
        CheckpointSource.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SourceError, match=r"config.json: no JSON"):
        CheckpointSource.open(tmp_path)
    (tmp_path / "pagedweight.json").write_text("{}")
    with pytest.raises(SourceError, match=r"already quantized"):
        CheckpointSource.open(tmp_path)
