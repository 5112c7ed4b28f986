"""What a paged-weight run leaves on disk, put together from its result."""

from __future__ import annotations

import io

from traces.record import RunRecord
from twin.paged_weight_experiment import PagedWeightResult


def paged_weight_record(result: PagedWeightResult, *, plots: bool) -> RunRecord:
    """The record of a result: summary, tables, decision log, report, pictures."""
    files = {
        "decisions.jsonl.gz": result.decisions.to_bytes(),
        "scenario.toml": _scenario_text(result),
        "report.txt": _report_text(result),
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


def _scenario_text(result: PagedWeightResult) -> bytes:
    import tomli_w

    from models.scenario_file import scenario_tables, with_absolute_files

    return tomli_w.dumps(with_absolute_files(scenario_tables(result.scenario))).encode()


def _report_text(result: PagedWeightResult) -> bytes:
    from rich.console import Console

    from twin.paged_weight_report import print_paged_weight
    from twin.report import PLAIN_WIDTH

    buffer = io.StringIO()
    print_paged_weight(result.summary, Console(file=buffer, width=PLAIN_WIDTH, highlight=False))
    return buffer.getvalue().encode()
