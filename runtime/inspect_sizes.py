"""Bytes of a quantized checkpoint: of the source, of experts at every width, of the rest."""

from __future__ import annotations

from typing import Any

from models.plane_bytes import block_bytes, table_bytes
from runtime.quantized_manifest import Manifest


def checkpoint_sizes(manifest: Manifest) -> dict[str, Any]:
    """Plain JSON; bytes, and bits per expert weight.

    ``active`` counts the table of the width in use, ``resident`` those of all widths up to it, as
    they stay so that a narrower width costs no copy. ``saving`` compares the whole model in use
    (``active``) with the source.
    """
    source = manifest.provenance["source"]
    weights = sum(block.rows * block.columns for block in manifest.blocks)
    source_bytes = source["expert_bytes"] + source["other_bytes"]
    widths = []
    for bits in manifest.levels:
        active, resident, tables = 0, 0, 0
        for block in manifest.blocks:
            size = (block.rows, block.columns, bits)
            active += block_bytes(*size, min_bits=manifest.min_bits, tables="active")
            resident += block_bytes(*size, min_bits=manifest.min_bits, tables="all")
            tables += table_bytes(block.rows, bits)
        widths.append(
            {
                "bits": bits,
                "active_bytes": active,
                "resident_bytes": resident,
                "table_bytes": tables,
                "effective_bits": 8 * active / weights,
                "resident_bits": 8 * resident / weights,
                "saving": 1 - (active + source["other_bytes"]) / source_bytes,
            }
        )
    return {
        "expert_weights": weights,
        "source_expert_bytes": source["expert_bytes"],
        "other_bytes": source["other_bytes"],
        "source_bytes": source_bytes,
        "file_bytes": sum(record.num_bytes for record in manifest.files.values()),
        "widths": widths,
    }
