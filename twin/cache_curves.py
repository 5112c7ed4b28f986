"""Hit rates of eviction policies against the size of the cache, with Belady's bound above them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.hardware import Device, find_device
from models.llm_catalog import load_llm
from models.llm_shape import LlmShape
from models.strict_tables import ScenarioError
from policies.catalog import EVICTION
from traces.environment import commit, versions
from twin.cache_cells import BOUND, Cell, all_cell_hits
from twin.cache_costs import BlockCosts, block_costs
from twin.cache_requests import CacheRequests
from twin.cache_sizes import DEFAULT_SIZES, CacheSize, resolve_sizes
from twin.cache_workload import CacheWorkload
from twin.progress import OnProgress

DEFAULT_MODEL, DEFAULT_DEVICE, DEFAULT_MFU = "Llama-3.1-8B", "A100-80", 0.5
PREFIX_CACHE = "prefix-cache"
"""``kind`` of the summary."""
MEASURES = ("block_hit_share", "token_hit_share", "saved_share")
BEST_WITHIN = 0.0005  # a share nearer than that to the largest is level with it


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheQuestion:
    """Which curves are asked for.

    Attributes:
        policies: Names of the catalog of eviction policies; empty for all of them.
        sizes: As ``resolve_sizes`` reads them.
        with_bound: Also Belady's bound; it holds all requests in memory as plain integers.
        model: Of the catalog, or a ``config.json``: it says what a block takes and costs.
        device: Of the hardware table.
        mfu: Share of the device's peak that prefill reaches, 0..1.
        token_bytes: Bytes of keys and values per token in the model's place, or None.
        jobs: Processes; None for one a core.
    """

    policies: tuple[str, ...] = ()
    sizes: tuple[str, ...] = DEFAULT_SIZES
    with_bound: bool = True
    model: str = DEFAULT_MODEL
    device: str = DEFAULT_DEVICE
    mfu: float = DEFAULT_MFU
    token_bytes: int | None = None
    jobs: int | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.policies if name not in EVICTION]
        if unknown:
            raise ScenarioError(
                f"--policy: must be one of {', '.join(EVICTION)}, found {unknown[0]!r}"
            )
        if not self.sizes:
            raise ScenarioError("--size: at least one size is needed, found none")
        if self.jobs is not None and self.jobs < 1:
            raise ScenarioError(f"--jobs: must be >= 1, found {self.jobs}")

    def check(self) -> None:
        """Fail before a workload is read, where the question is wrong whatever the workload.

        Raises:
            ScenarioError: If a size or a number is out of range or the device is unknown.
            HfConfigError: If the model is unknown.
        """
        costs = block_costs(
            load_llm(self.model),
            _device(self.device),
            mfu=self.mfu,
            block_tokens=1,
            token_bytes=self.token_bytes,
        )
        resolve_sizes(self.sizes, num_distinct=1, block_bytes=costs.block_bytes)

    @property
    def names(self) -> tuple[str, ...]:
        """The policies to simulate, each once, in the order of the question or the catalog."""
        return tuple(dict.fromkeys(self.policies or EVICTION))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCurves:
    """A question with everything looked up: what is left is the simulation.

    Attributes:
        question: As it was asked.
        workload: Whose requests.
        shape, device: Model and device by their names.
        costs: Of a block.
        sizes: Smallest first.
    """

    question: CacheQuestion
    workload: CacheWorkload
    shape: LlmShape
    device: Device
    costs: BlockCosts
    sizes: tuple[CacheSize, ...]


def prepare_curves(question: CacheQuestion, workload: CacheWorkload) -> PreparedCurves:
    """Look up model and device, and count the sizes in blocks.

    Raises:
        ScenarioError: If a size or a number is out of range or the device is unknown.
        HfConfigError: If the model is unknown.
    """
    shape, device = load_llm(question.model), _device(question.device)
    costs = block_costs(
        shape,
        device,
        mfu=question.mfu,
        block_tokens=workload.requests.block_tokens,
        token_bytes=question.token_bytes,
    )
    sizes = resolve_sizes(
        question.sizes,
        num_distinct=workload.requests.num_distinct,
        block_bytes=costs.block_bytes,
    )
    return PreparedCurves(
        question=question,
        workload=workload,
        shape=shape,
        device=device,
        costs=costs,
        sizes=sizes,
    )


def _device(name: str) -> Device:
    try:
        return find_device(name)
    except ScenarioError as error:  # which speaks of a scenario file
        raise ScenarioError(str(error).replace("[hardware] device", "--device")) from None


def run_curves(
    question: CacheQuestion, workload: CacheWorkload, *, on_progress: OnProgress | None = None
) -> dict[str, Any]:
    """Simulate every policy at every size.

    Returns:
        JSON-ready: ``workload``, ``model``, ``sizes``, ``curves`` (policy -> one row a size),
        ``bound`` (the same or None), ``unbounded``, ``best`` (per size), ``share_of_bound``,
        ``warnings``, ``versions``, ``commit``.

    Raises:
        ScenarioError: If the question does not fit the workload.
        HfConfigError: If the model is unknown.
    """
    prepared = prepare_curves(question, workload)
    names = question.names
    with_bound = (BOUND,) if question.with_bound else ()
    cells = [Cell(name, size.blocks) for name in (*with_bound, *names) for size in prepared.sizes]
    rows: dict[Cell, dict[str, Any]] = {}
    for cell, hits in all_cell_hits(workload.requests, prepared.costs, cells, jobs=question.jobs):
        rows[cell] = hit_figures(workload.requests, prepared.costs, hits)
        if on_progress is not None:
            on_progress(f"{cell.policy}, {cell.blocks:,} blocks", len(rows), len(cells))
    curves = {name: [rows[Cell(name, size.blocks)] for size in prepared.sizes] for name in names}
    bound = (
        [rows[Cell(BOUND, size.blocks)] for size in prepared.sizes] if question.with_bound else None
    )
    return _summary(prepared, curves, bound)


def hit_figures(
    requests: CacheRequests, costs: BlockCosts, hits: NDArray[np.int64]
) -> dict[str, Any]:
    """What those leading hits [n] amount to.

    Returns:
        ``hit_blocks`` and its share of all prompt blocks; ``hit_tokens`` and its share of all
        prompt tokens (a last block may be part full); ``saved_s``, the seconds of prefill
        arithmetic those tokens would have cost, and its share of all prompts'.
    """
    tokens = requests.hit_tokens(hits)
    saved_s, total_s = costs.saved_s(tokens), costs.saved_s(requests.prompt_tokens)
    return {
        "hit_blocks": int(hits.sum()),
        "block_hit_share": int(hits.sum()) / requests.num_references,
        "hit_tokens": int(tokens.sum()),
        "token_hit_share": int(tokens.sum()) / int(requests.prompt_tokens.sum()),
        "saved_s": saved_s,
        "saved_share": saved_s / total_s,
    }


def best_policies(
    curves: Mapping[str, Sequence[Mapping[str, Any]]], measure: str
) -> list[list[str]]:
    """For each size the policies with the largest share, or within ``BEST_WITHIN`` of it."""
    found = []
    for at in range(min(len(rows) for rows in curves.values())):
        values = {name: rows[at][measure] for name, rows in curves.items()}
        most = max(values.values())
        found.append([name for name, value in values.items() if value >= most - BEST_WITHIN])
    return found


def share_of_bound(
    curves: Mapping[str, Sequence[Mapping[str, Any]]], bound: Sequence[Mapping[str, Any]]
) -> dict[str, float | None]:
    """Policy -> mean over sizes of its block hits per hit of the bound; None where it has none."""
    shares: dict[str, float | None] = {}
    for name, rows in curves.items():
        ratios = [
            row["hit_blocks"] / above["hit_blocks"]
            for row, above in zip(rows, bound, strict=True)
            if above["hit_blocks"]
        ]
        shares[name] = sum(ratios) / len(ratios) if ratios else None
    return shares


def _summary(
    prepared: PreparedCurves,
    curves: Mapping[str, list[dict[str, Any]]],
    bound: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    requests, costs = prepared.workload.requests, prepared.costs
    distinct = requests.num_distinct
    return {
        "kind": PREFIX_CACHE,
        "name": prepared.workload.name,
        "workload": {
            **prepared.workload.facts(),
            "num_requests": len(requests),
            "num_references": requests.num_references,
            "num_generated_blocks": len(requests.generated_ids),
            "num_distinct_blocks": distinct,
            "block_tokens": requests.block_tokens,
            "prompt_tokens": int(requests.prompt_tokens.sum()),
            "prefill_s": costs.saved_s(requests.prompt_tokens),
        },
        "model": {
            "name": prepared.shape.name,
            "token_bytes": costs.token_bytes,
            "block_bytes": costs.block_bytes,
            "device": prepared.device.name,
            "mfu": prepared.question.mfu,
        },
        "sizes": [
            {
                "asked": size.asked,
                "blocks": size.blocks,
                "bytes": size.blocks * costs.block_bytes,
                "share_of_distinct": size.blocks / distinct,
            }
            for size in prepared.sizes
        ],
        "curves": dict(curves),
        "bound": bound,
        "unbounded": hit_figures(requests, costs, requests.unbounded_hits()),
        "best": {measure: best_policies(curves, measure) for measure in MEASURES},
        "share_of_bound": None if bound is None else share_of_bound(curves, bound),
        "warnings": _warnings(prepared),
        "versions": versions(),
        "commit": commit(),
    }


def _warnings(prepared: PreparedCurves) -> list[str]:
    requests = prepared.workload.requests
    found = list(prepared.workload.notes)
    asked = len(set(prepared.question.sizes))
    if asked > len(prepared.sizes):
        found.append(
            f"{asked} sizes were asked for, {len(prepared.sizes)} remain: the others come to the "
            "same number of blocks"
        )
    short = [size for size in prepared.sizes if size.blocks < requests.longest_chain]
    if short:
        found.append(
            f"the longest request has {requests.longest_chain:,} blocks: caches of "
            f"{', '.join(size.asked for size in short)} cannot hold it and keep its first blocks"
        )
    windowed = [a for a in prepared.shape.layers if a.attention.window_tokens is not None]
    if windowed:
        found.append(
            f"{len(windowed)} of {len(prepared.shape.layers)} layers of {prepared.shape.name} have "
            "a sliding window: bytes and seconds here take every layer to keep and see all tokens"
        )
    return found
