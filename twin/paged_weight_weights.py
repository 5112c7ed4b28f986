"""Expert weights during a run: what the engine asks of them, and widths that never move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from models.moe_step_time import FULL_BITS
from policies.weight_page_history import Event
from policies.weight_page_ledger import PageLedger
from policies.weight_page_table import MovementRules, WeightPageTable
from twin.paged_weight_model import PagedWeightModel
from twin.paged_weight_reads import ExpertReads

History = Callable[[Event], None]


class DoesNotFitError(ValueError):
    """The weights alone are larger than the arena."""


class Weights(Protocol):
    """What the engine asks of its expert weights."""

    ledger: PageLedger

    def boundary(self, step: int, forecast: Callable[[], int], *, now: float) -> None:
        """Between two steps: commit, free, plan."""

    def allocation_failed(
        self,
        step: int,
        pages_needed: int,
        forecast: Callable[[], int],
        *,
        now: float,
        keeps_hot: bool = True,
    ) -> bool:
        """Whether the pages will be there in the next steps without preempting anybody.

        Without ``keeps_hot`` hot experts fall like all others: the last resort.
        """

    def step_built(self, step: int, tokens: int) -> None:
        """A step reads the widths committed now, for so many tokens."""

    def expert_seconds(self, tokens: int) -> float:
        """Of the experts in a step of so many tokens."""

    def wakeup_s(self) -> float | None:
        """When an idle engine should pass a boundary; None: nothing will happen by itself."""

    @property
    def slowdown(self) -> float:
        """Factor on memory time because copies use bandwidth."""

    @property
    def mean_bits(self) -> float:
        """Bits per expert weight, committed."""

    @property
    def damage(self) -> float:
        """Of all blocks at the widths committed, under the traffic of now."""


class FixedWeights:
    """One width for all blocks, for ever: what a static deployment holds."""

    slowdown = 1.0

    def __init__(
        self,
        model: PagedWeightModel,
        bits: int,
        replication: int,
        *,
        history: History | None = None,
    ) -> None:
        """Take the pages of the weights: planes and the table in use, or plain weights.

        Raises:
            DoesNotFitError: If there are not enough.
        """
        self.ledger = PageLedger(model.arena_pages, history=history)
        self._reads = ExpertReads(model, replication)
        widths = np.full(model.sizes.num_blocks, bits, np.int64)
        if bits == FULL_BITS:
            needed = model.full_pages
            if self.ledger.take(needed, "weights") is None:
                raise DoesNotFitError(too_large(bits, needed, model.arena_pages))
        else:
            needed = int(model.held_pages([bits], "active", bits).sum())
            if needed > model.arena_pages:
                raise DoesNotFitError(too_large(bits, needed, model.arena_pages))
            WeightPageTable(
                model.parts(bits, bits),
                widths,
                ledger=self.ledger,
                rules=MovementRules(tables="active"),
                history=history,
            )
        self._reads.hold(widths)

    def boundary(self, step: int, forecast: Callable[[], int], *, now: float) -> None:
        """Nothing moves."""
        self._reads.advance(now)

    def allocation_failed(
        self,
        step: int,
        pages_needed: int,
        forecast: Callable[[], int],
        *,
        now: float,
        keeps_hot: bool = True,
    ) -> bool:
        """Nothing will come."""
        return False

    def step_built(self, step: int, tokens: int) -> None:
        """Nothing is kept."""

    def expert_seconds(self, tokens: int) -> float:
        """See ``Weights``."""
        return self._reads.seconds(tokens, 1.0)

    def wakeup_s(self) -> float | None:
        """Never."""
        return None

    @property
    def mean_bits(self) -> float:
        """See ``Weights``."""
        return self._reads.mean_bits

    @property
    def damage(self) -> float:
        """See ``Weights``; 0 for plain weights."""
        return self._reads.damage


def too_large(bits: int, needed: int, pages: int) -> str:
    """What the error says."""
    return f"weights of {bits} bits take {needed:,} pages, the arena has {pages:,}"
