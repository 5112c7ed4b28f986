"""What ``twin memory`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twin.report import count, new_table, percent, print_warnings

_WHOLE_WIDTH = 0.005  # bits that do not show


def print_memory(models: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Each model in turn, then where each saves the asked share."""
    plain = not console.is_terminal
    for model in models:
        console.print()
        console.print(facts(model, plain))
        if model["widths"]:
            console.print(widths_table(model, plain))
        if model["budget"]:
            console.print(budget_table(model, plain))
    if any(model["target"] for model in models):
        console.print()
        console.print(target_table(models, plain))
    console.print()
    console.print(Text(how_to_read(models)))
    notes = [f"{model['model']}: {note}" for model in models for note in model["notes"]]
    if notes:
        console.print()
        print_warnings(notes, console)


def facts(model: Mapping[str, Any], plain: bool) -> Table:
    """Layers, parameters, bytes at 16 bits, cache."""
    table = new_table(model["model"], plain, "", "")
    table.show_header = False
    table.columns[1].justify = "left"
    parameters, full = model["parameters"], model["full"]
    table.add_row("layers", Text(_layers(model)))
    active = f", {billions(parameters['active'])} active" if model["moe_layers"] else ""
    table.add_row("parameters", f"{billions(parameters['total'])}{active}")
    experts = f"experts {gigabytes(full['expert_bytes'])}, all else " if model["moe_layers"] else ""
    table.add_row("at 16 bits", experts + gigabytes(full["other_bytes"]))
    table.add_row("KV cache", _cache(model))
    if model["moe_layers"]:
        plane = model["bit_plane"]
        table.add_row(
            "one bit",
            f"of all {count(model['num_blocks'])} expert matrices: {gigabytes(plane['bytes'])}, "
            f"the room of {count(plane['kv_tokens'])} tokens",
        )
    else:
        table.add_row("experts", "none: nothing to hold at fewer bits")
    return table


def widths_table(model: Mapping[str, Any], plain: bool) -> Table:
    """Bytes, effective bits, saving and freed tokens at each width."""
    full = model["full"]
    table = new_table(
        "Experts at fewer bits",
        plain,
        "bits",
        "effective",
        "experts",
        "in pages",
        "model",
        "saving",
        "frees tokens",
    )
    table.add_row(
        "16", "16.00", gigabytes(full["expert_bytes"]), "", gigabytes(full["model_bytes"]), "", ""
    )
    for width in model["widths"]:
        table.add_row(
            bits(width["bits"]),
            f"{width['effective_bits']:.2f}",
            gigabytes(width["expert_bytes"]),
            f"{100 * width['page_waste']:+.1f} %",
            gigabytes(width["model_bytes"]),
            percent(width["saving"], 1),
            count(width["freed_kv_tokens"]) if width["freed_bytes"] >= 0 else "none",
        )
    return table


def budget_table(model: Mapping[str, Any], plain: bool) -> Table:
    """What a budget leaves for the cache at each width."""
    budget, full = model["budget"], model["full"]
    table = new_table(
        f"A budget of {gigabytes(budget['bytes'])}", plain, "bits", "weights", "left", "KV tokens"
    )
    table.add_row("16", gigabytes(full["model_bytes"]), *_left(full["budget"]))
    for width in model["widths"]:
        table.add_row(
            bits(width["bits"]),
            gigabytes(full["other_bytes"] + width["paged_bytes"]),
            *_left(width["budget"]),
        )
    if model["widths"]:
        table.caption = (
            "the weights alone do not fit at any width"
            if budget["bits"] is None
            else f"the weights alone fit up to {budget['bits']:.2f} bits"
        )
        table.caption_justify = "left"
    return table


def target_table(models: Sequence[Mapping[str, Any]], plain: bool) -> Table:
    """The width at which each model saves the asked share."""
    shown = [model for model in models if model["target"]]
    share = percent(shown[0]["target"]["saving"], 1)
    table = new_table(
        f"Bits at which {share} of the memory of all weights is saved",
        plain,
        "model",
        "enough",
        "too little",
        "average",
        "in pages",
    )
    for model in shown:
        target = model["target"]
        table.add_row(
            Text(model["model"]),
            *_sides(target),
            _average(target["bits"]),
            _average(target["bits_in_pages"]),
        )
    return table


def how_to_read(models: Sequence[Mapping[str, Any]]) -> str:
    """What the columns count."""
    storage, kv, budget = models[0]["storage"], models[0]["kv"], models[0]["budget"]
    which = "the width in use" if storage["tables"] == "active" else "all widths up to it"
    lines = ["GB: 10^9 bytes."]
    if any(model["widths"] for model in models):
        lines += [
            f"effective: bits per weight, {storage['entry']} tables of {which} included.",
            f"in pages: what rounding every plane and table up to pages of "
            f"{kibibytes(storage['page_bytes'])} adds.",
            f"frees tokens: KV cache in blocks of {kv['block_tokens']} tokens that fits into the "
            f"pages given back, at {8 * kv['value_bytes']} bits a value"
            + (", beyond the sliding windows." if any(map(_has_window, models)) else "."),
        ]
    if budget:
        sequences = budget["num_sequences"]
        many = "one sequence" if sequences == 1 else f"{count(sequences)} equally long sequences"
        lines.append(f"KV tokens: of {many}, beside weights in whole pages.")
    return " ".join(lines)


def gigabytes(num_bytes: float) -> str:
    """Bytes as 10^9."""
    return f"{num_bytes / 1e9:,.{3 if abs(num_bytes) < 1e11 else 1}f} GB"


def kibibytes(num_bytes: int) -> str:
    """Bytes as 2^10 or 2^20, exactly."""
    if num_bytes % 2**20 == 0:
        return f"{num_bytes >> 20:,} MiB"
    return f"{num_bytes >> 10:,} KiB"


def billions(parameters: int) -> str:
    """Parameters as 10^9."""
    return f"{parameters / 1e9:,.2f} B"


def bits(width: float) -> str:
    """A width; whole ones without decimals."""
    whole = round(width)
    return str(whole) if abs(width - whole) < _WHOLE_WIDTH else f"{width:.2f}".rstrip("0")


def _layers(model: Mapping[str, Any]) -> str:
    text = f"{model['layers']}, hidden size {count(model['hidden_size'])}"
    if model["moe_layers"]:
        where = (
            "each" if model["moe_layers"] == model["layers"] else f"{model['moe_layers']} layers"
        )
        text += (
            f", {count(model['experts_per_layer'])} experts in {where}, "
            f"{model['experts_per_token']} a token"
        )
    return text


def _cache(model: Mapping[str, Any]) -> str:
    kv = model["kv"]
    windowed = kv["token_bytes_inside_windows"] - kv["token_bytes"]
    text = f"{count(kv['token_bytes'])} B a token" if kv["token_bytes"] else ""
    if windowed:
        plus = f" + {count(windowed)} B" if text else f"{count(windowed)} B a token"
        text += f"{plus} inside the sliding windows (at most {gigabytes(kv['window_bytes'])})"
    kinds = list(dict.fromkeys(kv["block_pages"]))
    pages = " or ".join(map(str, kinds))
    plural = "" if kinds == [1] else "s"
    return f"{text}; {kv['block_tokens']} tokens of a layer: {pages} page{plural}"


def _has_window(model: Mapping[str, Any]) -> bool:
    return bool(model["widths"] and model["kv"]["window_bytes"] and model["kv"]["token_bytes"])


def _left(use: Mapping[str, Any]) -> tuple[str, str]:
    if not use["fits"]:
        return f"{gigabytes(-use['free_bytes'])} short", "-"
    tokens = use["kv_tokens"]
    return gigabytes(use["free_bytes"]), "no limit" if tokens is None else count(tokens)


def _sides(target: Mapping[str, Any]) -> tuple[str, str]:
    """Savings of the whole widths that do and do not reach the asked share."""
    cells = [f"{k} bits: {percent(v, 1)}" for k, v in target["saving_by_bits"].items()]
    if target["bits"] is None:
        return "-", cells[0]
    return cells[0], cells[1] if len(cells) > 1 else "-"


def _average(width: float | None) -> str:
    return "not reached" if width is None else f"{width:.2f}"
