"""Times of expert kernels on a GPU: graph replays, cold cache, against the floor in bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cuda import moe_tile, shared_table
from kernels.cuda.decode_tables import device_table_bytes
from kernels.cuda.load import load_kernels
from kernels.cuda.shared_table import SharedTableLayer

PAGE_BYTES = 32 * 1024
MIN_BITS = 2
CACHE_TIMES = 4  # weights between two uses of a layer: this many times the L2 cache
_SAFE_HALF = 0xBBFF  # clears the top exponent bit: every half becomes finite and below 2


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Experts of one layer; sizes of the published models."""

    hidden_size: int
    intermediate: int
    num_experts: int
    top_k: int

    def block_shape(self, module: int) -> tuple[int, int]:
        """Rows and columns; module 0 is gate_up, 1 is down."""
        if module == 0:
            return 2 * self.intermediate, self.hidden_size
        return self.hidden_size, self.intermediate

    def block_bytes(self, module: int, bits: int) -> int:
        """Planes and fp16 table that a kernel reads, without page padding; 16 is bfloat16."""
        rows, columns = self.block_shape(module)
        if bits == 16:
            return 2 * rows * columns
        return int(bits * 4 * rows * -(-columns // 32) + 2 * rows * 2**bits)


SHAPES = {
    "Qwen1.5-MoE-A2.7B": ExpertShape(2048, 1408, 60, 4),
    "Mixtral-8x7B": ExpertShape(4096, 14336, 8, 2),
    "Gemma-4-26B-A4B": ExpertShape(2816, 704, 128, 8),
}


@dataclass(frozen=True, slots=True)
class Routing:
    """One batch: [T, k] int32 experts, [T, k] float32 weights, the experts that are read."""

    expert_index: NDArray[np.int32]
    gate_weight: NDArray[np.float32]

    @property
    def experts(self) -> list[int]:
        """Distinct experts, ascending."""
        return [int(e) for e in np.unique(self.expert_index)]


@dataclass(frozen=True, slots=True)
class PageArrays:
    """Arena and page tables on the device, pages of PAGE_BYTES, tables from MIN_BITS on."""

    arena: Any
    bits: Any
    plane_pages: Any
    table_pages: Any

    def tables(self) -> tuple[Any, Any, Any]:
        """bits, plane_pages, table_pages."""
        return self.bits, self.plane_pages, self.table_pages


def uniform_routing(rng: np.random.Generator, shape: ExpertShape, tokens: int) -> Routing:
    """Every token takes top_k distinct experts, all equally likely."""
    order = np.argsort(rng.random((tokens, shape.num_experts)), axis=1)
    gate = rng.random((tokens, shape.top_k)).astype(np.float32)
    return Routing(order[:, : shape.top_k].astype(np.int32), gate / gate.sum(1, keepdims=True))


def copies_for(layer_bytes: int, cache_bytes: int) -> int:
    """Layers to cycle through so that none is in the cache when its turn comes again."""
    return max(1, -(-CACHE_TIMES * cache_bytes // max(1, layer_bytes)) + 1)


@dataclass(frozen=True, slots=True)
class Engine:
    """One implementation of the expert layer.

    Attributes:
        stream_bytes: (shape, module, bits) to the bytes of one plane, and of the table.
        prepare: (cupy, shape, pages, routing) to what launches the layer of a given number.
    """

    stream_bytes: Callable[[ExpertShape, int, int], tuple[int, int]]
    prepare: Callable[[Any, ExpertShape, Any, Routing], Callable[[int], None]]


def read_bytes(
    shape: ExpertShape, routing: Routing, bits: Sequence[int], engine: Engine | None = None
) -> int:
    """Weight bytes that one layer must read at the width of each block.

    Args:
        shape: Of the experts.
        routing: Whose distinct experts are read once.
        bits: Width of gate_up and down of expert 0, of expert 1, and so on.
        engine: Whose planes and tables count; canonical planes and fp16 tables where None.
    """
    total = 0
    for expert in routing.experts:
        for module in (0, 1):
            q = bits[2 * expert + module]
            if engine is None:
                total += shape.block_bytes(module, q)
            else:
                plane, table = engine.stream_bytes(shape, module, q)
                total += q * plane + table
    return total


def random_pages(
    cupy: Any,
    rng: np.random.Generator,
    engine: Engine,
    shape: ExpertShape,
    bits: Sequence[int],
    copies: int,
) -> PageArrays:
    """`copies` layers of random bits on the device, pages in random order; tables are finite."""
    widths = list(bits) * copies
    sizes = [engine.stream_bytes(shape, i % 2, q) for i, q in enumerate(widths)]
    plane, table = [[-(-size[j] // PAGE_BYTES) for size in sizes] for j in (0, 1)]
    total = sum(p * q + t for p, t, q in zip(plane, table, widths, strict=True))
    order = rng.permutation(total).astype(np.int32)
    blocks, planes_list = len(widths), max(plane)
    plane_pages = np.full((blocks, 8, planes_list), -1, np.int32)
    table_pages = np.full((blocks, 8 - MIN_BITS + 1, max(table)), -1, np.int32)
    used, table_ids = 0, []
    for i, q in enumerate(widths):
        taken = order[used : used + plane[i] * q + table[i]]
        used += len(taken)
        plane_pages[i, :q, : plane[i]] = taken[: plane[i] * q].reshape(q, plane[i])
        table_pages[i, q - MIN_BITS, : table[i]] = taken[plane[i] * q :]
        table_ids.append(taken[plane[i] * q :])
    words = cupy.random.randint(0, 2**31, total * PAGE_BYTES // 4, dtype=np.int32)
    words ^= cupy.random.randint(0, 2, words.size, dtype=np.int32) << 31
    halves = words.view(np.uint16).reshape(total, PAGE_BYTES // 2)
    halves[cupy.asarray(np.concatenate(table_ids))] &= np.uint16(_SAFE_HALF)
    arrays = map(cupy.asarray, (np.asarray(widths, np.int32), plane_pages, table_pages))
    return PageArrays(words.view(np.uint8), *arrays)


def _shared_table_bytes(shape: ExpertShape, module: int, bits: int) -> tuple[int, int]:
    rows, columns = shape.block_shape(module)
    return 4 * rows * -(-columns // 32), 2 * rows * 2**bits


def _shared_table_run(
    cupy: Any, shape: ExpertShape, arrays: PageArrays, routing: Routing
) -> Callable[[int], None]:
    pages = shared_table.DevicePages(arrays.arena, PAGE_BYTES, MIN_BITS, *arrays.tables())
    tokens = routing.expert_index.shape[0]
    step = SharedTableLayer(
        load_kernels(shared_table.SOURCE, target="gpu"),
        cupy,
        hidden_size=shape.hidden_size,
        intermediate=shape.intermediate,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        max_tokens=tokens,
        number_type="bfloat16",
    )
    x = cupy.full((tokens, shape.hidden_size), 0x3F80, np.uint16)  # ones in bfloat16
    index, gate = cupy.asarray(routing.expert_index), cupy.asarray(routing.gate_weight)
    out = cupy.zeros_like(x)

    def run(layer: int) -> None:
        step(x, index, gate, pages, layer * 2 * shape.num_experts, out)

    return run


def _tiles(shape: ExpertShape) -> moe_tile.MoeShape:
    return moe_tile.MoeShape(shape.num_experts, shape.hidden_size, shape.intermediate, shape.top_k)


def _moe_tile_bytes(shape: ExpertShape, module: int, bits: int) -> tuple[int, int]:
    tiles = (_tiles(shape).gate_up, _tiles(shape).down)[module]
    return tiles.plane_bytes, device_table_bytes(tiles, bits)


def _moe_tile_run(
    cupy: Any, shape: ExpertShape, arrays: PageArrays, routing: Routing
) -> Callable[[int], None]:
    pages = moe_tile.DevicePages(arrays.arena, PAGE_BYTES, MIN_BITS, *arrays.tables())
    tokens = routing.expert_index.shape[0]
    step = moe_tile.MoeTileLayer(_tiles(shape), pages, max_tokens=tokens, target="gpu")
    x = cupy.full((tokens, shape.hidden_size), 0x3F80, np.uint16)  # ones in bfloat16
    index, gate = cupy.asarray(routing.expert_index), cupy.asarray(routing.gate_weight)
    out = cupy.zeros((tokens, shape.hidden_size), np.float32)
    return lambda layer: step(layer, x, index, gate, out)


ENGINES = {
    "shared table": Engine(_shared_table_bytes, _shared_table_run),
    "tensor-core tiles": Engine(_moe_tile_bytes, _moe_tile_run),
}


def graph_microseconds(
    cupy: Any, run: Callable[[int], None], copies: int, repeats: int
) -> list[float]:
    """Microseconds a layer, one number per replay of a graph over all copies."""
    stream = cupy.cuda.Stream(non_blocking=True)
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    times = []
    with stream:
        run(0)  # kernels are loaded before the capture
        stream.synchronize()
        stream.begin_capture()
        for layer in range(copies):
            run(layer)
        graph = stream.end_capture()
        for _ in range(repeats + 3):
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(1000.0 * cupy.cuda.get_elapsed_time(begin, end) / copies)
    return times[3:]


def copy_bytes_per_s(cupy: Any, repeats: int = 10) -> float:
    """Bytes read and written a second by a device copy of 1 GiB: the bandwidth of the floor."""
    source = cupy.zeros(2**30, np.uint8)
    target = cupy.empty_like(source)
    stream = cupy.cuda.Stream(non_blocking=True)
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    times = []
    with stream:
        for _ in range(repeats + 2):
            begin.record(stream)
            cupy.copyto(target, source)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) / 1000.0)
    return float(2 * source.nbytes / np.median(times[2:]))
