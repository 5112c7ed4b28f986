"""What the batching policy orders for one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def _none() -> Ints:
    return np.zeros(0, dtype=np.int64)


class Admission(NamedTuple):
    """A sequence that leaves the queue.

    Attributes:
        sequence: Its number.
        load_tokens: Leading tokens whose keys and values are to be loaded into its pages; it
            computes nothing until ``loaded`` is told. 0: it starts at once.
    """

    sequence: int
    load_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class BatchOrders:
    """A step, or the part of it up to somebody who lacks pages; carried out in this order.

    Attributes:
        preempted: Sequences that give all pages up and wait again, at the front.
        refused: Sequences that lack pages even alone, with everything else given up: they end.
        admitted: Sequences that leave the queue.
        growing: [g] sequences that get pages, in this order.
        growth: [g] tokens that the pages are for, beyond those held: to compute or to load.
        pages_needed: Above 0: the next one lacks so many pages. Carry out the above, ask for room
            and tell ``room`` the answer. 0: the orders are complete, and the rest counts.
        is_alone: Who lacks them is the only one that runs: it ends if they do not come.
        sequences: [n] those that compute, in order of admission.
        counts: [n] tokens of each, >= 1.
        speaks: [n] bool, whether its last token is computed, so that it gets a new one.
        held_back: Sequences that wait for pages that are on their way.
    """

    preempted: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    admitted: tuple[Admission, ...] = ()
    growing: Ints = field(default_factory=_none)
    growth: Ints = field(default_factory=_none)
    pages_needed: int = 0
    is_alone: bool = False
    sequences: Ints = field(default_factory=_none)
    counts: Ints = field(default_factory=_none)
    speaks: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    held_back: tuple[int, ...] = ()
