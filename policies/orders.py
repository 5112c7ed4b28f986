"""What a policy may answer: plain facts that either engine carries out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class AssignWorkers:
    """Order: request ``i`` of the batch takes a free slot of attention worker ``workers[i]``.

    Attributes:
        workers: [n] int64, worker ids in 0..r-1, in the order of the batch.
    """

    workers: NDArray[np.int64]


class BitWidths(NamedTuple):
    """Widths for some weight blocks.

    Attributes:
        blocks: [n] int64, block ids, each at most once.
        bits: [n] int64, the width each is to have.
    """

    blocks: NDArray[np.int64]
    bits: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PrecisionOrders:
    """Order: hold weight blocks at other widths.

    Drops move no data and commit at the next boundary; a drop of a block whose planes are still
    being copied also cancels what its new width does not need. Raises copy planes, in the order
    given, into pages that are free or that the drops give back.

    Attributes:
        plan_id: Number of the plan, rising; 0 when nothing is ordered.
        drops: Narrower widths, block ids ascending.
        raises: Wider widths, highest damage saved per byte first.
    """

    plan_id: int
    drops: BitWidths
    raises: BitWidths


@dataclass(frozen=True, slots=True, eq=False)
class PrecisionPlan:
    """A width for every weight block, and how good that is.

    Attributes:
        level: [num_blocks] int64, index into the widths.
        bits: [num_blocks] int64.
        bytes_: Bytes held, all blocks.
        damage: Damage in sum, multipliers included.
        lp_bound: No plan within the same floors, caps and bytes has less damage.
        gap: damage / lp_bound - 1.
        is_optimal: Whether it is proved that no plan has less damage (up to rounding).
        bytes_short: Bytes by which even the floors exceed the target; 0 when the target is met.
    """

    level: NDArray[np.int64]
    bits: NDArray[np.int64]
    bytes_: int
    damage: float
    lp_bound: float
    gap: float
    is_optimal: bool
    bytes_short: int


@dataclass(frozen=True, slots=True, eq=False)
class PrecisionDecision:
    """What the precision policy orders at one step boundary, and what it expects of it.

    Attributes:
        orders: Drops and raises; empty where nothing is to be done.
        reason: Why: memory is short (``shrink``), a KV allocation has failed (``emergency``),
            memory is plentiful (``restore``), better use of the same bytes (``exchange``).
        pages_short: Pages that lack with every block at its floor; preempt requests for them.
        bytes_: Bytes held once the orders are carried out; None where nothing was planned.
        damage: Damage then, multipliers included; None where nothing was planned.
        lp_bound: No widths of that many bytes have less damage, whatever had to be copied.
        gap: damage / lp_bound - 1.
    """

    orders: PrecisionOrders
    reason: Literal["none", "shrink", "emergency", "restore", "exchange"]
    pages_short: int = 0
    bytes_: int | None = None
    damage: float | None = None
    lp_bound: float | None = None
    gap: float | None = None
