"""An engine on the path of a GPU, its kernels emulated, against the engine on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.cuda_emulation import emulator
from models.plane_bytes import block_pages
from policies.orders import BitWidths, PrecisionOrders
from runtime.engine import accelerator
from runtime.engine.accelerator import SPARE_SEQUENCE, open_accelerator
from runtime.engine.build import build_engine
from runtime.engine.settings import EngineSettings, EngineSettingsError
from runtime.engine.weight_pages import checkpoint_tables
from runtime.page_tile_layout import TileLayout
from runtime.precision_control import PrecisionControl
from runtime.quantize import QuantizeSettings, quantize_checkpoint
from runtime.quantized_checkpoint import QuantizedCheckpoint
from tests.runtime.engine.core_cases import (
    STORE,
    ask,
    drive,
    make_checkpoint,
    one,
    prompt,
    running,
    settle,
)

needs_compiler = pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
EMULATED: dict[str, Any] = {"device": "emulation", "max_running": 5, "prefill_tokens": 24}
PROMPTS = [prompt(length) for length in (1, 15, 17)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2_moe")


@pytest.fixture(scope="module")
def quantized(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantized") / "q"
    quantize_checkpoint(folder, path, QuantizeSettings(parent_bits=4, seed_bits=2, min_bits=2))
    return path


def largest_difference(a: Any, b: Any) -> float:
    pairs = zip(a.logprobs, b.logprobs, strict=True)
    return max(abs(x.logprob - y.logprob) for x, y in pairs)


@needs_compiler
def test_answers_and_prefixes_are_those_of_the_cpu(folder: Path) -> None:
    with running(folder) as core:
        expected = drive(core, [ask(tokens, 5) for tokens in PROMPTS])
    with running(folder, prefix=STORE, **EMULATED) as core:
        found = drive(core, [ask(tokens, 5) for tokens in PROMPTS])
        settle(core)
        (again,) = drive(core, [ask(PROMPTS[2], 5)])
        assert core.parts.cache.sequences == (SPARE_SEQUENCE,)
    for got, want in zip(found, expected, strict=True):
        assert (got.tokens, got.error) == (want.tokens, "")
        assert largest_difference(got, want) < 1e-4
    assert again.cached_tokens == 16
    assert again.tokens == expected[2].tokens


@needs_compiler
def test_quantized_experts_are_multiplied_from_tiles_in_the_arena(quantized: Path) -> None:
    with running(quantized, precision=3) as core:
        expected = drive(core, [ask(tokens, 3) for tokens in PROMPTS])
    with running(quantized, precision=3, **EMULATED) as core:
        found = drive(core, [ask(tokens, 3) for tokens in PROMPTS])
        mover, arena = core.parts.mover, core.parts.arena
        tables = checkpoint_tables(
            QuantizedCheckpoint.open(quantized), arena.page_bytes, TileLayout()
        )
        level = tables.bits.index(3)
        assert arena.use().weight_pages * arena.page_bytes == tables.bytes_[:, level].sum()
        assert (mover.tables.bits == 3).all()
    for got, want in zip(found, expected, strict=True):
        assert got.error == ""
        # tables are whole numbers with a scale there, float16 here
        assert largest_difference(got, want) < 0.05


def all_at(blocks: int, bits: int) -> BitWidths:
    return BitWidths(np.arange(blocks), np.full(blocks, bits))


@needs_compiler
def test_replayed_steps_follow_widths_that_move(quantized: Path) -> None:
    with running(quantized, precision=2, **EMULATED) as core:
        narrow = one(core, ask(PROMPTS[1], 4))
    with running(quantized, precision=4, **EMULATED) as core:
        wide = one(core, ask(PROMPTS[1], 4))
        mover = core.parts.mover
        blocks, none = mover.tables.num_blocks, all_at(0, 0)
        for plan, bits in enumerate((2, 4), start=1):
            orders = all_at(blocks, bits)
            drops, raises = (orders, none) if bits == 2 else (none, orders)
            mover.plan(PrecisionOrders(plan, drops, raises), step=100 * plan)
            settle(core)
            assert (mover.tables.bits == bits).all()
            assert np.array_equal(mover.device.tables.bits.numpy(), mover.tables.bits)
            found = one(core, ask(PROMPTS[1], 4))
            assert found.said == (narrow if bits == 2 else wide).said
    assert narrow.said != wide.said


@needs_compiler
def test_the_policy_sees_the_traffic_of_replayed_steps_and_not_their_padding(
    quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[np.ndarray] = []
    observe = PrecisionControl.observe

    def noted(self: PrecisionControl, layer: int, experts: np.ndarray, gate: np.ndarray) -> None:
        if layer == 0:
            seen.append(experts.ravel())
        observe(self, layer, experts, gate)

    monkeypatch.setattr(PrecisionControl, "observe", noted)
    counts = []
    for device in ({}, EMULATED):
        with running(quantized, precision_settings={"use_movement": False}, **device) as core:
            drive(core, [ask(tokens, 3) for tokens in PROMPTS])
        counts.append(np.bincount(np.concatenate(seen)))
        seen.clear()
    missing = counts[0] - counts[1]
    assert (missing >= 0).all()
    # the last step is told when the next begins: a token or more of two experts each
    assert 2 <= missing.sum() <= 2 * len(PROMPTS)


def test_bytes_of_the_canonical_layout_are_those_of_the_model(quantized: Path) -> None:
    checkpoint = QuantizedCheckpoint.open(quantized)
    tables = checkpoint_tables(checkpoint, 1024)
    for row, block in zip(tables.bytes_, checkpoint.blocks, strict=True):
        for held, bits in zip(row, checkpoint.levels, strict=True):
            pages = block_pages(
                block.rows, block.columns, bits, page_bytes=1024, min_bits=checkpoint.levels[0]
            )
            assert held == 1024 * pages


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CPU", ""])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    with pytest.raises(EngineSettingsError, match=r"device: must be cpu or cuda:N, found"):
        open_accelerator(device)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:3"])
def test_without_a_gpu_one_line_says_what_is_missing(
    device: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = "cupy is not installed (pip install cupy-cuda13x)"
    monkeypatch.setattr(accelerator, "gpu_problem", lambda: problem)
    with pytest.raises(EngineSettingsError) as refused:
        build_engine(EngineSettings(model=str(folder), device=device))
    expected = f"device: {device}: {problem}; `runtime doctor` says what to install"
    assert str(refused.value) == expected


@pytest.mark.parametrize(
    ("packages", "is_available", "devices", "message"),
    [
        (("nvidia-cuda-nvrtc",), True, 1, "packages are missing: nvidia-cuda-nvrtc"),
        ((), False, 0, "cannot use the GPU"),
        ((), True, 1, "there are 1 devices, the first is cuda:0"),
    ],
)
def test_each_thing_a_gpu_needs_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
    packages: tuple[str, ...],
    is_available: bool,
    devices: int,
    message: str,
) -> None:
    monkeypatch.setattr(accelerator, "gpu_problem", lambda: None)
    monkeypatch.setattr(accelerator, "missing_packages", lambda: packages)
    monkeypatch.setattr(accelerator.torch.cuda, "is_available", lambda: is_available)
    monkeypatch.setattr(accelerator.torch.cuda, "device_count", lambda: devices)
    with pytest.raises(EngineSettingsError, match=message):
        open_accelerator("cuda:1")
