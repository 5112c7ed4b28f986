"""A quantized checkpoint served from one arena while its widths move, from file to tokens."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from kernels.reference import dequantize
from policies.weight_page_history import Event
from policies.weight_page_rules import check_history
from runtime.engine.build import build_engine
from runtime.engine.core import EngineCore
from runtime.engine.settings import EngineSettings
from runtime.engine.weight_pages import Movement
from runtime.page_devices import CpuDevice
from runtime.page_faulty_device import FaultRates, FaultyDevice
from runtime.quantize import quantize_checkpoint
from runtime.quantized_checkpoint import QuantizedCheckpoint
from tests.runtime.engine.core_cases import NO_STORE, ask, drive
from twin.replay import replay_log

PAGE_BYTES = 1024
VOCABULARY = 67
LAYERS, EXPERTS = 2, 4
STILL = {"use_movement": False, "low_share": 0.0, "target_share": 0.4, "high_share": 0.5}
BUSY = {"calm_steps": 4, "plan_interval_s": 0.05, "link_bytes_per_s": 1e8}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The source model and its quantized folder."""
    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("model")
    config = transformers.Qwen2MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        max_position_embeddings=4096,
        eos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.25
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder / "source")
    quantize_checkpoint(folder / "source", folder / "quantized")
    return model, folder / "quantized"


@contextlib.contextmanager
def served(
    folder: Path, arena_pages: int, movement: Movement | None = None, **settings: Any
) -> Iterator[EngineCore]:
    """An engine whose clock advances by 10 ms at every look at it."""
    chosen = EngineSettings(
        model=str(folder),
        memory_bytes=arena_pages * PAGE_BYTES,
        page_bytes=PAGE_BYTES,
        prefix=NO_STORE,
        **settings,
    )
    parts = build_engine(chosen, movement)
    ticks = iter(range(10**9))
    parts.clock = lambda: 0.01 * next(ticks)
    try:
        yield EngineCore(parts)
        parts.cache.check()
        assert parts.arena.use().kv_pages == 0
    finally:
        parts.close()


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, VOCABULARY, size=count).tolist()


def with_decoded_experts(model: Any, folder: Path, bits: np.ndarray) -> Any:
    """The transformers model with every expert replaced by its q-bit decoding."""
    model, quantized = copy.deepcopy(model), QuantizedCheckpoint.open(folder)
    for i, record in enumerate(quantized.blocks):
        block = quantized.block(i)
        weights = dequantize(block.planes, block.tables[bits[i]], bits[i], block.columns)
        experts = model.model.layers[record.layer].mlp.experts
        target = experts.gate_up_proj if record.module == "gate_up" else experts.down_proj
        target.data[record.expert] = torch.from_numpy(weights)
    return model


@pytest.mark.parametrize("seed", range(2))
def test_tokens_are_those_of_the_library_with_the_decoded_weights(
    checkpoint: tuple[Any, Path], seed: int
) -> None:
    model, folder = checkpoint
    rng = np.random.default_rng(seed)
    prompts = [tokens(rng, count) for count in (3, 11, 1, 20)]
    with served(folder, 500 + 60 * seed, prefill_tokens=7, precision_settings=STILL) as core:
        mover = core.parts.mover
        assert mover is not None
        bits = mover.tables.bits.copy()
        assert len(set(bits.tolist())) > 1  # every matrix has a width of its own
        answers = drive(core, [ask(prompt, 12) for prompt in prompts])
        assert mover.tables.bits.tolist() == bits.tolist()
    reference = with_decoded_experts(model, folder, bits)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            # the tokens before each generated one, so that a near tie cannot derail the rest
            logits = reference(torch.tensor([(prompt + answer.tokens)[:-1]])).logits[0]
        logits = logits[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert (logits.max(-1).values - chosen).max() < 1e-3
        logprobs = torch.log_softmax(logits.double(), -1)
        wanted = logprobs.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0].tolist()
        assert [one.logprob for one in answer.logprobs] == pytest.approx(wanted, abs=1e-3)
        assert len(answer.tokens) == 12


class SmallJobs(FaultyDevice):
    """Copies a few pages at a time, so that there are many copies to go wrong."""

    largest_job_bytes = 4 * PAGE_BYTES


def faulty(rates: FaultRates, seed: int, made: list[FaultyDevice]) -> Callable[[Any], FaultyDevice]:
    def make(arena: Any) -> FaultyDevice:
        made.append(SmallJobs(arena, np.random.default_rng(seed), rates))
        return made[-1]

    return make


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_widths_follow_the_kv_cache_down_and_up_and_every_rule_holds(
    checkpoint: tuple[Any, Path], seed: int | None, tmp_path: Path
) -> None:
    _, folder = checkpoint
    rates = FaultRates(fails=0.05, corrupts=0.05, loses=0.02, delay_ticks=4, fence_ticks=2)
    devices: list[FaultyDevice] = []
    history: list[Event] = []
    device = CpuDevice if seed is None else faulty(rates, seed, devices)
    movement = Movement(device=device, history=history.append)
    with served(folder, 560, movement, precision_settings=BUSY) as core:
        parts = core.parts
        assert parts.mover is not None and parts.control is not None
        table = parts.mover.table
        start = lowest = float(table.bits.mean())
        rng = np.random.default_rng(4)

        def between(step: int) -> None:
            nonlocal lowest
            for made in devices:
                made.tick()
            parts.arena.check()
            parts.cache.check()
            lowest = min(lowest, float(table.bits.mean()))

        answers = drive(core, [ask(tokens(rng, 20), 60) for _ in range(10)], at_step=between)
        for step in range(200):  # nobody asks any more
            between(step)
            core.idle()
        assert [len(answer.tokens) for answer in answers] == [60] * 10
        assert lowest < start - 1
        assert table.bits.mean() > lowest + 1  # the bits came back
        assert {"shrink", "restore"} <= set(parts.control.decisions)
        if devices:
            fates = devices[0].fates
            assert fates["fails"] + fates["corrupts"] + fates["loses"] > 0
        violation = check_history(history, at_rest=False)
        assert violation is None, violation
        _assert_resident_bytes_are_the_parents(core, folder)
        path = tmp_path / "decisions.jsonl.gz"
        path.write_bytes(parts.log.to_bytes())
        replay = replay_log(path)
        assert replay.difference is None
        assert replay.num_calls == parts.log.num_calls > 300
        assert set(parts.log.policies) == {"batching", "precision"}


def test_widths_that_move_leave_the_answers_of_those_that_stay(
    checkpoint: tuple[Any, Path],
) -> None:
    _, folder = checkpoint
    rng = np.random.default_rng(7)
    prompts = [tokens(rng, 20) for _ in range(6)]

    def run(arena_pages: int, precision: int | str) -> list[Any]:
        with served(folder, arena_pages, precision=precision, precision_settings=BUSY) as core:
            return [answer.said for answer in drive(core, [ask(prompt, 40) for prompt in prompts])]

    widest = run(2000, 8)
    assert run(2000, "hull") == widest  # room for all: nothing has to move
    assert run(560, "hull") != widest


def test_a_sequence_that_outgrows_the_arena_is_refused_and_the_others_go_on(
    checkpoint: tuple[Any, Path],
) -> None:
    _, folder = checkpoint
    with served(folder, 300, precision=2) as core:
        capacity = core.parts.info.kv_capacity_tokens
        # as if blocks that faults hold at their widths had taken what was promised
        core.parts.info = msgspec.structs.replace(core.parts.info, kv_capacity_tokens=1 << 20)
        prompts = ([1] * (capacity + 20), [2, 3])
        long, short = drive(core, [ask(prompt, 5) for prompt in prompts], most_steps=60)
        assert long.finish == "error" and "cannot hold" in long.error
        assert short.finish == "length" and len(short.tokens) == 5
        assert core.stats().refused_total == 1


@pytest.mark.parametrize("precision", [4, "hull"])
def test_preempted_sequences_are_computed_again_to_the_same_tokens(
    checkpoint: tuple[Any, Path], precision: int | str
) -> None:
    _, folder = checkpoint
    rng = np.random.default_rng(9)
    prompts = [tokens(rng, 30) for _ in range(8)]

    def run(arena_pages: int) -> tuple[list[Any], int]:
        with served(folder, arena_pages, precision=precision) as core:
            answers = drive(core, [ask(prompt, 25) for prompt in prompts])
            assert {answer.finish for answer in answers} == {"length"}
            return [answer.said for answer in answers], core.stats().preemptions_total

    tight, some = run(250)
    assert some > 0
    if precision == 4:  # widths that moved give other tokens
        roomy, none = run(2000)
        assert none == 0
        assert tight == roomy


def _assert_resident_bytes_are_the_parents(core: EngineCore, folder: Path) -> None:
    mover = core.parts.mover
    assert mover is not None
    quantized = QuantizedCheckpoint.open(folder)
    arena = core.parts.arena.buffer.array
    for i in range(len(quantized.blocks)):
        block, q = quantized.block(i), int(mover.tables.bits[i])
        for plane in range(q):
            held = arena[mover.tables.plane_list(i, plane)].reshape(-1)
            words = np.ascontiguousarray(block.planes[plane]).view(np.uint8).reshape(-1)
            assert (held[: len(words)] == words).all()
        held = arena[mover.tables.table_list(i, q)].reshape(-1)
        table = np.ascontiguousarray(block.tables[q]).view(np.uint8).reshape(-1)
        assert (held[: len(table)] == table).all()
