"""Log probabilities of the model's raw logits, before any sampling setting changed them.

Row by row: a row's numbers depend on nothing else, and no more than a few rows of the vocabulary's
size exist at a time, however long the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from runtime.engine.frames import TokenLogprobs
from runtime.engine.sampling_filters import largest

LEAST_LOGPROB = -9999.0
"""What -inf is reported as: JSON has no infinity."""

_ROWS_AT_A_TIME = 16


class InvalidLogitsError(ValueError):
    """The model's logits of a row are NaN or infinite, so they say nothing about the next token."""


def host_rows(logits: torch.Tensor) -> Iterator[npt.NDArray[np.float32]]:
    """The rows of logits [n, vocabulary] in host memory, float32; from a device a few at a time.

    The rows of a tensor that is there already are views of it: not to be written to.
    """
    for first in range(0, logits.shape[0], _ROWS_AT_A_TIME):
        rows = logits[first : first + _ROWS_AT_A_TIME].detach()
        yield from rows.to(device="cpu", dtype=torch.float32).contiguous().numpy()


def token_logprobs(logits: npt.NDArray[np.float32], token: int, top: int) -> TokenLogprobs:
    """One token's log probability and rank, and the likeliest tokens beside it.

    Of equal logits the lowest id ranks first, so a token is in ``top`` exactly where its rank is
    at most ``top``.

    Args:
        logits: [vocabulary], raw.
        token: In the vocabulary.
        top: How many of the likeliest; 0: none.

    Raises:
        InvalidLogitsError: If no logarithm of probabilities exists.
    """
    highest = logits.max()
    if not np.isfinite(highest):
        raise InvalidLogitsError(f"the largest logit of a row is {highest}, not a finite number")
    with np.errstate(over="ignore"):  # a distance below float32's range has weight 0
        mass = np.exp(logits - highest).sum(dtype=np.float64)
    log_mass = float(np.log(mass))

    def logprob(place: int) -> float:
        # The distance first: taken off the largest logit, log_mass would be lost in its rounding.
        return max(float(logits[place]) - float(highest) - log_mass, LEAST_LOGPROB)

    own = logits[token]
    rank = 1 + np.count_nonzero(logits > own) + np.count_nonzero(logits[:token] == own)
    likeliest: tuple[tuple[int, float], ...] = ()
    if top > 0:
        places = largest(logits, top)
        places = places[np.argsort(-logits[places], kind="stable")]
        likeliest = tuple((int(place), logprob(int(place))) for place in places)
    return TokenLogprobs(int(token), logprob(token), int(rank), likeliest)


def prompt_logprobs(
    logits: torch.Tensor, next_tokens: Sequence[int], top: int
) -> list[TokenLogprobs]:
    """Log probabilities of the tokens that did follow.

    Args:
        logits: [n, vocabulary]: row i belongs to a position of the prompt.
        next_tokens: [n]: the token of the position after it.
        top: How many of the likeliest beside each.

    Raises:
        InvalidLogitsError: If a row has NaN or an infinite maximum.
        ValueError: If the lengths differ.
    """
    if logits.shape[0] != len(next_tokens):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(next_tokens)} tokens")
    return [
        token_logprobs(row, token, top)
        for row, token in zip(host_rows(logits), next_tokens, strict=True)
    ]
