"""One step after the other: what the policies order, carried out.

    boundary   copies that have ended, widths commit, the precision policy speaks
    schedule   the batching policy says who computes; pages are taken, loaded, given up
    forward    one pass of the model over all new tokens
    speak      tokens are chosen; who is done leaves

All calls come from one thread. Nothing here waits for a copy, but for one case: pages that only a
save still holds are awaited before anybody is preempted for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from policies.batching.orders import BatchOrders
from runtime.engine.answers import Answers
from runtime.engine.counts import Counts
from runtime.engine.frames import EngineStats, NewSequence, SequenceOutput
from runtime.engine.grammar import GrammarError
from runtime.engine.parts import EngineParts
from runtime.engine.prefixes import Prefixes
from runtime.engine.sampler import SequenceSampler
from runtime.engine.sequence import EngineSequence
from runtime.model.step import StepBatch

MAX_STALLED_STEPS: Final = 2_000


class EngineCore:
    """Sequences of one engine.

    Attributes:
        parts: Model, memory, policies.
        counts: Sums since the start.
        sequences: Number -> sequence, those that have not ended.
        is_starved: Whether the last step could compute nothing, though sequences are there.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.counts = Counts()
        self.sequences: dict[int, EngineSequence] = {}
        self._number_of: dict[str, int] = {}
        self._next_number = self._step = self._stalled = 0
        self.is_starved = False
        self._prefixes = Prefixes(parts, self.counts)
        self._answers = Answers(parts, self.counts)
        self._outputs: list[SequenceOutput] = []

    # --- sequences come and go ---------------------------------------------------------------

    def add(self, new: NewSequence) -> None:
        """A sequence arrives; what is wrong with it comes as its output."""
        problem = self._problem(new)
        if problem:
            self._fail(new.sequence_id, problem)
            return
        parts = self.parts
        try:
            grammar = None
            if new.sampling.grammar is not None:
                if parts.grammars is None:
                    raise GrammarError("grammar: the model has no tokenizer to restrict tokens by")
                grammar = parts.grammars.compile(new.sampling.grammar)
            sampler = SequenceSampler(
                new.sampling,
                vocabulary=parts.info.vocabulary,
                eos_token_ids=parts.info.eos_token_ids,
                prompt_tokens=new.prompt,
                grammar=grammar,
            )
            now, number = parts.clock(), self._next_number
            sequence = EngineSequence(number, new, list(new.prompt), sampler, now)
            sequence.keys = self._prefixes.keys_of(sequence)
        except ValueError as error:
            self._fail(new.sequence_id, str(error))
            return
        self._next_number += 1
        self.sequences[number] = sequence
        self._number_of[new.sequence_id] = number
        self.counts.prompt_tokens += sequence.prompt_tokens
        parts.batching.add(number, sequence.prompt_tokens, new.sampling.max_tokens, now=now)

    def abort(self, sequence_ids: Iterable[str]) -> None:
        """Nobody waits for these any more: their pages are free at once, nothing is said."""
        for sequence_id in sequence_ids:
            number = self._number_of.get(sequence_id)
            if number is not None:
                sequence = self.sequences[number]
                self.parts.batching.cancel(number, now=self.parts.clock())
                self._prefixes.save_all(sequence)
                self._leave(sequence)
                self.counts.aborted += 1

    @property
    def has_work(self) -> bool:
        """Whether a step could compute something."""
        return bool(self.sequences or self._outputs)

    # --- one step ----------------------------------------------------------------------------

    def step(self) -> list[SequenceOutput]:
        """One pass over everything that can be computed now; what it brought."""
        step = self._step
        self._step += 1
        self._boundary(step)
        orders = self._schedule(step)
        self.is_starved = not len(orders.sequences)
        if not self.is_starved:
            self._stalled = 0
            self._compute(orders)
        else:
            self.counts.step(0)
            self._stalled = self._stalled + 1 if orders.held_back else 0
        if self.parts.mover is not None:
            self.parts.mover.step_built(step)
        outputs, self._outputs = self._outputs, []
        return outputs

    def idle(self) -> None:
        """A boundary without a step, so that widths and copies get on while nobody asks."""
        step = self._step
        self._step += 1
        self._boundary(step)
        if self.parts.mover is not None:
            self.parts.mover.step_built(step)

    def fail_all(self, message: str) -> list[SequenceOutput]:
        """Every sequence ends with this error."""
        for sequence in list(self.sequences.values()):
            self.parts.batching.cancel(sequence.number, now=self.parts.clock())
            self._leave(sequence)
            self._fail(sequence.new.sequence_id, message)
        outputs, self._outputs = self._outputs, []
        return outputs

    def reset_prefix_cache(self) -> None:
        """Blocks stored so far are found by nobody any more."""
        if self.parts.prefix is not None:
            self.parts.prefix.reset()
        now = self.parts.clock()
        for sequence in self.sequences.values():
            sequence.keys = self._prefixes.keys_of(sequence)
            sequence.saved_blocks = 0
            self.parts.batching.cached(sequence.number, 0, now=now)  # of those that wait

    def stats(self) -> EngineStats:
        """Gauges and counters."""
        parts, counts, accounts = self.parts, self.counts, self.parts.accounts
        use = parts.arena.use()
        report = None if parts.mover is None else parts.mover.report()
        widest_kv = use.kv_pages + use.free_pages
        bits, damage = parts.quality()
        return EngineStats(
            step=counts.steps,
            running=len(accounts.ids) - int((accounts.loading > 0).sum()),
            waiting=accounts.num_waiting,
            loading=int((accounts.loading > 0).sum()),
            waiting_tokens=accounts.waiting_tokens,
            kv_pages=use.kv_pages,
            weight_pages=use.weight_pages,
            free_pages=use.free_pages,
            kv_usage=use.kv_pages / widest_kv if widest_kv else 0.0,
            mean_bits=bits,
            damage=damage,
            prompt_tokens_total=counts.prompt_tokens,
            cached_tokens_total=counts.cached_tokens,
            generated_tokens_total=counts.generated_tokens,
            computed_tokens_total=counts.computed_tokens,
            prefix_queries_total=counts.prefix_queries,
            prefix_hits_total=counts.prefix_hits,
            preemptions_total=counts.preemptions,
            refused_total=counts.refused,
            aborted_total=counts.aborted,
            finished_total=counts.finished,
            failed_steps_total=counts.failed_steps,
            planner_moves_total={} if parts.control is None else dict(parts.control.decisions),
            weight_drops_total=0 if report is None else report.drops,
            weight_raises_total=0 if report is None else report.raises,
            moved_bytes_total=0 if report is None else report.moved_bytes,
            store={} if parts.prefix is None else parts.prefix.counters(),
            step_tokens=counts.take_step_tokens(),
            decisions_logged=parts.log.num_calls,
        )

    # --- boundary and schedule ---------------------------------------------------------------

    def _boundary(self, step: int) -> None:
        parts = self.parts
        self._prefixes.poll(self.sequences)
        if parts.control is not None:
            parts.control.boundary(step, parts.forecast_pages(), now=parts.clock())
        elif parts.mover is not None:
            parts.mover.boundary(step)
        self._prefixes.look_up(self.sequences)

    def _schedule(self, step: int) -> BatchOrders:
        parts = self.parts
        orders = parts.batching.schedule(parts.arena.ledger.free_pages, now=parts.clock())
        self._carry_out(orders)
        while orders.pages_needed:
            coming = self._make_room(step, orders)
            free = parts.arena.ledger.free_pages
            orders = parts.batching.room(coming, free, now=parts.clock())
            self._carry_out(orders)
        self.counts.held_back += len(orders.held_back)
        return orders

    def _make_room(self, step: int, orders: BatchOrders) -> bool:
        """Whether the next steps bring the pages without preempting anybody."""
        parts, pages_needed = self.parts, orders.pages_needed
        if self._prefixes.finish_saves() and pages_needed <= parts.arena.ledger.free_pages:
            return True
        if parts.control is None or self._stalled > MAX_STALLED_STEPS:
            return False
        forecast = parts.forecast_pages()
        decision = parts.control.allocation_failed(step, pages_needed, forecast, now=parts.clock())
        if decision.pages_short and orders.is_alone:  # it was promised these pages
            decision = parts.control.allocation_failed(
                step, pages_needed, forecast, now=parts.clock(), keeps_hot=False
            )
        return decision.pages_short == 0

    def _carry_out(self, orders: BatchOrders) -> None:
        now, cache = self.parts.clock(), self.parts.cache
        for number in orders.preempted:
            sequence = self.sequences[number]
            self._prefixes.preempted(sequence)
            cache.release(number)
            sequence.preemptions += 1
            sequence.is_looked_up = False
            self.counts.preemptions += 1
        for number in orders.refused:
            sequence = self.sequences[number]
            self._leave(sequence)
            self.counts.refused += 1
            self._fail(
                sequence.new.sequence_id,
                f"the memory for keys and values cannot hold {len(sequence.tokens):,} tokens of "
                "one sequence, even with nothing else in it",
            )
        for number, load_tokens in orders.admitted:
            sequence = self.sequences[number]
            cache.add(number)
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now
                sequence.cached_tokens = load_tokens  # corrected when the load ends
        for number, added in zip(orders.growing.tolist(), orders.growth.tolist(), strict=True):
            if not cache.grow(number, added):
                self._prefixes.finish_saves()
                if not cache.grow(number, added):
                    raise RuntimeError(
                        f"{added} tokens of sequence {number} were ordered without pages for them"
                    )
        for number, load_tokens in orders.admitted:
            if load_tokens:
                self._prefixes.load(self.sequences[number], load_tokens)

    # --- forward and speak -------------------------------------------------------------------

    def _compute(self, orders: BatchOrders) -> None:
        parts = self.parts
        numbers, counts = orders.sequences.tolist(), orders.counts.tolist()
        running = [self.sequences[number] for number in numbers]
        starts = [parts.cache.tokens(number) for number in numbers]
        try:
            batch = _batch(running, starts, counts, orders.speaks.tolist())
            logits = parts.forward(batch)
            for number, count in zip(numbers, counts, strict=True):
                parts.cache.advance(number, count)
            spoken = self._answers.speak(running, batch, orders.speaks, logits)
        except Exception as error:  # one bad step must not end the engine
            self._failed_step(running, error)
            return
        self.counts.step(len(batch.tokens))
        self._outputs.extend(spoken.outputs)
        ended = [sequence.number for sequence in spoken.ended]
        parts.batching.step_done(ended, now=parts.clock())
        gone, failed = set(ended), {sequence.number for sequence in spoken.failed}
        for sequence in running:
            if sequence.number not in failed:  # whose keys and values may be none
                self._prefixes.computed(sequence, is_ended=sequence.number in gone)
        for sequence in spoken.ended:
            self._leave(sequence)
            self.counts.finished += 1

    def _failed_step(self, running: list[EngineSequence], error: Exception) -> None:
        self.counts.failed_steps += 1
        now = self.parts.clock()
        for sequence in running:
            self.parts.batching.cancel(sequence.number, now=now)
            self._leave(sequence)
            self._fail(
                sequence.new.sequence_id, f"the step failed: {type(error).__name__}: {error}"
            )
        self.parts.batching.step_done([], now=now)

    def _leave(self, sequence: EngineSequence) -> None:
        self._prefixes.leaves(sequence)
        if sequence.number in self.parts.cache.sequences:
            self.parts.cache.release(sequence.number)
        del self.sequences[sequence.number]
        del self._number_of[sequence.new.sequence_id]

    def _fail(self, sequence_id: str, message: str) -> None:
        self._outputs.append(
            SequenceOutput(sequence_id=sequence_id, finish_reason="error", error=message)
        )

    def _problem(self, new: NewSequence) -> str:
        """What is wrong with a new sequence, in words; empty if nothing is."""
        info, prompt = self.parts.info, new.prompt
        if new.sequence_id in self._number_of:
            return f"sequence {new.sequence_id}: its name is in use"
        if not prompt:
            return "prompt: must have at least one token"
        if not 0 <= min(prompt) <= max(prompt) < info.vocabulary:
            return f"prompt: token ids must be within 0..{info.vocabulary - 1}"
        if new.sampling.max_tokens < 1:
            return f"max_tokens: must be >= 1, found {new.sampling.max_tokens}"
        total = len(prompt) + new.sampling.max_tokens
        limit = min(info.context_tokens, info.kv_capacity_tokens)
        if total > limit:
            return (
                f"prompt and answer may have {limit:,} tokens together, found {len(prompt):,} and "
                f"max_tokens {new.sampling.max_tokens:,}"
            )
        return ""


def _batch(
    running: list[EngineSequence], starts: list[int], counts: list[int], speaks: list[bool]
) -> StepBatch:
    """The new tokens of a step, and the rows whose logits are needed."""
    tokens: list[int] = []
    first = [0]
    rows: list[int] = []
    for sequence, start, count, is_speaking in zip(running, starts, counts, speaks, strict=True):
        begin = len(tokens)
        tokens += sequence.tokens[start : start + count]
        first.append(len(tokens))
        if sequence.wants_prompt_logprobs:
            rows += range(begin, len(tokens))
        elif is_speaking:
            rows.append(len(tokens) - 1)
    return StepBatch(
        sequences=tuple(sequence.number for sequence in running),
        tokens=np.array(tokens, dtype=np.int64),
        first=np.array(first, dtype=np.int64),
        starts=np.array(starts, dtype=np.int64),
        logit_rows=np.array(rows, dtype=np.int64),
    )
