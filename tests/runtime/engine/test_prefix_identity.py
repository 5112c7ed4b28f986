"""What names a model's blocks: anything that shapes them, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from policies.prefix.keys import root_key
from runtime.engine.prefix_identity import model_namespace, weights_digest
from runtime.model.kv_layout import KvLayout, LayerKv
from runtime.quantized_manifest import MANIFEST, MODULES, BlockRecord, FileRecord, Manifest
from runtime.store.errors import StoreSetupError

CONFIG = {"architectures": ["TinyForCausalLM"], "rope_theta": 1e4, "_name_or_path": "here"}
LARGE, SMALL = (256, 256), (64,)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(LARGE, generator=made),
        "b.weight": torch.randn(LARGE, generator=made),
        "norm.weight": torch.randn(SMALL, generator=made),
    }


def checkpoint(
    folder: Path, weights: dict[str, torch.Tensor], *, shards: int = 1, **config: Any
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names = sorted(weights)
    place = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(names)}
    for file in set(place.values()):
        save_file({n: weights[n] for n in names if place[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    return folder


def test_a_copy_elsewhere_or_in_other_shards_is_the_same_model(tmp_path: Path) -> None:
    one = weights_digest(checkpoint(tmp_path / "one", tensors()))
    moved = {"transformers_version": "9", "_name_or_path": "there"}
    assert weights_digest(checkpoint(tmp_path / "two", tensors(), shards=2, **moved)) == one
    assert len(one) == 64


def test_finetuned_weights_of_the_same_shapes_are_another_model(tmp_path: Path) -> None:
    base = weights_digest(checkpoint(tmp_path / "base", tensors()))
    tuned = tensors()
    tuned["b.weight"] += 1e-3 * torch.randn(LARGE[0], 4) @ torch.randn(4, LARGE[1])
    assert weights_digest(checkpoint(tmp_path / "tuned", tuned)) != base


@pytest.mark.parametrize("place", [0, 31, 63])
def test_a_single_number_of_a_small_tensor_counts(tmp_path: Path, place: int) -> None:
    base = weights_digest(checkpoint(tmp_path / "base", tensors()))
    other = tensors()
    other["norm.weight"][place] += 1
    assert weights_digest(checkpoint(tmp_path / "other", other)) != base


def test_what_samples_miss_the_exact_digest_sees(tmp_path: Path) -> None:
    other = tensors()
    other["a.weight"][1, 0] += 1  # byte 1024 of 262,144: between two samples
    one, two = checkpoint(tmp_path / "a", tensors()), checkpoint(tmp_path / "b", other)
    assert weights_digest(one) == weights_digest(two)
    assert weights_digest(one, exact=True) != weights_digest(two, exact=True)


def test_names_types_shapes_and_configuration_count(tmp_path: Path) -> None:
    weights = tensors()
    renamed = {name.replace("a.", "c."): value for name, value in weights.items()}
    reshaped = weights | {"a.weight": weights["a.weight"].reshape(128, 512)}
    retyped = weights | {"norm.weight": weights["norm.weight"].view(torch.int32)}
    digests = {
        weights_digest(checkpoint(tmp_path / "0", weights)),
        weights_digest(checkpoint(tmp_path / "1", renamed)),
        weights_digest(checkpoint(tmp_path / "2", reshaped)),
        weights_digest(checkpoint(tmp_path / "3", retyped)),
        weights_digest(checkpoint(tmp_path / "4", weights, rope_theta=1e6)),
    }
    assert len(digests) == 5


def test_a_quantized_folder_is_named_by_its_manifest(tmp_path: Path) -> None:
    def manifest(sha: str) -> bytes:
        blocks = tuple(
            BlockRecord(0, 0, module, 32, 32, "model.safetensors", (1,) * 4, (0.0,) * 3, (1,) * 3)
            for module in MODULES
        )
        files = {
            "model.safetensors": FileRecord(9, sha),
            "tokenizer.json": FileRecord(1, "t"),
        }
        return Manifest(
            parent_bits=4,
            seed_bits=2,
            min_bits=2,
            damage_kind="squared_error",
            blocks=blocks,
            files=files,
            provenance={},
        ).to_json()

    digests = []
    for name, sha in (("a", "1"), ("b", "1"), ("c", "2")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / MANIFEST).write_bytes(manifest(sha))
        digests.append(weights_digest(folder))
    assert digests[0] == digests[1] != digests[2]


def test_a_folder_without_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreSetupError, match=r"config\.json: cannot be read"):
        weights_digest(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(StoreSetupError, match=r"config\.json: must be a JSON object, found list"):
        weights_digest(tmp_path)


def test_other_weights_types_layouts_widths_and_salts_share_no_key(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", tensors())
    wide, narrow = LayerKv(kv_heads=2, head_dim=8), LayerKv(kv_heads=2, head_dim=8, window_tokens=9)
    plain = KvLayout([wide, wide], torch.float32, 1024)
    spaces = [
        model_namespace(folder, plain),
        model_namespace(folder, plain, revision="ff"),
        model_namespace(folder, plain, widths="4"),
        model_namespace(folder, KvLayout([wide, wide], torch.bfloat16, 1024)),
        model_namespace(folder, KvLayout([wide, wide], torch.float16, 1024)),
        model_namespace(folder, KvLayout([wide, narrow], torch.float32, 1024)),
        model_namespace(folder, KvLayout([wide, 0], torch.float32, 1024)),
        model_namespace(folder, KvLayout([wide, wide], torch.float32, 1024, block_tokens=8)),
    ]
    roots = {root_key(space, salt) for space in spaces for salt in ("", "t")}
    assert len(roots) == 2 * len(spaces)
    assert spaces[0].model == "TinyForCausalLM"
    assert (spaces[0].layers, spaces[0].kv_heads) == ("0-1", "2")


def test_the_size_of_a_page_counts_only_where_pages_have_unused_bytes(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", tensors())
    full, padded = LayerKv(kv_heads=2, head_dim=8), LayerKv(kv_heads=2, head_dim=12)

    def space(layer: LayerKv, page_bytes: int) -> Any:
        own = KvLayout([layer, layer], torch.float32, page_bytes)
        return model_namespace(folder, own, revision="r")

    assert space(full, 1024) == space(full, 2048)
    assert space(padded, 1024) != space(padded, 4096)


def test_the_digest_depends_on_no_date(tmp_path: Path) -> None:
    one = checkpoint(tmp_path / "one", tensors())
    before = weights_digest(one)
    shutil.copytree(one, tmp_path / "two", copy_function=shutil.copyfile)
    assert weights_digest(tmp_path / "two") == before
