"""Tables of ``runtime inspect`` and ``runtime quantize``."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table


def size_table(sizes: dict[str, Any]) -> Table:
    """Bytes at every width."""
    table = Table(title="Sizes")
    for heading in (
        "bits",
        "experts",
        "of it tables",
        "bits per weight",
        "with all tables",
        "whole model",
        "saving",
    ):
        table.add_column(heading, justify="right")
    for width in sizes["widths"]:
        table.add_row(
            str(width["bits"]),
            byte_text(width["active_bytes"]),
            byte_text(width["table_bytes"]),
            f"{width['effective_bits']:.3f}",
            byte_text(width["resident_bytes"]),
            byte_text(width["active_bytes"] + sizes["other_bytes"]),
            f"{width['saving']:.1%}",
        )
    table.add_section()
    table.add_row(
        "source",
        byte_text(sizes["source_expert_bytes"]),
        "",
        f"{8 * sizes['source_expert_bytes'] / sizes['expert_weights']:.3f}",
        "",
        byte_text(sizes["source_bytes"]),
        "",
    )
    return table


def damage_table(report: dict[str, Any]) -> Table:
    """Damage by layer and module, summed over experts, at every width."""
    damage = report["damage"]
    table = Table(title=f"Damage ({damage['kind'].replace('_', ' ')}), summed over experts")
    table.add_column("layer", justify="right")
    table.add_column("matrix")
    for bits in damage["levels"]:
        table.add_column(f"{bits} bits", justify="right")
    for row in damage["by_layer"]:
        table.add_row(
            str(row["layer"]), row["module"], *(f"{value:.3g}" for value in row["damage"])
        )
    table.add_section()
    table.add_row("all", "", *(f"{value:.3g}" for value in damage["total"]))
    return table


def facts_table(report: dict[str, Any]) -> Table:
    """What it is, where it comes from, whether it is whole."""
    source, settings = report["provenance"]["source"], report["provenance"]["settings"]
    calibration = report["provenance"]["calibration"]
    program = report["provenance"]["program"]
    table = Table(show_header=False, title=report["folder"])
    rows = {
        "source": f"{source['name']} ({source['model_type']}, {', '.join(source['dtypes'])})",
        "blocks": f"{report['layers']} layers x {report['experts']} experts x 2 matrices",
        "matrices": ", ".join(
            f"{name} {size['rows']} x {size['columns']}"
            for name, size in report["matrices"].items()
        ),
        "widths": f"{settings['min_bits']}..{settings['parent_bits']} bits, exact seed at"
        f" {settings['seed_bits']}",
        "calibration": calibration["name"] if calibration else "none: damage is squared error",
        "files": f"{report['files']} files, {byte_text(report['sizes']['file_bytes'])}",
        "checksums": "all right" if report["verified"] else "not verified (--verify)",
        "written by": ", ".join(f"{name} {number}" for name, number in program.items()),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def render(*tables: Table) -> str:
    """Plain text of tables, as wide as they need."""
    console = Console(file=io.StringIO(), width=160, color_system=None)
    for table in tables:
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def byte_text(num_bytes: int) -> str:
    """Bytes with a decimal unit."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
