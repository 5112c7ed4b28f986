"""Seconds of the stages of one microbatch, and the intervals they took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from models.bundle import Bundle


class StageInterval(NamedTuple):
    """One stage that one resource worked on, for a timeline.

    ``lane`` is ``attention 0`` .. ``attention r-1``, ``link to ffn``, ``ffn`` or
    ``link to attention``.
    """

    lane: str
    start_s: float
    end_s: float
    microbatch: int
    stage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Stage seconds of a bundle, for batches of any size.

    A step passes L equal layers with the same loads. Simulating ``simulated_layers`` of them, each
    standing for L / simulated_layers, keeps the seconds of a step and of every stage's share.

    Attributes:
        bundle: Coefficients and B.
        attention_per_ffn: r.
        simulated_layers: Layers that are played one by one, 1..L.
    """

    bundle: Bundle
    attention_per_ffn: int
    simulated_layers: int

    def __post_init__(self) -> None:
        if not 1 <= self.simulated_layers <= self.bundle.num_layers:
            raise ValueError(
                f"simulated_layers must be one of 1..{self.bundle.num_layers} (num_layers), "
                f"found {self.simulated_layers!r}"
            )

    @property
    def layers_each(self) -> float:
        """Layers of the model that one simulated layer stands for."""
        return self.bundle.num_layers / self.simulated_layers

    def ffn_s(self, live_slots: int) -> float:
        """FFN seconds of one layer for the live slots of all workers."""
        return self.bundle.coefficients.ffn_s(live_slots)

    def round_trip_s(self, live_slots: int, fullest_worker: int) -> float:
        """Seconds of one layer during which the link is taken by one microbatch, both ways."""
        c = self.bundle.coefficients
        tokens = live_slots if c.communication == "bundle" else fullest_worker
        return c.alpha_communication * tokens + c.beta_communication

    def one_way_s(self, live_slots: int, fullest_worker: int) -> float:
        """Seconds of one layer from sending to receiving: as given, else half the round trip."""
        if self.bundle.one_way_s is not None:
            return self.bundle.one_way_s
        return 0.5 * self.round_trip_s(live_slots, fullest_worker)


def default_simulated_layers(bundle: Bundle) -> int:
    """One layer under ``barrier``, where that is exact; up to four under ``pingpong``."""
    return 1 if bundle.semantics == "barrier" else min(bundle.num_layers, 4)
