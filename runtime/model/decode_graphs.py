"""Decode steps as captured graphs: one for each padded number of sequences.

A step in which every sequence has one new token is filled up to 1, 2, 4, ... rows and replayed:
tokens, positions, slots, tables, widths and pages are read from fixed addresses, so that nothing
that changes between two steps makes a new graph. Rows that fill up belong to no sequence: they
write to a spare block of their own, are sent to no expert, and their logits are not looked at.
All other steps are computed launch by launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import torch

from runtime.model.attention_cuda import CudaAttention
from runtime.model.decoder import Decoder
from runtime.model.experts import Experts
from runtime.model.experts_cuda import CudaExperts
from runtime.model.step import StepBatch
from runtime.model.step_upload import StepUpload

WARM_UP_RUNS: Final = 2

Compute = Callable[[], torch.Tensor]


class Capture(Protocol):
    """Makes a graph of launches."""

    def __call__(self, compute: Compute) -> Compute:
        """Replays the launches of ``compute``; the result is the same tensor every time."""


class DecodeGraphs:
    """Steps of a model on a device.

    Attributes:
        sizes: Rows of the graphs, ascending.
        replays: How many steps were replayed.

    Args:
        decoder: On the device of ``attention``.
        attention: With a spare block.
        experts: Of all layers; None in a model without. Ones that are not on pages are computed
            launch by launch: they look at the routing on the host.
        max_sequences: Of a step.
        capture: Makes graphs; None: every step is computed launch by launch.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: CudaAttention,
        experts: Experts | None,
        *,
        max_sequences: int,
        capture: Capture | None,
    ) -> None:
        self._decoder, self._attention, self._experts = decoder, attention, experts
        self._paged = experts if isinstance(experts, CudaExperts) else None
        if experts is not None and self._paged is None:
            capture = None
        self._capture = capture
        self.sizes = padded_sizes(max_sequences)
        self._live = StepUpload(1, decoder.device)
        self._graphs: dict[int, Compute] = {}
        self.replays = 0

    def capture_all(self) -> None:
        """Make all graphs before the first step.

        Rows of no sequence are enough to go by: launches depend on their number alone.
        """
        if self._capture is not None:
            self._attention.prepare()
            for size in reversed(self.sizes):  # the largest first: the others fit its memory
                self._begin(_NOBODY, size)
                self._graph(size)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """[m, vocabulary] float32, as ``Decoder.forward``; valid until the next step."""
        if self._paged is not None:
            self._paged.report()
        count = len(batch.tokens)
        if self._capture is None or not self.takes(batch):
            logits = self._decoder.forward(batch, self._attention, self._experts)
            if self._paged is not None:
                self._paged.step_done()
            return logits
        size = next(size for size in self.sizes if size >= count)
        self._begin(batch, size)
        logits = self._graph(size)()
        self.replays += 1
        if self._paged is not None:
            self._paged.step_done(count)
        return logits[:count]

    def takes(self, batch: StepBatch) -> bool:
        """Whether every sequence has one new token and speaks."""
        count = len(batch.tokens)
        is_decode = count == len(batch.sequences) == len(batch.logit_rows)
        return is_decode and count <= self.sizes[-1]

    def _begin(self, batch: StepBatch, size: int) -> None:
        self._attention.begin_padded(batch, size)
        self._live.write(np.array([len(batch.tokens)], np.int32))

    def _graph(self, size: int) -> Compute:
        if size not in self._graphs:
            assert self._capture is not None  # asked by those who capture
            self._graphs[size] = self._capture(lambda: self._compute(size))
        return self._graphs[size]

    def _compute(self, size: int) -> torch.Tensor:
        rows = self._attention.rows
        if self._paged is None:
            return self._launch(rows[:, :size])
        self._paged.live = self._live.numbers
        try:
            return self._launch(rows[:, :size])
        finally:
            self._paged.live = None

    def _launch(self, rows: torch.Tensor) -> torch.Tensor:
        return self._decoder.compute(
            rows[0].long(), rows[1].float(), self._attention, self._experts
        )


class CudaGraphCapture:
    """Graphs by torch, all in one pool of memory: they are replayed one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, compute: Compute) -> Compute:
        """See ``Capture``."""
        new_stream: Any = torch.cuda.Stream  # untyped in torch
        stream = new_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):  # loads kernels and makes what libraries keep
                compute()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph: Any = torch.cuda.CUDAGraph()
        # threads that copy pages go on meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = compute()
        self._pool = self._pool or graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay


def padded_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and ``most`` itself."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return tuple(sizes)


_NOBODY: Final = StepBatch(
    sequences=(),
    tokens=np.zeros(0, np.int64),
    first=np.zeros(1, np.int64),
    starts=np.zeros(0, np.int64),
    logit_rows=np.zeros(0, np.int64),
)
