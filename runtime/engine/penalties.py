"""Repetition, frequency and presence penalties of one sequence: sparse, its own tokens only."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class Penalties:
    """Counts of the tokens one sequence has seen, and what they take off its logits.

    Repetition looks at prompt and answer, frequency and presence at the answer alone.

    Args:
        vocabulary: Tokens outside it (placeholders in a prompt) count for nothing.
        repetition: > 0; 1: off.
        frequency: Taken off per occurrence; 0: off.
        presence: Taken off once; 0: off.
        prompt_tokens: Read only where repetition needs them.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        repetition: float,
        frequency: float,
        presence: float,
        prompt_tokens: Iterable[int],
    ) -> None:
        self._vocabulary = vocabulary
        self._repetition = np.float32(repetition)
        self._frequency = np.float32(frequency)
        self._presence = np.float32(presence)
        seen = dict.fromkeys(prompt_tokens) if repetition != 1.0 else {}
        ids = [token for token in seen if 0 <= token < vocabulary]
        self._place_by_token = {token: place for place, token in enumerate(ids)}
        self._ids = np.asarray(ids or [0], dtype=np.intp)
        self._counts = np.zeros(self._ids.size, dtype=np.float32)

    def add(self, token: int) -> None:
        """Count a token of the answer."""
        place = self._place_by_token.get(token)
        if place is None:
            place = len(self._place_by_token)
            self._place_by_token[token] = place
            if place == self._ids.size:
                self._ids = np.resize(self._ids, 2 * place)
                self._counts = np.concatenate([self._counts, np.zeros(place, dtype=np.float32)])
            self._ids[place] = token
        self._counts[place] += 1

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        """Change ``logits`` [vocabulary] in place.

        Source:
            Repetition: Keskar et al., CTRL (2019), with negative logits multiplied; frequency and
            presence: OpenAI's API reference.
        """
        num_seen = len(self._place_by_token)
        ids = self._ids[:num_seen]
        values = logits[ids]
        if self._repetition != 1.0:
            # The smaller branch of np.where may overflow where it isn't chosen.
            with np.errstate(over="ignore"):
                values = np.where(values > 0, values / self._repetition, values * self._repetition)
        counts = self._counts[:num_seen]
        values -= self._frequency * counts
        values -= self._presence * (counts > 0)
        logits[ids] = values
