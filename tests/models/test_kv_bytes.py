"""Cache sizes against counting token by token, published figures and a real cache."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.hf_config import read_hf_config
from models.kv_bytes import (
    KvLayers,
    kv_block_pages,
    kv_growth_tokens,
    kv_layers,
    kv_sequence_bytes,
    kv_sequence_pages,
    kv_token_bytes,
    kv_tokens_in,
    kv_tokens_in_pages,
    kv_tokens_per_sequence,
)
from models.llm_catalog import PAGEDWEIGHT_MODELS, load_llm
from models.llm_shape import AttentionShape, DenseMlpShape, LayerShape, LlmShape
from models.plane_bytes import plane_bytes


def shape_of(layers: list[tuple[int, int | None]]) -> LlmShape:
    """A model of layers given by (key/value heads, window)."""
    return LlmShape(
        name="x",
        model_type="llama",
        hidden_size=8,
        vocab_size=8,
        is_tied=True,
        activation="silu",
        max_context_tokens=8,
        layers=tuple(
            LayerShape(
                attention=AttentionShape(
                    num_heads=heads, num_kv_heads=heads, head_dim=2, window_tokens=window
                ),
                mlp=DenseMlpShape(intermediate_size=8),
                moe=None,
            )
            for heads, window in layers
        ),
    )


SHAPES = st.lists(
    st.tuples(st.integers(1, 3), st.one_of(st.none(), st.integers(1, 9))), min_size=1, max_size=4
).map(shape_of)


def counted_bytes(shape: LlmShape, tokens: int) -> int:
    """Append token by token; every layer forgets what lies beyond its window."""
    total = 0
    for layer in shape.layers:
        kept: list[int] = []
        for token in range(tokens):
            kept.append(token)
            if layer.attention.window_tokens is not None:
                kept = kept[-layer.attention.window_tokens :]
        total += 2 * len(kept) * layer.attention.kv_values_per_token
    return total


@given(shape=SHAPES, tokens=st.integers(0, 25))
@settings(max_examples=60, deadline=None)
def test_a_sequence_takes_what_its_layers_keep(shape: LlmShape, tokens: int) -> None:
    assert kv_sequence_bytes(shape, tokens) == counted_bytes(shape, tokens)


@given(shape=SHAPES, num_bytes=st.integers(0, 900), sequences=st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_tokens_that_fit_are_those_that_adding_one_at_a_time_finds(
    shape: LlmShape, num_bytes: int, sequences: int
) -> None:
    limit = 120  # 900 bytes are at most 112 tokens of 8 bytes
    lengths = [0] * sequences
    for step in itertools.count():  # sequences grow in turn
        lengths[step % sequences] += 1
        if sum(counted_bytes(shape, n) for n in lengths) > num_bytes or lengths[0] > limit:
            break
    expected = None if lengths[0] > limit else sum(lengths) - 1
    assert kv_tokens_in(shape, num_bytes, num_sequences=sequences) == expected


@given(shape=SHAPES, tokens=st.integers(0, 40), block=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_pages_of_a_sequence_are_those_of_the_blocks_its_kept_tokens_lie_in(
    shape: LlmShape, tokens: int, block: int
) -> None:
    expected = 0
    for layer in shape.layers:
        window = layer.attention.window_tokens or tokens
        blocks = {token // block for token in range(max(0, tokens - window), tokens)}
        block_bytes = 2 * layer.attention.kv_values_per_token * block
        expected += len(blocks) * -(-block_bytes // 1024)
    assert kv_sequence_pages(shape, tokens, page_bytes=1024, block_tokens=block) == expected


@given(
    shape=SHAPES,
    num_pages=st.integers(0, 60),
    sequences=st.integers(1, 3),
    block=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_tokens_in_pages_are_those_that_adding_a_block_at_a_time_finds(
    shape: LlmShape, num_pages: int, sequences: int, block: int
) -> None:
    limit = 80

    def most_pages(blocks: int) -> int:  # a sequence must fit at every length on its way
        return max(
            kv_sequence_pages(shape, n, page_bytes=1024, block_tokens=block)
            for n in range(blocks * block + 1)
        )

    lengths = [0] * sequences
    for step in itertools.count():
        lengths[step % sequences] += 1
        if sum(map(most_pages, lengths)) > num_pages or lengths[0] > limit:
            break
    expected = None if lengths[0] > limit else (sum(lengths) - 1) * block
    found = kv_tokens_in_pages(
        shape, num_pages, num_sequences=sequences, page_bytes=1024, block_tokens=block
    )
    assert found == expected


@given(
    shape=SHAPES,
    num_pages=st.integers(0, 60),
    sequences=st.integers(1, 9),
    block=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_equal_sequences_grow_all_together_by_a_block(
    shape: LlmShape, num_pages: int, sequences: int, block: int
) -> None:
    limit = 80

    def most_pages(blocks: int) -> int:
        return max(
            kv_sequence_pages(shape, n, page_bytes=1024, block_tokens=block)
            for n in range(blocks * block + 1)
        )

    blocks = 0
    while sequences * most_pages(blocks + 1) <= num_pages and blocks <= limit:
        blocks += 1
    found = kv_tokens_per_sequence(
        shape, num_pages, num_sequences=sequences, page_bytes=1024, block_tokens=block
    )
    assert found == (None if blocks > limit else blocks * block)


def test_bytes_per_token_are_the_published_ones() -> None:
    per_token = {name: kv_token_bytes(load_llm(name)) for name in PAGEDWEIGHT_MODELS}
    assert per_token["Qwen1.5-MoE-A2.7B"].unbounded == 196_608
    assert per_token["Mixtral-8x7B"].unbounded == 131_072
    gemma = per_token["Gemma-4-26B-A4B"]
    assert (gemma.unbounded, gemma.windowed) == (20_480, 204_800)
    windows = kv_sequence_bytes(load_llm("Gemma-4-26B-A4B"), 5000) - 5000 * 20_480
    assert windows == 209_715_200


def test_a_block_of_16_tokens_fills_2_or_4_pages_as_published() -> None:
    pages = {
        name: [kv_block_pages(group) for group in kv_layers(load_llm(name))]
        for name in PAGEDWEIGHT_MODELS
    }
    assert pages == {
        "Qwen1.5-MoE-A2.7B": [4],
        "Mixtral-8x7B": [2],
        "Gemma-4-26B-A4B": [4, 2],
    }


@pytest.mark.parametrize(
    ("name", "freed_bytes", "tokens"),
    [
        ("Qwen1.5-MoE-A2.7B", 1_557_135_360, 7_920),
        ("Mixtral-8x7B", 5_637_144_576, 43_008),
        ("Gemma-4-26B-A4B", 2_854_748_160, 139_392),
    ],
)
def test_one_plane_of_all_experts_holds_the_published_tokens(
    name: str, freed_bytes: int, tokens: int
) -> None:
    shape = load_llm(name)
    plane = sum(m.count * plane_bytes(m.rows, m.columns) for m in shape.expert_matrices)
    assert plane == freed_bytes
    long = 300_000  # a sequence beyond its windows grows by so many tokens
    assert kv_tokens_in(shape, kv_sequence_bytes(shape, long) + plane) == long + tokens
    assert kv_growth_tokens(shape, plane // 32768) == tokens


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"num_key_value_heads": 2}),
        ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
        ("gemma4_text", {"head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 0}),
        ("gemma4_text", {"num_kv_shared_layers": 2, "num_hidden_layers": 8, "head_dim": 8,
                         "hidden_size_per_layer_input": 4, "layer_types":
                         ["sliding_attention", "full_attention"] * 4}),
    ],
)  # fmt: skip
def test_a_real_cache_holds_as_many_bytes(model_type: str, changes: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        **changes,
    }
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = 11
    with torch.no_grad():
        cache = model(torch.arange(tokens)[None]).past_key_values
    held = sum(
        tensor.nbytes
        for layer in cache.layers
        for tensor in (layer.keys, layer.values)
        if tensor is not None
    )
    shape = read_hf_config({"model_type": model_type, **sizes})
    assert kv_sequence_bytes(shape, tokens, value_bytes=4) == held


def test_windows_everywhere_grow_inside_their_windows() -> None:
    mistral = load_llm("Mistral-7B")  # 64 KiB a block of 16 tokens and layer
    assert kv_growth_tokens(mistral, 64 * 10) == 160
    assert kv_growth_tokens(mistral, 64 * 10 - 1) == 144


def test_sizes_out_of_range_are_named() -> None:
    shape = shape_of([(1, None)])
    with pytest.raises(ValueError, match="value_bytes must be >= 1, found 0"):
        kv_layers(shape, value_bytes=0)
    with pytest.raises(ValueError, match="tokens must be >= 0, found -1"):
        kv_sequence_bytes(shape, -1)
    with pytest.raises(ValueError, match="num_bytes must be >= 0, found -1"):
        kv_tokens_in(shape, -1)
    with pytest.raises(ValueError, match="num_sequences must be >= 1, found 0"):
        kv_tokens_in(shape, 1, num_sequences=0)
    with pytest.raises(ValueError, match="num_pages must be >= 0, found -1"):
        kv_tokens_in_pages(shape, -1)
    with pytest.raises(ValueError, match="num_pages must be >= 0, found -1"):
        kv_growth_tokens(shape, -1)
    with pytest.raises(ValueError, match="block_tokens must be >= 1, found 0"):
        kv_block_pages(KvLayers(num_layers=1, token_bytes=4, window_tokens=None), block_tokens=0)
