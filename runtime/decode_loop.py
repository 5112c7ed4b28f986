"""Greedy decoding of many sequences in one arena, with widths that move between steps.

One step: widths commit and the policy speaks; waiting prompts are admitted while their pages can
be had; every running sequence gets room for its next token; one pass of the decoder. Pages that
the KV cache cannot get make the policy drop bits at once; if every block is at its floor, the
youngest sequence gives its pages up and is computed again later. A sequence that does not fit even
alone is refused, and the loop goes on with the others.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from models.kv_bytes import KvLayers
from policies.precision_forecast import HORIZON_STEPS, forecast_kv_pages
from runtime.decoder import Decoder, Experts, Span
from runtime.page_movement import PageMover
from runtime.paged_keys_values import PagedKeysValues
from runtime.precision_control import PrecisionControl


@dataclass(slots=True)
class Sequence:
    """One prompt and what is made of it.

    Attributes:
        number: Its id.
        tokens: Prompt and generated tokens.
        prompt_tokens: How many of them were given.
        max_tokens: Most tokens to generate, >= 1.
        computed: Tokens whose keys and values are held.
        preemptions: How often it had to start over.
    """

    number: int
    tokens: list[int]
    prompt_tokens: int
    max_tokens: int
    computed: int = 0
    preemptions: int = 0

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def is_done(self) -> bool:
        """Whether all tokens asked for are there."""
        return self.generated >= self.max_tokens


@dataclass(frozen=True, slots=True)
class StepReport:
    """Tokens computed and generated in a step; sequences finished, held back, preempted.

    ``refused`` are sequences that outgrew the arena alone, with every block at its floor.
    """

    step: int
    computed_tokens: int
    generated_tokens: int
    running: int
    held_back: int
    preempted: int
    finished: tuple[Sequence, ...]
    refused: tuple[Sequence, ...]


@dataclass(slots=True)
class DecodeLoop:
    """Waiting and running sequences of one model.

    Args:
        decoder: The model without its experts.
        cache: Keys and values.
        experts: The routed experts.
        control: Precision; None keeps the widths as they are.
        mover: Told which steps are built; None if the experts are not paged.
        clock: Seconds since the start of the run.
        max_running: Most sequences at a time.
        prefill_tokens: Most prompt tokens computed in a step.
    """

    decoder: Decoder
    cache: PagedKeysValues
    experts: Experts
    clock: Callable[[], float]
    control: PrecisionControl | None = None
    mover: PageMover | None = None
    max_running: int = 16
    prefill_tokens: int = 256
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    steps: int = 0
    _number: int = 0

    def add(self, prompt: Iterable[int], max_tokens: int) -> Sequence:
        """Queue a prompt.

        Raises:
            TypeError: If a token is no whole number.
            ValueError: If the prompt is empty, a token is unknown, or nothing is to be generated.
        """
        tokens = [operator.index(token) for token in prompt]
        vocabulary = self.decoder.config.vocabulary
        if not tokens or max_tokens < 1:
            raise ValueError("a prompt needs at least one token and max_tokens >= 1")
        if not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise ValueError(f"prompt: tokens must be within 0..{vocabulary - 1}")
        sequence = Sequence(self._number, tokens, len(tokens), max_tokens)
        self._number += 1
        self.waiting.append(sequence)
        return sequence

    def step(self) -> StepReport:
        """One pass over everything that can be computed now."""
        step = self.steps
        self.steps += 1
        if self.control is not None:
            self.control.boundary(step, self._forecast_pages(), now=self.clock())
        elif self.mover is not None:
            self.mover.boundary(step)
        spans, held_back, preempted, refused = self._spans(step)
        finished: list[Sequence] = []
        generated = 0
        if spans:
            logits = self.decoder.step([span for _, span in spans], self.cache, self.experts)
            for (sequence, span), token in zip(spans, logits.argmax(-1).tolist(), strict=True):
                sequence.computed += len(span.tokens)
                if sequence.computed == len(sequence.tokens):
                    sequence.tokens.append(token)
                    generated += 1
                    if sequence.is_done:
                        finished.append(sequence)
        if self.mover is not None:
            self.mover.step_built(step)
        for sequence in finished:
            self._leave(sequence)
        return StepReport(
            step=step,
            computed_tokens=sum(len(span.tokens) for _, span in spans),
            generated_tokens=generated,
            running=len(self.running) + len(finished),
            held_back=held_back,
            preempted=preempted,
            finished=tuple(finished),
            refused=tuple(refused),
        )

    def _spans(self, step: int) -> tuple[list[tuple[Sequence, Span]], int, int, list[Sequence]]:
        """Tokens to compute now, with their pages reserved; held back, preempted and refused."""
        spans: list[tuple[Sequence, Span]] = []
        held_back = preempted = 0
        refused: list[Sequence] = []
        budget = self.prefill_tokens
        index = 0
        while index < len(self.running) or (
            not held_back and not preempted and self._admit(budget)
        ):
            sequence = self.running[index]
            left = len(sequence.tokens) - sequence.computed
            count = left if left == 1 else min(left, budget)
            if count == 0:
                index += 1
                continue
            if self.cache.reserve(sequence.number, count):
                tokens = sequence.tokens[sequence.computed : sequence.computed + count]
                spans.append((sequence, Span(sequence.number, tokens)))
                budget -= count if left > 1 else 0
                index += 1
                continue
            if self._make_room(step, sequence, count):
                held_back += 1
                index += 1
            elif len(self.running) == 1:
                refused.append(self._leave(sequence))
            else:
                preempted += 1
                self._preempt(spans)
        return spans, held_back, preempted, refused

    def _admit(self, budget: int) -> bool:
        """Take the next waiting prompt, if there is a place and prefill left in this step."""
        if not self.waiting or len(self.running) >= self.max_running or budget == 0:
            return False
        self.running.append(self.waiting.popleft())
        return True

    def _make_room(self, step: int, sequence: Sequence, count: int) -> bool:
        """Ask the policy for pages; whether waiting for the next steps will bring them."""
        if self.control is None:
            return False
        needed = self.cache.pages_needed(sequence.number, count)
        decision = self.control.allocation_failed(
            step, needed, self._forecast_pages(), now=self.clock()
        )
        return decision.pages_short == 0

    def _preempt(self, spans: list[tuple[Sequence, Span]]) -> None:
        """The youngest running sequence gives up its pages and waits again."""
        victim = self._leave(self.running[-1])
        spans[:] = [pair for pair in spans if pair[0] is not victim]
        victim.computed = 0
        victim.preemptions += 1
        self.waiting.appendleft(victim)

    def _leave(self, sequence: Sequence) -> Sequence:
        """A sequence runs no more; its pages go back."""
        self.running.remove(sequence)
        if sequence.number in self.cache.sequences:
            self.cache.release(sequence.number)
        return sequence

    def _forecast_pages(self) -> int:
        admitted = self.running
        held = np.array([s.computed for s in admitted], dtype=np.int64)
        total = np.array([len(s.tokens) for s in admitted], dtype=np.int64)
        left = np.array([s.max_tokens - s.generated for s in admitted], dtype=np.int64)
        group = KvLayers(
            num_layers=self.cache.layers,
            token_bytes=self.cache.page_bytes // self.cache.tokens_per_page,
            window_tokens=None,
        )
        return forecast_kv_pages(
            [group],
            held_tokens=held,
            prompt_tokens_left=total - held,
            decode_tokens_left=left,
            horizon_steps=HORIZON_STEPS,
            page_bytes=self.cache.page_bytes,
            block_tokens=self.cache.tokens_per_page,
        )
