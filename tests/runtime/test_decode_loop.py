"""A quantized checkpoint decoded in one arena while its widths move, from file to tokens."""

import numpy as np
import pytest
import torch
import transformers

from kernels.reference import dequantize
from policies.precision import PrecisionPolicy
from policies.precision_log import LoggedPrecision
from policies.precision_state import PrecisionSettings
from policies.weight_page_rules import check_history
from runtime.decode_loop import DecodeLoop
from runtime.loaded_model import load_quantized
from runtime.page_devices import CpuDevice
from runtime.page_faulty_device import FaultRates, FaultyDevice
from runtime.paged_experts import PagedExpertLayers
from runtime.precision_control import PrecisionControl
from runtime.quantize import quantize_checkpoint
from runtime.quantized_checkpoint import QuantizedCheckpoint
from traces.decisions import DecisionLog
from twin.replay import replay_log

PAGE_BYTES = 1024


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Source model and its quantized folder."""
    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("model")
    config = transformers.Qwen2MoeConfig(
        vocab_size=67,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.25
    model.save_pretrained(folder / "source")
    quantize_checkpoint(folder / "source", folder / "quantized")
    return model, folder / "quantized"


def with_decoded_experts(model, folder, bits):
    """The transformers model with every expert replaced by its q-bit decoding."""
    quantized = QuantizedCheckpoint.open(folder)
    for i, record in enumerate(quantized.blocks):
        block = quantized.block(i)
        weights = dequantize(block.planes, block.tables[bits[i]], bits[i], block.columns)
        experts = model.model.layers[record.layer].mlp.experts
        target = experts.gate_up_proj if record.module == "gate_up" else experts.down_proj
        target.data[record.expert] = torch.from_numpy(weights)
    return model


def loop_of(loaded, control=None, observe=None, **settings):
    ticks = iter(range(10**9))
    experts = PagedExpertLayers(loaded.config, loaded.arena, loaded.mover.tables, observe=observe)
    return DecodeLoop(
        loaded.decoder,
        loaded.cache,
        experts,
        clock=lambda: 0.01 * next(ticks),
        control=control,
        mover=loaded.mover,
        **settings,
    )


@pytest.mark.parametrize("seed", range(2))
def test_tokens_equal_those_of_the_library_with_the_decoded_weights(checkpoint, seed):
    model, folder = checkpoint
    rng = np.random.default_rng(seed)
    bits = rng.integers(2, 9, size=16)
    loaded = load_quantized(folder, arena_pages=1500, bits=bits, page_bytes=PAGE_BYTES)
    loop = loop_of(loaded, prefill_tokens=7)
    prompts = [rng.integers(0, 67, size=n).tolist() for n in (3, 11, 1, 20)]
    sequences = [loop.add(prompt, 12) for prompt in prompts]
    for _ in range(100):
        loop.step()
        if not loop.running and not loop.waiting:
            break
    loaded.close()
    reference = with_decoded_experts(model, folder, bits)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        with torch.inference_mode():
            # the tokens before each generated one, so that a near tie cannot derail the rest
            logits = reference(torch.tensor([sequence.tokens[:-1]])).logits[0]
        best = logits[len(prompt) - 1 :].max(-1).values
        chosen = logits[len(prompt) - 1 :].gather(
            1, torch.tensor(sequence.tokens[len(prompt) :])[:, None]
        )
        assert (best - chosen[:, 0]).max() < 1e-3
        assert sequence.generated == 12
    assert loaded.arena.use().kv_pages == 0


def controlled(folder, arena_pages, *, faults=None, log=None, bits=8, **settings):
    history: list = []
    devices = []

    def device(arena):
        rates, seed = faults or (None, 0)
        rng = np.random.default_rng(seed)
        devices.append(CpuDevice(arena) if rates is None else FaultyDevice(arena, rng, rates))
        return devices[0]

    loaded = load_quantized(
        folder,
        arena_pages=arena_pages,
        bits=bits,
        page_bytes=PAGE_BYTES,
        device=device,
        history=history.append,
    )
    policy = PrecisionPolicy(
        loaded.tables,
        arena_pages=arena_pages,
        page_bytes=PAGE_BYTES,
        settings=PrecisionSettings(calm_steps=4, plan_interval_s=0.05, link_bytes_per_s=1e8),
    )
    if log is not None:
        policy = LoggedPrecision(policy, log)
    mass = (np.full((2, 4), 0.25), np.full((2, 4), 0.1))
    control = PrecisionControl(
        policy, loaded.mover, loaded.arena, layers=2, experts=4, calibrated_mass=mass
    )
    loop = loop_of(loaded, control, control.observe, **settings)
    return loaded, loop, control, history, devices[0]


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_widths_follow_the_kv_cache_down_and_up_and_every_rule_holds(checkpoint, seed, tmp_path):
    _, folder = checkpoint
    rates = FaultRates(fails=0.05, corrupts=0.05, loses=0.02, delay_ticks=4, fence_ticks=2)
    faults = None if seed is None else (rates, seed)
    log = DecisionLog()
    loaded, loop, control, history, device = controlled(folder, 560, bits=6, faults=faults, log=log)
    start = loaded.mover.table.bits.mean()
    rng = np.random.default_rng(4)
    sequences = [loop.add(rng.integers(0, 67, size=20).tolist(), 60) for _ in range(10)]
    lowest = start
    for _ in range(400):
        loop.step()
        if faults is not None:
            device.tick()
        loaded.arena.check()
        lowest = min(lowest, loaded.mover.table.bits.mean())
    assert all(sequence.is_done for sequence in sequences)
    assert lowest < start - 1
    assert loaded.mover.table.bits.mean() > lowest + 1  # the bits came back
    assert {"shrink", "restore"} <= set(control.decisions)
    violation = check_history(history, at_rest=False)
    assert violation is None, violation
    _assert_resident_bytes_are_the_parents(loaded, folder)
    loaded.close()
    path = tmp_path / "decisions.jsonl.gz"
    path.write_bytes(log.to_bytes())
    replay = replay_log(path)
    assert replay.difference is None and replay.num_calls == len(log.decisions) > 100


def test_a_sequence_that_cannot_be_held_is_refused_and_the_others_go_on(checkpoint):
    _, folder = checkpoint
    loaded, loop, _, _, _ = controlled(folder, 220, bits=2)
    too_long, short = loop.add([1] * 2000, 5), loop.add([2, 3], 5)
    refused = [s for _ in range(60) for s in loop.step().refused]
    loaded.close()
    assert refused == [too_long]
    assert short.is_done and not too_long.is_done
    assert loaded.arena.use().kv_pages == 0
    with pytest.raises(TypeError, match="float"):
        loop.add([1.7], 3)


def test_preempted_sequences_are_computed_again_to_the_same_tokens(checkpoint):
    _, folder = checkpoint
    rng = np.random.default_rng(9)
    prompts = [rng.integers(0, 67, size=30).tolist() for _ in range(8)]

    def run(arena_pages):
        loaded = load_quantized(folder, arena_pages=arena_pages, bits=4, page_bytes=PAGE_BYTES)
        loop = loop_of(loaded)
        sequences = [loop.add(prompt, 25) for prompt in prompts]
        preempted = sum(loop.step().preempted for _ in range(400))
        loaded.close()
        assert all(sequence.is_done for sequence in sequences)
        return [sequence.tokens for sequence in sequences], preempted

    roomy, none = run(2000)
    tight, some = run(310)
    assert none == 0 and some > 0
    assert tight == roomy


def _assert_resident_bytes_are_the_parents(loaded, folder):
    quantized = QuantizedCheckpoint.open(folder)
    arena = loaded.arena.buffer.array
    for i in range(len(quantized.blocks)):
        block, q = quantized.block(i), int(loaded.mover.tables.bits[i])
        for plane in range(q):
            held = arena[loaded.mover.tables.plane_list(i, plane)].reshape(-1)
            words = np.ascontiguousarray(block.planes[plane]).view(np.uint8).reshape(-1)
            assert (held[: len(words)] == words).all()
        held = arena[loaded.mover.tables.table_list(i, q)].reshape(-1)
        table = np.ascontiguousarray(block.tables[q]).view(np.uint8).reshape(-1)
        assert (held[: len(table)] == table).all()
