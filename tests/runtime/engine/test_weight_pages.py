"""What quantized weights hold in an engine's arena, against the byte formulas."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from models.plane_bytes import block_bytes
from policies.weight_page_history import Event
from policies.weight_page_table import MovementRules
from runtime.engine.build import build_engine
from runtime.engine.settings import EngineSettings, EngineSettingsError, PrefixSettings
from runtime.engine.weight_pages import Movement, checkpoint_tables, plan_widths, weights_in_pages
from runtime.page_arena import PageArena
from runtime.page_devices import CpuDevice
from runtime.quantize import quantize_checkpoint
from runtime.quantized_checkpoint import QuantizedCheckpoint
from runtime.quantized_manifest import MANIFEST

PAGE_BYTES = 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized Mixtral of two layers whose planes and tables fill whole pages of 1 KiB."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("mixtral")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
    )
    with contextlib.redirect_stderr(io.StringIO()):
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path / "source")
    quantize_checkpoint(path / "source", path / "quantized")
    return path / "quantized"


def settings(folder: Path, arena_pages: int, **changes: Any) -> EngineSettings:
    given: dict[str, Any] = {"page_bytes": PAGE_BYTES, **changes}
    return EngineSettings(
        model=str(folder),
        memory_bytes=arena_pages * given["page_bytes"],
        prefix=PrefixSettings(place="none"),
        **given,
    )


@pytest.mark.parametrize("bits", [2, 3, 5, 8, "mixed"])
def test_resident_bytes_are_those_of_the_formula(folder: Path, bits: int | str) -> None:
    widths = np.arange(12) % 7 + 2 if bits == "mixed" else np.full(12, bits)
    checkpoint = QuantizedCheckpoint.open(folder)
    arena = PageArena(4000, page_bytes=PAGE_BYTES)
    mover = weights_in_pages(checkpoint, arena, widths)
    formula = sum(
        block_bytes(record.rows, record.columns, int(q), tables="all")
        for record, q in zip(checkpoint.blocks, widths, strict=True)
    )
    lists = mover.tables
    read_by_lists = PAGE_BYTES * sum(
        len(lists.plane_list(i, p)) for i in range(12) for p in range(widths[i])
    ) + PAGE_BYTES * sum(
        len(lists.table_list(i, q)) for i in range(12) for q in range(2, widths[i] + 1)
    )
    planned = checkpoint_tables(checkpoint, PAGE_BYTES).bytes_[np.arange(12), widths - 2].sum()
    mover.close()
    assert arena.use().weight_pages * PAGE_BYTES == formula == read_by_lists == planned


@pytest.mark.parametrize("bits", [3, 8])
@pytest.mark.parametrize("page_bytes", [PAGE_BYTES, 32 * 1024])
def test_a_built_engine_holds_what_the_planner_counts_in_pages_of_any_size(
    folder: Path, bits: int, page_bytes: int
) -> None:
    parts = build_engine(settings(folder, 4000, precision=bits, page_bytes=page_bytes))
    use = parts.arena.use()
    parts.close()
    planned = checkpoint_tables(QuantizedCheckpoint.open(folder), page_bytes).bytes_[:, bits - 2]
    assert use.weight_pages * page_bytes == planned.sum()
    assert use.kv_pages == 0


@pytest.mark.parametrize("arena_pages", [450, 900, 4000])
def test_first_widths_are_the_best_that_leave_the_target_share_free(
    folder: Path, arena_pages: int
) -> None:
    checkpoint = QuantizedCheckpoint.open(folder)
    asked = settings(
        folder, arena_pages, precision_settings={"target_share": 0.3, "high_share": 0.4}
    )
    plan = plan_widths(checkpoint, asked, arena_pages=arena_pages, page_bytes=PAGE_BYTES)
    rows = np.arange(len(plan.bits))
    budget = int(0.7 * arena_pages) * PAGE_BYTES
    held = plan.tables.bytes_[rows, plan.bits - 2].sum()
    assert held <= budget or (plan.bits == 2).all()
    for block in np.flatnonzero(plan.bits < 8):  # one step more of any block does not fit
        level = plan.bits[block] - 2
        added = plan.tables.bytes_[block, level + 1] - plan.tables.bytes_[block, level]
        assert held + added > budget
    assert plan.least_pages * PAGE_BYTES == plan.tables.bytes_[:, 0].sum()


def test_weights_that_do_not_fit_are_refused_with_both_sizes(folder: Path) -> None:
    with pytest.raises(
        EngineSettingsError, match=r"expert weights alone need [\d,]+ bytes, the arena has 102,400"
    ):
        build_engine(settings(folder, 100, precision=8))
    with pytest.raises(EngineSettingsError, match="expert weights alone need"):
        build_engine(settings(folder, 100))
    checkpoint = QuantizedCheckpoint.open(folder)
    with pytest.raises(ValueError, match=r"weights need \d+ pages, the arena has 100"):
        weights_in_pages(checkpoint, PageArena(100, page_bytes=PAGE_BYTES), np.full(12, 8))


@pytest.mark.parametrize("bits", [9, 1, 0, -3])
def test_a_width_that_the_checkpoint_does_not_have_is_refused(folder: Path, bits: int) -> None:
    with pytest.raises(EngineSettingsError, match=f"precision: must be .*found {bits}"):
        build_engine(settings(folder, 4000, precision=bits))


def test_a_planner_or_a_setting_that_there_is_none_of_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="optimum"):
        build_engine(settings(folder, 4000, precision="optimum"))
    with pytest.raises(EngineSettingsError, match=r"precision_settings: .*calmness"):
        build_engine(settings(folder, 4000, precision_settings={"calmness": 1}))


def test_traffic_is_measured_against_that_of_the_calibration(folder: Path, tmp_path: Path) -> None:
    with_masses = Path(shutil.copytree(folder, tmp_path / "copy"))
    manifest = json.loads((folder / MANIFEST).read_text())
    first, second = [[0.5, 0.3, 0.2]] * 2, [[0.4, 0.2, 0.1]] * 2
    manifest["routing_mass"] = {"first": first, "second": second}
    (with_masses / MANIFEST).write_text(json.dumps(manifest))
    told = {}
    for place in (folder, with_masses):
        parts = build_engine(settings(place, 4000))
        control = parts.control
        assert control is not None
        start = control.mass.m2.tolist()
        for layer in range(2):  # all of the traffic goes to the last expert
            control.observe(layer, np.full((5000, 1), 2, np.int32), np.ones((5000, 1), np.float32))
        told[place] = start, control.state(0, 0).mass_multiplier
        parts.close()
    assert told[folder][0] == [[0.0] * 3] * 2
    assert told[folder][1].tolist() == [1.0] * 12
    assert told[with_masses][0] == second
    by_expert = told[with_masses][1].reshape(2, 3, 2)
    assert (by_expert[:, 2] > 1.0).all() and (by_expert[:, :2] < 1.0).all()


def test_device_rules_and_history_of_the_movement_are_used(folder: Path) -> None:
    history: list[Event] = []
    made: list[CpuDevice] = []

    def device(arena: PageArena) -> CpuDevice:
        made.append(CpuDevice(arena))
        return made[-1]

    rules = MovementRules(tables="active")
    movement = Movement(device=device, rules=rules, history=history.append)
    parts = build_engine(settings(folder, 4000, precision=5), movement)
    assert parts.mover is not None
    rows = parts.mover.table.rules
    use = parts.arena.use()
    kv = parts.arena.take_kv(1, PAGE_BYTES)
    parts.close()
    checkpoint = QuantizedCheckpoint.open(folder)
    active = sum(block_bytes(b.rows, b.columns, 5, tables="active") for b in checkpoint.blocks)
    assert rows is rules
    assert len(made) == 1
    assert use.weight_pages * PAGE_BYTES == active
    assert kv is not None and history  # the arena and the page table both told it
