"""The numbers that govern batching."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingSettings:
    """Limits of a step.

    Attributes:
        max_running: Most sequences with pages.
        prefill_tokens: Most tokens of prompts computed in a step; decoding comes on top.
    """

    max_running: int = 64
    prefill_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("max_running", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, found {getattr(self, name)}")
