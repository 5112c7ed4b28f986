"""What one vLLM worker's part of a block holds, from what vLLM says of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import vllm
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from runtime.store.kv_blocks import KvBlocks
from runtime.store.vllm_identity import heads_text, is_latent, layers_text, layout_text
from runtime.store.vllm_orders import RankIdentity


def rank_identity(
    vllm_config: Any,
    kv_cache_config: Any,
    blocks: KvBlocks,
    kv_caches: Iterable[str],
    page_tokens: int,
) -> RankIdentity:
    """The identity of the worker this runs in.

    Args:
        vllm_config: Of the engine.
        kv_cache_config: Of this worker.
        blocks: Its pages.
        kv_caches: Names of its layers, in the order of ``blocks``.
        page_tokens: Tokens of an engine block.
    """
    names = list(kv_caches)
    layers = vllm_config.compilation_config.static_forward_context
    backends = [
        backend.get_name() for name in names if (backend := _backend(layers.get(name))) is not None
    ]
    heads = "latent"
    if not is_latent(kv_cache_config):
        heads = heads_text(
            vllm_config.model_config.get_total_num_kv_heads(),
            vllm_config.parallel_config.tensor_parallel_size,
            get_tensor_model_parallel_rank(),
        )
    layout = layout_text(
        blocks.signature,
        engine_version=vllm.__version__,
        backends=backends,
        device=blocks.device.type,
        page_tokens=page_tokens,
    )
    return RankIdentity(layout, layers_text(names), heads, blocks.block_bytes)


def _backend(layer: Any) -> Any:
    """A layer's attention backend, or None."""
    get: Callable[[], Any] | None = getattr(layer, "get_attn_backend", None)
    return None if get is None else get()
