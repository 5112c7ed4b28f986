"""Launcher of shared_table.cu: a mixture-of-experts layer at any width per expert matrix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from kernels.cuda.load import KernelModule

SOURCE: Final = Path(__file__).with_name("shared_table.cu")
NumberType = Literal["float32", "float16", "bfloat16"]
Activation = Literal["silu", "gelu_tanh"]
_NUMBER_TYPES: Final[dict[str, int]] = {"float32": 0, "float16": 1, "bfloat16": 2}
_ACTIVATIONS: Final[dict[str, int]] = {"silu": 0, "gelu_tanh": 1}
_TILE_THREADS: Final = 128
_SCRATCH_BYTES: Final = 32 * 1024


@dataclass(frozen=True, slots=True)
class DevicePages:
    """The arena and the page tables on the target; addresses that stay.

    Attributes:
        arena: uint8; page i is bytes [i * page_bytes, (i + 1) * page_bytes), aligned to 64.
        page_bytes: A power of two, >= 1024.
        min_bits: Lowest width that has a table.
        bits: [blocks] int32, width of each block.
        plane_pages: [blocks, parent_bits, pages of a plane] int32.
        table_pages: [blocks, parent_bits - min_bits + 1, pages of a table] int32.
    """

    arena: Any
    page_bytes: int
    min_bits: int
    bits: Any
    plane_pages: Any
    table_pages: Any

    def kernel_arguments(self) -> tuple[Any, ...]:
        """Arrays and sizes in the order of every expert kernel.

        Raises:
            ValueError: If the shapes do not belong together.
        """
        blocks, parent_bits, plane_list = self.plane_pages.shape
        tables = parent_bits - self.min_bits + 1
        if self.bits.shape != (blocks,) or self.table_pages.shape[:2] != (blocks, tables):
            raise ValueError(
                f"bits {self.bits.shape} and table_pages {self.table_pages.shape} must be "
                f"[{blocks}] and [{blocks}, {tables}, pages]"
            )
        sizes = (parent_bits, self.min_bits, plane_list, self.table_pages.shape[2])
        return (
            self.arena,
            self.bits,
            self.plane_pages,
            self.table_pages,
            *(np.int32(size) for size in sizes),
            np.int32(self.page_bytes.bit_length() - 1),
        )


class SharedTableLayer:
    """The expert part of a layer, with workspace for up to `max_tokens` tokens of one step.

    A call is four launches and no read of the host, with grids that depend on shapes alone, so
    that it can be captured in a CUDA graph. Replays see what the arrays hold by then: tokens,
    routing, widths, pages. Workspace is shared by all layers of the same shape.

    Args:
        module: Kernels of `SOURCE`.
        xp: numpy under emulation, cupy on a GPU.
        hidden_size: H.
        intermediate: I, of one expert.
        num_experts: E >= 1.
        top_k: Experts a token, >= 1.
        max_tokens: Most tokens of one call.
        activation: Of the gate half.
        number_type: Of tokens and output; bfloat16 comes as uint16 bits.

    Raises:
        ValueError: If a number is < 1 or a name is unknown.
    """

    def __init__(
        self,
        module: KernelModule,
        xp: Any,
        *,
        hidden_size: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        max_tokens: int,
        activation: Activation = "silu",
        number_type: NumberType = "float16",
    ) -> None:
        if min(hidden_size, intermediate, num_experts, top_k, max_tokens) < 1:
            raise ValueError(
                "hidden_size, intermediate, num_experts, top_k and max_tokens must be >= 1: "
                f"{hidden_size}, {intermediate}, {num_experts}, {top_k}, {max_tokens}"
            )
        if activation not in _ACTIVATIONS or number_type not in _NUMBER_TYPES:
            known = f"{sorted(_ACTIVATIONS)}, {sorted(_NUMBER_TYPES)}"
            raise ValueError(f"unknown {activation!r} or {number_type!r}; there are {known}")
        self._sizes = (hidden_size, intermediate, num_experts, top_k)
        self._max_tokens, self._type = max_tokens, np.int32(_NUMBER_TYPES[number_type])
        self._is_gelu = np.int32(_ACTIVATIONS[activation])
        self._dtype = np.dtype(np.uint16 if number_type == "bfloat16" else number_type)
        slots = max_tokens * top_k
        self._offsets = xp.zeros(num_experts + 1, np.int32)
        self._sorted = xp.zeros(slots, np.int32)
        self._active = xp.zeros(num_experts + 1, np.int32)
        self._hidden = xp.zeros((slots, intermediate), np.float32)
        self._slot_output = xp.zeros((slots, hidden_size), np.float32)
        self._no_scale = xp.ones(num_experts, np.float32)
        names = ("route_slots", "moe_gate_up", "moe_down", "combine_slots")
        self._route, self._gate_up, self._down, self._combine = map(module.get_function, names)

    def __call__(
        self,
        tokens: Any,
        expert_index: Any,
        gate_weight: Any,
        pages: DevicePages,
        first_block: int,
        out: Any,
        *,
        expert_scale: Any = None,
    ) -> None:
        """out[t] = sum over choices of gate weight * scale * down(act(gate x) * (up x)).

        Args:
            tokens: [T <= max_tokens, H] of the number type.
            expert_index: [T, k] int32; outside [0, E): no expert (such as padding tokens).
            gate_weight: [T, k] float32.
            pages: Arena and page tables.
            first_block: Block of expert 0's gate_up in this layer, layer * E * 2.
            out: [T, H] of the number type, written.
            expert_scale: [E] float32, or None for 1.

        Raises:
            ValueError: If a shape or dtype does not fit.
        """
        hidden_size, intermediate, experts, top_k = self._sizes
        count = self._check(tokens, expert_index, gate_weight, out)
        blocks = pages.bits.shape[0]
        if not 0 <= first_block <= blocks - 2 * experts:
            raise ValueError(f"first_block {first_block} with {experts} experts in {blocks} blocks")
        if not count:
            return
        slots = count * top_k
        routing = (self._offsets, self._sorted, self._active)
        shape = (np.int32(hidden_size), np.int32(intermediate))
        common = (*routing, *pages.kernel_arguments(), np.int32(first_block), *shape)
        shared = (64 << pages.plane_pages.shape[1]) + _SCRATCH_BYTES
        for kernel in (self._gate_up, self._down):
            if kernel.max_dynamic_shared_size_bytes < shared:
                kernel.max_dynamic_shared_size_bytes = shared
        self._route(
            (experts,),
            (256,),
            (expert_index, *routing, np.int32(slots), np.int32(experts)),
            shared_mem=4 * experts,
        )
        active = min(experts, slots)
        self._gate_up(
            (-(-intermediate // 16), active),
            (_TILE_THREADS,),
            (tokens, self._hidden, *common, np.int32(top_k), self._is_gelu, self._type),
            shared_mem=shared,
        )
        scale = self._no_scale if expert_scale is None else expert_scale
        self._down(
            (-(-hidden_size // 32), active),
            (_TILE_THREADS,),
            (self._hidden, self._slot_output, gate_weight, scale, *common),
            shared_mem=shared,
        )
        numbers = (count, hidden_size, top_k, experts)
        self._combine(
            (min(2048, -(-count * hidden_size // 256)),),
            (256,),
            (self._slot_output, expert_index, out, *(np.int32(n) for n in numbers), self._type),
        )

    def _check(self, tokens: Any, expert_index: Any, gate_weight: Any, out: Any) -> int:
        hidden_size, _, _, top_k = self._sizes
        count = int(tokens.shape[0])
        expected = (
            ("tokens", tokens, (count, hidden_size), self._dtype),
            ("expert_index", expert_index, (count, top_k), np.dtype(np.int32)),
            ("gate_weight", gate_weight, (count, top_k), np.dtype(np.float32)),
            ("out", out, (count, hidden_size), self._dtype),
        )
        for name, array, shape, dtype in expected:
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(
                    f"{name} must be {dtype} {list(shape)}: {array.dtype} {list(array.shape)}"
                )
        if count > self._max_tokens:
            raise ValueError(f"{count} tokens: there is workspace for {self._max_tokens}")
        return count
