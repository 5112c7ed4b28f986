"""Expert weights whose widths the precision policy moves during a run.

Policy, page table and ledger are the objects of ``policies/`` that the runtime drives as well; here
they meet a simulated link and the traffic's routing statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from models.routing_mass import RoutingMass, floor_bits, mass_multipliers
from models.streams import stream
from policies.catalog import precision_planner
from policies.orders import PrecisionDecision
from policies.precision import PrecisionPolicy
from policies.precision_log import LoggedPrecision
from policies.precision_state import PrecisionState
from policies.weight_page_ledger import PageLedger
from policies.weight_page_orders import PageOrders
from policies.weight_page_states import IN_FLIGHT
from policies.weight_page_table import WeightPageTable
from traces.decisions import DecisionLog
from twin.paged_weight_link import CopyLink
from twin.paged_weight_model import PagedWeightModel
from twin.paged_weight_reads import ExpertReads, by_block
from twin.paged_weight_weights import DoesNotFitError, History, too_large

Ints = NDArray[np.int64]


class MovingWeights:
    """Widths that the precision policy moves, carried out by the weight page table.

    Policy and table are asked at every boundary at which their answer can differ from "nothing":
    the policy when its margin crosses a watermark, is below the low one, or a plan is due; the
    table while a plan is open or a copy under way. With ``every_boundary`` they are asked at each,
    with the same orders.

    Attributes:
        table: The state machine of all blocks.
        decisions: How many decisions ordered something, by reason.
        moved_bytes: Bytes of copies that landed.
        wasted_bytes: Bytes of copies that failed or were not wanted any more.
    """

    def __init__(
        self,
        model: PagedWeightModel,
        planner: str,
        replication: int,
        *,
        history: History | None = None,
        log: DecisionLog | None = None,
        every_boundary: bool = False,
    ) -> None:
        """Start at the planner's widths for an arena filled up to the target watermark.

        Raises:
            DoesNotFitError: If the weights at their lowest width are larger than the arena.
        """
        settings = model.scenario.precision
        tables = model.tables()
        self._model = model
        self.ledger = PageLedger(model.arena_pages, history=history)
        self._policy_settings = model.policy_settings(planner)
        budget = int((1.0 - settings.target_share) * model.arena_pages) * model.page_bytes
        plan = precision_planner(planner).plan(tables, budget)
        if plan.bytes_ > model.arena_pages * model.page_bytes:
            raise DoesNotFitError(
                too_large(settings.min_bits, plan.bytes_ // model.page_bytes, model.arena_pages)
            )
        self.table = WeightPageTable(
            model.parts(settings.parent_bits, settings.min_bits),
            plan.bits,
            ledger=self.ledger,
            rules=model.movement_rules(),
            history=history,
        )
        self._tables = tables
        self._policy: PrecisionPolicy | LoggedPrecision = PrecisionPolicy(
            tables,
            arena_pages=model.arena_pages,
            page_bytes=model.page_bytes,
            settings=self._policy_settings,
        )
        self._low = self._pages_of_share(settings.low_share)
        self._high = self._pages_of_share(settings.high_share)
        if log is not None:
            self._policy = LoggedPrecision(self._policy, log)
        hardware = model.scenario.hardware
        self._link = CopyLink(
            hardware.link_bytes_per_s,
            latency_s=1e-6 * hardware.copy_latency_us,
            failure_share=hardware.copy_failure_share,
            rng=stream(model.scenario.run.seed, "copy faults", replication),
        )
        memory = model.time.rates.memory_bytes_per_s
        self._copying_slowdown = memory / max(memory - hardware.link_bytes_per_s, 0.1 * memory)
        self._part_bytes = model.part_bytes(settings.parent_bits, settings.min_bits).ravel()
        self._reads = ExpertReads(model, replication)
        self._reads.hold(self.table.bits)
        start = self._reads.traffic.masses(self._reads.traffic.long_run)
        self._calibrated_m2 = start[1]
        routing = model.scenario.routing
        self.mass = RoutingMass(
            model.sizes.layers,
            model.sizes.experts,
            half_life_tokens=routing.half_life_tokens,
            start=start,
        )
        self._tokens_unseen = 0
        self._no_prompt = np.ones(model.sizes.num_blocks)
        self._look_at_mass()
        self._every = every_boundary
        self._is_open = False  # a plan, a copy or a release is under way in the table
        self._zone: bool | None = None  # above the high mark when last told; None: tell again
        self._calm_from = 0
        self._found_nothing = False
        self._last_step = -1
        self._held_pages = self._desired_pages()
        self.decisions: dict[str, int] = {}
        self.moved_bytes = self.wasted_bytes = 0

    # --- what the engine calls ---

    def boundary(self, step: int, forecast: Callable[[], int], *, now: float) -> None:
        """See ``Weights``."""
        self._step_finished()
        if self._is_open or self._every:
            self._report_copies(step, now)
            self._carry_out(self.table.boundary(step), now)
            self._is_open = self._link.has_news or not self.table.at_rest
            self._held_pages = self._desired_pages()
        self._see_traffic(now)
        kv_pages = self.ledger.held_pages("kv")
        forecast_pages = forecast()
        margin = self.ledger.num_pages - kv_pages - self._held_pages - forecast_pages
        is_above = margin > self._high
        due = self._policy.next_wakeup()
        is_due = due is not None and now >= due
        if not (is_due or margin < self._low or is_above != self._zone or self._every):
            return
        if is_above != self._zone:
            self._zone, self._calm_from = is_above, step
        decision = self._policy.decide(self._state(step, forecast_pages), now=now)
        self._order(decision, step, now)
        if is_due:
            calm = is_above and step - self._calm_from >= self._policy_settings.calm_steps
            self._found_nothing = decision.orders.plan_id == 0 and (calm or not is_above)

    def allocation_failed(
        self,
        step: int,
        pages_needed: int,
        forecast: Callable[[], int],
        *,
        now: float,
        keeps_hot: bool = True,
    ) -> bool:
        """See ``Weights``."""
        state = self._state(step, forecast())
        if not keeps_hot:
            state = replace(state, hot_floor_bits=np.zeros_like(state.hot_floor_bits))
        decision = self._policy.on_allocation_failed(state, pages_needed, now=now)
        self._zone = None
        self._order(decision, step, now)
        return decision.pages_short == 0

    def step_built(self, step: int, tokens: int) -> None:
        """See ``Weights``."""
        self.table.step_built(step)
        self._last_step = step
        self._tokens_unseen += tokens
        self._found_nothing = False

    def expert_seconds(self, tokens: int) -> float:
        """See ``Weights``."""
        return self._reads.seconds(tokens, self.slowdown)

    def wakeup_s(self) -> float | None:
        """See ``Weights``: until a plan that was due found nothing to do and nothing is open."""
        if self._found_nothing and not self._is_open:
            return None
        return self._policy.next_wakeup()

    @property
    def slowdown(self) -> float:
        """See ``Weights``."""
        return self._copying_slowdown if self._link.is_busy else 1.0

    @property
    def mean_bits(self) -> float:
        """See ``Weights``."""
        return self._reads.mean_bits

    @property
    def damage(self) -> float:
        """See ``Weights``."""
        return self._reads.damage

    # --- the page table and the link ---

    def _step_finished(self) -> None:
        """The kernels of the step built last have run."""
        if self._last_step >= 0:
            self.table.step_finished(self._last_step)
            self._last_step = -1

    def _report_copies(self, step: int, now: float) -> None:
        landed, failed = self._link.ended(now)
        if len(landed):
            blocks, parts = np.divmod(landed, self.table.parts.num_parts)
            good = self.table.copies_landed(blocks, parts, step=step)
            size = self._part_bytes[landed]
            self.moved_bytes += int(size[good].sum())
            self.wasted_bytes += int(size[~good].sum())
        if len(failed):
            blocks, parts = np.divmod(failed, self.table.parts.num_parts)
            self.table.copies_failed(blocks, parts, step=step)
        if self._link.is_busy:
            blocks, parts = np.divmod(self._link.head, self.table.parts.num_parts)
            self._enqueued(blocks, parts, step)

    def _enqueued(self, blocks: Ints, parts: Ints, step: int) -> None:
        """A copy's time-out counts from when the link takes it up."""
        started = self.table.states.started_step[blocks, parts]
        fresh = started > step
        self.table.copies_enqueued(blocks[fresh], parts[fresh], step=step)

    def _carry_out(self, orders: PageOrders, now: float) -> None:
        if len(orders.blocks):
            self._reads.hold(self.table.bits)
        num_parts = self.table.parts.num_parts
        self._link.cancel(orders.cancels.blocks * num_parts + orders.cancels.parts)
        keys = orders.copies.blocks * num_parts + orders.copies.parts
        self.table.copies_queued(orders.copies.blocks, orders.copies.parts)
        self._link.put(keys, self._part_bytes[keys], now=now)

    def _order(self, decision: PrecisionDecision, step: int, now: float) -> None:
        orders = decision.orders
        if orders.plan_id == 0:
            return
        self.decisions[decision.reason] = self.decisions.get(decision.reason, 0) + 1
        blocks = np.concatenate([orders.drops.blocks, orders.raises.blocks])
        bits = np.concatenate([orders.drops.bits, orders.raises.bits])
        self._carry_out(self.table.open_plan(orders.plan_id, blocks, bits, step=step), now)
        self._is_open = True
        self._held_pages = self._desired_pages()

    # --- what the policy is told ---

    def _state(self, step: int, forecast_pages: int) -> PrecisionState:
        table = self.table
        copying = 0
        if self._is_open:
            copying = int(table.parts.pages[table.states.state == IN_FLIGHT].sum())
        return PrecisionState(
            step=step,
            bits=table.bits,
            desired_bits=table.desired,
            hot_floor_bits=self._hot_floor_bits,
            pinned=table.faults.pinned,
            retry_step=table.faults.retry_step,
            mass_multiplier=self._mass_multiplier,
            prompt_multiplier=self._no_prompt,
            kv_pages=self.ledger.held_pages("kv"),
            forecast_pages=forecast_pages,
            copying_bytes=copying * self._model.page_bytes,
        )

    def _see_traffic(self, now: float) -> None:
        """Count the tokens of the interval that ends, with the picks they made in it."""
        before = self._reads.traffic.now
        if not self._reads.advance(now):
            return
        tokens, self._tokens_unseen = self._tokens_unseen, 0
        if tokens:
            m1, m2 = self._reads.traffic.masses(before)
            for layer in range(len(m1)):
                self.mass.observe_sums(layer, tokens * m1[layer], tokens * m2[layer], tokens)
            self._look_at_mass()

    def _look_at_mass(self) -> None:
        routing = self._model.scenario.routing
        self._mass_multiplier = by_block(mass_multipliers(self.mass.m2, self._calibrated_m2))
        self._hot_floor_bits = by_block(
            floor_bits(self.mass.m1, coverage=routing.hot_coverage, hot_bits=routing.hot_bits)
        )

    def _desired_pages(self) -> int:
        level = self.table.desired - self._tables.bits[0]
        held = self._tables.bytes_[np.arange(len(level)), level]
        return int(held.sum()) // self._model.page_bytes

    def _pages_of_share(self, share: float) -> int:
        return int(np.ceil(share * self._model.arena_pages))
