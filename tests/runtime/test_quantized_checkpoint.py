"""Reading quantized checkpoints: every kind of damage is found and named."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.quantize import QuantizeSettings, quantize_checkpoint
from runtime.quantized_checkpoint import QuantizedCheckpoint, QuantizedCheckpointError

MASS = [[0.25] * 4] * 2


@pytest.fixture(scope="module")
def finished(family_model: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    with contextlib.redirect_stderr(io.StringIO()):
        family_model("olmoe").save_pretrained(folder / "source")
    quantize_checkpoint(
        folder / "source", folder / "out", QuantizeSettings(parent_bits=5, shard_bytes=40_000)
    )
    return folder / "out"


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "out"))


def refused(folder: Path, message: str, **how: Any) -> None:
    with pytest.raises(QuantizedCheckpointError, match=message):
        QuantizedCheckpoint.open(folder, **how)


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "pagedweight.json"
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_flipped_bit_is_found(data: st.DataObject, finished: Path) -> None:
    files = sorted(path for path in finished.iterdir() if path.name != "pagedweight.json")
    path = data.draw(st.sampled_from(files))
    place = data.draw(st.integers(0, path.stat().st_size - 1))
    content = path.read_bytes()
    changed = bytearray(content)
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(changed)
    try:
        with pytest.raises(QuantizedCheckpointError, match=path.name.replace(".", r"\.")):
            QuantizedCheckpoint.open(finished, verify=True)
    finally:
        path.write_bytes(content)


def test_a_flipped_bit_of_a_plane_is_named_with_its_plane(out: Path) -> None:
    checkpoint = QuantizedCheckpoint.open(out)
    record = checkpoint.blocks[5]
    path = out / record.file
    planes = checkpoint.block(5).planes
    start = path.read_bytes().find(planes[3].tobytes())
    content = bytearray(path.read_bytes())
    content[start] ^= 1
    path.write_bytes(content)
    refused(out, rf"{record.file}: SHA-256 differs .*; plane 3 of {record.name} is", verify=True)
    checkpoint = QuantizedCheckpoint.open(out)  # sizes and shapes are right
    checkpoint.block(4, verify=True)
    with pytest.raises(QuantizedCheckpointError, match=rf"{record.name}: CRC-32 of plane 3"):
        checkpoint.block(5, verify=True)


def flip(path: Path, content: bytes) -> None:
    """Flip a bit of the first place in a file that has this content."""
    changed = bytearray(path.read_bytes())
    changed[changed.find(content)] ^= 1
    path.write_bytes(changed)


def test_a_flipped_bit_of_a_table_or_another_tensor_is_named_with_it(out: Path) -> None:
    checkpoint = QuantizedCheckpoint.open(out)
    name = "model.layers.1.mlp.gate.weight"
    file, _ = checkpoint.other_tensors[name]
    flip(out / file, bytes(checkpoint.other_tensor(name)[2]))
    refused(out, rf"{file}: SHA-256 differs .*; tensor {name} is damaged", verify=True)
    record = checkpoint.blocks[5]
    flip(out / record.file, checkpoint.block(5).tables[4].tobytes())
    refused(out, rf"{record.file}: SHA-256 differs .*; table4 of {record.name} is", verify=True)
    checkpoint = QuantizedCheckpoint.open(out)
    checkpoint.block(4, verify=True)
    with pytest.raises(QuantizedCheckpointError, match=rf"{record.name}: CRC-32 of table4"):
        checkpoint.block(5, verify=True)


def to_version_1(table: dict[str, Any]) -> None:
    table["version"] = 1
    for block in table["blocks"]:
        del block["table_crc32"]
    for record in table["files"].values():
        del record["tensor_crc32"]


def test_version_1_without_checksums_of_tables_is_still_read(out: Path) -> None:
    new = QuantizedCheckpoint.open(out)
    edit(out, to_version_1)
    checkpoint = QuantizedCheckpoint.open(out, verify=True)
    np.testing.assert_array_equal(checkpoint.damage, new.damage)
    checkpoint.block(5, verify=True)
    with pytest.raises(ValueError, match="version: 1, only 2 is written"):
        checkpoint.manifest.to_json()
    record = checkpoint.blocks[5]
    flip(out / record.file, checkpoint.block(5).tables[4].tobytes())
    refused(out, rf"{record.file}: SHA-256 differs from pagedweight.json$", verify=True)


def test_routing_masses_are_read_where_there_are_any(out: Path) -> None:
    assert QuantizedCheckpoint.open(out).routing_mass is None
    edit(out, lambda t: t.update(routing_mass={"first": MASS, "second": [[0.1] * 4] * 2}))
    checkpoint = QuantizedCheckpoint.open(out)
    assert checkpoint.routing_mass is not None
    assert [one.tolist() for one in checkpoint.routing_mass] == [MASS, [[0.1] * 4] * 2]
    assert json.loads(checkpoint.manifest.to_json()) == json.loads(
        (out / "pagedweight.json").read_text()
    )


def test_blocks_are_read_only_views_in_block_order(out: Path) -> None:
    checkpoint = QuantizedCheckpoint.open(out)
    places = [(block.layer, block.expert, block.module) for block in checkpoint.blocks]
    assert places == [(a, b, c) for a in (0, 1) for b in range(4) for c in ("gate_up", "down")]
    block = checkpoint.block(2)
    assert not block.planes.flags.writeable and block.planes.dtype == np.uint32
    assert sorted(block.tables) == [2, 3, 4, 5]
    assert checkpoint.damage.shape == (16, 4)
    assert checkpoint.config["model_type"] == "olmoe"
    with pytest.raises(IndexError):
        checkpoint.block(16)


@pytest.mark.parametrize("cut", [1, 5000])
def test_a_file_that_is_cut_short_is_named(cut: int, out: Path) -> None:
    for path in sorted(out.iterdir()):
        content = path.read_bytes()
        path.write_bytes(content[: max(0, len(content) - cut)])
        refused(out, path.name)
        path.write_bytes(content)
    QuantizedCheckpoint.open(out, verify=True)


def test_a_missing_file_is_named(out: Path) -> None:
    for path in sorted(out.iterdir()):
        content = path.read_bytes()
        path.unlink()
        refused(out, path.name)
        path.write_bytes(content)


def test_another_folder_is_no_quantized_checkpoint(tmp_path: Path) -> None:
    refused(tmp_path, r"no quantized checkpoint \(pagedweight.json is missing\)")
    refused(tmp_path / "nowhere", r"nowhere: no folder")
    (tmp_path / "pagedweight.json").write_text("[]")
    refused(tmp_path, r"pagedweight.json: content: no table")
    (tmp_path / "pagedweight.json").write_text('{"format": "gptq"}')
    refused(tmp_path, r"pagedweight.json: format: 'gptq', must be 'pagedweight'")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(version=3), r"version: 3, this program reads 1 and 2"),
        (lambda t: t.update(parent_bits=9), r"parent_bits: 9, must be within 1..8"),
        (lambda t: t.update(min_bits=True), r"min_bits: must be of type int"),
        (lambda t: t.update(levels=[2, 3]), r"levels: must be 2..5"),
        (lambda t: t.update(damage_kind="good"), r"damage_kind: 'good'"),
        (lambda t: t.update(blocks=[]), r"blocks: must be every layer's experts"),
        (lambda t: t["blocks"].pop(3), r"blocks: must be every layer's experts"),
        (lambda t: t["blocks"].reverse(), r"blocks: must be every layer's experts"),
        (lambda t: t["blocks"][3].pop("rows"), r"blocks\[3\].rows: missing"),
        (
            lambda t: t["blocks"][3].update(rows=7),
            r"experts.1.down.planes: I32 .*, must be I32 \[5, 7",
        ),
        (lambda t: t["blocks"][0].update(module="up"), r"blocks\[0\].module: 'up'"),
        (lambda t: t["blocks"][1].update(damage=[1, 2]), r"blocks\[1\].damage: must be one"),
        (lambda t: t["blocks"][1].update(damage=[float("nan")] * 4), r"blocks\[1\].damage"),
        (lambda t: t["blocks"][1].update(damage=[-1.0] * 4), r"blocks\[1\].damage"),
        (lambda t: t["blocks"][2].update(plane_crc32=[1]), r"plane_crc32: must be 5 numbers"),
        (lambda t: t["blocks"][2].update(table_crc32=[1]), r"table_crc32: must be 4 numbers"),
        (lambda t: t["blocks"][2].pop("table_crc32"), r"blocks\[2\].table_crc32: missing"),
        (
            lambda t: next(f for n, f in t["files"].items() if "others" in n).update(
                tensor_crc32={"x": -1}
            ),
            r"tensor_crc32: must be numbers of 32 bits",
        ),
        (lambda t: t["blocks"][2].update(file="x"), r"blocks\[2\].file: 'x' is not among files"),
        (lambda t: t["files"].update({"../x": {}}), r"files.\.\./x|'../x' is no file"),
        (lambda t: t["files"]["config.json"].pop("sha256"), r"files.config.json.sha256: missing"),
        (lambda t: t.pop("provenance"), r"provenance: missing"),
        (lambda t: t.update(routing_mass=[]), r"routing_mass: must be of type dict"),
        (lambda t: t.update(routing_mass={"first": MASS}), r"routing_mass.second: missing"),
        (
            lambda t: t.update(routing_mass={"first": MASS, "second": MASS[1:]}),
            r"routing_mass.second: must be 2 rows of 4 finite numbers >= 0",
        ),
        (
            lambda t: t.update(routing_mass={"first": [[1, 2, 3, -1]] * 2, "second": MASS}),
            r"routing_mass.first: must be 2 rows of 4 finite numbers >= 0",
        ),
    ],
)
def test_a_manifest_that_contradicts_itself_is_named(
    change: Callable[[dict[str, Any]], Any], message: str, out: Path
) -> None:
    edit(out, change)
    refused(out, message)
