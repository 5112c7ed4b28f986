"""What a prefix store run leaves on disk, put together from its result."""

from __future__ import annotations

from traces.record import RunRecord
from twin.run_texts import report_text, scenario_text
from twin.store.experiment import PrefixResult


def prefix_record(result: PrefixResult, *, plots: bool) -> RunRecord:
    """The record of a result: summary, tables, decision log, report, pictures."""
    from twin.store.report import print_prefix

    files = {
        "decisions.jsonl.gz": result.decisions.to_bytes(),
        "scenario.toml": scenario_text(result.scenario),
        "report.txt": report_text(print_prefix, result.summary),
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
