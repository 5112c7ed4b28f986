"""An engine from its settings: model loaded, arena reserved, policies made."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import torch

from models.kv_paging import KvPaging
from policies.batching.first_come import FirstComeBatching
from policies.batching.log import LoggedBatching
from policies.batching.settings import BatchingSettings
from runtime.clock import RunClock
from runtime.engine.accelerator import Accelerator, open_accelerator
from runtime.engine.arena_memory import default_memory_bytes, free_bytes, memory_error
from runtime.engine.frames import EngineInfo
from runtime.engine.grammar import GrammarCompiler, GrammarError
from runtime.engine.parts import EngineParts, Forward
from runtime.engine.prefix_blocks import PrefixBlocks
from runtime.engine.prefix_identity import model_namespace
from runtime.engine.prefix_open import PrefixStoreSettings, open_prefix_blocks
from runtime.engine.private_folder import PrivateFolder, clear_abandoned
from runtime.engine.settings import EngineSettings, EngineSettingsError
from runtime.engine.weight_pages import (
    Movement,
    moving_precision,
    plan_widths,
    weights_in_pages,
)
from runtime.model.attention_cpu import attention_for
from runtime.model.attention_cuda import CudaLimits
from runtime.model.decode_graphs import DecodeGraphs
from runtime.model.experts import Experts
from runtime.model.kv_cache import KvCache
from runtime.model.kv_layout import KvLayout, default_page_bytes
from runtime.model.load import LoadedModel, load_model
from runtime.model.quantized_experts import QuantizedExperts
from runtime.model.spec_config import read_model_spec
from runtime.model.step import StepBatch
from runtime.page_arena import PageArena
from traces.decisions import CompactDecisionLog, DecisionLog


def build_engine(settings: EngineSettings, movement: Movement | None = None) -> EngineParts:
    """Load the model and make everything that an engine needs.

    Args:
        settings: Of model, memory, limits and policies.
        movement: How quantized weights get into the arena; None: by a thread of the CPU.

    Raises:
        EngineSettingsError: If the settings contradict the model or the machine.
        ValueError: As loading the model and opening the prefix store do, naming file and field.
    """
    accelerator = open_accelerator(settings.device)
    torch.set_num_threads(settings.threads)
    device = "cpu" if accelerator is None else accelerator.device
    _check_context(settings)
    model = load_model(
        settings.model, dtype=settings.dtype, device=device, threads=settings.threads
    )
    if accelerator is not None:
        movement = accelerator.movement(movement)
    log = CompactDecisionLog(max_calls=settings.decision_log_calls)
    layers = model.spec.kv_layers
    page_bytes = settings.page_bytes or default_page_bytes(layers, model.dtype)
    try:
        layout = KvLayout(layers, model.dtype, page_bytes)
        memory_bytes = settings.memory_bytes
        if memory_bytes is None:
            memory_bytes = default_memory_bytes(model, page_bytes, accelerator)
        available = free_bytes(accelerator)
        if memory_bytes > available:
            raise memory_error(memory_bytes, available, "ask for less")
        arena = PageArena(
            max(1, memory_bytes // page_bytes),
            page_bytes=page_bytes,
            device="cpu" if accelerator is None else accelerator.arena_device,
            history=movement.history if movement else None,
        )
    except ValueError as error:
        raise EngineSettingsError(str(error)) from error
    cache = KvCache(arena, layout)
    with contextlib.ExitStack() as undo:
        parts = _parts(settings, model, cache, log, movement, accelerator, undo)
        undo.pop_all()
    return parts


def _check_context(settings: EngineSettings) -> None:
    """Before the weights are read, which takes long."""
    if settings.context_tokens is None:
        return
    longest = read_model_spec(settings.model).context_tokens
    if settings.context_tokens > longest:
        raise EngineSettingsError(
            f"context_tokens (--context): must be <= {longest:,}, the longest sequence of "
            f"{settings.model}, found {settings.context_tokens:,}"
        )


def _parts(
    settings: EngineSettings,
    model: LoadedModel,
    cache: KvCache,
    log: DecisionLog,
    movement: Movement | None,
    accelerator: Accelerator | None,
    undo: contextlib.ExitStack,
) -> EngineParts:
    """What stands on model and arena; ``undo`` is told how to end it."""
    arena, layout = cache.arena, cache.layout
    weights = _Weights(model, settings, arena, log, movement, accelerator)
    undo.callback(weights.close)
    accounts = FirstComeBatching(
        layout.paging,
        BatchingSettings(max_running=settings.max_running, prefill_tokens=settings.prefill_tokens),
    )
    if accelerator is not None:
        accelerator.spare_block(cache)
    capacity = _tokens_in(layout.paging, arena.num_pages - weights.least_pages - cache.held_pages)
    context = settings.context_tokens or model.spec.context_tokens
    if capacity < 2:
        raise memory_error(
            settings.memory_bytes or arena.num_pages * arena.page_bytes,
            free_bytes(accelerator),
            f"{arena.num_pages} pages of {arena.page_bytes:,} bytes hold keys and values of "
            f"{capacity} tokens; give more",
        )
    forward = _forward(settings, model, cache, weights.experts, accelerator, context)
    temporary = None
    if settings.prefix.place == "memory":
        clear_abandoned()  # before the store is opened: that frees their shared memory
        temporary = PrivateFolder()
        undo.callback(temporary.close)
    place = settings.prefix.place if temporary is None else str(temporary.path)
    prefix = _open_prefix(settings, cache, place)
    if prefix is not None:
        undo.callback(prefix.close)
    info = EngineInfo(
        model=settings.model,
        model_type=model.spec.model_type,
        vocabulary=model.spec.vocabulary,
        context_tokens=context,
        kv_capacity_tokens=capacity,
        eos_token_ids=model.spec.end_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
        device=settings.device,
        experts=model.kind,
        block_tokens=layout.block_tokens,
        page_bytes=arena.page_bytes,
        arena_pages=arena.num_pages,
        has_prefix_store=prefix is not None,
    )

    return EngineParts(
        settings=settings,
        info=info,
        forward=forward,
        arena=arena,
        cache=cache,
        accounts=accounts,
        batching=LoggedBatching(accounts, log),
        log=log,
        clock=RunClock(),
        mover=weights.mover,
        control=weights.control,
        prefix=prefix,
        grammars=_grammars(model),
        temporary=temporary,
    )


def _forward(
    settings: EngineSettings,
    model: LoadedModel,
    cache: KvCache,
    experts: Experts | None,
    accelerator: Accelerator | None,
    context_tokens: int,
) -> Forward:
    """One pass of the model; on a GPU, decode steps are graphs."""
    if accelerator is None:
        attention = attention_for(cache, threads=settings.threads)

        def forward(batch: StepBatch) -> torch.Tensor:
            return model.decoder.forward(batch, attention, experts)

        return forward
    limits = CudaLimits.of(
        model.spec,
        max_sequences=settings.max_running,
        prefill_tokens=settings.prefill_tokens,
        context_tokens=context_tokens,
    )
    graphs = DecodeGraphs(
        model.decoder,
        accelerator.attention(cache, limits),
        experts,
        max_sequences=settings.max_running,
        capture=accelerator.capture(),
    )
    if not accelerator.is_emulated:  # there a graph costs as much as its step
        graphs.capture_all()
    return graphs.forward


class _Weights:
    """Experts of a model: plain ones as loaded, quantized ones in the arena."""

    def __init__(
        self,
        model: LoadedModel,
        settings: EngineSettings,
        arena: PageArena,
        log: DecisionLog,
        movement: Movement | None,
        accelerator: Accelerator | None,
    ) -> None:
        self.experts: Experts | None = model.experts
        self.mover = self.control = None
        self.least_pages = 0
        if model.checkpoint is None:
            return
        plan = plan_widths(
            model.checkpoint,
            settings,
            arena_pages=arena.num_pages,
            page_bytes=arena.page_bytes,
            layout=None if movement is None else movement.layout,
        )
        self.least_pages = plan.least_pages
        self.mover = weights_in_pages(model.checkpoint, arena, plan.bits, movement)
        self.control = moving_precision(plan, model.checkpoint, settings, self.mover, arena, log)
        observe = None if self.control is None else self.control.observe
        if accelerator is not None:
            self.experts = accelerator.experts(
                model.spec,
                arena,
                self.mover,
                max_rows=settings.max_running + settings.prefill_tokens,
                observe=observe,
            )
            return
        self.experts = QuantizedExperts(
            model.spec, arena, self.mover.tables, observe=observe, threads=settings.threads
        )

    def close(self) -> None:
        if self.mover is not None:
            self.mover.close()


def _tokens_in(paging: KvPaging, pages: int) -> int:
    """Most tokens that one sequence can have in so many pages, computed block by block."""
    low, high = 0, max(0, pages) * paging.block_tokens
    if paging.windows and not paging.whole_pages:
        high = 1 << 30
    while low < high:
        middle = (low + high + 1) // 2
        from_tokens = max(0, middle - paging.block_tokens)
        held = paging.held(np.array([middle]), np.array([from_tokens]))[0]
        low, high = (middle, high) if held <= pages else (low, middle - 1)
    return low


def _grammars(model: LoadedModel) -> GrammarCompiler | None:
    tokenizer = model.folder / "tokenizer.json"
    if not tokenizer.is_file():
        return None
    try:
        return GrammarCompiler(tokenizer, model.spec.vocabulary, model.spec.end_tokens)
    except GrammarError:
        return None  # said to whoever asks for structured output


def _open_prefix(settings: EngineSettings, cache: KvCache, place: str) -> PrefixBlocks | None:
    chosen = settings.prefix
    return open_prefix_blocks(
        PrefixStoreSettings(place=place, dram=chosen.memory_bytes, ssd=chosen.ssd_bytes),
        cache,
        lambda: model_namespace(Path(settings.model), cache.layout),
    )
