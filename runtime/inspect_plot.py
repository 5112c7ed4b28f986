"""The picture of ``runtime inspect``: damage curves of both matrices, and bytes by width."""

from __future__ import annotations

import io

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from runtime.inspect_sizes import checkpoint_sizes
from runtime.quantized_checkpoint import QuantizedCheckpoint

QUANTILES = (0.1, 0.5, 0.9)


def draw_checkpoint(checkpoint: QuantizedCheckpoint) -> bytes:
    """A PNG: per matrix, the damage of blocks over bits; beside them, sizes."""
    figure = Figure(figsize=(13, 4.2), layout="constrained", dpi=120)
    left, middle, right = figure.subplots(1, 3)
    _damage_panel(left, checkpoint, "gate_up")
    _damage_panel(middle, checkpoint, "down")
    _size_panel(right, checkpoint)
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def _damage_panel(axes: Axes, checkpoint: QuantizedCheckpoint, module: str) -> None:
    """A line per layer (mean over experts), and the middle 80 % of all blocks."""
    own = np.array([block.module == module for block in checkpoint.blocks])
    layers = np.array([block.layer for block in checkpoint.blocks])
    damage = checkpoint.damage
    low, median, high = np.quantile(damage[own], QUANTILES, axis=0)
    axes.fill_between(
        checkpoint.levels, low, high, color="0.85", label="80 % of blocks", linewidth=0
    )
    for layer in np.unique(layers):
        mean = damage[own & (layers == layer)].mean(axis=0)
        axes.plot(checkpoint.levels, mean, color="tab:blue", alpha=0.35, linewidth=0.8)
    axes.plot(checkpoint.levels, median, color="black", label="median block")
    axes.plot([], [], color="tab:blue", alpha=0.5, linewidth=0.8, label="mean of a layer")
    if (damage[own] > 0).any():
        axes.set_yscale("log")
    axes.set(title=module, xlabel="bits", ylabel=f"damage of a block ({_kind(checkpoint)})")
    axes.set_xticks(checkpoint.levels)
    axes.legend()


def _size_panel(axes: Axes, checkpoint: QuantizedCheckpoint) -> None:
    sizes = checkpoint_sizes(checkpoint.manifest)
    unit, name = _unit(sizes["source_bytes"])
    bits = [width["bits"] for width in sizes["widths"]]
    tables = np.array([width["table_bytes"] for width in sizes["widths"]]) / unit
    planes = np.array([width["active_bytes"] for width in sizes["widths"]]) / unit - tables
    other = np.full(len(bits), sizes["other_bytes"] / unit)
    axes.bar(bits, other, color="0.6", label="not experts")
    axes.bar(bits, planes, bottom=other, color="tab:blue", label="planes")
    axes.bar(bits, tables, bottom=other + planes, color="tab:orange", label="table in use")
    axes.axhline(sizes["source_bytes"] / unit, color="black", linewidth=1, label="source")
    axes.set(title="size", xlabel="bits", ylabel=name)
    axes.set_xticks(bits)
    axes.legend()


def _kind(checkpoint: QuantizedCheckpoint) -> str:
    return checkpoint.manifest.damage_kind.replace("_", " ")


def _unit(num_bytes: int) -> tuple[float, str]:
    for size, name in ((1e9, "GB"), (1e6, "MB")):
        if num_bytes >= size:
            return size, name
    return 1e3, "kB"
