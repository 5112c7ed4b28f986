"""Damage tables against the loss a trained micro model really has with quantized blocks."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from scipy.stats import spearmanr  # noqa: E402

from kernels.planes import pack_planes  # noqa: E402
from kernels.reference import dequantize, moe_layer  # noqa: E402
from models.quality import conditional_second_moment, output_error  # noqa: E402
from runtime.calibration import CalibrationSettings, calibrate_model  # noqa: E402
from runtime.calibration_damage import (  # noqa: E402
    DamageSignals,
    damage_table,
    squared_error_table,
)
from runtime.calibration_experts import find_experts  # noqa: E402
from runtime.calibration_pass import watched  # noqa: E402
from runtime.calibration_prompts import prompt_statistics  # noqa: E402
from runtime.calibration_stats import CalibrationStats  # noqa: E402
from runtime.nested_kmeans import NestedRows, quantize_rows  # noqa: E402

VOCABULARY, HIDDEN, INNER, EXPERTS, LAYERS = 40, 32, 32, 4, 2
BLOCKS = 2 * EXPERTS * LAYERS
BITS = (2, 3, 4)


def text(count: int, seed: int) -> Any:
    """[count, 33] tokens of two languages: every token has four likely successors in each."""
    rng = np.random.default_rng(7)
    chains = rng.dirichlet(np.full(VOCABULARY, 0.08), (2, VOCABULARY)).cumsum(axis=2)
    draw = np.random.default_rng(seed)
    rows = np.empty((count, 33), dtype=np.int64)
    language = (draw.random(count) < 0.25).astype(int)
    rows[:, 0] = draw.integers(0, VOCABULARY, count)
    for t in range(1, 33):
        u = draw.random(count)[:, None]
        rows[:, t] = (chains[language, rows[:, t - 1]] < u).sum(1).clip(0, VOCABULARY - 1)
    return torch.from_numpy(rows)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.Qwen2MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        moe_intermediate_size=INNER,
        intermediate_size=INNER,
        shared_expert_intermediate_size=8,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.001,
        tie_word_embeddings=True,
    )
    model = transformers.Qwen2MoeForCausalLM(config)
    model.set_experts_implementation("eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    rows = text(16 * 150, seed=1)
    for step in range(150):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 10, (150 - step) / 50)
        x = rows[16 * step : 16 * step + 16]
        model(input_ids=x, labels=x, output_router_logits=True).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model.eval()


@pytest.fixture(scope="module")
def stats(model: Any, tmp_path_factory: pytest.TempPathFactory) -> CalibrationStats:
    settings = CalibrationSettings(tokens=33 * 256, sequence_tokens=33, batch_sequences=32)
    return calibrate_model(model, text(256, seed=2), tmp_path_factory.mktemp("stats"), settings)


def place(block: int) -> tuple[int, int, int]:
    return block // 2 // EXPERTS, block // 2 % EXPERTS, block % 2


class Blocks:
    """Weights and nested codes of all blocks of the micro model."""

    def __init__(self, model: Any, stats: CalibrationStats) -> None:
        self.layers = find_experts(model)
        self.full = [self.stored(b).numpy().copy() for b in range(BLOCKS)]
        self.rows: list[NestedRows] = []
        for block, weights in enumerate(self.full):
            diagonal = np.diagonal(stats.input_second_moment(*place(block))).copy()
            self.rows.append(quantize_rows(weights, diagonal, parent_bits=4))

    def stored(self, block: int) -> Any:
        layer, expert, module = place(block)
        return (self.layers[layer].down if module else self.layers[layer].gate_up)[expert]

    def weights(self, block: int) -> np.ndarray:
        return self.full[block]

    def reconstructions(self, block: int) -> Any:
        return (self.rows[block].reconstruct(q) for q in BITS)


@pytest.fixture(scope="module")
def blocks(model: Any, stats: CalibrationStats) -> Blocks:
    return Blocks(model, stats)


@torch.inference_mode()
def loss(model: Any, rows: Any) -> float:
    logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


@pytest.fixture(scope="module")
def loss_increase(model: Any, blocks: Blocks) -> np.ndarray:
    """[blocks] loss on other text of the same languages when this block alone has two bits."""
    rows = text(384, seed=3)
    base, increase = loss(model, rows), []
    for block in range(BLOCKS):
        stored = blocks.stored(block)
        stored.copy_(torch.from_numpy(blocks.rows[block].reconstruct(2)).float())
        increase.append(loss(model, rows) - base)
        stored.copy_(torch.from_numpy(blocks.full[block]))
    assert loss(model, rows) == base
    return np.array(increase)


def test_damage_ranks_blocks_as_the_real_loss_does_and_better_than_weight_error(
    stats: CalibrationStats, blocks: Blocks, loss_increase: np.ndarray
) -> None:
    damage = damage_table(stats, blocks.weights, blocks.reconstructions)[:, 0]
    plain = squared_error_table(BLOCKS, blocks.weights, blocks.reconstructions)[:, 0]
    by_damage = spearmanr(damage, loss_increase).statistic
    by_error = spearmanr(plain, loss_increase).statistic
    assert by_damage > 0.8
    assert by_damage > by_error + 0.1


def test_half_the_damage_is_the_loss_in_nats_to_a_factor_of_two(
    stats: CalibrationStats, blocks: Blocks, loss_increase: np.ndarray
) -> None:
    """Second-order expansion: half the squared gradient times the squared error, per token."""
    damage = damage_table(stats, blocks.weights, blocks.reconstructions)[:, 0]
    assert 0.5 < 0.5 * damage.sum() / loss_increase.sum() < 2.0


def test_tables_fall_with_the_width_and_never_reach_zero(
    stats: CalibrationStats, blocks: Blocks
) -> None:
    damage = damage_table(stats, blocks.weights, blocks.reconstructions)
    assert damage.shape == (BLOCKS, len(BITS))
    assert (np.diff(damage, axis=1) < 0).all()
    assert (damage > 0).all()


def test_every_signal_can_be_switched_off(stats: CalibrationStats, blocks: Blocks) -> None:
    def table(**off: Any) -> np.ndarray:
        signals = DamageSignals(**off)
        return damage_table(stats, blocks.weights, blocks.reconstructions, signals=signals)

    on = table()
    mass = np.array([stats.mass(*place(b)[:2]) for b in range(BLOCKS)])
    by_layer = mass.reshape(LAYERS, -1).mean(1).repeat(2 * EXPERTS)
    np.testing.assert_allclose(table(mass=False), on * (by_layer / mass)[:, None], rtol=1e-6)
    scale = np.array([stats.scale(place(b)[0]) for b in range(BLOCKS)])
    np.testing.assert_allclose(table(layer_scale=False), on / scale[:, None], rtol=1e-6)
    block = 5
    weights, low = blocks.weights(block), next(blocks.reconstructions(block))
    moment = np.diagonal(stats.input_second_moment(*place(block)))
    a = stats.row_weight(*place(block))
    factor = mass[block] * scale[block]
    for off, expected in (
        ({"moment": "diagonal"}, output_error(weights, low, moment, a)),
        ({"row_weight": False}, output_error(weights, low, stats_moment(stats, block), a.mean())),
        (
            {"moment": "none", "row_weight": False},
            a.mean() * moment.mean() * ((weights - low) ** 2).sum(),
        ),
    ):
        assert table(**off)[block, 0] == pytest.approx(factor * expected, rel=1e-4)


def stats_moment(stats: CalibrationStats, block: int) -> np.ndarray:
    return stats.input_second_moment(*place(block))


def test_a_prompts_damage_is_that_of_its_own_tokens(
    model: Any, stats: CalibrationStats, blocks: Blocks
) -> None:
    prompts = [row[:length] for row, length in zip(text(3, seed=5), (33, 20, 7), strict=True)]
    layers = find_experts(model)
    low = [blocks.rows[b].reconstruct(3) for b in range(BLOCKS)]
    found = prompt_statistics(
        model,
        layers,
        prompts,
        weight_error=lambda b: blocks.full[b] - low[b],
        row_weight=lambda b: stats.row_weight(*place(b)),
    )
    np.testing.assert_array_equal(found.tokens, [33, 20, 7])
    np.testing.assert_array_equal(found.routed_tokens.sum(axis=2), np.outer([66, 40, 14], [1, 1]))
    np.testing.assert_allclose(found.gate_sum.sum(axis=2), found.routed_tokens.sum(2) / 2)
    assert found.raw_features().shape == (3, LAYERS * (HIDDEN + EXPERTS) + 1)
    seen: dict[int, Any] = {}
    keep = watched(layers, lambda i, *rest: seen.update({i: rest}), gradients=False)
    with keep, torch.inference_mode():
        model(input_ids=prompts[1][None])
    for layer in range(LAYERS):
        x, index, gate = (tensor.numpy() for tensor in seen[layer][:3])
        np.testing.assert_allclose(
            found.mean_input[1, layer * HIDDEN : (layer + 1) * HIDDEN],
            x.mean(0),
            rtol=1e-5,
            atol=1e-6,
        )
        for expert in range(EXPERTS):
            token, position = np.nonzero(index == expert)
            block = (layer * EXPERTS + expert) * 2
            if not len(token):
                assert np.isnan(found.damage[1, block])
                continue
            moment = conditional_second_moment(x[token], gate[token, position])
            a = stats.row_weight(layer, expert, 0)
            expected = output_error(blocks.full[block], low[block], moment, a)
            assert found.damage[1, block] == pytest.approx(expected, rel=1e-3)


def test_quantized_experts_compute_what_the_reference_kernel_computes(
    model: Any, blocks: Blocks
) -> None:
    """Planes and fp16 tables of mixed widths: the reference against the transformers module."""
    layer = 1
    experts = find_experts(model)[layer]
    widths = {
        (layer * EXPERTS + e) * 2 + m: BITS[(e + m) % 3] for e in range(EXPERTS) for m in (0, 1)
    }
    decoded = {}
    try:
        for block, q in widths.items():
            rows = blocks.rows[block]
            table = rows.tables[q].astype(np.float16)
            planes = pack_planes(rows.codes, 4)[:q]
            decoded[block] = dequantize(planes, table, q, rows.codes.shape[1])
            blocks.stored(block).copy_(torch.from_numpy(decoded[block]))
        rng = np.random.default_rng(0)
        x = torch.from_numpy(rng.standard_normal((19, HIDDEN)).astype(np.float32))
        index = torch.from_numpy(rng.permuted(np.tile(np.arange(EXPERTS), (19, 1)), axis=1)[:, :2])
        gate = torch.from_numpy(rng.dirichlet([1.0, 1.0], 19).astype(np.float32))
        with torch.inference_mode():
            found = experts.module(x, index, gate).numpy()
        first = layer * EXPERTS * 2
        expected = moe_layer(
            x.numpy(),
            index.numpy(),
            gate.numpy(),
            [decoded[first + 2 * e] for e in range(EXPERTS)],
            [decoded[first + 2 * e + 1] for e in range(EXPERTS)],
            "silu",
        )
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        exact = [blocks.full[first + 2 * e] for e in range(EXPERTS)]
        assert not np.allclose(decoded[first], exact[0], rtol=1e-3)
    finally:
        for block in widths:
            blocks.stored(block).copy_(torch.from_numpy(blocks.full[block]))
