"""Damage of weight blocks by width: synthetic, or the table of a quantized checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from models.llm_shape import LlmShape
from models.precision_settings import Precision
from models.streams import stream
from models.strict_tables import ScenarioError

Floats = NDArray[np.float64]

SYNTHETIC: Final = "lognormal"
MANIFEST: Final = "pagedweight.json"
MODULES: Final = ("gate_up", "down")

# Relative squared error of nested k-means (seed of 3 bits, merged down to 2) on Gaussian rows of
# 2,048 weights, at 2..8 bits.
NESTED_ERROR_BY_BITS: Final = {
    2: 1.19e-1,
    3: 3.39e-2,
    4: 9.08e-3,
    5: 2.27e-3,
    6: 5.43e-4,
    7: 1.22e-4,
    8: 2.6e-5,
}


def synthetic_damage(settings: Precision, calibrated_mass: Floats, *, seed: int) -> Floats:
    """[2 L E, 7] damage at 2..8 bits of blocks in the order (layer, expert, module).

    The error of a nested quantizer times a log-normal factor of the layer and of the block, times
    the expert's routing mass. Synthetic: it has the spread of real models, not their values.

    Args:
        settings: Spreads.
        calibrated_mass: [L, E] squared gate weight per token, long-run mean.
        seed: Of the scenario.
    """
    layers, experts = calibrated_mass.shape
    rng = stream(seed, "damage")
    by_layer = np.exp(settings.damage_layer_sigma * rng.standard_normal(layers))
    by_block = np.exp(settings.damage_block_sigma * rng.standard_normal((layers, experts, 2)))
    scale = (by_layer[:, None, None] * calibrated_mass[:, :, None] * by_block).ravel()
    noise = rng.standard_normal((len(scale), len(NESTED_ERROR_BY_BITS)))
    error = np.array(list(NESTED_ERROR_BY_BITS.values())) * np.exp(settings.damage_noise * noise)
    damage: Floats = scale[:, None] * error
    return damage


def checkpoint_damage(path: str, shape: LlmShape, levels: Sequence[int]) -> Floats:
    """[num_blocks, num_levels] damage table of a quantized checkpoint.

    Args:
        path: The checkpoint's folder, or its ``pagedweight.json``.
        shape: The model it must be of.
        levels: Widths wanted; the checkpoint must have all of them.

    Raises:
        ScenarioError: If the file cannot be read or is of another model.
    """
    file = Path(path) / MANIFEST if Path(path).is_dir() else Path(path)
    where = f"[precision] damage: {file}"
    try:
        table: Any = json.loads(file.read_bytes())
        found, blocks = table["levels"], table["blocks"]
        rows = [
            (b["layer"], b["expert"], b["module"], b["rows"], b["columns"], b["damage"])
            for b in blocks
        ]
        damage = np.array([row[5] for row in rows], dtype=np.float64).reshape(-1, len(found))
    except OSError as error:
        raise ScenarioError(f"{where}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ScenarioError(f"{where}: is no quantized checkpoint's table: {error!r}") from None
    if missing := [bits for bits in levels if bits not in found]:
        raise ScenarioError(f"{where}: has widths {found}, but {missing} are asked for")
    wanted = [
        (layer, expert, module, *size)
        for layer, moe in enumerate(shape.layers)
        if moe.moe is not None
        for expert in range(moe.moe.num_experts)
        for module, size in zip(
            MODULES,
            (
                (2 * moe.moe.intermediate_size, shape.hidden_size),
                (shape.hidden_size, moe.moe.intermediate_size),
            ),
            strict=True,
        )
    ]
    if [tuple(row[:5]) for row in rows] != wanted:
        raise ScenarioError(
            f"{where}: its {len(rows):,} blocks are not the {len(wanted):,} of {shape.name}"
        )
    if not (np.isfinite(damage).all() and (damage >= 0.0).all()):
        raise ScenarioError(f"{where}: damage must be finite and >= 0")
    return damage[:, [found.index(bits) for bits in levels]]
