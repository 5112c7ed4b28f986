"""The picture of ``twin memory``: what holds the memory at each width, and what is freed."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twin.memory_tables import BYTE_UNITS, bits, parameter_count, scale_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OTHER, PLANES, TABLES, WASTE, FREED = "#6b7782", "#1f4e8c", "#e0a030", "#c9b48a", "#d5ead9"
TARGET, BUDGET, TOKENS = "#c0392b", "#333333", "#2b6b41"
MAX_COLUMNS = 3
_BAR_WIDTH = 0.74
_LEAST_BARS = 3  # a panel is this many bars wide at least


def draw_memory(models: Sequence[Mapping[str, Any]]) -> bytes:
    """PNG with one panel a model: weights stacked by what they are, and the room for the cache."""
    from matplotlib.figure import Figure

    columns = min(len(models), MAX_COLUMNS)
    rows = math.ceil(len(models) / columns)
    figure = Figure(
        figsize=(max(4.4 * columns, 6.6), 4.1 * rows + 0.5), dpi=120, layout="constrained"
    )
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, model in zip(panels, models, strict=False):
        _panel(axes, model)
    for axes in panels[len(models) :]:
        axes.set_visible(False)
    entries: dict[str, Any] = {}
    for axes in panels[: len(models)]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside lower center",
        ncols=min(len(entries), 4 if columns > 1 else 3),
        frameon=False,
        fontsize=9,
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _panel(axes: Axes, model: Mapping[str, Any]) -> None:
    full, budget = model["full"], model["budget"]
    highest_bytes = max(full["model_bytes"], budget["bytes"] if budget else 0)
    scale, unit = scale_of(highest_bytes, BYTE_UNITS)
    top = full["model_bytes"] / scale
    bars = [
        ("16", [full["other_bytes"], full["expert_bytes"], 0, 0], None, full["budget"]),
        *(_bar(model, width) for width in model["widths"]),
    ]
    colours = (OTHER, PLANES, TABLES, WASTE)
    labels = ("all but experts, 16 bits", "expert weights", "tables", "unused rest of pages")
    for at, (_, parts, tokens, use) in enumerate(bars):
        bottom = 0.0
        for part, colour, label in zip(parts, colours, labels, strict=True):
            if part:
                axes.bar(
                    at, part / scale, _BAR_WIDTH, bottom, color=colour, label=label, linewidth=0
                )
                bottom += part / scale
        if budget is None:
            _freed(axes, at, bottom, top, tokens)
        else:
            _room(axes, at, bottom, budget["bytes"] / scale, use)
    if budget is not None:
        axes.axhline(budget["bytes"] / scale, color=BUDGET, lw=1.2, ls=(0, (1, 1)), label="budget")
    elif model["target"]:
        saving = model["target"]["saving"]
        axes.axhline(
            (1.0 - saving) * top,
            color=TARGET,
            lw=1.1,
            ls=(0, (5, 2)),
            label=f"{100 * saving:.1f} % less than at 16 bits",
        )
    axes.set_xticks(range(len(bars)), [name for name, *_ in bars])
    axes.set_xlim(-0.55, max(len(bars), _LEAST_BARS) - 0.45)
    axes.set_xlabel("bits per expert weight" if model["widths"] else "bits per weight (no experts)")
    axes.set_ylabel(unit)
    axes.set_ylim(0.0, 1.06 * highest_bytes / scale)
    axes.set_title(
        f"{model['model']}, {parameter_count(model['parameters']['total'])}",
        loc="left",
        fontsize=11,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _bar(model: Mapping[str, Any], width: Mapping[str, Any]) -> tuple[str, list[int], int, Any]:
    parts = [
        model["full"]["other_bytes"],
        width["plane_bytes"],
        width["table_bytes"],
        width["paged_bytes"] - width["expert_bytes"],
    ]
    return bits(width["bits"]), parts, width["freed_kv_tokens"], width["budget"]


def _freed(axes: Axes, at: int, bottom: float, top: float, tokens: int | None) -> None:
    """Room that the weights gave back, with the tokens it holds."""
    if tokens and top > bottom:
        axes.bar(
            at, top - bottom, _BAR_WIDTH, bottom, color=FREED, label="freed: KV tokens it holds"
        )
        _write(axes, at, (bottom + top) / 2, short(tokens), "center")


def _room(axes: Axes, at: int, bottom: float, budget: float, use: Mapping[str, Any]) -> None:
    """Room between weights and budget, with the tokens it holds."""
    if use["fits"] and budget > bottom:
        axes.bar(
            at, budget - bottom, _BAR_WIDTH, bottom, color=FREED, label="left: KV tokens it holds"
        )
    tokens = use["kv_tokens"]
    text = "no limit" if tokens is None else short(tokens)
    if use["fits"]:
        _write(axes, at, budget, text, "bottom")


def _write(axes: Axes, at: int, height: float, text: str, side: str) -> None:
    axes.text(at, height, text, ha="center", va=side, fontsize=8, color=TOKENS)


def short(tokens: int) -> str:
    """A number of tokens in three digits."""
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= scale:
            value = tokens / scale
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
    return str(tokens)
