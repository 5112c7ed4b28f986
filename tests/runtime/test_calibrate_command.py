"""``runtime calibrate`` as a command: what it refuses, what it keeps, what it says."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.calibration import CalibrationError, CalibrationSettings, calibrate_checkpoint
from runtime.calibration_stats import CalibrationStats, write_layer

Run = Callable[..., Any]
SHORT = ("--tokens", 256, "--sequence-tokens", 32)


@pytest.fixture(scope="module")
def original(family_model: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    with contextlib.redirect_stderr(io.StringIO()):
        family_model("qwen2_moe").save_pretrained(folder)
    fast: Any = PreTrainedTokenizerFast
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    draws = np.random.default_rng(2)
    text = " ".join(f"w{i}" for i in draws.integers(0, 64, 600))
    (folder.parent / "text.txt").write_text(text)
    return folder


@pytest.fixture
def source(original: Path, tmp_path: Path) -> Path:
    shutil.copyfile(original.parent / "text.txt", tmp_path / "text.txt")
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def calibrate(source: Path, run_command: Run, tmp_path: Path) -> Run:
    """``calibrate(out, options...)`` of the checkpoint in ``source``."""

    def run(out: Path, *options: Any) -> Any:
        return run_command(
            "calibrate", source, out, "--text", tmp_path / "text.txt", *SHORT, *options
        )

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(run: Any, *words: str) -> None:
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1, run.stderr
    for word in words:
        assert word in run.stderr


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_finished_statistics_are_neither_redone_nor_lost(calibrate: Run, tmp_path: Path) -> None:
    out = tmp_path / "stats"
    run = calibrate(out)
    assert run.returncode == 0 and run.stderr == ""  # no bars of other packages
    before = contents(out)
    refused(calibrate(out), "stats: holds finished statistics", "--resume", "--overwrite")
    assert calibrate(out, "--resume").returncode == 0
    run = calibrate(out, "--resume", "--seed", 4, "--dtype", "bfloat16")
    refused(run, "settings.seed (0, now 4)", "provenance.dtype ('float32', now 'bfloat16')")
    assert contents(out) == before
    run = calibrate(out, "--overwrite", "--seed", 4)
    assert run.returncode == 0 and contents(out) != before
    assert CalibrationStats.open(out).index["settings"]["seed"] == 4
    assert calibrate(out, "--resume", "--overwrite").returncode == 2


class StopError(Exception):
    """Ends a run."""


def test_a_run_that_is_cut_off_is_taken_up_and_an_overwrite_keeps_the_old(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, out = [tmp_path / "text.txt"], tmp_path / "stats"
    layer_by_layer: dict[str, Any] = {"tokens": 256, "sequence_tokens": 32, "memory_bytes": 1}
    settings, other = (CalibrationSettings(**layer_by_layer, seed=seed) for seed in (0, 1))
    calibrate_checkpoint(source, texts, tmp_path / "whole", settings)
    write = write_layer

    def second_fails(folder: Path, layer: int, *rest: Any) -> None:
        if layer == 1:
            raise StopError
        write(folder, layer, *rest)

    with monkeypatch.context() as patch, pytest.raises(StopError):
        patch.setattr("runtime.calibration.write_layer", second_fails)
        calibrate_checkpoint(source, texts, out, settings)
    first = (out / "layer_000.safetensors").stat().st_ino
    with pytest.raises(ValueError, match="holds unfinished statistics"):
        calibrate_checkpoint(source, texts, out, settings)
    with pytest.raises(ValueError, match=r"layer_000.safetensors: of another model, text or"):
        calibrate_checkpoint(source, texts, out, other, existing="resume")
    source = source.rename(tmp_path / "moved")  # the same checkpoint elsewhere
    os.utime(source / "model.safetensors", ns=(0, 1))
    calibrate_checkpoint(source, texts, out, settings, existing="resume")
    assert (out / "layer_000.safetensors").stat().st_ino == first
    assert contents(out) == contents(tmp_path / "whole")

    with monkeypatch.context() as patch, pytest.raises(StopError):
        patch.setattr("runtime.calibration.write_layer", second_fails)
        calibrate_checkpoint(source, texts, out, other, existing="overwrite")
    kept = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert kept == contents(tmp_path / "whole")
    CalibrationStats.open(out).check()
    with monkeypatch.context() as patch, pytest.raises(StopError):
        patch.setattr(Path, "replace", fail_on_index(Path.replace))
        calibrate_checkpoint(source, texts, out, other, existing="resume")
    with pytest.raises(CalibrationError, match="not finished"):
        CalibrationStats.open(out)
    calibrate_checkpoint(source, texts, out, other, existing="resume")
    calibrate_checkpoint(source, texts, tmp_path / "fresh", other)
    assert contents(out) == contents(tmp_path / "fresh")


def fail_on_index(rename: Callable[..., Path]) -> Callable[..., Path]:
    def replace(self: Path, target: Path) -> Path:
        if self.parent.name == "calibration-new" and self.name == "calibration.json":
            raise StopError
        return rename(self, target)

    return replace


@pytest.mark.parametrize("options", [(), ("--resume",), ("--overwrite",)])
def test_a_folder_of_something_else_is_left_alone(
    options: tuple[str, ...], calibrate: Run, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "letters"
    out.mkdir()
    (out / "letter.txt").write_text("dear")
    refused(calibrate(out, *options), "letters: not empty", "not written by calibrate")
    assert contents(out) == {"letter.txt": b"dear"}
    refused(calibrate(source, *options), "is the source itself")
    refused(calibrate(source / "stats", *options), "lies in the source")
    refused(calibrate(out / "letter.txt", *options), "not a folder")
    refused(calibrate(out / "letter.txt" / "x", *options), "cannot be used: Not a directory")
    refused(calibrate(Path("/proc/x"), *options), "/proc/x: cannot be used")
    refused(calibrate(tmp_path / ("x" * 300), *options), "cannot be used: File name too long")


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.gate.weight", "model.layers.1.mlp.experts.2.down_proj.weight"]
)
def test_a_weight_that_is_not_finite_or_missing_is_named(
    name: str, calibrate: Run, source: Path, tmp_path: Path
) -> None:
    whole = (source / "model.safetensors").read_bytes()
    rewrite(source, lambda tensors: tensors[name][1].fill_(float("nan")))
    refused(calibrate(tmp_path / "stats"), f"tensor {name}", "not a finite number")
    (source / "model.safetensors").write_bytes(whole)
    rewrite(source, lambda tensors: tensors.pop(name))
    place = "down matrix of layer 1, expert 2" if "experts" in name else name.removeprefix("model.")
    refused(calibrate(tmp_path / "stats"), place)
    (source / "model.safetensors").write_bytes(whole[:-7])
    refused(calibrate(tmp_path / "stats"), "model.safetensors: cut short")
    assert not (tmp_path / "stats").exists()


def test_statistics_that_are_not_finite_are_not_written(source: Path, tmp_path: Path) -> None:
    """Finite weights so large that the model's float32 overflows."""
    rewrite(source, lambda t: t["model.layers.1.mlp.experts.2.gate_proj.weight"].fill_(3e38))
    settings = CalibrationSettings(tokens=256, sequence_tokens=32)
    out = tmp_path / "stats"
    with pytest.raises(CalibrationError, match=r"layer_00\d.safetensors: \S+ is not finite"):
        calibrate_checkpoint(source, [tmp_path / "text.txt"], out, settings)
    assert not out.exists()


def test_statistics_on_disk_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"down.moment is not finite at \[1, 0\]"):
        write_layer(tmp_path, 0, {"down.moment": np.array([[1.0], [np.inf]])}, "mark")
    assert not list(tmp_path.iterdir())


def test_a_missing_or_damaged_tokenizer_is_said(
    calibrate: Run, source: Path, tmp_path: Path
) -> None:
    content = json.loads((source / "tokenizer.json").read_text())
    (source / "tokenizer.json").write_text("{")
    refused(calibrate(tmp_path / "stats"), "tokenizer:")
    content["model"]["vocab"]["w3"] = 64
    (source / "tokenizer.json").write_text(json.dumps(content))
    refused(calibrate(tmp_path / "stats"), "the tokenizer gives token 64, the model knows 64")
    (source / "tokenizer.json").unlink()
    refused(calibrate(tmp_path / "stats"), "the tokenizer is missing; need one of tokenizer.json")


def test_a_model_that_does_not_run_is_one_line(
    run_command: Run, source: Path, tmp_path: Path
) -> None:
    """Rotary embeddings need an even head width; 16 heads of 48 rows have 3 each."""
    config = json.loads((source / "config.json").read_text())
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    (source / "config.json").write_text(json.dumps(config | heads))
    run = run_command(
        "calibrate", source, tmp_path / "stats", "--text", tmp_path / "text.txt", *SHORT
    )
    refused(run, "config.json: a model of this configuration does not run")


def test_numbers_out_of_range_are_refused(calibrate: Run, tmp_path: Path) -> None:
    for options in (("--seed", -5), ("--seed", 1 << 63), ("--tokens", 0)):
        run = calibrate(tmp_path / "stats", *options)
        assert run.returncode == 2 and "Traceback" not in run.stderr
    with pytest.raises(ValueError, match="seed must be within 0"):
        CalibrationSettings(seed=-1)


def test_one_thin_expert_is_spoken_of_in_the_singular() -> None:
    from runtime.calibrate_command import _thin_text

    assert _thin_text(1).startswith("1 expert saw ")
    assert _thin_text(0).startswith("0 experts saw ") and _thin_text(2).startswith("2 experts saw ")
