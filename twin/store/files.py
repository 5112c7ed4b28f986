"""What a prefix store run leaves on disk, put together from its result."""

from __future__ import annotations

import io

from traces.record import RunRecord
from twin.store.experiment import PrefixResult


def prefix_record(result: PrefixResult, *, plots: bool) -> RunRecord:
    """The record of a result: summary, tables, decision log, report, pictures."""
    files = {
        "decisions.jsonl.gz": result.decisions.to_bytes(),
        "scenario.toml": _scenario_text(result),
        "report.txt": _report_text(result),
    }
    if plots:
        from twin.store.plots import draw_prefix

        files.update(draw_prefix(result.summary))
    return RunRecord(
        summary=result.summary,
        requests=result.requests,
        timeseries=result.timeseries,
        files=files,
    )


def _scenario_text(result: PrefixResult) -> bytes:
    import tomli_w

    from models.scenario_file import scenario_tables, with_absolute_files

    return tomli_w.dumps(with_absolute_files(scenario_tables(result.scenario))).encode()


def _report_text(result: PrefixResult) -> bytes:
    from rich.console import Console

    from twin.report import PLAIN_WIDTH
    from twin.store.report import print_prefix

    buffer = io.StringIO()
    print_prefix(result.summary, Console(file=buffer, width=PLAIN_WIDTH, highlight=False))
    return buffer.getvalue().encode()
