"""What ``runtime inspect`` says of a quantized checkpoint, as plain JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.inspect_sizes import checkpoint_sizes
from runtime.quantized_checkpoint import QuantizedCheckpoint


def inspect_report(checkpoint: QuantizedCheckpoint, *, verified: bool) -> dict[str, Any]:
    """Sizes, damage curves and origin.

    Args:
        checkpoint: The opened checkpoint.
        verified: Whether the checksums of all files were compared.
    """
    manifest = checkpoint.manifest
    keys = [(block.layer, block.module) for block in checkpoint.blocks]
    by_layer = []
    for layer, module in dict.fromkeys(keys):
        own = np.array([key == (layer, module) for key in keys])
        by_layer.append(
            {
                "layer": layer,
                "module": module,
                "damage": checkpoint.damage[own].sum(axis=0).tolist(),
            }
        )
    return {
        "folder": str(checkpoint.folder),
        "model_type": manifest.provenance["source"]["model_type"],
        "layers": len({block.layer for block in checkpoint.blocks}),
        "experts": len({block.expert for block in checkpoint.blocks}),
        "matrices": {
            block.module: {"rows": block.rows, "columns": block.columns}
            for block in checkpoint.blocks
        },
        "files": len(manifest.files),
        "verified": verified,
        "sizes": checkpoint_sizes(manifest),
        "damage": {
            "kind": manifest.damage_kind,
            "levels": list(checkpoint.levels),
            "total": checkpoint.damage.sum(axis=0).tolist(),
            "by_layer": by_layer,
        },
        "provenance": manifest.provenance,
    }
