"""The engine on a GPU against the one on the CPU: numbers, graphs, moving widths, prefixes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtime.quantize import QuantizeSettings, quantize_checkpoint
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

pytestmark = pytest.mark.gpu
PROMPTS = [prompt(length) for length in (1, 15, 16, 17, 50)]
FAMILIES = ("qwen2_moe", "mixtral", "olmoe", "qwen3", "mistral", "gemma4-moe")
MAX_TOKENS = 12
ON_GPU = {"device": "cuda:0", "memory_bytes": 64 << 20, "max_running": 8}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, cupy, tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def quantized(cupy, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("quantized")
    source = make_checkpoint(path / "source", "qwen2_moe")
    quantize_checkpoint(
        source, path / "q", QuantizeSettings(parent_bits=8, seed_bits=2, min_bits=2)
    )
    return path / "q"


def asks():
    return [ask(tokens, MAX_TOKENS) for tokens in PROMPTS]


def differences(found, expected):
    """Of log probabilities of the same tokens, up to where answers part."""
    for got, want in zip(found, expected, strict=True):
        assert got.error == want.error == ""
        for a, b in zip(got.logprobs, want.logprobs, strict=True):
            if a.token != b.token:
                break
            yield abs(a.logprob - b.logprob)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_logits_are_those_of_the_cpu_within_rounding(folder, dtype, tolerance):
    with running(folder, dtype="float32") as core:
        expected = drive(core, asks())
    with running(folder, dtype=dtype, **ON_GPU) as core:
        found = drive(core, asks())
    if dtype == "float32":
        assert [a.tokens for a in found] == [a.tokens for a in expected]
    assert max(differences(found, expected)) < tolerance


def test_greedy_tokens_do_not_depend_on_who_else_is_in_the_batch(folder):
    with running(folder, dtype="float32", **ON_GPU) as core:
        together = drive(core, asks())
        staggered = drive(core, asks(), every=2)
        alone = [one(core, new) for new in asks()]
    for answers in (staggered, alone):
        assert [a.tokens for a in answers] == [a.tokens for a in together]


def test_a_prefix_is_found_and_its_blocks_are_the_same_numbers(folder):
    long = prompt(50, seed=3)
    with running(folder, dtype="float32", prefix=STORE, **ON_GPU) as core:
        first = one(core, ask(long, MAX_TOKENS))
        settle(core)
        again = one(core, ask(long, MAX_TOKENS))
    assert again.cached_tokens == 48
    assert again.tokens == first.tokens


def test_every_width_gives_what_the_cpu_gives(quantized):
    for bits in (2, 4, 8):
        with running(quantized, precision=bits, dtype="float32") as core:
            expected = drive(core, asks())
        with running(quantized, precision=bits, dtype="float32", **ON_GPU) as core:
            found = drive(core, asks())
        assert max(differences(found, expected)) < 0.05, bits


def test_graphs_replay_while_widths_change(quantized):
    """One engine takes width after width; engines that had each from the start agree."""
    memory = ON_GPU | {"memory_bytes": 256 << 20}
    with running(quantized, precision=8, dtype="float32", **memory) as core:
        tables, device = core.parts.mover.tables, core.parts.mover.device
        blocks = np.arange(tables.num_blocks)
        held = tables.bits.copy()
        for bits in (8, 2, 5, 3):
            tables.bits[:] = bits  # planes and tables of all widths up to 8 are there
            device.publish(blocks)
            found = one(core, ask(PROMPTS[3], MAX_TOKENS))
            with running(quantized, precision=bits, dtype="float32", **ON_GPU) as fixed:
                expected = one(fixed, ask(PROMPTS[3], MAX_TOKENS))
            assert found.tokens == expected.tokens
            assert max(differences([found], [expected])) < 1e-5
        tables.bits[:] = held
        device.publish(blocks)
