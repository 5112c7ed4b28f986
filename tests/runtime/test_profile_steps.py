"""The engine's own code is what is measured, and it is left as it was."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from models.calibration import load_calibration
from runtime.cli import main
from runtime.demo_model_tiny import make_tiny_checkpoint
from runtime.engine.settings import EngineSettings, PrefixSettings
from runtime.model.kv_layout import KvLayout, default_page_bytes
from runtime.model.load import load_model
from runtime.model.spec_config import read_model_spec
from runtime.profile_clock import ProfileError, clock_of
from runtime.profile_engine import measure_overhead
from runtime.profile_layers import LayerSeconds, timed_layers
from runtime.profile_run import ProfilePlan
from runtime.profile_steps import ModelSteps, StepPoint
from runtime.profile_tiers import Tier, measure_tier
from runtime.profile_transfers import measure_page_copies


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("profile") / "tiny", "qwen2_moe")


class CountingClock:
    """Every look at it is a second later."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_every_layer_is_timed_once_and_nothing_stays_wrapped(checkpoint: Path) -> None:
    model = load_model(checkpoint, threads=1)
    layers = model.decoder._layers
    before = [(layer._attention, layer.__dict__.keys() & {"_feed_forward"}) for layer in layers]
    clock = CountingClock()
    steps = ModelSteps(model, kv_tokens=64, held=20, threads=1, clock=clock)
    found = steps.run(StepPoint(2, 1, 20))
    # A wrapped part looks at the clock twice, so each inside another adds two seconds to it.
    assert found.experts_s == len(layers)
    assert found.attention_s == len(layers) + 1  # and the step's beginning
    assert found.attention_block_s == 3 * len(layers)
    assert found.ffn_s == 3 * len(layers)
    assert [(layer._attention, layer.__dict__.keys() & {"_feed_forward"}) for layer in layers] == (
        before
    )
    with pytest.raises(RuntimeError), timed_layers(model.decoder, clock, LayerSeconds()):
        raise RuntimeError
    assert layers[0]._attention is before[0][0]


def test_a_step_reads_distinct_experts_and_gives_its_pages_back(checkpoint: Path) -> None:
    model = load_model(checkpoint, threads=1)
    steps = ModelSteps(model, kv_tokens=200, held=40, threads=1, clock=time.perf_counter)
    free = steps.arena.ledger.free_pages
    moe = next(layer.moe for layer in model.spec.layers if layer.moe is not None)
    expert = 2 * 3 * moe.width * model.spec.hidden
    one = steps.run(StepPoint(1, 1, 40))
    assert one.expert_bytes == len(model.spec.moe_layers) * moe.experts_per_token * expert
    many = steps.run(StepPoint(1, 64, 0))
    assert one.expert_bytes < many.expert_bytes
    assert many.expert_bytes <= len(model.spec.moe_layers) * moe.experts * expert
    assert steps.arena.ledger.free_pages == free
    steps.cache.check()
    with pytest.raises(ProfileError, match="no pages for"):
        steps.run(StepPoint(500, 1, 40))
    assert steps.arena.ledger.free_pages == free


def test_sequences_continue_the_same_prefix(checkpoint: Path) -> None:
    model = load_model(checkpoint, threads=1)
    steps = ModelSteps(model, kv_tokens=100, held=33, threads=1, clock=time.perf_counter)
    steps._copy_of_source(0, 33, 1)
    own, source = steps.cache.table(0), steps.cache.table(-1)
    pages = steps.arena.buffer.array
    assert steps.cache.tokens(0) == 33
    assert not set(own.ravel().tolist()) & set(source.ravel().tolist())
    assert np.array_equal(pages[own[:3].ravel()], pages[source[:3].ravel()])


def test_points_stay_within_the_context_and_name_each_step_once() -> None:
    points = ProfilePlan().points((2, 4, 8), 512)
    assert len(set(points)) == len(points)
    assert all(point.held + point.added <= 512 for point in points)
    assert {point.bits for point in points} == {2, 4, 8}
    most = max({2, 4, 8}, key=lambda bits: sum(point.bits == bits for point in points))
    assert most == 4


def test_overhead_is_what_a_step_takes_beside_its_forward_pass(checkpoint: Path) -> None:
    settings = EngineSettings(
        model=str(checkpoint), memory_bytes=4 << 20, prefix=PrefixSettings(place="none")
    )
    found = measure_overhead(settings, CountingClock(), batches=(1, 3), steps=4)
    # The clock is looked at four times a step: around it, and around the pass within.
    assert found == [(1, 2.0), (3, 2.0)]


def test_page_copies_are_timed_from_order_to_end() -> None:
    load, seconds = measure_page_copies(page_bytes=4096, rounds=3, clock=CountingClock())
    assert load.tolist() == [64 << 10, 512 << 10, 4 << 20]
    assert seconds.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("tier", ["memory", "ssd"])
def test_a_place_of_the_prefix_store_is_measured(
    checkpoint: Path, tmp_path: Path, tier: Tier
) -> None:
    spec = read_model_spec(checkpoint)
    page_bytes = default_page_bytes(spec.kv_layers, torch.float32)
    layout = KvLayout(spec.kv_layers, torch.float32, page_bytes)
    found = measure_tier(tier, checkpoint, layout, rounds=2, blocks=(1, 4), place=tmp_path)
    block_bytes = layout.block_pages * layout.page_bytes
    assert found.load_bytes == (block_bytes, 4 * block_bytes)
    assert min(*found.load_s, *found.save_s, found.lookup_s) > 0.0
    assert list(tmp_path.iterdir()) == []


def _runtime(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["runtime", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_command_writes_a_file_that_the_twin_reads_and_replaces_none(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "c.json"
    arguments = ("profile", checkpoint, "--out", out, "--quick", "--seconds", "0.2", "--no-tiers")
    arguments += ("--threads", "1")  # type: ignore[assignment]
    # Times of a busy machine may mean nothing, which is said, and is not what is tested here.
    assert _runtime(monkeypatch, *arguments, "--force") == 0
    found = load_calibration(out)
    assert found.engine is not None
    assert found.engine.provenance.threads == 1
    assert found.engine.tiers == {}
    assert found.coefficients.beta_ffn + found.coefficients.alpha_ffn > 0.0
    capsys.readouterr()
    assert _runtime(monkeypatch, *arguments) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("clock", "threads", "words"), [("cpu", 2, "--threads 1"), ("moon", 1, "wall or cpu")]
)
def test_a_clock_that_would_mislead_is_refused(clock: str, threads: int, words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        clock_of(clock, threads)
