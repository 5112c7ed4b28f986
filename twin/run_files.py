"""What a run leaves on disk, put together from its result."""

from __future__ import annotations

from traces.record import RunRecord
from twin.experiment import ExperimentResult
from twin.run_texts import report_text, scenario_text
from twin.timeline import timeline_json


def run_record(result: ExperimentResult, *, plots: bool) -> RunRecord:
    """The record of a result: summary, tables, decision log, timeline, report, pictures."""
    from twin.report import print_report

    files = {
        "decisions.jsonl.gz": result.decisions.to_bytes(),
        "scenario.toml": scenario_text(result.theory.scenario),
        "report.txt": report_text(print_report, result.summary),
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
