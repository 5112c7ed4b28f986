"""The joint law of prompt and output lengths, as weighted pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPairs:
    """A law of (P, D): prompt tokens and output tokens of one request, kept together.

    Attributes:
        prompt_tokens: [k] int64, >= 0.
        output_tokens: [k] int64, >= 1.
        weight: [k] float64 > 0, sums to 1.
        num_requests: Requests the law was estimated from, for standard errors; None for a law
            that is known exactly (a generator's).
        name: What it is called in reports.
    """

    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    weight: NDArray[np.float64]
    num_requests: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        k = len(self.prompt_tokens)
        if k == 0:
            raise ValueError("length law is empty: at least one (prompt, output) pair is needed")
        if len(self.output_tokens) != k or len(self.weight) != k:
            raise ValueError(
                "prompt_tokens, output_tokens and weight differ in length: "
                f"{k}, {len(self.output_tokens)}, {len(self.weight)}"
            )
        if int(self.prompt_tokens.min()) < 0:
            raise ValueError(f"prompt_tokens must be >= 0, found {int(self.prompt_tokens.min())}")
        if int(self.output_tokens.min()) < 1:
            raise ValueError(f"output_tokens must be >= 1, found {int(self.output_tokens.min())}")
        if not bool(np.all(np.isfinite(self.weight))) or float(self.weight.min()) <= 0.0:
            raise ValueError("weights must be finite and > 0")

    @classmethod
    def from_pairs(
        cls,
        prompt_tokens: ArrayLike,
        output_tokens: ArrayLike,
        weight: ArrayLike | None = None,
        *,
        num_requests: int | None = None,
        name: str = "",
    ) -> Self:
        """A law from pairs; weights are scaled to sum to 1, equal where none are given."""
        prompts = np.asarray(prompt_tokens, dtype=np.int64)
        outputs = np.asarray(output_tokens, dtype=np.int64)
        if weight is None:
            scaled = np.full(len(prompts), 1.0 / max(1, len(prompts)))
        else:
            raw = np.asarray(weight, dtype=np.float64)
            total = float(raw.sum())
            scaled = raw / total if total > 0 else raw
        return cls(
            prompt_tokens=prompts,
            output_tokens=outputs,
            weight=scaled,
            num_requests=num_requests,
            name=name,
        )

    @classmethod
    def from_requests(cls, prompt_tokens: ArrayLike, output_tokens: ArrayLike) -> Self:
        """The empirical law of observed requests: one pair a request, equal weights."""
        prompts = np.asarray(prompt_tokens, dtype=np.int64)
        return cls.from_pairs(prompts, output_tokens, num_requests=len(prompts))

    def sample(
        self, rng: np.random.Generator, size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """``size`` independent requests: prompt tokens [size], output tokens [size]."""
        index = self._draw(rng, self.weight, size)
        return self.prompt_tokens[index], self.output_tokens[index]

    def sample_in_service(
        self, rng: np.random.Generator, size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """``size`` requests as met in always-full slots at a random step.

        A request is found with probability proportional to its output length (it holds its slot
        that long) and its age is uniform on 0..D-1.

        Returns:
            Prompt tokens [size], output tokens [size], age [size] in decode steps.
        """
        biased = self.weight * self.output_tokens
        index = self._draw(rng, biased / biased.sum(), size)
        outputs = self.output_tokens[index]
        age = np.minimum((rng.random(size) * outputs).astype(np.int64), outputs - 1)
        return self.prompt_tokens[index], outputs, age

    @staticmethod
    def _draw(
        rng: np.random.Generator, probability: NDArray[np.float64], size: int
    ) -> NDArray[np.int64]:
        cumulative = np.cumsum(probability)
        u = rng.random(size) * cumulative[-1]
        index: NDArray[np.int64] = np.searchsorted(cumulative, u, side="right").astype(np.int64)
        return np.minimum(index, len(cumulative) - 1)
