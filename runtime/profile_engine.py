"""What a step costs beside the model's forward pass: scheduling, widths, sampling, accounts."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from runtime.engine.build import build_engine
from runtime.engine.core import EngineCore
from runtime.engine.frames import NewSequence, Sampling
from runtime.engine.settings import EngineSettings
from runtime.model.step import StepBatch
from runtime.profile_clock import Clock

WARM_STEPS: Final = 4
PROMPT_TOKENS: Final = 16


def measure_overhead(
    settings: EngineSettings, clock: Clock, *, batches: Sequence[int], steps: int
) -> list[tuple[int, float]]:
    """(sequences, median seconds of a decode step less its forward pass).

    Args:
        settings: Of the engine; its precision policy is asked at every boundary as ever.
        clock: Seconds.
        batches: Numbers of sequences that decode together.
        steps: Steps each, after a few that are not counted.

    Raises:
        ValueError: As building the engine does.
    """
    parts = build_engine(settings)
    try:
        core, inner, forward_s = EngineCore(parts), parts.forward, [0.0]

        def forward(batch: StepBatch) -> torch.Tensor:
            start_s = clock()
            logits = inner(batch)
            forward_s[0] += clock() - start_s
            return logits

        parts.forward = forward
        random, found = np.random.default_rng(0), []
        for count in batches:
            for number in range(count):
                prompt = random.integers(0, parts.info.vocabulary, PROMPT_TOKENS)
                core.add(
                    NewSequence(
                        sequence_id=f"{count}/{number}",
                        prompt=tuple(prompt.tolist()),
                        sampling=Sampling(
                            max_tokens=WARM_STEPS + steps + 1, temperature=0.0, ignore_eos=True
                        ),
                    )
                )
            taken = []
            while core.has_work:
                forward_s[0], start_s = 0.0, clock()
                core.step()
                taken.append(clock() - start_s - forward_s[0])
            decoding = taken[WARM_STEPS : WARM_STEPS + steps]
            found.append((count, max(float(np.median(decoding)), 0.0)))
        return found
    finally:
        parts.close()
        gc.collect()
