"""What was measured of an engine on a machine, as the tables of a scenario take it.

Part of a calibration file (``engine``). A scenario that names the file in ``[hardware]`` or
``[prefix]`` gets these numbers where it does not give its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from models.hardware_settings import Hardware, OwnDevice
from models.prefix_settings import ClusterLinks, PrefillGpu, ProductStore


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRatesMeasured:
    """How well the engine uses the device: fields of ``[hardware]`` by the same names.

    Shares are of 16-bit bytes, whatever the weights are stored as, since that is what the twin
    counts; those of quantized experts are of the bytes of planes and tables.
    """

    dense_share: float
    attention_share: float
    compute_share: float
    launch_us: float
    launches_per_layer: float
    step_overhead_us: float
    bandwidth_share: Mapping[str, float] = field(default_factory=dict)
    expert_compute_share: float | None = None
    attention_compute_share: float | None = None
    copy_latency_us: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillMeasured:
    """Prefill as ``models.prefix_costs.PrefillCost`` describes it.

    Attributes:
        mfu: Share of the device's ``flops_per_s``.
        forward_s: Fixed seconds of a forward pass.
        memory_bytes_per_s: At which weights are read at least.
    """

    mfu: float
    forward_s: float
    memory_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMeasured:
    """A place of the prefix store, by wall time: seconds = request_s + bytes / bytes_per_s.

    Attributes:
        load_bytes_per_s, save_bytes_per_s: Into pages of the engine, and out of them.
        load_request_s, save_request_s: Fixed seconds of a call.
        lookup_s: Seconds of a lookup.
    """

    load_bytes_per_s: float
    save_bytes_per_s: float
    load_request_s: float
    save_request_s: float
    lookup_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitQuality:
    """How well a line or roofline describes a part, and where it was measured.

    Attributes:
        unit: What ``min`` and ``max`` count: ``tokens`` or ``bytes``.
        warning: Why it should not be trusted; None: nothing is known against it.
    """

    points: int
    r2: float
    median_relative_error: float
    max_relative_error: float
    unit: str
    min: float
    max: float
    warning: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the numbers come from; no date, so that equal measurements are equal files.

    Attributes:
        cpu: Model of the processor.
        threads: Of the kernels.
        clock: ``wall`` or ``cpu`` seconds; the prefix store's places are always by wall time.
        versions: Of the product and what it computes with.
        experts: ``none``, ``plain`` or ``quantized``.
        dtype: Of the other weights, keys and values.
        rounds: Interleaved rounds, of which medians were taken.
    """

    cpu: str
    threads: int
    clock: str
    versions: Mapping[str, str]
    experts: str
    dtype: str
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasured:
    """One kind of step, the median of all rounds.

    Attributes:
        sequences, added, held: Sequences, and of each the new tokens and those cached before.
        bits: Width of the experts; 0: not quantized.
        seconds: Of the step's forward pass.
        attention_s: Of reading keys and values, all layers.
        experts_s: Of routed experts, all layers.
        attention_block_s, ffn_s: With projections and norms, and of all feed-forward, all layers.
        expert_bytes: Of the distinct experts that were read, all layers.
        spread: Interquartile range over median, of ``seconds``.
    """

    sequences: int
    added: int
    held: int
    bits: int
    seconds: float
    attention_s: float
    experts_s: float
    attention_block_s: float
    ffn_s: float
    expert_bytes: float
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """All of it.

    Attributes:
        device: The machine as a device of ``[hardware]``.
        rates: Of the engine's steps.
        prefill: Of whole prompts; None where it was not measured.
        tiers: ``memory``, ``ssd``, ``served`` -> speeds; those that were measured.
        fits: Part -> quality.
        provenance: Of the numbers.
        steps: What was fitted.
    """

    device: OwnDevice
    rates: StepRatesMeasured
    provenance: Provenance
    prefill: PrefillMeasured | None = None
    tiers: Mapping[str, TierMeasured] = field(default_factory=dict)
    fits: Mapping[str, FitQuality] = field(default_factory=dict)
    steps: Sequence[StepMeasured] = ()

    def __post_init__(self) -> None:
        Hardware(**{**self._hardware(), "device": self.device})
        tables = self.prefix_tables()
        PrefillGpu(**tables["gpu"])
        ClusterLinks(**tables["links"])
        ProductStore(**tables["product"])

    def hardware_table(self) -> dict[str, Any]:
        """Keys of ``[hardware]``."""
        return {"device": _given(self.device), **self._hardware()}

    def _hardware(self) -> dict[str, Any]:
        rates = _given(self.rates)
        rates["bandwidth_share"] = dict(self.rates.bandwidth_share)
        return rates

    def prefix_tables(self) -> dict[str, dict[str, Any]]:
        """Keys of ``[gpu]``, ``[links]`` and ``[product]``; what was not measured is left out."""
        gpu: dict[str, Any] = {
            "flops_per_s": self.device.flops_per_s,
            "memory_bytes": self.device.memory_bytes,
            "memory_bytes_per_s": self.device.copy_bytes_per_s,
        }
        if self.prefill is not None:
            gpu |= {
                "mfu": self.prefill.mfu,
                "forward_s": self.prefill.forward_s,
                "memory_bytes_per_s": self.prefill.memory_bytes_per_s,
            }
        links: dict[str, Any] = {}
        product: dict[str, Any] = {}
        if memory := self.tiers.get("memory"):
            links["host_to_device_bytes_per_s"] = memory.load_bytes_per_s
            product["lookup_s"] = memory.lookup_s
        if served := self.tiers.get("served"):
            links["client_bytes_per_s"] = served.load_bytes_per_s
            links["rpc_s"] = served.load_request_s
            product["lookup_s"] = served.lookup_s
        if ssd := self.tiers.get("ssd"):
            links["ssd_bytes_per_s"] = ssd.load_bytes_per_s
        return {"gpu": gpu, "links": links, "product": product}


def _given(table: Any) -> dict[str, Any]:
    """Fields that are known."""
    values = {item.name: getattr(table, item.name) for item in dataclasses.fields(table)}
    return {name: value for name, value in values.items() if value is not None}


def profile_content(profile: EngineProfile) -> dict[str, Any]:
    """Plain tables of a profile that ``build_table`` reads back to an equal one."""
    content: dict[str, Any] = _without_unknown(dataclasses.asdict(profile))
    return content


def _without_unknown(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {str(k): _without_unknown(v) for k, v in node.items() if v is not None}
    if isinstance(node, list | tuple):
        return [_without_unknown(value) for value in node]
    return node
