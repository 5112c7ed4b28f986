"""What a run of ``twin cache`` leaves on disk, put together from its summary."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

from traces.record import RunRecord
from twin.run_texts import report_text

COLUMNS = (
    "policy",
    "size",
    "blocks",
    "bytes",
    "share_of_distinct",
    "hit_blocks",
    "block_hit_share",
    "hit_tokens",
    "token_hit_share",
    "saved_s",
    "saved_share",
)


def cache_record(summary: Mapping[str, Any], *, plots: bool) -> RunRecord:
    """The record of a run: summary, curves as a table, report, pictures."""
    from twin.cache_tables import print_cache

    files = {
        "curves.csv": curves_csv(summary),
        "report.txt": report_text(print_cache, summary),
    }
    if plots:
        from twin.cache_plots import draw_cache

        files.update(draw_cache(summary))
    return RunRecord(summary=summary, files=files)


def curves_csv(summary: Mapping[str, Any]) -> bytes:
    """One row a policy and size, the bound's rows (``bound``) last; columns as ``COLUMNS``."""
    curves = dict(summary["curves"])
    if summary["bound"] is not None:
        curves["bound"] = summary["bound"]
    buffer = io.StringIO()
    table = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    table.writeheader()
    for name, rows in curves.items():
        for size, row in zip(summary["sizes"], rows, strict=True):
            place = {key: size[key] for key in ("blocks", "bytes", "share_of_distinct")}
            table.writerow({"policy": name, "size": size["asked"], **place, **row})
    return buffer.getvalue().encode()
