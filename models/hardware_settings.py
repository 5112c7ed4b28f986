"""The ``[hardware]`` table of a scenario: a device, and how well kernels use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from models.hardware import Device, find_device
from models.plane_bytes import MAX_BITS
from models.strict_tables import (
    ScenarioError,
    require_not_negative,
    require_positive,
    require_within,
)

FULL_BITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDevice:
    """A device that the hardware table does not have, such as a measured machine.

    Attributes:
        name: What reports call it.
        memory_bytes: Device memory.
        copy_bytes_per_s: Memory bandwidth that a copy sustains.
        link_bytes_per_s: From where weights come.
        flops_per_s: Dense arithmetic at its peak.
        source: Provenance.
    """

    name: str
    memory_bytes: float
    copy_bytes_per_s: float
    link_bytes_per_s: float
    flops_per_s: float
    source: str = "the scenario"

    def __post_init__(self) -> None:
        require_within(
            "hardware.device",
            1e3,
            1e18,
            memory_bytes=self.memory_bytes,
            copy_bytes_per_s=self.copy_bytes_per_s,
            link_bytes_per_s=self.link_bytes_per_s,
            flops_per_s=self.flops_per_s,
        )

    @property
    def device(self) -> Device:
        """As one of the hardware table; nothing is known of decoding, so no roof binds."""
        return Device(
            name=self.name,
            memory_bytes=self.memory_bytes,
            peak_bytes_per_s=self.copy_bytes_per_s,
            copy_bytes_per_s=self.copy_bytes_per_s,
            link_bytes_per_s=self.link_bytes_per_s,
            link="memory",
            flops_per_s=self.flops_per_s,
            decode_roof=dict.fromkeys(range(2, MAX_BITS + 1), 1.0),
            source=self.source,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The device, and static estimates of how well kernels use it.

    Attributes:
        device: A name of the hardware table, or a table of its own.
        calibration: File of ``runtime profile`` that fills in what is not given here, the device
            among it.
        memory_gb: 10^9 bytes that the engine may use; None: all of the device's.
        reserve_gb: Of them for activations, workspaces and the driver.
        copy_gb_per_s: Memory bandwidth that a copy sustains; None: the device's.
        link_gb_per_s: Host to device; None: the device's.
        copy_latency_us: Start-up of one copy of a plane or table.
        copy_failure_share: Share of copies that fail.
        kernel_share: Share of the roof (bandwidth, or what decoding allows) that expert kernels
            on bit planes reach.
        bandwidth_share: Width -> share of the bandwidth, where it has been measured; replaces
            kernel_share times the device's decode roof. ``"16"``: plain weights.
        full_share: Share of the bandwidth of expert kernels on plain 16-bit weights.
        dense_share: The same of all other weights.
        attention_share: The same of reading the KV cache.
        compute_share: Share of peak arithmetic that many tokens reach.
        expert_compute_share: The same of routed experts; None: ``compute_share``.
        attention_compute_share: The same of attention; None: ``compute_share``.
        launch_us: One kernel launch within a captured graph.
        launches_per_layer: Kernels of a layer.
        step_overhead_us: Scheduling and sampling of a step.
    """

    device: str | OwnDevice
    calibration: str | None = None
    memory_gb: float | None = None
    reserve_gb: float = 2.0
    copy_gb_per_s: float | None = None
    link_gb_per_s: float | None = None
    copy_latency_us: float = 10.0
    copy_failure_share: float = 0.0
    kernel_share: float = 0.75
    bandwidth_share: Mapping[str, float] = field(default_factory=dict)
    full_share: float = 0.85
    dense_share: float = 0.85
    attention_share: float = 0.8
    compute_share: float = 0.5
    expert_compute_share: float | None = None
    attention_compute_share: float | None = None
    launch_us: float = 2.0
    launches_per_layer: float = 8.0
    step_overhead_us: float = 200.0

    def __post_init__(self) -> None:
        device = self.found_device
        table = "hardware"
        require_positive(
            table,
            memory_gb=self.memory_gb,
            copy_gb_per_s=self.copy_gb_per_s,
            link_gb_per_s=self.link_gb_per_s,
        )
        require_within(
            table,
            1e-6,
            1e6,
            memory_gb=self.memory_gb,
            copy_gb_per_s=self.copy_gb_per_s,
            link_gb_per_s=self.link_gb_per_s,
        )
        require_not_negative(
            table,
            reserve_gb=self.reserve_gb,
            copy_latency_us=self.copy_latency_us,
            launch_us=self.launch_us,
            launches_per_layer=self.launches_per_layer,
            step_overhead_us=self.step_overhead_us,
        )
        require_within(table, 0.0, 1.0, copy_failure_share=self.copy_failure_share)
        require_within(
            table,
            1e-3,
            1.0,
            kernel_share=self.kernel_share,
            full_share=self.full_share,
            dense_share=self.dense_share,
            attention_share=self.attention_share,
            compute_share=self.compute_share,
            expert_compute_share=self.expert_compute_share,
            attention_compute_share=self.attention_compute_share,
        )
        allowed = (*map(str, range(2, MAX_BITS + 1)), str(FULL_BITS))
        for width, share in self.bandwidth_share.items():
            if width not in allowed:
                raise ScenarioError(
                    f"[hardware.bandwidth_share] {width}: must be a width, "
                    f"one of {', '.join(allowed)}"
                )
            require_within("hardware.bandwidth_share", 1e-3, 1.0, **{width: share})
        memory_bytes = self.memory_bytes
        if self.memory_gb is not None and memory_bytes > device.memory_bytes:
            most = device.memory_bytes / 1e9
            raise ScenarioError(
                f"[hardware] memory_gb: must be <= {most:g}, all that {device.name} has, "
                f"found {self.memory_gb:g}"
            )
        if 1e9 * self.reserve_gb >= memory_bytes:
            raise ScenarioError(
                f"[hardware] reserve_gb: must be < memory_gb ({memory_bytes / 1e9:g}), "
                f"found {self.reserve_gb:g}"
            )

    @property
    def found_device(self) -> Device:
        """The device itself."""
        return find_device(self.device) if isinstance(self.device, str) else self.device.device

    @property
    def memory_bytes(self) -> float:
        """Bytes the engine may use."""
        if self.memory_gb is None:
            return self.found_device.memory_bytes
        return 1e9 * self.memory_gb

    @property
    def link_bytes_per_s(self) -> float:
        """Host to device."""
        if self.link_gb_per_s is None:
            return self.found_device.link_bytes_per_s
        return 1e9 * self.link_gb_per_s
