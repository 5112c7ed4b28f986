"""What a paged-weight run leaves on disk, put together from its result."""

from __future__ import annotations

from traces.record import RunRecord
from twin.paged_weight_experiment import PagedWeightResult
from twin.run_texts import report_text, scenario_text


def paged_weight_record(result: PagedWeightResult, *, plots: bool) -> RunRecord:
    """The record of a result: summary, tables, decision log, report, pictures."""
    from twin.paged_weight_report import print_paged_weight

    files = {
        "decisions.jsonl.gz": result.decisions.to_bytes(),
        "scenario.toml": scenario_text(result.scenario),
        "report.txt": report_text(print_paged_weight, result.summary),
    }
    if plots:
        from twin.paged_weight_plots import draw_paged_weight

        files.update(draw_paged_weight(result.summary))
    return RunRecord(
        summary=result.summary,
        requests=result.requests,
        timeseries=result.timeseries or None,
        files=files,
    )
