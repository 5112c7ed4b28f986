"""Writes the files of a quantized checkpoint, one at a time, without holding one in memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.calibration_stats import CalibrationStats
from runtime.checkpoint_source import MODULES, CheckpointSource, SourceBlock
from runtime.checkpoint_tensors import TensorFileWriter, read_bytes
from runtime.quantize_block import BlockSignals, quantize_block
from runtime.quantize_journal import DoneFile
from runtime.quantize_settings import ExpertFile, OtherFile, QuantizeSettings, block_tensors
from runtime.quantized_manifest import FileRecord, TensorLayout

COPY_BYTES = 16 << 20
METADATA = {"format": "pagedweight"}


def write_experts(
    file: ExpertFile,
    folder: Path,
    source: CheckpointSource,
    stats: CalibrationStats | None,
    settings: QuantizeSettings,
    pool: Executor,
    on_weights: Callable[[int], None],
) -> DoneFile:
    """Quantize the blocks of one file and write them as they come.

    Args:
        file: The file.
        folder: Where it goes.
        source: The checkpoint.
        stats: Its calibration, if there is one.
        settings: Bit widths.
        pool: Where stripes of rows are worked on.
        on_weights: Told how many weights are done, after every stripe.

    Raises:
        QuantizeError: If a weight is not finite or beyond float16.
        TensorFileError: If a shard cannot be read.
        CalibrationError: If the calibration is damaged.
        OSError: If the disk refuses.
    """
    tensors: TensorLayout = {}
    for block in file.blocks:
        tensors.update(block_tensors(block, settings))
    planes: list[list[int]] = []
    tables: list[list[int]] = []
    damage: list[list[float]] = []
    with TensorFileWriter(folder / file.name, tensors, METADATA) as writer:
        for block in file.blocks:
            signals = None if stats is None else _signals(stats, block)
            result = quantize_block(source, block, signals, settings, pool, on_weights)
            contents = [_little_endian(plane, "<u4") for plane in result.planes]
            planes.append([_written(writer, content) for content in contents])
            contents = [_little_endian(table, "<f2") for table in result.tables.values()]
            tables.append([_written(writer, content) for content in contents])
            damage.append(result.damage.tolist())
        size, sha256 = writer.close()
    return DoneFile(FileRecord(size, sha256), planes, tables, damage)


def copy_others(file: OtherFile, folder: Path, source: CheckpointSource) -> DoneFile:
    """Copy the other tensors of one shard, bit for bit.

    Raises:
        TensorFileError: If the shard cannot be read.
        OSError: If the disk refuses.
    """
    entries = source.other_tensors[file.source]
    tensors = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    path = source.folder / file.source
    checksums = dict.fromkeys(entries, 0)
    with TensorFileWriter(folder / file.name, tensors, METADATA) as writer:
        for name, entry in entries.items():
            for start in range(0, entry.num_bytes, COPY_BYTES):
                count = min(COPY_BYTES, entry.num_bytes - start)
                content = read_bytes(path, entry.start + start, count)
                checksums[name] = zlib.crc32(content, checksums[name])
                writer.write(content)
        size, sha256 = writer.close()
    return DoneFile(FileRecord(size, sha256, checksums))


def _written(writer: TensorFileWriter, content: memoryview) -> int:
    """Write, and return the CRC-32."""
    writer.write(content)
    return zlib.crc32(content)


def _signals(stats: CalibrationStats, block: SourceBlock) -> BlockSignals:
    place = (block.moe_layer, block.expert, MODULES.index(block.module))
    return BlockSignals(
        moment=stats.input_second_moment(*place),
        row_weight=stats.row_weight(*place),
        factor=stats.mass(*place[:2]) * stats.scale(place[0]),
    )


def _little_endian(array: NDArray[np.uint32] | NDArray[np.float16], dtype: str) -> memoryview:
    return np.ascontiguousarray(array.astype(dtype, copy=False)).data.cast("B")
