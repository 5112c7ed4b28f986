"""Rotary positions: how fast every pair of a head turns, and one step's cosines and sines.

Source:
    ``modeling_rope_utils.py`` of Hugging Face transformers 5.24; YaRN is arXiv 2309.00071.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

RotaryKind = Literal["default", "linear", "llama3", "yarn", "proportional"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary positions of a layer; lengths in tokens, all else without unit.

    Attributes:
        kind: Rule by which the frequencies are stretched.
        base: Base of the frequencies (theta).
        head_dim: Numbers of a head, even.
        factor: Stretch, of all kinds but ``default``.
        share: Part of the head that turns, of ``proportional``.
        original_tokens: Length of context before the stretch, of ``llama3`` and ``yarn``.
        low_frequency_factor: Of ``llama3``.
        high_frequency_factor: Of ``llama3``.
        beta_fast: Turns within the original context above which nothing is stretched, of ``yarn``.
        beta_slow: Turns below which all is stretched, of ``yarn``.
        truncate: Whether ``yarn`` rounds the pairs at both ends of its ramp to whole numbers.
        amplitude: Factor of cosines and sines.
    """

    kind: RotaryKind = "default"
    base: float
    head_dim: int
    factor: float = 1.0
    share: float = 1.0
    original_tokens: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0

    def frequencies(self) -> torch.Tensor:
        """[head_dim / 2] float32, radians per token of every pair."""
        dim = self.head_dim
        if self.kind == "proportional":
            turning = int(self.share * dim // 2)
            plain = _plain(self.base, 2 * turning, dim)
            still = torch.zeros(dim // 2 - turning)
            return torch.cat([plain, still]) / self.factor
        plain = _plain(self.base, dim, dim)
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            return self._llama3(plain)
        if self.kind == "yarn":
            return self._yarn()
        return plain

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        low, high = self.low_frequency_factor, self.high_frequency_factor
        turns = self.original_tokens / (2 * math.pi / plain)
        smooth = (turns - low) / (high - low)
        between = (1 - smooth) * plain / self.factor + smooth * plain
        stretched = torch.where(turns < low, plain / self.factor, between)
        return torch.where(turns > high, plain, stretched)

    def _yarn(self) -> torch.Tensor:
        dim, base = self.head_dim, self.base
        wavelengths = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        first, last = (
            dim * math.log(self.original_tokens / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        if first == last:
            last += 0.001
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
        kept = 1 - ramp
        return 1.0 / (self.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _plain(base: float, stop: int, dim: int) -> torch.Tensor:
    return 1.0 / (base ** (torch.arange(0, stop, 2, dtype=torch.float32) / dim))


class RotaryTables:
    """Cosines and sines of one step's positions, for layers of equal ``Rotary``.

    Args:
        rotary: Of these layers.
        device: Where the tables are made.
    """

    def __init__(self, rotary: Rotary, device: torch.device) -> None:
        frequencies = rotary.frequencies()
        self._frequencies = torch.cat([frequencies, frequencies]).to(device)
        sign = torch.ones(rotary.head_dim)
        sign[: rotary.head_dim // 2] = -1
        self._sign = sign.to(device)
        self._amplitude = rotary.amplitude

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines, and sines with the sign of what they multiply.

        Args:
            positions: [T] float32, exact below 2**24.

        Returns:
            Two of [T, 1, head_dim] float32.
        """
        angles = positions[:, None] * self._frequencies
        cosines, sines = angles.cos(), angles.sin_().mul_(self._sign)
        if self._amplitude != 1.0:
            cosines, sines = cosines * self._amplitude, sines * self._amplitude
        return cosines[:, None], sines[:, None]


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn every pair (i, i + head_dim / 2) of each head.

    Args:
        x: [T, heads, head_dim] float32.
        cosines: [T, 1, head_dim] float32.
        sines: [T, 1, head_dim] float32, negative in the first half.

    Returns:
        [T, heads, head_dim] float32, a new contiguous tensor.
    """
    swapped = torch.roll(x, x.shape[-1] // 2, -1).mul_(sines)
    return swapped.add_(x * cosines)
