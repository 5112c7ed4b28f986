"""Devices by name: memory, bandwidths, arithmetic, and where the numbers come from."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from models.strict_tables import ScenarioError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        name: What reports call it.
        memory_bytes: Device memory.
        peak_bytes_per_s: Memory bandwidth of the datasheet.
        copy_bytes_per_s: What a large copy sustains; kernels are measured against it.
        link_bytes_per_s: Host to device, sustained.
        link: Kind of that link.
        flops_per_s: Dense bf16 multiply-adds, two operations each.
        decode_roof: Width -> largest share of ``copy_bytes_per_s`` at which the arithmetic of the
            device can decode bit planes of that width; at most 1. A static estimate.
        source: Provenance.
    """

    name: str
    memory_bytes: float
    peak_bytes_per_s: float
    copy_bytes_per_s: float
    link_bytes_per_s: float
    link: str
    flops_per_s: float
    decode_roof: Mapping[int, float]
    source: str


@functools.cache
def devices() -> Mapping[str, Device]:
    """Name -> device, in the order of the file."""
    table = json.loads((resources.files("models") / "hardware.json").read_bytes())
    found = {}
    for entry in table["devices"]:
        roof = {int(bits): float(share) for bits, share in entry.pop("decode_roof").items()}
        found[entry["name"]] = Device(decode_roof=roof, **entry)
    return found


def find_device(name: str) -> Device:
    """The device of that name, in any case.

    Raises:
        ScenarioError: If there is none; the message lists all.
    """
    by_lower = {known.lower(): device for known, device in devices().items()}
    if device := by_lower.get(name.lower()):
        return device
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    raise ScenarioError(
        f"[hardware] device: must be one of {', '.join(devices())}, found {name!r}"
        + (f" (did you mean {by_lower[close[0]].name}?)" if close else "")
    )
