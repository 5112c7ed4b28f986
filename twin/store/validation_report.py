"""PTStore's claims as a table, with the parameters that give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from models.prefix_ttft import TtftParameters
from twin.report import new_table


def print_claims(
    rows: Sequence[Mapping[str, Any]], parameters: Sequence[TtftParameters], console: Console
) -> None:
    """Parameters, claims, and why each is reproduced or not."""
    plain = not console.is_terminal
    console.print(parameter_table(parameters, plain))
    console.print()
    table = new_table(
        "Mean time to first token, ratios",
        plain,
        *("", "GPUs", "claim", "published", "closed form", "simulated", "reproduced"),
    )
    table.columns[2].justify = "left"
    reasons = Table.grid(padding=(0, 1))
    reasons.add_column(justify="right")
    reasons.add_column(overflow="fold")
    for number, row in enumerate(rows, start=1):
        done = row["is_reproduced"]
        verdict = Text("yes" if done else "no", style="green" if done else "bold yellow")
        table.add_row(
            str(number),
            str(row["gpus"]),
            row["claim"],
            row["published"],
            f"{row['closed_form']:.2f}",
            f"{row['simulated']:.2f} ± {row['half_width']:.2f}",
            verdict,
        )
        reasons.add_row(f"{number}.", Text(row["why"]))
    console.print(table)
    console.print(reasons)


def parameter_table(parameters: Sequence[TtftParameters], plain: bool) -> Table:
    """What the paper does not say, and is set here: one line a number of GPUs."""
    table = new_table(
        "Parameters: Mistral-7B on A100-40GB, four a node",
        plain,
        *("GPUs", "documents", "questions", "own tokens", "MFU", "network", "to device", "lookup"),
    )
    for p in parameters:
        table.add_row(
            str(p.gpus),
            str(p.documents),
            str(p.questions_per_document),
            str(p.question_tokens),
            f"{p.mfu:g}",
            f"{p.network_bytes_per_s / 1e9:g} GB/s",
            f"{p.host_to_device_bytes_per_s / 1e9:g} GB/s",
            f"{1e3 * p.lookup_s:g} ms",
        )
    return table
