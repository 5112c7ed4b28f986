"""From the logits of a step to what is said of its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.engine.counts import Counts
from runtime.engine.frames import SequenceOutput
from runtime.engine.logprobs import prompt_logprobs
from runtime.engine.parts import EngineParts
from runtime.engine.sampler import Sampled, sample
from runtime.engine.sequence import EngineSequence
from runtime.model.step import StepBatch


class Spoken(NamedTuple):
    """What a step brought: outputs, the sequences that have ended with theirs, and in error."""

    outputs: list[SequenceOutput]
    ended: list[EngineSequence]
    failed: list[EngineSequence]


class Answers:
    """Chooses tokens and words the outputs."""

    def __init__(self, parts: EngineParts, counts: Counts) -> None:
        self._clock, self._counts = parts.clock, counts

    def speak(
        self,
        running: Sequence[EngineSequence],
        batch: StepBatch,
        speaks: NDArray[np.bool_],
        logits: torch.Tensor,
    ) -> Spoken:
        """Tokens of those whose last token was computed.

        Args:
            running: [n] sequences of the batch, in its order.
            batch: What was computed.
            speaks: [n] who gets a token.
            logits: [m, vocabulary] of ``batch.logit_rows``.
        """
        stops = np.searchsorted(batch.logit_rows, batch.first[1:]).tolist()
        begin = 0
        speaking: list[EngineSequence] = []
        rows: list[int] = []
        for at, (sequence, stop) in enumerate(zip(running, stops, strict=True)):
            if sequence.wants_prompt_logprobs and stop > begin:
                self._score(sequence, int(batch.starts[at]), logits[begin:stop])
            if speaks[at]:
                speaking.append(sequence)
                rows.append(stop - 1)
            begin = stop
        if not speaking:
            return Spoken([], [], [])
        chosen = logits if len(rows) == len(logits) else logits[rows]
        sampled = sample(chosen, [sequence.sampler for sequence in speaking])
        now = self._clock()
        outputs = [
            self._output(sequence, result, now)
            for sequence, result in zip(speaking, sampled, strict=True)
        ]
        reasons = [output.finish_reason for output in outputs]
        return Spoken(
            outputs,
            [one for one, reason in zip(speaking, reasons, strict=True) if reason is not None],
            [one for one, reason in zip(speaking, reasons, strict=True) if reason == "error"],
        )

    def _score(self, sequence: EngineSequence, start: int, logits: torch.Tensor) -> None:
        """Log probabilities of the prompt's tokens behind the rows that were computed."""
        top = sequence.new.sampling.prompt_logprobs
        assert top is not None
        known = len(sequence.prompt_logprobs)  # of tokens 1 to known
        stop = min(start + len(logits), sequence.prompt_tokens - 1)
        first = max(start, known)  # rows before were scored ahead of a preemption
        if first < stop:
            following = sequence.tokens[first + 1 : stop + 1]
            rows = logits[first - start : stop - start]
            sequence.prompt_logprobs += prompt_logprobs(rows, following, top)

    def _output(self, sequence: EngineSequence, result: Sampled, now: float) -> SequenceOutput:
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        if result.token is not None:
            sequence.tokens.append(result.token)
            self._counts.generated_tokens += 1
        is_first, sequence.is_first_output = sequence.is_first_output, False
        is_last = result.finish is not None
        return SequenceOutput(
            sequence_id=sequence.new.sequence_id,
            tokens=() if result.token is None else (result.token,),
            logprobs=() if result.logprobs is None else (result.logprobs,),
            prompt_logprobs=tuple(sequence.prompt_logprobs) if is_first else (),
            finish_reason=result.finish,
            stop_token=result.stop_token,
            error="" if result.error is None else str(result.error),
            cached_tokens=sequence.cached_tokens if is_first else 0,
            preemptions=sequence.preemptions if is_last else 0,
            times=sequence.times(now) if is_last else None,
        )
