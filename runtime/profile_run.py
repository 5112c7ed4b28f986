"""One profile of a model on this machine: all measurements, in order, under one budget."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from models.engine_profile import Provenance
from models.hf_config import read_hf_config
from runtime.engine.settings import EngineSettings, PrefixSettings
from runtime.model.load import load_model
from runtime.profile_clock import clock_of
from runtime.profile_engine import measure_overhead
from runtime.profile_fit import Measured
from runtime.profile_machine import (
    copy_bytes_per_s,
    cpu_name,
    flops_per_s,
    memory_bytes,
    versions,
)
from runtime.profile_rounds import LEAST_ROUNDS, measure_steps
from runtime.profile_steps import ModelSteps, StepPoint
from runtime.profile_tiers import TIERS, TierTimes, measure_tier
from runtime.profile_transfers import measure_page_copies

REFERENCE_BITS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    """What is measured.

    Attributes:
        batches, contexts: Of decode steps at the reference width.
        prompts, cached: New and cached tokens of prefill steps at the reference width.
        width_batches, width_prompts: Decode and prefill at every other width.
        overhead_batches, overhead_steps: Of whole engine steps.
        rounds: Of transfers.
        least_rounds: Of steps.
    """

    batches: Sequence[int] = (1, 2, 4, 8, 16, 32)
    contexts: Sequence[int] = (64, 512, 2048)
    prompts: Sequence[int] = (16, 64, 256, 512)
    cached: Sequence[int] = (0, 512, 2048)
    width_batches: Sequence[int] = (1, 4, 16)
    width_prompts: Sequence[int] = (64,)
    overhead_batches: Sequence[int] = (1, 8, 32)
    overhead_steps: int = 16
    rounds: int = 9
    least_rounds: int = LEAST_ROUNDS

    def points(self, widths: Sequence[int], context_tokens: int) -> list[StepPoint]:
        """All steps that the model's context has room for, each once."""
        reference = REFERENCE_BITS if REFERENCE_BITS in widths else widths[len(widths) // 2]
        longest = context_tokens - 1
        contexts = sorted({min(held, longest) for held in self.contexts})
        cached = sorted({min(held, longest // 2) for held in self.cached})
        found = [StepPoint(b, 1, held, reference) for b in self.batches for held in contexts]
        found += [
            StepPoint(1, added, held, reference)
            for added in self.prompts
            for held in cached
            if added + held <= context_tokens
        ]
        for bits in widths:
            if bits != reference:
                found += [StepPoint(b, 1, contexts[0], bits) for b in self.width_batches]
                found += [
                    StepPoint(1, n, 0, bits) for n in self.width_prompts if n <= context_tokens
                ]
        return list(dict.fromkeys(found))


QUICK: Final = ProfilePlan(
    batches=(1, 4, 16),
    contexts=(64, 512),
    prompts=(16, 64, 256),
    cached=(0, 256),
    width_batches=(1, 8),
    overhead_batches=(1, 8),
    overhead_steps=8,
    rounds=3,
    least_rounds=2,
)


def profile_model(
    settings: EngineSettings,
    *,
    plan: ProfilePlan,
    clock: str,
    budget_s: float,
    name: str,
    with_tiers: bool = True,
    place: Path | None = None,
    show: Callable[[str], Callable[[float, float], None]] = lambda label: lambda done, total: None,
) -> Measured:
    """Measure everything.

    Args:
        settings: Of the engine that is profiled.
        plan: What is measured.
        clock: ``wall`` or ``cpu``.
        budget_s: Wall seconds for the model's steps; loading and transfers come on top.
        name: Of the calibration.
        with_tiers: Whether places of the prefix store are measured.
        place: Where the SSD's temporary folder is made; None: where temporary ones are.
        show: Begins a phase, and is told how far it is.

    Raises:
        ValueError: As loading the model and building the engine do.
        ProfileError: If something cannot be measured.
    """
    ticks = clock_of(clock, settings.threads)
    torch.set_num_threads(settings.threads)
    folder = Path(settings.model)
    without_store = PrefixSettings(place="none")
    engine = _with_prefix(settings, without_store)
    progress = show("engine steps")
    progress(0, 1)
    overhead = measure_overhead(
        engine, ticks, batches=plan.overhead_batches, steps=plan.overhead_steps
    )
    progress(1, 1)
    copy, flops = copy_bytes_per_s(ticks), flops_per_s(ticks)
    model = load_model(
        folder, dtype=settings.dtype, device=settings.device, threads=settings.threads
    )
    context = min(settings.context_tokens or model.spec.context_tokens, model.spec.context_tokens)
    widths = (0,) if model.checkpoint is None else model.checkpoint.levels
    points = plan.points(widths, context)
    steps = ModelSteps(
        model,
        kv_tokens=max(point.sequences * (point.held + point.added) for point in points),
        held=max(point.held for point in points),
        threads=settings.threads,
        clock=ticks,
    )
    try:
        medians, rounds = measure_steps(
            points,
            steps.run,
            budget_s=budget_s,
            least_rounds=plan.least_rounds,
            show=show("model steps"),
        )
        layout, kv_value_bytes = steps.cache.layout, steps.kv_value_bytes
        kind, dtype = model.kind, str(model.dtype).removeprefix("torch.")
    finally:
        steps.close()
    del steps, model
    gc.collect()
    job_bytes, job_s = measure_page_copies(
        page_bytes=layout.page_bytes, rounds=plan.rounds, clock=ticks
    )
    tiers: dict[str, TierTimes] = {}
    if with_tiers:
        progress = show("prefix store")
        for number, tier in enumerate(TIERS):
            progress(number, len(TIERS))
            where = place or Path(tempfile.gettempdir())
            tiers[tier] = measure_tier(tier, folder, layout, rounds=plan.rounds, place=where)
        progress(len(TIERS), len(TIERS))
    return Measured(
        shape=read_hf_config(folder),
        kv_value_bytes=kv_value_bytes,
        steps=medians,
        overhead=overhead,
        copy_bytes_per_s=copy,
        flops_per_s=flops,
        memory_bytes=memory_bytes(),
        job_bytes=job_bytes,
        job_s=job_s,
        tiers=tiers,
        name=name,
        provenance=Provenance(
            cpu=cpu_name(),
            threads=settings.threads,
            clock=clock,
            versions=versions(),
            experts=kind,
            dtype=dtype,
            rounds=rounds,
        ),
    )


def _with_prefix(settings: EngineSettings, prefix: PrefixSettings) -> EngineSettings:
    import msgspec

    return msgspec.structs.replace(settings, prefix=prefix, decision_log=None)
