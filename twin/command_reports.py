"""What ``twin sweep``, ``validate`` and ``calibrate`` print."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twin.report import count, duration, new_table, percent, print_warnings, rate, with_interval

if TYPE_CHECKING:
    from models.calibration import Calibration

_Cell = Callable[[Mapping[str, Any]], str]


def print_sweep(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], console: Console) -> None:
    """One line a finished point of a sweep; why a point has no answer stands below the table."""
    fixed = {
        name: title
        for name, title in (("r", "r"), ("batch_per_worker", "B"))
        if f"attention_ffn.{name}" not in keys
    }
    answered = [row for row in rows if not _reason(row)]
    measured: dict[str, _Cell] = {}
    if any(not _is_open_loop(row) for row in answered):
        has_faults = any(row["fault_change"] is not None for row in answered)
        measured.update(_FAULT_CELLS if has_faults else _SATURATED_CELLS)
    if any(_is_open_loop(row) for row in answered):
        measured.update(_OPEN_LOOP_CELLS)
    table = new_table(
        "Sweep",
        not console.is_terminal,
        *(key.split(".")[-1] for key in keys),
        *fixed.values(),
        *measured,
    )
    for row in rows:
        has_answer = not _reason(row)
        table.add_row(
            *(Text(_setting(row[key])) for key in keys),
            *(str(row[name]) if has_answer else "-" for name in fixed),
            *(cell(row) if has_answer else "-" for cell in measured.values()),
        )
    console.print(table)
    notes = [
        f"{', '.join(f'{key} = {_setting(row[key])}' for key in keys)}: {_reason(row)}"
        for row in rows
        if _reason(row)
    ]
    print_warnings(notes, console)


def _reason(row: Mapping[str, Any]) -> str | None:
    """Why the point has no answer."""
    reason: str | None = row["infeasible"] or row["error"]
    return reason


def _is_open_loop(row: Mapping[str, Any]) -> bool:
    return row["completed"] is not None


def _setting(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _throughput(prefix: str = "") -> _Cell:
    def cell(row: Mapping[str, Any]) -> str:
        mean = row[f"{prefix}tokens_per_s_per_instance"]
        half = row[f"{prefix}tokens_per_s_half_width"]
        return "-" if mean is None else with_interval({"mean": mean, "half_width": half})

    return cell


def _change(row: Mapping[str, Any]) -> str:
    return percent(row["fault_change"], 1)


# title -> cell; what is simulated follows "twin"
_SATURATED_CELLS: dict[str, _Cell] = {
    "theory": lambda row: rate(row["predicted_tokens_per_s_per_instance"]),
    "twin, tokens/s": _throughput(),
    "TPOT": lambda row: duration(row["tpot_s"]),
    "A idle": lambda row: percent(row["attention_idle"], 1),
    "F idle": lambda row: percent(row["ffn_idle"], 1),
}
_FAULT_CELLS: dict[str, _Cell] = {
    "theory": _SATURATED_CELLS["theory"],
    "twin, healthy": _throughput("healthy_"),
    "with faults, tokens/s": _throughput(),
    "change": _change,
    **{name: _SATURATED_CELLS[name] for name in ("TPOT", "A idle", "F idle")},
}
_OPEN_LOOP_CELLS: dict[str, _Cell] = {
    "TTFT p99": lambda row: duration(row["ttft_p99_s"], 3),
    "mean TPOT": lambda row: duration(row["tpot_mean_s"], 3),
    "goodput": lambda row: percent(row["goodput_share"], 1),
    "unfinished": lambda row: count(row["unfinished"]),
}


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
