"""Step times against published tables, closed forms, brute force and simulation of the router."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.kv_bytes import kv_sequence_bytes
from models.llm_catalog import load_llm
from models.llm_parameters import count_parameters
from models.moe_step_time import (
    MoeStepTime,
    StepRates,
    distinct_experts,
    log_miss,
    selection_probability,
)
from models.plane_bytes import block_bytes

QWEN, MIXTRAL, GEMMA = "Qwen1.5-MoE-A2.7B", "Mixtral-8x7B", "Gemma-4-26B-A4B"
EVERY_BIT = (*range(2, 9), 16)


def rates(**more):
    given_rates = {
        "memory_bytes_per_s": 4.3e12,
        "flops_per_s": 1e21,
        "share_by_bits": dict.fromkeys(EVERY_BIT, 1.0),
        "dense_share": 1.0,
        "attention_share": 1.0,
        "compute_share": 1.0,
        "launch_seconds": 0.0,
        "launches_per_layer": 0.0,
        "overhead_seconds": 0.0,
    }
    return StepRates(**(given_rates | more))


def expert_layer_us(name, tokens, bits, **more):
    """Microseconds of one expert layer, all experts alike, tables of int8 entries."""
    shape = load_llm(name)
    time = MoeStepTime(shape, rates(**more))
    moe = shape.moe_layers[0]
    blocks = ((2 * moe.intermediate_size, shape.hidden_size),
              (shape.hidden_size, moe.intermediate_size))  # fmt: skip
    active = sum(
        2.0 * n * k if bits == 16 else block_bytes(n, k, bits, entry="int8") for n, k in blocks
    )
    grid = np.full((len(shape.moe_layers), moe.num_experts), active)
    read = time.read_seconds(grid, np.full(grid.shape, bits))
    share = np.full(grid.shape, moe.experts_per_token / moe.num_experts)
    return 1e6 * time.expert_seconds(tokens, log_miss(share), read) / len(shape.moe_layers)


@pytest.mark.parametrize(
    ("name", "tokens", "distinct"),
    [(QWEN, 1, 4), (QWEN, 4, 14.5), (QWEN, 16, 40.1), (MIXTRAL, 1, 2), (MIXTRAL, 4, 5.5),
     (MIXTRAL, 16, 7.9), (GEMMA, 1, 8), (GEMMA, 4, 29.1), (GEMMA, 16, 82.4)],
)  # fmt: skip
def test_distinct_experts_are_those_of_the_published_table(name, tokens, distinct):
    moe = load_llm(name).moe_layers[0]
    found = distinct_experts(moe.num_experts, moe.experts_per_token, tokens)
    assert found == pytest.approx(distinct, abs=0.05)


@pytest.mark.parametrize(
    ("name", "tokens", "microseconds"),  # at 2, 3, 4, 5, 6 and 16 bits, 4.3 TB/s
    [
        (QWEN, 1, (2.1, 3.1, 4.1, 5.2, 6.3, 16.1)),
        (QWEN, 4, (7.4, 11.1, 14.9, 18.8, 23.0, 58.2)),
        (QWEN, 16, (20.5, 30.8, 41.3, 52.1, 63.6, 161)),
        (MIXTRAL, 1, (20.6, 30.9, 41.3, 51.8, 62.5, 164)),
        (MIXTRAL, 4, (56.3, 84.5, 113, 142, 171, 448)),
        (MIXTRAL, 16, (81.6, 122, 163, 205, 247, 649)),
        (GEMMA, 1, (2.8, 4.2, 5.7, 7.2, 8.8, 22.1)),
        (GEMMA, 4, (10.3, 15.5, 20.7, 26.2, 32.2, 80.6)),
        (GEMMA, 16, (29.2, 43.7, 58.6, 74.2, 91.0, 228)),
    ],
)
def test_a_layer_of_experts_takes_the_microseconds_of_the_published_table(
    name, tokens, microseconds
):
    found = [expert_layer_us(name, tokens, bits) for bits in (2, 3, 4, 5, 6, 16)]
    assert found == pytest.approx(microseconds, rel=0.004, abs=0.06)


def test_a_share_of_the_bandwidth_divides_the_time_of_its_width_only():
    half = {**dict.fromkeys(EVERY_BIT, 1.0), 4: 0.5}
    assert expert_layer_us(MIXTRAL, 4, 4, share_by_bits=half) == pytest.approx(
        2 * expert_layer_us(MIXTRAL, 4, 4)
    )
    assert expert_layer_us(MIXTRAL, 4, 3, share_by_bits=half) == pytest.approx(
        expert_layer_us(MIXTRAL, 4, 3)
    )


def test_many_tokens_are_bound_by_arithmetic_and_few_by_bytes():
    slow = {"flops_per_s": 989e12, "compute_share": 0.5}
    few, bytes_only = expert_layer_us(MIXTRAL, 4, 4, **slow), expert_layer_us(MIXTRAL, 4, 4)
    assert few == pytest.approx(bytes_only)
    flops = 2 * 4096 * 2 * 3 * 4096 * 14336  # tokens, experts a token, three matrices
    assert expert_layer_us(MIXTRAL, 4096, 4, **slow) == pytest.approx(1e6 * flops / (0.5 * 989e12))


def test_distinct_experts_agree_with_a_router_that_draws_without_replacement():
    rng = np.random.default_rng(5)
    experts, k, tokens, trials = 60, 4, 7, 4000
    order = np.argsort(rng.random((trials, tokens, experts)), axis=2)[:, :, :k]
    counts = [len(np.unique(trial)) for trial in order]
    error = np.std(counts) / np.sqrt(trials)
    assert abs(np.mean(counts) - distinct_experts(experts, k, tokens)) < 4 * error


@given(
    st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=40),
    st.integers(1, 8),
)
def test_selection_probabilities_add_up_to_the_experts_of_a_token(popularity, k):
    k = min(k, len(popularity))
    found = selection_probability(np.array(popularity), k)
    assert found.sum() == pytest.approx(k)
    assert (found <= 1.0 + 1e-12).all() and (found >= 0.0).all()
    order = np.argsort(popularity)
    assert (np.diff(found[order]) >= -1e-9).all()
    free = found < 1.0 - 1e-9
    if free.sum() > 1:  # in proportion, where the cap does not bind
        ratio = found[free] / np.array(popularity)[free]
        assert ratio == pytest.approx(np.full(free.sum(), ratio[0]))


def test_equal_experts_are_picked_with_k_over_e():
    assert selection_probability(np.ones((3, 60)), 4) == pytest.approx(np.full((3, 60), 4 / 60))


@pytest.mark.parametrize(
    ("popularity", "k", "what"),
    [([1.0, 0.0], 1, "popularity"), ([1.0, np.nan], 1, "popularity"), ([1.0, 1.0], 3, "within 1")],
)
def test_impossible_routers_are_refused(popularity, k, what):
    with pytest.raises(ValueError, match=what):
        selection_probability(np.array(popularity), k)


@pytest.mark.parametrize(
    ("held", "added"), list(itertools.product((0, 1, 5, 1020, 3000), (1, 7, 2000)))
)
def test_attention_operations_are_those_of_counting_every_visible_key(held, added):
    gemma = MoeStepTime(load_llm(GEMMA), rates())
    position = np.arange(held + 1, held + added + 1)
    full = 5 * 4.0 * 16 * 512 * position.sum()  # 5 layers, 16 heads of 512, scores and values
    sliding = 25 * 4.0 * 16 * 256 * np.minimum(position, 1024).sum()
    assert gemma.attention_flops(held, added) == pytest.approx(full + sliding)


@pytest.mark.parametrize("held", [0, 100, 1023, 1024, 5000])
@pytest.mark.parametrize("name", [QWEN, MIXTRAL, GEMMA])
def test_decoding_reads_the_cache_of_its_sequence_once(name, held):
    shape = load_llm(name)
    time = MoeStepTime(shape, rates())
    found = time.kv_read_bytes(np.array([held, 0]), np.array([1, 0]))
    assert found == kv_sequence_bytes(shape, held + 1)


def test_all_but_experts_and_input_embedding_is_read_every_step():
    for name, embedding in ((MIXTRAL, 32_000 * 4096), (GEMMA, 0)):  # Gemma's is its output matrix
        shape = load_llm(name)
        time = MoeStepTime(shape, rates())
        assert time.dense_bytes == 2 * (count_parameters(shape).other - embedding)
        assert time.dense_seconds(1, 1) == pytest.approx(time.dense_bytes / 4.3e12)
        assert time.dense_seconds(1, 1, slowdown=1.5) == pytest.approx(
            1.5 * time.dense_bytes / 4.3e12
        )


def test_launches_and_overhead_come_once_a_layer_and_once_a_step():
    time = MoeStepTime(
        load_llm(MIXTRAL),
        rates(launch_seconds=2e-6, launches_per_layer=8, overhead_seconds=1e-4),
    )
    assert time.fixed_seconds == pytest.approx(32 * 8 * 2e-6 + 1e-4)


def test_models_without_experts_or_with_layers_that_differ_are_refused():
    with pytest.raises(ValueError, match="needs expert layers that are all alike, found none"):
        MoeStepTime(load_llm("Llama-3.1-8B"), rates())


@pytest.mark.parametrize(
    "wrong",
    [{"dense_share": 0.0}, {"share_by_bits": {4: 1.2}}, {"memory_bytes_per_s": 0.0},
     {"launch_seconds": -1.0}],
)  # fmt: skip
def test_rates_out_of_range_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        rates(**wrong)
