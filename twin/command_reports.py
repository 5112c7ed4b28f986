"""What ``twin sweep``, ``validate`` and ``calibrate`` print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twin.report import count, duration, new_table, percent, print_warnings, rate, with_interval

if TYPE_CHECKING:
    from models.calibration import Calibration


def print_sweep(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], console: Console) -> None:
    """One line a finished point of a sweep."""
    fixed = [name for name in ("r", "batch_per_worker") if f"attention_ffn.{name}" not in keys]
    is_open_loop = any(row["completed"] != "" for row in rows)
    measured = (
        ("TTFT p99", "TPOT", "goodput", "unfinished")
        if is_open_loop
        else ("theory", "twin, tokens/s", "TPOT", "A idle", "F idle")
    )
    table = new_table(
        "Sweep",
        not console.is_terminal,
        *(key.split(".")[-1] for key in keys),
        *({"r": "r", "batch_per_worker": "B"}[name] for name in fixed),
        *measured,
    )
    for row in rows:
        settings = [str(row[key]) for key in keys]
        if row["infeasible"]:
            settings += ["-"] * (len(fixed) + len(measured) - 1)
            table.add_row(*settings, Text(str(row["infeasible"]), style="yellow"))
            continue
        cells = _latency_cells(row) if is_open_loop else _throughput_cells(row)
        table.add_row(*settings, *(str(row[name]) for name in fixed), *cells)
    console.print(table)


def _throughput_cells(row: Mapping[str, Any]) -> list[str]:
    twin = {
        "mean": row["tokens_per_s_per_instance"],
        "half_width": row["tokens_per_s_half_width"],
    }
    return [
        rate(row["predicted_tokens_per_s_per_instance"]),
        with_interval(twin),
        duration(row["tpot_s"]),
        percent(row["attention_idle"], 1),
        percent(row["ffn_idle"], 1),
    ]


def _latency_cells(row: Mapping[str, Any]) -> list[str]:
    return [
        duration(row["ttft_p99_s"], 3) if row["ttft_p99_s"] != "" else "-",
        duration(row["tpot_mean_s"], 3) if row["tpot_mean_s"] != "" else "-",
        percent(row["goodput_share"], 1) if row["goodput_share"] != "" else "-",
        count(row["unfinished"]),
    ]


def print_validation(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A paper's table beside ours."""
    table = new_table(
        "arXiv 2601.21351, DeepSeek-V3 on Ascend 910C",
        not console.is_terminal,
        *("", "result", "printed", "ours", "reproduced"),
    )
    table.columns[1].justify = "left"
    reasons = Table.grid(padding=(0, 1))
    reasons.add_column(justify="right")
    reasons.add_column(overflow="fold")
    for number, row in enumerate(rows, start=1):
        done = row["is_reproduced"]
        verdict = Text("yes" if done else "no", style="green" if done else "bold yellow")
        table.add_row(str(number), row["result"], row["printed"], row["ours"], verdict)
        reasons.add_row(f"{number}.", row["why"])
    console.print(table)
    console.print(reasons)


def print_calibration(calibration: Calibration, console: Console) -> None:
    """Fitted coefficients, how well each line fits, and where it was measured."""
    table = new_table(
        f"Calibration {calibration.name}",
        not console.is_terminal,
        *("stage", "alpha", "beta", "points", "worst error", "R2", "range"),
    )
    c = calibration.coefficients
    for stage, fit in calibration.fits.items():
        alpha, beta = getattr(c, f"alpha_{stage}"), getattr(c, f"beta_{stage}")
        table.add_row(
            stage,
            f"{duration(alpha)} / {'token' if stage == 'attention' else 'slot'}",
            duration(beta),
            str(fit.points),
            percent(fit.max_relative_error, 1),
            f"{fit.r2:.4f}",
            f"{fit.min_load:,.0f}..{fit.max_load:,.0f} {fit.quantity}",
        )
    console.print(table)
    warnings = [f"{s}: {fit.warning}" for s, fit in calibration.fits.items() if fit.warning]
    print_warnings([*warnings, *calibration.notes], console)
