"""The next token of every sequence of a step.

Each row is decided by its own logits, settings and seed alone; the batch only saves work: all rows
share one search for the maximum, and rows that are plainly greedy need nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from runtime.engine.frames import FinishReason, Sampling, TokenLogprobs
from runtime.engine.logprobs import InvalidLogitsError, host_rows, token_logprobs
from runtime.engine.penalties import Penalties
from runtime.engine.sampling_filters import choose, uniform


class TokenGrammar(Protocol):
    """What restricts the tokens of one sequence; ``runtime.engine.grammar.GrammarState``."""

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and nothing may follow."""

    def mask(self) -> npt.NDArray[np.bool_]:
        """[vocabulary]: which tokens may come next. Raises ValueError where it cannot tell."""

    def accept(self, token: int) -> None:
        """Go on by one token. Raises ValueError where it may not come here."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one row brought.

    Attributes:
        token: The answer's next token; None: none (an end token, no token possible, an error).
        logprobs: Of ``token``, where asked for.
        finish: Set where the answer ends with this.
        stop_token: The end token that ended it; not in the answer.
        error: Why ``finish`` is "error": an ``InvalidLogitsError`` or a ``GrammarError``.
    """

    token: int | None = None
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: ValueError | None = None


class SequenceSampler:
    """One sequence's settings, and what the choice of its next token remembers.

    Keep it while the sequence waits or is computed again: it goes on where it was. One made anew
    is brought there by ``advance`` with the tokens of the answer so far.

    Args:
        sampling: The settings, ranges checked by the front end.
        vocabulary: Columns of the logits.
        eos_token_ids: The model's end tokens.
        prompt_tokens: For the repetition penalty.
        grammar: Fresh state of ``sampling.grammar``, or None.

    Raises:
        ValueError: If ``logit_bias`` names a token outside the vocabulary.
    """

    def __init__(
        self,
        sampling: Sampling,
        vocabulary: int,
        eos_token_ids: Iterable[int],
        prompt_tokens: Iterable[int],
        grammar: TokenGrammar | None = None,
    ) -> None:
        self.sampling = sampling
        self.vocabulary = vocabulary
        self.num_tokens = 0
        self._grammar = grammar
        # A grammar says by an end token that the answer is complete, so it always ends there.
        obeys_eos = grammar is not None or not sampling.ignore_eos
        self.end_tokens = frozenset(sampling.stop_token_ids) | (
            frozenset(eos_token_ids) if obeys_eos else frozenset()
        )
        inside = sorted(token for token in self.end_tokens if 0 <= token < vocabulary)
        self._end_ids = np.asarray(inside, dtype=np.intp)
        bias = sampling.logit_bias
        for token in bias:
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"logit_bias: token {token} is not in the vocabulary (0 to {vocabulary - 1})"
                )
        self._bias_ids = np.fromiter(bias.keys(), dtype=np.intp, count=len(bias))
        self._bias = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
        self._penalties: Penalties | None = None
        penalties = (sampling.repetition_penalty - 1.0, sampling.frequency_penalty)
        if any(penalties) or sampling.presence_penalty:
            self._penalties = Penalties(
                vocabulary,
                repetition=sampling.repetition_penalty,
                frequency=sampling.frequency_penalty,
                presence=sampling.presence_penalty,
                prompt_tokens=prompt_tokens,
            )
        self._always_raw = not (bias or self._penalties or grammar)

    @property
    def _changes_logits(self) -> bool:
        return not self._always_raw or self.num_tokens < self.sampling.min_tokens

    @property
    def needs_row(self) -> bool:
        """Whether the next token takes more than the place of the largest raw logit."""
        settings = self.sampling
        return settings.temperature > 0.0 or settings.logprobs is not None or self._changes_logits

    def advance(self, token: int) -> None:
        """Count a token of the answer.

        Raises:
            GrammarError: If the grammar does not allow it here.
        """
        self.num_tokens += 1
        if self._penalties is not None:
            self._penalties.add(token)
        if self._grammar is not None:
            self._grammar.accept(token)

    def choose(self, logits: npt.NDArray[np.float32]) -> int | None:
        """The next token by one row of raw logits [vocabulary]; None: none is possible.

        Changes neither the row nor the sequence's state.

        Raises:
            GrammarError: If the grammar went over its limits.
            InvalidLogitsError: If penalties or bias overflow.
        """
        if self._changes_logits:
            logits = self._changed(logits)
            highest = logits.max()
            if highest == -np.inf:
                return None
            if not np.isfinite(highest):
                raise InvalidLogitsError(f"the settings made the largest logit {highest}")
        settings = self.sampling
        if settings.temperature == 0.0:
            return int(logits.argmax())
        return choose(
            logits,
            temperature=settings.temperature,
            min_p=settings.min_p,
            top_k=settings.top_k,
            top_p=settings.top_p,
            share=uniform(settings.seed, self.num_tokens),
        )

    def _changed(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        changed = logits.copy()
        if self._bias_ids.size:
            changed[self._bias_ids] += self._bias
        if self.num_tokens < self.sampling.min_tokens:
            changed[self._end_ids] = -np.inf
        if self._penalties is not None:
            self._penalties.apply(changed)
        if self._grammar is not None:
            changed[~self._grammar.mask()] = -np.inf
        return changed

    def take(self, token: int | None, logprobs: TokenLogprobs | None) -> Sampled:
        """Make ``token`` the next one, and say whether the answer ends."""
        if token is None:
            return Sampled(finish="stop")
        if token in self.end_tokens:
            return Sampled(finish="stop", stop_token=token)
        self.advance(token)
        finish: FinishReason | None = None
        if self._grammar is not None and self._grammar.is_finished:
            finish = "stop"
        elif self.num_tokens >= self.sampling.max_tokens:
            finish = "length"
        return Sampled(token, logprobs, finish)


def sample(
    logits: torch.Tensor,
    samplers: Sequence[SequenceSampler],
    executor: Executor | None = None,
) -> list[Sampled]:
    """The next token of each sequence, whose samplers go on by it.

    A row whose logits are broken or whose grammar fails ends with "error"; the others don't notice.

    Args:
        logits: [n, vocabulary], float32, on any device; not changed.
        samplers: [n], of unfinished sequences.
        executor: Threads for the rows that need more than their maximum; None: one after another.
            The outcome is the same.

    Returns:
        [n].

    Raises:
        ValueError: If the shapes don't fit.
    """
    if logits.dim() != 2 or logits.shape[0] != len(samplers):
        raise ValueError(f"logits of shape {tuple(logits.shape)} for {len(samplers)} sequences")
    if not samplers:
        return []
    highest, places = _maxima(logits)
    extra: list[int] = []
    sampled: list[Sampled] = []
    for number, sampler in enumerate(samplers):
        if sampler.needs_row:
            extra.append(number)
            sampled.append(Sampled())
        else:
            sampled.append(_of_row(sampler, highest[number], places[number], None))
    if extra:
        chosen = logits if len(extra) == len(samplers) else logits[extra]
        spread = map if executor is None else executor.map
        outcomes = spread(
            lambda number, row: _of_row(samplers[number], highest[number], None, row),
            extra,
            host_rows(chosen),
        )
        for number, outcome in zip(extra, outcomes, strict=True):
            sampled[number] = outcome
    return sampled


def _maxima(logits: torch.Tensor) -> tuple[list[float], list[int]]:
    """Largest value and its first place in each row; a row with NaN has the value NaN."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # Vectorised, unlike torch's: 6 against 140 microseconds for 8 rows of 8,192.
        rows = logits.detach().contiguous().numpy()
        places = rows.argmax(axis=1)
        return rows[np.arange(places.size), places].tolist(), places.tolist()
    highest, first = logits.detach().max(dim=1)
    return highest.tolist(), first.tolist()


def _of_row(
    sampler: SequenceSampler,
    highest: float,
    place: int | None,
    row: npt.NDArray[np.float32] | None,
) -> Sampled:
    """One row's outcome: ``place`` decides where it is given, else the ``row`` of raw logits."""
    if not math.isfinite(highest):
        error = InvalidLogitsError(
            f"token {sampler.num_tokens} of the answer: the largest logit is {highest}, "
            "not a finite number"
        )
        return Sampled(finish="error", error=error)
    try:
        token = place if row is None else sampler.choose(row)
        logprobs: TokenLogprobs | None = None
        top = sampler.sampling.logprobs
        if row is not None and top is not None and token is not None:
            logprobs = token_logprobs(row, token, top)
        return sampler.take(token, logprobs)
    except ValueError as error:
        return Sampled(finish="error", error=error)
