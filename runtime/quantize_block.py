"""One weight block: its planes, tables and damage, worked out in stripes of rows.

Stripes have a size of their own, whatever the number of threads, and their sums are added in
order: the result does not depend on how many threads work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.planes import pack_planes
from runtime.checkpoint_source import CheckpointSource, SourceBlock
from runtime.nested_kmeans import RowError, quantize_rows
from runtime.quantize_error import diagonal_errors, full_errors
from runtime.quantize_settings import QuantizeSettings
from runtime.row_gain import with_row_gain

STRIPE_WEIGHTS = 1 << 18
LARGEST_ENTRY = float(np.finfo(np.float16).max)

FloatArray = NDArray[np.float64]


class QuantizeError(ValueError):
    """Weights that cannot be quantized; the message names file, tensor and row."""


@dataclass(frozen=True, slots=True)
class BlockSignals:
    """What calibration says of a block.

    moment: [K, K] second moment H of its inputs, or [K] its diagonal.
    row_weight: [N] a.
    factor: M2 c, what its output error is multiplied by.
    """

    moment: FloatArray
    row_weight: FloatArray
    factor: float


@dataclass(frozen=True, slots=True)
class BlockResult:
    """A quantized block.

    planes: [B, N, ceil(K/32)] uint32.
    tables: by width, [N, 2**q] float16.
    damage: [levels].
    """

    planes: NDArray[np.uint32]
    tables: dict[int, NDArray[np.float16]]
    damage: FloatArray


def quantize_block(
    source: CheckpointSource,
    block: SourceBlock,
    signals: BlockSignals | None,
    settings: QuantizeSettings,
    pool: Executor,
    on_weights: Callable[[int], None] = lambda weights: None,
) -> BlockResult:
    """Quantize a block.

    Without signals every weight counts the same and damage is the squared error; with them,
    weights are clustered by the diagonal of H and damage is M2 c sum_r a_r d_r H d_r^T. Errors
    are those of the float16 tables.

    Args:
        source: The opened checkpoint.
        block: One of its blocks.
        signals: Its calibration, if there is one.
        settings: Bit widths.
        pool: Where stripes are worked on.
        on_weights: Told how many weights are done, after every stripe.

    Raises:
        QuantizeError: If a weight is not finite or beyond float16.
        TensorFileError: If a shard cannot be read.
    """
    bits, rows = settings.parent_bits, block.rows
    planes = np.empty((bits, rows, -(-block.columns // 32)), np.uint32)
    tables = {q: np.empty((rows, 1 << q), np.float16) for q in settings.levels}
    sensitivity = None if signals is None else _diagonal(signals.moment)

    def work(start: int) -> FloatArray:
        stop = min(start + step, rows)
        weights = source.read_rows(block, start, stop)
        try:
            nested = quantize_rows(
                weights,
                sensitivity,
                parent_bits=bits,
                seed_bits=settings.seed_bits,
                min_bits=settings.min_bits,
            )
        except RowError as error:
            raise _row_error(block, start + error.row, str(error)) from None
        _require_float16(block, start, weights)
        if settings.keep_gain:
            nested = with_row_gain(weights, nested, None if signals is None else signals.moment)
        planes[:, start:stop] = pack_planes(nested.codes, bits)
        for q, table in nested.tables.items():
            tables[q][start:stop] = np.clip(table, -LARGEST_ENTRY, LARGEST_ENTRY)
        rounded = np.concatenate([tables[q][start:stop] for q in settings.levels], axis=1)
        if signals is None:
            errors = diagonal_errors(weights, nested.codes, rounded, settings, None)
            return np.asarray(errors.sum(axis=0))
        moment, row_weight = signals.moment, signals.row_weight[start:stop]
        errors = (full_errors if moment.ndim == 2 else diagonal_errors)(
            weights, nested.codes, rounded, settings, moment
        )
        return np.asarray(row_weight @ errors)

    step = max(1, STRIPE_WEIGHTS // block.columns)
    sums = []
    for start, stripe in zip(
        range(0, rows, step), pool.map(work, range(0, rows, step)), strict=True
    ):
        sums.append(stripe)
        on_weights((min(start + step, rows) - start) * block.columns)
    factor = 1.0 if signals is None else signals.factor
    damage = np.array([factor * math.fsum(level) for level in np.transpose(sums)])
    return BlockResult(planes, tables, damage)


def _diagonal(moment: FloatArray) -> FloatArray:
    return np.ascontiguousarray(moment.diagonal() if moment.ndim == 2 else moment)


def _require_float16(block: SourceBlock, start: int, weights: NDArray[np.float32]) -> None:
    largest = np.abs(weights).max(axis=1)
    if largest.max() > LARGEST_ENTRY:
        row = int(largest.argmax())
        raise _row_error(
            block,
            start + row,
            f"weight of magnitude {largest[row]:g}, tables hold float16 up to {LARGEST_ENTRY:g}",
        )


def _row_error(block: SourceBlock, row: int, message: str) -> QuantizeError:
    part, inner = block.part_of_row(row)
    return QuantizeError(
        f"{part.file}: tensor {part.name}, row {inner} of expert {block.expert}: {message}"
    )
