"""Decode steps filled up and replayed: buffers, padding and what is replayed when."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels.cuda_emulation import emulator
from runtime.engine.accelerator import launched_again
from runtime.model.attention_cuda import CudaAttention, CudaLimits
from runtime.model.decode_graphs import DecodeGraphs, padded_sizes
from runtime.model.kv_cache import KvCache
from runtime.model.kv_layout import KvLayout
from runtime.model.load import load_model
from runtime.model.step import StepBatch
from runtime.page_arena import PageArena

pytestmark = pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
MOST = 5


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder("qwen3"), threads=1)


class Captured:
    """Keeps what was captured: how often it was computed, and where it reads."""

    def __init__(self):
        self.graphs = 0
        self.computed = []

    def __call__(self, compute):
        self.graphs += 1

        def counted():
            self.computed.append(self.graphs)
            return compute()

        return launched_again(counted)


def engine_of(model, capture, experts=None):
    layers, page_bytes = model.spec.kv_layers, 2048
    arena = PageArena(400, page_bytes=page_bytes, device="cpu:0")
    cache = KvCache(arena, KvLayout(layers, torch.float32, page_bytes))
    cache.add(-1)
    assert cache.grow(-1, 1)
    limits = CudaLimits.of(model.spec, max_sequences=MOST, prefill_tokens=32, context_tokens=64)
    attention = CudaAttention(cache, limits, spare_pages=cache.table(-1)[0])
    graphs = DecodeGraphs(model.decoder, attention, experts, max_sequences=MOST, capture=capture)
    return SimpleNamespace(cache=cache, attention=attention, graphs=graphs)


def step(engine, new, speaking=None):
    cache = engine.cache
    for sequence, tokens in new.items():
        if sequence not in cache.sequences:
            cache.add(sequence)
        assert cache.grow(sequence, len(tokens))
    first = np.cumsum([0, *map(len, new.values())])
    rows = [first[i + 1] - 1 for i, s in enumerate(new) if speaking is None or s in speaking]
    batch = StepBatch(
        tuple(new),
        np.concatenate([*new.values()]).astype(np.int64),
        first.astype(np.int64),
        np.array([cache.tokens(s) for s in new], np.int64),
        np.array(rows, np.int64),
    )
    logits = engine.graphs.forward(batch).clone()
    for sequence, tokens in new.items():
        cache.advance(sequence, len(tokens))
    return logits


def test_sizes_double_up_to_the_most_there_may_be():
    assert padded_sizes(1) == (1,)
    assert padded_sizes(5) == (1, 2, 4, 5)
    assert padded_sizes(64) == (1, 2, 4, 8, 16, 32, 64)


def test_replayed_steps_are_those_computed_launch_by_launch(model):
    captured = Captured()
    replayed, eager = engine_of(model, captured), engine_of(model, None)
    prompts = {s: np.arange(3, 8 + s) for s in (2, 5, 6)}
    steps = [prompts, *({s: np.array([7 * s + i]) for s in (6, 2, 5)[: 3 - i]} for i in range(3))]
    for new in steps:
        assert torch.equal(step(replayed, new), step(eager, new))
    assert replayed.graphs.replays == 3
    assert eager.graphs.replays == 0
    assert captured.graphs == 3  # of 4, 2 and 1 rows
    step(replayed, {2: np.array([9]), 5: np.array([9])})
    assert captured.graphs == 3


def test_what_a_graph_reads_never_moves(model):
    engine = engine_of(model, Captured())
    places = set()
    for i in range(3):
        for s in range(i, i + 3):
            if s not in engine.cache.sequences:
                step(engine, {s: np.arange(4, 20)})
        step(engine, {s: np.array([5 + s]) for s in range(i, i + 3)})
        attention, graphs = engine.attention, engine.graphs
        places.add(
            (
                attention.rows.data_ptr(),
                attention._slots.tables.data_ptr(),
                attention._singles.data_ptr(),
                graphs._live.numbers.data_ptr(),
                graphs._graph(4)().data_ptr(),
                engine.cache.arena.buffer.address,
            )
        )
    assert len(places) == 1


def test_prompts_and_steps_in_which_somebody_does_not_speak_are_not_replayed(model):
    engine = engine_of(model, Captured())
    step(engine, {0: np.arange(4, 9), 1: np.arange(4, 12)})
    step(engine, {0: np.array([5]), 1: np.array([6, 7])})
    step(engine, {0: np.array([5]), 1: np.array([6])}, speaking={1})
    assert engine.graphs.replays == 0
    step(engine, {0: np.array([5]), 1: np.array([6])})
    assert engine.graphs.replays == 1


def test_all_graphs_are_there_before_the_first_step(model):
    captured = Captured()
    engine = engine_of(model, captured)
    engine.graphs.capture_all()
    assert captured.graphs == len(padded_sizes(MOST))
    step(engine, {0: np.arange(4, 9)})
    step(engine, {0: np.array([5])})
    assert captured.graphs == len(padded_sizes(MOST))


def test_experts_that_look_at_their_routing_on_the_host_are_never_replayed(model):
    captured = Captured()
    engine = engine_of(model, captured, experts=lambda *given: None)
    engine.graphs.capture_all()
    step(engine, {0: np.arange(4, 9)})
    step(engine, {0: np.array([5])})
    assert captured.graphs == engine.graphs.replays == 0
