import math
from dataclasses import replace

import pytest

from models.prefix_costs import PrefillCost, PrefixCosts, TierSpeed

MISTRAL_7B_ON_A100 = PrefillCost(
    parameters=7.24e9, layers=32, heads=32, head_dim=128, weight_bytes=14.48e9, flops_per_s=312e12,
    mfu=0.35, memory_bytes_per_s=1.555e12, forward_s=6e-3,
)  # fmt: skip
COSTS = PrefixCosts(
    prefill=MISTRAL_7B_ON_A100,
    block_tokens=16,
    local=TierSpeed(bytes_per_s=2e10, request_s=1e-5),
    remote=TierSpeed(bytes_per_s=1e10, request_s=6e-5),
    ssd=TierSpeed(bytes_per_s=3e9, request_s=1e-4),
    lookup_s=2e-3,
)


@pytest.mark.parametrize(
    ("mfu", "milliseconds"),
    [
        (0.35, (144, 288, 589, 1253)),
        (0.45, (114, 225, 460, 976)),
        (0.55, (94, 185, 377, 800)),
        (0.65, (80, 158, 320, 678)),
    ],
)
def test_prefill_of_mistral_7b_on_an_a100_takes_the_published_milliseconds(
    mfu: float, milliseconds: tuple[int, ...]
) -> None:
    cost = replace(MISTRAL_7B_ON_A100, mfu=mfu)
    found = [round(cost.seconds(n) * 1e3) for n in (1024, 2048, 4096, 8192)]
    assert found == list(milliseconds)


def test_prefill_in_two_parts_costs_the_arithmetic_of_the_whole() -> None:
    whole = MISTRAL_7B_ON_A100.compute_s(1000)
    parts = MISTRAL_7B_ON_A100.compute_s(600) + MISTRAL_7B_ON_A100.compute_s(400, 600)
    assert parts == pytest.approx(whole, rel=1e-12)
    blocks = sum(COSTS.recompute_s(depth) for depth in range(50))
    assert blocks == pytest.approx(MISTRAL_7B_ON_A100.compute_s(800), rel=1e-12)


def test_attention_is_four_flops_per_layer_width_and_pair_of_tokens() -> None:
    bare = replace(MISTRAL_7B_ON_A100, parameters=1e-9, mfu=1.0)
    pairs = 3 * 5 + 3 * 3 / 2
    assert bare.compute_s(3, 5) == pytest.approx(4 * 32 * 4096 * pairs / 312e12, rel=1e-9)


def test_a_short_prefill_takes_as_long_as_reading_the_weights() -> None:
    assert MISTRAL_7B_ON_A100.seconds(1) == pytest.approx(14.48e9 / 1.555e12 + 6e-3)
    assert MISTRAL_7B_ON_A100.seconds(0) == 0.0


def test_a_load_waits_for_the_slowest_request_and_reads_the_own_ssd_apart() -> None:
    fast, slow = COSTS.request_s(1e9), COSTS.request_s(1e9, 3e9)
    assert fast == pytest.approx(6e-5 + 0.1)
    assert slow == pytest.approx(6e-5 + 0.4 + 1e-4 + 1.0)
    found = COSTS.load_s(8e9, 3e9, [fast, slow])
    assert found == pytest.approx(2e-3 + (1e-4 + 1.0) + slow + (1e-5 + 0.4))
    assert COSTS.load_s(0) == 2e-3


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("mfu", 1.5, "mfu must be a share of the peak in 0..1, found 1.5"),
        ("mfu", 0.0, "mfu must be finite and > 0, found 0.0"),
        ("flops_per_s", math.inf, "flops_per_s must be finite and > 0, found inf"),
        ("forward_s", -1.0, "forward_s must be finite and >= 0, found -1.0"),
        ("memory_bytes_per_s", math.nan, "memory_bytes_per_s must be finite and > 0, found nan"),
    ],
)
def test_impossible_prefill_numbers_are_named(field: str, value: float, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        replace(MISTRAL_7B_ON_A100, **{field: value})


def test_impossible_speeds_and_blocks_are_named() -> None:
    with pytest.raises(ValueError, match="bytes_per_s must be finite and > 0, found 0"):
        TierSpeed(bytes_per_s=0)
    with pytest.raises(ValueError, match="request_s must be finite and >= 0, found -1"):
        TierSpeed(bytes_per_s=1, request_s=-1)
    with pytest.raises(ValueError, match="block_tokens must be >= 1, found 0"):
        replace(COSTS, block_tokens=0)
    with pytest.raises(ValueError, match="lookup_s must be finite and >= 0, found -1"):
        replace(COSTS, lookup_s=-1)
