"""What ``twin memory`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from models.plane_bytes import MAX_BITS
from twin.report import count, new_table, percent, print_warnings

BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
PARAMETER_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
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
            if too_many := _too_many_sequences(model):
                console.print(Text(too_many))
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
    active = f", {parameter_count(parameters['active'])} active" if model["moe_layers"] else ""
    table.add_row("parameters", f"{parameter_count(parameters['total'])}{active}")
    experts = (
        f"experts {decimal_bytes(full['expert_bytes'])}, all else " if model["moe_layers"] else ""
    )
    table.add_row("at 16 bits", experts + decimal_bytes(full["other_bytes"]))
    table.add_row("KV cache", _cache(model))
    if model["moe_layers"]:
        plane = model["bit_plane"]
        table.add_row(
            "one bit",
            f"of all {count(model['num_blocks'])} expert matrices: "
            f"{decimal_bytes(plane['bytes'])}, the room of {count(plane['kv_tokens'])} tokens",
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
        "16",
        "16.00",
        decimal_bytes(full["expert_bytes"]),
        "",
        decimal_bytes(full["model_bytes"]),
        "",
        "",
    )
    for width in model["widths"]:
        table.add_row(
            bits(width["bits"]),
            f"{width['effective_bits']:.2f}",
            decimal_bytes(width["expert_bytes"]),
            f"{100 * width['page_waste']:+.1f} %",
            decimal_bytes(width["model_bytes"]),
            percent(width["saving"], 1),
            count(width["freed_kv_tokens"]) if width["freed_bytes"] >= 0 else "none",
        )
    return table


def budget_table(model: Mapping[str, Any], plain: bool) -> Table:
    """What a budget leaves for the cache at each width."""
    budget, full = model["budget"], model["full"]
    each = ("a sequence",) if budget["num_sequences"] > 1 else ()
    table = new_table(
        f"A budget of {decimal_bytes(budget['bytes'])}",
        plain,
        "bits",
        "weights",
        "left",
        "KV tokens",
        *each,
    )
    rows = [("16", full["model_bytes"], full["budget"])]
    rows += [
        (bits(width["bits"]), full["other_bytes"] + width["paged_bytes"], width["budget"])
        for width in model["widths"]
    ]
    for name, weights, use in rows:
        left, tokens, tokens_each = _left(use)
        table.add_row(name, decimal_bytes(weights), left, tokens, *([tokens_each] if each else ()))
    if model["widths"]:
        fits_to = budget["bits"]
        table.caption = (
            "the weights alone do not fit at any width"
            if fits_to is None
            else "the weights alone fit at every width"
            if fits_to == MAX_BITS
            else f"the weights alone fit up to {fits_to:.2f} bits"
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
    lines = ["kB, MB, GB: 10^3, 10^6, 10^9 bytes."]
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


def decimal_bytes(num_bytes: float) -> str:
    """Bytes in the largest unit of 10^9, 10^6, 10^3 or 1 of which there is a tenth."""
    scale, unit = scale_of(num_bytes, BYTE_UNITS)
    decimals = 0 if scale == 1.0 else 3 if abs(num_bytes) < 100 * scale else 1
    return f"{num_bytes / scale:,.{decimals}f} {unit}"


def kibibytes(num_bytes: int) -> str:
    """Bytes as 2^10 or 2^20, exactly."""
    if num_bytes % 2**20 == 0:
        return f"{num_bytes >> 20:,} MiB"
    return f"{num_bytes >> 10:,} KiB"


def parameter_count(parameters: int) -> str:
    """Parameters as 10^9 (B), 10^6 (M) or 10^3 (k)."""
    scale, unit = scale_of(parameters, PARAMETER_UNITS)
    return f"{parameters / scale:,.2f} {unit}"


def scale_of(value: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The first unit of which there is a tenth, else the last; units descend."""
    return next((unit for unit in units if abs(value) >= unit[0] / 10), units[-1])


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
        text += f"{plus} inside the sliding windows (at most {decimal_bytes(kv['window_bytes'])})"
    kinds = list(dict.fromkeys(kv["block_pages"]))
    pages = " or ".join(map(str, kinds))
    plural = "" if kinds == [1] else "s"
    return f"{text}; {kv['block_tokens']} tokens of a layer: {pages} page{plural}"


def _has_window(model: Mapping[str, Any]) -> bool:
    return bool(model["widths"] and model["kv"]["window_bytes"] and model["kv"]["token_bytes"])


def _left(use: Mapping[str, Any]) -> tuple[str, str, str]:
    """What is left, tokens of all sequences and of each."""
    if not use["fits"]:
        return f"{decimal_bytes(-use['free_bytes'])} short", "-", "-"
    tokens = [
        "no limit" if use[key] is None else count(use[key])
        for key in ("kv_tokens", "kv_tokens_per_sequence")
    ]
    return decimal_bytes(use["free_bytes"]), tokens[0], tokens[1]


def _too_many_sequences(model: Mapping[str, Any]) -> str | None:
    """What 0 tokens beside weights that fit mean; None where there are none."""
    uses = [model["full"]["budget"], *(width["budget"] for width in model["widths"])]
    if not any(use["fits"] and use["kv_tokens"] == 0 for use in uses):
        return None
    sequences, block = model["budget"]["num_sequences"], model["kv"]["block_tokens"]
    whom = "one sequence" if sequences == 1 else f"each of {count(sequences)} sequences"
    return f"0 tokens: not even a block of {block} fits for {whom}"


def _sides(target: Mapping[str, Any]) -> tuple[str, str]:
    """Savings of the whole widths that do and do not reach the asked share."""
    cells = [f"{k} bits: {percent(v, 1)}" for k, v in target["saving_by_bits"].items()]
    if target["bits"] is None:
        return "-", cells[0]
    return cells[0], cells[1] if len(cells) > 1 else "-"


def _average(width: float | None) -> str:
    if width is None:
        return "not reached"
    return "every width" if width == MAX_BITS else f"{width:.2f}"
