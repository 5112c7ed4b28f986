"""A quantized checkpoint in memory: decoder, experts in pages, and who moves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from models.plane_bytes import block_pages
from policies.precision_tables import BlockTables, block_tables
from policies.weight_page_history import Event
from policies.weight_page_table import MovementRules
from runtime.decoder import Decoder
from runtime.decoder_config import DecoderConfig, DecoderConfigError, read_decoder_config
from runtime.page_arena import DEFAULT_PAGE_BYTES, PageArena
from runtime.page_devices import CopyDevice, CpuDevice
from runtime.page_layout import BlockShape, CanonicalLayout
from runtime.page_movement import PageMover
from runtime.page_parent import HostParent
from runtime.paged_keys_values import PagedKeysValues
from runtime.quantized_checkpoint import QuantizedCheckpoint


@dataclass(slots=True)
class LoadedModel:
    """What a decode loop needs of one model.

    Attributes:
        config: Shapes.
        decoder: Everything but the routed experts.
        arena: Weights and KV.
        mover: Page table and copies.
        cache: Keys and values, in the arena's pages.
        tables: Bytes (in whole pages) and damage of every block and width.
    """

    config: DecoderConfig
    decoder: Decoder
    arena: PageArena
    mover: PageMover
    cache: PagedKeysValues
    tables: BlockTables

    def close(self) -> None:
        """End the copies."""
        self.mover.close()


class ArenaKeyValuePages:
    """The arena as a source of key and value pages."""

    def __init__(self, arena: PageArena) -> None:
        self._arena = arena

    def take(self, count: int) -> NDArray[np.int64] | None:
        """All pages or None."""
        pages = self._arena.take_kv(count, self._arena.page_bytes)
        return None if pages is None else pages.reshape(-1).astype(np.int64)

    def give_back(self, pages: NDArray[np.int64]) -> None:
        """Return pages."""
        self._arena.give_kv(pages.astype(np.int32))


def load_quantized(
    folder: Path | str,
    *,
    arena_pages: int,
    bits: int | NDArray[np.int64],
    page_bytes: int = DEFAULT_PAGE_BYTES,
    key_value_dtype: torch.dtype = torch.float32,
    device: Callable[[PageArena], CopyDevice] = CpuDevice,
    rules: MovementRules | None = None,
    history: Callable[[Event], None] | None = None,
    verify: bool = False,
) -> LoadedModel:
    """Load a checkpoint that ``runtime quantize`` wrote, for the CPU.

    Args:
        folder: Of the checkpoint.
        arena_pages: Pages for weights and KV together.
        bits: First width of every block, or [n] widths.
        page_bytes: Of the arena.
        key_value_dtype: Stored type of keys and values.
        device: Makes the device that copies.
        rules: Of page movement.
        history: Told every event of the pages.
        verify: Compare the checkpoint's checksums first.

    Raises:
        QuantizedCheckpointError: If the checkpoint is damaged.
        DecoderConfigError: If the decoder cannot run the model.
        ValueError: If the weights do not fit into the arena, or a width is none of the
            checkpoint's.
    """
    checkpoint = QuantizedCheckpoint.open(folder, verify=verify)
    widths = np.broadcast_to(np.asarray(bits), len(checkpoint.blocks))
    if not np.isin(widths, checkpoint.levels).all():
        odd = widths[~np.isin(widths, checkpoint.levels)][0]
        raise ValueError(f"bits: must be one of {list(checkpoint.levels)}, found {odd}")
    config = read_decoder_config(checkpoint.config)
    _require_all_layers(checkpoint, config)
    decoder = Decoder(config, _OtherTensors(checkpoint))
    arena = PageArena(arena_pages, page_bytes=page_bytes, history=history)
    copies = device(arena)
    parent = HostParent(
        [
            BlockShape(block.rows, block.columns, 2 if block.module == "gate_up" else 1)
            for block in checkpoint.blocks
        ],
        CanonicalLayout(),
        page_bytes=page_bytes,
        parent_bits=checkpoint.levels[-1],
        min_bits=checkpoint.levels[0],
        allocate=copies.host_memory,
    )
    parent.store_all(checkpoint.block(i) for i in range(len(checkpoint.blocks)))
    try:
        mover = PageMover(
            parent, arena, copies, widths.astype(np.int64), rules=rules, history=history
        )
    except BaseException:
        copies.close()
        raise
    cache = PagedKeysValues(
        buffer=arena.buffer.array.reshape(-1),
        page_bytes=page_bytes,
        layers=config.layers,
        key_value_heads=config.key_value_heads,
        head_dim=config.head_dim,
        source=ArenaKeyValuePages(arena),
        dtype=key_value_dtype,
    )
    return LoadedModel(
        config, decoder, arena, mover, cache, checkpoint_tables(checkpoint, page_bytes)
    )


def checkpoint_tables(checkpoint: QuantizedCheckpoint, page_bytes: int) -> BlockTables:
    """Bytes that every block holds in the arena at every width, and its damage there."""
    levels = checkpoint.levels
    held = {
        shape: [
            page_bytes * block_pages(*shape, bits, page_bytes=page_bytes, min_bits=levels[0])
            for bits in levels
        ]
        for shape in {(block.rows, block.columns) for block in checkpoint.blocks}
    }
    rows = [held[block.rows, block.columns] for block in checkpoint.blocks]
    return block_tables(rows, checkpoint.damage, levels)


def _require_all_layers(checkpoint: QuantizedCheckpoint, config: DecoderConfig) -> None:
    expected = 2 * config.layers * config.experts
    if len(checkpoint.blocks) != expected:
        raise DecoderConfigError(
            f"{checkpoint.folder}: {config.layers} layers of {config.experts} experts need "
            f"{expected} blocks, found {len(checkpoint.blocks)}"
        )


class _OtherTensors(Mapping[str, torch.Tensor]):
    """The checkpoint's tensors that are no expert's, as float32, read when asked for."""

    def __init__(self, checkpoint: QuantizedCheckpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self._checkpoint.other_float32(name).copy())

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.other_tensors)

    def __len__(self) -> int:
        return len(self._checkpoint.other_tensors)
