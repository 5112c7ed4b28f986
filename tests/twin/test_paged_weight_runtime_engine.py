"""The twin schedules step by step what the runtime's engine schedules.

The runtime's engine runs on a simulated clock: its own batching and KV cache, a forward pass that
takes time but computes nothing, and the twin's expert weights in place of the page mover. Requests'
times, pages and every call of the batching policy with its orders must come out the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models.llm_catalog import load_llm
from models.scenario_file import parse_paged_weight
from models.weight_memory import other_bytes
from models.workload import OpenLoopRequests
from policies.batching.first_come import FirstComeBatching
from policies.batching.log import LoggedBatching
from policies.batching.settings import BatchingSettings
from policies.weight_page_ledger import PageLedger
from traces.decisions import Decision, DecisionLog
from twin.paged_weight_cache import KvPages
from twin.paged_weight_engine import IDLE_TICK_S, PagedWeightEngine, weights_of
from twin.paged_weight_model import PagedWeightModel, build_model

torch = pytest.importorskip("torch")
pytest.importorskip("runtime.engine.core")

from runtime.engine.core import EngineCore  # noqa: E402
from runtime.engine.frames import EngineInfo, NewSequence, Sampling  # noqa: E402
from runtime.engine.parts import EngineParts  # noqa: E402
from runtime.engine.settings import EngineSettings  # noqa: E402
from runtime.model.kv_cache import KvCache  # noqa: E402
from runtime.model.kv_layout import KvLayout, LayerKv  # noqa: E402
from runtime.model.step import StepBatch  # noqa: E402
from runtime.page_arena import PageArena  # noqa: E402

PAGE_BYTES = 2048  # a block of 16 tokens of a layer
KV_HEADS, HEAD_DIM, VOCABULARY = 2, 16, 2
MANY_CALLS = 1_000_000
CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


class SimulatedPass:
    """A forward pass that lasts as long as the twin says; every logit is 0.

    Also the clock, and the twin's expert weights as the engine's mover and control.
    """

    def __init__(self, model: PagedWeightModel, weights: Any) -> None:
        self._model, self._weights = model, weights
        self.now_s = 0.0
        self.tokens = self.steps = 0

    def __call__(self, batch: StepBatch) -> Any:
        added = np.diff(batch.first)
        time, weights = self._model.time, self._weights
        chunks = zip(batch.starts.tolist(), added.tolist(), strict=True)
        flops = sum(time.attention_flops(held, new) for held, new in chunks if new > 1)
        self.tokens, outputs = int(added.sum()), len(batch.logit_rows)
        self.steps += 1
        self.now_s += (
            time.fixed_seconds
            + weights.expert_seconds(self.tokens)
            + time.dense_seconds(self.tokens, outputs, slowdown=weights.slowdown)
            + time.attention_seconds(
                time.kv_read_bytes(batch.starts, added), flops, slowdown=weights.slowdown
            )
        )
        return torch.zeros(outputs, VOCABULARY)

    def boundary(self, step: int, forecast_pages: int, *, now: float) -> None:
        self._weights.boundary(step, lambda: forecast_pages, now=now)

    def allocation_failed(
        self, step: int, needed: int, forecast: int, *, now: float, keeps_hot: bool = True
    ) -> Any:
        waits = self._weights.allocation_failed(
            step, needed, lambda: forecast, now=now, keeps_hot=keeps_hot
        )
        return SimpleNamespace(pages_short=0 if waits else 1)

    def step_built(self, step: int) -> None:
        if self.tokens:
            self._weights.step_built(step, self.tokens)


def engine_of(
    model: PagedWeightModel, weights: Any, simulated: SimulatedPass, log: DecisionLog
) -> EngineCore:
    """The runtime's engine over the ledger of the twin's weights."""
    layers = [
        LayerKv(kv_heads=KV_HEADS, head_dim=HEAD_DIM, window_tokens=group.window_tokens)
        for group in model.time.kv
        for _ in range(group.num_layers)
    ]
    arena = PageArena(model.arena_pages, page_bytes=PAGE_BYTES)
    arena.ledger = weights.ledger
    cache = KvCache(arena, KvLayout(layers, torch.float16, PAGE_BYTES))
    serving = model.scenario.serving
    accounts = FirstComeBatching(
        cache.layout.paging,
        BatchingSettings(max_running=serving.max_running, prefill_tokens=serving.prefill_tokens),
    )
    info = EngineInfo(
        model="",
        model_type="mixtral",
        vocabulary=VOCABULARY,
        context_tokens=1 << 20,
        kv_capacity_tokens=1 << 20,
        eos_token_ids=(),
        dtype="float16",
        device="cpu",
        experts="quantized",
        block_tokens=cache.layout.block_tokens,
        page_bytes=PAGE_BYTES,
        arena_pages=arena.num_pages,
        has_prefix_store=False,
    )
    both: Any = simulated
    return EngineCore(
        EngineParts(
            settings=EngineSettings(model=""),
            info=info,
            forward=simulated,
            arena=arena,
            cache=cache,
            accounts=accounts,
            batching=LoggedBatching(accounts, log),
            log=log,
            clock=lambda: simulated.now_s,
            mover=both,
            control=both,
        )
    )


@dataclass
class Served:
    """When each request got its first and its last token, and what that took."""

    first_s: list[float]
    last_s: list[float]
    core: EngineCore
    steps: int = 0
    log: DecisionLog = field(default_factory=lambda: DecisionLog(max_calls=MANY_CALLS))


def in_the_runtime(
    model: PagedWeightModel, policy: str | int, requests: OpenLoopRequests
) -> Served:
    log = DecisionLog(max_calls=MANY_CALLS)
    weights = weights_of(model, policy, 0, log=log)
    simulated = SimulatedPass(model, weights)
    core = engine_of(model, weights, simulated, log)
    count, arrived = len(requests.arrival_s), 0
    served = Served([np.nan] * count, [np.nan] * count, core, log=log)
    while True:
        while arrived < count and requests.arrival_s[arrived] <= simulated.now_s:
            max_tokens = int(requests.output_tokens[arrived])
            core.add(
                NewSequence(
                    sequence_id=str(arrived),
                    prompt=(0,) * int(requests.prompt_tokens[arrived]),
                    sampling=Sampling(max_tokens=max_tokens, temperature=0.0),
                )
            )
            arrived += 1
        simulated.tokens = 0
        for output in core.step():
            at = int(output.sequence_id)
            assert output.tokens == (0,) and not output.error
            if np.isnan(served.first_s[at]):
                served.first_s[at] = simulated.now_s
            if output.finish_reason is not None:
                served.last_s[at] = simulated.now_s
        if simulated.tokens:
            continue
        arrival = requests.arrival_s[arrived] if arrived < count else np.inf
        if core.sequences or (weights.wakeup_s() is not None and arrival < np.inf):
            arrival = min(max(arrival, simulated.now_s), simulated.now_s + IDLE_TICK_S)
        elif arrival == np.inf:
            served.steps = simulated.steps
            return served
        simulated.now_s = max(arrival, simulated.now_s)


def calls(log: DecisionLog) -> list[Decision]:
    assert not log.calls_left_out
    return log.decisions


def model_of(tmp_path: Path, pages: int, window: int | None) -> PagedWeightModel:
    file: Path = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, "sliding_window": window}))
    others = other_bytes(load_llm(file))
    return build_model(
        parse_paged_weight(
            {
                "llm": {"model": str(file)},
                "hardware": {
                    "device": "H200",
                    "memory_gb": (others + pages * PAGE_BYTES) / 1e9,
                    "reserve_gb": 0.0,
                    "link_gb_per_s": 0.02,
                    "copy_gb_per_s": 1.0,
                    "copy_failure_share": 0.05,
                },
                "precision": {
                    "parent_bits": 5,
                    "page_bytes": PAGE_BYTES,
                    "plan_interval_s": 0.02,
                    "calm_steps": 4,
                },
                "routing": {"interval_s": 0.02, "hot_coverage": 0.0},
                "serving": {"max_running": 16, "prefill_tokens": 48},
            }
        )
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("pages", "window"), [(110, None), (200, None), (600, None), (110, 40)])
@pytest.mark.parametrize("policy", ["hull", "uniform", 3])
def test_the_twin_serves_every_request_when_the_runtimes_engine_does(
    tmp_path: Path, policy: str | int, pages: int, window: int | None, seed: int
) -> None:
    is_tight = pages == 110 and window is None and policy != 3
    pages = 84 if is_tight else pages  # 3 bits for all would not leave room for the longest request
    model = model_of(tmp_path, pages, window)
    rng = np.random.default_rng(seed)
    requests = OpenLoopRequests(
        arrival_s=np.sort(rng.choice([0.0, 0.1, 0.5, 0.9], 40) + rng.exponential(0.02, 40)),
        # prompts of one token cost no prefill; many at once tell the difference
        prompt_tokens=rng.integers(1, 120, 40) if seed else rng.choice([1, 1, 1, 47, 48], 40),
        output_tokens=rng.integers(1, 90, 40),
    )
    log = DecisionLog(max_calls=MANY_CALLS)
    weights = weights_of(model, policy, 0, log=log)
    engine = PagedWeightEngine(model, weights, requests, policy="twin", log=log)
    twin = engine.run()
    runtime = in_the_runtime(model, policy, requests)
    counts = runtime.core.counts
    assert not twin.is_refused.any()
    assert twin.first_token_s.tolist() == runtime.first_s
    assert twin.last_token_s.tolist() == runtime.last_s
    assert twin.totals.steps == runtime.steps
    assert twin.totals.computed_tokens == counts.computed_tokens
    assert twin.totals.generated_tokens == counts.generated_tokens
    assert twin.totals.preemptions == counts.preemptions
    assert twin.totals.held_back == counts.held_back
    assert log.policies == runtime.log.policies
    for ours, theirs in zip(calls(log), calls(runtime.log), strict=True):
        assert ours == theirs
    assert model.arena_pages == pages
    assert weights.ledger.held_pages("kv") == 0
    runtime.core.parts.cache.check()
    if is_tight:
        assert twin.totals.preemptions > 0


@pytest.mark.parametrize("seed", range(4))
def test_the_twin_counts_the_pages_that_the_kv_cache_takes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    windows = [None, 20, 40, None, 20][: 2 + seed]
    layers = [
        LayerKv(kv_heads=KV_HEADS, head_dim=HEAD_DIM, window_tokens=window) for window in windows
    ]
    layout = KvLayout(layers, torch.float16, 1024)  # two pages of a layer in a block
    arena = PageArena(300, page_bytes=1024)
    cache = KvCache(arena, layout)
    ledger = PageLedger(300)
    pages = KvPages(ledger, layout.kv_layers(), page_bytes=1024)
    held: dict[int, int] = {}
    refused = 0
    for number in range(600):
        if not held or (len(held) < 8 and rng.random() < 0.1):
            cache.add(number)
            held[number] = 0
        sequence = int(rng.choice(list(held)))
        if rng.random() < 0.05:
            cache.release(sequence)
            pages.release(sequence)
            del held[sequence]
            continue
        added = int(rng.choice([1, 1, 7, 16, 60]))
        pages.leave_behind(sequence, held[sequence])
        fits = pages.reserve(sequence, held[sequence], added)
        assert cache.grow(sequence, added) == fits
        refused += not fits
        if fits:
            cache.advance(sequence, added)
            held[sequence] += added
        assert arena.ledger.held_pages("kv") == ledger.held_pages("kv")
        assert arena.ledger.free_pages == ledger.free_pages
    assert refused > 10
