"""KV pages to come, against the page count of one sequence at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.kv_bytes import kv_layers, kv_sequence_pages
from models.llm_catalog import load_llm
from policies.precision_forecast import forecast_kv_pages

QWEN, GEMMA = load_llm("qwen1.5-moe-a2.7b"), load_llm("gemma-4-26b-a4b")
counts = st.integers(0, 3000)


def one(shape, held: int, prompt: int, decode: int, **options: int) -> int:
    return forecast_kv_pages(
        kv_layers(shape),
        held_tokens=np.array([held]),
        prompt_tokens_left=np.array([prompt]),
        decode_tokens_left=np.array([decode]),
        **options,
    )


@settings(max_examples=100, deadline=None)
@given(held=counts, prompt=counts, decode=counts)
def test_without_windows_it_is_the_difference_of_pages_at_the_horizon(held, prompt, decode):
    later = held + prompt + min(decode, 64)
    expected = kv_sequence_pages(QWEN, later) - kv_sequence_pages(QWEN, held)
    assert one(QWEN, held, prompt, decode) == expected


@settings(max_examples=40, deadline=None)
@given(held=counts, decode=st.integers(0, 100))
def test_with_windows_no_step_on_the_way_needs_more(held, decode):
    now = kv_sequence_pages(GEMMA, held)
    peak = max(kv_sequence_pages(GEMMA, held + t) for t in range(min(decode, 64) + 1))
    found = one(GEMMA, held, 0, decode)
    assert peak - now <= found
    one_block_of_the_windowed_layers = 25 * 4  # 25 layers, 128 KiB in pages of 32 KiB
    assert found <= peak - now + one_block_of_the_windowed_layers


def test_sequences_add_up_and_horizon_and_speed_count():
    held, prompt, decode = np.array([10, 500, 0]), np.array([0, 0, 900]), np.array([300, 5, 64])
    both = forecast_kv_pages(
        kv_layers(QWEN), held_tokens=held, prompt_tokens_left=prompt, decode_tokens_left=decode
    )
    apart = zip(held.tolist(), prompt.tolist(), decode.tolist(), strict=True)
    assert both == sum(one(QWEN, *sequence) for sequence in apart)
    # 16 tokens of one Qwen1.5 layer are 128 KiB, 4 pages; 24 layers
    assert one(QWEN, 16, 0, 1000, horizon_steps=32) == 2 * 24 * 4
    assert one(QWEN, 16, 0, 1000, horizon_steps=32, tokens_per_step=2) == 4 * 24 * 4
    assert one(QWEN, 16, 0, 0) == 0


def test_counts_below_zero_or_of_unequal_number_are_refused():
    with pytest.raises(ValueError, match="must be >= 0 and equally many"):
        one(QWEN, -1, 0, 0)
    with pytest.raises(ValueError, match="equally many"):
        forecast_kv_pages(
            kv_layers(QWEN),
            held_tokens=np.array([1, 2]),
            prompt_tokens_left=np.array([0]),
            decode_tokens_left=np.array([0]),
        )
