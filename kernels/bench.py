"""Times of the CUDA kernels on a GPU; without one, what the compiler says of them.

python -m kernels.bench            needs a GPU and CuPy
python -m kernels.bench --static   needs the NVRTC wheels alone
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from kernels import bench_device, bench_static
from kernels.bench_device import ENGINES, SHAPES, ExpertShape, Routing
from kernels.bench_torch import torch_microseconds
from kernels.cuda.compile import ARCHITECTURES, CompilerMissingError
from kernels.cuda.load import gpu_problem
from kernels.sass_counts import find_nvdisasm

RESULTS = Path("benchmarks/results")
WIDTHS = tuple(range(2, 9))
app = typer.Typer(add_completion=False)
console = Console()


@app.command()
def bench(
    *,
    static: Annotated[bool, typer.Option(help="Compiler's figures alone; needs no GPU.")] = False,
    model: Annotated[list[str] | None, typer.Option(help=f"Of {list(SHAPES)}; all.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Tokens a step; 1, 4, 16.")] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Graph replays that count.")] = 20,
    seed: Annotated[int, typer.Option(help="Of routing and pages.")] = 0,
    nvdisasm: Annotated[
        Path | None, typer.Option(help="Disassembler, when it is not on PATH.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Write benchmarks/results/cuda.json (GPU) or cuda_static.json (--static)."""
    unknown = [name for name in model or [] if name not in SHAPES]
    if unknown:
        _refuse(f"--model {unknown[0]!r} is unknown; there are {', '.join(SHAPES)}")
    if any(tokens < 1 for tokens in batch or []):
        _refuse(f"--batch must be >= 1: {min(batch or [])}")
    if static:
        _write(out / "cuda_static.json", _static(nvdisasm or find_nvdisasm()))
        return
    problem = gpu_problem()
    if problem:
        _refuse(f"no GPU to measure on: {problem}. The compiler's figures: --static")
    names = model or list(SHAPES)
    result = _device([(n, SHAPES[n]) for n in names], batch or [1, 4, 16], repeats, seed)
    _write(out / "cuda.json", result)


def _refuse(message: str) -> None:
    Console(stderr=True).print(message, markup=False, soft_wrap=True)
    raise typer.Exit(2)


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)
    console.print(f"written: {path}", markup=False)


def _static(nvdisasm: Path | None) -> dict[str, Any]:
    try:
        rows = bench_static.resource_rows((*bench_static.SOURCES, *bench_static.ONE_WIDTH))
    except CompilerMissingError as error:
        _refuse(str(error))
    _print_resources(rows)
    result: dict[str, Any] = {"nvrtc": metadata.version("nvidia-cuda-nvrtc"), "resources": rows}
    if nvdisasm is None:
        console.print("no nvdisasm (nvidia-cuda-nvdisasm): machine instructions are not counted")
        return result
    result["decode"] = bench_static.decode_rows(nvdisasm)
    table = Table("q", *ARCHITECTURES, title="instructions per weight, shared-table inner loop")
    for bits in bench_static.WIDTHS:
        row = {r["architecture"]: r for r in result["decode"] if r["bits"] == bits}
        table.add_row(
            str(bits), *(f"{row[a]['instructions_per_weight']:.1f}" for a in ARCHITECTURES)
        )
    console.print(table)
    return result


def _print_resources(rows: list[dict[str, Any]]) -> None:
    table = Table("source", "kernel", *ARCHITECTURES, title="registers / spilled bytes / shared")
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for r in rows:
        spilled = r["spill_store_bytes"] + r["spill_load_bytes"]
        text = f"{r['registers']} / {spilled} / {r['static_shared_bytes']}"
        cells.setdefault((r["source"], r["kernel"]), {})[r["architecture"]] = text
    for (source, kernel), by_architecture in cells.items():
        table.add_row(source, kernel, *(by_architecture[a] for a in ARCHITECTURES))
    console.print(table)


def _device(
    shapes: list[tuple[str, ExpertShape]], batches: list[int], repeats: int, seed: int
) -> dict[str, Any]:
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    bandwidth = bench_device.copy_bytes_per_s(cupy)
    name = properties["name"].decode()
    console.print(f"{name}: copies {bandwidth / 1e12:.2f} TB/s", markup=False)
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for model, shape in shapes:
        for tokens in batches:
            routing = bench_device.uniform_routing(rng, shape, tokens)
            rows += _rows(cupy, rng, (model, shape), routing, bandwidth, repeats)
    return {
        "device": name,
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "clock_khz": properties.get("clockRate"),
        "cupy": cupy.__version__,
        "copy_bytes_per_s": bandwidth,
        "repeats": repeats,
        "seed": seed,
        "rows": rows,
    }


def _rows(
    cupy: Any,
    rng: np.random.Generator,
    named: tuple[str, ExpertShape],
    routing: Routing,
    bandwidth: float,
    repeats: int,
) -> list[dict[str, Any]]:
    """torch, then every uniform width and a mix of 2..6 bits on every engine."""
    model, shape = named
    cache_bytes = int(cupy.cuda.Device().attributes["L2CacheSize"])
    blocks = 2 * shape.num_experts
    widths = {f"{q} bits": [q] * blocks for q in WIDTHS}
    widths["mixed 2..6 bits"] = rng.integers(2, 7, blocks).tolist()
    cases = [("bf16", "torch", [16] * blocks)]
    cases += [(case, name, bits) for case, bits in widths.items() for name in ENGINES]
    rows: list[dict[str, Any]] = []
    for case, engine, bits in cases:
        layer_bytes = bench_device.read_bytes(shape, routing, bits, ENGINES.get(engine))
        copies = bench_device.copies_for(layer_bytes, cache_bytes)
        floor_us = 1e6 * layer_bytes / bandwidth
        head = f"{model} batch {len(routing.expert_index)} {case} {engine}: floor {floor_us:.1f} us"
        times = _times(cupy, rng, (engine, shape, routing, bits), copies, repeats)
        cupy.get_default_memory_pool().free_all_blocks()
        if times is None:
            console.print(f"{head}; torch has no CUDA here", markup=False)
            continue
        low, median, high = np.percentile(times, [10, 50, 90]).tolist()
        console.print(
            f"{head}, median {median:.1f} us ({low:.1f}..{high:.1f}), "
            f"{100 * floor_us / median:.0f} % of the floor's bandwidth",
            markup=False,
        )
        rows.append(
            {
                "model": model,
                "tokens": len(routing.expert_index),
                "experts": len(routing.experts),
                "case": case,
                "engine": engine,
                "bytes": layer_bytes,
                "copies": copies,
                "floor_us": floor_us,
                "median_us": median,
                "p10_us": low,
                "p90_us": high,
            }
        )
    return rows


def _times(
    cupy: Any,
    rng: np.random.Generator,
    case: tuple[str, ExpertShape, Routing, list[int]],
    copies: int,
    repeats: int,
) -> list[float] | None:
    name, shape, routing, bits = case
    if name == "torch":
        return torch_microseconds(shape, routing, copies, repeats)
    engine = ENGINES[name]
    pages = bench_device.random_pages(cupy, rng, engine, shape, bits, copies)
    run = engine.prepare(cupy, shape, pages, routing)
    return bench_device.graph_microseconds(cupy, run, copies, repeats)


if __name__ == "__main__":
    app()
