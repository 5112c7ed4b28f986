"""Quantized checkpoints against the models they come from, and runs that are cut off."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kernels.planes import pack_planes
from kernels.reference import dequantize
from models.quality import output_error
from runtime.calibration_stats import CalibrationError, write_index, write_layer
from runtime.checkpoint_scan import scan_weights
from runtime.checkpoint_source import CheckpointSource, SourceError
from runtime.checkpoint_tensors import file_sha256
from runtime.nested_kmeans import quantize_rows
from runtime.quantize import (
    JournalError,
    OutputError,
    QuantizeError,
    QuantizeSettings,
    quantize_checkpoint,
)
from runtime.quantized_checkpoint import QuantizedCheckpoint, QuantizedCheckpointError
from runtime.row_gain import with_row_gain

FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gemma4_text")
SMALL_FILES = QuantizeSettings(shard_bytes=150_000)  # a file of one or two blocks
Save = Callable[..., Path]
RunCommand = Callable[..., Any]


def exact_blocks(model: Any) -> list[np.ndarray]:
    """Expert matrices in the order of block numbers, from the model in memory."""
    blocks = []
    for layer in model.model.layers:
        experts = (
            layer.experts if hasattr(layer, "experts") else getattr(layer.mlp, "experts", None)
        )
        if experts is not None:
            for gate_up, down in zip(experts.gate_up_proj, experts.down_proj, strict=True):
                blocks += [gate_up.detach().float().numpy(), down.detach().float().numpy()]
    return blocks


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_are_the_clustered_rows_of_the_model(
    family: str, save_checkpoint: Save, family_model: Callable[[str], Any], tmp_path: Path
) -> None:
    keep_gain = family in ("qwen2_moe", "olmoe")
    settings = QuantizeSettings(keep_gain=keep_gain)
    manifest = quantize_checkpoint(save_checkpoint(family), tmp_path / "out", settings)
    assert manifest.provenance["settings"]["keep_gain"] == keep_gain
    checkpoint = QuantizedCheckpoint.open(tmp_path / "out", verify=True)
    assert checkpoint.manifest == manifest and manifest.damage_kind == "squared_error"
    exact = exact_blocks(family_model(family))
    assert len(checkpoint.blocks) == len(exact)
    for index, weights in enumerate(exact):
        rows = quantize_rows(weights.astype(np.float64))
        if keep_gain:
            rows = with_row_gain(weights, rows, None)
        block = checkpoint.block(index, verify=True)
        assert block.columns == weights.shape[1]
        np.testing.assert_array_equal(block.planes, pack_planes(rows.codes, 8))
        for level, bits in enumerate(checkpoint.levels):
            np.testing.assert_array_equal(block.tables[bits], rows.tables[bits].astype(np.float16))
            served = dequantize(block.planes, block.tables[bits], bits, block.columns)
            lost = ((weights.astype(np.float64) - served) ** 2).sum()
            assert checkpoint.damage[index, level] == pytest.approx(lost, rel=1e-9, abs=1e-30)


def test_all_other_tensors_and_files_are_the_sources(save_checkpoint: Save, tmp_path: Path) -> None:
    source = save_checkpoint("qwen2_moe", 20_000)
    quantize_checkpoint(source, tmp_path / "out")
    checkpoint = QuantizedCheckpoint.open(tmp_path / "out")
    shards = [load_file(path) for path in source.glob("*.safetensors")]
    wanted = {
        name: tensor
        for shard in shards
        for name, tensor in shard.items()
        if ".experts." not in name
    }
    assert set(checkpoint.other_tensors) == set(wanted)
    for path in (tmp_path / "out").glob("others-*.safetensors"):
        for name, tensor in load_file(path).items():
            assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name])
            np.testing.assert_array_equal(
                checkpoint.other_float32(name), wanted[name].float().numpy()
            )
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer_config.json", "merges.txt"} < names
    assert "model.safetensors.index.json" not in names
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_the_safetensors_package_reads_the_experts(save_checkpoint: Save, tmp_path: Path) -> None:
    quantize_checkpoint(save_checkpoint(), tmp_path / "out", SMALL_FILES)
    checkpoint = QuantizedCheckpoint.open(tmp_path / "out")
    for index, block in enumerate(checkpoint.blocks):
        with safe_open(tmp_path / "out" / block.file, "numpy") as file:
            planes = file.get_tensor(f"{block.name}.planes")
            assert planes.dtype == np.int32
            np.testing.assert_array_equal(planes.view(np.uint32), checkpoint.block(index).planes)
            for bits, table in checkpoint.block(index).tables.items():
                np.testing.assert_array_equal(file.get_tensor(f"{block.name}.table{bits}"), table)


def test_threads_and_file_sizes_change_no_block(
    save_checkpoint: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.quantize_block.STRIPE_WEIGHTS", 500)  # many stripes a block
    source = save_checkpoint()
    quantize_checkpoint(source, tmp_path / "one")
    quantize_checkpoint(source, tmp_path / "three", threads=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    quantize_checkpoint(source, tmp_path / "small", SMALL_FILES)
    one, small = (QuantizedCheckpoint.open(tmp_path / name) for name in ("one", "small"))
    assert len({block.file for block in small.blocks}) > 4
    np.testing.assert_array_equal(one.damage, small.damage)
    for index in range(len(one.blocks)):
        np.testing.assert_array_equal(one.block(index).planes, small.block(index).planes)


def test_other_widths_are_honoured(save_checkpoint: Save, tmp_path: Path) -> None:
    settings = QuantizeSettings(parent_bits=5, seed_bits=2, min_bits=1)
    quantize_checkpoint(save_checkpoint("olmoe"), tmp_path / "out", settings)
    checkpoint = QuantizedCheckpoint.open(tmp_path / "out", verify=True)
    assert checkpoint.levels == (1, 2, 3, 4, 5)
    assert checkpoint.block(0).planes.shape == (5, 80, 2)
    assert checkpoint.damage.shape == (16, 5)
    assert (np.diff(checkpoint.damage, axis=1) < 0).all()


@pytest.fixture(params=["full", "diagonal"])
def calibration(request: pytest.FixtureRequest, save_checkpoint: Save, tmp_path: Path) -> Path:
    """Statistics of a qwen2_moe model of two layers, four experts of 40 by 48."""
    draws = np.random.default_rng(5)
    folder = tmp_path / "stats"
    folder.mkdir()
    for layer in range(2):
        arrays: dict[str, Any] = {
            "tokens": np.array([5000]),
            "routed_tokens": np.array([2000, 3000, 4000, 1000]),
            "gate_sum": draws.random(4),
            "squared_gate_sum": draws.random(4),
            "mass": draws.random(4),
            "scale": draws.random(1),
        }
        for module, rows, columns in (("gate_up", 80, 48), ("down", 48, 40)):
            inputs = draws.standard_normal((4, 200, columns)) * np.exp(
                draws.standard_normal(columns)
            )
            moment = np.einsum("etk,etj->ekj", inputs, inputs) / 200
            if request.param == "diagonal":
                moment = np.einsum("ekk->ek", moment)
            arrays[f"{module}.moment"] = moment.astype(np.float32)
            arrays[f"{module}.row_weight"] = draws.random((4, rows)).astype(np.float32)
        write_layer(folder, layer, arrays, "test")
    digest = scan_weights(CheckpointSource.open(save_checkpoint()), experts_in_float16=False)
    config = file_sha256(save_checkpoint() / "config.json")
    of_model = {"weights_sha256": digest, "config_sha256": config}
    shape = {"experts": 4, "hidden": 48, "intermediate": 40}
    write_index(folder, {**shape, "provenance": of_model}, 2)
    return folder


def test_calibration_weighs_clusters_and_damage(
    calibration: Path, save_checkpoint: Save, family_model: Callable[[str], Any], tmp_path: Path
) -> None:
    from runtime.calibration_stats import CalibrationStats

    source = save_checkpoint()
    quantize_checkpoint(source, tmp_path / "out", calibration=calibration)
    checkpoint = QuantizedCheckpoint.open(tmp_path / "out", verify=True)
    assert checkpoint.manifest.damage_kind == "calibrated"
    assert checkpoint.manifest.provenance["calibration"]["name"] == "stats"
    stats = CalibrationStats.open(calibration)
    assert checkpoint.routing_mass is not None
    for found, get in zip(checkpoint.routing_mass, (stats.first_mass, stats.mass), strict=True):
        assert found.tolist() == [[get(layer, e) for e in range(4)] for layer in range(2)]
    for index, weights in enumerate(exact_blocks(family_model("qwen2_moe"))):
        layer, expert, module = index // 8, index // 2 % 4, index % 2
        moment = stats.input_second_moment(layer, expert, module)
        diagonal = moment if moment.ndim == 1 else moment.diagonal()
        block = checkpoint.block(index)
        np.testing.assert_array_equal(
            block.planes, pack_planes(quantize_rows(weights, diagonal.copy()).codes, 8)
        )
        for level, bits in enumerate(checkpoint.levels):
            served = dequantize(block.planes, block.tables[bits], bits, block.columns)
            lost = output_error(weights, served, moment, stats.row_weight(layer, expert, module))
            lost *= stats.mass(layer, expert) * stats.scale(layer)
            assert checkpoint.damage[index, level] == pytest.approx(lost, rel=1e-4, abs=1e-30)


def test_statistics_of_another_shape_are_refused(
    calibration: Path, save_checkpoint: Save, tmp_path: Path
) -> None:
    index = json.loads((calibration / "calibration.json").read_text())
    (calibration / "calibration.json").write_text(json.dumps(index | {"experts": 5}))
    with pytest.raises(CalibrationError, match="experts is 5, the model has 4"):
        quantize_checkpoint(save_checkpoint(), tmp_path / "out", calibration=calibration)
    assert not (tmp_path / "out").exists()


def fine_tuned(source: Path) -> None:
    """Change the last bit of one number."""
    rewrite(source, lambda t: t["model.layers.1.mlp.experts.2.up_proj.weight"][3, 4].mul_(1.01))


@pytest.mark.parametrize("calibration", ["full"], indirect=True)
def test_statistics_of_other_weights_of_the_same_shape_are_refused(
    calibration: Path, save_checkpoint: Save, tmp_path: Path
) -> None:
    source, out = save_checkpoint(), tmp_path / "out"
    moved = shutil.copytree(save_checkpoint("qwen2_moe", 20_000), tmp_path / "moved")
    os.utime(moved / "config.json", ns=(0, 5))
    quantize_checkpoint(moved, tmp_path / "fits", calibration=calibration)  # in other shards
    shutil.rmtree(source)
    source = save_checkpoint()
    fine_tuned(source)
    with pytest.raises(CalibrationError, match=r"stats: statistics of another model: its weights"):
        quantize_checkpoint(source, out, calibration=calibration)
    shutil.rmtree(source)
    source = save_checkpoint()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rope_theta": 7.0}))
    with pytest.raises(CalibrationError, match=r"statistics of another model: its config.json"):
        quantize_checkpoint(source, out, calibration=calibration)
    index = json.loads((calibration / "calibration.json").read_text())
    del index["provenance"]["weights_sha256"]
    (calibration / "calibration.json").write_text(json.dumps(index))
    with pytest.raises(CalibrationError, match=r"provenance.weights_sha256 is missing"):
        quantize_checkpoint(source, out, calibration=calibration)
    assert not out.exists()


KILLED_RUN = """
import os, signal, sys
from runtime.quantize import QuantizeSettings, quantize_checkpoint

class Killer:
    files = weights = 0
    def on_start(self, weights, kept_weights, kept_files): pass
    def on_weights(self, weights):
        self.weights += weights
        if self.weights > int(sys.argv[4]): os.kill(os.getpid(), signal.SIGKILL)
    def on_file(self, name):
        self.files += 1
        if self.files == int(sys.argv[3]): os.kill(os.getpid(), signal.SIGKILL)

quantize_checkpoint(sys.argv[1], sys.argv[2], QuantizeSettings(shard_bytes=150_000),
                    existing="resume", progress=Killer())
"""


def run_until_killed(source: Path, out: Path, *, files: int = 99, weights: int = 10**9) -> None:
    arguments = [str(source), str(out), str(files), str(weights)]
    run = subprocess.run([sys.executable, "-c", KILLED_RUN, *arguments], check=False, timeout=120)
    assert run.returncode == -signal.SIGKILL


def test_a_killed_run_is_taken_up_and_gives_the_same_bytes(
    save_checkpoint: Save, tmp_path: Path
) -> None:
    source, out = save_checkpoint(), tmp_path / "out"
    quantize_checkpoint(source, tmp_path / "whole", SMALL_FILES)
    run_until_killed(source, out, files=3)
    with pytest.raises(QuantizedCheckpointError, match=r"an unfinished quantization; .*--resume"):
        QuantizedCheckpoint.open(out)
    first = {path.name: path.stat() for path in out.glob("experts-*.safetensors")}
    assert len(first) == 3
    run_until_killed(source, out, weights=20_000)  # in the middle of a file
    assert list(out.glob(".*.partial-*"))
    with pytest.raises(OutputError, match=r"unfinished work; .*--resume .*--overwrite"):
        quantize_checkpoint(source, out, SMALL_FILES)

    damaged = out / sorted(first)[1]
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    quantize_checkpoint(source, out, SMALL_FILES, existing="resume")
    assert contents(out) == contents(tmp_path / "whole")
    for name, before in first.items():
        is_same_file = (out / name).stat().st_ino == before.st_ino
        assert is_same_file == (name != damaged.name)


class StopError(Exception):
    """Ends a run."""


class StopAfter:
    def __init__(self, files: int) -> None:
        self.files = files

    def on_start(self, weights: int, kept_weights: int, kept_files: int) -> None: ...
    def on_weights(self, weights: int) -> None: ...

    def on_file(self, name: str) -> None:
        self.files -= 1
        if self.files == 0:
            raise StopError


def test_only_the_same_run_is_taken_up(save_checkpoint: Save, tmp_path: Path) -> None:
    source, out = save_checkpoint(), tmp_path / "out"
    with pytest.raises(StopError):
        quantize_checkpoint(source, out, SMALL_FILES, progress=StopAfter(2))
    other = QuantizeSettings(shard_bytes=150_000, seed_bits=4)
    with pytest.raises(JournalError, match=r"settings.seed_bits \(3, now 4\)"):
        quantize_checkpoint(source, out, other, existing="resume")
    os.utime(source / "model.safetensors", ns=(0, 12345))
    with pytest.raises(JournalError, match=r"source_mtime_ns.model.safetensors"):
        quantize_checkpoint(source, out, SMALL_FILES, existing="resume")
    (out / "pagedweight-progress.json").write_text("{")
    with pytest.raises(JournalError, match=r"cannot be read; start again with --overwrite"):
        quantize_checkpoint(source, out, SMALL_FILES, existing="resume")
    quantize_checkpoint(source, out, existing="overwrite")
    assert len(list(out.glob("experts-*"))) == 1  # none of the small files is left
    QuantizedCheckpoint.open(out, verify=True)


def test_a_finished_run_is_neither_redone_nor_lost(save_checkpoint: Save, tmp_path: Path) -> None:
    source, out = save_checkpoint(), tmp_path / "out"
    manifest = quantize_checkpoint(source, out)
    before = contents(out)
    with pytest.raises(OutputError, match=r"out: holds finished work"):
        quantize_checkpoint(source, out)
    assert quantize_checkpoint(source, out, existing="resume") == manifest
    other = QuantizeSettings(min_bits=3, seed_bits=4)
    wanted = r"settings.seed_bits \(3, now 4\), settings.min_bits \(2, now 3\)"
    with pytest.raises(OutputError, match=rf"finished, with another {wanted}; replace"):
        quantize_checkpoint(source, out, other, existing="resume")
    assert contents(out) == before


def test_an_overwrite_that_fails_leaves_the_old_result_as_it_was(
    save_checkpoint: Save, tmp_path: Path
) -> None:
    source, out = save_checkpoint(), tmp_path / "out"
    quantize_checkpoint(source, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for files in (1, 3):
        with pytest.raises(StopError):
            quantize_checkpoint(
                source, out, SMALL_FILES, existing="overwrite", progress=StopAfter(files)
            )
        kept = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
        assert kept == before
        QuantizedCheckpoint.open(out, verify=True)
    with pytest.raises(OutputError, match=r"out: holds finished work"):
        quantize_checkpoint(source, out, SMALL_FILES)
    other = QuantizeSettings(min_bits=3)
    with pytest.raises(JournalError, match=r"settings.min_bits \(2, now 3\)"):
        quantize_checkpoint(source, out, other, existing="resume")
    quantize_checkpoint(source, out, SMALL_FILES, existing="resume")
    quantize_checkpoint(source, tmp_path / "fresh", SMALL_FILES)
    assert contents(out) == contents(tmp_path / "fresh")


def test_an_overwrite_without_a_finished_file_leaves_nothing_behind(
    save_checkpoint: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = save_checkpoint(), tmp_path / "out"
    quantize_checkpoint(source, out)
    before = contents(out)

    def fails(*_: Any, **__: Any) -> None:
        raise StopError

    monkeypatch.setattr("runtime.quantize.write_experts", fails)
    with pytest.raises(StopError):
        quantize_checkpoint(source, out, SMALL_FILES, existing="overwrite")
    assert contents(out) == before
    with pytest.raises(StopError):
        quantize_checkpoint(source, tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()  # a plain retry works


@pytest.mark.parametrize("moved", [0, 3, 7])
def test_a_replacement_that_is_cut_off_while_moving_up_is_finished_by_resume(
    moved: int, save_checkpoint: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = save_checkpoint(), tmp_path / "out"
    quantize_checkpoint(source, out, SMALL_FILES)
    settings = QuantizeSettings(shard_bytes=300_000)
    quantize_checkpoint(source, tmp_path / "fresh", settings)
    rename, left = Path.replace, moved

    def replace(self: Path, target: Path) -> Path:
        nonlocal left
        if self.parent.name == "pagedweight-new" and not self.name.startswith("."):
            left -= 1
            if left < 0:
                raise StopError
        return rename(self, target)

    with monkeypatch.context() as patch, pytest.raises(StopError):
        patch.setattr(Path, "replace", replace)
        quantize_checkpoint(source, out, settings, existing="overwrite")
    with pytest.raises(QuantizedCheckpointError, match=r"unfinished .*--resume"):
        QuantizedCheckpoint.open(out)
    quantize_checkpoint(source, out, settings, existing="resume")
    assert contents(out) == contents(tmp_path / "fresh")


@pytest.mark.parametrize("existing", ["refuse", "resume", "overwrite"])
def test_a_folder_of_something_else_is_left_alone(
    existing: Any, save_checkpoint: Save, tmp_path: Path
) -> None:
    out = tmp_path / "letters"
    out.mkdir()
    (out / "letter.txt").write_text("dear")
    with pytest.raises(OutputError, match=r"letters: not empty, .* not written by quantize"):
        quantize_checkpoint(save_checkpoint(), out, existing=existing)
    assert contents(out) == {"letter.txt": b"dear"}


def test_the_source_is_not_written_into(save_checkpoint: Save) -> None:
    source = save_checkpoint()
    before = contents(source)
    with pytest.raises(OutputError, match="the source itself"):
        quantize_checkpoint(source, source, existing="overwrite")
    for inside in (source / "sub", source / "a" / "b", source / "x" / ".." / "sub"):
        with pytest.raises(OutputError, match="lies in the source"):
            quantize_checkpoint(source, inside)
    assert contents(source) == before


def test_two_runs_do_not_write_one_folder(save_checkpoint: Save, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match=r"out: another process is writing it"):
            quantize_checkpoint(save_checkpoint(), out)
    finally:
        os.close(handle)
    quantize_checkpoint(save_checkpoint(), out)


def test_a_full_disk_is_noticed_before_the_work(
    save_checkpoint: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 100_000})
    monkeypatch.setattr("runtime.quantize_folder.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(OutputError, match=r"out: 0\.\d+ GB are to be written, the disk has 0.00"):
        quantize_checkpoint(save_checkpoint(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    quantize_checkpoint(save_checkpoint(), tmp_path / "out")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "not a finite number"),
        (float("-inf"), "not a finite number"),
        (-1e6, r"a weight beyond 65504, tables hold float16"),
    ],
)
def test_a_weight_that_cannot_be_served_is_named(
    value: float, message: str, save_checkpoint: Save, tmp_path: Path
) -> None:
    source = save_checkpoint()
    name = "model.layers.1.mlp.experts.2.up_proj.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].float()
        tensors[name][7, 3] = value

    rewrite(source, change)
    place = rf"model.safetensors: tensor {name}, row 7 of expert 2: .*{message}"
    with pytest.raises(SourceError, match=place):
        quantize_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_weight_that_turns_bad_while_the_run_goes_on_is_named(
    save_checkpoint: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_checkpoint()
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    rewrite(source, lambda tensors: tensors[name][7].fill_(float("nan")))
    monkeypatch.setattr("runtime.quantize.scan_weights", lambda *_, **__: "none")
    with pytest.raises(QuantizeError, match=rf"{name}, row 7 of expert 2: .*need a finite weight"):
        quantize_checkpoint(source, tmp_path / "out")


def wide_checkpoint(folder: Path, experts: int) -> int:
    """One shard of an OLMoE model whose blocks are 256 by 512; returns its bytes."""
    import transformers

    torch.manual_seed(0)
    config = transformers.OlmoeConfig(
        vocab_size=8, hidden_size=512, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_experts=experts, num_experts_per_tok=2,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.OlmoeForCausalLM(config).bfloat16().save_pretrained(folder)
    return (folder / "model.safetensors").stat().st_size


def test_memory_does_not_grow_with_the_shard(tmp_path: Path) -> None:
    peaks = {}
    for experts in (2, 16):
        shard_bytes = wide_checkpoint(tmp_path / f"source{experts}", experts)
        tracemalloc.start()
        quantize_checkpoint(tmp_path / f"source{experts}", tmp_path / f"out{experts}")
        peaks[experts] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[16] < 1.25 * peaks[2]
    assert peaks[16] < shard_bytes


def test_the_command_quantizes_and_tells_what_it_did(
    save_checkpoint: Save, run_command: RunCommand, tmp_path: Path
) -> None:
    source, out = save_checkpoint(), tmp_path / "out"
    run = run_command("quantize", source, out, "--min-bits", 3, "--threads", 1, "--json")
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["weights"] == 2 * 4 * 3 * 40 * 48 and not result["was_finished"]
    assert result["damage_kind"] == "squared_error"
    assert [width["bits"] for width in result["sizes"]["widths"]] == [3, 4, 5, 6, 7, 8]
    assert "100.0% of the expert weights" in run.stderr
    QuantizedCheckpoint.open(out, verify=True)
    again = run_command("quantize", source, out)
    assert again.returncode == 2
    assert again.stderr.startswith("error: ") and again.stderr.count("\n") == 1


def test_a_disk_that_fills_is_told_with_the_file(
    save_checkpoint: Save, run_command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = save_checkpoint(), tmp_path / "out"

    def on_full_disk(path: Path) -> Path:
        partial = path.with_name(f".{path.name}.partial-0")
        partial.symlink_to("/dev/full")
        return partial

    with monkeypatch.context() as patch:
        patch.setattr("runtime.checkpoint_tensors.partial_path", on_full_disk)
        run = run_command("quantize", source, out, "--threads", 1)
    place = out / "experts-00001-of-00001.safetensors"
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == f"error: {place}: No space left on device\n"
    assert not out.exists()  # so a plain retry works
    assert run_command("quantize", source, out, "--threads", 1).returncode == 0


def test_an_output_that_cannot_be_written_is_one_line_and_exit_code_2(
    save_checkpoint: Save, run_command: RunCommand, tmp_path: Path
) -> None:
    source = save_checkpoint()
    (tmp_path / "file").write_text("")
    places = {
        tmp_path / "file": "not a folder",
        tmp_path / "file" / "sub": "cannot be used: Not a directory",
        Path("/proc/x"): "",  # no room, or no folder can be made
        tmp_path / ("x" * 300): "cannot be used: File name too long",
        source / "sub": "lies in the source",
    }
    for place, message in places.items():
        run = run_command("quantize", source, place)
        assert run.returncode == 2 and run.stderr.startswith(f"error: {place}: {message}")
        assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.1.mlp.gate.weight", "is in no shard"),
        ("model.layers.0.input_layernorm.weight", "is in no shard"),
    ],
)
def test_a_checkpoint_that_the_runtime_cannot_load_is_refused(
    name: str, message: str, save_checkpoint: Save, tmp_path: Path
) -> None:
    source, out = save_checkpoint(), tmp_path / "out"
    rewrite(source, lambda tensors: tensors[name].reshape(-1)[3:4].fill_(float("inf")))
    with pytest.raises(SourceError, match=rf"tensor {name}, element \[.*3\]: not a finite"):
        quantize_checkpoint(source, out)
    rewrite(source, lambda tensors: tensors.pop(name))
    with pytest.raises(SourceError, match=rf"tensor {name.removeprefix('model.')} {message}"):
        quantize_checkpoint(source, out)
    assert not out.exists()


@pytest.mark.parametrize("calibration", ["full"], indirect=True)
def test_damaged_statistics_are_noticed_before_anything_is_written(
    calibration: Path, save_checkpoint: Save, tmp_path: Path
) -> None:
    last = calibration / "layer_001.safetensors"
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    with pytest.raises(CalibrationError, match=r"layer_001.safetensors: checksum differs"):
        quantize_checkpoint(save_checkpoint(), tmp_path / "out", calibration=calibration)
    assert not (tmp_path / "out").exists()


def test_bad_input_is_one_line_and_exit_code_2(run_command: RunCommand, tmp_path: Path) -> None:
    run = run_command("quantize", tmp_path / "nowhere", tmp_path / "out")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == f"error: {tmp_path / 'nowhere'}: no folder of a Hugging Face checkpoint\n"
    for options in (["--seed-bits", 9], ["--parent-bits", 2], ["--resume", "--overwrite"]):
        run = run_command("quantize", tmp_path, tmp_path / "out", *options)
        assert run.returncode == 2 and "Traceback" not in run.stderr


def test_calibrate_feeds_quantize(
    save_checkpoint: Save, run_command: RunCommand, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    source = save_checkpoint()
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(source)  # type: ignore[no-untyped-call]
    text = tmp_path / "text.txt"
    draws = np.random.default_rng(2)
    text.write_text(" ".join(f"w{i}" for i in draws.integers(0, 64, 600)))
    options = ["--text", text, "--tokens", 512, "--sequence-tokens", 32]
    run = run_command("calibrate", source, tmp_path / "stats", *options, "--json")
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout[run.stdout.index("{") :])
    assert (result["layers"], result["experts"], result["tokens"]) == (2, 4, 512)
    run = run_command(
        "quantize", source, tmp_path / "out", "--calibration", tmp_path / "stats", "--json"
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["damage_kind"] == "calibrated"
    damage = QuantizedCheckpoint.open(tmp_path / "out", verify=True).damage
    assert (np.diff(damage[:, :4], axis=1) < 0).all() and (damage[:, 0] > 0).all()
    run = run_command("calibrate", source, tmp_path / "stats", "--text", tmp_path / "absent")
    assert run.returncode == 2 and run.stderr.endswith("absent: No such file or directory\n")


def test_help_imports_nothing_heavy(run_command: RunCommand) -> None:
    code = (
        "import sys, runtime.cli\n"
        "heavy = {'torch', 'numba', 'numpy', 'transformers', 'matplotlib', 'scipy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    run = run_command("--help")
    assert run.returncode == 0
    assert all(name in run.stdout for name in ("quantize", "inspect", "calibrate"))
