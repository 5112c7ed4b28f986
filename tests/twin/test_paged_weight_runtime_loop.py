"""The twin schedules step by step what the runtime's decode loop schedules.

The loop of the runtime runs on a simulated clock, with page counts instead of keys and values and
the twin's expert weights in place of the page mover; the requests' times must come out the same.
"""

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models.kv_bytes import KvLayers
from models.llm_catalog import load_llm
from models.scenario_file import parse_paged_weight
from models.weight_memory import other_bytes
from models.workload import OpenLoopRequests
from policies.weight_page_ledger import PageLedger
from twin.paged_weight_cache import KvPages
from twin.paged_weight_engine import IDLE_TICK_S, PagedWeightEngine, weights_of
from twin.paged_weight_log import PagedWeightRun
from twin.paged_weight_model import PagedWeightModel, build_model

pytest.importorskip("torch")
decode_loop = pytest.importorskip("runtime.decode_loop")

PAGE_BYTES = 2048  # a block of 16 tokens of a layer
CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


class CountedCache:
    """Pages of keys and values, counted only."""

    layers, page_bytes, tokens_per_page = 2, PAGE_BYTES, 16

    def __init__(self, ledger: PageLedger, kv: Seq[KvLayers]) -> None:
        self._pages = KvPages(ledger, kv, page_bytes=PAGE_BYTES)
        self.sequences: dict[int, int] = {}

    def pages_needed(self, number: int, count: int) -> int:
        held = np.array([self.sequences.get(number, 0)])
        return int(self._pages.pages_needed(held, np.array([count]))[0])

    def reserve(self, number: int, count: int) -> bool:
        held = self.sequences.get(number, 0)
        if not self._pages.reserve(number, held, count):
            return False
        self.sequences[number] = held + count
        return True

    def release(self, number: int) -> None:
        del self.sequences[number]
        self._pages.release(number)


class TimedDecoder:
    """Every token is 0; notes what a step computes."""

    config = SimpleNamespace(vocabulary=2)

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []

    def step(self, spans: Any, cache: CountedCache, experts: object) -> Any:
        self.spans = [
            (cache.sequences[span.sequence] - len(span.tokens), len(span.tokens)) for span in spans
        ]
        return np.zeros((len(spans), 2))


class Weights:
    """The twin's expert weights as control and mover of the runtime's loop."""

    def __init__(self, weights: Any, decoder: TimedDecoder) -> None:
        self._weights, self._decoder = weights, decoder

    def boundary(self, step: int, forecast_pages: int, *, now: float) -> None:
        self._weights.boundary(step, lambda: forecast_pages, now=now)

    def allocation_failed(self, step: int, needed: int, forecast: int, *, now: float) -> Any:
        waits = self._weights.allocation_failed(step, needed, lambda: forecast, now=now)
        return SimpleNamespace(pages_short=0 if waits else 1)

    def step_built(self, step: int) -> None:
        if self._decoder.spans:
            self._weights.step_built(step, sum(added for _, added in self._decoder.spans))


def in_the_runtime(
    model: PagedWeightModel, policy: str | int, requests: OpenLoopRequests
) -> dict[str, Any]:
    weights = weights_of(model, policy, 0)
    decoder = TimedDecoder()
    both = Weights(weights, decoder)
    now = 0.0
    loop = decode_loop.DecodeLoop(
        decoder=decoder,
        cache=CountedCache(weights.ledger, model.time.kv),
        experts=None,
        clock=lambda: now,
        control=both,
        mover=both,
        max_running=model.scenario.serving.max_running,
        prefill_tokens=model.scenario.serving.prefill_tokens,
    )
    count, arrived = len(requests.arrival_s), 0
    sequences: list[Any] = []
    first, last = np.full(count, np.nan), np.full(count, np.nan)
    found = {"preemptions": 0, "held_back": 0, "steps": 0, "computed": 0}
    while len(sequences) < count or loop.waiting or loop.running:
        while arrived < count and requests.arrival_s[arrived] <= now:
            prompt = [0] * int(requests.prompt_tokens[arrived])
            sequences.append(loop.add(prompt, int(requests.output_tokens[arrived])))
            arrived += 1
        decoder.spans = []
        generated_before = [sequence.generated for sequence in sequences]
        report = loop.step()
        found["preemptions"] += report.preempted
        found["held_back"] += report.held_back
        found["computed"] += report.computed_tokens
        if not decoder.spans:
            arrival = requests.arrival_s[arrived] if arrived < count else np.inf
            is_stuck = bool(loop.waiting or loop.running)
            if is_stuck or weights.wakeup_s() is not None:
                arrival = min(max(arrival, now), now + IDLE_TICK_S)
            now = max(arrival, now)
            continue
        found["steps"] += 1
        now += seconds(model, weights, decoder.spans, report.generated_tokens)
        for at, before in enumerate(generated_before):
            if before == 0 and sequences[at].generated and np.isnan(first[at]):
                first[at] = now
            if sequences[at].is_done and np.isnan(last[at]):
                last[at] = now
    return found | {"first": first, "last": last}


def seconds(
    model: PagedWeightModel, weights: Any, spans: list[tuple[int, int]], outputs: int
) -> float:
    held, added = np.array(spans).T
    flops = sum(model.time.attention_flops(h, n) for h, n in spans if n > 1)
    return (
        model.time.fixed_seconds
        + weights.expert_seconds(int(added.sum()))
        + model.time.dense_seconds(int(added.sum()), outputs, slowdown=weights.slowdown)
        + model.time.attention_seconds(
            model.time.kv_read_bytes(held, added), flops, slowdown=weights.slowdown
        )
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pages", [110, 200, 600])
@pytest.mark.parametrize("policy", ["hull", "uniform", 3])
def test_the_twin_serves_every_request_when_the_runtimes_loop_does(tmp_path, policy, pages, seed):
    file: Path = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    others = other_bytes(load_llm(file))
    model = build_model(
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
    rng = np.random.default_rng(seed)
    requests = OpenLoopRequests(
        arrival_s=np.sort(rng.choice([0.0, 0.1, 0.5, 0.9], 40) + rng.exponential(0.02, 40)),
        # prompts of one token cost no prefill; many at once tell the difference
        prompt_tokens=rng.integers(1, 120, 40) if seed else rng.choice([1, 1, 1, 47, 48], 40),
        output_tokens=rng.integers(1, 90, 40),
    )
    engine = PagedWeightEngine(model, weights_of(model, policy, 0), requests, policy="twin")
    twin: PagedWeightRun = engine.run()
    runtime = in_the_runtime(model, policy, requests)
    assert not twin.is_refused.any()
    assert twin.first_token_s.tolist() == runtime["first"].tolist()
    assert twin.last_token_s.tolist() == runtime["last"].tolist()
    assert twin.totals.steps == runtime["steps"]
    assert twin.totals.computed_tokens == runtime["computed"]
    # the loop also counts those who were sent back before they had anything
    assert twin.totals.preemptions <= runtime["preemptions"]
    assert twin.totals.held_back == runtime["held_back"]
    assert model.arena_pages == pages
    if pages == 110:
        assert twin.totals.preemptions > 0
