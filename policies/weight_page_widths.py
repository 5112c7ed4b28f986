"""Committed and desired widths of all blocks, the plans they belong to, the steps that read them.

Here the books are kept and written into the history; policies/weight_page_moves.py decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from policies.weight_page_history import Event
from policies.weight_page_parts import BlockParts, whole_numbers

NO_PLAN: Final = -1

Ints = NDArray[np.int64]


class BlockWidths:
    """Struct of arrays over blocks.

    Attributes:
        bits: [n] int64, committed widths q.
        desired: [n] int64, widths d that open plans lead to; q where none is open.
        lowest, highest: [n] int64, qmin and qmax.
        epoch: [n] int64, commits so far.
        plan_of: [n] int64, the open plan of a block, or NO_PLAN.
        open_plans: Plans that still have a block to commit or to give up, ascending.
        last_built: The newest step whose kernels have been fixed; -1 before the first.
        raises, drops: Blocks whose width has gone up, down, in sum.
    """

    def __init__(
        self,
        parts: BlockParts,
        bits: Ints,
        lowest: Ints | None,
        highest: Ints | None,
        history: Callable[[Event], None] | None,
    ) -> None:
        """Enter first widths; arguments as for ``WeightPageTable``.

        Raises:
            ValueError: If an array is no integer, of another length, or out of range.
        """
        n = parts.num_blocks
        self.bits = whole_numbers("bits", bits)
        self.lowest = whole_numbers(
            "lowest", np.full(n, parts.min_bits) if lowest is None else lowest
        )
        self.highest = whole_numbers(
            "highest", np.full(n, parts.parent_bits) if highest is None else highest
        )
        self._parts = parts
        self._check_ranges()
        self.desired = self.bits.copy()
        self.epoch = np.zeros(n, np.int64)
        self.plan_of = np.full(n, NO_PLAN, np.int64)
        self.open_plans: list[int] = []
        self.last_built = -1
        self.raises = self.drops = 0
        self._last_plan_id = NO_PLAN
        self._running: set[int] = set()
        self._history = history

    def open_plan(self, plan_id: int, blocks: Ints, bits: Ints) -> None:
        """Enter a plan.

        Raises:
            ValueError: If its id is not new, a block is unknown or named twice, or a width lies
                outside qmin..qmax.
        """
        if plan_id <= self._last_plan_id:
            raise ValueError(f"plan_id must be above {self._last_plan_id}, not {plan_id}")
        if blocks.ndim != 1 or blocks.shape != bits.shape:
            raise ValueError(f"blocks {blocks.shape} and bits {bits.shape} must be equal lists")
        if len(blocks) and (blocks.min() < 0 or blocks.max() >= len(self.bits)):
            raise ValueError(f"plan {plan_id} names a block outside 0..{len(self.bits) - 1}")
        if len(np.unique(blocks)) != len(blocks):
            raise ValueError(f"plan {plan_id} names a block twice")
        outside = (bits < self.lowest[blocks]) | (bits > self.highest[blocks])
        if np.any(outside):
            at = int(np.argmax(outside))
            raise ValueError(
                f"plan {plan_id} leads block {blocks[at]} to {bits[at]} bits, allowed "
                f"{self.lowest[blocks[at]]}..{self.highest[blocks[at]]}"
            )
        self._last_plan_id = plan_id
        self.open_plans.append(plan_id)
        if self._history is not None:
            want = dict(zip(blocks.tolist(), bits.tolist(), strict=True))
            self._history({"ev": "plan", "plan": plan_id, "want": want})

    def commit(self, blocks: Ints, bits: Ints) -> None:
        """Move committed widths; a block that has reached its desired width leaves its plan."""
        if self._history is not None:
            plans = self.plan_of[blocks]
            for plan in np.unique(plans).tolist():
                chosen = plans == plan
                moves = dict(zip(blocks[chosen].tolist(), bits[chosen].tolist(), strict=True))
                self._history({"ev": "commit", "plan": plan, "set": moves})
        self.raises += int(np.count_nonzero(bits > self.bits[blocks]))
        self.drops += int(np.count_nonzero(bits < self.bits[blocks]))
        self.bits[blocks] = bits
        self.epoch[blocks] += 1
        self.plan_of[blocks[bits == self.desired[blocks]]] = NO_PLAN

    def close_finished(self) -> None:
        """Close every plan that has no block left."""
        if not self.open_plans:
            return
        still = set(np.unique(self.plan_of).tolist())
        for plan in [plan for plan in self.open_plans if plan not in still]:
            self.open_plans.remove(plan)
            if self._history is not None:
                self._history({"ev": "close", "plan": plan})

    def step_built(self, step: int, blocks: Ints | None, bits: Ints | None) -> None:
        """A step's kernels are fixed; they read ``bits`` (the committed ones if None).

        Raises:
            RuntimeError: If steps go backwards.
        """
        if step <= self.last_built:
            raise RuntimeError(f"step {step} is built after step {self.last_built}")
        self.last_built = step
        self._running.add(step)
        if self._history is not None:
            names = np.arange(len(self.bits)) if blocks is None else np.asarray(blocks)
            read = self.bits[names] if bits is None else np.asarray(bits)
            use = dict(zip(names.tolist(), read.tolist(), strict=True))
            self._history({"ev": "launch", "k": step, "use": use})

    def step_finished(self, step: int) -> None:
        """Every kernel of a built step has run.

        Raises:
            RuntimeError: If the step is not running.
        """
        if step not in self._running:
            raise RuntimeError(f"step {step} is not running")
        self._running.remove(step)
        if self._history is not None:
            self._history({"ev": "retire", "k": step})

    @property
    def oldest_running(self) -> int:
        """The oldest step that has not finished; the next one to be built if none runs."""
        return min(self._running, default=self.last_built + 1)

    def check(self) -> None:
        """Recount.

        Raises:
            RuntimeError: If widths, plans and open plans do not fit together.
            ValueError: If a committed width lies outside qmin..qmax.
        """
        self._check_ranges()
        if np.any((self.plan_of == NO_PLAN) != (self.desired == self.bits)):
            raise RuntimeError("a block is on its way without a plan, or has a plan and no way")
        if set(self.plan_of[self.plan_of != NO_PLAN].tolist()) != set(self.open_plans):
            raise RuntimeError(f"open plans are {self.open_plans}, not those of the blocks")

    def _check_ranges(self) -> None:
        shape = (self._parts.num_blocks,)
        if not self.bits.shape == self.lowest.shape == self.highest.shape == shape:
            raise ValueError(f"bits, lowest and highest must have the shape {shape}")
        low, high = self._parts.min_bits, self._parts.parent_bits
        fits = (low <= self.lowest) & (self.lowest <= self.bits)
        fits &= (self.bits <= self.highest) & (self.highest <= high)
        if not fits.all():
            block = int(np.argmin(fits))
            raise ValueError(
                f"block {block}: need {low} <= qmin {self.lowest[block]} <= bits "
                f"{self.bits[block]} <= qmax {self.highest[block]} <= {high}"
            )
