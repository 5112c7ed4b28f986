"""What the parts of a decoder's layers take: each is wrapped, and its seconds are added up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from runtime.model.attention import Attention
from runtime.model.decoder import Decoder
from runtime.model.experts import Experts
from runtime.model.step import StepBatch
from runtime.profile_clock import Clock

ATTENTION_BLOCK: Final = "_attention"
FEED_FORWARDS: Final = ("_feed_forward", "_gemma_feed_forward")


@dataclass(slots=True)
class LayerSeconds:
    """Sums over all layers of one forward pass.

    Attributes:
        attention_s: Reading and writing keys and values.
        experts_s: Routed experts.
        attention_block_s: Attention with its projections, norms and rotation.
        ffn_s: Feed-forward with norms of its own, router and shared experts.
        chosen: (layer, expert) pairs that were read, of every layer its distinct ones.
    """

    attention_s: float = 0.0
    experts_s: float = 0.0
    attention_block_s: float = 0.0
    ffn_s: float = 0.0
    chosen: list[tuple[int, torch.Tensor]] | None = None


class TimedAttention:
    """`runtime.model.attention.Attention` that is timed."""

    def __init__(self, inner: Attention, clock: Clock, sums: LayerSeconds) -> None:
        self._inner, self._clock, self._sums = inner, clock, sums

    def begin(self, batch: StepBatch) -> None:
        """See ``Attention``."""
        start_s = self._clock()
        self._inner.begin(batch)
        self._sums.attention_s += self._clock() - start_s

    def __call__(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor | None,
        values: torch.Tensor | None,
        *,
        scale: float,
    ) -> torch.Tensor:
        """See ``Attention``."""
        start_s = self._clock()
        found = self._inner(layer, queries, keys, values, scale=scale)
        self._sums.attention_s += self._clock() - start_s
        return found


class TimedExperts:
    """`runtime.model.experts.Experts` that are timed; notes who was chosen."""

    def __init__(self, inner: Experts, clock: Clock, sums: LayerSeconds) -> None:
        self._inner, self._clock, self._sums = inner, clock, sums

    def __call__(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """See ``Experts``."""
        start_s = self._clock()
        found = self._inner(layer, hidden, experts, weights)
        self._sums.experts_s += self._clock() - start_s
        if self._sums.chosen is not None:
            self._sums.chosen.append((layer, experts))
        return found


@contextmanager
def timed_layers(decoder: Decoder, clock: Clock, sums: LayerSeconds) -> Iterator[None]:
    """Within it, attention blocks and feed-forward parts of the decoder add to ``sums``."""
    layers = decoder._layers
    names = (ATTENTION_BLOCK, *FEED_FORWARDS)
    before = [{name: layer.__dict__.get(name) for name in names} for layer in layers]
    for layer in layers:
        setattr(layer, names[0], _timed(getattr(layer, names[0]), clock, sums, "attention_block_s"))
        for name in FEED_FORWARDS:
            setattr(layer, name, _timed(getattr(layer, name), clock, sums, "ffn_s"))
    try:
        yield
    finally:
        for layer, held in zip(layers, before, strict=True):
            for name, value in held.items():
                if value is None:
                    delattr(layer, name)
                else:
                    setattr(layer, name, value)


def _timed(
    inner: Callable[..., Any], clock: Clock, sums: LayerSeconds, field: str
) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        start_s = clock()
        found = inner(*arguments, **named)
        setattr(sums, field, getattr(sums, field) + clock() - start_s)
        return found

    return call
