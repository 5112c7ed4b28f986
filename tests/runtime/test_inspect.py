"""``runtime inspect`` against the bytes that really lie in the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from runtime.inspect_report import inspect_report
from runtime.inspect_tables import byte_text
from runtime.quantize import quantize_checkpoint
from runtime.quantized_checkpoint import QuantizedCheckpoint


@pytest.fixture
def out(save_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    quantize_checkpoint(save_checkpoint("qwen3_moe"), tmp_path / "out")
    return tmp_path / "out"


def test_sizes_are_those_of_the_tensors_on_disk(out: Path) -> None:
    experts = {}
    for path in out.glob("experts-*.safetensors"):
        experts.update(load_file(path))
    checkpoint = QuantizedCheckpoint.open(out)
    sizes = inspect_report(checkpoint, verified=False)["sizes"]
    weights = sizes["expert_weights"]
    assert weights == 4 * 3 * 40 * 48
    assert sizes["source_expert_bytes"] == 2 * weights
    assert sizes["file_bytes"] == sum(
        path.stat().st_size for path in out.iterdir() if path.name != "pagedweight.json"
    )
    for width in sizes["widths"]:
        bits = width["bits"]
        planes = sum(x[:bits].nbytes for name, x in experts.items() if name.endswith(".planes"))
        tables = {
            q: sum(x.nbytes for name, x in experts.items() if name.endswith(f".table{q}"))
            for q in range(2, bits + 1)
        }
        assert width["table_bytes"] == tables[bits]
        assert width["active_bytes"] == planes + tables[bits]
        assert width["resident_bytes"] == planes + sum(tables.values())
        assert width["effective_bits"] == pytest.approx(8 * (planes + tables[bits]) / weights)
        kept = planes + tables[bits] + sizes["other_bytes"]
        assert width["saving"] == pytest.approx(1 - kept / sizes["source_bytes"])


def test_damage_is_summed_by_layer_and_matrix(out: Path) -> None:
    checkpoint = QuantizedCheckpoint.open(out)
    damage = inspect_report(checkpoint, verified=False)["damage"]
    assert [(row["layer"], row["module"]) for row in damage["by_layer"]] == [
        (1, "gate_up"),
        (1, "down"),
    ]
    np.testing.assert_allclose(damage["by_layer"][1]["damage"], checkpoint.damage[1::2].sum(0))
    np.testing.assert_allclose(damage["total"], checkpoint.damage.sum(0))


def test_the_command_prints_tables_json_and_a_picture(
    out: Path, run_command: Callable[..., Any], tmp_path: Path
) -> None:
    picture = tmp_path / "curves.png"
    run = run_command("inspect", out, "--json", "--verify", "--plot", picture)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["verified"] and report["experts"] == 4 and report["layers"] == 1
    assert report["provenance"]["source"]["model_type"] == "qwen3_moe"
    assert picture.read_bytes().startswith(b"\x89PNG")
    run = run_command("inspect", out)
    assert run.returncode == 0
    for text in ("qwen3_moe", "not verified", "squared error", "gate_up", "8 bits", "saving"):
        assert text in run.stdout


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        ("nowhere/a.png", "there is no folder"),
        ("folder.png", "is a folder"),
        ("a.pdf", "must end in .png, found a.pdf"),
        ("a.png/b.png", "there is no folder"),
    ],
)
def test_a_picture_that_cannot_be_written_is_one_line_and_exit_code_2(
    picture: str, message: str, out: Path, run_command: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "a.png").write_text("")
    run = run_command("inspect", out, "--plot", tmp_path / picture)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("error: --plot: ") and message in run.stderr
    assert run.stderr.count("\n") == 1


def test_damage_to_a_file_is_one_line_and_exit_code_2(
    out: Path, run_command: Callable[..., Any], tmp_path: Path
) -> None:
    path = next(out.glob("experts-*"))
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    assert run_command("inspect", out).returncode == 0  # checksums are compared when asked for
    run = run_command("inspect", out, "--verify")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"error: {path}: SHA-256 differs") and run.stderr.count("\n") == 1
    run = run_command("inspect", tmp_path)
    assert run.returncode == 2 and "no quantized checkpoint" in run.stderr


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (24_914_165_760, "24.91 GB")],
)
def test_bytes_have_decimal_units(num_bytes: int, text: str) -> None:
    assert byte_text(num_bytes) == text
