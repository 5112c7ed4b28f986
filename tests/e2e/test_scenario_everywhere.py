"""One scenario file: the twin, the server's settings and a replay take the same from it."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from models.strict_tables import ScenarioError
from runtime.serve_settings import ServeOptions, engine_settings
from tests.runtime.replay_cases import quantized_checkpoint
from traces.decisions import read_decisions
from traces.record import RunRecord, read_run
from twin.replay import replay_log

SCENARIO = Path(__file__).parents[2] / "scenarios" / "serve.toml"
CHANGES = {
    # thirty short requests at once, in a memory that they exhaust
    "workload.num_requests": "30",
    "workload.lengths.kind": "lognormal",
    "workload.lengths.mean_prompt_tokens": "100",
    "workload.lengths.mean_output_tokens": "20",
    "workload.arrivals.on_rate_per_s": "20000",
    "workload.arrivals.off_rate_per_s": "20000",
    "precision.page_bytes": "4096",
    "precision.compare": "[6]",
    "serving.max_running": "12",
    "serving.prefill_tokens": "128",
}


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield quantized_checkpoint(folder)
    shutil.rmtree(folder)


def _scenario(folder: Path) -> Path:
    """The file without its trace, which a length law replaces."""
    text = SCENARIO.read_text()
    assert 'trace = "azure-2023-conversation"\n' in text
    file = folder / "serve.toml"
    file.write_text(text.replace('trace = "azure-2023-conversation"\n', ""))
    return file


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """``command("twin", "run", ...)`` in this process; what it printed."""

    def run(program: str, *words: Any) -> str:
        if program == "twin":
            from twin.cli import main
        else:
            from runtime.cli import main
        monkeypatch.setattr(sys, "argv", [program, *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        told = capsys.readouterr()
        assert stop.value.code in (0, None), told.err
        return told.out

    return run


def _batching_limits(folder: Path) -> dict[str, int]:
    header, _ = read_decisions(folder / "decisions.jsonl.gz")
    settings: dict[str, int] = header["policies"]["batching"]["settings"]
    return settings


def _added(folder: Path) -> list[tuple[int, int]]:
    """(prompt, most tokens) of the requests, in the order in which the policy was told."""
    _, decisions = read_decisions(folder / "decisions.jsonl.gz")
    return [
        (d.args["prompt_tokens"], d.args["max_tokens"])
        for d in decisions
        if d.policy == "batching" and d.call == "add"
    ]


def test_twin_and_replay_serve_the_same_requests_under_the_same_limits(
    model: Path, tmp_path: Path, command: Callable[..., str]
) -> None:
    file, memory_gb = _scenario(tmp_path), 0.0021
    changes = {**CHANGES, "hardware.memory_gb": memory_gb, "hardware.reserve_gb": 0.0001}
    words = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    twin, real = tmp_path / "twin", tmp_path / "real"
    command(
        *("twin", "run", file, "--set", f"llm.model={model}", *words),
        *("--set", "run.decision_log_calls=100000", "--no-plots", "--out", twin),
    )
    command(
        *("runtime", "replay", "--scenario", file, model, *words),
        *("--threads", 1, "--prefix-store", "none", "--no-plots", "--out", real),
    )
    simulated, measured = read_run(twin), read_run(real)
    asked = _of_policy(simulated, "hull")
    found = _of_policy(measured, "hull")
    assert len(found["arrival_s"]) == 30
    for name in ("arrival_s", "prompt_tokens", "output_tokens"):
        assert np.array_equal(asked[name], found[name]), name
    limits = _batching_limits(twin)
    assert limits == _batching_limits(real)
    assert (limits["max_running"], limits["prefill_tokens"]) == (12, 128)
    assert _added(twin) == _added(real)
    arenas = [record.summary["deployment"]["arena_pages"] for record in (simulated, measured)]
    assert arenas[0] == arenas[1]
    for folder in (twin, real):
        replayed = replay_log(folder)
        assert replayed.difference is None
        assert replayed.num_left_out == 0
    rows = [record.summary["policies"][0] for record in (simulated, measured)]
    assert all(row["served"] == 30 for row in rows)
    for record, row in zip((simulated, measured), rows, strict=True):
        # the memory is too small for the widths of the start and twelve requests at once
        assert record.timeseries is not None
        assert row["least_bits"] < record.timeseries["mean_bits"][0] - 0.9
        assert row["preemptions"] == 0
        assert row["running_peak"] == 12
    shared = set(simulated.requests or {}) & set(measured.requests or {})
    assert shared == set(simulated.requests or {})


def test_the_server_takes_memory_and_limits_of_the_same_file(model: Path) -> None:
    changes = ("hardware.memory_gb=0.01", "hardware.reserve_gb=0.001", "serving.max_running=9")
    settings = engine_settings(
        ServeOptions(model=model, scenario=SCENARIO, overrides=changes, threads=1)
    )
    assert settings.model == str(model)
    assert (settings.max_running, settings.prefill_tokens) == (9, 512)
    assert settings.precision == "hull"
    assert settings.page_bytes == 16384
    assert settings.memory_bytes is not None
    assert 0.008e9 < settings.memory_bytes <= 0.009e9  # less the weights that are no experts


def test_plain_experts_take_their_part_of_the_memory_and_the_operator_is_told(
    model: Path,
) -> None:
    plain = model.parent / "plain"
    changes = ("hardware.memory_gb=0.01", "hardware.reserve_gb=0.001")
    told: list[str] = []
    found = {
        folder: engine_settings(
            ServeOptions(model=folder, scenario=SCENARIO, overrides=changes), say=told.append
        )
        for folder in (model, plain)
    }
    assert len(told) == 1
    assert str(plain) in told[0]
    assert "[precision] has no part" in told[0]
    expert_bytes = sum(
        2 * tensor.numel()
        for name, tensor in load_file(plain / "model.safetensors").items()
        if ".experts." in name
    )
    arenas = {folder: settings.memory_bytes or 0 for folder, settings in found.items()}
    assert expert_bytes <= arenas[model] - arenas[plain] < expert_bytes + 16384
    small = ("hardware.memory_gb=0.0003", "hardware.reserve_gb=0")
    with pytest.raises(ScenarioError, match=r"memory_gb: 0.0003 GB .* with plain experts"):
        engine_settings(ServeOptions(model=plain, scenario=SCENARIO, overrides=small))


def _of_policy(record: RunRecord, label: str) -> dict[str, Any]:
    assert record.requests is not None
    chosen = (np.asarray(record.requests["policy"]) == label) & (
        np.asarray(record.requests["replication"]) == 0
    )
    return {name: np.asarray(values)[chosen] for name, values in record.requests.items()}
