"""One reading of all weights: numbers that no run can use are named, and the bytes get a digest.

The digest belongs to the tensors, not to files or places: the same checkpoint moved, renamed or cut
into other shards has the same one; a fine-tuned one has another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from runtime.checkpoint_expert_names import is_expert_tensor, parse_expert_tensor
from runtime.checkpoint_shards import SourceError
from runtime.checkpoint_source import CheckpointSource
from runtime.checkpoint_tensors import TensorEntry, read_bytes

CHUNK_BYTES = 16 << 20  # a multiple of every number's size
FLOAT16_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class _Format:
    """A floating type as whole numbers: its magnitude bits order like its values.

    numbers: the whole numbers it is read as.
    magnitude: mask of all bits but the sign.
    infinity: the first magnitude that is not finite.
    beyond_float16: the first magnitude above 65504.
    """

    numbers: str
    magnitude: int
    infinity: int
    beyond_float16: int


_FORMATS = {
    "BF16": _Format("<u2", 0x7FFF, 0x7F80, 0x4780),
    "F16": _Format("<u2", 0x7FFF, 0x7C00, 0x7C00),
    "F32": _Format("<u4", 0x7FFF_FFFF, 0x7F80_0000, 0x477F_E001),
    "F64": _Format("<u8", (1 << 63) - 1, 0x7FF << 52, 0x40EF_FC00_0000_0001),
    "F8_E4M3": _Format("<u1", 0x7F, 0x7F, 0x80),
    "F8_E5M2": _Format("<u1", 0x7F, 0x7C, 0x7C),
}


def scan_weights(
    source: CheckpointSource,
    *,
    experts_in_float16: bool,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> str:
    """Read all tensors once.

    Args:
        source: The opened checkpoint.
        experts_in_float16: Experts must also be within float16, as their tables are.
        on_bytes: Told how many bytes more are read.

    Returns:
        The SHA-256, in hexadecimal, of all tensors' names, dtypes, shapes and bytes.

    Raises:
        SourceError: If a number is not finite or too large; names file, tensor and place.
        TensorFileError: If a shard cannot be read.
    """
    tensors = []
    for file, header in source.shards.headers.items():
        for name, entry in header.items():
            digest = _scan_tensor(source, file, name, entry, experts_in_float16, on_bytes)
            tensors.append([name, entry.dtype, list(entry.shape), digest])
    return hashlib.sha256(json.dumps(sorted(tensors)).encode()).hexdigest()


def _scan_tensor(
    source: CheckpointSource,
    file: str,
    name: str,
    entry: TensorEntry,
    experts_in_float16: bool,
    on_bytes: Callable[[int], None],
) -> str:
    path = source.folder / file
    form = _FORMATS.get(entry.dtype)
    limit = 0
    if form is not None:
        narrow = experts_in_float16 and is_expert_tensor(name)
        limit = form.beyond_float16 if narrow else form.infinity
    digest = hashlib.sha256()
    for start in range(0, entry.num_bytes, CHUNK_BYTES):
        content = read_bytes(path, entry.start + start, min(CHUNK_BYTES, entry.num_bytes - start))
        digest.update(content)
        if form is not None:
            numbers = np.frombuffer(content, form.numbers) & np.dtype(form.numbers).type(
                form.magnitude
            )
            if int(numbers.max()) >= limit:
                index = start // numbers.itemsize + int((numbers >= limit).argmax())
                raise SourceError(
                    f"{path}: tensor {name}, {_place(name, entry, index)}:"
                    f" {_fault(int(numbers.max()), form)}"
                )
        on_bytes(len(content))
    return digest.hexdigest()


def _place(name: str, entry: TensorEntry, index: int) -> str:
    place = [int(i) for i in np.unravel_index(index, entry.shape)] if entry.shape else []
    expert = parse_expert_tensor(name) if is_expert_tensor(name) else None
    if expert is None:
        return f"element {place}"
    number = place[0] if expert.expert is None else expert.expert
    return f"row {place[-2]} of expert {number}"


def _fault(largest: int, form: _Format) -> str:
    if largest >= form.infinity:
        return "not a finite number, need finite weights"
    return f"a weight beyond {FLOAT16_MAX:g}, tables hold float16"
