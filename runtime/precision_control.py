"""Between two steps: what the precision policy is told, and its orders carried out.

The policy, the page table and the arena's ledger are the objects of ``policies/``; here they meet
the mover, the router's statistics and the wall clock.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from models.routing_mass import RoutingMass, floor_bits, mass_multipliers
from policies.orders import PrecisionDecision
from policies.precision_state import PrecisionState, level_of_bits
from policies.precision_tables import BlockTables
from policies.weight_page_states import IN_FLIGHT
from runtime.page_arena import PageArena
from runtime.page_movement import PageMover

Floats = NDArray[np.float64]
T = TypeVar("T", bound=np.generic)


class Precision(Protocol):
    """``policies.precision.PrecisionPolicy``, logged or not."""

    def decide(self, state: PrecisionState, *, now: float) -> PrecisionDecision:
        """Orders for the boundary before the next step."""

    def on_allocation_failed(
        self, state: PrecisionState, pages_needed: int, *, now: float
    ) -> PrecisionDecision:
        """Drops at once."""


class PrecisionControl:
    """Drives mover and policy from the engine's one thread.

    Attributes:
        mass: Routing mass of the traffic; the engine's experts report to ``observe``.
        decisions: How many decisions ordered something, by reason.
    """

    def __init__(
        self,
        policy: Precision,
        mover: PageMover,
        arena: PageArena,
        *,
        layers: int,
        experts: int,
        calibrated_mass: tuple[Floats, Floats] | None = None,
        hot_coverage: float = 0.5,
        hot_bits: int = 4,
        tables: BlockTables | None = None,
        block_weights: NDArray[np.int64] | None = None,
    ) -> None:
        """Start from the calibration's routing mass.

        Args:
            policy: Told every boundary.
            mover: Carries out its orders.
            arena: Shared by weights and KV.
            layers: L.
            experts: E of every layer; blocks are numbered (layer * E + expert) * 2 + module.
            calibrated_mass: [L, E] m1 and m2 of the calibration; without them routing mass does
                not change the damage, and nothing is hot until traffic has been seen.
            hot_coverage: Share of a layer's mass that its hot experts hold.
            hot_bits: Least width of hot experts.
            tables: Damage of every block and width, for ``quality``.
            block_weights: [2 L E] weights of every block, for ``quality``; all alike if None.

        Raises:
            ValueError: If the mover's blocks are not those of L x E experts.
        """
        if mover.tables.num_blocks != 2 * layers * experts:
            raise ValueError(
                f"{layers} layers of {experts} experts have {2 * layers * experts} blocks, "
                f"the mover has {mover.tables.num_blocks}"
            )
        self._policy, self._mover, self._arena = policy, mover, arena
        self._calibrated_m2 = None if calibrated_mass is None else calibrated_mass[1]
        self._hot_coverage, self._hot_bits = hot_coverage, hot_bits
        self.mass = RoutingMass(layers, experts, start=calibrated_mass)
        self._seen: list[tuple[int, NDArray[np.int32], NDArray[np.float32]]] = []
        self.prompt_multiplier = np.ones(mover.tables.num_blocks)
        self.decisions: dict[str, int] = {}
        self._tables = tables
        blocks = mover.tables.num_blocks
        self._block_weights = np.ones(blocks) if block_weights is None else block_weights

    def quality(self) -> tuple[float, float]:
        """Average bits per expert weight, and damage of the committed widths (0.0 if unknown)."""
        bits = self._mover.tables.bits.astype(np.int64)
        mean_bits = float(np.average(bits, weights=self._block_weights))
        if self._tables is None:
            return mean_bits, 0.0
        level = level_of_bits(self._tables, bits, "bits")
        return mean_bits, float(self._tables.damage[np.arange(len(bits)), level].sum())

    def damage_at(self, bits: int) -> float:
        """Damage of all blocks at one width, or the nearest there is; 0.0 if unknown."""
        if self._tables is None:
            return 0.0
        level = int(np.argmin(np.abs(np.array(self._tables.bits) - bits)))
        return float(self._tables.damage[:, level].sum())

    def observe(self, layer: int, experts: NDArray[np.int32], gate: NDArray[np.float32]) -> None:
        """One layer's routing of a step; counted when the last layer has reported.

        Weights that are no numbers count as none: they are those of a sequence that fails.
        """
        if any(layer == before for before, _, _ in self._seen):
            self._seen.clear()  # the step before failed half way
        self._seen.append((layer, experts, np.where(np.isfinite(gate), gate, np.float32(0.0))))
        if len(self._seen) < len(self.mass.m1):
            return
        seen = sorted(self._seen, key=lambda entry: entry[0])
        self._seen.clear()
        if len({index.shape for _, index, _ in seen}) == 1:
            self.mass.observe_layers(
                np.stack([entry[1] for entry in seen]), np.stack([entry[2] for entry in seen])
            )
            return
        for place, (_, index, weights) in enumerate(seen):  # the last layer may see fewer tokens
            self.mass.observe(place, index, weights)

    def boundary(self, step: int, forecast_pages: int, *, now: float) -> PrecisionDecision:
        """Commit what is ready, then let the policy speak.

        Args:
            step: The step that is built next.
            forecast_pages: Pages the KV cache will need soon.
            now: Seconds since the run's start.
        """
        self._mover.boundary(step)
        decision = self._policy.decide(self.state(step, forecast_pages), now=now)
        return self._carry_out(decision, step)

    def allocation_failed(
        self,
        step: int,
        pages_needed: int,
        forecast_pages: int,
        *,
        now: float,
        keeps_hot: bool = True,
    ) -> PrecisionDecision:
        """The KV cache asked for pages that are not there; drops only, at once.

        Without ``keeps_hot`` hot experts fall like all others: the last resort.
        """
        state = self.state(step, forecast_pages)
        if not keeps_hot:
            state = replace(state, hot_floor_bits=np.zeros_like(state.hot_floor_bits))
        decision = self._policy.on_allocation_failed(state, pages_needed, now=now)
        return self._carry_out(decision, step)

    def state(self, step: int, forecast_pages: int) -> PrecisionState:
        """What the policy is told now."""
        table = self._mover.table
        copying = table.parts.pages[table.states.state == IN_FLIGHT].sum()
        multiplier = np.ones(self._mover.tables.num_blocks)
        if self._calibrated_m2 is not None:
            multiplier = _by_block(mass_multipliers(self.mass.m2, self._calibrated_m2))
        floors = floor_bits(self.mass.m1, coverage=self._hot_coverage, hot_bits=self._hot_bits)
        return PrecisionState(
            step=step,
            bits=table.bits,
            desired_bits=table.desired,
            hot_floor_bits=_by_block(floors),
            pinned=table.faults.pinned,
            retry_step=table.faults.retry_step,
            mass_multiplier=multiplier,
            prompt_multiplier=self.prompt_multiplier,
            kv_pages=self._arena.ledger.held_pages("kv"),
            forecast_pages=forecast_pages,
            copying_bytes=int(copying) * self._arena.page_bytes,
        )

    def _carry_out(self, decision: PrecisionDecision, step: int) -> PrecisionDecision:
        if decision.orders.plan_id:
            self.decisions[decision.reason] = self.decisions.get(decision.reason, 0) + 1
            self._mover.plan(decision.orders, step=step)
        return decision


def _by_block(by_expert: NDArray[T]) -> NDArray[T]:
    """[L, E] values as [2 L E]: both matrices of an expert get its value."""
    return np.repeat(by_expert.ravel(), 2)
