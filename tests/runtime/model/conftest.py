"""Tiny random checkpoints of every family, and a loop that steps a loaded model over pages."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 3,
}
DENSE = {**SIZES, "intermediate_size": 88, "head_dim": 32}
MOE = {**SIZES, "num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 56}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 16.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN_MOE = {**MOE, "moe_intermediate_size": 40}
GEMMA: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 4,
    "intermediate_size": 72,
    "head_dim": 32,
    "global_head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 97,
    "final_logit_softcapping": 5.0,
}
GEMMA_MOE = {
    **GEMMA,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 40,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**DENSE, "attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("llama", {**DENSE, "rope_parameters": LLAMA3}),
    "llama-linear": (
        "llama",
        {**DENSE, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral": ("mistral", {**DENSE, "sliding_window": 7}),
    "qwen2": (
        "qwen2",
        {**SIZES, "intermediate_size": 88, "hidden_size": 128, "use_sliding_window": True,
         "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen2-yarn": (
        "qwen2",
        {**SIZES, "intermediate_size": 88, "hidden_size": 128, "tie_word_embeddings": True,
         "rope_parameters": {**YARN, "original_max_position_embeddings": 64}},
    ),
    "qwen3": ("qwen3", DENSE),
    "qwen2_moe": (
        "qwen2_moe",
        {**QWEN_MOE, "hidden_size": 128, "shared_expert_intermediate_size": 72},
    ),
    "qwen2_moe-mixed": (
        "qwen2_moe",
        {**QWEN_MOE, "num_hidden_layers": 4, "hidden_size": 128, "decoder_sparse_step": 2,
         "shared_expert_intermediate_size": 72, "norm_topk_prob": True,
         "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**QWEN_MOE, "head_dim": 64, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "mixtral": (
        "mixtral",
        {**DENSE, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 11},
    ),
    "olmoe": ("olmoe", {**MOE, "hidden_size": 128, "clip_qkv": 0.7, "norm_topk_prob": True}),
    "olmoe-tied": ("olmoe", {**MOE, "hidden_size": 128, "tie_word_embeddings": True}),
    "gemma4": ("gemma4_text", GEMMA),
    "gemma4-moe": (
        "gemma4_text",
        {**GEMMA_MOE, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4-shared": (
        "gemma4_text",
        {**GEMMA, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
         "hidden_size_per_layer_input": 24},
    ),
}  # fmt: skip


def make_model(variant: str) -> Any:
    """A transformers model with random weights of a size that makes rotations and routers count."""
    import torch
    import transformers

    model_type, changes = VARIANTS[variant]
    config = transformers.AutoConfig.for_model(model_type, **changes)
    torch.manual_seed(11)
    with contextlib.redirect_stderr(io.StringIO()):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, tensor in model.named_parameters():
        scale = 0.3 if tensor.ndim == 1 else 1.2 * tensor.shape[-1] ** -0.5
        is_norm = tensor.ndim == 1 and "bias" not in name
        tensor.data = torch.randn_like(tensor) * scale + (1.0 if is_norm else 0.0)
    for name, tensor in model.named_buffers():
        if name.endswith("layer_scalar"):
            tensor.fill_(0.7)
    return model.eval()


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], Any]:
    """``tiny_model(variant)``: the float32 transformers model, made once."""
    models: dict[str, Any] = {}

    def get(variant: str) -> Any:
        if variant not in models:
            models[variant] = make_model(variant)
        return models[variant]

    return get


@pytest.fixture(scope="session")
def tiny_folder(
    tiny_model: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """``tiny_folder(variant, dtype)``: its checkpoint as transformers writes it."""
    folders: dict[tuple[str, str], Path] = {}

    def get(variant: str, dtype: str = "float32") -> Path:
        import torch

        if (variant, dtype) not in folders:
            model = tiny_model(variant)
            if dtype != "float32":
                model = make_model(variant).to(getattr(torch, dtype))
            folder = tmp_path_factory.mktemp(variant)
            with contextlib.redirect_stderr(io.StringIO()):
                model.save_pretrained(folder)
            folders[variant, dtype] = folder
        return folders[variant, dtype]

    return get


class Stepper:
    """Steps a decoder over sequences whose keys and values lie in an arena."""

    def __init__(self, decoder: Any, experts: Any, *, pages: int = 2000) -> None:
        import torch

        from runtime.model.attention_cpu import attention_for
        from runtime.model.kv_cache import KvCache
        from runtime.model.kv_layout import KvLayout, default_page_bytes
        from runtime.page_arena import PageArena

        self.decoder, self.experts = decoder, experts
        layers = decoder.spec.kv_layers
        page_bytes = default_page_bytes(layers, torch.float32)
        self.cache = KvCache(
            PageArena(pages, page_bytes=page_bytes), KvLayout(layers, torch.float32, page_bytes)
        )
        self.attention = attention_for(self.cache)

    def step(self, new: dict[int, list[int]], *, all_rows: bool = False) -> dict[int, Any]:
        """Logits after the last new token of every sequence, or after all of them."""
        from runtime.model.step import StepBatch

        for sequence, tokens in new.items():
            if sequence not in self.cache.sequences:
                self.cache.add(sequence)
            assert self.cache.grow(sequence, len(tokens))
        first = np.cumsum([0, *map(len, new.values())])
        rows = np.arange(first[-1]) if all_rows else first[1:] - 1
        batch = StepBatch(
            sequences=tuple(new),
            tokens=np.array([t for tokens in new.values() for t in tokens], np.int64),
            first=first.astype(np.int64),
            starts=np.array([self.cache.tokens(s) for s in new], np.int64),
            logit_rows=rows.astype(np.int64),
        )
        logits = self.decoder.forward(batch, self.attention, self.experts)
        for sequence, tokens in new.items():
            self.cache.advance(sequence, len(tokens))
        if all_rows:
            return {s: logits[first[i] : first[i + 1]] for i, s in enumerate(new)}
        return dict(zip(new, logits, strict=True))


@pytest.fixture
def stepper() -> Callable[..., Stepper]:
    """``stepper(loaded)`` or ``stepper(decoder, experts)``."""

    def make(loaded: Any, experts: Any = None) -> Stepper:
        if hasattr(loaded, "decoder"):
            return Stepper(loaded.decoder, loaded.experts)
        return Stepper(loaded, experts)

    return make
