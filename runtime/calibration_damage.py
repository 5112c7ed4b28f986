"""Damage tables: what every block loses at every bitwidth, from its weights and its statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from models.quality import block_damage
from runtime.calibration_stats import CalibrationStats

FloatArray = NDArray[np.float64]
Reconstructions = Callable[[int], Iterator[NDArray[np.floating]]]


@dataclass(frozen=True)
class DamageSignals:
    """Which signals enter a damage; all on by default, each can be switched off.

    Attributes:
        moment: ``full`` H, its ``diagonal``, or ``none``: the identity of the same trace.
        row_weight: Whether a_r is used; else its mean over the rows.
        layer_scale: Whether c_l is used; else 1.
        mass: Whether M2_e is used; else its mean over the layer's experts.
    """

    moment: Literal["full", "diagonal", "none"] = "full"
    row_weight: bool = True
    layer_scale: bool = True
    mass: bool = True


def output_errors(
    weights: NDArray[np.floating],
    reconstructions: Iterator[NDArray[np.floating]],
    moment: FloatArray,
    row_weight: FloatArray,
) -> FloatArray:
    """[levels] sum_r a_r e_r H e_r^T of one block; products in float32.

    Args:
        weights: [N, K].
        reconstructions: One [N, K] for every level.
        moment: [K, K] H or [K] its diagonal.
        row_weight: [N] a.
    """
    exact = torch.from_numpy(np.ascontiguousarray(weights, dtype=np.float32))
    h = torch.from_numpy(moment.astype(np.float32))
    a = torch.from_numpy(np.asarray(row_weight, dtype=np.float64))
    found = []
    for reconstructed in reconstructions:
        error = exact - torch.from_numpy(np.ascontiguousarray(reconstructed, dtype=np.float32))
        by_row = (error @ h * error).sum(1) if h.ndim == 2 else error.square() @ h
        found.append(float(a @ by_row.double()))
    return np.array(found)


def block_signals(
    stats: CalibrationStats, layer: int, expert: int, module: int, signals: DamageSignals
) -> tuple[FloatArray, FloatArray]:
    """H ([K, K] or [K]) and a ([N]) of a block with some signals switched off."""
    moment = stats.input_second_moment(layer, expert, module)
    row_weight = stats.row_weight(layer, expert, module)
    if not signals.row_weight:
        row_weight = np.full_like(row_weight, row_weight.mean())
    if signals.moment != "full" and moment.ndim == 2:
        moment = np.diagonal(moment).copy()
    if signals.moment == "none":
        moment = np.full_like(moment, moment.mean())
    return moment, row_weight


def damage_table(
    stats: CalibrationStats,
    weights: Callable[[int], NDArray[np.floating]],
    reconstructions: Reconstructions,
    *,
    signals: DamageSignals | None = None,
    progress: Callable[[int], None] = lambda block: None,
) -> FloatArray:
    """[blocks, levels] damage of every block at every level, in the order of block ids.

    Args:
        stats: Calibration of the model.
        weights: Block id -> [N, K] original weights.
        reconstructions: Block id -> one [N, K] per level, by ascending bitwidth.
        signals: Which signals enter; all if None.
        progress: Told every block that is done.

    Raises:
        CalibrationError: If the statistics are damaged.
    """
    signals = signals or DamageSignals()
    rows: list[FloatArray] = []
    mass: list[float] = []
    scale: list[float] = []
    for layer in range(stats.layers):
        masses = [stats.mass(layer, expert) for expert in range(stats.experts)]
        if not signals.mass:
            masses = [float(np.mean(masses))] * stats.experts
        for expert in range(stats.experts):
            for module in (0, 1):
                block = (layer * stats.experts + expert) * 2 + module
                moment, row_weight = block_signals(stats, layer, expert, module, signals)
                rows.append(
                    output_errors(weights(block), reconstructions(block), moment, row_weight)
                )
                mass.append(masses[expert])
                scale.append(stats.scale(layer) if signals.layer_scale else 1.0)
                progress(block)
    return block_damage(np.stack(rows), mass, scale)


def squared_error_table(
    blocks: int,
    weights: Callable[[int], NDArray[np.floating]],
    reconstructions: Reconstructions,
) -> FloatArray:
    """[blocks, levels] plain squared weight error: what a planner without calibration has."""
    rows: Sequence[FloatArray] = [
        np.array(
            [float(((weights(i) - r).astype(np.float64) ** 2).sum()) for r in reconstructions(i)]
        )
        for i in range(blocks)
    ]
    return np.stack(rows)
