"""A memory report as plain values: what ``twin memory --json`` prints, tables and pictures read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from models.kv_bytes import BLOCK_TOKENS
from models.memory_report import BudgetUse, MemoryQuestion, MemoryReport, WidthReport
from models.weight_memory import FULL_BYTES


def summarize(report: MemoryReport, question: MemoryQuestion) -> dict[str, Any]:
    """One model's report; bytes, shares and tokens."""
    shape, moe_layers = report.shape, report.shape.moe_layers
    return {
        "model": shape.name,
        "model_type": shape.model_type,
        "layers": len(shape.layers),
        "hidden_size": shape.hidden_size,
        "moe_layers": len(moe_layers),
        "experts_per_layer": moe_layers[0].num_experts if moe_layers else 0,
        "experts_per_token": moe_layers[0].experts_per_token if moe_layers else 0,
        "parameters": {
            **dataclasses.asdict(report.parameters),
            "total": report.parameters.total,
            "active": report.parameters.active,
        },
        "storage": {
            "tables": question.storage.tables,
            "entry": question.storage.entry,
            "page_bytes": question.storage.page_bytes,
            "min_bits": question.storage.min_bits,
        },
        "full": {
            "bits": 8 * FULL_BYTES,
            "expert_bytes": report.expert_bytes,
            "other_bytes": report.other_bytes,
            "model_bytes": report.expert_bytes + report.other_bytes,
            "budget": _budget(report.full_budget),
        },
        "num_blocks": report.num_blocks,
        "bit_plane": {
            "bytes": report.bit_plane_bytes,
            "kv_tokens": report.bit_plane_kv_tokens,
        },
        "kv": {
            "value_bytes": question.kv_value_bytes,
            "token_bytes": report.kv.token_bytes.unbounded,
            "token_bytes_inside_windows": report.kv.token_bytes.inside,
            "window_bytes": report.kv.window_bytes,
            "block_tokens": BLOCK_TOKENS,
            "block_pages": list(report.kv.block_pages),
        },
        "widths": [_width(width) for width in report.widths],
        "target": None
        if report.target is None
        else {
            "saving": report.target.saving,
            "bits": report.target.bits,
            "bits_in_pages": report.target.bits_in_pages,
            "saving_by_bits": {str(k): v for k, v in report.target.saving_by_bits.items()},
        },
        "budget": None
        if question.budget_bytes is None
        else {
            "bytes": question.budget_bytes,
            "num_sequences": question.num_sequences,
            "bits": report.budget_bits,
        },
        "notes": list(shape.notes),
    }


def _width(width: WidthReport) -> dict[str, Any]:
    return {
        "bits": width.experts.bits,
        "effective_bits": width.experts.effective_bits,
        "expert_bytes": width.experts.total_bytes,
        "plane_bytes": width.experts.plane_bytes,
        "table_bytes": width.experts.table_bytes,
        "paged_bytes": width.experts.paged_bytes,
        "page_waste": width.experts.page_waste,
        "model_bytes": width.model_bytes,
        "saving": width.saving,
        "saving_in_pages": width.saving_in_pages,
        "freed_bytes": width.freed_bytes,
        "freed_kv_tokens": width.freed_kv_tokens,
        "budget": _budget(width.budget),
    }


def _budget(use: BudgetUse | None) -> Mapping[str, Any] | None:
    if use is None:
        return None
    return {
        "fits": use.fits,
        "free_bytes": use.free_bytes,
        "kv_tokens": use.kv_tokens,
        "kv_tokens_per_sequence": use.sequence_tokens,
    }
