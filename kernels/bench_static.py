"""What can be told of the CUDA kernels without a GPU: registers, spills, shared memory, SASS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.cuda import gather, moe_tile, pack, shared_table
from kernels.cuda.compile import ARCHITECTURES, compile_cubin
from kernels.cuda_emulation.source_text import read_source
from kernels.sass_counts import disassemble, inner_loops

WIDTHS = range(2, 9)


@dataclass(frozen=True, slots=True)
class StaticSource:
    """One build of one source: its label in tables and what it is compiled with."""

    label: str
    path: Path
    defines: tuple[str, ...] = ()
    name_expressions: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()  # those that count; all when empty


SOURCES = (
    StaticSource("pack", pack.SOURCE),
    StaticSource("gather", gather.SOURCE),
    StaticSource("shared_table", shared_table.SOURCE),
    *(StaticSource(*variant) for variant in moe_tile.kernel_variants()),
)
ONE_WIDTH = tuple(
    StaticSource(
        f"shared_table q={q}",
        shared_table.SOURCE,
        (f"WIDTHS={1 << q}",),
        (),
        ("moe_gate_up", "moe_down"),
    )
    for q in WIDTHS
)


def resource_rows(
    sources: Sequence[StaticSource], architectures: Sequence[str] = ARCHITECTURES
) -> list[dict[str, Any]]:
    """One row per kernel and architecture: label, kernel, architecture and `KernelResources`.

    Raises:
        CompileError, CompilerMissingError: As `compile_cubin`.
    """
    rows = []
    for source in sources:
        text = read_source(source.path)
        for architecture in architectures:
            compiled = compile_cubin(
                text,
                architecture,
                defines=source.defines,
                name_expressions=source.name_expressions,
            )
            for kernel, used in sorted(compiled.resources.items()):
                if source.kernels and kernel not in source.kernels:
                    continue
                place = {"source": source.label, "kernel": kernel, "architecture": architecture}
                rows.append({**place, **asdict(used)})
    return rows


def decode_rows(
    nvdisasm: Path, architectures: Sequence[str] = ARCHITECTURES
) -> list[dict[str, Any]]:
    """Instructions per weight of the shared-table inner loop (up to 16 tokens), by width.

    Every weight is one 16-bit read of its table, so these reads count the weights of a turn. Both
    token tiles and both terms are in the count, as they are in the code; a launch with up to eight
    tokens jumps over half of the tensor instructions.

    Raises:
        CompileError, CompilerMissingError: As `compile_cubin`.
        RuntimeError: The loop is not found in the machine code.
    """
    rows = []
    for q, source in zip(WIDTHS, ONE_WIDTH, strict=True):
        text = read_source(source.path)
        for architecture in architectures:
            compiled = compile_cubin(text, architecture, defines=source.defines)
            loops = inner_loops(disassemble(compiled.cubin, nvdisasm))["moe_gate_up"]
            decode = [loop for loop in loops if loop.table_reads and loop.tensor_ops]
            if len(decode) != 1:
                raise RuntimeError(
                    f"{architecture} q={q}: {len(decode)} loops read tables and multiply, not one"
                )
            weights, units = decode[0].table_reads, decode[0].by_unit()
            total = sum(units.values())
            per_weight = {unit: round(count / weights, 3) for unit, count in sorted(units.items())}
            rows.append(
                {
                    "bits": q,
                    "architecture": architecture,
                    "weights_per_lane_and_turn": weights,
                    "instructions_per_weight": round(total / weights, 3),
                    "by_unit_per_weight": per_weight,
                }
            )
    return rows
