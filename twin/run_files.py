"""What a run leaves on disk, put together from its result."""

from __future__ import annotations

import io

from models.scenario_file import scenario_tables, with_absolute_files
from traces.record import RunRecord
from twin.experiment import ExperimentResult
from twin.timeline import timeline_json


def run_record(result: ExperimentResult, *, plots: bool) -> RunRecord:
    """The record of a result: summary, tables, decision log, timeline, report, pictures."""
    files = {
        "decisions.jsonl.gz": result.decisions.to_bytes(),
        "scenario.toml": _scenario_text(result),
        "report.txt": _report_text(result),
    }
    if result.timeline:
        files["trace.json"] = timeline_json(result.timeline, result.name)
    if plots:
        from twin.plots import draw_all

        files.update(draw_all(result.summary))
    return RunRecord(
        summary=result.summary,
        requests=result.requests,
        timeseries=result.timeseries,
        files=files,
    )


def _scenario_text(result: ExperimentResult) -> bytes:
    import tomli_w

    return tomli_w.dumps(with_absolute_files(scenario_tables(result.theory.scenario))).encode()


def _report_text(result: ExperimentResult) -> bytes:
    from rich.console import Console

    from twin.report import PLAIN_WIDTH, print_report

    buffer = io.StringIO()
    print_report(result.summary, Console(file=buffer, width=PLAIN_WIDTH, highlight=False))
    return buffer.getvalue().encode()
