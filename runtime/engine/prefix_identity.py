"""What names a model's blocks of keys and values: its weights, and how a block's bytes are read.

Two engines share blocks only if model, weights, type and layout agree. Devices and kernels are not
named: the numbers agree up to rounding, as they do between two batches of one engine.

Quantized experts change their width while the engine runs, so what a block holds depends on the
widths at the time. Blocks are shared across widths all the same: they are the model's keys and
values *up to quantization*, like those that the engine has in its own pages from a moment ago. An
engine that must not do so names its widths (``widths``), and saves blocks only while it has them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from policies.prefix.keys import Namespace
from runtime.checkpoint_shards import open_shards
from runtime.checkpoint_tensors import TensorEntry
from runtime.model.kv_layout import STORED_TYPES, KvLayout, LayerKv
from runtime.quantized_manifest import MANIFEST, read_manifest
from runtime.store.errors import StoreSetupError

CONFIG = "config.json"
NOT_SHAPING = ("_name_or_path", "transformers_version")
WHOLE_BYTES = 16 << 10  # tensors up to this size are read whole
SAMPLE_BYTES = 256
MOST_SAMPLES = 64  # of a tensor
SAMPLES = 1 << 16  # of all tensors together, about: bounds the time on a cold disk
READ_BYTES = 8 << 20


def weights_digest(folder: Path, *, exact: bool = False) -> str:
    """What tells the weights of a checkpoint folder from others: 64 hex digits.

    A quantized folder's manifest has the SHA-256 of every file, so nothing else is read. Otherwise
    the digest is over ``config.json``, and of every tensor its name, type, shape and samples of its
    bytes: small tensors (norms, biases) whole, of the others up to 64 pieces of 256 bytes at equal
    distances, the first and the last among them. Headers and sizes alone would not do, since all
    fine-tunings of a model have the same. Training, merging adapters and pruning change numbers
    all over a tensor, so that samples see it, at some milliseconds instead of minutes. What they
    may miss is a change of a few rows, such as new embeddings of some tokens: ``exact`` reads
    everything.

    The digest does not depend on dates, on the folder's name or on how tensors are spread over
    files.

    Args:
        folder: Of the checkpoint.
        exact: Read every byte of the weights, at the disk's speed.

    Raises:
        StoreSetupError: If ``config.json`` is missing or is none.
        SourceError: If the weights are no safetensors shards, or are damaged.
        QuantizedCheckpointError: If the manifest is damaged.
        OSError: If a file cannot be read.
    """
    total = hashlib.sha256(b"weights-v1\0")
    _add(total, json.dumps(_config(folder / CONFIG), sort_keys=True).encode())
    if (folder / MANIFEST).exists():
        for name, record in sorted(read_manifest(folder).files.items()):
            if name.endswith(".safetensors"):
                _add(total, f"{name} {record.num_bytes} {record.sha256}".encode())
        return total.hexdigest()
    shards = open_shards(folder)
    places = sorted(
        (name, file, entry)
        for file, entries in shards.headers.items()
        for name, entry in entries.items()
    )
    samples = min(MOST_SAMPLES, max(2, SAMPLES // max(1, len(places))))
    files = {file: os.open(folder / file, os.O_RDONLY) for file in shards.headers}
    try:
        for name, file, entry in places:
            _add(total, f"{name} {entry.dtype} {entry.shape}".encode())
            for start, stop in _pieces(entry, samples, exact=exact):
                total.update(os.pread(files[file], stop - start, start))
    finally:
        for opened in files.values():
            os.close(opened)
    return total.hexdigest()


def model_namespace(
    folder: Path,
    layout: KvLayout,
    *,
    revision: str | None = None,
    widths: str = "",
) -> Namespace:
    """Names the blocks of a model as an engine lays them out.

    Args:
        folder: Of the checkpoint.
        layout: Of keys and values.
        revision: Digest of the weights; None: ``weights_digest(folder)``.
        widths: Names the bitwidths of the experts that blocks are computed with; empty: blocks are
            shared whatever the widths.

    Raises:
        StoreSetupError, SourceError, QuantizedCheckpointError, OSError: See ``weights_digest``.
    """
    config = _config(folder / CONFIG)
    own = [(i, entry) for i, entry in enumerate(layout.layers) if isinstance(entry, LayerKv)]
    heads = "+".join(str(count) for count in sorted({entry.kv_heads for _, entry in own}))
    return Namespace(
        model=",".join(config.get("architectures") or [str(config.get("model_type", "unnamed"))]),
        revision=weights_digest(folder) if revision is None else revision,
        dtype=STORED_TYPES[layout.dtype],
        layout=_layout_text(layout, widths),
        layers=f"{own[0][0]}-{own[-1][0]}",
        kv_heads=heads,
        block=layout.block_tokens,
    )


def _layout_text(layout: KvLayout, widths: str) -> str:
    parts = ["pages-v1", layout.signature]
    own = [i for i, entry in enumerate(layout.layers) if isinstance(entry, LayerKv)]
    if any(layout.used_page_bytes(layer) < layout.page_bytes for layer in own):
        # Pages are stored whole: with unused bytes in them, the same tokens lie elsewhere in
        # pages of another size.
        parts.append(f"page={layout.page_bytes}")
    if widths:
        parts.append(f"widths={widths}")
    return "|".join(parts)


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise StoreSetupError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise StoreSetupError(f"{path}: no JSON: {error}") from None
    if not isinstance(config, dict):
        raise StoreSetupError(f"{path}: must be a JSON object, found {type(config).__name__}")
    return {name: value for name, value in config.items() if name not in NOT_SHAPING}


def _pieces(entry: TensorEntry, samples: int, *, exact: bool) -> Iterator[tuple[int, int]]:
    """Ranges of the file to read of a tensor."""
    end = entry.start + entry.num_bytes
    if exact or entry.num_bytes <= WHOLE_BYTES:
        for start in range(entry.start, end, READ_BYTES):
            yield start, min(start + READ_BYTES, end)
        return
    room = entry.num_bytes - SAMPLE_BYTES
    for i in range(samples):
        start = entry.start + room * i // (samples - 1)
        yield start, start + SAMPLE_BYTES


def _add(total: Any, part: bytes) -> None:
    """Hash a part with its length, so that no two lists of parts are the same bytes."""
    total.update(len(part).to_bytes(8, "little") + part)
