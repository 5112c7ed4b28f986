"""What an engine is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from models.kv_bytes import KvLayers
from policies.batching.first_come import FirstComeBatching
from policies.batching.policy import BatchingPolicy
from policies.precision_forecast import HORIZON_STEPS, forecast_kv_pages
from runtime.engine.frames import EngineInfo
from runtime.engine.grammar import GrammarCompiler
from runtime.engine.prefix_blocks import PrefixBlocks
from runtime.engine.private_folder import PrivateFolder
from runtime.engine.settings import EngineSettings
from runtime.model.kv_cache import KvCache
from runtime.model.step import StepBatch
from runtime.page_arena import PageArena
from runtime.page_movement import PageMover
from runtime.precision_control import PrecisionControl
from traces.decisions import DecisionLog

Forward = Callable[[StepBatch], torch.Tensor]


@dataclass(slots=True, kw_only=True)
class EngineParts:
    """Model, memory, policies and stores of one engine.

    Attributes:
        settings: As given.
        info: What is served.
        forward: One pass of the model: [m, vocabulary] float32 logits.
        arena: Pages of weights and KV.
        cache: Pages of sequences.
        accounts: The batching policy itself.
        batching: The same, logged.
        log: Decision log.
        clock: Seconds since the start of the run.
        mover, control: Of moving widths; None where experts are not quantized.
        prefix: Prefix store; None without one.
        grammars: Compiles what answers must look like; None without a tokenizer.
        temporary: Folder that goes with the engine.
    """

    settings: EngineSettings
    info: EngineInfo
    forward: Forward
    arena: PageArena
    cache: KvCache
    accounts: FirstComeBatching
    batching: BatchingPolicy
    log: DecisionLog
    clock: Callable[[], float]
    mover: PageMover | None = None
    control: PrecisionControl | None = None
    prefix: PrefixBlocks | None = None
    grammars: GrammarCompiler | None = None
    temporary: PrivateFolder | None = None

    def forecast_pages(self) -> int:
        """Pages the running sequences will need soon."""
        accounts, layout = self.accounts, self.cache.layout
        layers: tuple[KvLayers, ...] = layout.kv_layers()
        held = accounts.held_tokens
        return forecast_kv_pages(
            layers,
            held_tokens=held,
            prompt_tokens_left=accounts.known - held,
            decode_tokens_left=accounts.goal - accounts.known,
            horizon_steps=HORIZON_STEPS,
            page_bytes=layout.page_bytes,
            block_tokens=layout.block_tokens,
        )

    def quality(self) -> tuple[float, float]:
        """Average bits per expert weight, 0.0 where none are quantized; damage, 0.0 if unknown."""
        if self.control is not None:
            return self.control.quality()
        if self.mover is None:
            return 0.0, 0.0
        return float(self.mover.tables.bits.mean()), 0.0  # all blocks are at one width

    def close(self) -> None:
        """End threads and stores."""
        if self.prefix is not None:
            self.prefix.close()
        if self.mover is not None:
            self.mover.close()
        if self.temporary is not None:
            self.temporary.close()
